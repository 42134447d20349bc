"""Does a run match a reference? README.md describes references.

python reference/check.py log               # with the reference of its preset
python reference/check.py log.txt           # of build-nanogpt, or nanoGPT's console output
python reference/check.py log my_reference
"""

import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tyro.conf import Positional

from support.cli import UserError, flag, parse_args, run
from support.run_folder import last_start, log_lines, run_entries

ROOT = Path(__file__).parents[1]
# Of the first losses of one seed, by precision: ten times what ranks, micro-batches and compilation
# were seen to cause (README.md).
FIRST_STEPS, TOLERANCE = 20, {"float32": 2e-5, "bfloat16": 2e-2}
SHARED = ("data", "init", "seq_len", "n_layer", "n_head", "n_embd")  # else there is no reference

NANOGPT_LOSS = re.compile(r"step (\d+): train loss .*, (val) loss (\S+)|iter (\d+): loss (\S+),")
NANOGPT_SETTING = re.compile(r"(\w+) = ['\"]?(?!resume)([\w.-]+)")
NANOGPT_NAMES = {"dataset": "data", "init_from": "init", "block_size": "seq_len"}


@dataclass(frozen=True)
class CheckConfig:
    """Compares a run's losses with a reference's; exit status 0 if they match, 1 if not."""

    log: Positional[str]  # log folder, log.txt or nanoGPT's output
    reference: Positional[str] = ""  # its folder; empty: that of the run's preset


@dataclass(frozen=True)
class Run:
    config: dict[str, Any]  # as far as known
    streams: dict[str, dict[int, float]]
    device: str


def read_run(path: Path) -> Run:
    """A run from its folder, its log.txt, or nanoGPT's console output."""
    log = path / "log.txt" if path.is_dir() else path
    if not log.is_file():
        raise UserError(f"{log}: no such file; name a run's folder or a log")
    text = log.read_text(encoding="utf-8", errors="replace")
    config, device, lines, streams = {}, "", [], {}
    if NANOGPT_LOSS.search(text):
        config = nanogpt_config(text)
        for val_step, val, loss, step, train in NANOGPT_LOSS.findall(text):
            lines.append((int(val_step or step), val or "train", loss or train))
    else:
        lines, entries = log_lines(log), run_entries(log.parent)
        if entries:
            config, device = entries[-1]["config"], entries[-1]["device"]
    for step, stream, value in lines[last_start(lines) :]:
        streams.setdefault(stream, {})[step] = float(value)
    return Run(config, streams, device)


def nanogpt_config(text: str) -> dict[str, Any]:
    """Settings from the head of nanoGPT's output, which shows those that differ from defaults."""
    head, found, rest = text.partition("tokens per iteration will be: ")
    if not found:
        return {}
    batch = int(rest.split()[0].replace(",", ""))
    config: dict[str, Any] = {"data": "openwebtext", "total_batch_size": batch}
    for name, value in NANOGPT_SETTING.findall(head):
        config[NANOGPT_NAMES.get(name, name)] = value
    return config


def read_bounds(path: Path) -> Iterator[tuple[int, str, float, float]]:
    """(tokens, stream, low, high) for each line of a check.txt."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            try:
                tokens, stream, low, high = line.split()
                yield int(tokens), stream, float(low), float(high)
            except ValueError:
                raise UserError(f"{path}: not `tokens stream low high`: {line}") from None


def comparable_values(run: Run, reference: Path, batch: int) -> list[Any]:
    """(what, step, value, low, high) of every value for which the reference has bounds."""
    found, seed = [], run_entries(reference)[-1]["config"].get("seed")
    for precision, tolerance in TOLERANCE.items():
        if f" {precision}:" in run.device and run.config["seed"] == seed:
            expected = read_run(reference).streams["train"]
            for step, value in run.streams.get("train", {}).items():
                if step < FIRST_STEPS and step in expected:
                    low, high = expected[step] - tolerance, expected[step] + tolerance
                    found.append(("train, same seed,", step, value, low, high))
    before = 0
    for tokens, stream, low, high in read_bounds(reference / "check.txt"):
        step, rest = divmod(tokens, batch)
        values = run.streams.get(stream, {})
        value = values.get(step)
        if stream == "train":  # the mean over the steps since the previous bound
            stretch = [values[s] for s in range(before, step) if s in values]
            value = statistics.fmean(stretch) if step - 1 in values else None
            before = step
        if value is not None and rest == 0:
            found.append((stream, step, value, low, high))
    return found


def compare(run: Run, reference: Path) -> tuple[bool, str]:
    """(whether a run matches, the verdict and what it rests on)."""
    entries, name, report = run_entries(reference), reference.name, ""
    if not entries:
        raise UserError(f"{reference}: no reference; there are those of shakespeare and gpt2")
    theirs = entries[-1]["config"]
    ours = theirs | run.config
    assumed = [key for key in (*SHARED, "total_batch_size") if key not in run.config]
    if assumed:
        values = " ".join(f"{flag(key)} {ours[key]}" for key in assumed)
        report = f"not in the log, so assumed as in {name}: {values}\n"
    for key in SHARED:
        value, expected = (Path(str(settings[key])).name for settings in (ours, theirs))
        if value != expected:
            return False, f"{report}no reference for {flag(key)} {value}: {name} has {expected}"

    values = comparable_values(run, reference, ours["total_batch_size"])
    outside, inside = [], {}
    for what, step, value, low, high in values:
        if not low <= value <= high:
            outside.append(f"step {step}: {what} {value:.6g} is outside {low:.6g} to {high:.6g}")
        elif step > 0:  # step 0 is the untrained model
            inside.setdefault(what, []).append((step, (high - low) / 2))
    if outside:
        count = f"{len(outside)} of {len(values)} values are outside"
        return False, f"{report}{outside[0]}\n{count}: does not match {name}"
    if not inside:
        return False, f"{report}no value after step 0 that {name} has: not compared"
    for what, found in inside.items():
        tolerance = max(width for _, width in found)
        report += f"{what} {len(found)} values to step {found[-1][0]}, within {tolerance:.2g}\n"
    return True, f"{report}matches {name}"


def main(args: list[str] | None = None) -> int:
    config = parse_args(CheckConfig, args=args)
    checked, reference = read_run(Path(config.log)), Path(config.reference)
    if not config.reference:
        preset = checked.config.get("preset", "gpt2")
        if preset == "auto":
            preset = "shakespeare" if checked.config["data"].endswith(".txt") else "gpt2"
        reference = ROOT / "reference" / preset
    matches, report = compare(checked, reference)
    print(report)
    return 0 if matches else 1


if __name__ == "__main__":
    run(main)

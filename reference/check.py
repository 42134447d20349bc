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

from support.cli import flag, parse_args, run
from support.errors import UserError
from support.run_log import last_start, log_lines, run_entries

ROOT = Path(__file__).parents[1]
# With the seed of the reference, the first losses must be the same up to rounding: at least ten
# times what ranks, micro-batches and compilation were seen to change (README.md), by precision.
FIRST_STEPS = 20
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
# Settings that a run and its reference must share to be compared.
SHARED = ("data", "init", "seq_len", "n_layer", "n_head", "n_embd")

# nanoGPT's console output: an evaluation, or an iteration; the head's settings; its names for ours.
NANOGPT_LOSS = re.compile(r"step (\d+): train loss .*, (val) loss (\S+)|iter (\d+): loss (\S+),")
NANOGPT_SETTING = re.compile(r"(\w+) = ['\"]?(?!resume)([\w.-]+)")
NANOGPT_NAMES = {"dataset": "data", "init_from": "init", "block_size": "seq_len"}


@dataclass(frozen=True)
class CheckConfig:
    """Compares a run's losses with a reference's; exit status 0 if they match, 1 if not."""

    log: Positional[str]  # log folder, log.txt or nanoGPT's output
    reference: Positional[str] = ""  # folder of the reference; empty: that of the run's preset


@dataclass(frozen=True)
class Run:
    config: dict[str, Any]  # as far as the log shows it
    streams: dict[str, dict[int, float]]  # stream -> step -> value
    device: str  # as in run.json, with the precision; "" if unknown


def read_run(path: Path) -> Run:
    """A run from its folder, its log.txt, or nanoGPT's console output."""
    log = path / "log.txt" if path.is_dir() else path
    if not log.is_file():
        raise UserError(f"{log}: no such file; name a run's folder or a log")
    text = log.read_text(encoding="utf-8", errors="replace")
    config = {}
    device = ""
    lines = []  # (step, stream, value)
    if NANOGPT_LOSS.search(text):
        config = nanogpt_config(text)
        for val_step, val, val_loss, step, loss in NANOGPT_LOSS.findall(text):
            lines.append((int(val_step or step), val or "train", val_loss or loss))
    else:
        lines = log_lines(log)
        entries = run_entries(log.parent)
        if entries:
            config = entries[-1]["config"]
            device = entries[-1]["device"]
    streams = {}
    for step, stream, value in lines[last_start(lines) :]:
        streams.setdefault(stream, {})[step] = float(value)
    return Run(config, streams, device)


def nanogpt_config(text: str) -> dict[str, Any]:
    """Settings from the head of nanoGPT's output, which shows only those that were changed."""
    head, found, rest = text.partition("tokens per iteration will be: ")
    if not found:
        return {}
    batch = int(rest.split()[0].replace(",", ""))
    config: dict[str, Any] = {"data": "openwebtext", "total_batch_size": batch}
    for name, value in NANOGPT_SETTING.findall(head):
        config[NANOGPT_NAMES.get(name, name)] = value
    return config


def read_bounds(path: Path) -> Iterator[tuple[int, str, float, float]]:
    """(training tokens, stream, lowest, highest value) for each line of a check.txt."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            try:
                tokens, stream, low, high = line.split()
                yield int(tokens), stream, float(low), float(high)
            except ValueError:
                raise UserError(f"{path}: not `tokens stream low high`: {line}") from None


def comparable_values(run: Run, reference: Path, batch: int) -> list[Any]:
    """(what, step, value, low, high) of every value for which the reference has bounds.

    batch: tokens per step of the run."""
    found = []
    seed = run_entries(reference)[-1]["config"].get("seed")
    for precision, tolerance in TOLERANCE.items():
        if f" {precision}:" in run.device and run.config["seed"] == seed:
            expected = read_run(reference).streams["train"]
            for step, value in run.streams.get("train", {}).items():
                if step < FIRST_STEPS and step in expected:
                    low = expected[step] - tolerance
                    high = expected[step] + tolerance
                    found.append(("train, same seed,", step, value, low, high))
    previous = 0  # step of the bound before
    for tokens, stream, low, high in read_bounds(reference / "check.txt"):
        step, rest = divmod(tokens, batch)
        values = run.streams.get(stream, {})
        value = values.get(step)
        if stream == "train":  # the mean since the previous bound, if the run got this far
            since = [values[s] for s in range(previous, step) if s in values]
            value = statistics.fmean(since) if step - 1 in values else None
            previous = step
        if value is not None and rest == 0:  # otherwise no step of this run ends there
            found.append((stream, step, value, low, high))
    return found


def compare(run: Run, reference: Path) -> tuple[bool, str]:
    """(whether a run matches, a report of the verdict and what it rests on)."""
    entries = run_entries(reference)
    name = reference.name
    report = ""
    if not entries:
        raise UserError(f"{reference}: not a reference; choose reference/shakespeare or gpt2")
    theirs = entries[-1]["config"]
    ours = theirs | run.config
    assumed = [key for key in (*SHARED, "total_batch_size") if key not in run.config]
    if assumed:
        values = " ".join(f"{flag(key)} {ours[key]}" for key in assumed)
        report = f"not in the log, so assumed as in {name}: {values}\n"
    for key in SHARED:
        value = Path(str(ours[key])).name  # --data may be a path: compare its last part
        expected = Path(str(theirs[key])).name
        if value != expected:
            return False, f"{report}no reference for {flag(key)} {value}: {name} has {expected}"

    values = comparable_values(run, reference, ours["total_batch_size"])
    outside = []
    inside = {}  # what -> [(step, half the width of its bounds)]
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
    checked = read_run(Path(config.log))
    reference = Path(config.reference)
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

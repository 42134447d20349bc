"""Does a run match a reference? README.md describes references.

python reference/check.py log               # with the reference of its preset
python reference/check.py log.txt           # of build-nanogpt, or nanoGPT's console output
python reference/check.py log my_reference
"""

import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tyro.conf import Positional

from support.cli import flag, parse_args, run
from support.errors import UserError
from support.run_log import last_start, log_lines, run_entries

# With the reference's seed the first losses must be the same up to rounding: at least ten times
# what ranks, micro-batches and compilation changed (README.md).
FIRST_STEPS = 20
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
LOSSES = ("train", "val")  # streams
# Settings that a run and its reference must share to be compared.
SHARED = ("data", "init", "seq_len", "n_layer", "n_head", "n_embd")
# Settings that the losses are to judge; the report names those that differ.
RECIPE = ("optimizer", "schedule", "max_lr", "min_lr", "warmup_steps", "warmdown_steps", "beta2")
RECIPE += ("weight_decay", "grad_clip", "total_batch_size", "max_steps", "shuffle")

# nanoGPT's console output: an evaluation or an iteration; a setting; its names for ours.
NUMBER = r"(-?\d+\.\d+|-?inf|nan)"
NANOGPT_LOSS = re.compile(
    rf"step (\d+): train loss .*, (val) loss {NUMBER}\s|iter (\d+): loss {NUMBER},"
)
NANOGPT_SETTING = re.compile(r"(?m)^(?:Overriding: )?(\w+) *= *['\"]?(?!resume)([\w.+-]+)")
NANOGPT_NAMES = {"dataset": "data", "init_from": "init", "block_size": "seq_len"}
NANOGPT_NAMES |= {"learning_rate": "max_lr", "warmup_iters": "warmup_steps"}
NANOGPT_NAMES |= {"max_iters": "max_steps"}

Value = tuple[str, int, float, float, float]  # what, step, value, lowest and highest allowed


@dataclass(frozen=True)
class CheckConfig:
    """Compares a run's losses with a reference's; exit status 0 if they match, 1 if not."""

    log: Positional[str]  # log folder, log.txt or nanoGPT's output
    reference: Positional[str] = ""  # folder of the reference; empty: that of the run's preset


@dataclass(frozen=True)
class Run:
    config: dict[str, Any]  # as far as the log shows it
    streams: dict[str, dict[int, float]]  # stream -> step -> value
    starts: list[dict[str, Any]]  # entries of run.json; [] without one


def read_run(path: Path) -> Run:
    """A run from its folder, its log.txt, or nanoGPT's console output."""
    log = path / "log.txt" if path.is_dir() else path
    if not log.is_file():
        raise UserError(f"{log}: no such file; name a run's folder or a log")
    text = log.read_text(encoding="utf-8", errors="replace")
    losses = list(NANOGPT_LOSS.finditer(text))
    if losses:
        lines = []  # (step, stream, value)
        for val_step, val, val_loss, step, loss in (match.groups() for match in losses):
            lines.append((int(val_step or step), val or "train", val_loss or loss))
        starts = []
        first = last_start(lines)
        begin = losses[first - 1].end() if first else 0  # where the run before ends
        config = nanogpt_config(text[begin : losses[first].start()])
    else:
        lines = log_lines(log)
        first = last_start(lines)
        starts = run_entries(log.parent)
        config = starts[-1].get("config", {}) if starts else {}
    streams = {}
    for step, stream, value in lines[first:]:
        streams.setdefault(stream, {})[step] = float(value)
    return Run(config, streams, starts)


def nanogpt_config(head: str) -> dict[str, Any]:
    """Settings in the head of nanoGPT's output, which shows only changed ones."""
    batch = re.search(r"tokens per iteration will be: ([1-9][\d,]*)\s", head)
    if not batch:
        return {}
    config: dict[str, Any] = {"data": "openwebtext"}
    for name, value in NANOGPT_SETTING.findall(head):
        config[NANOGPT_NAMES.get(name, name)] = value
    config["total_batch_size"] = int(batch[1].replace(",", ""))
    return config


def tolerances(starts: list[dict[str, Any]]) -> list[float]:
    """How far each of the first losses may be off: by the coarsest precision up to its step.

    inf for others, such as float16, whose first updates are skipped."""
    found = [math.inf] * FIRST_STEPS
    for start in starts:  # each replaces the steps of earlier ones from its first step on
        device = start.get("device", "")
        known = [value for name, value in TOLERANCE.items() if f" {name}:" in device]
        first = start.get("step", 0)
        found[first:] = (known or [math.inf]) * (FIRST_STEPS - first)
    return list(accumulate(found, max))


def read_bounds(path: Path) -> Iterator[tuple[int, str, float, float]]:
    """(training tokens, stream, lowest, highest value) for each line of a check.txt."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            try:
                tokens, stream, low, high = line.split()
                yield int(tokens), stream, float(low), float(high)
            except ValueError:
                raise UserError(f"{path}: not `tokens stream low high`: {line}") from None


def first_losses(run: Run, other: Run) -> Iterator[Value]:
    """The first losses, with bounds around those of a run with the same seed."""
    widths = map(max, tolerances(run.starts), tolerances(other.starts))
    for step, width in enumerate(widths):
        value = run.streams.get("train", {}).get(step)
        expected = other.streams.get("train", {}).get(step)
        if value is not None and expected is not None and width < math.inf:
            low = round(expected - width, 6)  # as many digits as in the log
            high = round(expected + width, 6)
            yield "train, same seed,", step, value, low, high


def bounded_values(run: Run, bounds: Path, batch: int) -> Iterator[Value]:
    """Every value that a check.txt has bounds for. batch: tokens per step of the run."""
    previous = 0  # step of the training bound before
    reached = {}  # stream -> (steps, bounds) where it was last compared
    for tokens, stream, low, high in read_bounds(bounds):
        step, rest = divmod(tokens, batch)
        steps = [step]
        if stream == "train":  # the mean since the previous bound
            steps = range(previous, step)
            previous = step
        values = run.streams.get(stream, {})
        # Only if a step of this run ends there and no loss is missing (a log of every tenth).
        if rest == 0 and steps and all(s in values for s in steps):
            yield stream, step, statistics.fmean(values[s] for s in steps), low, high
            reached[stream] = (steps, low, high)
    for stream in LOSSES:
        if stream in reached:  # has it diverged since?
            steps, low, high = reached[stream]
            limit = high + (high - low)
            latest = sorted(run.streams[stream])[-len(steps) :]
            mean = statistics.fmean(run.streams[stream][step] for step in latest)
            if latest[-1] > steps[-1] and mean > limit:
                yield f"{stream}, at the end,", latest[-1], mean, 0.0, limit


def matches(run: Run, reference: Path) -> bool:
    """Prints what the verdict rests on, and the verdict."""
    entries = run_entries(reference)
    name = reference.name
    if not entries:
        raise UserError(f"{reference}: not a reference; choose reference/shakespeare or gpt2")
    theirs = entries[-1].get("config", {})
    ours = theirs | run.config
    needed = (*SHARED, "total_batch_size")
    missing = " ".join(flag(key) for key in needed if key not in ours)
    if missing:
        raise UserError(f"{reference}: its run.json lacks {missing}; copy that of a run")
    assumed = " ".join(f"{flag(key)} {ours[key]}" for key in needed if key not in run.config)
    if assumed:
        print(f"not in the log, so assumed as in {name}: {assumed}")
    for key in SHARED:
        if not same(ours[key], theirs[key]):
            value = Path(str(ours[key])).name
            expected = Path(str(theirs[key])).name
            print(f"no reference for {flag(key)} {value}: {name} has {expected}")
            return False
    changed = ", ".join(
        f"{flag(key)} {ours[key]} ({theirs[key]})"
        for key in RECIPE
        if key in theirs and not same(ours[key], theirs[key])
    )
    if changed:
        print(f"settings unlike {name}'s: {changed}")
    for stream in LOSSES:
        for step, value in run.streams.get(stream, {}).items():
            if not math.isfinite(value):
                print(f"step {step}: {stream} {value}: does not match {name}")
                return False

    values = []
    if run.config.get("seed", "unknown") == theirs.get("seed"):
        values += first_losses(run, read_run(reference))
    values += bounded_values(run, reference / "check.txt", ours["total_batch_size"])
    outside = []
    inside = {}  # what -> [(step, half the width of its bounds)]
    for what, step, value, low, high in values:
        if not low <= value <= high:
            outside.append(f"step {step}: {what} {value:.8g} is outside {low:.8g} to {high:.8g}")
        elif step > 0:  # step 0 is the untrained model
            inside.setdefault(what, []).append((step, (high - low) / 2))
    if outside:
        print(outside[0])
        print(f"{len(outside)} of {len(values)} values are outside: does not match {name}")
        return False
    for what, found in inside.items():
        tolerance = max(width for _, width in found)
        print(f"{what} {len(found)} values to step {found[-1][0]}, within {tolerance:.2g}")
    print(f"matches {name}" if inside else f"no value after step 0 that {name} has: not compared")
    return bool(inside)


def same(ours: Any, theirs: Any) -> bool:
    """True for equal settings; of a path, such as --data, the last part counts."""
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return Path(str(ours)).name == Path(str(theirs)).name


def main(args: list[str] | None = None) -> int:
    config = parse_args(CheckConfig, args=args)
    checked = read_run(Path(config.log))
    reference = Path(config.reference)
    if not config.reference:
        preset = checked.config.get("preset", "gpt2")
        if preset == "auto":
            preset = "shakespeare" if checked.config.get("data", "").endswith(".txt") else "gpt2"
        reference = Path(__file__).parent / preset
    return 0 if matches(checked, reference) else 1


if __name__ == "__main__":
    run(main)

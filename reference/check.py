"""Do a run's losses match those of a reference? README.md describes references.

python reference/check.py log               # with the reference of its preset
python reference/check.py log.txt           # of build-nanogpt
python reference/check.py log my_reference
python reference/check.py log_2 log         # two runs: how far their losses differ
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tyro.conf import Positional

from support.command_line import flag, parse_args
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.run_files import log_lines, run_entries
from support.tokenizer import VOCAB_SIZE

# With the reference's seed the first losses must be the same up to rounding. In float32 this is
# ten times what ranks, micro-batches and compilation changed (README.md).
FIRST_STEPS = 20
# TF32 rounds to an eighth of bfloat16's steps. Emulated on a CPU, it changed 6e-5 in shakespeare.
TOLERANCE = {"float32": 1e-5, "tf32": 2.5e-3, "bfloat16": 2e-2}
# Settings that a run and its reference must share to be compared.
SHARED = {"script", "data", "init", "vocab_size", "seq_len", "n_layer", "n_head", "n_embd"}
Streams = dict[str, dict[int, float]]  # {stream: {step: value}}


@dataclass(frozen=True)
class CheckConfig:
    """Compares a run's losses with a reference's; exit status 0 if they match, 1 if not.

    It also compares two runs, without judging them."""

    log: Positional[Path]  # log folder, or log.txt
    # folder of a reference, or another run; by default the reference of the run's preset
    reference: Positional[Path | None] = None


@dataclass(frozen=True)
class Value:
    """A value of a log with its bounds."""

    name: str
    step: int
    value: float
    low: float
    high: float


def read_streams(log: Path) -> Streams:
    if not log.is_file():
        raise UserError(f"{log}: no such file; name a run's folder or its log.txt")
    streams = {}
    for step, stream, value in log_lines(log):
        streams.setdefault(stream, {})[step] = float(value)
    return streams


def log_of(run: Path) -> Path:
    """The log.txt of a run, which may be named by its folder."""
    return run / "log.txt" if run.is_dir() else run


def compare_runs(runs: list[Path]) -> None:
    """Prints how far the first training losses of two runs differ, and their last losses."""
    logs = [read_streams(log_of(run)) for run in runs]
    ours, theirs = (streams.get("train", {}) for streams in logs)
    shared = [step for step in range(FIRST_STEPS) if step in ours and step in theirs]
    print(f"of the first {FIRST_STEPS} training losses, both runs have {len(shared)}")
    if shared:
        difference = max(abs(ours[step] - theirs[step]) for step in shared)
        print(f"their largest difference is {difference:.2g}")
    for run, streams in zip(runs, logs, strict=True):
        last = []
        for stream, name in (("train", "training"), ("val", "validation")):
            if values := streams.get(stream):
                step = max(values)
                last.append(f"{name} loss {values[step]:.4f} at step {step}")
        print(f"{run}: {', '.join(last) or 'no losses'}")


def first_losses(ours: Streams, theirs: Streams, width: float) -> Iterator[Value]:
    """The first training losses, with bounds around those of a run with the same seed."""
    for step in range(FIRST_STEPS):
        value = ours.get("train", {}).get(step)
        expected = theirs.get("train", {}).get(step)
        if value is not None and expected is not None:
            yield Value("train, same seed", step, value, expected - width, expected + width)


def bounded_values(streams: Streams, bounds: Path, batch: int) -> Iterator[Value]:
    """The values that check.txt has bounds for. batch: tokens per step of the run."""
    begin = 0  # the first step of a mean of training losses
    for line in bounds.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        try:
            tokens, stream, low, high = line.split()
            step, rest = divmod(int(tokens), batch)
            low, high = float(low), float(high)
        except ValueError:
            raise UserError(f"{bounds}: not `tokens stream low high`: {line}") from None
        steps = [step]
        if stream == "train":  # the mean since the previous bound
            steps, begin = range(begin, step), step
        values = streams.get(stream, {})
        # Only if a step of this run ends there, and no loss is missing.
        if rest == 0 and steps and all(s in values for s in steps):
            yield Value(stream, step, statistics.fmean(values[s] for s in steps), low, high)


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings of a run's last start, or {} without run.json."""
    entries = run_entries(run)
    if not entries:
        return {}
    last = {"vocab_size": VOCAB_SIZE, "script": "train_gpt2.py"} | entries[-1]
    return last["config"] | {key: last[key] for key in ("vocab_size", "script")}


def check_comparable(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    """Print what differs in the settings. Raise RunError if the losses are not comparable."""
    changed = []
    for key in sorted(ours.keys() & theirs.keys() - {"log_dir", "resume"}):
        # Of a path, such as --data, the last part counts.
        value, expected = Path(str(ours[key])).name, Path(str(theirs[key])).name
        if value == expected:
            continue
        if key in SHARED:
            raise RunError(f"no reference for {key} {value}: {name} has {expected}")
        changed.append(f"{flag(key)} {value} ({expected})")
    if changed:
        print(f"settings that differ from {name}'s: {', '.join(changed)}")


def verdict(values: list[Value], name: str) -> bool:
    """Prints what the verdict rests on, and the verdict."""
    outside = [v for v in values if not v.low <= v.value <= v.high]
    if outside:
        v = outside[0]
        fault = f"outside {v.low:.8g} to {v.high:.8g}" if isfinite(v.value) else "not finite"
        print(f"step {v.step}: {v.name} {v.value:.8g} is {fault}")
        print(f"{len(outside)} of {len(values)} values are outside: does not match {name}")
        return False
    trained = [v for v in values if v.step > 0]  # step 0 is the untrained model
    for stream in dict.fromkeys(v.name for v in trained):
        found = [v for v in values if v.name == stream]
        width = max(v.high - v.low for v in found) / 2
        print(f"{stream}: {len(found)} values to step {found[-1].step}, within {width:.2g}")
    print(f"matches {name}" if trained else f"no value after step 0 that {name} has: not compared")
    return bool(trained)


def main(args: list[str] | None = None) -> int:
    config = parse_args(CheckConfig, args=args)
    if config.reference is not None and not (config.reference / "check.txt").exists():
        compare_runs([config.log, config.reference])
        return 0
    log = log_of(config.log)
    streams = read_streams(log)
    ours = settings_of(log.parent)
    reference = config.reference
    if reference is None:
        reference = Path(__file__).parent / ours.get("preset", "gpt2")
    name = reference.name
    theirs = settings_of(reference)
    if not theirs:
        raise RunError(f"no reference for the preset {name}: there are shakespeare and gpt2")
    if not ours:
        print(f"no run.json next to {log}: the settings are assumed to be those of {name}")
    check_comparable(ours, theirs, name)
    values = [  # outside of any bounds, since no number is between nan and nan
        Value(stream, step, value, nan, nan)
        for stream in ("train", "val")
        for step, value in streams.get(stream, {}).items()
        if not isfinite(value)
    ]
    if ours and ours.get("seed") == theirs.get("seed", "unknown"):
        starts = run_entries(log.parent) + run_entries(reference)
        width = max(TOLERANCE.get(start["dtype"], inf) for start in starts)
        if isfinite(width):  # not float16, whose first updates are skipped
            values += first_losses(streams, read_streams(reference / "log.txt"), width)
    values += bounded_values(streams, reference / "check.txt", (theirs | ours)["total_batch_size"])
    return 0 if verdict(values, name) else 1


if __name__ == "__main__":
    run_and_exit(main)

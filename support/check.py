"""Whether a run matches a reference (`train_gpt2.py --check-against FOLDER`).

A reference is the log folder of a run (log.txt, run.json) with a check.txt of two kinds of lines, `#` begins a remark:

    first STEPS PRECISION STREAM TOLERANCE    of a run with the reference's seed, the first values are the reference's
    TOKENS STREAM LOW HIGH                    of any run, the value there lies between bounds

The first kind is sharp: from the same weights on the same tokens only rounding may differ, so a mistake in the model,
the optimizer or the schedule shows within a few steps. The second says whether a run of another seed ends where it
should.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from support.cli import InputError
from support.rundir import last_config, read_log

Milestone = tuple[int, str, float, float]  # (tokens, stream, lowest, highest value)


@dataclass
class Reference:
    """What check.txt says, and the run that its first lines are about."""

    folder: Path
    milestones: list[Milestone] = field(default_factory=list)
    first: list[tuple[int, str, str, float]] = field(default_factory=list)  # (steps, precision, stream, tolerance)


def read_reference(folder: Path) -> Reference:
    """Reads FOLDER/check.txt. Raises InputError."""
    path, reference = folder / "check.txt", Reference(folder)
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            match line.split():
                case ["first", steps, precision, stream, tolerance]:
                    reference.first.append((int(steps), precision, stream, float(tolerance)))
                case [tokens, stream, low, high] if not line.startswith("#"):
                    reference.milestones.append((int(tokens), stream, float(low), float(high)))
                case words if words and not line.startswith("#"):
                    raise ValueError
    except OSError:
        raise InputError(f"{path}: no such reference; there are reference/shakespeare and reference/gpt2") from None
    except ValueError:
        raise InputError(f"{path}: neither `tokens stream low high` nor `first steps precision stream tolerance`: "
                         f"{line}") from None
    return reference


def measure(log_dir: Path, points: list[tuple[int, str]], total_batch_size: int) -> list[tuple[int, float | None]]:
    """(step, value) of a run's log at each (tokens, stream); None where the log has no value.

    A training loss is the mean over the steps since the point before; other streams are as logged at that step.
    """
    streams, found, before = read_log(log_dir), [], 0
    for tokens, stream in points:
        step, rest = divmod(tokens, total_batch_size)
        steps, values = streams.get(stream, ([], []))
        if stream == "train":
            last_steps = [v for s, v in zip(steps, values, strict=True) if before <= s < step]
            value = sum(last_steps) / len(last_steps) if last_steps and steps[-1] >= step - 1 else None
            before = step
        else:
            value = dict(zip(steps, values, strict=True)).get(step)
        found.append((step, None if rest else value))
    return found


def compare(log_dir: Path, reference: Reference, total_batch_size: int, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether a run's log, made in `dtype`, matches, and a sentence that says so, to end with the folder's name."""
    precision, checked = str(dtype).removeprefix("torch."), 0
    if reference.first and last_config(log_dir).get("seed") == last_config(reference.folder).get("seed"):
        ours, theirs = read_log(log_dir), read_log(reference.folder)
        for steps, of_precision, stream, tolerance in reference.first:
            pairs = zip(*ours.get(stream, ([], [])), *theirs.get(stream, ([], [])), strict=False)
            for step, value, _, expected in pairs if of_precision == precision else ():
                if step >= steps:
                    break
                if not abs(value - expected) <= tolerance:
                    return False, (f"step {step}: {stream} {value:.6f}, with the same seed {expected:.6f} give or take "
                                   f"{tolerance:g} in {precision}: does not match")
                checked += 1
    values = measure(log_dir, [milestone[:2] for milestone in reference.milestones], total_batch_size)
    for (_, stream, low, high), (step, value) in zip(reference.milestones, values, strict=True):
        if value is not None and not low <= value <= high:
            return False, f"step {step}: {stream} {value:.4f} is outside {low} to {high}: does not match"
        checked += value is not None
    if not checked:
        return False, "no value was logged at any token count of"
    return True, f"{checked} values compared: matches"

"""Whether a run's log matches a reference: `train_gpt2.py --check-against FOLDER`, which reads FOLDER/check.txt."""

from pathlib import Path

from support.cli import InputError
from support.rundir import read_log

Milestone = tuple[int, str, float, float]  # (tokens, stream, lowest, highest value)


def read_milestones(reference: Path) -> list[Milestone]:
    """The lines `tokens stream low high` of a reference folder's check.txt; # begins a remark. Raises InputError."""
    path, milestones = reference / "check.txt", []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                tokens, stream, low, high = line.split()
                milestones.append((int(tokens), stream, float(low), float(high)))
    except OSError:
        raise InputError(f"{path}: no such reference; there are reference/shakespeare and reference/gpt2") from None
    except ValueError:
        raise InputError(f"{path}: not `tokens stream low high`: {line}") from None
    return milestones


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


def compare(log_dir: Path, milestones: list[Milestone], total_batch_size: int) -> tuple[bool, str]:
    """Whether a run's log stays within the milestones, and a sentence that says so, to be ended with their name."""
    values = measure(log_dir, [milestone[:2] for milestone in milestones], total_batch_size)
    for (_, stream, low, high), (step, value) in zip(milestones, values, strict=True):
        if value is not None and not low <= value <= high:
            return False, f"step {step}: {stream} {value:.4f} is outside {low} to {high}: does not match"
    checked = sum(value is not None for _, value in values)
    if not checked:
        return False, "no value was logged at any token count of"
    return True, f"{checked} of {len(milestones)} values compared: matches"

"""What every script shares: flags of the command line, and lines on the console."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from support.errors_and_signals import UserError

SHAPE = ("n_layer", "n_head", "n_embd")  # settings of a model that weights of --init bring along


def torchrun_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) from torchrun or Slurm's script; (0, 0, 1) without."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 0, 1
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    found = {name: os.environ.get(name, "") for name in names}
    numbers = [int(found[name]) for name in names[:4] if found[name].isdecimal()]
    if len(numbers) < 4 or numbers[0] >= numbers[2] or not all(found.values()):
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        raise UserError(f"{values}: start with torchrun, which sets them all, or unset them")
    return tuple(numbers[:3])


def flag(field_name: str) -> str:
    """The command-line flag for a setting: max_steps -> --max-steps."""
    return "--" + field_name.replace("_", "-")


def differences(before: dict[str, Any], config: Any, may_change: set[str]) -> list[str]:
    """The settings of a run before that differ now, except those in may_change.

    before: {} or the run's settings; one that it lacks, as a fork may have added it, counts as its
    default. config: a TrainConfig"""
    now = asdict(config)
    before = before and asdict(type(config)()) | before
    return [
        f"{flag(name)} was {value}, is {now.get(name, 'no flag of this code')}"
        for name, value in before.items()
        if name not in may_change and shown(value) != shown(now.get(name))
    ]


def range_problems(config: Any, at_least_1: set[str]) -> list[str]:
    """What is wrong with the numbers of a TrainConfig: negative, not a number, or far too large."""
    problems = []
    for name, default in asdict(type(config)()).items():
        value = getattr(config, name)
        if isinstance(value, int | float) and default >= 0:  # a fork's may be negative
            minimum = 1 if name in at_least_1 else 0
            # A matrix whose shape has more than 20 bits would have too many bytes.
            exponent = 20 if name in SHAPE else 63
            if not minimum <= value < 2**exponent:  # this is also true of nan
                bounds = f"at least {minimum} and below 2**{exponent}"
                problems.append(f"{flag(name)} {value}: must be {bounds}")
    return problems


def parse_args(config_class: type, args: Sequence[str] | None = None, **options: Any) -> Any:
    """Reads the command line (`args`, or sys.argv[1:]) into `config_class`.

    `options` go to tyro, which itself reports a wrong flag and exits with status 2."""
    import tyro

    rank0 = torchrun_ranks()[0] == 0
    # console_outputs=False still prints some errors
    with contextlib.redirect_stderr(sys.stderr if rank0 else io.StringIO()):
        return tyro.cli(config_class, args=args, console_outputs=rank0, **options)


def print_line(message: str) -> None:
    """Prints on this rank. A run goes on when its terminal is closed, so errors are ignored."""
    with contextlib.suppress(OSError):
        print(message, flush=True)


def print0(message: str) -> None:
    """Prints on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print_line(message)


def warn(message: str, label: str = "warning") -> None:
    """Prints a line that begins with `label` to stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(f"{label}: {message}", file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Prints a line that begins with `note: ` to stderr, on rank 0 only."""
    warn(message, "note")


def progress_bar(iterable: Iterable[Any] | None, unit: str, **options: Any) -> tqdm:
    """A bar of tqdm on a terminal. Elsewhere it prints nothing."""
    return tqdm(iterable, unit=unit, leave=False, disable=None, **options)


def shown(value: Any) -> str:
    """As text; a path inside the working folder is relative to it."""
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(value).relative_to(Path.cwd()))
    return str(value)


def few(names: Iterable[str]) -> str:
    """The first three names in the alphabet, and how many more there are."""
    in_order = sorted(set(names))
    more = f" and {len(in_order) - 3} more" if len(in_order) > 3 else ""
    return ", ".join(in_order[:3]) + more


def duration(seconds: float) -> str:
    """A time for people: 0 min 40 s, 19 h 8 min, or 3.5 days."""
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 72:
        return f"{seconds / 86_400:,.1f} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"

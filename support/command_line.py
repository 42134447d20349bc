"""Command-line flags and console output, shared by all scripts."""

import contextlib
import io
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from support.errors_and_signals import print_error

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig


def flag(field_name: str) -> str:
    """Return the flag of a field: max_steps -> --max-steps."""
    return "--" + field_name.replace("_", "-")


def range_problems(config: "TrainConfig", above_0: set[str]) -> list[str]:
    """Return an error message for each number that is negative, nan or too large.

    The settings named in `above_0` must not be 0 either."""
    problems = []
    for name, default in asdict(type(config)()).items():
        value = getattr(config, name)
        # A fork may add a setting whose default is None or negative; leave that one alone.
        if isinstance(value, int | float) and isinstance(default, int | float) and default >= 0:
            if not 0 <= value < 2**63:  # also catches nan
                problems.append(f"{flag(name)} {value}: must be at least 0 and below 2**63")
            elif value == 0 and name in above_0:
                problems.append(f"{flag(name)} {value}: must be above 0")
    return problems


def restore_fields(config_class: type, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `stored`, read from JSON, that are fields of a dataclass.

    JSON turns tuples into lists. Convert them back wherever the default is not a list."""

    def restore(value: Any, default: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind = list if isinstance(default, list) else tuple
        inner = default[0] if isinstance(default, list | tuple) and default else kind()
        return kind(restore(element, inner) for element in value)

    defaults = vars(config_class())
    return {key: restore(stored[key], defaults[key]) for key in stored if key in defaults}


def print_changes(
    previous: dict[str, Any], now: dict[str, Any], ignore: Collection[str] = ()
) -> None:
    """Print a line for each setting whose value changed."""
    for name, value in previous.items():
        if name in now and now[name] != value and name not in ignore:
            print0(f"{flag(name)}: {value} -> {now[name]}")


def parse_args(config_class: type, args: Sequence[str] | None = None, **options: Any) -> Any:
    """Parse the command line, `args` or sys.argv[1:], into `config_class`.

    `options` are passed to tyro.cli(), which reports an invalid flag and exits with status 2."""
    import tyro

    rank0 = os.environ.get("RANK", "0") == "0"
    # Redirect stderr, because tyro prints some errors even with console_outputs=False.
    with contextlib.redirect_stderr(sys.stderr if rank0 else io.StringIO()):
        return tyro.cli(config_class, args=args, console_outputs=rank0, **options)


def print_line(message: str) -> None:
    """Print a line on this rank. Ignore errors, so that a run survives a closed terminal."""
    with contextlib.suppress(OSError):
        # A single write, so that lines from different ranks are not interleaved
        print(f"{message}\n", end="", flush=True)


def print0(message: str) -> None:
    """Print a line on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print_line(message)


def warn(message: str, label: str = "warning") -> None:
    """Print `label: message` to stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print_error(f"{label}: {message}")


def note(message: str) -> None:
    """Print `note: message` to stderr, on rank 0 only."""
    warn(message, "note")


def progress_bar(iterable: Iterable[Any] | None, unit: str, **options: Any) -> tqdm:
    """Return a tqdm progress bar, which appears only on a terminal."""
    return tqdm(iterable, unit=unit, leave=False, **{"disable": None, **options})


def display_path(value: Any) -> str:
    """Return `value` as a string. Paths in the working directory become relative to it."""
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(value).relative_to(Path.cwd()))
    return str(value)


def absolute(path: str) -> str:
    """Make the path of an existing file or folder absolute. Return any other string unchanged."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def duration(seconds: float) -> str:
    """Format a duration for humans: 0 min 40 s, 19 h 8 min, or 3.5 days."""
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 72:
        return f"{seconds / 86_400:,.1f} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"

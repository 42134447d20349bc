"""What every script shares: flags of the command line, and lines on the console."""

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
    """The command-line flag for a setting: max_steps -> --max-steps."""
    return "--" + field_name.replace("_", "-")


def range_problems(config: "TrainConfig", above_0: set[str]) -> list[str]:
    """What is wrong with the numbers of a TrainConfig: negative, not a number, or far too large."""
    problems = []
    for name, default in asdict(type(config)()).items():
        value = getattr(config, name)
        # A fork may have a setting that is negative, or None.
        if isinstance(value, int | float) and isinstance(default, int | float) and default >= 0:
            if not 0 <= value < 2**63:  # this is also true of nan
                problems.append(f"{flag(name)} {value}: must be at least 0, below 2**63")
            elif value == 0 and name in above_0:
                problems.append(f"{flag(name)} {value}: must be above 0")
    return problems


def is_utf8(text: str) -> bool:
    """False if an argument has bytes that are no text. Python reads them as lone surrogates."""
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False


def restore_fields(config_class: type, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields that JSON has stored, as the types of its defaults.

    JSON makes lists of tuples. Keys that are no fields are left out."""

    def restore(value: Any, default: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind = list if isinstance(default, list) else tuple
        inner = default[0] if isinstance(default, list | tuple) and default else kind()
        return kind(restore(element, inner) for element in value)

    defaults = vars(config_class())
    return {key: restore(stored[key], defaults[key]) for key in stored if key in defaults}


def print_changes(
    before: dict[str, Any], now: dict[str, Any], ignore: Collection[str] = ()
) -> None:
    """Prints a line for each setting that has another value now."""
    for name, value in before.items():
        if name in now and now[name] != value and name not in ignore:
            print0(f"{flag(name)}: {value} -> {now[name]}")


def parse_args(config_class: type, args: Sequence[str] | None = None, **options: Any) -> Any:
    """Reads the command line (`args`, or sys.argv[1:]) into `config_class`.

    `options` go to tyro, which itself reports a wrong flag and exits with status 2."""
    import tyro

    rank0 = os.environ.get("RANK", "0") == "0"
    # console_outputs=False still prints some errors
    with contextlib.redirect_stderr(sys.stderr if rank0 else io.StringIO()):
        return tyro.cli(config_class, args=args, console_outputs=rank0, **options)


def print_line(message: str) -> None:
    """Prints on this rank. A run goes on when its terminal is closed, so errors are ignored."""
    with contextlib.suppress(OSError):
        print(f"{message}\n", end="", flush=True)  # in one call: lines of several ranks may meet


def print0(message: str) -> None:
    """Prints on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print_line(message)


def warn(message: str, label: str = "warning") -> None:
    """Prints a line that begins with `label` to stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print_error(f"{label}: {message}")


def note(message: str) -> None:
    """Prints a line that begins with `note: ` to stderr, on rank 0 only."""
    warn(message, "note")


def progress_bar(iterable: Iterable[Any] | None, unit: str, **options: Any) -> tqdm:
    """Return a bar of tqdm, which prints only on a terminal."""
    return tqdm(iterable, unit=unit, leave=False, **{"disable": None, **options})


def shown(value: Any) -> str:
    """As text; a path inside the working folder is relative to it."""
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(value).relative_to(Path.cwd()))
    return str(value)


def absolute(path: str) -> str:
    """The absolute path of a file or a folder that exists. Any other text stays as it is."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def duration(seconds: float) -> str:
    """A time for people: 0 min 40 s, 19 h 8 min, or 3.5 days."""
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 72:
        return f"{seconds / 86_400:,.1f} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"

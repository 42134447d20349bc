"""What every script shares: flags, lines on the console, and how a process exits."""

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.errors import LostRank, RunError, UserError
from support.signals import received

# System errors that the user can fix, with a hint where the system's own message has none.
HINTS = dict.fromkeys((errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "")
HINTS |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; choose a writable place")
HINTS |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space")
HINTS[errno.EMFILE] = "; raise it with `ulimit -n`"


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
    """Prints to stderr; dropped if it can't be printed."""
    with contextlib.suppress(OSError):
        print(f"{label}: {message}", file=sys.stderr, flush=True)


def shown(value: Any) -> str:
    """As text; a path inside the working folder is relative to it."""
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(value).relative_to(Path.cwd()))
    return str(value)


def run(main: Callable[[], int | None]) -> None:
    """Calls main() and exits with its result, or after one `error: ` line.

    UserError and common system errors exit with status 2, RunError with 1. Any other exception is
    a bug and keeps its traceback."""
    prepare_stdout()
    rank, world_size = 0, 1
    try:
        rank, _, world_size = torchrun_ranks()
        status = main() or 0
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        sys.exit(1)
    except Exception as error:
        message = message_for_user(error)
        if message is None:
            raise
        print_error(message, rank, world_size, lost=isinstance(error, LostRank))
        status = 1 if isinstance(error, RunError) else 2
        if world_size > 1:  # a normal exit would wait for collectives that never complete
            os._exit(status)
        sys.exit(status)
    if "RANK" in os.environ:  # gloo's threads can abort the interpreter's clean-up
        atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


def prepare_stdout() -> None:
    """Makes `> file` readable while we run, and safe for any character, even if not UTF-8."""
    if sys.stdout is None:  # the process that started us has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    atexit.register(flush_stdout)


def flush_stdout() -> None:
    """At exit drops what can't be printed, since Python would exit with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def message_for_user(error: Exception) -> str | None:
    """The one line about an error that the user can fix or should know; None if it is a bug."""
    if isinstance(error, UserError | RunError):
        return str(error)
    if isinstance(error, OSError) and error.errno in HINTS:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}{HINTS[error.errno]}"
    return None


def print_error(message: str, rank: int, world_size: int, lost: bool) -> None:
    """Prints the `error: ` line, once where all ranks fail alike. lost: another rank has exited.

    Rank 0 prints at once and exits, so torchrun ends the others. They wait for that first: if they
    are still here, rank 0 did not fail."""
    if world_size > 1 and (rank > 0 or lost):
        if lost and received:  # torchrun is already ending this rank because another one failed
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    name = f"rank {rank}: " if rank else ""
    warn(f"{name}{message}", "error")

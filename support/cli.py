"""Flags, errors, signals and exit status: what every script here shares."""

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class UserError(Exception):
    """What the user can fix, with exit status 2. One line says what is wrong and the way out."""


class RunError(Exception):
    """A run with valid input cannot continue: exit status 1. The message is one line."""


class LostRank(RunError):
    """A collective failed because another rank has exited."""


def torchrun_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) from torchrun or Slurm's script; (0, 0, 1) without."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 0, 1
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ.get(name, "") for name in names}
    numbers = [int(found[name]) for name in names[:3] if found[name].isdecimal()]
    if len(numbers) < 3 or numbers[0] >= numbers[2] or not all(found.values()):
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        raise UserError(f"{values}: start with torchrun, which sets them all, or unset them")
    return tuple(numbers)


def print0(message: str, every_rank: bool = False) -> None:
    """Prints on rank 0, or on every rank. A full disk under the output doesn't end the run."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        try:
            print(message, flush=True)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise


def warn(message: str, label: str = "warning") -> None:
    """Prints to stderr; a warning must not be what ends the run."""
    with contextlib.suppress(OSError):
        print(f"{label}: {message}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shown(path: str | Path) -> str:
    """A path relative to the working folder if it is inside it; unchanged otherwise."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return str(path)


def flag(field_name: str) -> str:
    """A setting's name on the command line: max_steps -> --max-steps."""
    return "--" + field_name.replace("_", "-")


def parse_args(config_class: type, args: Sequence[str] | None = None, **options: Any) -> Any:
    """Reads the command line (`args`, or sys.argv[1:]) into `config_class`.

    `options` go to tyro, which reports a wrong flag itself, and exits with 2."""
    import tyro

    rank0 = torchrun_ranks()[0] == 0
    # console_outputs=False still prints some errors
    with contextlib.redirect_stderr(sys.stderr if rank0 else io.StringIO()):
        return tyro.cli(config_class, args=args, console_outputs=rank0, **options)


# System errors that the user can fix, with a hint where the system's own message has none.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
HINTS = dict.fromkeys((errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "")
HINTS |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; choose a writable place")
HINTS |= dict.fromkeys(FULL_DISK, "; free some space")


received: list[int] = []  # SIGINT, SIGTERM and SIGUSR1 (Slurm's), after collect_stop_signals()


def collect_stop_signals() -> list[int]:
    """From now on these signals are appended to `received` instead of ending the process.

    A second SIGINT exits at once."""
    received.clear()

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT in received:
            os._exit(130)
        received.append(number)

    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # Windows lacks the last
            signal.signal(getattr(signal, name), note)
    return received


def run(main: Callable[[], int | None]) -> None:
    """Calls main() and exits: with its result, or after one `error: ` line with 2 or 1 (RunError).

    Other exceptions are bugs and keep their traceback. An error that all ranks share appears once:
    rank 0 prints it and exits, and torchrun ends the others within their two seconds."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    # `> file` can be followed, and takes any character even if it is not UTF-8 (Windows).
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    rank, world_size = 0, 1
    try:
        rank, _, world_size = torchrun_ranks()
        status = main() or 0
        if "RANK" in os.environ:  # gloo's threads can abort the interpreter's clean-up
            atexit._run_exitfuncs()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(status)
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails
        sys.exit(1)
    except Exception as error:
        message, status = str(error), 1 if isinstance(error, RunError) else 2
        if isinstance(error, OSError) and error.errno in HINTS:
            name = f"{error.filename}: " if error.filename else ""
            message = f"{name}{error.strerror}{HINTS[error.errno]}"
        elif not isinstance(error, UserError | RunError):
            raise
        lost = isinstance(error, LostRank)
        wait = world_size > 1 and (rank > 0 or lost)
        if wait and lost and received:
            os._exit(status)  # torchrun is ending this rank since another has failed
    if wait:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    name = f"rank {rank}: " if rank else ""
    warn(f"{name}{message}", "error")
    if world_size > 1:  # a normal exit would wait for collectives that no longer complete
        os._exit(status)
    sys.exit(status)

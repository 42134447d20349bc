"""Flags, errors, signals and exit status: what every script here shares."""

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
    """Invalid input: exit status 2. The message is one line that says what is wrong and how to fix
    it."""


class RunError(Exception):
    """A run with valid input cannot continue: exit status 1. The message is one line."""


class LostRank(RunError):
    """A collective failed because another rank has exited."""


def torchrun_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) from torchrun or Slurm's script; (0, 0, 1) in a plain
    process."""
    rank, local_rank, world_size = (
        os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    return int(rank or 0), int(local_rank or 0), int(world_size or 1)


def print0(message: str) -> None:
    """Prints on rank 0 only."""
    if torchrun_ranks()[0] == 0:
        print(message, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shown(path: str | Path) -> str:
    """A path relative to the working folder if it is inside it; unchanged otherwise."""
    return str(
        Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else path
    )


def flag(field_name: str) -> str:
    """A setting's name on the command line: max_steps -> --max-steps."""
    return "--" + field_name.replace("_", "-")


def parse_args(config_class: type, default: Any = None, args: Sequence[str] | None = None) -> Any:
    """Reads the command line (`args`, or sys.argv[1:]) into `config_class`, with `default` in place
    of its own defaults. tyro reports a wrong flag itself, and exits with status 2."""
    import tyro

    defaults, rank0 = {} if default is None else {"default": default}, torchrun_ranks()[0] == 0
    with contextlib.redirect_stderr(
        sys.stderr if rank0 else io.StringIO()
    ):  # it misses some errors
        return tyro.cli(config_class, args=args, console_outputs=rank0, **defaults)


def check_writable(path: str) -> None:
    """Call before long work. Raises UserError if the folder of `path` is missing or not
    writable."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise UserError(f"{path}: there is no folder {Path(path).parent}")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{path}: no write access to its folder; choose another")


# System errors that the user can fix, with a hint where the system's own message has none.
USER_ERRNOS = {number: "" for number in (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)}
USER_ERRNOS |= {
    number: "; choose a writable place" for number in (errno.EACCES, errno.EPERM, errno.EROFS)
}
USER_ERRNOS |= {number: "; free some space" for number in (errno.ENOSPC, errno.EDQUOT)}


def user_error(error: BaseException) -> str | None:
    """The line to show for an error that the user can fix; None for a bug of ours."""
    if isinstance(error, OSError) and error.errno in USER_ERRNOS:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}{USER_ERRNOS[error.errno]}"
    return str(error) if isinstance(error, UserError) else None


def collect_stop_signals() -> list[int]:
    """From now on SIGINT, SIGTERM and SIGUSR1 (Slurm's, before the time limit) do not end the
    process, but are appended to the returned list; a second SIGINT exits at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT in received:
            os._exit(130)
        received.append(number)

    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # Windows lacks the last
            signal.signal(getattr(signal, name), note)
    return received


def run(main: Callable[[], int | None]) -> None:
    """Calls main() and exits: with its result, or after one `error: ` line with 2 (invalid input)
    or 1 (RunError). Any other exception is a bug, and keeps its traceback.

    In a torchrun job an error that all ranks share appears once: rank 0 prints it and exits at
    once, upon which torchrun ends the other ranks while they wait. A rank that failed alone prints
    after two seconds."""
    # So that `> file` can be followed, and takes any character where its encoding is not UTF-8
    # (Windows).
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    rank, _, world_size = torchrun_ranks()
    try:
        sys.exit(main() or 0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has closed
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the flush at exit would fail, too
        sys.exit(1)
    except Exception as error:
        message, status = (str(error), 1) if isinstance(error, RunError) else (user_error(error), 2)
        if message is None:
            raise
        wait = world_size > 1 and (rank > 0 or isinstance(error, LostRank))
    if wait:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    print(f"error: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr, flush=True)
    if world_size > 1:  # a normal exit would wait for collectives that no longer complete
        os._exit(status)
    sys.exit(status)

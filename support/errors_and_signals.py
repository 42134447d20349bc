"""Errors, stop signals, and the exit status: how a process ends.

Exit status 0 means done, 2 that the user's input was wrong, and 1 any other error. A run that was
stopped by a signal exits with 130 or 143."""

import atexit
import contextlib
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

# --------------------------------------------------------------------------------------------------
# Errors


class UserError(Exception):
    """Something that the user can fix. Its one line says what is wrong and how to fix it."""


class RunError(Exception):
    """A run with valid input cannot go on. The message is one line."""


class LostRank(RunError):
    """An exchange failed, probably since another rank has ended."""


FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError)
FILE_ERRORS += (NotADirectoryError, IsADirectoryError)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # full, over the quota, read-only
# What torch says on its several devices when memory is short.
NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC"
    "|Storage size calculation overflowed"
)
EXCHANGE = re.compile("NCCL|gloo")  # Both name themselves when an exchange fails.


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))


@contextlib.contextmanager
def name_smaller_batch(B: int, low_memory: bool) -> Iterator[None]:
    """If training with micro-batches of B runs out of memory, raise a UserError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        remedy = f"--micro-batch-size {B // 2}"
        if B == 1:
            remedy = "a smaller --seq-len" if low_memory else "--low-memory, or a smaller --seq-len"
        problem = f"out of memory with --micro-batch-size {B} ({first_line(error)})"
        raise UserError(f"{problem}; {remedy} takes less") from None


def explain(error: Exception) -> Exception:
    """A UserError or a RunError for what is no bug. Any other error is returned as it is."""
    of_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
    if isinstance(error, FILE_ERRORS) or of_disk:
        name = f"{error.filename}: " if error.filename else ""
        remedy = "; free some space" if of_disk and error.errno != errno.EROFS else ""
        return UserError(f"{name}{error.strerror}{remedy}")
    text = str(error)
    if isinstance(error, RuntimeError) and EXCHANGE.search(text):
        remedy = "probably since another rank has ended: see its error, or torchrun's report"
        return LostRank(f"an exchange between ranks failed, {remedy}. {text.strip()}")
    if is_out_of_memory(error):
        return UserError(
            f"out of memory ({first_line(error)}); a smaller batch or model takes less"
        )
    if is_compiler_error(error):
        error.add_note("--compile off trains without torch.compile.")
    return error


def is_compiler_error(error: BaseException | None) -> bool:
    return "BackendCompilerFailed" in [kind.__name__ for kind in type(error).__mro__]


# --------------------------------------------------------------------------------------------------
# Stop signals: a run that receives one saves and exits after the current update or evaluation.
#
# They are SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closes), and SIGUSR1, which Slurm can send
# before a time limit. A signal may reach only some of the ranks, so each has a flag, and train()
# sums the flags of all.

AFTER_SIGINT, AFTER_OTHERS = 1.0, 1000.0  # values of the flag


class StopSignals:
    """`with StopSignals() as signals:` sets signals.flag when the process receives a stop signal.

    The flag is 0 before, then 1 if the first signal is SIGINT and 1,000 if it is another one. So
    the sum of up to 999 flags tells the exit status. After the first SIGINT the next one is
    Python's KeyboardInterrupt, or with several ranks, which cannot unwind alone, ends the process.
    At the end of a single rank the previous handlers are restored."""

    def __init__(self) -> None:
        self.flag = 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks the last two.
            if number and signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                self.previous[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            several_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
            again = (lambda *_: os._exit(130)) if several_ranks else signal.default_int_handler
            signal.signal(signal.SIGINT, again)
        if self.flag == 0:
            self.flag = AFTER_SIGINT if number == signal.SIGINT else AFTER_OTHERS
        if os.environ.get("RANK", "0") == "0":
            line = f"\n{signal.Signals(number).name}: the run will stop as soon as it can save."
            if number == signal.SIGINT:
                line += " Another Ctrl-C ends it at once, and loses what is not saved."
            # A print could interrupt another one. With `2>&1 | tee` Ctrl-C has ended its reader.
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        # Several ranks end now, and torchrun sends SIGTERM to all after the first has ended.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            for number, handler in self.previous.items():
                signal.signal(number, handler)
        if self.flag and is_compiler_error(error):  # Ctrl-C also ends torch's compiler processes.
            problem = "stopped by a signal while torch was compiling"
            raise RunError(f"{problem}: --resume continues from the newest checkpoint") from None


def exit_status(flags: float) -> int:
    """Return that of a stopped run, by the sum of its ranks' flags: 130 after SIGINT, else 143."""
    return 143 if flags >= AFTER_OTHERS else 130


# --------------------------------------------------------------------------------------------------
# Exit


def run_and_exit(main: Callable[[], int | None]) -> None:
    """Call main() and exit with its result, or print one `error: ` line and exit.

    A UserError exits with status 2, a RunError with 1. Any other error keeps its traceback."""
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # `> file` is readable at once
    atexit.register(flush_stdout)
    several_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        status = main() or 0
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        sys.exit(1)
    except Exception as raised:
        error = explain(raised)
        status = 2 if isinstance(error, UserError) else 1
        rank = os.environ.get("RANK", "0")
        if not isinstance(error, UserError | RunError):
            if not several_ranks:
                raise
            traceback.print_exc()
        elif rank == "0" or "TORCHELASTIC_ERROR_FILE" not in os.environ:
            print_error(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}")
        if several_ranks:
            report_to_torchrun(error)
            os._exit(status)  # A normal exit would wait for collectives that never complete.
        sys.exit(status)
    if "RANK" in os.environ:  # gloo's threads can abort the interpreter's clean-up
        atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


def report_to_torchrun(error: Exception) -> None:
    """Write the error into the file from which torchrun names the rank that failed first.

    An error of one line is written without its traceback. A lost rank is not recorded, and waits,
    or torchrun would name it instead of the rank that has ended."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, LostRank):
        time.sleep(2)
        return
    try:
        raise error
    except Exception:  # record_exception() writes the traceback of the error that is handled
        if isinstance(error, UserError | RunError):
            error.__traceback__ = error.__cause__ = error.__context__ = None
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def print_error(line: str) -> None:
    """Print a line to stderr in one call, since the lines of several ranks may meet there."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def flush_stdout() -> None:
    """At exit, drop what can't be printed, since Python would exit with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

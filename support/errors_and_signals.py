"""How a process ends: errors, stop signals and exit status.

Exit status: 0 success, 1 error, 2 invalid user input, 130 stopped by SIGINT, 143 stopped by another
signal."""

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
    """A mistake the user can fix. The one-line message says what is wrong and how to fix it."""


class RunError(Exception):
    """Any other anticipated failure, such as a non-finite loss. The message is one line."""


class LostRank(RunError):
    """A collective failed, probably because another rank exited."""


FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError)
FILE_ERRORS += (NotADirectoryError, IsADirectoryError)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, over quota, file too large
# torch's out-of-memory messages on its various devices
NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC"
    "|Storage size calculation overflowed"
)
COLLECTIVE = re.compile("NCCL|gloo")  # both appear in their errors


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def suggest_smaller_batch(B: int) -> Iterator[None]:
    """Turn an out-of-memory error at micro-batch size B into a UserError with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not NO_MEMORY.search(str(error)):
            raise
        remedy = f"--micro-batch-size {B // 2}" if B > 1 else "--low-memory or a smaller --seq-len"
        problem = f"out of memory with --micro-batch-size {B} ({first_line(error)})"
        raise UserError(f"{problem}; {remedy} needs less memory") from None


def explain(error: Exception) -> Exception:
    """Return a UserError or RunError for an anticipated error, and any other error unchanged."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FILE_ERRORS) or number in (*FULL, errno.EROFS, errno.EMFILE):
        name = f"{error.filename}: " if error.filename else ""
        remedy = "; free some space" if number in FULL else ""
        return UserError(f"{name}{error.strerror}{remedy}")
    text = str(error)
    if isinstance(error, RuntimeError) and NO_MEMORY.search(text):
        return UserError(f"out of memory ({first_line(error)}); use a smaller batch or model")
    if isinstance(error, RuntimeError) and COLLECTIVE.search(text):
        remedy = "probably because another rank exited: see its error, or torchrun's report"
        return LostRank(f"a collective operation failed, {remedy}. {text.strip()}")
    if is_compiler_error(error):
        error.add_note("--compile off trains without torch.compile.")
    return error


def is_compiler_error(error: BaseException | None) -> bool:
    return "BackendCompilerFailed" in [kind.__name__ for kind in type(error).__mro__]


# --------------------------------------------------------------------------------------------------
# Stop signals: on receiving one, a run saves and exits after the current update or evaluation.
#
# They are SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closes), and SIGUSR1, which Slurm can send
# before a time limit. A signal may reach only some of the ranks, so each rank has its own flag, and
# train() sums the flags over all ranks.

AFTER_SIGINT, AFTER_OTHERS = 1.0, 1000.0  # values of the flag


class StopSignals:
    """A context manager that sets `flag` when the process receives a stop signal.

    The flag is 0 until then, 1 if the first signal is SIGINT, and 1,000 if it is another one, so
    that the sum of up to 999 flags determines the exit status. A second SIGINT raises
    KeyboardInterrupt in a single process. With multiple ranks, it ends the process at once, because
    one rank cannot unwind alone. A single process restores the previous handlers on exit."""

    def __init__(self) -> None:
        self.flag = 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows lacks the last two
            # Respect ignored signals, e.g. SIGHUP under nohup.
            if number and signal.getsignal(number) != signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number: int, frame: Any) -> None:
        """Handle a signal: set the flag, and say so on rank 0."""
        if number == signal.SIGINT:
            multiple_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
            again = (lambda *_: os._exit(130)) if multiple_ranks else signal.default_int_handler
            signal.signal(signal.SIGINT, again)
        if self.flag == 0:
            self.flag = AFTER_SIGINT if number == signal.SIGINT else AFTER_OTHERS
        if os.environ.get("RANK", "0") == "0":
            line = f"\n{signal.Signals(number).name}: the run will stop as soon as it can save."
            if number == signal.SIGINT:
                line += " Another Ctrl-C ends it at once and loses unsaved progress."
            # os.write(), because print() is not reentrant. It may fail: under `2>&1 | tee`, Ctrl-C
            # has already ended tee.
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        # With multiple ranks, keep the handlers until the process exits, because torchrun sends
        # SIGTERM to the others once the first rank has exited.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            for number, handler in self.previous.items():
                signal.signal(number, handler)
        if self.flag and is_compiler_error(error):  # Ctrl-C also kills torch's compiler processes
            problem = "stopped by a signal while torch was compiling"
            raise RunError(f"{problem}: --resume continues from the newest checkpoint") from None


def exit_status(flags: float) -> int:
    """Return the exit status for the sum of all ranks' flags: 130 after SIGINT, else 143."""
    return 143 if flags >= AFTER_OTHERS else 130


# --------------------------------------------------------------------------------------------------
# Exit


def run_and_exit(main: Callable[[], int | None]) -> None:
    """Call main() and exit with its result, or print one `error: ` line and exit.

    A UserError exits with status 2, a RunError with 1. Any other error prints its traceback."""
    # Line buffering makes `> file` readable while the process runs.
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    atexit.register(flush_stdout)
    multiple_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        status = main() or 0
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, e.g. `head`, has exited
        sys.exit(1)
    except Exception as raised:
        error = explain(raised)
        status = 2 if isinstance(error, UserError) else 1
        rank = os.environ.get("RANK", "0")
        if not isinstance(error, UserError | RunError):
            if not multiple_ranks:
                raise
            traceback.print_exc()
        elif rank == "0" or "TORCHELASTIC_ERROR_FILE" not in os.environ:
            print_error(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}")
        if multiple_ranks:
            report_to_torchrun(error)
            os._exit(status)  # a normal exit would wait for collectives that never complete
        sys.exit(status)
    if "RANK" in os.environ:  # skip interpreter shutdown, which gloo's threads can abort
        atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


def report_to_torchrun(error: Exception) -> None:
    """Write the error to the file from which torchrun reports the first rank that failed.

    One-line errors are written without a traceback. A rank that failed only because another one did
    waits and writes nothing, so that torchrun blames the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, LostRank):
        time.sleep(2)
        return
    try:
        raise error
    except Exception:  # record_exception() formats the exception being handled
        if isinstance(error, UserError | RunError):
            error.__traceback__ = error.__cause__ = error.__context__ = None
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def print_error(line: str) -> None:
    """Print a line to stderr in one write, so that lines from different ranks do not interleave."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def flush_stdout() -> None:
    """Flush stdout at exit. If that fails, drop its buffer, or Python would exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

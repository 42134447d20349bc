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
from collections.abc import Callable
from typing import Any

# --------------------------------------------------------------------------------------------------
# Errors


class UserError(Exception):
    """Something that the user can fix. Its one line says what is wrong and how to fix it."""


class RunError(Exception):
    """A run with valid input cannot go on. The message is one line."""


class LostRank(RunError):
    """An exchange failed, probably since another rank has ended."""


# Errors of the operating system that the user can fix, with a remedy if it is not obvious.
SYSTEM_ERRORS = {
    errno.ENOENT: "",
    errno.EEXIST: "",
    errno.ENOTDIR: "",
    errno.EISDIR: "",
    errno.EACCES: "; choose a writable place",
    errno.EPERM: "; choose a writable place",
    errno.EROFS: "; choose a writable place",
    errno.ENOSPC: "; free some space",
    errno.EDQUOT: "; free some space",
    errno.EMFILE: "; raise it with `ulimit -n`",
}
OUT_OF_MEMORY = (  # what torch's errors say, on its several devices
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC",
    "Storage size calculation overflowed",
)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: Exception) -> bool:
    """True for torch's errors that mean it."""
    if "torch" not in sys.modules:
        return False
    import torch  # not at the top, since fineweb.py needs no torch

    said = any(text in str(error) for text in OUT_OF_MEMORY) and "NCCL" not in str(error)
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and said)


def explain(error: Exception) -> Exception:
    """Turns an error of the operating system or of torch into a UserError or a RunError.

    Any other error is a bug, and returned as it is, perhaps with a hint below its traceback."""
    if isinstance(error, OSError) and error.errno in SYSTEM_ERRORS:
        name = f"{error.filename}: " if error.filename else ""
        return UserError(f"{name}{error.strerror}{SYSTEM_ERRORS[error.errno]}")
    if "torch" not in sys.modules or not isinstance(error, RuntimeError):
        return error
    import torch

    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        if received_signals:  # Ctrl-C also ends the compiler that torch has started.
            problem = "stopped by a signal while torch was compiling"
            return RunError(f"{problem}: --resume continues from the newest checkpoint")
        remedy = "`apt install g++ python3-dev` may help."
        error.add_note(f"torch.compile has failed. {remedy} --compile off trains without it.")
        return error
    if is_out_of_memory(error):
        remedies = getattr(error, "__notes__", ["a smaller batch takes less"])
        return UserError(f"out of memory ({first_line(error)}); {'; '.join(remedies)}")
    # NCCL and gloo name themselves, at least by the path of their source file.
    if isinstance(error, torch.distributed.DistError) or re.search("NCCL|gloo", str(error)):
        remedy = "probably since another rank has ended: see its error, or torchrun's report"
        return LostRank(f"an exchange between ranks failed, {remedy}. {str(error).strip()}")
    return error


# --------------------------------------------------------------------------------------------------
# Stop signals: a run that is asked to stop saves and exits after the current update.
#
# They are SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closes), and SIGUSR1, which Slurm can send
# before a time limit. Evaluations, which may take longer, end early. A signal may reach only some
# of the ranks, so they tell each other in every update and in every round of an evaluation.

# The stop signals that this process has received. Global, as signal handlers are.
received_signals: list[int] = []


def collect_stop_signals() -> None:
    """From now on stop signals only enter `received_signals`. A second SIGINT exits at once."""
    received_signals.clear()

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in received_signals:
            os._exit(130)
        received_signals.append(number)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # A print here could interrupt another print, which is an error. With `2>&1 | tee`
            # nobody reads it, since Ctrl-C has ended tee as well.
            with contextlib.suppress(OSError):
                os.write(2, b"\nThe run stops after this step. Another Ctrl-C stops it at once.\n")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if os.name != "nt":
        numbers.append(signal.SIGUSR1)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, note)


def stop_requested() -> bool:
    """True once this process has received a stop signal."""
    return bool(received_signals)


def status_after_signal() -> int:
    """The status of a run that was stopped: 130 after SIGINT, otherwise 143."""
    return 130 if received_signals[:1] == [signal.SIGINT] else 143


# --------------------------------------------------------------------------------------------------
# Exit


def run_and_exit(main: Callable[[], int | None]) -> None:
    """Calls main() and exits with its result, or prints one `error: ` line and exits.

    A UserError exits with status 2, a RunError with 1. Any other error keeps its traceback."""
    prepare_stdout()
    several_ranks = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        status = main() or 0
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        sys.exit(1)
    except Exception as raised:
        error = explain(raised)
        if isinstance(error, UserError | RunError):
            status = 1 if isinstance(error, RunError) else 2
            rank = os.environ.get("RANK", "0")
            name = "" if rank == "0" else f"rank {rank}: "
            with contextlib.suppress(OSError):
                print(f"error: {name}{error}", file=sys.stderr, flush=True)
        elif several_ranks:
            status = 1
            traceback.print_exc()
            sys.stderr.flush()
        else:
            raise
        if isinstance(error, LostRank):
            time.sleep(2)  # so that torchrun reports the rank that has failed first
        elif several_ranks:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)  # for that report
        if several_ranks:
            os._exit(status)  # a normal exit would wait for exchanges that never complete
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

"""Errors, stop signals, and the exit status: how a process ends.

Exit status 0 means done, 2 that the user's input was wrong, and 1 any other error. A run that was
stopped by a signal exits with 130 or 143."""

import atexit
import contextlib
import errno
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# --------------------------------------------------------------------------------------------------
# Errors


class UserError(Exception):
    """Something that the user can fix. Its one line says what is wrong and how to fix it."""


class RunError(Exception):
    """A run with valid input cannot go on. The message is one line."""


class StopRequested(Exception):
    """A rank has received a stop signal. All ranks raise this at the same place."""

    @staticmethod
    def exit_status() -> int:
        """That of a run that was stopped: 130 after SIGINT, otherwise 143."""
        return 130 if received_signals[:1] == [signal.SIGINT] else 143


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
    if isinstance(error, RuntimeError) and NO_MEMORY.search(text):
        remedy = "a smaller batch takes less (--micro-batch-size, or --batch-size of hellaswag.py)"
        remedy += ", and training with --low-memory"
        return UserError(f"out of memory ({first_line(error)}); {remedy}")
    if "BackendCompilerFailed" in [kind.__name__ for kind in type(error).__mro__]:
        if received_signals:  # Ctrl-C also ends the compiler that torch has started.
            problem = "stopped by a signal while torch was compiling"
            return RunError(f"{problem}: --resume continues from the newest checkpoint")
        error.add_note("--compile off trains without torch.compile.")
    return error


# --------------------------------------------------------------------------------------------------
# Stop signals: a run that is asked to stop saves and exits after the current update.
#
# They are SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closes), and SIGUSR1, which Slurm can send
# before a time limit. A signal may reach only some of the ranks, so they tell each other in every
# update and in every round of an evaluation. Then all of them raise StopRequested.

# The stop signals that this process has received. Global, as signal handlers are.
received_signals: list[int] = []


def collect_stop_signals() -> None:
    """From now on stop signals only enter `received_signals`. A second SIGINT exits at once."""
    received_signals.clear()

    def note(number: int, frame: Any) -> None:
        if number in received_signals:
            if number == signal.SIGINT:
                os._exit(130)
            return
        received_signals.append(number)
        if os.environ.get("RANK", "0") == "0":
            line = f"\n{signal.Signals(number).name}: the run will stop as soon as it can save."
            if number == signal.SIGINT:
                line += " Another Ctrl-C ends it at once, and loses what is not saved."
            # A print could interrupt another one. With `2>&1 | tee` Ctrl-C has ended its reader.
            with contextlib.suppress(OSError):
                os.write(2, f"{line}\n".encode())

    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows lacks the last two.
        if number and signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, note)


def stop_requested() -> bool:
    """True once this process has received a stop signal."""
    return bool(received_signals)


# --------------------------------------------------------------------------------------------------
# Exit


def run_and_exit(main: Callable[[], int | None]) -> None:
    """Calls main() and exits with its result, or prints one `error: ` line and exits.

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
        if isinstance(error, UserError | RunError):
            rank = os.environ.get("RANK", "0")
            if not said_by_another_rank(error):
                print_error(f"error: {error}" if rank == "0" else f"error: rank {rank}: {error}")
        elif several_ranks:
            traceback.print_exc()
        else:
            raise
        if several_ranks:
            report_to_torchrun(error)
            os._exit(status)  # A normal exit would wait for exchanges that never complete.
        sys.exit(status)
    if "RANK" in os.environ:  # gloo's threads can abort the interpreter's clean-up
        atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


def report_to_torchrun(error: Exception) -> None:
    """Makes torchrun name the rank that has failed first. A lost rank's error waits for it.

    torchrun reads the file whose path it gives to each rank. It would also take a traceback, but
    that of a bug is printed already."""
    if isinstance(error, LostRank):
        time.sleep(2)
    elif path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = f"{type(error).__name__}: {error}"
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        report = {"message": {"message": line, "extraInfo": more}}
        with contextlib.suppress(OSError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(report), encoding="utf-8")


def said_by_another_rank(error: Exception) -> bool:
    """Whether the first rank of this machine ends with the same error, and so prints it.

    It is known by the report that it writes for torchrun, next to that of this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.environ.get("LOCAL_RANK") == "0" or isinstance(error, LostRank):
        return False
    first = Path(path).parents[1] / "0" / Path(path).name
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(first.read_text(encoding="utf-8"))
            return str(error) in report["message"]["message"]
        time.sleep(0.05)
    return False


def print_error(line: str) -> None:
    """Prints a line to stderr in one call, since the lines of several ranks may meet there."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def flush_stdout() -> None:
    """At exit drops what can't be printed, since Python would exit with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

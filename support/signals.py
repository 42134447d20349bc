"""Stop signals: a run that is asked to stop saves and exits after the current update.

They are SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closes), and SIGUSR1, which Slurm can send
before a time limit. Evaluations, which may take longer, end early. A signal may reach only some of
the ranks, so they tell each other in every update and in every round of an evaluation."""

import os
import signal
from typing import Any


class Stopped(Exception):
    """The run was asked to stop. It is raised on all ranks at the same place."""


# The stop signals that this process has received. Global, as signal handlers are.
received: list[int] = []


def collect_stop_signals() -> None:
    """From now on stop signals are only added to `received`. A second SIGINT exits at once."""
    received.clear()

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in received:
            os._exit(130)
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if os.name != "nt":
        numbers.append(signal.SIGUSR1)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, note)


def exit_status() -> int:
    """The status of a run that was stopped: 130 after SIGINT, otherwise 143."""
    return 130 if received[:1] == [signal.SIGINT] else 143

"""Signals that ask a run to stop: it finishes its step, saves, and exits."""

import os
import signal
from typing import Any


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGUSR1 (Slurm's, ahead of the time limit), for the loop to stop between two steps.

    A second SIGINT stops at once: whatever is half written then, the next start clears away.
    """

    NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

    def __enter__(self) -> "StopSignals":
        self.received = 0
        self.former = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """130 after SIGINT, 143 after another: 128 and the number of SIGINT or SIGTERM, as a shell has it."""
        return 130 if self.received == signal.SIGINT else 143

    def _note(self, number: int, frame: Any) -> None:
        if self.received == number == signal.SIGINT:
            os._exit(130)
        self.received = self.received or number

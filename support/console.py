"""What a training run prints: its first lines, the speed of each step, its last lines."""

import time
from collections import deque
from typing import Any

from support.cli import print0, shown
from support.devices import peak_memory


def duration(seconds: float) -> str:
    """A time for people: 0 min 40 s, or 19 h 8 min."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


class Meter:
    """Measures the steps of a run: milliseconds, tokens per second, MFU, time left."""

    def __init__(
        self,
        *,
        tokens: int,
        flops_per_token: int,
        peak: tuple[float, str],
        devices: int,
        interval: int,
        elapsed: float = 0.0,
    ):
        """tokens: per step. peak: FLOP/s of one device that count as 100 % MFU, and their source.

        interval: steps from one pause, to evaluate or save, to the next. elapsed: seconds spent in
        earlier steps."""
        peak_flops, source = peak
        self.peak = f"{peak_flops / 1e12:,.3g} TFLOP/s ({source})"  # of one device
        self.tokens = tokens
        self.full_speed = devices * peak_flops / flops_per_token  # tokens per second at 100 % MFU
        # When the latest steps ended, over one interval, so that time left includes pauses.
        self.ends: deque[float] = deque(maxlen=1 + interval)
        self.elapsed = elapsed
        self.began = 0.0
        self.seconds = 0.0  # of the latest step
        self.left = 0.0  # seconds until the end of the run

    def start_step(self) -> None:
        self.began = time.perf_counter()

    def end_step(self, steps_left: int) -> None:
        self.ends.append(time.perf_counter())
        self.seconds = self.ends[-1] - self.began
        self.elapsed += self.seconds
        per_step = self.seconds
        if len(self.ends) > 1:
            per_step = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        self.left = per_step * steps_left

    @property
    def streams(self) -> dict[str, float]:
        """The latest step's values for log.txt."""
        tokens_per_second = self.tokens / self.seconds
        return {
            "tok_per_sec": tokens_per_second,
            "mfu": tokens_per_second / self.full_speed,
            "ms": 1e3 * self.seconds,
        }

    def line(self, loss: float, lr: float, norm: float) -> str:
        """The latest step as a line on the console."""
        values = self.streams
        training = f"loss {loss:.4f} lr {lr:.2e} norm {norm:.3f}"
        speed = f"{values['ms']:.0f} ms {values['tok_per_sec']:,.0f} tok/s mfu {values['mfu']:.1%}"
        return f"{training} {speed} {duration(self.left)} left"


def announce(
    *,
    device: str,
    model: Any,
    loader: Any,
    data: str,
    max_steps: int,
    total_batch_size: int,
    peak: str,
    folder: str,
) -> None:
    """Prints what is about to be trained.

    device: with precision and reason. model: a GPT. loader: of the training data. peak: what
    counts as 100 % MFU on one device. folder: of the log, and where the run resumes."""
    T = loader.T
    flops = model.flops_per_token(T)
    epochs = max_steps * total_batch_size / loader.total_tokens
    micro_steps = total_batch_size // (loader.B * T * loader.world_size)
    print0(f"device: {device}")
    print0(f"model: {model.num_parameters():,} parameters, {flops / 1e6:,.0f} MFLOP per token")
    print0(f"speed: MFU 100 % = {peak} per device")
    print0(f"data: {shown(data)}, {loader.total_tokens:,} training tokens")
    print0(f"steps: {max_steps:,} of {total_batch_size:,} tokens, {epochs:.3f} epochs")
    shape = f"{loader.B} x {T} tokens x {micro_steps} micro-steps"
    print0(f"batch: {shape} x {loader.world_size} ranks")
    print0(f"log and checkpoints: {folder}")


def conclude(steps: int, seconds: float) -> None:
    """Prints the cost of a run. seconds: spent in its updates."""
    print0(f"done: {steps:,} steps, {seconds / 60:.1f} minutes of training")
    memory = peak_memory()
    if memory:
        print0(f"peak memory: {memory / 1e9:.2f} GB")

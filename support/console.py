"""What a training run prints: its first lines, the speed of each step, its last lines."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cli import print0, shown
from support.devices import peak_memory, reset_peak_memory


def duration(seconds: float) -> str:
    """A time for people: 0 min 40 s, 19 h 8 min, or 3.5 days."""
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 72:
        return f"{seconds / 86_400:,.1f} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


@dataclass
class Meter:
    """Measures the steps of a run: milliseconds, tokens per second, MFU, time left."""

    tokens: int  # per step
    flops_per_token: int
    peak_flops: float  # FLOP/s of all devices together that count as 100 % MFU
    interval: int  # steps from one pause, to evaluate or save, to the next
    elapsed: float = 0.0  # seconds spent in steps
    seconds: float = 0.0  # of the latest step
    left: float = 0.0  # seconds until the end of the run
    ends: list[float] = field(default_factory=list)  # when the steps of one interval ended

    def end_step(self, began: float, steps_left: int) -> None:
        """Measures a step that began at time.perf_counter() `began` and ends now."""
        now = time.perf_counter()
        self.seconds = now - began
        self.elapsed += self.seconds
        if not self.ends:  # peak memory is without the trial of B and compilation
            reset_peak_memory()
        # Time left is by the mean over an interval, so that it includes one of each pause.
        self.ends = [*self.ends, now][-self.interval - 1 :]
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
            "mfu": tokens_per_second * self.flops_per_token / self.peak_flops,
            "ms": 1e3 * self.seconds,
        }

    def line(self, loss: float, lr: float, norm: float) -> str:
        """The latest step as a line on the console."""
        values = self.streams
        training = f"loss {loss:.4f} lr {lr:.2e} norm {norm:.3f}"
        # Above 100 % the peak was measured too low.
        mfu = f"{values['mfu']:.1%}" if values["mfu"] <= 1 else "–"
        speed = f"{values['ms']:.0f} ms {values['tok_per_sec']:,.0f} tok/s mfu {mfu}"
        return f"{training} {speed} {duration(self.left)} left"


def announce(
    *,
    device: str,
    model: Any,
    loader: Any,
    data: str,
    max_steps: int,
    total_batch_size: int,
    peak: tuple[float, str],
    log_dir: str,
    checkpoint: Path | None,
) -> None:
    """Prints what is about to be trained.

    device: with precision and reason. model: a GPT. loader: of the training data. peak: as
    devices.peak_flops returns it. checkpoint: from which the run resumes."""
    T = loader.T
    flops = model.flops_per_token(T)
    peak_flops, source = peak
    steps_per_epoch = loader.total_tokens / total_batch_size
    epochs = max_steps / steps_per_epoch
    micro_steps = total_batch_size // (loader.B * T * loader.world_size)
    print0(f"device: {device}")
    print0(f"model: {model.num_parameters():,} parameters, {flops / 1e6:,.0f} MFLOP per token")
    print0(f"speed: MFU 100 % = {peak_flops / 1e12:,.3g} TFLOP/s per device ({source})")
    print0(f"data: {shown(data)}, {loader.total_tokens:,} training tokens")
    print0(f"steps: {max_steps:,} of {total_batch_size:,} tokens, {epochs:.3f} epochs")
    if max_steps and not 0.1 <= epochs <= 10:
        # Up to four epochs, repeated text is almost as good as new (Muennighoff et al. 2023).
        fit = 1
        times = "once"
        if epochs > 10:
            fit = 4
            times = "4 times, after which it teaches little; keep --warmup-steps below"
        steps = max(float(f"{fit * steps_per_epoch:.1e}"), 1)  # to two digits
        print0(f"note: --max-steps {steps:.0f} would read the text {times}")
    shape = f"{loader.B} x {T} tokens x {micro_steps} micro-steps"
    print0(f"batch: {shape} x {loader.world_size} ranks")
    resumed = f", resumed from {checkpoint}" if checkpoint else ""
    print0(f"log and checkpoints: {log_dir}/{resumed}")


def print_validation(loss: float, text: Any) -> None:
    """Prints the last validation loss, in nats per token. text: TextSize of what it predicts."""
    print0(f"\nvalidation loss: {loss:.4f} nats per token")
    print0(f"  {text.nats_per_character(loss):.4f} nats per character")
    print0(f"  {text.bits_per_byte(loss):.4f} bits per byte")


def print_cost(steps: int, seconds: float) -> None:
    """Prints the cost of a run. seconds: spent in its updates."""
    print0(f"done: {steps:,} steps, {seconds / 60:.1f} minutes of training")
    memory = peak_memory()
    if memory:
        print0(f"peak memory: {memory / 1e9:.2f} GB")

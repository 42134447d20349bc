"""What a training run prints: its first lines, the speed of each step, its last lines."""

import time
from pathlib import Path
from typing import Any

import torch

from support import devices
from support.cli import print0, shown
from support.ranks import Ranks


def duration(seconds: float) -> str:
    """A time for people: 0 min 40 s, 19 h 8 min, or 3.5 days."""
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 72:
        return f"{seconds / 86_400:,.1f} days"
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


class Meter:
    """Measures the steps of a run: milliseconds, tokens per second, MFU, time left."""

    def __init__(
        self, tokens: int, flops: int, ranks: Ranks, dtype: torch.dtype, elapsed: float = 0.0
    ):
        """tokens: per step. flops: per token. dtype: of matmuls. elapsed: seconds so far."""
        self.tokens = tokens
        self.flops = flops
        # The FLOP/s of one device that count as 100 % MFU, and where the figure comes from.
        self.peak_flops, self.source = devices.peak_flops(ranks.device, dtype)
        self.devices = ranks.world_size
        self.elapsed = elapsed  # seconds spent in steps
        self.seconds = 0.0  # of the latest step
        self.left = 0.0  # seconds until the end of the run
        self.first_end: float | None = None  # when the first step ended
        self.steps = 0  # after the first one

    def end_step(self, began: float, steps_left: int) -> None:
        """Measures a step that began at time.perf_counter() `began` and ends now."""
        now = time.perf_counter()
        self.seconds = now - began
        self.elapsed += self.seconds
        per_step = self.seconds
        if self.first_end is None:  # the first step compiles, which counts for nothing here
            devices.reset_peak_memory()
            self.first_end = now
        else:
            self.steps += 1
            per_step = (now - self.first_end) / self.steps  # with evaluations and saving
        self.left = per_step * steps_left

    @property
    def speed(self) -> dict[str, float]:
        """The latest step's tok_per_sec, mfu and ms, as log.txt has them."""
        rate = self.tokens / self.seconds
        mfu = rate * self.flops / (self.peak_flops * self.devices)
        return {"tok_per_sec": rate, "mfu": mfu, "ms": 1e3 * self.seconds}

    def line(self, loss: float, lr: float, norm: float) -> str:
        """The latest step as a line on the console."""
        values = self.speed
        training = f"loss {loss:.4f} lr {lr:.2e} norm {norm:.3f}"
        # Above 100 % the peak was measured too low.
        mfu = f"{values['mfu']:.1%}" if values["mfu"] <= 1 else "–"
        speed = f"{values['ms']:.0f} ms {values['tok_per_sec']:,.0f} tok/s mfu {mfu}"
        return f"{training} {speed} {duration(self.left)} left"


def announce(
    config: Any,
    chosen: str,
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    loader: Any,
    meter: Meter,
    checkpoint: Path | None,
) -> None:
    """Prints what is about to be trained.

    config: a TrainConfig. chosen: device and precision, with the reason. model: a GPT. loader:
    of the training data. checkpoint: from which the run resumes."""
    T = config.seq_len
    steps_per_epoch = loader.sequences_per_epoch * T / config.total_batch_size
    micro_steps = config.total_batch_size // (loader.B * T * loader.world_size)
    print0(f"device: {chosen}")
    print0(
        f"model: {model.num_parameters():,} parameters, {meter.flops / 1e6:,.0f} MFLOP per token"
    )
    shares = []
    for optimizer in optimizers:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        size = sum(p.numel() for p in tensors)
        shares.append(f"{type(optimizer).__name__} for {len(tensors)} tensors of {size:,}")
    print0(f"optimizers: {'; '.join(shares)} parameters")
    print0(f"speed: MFU 100 % = {meter.peak_flops / 1e12:,.3g} TFLOP/s per device ({meter.source})")
    print0(f"data: {shown(config.data)}, {loader.total_tokens:,} training tokens")
    epochs = f"{config.max_steps / steps_per_epoch:.3f} epochs"
    print0(f"steps: {config.max_steps:,} of {config.total_batch_size:,} tokens, {epochs}")
    shape = f"{loader.B} x {T} tokens x {micro_steps} micro-steps"
    print0(f"batch: {shape} x {loader.world_size} ranks")
    resumed = f", resumed from {checkpoint}" if checkpoint else ""
    print0(f"log and checkpoints: {config.log_dir}/{resumed}")


def print_validation(loss: float, text: Any) -> None:
    """Prints the last validation loss, in nats per token. text: TextSize of what it predicts."""
    print0(f"\nvalidation loss: {loss:.4f} nats per token")
    print0(f"  {text.nats_per_character(loss):.4f} nats per character")
    print0(f"  {text.bits_per_byte(loss):.4f} bits per byte")


def print_cost(steps: int, seconds: float) -> None:
    """Prints the cost of a run. seconds: spent in its updates."""
    print0(f"done: {steps:,} steps, {seconds / 60:.1f} minutes of training")
    memory = devices.peak_memory()
    if memory:
        print0(f"peak memory: {memory / 1e9:.2f} GB")

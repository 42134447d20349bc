"""Console output of a training run: header, progress of each step, and results."""

import math
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from support import devices
from support.command_line import display_path, duration, note, print0
from support.shards import open_split
from support.tokenizer import TextSize

if TYPE_CHECKING:
    from train_gpt2 import GPT, DataLoaderLite, TrainConfig

ASSUMED_MFU = 0.4


def first_lines(
    config: "TrainConfig",
    model: "GPT",
    loader: "DataLoaderLite | None",
    device_line: str,
    peak: tuple[float, str],
    world_size: int,
    B: int,
    micro_steps: int,
) -> list[str]:
    """Return the header of a run or its --plan: sizes, FLOPs, memory, estimated time, data.

    `loader` reads the training data, and is None if there is no data yet. `peak` is the result of
    peak_flops(). The model may be on the meta device."""
    tokens = config.max_steps * config.total_batch_size
    epochs = "no data yet"
    validation = "none"
    if loader:
        available = loader.tokens_per_epoch
        steps = max(round(available / config.total_batch_size), 1)
        epochs = f"{tokens / available:.3f} of {available:,} training tokens, {steps:,} steps each"
        if config.eval_every:
            _, shards = open_split(Path(config.data), "val", model.config.vocab_size)
            total = sum(map(len, shards))
            validation = f"the first {min(config.eval_tokens, total):,} of {total:,} tokens"
            validation += " (--eval-tokens)" if config.eval_tokens < total else ""
    N = model.num_parameters()
    flops = model.flops_per_token(config.seq_len)
    peak_flops, source = peak
    seconds = flops * tokens / (ASSUMED_MFU * world_size * peak_flops)
    return [
        f"device: {device_line}",
        f"model: {N:,} parameters, {flops:,} FLOPs per token",
        f"shape: {', '.join(f'{name} {x}' for name, x in asdict(model.config).items())}",
        f"memory: {16 * N / 1e9:.2f} GB for weights, gradients and AdamW state, plus activations",
        f"100% MFU: {peak_flops / 1e12:,.3g} TFLOP/s per device ({source})",
        f"tokens: {tokens:,} in {config.max_steps:,} steps of {config.total_batch_size:,}",
        f"batch: {B} x {config.seq_len} tokens; micro-steps: {micro_steps}; ranks: {world_size}",
        f"time: {duration(seconds)} for {flops * tokens:.3g} FLOPs, at {ASSUMED_MFU:.0%} MFU",
        f"data: {display_path(config.data)}",
        f"epochs: {epochs}",
        f"validation: {validation}",
    ]


class Progress:
    """The speed of a run: milliseconds per step, tokens per second, MFU, and time left."""

    def __init__(
        self, config: "TrainConfig", model: "GPT", world_size: int, peak: tuple[float, str]
    ):
        self.training_seconds = 0.0  # spent in updates, excluding evaluations and saving
        self.tokens_per_step = config.total_batch_size
        self.max_steps = config.max_steps
        self.flops_per_token = model.flops_per_token(config.seq_len)
        self.peak_flops = world_size * peak[0]  # what counts as 100% MFU
        self.seconds = 0.0  # duration of the latest step
        self.seconds_left: float | None = None  # until the end; None until two steps have ended
        self.ends: deque[float] = deque(maxlen=100)  # when the latest steps ended
        self.fastest = math.inf  # duration of the fastest step, ignoring the first
        self.slow_steps = 0

    def end_step(self, step: int, began: float) -> None:
        """Record that a step ends now. `began` is the time.perf_counter() of its start."""
        now = time.perf_counter()
        self.seconds = now - began
        self.training_seconds += self.seconds
        self.ends.append(now)
        if len(self.ends) == 1:  # the first step, which takes longer
            devices.reset_peak_memory()
            return
        per_step = (now - self.ends[0]) / (len(self.ends) - 1)  # including evaluations
        self.seconds_left = per_step * (self.max_steps - step - 1)
        self.fastest = min(self.fastest, self.seconds)
        if self.seconds > 4 * self.fastest:
            self.slow_steps += 1
            if self.slow_steps == 10:
                note(
                    "ten steps took over four times as long as the fastest one, probably because "
                    "other programs use the cores; stop them, or lower OMP_NUM_THREADS"
                )

    @property
    def speed(self) -> dict[str, float]:
        """tok_per_sec, mfu and ms of the latest step, as logged in log.txt."""
        rate = self.tokens_per_step / self.seconds
        mfu = rate * self.flops_per_token / self.peak_flops
        return {"tok_per_sec": rate, "mfu": mfu, "ms": 1e3 * self.seconds}

    def line(self, loss: float, lr: float, norm: float) -> str:
        """Format the latest step as a console line."""
        values = self.speed
        # An MFU above 100% means that the measured peak is too low.
        mfu = f"{values['mfu']:.1%}" if values["mfu"] <= 1 else "–"
        line = f"loss {loss:.4f} lr {lr:.2e} norm {norm:.3f} "
        line += f"{values['ms']:.0f} ms {values['tok_per_sec']:,.0f} tok/s mfu {mfu}"
        if self.seconds_left is not None:
            line += f" {duration(self.seconds_left)} left"
        return line

    def print_results(self, loss: float | None, text: TextSize | None) -> None:
        """Print the last validation loss in all units, the training time and the peak memory."""
        if loss is not None and text is not None:
            print0(f"\nvalidation loss: {loss:.4f} nats per token")
            print0(f"  {text.nats_per_character(loss):.4f} nats per character")
            print0(f"  {text.bits_per_byte(loss):.4f} bits per byte")
        minutes = self.training_seconds / 60
        print0(f"done: {self.max_steps:,} steps, {minutes:.1f} minutes of training")
        memory = devices.peak_memory()
        if memory:
            print0(f"peak memory: {memory / 1e9:.2f} GB")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Describe the size, weight decay and any learning-rate scale of each parameter group."""
    shares = []
    for group in optimizer.param_groups:
        size = sum(p.numel() for p in group["params"])
        decay = "with decay" if group.get("weight_decay", 0) > 0 else "without decay"
        lr_scale = group.get("lr_scale", 1)
        scale = f", learning rate x {lr_scale:g}" if lr_scale != 1 else ""
        shares.append(f"{len(group['params'])} tensors ({size:,} parameters) {decay}{scale}")
    return f"{type(optimizer).__name__}: {'; '.join(shares)}"

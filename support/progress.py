"""What a training run prints of itself: its first lines, the speed of each step, its last lines."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from support import devices, forks, plan
from support.command_line import duration, print0
from support.ranks import Ranks
from support.run_setup import Setup
from support.tokenizer import TextSize

if TYPE_CHECKING:
    from train_gpt2 import GPT, DataLoaderLite, TrainConfig


class Progress:
    """How fast a run goes: milliseconds, tokens per second, MFU, and the time that is left."""

    def __init__(self, config: "TrainConfig", model: "GPT", ranks: Ranks, setup: Setup):
        self.config = config
        self.model = model
        self.setup = setup
        self.training_seconds = 0.0  # in updates, without evaluations and saving
        self.tokens_per_step = config.total_batch_size
        self.max_steps = config.max_steps
        self.flops_per_token = model.flops_per_token(config.seq_len)
        # What counts as 100 % MFU on one device, in FLOP/s, and where the figure comes from.
        self.peak_flops, self.peak_source = devices.peak_flops(ranks.device, setup.precision)
        self.devices = ranks.world_size
        self.seconds = 0.0  # of the latest step
        self.seconds_left: float | None = None  # until the end of the run, if it is known
        # The first step takes longer, so the others are timed from its end on.
        self.first_step: int | None = None
        self.first_end = 0.0

    def end_step(self, step: int, began: float) -> None:
        """Times a step that began at time.perf_counter() `began` and ends now."""
        now = time.perf_counter()
        self.seconds = now - began
        self.training_seconds += self.seconds
        if self.first_step is None:
            self.first_step = step
            self.first_end = now
            devices.reset_peak_memory()
        else:
            per_step = (now - self.first_end) / (step - self.first_step)  # with evaluations
            self.seconds_left = per_step * (self.max_steps - step - 1)

    @property
    def speed(self) -> dict[str, float]:
        """The latest step's tok_per_sec, mfu and ms, as log.txt has them."""
        rate = self.tokens_per_step / self.seconds
        mfu = rate * self.flops_per_token / (self.peak_flops * self.devices)
        return {"tok_per_sec": rate, "mfu": mfu, "ms": 1e3 * self.seconds}

    def line(self, loss: float, lr: float, norm: float) -> str:
        """The latest step as a line on the console."""
        values = self.speed
        # An MFU above 100 % means that the peak was measured too low.
        mfu = f"{values['mfu']:.1%}" if values["mfu"] <= 1 else "–"
        line = f"loss {loss:.4f} lr {lr:.2e} norm {norm:.3f} "
        line += f"{values['ms']:.0f} ms {values['tok_per_sec']:,.0f} tok/s mfu {mfu}"
        if self.seconds_left is not None:
            line += f" {duration(self.seconds_left)} left"
        return line

    def print_header(
        self,
        loader: "DataLoaderLite",
        optimizers: list[torch.optim.Optimizer],
        checkpoint: Path | None,
    ) -> None:
        """Prints the first lines of a run. They say what it trains, on what, and from which
        checkpoint. Warns of what probably is a mistake.

        `loader` is that of the training data."""
        config, setup = self.config, self.setup
        peak = (self.peak_flops, self.peak_source)
        available = loader.total_tokens
        lines = plan.describe(config, self.model, setup.device_line, peak, available, self.devices)
        lines.append(f"optimizers: {'; '.join(map(describe_optimizer, optimizers))}")
        factors = {"micro-steps": setup.micro_steps, "ranks": loader.world_size}
        more = [f" x {number} {name}" for name, number in factors.items() if number > 1]
        lines.append(f"batch: {loader.B} x {loader.T} tokens{''.join(more)}")
        if setup.compiled:
            lines.append("torch.compile: on, so the first step takes longer")
        short = [len(shard) for shard, n in zip(loader.shards, loader.counts, strict=True) if not n]
        if short:
            size = f"{len(short)} with {sum(short):,} tokens"
            lines.append(f"shards that are too short for a sequence: {size}")
        resumed = f", resumed from {checkpoint}" if checkpoint else ""
        lines.append(f"log and checkpoints: {config.log_dir}/{resumed}")
        for line in lines:
            print0(line)
        plan.warn_of_settings(config, available)
        forks.warn_if_not_causal(self.model, setup.autocast)

    def print_results(self, results: dict[str, float], text: TextSize | None) -> None:
        """Prints the last validation loss in all units, how long the run has trained, and the
        memory that it has taken.

        `results` are those of the last evaluation. `text` is the size of the text that was
        predicted, or None if it was no text."""
        if "val" in results:
            loss = results["val"]
            print0(f"\nvalidation loss: {loss:.4f} nats per token")
            if text:
                print0(f"  {text.nats_per_character(loss):.4f} nats per character")
                print0(f"  {text.bits_per_byte(loss):.4f} bits per byte")
        minutes = self.training_seconds / 60
        print0(f"done: {self.max_steps:,} steps, {minutes:.1f} minutes of training")
        memory = devices.peak_memory()
        if memory:
            print0(f"peak memory: {memory / 1e9:.2f} GB")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """How many tensors an optimizer has, with how many parameters, and which of them decay."""
    shares = []
    for decays, name in ((True, "decay"), (False, "do not decay")):
        groups = [g for g in optimizer.param_groups if (g.get("weight_decay", 0) > 0) == decays]
        tensors = [p for group in groups for p in group["params"]]
        if tensors:
            size = sum(p.numel() for p in tensors)
            shares.append(f"{len(tensors)} tensors with {size:,} parameters {name}")
    return f"{type(optimizer).__name__}: {', '.join(shares)}"

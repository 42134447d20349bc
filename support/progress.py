"""What a training run prints of itself: its first lines, the speed of each step, its last lines."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from support import devices, plan
from support.command_line import duration, print0, warn
from support.ranks import Ranks
from support.tokenizer import TextSize

if TYPE_CHECKING:
    from train_gpt2 import GPT, DataLoaderLite, TrainConfig


class Progress:
    """How fast a run goes: milliseconds, tokens per second, MFU, and the time that is left."""

    def __init__(self, config: "TrainConfig", model: "GPT", ranks: Ranks, precision: str):
        """`precision` is that of matrix products."""
        self.training_seconds = 0.0  # in updates, without evaluations and saving
        self.tokens = 0  # that were trained on, so far
        self.max_steps = config.max_steps
        self.compile = config.compile
        self.flops_per_token = model.flops_per_token(config.seq_len)
        # What counts as 100 % MFU on one device, in FLOP/s, and where the figure comes from.
        self.peak_flops, self.peak_source = devices.peak_flops(ranks.device, precision)
        self.devices = ranks.world_size
        self.seconds = 0.0  # of the latest step
        self.tokens_of_step = 0  # on all ranks
        self.seconds_left: float | None = None  # until the end of the run, if it is known
        self.timed_from: tuple[int, float] | None = None  # a step, and when it began

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "training_seconds": self.training_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]
        self.training_seconds = state["training_seconds"]

    def end_step(self, step: int, began: float, tokens: int) -> None:
        """Times a step that began at time.perf_counter() `began` and ends now.

        It was made from `tokens` tokens, on all ranks together."""
        now = time.perf_counter()
        self.tokens += tokens
        self.tokens_of_step = tokens
        self.seconds = now - began
        self.training_seconds += self.seconds
        steps_left = self.max_steps - step - 1
        if self.timed_from is None:
            self.timed_from = (step, now)
            devices.reset_peak_memory()
            if not self.compile:  # A step that compiled says nothing about the others.
                self.seconds_left = self.seconds * steps_left
        else:
            first_step, first_began = self.timed_from
            per_step = (now - first_began) / (step - first_step)  # with evaluations and saving
            self.seconds_left = per_step * steps_left

    @property
    def speed(self) -> dict[str, float]:
        """The latest step's tok_per_sec, mfu and ms, as log.txt has them."""
        rate = self.tokens_of_step / self.seconds
        mfu = rate * self.flops_per_token / (self.peak_flops * self.devices)
        return {"tok_per_sec": rate, "mfu": mfu, "ms": 1e3 * self.seconds}

    def line(self, loss: float, lr: float, norm: float) -> str:
        """The latest step as a line on the console."""
        values = self.speed
        training = f"loss {loss:.4f} lr {lr:.2e} norm {norm:.3f}"
        # Above 100 % the peak was measured too low.
        mfu = f"{values['mfu']:.1%}" if values["mfu"] <= 1 else "–"
        speed = f"{values['ms']:.0f} ms {values['tok_per_sec']:,.0f} tok/s mfu {mfu}"
        left = "" if self.seconds_left is None else f" {duration(self.seconds_left)} left"
        return f"{training} {speed}{left}"


def announce(
    config: "TrainConfig",
    device_line: str,
    model: "GPT",
    optimizers: list[torch.optim.Optimizer],
    loader: "DataLoaderLite",
    progress: Progress,
    tokens: int,
    checkpoint: Path | None,
) -> None:
    """Prints the first lines of a run. They say what it trains, on what, and from which checkpoint.

    `loader` is that of the training data, of which the whole run reads `tokens`."""
    peak = (progress.peak_flops, progress.peak_source)
    rows = plan.describe(config, model, device_line, peak, tokens, loader.total_tokens)
    rows["optimizers"] = "; ".join(map(describe_optimizer, optimizers))
    micro_steps = config.total_batch_size // (loader.B * loader.T * loader.world_size)
    factors = {"micro-steps": micro_steps, "ranks": loader.world_size}
    more = [f" x {number} {name}" for name, number in factors.items() if number > 1]
    rows["batch"] = f"{loader.B} x {loader.T} tokens{''.join(more)}"
    if config.compile:
        rows["torch.compile"] = "on, so the first step takes longer"
    resumed = f", resumed from {checkpoint}" if checkpoint else ""
    rows["log and checkpoints"] = f"{config.log_dir}/{resumed}"
    for name, value in rows.items():
        print0(f"{name}: {value}")
    if loader.rank == 0:
        plan.warn_of_many_epochs(config, loader.total_tokens)


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


@torch.no_grad()
def warn_of_wrong_losses(model: "GPT", sequence: np.ndarray, autocast: torch.autocast) -> None:
    """Warns if a fork's validation loss is no cross-entropy, or if its predictions see the future.

    Tried on the beginning of a sequence (T + 1,), with as many tokens as take little memory."""
    tokens = torch.from_numpy(sequence[None, :65].astype(np.int64)).to(
        next(model.parameters()).device
    )
    x, y = tokens[:, :-1], tokens[:, 1:]
    with autocast:
        loss = model(x, y)
        logits = model(x).flatten(0, 1)  # (64, V)
        another = x.clone()
        another[:, -1] = (x[:, -1] + 1) % logits.shape[-1]  # only the last token differs
        logits_with_another = model(another).flatten(0, 1)
    expected = F.cross_entropy(logits.float(), y.flatten())
    tolerance = 1e-4 if logits.dtype == torch.float32 else 2e-3
    if not loss.isfinite():
        return
    if not math.isclose(loss.item(), expected.item(), rel_tol=tolerance):
        problem = "the validation loss is not the cross-entropy of the model's logits"
        warn(f"{problem}; what only training should see goes under `if self.training`")
    largest = logits.abs().max().item()
    same = torch.allclose(logits_with_another[:-1], logits[:-1], rtol=0, atol=tolerance * largest)
    if not same:
        problem = "the predictions depend on the tokens that they predict"
        warn(f"{problem}, so all losses are too good: does attention see later tokens?")


def print_evaluations(step: int, results: dict[str, float], text: TextSize | None) -> None:
    """Prints a line for each result. `text` is what validation predicts, if it is a text."""
    if "val" in results:
        loss = results["val"]
        per_character = f", {text.nats_per_character(loss):.4f} per character" if text else ""
        print0(f"step {step:5d} validation loss {loss:.4f}{per_character}")
    if "hella" in results:
        print0(f"step {step:5d} HellaSwag {results['hella']:.4f}")


def print_validation(loss: float, text: TextSize | None) -> None:
    """Prints the last validation loss, in nats per token. `text` is what it predicts, if it is."""
    print0(f"\nvalidation loss: {loss:.4f} nats per token")
    if text is None:
        return
    print0(f"  {text.nats_per_character(loss):.4f} nats per character")
    print0(f"  {text.bits_per_byte(loss):.4f} bits per byte")


def print_cost(steps: int, seconds: float) -> None:
    """Prints how long the run has trained, and the memory that it has taken."""
    print0(f"done: {steps:,} steps, {seconds / 60:.1f} minutes of training")
    memory = devices.peak_memory()
    if memory:
        print0(f"peak memory: {memory / 1e9:.2f} GB")

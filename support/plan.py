"""The arithmetic of a run, with which it begins, and `train_gpt2.py --plan`.

The model may be on the "meta" device."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from support.command_line import duration, note, shown, warn
from support.devices import (
    PEAK_TFLOPS,
    choose_device,
    choose_precision,
    dtype_of,
    peak_flops,
)
from support.errors_and_signals import first_line
from support.micro_batch import SIZES, USABLE, choose_micro_batch, estimate_memory
from support.ranks import Ranks
from support.shards import open_split

if TYPE_CHECKING:
    from train_gpt2 import GPT, TrainConfig

ASSUMED_MFU = 0.4
CARDS = {  # GB of memory; those with 80 are used one or eight at a time
    "T4": 16,
    "GeForce RTX 3090": 24,
    "GeForce RTX 4090": 24,
    "GeForce RTX 5090": 32,
    "A100-SXM4-80GB": 80,
    "H100 80GB HBM3": 80,
}


def try_step(model: "GPT", T: int) -> None:
    """Tries the forward and the backward pass of a model on the device "meta", on T tokens.

    Its tensors have no memory. So any size takes a second, and a bug shows its traceback."""
    x = torch.zeros(1, T, dtype=torch.int64, device="meta")
    try:
        model(x, x).backward()
    except NotImplementedError as error:  # an operation that needs the values of tensors
        note(f"a step of this model could not be tried here ({first_line(error)})")


def describe(
    config: "TrainConfig",
    model: "GPT",
    device_line: str,
    peak: tuple[float, str],
    tokens: int,
    available: int,
) -> dict[str, str]:
    """What a run trains, and on what: the lines that a run and its --plan begin with.

    `peak` is the result of peak_flops(). The run reads `tokens`. `available` is the number of
    training tokens that there are, or 0 if there is no data yet."""
    epochs = "no data yet"
    if available:
        steps = max(round(available / config.total_batch_size), 1)
        epochs = f"{tokens / available:.3f} of {available:,} training tokens, {steps:,} steps each"
    validation = "none"
    if available and config.eval_every:
        _, shards = open_split(Path(config.data), "val", model.config.vocab_size)
        there = sum(map(len, shards))
        validation = f"the first {min(config.eval_tokens, there):,} of {there:,} tokens"
        validation += " (--eval-tokens)" if config.eval_tokens < there else ""
    return {
        "device": device_line,
        "model": f"{model.num_parameters():,} parameters, "
        f"{model.flops_per_token(config.seq_len):,} FLOPs per token",
        "MFU 100 %": f"{peak[0] / 1e12:,.3g} TFLOP/s per device ({peak[1]})",
        "tokens": f"{tokens:,} in {config.max_steps:,} steps of {config.total_batch_size:,}",
        "data": shown(config.data),
        "epochs": epochs,
        "validation": validation,
    }


def warn_of_many_epochs(config: "TrainConfig", available: int) -> None:
    """Warns if the run reads its training tokens, `available` of them, more than 20 times."""
    steps_per_epoch = available / config.total_batch_size
    if config.max_steps > 20 * steps_per_epoch:
        epochs = config.max_steps / steps_per_epoch
        problem = f"the model reads the data {epochs:,.0f} times, and may learn it by heart"
        warn(f"{problem}; {flags_for(10, config, available)} makes 10 epochs")


def flags_for(epochs: int, config: "TrainConfig", available: int) -> str:
    """The flags with which a run reads its training tokens, `available` of them, so many times."""
    steps = max(round(epochs * available / config.total_batch_size), 1)
    flags = f"--max-steps {steps}"
    if config.schedule == "wsd":
        flags += f" --warmdown-steps {steps * 3 // 4}"
    if config.warmup_steps > steps // 10:
        flags += f" --warmup-steps {steps // 10}"
    return flags


def print_plan(config: "TrainConfig", model: "GPT") -> None:
    """Prints what a run will take, and tries one step without memory. Trains nothing.

    `model` is on the device "meta"."""
    tokens = config.max_steps * config.total_batch_size
    device = choose_device(config.device)
    precision, device_line = choose_precision(config.dtype, device, model.num_parameters())
    dtype = dtype_of(precision)
    compiled = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
    flops = model.flops_per_token(config.seq_len)
    available = 0
    # The folder that fineweb.py would make may be missing, but not one that was named.
    if Path(config.data).exists() or config.data != type(config)().data:
        _, shards = open_split(Path(config.data), "train", model.config.vocab_size)
        available = sum(len(shard) for shard in shards)
    peak, source = peak_flops(device, precision)
    rate = peak * ASSUMED_MFU / flops  # tokens per second
    B, _ = choose_micro_batch(config, model, Ranks(0, 1, device), dtype, compiled)
    memory = estimate_memory(config, model, B, device.type, dtype, compiled)
    projected = f"projected: {ASSUMED_MFU:.0%} of"
    rows = describe(config, model, device_line, (peak, source), tokens, available) | {
        "FLOPs": f"{flops * tokens:.3e}",
        "memory": f"{memory / 1e9:.2f} GB with B = {B}, an estimate",
        "time": f"{duration(tokens / rate)} at {rate:,.0f} tok/s, {projected} "
        f"{peak / 1e12:,.3g} TFLOP/s ({source})",
    }
    if available:
        rows["two epochs"] = f"{flags_for(2, config, available)}, {duration(2 * available / rate)}"
    for card, gigabytes in CARDS.items():
        half = "float16" if card == "T4" else "bfloat16"
        for count in (1, 8) if gigabytes == 80 else (1,):
            sequences = max(config.total_batch_size // (count * config.seq_len), 1)
            sizes = [size for size in SIZES if sequences % size == 0]
            sizes = [config.micro_batch_size] if config.micro_batch_size else sizes
            usable = USABLE * (gigabytes * 1e9 - (2**30 if count > 1 else 0))
            needs = {
                size: estimate_memory(config, model, size, "cuda", torch.float16, compiled=True)
                for size in sizes
            }
            fitting = [size for size in sizes if needs[size] <= usable]
            tflops = count * PEAK_TFLOPS[card]
            seconds = flops * tokens / (tflops * 1e12 * ASSUMED_MFU)
            if seconds < 60:  # no reason to look for this card
                continue
            time = duration(seconds)
            row = f"B = {sizes[-1]} does not fit in {gigabytes} GB"
            if fitting:
                row = f"{time}, {projected} {tflops:,g} TFLOP/s ({half}); B = {fitting[0]} fits"
            rows[f"{count} x {card}".removeprefix("1 x ")] = row
    for name, value in rows.items():
        print(f"{name}: {value}")
    if available:
        warn_of_many_epochs(config, available)
    try_step(model, config.seq_len)

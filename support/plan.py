"""The arithmetic of a run, with which it begins, and `train_gpt2.py --plan`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from support import forks
from support.checkpoints import list_checkpoints
from support.command_line import duration, note, shown, warn
from support.devices import (
    PEAK_TFLOPS,
    choose_device,
    choose_precision,
    dtype_of,
    peak_flops,
    wants_compile,
)
from support.errors_and_signals import first_line
from support.huggingface import find_model
from support.micro_batch import SIZES, choose_micro_batch, estimate_memory, usable_memory
from support.ranks import Ranks
from support.shards import open_split, open_tokenizer
from support.tokenizer import Tokenizer

if TYPE_CHECKING:
    from train_gpt2 import GPT, DataLoaderLite, GPTConfig, TrainConfig

ASSUMED_MFU = 0.4
CARDS = [  # that many people own or rent: how many of them, and GB of memory of each
    ("T4", 1, 16),
    ("GeForce RTX 3090", 1, 24),
    ("GeForce RTX 4090", 1, 24),
    ("GeForce RTX 5090", 1, 32),
    ("A100-SXM4-80GB", 1, 80),
    ("A100-SXM4-80GB", 8, 80),
    ("H100 80GB HBM3", 1, 80),
    ("H100 80GB HBM3", 8, 80),
]


def describe(
    config: "TrainConfig",
    model: "GPT",
    device_line: str,
    peak: tuple[float, str],
    available: int,
    count: int = 1,
) -> list[str]:
    """What a run trains, and on what: the lines with which a run and its --plan begin.

    `peak` is the result of peak_flops(). `available` is the number of training tokens that there
    are, or 0 if there is no data yet. `count` is the number of devices."""
    tokens = config.max_steps * config.total_batch_size
    epochs = "no data yet"
    validation = "none"
    if available:
        steps = max(round(available / config.total_batch_size), 1)
        epochs = f"{tokens / available:.3f} of {available:,} training tokens, {steps:,} steps each"
        if config.eval_every:
            _, shards = open_split(Path(config.data), "val", model.config.vocab_size)
            there = sum(map(len, shards))
            validation = f"the first {min(config.eval_tokens, there):,} of {there:,} tokens"
            validation += " (--eval-tokens)" if config.eval_tokens < there else ""
    flops = model.flops_per_token(config.seq_len)
    peak_flops, source = peak
    seconds = flops * tokens / (ASSUMED_MFU * count * peak_flops)
    return [
        f"device: {device_line}",
        f"model: {model.num_parameters():,} parameters, {flops:,} FLOPs per token",
        f"shape: {', '.join(f'{name} {x}' for name, x in asdict(model.config).items())}",
        forks.verdict(model),
        f"MFU 100 %: {peak_flops / 1e12:,.3g} TFLOP/s per device ({source})",
        f"tokens: {tokens:,} in {config.max_steps:,} steps of {config.total_batch_size:,}",
        f"time: {duration(seconds)}, projected at {ASSUMED_MFU:.0%} MFU",
        f"data: {shown(config.data)}",
        f"epochs: {epochs}",
        f"validation: {validation}",
    ]


def warn_of_settings(config: "TrainConfig", available: int) -> None:
    """Warns of settings that are possible, but probably a mistake.

    `available` is the number of training tokens that there are."""
    epochs = config.max_steps * config.total_batch_size / available
    if epochs > 20:
        steps = max(round(10 * available / config.total_batch_size), 1)
        problem = f"the model reads the data {epochs:,.0f} times, and may learn it by heart"
        warn(f"{problem}; --max-steps {steps} makes 10 epochs")
    if 0 < config.max_steps <= config.warmup_steps:
        problem = f"the run has {config.max_steps:,} steps, so the learning rate never falls"
        warn(f"--warmup-steps {config.warmup_steps}: {problem}")


def print_plan(
    config: "TrainConfig",
    model_class: "type[GPT]",
    model_config: "Callable[[TrainConfig, Tokenizer, Path | None], GPTConfig]",
    loader_class: "type[DataLoaderLite]",
) -> None:
    """Prints what a run will take, and tries one step without memory. Trains nothing.

    Raises UserError if there is too little data, as the run would."""
    weights = None  # the folder of the model from which the run would start
    if config.resume:
        weights = next(reversed(list_checkpoints(Path(config.log_dir))), None)
    if weights is None and config.init != "scratch":
        weights = find_model(config.init)
    with torch.device("meta"):  # tensors without memory
        model = model_class(model_config(config, open_tokenizer(config.data), weights))
    device = choose_device(config.device)
    precision, device_line = choose_precision(config.dtype, device, model.num_parameters())
    peak, source = peak_flops(device, precision)
    available = 0
    # The folder that fineweb.py would make may be missing, but not one that was named.
    if Path(config.data).exists() or config.data != type(config)().data:
        T = config.seq_len
        available = loader_class(config.data, "train", 1, T, shuffle=config.shuffle).total_tokens
        if config.eval_every:
            loader_class(config.data, "val", 1, T, shuffle=False)
    # On a CPU the estimate adds to what this process has taken so far, so it comes first.
    dtype = dtype_of(precision)
    compiled = wants_compile(config.compile, device)
    B, _ = choose_micro_batch(config, model, Ranks(0, 1, device), dtype, compiled)
    memory = estimate_memory(config, model, B, device.type, dtype, compiled)
    lines = describe(config, model, device_line, (peak, source), available)

    flops = model.flops_per_token(config.seq_len) * config.max_steps * config.total_batch_size
    lines.append(f"FLOPs: {flops:.3e}")
    lines.append(f"memory: {memory / 1e9:.2f} GB with B = {B}, an estimate for a GPT-2")
    for card, count, gigabytes in CARDS:
        tflops = count * PEAK_TFLOPS[card]
        seconds = flops / (ASSUMED_MFU * 1e12 * tflops)
        if seconds < 60:  # no reason to look for this card
            continue
        usable = usable_memory(gigabytes * 1e9, count)
        sequences = config.total_batch_size // (count * config.seq_len)  # of a step, on each card
        sizes = [config.micro_batch_size] if config.micro_batch_size else SIZES
        sizes = [B for B in sizes if sequences >= B and sequences % B == 0]
        line = f"a step of {config.total_batch_size:,} tokens cannot be divided among {count}"
        if sizes:
            line = f"B = {sizes[-1]} does not fit in {gigabytes} GB"
        for B in sizes:
            if estimate_memory(config, model, B, "cuda", torch.float16, compiled=True) <= usable:
                half = "float16" if card == "T4" else "bfloat16"
                line = f"{duration(seconds)}, projected: {ASSUMED_MFU:.0%} of"
                line += f" {tflops:,g} TFLOP/s ({half}); B = {B} fits"
                break
        lines.append(f"{card if count == 1 else f'{count} x {card}'}: {line}")

    for line in lines:
        print(line)
    if available:
        warn_of_settings(config, available)
    try_step(model, config.seq_len)


def try_step(model: "GPT", T: int) -> None:
    """Tries the forward and the backward pass of a model on the device "meta", on T tokens.

    Its tensors have no memory. So any size takes a second, and a bug shows its traceback."""
    x = torch.zeros(1, T, dtype=torch.int64, device="meta")
    try:
        model(x, x).backward()
    except NotImplementedError as error:  # an operation that needs the values of tensors
        note(f"a step of this model could not be tried here ({first_line(error)})")

"""The memory and the arithmetic of a run: its micro-batch size, and `train_gpt2.py --plan`.

The model may be on the "meta" device."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from support.command_line import duration, note, print0, shown, warn
from support.devices import (
    PEAK_TFLOPS,
    choose_device,
    choose_precision,
    peak_flops,
    peak_memory,
    use_precision,
)
from support.errors_and_signals import UserError, first_line
from support.fingerprint import plain_logits
from support.ranks import Ranks
from support.shards import open_split

if TYPE_CHECKING:
    from train_gpt2 import GPT, TrainConfig

SIZES = (128, 64, 32, 16, 8, 4, 2, 1)  # micro-batches to choose from
CPU_TOKENS = 1024  # of a micro-batch on a CPU: more are not faster, and take more memory
USABLE = 0.85  # share of free GPU memory: gaps, and what the estimate does not know, take the rest
ASSUMED_MFU = 0.4
CARDS = {  # GB of memory; those with 80 are used one or eight at a time
    "T4": 16,
    "GeForce RTX 3090": 24,
    "GeForce RTX 4090": 24,
    "GeForce RTX 5090": 32,
    "A100-SXM4-80GB": 80,
    "H100 80GB HBM3": 80,
}


def try_step(model: "GPT", T: int, device: torch.device, dtype: torch.dtype) -> Exception | None:
    """Tries the forward and the backward pass of a new model like `model`, on T tokens.

    The tensors have no memory, so any size takes a second, and a GPU is left alone. But a kernel
    that does not run on a CPU is tried on the GPU. Returns the error, if there is one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if device.type == "cuda" and plain_logits(type(model), model.config) is None:
        mode = contextlib.nullcontext()
    else:
        device = torch.device("cpu")
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    try:
        with mode, torch.random.fork_rng(devices=[]), device:
            new = type(model)(model.config)
            x = torch.zeros(1, T, dtype=torch.int64)
            with autocast:
                loss = new(x, x)
            loss.backward()
    except Exception as error:
        return error
    return None


def needs_data(error: Exception) -> bool:
    """True if try_step() has failed because its tensors have no memory, and not by a bug."""
    kinds = (
        NotImplementedError,
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    return isinstance(error, kinds) or "no fake impl" in str(error)  # an operator of one's own


def estimate_memory(
    config: "TrainConfig", model: "GPT", B: int, device_type: str, dtype: torch.dtype
) -> float:
    """Bytes that a training step with micro-batches of B takes on one device: an estimate.

    Activations: for its backward pass a block keeps 16 values for each of the B T C of its input:
    64 B T C bytes in float32, 36 in 16 bits, where the residual stream stays float32 (Korthikanti
    et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2, has 34
    with a 16-bit stream). With --low-memory only the input, 4 B T C, and one whole block at a time.

    A GPU, linear in B: activations, with 16 B T C outside the blocks; weights, gradients and the
    optimizer's moments (16 bytes per parameter); gradients of the embedding as head and as input,
    and its padded copy (12 V C); the logits, also those that a fork computes outside of what is
    compiled.

    A CPU: the process itself, and the larger of two moments, both with weights and moments: in the
    loss, activations and logits; at the end of the backward pass, all gradients and one block.

    Compared with live tensors and with peaks: bench/memory/README.md."""
    T = config.seq_len
    N = model.num_parameters()
    V, C = model.config.vocab_size, model.config.n_embd
    block = B * T * C * (64 if dtype == torch.float32 else 36)
    stored = len(model.h) * block
    if config.low_memory:
        stored = len(model.h) * 4 * B * T * C + block
    if device_type == "cpu":
        process = (peak_memory() or 0.32e9) + 0.12e9  # so far, and what training loads
        gaps = 0 if config.low_memory else 0.4 * stored + 4 * V * B * T
        in_loss = stored + gaps + 12 * V * C + 12 * V * B * T
        at_end = 4 * N + 8 * V * C + block
        return process + 12 * N + max(in_loss, at_end)
    # Compiled, the gradient of the logits takes their place. Otherwise there are the logits, their
    # gradient, and what is between, in float32.
    count = plain_logits(type(model), model.config)
    more_logits = 1 if count is None else count  # None: it could not be tried
    logits = B * T * V * ((dtype.itemsize if config.compile else 16) + 16 * more_logits)
    return 16 * N + 12 * V * C + stored + 16 * B * T * C + logits


def choose_micro_batch(
    config: "TrainConfig", model: "GPT", ranks: Ranks, dtype: torch.dtype, before: int = 0
) -> int:
    """The sequences of a micro-batch (B): --micro-batch-size, or if that is 0 what fits.

    What fits is the largest power of two that divides a step. On a GPU its estimate must be below
    85 % of the memory that is free on each rank's, before the model is moved there. A resumed run
    keeps the B that it had `before`, if that divides a step and fits: another one would round
    differently."""
    if config.micro_batch_size:
        count_micro_steps(config, config.micro_batch_size, ranks.world_size)
        return config.micro_batch_size
    sequences = count_micro_steps(config, 1, ranks.world_size)  # of a step, on each rank
    usable = 0.0
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        # NCCL takes a gibibyte.
        usable = USABLE * (min(ranks.gather(free)) - (2**30 if ranks.world_size > 1 else 0))

    def fits(B: int) -> bool:
        if sequences % B:
            return False
        if ranks.device.type != "cuda":
            return B * config.seq_len <= CPU_TOKENS
        return estimate_memory(config, model, B, "cuda", dtype) <= usable

    if before and sequences % before == 0 and (ranks.device.type != "cuda" or fits(before)):
        return before
    B = next((size for size in SIZES if fits(size)), 1)
    if before:
        print0(f"note: micro-batches of {B} sequences, not {before} as before; rounding differs")
    return B


def count_micro_steps(config: "TrainConfig", B: int, world_size: int) -> int:
    """The micro-steps of a step in which every rank has B sequences at a time.

    UserError if a step cannot be divided into them."""
    tokens = B * config.seq_len * world_size  # of a micro-step
    if config.total_batch_size % tokens:
        problem = f"is not a multiple of {tokens} (sequence x micro-batch x ranks)"
        nearest = max(round(config.total_batch_size / tokens), 1) * tokens
        remedy = f"the nearest that is: {nearest}"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    return config.total_batch_size // tokens


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


def print_plan(config: "TrainConfig", model: "GPT", tokens: int) -> None:
    """Prints what a run over so many tokens will take. Trains nothing."""
    device = choose_device(config.device)
    precision, device_line = choose_precision(config.dtype, device, model.num_parameters())
    dtype, _ = use_precision(precision, device)
    flops = model.flops_per_token(config.seq_len)
    available = 0
    # The folder that fineweb.py would make may be missing, but not one that was named.
    if Path(config.data).exists() or config.data != type(config)().data:
        _, shards = open_split(Path(config.data), "train", model.config.vocab_size)
        available = sum(len(shard) for shard in shards)
    peak, source = peak_flops(device, precision)
    rate = peak * ASSUMED_MFU / flops  # tokens per second
    B = choose_micro_batch(config, model, Ranks(0, 1, device), dtype)
    memory = estimate_memory(config, model, B, device.type, dtype)
    projected = f"projected: {ASSUMED_MFU:.0%} of"
    rows = describe(config, model, device_line, (peak, source), tokens, available) | {
        "FLOPs": f"{flops * tokens:.3e}",
        "memory": f"{memory / 1e9:.2f} GB with B = {B}, an estimate",
        "time": f"{duration(tokens / rate)} at {rate:,.0f} tok/s, {projected} "
        f"{peak / 1e12:,.3g} TFLOP/s ({source})",
    }
    if available:
        rows["two epochs"] = f"{flags_for(2, config, available)}, {duration(2 * available / rate)}"
    compiled = replace(config, compile=True)
    for card, gigabytes in CARDS.items():
        half = "float16" if card == "T4" else "bfloat16"
        for count in (1, 8) if gigabytes == 80 else (1,):
            sequences = max(config.total_batch_size // (count * config.seq_len), 1)
            sizes = [size for size in SIZES if sequences % size == 0]
            sizes = [config.micro_batch_size] if config.micro_batch_size else sizes
            usable = USABLE * (gigabytes * 1e9 - (2**30 if count > 1 else 0))
            needs = {
                size: estimate_memory(compiled, model, size, "cuda", torch.float16)
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
    error = try_step(model, config.seq_len, device, dtype)
    if error is not None and not needs_data(error):
        raise error  # a bug of a fork, with its traceback
    if error is not None:
        note(f"a step of this model could not be tried here ({first_line(error)})")

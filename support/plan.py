"""The arithmetic of a run: `train_gpt2.py --plan`."""

from functools import partial
from pathlib import Path

import torch

from support.console import duration
from support.devices import PEAK_TFLOPS, choose_device, choose_precision, peak_flops
from support.memory import SIZES, estimate_memory
from support.tokenizer import open_split

ASSUMED_MFU = 0.4
CARDS = {  # GB of memory; those with 80 are used one or eight at a time
    "T4": 16,
    "GeForce RTX 3090": 24,
    "GeForce RTX 4090": 24,
    "GeForce RTX 5090": 32,
    "A100-SXM4-80GB": 80,
    "H100 80GB HBM3": 80,
}


def print_plan(
    model: torch.nn.Module,
    *,
    device: str,
    dtype: str,
    data: str,
    max_steps: int,
    total_batch_size: int,
    B: int,
    T: int,
    low_memory: bool,
    compiled: bool,
) -> None:
    """Prints what a run will take. model: a GPT, which may be on the "meta" device.

    device, dtype: as on the command line. B: 0 if it is to be found by trial."""
    chosen = choose_device(device)
    precision, description = choose_precision(dtype, chosen, model.num_parameters())
    flops = model.flops_per_token(T)
    tokens = max_steps * total_batch_size
    epochs = f"no {data} yet"
    if Path(data).exists():
        *_, shards = open_split(Path(data), "train")
        available = sum(len(shard) for shard in shards)
        epochs = f"{tokens / available:.3f} of {available:,} training tokens"
    peak, source = peak_flops(chosen, precision)
    rate = peak * ASSUMED_MFU / flops  # tokens per second
    bytes_for = partial(estimate_memory, model, T=T, low_memory=low_memory)
    memory = bytes_for(B or 1, device=chosen, dtype=precision, compiled=compiled)
    in_blocks = sum(p.numel() for p in model.h.parameters())
    projected = f"projected: {ASSUMED_MFU:.0%} of"
    rows = {
        "device": description,
        "parameters": f"{model.num_parameters():,} ({in_blocks:,} in the blocks)",
        "FLOPs per token": f"{flops:,} (6 N + 12 L C T, N without position embeddings)",
        "tokens": f"{tokens:,} in {max_steps:,} steps of {total_batch_size:,}",
        "epochs": epochs,
        "FLOPs": f"{flops * tokens:.3e}",
        "memory": f"{memory / 1e9:.2f} GB with B = {B or 1}, an estimate",
        "time": f"{duration(tokens / rate)} at {rate:,.0f} tok/s, {projected} "
        f"{peak / 1e12:,.3g} TFLOP/s ({source})",
    }
    on_gpu = partial(bytes_for, device=torch.device("cuda"), dtype=torch.float16, compiled=True)
    for card, gigabytes in CARDS.items():
        for count in (1, 8) if gigabytes == 80 else (1,):
            sequences = max(total_batch_size // (count * T), 1)  # per step on each card
            sizes = [B] if B else [size for size in SIZES if sequences % size == 0]
            # CUDA itself, a display and gaps take a tenth.
            fitting = [size for size in sizes if on_gpu(size) <= 0.9e9 * gigabytes]
            tflops = count * PEAK_TFLOPS[card]
            seconds = flops * tokens / (tflops * 1e12 * ASSUMED_MFU)
            time = duration(seconds) if seconds >= 60 else "less than a minute"
            half = "float16" if card == "T4" else "bfloat16"
            row = f"B = {sizes[-1]} does not fit in {gigabytes} GB"
            if fitting:
                row = f"{time}, {projected} {tflops:,g} TFLOP/s ({half}); B = {fitting[0]} fits"
            rows[f"{count} x {card}".removeprefix("1 x ")] = row
    for name, value in rows.items():
        print(f"{name:>18}: {value}")

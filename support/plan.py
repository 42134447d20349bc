"""The arithmetic of a run: `train_gpt2.py --plan`."""

from pathlib import Path

import torch

from support.console import duration
from support.devices import PEAK_TFLOPS, choose_device, choose_precision, peak_flops
from support.memory import estimate_memory
from support.tokenizer import open_split

ASSUMED_MFU = 0.4


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
    B = B or 1
    flops = model.flops_per_token(T)
    tokens = max_steps * total_batch_size
    epochs = f"no {data} yet"
    if Path(data).exists():
        *_, shards = open_split(Path(data), "train")
        available = sum(len(shard) for shard in shards)
        epochs = f"{tokens / available:.3f} of {available:,} training tokens"
    peak, source = peak_flops(chosen, precision)
    rate = peak * ASSUMED_MFU / flops  # tokens per second
    memory = estimate_memory(
        model, B, T, chosen, precision, low_memory=low_memory, compiled=compiled
    )
    in_blocks = sum(p.numel() for p in model.h.parameters())
    projected = f"projected: {ASSUMED_MFU:.0%} of"
    rows = {
        "device": description,
        "parameters": f"{model.num_parameters():,} ({in_blocks:,} in the blocks)",
        "FLOPs per token": f"{flops:,} (6 N + 12 L C T, N without position embeddings)",
        "tokens": f"{tokens:,} in {max_steps:,} steps of {total_batch_size:,}",
        "epochs": epochs,
        "FLOPs": f"{flops * tokens:.3e}",
        "memory": f"{memory / 1e9:.2f} GB with B = {B}, an estimate",
        "time": f"{duration(tokens / rate)} at {rate:,.0f} tok/s, {projected} "
        f"{peak / 1e12:,.3g} TFLOP/s ({source})",
    }
    for name, chip in {"A100": "A100-SXM4-80GB", "H100": "H100 80GB HBM3"}.items():
        seconds = flops * tokens / (8 * PEAK_TFLOPS[chip] * 1e12 * ASSUMED_MFU)
        rows[f"on 8 x {name}"] = f"{duration(seconds)}, {projected} 8 x {PEAK_TFLOPS[chip]} TFLOP/s"
    for name, value in rows.items():
        print(f"{name:>13}: {value}")

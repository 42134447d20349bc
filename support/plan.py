"""A run's arithmetic (`--plan`), and whether a micro-batch fits on a GPU."""

import gc
from pathlib import Path

import torch

from support.devices import duration, peak_flops
from support.failures import is_out_of_memory
from support.gpus import PEAK_TFLOPS
from support.tokenizer import open_split

ASSUMED_MFU = 0.4


def estimate_memory(
    model: torch.nn.Module,
    B: int,
    T: int,
    device: torch.device,
    dtype: torch.dtype,
    low_memory: bool,
    compiled: bool,
) -> float:
    """Bytes that a training step takes on one device: an estimate, linear in B.

    Weights, gradients and the optimizer's moments take 16 bytes a parameter, the two gradients of
    the embedding (head and input) 8 V C while they are added. For its backward pass a block keeps
    16 values for each of the B T C of its input: 64 B T C bytes in float32, 36 in 16 bits, where
    the residual stream stays float32 (Korthikanti et al. 2022, "Reducing Activation Recomputation
    in Large Transformer Models", equation 2, has 34 with a 16-bit stream); with --low-memory only
    the input, 4 B T C. A compiled loss keeps the 16-bit logits. On a CPU the process counts.
    Measured against peaks: bench/memory/README.md."""
    V, C = model.wte.weight.shape
    block = 4 if low_memory else 64 if dtype == torch.float32 else 36
    fixed = 16 * model.num_parameters() + 8 * V * C + (0.365e9 if device.type == "cpu" else 0)
    logits = V * dtype.itemsize if compiled and device.type != "cpu" and not low_memory else 0
    return fixed + B * T * (len(model.h) * block * C + logits)


def print_plan(
    model: torch.nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    description: str,
    /,
    *,
    data: str,
    max_steps: int,
    total_batch_size: int,
    micro_batch_size: int,
    seq_len: int,
    low_memory: bool,
    compile: bool,
    **_: object,
) -> None:
    """Prints what a run will take. model: a GPT, which may be on the "meta" device.

    The keywords are settings of that name; others are ignored."""
    B, T = micro_batch_size or 1, seq_len
    N, flops = model.num_parameters(), model.flops_per_token(T)
    tokens, epochs = max_steps * total_batch_size, f"no {data} yet"
    if Path(data).exists():
        available = sum(len(shard) for shard in open_split(Path(data), "train")[1])
        epochs = f"{tokens / available:.3f} of {available:,} training tokens"
    peak, source = peak_flops(device, dtype)
    rate = peak * ASSUMED_MFU / flops
    memory = estimate_memory(model, B, T, device, dtype, low_memory, compile)
    projected = f"projected: {ASSUMED_MFU:.0%} of"
    rows = {
        "device": description,
        "parameters": f"{N:,} ({sum(p.numel() for p in model.h.parameters()):,} in the blocks)",
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


def fits(
    model: torch.nn.Module,
    B: int,
    T: int,
    low_memory: bool,
    autocast: torch.autocast,
    several_ranks: bool,
    shards: int,
    keeps_logits: bool,
    accumulates: bool,
) -> bool:
    """Tries whether a GPU has the memory for a step with micro-batches of B sequences.

    Runs an eager forward and backward pass with the chunked loss, which stores no less than a
    compiled one, beside what else a step needs: the optimizer's moments, divided by `shards`;
    buffers for several ranks; keeps_logits: those of a compiled loss, and their gradient;
    accumulates: gradients of earlier micro-steps (or DDP's buckets) during the backward pass."""
    weight, (V, _) = model.wte.weight, model.wte.weight.shape
    reserve = 8 * model.num_parameters() // shards
    if keeps_logits:
        reserve += 2 * B * T * (V + -V % 64) * autocast.fast_dtype.itemsize
    if several_ranks:
        reserve += 2**30  # an allowance for NCCL
    loss_function = model.loss_function
    try:
        model.prepare(low_memory=low_memory)
        x = torch.zeros(B, T, dtype=torch.int64, device=weight.device)
        reserved = torch.empty(reserve, dtype=torch.uint8, device=weight.device)
        if accumulates:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        with autocast:
            _, loss = model(x, x)
        loss.backward()
        del reserved
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.loss_function = loss_function
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()

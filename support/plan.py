"""The arithmetic of a run: parameters, FLOPs, tokens, epochs, memory, time and cost, for `train_gpt2.py --plan` and for
the first lines of a run."""

from pathlib import Path
from typing import Any

import torch

from support.cli import say, say_wrapped, shown
from support.devices import PEAK_TFLOPS, choose_device, peak_flops
from support.distributed import Distributed
from support.loss import HEAD_TOKENS
from support.shards import find_shards, open_shard, tokenize_text

ASSUMED_MFU = 0.4
CLOUD_GPUS = {"A100": ("A100-SXM4-80GB", 2.0), "H100": ("H100 80GB HBM3", 3.0)}  # dollars an hour: assumed, round


def count_tokens(data: Path) -> int | None:
    """Training tokens of a folder of shards or a .txt file, None when it isn't there. Raises InputError."""
    if data.is_dir():
        return sum(len(open_shard(path)) for path in find_shards(data, "train"))
    return len(tokenize_text(data, "train")) if data.is_file() else None


def duration(seconds: float) -> str:
    if seconds >= 1000 * 3600:
        return f"{seconds / 86400:,.0f} days"
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def memory_of(model: Any, B: int, T: int, device: torch.device, dtype: torch.dtype, low_memory: bool) -> dict[str, int]:
    """Bytes that a training step takes, by part: an estimate.

    Weights, gradients and Adam's two moments are float32. Activations take 34 B T C bytes a layer in 16 bits with an
    attention that keeps no T x T matrix (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models", equation 2), double in float32; the gradients of one layer's come on top. The logits, float32,
    are three times (B T, V); where ChunkedLoss makes them, twice those of HEAD_TOKENS tokens, and twice the gradient of
    the embedding. On a CPU the process counts, too; on a GPU what CUDA takes for itself does not.
    """
    N, tokens, cpu = model.num_parameters(), B * T, device.type == "cpu"
    V, C = model.wte.weight.shape
    layer = 34 * tokens * C * (2 if dtype == torch.float32 else 1)
    fused = 8 * V * min(tokens, HEAD_TOKENS) + 8 * V * C
    parts = {"weights": 4 * N, "gradients": 4 * N, "Adam's moments": 8 * N, "activations": layer * (len(model.h) + 1),
             "head and loss": fused if cpu or low_memory else 12 * V * tokens}
    return parts | ({"the process": 300_000_000} if cpu else {})


def print_plan(config: Any, model: Any) -> None:
    """What the run that `config`, a TrainConfig, describes will take. model: the GPT it trains; its parameters need no
    memory, torch's "meta" device will do."""
    device, dtype, description = choose_device(config.device, config.dtype)
    N, flops = model.num_parameters(), model.flops_per_token(config.seq_len)
    tokens = config.max_steps * config.total_batch_size
    available = count_tokens(Path(config.data))
    peak, source = peak_flops(device, dtype)
    rate = peak * ASSUMED_MFU / flops
    B = config.micro_batch_size or 1
    memory = memory_of(model, B, config.seq_len, device, dtype, config.low_memory)
    rows = [
        ("device", description),
        ("parameters", f"{N:,} ({model.num_parameters(False) - model.wte.weight.numel():,} without embeddings)"),
        ("FLOPs a token", f"{flops:,} (6 N + 12 L C T, N without position embeddings)"),
        ("tokens", f"{tokens:,} in {config.max_steps:,} steps of {config.total_batch_size:,}"),
        ("epochs", f"{tokens / available:.3f} of {available:,} training tokens" if available else
         f"unknown: no {config.data} yet"),
        ("FLOPs", f"{flops * tokens:.3e} (napkin, 6 x parameters x tokens: {6 * N * tokens:.3e})"),
        ("memory", f"{sum(memory.values()) / 1e9:.2f} GB at B = {B}, an estimate (napkin, 16 bytes a parameter: "
                   f"{16e-9 * N:.2f})"),
        ("", ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items())),
        ("time", f"{duration(tokens / rate)} on this device at {rate:,.0f} tok/s: a projection,"),
        ("", f"{ASSUMED_MFU:.0%} of its {peak / 1e12:,.3g} TFLOP/s ({source})"),
    ]
    for name, (chip, price) in CLOUD_GPUS.items():
        speed = 8 * PEAK_TFLOPS[chip] * 1e12 * ASSUMED_MFU
        hours = flops * tokens / speed / 3600
        rows.append((f"on 8 x {name}", f"{duration(3600 * hours)}, ${8 * hours * price:,.2f}; napkin "
                                       f"{duration(6 * N * tokens / speed)} (assumed: MFU {ASSUMED_MFU:.0%} of "
                                       f"{PEAK_TFLOPS[chip]}, ${price:.2f} a GPU hour)"))
    for name, value in rows:
        print(f"{name:>15}{':' if name else ' '} {value}")


def announce(config: Any, model: Any, loader: Any, checkpoint: Path | None, dist: Distributed) -> None:
    """Prints what is about to be trained, on what data, in which batches, and where it will be kept."""
    peak, peak_source = peak_flops(dist.device, dist.dtype)
    tokens, documents = loader.stream.total_tokens, loader.stream.count_documents()
    epochs = config.max_steps * config.total_batch_size / tokens
    of_documents = f" in {documents:,} documents" if documents else ""
    say_wrapped(
        f"model: {model.num_parameters():,} parameters, {model.flops_per_token(config.seq_len) / 1e6:,.0f} MFLOP a "
        f"token\nspeed: MFU 100 % = {peak / 1e12:,.3g} TFLOP/s a device ({peak_source})\n"
        f"data: {shown(config.data)}, {tokens:,} training tokens{of_documents}\n"
        f"steps: {config.max_steps:,} of {config.total_batch_size:,} tokens, {epochs:.3f} epochs"
    )
    if epochs > 1:
        order = "another" if config.shuffle else "the same"
        say(f"data: from step {tokens // config.total_batch_size:,} on they repeat, in {order} order")
    micro_batches = config.total_batch_size // (loader.B * loader.T)
    micro_steps, rest = divmod(micro_batches, dist.world_size)
    shares = f"\n  {micro_batches} micro-batches, dealt out to" if rest else f" {several(micro_steps, 'micro-step')} x"
    say_wrapped(f"batch: {config.total_batch_size:,} tokens = {several(loader.B, 'sequence')} x {loader.T} tokens x"
                f"{shares} {several(dist.world_size, 'rank')}")
    say(f"log and checkpoints: {config.log_dir}/")
    if checkpoint:
        say(f"resumed from {checkpoint}")


def several(count: int, thing: str) -> str:
    return f"{count} {thing}" + "s" * (count != 1)

"""The arithmetic of a run: parameters, FLOPs, tokens, epochs, memory, time and cost, for `train_gpt2.py --plan` and for
the first lines of a run."""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support.cli import say, say_wrapped, shown
from support.devices import PEAK_TFLOPS, choose_device, peak_flops
from support.distributed import Distributed
from support.memory import (
    ALLOCATOR_WASTE,
    CUDA_ITSELF,
    few_tokens,
    largest_by_estimate,
    memory_of,
    micro_batch_sizes,
    room_of,
    usable,
    with_flags,
)
from support.shards import find_shards, open_shard, tokenize_text

ASSUMED_MFU = 0.4
CARDS = {  # GB of a card -> one of that size in PEAK_TFLOPS
    8: "", 12: "", 16: "T4", 24: "GeForce RTX 4090", 40: "A100-SXM4-40GB", 80: "H100 80GB HBM3", 141: "H200",
}
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


def short_duration(seconds: float) -> str:
    """At most three figures and a letter: 45m, 6.4h, 12d."""
    for unit, letter in ((86400, "d"), (3600, "h")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g}{letter}" if seconds < 10 * unit else f"{seconds / unit:.0f}{letter}"
    return f"{seconds / 60:.0f}m"


def on_cards(config: Any, model: Any, gigabytes: float, chip: str, ranks: int) -> str:
    """What such cards take: the micro-batch, letters for the flags that it needs, and the run's projected time; "-"
    where nothing fits. "16 ls 6.4h": 16 sequences with --low-memory and --shard-optimizer, in 6.4 hours."""
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    dist = Distributed(0, 0, ranks, torch.device("cuda"), dtype, "")
    for way in with_flags(replace(config, compile=True, micro_batch_size=0), ranks):
        if B := largest_by_estimate(model, way, dist, usable(gigabytes * 1e9)):
            letters = "l" * way.low_memory + "s" * (way.shard_optimizer and ranks > 1)
            flops = model.flops_per_token(config.seq_len) * config.max_steps * config.total_batch_size
            speed = ranks * PEAK_TFLOPS.get(chip, 0) * 1e12 * ASSUMED_MFU * (dtype != torch.float32)
            recomputed = 4 / 3 if way.low_memory else 1  # a forward pass, a third of the FLOPs, comes twice
            return " ".join(filter(None, (str(B), letters, speed and short_duration(recomputed * flops / speed))))
    return "-"


def plan_of_cards(config: Any, model: Any) -> list[list[str]]:
    """A row for each size of a card: GB, a chip, and what 1, 2, 4 and 8 of them take (on_cards)."""
    return [[str(size), chip.removeprefix("GeForce "), *(on_cards(config, model, size, chip, n) for n in (1, 2, 4, 8))]
            for size, chip in CARDS.items()]


def expected_micro_batch(config: Any, model: Any, dist: Distributed) -> int:
    """The micro-batch that a run will take on this device; on a GPU by the estimate, where a run tries."""
    if config.micro_batch_size or dist.device.type != "cuda":
        return config.micro_batch_size or few_tokens(micro_batch_sizes(config, 1), config.seq_len)
    return largest_by_estimate(model, config, dist, usable(room_of(dist))) or 1


def print_plan(config: Any, model: Any) -> None:
    """What the run that `config`, a TrainConfig, describes will take. model: the GPT it trains; its parameters need no
    memory, torch's "meta" device will do."""
    device, dtype, description = choose_device(config.device, config.dtype)
    N, flops = model.num_parameters(), model.flops_per_token(config.seq_len)
    tokens = config.max_steps * config.total_batch_size
    available = count_tokens(Path(config.data))
    peak, source = peak_flops(device, dtype)
    rate = peak * ASSUMED_MFU / flops
    dist = Distributed(0, 0, 1, device, dtype, description)
    B = expected_micro_batch(config, model, dist)
    memory = memory_of(model, B, config, dist)
    rows = [
        ("device", description),
        ("parameters", f"{N:,} ({model.num_parameters(False) - model.wte.weight.numel():,} without embeddings)"),
        ("FLOPs a token", f"{flops:,} (6 N + 12 L C T, N without position embeddings)"),
        ("tokens", f"{tokens:,} in {config.max_steps:,} steps of {config.total_batch_size:,}"),
        ("epochs", f"{tokens / available:.3f} of {available:,} training tokens" if available else
         f"unknown: no {config.data} yet"),
        ("FLOPs", f"{flops * tokens:.3e} (napkin, 6 x parameters x tokens: {6 * N * tokens:.3e})"),
        ("memory", f"{sum(memory.values()) / 1e9:.2f} GB at B = {B}, an estimate: "
                   f"{', '.join(f'{name} {size / 1e9:.2f}' for name, size in memory.items())} (napkin, 16 bytes a "
                   f"parameter: {16e-9 * N:.2f})"),
        ("time", f"{duration(tokens / rate)} on this device at {rate:,.0f} tok/s: a projection, {ASSUMED_MFU:.0%} of "
                 f"its {peak / 1e12:,.3g} TFLOP/s ({source})"),
    ]
    for name, (chip, price) in CLOUD_GPUS.items():
        speed = 8 * PEAK_TFLOPS[chip] * 1e12 * ASSUMED_MFU
        hours = flops * tokens / speed / 3600
        rows.append((f"on 8 x {name}", f"{duration(3600 * hours)}, ${8 * hours * price:,.2f}; napkin "
                                       f"{duration(6 * N * tokens / speed)} (assumed: MFU {ASSUMED_MFU:.0%} of "
                                       f"{PEAK_TFLOPS[chip]}, ${price:.2f} a GPU hour)"))
    for name, value in rows:
        print(f"{name:>15}: " + "\n".ljust(18).join(textwrap.wrap(value, 62, break_long_words=False)))
    print("\nWhat GPUs take, projected:")
    heads = ["GB", "for example", *(f"on {n}" for n in (1, 2, 4, 8))]
    for size, chip, *cells in [heads, *plan_of_cards(config, model)]:
        print(f"{size:>4}  {chip:16}" + "".join(f"{cell:<14}" for cell in cells).rstrip())
    print("\n".join(textwrap.wrap(
        "The sequences of a micro-batch; l where they need --low-memory, s --shard-optimizer, - where nothing fits; "
        f"and the run's time at {ASSUMED_MFU:.0%} of the chip's 16-bit peak. By the estimate above, in 16 bits, "
        f"compiled, leaving {CUDA_ITSELF / 1e9} GB to CUDA itself and {ALLOCATOR_WASTE:.0%} for what its allocator "
        "wastes, both assumed.", 80)))


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

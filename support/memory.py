"""The memory of a training step: what it takes, by arithmetic; the micro-batch, on a GPU the largest that fits, found
by trying; and for what doesn't fit, the flags that would make it."""

import contextlib
import gc
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from support.cli import flag
from support.devices import computes_in_bfloat16, is_out_of_memory, return_freed_memory
from support.distributed import Distributed, SharedError
from support.loss import HEAD_TOKENS, chunked_next_token_loss
from support.sharding import largest_share


def micro_batch_sizes(config: Any, world_size: int) -> list[int]:
    """The powers of two that divide a step's sequences; first those that leave the fewest ranks without work."""
    sequences = config.total_batch_size // config.seq_len
    sizes = [B for B in (128, 64, 32, 16, 8, 4, 2, 1) if sequences % B == 0]
    return sorted(sizes, key=lambda B: B * math.ceil(sequences / B / world_size))  # of the busiest rank in a step


def few_tokens(sizes: list[int], T: int) -> int:
    """The first size for a device whose memory is shared with everything else: 4,096 tokens fill a CPU's cores."""
    return next(B for B in sizes if B * T <= 4096 or B == 1)


def choose_micro_batch_size(config: Any, model: Any, dist: Distributed) -> int:
    """B: --micro-batch-size, or the largest power of two that fits and leaves the fewest ranks without work. Raises
    InputError, on all ranks, for a batch that is no whole number of micro-batches, and for one that cannot fit."""
    T = config.seq_len
    unit = T * max(config.micro_batch_size, 1)
    if config.total_batch_size % unit:
        nearest = max(round(config.total_batch_size / unit), 1) * unit
        raise SharedError(f"--total-batch-size {config.total_batch_size} is no multiple of {unit} (sequence length x "
                          f"micro-batch); the nearest that is: {nearest}")
    refuse_what_cannot_fit(config, model, dist)
    sizes = micro_batch_sizes(config, dist.world_size)
    if config.micro_batch_size:
        B = config.micro_batch_size
    elif dist.device.type == "cuda":
        B = largest_that_fits(sizes, model, config, dist)
    else:
        B = few_tokens(sizes, T)
    if dist.device.type == "cpu" and model.num_parameters() > LARGE and B * T >= 512:
        return_freed_memory(small=config.low_memory)
    dist.ways_out = lambda: ways_out(model, B, config, dist)
    return B


def recomputed(block: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """block(x, mask), of which x alone is kept: the backward pass runs the block again (Chen et al. 2016, "Training
    Deep Nets with Sublinear Memory Cost")."""
    x = checkpoint(block, x, mask, use_reentrant=False)
    torch.clear_autocast_cache()  # otherwise the 16-bit copies of all weights stay until the forward pass ends
    return x


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic


LARGE = 50_000_000  # parameters, of a model whose weights take more than the loss's logits
PROCESS = 365_000_000  # bytes of Python, torch and what they read, measured on Linux


def makes_logits_in_pieces(config: Any, device: torch.device) -> bool:
    """Whether a training step makes its logits HEAD_TOKENS tokens at a time (choose_loss in train_gpt2.py)."""
    return not config.compile or config.low_memory or device.type == "cpu"


def adds_to_gradients(B: int, config: Any, dist: Distributed) -> bool:
    """Whether a backward pass finds gradients: those of earlier micro-steps, or DDP's buckets, which always stay."""
    return dist.world_size > 1 or config.total_batch_size > B * config.seq_len


def moments_of(model: Any, config: Any, dist: Distributed) -> int:
    """Bytes of the optimizer's state, on the rank that has the most: AdamW's two moments of every parameter, Muon's one
    of each matrix of the blocks."""
    ranks = dist.world_size if config.shard_optimizer else 1
    muons = {id(p) for p in model.h.parameters() if p.dim() == 2} if config.optimizer == "muon" else {}
    shares = [largest_share([p.numel() for p in model.parameters() if (id(p) in muons) == muon], ranks)
              for muon in (False, True)]
    return 8 * shares[0] + 4 * shares[1]


def bytes_besides(model: Any, B: int, config: Any, dist: Distributed) -> int:
    """What a training step holds, and a forward and backward pass with the loss in pieces does not: the optimizer's
    state; a compiled step's one buffer of 16-bit logits, which becomes their gradient."""
    V = model.wte.weight.size(0)
    logits = B * config.seq_len * (V + -V % 64) * dist.dtype.itemsize
    return moments_of(model, config, dist) + (0 if makes_logits_in_pieces(config, dist.device) else logits)


def memory_of(model: Any, B: int, config: Any, dist: Distributed) -> dict[str, int]:
    """Bytes that a training step takes on a rank at its peak, by part: an estimate. config: a TrainConfig.

    Weights, gradients and the optimizer's state are float32. For its backward pass an eager block keeps 16 values for
    each of the B T C of its input: that, LayerNorm's result, query, key and value, attention's result; and of the MLP
    input, LayerNorm's result, and 4 C each before and after GELU. In float32 that is 64 B T C bytes, in 16 bits 36 (the
    two inputs stay float32) and a 16-bit copy of the weights. (Korthikanti et al. 2022, "Reducing Activation
    Recomputation in Large Transformer Models", equation 2, count 34, with dropout and a 16-bit stream.) Compiled blocks
    keep no more (34 with torch 2.13). With --low-memory a block keeps its input alone, and one at a time the rest.

    A step is largest at one of five points: when the loss's gradient is made, HEAD_TOKENS logits at a time; in the
    backward pass of the last block; in that of the first; at its end, when the embedding's two gradients, the head's
    and the input's, are added; or in Muon's update. On a CPU the process counts, too; on a GPU what CUDA takes doesn't.
    """
    (V, C), L, N = model.wte.weight.shape, len(model.h), model.num_parameters()
    stream, wide, width = B * config.seq_len * C, dist.dtype == torch.float32, dist.dtype.itemsize  # (B, T, C)
    block = 64 * stream if wide else 36 * stream + 2 * 12 * C * C
    kept = L * 4 * stream if config.low_memory else L * block
    recomputed, inside = block if config.low_memory else 0, (4 + 5 * width) * stream  # gradients inside a block
    gradients = 4 * N if adds_to_gradients(B, config, dist) else 0
    moments, embedding = moments_of(model, config, dist), 4 * V * C
    besides = bytes_besides(model, B, config, dist) - moments
    pieces = (4 if wide else 6) * V * min(B * config.seq_len, HEAD_TOKENS) + 2 * embedding + 12 * stream
    peaks = [
        {"gradients": gradients, "activations": kept, "head and loss": pieces + besides},
        {"gradients": gradients, "activations": kept + recomputed + inside, "head and loss": embedding},
        {"gradients": 4 * N, "activations": block + inside, "head and loss": embedding if gradients else 0},
        {"gradients": 4 * N, "activations": 4 * stream, "head and loss": (3 if gradients else 2) * embedding},
        {"gradients": 4 * N, "Muon's products": muon_update(model, config, dist)},
    ]
    peak = max(peaks, key=lambda parts: sum(parts.values()))
    process = {"the process": PROCESS} if dist.device.type == "cpu" else {}
    return {"weights": 4 * N, "moments": moments} | peak | process


def muon_update(model: Any, config: Any, dist: Distributed) -> int:
    """Bytes that Muon's update takes for itself: the updates of all matrices, float32; and for the last group, one of
    the MLP's two (4 C, C) a layer, at a time the group before it orthogonal, this one, and two steps of its iteration
    with two products of (C, C). Several ranks share the iteration, or with --shard-optimizer everything."""
    if config.optimizer != "muon":
        return 0
    square, R = len(model.h) * model.wte.weight.size(1) ** 2, dist.world_size  # values of all layers' (C, C)
    width = 2 if dist.device.type == "cuda" or computes_in_bfloat16(dist.device) else 4
    if config.shard_optimizer:
        return (4 * 12 + 18 * width) * square // R
    return int((4 * 12 + (18 if R == 1 else 12 + 14 / R) * width) * square)


# ---------------------------------------------------------------------------------------------------------------------
# What a device has, and what to do where that is too little

CUDA_ITSELF, ALLOCATOR_WASTE = 0.5e9, 0.05  # assumed: bytes of the context and the libraries; share that has holes


def usable(memory: float) -> float:
    """Bytes of a GPU's `memory` that a training step can have: an assumption."""
    return memory * (1 - ALLOCATOR_WASTE) - CUDA_ITSELF


def memory_of_machine() -> int:
    """Bytes of this machine's memory, or of the container's share, and of its swap."""
    total, swap = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    with contextlib.suppress(OSError, ValueError):  # "max" where a container has no limit of its own
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with contextlib.suppress(OSError):  # Linux alone has the file
        swap = sum(int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
                   if line.startswith("SwapTotal:"))
    return total + swap


def room_of(dist: Distributed) -> int | None:
    """Bytes that this rank could have at most: its GPU, or its part of the machine; None where nothing tells."""
    if dist.device.type == "cuda":
        return torch.cuda.get_device_properties(dist.device).total_memory
    if dist.device.type == "cpu" and hasattr(os, "sysconf"):
        return memory_of_machine() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return None


def refuse_what_cannot_fit(config: Any, model: Any, dist: Distributed) -> None:
    """Raises InputError, on all ranks, for a step that is larger than a rank's whole memory, without what may turn out
    smaller than estimated: compiled blocks, the loss, the process. model: parameters on "meta" will do."""
    B = config.micro_batch_size or 1
    stream, width = B * config.seq_len * model.wte.weight.size(1), dist.dtype.itemsize
    # A compiled block keeps its input, and of its products those that it cannot do without.
    block = 4 * stream if config.low_memory else (4 + 8 * width) * stream
    weights = gradients = 4 * model.num_parameters()
    kept = gradients if adds_to_gradients(B, config, dist) else 0
    needed = weights + moments_of(model, config, dist) + max(kept + len(model.h) * block, gradients)
    rooms = dist.gather(room_of(dist))
    room = min((room for room in rooms if room), default=needed)
    if needed > room:
        where = "a GPU" if dist.device.type == "cuda" else "each rank" if dist.world_size > 1 else "this machine"
        total = sum(memory_of(model, B, config, dist).values())
        raise SharedError(f"{model.num_parameters():,} parameters in micro-batches of {B} x {config.seq_len} tokens "
                          f"take {total / 1e9:.1f} GB; {where} has {room / 1e9:.1f}. "
                          f"{ways_out(model, B, config, dist, room)}")


def with_flags(config: Any, ranks: int) -> Iterator[Any]:
    """`config` and what it becomes with the flags that save memory, on so many ranks: the fewest and cheapest first."""
    for low_memory in dict.fromkeys((config.low_memory, True)):
        for shard_optimizer in dict.fromkeys((config.shard_optimizer, config.shard_optimizer or ranks > 1)):
            yield replace(config, low_memory=low_memory, shard_optimizer=shard_optimizer)


def largest_by_estimate(model: Any, config: Any, dist: Distributed, room: float) -> int | None:
    """The micro-batch, of at most --micro-batch-size sequences, that a run would take with `room` bytes a rank; None
    where not one sequence fits."""
    limit = config.micro_batch_size or math.inf
    sizes = [B for B in micro_batch_sizes(config, dist.world_size) if limit >= B]
    total = lambda B: sum(memory_of(model, B, config, dist).values())  # noqa: E731
    return next((B for B in sizes if total(B) <= room), None) if sizes and total(min(sizes)) <= room else None


def ways_out(model: Any, B: int, config: Any, dist: Distributed, room: float | None = None) -> str:
    """The flags that make a step fit, as a sentence: computed, for `room` bytes a rank, and for less than what the step
    with B takes, which was too much. First those on as many ranks, then on more, then shorter sequences."""
    room = room_of(dist) or math.inf if room is None else room
    room = usable(room) if dist.device.type == "cuda" else room
    room = min(room, sum(memory_of(model, B, config, dist).values()) - 1)
    more = [ranks for ranks in (2, 4, 8) if ranks > dist.world_size and dist.device.type == "cuda"]
    shorter = [T for T in (1024, 512, 256, 128, 64) if config.seq_len > T]
    for T, ranks in [(config.seq_len, n) for n in (dist.world_size, *more)] + [(T, dist.world_size) for T in shorter]:
        found: dict[str, int] = {}
        for way in with_flags(replace(config, seq_len=T), ranks):
            size = largest_by_estimate(model, way, replace(dist, world_size=ranks), room)
            if size and size > max(found.values(), default=0):
                way = replace(way, micro_batch_size=config.micro_batch_size and size)
                flags = [flag(name) + ("" if value is True else f" {value}") for name, value in asdict(way).items()
                         if value != getattr(config, name)]
                found[" ".join(flags) + (f" on {ranks} GPUs" if ranks > dist.world_size else "")] = size
        if found:
            return f"What fits: {', or '.join(list(found)[:2])}"
    return "Not one sequence of 64 tokens would fit: train a smaller model"


# ---------------------------------------------------------------------------------------------------------------------
# The largest micro-batch, by trying


def fits(model: Any, B: int, config: Any, dist: Distributed) -> bool:
    """Whether this rank has the memory for a step with micro-batches of B sequences: by trying an eager one, whose
    blocks keep no less than compiled ones, beside an allocation of bytes_besides."""
    try:
        reserved = torch.empty(bytes_besides(model, B, config, dist), dtype=torch.uint8, device=dist.device)
        for p in model.parameters() if adds_to_gradients(B, config, dist) else ():
            p.grad = torch.zeros_like(p)
        x = torch.zeros(B, config.seq_len, dtype=torch.int64, device=dist.device)
        with dist.autocast(), torch.compiler.set_stance("force_eager"):
            model(x, x, chunked_next_token_loss)[1].backward()
        del reserved
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)


def largest_that_fits(sizes: Iterable[int], model: Any, config: Any, dist: Distributed) -> int:
    """The first of `sizes`, the wanted first, with which a training step fits on all ranks. Raises InputError."""
    for B in sizes:
        fit = fits(model, B, config, dist)
        gc.collect()
        torch.cuda.empty_cache()
        if all(dist.gather(fit)):
            return B
    raise SharedError(f"not one sequence of {config.seq_len} tokens fits into the GPU's memory. "
                      f"{ways_out(model, B, config, dist)}")

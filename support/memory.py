"""The micro-batch: how many sequences at a time; on a GPU as many as fit, found by trying."""

import gc
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from support.cli import InputError
from support.distributed import Distributed, SharedError
from support.loss import chunked_next_token_loss
from support.sharding import largest_share


def choose_micro_batch_size(config: Any, model: Any, dist: Distributed) -> int:
    """B: --micro-batch-size, or the largest power of two that fits and leaves the fewest ranks without work. Raises
    InputError, on all ranks, for a batch that is no whole number of micro-batches."""
    T, world_size = config.seq_len, dist.world_size
    unit = T * max(config.micro_batch_size, 1)
    if config.total_batch_size % unit:
        nearest = max(round(config.total_batch_size / unit), 1) * unit
        raise SharedError(f"--total-batch-size {config.total_batch_size} is no multiple of {unit} (sequence length x "
                          f"micro-batch); the nearest that is: {nearest}")
    if config.micro_batch_size:
        return config.micro_batch_size
    sequences = config.total_batch_size // T
    sizes = [B for B in (128, 64, 32, 16, 8, 4, 2, 1) if sequences % B == 0]
    sizes.sort(key=lambda B: B * math.ceil(sequences / B / world_size))  # sequences of the busiest rank in a step
    if dist.device.type != "cuda":  # memory is shared with everything else, and a few thousand tokens fill the cores
        return next(B for B in sizes if B * T <= 4096 or B == 1)
    return largest_that_fits(sizes, model, config, dist)


def recomputed(block: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """block(x, mask), of which x alone is kept: the backward pass runs the block again (Chen et al. 2016, "Training
    Deep Nets with Sublinear Memory Cost")."""
    x = checkpoint(block, x, mask, use_reentrant=False)
    torch.clear_autocast_cache()  # otherwise the 16-bit copies of all weights stay until the forward pass ends
    return x


OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an operation failed for want of memory: torch's own error, or that of a library that torch passes on."""
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error) for part in OUT_OF_MEMORY)


def bytes_besides(model: Any, B: int, config: Any, dist: Distributed) -> int:
    """What a training step holds at its peak, and a forward and backward pass with the loss in pieces does not.

    Adam's two moments: 8 bytes for each parameter of the rank that has the most of them. A compiled step has one buffer
    of 16-bit logits, which becomes their gradient.
    """
    parameters = model.num_parameters()
    if config.shard_optimizer:
        parameters = largest_share([p.numel() for p in model.parameters()], dist.world_size)
    compiled = config.compile and not config.low_memory
    V = model.wte.weight.size(0)
    logits = B * config.seq_len * (V + -V % 64)
    return 8 * parameters + (logits * dist.dtype.itemsize if compiled else 0)


def adds_to_gradients(B: int, config: Any, dist: Distributed) -> bool:
    """Whether a backward pass finds gradients: those of earlier micro-steps, or DDP's buckets, which always stay."""
    return dist.world_size > 1 or config.total_batch_size > B * config.seq_len


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
    raise InputError("not one sequence fits into the GPU's memory: shorten --seq-len or train a smaller model")

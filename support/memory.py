"""The memory of a training step: the largest micro-batch that fits, and an estimate for --plan."""

import gc

import torch

from support.cli import warn
from support.errors import is_out_of_memory
from support.ranks import Ranks


def largest_that_fits(
    sizes: list[int],
    model: torch.nn.Module,
    ranks: Ranks,
    autocast: torch.autocast,
    *,
    T: int,
    sequences: int,
    compiled: bool,
    low_memory: bool,
    shard_optimizer: bool,
) -> int:
    """The first of `sizes` (B, largest first) that fits in the memory of every rank's GPU.

    If none does, the last one, with a warning: a trial takes a little more memory than training.
    sequences: of a step, on each rank."""
    several_ranks = ranks.world_size > 1
    for B in sizes:
        fit = fits(
            model,
            B,
            T,
            autocast,
            low_memory=low_memory,
            several_ranks=several_ranks,
            shards=ranks.world_size if shard_optimizer else 1,
            keeps_logits=compiled and not low_memory,
            accumulates=several_ranks or sequences > B,
        )
        if all(ranks.gather(fit)):  # all ranks use the same B
            return B
    if ranks.rank == 0:
        warn(f"micro-batches of {B} sequences may not fit in GPU memory: a trial did not")
    return B


def fits(
    model: torch.nn.Module,
    B: int,
    T: int,
    autocast: torch.autocast,
    *,
    low_memory: bool,
    several_ranks: bool,
    shards: int,
    keeps_logits: bool,
    accumulates: bool,
) -> bool:
    """Tests whether a step with micro-batches of B sequences fits in GPU memory.

    Runs an eager forward and backward pass with the chunked loss, which stores no less than a
    compiled one, while memory is reserved for everything else that a step needs:

    shards: the ranks over which the optimizer's moments are divided. several_ranks: NCCL's
    buffers. keeps_logits: a compiled loss has all logits, and their gradient. accumulates: the
    gradients of earlier micro-steps, or DDP's buckets, exist during the backward pass."""
    device = model.wte.weight.device
    V = model.wte.weight.size(0)
    reserve = 8 * model.num_parameters() // shards
    if keeps_logits:
        padded_V = V + -V % 64
        reserve += 2 * B * T * padded_V * autocast.fast_dtype.itemsize
    if several_ranks:
        reserve += 2**30  # an allowance for NCCL
    loss_function = model.loss_function
    try:
        model.prepare(low_memory=low_memory)
        x = torch.zeros(B, T, dtype=torch.int64, device=device)
        reserved = torch.empty(reserve, dtype=torch.uint8, device=device)
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


def estimate_memory(
    model: torch.nn.Module,
    B: int,
    T: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    low_memory: bool,
    compiled: bool,
) -> float:
    """Bytes that a training step takes on one device: an estimate, linear in B.

    - Weights, gradients and the optimizer's moments: 16 bytes per parameter.
    - The two gradients of the embedding (head and input) while they are added: 8 V C.
    - Activations: for its backward pass a block keeps 16 values for each of the B T C of its
      input: 64 B T C bytes in float32, 36 in 16 bits, where the residual stream stays float32
      (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
      equation 2, has 34 with a 16-bit stream). With --low-memory only the input, 4 B T C.
    - A compiled loss keeps the 16-bit logits.
    - On a CPU the process itself counts.

    Measured against peaks: bench/memory/README.md."""
    V, C = model.wte.weight.shape
    fixed = 16 * model.num_parameters() + 8 * V * C
    if device.type == "cpu":
        fixed += 0.365e9
    if low_memory:
        per_value = 4
    elif dtype == torch.float32:
        per_value = 64
    else:
        per_value = 36
    per_token = len(model.h) * per_value * C
    if compiled and device.type != "cpu" and not low_memory:
        per_token += V * dtype.itemsize
    return fixed + B * T * per_token

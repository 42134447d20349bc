"""The memory of a training step: the largest micro-batch that fits, and an estimate for --plan."""

import gc

import torch

from support.cli import warn
from support.devices import peak_memory
from support.errors import is_out_of_memory
from support.loss import CHUNK
from support.ranks import Ranks

SIZES = (128, 64, 32, 16, 8, 4, 2, 1)  # the micro-batches that are tried


def largest_that_fits(
    given: int,
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
    """B: `given`, or if that is 0 the largest power of two that fits and divides `sequences`.

    sequences: of a step, on each rank. If nothing fits in the memory of every rank's GPU: the
    smallest, with a warning, since a trial takes a little more memory than training. So a given
    size is tried, too, and Inductor, which times kernels in memory that was in use before, does
    not copy the logits to the host while timing."""
    sizes = [given] if given else [B for B in SIZES if sequences % B == 0]
    if ranks.device.type != "cuda":  # 4,096 tokens keep the cores of a CPU busy
        return next((B for B in sizes if B * T <= 4096), sizes[-1])
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
        with autocast, torch.compiler.set_stance("force_eager"):
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
    """Bytes that a training step takes on one device: an estimate.

    A GPU, linear in B:
    - Weights, gradients and the optimizer's moments: 16 bytes per parameter.
    - The two gradients of the embedding (head and input) while they are added: 8 V C.
    - Activations: for its backward pass a block keeps 16 values for each of the B T C of its
      input: 64 B T C bytes in float32, 36 in 16 bits, where the residual stream stays float32
      (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
      equation 2, has 34 with a 16-bit stream). With --low-memory only the input, 4 B T C.
    - A compiled loss has the 16-bit logits and their gradient.

    A CPU: the process itself, and the larger of two moments, both with weights and moments:
    - In the loss: activations, with 40 % more for the gaps in kept memory; the weights of the
      head and two gradients of them; logits and probabilities of a chunk.
    - At the end of the backward pass: all gradients, both of the embedding, and one block.

    Measured against peaks: bench/memory/README.md."""
    N = model.num_parameters()
    V, C = model.wte.weight.shape
    kept = B * T * C * (64 if dtype == torch.float32 else 36)  # by one block
    stored = len(model.h) * (4 * B * T * C if low_memory else kept)
    if device.type == "cpu":
        process = (peak_memory() or 0.32e9) + 0.05e9  # so far, and what training loads
        gaps = 0 if low_memory else 0.4 * stored
        in_loss = stored + gaps + 12 * V * C + 8 * V * min(CHUNK, B * T)
        at_end = 4 * N + 8 * V * C + kept
        return process + 12 * N + max(in_loss, at_end)
    logits = 2 * B * T * V * dtype.itemsize if compiled and not low_memory else 0
    return 16 * N + 8 * V * C + stored + logits

"""How many sequences a micro-batch has (B): --micro-batch-size, or as many as fit into the memory.

The model may be on the "meta" device."""

from typing import TYPE_CHECKING

import torch

from support.command_line import print0
from support.devices import peak_memory
from support.errors_and_signals import UserError
from support.ranks import Ranks

if TYPE_CHECKING:
    from train_gpt2 import GPT, TrainConfig

SIZES = (128, 64, 32, 16, 8, 4, 2, 1)  # micro-batches to choose from
CPU_TOKENS = 1024  # of a micro-batch on a CPU: more are not faster, and take more memory
USABLE = 0.85  # share of free GPU memory: gaps, and what the estimate does not know, take the rest


def choose_micro_batch(
    config: "TrainConfig",
    model: "GPT",
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool,
    before: int = 0,
) -> tuple[int, int]:
    """(the sequences of a micro-batch, B; the micro-batches of a step on each rank)

    B is --micro-batch-size, or if that is 0 what fits. UserError unless a step can be divided into
    such micro-batches.

    What fits is the largest power of two that divides a step. On GPUs the estimate for it must be
    below 85 % of the memory that is free on each of them before the model is moved there. A resumed
    run keeps the B that it had `before` if it still divides a step and fits, since a different one
    would round differently."""
    if config.micro_batch_size:
        B = config.micro_batch_size
        return B, count_micro_batches(config, B, ranks.world_size)
    sequences = count_micro_batches(config, 1, ranks.world_size)  # of a step, on each rank
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
        return estimate_memory(config, model, B, "cuda", dtype, compiled) <= usable

    if before and sequences % before == 0 and (ranks.device.type != "cuda" or fits(before)):
        return before, sequences // before
    B = next((size for size in SIZES if fits(size)), 1)
    if before not in (0, B):
        print0(f"note: micro-batches of {B} sequences, not {before} as before; rounding differs")
    return B, sequences // B


def count_micro_batches(config: "TrainConfig", B: int, world_size: int) -> int:
    """How many micro-batches of B sequences each rank has in a step.

    UserError if a step cannot be divided into them."""
    tokens = B * config.seq_len * world_size  # of a micro-step
    if config.total_batch_size % tokens:
        problem = f"is not a multiple of {tokens} (sequence x micro-batch x ranks)"
        nearest = max(round(config.total_batch_size / tokens), 1) * tokens
        remedy = f"the nearest that is: {nearest}"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    return config.total_batch_size // tokens


def estimate_memory(
    config: "TrainConfig",
    model: "GPT",
    B: int,
    device_type: str,
    dtype: torch.dtype,
    compiled: bool,
) -> float:
    """Bytes that a training step with micro-batches of B takes on one device: an estimate.

    Activations: for its backward pass a block keeps 16 values for each of the B T C of its input:
    64 B T C bytes in float32, 36 in 16 bits, where the residual stream stays float32 (Korthikanti
    et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2, has 34
    with a 16-bit stream). With --low-memory only the input, 4 B T C, and one whole block at a time.

    A GPU, linear in B: activations, with 16 B T C outside the blocks; weights, gradients and the
    optimizer's moments (16 bytes per parameter); gradients of the embedding as head and as input,
    and its padded copy (12 V C); the logits.

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
    logits = B * T * V * (dtype.itemsize if compiled else 16)
    return 16 * N + 12 * V * C + stored + 16 * B * T * C + logits

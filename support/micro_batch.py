"""How many sequences a micro-batch has (B): --micro-batch-size, or as many as fit into the memory.

The model may be on the device "meta"."""

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


def choose_micro_batch(
    config: "TrainConfig",
    model: "GPT",
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool,
    previous_B: int | None = None,
) -> tuple[int, int]:
    """(the sequences of a micro-batch, B; the micro-batches of a step on each rank)

    B is --micro-batch-size, or if that is 0 the largest of SIZES that divides a step and fits. On
    GPUs it must fit into the memory that is free on each of them before the model is moved there. A
    resumed run keeps its previous B if that is possible, since a different one would round
    differently. UserError unless a step can be divided into such micro-batches."""
    if config.micro_batch_size:
        B = config.micro_batch_size
        return B, count_micro_batches(config, B, ranks.world_size)
    sequences = count_micro_batches(config, 1, ranks.world_size)  # of a step, on each rank
    if ranks.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(ranks.device)
        usable = usable_memory(min(ranks.gather(free)), ranks.world_size)
        fits = [
            B for B in SIZES if estimate_memory(config, model, B, "cuda", dtype, compiled) <= usable
        ]
        keep = previous_B in fits
    else:
        fits = [B for B in SIZES if B * config.seq_len <= CPU_TOKENS]
        keep = previous_B is not None
    if keep and sequences % previous_B == 0:
        return previous_B, sequences // previous_B
    B = next((B for B in fits if sequences % B == 0), 1)
    if previous_B:
        print0(
            f"note: micro-batches of {B} sequences, not {previous_B} as before; rounding differs"
        )
    return B, sequences // B


def count_micro_batches(config: "TrainConfig", B: int, world_size: int) -> int:
    """How many micro-batches of B sequences each rank has in a step.

    UserError if a step cannot be divided into them."""
    tokens = B * config.seq_len * world_size  # of a micro-step
    if config.total_batch_size % tokens:
        problem = f"is not a multiple of {tokens} (sequence x micro-batch x ranks)"
        nearest = max(round(config.total_batch_size / tokens), 1) * tokens
        remedy = f"the nearest that is: {nearest}"
        if config.resume:  # which keeps the total
            remedy = "give --micro-batch-size 0" if B > 1 else "use another number of ranks"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    return config.total_batch_size // tokens


def usable_memory(free: float, world_size: int) -> float:
    """The bytes of a GPU's free memory that a run may fill by the estimate below."""
    nccl = 2**30 if world_size > 1 else 0
    return 0.85 * (free - nccl)  # The rest is for gaps, and for what the estimate does not know.


def estimate_memory(
    config: "TrainConfig",
    model: "GPT",
    B: int,
    device_type: str,
    dtype: torch.dtype,
    compiled: bool,
) -> float:
    """An estimate of the bytes that a training step with micro-batches of B takes on one device.

    It was compared with live tensors and with peaks in bench/memory/README.md."""
    T = config.seq_len
    C = model.config.n_embd
    V = model.config.vocab_size
    N = model.num_parameters()
    # For its backward pass a block stores about 16 values for each of the B T C values of its
    # input. In float32 they take 64 bytes. In 16 bits they take 36, since the residual stream stays
    # in float32 (34 without that in Korthikanti et al. 2022, "Reducing Activation Recomputation in
    # Large Transformer Models", equation 2).
    block = B * T * C * (64 if dtype == torch.float32 else 36)
    stored = len(model.h) * block
    if config.low_memory:  # The input of each block, and all that one block stores.
        stored = len(model.h) * 4 * B * T * C + block
    if device_type == "cpu":
        process = (peak_memory() or 0.32e9) + 0.12e9  # so far, and what training loads
        weights_and_moments = 12 * N
        # The larger of two moments counts. One is in the loss, with activations and logits. The
        # other is at the end of the backward pass, with all gradients and one block.
        gaps = 0 if config.low_memory else 0.4 * stored + 4 * V * B * T
        in_loss = stored + gaps + 12 * V * C + 12 * V * B * T
        at_end = 4 * N + 8 * V * C + block
        return process + weights_and_moments + max(in_loss, at_end)
    weights_gradients_moments = 16 * N
    # The gradients of the embedding, as head and as input, and its padded copy.
    embedding = 12 * V * C
    outside_blocks = 16 * B * T * C
    # If compiled, the gradient of the logits takes their place. Otherwise there are the logits,
    # their gradient, and what is between them in float32.
    logits = B * T * V * (dtype.itemsize if compiled else 16)
    return weights_gradients_moments + embedding + stored + outside_blocks + logits

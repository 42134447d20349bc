"""How a run computes on its devices: its precision, torch.compile, and its micro-batches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from support import devices
from support.micro_batch import choose_micro_batch
from support.ranks import Ranks

if TYPE_CHECKING:
    from train_gpt2 import GPT, TrainConfig


@dataclass(frozen=True)
class Setup:
    """What choose_setup() has chosen. It is the same on all ranks."""

    precision: str  # of matrix products: float32, tf32, bfloat16 or float16
    device_line: str  # for the user: the device, the precision, and the reason
    autocast: torch.autocast  # a context in which matrix products have this precision
    compiled: bool  # whether to use torch.compile
    B: int  # sequences per micro-batch
    T: int  # tokens per sequence
    micro_steps: int  # micro-batches per step on each rank

    @property
    def dtype(self) -> torch.dtype:
        """torch.float32 for tf32, otherwise as the precision says."""
        return devices.dtype_of(self.precision)


def choose_setup(
    config: "TrainConfig",
    model: "GPT",
    ranks: Ranks,
    previous_precision: str | None,
    previous_B: int | None,
) -> Setup:
    """Chooses how a run computes. A resumed run gives what it has used so far.

    - The precision is --dtype. With auto it suits the device: 16 bits on a CUDA GPU, and on a CPU
      float32, or bfloat16 for a large model if the chip is faster with it. A resumed run keeps what
      was chosen so.
    - It is compiled with --compile on, or auto on a CUDA GPU, if torch has a compiler here.
    - B is --micro-batch-size. With 0 it is the largest power of two that is estimated to fit into
      the memory that is free, so the model should not be on a GPU yet. The estimate is for a GPT-2.
      If a changed model takes more, give --micro-batch-size. A resumed run keeps its B if possible,
      since another one rounds differently.

    Raises UserError if the device lacks what was asked for, or B does not divide a step. From here
    on malloc keeps freed memory on a CPU, which makes steps faster, except with --low-memory."""
    precision, device_line = ranks.on_rank_0(
        devices.choose_precision,
        config.dtype,
        ranks.device,
        model.num_parameters(),
        previous_precision,
    )
    # autocast keeps a copy of the weights in its precision during a step, unless memory is low.
    autocast = devices.use_precision(precision, ranks.device, cache=not config.low_memory)
    compiled = devices.can_compile(config.compile, ranks)
    if ranks.device.type == "cpu" and not config.low_memory:
        devices.keep_freed_memory()
    dtype = devices.dtype_of(precision)
    B, micro_steps = choose_micro_batch(config, model, ranks, dtype, compiled, previous_B)
    return Setup(precision, device_line, autocast, compiled, B, config.seq_len, micro_steps)

"""The ranks of a run, and their collectives. Gradients are all-reduced by DDP, not here."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from support.command_line import display_path, note
from support.devices import choose_device
from support.errors_and_signals import UserError, first_line

COLLECTIVE_TIMEOUT = timedelta(hours=1)  # long, because ranks wait while rank 0 writes files


@dataclass(frozen=True)
class Ranks:
    """This process's rank and device. Without torchrun or Slurm, it is rank 0 of 1."""

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0  # rank among the processes on this machine

    @classmethod
    def from_environment(cls, device: str = "auto") -> "Ranks":
        """Read torchrun's environment variables, and choose the device. `device` is --device."""
        rank, local_rank, world_size = torchrun_ranks()
        chosen = choose_device(device, local_rank, world_size)
        gpus = torch.cuda.device_count() if chosen.type == "cuda" else 1
        if gpus > 1 and "RANK" not in os.environ:
            script = shlex.join(display_path(word) for word in sys.argv)
            command = f"torchrun --standalone --nproc_per_node={gpus} {script}"
            note(f"this run uses one of {gpus} GPUs; `{command}` uses all of them")
        return cls(rank, world_size, chosen, local_rank)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_rank_0(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call function(*args) on rank 0 only, and return its result on every rank.

        If it raises, rank 0 exits, and the broadcast fails on the other ranks."""
        values = [function(*args) if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def sum(self, value: float) -> float:
        """Return the sum of `value` over the ranks, added in rank order in float64."""
        return sum(self.gather(value))

    def seed(self, seed: int, step: int) -> None:
        """Seed torch's global RNG for a step, differently on each rank."""
        (state,) = np.random.SeedSequence([seed, step, self.rank]).generate_state(1)
        torch.manual_seed(int(state))

    def sum_all(self, *values: Tensor | float) -> list[float]:
        """Sum each value, a number or a scalar float32 tensor, over the ranks in one all-reduce."""
        # Unlike a copy from the CPU, filling a tensor does not synchronize with the GPU, so only
        # tolist() waits for it.
        fill = partial(torch.full, (), device=self.device, dtype=torch.float32)
        sums = torch.stack([v if isinstance(v, Tensor) else fill(float(v)) for v in values])
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums.tolist()


def torchrun_ranks() -> tuple[int, int, int]:
    """Return (rank, local rank, world size) as set by torchrun or examples/slurm.sh.

    Without either, return (0, 0, 1)."""
    if "RANK" not in os.environ:
        return 0, 0, 1
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        problem = f"RANK is set, but not {', '.join(missing)}"
        raise UserError(f"{problem}; start with torchrun, or set them as examples/slurm.sh does")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names[:3])
    return rank, local_rank, world_size


def open_store(ranks: Ranks) -> dist.Store:
    """Return a key-value store for init_process_group(), shared by all ranks.

    Raises UserError if connecting fails, or if this rank's device type differs from rank 0's."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    except (RuntimeError, ValueError) as error:
        problem = "MASTER_PORT={MASTER_PORT}: ".format_map(os.environ) + first_line(error)
        raise UserError(f"{problem}; choose another port") from None
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # On a single machine, torchrun (2.13) reuses the store across restarts. It then still holds
        # the addresses of lost ranks.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"restart_{restart}", store)
    store.set(f"device/{ranks.rank}", ranks.device.type)
    first = store.get("device/0").decode()
    if first != ranks.device.type:
        raise UserError(
            f"{ranks.device.type} here, {first} on rank 0: pass the same --device to all ranks"
        )
    return store

"""The processes of a run (torchrun's ranks): how they start, and what they exchange.

The gradients are exchanged by torch's DDP."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from support.command_line import print0, shown
from support.devices import choose_device
from support.errors_and_signals import StopRequested, UserError, first_line, stop_requested

if TYPE_CHECKING:
    from support.run_setup import Setup


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run, and its device. One process alone is rank 0 of 1."""

    rank: int
    world_size: int
    device: torch.device
    local_rank: int = 0  # among the processes of this machine

    @classmethod
    def start(cls, device: str = "auto", deterministic: bool = False) -> "Ranks":
        """Chooses the device and joins torchrun's process group.

        device: --device. deterministic: only use kernels that give the same bits every time."""
        rank, local_rank, world_size = torchrun_ranks()
        chosen = choose_device(device, local_rank, world_size)
        if deterministic:
            # Before the process group starts: torch then keeps NCCL from NVLS, whose sums vary.
            torch.use_deterministic_algorithms(True)
        gpus = torch.cuda.device_count() if chosen.type == "cuda" else 1
        if gpus > 1 and "RANK" not in os.environ:
            script = shlex.join(shown(word) for word in sys.argv)
            command = f"torchrun --standalone --nproc_per_node={gpus} {script}"
            print0(f"note: this uses one of {gpus} GPUs; `{command}` uses all of them")
        if "RANK" in os.environ:
            join_process_group(rank, world_size, chosen)
        return cls(rank, world_size, chosen, local_rank)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_rank_0(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls function(*args) on rank 0 alone, and returns the result on every rank.

        If it raises an error there, the other ranks lose their connection to rank 0, and end."""
        values = [function(*args) if self.rank == 0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def sum(self, value: float) -> float:
        """The sum of `value` over the ranks, in rank order and float64."""
        return sum(self.gather(value))

    def leave(self) -> None:
        """Leaves the process group, if there is one. While there is a DDP model, this may hang."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def check_stop(self) -> None:
        """Raises StopRequested on all ranks if one of them has received a stop signal."""
        stop = stop_requested()
        if self.world_size > 1:
            stop = self.sum_tensor(torch.tensor(float(stop), device=self.device)).item() > 0
        if stop:
            raise StopRequested

    def seed(self, seed: int, step: int) -> None:
        """Seeds torch's random numbers for a step, differently on each rank."""
        (state,) = np.random.SeedSequence([seed, step, self.rank]).generate_state(1)
        torch.manual_seed(int(state))

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor


def torchrun_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) from torchrun or Slurm's script; (0, 0, 1) without."""
    if "RANK" not in os.environ:
        return 0, 0, 1
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        problem = f"RANK is set, but not {', '.join(missing)}"
        raise UserError(f"{problem}; start with torchrun, or set them as examples/slurm.sh does")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names[:3])
    return rank, local_rank, world_size


def join_process_group(rank: int, world_size: int, device: torch.device) -> None:
    """Joins torchrun's process group. Checks that all ranks use the same kind of device."""
    patience = timedelta(hours=1)  # ranks may wait for rank 0's files
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    except (RuntimeError, ValueError) as error:
        problem = "MASTER_PORT={MASTER_PORT}: ".format_map(os.environ) + first_line(error)
        raise UserError(f"{problem}; set another one") from None
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun (2.13) keeps one store across restarts, with the addresses of lost ranks in it.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"restart_{restart}", store)
    store.set(f"device/{rank}", device.type)
    first = store.get("device/0").decode()
    if first != device.type:
        raise UserError(f"{device.type} here, {first} on rank 0: set --device")
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        timeout=patience,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=gpu,
    )


def wrap_in_ddp(model: nn.Module, ranks: Ranks, setup: "Setup") -> nn.Module:
    """With several ranks the model in DDP, which averages their gradients. Otherwise the model."""
    if ranks.world_size == 1:
        return model
    torch._dynamo.config.optimize_ddp = False  # or DDP would split the compiled blocks
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients stay in DDP's own buffers
    )
    settle_buckets(ddp_model, setup.B, setup.T, setup.autocast)
    return ddp_model


def settle_buckets(
    ddp_model: DistributedDataParallel, B: int, T: int, autocast: torch.autocast
) -> None:
    """Makes DDP's buckets final before the first step, so that a resumed run sums as before.

    DDP rebuilds its buckets after its first backward pass, in the order in which gradients become
    ready, which changes the order of summation after a start or a restart. Two passes over zeros
    settle it: the first triggers the rebuilding, the second fills the new buckets. The buffers of
    the model, which a changed model may update in each pass, are restored."""
    before = {name: buffer.clone() for name, buffer in ddp_model.named_buffers()}
    device = next(ddp_model.parameters()).device
    x = torch.zeros(B, T, dtype=torch.int64, device=device)
    for _ in range(2):
        ddp_model.zero_grad(set_to_none=True)
        with autocast:
            loss = ddp_model(x, x.clone())  # two tensors, or torch.compile makes another graph
        loss.backward()
    ddp_model.zero_grad(set_to_none=False)
    for name, buffer in ddp_model.named_buffers():
        buffer.copy_(before[name])

"""The ranks of a run: torchrun's process group, sums and gathers over it, and mistakes that all ranks learn of."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from support.cli import InputError
from support.devices import choose_device, keep_freed_memory


@dataclass
class Distributed:
    """This process's rank, and what it computes on; a process that torchrun did not start is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    description: str  # device and precision, with the reason

    @classmethod
    def start(cls, config: Any) -> "Distributed":
        """Chooses the device (config.device, config.dtype) and joins torchrun's process group, if there is one.

        Raises InputError for a device that isn't there.
        """
        rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in
                                        (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        device, dtype, description = choose_device(config.device, config.dtype, local_rank)
        if device.type == "cpu":
            keep_freed_memory()
        if "RANK" in os.environ:
            store, _, _ = next(torch.distributed.rendezvous("env://"))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun (2.13) keeps one store over its restarts, with the addresses of lost ranks in it.
                store = torch.distributed.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
                device_id=device if device.type == "cuda" else None,
            )
        return cls(rank, local_rank, world_size, device, dtype, description)

    def stop(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def autocast(self) -> torch.autocast:
        """A context in which matrix products are made in `dtype`; none of them changes where that is float32."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks (the mean is left to the caller: gloo has no correct AVG)."""
        if self.world_size > 1:
            tensor = tensor.to(self.device)
            torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def shared_errors(self) -> Iterator[None]:
        """An InputError of one rank in the block becomes all ranks'; also, they leave it together."""
        problem = ""
        try:
            yield
        except InputError as error:
            problem = str(error)
        if problem := next(filter(None, self.gather(problem)), ""):
            raise InputError(problem)

"""The ranks of a run: torchrun's process group, sums and gathers over it, and mistakes that all ranks learn of."""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from support.cli import InputError, RunError, user_error
from support.devices import choose_device, is_out_of_memory, keep_freed_memory

# How long ranks wait for one that hashes a checkpoint, downloads HellaSwag, or reads from a slow disk. The exchange of
# gradients keeps torch's own, shorter limit.
PATIENCE = datetime.timedelta(hours=2)


@dataclass
class Distributed:
    """This process's rank, and what it computes on; a process that torchrun did not start is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    description: str  # device and precision, with the reason
    control: Any = None  # process group of gather: gloo's, on the CPU, with much patience
    ways_out: Callable[[], str] = lambda: "--plan says what fits"  # when memory has run out (support/memory.py)

    @classmethod
    def start(cls, config: Any) -> "Distributed":
        """Chooses the device (config.device, config.dtype) and joins torchrun's process group, if there is one.

        Raises InputError, on all ranks, when a rank's device isn't there or is of another kind than rank 0's.
        """
        rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in
                                        (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        choose = lambda: choose_device(config.device, config.dtype, local_rank, world_size)  # noqa: E731
        if "RANK" not in os.environ:
            device, dtype, description = choose()
        else:
            store, _, _ = next(torch.distributed.rendezvous("env://", timeout=PATIENCE))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun (2.13) keeps one store over its restarts, with the addresses of lost ranks in it.
                store = torch.distributed.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            # There is no process group before there is a device: the store tells the others of a mistake.
            with shared_errors(lambda value: gather_by_store(store, rank, world_size, value)):
                device, dtype, description = choose()
            kinds = gather_by_store(store, rank, world_size, f"{device.type} in {str(dtype)[6:]}", "kind")
            if other := next((r for r in range(world_size) if kinds[r] != kinds[0]), None):
                raise SharedError(f"rank 0 would compute on {kinds[0]}, rank {other} on {kinds[other]}: name --device "
                                  "and --dtype for all")
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
                device_id=device if device.type == "cuda" else None,
            )
        if device.type == "cpu":
            keep_freed_memory()
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's first product is made
            torch.use_deterministic_algorithms(True)
        control = torch.distributed.new_group(backend="gloo", timeout=PATIENCE) if "RANK" in os.environ else None
        return cls(rank, local_rank, world_size, device, dtype, description, control)

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

    def on_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with rank 0's parameters, on the device. The others' may be on "meta", torch's device without
        memory."""
        module = module.to(self.device) if self.rank == 0 else module.to_empty(device=self.device)
        if self.world_size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                torch.distributed.broadcast(tensor.detach(), 0)
        return module

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. May wait long for a rank that is busy with files."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.control)
        return values

    def shared_errors(self) -> contextlib.AbstractContextManager[None]:
        """A user's mistake that one rank meets in the block becomes all ranks'; also, they leave it together."""
        return shared_errors(self.gather)

    @contextlib.contextmanager
    def own_errors(self) -> Iterator[None]:
        """A user's mistake that this rank meets in the block is its own, and it says so; the others notice a silence
        where its gradients should be, and end with a RunError."""
        try:
            yield
        except SharedError:
            raise
        except (InputError, OSError, RuntimeError) as error:
            out_of_memory = is_out_of_memory(error)
            message = f"out of memory on {self.device}. {self.ways_out()}" if out_of_memory else user_error(error)
            if message is not None:
                own = InputError(message)
                own.rank = self.rank
                raise own from None
            lost = isinstance(error, RuntimeError) and any(part in str(error) for part in LOST)
            if self.world_size == 1 or not lost:
                raise
            raise RunError("another rank is gone; its own line, or torchrun's report, says why") from None


LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL")  # a collective's error: a process is gone


class SharedError(InputError):
    """One that all ranks raise together."""


@contextlib.contextmanager
def shared_errors(gather: Callable[[Any], list[Any]]) -> Iterator[None]:
    """See Distributed.shared_errors. gather(value) -> the values of all ranks."""
    problem = None
    try:
        yield
    except (InputError, OSError) as error:
        if (problem := user_error(error)) is None:
            raise
    problems = gather(problem)
    if failed := [rank for rank, message in enumerate(problems) if message]:
        message = problems[failed[0]]
        alike = [rank for rank in failed if problems[rank] == message]
        raise SharedError(message if failed[0] == 0 else f"rank {', '.join(map(str, alike))}: {message}") from None


def gather_by_store(store: Any, rank: int, world_size: int, value: Any, name: str = "problem") -> list[Any]:
    """`value` (JSON's kinds) of every rank, in rank order, through torchrun's key-value store; a `name` serves once."""
    store.set(f"{name}/{rank}", json.dumps(value))
    values = [json.loads(store.get(f"{name}/{r}")) for r in range(world_size)]
    if store.add(f"{name}/read", 1) == world_size:
        store.set(f"{name}/all have read", "")
    if rank == 0:  # which may be the store's host, and so leaves last
        store.get(f"{name}/all have read")
    return values

"""The optimizer's state, sharded over the ranks: `train_gpt2.py --shard-optimizer`.

ZeRO's first stage (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"): each parameter has an owner, which keeps its moments, updates it and sends it to
the other ranks. The optimizer is unchanged and gets hooks: since it makes no state for a parameter
without a gradient, a rank hides those of the others.

Why not torch's own: ZeroRedundancyOptimizer consolidates by pickling each rank's whole shard on the
device, loads the moments twice, and hides parameter names, by which Muon recognizes c_attn;
fully_shard shards weights, too, so all ranks must run every block equally often, which they do not
in an evaluation."""

from typing import Any

import torch
import torch.distributed as dist


def assign_owners(sizes: list[int], ranks: int) -> list[int]:
    """Each parameter's owner: from the largest on, the rank with the fewest values so far."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def shard_state(optimizer: Any) -> None:
    """Shards the state of an optimizer, or of each one in support.muon.Optimizers.

    From now on step() exchanges weights, and state_dict(), which all ranks must call, gathers the
    whole state on rank 0's host. load_state_dict() takes any checkpoint."""
    for part in getattr(optimizer, "optimizers", [optimizer]):
        shards, part.sharded = Shards(part), True
        part.register_step_pre_hook(shards.hide_gradients)
        part.register_step_post_hook(shards.exchange_weights)
        part.register_state_dict_post_hook(shards.gather_state)
        part.register_load_state_dict_pre_hook(shards.select_state)


class Shards:
    """One optimizer's parameters, in the order of its groups, and their owners."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.owners = assign_owners([p.numel() for p in self.parameters], world_size)
        pairs = zip(self.parameters, self.owners, strict=True)
        self.others = [p for p, owner in pairs if owner != self.rank]
        self.hidden: list[torch.Tensor | None] = []  # gradients of the others, during a step

    def hide_gradients(self, *_: Any) -> None:
        self.hidden = [p.grad for p in self.others]
        for p in self.others:
            p.grad = None

    def exchange_weights(self, *_: Any) -> None:
        for p, grad in zip(self.others, self.hidden, strict=True):
            p.grad = grad  # a view of DDP's bucket, into which the next backward pass accumulates
        self.hidden = []
        sent = [
            dist.broadcast(p.detach(), owner, async_op=True)
            for p, owner in zip(self.parameters, self.owners, strict=True)
        ]
        for work in sent:
            work.wait()

    def gather_state(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """On rank 0 the whole state, in host memory; elsewhere this rank's shard."""
        mine = state_dict["state"]
        shapes: list[Any] = [None] * dist.get_world_size()
        own = [
            (i, key, t.shape, t.dtype) for i, tensors in mine.items() for key, t in tensors.items()
        ]
        dist.all_gather_object(shapes, own)
        whole: dict[int, dict[str, torch.Tensor]] = {}
        rows = [row for shard in shapes for row in shard]
        for i, key, shape, dtype in sorted(rows, key=lambda row: row[0]):
            if self.owners[i] == self.rank:
                tensor = mine[i][key]
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.parameters[i].device)
            if self.owners[i] != 0:
                dist.broadcast(tensor, self.owners[i])
            if self.rank == 0:
                whole.setdefault(i, {})[key] = tensor.cpu()
        return state_dict | {"state": whole} if self.rank == 0 else state_dict

    def select_state(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = state_dict["state"]
        return state_dict | {"state": {i: state[i] for i in state if self.owners[i] == self.rank}}

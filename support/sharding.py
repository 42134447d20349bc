"""The optimizer's state, sharded over the ranks: `train_gpt2.py --shard-optimizer`.

ZeRO stage 1 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"): each parameter has an owner, a rank that keeps its moments, updates it and sends
it to the others. Hooks do this for an unchanged optimizer: it makes no state for a parameter
without a gradient, so each rank hides gradients that it doesn't own.

Why not PyTorch's own:
- ZeroRedundancyOptimizer gathers the state by pickling each rank's whole shard on the device, loads
  the moments twice, and hides parameter names, by which Muon recognizes c_attn.
- fully_shard also shards weights, so all ranks must run every block equally often. In an evaluation
  they don't."""

from typing import Any

import torch
import torch.distributed as dist


def assign_owners(sizes: list[int], ranks: int) -> list[int]:
    """Each parameter's owner: from the largest on, the rank with the fewest values so far."""
    owners = [0] * len(sizes)
    loads = [0] * ranks  # number of values per rank
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def shard_state(optimizer: Any) -> None:
    """Shards the state of an optimizer, or of each one in support.muon.Optimizers.

    state_dict(), which all ranks must call, then gathers the whole state in rank 0's host memory.
    load_state_dict() takes any checkpoint, sharded or not."""
    for part in getattr(optimizer, "optimizers", [optimizer]):
        shards = Shards(part)
        part.sharded = True  # for Muon
        part.register_step_pre_hook(shards.hide_gradients)
        part.register_step_post_hook(shards.exchange_weights)
        part.register_state_dict_post_hook(shards.gather_state)
        part.register_load_state_dict_pre_hook(shards.select_state)


class Shards:
    """The parameters of one optimizer, numbered as in its state_dict(), and their owners."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.rank = dist.get_rank()
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.owners = assign_owners([p.numel() for p in self.parameters], dist.get_world_size())
        pairs = zip(self.parameters, self.owners, strict=True)
        self.others = [p for p, owner in pairs if owner != self.rank]  # owned by other ranks
        self.hidden: list[torch.Tensor | None] = []  # their gradients, during a step

    def hide_gradients(self, *_: Any) -> None:
        """Before a step: the optimizer skips parameters without a gradient."""
        self.hidden = [p.grad for p in self.others]
        for p in self.others:
            p.grad = None

    def exchange_weights(self, *_: Any) -> None:
        """After a step: restores the gradients, and each owner sends its updated weights."""
        for p, grad in zip(self.others, self.hidden, strict=True):
            p.grad = grad  # a view of DDP's bucket, into which the next backward pass accumulates
        self.hidden = []
        broadcasts = [
            dist.broadcast(p.detach(), owner, async_op=True)
            for p, owner in zip(self.parameters, self.owners, strict=True)
        ]
        for work in broadcasts:
            work.wait()

    def gather_state(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """On rank 0 the whole state, in host memory; elsewhere this rank's shard."""
        mine = state_dict["state"]  # parameter -> {"exp_avg": tensor, …}
        described = []  # (parameter, key, value); a tensor's shape and type instead of a tensor
        for i, values in mine.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    value = torch.empty_like(value, device="meta")
                described.append((i, key, value))
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, described)

        # All ranks loop over the same tensors in the same order. Each goes to rank 0's host before
        # the next, so no device holds the whole state; other ranks drop what they get.
        whole: dict[int, dict[str, Any]] = {}
        rows = [row for shard in shards for row in shard]
        for i, key, value in sorted(rows, key=lambda row: row[0]):
            if isinstance(value, torch.Tensor):
                if self.owners[i] == self.rank:
                    value = mine[i][key]
                else:
                    value = torch.empty_like(value, device=self.parameters[i].device)
                if self.owners[i] != 0:
                    dist.broadcast(value, self.owners[i])
            if self.rank == 0:
                if isinstance(value, torch.Tensor):
                    value = value.cpu()
                whole.setdefault(i, {})[key] = value
        return state_dict | {"state": whole} if self.rank == 0 else state_dict

    def select_state(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole state."""
        state = state_dict["state"]
        mine = {i: state[i] for i in state if self.owners[i] == self.rank}
        return state_dict | {"state": mine}

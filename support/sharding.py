"""An optimizer's state shared out among the ranks: `train_gpt2.py --shard-optimizer`.

ZeRO's first stage (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"):
each parameter has a rank that keeps its moments, updates it and sends it to the others. The optimizer stays the one it
is, and gets hooks: it makes no state for a parameter without a gradient, so a rank hides those of the others' from it.

torch's ZeroRedundancyOptimizer was not taken. Its consolidate_state_dict pickles each rank's whole share on the device,
for every rank to receive and unpickle there, and keeps a copy of everything on rank 0's host from then on; its
load_state_dict puts the moments on the device twice; and it passes on no parameter's name, by which Muon tells c_attn.
Nor was fully_shard, which shares out weights and gradients, too: its ranks must run every block equally often, which
they do not in an evaluation, where each has its own number of batches.
"""

import functools
from typing import Any

import torch
import torch.distributed

from support.cli import say
from support.devices import on_host
from support.distributed import Distributed


def share_out(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each parameter of so many values: the largest first, each to the rank that has the fewest."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def largest_share(sizes: list[int], ranks: int) -> int:
    """The values of the rank that share_out gives the most."""
    loads = [0] * ranks
    for size, owner in zip(sizes, share_out(sizes, ranks), strict=True):
        loads[owner] += size
    return max(loads)


def share_state(optimizer: Any, config: Any, dist: Distributed) -> None:
    """With --shard-optimizer: shares out the state of an optimizer, or of each one in support.muon.Optimizers.

    From then on step() exchanges weights, and state_dict(), which all ranks must call, has a function in each tensor's
    place, which on_host calls on all ranks, and which gives rank 0 the tensor. load_state_dict() takes any checkpoint.
    """
    if not config.shard_optimizer:
        return
    if dist.world_size == 1:
        say("--shard-optimizer: one rank keeps everything")
        return
    for part in getattr(optimizer, "optimizers", [optimizer]):
        shared, part.sharded = _Shared(part, dist), True
        part.register_step_pre_hook(shared.hide_gradients)
        part.register_step_post_hook(shared.exchange_weights)
        part.register_state_dict_post_hook(shared.offer_state)
        part.register_load_state_dict_pre_hook(shared.choose_state)


class _Shared:
    """One optimizer's parameters, in the order of its groups, and the rank that has each."""

    def __init__(self, optimizer: torch.optim.Optimizer, dist: Distributed):
        self.dist = dist
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.owners = share_out([p.numel() for p in self.parameters], dist.world_size)
        self.others = [p for p, owner in zip(self.parameters, self.owners, strict=True) if owner != dist.rank]
        self.hidden: list[torch.Tensor | None] = []  # their gradients, during a step

    def hide_gradients(self, *_: Any) -> None:
        self.hidden = [p.grad for p in self.others]
        for p in self.others:
            p.grad = None

    def exchange_weights(self, *_: Any) -> None:
        for p, grad in zip(self.others, self.hidden, strict=True):
            p.grad = grad  # a part of DDP's bucket, where the next backward pass goes on
        self.hidden = []
        sent = [torch.distributed.broadcast(p.detach(), owner, async_op=True)
                for p, owner in zip(self.parameters, self.owners, strict=True)]
        for work in sent:
            work.wait()

    def offer_state(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        mine = state_dict["state"]
        shapes = {i: {key: (t.shape, t.dtype) for key, t in tensors.items()} for i, tensors in mine.items()}
        everyones = {i: tensors for part in self.dist.gather(shapes) for i, tensors in part.items()}
        offers = {i: {key: functools.partial(self._bring, self.owners[i], mine.get(i, {}).get(key), *tensor)
                      for key, tensor in everyones[i].items()} for i in sorted(everyones)}
        return state_dict | {"state": offers}

    def _bring(
        self, owner: int, tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype,
        before: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The owner's tensor on rank 0's host, in the memory of the copy before; all ranks call it at a time."""
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.dist.device)
        if owner != 0:
            torch.distributed.broadcast(tensor, owner)
        return on_host(tensor, before) if self.dist.rank == 0 else None

    def choose_state(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        mine = {i: tensors for i, tensors in state_dict["state"].items() if self.owners[i] == self.dist.rank}
        return state_dict | {"state": mine}

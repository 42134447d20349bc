"""Muon replaces AdamW for the matrices inside the blocks (`train_gpt2.py --optimizer muon`).

The momentum of a matrix's gradient is made nearly orthogonal, so that an update moves equally far
in all directions (Jordan et al. 2024, kellerjordan.github.io/posts/muon). Its size is matched to
that of AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so that
one learning rate and one weight decay serve both. c_attn's weight is three matrices, query, key and
value, one above the other: each is made orthogonal separately. The mathematics is
torch.optim.Muon's with adjust_lr_fn="match_rms_adamw"; the differences are that split, that the
layers' matrices of one shape share their matmuls, which the ranks divide, and float32 unless the
run is in bfloat16."""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

# Five steps of a x + b x^3 + c x^5 bring singular values near 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Each matrix of x (L, A, B) with its singular values brought near 1 (0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize_on_all_ranks(x: torch.Tensor) -> torch.Tensor:
    """orthogonalize, each rank a share of the matrices. x (L, A, B) is the same on all ranks."""
    if not torch.distributed.is_initialized():
        return orthogonalize(x)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    n = math.ceil(len(x) / world_size)  # matrices per rank; the last ranks may have zeros
    padded = F.pad(x, (0, 0, 0, 0, 0, n * world_size - len(x)))
    mine = orthogonalize(padded[rank * n : (rank + 1) * n]).contiguous()
    torch.distributed.all_gather_into_tensor(padded, mine)
    return padded[: len(x)]


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum and decoupled weight decay, for 2-D parameters.

    named_parameters: (name, parameter) pairs; the name says which is c_attn.weight. dtype: of the
    products."""

    sharded = False  # support/sharding.py: this rank only has the gradients of its own matrices

    def __init__(self, named_parameters: Any, lr: float, weight_decay: float, dtype: torch.dtype):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=0.95)
        super().__init__(list(named_parameters), defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, momentum, by_shape = group["lr"], group["momentum"], defaultdict(list)
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                matrices = 3 if name.endswith("c_attn.weight") else 1  # query, key, value
                by_shape[p.shape, matrices].append((p, p.grad.lerp(buffer, momentum)))
            for ((rows, columns), matrices), pairs in by_shape.items():
                stacked = torch.stack([update for _, update in pairs])  # (L, rows, columns)
                stacked = stacked.to(self.dtype)
                rows //= matrices
                make_orthogonal = orthogonalize if self.sharded else orthogonalize_on_all_ranks
                updates = make_orthogonal(stacked.view(-1, rows, columns)).view_as(stacked)
                for (p, _), update in zip(pairs, updates, strict=True):
                    p.mul_(1 - lr * group["weight_decay"])
                    p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(rows, columns)))


class Optimizers:
    """Several optimizers of different parameters, used as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(i)])

"""Muon replaces AdamW for the matrices inside the blocks (`train_gpt2.py --optimizer muon`).

The momentum of a matrix's gradient is made nearly orthogonal, so that an update moves equally far
in all directions (Jordan et al. 2024, kellerjordan.github.io/posts/muon). Its size is matched to
that of AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2), so that
one learning rate and one weight decay serve both.

The mathematics is that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw". The differences:
- c_attn.weight is three matrices, query, key and value, stacked: each is made orthogonal separately
- matrices of the same shape are batched over the layers, and the batch is divided among the ranks
- products are in float32 unless the run is in bfloat16"""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

from support.errors import UserError

# Five steps of x -> a x + b x^3 + c x^5 bring singular values near 1 (Jordan et al.).
STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Each matrix of x (L, A, B) with its singular values brought near 1 (0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    tall = x.size(1) > x.size(2)
    if tall:  # so that gram below is the smaller square
        x = x.mT
    # The Frobenius norm bounds the largest singular value, so all are at most 1 now.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.mT if tall else x


def orthogonalize_on_all_ranks(x: torch.Tensor) -> torch.Tensor:
    """orthogonalize() with the work divided among the ranks, which all pass the same x."""
    if not torch.distributed.is_initialized():
        return orthogonalize(x)
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    share = math.ceil(len(x) / world_size)  # matrices per rank, padded with zeros at the end
    padded = F.pad(x, (0, 0, 0, 0, 0, share * world_size - len(x)))
    mine = orthogonalize(padded[rank * share : (rank + 1) * share]).contiguous()
    torch.distributed.all_gather_into_tensor(padded, mine)
    return padded[: len(x)]


def find_split_sizes(model: torch.nn.Module) -> dict[str, list[int]]:
    """{weight: rows of each matrix in it}, from the attribute `split_sizes` of modules."""
    return {
        f"{name}.weight": module.split_sizes
        for name, module in model.named_modules()
        if hasattr(module, "split_sizes")
    }


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum and decoupled weight decay, for 2-D parameters.

    dtype: of the products in orthogonalize(). split_sizes: as from find_split_sizes()."""

    sharded = False  # set by support/sharding.py: this rank sees only gradients that it owns

    def __init__(
        self,
        named_parameters: Any,
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        split_sizes: dict[str, list[int]],
    ):
        named_parameters = list(named_parameters)
        super().__init__(named_parameters, dict(lr=lr, weight_decay=weight_decay, momentum=0.95))
        self.dtype = dtype
        # By parameter, not by name: the names in param_groups may come from an older checkpoint.
        self.split_sizes = {p: split_sizes.get(name, [len(p)]) for name, p in named_parameters}
        for name, p in named_parameters:
            sizes = self.split_sizes[p]
            if sum(sizes) != len(p):
                raise UserError(f"{name} has {len(p)} rows, but its split_sizes are {sizes}")

    @torch.no_grad()
    def step(self) -> None:
        make_orthogonal = orthogonalize if self.sharded else orthogonalize_on_all_ranks
        for group in self.param_groups:
            lr = group["lr"]
            momentum = group["momentum"]
            # (part of a parameter, its update), by the shapes of the part and the parameter
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(buffer, momentum)  # Nesterov's
                p.mul_(1 - lr * group["weight_decay"])
                sizes = self.split_sizes[p]
                for matrix, part in zip(p.split(sizes), update.split(sizes), strict=True):
                    by_shape[matrix.shape, p.shape].append((matrix, part))
            for (shape, _), pairs in by_shape.items():
                stacked = torch.stack([part for _, part in pairs]).to(self.dtype)  # (L, *shape)
                # The entries of an orthogonal matrix have a root mean square of
                # 1 / sqrt(max(rows, columns)), AdamW's updates one of about 0.2.
                alpha = -lr * 0.2 * math.sqrt(max(shape))
                for (matrix, _), update in zip(pairs, make_orthogonal(stacked), strict=True):
                    matrix.add_(update, alpha=alpha)


class Optimizers:
    """Several optimizers of different parameters, with the interface of one."""

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

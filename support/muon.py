"""Muon, an optimizer for the matrices inside the blocks. It needs fewer steps than AdamW.

Use it with --optimizer muon. The preset shakespeare does. Keller Jordan et al. describe it
in "Muon: An optimizer for hidden layers in neural networks" (2024,
kellerjordan.github.io/posts/muon)."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Makes the momentum of each matrix nearly orthogonal before it is added to the weights. So an
    update moves equally far in all directions.

    Updates are as large as AdamW's, so both can share a learning rate and a weight decay (Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2). torch.optim.Muon computes the same
    with adjust_lr_fn="match_rms_adamw", but one matrix after the other, always in bfloat16, and on
    each rank. With it a run of the preset shakespeare on a CPU takes 4 % longer, and a third longer
    on a chip without bfloat16."""

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float, dtype: torch.dtype):
        """The matrix products of an update are computed in `dtype`."""
        shapes = sorted({p.shape for p in matrices})
        groups = [{"params": [p for p in matrices if p.shape == shape]} for shape in shapes]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:  # L matrices of one shape
            # A frozen or unused matrix has no gradient.
            matrices = [p for p in group["params"] if p.grad is not None]
            if not matrices:
                continue
            updates = []
            for p in matrices:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 0.05)
                updates.append(p.grad.lerp(momentum, 0.95))  # Nesterov momentum
            x = torch.stack(updates).to(self.dtype)  # (L, rows, columns)
            # AdamW's updates have a root mean square of about 0.2. That of an orthogonal matrix is
            # 1 / sqrt(max(rows, columns)).
            size = 0.2 * math.sqrt(max(x.shape[1:]))
            lr = group["lr"]
            for p, update in zip(matrices, orthogonalize_on_all_ranks(x), strict=True):
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * size)


def orthogonalize(x: Tensor) -> Tensor:
    """Brings the singular values of each matrix near 1, between 0.7 and 1.2. (L, rows, columns)

    It does so by five steps of a Newton-Schulz iteration, x -> a x + b x^3 + c x^5."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    if tall:  # x @ x.mT is smaller for the transposed matrix
        x = x.mT
    # The iteration needs singular values of at most 1. None exceeds the Frobenius norm.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b s + c s @ s
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.mT if tall else x


def orthogonalize_on_all_ranks(x: Tensor) -> Tensor:
    """The same, where all ranks have the same x. Each computes its share of the matrices."""
    if not dist.is_initialized():
        return orthogonalize(x)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    share = math.ceil(len(x) / world_size)  # matrices per rank
    padded = F.pad(x, (0, 0, 0, 0, 0, share * world_size - len(x)))  # adds matrices of zeros
    mine = orthogonalize(padded[rank * share : (rank + 1) * share]).contiguous()
    dist.all_gather(list(padded.split(share)), mine)  # writes into `padded`
    return padded[: len(x)]

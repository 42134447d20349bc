"""The head, tied to the token embedding, and the loss: where a GPT-2 makes its largest tensor.

The logits of a micro-batch, (B, T, 50257), are larger than all its weights. `next_token_loss` is the plain computation,
which torch.compile turns into few passes over them; `FusedLoss` makes them a piece at a time and computes the gradient
on the spot.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F


def lm_head(x: torch.Tensor, wte: torch.Tensor) -> torch.Tensor:
    """The head, tied to the token embedding. (…, C), (V, C) -> logits (…, V)

    On a GPU the product is made with V rounded up to a multiple of 64 (50,257 -> 50,304), which suits its tensor
    cores; the rows added are zeros made on the spot, neither parameters nor seen by the softmax.
    """
    V = wte.size(0)
    if x.is_cuda:
        wte = F.pad(wte, (0, 0, 0, -V % 64))
    return F.linear(x, wte)[..., :V]


def next_token_loss(x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, T, V) and their mean cross-entropy in nats, a float32 scalar. x (B, T, C), targets (B, T)"""
    logits = lm_head(x, wte)
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


HEAD_TOKENS = 1024  # whose logits FusedLoss makes at a time: 200 MB of float32


class FusedLoss(torch.autograd.Function):
    """next_token_loss and its gradient in one go, in place, the logits of HEAD_TOKENS tokens at a time.

    x (N, C), wte (V, C), targets (N,), gradient: whether one is wanted -> float32 scalar
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor, gradient: bool
    ) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w, V = wte.to(dtype), wte.size(0)
        w = F.pad(w, (0, 0, 0, -V % 64)) if x.is_cuda else w  # as in lm_head
        loss = torch.zeros((), device=x.device)
        dx, dw = (torch.empty_like(x), torch.zeros_like(w, dtype=wte.dtype)) if gradient else (x, None)
        # A token is a column, not a row: w @ x.T runs at twice the speed of x @ w.T on a CPU, where V is so large.
        for i in range(0, len(x), HEAD_TOKENS):
            part = slice(i, i + HEAD_TOKENS)
            x_part, target = x[part].to(dtype), targets[None, part]
            logits = (w @ x_part.t()).float()  # (V, n)
            logits[V:] = -math.inf
            own, largest = logits.gather(0, target), logits.amax(0)
            p = logits.sub_(largest).exp_()
            total = p.sum(0)
            loss += (largest + total.log() - own).sum()
            if gradient:
                p = p.div_(total).scatter_add_(0, target, torch.full_like(own, -1.0)).to(dtype)  # of the sum by logits
                dx[part] = p.t() @ w
                dw += p @ x_part
        if gradient:
            ctx.save_for_backward(dx.div_(len(x)), dw[:V].div_(len(x)))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx.mul_(gradient), dw.mul_(gradient), None, None


def fused_next_token_loss(x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
    """The same as next_token_loss, without the logits."""
    return None, FusedLoss.apply(x.flatten(0, 1), wte, targets.flatten(), torch.is_grad_enabled())

"""The same loss without the logits: head and loss for a piece of the tokens at a time, with the gradient on the spot.

The logits of a micro-batch, (B, T, 50257), are larger than all weights of GPT-2 (124M). `next_token_loss` in
train_gpt2.py makes them in full, which torch.compile turns into few passes over them. `ChunkedLoss` makes those of
HEAD_TOKENS tokens at a time: less memory everywhere, and faster on a CPU.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

HEAD_TOKENS = 1024  # whose logits ChunkedLoss makes at a time: 200 MB of float32


class ChunkedLoss(torch.autograd.Function):
    """next_token_loss and its gradient in one go, in place, the logits of HEAD_TOKENS tokens at a time.

    x (N, C), wte (V, C), targets (N,), needs_gradient -> float32 scalar
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor, needs_gradient: bool
    ) -> torch.Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        w, V = wte.to(dtype), wte.size(0)
        w = F.pad(w, (0, 0, 0, -V % 64)) if x.is_cuda else w  # as in lm_head
        loss = torch.zeros((), device=x.device)
        dx, dw = (torch.empty_like(x), torch.zeros_like(w, dtype=wte.dtype)) if needs_gradient else (x, None)
        for i in range(0, len(x), HEAD_TOKENS):
            chunk = slice(i, i + HEAD_TOKENS)
            x_chunk, target = x[chunk].to(dtype), targets[chunk, None]
            # On a CPU, float32 products run at twice the speed with a token's logits in a column of memory, V being so
            # large. In 16 bits the softmax takes more of the time than they, and wants them in a row (bench/NOTES.md).
            logits = (w @ x_chunk.t()).t() if dtype == torch.float32 else x_chunk @ w.t()  # (n, V)
            logits = logits.float()
            logits[:, V:] = -math.inf
            target_logits, largest = logits.gather(1, target), logits.amax(1, keepdim=True)
            p = logits.sub_(largest).exp_()
            total = p.sum(1, keepdim=True)
            loss += (largest + total.log() - target_logits).sum()
            if needs_gradient:  # of the summed loss with respect to the logits: probability, less 1 for the target
                p = p.div_(total).scatter_add_(1, target, torch.full_like(target_logits, -1.0)).to(dtype)
                dx[chunk] = p @ w
                dw += p.t() @ x_chunk
            del logits, p  # otherwise they would stay until the next ones are made
        if needs_gradient:
            ctx.save_for_backward(dx.div_(len(x)), dw[:V].div_(len(x)))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx.mul_(gradient), dw.mul_(gradient), None, None


def chunked_next_token_loss(x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
    """next_token_loss, but for the logits, which are never all there. x (…, C), wte (V, C), targets (…)"""
    return None, ChunkedLoss.apply(x.flatten(0, -2), wte, targets.flatten(), torch.is_grad_enabled())

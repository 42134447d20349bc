"""The loss of next tokens without keeping all logits in memory."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ChunkedLoss(torch.autograd.Function):
    """train_gpt2.next_token_loss and its gradient in one pass, for 1,024 tokens at a time.

    Chunks take less memory everywhere, and less time on a CPU (bench/NOTES.md). Since the gradient
    of a sum of losses is known, each chunk computes it at once, and no logits are kept for the
    backward pass."""

    CHUNK = 1024  # tokens

    @staticmethod
    def forward(ctx: Any, x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        """x (…, C), wte (V, C), targets (…) -> float32 scalar"""
        shape = x.shape
        x = x.flatten(0, -2)  # (N, C)
        targets = targets.flatten()  # (N,)
        # Autocast doesn't reach into this function: use its dtype for the matmuls.
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        V = wte.size(0)
        w = F.pad(wte.to(dtype), (0, 0, 0, -V % 64))  # aligned rows are faster, on a CPU as well
        train = ctx.needs_input_grad[0]
        loss = torch.zeros((), device=x.device)
        dx = torch.empty_like(x)
        dw = None
        for i in range(0, len(x), ChunkedLoss.CHUNK):
            chunk = slice(i, i + ChunkedLoss.CHUNK)  # n tokens
            x_chunk = x[chunk].to(dtype)
            target = targets[chunk, None]  # (n, 1)
            logits = x_chunk @ w.t()  # (n, V padded)
            logits[:, V:] = -math.inf
            p = logits.softmax(1, dtype=torch.float32)
            # -log p[target], computed from the largest p and the difference of the two logits: an
            # unlikely target's probability can underflow to 0.
            largest = logits.amax(1, keepdim=True).float()
            target_logits = logits.gather(1, target).float()
            loss += (largest - target_logits - p.amax(1, keepdim=True).log()).sum()
            if train:
                # d(summed loss) / d(logits) is p, minus 1 at the target.
                p = p.scatter_add_(1, target, torch.full_like(target_logits, -1.0)).to(dtype)
                dx[chunk] = p @ w
                dw_chunk = p.t() @ x_chunk
                dw = dw_chunk.to(wte.dtype) if dw is None else dw.add_(dw_chunk)
            del logits, p  # otherwise they live until the next ones are allocated
        if train:
            # From the sum to the mean.
            ctx.save_for_backward(dx.div_(len(x)).view(shape), dw[:V].div_(len(x)))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx.mul_(gradient), dw.mul_(gradient), None


chunked_next_token_loss = ChunkedLoss.apply

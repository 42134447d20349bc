"""Losses of next tokens in chunks, so that the logits of all tokens are never in memory together.

A head with its loss is a function (x (…, C), wte (V, C), targets (…)) -> the mean over tokens."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

HeadAndLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]  # (logits (N, V), targets (N,)) -> their mean
CHUNK = 1024  # tokens


def mean_in_chunks(function: HeadAndLoss, x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
    """function(x, wte, targets) for CHUNK tokens at a time, without gradients."""
    parts = zip(x.flatten(0, -2).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
    sums = [len(target) * function(x_chunk, wte, target) for x_chunk, target in parts]
    return torch.stack(sums).sum() / targets.numel()


def in_chunks(function: HeadAndLoss, loss_function: LossFunction) -> HeadAndLoss:
    """The same function for training, computed for CHUNK tokens at a time.

    loss_function: the part of it after the logits."""
    way = ChunkedLoss
    if has_plain_code(loss_function) and is_cross_entropy(function):
        way = CrossEntropy

    def chunked(x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        return way.apply(function, x.flatten(0, -2), wte, targets.flatten())

    return chunked


class ChunkedLoss(torch.autograd.Function):
    """Any head and loss. The gradient is computed chunk by chunk as well, along with the loss."""

    @staticmethod
    def forward(ctx: Any, function: HeadAndLoss, x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        wte = wte.detach().requires_grad_()
        total = torch.zeros((), device=x.device)
        dx = torch.empty_like(x)
        dw = torch.zeros_like(wte)
        for i in range(0, len(x), CHUNK):
            chunk = slice(i, i + CHUNK)
            x_chunk = x[chunk].detach().requires_grad_()
            with torch.enable_grad():
                # A sum over tokens: in the gradient of the mean, 16-bit values could underflow.
                loss = len(x_chunk) * function(x_chunk, wte, targets[chunk])
            dx[chunk], dw_chunk = torch.autograd.grad(loss, (x_chunk, wte))
            dw += dw_chunk
            total += loss.detach()
        ctx.save_for_backward(dx.div_(len(x)), dw.div_(len(x)))
        return total / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return None, dx.mul_(gradient), dw.mul_(gradient), None


class CrossEntropy(ChunkedLoss):
    """The same for plain cross-entropy, with its gradient by hand: it saves several passes over
    the logits (bench/NOTES.md)."""

    @staticmethod
    def forward(ctx: Any, function: HeadAndLoss, x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        # Autocast doesn't reach the products with p below: use its dtype here as well.
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        V = wte.size(0)
        w = F.pad(wte.to(dtype), (0, 0, 0, -V % 64))  # aligned rows are faster, on a CPU as well
        loss = torch.zeros((), device=x.device)
        dx = torch.empty_like(x)
        dw = None
        for i in range(0, len(x), CHUNK):
            chunk = slice(i, i + CHUNK)  # n tokens
            x_chunk = x[chunk].to(dtype)
            target = targets[chunk, None]  # (n, 1)
            logits = x_chunk @ w.t()  # (n, V padded)
            logits[:, V:] = -math.inf
            p = logits.softmax(1, dtype=torch.float32)
            # -log p[target], computed from the largest p and the difference of the two logits: an
            # unlikely target's probability can underflow to 0.
            largest = logits.amax(1, keepdim=True).float()
            target_logits = logits.gather(1, target).float()
            del logits  # three large tensors would otherwise be in memory at once
            loss += (largest - target_logits - p.amax(1, keepdim=True).log()).sum()
            # d(summed loss) / d(logits) is p, minus 1 at the target.
            p = p.scatter_add_(1, target, torch.full_like(target_logits, -1.0)).to(dtype)
            dx[chunk] = p @ w
            dw_chunk = p.t() @ x_chunk
            dw = dw_chunk.to(wte.dtype) if dw is None else dw.add_(dw_chunk)
            del p, dw_chunk  # otherwise they live until the next ones are allocated
        ctx.save_for_backward(dx.div_(len(x)), dw[:V].div_(len(x)))
        return loss / len(x)


def same(
    compare: Callable[[Tensor, Tensor], bool],
    a: Callable[..., Tensor],
    b: Callable[..., Tensor],
    inputs: list[Tensor],
    targets: Tensor,
) -> bool:
    """True if the losses a(*inputs, targets) and b(…) are the same, and all their gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    if isinstance(inputs[0], FakeTensor):  # without values; tools look at kernels this way
        return True
    losses = [function(*inputs, targets) for function in (a, b)]
    gradients = [torch.autograd.grad(loss, inputs) for loss in losses]
    return compare(*losses) and all(map(compare, *gradients))


def has_plain_code(loss_function: LossFunction) -> bool:
    """True if the code of a loss function is that of plain cross-entropy.

    A coefficient that is 0 now and changes later would pass every trial of values."""

    def plain(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    codes = [getattr(f, "__code__", None) for f in (loss_function, plain)]
    if None in codes:
        return False
    ours, theirs = ((code.co_code, code.co_names) for code in codes)
    return ours == theirs


def is_cross_entropy(function: HeadAndLoss) -> bool:
    """True if the function is linear logits and their mean cross-entropy, to the last bit.

    Tried on random values."""

    def plain(x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, wte), targets)

    generator = torch.Generator().manual_seed(0)
    V = 50257
    inputs = [torch.randn(16, 4, generator=generator), torch.randn(V, 4, generator=generator)]
    targets = torch.randint(V, (16,), generator=generator)
    targets[0] = V - 1  # <|endoftext|>, which a fork may treat differently
    return same(torch.equal, function, plain, inputs, targets)


def ignores_padding(loss_function: LossFunction) -> bool:
    """True if columns of -inf change neither loss_function(logits, targets) nor its gradient.

    Cross-entropy ignores them, label smoothing doesn't."""

    def padded(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_function(F.pad(logits, (0, 32), value=-math.inf), targets)

    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(8, 32, generator=generator)]
    targets = torch.randint(32, (8,), generator=generator)
    return same(torch.allclose, loss_function, padded, logits, targets)

"""A reference GPT-2, written as a pure function of its tensors.

forks.py compares models with it, and sampling.py samples from it because it supports a KV cache."""

import torch
from torch import Tensor

# Names of their own, which a notebook that patches torch.nn.functional does not change.
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention
from torch.nn.functional import linear as affine


class KVCache:
    """The keys and values of all tokens read so far, for each layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # (B, nh, T, hs) each

    @property
    def length(self) -> int:
        """Number of cached tokens per row."""
        return self.layers[0][0].size(2) if self.layers else 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the k and v (B, nh, T, hs) of T new tokens, and return those of all tokens."""
        if layer in self.layers:
            past_k, past_v = self.layers[layer]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.layers[layer] = (k, v)
        return k, v


def gpt2(
    w: dict[str, Tensor],
    idx: Tensor,
    n_layer: int,
    n_head: int,
    cache: KVCache | None = None,
    at: tuple | None = None,
) -> Tensor:
    """Return the logits (B, T, V) of a GPT-2 for tokens idx (B, T).

    `w` maps GPT-2's tensor names to tensors in nn.Linear's layout (out, in). The head is tied to
    wte.weight. `at` indexes (B, T) to select the positions whose logits are computed.

    With a cache, idx continues the cached tokens and is appended to them. T must then be 1, unless
    the cache is empty."""

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return affine(x, w[f"{name}.weight"], w[f"{name}.bias"])

    T = idx.size(1)
    start = 0 if cache is None else cache.length  # position of idx[:, 0]
    assert start == 0 or T == 1, "several tokens would need a mask"
    x = w["wte.weight"][idx] + w["wpe.weight"][start : start + T]  # (B, T, C)
    for i in range(n_layer):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in qkv)
        if cache is not None:
            k, v = cache.append(i, k, v)
        # A single new token is the last one, so it attends to all keys and needs no mask.
        y = scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        x = x + linear(y.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        y = gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    x = norm(x, "ln_f")
    if at is not None:
        x = x[at]
    return affine(x, w["wte.weight"])

"""GPT-2 as a function of its tensors, apart from any class.

forks.py compares models with it. sampling.py continues texts with it, since it can take a KV
cache."""

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """The keys and values of the tokens that a GPT-2 has read so far, in each of its layers."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # (B, nh, T, hs) each

    @property
    def length(self) -> int:
        """The number of tokens per row."""
        return self.layers[0][0].size(2) if self.layers else 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, nh, T, hs) of the next T tokens. Return those of all tokens."""
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
    """Return the logits (B, T, V) that a GPT-2 computes for tokens (B, T).

    w: its tensors by GPT-2's names, in the layout (out, in) of nn.Linear. The head is wte.weight.
    `at` indexes (B, T) to select the positions whose logits are computed.

    With a cache, idx continues the tokens in it. Then T must be 1, unless the cache is empty. The
    tokens of idx are appended to it."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    T = idx.size(1)
    start = 0 if cache is None else cache.length  # the position of the first token of idx
    assert start == 0 or T == 1, "several tokens would need a mask"
    x = w["wte.weight"][idx] + w["wpe.weight"][start : start + T]  # (B, T, C)
    for i in range(n_layer):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in qkv)
        if cache is not None:
            k, v = cache.append(i, k, v)
        # A single token is the last one, so it attends to all keys.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        x = x + linear(y.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    x = norm(x, "ln_f")
    if at is not None:
        x = x[at]
    return F.linear(x, w["wte.weight"])

"""GPT-2 as a function of its tensors, apart from any class.

forks.py compares models with it. sampling.py continues texts with it, and keeps keys and values, so
that the model reads each token only once. With it hellaswag.py reads the context of four endings
only once."""

import torch
import torch.nn.functional as F
from torch import Tensor


class KeysAndValues:
    """The keys and values of the tokens that a GPT-2 has read so far, in each of its layers."""

    def __init__(self, capacity: int, dtype: torch.dtype | None = None):
        """capacity: the largest number of tokens per row. dtype: None means that of the first keys
        and values."""
        self.capacity = capacity
        self.dtype = dtype
        self.length = 0  # tokens per row so far
        self.keys: list[Tensor] = []  # (B, nh, capacity, hs) for each layer
        self.values: list[Tensor] = []

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v (B, nh, T, hs) of the next T tokens, and returns those of all tokens."""
        if layer == len(self.keys):  # the first tokens
            shape = (*k.shape[:2], self.capacity, k.size(3))
            self.keys.append(k.new_empty(shape, dtype=self.dtype))
            self.values.append(v.new_empty(shape, dtype=self.dtype))
        end = self.length + k.size(2)
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def take_rows(self, rows: list[int]) -> None:
        """From here on the rows are these of the present ones. A row may be taken several times."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, with a faster way for a single row on a CPU. (..., in) -> (..., out)

    torch multiplies a matrix by one vector in a single thread. As a batch of blocks of rows this
    was 3 times as fast in two threads, and twice in one (float32 on an AMD EPYC, torch 2.13)."""
    n, C = weight.shape  # (out, in)
    one_row = x.numel() == C
    if x.is_cpu and one_row and weight.dtype in (torch.float32, torch.float64):
        blocks = max(number for number in range(1, 33) if n % number == 0)
        # As a transposed row, since a column with other strides takes a slow kernel.
        columns = x.reshape(1, 1, C).mT.expand(blocks, C, 1)
        y = torch.bmm(weight.view(blocks, n // blocks, C), columns).view(*x.shape[:-1], n)
        return y if bias is None else y + bias
    return F.linear(x, weight, bias)


def gpt2(
    w: dict[str, Tensor],
    idx: Tensor,
    n_layer: int,
    n_head: int,
    cache: KeysAndValues | None = None,
    at: tuple | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """What a GPT-2 computes. Tokens (B, T) -> logits (B, T, V)

    w: its tensors by the names of GPT-2, in the layout (out, in) of nn.Linear. The head is
    wte.weight. `at` is an index into (B, T) that selects the tokens whose logits are computed.

    With a cache, idx continues the tokens that it has. Then T must be 1, unless it has none. The
    tokens of idx are added to it. Without one, the tokens may have any `positions` (B, T), and a
    `mask` (B, 1, T, T), which is true where a token sees another one.

    The matrices may be in 16 bits and the LayerNorms in float32. Then the residual stream is in
    float32 as well, as it is under autocast."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    def layer(x: Tensor, name: str) -> Tensor:
        weight = w[f"{name}.weight"]
        return linear(x.to(weight.dtype), weight, w.get(f"{name}.bias"))

    T = idx.size(1)
    start = cache.length if cache else 0  # the position of the first token of idx
    assert start == 0 or T == 1, "several tokens would need a mask"
    dtype = w["ln_f.weight"].dtype  # of the residual stream
    if positions is None:
        positions = torch.arange(start, start + T, device=idx.device)
    x = w["wte.weight"][idx].to(dtype) + w["wpe.weight"][positions].to(dtype)  # (B, T, C)
    for i in range(n_layer):
        qkv = layer(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in qkv)
        if cache:
            k, v = cache.add(i, k, v)
        # A single token is the last one, so it sees all keys.
        causal = mask is None and T > 1
        y = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=mask, is_causal=causal)
        x = x + layer(y.transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        y = F.gelu(layer(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + layer(y, f"h.{i}.mlp.c_proj")
    if cache:
        cache.length += T
    x = norm(x, "ln_f")
    if at is not None:
        x = x[at]
    return layer(x, "wte")

"""How far are the fingerprints of changed models from GPT-2's? Prints the table of README.md.

python bench/fingerprint/differences.py"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2]))
from support.fingerprint import small_model, some_logits
from train_gpt2 import GPT, CausalSelfAttention, GPTConfig

CONFIGS = {
    "4 layers, 4 heads, T 32": GPTConfig(32, 50257, 4, 4, 64),
    "12 layers, 12 heads, T 1,024": GPTConfig(),
}


def attention(self: CausalSelfAttention, x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    B, T, C = x.shape
    qkv = self.c_attn(x).to(dtype).view(B, T, 3, self.n_head, C // self.n_head)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(scale * q, k, v, is_causal=True)
    return self.c_proj(y.to(x.dtype).transpose(1, 2).reshape(B, T, C))


def change_attention(model: GPT, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
    for block in model.h:
        block.attn.forward = partial(attention, block.attn, scale=scale, dtype=dtype)


def cast_norms(model: GPT, dtype: torch.dtype) -> None:
    for norm in [m for m in model.modules() if isinstance(m, nn.LayerNorm)]:
        norm.to(dtype)
        norm.register_forward_pre_hook(lambda _, inputs: inputs[0].to(dtype))
        norm.register_forward_hook(lambda *arguments: arguments[2].double())


def cast_residual(model: GPT, dtype: torch.dtype) -> None:
    for block in model.h:
        block.register_forward_hook(lambda *arguments: arguments[2].to(dtype).double())


def change_logits(model: GPT, change: object) -> None:
    model.lm_head.register_forward_hook(lambda *arguments: change(arguments[2]))


def change_epsilon(model: GPT, norms: list[nn.LayerNorm] | None = None) -> None:
    for norm in norms or [m for m in model.modules() if isinstance(m, nn.LayerNorm)]:
        norm.eps = 1e-6


def exact_gelu(model: GPT) -> None:
    for block in model.h:
        block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(F.gelu(mlp.c_fc(x)))


CHANGES = {
    "logits in float32": partial(change_logits, change=Tensor.float),
    "attention in float32": partial(change_attention, dtype=torch.float32),
    "LayerNorm in float32": partial(cast_norms, dtype=torch.float32),
    "residual stream in float32": partial(cast_residual, dtype=torch.float32),
    "logits in bfloat16": partial(change_logits, change=Tensor.bfloat16),
    "attention in bfloat16": partial(change_attention, dtype=torch.bfloat16),
    "LayerNorm in bfloat16": partial(cast_norms, dtype=torch.bfloat16),
    "residual stream in bfloat16": partial(cast_residual, dtype=torch.bfloat16),
    "epsilon 1e-6 in the last block": lambda m: change_epsilon(m, [m.h[-1].ln_2]),
    "epsilon 1e-6 everywhere": change_epsilon,
    "exact GELU": exact_gelu,
    "attention's scale x 1.001": partial(change_attention, scale=1.001),
    "attention's scale x 1.01": partial(change_attention, scale=1.01),
    "softcap 30": partial(change_logits, change=lambda x: 30 * torch.tanh(x / 30)),
}


def main() -> None:
    print(f"| | {' | '.join(CONFIGS)} |\n|---|---|---|")
    rows = {name: [] for name in CHANGES}
    for config in CONFIGS.values():
        expected = np.array(some_logits(small_model(GPT, config), config.block_size))
        for name, change in CHANGES.items():
            small_model.cache_clear()
            model = small_model(GPT, config)
            change(model)
            difference = np.abs(some_logits(model, config.block_size) - expected).max()
            rows[name].append(f"{difference / np.abs(expected).max():.1e}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()

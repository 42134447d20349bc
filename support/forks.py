"""Is a model still a GPT-2? A fork is a changed copy of train_gpt2.py.

A fork's model that computes something else must not pass for a GPT-2, because other programs would
then silently compute the wrong function. So when a run starts, at each checkpoint, and when weights
are loaded, compare the model's logits with those of a reference GPT-2 with the same weights."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from support.functional_gpt2 import gpt2
from support.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig

# Differences up to this fraction of the largest logit count as rounding. At 3 to 124 million
# parameters, hand-written attention differed by at most 2.9e-6. With some weights, a real change
# stays below the tolerance and passes, e.g. the exact GELU in the first steps of a small model
# (2e-6; 1e-5 before and 6e-5 after training).
TOLERANCE = 5e-6


def gpt2_shapes(config: "GPTConfig") -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a GPT-2's tensors."""
    C = config.n_embd
    shapes = {"wte.weight": (config.vocab_size, C), "wpe.weight": (config.block_size, C)}
    linear = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
    linear |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    for i in range(config.n_layer):
        for name, shape in linear.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[:1]}
    for norm in ("ln_f", *(f"h.{i}.ln_{n}" for i in range(config.n_layer) for n in (1, 2))):
        shapes |= {f"{norm}.weight": (C,), f"{norm}.bias": (C,)}
    return shapes


def verdict(why_not: str) -> str:
    """Return the console line for the result of why_not_gpt2()."""
    if why_not:
        return f"not a GPT-2: {why_not}"
    return "a GPT-2: Hugging Face can load it (changes that affect only training are not checked)"


@torch.no_grad()
def why_not_gpt2(model: "GPT") -> str:
    """Return why a model is not a GPT-2, or "" if GPT-2 computes the same logits with its weights.

    Compares a sequence of full context length and a short one in eager float32, in eval mode, so
    changes that affect only training go unnoticed. Restores buffers and RNG states."""
    config, w = model.config, model.state_dict()
    if {name: tuple(tensor.shape) for name, tensor in w.items()} != gpt2_shapes(config):
        return "its tensors are not those of a GPT-2"
    device = w["wte.weight"].device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
            torch.autocast(device.type, enabled=False),
        ):
            for T in (config.block_size, min(config.block_size, 5)):
                idx = 7919 * torch.arange(T, device=device)[None] % config.vocab_size
                idx[0, T // 2] = min(config.vocab_size, VOCAB_SIZE) - 1  # <|endoftext|>
                logits = model(idx)
                expected = gpt2(w, idx, config.n_layer, config.n_head)
                if not isinstance(logits, Tensor) or logits.shape != expected.shape:
                    return "it returns something other than logits"
                largest = expected.abs().nan_to_num().max().item() or 1.0
                if not torch.allclose(logits, expected, 0, TOLERANCE * largest, equal_nan=True):
                    difference = (logits - expected).abs().max().item() / largest
                    return f"its logits differ from a GPT-2's by {difference:.1g} times the largest"
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, training in modes:
            module.training = training
        for buffer, saved in buffers:
            buffer.copy_(saved)
    return ""

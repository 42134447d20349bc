"""Is a model still a GPT-2? What a changed copy of train_gpt2.py trains is called a fork.

A model that computes something else than GPT-2 must not pass for one, or other programs would run
another model than was trained. So GPT-2, as a function of the model's own weights, is compared with
the model: when a run starts, at each checkpoint, and when weights are loaded."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from support.command_line import warn
from support.functional_gpt2 import gpt2
from support.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig

# The largest difference that is rounding, as a share of the largest logit. At 3 to 124 million
# parameters, attention written out by hand changed at most 2.9e-6. With some weights a real change
# is as small, and then GPT-2 computes the same to this precision: the exact GELU in the first steps
# of a small model (2e-6; 1e-5 before and 6e-5 after training), a soft cap before training, and the
# epsilon of a late LayerNorm after it.
TOLERANCE = 5e-6


def gpt2_shapes(config: "GPTConfig") -> dict[str, tuple[int, ...]]:
    """The shapes of a GPT-2's tensors by their names."""
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
    """The line with which a run says whether its model is a GPT-2, by why_not_gpt2()."""
    if why_not:
        return f"not a GPT-2: {why_not}"
    return "a GPT-2: Hugging Face can load it (changes that act only in training are not checked)"


@torch.no_grad()
def why_not_gpt2(model: "GPT") -> str:
    """Return why a model is not a GPT-2, or "" if GPT-2 computes the same logits with its weights.

    Both compute a sequence of the whole context and a short one in float32, uncompiled, in eval
    mode. Changes that act only in training are not seen. Buffers and random states are restored."""
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
                    return "it returns something else than logits"
                largest = expected.abs().nan_to_num().max().item() or 1.0
                if not torch.allclose(logits, expected, 0, TOLERANCE * largest, equal_nan=True):
                    difference = (logits - expected).abs().max().item() / largest
                    return f"its logits differ from a GPT-2's by {difference:.1g} of the largest"
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, training in modes:
            module.training = training
        for buffer, before in buffers:
            buffer.copy_(before)
    return ""


@torch.no_grad()
def warn_if_not_causal(model: "GPT", autocast: torch.autocast) -> None:
    """Warns if the logits of a token depend on tokens after it. Then all losses are too good."""
    with torch.compiler.set_stance("force_eager"), autocast:
        T = min(model.config.block_size, 64)
        device = next(model.parameters()).device
        idx = torch.arange(T, device=device)[None] % model.config.vocab_size
        other = idx.clone()
        other[0, -1] = (idx[0, -1] + 1) % model.config.vocab_size  # only the last one differs
        training = model.training
        model.eval()
        logits, others = model(idx), model(other)
        model.train(training)
    if not isinstance(logits, Tensor):  # a changed model may return more than logits
        return
    change = (others[0, :-1].float() - logits[0, :-1].float()).abs().max()
    if change > 1e-6 * logits[0, :-1].abs().max():
        problem = "the predictions depend on the tokens that they predict"
        warn(f"{problem}, so all losses are too good: does attention see later tokens?")

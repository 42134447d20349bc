"""Is a model still a GPT-2? What a changed copy of train_gpt2.py may train is called a fork.

A model that computes something else than GPT-2 must not pass for one, or other programs would run
another model than was trained. So models are compared with functional_gpt2.py."""

import contextlib
import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from support.command_line import warn
from support.errors_and_signals import first_line
from support.functional_gpt2 import gpt2
from support.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig


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


def is_gpt2(model: "GPT") -> bool:
    return not why_no_gpt2(model)


def verdict(model: "GPT") -> str:
    """The line with which a run says whether its model is a GPT-2."""
    if why_not := why_no_gpt2(model):
        return f"not a GPT-2: {why_not}"
    return "a GPT-2: Hugging Face can load it (changes that act only in training are not checked)"


def why_no_gpt2(model: "GPT") -> str:
    """Why a model is no GPT-2, or "" if it is one. What only acts in training is not seen."""
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if ours != gpt2_shapes(model.config):
        return "its tensors are not those of a GPT-2"
    arguments = (type(model), model.config, set_later(model))
    try:
        return compare_small_model(*arguments)
    except TypeError:  # a config with a list, or one that is not frozen, is no key of a cache
        return compare_small_model.__wrapped__(*arguments)


def set_later(model: "GPT") -> tuple[tuple[str, str, Any], ...]:
    """(name of a module, attribute, value) of each number, flag or text that was set on a model
    after it was made, such as model.low_memory."""
    as_made = {}
    # Some models cannot be made without memory. Then nothing is known to be set later.
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        as_made = dict(type(model)(model.config).named_modules())
    return tuple(
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if name in as_made and isinstance(value, int | float | str) and key != "training"
        if vars(as_made[name]).get(key) != value
    )


@functools.cache
@torch.no_grad()
def compare_small_model(
    model_class: "type[GPT]", config: "GPTConfig", attributes: tuple[tuple[str, str, Any], ...]
) -> str:
    """Why small models of a class compute something else than a GPT-2, or "" if they do not.

    They have the depth and the heads of the model, but few channels, and weights with which every
    part of a GPT-2 changes the logits by more than the tolerance. `attributes` is what set_later()
    has found, and is set on them as well."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        try:
            few_channels = replace(config, n_embd=4 * config.n_head)
            few_tokens = replace(few_channels, vocab_size=64)
            # All tokens in all positions would take gigabytes.
            few_positions = min(config.block_size, 16)
            sizes = ((few_tokens, config.block_size), (few_channels, few_positions))
            for small, T in sizes:
                model = model_class(small).double()
                for name, key, value in attributes:
                    setattr(model.get_submodule(name), key, value)
                model.eval()
                set_telling_weights(model)
                idx = telling_tokens(small.vocab_size, T)
                logits = model(idx)
                expected = gpt2(model.state_dict(), idx, small.n_layer, small.n_head)
                if not isinstance(logits, Tensor) or not same(logits, expected):
                    return "it computes other logits than a GPT-2 with the same weights"
        except Exception as error:  # of any kind: what the model of a fork raises
            return f"a small model of it fails: {first_line(error)}"
    return ""


def telling_tokens(V: int, T: int) -> Tensor:
    """Random tokens (1, T), among them <|endoftext|>, at which a changed model may see the end of a
    document. It usually is the last token, but GPT-2's logits may be padded."""
    idx = torch.randint(V, (1, T))
    idx[0, T // 3] = V - 1
    idx[0, 2 * T // 3] = min(V, VOCAB_SIZE) - 1
    return idx


def same(logits: Tensor, expected: Tensor) -> bool:
    """True up to rounding. LayerNorms in float32 change the logits by 1e-7 of the largest, another
    epsilon in one of them or the exact GELU by 1e-4."""
    tolerance = 1e-5 * expected.abs().max().item()
    return logits.shape == expected.shape and torch.allclose(
        logits.double(), expected, rtol=0, atol=tolerance
    )


def set_telling_weights(model: "GPT") -> None:
    """Sets random weights. At every second position the residual stream stays so small that the
    epsilon of a LayerNorm matters. At the others it is so large that a cap matters, as are the
    queries, keys, inputs of GELU and logits everywhere."""
    generator = torch.Generator().manual_seed(0)
    small = 0.004 / math.sqrt(2 * model.config.n_layer)  # so all blocks add as much as wte and wpe
    for name, p in model.state_dict().items():
        p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        if name.endswith("ln_f.weight"):
            p.mul_(100)
        elif name in ("wte.weight", "wpe.weight"):
            p.mul_(0.02)
            if name == "wpe.weight":
                p[0::2].mul_(1000)
        elif "c_proj" in name:
            p.mul_(small)
        elif p.dim() > 1:
            p.div_(2)


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

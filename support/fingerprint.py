"""What does this code compute? A fingerprint, by which the code that trained weights is known.

Weights mean nothing without the mathematics that trained them. So config.json holds some logits of
a small model with fixed weights: its *fingerprint*. Code with another fingerprint computes
something else. If a small model cannot be made or evaluated here, as with a kernel that only runs
on a GPU, there is no fingerprint, and nothing is compared.

In all functions model_class is a class like GPT, and config its GPTConfig."""

import copy
import functools
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from support.command_line import warn
from support.errors_and_signals import first_line
from support.tokenizer import VOCAB_SIZE

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig

# Channels per head of the small models. The root of 6 is no round number, so that no other scale
# passes for attention's 1 / sqrt(hs).
CHANNELS = 6
MAX_LOGITS = 2**28  # computed at a time; they take 2 GB in float64
# Fingerprints of the same mathematics differ by up to 1e-7 of the largest number where a fork
# computes parts in float32. Of the changes in bench/fingerprint most differ by more than 5e-6.
TOLERANCE = 1e-6


@functools.cache
def fingerprint(model_class: "type[GPT]", config: "GPTConfig") -> tuple[list[float] | None, str]:
    """(eight logits of a small model, "") or, if there are none, (None, the reason)"""
    try:
        model = small_model(model_class, config)
        logits = some_logits(model, config.block_size)
        twice = [some_logits(model, min(config.block_size, 16)) for _ in range(2)]
    except Exception as error:  # Of any kind. A bug shows itself when the real model is used.
        reason = f"{type(error).__name__}: {first_line(error)}"
        return None, f"a small copy of the model cannot be evaluated ({reason})"
    if not np.isfinite(logits).all():
        return None, "the logits of a small copy of the model are not finite"
    if not same(*twice):
        problem = "the model's results are random in evaluation"
        warn(f"{problem}, and so are validation losses, samples and HellaSwag: is dropout left on?")
        return None, problem
    return logits, ""


def same(a: list[float], b: list[float]) -> bool:
    """True for fingerprints of the same mathematics."""
    return len(a) == len(b) and np.allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(a).max())


@functools.cache
def small_model(model_class: "type[GPT]", config: "GPTConfig") -> "GPT":
    """A model with the depth, the heads and the context of config, but few channels, in float64.

    Its weights are drawn by NumPy's PCG64, whose raw numbers stay the same in all versions. They
    depend on the names of the parameters, and none is zero."""
    small = replace(config, n_embd=CHANNELS * config.n_head, vocab_size=VOCAB_SIZE)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_class(small).double().eval()
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
            raw = np.random.PCG64(seed).random_raw(parameter.numel())
            uniform = ((raw >> 11) + 0.5) / 2**54 - 0.25  # from -0.25 to 0.25
            parameter.copy_(torch.from_numpy(uniform).view_as(parameter))
    return model


@torch.no_grad()
def some_logits(model: nn.Module, T: int) -> list[float]:
    """Four logits in the middle of T tokens, and four at the end, of a small model of any kind."""
    idx = torch.arange(T)[None] * 7919 % VOCAB_SIZE
    idx[0, T // 2] = VOCAB_SIZE - 1
    places = torch.tensor([T // 2, T - 1])
    takes = inspect.signature(model.forward).parameters
    if "logits_to_keep" in takes:  # a model of transformers
        logits = model(idx, logits_to_keep=places).logits  # (1, 2, V)
    elif "at" in takes:
        logits = model(idx, at=(slice(None), places))
    elif T * VOCAB_SIZE <= MAX_LOGITS:
        logits = model(idx)[:, places]
    else:
        raise ValueError(f"the logits of all {T} tokens take too much memory, and it has no `at`")
    return logits[0, :, :4].flatten().tolist()


@functools.cache
def plain_logits(model_class: "type[GPT]", config: "GPTConfig") -> int | None:
    """How many times a fork computes all logits in training, besides model.loss, which is compiled.

    Tried on a small model on the CPU. None if that fails."""
    calls = []
    try:
        model = copy.deepcopy(small_model(model_class, config)).train()
        heads = [m for m in model.modules() if getattr(m, "out_features", 0) >= VOCAB_SIZE]
        for head in heads:
            head.register_forward_hook(lambda *_: calls.append("head"))
        model.loss.register_forward_hook(lambda *_: calls.append("loss"))
        idx = torch.zeros(1, min(config.block_size, 16), dtype=torch.int64)
        with torch.random.fork_rng(devices=[]):
            model(idx, idx)
    except Exception:  # of any kind: a bug shows itself when the real model is used
        return None
    return calls.count("head") if calls else 1


@functools.cache
def is_gpt2(model_class: "type[GPT]", config: "GPTConfig") -> bool:
    """True if names, shapes and mathematics are those of transformers' GPT-2, with no other tensors
    tied than the head and the embedding. What acts only in training is not seen.

    False without a fingerprint."""
    if fingerprint(model_class, config)[0] is None:
        return False
    try:  # imported here, since it takes seconds
        from transformers.models.gpt2.modeling_gpt2 import GPT2Config
    except Exception as error:  # an ImportError, or what else a broken installation raises
        problem = f"transformers cannot be imported ({first_line(error)})"
        warn(f"{problem}: checkpoints are saved as a fork's, which only this code loads")
        return False
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_positions": config.block_size}
    return same_as_transformers(model_class, config, GPT2Config(**shape))


def same_as_transformers(
    model_class: "type[GPT]", config: "GPTConfig", their_config: object
) -> bool:
    """True if transformers computes this code's fingerprint with a GPT2Config."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    ours = small_model(model_class, config)
    small = copy.deepcopy(their_config)
    if small.n_inner == 4 * small.n_embd:
        small.n_inner = None  # which means the same, for any width
    small.n_embd, small.vocab_size = CHANNELS * config.n_head, VOCAB_SIZE
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        theirs = GPT2LMHeadModel(small).double().eval()
    try:
        theirs.load_state_dict(their_layout(ours.state_dict()))
    except RuntimeError:  # other names or shapes
        return False
    if len(list(ours.parameters())) != len(list(theirs.parameters())):  # tied ones count once
        return False
    logits, _ = fingerprint(model_class, config)
    return same(logits, some_logits(theirs, config.block_size))


# --------------------------------------------------------------------------------------------------
# In a Hugging Face GPT-2 parameter names begin with `transformer.`, and linear layers are Conv1D,
# whose weights are (in, out).

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored transposed


def their_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters as those of a Hugging Face GPT-2."""
    theirs = {}
    for name, tensor in state.items():
        theirs_name = name if name == "lm_head.weight" else f"transformer.{name}"
        theirs[theirs_name] = tensor.mT if name.endswith(CONV1D) and tensor.dim() == 2 else tensor
    return theirs


def our_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a Hugging Face GPT-2 under our names, linear weights as (out, in)."""
    ours = {}
    for name, tensor in state.items():
        ours_name = name.removeprefix("transformer.")
        ours[ours_name] = tensor.mT if name.endswith(CONV1D) and tensor.dim() == 2 else tensor
    return {"lm_head.weight": ours["wte.weight"]} | ours

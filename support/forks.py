"""Changed copies of train_gpt2.py, called forks: is a model still a GPT-2, and whose is it?

A model that computes something else than GPT-2 must not pass for one, or other programs would run
another model than was trained. is_gpt2() finds out. The config.json of a checkpoint has the name
and the checksum of the script that trained it. A script that lies in a model's folder is never run,
unless somebody names it with --code."""

import functools
import hashlib
import importlib.util
import inspect
import math
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support.command_line import warn
from support.errors_and_signals import UserError, first_line

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig

# --------------------------------------------------------------------------------------------------
# Is it a GPT-2?


def gpt2(w: dict[str, Tensor], idx: Tensor, n_layer: int, n_head: int) -> Tensor:
    """What a GPT-2 computes. w: its tensors by name. Tokens (B, T) -> logits (B, T, V)"""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["wte.weight"][idx] + w["wpe.weight"][: idx.size(1)]
    for i in range(n_layer):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return F.linear(norm(x, "ln_f"), w["wte.weight"])


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
    return shapes | {"lm_head.weight": shapes["wte.weight"]}


def is_gpt2(model: "GPT") -> bool:
    return not why_no_gpt2(model)


def why_no_gpt2(model: "GPT") -> str:
    """Why a model is no GPT-2, or "" if it is one. What only acts in training is not seen."""
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if ours != gpt2_shapes(model.config):
        return "its tensors are not those of a GPT-2"
    if model.lm_head.weight is not model.wte.weight:
        return "its head is not the embedding of its tokens"
    return compare_small_model(type(model), model.config)


@functools.cache
@torch.no_grad()
def compare_small_model(model_class: "type[GPT]", config: "GPTConfig") -> str:
    """Why a small model of a class computes something else than a GPT-2, or "" if it does not.

    It has the depth and the context of the model, but few channels, and weights with which every
    part of a GPT-2 changes the logits by more than the tolerance."""
    small = replace(config, n_head=2, n_embd=16, vocab_size=64)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        idx = torch.randint(small.vocab_size, (1, small.block_size))
        try:
            model = model_class(small).double().eval()
            set_telling_weights(model)
            logits = model(idx)
        except Exception as error:  # of any kind: what the model of a fork raises
            return f"a small model of it fails: {first_line(error)}"
        expected = gpt2(model.state_dict(), idx, small.n_layer, small.n_head)
    if not same(logits, expected):
        return "it computes other logits than a GPT-2 with the same weights"
    return ""


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
    for name, p in model.named_parameters():
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
        logits = model(idx)[0, :-1].float()
        change = (model(other)[0, :-1].float() - logits).abs().max()
        model.train(training)
    if change > 1e-6 * logits.abs().max():
        problem = "the predictions depend on the tokens that they predict"
        warn(f"{problem}, so all losses are too good: does attention see later tokens?")


# --------------------------------------------------------------------------------------------------
# Scripts


@functools.cache
def script_of(model_class: "type[GPT]") -> tuple[Path | None, bytes]:
    """(the file that defines a class, its content); (None, b"") if there is none, as in a notebook.

    The content is that of the first call. A run asks at its start, so what it keeps is what it
    runs, even if the file is edited while it trains."""
    with suppress(TypeError, OSError):
        path = Path(inspect.getfile(model_class)).absolute()
        return path, path.read_bytes()
    return None, b""


def script_entry(model_class: "type[GPT]") -> dict[str, str]:
    """What config.json, run.json and training_state.pt have of the script."""
    script, source = script_of(model_class)
    digest = hashlib.sha256(source).hexdigest()
    return {"script": script.name, "script_sha256": digest} if script else {}


def check_same_script(theirs: dict[str, Any], model_class: "type[GPT]", what: str) -> None:
    """UserError unless the script of model_class has the same name as theirs or the same content.

    If only the name is the same, this warns. `theirs` is what a file has of the script. The error
    begins with `what`."""
    ours = script_entry(model_class)
    name = theirs.get("script")
    if not name or ours.get("script_sha256") == theirs.get("script_sha256"):
        return  # a class in a notebook has no script
    if name == ours.get("script"):
        warn_once(f"{name} has changed since it trained this model")
        return
    problem = f"trained by {name}, and {ours.get('script')} is another script"
    raise UserError(f"{what}: {problem}; use {name}, or give this code that name to go on with it")


warn_once = functools.cache(warn)


def load_gpt_class(code: str) -> "type[GPT]":
    """Runs the file of --code, and returns its class GPT."""
    path = Path(code)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--code {path}: not a Python file")
    sys.path.append(str(path.absolute().parent))  # where `python FILE` would look for its imports
    name = f"code_{path.stem}"  # not the name of a module that is already here
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT

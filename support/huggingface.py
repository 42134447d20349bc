"""Hugging Face: GPT-2's files written and read, models from the Hub.

In a Hugging Face GPT-2 parameter names begin with `transformer.` (not in OpenAI's uploads), and
linear layers are Conv1D, whose weights are (in, out).

A fork whose weights or mathematics are not GPT-2's must not pass for one, or other programs would
run another model than was trained. Its config.json has FORK_TYPE as model_type, which transformers
refuses, and its weights are stored as they are."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import files
from support.errors import UserError, first_line
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files

GPT2_MATHS = {  # a model that differs in any of these isn't GPT-2
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
THEIR_NAMES = {"block_size": "n_positions"}  # the one setting with another name in config.json
FORK_TYPE = "gpt2-repro-fork"
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # weights that are stored transposed


def gpt2_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The names and shapes of GPT-2's parameters for a GPTConfig."""
    C = config.n_embd
    shapes = {"wte.weight": (config.vocab_size, C), "wpe.weight": (config.block_size, C)}
    layers = {"ln_f": (C,)}
    for i in range(config.n_layer):
        layers |= {
            f"h.{i}.ln_1": (C,),
            f"h.{i}.attn.c_attn": (3 * C, C),
            f"h.{i}.attn.c_proj": (C, C),
            f"h.{i}.ln_2": (C,),
            f"h.{i}.mlp.c_fc": (4 * C, C),
            f"h.{i}.mlp.c_proj": (C, 4 * C),
        }
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def gpt2_logits(state: dict[str, Tensor], n_layer: int, n_head: int, idx: Tensor) -> Tensor:
    """GPT-2's logits (T, V) of tokens idx (T,), spelled out once more. state: its parameters."""
    T = len(idx)
    causal = torch.ones(T, T, dtype=torch.bool).tril()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].t() + state[f"{name}.bias"]

    x = state["wte.weight"][idx] + state["wpe.weight"][:T]
    for i in range(n_layer):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.view(T, n_head, -1).transpose(0, 1) for part in qkv.chunk(3, dim=1))
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~causal, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, -1)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].t()


def is_gpt2(model: nn.Module) -> bool:
    """True if the parameters of a model and its mathematics are GPT-2's.

    Its class computes logits with few layers and channels, random weights and in float64: of a
    full context, and of a short one with 50256 in it. They must be gpt2_logits'. It can't see what
    acts only in training or only from the fifth layer on, nor other mathematics of this object."""
    config = model.config
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shapes != gpt2_shapes(config):
        return False
    try:
        small = replace(config, n_layer=min(config.n_layer, 4), n_head=2, n_embd=8)
        sizes = [dict(vocab_size=97, block_size=config.block_size)]
        sizes.append(dict(vocab_size=VOCAB_SIZE, block_size=16))
        return all(computes_gpt2(type(model), replace(small, **size)) for size in sizes)
    except Exception:  # other parameters, or a fork that works with its own sizes only
        return False


@torch.no_grad()
def computes_gpt2(model_class: type[nn.Module], config: Any) -> bool:
    """True if a model with random weights has gpt2_logits' logits for random tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).double().eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        idx = torch.randint(config.vocab_size, (config.block_size,))
        idx[len(idx) // 2] = config.vocab_size - 1  # <|endoftext|> of the whole vocabulary
    logits, _ = model(idx[None])  # (1, T, V)
    expected = gpt2_logits(model.state_dict(), config.n_layer, config.n_head, idx)
    if logits.shape[1:] != expected.shape:
        return False
    return bool((logits[0] - expected).abs().max() < 1e-5 * expected.std())


def check_readable(model: nn.Module) -> None:
    """UserError if a checkpoint of a fork's model could not be loaded into a new one.

    Called before training: hours later would be too late. GPT-2's own can always be loaded."""
    try:
        saved = json.loads(json.dumps(asdict(model.config)))
        copy = type(model)(type(model.config)(**saved))
    except Exception as error:
        problem = f"its config {model.config} does not make it again ({first_line(error)})"
        raise UserError(f"checkpoints of this model could not be read: {problem}") from None
    ours, theirs = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in m.state_dict().items()}
        for m in (model, copy)
    )
    if ours != theirs:
        different = sorted({name for name, _ in ours.items() ^ theirs.items()})
        problem = f"a new one with its config has other {', '.join(different)}"
        raise UserError(f"checkpoints of this model could not be read: {problem}")


def write_pretrained(
    folder: Path, settings: dict[str, Any], state: dict[str, Tensor], gpt2: bool
) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer.

    settings: the fields of GPTConfig. gpt2: False for a fork that is none."""
    folder.mkdir(parents=True, exist_ok=True)
    eot = EOT if settings["vocab_size"] == VOCAB_SIZE else None  # None: another vocabulary
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        "n_ctx": settings["block_size"],
        "bos_token_id": eot,
        "eos_token_id": eot,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    config |= GPT2_MATHS if gpt2 else {"model_type": FORK_TYPE, "architectures": ["GPT"]}
    config |= {THEIR_NAMES.get(name, name): value for name, value in settings.items()}
    files.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if eot:
        write_tokenizer(folder, settings["block_size"])
    weights = {}
    for name, tensor in state.items():
        if not gpt2:  # cloned: safetensors refuses tensors that share memory
            weights[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
            continue
        if CONV1D.search(name):
            tensor = tensor.t()
        weights[f"transformer.{name}"] = tensor.cpu().contiguous()
    with files.atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(weights, partial, metadata={"format": "pt"})
        # safetensors creates it with mode 0600
        partial.chmod((folder / "config.json").stat().st_mode)


def write_tokenizer(folder: Path, block_size: int) -> None:
    """Writes GPT-2's tokenizer by copying its files: importing transformers takes seconds."""
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": block_size,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    files.write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    for ours, theirs in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
        files.write_text(folder / theirs, bpe_files()[ours].read_text(encoding="utf-8"))


def read_pretrained(name: str | Path, names: list[str]) -> tuple[dict, dict[str, Tensor], bool]:
    """The settings called `names` and the weights of a GPT-2 in a folder or on the Hub.

    Also True if it is one, False if a fork saved it."""
    folder = model_folder(name)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)")
    theirs = {name: THEIR_NAMES.get(name, name) for name in names}
    settings = {name: raw[key] for name, key in theirs.items() if key in raw}
    if raw.get("model_type") == FORK_TYPE:
        return settings, read_weights(folder, gpt2=False), False
    for key, expected in GPT2_MATHS.items():
        value = raw.get(key, expected if key != "model_type" else None)
        same = value == expected or (key == "n_inner" and value == 4 * raw.get("n_embd", 0))
        if not same and key not in names:
            raise UserError(f"{folder}: not a GPT-2: config.json has {key} = {value!r}")
    for key in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd"):
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise UserError(f"{folder}: config.json needs {key}, a whole number from 1")
    if raw["n_embd"] % raw["n_head"]:
        raise UserError(f"{folder}: config.json has an n_embd that n_head does not divide")
    return settings, read_weights(folder, gpt2=True), True


def read_weights(folder: Path, gpt2: bool) -> dict[str, Tensor]:
    """A folder's parameters under our names, linear weights as (out, in), floats as float32.

    gpt2: False if a fork saved them: they keep its names and layout."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            part = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
        for name, tensor in part.items():
            if gpt2:
                name = name.removeprefix("transformer.")
                if name.endswith((".attn.bias", ".attn.masked_bias")):  # these are masks
                    continue
                if CONV1D.search(name) and tensor.dim() == 2:
                    tensor = tensor.t()
                if not tensor.is_floating_point() or not tensor.isfinite().all():
                    raise UserError(f"{path}: {name} is not all finite floating-point numbers")
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            # Copied: load_file maps the file, and NFS and Windows cannot remove a mapped file.
            state[name] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if not gpt2:
        return state
    if "wte.weight" not in state:
        raise UserError(f"{folder}: no model.safetensors of a GPT-2 here")
    head = state.pop("lm_head.weight", state["wte.weight"])
    if not torch.equal(head, state["wte.weight"]):
        raise UserError(f"{folder}: not a GPT-2: its head is not tied to its token embedding")
    return state


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], name: str | Path, gpt2: bool
) -> None:
    """Makes `weights` the model's parameters. gpt2: as read_pretrained returns it."""
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        kind = "weights" if gpt2 else "a fork's weights: load it with that fork; here they"
        raise UserError(f"{name}: {kind} do not match config.json: {problem}") from None
    if not gpt2 and is_gpt2(model):
        problem = "saved by a fork of train_gpt2.py, which computes something else"
        raise UserError(f"{name}: {problem}; load it with that fork")


def model_folder(name: str | Path) -> Path:
    """`name` if it exists; otherwise the Hub's model of that name, downloaded once."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would log every retry; its failure is one line below
    try:
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        folder = Path(snapshot_download(str(name), allow_patterns=patterns))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(str(name), allow_patterns=["*.bin"])
        return folder
    except Exception as error:  # from the Hub, HTTP or a socket: no common base
        problem = f"neither a folder nor found on the Hub ({first_line(error)})"
        raise UserError(f"{name}: {problem}; offline, give a folder with the model") from None

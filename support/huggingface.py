"""Hugging Face: GPT-2's files written and read, models from the Hub.

In a Hugging Face GPT-2 parameter names begin with `transformer.` (not in OpenAI's uploads), and
linear layers are Conv1D, whose weights are (in, out).

A fork whose weights or mathematics are not GPT-2's must not pass for one, or other programs would
run another model than was trained. Its config.json has FORK_TYPE as model_type, which transformers
refuses, and its weights are stored as they are."""

import json
import math
import re
from dataclasses import replace
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


def gpt2_logits(state: dict[str, Tensor], n_layer: int, n_head: int, idx: Tensor) -> Tensor:
    """GPT-2's logits (T, V) of a full context of tokens idx (T,), spelled out once more.

    state: its parameters. An exception if their names or shapes are not GPT-2's."""
    unused = dict(state)
    T = len(idx)
    causal = torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()

    def take(name: str, *shape: int) -> Tensor:
        tensor = unused.pop(name)
        if tensor.shape != shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)}")
        return tensor

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (C,), take(f"{name}.weight", C), take(f"{name}.bias", C))

    def linear(x: Tensor, name: str, rows: int) -> Tensor:
        return x @ take(f"{name}.weight", rows, x.size(1)).t() + take(f"{name}.bias", rows)

    wte = unused.pop("wte.weight")
    C = wte.size(1)
    x = wte[idx] + take("wpe.weight", T, C)
    for i in range(n_layer):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn", 3 * C)
        q, k, v = (part.view(T, n_head, -1).transpose(0, 1) for part in qkv.split(C, dim=1))
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~causal, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, C)
        x = x + linear(y, f"h.{i}.attn.c_proj", C)
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc", 4 * C)
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj", C)
    x = norm(x, "ln_f")
    if unused:
        raise ValueError(f"{', '.join(unused)}: not in GPT-2")
    return x @ wte.t()


def is_gpt2(model: nn.Module) -> bool:
    """True if the parameters of a model and its mathematics are GPT-2's.

    Its class computes the logits of a full context with few layers and channels, random weights
    and in float64; they must be gpt2_logits'. It can't see what acts only in training, only from
    the fifth layer on, or only on the token 50256, nor other mathematics of this one object."""
    config = model.config
    try:
        # The names and shapes of this object's parameters; meta tensors have no values.
        if model.wte.weight.shape != (config.vocab_size, config.n_embd):
            return False
        shapes = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        idx = torch.zeros(config.block_size, dtype=torch.int64, device="meta")
        gpt2_logits(shapes, config.n_layer, config.n_head, idx)
        # The mathematics of its class.
        small = replace(config, vocab_size=97, n_layer=min(config.n_layer, 4), n_head=2, n_embd=8)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            copy = type(model)(small).double().eval()
            for parameter in copy.parameters():
                nn.init.normal_(parameter, std=0.3)
            idx = torch.randint(97, (config.block_size,))
            logits, _ = copy(idx[None])
            expected = gpt2_logits(copy.state_dict(), small.n_layer, small.n_head, idx)
        if logits.shape[1:] != expected.shape or expected.size(1) != small.vocab_size:
            return False
        return bool((logits[0] - expected).abs().max() < 1e-5 * expected.std())
    except Exception:  # other parameters, or a fork that works with its own sizes only
        return False


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
                if CONV1D.search(name):
                    tensor = tensor.t()
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
        raise UserError(f"{name}: weights do not match config.json: {problem}") from None
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

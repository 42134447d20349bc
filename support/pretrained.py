"""Hugging Face folders of GPT-2, read and written as plain dictionaries and tensors.

Hugging Face's parameter names begin with `transformer.` (not in OpenAI's uploads), and its linear
layers are Conv1D with (in, out) weights. Settings are the fields of a model's configuration; a
field that a fork adds keeps its name. Bad folders raise UserError."""

import json
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from support import files
from support.cli import UserError, first_line
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files

# fmt: off
GPT2_MATHS = {  # a model that differs in any of these isn't GPT-2
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True, "add_cross_attention": False,
}
# fmt: on
REQUIRED = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
THEIR_NAMES = {"block_size": "n_positions"}  # the one setting that has another name there
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def read_pretrained(name: str | Path, names: list[str]) -> tuple[dict, dict[str, Tensor]]:
    """The settings called `names` and the weights of a GPT-2 in a folder or on the Hub."""
    folder = Path(name)
    if not folder.exists():
        from support.models import model_folder

        folder = model_folder(name)
    return read_settings(folder, names), read_weights(folder)


def read_settings(folder: Path, names: list[str]) -> dict[str, Any]:
    """The settings called `names` from a folder's config.json, if it describes a GPT-2."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{folder}: no model here (config.json is missing or no JSON object)")
    for key, expected in GPT2_MATHS.items():
        value = raw.get(key, expected if key != "model_type" else None)
        same = value == expected or (key == "n_inner" and value == 4 * raw.get("n_embd", 0))
        if not same and key not in names:
            problem = f"config.json has {key} = {value!r}, not {expected!r}"
            raise UserError(f"{folder}: not a GPT-2: {problem}")
    bad = [name for name in REQUIRED if type(raw.get(name)) is not int or raw[name] < 1]
    if bad:
        raise UserError(f"{folder}: config.json needs {', '.join(bad)}: whole numbers from 1")
    if raw["n_embd"] % raw["n_head"]:
        raise UserError(f"{folder}: config.json has an n_embd that n_head does not divide")
    theirs = {name: THEIR_NAMES.get(name, name) for name in names}
    return {name: raw[key] for name, key in theirs.items() if key in raw}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """A folder's float32 parameters under our names, linear weights as (out, in)."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            part = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            problem = f"damaged or not a weights file ({first_line(error)})"
            raise UserError(f"{path}: {problem}") from None
        for name, tensor in part.items():
            name = name.removeprefix("transformer.")
            if name.endswith((".attn.bias", ".attn.masked_bias")):  # these are masks
                continue
            if CONV1D.search(name):
                tensor = tensor.t()
            # Copied: load_file maps the file, and NFS and Windows cannot remove a mapped file.
            state[name] = tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if "wte.weight" not in state:
        raise UserError(f"{folder}: no model.safetensors of a GPT-2 here")
    head = state.pop("lm_head.weight", state["wte.weight"])
    if not torch.equal(head, state["wte.weight"]):
        raise UserError(f"{folder}: not a GPT-2: its head is not tied to its token embedding")
    return state


def load_weights(model: nn.Module, weights: dict[str, Tensor], name: str | Path) -> None:
    """Makes `weights` the parameters of a model of the same shapes."""
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{name}: weights do not match config.json: {problem}") from None


def write_pretrained(folder: Path, settings: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer. state: like read_weights'."""
    folder.mkdir(parents=True, exist_ok=True)
    eot = EOT if settings["vocab_size"] == VOCAB_SIZE else None  # None: another vocabulary
    config = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    config |= {"n_ctx": settings["block_size"], "bos_token_id": eot, "eos_token_id": eot}
    config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} | GPT2_MATHS
    config |= {THEIR_NAMES.get(name, name): value for name, value in settings.items()}
    texts = {"config.json": json.dumps(config, indent=2) + "\n"}
    if eot:  # the tokenizer's files are copied: transformers takes seconds to import
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        tokenizer = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": settings["block_size"]}
        texts["tokenizer_config.json"] = json.dumps(tokenizer | special, indent=2) + "\n"
        for ours, theirs in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
            texts[theirs] = bpe_files()[ours].read_text(encoding="utf-8")
    for name, text in texts.items():
        files.write_text(folder / name, text)
    weights = {}
    for name, tensor in state.items():
        if CONV1D.search(name):
            tensor = tensor.t()
        weights[f"transformer.{name}"] = tensor.cpu().contiguous()
    with files.atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(weights, partial, metadata={"format": "pt"})
        # safetensors creates it with mode 0600
        partial.chmod((folder / "config.json").stat().st_mode)

"""Hugging Face: GPT-2's files written and read, models from the Hub, any causal language model.

In a Hugging Face GPT-2 parameter names begin with `transformer.` (not in OpenAI's uploads), and
linear layers are Conv1D, whose weights are (in, out). Settings are the fields of a model's
configuration; a field that a fork adds keeps its name."""

import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from support import files
from support.checkpoints import list_checkpoints
from support.errors import UserError, first_line
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files

# --------------------------------------------------------------------------------------------------
# GPT-2's format

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
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # weights that are stored transposed


def write_pretrained(folder: Path, settings: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer.

    settings: the fields of GPTConfig. state: weights as read_weights returns them."""
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
    config |= GPT2_MATHS
    config |= {THEIR_NAMES.get(name, name): value for name, value in settings.items()}
    files.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if eot:
        write_tokenizer(folder, settings["block_size"])
    weights = {}
    for name, tensor in state.items():
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


def read_pretrained(name: str | Path, names: list[str]) -> tuple[dict, dict[str, Tensor]]:
    """The settings called `names` and the weights of a GPT-2 in a folder or on the Hub."""
    folder = model_folder(name)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)")
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
    theirs = {name: THEIR_NAMES.get(name, name) for name in names}
    settings = {name: raw[key] for name, key in theirs.items() if key in raw}
    return settings, read_weights(folder)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """A folder's float32 parameters under our names, linear weights as (out, in)."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            part = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
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
    """Makes `weights` the parameters of a model with the same shapes."""
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{name}: weights do not match config.json: {problem}") from None


# --------------------------------------------------------------------------------------------------
# Models by name, and other architectures

TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")


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


def find_model(name: str) -> Path:
    """The newest checkpoint of a log folder, or the model called `name`."""
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return folder
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints[-1]
    raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints (step_*)")


def load_causal_lm(folder: Path, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer), loaded by transformers; the tokenizer is None if the folder has none.

    `options` go to AutoModelForCausalLM."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    part, tokenizer = "model", None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        model = model.to(device).eval()
        part = "tokenizer"
        # Without these files transformers 5 returns an empty tokenizer.
        if any(list(folder.glob(name)) for name in TOKENIZER_FILES):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # from transformers, safetensors, tokenizers: no common base
        raise UserError(f"{folder}: {part} cannot be loaded ({first_line(error)})") from None
    return model, tokenizer

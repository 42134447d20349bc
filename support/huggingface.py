"""Models in Hugging Face's format: those that are saved here, and those of a folder or the Hub.

forks.py finds out whether a model is a GPT-2. If it is none, the model_type in config.json is
FORK_TYPE, and only the script that trained it can open it."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from support import forks
from support.checkpoints import list_checkpoints
from support.command_line import shown, warn
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import atomic_path, write_text
from support.tokenizer import END, Tokenizer, WordTokenizer, get_tokenizer

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig

FORK_TYPE = "gpt2-repro-fork"
# Hugging Face's name for a field of GPTConfig. The other fields have the same name there.
THEIR_NAMES = {"block_size": "n_positions"}
# Settings of Hugging Face's GPT-2 that change what it computes. GPT has only these values.
MATHEMATICS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}

# --------------------------------------------------------------------------------------------------
# Writing


def write_model(
    folder: Path,
    model: "GPT",
    tensors: dict[str, Tensor],
    is_gpt2: bool,
    tokenizer: Tokenizer | None,
) -> None:
    """Writes config.json, model.safetensors, the script of the model, and the tokenizer.

    `tensors` are those of the model, with the names and the layout that they have in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "gpt2" if is_gpt2 else FORK_TYPE,
        "architectures": ["GPT2LMHeadModel" if is_gpt2 else "GPT"],
        "dtype": "float32",
    }
    for name, value in asdict(model.config).items():
        config[THEIR_NAMES.get(name, name)] = value
    if is_gpt2:  # These are transformers' defaults, except dropout, but other programs read them.
        config |= MATHEMATICS
        config |= {"n_ctx": model.config.block_size}
        config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config |= forks.script_entry(type(model))  # the name and the checksum of the script
    script, source = forks.script_of(type(model))
    if script is not None:
        (folder / script.name).write_bytes(source)
    if tokenizer is not None:
        config |= {"bos_token_id": tokenizer.eot_token, "eos_token_id": tokenizer.eot_token}
        write_tokenizer(tokenizer, folder, model.config.block_size)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    # safetensors refuses tensors that share memory, so each is copied.
    copies = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(copies, partial, metadata={"format": "pt"})
        # safetensors makes a file that only its owner can read.
        partial.chmod((folder / "config.json").stat().st_mode)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, block_size: int) -> None:
    """Writes the files of a tokenizer as transformers reads them.

    transformers could write them as well, but takes seconds to import."""
    for name, text in tokenizer.files.items():  # vocab.json, and merges.txt unless it has words
        write_text(folder / name, text)
    config: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size}
    if tokenizer.eot_token is not None:
        config |= {"bos_token": END, "eos_token": END, "unk_token": END}
    if isinstance(tokenizer, WordTokenizer):  # transformers needs a third file for it
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        words = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": tokenizer.numbers, "unk_token": "<unk>"},
        }
        write_text(folder / "tokenizer.json", json.dumps(words))
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------
# Reading


def find_model(name: str | Path) -> Path:
    """The folder of a model.

    `name` is this folder itself, or the log folder of a run, whose newest checkpoint is taken, or a
    model of the Hub, which is downloaded once."""
    folder = Path(name)
    if not folder.exists():
        folder = download(str(name))
    if (folder / "config.json").exists():
        return folder
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints")
    return checkpoints[-1]


def download(name: str) -> Path:
    """Downloads a model of the Hub, as safetensors if it has any, and returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # It would log every retry.
    try:
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin"])
        return folder
    except Exception as error:  # from the Hub, HTTP or a socket: no common base
        problem = f"neither a folder nor found on the Hub ({first_line(error)})"
        raise UserError(f"{name}: {problem}; offline, give a folder with the model") from None


def read_json(folder: Path) -> dict[str, Any]:
    """config.json of the model in a folder, which may be of any kind."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)") from None


def is_ours(folder: Path) -> bool:
    """True if this project has saved the model in a folder, and transformers has not since."""
    raw = read_json(folder)
    saved_here = raw.get("model_type") == FORK_TYPE or "script" in raw
    return saved_here and "transformers_version" not in raw


def read_gpt2_json(folder: Path) -> dict[str, Any]:
    """config.json of a GPT-2, or of the model of a fork. UserError if it is another model."""
    raw = read_json(folder)
    if raw.get("model_type") not in ("gpt2", FORK_TYPE):
        raise UserError(f"{folder}: not a GPT-2: model_type is {raw.get('model_type')!r}")
    return raw


def read_gpt_config(folder: Path, config_class: "type[GPTConfig]") -> "GPTConfig":
    """The GPTConfig of the model in a folder. A fork's class may have more fields."""
    raw = read_gpt2_json(folder)
    names = {field.name: THEIR_NAMES.get(field.name, field.name) for field in fields(config_class)}
    return config_class(**{ours: raw[theirs] for ours, theirs in names.items() if theirs in raw})


def check_origin(folder: Path, model: "GPT") -> None:
    """UserError if a fork has trained the model in a folder, and `model` is of another script.

    If the folder has a GPT-2 and `model` is none, this warns."""
    raw = read_gpt2_json(folder)
    why_not = forks.why_no_gpt2(model)  # "" if it is a GPT-2
    if raw["model_type"] == FORK_TYPE and not why_not:
        copy = f"{shown(folder)}/{raw.get('script')}"
        problem = f"no GPT-2, so only the script that trained it can use it, as in {copy}"
        raise UserError(f"{folder}: {problem}; sample.py and hellaswag.py take it with --code")
    if raw["model_type"] == FORK_TYPE:
        forks.check_same_script(raw, type(model), str(folder))
    elif why_not:
        name = forks.script_entry(type(model)).get("script", "this code")
        warn(f"{folder} is a GPT-2, but {name} is not ({why_not}), so its losses change")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the model in a folder, by name.

    Those of a GPT-2 have Hugging Face's names and layout, with "transformer." before each name, and
    lack the head. Those of a fork's model have the names and the layout of its class GPT."""
    path = folder / "model.safetensors"
    if is_ours(folder):
        if not path.exists():
            raise UserError(f"{folder}: no weights here (model.safetensors is missing)")
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
    # Other programs write GPT-2s in several ways, and transformers reads them all.
    theirs = load_by_transformers(folder)
    others = [key for key, value in MATHEMATICS.items() if getattr(theirs.config, key) != value]
    tensors = theirs.state_dict()
    head = tensors.pop("lm_head.weight")
    if not torch.equal(head, tensors["transformer.wte.weight"]):
        others.append("tie_word_embeddings")
    if others:
        raise UserError(f"{folder}: computes something else than GPT-2 ({', '.join(others)})")
    return tensors


def load_tensors(model: "GPT", tensors: dict[str, Tensor], folder: Path) -> None:
    """Loads tensors into a model. UserError, which names their folder, unless all of them fit."""
    ours = {name: tensor.shape for name, tensor in model.state_dict().items()}
    theirs = {name: tensor.shape for name, tensor in tensors.items()}
    if ours != theirs:
        different = sorted({name for name, _ in ours.items() ^ theirs.items()})
        more = ", …" if len(different) > 3 else ""
        problem = f"these tensors do not fit this model: {', '.join(different[:3])}{more}"
        raise UserError(f"{folder}: {problem}")
    model.load_state_dict(tensors)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of the model in a folder. Without one there, it is GPT-2's."""
    tokenizer = get_tokenizer(folder)
    size = read_gpt2_json(folder)["vocab_size"]
    if tokenizer.n_vocab > size:
        problem = f"the model has {size} tokens, but its tokenizer {tokenizer.n_vocab}"
        raise UserError(f"{folder}: {problem}; restore its vocab.json and merges.txt")
    return tokenizer


def check_same_tokenizer(folder: Path, tokenizer: Tokenizer, data: str) -> None:
    """UserError unless the model in a folder was trained with `tokenizer`, which is that of the
    data."""
    theirs = tokenizer_of(folder)
    if theirs != tokenizer:
        problem = f"its {theirs.n_vocab} tokens are not the {tokenizer.n_vocab} of {shown(data)}"
        remedy = "make shards in an --out with its vocab.json and merges.txt (GPT-2's need none)"
        raise UserError(f"{folder}: {problem}; {remedy}")


# --------------------------------------------------------------------------------------------------
# Models that transformers runs


def load_by_transformers(folder: Path) -> Any:
    """A causal language model in float32, by transformers."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # from transformers, safetensors: no common base
        raise UserError(f"{folder}: cannot be loaded ({first_line(error)})") from None
    missing = [*found["missing_keys"], *found["mismatched_keys"]]
    if missing:  # transformers draws them at random
        raise UserError(f"{folder}: its files lack weights ({missing[0]})")
    return model.eval()


def load_causal_lm(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """(model, tokenizer) of any causal language model in float32, by transformers."""
    import transformers

    patterns = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")
    if not any(list(folder.glob(name)) for name in patterns):  # it would make an empty one
        raise UserError(f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    model = load_by_transformers(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # from transformers, tokenizers: no common base
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({first_line(error)})") from None
    return model.to(device), tokenizer

"""Reads and writes models in the format of Hugging Face.

A fork is an edited copy of train_gpt2.py. If its model no longer computes what GPT-2 computes,
other programs must not load it as a GPT-2. Then the model_type in its config.json is FORK_TYPE, and
only the script that trained it can load it. forks.py finds out what a model computes."""

import json
import shlex
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
# These settings change what Hugging Face's GPT-2 computes. Our GPT computes this variant.
GPT2_SETTINGS = {
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
    tokenizer: Tokenizer | None,
) -> None:
    """Writes a model's folder: config.json, model.safetensors, the files of the tokenizer, and the
    script in which the class of the model is defined.

    `tensors` are the content of model.safetensors. GPT.save_pretrained() has given them the names
    that the file needs."""
    folder.mkdir(parents=True, exist_ok=True)
    is_gpt2 = forks.is_gpt2(model)
    config: dict[str, Any] = {
        "model_type": "gpt2" if is_gpt2 else FORK_TYPE,
        "architectures": ["GPT2LMHeadModel" if is_gpt2 else "GPT"],
        "dtype": "float32",
    }
    for name, value in asdict(model.config).items():
        config[THEIR_NAMES.get(name, name)] = value
    if is_gpt2:
        config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # no dropout
        # transformers has these as defaults, but other programs, such as llama.cpp, need them.
        config |= GPT2_SETTINGS | {"n_ctx": model.config.block_size}
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
    for name, text in tokenizer.files.items():
        write_text(folder / name, text)
    has_words = isinstance(tokenizer, WordTokenizer)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast" if has_words else "GPT2Tokenizer",
        "model_max_length": block_size,
    }
    if tokenizer.eot_token is not None:
        config |= {"bos_token": END, "eos_token": END, "unk_token": END}
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


CARD = """---
pipeline_tag: text-generation
{library}---
{kind} after {step:,} steps and {tokens:,} tokens of `{data}`, from {init}, trained by `{script}` of
gpt2-repro at commit {commit}: `{command}`

It continues text. It does not follow instructions, and what it writes may be false. The prompt and
the continuation together may have up to {context:,} tokens.
"""


def model_card(model: "GPT", entries: list[dict[str, Any]], step: int) -> str:
    """The README.md of a checkpoint, in the format of the Hub. `entries` are those of run.json."""
    this_start = entries[-1]
    config = this_start["config"]
    # The command of the first start has the flags. That of a resumed run may be only `--resume`.
    command = entries[0]["command"]
    is_gpt2 = forks.is_gpt2(model)
    return CARD.format(
        library="library_name: transformers\n" if is_gpt2 else "",
        kind="A GPT-2" if is_gpt2 else "A changed GPT-2, which needs its own code,",
        step=step,
        tokens=step * config["total_batch_size"],
        data=Path(config["data"]).name,
        init=config["init"],
        script=this_start.get("script", "a notebook"),
        commit=this_start["git_commit"],
        command=shlex.join(["python", *command]),
        context=model.config.block_size,
    )


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
    """The config.json of any model."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)") from None


def is_ours(folder: Path) -> bool:
    """True if this project wrote the model in a folder, and no other program has saved it since."""
    raw = read_json(folder)
    saved_here = raw.get("model_type") == FORK_TYPE or "script" in raw
    return saved_here and "transformers_version" not in raw


def read_gpt2_json(folder: Path) -> dict[str, Any]:
    """The config.json of a GPT-2 or of a fork's model. Raises UserError if it is another model."""
    raw = read_json(folder)
    if raw.get("model_type") not in ("gpt2", FORK_TYPE):
        raise UserError(f"{folder}: not a GPT-2: model_type is {raw.get('model_type')!r}")
    return raw


def read_gpt_config(folder: Path, config_class: "type[GPTConfig]") -> "GPTConfig":
    """The GPTConfig of the model in a folder.

    If a fork has added a field that config.json lacks, the field has its default."""
    raw = read_gpt2_json(folder)
    values = {}
    for field in fields(config_class):
        name = THEIR_NAMES.get(field.name, field.name)
        if name in raw:
            values[field.name] = raw[name]
    return config_class(**values)


def check_origin(folder: Path, model: "GPT") -> None:
    """Checks that the model in a folder may be loaded into `model`.

    Raises UserError if a fork has trained the model in the folder, and `model` belongs to another
    script. If the folder has a GPT-2, and `model` is not one, this only warns."""
    raw = read_gpt2_json(folder)
    # How the model differs from a GPT-2, in words. An empty string if it is one.
    difference = forks.why_no_gpt2(model)
    if raw["model_type"] == "gpt2":
        if difference:
            name = forks.script_entry(type(model)).get("script", "this code")
            problem = f"the weights are a GPT-2's, and {name} computes something else"
            warn(f"{folder}: {problem} ({difference})")
    elif difference:
        # The two scripts must have the same name or the same content.
        forks.check_same_script(raw, type(model), str(folder))
    else:
        problem = "not a GPT-2, so it needs the code that trained it"
        script = raw.get("script")
        if script:  # A class that was defined in a notebook has none.
            code = f"{shown(folder)}/{script}"
            problem += f", {script}; sample.py and hellaswag.py take --code {code}"
        raise UserError(f"{folder}: {problem}")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the model in a folder, by name.

    A GPT-2 has Hugging Face's names, such as transformer.wte.weight, and no lm_head, which is the
    same as wte. A fork's model has the names of its own class."""
    path = folder / "model.safetensors"
    if is_ours(folder):
        if not path.exists():
            raise UserError(f"{folder}: no weights here (model.safetensors is missing)")
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
    # There are several formats of GPT-2 weights. transformers reads all of them.
    theirs = load_by_transformers(folder)
    others = [key for key, value in GPT2_SETTINGS.items() if getattr(theirs.config, key) != value]
    tensors = theirs.state_dict()
    head = tensors.pop("lm_head.weight")
    if not torch.equal(head, tensors["transformer.wte.weight"]):
        others.append("tie_word_embeddings")
    if others:
        raise UserError(f"{folder}: does not compute what GPT-2 computes ({', '.join(others)})")
    return tensors


def load_tensors(model: "GPT", tensors: dict[str, Tensor], folder: Path) -> None:
    """Loads tensors into a model. If they do not fit, it raises a UserError that names `folder`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shapes != expected:
        names = shapes.keys() | expected.keys()
        different = sorted(name for name in names if shapes.get(name) != expected.get(name))
        more = ", …" if len(different) > 3 else ""
        problem = f"these tensors do not fit this model: {', '.join(different[:3])}{more}"
        raise UserError(f"{folder}: {problem}")
    model.load_state_dict(tensors)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of the model in a folder. If the folder has none, it is GPT-2's."""
    tokenizer = get_tokenizer(folder)
    size = read_gpt2_json(folder)["vocab_size"]
    if tokenizer.n_vocab > size:  # A model may have more logits than there are tokens.
        problem = f"the model has {size} tokens, but its tokenizer has {tokenizer.n_vocab}"
        raise UserError(f"{folder}: {problem}; restore its vocab.json and merges.txt")
    return tokenizer


def check_same_tokenizer(folder: Path, tokenizer: Tokenizer, data: str) -> None:
    """Raises UserError unless the model in a folder has the tokenizer of the data."""
    theirs = tokenizer_of(folder)
    if theirs != tokenizer:
        problem = f"its {theirs.n_vocab} tokens are not the {tokenizer.n_vocab} of {shown(data)}"
        remedy = "copy its vocab.json and merges.txt into a new folder, and make shards there"
        raise UserError(f"{folder}: {problem}; {remedy}")


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
    if missing:  # transformers would use random weights instead
        raise UserError(f"{folder}: its files lack weights ({missing[0]})")
    return model.eval()

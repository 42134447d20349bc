"""Loading and saving models in Hugging Face's format.

Other programs must not load a model as a GPT-2 if it computes something else. Its config.json then
has FORK_TYPE as its model_type, so that only the script that trained it can load it. forks.py
decides whether a model is a GPT-2."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from support import forks, scripts
from support.checkpoints import newest_intact
from support.command_line import display_path, restore_fields, warn
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import atomic_path, write_text
from support.peer_checkpoints import read_peer_fields, read_peer_tensors
from support.ranks import Ranks
from support.tokenizer import END, Tokenizer, get_tokenizer

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig, TrainConfig

FORK_TYPE = "gpt2-repro-fork"
HF_NAMES = {"block_size": "n_positions"}  # GPTConfig fields named differently by Hugging Face
# Settings that change what Hugging Face's GPT-2 computes, with the values that our GPT implements
GPT2_SETTINGS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# What to do with a model of another architecture
OTHER_MODELS = "transformers loads it, and `lm_eval --model hf --model_args pretrained=NAME "
OTHER_MODELS += "--tasks hellaswag` evaluates it (docs/evaluation.md)"

# Hugging Face's GPT-2 stores these weights as (in, out), while nn.Linear stores (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PREFIX = "transformer."  # prefix of every tensor name in model.safetensors


def change_layout(name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor from Hugging Face's layout to ours, or vice versa."""
    return tensor.mT if name.endswith(TRANSPOSED) and tensor.dim() >= 2 else tensor


# --------------------------------------------------------------------------------------------------
# Writing


def save_model(model: "GPT", folder: str | Path, tokenizer: Tokenizer | None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files, if any, to a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_gpt2 = not forks.why_not_gpt2(model)
    config: dict[str, Any] = {
        "model_type": "gpt2" if is_gpt2 else FORK_TYPE,
        "architectures": ["GPT2LMHeadModel" if is_gpt2 else "GPT"],
        "dtype": "float32",
    }
    for name, value in asdict(model.config).items():
        config[HF_NAMES.get(name, name)] = value
    if is_gpt2:
        config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # no dropout
        # transformers has these as defaults, but other programs, e.g. llama.cpp, need them.
        config |= GPT2_SETTINGS | {"n_ctx": model.config.block_size}
    if script := scripts.script_of(type(model)):  # None in a notebook
        config["script"] = script.name
    if tokenizer is not None:
        config |= {"bos_token_id": tokenizer.eot_token, "eos_token_id": tokenizer.eot_token}
        write_tokenizer(tokenizer, folder, model.config.block_size)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    # safetensors rejects tensors that share memory, so copy each.
    tensors = {}
    for name, tensor in model.state_dict().items():
        copy = change_layout(name, tensor.cpu()).clone(memory_format=torch.contiguous_format)
        tensors[PREFIX + name] = copy
    with atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(tensors, partial, metadata={"format": "pt"})
        # safetensors creates a file that only its owner can read.
        partial.chmod((folder / "config.json").stat().st_mode)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, block_size: int) -> None:
    """Write a tokenizer's files in transformers' format.

    transformers could do this itself, but takes seconds to import."""
    for name, text in tokenizer.files.items():
        write_text(folder / name, text)
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size}
    config |= {"bos_token": END, "eos_token": END, "unk_token": END}
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


CARD = """---
pipeline_tag: text-generation
{library}---
{kind} trained for {step:,} steps, on {tokens:,} tokens of `{data}`, with
`{script}` of gpt2-repro{commit}, by `{command}`.
"""


def model_card(folder: Path, entries: list[dict[str, Any]], step: int) -> str:
    """Return the README.md of the checkpoint in a folder, as a model card for the Hub.

    `entries` are those of run.json."""
    config, script, commit = (entries[-1][key] for key in ("config", "script", "git_commit"))
    gpt2 = is_gpt2(folder)
    return CARD.format(
        library="library_name: transformers\n" if gpt2 else "",
        kind="A GPT-2" if gpt2 else "A modified GPT-2, which needs its own code,",
        step=step,
        tokens=step * config["total_batch_size"],
        data=Path(config["data"]).name,
        script=script,
        commit=f" at commit {commit}" if commit else "",
        # That of the first start, because a resumed run may have only --resume.
        command=shlex.join(["python", *entries[0]["command"]]),
    )


# --------------------------------------------------------------------------------------------------
# Reading


def load_model(
    model_class: "type[GPT]", config_class: "type[GPTConfig]", name: str | Path
) -> "GPT":
    """Load the model that `name` denotes (see find_model), in eval mode."""
    folder = find_model(name)
    model = model_class(config_class(**read_fields(folder, config_class)))
    load_weights(model, folder)
    return model.eval()


def load_weights(model: "GPT", folder: Path, resumed: bool = False) -> None:
    """Load the weights in a folder into `model`. Raises UserError if names or shapes differ.

    The folder's model and `model` must both be GPT-2s, or neither. If only `model` is a GPT-2, this
    raises UserError, or warns if the run is `resumed`. If only the folder's model is one, it
    warns."""
    tensors = {
        name.removeprefix(PREFIX): change_layout(name, tensor)
        for name, tensor in read_tensors(folder).items()
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    script = scripts.script_name(type(model))
    remedy = "it needs the code that trained it"
    if saved_script := read_json(folder).get("script"):  # absent if saved in a notebook
        code = shlex.quote(f"{display_path(folder)}/{saved_script}")
        remedy += f"; sample.py, hellaswag.py and evaluate.py take --code {code}"
    if shapes != expected:
        names = shapes.keys() | expected.keys()
        different = sorted(name for name in names if shapes.get(name) != expected.get(name))
        more = ", …" if len(different) > 3 else ""
        problem = f"these tensors do not match the model in {script}"
        problem = f"{folder}: {problem}: {', '.join(different[:3])}{more}"
        raise UserError(problem if is_gpt2(folder) else f"{problem}; {remedy}")
    model.load_state_dict(tensors)
    difference = forks.why_not_gpt2(model)
    if is_gpt2(folder) and difference:
        warn(f"{folder}: a GPT-2's weights, but {script} computes something else ({difference})")
    elif not is_gpt2(folder) and not difference:
        problem = f"{folder}: not a GPT-2, but {script} defines one"
        if not resumed:
            raise UserError(f"{problem}; {remedy}")
        warn(problem)


def find_model(name: str | Path) -> Path:
    """Return the folder of a model.

    `name` is a model folder, a run's log folder (for its newest intact checkpoint), a name on the
    Hub (downloaded once), or a .pt file of build-nanogpt or nanoGPT, which is returned as is."""
    folder = Path(name)
    if folder.suffix == ".pt" and folder.is_file():
        return folder
    if not folder.exists():
        folder = download(str(name))
    if (folder / "config.json").exists():
        return folder
    checkpoint = newest_intact(folder, ignore="training_state.pt")
    if checkpoint is None:
        raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints")
    return checkpoint


def find_model_on_ranks(name: str, ranks: Ranks) -> Path:
    """Call find_model() on several ranks, with the same result.

    Rank 0 alone verifies a local folder. Every rank downloads from the Hub, because each may run on
    a different machine."""
    return ranks.on_rank_0(find_model, name) if Path(name).exists() else find_model(name)


def download(name: str) -> Path:
    """Download a model from the Hub, preferring safetensors, and return its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # do not log every retry
    try:
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin"])
        return folder
    except Exception as error:  # errors of the Hub, HTTP and sockets share no base class
        problem = f"neither a folder nor found on the Hub ({first_line(error)})"
        raise UserError(f"{name}: {problem}; if offline, pass a model folder") from None


def read_json(folder: Path) -> dict[str, Any]:
    """Return the config.json of any model."""
    if folder.is_file():
        fields = read_peer_fields(folder)
        return {"model_type": "gpt2"} | {HF_NAMES.get(key, key): fields[key] for key in fields}
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)") from None


def read_fields(folder: Path, config_class: "type[GPTConfig]") -> dict[str, Any]:
    """Return the fields of a GPTConfig that a model's config.json contains.

    A field that a fork added may be missing there."""
    raw = read_gpt2_json(folder)
    our_names = {hf_name: name for name, hf_name in HF_NAMES.items()}
    return restore_fields(config_class, {our_names.get(key, key): raw[key] for key in raw})


def is_ours(folder: Path) -> bool:
    """Return whether this project wrote the model, and transformers has not saved it since."""
    raw = read_json(folder)
    saved_here = raw.get("model_type") == FORK_TYPE or "script" in raw
    return saved_here and "transformers_version" not in raw


def read_gpt2_json(folder: Path) -> dict[str, Any]:
    """Return the config.json of a GPT-2 or a fork's model. Raises UserError for any other model."""
    raw = read_json(folder)
    if raw.get("model_type") not in ("gpt2", FORK_TYPE):
        raise UserError(
            f"{folder}: not a GPT-2: model_type is {raw.get('model_type')!r}; {OTHER_MODELS}"
        )
    return raw


def is_gpt2(folder: Path) -> bool:
    """Return whether the model in a folder was a GPT-2 when it was saved."""
    return read_gpt2_json(folder)["model_type"] == "gpt2"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the model in a folder, with Hugging Face's names and layout."""
    if folder.is_file():
        tensors = read_peer_tensors(folder)
        return {PREFIX + name: change_layout(name, tensor) for name, tensor in tensors.items()}
    path = folder / "model.safetensors"
    if is_ours(folder):
        if not path.exists():
            raise UserError(f"{folder}: no weights here (model.safetensors is missing)")
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
    # GPT-2 weights come in several formats, and transformers reads them all.
    model = load_with_transformers(folder)
    wrong = [key for key, value in GPT2_SETTINGS.items() if getattr(model.config, key) != value]
    tensors = model.state_dict()
    head = tensors.pop("lm_head.weight")  # must be tied to wte
    if not torch.equal(head, tensors[f"{PREFIX}wte.weight"]):
        wrong.append("tie_word_embeddings")
    if wrong:
        problem = f"does not compute what GPT-2 computes ({', '.join(wrong)})"
        raise UserError(f"{folder}: {problem}; {OTHER_MODELS}")
    return tensors


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of the model in a folder, by default GPT-2's."""
    tokenizer = get_tokenizer(folder)
    size = read_gpt2_json(folder)["vocab_size"]
    if tokenizer.n_vocab > size:  # the reverse is fine: a padded vocabulary
        problem = f"the model has {size} tokens, but its tokenizer has {tokenizer.n_vocab}"
        raise UserError(f"{folder}: {problem}; restore its vocab.json and merges.txt")
    return tokenizer


def fields_to_start_from(
    folder: Path, config_class: "type[GPTConfig]", config: "TrainConfig", tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the fields of GPTConfig for a run that starts from the model in a folder.

    Raises UserError if the model's tokenizer differs from the data's, or if its context is shorter
    than --seq-len."""
    model_tokenizer = tokenizer_of(folder)
    if model_tokenizer != tokenizer:
        problem = f"its vocabulary ({model_tokenizer.n_vocab} tokens) differs from that of"
        problem += f" {config.data} ({tokenizer.n_vocab} tokens)"
        remedy = "copy its vocab.json and merges.txt into a new folder, and make shards there"
        raise UserError(f"{folder}: {problem}; {remedy}")
    values = read_fields(folder, config_class)
    if config.seq_len > values["block_size"]:
        context = values["block_size"]
        raise UserError(f"--seq-len {config.seq_len}: the context window of {folder} is {context}")
    return values


def load_with_transformers(folder: Path) -> Any:
    """Load a causal language model in float32 with transformers."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # errors of transformers and safetensors share no base class
        raise UserError(f"{folder}: cannot be loaded ({first_line(error)})") from None
    missing = [*found["missing_keys"], *found["mismatched_keys"]]
    if missing:  # transformers would silently initialize these at random
        raise UserError(f"{folder}: its files lack weights ({missing[0]})")
    return model.eval()

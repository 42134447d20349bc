"""Hugging Face: GPT-2's files written and read, models from the Hub or by transformers.

A model that is not transformers' GPT-2 must not pass for one, or other programs would run another
model than was trained. Its config.json has FORK_TYPE as model_type, and its weights are stored as
they are. Beside them is the code with which transformers opens it if trust_remote_code=True is
given. This project itself never runs code of a model's folder. fingerprint.py finds out whether a
model is a GPT-2."""

import json
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from support.checkpoints import list_checkpoints
from support.command_line import few, note, shown
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import ROOT, atomic_path, write_text
from support.fingerprint import (
    fingerprint,
    is_gpt2,
    our_layout,
    same,
    same_as_transformers,
    small_model,
    their_layout,
)
from support.model_code import find_code, kept_code, load_gpt_class, modeling_fork, source_of
from support.tokenizer import VOCAB_SIZE, Tokenizer, get_tokenizer, holds_vocabulary

if TYPE_CHECKING:
    from train_gpt2 import GPT, GPTConfig

FORK_TYPE = "gpt2-repro-fork"
SAVED_BY = "gpt2-repro"  # how config.json says that this project has written it
THEIR_NAMES = {"block_size": "n_positions"}  # the one setting with another name there
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")


class OtherCode(UserError):
    """Weights were trained by code that makes other tensors or computes something else."""


# --------------------------------------------------------------------------------------------------
# Writing


def check_that_checkpoints_load(model: "GPT", resumed: bool) -> None:
    """UserError if a checkpoint of this model could not be loaded into a new one.

    Hours later would be too late. Also says if its code cannot be compared with other code, as
    loading a checkpoint has said already."""
    source_of(type(model))  # reads the script now, which may be edited while it trains
    _, problem = fingerprint(type(model), model.config)
    if problem and not resumed:
        note(f"{problem}; checkpoints are a fork's, and not compared with the code that loads them")
    try:
        saved = json.loads(json.dumps(asdict(model.config)))
        with torch.device("meta"):
            new = type(model)(make_config(type(model.config), saved))
    except Exception as error:
        error.add_note(f"A checkpoint is loaded by making {model.config} from JSON, as here.")
        raise
    ours, theirs = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in m.state_dict().items()}
        for m in (model, new)
    )
    if ours != theirs:
        different = few(name for name, _ in ours.items() ^ theirs.items())
        problem = f"a new one with its config has other tensors ({different})"
        remedy = "--save-every 0 trains without checkpoints"
        raise UserError(f"checkpoints of this model could not be read: {problem}; {remedy}")


def make_config(config_class: "type[GPTConfig]", settings: dict[str, Any]) -> "GPTConfig":
    """A config from the settings of a file. JSON has no tuples, so a list becomes one."""
    values = settings.items()
    return config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def write_pretrained(model: "GPT", folder: Path) -> None:
    """Writes config.json, model.safetensors, the tokenizer and the script of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    model_class = type(model)
    weights = model.state_dict()
    # A layer may have been added to this one model, after it was made.
    gpt2 = (
        is_gpt2(model_class, model.config)
        and weights.keys() == small_model(model_class, model.config).state_dict().keys()
    )
    settings = asdict(model.config)
    tokenizer = model.tokenizer
    eot = tokenizer.eot_token if tokenizer else None
    config = {
        "model_type": "gpt2" if gpt2 else FORK_TYPE,
        "architectures": ["GPT2LMHeadModel" if gpt2 else "GPT"],
        "dtype": "float32",
        "bos_token_id": eot,
        "eos_token_id": eot,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    if gpt2:  # the defaults of transformers, but other programs read them here
        config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
        config["n_ctx"] = settings["block_size"]
    config |= {THEIR_NAMES.get(name, name): value for name, value in settings.items()}
    config["saved_by"] = SAVED_BY
    if tokenizer is None:
        config["numbers"] = settings["vocab_size"]  # Its tokens are no text.
    logits, _ = fingerprint(model_class, model.config)
    if logits is not None:
        config["fingerprint"] = logits
    script, source = source_of(model_class)
    if script is not None:  # a class that was made in a notebook has none
        config["script"] = script.name
        (folder / script.name).write_bytes(source)
    if not gpt2 and (text := modeling_fork(model_class)) is not None:
        write_text(folder / "modeling_fork.py", text)
        classes = {"AutoConfig": "ForkConfig", "AutoModelForCausalLM": "ForkForCausalLM"}
        config["auto_map"] = {key: f"modeling_fork.{name}" for key, name in classes.items()}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if isinstance(tokenizer, Tokenizer):  # not one that a fork has made in another way
        write_tokenizer(tokenizer, folder, settings["block_size"])
    if gpt2:
        weights = their_layout(weights)
        del weights["lm_head.weight"]  # it is the token embedding
    # Clones, since safetensors refuses tensors that share memory, as a fork's may.
    weights = {
        name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in weights.items()
    }
    with atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(weights, partial, metadata={"format": "pt"})
        # safetensors creates it with mode 0600
        partial.chmod((folder / "config.json").stat().st_mode)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, block_size: int) -> None:
    """Writes a tokenizer as transformers reads it. Importing transformers would take seconds."""
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": block_size,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    for name, text in tokenizer.files.items():
        write_text(folder / name, text)


# --------------------------------------------------------------------------------------------------
# Reading


def read_pretrained(
    model_class: "type[GPT]",
    config_class: "type[GPTConfig]",
    name: str | Path,
    other_code: Literal["refuse", "accept", "adapt"],
    changes: dict[str, Any],
) -> "GPT":
    """A model_class (GPT) with the weights of a GPT-2 in a folder or on the Hub, in float32.

    changes: fields of config_class, instead of those in config.json. other_code: what to do if the
    weights were trained by code that computes something else. "refuse" raises OtherCode, "accept"
    prints a note, and "adapt" also takes the weights that fit if others do not."""
    folder = find_model(str(name))
    raw = read_config(folder)
    fork = raw.get("model_type") == FORK_TYPE
    theirs = None
    if not is_ours(raw):  # another program's
        if raw.get("model_type") != "gpt2":
            raise UserError(f"{folder}: not a GPT-2: model_type is {raw.get('model_type')!r}")
        theirs = load_by_transformers(folder, torch.float32)
        raw = theirs.config.to_dict()
    keys = {field.name: THEIR_NAMES.get(field.name, field.name) for field in fields(config_class)}
    settings = {field: raw[key] for field, key in keys.items() if key in raw}
    for field in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
        value = settings.get(field, 1)
        if type(value) is not int or value < 1:
            problem = f"{keys[field]} is {value!r}, not a number above 0"
            raise UserError(f"{folder}/config.json: {problem}")
    config = make_config(config_class, settings | changes)

    # Before the weights are read, since a small model takes memory as well.
    logits, problem = fingerprint(model_class, config)
    if theirs is None and "fingerprint" not in raw:
        problem = problem or "it was saved without a fingerprint"
    if problem:
        note(f"{name}: its code is not compared with this code: {problem}")
    elif theirs is not None:
        known = same_as_transformers(model_class, config, theirs.config)
    else:
        known = same(logits, raw["fingerprint"])
    if not problem and not known:
        script = f" ({raw['script']})" if "script" in raw else ""
        problem = f"{name}: trained by other code{script}, which computes something else"
        if other_code == "refuse":
            raise OtherCode(problem)
        note(f"{problem}, so its losses are not the same with this code")

    state = read_weights(folder) if theirs is None else theirs.state_dict()
    state = state if fork else our_layout(state)
    model = model_class(config)
    fit_weights(model, state, str(name), adapt=other_code == "adapt")
    model.tokenizer = read_tokenizer(folder, raw, model.tokenizer)
    return model.eval()


def read_tokenizer(folder: Path, raw: dict[str, Any], otherwise: Any) -> Any:
    """The tokenizer of a model in a folder. raw: its config.json

    Without one there, `otherwise`, which is GPT-2's or what a fork's code has made. None if the
    model was trained on numbers without text."""
    V = raw.get("vocab_size", VOCAB_SIZE)
    tokenizer = otherwise
    if "numbers" in raw:
        return None
    if holds_vocabulary(folder):
        tokenizer = get_tokenizer(folder)
    elif otherwise is None or (not is_ours(raw) and has_tokenizer(folder)):
        raise UserError(f"{folder}: its tokenizer is not like GPT-2's (merges.txt, vocab.json)")
    if tokenizer is not None and tokenizer.n_vocab > V:
        problem = f"the model has {V} tokens, but its vocabulary {tokenizer.n_vocab}"
        raise UserError(f"{folder}: {problem}; restore merges.txt and vocab.json")
    return tokenizer


def fit_weights(model: "GPT", state: dict[str, Tensor], name: str, adapt: bool) -> None:
    """Loads tensors into a model by their names. adapt: only those that fit, and names others."""
    own = model.state_dict()
    fitting = {key for key in own.keys() & state.keys() if own[key].shape == state[key].shape}
    new = own.keys() - fitting
    gone = state.keys() - fitting
    if (new or gone) and not adapt:
        problem = f"these tensors do not fit this code: {few(new | gone)}"
        raise OtherCode(f"{name}: {problem}")
    if new:
        note(f"{name}: this code's {few(new)} are new, so they keep their initial values")
    if gone:
        note(f"{name}: its {few(gone)} do not fit this code, so they are dropped")
    model.load_state_dict({key: state[key] for key in fitting}, strict=False)
    for key, tensor in model.state_dict().items():
        if key in fitting and not torch.equal(tensor, state[key].to(tensor.dtype)):
            problem = (
                "has NaN"
                if tensor.isnan().any()
                else "is tied to another tensor here, and one would be lost"
            )
            raise UserError(f"{name}: {key} {problem}")


def is_ours(raw: dict[str, Any]) -> bool:
    """True for a config.json as this project has written it.

    Where transformers has saved the model since, it has written its version, and may have changed
    settings that a fingerprint does not know of."""
    return raw.get("saved_by") == SAVED_BY and "transformers_version" not in raw


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)")
    return raw


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, under the names that they have there."""
    state: dict[str, Tensor] = {}
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise UserError(f"{folder}: no weights here (model.safetensors is missing)")
    for path in paths:
        try:
            state |= safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
    return state


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


def newest_checkpoint(name: str) -> str:
    """The newest checkpoint if `name` is the folder of a run. Any other name stays."""
    if (Path(name) / "config.json").exists():
        return name
    return str([Path(name), *list_checkpoints(Path(name))][-1]) if Path(name).is_dir() else name


def find_model(name: str) -> Path:
    """The newest checkpoint of a log folder, or the model called `name`."""
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return folder
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints[-1]
    raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints (step_*)")


def load_gpt(folder: Path, device: torch.device, code: str = "") -> "GPT | None":
    """The model in a folder as a GPT of ours. None: it isn't one, so it is for transformers.

    code: the file that defines it; "" finds it (model_code.py). A GPT-2 that this code would
    compute otherwise, since train_gpt2.py has been changed, is for transformers as well."""
    raw = read_config(folder)
    if not is_ours(raw):
        return None
    path, kept = find_code(folder, raw), kept_code(folder, raw)
    advice = ""
    if kept is not None and (path is None or code):
        gone = ", which has changed since or is not here" if path is None else ""
        copy = f"--code {shown(kept)} runs its copy"
        advice = f"{folder}: it was trained by {kept.name}{gone}; {copy}"
    if path is None and "fingerprint" not in raw and not code:  # nothing would be compared
        raise UserError(advice or f"{folder}: --code FILE must name the file with its model")
    model_class = load_gpt_class(Path(code) if code else path or ROOT / "train_gpt2.py")
    try:
        model = model_class.from_pretrained(folder)
    except OtherCode as error:
        if not code and raw.get("model_type") != FORK_TYPE:
            return None
        advice = advice or f"{folder}: --code FILE names the file with its model"
        raise UserError(f"{advice} ({error})") from None
    return model.to(device)


def load_by_transformers(folder: Path, dtype: torch.dtype | str) -> Any:
    """A causal language model by transformers. dtype: of the weights; auto: as they are saved."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # from transformers, safetensors: no common base
        raise UserError(f"{folder}: model cannot be loaded ({first_line(error)})") from None
    missing = [*found["missing_keys"], *found["mismatched_keys"]]
    if missing:  # transformers draws them at random
        raise UserError(f"{folder}: its files lack weights ({missing[0]})")
    return model.eval()


def has_tokenizer(folder: Path) -> bool:
    return any(list(folder.glob(name)) for name in TOKENIZER_FILES)


def load_causal_lm(
    folder: Path, device: torch.device, dtype: torch.dtype | str = "auto"
) -> tuple[Any, Any]:
    """(model, tokenizer) by transformers. dtype: that of load_by_transformers()"""
    import transformers

    # Without these files transformers 5 makes an empty tokenizer.
    raw = read_config(folder)
    gpt2s = raw.get("model_type") == "gpt2" and raw.get("vocab_size", VOCAB_SIZE) == VOCAB_SIZE
    if "numbers" in raw:
        raise UserError(f"{folder}: a model of numbers, which has no text")
    if not has_tokenizer(folder) and not gpt2s:
        raise UserError(f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    model = load_by_transformers(folder, dtype).to(device)
    try:
        with tempfile.TemporaryDirectory() as gpt2:
            if not has_tokenizer(folder):
                write_tokenizer(get_tokenizer(), Path(gpt2), model.config.n_positions)
            source = folder if has_tokenizer(folder) else gpt2
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # from transformers, tokenizers: no common base
        raise UserError(f"{folder}: tokenizer cannot be loaded ({first_line(error)})") from None
    return model, tokenizer

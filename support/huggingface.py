"""Hugging Face: GPT-2's files written and read, models from the Hub or by transformers.

In a Hugging Face GPT-2 parameter names begin with `transformer.`, and linear layers are Conv1D,
whose weights are (in, out).

Weights mean nothing without the mathematics that trained them. So every config.json that this
project writes has a *fingerprint*: some logits of a small model with fixed weights. Code that
computes other logits refuses the weights. A model whose fingerprint is not that of transformers'
GPT-2 must not pass for one, or other programs would run another model than was trained. Its
config.json has FORK_TYPE as model_type, which transformers refuses, and its weights are stored as
they are."""

import copy
import functools
import importlib.util
import json
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from support.checkpoints import list_checkpoints
from support.command_line import print0, shown
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import ROOT, atomic_path, write_text
from support.run_json import find_code, kept_code
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files

FORK_TYPE = "gpt2-repro-fork"
THEIR_NAMES = {"block_size": "n_positions"}  # the one setting with another name there
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored transposed
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")
# Channels per head of the small models. The root of 6 is no round number, so that no other scale
# passes for attention's 1 / sqrt(hs).
CHANNELS = 6

# --------------------------------------------------------------------------------------------------
# What does this code compute? model_class is a class like GPT, config its GPTConfig.


@functools.cache
def small_model(model_class: type[nn.Module], config: Any) -> nn.Module:
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
    idx[0, T // 2] = EOT
    logits = model(idx)
    logits = getattr(logits, "logits", logits)[0]  # (T, V); transformers returns an object
    return logits[[T // 2, T - 1], :4].flatten().tolist()


@functools.cache
def fingerprint(model_class: type[nn.Module], config: Any) -> list[float]:
    """Eight logits that tell the mathematics of this code from others'."""
    try:
        model = small_model(model_class, config)
        logits = some_logits(model, config.block_size)
        twice = [some_logits(model, min(config.block_size, 16)) for _ in range(2)]
    except Exception as error:
        problem = f"a small copy of this model cannot be evaluated ({first_line(error)})"
        raise UserError(f"{problem}; it must work with {CHANNELS} channels per head") from None
    if not same(*twice, ROUNDED):
        raise UserError("this model's results are random in evaluation: switch dropout off there")
    return logits


# How far fingerprints of the same mathematics differ, relative to the largest number. Parts of a
# fork may be computed in float32, whose rounding varies from chip to chip.
EXACT, ROUNDED = 1e-9, 1e-6


def same(a: list[float], b: list[float], tolerance: float) -> bool:
    return len(a) == len(b) and np.allclose(a, b, rtol=0, atol=tolerance * np.abs(a).max())


@functools.cache
def is_gpt2(model_class: type[nn.Module], config: Any) -> bool:
    """True if names, shapes and mathematics are those of transformers' GPT-2, with no other tensors
    tied than the head and the embedding. What acts only in training is not seen."""
    # Imported here, since it takes seconds.
    from transformers.models.gpt2.modeling_gpt2 import GPT2Config

    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_positions": config.block_size}
    return same_as_transformers(model_class, config, GPT2Config(**shape))


def same_as_transformers(model_class: type[nn.Module], config: Any, their_config: Any) -> bool:
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
    expected = some_logits(theirs, config.block_size)
    return same(fingerprint(model_class, config), expected, EXACT)


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


def check_before_training(model: nn.Module) -> None:
    """UserError if a checkpoint of a fork's model could not be loaded into a new one.

    Hours later would be too late. Also asks whether it is a GPT-2, which takes seconds, once."""
    fingerprint(type(model), model.config)
    is_gpt2(type(model), model.config)
    problem = "checkpoints of this model could not be read"
    try:
        saved = json.loads(json.dumps(asdict(model.config)))
        with torch.device("meta"):
            new = type(model)(type(model.config)(**saved))
        hash(new.config)  # no list, which JSON makes of a tuple
    except Exception as error:
        cause = f"{model.config} does not make it again ({first_line(error)})"
        raise UserError(f"{problem}: {cause}") from None
    ours, theirs = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in m.state_dict().items()}
        for m in (model, new)
    )
    if ours != theirs:
        different = sorted({name for name, _ in ours.items() ^ theirs.items()})
        raise UserError(f"{problem}: a new one with its config has other {', '.join(different)}")


# --------------------------------------------------------------------------------------------------
# Writing


def write_pretrained(model: nn.Module, folder: Path) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer. model: a GPT"""
    folder.mkdir(parents=True, exist_ok=True)
    weights = model.state_dict()
    names = small_model(type(model), model.config).state_dict().keys()
    gpt2 = is_gpt2(type(model), model.config) and weights.keys() == names
    settings = asdict(model.config)
    has_tokenizer = settings["vocab_size"] >= VOCAB_SIZE
    eot = EOT if has_tokenizer else None
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
    config["fingerprint"] = fingerprint(type(model), model.config)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if has_tokenizer:
        write_tokenizer(folder, settings["block_size"])
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


def write_tokenizer(folder: Path, block_size: int) -> None:
    """Writes GPT-2's tokenizer by copying its files: importing transformers takes seconds."""
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": block_size,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    for ours, theirs in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
        write_text(folder / theirs, bpe_files()[ours].read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------
# Reading


def read_pretrained(
    model_class: type[nn.Module],
    config_class: type,
    name: str | Path,
    strict: bool,
    changes: dict[str, Any],
) -> nn.Module:
    """A model_class (GPT) with the weights of a GPT-2 in a folder or on the Hub, in float32.

    changes: fields of config_class, instead of those in config.json. strict: refuse weights that
    were trained with other mathematics; otherwise only print a note."""
    folder = model_folder(name)
    raw = read_config(folder)
    fork = raw.get("model_type") == FORK_TYPE
    theirs = None
    if not is_ours(raw):  # another program's
        if raw.get("model_type") != "gpt2":
            raise UserError(f"{folder}: not a GPT-2: model_type is {raw.get('model_type')!r}")
        theirs = load_by_transformers(folder, torch.float32)
        raw = theirs.config.to_dict()
    keys = {field.name: THEIR_NAMES.get(field.name, field.name) for field in fields(config_class)}
    settings = {name: raw[key] for name, key in keys.items() if key in raw} | changes
    kind = "a fork's weights do not fit this code" if fork else "the weights do not fit"
    try:
        config = config_class(**settings)
        # Before the weights are read, since the logits of a long context take memory as well.
        if theirs is not None:
            known = same_as_transformers(model_class, config, theirs.config)
        else:
            found = fingerprint(model_class, config)
            known = same(found, raw["fingerprint"], EXACT)
            if fork and not known:  # a fork may differ from GPT-2 by less than its own rounding
                known = same(found, raw["fingerprint"], ROUNDED)
                known = known and not is_gpt2(model_class, config)
    except Exception as error:  # of a constructor
        raise UserError(f"{name}: {kind}: {' '.join(str(error).split()):.300}") from None
    state = read_weights(folder) if theirs is None else theirs.state_dict()
    try:
        model = model_class(config)
        state = state if fork else our_layout(state)
        model.load_state_dict(state)
        for key, tensor in model.state_dict().items():
            if not torch.equal(tensor, state[key].to(tensor.dtype)):
                problem = "has NaN" if tensor.isnan().any() else "is tied to another tensor here"
                raise ValueError(f"{key} {problem}")
    except Exception as error:  # other names and shapes
        raise UserError(f"{name}: {kind}: {' '.join(str(error).split()):.300}") from None
    if not known:
        problem = f"{name}: trained with other mathematics than this code has"
        if strict:
            raise UserError(f"{problem}; load it with the code that saved it")
        print0(f"note: {problem}")
    return model.eval()


def is_ours(raw: dict[str, Any]) -> bool:
    """True for a config.json as this project has written it.

    Where transformers has saved the model since, it has written its version, and may have changed
    settings that a fingerprint does not know of."""
    return "fingerprint" in raw and "transformers_version" not in raw


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


def find_model(name: str) -> Path:
    """The newest checkpoint of a log folder, or the model called `name`."""
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return folder
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints[-1]
    raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints (step_*)")


def load_gpt(folder: Path, device: torch.device, code: str = "") -> nn.Module | None:
    """The model in a folder as a GPT of ours. None: it isn't one, so it is for transformers.

    code: the file that defines it; "" finds it (support/run_json.py). A GPT-2 that this code would
    compute otherwise, since train_gpt2.py has been changed, is for transformers as well."""
    raw = read_config(folder)
    if not is_ours(raw):
        return None
    path = Path(code) if code else find_code(folder)
    model_class = load_gpt_class(path)
    try:
        model = model_class.from_pretrained(folder)
    except UserError as error:
        if not code and raw.get("model_type") != FORK_TYPE:
            return None
        kept = kept_code(folder) or Path("FILE")
        advice = f"--code {shown(kept)} runs that file instead of {shown(path)}"
        raise UserError(f"{error}; {advice}") from None
    V = model.config.vocab_size
    if V < VOCAB_SIZE:
        raise UserError(f"{folder}: a vocabulary of {V} tokens, but GPT-2's has {VOCAB_SIZE}")
    return model.to(device)


def load_gpt_class(path: Path) -> type[nn.Module]:
    """Runs a file and returns its class GPT."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--code {path}: not a Python file")
    if path.resolve() == ROOT / "train_gpt2.py":
        import train_gpt2 as module
    else:
        folder = str(path.absolute().parent)
        if folder not in sys.path:  # where `python FILE` would look for what it imports
            sys.path.append(folder)
        name = f"code_{path.stem}"  # not the name of a module that is already here
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if not hasattr(module, "GPT"):
        raise UserError(f"--code {path}: has no class GPT")
    return module.GPT


def load_by_transformers(folder: Path, dtype: torch.dtype | str) -> Any:
    """A causal language model by transformers. dtype: of the weights; auto: as they are saved."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # from transformers, safetensors: no common base
        raise UserError(f"{folder}: model cannot be loaded ({first_line(error)})") from None
    missing = [*found["missing_keys"], *found["mismatched_keys"]]
    if missing:  # transformers draws them at random
        raise UserError(f"{folder}: its files lack weights ({missing[0]})")
    return model.eval()


def load_causal_lm(
    folder: Path, device: torch.device, dtype: torch.dtype | str = "auto"
) -> tuple[Any, Any]:
    """(model, tokenizer) by transformers. dtype: that of load_by_transformers()"""
    import transformers

    # Without these files transformers 5 makes an empty tokenizer.
    has_tokenizer = any(list(folder.glob(name)) for name in TOKENIZER_FILES)
    raw = read_config(folder)
    gpt2s = raw.get("model_type") == "gpt2" and raw.get("vocab_size", VOCAB_SIZE) == VOCAB_SIZE
    if not has_tokenizer and not gpt2s:
        raise UserError(f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    model = load_by_transformers(folder, dtype).to(device)
    try:
        with tempfile.TemporaryDirectory() as gpt2:
            if not has_tokenizer:
                write_tokenizer(Path(gpt2), model.config.n_positions)
            source = folder if has_tokenizer else gpt2
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except Exception as error:  # from transformers, tokenizers: no common base
        raise UserError(f"{folder}: tokenizer cannot be loaded ({first_line(error)})") from None
    return model, tokenizer

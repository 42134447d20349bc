"""Hugging Face: GPT-2's files written and read, models from the Hub or by transformers.

In a Hugging Face GPT-2 parameter names begin with `transformer.` (not in OpenAI's uploads), and
linear layers are Conv1D, whose weights are (in, out).

A fork whose weights or mathematics are not GPT-2's must not pass for one, or other programs would
run another model than was trained. Its config.json has FORK_TYPE as model_type, which transformers
refuses, and its weights are stored as they are.

Every config.json has a fingerprint of the mathematics that the weights were trained with. So no
other code runs them: neither one fork's weights by another fork, nor a fork's by the original."""

import functools
import json
import math
import re
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import files
from support.checkpoints import list_checkpoints
from support.cli import print0, shown
from support.code import find_code, load_gpt_class
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
SHAPE = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")  # of a GPT-2, in config.json
THEIR_NAMES = {"block_size": "n_positions"}  # the one setting with another name there
FORK_TYPE = "gpt2-repro-fork"
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # weights that are stored transposed
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")

# --------------------------------------------------------------------------------------------------
# What does this code compute? The arguments are a class like GPT and its config, a GPTConfig.


def is_gpt2(model: nn.Module) -> bool:
    """True if parameters and mathematics of a GPT are those of transformers' GPT-2.

    What acts only in training is not seen."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return shapes == gpt2_shapes(model.config) and computes_gpt2(type(model), model.config)


@functools.cache
def gpt2_shapes(config: Any) -> dict[str, torch.Size]:
    """The names and shapes of GPT-2's parameters."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        theirs = our_layout(transformers_gpt2(config).state_dict())
    return {name: tensor.shape for name, tensor in theirs.items()}


@functools.cache
def computes_gpt2(model_class: type[nn.Module], config: Any) -> bool:
    """True if two small models compute GPT-2's logits and cross-entropy.

    They have two heads, 8 channels and all layers; one has the whole context, the other the whole
    vocabulary."""
    small = replace(config, n_head=2, n_embd=8)
    sizes = {"vocab_size": 97}, {"vocab_size": VOCAB_SIZE, "block_size": 16}
    try:
        return all(computes_as_theirs(model_class, replace(small, **size)) for size in sizes)
    except Exception:  # a fork that takes only its own sizes
        return False


@torch.no_grad()
def computes_as_theirs(model_class: type[nn.Module], config: Any) -> bool:
    """Compares with transformers in float64, for random weights and tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = transformers_gpt2(config).double().eval()
        ours = model_class(config).double().eval()
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.3)
        idx = torch.randint(config.vocab_size, (1, config.block_size))
    idx[0, config.block_size // 2] = config.vocab_size - 1  # <|endoftext|> of the whole vocabulary
    ours.load_state_dict(our_layout(theirs.state_dict()))
    expected = theirs(idx).logits  # (1, T, V)
    logits, _ = ours(idx)
    targets = idx.roll(-1)
    loss = ours.cross_entropy(ours.hidden(idx), ours.head_weight, targets).item()
    expected_loss = F.cross_entropy(expected[0], targets[0]).item()
    same_loss = math.isclose(loss, expected_loss, rel_tol=1e-5)  # it is in float32
    return same_loss and bool((logits - expected).abs().max() < 1e-9 * expected.std())


def transformers_gpt2(config: Any) -> nn.Module:
    """A GPT-2 of transformers with the shape of a GPTConfig."""
    # Imported here, since it takes seconds.
    from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

    settings = {THEIR_NAMES.get(name, name): value for name, value in asdict(config).items()}
    shape = {name: settings[name] for name in SHAPE}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))


def our_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a Hugging Face GPT-2 under our names, linear weights as (out, in)."""
    ours = {}
    for name, tensor in state.items():
        name = name.removeprefix("transformer.")
        if not name.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight")):  # masks; wte
            ours[name] = tensor.t() if CONV1D.search(name) and tensor.dim() == 2 else tensor
    return ours


@functools.cache
@torch.no_grad()
def fingerprint(model_class: type[nn.Module], config: Any) -> list[float]:
    """Four logits of a small model with fixed weights, to tell its mathematics from others'.

    UserError if its loss is made of other logits: it would train one head and sample from another.
    """
    # The smallest size that a fork accepts; the last one is the model's own.
    for size in ({"n_head": 2, "n_embd": 8}, {"n_embd": 4 * config.n_head}, {}):
        try:
            with torch.random.fork_rng(devices=[]):
                model = model_class(replace(config, **size)).double().eval()
            for i, parameter in enumerate(model.parameters()):
                numbers = torch.arange(parameter.numel()) * 7919 + i * 104_729
                parameter.copy_((numbers % 1000 / 500 - 1).view_as(parameter))  # from -1 to 1
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.mul_(0.02)  # so that the first LayerNorm's eps counts
            idx = torch.arange(config.block_size) * 7919 % config.vocab_size
            idx[config.block_size // 2] = config.vocab_size - 1  # <|endoftext|>
            x = 50 * model.hidden(idx[None])[0, -1:]  # (1, C), large, so that a cap counts
            logits = model.logits(x)[0]  # (V,)
            loss = model.cross_entropy(x, model.head_weight, idx[-1:])  # about 11, in float32
            if abs(loss - F.cross_entropy(logits, idx[-1])) > 1e-3:
                raise ValueError("logits() is not lm_head() with head_weight, as the loss is")
            return logits[[0, 1, -2, -1]].tolist()
        except Exception as error:
            problem = error
    raise UserError(f"this model cannot be evaluated: {first_line(problem)}")


def same_fingerprint(a: list[float], b: list[float]) -> bool:
    """True for the same mathematics. Parts of a fork may be in float32, whose rounding varies."""
    return np.allclose(a, b, rtol=0, atol=5e-6 * np.abs(a).max())


def check_before_training(model: nn.Module) -> None:
    """UserError if a checkpoint of a fork's model could not be loaded into a new one.

    Hours later would be too late. Also asks whether it is a GPT-2, which takes seconds, once."""
    is_gpt2(model)
    found = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found.append(fingerprint.__wrapped__(type(model), model.config))
    if not same_fingerprint(*found):
        raise UserError("this model's results are random in evaluation: switch dropout off there")
    try:
        saved = json.loads(json.dumps(asdict(model.config)))
        with torch.device("meta"):
            copy = type(model)(type(model.config)(**saved))
        hash(copy.config)  # no list, which JSON makes of a tuple
    except Exception as error:
        problem = f"{model.config} does not make it again ({first_line(error)})"
        raise UserError(f"checkpoints of this model could not be read: {problem}") from None
    ours, theirs = (
        {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in m.state_dict().items()}
        for m in (model, copy)
    )
    if ours != theirs:
        different = sorted({name for name, _ in ours.items() ^ theirs.items()})
        problem = f"a new one with its config has other {', '.join(different)}"
        raise UserError(f"checkpoints of this model could not be read: {problem}")


# --------------------------------------------------------------------------------------------------
# Writing


def write_pretrained(model: nn.Module, folder: Path) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer. model: a GPT"""
    folder.mkdir(parents=True, exist_ok=True)
    gpt2 = is_gpt2(model)
    settings = asdict(model.config)
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
    config["fingerprint"] = fingerprint(type(model), model.config)
    files.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if eot:
        write_tokenizer(folder, settings["block_size"])
    weights = {}
    for name, tensor in model.state_dict().items():
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
    theirs = {f.name: THEIR_NAMES.get(f.name, f.name) for f in fields(config_class)}
    fork = raw.get("model_type") == FORK_TYPE
    if not fork:
        check_is_gpt2s(folder, raw, theirs)
    settings = {name: raw[key] for name, key in theirs.items() if key in raw}
    model = model_class(config_class(**settings | changes))
    try:
        model.load_state_dict(read_weights(folder, fork))
    except RuntimeError as error:
        problem = f"{' '.join(str(error).split()):.300}"
        kind = "a fork's weights: load it with that fork; here they" if fork else "weights"
        raise UserError(f"{name}: {kind} do not match config.json: {problem}") from None
    saved = raw.get("fingerprint")
    if saved is None and not fork:  # not saved by this project
        same = is_gpt2(model)
    else:
        found = fingerprint(model_class, model.config)
        same = saved is not None and same_fingerprint(found, saved)
        # A fork may differ from GPT-2 by less than a fingerprint shows.
        same = same and not (fork and is_gpt2(model))
    if not same:
        problem = f"{name}: trained with other mathematics than this code has"
        if strict:
            raise UserError(f"{problem}; load it with the code that saved it")
        print0(f"note: {problem}")
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = None
    if not isinstance(raw, dict):
        raise UserError(f"{folder}: no model here (config.json is missing or damaged)")
    return raw


def check_is_gpt2s(folder: Path, raw: dict[str, Any], names: dict[str, str]) -> None:
    """UserError unless config.json is a GPT-2's. names: of the settings that may differ."""
    for key, expected in GPT2_MATHS.items():
        value = raw.get(key, expected if key != "model_type" else None)
        same = value == expected or (key == "n_inner" and value == 4 * raw.get("n_embd", 0))
        if not same and key not in names:
            raise UserError(f"{folder}: not a GPT-2: config.json has {key} = {value!r}")
    for key in SHAPE:
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise UserError(f"{folder}: config.json needs {key}, a whole number from 1")
    if raw["n_embd"] % raw["n_head"]:
        raise UserError(f"{folder}: config.json has an n_embd that n_head does not divide")


def read_weights(folder: Path, fork: bool) -> dict[str, Tensor]:
    """A folder's parameters under our names and in our layout.

    fork: a fork saved them, with its own names and layout."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            state |= safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
    if not fork:
        head = state.get("lm_head.weight")
        state = our_layout(state)
        if "wte.weight" not in state:
            raise UserError(f"{folder}: no model.safetensors of a GPT-2 here")
        if head is not None and not torch.equal(head, state["wte.weight"]):
            raise UserError(f"{folder}: not a GPT-2: its head is not tied to its token embedding")
        for name, tensor in state.items():
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise UserError(f"{folder}: {name} is not all finite floating-point numbers")
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

    code: the file that defines it; "" finds it (support/code.py). A GPT-2 that this code would
    compute otherwise, since train_gpt2.py has been changed, is for transformers as well."""
    raw = read_config(folder)
    if "fingerprint" not in raw:
        return None
    path = Path(code) if code else find_code(folder)
    model_class = load_gpt_class(path)
    try:
        model = model_class.from_pretrained(folder)
    except UserError as error:
        if not code and raw.get("model_type") != FORK_TYPE:
            return None
        kept = next(folder.parent.glob("*.py"), Path("FILE"))  # by the run that trained it
        advice = f"--code {shown(kept)} runs that file instead of {shown(path)}"
        raise UserError(f"{error}; {advice}") from None
    V = model.config.vocab_size
    if V != VOCAB_SIZE:
        raise UserError(f"{folder}: a vocabulary of {V} tokens, but GPT-2's has {VOCAB_SIZE}")
    return model.to(device)


def load_causal_lm(
    folder: Path, device: torch.device, dtype: torch.dtype | str = "auto"
) -> tuple[Any, Any]:
    """(model, tokenizer) by transformers. dtype: of the weights; auto: as they are saved."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Without these files transformers 5 makes an empty tokenizer.
    has_tokenizer = any(list(folder.glob(name)) for name in TOKENIZER_FILES)
    raw = read_config(folder)
    gpt2s = raw.get("model_type") == "gpt2" and raw.get("vocab_size", VOCAB_SIZE) == VOCAB_SIZE
    if not has_tokenizer and not gpt2s:
        raise UserError(f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    part = "model"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = model.to(device).eval()
        part = "tokenizer"
        with tempfile.TemporaryDirectory() as gpt2:
            if not has_tokenizer:
                write_tokenizer(Path(gpt2), model.config.n_positions)
            source = folder if has_tokenizer else gpt2
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except Exception as error:  # from transformers, safetensors, tokenizers: no common base
        raise UserError(f"{folder}: {part} cannot be loaded ({first_line(error)})") from None
    return model, tokenizer

"""Loads a model for sample.py and hellaswag.py: train_gpt2.py's own, or any by transformers."""

import json
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import list_checkpoints
from support.errors import UserError, first_line
from support.huggingface import FORK_TYPE, model_folder
from support.tokenizer import VOCAB_SIZE, bpe_files
from train_gpt2 import GPT

TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")


def find_model(name: str) -> Path:
    """The newest checkpoint of a log folder, or the model called `name`."""
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return folder
    checkpoints = list_checkpoints(folder)
    if checkpoints:
        return checkpoints[-1]
    raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints (step_*)")


def has_gpt2_tokenizer(folder: Path) -> bool:
    """True if the tokenizer files in a folder are those that save_pretrained writes."""
    try:
        vocab = json.loads((folder / "vocab.json").read_bytes())
        merges = (folder / "merges.txt").read_bytes()
    except (OSError, ValueError):
        return False
    files = bpe_files()
    same_vocab = vocab == json.loads(files["encoder.json"].read_bytes())
    return same_vocab and merges == files["vocab.bpe"].read_bytes()


def load_gpt(name: str, device: torch.device) -> GPT | None:
    """The model of train_gpt2.py in a run's or another folder; None: leave it to transformers.

    That is any model that train_gpt2.py, as it is now, computes as it was trained: a fork's own,
    or a GPT-2 with GPT-2's tokenizer, unless this is a fork that computes something else."""
    if not Path(name).exists():  # from the Hub
        return None
    folder = find_model(name)
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (ValueError, KeyError, TypeError):
        return None
    if kind != FORK_TYPE and not (kind == "gpt2" and has_gpt2_tokenizer(folder)):
        return None
    try:
        model = GPT.from_pretrained(folder)
    except UserError:
        if kind == FORK_TYPE:
            raise
        return None
    if kind == "gpt2" and not model.is_gpt2:
        return None
    V = model.config.vocab_size
    if V != VOCAB_SIZE:
        raise UserError(f"{folder}: a vocabulary of {V} tokens, but GPT-2's has {VOCAB_SIZE}")
    return model.to(device).eval()


def load_causal_lm(folder: Path, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer), loaded by transformers; the tokenizer is None if the folder has none."""
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

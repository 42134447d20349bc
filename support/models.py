"""Models on the Hugging Face hub; any causal LM for sample.py and hellaswag.py."""

from pathlib import Path
from typing import Any

import torch

from support.cli import UserError, first_line
from support.run_folder import list_checkpoints

TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")


def model_folder(name: str | Path) -> Path:
    """`name` if it exists; otherwise the hub's model of that name, downloaded once."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would log every retry; its failure is one line below
    try:
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors"]
        folder = Path(snapshot_download(str(name), allow_patterns=patterns))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(str(name), allow_patterns=["*.bin"]))
        return folder
    except Exception as error:  # the hub's, its HTTP library's, the socket's: no common base
        raise UserError(
            f"{name}: neither a folder nor found on the Hub ({first_line(error)}); without "
            "a network, give a folder that holds the model"
        ) from None


def find_model(name: str) -> Path:
    """The newest checkpoint of a log folder, or the model called `name`."""
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return folder
    if newest := list_checkpoints(folder)[-1:]:
        return newest[0]
    raise UserError(f"{name}: neither a model (config.json) nor a run with checkpoints (step_*)")


def load_causal_lm(folder: Path, device: torch.device, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) by transformers; the tokenizer is None if the folder has none.

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
        if any(path for name in TOKENIZER_FILES for path in folder.glob(name)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers', safetensors', tokenizers': no common base
        raise UserError(f"{folder}: {part} cannot be loaded ({first_line(error)})") from None
    return model, tokenizer

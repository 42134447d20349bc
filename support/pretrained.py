"""Hugging Face folders of GPT-2: their format, and how they are written. models.py reads them.

Hugging Face's parameter names begin with `transformer.` (not in OpenAI's uploads), and its linear
layers are Conv1D with (in, out) weights. Settings are the fields of a model's configuration; a
field that a fork adds keeps its name."""

import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from support import files
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files

# fmt: off
GPT2_MATHS = {  # a model that differs in any of these isn't GPT-2
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True, "add_cross_attention": False,
}
# fmt: on
THEIR_NAMES = {"block_size": "n_positions"}  # the one setting that has another name there
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def write_pretrained(folder: Path, settings: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer. state: like read_weights'."""
    folder.mkdir(parents=True, exist_ok=True)
    eot = EOT if settings["vocab_size"] == VOCAB_SIZE else None  # None: another vocabulary
    config = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    config |= {"n_ctx": settings["block_size"], "bos_token_id": eot, "eos_token_id": eot}
    config |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} | GPT2_MATHS
    config |= {THEIR_NAMES.get(name, name): value for name, value in settings.items()}
    files.write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if eot:  # the tokenizer's files are copied: transformers takes seconds to import
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        tokenizer = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": settings["block_size"]}
        text = json.dumps(tokenizer | special, indent=2) + "\n"
        files.write_text(folder / "tokenizer_config.json", text)
        for ours, theirs in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
            files.write_text(folder / theirs, bpe_files()[ours].read_text(encoding="utf-8"))
    weights = {}
    for name, tensor in state.items():
        if CONV1D.search(name):
            tensor = tensor.t()
        weights[f"transformer.{name}"] = tensor.cpu().contiguous()
    with files.atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(weights, partial, metadata={"format": "pt"})
        # safetensors creates it with mode 0600
        partial.chmod((folder / "config.json").stat().st_mode)

"""GPT-2 checkpoints of build-nanogpt (log/model_19072.pt) and nanoGPT (out/ckpt.pt).

Both pad the vocabulary to 50,304 rows, of which GPT-2's 50,257 are kept. nanoGPT may leave out the
biases, which are then zero, and computes the exact GELU instead of the tanh approximation."""

import functools
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.command_line import note
from support.errors_and_signals import UserError, first_line
from support.tokenizer import VOCAB_SIZE

PADDED = 50_304


class PeerConfig:
    """A stand-in for build-nanogpt's GPTConfig, which its checkpoints pickle."""


@functools.lru_cache(maxsize=1)
def read_peer(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (fields of a GPTConfig, {name in our GPT: tensor}) of a .pt file.

    Raises UserError if it is damaged or not a GPT-2."""
    try:
        with torch.serialization.safe_globals([(PeerConfig, "__main__.GPTConfig")]):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = {
            name.removeprefix("_orig_mod.").removeprefix("transformer."): tensor
            for name, tensor in saved["model"].items()
        }
        config = saved["model_args"] if "model_args" in saved else vars(saved["config"])
        names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
        fields = {name: config[name] for name in names}
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: damaged, or not a checkpoint ({first_line(error)})") from None
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a checkpoint of build-nanogpt or nanoGPT") from None
    if fields["vocab_size"] not in (VOCAB_SIZE, PADDED):
        problem = f"its {fields['vocab_size']} tokens are not GPT-2's {VOCAB_SIZE:,}"
        raise UserError(f"{path}: {problem}, so there is no tokenizer for it here")
    fields["vocab_size"] = VOCAB_SIZE
    tensors.pop("lm_head.weight")  # tied to wte
    tensors = {name: t for name, t in tensors.items() if not name.endswith(".attn.bias")}  # masks
    tensors["wte.weight"] = tensors["wte.weight"][:VOCAB_SIZE]
    for name, weight in list(tensors.items()):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module not in ("wte", "wpe"):
            tensors.setdefault(f"{module}.bias", torch.zeros(len(weight)))
    if "model_args" in saved:
        # Measured on Shakespeare, after 200 steps of nanoGPT's train.py.
        note(
            f"{path}: nanoGPT's exact GELU becomes GPT-2's tanh approximation, which changed the "
            "validation loss of a model of 3.4 million parameters by 2e-5 nats per token"
        )
    return fields, tensors

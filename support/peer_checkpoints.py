"""GPT-2 checkpoints of build-nanogpt (log/model_19072.pt) and nanoGPT (out/ckpt.pt).

Both pad the vocabulary to 50,304 rows, of which GPT-2's 50,257 are kept. nanoGPT may leave out the
biases, which are then zero, and computes the exact GELU instead of the tanh approximation."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.command_line import note
from support.errors_and_signals import UserError, first_line
from support.tokenizer import VOCAB_SIZE

PADDED = 50_304
FIELDS = ("block_size", "n_layer", "n_head", "n_embd")


class PeerConfig:
    """A stand-in for build-nanogpt's GPTConfig, which its checkpoints pickle."""


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of a .pt file, with memory-mapped tensors, and its model's settings.

    Raises UserError if it is damaged, or not a checkpoint of one of the two."""
    try:
        with torch.serialization.safe_globals([(PeerConfig, "__main__.GPTConfig")]):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        config = saved["model_args"] if "model_args" in saved else vars(saved["config"])
        missing = {"vocab_size", *FIELDS} - config.keys()
        if missing or not any(name.endswith("wte.weight") for name in saved["model"]):
            raise KeyError
        return saved, config
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: damaged, or not a checkpoint ({first_line(error)})") from None
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not a checkpoint of build-nanogpt or nanoGPT") from None


def read_peer_fields(path: Path) -> dict[str, int]:
    """Return the fields of a GPTConfig. Raises UserError if the tokens are not GPT-2's."""
    _, config = read_checkpoint(path)
    if config["vocab_size"] not in (VOCAB_SIZE, PADDED):
        problem = f"its {config['vocab_size']} tokens are not GPT-2's {VOCAB_SIZE:,}"
        raise UserError(f"{path}: {problem}, so there is no tokenizer for it here")
    return {name: config[name] for name in FIELDS} | {"vocab_size": VOCAB_SIZE}


def read_peer_tensors(path: Path) -> dict[str, Tensor]:
    """Return {name in our GPT: tensor}."""
    saved, _ = read_checkpoint(path)
    tensors = {}
    for name, tensor in saved["model"].items():
        if not name.endswith(".attn.bias"):  # the causal masks
            tensors[name.removeprefix("_orig_mod.").removeprefix("transformer.")] = tensor
    head = tensors.pop("lm_head.weight", tensors["wte.weight"])
    if not torch.equal(head, tensors["wte.weight"]):
        raise UserError(f"{path}: its output head is not tied to wte, as it is in GPT-2")
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
    return tensors

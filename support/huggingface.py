"""GPT-2 folders in Hugging Face's format: found on the hub, read and written.

They differ from ours in two ways: names begin with `transformer.` (those of OpenAI's own uploads don't), and the linear
layers are Conv1D, whose weights are (in, out), the transpose of ours. A field that a fork adds to GPTConfig is kept in
config.json under its own name.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from support.cli import InputError, first_line
from support.files import atomic_write
from support.rundir import list_checkpoints
from support.tokenizer import EOT, VOCAB_SIZE, save_tokenizer

# GPT-2 in Hugging Face's terms; a model that differs in one of these computes something else.
GPT2_MATHS = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
CONFIG_NAMES = {"block_size": "n_positions"} | {n: n for n in ("vocab_size", "n_layer", "n_head", "n_embd")}
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # stored (in, out) by Hugging Face


def model_folder(name: str | Path) -> Path:
    """`name` if it is a folder; otherwise the hub's model of that name, fetched once. Raises InputError."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its retries are told in many lines, its failure below in one
    try:
        folder = Path(snapshot_download(str(name), allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(str(name), allow_patterns=["*.bin"]))
        return folder
    except Exception as error:  # the Hub's, its HTTP library's, the socket's: they share no base
        raise InputError(f"{name}: no such folder, nor does the Hub give it ({first_line(error)}); without a network, "
                         "name a folder that holds the model") from None


def find_model(name: str) -> Path:
    """The newest checkpoint of a log folder, or the model that `name` names. Raises InputError."""
    folder = model_folder(name)
    if (folder / "config.json").exists():
        return folder
    if newest := list_checkpoints(folder)[-1:]:
        return newest[0]
    raise InputError(f"{name}: neither a model (config.json) nor a run with checkpoints (step_*)")


def read_pretrained(folder: Path, fields: Iterable[str] = CONFIG_NAMES) -> tuple[dict[str, Any], dict]:
    """The GPT-2 in `folder`: GPTConfig's fields, and float32 parameters under their names in train_gpt2.py.

    fields: the names of GPTConfig's; one that GPT-2 does not have is read if config.json has it. Raises InputError when
    the folder holds no GPT-2, or a damaged one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{folder}: no model here (config.json is missing or not JSON)") from None
    extra_fields = set(fields) - CONFIG_NAMES.keys()
    for key, expected in GPT2_MATHS.items():
        if key in extra_fields:  # a fork's own mathematics
            continue
        value = raw.get(key, expected if key != "model_type" else None)
        if value != expected and not (key == "n_inner" and value == 4 * raw.get("n_embd", 0)):
            raise InputError(f"{folder}: not a GPT-2: its config.json has {key} = {value!r}, GPT-2 has {expected!r}")
    try:
        config = {ours: raw[theirs] for ours, theirs in CONFIG_NAMES.items()}
        config |= {name: raw[name] for name in extra_fields if name in raw}
    except KeyError as error:
        raise InputError(f"{folder}: config.json lacks {error}") from None

    state = {}
    for path in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        try:
            part = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        except (SafetensorError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise InputError(f"{path}: damaged or not a weights file ({first_line(error)})") from None
        for name, t in part.items():
            name = name.removeprefix("transformer.")
            if not name.endswith((".attn.bias", ".attn.masked_bias")):  # masks
                # Copied: safetensors maps its file, and a mapped file can't be removed on NFS or Windows while the run
                # lasts. One by one, so that no second copy of all is ever there.
                t = t.t() if CONV1D.search(name) else t
                state[name] = t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not state:
        raise InputError(f"{folder}: no weights here (model.safetensors)")
    head = state.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in state and not torch.equal(head, state["wte.weight"]):
        raise InputError(f"{folder}: not a GPT-2: its head is not tied to its token embedding")
    return config, state


def to_hub(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters under Hugging Face's names and in its layout, as views of ours."""
    return {f"transformer.{name}": t.t() if CONV1D.search(name) else t for name, t in state.items()}


def write_pretrained(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes config.json from GPTConfig's fields, model.safetensors from to_hub's `tensors` and, for GPT-2's
    vocabulary, the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    with_tokenizer = config["vocab_size"] == VOCAB_SIZE
    raw = GPT2_MATHS | {
        "architectures": ["GPT2LMHeadModel"],
        **{theirs: config[ours] for ours, theirs in CONFIG_NAMES.items()},
        "n_ctx": config["block_size"],
        "attn_pdrop": 0.0,  # trained without dropout
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": EOT if with_tokenizer else None,
        "eos_token_id": EOT if with_tokenizer else None,
        "dtype": "float32",
        **{name: value for name, value in config.items() if name not in CONFIG_NAMES},
    }
    with atomic_write(folder / "config.json", "w") as file:
        file.write(json.dumps(raw, indent=2) + "\n")
    save_tensors(folder / "model.safetensors", tensors)
    if with_tokenizer:
        save_tokenizer(folder, config["block_size"])


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """What safetensors.torch.save_file writes, in float32: a header of JSON, its length before it, then the values.

    A tensor at a time goes to the host and in order; the library wants all of them so at once. Its older versions then
    make one more copy of all.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + 4 * tensors[name].numel()
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with atomic_write(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in sorted(tensors):
            file.write(tensors[name].detach().cpu().float().contiguous().numpy().astype("<f4", copy=False))

"""Checkpoints: step_*/ folders with a Hugging Face GPT-2, training_state.pt and SHA256SUMS.

They appear whole or not at all. Later damage is detected by the checksums."""

import contextlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from support import forks
from support.command_line import warn
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import atomic_path, remove_folder, sha256

if TYPE_CHECKING:
    from train_gpt2 import GPT

REQUIRED = {"training_state.pt", "model.safetensors", "config.json"}


def checkpoint_path(log_dir: Path, step: int) -> Path:
    return log_dir / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(log_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def write_checkpoint(
    folder: Path, save_model: Callable[[Path], None], state: dict[str, Any], card: str
) -> str:
    """Writes a checkpoint atomically. Returns what prevented it (e.g. a full disk), or "".

    save_model(folder) writes the model's files. card: the text of README.md"""
    try:
        with atomic_path(folder) as partial:
            save_model(partial)
            with open(partial / "training_state.pt", "wb") as file:
                torch.save(state, file)
            # What cannot be read again, such as an object of a fork, is an error now.
            read_training_state(partial, mmap=True)
            # As `sha256sum -c` reads it. README.md is not in it: users may edit it.
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
            (partial / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
            (partial / "README.md").write_text(card, encoding="utf-8", errors="replace")
    except (OSError, RuntimeError, SafetensorError) as error:
        # When the disk is full, torch.save may raise a RuntimeError while it handles the OSError.
        if isinstance(error, RuntimeError):
            if not isinstance(error.__context__, OSError):
                raise  # a bug
            error = error.__context__
        return f"{folder}: not written ({first_line(error)})"
    return ""


def find_checkpoint(log_dir: Path) -> Path | None:
    """The newest intact checkpoint; None if there are none at all."""
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint)
            return checkpoint
        except UserError as error:
            warn(f"{error}; trying the previous one")
    if checkpoints:
        problem = f"all {len(checkpoints)} checkpoints are damaged"
        raise UserError(f"{log_dir}: {problem}; use another --log-dir")
    return None


def read_training_state(checkpoint: Path, mmap: bool = False) -> dict[str, Any]:
    """The dictionary that was saved as training_state.pt. Never runs pickled code.

    With mmap the tensors are not read before they are used."""
    path = checkpoint / "training_state.pt"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def newest_settings(log_dir: Path) -> dict[str, Any] | None:
    """What the newest checkpoint has stored, or None without one. Reads no tensors.

    It is not verified, which takes long, but of a damaged one this usually fails, and then the
    previous one counts."""
    for checkpoint in reversed(list_checkpoints(log_dir)):
        with contextlib.suppress(OSError, UnpicklingError, RuntimeError, EOFError, ValueError):
            return read_training_state(checkpoint, mmap=True)
    return None


def optimizer_states(
    optimizers: list[torch.optim.Optimizer], model: nn.Module
) -> list[dict[str, Any]]:
    """The state of each optimizer, its class, and the names of its parameters in their order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        {
            "class": type(optimizer).__name__,
            "parameters": [names[p] for group in optimizer.param_groups for p in group["params"]],
            "state": optimizer.state_dict(),
        }
        for optimizer in optimizers
    ]


def load_optimizers(
    saved: list[dict[str, Any]], optimizers: list[torch.optim.Optimizer], model: nn.Module
) -> None:
    """Loads what optimizer_states() has returned. UserError if these are other optimizers.

    Moments come from the checkpoint. Options, such as betas and weight decay, stay as they are."""
    ours = optimizer_states(optimizers, model)
    same = len(ours) == len(saved) and all(
        new[key] == old[key]
        for new, old in zip(ours, saved, strict=True)
        for key in ("class", "parameters")
    )
    if not same:
        problem = "the checkpoint has other optimizers, or other parameters in them"
        remedy = "--init with its folder and another --log-dir starts a new run from its weights"
        raise UserError(f"--resume: {problem}; {remedy}")
    for optimizer, new, old in zip(optimizers, ours, saved, strict=True):
        groups = new["state"]["param_groups"]
        optimizer.load_state_dict({"state": old["state"]["state"], "param_groups": groups})


def verify_checksums(folder: Path) -> None:
    """UserError unless all files in SHA256SUMS, and the required ones, are unchanged."""
    try:
        lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        damaged = [name for name, digest in sums.items() if sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: incomplete checkpoint ({first_line(error)})") from None
    damaged += sorted(REQUIRED - sums.keys())
    if damaged:
        raise UserError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")


def prune_checkpoints(log_dir: Path, newest: int, keep: int, always: set[int | None]) -> None:
    """Deletes all but the last `keep` up to the step `newest`, and those of the steps `always`.

    With keep = 0 it deletes none. Those after `newest` stay: they are damaged, since the run was
    resumed from before them."""
    if keep == 0:
        return
    steps = [step for step in map(step_of, list_checkpoints(log_dir)) if step <= newest]
    for step in set(steps[:-keep]) - always:
        folder = checkpoint_path(log_dir, step)
        try:
            remove_folder(folder)
        except OSError as error:
            warn(f"{folder}: not removed ({error.strerror})")


CARD = """---
pipeline_tag: text-generation
{library}---
{kind} after {step:,} steps and {tokens:,} tokens of `{data}`, from {init}, trained by `{script}` of
gpt2-repro at commit {commit}: `{command}`

It continues text, does not follow instructions, and may write what is false. A prompt and what it
writes may have {context:,} tokens together.
"""


def model_card(model: "GPT", entry: dict[str, Any], step: int) -> str:
    """A checkpoint's README.md, in the Hub's format. entry: the run's, in run.json."""
    config = entry["config"]
    gpt2 = forks.is_gpt2(model)
    return CARD.format(
        library="library_name: transformers\n" if gpt2 else "",
        kind="A GPT-2" if gpt2 else "A changed GPT-2, which only its own code computes,",
        context=model.config.block_size,
        step=step,
        tokens=step * config["total_batch_size"],
        data=Path(config["data"]).name,
        init=config["init"],
        script=entry.get("script"),
        commit=entry["git_commit"],
        command=shlex.join(["python", *entry["command"]]),
    )

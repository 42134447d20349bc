"""Checkpoints: folders step_*/ with a Hugging Face model, training_state.pt and SHA256SUMS.

A checkpoint is written atomically, and its checksums reveal later damage."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from support.command_line import warn
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import atomic_path, remove_folder, sha256

REQUIRED = {"training_state.pt", "model.safetensors", "config.json"}


def checkpoint_path(log_dir: Path, step: int) -> Path:
    return log_dir / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(log_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


# --------------------------------------------------------------------------------------------------
# Writing


def write_checkpoint(folder: Path, save_model: Callable[[Path], str], state: dict[str, Any]) -> str:
    """Write a checkpoint atomically. Return what went wrong, e.g. a full disk, or "".

    save_model(folder) writes the model's files, and returns the text of README.md."""
    try:
        with atomic_path(folder) as partial:
            card = save_model(partial)
            save_training_state(state, partial / "training_state.pt")
            # README.md has no checksum, since users may edit it.
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
            (partial / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
            (partial / "README.md").write_text(card, encoding="utf-8", errors="replace")
    except (OSError, SafetensorError) as error:
        return f"{folder}: not written ({first_line(error)})"
    return ""


def save_training_state(state: dict[str, Any], path: Path) -> None:
    """Save `state` with torch.save(), and check that it can be loaded again.

    Raises OSError if the disk is full, and UnpicklingError if the state holds a type that
    weights_only=True does not load."""
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        # torch.save may turn an OSError into a RuntimeError.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    read_training_state(path.parent, mmap=True)  # raises UnpicklingError if it cannot be loaded


def delete_checkpoints(
    log_dir: Path, newest: int | None, count: int, keep: set[int | None]
) -> None:
    """Delete the checkpoints up to step `newest`, except the last `count` and those in `keep`.

    `keep` contains steps. count=0 keeps all. Checkpoints after `newest` are left alone: they are
    damaged, and the run overwrites them when it reaches their steps again."""
    if count == 0 or newest is None:
        return
    steps = [step for step in map(step_of, list_checkpoints(log_dir)) if step <= newest]
    for step in set(steps[:-count]) - keep:
        folder = checkpoint_path(log_dir, step)
        try:
            remove_folder(folder)
        except OSError as error:
            warn(f"{folder}: not removed ({error.strerror})")


# --------------------------------------------------------------------------------------------------
# Reading


def newest_intact(log_dir: Path, ignore: str = "") -> Path | None:
    """Return the newest intact checkpoint, or None if the folder holds no checkpoints.

    The file `ignore` may be damaged or missing. Raises UserError if all checkpoints are damaged."""
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint, ignore)
            return checkpoint
        except UserError as error:
            warn(f"{error}; skipping it")
    if checkpoints:
        problem = f"no intact checkpoint ({len(checkpoints)} damaged)"
        raise UserError(f"{log_dir}: {problem}; use another folder")
    return None


def verify_checksums(folder: Path, ignore: str) -> None:
    """Raise UserError if a file of a checkpoint is missing or does not match its checksum."""
    try:
        lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        sums.pop(ignore, None)
        damaged = [name for name, digest in sums.items() if sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: incomplete checkpoint ({first_line(error)})") from None
    damaged += sorted(REQUIRED - {ignore} - sums.keys())  # SHA256SUMS may be truncated
    if damaged:
        raise UserError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")


def read_training_state(checkpoint: Path, mmap: bool = False) -> dict[str, Any]:
    """Load training_state.pt, without running pickled code.

    With `mmap`, tensors are memory-mapped, so they are read from disk only when used."""
    path = checkpoint / "training_state.pt"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


# --------------------------------------------------------------------------------------------------
# Optimizer state


def optimizer_states(
    optimizers: list[torch.optim.Optimizer], model: nn.Module
) -> list[dict[str, Any]]:
    """Return the class, parameter names (in order) and state_dict of each optimizer."""
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
    """Load the moments in `saved`, the result of optimizer_states(), into `optimizers`.

    Options such as betas and weight decay keep their current values. Raises UserError if an
    optimizer's class or parameters differ from the saved ones."""
    current = optimizer_states(optimizers, model)
    layout = [(state["class"], state["parameters"]) for state in current]
    if layout != [(state["class"], state["parameters"]) for state in saved]:
        problem = "the checkpoint's optimizers or their parameters differ from this script's"
        remedy = "to start a new run from its weights, use --init with the checkpoint's folder"
        raise UserError(f"--resume: {problem}; {remedy}")
    for optimizer, new, old in zip(optimizers, current, saved, strict=True):
        # In a state_dict, "state" holds the moments and "param_groups" the options.
        moments = old["state"]["state"]
        options = new["state"]["param_groups"]
        optimizer.load_state_dict({"state": moments, "param_groups": options})

"""Checkpoints: step_*/ folders with a Hugging Face GPT-2, training_state.pt and SHA256SUMS.

They appear whole or not at all; damage is detected by the checksums. Bad files raise UserError."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from support.cli import warn
from support.errors import UserError, first_line
from support.files import atomic_path, remove_folder, sha256

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
            torch.save(state, partial / "training_state.pt")
            # As `sha256sum -c` reads it. README.md is not in it: users may edit it.
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
            (partial / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
            (partial / "README.md").write_text(card, encoding="utf-8", errors="replace")
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save reports a full disk as a RuntimeError of its writer; others are bugs.
        writer_failed = re.search("inline_container|StreamWriter", str(error))
        if type(error) is RuntimeError and not writer_failed:
            raise
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


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """The dictionary that was saved as training_state.pt. Never runs pickled code."""
    path = checkpoint / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or "step" not in state:
        raise UserError(f"{path}: not the state of a training run")
    return state


SavedOptimizer = tuple[str, dict[str, Any]]  # its class's name, its state_dict and "param_names"


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Those of each group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]


def save_optimizers(
    optimizers: list[torch.optim.Optimizer], model: nn.Module
) -> list[SavedOptimizer]:
    saved = []
    for optimizer in optimizers:
        names = {"param_names": parameter_names(optimizer, model)}
        saved.append((type(optimizer).__name__, optimizer.state_dict() | names))
    return saved


def check_saving(optimizers: list[torch.optim.Optimizer]) -> None:
    """UserError if a checkpoint could not hold what the optimizers keep, besides tensors."""
    for optimizer in optimizers:
        state = tree_map_only(Tensor, lambda tensor: None, optimizer.state_dict())
        file = io.BytesIO()
        try:
            torch.save(state, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:  # of pickle, or of a class's own
            name, problem = type(optimizer).__name__, first_line(error)
            remedy = "keep tensors and numbers in it, or train with --save-every 0"
            raise UserError(f"the state of {name} cannot be saved ({problem}); {remedy}") from None


def load_optimizers(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, saved: list[SavedOptimizer]
) -> None:
    """Restores optimizers from what save_optimizers() returned."""
    names = [type(optimizer).__name__ for optimizer in optimizers]
    before = [name for name, _ in saved]
    if names != before:
        change = f"{' and '.join(names)}, the checkpoint {' and '.join(before)}"
        raise UserError(f"--resume: this code has {change}; use the code that saved it")
    for optimizer, (name, state) in zip(optimizers, saved, strict=True):
        # torch goes by their order alone: the momentum of one would become another's.
        param_names = state.pop("param_names", None)  # None: saved by an older version
        if param_names not in (None, parameter_names(optimizer, model)):
            problem = f"{name} has other parameters, or another order of them, than the checkpoint"
            raise UserError(f"--resume: this code's {problem}; use the code that saved it")
        optimizer.load_state_dict(state)
        # torch has given floats the weights' precision; a fork's may have had another.
        in_order = [p for group in optimizer.param_groups for p in group["params"]]
        for i, values in state["state"].items():
            loaded = optimizer.state[in_order[i]]
            for key, value in values.items():
                if isinstance(value, Tensor):
                    loaded[key] = loaded[key].to(value.dtype)


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


def prune_checkpoints(
    log_dir: Path, step: int, best: int | None, keep: int, keep_every: int
) -> None:
    """Deletes all but the newest `keep` (0: none), the best, and multiples of keep_every steps.

    Those after `step` stay: they are damaged, since the run was resumed from before them."""
    if keep == 0:
        return
    steps = [found for found in map(step_of, list_checkpoints(log_dir)) if found <= step]
    for old in steps[:-keep]:
        if old == best or (keep_every and old % keep_every == 0):
            continue
        folder = checkpoint_path(log_dir, old)
        try:
            remove_folder(folder)
        except OSError as error:
            warn(f"{folder}: not removed ({error.strerror})")

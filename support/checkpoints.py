"""Checkpoints: step_*/ folders with a Hugging Face GPT-2, training_state.pt and SHA256SUMS.

They appear whole or not at all; damage is detected by the checksums. Bad files raise UserError."""

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from support.cli import warn
from support.errors import UserError, first_line
from support.files import atomic_path, remove_folder, sha256, write_text
from support.run_log import data_source

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
    folder: Path, save_model: Callable[[Path], None], state: dict[str, Any], run: dict[str, Any]
) -> str | None:
    """Writes a checkpoint atomically. Returns what prevented it (e.g. a full disk), or None.

    save_model(folder) writes the model's files. run: the run's entry in run.json"""
    try:
        with atomic_path(folder) as partial:
            save_model(partial)
            torch.save(state, partial / "training_state.pt")
            write_card(partial, run, state["step"])
            write_checksums(partial)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save reports a full disk as a RuntimeError of its writer; others are bugs.
        writer_failed = re.search("inline_container|StreamWriter", str(error))
        if type(error) is RuntimeError and not writer_failed:
            raise
        return f"{folder}: not written ({first_line(error)})"
    return None


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS over all files but README.md, as `sha256sum -c` reads it."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != "README.md"]
    sums = [f"{sha256(path)}  {path.name}\n" for path in paths]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def write_card(folder: Path, run: dict[str, Any], step: int, loss: float = math.nan) -> None:
    """Writes README.md, which a checkpoint can do without: errors are ignored.

    run: the run's entry in run.json. loss: the final validation loss, if it is known."""
    with contextlib.suppress(Exception):
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        card = model_card(run, step, loss, gpt2=settings["model_type"] == "gpt2")
        card = card.encode(errors="replace").decode()  # arguments may be bytes, not UTF-8
        write_text(folder / "README.md", card)


def model_card(run: dict[str, Any], step: int, loss: float, gpt2: bool) -> str:
    """A checkpoint's README.md, in the Hub's format. gpt2: False for a fork that is none."""
    from huggingface_hub import EvalResult, ModelCardData

    config = run["config"]
    data = Path(config["data"])
    source = data_source(data)
    result = EvalResult(
        task_type="text-generation",
        dataset_type=source or data.name,
        dataset_name=data.name,
        metric_type="loss",
        metric_name="validation loss, nats per token",
        metric_value=round(loss, 4),
    )
    metadata = ModelCardData(
        license="mit",
        library_name="transformers" if gpt2 else None,
        pipeline_tag="text-generation",
        tags=["gpt2"] if gpt2 else None,
        datasets=[source] if "/" in source else None,  # a name on the Hub
        model_name="gpt2-repro",
        eval_results=[result] if math.isfinite(loss) else None,
    )
    command = shlex.join(["python", *run["command"]])
    kind = "A GPT-2" if gpt2 else "A changed GPT-2, which only its own code loads,"
    return f"""---
{metadata.to_yaml()}
---
{kind} after {step:,} steps of {config["total_batch_size"]:,} tokens of
`{data.name}`, from {config["init"]}, trained by gpt2-repro at commit
{run["git_commit"]}: `{command}`

It continues text, does not follow instructions, and may write what is false.
"""


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


def move_aside(log_dir: Path) -> Path | None:
    """Moves an earlier run's checkpoints to earlier_N/. Returns that folder, or None."""
    checkpoints = list_checkpoints(log_dir)
    if not checkpoints:
        return None
    number = 1
    while (log_dir / f"earlier_{number}").exists():
        number += 1
    aside = log_dir / f"earlier_{number}"
    aside.mkdir()
    for folder in checkpoints:
        folder.rename(aside / folder.name)
    return aside


def find_checkpoint(log_dir: Path) -> Path | None:
    """The newest intact checkpoint; None if there are none at all."""
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint)
            read_training_state(checkpoint)
            return checkpoint
        except UserError as error:
            warn(f"{error}; trying the previous one")
    if checkpoints:
        problem = f"all {len(checkpoints)} checkpoints are damaged"
        raise UserError(f"{log_dir}: {problem}; use another --log-dir")
    return None


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """The dictionary that was saved as training_state.pt. Never runs pickled code.

    The tensors are memory-mapped: copy and drop them, since NFS and Windows cannot remove a mapped
    file."""
    path = checkpoint / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != 1:
        raise UserError(f"{path}: not a training state of format 1")
    return state


def verify_checksums(folder: Path) -> None:
    """UserError unless all files in SHA256SUMS, and the required ones, are unchanged."""
    try:
        lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        sums.pop("README.md", None)  # in earlier versions; users may edit it
        damaged = [name for name, digest in sums.items() if sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: incomplete checkpoint ({first_line(error)})") from None
    damaged += sorted(REQUIRED - sums.keys())
    if damaged:
        raise UserError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")

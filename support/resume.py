"""What --resume reads: which run a folder holds, its newest intact checkpoint, and its log.

Bad files raise UserError."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from support.cli import UserError, first_line, warn
from support.files import sha256, write_text
from support.run_folder import last_start, list_checkpoints, log_lines, run_entries


def find_start(
    log_dir: Path, asked: bool, job: str, differ: Callable[[dict[str, Any]], list[str]]
) -> tuple[bool, Path | None, dict[str, Any] | None]:
    """(whether the last run continues, its newest intact checkpoint, the state in it)

    asked: by --resume; otherwise it continues if it was begun by the same torchrun `job`.
    differ(config): how a run of that configuration differs from this one."""
    entries = run_entries(log_dir)
    restarted = bool(job and entries) and entries[-1].get("job") == job
    if not (asked or restarted):
        return False, None, None
    checkpoint, saved = find_checkpoint(log_dir)
    if checkpoint:
        return True, checkpoint, saved
    # A run that was stopped before its first checkpoint restarts and overwrites its log.
    return bool(entries) and not differ(entries[-1]["config"]), None, None


def is_finished(log_dir: Path, step: int, max_steps: int) -> bool:
    """Whether a run has all its steps, and its last evaluation."""
    entries = run_entries(log_dir) or [{}]
    return step > max_steps or step == max_steps == entries[-1].get("finished")


def trim_log(log_dir: Path, step: int) -> dict[str, Any]:
    """Removes the last run's lines from `step` on, all but the evaluations at that step.

    -> for RunLog: the number of lines before that run, and the streams of those evaluations"""
    path, entries = log_dir / "log.txt", run_entries(log_dir) or [{}]
    lines, evaluated = log_lines(path), []
    begin = entries[-1].get("log_lines", last_start(lines))
    stay = lines[:begin]
    for line in lines[begin:]:
        if line[0] < step:
            stay.append(line)
        elif line[0] == step and line[1] in ("val", "bpb", "hella"):
            stay.append(line)
            evaluated.append(line[1])
    write_text(path, "".join(" ".join(map(str, line)) + "\n" for line in stay))
    return {"log_lines": begin, "evaluated": evaluated}


def find_checkpoint(log_dir: Path) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The newest intact checkpoint and its training state; (None, None) if there are none."""
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint, {"training_state.pt", "model.safetensors", "config.json"})
            return checkpoint, read_training_state(checkpoint)
        except UserError as error:
            warn(f"{error}; trying the previous one")
    if checkpoints:
        problem = f"all {len(checkpoints)} checkpoints are damaged"
        raise UserError(f"{log_dir}: {problem}; use another --log-dir")
    return None, None


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """TrainState.state_dict() as saved. Never runs pickled code.

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


def verify_checksums(folder: Path, required: set[str]) -> None:
    """Checks that all files in SHA256SUMS, among them the required ones, are unchanged."""
    try:
        lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        damaged = [name for name, digest in sums.items() if sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: incomplete checkpoint ({first_line(error)})") from None
    damaged += sorted(required - sums.keys())
    if damaged:
        raise UserError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")

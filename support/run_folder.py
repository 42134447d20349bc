"""A run's folder: log.txt, run.json and checkpoints. Bad files raise UserError."""

import contextlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from support.cli import UserError, first_line, shown
from support.files import remove_folder, sha256, write_text

ROOT = Path(__file__).parents[1]

# --------------------------------------------------------------------------------------------------
# run.json: what each start recorded


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] without one."""
    path = Path(log_dir) / "run.json"
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path}: not JSON; move it away") from None


def describe_start() -> dict[str, Any]:
    """The time, command, commit (with a + if files have changed since) and versions of a start."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=40"]
    commit = None
    with contextlib.suppress(OSError):  # no git on this machine
        done = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True)
        commit = done.stdout.strip() or None
    versions = {name: version(name) for name in ("torch", "numpy", "tiktoken", "safetensors")}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],  # don't leak local paths
        "git_commit": commit,
        "versions": versions | {"python": sys.version.split()[0]},
    }


def open_log(
    log_dir: Path, resumed: bool, first_step: int | None, entry: dict[str, Any]
) -> Callable[..., None]:
    """Prepares a run's folder and adds `entry` to run.json. -> log(step, stream=value, …)

    What a killed process left half written is removed; unless `resumed`, an earlier run's
    checkpoints are moved. The last run's lines from first_step on are removed, since they will be
    written again; with None, a new run begins."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for remainder in log_dir.glob(".*.partial"):
        if remainder.is_dir():
            shutil.rmtree(remainder, ignore_errors=True)
        else:
            remainder.unlink()
    if not resumed:
        move_checkpoints(log_dir)
    entries = [*run_entries(log_dir), describe_start() | entry]
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")
    path, config = log_dir / "log.txt", entry["config"]
    if path.exists():
        lines = log_lines(path)
        if first_step is not None:
            begin = last_start(lines)
            lines[begin:] = [line for line in lines[begin:] if int(line.split()[0]) < first_step]
        write_text(path, "".join(line + "\n" for line in lines))
    file = open(path, "a", encoding="utf-8", newline="\n", buffering=1)
    trackers = []
    if config["tensorboard"] or config["wandb"]:
        from support.trackers import start_trackers

        start = first_step or 0
        trackers = start_trackers(log_dir, start, config["tensorboard"], config["wandb"])

    def log(step: int, **values: float) -> None:
        lines = [f"{step} {name} {value:{FORMATS[name]}}\n" for name, value in values.items()]
        file.write("".join(lines))
        for track in trackers:
            track(step, values)

    return log


def move_checkpoints(log_dir: Path) -> None:
    """Moves the checkpoints of an earlier run to earlier_1/, or the next number that is free."""
    checkpoints = list_checkpoints(log_dir)
    if not checkpoints:
        return
    number = 1
    while (log_dir / f"earlier_{number}").exists():
        number += 1
    aside = log_dir / f"earlier_{number}"
    aside.mkdir()
    for folder in checkpoints:
        folder.rename(aside / folder.name)
    problem = "has checkpoints of an earlier run (--resume continues one)"
    print(f"{log_dir}/ {problem}: moved to {aside}/")


# --------------------------------------------------------------------------------------------------
# log.txt: `step stream value` per line

# fmt: off
FORMATS = {
    "train": ".6f", "val": ".6f", "hella": ".4f", "lr": ".6e", "norm": ".6f", "tok_per_sec": ".1f",
    "mfu": ".4f", "ms": ".2f",
}
# fmt: on


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of the last run in a log folder: {"train": (steps, values), "val": …}."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    lines = log_lines(Path(log_dir) / "log.txt")
    for line in lines[last_start(lines) :]:
        step, stream, value = line.split()
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(int(step))
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[str]:
    """The complete lines of a log; a kill may have cut the last one short."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in lines if re.fullmatch(r"\d+ \w+ \S+", line)]


def last_start(lines: list[str]) -> int:
    """The index of the last run's first line: steps only fall where a run starts."""
    steps = [int(line.split()[0]) for line in lines]
    return max((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), default=0)


# --------------------------------------------------------------------------------------------------
# Checkpoints: Hugging Face folders that also hold training_state.pt and SHA256SUMS


def list_checkpoints(log_dir: Path) -> list[Path]:
    """A run's checkpoint folders, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def best_checkpoint(log_dir: Path) -> tuple[int | None, float]:
    """(step, validation loss) of the one with the lowest; (None, inf) if none was evaluated."""
    losses = dict(zip(*read_log(log_dir).get("val", ([], [])), strict=True))
    best, lowest = None, math.inf
    for step in map(step_of, list_checkpoints(log_dir)):
        if step in losses and losses[step] <= lowest:
            best, lowest = step, losses[step]
    return best, lowest


def find_checkpoint(log_dir: Path) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The newest intact checkpoint and its training state; (None, None) if there are none."""
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint, {"training_state.pt", "model.safetensors", "config.json"})
            return checkpoint, read_training_state(checkpoint)
        except UserError as error:
            print(f"warning: {error}; trying the previous one", file=sys.stderr, flush=True)
    if checkpoints:
        problem = f"all {len(checkpoints)} checkpoints are damaged"
        raise UserError(f"{log_dir}: {problem}; use another --log-dir")
    return None, None


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """TrainState.state_dict() as saved. Never runs pickled code.

    The tensors are memory-mapped: copy and drop them, since NFS and Windows cannot remove a mapped
    file."""
    import torch  # here, since plots.py need not wait for it

    path = checkpoint / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != 1:
        raise UserError(f"{path}: not a training state of format 1")
    return state


def prune_checkpoints(log_dir: Path, step: int, keep: int, keep_every: int) -> None:
    """Deletes all but the newest `keep` (0: none), the best, and multiples of keep_every steps.

    Checkpoints of later steps than `step`, if any, are damaged: the run was resumed from before."""
    steps = [found for found in map(step_of, list_checkpoints(log_dir)) if found <= step]
    best, _ = best_checkpoint(log_dir)
    if keep:
        for old in steps[:-keep]:
            if old != best and not (keep_every and old % keep_every == 0):
                remove_folder(log_dir / f"step_{old:06d}")


def draw_curves(log_dir: Path, wait: bool) -> None:
    """Draws curves.png in a process of its own, for which only the end of a run waits."""
    command = [sys.executable, "-m", "support.plots", log_dir.resolve()]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    if wait:
        process.wait()


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS over the files of a folder, as `sha256sum -c` reads it."""
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


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


def model_card(log_dir: Path, step: int) -> str:
    """README.md of a checkpoint, in the Hub's format."""
    entry = run_entries(log_dir)[-1]
    config, command = entry["config"], shlex.join(["python", *entry["command"]])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
A GPT-2 after {step:,} steps of {config["total_batch_size"]:,} tokens of
`{Path(config["data"]).name}`, from {config["init"]}, trained by gpt2-repro
at commit {entry["git_commit"]}: `{command}`

It continues text; it was not trained to follow instructions, and what it writes may be false.
"""

"""A run's folder: log.txt, run.json and checkpoints. Bad files raise UserError."""

import contextlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.cli import UserError, first_line, print0, shown, warn
from support.files import atomic_path, fsync, remove, remove_folder, sha256, write_text

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def lock(log_dir: Path, rank: int) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it."""
    if rank > 0:
        yield
        return
    new = not log_dir.exists()
    log_dir.mkdir(parents=True, exist_ok=True)
    if os.name == "nt":  # it has no flock
        yield
        return
    import fcntl

    folder = os.open(log_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{log_dir}: another run uses it; choose another --log-dir") from None
        except OSError:  # a network mount without locks
            pass
        yield
    finally:
        os.close(folder)
        if new:
            with contextlib.suppress(OSError):  # it is not empty
                log_dir.rmdir()


# --------------------------------------------------------------------------------------------------
# run.json: what each start recorded


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] without one."""
    path = Path(log_dir) / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        raise UserError(f"{path}: not JSON; move it away") from None


def git(*command: str) -> str:
    """The output of a git command in this repository; "" without git."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True)
        return done.stdout.strip()
    return ""


# --------------------------------------------------------------------------------------------------
# log.txt: `step stream value` per line

# Others have the format .6f.
FORMATS = {"hella": ".4f", "lr": ".6e", "tok_per_sec": ".1f", "mfu": ".4f", "ms": ".2f"}


class RunLog:
    """log.txt, run.json, checkpoints, TensorBoard, Weights & Biases: log(step, stream=value, …)

    A full disk does not stop it: lines are kept until they can be written."""

    def __init__(self, log_dir: Path, entry: dict[str, Any]) -> None:
        """Adds `entry` to run.json, and moves an earlier run's checkpoints away.

        Not if the last run continues: then entry also has what support.resume.trim_log returns."""
        self.path, self.pending, self.warned = log_dir / "log.txt", b"", False
        self.start, self.evaluated = entry["step"], entry.pop("evaluated", [])
        self.entries, lines = [], []
        if any(log_dir.iterdir()):
            tidy(log_dir, moves_checkpoints="log_lines" not in entry)
            self.entries, lines = run_entries(log_dir), log_lines(self.path)
        config = entry["config"]
        for name, value in config.items():
            config[name] = shown(value) if isinstance(value, str) else value  # no local paths
        # with a + if files have changed
        commit = git("describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*")
        versions = {name: version(name) for name in ("torch", "numpy", "tiktoken", "safetensors")}
        start = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": [shown(word) for word in sys.argv],
            "git_commit": commit or None,
            "versions": versions | {"python": sys.version.split()[0]},
            "log_lines": len(lines),
        }
        self.entries.append(start | entry)
        script, copy = ROOT / "train_gpt2.py", log_dir / "train_gpt2.py"
        copy.unlink(missing_ok=True)
        if git("status", "--porcelain", script.name):  # it differs from its commit
            write_text(copy, script.read_text(encoding="utf-8"))
        write_text(log_dir / "run.json", json.dumps(self.entries, indent=2) + "\n")
        self.trackers = []
        if config["tensorboard"] or config["wandb"]:
            from support.trackers import start_trackers

            self.trackers = start_trackers(log_dir, self.entries, self.start)

    def finish(self, step: int) -> None:
        """Records that the run has made its last evaluation."""
        self.entries[-1]["finished"] = step
        try:
            write_text(self.path.with_name("run.json"), json.dumps(self.entries, indent=2) + "\n")
        except OSError as error:
            warn(f"run.json: the end of the run is not recorded ({error.strerror})")

    def write_checkpoint(self, model: Any, state: dict[str, Any]) -> str | None:
        """Writes step_*/ atomically. -> what prevented it (a full disk, say), or None"""
        import torch
        from safetensors import SafetensorError

        folder = self.path.with_name(f"step_{state['step']:06d}")
        try:
            if self.path.exists():  # it must not be shorter than the checkpoint
                fsync(self.path)
            with atomic_path(folder) as partial:
                model.save_pretrained(partial)
                torch.save(state, partial / "training_state.pt")
                card = model_card(self.entries[-1], state["step"])
                (partial / "README.md").write_text(card, encoding="utf-8")
                write_checksums(partial)
        except (OSError, RuntimeError, SafetensorError) as error:
            writers = re.search("inline_container|StreamWriter", str(error))  # of torch.save
            if type(error) is RuntimeError and not writers:
                raise
            return f"{folder}: not written ({first_line(error)})"
        return None

    def __call__(self, step: int, **values: float) -> None:
        if step == self.start:
            for stream in self.evaluated:
                values.pop(stream, None)
        for stream, value in values.items():
            self.pending += f"{step} {stream} {value:{FORMATS.get(stream, '.6f')}}\n".encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                while self.pending:
                    self.pending = self.pending[file.write(self.pending) :]
        except OSError as error:
            if not self.warned:
                warn(f"{self.path}: {error.strerror}; lines are kept until they can be written")
            self.warned = True
        for track in self.trackers:
            track(step, values)


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of the last run in a log folder: {"train": (steps, values), "val": …}."""
    streams = {}
    lines = log_lines(Path(log_dir) / "log.txt")
    for step, stream, value in lines[last_start(lines) :]:
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(step)
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[tuple[int, str, str]]:
    """(step, stream, value) of the lines; others, one that a kill cut short, say, are skipped."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            step, stream, value = line.split()
            float(value)
            lines.append((int(step), stream, value))
    return lines


def last_start(lines: list[tuple[int, str, str]]) -> int:
    """The index of the last run's first line: steps only fall where a run starts."""
    falls = [i for i in range(1, len(lines)) if lines[i][0] < lines[i - 1][0]]
    return falls[-1] if falls else 0


# --------------------------------------------------------------------------------------------------
# Checkpoints: Hugging Face folders that also hold training_state.pt and SHA256SUMS


def list_checkpoints(log_dir: Path) -> list[Path]:
    """A run's checkpoint folders, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def tidy(log_dir: Path, moves_checkpoints: bool) -> None:
    """Removes what a killed process left half written; moves earlier checkpoints to earlier_N/."""
    for remainder in log_dir.glob(".*.partial"):
        remove(remainder)
    checkpoints, number = list_checkpoints(log_dir), 1
    if not (checkpoints and moves_checkpoints):
        return
    while (log_dir / f"earlier_{number}").exists():
        number += 1
    aside = log_dir / f"earlier_{number}"
    aside.mkdir()
    for folder in checkpoints:
        folder.rename(aside / folder.name)
    print0(f"{log_dir}/: an earlier run's checkpoints moved to {aside}/ (--resume continues a run)")


def best_checkpoint(log_dir: Path) -> tuple[int | None, float]:
    """(step, validation loss) of the one with the lowest; (None, inf) if none was evaluated."""
    losses = dict(zip(*read_log(log_dir).get("val", ([], [])), strict=True))
    best, lowest = None, math.inf
    for step in map(step_of, list_checkpoints(log_dir)):
        if step in losses and losses[step] <= lowest:
            best, lowest = step, losses[step]
    return best, lowest


def prune_checkpoints(log_dir: Path, step: int, keep: int, keep_every: int) -> None:
    """Deletes all but the newest `keep` (0: none), the best, and multiples of keep_every steps.

    Checkpoints of later steps are damaged: the run was resumed from before them."""
    if keep == 0:
        return
    best, _ = best_checkpoint(log_dir)
    steps = [found for found in map(step_of, list_checkpoints(log_dir)) if found <= step]
    for old in steps[:-keep]:
        if old != best and not (keep_every and old % keep_every == 0):
            folder = log_dir / f"step_{old:06d}"
            try:
                remove_folder(folder)
            except OSError as error:
                warn(f"{folder}: not removed ({error.strerror})")


def draw_curves(log_dir: Path, wait: bool) -> None:
    """Draws curves.png in a process of its own, for which only the end of a run waits."""
    command = [sys.executable, "-m", "support.plots", log_dir.resolve()]
    try:
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        if wait:
            process.wait()
    except OSError as error:
        warn(f"{log_dir}/curves.png: not drawn ({error.strerror})")


def print_result(log_dir: Path, step: int, prompt: str) -> None:
    """Prints what a run leaves and how to sample from it."""
    if (log_dir / "curves.png").exists():
        print0(f"curves: {log_dir / 'curves.png'}")
    print0(f"model: {log_dir}/step_{step:06d}/, in Hugging Face format")
    best, loss = best_checkpoint(log_dir)
    if best not in (None, step):
        advice = "the loss rose afterwards: train for fewer steps, or on more text"
        print0(f"best: {log_dir}/step_{best:06d}/, validation loss {loss:.4f}; {advice}")
    command = shlex.join(["python", shown(ROOT / "sample.py"), str(log_dir), prompt])
    print0(f"sample: {command}")


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS over the files of a folder, as `sha256sum -c` reads it."""
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def model_card(entry: dict[str, Any], step: int) -> str:
    """README.md of a checkpoint, in the Hub's format. entry: the run's, of run.json"""
    command, config = shlex.join(["python", *entry["command"]]), entry["config"]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
A GPT-2 after {step:,} steps of {config["total_batch_size"]:,} tokens of
`{Path(config["data"]).name}`, from {config["init"]}, trained by gpt2-repro at commit
{entry["git_commit"]}: `{command}`

It continues text, does not follow instructions, and may write what is false.
"""

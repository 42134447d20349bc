"""A run's folder: log.txt, run.json and checkpoints. Bad files raise UserError."""

import contextlib
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from support.cli import UserError, first_line, shown, warn
from support.files import atomic_path, fsync, remove_folder, sha256, write_text

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def lock(log_dir: Path, rank: int) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; removes it at the end if it is empty."""
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
        with contextlib.suppress(OSError):  # a network mount without locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "another run is using it; choose another --log-dir"
                raise UserError(f"{log_dir}: {problem}") from None
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
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path}: not JSON; move it away") from None


@functools.cache
def git_commit() -> str | None:
    """The full hash, with a + if files have changed since; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=40"]
    with contextlib.suppress(OSError):
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
        return done.stdout.strip() or None
    return None


def torchrun_job() -> str | None:
    """Names the torchrun that started this process, the same after a restart; None without one.

    Its --rdzv-id may be that of earlier jobs; its folder, ID_RANDOM/attempt_N/RANK/, is new."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # empty with --log-dir /dev/null
    if error_file:
        return Path(error_file).parents[2].name
    return os.environ.get("TORCHELASTIC_RUN_ID")


def is_restart(log_dir: Path) -> bool:
    """Whether torchrun has restarted the job whose start was recorded last."""
    entries, restarts = run_entries(log_dir), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return restarts != "0" and bool(entries) and entries[-1].get("job") == torchrun_job()


def is_finished(log_dir: Path, step: int, max_steps: int) -> bool:
    """Whether a run has all its steps, and its last evaluation."""
    entries = run_entries(log_dir) or [{}]
    return step > max_steps or step == max_steps == entries[-1].get("finished")


def mark_finished(log_dir: Path, step: int) -> None:
    """Records that a run has made its last evaluation."""
    try:
        entries = run_entries(log_dir)
        entries[-1]["finished"] = step
        write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")
    except (OSError, UserError, LookupError) as error:
        warn(f"{log_dir}/run.json: end not recorded ({first_line(error)})")


def open_log(
    log_dir: Path, entry: dict[str, Any], checkpoint: Path | None, continues: bool
) -> Callable[..., None]:
    """Adds `entry` to run.json and prepares the folder. -> log(step, stream=value, …)

    What a killed process left half written is removed, and an earlier run's checkpoints are moved,
    unless one of them is resumed. If the last run continues, its lines from entry["step"] on are
    removed, since they will be written again, all but the evaluations at that step."""
    for remainder in log_dir.glob(".*.partial"):
        if remainder.is_dir():
            shutil.rmtree(remainder, ignore_errors=True)
        else:
            remainder.unlink()
    if not checkpoint:
        move_checkpoints(log_dir)
    path, step, config = log_dir / "log.txt", entry["step"], entry["config"]
    for name, value in config.items():
        config[name] = shown(value) if isinstance(value, str) else value  # don't leak local paths
    lines, entries = log_lines(path), run_entries(log_dir)
    begin, done = len(lines), set()
    if continues:
        begin = entries[-1].get("log_lines", last_start(lines)) if entries else last_start(lines)
        earlier = [line for line in lines[begin:] if line[0] < step]
        evaluated = [line for line in lines[begin:] if line[0] == step and line[1] in EVALUATIONS]
        done = {stream for _, stream, _ in evaluated}
        lines[begin:] = earlier + evaluated
    names = ("torch", "numpy", "tiktoken", "safetensors")
    start = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],
        "job": torchrun_job(),
        "git_commit": git_commit(),
        "versions": {name: version(name) for name in names} | {"python": sys.version.split()[0]},
        "log_lines": begin,
    }
    entries.append(start | entry)
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")
    write_text(path, "".join(" ".join(map(str, line)) + "\n" for line in lines))
    file, trackers = LogFile(path), []
    if config["tensorboard"] or config["wandb"]:
        from support.trackers import start_trackers

        trackers = start_trackers(log_dir, entries, step if continues else 0)

    def log(at: int, **values: float) -> None:
        if at == step:  # the log has evaluations that were made before this start
            values = {name: value for name, value in values.items() if name not in done}
        file.write("".join(f"{at} {name} {x:{FORMATS[name]}}\n" for name, x in values.items()))
        for track in trackers:
            track(at, values)

    return log


def move_checkpoints(log_dir: Path) -> None:
    """Moves the checkpoints of an earlier run, if any, to earlier_1/, or the next free number."""
    checkpoints, number = list_checkpoints(log_dir), 1
    if not checkpoints:
        return
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
EVALUATIONS = ("val", "hella")


class LogFile:
    """A log that a full disk does not stop: lines are kept, and written when there is space."""

    def __init__(self, path: Path):
        self.path, self.pending, self.warned = path, b"", False

    def write(self, text: str) -> None:
        self.pending += text.encode()
        try:
            with open(self.path, "ab", buffering=0) as file:
                while self.pending:
                    self.pending = self.pending[file.write(self.pending) :]
        except OSError as error:
            if not self.warned:
                warn(f"{self.path}: {error.strerror}; lines are kept until they can be written")
            self.warned = True


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of the last run in a log folder: {"train": (steps, values), "val": …}."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    lines = log_lines(Path(log_dir) / "log.txt")
    for step, stream, value in lines[last_start(lines) :]:
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(step)
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[tuple[int, str, str]]:
    """(step, stream, value) of the lines; others, one that a kill cut short, say, are skipped."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
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
            warn(f"{error}; trying the previous one")
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


def write_checkpoint(
    log_dir: Path, write_model: Callable[[Path], None], state: dict[str, Any], config: Any
) -> str | None:
    """Writes log_dir/step_*/ atomically. -> what prevented it (a full disk, say), or None

    write_model(folder) writes the model. config: a TrainConfig."""
    import torch
    from safetensors import SafetensorError

    folder = log_dir / f"step_{state['step']:06d}"
    try:
        if (log_dir / "log.txt").exists():  # it must not be shorter than the checkpoint
            fsync(log_dir / "log.txt")
        with atomic_path(folder) as partial:
            write_model(partial)
            torch.save(state, partial / "training_state.pt")
            card = model_card(config, state["step"])
            (partial / "README.md").write_text(card, encoding="utf-8")
            write_checksums(partial)
    except (OSError, RuntimeError, SafetensorError) as error:
        if type(error) is RuntimeError and not re.search(
            "inline_container|StreamWriter", str(error)
        ):
            raise  # a bug
        return f"{folder}: not written ({first_line(error)})"
    return None


def prune_checkpoints(log_dir: Path, step: int, keep: int, keep_every: int) -> None:
    """Deletes all but the newest `keep` (0: none), the best, and multiples of keep_every steps.

    Checkpoints of later steps are damaged: the run was resumed from before them."""
    steps = [found for found in map(step_of, list_checkpoints(log_dir)) if found <= step]
    best, _ = best_checkpoint(log_dir)
    if keep:
        for old in steps[:-keep]:
            if old != best and not (keep_every and old % keep_every == 0):
                try:
                    remove_folder(log_dir / f"step_{old:06d}")
                except OSError as error:
                    warn(f"{log_dir}/step_{old:06d}: not removed ({error.strerror})")


def draw_curves(log_dir: Path, wait: bool) -> None:
    """Draws curves.png in a process of its own, for which only the end of a run waits."""
    command = [sys.executable, "-m", "support.plots", log_dir.resolve()]
    try:
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        if wait:
            process.wait()
    except OSError as error:
        warn(f"{log_dir}/curves.png: not drawn ({error.strerror})")


def describe_result(log_dir: Path, step: int, prompt: str) -> list[str]:
    """What a finished run leaves: lines for the console."""
    lines = [f"model: {log_dir}/step_{step:06d}/, in Hugging Face format"]
    best, loss = best_checkpoint(log_dir)
    if best not in (None, step):
        advice = "the loss rose afterwards: train for fewer steps, or on more text"
        lines.append(f"best: {log_dir}/step_{best:06d}/, validation loss {loss:.4f}; {advice}")
    command = shlex.join(["python", shown(ROOT / "sample.py"), str(log_dir), prompt])
    return [*lines, f"sample: {command}"]


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


def model_card(config: Any, step: int) -> str:
    """README.md of a checkpoint, in the Hub's format. config: a TrainConfig"""
    command = shlex.join(["python", *map(shown, sys.argv)])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
A GPT-2 after {step:,} steps of {config.total_batch_size:,} tokens of `{Path(config.data).name}`,
from {shown(config.init)}, trained by gpt2-repro at commit {git_commit()}: `{command}`

It continues text; it was not trained to follow instructions, and what it writes may be false.
"""

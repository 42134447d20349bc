"""What a run writes down: `log.txt`, one `step stream value` a line, and `run.json`, one entry for every start."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from support.cli import InputError, first_line, shown
from support.files import atomic_write, remove_folder
from support.plots import save_curves
from support.rundir import last_start, list_checkpoints, run_entries, whole_lines


def clear_log_dir(log_dir: Path, resumed: bool) -> None:
    """Makes the folder; removes what a killed process left half written; sets an earlier run's checkpoints aside."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for left_over in log_dir.glob(".*.partial"):
        remove_folder(left_over) if left_over.is_dir() else left_over.unlink()
    if not resumed and (old := list_checkpoints(log_dir)):
        aside = next(path for i in range(1, 10**6) if not (path := log_dir / f"earlier_{i}").exists())
        aside.mkdir()
        for folder in old:
            folder.rename(aside / folder.name)
        print(f"{log_dir}/ holds an earlier run (--resume goes on with one): its checkpoints are now in {aside}/")


class Log:
    """Appends to `log.txt` in a folder; without a folder (on ranks other than 0) it writes nothing.

    resumed_step: the last run's lines from this step on are cut off first, as they will be written again.
    """

    def __init__(self, log_dir: Path | None, resumed_step: int | None = None):
        self.file, self.log_dir, self.first_step = None, log_dir, resumed_step or 0
        self._artist = ThreadPoolExecutor(1, thread_name_prefix="curves")
        self._drawing: Future | None = None
        self._mirrors: list[Callable[[int, dict[str, float]], object]] = []
        if log_dir is None:
            return
        path = log_dir / "log.txt"
        if path.exists():
            lines = whole_lines(path)
            if resumed_step is not None:
                start = last_start(lines)
                lines[start:] = [line for line in lines[start:] if int(line.split()[0]) < resumed_step]
            with atomic_write(path, "w") as file:
                file.writelines(line + "\n" for line in lines)
        self.file = open(path, "a", encoding="utf-8", newline="\n", buffering=1)  # noqa: SIM115

    def write(self, step: int, **values: str) -> None:
        if self.file:
            self.file.write("".join(f"{step} {stream} {value}\n" for stream, value in values.items()))
        for mirror in self._mirrors:
            mirror(step, {stream: float(value) for stream, value in values.items()})

    def mirror(self, tensorboard: bool, wandb: bool) -> None:
        """From now on writes every stream to TensorBoard or Weights & Biases, too. Raises InputError without them."""
        if self.file and tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError("--tensorboard: not installed; `pip install tensorboard`") from None
            # purge_step: what an interrupted run had written from here on is written again
            writer = SummaryWriter(self.log_dir / "tensorboard", purge_step=self.first_step)
            self._mirrors.append(lambda step, values: [writer.add_scalar(k, v, step) for k, v in values.items()])
        if self.file and wandb:
            try:
                import wandb as weights_and_biases
            except ImportError:
                raise InputError("--wandb: not installed; `pip install wandb`") from None
            entries = run_entries(self.log_dir)
            began = next(entry["started"] for entry in reversed(entries) if not (self.first_step and entry["step"]))
            name = f"{self.log_dir.resolve().name}-{re.sub(r'[^0-9]', '', began)}"  # a resumed run goes on as the same
            try:
                run = weights_and_biases.init(project="gpt2-repro", id=name, name=name, resume="allow",
                                              dir=self.log_dir, config=entries[-1]["config"])
            except Exception as error:  # no account, no network
                raise InputError(f"--wandb: {first_line(error)}; WANDB_MODE=offline goes without") from None
            self._mirrors.append(lambda step, values: run.log(values, step=step))

    def draw(self, baselines: dict[str, float] | None = None) -> None:
        """Has log_dir/curves.png drawn anew, in a thread; a picture that fails does no harm. baselines: losses to set
        beside those of a run on a .txt file, by name."""
        if self.file:
            if self._drawing:
                self._drawing.cancel()  # if it is still waiting, it is out of date
            self._drawing = self._artist.submit(save_curves, self.log_dir, baselines)

    def picture(self) -> Path | None:
        """The picture, as soon as the last drawing is done; None where nothing was drawn."""
        return self._drawing.result() if self._drawing and not self._drawing.exception() else None

    def sync(self) -> None:
        """Puts what was written on the disk."""
        if self.file:
            os.fsync(self.file.fileno())


def add_run_entry(log_dir: Path, config: dict[str, Any], **details: Any) -> None:
    """Adds to run.json what it takes to do this start again: command, configuration, commit, versions, device.

    Paths inside the working folder are given from there: what is published need not say where that was.
    """
    path, entries = log_dir / "run.json", run_entries(log_dir)
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [*map(shown, sys.argv)],
        "git_commit": git_commit(),
        "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in PACKAGES},
        **details,
        "config": config | {name: shown(config[name]) for name in ("data", "log_dir", "hellaswag_data")},
    }
    with atomic_write(path, "w") as file:
        file.write(json.dumps([*entries, entry], indent=2) + "\n")


PACKAGES = ("torch", "numpy", "tiktoken", "safetensors", "transformers")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of this code, with a `+` when tracked files have changed since; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")

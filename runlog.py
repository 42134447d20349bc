"""What a run writes down: `log.txt`, one `step stream value` a line, and `run.json`, one entry for every start.

And what is read from it: the curves, a model card, and whether a run matches a reference (`--check-against`).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import InputError, atomic_write, first_line, sha256

LINE = re.compile(r"(\d+) (\w+) (\S+)")


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of the last run in a log folder: {"train": (steps, values), "val": …}."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    lines = _whole_lines(Path(log_dir) / "log.txt")
    for line in lines[_last_start(lines) :]:
        step, stream, value = line.split()
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(int(step))
        values.append(float(value))
    return streams


def _whole_lines(path: Path) -> list[str]:
    """The lines of a log; a kill may have torn the last one, which is left out."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if LINE.fullmatch(line)]


def _last_start(lines: list[str]) -> int:
    """Where the last run begins: a log is appended to, and steps only fall where a new run starts."""
    steps = [int(line.split()[0]) for line in lines]
    return max((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), default=0)


def checkpoints(log_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS, which `sha256sum -c` reads, too: a line for each file in the folder."""
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def verify_checksums(folder: Path, required: set[str]) -> None:
    """Raises InputError unless all files in SHA256SUMS, with the required ones among them, are as they were written."""
    try:
        sums = [line.split("  ") for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()]
        damaged = [name for digest, name in sums if sha256(folder / name) != digest]
        damaged += sorted(required - {name for _, name in sums})
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: not a whole checkpoint ({first_line(error)})") from None
    if damaged:
        raise InputError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")


def clear_log_dir(log_dir: Path, resumed: bool) -> None:
    """Makes the folder; removes what a killed process left half written; sets an earlier run's checkpoints aside."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for left_over in log_dir.glob(".*.partial"):
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    if not resumed and (old := checkpoints(log_dir)):
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
            lines = _whole_lines(path)
            if resumed_step is not None:
                start = _last_start(lines)
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
            entries = _run_entries(self.log_dir)
            began = next(entry["started"] for entry in reversed(entries) if not (self.first_step and entry["step"]))
            name = f"{self.log_dir.resolve().name}-{re.sub(r'[^0-9]', '', began)}"  # a resumed run goes on as the same
            try:
                run = weights_and_biases.init(project="gpt2-repro", id=name, name=name, resume="allow",
                                              dir=self.log_dir, config=entries[-1]["config"])
            except Exception as error:  # no account, no network
                raise InputError(f"--wandb: {first_line(error)}; WANDB_MODE=offline goes without") from None
            self._mirrors.append(lambda step, values: run.log(values, step=step))

    def draw(self) -> None:
        """Has log_dir/curves.png drawn anew, in a thread; a picture that fails does no harm."""
        if self.file:
            from plots import save_curves

            if self._drawing:
                self._drawing.cancel()  # if it waits still, it is overtaken
            self._drawing = self._artist.submit(save_curves, self.log_dir)

    def sync(self) -> None:
        """Puts what was written on the disk."""
        if self.file:
            os.fsync(self.file.fileno())


def _run_entries(log_dir: Path) -> list[dict[str, Any]]:
    path = log_dir / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError:
        raise InputError(f"{path}: not JSON; move it away") from None


def last_config(log_dir: Path) -> dict[str, Any]:
    """The configuration of the newest start in a log folder; {} when there was none. Raises InputError."""
    return next((entry["config"] for entry in reversed(_run_entries(log_dir))), {})


Milestone = tuple[int, str, float, float]  # (tokens, stream, lowest, highest value)


def read_milestones(reference: Path) -> list[Milestone]:
    """The lines `tokens stream low high` of a reference folder's check.txt; # begins a remark. Raises InputError."""
    path, milestones = reference / "check.txt", []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                tokens, stream, low, high = line.split()
                milestones.append((int(tokens), stream, float(low), float(high)))
    except OSError:
        raise InputError(f"{path}: no such reference; there are reference/shakespeare and reference/gpt2") from None
    except ValueError:
        raise InputError(f"{path}: not `tokens stream low high`: {line}") from None
    return milestones


def measure(log_dir: Path, points: list[tuple[int, str]], total_batch_size: int) -> list[tuple[int, float | None]]:
    """(step, value) of a run's log at each (tokens, stream); None where the log has no value.

    A training loss is the mean over the steps since the point before; other streams are as logged at that step.
    """
    streams, found, before = read_log(log_dir), [], 0
    for tokens, stream in points:
        step, rest = divmod(tokens, total_batch_size)
        steps, values = streams.get(stream, ([], []))
        if stream == "train":
            last_steps = [v for s, v in zip(steps, values, strict=True) if before <= s < step]
            value = sum(last_steps) / len(last_steps) if last_steps and steps[-1] >= step - 1 else None
            before = step
        else:
            value = dict(zip(steps, values, strict=True)).get(step)
        found.append((step, None if rest else value))
    return found


def compare(log_dir: Path, milestones: list[Milestone], total_batch_size: int) -> tuple[bool, str]:
    """Whether a run's log stays within the milestones, and a sentence that says so, to be ended with their name."""
    values = measure(log_dir, [milestone[:2] for milestone in milestones], total_batch_size)
    for (_, stream, low, high), (step, value) in zip(milestones, values, strict=True):
        if value is not None and not low <= value <= high:
            return False, f"step {step}: {stream} {value:.4f} is outside {low} to {high}: does not match"
    checked = sum(value is not None for _, value in values)
    if not checked:
        return False, "no value was logged at any token count of"
    return True, f"{checked} of {len(milestones)} values compared: matches"


def add_run_entry(log_dir: Path, config: dict[str, Any], **details: Any) -> None:
    """Adds to run.json what it takes to do this start again: command, configuration, commit, versions, device."""
    path, entries = log_dir / "run.json", _run_entries(log_dir)
    entry = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "git_commit": _git_commit(),
        "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in PACKAGES},
        **details,
        "config": config,
    }
    with atomic_write(path, "w") as file:
        file.write(json.dumps([*entries, entry], indent=2) + "\n")


def model_card(log_dir: Path, step: int) -> str:
    """README.md of the checkpoint that a run saves at `step`, in the Hub's format, from the run's own records."""
    entry = _run_entries(log_dir)[-1]
    config, streams = entry["config"], read_log(log_dir)

    def last(stream: str) -> str:
        values = [(s, v) for s, v in zip(*streams.get(stream, ([], [])), strict=True) if s <= step]
        return f"{values[-1][1]:.4f} (step {values[-1][0]:,})" if values else "not measured"

    rows = {
        "training data": f"`{Path(config['data']).name}`, {step * config['total_batch_size']:,} tokens",
        "steps": f"{step:,} of {config['max_steps']:,}, {config['total_batch_size']:,} tokens each",
        "begun from": config["init"],
        "learning rate": f"{config['max_lr']} to {config['min_lr']}, {config['schedule']}, {config['optimizer']}",
        "weight decay, seed": f"{config['weight_decay']}, {config['seed']}",
        "training loss": last("train"),
        "validation loss": last("val"),
        "HellaSwag (completion style, acc_norm)": last("hella"),
        "device": entry["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in entry["versions"].items() if version),
        "commit": entry["git_commit"] or "unknown",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# A GPT-2 trained from scratch with gpt2-repro

```
{shlex.join(["python", *entry["command"]])}
```

| | |
|---|---|
{table}
```python
from transformers import pipeline
pipeline("text-generation", model="THIS FOLDER")({config["sample_prompt"]!r}, max_new_tokens=40)
```

A language model of this size writes fluent text that need not be true. It was trained to continue text, not to follow
instructions, and nothing was done about what its training data may have taught it.
"""


PACKAGES = ("torch", "numpy", "tiktoken", "safetensors", "transformers")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of this code, with a `+` when tracked files have changed since; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")

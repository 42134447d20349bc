"""What a run writes down: `log.txt`, one `step stream value` a line, and `run.json`, one entry for every start."""

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import InputError, atomic_write

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


class Log:
    """Appends to `log.txt` in a folder; without a folder (on ranks other than 0) it writes nothing.

    resumed_step: the last run's lines from this step on are cut off first, as they will be written again.
    """

    def __init__(self, log_dir: Path | None, resumed_step: int | None = None):
        self.file = None
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

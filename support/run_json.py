"""run.json, which is what a run records about itself. Does not import torch.

It is a list with one entry for the start of the run, and one for each time it was resumed."""

import contextlib
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.command_line import shown
from support.files_and_locks import ROOT, write_text

PATHS = ("data", "hellaswag_data", "init")  # settings that may be paths


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] without one."""
    path = Path(log_dir) / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def run_config(entry: dict[str, Any]) -> dict[str, Any]:
    """The settings of a start, with absolute paths. JSON has made lists of tuples."""
    values = entry["config"] | entry["paths"]
    return {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}


def write_entries(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")


def new_entry(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An entry about this start. config: the settings of the run."""
    import torch  # here, since reading logs needs no torch

    versions = {"torch": torch.__version__}  # with its build, such as +cu130
    versions |= {name: version(name) for name in ("numpy", "tiktoken", "safetensors")}
    # Elsewhere paths in the working folder are relative, since the model card has them.
    public = {k: shown(value) if isinstance(value, str) else value for k, value in config.items()}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],
        "git_commit": git_commit(),
        "versions": versions | {"python": sys.version.split()[0]},
        **more,
        "config": public,
        "paths": {
            name: config[name] for name in config if name in PATHS or public[name] != config[name]
        },
    }


def git_commit() -> str | None:
    """The commit of this clone, with a + if files have changed since. None without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None

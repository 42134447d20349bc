"""log.txt and run.json: what a run records about itself. Does not import torch.

log.txt has one `step stream value` per line. run.json is a list with one entry for the start of the
run, and one for each time it was resumed."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.cli import print0, shown
from support.errors import UserError
from support.files import atomic_path, sha256, write_text

ROOT = Path(__file__).parents[1]

# How values are written; other streams have the format .6f.
FORMATS = {"hella": ".4f", "lr": ".6e", "tok_per_sec": ".1f", "mfu": ".4f", "ms": ".2f"}


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of a run: {"train": (steps, values), "val": …}."""
    streams = {}
    for step, stream, value in log_lines(Path(log_dir) / "log.txt"):
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(step)
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[tuple[int, str, str]]:
    """The (step, stream, value) of each line. Skips malformed lines, such as one cut by a kill."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            step, stream, value = line.split()
            float(value)
            lines.append((int(step), stream, value))
    return lines


def format_line(step: int, stream: str, value: float) -> str:
    return f"{step} {stream} {value:{FORMATS.get(stream, '.6f')}}\n"


def trim_log(path: Path, step: int) -> dict[str, float]:
    """Keeps the lines before the update of `step`, which will be made again.

    Returns the evaluations at `step`: {stream: value}. They precede that update's lines, of which
    the first is the training loss."""
    kept = []
    for line in log_lines(path):
        if line[0] > step or line[:2] == (step, "train"):
            break
        kept.append(line)
    write_text(path, "".join(" ".join(map(str, line)) + "\n" for line in kept))
    return {stream: float(value) for s, stream, value in kept if s == step}


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] without one."""
    path = Path(log_dir) / "run.json"
    if not path.exists():
        return []
    with contextlib.suppress(ValueError, TypeError, KeyError):
        entries = json.loads(path.read_text(encoding="utf-8"))
        if type(entries) is list and all(type(entry["config"]) is dict for entry in entries):
            return entries
    raise UserError(f"{path}: not a list of a run's starts; move it away")


def write_entries(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")


def append(path: Path, lines: bytes) -> None:
    """Appends all lines or, if the disk is full, none: a part could be another number."""
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while lines:  # a nearly full disk takes a part
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(end)
            raise


def copy_script(log_dir: Path, entries: list[dict[str, Any]], script: Path | None) -> None:
    """Writes run.json, and a copy of the script that runs into the log folder, under its name.

    A file of that name there is the user's, unless its checksum is in an entry."""
    if script is None:
        write_entries(log_dir, entries)
        return
    source = script.read_bytes()
    entries[-1] |= {"script": script.name, "script_sha256": hashlib.sha256(source).hexdigest()}
    write_entries(log_dir, entries)  # before the copy, which must not be without its checksum
    copy = log_dir / script.name
    if copy.exists() and sha256(copy) not in [entry.get("script_sha256") for entry in entries]:
        print0(f"{copy} is not a run's copy: it stays, and this run's script is not kept")
        return
    with atomic_path(copy) as new:
        new.write_bytes(source)


def git_commit(script: Path | None) -> str | None:
    """The commit of this clone, with a + if files have changed since or git lacks the script.

    None without git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
        describe = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        commit = git(describe, check=True).stdout.strip()
        known = script is None or not git(["git", "ls-files", "--error-unmatch", script]).returncode
        return commit if known or commit.endswith("+") else f"{commit}+"
    return None


def new_entry(config: dict[str, Any], script: Path | None = None, **more: Any) -> dict[str, Any]:
    """An entry of run.json about this start. script: the file that runs."""
    import torch  # here, since reading logs needs no torch

    versions = {"torch": torch.__version__}  # with its build, such as +cu130
    versions |= {name: version(name) for name in ("numpy", "tiktoken", "safetensors")}
    # The folder may be published, so it has no local paths.
    public = {k: shown(value) if isinstance(value, str) else value for k, value in config.items()}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],
        "git_commit": git_commit(script),
        "versions": versions | {"python": sys.version.split()[0]},
        **more,
        "config": public,
    }

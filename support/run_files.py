"""The formats of log.txt (`step stream value` lines) and run.json (one entry per start).

Importing this module does not import torch."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.command_line import display_path
from support.files_and_locks import ROOT, write_text

# --------------------------------------------------------------------------------------------------
# log.txt

# Number format of each stream. A stream such as val_average uses the format of val. Unknown streams
# get six significant digits.
FORMATS = {"train": ".6f", "val": ".6f", "bpb": ".6f", "norm": ".6f", "hella": ".4f"}
FORMATS |= {"lr": ".6e", "tok_per_sec": ".1f", "mfu": ".4f", "ms": ".2f"}


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return the streams of a run: {"train": (steps, values), "val": …}."""
    streams = {}
    for step, stream, value in log_lines(Path(log_dir) / "log.txt"):
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(step)
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[tuple[int, str, str]]:
    """Return (step, stream, value) for each line.

    Skips malformed lines, e.g. one cut off when the process was killed."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            step, stream, value = line.split()
            float(value)
            lines.append((int(step), stream, value))
    return lines


def trim_log(log_dir: Path, step: int) -> dict[str, float]:
    """Drop what was logged after the checkpoint of `step`, and return what was logged at `step`.

    The lines kept at `step` are the evaluations of that checkpoint, {stream: value}. They precede
    the lines of update `step`, which begin with its training loss."""
    kept = []
    path = log_dir / "log.txt"
    for line in log_lines(path):
        if line[0] > step or line[:2] == (step, "train"):
            break
        kept.append(line)
    write_lines(path, kept)
    return {stream: float(value) for s, stream, value in kept if s == step}


def remove_values(log_dir: Path, step: int, streams: Collection[str]) -> None:
    """Drop the values of these streams at `step`."""
    path = log_dir / "log.txt"
    lines = log_lines(path)
    kept = [line for line in lines if line[0] != step or line[1] not in streams]
    if kept != lines:
        write_lines(path, kept)


def write_lines(path: Path, lines: list[tuple[int, str, str]]) -> None:
    write_text(path, "".join(f"{step} {stream} {value}\n" for step, stream, value in lines))


def append_values(log_dir: Path, step: int, values: dict[str, float]) -> None:
    """Append one line per stream. Appends all lines or, if writing raises OSError, none."""
    lines = []
    for stream, value in values.items():
        if len(stream.split()) != 1:  # a space separates the columns
            raise ValueError(f"{stream!r}: log it under a name without spaces")
        known = stream if stream in FORMATS else stream.partition("_")[0]
        number = f"{value:{FORMATS.get(known, '.6g')}}"
        lines.append(f"{step} {stream} {number}\n")
    text = "".join(lines).encode()
    with open(log_dir / "log.txt", "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while text:  # on a nearly full disk, write() may be partial
                text = text[file.write(text) :]
        except OSError:
            file.truncate(end)  # do not leave a partial line
            raise


# --------------------------------------------------------------------------------------------------
# run.json

PATHS = ("data", "hellaswag_data", "init")  # settings that may be paths


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """Return the entries of run.json, oldest first, or [] if there is no such file."""
    path = Path(log_dir) / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_entries(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")


def new_entry(config: dict[str, Any], command: list[str], **details: Any) -> dict[str, Any]:
    """Return an entry of run.json for this start, with the settings `config` and `details`."""
    import torch  # imported here, because reading logs does not need torch

    versions = {"torch": torch.__version__}  # includes the build, e.g. +cu130
    versions |= {name: version(name) for name in ("numpy", "tiktoken", "safetensors")}
    # The model card publishes these, so paths in the working directory are relative. "paths" below
    # keeps the absolute ones for --resume.
    public = {
        k: display_path(value) if isinstance(value, str) else value for k, value in config.items()
    }
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [display_path(word) for word in command],
        "git_commit": git_commit(),
        "versions": versions | {"python": sys.version.split()[0]},
        **details,
        "config": public,
        "paths": {
            name: config[name] for name in config if name in PATHS or public[name] != config[name]
        },
    }


def git_commit() -> str | None:
    """Return the commit of this clone, with a trailing + if it is dirty, or None without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None

"""log.txt and run.json: what a run records about itself. Does not import torch.

log.txt has one `step stream value` per line; a resumed run first removes the lines that it will
write again. run.json is a list with one entry per start. Both may hold several runs, one after the
other; readers want the last one."""

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.cli import shown, warn
from support.errors import UserError
from support.files import atomic_path, sha256, write_text

ROOT = Path(__file__).parents[1]

# How values are written; other streams have the format .6f.
FORMATS = {"hella": ".4f", "lr": ".6e", "tok_per_sec": ".1f", "mfu": ".4f", "ms": ".2f"}
# Streams with a value of step s after the update of step s; all others have it before.
UPDATES = ("train", "lr", "norm", "tok_per_sec", "mfu", "ms")

Line = tuple[int, str, str]  # step, stream, value


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of the last run in a log folder: {"train": (steps, values), "val": …}."""
    streams = {}
    lines = log_lines(Path(log_dir) / "log.txt")
    for step, stream, value in lines[last_start(lines) :]:
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(step)
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[Line]:
    """The lines of log.txt. Malformed lines (e.g. cut short by a kill) are skipped."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            step, stream, value = line.split()
            float(value)
            lines.append((int(step), stream, value))
    return lines


def last_start(lines: list[Line]) -> int:
    """The index of the last run's first line.

    Only where a run starts do steps fall, or does a stream have a second value of one step."""
    start, latest, seen = 0, 0, {}  # seen: {stream: its latest step}
    for i, (step, stream, _) in enumerate(lines):
        if step < latest or seen.get(stream) == step:
            start, seen = i, {}
        latest = seen[stream] = step
    return start


def format_line(step: int, stream: str, value: float) -> str:
    return f"{step} {stream} {value:{FORMATS.get(stream, '.6f')}}\n"


def end_log(path: Path) -> int:
    """Ends a line that a kill cut short, or it would spoil the next. Returns the line count."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b" cut short\n")  # makes it malformed, so it is skipped
    return len(log_lines(path))


def trim_log(path: Path, begin: int | None, step: int) -> tuple[int, dict[str, float]]:
    """Removes what a run that continues from `step` will log again.

    begin: the number of lines before this run; None if unknown. Returns it, and the evaluations at
    `step`, which stay: {stream: value}."""
    lines = log_lines(path)
    if begin is None:
        begin = last_start(lines)
    kept = lines[:begin]
    evaluated = {}
    for line_step, stream, value in lines[begin:]:
        evaluation = line_step == step and stream not in UPDATES
        if evaluation:
            evaluated[stream] = float(value)
        if evaluation or line_step < step:
            kept.append((line_step, stream, value))
    write_text(path, "".join(" ".join(map(str, line)) + "\n" for line in kept))
    return begin, evaluated


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


def data_source(data: Path) -> str:
    """The source in the manifest of a folder of shards, e.g. a dataset's name; "" if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((data / "manifest.json").read_bytes())["source"])
    return ""


def git(*command: str) -> str:
    """The output of a git command in this repository; "" without git."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True)
        return done.stdout.strip()
    return ""


def new_entry(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An entry of run.json about this start."""
    versions = {name: version(name) for name in ("torch", "numpy", "tiktoken", "safetensors")}
    # The commit, with a + if files have changed since.
    commit = git("describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*")
    for name, value in config.items():
        if isinstance(value, str):
            config = config | {name: shown(value)}  # the folder may be published: no local paths
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],
        "git_commit": commit or None,
        "versions": versions | {"python": sys.version.split()[0]},
        **more,
        "config": config,
    }


def write_entries(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")


def record_start(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    """Writes run.json, and train_gpt2.py into the log folder if it differs from its commit.

    A train_gpt2.py there is the user's, unless its checksum is that of an earlier start's copy."""
    script = (ROOT / "train_gpt2.py").read_bytes()
    copy = log_dir / "train_gpt2.py"
    ours = not copy.exists() or sha256(copy) in [entry.get("script") for entry in entries]
    changed = ours and git("status", "--porcelain", copy.name)
    if changed:
        entries[-1]["script"] = hashlib.sha256(script).hexdigest()
    write_entries(log_dir, entries)  # before the copy, which must not be without its checksum
    if changed:
        with atomic_path(copy) as partial:
            partial.write_bytes(script)
    elif ours:
        copy.unlink(missing_ok=True)
    else:
        warn(f"{copy}: not from an earlier run: it stays, and this run's script is not kept")

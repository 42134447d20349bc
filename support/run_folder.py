"""A run's folder: log.txt, run.json and checkpoints."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from support.cli import UserError, first_line, shown
from support.files import atomic_write, sha256


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
    """The index of the last run's first line: a log is appended to, and steps only fall at a
    start."""
    steps = [int(line.split()[0]) for line in lines]
    return max((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), default=0)


def list_checkpoints(log_dir: Path) -> list[Path]:
    """A run's checkpoint folders, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def best_checkpoint(log_dir: Path) -> tuple[int | None, float]:
    """(step, validation loss) of the checkpoint with the lowest loss; (None, inf) if none was
    evaluated."""
    losses = dict(zip(*read_log(log_dir).get("val", ([], [])), strict=True))
    found = [
        (step, losses[step]) for step in map(step_of, list_checkpoints(log_dir)) if step in losses
    ]
    return min(reversed(found), key=lambda pair: pair[1], default=(None, math.inf))


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """run.json: what each start recorded, oldest first; [] without one. Raises UserError."""
    path = Path(log_dir) / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError:
        raise UserError(f"{path}: not JSON; move it away") from None


def begin_run(
    log_dir: Path, resumed: bool, resumed_step: int | None, entry: dict[str, Any]
) -> IO[str]:
    """Prepares a run's folder, adds `entry` to run.json, and opens log.txt to append to.

    What a killed process left half written is removed; unless `resumed`, an earlier run's
    checkpoints are moved. From resumed_step on the last run's lines are removed, since they will be
    written again."""
    log_dir.mkdir(parents=True, exist_ok=True)
    for left_over in log_dir.glob(".*.partial"):
        shutil.rmtree(left_over, ignore_errors=True) if left_over.is_dir() else left_over.unlink()
    if not resumed and (old := list_checkpoints(log_dir)):
        aside = next(
            path for i in range(1, 10**6) if not (path := log_dir / f"earlier_{i}").exists()
        )
        aside.mkdir()
        for folder in old:
            folder.rename(aside / folder.name)
        print(
            f"{log_dir}/ has checkpoints of an earlier run (--resume continues one): moved to {aside}/"
        )
    git, commit = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"], ""
    with contextlib.suppress(OSError):  # no git on this machine
        git += ["--abbrev=40", "--exclude=*"]  # the full hash, with a + if files have changed since
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    entries = [
        *run_entries(log_dir),
        {  # relative paths: what may be published need not say where it ran
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": [*map(shown, sys.argv)],
            "git_commit": commit or None,
            "versions": {
                name: version(name) for name in ("torch", "numpy", "tiktoken", "safetensors")
            }
            | {"python": sys.version.split()[0]},
            **entry,
        },
    ]
    with atomic_write(log_dir / "run.json", "w") as file:
        file.write(json.dumps(entries, indent=2) + "\n")
    lines = log_lines(path := log_dir / "log.txt")
    start = last_start(lines) if resumed_step is not None else len(lines)
    lines[start:] = [line for line in lines[start:] if int(line.split()[0]) < resumed_step]
    with atomic_write(path, "w") as file:
        file.writelines(line + "\n" for line in lines)
    return open(path, "a", encoding="utf-8", newline="\n", buffering=1)


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS over the files of a folder, as `sha256sum -c` reads it."""
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def verify_checksums(folder: Path, required: set[str]) -> None:
    """Raises UserError unless every file in SHA256SUMS, the required ones among them, is
    unchanged."""
    try:
        sums = [
            line.split("  ")
            for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        ]
        damaged = [name for digest, name in sums if sha256(folder / name) != digest]
        damaged += sorted(required - {name for _, name in sums})
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: incomplete checkpoint ({first_line(error)})") from None
    if damaged:
        raise UserError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")

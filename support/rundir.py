"""A run's folder as others read it: `log.txt`, `run.json`, the checkpoint folders."""

import json
import re
from pathlib import Path
from typing import Any

from support.cli import InputError

LINE = re.compile(r"(\d+) (\w+) (\S+)")


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of the last run in a log folder: {"train": (steps, values), "val": …}."""
    streams: dict[str, tuple[list[int], list[float]]] = {}
    lines = whole_lines(Path(log_dir) / "log.txt")
    for line in lines[last_start(lines) :]:
        step, stream, value = line.split()
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(int(step))
        values.append(float(value))
    return streams


def whole_lines(path: Path) -> list[str]:
    """The lines of a log; a kill may have torn the last one, which is left out."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if LINE.fullmatch(line)]


def last_start(lines: list[str]) -> int:
    """Where the last run begins: a log is appended to, and steps only fall where a new run starts."""
    steps = [int(line.split()[0]) for line in lines]
    return max((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), default=0)


def list_checkpoints(log_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """run.json: what each start and resumption recorded, oldest first; [] without one. Raises InputError."""
    path = Path(log_dir) / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except ValueError:
        raise InputError(f"{path}: not JSON; move it away") from None


def last_config(log_dir: Path) -> dict[str, Any]:
    """The configuration of the newest start in a log folder; {} when there was none. Raises InputError."""
    return next((entry["config"] for entry in reversed(run_entries(log_dir))), {})

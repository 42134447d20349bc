"""Files that appear whole or not at all, and what a run leaves in its folder: log.txt, run.json,
checkpoints."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from support.cli import InputError


def sha256(path: Path) -> str:
    """A file's checksum in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: str) -> None:
    """Call before work whose result goes to `path`. Raises InputError if its folder is missing or not
    writable."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {Path(path).parent}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no write access to its folder; choose another")


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the file or folder that the block makes there is fsynced, then
    renamed to `path`. So `path` appears whole or not at all, and its previous content stays until then."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        for part in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
            _fsync(part)
        if path.is_dir():  # a folder cannot be replaced in one step
            os.replace(path, former := path.with_name(f".{path.name}.{os.getpid()}.former.partial"))
            os.replace(partial, path)
            remove_folder(former)
        else:
            os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise
    _fsync(path.parent)


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO]:
    """Opens a file that appears at `path` when the block ends, or not at all. Text is UTF-8 with \\n
    everywhere."""
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    with atomic_path(path) as partial, open(partial, mode, **text) as file:
        yield file


def remove_folder(path: Path) -> None:
    """Removes a folder. Its name is free at once; what cannot be deleted (NFS keeps a .nfsXXXX for an open
    file) is a warning."""
    try:
        os.replace(path, doomed := path.with_name(f".{path.name}.{os.getpid()}.removed.partial"))
        shutil.rmtree(doomed)
    except OSError as error:
        print(f"warning: {path}: not fully removed ({error.strerror}); the next start will retry",
              file=sys.stderr, flush=True)


def _fsync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk, so that a power cut cannot undo the rename."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # some network mounts
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------
# What a run leaves in its folder


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
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.fullmatch(r"\d+ \w+ \S+", line)]


def last_start(lines: list[str]) -> int:
    """The index at which the last run begins: a log is appended to, and steps only fall where a new run
    starts."""
    steps = [int(line.split()[0]) for line in lines]
    return max((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), default=0)


def list_checkpoints(log_dir: Path) -> list[Path]:
    """A run's checkpoint folders, oldest first."""
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

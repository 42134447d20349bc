"""Files and folders that appear whole or not at all; SHA-256."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def sha256(path: Path) -> str:
    """A file's checksum in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the file or folder made there is fsynced, then renamed
    to `path`. So `path` appears whole or not at all, and its previous content stays until then."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        for part in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
            fsync(part)
        former = path.with_name(f".{path.name}.{os.getpid()}.former.partial")
        if path.is_dir():  # a folder cannot be replaced in one step
            os.replace(path, former)
        os.replace(partial, path)
        shutil.rmtree(former, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(
            missing_ok=True
        )
        raise
    fsync(path.parent)


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO]:
    """Opens a file that appears at `path` when the block ends, or not at all. Text is UTF-8 with
    \\n."""
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    with atomic_path(path) as partial, open(partial, mode, **text) as file:
        yield file


def remove_folder(path: Path) -> None:
    """Removes a folder; its name is free at once, even if NFS keeps a file that is still open."""
    os.replace(path, doomed := path.with_name(f".{path.name}.{os.getpid()}.removed.partial"))
    shutil.rmtree(doomed, ignore_errors=True)


def fsync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk, so that a power cut cannot undo the
    rename."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if (
            error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir()
        ):  # some network mounts
            raise
    finally:
        os.close(descriptor)

"""Files that appear whole or not at all, checksums, and folders that go at once."""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from support.cli import InputError


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: str) -> None:
    """To be asked before work whose result goes to `path`. Raises InputError when its folder is missing or closed."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {Path(path).parent}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no write access to its folder; name another")


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yields a path beside `path` for the block to make a file or a folder at; then fsyncs it and renames it to `path`.

    So `path` appears whole or not at all, and what stood there before stays until then.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        for part in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
            _fsync(part)
        if path.is_dir():  # a folder can't be replaced in one go
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
    """Opens a file that appears at `path` whole when the block ends, or not at all (see atomic_path).

    Text is UTF-8 with \\n line ends on every system.
    """
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    with atomic_path(path) as partial, open(partial, mode, **text) as file:
        yield file


def remove_folder(path: Path) -> None:
    """Removes a folder, which is gone from its name at once; what cannot be removed is a warning.

    On NFS a file that some process still holds leaves a .nfsXXXX behind, and its folder stays.
    """
    try:
        os.replace(path, doomed := path.with_name(f".{path.name}.{os.getpid()}.removed.partial"))
        shutil.rmtree(doomed)
    except OSError as error:
        print(f"warning: {path}: not wholly removed ({error.strerror}); the next start tries again", file=sys.stderr,
              flush=True)


def _fsync(path: Path) -> None:
    """Puts a file, or a folder's list of names, on the disk: what a power cut must not take back."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # some network mounts sync no folders
            raise
    finally:
        os.close(descriptor)

"""Atomic writes: files and folders that appear whole or not at all, and stay until replaced.

And a lock, so that only one process at a time writes into a folder, and the root folder."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from support.errors_and_signals import UserError

ROOT = Path(__file__).parents[1]  # the folder of train_gpt2.py


@contextlib.contextmanager
def locked(folder: Path, problem: str) -> Iterator[None]:
    """Makes a folder and locks it, or raises UserError(problem) if another process has.

    Afterwards, removes the folder if it is new and nothing was written."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if os.name == "nt":  # no flock, and folders can't be opened
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            new = False
            raise UserError(problem) from None
        except OSError:  # a network mount without locks
            pass
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path next to `path`, then renames it to `path` after an fsync."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        if partial.is_dir():
            for part in partial.iterdir():
                fsync(part)
            if path.is_dir():  # os.replace can't replace a folder with files
                remove_folder(path)
        os.replace(partial, path)
    except BaseException as error:  # Ctrl-C as well
        remove(partial)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # which a full disk doesn't name
        raise
    fsync(path.parent)


def write_text(path: Path | str, text: str) -> None:
    """Writes a file atomically, in UTF-8 with \\n as line end."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def remove(path: Path) -> None:
    """Removes a file, a link or a folder (best effort)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Removes a folder. Its name is free at once, even if NFS keeps a file that is still open."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.removed.partial")
    os.replace(path, doomed)
    remove(doomed)


def fsync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk, so a power cut can't undo a rename."""
    folder = path.is_dir()
    if folder and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network mounts can't flush folders.
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

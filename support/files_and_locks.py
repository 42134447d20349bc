"""Atomic writes of files and folders, and a lock for a folder with a single writer.

A path written atomically appears whole or not at all, and survives a power failure."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from support.errors_and_signals import UserError

ROOT = Path(__file__).parents[1]  # the folder that contains train_gpt2.py


@contextlib.contextmanager
def locked(folder: Path, problem: str) -> Iterator[None]:
    """Create a folder if necessary and lock it within this context.

    Raises UserError(problem) if another process holds the lock. On exit, removes the folder if it
    was created here and is still empty. Mounts without flock are not locked. On Windows, this only
    creates the folder."""
    new = not folder.exists()
    if new and folder.is_symlink():
        raise UserError(
            f"{folder}: links to {folder.readlink()}, which is missing; remove the link"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if os.name == "nt":  # no flock, and folders cannot be opened
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
        except OSError:  # e.g. a network mount without flock
            pass
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path next to `path`. On success, fsync it and rename it to `path`."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        fsync(partial)
        if partial.is_dir():
            for part in partial.iterdir():
                fsync(part)
            if path.is_dir():  # os.replace cannot replace a non-empty folder
                remove_folder(path)
        os.replace(partial, path)
    except BaseException as error:  # including Ctrl-C
        remove(partial)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # write() on a full disk does not set it
        raise
    fsync(path.parent)


def check_output(path: str) -> None:
    """Raise UserError before hours of work if the file of --json, if any, cannot be written."""
    if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise UserError(f"--json {path}: not a file in a writable folder")


def write_text(path: Path | str, text: str) -> None:
    """Write a file atomically, as UTF-8 with \\n newlines on every platform."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def remove(path: Path) -> None:
    """Remove a file, a symlink or, ignoring errors, a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder. Rename it first, because NFS may keep a file that is still open."""
    doomed = path.with_name(f".{path.name}.{os.getpid()}.removed.partial")
    os.replace(path, doomed)
    remove(doomed)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that it survives a power failure."""
    folder = path.is_dir()
    if folder and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network mounts cannot flush folders.
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

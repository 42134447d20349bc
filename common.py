"""What every script here shares: one way to read flags, to report a user's mistake, and to write a file whole."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

Config = TypeVar("Config")


class InputError(Exception):
    """What the user gave cannot work. The message is one line: it names the thing and the way out."""


def is_rank_zero() -> bool:
    """True in the process that speaks for a torchrun job, and in a plain process."""
    return os.environ.get("RANK", "0") == "0"


def parse_args(config_class: type[Config], default: Config | None = None, args: Sequence[str] | None = None) -> Config:
    """Reads the command line into `config_class` with tyro. A mistake raises InputError; --help prints and exits.

    `default` replaces the class's own defaults; `args` replaces sys.argv[1:].
    """
    import tyro

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            if default is None:
                return tyro.cli(config_class, args=args)
            return tyro.cli(config_class, args=args, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):  # --help
            raise
        raise InputError(_one_line(stderr.getvalue())) from None


def _one_line(box: str) -> str:
    """tyro's framed error as a sentence: its first section, and the flag it suggests."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:-1]:  # between the top and the bottom edge
        line = line.strip("│ ")
        if line and set(line) == {"─"}:
            sections.append([])
        elif line:
            sections[-1].append(line)
    message = " ".join(sections[0]).rstrip(".")
    for section in sections[1:]:
        if section and section[0].startswith("Perhaps you meant"):
            message += f". Did you mean {section[1].split()[0].rstrip(',')}?"
    return f"{message} (--help lists the flags)"


# A full disk, a missing file, a folder without write access: the user's to mend, not a bug of ours.
_USER_ERRNOS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip


def run(main: Callable[[], int | None]) -> None:
    """Calls main() and exits: 0, or what it returned; 2 after one `error: ` line when the user's input is wrong.

    Under torchrun rank 0 alone speaks. Everything that is not the user's mistake keeps its traceback (status 1).
    """
    try:
        sys.exit(main() or 0)
    except InputError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in _USER_ERRNOS:
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    except KeyboardInterrupt:
        sys.exit(130)
    if is_rank_zero():
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO]:
    """Opens a file that appears at `path` whole when the block ends, or not at all: written beside, fsynced, renamed.

    Text is UTF-8 with \\n line ends on every system.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with open(partial, mode, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut. Does nothing where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What every script here shares: one way to read flags, and one to report a user's mistake."""

import contextlib
import errno
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

Config = TypeVar("Config")


class InputError(Exception):
    """What the user gave cannot work: exit status 2. The message is one line: it names the thing and the way out.

    rank: of a torchrun job, if this one alone knows of the mistake; None where all know it, and rank 0 speaks.
    """

    rank: int | None = None


class RunError(Exception):
    """A run cannot go on, though its input was well-formed: exit status 1. The message is one line, likewise."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type: what fits into a message of our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_rank_zero() -> bool:
    """True in the process that speaks for a torchrun job, and in a plain process."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    """Prints a line above the progress bar, on rank 0 alone."""
    if is_rank_zero():
        tqdm.write(message)


def say_wrapped(message: str) -> None:
    """The same for what may be long: a line of it ends before column 80, where it can, and goes on indented."""
    for line in message.split("\n"):
        say(textwrap.fill(line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def shown(path: str | Path) -> str:
    """A path as short as it can be typed: relative to the working folder, if it lies in it; others as they are."""
    return str(Path(path).relative_to(Path.cwd()) if Path(path).is_relative_to(Path.cwd()) else path)


def flag(field_name: str) -> str:
    """The command line's name of a setting: --max-steps for max_steps."""
    return "--" + field_name.replace("_", "-")


def parse_args(
    config_class: type[Config], default: Config | None = None, args: Sequence[str] | None = None,
    groups: Mapping[str, str] | None = None,
) -> Config:
    """Reads the command line into `config_class` with tyro. A mistake raises InputError; --help prints and exits.

    `default` replaces the class's own defaults; `args` replaces sys.argv[1:]. `groups` are headings for --help: the
    first setting of a group -> its title.
    """
    import tyro

    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            if default is None:
                return tyro.cli(config_class, args=args)
            return tyro.cli(config_class, args=args, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):  # --help
            text = stdout.getvalue()  # without a frame, as tyro sees no terminal
            for name, title in (groups or {}).items():
                text = re.sub(rf"^  {flag(name)}\b", f"\n {title}:\n\\g<0>", text, count=1, flags=re.MULTILINE)
            print("\n".join(line.rstrip() for line in text.splitlines()))
            raise
        raise InputError(_one_line(stderr.getvalue())) from None


def _one_line(box: str) -> str:
    """tyro's framed error (in ASCII on some terminals) as a sentence: its first section, and the flag it suggests."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:-1]:  # between the top and the bottom edge
        line = line.strip("│| ")
        if line and set(line) <= set("─-"):
            sections.append([])
        elif line:
            sections[-1].append(line)
    first, *others = [section for section in sections if section]
    message = " ".join(first).rstrip(".")
    for section in others:
        if section[0].startswith("Perhaps you meant"):
            message += f". Did you mean {section[1].split()[0].rstrip(',')}?"
    return f"{message} (--help lists the flags)"


# The user's to mend, not a bug of ours: errno -> the way out, where the system's own words don't show it.
_USER_ERRNOS = dict.fromkeys((errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "")
_USER_ERRNOS |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; name a place to which you have access")
_USER_ERRNOS |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; make room")


def user_error(error: BaseException) -> str | None:
    """The line that tells a user of an error that is theirs to mend; None for a bug of ours."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror}{_USER_ERRNOS[error.errno]}"
    return None


def run(main: Callable[[], int | None]) -> None:
    """Calls main() and exits: 0, or what it returned; 2 after one `error: ` line when the user's input is wrong.

    Of a torchrun job rank 0 alone speaks, unless the mistake is another rank's own (InputError.rank). Everything that
    is not foreseen keeps its traceback (status 1).
    """
    sys.stdout.reconfigure(line_buffering=True)  # a file that it goes to can be followed
    try:
        sys.exit(main() or 0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # what we printed to, `head` say, has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at the end fails, too
        sys.exit(1)
    except Exception as error:
        message, status = user_error(error), 2
        if isinstance(error, RunError):
            message, status = str(error), 1
        if message is None:
            raise
        rank = getattr(error, "rank", None)
    if is_rank_zero() or rank is not None:
        print(f"error: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr, flush=True)
    if os.environ.get("WORLD_SIZE", "1") != "1":  # an orderly end would wait for exchanges that a lost rank won't make
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)

"""log.txt, which has one `step stream value` per line. Does not import torch."""

import contextlib
import os
from pathlib import Path

from support.files_and_locks import write_text

# How values are written. A stream such as val_average is written like val. Others that are not here
# have six significant digits.
FORMATS = {"train": ".6f", "val": ".6f", "bpb": ".6f", "norm": ".6f", "hella": ".4f"}
FORMATS |= {"lr": ".6e", "tok_per_sec": ".1f", "mfu": ".4f", "ms": ".2f"}


def read_log(log_dir: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """The streams of a run: {"train": (steps, values), "val": …}."""
    streams = {}
    for step, stream, value in log_lines(Path(log_dir) / "log.txt"):
        steps, values = streams.setdefault(stream, ([], []))
        steps.append(step)
        values.append(float(value))
    return streams


def log_lines(path: Path) -> list[tuple[int, str, str]]:
    """The (step, stream, value) of each line. Skips malformed lines, such as one cut by a kill."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            step, stream, value = line.split()
            float(value)
            lines.append((int(step), stream, value))
    return lines


def trim_log(log_dir: Path, step: int) -> dict[str, float]:
    """Removes what was logged after the checkpoint of `step`, since the run goes on from there.

    Evaluations of that checkpoint stay, and are returned as {stream: value}. They come before the
    update of `step`, whose first line is its training loss."""
    kept = []
    path = log_dir / "log.txt"
    for line in log_lines(path):
        if line[0] > step or line[:2] == (step, "train"):
            break
        kept.append(line)
    write_text(path, "".join(" ".join(map(str, line)) + "\n" for line in kept))
    return {stream: float(value) for s, stream, value in kept if s == step}


def valid_name(stream: str) -> str:
    """The name of a stream as log.txt has it, where a space would begin the value."""
    return "_".join(stream.split())


def append_values(log_dir: Path, step: int, values: dict[str, float]) -> None:
    """Appends a line for each stream. If the disk is full, it raises OSError and appends none."""
    lines = []
    for stream, value in values.items():
        known = stream if stream in FORMATS else stream.partition("_")[0]
        number = f"{value:{FORMATS.get(known, '.6g')}}"
        lines.append(f"{step} {valid_name(stream)} {number}\n")
    text = "".join(lines).encode()
    with open(log_dir / "log.txt", "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while text:  # a nearly full disk takes a part
                text = text[file.write(text) :]
        except OSError:
            file.truncate(end)  # or the next line would go on in the middle of this one
            raise

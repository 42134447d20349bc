"""Rows of text to tokens: what fineweb.py's workers do. They do not import `datasets`, which takes a second."""

import json
import multiprocessing
import os
import re
import signal
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from support.cli import InputError
from support.tokenizer import EOT, encode, get_tokenizer


class Batch(NamedTuple):
    """Rows that a worker tokenizes at a time."""

    name: str  # of the file or dataset, for messages
    columns: list[str]  # that make a document
    template: str  # joins them: "{question}\n{answer}"; "" for a single one
    json_lines: bool = False  # is a row a line of JSON?
    data: bytes = b""  # a table, as an Arrow IPC stream


@contextmanager
def explained(name: str, problem: str = "cannot be read", remedy: str = "replace the file") -> Iterator[None]:
    """Turns any exception of a library (their types share no base class) into an InputError about `name`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:400]
        raise InputError(f"{name}: {problem} ({type(error).__name__}: {line}); {remedy}") from None


def template_columns(template: str) -> list[str]:
    """The columns that a template names. Raises InputError."""
    with explained(f"--template {template!r}", "invalid", "put column names in braces, like {text}"):
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if not names or not all(names):
            raise ValueError("no column")
    return list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))


def start_child() -> None:
    """Makes this process exit when its parent does, even after kill -9, and leaves Ctrl-C to the parent."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_worker() -> None:
    start_child()
    get_tokenizer()  # takes a while, in which the reader imports `datasets`


def tokenize(batch: Batch) -> tuple[np.ndarray, list[int]]:
    """-> (tokens of the documents, 1-D uint16; numbers of [nulls, empty texts] skipped). Raises InputError."""
    import pyarrow

    parts, skipped = [np.zeros(0, dtype=np.uint32)], [0, 0]
    with explained(batch.name, "a row has no text", "correct it, or choose columns with --text-column or --template"):
        for row in pyarrow.ipc.open_stream(batch.data).read_all().to_pylist():
            if batch.json_lines:
                if not row["text"].strip():
                    continue
                row = json.loads(row["text"])
            values = {column: row[column] for column in batch.columns}
            text = values[batch.columns[0]]
            if batch.template and set(values.values()) != {None}:
                text = batch.template.format_map({key: "" if v is None else v for key, v in values.items()})
            if text is None or not text.encode():  # fails for a number, and for half a surrogate pair in JSON
                skipped[text is not None] += 1
            else:
                parts += [np.array([EOT], dtype=np.uint32), *encode(text)]
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), skipped

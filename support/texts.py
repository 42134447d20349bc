"""Text in, tokens out: how fineweb.py opens files and datasets, and what its workers do with their rows.

`datasets` takes a second to import, so only functions of the reader process import it. """

import glob
import json
import multiprocessing
import os
import re
import signal
import string
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.cli import InputError
from support.tokenizer import EOT, encode, get_tokenizer

SUFFIXES = (".parquet", *(f".{kind}{end}" for kind in ("jsonl", "csv", "txt", "md") for end in ("", ".gz", ".zst")))
VALIDATION = ("validation", "valid", "val", "dev")  # names of a validation split
BATCH_ROWS = 256  # a stream's state depends on it, so a resumed run must use the same


class Batch(NamedTuple):
    """Rows that a worker tokenizes at a time."""

    name: str  # of the file or dataset, for messages
    columns: list[str]  # that make a document
    template: str  # joins them: "{question}\n{answer}"; "" for a single one
    json_lines: bool = False  # is a row a line of JSON?
    data: bytes = b""  # a table, as an Arrow IPC stream


Stream = Callable[[], tuple[Batch, Any]]  # opens a file or split: -> (batch without data, datasets.IterableDataset)


@contextmanager
def explained(name: str, problem: str = "cannot be read", remedy: str = "") -> Iterator[None]:
    """Turns an exception of a library (their types share no base class) into an InputError about `name`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        line, kind = " ".join(str(error).split())[:400], type(error).__name__
        if "gated" in line.lower() + kind.lower():
            remedy = "request access on its Hub page, then log in with `hf auth login` or set HF_TOKEN"
        elif name.startswith("--dataset"):
            remedy = ("check the names and the network, and for a private one log in with `hf auth login`; then run the "
                      "same command again")
        raise InputError(f"{name}: {problem} ({kind}: {line}); {remedy or 'replace the file'}") from None


def template_columns(template: str) -> list[str]:
    """The columns that a template names. Raises InputError."""
    with explained(f"--template {template!r}", "invalid", "put column names in braces, like {text}"):
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if not names or not all(names):
            raise ValueError("no column")
    return list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that --input names, in its order; those of a folder or pattern by name. Raises InputError."""
    paths: list[str] = []
    for pattern in patterns:
        inside = sorted(map(str, Path(pattern).rglob("[!.]*")))
        found = [path for path in inside if path.endswith(SUFFIXES) and Path(path).name != "README.md"]
        found = found or ([pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True)))
        bad = [path for path in found if not path.endswith(SUFFIXES) or not Path(path).is_file()]
        if bad or not found:
            raise InputError(f"--input {(bad or [pattern])[0]}: no such file, or none of {', '.join(SUFFIXES)}")
        paths += found
    return paths


def open_file(path: str, columns: list[str], template: str) -> tuple[Batch, Any]:
    """A Stream, given these arguments."""
    from datasets import load_dataset

    suffix, module, options = Path(re.sub(r"\.(gz|zst)$", "", path)).suffix, "text", {"sample_by": "document"}
    batch = Batch(path, columns, template, json_lines=suffix == ".jsonl")
    if suffix == ".parquet":
        module, options = "parquet", {"columns": columns, "batch_size": BATCH_ROWS}
    elif suffix == ".csv":  # columns as text: pandas would read 007 as 7 and NA as a null
        options = {"converters": dict.fromkeys(columns, str), "keep_default_na": False, "chunksize": 1000}
        module = "csv"
    elif suffix == ".jsonl":
        options = {"sample_by": "line"}
    else:
        batch = Batch(path, ["text"], "")
    return batch, load_dataset(module, data_files=[glob.escape(path)], split="train", streaming=True, **options)


def open_dataset(
    dataset: str, config: str, split: str, column: str, template: str, commit: str | None
) -> tuple[list[Stream | None], list[str], str | None]:
    """-> ([validation split or None, split], paths of their files, commit on the Hub). Raises InputError. The column
    is, unless named, `text` or the only one of strings."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    name, folder = f"--dataset {dataset}", os.path.abspath(dataset) if Path(dataset).is_dir() else ""
    commit = commit or (None if folder else HfApi().dataset_info(dataset).sha)
    builder = load_dataset_builder(folder or dataset, config or None, revision=commit)
    splits = {str(key): paths for key, paths in (builder.config.data_files or {}).items()}
    split = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if split not in splits:
        raise InputError(f"{name}: no split {split!r}; --split names one of: {', '.join(splits)}")
    validation = next((other for other in VALIDATION if other in splits and split == "train"), "")
    rows = builder.as_streaming_dataset(split)
    schema = rows.features.arrow_schema if rows.features else next(rows.with_format("arrow").iter(1)).schema
    kinds = {field.name: str(field.type) for field in schema}
    texts = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
    columns = [column or ("text" if "text" in texts or len(texts) != 1 else texts[0])]
    columns = template_columns(template) if template else columns
    if not set(columns) <= set(kinds if template else texts):
        raise InputError(f"{name}: no text in {', '.join(columns)}; --text-column or --template chooses from: "
                         f"{', '.join(f'{key} ({kind})' for key, kind in kinds.items())}")
    if builder.name == "parquet":  # read no other columns, and little at a time
        builder.config.columns, builder.config.batch_size = columns, BATCH_ROWS
    streams = [(lambda part=part: (Batch(name, columns, template), builder.as_streaming_dataset(part))) if part else None
               for part in (validation, split)]
    return streams, [*splits.get(validation, []), *splits[split]], commit


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
    with explained(batch.name, "a row has no text", "correct it or choose another --text-column"):
        for row in pyarrow.ipc.open_stream(batch.data).read_all().to_pylist():
            if batch.json_lines:
                if not row["text"].strip():
                    continue
                row = json.loads(row["text"])
            values = {column: row[column] for column in batch.columns}
            text = values[batch.columns[0]]
            if batch.template and any(value is not None for value in values.values()):
                text = batch.template.format_map({key: "" if v is None else v for key, v in values.items()})
            if text is None or not text.encode():  # fails for a number, and for half a surrogate pair in JSON
                skipped[text is not None] += 1
            else:
                parts += [np.array([EOT], dtype=np.uint32), *encode(text)]
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), skipped

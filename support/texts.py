"""Text in, tokens out: how fineweb.py opens files and datasets, and what its workers do with their rows.

`datasets` takes a second to import, so only functions that run in the reader process import it."""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.cli import InputError
from support.tokenizer import EOT, encode

ENDS = ("", ".gz", ".zst")
SUFFIXES = (".parquet", *(kind + end for kind in (".jsonl", ".csv", ".txt", ".md") for end in ENDS))
VALIDATION = ("validation", "valid", "val", "dev")  # names of a validation split
BATCH_ROWS = 256  # a stream's state depends on it, so a resumed run must use the same

class Batch(NamedTuple):
    """Rows that a worker tokenizes at a time."""

    name: str  # of the file or dataset, for messages
    columns: list[str]  # that make a document
    template: str  # joins them: "{question}\n{answer}"; "" for a single one
    json_lines: bool = False  # is a row a line of JSON?
    data: bytes = b""  # a table, as an Arrow IPC stream

class Stream(NamedTuple):
    """A file, or a split of a dataset."""

    batch: Batch  # without data
    open: Callable[[], Any]  # -> datasets.IterableDataset

class Source(NamedTuple):
    """What there is to read."""

    streams: list[Stream | None]  # files; or a dataset's validation split, if it has one, and its split
    validation: bool  # is stream 0 a validation split?
    commit: str | None  # on the Hub
    files: list[list]  # name and bytes of local files
    tokens: int  # estimate

@contextmanager
def explained(name: str, problem: str = "cannot be read", remedy: str = "replace the file") -> Iterator[None]:
    """Turns any exception of a library (their types share no base class) into an InputError about `name`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if name.startswith("--dataset"):
            remedy = ("check the names and the network, then run the same command again; log in with "
                      "`hf auth login` if it is private")
        if "gated" in line.lower():
            remedy = "request access on its Hub page, then log in with `hf auth login` or set HF_TOKEN"
        raise InputError(f"{name}: {problem} ({line}); {remedy}") from None

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
        inside = [path for path in sorted(Path(pattern).rglob("[!.]*")) if path.name != "README.md"]
        found = [str(path) for path in inside if path.name.endswith(SUFFIXES)]
        matches = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        found = found or matches
        bad = [path for path in found if not path.endswith(SUFFIXES) or not Path(path).is_file()]
        if bad or not found:
            raise InputError(f"--input {(bad or [pattern])[0]}: no such file, or not {', '.join(SUFFIXES)}")
        paths += found
    return paths

def set_up_datasets() -> None:
    import datasets
    import fsspec.compression
    import pyarrow
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is shared between processes: one killed holding it blocks all
    datasets.config.TORCH_AVAILABLE = False  # otherwise streaming imports torch
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(100)  # its exceptions say the same
    # The zstandard package takes a truncated file for a complete one; pyarrow does not.
    fsspec.compression.register_compression("zstd", lambda file, **_: pyarrow.CompressedInputStream(
        pyarrow.PythonFile(file, "r"), "zstd"), "zst", force=True)

def sizes_and_tokens(paths: list[str], folder: str, remote: bool) -> tuple[list[list], int]:
    """-> ([[name, bytes] of each file], estimate of tokens in all)"""
    import fsspec

    factors = {".parquet": 1.6 if remote else 3, ".gz": 4, ".zst": 4, ".zip": 4}  # bytes of text per byte
    sizes, tokens = [], 0.0
    for path in paths:
        filesystem, stripped = fsspec.core.url_to_fs(path)
        name = os.path.relpath(path, folder) if folder else Path(path).name
        sizes.append([name, filesystem.size(stripped)])
        tokens += sizes[-1][1] * factors.get(Path(path).suffix, 1) / 4.5  # bytes of English per token
    return [] if remote else sizes, int(tokens)

def open_files(paths: list[str], column: str, template: str) -> Source:
    """Each file is a stream, so that errors can name it."""
    set_up_datasets()
    from datasets import load_dataset

    columns, streams = template_columns(template) if template else [column or "text"], []
    csv = {"converters": dict.fromkeys(columns, str), "keep_default_na": False}  # or 007 is 7, and NA a null
    for path in paths:
        suffix = Path(re.sub(r"\.(gz|zst)$", "", path)).suffix
        batch, module, options = Batch(path, columns, template, suffix == ".jsonl"), "text", {}
        if suffix == ".parquet":
            module, options = "parquet", {"columns": columns, "batch_size": BATCH_ROWS}
        elif suffix == ".csv":
            module, options = "csv", csv | {"chunksize": 1000}
        elif suffix != ".jsonl":
            batch, options = Batch(path, ["text"], ""), {"sample_by": "document"}
        options |= {"data_files": [glob.escape(path)], "split": "train", "streaming": True}
        streams.append(Stream(batch, partial(load_dataset, module, **options)))
    return Source(streams, False, None, *sizes_and_tokens(paths, "", remote=False))

def open_dataset(
    dataset: str, config: str, split: str, column: str, template: str, commit: str | None
) -> Source:
    """--dataset, on the Hub at `commit` or the newest. Raises InputError."""
    set_up_datasets()
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    name, folder = f"--dataset {dataset}", os.path.abspath(dataset) if Path(dataset).is_dir() else ""
    with explained(name):
        commit = commit or (None if folder else HfApi().dataset_info(dataset).sha)
        builder = load_dataset_builder(folder or dataset, config or None, revision=commit)
        splits = {str(key): paths for key, paths in (builder.config.data_files or {}).items()}
        split = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
        if split not in splits:
            raise InputError(f"{name}: no split {split!r}; --split names one of: {', '.join(splits)}")
        validation = next((key for key in VALIDATION if key in splits and split == "train"), "")
        rows = builder.as_streaming_dataset(split)
        schema = rows.features and rows.features.arrow_schema
        schema = schema or next(rows.with_format("arrow").iter(1)).schema
        kinds = {field.name: str(field.type) for field in schema}
        strings = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
        columns = [column or ("text" if "text" in strings or len(strings) != 1 else strings[0])]
        columns = template_columns(template) if template else columns
        if not set(columns) <= set(kinds if template else strings):
            listed = ", ".join(f"{key} ({kind})" for key, kind in kinds.items())
            raise InputError(f"{name}: no text in {', '.join(columns)}; choose with --text-column or "
                             f"--template from: {listed}")
        if builder.name == "parquet":  # read no other columns, and little at a time
            builder.config.columns, builder.config.batch_size = columns, BATCH_ROWS
        batch, paths = Batch(name, columns, template), [*splits.get(validation, []), *splits[split]]
        streams = [part and Stream(batch, partial(builder.as_streaming_dataset, part))
                   for part in (validation, split)]
        return Source(streams, bool(validation), commit, *sizes_and_tokens(paths, folder, commit is not None))

def read_stream(
    stream: Stream, state: dict[str, Any] | None, rank: int, world_size: int
) -> Iterator[tuple[dict[str, Any] | None, Batch]]:
    """A rank's part of a stream from `state` (None: its beginning) on, as (state before it, batch) pairs."""
    import pyarrow
    from datasets.distributed import split_dataset_by_node

    with explained(stream.batch.name, remedy="replace the file, or name its column with --text-column"):
        rows = stream.open()
        if world_size > 1:
            strategy = "shards" if rows.num_shards >= world_size else "examples"
            rows = split_dataset_by_node(rows, rank, world_size, strategy=strategy)
        rows = rows.with_format("arrow")
        rows.load_state_dict(state)
        for table in rows.iter(batch_size=BATCH_ROWS):
            table = table.select(["text"] if stream.batch.json_lines else stream.batch.columns)
            sink = pyarrow.BufferOutputStream()  # a pickled slice would hold the whole table
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            yield state, stream.batch._replace(data=sink.getvalue().to_pybytes())
            state = rows.state_dict()

def start_child(prepare: Callable[[], Any] = lambda: None) -> None:
    """Makes this process exit when its parent does, even after kill -9, and leaves Ctrl-C to the parent."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()

def tokenize(batch: Batch) -> tuple[np.ndarray, list[int]]:
    """-> (tokens of the documents, 1-D uint16; number of [nulls, empty texts]). Raises InputError."""
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

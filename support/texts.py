"""Text to tokens, for fineweb.py: a reader process streams rows with `datasets`, workers tokenize
them. Importing `datasets` takes a second, so only the reader does."""

import gc
import glob
import json
import multiprocessing
import os
import re
import signal
import string
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.cli import UserError
from support.tokenizer import EOT, encode, get_tokenizer

SUFFIXES = (
    ".parquet",
    *(a + b for a in (".jsonl", ".csv", ".txt", ".md") for b in ("", ".gz", ".zst")),
)
BATCH_ROWS = 256  # a stream's state depends on it, so a resumed run must use the same


class Stream(NamedTuple):
    """A file, or a split of a dataset. `template` joins columns; without one there is a single
    column."""

    name: str  # for messages
    columns: list[str]
    template: str
    json_lines: bool  # is a row a line of JSON?
    shared: bool  # does every rank read a part? Otherwise one reads it all
    open: Any  # () -> datasets.IterableDataset


@contextmanager
def explained(
    name: str, problem: str = "cannot be read", remedy: str = "replace the file"
) -> Iterator[None]:
    """Turns any exception of a library into an UserError about `name`; their types share no base
    class."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if name.startswith("--dataset"):
            remedy = (
                "check names and network, then run the same command again; if it is private or gated, "
                "request access on its Hub page and log in with `hf auth login`"
            )
        raise UserError(f"{name}: {problem} ({line}); {remedy}") from None


def template_columns(template: str) -> list[str]:
    """The columns that a template names; [] if it is empty. Raises UserError."""
    with explained(
        f"--template {template!r}", "invalid", "put column names in braces, like {text}"
    ):
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if template and not (names and all(names)):
            raise ValueError("no column")
    return list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that --input names, in its order; those of a folder or pattern by name. Raises
    UserError."""
    paths: list[str] = []
    for pattern in patterns:
        inside = [path for path in sorted(Path(pattern).rglob("[!.]*")) if path.name != "README.md"]
        found = [str(path) for path in inside if path.name.endswith(SUFFIXES)]
        found = found or (
            [] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        )
        paths += found or [pattern]
    for path in paths:
        if not (path.endswith(SUFFIXES) and Path(path).is_file()):
            raise UserError(f"--input {path}: no such file, or not {', '.join(SUFFIXES)}")
        if re.search(r"::|\[.*\.(gz|zst)$", path):
            raise UserError(
                f"--input {path}: `datasets` reads :: and, if compressed, [ as a URL; rename it"
            )
    return paths


def set_up_datasets() -> None:
    gc.disable()  # a quarter of the time that the import takes is its collections
    import datasets
    import fsspec.compression
    import pyarrow
    from tqdm import tqdm

    tqdm.set_lock(
        threading.RLock()
    )  # its own is shared: a process killed holding it would block all
    datasets.config.TORCH_AVAILABLE = False  # otherwise streaming imports torch
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = (
        False  # otherwise a request of 3 s for each local file
    )
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(100)  # its exceptions say the same
    # The zstandard package takes a truncated file for a complete one; pyarrow does not.
    fsspec.compression.register_compression(
        "zstd",
        lambda file, **_: pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"),
        "zst",
        force=True,
    )
    gc.freeze()
    gc.enable()


def facts_about(paths: list[str], commit: str | None) -> dict[str, Any]:
    """The commit on the Hub, or else name and bytes of each file; an estimate of the number of
    tokens."""
    import fsspec

    files = [[Path(path).name, fsspec.core.url_to_fs(path)[0].size(path)] for path in paths]
    factors = {
        ".parquet": 1.6 if commit else 3,
        ".gz": 4,
        ".zst": 4,
        ".zip": 4,
    }  # bytes of text per byte
    text = sum(size * factors.get(Path(name).suffix, 1) for name, size in files)
    return {
        "commit": commit,
        "files": [] if commit else files,
        "tokens": int(text / 4.5),
    }  # 4.5 in English


def open_files(
    paths: list[str], world_size: int, column: str, template: str
) -> tuple[dict, list[Stream]]:
    """-> (facts, a stream for each file, so that errors can name it). Ranks share files if they are
    few."""
    from datasets import load_dataset

    columns, streams = template_columns(template) or [column or "text"], []
    csv = {
        "converters": dict.fromkeys(columns, str),
        "keep_default_na": False,
    }  # or 007 is 7, and NA a null
    kinds = {
        ".parquet": ("parquet", {"columns": columns, "batch_size": BATCH_ROWS}),
        ".csv": ("csv", csv | {"chunksize": 1000}),
        ".jsonl": ("text", {}),
    }
    for path in paths:
        kind = Path(re.sub(r"\.(gz|zst)$", "", path)).suffix
        module, options = kinds.get(kind, ("text", {"sample_by": "document"}))
        options = options | {"data_files": [glob.escape(path)], "split": "train", "streaming": True}
        document = (columns, template) if kind in kinds else (["text"], "")
        opener, shared = partial(load_dataset, module, **options), len(paths) < world_size
        streams.append(Stream(path, *document, kind == ".jsonl", shared, opener))
    return facts_about(paths, None) | {"validation": False}, streams


def open_dataset(
    dataset: str, commit: str | None, config: str, split: str, text_column: str, template: str
) -> tuple:
    """-> (facts, [stream of a validation split or "", stream of the split]). Raises UserError."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    name, folder = (
        f"--dataset {dataset}",
        os.path.abspath(dataset) if Path(dataset).is_dir() else "",
    )
    with explained(name):
        commit = commit or (None if folder else HfApi().dataset_info(dataset).sha)
        builder = load_dataset_builder(folder or dataset, config or None, revision=commit)
        splits = {str(key): paths for key, paths in (builder.config.data_files or {}).items()}
        split = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
        if split not in splits:
            raise UserError(
                f"{name}: no split {split!r}; --split names one of: {', '.join(splits)}"
            )
        names = ("validation", "valid", "val", "dev") if split == "train" else ()
        validation = next((key for key in names if key in splits), "")
        rows = builder.as_streaming_dataset(split)
        known = rows.features and rows.features.arrow_schema
        schema = known or next(rows.with_format("arrow").iter(1)).schema
        kinds = {field.name: str(field.type) for field in schema}
        strings = [key for key, kind in kinds.items() if kind in ("string", "large_string")]
        columns = template_columns(template) or [
            text_column or (strings[0] if len(strings) == 1 else "text")
        ]
        if not set(columns) <= set(kinds if template else strings):
            listed = ", ".join(f"{key} ({kind})" for key, kind in kinds.items())
            raise UserError(
                f"{name}: no text in {', '.join(columns)}; --text-column, --template: {listed}"
            )
        if builder.name == "parquet":  # read no other columns, and little at a time
            builder.config.columns, builder.config.batch_size = columns, BATCH_ROWS
        facts = facts_about([*splits.get(validation, []), *splits[split]], commit)
        return facts | {"validation": bool(validation)}, [
            key
            and Stream(
                name,
                columns,
                template,
                False,
                key == split,
                partial(builder.as_streaming_dataset, key),
            )
            for key in (validation, split)
        ]


def read(
    connection: Connection, opener: Callable, position: list, rank: int, world_size: int
) -> None:
    """The reader process: sends the facts, ([stream, its state], Stream, rows) from a position on,
    and None; or an UserError. Rows are in Arrow's IPC format."""
    start_child(set_up_datasets)
    import pyarrow
    from datasets.distributed import split_dataset_by_node

    try:
        facts, streams = opener()
        connection.send(facts)
        for index, stream in enumerate(streams):
            if (
                index < position[0]
                or not stream
                or not (stream.shared or index % world_size == rank)
            ):
                continue
            with explained(
                stream.name, remedy="replace the file, or name its column with --text-column"
            ):
                dataset = stream.open()
                if stream.shared and world_size > 1:
                    strategy = "shards" if dataset.num_shards >= world_size else "examples"
                    dataset = split_dataset_by_node(dataset, rank, world_size, strategy=strategy)
                dataset, state = (
                    dataset.with_format("arrow"),
                    position[1] if index == position[0] else None,
                )
                dataset.load_state_dict(state)
                for table in dataset.iter(batch_size=BATCH_ROWS):
                    table = table.select(["text"] if stream.json_lines else stream.columns)
                    sink = (
                        pyarrow.BufferOutputStream()
                    )  # a pickled slice would hold the whole table
                    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                        writer.write_table(table)
                    rows = sink.getvalue().to_pybytes()
                    connection.send(([index, state], stream._replace(open=None), rows))
                    state = dataset.state_dict()
        connection.send(None)
    except UserError as error:
        connection.send(error)


def start_child(prepare: Callable[[], Any]) -> None:
    """Makes this process exit when its parent does, even after kill -9, and leaves Ctrl-C to the
    parent."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()


def set_up_tokenizer() -> None:
    import pyarrow.ipc  # noqa: F401

    get_tokenizer()


def tokenize(stream: Stream, rows: bytes) -> tuple[np.ndarray, list[int]]:
    """-> (tokens of the documents, 1-D uint16; number of [nulls, empty texts]). Raises
    UserError."""
    import pyarrow

    template = stream.template.replace("\\n", "\n").replace("\\t", "\t")
    parts, skipped = [np.zeros(0, dtype=np.uint32)], [0, 0]
    with explained(stream.name, "a row has no text", "correct it or choose another --text-column"):
        for row in pyarrow.ipc.open_stream(rows).read_all().to_pylist():
            if stream.json_lines and not row["text"].strip():
                continue
            row = json.loads(row["text"]) if stream.json_lines else row
            text, *others = [row[column] for column in stream.columns]
            if stream.template and any(value is not None for value in (text, *others)):
                text = template.format_map({key: "" if v is None else v for key, v in row.items()})
            if (
                text is None or not text.encode()
            ):  # fails for a number, and for half a surrogate pair in JSON
                skipped[text is not None] += 1
            else:
                parts += [np.array([EOT], dtype=np.uint32), *encode(text)]
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), skipped


def tokenized(workers: int, *reader_arguments: Any) -> Iterator[Any]:
    """Starts reader and workers. Yields the facts, then (position, tokens, skipped). Raises
    UserError."""
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.Process(target=read, args=(theirs, *reader_arguments), daemon=True)
    reader.start()
    theirs.close()
    pool = ProcessPoolExecutor(workers, initializer=start_child, initargs=(set_up_tokenizer,))
    pending: deque = deque()
    try:
        pool.submit(
            os.getpid
        )  # starts all; they load the tokenizer while the reader imports `datasets`
        for message in iter(ours.recv, None):
            if isinstance(message, UserError):
                raise message
            if isinstance(message, dict):
                yield message
                continue
            pending.append((message[0], pool.submit(tokenize, *message[1:])))
            if len(pending) > 2 * workers:
                position, future = pending.popleft()
                yield position, *future.result()
        for position, future in pending:
            yield position, *future.result()
    except (BrokenExecutor, EOFError):
        raise UserError(
            "a process was killed (out of memory?); repeat with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        reader.kill()

"""Text to tokens, for fineweb.py: a reader process streams rows, worker processes tokenize them.

Only the reader imports `datasets`, which takes a second."""

import glob
import hashlib
import json
import multiprocessing
import os
import re
import signal
import string
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from support.errors import UserError
from support.tokenizer import EOT, encode, get_tokenizer

SUFFIX = re.compile(r"\.(parquet$|jsonl|csv|txt|md)(\.gz|\.zst)?$", re.IGNORECASE)
BATCH_ROWS = 256  # a stream's saved state depends on it, so a resumed run must use the same
KILLED = "a process was killed (out of memory?); rerun with fewer --workers"


class Stream(NamedTuple):
    """A file, or a split of a dataset."""

    name: str  # for messages
    kind: str  # "dataset", or a file's suffix
    columns: list[str]  # that hold the text: one, unless a template joins several
    template: str  # "" for a single column
    open: Any  # () -> datasets.IterableDataset; None outside the reader


REMEDIES = {  # by a pattern in a library's message
    "BuilderConfig|available configs": "choose one with --config (for FineWeb-Edu --name)",
    "Couldn't cast|too big": "read its files with --input, which infers no types",
    "FieldRef|KeyError|'encode'|indices|subscriptable": "correct it, --text-column or --template",
    "StopIteration": "remove the empty file",
    "too much memory for decoding": "decompress it first",
}


@contextmanager
def explained(
    name: str, problem: str = "cannot be read", remedy: str = "correct it"
) -> Iterator[None]:
    """Turns any library exception into a UserError; their types share no base class."""
    try:
        yield
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if name.startswith("--dataset "):
            remedy = (
                "check names and network and run the same command again; if it is private or "
                "gated, request access on its Hub page and log in with `hf auth login`"
            )
        fitting = (known for pattern, known in REMEDIES.items() if re.search(pattern, line))
        raise UserError(f"{name}: {problem} ({line}); {next(fitting, remedy)}") from None


def template_columns(template: str) -> list[str]:
    """The columns that a template names; [] if it is empty."""
    columns = []
    remedy = "put column names in braces, like {text} or {translation[en]}"
    with explained(f"--template {template!r}", "invalid", remedy):
        for _, field, spec, _ in string.Formatter().parse(template):
            if field is None:  # plain text
                continue
            # Not {text.upper}: attributes are Python's, not the data's.
            match = re.fullmatch(r"([^.[]+)(\[[^]]+\])*", field)
            if not match or "{" in spec:
                raise ValueError("neither a column nor an item of one")
            columns.append(match[1])  # {a[b]} reads column a
        if template and not columns:
            raise ValueError("no column")
    return list(dict.fromkeys(columns))  # each once


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that --input names, in this order; those of a folder or pattern by name."""
    paths: list[str] = []
    for pattern in patterns:
        found = []
        if pattern and Path(pattern).is_dir():
            found = find_in_folder(Path(pattern), is_text)
        elif not Path(pattern).is_file():  # its name may contain [
            found = sorted(glob.glob(pattern, recursive=True))
        paths += found or [pattern]  # a file, or reported below
    for path in paths:
        if "::" in os.path.abspath(path):
            raise UserError(f"--input {path}: `datasets` splits paths at '::'; rename it")
        if not is_text(Path(path)):
            kinds = ".parquet, .jsonl, .csv, .txt or .md (all but the first also .gz, .zst)"
            raise UserError(f"--input {path}: no such file, or not {kinds}")
    return paths


def is_text(path: Path) -> bool:
    return path.is_file() and SUFFIX.search(path.name) is not None


def find_in_folder(folder: Path, usable: Callable[[Path], Any]) -> list[str]:
    """The usable files of a folder and its subfolders, by name. Prints what else it skips."""
    paths = []
    skipped: Counter = Counter()  # number of files by suffix
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.name == "README.md":
            continue
        if usable(path):
            paths.append(str(path))
        elif path.is_symlink() or not path.is_dir():  # rglob doesn't follow links to folders
            skipped[path.suffix or path.name] += 1
    if skipped:
        counts = ", ".join(f"{number} {kind}" for kind, number in skipped.items())
        tqdm.write(f"{folder}: skipped {counts}")
    return paths


def set_up_datasets() -> None:
    import datasets
    import fsspec.compression
    import pyarrow

    datasets.config.TORCH_AVAILABLE = False  # otherwise streaming imports torch
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise 3 s per local file for a request
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(100)  # off: its exceptions say the same

    def open_zstd(file: Any, **_: Any) -> Any:
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")

    # pyarrow reports a truncated file; the zstandard package takes it for a complete one.
    fsspec.compression.register_compression("zstd", open_zstd, "zst", force=True)


def facts_about(name: str, paths: list[str], commit: str | None) -> dict[str, Any]:
    """A source's commit, or what identifies its files; an estimate of its bytes of text."""
    import fsspec

    files = []
    text_bytes = 0.0
    # Estimated bytes of text per byte of a file.
    factors = {".parquet": 1.6 if commit else 3, ".gz": 4, ".zst": 4, ".zip": 4}
    with explained(name):
        for path in paths:
            filesystem, path = fsspec.core.url_to_fs(path)  # local, or the Hub
            size = filesystem.size(path)
            text_bytes += size * factors.get(Path(path).suffix.lower(), 1)
            if not commit:
                ends = filesystem.head(path, 1 << 20) + filesystem.tail(path, 1 << 20)
                files.append([path, size, hashlib.sha256(ends).hexdigest()[:16]])
        if files:  # they may move together
            parent = os.path.commonpath([os.path.dirname(path) for path, _, _ in files])
            for file in files:
                file[0] = Path(file[0]).relative_to(parent).as_posix()
    return {"commit": commit, "files": files, "text_bytes": text_bytes}


def parquet_options(columns: list[str]) -> dict[str, Any]:
    """Options that bound memory, which grows with the size of the file under pre_buffer."""
    from pyarrow.dataset import ParquetFragmentScanOptions

    scan = ParquetFragmentScanOptions(pre_buffer=False)
    return {"columns": columns, "batch_size": BATCH_ROWS, "fragment_scan_options": scan}


def open_files(paths: list[str], text_column: str, template: str) -> tuple[dict, dict[int, Stream]]:
    """-> (facts_about the files, {index: stream}), a stream per file, so errors can name it."""
    from datasets import Features, Value, load_dataset

    columns = template_columns(template) or [text_column or "text"]
    options: dict[str, dict] = {
        "parquet": parquet_options(columns),
        "csv": {
            # All values are text; otherwise 007 becomes 7, and NA a null.
            "features": Features(dict.fromkeys(columns, Value("string"))),
            "keep_default_na": False,
            "index_col": False,  # columns don't shift if rows are longer than the header
            "chunksize": 1000,  # rows
        },
        "jsonl": {"path": "text"},  # lines, which document() parses
        "txt": {"path": "text", "sample_by": "document"},  # not one row per line
        "md": {"path": "text", "sample_by": "document"},
    }
    streams = {}
    for index, path in enumerate(paths):
        kind = SUFFIX.search(path)[1].lower()
        settings = {"path": kind, "split": "train", "streaming": True, **options[kind]}
        opener = partial(load_dataset, data_files=[glob.escape(path)], **settings)
        streams[index] = Stream(path, kind, columns, template, opener)
    return facts_about("--input", paths, None), streams


def open_dataset(
    dataset: str, commit: str | None, config: str, split: str, text_column: str, template: str
) -> tuple[dict, dict[int, Stream]]:
    """-> (facts_about the files, {0: stream of a validation split, if any, 1: of the split})."""
    from datasets import Features, Value, load_dataset_builder
    from huggingface_hub import HfApi

    folder = os.path.realpath(dataset) if Path(dataset).is_dir() else ""
    name = folder or f"--dataset {dataset}"
    if re.search(r"[*?[]|::", folder):
        raise UserError(f"{name}: `datasets` can't read paths with * ? [ or '::'; rename it")
    with explained(name, remedy="correct its README.md or its files"):
        if not (commit or folder):
            commit = HfApi().dataset_info(dataset).sha
        builder = load_dataset_builder(folder or dataset, config or None, revision=commit)
    data_files = builder.config.data_files or {}
    paths = {str(key): files for key, files in data_files.items()}  # split -> its files
    if folder:
        known = {os.path.realpath(path) for files in paths.values() for path in files}
        find_in_folder(Path(folder), lambda path: path.is_dir() or os.path.realpath(path) in known)

    if not split:
        split = next(iter(paths)) if len(paths) == 1 else "train"
    if split not in paths:
        raise UserError(f"{name}: no split {split!r}; --split names one of: {', '.join(paths)}")
    splits = {1: split}
    validation = [key for key in ("validation", "valid", "val", "dev") if key in paths]
    if validation and split == "train":
        splits = {0: validation[0], 1: split}

    if builder.name == "csv":
        builder.config.index_col = False  # as in open_files
    with explained(name):
        rows = builder.as_streaming_dataset(split)
        features = rows.features
        if features is None:  # not declared: infer the columns and types from the first row
            first = next(rows.with_format("arrow").iter(1))
            features = Features.from_arrow_schema(first.schema)
    string_types = [Value(kind) for kind in ("string", "large_string", "string_view")]
    strings = [key for key, feature in features.items() if feature in string_types]
    # Null in all of the first rows: text may follow. And any value of a .csv is text.
    others = [key for key, feature in features.items() if feature == Value("null")]
    if builder.name == "csv" and text_column in set(features) - set(strings):
        others.append(text_column)
    usable = features if template else strings + others  # a template formats values of any type
    default = strings[0] if "text" not in usable and len(strings) == 1 else "text"
    columns = template_columns(template) or [text_column or default]
    missing = [column for column in columns if column not in usable]
    if missing:
        kinds = {key: getattr(value, "dtype", "nested") for key, value in features.items()}
        found = ", ".join(f"{key} ({kind})" for key, kind in kinds.items()) or "none"
        remedy = "--text-column takes a string, --template any"
        if folder and set(missing) & set(features):
            remedy += "; --input infers no types"
        raise UserError(f"{name}: no text in {', '.join(missing)}; its columns: {found}; {remedy}")
    features = Features(features | dict.fromkeys(others, Value("string")))
    if others and builder.info.features:
        builder.info.features = features
    if builder.name == "parquet":
        vars(builder.config).update(parquet_options(columns))
    if builder.name == "csv":  # keep these types: otherwise inferred again every 10,000 rows
        builder.config.features = Features({column: features[column] for column in columns})
    files = []
    streams = {}
    for index, key in splits.items():
        files += paths[key]
        opener = partial(builder.as_streaming_dataset, key)
        streams[index] = Stream(name, "dataset", columns, template, opener)
    return facts_about(name, files, commit), streams


def read(connection: Connection, opener: Callable, position: list) -> None:
    """The reader process: sends the facts, (position, Stream, rows) of each batch, then None.

    position: where to start: [index of the stream, state of its dataset, number of rows before].
    Exceptions are sent as well, for receive() to raise."""
    start_child()
    set_up_datasets()
    try:
        facts, streams = opener()
        connection.send(facts)
        first, *place = position
        for index, stream in streams.items():
            if index < first:
                continue  # all of it is in shards
            if index > first:
                place = [None, 0]  # its start
            sent_stream = stream._replace(open=None)  # workers open nothing
            for before, rows in batches(stream, *place):
                connection.send(([index, *before], sent_stream, rows))
        connection.send(None)
    except Exception as error:
        error.add_note(traceback.format_exc())
        connection.send(error)


def batches(stream: Stream, state: dict | None, row: int) -> Iterator[tuple[list, list[dict]]]:
    """Yields ([state, number of rows] before a batch, its rows)."""
    with explained(stream.name):
        dataset = stream.open().with_format("arrow")
        dataset.load_state_dict(state)
        columns = ["text"] if stream.kind in ("jsonl", "txt", "md") else stream.columns
        for table in dataset.iter(batch_size=BATCH_ROWS):
            yield [state, row], table.select(columns).to_pylist()
            state = dataset.state_dict()
            row += len(table)


def start_child() -> None:
    """Makes this process exit with its parent, even after kill -9. The parent handles Ctrl-C."""
    tqdm.set_lock(threading.RLock())  # a fork shares it: killed, it would keep the parent's locked

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Null(str):
    """A null in a template: it and its items are empty text, in any format."""

    def __getitem__(self, key: Any) -> "Null":
        return self

    def __format__(self, spec: str) -> str:
        return ""


def with_nulls(value: Any) -> Any:
    """The value with Null() for None, at any depth."""
    if value is None:
        return Null()
    if isinstance(value, dict):
        return {key: with_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nulls(item) for item in value]
    return value


def document(stream: Stream, row: dict[str, Any]) -> str:
    """The text of a row, or "" if it has none."""
    if stream.kind in ("jsonl", "txt", "md"):
        text = row["text"].removeprefix("\ufeff")  # a byte order mark
        if stream.kind != "jsonl":
            return text
        if not text.strip():
            return ""
        # Python converts at most 4,300 digits.
        row = json.loads(text, parse_int=lambda n: int(n) if len(n) <= 4300 else n)
    if all(row[column] is None for column in stream.columns):
        return ""
    text = row[stream.columns[0]]
    if stream.template:
        template = stream.template.replace("\\n", "\n").replace("\\t", "\t")
        text = template.format_map(with_nulls(row))
    text.encode()  # raises for a number, and for half a surrogate pair in JSON
    return text


def tokenize(position: list, stream: Stream, rows: list[dict]) -> tuple[Any, ...]:
    """A batch of rows -> (position; tokens, 1-D uint16; number of nulls and empty texts; bytes)."""
    # As in the file: whole lines of .jsonl. +1: a line end, or a comma.
    size = sum(len(str(value).encode()) + 1 for row in rows for value in row.values())
    parts: list[Any] = [[]]  # concatenate needs at least one
    skipped = 0
    for number, row in enumerate(rows, position[2] + 1):  # messages count rows from 1
        with explained(stream.name, f"row {number} has no text"):
            text = document(stream, row)
        if text:
            parts += [[EOT], *encode(text)]
        else:
            skipped += 1
    return position, np.concatenate(parts, dtype=np.uint16, casting="unsafe"), skipped, size


def tokenized(workers: int, opener: Callable, position: list) -> Iterator[Any]:
    """Starts the reader and the workers. Yields the facts, then tokenize()'s results in order."""
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.Process(target=read, args=(theirs, opener, position), daemon=True)
    reader.start()
    theirs.close()  # now only the reader has it, so its death ends recv()
    get_tokenizer()  # forked workers inherit it; meanwhile the reader imports `datasets`
    pool = ProcessPoolExecutor(workers, initializer=start_child)
    pending: deque[Future] = deque()

    def receive() -> Any:
        try:
            message = ours.recv()
        except (EOFError, OSError):  # OSError: killed while sending a message
            raise UserError(KILLED) from None
        if isinstance(message, Exception):
            raise message
        return message

    try:
        yield receive()
        for batch in iter(receive, None):
            pending.append(pool.submit(tokenize, *batch))
            if len(pending) > 2 * workers:  # enough to keep them busy; more would fill memory
                yield pending.popleft().result()
        for future in pending:
            yield future.result()
    except BrokenExecutor:
        raise UserError(KILLED) from None
    finally:
        pool.shutdown(cancel_futures=True)
        reader.kill()
        reader.join()  # a fork holds the lock of --out

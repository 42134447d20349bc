"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                   # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                    # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards --shard-size 10000000
    python fineweb.py --pretokenized 3                  # three ready shards of FineWeb-Edu instead of text
    python fineweb.py --verify --out my_shards          # is every shard still what was written?
    torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 fineweb.py    # on four machines

A document is a row of a parquet file, a line of .jsonl, or a whole .txt file; it is written as 50256 and its tokens.
Documents follow each other across shard ends and none is dropped; null and empty ones are passed over and counted.
Shard 0 is for validation. FineWeb-Edu: Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu.

Parallel: workers read and tokenize units (rows of parquet, spans of bytes) on their own; this process only lays the
results end to end. So the shards are the same bytes whatever the number of workers, and where a unit ends is free.

Restartable: manifest.json is rewritten after each finished shard and says how many tokens of which unit are in finished
shards. The same command, run again after any kind of end, goes on from there and makes the same bytes.

Several machines: each rank (RANK, WORLD_SIZE) takes every WORLD_SIZE-th source file, writes every WORLD_SIZE-th shard
and keeps its own manifest.rankN.json; so ranks share a folder and need not talk. Rank 0 merges the manifests at the end.
"""

import errno
import glob
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import InputError, atomic_write, first_line, parse_args, run
from shards import SHARD_NAME, open_shard
from tokenizer import EOT, SHA256, bpe_files, get_tokenizer

REPOSITORY = "HuggingFaceFW/fineweb-edu"
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".txt.zst")
UNIT_BYTES = 4 << 20  # of text in a unit of work: about a million tokens, a third of a second
PIECE_CHARS = 1 << 18  # longer texts are tokenized in pieces of about this length: bounds memory, see CUT
BYTES_A_TOKEN, BYTES_A_HUB_BYTE, BYTES_A_COMPRESSED_BYTE = 4.5, 1.6, 4  # of English text: to estimate the disk needed
RETRY_SECONDS = (1, 2, 4)  # the waits before the Hub is asked again


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or text of one's own, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"
    """Part of FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10."""
    input: tuple[str, ...] = ()
    """Local .parquet, .jsonl and .txt files (the latter two also .gz, .zst), folders or patterns, not FineWeb-Edu."""
    text_column: str = "text"
    """Where a parquet row or a jsonl object keeps its text."""
    out: str = "edu_fineweb10B"
    """Folder for the shards."""
    shard_size: int = 100_000_000
    """Tokens a shard; the last one is shorter."""
    workers: int = 0
    """Processes that tokenize; 0: one a core."""
    max_shards: int = 0
    """Stop after this many shards, validation included; 0: no limit. A later run with more goes on."""
    pretokenized: int = 0
    """Fetch this many ready .bin shards of FineWeb-Edu instead, validation included, 100,000,000 tokens each."""
    verify: bool = False
    """Only check the shards in --out against its manifest.json."""


# ---------------------------------------------------------------------------------------------------------------------
# Source files


def local_files(patterns: Iterable[str]) -> list[tuple[str, int]]:
    """(path, bytes) of the files that --input names: as given; folders and patterns by name. Raises InputError."""
    paths: list[Path] = []
    for pattern in patterns:
        if Path(pattern).is_dir():
            found = sorted(path for path in Path(pattern).rglob("[!.]*") if path.name.endswith(SUFFIXES))
        else:
            found = [Path(pattern)] if Path(pattern).exists() else sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not found:
            raise InputError(f"--input {pattern}: no such file, or no {', '.join(SUFFIXES)} in it")
        paths += found
    for i, path in enumerate(paths):
        if not path.name.endswith(SUFFIXES):
            raise InputError(f"{path}: read are {', '.join(SUFFIXES)}")
        if path in paths[:i]:
            raise InputError(f"{path}: named twice by --input")
    return [(str(path), path.stat().st_size) for path in paths]


def hub_files(name: str) -> tuple[str, list[tuple[str, int]]]:
    """The newest commit of FineWeb-Edu, and (path, bytes) of a part's parquet files in it. Raises InputError."""
    from huggingface_hub import HfApi

    folder = f"sample/{name.removeprefix('sample-')}" if name.startswith("sample-") else f"data/{name}"
    api = HfApi()
    commit = ask_hub(REPOSITORY, lambda: api.dataset_info(REPOSITORY).sha)
    what = f"--name {name}: {folder} in {REPOSITORY}"
    tree = ask_hub(what, lambda: list(api.list_repo_tree(REPOSITORY, folder, repo_type="dataset", revision=commit)))
    files = sorted((entry.path, entry.size) for entry in tree if entry.path.endswith(".parquet"))
    if not files:
        raise InputError(f"{what}: no .parquet files there")
    return commit, files


def ask_hub(what: str, call: Callable[[], Any]) -> Any:
    """call(), made again when the Hub or the way to it fails. Raises InputError when that does not help."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # its retries are told in many lines, its failure below in one
    disable_progress_bars()
    for wait in (*RETRY_SECONDS, None):
        try:
            return call()
        except Exception as error:  # the Hub's, its HTTP library's, the socket's: they share no base
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if wait is None or constants.HF_HUB_OFFLINE or (status < 500 and status not in (408, 429)):
                raise InputError(f"{what}: the Hub could not be asked ({first_line(error)}); what has arrived is kept, "
                                 "the same command goes on; --input takes local files") from None
        time.sleep(wait)


def fetch(repository: str, commit: str, name: str, folder: Path) -> Path:
    """folder/name, a file of the Hub; an interrupted transfer goes on where it stopped. Raises InputError."""
    from huggingface_hub import hf_hub_download

    options = {"repo_type": "dataset", "revision": commit, "local_dir": folder}
    return Path(ask_hub(name, lambda: hf_hub_download(repository, name, **options)))


def make_local(index: int, name: str, commit: str | None, folder: Path) -> Path:
    """A source file as a local one without compression, in `folder`. Raises InputError.

    So a file that can't be read from its middle (.gz, .zst) becomes units of work like any other, in little memory.
    """
    if commit:
        return fetch(REPOSITORY, commit, name, folder)
    import pyarrow

    copy = folder / f"{index:06d}{Path(Path(name).stem).suffix}"
    if not copy.exists():
        try:
            with pyarrow.input_stream(name, compression="detect") as source, atomic_write(copy) as file:
                shutil.copyfileobj(source, file, 1 << 20)
        except OSError as error:
            if error.errno:
                raise
            raise InputError(f"{name}: damaged or truncated ({first_line(error)})") from None
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# Units of work: the spans that workers read

# GPT-2's tokens never cross the boundary of its pre-tokenizer's words, and one always lies before a whitespace character
# that a non-whitespace one follows: a word may begin with that one space, but never holds it after anything else. So a
# text may be cut there and its parts tokenized apart: the same tokens. (In bytes: without the non-ASCII whitespace.)
CUT = re.compile(r"[ \n](?=\S)")
CUT_BYTES = {".txt": re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])"), ".jsonl": re.compile(rb"\n")}


class Span(NamedTuple):
    """A stretch of a local file: rows [start, end) of a .parquet; bytes [start, end) of others, see read_bytes."""

    file: int  # which of the source files
    name: str  # that one's name, for messages
    path: Path
    start: int
    end: int
    size: int  # about so many bytes of text


def row_groups(path: Path, name: str, text_column: str) -> list[tuple[int, int]]:
    """(rows, bytes of text) of each row group. Raises InputError when the file is no parquet or lacks the column."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{name}: no parquet file, or a truncated one ({first_line(error)})") from None
    if text_column not in schema.names:
        raise InputError(f"{name}: no column {text_column!r}; --text-column names one of: {', '.join(schema.names)}")
    if "string" not in str(schema.field(text_column).type):
        raise InputError(f"{name}: column {text_column!r} holds {schema.field(text_column).type}, not text; "
                         f"--text-column names one of: {', '.join(schema.names)}")
    groups = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        sizes = {column.path_in_schema: column.total_uncompressed_size for column in columns}
        groups.append((group.num_rows, sizes.get(text_column, 0)))
    return groups


def cut_file(file: int, name: str, path: Path, text_column: str) -> Iterator[Span]:
    """The spans of a file, of at most about UNIT_BYTES. Raises InputError."""
    if path.suffix == ".parquet":
        first = 0
        for rows, size in row_groups(path, name, text_column):
            step = max(rows * UNIT_BYTES // max(size, 1), 1)
            for start in range(first, first + rows, step):
                yield Span(file, name, path, start, min(start + step, first + rows), size * min(step, rows) // rows)
            first += rows
    else:
        size = path.stat().st_size
        for start in range(0, max(size, 1), UNIT_BYTES):
            end = min(start + UNIT_BYTES, size)
            yield Span(file, name, path, start, end, end - start)


def make_units(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Puts small spans together until they make UNIT_BYTES."""
    unit, size = [], 0
    for span in spans:
        unit.append(span)
        size += span.size + 1024  # even an empty file takes time
        if size >= UNIT_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def read_bytes(span: Span) -> tuple[int, bytes]:
    """(offset, bytes) from the first place to cut at or after span.start, up to the first at or after span.end."""
    if span.end == 0:  # an empty file, which can't be mapped
        return 0, b""
    with open(span.path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cut = CUT_BYTES[span.path.suffix]

    def next_cut(offset: int) -> int:
        match = cut.search(data, offset) if offset else None
        return match.start() if match else len(data) if offset else 0

    start, end = next_cut(span.start), next_cut(span.end)
    return start, data[start:end]


def read_texts(span: Span, text_column: str) -> Iterator[str | None]:
    """The texts of a span: of a .txt, its part of the one text. Raises InputError naming the file and the place."""
    if span.path.suffix == ".parquet":
        yield from read_rows(span, text_column)
    elif span.path.suffix == ".jsonl":
        yield from read_lines(span, text_column)
    else:
        offset, data = read_bytes(span)
        try:
            yield data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{span.name}: not UTF-8 at byte {offset + error.start}") from None


def read_rows(span: Span, text_column: str) -> Iterator[str | None]:
    import pyarrow
    import pyarrow.parquet

    row = 0  # of the next batch
    try:
        with pyarrow.parquet.ParquetFile(span.path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= span.start or row >= span.end:
                    row += rows
                    continue
                for batch in file.iter_batches(256, row_groups=[group], columns=[text_column], use_threads=False):
                    for i in range(max(span.start - row, 0), min(span.end - row, len(batch))):
                        try:
                            yield batch.column(0)[i].as_py()
                        except UnicodeDecodeError:
                            raise InputError(f"{span.name}, row {row + i}: not UTF-8") from None
                    row += len(batch)
                    if row >= span.end:
                        break
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{span.name}: damaged after row {row} ({first_line(error)})") from None


def read_lines(span: Span, text_column: str) -> Iterator[str | None]:
    offset, data = read_bytes(span)
    at = 0
    for line in data.split(b"\n"):
        try:
            if line.strip():
                value = json.loads(line.decode("utf-8"))
                text = value[text_column]
                if not isinstance(text, str | None):
                    raise TypeError(f"{text_column!r} holds {type(text).__name__}, not text")
                (text or "").encode("utf-8")  # JSON can spell half a surrogate pair, which is no character
                yield text
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, KeyError):
                what = f"no {text_column!r}; --text-column names one of: {', '.join(value)}"
            elif isinstance(error, UnicodeError):
                what = f"not UTF-8 ({error.reason})"
            else:
                what = f"no JSON object with text ({first_line(error)})"
            with open(span.path, "rb") as file:
                number = sum(file.readline() != b"" for _ in iter(lambda: file.tell() < offset + at + 1, False))
            raise InputError(f"{span.name}, line {number}: {what}") from None
        at += len(line) + 1


def encode(text: str) -> Iterator[np.ndarray]:
    """encode_ordinary(text) as arrays of uint32, without a list of ints; a long text in pieces, see CUT."""
    start = 0
    while start < len(text):
        match = CUT.search(text, start + PIECE_CHARS)
        end = match.start() if match else len(text)
        yield get_tokenizer().encode_to_numpy(text[start:end], disallowed_special=())  # nothing in a text is special
        start = end


def tokenize(unit: list[Span], text_column: str) -> tuple[np.ndarray, int, int]:
    """What a worker does. -> (tokens of the documents, 1-D uint16; how many nulls and how many empties it passed over)"""
    begin = np.array([EOT], dtype=np.uint32)
    parts, nulls, empties = [begin[:0]], 0, 0
    for span in unit:
        goes_on = span.path.suffix == ".txt" and span.start > 0
        for text in read_texts(span, text_column):
            if text is None:
                nulls += 1
            elif text:
                parts += [*([] if goes_on else [begin]), *encode(text)]
            elif not goes_on:
                empties += 1
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), nulls, empties


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block, or with this process however it ends."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, initializer=_begin_worker)
    try:
        pool.submit(bpe_files).result()  # starts them before this process has threads, which a fork would not copy
        yield pool
    except BrokenProcessPool:
        raise InputError("a worker was killed, for want of memory perhaps: the same command goes on; fewer --workers "
                         "need less") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()


def _begin_worker() -> None:
    def outlive_no_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=outlive_no_parent, daemon=True).start()


def in_order(pool: ProcessPoolExecutor, function: Callable, tasks: Iterable[tuple], ahead: int) -> Iterator[tuple]:
    """(task, function(*task)) of every task, in order, with at most `ahead` + 1 of them under way or waiting."""
    pending: deque = deque()
    for task in tasks:
        pending.append((task, pool.submit(function, *task)))
        if len(pending) > ahead:
            task, future = pending.popleft()
            yield task, future.result()
    while pending:
        task, future = pending.popleft()
        yield task, future.result()

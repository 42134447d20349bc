"""Where fineweb.py's text comes from: source files, here or on the Hub, the spans that they are cut into, and the
tokens of a span.

A worker process reads and tokenizes one span at a time (`tokenize`), knowing nothing of the others; a document that two
spans share is cut where GPT-2's tokenizer would cut it anyway, so that the tokens are the same.
"""

import errno
import glob
import itertools
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.cli import InputError, first_line
from support.files import atomic_write
from support.tokenizer import EOT, get_tokenizer

REPOSITORY = "HuggingFaceFW/fineweb-edu"
COMPRESSED = (".gz", ".zst")
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".txt.zst")
SPAN_BYTES = 4 << 20  # of text: a third of a second of a worker's time
PIECE_CHARS = 1 << 18  # longer texts are tokenized in pieces of about this length
RETRY_SECONDS = (1, 4, 16, 64)  # the waits before the Hub is asked again in the middle of a run; at its start: 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

File = tuple[str, int]  # a source file: its path, here or in the Hub's repository, and its bytes

# ---------------------------------------------------------------------------------------------------------------------
# Source files


def local_files(patterns: Iterable[str]) -> list[File]:
    """The files that --input names: as given; those of folders and patterns by name. Raises InputError."""
    paths: list[Path] = []
    for pattern in patterns:
        if Path(pattern).is_dir():
            found = sorted(path for path in Path(pattern).rglob("[!.]*") if path.name.endswith(SUFFIXES))
        else:
            found = [Path(pattern)] if Path(pattern).exists() else sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not found:
            raise InputError(f"--input {pattern}: no such file, or no {', '.join(SUFFIXES)} in it")
        paths += found
    for path in paths:
        if not path.name.endswith(SUFFIXES) or not path.is_file():
            raise InputError(f"{path}: read are {', '.join(SUFFIXES)}")
    if len(set(paths)) < len(paths):
        raise InputError(f"--input names {next(path for path in paths if paths.count(path) > 1)} twice")
    return [(str(path), path.stat().st_size) for path in paths]


def hub_files(name: str) -> tuple[str, list[File]]:
    """FineWeb-Edu's newest commit, and the parquet files of a part of it. Raises InputError."""
    from huggingface_hub import HfApi

    folder = f"sample/{name.removeprefix('sample-')}" if name.startswith("sample-") else f"data/{name}"
    api, what = HfApi(), f"--name {name}: {REPOSITORY}, {folder}"
    commit = ask_hub(what, lambda: api.dataset_info(REPOSITORY).sha)
    tree = ask_hub(what, lambda: list(api.list_repo_tree(REPOSITORY, folder, repo_type="dataset", revision=commit)))
    return commit, sorted((file.path, file.size) for file in tree if file.path.endswith(".parquet"))


def ask_hub(what: str, call: Callable[[], Any], waits: tuple[int, ...] = RETRY_SECONDS[:1]) -> Any:
    """call(), made again while the Hub or the way to it fails. Raises InputError when that does not help."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # its retries are told in many lines, its failure below in one
    disable_progress_bars()
    for wait in (*waits, None):
        try:
            return call()
        except Exception as error:  # the Hub's, its HTTP library's, the socket's: they share no base
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if wait is None or constants.HF_HUB_OFFLINE or (status < 500 and status not in (408, 429)):
                raise InputError(f"{what}: the Hub could not be asked ({first_line(error)}); the same command tries "
                                 "again and goes on, --input takes local files") from None
        time.sleep(wait)


def fetch(repository: str, commit: str, name: str, folder: Path) -> Path:
    """folder/name, a file of the Hub; a transfer that breaks off goes on from there. Raises InputError."""
    from huggingface_hub import hf_hub_download

    options = {"repo_type": "dataset", "revision": commit, "local_dir": folder}
    return Path(ask_hub(name, lambda: hf_hub_download(repository, name, **options), RETRY_SECONDS))


def make_local(file: tuple[int, str], commit: str | None, folder: Path) -> Path:
    """Source file (index, path) if it is here and plain; else a copy in `folder`, to be read from its middle."""
    index, name = file
    if commit:
        return fetch(REPOSITORY, commit, name, folder)
    if not name.endswith(COMPRESSED):
        return Path(name)
    import pyarrow

    copy = folder / f"{index:06d}_{Path(name).stem}"
    if not copy.exists():
        try:
            with pyarrow.input_stream(name, compression="detect") as source, atomic_write(copy) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except OSError as error:
            if error.errno:  # the disk's, not pyarrow's
                raise
            raise InputError(f"{name}: damaged or truncated ({first_line(error)})") from None
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# Spans of files: what a worker reads and tokenizes at a time

# GPT-2 tokenizes word by word, and one of its words begins wherever a whitespace character is followed by another kind
# (tokenizer.SPLIT_PATTERN). So a text may be cut there, and its parts tokenized apart: the tokens are the same.
CUT = re.compile(r"[ \n](?=\S)")
CUT_BYTES = {".txt": re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])"), ".jsonl": re.compile(rb"\n")}


class Span(NamedTuple):
    """Part of a file: rows [start, end) of a .parquet; of others, bytes, each end moved on to the next place to cut."""

    file: int  # which of the source files
    path: Path  # it, or its local copy
    start: int
    end: int


def row_groups(path: Path, text_column: str) -> list[tuple[int, int]]:
    """(rows, bytes of text) of each row group. Raises InputError when the file is no parquet or lacks the column."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: no parquet file, or a truncated one ({first_line(error)})") from None
    if text_column not in schema.names or "string" not in str(schema.field(text_column).type):
        raise InputError(f"{path}: no text in a column {text_column!r}; --text-column names one of: "
                         f"{', '.join(f'{field.name} ({field.type})' for field in schema)}")
    groups = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_column)
        groups.append((group.num_rows, size))
    return groups


def cut_file(file: int, path: Path, text_column: str, begin: int = 0) -> Iterator[Span]:
    """The spans of a file from `begin` on, of about SPAN_BYTES, none across row groups. Raises InputError."""
    stretches = [(0, path.stat().st_size or 1, SPAN_BYTES)]  # (first, last, step)
    if path.suffix == ".parquet":
        stretches, first = [], 0
        for rows, size in row_groups(path, text_column):
            # a reader passes over the rows before its own: in a huge group longer spans, so that they don't pass often
            span_bytes = min(max(size // 32, SPAN_BYTES), 16 * SPAN_BYTES)
            stretches.append((first, first + rows, max(rows * span_bytes // max(size, 1), 1)))
            first += rows
    for first, last, step in stretches:
        for start in range(max(first, begin), last, step):
            yield Span(file, path, start, min(start + step, last))


def read_bytes(span: Span) -> tuple[int, bytes]:
    """(offset, bytes): from the first place to cut at or after `start` to the first one at or after `end`."""
    with open(span.path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # can't be mapped
            return 0, b""
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def next_cut(offset: int) -> int:
        match = CUT_BYTES[span.path.suffix].search(data, offset)
        return match.start() if match else len(data)

    start = next_cut(span.start) if span.start else 0
    return start, data[start : next_cut(span.end)]


def read_text(span: Span, text_column: str) -> Iterator[str]:
    """The part of a .txt file's text. Raises InputError naming the place where it is not UTF-8."""
    offset, data = read_bytes(span)
    try:
        yield data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{span.path}: not UTF-8 at byte {offset + error.start}") from None


def read_lines(span: Span, text_column: str) -> Iterator[str | None]:
    """The texts of .jsonl lines. Raises InputError naming the line that has none."""
    at, data = read_bytes(span)
    for line in data.split(b"\n"):
        value, problem = {}, ""
        try:
            if line.strip():
                value = json.loads(line.decode("utf-8"))
                text = value[text_column]
                if not isinstance(text, str | None):
                    raise TypeError(f"{text_column!r} is {type(text).__name__}")
                (text or "").encode("utf-8")  # JSON can spell half a surrogate pair
                yield text
        except UnicodeError as error:
            problem = f"not UTF-8 ({error.reason})"
        except KeyError:
            problem = f"no {text_column!r}; --text-column names one of: {', '.join(value)}"
        except (ValueError, TypeError) as error:
            problem = f"no JSON object with a text ({first_line(error)})"
        if problem:
            with open(span.path, "rb") as file:
                number = 1 + sum(end <= at for end in itertools.accumulate(map(len, file)))
            raise InputError(f"{span.path}, line {number}: {problem}")
        at += len(line) + 1


def read_rows(span: Span, text_column: str) -> Iterator[str | None]:
    """The texts of .parquet rows. Raises InputError naming the row that can't be read."""
    import pyarrow
    import pyarrow.parquet

    row = span.start
    try:
        with pyarrow.parquet.ParquetFile(span.path, buffer_size=1 << 20) as file:
            group, skip = 0, row
            while skip >= (rows := file.metadata.row_group(group).num_rows):
                group, skip = group + 1, skip - rows
            # read and decoded little by little: a row group may be larger than memory
            for batch in file.iter_batches(256, row_groups=[group], columns=[text_column], use_threads=False):
                for value in batch.column(0)[skip : skip + span.end - row]:
                    yield value.as_py()
                    row += 1
                skip = max(skip - len(batch), 0)
                if row == span.end:
                    break
    except UnicodeDecodeError:
        raise InputError(f"{span.path}, row {row} from 0: not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{span.path}: damaged near row {row} ({first_line(error)})") from None


READERS = {".txt": read_text, ".jsonl": read_lines, ".parquet": read_rows}


def encode(text: str) -> Iterator[np.ndarray]:
    """tiktoken's encode_ordinary(text) as uint32 arrays. A long text goes in pieces: they bound memory, and a million
    spaces in a row, inside a piece, would overflow tiktoken's stack."""
    start = 0
    while start < len(text):
        match = CUT.search(text, start + PIECE_CHARS)
        end = match.start() if match else len(text)
        yield get_tokenizer().encode_to_numpy(text[start:end], disallowed_special=())  # <|endoftext|> is plain text
        start = end


def tokenize(span: Span, text_column: str) -> tuple[np.ndarray, list[int]]:
    """A worker's task. -> (tokens of the documents, 1-D uint16; numbers of [nulls, empties] passed over)"""
    parts, skipped = [np.zeros(0, dtype=np.uint32)], [0, 0]
    begin = [] if span.path.suffix == ".txt" and span.start else [np.array([EOT], dtype=np.uint32)]
    for text in READERS[span.path.suffix](span, text_column):
        if text:
            parts += [*begin, *encode(text)]
        elif begin:
            skipped[text is not None] += 1
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), skipped

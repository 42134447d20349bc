"""Where fineweb.py's text comes from: source files, how documents stand in them, the spans that they are cut into, and
the tokens of a span. (What the Hub has to do with it stands in hub.py.)

A worker process reads and tokenizes one span at a time (`tokenize`), knowing nothing of the others; a document that two
spans share is cut where GPT-2's tokenizer would cut it anyway, so that the tokens are the same.
"""

import errno
import functools
import glob
import io
import itertools
import json
import mmap
import os
import re
import shutil
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.cli import InputError, first_line
from support.files import atomic_write
from support.tokenizer import EOT, encode

COMPRESSED = (".gz", ".zst")
SUFFIXES = (".parquet", *(kind + end for kind in (".jsonl", ".txt", ".md") for end in ("", *COMPRESSED)))
SPAN_BYTES = 4 << 20  # of text: a third of a second of a worker's time
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

File = tuple[str, int]  # a source file: its path, here or in the Hub's repository, and its bytes


class Layout(NamedTuple):
    """How documents stand in source files."""

    column: str = ""  # of a parquet row or a jsonl object; "" where a template joins several
    template: str = ""  # "{question}\n{answer}"
    datasets: bool = False  # as that library reads files: a line of .txt is a document; what a .jsonl line lacks, null

    @property
    def columns(self) -> list[str]:
        """Those that a document is made of. Raises InputError for a template that names none."""
        return template_columns(self.template) if self.template else [self.column]

    def document(self, row: Mapping[str, Any]) -> str | None:
        """A row's text; None for a null. In a template a null is empty, unless all are null. Raises InputError."""
        if not self.template:
            return row[self.column]
        values = {column: "" if row[column] is None else row[column] for column in self.columns}
        if all(row[column] is None for column in values):
            return None
        try:
            return self.template.format_map(values)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise InputError(f"--template {self.template!r}: a row does not fit it ({first_line(error)})") from None


@functools.cache
def template_columns(template: str) -> list[str]:
    """The columns that a template names, each once. Raises InputError."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InputError(f"--template {template!r}: {error}; a brace itself is written twice") from None
    columns = list(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))
    if not columns or not all(columns):
        raise InputError(f"--template {template!r}: columns stand in braces, like {{text}}")
    return columns


@dataclass(frozen=True)
class Source:
    """Where text comes from; manifest.json keeps it."""

    name: str  # "files" or "folder", here; or a repository of the Hub
    files: tuple[File, ...]  # those of the validation split first
    layout: Layout
    dataset: str = ""  # the repository, or the absolute path of --dataset's folder
    commit: str | None = None  # of the repository; None when the files are here
    config: str = ""
    split: str = ""
    validation: str = ""  # the split that makes shard 0, if there is one
    first_train: int = 0  # the files before this one are that split's; of a stream, the pieces
    stream: bool = False  # the library reads the files, since we don't read their kind


# ---------------------------------------------------------------------------------------------------------------------
# Source files


def local_files(patterns: Iterable[str]) -> list[File]:
    """The files that --input names: as given; those of folders and patterns by name. Raises InputError."""
    paths: list[Path] = []
    for pattern in patterns:
        if Path(pattern).is_dir():
            found = sorted(path for path in Path(pattern).rglob("[!.]*")
                           if path.name.endswith(SUFFIXES) and path.name != "README.md")
        else:
            found = [Path(pattern)] if Path(pattern).exists() else sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not found:
            raise InputError(f"--input {pattern}: no such file, or no {', '.join(SUFFIXES)} in it")
        paths += found
    for path in paths:
        if not path.name.endswith(SUFFIXES) or not path.is_file():
            raise InputError(f"{path}: read are {', '.join(SUFFIXES)}; --dataset FOLDER reads .csv and others, too; "
                             "turn .html, .pdf and the like into text first")
    if len(set(paths)) < len(paths):
        raise InputError(f"--input names {next(path for path in paths if paths.count(path) > 1)} twice")
    return [(str(path), path.stat().st_size) for path in paths]


def unpack(path: Path, copy: Path) -> None:
    """Writes a compressed file's content to `copy`, unless it is there. Raises InputError."""
    import pyarrow

    if copy.exists():
        return
    try:
        with pyarrow.input_stream(path, compression="detect") as source, atomic_write(copy) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError as error:
        if error.errno:  # the disk's, not pyarrow's
            raise
        raise InputError(f"{path}: damaged or truncated ({first_line(error)})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Spans of files: what a worker reads and tokenizes at a time

# Some of the places where a text may be cut (tokenizer.CUT), in UTF-8; lines are documents.
CUT_BYTES = dict.fromkeys(("json", "lines"), re.compile(rb"\n"))
CUT_BYTES["text"] = re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])")


class Span(NamedTuple):
    """Part of a file: rows [start, end) of a .parquet; of others, bytes, each end moved on to the next place to cut."""

    file: int  # which of the source files
    path: Path  # it, or its local copy
    start: int
    end: int


def kind_of(path: Path, layout: Layout) -> str:
    """How a plain source file is read: "rows", "json", "lines", or as one "text"."""
    return {".parquet": "rows", ".jsonl": "json"}.get(path.suffix, "lines" if layout.datasets else "text")


def is_text(kind: Any) -> bool:
    """True for the pyarrow types whose values are strings."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def row_groups(path: Path, layout: Layout) -> list[tuple[int, int]]:
    """(rows, bytes of text) of each row group. Raises InputError when the file is no parquet or lacks a column."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: no parquet file, or a truncated one ({first_line(error)})") from None
    for name in layout.columns:
        if name not in schema.names or not is_text(schema.field(name).type):
            raise InputError(f"{path}: no text in a column {name!r}; --text-column names one of: "
                             f"{', '.join(f'{field.name} ({field.type})' for field in schema)}")
    groups = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in layout.columns)
        groups.append((group.num_rows, size))
    return groups


def cut_file(file: int, path: Path, layout: Layout, begin: int = 0) -> Iterator[Span]:
    """The spans of a file from `begin` on, of about SPAN_BYTES, none across row groups. Raises InputError."""
    stretches = [(0, path.stat().st_size or 1, SPAN_BYTES)]  # (first, last, step)
    if path.suffix == ".parquet":
        stretches, first = [], 0
        for rows, size in row_groups(path, layout):
            # a reader passes over the rows before its own: in a huge group longer spans, so that they don't pass often
            span_bytes = min(max(size // 32, SPAN_BYTES), 16 * SPAN_BYTES)
            stretches.append((first, first + rows, max(rows * span_bytes // max(size, 1), 1)))
            first += rows
    for first, last, step in stretches:
        for start in range(max(first, begin), last, step):
            yield Span(file, path, start, min(start + step, last))


def read_bytes(span: Span, layout: Layout) -> tuple[int, bytes, bool]:
    """(offset, bytes, more): from the first place to cut at or after `start` to the first one at or after `end`.

    more: does the file go on there?"""
    cut = CUT_BYTES[kind_of(span.path, layout)]
    with open(span.path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # can't be mapped
            return 0, b"", False
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def next_cut(offset: int) -> int:
        match = cut.search(data, offset)
        return match.start() if match else len(data)

    start, end = next_cut(span.start) if span.start else 0, next_cut(span.end)
    return start, data[start:end], end < len(data)


def read_text(span: Span, layout: Layout) -> Iterator[str]:
    """The part of a .txt file's text. Raises InputError naming the place where it is not UTF-8."""
    offset, data, _ = read_bytes(span, layout)
    try:
        yield data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{span.path}: not UTF-8 at byte {offset + error.start}") from None


def read_lines(span: Span, layout: Layout) -> Iterator[str]:
    """The lines of a .txt file, each a document, as `datasets` reads it: \\r, too, ends a line. Raises InputError."""
    at, data, more = read_bytes(span, layout)
    if not data:  # the span lies within a line
        return
    begin = 1 if span.start else 0  # past the end of the line before
    try:
        text = data[begin:].decode("utf-8") + ("\n" if more else "")
    except UnicodeDecodeError as error:
        raise InputError(f"{span.path}: not UTF-8 at byte {at + begin + error.start}") from None
    yield from (line.removesuffix("\n") for line in io.StringIO(text, newline=None))


def read_json(span: Span, layout: Layout) -> Iterator[str | None]:
    """The texts of .jsonl lines. Raises InputError naming the line that has none."""
    at, data, _ = read_bytes(span, layout)
    for line in data.split(b"\n"):
        value, problem = {}, ""
        try:
            if line.strip():
                value = json.loads(line.decode("utf-8"))
                row = {column: value.get(column) if layout.datasets else value[column] for column in layout.columns}
                for column, text in row.items():
                    if not isinstance(text, str | None):
                        raise TypeError(f"{column!r} is {type(text).__name__}")
                    (text or "").encode("utf-8")  # JSON can spell half a surrogate pair
                yield layout.document(row)
        except UnicodeError as error:
            problem = f"not UTF-8 ({error.reason})"
        except KeyError as error:
            problem = f"no {error}; --text-column names one of: {', '.join(value)}"
        except (ValueError, TypeError, AttributeError) as error:
            problem = f"no JSON object with a text ({first_line(error)})"
        if problem:
            with open(span.path, "rb") as file:
                number = 1 + sum(end <= at for end in itertools.accumulate(map(len, file)))
            raise InputError(f"{span.path}, line {number}: {problem}")
        at += len(line) + 1


def read_rows(span: Span, layout: Layout) -> Iterator[str | None]:
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
            for batch in file.iter_batches(256, row_groups=[group], columns=layout.columns, use_threads=False):
                columns = [batch.column(name)[skip : skip + span.end - row] for name in layout.columns]
                for values in zip(*columns, strict=True):
                    yield layout.document(dict(zip(layout.columns, (value.as_py() for value in values), strict=True)))
                    row += 1
                skip = max(skip - len(batch), 0)
                if row == span.end:
                    break
    except UnicodeDecodeError:
        raise InputError(f"{span.path}, row {row} from 0: not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{span.path}: damaged near row {row} ({first_line(error)})") from None


READERS = {"text": read_text, "lines": read_lines, "json": read_json, "rows": read_rows}


def tokenize(span: Span, layout: Layout) -> tuple[np.ndarray, list[int]]:
    """A worker's task. -> (tokens of the documents, 1-D uint16; numbers of [nulls, empties] passed over)"""
    parts, skipped = [np.zeros(0, dtype=np.uint32)], [0, 0]
    kind = kind_of(span.path, layout)
    begin = [] if kind == "text" and span.start else [np.array([EOT], dtype=np.uint32)]
    for text in READERS[kind](span, layout):
        if text:
            parts += [*begin, *encode(text)]
        elif begin:
            skipped[text is not None] += 1
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe"), skipped

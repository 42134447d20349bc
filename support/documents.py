"""Reads documents for fineweb.py, from files (--input) or from a dataset of the Hub (--dataset).

Documents come in batches, each with the position where it begins, from which a later run can go on.
"""

import csv
import glob
import io
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from support.errors_and_signals import UserError
from support.shards import NO_TEXT, SUFFIX, not_utf8
from support.tokenizer import LEARN_CHARS

BATCH_ROWS = 256  # documents in a batch
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
HUB_REMEDY = "check the names and the network; if it is private or gated, run `hf auth login`"
TOKENS_PER_BYTE = {".parquet": 0.35, ".gz": 0.8, ".zst": 0.8}  # roughly; other files have 0.25

# (the number of a stream, a position in it, the documents from there on). A row may have no text.
Batches = Iterator[tuple[int, Any, list[str | None]]]


def as_one_line(where: str, error: Exception, remedy: str) -> UserError:
    """A library's exception for the user."""
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{where}: {cause:.400}; {remedy}")


@contextmanager
def any_error_as_user_error(where: str, remedy: str) -> Iterator[None]:
    """Turns exceptions of a library into one line. They have no base class in common."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise as_one_line(where, error, remedy) from None


class Source:
    """Documents to tokenize, in streams. Files and Dataset are the two kinds of sources.

    A stream is a file, or a split of a dataset. A position in it is a number of rows of a file, or
    what `datasets` calls the state of a split, or None for the beginning."""

    name: str  # as manifest.json has it: files, or the name of a dataset on the Hub
    identity: dict[str, Any]  # for manifest.json: what tells this text from another
    sizes: list[tuple[str, int]]  # (name, bytes) of its files
    has_validation_split: bool  # if so, it is stream 0
    stream_count: int

    def open(self) -> None:
        """Prepares reading. Worker processes must have been started before."""

    def read_stream(self, stream: int, position: Any) -> Iterator[tuple[Any, list[str | None]]]:
        """Yields each batch of documents from a position on, as (the position after it, batch)."""
        raise NotImplementedError

    def read_from(self, stream: int, position: Any) -> Batches:
        """Reads the documents from a position in a stream on, and those of all later streams."""
        for number in range(stream, self.stream_count):
            yield from self.read_one_stream(number, position if number == stream else None)

    def read_one_stream(self, stream: int, position: Any = None) -> Batches:
        """Reads the documents of one stream, from a position on."""
        for after, documents in self.read_stream(stream, position):
            yield stream, position, documents
            position = after

    def texts_to_learn_from(self) -> Iterator[str]:
        """Yields text from all over the training text, from which a vocabulary is learned."""
        raise NotImplementedError

    def estimate_tokens(self) -> float:
        """Roughly how many tokens it has, by the sizes of its files."""
        return sum(TOKENS_PER_BYTE.get(Path(n).suffix.lower(), 0.25) * b for n, b in self.sizes)


# --------------------------------------------------------------------------------------------------
# Files


class Files(Source):
    """The files that --input names, but not `skip`. `column` is the column or key of the text."""

    name = "files"
    has_validation_split = False

    def __init__(self, patterns: tuple[str, ...], column: str, skip: Path):
        self.paths = [p for p in find_files(patterns) if p.resolve() != skip.resolve()]
        self.column = column
        self.sizes = [(path.name, path.stat().st_size) for path in self.paths]
        self.identity = {"files": [[name, size] for name, size in self.sizes]}
        self.stream_count = len(self.paths)

    def read_stream(self, stream: int, position: int | None) -> Iterator[tuple[int, list]]:
        row = position or 0
        texts = read_texts(self.paths[stream], self.column)
        for _ in islice(texts, row):  # skips the rows before
            pass
        while batch := list(islice(texts, BATCH_ROWS)):
            row += len(batch)
            yield row, batch

    def texts_to_learn_from(self) -> Iterator[str]:
        for _, _, batch in self.read_from(0, None):
            yield from filter(None, batch)


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that --input names, in this order; those of a folder or a pattern by name."""
    paths: list[Path] = []
    for pattern in patterns:
        if os.path.isfile(pattern):  # also if its name contains [
            found = [Path(pattern)]
        elif os.path.isdir(pattern):
            found = [path for path in files_in(pattern) if path.name not in NO_TEXT]
            found = [path for path in found if SUFFIX.search(path.name)]
        else:
            found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        if not found or not all(path.is_file() and SUFFIX.search(path.name) for path in found):
            kinds = ".parquet, .jsonl, .csv, .txt or .md (all but the first also .gz, .zst)"
            raise UserError(f"--input {pattern}: no such file, or not one of {kinds}")
        paths += found
    return paths


def files_in(folder: str) -> list[Path]:
    """The files of a folder and its subfolders, sorted, without hidden ones, each once."""
    paths = map(Path, glob.glob(f"{glob.escape(folder)}/**", recursive=True))
    found: dict[Path, Path] = {}  # what a path leads to, which several links may: the first path
    for path in sorted(path for path in paths if path.is_file()):
        found.setdefault(path.resolve(), path)
    return [*found.values()]


def read_texts(path: Path, column: str) -> Iterator[str | None]:
    """Yields the text of each row, or None. Errors name the file and the row, counted from 1."""
    row = 1
    try:
        for text in read_rows(path, column):
            if text is not None:
                if not isinstance(text, str):
                    raise TypeError(f"not a text: {text!r:.50}")
                text.encode()  # raises for half a surrogate pair, which JSON may contain
            yield text
            row += 1
    except Exception as error:
        plain = path.suffix.lower() not in {".parquet", *COMPRESSION}
        if plain and isinstance(error, UnicodeDecodeError):
            raise not_utf8(path) from None
        remedy = "correct it, or name another column (or key) of strings with --text-column"
        raise as_one_line(f"{path}: row {row}", error, remedy) from None


def read_rows(path: Path, column: str) -> Iterator[Any]:
    """Yields the value in each row's column; of a .txt or .md file, its text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = SUFFIX.search(path.name)[1].lower()
    if kind == "parquet":
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
                yield from batch.column(column).to_pylist()
        return
    newline = "" if kind == "csv" else None  # None: line ends become \n
    with (
        # pyarrow reports a truncated file, which other decompressors take for a whole one.
        pa.input_stream(path, COMPRESSION.get(path.suffix.lower())) as stream,
        io.TextIOWrapper(stream, "utf-8-sig", newline=newline) as file,  # drops a byte order mark
    ):
        if kind == "jsonl":
            for line in file:
                yield json.loads(line)[column] if line.strip() else None
        elif kind == "csv":
            csv.field_size_limit(2**31 - 1)  # the largest that Windows takes
            rows = csv.reader(file, strict=True)
            header = next(rows, None)
            if header is None:  # an empty file
                return
            index = header.index(column)
            for row in rows:
                if len(row) > len(header):
                    raise ValueError(f"line {rows.line_num} has more values than the header")
                if row == [] or (len(row) == 1 and not row[0].strip()):
                    yield None  # a blank line
                elif len(row) <= index:
                    yield None  # a row too short to have a text
                else:
                    yield row[index]
        else:
            yield file.read()


# --------------------------------------------------------------------------------------------------
# Datasets of the Hub, by the library `datasets`


class Dataset(Source):
    """A dataset of the Hub at a commit, if its files are Parquet."""

    def __init__(self, name: str, config: str, split: str, column: str, commit: str, where: str):
        """`where` begins the line of an error, and names the flag that was typed."""
        self.name = name
        self.config = config
        self.split = split
        self.column = column
        self.identity = {"commit": commit}
        self.where = where

    def open(self) -> None:
        import datasets
        import fsspec
        from pyarrow.dataset import ParquetFragmentScanOptions

        datasets.config.TORCH_AVAILABLE = False  # otherwise streaming imports torch, and is slower
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its exceptions say the same
        with any_error_as_user_error(self.where, HUB_REMEDY):
            commit = self.identity["commit"]
            builder = datasets.load_dataset_builder(self.name, self.config or None, revision=commit)
            files = {str(key): paths for key, paths in builder.config.data_files.items()}
            split = self.split or (next(iter(files)) if len(files) == 1 else "train")
            if split not in files:
                problem = f"no split {split!r}; --split takes one of {', '.join(files)}"
                raise UserError(f"{self.where}: {problem}")
            # From other formats `datasets` would make other texts, for example 7 of 007.
            if builder.name != "parquet":
                # from hf://datasets/NAME@COMMIT/PATH
                names = [path.split(f"@{commit}/")[-1] for path in files[split]]
                raise UserError(f"{self.where}: not Parquet; {how_to_download(self.name, names)}")
            # With pre_buffer, a whole file would be kept in memory.
            builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
            validation = [key for key in ("validation", "valid", "val", "dev") if key in files]
            splits = [*validation[:1], split] if split == "train" else [split]
            print(f"splits: {', '.join(splits)}")
            streams = [builder.as_streaming_dataset(key) for key in splits]
            self.streams = [stream.with_format("arrow") for stream in streams]
            found = [fsspec.core.url_to_fs(path) for key in splits for path in files[key]]
            self.sizes = [(path, filesystem.size(path) or 0) for filesystem, path in found]
            self.training_files = found[-len(files[split]) :]
        self.stream_count = len(splits)
        self.has_validation_split = self.stream_count == 2

    def read_stream(self, stream: int, position: Any) -> Iterator[tuple[Any, list]]:
        rows = self.streams[stream]
        with any_error_as_user_error(self.where, HUB_REMEDY):
            if position is not None:
                rows.load_state_dict(position)
            for table in rows.iter(BATCH_ROWS):
                types = {field.name: str(field.type) for field in table.schema}
                if types.get(self.column) not in ("string", "large_string", "string_view"):
                    problem = f"no column of strings {self.column!r} (--text-column)"
                    raise UserError(f"{self.where}: {problem} in {types}")
                yield rows.state_dict(), table[self.column].to_pylist()

    def texts_to_learn_from(self) -> Iterator[str]:
        """From at most 128 row groups in at most 32 files, since a dataset may be large."""
        import pyarrow.parquet as pq

        with any_error_as_user_error(self.where, HUB_REMEDY), ExitStack() as stack:
            groups = []
            for filesystem, path in spread_out(self.training_files, 32):
                file = stack.enter_context(pq.ParquetFile(filesystem.open(path)))
                groups += [(file, number) for number in range(file.num_row_groups)]
            groups = spread_out(groups, 128)
            for file, number in groups:
                characters = 0
                rows = file.iter_batches(BATCH_ROWS, row_groups=[number], columns=[self.column])
                for batch in rows:
                    for text in filter(None, batch.column(self.column).to_pylist()):
                        yield text
                        characters += len(text)
                    if characters > LEARN_CHARS / len(groups):
                        break


def spread_out(items: list[Any], n: int) -> list[Any]:
    """At most n of the items, evenly spread, beginning with the first."""
    return [items[i * len(items) // n] for i in range(n)] if len(items) > n else items


def how_to_download(dataset: str, names: list[str]) -> str:
    """How a user gets the text of these files of a dataset without the library `datasets`."""
    pattern = start = common_start(names)
    if len(names) > 1:
        end = common_start([name.removeprefix(start)[::-1] for name in names])[::-1]
        pattern = f"{start}*{end}"
    folder = dataset.split("/")[-1]
    download = f"hf download {dataset} --repo-type dataset --include {shlex.quote(pattern)}"
    steps = f"`{download} --local-dir {folder}`, then `--input {folder}`"
    lacking = [name for name in names if not SUFFIX.search(name)]
    if lacking:
        kinds = "rename JSON Lines to .jsonl, .jsonl.gz or .jsonl.zst, and convert anything else"
        steps += f". It does not take {lacking[0]}: {kinds}"
    return steps


def common_start(texts: list[str]) -> str:
    """The characters with which all texts begin."""
    first, last = min(texts), max(texts)
    equal = [a == b for a, b in zip(first, last, strict=False)]
    return first[: [*equal, False].index(False)]

"""Reads the documents of fineweb.py, from files of this machine or from a dataset of the Hub.

A document is a row of a table, or a whole .txt or .md file. Files of the Hub are read like those of
this machine. Their paths begin with hf://, and they are all Parquet."""

import csv
import glob
import io
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from support.errors_and_signals import UserError
from support.shards import NO_TEXT, SUFFIX, not_utf8

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BATCH_ROWS = 256  # documents in a batch
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
TOKENS_PER_BYTE = {".parquet": 0.35, ".gz": 0.8, ".zst": 0.8}  # roughly; other files have 0.25
LEARN_CHARS = 20_000_000  # a vocabulary is learned from at most so many characters

# --------------------------------------------------------------------------------------------------
# Errors

HUB_REMEDY = "check the names and the network; if it is private or gated, run `hf auth login`"


def as_one_line(where: str, error: Exception, remedy: str) -> UserError:
    """An exception of a library for the user."""
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{where}: {cause:.400}; {remedy}")


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turns any error into one line. Those of the Hub and the network have no common base class."""
    try:
        yield
    except Exception as error:
        raise as_one_line(where, error, HUB_REMEDY) from None


# --------------------------------------------------------------------------------------------------
# Finding files


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that --input names, in its order. Those of a folder or a pattern are sorted."""
    paths: list[str] = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            # glob() skips hidden files and folders.
            inside = sorted(glob.glob(f"{glob.escape(pattern)}/**", recursive=True))
            found = [path for path in inside if os.path.isfile(path) and SUFFIX.search(path)]
            found = [path for path in found if os.path.basename(path) not in NO_TEXT]
        elif os.path.isfile(pattern):  # glob() would misread a [ in its name.
            found = [pattern]
        else:
            found = sorted(glob.glob(pattern, recursive=True))
        if not found or not all(SUFFIX.search(path) for path in found):
            kinds = ".parquet, .jsonl, .csv, .txt or .md (all but the first also .gz, .zst)"
            raise UserError(f"--input {pattern}: no such file, or not one of {kinds}")
        paths += found
    # A vocabulary is no text. It is here if the shards are in the folder of the texts.
    paths = [path for path in paths if os.path.basename(path) != "merges.txt"]
    if not paths:
        raise UserError("--input: names no files of text")
    return paths


def find_hub_files(
    dataset: str, config: str, split: str, commit: str
) -> tuple[list[str], list[str]]:
    """The files of a dataset of the Hub, as (those for validation, those for training).

    An empty `split` means `train`, or the only split that there is. There are files for validation
    only if the dataset has both `train` and a validation split."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # Its exceptions say the same.
    with hub_errors(dataset):
        builder = datasets.load_dataset_builder(dataset, config or None, revision=commit)
    files = {str(name): list(paths) for name, paths in builder.config.data_files.items()}
    split = split or (next(iter(files)) if len(files) == 1 else "train")
    if split not in files:
        raise UserError(f"{dataset}: no split {split!r}; --split takes one of {', '.join(files)}")
    if builder.name != "parquet":
        download = f"hf download {shlex.quote(dataset)} --repo-type dataset --local-dir FOLDER"
        problem = f"not Parquet; download its files with `{download}`, then use `--input FOLDER`"
        raise UserError(f"{dataset}: {problem}")
    validation = [name for name in ("validation", "valid", "val", "dev") if name in files]
    if split == "train" and validation:
        return files[validation[0]], files[split]
    return [], files[split]


def is_on_hub(path: str) -> bool:
    return path.startswith("hf://")


def file_size(path: str) -> int:
    """In bytes."""
    if not is_on_hub(path):
        return os.path.getsize(path)
    from huggingface_hub import HfFileSystem

    with hub_errors(path):
        return HfFileSystem().size(path)


def estimate_tokens(paths: list[str]) -> float:
    """Roughly how many tokens these files have, by their sizes."""
    return sum(file_size(path) * TOKENS_PER_BYTE.get(Path(path).suffix, 0.25) for path in paths)


# --------------------------------------------------------------------------------------------------
# Reading files


def read_batches(
    paths: list[str], column: str, file: int = 0, row: int = 0
) -> Iterator[tuple[int, int, list[str | None]]]:
    """Reads files, beginning with this row of this file. Both are counted from 0.

    Yields each batch of documents as (its file, its first row, the documents)."""
    for number in range(file, len(paths)):
        texts = read_texts(paths[number], column, row)
        while batch := list(islice(texts, BATCH_ROWS)):
            yield number, row, batch
            row += len(batch)
        row = 0


def read_texts(path: str, column: str, row: int = 0) -> Iterator[str | None]:
    """Yields the text of each row of a file, beginning with this row. A row may have no text.

    `column` is the column, or key, of the text. Errors name the row, counted from 1."""
    try:
        for text in read_values(path, column, row):
            if isinstance(text, str):
                text.encode()  # This fails for half a surrogate pair, which JSON may contain.
            elif text is not None:
                problem = f"{text!r:.50} is no text; --text-column names another column"
                raise UserError(f"{path}: row {row + 1}: {problem}")
            yield text
            row += 1
    except UserError:
        raise
    except Exception as error:  # Those of pyarrow, csv and json have no common base class.
        packed = path.lower().endswith((".parquet", *COMPRESSION))
        if isinstance(error, UnicodeDecodeError) and not packed:
            raise not_utf8(Path(path)) from None
        remedy = HUB_REMEDY if is_on_hub(path) else "correct it, or give another --text-column"
        raise as_one_line(f"{path}: row {row + 1}", error, remedy) from None


def read_values(path: str, column: str, row: int) -> Iterator[Any]:
    """Yields what each row of a file has in a column, beginning with this row."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    kind = "parquet" if is_on_hub(path) else SUFFIX.search(path)[1].lower()
    with open_file(path) as file:
        if kind == "parquet":
            table = ParquetFile(file)
            check_column(path, column, table.schema_arrow.names)
            for number, rows in enumerate(row_groups(table)):
                if row < rows.stop:  # Earlier groups are neither read nor downloaded.
                    values = read_row_group(table, number, column)
                    yield from islice(values, max(row - rows.start, 0), None)
        else:
            # pyarrow reads both kinds of compression. It raises an error for a truncated file.
            unpacked = pa.input_stream(file, COMPRESSION.get(Path(path).suffix.lower()))
            # Line ends become \n, but not within a value of a .csv. Byte order marks are dropped.
            newline = "" if kind == "csv" else None
            with io.TextIOWrapper(unpacked, "utf-8-sig", newline=newline) as text:
                if kind == "jsonl":
                    values = read_json_lines(text, column)
                elif kind == "csv":
                    values = read_csv(path, text, column)
                else:  # A .txt or .md file is one row.
                    values = iter([text.read()])
                yield from islice(values, row, None)


def open_file(path: str) -> BinaryIO:
    if not is_on_hub(path):
        return open(path, "rb")
    from datasets.utils.file_utils import xopen

    return xopen(path, "rb")  # It repeats requests that fail.


def check_column(path: str, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        problem = f"no column {column!r}; --text-column takes one of {', '.join(columns)}"
        raise UserError(f"{path}: {problem}")


def row_groups(table: "ParquetFile") -> list[range]:
    """The rows of each row group of a Parquet file."""
    groups = []
    start = 0
    for number in range(table.num_row_groups):
        end = start + table.metadata.row_group(number).num_rows
        groups.append(range(start, end))
        start = end
    return groups


def read_row_group(table: "ParquetFile", number: int, column: str) -> Iterator[Any]:
    for batch in table.iter_batches(BATCH_ROWS, row_groups=[number], columns=[column]):
        yield from batch.column(column).to_pylist()


def read_json_lines(text: io.TextIOBase, column: str) -> Iterator[Any]:
    for line in text:
        row = json.loads(line) if line.strip() else {column: None}
        if column not in row:
            raise ValueError(f"no key {column!r}, only {', '.join(row)}")
        yield row[column]


def read_csv(path: str, text: io.TextIOBase, column: str) -> Iterator[str | None]:
    csv.field_size_limit(2**31 - 1)  # By default a value has at most 131,072 characters.
    table = csv.DictReader(text, strict=True)
    check_column(path, column, table.fieldnames or [])
    for row in table:
        if None in row:  # This happens if a text with a comma isn't in quotes.
            raise ValueError("there are more values than columns")
        yield row[column]


# --------------------------------------------------------------------------------------------------
# Text from which a vocabulary is learned


def texts_to_learn_from(paths: list[str], column: str) -> Iterator[str]:
    """Yields texts from all over these files.

    Of a dataset of the Hub, which may be large, these are the beginnings of at most 128 row groups
    in at most 32 files."""
    from pyarrow.parquet import ParquetFile

    if not any(map(is_on_hub, paths)):
        for path in paths:
            yield from filter(None, read_texts(path, column))
        return
    groups = []
    for path in spread_out(paths, 32):
        with hub_errors(path), open_file(path) as file:
            groups += [(path, rows) for rows in row_groups(ParquetFile(file))]
    groups = spread_out(groups, 128)
    for path, rows in groups:
        characters = 0
        for text in filter(None, islice(read_texts(path, column, rows.start), len(rows))):
            yield text
            characters += len(text)
            if characters > LEARN_CHARS / len(groups):
                break


def spread_out(items: list[Any], n: int) -> list[Any]:
    """At most n of the items, evenly spread, beginning with the first."""
    return [items[i * len(items) // n] for i in range(n)] if len(items) > n else items


def pieces_to_learn_from(texts: Iterable[str]) -> list[str]:
    """Pieces of 1,000 characters that are evenly spread over texts, in their order.

    Together they have 10 to 20 million characters, or if there are fewer, all."""
    kept: list[str] = []
    every = 1  # every how many pieces one is kept
    pieces = (text[i : i + 1000] for text in texts for i in range(0, len(text), 1000))
    for number, piece in enumerate(pieces):
        if number % every == 0:
            kept.append(piece)
        if len(kept) > LEARN_CHARS // 1000:
            kept = kept[::2]
            every *= 2
    return kept

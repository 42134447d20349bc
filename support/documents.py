"""Reading documents for fineweb.py, from local files or from a dataset on the Hub.

A document is a row of a table, or a whole .txt or .md file. Files on the Hub have paths that begin
with hf://, must be Parquet, and are read like local ones."""

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
from support.shards import NOT_TEXT, SUFFIX, not_utf8

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BATCH_ROWS = 256  # documents in a batch
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
LEARN_CHARS = 20_000_000  # train a vocabulary on at most this many characters

# --------------------------------------------------------------------------------------------------
# Errors

HUB_REMEDY = "check the names and the network; for private or gated data, run `hf auth login`"


def as_one_line(where: str, error: Exception, remedy: str) -> UserError:
    """Turn a library's exception into a one-line UserError."""
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{where}: {cause:.400}; {remedy}")


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turn any error into a UserError, because Hub and network errors share no base class."""
    try:
        yield
    except Exception as error:
        raise as_one_line(where, error, HUB_REMEDY) from None


# --------------------------------------------------------------------------------------------------
# Finding files


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """Return the files named by --input, in the given order, sorted within a folder or pattern."""
    paths: list[str] = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            # glob() skips hidden files and folders.
            inside = sorted(glob.glob(f"{glob.escape(pattern)}/**", recursive=True))
            found = [path for path in inside if os.path.isfile(path) and SUFFIX.search(path)]
            found = [path for path in found if os.path.basename(path) not in NOT_TEXT]
        elif os.path.isfile(pattern):  # glob() would misread a [ in its name
            found = [pattern]
        else:
            found = sorted(glob.glob(pattern, recursive=True))
        if not found or not all(SUFFIX.search(path) for path in found):
            formats = ".parquet, .jsonl, .csv, .txt or .md (all but .parquet also as .gz or .zst)"
            raise UserError(f"--input {pattern}: no such file, or not one of {formats}")
        paths += found
    # Skip the vocabulary, which is in the same folder if the shards are written next to the text.
    paths = [path for path in paths if os.path.basename(path) != "merges.txt"]
    if not paths:
        raise UserError("--input: no text files found")
    return paths


def find_hub_files(
    dataset: str, config: str, split: str, commit: str
) -> tuple[list[str], list[str]]:
    """Return the (validation, training) files of a dataset on the Hub.

    An empty `split` means "train", or the only split. There are validation files only if the split
    is "train" and the dataset contains a validation split, too."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its exceptions repeat the log
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


# --------------------------------------------------------------------------------------------------
# Reading files


def read_batches(
    paths: list[str], column: str, file: int = 0, row: int = 0
) -> Iterator[tuple[int, int, list[str | None]]]:
    """Yield batches of documents, starting at row `row` of file number `file`, both 0-based.

    Each batch is (file number, first row, documents)."""
    for number in range(file, len(paths)):
        texts = read_texts(paths[number], column, row)
        while batch := list(islice(texts, BATCH_ROWS)):
            yield number, row, batch
            row += len(batch)
        row = 0


def read_texts(path: str, column: str, row: int = 0) -> Iterator[str | None]:
    """Yield the text of each row of a file, or None, starting at `row` (0-based).

    `column` is the column or key that holds the text. Errors name the 1-based row."""
    try:
        for text in read_values(path, column, row):
            if isinstance(text, str):
                text.encode()  # raises for a lone surrogate, which JSON may contain
            elif text is not None:
                problem = f"{text!r:.50} is not a string; choose another column with --text-column"
                raise UserError(f"{path}: row {row + 1}: {problem}")
            yield text
            row += 1
    except UserError:
        raise
    except Exception as error:  # errors of pyarrow, csv and json share no base class
        packed = path.lower().endswith((".parquet", *COMPRESSION))
        if isinstance(error, UnicodeDecodeError) and not packed:
            raise not_utf8(Path(path)) from None
        remedy = HUB_REMEDY if is_on_hub(path) else "fix it, or choose another --text-column"
        raise as_one_line(f"{path}: row {row + 1}", error, remedy) from None


def read_values(path: str, column: str, row: int) -> Iterator[Any]:
    """Yield the value of a column in each row of a file, starting at `row` (0-based)."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    file_format = "parquet" if is_on_hub(path) else SUFFIX.search(path)[1].lower()
    with open_file(path) as file:
        if file_format == "parquet":
            table = ParquetFile(file)
            check_column(path, column, table.schema_arrow.names)
            for number, rows in enumerate(row_groups(table)):
                if row < rows.stop:  # skip earlier groups, without downloading them
                    values = read_row_group(table, number, column)
                    yield from islice(values, max(row - rows.start, 0), None)
        else:
            # pyarrow reads gzip and zstd, and raises an error for a truncated file.
            unpacked = pa.input_stream(file, COMPRESSION.get(Path(path).suffix.lower()))
            # Normalize newlines to \n, except within a value of a .csv. Drop byte order marks.
            newline = "" if file_format == "csv" else None
            with io.TextIOWrapper(unpacked, "utf-8-sig", newline=newline) as text:
                if file_format == "jsonl":
                    values = read_json_lines(text, column)
                elif file_format == "csv":
                    values = read_csv(path, text, column)
                else:  # a .txt or .md file is a single row
                    values = iter([text.read()])
                yield from islice(values, row, None)


def open_file(path: str) -> BinaryIO:
    if not is_on_hub(path):
        return open(path, "rb")
    from datasets.utils.file_utils import xopen

    return xopen(path, "rb")  # retries failed requests


def check_column(path: str, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        problem = f"no column {column!r}; --text-column takes one of {', '.join(columns)}"
        raise UserError(f"{path}: {problem}")


def row_groups(table: "ParquetFile") -> list[range]:
    """Return the range of rows of each row group of a Parquet file."""
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
    csv.field_size_limit(2**31 - 1)  # the default limit is 131,072 characters per value
    table = csv.DictReader(text, strict=True)
    check_column(path, column, table.fieldnames or [])
    for row in table:
        if None in row:  # e.g. unquoted text that contains a comma
            raise ValueError("there are more values than columns")
        yield row[column]


# --------------------------------------------------------------------------------------------------
# Training text for a vocabulary


def texts_to_learn_from(paths: list[str], column: str) -> Iterator[str]:
    """Yield texts from these files, to learn a vocabulary from.

    A dataset on the Hub may be large, so yield only the beginnings of at most 128 row groups in at
    most 32 files."""
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
    """Return at most n evenly spaced items, starting with the first."""
    return [items[i * len(items) // n] for i in range(n)] if len(items) > n else items


def pieces_to_learn_from(texts: Iterable[str]) -> list[str]:
    """Return evenly spaced pieces of up to 1,000 characters, in the order of the texts.

    There are 10,000 to 20,000 of them, or fewer if they already cover all of the text."""
    kept: list[str] = []
    every = 1  # keep every n-th piece
    pieces = (text[i : i + 1000] for text in texts for i in range(0, len(text), 1000))
    for number, piece in enumerate(pieces):
        if number % every == 0:
            kept.append(piece)
        if len(kept) > LEARN_CHARS // 1000:
            kept = kept[::2]
            every *= 2
    return kept

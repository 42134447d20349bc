"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                   # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                    # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards --shard-size 10000000

Every document is written as 50256 and its tokens; documents follow each other across shard ends, and none is dropped.
Shard 0 is for validation. A document is a row of a parquet file, a line of a .jsonl file, or a whole .txt file; empty
ones are passed over. FineWeb-Edu (Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu) comes from the
Hub as parquet files, each into its cache when its turn comes.

Workers read and tokenize units of work (a parquet row group, 8 MB of lines, a .txt file) on their own; this process
only puts the results in order. So the shards are the same bytes whatever the number of workers.
"""

import glob
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import InputError, atomic_write, first_line, parse_args, run
from tokenizer import EOT, get_tokenizer

REPOSITORY = "HuggingFaceFW/fineweb-edu"
SUFFIXES = (".parquet", ".jsonl", ".txt")
SPAN = 8 << 20  # bytes of .jsonl a unit


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or text of one's own, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"
    """Part of FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10."""
    input: tuple[str, ...] = ()
    """Local .parquet, .jsonl and .txt files, folders or patterns, in the place of FineWeb-Edu."""
    text_column: str = "text"
    """Where a parquet row or a jsonl object keeps its text."""
    out: str = "edu_fineweb10B"
    """Folder for the shards."""
    shard_size: int = 100_000_000
    """Tokens a shard; the last one is shorter."""
    workers: int = 0
    """Processes that tokenize; 0: one a core."""
    max_shards: int = 0
    """Stop after this many shards, validation included; 0: no limit."""


# ---------------------------------------------------------------------------------------------------------------------
# Units of work


@dataclass(frozen=True)
class Unit:
    """What a worker reads in one go: row group `start` of a parquet file, bytes [start, end) of another file."""

    path: Path
    start: int
    end: int


def local_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that --input names: files as given, folders and patterns in the order of names. Raises InputError."""
    files: list[Path] = []
    for pattern in patterns:
        if Path(pattern).is_dir():
            found = sorted(path for path in Path(pattern).rglob("*") if path.suffix in SUFFIXES)
        else:
            found = [Path(pattern)] if Path(pattern).exists() else sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not found:
            raise InputError(f"--input {pattern}: no such file, or no {', '.join(SUFFIXES)} in it")
        files += found
    for path in files:
        if path.suffix not in SUFFIXES:
            raise InputError(f"{path}: read are {', '.join(SUFFIXES)}")
    return files


def hub_files(name: str) -> list[str]:
    """The parquet files of a part of FineWeb-Edu, as the Hub names them. Raises InputError."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its retries are told in many lines, its failure below in one
    folder = f"sample/{name.removeprefix('sample-')}/" if name.startswith("sample-") else f"data/{name}/"
    try:
        files = sorted(HfApi().list_repo_files(REPOSITORY, repo_type="dataset"))
    except Exception as error:  # the Hub's, its HTTP library's, the socket's: they share no base
        raise InputError(f"{REPOSITORY}: the Hub could not be asked ({first_line(error)}); --input takes local "
                         "files") from None
    files = [file for file in files if file.startswith(folder) and file.endswith(".parquet")]
    if not files:
        raise InputError(f"--name {name}: {REPOSITORY} has no {folder}*.parquet")
    return files


def fetch(file: str) -> Path:
    """One of hub_files in the Hub's cache; an interrupted transfer goes on where it stopped. Raises InputError."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(REPOSITORY, file, repo_type="dataset"))
    except Exception as error:
        raise InputError(f"{file}: could not be fetched from the Hub ({first_line(error)}); what has arrived is "
                         "kept") from None


def units(path: Path) -> list[Unit]:
    """Cuts a file into units of work. Raises InputError for a file that is no parquet."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return [Unit(path, i, i + 1) for i in range(pyarrow.parquet.ParquetFile(path).num_row_groups)]
        except pyarrow.ArrowInvalid as error:
            raise InputError(f"{path}: no parquet file, or a truncated one ({first_line(error)})") from None
    size = path.stat().st_size
    step = SPAN if path.suffix == ".jsonl" else max(size, 1)
    return [Unit(path, start, min(start + step, size)) for start in range(0, size, step)]


def read_documents(unit: Unit, text_column: str) -> Iterator[str | None]:
    """The texts of a unit. Raises InputError naming the file and the place."""
    if unit.path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(unit.path)
            if text_column not in file.schema_arrow.names:
                columns = ", ".join(file.schema_arrow.names)
                raise InputError(f"{unit.path}: no column {text_column!r}; --text-column names one of: {columns}")
            column = file.read_row_group(unit.start, columns=[text_column]).column(0)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{unit.path}, row group {unit.start}: damaged ({first_line(error)})") from None
        for row, value in enumerate(column):
            try:
                text = value.as_py()
            except UnicodeDecodeError:
                raise InputError(f"{unit.path}, row group {unit.start}, row {row}: not UTF-8") from None
            yield check_text(text, f"{unit.path}, row group {unit.start}, row {row}")
    elif unit.path.suffix == ".jsonl":
        with open(unit.path, "rb") as file:
            # A line belongs to the unit in which it starts; the first unit starts with a line.
            if unit.start:
                file.seek(unit.start - 1)
                file.readline()
            while (at := file.tell()) < unit.end:
                try:
                    value = json.loads(file.readline().decode("utf-8") or "null")
                    yield check_text(value[text_column], f"{unit.path}, byte {at}")
                except UnicodeDecodeError:
                    raise InputError(f"{unit.path}: the line at byte {at} is not UTF-8") from None
                except (ValueError, TypeError):
                    raise InputError(f"{unit.path}: the line at byte {at} is no JSON object") from None
                except KeyError:
                    keys = ", ".join(value)
                    raise InputError(f"{unit.path}: the line at byte {at} has no {text_column!r}; --text-column "
                                     f"names one of: {keys}") from None
    else:
        try:
            yield unit.path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{unit.path}: not UTF-8 at byte {error.start}") from None


def check_text(text: object, place: str) -> str | None:
    if text is not None and not isinstance(text, str):
        raise InputError(f"{place}: {type(text).__name__}, not text; --text-column names the text")
    return text


def tokenize_unit(unit: Unit, text_column: str) -> tuple[np.ndarray, int, int]:
    """Runs in a worker. -> (tokens of all documents, 1-D uint16; number of documents; of empty ones passed over)"""
    encode = get_tokenizer().encode_to_numpy
    pieces, documents, empty = [np.zeros(0, dtype=np.uint16)], 0, 0
    for text in read_documents(unit, text_column):
        if text:
            try:  # encode_ordinary without its list of ints: nothing in a text is a special token
                ids = encode(text, disallowed_special=())
            except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell and UTF-8 cannot
                ids = np.array(get_tokenizer().encode_ordinary(text))
            pieces += [np.array([EOT], dtype=np.uint16), ids.astype(np.uint16)]
            documents += 1
        else:
            empty += 1
    return np.concatenate(pieces), documents, empty


# ---------------------------------------------------------------------------------------------------------------------
# Shards


class ShardWriter:
    """Cuts a stream of tokens into shard files that appear whole or not at all."""

    def __init__(self, folder: Path, shard_size: int):
        self.folder, self.index, self.filled = folder, 0, 0
        self.buffer = np.empty(shard_size, dtype=np.uint16)

    def add(self, tokens: np.ndarray) -> None:
        while len(tokens):
            part = tokens[: len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            tokens = tokens[len(part) :]
            if self.filled == len(self.buffer):
                self.flush()

    def flush(self) -> None:
        """Writes what is in the buffer as the next shard."""
        if self.filled:
            split = "train" if self.index else "val"
            with atomic_write(self.folder / f"edufineweb_{split}_{self.index:06d}.npy") as file:
                np.save(file, self.buffer[: self.filled])
            self.index, self.filled = self.index + 1, 0


def tokenize(all_units: Iterator[Unit], config: ShardConfig) -> Iterator[tuple[np.ndarray, int, int]]:
    """tokenize_unit of every unit, in order, computed by a pool with a bounded number of units under way."""
    workers = config.workers or os.cpu_count() or 1
    # spawn: the same on Linux, macOS and Windows, and safe beside threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending: deque = deque()
        try:
            for unit in all_units:
                pending.append(pool.submit(tokenize_unit, unit, config.text_column))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(args: list[str] | None = None) -> None:
    from tqdm import tqdm

    config = parse_args(ShardConfig, args=args)
    if config.shard_size < 2 or min(config.workers, config.max_shards) < 0:
        raise InputError(f"--shard-size {config.shard_size}, --workers {config.workers}, --max-shards "
                         f"{config.max_shards}: at least 2, 0 and 0")
    out = Path(config.out)
    if list(out.glob("edufineweb_*")):
        raise InputError(f"{out}: already holds shards; remove them, or name another folder with --out")
    if config.input:
        files = iter(local_files(config.input))
    else:
        print(f"fetching {config.name} of {REPOSITORY} from the Hub")
        files = map(fetch, hub_files(config.name))  # each when its turn comes
    out.mkdir(parents=True, exist_ok=True)

    writer, documents, empty, total = ShardWriter(out, config.shard_size), 0, 0, 0
    bar = tqdm(unit="token", unit_scale=True, disable=None)
    results = tokenize((unit for path in files for unit in units(path)), config)
    for tokens, new_documents, new_empty in results:
        if config.max_shards:  # the last shard wanted is full when this many tokens are there
            tokens = tokens[: config.max_shards * config.shard_size - total]
        writer.add(tokens)
        documents, empty, total = documents + new_documents, empty + new_empty, total + len(tokens)
        bar.update(len(tokens))
        if writer.index == config.max_shards > 0:
            break
    results.close()
    bar.close()
    if total == 0:
        raise InputError("no text in the input: nothing to tokenize")
    if writer.index == 0 and config.max_shards != 1:
        raise InputError(f"{total:,} tokens do not fill the validation shard, so that none is left to train on: "
                         f"lower --shard-size, to {max(total // 10, 2)} say")
    writer.flush()
    print(f"{out}: {total:,} tokens of {documents:,} documents ({empty:,} empty ones passed over) in "
          f"{writer.index} shards, the first for validation", file=sys.stderr if bar.disable is False else sys.stdout)


if __name__ == "__main__":
    run(main)

"""Turns text into shards of GPT-2 tokens for train_gpt2.py.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub

A document is a row, or a whole .txt or .md file: the token 50256, then the tokens of its text.
This process reads texts and writes shards; worker processes turn the texts into tokens:

    read_files or read_dataset -> tokenized -> cut -> Folder.write

manifest.json lists the shards and says where in the text the next one begins. The same command
continues there, and writes the same bytes for any number of workers."""

import csv
import glob
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from support.cli import flag, parse_args, run
from support.errors import UserError
from support.files import atomic_path, locked, sha256, write_text
from support.tokenizer import EOT, SHARD_NAME, encode, get_tokenizer, open_shard

FINEWEB = "HuggingFaceFW/fineweb-edu"
NAME = "edufineweb_{split}_{number:06d}.npy"
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # ready-made shards of it
PRETOKENIZED_NAME = "finewebedu_{split}_{number:06d}.bin"
SHARD_SIZE = 10**8  # tokens
BATCH_ROWS = 256  # texts that a worker tokenizes at a time
# The files that --input takes. (No .parquet.gz: .parquet is compressed inside.)
SUFFIX = re.compile(r"\.(parquet$|jsonl|csv|txt|md)(\.gz|\.zst)?$", re.IGNORECASE)
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
TOKENS_PER_BYTE = {".parquet": 0.35, ".gz": 0.8, ".zst": 0.8}  # roughly; of other files 0.25
DATASET_REMEDY = (
    "check its name, --config and the network; if it is private or gated, run `hf auth login`; "
    "if it is a folder, try it with --input, whose errors name the file and the row"
)


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"  # part of FineWeb-Edu: sample-10BT, sample-100BT, CC-MAIN-2024-10, …
    input: tuple[str, ...] = ()  # instead: .parquet .jsonl .csv .txt .md files (.gz, .zst), folders
    dataset: str = ""  # instead: a text dataset of the Hub, or a local folder in its layout
    config: str = ""  # the dataset's configuration; empty: its default
    split: str = ""  # the dataset's split; empty: train, with a validation split as shard 0
    text_column: str = "text"  # the column, or key, of the text
    out: str = "edu_fineweb10B"  # folder for the shards
    shard_size: int = 0  # tokens per shard; 0: 100 million (10 million in shard 0 of your own text)
    workers: int = 0  # tokenizing processes; 0: one per core
    max_shards: int = 0  # stop after this many, validation included; 0: no limit
    pretokenized: int = 0  # instead of text: download this many tokenized shards of FineWeb-Edu
    verify: bool = False  # only check the shards in --out against its manifest.json

    def check(self) -> None:
        """Raises one error that names every invalid value."""
        problems = []
        for name in ("shard_size", "workers", "max_shards", "pretokenized"):
            if getattr(self, name) < 0:
                problems.append(f"{flag(name)} {getattr(self, name)}: must be at least 0")
        if bool(self.input) + bool(self.dataset) + bool(self.pretokenized) > 1:
            problems.append("--input, --dataset and --pretokenized: choose one")
        if self.name != ShardConfig.name and (self.input or self.dataset or self.pretokenized):
            problem = (
                "is a part of FineWeb-Edu, which --input, --dataset and --pretokenized replace"
            )
            problems.append(f"--name {self.name}: {problem}")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        folder = Path(self.dataset).resolve()
        if self.dataset and Path(self.out).resolve().is_relative_to(folder):
            # The next run would take the shards for files of the dataset.
            problems.append(f"--out {self.out}: inside --dataset {self.dataset}; choose another")
        if problems:
            raise UserError("; ".join(problems))


@contextmanager
def explained(where: Callable[[], str], remedy: str) -> Iterator[None]:
    """Turns an exception of a library into one line. (Theirs have no base class in common.)"""
    try:
        yield
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{where()}: {cause:.400}; {remedy}") from None


# --------------------------------------------------------------------------------------------------
# Reading text

# A place in the text:
# - "stream": the number of a file (--input) or of a split (--dataset)
# - "position" in it: a number of rows, or what `datasets` calls its state; None: its beginning
# - "used": how many of the tokens from there on are already in shards
Place = dict[str, Any]
START: Place = {"stream": 0, "position": None, "used": 0}

# Batches of rows: (the place where they begin, their texts), then (the place, their tokens, uint16)
Texts = Iterator[tuple[Place, list[str | None]]]
Tokens = Iterator[tuple[Place, np.ndarray]]


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files that --input names, in this order; those of a folder or a pattern by name."""
    paths: list[Path] = []
    for pattern in patterns:
        if os.path.isfile(pattern):  # also if its name contains [
            found = [Path(pattern)]
        elif os.path.isdir(pattern):
            found = [path for path in files_in(pattern) if path.name != "README.md"]
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


def read_files(paths: list[Path], column: str, start: Place) -> Texts:
    """Reads files from a place on."""
    place = start
    for stream in range(start["stream"], len(paths)):
        texts = read_texts(paths[stream], column)
        row = place["position"] or 0
        for _ in islice(texts, row):  # skip the rows before
            pass
        while batch := list(islice(texts, BATCH_ROWS)):
            yield place, batch
            row += len(batch)
            place = START | {"stream": stream, "position": row}
        place = START | {"stream": stream + 1}


def read_texts(path: Path, column: str) -> Iterator[str | None]:
    """Yields the text of each row, or None. Errors name the file and the row, counted from 1."""
    row = 1
    remedy = "correct it, or name another column (or key) of strings with --text-column"
    with explained(lambda: f"{path}: row {row}", remedy):
        for text in read_rows(path, column):
            if text is not None:
                if not isinstance(text, str):
                    raise TypeError(f"not a text: {text!r:.50}")
                text.encode()  # raises for half a surrogate pair, which JSON may contain
            yield text
            row += 1


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


def open_dataset(config: ShardConfig, commit: str | None) -> tuple[list, list]:
    """([an IterableDataset for each split to read, validation first], [(file, its size in bytes)]).

    commit: None for a local folder"""
    import datasets
    import fsspec
    import pandas
    import pyarrow as pa
    from pyarrow.dataset import ParquetFragmentScanOptions

    def open_zstd(file: Any, **_: Any) -> Any:
        return pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")

    # As in read_rows: pyarrow reports a truncated file.
    fsspec.compression.register_compression("zstd", open_zstd, "zst", force=True)
    warnings.simplefilter("error", pandas.errors.ParserWarning)  # .csv rows longer than the header
    datasets.config.TORCH_AVAILABLE = False  # otherwise streaming imports torch, and is slower
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its exceptions say the same
    name = config.dataset if commit else os.path.realpath(config.dataset)
    if re.search(r"[*?[]|::", name):
        raise ValueError("`datasets` can't read paths with * ? [ or ::; rename it")
    builder = datasets.load_dataset_builder(name, config.config or None, revision=commit)
    if builder.name == "csv":
        builder.config.index_col = False  # otherwise columns shift if rows are longer
        # Keep this column alone, as text. Otherwise types are inferred in each part of a file.
        column = {config.text_column: datasets.Value("string")}
        builder.config.features = datasets.Features(column)
    if builder.name == "json":
        refuse_mixed_types(builder, config.text_column)
    if builder.name == "parquet":  # with pre_buffer, a whole file would be kept in memory
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
    files = {str(key): paths for key, paths in builder.config.data_files.items()}
    split = config.split or (next(iter(files)) if len(files) == 1 else "train")
    if split not in files:
        raise ValueError(f"no split {split!r}; --split takes one of {', '.join(files)}")
    validation = [key for key in ("validation", "valid", "val", "dev") if key in files]
    splits = [*validation[:1], split] if split == "train" else [split]
    print(f"splits: {', '.join(splits)}")
    found = [fsspec.core.url_to_fs(path) for key in splits for path in files[key]]
    try:
        streams = [builder.as_streaming_dataset(key).with_format("arrow") for key in splits]
    except StopIteration:  # has no message
        raise ValueError("the first file of a split is empty") from None
    return streams, [(path, filesystem.size(path) or 0) for filesystem, path in found]


def refuse_mixed_types(builder: Any, column: str) -> None:
    """Makes a JSON dataset fail where `datasets` would store other texts than the file's: it infers
    a type for each part of a file, then converts dates and numbers to the type of the first part,
    and stores the source of all values of a part where types are mixed."""
    cast_table = builder._cast_table

    def checked(table: Any, json_field_paths: Any = ()) -> Any:
        if column in table.column_names:
            kind = str(table[column].type)
            if [column] in [list(path) for path in json_field_paths]:
                kind = "mixed"
            if kind not in ("string", "null"):
                raise ValueError(f"{column!r} (--text-column) is not text in all rows, but {kind}")
        return cast_table(table, json_field_paths)

    builder._cast_table = checked


def read_dataset(name: str, streams: list, column: str, start: Place) -> Texts:
    """Reads the splits of a dataset from a place on."""
    place = start
    with explained(lambda: f"--dataset {name}", DATASET_REMEDY):
        for stream in range(start["stream"], len(streams)):
            if place["position"] is not None:
                streams[stream].load_state_dict(place["position"])
            for table in streams[stream].iter(BATCH_ROWS):
                types = {field.name: str(field.type) for field in table.schema}
                if types.get(column) not in ("string", "large_string", "string_view"):
                    raise ValueError(f"no column of strings {column!r} (--text-column) in {types}")
                yield place, table[column].to_pylist()
                place = START | {"stream": stream, "position": streams[stream].state_dict()}
            place = START | {"stream": stream + 1}


# --------------------------------------------------------------------------------------------------
# Tokenizing


def start_worker() -> None:
    """Makes this process end with its parent, even after kill -9. The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def tokenize(texts: list[str | None]) -> np.ndarray:
    """The tokens of documents, 1-D uint16. Skips nulls and empty texts."""
    parts: list[Any] = [[]]  # concatenate needs at least one
    for text in texts:
        if text:
            parts += [[EOT], *encode(text)]  # encode yields arrays: pieces of a long text
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe")  # all tokens fit


def tokenized(pool: ProcessPoolExecutor, workers: int, texts: Texts) -> Tokens:
    """Tokenizes batches of texts in the pool, in order."""
    pending: deque[tuple[Place, Future]] = deque()
    for place, batch in texts:
        pending.append((place, pool.submit(tokenize, batch)))
        if len(pending) > 2 * workers:  # enough to keep them busy; more would fill memory
            place, tokens = pending.popleft()
            yield place, tokens.result()
    for place, tokens in pending:
        yield place, tokens.result()


# --------------------------------------------------------------------------------------------------
# Writing shards


class Folder:
    """The shards in --out and their manifest. name: the pattern of their names."""

    def __init__(self, out: Path, name: str, max_shards: int):
        self.out = out
        self.name = name
        self.max_shards = max_shards
        self.path = out / "manifest.json"
        manifest: dict[str, Any] = {"next": START, "shards": []}
        with explained(lambda: str(self.path), "move it and its shards away"):
            if self.path.exists():
                manifest = json.loads(self.path.read_text(encoding="utf-8"))
            self.shards = manifest.pop("shards")
            # The place where the next shard begins; None: all of the text is in shards.
            self.next = manifest.pop("next")
            self.sums = {shard["name"]: shard["sha256"] for shard in self.shards}
        self.options = manifest  # the rest: what the shards depend on

    @property
    def finished(self) -> bool:
        return self.next is None or 0 < self.max_shards <= len(self.shards)

    @property
    def next_name(self) -> str:
        return self.name.format(split="train" if self.shards else "val", number=len(self.shards))

    def begin(self, options: dict[str, Any]) -> None:
        """Raises an error if the shards were made with other options, or aren't all ours."""
        for key, now in options.items():
            then = self.options.get(key)
            if self.shards and now != then:
                change = "other files" if key == "files" else f"{key} {then!r}, now {now!r}"
                raise UserError(f"{self.out}: started with {change}; restore it or use a new --out")
        for shard in self.shards:
            open_shard(self.out / shard["name"])  # raises an error if it is missing or damaged
        known = set(self.sums)
        if self.path.exists():  # a killed run may not have listed its last shard: written again
            known.add(self.next_name)
        for path in self.out.iterdir():
            if SHARD_NAME.fullmatch(path.name) and path.name not in known:  # would be trained on
                raise UserError(f"{path}: not in manifest.json; remove it or use a new --out")
        for path in self.out.glob(".*.partial"):
            path.unlink()
        self.options = options
        if not self.finished:
            self.save()

    def save(self) -> None:
        manifest = self.options | {"next": self.next, "shards": self.shards}
        write_text(self.path, json.dumps(manifest, indent=1))

    def write(self, tokens: np.ndarray, after: Place | None) -> None:
        """Writes the next shard. after: the place after it; None: at the end of the text."""
        name = self.next_name
        with atomic_path(self.out / name) as partial, open(partial, "wb") as file:
            # What np.save does, whose error would not say that the disk is full.
            header = np.lib.format.header_data_from_array_1_0(tokens)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(tokens.data)
        self.add(name, after)

    def add(self, name: str, after: Place | None) -> None:
        """Lists a shard in the manifest."""
        path = self.out / name
        tokens = len(open_shard(path))
        self.shards.append({"name": name, "tokens": tokens, "sha256": sha256(path)})
        self.next = after
        self.save()
        tqdm.write(f"{name}: {tokens:,} tokens")


def take(held: deque[tuple[Place, np.ndarray]], count: int) -> tuple[np.ndarray, Place | None]:
    """Removes `count` tokens from the front of `held`. -> (the tokens, the place after them)"""
    parts = []
    while count > 0:
        place, tokens = held.popleft()
        parts.append(tokens[:count])
        if len(tokens) > count:
            held.appendleft((place | {"used": place["used"] + count}, tokens[count:]))
        count -= len(parts[-1])
    return np.concatenate(parts), held[0][0] if held else None


def cut(
    batches: Tokens, number: int, val_size: int, size: int, validation: bool, bar: tqdm
) -> Iterator[tuple[np.ndarray, Place | None]]:
    """Cuts the text into shards, from shard `number` on. Yields (its tokens, the place after them).

    val_size, size: tokens of shard 0 and of the others. Shard 0 has a tenth of a text that is
    shorter than `size`. validation: stream 0 is a validation split, and shard 0 is all of it"""
    held: deque[tuple[Place, np.ndarray]] = deque()  # batches that are not in shards yet
    count = 0  # their tokens
    in_validation = False
    for place, tokens in batches:
        ended = in_validation and place["stream"] > 0
        in_validation = validation and place["stream"] == 0
        if ended and count > 0:
            yield take(held, count)[0], place  # the whole validation split
            number = 1
            count = 0
        held.append((place, tokens[place["used"] :]))
        count += len(held[-1][1])
        bar.update(len(held[-1][1]))
        # Shard 0 also waits for more than `size` tokens: it has a tenth of a shorter text, below.
        # (Not >=, or nothing might be left for training.)
        while count > size and not in_validation:
            end = size if number > 0 else val_size
            yield take(held, end)
            number += 1
            count -= end
    if count == 0:
        part = "the split `train`" if number > 0 else "the input"
        raise UserError(f"no text in {part}: nothing to tokenize")
    if number == 0:
        end = max(count // 10, 1)
        yield take(held, end)
        count -= end
    yield take(held, count)[0], None


def make_shards(config: ShardConfig, folder: Folder) -> None:
    """Makes the shards of --input or --dataset. (main() sets it to FINEWEB if neither is given.)"""
    names = ("config", "split", "text_column", "shard_size")
    options = {"source": config.dataset, **{name: getattr(config, name) for name in names}}
    if config.input or Path(config.dataset).is_dir():
        options["source"] = "files" if config.input else "folder"
        paths = find_files(config.input) if config.input else files_in(config.dataset)
        options["files"] = [[path.name, path.stat().st_size] for path in paths]
    else:
        options["commit"] = commit_of(config.dataset, folder)
    folder.begin(options)
    if folder.finished:
        return
    size = config.shard_size or SHARD_SIZE
    # Your own text may be hardly longer than a shard, so its shard 0 has a tenth of a shard.
    val_size = size if config.shard_size or config.dataset == FINEWEB else size // 10
    workers = config.workers or os.cpu_count() or 1
    get_tokenizer()  # forked workers inherit it
    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        pool.submit(os.getpid)  # forks them now, before other libraries start threads
        if config.input:
            streams, files = [], options["files"]
            texts = read_files(paths, config.text_column, folder.next)
        else:
            with explained(lambda: f"--dataset {config.dataset}", DATASET_REMEDY):
                streams, files = open_dataset(config, options.get("commit"))
            texts = read_dataset(config.dataset, streams, config.text_column, folder.next)
        total = sum(TOKENS_PER_BYTE.get(Path(name).suffix.lower(), 0.25) * n for name, n in files)
        print(f"reading {len(files)} files, roughly {total / 1e6:,.1f} million tokens")
        total = min(total, config.max_shards * size or total)
        before = sum(shard["tokens"] for shard in folder.shards)
        look = {"unit": "tok", "unit_scale": True, "leave": False, "disable": None}
        with tqdm(total=total, initial=before, **look) as bar:
            tokens = tokenized(pool, workers, texts)
            validation = len(streams) == 2  # a validation split comes first
            number = len(folder.shards)
            for shard, after in cut(tokens, number, val_size, size, validation, bar):
                folder.write(shard, after)
                if folder.finished:
                    return


def commit_of(dataset: str, folder: Folder) -> str:
    """The commit that the shards in a folder were made from; if there are none, the newest one."""
    from huggingface_hub import HfApi

    if folder.shards and "commit" in folder.options:
        return folder.options["commit"]
    with explained(lambda: f"--dataset {dataset}", DATASET_REMEDY):
        return HfApi().dataset_info(dataset).sha


def fetch_pretokenized(folder: Folder) -> None:
    """Downloads the first shards of PRETOKENIZED. Checks each before it appears in --out."""
    from huggingface_hub import hf_hub_download

    commit = commit_of(PRETOKENIZED, folder)
    folder.begin({"source": PRETOKENIZED, "commit": commit})
    downloads = folder.out / ".hub"
    while not folder.finished:
        name = folder.next_name
        with explained(lambda: f"--dataset {PRETOKENIZED}", DATASET_REMEDY):
            path = hf_hub_download(
                PRETOKENIZED, name, repo_type="dataset", revision=commit, local_dir=downloads
            )
        open_shard(Path(path))
        os.replace(path, folder.out / name)
        folder.add(name, START)  # where they end in the text doesn't matter
    shutil.rmtree(downloads, ignore_errors=True)


def verify(folder: Folder) -> None:
    """Names the files that changed or are unexpected."""
    paths = [path for path in folder.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")]
    with tqdm(paths, unit="file", leave=False, disable=None) as bar:
        found = {path.name: sha256(path) for path in bar}
    names = sorted({name for name, _ in found.items() ^ folder.sums.items()})
    if names or not found:
        problem = ", ".join(names) or "no shards"
        raise UserError(f"{folder.out}: does not match manifest.json: {problem}")
    print(f"{len(found)} shards: all checksums match")


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args)
    # `--input $FILES` without FILES must not make FineWeb-Edu.
    for name in ("input", "dataset"):
        if flag(name) in (sys.argv if args is None else args) and not getattr(config, name):
            raise UserError(f"{flag(name)}: has no value")
    config.check()
    if not config.input and not config.dataset:
        config = replace(config, dataset=FINEWEB, config=config.name)
    out = Path(config.out)
    with locked(out, f"{out}: another fineweb.py uses it; wait for it or choose another --out"):
        name = PRETOKENIZED_NAME if config.pretokenized else NAME
        folder = Folder(out, name, config.pretokenized or config.max_shards)
        if config.verify:
            verify(folder)
            return
        try:
            if config.pretokenized:
                fetch_pretokenized(folder)
            else:
                make_shards(config, folder)
        except BrokenExecutor:
            raise UserError("a worker was killed (out of memory?); use fewer --workers") from None
        finally:
            if not folder.shards:  # an error before the first one leaves nothing behind
                folder.path.unlink(missing_ok=True)
    tokens = sum(shard["tokens"] for shard in folder.shards)
    print(f"{out}: {len(folder.shards)} shards, {tokens:,} tokens")


if __name__ == "__main__":
    run(main)

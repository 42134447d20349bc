"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                   # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                    # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards --shard-size 10000000
    python fineweb.py --pretokenized 3                  # three ready shards of FineWeb-Edu instead of text
    python fineweb.py --verify --out my_shards          # is every shard still what was written?
    torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 fineweb.py    # on four machines

A document is a row of a parquet file, a line of .jsonl, or a whole .txt file; it is written as 50256 and its tokens.
Documents follow each other across shard ends and none is dropped; nulls and empty texts are passed over and counted.
Shard 0 is for validation. FineWeb-Edu: Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu.

Parallel: workers read and tokenize spans of files on their own; this process only lays the results end to end. So the
shards are the same bytes whatever the number of workers.

Restartable: manifest.json is rewritten after each finished shard and says how many tokens of which span finished shards
hold. The same command, run again after any kind of end, goes on from there and makes the same bytes.

Several machines: each rank (RANK, WORLD_SIZE) takes every WORLD_SIZE-th source file, writes every WORLD_SIZE-th shard
and keeps its own manifest.N.json; they share a folder and need not talk. At the end rank 0 merges the manifests.
"""

import errno
import glob
import itertools
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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import InputError, atomic_write, first_line, is_rank_zero, parse_args, run, sha256
from shards import open_shard
from tokenizer import EOT, SHA256, bpe_files, get_tokenizer

REPOSITORY, PRETOKENIZED = "HuggingFaceFW/fineweb-edu", "kjj0/finewebedu10B-gpt2"
COMPRESSED = (".gz", ".zst")
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".txt.zst")
SPAN_BYTES = 4 << 20  # of text: a third of a second of a worker's time
PIECE_CHARS = 1 << 18  # longer texts are tokenized in pieces of about this length
TEXT_A_TOKEN, TEXT_A_HUB_BYTE, TEXT_A_COMPRESSED_BYTE = 4.5, 1.6, 4  # bytes of English, to estimate what is to come
RETRY_SECONDS = (1, 4, 16, 64)  # the waits before the Hub is asked again in the middle of a run; at its start: 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

File = tuple[str, int]  # a source file: its path, here or in the Hub's repository, and its bytes


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or text of one's own, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"
    """Part of FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10."""
    input: tuple[str, ...] = ()
    """Instead of FineWeb-Edu: .parquet, .jsonl, .txt files (the latter two also .gz, .zst), folders or patterns."""
    text_column: str = "text"
    """Where a parquet row or a jsonl object keeps its text."""
    out: str = "edu_fineweb10B"
    """Folder for the shards."""
    shard_size: int = 100_000_000
    """Tokens a shard; the last one is shorter."""
    workers: int = 0
    """Processes that tokenize; 0: one a core."""
    max_shards: int = 0
    """Stop after this many shards, validation included; 0: no limit. A later run may go on to more."""
    pretokenized: int = 0
    """Instead of text: fetch this many ready .bin shards of FineWeb-Edu, validation included, 100M tokens each."""
    verify: bool = False
    """Only check the shards in --out against its manifest.json."""

    def check(self) -> "ShardConfig":
        """Itself. Raises InputError naming every value that cannot be."""
        counts = {"--workers": self.workers, "--max-shards": self.max_shards, "--pretokenized": self.pretokenized}
        problems = [f"{flag} {count}: not below 0" for flag, count in counts.items() if count < 0]
        if not 1 <= self.shard_size <= 2**31:
            problems.append(f"--shard-size {self.shard_size}: from 1 to {2**31}")
        if self.pretokenized and self.input:
            problems.append("--pretokenized and --input: one of them")
        if problems:
            raise InputError("; ".join(problems))
        return self


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


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@contextmanager
def processes(count: int, stop: bool = False) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that end with the block, or with this process, however it ends.

    stop: in the middle of what they do then; only for tasks with small results, see concurrent.futures.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, initializer=begin_process)
    try:
        pool.submit(bpe_files).result()  # start them now: a fork copies one thread, and soon there are more
        yield pool
    except BrokenProcessPool:
        raise InputError("a worker was killed, for want of memory perhaps: run the same command again to go on; "
                         "fewer --workers need less") from None
    finally:
        for child in set(multiprocessing.active_children()) - others if stop else ():
            child.terminate()
        pool.shutdown(cancel_futures=True)


def begin_process() -> None:
    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent


def in_order(pool: ProcessPoolExecutor, function: Callable, items: Iterable, ahead: int) -> Iterator[tuple]:
    """(item, function(item)) of every item, in order, with `ahead` more under way or waiting to be asked for."""
    pending: deque = deque()
    for item in items:
        pending.append((item, pool.submit(function, item)))
        if len(pending) > ahead:
            item, future = pending.popleft()
            yield item, future.result()
    while pending:
        item, future = pending.popleft()
        yield item, future.result()


# ---------------------------------------------------------------------------------------------------------------------
# Shards and their manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says; {} without one. Raises InputError."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        raise InputError(f"{path}: not JSON; move it and its shards away") from None


class Folder:
    """The shards of a rank in --out, and their manifest.

    options: what must stay the same from run to run. Raises InputError, naming the difference, when it did not, and
    when a shard in the manifest is missing or of another length.
    """

    def __init__(self, out: Path, options: dict[str, Any], rank: int = 0, world_size: int = 1):
        self.out, self.rank, self.world_size = out, rank, world_size
        self.path = out / ("manifest.json" if world_size == 1 else f"manifest.{rank}.json")
        self.copies = out / f".source.{rank}"  # of files of the Hub, and unpacked ones, while they are needed
        self.begun = read_manifest(self.path)
        for recorded in filter(None, (self.begun, read_manifest(out / "manifest.json"))):
            for key, now in options.items():
                then = recorded.get(key)
                if key == "files" and then and now != then:
                    now, then = next((a, b) for a, b in itertools.zip_longest(now, then) if a != b)
                if now != then:
                    raise InputError(f"{out}: begun with {key} {then}, now {now}; take what it was, or another --out")
        self.manifest = self.begun or options | {"complete": False, "position": [0, 0, 0], "skipped": [0, 0]}
        self.shards: list[dict[str, Any]] = self.manifest.setdefault("shards", [])
        for shard in self.shards:
            if not (out / shard["name"]).exists():
                raise InputError(f"{out / shard['name']}: missing, though in {self.path.name}; put it back, or begin "
                                 "in another folder")
            if len(tokens := open_shard(out / shard["name"])) != shard["tokens"]:
                raise InputError(f"{out / shard['name']}: {len(tokens)} tokens, not the {shard['tokens']} of "
                                 f"{self.path.name}; put the right one back, or begin in another folder")

    @property
    def next_index(self) -> int:
        return len(self.shards) * self.world_size + self.rank

    @property
    def tokens(self) -> int:
        return sum(shard["tokens"] for shard in self.shards)

    def finished(self, max_shards: int) -> bool:
        return self.manifest["complete"] or 0 < max_shards <= self.next_index

    def begin(self) -> None:
        """Makes the folder, or clears away what a killed run left half made. Raises InputError for a foreign shard."""
        self.out.mkdir(parents=True, exist_ok=True)
        listed = {shard["name"] for shard in self.shards}
        for path in self.out.iterdir():
            match = re.fullmatch(r"\.?.+_(?:train|val)_(\d{6})\.(?:npy|bin)(\.\d+\.partial)?", path.name)
            ours = match and int(match[1]) % self.world_size == self.rank and path.name not in listed
            if (ours and match[2]) or re.fullmatch(rf"\.({self.path.name}|manifest.json)\.\d+\.partial", path.name):
                path.unlink()
            elif ours and not (self.begun and int(match[1]) == self.next_index):  # that one will be written again
                raise InputError(f"{path}: not in {self.path.name}; remove it, or name another folder with --out")
        for path in [*self.copies.rglob("*.incomplete"), *self.copies.rglob("*.partial")]:
            path.unlink()
        if not self.begun:
            self.save()

    def save(self) -> None:
        with atomic_write(self.path, "w") as file:
            file.write(json.dumps(self.manifest, indent=1) + "\n")

    def write(self, parts: list[np.ndarray]) -> None:
        """Adds a shard, of parts laid end to end, each 1-D uint16."""
        name = f"edufineweb_{'train' if self.next_index else 'val'}_{self.next_index:06d}.npy"
        shape = (sum(map(len, parts)),)
        with atomic_write(self.out / name) as file:  # not np.save, whose error does not say that the disk is full
            np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": shape})
            file.writelines(part.data for part in parts)
        self.enter(name, parts)

    def enter(self, name: str, parts: list[np.ndarray]) -> None:
        """Enters a shard that is in place in the manifest."""
        documents = sum(int(np.count_nonzero(part == EOT)) for part in parts)  # those that begin in it
        digest = sha256(self.out / name)
        self.shards.append({"name": name, "tokens": sum(map(len, parts)), "documents": documents, "sha256": digest})
        self.save()

    def verify(self) -> None:
        """Raises InputError naming the files that are not as they were written, and shards that are not ours."""
        if not self.begun:
            raise InputError(f"{self.out}: no {self.path.name} to check against; --out names the folder")
        changed = [shard["name"] for shard in self.shards if sha256(self.out / shard["name"]) != shard["sha256"]]
        listed = {shard["name"] for shard in self.shards}
        others = [path.name for path in sorted(self.out.iterdir())
                  if path.suffix in (".npy", ".bin", ".partial") and path.name not in listed]
        if changed or others:
            raise InputError(f"{self.out}: {', '.join(changed) or 'none'} changed since written (SHA-256); not in "
                             f"{self.path.name}: {', '.join(others) or 'none'}; make them anew in another folder")

    def summary(self) -> str:
        documents, (nulls, empties) = sum(shard["documents"] for shard in self.shards), self.manifest["skipped"]
        end = "" if self.manifest["complete"] else "; the source goes on"
        return (f"{self.out}: {len(self.shards)} shards, {self.tokens:,} tokens, {documents:,} documents "
                f"({nulls:,} nulls and {empties:,} empties passed over){end}")


def merge(here: Folder, options: dict[str, Any], max_shards: int) -> Folder:
    """Rank 0's last task: waits for the other ranks and makes one manifest.json of theirs."""
    others = []
    for rank in range(here.world_size):
        while not (other := Folder(here.out, options, rank, here.world_size)).finished(max_shards):
            time.sleep(1)
        others.append(other)
    whole = Folder(here.out, options)
    whole.shards = sorted((shard for other in others for shard in other.shards), key=lambda shard: shard["name"][-10:])
    whole.manifest = here.manifest | {
        "complete": all(other.manifest["complete"] for other in others),
        "position": [other.manifest["position"] for other in others],
        "skipped": np.sum([other.manifest["skipped"] for other in others], axis=0).tolist(),
        "shards": whole.shards,
    }
    whole.save()
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Main


def expect(config: ShardConfig, files: list[File], commit: str | None, out: Path) -> int:
    """About how many tokens all shards will hold. Raises InputError when they, and the copies, don't fit the disk."""
    text, largest_copy = 0, 0  # bytes
    for name, size in files:
        if commit:
            text, largest_copy = text + size * TEXT_A_HUB_BYTE, max(largest_copy, size)
        elif name.endswith(COMPRESSED):
            size *= TEXT_A_COMPRESSED_BYTE
            text, largest_copy = text + size, max(largest_copy, size)
        elif name.endswith(".parquet"):
            text += sum(size for _, size in row_groups(Path(name), config.text_column))
        else:
            text += size
    tokens = min(int(text / TEXT_A_TOKEN), config.max_shards * config.shard_size or sys.maxsize)
    there = sum(path.stat().st_size for path in out.glob("*.npy"))
    need = max(2 * tokens - there, 0) + largest_copy * min(3, len(files))
    free = shutil.disk_usage(next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())).free
    report = f"{out}: about {need / 1e9:,.2f} GB of disk needed, {free / 1e9:,.2f} GB free"
    if need > free:
        raise InputError(f"{report}; make room, name a folder elsewhere with --out, or take less with --max-shards")
    if is_rank_zero():
        print(f"{report}; about {tokens / 1e6:,.1f} million tokens in all, {there / 2e6:,.1f} there", flush=True)
    return tokens


def make_shards(config: ShardConfig, files: list[File], commit: str | None, here: Folder, expected: int) -> None:
    """Goes on with the shards of a rank until its files end or config.max_shards are there. Raises InputError.

    expected: tokens of all ranks, for the progress bar.
    """
    from tqdm import tqdm

    workers = config.workers or max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    copied = commit or any(name.endswith(COMPRESSED) for name, _ in files)
    (file, start, done), skipped = here.manifest["position"], here.manifest["skipped"]
    copies: dict[int, Path] = {}

    def local_paths() -> Iterator[tuple[int, Path]]:
        mine = [(i, name) for i, (name, _) in enumerate(files) if i % here.world_size == here.rank and i >= file]
        if not copied:
            yield from ((i, Path(name)) for i, name in mine)
            return
        here.copies.mkdir(exist_ok=True)
        for (i, name), path in in_order(copiers, partial(make_local, commit=commit, folder=here.copies), mine, 1):
            if path != Path(name):
                copies[i] = path
            yield i, path

    def finish() -> None:
        here.write(parts)
        parts.clear()
        last, rate = here.shards[-1], (here.tokens - before) / (time.perf_counter() - began)
        tqdm.write(f"{last['name']}: {last['tokens']:,} tokens, {last['documents']:,} documents; {rate:,.0f} tokens/s")
        sys.stdout.flush()
        for i in [i for i in copies if i < here.manifest["position"][0]]:
            copies.pop(i).unlink(missing_ok=True)

    parts: list[np.ndarray] = []  # of the shard to come
    room = config.shard_size  # tokens that it still lacks
    before, began, total = here.tokens, time.perf_counter(), expected // here.world_size
    bar = tqdm(total=total, initial=before, unit="token", unit_scale=True, disable=None)
    with (processes(1, stop=True) if copied else nullcontext()) as copiers, processes(workers) as pool, bar:
        spans = (span for i, path in local_paths()
                 for span in cut_file(i, path, config.text_column, start if i == file else 0))
        task = partial(tokenize, text_column=config.text_column)
        for span, (tokens, passed) in in_order(pool, task, spans, ahead=2 * workers):
            taken = min(done, len(tokens))  # so many of them are in finished shards
            done -= taken
            while taken < len(tokens):
                parts.append(tokens[taken : taken + room])
                taken, room = taken + len(parts[-1]), room - len(parts[-1])
                bar.update(len(parts[-1]))
                if room == 0:
                    here.manifest |= {"position": [span.file, span.start, taken], "skipped": skipped}
                    finish()
                    room = config.shard_size
                    if here.finished(config.max_shards):
                        return
            skipped = [sum(pair) for pair in zip(skipped, passed, strict=True)]
    if not (parts or here.shards or here.rank):
        raise InputError("no text in the input: nothing to tokenize")
    here.manifest |= {"complete": True, "position": [len(files), 0, 0], "skipped": skipped}
    if parts:
        finish()
    else:
        here.save()


def fetch_pretokenized(number: int, here: Folder) -> None:
    """The first shards of PRETOKENIZED, each checked before it is put in its place. Raises InputError."""
    from huggingface_hub import HfApi

    commit = here.begun.get("commit") or ask_hub(PRETOKENIZED, lambda: HfApi().dataset_info(PRETOKENIZED).sha)
    here.manifest["commit"] = commit
    here.begin()
    for index in range(here.next_index, number):
        name = f"finewebedu_{'train' if index else 'val'}_{index:06d}.bin"
        path = fetch(PRETOKENIZED, commit, name, here.copies)
        tokens = open_shard(path)
        os.replace(path, here.out / name)
        here.enter(name, [tokens])
        print(f"{name}: {len(tokens):,} tokens", flush=True)


def tokenize_source(config: ShardConfig, out: Path, rank: int, world_size: int) -> Folder:
    """The folder of config's shards, finished as far as this rank goes; on rank 0, of all. Raises InputError."""
    source, commit = "files" if config.input else f"{REPOSITORY} {config.name}", None
    begun = read_manifest(out / ("manifest.json" if world_size == 1 else f"manifest.{rank}.json"))
    if config.input:
        files = local_files(config.input)
    elif begun.get("source") == source:  # at its commit, whatever the Hub's newest is by now
        commit, files = begun["commit"], begun["files"]
    else:
        commit, files = hub_files(config.name)
    options = {
        "source": source,
        "commit": commit,
        "files": [[name if commit else Path(name).name, size] for name, size in files],
        "text_column": config.text_column,
        "shard_size": config.shard_size,
        "world_size": world_size,
        "tokenizer": SHA256,
    }
    here = Folder(out, options, rank, world_size)
    finished = here.finished(config.max_shards)
    expected = 0 if finished else expect(config, files, commit, out)
    here.begin()
    if finished:
        print(f"{out}: finished already")
    else:
        try:
            make_shards(config, files, commit, here, expected)
        except InputError as error:
            if rank:  # its files are its own, and rank 0 knows nothing of them
                print(f"error: rank {rank}: {error}", file=sys.stderr)
            raise
    return merge(here, options, config.max_shards) if rank == 0 and world_size > 1 else here


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args).check()
    out, rank, world_size = Path(config.out), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank and (config.verify or config.pretokenized):
        return
    try:
        if config.verify:
            here = Folder(out, {})
            here.verify()
        elif config.pretokenized:
            here = Folder(out, {"source": PRETOKENIZED})
            fetch_pretokenized(config.pretokenized, here)
        else:
            here = tokenize_source(config, out, rank, world_size)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise InputError(f"{out}: {error.strerror}; make room and run the same command again: it goes on from the last "
                         "finished shard") from None
    shutil.rmtree(here.copies, ignore_errors=True)
    if rank == 0:
        print(f"{here.summary()}{'; all as they were written' if config.verify else ''}")
        if len(here.shards) == 1:
            print("the one shard is for validation and leaves none to train on: lower --shard-size for more")


if __name__ == "__main__":
    run(main)

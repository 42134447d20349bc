"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                   # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                    # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub, or a folder
    python fineweb.py --pretokenized 3                  # three ready shards of FineWeb-Edu instead of text
    python fineweb.py --verify --out my_shards          # compare every shard with the manifest
    torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 fineweb.py    # on four machines

A document is a row, or a whole .txt or .md file; it becomes 50256 and its tokens. Shard 0 is for validation: a
dataset's validation split if it has one, otherwise the first documents.

A reader process streams rows with the `datasets` library, workers tokenize them, and this process joins the
results in order, so shards do not depend on the number of workers. After each shard it saves manifest.json with
the stream's state before the batch in which the shard ended, and how many tokens of that batch are used. After
any interruption the same command continues there and makes the same bytes. Under torchrun each rank reads its
part, writes every WORLD_SIZE-th shard and keeps a manifest.RANK.json; ranks share a folder and do not communicate.
FineWeb-Edu: Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu.
"""

import errno
import glob
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # or numpy starts a thread per core for matrix products, and there are none here
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np
from tqdm import tqdm

from support.cli import InputError, flag, parse_args, print0, run, torchrun_ranks
from support.files import atomic_write, sha256
from support.texts import Batch, explained, start_child, start_worker, template_columns, tokenize
from support.tokenizer import EOT, SHA256, open_shard

FINEWEB, PRETOKENIZED = "HuggingFaceFW/fineweb-edu", "kjj0/finewebedu10B-gpt2"
SUFFIXES = (".parquet", *(f".{kind}{end}" for kind in ("jsonl", "csv", "txt", "md") for end in ("", ".gz", ".zst")))
VALIDATION = ("validation", "valid", "val", "dev")  # names of a validation split
BATCH_ROWS = 256  # a stream's state depends on it, so a resumed run must use the same
FILE_REMEDY = "replace the file, or name its column with --text-column"
HUB_REMEDY = ("check the names and the network, then run the same command again; a gated dataset: request access on its "
              "Hub page; a gated or private one needs `hf auth login` or HF_TOKEN")


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"
    """Part of FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10."""
    input: tuple = ()  # of str; not tuple[str, ...], which tyro checks with a library that is slow to load
    """Instead of FineWeb-Edu: .parquet, .jsonl, .csv, .txt, .md (the last four also .gz, .zst), folders, patterns."""
    dataset: str = ""
    """Instead of FineWeb-Edu: any text dataset of the Hub, by name, or a local folder in its layout."""
    config: str = ""
    """The dataset's configuration; empty for its default."""
    split: str = ""
    """The dataset's split; empty for train, with a validation split as shard 0."""
    text_column: str = ""
    """Column that holds the text; empty for `text`, or a dataset's only column of strings."""
    template: str = ""
    """Instead of one column: joins several, as in "{question}\\n{answer}"."""
    out: str = "edu_fineweb10B"
    """Folder for the shards."""
    shard_size: int = 0
    """Tokens per shard, the last one is shorter; 0: 100 million, or about a tenth of the text if that is less."""
    workers: int = 0
    """Number of tokenizing processes; 0: one per core."""
    max_shards: int = 0
    """Stop after this many shards, validation included; 0: no limit. A later run may continue."""
    pretokenized: int = 0
    """Instead of text: fetch this many ready .bin shards of FineWeb-Edu, validation included, 100M tokens each."""
    verify: bool = False
    """Only check the shards in --out against its manifest.json."""

    def check(self) -> None:
        """Raises InputError naming every invalid value."""
        counts = {name: getattr(self, name) for name in ("workers", "max_shards", "pretokenized", "shard_size")}
        problems = [f"{flag(name)} {count}: must be from 0 to {2**31}" for name, count in counts.items()
                    if not 0 <= count <= 2**31]
        for names in (("pretokenized", "input", "dataset"), ("text_column", "template")):
            if len(given := [flag(name) for name in names if getattr(self, name)]) > 1:
                problems.append(f"{' and '.join(given)}: choose one")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        if problems:
            raise InputError("; ".join(problems))
        if self.template:
            template_columns(self.template)


# ------------------------------------------------------------------------------------------------------------
# The reader process


def find_files(patterns: tuple[str, ...]) -> list[str]:
    """The files that --input names, in its order; those of a folder or pattern by name. Raises InputError."""
    paths: list[str] = []
    for pattern in patterns:
        inside = sorted(map(str, Path(pattern).rglob("[!.]*")))
        found = [path for path in inside if path.endswith(SUFFIXES) and Path(path).name != "README.md"]
        found = found or ([pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True)))
        bad = [path for path in found if not path.endswith(SUFFIXES) or not Path(path).is_file()]
        if bad or not found:
            raise InputError(f"--input {(bad or [pattern])[0]}: no such file, or none of {', '.join(SUFFIXES)}")
        paths += found
    return paths


def open_file(path: str, columns: list[str], template: str) -> tuple[Batch, Any]:
    """-> (Batch without data, datasets.IterableDataset)"""
    from datasets import load_dataset

    suffix, module, options = Path(re.sub(r"\.(gz|zst)$", "", path)).suffix, "text", {"sample_by": "document"}
    batch = Batch(path, columns, template, json_lines=suffix == ".jsonl")
    if suffix == ".parquet":
        module, options = "parquet", {"columns": columns, "batch_size": BATCH_ROWS}
    elif suffix == ".csv":  # columns as text: pandas would read 007 as 7 and drop NA
        module, options = "csv", {"converters": dict.fromkeys(columns, str), "chunksize": 1000}
    elif suffix == ".jsonl":
        options = {"sample_by": "line"}
    else:
        batch = Batch(path, ["text"], "")
    return batch, load_dataset(module, data_files=[glob.escape(path)], split="train", streaming=True, **options)


def open_dataset(config: ShardConfig, columns: list[str], commit: str | None) -> tuple[list, list[str], str | None]:
    """-> (functions like open_file for the validation split, or None, and for the split, paths, commit on the Hub)"""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    name, folder = f"--dataset {config.dataset}", Path(config.dataset).is_dir() and os.path.abspath(config.dataset)
    commit = commit or (None if folder else HfApi().dataset_info(config.dataset).sha)
    builder = load_dataset_builder(folder or config.dataset, config.config or None, revision=commit)
    splits = {str(split): paths for split, paths in (builder.config.data_files or {}).items()}
    split = config.split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if split not in splits:
        raise InputError(f"{name}: no split {split!r}; --split names one of: {', '.join(splits)}")
    validation = next((other for other in VALIDATION if other in splits and split == "train"), None)
    rows = builder.as_streaming_dataset(split)
    head = rows.features or next(rows.with_format("arrow").iter(batch_size=1))
    kinds = {field.name: str(field.type) for field in getattr(head, "arrow_schema", None) or head.schema}
    texts = [column for column, kind in kinds.items() if "string" in kind and "<" not in kind]
    if not (config.text_column or config.template or "text" in texts):
        columns = texts if len(texts) == 1 else ["text"]
    if not set(columns) <= set(kinds if config.template else texts):
        listed = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        raise InputError(f"{name}: no text in {', '.join(columns)}; --text-column or --template chooses from: {listed}")
    if builder.name == "parquet":  # read no other columns, and little at a time
        builder.config.columns, builder.config.batch_size = columns, BATCH_ROWS
    batch = Batch(name, columns, config.template)
    streams = [part and (lambda part=part: (batch, builder.as_streaming_dataset(part))) for part in (validation, split)]
    return streams, [*splits.get(validation, []), *splits[split]], commit


def read(
    connection: Connection, config: ShardConfig, files: list[str], commit: str | None, rank: int, world_size: int
) -> None:
    """Sends (entries for the manifest, is there a validation split?, estimate of tokens), receives the position to
    start at, sends (position, Batch) pairs and at the end None; or an InputError instead of any of these."""
    start_child()
    import datasets
    import fsspec.compression
    import pyarrow
    from datasets.distributed import split_dataset_by_node

    datasets.config.TORCH_AVAILABLE = False  # otherwise streaming imports torch
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(100)  # its exceptions say the same
    # The zstandard package takes a truncated file for a complete one; pyarrow does not.
    fsspec.compression.register_compression("zstd", lambda file, **_: pyarrow.CompressedInputStream(
        pyarrow.PythonFile(file, "r"), "zstd"), "zst", force=True)
    columns = template_columns(config.template) if config.template else [config.text_column or "text"]
    name, remedy = f"--dataset {config.dataset}", HUB_REMEDY
    try:
        with explained(name, remedy=remedy):
            streams, paths = [partial(open_file, path, columns, config.template) for path in files], files
            if not files:
                streams, paths, commit = open_dataset(config, columns, commit)
            sizes, tokens = [], 0
            for path in paths:
                filesystem, stripped = fsspec.core.url_to_fs(path)
                sizes.append([Path(path).name, filesystem.size(stripped)])
                factors = {".parquet": 1.6 if commit else 3, ".gz": 4, ".zst": 4, ".zip": 4}  # text in a byte
                tokens += int(sizes[-1][1] * factors.get(Path(path).suffix, 1) / 4.5)  # bytes a token, in English
        validation = not files and streams[0] is not None
        connection.send(({"commit": commit, "files": [] if commit else sizes}, validation, tokens))
        first, state = connection.recv()
        for index, stream in list(enumerate(streams))[first:]:
            # A rank takes whole files if there are enough; rank 0 the validation split; each a part of another split.
            shared = len(files) < world_size if files else index == 1
            if not stream or not (shared or index % world_size == rank):
                continue
            name, remedy = (files[index], FILE_REMEDY) if files else (name, remedy)
            with explained(name, remedy=remedy):
                batch, rows = stream()
                if shared and world_size > 1:
                    strategy = "shards" if rows.num_shards >= world_size else "examples"
                    rows = split_dataset_by_node(rows, rank, world_size, strategy=strategy)
                rows = rows.with_format("arrow")
                rows.load_state_dict(state := state if index == first else None)
                for table in rows.iter(batch_size=BATCH_ROWS):
                    table, sink = table.select(["text"] if batch.json_lines else batch.columns), pyarrow.BufferOutputStream()
                    with pyarrow.ipc.new_stream(sink, table.schema) as writer:  # a pickled slice holds the whole table
                        writer.write_table(table)
                    connection.send(((index, state), batch._replace(data=sink.getvalue().to_pybytes())))
                    state = rows.state_dict()
        connection.send(None)
    except InputError as error:
        connection.send(error)


# ------------------------------------------------------------------------------------------------------------
# Shards and their manifest


class Folder:
    """The shards of a rank in --out, and their manifest. Raises InputError if these do not fit each other."""

    def __init__(self, out: Path, rank: int = 0, world_size: int = 1):
        self.out, self.rank, self.world_size = out, rank, world_size
        self.path = out / ("manifest.json" if world_size == 1 else f"manifest.{rank}.json")
        self.manifest = {"complete": False, "position": [0, None], "used": 0, "skipped": [0, 0], "shards": []}
        self.manifest |= self.read(self.path)
        self.shards: list[dict[str, Any]] = self.manifest["shards"]
        for shard in self.shards:
            if len(open_shard(out / shard["name"])) != shard["tokens"]:
                raise InputError(f"{out / shard['name']}: not {shard['tokens']} tokens as in {self.path.name}; put the "
                                 "original back or use a new --out")
        self.next_index = len(self.shards) * world_size + rank

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        with explained(str(path), remedy="move it and its shards away"):
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def finished(self, max_shards: int) -> bool:
        return self.manifest["complete"] or 0 < max_shards <= self.next_index

    def check(self, options: dict[str, Any]) -> None:
        """Raises InputError if shards here were made with other options."""
        for recorded in (self.manifest, self.read(self.out / "manifest.json")):
            for key, now in options.items():
                if recorded.get("shards") and now != (then := recorded.get(key)):
                    raise InputError(f"{self.out}: started with {key} {then!r}, now {now!r}; use the original value or "
                                     "a new --out")

    def begin(self, options: dict[str, Any]) -> None:
        """Records the options and removes what a killed run left. Raises InputError for a foreign shard."""
        self.out.mkdir(parents=True, exist_ok=True)
        listed = {shard["name"] for shard in self.shards}
        for path in self.out.iterdir():
            match = re.fullmatch(r".+_(?:train|val)_(\d{6})\.(?:npy|bin)(\.\d+\.partial)?", path.name)
            ours = match and int(match[1]) % self.world_size == self.rank and path.name not in listed
            if (ours and match[2]) or re.fullmatch(rf"\.({self.path.name}|manifest.json)\.\d+\.partial", path.name):
                path.unlink()
            elif ours and not (self.path.exists() and int(match[1]) == self.next_index):  # that one is rewritten
                raise InputError(f"{path}: not in {self.path.name}; remove it or use a new --out")
        self.manifest |= options
        self.save()

    def save(self) -> None:
        with atomic_write(self.path, "w") as file:
            file.write(json.dumps(self.manifest, indent=1) + "\n")

    def write(self, parts: list[np.ndarray]) -> None:
        """Adds a shard made of parts, each 1-D uint16."""
        name = f"edufineweb_{'train' if self.next_index else 'val'}_{self.next_index:06d}.npy"
        header = {"descr": "<u2", "fortran_order": False, "shape": (sum(map(len, parts)),)}
        with atomic_write(self.out / name) as file:  # not np.save, whose error does not say that the disk is full
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(part.data for part in parts)
        self.enter(name)

    def enter(self, name: str) -> None:
        """Enters a shard into the manifest."""
        tokens = open_shard(self.out / name)
        documents = int(np.count_nonzero(tokens == EOT))  # those that begin in it
        self.shards.append({"name": name, "tokens": len(tokens), "documents": documents, "sha256": sha256(self.out / name)})
        self.next_index += self.world_size
        self.save()
        tqdm.write(f"{name}: {len(tokens):,} tokens, {documents:,} documents")

    def verify(self) -> None:
        """Raises InputError naming the files that changed or do not belong."""
        if not self.shards:
            raise InputError(f"{self.out}: no shards in {self.path.name} to check; --out names the folder")
        changed = [shard["name"] for shard in self.shards if sha256(self.out / shard["name"]) != shard["sha256"]]
        others = {path.name for path in self.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")}
        others -= {shard["name"] for shard in self.shards}
        if changed or others:
            raise InputError(f"{self.out}: changed since written: {', '.join(changed) or 'none'}; not in "
                             f"{self.path.name}: {', '.join(sorted(others)) or 'none'}; make them again in a new --out")


def merge(here: Folder, max_shards: int) -> Folder:
    """Rank 0's last task: waits for the other ranks and merges their manifests into manifest.json."""
    others = [Folder(here.out, rank, here.world_size) for rank in range(here.world_size)]
    while not all(other.finished(max_shards) for other in others):
        time.sleep(1)
        others = [Folder(here.out, rank, here.world_size) for rank in range(here.world_size)]
    whole = Folder(here.out)
    shards = sorted((shard for other in others for shard in other.shards), key=lambda shard: shard["name"][-10:])
    whole.manifest = here.manifest | {key: [other.manifest[key] for other in others] for key in ("position", "used")}
    whole.manifest |= {"shards": shards, "complete": all(other.manifest["complete"] for other in others),
                       "skipped": np.sum([other.manifest["skipped"] for other in others], axis=0).tolist()}
    whole.save()
    return Folder(here.out)


def write_shards(here: Folder, batches: Iterable[tuple], size: int, max_shards: int, validation: bool) -> None:
    """Writes a rank's shards of (position, tokens, skipped) until the batches end or max_shards are there; stream 0, if
    it is a validation split, becomes shard 0. Raises InputError if there is no text."""
    done, skipped = here.manifest["used"], here.manifest["skipped"]  # done: tokens that are in finished shards
    parts: list[np.ndarray] = []

    def finish(position: tuple, used: int, complete: bool = False) -> bool:
        here.manifest |= {"position": position, "used": used, "skipped": skipped, "complete": complete}
        here.write(parts) if parts else here.save()
        parts.clear()
        return here.finished(max_shards)

    for position, tokens, more in batches:
        if validation and here.next_index == 0 and position[0] > 0 and finish(position, 0):
            return
        used = min(done, len(tokens))
        done -= used
        while used < len(tokens):
            room = sys.maxsize if validation and here.next_index == 0 else size - sum(map(len, parts))
            parts.append(tokens[used : used + room])
            used += len(parts[-1])
            if len(parts[-1]) == room and finish(position, used):
                return
        skipped = [a + b for a, b in zip(skipped, more, strict=True)]
    if not (parts or here.shards or here.rank):
        raise InputError("no text in the input: nothing to tokenize")
    finish((sys.maxsize, None), 0, complete=True)


# ------------------------------------------------------------------------------------------------------------
# Main


@contextmanager
def processes(workers: int, *reader: Any) -> Iterator[tuple[Connection, ProcessPoolExecutor]]:
    """Starts the reader, with these arguments, and a pool of workers. Raises InputError if one is killed."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=read, args=(theirs, *reader), daemon=True)
    process.start()
    theirs.close()
    pool = ProcessPoolExecutor(workers, initializer=start_worker)
    try:
        pool.submit(os.getpid)  # starts them all
        yield ours, pool
    except (BrokenExecutor, EOFError):
        raise InputError("a worker or the reader was killed, perhaps for lack of memory; run the same command again to "
                         "continue, with fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)
        process.kill()


def receive(connection: Connection) -> Any:
    if isinstance(message := connection.recv(), InputError):
        raise message
    return message


def tokenized(connection: Connection, pool: ProcessPoolExecutor, ahead: int) -> Iterator[tuple]:
    """(position, tokens, skipped) in order, with `ahead` batches at the workers."""
    pending: deque = deque()
    while True:
        if message := receive(connection):
            pending.append((message[0], pool.submit(tokenize, message[1])))
        while len(pending) > (ahead if message else 0):
            position, future = pending.popleft()
            yield position, *future.result()
        if not message:
            return


def make_shards(config: ShardConfig, here: Folder) -> None:
    """Makes a rank's shards of --input or --dataset. Raises InputError."""
    files = find_files(config.input)
    options = {"source": "files" if files else "folder" if Path(config.dataset).is_dir() else config.dataset}
    options |= {name: getattr(config, name) for name in ("config", "split", "text_column", "template")}
    options |= {"world_size": here.world_size, "batch_rows": BATCH_ROWS, "tokenizer": SHA256}
    here.check(options)
    if here.finished(config.max_shards):
        return print(f"{here.out}: finished already")
    workers = config.workers or max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    with processes(workers, config, files, here.manifest.get("commit"), here.rank, here.world_size) as (reader, pool):
        found, validation, tokens = receive(reader)
        tenth = str(max(tokens // 10, 1))
        size = config.shard_size or min(int(tenth[0]) * 10 ** (len(tenth) - 1), 100_000_000)  # a tenth, rounded down
        here.check(found | {"shard_size": size})
        tokens = min(tokens, config.max_shards * size or tokens)
        folder = next(path for path in (here.out.absolute(), *here.out.absolute().parents) if path.exists())
        need, free = 2 * (tokens - here.next_index * size), shutil.disk_usage(folder).free
        if need > free:
            raise InputError(f"{here.out}: needs about {need / 1e9:,.2f} GB of disk, {free / 1e9:,.2f} GB free; free some "
                             "space, use another --out or lower --max-shards")
        print0(f"{here.out}: about {tokens / 1e6:,.1f} million tokens in shards of {size:,}")
        here.begin(options | found | {"shard_size": size})
        reader.send(here.manifest["position"])
        write_shards(here, tokenized(reader, pool, 2 * workers), size, config.max_shards, validation)


def fetch_pretokenized(number: int, here: Folder) -> None:
    """The first shards of PRETOKENIZED, each checked before it appears. Raises InputError."""
    from huggingface_hub import HfApi, hf_hub_download

    here.check({"source": PRETOKENIZED})
    with explained(f"--pretokenized: {PRETOKENIZED}", remedy=HUB_REMEDY):
        commit, copies = here.manifest.get("commit") or HfApi().dataset_info(PRETOKENIZED).sha, here.out / ".hub"
        here.begin({"source": PRETOKENIZED, "commit": commit})
        for index in range(here.next_index, number):
            name = f"finewebedu_{'train' if index else 'val'}_{index:06d}.bin"
            options = {"repo_type": "dataset", "revision": commit, "local_dir": copies}
            open_shard(Path(hf_hub_download(PRETOKENIZED, name, **options)))
            os.replace(copies / name, here.out / name)
            here.enter(name)
    shutil.rmtree(copies, ignore_errors=True)


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args)
    config.check()
    rank, _, world_size = torchrun_ranks()
    if alone := config.verify or config.pretokenized > 0:
        world_size = 1
    here = Folder(Path(config.out), rank, world_size)
    if alone and rank:
        return
    try:
        if config.verify:
            here.verify()
        elif config.pretokenized:
            fetch_pretokenized(config.pretokenized, here)
        elif config.input or config.dataset:
            make_shards(config, here)
        else:
            make_shards(replace(config, dataset=FINEWEB, config=config.name), here)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(f"{here.out}: {error.strerror}; free some space and run the same command again") from None
    if rank == 0:
        here = merge(here, config.max_shards) if world_size > 1 else here
        nulls, empties = here.manifest["skipped"]
        print(f"{here.out}: {len(here.shards)} shards, {sum(shard['tokens'] for shard in here.shards):,} tokens, "
              f"{sum(shard['documents'] for shard in here.shards):,} documents ({nulls:,} nulls and {empties:,} empty "
              f"texts skipped){'; all as they were written' if config.verify else ''}")
        if len(here.shards) == 1:
            print("the only shard is for validation, which leaves none to train on; lower --shard-size")


if __name__ == "__main__":
    run(main)

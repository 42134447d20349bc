"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                 # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub or a folder
    python fineweb.py --pretokenized 3               # three ready shards of FineWeb-Edu instead of text
    python fineweb.py --verify --out my_shards       # compare every shard with the manifest
    torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 fineweb.py    # on four machines

A document is a row, or a whole .txt or .md file; it becomes 50256 and its tokens. Shard 0 is for validation:
a dataset's validation split if it has one, otherwise the first documents.
FineWeb-Edu: Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu.

A reader process streams rows with the `datasets` library, workers tokenize them, and this process joins the
results in order. After each shard it saves manifest.json with the stream's state before the batch in which
the shard ended, and the number of tokens used of that batch. The same command continues there after any
interruption, and makes the same bytes for any number of workers. Under torchrun each rank reads its part,
writes every WORLD_SIZE-th shard and keeps a manifest.RANK.json; ranks share a folder and do not communicate.
"""

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
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # or numpy starts a thread per core for matrix products, and there are none here
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

from support import texts
from support.cli import InputError, flag, parse_args, print0, run, torchrun_ranks
from support.files import atomic_write, sha256
from support.texts import explained
from support.tokenizer import EOT, SHA256, get_tokenizer, open_shard

FINEWEB, PRETOKENIZED = "HuggingFaceFW/fineweb-edu", "kjj0/finewebedu10B-gpt2"

@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"
    """Part of FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10."""
    input: tuple = ()  # of str; not tuple[str, ...], which tyro checks with a library that is slow to load
    """Instead of FineWeb-Edu: .parquet, .jsonl, .csv, .txt, .md (also .gz, .zst), folders or patterns."""
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
    """Tokens per shard; 0: 100 million, or about a tenth of the text if that is less."""
    workers: int = 0
    """Number of tokenizing processes; 0: one per core."""
    max_shards: int = 0
    """Stop after this many shards, validation included; 0: no limit. A later run may continue."""
    pretokenized: int = 0
    """Instead of text: fetch this many ready shards of FineWeb-Edu, 100M tokens each, validation included."""
    verify: bool = False
    """Only check the shards in --out against its manifest.json."""

    def check(self) -> None:
        """Raises InputError naming every invalid value."""
        problems = [f"{flag(name)} {getattr(self, name)}: must be from 0 to {2**31}"
                    for name in ("workers", "max_shards", "pretokenized", "shard_size")
                    if not 0 <= getattr(self, name) <= 2**31]
        for names in (("pretokenized", "input", "dataset"), ("text_column", "template")):
            if len(given := [flag(name) for name in names if getattr(self, name)]) > 1:
                problems.append(f"{' and '.join(given)}: choose one")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        if problems:
            raise InputError("; ".join(problems))
        if self.template:
            texts.template_columns(self.template)

# ------------------------------------------------------------------------------------------------------------
# Processes

def read(
    connection: Connection, config: ShardConfig, files: list[str], manifest: dict, rank: int, world_size: int
) -> None:
    """The reader process. Sends a texts.Source, then ([stream, its state], Batch) pairs from the manifest's
    position on, then None; or an InputError instead of any of these."""
    texts.start_child()
    try:
        if files:
            source = texts.open_files(files, config.text_column, config.template)
        else:
            options = (config.dataset, config.config, config.split, config.text_column, config.template)
            source = texts.open_dataset(*options, commit=manifest.get("commit"))
        connection.send(source._replace(streams=[]))
        first, first_state = manifest["position"]
        for index, stream in enumerate(source.streams):
            # Whole files if there are enough for all ranks; rank 0 takes a validation split.
            shared = len(files) < world_size if files else index == 1
            if stream and index >= first and (shared or index % world_size == rank):
                share = (rank, world_size) if shared else (0, 1)
                start = first_state if index == first else None
                for state, batch in texts.read_stream(stream, start, *share):
                    connection.send(([index, state], batch))
        connection.send(None)
    except InputError as error:
        connection.send(error)

def tokenized(workers: int, *reader_arguments: Any) -> Iterator[Any]:
    """Starts the reader and the workers. Yields the Source, then (position, tokens, skipped) in order. Raises
    InputError."""
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.Process(target=read, args=(theirs, *reader_arguments), daemon=True)
    reader.start()
    theirs.close()
    pool = ProcessPoolExecutor(workers, initializer=texts.start_child, initargs=(get_tokenizer,))
    pending: deque = deque()
    try:
        pool.submit(os.getpid)  # starts all; they load the tokenizer while the reader imports `datasets`
        while message := ours.recv():
            if isinstance(message, InputError):
                raise message
            if isinstance(message, texts.Source):
                yield message
                continue
            pending.append((message[0], pool.submit(texts.tokenize, message[1])))
            if len(pending) > 2 * workers:
                position, future = pending.popleft()
                yield position, *future.result()
        for position, future in pending:
            yield position, *future.result()
    except (BrokenExecutor, EOFError):
        raise InputError("a worker or the reader was killed (out of memory?); run the same command again to "
                         "continue, with fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)
        reader.kill()

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
                raise InputError(f"{out / shard['name']}: not {shard['tokens']} tokens as in the manifest; "
                                 "put the original back or use a new --out")
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
                    raise InputError(f"{self.out}: started with {key} {then!r}, now {now!r}; use the "
                                     "original value or a new --out")

    def begin(self, options: dict[str, Any]) -> None:
        """Records the options and removes what a killed run left. Raises InputError for a foreign shard."""
        self.out.mkdir(parents=True, exist_ok=True)
        listed = {shard["name"] for shard in self.shards}
        for path in self.out.iterdir():
            match = re.fullmatch(r".+_(?:train|val)_(\d{6})\.(?:npy|bin)(\.\d+\.partial)?", path.name)
            ours = match and int(match[1]) % self.world_size == self.rank and path.name not in listed
            manifest = re.fullmatch(rf"\.({self.path.name}|manifest.json)\.\d+\.partial", path.name)
            if manifest or (ours and match[2]):
                path.unlink()
            elif ours and not (self.path.exists() and int(match[1]) == self.next_index):  # which is rewritten
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
        remedy = "free some space and run the same command again"
        path = self.out / name
        with explained(str(path), "cannot be written", remedy), atomic_write(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(part.data for part in parts)
        self.enter(name)

    def enter(self, name: str) -> None:
        """Enters a shard into the manifest."""
        tokens = open_shard(self.out / name)
        documents = int(np.count_nonzero(tokens == EOT))  # those that begin in it
        checksum = sha256(self.out / name)
        self.shards.append({"name": name, "tokens": len(tokens), "documents": documents, "sha256": checksum})
        self.next_index += self.world_size
        self.save()
        print(f"{name}: {len(tokens):,} tokens, {documents:,} documents", flush=True)

    def verify(self) -> None:
        """Raises InputError naming the files that changed or do not belong."""
        if not self.shards:
            raise InputError(f"{self.out}: no shards in {self.path.name} to check; --out names the folder")
        listed = {shard["name"]: shard["sha256"] for shard in self.shards}
        changed = [name for name, recorded in listed.items() if sha256(self.out / name) != recorded]
        others = {path.name for path in self.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")}
        others = sorted(others - listed.keys())
        if changed or others:
            raise InputError(f"{self.out}: changed since written: {', '.join(changed) or 'none'}; not in "
                             f"{self.path.name}: {', '.join(others) or 'none'}; repeat in a new --out")

def merge(here: Folder, max_shards: int) -> Folder:
    """Rank 0's last task: waits for the other ranks and merges their manifests into manifest.json."""
    others = [Folder(here.out, rank, here.world_size) for rank in range(here.world_size)]
    while not all(other.finished(max_shards) for other in others):
        time.sleep(1)
        others = [Folder(here.out, rank, here.world_size) for rank in range(here.world_size)]
    whole, manifests = Folder(here.out), [other.manifest for other in others]
    shards = [shard for manifest in manifests for shard in manifest["shards"]]
    whole.manifest = here.manifest | {
        "shards": sorted(shards, key=lambda shard: shard["name"][-10:]),
        "complete": all(manifest["complete"] for manifest in manifests),
        "skipped": np.sum([manifest["skipped"] for manifest in manifests], axis=0).tolist(),
    }
    whole.save()
    return Folder(here.out)

def write_shards(
    here: Folder, batches: Iterable[tuple], size: int, max_shards: int, validation: bool
) -> None:
    """Writes a rank's shards of (position, tokens, skipped) until the batches end or max_shards are there; a
    validation split, stream 0, becomes shard 0. Raises InputError if there is no text."""
    done, skipped = here.manifest["used"], here.manifest["skipped"]  # done: tokens in finished shards
    parts: list[np.ndarray] = []

    def finish(position: tuple, used: int, complete: bool = False) -> bool:
        here.manifest |= {"position": position, "used": used, "skipped": skipped, "complete": complete}
        here.write(parts) if parts else here.save()
        parts.clear()
        return here.finished(max_shards)

    for position, tokens, more in batches:
        if validation and here.next_index == 0 and position[0] > 0:  # the validation split has ended
            if not parts:
                raise InputError("no text in the validation split; choose another --split")
            if finish(position, 0):
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

def make_shards(config: ShardConfig, here: Folder) -> None:
    """Makes a rank's shards of --input or --dataset. Raises InputError."""
    files = texts.find_files(config.input)
    options = {"source": "files" if files else "folder" if Path(config.dataset).is_dir() else config.dataset}
    options |= {name: getattr(config, name) for name in ("config", "split", "text_column", "template")}
    options |= {"world_size": here.world_size, "batch_rows": texts.BATCH_ROWS, "tokenizer": SHA256}
    here.check(options)
    if here.finished(config.max_shards):
        return print(f"{here.out}: finished already")
    workers = config.workers or max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    with closing(tokenized(workers, config, files, here.manifest, here.rank, here.world_size)) as batches:
        source = next(batches)
        tenth = str(max(source.tokens // 10, 1))  # its first digit, then zeros: 1,431,000 -> 1,000,000
        size = config.shard_size or min(int(tenth[0]) * 10 ** (len(tenth) - 1), 100_000_000)
        options |= {"commit": source.commit, "files": source.files, "shard_size": size}
        here.check(options)
        tokens = min(source.tokens, config.max_shards * size or source.tokens)
        need = 2 * (tokens - here.next_index * size)
        free = shutil.disk_usage(next(path for path in (here.out, *here.out.parents) if path.exists())).free
        if need > free:
            raise InputError(f"{here.out}: needs about {need / 1e9:,.2f} GB of disk, has {free / 1e9:,.2f}; "
                             "free some space, use another --out or lower --max-shards")
        print0(f"{here.out}: about {tokens / 1e6:,.1f} million tokens in shards of {size:,}")
        here.begin(options)
        write_shards(here, batches, size, config.max_shards, source.validation)

def fetch_pretokenized(number: int, here: Folder) -> None:
    """The first shards of PRETOKENIZED, each checked before it appears. Raises InputError."""
    from huggingface_hub import HfApi, hf_hub_download

    here.check({"source": PRETOKENIZED})
    with explained(f"--dataset {PRETOKENIZED}"):
        commit = here.manifest.get("commit") or HfApi().dataset_info(PRETOKENIZED).sha
        copies = here.out / ".hub"
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
    config = replace(config, template=config.template.replace("\\n", "\n").replace("\\t", "\t"))
    rank, _, world_size = torchrun_ranks()
    if alone := config.verify or config.pretokenized > 0:
        world_size = 1
    here = Folder(Path(config.out), rank, world_size)
    if alone and rank:
        return
    if config.verify:
        here.verify()
    elif config.pretokenized:
        fetch_pretokenized(config.pretokenized, here)
    elif config.input or config.dataset:
        make_shards(config, here)
    else:
        make_shards(replace(config, dataset=FINEWEB, config=config.name), here)
    if rank == 0:
        here = merge(here, config.max_shards) if world_size > 1 else here
        tokens, documents = (sum(shard[key] for shard in here.shards) for key in ("tokens", "documents"))
        nulls, empties = here.manifest["skipped"]
        print(f"{here.out}: {len(here.shards)} shards, {tokens:,} tokens, {documents:,} documents "
              f"({nulls:,} nulls and {empties:,} empty texts skipped)"
              f"{'; all as they were written' if config.verify else ''}")
        if len(here.shards) == 1:
            print("the only shard is for validation, which leaves none to train on; lower --shard-size")

if __name__ == "__main__":
    run(main)

"""Turns text into shards of GPT-2 tokens for train_gpt2.py.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub

A document is a row of a table, or a whole .txt or .md file. Its tokens are 50256, which means that
a document begins, and then the tokens of its text. All documents together are one long row of
tokens, and a shard is a file with 100 million of them. Shard 0 is for validation.

This process reads documents and writes shards, and worker processes tokenize. manifest.json lists
the shards, and the place in the text where the next one begins. So the same command goes on after
it was stopped, and it writes the same bytes with any number of workers."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from support.command_line import flag, parse_args
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import atomic_path, locked, sha256, write_text
from support.read_files_and_datasets import (
    DATASET_REMEDY,
    START,
    Batches,
    Dataset,
    Files,
    Place,
    explained,
)
from support.shards import SHARD_NAME, open_shard
from support.tokenizer import EOT, encode, get_tokenizer

FINEWEB = "HuggingFaceFW/fineweb-edu"  # a dataset of the Hub
NAME = "edufineweb_{split}_{number:06d}.npy"  # of a shard; `split` is val or train
SHARD_SIZE = 10**8  # tokens
TOKENS_PER_BYTE = {".parquet": 0.35, ".gz": 0.8, ".zst": 0.8}  # roughly; other files have 0.25


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


# --------------------------------------------------------------------------------------------------
# From text to shards

Tokens = Iterator[tuple[Place, np.ndarray]]  # (the place where they begin, 1-D uint16)


def make_shards(config: ShardConfig, folder: "Folder") -> None:
    """Makes the shards of --input, of --dataset, or of FineWeb-Edu."""
    if config.input:
        source = Files(config.input, config.text_column)
    else:
        local = Path(config.dataset).is_dir()
        commit = None if local else commit_of(config.dataset, folder)
        source = Dataset(config.dataset, config.config, config.split, config.text_column, commit)
    names = ("config", "split", "text_column", "shard_size")
    settings = {name: getattr(config, name) for name in names}
    folder.begin({"source": source.kind, **settings, **source.identity})
    if folder.finished:
        return
    size = config.shard_size or SHARD_SIZE
    val_size = size
    if not config.shard_size and config.dataset != FINEWEB:
        val_size = size // 10  # your own text may hardly be longer than a shard
    workers = config.workers or os.cpu_count() or 1
    get_tokenizer()  # loads it, so that forked workers have it
    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        pool.submit(os.getpid)  # forks the workers now, before the source starts threads
        source.open()
        estimate = sum(
            TOKENS_PER_BYTE.get(Path(name).suffix.lower(), 0.25) * size
            for name, size in source.sizes
        )
        print(f"reading {len(source.sizes)} files, roughly {estimate / 1e6:,.1f} million tokens")
        total = min(estimate, config.max_shards * size or estimate)
        before = sum(shard["tokens"] for shard in folder.shards)
        look = {"unit": "tok", "unit_scale": True, "leave": False, "disable": None}
        with tqdm(total=total, initial=before, **look) as bar:
            if source.has_validation_split and not folder.shards:  # it becomes shard 0
                tokens = tokenize_in_workers(pool, workers, source.read(START, end=1), bar)
                validation = np.concatenate([np.empty(0, np.uint16), *(part for _, part in tokens)])
                if len(validation) > 0:
                    folder.write(validation, after=START | {"stream": 1})
            tokens = tokenize_in_workers(pool, workers, source.read(folder.next), bar)
            if not folder.finished:
                for shard, after in cut(tokens, len(folder.shards), val_size, size):
                    folder.write(shard, after)
                    if folder.finished:
                        break


def tokenize_in_workers(
    pool: ProcessPoolExecutor, workers: int, batches: Batches, bar: tqdm
) -> Tokens:
    """Tokenizes batches of documents in worker processes, and yields them in order."""
    pending: deque[tuple[Place, Future]] = deque()

    def result() -> tuple[Place, np.ndarray]:
        place, future = pending.popleft()
        tokens = future.result()[place["used"] :]  # the rest is in earlier shards
        bar.update(len(tokens))
        return place, tokens

    for place, documents in batches:
        pending.append((place, pool.submit(tokenize, documents)))
        if len(pending) > 2 * workers:  # enough to keep them busy; more would fill memory
            yield result()
    while pending:
        yield result()


def tokenize(documents: list[str | None]) -> np.ndarray:
    """The tokens of documents, 1-D uint16. Skips rows without a text."""
    parts: list[Any] = [[]]  # concatenate needs at least one
    for text in documents:
        if text:
            parts += [[EOT], *encode(text)]  # encode() yields arrays, the pieces of a long text
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe")  # all tokens fit


def cut(
    batches: Tokens, number: int, val_size: int, size: int
) -> Iterator[tuple[np.ndarray, Place | None]]:
    """Cuts tokens into shards, from shard `number` on. Yields (a shard, the place after it).

    Shard 0 has val_size tokens, the others have `size`. Of a text with at most `size` tokens, a
    tenth is shard 0, and the rest is shard 1. The place after the last shard is None."""
    held: deque[tuple[Place, np.ndarray]] = deque()  # batches that are in no shard yet
    count = 0  # the number of their tokens
    for place, tokens in batches:
        held.append((place, tokens))
        count += len(tokens)
        while count > size:  # with >= nothing might be left for training
            yield take(held, val_size if number == 0 else size)
            count -= val_size if number == 0 else size
            number += 1
    if count == 0:
        part = "the split `train`" if number > 0 else "the input"
        raise UserError(f"no text in {part}: nothing to tokenize")
    if number == 0:
        tenth = max(count // 10, 1)
        yield take(held, tenth)
        count -= tenth
    yield take(held, count)[0], None


def take(held: deque[tuple[Place, np.ndarray]], count: int) -> tuple[np.ndarray, Place | None]:
    """Removes the first `count` tokens of `held`. Returns (these tokens, the place after them)."""
    parts = []
    while count > 0:
        place, tokens = held.popleft()
        parts.append(tokens[:count])
        if len(tokens) > count:  # the rest goes back
            held.appendleft((place | {"used": place["used"] + count}, tokens[count:]))
        count -= len(parts[-1])
    return np.concatenate(parts), held[0][0] if held else None


def start_worker() -> None:
    """Makes a worker end with its parent, even if that is killed. The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


# --------------------------------------------------------------------------------------------------
# The folder of shards


class Folder:
    """The shards in --out, and manifest.json, which lists them."""

    def __init__(self, out: Path, name: str, max_shards: int):
        """`name` is the pattern of a shard's name, such as NAME."""
        self.out = out
        self.name = name
        self.max_shards = max_shards
        self.path = out / "manifest.json"
        manifest: dict[str, Any] = {"next": START, "shards": []}
        with explained(lambda: str(self.path), "move it and its shards away"):
            if self.path.exists():
                manifest = json.loads(self.path.read_text(encoding="utf-8"))
            self.shards = manifest.pop("shards")
            # The place where the next shard begins, or None if all of the text is in shards.
            self.next = manifest.pop("next")
            self.sums = {shard["name"]: shard["sha256"] for shard in self.shards}
        self.options = manifest  # the rest of it: the text and the settings that made the shards

    @property
    def finished(self) -> bool:
        return self.next is None or 0 < self.max_shards <= len(self.shards)

    @property
    def next_name(self) -> str:
        return self.name.format(split="train" if self.shards else "val", number=len(self.shards))

    def begin(self, options: dict[str, Any]) -> None:
        """UserError if the shards were made with other options, or if others are among them."""
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

    def write(self, tokens: np.ndarray, after: Place | None) -> None:
        """Writes the next shard. `after` is the place after it, or None at the end of the text."""
        name = self.next_name
        with atomic_path(self.out / name) as partial, open(partial, "wb") as file:
            # np.save does the same, but its error would not say that the disk is full.
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

    def save(self) -> None:
        manifest = self.options | {"next": self.next, "shards": self.shards}
        write_text(self.path, json.dumps(manifest, indent=1))

    def verify(self) -> None:
        """UserError that names shards which have changed, are missing, or are not listed."""
        paths = [path for path in self.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")]
        with tqdm(paths, unit="file", leave=False, disable=None) as bar:
            found = {path.name: sha256(path) for path in bar}
        names = sorted({name for name, _ in found.items() ^ self.sums.items()})
        if names or not found:
            problem = ", ".join(names) or "no shards"
            raise UserError(f"{self.out}: does not match manifest.json: {problem}")
        print(f"{len(found)} shards: all checksums match")


def commit_of(dataset: str, folder: Folder) -> str:
    """The commit that the shards in a folder were made from; if there are none, the newest one."""
    from huggingface_hub import HfApi

    if folder.shards and "commit" in folder.options:
        return folder.options["commit"]
    with explained(lambda: f"--dataset {dataset}", DATASET_REMEDY):
        return HfApi().dataset_info(dataset).sha


# --------------------------------------------------------------------------------------------------
# --pretokenized: shards of FineWeb-Edu that others have made

PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # a dataset of the Hub
PRETOKENIZED_NAME = "finewebedu_{split}_{number:06d}.bin"


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


# --------------------------------------------------------------------------------------------------
# The command


def read_config(args: list[str] | None) -> ShardConfig:
    """Reads the command line. A UserError names everything that is wrong with it."""
    config = parse_args(ShardConfig, args=args)
    # `--input $FILES` without FILES must not make FineWeb-Edu.
    for name in ("input", "dataset"):
        if flag(name) in (sys.argv if args is None else args) and not getattr(config, name):
            raise UserError(f"{flag(name)}: has no value")
    problems = []
    for name in ("shard_size", "workers", "max_shards", "pretokenized"):
        if getattr(config, name) < 0:
            problems.append(f"{flag(name)} {getattr(config, name)}: must be at least 0")
    if bool(config.input) + bool(config.dataset) + bool(config.pretokenized) > 1:
        problems.append("--input, --dataset and --pretokenized: choose one")
    if config.name != ShardConfig.name and (config.input or config.dataset or config.pretokenized):
        problem = "is a part of FineWeb-Edu, which --input, --dataset and --pretokenized replace"
        problems.append(f"--name {config.name}: {problem}")
    if (config.config or config.split) and not config.dataset:
        problems.append("--config and --split need --dataset")
    dataset = Path(config.dataset).resolve()
    if config.dataset and Path(config.out).resolve().is_relative_to(dataset):
        # The next run would take the shards for files of the dataset.
        problems.append(f"--out {config.out}: inside --dataset {config.dataset}; choose another")
    if problems:
        raise UserError("; ".join(problems))
    if not config.input and not config.dataset:
        return replace(config, dataset=FINEWEB, config=config.name)
    return config


def main(args: list[str] | None = None) -> None:
    config = read_config(args)
    out = Path(config.out)
    with locked(out, f"{out}: another fineweb.py uses it; wait for it or choose another --out"):
        name = PRETOKENIZED_NAME if config.pretokenized else NAME
        folder = Folder(out, name, config.pretokenized or config.max_shards)
        if config.verify:
            folder.verify()
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
    run_and_exit(main)

"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub

A document is a row, or a whole .txt or .md file; it becomes 50256 and its tokens. Shard 0 is for
validation: a dataset's validation split if it has one, otherwise the first documents.

After each shard manifest.json records the stream's state before the batch in which the shard ended,
and how many tokens of that batch are used. The same command continues there after any interruption,
and makes the same bytes for any number of workers. Under torchrun each rank reads its part, writes
every WORLD_SIZE-th shard and keeps a manifest.RANK.json; ranks share a folder and do not
communicate. Invalid input raises UserError."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support import texts
from support.cli import UserError, flag, parse_args, print0, run, torchrun_ranks
from support.files import atomic_write, sha256
from support.texts import explained
from support.tokenizer import EOT, SHA256, open_shard

SUFFIXES = (".npy", ".bin", ".partial")
FINEWEB = "HuggingFaceFW/fineweb-edu"
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"
START = {"complete": False, "position": [0, None, 0], "used": 0, "skipped": [0, 0]}
MAX_SHARD_SIZE = 4 * 10**9  # training numbers a shard's tokens in 32 bits


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"  # part of FineWeb-Edu: sample-10BT, sample-100BT, CC-MAIN-2024-10, …
    input: tuple = ()  # instead: .parquet .jsonl .csv .txt .md files (.gz, .zst), folders, patterns
    dataset: str = ""  # instead: a text dataset of the Hub, or a local folder in its layout
    config: str = ""  # the dataset's configuration; empty: its default
    split: str = ""  # the dataset's split; empty: train, with a validation split as shard 0
    text_column: str = ""  # column that holds the text; empty: text, or a dataset's only strings
    template: str = ""  # instead of one column: joins several, as in "{question}\\n{answer}"
    out: str = "edu_fineweb10B"  # folder for the shards
    shard_size: int = 0  # tokens per shard; 0: 100 million, or about a tenth of a shorter text
    workers: int = 0  # number of tokenizing processes; 0: one per core
    max_shards: int = 0  # stop after this many, validation included; 0: no limit
    pretokenized: int = 0  # instead of text: download this many ready shards of FineWeb-Edu
    verify: bool = False  # only check the shards in --out against its manifest.json

    def check(self) -> None:
        """Names every invalid value."""
        problems = []
        for name in ("workers", "max_shards", "pretokenized", "shard_size"):
            if getattr(self, name) < 0:
                problems.append(f"{flag(name)} {getattr(self, name)}: must be at least 0")
        if self.shard_size > MAX_SHARD_SIZE:
            problems.append(f"--shard-size {self.shard_size}: must be at most {MAX_SHARD_SIZE}")
        for names in (("pretokenized", "input", "dataset"), ("text_column", "template")):
            given = [flag(name) for name in names if getattr(self, name)]
            if len(given) > 1:
                problems.append(f"{' and '.join(given)}: choose one")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        if problems:
            raise UserError("; ".join(problems))
        texts.template_columns(self.template)


class Folder:
    """A rank's shards in --out, and their manifest. It is an error if they disagree."""

    def __init__(self, out: Path, rank: int = 0, world_size: int = 1):
        self.out, self.rank, self.world_size = out, rank, world_size
        self.path = out / ("manifest.json" if world_size == 1 else f"manifest.{rank}.json")
        self.manifest = START | {"shards": []}
        if self.path.exists():
            with explained(str(self.path), remedy="move it and its shards away"):
                self.manifest |= json.loads(self.path.read_text(encoding="utf-8"))
                for shard in self.manifest["shards"]:
                    if not {"name", "tokens", "documents", "sha256"} <= shard.keys():
                        raise ValueError(f"an incomplete shard: {shard}")
        self.shards: list[dict[str, Any]] = self.manifest["shards"]

    def check_shards(self) -> None:
        """Checks that the shards are whole. A missing one and all later ones are made again."""
        used = 0
        for index, shard in enumerate(self.shards):
            path = self.out / shard["name"]
            if not path.exists():  # read the text again from the start, past the others' tokens
                del self.shards[index:]
                self.manifest |= START | {"used": used}
                break
            used += len(open_shard(path))

    @property
    def next_index(self) -> int:
        return len(self.shards) * self.world_size + self.rank

    @property
    def next_name(self) -> str:
        return f"edufineweb_{'train' if self.next_index else 'val'}_{self.next_index:06d}.npy"

    def finished(self, max_shards: int) -> bool:
        return self.manifest["complete"] or 0 < max_shards <= self.next_index

    def check(self, options: dict[str, Any]) -> None:
        """Checks that the shards here were made with the same options."""
        for key, now in options.items():
            then = self.manifest.get(key)
            if now != then and (self.shards or self.manifest["complete"]):
                raise UserError(
                    f"{self.out}: started with {key} {then!r:.300}, now {now!r:.300}; "
                    "use the original value or a new --out"
                )

    def begin(self, options: dict[str, Any]) -> None:
        """Records the options and removes what a killed run left. Foreign shards are an error."""
        self.check(options)
        self.out.mkdir(parents=True, exist_ok=True)
        partial_shard = f".*_{self.next_index:06d}.*.partial"
        for pattern in (partial_shard, f".{self.path.name}.*", ".manifest.json.*"):
            for path in self.out.glob(pattern):
                path.unlink()
        known = [shard["name"] for shard in self.shards]
        if self.path.exists():  # a shard that a killed run did not enter is written again
            known.append(self.next_name)
        for path in self.out.glob("*_[0-9][0-9][0-9][0-9][0-9][0-9].*"):
            ours = int(path.stem[-6:]) % self.world_size == self.rank
            if ours and path.suffix in (".npy", ".bin") and path.name not in known:
                raise UserError(f"{path}: not in {self.path.name}; remove it or use a new --out")
        self.manifest |= options
        self.save()

    def save(self) -> None:
        with atomic_write(self.path, "w") as file:
            json.dump(self.manifest, file, indent=1)

    def write(self, parts: list[np.ndarray], state: dict[str, Any]) -> None:
        """Adds a shard made of parts, each 1-D uint16. state: where the next one begins."""
        if not parts:
            self.manifest |= state
            self.save()
            return
        length = sum(len(part) for part in parts)
        header = {"descr": "<u2", "fortran_order": False, "shape": (length,)}
        path = self.out / self.next_name
        try:
            with atomic_write(path) as file:
                np.lib.format.write_array_header_1_0(file, header)
                file.writelines(part.data for part in parts)
        except OSError as error:
            remedy = "free some space and run the same command again"
            raise UserError(f"{path}: cannot be written (OSError: {error}); {remedy}") from None
        self.enter(path, state)

    def enter(self, path: Path, state: dict[str, Any]) -> None:
        """Enters a shard into the manifest."""
        tokens = open_shard(path)
        documents = int(np.count_nonzero(tokens == EOT))  # those that begin in it
        shard = {"name": path.name, "tokens": len(tokens), "documents": documents}
        self.shards.append(shard | {"sha256": sha256(path)})
        self.manifest |= state
        self.save()
        print(f"{path.name}: {len(tokens):,} tokens, {documents:,} documents", flush=True)

    def verify(self) -> None:
        """Names the files that changed or do not belong."""
        listed = {shard["name"]: shard["sha256"] for shard in self.shards}
        files = {path.name for path in self.out.glob("*") if path.suffix in SUFFIXES}
        bad = []
        for name in sorted(files | set(listed)):
            if name not in files or sha256(self.out / name) != listed.get(name):
                bad.append(name)
        if bad or not listed:
            names = ", ".join(bad) or "no shards"
            raise UserError(f"{self.out}: not as in {self.path.name}: {names}")
        print("all checksums match")


def merge(here: Folder, max_shards: int) -> Folder:
    """Rank 0's last task: waits for the other ranks and merges their manifests."""
    ranks = [here]
    while len(ranks) < here.world_size:
        folder = Folder(here.out, len(ranks), here.world_size)
        folder.check_shards()
        if folder.finished(max_shards):
            ranks.append(folder)
        else:
            time.sleep(1)
    shards = [shard for folder in ranks for shard in folder.shards]
    skipped = np.sum([folder.manifest["skipped"] for folder in ranks], axis=0)
    whole = Folder(here.out)
    whole.manifest = here.manifest | {
        "shards": sorted(shards, key=lambda shard: shard["name"][-10:]),
        "complete": all(folder.manifest["complete"] for folder in ranks),
        "skipped": skipped.tolist(),
    }
    whole.save()
    return Folder(here.out)


def write_shards(
    here: Folder, batches: Iterable, size: int, max_shards: int, validation: bool
) -> None:
    """Writes a rank's shards from batches of (position, tokens, skipped), at most max_shards.

    A validation split, stream 0, becomes shard 0. If shard 0 would hold all text, it is cut."""
    used = here.manifest["used"]  # tokens of the first batches
    skipped = here.manifest["skipped"]
    parts: list[np.ndarray] = []
    whole = False  # are these parts of a validation split?

    def finish(position: tuple, used: int, complete: bool = False) -> bool:
        state = {"position": position, "used": used, "skipped": skipped, "complete": complete}
        here.write(parts, state)
        parts.clear()
        return here.finished(max_shards)

    for position, tokens, more in batches:
        if whole and parts and position[0] > 0 and finish(position, 0):
            return
        whole = validation and position[0] == 0
        while used < len(tokens):
            room = sys.maxsize if whole else size - sum(len(part) for part in parts)
            parts.append(tokens[used : used + room])
            used += len(parts[-1])
            if len(parts[-1]) == room and finish(position, used):
                return
        used -= len(tokens)
        skipped = [skipped[0] + more[0], skipped[1] + more[1]]
    if not (parts or here.shards or here.rank):
        raise UserError("no text in the input: nothing to tokenize")
    if parts and here.next_index == 0 and not whole:
        text = np.concatenate(parts)
        tenth = max(len(text) // 10, 1)
        here.write([text[:tenth]], {"used": tenth})  # a resumed run reads it all again
        if here.finished(max_shards):
            return
        parts = [text[tenth:]]
    finish((sys.maxsize, None, 0), 0, complete=True)


def make_shards(config: ShardConfig, here: Folder) -> None:
    """Makes a rank's shards of --input or --dataset."""
    columns = {"text_column": config.text_column, "template": config.template}
    options = columns | {"config": config.config, "split": config.split}
    if config.input:
        files = texts.find_files(config.input)
        opener = partial(texts.open_files, files, here.world_size, **columns)
        options["source"] = source = "files"
    else:
        dataset = config.dataset or FINEWEB
        if not config.dataset:
            options["config"] = config.name
        opener = partial(texts.open_dataset, dataset, here.manifest.get("commit"), **options)
        options["source"] = source = "folder" if Path(dataset).is_dir() else dataset
    options |= {"world_size": here.world_size, "batch_rows": texts.BATCH_ROWS, "tokenizer": SHA256}
    if config.shard_size:
        options["shard_size"] = config.shard_size
    here.check(options)
    if here.finished(config.max_shards) and source not in ("files", "folder"):
        return  # without the network
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    workers = config.workers or max(cores, 1)
    position = here.manifest["position"]
    with closing(texts.tokenized(workers, opener, position, here.rank, here.world_size)) as batches:
        facts = next(batches)
        tokens = facts["tokens"]
        tenth = int(float(f"{tokens / 10 + 1:.0e}"))  # one digit
        size = config.shard_size or min(tenth, 10**8)
        options |= {"commit": facts["commit"], "files": facts["files"], "shard_size": size}
        here.check(options)
        if here.finished(config.max_shards):
            return
        if config.max_shards:
            tokens = min(tokens, config.max_shards * size)
        check_disk(here.out, 2 * (tokens - here.next_index * size))
        print0(f"{here.out}: about {tokens / 1e6:,.1f} million tokens in shards of {size:,}")
        here.begin(options)
        write_shards(here, batches, size, config.max_shards, facts["validation"])


def check_disk(out: Path, need: int) -> None:
    """Checks that the disk of --out has `need` bytes free."""
    existing = next(path for path in (out, *out.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise UserError(
            f"{out}: needs about {need / 1e9:,.2f} GB of disk, has {free / 1e9:,.2f}; "
            "free some space, use another --out or lower --max-shards"
        )


def fetch_pretokenized(number: int, here: Folder) -> None:
    """Downloads the first shards of PRETOKENIZED, checking each before it appears."""
    from huggingface_hub import HfApi, hf_hub_download

    copies, source = here.out / ".hub", f"--dataset {PRETOKENIZED}"
    with explained(source):
        commit = here.manifest.get("commit") or HfApi().dataset_info(PRETOKENIZED).sha
    here.begin({"source": PRETOKENIZED, "commit": commit})
    while here.next_index < number:
        name = f"finewebedu_{'train' if here.next_index else 'val'}_{here.next_index:06d}.bin"
        with explained(source):
            path = hf_hub_download(
                PRETOKENIZED, name, repo_type="dataset", revision=commit, local_dir=copies
            )
        open_shard(Path(path))
        os.replace(path, here.out / name)
        here.enter(here.out / name, {})
    shutil.rmtree(copies, ignore_errors=True)


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args)
    for name in ("input", "dataset"):
        if flag(name) in (sys.argv if args is None else args) and not getattr(config, name):
            raise UserError(f"{flag(name)}: has no value")
    config.check()
    rank, _, world_size = torchrun_ranks()
    if config.verify or config.pretokenized:  # one process does it
        if rank > 0:
            return
        world_size = 1
    here = Folder(Path(config.out), rank, world_size)
    if config.verify:
        here.verify()
    else:
        here.check_shards()
        if config.pretokenized:
            fetch_pretokenized(config.pretokenized, here)
        else:
            make_shards(config, here)
    if rank == 0:
        if world_size > 1:
            here = merge(here, config.max_shards)
        tokens = sum(shard["tokens"] for shard in here.shards)
        documents = sum(shard["documents"] for shard in here.shards)
        nulls, empties = here.manifest["skipped"]
        print(
            f"{here.out}: {len(here.shards)} shards, {tokens:,} tokens, {documents:,} documents "
            f"({nulls:,} nulls and {empties:,} empty texts skipped)"
        )
        if here.manifest["complete"] and len(here.shards) == 1 and not config.verify:
            remedy = "use a new --out and a smaller --shard-size, or another --split"
            raise UserError(f"{here.out}: the validation shard holds all the text; {remedy}")


if __name__ == "__main__":
    run(main)

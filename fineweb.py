"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                 # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub or a folder
    torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 fineweb.py    # on four machines

A document is a row, or a whole .txt or .md file; it becomes 50256 and its tokens. Shard 0 is for
validation: a dataset's validation split if it has one, otherwise the first documents.

After each shard manifest.json records the stream's state before the batch in which the shard ended,
and the number of tokens used of that batch. The same command continues there after any
interruption, and makes the same bytes for any number of workers. Under torchrun each rank reads its
part, writes every WORLD_SIZE-th shard and keeps a manifest.RANK.json; ranks share a folder and do
not communicate."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from support import texts
from support.cli import UserError, flag, parse_args, print0, run, torchrun_ranks
from support.files import atomic_write, sha256
from support.texts import explained
from support.tokenizer import EOT, SHA256, open_shard

FINEWEB, PRETOKENIZED = "HuggingFaceFW/fineweb-edu", "kjj0/finewebedu10B-gpt2"


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of GPT-2 tokens."""

    name: str = (
        "sample-10BT"  # part of FineWeb-Edu: sample-10BT, -100BT, -350BT, CC-MAIN-2024-10, …
    )
    input: tuple = ()  # instead: .parquet, .jsonl, .csv, .txt, .md (also .gz, .zst), folders or patterns
    dataset: str = ""  # instead: any text dataset of the Hub, or a local folder in its layout
    config: str = ""  # the dataset's configuration; empty for its default
    split: str = ""  # the dataset's split; empty for train, with a validation split as shard 0
    text_column: str = ""  # column that holds the text; empty: `text`, or a dataset's only strings
    template: str = ""  # instead of one column: joins several, as in "{question}\\n{answer}"
    out: str = "edu_fineweb10B"  # folder for the shards
    shard_size: int = (
        0  # tokens per shard; 0: 100 million, or about a tenth of the text if that is less
    )
    workers: int = 0  # number of tokenizing processes; 0: one per core
    max_shards: int = (
        0  # stop after this many, validation included; 0: no limit. A later run may continue
    )
    pretokenized: int = (
        0  # instead of text: fetch this many ready shards of FineWeb-Edu, 100M tokens each
    )
    verify: bool = False  # only check the shards in --out against its manifest.json

    def check(self) -> None:
        """Raises UserError naming every invalid value."""
        numbers = ("workers", "max_shards", "pretokenized", "shard_size")
        problems = [
            f"{flag(name)} {getattr(self, name)}: must be at least 0"
            for name in numbers
            if getattr(self, name) < 0
        ]
        for names in (("pretokenized", "input", "dataset"), ("text_column", "template")):
            if len(given := [flag(name) for name in names if getattr(self, name)]) > 1:
                problems.append(f"{' and '.join(given)}: choose one")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        if problems:
            raise UserError("; ".join(problems))
        texts.template_columns(self.template)


class Folder:
    """The shards of a rank in --out, and their manifest. Raises UserError if these do not fit each
    other."""

    def __init__(self, out: Path, rank: int = 0, world_size: int = 1):
        self.out, self.rank, self.world_size = out, rank, world_size
        self.path = out / ("manifest.json" if world_size == 1 else f"manifest.{rank}.json")
        self.manifest = {
            "complete": False,
            "position": [0, None],
            "used": 0,
            "skipped": [0, 0],
            "shards": [],
        }
        if self.path.exists():
            with explained(str(self.path), remedy="move it and its shards away"):
                self.manifest |= json.loads(self.path.read_text(encoding="utf-8"))
        self.shards: list[dict[str, Any]] = self.manifest["shards"]
        for shard in self.shards:
            open_shard(out / shard["name"])
        self.next_index = len(self.shards) * world_size + rank

    @property
    def next_name(self) -> str:
        return f"edufineweb_{'train' if self.next_index else 'val'}_{self.next_index:06d}.npy"

    def finished(self, max_shards: int) -> bool:
        return self.manifest["complete"] or 0 < max_shards <= self.next_index

    def check(self, options: dict[str, Any]) -> None:
        """Raises UserError if the shards here were made with other options."""
        for key, now in options.items():
            if self.shards and now != (then := self.manifest.get(key)):
                raise UserError(
                    f"{self.out}: started with {key} {then!r}, now {now!r}; use the original "
                    "value or a new --out"
                )

    def begin(self, options: dict[str, Any]) -> None:
        """Records the options and removes what a killed run left. Raises UserError for a foreign
        shard."""
        self.check(options)
        self.out.mkdir(parents=True, exist_ok=True)
        for pattern in (
            f".*_{self.next_index:06d}.*.partial",
            f".{self.path.name}.*",
            ".manifest.json.*",
        ):
            for path in self.out.glob(pattern):
                path.unlink()
        six, known = "[0-9]" * 6, [shard["name"] for shard in self.shards]
        known += (
            [self.next_name] if self.path.exists() else []
        )  # killed before entering it: rewritten
        for path in [*self.out.glob(f"*_{six}.npy"), *self.out.glob(f"*_{six}.bin")]:
            if int(path.stem[-6:]) % self.world_size == self.rank and path.name not in known:
                raise UserError(f"{path}: not in {self.path.name}; remove it or use a new --out")
        self.manifest |= options
        self.save()

    def save(self) -> None:
        with atomic_write(self.path, "w") as file:
            json.dump(self.manifest, file, indent=1)

    def write(self, parts: list[np.ndarray]) -> None:
        """Adds a shard made of parts, each 1-D uint16."""
        header = {"descr": "<u2", "fortran_order": False, "shape": (sum(map(len, parts)),)}
        path, remedy = self.out / self.next_name, "free some space and run the same command again"
        with explained(str(path), "cannot be written", remedy), atomic_write(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(part.data for part in parts)
        self.enter(path.name)

    def enter(self, name: str) -> None:
        """Enters a shard into the manifest."""
        tokens = open_shard(self.out / name)
        documents = int(np.count_nonzero(tokens == EOT))  # those that begin in it
        self.shards.append(
            {
                "name": name,
                "tokens": len(tokens),
                "documents": documents,
                "sha256": sha256(self.out / name),
            }
        )
        self.next_index += self.world_size
        self.save()
        print(f"{name}: {len(tokens):,} tokens, {documents:,} documents", flush=True)

    def verify(self) -> None:
        """Raises UserError naming the files that changed or do not belong."""
        listed = {shard["name"]: shard["sha256"] for shard in self.shards}
        files = {
            path.name for path in self.out.glob("*") if path.suffix in (".npy", ".bin", ".partial")
        }
        bad = [
            name
            for name in sorted(files | set(listed))
            if sha256(self.out / name) != listed.get(name)
        ]
        if bad or not listed:
            raise UserError(
                f"{self.out}: not as in {self.path.name}: {', '.join(bad) or 'no shards'}"
            )
        print("all as they were written")


def merge(here: Folder, max_shards: int) -> Folder:
    """Rank 0's last task: waits for the other ranks and merges their manifests into
    manifest.json."""
    ranks = [here]
    while len(ranks) < here.world_size:
        ranks.append(Folder(here.out, len(ranks), here.world_size))
        if not ranks[-1].finished(max_shards):
            ranks.pop()
            time.sleep(1)
    whole = Folder(here.out)
    whole.manifest = here.manifest | {
        "shards": sorted(
            chain(*(folder.shards for folder in ranks)), key=lambda shard: shard["name"][-10:]
        ),
        "complete": all(folder.manifest["complete"] for folder in ranks),
        "skipped": np.sum([folder.manifest["skipped"] for folder in ranks], axis=0).tolist(),
    }
    whole.save()
    return Folder(here.out)


def write_shards(
    here: Folder, batches: Iterable, size: int, max_shards: int, validation: bool
) -> None:
    """Writes a rank's shards of (position, tokens, skipped) until the batches end or max_shards are
    there; a validation split, stream 0, becomes shard 0. Raises UserError if there is no text."""
    used, skipped = (
        here.manifest["used"],
        here.manifest["skipped"],
    )  # used: tokens of the first batch
    parts: list[np.ndarray] = []
    whole = False  # are these parts of a validation split?

    def finish(position: tuple, used: int, complete: bool = False) -> bool:
        here.manifest |= {
            "position": position,
            "used": used,
            "skipped": skipped,
            "complete": complete,
        }
        here.write(parts) if parts else here.save()
        parts.clear()
        return here.finished(max_shards)

    for position, tokens, more in batches:
        if whole and parts and position[0] > 0 and finish(position, 0):
            return
        whole = validation and position[0] == 0
        while used < len(tokens):
            room = sys.maxsize if whole else size - sum(map(len, parts))
            parts.append(tokens[used : used + room])
            used += len(parts[-1])
            if len(parts[-1]) == room and finish(position, used):
                return
        used, skipped = 0, [a + b for a, b in zip(skipped, more, strict=True)]
    if not (parts or here.shards or here.rank):
        raise UserError("no text in the input: nothing to tokenize")
    finish((sys.maxsize, None), 0, complete=True)


def make_shards(config: ShardConfig, here: Folder) -> None:
    """Makes a rank's shards of --input or --dataset. Raises UserError."""
    if not (config.input or config.dataset):
        config = replace(config, dataset=FINEWEB, config=config.name)
    files = texts.find_files(config.input)
    options = {
        name: getattr(config, name) for name in ("config", "split", "text_column", "template")
    }
    opener = partial(texts.open_dataset, config.dataset, here.manifest.get("commit"), **options)
    if files:
        opener = partial(
            texts.open_files, files, here.world_size, config.text_column, config.template
        )
    options["source"] = (
        "files" if files else "folder" if Path(config.dataset).is_dir() else config.dataset
    )
    options |= {"world_size": here.world_size, "batch_rows": texts.BATCH_ROWS, "tokenizer": SHA256}
    here.check(options)
    if here.finished(config.max_shards):
        return
    workers = config.workers or max(
        (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1
    )
    position = here.manifest["position"]
    with closing(texts.tokenized(workers, opener, position, here.rank, here.world_size)) as batches:
        facts = next(batches)
        size = config.shard_size or min(
            int(float(f"{facts['tokens'] / 10 + 1:.0e}")), 10**8
        )  # one digit
        tokens = min(facts["tokens"], config.max_shards * size or facts["tokens"])
        free = shutil.disk_usage(
            next(path for path in (here.out, *here.out.parents) if path.exists())
        ).free
        if (need := 2 * (tokens - here.next_index * size)) > free:
            raise UserError(
                f"{here.out}: needs about {need / 1e9:,.2f} GB of disk, has {free / 1e9:,.2f}; "
                "free some space, use another --out or lower --max-shards"
            )
        print0(f"{here.out}: about {tokens / 1e6:,.1f} million tokens in shards of {size:,}")
        here.begin(
            options | {"commit": facts["commit"], "files": facts["files"], "shard_size": size}
        )
        write_shards(here, batches, size, config.max_shards, facts["validation"])


def fetch_pretokenized(number: int, here: Folder) -> None:
    """The first shards of PRETOKENIZED, each checked before it appears. Raises UserError."""
    from huggingface_hub import HfApi, hf_hub_download

    with explained(f"--dataset {PRETOKENIZED}"):
        commit = here.manifest.get("commit") or HfApi().dataset_info(PRETOKENIZED).sha
        here.begin({"source": PRETOKENIZED, "commit": commit})
        for index in range(here.next_index, number):
            name, copies = (
                f"finewebedu_{'train' if index else 'val'}_{index:06d}.bin",
                here.out / ".hub",
            )
            path = hf_hub_download(
                PRETOKENIZED, name, repo_type="dataset", revision=commit, local_dir=copies
            )
            open_shard(Path(path))
            os.replace(path, here.out / name)
            here.enter(name)
    shutil.rmtree(here.out / ".hub", ignore_errors=True)


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args)
    config.check()
    rank, _, world_size = torchrun_ranks()
    if (alone := config.verify or config.pretokenized > 0) and rank:
        return
    here = Folder(Path(config.out), rank, 1 if alone else world_size)
    if config.verify:
        here.verify()
    elif config.pretokenized:
        fetch_pretokenized(config.pretokenized, here)
    else:
        make_shards(config, here)
    if rank == 0:
        here = merge(here, config.max_shards) if here.world_size > 1 else here
        tokens, documents = (
            sum(shard[key] for shard in here.shards) for key in ("tokens", "documents")
        )
        nulls, empties = here.manifest["skipped"]
        print(
            f"{here.out}: {len(here.shards)} shards, {tokens:,} tokens, {documents:,} documents "
            f"({nulls:,} nulls and {empties:,} empty texts skipped)"
        )


if __name__ == "__main__":
    run(main)

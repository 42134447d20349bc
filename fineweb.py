"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub

A document is a row, or a whole .txt or .md file; it becomes 50256 and its tokens. Shard 0 is for
validation: a dataset's validation split if it has one, otherwise the first documents.

manifest.json records where in the text the last shard ended; there the same command continues, and
makes the same bytes for any number of workers."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from support import texts
from support.cli import UserError, flag, parse_args, run, torchrun_ranks
from support.files import atomic_path, sha256, write_text
from support.texts import explained
from support.tokenizer import EOT, SHA256, SHARD_NAME, open_shard

SUFFIXES = (".npy", ".bin", ".partial")
FINEWEB = "HuggingFaceFW/fineweb-edu"
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"
START = {"complete": False, "position": [0, None, 0], "used": 0, "skipped": 0}
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
    template: str = ""  # instead of one column: joins several, as in "{question}\n{answer}"
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
            value = getattr(self, name)
            if not 0 <= value <= MAX_SHARD_SIZE:
                problems.append(f"{flag(name)} {value}: must be from 0 to {MAX_SHARD_SIZE}")
        for names in (("pretokenized", "input", "dataset"), ("text_column", "template")):
            given = [flag(name) for name in names if getattr(self, name)]
            if len(given) > 1:
                problems.append(f"{' and '.join(given)}: choose one")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        if problems:
            raise UserError("; ".join(problems))
        texts.template_columns(self.template)


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest; that of a new folder if there is none."""
    manifest: dict[str, Any] = START | {"shards": []}
    if path.exists():
        with explained(str(path), remedy="move it and its shards away"):
            manifest |= json.loads(path.read_text(encoding="utf-8"))
            # Earlier versions had no row in the position, and [nulls, empty texts] skipped.
            manifest["position"] = [*manifest["position"], 0][:3]
            manifest["skipped"] = int(np.sum(manifest["skipped"]))
            if any(len(shard) != 4 for shard in manifest["shards"]):
                raise ValueError("incomplete")
    return manifest


class Folder:
    """The shards in --out, and their manifest."""

    def __init__(self, out: Path, max_shards: int):
        self.out, self.max_shards = out, max_shards
        self.path = out / "manifest.json"
        self.manifest = read_manifest(self.path)
        self.shards = self.manifest["shards"]
        tokens = 0
        for index, shard in enumerate(self.shards):
            path = out / shard["name"]
            if not path.exists():  # make it and all later ones, reading the text from its start
                del self.shards[index:]
                self.manifest |= START | {"used": tokens}
                break
            tokens += len(open_shard(path))

    @property
    def next_name(self) -> str:
        return f"edufineweb_{'train' if self.shards else 'val'}_{len(self.shards):06d}.npy"

    @property
    def finished(self) -> bool:
        return self.manifest["complete"] or 0 < self.max_shards <= len(self.shards)

    def check(self, options: dict[str, Any]) -> None:
        """Checks that the shards here were made with the same options."""
        for key, now in options.items():
            then = self.manifest.get(key)
            if now != then and (self.shards or self.manifest["complete"]):
                change = f"started with {key} {then!r:.300}, now {now!r:.300}"
                raise UserError(f"{self.out}: {change}; restore it or use a new --out")

    def begin(self, options: dict[str, Any]) -> None:
        """Records the options and removes what a killed run left. Foreign shards are an error."""
        self.check(options)
        self.out.mkdir(parents=True, exist_ok=True)
        known = [shard["name"] for shard in self.shards]
        if self.path.exists():  # a shard that a killed run did not enter is written again
            known.append(self.next_name)
        for path in self.out.glob(".*.partial"):
            path.unlink()
        for path in self.out.iterdir():
            if SHARD_NAME.fullmatch(path.name) and path.name not in known:
                raise UserError(f"{path}: not in {self.path.name}; remove it or use a new --out")
        self.save(options)

    def save(self, state: dict[str, Any]) -> None:
        """Updates the manifest."""
        self.manifest |= state
        write_text(self.path, json.dumps(self.manifest, indent=1))

    def write(self, parts: list[np.ndarray], state: dict[str, Any]) -> None:
        """Adds a shard made of parts, each 1-D uint16, if any, and the stream's state after it."""
        if not parts:
            self.save(state)
            return
        path = self.out / self.next_name
        header = {"descr": "<u2", "fortran_order": False, "shape": (sum(map(len, parts)),)}
        with atomic_path(path) as partial, open(partial, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(part.data for part in parts)
        self.enter(path, state)

    def enter(self, path: Path, state: dict[str, Any]) -> None:
        """Enters a shard into the manifest."""
        tokens = open_shard(path)
        documents = int(np.count_nonzero(tokens == EOT))  # those that begin in it
        shard = {"name": path.name, "tokens": len(tokens), "documents": documents}
        self.shards.append(shard | {"sha256": sha256(path)})
        self.save(state)
        print(f"{path.name}: {len(tokens):,} tokens, {documents:,} documents", flush=True)


def verify(out: Path) -> None:
    """Names the files that changed or do not belong."""
    shards = read_manifest(out / "manifest.json")["shards"]
    listed = {shard["name"]: shard["sha256"] for shard in shards}
    found = {path.name: sha256(path) for path in out.glob("*") if path.suffix in SUFFIXES}
    bad = sorted({name for name, _ in found.items() ^ listed.items()})
    if bad or not listed:
        raise UserError(f"{out}: not as in manifest.json: {', '.join(bad) or 'no shards'}")
    print(f"{len(listed)} shards: all checksums match")


def cut(
    batches: Iterable, here: Folder, size: int, validation: bool
) -> Iterator[tuple[list[np.ndarray], dict[str, Any]]]:
    """(position, tokens, skipped) of each batch -> (parts of a shard, the stream's state after it).

    A full shard is yielded when the next token is there, so it is known not to be the last.
    validation: stream 0 is a validation split, all of which is shard 0."""
    used = here.manifest["used"]  # tokens of the first batches
    skipped = here.manifest["skipped"]
    parts: list[np.ndarray] = []
    room = size  # in the shard; beyond `size` for a validation split
    for position, tokens, more in batches:
        if validation and position[0] == 0:
            room = sys.maxsize
        elif room > size:
            room = 0
        while used < len(tokens):
            if room == 0:
                if parts:
                    yield parts, {"position": position, "used": used, "skipped": skipped}
                parts, room = [], size
            parts.append(tokens[used : used + room])
            used += len(parts[-1])
            room -= len(parts[-1])
        used -= len(tokens)
        skipped += more
    if not (parts or here.shards):
        raise UserError("no text in the input: nothing to tokenize")
    if not here.shards and room <= size:  # leave text for training
        text = np.concatenate(parts)
        tenth = max(len(text) // 10, 1)
        yield [text[:tenth]], {"used": tenth}  # a resumed run reads it all again
        parts = [text[tenth:]]
    yield parts, START | {"complete": True, "skipped": skipped}


def make_shards(config: ShardConfig, here: Folder) -> None:
    """Makes the shards of --input or --dataset."""
    dataset = config.dataset or FINEWEB
    options: dict[str, Any] = {"text_column": config.text_column, "template": config.template}
    if config.input:
        opener = partial(texts.open_files, texts.find_files(config.input), **options)
        options["source"] = "files"
    else:
        options["split"] = config.split
        options["config"] = config.config if config.dataset else config.name
        opener = partial(texts.open_dataset, dataset, here.manifest.get("commit"), **options)
        options["source"] = "folder" if Path(dataset).is_dir() else dataset
    # world_size: earlier versions also worked under torchrun
    options |= {"world_size": 1, "batch_rows": texts.BATCH_ROWS, "tokenizer": SHA256}
    if config.shard_size:
        options["shard_size"] = config.shard_size
    here.check(options)
    if here.finished and options["source"] == dataset:
        return  # without the network
    workers = config.workers or os.cpu_count() or 1
    with closing(texts.tokenized(workers, opener, here.manifest["position"])) as batches:
        facts = next(batches)
        tokens = facts.pop("tokens")
        tenth = int(float(f"{tokens / 10 + 1:.0e}"))  # one digit
        size = config.shard_size or min(tenth, 10**8)
        options |= facts | {"shard_size": size}
        here.check(options)
        if here.finished:
            return
        here.begin(options)
        print(f"the text has about {tokens / 1e6:,.1f} million tokens, a shard {size:,}")
        for parts, state in cut(batches, here, size, validation=not config.input):
            here.write(parts, state)
            if here.finished:
                return


def fetch_pretokenized(number: int, here: Folder) -> None:
    """Downloads the first shards of PRETOKENIZED, checking each before it appears."""
    from huggingface_hub import HfApi, hf_hub_download

    source = f"--dataset {PRETOKENIZED}"
    with explained(source):
        commit = here.manifest.get("commit") or HfApi().dataset_info(PRETOKENIZED).sha
    here.begin({"source": PRETOKENIZED, "commit": commit})
    place = {"repo_type": "dataset", "revision": commit, "local_dir": here.out / ".hub"}
    while len(here.shards) < number:
        name = here.next_name.replace("edufineweb", "finewebedu").replace(".npy", ".bin")
        with explained(source):
            path = hf_hub_download(PRETOKENIZED, name, **place)
        open_shard(Path(path))
        os.replace(path, here.out / name)
        here.enter(here.out / name, {})
    shutil.rmtree(here.out / ".hub", ignore_errors=True)


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args)
    for name in ("input", "dataset"):
        if flag(name) in (sys.argv if args is None else args) and not getattr(config, name):
            raise UserError(f"{flag(name)}: has no value")
    config.check()
    if torchrun_ranks()[2] > 1:
        raise UserError("fineweb.py uses all cores by itself: start it without torchrun")
    out = Path(config.out)
    if config.verify:
        verify(out)
        return
    here = Folder(out, config.max_shards)
    if config.pretokenized:
        fetch_pretokenized(config.pretokenized, here)
    else:
        make_shards(config, here)
    tokens = sum(shard["tokens"] for shard in here.shards)
    documents = sum(shard["documents"] for shard in here.shards)
    print(f"{out}: {len(here.shards)} shards, {tokens:,} tokens, {documents:,} documents")
    print(f"{here.manifest['skipped']:,} empty texts skipped")


if __name__ == "__main__":
    run(main)

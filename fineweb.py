"""Turns text into shards of GPT-2 tokens for train_gpt2.py.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub

A document is a row, or a whole .txt or .md file: the token 50256, then the tokens of its text.
Shard 0 is for validation: a dataset's validation split if any, otherwise the first documents.

manifest.json records how far into the text the shards reach. The same command continues there, and
writes the same bytes for any number of workers."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from support import texts
from support.cli import flag, parse_args, progress, run, torchrun_ranks
from support.errors import UserError
from support.files import atomic_path, locked, sha256, write_text
from support.texts import explained
from support.tokenizer import EOT, SHA256, SHARD_NAME, open_shard

FINEWEB = "HuggingFaceFW/fineweb-edu"
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"
MAX_SHARD_SIZE = 4 * 10**9  # training numbers the tokens of a shard in 32 bits
SAMPLE = 10**6  # bytes of text, to estimate the tokens per byte

# In manifest.json: how much of the text is in the shards; here, of a new folder.
START = {
    "complete": False,  # True once all of it is
    "position": [0, None, 0],  # before a batch of rows: stream, its dataset's state, rows so far
    "used": 0,  # tokens after `position` that are in shards already
    "skipped": 0,  # empty texts and nulls before `position`
}


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"  # part of FineWeb-Edu: sample-10BT, sample-100BT, CC-MAIN-2024-10, …
    input: tuple = ()  # instead: .parquet .jsonl .csv .txt .md files (.gz, .zst), folders, patterns
    dataset: str = ""  # instead: a text dataset of the Hub, or a local folder in its layout
    config: str = ""  # the dataset's configuration; empty: its default
    split: str = ""  # the dataset's split; empty: train, with a validation split as shard 0
    text_column: str = ""  # column that holds the text; empty: "text", or the only string column
    template: str = ""  # instead of one column: joins several, as in "{question}\n{answer}"
    out: str = "edu_fineweb10B"  # folder for the shards
    shard_size: int = 0  # tokens per shard; 0: 100 million, or about a tenth of a shorter text
    workers: int = 0  # tokenizing processes; 0: one per core
    max_shards: int = 0  # stop after this many, validation included; 0: no limit
    pretokenized: int = 0  # instead of text: download this many tokenized shards of FineWeb-Edu
    verify: bool = False  # only check the shards in --out against its manifest.json

    def check(self) -> None:
        """Raises one error that names every invalid value."""
        problems = []
        for name in ("workers", "max_shards", "pretokenized", "shard_size"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_SHARD_SIZE:
                problems.append(f"{flag(name)} {value}: must be from 0 to {MAX_SHARD_SIZE}")
        for alternatives in (("pretokenized", "input", "dataset"), ("text_column", "template")):
            given = [flag(name) for name in alternatives if getattr(self, name)]
            if len(given) > 1:
                problems.append(f"{' and '.join(given)}: choose one")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split need --dataset")
        inside = Path(self.out).resolve().is_relative_to(Path(self.dataset).resolve())
        if self.dataset and inside:  # the next run would take the shards for its files
            problems.append(f"--out {self.out}: inside --dataset {self.dataset}")
        if problems:
            raise UserError("; ".join(problems))
        texts.template_columns(self.template)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, or an empty one."""
    manifest: dict[str, Any] = START | {"shards": []}
    if path.exists():
        with explained(str(path), remedy="move it and its shards away"):
            manifest |= json.loads(path.read_text(encoding="utf-8"))
            # Earlier versions had no row in the position, and [nulls, empty texts] skipped.
            stream, state, row = [*manifest["position"], 0][:3]
            manifest["position"] = [stream, state, row]
            manifest["skipped"] = int(np.sum(manifest["skipped"]))
            if min(stream, row, manifest["used"], manifest["skipped"]) < 0:
                raise ValueError("negative")
            for shard in manifest["shards"]:
                whole = set(shard) == {"name", "tokens", "documents", "sha256"}
                if not (whole and SHARD_NAME.fullmatch(shard["name"])):
                    raise ValueError("incomplete")
    return manifest


class Folder:
    """The shards in --out and their manifest."""

    def __init__(self, out: Path, max_shards: int):
        self.out = out
        self.max_shards = max_shards
        self.path = out / "manifest.json"
        self.manifest = read_manifest(self.path)
        self.shards = self.manifest["shards"]
        tokens = 0
        for index, shard in enumerate(self.shards):
            path = out / shard["name"]
            if not path.exists():
                # Make it and all later ones again. Only the state after the last shard is known:
                # read the text from its start, skipping the tokens of earlier shards.
                del self.shards[index:]
                self.manifest |= START | {"used": tokens}
                break
            tokens += len(open_shard(path))

    @property
    def next_name(self) -> str:
        split = "train" if self.shards else "val"
        return f"edufineweb_{split}_{len(self.shards):06d}.npy"

    @property
    def finished(self) -> bool:
        return self.manifest["complete"] or 0 < self.max_shards <= len(self.shards)

    def check(self, options: dict[str, Any]) -> None:
        """Raises an error if the shards here were made with other options."""
        if not (self.shards or self.manifest["complete"]):
            return
        for key, now in options.items():
            then = self.manifest.get(key)
            if key == "files" and then and len(then[0]) == 2:  # as in earlier versions
                now = [[Path(path).name, size] for path, size, _ in now]
            if now != then:
                if key == "files":  # the first that differs
                    pairs = zip_longest(then or [], now, fillvalue="none")
                    then, now = next(pair for pair in pairs if pair[0] != pair[1])
                change = f"started with {key} {then!r:.300}, now {now!r:.300}"
                raise UserError(f"{self.out}: {change}; restore it or use a new --out")

    def begin(self, options: dict[str, Any]) -> None:
        """Records the options and removes the partial files of a killed run."""
        self.check(options)
        known = [shard["name"] for shard in self.shards]
        if self.path.exists():  # a run killed before it listed its last shard: written again
            known.append(self.next_name)
        for path in self.out.glob(".*.partial"):
            path.unlink()
        for path in self.out.iterdir():
            if SHARD_NAME.fullmatch(path.name) and path.name not in known:  # would be trained on
                raise UserError(f"{path}: not in {self.path.name}; remove it or use a new --out")
        self.save(options)

    def save(self, state: dict[str, Any]) -> None:
        self.manifest |= state
        write_text(self.path, json.dumps(self.manifest, indent=1))

    def write(self, parts: list[np.ndarray], state: dict[str, Any]) -> None:
        """Writes a shard of these parts (1-D uint16), if any, and the state after it."""
        if not parts:
            self.save(state)
            return
        path = self.out / self.next_name
        shape = (sum(map(len, parts)),)
        header = {"descr": "<u2", "fortran_order": False, "shape": shape}
        # Part by part: np.save would need a copy of the whole shard.
        with atomic_path(path) as unfinished, open(unfinished, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(part.data for part in parts)
        self.add(path, state)

    def add(self, path: Path, state: dict[str, Any]) -> None:
        """Lists a finished shard in the manifest."""
        tokens = open_shard(path)
        documents = int(np.count_nonzero(tokens == EOT))  # those that begin in this shard
        shard = {"name": path.name, "tokens": len(tokens), "documents": documents}
        self.shards.append(shard | {"sha256": sha256(path)})
        self.save(state)
        tqdm.write(f"{path.name}: {len(tokens):,} tokens, {documents:,} documents")


def verify(out: Path) -> None:
    """Names the files that changed or are unexpected."""
    shards = read_manifest(out / "manifest.json")["shards"]
    listed = {shard["name"]: shard["sha256"] for shard in shards}
    paths = [path for path in out.glob("*") if path.suffix in (".npy", ".bin", ".partial")]
    with progress(iterable=paths, unit="file") as bar:
        found = {path.name: sha256(path) for path in bar}
    names = sorted({name for name, _ in found.items() ^ listed.items()})
    if names or not listed:
        raise UserError(f"{out}: does not match manifest.json: {', '.join(names) or 'no shards'}")
    print(f"{len(listed)} shards: all checksums match")


def sampled(batches: Iterator) -> tuple[Iterator, float]:
    """-> (the same batches, the tokens per byte of the first ones)."""
    first = []
    size = tokens = 0
    for batch in batches:
        first.append(batch)
        tokens += len(batch[1])
        size += batch[3]
        if size >= SAMPLE:
            break
    return chain(first, batches), tokens / max(size, 1)


def cut(
    batches: Iterable, folder: Folder, size: int, validation: bool, bar: tqdm
) -> Iterator[tuple[list[np.ndarray], dict[str, Any]]]:
    """Cuts the text into shards of `size` tokens. Yields (parts of a shard, the state after it).

    batches: results of texts.tokenize(). validation: stream 0 is a validation split, all of which
    becomes shard 0. A full shard is held back until another token arrives: only the last one's
    state is complete."""
    used = folder.manifest["used"]
    skipped = folder.manifest["skipped"]
    parts: list[np.ndarray] = []
    room = size  # tokens that the shard can still take
    for position, tokens, empty_texts, _ in batches:
        bar.update(len(tokens))
        if validation and position[0] == 0:
            room = sys.maxsize
        elif room > size:  # the validation split has ended
            room = 0
        while used < len(tokens):
            if room == 0:
                if parts:
                    yield parts, {"position": position, "used": used, "skipped": skipped}
                parts = []
                room = size
            part = tokens[used : used + room]
            parts.append(part)
            used += len(part)
            room -= len(part)
        used -= len(tokens)
        skipped += empty_texts
    if not (parts or folder.shards):
        raise UserError("no text in the input: nothing to tokenize")
    if not folder.shards and room <= size:  # shard 0 took all the text: leave some for training
        text = np.concatenate(parts)
        tenth = max(len(text) // 10, 1)
        yield [text[:tenth]], {"used": tenth}  # position unchanged: resuming reads it all again
        parts = [text[tenth:]]
    yield parts, START | {"complete": True, "skipped": skipped}


def make_shards(config: ShardConfig, folder: Folder) -> None:
    """Makes the shards of --input or --dataset."""
    columns = {"text_column": config.text_column, "template": config.template}
    if config.input:
        options: dict[str, Any] = {"source": "files"}
        opener = partial(texts.open_files, texts.find_files(config.input), **columns)
    else:
        dataset = config.dataset or FINEWEB
        configuration = config.config if config.dataset else config.name
        part = {"config": configuration, "split": config.split}
        options = part | {"source": "folder" if Path(dataset).is_dir() else dataset}
        commit = folder.manifest.get("commit")
        opener = partial(texts.open_dataset, dataset, commit, **part, **columns)
    # What the shards depend on. Recorded in the manifest; must not change on resume.
    # world_size: earlier versions also worked under torchrun
    options |= columns
    options |= {"world_size": 1, "batch_rows": texts.BATCH_ROWS, "tokenizer": SHA256}
    if config.shard_size or folder.shards:
        options["shard_size"] = config.shard_size or folder.manifest.get("shard_size")
    folder.check(options)
    if folder.finished and options["source"] not in ("files", "folder"):
        return  # a commit doesn't change: no need to ask the Hub
    workers = config.workers or os.cpu_count() or 1
    before = sum(shard["tokens"] for shard in folder.shards) - folder.manifest["used"]
    with closing(texts.tokenized(workers, opener, folder.manifest["position"])) as batches:
        with progress(desc="reading", unit="tok") as bar:
            options |= next(batches)
            text_bytes = options.pop("text_bytes")
            folder.check(options)
            if folder.finished:
                return
            batches, tokens_per_byte = sampled(batches)
        tokens = int(text_bytes * tokens_per_byte)
        size = options.setdefault("shard_size", min(tokens // 10 + 1, 10**8))
        folder.begin(options)
        print(f"the text has about {tokens / 1e6:,.1f} million tokens; {size:,} per shard")
        total = min(tokens, config.max_shards * size or tokens)
        with progress(total=total, initial=before, unit="tok", unit_scale=True) as bar:
            for parts, state in cut(batches, folder, size, not config.input, bar):
                folder.write(parts, state)
                if folder.finished:
                    return


def fetch_pretokenized(number: int, folder: Folder) -> None:
    """Downloads the first shards of PRETOKENIZED. Checks each before it appears in --out."""
    from huggingface_hub import HfApi, hf_hub_download

    source = f"--dataset {PRETOKENIZED}"
    with explained(source):
        commit = folder.manifest.get("commit") or HfApi().dataset_info(PRETOKENIZED).sha
    folder.begin({"source": PRETOKENIZED, "commit": commit})
    downloads = folder.out / ".hub"
    while len(folder.shards) < number:
        name = folder.next_name.replace("edufineweb", "finewebedu").replace(".npy", ".bin")
        with explained(source):
            path = hf_hub_download(
                PRETOKENIZED, name, repo_type="dataset", revision=commit, local_dir=downloads
            )
        open_shard(Path(path))
        os.replace(path, folder.out / name)
        folder.add(folder.out / name, {})
    shutil.rmtree(downloads, ignore_errors=True)


def main(args: list[str] | None = None) -> None:
    config = parse_args(ShardConfig, args=args)
    # Given but empty, as from an unset shell variable, must not mean FineWeb-Edu.
    for name in ("input", "dataset"):
        if flag(name) in (sys.argv if args is None else args) and not getattr(config, name):
            raise UserError(f"{flag(name)}: has no value")
    config.check()
    if torchrun_ranks()[2] > 1:
        raise UserError("fineweb.py uses all cores by itself: start it without torchrun")
    out = Path(config.out)
    with locked(out, f"{out}: another fineweb.py uses it; wait for it or choose another --out"):
        if config.verify:
            verify(out)
            return
        folder = Folder(out, config.max_shards)
        if config.pretokenized:
            fetch_pretokenized(config.pretokenized, folder)
        else:
            make_shards(config, folder)
    tokens = sum(shard["tokens"] for shard in folder.shards)
    documents = sum(shard["documents"] for shard in folder.shards)
    print(f"{out}: {len(folder.shards)} shards, {tokens:,} tokens, {documents:,} documents")
    print(f"{folder.manifest['skipped']:,} empty texts skipped")


if __name__ == "__main__":
    run(main)

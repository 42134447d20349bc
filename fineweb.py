"""Turns text into shards of GPT-2 tokens, which train_gpt2.py reads.

    python fineweb.py                                   # FineWeb-Edu, 10 billion tokens -> edu_fineweb10B/
    python fineweb.py --max-shards 3                    # a taste of it: one validation and two training shards
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # any text dataset of the Hub, or a local folder
    python fineweb.py --pretokenized 3                  # three ready shards of FineWeb-Edu instead of text
    python fineweb.py --verify --out my_shards          # is every shard still what was written?
    torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 fineweb.py    # on four machines

A document is a row of a parquet file or of a dataset, a line of .jsonl, or a whole .txt or .md file; it is written as
50256 and its tokens.
Documents follow each other across shard ends and none is dropped; nulls and empty texts are passed over and counted.
Shard 0 is for validation: a dataset's validation split if it has one, else the first documents.
FineWeb-Edu: Penedo et al. 2024, huggingface.co/datasets/HuggingFaceFW/fineweb-edu.

Parallel: workers read and tokenize spans of files on their own; this process only lays the results end to end. So the
shards are the same bytes whatever the number of workers.

Restartable: manifest.json is rewritten after each finished shard and says how many tokens of which span finished shards
hold. The same command, run again after any kind of end, goes on from there and makes the same bytes.

Several machines: each rank (RANK, WORLD_SIZE) takes every WORLD_SIZE-th source file, writes every WORLD_SIZE-th shard
and keeps its own manifest.N.json; they share a folder and need not talk. At the end rank 0 merges the manifests.
"""

import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # otherwise numpy starts a thread a core for matrix products, of which there are none here
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

from support import hub
from support.cli import InputError, is_rank_zero, parse_args, run
from support.files import atomic_write, sha256
from support.processes import in_order, processes
from support.shards import open_shard
from support.sources import (
    COMPRESSED,
    DISK_FULL,
    Layout,
    Source,
    Span,
    cut_file,
    local_files,
    row_groups,
    template_columns,
    tokenize,
)
from support.tokenizer import EOT, SHA256

DATASET_KEYS = ("config", "split", "validation", "first_train", "stream")  # of a Source, in the manifest
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"
TEXT_A_TOKEN, TEXT_A_HUB_BYTE, TEXT_A_COMPRESSED_BYTE = 4.5, 1.6, 4  # bytes of English, to estimate what is to come


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or text of one's own, into shards of GPT-2 tokens."""

    name: str = "sample-10BT"
    """Part of FineWeb-Edu: sample-10BT, sample-100BT, sample-350BT, or a crawl such as CC-MAIN-2024-10."""
    input: tuple = ()  # of str; said barely, since tyro checks a tuple[str, ...] with a library that is slow to load
    """Instead of FineWeb-Edu: .parquet, .jsonl, .txt, .md (the last three also .gz, .zst), folders or patterns."""
    dataset: str = ""
    """Instead of FineWeb-Edu: any text dataset of the Hub, by name, or a local folder in its layout."""
    config: str = ""
    """The dataset's configuration, where it has several; without it, its own default."""
    split: str = ""
    """The dataset's split; without it, train. Beside train a validation split makes shard 0."""
    text_column: str = ""
    """Where a row keeps its text; without it `text`, or a dataset's only column of text."""
    template: str = ""
    """Instead of one column: joins several, as in "{question}\\n{answer}"."""
    out: str = "edu_fineweb10B"
    """Folder for the shards."""
    shard_size: int = 0
    """Tokens a shard, the last one is shorter; 0: 100 million, or about a tenth of the text where that is less."""
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
        if not 0 <= self.shard_size <= 2**31:
            problems.append(f"--shard-size {self.shard_size}: from 1 to {2**31}, or 0")
        pairs = {"--pretokenized": self.pretokenized, "--input": self.input, "--dataset": self.dataset}
        if len(given := [flag for flag, value in pairs.items() if value]) > 1:
            problems.append(f"{' and '.join(given)}: one of them")
        if (self.config or self.split) and not self.dataset:
            problems.append("--config and --split: of a --dataset")
        if self.text_column and self.template:
            problems.append("--text-column and --template: one of them")
        if problems:
            raise InputError("; ".join(problems))
        if self.template:
            template_columns(self.template)
        return self

    @property
    def layout(self) -> Layout:
        """What the flags say of it. A dataset's column may still be found."""
        column = self.text_column or ("" if self.dataset or self.template else "text")
        template = self.template.replace("\\n", "\n").replace("\\t", "\t")  # what a shell hands over as it stands
        return Layout(column, template, datasets=bool(self.dataset))


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


def text_bytes(source: Source, name: str, size: int) -> float:
    """About how much text a source file holds, given its size."""
    if name.endswith(".parquet"):
        here = not (source.commit or source.stream)
        return sum(size for _, size in row_groups(Path(name), source.layout)) if here else size * TEXT_A_HUB_BYTE
    return size * (TEXT_A_COMPRESSED_BYTE if name.endswith((*COMPRESSED, ".zip")) else 1)


def automatic_shard_size(tokens: int) -> int:
    """100 million; of less than 1,000 million tokens a tenth, rounded down to 1, 2, … 9 times a power of ten."""
    tenth = max(tokens // 10, 1)
    unit = 10 ** (len(str(tenth)) - 1)
    return min(tenth // unit * unit, 100_000_000)


def check_disk(source: Source, shard_size: int, tokens: int, out: Path) -> None:
    """Says what is about to come. Raises InputError when the shards, and the copies, don't fit the disk."""
    copies = [size * (TEXT_A_COMPRESSED_BYTE if name.endswith(COMPRESSED) else 1) for name, size in source.files
              if source.commit or name.endswith(COMPRESSED)]
    copy = hub.PIECE_BYTES if source.stream else max(copies, default=0)
    there = sum(path.stat().st_size for path in out.glob("*.npy"))
    need = max(2 * tokens - there, 0) + copy * min(3, len(source.files))
    free = shutil.disk_usage(next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())).free
    report = f"{out}: about {need / 1e9:,.2f} GB of disk needed, {free / 1e9:,.2f} GB free"
    if need > free:
        raise InputError(f"{report}; make room, name a folder elsewhere with --out, or take less with --max-shards")
    if is_rank_zero():
        print(f"{report}; about {tokens / 1e6:,.1f} million tokens in all, {there / 2e6:,.1f} there; "
              f"shards of {shard_size:,}", flush=True)


def open_files(source: Source, here: Folder, copiers: ProcessPoolExecutor | None) -> Iterator[tuple[int, Path]]:
    """(index, path) of a rank's source files from the manifest's position on; with `copiers` of copies, one ahead."""
    begin, rank, world_size = here.manifest["position"][0], here.rank, here.world_size
    mine: Iterator[tuple[int, str]]
    if source.stream:
        mine = ((i, "") for i in itertools.count(max(begin, source.first_train) if rank else begin))
        share, state = (rank, world_size), here.manifest.get("state")
        make_copy = partial(hub.make_piece, source=source, state=state, share=share, folder=here.copies)
    else:
        owners = [0] * source.first_train + [i % world_size for i in range(len(source.files) - source.first_train)]
        mine = ((i, name) for i, (name, _) in enumerate(source.files) if i >= begin and owners[i] == rank)
        make_copy = partial(hub.make_local, source=source, folder=here.copies)
    if not copiers:
        yield from ((i, Path(name)) for i, name in mine)
        return
    here.copies.mkdir(exist_ok=True)
    for (i, _), path in in_order(copiers, make_copy, mine, ahead=1):
        if not path:  # the stream's end
            return
        yield i, path


def make_shards(config: ShardConfig, source: Source, here: Folder, expected: int) -> None:
    """Goes on with the shards of a rank until its files end or config.max_shards are there. Raises InputError.

    expected: tokens of all ranks, for the progress bar.
    """
    from tqdm import tqdm

    layout = Layout("text") if source.stream else source.layout  # of the files that the workers read
    (begin, start, done), skipped = here.manifest["position"], here.manifest["skipped"]
    paths: dict[int, Path] = {}  # of the source files that are being read
    parts: list[np.ndarray] = []  # of the shard to come
    room = 0  # tokens that it still lacks

    def cut_files(copiers: ProcessPoolExecutor | None) -> Iterator[Span]:
        for i, path in open_files(source, here, copiers):
            paths[i] = path
            yield from cut_file(i, path, layout, start if i == begin else 0)

    def begin_shard() -> None:
        nonlocal room
        parts.clear()
        room = config.shard_size if here.next_index or not source.first_train else sys.maxsize

    def finish(file: int, start: int, taken: int, complete: bool = False) -> bool:
        """Writes the shard; the next one begins after `taken` tokens of the span at `start`. True: it was the last."""
        here.manifest |= {"complete": complete, "position": [file, start, taken], "skipped": skipped}
        here.manifest.pop("state", None)
        if source.stream and not complete:
            here.manifest["state"] = hub.read_states(paths[file])[0]
        if not parts:
            here.save()
            return True
        here.write(parts)
        begin_shard()
        last, rate = here.shards[-1], (here.tokens - before) / (time.perf_counter() - began)
        tqdm.write(f"{last['name']}: {last['tokens']:,} tokens, {last['documents']:,} documents; {rate:,.0f} tokens/s")
        sys.stdout.flush()
        for path in [paths.pop(i) for i in list(paths) if i < file]:
            if path.is_relative_to(here.copies):
                path.unlink(missing_ok=True)
        return here.finished(config.max_shards)

    begin_shard()
    before, began, total = here.tokens, time.perf_counter(), expected // here.world_size
    bar = tqdm(total=total, initial=before, unit="token", unit_scale=True, disable=None)
    workers = config.workers or max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    copied = source.commit or source.stream or any(name.endswith(COMPRESSED) for name, _ in source.files)
    with (processes(1, stop=True) if copied else nullcontext()) as copiers, processes(workers) as pool, bar:
        task = partial(tokenize, layout=layout)
        for span, (tokens, passed) in in_order(pool, task, cut_files(copiers), ahead=2 * workers):
            if here.next_index == 0 and span.file >= source.first_train > 0:  # here the validation split has ended
                if not parts:
                    raise InputError(f"no text in the split {source.validation!r}: name another dataset or --split")
                if finish(span.file, 0, 0):
                    return
            taken = min(done, len(tokens))  # so many of them are in finished shards
            done -= taken
            while taken < len(tokens):
                parts.append(tokens[taken : taken + room])
                taken, room = taken + len(parts[-1]), room - len(parts[-1])
                bar.update(len(parts[-1]))
                if room == 0 and finish(span.file, span.start, taken):
                    return
            skipped = [sum(pair) for pair in zip(skipped, passed, strict=True)]
    if not (parts or here.shards or here.rank):
        raise InputError("no text in the input: nothing to tokenize")
    finish(len(source.files), 0, 0, complete=True)


def fetch_pretokenized(number: int, here: Folder) -> None:
    """The first shards of PRETOKENIZED, each checked before it is put in its place. Raises InputError."""
    from huggingface_hub import HfApi

    commit = here.begun.get("commit") or hub.ask_hub(PRETOKENIZED, lambda: HfApi().dataset_info(PRETOKENIZED).sha)
    here.manifest["commit"] = commit
    here.begin()
    for index in range(here.next_index, number):
        name = f"finewebedu_{'train' if index else 'val'}_{index:06d}.bin"
        path = hub.fetch(PRETOKENIZED, commit, name, here.copies)
        tokens = open_shard(path)
        os.replace(path, here.out / name)
        here.enter(name, [tokens])
        print(f"{name}: {len(tokens):,} tokens", flush=True)


def find_source(config: ShardConfig, begun: dict[str, Any]) -> Source:
    """Where the text comes from. Raises InputError.

    begun: a manifest. One of the same part of the Hub is gone on with, at its commit and without asking again.
    """
    if config.input:
        return Source("files", tuple(local_files(config.input)), config.layout)
    name = config.dataset or f"{hub.REPOSITORY} {config.name}"
    if begun.get("source") == name and begun["commit"]:
        layout = Layout(config.text_column or begun["text_column"], config.layout.template or begun.get("template", ""),
                        datasets=bool(config.dataset))
        recorded = {key: begun[key] for key in DATASET_KEYS if key in begun}
        flags = {key: getattr(config, key) for key in ("config", "split") if getattr(config, key)}
        return Source(name, tuple(map(tuple, begun["files"])), layout, begun.get("repository", hub.REPOSITORY),
                      begun["commit"], **recorded | flags)
    if not config.dataset:
        return hub.find_fineweb(config.name, config.layout)
    with processes(1, stop=True) as pool:  # its library would slow this process down
        return pool.submit(hub.find_dataset, config.dataset, config.config, config.split, config.layout).result()


def tokenize_source(config: ShardConfig, out: Path, rank: int, world_size: int) -> Folder:
    """The folder of config's shards, finished as far as this rank goes; on rank 0, of all. Raises InputError."""
    source = find_source(config, read_manifest(out / ("manifest.json" if world_size == 1 else f"manifest.{rank}.json")))
    layout = source.layout
    expected = int(sum(text_bytes(source, name, size) for name, size in source.files) / TEXT_A_TOKEN)
    if not config.shard_size:
        whole = not (config.input or config.dataset)
        config = replace(config, shard_size=100_000_000 if whole else automatic_shard_size(expected))
    options = {"source": source.name}
    if config.dataset:
        options |= {key: getattr(source, key) for key in DATASET_KEYS}
        options["repository"] = source.commit and source.dataset
    if layout.template:
        options["template"] = layout.template
    options |= {
        "text_column": layout.column,
        "commit": source.commit,
        "files": [[name if source.commit else Path(name).name, size] for name, size in source.files],
        "shard_size": config.shard_size,
        "world_size": world_size,
        "tokenizer": SHA256,
    }
    here = Folder(out, options, rank, world_size)
    finished = here.finished(config.max_shards)
    expected = min(expected, config.max_shards * config.shard_size or sys.maxsize)
    if not finished:
        check_disk(source, config.shard_size, expected, out)
    here.begin()
    if finished:
        print(f"{out}: finished already")
    else:
        try:
            make_shards(config, source, here, expected)
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

"""Turns text into shards of tokens for train_gpt2.py.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # Parquet files of the Hub
    python fineweb.py --input de/*.txt --vocab-size 8192 --out de_shards   # another language

A document is a row of a table, or a whole .txt or .md file. It becomes the token <|endoftext|>,
which separates documents, and then the tokens of its text. The tokens are GPT-2's, unless others
are learned from the text. All documents follow each other in one long row of tokens, and a shard is
a file with 100 million of them. Shard 0 is for validation.

This process reads documents and writes shards, and worker processes tokenize. manifest.json lists
the finished shards, and says at which place in the text the next one begins. So the same command
goes on after it was stopped. It writes the same bytes with any number of workers."""

import functools
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from support.command_line import flag, parse_args, progress_bar
from support.documents import (
    estimate_tokens,
    file_size,
    find_files,
    find_hub_files,
    hub_errors,
    pieces_to_learn_from,
    read_batches,
    texts_to_learn_from,
)
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import atomic_path, locked, remove, sha256, write_text
from support.shards import SHARD_NAME, open_shard
from support.tokenizer import encode, get_tokenizer, learn_vocabulary, make_tokenizer

FINEWEB = "HuggingFaceFW/fineweb-edu"  # the name of a dataset on the Hub
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # shards of it that others have made, in llm.c's format
SHARD_SIZE = 10**8  # tokens in a shard, if --shard-size does not say otherwise


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of tokens."""

    # Each field is a flag, and its comment is the flag's help.
    name: str = "sample-10BT"  # part of FineWeb-Edu: sample-10BT, sample-100BT, CC-MAIN-2024-10, …
    # your own .parquet .jsonl .csv .txt .md files (.gz, .zst), folders
    input: tuple[str, ...] | None = None
    dataset: str | None = None  # another text dataset of the Hub, if its files are Parquet
    config: str = ""  # the part of --dataset that the Hub calls its configuration; empty: default
    # split of --dataset; empty: train, and if it has a validation split, that becomes shard 0
    split: str = ""
    text_column: str = "text"  # the column, or key, of the text
    out: str = "edu_fineweb10B"  # folder for the shards
    # learn a vocabulary of so many tokens from the text, from 257, which are bytes, to 65536; 0:
    # that of the files vocab.json and merges.txt in --out, or else GPT-2's
    vocab_size: int = 0
    # tokens per shard; 0: 100 million, but 10 million in shard 0 of --input or --dataset
    shard_size: int = 0
    workers: int = 0  # tokenizing processes; 0: one for each core that this process may use
    max_shards: int = 0  # stop after this many, validation included; 0: no limit
    pretokenized: int = 0  # download this many finished shards of FineWeb-Edu, and tokenize nothing
    verify: bool = False  # only check the shards in --out against its manifest.json


# --------------------------------------------------------------------------------------------------
# From documents to tokens

load_tokenizer = functools.cache(get_tokenizer)  # Each worker reads the vocabulary once.


def tokenize(documents: list[str | None], out: Path) -> np.ndarray:
    """The tokens of documents, 1-D uint16. The vocabulary is that in the folder `out`."""
    tokenizer = load_tokenizer(out)
    parts = [np.empty(0, np.uint16)]
    for text in documents:
        if text:
            parts.append(np.array([tokenizer.eot_token], np.uint16))
            # encode() tokenizes a long text in pieces, to save memory. A token is below 2**16.
            parts.extend(piece.astype(np.uint16) for piece in encode(text, tokenizer))
    return np.concatenate(parts)


class Place(NamedTuple):
    """A place in the text, and so in its tokens. It is the beginning by default."""

    file: int = 0
    row: int = 0  # the row of the file with which a batch of documents begins
    token: int = 0  # how many tokens of that batch are before this place


class Piece(NamedTuple):
    """Some tokens of a batch of documents, 1-D uint16, and the place of the first one."""

    place: Place
    tokens: np.ndarray


def tokenize_in_workers(
    pool: ProcessPoolExecutor,
    workers: int,
    batches: Iterator[tuple[int, int, list[str | None]]],
    out: Path,
    bar: tqdm,
) -> Iterator[Piece]:
    """Tokenizes batches of documents in worker processes. Yields each one's tokens, in order."""
    pending: deque[tuple[Place, Future]] = deque()

    def oldest_result() -> Piece:
        place, future = pending.popleft()
        tokens = future.result()
        bar.update(len(tokens))
        return Piece(place, tokens)

    for file, row, documents in batches:
        pending.append((Place(file, row), pool.submit(tokenize, documents, out)))
        if len(pending) > 2 * workers:  # This keeps the workers busy. More would fill memory.
            yield oldest_result()
    while pending:
        yield oldest_result()


def start_worker() -> None:
    """Runs first in each worker. Makes the worker end when its parent ends, even if by a kill."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and so the workers.

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def usable_cores() -> int:
    """How many cores this process may use. `taskset` or a container may allow it only a few."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --------------------------------------------------------------------------------------------------
# From tokens to shards


def cut(
    pieces: Iterator[Piece], number: int, val_size: int, size: int
) -> Iterator[tuple[np.ndarray, Place | None]]:
    """Cuts the text into shards, beginning with shard `number`. Yields (the tokens of a shard, the
    place after them, or None at the end of the text).

    Shard 0 has val_size tokens, which are at most `size`. The others have `size`, and the last one
    has what is left. But if the whole text has at most `size` tokens, shard 0 has a tenth of them,
    and shard 1 the rest."""
    held: deque[Piece] = deque()  # what is in no shard yet
    count = 0  # how many tokens are held
    for piece in pieces:
        held.append(piece)
        count += len(piece.tokens)
        while count > size:  # So some tokens are left for another shard.
            shard = take(held, val_size if number == 0 else size)
            yield shard, held[0].place
            count -= len(shard)
            number += 1
    if count == 0:
        raise UserError("there is no text to train on: nothing to tokenize")
    if number == 0:
        # A text has at least two tokens, <|endoftext|> and another one, so shard 1 gets some.
        shard = take(held, max(count // 10, 1))
        yield shard, held[0].place
    yield np.concatenate([piece.tokens for piece in held]), None


def take(held: deque[Piece], n: int) -> np.ndarray:
    """Removes the first n tokens from pieces that have more, and returns them."""
    taken = []
    while n >= len(held[0].tokens):
        tokens = held.popleft().tokens
        taken.append(tokens)
        n -= len(tokens)
    place, tokens = held[0]
    held[0] = Piece(place._replace(token=place.token + n), tokens[n:])
    return np.concatenate([*taken, tokens[:n]])


class Folder:
    """The shards in --out, and manifest.json, which lists them."""

    def __init__(self, out: Path, name: str, suffix: str, max_shards: int):
        """A shard is {name}_train_000001{suffix}. With max_shards 0 there is no limit."""
        self.out = out
        self.name = name
        self.suffix = suffix
        self.max_shards = max_shards
        self.manifest = out / "manifest.json"
        self.shards: list[dict[str, Any]] = []  # the name, tokens and sha256 of each
        self.next: Place | None = Place()  # where the next shard begins; None after the last one
        self.made_from: dict[str, Any] = {}  # the text and the settings that determine the shards
        if self.manifest.exists():
            found = json.loads(self.manifest.read_text(encoding="utf-8"))
            self.shards = found.pop("shards")
            place = found.pop("next")
            self.next = None if place is None else Place(*place)
            self.made_from = found  # what is left of it

    def is_finished(self) -> bool:
        return self.next is None or 0 < self.max_shards <= len(self.shards)

    def next_name(self) -> str:
        number = len(self.shards)
        return f"{self.name}_{'train' if number else 'val'}_{number:06d}{self.suffix}"

    def is_begun(self) -> bool:
        """True if there are shards, or a vocabulary that was learned for them."""
        return bool(self.shards) or "learned" in self.made_from

    def check(self, made_from: dict[str, Any]) -> None:
        """UserError if what is here is damaged, or was made from something else."""
        changed = [key for key in made_from if self.made_from.get(key) != made_from[key]]
        if self.is_begun() and changed:
            problem = f"{', '.join(changed)} must be as in its manifest.json"
            raise UserError(f"{self.out}: {problem}; use a new --out, or remove this one")
        expected = [shard["name"] for shard in self.shards]
        for name in expected:
            open_shard(self.out / name)  # raises an error if it is missing or too short
        # Any other shard in this folder would be trained on by mistake. Only the next shard may be
        # here, from a fineweb.py that was killed just before it added that shard to the manifest.
        if self.manifest.exists():
            expected.append(self.next_name())
        for path in self.out.iterdir():
            if SHARD_NAME.fullmatch(path.name) and path.name not in expected:
                raise UserError(f"{path}: not in manifest.json; remove it or use a new --out")
        if not self.is_begun():
            self.made_from = made_from

    def write(self, tokens: np.ndarray, after: Place | None) -> None:
        """Writes the next shard. `after` is the place after it, or None at the end of the text."""
        name = self.next_name()
        with atomic_path(self.out / name) as partial, open(partial, "wb") as file:
            # np.save does the same. But if the disk is full, its error does not say so.
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
        manifest = self.made_from | {"next": self.next, "shards": self.shards}
        write_text(self.manifest, json.dumps(manifest, indent=1))

    def verify(self) -> None:
        """UserError that names the shards that have changed, are missing, or are not listed."""
        if not self.shards:
            raise UserError(f"{self.out}: no manifest.json that lists shards")
        paths = [path for path in self.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")]
        found = {path.name: sha256(path) for path in progress_bar(paths, "file")}
        listed = {shard["name"]: shard["sha256"] for shard in self.shards}
        found["vocab.json"] = get_tokenizer(self.out).checksum
        listed["vocab.json"] = self.made_from.get("vocabulary")
        wrong = [name for name in found | listed if found.get(name) != listed.get(name)]
        if wrong:
            names = ", ".join(sorted(wrong))
            raise UserError(f"{self.out}: does not match manifest.json: {names}")
        print(f"{len(paths)} shards: all checksums match")


# --------------------------------------------------------------------------------------------------
# All of it


def make_shards(config: ShardConfig, folder: Folder) -> None:
    """Makes the shards of --input, of --dataset, or else of FineWeb-Edu."""
    out = folder.out
    made_from = {"text_column": config.text_column, "shard_size": config.shard_size}
    validation: list[str] = []  # files that become shard 0
    if config.input is not None:
        training = find_files(config.input)
        sizes = [[os.path.basename(path), file_size(path)] for path in training]
        made_from |= {"source": "files", "files": sizes}
    else:
        dataset, part = config.dataset, config.config
        if dataset is None:
            dataset, part = FINEWEB, config.name
        commit = commit_of(dataset, folder)
        made_from |= {"source": dataset, "commit": commit, "config": part, "split": config.split}
    learn = config.vocab_size > 0 and not folder.shards and not (out / "vocab.json").exists()
    if not learn:
        tokenizer = get_tokenizer(out)  # The workers are forked later, and have it then.
        made_from["vocabulary"] = tokenizer.checksum
    folder.check(made_from)
    if not learn and config.vocab_size not in (0, tokenizer.n_vocab):
        problem = f"{out} already has a vocabulary of {tokenizer.n_vocab}; use a new --out"
        raise UserError(f"--vocab-size {config.vocab_size}: {problem}")
    if folder.is_finished():
        return

    workers = config.workers or usable_cores()
    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        # The first task makes the pool start its workers. This one does nothing else. It comes
        # before anything that starts threads, since a process with threads should not be forked.
        pool.submit(os.getpid)
        if config.input is None:
            validation, training = find_hub_files(dataset, part, config.split, commit)
        if learn:
            texts = texts_to_learn_from(training, config.text_column)
            write_vocabulary(folder, texts, config.vocab_size, bool(validation))
            tokenizer = get_tokenizer(out)
        files = len(validation) + len(training)
        print(f"reading {files} files, with a vocabulary of {tokenizer.n_vocab:,} tokens")
        folder.save()  # It tells a run that trains on several folders that this one isn't ready.
        write_shards(config, folder, validation, training, pool, workers)


def write_vocabulary(folder: Folder, texts: Iterator[str], size: int, has_validation: bool) -> None:
    """Learns a vocabulary of `size` tokens from the texts, and writes its two files.

    Without files for validation it leaves out the first tenth, which is about what shard 0 gets."""
    pieces = pieces_to_learn_from(progress_bar(texts, "document"))
    if not has_validation:
        pieces = pieces[len(pieces) // 10 :]
    merges, vocab = learn_vocabulary(pieces, size)
    # The manifest comes first, so that no vocabulary is here without the text that it is from.
    folder.made_from |= {"vocabulary": make_tokenizer(merges, vocab).checksum, "learned": True}
    folder.save()
    write_text(folder.out / "merges.txt", merges)
    write_text(folder.out / "vocab.json", vocab)  # The second file says that both are whole.


def write_shards(
    config: ShardConfig,
    folder: Folder,
    validation: list[str],
    training: list[str],
    pool: ProcessPoolExecutor,
    workers: int,
) -> None:
    """Reads the files, and writes the shards that aren't there yet."""
    files = validation + training
    val_size = size = config.shard_size or SHARD_SIZE
    if not config.shard_size and (config.input or config.dataset):
        val_size = size // 10  # Else most of a text of one or two shards would be for validation.
    estimate = estimate_tokens(files)
    if config.max_shards:
        estimate = min(estimate, config.max_shards * size)
    before = sum(shard["tokens"] for shard in folder.shards)
    with progress_bar(None, "tok", total=estimate, initial=before, unit_scale=True) as bar:

        def read(paths: list[str], start: Place) -> Iterator[Piece]:
            batches = read_batches(paths, config.text_column, start.file, start.row)
            return tokenize_in_workers(pool, workers, batches, folder.out, bar)

        start = folder.next
        if validation and not folder.shards:
            start = Place(file=len(validation))
            parts = [piece.tokens for piece in read(validation, Place())]
            if sum(map(len, parts)) > 0:  # Otherwise shard 0 is cut from the training text.
                folder.write(np.concatenate(parts), after=start)
            if folder.is_finished():  # as with --max-shards 1
                return
        pieces = read(files, start)
        if start.token:
            _, tokens = next(pieces)  # This batch begins in the shard before.
            pieces = itertools.chain([Piece(start, tokens[start.token :])], pieces)
        for shard, after in cut(pieces, len(folder.shards), val_size, size):
            folder.write(shard, after)
            if config.input and len(folder.shards) == 1:
                path = training[after.file]
                tqdm.write(f"training begins in file {after.file + 1} of {len(training)}, {path}")
            if folder.is_finished():
                return


def commit_of(dataset: str, folder: Folder) -> str:
    """The commit of the dataset with which a folder was begun, or else the newest."""
    from huggingface_hub import HfApi

    if folder.is_begun() and folder.made_from["source"] == dataset:
        return folder.made_from["commit"]
    with hub_errors(dataset):
        return HfApi().dataset_info(dataset).sha


def fetch_pretokenized(folder: Folder) -> None:
    """Downloads shards of PRETOKENIZED, until the folder has its max_shards."""
    from huggingface_hub import hf_hub_download

    commit = commit_of(PRETOKENIZED, folder)
    gpt2s = get_tokenizer().checksum
    folder.check({"source": PRETOKENIZED, "commit": commit, "vocabulary": gpt2s})
    if folder.is_finished():
        return
    folder.save()
    downloads = folder.out / ".hub.partial"
    try:
        while not folder.is_finished():
            name = folder.next_name()
            with hub_errors(PRETOKENIZED):
                hf_hub_download(
                    PRETOKENIZED, name, repo_type="dataset", revision=commit, local_dir=downloads
                )
            open_shard(downloads / name)  # raises an error if it is damaged
            os.replace(downloads / name, folder.out / name)
            folder.add(name, after=Place())  # No text is read, so any place will do.
    finally:
        remove(downloads)


# --------------------------------------------------------------------------------------------------
# The command


def read_config(args: list[str] | None) -> ShardConfig:
    """Reads the command line. UserError if something is wrong with it."""
    for word in sys.argv[1:] if args is None else args:
        if word.encode(errors="ignore").decode() != word:
            raise UserError(f"{word!a}: not UTF-8; give another name")
    config = parse_args(ShardConfig, args=args)
    default = ShardConfig()
    names = ("name", "input", "dataset", "pretokenized")
    given = [flag(name) for name in names if getattr(config, name) != getattr(default, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: choose one of them")
    if (config.config or config.split) and config.dataset is None:
        raise UserError("--config and --split need --dataset")
    if config.pretokenized and config.vocab_size:
        raise UserError("--pretokenized: these shards have GPT-2's tokens; leave out --vocab-size")
    if config.vocab_size and not 257 <= config.vocab_size <= 2**16:
        raise UserError(f"--vocab-size {config.vocab_size}: must be 0, or from 257 to 65536")
    for name in ("shard_size", "workers", "max_shards", "pretokenized"):
        if getattr(config, name) < 0:
            raise UserError(f"{flag(name)} {getattr(config, name)}: must be at least 0")
    return config


def main(args: list[str] | None = None) -> None:
    config = read_config(args)
    out = Path(config.out)
    if config.pretokenized:
        name, suffix = "finewebedu", ".bin"
    elif config.input is None and config.dataset is None:
        name, suffix = "edufineweb", ".npy"
    else:
        name, suffix = out.resolve().name, ".npy"
    # locked() also makes the folder, if it is not there.
    with locked(out, f"{out}: another fineweb.py uses it; wait for it or choose another --out"):
        folder = Folder(out, name, suffix, config.pretokenized or config.max_shards)
        if config.verify:
            folder.verify()
            return
        for path in out.glob(".*.partial"):  # what a killed fineweb.py was writing
            remove(path)
        try:
            if config.pretokenized:
                fetch_pretokenized(folder)
            else:
                make_shards(config, folder)
        except BrokenExecutor:
            raise UserError("a worker was killed (out of memory?); use fewer --workers") from None
    tokens = sum(shard["tokens"] for shard in folder.shards)
    print(f"{out}: {len(folder.shards)} shards, {tokens:,} tokens")


if __name__ == "__main__":
    run_and_exit(main)

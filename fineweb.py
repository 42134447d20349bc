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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from support.command_line import flag, parse_args, progress_bar
from support.documents import (
    HUB_REMEDY,
    Batches,
    Dataset,
    Files,
    Source,
    any_error_as_user_error,
)
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import atomic_path, locked, sha256, write_text
from support.shards import SHARD_NAME, open_shard
from support.tokenizer import encode, get_tokenizer, holds_vocabulary, learn_vocabulary, spread

FINEWEB = "HuggingFaceFW/fineweb-edu"  # the name of a dataset on the Hub
SHARD_SIZE = 10**8  # tokens in a shard, if --shard-size does not say otherwise
NAMES = "edufineweb_{split}_{number:06d}.npy"  # FineWeb-Edu's shards; split is val or train


@dataclass(frozen=True)
class ShardConfig:
    """Turns FineWeb-Edu, or your own text, into shards of tokens."""

    # Each field is a flag, and its comment is the flag's help.
    name: str = "sample-10BT"  # part of FineWeb-Edu: sample-10BT, sample-100BT, CC-MAIN-2024-10, …
    input: tuple[str, ...] = ()  # your own .parquet .jsonl .csv .txt .md files (.gz, .zst), folders
    dataset: str = ""  # another text dataset of the Hub, if its files are Parquet
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


# Each worker reads the vocabulary once.
load_tokenizer = functools.cache(get_tokenizer)


def tokenize(documents: list[str | None], out: Path) -> np.ndarray:
    """The tokens of documents, 1-D uint16. A row without a text gives none.

    The vocabulary is that in the folder `out`."""
    tokenizer = load_tokenizer(out)
    parts = [np.empty(0, np.uint16)]
    for text in documents:
        if text:
            parts.append(np.array([tokenizer.eot_token], np.uint16))
            # encode() tokenizes a long text in pieces, to save memory. A token is below 2**16.
            parts.extend(piece.astype(np.uint16) for piece in encode(text, tokenizer))
    return np.concatenate(parts)


class Place(NamedTuple):
    """Where a token is in the text. Place() is the beginning."""

    stream: int = 0  # the number of a file, or of a split of a dataset
    # Where a batch of documents begins in the stream. In a file this is the number of rows before
    # it. In a split it is what the library `datasets` gives as its state. None is the beginning.
    position: Any = None
    used: int = 0  # the number of tokens of the batch that come before this place


Piece = tuple[Place, np.ndarray]  # some tokens, and the place of the first of them


def tokenize_in_workers(
    pool: ProcessPoolExecutor, workers: int, batches: Batches, bar: tqdm, out: Path
) -> Iterator[Piece]:
    """Tokenizes batches of documents in worker processes, and yields their tokens in order."""
    pending: deque[tuple[Place, Future]] = deque()

    def oldest_result() -> Piece:
        place, future = pending.popleft()
        tokens = future.result()
        bar.update(len(tokens))
        return place, tokens

    for stream, position, documents in batches:
        pending.append((Place(stream, position), pool.submit(tokenize, documents, out)))
        if len(pending) > 2 * workers:  # This keeps the workers busy. More would fill memory.
            yield oldest_result()
    while pending:
        yield oldest_result()


def start_worker() -> None:
    """Runs first in each worker. Makes the worker end when its parent ends, even if by a kill."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and so the workers

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


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
    held: list[Piece] = []  # what is in no shard yet
    count = 0  # how many tokens are held
    for piece in pieces:
        held.append(piece)
        _, tokens = piece
        count += len(tokens)
        # This also holds for shard 0: a text that ends before `size` tokens is divided below. After
        # each shard some tokens are left, so the last shard is never empty.
        while count > size:
            length = val_size if number == 0 else size
            shard, after, held = take_first(held, length)
            yield shard, after
            number += 1
            count -= length
    if count == 0:
        raise UserError("there is no text to train on: nothing to tokenize")
    if number == 0:
        # There are at least two tokens, <|endoftext|> and one of a text, so shard 1 gets something.
        shard, after, held = take_first(held, max(count // 10, 1))
        yield shard, after
    yield np.concatenate([tokens for _, tokens in held]), None


def take_first(pieces: list[Piece], n: int) -> tuple[np.ndarray, Place, list[Piece]]:
    """Takes n tokens from pieces that have more. Returns (them, the place after, the rest)."""
    taken = []
    for i, (place, tokens) in enumerate(pieces):
        if n < len(tokens):  # This piece has more than what is still to be taken, which may be 0.
            taken.append(tokens[:n])
            after = place._replace(used=place.used + n)  # n tokens further in the same batch
            return np.concatenate(taken), after, [(after, tokens[n:]), *pieces[i + 1 :]]
        taken.append(tokens)
        n -= len(tokens)  # those that are still to be taken
    raise ValueError("there are not more than n tokens")


def drop_first(pieces: Iterator[Piece], n: int) -> Iterator[Piece]:
    """Yields what follows the first n tokens."""
    for place, tokens in pieces:
        dropped = min(n, len(tokens))
        n -= dropped
        yield place._replace(used=place.used + dropped), tokens[dropped:]


class Folder:
    """The shards in --out, and manifest.json, which lists them."""

    def __init__(self, out: Path, shard_name: str, max_shards: int):
        """`shard_name` is a pattern such as NAMES. With max_shards 0 there is no limit."""
        self.out = out
        self.shard_name = shard_name
        self.max_shards = max_shards
        self.manifest = out / "manifest.json"
        self.shards: list[dict[str, Any]] = []  # the name, tokens and sha256 of each
        self.next: Place | None = Place()  # where the next shard begins; None after the last one
        self.made_from: dict[str, Any] = {}  # the text and the settings that determine the shards
        if self.manifest.exists():
            # An error in here becomes one line: the file, what is wrong, and how to mend it.
            with any_error_as_user_error(str(self.manifest), "move it and its shards away"):
                found = json.loads(self.manifest.read_text(encoding="utf-8"))
                keys = ("name", "tokens", "sha256")  # It is an error if a shard lacks one.
                self.shards = [{key: shard[key] for key in keys} for shard in found.pop("shards")]
                place = found.pop("next")
                self.next = None if place is None else Place(**place)
                self.made_from = found  # what is left of it

    def is_finished(self) -> bool:
        return self.next is None or 0 < self.max_shards <= len(self.shards)

    def next_name(self) -> str:
        number = len(self.shards)
        return self.shard_name.format(split="val" if number == 0 else "train", number=number)

    def begin(self, made_from: dict[str, Any]) -> None:
        """Starts to make shards from this text with these settings, or goes on.

        UserError if the shards that are here are damaged, or were made from something else."""
        for key in self.made_from | made_from:
            then, now = self.made_from.get(key), made_from.get(key)
            if self.shards and now != then:
                change = f"{key} {then!r}, now {now!r}"
                if key in ("files", "vocabulary"):  # a long list, and a checksum
                    change = f"other {key}"
                raise UserError(
                    f"{self.out}: started with {change}; use a new --out, or remove this one"
                )
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
        for path in self.out.glob(".*.partial"):  # what a killed run was writing by atomic_path()
            path.unlink()
        self.made_from = made_from
        if not self.is_finished():  # A finished folder is left untouched.
            self.save()

    def vocabulary(self) -> dict[str, str]:
        """The vocabulary in this folder as manifest.json has it; {} if it is GPT-2's."""
        if not (self.out / "vocab.json").exists():
            return {}
        tokenizer = get_tokenizer(self.out)
        return {"vocabulary": tokenizer.checksum} if tokenizer != get_tokenizer() else {}

    def learn_vocabulary(self, source: Source, size: int) -> None:
        """Writes a vocabulary of `size` tokens for the text of this source."""
        texts = progress_bar(source.texts_to_learn_from(), "document")
        pieces = spread(texts)
        if not source.has_validation_split:
            pieces = pieces[len(pieces) // 10 :]  # What comes before is about what validation gets.
        merges, vocab = learn_vocabulary(pieces, size)
        write_text(self.out / "merges.txt", merges)
        write_text(self.out / "vocab.json", vocab)  # The last file says that both are whole.
        self.made_from |= self.vocabulary()
        self.save()

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
        place = self.next._asdict() if self.next is not None else None
        manifest = self.made_from | {"next": place, "shards": self.shards}
        write_text(self.manifest, json.dumps(manifest, indent=1))

    def verify(self) -> None:
        """UserError that names the shards that have changed, are missing, or are not listed."""
        paths = [path for path in self.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")]
        found = {path.name: sha256(path) for path in progress_bar(paths, "file")}
        listed = {shard["name"]: shard["sha256"] for shard in self.shards}
        found["vocab.json"] = self.vocabulary().get("vocabulary")
        listed["vocab.json"] = self.made_from.get("vocabulary")
        names = {*found, *listed}
        wrong = [name for name in names if found.get(name) != listed.get(name)]
        if wrong or not paths:
            problem = ", ".join(sorted(wrong)) or "no shards"
            raise UserError(f"{self.out}: does not match manifest.json: {problem}")
        print(f"{len(paths)} shards: all checksums match")


# --------------------------------------------------------------------------------------------------
# All of it


def make_shards(config: ShardConfig, folder: Folder) -> None:
    """Makes the shards of --input, of --dataset, or else of FineWeb-Edu."""
    if config.input or config.dataset:
        dataset, part = config.dataset, config.config
    else:
        dataset, part = FINEWEB, config.name
    # A source has documents in streams, which it reads from any position on.
    if config.input:
        # The merges in --out are a .txt, but no text, if the texts are in the same folder.
        merges = folder.out / "merges.txt"
        source: Source = Files(config.input, config.text_column, skip=merges)
    else:
        where = what_was_typed(config)
        commit = commit_of(dataset, folder, where)
        source = Dataset(dataset, part, config.split, config.text_column, commit, where)
    settings = {
        "config": part,
        "split": config.split,
        "text_column": config.text_column,
        "shard_size": config.shard_size,
    }
    # `identity` has the commit of a dataset on the Hub, or else the names and sizes of the files.
    folder.begin({"source": source.name, **settings, **source.identity, **folder.vocabulary()})
    # The file that is written last says that there is a vocabulary.
    has_vocabulary = (folder.out / "vocab.json").exists() or folder.shards
    learn = config.vocab_size > 0 and not has_vocabulary
    if not learn:
        # This also loads it once for all workers that are forked from this process.
        tokenizer = get_tokenizer(folder.out)
        if config.vocab_size not in (0, tokenizer.n_vocab):
            problem = f"{folder.out} already has a vocabulary of {tokenizer.n_vocab}"
            raise UserError(f"--vocab-size {config.vocab_size}: {problem}; use a new --out")
    if folder.is_finished():
        return
    val_size = size = config.shard_size or SHARD_SIZE
    if not config.shard_size and dataset != FINEWEB:
        val_size = size // 10  # Else most of a text of one or two shards would be for validation.
    workers = config.workers or usable_cores()
    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        # The first task makes the pool start its workers. This one does nothing else, but comes
        # before the source starts threads, since a process with threads should not be forked.
        pool.submit(os.getpid)
        source.open()  # asks the Hub for the files of a dataset, for example
        estimate = source.estimate_tokens()
        print(f"reading {len(source.sizes)} files")
        if learn:
            folder.learn_vocabulary(source, config.vocab_size)
        if (folder.out / "vocab.json").exists():
            count = get_tokenizer(folder.out).n_vocab
            print(f"vocabulary: the {count:,} tokens of {folder.out / 'vocab.json'}")
        if config.max_shards:
            estimate = min(estimate, config.max_shards * size)
        before = sum(shard["tokens"] for shard in folder.shards)
        with progress_bar(None, "tok", total=estimate, initial=before, unit_scale=True) as bar:
            start = folder.next
            if source.has_validation_split and not folder.shards:
                # The validation split is stream 0 of this dataset, and all of it becomes shard 0.
                start = Place(stream=1)
                batches = source.read_one_stream(0)
                parts = [
                    tokens
                    for _, tokens in tokenize_in_workers(pool, workers, batches, bar, folder.out)
                ]
                if sum(map(len, parts)) > 0:  # If it is empty, shard 0 is cut from stream 1 below.
                    folder.write(np.concatenate(parts), after=start)
                if folder.is_finished():  # as with --max-shards 1
                    return
            batches = source.read_from(start.stream, start.position)
            pieces = tokenize_in_workers(pool, workers, batches, bar, folder.out)
            pieces = drop_first(pieces, start.used)  # These tokens are in an earlier shard.
            for shard, after in cut(pieces, len(folder.shards), val_size, size):
                folder.write(shard, after)
                if config.input and len(folder.shards) == 1:
                    # Nothing of a file is in shard 0 if that ends where the file begins.
                    divided = after != Place(after.stream)
                    end = after.stream + divided
                    names = [str(path) for path in source.paths[:end]]
                    count = f"{end} of {len(source.paths)} files"
                    some = names if end < 6 else [names[0], "…", names[-1]]
                    part = ", the last one in part" if divided else ""
                    tqdm.write(f"validation is from {count}: {', '.join(some)}{part}")
                if folder.is_finished():
                    return


def usable_cores() -> int:
    """How many cores this process may use. Slurm or `taskset` may allow it only a few."""
    if "SLURM_CPUS_PER_TASK" in os.environ:
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def what_was_typed(config: ShardConfig) -> str:
    """The flag that names the dataset of the Hub, for errors; without a flag, FineWeb-Edu."""
    for name in ("dataset", "pretokenized", "name"):
        value = getattr(config, name)
        if value != getattr(ShardConfig(), name):
            return f"{flag(name)} {value}"
    return FINEWEB


def commit_of(dataset: str, folder: Folder, where: str) -> str:
    """The commit of the dataset that the shards in a folder were made from, or else the newest."""
    from huggingface_hub import HfApi

    if folder.shards and folder.made_from.get("source") == dataset:
        return folder.made_from["commit"]
    with any_error_as_user_error(where, HUB_REMEDY):
        return HfApi().dataset_info(dataset).sha


# --------------------------------------------------------------------------------------------------
# --pretokenized: shards of FineWeb-Edu that others have made

PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # the name of a dataset on the Hub
PRETOKENIZED_NAMES = "finewebedu_{split}_{number:06d}.bin"  # in llm.c's format


def fetch_pretokenized(folder: Folder, where: str) -> None:
    """Downloads shards of PRETOKENIZED, until the folder has its max_shards."""
    from huggingface_hub import hf_hub_download

    commit = commit_of(PRETOKENIZED, folder, where)
    folder.begin({"source": PRETOKENIZED, "commit": commit})
    downloads = folder.out / ".hub"
    while not folder.is_finished():
        name = folder.next_name()
        with any_error_as_user_error(where, HUB_REMEDY):
            path = hf_hub_download(
                PRETOKENIZED, name, repo_type="dataset", revision=commit, local_dir=downloads
            )
        open_shard(Path(path))  # raises an error if it is damaged
        os.replace(path, folder.out / name)
        # None would mean the end of the text. Any other place will do, since no text is read.
        folder.add(name, after=Place())
    shutil.rmtree(downloads, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# The command


def read_config(args: list[str] | None) -> ShardConfig:
    """Reads the command line. UserError if something is wrong with it."""
    config = parse_args(ShardConfig, args=args)
    problems = []
    for name in ("input", "dataset"):
        # `--input $FILES` has no value if $FILES is empty. Then FineWeb-Edu is not what is meant.
        given = flag(name) in (sys.argv if args is None else args)  # flag("input") is "--input"
        if given and not getattr(config, name):
            problems.append(f"{flag(name)}: has no value")
    if config.vocab_size and not 257 <= config.vocab_size <= 2**16:
        problems.append(f"--vocab-size {config.vocab_size}: must be 0, or from 257 to 65536")
    if config.pretokenized and (config.vocab_size or holds_vocabulary(Path(config.out))):
        problem = "these shards have GPT-2's tokens; leave out --vocab-size, and use another --out"
        problems.append(f"--pretokenized {config.pretokenized}: {problem}")
    for name in ("shard_size", "workers", "max_shards", "pretokenized"):
        if getattr(config, name) < 0:
            problems.append(f"{flag(name)} {getattr(config, name)}: must be at least 0")
    instead_of_fineweb = [n for n in ("input", "dataset", "pretokenized") if getattr(config, n)]
    if len(instead_of_fineweb) > 1:
        problems.append("--input, --dataset and --pretokenized: choose one")
    default = ShardConfig()
    if instead_of_fineweb and config.name != default.name:
        problem = "is a part of FineWeb-Edu, which --input, --dataset and --pretokenized replace"
        problems.append(f"--name {config.name}: {problem}")
    if (config.config or config.split) and not config.dataset:
        problems.append("--config and --split need --dataset")
    if config.dataset and Path(config.dataset).exists():
        problems.append(f"--dataset {config.dataset}: is on this machine; use --input")
    if problems:
        raise UserError("; ".join(problems))
    return config


def main(args: list[str] | None = None) -> None:
    config = read_config(args)
    out = Path(config.out)
    # locked() also makes the folder, if it is not there.
    with locked(out, f"{out}: another fineweb.py uses it; wait for it or choose another --out"):
        if config.pretokenized:
            folder = Folder(out, PRETOKENIZED_NAMES, max_shards=config.pretokenized)
        else:
            names = NAMES
            if config.input or config.dataset:  # Then they have the name of the folder.
                names = f"{out.resolve().name.lstrip('.')}_{{split}}_{{number:06d}}.npy"
            folder = Folder(out, names, config.max_shards)
        if config.verify:
            folder.verify()
            return
        try:
            if config.pretokenized:
                fetch_pretokenized(folder, what_was_typed(config))
            else:
                make_shards(config, folder)
        except BrokenExecutor:
            raise UserError("a worker was killed (out of memory?); use fewer --workers") from None
        finally:
            if not folder.shards:  # Without a shard, the folder can be used for another text.
                folder.manifest.unlink(missing_ok=True)
    tokens = sum(shard["tokens"] for shard in folder.shards)
    print(f"{out}: {len(folder.shards)} shards, {tokens:,} tokens")


if __name__ == "__main__":
    run_and_exit(main)

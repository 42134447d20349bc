"""Tokenize text into shards for train_gpt2.py.

    python fineweb.py                                # FineWeb-Edu, 10 billion tokens
    python fineweb.py --input books/*.parquet notes.jsonl a.txt --out my_shards
    python fineweb.py --dataset roneneldan/TinyStories --out tiny    # Parquet files on the Hub
    python fineweb.py --input de/*.txt --vocab-size 8192 --out de_shards   # another language

A document is a row of a table, or a whole .txt or .md file. It is encoded as <|endoftext|>, which
separates documents, followed by the tokens of its text. The vocabulary is GPT-2's, unless
--vocab-size learns one from the text. The tokens of all documents form one stream, split into
shards of 100 million tokens. Shard 0 is for validation.

This process reads documents and writes shards, while worker processes tokenize. manifest.json lists
the finished shards, and the position in the text where the next one begins, so that rerunning the
command continues an interrupted run. The output is byte-identical for any number of workers."""

import functools
import itertools
import json
import multiprocessing
import os
import signal
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

FINEWEB = "HuggingFaceFW/fineweb-edu"  # a dataset on the Hub
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # third-party shards of it, in llm.c's format
SHARD_SIZE = 10**8  # tokens per shard if --shard-size is 0


@dataclass(frozen=True)
class ShardConfig:
    """Tokenize FineWeb-Edu, or your own text, into shards."""

    # Each field is a flag, and its comment is the flag's help text.
    name: str = "sample-10BT"  # subset of FineWeb-Edu, e.g. sample-100BT or CC-MAIN-2024-10
    # your own .parquet, .jsonl, .csv, .txt or .md files, or folders of them; all but .parquet may
    # also be compressed (.gz, .zst)
    input: tuple[str, ...] | None = None
    dataset: str | None = None  # another text dataset on the Hub; its files must be Parquet
    config: str = ""  # configuration (subset) of --dataset; empty: the default one
    # split of --dataset; empty: train, with the validation split, if any, as shard 0
    split: str = ""
    text_column: str = "text"  # column or key that holds the text
    out: str = "edu_fineweb10B"  # output folder
    # learn a vocabulary of this size from the text, 257 (bytes only) to 65536; 0: use vocab.json
    # and merges.txt in --out, or else GPT-2's
    vocab_size: int = 0
    # tokens per shard; 0: 100 million, but 10 million in shard 0 with --input or --dataset
    shard_size: int = 0
    workers: int = 0  # number of tokenizing processes; 0: one per available core
    max_shards: int = 0  # stop after this many shards, including validation; 0: no limit
    pretokenized: int = 0  # download this many tokenized shards of FineWeb-Edu instead; 0: none
    verify: bool = False  # only check the shards in --out against its manifest.json


# --------------------------------------------------------------------------------------------------
# From documents to tokens

load_tokenizer = functools.cache(get_tokenizer)  # read the vocabulary's files once per worker


def tokenize(documents: list[str | None], out: Path) -> np.ndarray:
    """Return the tokens of documents, 1-D uint16, using the vocabulary in the folder `out`."""
    tokenizer = load_tokenizer(out)
    parts = [np.empty(0, np.uint16)]
    for text in documents:
        if text:
            parts.append(np.array([tokenizer.eot_token], np.uint16))
            # encode() yields the tokens of a long text in pieces. All tokens fit in uint16.
            parts.extend(piece.astype(np.uint16) for piece in encode(text, tokenizer))
    return np.concatenate(parts)


class Position(NamedTuple):
    """A position in the token stream, by default its beginning."""

    file: int = 0  # number of the file
    row: int = 0  # first row of a batch of documents in that file
    token: int = 0  # offset into the tokens of that batch


class Piece(NamedTuple):
    """Consecutive tokens of a batch of documents."""

    start: Position
    tokens: np.ndarray  # 1-D uint16


def tokenize_in_workers(
    pool: ProcessPoolExecutor,
    workers: int,
    batches: Iterator[tuple[int, int, list[str | None]]],
    out: Path,
    bar: tqdm,
) -> Iterator[Piece]:
    """Tokenize batches of documents in worker processes. Yield the tokens of each, in order."""
    pending: deque[tuple[Position, Future]] = deque()

    def oldest_result() -> Piece:
        start, future = pending.popleft()
        tokens = future.result()
        bar.update(len(tokens))
        return Piece(start, tokens)

    for file, row, documents in batches:
        pending.append((Position(file, row), pool.submit(tokenize, documents, out)))
        if len(pending) > 2 * workers:  # keeps the workers busy, but bounds memory
            yield oldest_result()
    while pending:
        yield oldest_result()


def start_worker() -> None:
    """Initialize a worker, so that it exits when its parent does, even if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, exit with the parent

    def exit_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def usable_cores() -> int:
    """Return the number of cores this process may use, e.g. under `taskset` or in a cpuset."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --------------------------------------------------------------------------------------------------
# From tokens to shards


def cut(
    pieces: Iterator[Piece], number: int, val_size: int, size: int
) -> Iterator[tuple[np.ndarray, Position | None]]:
    """Cut the token stream into shards, starting with shard `number`.

    Yields the tokens of each shard with the position after it, which is None at the end.

    Shard 0 gets val_size tokens, which must not exceed `size`. The others get `size` tokens each,
    except the last, which gets the remainder. If the whole text has at most `size` tokens, shard 0
    gets a tenth of them and shard 1 gets the rest."""
    buffer: deque[Piece] = deque()  # pieces not in any shard yet
    count = 0  # tokens in the buffer
    for piece in pieces:
        buffer.append(piece)
        count += len(piece.tokens)
        while count > size:  # not >=, so that some tokens remain for another shard
            shard = take(buffer, val_size if number == 0 else size)
            yield shard, buffer[0].start
            count -= len(shard)
            number += 1
    if count == 0:
        raise UserError("nothing to tokenize: the training files contain no text")
    if number == 0:
        # A document has at least two tokens, including <|endoftext|>, so shard 1 is not empty.
        shard = take(buffer, max(count // 10, 1))
        yield shard, buffer[0].start
    yield np.concatenate([piece.tokens for piece in buffer]), None


def take(buffer: deque[Piece], n: int) -> np.ndarray:
    """Remove and return the first n tokens of a buffer that contains more than n."""
    taken = []
    while n >= len(buffer[0].tokens):
        tokens = buffer.popleft().tokens
        taken.append(tokens)
        n -= len(tokens)
    start, tokens = buffer[0]
    buffer[0] = Piece(start._replace(token=start.token + n), tokens[n:])
    return np.concatenate([*taken, tokens[:n]])


class Folder:
    """The shards in --out, and manifest.json, which lists them."""

    def __init__(self, out: Path, name: str, suffix: str, max_shards: int):
        """Shards are named {name}_train_000001{suffix}. max_shards=0 means no limit."""
        self.out = out
        self.name = name
        self.suffix = suffix
        self.max_shards = max_shards
        self.manifest = out / "manifest.json"
        self.shards: list[dict[str, Any]] = []  # name, tokens and sha256 of each
        self.next: Position | None = Position()  # start of the next shard; None after the last one
        self.made_from: dict[str, Any] = {}  # the text and settings that determine the shards
        if self.manifest.exists():
            manifest = json.loads(self.manifest.read_text(encoding="utf-8"))
            self.shards = manifest.pop("shards")
            position = manifest.pop("next")
            self.next = None if position is None else Position(*position)
            self.made_from = manifest  # the remaining keys

    def is_finished(self) -> bool:
        return self.next is None or 0 < self.max_shards <= len(self.shards)

    def next_name(self) -> str:
        number = len(self.shards)
        return f"{self.name}_{'train' if number else 'val'}_{number:06d}{self.suffix}"

    def has_begun(self) -> bool:
        """Return whether there are shards, or a vocabulary learned for them."""
        return bool(self.shards) or "learned" in self.made_from

    def check(self, made_from: dict[str, Any]) -> None:
        """Raise UserError if a shard is damaged, or if the folder was made from something else."""
        changed = [key for key in made_from if self.made_from.get(key) != made_from[key]]
        if self.has_begun() and changed:
            problem = f"{', '.join(changed)} must match its manifest.json"
            raise UserError(f"{self.out}: {problem}; use a new --out, or remove this one")
        expected = [shard["name"] for shard in self.shards]
        for name in expected:
            open_shard(self.out / name)  # raises UserError if it is missing or too short
        # Reject unknown shards, because train_gpt2.py would read them. The next shard is allowed: a
        # previous process may have been killed just before listing it in the manifest.
        if self.manifest.exists():
            expected.append(self.next_name())
        for path in self.out.iterdir():
            if SHARD_NAME.fullmatch(path.name) and path.name not in expected:
                raise UserError(f"{path}: not in manifest.json; remove it or use a new --out")
        if not self.has_begun():
            self.made_from = made_from

    def write(self, tokens: np.ndarray, end: Position | None) -> None:
        """Write the next shard. `end` is the position after it, None at the end of the text."""
        name = self.next_name()
        with atomic_path(self.out / name) as partial, open(partial, "wb") as file:
            # Not np.save(), whose error message hides that the disk is full.
            header = np.lib.format.header_data_from_array_1_0(tokens)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(tokens.data)
        self.add(name, end)

    def add(self, name: str, end: Position | None) -> None:
        """Add a shard to the manifest. `end` is the position after it."""
        path = self.out / name
        tokens = len(open_shard(path))
        self.shards.append({"name": name, "tokens": tokens, "sha256": sha256(path)})
        self.next = end
        self.save()
        tqdm.write(f"{name}: {tokens:,} tokens")

    def save(self) -> None:
        """Write manifest.json."""
        manifest = self.made_from | {"next": self.next, "shards": self.shards}
        write_text(self.manifest, json.dumps(manifest, indent=1))

    def verify(self) -> None:
        """Raise UserError unless all shards and the vocabulary match the manifest."""
        if not self.shards:
            raise UserError(f"{self.out}: manifest.json is missing, or lists no shards")
        paths = [path for path in self.out.iterdir() if path.suffix in (".npy", ".bin", ".partial")]
        found = {path.name: sha256(path) for path in progress_bar(paths, "file")}
        listed = {shard["name"]: shard["sha256"] for shard in self.shards}
        found["vocab.json"] = get_tokenizer(self.out).checksum
        listed["vocab.json"] = self.made_from.get("vocabulary")
        wrong = [name for name in found | listed if found.get(name) != listed.get(name)]
        if wrong:
            names = ", ".join(sorted(wrong))
            raise UserError(f"{self.out}: these files do not match manifest.json: {names}")
        print(f"{len(paths)} shards: all checksums match")


# --------------------------------------------------------------------------------------------------
# Making the shards


def make_shards(config: ShardConfig, folder: Folder) -> None:
    """Make the shards of --input, --dataset or FineWeb-Edu."""
    out = folder.out
    made_from = {"text_column": config.text_column, "shard_size": config.shard_size}
    validation: list[str] = []  # files that become shard 0
    if config.input is not None:
        training = find_files(config.input)
        sizes = [[os.path.basename(path), os.path.getsize(path)] for path in training]
        made_from |= {"source": "files", "files": sizes}
    else:
        dataset, subset = config.dataset, config.config
        if dataset is None:
            dataset, subset = FINEWEB, config.name
        commit = commit_of(dataset, folder)
        made_from |= {"source": dataset, "commit": commit, "config": subset, "split": config.split}
    learn = config.vocab_size > 0 and not folder.shards and not (out / "vocab.json").exists()
    if not learn:
        tokenizer = get_tokenizer(out)  # built before the fork, so workers need not build it again
        made_from["vocabulary"] = tokenizer.checksum
    folder.check(made_from)
    if not learn and config.vocab_size not in (0, tokenizer.n_vocab):
        problem = f"{out} already has a vocabulary of {tokenizer.n_vocab}; use a new --out"
        raise UserError(f"--vocab-size {config.vocab_size}: {problem}")
    if folder.is_finished():
        return

    workers = config.workers or usable_cores()
    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        # Submit a dummy task, so that the pool forks its workers now. Forking is unsafe once a
        # library has started threads.
        pool.submit(os.getpid)
        if config.input is None:
            validation, training = find_hub_files(dataset, subset, config.split, commit)
        if learn:
            texts = texts_to_learn_from(training, config.text_column)
            write_vocabulary(folder, texts, config.vocab_size, bool(validation))
            tokenizer = get_tokenizer(out)
        files = len(validation) + len(training)
        print(f"reading {files} files, with a vocabulary of {tokenizer.n_vocab:,} tokens")
        folder.save()  # marks the folder as unfinished for runs that train on its parent folder
        write_shards(config, folder, validation, training, pool, workers)


def write_vocabulary(folder: Folder, texts: Iterator[str], size: int, has_validation: bool) -> None:
    """Learn a vocabulary of `size` tokens from the texts, and write its two files.

    Without validation files, skip the first tenth of the text, because shard 0 comes from there."""
    pieces = pieces_to_learn_from(progress_bar(texts, "document"))
    if not has_validation:
        pieces = pieces[len(pieces) // 10 :]
    merges, vocab = learn_vocabulary(pieces, size)
    # Save the manifest first, so that a vocabulary is never without a record of its source.
    folder.made_from |= {"vocabulary": make_tokenizer(merges, vocab).checksum, "learned": True}
    folder.save()
    write_text(folder.out / "merges.txt", merges)
    write_text(folder.out / "vocab.json", vocab)  # last: it marks the vocabulary as complete


def write_shards(
    config: ShardConfig,
    folder: Folder,
    validation: list[str],
    training: list[str],
    pool: ProcessPoolExecutor,
    workers: int,
) -> None:
    """Tokenize the files, and write the missing shards."""
    files = validation + training
    val_size = size = config.shard_size or SHARD_SIZE
    if not config.shard_size and (config.input or config.dataset):
        val_size = size // 10  # do not spend most of a small text on validation
    written = sum(shard["tokens"] for shard in folder.shards)
    with progress_bar(None, "tok", initial=written, unit_scale=True) as bar:

        def read(paths: list[str], start: Position) -> Iterator[Piece]:
            batches = read_batches(paths, config.text_column, start.file, start.row)
            return tokenize_in_workers(pool, workers, batches, folder.out, bar)

        start = folder.next
        if validation and not folder.shards:
            start = Position(file=len(validation))
            parts = [piece.tokens for piece in read(validation, Position())]
            if sum(map(len, parts)) > 0:  # otherwise cut shard 0 from the training text
                folder.write(np.concatenate(parts), end=start)
            if folder.is_finished():  # with --max-shards 1
                return
        pieces = read(files, start)
        if start.token:
            _, tokens = next(pieces)  # this batch begins in the previous shard
            pieces = itertools.chain([Piece(start, tokens[start.token :])], pieces)
        for shard, end in cut(pieces, len(folder.shards), val_size, size):
            folder.write(shard, end)
            if config.input and len(folder.shards) == 1:
                path = training[end.file]
                tqdm.write(f"training begins in file {end.file + 1} of {len(training)}, {path}")
            if folder.is_finished():
                return


def commit_of(dataset: str, folder: Folder) -> str:
    """Return the dataset's commit from which a folder was started, or else the newest one."""
    from huggingface_hub import HfApi

    if folder.has_begun() and folder.made_from["source"] == dataset:
        return folder.made_from["commit"]
    with hub_errors(dataset):
        return HfApi().dataset_info(dataset).sha


def fetch_pretokenized(folder: Folder) -> None:
    """Download shards of PRETOKENIZED until the folder holds max_shards."""
    from huggingface_hub import hf_hub_download

    commit = commit_of(PRETOKENIZED, folder)
    vocabulary = get_tokenizer().checksum
    folder.check({"source": PRETOKENIZED, "commit": commit, "vocabulary": vocabulary})
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
            open_shard(downloads / name)  # raises UserError if it is damaged
            os.replace(downloads / name, folder.out / name)
            folder.add(name, end=Position())  # any position but None, because no text is read
    finally:
        remove(downloads)


# --------------------------------------------------------------------------------------------------
# The command


def read_config(args: list[str] | None) -> ShardConfig:
    """Read and check the command line. Raises UserError if it is invalid."""
    config = parse_args(ShardConfig, args=args)
    default = ShardConfig()
    names = ("name", "input", "dataset", "pretokenized")
    given = [flag(name) for name in names if getattr(config, name) != getattr(default, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give only one of them")
    if (config.config or config.split) and config.dataset is None:
        raise UserError("--config and --split need --dataset")
    if config.pretokenized and config.vocab_size:
        raise UserError("--pretokenized: these shards use GPT-2's vocabulary; omit --vocab-size")
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
    # locked() also creates the folder.
    with locked(out, f"{out}: in use by another fineweb.py; wait for it or use another --out"):
        folder = Folder(out, name, suffix, config.pretokenized or config.max_shards)
        if config.verify:
            folder.verify()
            return
        for path in out.glob(".*.partial"):  # left over from a killed process
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

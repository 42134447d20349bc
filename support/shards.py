"""The files that tokens come from: shards of uint16 tokens (.npy, or llm.c's .bin) and plain .txt files.

`fineweb.py` writes and verifies shards, `train_gpt2.py` reads them. A shard is a 1-D array of uint16 GPT-2 tokens, in
which every document begins with 50256; its name is NAME_train_000001.npy or NAME_val_000000.bin.
"""

import contextlib
import copy
import hashlib
import json
import re
from pathlib import Path

import numpy as np

from support.cli import InputError
from support.tokenizer import EOT, VOCAB_SIZE, encode

SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.(npy|bin)")
BIN_MAGIC, BIN_VERSION, BIN_HEADER_BYTES = 20240520, 1, 256 * 4  # llm.c's and modded-nanogpt's .bin


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, 1-D uint16, memory-mapped. Raises InputError when the file is not a whole shard."""
    remedy = "make it anew with fineweb.py"
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.dtype != np.uint16 or tokens.ndim != 1:
                raise InputError(f"{path}: {tokens.ndim}-D {tokens.dtype}, but a shard is 1-D uint16: {remedy}")
        else:
            header = np.fromfile(path, dtype="<i4", count=256)
            if header.size < 256 or header[0] != BIN_MAGIC or header[1] != BIN_VERSION:
                raise InputError(f"{path}: no llm.c shard (magic {BIN_MAGIC}, version {BIN_VERSION}): {remedy}")
            tokens = np.memmap(path, dtype="<u2", mode="r", offset=BIN_HEADER_BYTES)
            if len(tokens) != header[2]:
                raise InputError(f"{path}: {len(tokens)} tokens, but its header promises {header[2]}: {remedy}")
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: truncated or not a shard ({error}): {remedy}") from None
    if len(tokens) == 0:
        raise InputError(f"{path}: an empty shard: {remedy}")
    for page in (tokens[:2048], tokens[-2048:]):
        check_tokens(page, path)
    return tokens


def check_tokens(tokens: np.ndarray, path: Path) -> None:
    if tokens.max(initial=0) >= VOCAB_SIZE:
        raise InputError(f"{path}: token {tokens.max()}, but GPT-2's vocabulary ends at {VOCAB_SIZE - 1}: "
                         "the shard was made with another tokenizer or is damaged")


def find_shards(folder: Path, split: str) -> list[Path]:
    """The shards of a split in the order of their names. A half-written or foreign file is refused, never skipped."""
    paths = []
    for path in sorted(folder.iterdir()):
        match = SHARD_NAME.fullmatch(path.name)
        if match and match[1] == split:
            paths.append(path)
        elif path.name.endswith(".partial"):
            raise InputError(f"{path}: half written; finish the shards first (run the fineweb.py command again)")
        elif not match and path.suffix in (".npy", ".bin"):
            raise InputError(f"{path}: not named like a shard (NAME_train_000001.npy or .bin): move it elsewhere")
    if not paths:
        raise InputError(f"{folder}: no {split} shards here; `python fineweb.py --out {folder}` makes them")
    return paths


def tokenize_text(path: Path, split: str) -> np.ndarray:
    """A .txt file as one document, the last tenth of its tokens kept for validation. -> 1-D uint16"""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}: convert it first") from None
    if not text.strip():
        raise InputError(f"{path}: an empty text: nothing to train on")
    tokens = np.concatenate([[EOT], *encode(text)], dtype=np.uint16, casting="unsafe")
    boundary = len(tokens) - max(len(tokens) // 10, 1)
    return tokens[:boundary] if split == "train" else tokens[boundary:]


# ---------------------------------------------------------------------------------------------------------------------
# The order of tokens in training

PASSAGE = 256  # tokens of a .txt file that stay together when it is shuffled


def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … n-1 that depends on `seed` alone; unlike numpy's own, the same in every numpy version."""
    return np.random.PCG64(seed).random_raw(n).argsort(kind="stable")


class TokenStream:
    """The tokens of a split as one endless sequence whose order is a function of the seed alone.

    An epoch is its shards, permuted, and in each its documents, permuted, laid end to end; the epochs follow each other
    without a seam. A document begins at 50256; a .txt file is cut into passages of 256 tokens. Without `shuffle`
    everything stands as in the files. Any stretch is read at once, whatever stands before it.

    data: folder of .npy / .bin shards, or a .txt file. split: "train" or "val". Raises InputError for bad files.
    """

    def __init__(self, data: str | Path, split: str, seed: int = 1337, shuffle: bool = True):
        data = Path(data)
        self._starts: dict[int, np.ndarray] = {}  # shard -> where its documents start
        if not data.exists():
            raise InputError(f"{data}: no such data; `python fineweb.py` makes shards, --data takes a .txt file, too")
        if data.is_dir():
            self.paths = find_shards(data, split)
            self.shards = [open_shard(path) for path in self.paths]
        elif data.suffix == ".txt":
            self.paths, self.shards = [data], [tokenize_text(data, split)]
            self._starts[0] = np.arange(0, len(self.shards[0]), PASSAGE)
        else:
            raise InputError(f"{data}: neither a folder of shards nor a .txt file; fineweb.py makes shards from others")
        self.seed, self.shuffle = seed, shuffle
        self.lengths = np.array([len(shard) for shard in self.shards])
        self.total_tokens = int(self.lengths.sum())
        self._orders: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # of the last two (epoch, shard)

    def _locate(self, position: int) -> tuple[int, int, int]:
        """Where a position of the stream is: (epoch, shard, tokens of the shard that come before it)."""
        epoch, offset = divmod(position, self.total_tokens)
        order = permutation(len(self.shards), self.seed, epoch) if self.shuffle else np.arange(len(self.shards))
        ends = self.lengths[order].cumsum()
        i = int(np.searchsorted(ends, offset, side="right"))
        return epoch, int(order[i]), int(offset - (ends[i] - self.lengths[order[i]]))

    def where(self, position: int) -> str:
        """The same, to be read by people."""
        epoch, shard, begin = self._locate(position)
        order = "in its shuffled order" if self.shuffle else "in it"
        return f"token {begin:,} of {self.paths[shard]} {order}, epoch {epoch}"

    def read(self, position: int, count: int) -> np.ndarray:
        """Tokens [position, position + count) of the endless stream, 1-D uint16."""
        pieces = []
        while count > 0:
            epoch, shard, begin = self._locate(position)
            n = min(count, int(self.lengths[shard]) - begin)
            if self.shuffle:
                piece = self._read_documents(epoch, shard, begin, begin + n)
            else:
                piece = self.shards[shard][begin : begin + n]
            check_tokens(piece, self.paths[shard])
            pieces.append(piece)
            position, count = position + n, count - n
        return np.concatenate(pieces)

    def head(self, count: int) -> np.ndarray:
        """The first tokens in the files' own order, at most `count`, 1-D uint16."""
        in_order = copy.copy(self)
        in_order.shuffle = False
        return in_order.read(0, min(count, self.total_tokens))

    def _read_documents(self, epoch: int, shard: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of a shard whose documents stand in this epoch's order."""
        tokens = self.shards[shard]
        starts, ends = self._document_order(epoch, shard)
        first, last = int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left"))
        documents = [tokens[s : s + n] for s, n in starts[first : last + 1]]
        documents[-1] = documents[-1][: len(documents[-1]) - int(ends[last] - end)]
        documents[0] = documents[0][begin - int(ends[first] - starts[first, 1]) :]
        return np.concatenate(documents)

    def _document_order(self, epoch: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """A shard's documents, permuted: (start, length) in the file (n, 2), and where each ends in the stream (n,)."""
        if (epoch, shard) not in self._orders:
            if shard not in self._starts:
                tokens, chunk = self.shards[shard], 1 << 24
                found = [i + np.flatnonzero(tokens[i : i + chunk] == EOT) for i in range(0, len(tokens), chunk)]
                # What stands before the first 50256 is the end of a document that began in the shard before.
                self._starts[shard] = np.union1d([0], np.concatenate(found)).astype(np.uint32)
            starts = self._starts[shard].astype(np.int64)
            order = permutation(len(starts), self.seed, epoch, shard + 1)
            lengths = np.diff(starts, append=len(self.shards[shard]))
            if len(self._orders) == 2:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch, shard] = np.stack([starts, lengths], axis=1)[order], lengths[order].cumsum()
        return self._orders[epoch, shard]

    def count_documents(self) -> int | None:
        """Documents that begin in the shards, from the folder's manifest; None without one: counting would mean reading
        every shard, minutes in which a job's other ranks wait."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entries = json.loads((self.paths[0].parent / "manifest.json").read_text(encoding="utf-8"))["shards"]
            documents = {entry["name"]: entry["documents"] for entry in entries}
            return sum(documents[path.name] for path in self.paths)
        return None

    def fingerprint(self) -> str:
        """A digest of the files' names and lengths: another one is another stream."""
        names = [(path.name, int(length)) for path, length in zip(self.paths, self.lengths, strict=True)]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

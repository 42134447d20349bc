"""The files that tokens come from: shards of uint16 tokens (.npy, or llm.c's .bin) and plain .txt files.

`fineweb.py` writes and verifies shards, `train_gpt2.py` reads them. A shard is a 1-D array of uint16 GPT-2 tokens, in
which every document begins with 50256; its name is NAME_train_000001.npy or NAME_val_000000.bin.
"""

import re
from pathlib import Path

import numpy as np

from common import InputError
from tokenizer import EOT, VOCAB_SIZE, get_tokenizer

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
    tokens = np.array([EOT, *get_tokenizer().encode_ordinary(text)], dtype=np.uint16)
    boundary = len(tokens) - max(len(tokens) // 10, 1)
    return tokens[:boundary] if split == "train" else tokens[boundary:]

"""Shards of tokens, and .txt files, as the data loader reads them. Does not import torch.

A shard is a 1-D array of uint16 tokens in which every document begins with 50256. It is named
NAME_train_000001.npy, or .bin in llm.c's format."""

import functools
import os
import re
from pathlib import Path

import numpy as np

from support.command_line import print0
from support.errors_and_signals import UserError
from support.tokenizer import EOT, VOCAB_SIZE, encode

SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.(npy|bin)")


@functools.lru_cache(maxsize=1)  # both splits are parts of it
def encode_file(path: Path, *version: int) -> np.ndarray:
    """All tokens of a .txt file, 1-D uint16. version: changes with the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from None
    if not text.strip():
        raise UserError(f"{path}: an empty text")
    if len(text) > 10**7:  # takes more than a second
        print0(f"tokenizing {path}: {len(text) / 1e6:,.0f} million characters")
    # unsafe: from uint32; all tokens fit into uint16
    return np.concatenate([[EOT], *encode(text)], dtype=np.uint16, casting="unsafe")


def tokenize_text(path: Path, split: str) -> np.ndarray:
    """A split of a .txt file, 1-D uint16: the file is one document, its last tenth for validation.

    As in fineweb.py, line ends become \\n, and a byte order mark is dropped."""
    file = path.stat()
    tokens = encode_file(path, file.st_ino, file.st_size, file.st_mtime_ns)
    boundary = len(tokens) - max(len(tokens) // 10, 1)
    return tokens[:boundary] if split == "train" else tokens[boundary:]


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, 1-D uint16, memory-mapped. Raises an error if it is damaged."""
    try:
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and archives
        else:  # .bin of llm.c and modded-nanogpt: a header of 256 int32, then the tokens
            magic, version, length = np.fromfile(path, dtype="<i4", count=3)
            tokens = np.memmap(path, dtype="<u2", mode="r", offset=256 * 4)
            if magic != 20240520 or version != 1 or length != len(tokens):
                header = f"magic {magic}, version {version}, {length} tokens"
                raise ValueError(f"its header has {header}")
        if tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"{tokens.size} values, {tokens.ndim}-D {tokens.dtype}")
    except (ValueError, FileNotFoundError) as error:
        remedy = "restore it, or remove its folder and rerun the command that made it"
        raise UserError(f"{path}: not a whole shard of uint16 tokens ({error}); {remedy}") from None
    # Only a page of 4 KiB at each end: the data loader checks each piece that it reads.
    check_tokens(tokens[:2048], path)
    check_tokens(tokens[-2048:], path)
    return tokens


def find_shards(data: Path, split: str) -> list[Path]:
    """The shards of a split in a folder and its subfolders, sorted by path.

    Skips hidden subfolders, and whatever else is in a subfolder, such as the log of a run."""
    found = {}  # by folder and name, so that no link makes a shard count twice
    for path in [*sorted(data.glob("*")), *sorted(data.glob("[!.]*/*"))]:
        match = SHARD_NAME.fullmatch(path.name)
        ours = path.parent == data or SHARD_NAME.search(path.name)
        if match and match[1] == split:
            found.setdefault(path.parent.resolve() / path.name, path)
        elif ours and path.name.endswith(".partial"):
            raise UserError(f"{path}: half written; rerun fineweb.py to finish it")
        elif ours and not match and path.suffix in (".npy", ".bin"):
            raise UserError(f"{path}: not named like NAME_train_000001.npy; move it elsewhere")
    for manifest in data.glob("[!.]*/manifest.json"):
        if not any(SHARD_NAME.fullmatch(path.name) for path in manifest.parent.iterdir()):
            raise UserError(f"{manifest.parent}: no shards yet; rerun fineweb.py or remove it")
    return sorted(found.values())


def holds_shards(folder: Path) -> bool:
    """True if a folder holds training shards, or what the data loader will complain about."""
    try:
        return bool(find_shards(folder, "train"))
    except UserError:
        return True


def open_split(data: Path, split: str) -> tuple[list[Path], list[np.ndarray]]:
    """(files, the tokens of each) of a split of a folder or a .txt file."""
    if data.suffix == ".txt" and data.is_file():
        return [data], [tokenize_text(data, split)]
    if not data.is_dir():
        raise UserError(f"{data}: neither a .txt file nor a folder of shards (see fineweb.py)")
    paths = find_shards(data, split)
    if not paths:
        raise UserError(f"{data}: no {split} shards; `python fineweb.py --out {data}` makes them")
    if os.name != "nt":  # each mapped shard counts as an open file, of which Linux allows 1,024
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + len(paths), hard), hard))
    return paths, [open_shard(path) for path in paths]


def check_tokens(tokens: np.ndarray, path: Path) -> None:
    """Checks that every token is in GPT-2's vocabulary."""
    if tokens.max(initial=0) >= VOCAB_SIZE:
        problem = f"token {tokens.max()} isn't in GPT-2's vocabulary (0 to {VOCAB_SIZE - 1})"
        raise UserError(f"{path}: {problem}: damaged, or made by another tokenizer")

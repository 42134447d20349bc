"""Token shards and .txt files, as the data loader reads them.

A shard is a 1-D array of uint16 tokens in which every document begins with <|endoftext|>. It is
named NAME_train_000001.npy, or .bin in llm.c's format. Its folder holds the vocabulary's files
(tokenizer.py), unless the tokens are GPT-2's. Importing this module does not import torch."""

import functools
import os
import re
import shlex
from pathlib import Path

import numpy as np

from support.command_line import print0
from support.errors_and_signals import UserError
from support.tokenizer import Tokenizer, encode, get_tokenizer, holds_vocabulary

NOT_TEXT = {"README.md", "merges.txt"}  # files that are not training text
# Suffixes of the text files that fineweb.py takes. Parquet is compressed internally, so there is no
# .parquet.gz.
SUFFIX = re.compile(r"\.(parquet$|jsonl|csv|txt|md)(\.gz|\.zst)?$", re.IGNORECASE)
SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.(npy|bin)")
NANOGPT_NAME = re.compile(r"(train|val)\.bin")  # uint16 tokens without a header
HALF_WRITTEN = re.compile(rf"\.{SHARD_NAME.pattern}\.\d+\.partial")  # see atomic_path()


@functools.lru_cache(maxsize=1)  # both splits are slices of the same tokens
def encode_file(path: Path, *version: int) -> np.ndarray:
    """Return all tokens of a .txt file, 1-D uint16.

    `version` only invalidates the cache when the file changes."""
    # "unsafe" allows casting from uint32. All tokens fit into uint16.
    return encode_document(path, get_tokenizer()).astype(np.uint16, casting="unsafe")


def encode_document(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Return <|endoftext|> and all tokens of a text file, 1-D uint32."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    if not text.strip():
        raise UserError(f"{path}: contains no text")
    if len(text) > 10**7:  # takes more than a second
        print0(f"tokenizing {path}: {len(text) / 1e6:,.0f} million characters")
    return np.concatenate([np.uint32([tokenizer.eot_token]), *encode(text, tokenizer)])


def not_utf8(path: Path) -> UserError:
    """Return the error for a text file that is not UTF-8."""
    name = shlex.quote(str(path))
    command = f"iconv -f ENCODING -t UTF-8 {name} > utf8{path.suffix}"
    return UserError(f"{path}: not UTF-8; `{command}` converts it from its ENCODING")


def tokenize_text(path: Path, split: str) -> np.ndarray:
    """Return the tokens of a split of a .txt file, 1-D uint16.

    The file is one document, and its last tenth is for validation. As in fineweb.py, newlines are
    normalized to \\n, and a byte order mark is dropped."""
    stat = path.stat()
    tokens = encode_file(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    boundary = len(tokens) - max(len(tokens) // 10, 1)
    return tokens[:boundary] if split == "train" else tokens[boundary:]


def open_shard(path: Path, vocab_size: int = 2**16) -> np.ndarray:
    """Return the memory-mapped tokens of a shard, 1-D uint16.

    Raises UserError if the shard is damaged, or if a token at either end is not below
    `vocab_size`."""
    try:
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")  # rejects pickles and archives
        elif NANOGPT_NAME.fullmatch(path.name):
            tokens = np.memmap(path, dtype="<u2", mode="r")
        else:  # .bin of llm.c and modded-nanogpt: a header of 256 int32s, then the tokens
            magic, version, length = np.fromfile(path, dtype="<i4", count=3)
            tokens = np.memmap(path, dtype="<u2", mode="r", offset=256 * 4)
            if magic != 20240520 or version != 1 or length != len(tokens):
                header = f"magic {magic}, version {version}, {length} tokens"
                raise ValueError(f"its header says {header}")
        if tokens.dtype != np.uint16 or tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError(f"{tokens.size} values, {tokens.ndim}-D {tokens.dtype}")
    except (ValueError, FileNotFoundError) as error:
        remedy = "restore it, or remove its folder and rerun the command that made it"
        raise UserError(f"{path}: not a valid shard of uint16 tokens ({error}); {remedy}") from None
    # Check only one 4 KiB page at each end, because the data loader checks whatever it reads.
    check_tokens(tokens[:2048], path, vocab_size)
    check_tokens(tokens[-2048:], path, vocab_size)
    return tokens


def find_shards(data: Path, split: str) -> list[Path]:
    """Return the shards of a split in a folder and its subfolders, sorted by path.

    Raises UserError if fineweb.py left a half-written shard, or a subfolder without shards."""
    shards = []
    unfinished = []
    begun = []  # subfolders with a manifest.json, which fineweb.py writes before the first shard
    with_shards = set()
    for path in [*data.glob("*"), *data.glob("[!.]*/*")]:  # not in hidden subfolders
        if match := SHARD_NAME.fullmatch(path.name) or NANOGPT_NAME.fullmatch(path.name):
            if NANOGPT_NAME.fullmatch(path.name) and path.with_name("meta.pkl").exists():
                problem = "its tokens are characters (meta.pkl), not GPT-2's"
                remedy = "`python fineweb.py --input TEXT --out my_shards` tokenizes its text"
                raise UserError(f"{path}: {problem}; {remedy}")
            with_shards.add(path.parent)
            if match[1] == split:
                shards.append(path)
        elif HALF_WRITTEN.fullmatch(path.name):
            unfinished.append(path)
        elif path.name == "manifest.json" and path.parent != data:
            begun.append(path.parent)
    unfinished += [folder for folder in begun if folder not in with_shards]
    if unfinished:
        raise UserError(f"{unfinished[0]}: not finished; rerun fineweb.py, or remove it")
    return sorted(shards)


def data_folder(data: str) -> str:
    """Return the folder of nanoGPT's train.bin or val.bin, and any other path unchanged."""
    path = Path(data)
    return str(path.parent) if NANOGPT_NAME.fullmatch(path.name) and path.is_file() else data


def holds_shards(folder: Path) -> bool:
    """Return whether a folder holds training shards, finished or not."""
    try:
        return bool(find_shards(folder, "train"))
    except UserError:
        return True


def open_tokenizer(data: str | Path) -> Tokenizer:
    """Return the tokenizer of the shards in a folder and its subfolders, or of a .txt file.

    A subfolder without a vocabulary uses that of `data`. The default is GPT-2's. Raises UserError
    if the vocabularies differ."""
    data = Path(data)
    folders = {data}
    if data.is_dir():
        shards = [path for split in ("train", "val") for path in find_shards(data, split)]
        folders = {path.parent for path in shards} or folders
    found = {get_tokenizer(folder if holds_vocabulary(folder) else data) for folder in folders}
    if len(found) > 1:
        raise UserError(f"{data}: its subfolders have different vocabularies; train on one of them")
    return found.pop()


def open_split(
    data: str | Path, split: str, vocab_size: int
) -> tuple[list[Path], list[np.ndarray]]:
    """Return the files of a split, and the tokens of each, 1-D uint16.

    `data` is a folder of shards, or a .txt file, which counts as one shard. Raises UserError if
    there are none."""
    data = Path(data)
    if data.suffix == ".txt" and data.is_file():
        return [data], [tokenize_text(data, split)]
    if not data.exists():
        text = data.suffix == ".txt"
        remedy = "pass another with --data" if text else "`python fineweb.py` makes shards"
        raise UserError(f"{data}: no such file or folder; {remedy}")
    paths = find_shards(data, split) if data.is_dir() else []
    if not paths:
        remedy = "`python fineweb.py` makes them, from your own text with --input TEXT --out SHARDS"
        raise UserError(f"{data}: no {split} shards; {remedy}")
    if os.name != "nt":  # a mapped shard counts as an open file, and the default limit is 1,024
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + len(paths), hard), hard))
    return paths, [open_shard(path, vocab_size) for path in paths]


def check_tokens(tokens: np.ndarray, path: Path, vocab_size: int) -> None:
    """Raise UserError unless every token is in the vocabulary."""
    if tokens.max(initial=0) >= vocab_size:
        problem = f"token {tokens.max()} is not in the vocabulary (0 to {vocab_size - 1})"
        raise UserError(f"{path}: {problem}: damaged, or made with another tokenizer")

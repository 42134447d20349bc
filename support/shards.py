"""Shards of tokens, and .txt files, as the data loader reads them. Does not import torch.

A shard is a 1-D array of uint16 tokens in which every document begins with <|endoftext|>. It is
named NAME_train_000001.npy, or .bin in llm.c's format. Its folder has the files of a vocabulary
(tokenizer.py), unless the tokens are GPT-2's."""

import errno
import functools
import os
import re
import shlex
from pathlib import Path

import numpy as np

from support.command_line import print0
from support.errors_and_signals import UserError
from support.tokenizer import Tokenizer, encode, get_tokenizer, holds_vocabulary

NO_TEXT = {"README.md", "merges.txt"}  # files of a folder that are not part of its text
# The files of text that fineweb.py takes. (No .parquet.gz: .parquet is compressed inside.)
SUFFIX = re.compile(r"\.(parquet$|jsonl|csv|txt|md)(\.gz|\.zst)?$", re.IGNORECASE)
SHARD_NAME = re.compile(r".+_(train|val)_\d{6}\.(npy|bin)")
NANOGPT = ("train.bin", "val.bin")  # nanoGPT's files: uint16 tokens without a header
HALF_WRITTEN = re.compile(rf"\.{SHARD_NAME.pattern}\.\d+\.partial")  # as atomic_path() names it


@functools.lru_cache(maxsize=1)  # both splits are parts of it
def encode_file(path: Path, *version: int) -> np.ndarray:
    """All tokens of a .txt file, 1-D uint16. version: changes with the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    if not text.strip():
        raise UserError(f"{path}: an empty text")
    if len(text) > 10**7:  # takes more than a second
        print0(f"tokenizing {path}: {len(text) / 1e6:,.0f} million characters")
    tokenizer = get_tokenizer()
    tokens = [[tokenizer.eot_token], *encode(text, tokenizer)]
    # unsafe: from uint32; all tokens fit into uint16
    return np.concatenate(tokens, dtype=np.uint16, casting="unsafe")


def not_utf8(path: Path) -> UserError:
    """The error for a file of text in another encoding."""
    name = shlex.quote(str(path))
    command = f"iconv -f ENCODING -t UTF-8 {name} > utf8{path.suffix}"
    return UserError(f"{path}: not UTF-8; `{command}` converts it, if ENCODING is its encoding")


def tokenize_text(path: Path, split: str) -> np.ndarray:
    """A split of a .txt file, 1-D uint16: the file is one document, its last tenth for validation.

    As in fineweb.py, line ends become \\n, and a byte order mark is dropped."""
    file = path.stat()
    tokens = encode_file(path, file.st_ino, file.st_size, file.st_mtime_ns)
    boundary = len(tokens) - max(len(tokens) // 10, 1)
    return tokens[:boundary] if split == "train" else tokens[boundary:]


def open_shard(path: Path, vocab_size: int = 2**16) -> np.ndarray:
    """The tokens of a shard, 1-D uint16, memory-mapped. Raises an error if it is damaged.

    All tokens must be below vocab_size."""
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
    check_tokens(tokens[:2048], path, vocab_size)
    check_tokens(tokens[-2048:], path, vocab_size)
    return tokens


def find_shards(data: Path, split: str) -> list[Path]:
    """The shards of a split in a folder and its subfolders, sorted by path.

    UserError if fineweb.py has not finished one of them, or has only begun a subfolder."""
    shards = []
    unfinished = []
    begun = []  # subfolders with a manifest.json, which fineweb.py writes before the first shard
    with_shards = set()
    for path in [*data.glob("*"), *data.glob("[!.]*/*")]:  # not in hidden subfolders
        if match := SHARD_NAME.fullmatch(path.name):
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


def holds_shards(folder: Path) -> bool:
    """True if a folder holds training shards, or shards that are not finished."""
    try:
        return bool(find_shards(folder, "train"))
    except UserError:
        return True


def open_tokenizer(data: str | Path) -> Tokenizer:
    """The tokenizer of the shards in a folder and its subfolders. That of a .txt file is GPT-2's.

    A subfolder without a vocabulary has that of `data`."""
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
    """(files, the tokens of each) of a split of a folder of shards, or of a .txt file alone."""
    data = Path(data)
    if data.suffix == ".txt" and data.is_file():
        return [data], [tokenize_text(data, split)]
    if not data.exists():
        text = data.suffix == ".txt"
        remedy = "--data names another" if text else "`python fineweb.py` makes shards"
        raise UserError(f"{data}: no such file or folder; {remedy}")
    paths = find_shards(data, split) if data.is_dir() else []
    if not paths:
        names = {path.name for path in data.rglob("*")} - NO_TEXT
        folder = shlex.quote(str(data))
        if not data.is_dir() or any(map(SUFFIX.search, names)):
            source = f"--input {folder} --out my_shards"
        elif any(name.endswith((".npy", ".bin")) for name in names):  # of nanoGPT, for example
            source = "--input TEXT --out my_shards"
        else:
            source = f"--out {folder}"
        problem = f"no {split} shards; `python fineweb.py {source}` makes them"
        raise UserError(f"{data}: {problem}")
    if os.name != "nt":  # each mapped shard counts as an open file, of which Linux allows 1,024
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + len(paths), hard), hard))
    try:
        return paths, [open_shard(path, vocab_size) for path in paths]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        problem = f"{len(paths)} shards are more files than a process may open (`ulimit -Hn`)"
        raise UserError(f"{data}: {problem}; make larger ones (--shard-size)") from None


def check_tokens(tokens: np.ndarray, path: Path, vocab_size: int) -> None:
    """Checks that every token is in the vocabulary."""
    if tokens.max(initial=0) >= vocab_size:
        problem = f"token {tokens.max()} isn't in the vocabulary (0 to {vocab_size - 1})"
        raise UserError(f"{path}: {problem}: damaged, or made by another tokenizer")

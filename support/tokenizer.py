"""Byte-level BPE tokenizers like GPT-2's, loaded from the files of a vocabulary.

`vocab.json` maps tokens to ids, and `merges.txt` lists the merges by priority. Both represent each
byte as one printable character. GPT-2's files are in support/gpt2/. transformers may save both as
one `tokenizer.json`. Importing this module does not import torch."""

import functools
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's pre-tokenization pattern

from support.errors_and_signals import UserError

GPT2 = Path(__file__).parent / "gpt2"
VOCAB_SIZE = 50257  # GPT-2's
END = "<|endoftext|>"  # the token that begins every document
FILES = ("merges.txt", "vocab.json")
# {character: byte}, in the order of GPT-2's first 256 tokens. Bytes that are printable in Latin-1
# come first and represent themselves. The others are represented by the characters from 256 on.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTERS = {chr(byte): byte for byte in BYTES}
CHARACTERS |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*BYTES}))}
# Where a long text may be cut: before the last character of a run of whitespace. GPT-2's pattern
# always splits there, so the tokens do not change. Only Python counts \x1c-\x1f as whitespace.
CUT = re.compile(r"[^\S\x1c-\x1f](?=\S)")
PIECE_CHARS = 1 << 18  # longer texts are tokenized in pieces of about this length


class Tokenizer(tiktoken.Encoding):
    """A tiktoken.Encoding, with encode_ordinary(text), decode(tokens), n_vocab, eot_token etc.

    tiktoken merges any two tokens that concatenate to another token, the lowest id first. This
    matches merges.txt only if ids are assigned in the order of its merges, which is checked."""

    def __init__(self, merges: str, vocab: str):
        """`merges` and `vocab` are the contents of merges.txt and vocab.json.

        Raises ValueError or KeyError if they do not match."""
        self.files = dict(zip(FILES, (merges, vocab), strict=True))
        numbers = json.loads(vocab)
        pairs = [line for line in merges.split("\n") if line and not line.startswith("#version")]
        both = json.dumps([pairs, numbers], sort_keys=True)
        self.checksum = hashlib.sha256(both.encode()).hexdigest()
        merged = [numbers[pair.replace(" ", "")] for pair in pairs]
        size = len(numbers)
        if sorted(numbers.values()) != [*range(size)] or size != 256 + len(merged) + 1:
            raise ValueError(
                f"{size} tokens do not match 256 bytes, {len(merged)} merges and {END}"
            )
        if merged != sorted({*merged}):
            raise ValueError("its tokens are not numbered in the order of the merges")
        ranks = {
            bytes(CHARACTERS[character] for character in token): number
            for token, number in numbers.items()
            if token != END
        }
        name = "gpt2" if size == VOCAB_SIZE else f"a vocabulary of {size}"
        super().__init__(
            name,
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={END: numbers[END]},
            explicit_n_vocab=size,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.checksum == other.checksum

    def __hash__(self) -> int:
        return hash(self.checksum)


make_tokenizer = functools.cache(Tokenizer)  # keyed by the contents of the files


def holds_vocabulary(folder: Path) -> bool:
    """Return whether a folder holds vocab.json, merges.txt or transformers' tokenizer.json."""
    return any((folder / name).exists() for name in (*FILES, "tokenizer.json"))


def get_tokenizer(folder: str | Path = GPT2) -> Tokenizer:
    """Return the tokenizer of the shards or model in a folder, by default GPT-2's."""
    home = Path(folder) if holds_vocabulary(Path(folder)) else GPT2
    merges, vocab, both = (home / name for name in (*FILES, "tokenizer.json"))
    try:
        if both.exists() and not merges.exists():
            return from_tokenizer_json(both.read_text(encoding="utf-8"))
        return make_tokenizer(*(file.read_text(encoding="utf-8") for file in (merges, vocab)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        problem = "vocab.json, merges.txt or tokenizer.json is not like GPT-2's"
        raise UserError(f"{home}: {problem} ({cause}); restore it, or use another") from None


def from_tokenizer_json(text: str) -> Tokenizer:
    """Return the tokenizer for the contents of transformers' tokenizer.json."""
    saved = json.loads(text)
    as_gpt2 = dict(type="ByteLevel", add_prefix_space=False, use_regex=True)
    splits = {key: saved["pre_tokenizer"].get(key) for key in as_gpt2}
    if splits != as_gpt2 or saved["normalizer"]:
        raise ValueError("tokenizer.json does not split text as GPT-2 does")
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved["model"]["merges"]]
    added = {token["content"]: token["id"] for token in saved["added_tokens"]}
    if more := ", ".join(added.keys() - {END}):
        raise ValueError(f"tokenizer.json has added tokens: {more}")
    return make_tokenizer("\n".join([*pairs, ""]), json.dumps(saved["model"]["vocab"] | added))


def learn_vocabulary(texts: list[str], size: int) -> tuple[str, str]:
    """Train a BPE vocabulary of `size` tokens. Return the contents of merges.txt and vocab.json.

    The tokens are the 256 bytes, the merges, and <|endoftext|>."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, size - 1, show_progress=sys.stderr.isatty())
    pairs = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokens = [*CHARACTERS, *(pair.replace(" ", "") for pair in pairs), END]
    if len(tokens) < size:
        problem = f"after {len(tokens)} tokens, no pair occurs twice in the text"
        raise UserError(f"--vocab-size {size}: {problem}; lower it")
    numbers = {token: number for number, token in enumerate(tokens)}
    return "\n".join(["#version: 0.2", *pairs, ""]), json.dumps(numbers)


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, or <|endoftext|> if it is empty."""
    return tokenizer.encode(prompt, allowed_special="all") or [tokenizer.eot_token]


def text_bytes(tokens: list[int], tokenizer: Tokenizer) -> bytes:
    """Return the text of tokens as bytes, normally UTF-8.

    A model with a padded vocabulary may sample a token that the tokenizer lacks. It becomes
    \ufffd."""
    unknown = "\ufffd".encode()
    size = tokenizer.n_vocab
    return b"".join(
        tokenizer.decode_single_token_bytes(token) if token < size else unknown for token in tokens
    )


def printable(tokens: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of tokens, with control characters replaced by spaces."""
    text = "\n".join(text_bytes(tokens, tokenizer).decode(errors="replace").splitlines())
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


class TextSize(NamedTuple):
    """The size of a text, used to make losses comparable between tokenizers."""

    tokens: int
    bytes: int
    characters: int

    def bits_per_byte(self, loss: float) -> float:
        """Convert a loss in nats per token to bits per byte."""
        return loss * self.tokens / (self.bytes * math.log(2))

    def nats_per_character(self, loss: float) -> float:
        """Convert a loss in nats per token to nats per character."""
        return loss * self.tokens / self.characters


def measure_text(tokens: np.ndarray, tokenizer: Tokenizer) -> TextSize:
    """Return the size of the text that `tokens` (1-D) decode to."""
    counts = np.bincount(tokens, minlength=tokenizer.n_vocab)[: tokenizer.n_vocab]
    bytes_per_token, chars_per_token = token_sizes(tokenizer)
    return TextSize(len(tokens), int(counts @ bytes_per_token), int(counts @ chars_per_token))


@functools.cache
def token_sizes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the number of bytes and of characters of each token. <|endoftext|> counts as 0."""
    texts = [tokenizer.decode_single_token_bytes(token) for token in range(tokenizer.n_vocab)]
    texts[tokenizer.eot_token] = b""
    # Count UTF-8 characters by their first bytes. Only continuation bytes match 0b10xxxxxx.
    chars_per_token = [sum(byte & 0xC0 != 0x80 for byte in text) for text in texts]
    return [len(text) for text in texts], chars_per_token


def encode(text: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield encode_ordinary(text) as uint32 arrays, one per piece of a long text.

    Pieces bound memory use, and keep a million consecutive spaces from overflowing tiktoken's
    stack."""
    start = 0
    while start < len(text):
        match = CUT.search(text, start + PIECE_CHARS)
        end = match.start() if match else len(text)
        # disallowed_special=() encodes a literal <|endoftext|> as ordinary tokens.
        yield tokenizer.encode_to_numpy(text[start:end], disallowed_special=())
        start = end

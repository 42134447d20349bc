"""The tokenizer against tiktoken; texts and shards as the loader opens them."""

import hashlib
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import tokenizer
from support.errors import UserError
from support.tokenizer import EOT, VOCAB_SIZE, bpe_files, get_tokenizer, open_split
from tests.conftest import ROOT, posix
from train_gpt2 import GPT, GPTConfig


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


def test_a_changed_copy_in_tiktokens_cache_is_not_used(tmp_path, monkeypatch):
    """By default the cache is in /tmp, where others can write."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for path in bpe_files().values():
        copy = tmp_path / hashlib.sha1(str(path).encode()).hexdigest()
        copy.write_bytes(path.read_bytes()[:-999])
    found = get_tokenizer.__wrapped__().encode_ordinary("the path")
    assert found == get_tokenizer().encode_ordinary("the path")


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


def test_bytes_and_characters_of_tokens():
    text = "naïve 日本語 🙂 "  # characters of several tokens
    tokens = np.array([EOT, *get_tokenizer().encode_ordinary(text), EOT])
    size = tokenizer.text_size(tokens)
    assert size == (len(tokens), len(text.encode()), len(text))
    assert size.nats_per_character(2.0) == pytest.approx(2.0 * len(tokens) / len(text))
    assert size.bits_per_byte(2.0) == pytest.approx(
        2.0 / math.log(2) * len(tokens) / len(text.encode())
    )


def test_text_is_split_nine_to_one(tmp_path):
    text = "".join(f"On day {i}, <|endoftext|> was only text.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    parts = [open_split(tmp_path / "a.txt", split)[2][0] for split in ("train", "val")]
    tokens = [EOT, *get_tokenizer().encode_ordinary(text)]
    assert np.concatenate(parts).tolist() == tokens
    assert len(parts[1]) == len(tokens) // 10


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """In the format that its name tells: .npy, or llm.c's .bin."""
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_shards_are_mapped_in_the_order_of_their_names(suffix, tmp_path):
    for i in (2, 0, 1):
        write_shard(tmp_path / f"x_train_{i:06d}{suffix}", np.arange(i, i + 9, dtype=np.uint16))
    _, names, shards = open_split(tmp_path, "train")
    assert names == [f"x_train_{i:06d}{suffix}" for i in range(3)]
    assert [shard.tolist() for shard in shards] == [[*range(i, i + 9)] for i in range(3)]
    assert all(isinstance(shard, np.memmap) for shard in shards)


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
        _, names, shards = open_split(tmp_path / "all", split)
        assert names == [f"a/{name}", f"b/{name}", f"d/{name}", name]
        assert [shard[0] for shard in shards] == [200, 100, 300, 0]
        assert {len(shard) for shard in shards} == {size}


def test_a_subfolder_that_is_half_made_is_named(tmp_path):
    part_folders(tmp_path)
    (tmp_path / "e").mkdir()
    (tmp_path / "e/.edufineweb_val_000000.npy.12.partial").touch()
    with pytest.raises(UserError, match=r"e/\.edufineweb\S+partial: half written"):
        open_split(tmp_path, "train")


@posix
def test_more_shards_than_a_process_may_open_files(tmp_path):
    import resource

    for i in range(90):
        write_shard(tmp_path / f"x_train_{i:06d}.npy", np.arange(9, dtype=np.uint16))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, before[1]))
    try:
        assert len(open_split(tmp_path, "train")[2]) == 90
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def saved(array):
    return lambda path: np.save(path, array)


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def renamed(name):
    return lambda path: path.rename(path.with_name(name))


SPOILED = {
    "truncated": (".npy", rewritten(lambda b: b[:-10]), "000000.npy: not a whole shard"),
    "foreign": (".npy", rewritten(lambda b: b"no shard" * 200), "000000.npy: not a whole shard"),
    "dtype": (".npy", saved(np.zeros(99, np.int32)), "99 values, 1-D int32"),
    "empty": (".npy", saved(np.zeros(0, np.uint16)), "0 values"),
    "0-d": (".npy", saved(np.uint16(9)), "1 values, 0-D"),
    "vocabulary": (".npy", saved(np.full(99, 50257, np.uint16)), "token 50257"),
    "first page": (".npy", saved(np.r_[50257, [0] * 2048].astype(np.uint16)), "token 50257"),
    "last page": (".npy", saved(np.r_[[0] * 2048, 50257].astype(np.uint16)), "token 50257"),
    "pickle": (".npy", saved(np.array([{}], object)), "not a whole shard"),
    "half-written": (".npy", renamed(".x.npy.1.partial"), "half written"),
    "name": (".npy", renamed("tokens.npy"), "not named like NAME"),
    "bin truncated": (".bin", rewritten(lambda b: b[:-2]), "its header has .* 18 tokens"),
    "bin header": (".bin", rewritten(lambda b: b[:512]), "not a whole shard"),
    "bin magic": (".bin", rewritten(lambda b: b"\0" * 4 + b[4:]), "its header has magic 0"),
    "bin version": (
        ".bin",
        rewritten(lambda b: b[:4] + b"\2" + b[5:]),
        "its header has .* version 2",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_bad_shards_are_named(tmp_path, name):
    suffix, spoil, message = SPOILED[name]
    path = tmp_path / f"x_train_000000{suffix}"
    write_shard(path, np.arange(18, dtype=np.uint16))
    spoil(path)
    with pytest.raises(UserError, match=message):
        open_split(tmp_path, "train")

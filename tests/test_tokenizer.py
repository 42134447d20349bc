"""The tokenizer against tiktoken's own and transformers'; texts and shards as they are read."""

import hashlib
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, losses, posix, train
from train_gpt2 import GPT, DataLoaderLite, GPTConfig

EOT = 50256


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """tiktoken's "gpt2", with OpenAI's files in its cache, and the tokenizer of a saved model."""
    import tiktoken
    from tiktoken_ext import openai_public
    from transformers import AutoTokenizer

    cache, folder = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("model")
    for ours, theirs in {"merges.txt": "vocab.bpe", "vocab.json": "encoder.json"}.items():
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{theirs}"
        shutil.copy(ROOT / "support/gpt2" / ours, cache / hashlib.sha1(url.encode()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        theirs = tiktoken.Encoding(**openai_public.gpt2())  # checks the files
    GPT(GPTConfig(n_layer=0, n_head=1, n_embd=1)).save_pretrained(folder, get_tokenizer())
    return theirs, AutoTokenizer.from_pretrained(folder)


PIECES = ["  ", "\n\n", "\t", " the", " 1234567", "don't", "été", "日本", "🙂", " ", "'ll", "=" * 9]
PIECES += ["\u200b"]
strings = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=16).map("".join)


@given(text=strings)
@settings(max_examples=100, deadline=None)
def test_it_equals_tiktokens_own_and_that_of_a_saved_model(others, text):
    theirs, saved = others
    ids = get_tokenizer().encode_ordinary(text)
    assert ids == theirs.encode_ordinary(text) and EOT not in ids
    assert get_tokenizer().decode(ids) == text and get_tokenizer().n_vocab == theirs.n_vocab
    if "<|endoftext|>" not in text:
        assert saved.encode(text) == ids and saved.decode(ids) == text


letters = st.sampled_from("ab'sé世🙂1. \n\t\r\x85\u3000\x1c\xa0") | st.characters(codec="utf-8")


@example("\n\n\x1ca", 1)  # not whitespace to GPT-2
@example("ab cd", 1)
@given(st.text(letters, max_size=60), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_long_text_in_pieces_has_the_same_tokens(text, size):
    from support import tokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", size)
        found = [
            token for piece in tokenizer.encode(text, get_tokenizer()) for token in piece.tolist()
        ]
    assert found == get_tokenizer().encode_ordinary(text)


def read_all(path: Path, tokens: int, split: str = "train") -> list[int]:
    """The tokens of a split in order, if they are as many as that."""
    x, y = DataLoaderLite(path, split, tokens - 1, 1, shuffle=False).next_batch()
    loader = DataLoaderLite(path, split, tokens, 1, shuffle=False)
    assert loader.next_batch()[0][-1] == x[0], "not as many"
    return [*x.flatten().tolist(), int(y[-1])]


def test_a_text_is_split_nine_to_one(tmp_path):
    text = "".join(f"On day {i}, <|endoftext|> was only text.\n" for i in range(200))
    (tmp_path / "a.txt").write_text(text)
    tokens = [EOT, *get_tokenizer().encode_ordinary(text)]
    end = len(tokens) - len(tokens) // 10
    assert read_all(tmp_path / "a.txt", end) == tokens[:end]
    assert read_all(tmp_path / "a.txt", len(tokens) - end, "val") == tokens[end:]


def test_a_million_spaces(tmp_path):
    """tiktoken overflows its stack on a million characters of whitespace followed by text."""
    text = "start" + " " * 1_000_000 + "end"
    (tmp_path / "a.txt").write_text(text)
    x, y = DataLoaderLite(tmp_path / "a.txt", "val", 1, 1000, shuffle=False).next_batch()
    assert get_tokenizer().decode(x[0].tolist()) == " " * 1000
    assert y[0, 0] == x[0, 1]


def test_printed_samples_hold_no_control_characters():
    from support import tokenizer

    tokens = get_tokenizer().encode_ordinary("a\x1b[31mb\r\nc\0\x9b\u202ed\n世🙂")
    assert tokenizer.printable(tokens, get_tokenizer()) == "a [31mb\nc   d\n世🙂"


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """In the format that its name tells: .npy, or llm.c's .bin."""
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_shards_are_read_in_the_order_of_their_names_and_piece_by_piece(suffix, tmp_path):
    for i in (2, 0, 1):
        write_shard(tmp_path / f"x_train_{i:06d}{suffix}", np.full(9, i, dtype=np.uint16))
    loader = DataLoaderLite(tmp_path, "train", 4, 8, shuffle=False)
    assert loader.next_batch()[0][:, 0].tolist() == [0, 1, 2, 0]
    # Not over a shard from which `loader` prefetches, which would be a bus error.
    large = tmp_path / "large"
    large.mkdir()
    write_shard(large / f"x_train_000000{suffix}", np.zeros(10**7, dtype=np.uint16))  # 20 MB
    tracemalloc.start()
    DataLoaderLite(large, "train", 1, 1024).next_batch()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6


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
    root = tmp_path / "all"
    part_folders(root)
    (tmp_path / "elsewhere").mkdir()
    (root / "c.d").rename(tmp_path / "elsewhere/c")
    (root / "d").symlink_to(tmp_path / "elsewhere/c", target_is_directory=True)
    for split, size in (("train", 100), ("val", 99)):
        loader = DataLoaderLite(root, split, 5, size - 1, shuffle=False)
        assert loader.next_batch()[0][:, 0].tolist() == [200, 100, 300, 0, 200]


def test_a_subfolder_that_is_half_made_is_named(tmp_path):
    part_folders(tmp_path)
    (tmp_path / "e").mkdir()
    (tmp_path / "e/.edufineweb_val_000000.npy.12.partial").touch()
    with pytest.raises(UserError, match=r"e/\.edufineweb\S+partial.*fineweb\.py"):
        DataLoaderLite(tmp_path, "train", 1, 1)


@posix
def test_more_shards_than_a_process_may_open_files(tmp_path):
    import resource

    for i in range(90):
        write_shard(tmp_path / f"x_train_{i:06d}.npy", np.full(9, i, dtype=np.uint16))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, before[1]))
    try:
        x, _ = DataLoaderLite(tmp_path, "train", 90, 8, shuffle=False).next_batch()
        assert x[:, 0].tolist() == list(range(90))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def saved(array):
    return lambda path: np.save(path, array)


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def renamed(name):
    return lambda path: path.rename(path.with_name(name))


SPOILED = [  # format, what is done to a shard, what the error names
    (".npy", rewritten(lambda b: b[:-10]), r"x_train_000000\.npy"),
    (".npy", rewritten(lambda b: b"no shard" * 200), r"x_train_000000\.npy"),
    (".npy", saved(np.zeros(99, np.int32)), "int32"),
    (".npy", saved(np.r_[50257, [0] * 2048].astype(np.uint16)), "50257"),
    (".npy", saved(np.r_[[0] * 2048, 50257].astype(np.uint16)), "50257"),
    (".npy", saved(np.array([{}], object)), r"x_train_000000\.npy"),
    (".npy", renamed("tokens.npy"), r"no train shards.*--input TEXT"),
    (".bin", renamed("tokens.bin"), r"no train shards.*--input TEXT"),
    (".bin", rewritten(lambda b: b[:-2]), "18"),
    (".bin", rewritten(lambda b: b"\0" * 4 + b[4:]), "magic 0"),
    (".bin", rewritten(lambda b: b[:4] + b"\2" + b[5:]), "version 2"),
]


def test_bad_shards_are_named(tmp_path):
    for i, (suffix, spoil, message) in enumerate(SPOILED):
        path = tmp_path / str(i) / f"x_train_000000{suffix}"
        path.parent.mkdir()
        write_shard(path, np.arange(18, dtype=np.uint16))
        spoil(path)
        with pytest.raises(UserError, match=message):
            DataLoaderLite(path.parent, "train", 1, 1)


def test_nanogpts_files_are_read_by_their_names(tmp_path, capsys):
    """Its train.bin and val.bin have no header. Characters, which meta.pkl numbers, are refused."""
    tokens = np.arange(400, dtype=np.uint16)
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
        x, y = DataLoaderLite(tmp_path, split, 2, 8, shuffle=False).next_batch()
        assert x.flatten().tolist() == list(range(16)) and y[1].tolist() == list(range(9, 17))
    flags = "--max-steps 1 --eval-every 1 --data"
    for name in ("", "train.bin"):
        train(flags, tmp_path / name, "--log-dir", tmp_path / f"log{name}")
    assert losses(tmp_path / "log") == losses(tmp_path / "logtrain.bin")
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(UserError, match=r"train\.bin: its tokens are characters"):
        train(flags, tmp_path, "--log-dir", tmp_path / "log_2")

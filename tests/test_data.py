"""The data loader: every order, division into ranks and position, over random shards."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.errors import UserError
from train_gpt2 import DataLoaderLite, permutation


def write_shards(folder: Path, lengths: list[int], split: str = "train") -> list[np.ndarray]:
    """Shards of these lengths. Every token occurs once."""
    folder.mkdir(exist_ok=True)
    ends = np.cumsum(lengths)
    arrays = [
        np.arange(end - n, end, dtype=np.uint16) for end, n in zip(ends, lengths, strict=True)
    ]
    for i, array in enumerate(arrays):
        np.save(folder / f"x_{split}_{i:06d}.npy", array)
    return arrays


shard_sets = st.lists(st.integers(1, 90), min_size=1, max_size=5)
Ts = st.integers(1, 9)


def loaders(folder, lengths, T, **options):
    """A loader of such shards, unless they are too short for it."""
    arrays = write_shards(Path(folder), lengths)
    try:
        return arrays, DataLoaderLite(folder, "train", 1, T, **options)
    except UserError:
        last = 0 if options.get("shuffle", True) else 1
        assert all(n < T + last for n in lengths)
        return arrays, None


@given(shard_sets, Ts, st.integers(0, 9), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_an_epoch_cuts_each_shard_as_a_circle(lengths, T, seed, epoch):
    with tempfile.TemporaryDirectory() as folder:
        arrays, loader = loaders(folder, lengths, T, seed=seed)
        if loader is None:
            return
        n = loader.sequences_per_epoch
        sequences = loader.read(epoch * n, n)  # (n, T + 1)
        first = {int(array[0]): array for array in arrays}
        starts = {key: [] for key in first}  # of the sequences of each shard, on its circle
        order = []  # of the shards
        for row in sequences.tolist():
            key = max(key for key in first if key <= row[0])
            size = len(first[key])
            start = row[0] - key
            circle = [key + (start + i) % size for i in range(T + 1)]
            assert row == circle, "not T + 1 tokens in a row"
            starts[key].append(start)
            if key not in order:
                order.append(key)
            assert order[-1] == key, "shards are mixed"
        for key, found in starts.items():
            size = len(first[key])
            assert len(found) == size // T, "T or more tokens are left out"
            if found:
                gaps = sorted(np.diff(sorted(found), append=min(found) + size).tolist())
                assert gaps == [T] * (len(found) - 1) + [size - T * (len(found) - 1)]
                inputs = {(start + i) % size for start in found for i in range(T)}
                assert len(inputs) == T * len(found), "a token is an input twice"


@given(st.integers(20, 60), st.integers(2, 9), st.integers(0, 9), st.integers(0, 30))
@settings(max_examples=80, deadline=None)
def test_the_next_epoch_has_another_offset_and_order(n, T, seed, epoch):
    with tempfile.TemporaryDirectory() as folder:
        _, loader = loaders(folder, [n * T + T // 2], T, seed=seed)
        epochs = loader.read(epoch * n, 2 * n).reshape(2, n, T + 1)[:, :, 0]  # where they begin
        assert set(epochs[0]) != set(epochs[1]), "the same cuts"
        ranks = [np.argsort(np.argsort(row)).tolist() for row in epochs]
        assert ranks[0] != ranks[1], "the same order"


@given(shard_sets, Ts, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_without_shuffle_it_reads_in_order_and_joins_nothing(lengths, T, epoch):
    with tempfile.TemporaryDirectory() as folder:
        arrays, loader = loaders(folder, lengths, T, shuffle=False)
        if loader is None:
            return
        expected = [
            array[start : start + T + 1].tolist()
            for array in arrays
            for start in range(0, len(array) - T, T)
        ]
        n = loader.sequences_per_epoch
        assert loader.read(epoch * n, n).tolist() == expected


@given(shard_sets, st.integers(1, 3), Ts, st.integers(1, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranks_together_see_what_one_resumed_process_sees(lengths, B, T, world_size, shuffle):
    """So a step has the same tokens for every division into ranks, B and micro-steps."""
    with tempfile.TemporaryDirectory() as folder:
        _, one = loaders(folder, lengths, T, shuffle=shuffle)
        if one is None:
            return
        ranks = [
            DataLoaderLite(folder, "train", B, T, rank, world_size, shuffle=shuffle)
            for rank in range(world_size)
        ]
        for step in range(6):
            alone = DataLoaderLite(folder, "train", B * world_size, T, shuffle=shuffle)
            alone.load_state_dict(ranks[0].state_dict())
            assert alone.position == step * B * world_size
            x, y = alone.next_batch()
            parts = [rank.next_batch() for rank in ranks]
            assert torch.equal(x, torch.cat([part[0] for part in parts]))
            assert torch.equal(y, torch.cat([part[1] for part in parts]))
            assert x.dtype == y.dtype == torch.int64 and x.shape == (B * world_size, T)
            assert torch.equal(x[:, 1:], y[:, :-1])
            row_by_row = [one.next_batch() for _ in range(B * world_size)]
            assert torch.equal(x, torch.cat([row[0] for row in row_by_row]))


def test_the_order_depends_on_the_seed_alone(tmp_path):
    """If a permutation changed, every resumed run would silently see other data."""
    write_shards(tmp_path, [50] * 6)

    def read(seed, epoch):
        loader = DataLoaderLite(tmp_path, "train", 1, 4, seed=seed)
        return loader.read(epoch * 72, 72).tolist()

    assert read(1, 0) == read(1, 0) and read(1, 0) != read(1, 1) and read(1, 0) != read(2, 0)
    assert permutation(8, 1337, 0).tolist() == [5, 1, 6, 7, 4, 0, 2, 3]
    shards = [[row[0] // 50 for row in read(1, epoch)[::12]] for epoch in range(3)]
    assert sorted(shards[0]) == [0, 1, 2, 3, 4, 5] and shards[0] != shards[1]


def test_only_the_order_of_one_shard_is_in_memory(tmp_path):
    """For any number of shards."""
    write_shards(tmp_path, [40] * 30)
    loader = DataLoaderLite(tmp_path, "train", 4, 4)
    for _ in range(80):
        loader.next_batch()
    assert permutation.cache_info().currsize <= 4


def test_another_stream_is_not_resumed(tmp_path):
    for name, length in (("a", 45), ("b", 40)):
        write_shards(tmp_path / name, [length])
    state = DataLoaderLite(tmp_path / "a", "train", 1, 4).state_dict()
    for name, T, seed, message in (
        ("b", 4, 1337, "shards"),
        ("a", 4, 2, "seed 2, was 1337"),
        ("a", 5, 1337, "T 5, was 4"),
    ):
        with pytest.raises(UserError, match=message):
            DataLoaderLite(tmp_path / name, "train", 1, T, seed=seed).load_state_dict(state)


def test_a_run_goes_on_if_the_folder_moves_but_not_if_subfolders_change_places(tmp_path):
    for name, length in (("a", 101), ("b", 100), ("c", 100)):
        (tmp_path / "all").mkdir(exist_ok=True)
        write_shards(tmp_path / "all" / name, [length])
    state = DataLoaderLite(tmp_path / "all", "train", 1, 8).state_dict()
    moved = (tmp_path / "all").rename(tmp_path / "moved")
    DataLoaderLite(moved, "train", 1, 8).load_state_dict(state)
    for before, after in (("a", "d"), ("b", "a"), ("d", "b")):
        (moved / before).rename(moved / after)
    with pytest.raises(UserError, match="shards"):
        DataLoaderLite(moved, "train", 1, 8).load_state_dict(state)


def test_a_bad_token_is_named_with_its_file(tmp_path):
    """In the middle of a shard, where opening it does not look."""
    for i in range(4):
        tokens = np.arange(9000, dtype=np.uint16) + i
        if i == 2:
            tokens[4000] = 60_000
        np.save(tmp_path / f"x_train_{i:06d}.npy", tokens)
    for seed in range(3):
        loader = DataLoaderLite(tmp_path, "train", 1, 16, seed=seed)
        with pytest.raises(UserError, match=r"/x_train_000002\.npy: token 60000"):
            loader.read(0, loader.sequences_per_epoch)


def test_too_few_tokens_for_a_sequence_are_an_error(tmp_path):
    write_shards(tmp_path, [8, 3], split="val")
    with pytest.raises(UserError, match="11 val tokens, too few for a sequence of 9"):
        DataLoaderLite(tmp_path, "val", 1, 9)

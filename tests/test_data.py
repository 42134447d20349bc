"""The data loader: every order, division into ranks and position, over random shards."""

import tempfile
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.errors_and_signals import UserError
from tests.conftest import losses, steps_of, train
from train_gpt2 import DataLoaderLite


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


def room(lengths: list[int], T: int, shuffle: bool = True, **_: object) -> bool:
    """True if there is a sequence, wherever below T an epoch begins."""
    return max(lengths) >= (2 * T if shuffle else T + 1)


def epochs(
    folder: Path | str, lengths: list[int], T: int, count: int, **options
) -> tuple[list[np.ndarray], np.ndarray]:
    """Such shards, and the sequences of T + 1 tokens of the first epochs, (count, n, T + 1).

    There are none if all shards are too short."""
    arrays = write_shards(Path(folder), lengths)
    if not room(lengths, T, **options):
        with pytest.raises(UserError, match=str(sum(lengths))):
            DataLoaderLite(folder, "train", 1, T, **options)
        return arrays, np.empty((count, 0, T + 1), int)
    n = DataLoaderLite(folder, "train", 1, T, **options).sequences_per_epoch
    x, y = DataLoaderLite(folder, "train", count * n, T, **options).next_batch()
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (count * n, T)
    assert torch.equal(x[:, 1:], y[:, :-1])
    return arrays, torch.cat([x, y[:, -1:]], dim=1).view(count, n, T + 1).numpy()


shard_sets = st.lists(st.integers(1, 90), min_size=1, max_size=5)
Ts = st.integers(1, 9)


@given(shard_sets, Ts, st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_epoch_reads_each_shard_once(lengths, T, seed):
    """No token is an input twice, and few are left out. All shards begin at the same token."""
    with tempfile.TemporaryDirectory() as folder:
        arrays, sequences = epochs(folder, lengths, T, 3, seed=seed)
    first = {int(array[0]): len(array) for array in arrays}
    for epoch in sequences.tolist():
        starts = {key: [] for key in first}  # of the sequences of each shard
        order = []  # of the shards
        for row in epoch:
            key = max(key for key in first if key <= row[0])
            assert row == list(range(row[0], row[0] + T + 1)), "not T + 1 tokens in a row"
            assert row[-1] < key + first[key], "past the end of the shard"
            starts[key].append(row[0] - key)
            if key not in order:
                order.append(key)
            assert order[-1] == key, "shards are mixed"
        begins = set()
        for key, found in starts.items():
            assert len(found) * T > first[key] - 2 * T, "2 T or more tokens are left out"
            assert bool(found) == (first[key] >= 2 * T), "there is room for one sequence"
            if found:
                expected = range(min(found), min(found) + T * len(found), T)
                assert sorted(found) == list(expected), "a token twice, or a gap"
                begins |= {min(found)}
        assert len(begins) <= 1 and all(begin < T for begin in begins)


@given(st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_epochs_begin_at_all_tokens_below_t(seed):
    with tempfile.TemporaryDirectory() as folder:
        _, sequences = epochs(folder, [16], 4, 80, seed=seed)
    begins = sequences.min(axis=(1, 2)).tolist()
    assert {*begins} == {0, 1, 2, 3} and min(map(begins.count, begins)) > 4


@given(st.integers(20, 60), st.integers(2, 9), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_next_epoch_has_another_order(n, T, seed):
    with tempfile.TemporaryDirectory() as folder:
        _, sequences = epochs(folder, [n * T + T // 2], T, 4, seed=seed)
    for before, after in zip(sequences[:-1, :, 0], sequences[1:, :, 0], strict=True):
        ranks = [np.argsort(np.argsort(row)).tolist() for row in (before, after)]
        assert ranks[0] != ranks[1], "the same order"


@given(shard_sets, Ts)
@settings(max_examples=60, deadline=None)
def test_without_shuffle_it_reads_in_order_and_joins_nothing(lengths, T):
    with tempfile.TemporaryDirectory() as folder:
        arrays, sequences = epochs(folder, lengths, T, 3, shuffle=False)
    expected = [
        array[start : start + T + 1].tolist()
        for array in arrays
        for start in range(0, len(array) - T, T)
    ]
    assert sequences.tolist() == [expected] * 3


@given(shard_sets, st.integers(1, 3), Ts, st.integers(1, 9), st.booleans())
@settings(max_examples=30, deadline=None)
def test_ranks_together_see_what_one_resumed_process_sees(lengths, B, T, world_size, shuffle):
    """So a step has the same tokens for every division into ranks, B and micro-steps."""
    if not room(lengths, T, shuffle):
        return
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), lengths)
        one = DataLoaderLite(folder, "train", 1, T, shuffle=shuffle)
        ranks = [
            DataLoaderLite(folder, "train", B, T, rank, world_size, shuffle=shuffle)
            for rank in range(world_size)
        ]
        for step in range(6):
            alone = DataLoaderLite(folder, "train", B * world_size, T, shuffle=shuffle)
            alone.go_to(step * B * world_size)
            x, y = alone.next_batch()
            parts = [rank.next_batch() for rank in ranks]
            assert torch.equal(x, torch.cat([part[0] for part in parts]))
            assert torch.equal(y, torch.cat([part[1] for part in parts]))
            row_by_row = [one.next_batch() for _ in range(B * world_size)]
            assert torch.equal(x, torch.cat([row[0] for row in row_by_row]))


moves = st.tuples(st.sampled_from(["read", "go to"]), st.integers(0, 200))


@given(shard_sets, Ts, st.integers(1, 4), st.sampled_from([1, 3]), st.lists(moves, max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_place_at_any_moment(lengths, T, B, world_size, moves):
    """As one process that reads sequence after sequence, also while the next batch is read."""
    if not room(lengths, T):
        return
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), lengths)
        ranks = [
            DataLoaderLite(folder, "train", B, T, rank, world_size) for rank in range(world_size)
        ]
        place = 0
        for move, n in [*moves, ("read", 0), ("read", 0)]:
            if move == "go to":
                place = n
                for loader in ranks:
                    loader.go_to(n)
                continue
            batches = [loader.next_batch() for loader in ranks]
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            expected = DataLoaderLite(folder, "train", 1, T).read(place, B * world_size)
            place += B * world_size
            assert np.array_equal(x, expected[:, :-1]) and np.array_equal(y, expected[:, 1:])


def test_the_length_of_sequences_cannot_be_changed_later(tmp_path):
    """It would silently read half of each shard."""
    write_shards(tmp_path, [99])
    with pytest.raises(AttributeError):
        DataLoaderLite(tmp_path, "train", 2, 8).T = 4


def test_only_one_shards_order_is_in_memory(monkeypatch):
    """It has 0.5 MB here, and that of a whole epoch 20 MB. The shards take no memory."""
    shards = [np.broadcast_to(np.uint16(0), 10**6)] * 40
    paths = [Path("data")] * 40
    monkeypatch.setattr("train_gpt2.open_split", lambda *_: (paths, shards))
    tracemalloc.start()
    loader = DataLoaderLite("data", "train", 4, 16)
    loader.go_to(loader.sequences_per_epoch - 8)
    loader.next_batch()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


def test_the_order_depends_on_the_seed_alone(tmp_path):
    """If it changed, every resumed run would silently see other data."""

    def read(seed):
        # In a folder of its own each time, since the loader before may still read ahead.
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return epochs(folder, [50] * 6, 4, 2, seed=seed)[1][:, :, 0].tolist()

    first, second = read(1)
    assert read(1) == [first, second] and read(2)[0] != first
    assert first[:8] == [63, 51, 83, 67, 55, 59, 79, 75]
    shards = [[start // 50 for start in epoch[::11]] for epoch in (first, second)]
    assert sorted(shards[0]) == [0, 1, 2, 3, 4, 5] and shards[0] != shards[1]


def test_a_run_goes_on_if_the_folder_moves_but_not_if_subfolders_change_places(tmp_path):
    for name, length in (("a", 101), ("b", 100), ("c", 100)):
        (tmp_path / "all").mkdir(exist_ok=True)
        write_shards(tmp_path / "all" / name, [length])
        write_shards(tmp_path / "all" / name, [100], split="val")
    args = ["--total-batch-size 32 --save-every 1 --log-dir", tmp_path / "log", "--data"]
    train(*args, tmp_path / "all", "--max-steps 1")
    moved = (tmp_path / "all").rename(tmp_path / "moved")
    train(*args, moved, "--max-steps 2 --resume")
    for before, after in (("a", "d"), ("b", "a"), ("d", "b")):
        (moved / before).rename(moved / after)
    with pytest.raises(UserError, match=r"not what the run has read so far \("):
        train(*args, moved, "--max-steps 3 --resume")


def test_too_few_tokens_for_a_sequence_are_an_error(tmp_path):
    write_shards(tmp_path, [8, 3], split="val")
    with pytest.raises(UserError, match=r"11 val .*9"):
        DataLoaderLite(tmp_path, "val", 1, 9)


def test_batches_of_training_are_read_in_the_background(text, tmp_path, monkeypatch):
    """Never in the main thread, which prepares the work of a GPU."""
    threads, read = [], DataLoaderLite.read

    def noting(self, first, n):
        threads.append(threading.current_thread())
        return read(self, first, n)

    monkeypatch.setattr(DataLoaderLite, "read", noting)
    args = ["--max-steps 2 --save-every 2 --data", text, "--log-dir", tmp_path / "log"]
    train(*args)
    assert len(threads) >= 2 * 4 and threading.main_thread() not in threads  # four micro-steps


@pytest.mark.parametrize("steps", [4, 5])
def test_a_damaged_batch_ends_the_run_when_it_is_needed(steps, tmp_path):
    """In the fifth step. The steps before are trained and saved, and a run of four is complete."""
    for split in ("train", "val"):
        tokens = np.arange(9000, dtype=np.uint16)
        tokens[4 * 1024 + 3] = 60_000 if split == "train" else 0
        np.save(tmp_path / f"x_{split}_000000.npy", tokens)
    flags = (
        "--no-shuffle --total-batch-size 1024 --micro-batch-size 16 --save-every 2 --eval-every 2"
    )
    args = [flags, "--max-steps", steps, "--data", tmp_path, "--log-dir", tmp_path / "log"]
    if steps == 4:
        assert train(*args) == 0
    else:
        with pytest.raises(UserError, match=r"x_train_000000\.npy.* 60000"):
            train(*args)
    assert len(losses(tmp_path / "log")) == 4 and steps_of(tmp_path / "log") == [2, 4]
    assert len(losses(tmp_path / "log", "val")) == 3

"""No run is lost: kills, signals, other numbers of ranks, damaged checkpoints, bad steps."""

import math
import os
import pickle
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

import train_gpt2
from support.checkpoints import find_checkpoint, list_checkpoints, read_training_state
from support.errors import RunError, UserError
from support.files import sha256
from support.run_log import run_entries
from tests import torture
from tests.conftest import (
    losses,
    posix,
    read_log,
    start_ranks,
    steps_of,
    train,
    train_on_ranks,
)
from tests.torture import assert_same

pytestmark = posix


@pytest.mark.parametrize(
    "dtype, optimizer, ranks",
    [
        ("float32", "adamw", 1),
        ("float16", "muon", 1),
        ("bfloat16", "muon", 2),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(dtype, optimizer, ranks, text, tmp_path):
    """Two epochs of the text. Weights, moments, log; the samples are those of the same weights."""
    args = ["--data", text, "--max-steps 4 --total-batch-size 64 --eval-every 3 --save-every 2"]
    args += ["--sample-every 2 --resume --dtype", dtype, "--optimizer", optimizer]
    start = train if ranks == 1 else lambda *args: train_on_ranks(ranks, tmp_path, *args)
    start(*args, "--log-dir", tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken/step_000004")  # as if killed after the first checkpoint
    with open(tmp_path / "broken/log.txt", "a") as log:
        log.write("4 tr")  # an incomplete line
    start(*args, "--log-dir", tmp_path / "broken")
    assert_same(tmp_path / "straight", tmp_path / "broken")
    assert [entry["step"] for entry in run_entries(tmp_path / "broken")] == [0, 2]


def test_a_run_killed_while_it_saves_equals_one_that_never_was(text, tmp_path, monkeypatch):
    """In its first checkpoint, so it restarts and overwrites its log. More: tests/torture.py."""
    random.seed(1)
    monkeypatch.setattr(torture, "FLAGS", f"{torture.FLAGS} --data {text}")

    def finish(log_dir: Path, steps: int) -> None:
        with mock.patch("support.run_folder.draw_curves"):
            train_gpt2.main(torture.arguments(log_dir, steps))

    assert torture.torture(tmp_path, kills=1, steps=12, finish=finish) == (1, [3])


def test_two_ranks_then_one_then_three(text, tmp_path):
    """12 sequences per step."""
    args = ["--total-batch-size 192 --save-every 2 --max-lr 1e-2 --max-steps 6 --data", text]
    args.append("--keep-checkpoints 0 --log-dir")
    train(*args, tmp_path / "alone")
    log_dir = tmp_path / "broken"
    for ranks, start in ((2, 0), (1, 2), (3, 4)):
        for later in list_checkpoints(log_dir)[start // 2 :]:
            shutil.rmtree(later)
        if ranks == 1:
            train(*args, log_dir, "--resume")
        else:
            train_on_ranks(ranks, tmp_path, *args, log_dir, "--resume")
        assert run_entries(log_dir)[-1]["step"] == start
        states = read_training_state(list_checkpoints(log_dir)[-1])["random"]
        # or all ranks of a fork would have the same dropout
        assert len({bytes(state["cpu"].numpy()) for state in states}) == ranks
    assert losses(log_dir) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)


@pytest.mark.parametrize("before, after", [("float32", "float16"), ("float16", "bfloat16")])
def test_a_run_continues_in_another_precision(before, after, text, tmp_path, capsys):
    """As when the next session has another GPU. Only float16 has a scaler."""
    args = ["--save-every 1 --resume --total-batch-size 32 --data", text, "--log-dir", tmp_path]
    train(*args, "--max-steps 1 --dtype", before)
    assert train(*args, "--max-steps 2 --dtype", after) == 0 and len(losses(tmp_path)) == 2
    assert f", {after}: as requested; {before} so far\n" in capsys.readouterr().out
    first, second = (read_training_state(folder) for folder in list_checkpoints(tmp_path))
    assert second["elapsed"] > first["elapsed"] > 0


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def test_every_damaged_file_is_noticed_and_the_checkpoint_before_used(text, tmp_path, capsys):
    args = ["--save-every 2 --data", text, "--log-dir", tmp_path]
    train(*args, "--max-steps 4")
    older, newer = list_checkpoints(tmp_path)
    for name in sorted({path.name for path in newer.iterdir()} - {"README.md"}):
        content = (newer / name).read_bytes()
        for damage in (truncate, flip_a_bit, os.unlink):
            damage(newer / name)
            assert find_checkpoint(tmp_path) == older
            warning = capsys.readouterr().err
            assert str(newer) in warning, name
            assert name in warning or name == "SHA256SUMS", warning
            (newer / name).write_bytes(content)
    sums = (newer / "SHA256SUMS").read_text()
    (newer / "SHA256SUMS").write_text(sums.splitlines(keepends=True)[0])  # right, but too few
    assert find_checkpoint(tmp_path) == older
    (newer / "SHA256SUMS").write_text(sums)
    (newer / "README.md").write_text("A user's words.")
    assert find_checkpoint(tmp_path) == newer
    for folder in (older, newer):
        truncate(folder / "model.safetensors")
    everything = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="all 2 checkpoints are damaged"):
        train(*args, "--max-steps 8 --resume")
    assert everything == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_checkpoints_are_sorted_by_their_steps(tmp_path):
    for name in ("step_1000000", "step_999999", "step_000002"):
        (tmp_path / name).mkdir()
    assert steps_of(tmp_path) == [2, 999_999, 1_000_000]


def test_which_checkpoints_are_kept(text, tmp_path):
    """The newest two and multiples of 3; damaged ones do not count."""
    args = ["--save-every 1 --keep-every 3 --max-steps 8 --data", text, "--log-dir", tmp_path]
    train(*args, "--keep-checkpoints 2")
    assert steps_of(tmp_path) == [3, 6, 7, 8]
    truncate(tmp_path / "step_000007/config.json")
    truncate(tmp_path / "step_000008/config.json")
    (tmp_path / "step_000008").rename(tmp_path / "step_000009")
    train(*args, "--keep-checkpoints 1 --resume")  # from step 6
    assert steps_of(tmp_path) == [3, 6, 8, 9]
    assert find_checkpoint(tmp_path) == tmp_path / "step_000008"


def killed_in_the_fifth_evaluation():
    losses = iter([9.0, 8.0, 4.0, 7.0])

    def validation_loss(*args):
        for loss in losses:
            return loss
        os.kill(os.getpid(), signal.SIGKILL)

    train_gpt2.validation_loss = validation_loss


def test_the_best_checkpoint_is_kept_and_named_at_the_end(text, tmp_path, monkeypatch, capsys):
    """Also after a kill."""
    log_dir = tmp_path / "log"
    flags = "--save-every 1 --eval-every 1 --keep-checkpoints 1 --max-steps 5 --resume"
    args = [flags, "--data", text, "--log-dir", log_dir]
    codes, _ = start_ranks(1, tmp_path, *args, disturb=killed_in_the_fifth_evaluation)
    assert codes == [-9] and steps_of(log_dir) == [2, 4]  # saved, then killed in its evaluation

    def resume(losses, *more):
        losses = iter(losses)
        monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: next(losses))
        assert train(*args, *more) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("best: ")]

    best = f"best: {log_dir}/step_000002/, validation loss 4.0000; the loss rose afterwards: "
    assert resume([7.0, math.nan]) == [best + "train for fewer steps, or on more text"]
    assert steps_of(log_dir) == [2, 5]
    # Evaluated again, step 5 keeps its loss. Of two equally good ones the later is kept.
    assert resume([0.0, 4.0], "--max-steps 6") == [] and steps_of(log_dir) == [6]
    assert str(losses(log_dir, "val")) == "[9.0, 8.0, 4.0, 7.0, 7.0, nan, 4.0]"


def test_a_checkpoint_that_cannot_be_removed_is_no_checkpoint(text, tmp_path, monkeypatch):
    """As on NFS, where an open file stays as .nfsXXXX."""
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
    args = ["--save-every 1 --keep-checkpoints 1 --resume --data", text, "--log-dir", tmp_path]
    assert train(*args, "--max-steps 3") == 0
    assert steps_of(tmp_path) == [3]
    monkeypatch.undo()  # the next start retries
    assert train(*args, "--max-steps 4") == 0 and not list(tmp_path.glob(".*"))


def test_a_crafted_training_state_executes_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    state = tmp_path / "training_state.pt"
    for content in ({"step": Trap()}, [1], {"format": 2}, None):
        torch.save(content, state) if content else state.write_bytes(pickle.dumps(Trap()))
        with pytest.raises(UserError, match=r"training_state\.pt"):
            read_training_state(tmp_path)
        assert not (tmp_path / "executed").exists()


def poison(monkeypatch, *calls):
    """Makes the training loss of some forward passes NaN, counted from 0."""
    original, count = train_gpt2.training_loss, iter(range(10**9))

    def poisoned(*args):
        return original(*args) * (torch.nan if next(count) in calls else 1)

    monkeypatch.setattr(train_gpt2, "training_loss", poisoned)


def test_bad_steps_stop_the_run_or_are_skipped_if_allowed(text, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, 1 * 4, 3 * 4 + 2, 5 * 4)  # steps 1, 3 and 5 of four micro-steps each
    flags = "--save-every 1 --keep-checkpoints 0 --skip-bad-steps 2 --max-steps 7"
    args = [flags, "--data", text, "--log-dir", tmp_path]
    with pytest.raises(RunError, match=r"step 5: loss nan, norm nan on the sequences from 40 on"):
        train(*args)
    assert "skipped, 2 of 2" in capsys.readouterr().out
    assert find_checkpoint(tmp_path) == tmp_path / "step_000005" and len(losses(tmp_path)) == 5
    weights = [sha256(tmp_path / f"step_{step:06d}/model.safetensors") for step in range(1, 6)]
    assert weights[0] == weights[1] != weights[2] == weights[3] != weights[4]
    states = [read_training_state(tmp_path / f"step_{step:06d}") for step in (3, 4)]
    moments = [state["optimizers"][0][1]["state"][0] for state in states]
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    poison(monkeypatch, 0)
    with pytest.raises(RunError, match="step 5: loss nan"):  # those before a resume count
        train(*args, "--resume")


def poison_rank_1(kill_at: int | None = None):
    """On rank 1 the loss of step 1 is NaN; it is killed in its forward pass number `kill_at`.

    There are two passes before the first step, then two per step."""
    original, calls = train_gpt2.training_loss, iter(range(10**9))

    def disturbed(*args):
        loss, call = original(*args), next(calls)
        if os.environ["RANK"] != "1":
            return loss
        if call == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss * (torch.nan if call == 4 else 1)

    train_gpt2.training_loss = disturbed


def test_three_ranks_survive_a_bad_step_and_a_lost_rank_bit_for_bit(text, tmp_path):
    """Only rank 1 sees a NaN loss in step 1; in one of two runs it is killed in step 5.

    A sum over three ranks depends on the order of its terms, and so on DDP's buckets."""
    args = ["--total-batch-size 96 --micro-batch-size 1 --max-lr 3e-2 --max-steps 8 --resume"]
    args += ["--save-every 4 --skip-bad-steps 1 --keep-checkpoints 0 --data", text, "--log-dir"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    texts = train_on_ranks(3, tmp_path, *args, straight, disturb=poison_rank_1)
    assert texts[0].count("skipped, 1 of 1") == 1
    codes, _ = start_ranks(3, tmp_path, *args, killed, disturb=partial(poison_rank_1, kill_at=12))
    assert codes[1] == -9 and 0 not in codes and steps_of(killed) == [4]
    texts = train_on_ranks(3, tmp_path, *args, killed)
    assert f"resumed from {killed}/step_000004" in texts[0]
    assert read_log(killed, "train", "norm") == read_log(straight, "train", "norm")
    weights = [sha256(folder / "step_000008/model.safetensors") for folder in (straight, killed)]
    state = read_training_state(killed / "step_000008")
    assert weights[0] == weights[1] and state["skipped"] == 1 and len(state["random"]) == 3


@pytest.mark.parametrize(
    "name, status", [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143), ("SIGHUP", 143)]
)
def test_a_signal_saves_and_stops(name, status, at_step, text, tmp_path, monkeypatch):
    """After the step in which it arrives. Under nohup, SIGHUP does nothing."""
    number = getattr(signal, name)  # Windows, which skips these tests, lacks some
    args = ["--max-steps 9 --save-every 9 --data", text, "--log-dir"]
    default = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=AssertionError("not saved")))

    def stop():
        os.kill(os.getpid(), number)
        if number != signal.SIGINT:  # a first Ctrl-C is no second one
            os.kill(os.getpid(), signal.SIGINT)

    at_step(3, stop)
    assert train(*args, tmp_path / "stopped") == status
    assert steps_of(tmp_path / "stopped") == [4] and len(losses(tmp_path / "stopped")) == 4
    if number == signal.SIGTERM:
        assert train(*args, tmp_path / "stopped", "--resume") == 0
        train(*args, tmp_path / "straight")
        shutil.rmtree(tmp_path / "stopped/step_000004")
        assert_same(tmp_path / "straight", tmp_path / "stopped")
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
        at_step(3, lambda: os.kill(os.getpid(), number))
        assert train(*args, tmp_path / "nohup") == 0 and steps_of(tmp_path / "nohup") == [9]
    signal.signal(signal.SIGHUP, default)


def test_a_signal_without_checkpoints_says_that_nothing_is_saved(at_step, text, tmp_path, capsys):
    at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train("--max-steps 9 --data", text, "--log-dir", tmp_path) == 143
    assert "stopped by a signal after 2 updates; nothing is saved" in capsys.readouterr().out
    assert not steps_of(tmp_path)


def test_a_stopped_run_keeps_no_more_checkpoints_than_others(at_step, text, tmp_path):
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    args = ["--data", text, "--log-dir", tmp_path, "--save-every 2 --keep-checkpoints 1"]
    assert train("--max-steps 9", *args) == 143 and steps_of(tmp_path) == [3]


@pytest.mark.parametrize("when", ["in the last step", "in the last evaluation"])
def test_a_signal_near_the_end_loses_no_evaluation(
    when, at_step, text, tmp_path, monkeypatch, capsys
):
    """An evaluation ends early, is not logged, and is made again. A prompt may be empty."""
    read, count = train_gpt2.DataLoaderLite.read, [0]

    def disturbed(self, *args):
        if not self.shuffle:  # validation: the text once, then four batches each time
            count[0] += 1
            if count[0] == 7 and when == "in the last evaluation":
                os.kill(os.getpid(), signal.SIGTERM)
        return read(self, *args)

    monkeypatch.setattr(train_gpt2.DataLoaderLite, "read", disturbed)
    if when == "in the last step":
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    flags = "--max-steps 3 --save-every 9 --eval-every 9 --sample-every 9 --sample-prompt="
    args = [*flags.split(), "--data", text, "--log-dir", tmp_path]
    assert train(*args) == 143
    assert count[0] == (5 if when == "in the last step" else 7) and steps_of(tmp_path) == [3]
    assert "sample 0" not in capsys.readouterr().out and len(losses(tmp_path, "val")) == 1
    assert train(*args, "--resume") == 0
    assert "sample 0" in capsys.readouterr().out and len(losses(tmp_path, "val")) == 2
    assert len(losses(tmp_path)) == 3


def signal_rank_1():
    """Rank 1 alone gets SIGTERM: in step 2, or in the evaluation after step 4."""
    get_lr = train_gpt2.get_lr

    def acting(step, config):
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return get_lr(step, config)

    train_gpt2.get_lr = acting


def signal_rank_1_in_an_evaluation():
    read = train_gpt2.DataLoaderLite.read
    counts = iter(range(10**9))

    def disturbed(self, *args):
        if not self.shuffle and os.environ["RANK"] == "1" and next(counts) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, *args)

    train_gpt2.DataLoaderLite.read = disturbed


def test_a_signal_to_one_rank_stops_all(text, tmp_path):
    """And they save the same step."""
    args = ["--max-steps 9 --save-every 9 --eval-every 3 --total-batch-size 64 --data", text]
    straight = tmp_path / "straight"
    train_on_ranks(2, tmp_path, *args, "--log-dir", straight)
    for disturb in (signal_rank_1, signal_rank_1_in_an_evaluation):
        log = tmp_path / disturb.__name__
        codes, texts = start_ranks(2, tmp_path, *args, "--log-dir", log, disturb=disturb)
        assert codes == [143, 143], texts
        assert steps_of(log) == [3]
        train_on_ranks(2, tmp_path, *args, "--log-dir", log, "--resume")
        shutil.rmtree(log / "step_000003")
        assert_same(straight, log)


def interrupt_twice():
    """In step 4, and while its checkpoint is written."""
    next_batch = train_gpt2.DataLoaderLite.next_batch

    def save_pretrained(self, folder):
        folder.mkdir()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)

    def interrupted(self):
        if self.position == 4 * 8 + 2:
            os.kill(os.getpid(), signal.SIGINT)
        return next_batch(self)

    train_gpt2.GPT.save_pretrained = save_pretrained
    train_gpt2.DataLoaderLite.next_batch = interrupted


def test_a_second_interrupt_stops_at_once(text, tmp_path):
    """The partial folder of the first one's checkpoint is left until the next start."""
    args = ["--save-every 8 --max-steps 8 --data", text, "--log-dir", tmp_path]
    (code,), (output,) = start_ranks(1, tmp_path, *args, disturb=interrupt_twice)
    assert code == 130 and "Traceback" not in output, output
    assert not list_checkpoints(tmp_path) and list(tmp_path.glob(".*partial"))
    train(*args, "--resume")
    assert len(losses(tmp_path)) == 8 and not list(tmp_path.glob(".*partial"))

"""No run is lost: kills, signals, other numbers of ranks, damaged checkpoints, bad steps."""

import hashlib
import math
import os
import pickle
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import train_gpt2
from support.errors_and_signals import RunError, UserError
from tests import torture
from tests.conftest import (
    checkpoints,
    losses,
    posix,
    read_log,
    start_ranks,
    starts,
    steps_of,
    train,
    train_on_ranks,
)
from tests.torture import assert_same

pytestmark = [posix, pytest.mark.torch]


def add_dropout(replace=setattr):
    forward = train_gpt2.MLP.forward

    def dropping(self, x):
        return F.dropout(forward(self, x), 0.1, self.training)

    replace(train_gpt2.MLP, "forward", dropping)


@pytest.mark.parametrize(
    "dtype, optimizer, ranks",
    [
        ("float32", "adamw", 1),
        ("bfloat16", "muon", 2),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    dtype, optimizer, ranks, text, tmp_path, monkeypatch
):
    """Weights, moments and log are the same, also with dropout."""
    args = ["--data", text, "--max-steps 4 --total-batch-size 64 --eval-every 3 --save-every 2"]
    args += ["--sample-every 2 --resume --dtype", dtype, "--optimizer", optimizer]
    start = train
    if ranks > 1:
        start = partial(train_on_ranks, ranks, tmp_path, disturb=add_dropout)
    add_dropout(monkeypatch.setattr)
    start(*args, "--log-dir", tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken/step_000004")  # as if killed after the first checkpoint
    with open(tmp_path / "broken/log.txt", "ab") as log:
        log.write(b"\xff\nstray\n4 val none\n4 tr")  # not lines of a log, and an incomplete one
    start(*args, "--log-dir", tmp_path / "broken")
    assert_same(tmp_path / "straight", tmp_path / "broken")
    assert [entry["step"] for entry in starts(tmp_path / "broken")] == [0, 2]


def test_a_run_killed_while_it_saves_equals_one_that_never_was(text, tmp_path, monkeypatch):
    """In its first checkpoint, so it restarts and overwrites its log. More: tests/torture.py."""
    random.seed(1)
    monkeypatch.setattr(torture, "FLAGS", f"{torture.FLAGS} --data {text}")

    def finish(log_dir: Path, steps: int) -> None:
        with mock.patch("support.plots.save_curves"):
            train_gpt2.main(torture.arguments(log_dir, steps))

    assert torture.torture(tmp_path, kills=1, steps=12, finish=finish) == (1, [3])


def test_two_ranks_then_one_then_three(text, tmp_path):
    """12 sequences per step."""
    args = ["--total-batch-size 192 --save-every 2 --max-lr 1e-2 --max-steps 6 --data", text]
    args.append("--keep-checkpoints 0 --log-dir")
    train(*args, tmp_path / "alone")
    log_dir = tmp_path / "broken"
    for ranks, start in ((2, 0), (1, 2), (3, 4)):
        for later in checkpoints(log_dir)[start // 2 :]:
            shutil.rmtree(later)
        if ranks == 1:
            train(*args, log_dir, "--resume")
        else:
            train_on_ranks(ranks, tmp_path, *args, log_dir, "--resume")
        assert starts(log_dir)[-1]["step"] == start
    assert losses(log_dir) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)


def test_a_run_continues_in_another_precision(text, tmp_path, capsys):
    """As when the next session has another GPU. Only float16 has a scaler."""
    args = ["--save-every 1 --resume --total-batch-size 32 --data", text, "--log-dir", tmp_path]
    for step, dtype in enumerate(("float32", "float16", "bfloat16"), start=1):
        assert train(*args, f"--max-steps {step} --dtype {dtype}") == 0
    assert len(losses(tmp_path)) == 3
    assert re.search(r"\bbfloat16\b.*\bfloat16\b", capsys.readouterr().out)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def newest_intact(log_dir):
    """The checkpoint that --resume takes: the error that the run is beyond its end names it."""
    with pytest.raises(UserError, match=r"step_\d+.*--max-steps 0") as error:
        train("--max-steps 0 --resume --log-dir", log_dir)
    return re.search(r"step_\d+", str(error.value))[0]


def test_every_damaged_file_is_noticed_and_the_checkpoint_before_used(text, tmp_path, capsys):
    args = ["--save-every 2 --data", text, "--log-dir", tmp_path]
    train(*args, "--max-steps 4")
    older, newer = checkpoints(tmp_path)
    for name in sorted({path.name for path in newer.iterdir()} - {"README.md"}):
        content = (newer / name).read_bytes()
        for damage in (truncate, flip_a_bit, os.unlink):
            damage(newer / name)
            assert newest_intact(tmp_path) == older.name, (name, damage)
            warning = capsys.readouterr().err
            assert str(newer) in warning, name
            assert name in warning or name == "SHA256SUMS", warning
            (newer / name).write_bytes(content)
    sums = (newer / "SHA256SUMS").read_text()
    (newer / "SHA256SUMS").write_text(sums.splitlines(keepends=True)[0])  # right, but too few
    assert newest_intact(tmp_path) == older.name
    (newer / "SHA256SUMS").write_text(sums)
    (newer / "README.md").write_text("A user's words.")
    newer.rename(tmp_path / "step_1000000")  # steps are numbers
    newer = tmp_path / "step_1000000"
    shutil.copytree(older, tmp_path / "step_999999")
    assert newest_intact(tmp_path) == newer.name
    for folder in checkpoints(tmp_path):
        truncate(folder / "model.safetensors")
    everything = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"{tmp_path}.*3 damaged.*another folder"):
        train(*args, "--max-steps 8 --resume")
    assert everything == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_which_checkpoints_are_kept(text, tmp_path):
    """The newest, and the one from which this process has resumed. Damaged ones do not count. Of a
    link to another folder only the link is removed."""
    args = ["--save-every 1 --max-steps 8 --data", text, "--log-dir", tmp_path]
    train(*args, "--keep-checkpoints 3")
    assert steps_of(tmp_path) == [6, 7, 8]
    truncate(tmp_path / "step_000007/config.json")
    truncate(tmp_path / "step_000008/config.json")
    (tmp_path / "step_000008").rename(tmp_path / "step_000009")
    elsewhere = (tmp_path / "step_000007").rename(tmp_path / "elsewhere")
    (tmp_path / "step_000007").symlink_to(elsewhere)
    train(*args, "--keep-checkpoints 1 --resume")  # from step 6
    assert steps_of(tmp_path) == [6, 8, 9] and (elsewhere / "model.safetensors").exists()
    assert not list(tmp_path.glob(".*"))
    assert newest_intact(tmp_path) == "step_000008"


def test_the_best_checkpoint_is_kept_and_named_at_the_end(text, tmp_path, monkeypatch, capsys):
    """The log says which it is. It has other losses here, as if the run had overfitted."""
    log_dir = tmp_path / "log"
    flags = "--save-every 1 --eval-every 1 --keep-checkpoints 1 --resume --data"
    found = {0: 9.0, 1: 8.0, 2: 4.0, 3: 5.0, 4: math.nan, 5: 4.0, 6: 3.0}
    monkeypatch.setattr(train_gpt2.Evaluations, "validate", lambda _, step: {"val": found[step]})

    def run(steps):
        assert train(flags, text, "--log-dir", log_dir, "--max-steps", steps) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if "best checkpoint: " in line]

    assert run(2) == []
    (line,) = run(4)
    assert f"{log_dir}/step_000002" in line and steps_of(log_dir) == [2, 4]
    assert run(5) == [], "of two equally good ones the later is kept"
    assert steps_of(log_dir) == [4, 5], "it has resumed from 4"
    found[6] = 5.0
    (line,) = run(6)
    assert "step_000005" in line and steps_of(log_dir) == [5, 6]
    found[6] = 3.0
    assert run(6) == [] and steps_of(log_dir) == [6]
    assert losses(log_dir, "val")[2] == 4 and len(losses(log_dir, "val")) == 7


def test_a_crafted_training_state_executes_nothing(text, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    args = ["--data", text, "--log-dir", tmp_path / "log", "--save-every 1"]
    train(*args, "--max-steps 1")
    checkpoint = tmp_path / "log/step_000001"
    state, sums = checkpoint / "training_state.pt", checkpoint / "SHA256SUMS"
    for content in ({"step": Trap()}, None):  # None: a pickle without a zip
        before = hashlib.sha256(state.read_bytes()).hexdigest()
        torch.save(content, state) if content else state.write_bytes(pickle.dumps(Trap(), 2))
        after = hashlib.sha256(state.read_bytes()).hexdigest()
        sums.write_text(sums.read_text().replace(before, after))
        with pytest.raises(pickle.UnpicklingError):
            train(*args, "--max-steps 2 --resume")
        assert not (tmp_path / "executed").exists()


def disturb_losses(act, replace=setattr):
    """Each training loss becomes act(step, micro-step, loss)."""
    get_lr, cross_entropy, place = train_gpt2.get_lr, F.cross_entropy, [-1, 0]

    def noting(step, config):
        place[:] = step, 0
        return get_lr(step, config)

    def disturbed(*args, **options):
        loss = cross_entropy(*args, **options)
        if torch.is_grad_enabled() and place[0] >= 0:  # not in the set-up, nor in an evaluation
            loss = act(*place, loss)
            place[1] += 1
        return loss

    replace(train_gpt2, "get_lr", noting)
    replace(F, "cross_entropy", disturbed)


def test_a_bad_step_ends_the_run_and_is_named(text, tmp_path, monkeypatch):
    """The same happens again if nothing is changed."""
    disturb_losses(
        lambda step, micro, loss: loss * (torch.nan if (step, micro) == (5, 2) else 1),
        monkeypatch.setattr,
    )
    args = ["--save-every 2 --max-steps 7 --data", text, "--log-dir", tmp_path]
    for more in ("", "--resume"):
        with pytest.raises(RunError, match=r"step 5\b.* nan.*--max-lr"):
            train(*args, more)
        assert newest_intact(tmp_path) == "step_000004" and len(losses(tmp_path)) == 5


def poison_rank_1(kill: bool = False):
    """On rank 1 the loss of step 5 is NaN, or it is killed there."""

    def act(step, micro_step, loss):
        if os.environ["RANK"] != "1" or step != 5:
            return loss
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss * torch.nan

    disturb_losses(act)


def test_three_ranks_survive_a_bad_step_and_a_lost_rank_bit_for_bit(text, tmp_path):
    """Rank 1 alone sees a NaN, which ends all three; another time it is killed.

    A sum over three ranks depends on the order of its terms, and so on DDP's buckets."""
    args = ["--n-layer 4 --n-embd 128 --total-batch-size 96 --micro-batch-size 1 --max-lr 3e-2"]
    args += ["--max-steps 8 --resume --save-every 4 --data", text, "--log-dir"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train_on_ranks(3, tmp_path, *args, straight)
    codes, texts = start_ranks(3, tmp_path, *args, stopped, disturb=poison_rank_1)
    assert codes[0] == 1 and steps_of(stopped) == [4] and "error: step 5" in texts[0]
    codes, _ = start_ranks(3, tmp_path, *args, stopped, disturb=partial(poison_rank_1, kill=True))
    assert codes[1] == -9 and 0 not in codes and steps_of(stopped) == [4]
    train_on_ranks(3, tmp_path, *args, stopped)
    assert [entry["step"] for entry in starts(stopped)] == [0, 4, 4]
    assert read_log(stopped, "train", "norm") == read_log(straight, "train", "norm")
    last = [folder / "step_000008/model.safetensors" for folder in (straight, stopped)]
    assert last[0].read_bytes() == last[1].read_bytes()


PAIRS = {"SIGTERM SIGTERM": 143, "SIGINT SIGTERM": 130, "SIGUSR1 SIGTERM": 143}
PAIRS |= {"SIGHUP SIGTERM": 143, "SIGTERM SIGINT": 143}


def send(names: str) -> None:
    for name in names.split():
        os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("names, status", PAIRS.items())
def test_signals_save_and_stop(names, status, text, tmp_path, monkeypatch, capfd):
    """In the middle of a step, which goes on, and while a checkpoint is written."""
    default = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    args = ["--max-steps 4 --save-every 2 --keep-checkpoints 0 --data", text, "--log-dir"]
    train(*args, tmp_path / "straight")
    with monkeypatch.context() as patch:
        disturb_losses(
            lambda step, micro, loss: (send(names) if (step, micro) == (0, 1) else None, loss)[1],
            patch.setattr,
        )
        assert train(*args, tmp_path / "step") == status
        assert steps_of(tmp_path / "step") == [1] and len(losses(tmp_path / "step")) == 1
        said = capfd.readouterr().err
        for name in names.split():
            assert said.count(f"{name}: ") == names.count(name), said
        assert [signal.getsignal(number) for number in numbers] == handlers
    with monkeypatch.context() as patch:
        torch_save = torch.save
        once = iter([names])  # at the first save
        patch.setattr(torch, "save", lambda *args: (send(next(once, "")), torch_save(*args))[1])
        assert train(*args, tmp_path / "save") == status and steps_of(tmp_path / "save") == [2, 3]
    for folder in (tmp_path / "step", tmp_path / "save"):
        assert train(*args, folder, "--resume") == 0
        for step in ("step/step_000001", "save/step_000003"):
            shutil.rmtree(tmp_path / step, ignore_errors=True)
        assert_same(tmp_path / "straight", folder)
    signal.signal(signal.SIGHUP, default)


def test_a_signal_within_an_evaluation_stops_after_it(text, tmp_path, monkeypatch):
    """It is logged. If everything due was done, the status is 0."""
    args = ["--max-steps 4 --save-every 4 --eval-every 2 --sample-every 2 --data", text]
    train(*args, "--log-dir", tmp_path / "straight")
    last = {"validate": 143, "sample": 0}  # samples are the last evaluation after step 4
    for name, status in last.items():
        for at in (2, 4):
            log = tmp_path / f"{name}_{at}"
            evaluate = getattr(train_gpt2.Evaluations, name)

            def stopping(self, step, evaluate=evaluate, at=at):
                if step == at:
                    send("SIGTERM")
                return evaluate(self, step)

            with monkeypatch.context() as patch:
                patch.setattr(train_gpt2.Evaluations, name, stopping)
                assert train(*args, "--log-dir", log) == (status if at == 4 else 143)
            assert steps_of(log) == [at] and f"{at} val" in (log / "log.txt").read_text()
            assert train(*args, "--log-dir", log, "--resume") == 0
            shutil.rmtree(log / "step_000002", ignore_errors=True)
            assert_same(tmp_path / "straight", log)


def test_under_nohup_sighup_does_nothing(at_step, text, tmp_path):
    default = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    args = ["--max-steps 4 --save-every 9 --data", text, "--log-dir", tmp_path]
    assert train(*args) == 0 and steps_of(tmp_path) == [4]
    signal.signal(signal.SIGHUP, default)


def test_ctrl_c_saves_although_nobody_reads_stderr(at_step, text, tmp_path):
    """As with `2>&1 | tee`, since Ctrl-C ends tee as well."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)

    def stop():
        os.dup2(writer, 2)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(1, stop)
    try:
        assert train("--max-steps 4 --save-every 9 --data", text, "--log-dir", tmp_path) == 130
    finally:
        os.dup2(stderr, 2)
        os.close(writer)
        os.close(stderr)
    assert steps_of(tmp_path) == [2]


def test_a_signal_without_checkpoints_says_that_nothing_is_saved(at_step, text, tmp_path, capsys):
    at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train("--max-steps 9 --data", text, "--log-dir", tmp_path) == 143
    assert "--resume" not in capsys.readouterr().out and not steps_of(tmp_path)


def after_step(steps, act, replace=setattr):
    """act(n) in the n-th batch, from 0 on, of the evaluation after `steps` steps."""
    get_lr, cross_entropy, place = train_gpt2.get_lr, F.cross_entropy, [0, 0]

    def noting(step, config):
        place[:] = step + 1, 0
        return get_lr(step, config)

    def disturbed(*args, **options):
        batch = not torch.is_grad_enabled() and args[1].numel() > 1
        if batch and place[0] == steps:
            act(place[1])
            place[1] += 1
        return cross_entropy(*args, **options)

    replace(train_gpt2, "get_lr", noting)
    replace(F, "cross_entropy", disturbed)


def on_rank_at(rank, n, number, batch):
    """Sends the signal `number` to a rank in its n-th batch."""
    if os.environ["RANK"] == str(rank) and batch == n:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_signal_in_an_evaluation_stops_after_it(steps, text, tmp_path, monkeypatch, capsys):
    """Its result is logged. After the last evaluation of a run everything is done."""
    batches = []

    def act(n):
        batches.append(n)
        if n == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    after_step(steps, act, monkeypatch.setattr)
    args = ["--max-steps 4 --save-every 9 --eval-every 2 --data", text, "--log-dir", tmp_path]
    handler = signal.getsignal(signal.SIGTERM)
    assert train(*args) == (0 if steps == 4 else 143)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert len(batches) == 4 and steps_of(tmp_path) == [steps]  # an evaluation has four batches
    assert len(losses(tmp_path, "val")) == 1 + steps // 2
    assert ("stopped by a signal" in capsys.readouterr().out) == (steps == 2)
    assert train(*args, "--resume") == 0
    assert len(losses(tmp_path, "val")) == 3 and len(losses(tmp_path)) == 4


def test_a_signal_leaves_later_evaluations_to_the_resumed_run(text, tmp_path, monkeypatch, capsys):
    """Samples follow the validation loss."""
    stop = iter([partial(os.kill, os.getpid(), signal.SIGTERM)])
    after_step(3, lambda n: next(stop, int)(), monkeypatch.setattr)
    flags = "--max-steps 3 --save-every 9 --eval-every 9 --sample-every 9"
    args = [flags, "--data", text, "--log-dir", tmp_path]
    assert train(*args) == 143 and steps_of(tmp_path) == [3]
    assert "ROMEO:" not in capsys.readouterr().out and len(losses(tmp_path, "val")) == 2
    assert train(*args, "--resume") == 0
    assert "ROMEO:" in capsys.readouterr().out and len(losses(tmp_path, "val")) == 2
    assert len(losses(tmp_path)) == 3


def test_a_kill_in_the_last_evaluation_costs_no_step(text, tmp_path):
    """Checkpoints are written before evaluations."""
    args = ["--max-steps 3 --save-every 2 --eval-every 3 --data", text, "--log-dir", tmp_path / "a"]
    disturb = partial(after_step, 3, partial(on_rank_at, 0, 0, signal.SIGKILL))
    codes, _ = start_ranks(1, tmp_path, *args, disturb=disturb)
    assert codes == [-9] and steps_of(tmp_path / "a") == [2, 3]
    assert train(*args, "--resume") == 0
    assert len(losses(tmp_path / "a")) == 3 and len(losses(tmp_path / "a", "val")) == 2


def signal_a_rank_in_a_step(rank):
    """One rank alone gets two signals, in the second of three micro-steps of step 2."""

    def act(step, micro_step, loss):
        if (step, micro_step) == (2, 1) and os.environ["RANK"] == rank:
            send("SIGUSR1 SIGTERM")
        return loss

    disturb_losses(act)


def signal_a_rank_in_an_evaluation(rank):
    after_step(3, partial(on_rank_at, rank, 0, signal.SIGTERM))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_signal_to_one_rank_stops_all(world_size, text, tmp_path):
    """And they save the same step."""
    rank_1 = str(min(1, world_size - 1))
    flags = f"--max-steps 5 --save-every 9 --eval-every 3 --total-batch-size {48 * 3 * world_size}"
    args = [flags, "--micro-batch-size 3 --data", text, "--log-dir"]
    straight = tmp_path / "straight"
    train_on_ranks(world_size, tmp_path, *args, straight)
    for disturb in (signal_a_rank_in_a_step, signal_a_rank_in_an_evaluation):
        log = tmp_path / disturb.__name__
        disturb = partial(disturb, rank_1)
        codes, texts = start_ranks(world_size, tmp_path, *args, log, disturb=disturb)
        assert codes == [143] * world_size, texts
        assert steps_of(log) == [3] and len(losses(log)) == 3
        train_on_ranks(world_size, tmp_path, *args, log, "--resume")
        shutil.rmtree(log / "step_000003")
        assert_same(straight, log)


def interrupt_twice():
    """In step 4, and while its checkpoint is written."""
    get_lr = train_gpt2.get_lr

    def save_pretrained(self, folder, tokenizer):
        folder.mkdir()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)

    def interrupted(step, config):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return get_lr(step, config)

    train_gpt2.GPT.save_pretrained = save_pretrained
    train_gpt2.get_lr = interrupted


def test_a_second_interrupt_stops_at_once(text, tmp_path):
    """The checkpoint that the first one has begun is dropped."""
    args = ["--save-every 8 --max-steps 8 --data", text, "--log-dir", tmp_path]
    (code,), (output,) = start_ranks(1, tmp_path, *args, disturb=interrupt_twice)
    assert code == 130 and "Another Ctrl-C" in output and "Traceback" not in output, output
    assert not checkpoints(tmp_path)
    train(*args, "--resume")
    assert len(losses(tmp_path)) == 8 and not list(tmp_path.glob(".*partial"))

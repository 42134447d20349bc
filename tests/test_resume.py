"""A run that cannot be lost: killed, on other ranks, with damaged checkpoints, full disks, bad
steps."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt2
from support.cli import RunError, UserError
from support.files import sha256
from support.run_folder import find_checkpoint, list_checkpoints, read_training_state, step_of
from tests.conftest import ROOT, TINY, losses, posix, read_log, start_ranks, train, train_on_ranks
from tests.torture import ARGS, contents, torture

pytestmark = posix


@pytest.mark.parametrize(
    "dtype, optimizer, ranks",
    [
        ("float32", "adamw", 1),
        ("float32", "muon", 2),
        ("bfloat16", "muon", 1),
        ("float16", "adamw", 1),
        ("bfloat16", "adamw", 2),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(dtype, optimizer, ranks, text, tmp_path):
    args = [
        "--data",
        text,
        "--max-steps",
        4,
        "--total-batch-size",
        64,
        "--eval-every",
        3,
        "--save-every",
        2,
        "--sample-every",
        2,
        "--dtype",
        dtype,
        "--optimizer",
        optimizer,
        "--resume",
        "--shard-optimizer" if ranks > 1 else "--no-shard-optimizer",
    ]
    start = train if ranks == 1 else lambda *args: train_on_ranks(ranks, tmp_path, *args)
    start(*args, "--log-dir", tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(
        tmp_path / "broken/step_000004"
    )  # as though it had been killed after the first checkpoint
    with open(tmp_path / "broken/log.txt", "a") as log:
        log.write("4 tr")  # an incomplete line
    start(*args, "--log-dir", tmp_path / "broken")
    straight, broken = contents(tmp_path / "straight"), contents(tmp_path / "broken")
    assert straight.keys() == broken.keys() and all(
        straight[name] == broken[name] for name in straight
    )
    assert len(losses(tmp_path / "broken")) == 4 and len(losses(tmp_path / "broken", "val")) == 3
    assert [entry["step"] for entry in json.loads((tmp_path / "broken/run.json").read_text())] == [
        0,
        2,
    ]


def test_a_run_killed_while_it_saves_equals_one_that_never_was(tmp_path):
    """tests/torture.py does this at length, and at other moments, too."""
    random.seed(1)

    def finish(log_dir: Path, steps: int) -> None:
        train_gpt2.main([*ARGS, "--max-steps", str(steps), "--log-dir", str(log_dir)])

    assert torture(tmp_path, kills=1, steps=12, finish=finish) == (1, [3])


def test_two_ranks_then_one_then_three(text, tmp_path):
    """192 tokens a step as 12 sequences, on 2 ranks, from step 4 on 1, from step 8 on 3; 2 and 3
    shard the optimizer's state."""
    args = [
        "--data",
        text,
        "--total-batch-size",
        192,
        "--save-every",
        4,
        "--max-lr",
        1e-2,
        "--max-steps",
        12,
        "--keep-checkpoints",
        0,
    ]
    train(*args, "--log-dir", tmp_path / "alone")
    log_dir = tmp_path / "broken"
    for ranks, start in ((2, 0), (1, 4), (3, 8)):
        for later in list_checkpoints(log_dir)[start // 4 :]:
            shutil.rmtree(later)
        if ranks == 1:
            train(*args, "--log-dir", log_dir, "--resume")
        else:
            train_on_ranks(
                ranks, tmp_path, *args, "--log-dir", log_dir, "--resume", "--shard-optimizer"
            )
        assert json.loads((log_dir / "run.json").read_text())[-1]["step"] == start
    assert losses(log_dir) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    a, b = (read_training_state(folder / "step_000012") for folder in (log_dir, tmp_path / "alone"))
    assert a["loader"] == b["loader"] and a["step"] == b["step"] == 12


@pytest.mark.parametrize("before, after", [("float32", "float16"), ("float16", "bfloat16")])
def test_a_run_continues_in_another_precision(before, after, text, tmp_path, capsys):
    """As when the next session's GPU is another one: float16 has a scaler, the others have none."""
    args = [
        "--data",
        text,
        "--save-every",
        1,
        "--log-dir",
        tmp_path,
        "--resume",
        "--total-batch-size",
        32,
    ]
    train(*args, "--max-steps", 1, "--dtype", before)
    assert train(*args, "--max-steps", 2, "--dtype", after) == 0 and len(losses(tmp_path)) == 2
    assert (
        f"precision: torch.{before} so far, torch.{after} from here on" in capsys.readouterr().out
    )


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def test_every_damaged_file_is_noticed_and_the_checkpoint_before_used(text, tmp_path, capsys):
    train("--data", text, "--max-steps", 4, "--save-every", 2, "--log-dir", tmp_path)
    older, newer = list_checkpoints(tmp_path)
    for name in sorted(path.name for path in newer.iterdir()):
        content = (newer / name).read_bytes()
        for damage in (truncate, flip_a_bit, os.unlink):
            damage(newer / name)
            assert find_checkpoint(tmp_path)[0] == older
            warning = capsys.readouterr().err
            assert str(newer) in warning and (name in warning or name == "SHA256SUMS"), (
                name,
                warning,
            )
            (newer / name).write_bytes(content)
    assert find_checkpoint(tmp_path)[0] == newer
    for folder in (older, newer):
        truncate(folder / "model.safetensors")
    everything = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="all 2 checkpoints are damaged"):
        train(
            "--data", text, "--max-steps", 8, "--save-every", 2, "--log-dir", tmp_path, "--resume"
        )
    assert everything == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def steps_of(log_dir: Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(log_dir)]


def test_what_is_kept(text, tmp_path):
    """The newest two, multiples of 3, and no fewer whole ones because a damaged one has a higher
    number."""
    args = [
        "--data",
        text,
        "--save-every",
        1,
        "--keep-every",
        3,
        "--max-steps",
        8,
        "--log-dir",
        tmp_path,
    ]
    train(*args, "--keep-checkpoints", 2)
    assert steps_of(tmp_path) == [3, 6, 7, 8]
    truncate(tmp_path / "step_000007/config.json")
    truncate(tmp_path / "step_000008/config.json")
    (tmp_path / "step_000008").rename(tmp_path / "step_000009")
    train(*args, "--keep-checkpoints", 1, "--resume")  # from step 6
    assert (
        steps_of(tmp_path) == [3, 6, 8, 9]
        and find_checkpoint(tmp_path)[0] == tmp_path / "step_000008"
    )


KILLED = """
import os, signal, train_gpt2
losses = iter([9.0, 8.0, 4.0, 7.0])
train_gpt2.validation_loss = lambda *args: next(losses, None) or os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_best_checkpoint_is_kept_and_named_at_the_end(text, tmp_path, monkeypatch, capsys):
    """Also after a kill."""
    log_dir = tmp_path / "log"
    args = [
        "--data",
        text,
        "--save-every",
        1,
        "--eval-every",
        1,
        "--keep-checkpoints",
        1,
        "--max-steps",
        5,
    ]
    args += ["--log-dir", log_dir, "--resume"]
    codes, _ = start_ranks(1, tmp_path, *args, disturbance=KILLED)
    assert codes == [-9] and steps_of(log_dir) == [2, 3, 4]  # saved, then killed in its evaluation

    def resume(losses, *more):
        losses = iter(losses)
        monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: next(losses))
        assert train(*args, *more) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("best: ")]

    best = f"best: {log_dir}/step_000002/, validation loss 4.0000; the loss rose afterwards: "
    assert resume([7.0, 6.0]) == [best + "train for fewer steps, or on more text"]
    assert steps_of(log_dir) == [2, 5]
    # Evaluated again, step 5 keeps its loss. Of two that are as good the later one stays.
    assert resume([0.0, 4.0], "--max-steps", 6) == [] and steps_of(log_dir) == [6]


def test_a_checkpoint_that_cannot_be_removed_is_no_checkpoint(text, tmp_path, monkeypatch):
    """As on NFS, where a file that is still open leaves a .nfsXXXX behind."""
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
    args = [
        "--data",
        text,
        "--save-every",
        1,
        "--keep-checkpoints",
        1,
        "--log-dir",
        tmp_path,
        "--resume",
    ]
    assert train(*args, "--max-steps", 3) == 0
    assert steps_of(tmp_path) == [3]
    monkeypatch.undo()
    assert train(*args, "--max-steps", 4) == 0 and not list(
        tmp_path.glob(".*")
    )  # the next start retries


def test_a_crafted_training_state_executes_nothing(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    state = tmp_path / "training_state.pt"
    for content in ({"format": Trap()}, [1], {"format": 2}, None):
        torch.save(content, state) if content else state.write_bytes(pickle.dumps(Trap()))
        with pytest.raises(UserError, match=r"training_state\.pt"):
            read_training_state(tmp_path)
        assert not (tmp_path / "executed").exists()


def test_stopped_before_its_first_checkpoint_a_run_writes_its_log_again(text, tmp_path):
    args = ["--data", text, "--save-every", 4, "--resume", "--max-steps", 4, "--log-dir", tmp_path]
    train(*args)
    expected = read_log(tmp_path, "train", "norm", "lr")
    shutil.rmtree(tmp_path / "step_000004")
    train(*args)
    assert read_log(tmp_path, "train", "norm", "lr") == expected and len(losses(tmp_path)) == 4


def poison(monkeypatch, *calls):
    """Makes the loss of some forward passes in training NaN, counted from 0."""
    original, count = train_gpt2.chunked_next_token_loss, iter(range(10**9))

    def poisoned(*args):
        return original(*args) * (torch.nan if next(count) in calls else 1)

    monkeypatch.setattr(train_gpt2, "chunked_next_token_loss", poisoned)


def test_bad_steps_stop_the_run_or_are_skipped_if_allowed(text, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, 1 * 4, 3 * 4 + 2, 5 * 4)  # steps 1, 3 and 5 of four micro-steps each
    args = ["--data", text, "--save-every", 1, "--keep-checkpoints", 0, "--skip-bad-steps", 2]
    args += ["--max-steps", 7, "--log-dir", tmp_path]
    with pytest.raises(RunError, match=r"step 5: loss nan, .* on the data from token 640 on"):
        train(*args)
    assert "update skipped, 2 of 2" in capsys.readouterr().out
    assert find_checkpoint(tmp_path)[0] == tmp_path / "step_000005" and len(losses(tmp_path)) == 5
    weights = [sha256(tmp_path / f"step_{step:06d}/model.safetensors") for step in range(1, 6)]
    assert weights[0] == weights[1] != weights[2] == weights[3] != weights[4]
    states = [read_training_state(tmp_path / f"step_{step:06d}") for step in (3, 4)]
    moments = [state["optimizer"]["state"][0] for state in states]
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    assert [state["skipped"] for state in states] == [1, 2] and states[1]["loader"][
        "position"
    ] == 4 * 128
    poison(monkeypatch, 0)
    with pytest.raises(RunError, match="step 5: loss nan"):  # those before a resumption count
        train(*args, "--resume")


DISTURBANCE = """
import os, signal, train_gpt2
rank, calls, original = os.environ["RANK"], iter(range(10**9)), train_gpt2.chunked_next_token_loss

def disturbed(*args):
    loss = original(*args)
    call = next(calls)  # two before the first step, then two a step
    if rank == "1" and call == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss * (float("nan") if rank == "1" and call == 4 else 1)  # step 1

train_gpt2.chunked_next_token_loss = disturbed
"""


def test_three_ranks_survive_a_bad_step_and_a_lost_rank_bit_for_bit(text, tmp_path):
    """Rank 1 alone sees a NaN loss in step 1; in one of two runs it is killed in step 5, and all
    resume from step 4. With three ranks a sum depends on the order of its terms, and so on DDP's
    buckets: both runs must end with the same bits."""
    args = [
        "--data",
        text,
        "--total-batch-size",
        96,
        "--micro-batch-size",
        1,
        "--max-lr",
        3e-2,
        "--max-steps",
        8,
        "--save-every",
        4,
        "--skip-bad-steps",
        1,
        "--keep-checkpoints",
        0,
        "--resume",
    ]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    texts = train_on_ranks(
        3, tmp_path, *args, "--log-dir", straight, disturbance=DISTURBANCE.replace("LAST", "-1")
    )
    assert texts[0].count("update skipped, 1 of 1") == 1
    codes, _ = start_ranks(
        3, tmp_path, *args, "--log-dir", killed, disturbance=DISTURBANCE.replace("LAST", "12")
    )
    assert codes[1] == -9 and 0 not in codes and steps_of(killed) == [4]
    texts = train_on_ranks(3, tmp_path, *args, "--log-dir", killed)
    assert f"resumed from {killed}/step_000004" in texts[0] and len(losses(killed)) == 8
    assert read_log(killed, "train", "norm") == read_log(straight, "train", "norm")
    weights = [sha256(folder / "step_000008/model.safetensors") for folder in (straight, killed)]
    state = read_training_state(killed / "step_000008")
    assert weights[0] == weights[1] and state["skipped"] == 1 and len(state["random"]) == 3


def test_torchrun_starts_two_ranks(text, tmp_path):
    args = ["--data", text, "--max-steps", 2, "--log-dir", tmp_path / "log"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, ROOT / "train_gpt2.py", *TINY, *args]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and " x 2 ranks" in done.stdout, done.stderr
    assert len(losses(tmp_path / "log")) == 2


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.mark.parametrize(
    "size", [2**21, 2**22]
)  # too small for the weights; for the training state
def test_a_full_disk_costs_no_training_and_no_checkpoint(size, text, tmp_path):
    """As on a disk that takes no more, a file ends at `size` bytes."""
    log_dir = tmp_path / "log"
    args = [
        "--data",
        text,
        "--save-every",
        2,
        "--keep-checkpoints",
        1,
        "--log-dir",
        log_dir,
        "--resume",
    ]
    train(*args, "--max-steps", 2)
    (code,), (output,) = start_ranks(
        1, tmp_path, *args, "--max-steps", 6, disturbance=LIMIT.format(size)
    )
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert code == 2 and len(errors) == 2 and "Traceback" not in output, output
    assert re.match(r"error: .*step_000004: not written \(", errors[0])
    assert re.match(r"error: .*step_000006: not written \(.*free some space", errors[1])
    assert len(losses(log_dir)) == 6
    assert sorted(p.name for p in log_dir.iterdir()) == ["log.txt", "run.json", "step_000002"]
    train(*args, "--max-steps", 6)
    assert len(losses(log_dir)) == 6 and steps_of(log_dir) == [6]


@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143)])
def test_a_signal_saves_and_stops(text, tmp_path, monkeypatch, name, status):
    """It arrives in the middle of step 3."""
    original = train_gpt2.DataLoaderLite.next_batch

    def next_batch(self):
        if self.position == 3 * 128 + 32:
            os.kill(os.getpid(), getattr(signal, name))
        return original(self)

    monkeypatch.setattr(train_gpt2.DataLoaderLite, "next_batch", next_batch)
    assert (
        train("--data", text, "--max-steps", 9, "--save-every", 9, "--log-dir", tmp_path) == status
    )
    assert steps_of(tmp_path) == [4] and len(losses(tmp_path)) == 4
    assert read_training_state(tmp_path / "step_000004")["step"] == 4


TWO_INTERRUPTS = """
import os, signal, time, train_gpt2
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
train_gpt2.GPT.save_pretrained = lambda self, folder: folder.mkdir() or interrupt() or time.sleep(9)
next_batch = train_gpt2.DataLoaderLite.next_batch
train_gpt2.DataLoaderLite.next_batch = lambda self: (
    interrupt() if self.position == 4 * 128 + 32 else None) or next_batch(self)
"""


def test_a_second_interrupt_stops_at_once(text, tmp_path):
    """While the first one's checkpoint is written: only the half-written folder is left, and the
    next start removes it."""
    args = ["--data", text, "--save-every", 8, "--max-steps", 8, "--log-dir", tmp_path]
    (code,), (output,) = start_ranks(1, tmp_path, *args, disturbance=TWO_INTERRUPTS)
    assert code == 130 and "Traceback" not in output, output
    assert not list_checkpoints(tmp_path) and list(tmp_path.glob(".*partial"))
    train(*args, "--resume")
    assert len(losses(tmp_path)) == 8 and not list(tmp_path.glob(".*partial"))

"""A run that cannot be lost: killed, on other ranks, with damaged checkpoints, full disks, bad steps."""

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
from support.cli import InputError, RunError
from support.files import list_checkpoints, sha256, step_of, write_checksums
from tests.conftest import ROOT, TINY, losses, posix, read_log, train, train_on_ranks
from tests.torture import ARGS, torture
from train_gpt2 import find_checkpoint, read_training_state

pytestmark = posix

@pytest.mark.parametrize("dtype, optimizer, ranks", [
    ("float32", "adamw", 1), ("float32", "muon", 2), ("bfloat16", "muon", 1), ("float16", "adamw", 1),
    ("bfloat16", "adamw", 2),
])
def test_a_resumed_run_equals_one_that_never_stopped(dtype, optimizer, ranks, text, tmp_path):
    args = ["--data", text, "--max-steps", 4, "--total-batch-size", 64, "--eval-every", 3, "--save-every", 2,
            "--sample-every", 2, "--dtype", dtype, "--optimizer", optimizer, "--resume",
            "--shard-optimizer" if ranks > 1 else "--no-shard-optimizer"]
    start = train if ranks == 1 else lambda *args: train_on_ranks(ranks, tmp_path, *args)
    start(*args, "--log-dir", tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken/step_000004")  # as though it had been killed after the first checkpoint
    with open(tmp_path / "broken/log.txt", "a") as log:
        log.write("4 tr")  # an incomplete line
    start(*args, "--log-dir", tmp_path / "broken")
    for stream, count in {"train": 4, "norm": 4, "lr": 4, "val": 3}.items():
        assert read_log(tmp_path / "broken", stream) == read_log(tmp_path / "straight", stream), stream
        assert len(read_log(tmp_path / "broken", stream)) == count
    weights = [sha256(tmp_path / name / "step_000004/model.safetensors") for name in ("straight", "broken")]
    assert weights[0] == weights[1]
    assert [entry["step"] for entry in json.loads((tmp_path / "broken/run.json").read_text())] == [0, 2]

def test_a_run_killed_while_it_saves_equals_one_that_never_was(tmp_path):
    """tests/torture.py does this at length, and at other moments, too."""
    random.seed(1)

    def finish(log_dir: Path, steps: int) -> None:
        train_gpt2.main([*ARGS, "--max-steps", str(steps), "--log-dir", str(log_dir)])

    assert torture(tmp_path, kills=1, steps=12, finish=finish) == (1, [3])

def test_two_ranks_then_one_then_three(text, tmp_path):
    """192 tokens a step as 12 sequences, on 2 ranks, from step 4 on 1, from step 8 on 3; 2 and 3 shard the
    optimizer's state."""
    args = ["--data", text, "--total-batch-size", 192, "--save-every", 4, "--max-lr", 1e-2, "--max-steps", 12,
            "--keep-checkpoints", 0]
    train(*args, "--log-dir", tmp_path / "alone")
    log_dir = tmp_path / "broken"
    for ranks, start in ((2, 0), (1, 4), (3, 8)):
        for later in list_checkpoints(log_dir)[start // 4 :]:
            shutil.rmtree(later)
        if ranks == 1:
            train(*args, "--log-dir", log_dir, "--resume")
        else:
            train_on_ranks(ranks, tmp_path, *args, "--log-dir", log_dir, "--resume", "--shard-optimizer")
        assert json.loads((log_dir / "run.json").read_text())[-1]["step"] == start
    assert losses(log_dir) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    a, b = (read_training_state(folder / "step_000012") for folder in (log_dir, tmp_path / "alone"))
    assert a["loader"] == b["loader"] and a["tokens"] == b["tokens"] == 12 * 192

@pytest.mark.parametrize("before, after", [("float32", "float16"), ("float16", "bfloat16")])
def test_a_run_continues_in_another_precision(before, after, text, tmp_path, capsys):
    """As when the next session's GPU is another one: float16 has a scaler, the others have none."""
    args = ["--data", text, "--save-every", 1, "--log-dir", tmp_path, "--resume", "--total-batch-size", 32]
    train(*args, "--max-steps", 1, "--dtype", before)
    assert train(*args, "--max-steps", 2, "--dtype", after) == 0 and len(losses(tmp_path)) == 2
    assert f"precision: torch.{before} so far, torch.{after} from here on" in capsys.readouterr().out

def test_resume_refuses_another_run_and_takes_an_older_scripts_checkpoint(text, tmp_path):
    args = ["--data", text, "--save-every", 2, "--log-dir", tmp_path, "--resume"]
    train(*args, "--max-steps", 2, "--max-lr", 0.25)
    checkpoint = tmp_path / "step_000002"
    state = torch.load(checkpoint / "training_state.pt", weights_only=True)
    state |= {"best_val": 7.5, "config": state["config"] | {"check_against": ""}}  # of an older script
    torch.save(state, checkpoint / "training_state.pt")
    (checkpoint / "SHA256SUMS").unlink()
    write_checksums(checkpoint)
    with pytest.raises(InputError, match=r"--max-lr was 0\.25, is 0\.5"):
        train(*args, "--max-steps", 4, "--max-lr", 0.5)
    train(*args, "--max-steps", 4, "--max-lr", 0.25)
    assert len(losses(tmp_path)) == 4

def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)

def test_every_damaged_file_is_noticed_and_the_checkpoint_before_used(text, tmp_path, capsys):
    train("--data", text, "--max-steps", 4, "--save-every", 2, "--log-dir", tmp_path)
    older, newer = list_checkpoints(tmp_path)
    assert find_checkpoint(tmp_path) == newer
    names = sorted(path.name for path in newer.iterdir())
    for name in names:
        content = (newer / name).read_bytes()
        for damage in (truncate, flip_a_bit, os.unlink):
            damage(newer / name)
            assert find_checkpoint(tmp_path) == older
            warning = capsys.readouterr().err
            assert str(newer) in warning and (name in warning or name == "SHA256SUMS"), (name, warning)
            (newer / name).write_bytes(content)
    assert find_checkpoint(tmp_path) == newer
    for folder in (older, newer):
        truncate(folder / "model.safetensors")
    everything = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="all 2 checkpoints are damaged"):
        train("--data", text, "--max-steps", 8, "--save-every", 2, "--log-dir", tmp_path, "--resume")
    assert everything == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

def steps_of(log_dir: Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(log_dir)]

def test_what_is_kept(text, tmp_path):
    """The newest two, multiples of 3, and no fewer whole ones because a damaged one has a higher number."""
    args = ["--data", text, "--save-every", 1, "--keep-checkpoints", 2, "--keep-every", 3]
    args += ["--log-dir", tmp_path]
    train(*args, "--max-steps", 8)
    assert steps_of(tmp_path) == [3, 6, 7, 8]
    truncate(tmp_path / "step_000007/config.json")
    truncate(tmp_path / "step_000008/config.json")
    (tmp_path / "step_000008").rename(tmp_path / "step_000009")
    train(*args, "--max-steps", 8, "--keep-checkpoints", 1, "--resume")  # from step 6
    assert steps_of(tmp_path) == [3, 6, 8, 9] and find_checkpoint(tmp_path) == tmp_path / "step_000008"

def test_the_checkpoint_with_the_lowest_validation_loss_is_kept(text, tmp_path, monkeypatch):
    """A resumed run knows it, too, until a later one is better."""
    vals = iter([9.0, 7.0, 5.0, 8.0, 6.0, 6.0, 5.5, 6.0, 6.0, 4.0, 5.0])
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: next(vals))
    args = ["--data", text, "--save-every", 1, "--eval-every", 1, "--keep-checkpoints", 1]
    args += ["--log-dir", tmp_path]
    train(*args, "--max-steps", 4)
    assert steps_of(tmp_path) == [2, 4]
    train(*args, "--max-steps", 6, "--resume")  # evaluates step 4 again
    assert steps_of(tmp_path) == [2, 6]
    train(*args, "--max-steps", 8, "--resume")
    assert steps_of(tmp_path) == [7, 8]

def test_a_checkpoint_that_cannot_be_removed_is_no_checkpoint(text, tmp_path, monkeypatch):
    """As on NFS, where a file that is still open leaves a .nfsXXXX behind."""
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)
    args = ["--data", text, "--save-every", 1, "--keep-checkpoints", 1, "--log-dir", tmp_path, "--resume"]
    assert train(*args, "--max-steps", 3) == 0
    assert steps_of(tmp_path) == [3]
    monkeypatch.undo()
    assert train(*args, "--max-steps", 4) == 0 and not list(tmp_path.glob(".*"))  # the next start retries

@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux says which files are mapped")
def test_a_resumed_run_maps_no_file_of_its_checkpoint(text, tmp_path, monkeypatch):
    """A mapped file could not be removed on NFS or Windows while the run lasts."""
    args = ["--data", text, "--save-every", 2, "--log-dir", tmp_path, "--resume"]
    train(*args, "--max-steps", 2)
    maps, get_lr = [], train_gpt2.get_lr
    monkeypatch.setattr(train_gpt2, "get_lr", lambda *args: maps.append(Path("/proc/self/maps").read_text())
                        or get_lr(*args))
    train(*args, "--max-steps", 3)
    assert len(maps) == 1 and "libtorch" in maps[0] and str(tmp_path) not in maps[0]

class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)

def test_a_crafted_training_state_executes_nothing(text, tmp_path, capsys):
    train("--data", text, "--max-steps", 4, "--save-every", 2, "--log-dir", tmp_path)
    newest = tmp_path / "step_000004"
    state, sums = newest / "training_state.pt", (newest / "SHA256SUMS").read_text()
    original, trap = sha256(state), Touch(tmp_path / "executed")
    for write in (lambda: state.write_bytes(pickle.dumps(trap)), lambda: torch.save({"format": trap}, state),
                  lambda: torch.save([1], state)):
        write()
        (newest / "SHA256SUMS").write_text(sums.replace(original, sha256(state)))
        assert find_checkpoint(tmp_path) == tmp_path / "step_000002"
        assert "training_state.pt" in capsys.readouterr().err
        assert not (tmp_path / "executed").exists()

def test_stopped_before_its_first_checkpoint_a_run_writes_its_log_again(text, tmp_path):
    args = ["--data", text, "--save-every", 4, "--resume", "--log-dir", tmp_path]
    train(*args, "--max-steps", 4)
    expected = read_log(tmp_path, "train", "norm", "lr")
    shutil.rmtree(tmp_path / "step_000004")
    train(*args, "--max-steps", 4)
    assert read_log(tmp_path, "train", "norm", "lr") == expected
    shutil.rmtree(tmp_path / "step_000004")
    train(*args, "--max-steps", 4, "--seed", 5)  # another run: the log keeps the first one's lines
    assert read_log(tmp_path, "train", "norm", "lr")[: len(expected)] == expected
    assert len(losses(tmp_path)) == 8

def poison(monkeypatch, *calls):
    """Makes the loss of some forward passes in training NaN, counted from 0."""
    original, count = train_gpt2.chunked_next_token_loss, iter(range(10**9))

    def poisoned(*args):
        logits, loss = original(*args)
        return logits, loss * (torch.nan if next(count) in calls else 1)

    monkeypatch.setattr(train_gpt2, "chunked_next_token_loss", poisoned)

def test_a_bad_step_stops_the_run_with_the_weights_before_it(text, tmp_path, monkeypatch):
    poison(monkeypatch, 3 * 4 + 2)  # in step 3, which has four micro-steps
    args = ["--data", text, "--max-steps", 6, "--save-every", 2, "--log-dir", tmp_path]
    with pytest.raises(RunError, match=r"step 3: loss nan, .* on the data from token 384 on"):
        train(*args)
    assert find_checkpoint(tmp_path) == tmp_path / "step_000002" and len(losses(tmp_path)) == 3

def test_bad_steps_are_skipped_when_allowed(text, tmp_path, monkeypatch, capsys):
    poison(monkeypatch, 1 * 4, 3 * 4 + 2)
    args = ["--data", text, "--save-every", 1, "--keep-checkpoints", 0, "--log-dir", tmp_path]
    train(*args, "--skip-bad-steps", 2, "--max-steps", 5)
    assert "update skipped, 2 of 2" in capsys.readouterr().out
    weights = [sha256(tmp_path / f"step_{step:06d}/model.safetensors") for step in range(1, 6)]
    assert weights[0] == weights[1] != weights[2] == weights[3] != weights[4]
    states = [read_training_state(tmp_path / f"step_{step:06d}") for step in (3, 4)]
    moments = [state["optimizer"]["state"][0] for state in states]
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    assert [state["skipped"] for state in states] == [1, 2] and states[1]["loader"]["position"] == 4 * 128
    poison(monkeypatch, 0)
    with pytest.raises(RunError, match="step 5: loss nan"):  # the third: those before a resumption count
        train(*args, "--skip-bad-steps", 2, "--max-steps", 7, "--resume")

DISTURBANCE = """
import os, signal
import train_gpt2

rank, calls = os.environ["RANK"], iter(range(10**9))
first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
original = train_gpt2.chunked_next_token_loss

def disturbed(*args):
    logits, loss = original(*args)
    call = next(calls)  # two before the first step, then two a step
    if rank == "1" and call == 4 and first_start:  # step 1
        loss = loss * float("nan")
    if rank == "1" and call == 12 and first_start and "KILL" in os.environ:  # step 5
        os.kill(os.getpid(), signal.SIGKILL)
    return logits, loss

train_gpt2.chunked_next_token_loss = disturbed
"""

def test_three_ranks_survive_a_bad_step_and_a_lost_rank_bit_for_bit(text, tmp_path):
    """Rank 1 alone sees a NaN loss in step 1; in one of two runs it is killed in step 5, torchrun restarts
    all ranks, and they resume from step 4. With three ranks a sum depends on the order of its terms, and so
    on DDP's buckets: both runs must end with the same bits."""
    head = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    tail = "from support.cli import run; run(train_gpt2.main)"
    (tmp_path / "disturbed.py").write_text(head + DISTURBANCE + tail)
    args = ["--data", text, "--total-batch-size", 96, "--micro-batch-size", 1, "--max-lr", 3e-2,
            "--max-steps", 8, "--save-every", 4, "--skip-bad-steps", 1, "--keep-checkpoints", 0]
    texts = train_on_ranks(3, tmp_path, *args, "--log-dir", tmp_path / "straight", disturbance=DISTURBANCE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3",
                "--max-restarts=2"]
    command = [*torchrun, tmp_path / "disturbed.py", *TINY, *args, "--log-dir", tmp_path / "killed"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "KILL": ""}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    for output, resumed in ((texts[0], False), (done.stdout, True)):
        assert output.count("update skipped, 1 of 1") == 1
        assert (f"resumed from {tmp_path}/killed/step_000004" in output) == resumed
    assert len(losses(tmp_path / "killed")) == 8
    assert read_log(tmp_path / "killed", "train", "norm") == read_log(tmp_path / "straight", "train", "norm")
    weights = [sha256(tmp_path / name / "step_000008/model.safetensors") for name in ("straight", "killed")]
    state = read_training_state(tmp_path / "killed/step_000008")
    assert weights[0] == weights[1] and state["skipped"] == 1 and len(state["random"]) == 3

def in_small_filesystem(folder, size, *commands):
    """Runs shell commands with a tmpfs on `folder`, in a mount namespace; skips where that is forbidden."""
    folder.mkdir()
    unshare = ["unshare", "--map-root-user", "--mount", "bash", "-c"]
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder}"
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("no mount namespaces for this user")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*unshare, "; ".join([mount, *commands])], capture_output=True, text=True, env=env)

def test_a_full_disk_costs_no_training_and_no_checkpoint(text, tmp_path):
    folder = tmp_path / "small"
    args = [*TINY, "--data", text, "--max-steps", 6, "--save-every", 2, "--keep-checkpoints", 1,
            "--log-dir", folder]
    command = " ".join(map(str, [sys.executable, ROOT / "train_gpt2.py", *args]))
    done = in_small_filesystem(  # one checkpoint has 14 MB
        folder, "20m", f"{command}; echo status $?", f"ls -A {folder}; grep -c train {folder}/log.txt",
        f"mount -o remount,size=50m {folder}", f"{command} --resume; echo status $?", f"ls -A {folder}",
    )
    full, mended = done.stdout.split("status 2")
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.match(r"error: .*step_000004: not written \(.*; training continues", errors[0])
    assert re.match(r"error: .*step_000006: not written \(.*free some space", errors[1])
    assert "step     5 loss" in full
    assert {"log.txt", "run.json", "step_000002", "6"} <= set(mended.split("device")[0].split())
    assert "step_000004" not in mended.split("device")[0]
    assert "resumed from" in mended
    assert {*mended.split("status 0")[1].split()} - {"curves.png"} == {"log.txt", "run.json", "step_000006"}

@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 143)])
def test_a_signal_saves_and_stops(text, tmp_path, monkeypatch, name, status):
    """It arrives in the middle of step 3."""
    original = train_gpt2.DataLoaderLite.next_batch

    def next_batch(self):
        if self.position == 3 * 128 + 32:
            os.kill(os.getpid(), getattr(signal, name))
        return original(self)

    monkeypatch.setattr(train_gpt2.DataLoaderLite, "next_batch", next_batch)
    assert train("--data", text, "--max-steps", 9, "--save-every", 9, "--log-dir", tmp_path) == status
    assert steps_of(tmp_path) == [4] and len(losses(tmp_path)) == 4
    assert read_training_state(tmp_path / "step_000004")["step"] == 4

def test_a_second_interrupt_stops_at_once(text, tmp_path):
    """While the first one's checkpoint is written: only the half-written folder is left, and the next start
    removes it."""
    args = ["--data", text, "--save-every", 8, "--max-steps", 8, "--log-dir", tmp_path]
    code = f"""if True:
        import os, signal, sys, time, train_gpt2
        from support.cli import run
        interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
        train_gpt2.write_pretrained = lambda folder, *args: folder.mkdir() or interrupt() or time.sleep(9)
        original = train_gpt2.DataLoaderLite.next_batch
        def next_batch(self):
            if self.position == 4 * 128 + 32:
                interrupt()
            return original(self)
        train_gpt2.DataLoaderLite.next_batch = next_batch
        run(lambda: train_gpt2.main({[*TINY, *map(str, args)]!r}))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert not list_checkpoints(tmp_path) and list(tmp_path.glob(".*partial"))
    train(*args, "--resume")
    assert len(losses(tmp_path)) == 8 and not list(tmp_path.glob(".*partial"))

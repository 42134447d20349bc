"""Faults that a run survives, and those it ends with, each with its cause: failing evaluations,
signals, full disks, a second run in the folder, restarts, damaged logs, wrong environments."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

import train_gpt2
from support import checkpoints, cli, ranks, run_log
from support.errors import LostRank, RunError, UserError
from support.run_log import log_lines, run_entries
from support.trackers import start_trackers
from tests.conftest import RANK, ROOT, losses, read_log, steps_of, train
from train_gpt2 import GPT, GPTConfig

resource = pytest.importorskip("resource", reason="Windows has neither limits nor these signals")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def start(text, log):
    """Trains in `log` with flags in one string. -> exit status"""
    data = ("--data", text, "--log-dir", log)
    return lambda flags, **options: train(*data, *flags.split(), **options)


@pytest.fixture
def at_step(monkeypatch):
    """at_step(2, act) calls act() before the update of step 2."""
    get_lr, actions = train_gpt2.get_lr, {}

    def acting(step, config):
        actions.pop(step, lambda: None)()
        return get_lr(step, config)

    monkeypatch.setattr(train_gpt2, "get_lr", acting)
    return actions.__setitem__


def raise_error(error):
    def raising(*args, **options):
        raise error

    return raising


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def test_an_evaluation_that_fails_costs_no_step(start, log, monkeypatch, capsys):
    flags, results = "--max-steps 3 --save-every 2 --eval-every 3", iter([9])
    with monkeypatch.context() as patch, pytest.raises(StopIteration):  # in the last evaluation
        patch.setattr(train_gpt2, "validation_loss", lambda *args: next(results))
        start(flags)
    assert steps_of(log) == [2, 3]
    assert start(flags + " --resume") == 0
    assert len(losses(log)) == 3 and len(losses(log, "val")) == 2
    assert [entry.get("finished") for entry in run_entries(log)] == [None, 3]
    before = read_log(log)
    assert start(flags + " --resume") == 0
    printed = capsys.readouterr().out
    assert "already trained 3" in printed
    assert read_log(log) == before and len(run_entries(log)) == 2


@pytest.mark.parametrize("when", ["in the last step", "in the last evaluation"])
def test_a_signal_near_the_end_loses_no_evaluation(when, start, log, monkeypatch, capsys):
    """A sample may begin with nothing."""
    read, count = train_gpt2.DataLoaderLite.read, [0]

    def disturbed(self, *args):
        if not self.shuffle:  # validation: 4 batches each, and the text once
            count[0] += 1
            if count[0] == 7 and when == "in the last evaluation":
                stop()
        return read(self, *args)

    monkeypatch.setattr(train_gpt2.DataLoaderLite, "read", disturbed)
    if when == "in the last step":  # after its micro-steps
        clip, steps = torch.nn.utils.clip_grad_norm_, iter([0, 1, 2])

        def clip_and_stop(*args):
            if next(steps) == 2:
                stop()
            return clip(*args)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_stop)
    flags = "--max-steps 3 --save-every 9 --eval-every 9 --sample-every 9 --sample-prompt="
    assert start(flags) == 143
    assert count[0] == (5 if when == "in the last step" else 7) and steps_of(log) == [3]
    assert "sample 0" not in capsys.readouterr().out
    assert start(flags + " --resume") == 0
    assert "sample 0" in capsys.readouterr().out and len(losses(log, "val")) == 2
    assert len(losses(log)) == 3 and run_entries(log)[-1]["finished"] == 3


def test_a_signal_whose_save_fails_says_so(start, at_step, monkeypatch, capsys):
    monkeypatch.setattr(torch, "save", raise_error(FULL))
    at_step(1, stop)
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: start("--max-steps 9 --save-every 9"))
    printed = capsys.readouterr()
    (error,) = printed.err.splitlines()
    assert ended.value.code == 2 and "stopped by a signal after 1 updates" in printed.out
    assert "step_000001: not written (" in error and "free some space; --resume continues" in error


def test_full_disks_under_log_and_output_cost_no_line(start, at_step, log, monkeypatch, capsys):
    def limit(size):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    at_step(1, limit(250))  # cuts the lines of step 2, about 100 bytes per step
    at_step(5, limit(resource.RLIM_INFINITY))
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "flush", raise_error(FULL))
        patch.setattr(sys.stderr, "flush", raise_error(FULL))
        try:
            assert start("--max-steps 7 --save-every 2 --sample-every 6") == 0
        finally:
            limit(resource.RLIM_INFINITY)()
    assert steps_of(log) == [6, 7]
    assert capsys.readouterr().err.count("log.txt: File too large; lines are kept") == 1
    lines = log_lines(log / "log.txt")
    assert [line[:2] for line in lines[::6]] == [(step, "train") for step in range(7)]
    assert len(lines) == 6 * 7


def fill(pipe):
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(999))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")


BREAK = {errno.EPIPE: os.pipe, errno.EIO: os.openpty, errno.EAGAIN: os.pipe}


@pytest.mark.parametrize("number", BREAK)
def test_no_error_of_the_output_ends_a_run(number, start, at_step, log, monkeypatch):
    """A reader or a terminal that left, a pipe that is full."""
    reader, writer = BREAK[number]()
    at_step(1, lambda: fill(writer) if number == errno.EAGAIN else os.close(reader))
    with monkeypatch.context() as patch:
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, os.fdopen(writer, "w", closefd=False))
        at_step(2, lambda: cli.warn("be careful"))
        assert start("--max-steps 3 --save-every 3") == 0
    assert steps_of(log) == [3]
    kept = (log / "unprinted.txt").read_text()
    assert kept.startswith("step     1/3 loss ") and "\nwarning: be careful\nstep     2/3" in kept
    assert kept.splitlines()[-1].startswith("sample: ")


def test_arguments_that_are_not_utf8_cost_no_checkpoint(start, log, monkeypatch):
    flags = "--save-every 1 --sample-every 2 --sample-prompt caf\udce9"
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags.split()])
    start(f"{flags} --max-steps 1")
    start(f"{flags} --max-steps 2 --resume")
    assert steps_of(log) == [1, 2] and len(losses(log)) == 2
    assert "caf?" in (log / "step_000002/README.md").read_text("utf-8")


def test_a_bug_while_saving_is_no_full_disk(start, monkeypatch):
    monkeypatch.setattr(torch, "save", raise_error(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        start("--max-steps 3 --save-every 1")


def test_two_runs_cannot_use_one_folder(start, at_step, log):
    refused = []

    def second():
        with pytest.raises(UserError, match="log: another run uses it; choose another") as info:
            start("--max-steps 1 --save-every 1")
        refused.append(info)

    at_step(1, second)
    assert start("--max-steps 2 --save-every 1") == 0
    assert refused and steps_of(log) == [1, 2] and len(run_entries(log)) == 1
    assert start("--max-steps 1") == 0  # the lock has ended


def test_a_restart_by_torchrun_resumes_what_its_own_job_began(start, log, monkeypatch):
    flags = "--max-steps 2 --save-every 1"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # also that of the earlier job
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/x/none_a/attempt_0/0/error.json")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    for _ in range(2):  # without ranks: torchrun's variables, but no torchrun
        start("--max-steps 1 --save-every 1")
    assert steps_of(log / "earlier_1") == [1]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        for name, value in (RANK | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        free.listen()
        with pytest.raises(UserError, match=f"MASTER_PORT={port}: .*; set another"):
            start(flags)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/some/where/else/by/hand/error.json")
    for _ in range(2):
        start("--max-steps 1 --save-every 1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/x/none_a/attempt_0/0/error.json")
    start("--max-steps 1 --save-every 1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # died before it recorded its start
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/y/none_b/attempt_1/0/error.json")
    start(flags)
    assert run_entries(log)[-1]["step"] == 0 and steps_of(log / "earlier_5") == [1]
    shutil.rmtree(log / "step_000002")
    start(flags)
    assert run_entries(log)[-1]["step"] == 1 and steps_of(log) == [1, 2]


def damage(log):
    (log / "run.json").unlink()
    with open(log / "log.txt", "ab") as file:
        file.write(b"\xff\n1 val none\nstray\n")


def refuse_card(path, text, *args, write_text=Path.write_text, **options):
    if "README.md" in path.name:
        raise FULL
    return write_text(path, text, *args, **options)


BUSY, DENIED = OSError(errno.EAGAIN, "Try again"), OSError(errno.EACCES, "Permission denied")
FAULTS = {
    "no process": lambda log, patch: patch.setattr(subprocess, "Popen", raise_error(BUSY)),
    "run.json deleted, nonsense in log.txt": lambda log, patch: damage(log),
    "log.txt deleted": lambda log, patch: (log / "log.txt").unlink(),
    "no card": lambda log, patch: patch.setattr(Path, "write_text", refuse_card),
    "no metadata": lambda log, patch: patch.setattr(
        huggingface_hub, "ModelCardData", raise_error(ValueError("a bug"))
    ),
    "stays": lambda log, patch: patch.setattr(checkpoints, "remove_folder", raise_error(DENIED)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_secondary_work_does_not_end_a_run(fault, start, at_step, log, monkeypatch, capsys):
    at_step(2, lambda: FAULTS[fault](log, monkeypatch))
    flags = "--max-steps 4 --save-every 1 --keep-checkpoints 1 --eval-every 2"
    assert start(flags, curves=fault == "no process") == 0
    printed = capsys.readouterr()
    assert "done: 4 steps" in printed.out and steps_of(log)[-1] == 4
    assert ("warning: " in printed.err) == (fault in ("no process", "stays"))
    assert run_entries(log)[-1]["finished"] == 4


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"""
REMOTE = """NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error
Last error:
socketPollConnect: connect returned Connection refused"""
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA ran out\nof something")
CAUSES = [  # the error (a text: RuntimeError), --micro-batch-size, what becomes of it, and its line
    ("[gloo] Connection closed by peer [::1]:26247", 0, LostRank, "^another rank has exited"),
    (NCCL, 0, RunError, "^NCCL failed: NCCL error in: .* version 2.27.5 .?Error while creating"),
    (REMOTE, 0, LostRank, "^another rank has exited or cannot be reached .*Connection refused"),
    (OUT_OF_MEMORY, 8, UserError, "^out of memory on cpu: try --micro-batch-size 4, --low-memory"),
    ("can't allocate memory", 0, UserError, "below the one in the line `batch:`, --low-memory"),
    ("CUBLAS_STATUS_ALLOC_FAILED", 0, UserError, "--shard-optimizer on several ranks$"),
    ("The tensor's data is not allocated yet.", 0, RuntimeError, "^The tensor's data is not all"),
    ("a bug", 0, RuntimeError, "^a bug$"),
]


@pytest.mark.parametrize("error, B, kind, line", CAUSES)
def test_an_error_of_torch_gets_its_cause(error, B, kind, line, start, monkeypatch):
    error = RuntimeError(error) if isinstance(error, str) else error
    monkeypatch.setattr(train_gpt2, "train", raise_error(error))
    with pytest.raises(kind, match=line) as info:
        start(f"--micro-batch-size {B}")
    assert info.type is kind
    # Also before the ranks have met.
    monkeypatch.setattr(ranks, "join_process_group", raise_error(error))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind) as info:
        start("")
    assert info.type is kind


NO_RANKS = [
    {"RANK": "0"},
    {"WORLD_SIZE": "2"},
    {"RANK": ""},
    RANK | {"RANK": "a"},
    RANK | {"RANK": "1"},
    RANK | {"MASTER_PORT": "a"},
    {name: value for name, value in RANK.items() if name != "MASTER_PORT"},
]


@pytest.mark.parametrize("env", NO_RANKS)
def test_an_environment_that_names_no_rank_is_one_line(env, monkeypatch, capsys):
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: 1 // 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and f"RANK={env.get('RANK', '')}, " in line
    assert line.startswith("error: ") and "start with torchrun" in line


ABORT = """
import atexit, os
from support.cli import run

class Thread:
    def __del__(self):
        os.abort()

thread = Thread()  # aborts in the clean-up of the interpreter, as threads of gloo may
atexit.register(print, "exit function")
run(lambda: print("done"))
"""
LOST = """
import os, signal
from support import cli, errors, signals

def main():
    os.kill(os.getpid(), signal.SIGTERM)
    raise errors.LostRank("another rank has exited")

signals.collect_stop_signals()
cli.run(main)
"""


@pytest.mark.parametrize(
    "code, world_size, status, output", [(ABORT, 1, 0, "done\nexit function\n"), (LOST, 2, 1, "")]
)
def test_how_a_rank_ends(code, world_size, status, output):
    """Without the interpreter's clean-up; silently if torchrun ends it since another has failed."""
    command, env = [sys.executable, "-c", code], os.environ | RANK
    env["WORLD_SIZE"] = str(world_size)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, output, "")


def test_a_tracker_that_cannot_start_costs_nothing(start, log, monkeypatch, capsys):
    """And --resume says it if there are only checkpoints of earlier runs."""
    start("--max-steps 1 --save-every 1")
    before = {path: path.read_bytes() for path in log.rglob("*") if path.is_file()}
    no_account = SimpleNamespace(init=raise_error(OSError("no account")))
    board = SimpleNamespace(SummaryWriter=raise_error(AssertionError("after wandb")))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    for module, message in ((None, "--wandb: not installed; `pip"), (no_account, "no account")):
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(UserError, match=message):
            start("--max-steps 1 --save-every 1 --wandb --tensorboard")
    assert before == {path: path.read_bytes() for path in log.rglob("*") if path.is_file()}
    start("--max-steps 1")
    assert "earlier_*" not in capsys.readouterr().out
    start("--max-steps 1 --resume")
    assert "log/: no checkpoint but those of earlier runs in earlier_*/" in capsys.readouterr().out
    (log / "earlier_1/step_000001").rename(log / "step_000001")
    start("--max-steps 2 --resume")
    assert "earlier_*" not in capsys.readouterr().out


def test_tensorboard_has_what_the_log_has(start, log, monkeypatch):
    """Also of the step of a checkpoint, whose validation loss isn't computed again."""
    board = {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            for step, stream in list(board):
                if step >= purge_step:
                    del board[step, stream]

        def add_scalar(self, stream, value, step):
            assert (step, stream) not in board, "two points at one step"
            board[step, stream] = pytest.approx(value, abs=0.06)  # the log rounds

    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    start("--tensorboard --save-every 2 --max-steps 3 --eval-every 2")
    shutil.rmtree(log / "step_000003")
    start("--tensorboard --save-every 2 --max-steps 4 --eval-every 0 --resume")
    lines = log_lines(log / "log.txt")
    assert len(lines) == 2 * 2 + 4 * 6
    assert {(step, stream): float(value) for step, stream, value in lines} == board


RUNS = {  # log.txt, and the training losses of its last run
    "0 train 1\n1 train 2\n0 train 3\n1 train 4\n0 train 5\n1 train 6\n": [5, 6],
    "0 train 1\n0 lr 0\n0 train 3\n0 lr 0\n1 train 4\n": [3, 4],
    "0 train 1\n0 val 2\n1 train 3\n1 val 4\n1 lr 1\n": [1, 3],
    "2 train 1\n1 val 2\n1 train 3\n2 val 4\n2 train 5\n": [3, 5],
    "": None,
}


@pytest.mark.parametrize("log_txt", RUNS)
def test_where_the_last_run_of_a_log_begins(log_txt, tmp_path):
    (tmp_path / "log.txt").write_text(log_txt)
    assert run_log.read_log(tmp_path).get("train", (None, None))[1] == RUNS[log_txt]


def test_only_evaluations_of_the_step_of_a_checkpoint_stay(tmp_path):
    """What the step itself measured, on a GPU also its mfu, is logged again."""
    log_txt = tmp_path / "log.txt"
    log_txt.write_text(before := "0 train 5\n1 val 4\n1 bpb 2\n1 hella 0.25\n")
    with open(log_txt, "a") as file:
        file.writelines(f"1 {stream} 3\n" for stream in (*run_log.UPDATES, "mfu"))
        file.write("2 val 1\n")
    assert run_log.trim_log(log_txt, 0, 1) == (0, {"val": 4, "bpb": 2, "hella": 0.25})
    assert log_txt.read_text() == before


def test_a_new_run_loses_no_line_after_one_cut_short(start, log):
    start("--max-steps 1")
    lines = log_lines(log / "log.txt")
    for cut in ("8", "8 tra", "8 train", "8 train 10."):
        with open(log / "log.txt", "a") as file:
            file.write(cut)
        start("--max-steps 1 --eval-every 1")
        assert run_entries(log)[-1]["log_lines"] == len(lines)
        steps = [step for step, _, _ in log_lines(log / "log.txt")[len(lines) :]]
        assert steps == [0] * 8 + [1] * 2
        lines = log_lines(log / "log.txt")


def test_a_restart_overwrites_its_log_also_with_an_absolute_init(start, log, tmp_path, monkeypatch):
    """Without a checkpoint; in run.json the path is relative."""
    monkeypatch.chdir(tmp_path)
    GPT(GPTConfig(16, 50257, 1, 2, 16)).save_pretrained("model")
    for folder in (tmp_path / "model", "model", tmp_path / "model"):
        start(f"--init {folder} --max-steps 1 --resume")
    assert len(losses(log)) == 1 and run_entries(log)[-1]["config"]["init"] == "model"
    for folder in (tmp_path / "model", "model"):  # a checkpoint has the path as it was given
        start(f"--init {folder} --max-steps 2 --save-every 2 --resume")
    assert len(losses(log)) == 2


@pytest.mark.parametrize(
    "content", ["{}", "null", "3", '"x"', "[3]", '[{"config": 1}]', "[", "\xff"]
)
def test_a_run_json_of_something_else_is_refused_before_anything_moves(content, start, log):
    (log / "step_000001").mkdir(parents=True)
    (log / "run.json").write_text(content, "latin-1")
    with pytest.raises(UserError, match=r"run\.json: not a list of a run's starts; move it away"):
        start("--max-steps 1")
    assert steps_of(log) == [1] and (log / "run.json").read_text("latin-1") == content


def test_wandb_names_an_extended_run_after_its_first_start(tmp_path, monkeypatch):
    """Also in a new folder, whose first start resumed a copied checkpoint."""
    started, flags = [], {"tensorboard": False, "wandb": True}
    wandb = SimpleNamespace(init=lambda **settings: started.append(settings["id"]))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    starts = [{"started": str(day), "step": 4000 + day, "config": flags} for day in (1, 2)]
    for n in (1, 2):
        start_trackers(tmp_path, starts[:n], starts[n - 1]["step"])
    assert started == [f"{tmp_path.name}-1"] * 2

"""TensorBoard and Weights & Biases, with stand-ins for both: neither is installed."""

import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from support.errors_and_signals import UserError
from tests.conftest import read_log, train


def test_trackers_get_every_stream_until_they_fail(text, tmp_path, monkeypatch, capfd):
    sent, started, scalars = [], [], []

    def init(**settings):
        started.append(settings)
        run_id = settings["id"] or f"new {len(started)}"
        return SimpleNamespace(id=run_id, log=lambda *values, step: sent.append((step, *values)))

    def add_scalar(stream, value, step):
        if step >= 2:
            raise RuntimeError("of any kind")
        scalars.append((stream, value, step))

    wandb = SimpleNamespace(init=init)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    board = SimpleNamespace(SummaryWriter=lambda *_, **__: SimpleNamespace(add_scalar=add_scalar))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    args = ["--wandb --tensorboard --save-every 1 --eval-every 2 --data", text]
    args += ["--log-dir", tmp_path / "log", "--max-steps"]
    train(*args, 2)
    train(*args, 2, "--resume --no-wandb --no-tensorboard")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    train(*args, 3, "--resume")
    assert [settings["id"] for settings in started] == [None, "new 1"]  # one run
    assert started[1]["resume"] == "allow" and started[0]["name"] == "log"
    assert [settings["project"] for settings in started] == ["gpt2-repro", "mine"]
    assert [settings["config"]["max_steps"] for settings in started] == [2, 3]
    expected = [(stream, value, step) for step, values in sent for stream, value in values.items()]
    assert scalars == [entry for entry in expected if entry[2] < 2] != expected
    # Once in each start, though the second sent more after that.
    assert capfd.readouterr().err.count("--tensorboard") == 2
    assert {"val", "train", "lr", "norm", "ms"} <= {entry[0] for entry in expected}


def test_a_tracker_that_cannot_start_costs_nothing(text, tmp_path, monkeypatch):
    """Not installed, or without an account: the run can still be resumed."""
    log = tmp_path / "log"
    args = ["--save-every 1 --max-steps 1 --data", text, "--log-dir"]
    train(*args, log)
    before = {path.relative_to(log): path.read_bytes() for path in log.rglob("*.*")}
    no_account = SimpleNamespace(init=mock.Mock(side_effect=OSError("no account")))
    board = SimpleNamespace(SummaryWriter=mock.Mock(side_effect=AssertionError("after wandb")))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    for module, message in ((None, "--wandb.*pip install"), (no_account, "no account")):
        monkeypatch.setitem(sys.modules, "wandb", module)
        for folder in (tmp_path / "new", log):
            with pytest.raises(UserError, match=message):
                train(*args, folder, "--resume --wandb --tensorboard")
    assert before == {path.relative_to(log): path.read_bytes() for path in log.rglob("*.*")}
    assert not (tmp_path / "new").exists()


def test_tensorboard_has_what_the_log_has(text, tmp_path, monkeypatch):
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
    log = tmp_path / "log"
    args = ["--tensorboard --save-every 2 --data", text, "--log-dir", log]
    train(*args, "--max-steps 3 --eval-every 2")
    shutil.rmtree(log / "step_000003")
    train(*args, "--max-steps 4 --eval-every 0 --resume")
    lines = [line.split() for line in read_log(log)]
    assert len(lines) >= 2 * 2 + 4 * 6  # two evaluations and four steps
    assert {(int(step), stream): float(value) for step, stream, value in lines} == board

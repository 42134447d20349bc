"""bench/recipes/sweep.py: recipes compared by length; trackers."""

import importlib.util
import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, train

SPEC = importlib.util.spec_from_file_location("sweep", ROOT / "bench/recipes/sweep.py")
sweep = sys.modules["sweep"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sweep)

SWEEP = """
baselines = ["default"]
[common]
preset = "shakespeare"
data = "{text}"
n_layer = 1
n_head = 1
n_embd = 8
seq_len = 16
total_batch_size = 32
eval_every = 2
eval_tokens = 64
sample_every = 0
save_every = 2
warmup_steps = 0.5
warmdown_steps = 0.5
lengths = {{ "4" = [1] }}
[recipes.default]
[recipes.muon]
shuffle = false
lengths = {{ "2" = [1] }}
"""


def test_a_sweep_trains_what_is_missing_and_compares(text, tmp_path, capsys):
    path, out, logs = tmp_path / "small.toml", tmp_path / "out", tmp_path / "logs/small"
    path.write_text("[recipes.a]\nlengths.x = [1]")
    with pytest.raises(sweep.UserError, match="needs lengths"):
        sweep.main([str(path)])
    path.write_text(SWEEP.format(text=text))
    sweep.main([str(path), "--out", str(out)])
    config = json.loads((out / "small/default-4-1/run.json").read_text())[-1]["config"]
    assert (config["max_steps"], config["warmup_steps"], config["warmdown_steps"]) == (4, 2, 2)
    assert not json.loads((out / "small/muon-2-1/run.json").read_text())[-1]["config"]["shuffle"]
    shutil.rmtree(out)
    path.write_text(path.read_text().replace('"2" = [1]', '"2" = [1], "4" = [1]'))
    path.write_text(path.read_text().replace('lengths = { "4"', 'lengths = { "2" = [1, 2], "4"'))
    losses = {"default-2-1": 9.0, "default-2-2": 7.0, "default-4-1": 6.0}
    losses |= {"muon-2-1": 7.0, "muon-4-1": 5.0}
    for name, loss in losses.items():
        (logs / f"{name}.txt").write_text(f"0 val 10.0\n2 val {loss}\n")
    capsys.readouterr()
    sweep.main([str(path), "--out", str(out)])
    rows = capsys.readouterr().out.splitlines()
    assert "| default | 8.000 ± 1.414 (2) | 6.000 (1) |" in rows
    assert "| muon | 7.000 (1) | 5.000 (1) |" in rows and "| muon | 0.707 (1) |" in rows
    assert not out.exists()
    assert (tmp_path / "small.png").stat().st_size > 10_000


def test_tokens_to_the_same_loss():
    a = {100: {1: 6.0, 2: 7.0}, 400: {1: 3.0, 2: 4.0}, 1600: {1: 2.0}}
    b = {400: {1: 4.5, 2: 7.0, 3: 1.0}, 1600: {1: 2.5, 2: 1.0}}
    assert sweep.shares({"a": a, "b": b}, "a", "b") == {400: {1: 0.5, 2: 0.25}, 1600: {1: 0.5}}


def test_trackers_get_every_stream_until_they_fail(text, tmp_path, monkeypatch, capfd):
    sent, started, scalars = [], [], []

    def init(**settings):
        started.append(settings)
        return SimpleNamespace(log=lambda values, step: sent.append((step, values)))

    def add_scalar(stream, value, step):
        if step == 3:
            raise OSError("no space left")
        scalars.append((stream, value, step))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = SimpleNamespace(SummaryWriter=lambda *_, **__: SimpleNamespace(add_scalar=add_scalar))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    args = ["--wandb --tensorboard --save-every 1 --eval-every 2 --data", text]
    args += ["--log-dir", tmp_path, "--max-steps"]
    train(*args, 2)
    train(*args, 3, "--resume")
    assert [settings["id"] for settings in started] == [started[0]["id"]] * 2
    assert started[1]["resume"] == "allow"
    assert [step for step, values in sent if "train" in values] == [0, 1, 2]
    expected = [(stream, value, step) for step, values in sent for stream, value in values.items()]
    assert scalars == [entry for entry in expected if entry[2] < 3] != expected
    assert capfd.readouterr().err.count("--tensorboard: nothing more is sent (no space left)") == 1
    assert {"val", "train", "lr", "norm", "ms"} <= {entry[0] for entry in expected}

"""bench/recipes/sweep.py: recipes over seeds, a table and a picture; what a run sends to other trackers."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from support.cli import InputError
from tests.conftest import ROOT, train

SPEC = importlib.util.spec_from_file_location("sweep", ROOT / "bench/recipes/sweep.py")
sweep = sys.modules["sweep"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sweep)

COMMON = """
seeds = [1]
[common]
preset = "shakespeare"
data = "{text}"
n_layer = 1
n_head = 1
n_embd = 8
seq_len = 16
total_batch_size = 32
micro_batch_size = 2
warmup_steps = 1
eval_every = 2
eval_tokens = 64
sample_every = 0
save_every = 2
[recipes.default]
max_steps = 4
[recipes.muon]
max_steps = 2
optimizer = "muon"
shuffle = false
"""

def test_a_sweep_makes_a_table_and_a_picture(text, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(COMMON.format(text=text))
    sweep.main([str(path), "--out", str(tmp_path / "out"), "--jobs", "2"])
    table = (tmp_path / "out" / "small" / "table.md").read_text().splitlines()
    assert [row.split(" | ")[:3] for row in table[2:]] == [["| default", "1", "128"], ["| muon", "1", "64"]]
    assert (tmp_path / "out" / "small" / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "small" / "default" / "1" / "step_000004").is_dir()

@pytest.mark.parametrize("content, message", [
    ("seeds = [", "not TOML"),
    ("seeds = [1]\n[common]\n", "needs seeds"),
    ("seeds = [1]\n[recipes.a]\nmax_step = 3\n", "recipe a: max_step is no setting"),
    ("seeds = [1]\n[recipes.a]\nn_embd = 65\n", "not divisible by --n-head"),
])
def test_a_mistake_is_named_before_anything_runs(content, message, tmp_path):
    path = tmp_path / "recipes.toml"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        sweep.main([str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()

def test_tokens_to_reach_lies_between_two_points():
    curve = [(0, 10.0), (100, 6.0), (200, 5.0)]
    assert [sweep.tokens_to_reach(curve, target) for target in (5.5, 4.0, 11.0)] == [150, None, 0]

def test_weights_and_biases_gets_every_stream_also_of_a_resumed_run(text, tmp_path, monkeypatch):
    sent, started = [], []

    def init(**settings):
        started.append(settings)
        return SimpleNamespace(log=lambda values, step: sent.append((step, values)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    args = ["--data", text, "--wandb", "--log-dir", tmp_path / "log", "--save-every", 1, "--eval-every", 2]
    assert train(*args, "--max-steps", 2) == 0
    assert train(*args, "--max-steps", 3, "--resume") == 0
    assert [settings["id"] for settings in started] == [started[0]["id"]] * 2
    assert started[1]["resume"] == "allow"
    assert [step for step, values in sent if "train" in values] == [0, 1, 2]
    assert {"val", "train", "lr", "norm", "ms"} <= {stream for _, values in sent for stream in values}

@pytest.mark.parametrize("name, module", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_tracker_is_named(text, tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"pip install {name}"):
        train("--data", text, f"--{name}", "--log-dir", tmp_path / "log")

def test_tensorboard_gets_every_stream(text, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils import tensorboard

    close = []
    add_scalar = tensorboard.SummaryWriter.add_scalar
    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", lambda self, *args: close.append(self.close)
                        or add_scalar(self, *args))
    assert train("--data", text, "--tensorboard", "--max-steps", 2, "--log-dir", tmp_path) == 0
    close[0]()  # as the end of the process does
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train")] == [0, 1]

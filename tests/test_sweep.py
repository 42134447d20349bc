"""bench/recipes/sweep.py: recipes over seeds; what a run sends to trackers."""

import importlib.util
import sys
from types import SimpleNamespace

from tests.conftest import ROOT, train

SPEC = importlib.util.spec_from_file_location("sweep", ROOT / "bench/recipes/sweep.py")
sweep = sys.modules["sweep"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sweep)

SWEEP = """
seeds = [1]
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
[recipes.default]
max_steps = 4
[recipes.muon]
max_steps = 2
shuffle = false
"""


def test_a_sweep_makes_a_table_and_a_picture(text, tmp_path):
    path, out = tmp_path / "small.toml", tmp_path / "out"
    path.write_text(SWEEP.format(text=text))
    sweep.main([str(path), "--out", str(out)])
    table = (out / "small/table.md").read_text().splitlines()
    for row, start in zip(table[2:], ("| default | 1 | 128 |", "| muon | 1 | 64 |"), strict=True):
        assert row.startswith(start)
    assert (out / "small/curves.png").stat().st_size > 10_000
    curve = [(0, 10.0), (100, 6.0), (200, 5.0)]  # the target lies between two points
    assert [sweep.tokens_to_reach(curve, target) for target in (5.5, 4.0, 11.0)] == [150, None, 0]


def test_trackers_get_every_stream_also_of_a_resumed_run(text, tmp_path, monkeypatch):
    sent, started, scalars = [], [], []

    def init(**settings):
        started.append(settings)
        return SimpleNamespace(log=lambda values, step: sent.append((step, values)))

    def writer(*args, **options):
        return SimpleNamespace(add_scalar=lambda *args: scalars.append(args))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    args = ["--wandb --tensorboard --save-every 1 --eval-every 2 --data", text]
    args += ["--log-dir", tmp_path, "--max-steps"]
    train(*args, 2)
    train(*args, 3, "--resume")
    assert [settings["id"] for settings in started] == [started[0]["id"]] * 2
    assert started[1]["resume"] == "allow"
    assert [step for step, values in sent if "train" in values] == [0, 1, 2]
    expected = [(stream, value, step) for step, values in sent for stream, value in values.items()]
    assert scalars == expected
    assert {"val", "train", "lr", "norm", "ms"} <= {stream for stream, _, _ in expected}

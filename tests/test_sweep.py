"""bench/recipes/sweep.py: recipes compared by length; trackers."""

import importlib.util
import json
import shutil
import statistics
import subprocess
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
[recipes.fork]
script = "{fork}"
z_loss = 0.5
lengths = {{ "3" = [1] }}
"""


@pytest.fixture
def fork(tmp_path):
    """A folder with another train_gpt2.py, that has a flag more and another support/.

    It records what it is called with, and trains nothing."""
    folder = tmp_path / "a fork"
    (folder / "support").mkdir(parents=True)
    (folder / "support/cli.py").write_text("def run(main): main()")
    (folder / "train_gpt2.py").write_text(FORK)
    return folder


FORK = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from support.cli import run

def read_config(flags):
    assert "--z-loss" in flags
    return SimpleNamespace(total_batch_size=48)

def main():
    read_config(sys.argv)
    folder = Path(sys.argv[sys.argv.index("--log-dir") + 1])
    (folder / "log.txt").write_text("0 val 9.0\\n1 val 3.0\\n2 val 6.5\\n")
    (folder / "flags.json").write_text(json.dumps(sys.argv))

if __name__ == "__main__":
    run(main)
"""


def run_here(command, run=subprocess.run, **options):
    """Runs our own script in this process, a fork's in one of its own."""
    if command[:2] == [sys.executable, sweep.SCRIPT]:
        return SimpleNamespace(returncode=train(*command[2:]))
    return run(command, **options)


def test_a_sweep_trains_what_is_missing_and_compares(text, fork, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep.subprocess, "run", run_here)
    path, out, logs = tmp_path / "small.toml", tmp_path / "out", tmp_path / "logs/small"
    path.write_text("[recipes.a]\nlengths.x = [1]")
    with pytest.raises(sweep.UserError, match="needs lengths"):
        sweep.main([str(path)])
    path.write_text(SWEEP.format(text=text, fork=fork))
    sweep.main([str(path), "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"3 runs, of which 3 are missing\nrun 1 of 3: {out}/small/default-4-1/"
    )
    assert "\n0 min 0 s left\nFinal validation loss" in printed
    assert "| fork |  |  | 6.500 (1) |" in printed.splitlines()  # 144 tokens; the last loss
    config = json.loads((out / "small/default-4-1/run.json").read_text())[-1]["config"]
    assert (config["max_steps"], config["warmup_steps"], config["warmdown_steps"]) == (4, 2, 2)
    assert not json.loads((out / "small/muon-2-1/run.json").read_text())[-1]["config"]["shuffle"]
    flags = json.loads((out / "small/fork-3-1/flags.json").read_text())
    assert flags[0] == str(fork / "train_gpt2.py") and flags[flags.index("--seed") + 1] == "1"
    shutil.rmtree(out)
    path.write_text(path.read_text().replace('"2" = [1]', '"2" = [1], "4" = [1]'))
    path.write_text(path.read_text().replace('lengths = { "4"', 'lengths = { "2" = [1, 2], "4"'))
    losses = {"default-2-1": 9.0, "default-2-2": 7.0, "default-4-1": 6.0}
    losses |= {"muon-2-1": 7.0, "muon-4-1": 5.0}
    for name, loss in losses.items():
        (logs / f"{name}.txt").write_text(f"0 val 10.0\n1 val 1.0\n2 val {loss}\n")
    sweep.main([str(path), "--out", str(out)])
    rows = capsys.readouterr().out.splitlines()
    assert "| default | 8.000 ± 1.414 (2) | 6.000 (1) |  |" in rows
    assert "| muon | 7.000 (1) | 5.000 (1) |  |" in rows and "| muon | 0.707 (1) |" in rows
    assert "| muon | -2.000 (1) | -1.000 (1) |" in rows
    assert not out.exists()
    assert (tmp_path / "small.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "a fork",
            "nowhere",
            r"recipe fork: script \S+/nowhere: needs a train_gpt2\.py with a supp",
        ),
        ("a fork", "text.txt", r"recipe fork: script \S+/text\.txt: needs a train_gpt2\.py with"),
        ("z_loss = 0.5", "", r"/a fork/train_gpt2\.py: does not take these settings: --preset"),
    ],
)
def test_mistakes_of_a_fork_show_before_any_run(old, new, message, text, fork, tmp_path):
    (tmp_path / "small.toml").write_text(SWEEP.format(text=text, fork=fork).replace(old, new))
    with pytest.raises(sweep.UserError, match=message):
        sweep.main([str(tmp_path / "small.toml"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_differences_are_paired_by_seed():
    a = {100: {1: 6.0, 2: 7.0}, 400: {1: 3.0}, 800: {4: 9.0}}
    b = {100: {2: 6.5, 1: 6.25, 3: 9.0}, 800: {5: 1.0}, 1600: {1: 2.0}}
    assert sweep.differences({"a": a, "b": b}, "a", "b") == {100: {1: -0.25, 2: 0.5}}


def test_intervals_are_students():
    """From tables of t: 12.706, 4.303, 2.262, 2.228 and 2.086 for 1, 2, 9, 10 and 20 degrees."""
    assert sweep.spread([3.0], interval=True) == "3.000 (1)"
    assert sweep.spread([1, 2, 3]) == "2.000 ± 1.000 (3)"
    for n, t in ((2, 12.706), (3, 4.303), (10, 2.262), (11, 2.228), (21, 2.086)):
        values = [1000.0 * (i % 2) for i in range(n)]
        _, _, width, _ = sweep.spread(values, interval=True).split()
        expected = t * statistics.stdev(values) / n**0.5
        assert float(width) == pytest.approx(expected, rel=2e-3)


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

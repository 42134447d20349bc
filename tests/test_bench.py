"""bench.py on a tiny model."""

import contextlib
import io
import json
import re
import runpy
import statistics
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.profiler import profile

import bench
from support import devices
from support.errors import UserError
from tests.conftest import RANK, ROOT

TINY = "-- --n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --total-batch-size 64 --device cpu"
TINY = [*TINY.split(), "--micro-batch-size", "2"]  # two micro-steps
RUNGS = ["float32", "flash", "padded", "fused", "ours"]  # on a CPU


def test_the_ladder_measures_every_rung_on_the_same_batches(tmp_path, monkeypatch, capsys):
    original = subprocess.run

    def run(command, **options):  # bench.py in this process
        if command[1] != bench.__file__:
            return original(command, **options)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = bench.main(command[2:])
        return subprocess.CompletedProcess(command, status, output.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda *args, **more: figures.append(args[0]) or savefig(*args, **more)
    )
    assert bench.main(["--ladder", "--steps=2", "--json=l.json", *TINY]) == 0
    rows = json.loads((tmp_path / "l.json").read_text())
    assert [row["rung"] for row in rows] == RUNGS
    table = capsys.readouterr().out.splitlines()[2:]
    for row, line in zip(rows, table, strict=True):
        assert row["steps"] == 2 and row["tokens"] == 64
        assert row["tok_per_sec"] == pytest.approx(1e3 * 64 / row["ms"])
        assert f"| {row['ms']:,.1f} |" in line
    assert (tmp_path / "bench_ladder.png").stat().st_size > 5000
    bars = [bar.get_width() for bar in figures[0].axes[0].patches]
    assert bars == [row["ms"] for row in rows]


def test_figures_are_medians_and_quartiles_after_the_warm_up():
    ms = [50.0, 10.0, 40.0, 20.0, 30.0, 90.0, 60.0, 70.0]
    row = bench.summary("ours", "cpu", 512, [1e6] * 10 + ms)
    low, median, high = statistics.quantiles(ms, method="inclusive")
    assert (row["steps"], row["ms"], row["ms_quartiles"]) == (8, median, [low, high])
    assert row["tok_per_sec"] == pytest.approx(512 / median * 1e3)
    text = bench.columns(row | {"peak_memory": 1_234_567_890})
    assert text["quartiles"] == f"{low:.1f} to {high:.1f}" and text["peak memory"] == "1.23 GB"


def test_the_machines_ceilings(monkeypatch):
    """A copy reads and writes each byte."""
    moved = []

    class Timer:
        def __init__(self, statement, globals, num_threads):
            before = globals["a"].fill_(3).nbytes
            exec(statement, globals)
            assert (globals["b"] == 3).all() and globals["b"].nbytes == before
            moved.append(2 * before)

        def blocked_autorange(self):
            return SimpleNamespace(median=0.01)

    monkeypatch.setattr(bench, "Timer", Timer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # an earlier test may
    monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n: dtype.itemsize * 1e12)
    found = bench.measure_machine()
    assert found["memory copy"] == f"{moved[0] / 1e9 / 0.01:,.1f} GB/s, read plus written"
    assert found["torch.float32 matmul"] == "4 TFLOP/s, 1024 x 1024"
    assert found["torch.bfloat16 matmul"] == "2 TFLOP/s, 1024 x 1024"


def test_a_rung_that_fails_is_a_line_of_the_table(tmp_path, monkeypatch, capsys):
    failing = ["ours"]

    def run(command, **_):
        rung = command[command.index("--rung") + 1]
        row = json.dumps(bench.summary(rung, "cpu", 64, [1.0] * 12))
        error = "a warning\nerror: out of memory\n"
        return subprocess.CompletedProcess([], 2 * (rung in failing), row, error)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    assert bench.main(["--ladder", *TINY]) == 1
    out = capsys.readouterr().out
    assert "| ours | error: out of memory |" in out and "| fused | fused AdamW | 1.0 |" in out
    assert [path.name for path in tmp_path.iterdir()] == ["bench_ladder.png"]
    failing += RUNGS
    (tmp_path / "bench_ladder.png").unlink()
    assert bench.main(["--ladder", *TINY]) == 1
    assert not list(tmp_path.iterdir())


def test_each_rung_adds_what_it_says(monkeypatch, capsys):
    """By the operations that PyTorch's profiler sees."""
    monkeypatch.setattr(bench, "WARMUP", 0)
    seen = {}
    for rung in RUNGS[:-1]:
        with profile(record_shapes=True) as profiler:
            bench.main(["--rung", rung, "--steps=1", *TINY])
        assert json.loads(capsys.readouterr().out)["rung"] == rung
        names = [event.name for event in profiler.events()]
        assert names.count("aten::nll_loss_forward") == 2  # one step of two micro-steps
        shapes = {size for e in profiler.events() for shape in e.input_shapes for size in shape}
        flash = "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        seen[rung] = (flash, 50_304 in shapes, "aten::_fused_adamw_" in names)
    assert [*map(sum, seen.values())] == [0, 1, 2, 3] and seen["padded"] == (True, True, False)


def test_a_rung_times_whole_steps(monkeypatch, capsys):
    """By a clock that each micro-step's batch moves by a second."""
    next_batch, clock = bench.DataLoaderLite.next_batch, [0.0]

    def slow(self):
        clock[0] += 1
        return next_batch(self)

    monkeypatch.setattr(bench.DataLoaderLite, "next_batch", slow)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    bench.main(["--rung", "fused", "--steps=1", *TINY])
    row = json.loads(capsys.readouterr().out)
    assert (row["ms"], row["tok_per_sec"]) == (2000, 32)


def test_the_default_is_train_gpt2_as_it_comes(tmp_path, monkeypatch, capsys):
    """Its figure is the median of its own lines, after ten steps."""
    monkeypatch.chdir(tmp_path)
    assert bench.main(["--steps", "3", *TINY, "--plan", "--log-dir", "log"]) == 0
    out = capsys.readouterr().out
    ms = [int(found) for found in re.findall(r"step +\d+/13 loss .* (\d+) ms .* mfu", out)]
    found = float(re.search(r"ms per step: ([\d.]+)", out)[1])
    assert len(ms) == 13 and found == pytest.approx(statistics.median(ms[-3:]), abs=0.6)
    assert float(re.search(r"tok/s: ([\d,]+)", out)[1].replace(",", "")) == pytest.approx(
        64e3 / found, rel=0.1
    )
    mfu = [float(found) for found in re.findall(r"mfu ([\d.]+)%", out)[-3:]]
    assert float(re.search(r"MFU: ([\d.]+)%", out)[1]) == pytest.approx(
        statistics.median(mfu), abs=0.11
    )
    assert re.search(r"peak memory: (0\.[1-9]|[1-9])", out) and "memory copy: " in out
    assert not list(tmp_path.iterdir())  # the run leaves nothing
    assert "validation" not in out and "sample" not in out


@pytest.mark.parametrize("flags", ["--steps 0", "--rung bf16", "--rung compile"])
def test_wrong_input_is_one_line(flags):
    with pytest.raises(UserError, match=flags.split()[0]):
        bench.main([*flags.split(), *TINY])


def test_a_ladder_is_of_one_device(monkeypatch):
    for name, value in (RANK | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    for flags in (["--ladder"], ["--rung", "ours"]):
        with pytest.raises(UserError, match="without torchrun"):
            bench.main([*flags, *TINY])


def test_the_comparison_with_build_nanogpt_starts(monkeypatch):
    path = str(ROOT / "bench/fidelity/compare.py")
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(path, run_name="__main__")
    ours = np.array([[5.0, 4.0, 3.0, 2.0], [1.0, 2.0, 4.0, 8.0]])  # losses, norms
    theirs = ours + np.array([[0, 0.01, 0, -0.5], [0.25, 0, 1.0, 0]])
    assert runpy.run_path(path)["difference"](ours, theirs) == (
        "losses differ by at most 1.0e-02 in the first 2 steps, 5.0e-01 in all; "
        "norms 2.0e-01 and 2.0e-01 (relative)"
    )

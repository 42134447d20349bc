"""bench.py on a tiny model."""

import json
import runpy
import statistics
import sys
from pathlib import Path

import pytest
from torch.profiler import profile

import bench
from support.errors_and_signals import UserError
from tests.conftest import RANK, ROOT, numbers, posix

TINY = "-- --n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --total-batch-size 64 --device cpu"
TINY = [*TINY.split(), "--micro-batch-size", "2"]  # two micro-steps


@pytest.fixture
def measure(capsys):
    """measure(rung) returns the JSON that `python bench.py --rung RUNG` prints."""

    def run(rung):
        capsys.readouterr()
        assert bench.main(["--rung", rung, "--steps=1", *TINY]) == 0
        return json.loads(capsys.readouterr().out)

    return run


PYTHON = """#!/bin/sh
while [ "$1" != --rung ]; do shift; done
cat "$2".json 2> /dev/null || { echo a warning; echo "error: $2 broke"; exit 2; } >&2
"""


@posix
def test_the_ladder_is_a_table_of_its_rungs_and_a_picture(tmp_path, monkeypatch, capsys, measure):
    """Each rung is a process, here of a script that prints a measurement, or fails."""
    monkeypatch.chdir(tmp_path)
    Path("python").write_text(PYTHON)
    Path("python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    row = measure("float32") | {"ms_quartiles": [1234.0, 1240.0]}
    rungs = ["float32", "flash", "padded", "fused", "malloc", "ours"]  # on a CPU
    for i, rung in enumerate(rungs[:-1]):
        Path(f"{rung}.json").write_text(json.dumps(row | {"rung": rung, "ms": 1234.5 + i}))
    assert bench.main(["--ladder", "--json=l.json", *TINY]) == 1, "a rung failed"
    out = capsys.readouterr().out
    assert [row["rung"] for row in json.loads(Path("l.json").read_text())] == rungs
    for i, line in enumerate(out.splitlines()[-7:-2]):
        assert line.startswith(f"| {rungs[i]} |") and f"{1234.5 + i:,.1f}" in line
    assert "| ours | error: ours broke |" in out and out.endswith("tf32, bf16, compile\n")
    assert Path("bench_ladder.png").stat().st_size > 5000


def test_each_rung_adds_what_it_says(measure, monkeypatch):
    """By the operations that PyTorch's profiler sees, without steps of warm-up."""
    monkeypatch.setattr(bench, "WARMUP", 0)
    seen = {}
    for rung in ("float32", "flash", "padded", "fused"):
        with profile(record_shapes=True) as profiler:
            assert measure(rung)["rung"] == rung
        names = [event.name for event in profiler.events()]
        assert names.count("aten::nll_loss_forward") == 2  # one step of two micro-steps
        shapes = {size for e in profiler.events() for shape in e.input_shapes for size in shape}
        flash = "aten::_scaled_dot_product_flash_attention_for_cpu" in names
        seen[rung] = [flash, 50_304 in shapes, "aten::_fused_adamw_" in names]
    assert [*map(sum, seen.values())] == [0, 1, 2, 3] and seen["padded"] == [True, True, False]


def test_the_default_is_train_gpt2_as_it_comes(tmp_path, monkeypatch, capsys):
    """Its figures are medians and quartiles of its own lines, after ten steps."""
    monkeypatch.chdir(tmp_path)
    flags = ["--steps", "5", "--json", "found.json"]
    assert bench.main([*flags, *TINY, "--plan", "--log-dir", "log"]) == 0
    out = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads((tmp_path / "found.json").read_text())
    steps = [numbers(line) for line in out.splitlines() if line.startswith("step ")]
    assert [row[:2] for row in steps] == [[step, 15] for step in range(15)]  # none is evaluated
    ms, mfu = ([row[i] for row in steps[10:]] for i in (5, 7))
    quartiles = statistics.quantiles(ms, method="inclusive")
    low, high = found["ms_quartiles"]
    assert [low, found["ms"], high] == pytest.approx(quartiles, abs=0.51)
    assert found["tok_per_sec"] == pytest.approx(64e3 / found["ms"])
    assert 100 * found["mfu"] == pytest.approx(statistics.median(mfu), abs=0.06)
    assert f"{found['ms']:,.1f}" in out and "GB/s" in out and "TFLOP/s" in out


def test_wrong_input_is_one_line(monkeypatch):
    for flags in ("--steps 0", "--rung bf16", "--rung compile"):
        with pytest.raises(UserError, match=flags.split()[0]):
            bench.main([*flags.split(), *TINY])
    monkeypatch.setattr(sys, "argv", ["bench.py", "--rung", "tf32"])
    with pytest.raises(UserError, match="--rung tf32"):  # without flags of train_gpt2.py
        bench.main()
    with pytest.raises(UserError, match="--json none"):
        bench.main(["--json=none/found.json", *TINY, "--data", "nowhere.txt"])
    with pytest.raises(UserError, match="nowhere"):  # the flags after -- come last
        bench.main(["--rung", "ours", *TINY, "--data", "nowhere.txt"])
    for name, value in (RANK | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun"):
        bench.main(["--ladder", *TINY])


def test_the_comparison_with_build_nanogpt_starts(monkeypatch):
    path = str(ROOT / "bench/fidelity/fidelity.py")
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(path, run_name="__main__")

"""What a run prints agrees with its log, and with a clock."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from support import console
from support.console import Meter, duration, print_cost
from tests.conftest import losses, train
from train_gpt2 import Ranks

resource = pytest.importorskip("resource", reason="Windows has none")

NUMBERS = (
    r"step +(\d+)/3 loss ([\d.]+) lr (\S+) norm ([\d.]+) (\d+) ms ([\d,]+) tok/s mfu ([\d.]+)%"
)


def test_each_step_is_a_line_of_what_the_log_has(text, tmp_path, capsys):
    train("--max-steps 3 --eval-every 2 --save-every 3 --data", text, "--log-dir", tmp_path / "log")
    out = capsys.readouterr().out
    rows = [[float(n.replace(",", "")) for n in row] for row in re.findall(NUMBERS, out)]
    steps, *columns = zip(*rows, strict=True)
    assert steps == (0, 1, 2)
    digits = {"train": 5e-5, "lr": 5e-6, "norm": 5e-4, "ms": 0.51, "tok_per_sec": 0.6}
    for column, (stream, tolerance) in zip(columns, digits.items(), strict=False):
        expected = pytest.approx(losses(tmp_path / "log", stream), abs=tolerance)
        assert list(column) == expected, stream
    mfu = [100 * value for value in losses(tmp_path / "log", "mfu")]
    assert list(columns[-1]) == pytest.approx(mfu, abs=0.06)
    ms, rates = losses(tmp_path / "log", "ms"), losses(tmp_path / "log", "tok_per_sec")
    assert rates == pytest.approx([128 / n * 1e3 for n in ms], rel=1e-2)
    found = re.findall(r"step +(\d) validation loss ([\d.]+)\n", out)
    for (step, loss), value in zip(found, losses(tmp_path / "log", "val"), strict=True):
        assert float(loss) == pytest.approx(value, abs=5e-5) and step in "023"
    assert "speed: MFU 100 % = 1 TFLOP/s per device (measured, 1024 x 1024 product)\n" in out
    assert "steps: 3 of 128 tokens, " in out
    assert f"log and checkpoints: {tmp_path / 'log'}/\n" in out


def test_the_time_left_counts_evaluations_but_not_the_first_step(monkeypatch):
    """The first step compiles: a minute. Then two steps of a second, and an evaluation of two."""
    clock = [1000.0]
    monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    ranks = Ranks(0, 1, torch.device("cpu"))
    meter = Meter(100, 10**6, ranks, torch.float32, elapsed=50.0)
    left = []
    for evaluation, seconds in ((0, 60), (2, 1), (0, 1)):
        clock[0] += evaluation
        began = clock[0]
        clock[0] += seconds
        meter.end_step(began, steps_left=5)
        left.append(meter.left)
    assert left == [5 * 60, 5 * 3, 5 * 2] and meter.elapsed == 50 + 62
    assert meter.speed == {"tok_per_sec": 100, "mfu": 1e8 / 1e12, "ms": 1000}
    assert meter.line(1.0, 1.0, 1.0).endswith("0 min 10 s left")


def test_what_a_run_took(capsys):
    print_cost(1234, 150.0)
    done, memory = capsys.readouterr().out.splitlines()
    assert done == "done: 1,234 steps, 2.5 minutes of training"
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # Linux has kibibytes
    if sys.platform == "linux" and not torch.cuda.is_initialized():
        assert float(re.search("peak memory: (.+) GB", memory)[1]) == pytest.approx(peak, abs=0.02)


def test_durations():
    seconds = {40: "0 min 40 s", 3599: "59 min 59 s", 68_880: "19 h 8 min", 302_400: "3.5 days"}
    assert {n: duration(n) for n in seconds} == seconds

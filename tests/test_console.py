"""What a run prints agrees with its log, with a clock and with the system."""

import math
import sys
import time

import pytest
import torch

from tests.conftest import losses, numbers, train

resource = pytest.importorskip("resource", reason="Windows has none")


def test_what_a_run_prints_agrees_with_its_log(text, tmp_path, capsys, at_step):
    log = tmp_path / "log"
    for step in (2, 3, 4):
        at_step(step, lambda: time.sleep(0.25))
    began = time.perf_counter()
    flags = "--max-steps 5 --eval-every 2 --save-every 5"
    train(flags, "--data", text, "--log-dir", log)
    seconds = time.perf_counter() - began
    out = capsys.readouterr().out.replace(str(log), "LOG")
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    updates = [line for line in lines if "/5 " in line]
    steps, totals, *columns = zip(*(numbers(line)[:8] for line in updates), strict=True)
    assert steps == (0, 1, 2, 3, 4) and set(totals) == {5}
    digits = {"train": 5e-5, "lr": 5.1e-6, "norm": 5e-4, "ms": 0.51, "tok_per_sec": 0.6}
    for column, (stream, tolerance) in zip(columns, digits.items(), strict=False):
        assert list(column) == pytest.approx(losses(log, stream), abs=tolerance), stream
    mfu = [100 * value for value in losses(log, "mfu")]
    assert list(columns[-1]) == pytest.approx(mfu, abs=0.06)
    ms, rates = losses(log, "ms"), losses(log, "tok_per_sec")
    assert rates == pytest.approx([128 / n * 1e3 for n in ms], rel=1e-2)
    assert min(ms[2:]) > 250 and sum(ms) < 1e3 * seconds
    left = [numbers(line)[8:] for line in updates]  # minutes and seconds until the end
    assert left[0] == [] and left[-1] == [0, 0]
    assert all(len(numbers_left) == 2 for numbers_left in left[1:])
    evaluations = [numbers(line) for line in lines if line not in updates]
    # In this text a character is a byte.
    per_character = [math.log(2) * bpb for bpb in losses(log, "bpb")]
    expected = zip((0, 2, 4, 5), losses(log, "val"), per_character, strict=True)
    assert evaluations == [pytest.approx(values, abs=6e-5) for values in expected]
    assert "LOG/" in out and "LOG/step_000005" in out
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # Linux has kibibytes
    if sys.platform == "linux" and not torch.cuda.is_initialized():
        (memory,) = [numbers(line) for line in out.splitlines() if line.endswith(" GB")]
        assert memory == [pytest.approx(peak, abs=0.02)]

"""bench.py on a tiny model."""

import contextlib
import io
import json
import runpy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import bench
import train_gpt2
from bench import PADDED
from support.errors import RunError, UserError
from tests.conftest import ROOT
from train_gpt2 import GPT, GPTConfig

SHAPE = "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --micro-batch-size 2 --device cpu"
TINY = ["--", *SHAPE.split(), "--data", str(ROOT / "input.txt")]
STEP = {"B": 2, "T": 16, "ms": 1234.5, "ms_quartiles": [9.0, 12.0], "tok_per_sec": 3200.0}
STEP |= {"mfu": 0.25, "steps": 5, "parameters": 1000, "flops_per_token": 6000, "world_size": 1}
STEP |= {"mfu_of": "1 TFLOP/s", "peak_memory": None, "parts_ms": {"MLP": 6.0, "waiting": 2.0}}
STEP["kernels"] = [("gemm<a>", 24.0, 5.25), ("softmax", 0.5, 1.5)]


def test_ladder(tmp_path, monkeypatch, capsys):
    def run_process(_, *args):  # in this process
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            bench.main([*map(str, args)])
        return output.getvalue()

    monkeypatch.setattr(bench, "run_process", run_process)
    monkeypatch.chdir(tmp_path)
    assert bench.main(["--ladder", "--only=fused,ours", "--steps=3", "--json=l.json", *TINY]) == 0
    assert "| ladder/fused       |   2 |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "l.json").read_text())
    assert rows["ladder/fused"]["result"]["changes"] == ["float32", "flash", "padded", "fused"]
    result = rows["ladder/ours"]["result"]
    low, high = result["ms_quartiles"]
    assert result["changes"] == [] and 0 < low <= result["ms"] <= high
    assert result["tok_per_sec"] == pytest.approx(1e3 * 2 * 16 / result["ms"], rel=0.01)
    assert result["flops_per_token"] == 6 * (result["parameters"] - 16 * 16) + 12 * 16 * 16
    parts = result["parts_ms"]
    assert all(parts[part] > 0 for part in parts if part != "waiting")
    kernels = result["kernels"]
    times = [ms for _, _, ms in kernels]
    assert times == sorted(times, reverse=True) and len(kernels) == 40
    # Their sum is that of the parts, less what takes less time than the 40th, and annotations.
    assert 0.7 < sum(times) / (sum(parts.values()) - parts["waiting"]) <= 1
    calls = {name: count for name, count, _ in kernels}
    assert calls["aten::_fused_adamw_"] == 2  # the groups with and without weight decay
    assert parts["head and loss"] > parts["attention"] + parts["MLP"]  # V is 50,257, C is 16


def test_every_rung_has_the_same_loss():
    idx = torch.randint(0, 50257, (2, 17), generator=torch.Generator().manual_seed(0))
    x, y = idx[:, :-1], idx[:, 1:]
    ours = GPT(GPTConfig(16, n_layer=1, n_head=2, n_embd=16))
    state = ours.state_dict()
    expected = ours(x, y)[1].item()
    for changes in (["float32"], ["float32", "flash"]):
        model = bench.PlainGPT(ours.config, changes)
        model.load_state_dict(state)
        assert model(x, y)[1].item() == pytest.approx(expected, abs=1e-5), changes
    model = bench.PlainGPT(ours.config, ["float32", "flash", "padded"])
    state["wte.weight"] = F.pad(state["wte.weight"], (0, 0, 0, PADDED - 50257))  # logits of 0
    model.load_state_dict(state)
    logits = F.pad(ours(x)[0], (0, PADDED - 50257))
    padded = F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    assert model(x, y)[1].item() == pytest.approx(padded, abs=1e-5) and padded > expected


def test_report_continues_and_tries_failed_jobs_again(tmp_path, monkeypatch, capsys):
    """The first start is killed in its third job; finished jobs are not repeated."""
    started = []
    outcomes = {"machine": {"chip": "X"}, "right/tests": RunError("no")}
    outcomes["profile"] = KeyboardInterrupt()

    def job(name):
        started.append(name)
        if isinstance(outcomes[name], BaseException):
            raise outcomes[name]
        return outcomes[name]

    jobs = {name: partial(job, name) for name in outcomes}
    monkeypatch.setattr(bench, "jobs_of", lambda *_: jobs)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--report", str(tmp_path), *TINY])
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    found = {row["job"]: row["status"] for row in rows}
    assert found == {"machine": "done", "right/tests": "failed"}
    outcomes["profile"] = STEP
    assert bench.main(["--report", str(tmp_path), "--minutes", "1e-9", *TINY]) == 1
    assert len(started) == 3
    assert bench.main(["--report", str(tmp_path), "--only", "profile", *TINY]) == 1
    outcomes["right/tests"] = {"result": "5 passed"}
    assert bench.main(["--report", str(tmp_path), *TINY]) == 0
    assert started == ["machine", "right/tests", "profile", "profile", "right/tests"]
    page = (tmp_path / "report.md").read_text()
    assert "5 passed" in page and "failed" not in page and page in capsys.readouterr().out
    assert "Kernels of profile" in page and "| 5.250 | 24 | `gemm<a>` |\n| 1.500 | 0.5 |" in page
    for part in ("|  1,234.5 | 9.0 to 12.0 ", "| 25.0% | n/a ", "1,000 parameters", "- chip: X"):
        assert part in page, (part, page)
    row = {"job": "profile", "of": "", "status": "done", "result": STEP | {"mfu": 1.01}}
    assert "| – " in " ".join(bench.page({"profile": row}).split())  # not 101.0%: a wrong peak
    with pytest.raises(UserError, match="another folder"):
        bench.main(["--report", str(tmp_path), *TINY, "--n-layer", "2"])


def test_kernels_of_a_gpu_are_listed_by_their_time():
    """Of two steps, without the CPU's operations that launch them and the profiler's marks."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name, device, us, annotation=False):
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(
            name=name, device_type=device, time_range=span, is_user_annotation=annotation
        )

    events = [event(f"small{i}", cuda, 10) for i in range(50)]
    events += [event("gemm", cuda, us) for us in (3000, 5000, 4000)]
    events += [event("aten::mm", cpu, 10**6), event("ProfilerStep#13", cuda, 10**6, True)]
    rows = bench.largest_kernels(events)
    assert rows[0] == ("gemm", 1.5, 6.0) and len(rows) == 40
    assert rows[1] == ("small0", 0.5, pytest.approx(0.005))


def test_a_job_ends_after_its_limit(monkeypatch):
    monkeypatch.setattr(bench, "LIMIT", 0.2)
    with pytest.raises(RunError, match="stopped after"):
        bench.run_process("-c", "import time; time.sleep(60)")


def test_the_first_jobs_of_a_report_teach_most():
    jobs = bench.jobs_of(*bench.read_config(["--report", "r", *TINY]))
    assert list(jobs)[:4] == ["machine", "speed/B=8", "right/tests", "fused/B=8"]
    measured = {name: jobs[name].args for name in jobs if "B=" in name}
    assert len(measured) == 5
    for name, (flags, rung, _) in measured.items():
        B = train_gpt2.read_config(flags).micro_batch_size
        assert name == f"{'fused' if rung == 'fused' else 'speed'}/B={B}"


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--steps 0", "--steps 0"),
        ("--rung bf16", "--rung bf16"),
        ("--json no/f", "no/f"),
        ("--json .", "is a folder"),
        ("--only flash", "--only"),
        ("--report r --minutes -1", "--minutes -1"),
        ("--report r --minutes nan", "--minutes nan"),
        ("--ladder --only flash,no", "--only no"),
        ("--report r --only speed/1", "--only sp"),
    ],
)
def test_wrong_input_is_one_line(flags, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=part):
        bench.main([*flags.split(), *TINY])


def test_a_plan_cannot_be_measured():
    with pytest.raises(UserError, match="--plan: trains nothing"):
        bench.main([*TINY, "--plan"])


def test_help_of_the_comparison_with_build_nanogpt(monkeypatch, capsys):
    path = str(ROOT / "bench/fidelity/compare.py")
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as status:
        runpy.run_path(path, run_name="__main__")
    assert status.value.code == 0 and "PEER [STEPS] [FLAG …]" in capsys.readouterr().out

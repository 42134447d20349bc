"""The benchmark on a tiny model; the times themselves are the machine's."""

import contextlib
import io
import json

import pytest
import torch

import bench
from bench import PADDED
from support.cli import RunError, UserError
from tests.conftest import ROOT
from train_gpt2 import GPT, GPTConfig

TINY = [
    "--",
    "--n-layer",
    "1",
    "--n-head",
    "2",
    "--n-embd",
    "16",
    "--seq-len",
    "16",
    "--micro-batch-size",
    "2",
    "--device",
    "cpu",
    "--data",
    str(ROOT / "input.txt"),
]
STEP = {
    "B": 2,
    "T": 16,
    "ms": 1234.5,
    "ms_quartiles": [9.0, 12.0],
    "tok_per_sec": 3200.0,
    "mfu": 0.25,
    "steps": 5,
    "warmup": 3,
    "parameters": 1000,
    "flops_per_token": 6000,
    "world_size": 1,
    "mfu_of": "1 TFLOP/s",
    "peak_memory": None,
    "parts_ms": {"MLP": 6.0, "waiting": 2.0},
}


def test_ladder(tmp_path, monkeypatch, capsys):
    def run_process(_, *args):  # in this process
        with contextlib.redirect_stdout(io.StringIO()) as output:
            bench.main([*map(str, args)])
        return output.getvalue()

    monkeypatch.setattr(bench, "run_process", run_process)
    monkeypatch.chdir(tmp_path)
    assert (
        bench.main(["--ladder", "--only=bf16,fused,ours", "--steps=3", "--json=l.json", *TINY]) == 0
    )
    assert "## Not measured" in capsys.readouterr().out
    assert (tmp_path / "bench_ladder.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "l.json").read_text())
    assert rows["ladder/bf16"]["status"] == "skipped" and "float32" in rows["ladder/bf16"]["reason"]
    assert rows["ladder/fused"]["result"]["changes"] == ["float32", "flash", "padded", "fused"]
    result = rows["ladder/ours"]["result"]
    low, high = result["ms_quartiles"]
    assert result["changes"] == [] and 0 < low <= result["ms"] <= high
    assert result["tok_per_sec"] == pytest.approx(1e3 * 2 * 16 / result["ms"], rel=0.01)
    assert result["flops_per_token"] == 6 * (result["parameters"] - 16 * 16) + 12 * 16 * 16
    parts = result["parts_ms"]
    assert all(parts[part] > 0 for part in parts if part != "waiting")
    assert parts["head and loss"] > parts["attention"] + parts["MLP"]  # V is 50,257, C is 16


def test_every_rung_has_the_same_loss():
    idx = torch.randint(0, 50257, (2, 17), generator=torch.Generator().manual_seed(0))
    ours = GPT(GPTConfig(16, n_layer=1, n_head=2, n_embd=16))
    expected = ours(idx[:, :-1], idx[:, 1:])[1].item()
    for changes in (["float32"], ["float32", "flash"]):
        model = bench.plain_model(GPT(ours.config), changes)
        model.load_state_dict(ours.state_dict())
        assert model(idx[:, :-1], idx[:, 1:])[1].item() == pytest.approx(expected, abs=1e-5), (
            changes
        )
    padded = bench.plain_model(GPT(ours.config), ["float32", "flash", "padded"])
    assert padded(idx[:, :-1], idx[:, 1:])[0].shape == (2, 16, PADDED)


def test_report_continues_and_tries_failed_jobs_again(tmp_path, monkeypatch, capsys):
    """The first start is killed in its third job; what is done is not measured again."""
    started = []
    outcomes = {
        "machine": {"chip": "X"},
        "right/tests": RunError("no"),
        "profile": KeyboardInterrupt(),
    }

    def job(name):
        started.append(name)
        if isinstance(outcomes[name], BaseException):
            raise outcomes[name]
        return outcomes[name]

    monkeypatch.setattr(
        bench, "jobs_of", lambda *_: {name: lambda name=name: job(name) for name in outcomes}
    )
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--report", str(tmp_path), *TINY])
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(row["job"], row["status"]) for row in rows] == [
        ("machine", "done"),
        ("right/tests", "failed"),
    ]
    outcomes["profile"] = STEP
    assert (
        bench.main(["--report", str(tmp_path), "--minutes", "1e-9", *TINY]) == 1
        and len(started) == 3
    )
    assert bench.main(["--report", str(tmp_path), "--only", "profile", *TINY]) == 1
    outcomes["right/tests"] = {"result": "5 passed"}
    assert bench.main(["--report", str(tmp_path), *TINY]) == 0
    assert started == ["machine", "right/tests", "profile", "profile", "right/tests"]
    page = (tmp_path / "report.md").read_text()
    assert "5 passed" in page and "Not measured" not in page and page in capsys.readouterr().out
    for part in (
        "| 2 | 16 | 1,234.5 | 9.0 to 12.0 | 3,200 | 25.0% | n/a",
        "| 75.0%",
        "1,000 parameters",
    ):
        assert part in page, (part, page)
    with pytest.raises(UserError, match="another folder"):
        bench.main(["--report", str(tmp_path), *TINY, "--n-layer", "2"])


@pytest.mark.parametrize(
    "args, part",
    [
        (["--steps", "0"], "--steps 0"),
        (["--rung", "bf16"], "--rung bf16"),
        (["--json", "no/f"], "no/f"),
        (["--ladder", "--only", "flash,no"], "--only no"),
        (["--report", "r", "--only", "speed/1"], "--only sp"),
    ],
)
def test_wrong_input_is_one_line(args, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=part):
        bench.main([*args, *TINY])

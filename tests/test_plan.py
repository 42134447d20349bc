"""The memory estimate against measurements; the micro-batch that follows from it; --plan."""

import re

import pytest
import torch

import train_gpt2
from support import plan
from support.errors import UserError
from support.plan import estimate_memory, micro_batch_size
from support.tokenizer import get_tokenizer
from tests.conftest import losses, train, words
from train_gpt2 import GPT, GPTConfig, Ranks, TrainConfig, new_model, read_config

MEDIUM = dict(n_layer=24, n_head=16, n_embd=1024)
XL = dict(n_layer=48, n_head=25, n_embd=1600)


def estimate(B, device, dtype, **settings):
    config = TrainConfig(**settings)
    with torch.device("meta"):
        model = new_model(config)
    return estimate_memory(config, model, B, device, dtype)


# GB of live tensors on a GPU in two updates of two micro-steps, T = 1024, bfloat16, AdamW: counted
# on fake tensors with torch 2.13 (bench/memory).
LIVE = [  # B, compiled, low memory, shape
    (1, True, False, {}, 2.74),
    (1, False, False, {}, 3.26),
    (1, False, True, {}, 2.78),
    (16, True, False, {}, 9.19),
    (16, False, False, {}, 8.66),
    (16, False, True, {}, 3.65),
    (64, True, False, {}, 29.92),
    (64, False, False, {}, 25.46),
    (64, False, True, {}, 6.90),
    (4, True, False, MEDIUM, 10.35),
    (1, False, True, XL, 26.25),
]


@pytest.mark.parametrize("B, compiled, low_memory, shape, live", LIVE)
def test_on_a_gpu_the_estimate_is_above_what_is_alive(B, compiled, low_memory, shape, live):
    """By at most a quarter."""
    how = dict(compile=compiled, low_memory=low_memory)
    found = estimate(B, "cuda", torch.bfloat16, **how, **shape) / 1e9
    assert live <= found <= 1.26 * live


LAPTOP = dict(n_layer=6, n_head=6, n_embd=384, seq_len=512)
PEAKS = [  # B, shape, low memory, measured GB of a process on a CPU in float32 (bench/memory)
    (1, LAPTOP, False, 1.36),
    (8, LAPTOP, False, 3.01),
    (8, LAPTOP, True, 1.89),
    (1, {}, False, 3.72),
    (4, {}, False, 6.26),
    (1, {}, True, 3.18),
    (1, MEDIUM, True, 7.11),
]


@pytest.mark.parametrize("B, shape, low_memory, peak", PEAKS)
def test_on_a_cpu_the_estimate_is_near_the_peak(B, shape, low_memory, peak, monkeypatch):
    monkeypatch.setattr(plan, "peak_memory", lambda: 0.36e9)  # of one that has done nothing
    found = estimate(B, "cpu", torch.float32, low_memory=low_memory, **shape) / 1e9
    assert found == pytest.approx(peak, rel=0.1)


@pytest.fixture
def memory(monkeypatch):
    """memory(GB, …) is what is free on the GPU of each rank."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (None, None))

    def gather(self, value):
        return free

    free = []
    monkeypatch.setattr(Ranks, "gather", gather)
    return lambda *gigabytes: free.__init__(int(n * 1e9) for n in gigabytes)


def chosen(flags, device="cuda", world_size=1, before=0):
    config = read_config(words("--preset gpt2 --compile", flags))
    with torch.device("meta"):
        model = new_model(config)
    ranks = Ranks(0, world_size, torch.device(device))
    return micro_batch_size(config, ranks, model, torch.bfloat16, before)


def test_on_a_gpu_it_is_the_largest_that_fits_the_smallest(memory):
    memory(80)
    assert chosen("") == 128
    memory(72, 72)  # less a gibibyte for NCCL
    assert chosen("", world_size=2) == 64 and chosen("") == 128
    memory(80, 20)
    assert chosen("", world_size=2) == 16
    memory(24)
    assert chosen("") == 32 and chosen("--low-memory") == 128
    assert chosen("--total-batch-size 8192") == 8, "a step has eight sequences"
    assert chosen("--total-batch-size 12288") == 4, "a power of two that divides twelve"
    assert chosen("--micro-batch-size 128") == 128, "a given one is not judged"


def test_a_gpu_that_is_too_small_is_warned_of(memory, capsys):
    memory(2)
    assert chosen("") == 1
    assert capsys.readouterr().err.startswith("warning: not even micro-batches of one")


def test_a_resumed_run_keeps_its_micro_batch_or_says_why_not(memory, capsys):
    """Another one would change the rounding."""
    memory(80)
    assert chosen("", before=16) == 16 and chosen("", "cpu", before=16) == 16
    assert not capsys.readouterr().out
    memory(8)
    assert chosen("", before=16) == 8 and "do not fit here" in capsys.readouterr().out
    memory(80, 80)
    assert chosen("--total-batch-size 16384", world_size=2, before=16) == 8
    assert "do not divide 8" in capsys.readouterr().out


def test_on_a_cpu_it_has_at_most_1024_tokens():
    for flags, B in (("", 1), ("--seq-len 2048", 1), ("--seq-len 64", 16), ("--seq-len 100", 8)):
        tokens = 524_288 if "100" not in flags else 51_200
        assert chosen(f"{flags} --total-batch-size {tokens}", "cpu") == B


def test_the_bare_run_works_on_several_ranks_and_else_the_error_names_what_does():
    """1, 2, 4 and 8; the nearest batch size where the ranks do not divide a step."""
    config = read_config(["--preset", "shakespeare"])

    def on(world_size):
        return micro_batch_size(config, Ranks(0, world_size, torch.device("cpu")), None, None)

    assert [on(n) for n in (1, 2, 4, 8)] == [16, 8, 4, 2]
    for world_size, nearest in ((3, 480), (5, 480), (32, 1024)):
        with pytest.raises(UserError, match=f"nearest that is: {nearest}$"):
            on(world_size)


def test_checkpoints_record_the_micro_batch(text, tmp_path, capsys):
    """0 on resume means the same again, though more would fit."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path, "--total-batch-size 128"]
    train(*args, "--max-steps 1 --micro-batch-size 4")
    capsys.readouterr()
    train(*args, "--max-steps 2 --micro-batch-size 0 --resume")
    assert "batch: 4 x 16 tokens x 2 micro-steps" in capsys.readouterr().out
    assert len(losses(tmp_path)) == 2


def test_plan_prints_and_does_not_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.main(words("--preset gpt2 --plan --device cpu")) == 0
    text = capsys.readouterr().out
    for part in ("124,439,808", "855,166,464", "9,999,745,024 in 19,073", "8.551e+18"):
        assert part in text, part
    assert not list(tmp_path.iterdir())
    GPT(GPTConfig(64, 50257, 1, 2, 8)).save_pretrained(tmp_path / "model")
    train("--init", tmp_path / "model", "--plan", "--log-dir", tmp_path / "log")
    assert f"parameters: {(50257 + 64 + 12 * 8 + 13 + 2) * 8:,} " in capsys.readouterr().out
    assert not (tmp_path / "log").exists()


def test_plan_knows_the_data_and_the_devices_speed(text, capsys):
    """At 40 % of a measured TFLOP/s."""
    assert train("--max-steps 7 --plan --data", text) == 0
    lines = capsys.readouterr().out.splitlines()
    row = {name: value for name, value in (line.strip().split(": ", 1) for line in lines)}
    available = 1 + len(get_tokenizer().encode_ordinary(text.read_text(encoding="utf-8")))
    available -= available // 10
    assert row["epochs"] == f"{7 * 128 / available:.3f} of {available:,} training tokens"
    rate = 0.4e12 / GPT(GPTConfig(16, 50257, 2, 2, 16)).flops_per_token(16)
    assert row["time"] == f"0 min 0 s at {rate:,.0f} tok/s, projected: 40% of 1 TFLOP/s " + (
        "(measured, 1024 x 1024 product)"
    )
    assert re.fullmatch(r"[\d.]+ GB with B = 2, an estimate", row["memory"])
    assert train("--max-steps 9000000 --plan --data", text) == 0
    hours = int(9e6 * 128 / rate / 3600)
    assert f": {hours} h " in capsys.readouterr().out


def test_plan_projects_time_and_micro_batch_on_usual_cards(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def rows(flags):
        assert train_gpt2.main(words("--plan --device cpu", flags)) == 0
        lines = capsys.readouterr().out.splitlines()
        return {card: row for card, row in (line.strip().split(": ", 1) for line in lines)}

    # 8.551e18 FLOPs / (0.4 * 71e12) = 3.48 days
    share = "projected: 40% of"
    table = rows("--preset gpt2")
    assert table["GeForce RTX 3090"] == f"3.5 days, {share} 71 TFLOP/s (bfloat16); B = 32 fits"
    assert table["T4"] == f"3.8 days, {share} 65 TFLOP/s (float16); B = 16 fits"
    assert table["8 x H100 80GB HBM3"].startswith(f"45 min 2 s, {share} 7,912 TFLOP/s")
    # Eight cards share the 64 sequences of a step.
    table = rows("--preset gpt2 --total-batch-size 65536")
    assert table["8 x H100 80GB HBM3"].endswith("B = 8 fits")
    table = rows("--preset gpt2 --micro-batch-size 64")
    assert table["GeForce RTX 4090"] == "B = 64 does not fit in 24 GB"
    assert rows("--preset gpt2 --n-layer 48 --n-head 25 --n-embd 1600")["T4"].startswith("B = 1 do")

"""--plan and the micro-batch: arithmetic, and memory against measurements."""

import re

import pytest

import train_gpt2
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import (
    numbers,
    posix,
    start_ranks,
    train_on_ranks,
    words,
)
from train_gpt2 import GPT, GPTConfig


@pytest.fixture
def plan(capsys):
    """plan(flags, …) returns what --plan prints: {name: value}."""

    def rows(*args):
        capsys.readouterr()
        assert train_gpt2.main(words("--plan --device cpu", *args)) == 0
        lines = capsys.readouterr().out.splitlines()
        return dict(line.strip().split(": ", 1) for line in lines)

    return rows


@posix
def test_the_estimate_is_near_the_peak_of_a_process(text, tmp_path):
    """In a shape whose activations count. With --low-memory both are smaller."""
    shape = "--n-layer 12 --n-embd 128 --seq-len 128 --total-batch-size 512 --micro-batch-size 4"
    found = []
    for flag in ("--no-low-memory", "--low-memory"):
        args = [shape, flag, "--max-steps 1 --data", text, "--log-dir", tmp_path / flag]
        for more in ("--plan", "--no-plan"):
            (output,) = train_on_ranks(1, tmp_path, *args, more)
            found.append(next(numbers(s)[0] for s in output.splitlines() if " GB" in s))
    assert found[0] == pytest.approx(found[1], rel=0.35)
    assert found[2] == pytest.approx(found[3], rel=0.35)
    assert found[2] < found[0] and found[3] < found[1]


# GB of live tensors on a GPU in two updates of two micro-steps of the preset gpt2, compiled, by B:
# counted on fake tensors with torch 2.13 (bench/memory).
LIVE = {1: 2.74, 16: 9.19, 64: 29.92}
CARDS = {"T4": 16, "GeForce RTX 3090": 24, "GeForce RTX 5090": 32, "A100-SXM4-80GB": 80}


def test_what_fits_on_usual_cards(plan, tmp_path, monkeypatch):
    """By measured memory, neither too much nor less than a quarter of what there is room for."""
    monkeypatch.chdir(tmp_path)
    table = plan("--preset gpt2")
    for card, gigabytes in CARDS.items():
        B = numbers(table[card])[-1]
        per_sequence = (LIVE[64] - LIVE[1]) / 63
        live = LIVE[1] + per_sequence * (B - 1)
        assert live < 0.9 * gigabytes < live + 3.3 * per_sequence * B, card
    # 8.551e18 FLOPs / (0.4 * 71e12) = 3.48 days
    assert numbers(table["GeForce RTX 3090"])[:3] == [3.5, 40, 71]
    # Eight cards share the 64 sequences of a step.
    assert numbers(plan("--preset gpt2 --total-batch-size 65536")["8 x H100 80GB HBM3"])[-1] == 8
    assert "16 GB" in plan("--preset gpt2 --n-layer 48 --n-head 25 --n-embd 1600")["T4"]


def test_plan_prints_and_does_not_train(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = " ".join(plan("--preset gpt2").values())
    for part in ("124,439,808", "9,999,745,024", "19,073", "8.544e+18"):
        assert part in shown, part
    assert not list(tmp_path.iterdir())
    GPT(GPTConfig(64, 50257, 1, 2, 8)).save_pretrained(tmp_path / "model", get_tokenizer())
    shown = plan("--preset shakespeare --init", tmp_path / "model", "--log-dir log")
    assert f"{(50257 + 64 + 12 * 8 + 13 + 2) * 8:,} " in " ".join(shown.values())
    assert not (tmp_path / "log").exists()


def test_what_a_plan_says_of_a_text(plan, text):
    """It has 2.5 steps of 1,024 tokens."""
    table = plan("--preset shakespeare --total-batch-size 1024 --eval-tokens 64 --data", text)
    assert re.fullmatch(r"the first 64 of 2\d\d tokens \(--eval-tokens\)", table["validation"])
    assert table["epochs"].endswith(", 2 steps each")


def test_what_a_run_refuses_is_an_error_of_the_plan_too(plan, text, tmp_path):
    no_such = "my_.*no such file"
    few = "train tokens are too few for sequences of 4096"
    (tmp_path / "val_too_short.txt").write_text("To be or not to be. " * 20)
    for args, message in {
        "--data my_text.txt": no_such,
        "--data my_shards": no_such,
        f"--seq-len 4096 --total-batch-size 4096 --data {text}": few,
        f"--data {tmp_path / 'val_too_short.txt'}": "val tokens are too few",
        f"--hellaswag-every 9 --data {text} --hellaswag-data my_tasks.jsonl": no_such,
    }.items():
        with pytest.raises(UserError, match=message):
            plan("--preset shakespeare", args)


def test_where_ranks_do_not_divide_a_step_the_error_names_what_they_divide(tmp_path):
    args = ["--seq-len 32 --total-batch-size 512 --micro-batch-size 0 --log-dir", tmp_path / "log"]
    codes, texts = start_ranks(3, tmp_path, *args)
    assert 2 in codes
    lines = [line for output in texts for line in output.splitlines() if "error: " in line]
    assert all("--total-batch-size 512" in line and numbers(line)[-1] == 480 for line in lines)

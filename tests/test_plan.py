"""--plan, and the size of a micro-batch."""

import re

import pytest

import train_gpt2
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import (
    numbers,
    start_ranks,
    train,
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


def test_plan_prints_and_does_not_train(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = " ".join(plan("--preset gpt2").values())
    for part in ("124,439,808", "9,999,745,024", "19,073", "8.54e+18", "1.99 GB"):
        assert part in shown, part
    assert not list(tmp_path.iterdir())
    GPT(GPTConfig(64, 50257, 1, 2, 8)).save_pretrained(tmp_path / "model", get_tokenizer())
    shown = plan("--preset shakespeare --init", tmp_path / "model", "--log-dir log")
    assert f"{(50257 + 64 + 12 * 8 + 13 + 2) * 8:,} " in " ".join(shown.values())
    assert not (tmp_path / "log").exists()


def test_a_plan_takes_no_offence_at_a_run(plan, text, tmp_path):
    train("--max-steps 1 --save-every 1 --data", text, "--log-dir", tmp_path / "log")
    before = sorted(tmp_path.rglob("*"))
    assert "epochs" in plan("--preset shakespeare --log-dir", tmp_path / "log", "--data", text)
    assert plan("--resume --log-dir", tmp_path / "log")["tokens"].startswith("128 in 1 steps")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("total_batch_size", "seq_len", "B"),
    [(512, 32, 16), (96 * 32, 32, 32), (6 * 1024, 1024, 1), (4 * 4096, 4096, 1), (3 * 16, 16, 1)],
)
def test_a_micro_batch_is_a_power_of_two(plan, text, total_batch_size, seq_len, B):
    """The largest of at most 1,024 tokens on a CPU that divides the sequences of a step."""
    flags = f"--preset gpt2 --total-batch-size {total_batch_size} --seq-len {seq_len}"
    table = plan(flags, "--eval-tokens", seq_len)
    assert table["batch"].startswith(f"{B} x {seq_len} tokens")


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


def test_epochs_set_the_number_of_steps(plan, text, capsys, tmp_path):
    """From an epoch of n sequences. --resume keeps the steps unless one of the two is given."""
    loader = train_gpt2.DataLoaderLite(text, "train", 1, 16)
    flags = (
        "--preset shakespeare --seq-len 16 --total-batch-size 64 --eval-tokens 16 --data",
        text,
    )
    n = loader.sequences_per_epoch
    for epochs in (1, 2.5):
        shown = plan(*flags, "--epochs", epochs)
        assert f" in {int(epochs * n / 4):,} steps " in shown["tokens"]
        assert numbers(shown["epochs"])[1] == n * 16
    # The exact number of steps of a whole number of epochs, without float rounding
    shown = plan(*flags, "--total-batch-size", n * 16 // 3 // 16 * 16, "--epochs", 3)["tokens"]
    assert f" in {3 * n // (n // 3):,} steps " in shown
    for mistake in ("--epochs 0.001", "--epochs 1 --max-steps 3"):
        with pytest.raises(UserError, match="--epochs"):
            train_gpt2.main(words("--plan --device cpu", *flags, mistake))
    run = (
        *flags,
        "--n-layer 1 --n-embd 8 --n-head 1 --warmup-steps 0 --eval-every 0 --sample-every 0",
    )
    run = words(*run, "--device cpu --log-dir", tmp_path / "log")
    per_step = 4 / n  # of an epoch
    assert train_gpt2.main([*run, "--epochs", str(2.1 * per_step)]) == 0
    wider = [*run, "--resume"]
    for more, steps in (([], 2), (["--epochs", str(3.1 * per_step)], 3), (["--max-steps", "4"], 4)):
        capsys.readouterr()
        assert train_gpt2.main([*wider, *more]) == 0
        out = capsys.readouterr().out
        assert f" in {steps} steps " in out and (tmp_path / f"log/step_00000{steps}").exists()
    assert train_gpt2.main(wider) == 0
    assert not (tmp_path / "log/step_000005").exists(), "--max-steps replaced the epochs"
    assert "decay takes 3 steps instead of 2" in out

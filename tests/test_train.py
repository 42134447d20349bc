"""Whole runs in small: the same losses however a batch is split, resumed runs, compiled runs, what is left behind."""

import contextlib
import itertools
import json
import math
import os
import runpy
import subprocess
import sys

import pytest
import torch

import train_gpt2
from support import check
from support.cli import InputError
from tests.conftest import ROOT, TINY, losses, posix, read_log, script, train_on_ranks
from train_gpt2 import GPT, TrainConfig, get_lr


def train(*args: object) -> int:
    return train_gpt2.main([*TINY, *map(str, args)])


def test_losses_do_not_depend_on_ranks_or_micro_batches(text, tmp_path):
    """128 tokens a step as 8 micro-batches of 1, 4 of 2, 2 of 4, one of 8; alone, and the 4 of 2 dealt out to three
    ranks, of which two have nothing to do in the last round."""
    common = ["--data", text, "--max-steps", 8, "--eval-every", 8, "--max-lr", 1e-2]
    for B in (1, 2, 4, 8):
        train(*common, "--micro-batch-size", B, "--log-dir", tmp_path / f"alone_{B}")
    # What dynamo would do to compiled blocks under DDP, and where the gradients lie, is looked at on the way.
    look = ("import torch, train_gpt2 as t; get_lr, parallelize, replicas = t.get_lr, t.parallelize, []\n"
            "t.parallelize = lambda *a: replicas.append(parallelize(*a)) or replicas[0]\n"
            "where = lambda: hash(tuple(p.grad.data_ptr() for p in replicas[0].parameters()))\n"
            "show = lambda: print('optimize_ddp', torch._dynamo.config.optimize_ddp, 'gradients at', where())\n"
            "t.get_lr = lambda *a: show() or get_lr(*a)")
    texts = train_on_ranks(3, tmp_path, *common, "--micro-batch-size", 2, "--log-dir", tmp_path / "three_2",
                           disturbance=look)
    assert "4 micro-batches, dealt out to 3 ranks" in texts[0] and "optimize_ddp False" in texts[0]
    places = [line.split()[-1] for line in texts[0].splitlines() if "gradients at" in line]
    assert len(places) == 8 and len(set(places)) == 1  # in DDP's buckets, from before the first step on
    train(*common, "--micro-batch-size", 2, "--low-memory", "--log-dir", tmp_path / "low_memory")
    exact = [read_log(tmp_path / name, "train", "val", "norm") for name in ("alone_2", "low_memory")]
    assert exact[0] == exact[1]
    expected = losses(tmp_path / "alone_8")
    assert len(expected) == 8 and expected[-1] < expected[0] - 0.5
    for name in ("alone_1", "alone_2", "alone_4", "three_2"):
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-4), name
        assert losses(tmp_path / name, "val") == pytest.approx(losses(tmp_path / "alone_8", "val"), abs=1e-4), name
        norms = losses(tmp_path / name, "norm")
        assert norms == pytest.approx(losses(tmp_path / "alone_8", "norm"), rel=1e-3), name


def test_the_bare_runs_batch_divides_among_ranks(monkeypatch):
    monkeypatch.setattr(train_gpt2.Distributed, "gather", lambda self, value: [value])
    config = train_gpt2.read_config(["--preset", "shakespeare"])
    model = GPT(train_gpt2.GPTConfig(n_layer=1, n_head=1, n_embd=1))
    for world_size, B in ((1, 4), (2, 2), (4, 1)):
        dist = train_gpt2.Distributed(0, 0, world_size, torch.device("cpu"), torch.float32, "")
        assert train_gpt2.choose_micro_batch_size(config, model, dist) == B


def test_first_loss_and_clipped_update_equal_a_plain_loop(text, tmp_path):
    """Two steps of the script against torch's own pieces, written out without accumulation."""
    args = ["--max-steps", 2, "--save-every", 2, "--max-lr", 1e-2, "--grad-clip", 0.5]
    train("--data", text, *args, "--log-dir", tmp_path)
    torch.manual_seed(1337)
    model = GPT(train_gpt2.GPTConfig(16, 50257, 2, 2, 16))
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-8
    )
    loader = train_gpt2.DataLoaderLite(text, "train", 8, 16)
    for step, lr in enumerate((5e-3, 1e-2)):
        x, y = loader.next_batch()
        loss = torch.nn.functional.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert losses(tmp_path)[step] == pytest.approx(loss.item(), abs=1e-5)
    trained = GPT.from_pretrained(tmp_path / "step_000002")
    for (name, a), b in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3, msg=name)


def test_resumed_run_equals_one_that_never_stopped(text, tmp_path, capsys):
    args = ["--data", text, "--eval-every", 5, "--sample-every", 4, "--save-every", 3, "--keep-checkpoints", 0]
    train(*args, "--max-steps", 9, "--log-dir", tmp_path / "straight")
    train(*args, "--max-steps", 9, "--log-dir", tmp_path / "broken")
    for name in ("step_000009", "step_000006"):  # as though it had been killed after step 3's checkpoint
        for file in (tmp_path / "broken" / name).iterdir():
            file.unlink()
        (tmp_path / "broken" / name).rmdir()
    with open(tmp_path / "broken/log.txt", "a") as log:
        log.write("9 tr")  # a torn line
    train(*args, "--max-steps", 9, "--log-dir", tmp_path / "broken", "--resume")
    for stream in ("train", "val", "norm", "lr"):
        assert read_log(tmp_path / "broken", stream) == read_log(tmp_path / "straight", stream)
    for name in ("model.safetensors", "config.json"):
        files = [(tmp_path / run / "step_000009" / name).read_bytes() for run in ("straight", "broken")]
        assert files[0] == files[1]
    card = (tmp_path / "broken/step_000009/README.md").read_text()  # of all that the log says up to there
    for row in ("| training data | `text.txt`, 1,152 tokens |", "| steps | 9 of 9, 128 tokens each |",
                f"| training loss | {losses(tmp_path / 'straight')[8]:.4f} (step 8) |",
                f"| validation loss | {losses(tmp_path / 'straight', 'val')[-1]:.4f} (step 9) |", "| not measured |"):
        assert row in card, card
    entries = json.loads((tmp_path / "broken/run.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 3]
    assert entries[0]["versions"]["torch"] == torch.__version__ and entries[0]["config"]["seed"] == 1337
    # Once more: there is nothing left to do.
    before = read_log(tmp_path / "broken")
    assert train(*args, "--max-steps", 9, "--log-dir", tmp_path / "broken", "--resume") == 0
    assert "has all its 9 steps" in capsys.readouterr().out and before == read_log(tmp_path / "broken")


def test_resume_refuses_another_runs_mathematics(text, tmp_path):
    args = ["--data", text, "--save-every", 2, "--log-dir", tmp_path, "--resume"]
    train(*args, "--max-steps", 2, "--max-lr", 0.25)
    with pytest.raises(InputError, match=r"--max-lr was 0\.25, is 0\.5"):
        train(*args, "--max-steps", 4, "--max-lr", 0.5)


def test_a_new_start_keeps_what_an_earlier_one_left(text, tmp_path):
    args = ["--data", text, "--max-steps", 2, "--save-every", 2, "--log-dir", tmp_path]
    train(*args)
    first = read_log(tmp_path)
    weights = (tmp_path / "step_000002/model.safetensors").read_bytes()
    train(*args, "--seed", 5)
    assert read_log(tmp_path)[: len(first)] == first and len(read_log(tmp_path)) == 2 * len(first)
    assert (tmp_path / "earlier_1/step_000002/model.safetensors").read_bytes() == weights
    train(*args, "--seed", 5, "--max-steps", 3, "--resume")
    assert read_log(tmp_path)[: len(first)] == first and losses(tmp_path)[:2] != losses(tmp_path)[2:4]
    assert [line.split()[0] for line in read_log(tmp_path, "train")] == ["0", "1", "0", "1", "2"]


def test_zero_steps_evaluate_and_exit(text, tmp_path):
    GPT(train_gpt2.GPTConfig(16, 50257, 1, 2, 16)).save_pretrained(tmp_path / "model")
    train("--data", text, "--init", tmp_path / "model", "--max-steps", 0, "--eval-every", 1, "--log-dir", tmp_path)
    (val,) = losses(tmp_path, "val")
    assert abs(val - math.log(50257)) < 0.1 and not losses(tmp_path)


def test_validation_loss_is_the_mean_over_its_tokens(text, tmp_path):
    """Against one plain pass, for batch sizes that do and do not divide the number of sequences."""
    model = GPT(train_gpt2.GPTConfig(16, 50257, 1, 2, 16))
    dist = train_gpt2.Distributed(0, 0, 1, torch.device("cpu"), torch.float32, "")
    results = []
    for B in (1, 3, 8):
        loader = train_gpt2.DataLoaderLite(text, "val", B, 16, shuffle=False)
        results.append(train_gpt2.validation_loss(model, loader, 160, dist))
    tokens = torch.from_numpy(loader.stream.read(0, 161).astype("int64"))
    expected = model(tokens[:-1].view(10, 16), tokens[1:].view(10, 16))[1].item()
    assert results == pytest.approx([expected] * 3, abs=1e-5)


def test_compiled_run_equals_eager_and_evaluates(text, tmp_path, capsys):
    """Validation, HellaSwag and samples under --compile, with the losses of the eager run; --low-memory likewise."""
    tasks = ROOT / "tests" / "hellaswag_sample.jsonl"
    args = ["--data", text, "--max-steps", 6, "--eval-every", 2, "--hellaswag-every", 3, "--hellaswag-data", tasks,
            "--sample-every", 3, "--seq-len", 64, "--sample-prompt", "To be"]
    train(*args, "--log-dir", tmp_path / "eager")
    eager_samples = [line for line in capsys.readouterr().out.splitlines() if "sample" in line]
    train(*args, "--log-dir", tmp_path / "compiled", "--compile")
    samples = [line for line in capsys.readouterr().out.splitlines() if "sample" in line]
    for stream in ("train", "val", "hella"):
        assert len(losses(tmp_path / "compiled", stream)) == {"train": 6, "val": 4, "hella": 3}[stream]
        assert losses(tmp_path / "compiled", stream) == pytest.approx(losses(tmp_path / "eager", stream), abs=1e-3)
    assert len(samples) == len(eager_samples) == 4 + 2  # at the end two longer ones
    train("--data", text, "--seq-len", 64, "--max-steps", 2, "--log-dir", tmp_path / "low", "--compile", "--low-memory")
    assert losses(tmp_path / "low") == pytest.approx(losses(tmp_path / "eager")[:2], abs=1e-3)


def test_a_machine_without_a_compiler_trains_eagerly(text, tmp_path):
    args = [*TINY, "--data", text, "--max-steps", 2, "--compile", "--log-dir", tmp_path / "log"]
    env = {"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = script("train_gpt2.py", *args, env=env)
    assert done.returncode == 0 and len(losses(tmp_path / "log")) == 2, done.stderr
    assert "no torch.compile on this machine" in done.stdout


def test_learning_rate():
    config = TrainConfig()
    lrs = [get_lr(step, config) for step in range(19_073 + 1)]
    assert lrs[0] == pytest.approx(6e-4 / 715) and lrs[714] == max(lrs) == pytest.approx(6e-4)
    assert lrs[-1] == pytest.approx(6e-5) and lrs[(715 + 19_073) // 2] == pytest.approx(3.3e-4, rel=1e-3)
    assert all(a > b for a, b in itertools.pairwise(lrs[715:]))


def test_samples_have_a_generator_of_their_own(capsys):
    """Training's would be moved on by them: a fork with dropout, or a resumed run, would see it."""
    dist = train_gpt2.Distributed(0, 0, 1, torch.device("cpu"), torch.float32, "")
    model, before = GPT(train_gpt2.GPTConfig(64, 50257, 1, 2, 16)), torch.get_rng_state()
    for _ in range(2):
        train_gpt2.print_samples(model, "To be", dist)
    lines = capsys.readouterr().out.splitlines()
    assert torch.equal(before, torch.get_rng_state()) and lines[:4] == lines[4:] and len(set(lines)) == 4


@posix
def test_console_of_eighty_columns(text, tmp_path):
    """On a terminal: a bar at the bottom, until the end; above it lines that fit, whole ones."""
    import fcntl
    import pty
    import struct
    import termios

    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))
    args = ["--data", text, "--max-steps", 2, "--eval-every", 1, "--sample-every", 1, "--save-every", 2]
    command = [sys.executable, ROOT / "train_gpt2.py", *TINY, *args]
    process = subprocess.Popen(list(map(str, command)), stdout=end, stderr=end, cwd=tmp_path)
    os.close(end)
    output = b""
    with contextlib.suppress(OSError):  # how the end of a terminal's output is told
        while part := os.read(terminal, 65536):
            output += part
    assert process.wait() == 0, output
    lines = [line.split("\r")[-1] for line in output.decode().split("\r\n")]  # what is left to see
    kinds = [line.split(" ")[0] for line in lines if line]
    expected = {"device:": 1, "model:": 2, "speed:": 1, "data:": 1, "batch:": 1, "step": 5, "rank": 6, "done:": 1}
    assert {kind: kinds.count(kind) for kind in expected} == expected
    long = [line for line in lines if len(line) > 80]
    assert all(line.startswith(("rank 0 sample ", "to ")) for line in long), long  # in one piece: samples, commands
    assert "2/2 [" in output.decode() and not any("2/2 [" in line for line in lines)  # no bar is left over


def test_plan_prints_and_does_not_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.main(["--preset", "gpt2", "--plan"]) == 0
    text = capsys.readouterr().out
    for part in ("124,439,808", "855,166,464", "9,999,745,024 in 19,073 steps", "8.551e+18", "1.99)", "no edu_"):
        assert part in text, part
    assert not list(tmp_path.iterdir())


def test_a_run_is_checked_against_a_reference(text, tmp_path, capsys):
    args = ["--data", text, "--max-steps", 8, "--eval-every", 4]
    for seed in (1, 2, 3):
        train(*args, "--seed", seed, "--log-dir", tmp_path / str(seed))
    reference = tmp_path / "reference"
    reference.mkdir()
    make_check = runpy.run_path(str(ROOT / "reference/make_check.py"))["main"]
    make_check(str(reference), *(str(tmp_path / str(seed)) for seed in (1, 2, 3)))
    lines = (reference / "check.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines[4:]] == [["0", "val"], ["512", "val"], ["1024", "val"]]
    for line in lines[4:]:
        low, high = map(float, line.split()[2:])
        values = [losses(tmp_path / str(s), "val")[int(line.split()[0]) // 512] for s in (1, 2, 3)]
        assert low < min(values) and max(values) < high
    capsys.readouterr()
    assert train(*args, "--seed", 4, "--log-dir", tmp_path / "4", "--check-against", reference) == 0
    assert f"3 values compared: matches {reference}" in capsys.readouterr().out
    with open(reference / "check.txt", "a") as file:
        file.write("\n512 train 1.0 2.0\n")
    assert train(*args, "--seed", 5, "--log-dir", tmp_path / "5", "--check-against", reference) == 1
    mean = sum(losses(tmp_path / "5")[:4]) / 4
    assert f"step 4: train {mean:.4f} is outside 1.0 to 2.0: does not match" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"nowhere/check.txt: no such reference"):
        train(*args, "--log-dir", tmp_path / "6", "--check-against", tmp_path / "nowhere")
    assert not (tmp_path / "6").exists()


def test_a_mistake_shows_in_the_first_losses_of_the_references_seed(text, tmp_path, monkeypatch, capsys):
    """Honest runs match: other micro-batches, other seeds. Not so a doubled rate, a missing clip, a missing decay, or
    an erf GELU, which is off by 1.7e-5 here where rounding makes 1e-6."""
    args = ["--data", text, "--max-steps", 8, "--max-lr", 1e-2, "--n-embd", 64, "--warmup-steps", 8]
    reference = tmp_path / "reference"
    train(*args, "--log-dir", reference)
    (reference / "check.txt").write_text("first 8 float32 train 0.000005\n0 val 10.7 10.9\n")

    def verdict(name, *more):
        status = train(*args, *more, "--log-dir", tmp_path / name, "--check-against", reference)
        return status, capsys.readouterr().out.splitlines()[-1]

    assert verdict("micro", "--micro-batch-size", 8) == (0, f"8 values compared: matches {reference}")
    assert verdict("seed", "--seed", 5, "--eval-every", 8) == (0, f"1 values compared: matches {reference}")
    for name, more in {"rate": ["--max-lr", 2e-2], "clip": ["--grad-clip", 0], "decay": ["--weight-decay", 0]}.items():
        status, line = verdict(name, *more)
        assert status == 1 and "with the same seed" in line and "in float32: does not match" in line, (name, line)
    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: gelu(x))
    assert verdict("erf")[0] == 1


def test_shipped_references_can_be_read():
    for name, tokens in (("shakespeare", 600 * 512), ("gpt2", 19_073 * 524_288)):
        milestones = check.read_reference(ROOT / "reference" / name).milestones
        assert milestones[0][:2] == (0, "val") and max(milestone[0] for milestone in milestones) == tokens
        assert all(low < high for _, _, low, high in milestones)
    reference = ROOT / "reference/shakespeare"
    matches, verdict = check.compare(reference, check.read_reference(reference), 512, torch.float32)
    assert matches, verdict

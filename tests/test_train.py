"""Runs of a second: losses against a plain loop, for every division of a step; what they print."""

import json
import math
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from torch._dynamo.utils import counters

import sample
import train_gpt2
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.tokenizer import get_tokenizer
from tests.conftest import (
    ROOT,
    TINY,
    logits_of,
    losses,
    numbers,
    posix,
    read_log,
    starts,
    train,
    train_on_ranks,
    words,
)
from train_gpt2 import GPT, DataLoaderLite, GPTConfig

pytestmark = pytest.mark.torch

TASKS = ROOT / "tests/hellaswag_sample.jsonl"


def draw_numbers():
    """In each micro-step of an update each rank prints a number, as its dropout would draw it."""
    get_lr, forward, updating = train_gpt2.get_lr, GPT.forward, []

    def noting(step, config):
        updating.append(step)
        return get_lr(step, config)

    def drawing(self, *args, **options):
        if updating and self.training:  # not in the set-up
            print("drawn", torch.rand(1).item())
        return forward(self, *args, **options)

    train_gpt2.get_lr, GPT.forward = noting, drawing


def test_losses_do_not_depend_on_ranks_or_micro_batches(text, tmp_path):
    """Six micro-batches of 1, or one of 6; on three ranks two each.

    The third rank has none of the two sequences that are evaluated, but tasks of HellaSwag."""
    args = ["--seq-len 64 --total-batch-size 384 --max-lr 2e-2 --max-steps 3 --data", text]
    args += ["--eval-every 3 --eval-tokens 128 --hellaswag-every 3 --hellaswag-data", TASKS]
    for B in (1, 6):
        train(*args, "--micro-batch-size", B, "--log-dir", tmp_path / f"alone_{B}")
    more = ["--micro-batch-size 1 --sample-every 2 --log-dir", tmp_path / "three"]
    texts = train_on_ranks(3, tmp_path, *args, *more, disturb=draw_numbers)
    drawn = [number for output in texts for number in re.findall(r"drawn ([\d.]+)", output)]
    assert len(drawn) == len({*drawn}) == 3 * 3 * 2, "two ranks or steps have the same dropout"
    # Two samples from each rank at step 2, and at the end.
    assert [output.count("ROMEO:") for output in texts] == [4, 4, 4]
    assert len({output.split("ROMEO:")[1] for output in texts}) == 3
    assert [1, 64, 2, 3] in map(numbers, texts[0].splitlines())  # B, T, micro-steps, ranks
    flops = 6 * (50257 * 16 + 2 * (12 * 16 + 13) * 16 + 2 * 16) + 12 * 2 * 16 * 64
    rates, mfu = (losses(tmp_path / "three", stream) for stream in ("tok_per_sec", "mfu"))
    assert mfu == pytest.approx([rate * flops / 3e12 for rate in rates], abs=1e-3)
    expected = losses(tmp_path / "alone_6")
    assert len(expected) == 3 and expected[-1] < expected[0] - 0.2
    for name in ("alone_1", "three"):
        for stream, tolerance in (("train", 1e-4), ("val", 1e-4), ("hella", 0), ("norm", 1e-3)):
            found, other = (losses(tmp_path / run, stream) for run in (name, "alone_6"))
            assert found == pytest.approx(other, abs=tolerance), (name, stream)


def test_losses_in_16_bits_are_those_of_float32_to_rounding(text, tmp_path):
    """Products are rounded to 8 or 11 bits. The gradients of both optimizers are unscaled."""
    args = ["--max-steps 4 --eval-every 4 --optimizer muon --data", text, "--dtype"]
    for dtype in ("float32", "bfloat16", "float16"):
        train(*args, dtype, "--log-dir", tmp_path / dtype)
    for dtype in ("bfloat16", "float16"):
        for stream, tolerance in (("train", 3e-2), ("val", 3e-2), ("norm", 0.1)):
            found, exact = (losses(tmp_path / name, stream) for name in (dtype, "float32"))
            assert found == pytest.approx(exact, abs=tolerance), (dtype, stream)
            assert found != exact, f"{stream} was not computed in {dtype}"


def test_losses_and_a_clipped_update_equal_a_plain_loop(text, tmp_path):
    """Two steps of the script against torch's own pieces, without accumulation."""
    flags = "--max-steps 2 --save-every 2 --max-lr 1e-2 --grad-clip 0.5 --seed 7"
    train(flags, "--data", text, "--log-dir", tmp_path)
    torch.manual_seed(7)
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    groups = []
    for dim, decay in ((2, 0.1), (1, 0.0)):
        parameters = [p for p in model.parameters() if p.dim() == dim]
        groups.append({"params": parameters, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    loader = DataLoaderLite(text, "train", 8, 16, seed=7)
    for step, lr in enumerate((5e-3, 1e-2)):
        x, y = loader.next_batch()
        loss = torch.nn.functional.cross_entropy(logits_of(model, x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert losses(tmp_path)[step] == pytest.approx(loss.item(), abs=1e-5)
    trained = GPT.from_pretrained(tmp_path / "step_000002")
    for (name, a), b in zip(model.named_parameters(), trained.parameters(), strict=True):
        # AdamW divides tiny gradients by their size, and so magnifies their rounding.
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=name)


def test_validation_loss_is_the_mean_over_all_tokens_and_counts_each_once(tmp_path):
    """160 tokens are 10 sequences, which B = 3 does not divide; the last one has a target."""
    tokens = np.random.default_rng(0).integers(0, 50257, 161).astype("uint16")
    np.save(tmp_path / "a_val_000000.npy", tokens)
    np.save(tmp_path / "a_train_000000.npy", tokens)
    torch.manual_seed(1337)
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    x, y = (
        torch.from_numpy(part.astype("int64")).view(10, 16) for part in (tokens[:-1], tokens[1:])
    )
    for B, eval_tokens, sequences in ((1, 160, 10), (3, 160, 10), (3, 64, 4), (8, 400, 10)):
        log = tmp_path / f"{B}-{eval_tokens}"
        flags = f"--micro-batch-size {B} --eval-tokens {eval_tokens} --total-batch-size {16 * B}"
        train(flags, "--max-steps 0 --eval-every 1 --data", tmp_path, "--log-dir", log)
        scores = logits_of(model, x[:sequences]).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(scores, y[:sequences].flatten()).item()
        assert losses(log, "val") == [pytest.approx(expected, abs=1e-5)], (B, eval_tokens)


def test_compiled_runs_equal_eager_ones_and_evaluate(text, tmp_path, capsys, monkeypatch):
    """Validation, HellaSwag and samples in a compiled run; without C++, which takes long."""
    args = ["--max-steps 3 --eval-every 2 --hellaswag-every 2 --sample-every 2 --seq-len 64"]
    args += ["--data", text, "--hellaswag-data", TASKS]
    train(*args, "--log-dir", tmp_path / "eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for name, flags in {"compiled": "", "low-memory": "--low-memory"}.items():
        counters.clear()
        torch._dynamo.reset()
        train(*args, "--compile on", flags, "--log-dir", tmp_path / name)
        assert counters["stats"]["unique_graphs"] > 1, "nothing was compiled"
        for stream, steps in {"train": "012", "val": "023", "hella": "023"}.items():
            logged = read_log(tmp_path / name, stream)
            assert [line.split()[0] for line in logged] == list(steps)
            expected = pytest.approx(losses(tmp_path / "eager", stream), abs=1e-3)
            assert losses(tmp_path / name, stream) == expected
    out = capsys.readouterr().out
    assert out.count("ROMEO:") >= 3 * (2 + 2)
    assert out.count(" s left\n") == 3 * 2, "the first step, which compiles, does not say it"


def test_a_run_ends_with_its_results(tmp_path, monkeypatch, capsys):
    """Two samples, the loss per character, curves, and a command that samples from the model."""
    monkeypatch.chdir(tmp_path)
    text = "A naïve 日本語 🙂 text. " * 99  # characters of several bytes and tokens
    Path("text.txt").write_text(text, encoding="utf-8")
    args = ["--max-steps 2 --eval-every 2 --eval-tokens 100 --sample-every 2 --save-every 2"]
    args += ["--data text.txt --log-dir", Path("my log")]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train_gpt2.py"), *words(*args)])
    train(*args, curves=True)
    end = capsys.readouterr().out.split("ROMEO:", 1)[1]
    for sampled in end.split("ROMEO:")[:2]:  # of an untrained model; some characters are no text
        assert 40 < len(get_tokenizer().encode_ordinary(sampled)) < 250
    # Six sequences of 16 tokens: 97, of which 96 are predicted.
    tokens = [50256, *get_tokenizer().encode_ordinary(text)]
    x = torch.tensor(tokens[len(tokens) - len(tokens) // 10 :][:97])
    val = losses("my log", "val")[-1]
    model = GPT.from_pretrained("my log/step_000002")
    expected = model(x[:-1].view(6, 16), x[1:].view(6, 16)).item()
    assert val == pytest.approx(expected, abs=1e-5)
    predicted = b"".join(map(get_tokenizer().decode_single_token_bytes, x[1:].tolist()))
    characters = sum(byte & 0xC0 != 0x80 for byte in predicted)  # those that begin in it
    bpb = val * 96 / len(predicted) / math.log(2)
    assert losses("my log", "bpb")[-1] == pytest.approx(bpb, abs=1e-6)
    printed = [number for line in end.splitlines() for number in numbers(line)]
    for value in (val, val * 96 / characters, bpb):
        assert any(abs(number - value) < 6e-5 for number in printed), value
    assert str(Path("my log/curves.png")) in end and "my log/step_000002" in end
    assert Path("my log/curves.png").read_bytes().endswith(b"IEND\xaeB\x60\x82")
    _, program, *rest = shlex.split(re.search("python .+", end)[0])
    assert Path(program).samefile(ROOT / "sample.py")
    sample.main([*rest, "--max-new-tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("ROMEO:")
    # Files that may be published don't leak local paths.
    (entry,) = starts(Path("my log"))
    assert entry.pop("paths")["data"] == str(tmp_path / "text.txt")
    for content in (json.dumps(entry), Path("my log/step_000002/README.md").read_text()):
        assert "train_gpt2.py" in content and str(tmp_path) not in content
    card = ModelCard.load("my log/step_000002/README.md").data  # as the Hub reads it
    assert card.library_name == "transformers"


def test_a_diverged_model_is_evaluated_and_ends_with_the_message_of_its_update(text, tmp_path):
    """The first update is far too large, so the losses that follow are not finite."""
    flags = "--max-steps 4 --seq-len 64 --eval-every 1 --hellaswag-every 1 --hellaswag-data"
    args = [flags, TASKS, "--max-lr 9e18 --warmup-steps 0 --data", text]
    with pytest.raises(RunError, match=r"step 1\b.*diverged.*--max-lr"):
        train(*args, "--log-dir", tmp_path)
    assert [line.split()[:2] for line in read_log(tmp_path, "val", "hella")] == [
        [str(step), stream] for step in (0, 1) for stream in ("val", "hella")
    ]
    assert not math.isfinite(losses(tmp_path, "val")[1])


def test_float16_ends_a_run_whose_gradients_always_overflow(text, tmp_path, monkeypatch):
    """Each overflow halves the scale; at 1 the gradient itself is not finite."""
    init = GPT.__init__

    def overflowing(self, config):
        init(self, config)
        self.wpe.weight.register_hook(lambda grad: grad * torch.inf)

    monkeypatch.setattr(GPT, "__init__", overflowing)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    with pytest.raises(RunError, match="step 2"):
        flags = "--max-steps 4 --total-batch-size 32 --dtype float16 --data"
        train(flags, text, "--log-dir", tmp_path)
    assert all(map(math.isfinite, losses(tmp_path)))


# A flag, and what it changes in a run of four steps, one of warm-up and two of warm-down.
BASE = "--schedule wsd --warmup-steps 1 --warmdown 0.5 --max-steps 4 --optimizer muon"
BASE += " --grad-clip 2 --total-batch-size 32 --eval-tokens 32"
CHANGES = {
    "--seed 5": "train",
    "--no-shuffle": "train",
    "--total-batch-size 64": "train",
    "--seq-len 8": "train",
    "--n-layer 1": "train",
    "--n-head 1": "train",
    "--n-embd 8": "train",
    "--optimizer adamw": "train",
    "--weight-decay 5": "train",
    "--grad-clip 0.1": "train",
    "--beta2 0.5": "train",
    "--schedule cosine": "lr",
    "--warmup-steps 2": "lr",
    "--warmdown 0.25": "lr",
    "--max-lr 4e-3": "lr",
    "--min-lr 1e-4": "lr",
    "--dtype bfloat16": "train",
    "--max-steps 2": "train",
    "--eval-tokens 64": "val",
    "--eval-every 1": "val",
    "--micro-batch-size 1": None,
    "--low-memory": None,
    "--eval-every 0 --save-every 1": None,
    "--grad-clip 0": None,  # the norms are below 2
}


def test_each_setting_acts_and_what_acts_on_training_must_not_change_on_resume(text, tmp_path):
    """But for what docs/resuming.md allows with care, and the precision of another device."""
    args = [BASE, "--eval-every 2 --data", text, "--log-dir"]
    train(*args, tmp_path / "base", "--save-every 4")
    assert max(losses(tmp_path / "base", "norm")) < 2
    wrong = []
    for flags, stream in CHANGES.items():
        log = tmp_path / flags
        train(*args, log, flags)
        if stream is None:
            tolerance = 1e-5 if flags == "--micro-batch-size 1" else 0  # rounding
            expected = pytest.approx(losses(tmp_path / "base"), rel=0, abs=tolerance)
            acts = losses(log) != expected
        else:
            acts = losses(log, stream) != losses(tmp_path / "base", stream)
        if acts != bool(stream):
            wrong.append(flags)
        allowed = (
            "--max-steps",
            "--epochs",
            "--warmdown",
            "--dtype",
            "--max-lr",
            "--min-lr",
            "--grad",
        )
        if stream in ("train", "lr") and not flags.startswith(allowed):
            try:
                train(*args, tmp_path / "base", "--save-every 4 --resume", flags)
                wrong.append(f"{flags} on resume")
            except UserError as error:
                assert re.search(rf"{words(flags.replace('--no-', '--'))[0]}\b", str(error))
    assert not wrong
    allowed = "--max-steps 5 --warmdown 0 --max-lr 4e-3 --min-lr 0 --grad-clip 0.5"
    train(*args, tmp_path / "base", "--save-every 4 --resume", allowed)
    assert losses(tmp_path / "base", "lr")[4:] == [4e-3], "as after a run that diverged"


def defaults(flags, capsys):
    """{flag: its default in --help}, as text."""
    with pytest.raises(SystemExit) as stop:
        train_gpt2.main([*words(flags), "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    found = {}
    for part in re.split(r" (?=--[a-z])(?!--no-)", shown):
        default = re.search(r"\(default: (.*?)\)", part)
        if default:
            found[part.split()[0].rstrip(",")] = default[1]
    return found


def test_presets_are_those_of_the_shipped_references(capsys):
    """Their losses, published or measured, are what README.md promises."""
    rates = ("max_steps", "max_lr", "min_lr", "grad_clip")
    names = {*train_gpt2.MUST_NOT_CHANGE, *rates, "eval_every", "eval_tokens", "save_every"}
    for preset in ("gpt2", "shakespeare"):
        shown = defaults(f"--preset {preset}", capsys)
        recorded = json.loads((ROOT / f"reference/{preset}/run.json").read_text())[-1]["config"]
        for name in names - {"preset", "seed"}:
            flag, value = "--" + name.replace("_", "-"), recorded[name]
            if isinstance(value, float | int) and not isinstance(value, bool):
                assert float(shown[flag]) == value, (preset, flag)
            else:
                assert shown[flag] == str(value), (preset, flag)


def test_a_preset_is_chosen_by_the_shards_and_changes_defaults(tmp_path, monkeypatch, capsys):
    """GPT-2 needs a GPU. The first line names the preset, and how to train the other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "scratch").mkdir()  # a common name, and no --init
    assert train_gpt2.main([*words(*TINY)[2:], "--max-steps", "0"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert "python fineweb.py" in first and "shakespeare" in first
    (tmp_path / "edu_fineweb10B/crawl/2013").mkdir(parents=True)
    (tmp_path / "edu_fineweb10B/crawl/2013/edufineweb_train_000001.npy").touch()
    assert defaults("", capsys)["--data"].endswith("input.txt"), "the data loader goes less deep"
    (tmp_path / "edu_fineweb10B/crawl/edufineweb_train_000001.npy").touch()
    assert defaults("", capsys)["--data"] == "edu_fineweb10B"
    assert train_gpt2.main([*words(*TINY)[2:], "--max-steps", "0"]) == 0  # with --device cpu
    first, *_ = capsys.readouterr().out.splitlines()
    assert "--preset gpt2" in first and "shakespeare" in first


@posix
def test_ctrl_c_while_a_compiler_runs_says_so(text, tmp_path, monkeypatch, capsys):
    """It reaches the compiler as well, whose failure says nothing about the machine."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nkill -INT {os.getpid()}\nsleep 1\nexit 1\n")
    compiler.chmod(0o755)
    args = ["--compile on --max-steps 3 --data", text, "--log-dir", tmp_path / "log"]
    patched = torch._inductor.config.patch({"cpp.cxx": (str(compiler),)})
    with patched, pytest.raises(SystemExit) as end:
        run_and_exit(partial(train, *args))
    line = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 1
    assert line.startswith("error: stopped by a signal") and "--resume" in line

"""What single flags, and lines of the output, promise."""

import contextlib
import errno
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import hellaswag as hellaswag_script
import sample
import train_gpt2
from support import (
    checkpoints,
    cli,
    console,
    devices,
    files,
    hellaswag,
    huggingface,
    loading,
    memory,
    plan,
    plots,
    ranks,
    run_folder,
    run_log,
    signals,
    trackers,
)
from support.devices import matmul_flops
from support.errors import RunError, Stopped, UserError, explain
from support.run_log import format_line
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, losses, read_log, steps_of, train, words
from train_gpt2 import GPT, GPTConfig, Ranks

CPU = torch.device("cpu")
NO_AUTOCAST = torch.autocast("cpu", enabled=False)
SMALL_RUN = [
    "--preset shakespeare --n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --total-batch-size 128",
    "--device cpu --dtype float32 --eval-tokens 64 --eval-every 0 --sample-every 0 --save-every 0",
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_how_many_samples_of_what_length(rank, last, monkeypatch, capsys):
    """Four of 32 tokens from each rank, by seeds of their own; at the end two of 64 from rank 0."""
    asked = []

    def generate(idx, max_new_tokens, generator):
        asked.append((idx.tolist(), max_new_tokens, generator.initial_seed()))
        return idx

    model = GPT(GPTConfig(16, 50257, 1, 1, 8))
    monkeypatch.setattr(model, "generate", generate)
    train_gpt2.print_samples(model, " the", Ranks(rank, 2, CPU), NO_AUTOCAST, last)
    expected = [([[262]] * 4, 32, 42 + rank)]
    if last:
        expected = [([[262]] * 2, 64, 42)] if rank == 0 else []
    assert asked == expected
    assert capsys.readouterr().out.count(f"rank {rank} sample") == sum(len(a[0]) for a in expected)


@pytest.mark.parametrize(
    "flags, interval", [("", 20), ("--save-every 7", 7), ("--save-every 7 --eval-every 5", 5)]
)
def test_the_time_left_is_by_the_interval_of_evaluations(flags, interval, text, tmp_path):
    args = ["--max-steps 1 --data", text, "--log-dir", tmp_path, flags]
    with pytest.raises(StopIteration, match=f"^{interval}$"):
        train_gpt2.main(
            words(*SMALL_RUN, *args),
            before_step=lambda step, training: stop_with(training.meter.interval),
        )


def stop_with(value):
    raise StopIteration(value)


def test_the_first_line_says_why_it_trains_on_shakespeare(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = words(*SMALL_RUN)[2:]
    line = "no shards in edu_fineweb10B/ (`python fineweb.py` builds them): the shakespeare preset"
    for args, said in (([], True), (["--preset", "shakespeare"], False), (["--data", text], False)):
        args = [*shape, *map(str, args), "--max-steps", "0", "--log-dir", str(tmp_path / "log")]
        assert train_gpt2.main(args) == 0
        assert (capsys.readouterr().out.splitlines()[0] == line) == said


def test_only_low_memory_returns_freed_memory(text, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(devices, "keep_freed_memory", kept.append)
    args = ["--max-steps 0 --data", text, "--log-dir", tmp_path]
    train(*args)
    assert kept == [True]
    train(*args, "--low-memory")
    assert kept[1:] == [True, False]


def test_deterministic_asks_torch_for_deterministic_kernels(text, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    args = ["--max-steps 0 --data", text, "--log-dir", tmp_path]
    train(*args)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        train(*args, "--deterministic")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_every_earlier_runs_checkpoints_are_kept(text, tmp_path):
    for seed in range(3):
        train("--max-steps 1 --save-every 1 --data", text, "--log-dir", tmp_path, "--seed", seed)
    assert steps_of(tmp_path) == steps_of(tmp_path / "earlier_1") == [1]
    assert steps_of(tmp_path / "earlier_2") == [1]
    seeds = [
        torch.load(tmp_path / f"{folder}/step_000001/training_state.pt")["config"]["seed"]
        for folder in ("earlier_1", "earlier_2", ".")
    ]
    assert seeds == [0, 1, 2]


@pytest.mark.parametrize("flags, hint", [("", "nothing is saved"), ("--save-every 9", "--resume")])
def test_a_stopped_run_says_whether_it_can_go_on(flags, hint, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signals, "collect_stop_signals", lambda: signals.received.append(15))
    try:
        assert train("--max-steps 9 --data", text, "--log-dir", tmp_path, flags) == 143
    finally:
        signals.received.clear()
    assert f"stopped by a signal after 0 updates; {hint}" in capsys.readouterr().out
    assert steps_of(tmp_path) == ([0] if flags else [])


def test_a_stopped_run_keeps_no_more_checkpoints_than_others(text, tmp_path, monkeypatch):
    def get_lr(step, config):
        if step == 3:
            signals.received.append(15)
        return 1e-3

    monkeypatch.setattr(train_gpt2, "get_lr", get_lr)
    args = ["--data", text, "--log-dir", tmp_path, "--save-every 2 --keep-checkpoints 1"]
    status = train("--max-steps 9", *args)
    signals.received.clear()
    assert status == 143 and steps_of(tmp_path) == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_resumed_run_maps_no_file_of_its_checkpoint(text, tmp_path, monkeypatch):
    """Or NFS could not remove the checkpoint."""
    args = ["--max-lr 1e-3 --data", text, "--log-dir", tmp_path, "--save-every 1 --max-steps"]
    train(*args, 1)
    mapped = []

    def get_lr(step, config):
        mapped.append(Path("/proc/self/maps").read_text())
        return 1e-3

    monkeypatch.setattr(train_gpt2, "get_lr", get_lr)
    train(*args, 2, "--resume")
    assert len(mapped) == 1 and "step_000001" not in mapped[0]


def test_cost_and_peak_memory(capsys):
    console.print_cost(1234, 90.0)
    assert "done: 1,234 steps, 1.5 minutes of training" in capsys.readouterr().out
    peak = devices.peak_memory()
    if Path("/proc/self/status").exists():
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
        assert peak == pytest.approx(1024 * int(status.split()[0]), rel=0.05)


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "; free some space"),
        (errno.EDQUOT, "; free some space"),
        (errno.EACCES, "; choose a writable place"),
        (errno.EROFS, "; choose a writable place"),
        (errno.EMFILE, "; raise it with `ulimit -n`"),
        (errno.ENOENT, ""),
    ],
)
def test_errors_of_the_system_name_file_and_remedy(number, remedy):
    error = OSError(number, os.strerror(number), "a/b")
    assert cli.message_for_user(error) == f"a/b: {os.strerror(number)}{remedy}"
    assert cli.message_for_user(OSError(number, "why")) == f"why{remedy}"
    assert cli.message_for_user(OSError(errno.ENOTSOCK, "a bug")) is None


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot open folders")
def test_a_mount_that_cannot_flush_folders_is_used(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    for number, path, fine in (
        (errno.EINVAL, tmp_path, True),
        (errno.ENOTSUP, tmp_path, True),
        (errno.EIO, tmp_path, False),
        (errno.EINVAL, tmp_path / "a", False),
    ):
        monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(number, "why")))
        with contextlib.nullcontext() if fine else pytest.raises(OSError):
            files.fsync(path)


def test_another_vocabulary_gets_no_tokenizer(tmp_path):
    GPT(GPTConfig(16, 100, 1, 1, 8)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] is None and config["eos_token_id"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("stream", ["train", "val"])
def test_the_first_losses_do_not_squeeze_the_curve(stream):
    """The axis ends above the highest loss after the first twentieth, and above a baseline."""
    x = np.arange(41) * 10.0  # so few are not smoothed
    values = np.where(x < 20, 11.0, 4.0)

    def top(values, baselines):
        axes = Figure().add_subplot()
        plots.draw_loss(axes, {"log": {stream: (x, values)}}, "tokens", baselines)
        return axes.get_ylim()[1]

    if stream == "val":  # without a training loss nothing is cropped
        assert top(values, {}) == pytest.approx(1.05 * 11)
        return
    assert top(values, {}) == pytest.approx(1.05 * 4)
    assert top(values, {"GPT-2": 5.0}) == pytest.approx(1.05 * 5)
    assert top(np.where(x < 30, 11.0, 4.0), {}) == pytest.approx(1.05 * 11)
    values[-1] = np.inf
    assert top(values, {}) < 100  # a diverged run is drawn up to there


def test_curves_compare_with_openais_loss_on_fineweb_edu_only(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "draw_loss", lambda *args: drawn.append(args[-1]))
    (tmp_path / "log.txt").write_text("0 train 9.0\n")
    for data in ("edu_fineweb10B", "input.txt"):
        config = {"total_batch_size": 10, "data": data}
        (tmp_path / "run.json").write_text(json.dumps([{"config": config}]))
        plots.save_curves(tmp_path)
    assert drawn == [{"GPT-2 124M (OpenAI)": 3.2924}, {}]


def test_what_a_run_is_about_to_do(capsys):
    """Its first lines, of a small GPT-2 that reads 100,000 tokens on two ranks."""
    model = GPT(GPTConfig(32, 50257, 1, 2, 8))
    loader = SimpleNamespace(B=4, T=16, world_size=2, total_tokens=100_000)
    peak = (2.5e12, "data sheet")
    run = dict(device="cpu", model=model, loader=loader, peak=peak, log_dir="log")
    shown = dict(data="x.txt", max_steps=1500, total_batch_size=1024)
    console.announce(**run, **shown, checkpoint=Path("log/step_000007"))
    # Tokens, matrices, biases, LayerNorms: all but the positions.
    N = 50257 * 8 + 12 * 8 * 8 + 9 * 8 + 6 * 8
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "device: cpu",
        f"model: {N + 32 * 8:,} parameters, {(6 * N + 12 * 8 * 16) / 1e6:.0f} MFLOP per token",
        "speed: MFU 100 % = 2.5 TFLOP/s per device (data sheet)",
        "data: x.txt, 100,000 training tokens",
        "steps: 1,500 of 1,024 tokens, 15.360 epochs",
        "note: --max-steps 390 would read the text 4 times, after which it teaches little; "
        "keep --warmup-steps below",
        "batch: 4 x 16 tokens x 8 micro-steps x 2 ranks",
        "log and checkpoints: log/, resumed from log/step_000007",
    ]
    console.announce(**run, data="x.txt", max_steps=10, total_batch_size=1024, checkpoint=None)
    assert capsys.readouterr().out.splitlines()[-1] == "log and checkpoints: log/"


def test_how_values_are_written():
    values = {"train": 10.98765432, "lr": 6e-4 / 715, "tok_per_sec": 12345.678, "mfu": 0.123456}
    values |= {"ms": 12.3456, "hella": 0.298765, "norm": 1 / 3, "val": 3.0}
    assert "".join(format_line(7, name, value) for name, value in values.items()) == (
        "7 train 10.987654\n7 lr 8.391608e-07\n7 tok_per_sec 12345.7\n7 mfu 0.1235\n"
        "7 ms 12.35\n7 hella 0.2988\n7 norm 0.333333\n7 val 3.000000\n"
    )


def test_the_measured_peak_is_the_best_of_several_products(monkeypatch):
    """Two n^3 operations each; it ends after 20 products, or after a second."""
    for durations, best in (([0.4, 0.5, 0.25], 0.25), ([0.01] * 19 + [0.005], 0.005)):
        ticks = []
        for seconds in durations:
            ticks += [len(ticks) * 10.0, len(ticks) * 10.0 + seconds]
        ticks = iter(ticks)
        monkeypatch.setattr(devices.time, "perf_counter", lambda: next(ticks))  # noqa: B023
        assert matmul_flops(CPU, torch.float32, 32) == pytest.approx(2 * 32**3 / best)
        assert next(ticks, None) is None


def test_which_models_may_train_in_bfloat16_on_a_cpu(monkeypatch):
    rates = {torch.bfloat16: 1.5, torch.float32: 1.0}
    monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n=0: rates[dtype])
    assert devices.choose_precision("auto", CPU, 49_999_999)[0] == torch.float32
    assert devices.choose_precision("auto", CPU, 50_000_000)[0] == torch.bfloat16
    before = devices.choose_precision("auto", CPU, 50_000_000, before="torch.float32")
    assert before[0] == torch.float32 and before[1].endswith("float32: as in the checkpoint")
    given = devices.choose_precision("bfloat16", CPU, 9, before="torch.float32")
    assert given[1].endswith("bfloat16: as requested; float32 so far")


@pytest.mark.parametrize("device, low_memory", [("meta", False), ("meta", True), ("cpu", False)])
def test_what_is_compiled(device, low_memory, monkeypatch):
    """Blocks everywhere; head and loss in one piece not on a CPU, and not with --low-memory."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(self))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: (function, dynamic))
    with torch.device(device):
        model = GPT(GPTConfig(16, 50257, 2, 1, 8))
    model.prepare(compiled=True, low_memory=low_memory)
    assert compiled == list(model.h) and model.low_memory == low_memory
    whole = device == "meta" and not low_memory
    assert (type(model.loss_function) is tuple) == whole
    assert (type(model.validation_function) is tuple) == whole
    if whole:
        assert model.validation_function == (train_gpt2.next_token_loss, False)
        function, dynamic = model.loss_function
        assert function.keywords == {"loss_function": train_gpt2.training_loss, "padded": True}
        assert dynamic is False
    GPT(GPTConfig(16, 50257, 2, 1, 8)).prepare()
    assert len(compiled) == 2


def test_the_cost_of_a_run_is_of_all_its_steps(text, tmp_path, monkeypatch):
    costs = []
    monkeypatch.setattr(console, "print_cost", lambda *args: costs.append(args))
    args = ["--save-every 2 --data", text, "--log-dir", tmp_path, "--max-steps"]
    train(*args, 2)
    train(*args, 3, "--resume")
    for steps, seconds in costs:
        assert seconds == pytest.approx(sum(losses(tmp_path, "ms")[:steps]) / 1e3, abs=1e-4)
    assert [steps for steps, _ in costs] == [2, 3]


def test_what_a_plan_is_made_of(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(plan, "print_plan", lambda model, **options: given.update(options))
    flags = "--plan --device cpu --dtype float16 --max-steps 7 --total-batch-size 96 --seq-len 32"
    flags += " --micro-batch-size 3 --low-memory --compile --data"
    assert train_gpt2.main([*flags.split(), str(tmp_path)]) == 0
    expected = dict(device="cpu", dtype="float16", data=str(tmp_path), max_steps=7)
    expected |= dict(total_batch_size=96, B=3, T=32, low_memory=True, compiled=True)
    assert given == expected


@pytest.mark.parametrize(
    "received, status", [([2], 130), ([15], 143), ([15, 2], 143), ([2, 15], 130), ([1], 143)]
)
def test_the_first_signal_decides_on_the_exit_status(received, status, monkeypatch):
    monkeypatch.setattr(signals, "received", received)
    assert signals.exit_status() == status


def test_a_loaded_model_is_for_evaluation_and_has_gpt2s_vocabulary(tmp_path):
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(tmp_path / "model")
    model = loading.load_gpt(str(tmp_path / "model"), CPU)
    assert not model.training
    GPT(GPTConfig(16, 50304, 1, 1, 8)).save_pretrained(tmp_path / "padded")
    assert loading.load_gpt(str(tmp_path / "padded"), CPU) is None  # it has no tokenizer
    huggingface.write_tokenizer(tmp_path / "padded", 16)
    with pytest.raises(UserError, match="a vocabulary of 50304 tokens, but GPT-2's has 50257"):
        loading.load_gpt(str(tmp_path / "padded"), CPU)


def test_curves_are_smoothed_over_a_fortieth_of_the_run(monkeypatch):
    halves = []
    monkeypatch.setattr(plots, "smooth", lambda values, half: halves.append(half) or values)
    for n in (79, 800):
        run = {"train": (np.arange(n), np.ones(n))}
        plots.draw_loss(Figure().add_subplot(), {"log": run}, "tokens", {})
    assert halves == [0, 10]


@pytest.mark.parametrize(
    "end, status, line",
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
        (RunError("too bad"), 1, "error: too bad\n"),
        (UserError("your input"), 2, "error: your input\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), 2, "error: a: No such file\n"),
        (143, 143, ""),
        (None, 0, ""),
    ],
    ids=repr,
)
def test_exit_statuses(end, status, line, capsys):
    main = mock.Mock(side_effect=end) if isinstance(end, BaseException) else lambda: end
    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    assert ended.value.code == status and capsys.readouterr().err == line


@pytest.mark.parametrize("rank, world_size", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("lost", [False, True])
def test_which_rank_prints_an_error(rank, world_size, lost, monkeypatch, capsys):
    """Rank 0 at once; the others, and who has lost another rank, if they are still here later."""
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setattr(cli.signal, "signal", mock.Mock())
    cli.print_error("why", rank, world_size, lost)
    assert capsys.readouterr().err == ("error: rank 1: why\n" if rank else "error: why\n")
    assert waited == ([2] if world_size > 1 and (rank or lost) else [])
    monkeypatch.setattr(cli, "received", [15])  # torchrun ends this rank
    cli.print_error("why", rank, world_size, lost)
    silent = lost and world_size > 1
    assert (capsys.readouterr().err == "") == silent


def test_the_log_is_on_disk_before_a_checkpoint(text, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(run_folder, "fsync", lambda path: done.append(path.name))
    write = checkpoints.write_checkpoint

    def write_checkpoint(folder, **options):
        done.append(folder.name)
        return write(folder, **options)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_checkpoint)
    train("--max-steps 1 --save-every 1 --data", text, "--log-dir", tmp_path)
    assert done == ["log.txt", "step_000001"]


@pytest.mark.parametrize("gpt2", [True, False])
def test_the_card_of_a_fork_promises_no_gpt2(gpt2, tmp_path):
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    kind = "gpt2" if gpt2 else huggingface.FORK_TYPE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
    config = {"data": "edu", "init": "scratch", "total_batch_size": 1024}
    run = {"config": config, "command": ["train_gpt2.py", "--seed", "1"], "git_commit": "abc"}
    checkpoints.write_card(tmp_path, run, 1500, loss=3.14159)
    card = (tmp_path / "README.md").read_text()
    begins = "A GPT-2" if gpt2 else "A changed GPT-2, which only its own code loads,"
    assert f"\n{begins} after 1,500 steps of 1,024 tokens of\n`edu`, from scratch, " in card
    assert "at commit\nabc: `python train_gpt2.py --seed 1`\n" in card
    assert ("library_name: transformers" in card) == ("- gpt2\n" in card) == gpt2
    assert "value: 3.1416\n" in card and "name: validation loss, nats per token\n" in card
    assert "type: edu\n" in card and "name: edu\n" in card


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_fails_says_so_once(name, capsys):
    calls = []

    def track(step, values):
        calls.append(step)
        if step == 2:
            raise OSError("no space left")

    guarded = trackers.guarded(name, track)
    for step in range(5):
        guarded(step, {})
    assert calls == [0, 1, 2]
    warning = f"warning: --{name}: nothing more is sent (no space left)\n"
    assert capsys.readouterr().err == warning


def test_a_run_without_hellaswag_goes_on(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hellaswag, "DOWNLOADED", tmp_path / "cache" / "hellaswag_val.jsonl")
    monkeypatch.setattr(hellaswag, "urlopen", mock.Mock(side_effect=OSError("no network")))
    waited = []
    monkeypatch.setattr(hellaswag.time, "sleep", waited.append)
    flags = "--hellaswag-every 1 --max-steps 2 --eval-every 1 --data"
    assert train(flags, text, "--log-dir", tmp_path / "log") == 0
    warning = f"warning: training without HellaSwag: {hellaswag.URL}: download failed (no network)"
    assert capsys.readouterr().out.count(warning) == 1 and waited == [0, 1, 2]
    assert not losses(tmp_path / "log", "hella") and len(losses(tmp_path / "log", "val")) == 3
    # Another machine's download failed.
    tasks = str(ROOT / "tests/hellaswag_sample.jsonl")
    assert hellaswag.prepare_for_training(tasks, 160, lambda problem: [problem, "failed"]) is None
    assert len(hellaswag.prepare_for_training(tasks, 160, lambda problem: [problem, None])) == 24


@pytest.mark.parametrize(
    "flag", ["max-new-tokens=0", "num-samples=0", "top-k=-1", "seed=-1", "temperature=-1"]
)
def test_numbers_of_sample_out_of_range_are_one_line(flag):
    name, value = flag.split("=")
    with pytest.raises(UserError, match=f"^--{name} {value}(\\.0)?: must be "):
        sample.main(["no-model", f"--{flag}"])


@pytest.mark.parametrize("temperature, top_k", [(0.0, 50), (0.7, 0), (1.0, 3)])
def test_transformers_samples_with_the_given_settings(temperature, top_k, capsys):
    asked = []

    def generate(idx, generation, attention_mask, streamer):
        asked.append((idx, generation, attention_mask, torch.initial_seed()))

    model = SimpleNamespace(generate=generate, config=SimpleNamespace(max_position_embeddings=9))
    tokenizer = mock.Mock(
        eos_token_id=7, bos_token="<s>", side_effect=lambda text: mock.Mock(input_ids=[text])
    )
    sampler = sample.transformers_sampler(model, tokenizer)
    assert sampler.context == 9
    assert sampler.encode("a") == ["a"] and sampler.encode("") == ["<s>"]
    config = sample.SampleConfig("m", temperature=temperature, top_k=top_k)
    before = torch.initial_seed()
    sampler.stream(torch.tensor([[1, 2]]), 5, config, 11)
    torch.manual_seed(before)
    ((idx, generation, mask, seed),) = asked
    assert idx.tolist() == [[1, 2]] and mask.tolist() == [[1, 1]] and seed == 11
    assert generation.max_new_tokens == 5 and generation.do_sample == (temperature > 0)
    assert generation.temperature == (temperature or None) and generation.top_k == (top_k or None)
    assert generation.eos_token_id == generation.pad_token_id == 7


def test_seeds_of_several_samples_follow_each_other():
    asked = []
    config = sample.SampleConfig("m", num_samples=3, seed=5, max_new_tokens=4)
    for length, n in ((2, 4), (7, 2)):
        sampler = sample.Sampler(9, lambda text: [1] * length, lambda *args: asked.append(args))  # noqa: B023
        sample.sample(sampler, "a", config, CPU)
        assert [(idx.tolist(), new, seed) for idx, new, _, seed in asked] == [
            ([[1] * length], n, seed) for seed in (5, 6, 7)
        ]
        asked.clear()


def test_what_run_json_says_of_a_start(tmp_path, monkeypatch):
    """The commit, with a + if files have changed; the time in UTC."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(run_log, "ROOT", tmp_path)
    assert run_log.new_entry({})["git_commit"] is None
    run_log.git("add", ".")
    run_log.git(*words("-c user.name=me -c user.email=me commit -m first"))
    commit = run_log.git("rev-parse", "HEAD")
    assert len(commit) == 40 and run_log.new_entry({})["git_commit"] == commit
    (tmp_path / "a").write_text("b")
    now = datetime.now(UTC)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    if hasattr(time, "tzset"):
        time.tzset()
    entry = run_log.new_entry({"max_lr": 0.1, "data": str(Path.cwd() / "x")}, step=7)
    monkeypatch.undo()
    if hasattr(time, "tzset"):
        time.tzset()
    assert entry["git_commit"] == commit + "+"
    started = datetime.strptime(entry["started"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((started - now).total_seconds()) < 60
    assert entry["step"] == 7 and entry["config"] == {"max_lr": 0.1, "data": "x"}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    assert entry["versions"].items() >= versions.items()


def test_hellaswag_curves_have_the_published_results():
    axes = Figure().add_subplot()
    plots.draw_hellaswag(axes, {"log": {"hella": (np.arange(3), np.full(3, 0.28))}}, "tokens")
    values = [line.get_ydata()[0] for line in axes.get_lines()]
    assert values == [0.28, 0.25, 0.2955, 0.337] and axes.get_ylim() == (0.235, 0.35)
    names = {text.get_text() for text in axes.texts}
    assert names == {
        "guessing: 0.25",
        "GPT-2 124M (OpenAI): 0.2955",
        "GPT-3 Small 124M (OpenAI): 0.337",
    }


def test_files_of_a_checkpoint_and_their_keys(text, tmp_path):
    """Other programs read them, and later versions of this one."""
    train("--max-steps 1 --save-every 1 --data", text, "--log-dir", tmp_path)
    checkpoint = tmp_path / "step_000001"
    hub = ["config.json", "merges.txt", "model.safetensors", "tokenizer_config.json", "vocab.json"]
    ours = ["README.md", "SHA256SUMS", "training_state.pt"]
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(hub + ours)
    assert json.loads((checkpoint / "config.json").read_text()) == {
        **dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", dtype="float32"),
        **dict(n_ctx=16, n_positions=16, vocab_size=50257, n_layer=2, n_head=2, n_embd=16),
        **dict(bos_token_id=50256, eos_token_id=50256, n_inner=None),
        **dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, add_cross_attention=False),
        **dict(activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        **dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    }
    eot = "<|endoftext|>"
    assert json.loads((checkpoint / "tokenizer_config.json").read_text()) == {
        **dict(tokenizer_class="GPT2Tokenizer", model_max_length=16),
        **dict(bos_token=eot, eos_token=eot, unk_token=eot),
    }
    state = checkpoints.read_training_state(checkpoint)
    keys = "format step elapsed skipped config dtype random optimizer scaler loader"
    assert set(state) == set(keys.split()) and state["format"] == state["step"] == 1
    assert state["dtype"] == "torch.float32" and state["scaler"] == {}
    assert set(state["loader"]) == {"position", "seed", "shuffle", "shards", "passage"}
    assert state["loader"]["position"] == 128 and state["loader"]["passage"] == 64
    (entry,) = run_log.run_entries(tmp_path)
    keys = "started command git_commit versions log_lines job step device world_size config"
    assert set(entry) - {"script"} == {*keys.split(), "finished"}
    assert (entry["log_lines"], entry["job"], entry["step"]) == (0, "", 0)
    assert (entry["world_size"], entry["finished"]) == (1, 1)


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_sha256sum_checks_a_checkpoint(text, tmp_path):
    train("--max-steps 1 --save-every 1 --data", text, "--log-dir", tmp_path)
    command = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    folder = tmp_path / "step_000001"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK\n") == 6, done


def test_batches_are_pinned_for_a_gpu(text, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(len(self)) or self)
    for pin_memory, expected in ((False, []), (True, [2 * 16 + 1])):
        loader = train_gpt2.DataLoaderLite(text, "train", 2, 16, pin_memory=pin_memory)
        x, y = loader.next_batch()
        assert pinned == expected and torch.equal(x.flatten()[1:], y.flatten()[:-1])


@pytest.mark.parametrize("rank, expected", [(0, ["zero"]), (1, ["one"]), (2, [])])
def test_each_rank_continues_its_own_random_numbers(rank, expected, monkeypatch):
    """With dropout they differ. A rank that the checkpoint lacks keeps those of its seed."""
    restored = []
    monkeypatch.setattr(devices, "set_random_state", lambda device, state: restored.append(state))
    saved = {"loader": {}, "optimizer": {}, "scaler": None, "random": ["zero", "one"]}
    optimizer = SimpleNamespace(load_state_dict=lambda state: None, state={})
    train_gpt2.restore_state(saved, optimizer, None, optimizer, train_gpt2.Ranks(rank, 3, CPU))
    assert restored == expected


def test_random_states_of_another_device(monkeypatch):
    """A run may go on where there is no such device."""
    states = [torch.tensor([7])]
    module = SimpleNamespace(get_rng_state=lambda: states[-1], set_rng_state=states.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    gpu = torch.device("cuda")
    saved = devices.random_state(gpu)
    assert saved.keys() == {"cpu", "cuda"} and saved["cuda"] is states[0]
    assert devices.random_state(CPU).keys() == {"cpu"}
    first = torch.rand(3)
    for device in (gpu, CPU):
        devices.set_random_state(device, saved)
        assert torch.equal(torch.rand(3), first)
    assert len(states) == 2 and states[1] is states[0]
    devices.set_random_state(gpu, {"cpu": saved["cpu"]})
    assert len(states) == 2


def test_peaks_of_a_gpu(monkeypatch):
    """By data sheet only in 16 bits and for chips in the table; measured with larger matrices."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    assert devices.peak_memory() == 123
    measured = []
    monkeypatch.setattr(devices, "matmul_flops", lambda *args: measured.append(args) or 1e12)
    peak, gpu = devices.peak_flops.__wrapped__, torch.device("cuda")
    for name, dtype, expected in (
        ("NVIDIA H200", torch.bfloat16, (989e12, "data sheet")),
        ("NVIDIA H200", torch.float32, (1e12, "measured, 4096 x 4096 product")),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, (1e12, "measured, 4096 x 4096 product")),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)  # noqa: B023
        assert peak(gpu, dtype) == expected
    assert peak(CPU, torch.float32) == (1e12, "measured, 1024 x 1024 product")
    assert [args[-1] for args in measured] == [4096, 4096, 1024]


def test_folders_that_hold_no_model_of_ours(tmp_path):
    """None leaves a folder to transformers, which says what is wrong with it."""
    assert loading.load_gpt(str(tmp_path / "none"), CPU) is None
    with pytest.raises(UserError, match=r"neither a model \(config.json\) nor a run with"):
        loading.find_model(str(tmp_path))
    model = tmp_path / "model"
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    for content in ("{", "[]", "{}", json.dumps(config | {"n_layer": 2})):
        (model / "config.json").write_text(content)
        assert loading.find_model(str(model)) == model
        assert loading.load_gpt(str(model), CPU) is None
    fork = config | {"model_type": huggingface.FORK_TYPE}
    (model / "config.json").write_text(json.dumps(fork))
    with pytest.raises(UserError, match="a fork's weights: load it with that fork"):
        loading.load_gpt(str(model), CPU)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no flock")
def test_a_mount_without_locks_is_used(tmp_path, monkeypatch):
    import fcntl

    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    with files.locked(tmp_path / "new", "in use"):
        (tmp_path / "new" / "a").touch()
    assert (tmp_path / "new" / "a").exists()


def test_a_text_longer_than_the_context_is_one_line():
    model = GPT(GPTConfig(16, 100, 1, 1, 8))
    assert model(torch.zeros(1, 16, dtype=torch.int64))[0].shape == (1, 16, 100)
    with pytest.raises(UserError, match="17 tokens, but the model's context is 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    "B, remedy",
    [
        (0, "a --micro-batch-size below the one in the line `batch:`, --low-memory, or "),
        (1, "--low-memory, or "),
        (2, "--micro-batch-size 1, --low-memory, or "),
        (9, "--micro-batch-size 4, --low-memory, or "),
    ],
)
def test_what_to_try_when_memory_is_short(B, remedy):
    error = explain(torch.OutOfMemoryError("CUDA out of memory"), "cuda:0", B)
    rest = "--shard-optimizer on several ranks"
    assert isinstance(error, UserError)
    assert str(error) == f"out of memory on cuda:0: try {remedy}{rest}"


def test_a_disk_that_is_full_at_the_very_end(text, tmp_path, monkeypatch, capsys):
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(run_log, "write_text", mock.Mock(side_effect=[None, error]))
    assert train("--max-steps 1 --data", text, "--log-dir", tmp_path) == 0
    warning = "warning: run.json: the end of the run is not recorded (No space left on device)\n"
    assert capsys.readouterr().err == warning


def test_a_log_of_an_earlier_version_goes_on(text, tmp_path):
    """Its run.json has no `log_lines`; the folder's last run is the one that continues."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path, "--max-steps"]
    train(*args, 3)
    train(*args, 2)
    entries = run_log.run_entries(tmp_path)
    for entry in entries:
        del entry["log_lines"]
    run_log.write_entries(tmp_path, entries)
    train(*args, 3, "--resume")
    steps = [int(line.split()[0]) for line in read_log(tmp_path, "train")]
    assert steps == [0, 1, 2, 0, 1, 2]
    assert run_log.run_entries(tmp_path)[-1]["log_lines"] == 3 * 6


def test_a_machine_without_git(monkeypatch):
    monkeypatch.setattr(run_log.subprocess, "run", mock.Mock(side_effect=FileNotFoundError))
    assert run_log.new_entry({})["git_commit"] is None


def test_the_steps_left_are_counted_down(text, tmp_path, monkeypatch):
    left = []
    end_step = console.Meter.end_step

    def record(self, began, steps_left):
        left.append(steps_left)
        end_step(self, began, steps_left)

    monkeypatch.setattr(console.Meter, "end_step", record)
    train("--max-steps 3 --data", text, "--log-dir", tmp_path)
    assert left == [2, 1, 0]


N, V, C = 2720, 100, 8  # of the model below: parameters, vocabulary, channels
PROCESS = 10**9 + 5e7


@pytest.mark.parametrize(
    "device, dtype, low_memory, compiled, B, expected",
    [
        # Weights, gradients, moments; two gradients of the embedding; what the blocks keep.
        ("cuda", torch.float32, False, False, 3, 16 * N + 8 * V * C + 2 * 64 * 60 * C),
        ("cuda", torch.float16, False, False, 3, 16 * N + 8 * V * C + 2 * 36 * 60 * C),
        # The logits of a compiled loss, and their gradient.
        ("cuda", torch.float16, False, True, 3, 16 * N + 8 * V * C + 72 * 60 * C + 4 * 60 * V),
        # Only the inputs of the blocks, and the logits in chunks.
        ("cuda", torch.float16, True, True, 3, 16 * N + 8 * V * C + 2 * 4 * 60 * C),
        # In the loss: 40 % of gaps, the head in three copies, logits and probabilities.
        ("cpu", torch.float32, False, False, 3, 12 * N + 1.4 * 128 * 60 * C + 12 * V * C + 480 * V),
        ("cpu", torch.float32, True, False, 3, 12 * N + 8 * 60 * C + 12 * V * C + 480 * V),
        # At the end of the backward pass: gradients, two of the embedding, and one block.
        ("cpu", torch.float32, True, False, 1 / 20, 12 * N + 4 * N + 8 * V * C + 64 * C),
    ],
)
def test_the_terms_of_the_memory_estimate(
    device, dtype, low_memory, compiled, B, expected, monkeypatch
):
    """Of 60 tokens, or of one."""
    monkeypatch.setattr(memory, "peak_memory", lambda: 10**9)
    model = GPT(GPTConfig(20, V, 2, 1, C))
    assert model.num_parameters() == N
    if device == "cpu":
        expected += PROCESS
    how = dict(low_memory=low_memory, compiled=compiled)
    estimate = memory.estimate_memory(model, B, 20, torch.device(device), dtype, **how)
    assert estimate == pytest.approx(expected, rel=1e-9)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), files.atomic_path(tmp_path / "a") as partial:
            partial.mkdir()
            raise error
    assert not list(tmp_path.iterdir())


# A flag, and what it changes in a run of five steps, two of warm-up and three of warm-down.
BASE = "--schedule wsd --warmup-steps 2 --warmdown-steps 3 --max-steps 5 --optimizer muon"
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
    "--warmup-steps 1": "lr",
    "--warmdown-steps 1": "lr",
    "--max-lr 4e-3": "lr",
    "--min-lr 1e-4": "lr",
    "--dtype bfloat16": "train",
    "--max-steps 3": "train",
    "--eval-tokens 64": "val",
    "--eval-every 2": "val",
    "--micro-batch-size 4": None,  # to rounding
    "--low-memory": None,
    "--skip-bad-steps 3": None,
    "--eval-every 0 --save-every 1": None,
}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """A text, and the log of a run without further flags."""
    folder = tmp_path_factory.mktemp("base")
    text = folder / "text.txt"
    text.write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:9000], encoding="utf-8")
    train(BASE, "--eval-every 4 --data", text, "--log-dir", folder / "log")
    return text, folder / "log"


@pytest.mark.parametrize("flags", CHANGES)
def test_each_setting_acts(flags, unchanged, tmp_path):
    text, log = unchanged
    train(BASE, "--eval-every 4 --data", text, "--log-dir", tmp_path, flags)
    stream = CHANGES[flags]
    if stream is None:
        assert losses(tmp_path) == pytest.approx(losses(log), abs=1e-5)
    else:
        assert losses(tmp_path, stream) != losses(log, stream)


def test_a_bad_token_is_named_with_its_file(tmp_path):
    """In the middle of a shard, where opening it does not look."""
    for i in range(4):
        tokens = np.arange(9000, dtype=np.uint16) + i
        tokens[0] = 50256
        if i == 2:
            tokens[4000] = 60_000
        np.save(tmp_path / f"x_train_{i:06d}.npy", tokens)
    for seed in range(3):
        loader = train_gpt2.DataLoaderLite(tmp_path, "train", 1, 16, seed=seed)
        with pytest.raises(UserError, match=r"/x_train_000002\.npy: token 60000"):
            loader.read(0, loader.total_tokens)


def test_a_sequence_of_more_tokens_than_keep_a_cpu_busy(monkeypatch):
    flags = "--preset gpt2 --device cpu --seq-len 8192 --total-batch-size 32768"
    config = train_gpt2.read_config(flags.split())
    alone = Ranks(0, 1, CPU)
    assert train_gpt2.choose_micro_batch_size(config, None, alone, NO_AUTOCAST) == 1


def test_a_rank_uses_the_gpu_of_its_local_rank(monkeypatch):
    """On the second of two machines with two GPUs."""
    for name, value in dict(RANK=3, LOCAL_RANK=1, WORLD_SIZE=4).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    joined = []
    monkeypatch.setattr(ranks, "choose_device", lambda *args: args)
    monkeypatch.setattr(ranks, "join_process_group", lambda *args: joined.append(args))
    started = Ranks.start("cuda")
    assert (started.rank, started.world_size, started.device) == (3, 4, ("cuda", 1, 4))
    assert joined == [(3, 4, ("cuda", 1, 4))]


@pytest.mark.parametrize(
    "vocabulary, tokenizer, fine",
    [
        (50257, "gpt2", True),
        (50304, "gpt2", True),  # padded
        (50256, "gpt2", False),
        (50257, "other", False),
        (50257, None, True),
        (50304, None, True),
        (50258, None, False),
    ],
)
def test_which_models_hellaswag_scores(vocabulary, tokenizer, fine, tmp_path):
    encode = get_tokenizer().encode_ordinary
    if tokenizer == "other":
        tokenizer = lambda text, add_special_tokens: SimpleNamespace(input_ids=[1])  # noqa: E731
    elif tokenizer:
        tokenizer = lambda text, add_special_tokens: SimpleNamespace(input_ids=encode(text))  # noqa: E731
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocabulary))
    with contextlib.nullcontext() if fine else pytest.raises(UserError, match="GPT-2's tokenizer"):
        hellaswag_script.check_model(tmp_path, model, tokenizer)


def test_prompts_are_lines_without_their_ends(monkeypatch):
    prompts = []
    monkeypatch.setattr(sample, "load", lambda name, device: None)
    monkeypatch.setattr(sample, "sample", lambda sampler, prompt, *args: prompts.append(prompt))
    stdin = io.TextIOWrapper(io.BytesIO(b"To be\n\n or not "), encoding="utf-8")
    monkeypatch.setattr(sample.sys, "stdin", stdin)
    sample.main(["model", "--device", "cpu"])
    assert prompts == ["To be", "", " or not "]


def test_another_run_is_not_resumed(text, tmp_path):
    args = ["--max-steps 2 --save-every 1 --data", text, "--log-dir", tmp_path]
    train(*args)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as raised:
        train(*args, "--resume --seed 5 --grad-clip 2")
    start, changes, end = re.split("[()]", str(raised.value))
    assert (start, end) == (
        f"--resume: {tmp_path} holds another run ",
        "; choose another --log-dir",
    )
    changes = re.findall(r"--\S+ was \S+, is [\w.]+", changes)
    assert set(changes) == {"--seed was 1337, is 5", "--grad-clip was 1.0, is 2.0"}
    assert sorted(tmp_path.rglob("*")) == before


def test_why_a_precision_was_chosen(monkeypatch):
    def reason(dtype, device, parameters=10**9, **options):
        return devices.choose_precision(dtype, device, parameters, **options)[1]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    rates = {torch.bfloat16: 1.2345, torch.float32: 1.0}
    monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n=0: rates[dtype])
    slower = "bfloat16 matmuls are 1.2 times as fast as float32's"
    assert reason("auto", CPU) == f"cpu (6 threads), float32: {slower}"
    small = "the same losses on every CPU, to rounding"
    assert reason("auto", CPU, 9) == f"cpu (6 threads), float32: {small}"
    mps = torch.device("mps")
    assert reason("auto", mps) == "mps (Apple GPU), float32: the safe choice on MPS"
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert reason("auto", gpu) == "cuda:1 (NVIDIA A10), bfloat16: supported by the chip"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    why = "the chip has no bfloat16; gradients are scaled"
    assert reason("auto", gpu) == f"cuda:1 (NVIDIA A10), float16: {why}"


def test_what_hellaswag_evaluates_with_what(tmp_path, monkeypatch, capsys):
    GPT(GPTConfig(160, 50257, 1, 1, 8)).save_pretrained(tmp_path / "step_000003")
    tasks = ROOT / "tests/hellaswag_sample.jsonl"
    args = ["-m", str(tmp_path), "--data", str(tasks), "-d", "cpu", "--dtype"]
    counts, precisions = [], []
    score = hellaswag_script.score

    def scored(*args, **options):
        enabled = torch.is_autocast_enabled("cpu")
        precisions.append(torch.get_autocast_dtype("cpu") if enabled else torch.float32)
        return score(*args, **options)

    monkeypatch.setattr(hellaswag_script, "score", scored)
    for dtype, limit in (("auto", "0"), ("bfloat16", "3")):
        hellaswag_script.main([*args, dtype, "--limit", limit])
        lines = capsys.readouterr().out.splitlines()
        name = "float32" if dtype == "auto" else dtype
        assert lines[0].startswith(f"model: {tmp_path / 'step_000003'}; device: cpu (")
        assert f", {name}: " in lines[0]
        counts.append(lines[-1].split()[0])
    assert counts == ["24", "3"] and precisions == [torch.float32, torch.bfloat16]


def test_a_run_without_checkpoints_is_begun_again_or_left_alone(text, tmp_path):
    """Begun again with the same settings, it writes its lines anew; with others it is another."""
    args = ["--max-steps 2 --data", text, "--log-dir", tmp_path]
    train(*args)
    first = losses(tmp_path)
    train(*args, "--resume")
    assert losses(tmp_path) == first
    train(*args, "--resume --seed 5")
    assert losses(tmp_path)[:2] == first and len(losses(tmp_path)) == 4


def test_a_signal_to_one_rank_stops_all(monkeypatch):
    values = [(0.5, 0), (0.25, 0)]
    monkeypatch.setattr(Ranks, "gather", lambda self, value: values)
    assert Ranks(0, 2, CPU).sum(0.5) == 0.75
    for one in (0, 1):
        values[one] = (0.5, 1)
        with pytest.raises(Stopped):
            Ranks(0, 2, CPU).sum(0.5)
        values[one] = (0.5, 0)


def test_flags_that_other_flags_excuse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, compiled in (("cuda", True), ("mps", False), ("cpu", False), ("auto", True)):
        config = train_gpt2.read_config(["--preset", "gpt2", "--device", device])
        assert config.compile == compiled
    assert train_gpt2.read_config(words("--eval-every 0 --eval-tokens 1")).eval_tokens == 1
    with pytest.raises(UserError, match="--eval-tokens 1: less than --seq-len 64"):
        train_gpt2.read_config(words("--preset shakespeare --eval-tokens 1"))


def test_hellaswag_has_the_context_of_the_model_not_of_the_run(text, tmp_path, capsys):
    """A GPT-2 with a context of 160, fine-tuned on sequences of 16 tokens."""
    GPT(GPTConfig(160, 50257, 1, 1, 8)).save_pretrained(tmp_path / "model")
    tasks = ROOT / "tests/hellaswag_sample.jsonl"
    args = ["--init", tmp_path / "model", "--max-steps 0 --hellaswag-every 1 --hellaswag-data"]
    train(*args, tasks, "--data", text, "--log-dir", tmp_path / "log")
    assert len(losses(tmp_path / "log", "hella")) == 1
    assert "contexts cut" not in capsys.readouterr().out


@pytest.mark.parametrize("local_rank, downloads", [(0, 1), (1, 0)])
def test_one_rank_of_each_machine_downloads_hellaswag(local_rank, downloads, monkeypatch):
    for name, value in dict(RANK=2 + local_rank, LOCAL_RANK=local_rank, WORLD_SIZE=4).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    loads = []
    tasks = hellaswag.load_examples(ROOT / "tests/hellaswag_sample.jsonl")
    monkeypatch.setattr(hellaswag, "load_examples", lambda *path: loads.append(path) or tasks)
    before = []

    def gather(problem):
        before.append(len(loads))  # the others wait here for the download
        return [problem] * 4

    assert len(hellaswag.prepare_for_training("", 160, gather)) == 24
    assert before == [downloads] and len(loads) == 1


def test_settling_buckets_changes_neither_gradients_nor_random_numbers():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))
            self.passes = []

        def forward(self, x, targets):
            self.passes.append((x.shape, x.dtype, self.w.grad))
            return None, torch.nn.functional.dropout(self.w, 0.5).sum()

    model = Model()
    state = torch.get_rng_state()
    ranks.settle_buckets(model, 2, 16, NO_AUTOCAST)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.passes == [((2, 16), torch.int64, None)] * 2
    assert model.w.grad.tolist() == [0, 0, 0]


def test_times_for_people():
    expected = {0: "0 min 0 s", 59.4: "0 min 59 s", 60: "1 min 0 s", 3599.6: "1 h 0 min"}
    expected |= {3660: "1 h 1 min", 71.9 * 3600: "71 h 54 min", 72 * 3600: "3.0 days"}
    for seconds, text in expected.items():
        assert console.duration(seconds) == text


def test_lengths_on_a_gpu_are_multiples_of_64():
    gpu = torch.device("cuda")
    assert [devices.round_length(n, gpu) for n in (1, 63, 64, 65, 129)] == [64, 64, 64, 128, 192]
    assert devices.round_length(65, CPU) == 65
    idx = SimpleNamespace(size=lambda dim: 65, device=gpu)
    with mock.patch("torch.nn.functional.pad", lambda idx, padding: padding):
        assert devices.pad_length(idx, 100) == (0, 35) and devices.pad_length(idx, 999) == (0, 63)


@pytest.mark.parametrize("block_size, context", [(5, 2), (4, 2), (3, 1), (2, 0)])
def test_when_a_context_of_hellaswag_is_cut(block_size, context, capsys):
    """Two tokens of context, endings of up to three; the last token of an ending is not read."""
    task = {"ctx": "a a", "label": 0, "endings": ["a", "a a", "a a a", "a"]}
    if context == 0:
        with pytest.raises(UserError, match="task 1: an ending exceeds 2 tokens"):
            hellaswag.prepare([task], block_size)
        return
    (prepared,) = hellaswag.prepare([task], block_size)
    _, positions, segments = prepared.read.tolist()
    assert segments == [0] * context + [2, 3, 3]
    assert positions == [*range(context), context, context, context + 1]
    assert ("HellaSwag: 1 contexts cut" in capsys.readouterr().out) == (context < 2)


@pytest.mark.parametrize(
    "length, cut, new", [(8, 8, 1), (9, 5, 4), (12, 5, 4), (5, 5, 4), (6, 6, 3)]
)
def test_when_a_prompt_is_cut(length, cut, new, capsys):
    """In a context of nine tokens, with up to four new ones."""
    asked = []
    sampler = sample.Sampler(9, lambda text: list(range(length)), lambda *args: asked.append(args))
    sample.sample(sampler, "a", sample.SampleConfig("m", max_new_tokens=4), CPU)
    ((idx, n, _, _),) = asked
    assert idx[0].tolist() == [*range(length)][-cut:] and n == new
    assert ("cut to its last" in capsys.readouterr().err) == (cut < length)

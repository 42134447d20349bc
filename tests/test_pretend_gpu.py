"""The way of the scripts on a GPU, rehearsed without one: tests/pretend_gpu.py."""

import json
import math
import shutil
import sys
import time
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bench
import hellaswag
import sample
import train_gpt2
from support import devices
from support.devices import choose_device  # conftest.py replaces the latter
from support.errors_and_signals import UserError
from support.ranks import Ranks
from support.run_files import run_entries
from support.tokenizer import get_tokenizer
from tests.conftest import RANK, ROOT, losses, numbers, train, words
from tests.pretend_gpu import OnGPU, PretendGPU

linux = pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux only")
pytestmark = [linux, pytest.mark.torch]
TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"
LONG = "--seq-len 48 --total-batch-size 96 --eval-tokens 96"  # HellaSwag's tasks fit


@pytest.fixture(autouse=True)
def undone():
    """What --deterministic and --dtype set for a process is undone after each test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def run(text, tmp_path):
    """run(folder, flags…) trains for three steps on the CPU, or on `gpu`. Returns the losses."""

    def start(folder, *flags, gpu=None):
        args = ["--max-steps 3 --total-batch-size 64 --data", text]
        args += ["--log-dir", tmp_path / folder, *flags]
        if gpu is None:
            train(*args)
        else:
            with gpu:
                train(*args, f"--device {gpu.device.type}")
        assert gpu is None or not gpu.unpinned, "copied from memory that is not pinned"
        return losses(tmp_path / folder)

    return start


@pytest.mark.parametrize(
    "flags", ["--dtype float32 --deterministic", "--dtype auto --optimizer muon --low-memory"]
)
def test_training_equals_the_cpus(flags, run):
    gpu = PretendGPU()
    found = run("gpu", flags, "--compile on", gpu=gpu)
    deterministic = "--deterministic" in flags
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    flags = flags.replace("auto", "bfloat16")
    assert found == pytest.approx(run("cpu", flags), abs=1e-6)


def test_tf32_is_a_switch_of_the_card_for_one_run(run, tmp_path, monkeypatch):
    """The stand-in computes in float32, so nothing else differs. Old cards have no TF32.

    A run in float32 after it, as in a notebook, has none either."""
    expected = run("float32", "--dtype float32", gpu=PretendGPU())
    seen, get_lr = set(), train_gpt2.get_lr

    def watching(step, config):
        seen.add(torch.get_float32_matmul_precision())
        return get_lr(step, config)

    monkeypatch.setattr(train_gpt2, "get_lr", watching)
    assert run("tf32", "--dtype tf32", gpu=PretendGPU()) == expected
    assert seen == {"high"}
    (entry,) = run_entries(tmp_path / "tf32")
    assert entry["dtype"] == "tf32" and ", tf32: " in entry["device"]
    t4 = PretendGPU(name="Tesla T4", capability=(7, 5))
    assert run("t4", "--dtype tf32", gpu=t4) == expected
    (entry,) = run_entries(tmp_path / "t4")
    assert entry["dtype"] == "float32" and "no TF32" in entry["device"]
    peaks = {}
    for precision in ("tf32", "bfloat16"):
        with PretendGPU() as gpu:
            peaks[precision], _ = devices.peak_flops(gpu.device, precision)
    assert 2 * peaks["tf32"] == peaks["bfloat16"] == 312e12
    seen.clear()
    run("again", "--dtype float32", gpu=PretendGPU())
    assert seen == {"highest"}


@pytest.mark.parametrize("flags", ["--dtype bfloat16 --optimizer muon", "--dtype float16"])
def test_a_step_waits_twice_for_the_device(flags, run):
    """It waits for the loss, and for the norm, which is ready by then."""

    def waits(steps, tokens):
        gpu = PretendGPU()
        run(f"{steps} {tokens}", f"--max-steps {steps} --total-batch-size {tokens}", flags, gpu=gpu)
        return gpu.waits

    one, three, twice_as_long = waits(1, 64), waits(3, 64), waits(3, 128)
    assert 0 < (three - one).total() <= 2 * 2, three - one
    assert twice_as_long == three, "more micro-steps, as many waits"


def test_float16_overflows_are_no_bad_steps(run, tmp_path, monkeypatch):
    """On a chip without bfloat16. The first scale is so high that the gradients overflow."""
    scaler = torch.amp.GradScaler.__init__
    monkeypatch.setattr(scaler, "__defaults__", ("cuda", 2.0**20, *scaler.__defaults__[2:]))

    def norms(*flags):
        t4 = PretendGPU(name="Tesla T4", capability=(7, 5), memory=16e9)
        run("log", "--dtype auto --save-every 4", *flags, gpu=t4)
        return losses(tmp_path / "log", "norm")

    overflows = sum(not math.isfinite(norm) for norm in norms("--max-steps 4"))
    assert 0 < overflows < 4
    after = norms("--max-steps 6 --resume")[overflows:]
    assert max(after) < 5, "these norms are of unscaled gradients, and the scale was resumed"


def test_the_micro_batch_is_larger_on_a_large_card():
    for memory, compile, B in ((80e9, "on", 8), (80e9, "off", 2), (48e9, "on", 2)):
        with PretendGPU(memory=memory):
            config = SimpleNamespace(
                seq_len=8192, total_batch_size=65_536, micro_batch_size=0, resume=False
            )
            ranks = Ranks(0, 1, torch.device("cuda"))
            found = train_gpt2.choose_micro_batch(config, ranks, compile == "on")
            assert found == (B, 8 // B)


def test_out_of_memory_is_one_line_with_a_remedy(run):
    flags = "--micro-batch-size 4 --total-batch-size 512 --seq-len 64"
    with pytest.raises(UserError, match="--micro-batch-size 2 needs less memory") as raised:
        run("log", flags, gpu=PretendGPU(memory=100e6))
    assert len(str(raised.value).splitlines()) == 1


def test_what_a_machine_has_too_much_or_too_little_of_is_said(run, monkeypatch, capsys):
    """GPUs that stay idle without torchrun, and one for which torch has no kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch has some for machines with several GPUs
        run("two", "--max-steps 1", gpu=PretendGPU(count=2))
    assert "torchrun --standalone --nproc_per_node=2 " in capsys.readouterr().err
    # A card for which this torch has no kernels.
    failing = mock.Mock(side_effect=RuntimeError("no kernel image is available\nMore."))
    with PretendGPU(name="Tesla V100-SXM2-16GB"), monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing)
        for device, ranks in (("auto", 1), ("cuda", 1), ("auto", 2)):
            with pytest.raises(UserError, match=r"V100.*no kernel image"):
                choose_device(device, world_size=ranks)


def test_more_processes_than_gpus_are_one_line(run, monkeypatch):
    for name, value in (RANK | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--nproc_per_node"):
        run("log", gpu=PretendGPU())


def test_each_process_works_on_a_gpu_of_its_own():
    with PretendGPU(count=2) as gpu:
        assert choose_device("auto", local_rank=1, world_size=2).index == gpu.current == 1


def test_evaluations_equal_the_cpus(run, tmp_path, capsys):
    flags = "--dtype bfloat16 --eval-every 2 --sample-every 3 --save-every 3 --hellaswag-every 3"
    samples = []
    for folder, gpu in (("cpu", None), ("gpu", PretendGPU())):
        evaluate = [LONG, flags, "--sample-prompt Zyzzyva --hellaswag-data", tasks(tmp_path, 2)]
        run(folder, *evaluate, gpu=gpu)
        samples.append(capsys.readouterr().out.count("Zyzzyva"))
    assert samples[0] == samples[1] > 0
    for stream in ("train", "val", "hella"):
        expected = pytest.approx(losses(tmp_path / "cpu", stream), abs=1e-6)
        assert losses(tmp_path / "gpu", stream) == expected, stream


def tasks(folder, count):
    """A file of the first HellaSwag tasks. They do not fit into less than 48 tokens."""
    path = folder / "tasks.jsonl"
    path.write_text("".join(TASKS.read_text().splitlines(keepends=True)[:count]))
    return path


@pytest.fixture
def dropout():
    """A fork's: random numbers of the device take part in training."""

    def drop(module, args, output):
        if isinstance(module, nn.LayerNorm):
            return F.dropout(output, 0.5, module.training)

    hook = nn.modules.module.register_module_forward_hook(drop)
    yield
    hook.remove()


def test_a_resumed_run_has_the_devices_random_numbers(run, tmp_path, dropout):
    flags = "--dtype bfloat16 --save-every 1 --min-lr 5e-3"
    straight = run("straight", flags, gpu=PretendGPU())
    run("broken", flags, "--max-steps 2", gpu=PretendGPU())
    assert run("broken", flags, "--resume", gpu=PretendGPU()) == straight


def test_a_run_moves_to_another_device(run, tmp_path):
    flags = "--dtype float32 --optimizer muon --save-every 1 --min-lr 5e-3"
    expected = run("straight", flags)
    for steps, gpu in ((1, PretendGPU("mps")), (2, PretendGPU()), (3, None)):
        found = run("moved", flags, f"--max-steps {steps} --resume", gpu=gpu)
    assert found == pytest.approx(expected, abs=1e-6)


def test_an_apple_gpu(run, tmp_path):
    """It has no float64."""
    flags = "--dtype auto --optimizer muon --eval-every 3 --sample-every 3 --hellaswag-every 3"
    run("mps", LONG, flags, "--hellaswag-data", tasks(tmp_path, 2), gpu=PretendGPU("mps"))
    run("cpu", LONG, flags, "--hellaswag-data", tasks(tmp_path, 2))
    for stream in ("train", "val", "hella"):
        expected = pytest.approx(losses(tmp_path / "cpu", stream), abs=1e-6)
        assert losses(tmp_path / "mps", stream) == expected, stream


def test_a_run_on_the_cpu_leaves_the_gpu_alone(text, tmp_path, capsys):
    """Its memory is that of the process. bench.py measures the CPU's preset."""
    with PretendGPU() as gpu:
        train("--plan --data", text)
        train("--max-steps 2 --data", text, "--log-dir", tmp_path / "log")
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("peak")]
        bench.main(words("--rung ours --steps 1 -- --device cpu --total-batch-size 32"))
    assert gpu.peak == 0 and not gpu.waits
    assert 0.1 < numbers(line)[0] < 99  # GB
    row = json.loads(capsys.readouterr().out)
    assert row["device"].startswith("cpu") and row["tokens"] == 32


@pytest.fixture
def clock(monkeypatch):
    """clock(gpu) is the list of whether the GPU was working when the clock was read."""

    def watch(gpu):
        found, clock = [], time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: found.append(gpu.is_working) or clock())
        return found

    return watch


def test_scoring_and_sampling(tmp_path, capsys):
    """Of our model and by transformers. The GPU pads, which changes neither losses nor tokens."""
    model = train_gpt2.GPT(train_gpt2.GPTConfig(48, 50257, 1, 2, 32))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model.save_pretrained(ours, get_tokenizer())
    # A model that names no script is left to transformers.
    shutil.copytree(ours, theirs)
    config = json.loads((theirs / "config.json").read_text())
    del config["script"]
    (theirs / "config.json").write_text(json.dumps(config))

    def results(device, model):
        flags = words(f"--dtype float32 --limit 4 -d {device} --data", TASKS, "-m", model)
        hellaswag.main([*flags, "--json", str(tmp_path / "scores.json")])
        scores = json.loads((tmp_path / "scores.json").read_text())
        capsys.readouterr()
        flags = words(f"--max-new-tokens 5 --temperature 0 --device {device}")
        sample.main([*flags, str(model), "ROMEO:"])
        return [loss for score in scores for loss in score["losses"]], capsys.readouterr().out

    for model in (ours, theirs):
        expected, text = results("cpu", model)
        with PretendGPU() as gpu:
            found, text_on_gpu = results("cuda", model)
        assert found == pytest.approx(expected, abs=1e-3) and text_on_gpu == text
        assert gpu.peak > 0 and not gpu.unpinned


@pytest.mark.parametrize("rung", ["fused", "ours"])
def test_rungs_of_the_benchmark(rung, capsys, clock):
    small = words("--n-layer 1 --n-embd 16 --n-head 2 --seq-len 16 --total-batch-size 32")
    small += words("--micro-batch-size 2")
    waits = []
    for steps in (1, 3):
        with PretendGPU() as gpu:
            was_working = clock(gpu)
            bench.main([*words("--steps", steps, "--rung", rung, "--"), *small])
        if rung != "ours":
            assert len(was_working) == 2 * (10 + steps) and not any(was_working[1:])
        waits.append(gpu.waits)
        row = json.loads(capsys.readouterr().out)
        assert row["rung"] == rung and "cuda" in row["device"]
        assert 0 < row["peak_memory"] <= gpu.memory
    # Each of two steps waits for its end, or its time would mean nothing. The plain rungs also wait
    # for the copies of inputs and targets, and ours for the loss.
    assert (waits[1] - waits[0]).total() == 2 * (2 if rung == "ours" else 3)


def test_it_refuses_what_a_gpu_refuses():
    with PretendGPU() as gpu:
        x, host = torch.ones(3, device="cuda"), torch.ones(3)
        assert isinstance(x, OnGPU) and x.device == torch.device("cuda", 0)
        for wrong in (
            lambda: x + host,
            lambda: torch.stack([x[0], host[0]]),
            lambda: x.numpy(),
            lambda: torch.multinomial(x, 1, generator=torch.Generator()),
            lambda: torch.multinomial(host, 1, generator=torch.Generator("cuda")),
            lambda: F.embedding(torch.tensor([0]), torch.ones(3, 1, device="cuda")),
            lambda: F.embedding(torch.zeros(1, dtype=int, device="cuda"), torch.ones(3, 1)),
            lambda: x.lerp_(host, 0.5),
            lambda: torch.zeros(10**11, device="cuda"),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()
        assert not gpu.waits and gpu.used == 512
    with PretendGPU("mps"), pytest.raises(TypeError, match="float64"):
        torch.ones(3).double().to("mps")


def test_it_counts_waits_and_copies():
    with PretendGPU() as gpu:
        x, host = torch.ones(3, device="cuda"), torch.ones(3)
        assert (x * host[0]).sum().item() == 3 and x.tolist() == [1, 1, 1] and bool(x.any())
        assert gpu.waits.total() == 3
        host.pin_memory().to("cuda", non_blocking=True)
        assert gpu.waits.total() == 3 and not gpu.unpinned
        host.to("cuda", non_blocking=True)
        host.to("cuda")
        assert gpu.waits.total() == 4 and gpu.unpinned.total() == 1


def test_tied_weights_stay_tied_and_types_are_autocasts():
    with PretendGPU():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model.to("cuda")
        assert model[1].weight is model[0].weight and model[0].bias.device.type == "cuda"
        for kind, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
            with torch.autocast(kind, torch.bfloat16):
                assert model(torch.ones(1, 3, device="cuda")).dtype == dtype

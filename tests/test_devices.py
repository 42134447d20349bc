"""Stand-ins for other CPUs and GPUs; --plan against measurements; the largest micro-batch."""

import mmap
import multiprocessing
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_map_only

import train_gpt2
from support import console, devices, hellaswag, memory, ranks
from support.console import Meter, duration
from support.devices import data_sheet_flops
from support.errors import RunError, UserError
from support.memory import estimate_memory, fits
from support.run_log import run_entries
from tests import no_float64
from tests.conftest import ROOT, TINY, losses, train, train_on_ranks, words
from train_gpt2 import GPT, GPTConfig, Ranks, choose_micro_batch_size, read_config


def test_precision_on_a_cpu(monkeypatch, text, tmp_path):
    """auto: float32 for a small model, bfloat16 for a large one where that is faster."""
    args = ["--dtype auto --max-steps 2 --save-every 2 --data", text, "--log-dir"]

    def precision(large, speedup, *more):
        rates = {torch.bfloat16: speedup, torch.float32: 1.0}
        monkeypatch.setattr(devices, "LARGE", 10**5 if large else 10**9)
        monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n=0: rates[dtype])
        train(*args, tmp_path, *more)
        return re.search(r"\w+(?=:)", run_entries(tmp_path)[-1]["device"])[0]

    assert precision(False, 9.0) == precision(True, 1.2) == "float32"
    assert precision(True, 1.4) == precision(True, 0.5, "--resume --max-steps 3") == "bfloat16"
    assert precision(False, 9.0, "--resume --max-steps 4") == "float32", "that of a large one"


def gpu(monkeypatch, name: str, capability: tuple[int, int]) -> torch.device:
    """Pretends that this machine has one such GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda", 0)


def set_up_precision(monkeypatch, device, dtype):
    """Calls set_up() for a device that is not here, until it has set the precision."""
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(GPT, "to", lambda self, device: self)
        patch.setattr(devices, "choose_precision", lambda *args, **options: (dtype, ""))
        patch.setattr(torch, "autocast", mock.Mock(side_effect=StopIteration))
        train_gpt2.set_up(read_config(TINY), Ranks(0, 1, device))


@pytest.mark.parametrize(
    "name, capability, dtype, tflops",
    [
        ("Tesla T4", (7, 5), torch.float16, 65),
        ("NVIDIA A100-SXM4-80GB", (8, 0), torch.bfloat16, 312),
        ("NVIDIA H100 80GB HBM3", (9, 0), torch.bfloat16, 989),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), torch.bfloat16, None),
    ],
)
def test_precision_and_peak_of_a_gpu(name, capability, dtype, tflops, monkeypatch):
    """TF32 is for runs in 16 bits on the GPU alone."""
    device = gpu(monkeypatch, name, capability)
    assert devices.choose_device("auto") == device
    assert devices.choose_precision("auto", device, 0)[0] == dtype
    assert devices.choose_precision("float32", device, 0)[0] == torch.float32
    assert data_sheet_flops(name) == (tflops and tflops * 1e12)
    with pytest.raises(UserError, match="1 GPUs for more than 1 processes: lower"):
        devices.choose_device("auto", local_rank=1)
    allow_tf32 = mock.Mock()
    monkeypatch.setattr(torch, "set_float32_matmul_precision", allow_tf32)
    for kind, precision in ((device, dtype), (device, torch.float32), (torch.device("cpu"), dtype)):
        set_up_precision(monkeypatch, kind, precision)
    allow_tf32.assert_called_once_with("high")


def unused(monkeypatch, *, cuda=None, hip=None, platform="posix", **variables: str):
    """Pretends to be such a build of torch, which sees no GPU on a machine that has two kinds."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(devices, "os", mock.Mock(environ=variables))
    devices.os.name = platform
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(devices.Path, "exists", lambda path: str(path) == "/dev/kfd")


@pytest.mark.parametrize(
    "build, remedy",
    [
        ({"cuda": "13.0"}, "driver 580, or a torch for CUDA 12.6"),
        ({"cuda": "13.0", "CUDA_VISIBLE_DEVICES": "0"}, "driver 580, or a torch for CUDA 12.6"),
        ({"hip": "7.0"}, "groups render and video"),
        ({"platform": "nt"}, "install a torch for CUDA: pytorch.org"),
        ({"platform": "posix"}, ""),  # the CPU build was chosen
        ({"cuda": "13.0", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"hip": "7.0", "HIP_VISIBLE_DEVICES": "-1"}, ""),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_reported(build, remedy, monkeypatch, capsys):
    """One rank goes on, several are an error. --device cpu means it, and is quiet."""
    unused(monkeypatch, **build)
    cpu = torch.device("cpu")
    assert devices.choose_device("cpu", world_size=8) == cpu and not capsys.readouterr().err
    assert devices.choose_device("auto") == cpu
    warning = capsys.readouterr().err
    assert warning.count("\n") == (1 if remedy else 0) and remedy in warning
    if remedy:
        with pytest.raises(UserError, match=f"{remedy}; --device cpu trains"):
            devices.choose_device("auto", world_size=2)
    else:
        assert devices.choose_device("auto", world_size=2) == cpu
    with pytest.raises(UserError, match=f"--device cuda: .*{remedy}"):
        devices.choose_device("cuda")


@pytest.mark.parametrize("found", ["/proc/driver/nvidia", ""])
def test_a_driver_alone_tells_that_there_is_a_gpu(found, monkeypatch):
    """nvidia-smi is not in every container."""
    unused(monkeypatch, cuda="13.0")
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    monkeypatch.setattr(devices.Path, "exists", lambda path: str(path) == found)
    assert bool(devices.unused_gpu()) == bool(found)


@pytest.mark.parametrize(
    "variables, lacking, expected",
    [
        ({}, False, ["expandable_segments:True"]),
        ({}, True, ["expandable_segments:True", "expandable_segments:False"]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:9"}, False, []),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:9"}, False, []),
    ],
)
def test_segments_grow_unless_the_user_configured_them(variables, lacking, expected, monkeypatch):
    device, settings = gpu(monkeypatch, "NVIDIA H200", (9, 0)), []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert callable(torch._C._accelerator_setAllocatorSettings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    problem = RuntimeError("CUDA driver error: operation not supported")
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=problem if lacking else None))
    monkeypatch.setattr(devices.sys, "platform", "linux")
    assert devices.choose_device("auto") == device and settings == expected


@pytest.mark.parametrize(
    "device, error, remedy",
    [
        ("cuda", "CalledProcessError: Command '['gcc', 'main.c']' returned", "gcc python3-dev"),
        ("cuda", "Failed to find C compiler. Please specify via CC", "gcc python3-dev"),
        ("cpu", "InvalidCxxCompiler: No working C++ compiler found", r"g\+\+ python3-dev"),
        ("cuda", "Cannot find a working triton installation", None),
    ],
)
def test_what_compilation_lacks_is_named(device, error, remedy, monkeypatch, capsys):
    monkeypatch.setattr(torch, "ones", mock.Mock())
    monkeypatch.setattr(torch, "compile", lambda function: mock.Mock(side_effect=Exception(error)))
    assert not devices.can_compile(torch.device(device))
    text = capsys.readouterr().out
    assert text.count("\n") == 1 and error in text and "continuing without it" in text
    assert re.search(f"`apt install {remedy}`", text) if remedy else "apt" not in text


def test_what_speed_depends_on_is_reported(monkeypatch, tmp_path):
    """As on a GPU: the attention kernel, cuDNN, the driver. Nothing on a CPU."""
    cuda, asked = torch.device("cuda", 0), []
    assert devices.gpu_software(torch.device("cpu"), torch.float32) == {}

    def choice(q, k, v, is_causal):
        asked.append((q.requires_grad, is_causal))
        return 3

    empty, path = torch.empty, tmp_path / "version"
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(shape, **options))
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(devices, "Path", lambda name: path)
    expected = {"attention": "CUDNN_ATTENTION", "cudnn": 91002, "driver": "unknown"}
    assert devices.gpu_software(cuda, torch.bfloat16) == expected
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11")
    assert devices.gpu_software(cuda, torch.bfloat16) == expected | {"driver": "580.95.05"}
    assert asked == [(True, True)] * 2


def test_device_cpu_leaves_a_gpu_alone(monkeypatch, text, tmp_path):
    """Nothing is pinned, which makes a CUDA context, copied asynchronously or compiled by default.

    An update makes no tensor from host data, which would synchronize a GPU."""
    gpu(monkeypatch, "NVIDIA H100 80GB HBM3", (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pytest.fail("pinned"))
    monkeypatch.setattr(torch, "tensor", mock.Mock(side_effect=AssertionError("host data")))
    asks_the_gpu = "_accelerator_graph_capture_health_check"  # torch 2.15, in every step
    monkeypatch.setattr(torch.optim.Optimizer, asks_the_gpu, lambda self: None, raising=False)
    copies, copy = [], torch.Tensor.to

    def to(self, *args, **options):
        copies.append(options.get("non_blocking"))
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    assert read_config(words("--preset gpt2")).compile
    assert not read_config(words("--preset gpt2 --device cpu")).compile
    assert read_config(words("--preset gpt2 --device cpu --compile")).compile
    train("--max-steps 2 --data", text, "--log-dir", tmp_path)
    assert copies and True not in copies


def test_an_apple_gpu_is_for_one_process_and_trains_in_float32(monkeypatch):
    """Fused AdamW would apply float16 overflows there. HellaSwag may use float16."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mps = torch.device("mps")
    assert devices.choose_device("auto") == mps
    assert devices.choose_precision("auto", mps, 10**9)[0] == torch.float32
    assert devices.choose_precision("float16", mps, 10**9)[0] == torch.float16
    with pytest.raises(UserError, match="--dtype float16: overflows"):
        set_up_precision(monkeypatch, mps, torch.float16)
    assert devices.choose_device("auto", world_size=2) == torch.device("cpu")
    with pytest.raises(UserError, match="--device mps: not available for 2 processes"):
        devices.choose_device("mps", world_size=2)


def on_a_device_without_float64():
    device = no_float64.install()
    devices.keep_freed_memory(True)  # as choose_device does
    ranks.choose_device = lambda *args: device
    devices.choose_precision = lambda *args, **options: (torch.float32, "a stand-in")
    # The stand-in does not see these calls.
    Generator = torch.Generator
    torch.Generator = lambda device=None: Generator()
    tensor = torch.tensor
    torch.tensor = lambda data, device="cpu", **options: tensor(data, **options).to(device)
    # Its tensors have no bytes to save.
    torch_save = torch.save
    torch.save = lambda data, *args: torch_save(on_host(data), *args)
    save_file = safetensors.torch.save_file
    safetensors.torch.save_file = lambda data, *args, **kw: save_file(on_host(data), *args, **kw)
    no_float64.StandIn().__enter__()


def on_host(data):
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), data)


@pytest.mark.skipif(not no_float64.INSTALLABLE, reason="this torch registers no device from Python")
def test_a_device_without_float64(text, tmp_path):
    """Validation, HellaSwag, samples, optimizers, a checkpoint and a resume match the CPU's."""
    tasks = tmp_path / "tasks.jsonl"
    lines = (ROOT / "tests" / "hellaswag_sample.jsonl").read_text().splitlines(keepends=True)
    tasks.write_text("".join(lines[:2]))
    args = ["--data", text, "--hellaswag-data", tasks, "--eval-every 1 --hellaswag-every 1"]
    args.append("--save-every 1 --seq-len 64 --micro-batch-size 1 --min-lr 5e-3")
    args.append("--optimizer muon --resume --log-dir")
    outputs = []
    for flags in ("--max-steps 1", "--max-steps 2 --sample-every 2"):
        device = [*args, tmp_path / "device", flags]
        outputs += train_on_ranks(1, tmp_path, *device, disturb=on_a_device_without_float64)
    assert [output.count("rank 0 sample") for output in outputs] == [0, 2]
    assert "resumed from" in outputs[1]
    train(*args, tmp_path / "cpu", "--max-steps 2")
    for stream in ("train", "val", "hella"):
        expected = pytest.approx(losses(tmp_path / "cpu", stream), abs=1e-5)
        assert losses(tmp_path / "device", stream) == expected


def test_hellaswag_and_samples_have_few_shapes_on_a_gpu(monkeypatch):
    """Multiples of 64, since cuDNN's attention plans once per shape; the results are the same."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(160, 50257, 2, 2, 32))
    torch.nn.init.normal_(model.wte.weight, std=0.3)
    examples = hellaswag.load_examples(ROOT / "tests" / "hellaswag_sample.jsonl")
    tasks = hellaswag.prepare(examples, 160)
    round_length, lengths = devices.round_length, set()

    def hidden(idx, *args):
        lengths.add(idx.shape[1])
        return GPT.hidden(model, idx, *args)

    monkeypatch.setattr(model, "hidden", hidden)
    results = []
    for device, fewest, most in ((torch.device("cpu"), 10, 100), (torch.device("cuda"), 1, 4)):
        for module in (hellaswag, devices):
            monkeypatch.setattr(
                module, "round_length", lambda n, _, device=device: round_length(n, device)
            )
        lengths.clear()
        score = hellaswag.score(hidden, model.logits, tasks, torch.device("cpu"), batch_size=2)
        generator = torch.Generator().manual_seed(1)
        idx = model.generate(torch.arange(100, 250)[None], 20, generator=generator)
        assert fewest <= len(lengths) <= most
        results.append((score.losses, score.losses.argmin(1), idx))
    assert all(n % 64 == 0 or n == 160 for n in lengths)
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-5)


def test_float16_ends_a_run_whose_gradients_always_overflow(text, tmp_path, monkeypatch):
    """Each overflow halves the scale; at 1 the gradient itself is not finite."""
    in_chunks = train_gpt2.in_chunks

    def overflowing(*args):
        loss_function = in_chunks(*args)

        def loss(x, wte, targets):
            total = x.float().sum()
            return loss_function(x, wte, targets) + 1e38 * (total - total.detach())

        return loss

    monkeypatch.setattr(train_gpt2, "in_chunks", overflowing)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    with pytest.raises(RunError, match="step 2: loss 10"):
        flags = "--max-steps 4 --total-batch-size 32 --dtype float16 --data"
        train(flags, text, "--log-dir", tmp_path)


SMALLER, SMALL = GPTConfig(512, n_layer=6, n_head=6, n_embd=384), GPTConfig()
SHAKESPEARE, MEDIUM = GPTConfig(64, 50257, 4, 4, 64), GPTConfig(1024, 50257, 24, 16, 1024)


@pytest.mark.parametrize(
    "config, B, low_memory, process, measured",
    [
        (SHAKESPEARE, 8, False, 0.32, 0.65),
        (SMALLER, 1, False, 0.32, 1.19),
        (SMALLER, 1, False, 0.69, 1.64),
        (SMALLER, 8, False, 0.32, 2.33),
        (SMALLER, 8, False, 0.69, 2.82),
        (SMALLER, 8, True, 0.32, 1.52),
        (SMALL, 1, True, 0.32, 2.67),
        (MEDIUM, 1, True, 0.32, 6.48),
        (SMALL, 1, False, 0.32, 3.33),
        (SMALL, 4, False, 0.32, 5.91),
    ],
)
def test_the_estimate_is_near_measured_peaks(config, B, low_memory, process, measured, monkeypatch):
    """GB of a process on a CPU, float32, AdamW (bench/memory). A CUDA build's is larger at once."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "peak_memory", lambda: process * 1e9)
    with torch.device("meta"):
        model = GPT(config)
    how = {"low_memory": low_memory, "compiled": False}
    estimate = estimate_memory(model, B, config.block_size, cpu, torch.float32, **how)
    assert estimate / 1e9 == pytest.approx(measured, rel=0.1)


def returned_memory(keep: bool) -> float:
    """MB of freed tensors that a process gives back, of 200."""
    devices.keep_freed_memory(True)  # as choose_device does
    devices.keep_freed_memory(keep)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6

    tensors = [torch.ones(500_000) for _ in range(100)]
    full = resident()
    del tensors
    return full - resident()


@pytest.mark.skipif(sys.platform != "linux" or not platform.libc_ver()[0], reason="needs glibc")
@pytest.mark.parametrize("keep, expected", [(True, 0), (False, 200)])
def test_freed_memory_is_kept_or_returned(keep, expected):
    """In a process without gaps that earlier tensors left."""
    forks = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, forks) as process:
        returned = process.submit(returned_memory, keep).result()
    assert returned == pytest.approx(expected, abs=20)


def test_plan_prints_and_does_not_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "peak_memory", lambda: 0.32e9)
    assert train_gpt2.main(words("--preset gpt2 --plan --device cpu")) == 0
    text = capsys.readouterr().out
    for part in ("124,439,808", "855,166,464", "9,999,745,024 in 19,073", "8.551e+18", "3.58 GB"):
        assert part in text, part
    assert not list(tmp_path.iterdir())
    GPT(GPTConfig(64, 50257, 1, 2, 8)).save_pretrained(tmp_path / "model")
    train("--init", tmp_path / "model", "--plan", "--log-dir", tmp_path / "log")
    assert f"parameters: {(50257 + 64 + 12 * 8 + 13 + 2) * 8:,} " in capsys.readouterr().out
    assert not (tmp_path / "log").exists()


def test_plan_projects_time_and_micro_batch_on_usual_cards(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def rows(flags):
        assert train_gpt2.main(words("--plan --device cpu", flags)) == 0
        lines = capsys.readouterr().out.splitlines()
        return {card: row for card, row in (line.strip().split(": ", 1) for line in lines)}

    # 8.551e18 FLOPs / (0.4 * 71e12) = 3.48 days; 2.3 GB and 0.54 GB per sequence
    plan = rows("--preset gpt2")
    share = "projected: 40% of"
    assert plan["GeForce RTX 3090"] == f"3.5 days, {share} 71 TFLOP/s (bfloat16); B = 32 fits"
    assert plan["T4"] == f"3.8 days, {share} 65 TFLOP/s (float16); B = 16 fits"
    assert plan["A100-SXM4-80GB"] == f"19 h 2 min, {share} 312 TFLOP/s (bfloat16); B = 64 fits"
    assert plan["8 x H100 80GB HBM3"].startswith(f"45 min 2 s, {share} 7,912 TFLOP/s")
    assert "8 x T4" not in plan
    # Eight cards share the 64 sequences of a step; recomputation makes room for all 128 of a step.
    plan = rows("--preset gpt2 --total-batch-size 65536")
    assert plan["H100 80GB HBM3"].endswith("B = 64 fits")
    assert plan["8 x H100 80GB HBM3"].endswith("B = 8 fits")
    assert rows("--preset gpt2 --low-memory")["T4"].endswith("B = 128 fits")
    # A given micro-batch is kept.
    plan = rows("--preset gpt2 --micro-batch-size 64")
    assert plan["GeForce RTX 4090"] == "B = 64 does not fit in 24 GB"
    assert plan["A100-SXM4-80GB"].endswith("B = 64 fits")
    plan = rows("--preset gpt2 --n-layer 48 --n-head 25 --n-embd 1600")
    assert plan["T4"] == "B = 1 does not fit in 16 GB"
    # Fewer sequences than cards, and next to no work.
    plan = rows("--preset shakespeare --total-batch-size 64")
    assert plan["8 x A100-SXM4-80GB"].startswith("less than a minute, projected")
    assert plan["8 x A100-SXM4-80GB"].endswith("B = 1 fits")
    plan = rows("--preset small")
    assert plan["parameters"].startswith("30,142,848 ") and plan["tokens"].startswith("196,608,000")


class OutOfMemoryAbove(GPT):
    """A model that runs out of memory with more than `limit` sequences."""

    def __init__(self, limit: int, error: Exception):
        super().__init__(GPTConfig(4, n_layer=1, n_head=1, n_embd=1))
        self.limit, self.error, self.held_gradients = limit, error, False

    def forward(self, x, y):
        self.held_gradients = self.wte.weight.grad is not None
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"  # what is tried isn't timed
        if len(x) > self.limit:
            raise self.error
        return super().forward(x, y)


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CUBLAS)]
)
def test_what_fits_is_tried(error, monkeypatch):
    """Beside earlier micro-steps' gradients, if any. The trial leaves no gradients behind."""
    monkeypatch.setattr(memory, "gc", mock.Mock())  # takes long in a process with this much
    model = OutOfMemoryAbove(12, error)
    autocast = torch.autocast("cpu", enabled=False)

    def trial(model, B, accumulates=True):
        return fits(
            model,
            B,
            4,
            autocast,
            low_memory=False,
            several_ranks=False,
            shards=1,
            keeps_logits=False,
            accumulates=accumulates,
        )

    loss_function = model.loss_function
    for accumulates in (True, False):
        assert [trial(model, B, accumulates) for B in (16, 12)] == [False, True]
        assert model.held_gradients == accumulates
        assert all(p.grad is None for p in model.parameters())
        assert model.loss_function is loss_function
    with pytest.raises(RuntimeError, match="another problem"):
        trial(OutOfMemoryAbove(0, RuntimeError("another problem")), 1)

    # The optimizer's moments do not fit.
    monkeypatch.setattr(torch, "empty", mock.Mock(side_effect=error))
    assert trial(model, 1) is False


@pytest.mark.parametrize(
    "several_ranks, shards, keeps_logits", [(False, 1, False), (True, 1, True), (True, 4, False)]
)
def test_a_trial_reserves_what_else_a_step_needs(several_ranks, shards, keeps_logits, monkeypatch):
    model, empty = OutOfMemoryAbove(12, RuntimeError()), mock.Mock()
    autocast = torch.autocast("cpu", torch.bfloat16)
    monkeypatch.setattr(memory, "gc", mock.Mock())
    monkeypatch.setattr(torch, "empty", empty)
    how = {"several_ranks": several_ranks, "shards": shards, "keeps_logits": keeps_logits}
    assert fits(model, 12, 4, autocast, low_memory=True, accumulates=False, **how)
    logits = 2 * 12 * 4 * 50304 * 2 if keeps_logits else 0  # and their gradient
    nccl = 2**30 if several_ranks else 0
    moments = 8 * model.num_parameters() // shards
    assert empty.call_args.args == (moments + logits + nccl,)


@pytest.mark.parametrize(
    "flags, world_size, B, shards, keeps_logits, accumulates",
    [
        ("--no-compile", 1, 8, 1, False, False),
        ("--no-compile --micro-batch-size 4", 1, 4, 1, False, True),
        ("--no-compile --total-batch-size 64", 1, 8, 1, False, True),
        ("--compile", 2, 4, 1, True, True),
        ("--compile --low-memory --shard-optimizer", 2, 4, 2, False, True),
    ],
)
def test_a_gpus_micro_batch_is_the_largest_that_fits_all_ranks(
    flags, world_size, B, shards, keeps_logits, accumulates, monkeypatch
):
    """The other ranks have room for 4 sequences, this one for 8."""
    tried = []

    def fits(model, B, T, autocast, **how):
        tried.append((B, how))
        return B <= 8

    def gather(self, value):
        return [value] + [tried[-1][0] <= 4] * (world_size - 1)

    monkeypatch.setattr(memory, "fits", fits)
    monkeypatch.setattr(Ranks, "gather", gather)
    on_gpus = Ranks(0, world_size, torch.device("cuda"))
    config = read_config(words("--preset gpt2 --seq-len 4 --total-batch-size 32", flags))
    assert choose_micro_batch_size(config, None, on_gpus, None) == B
    assert tried[-1] == (
        B,
        {
            "low_memory": "--low-memory" in flags,
            "several_ranks": world_size > 1,
            "shards": shards,
            "keeps_logits": keeps_logits,
            "accumulates": accumulates,
        },
    )


@pytest.mark.parametrize("given, limit, B", [(64, 9, 64), (0, 0, 1), (64, 64, 64)])
def test_what_does_not_fit_is_said_before_training(given, limit, B, monkeypatch, capsys):
    """A given micro-batch is tried as well; training may need less memory than the trial."""
    tried = []

    def fits(model, B, *args, **how):
        tried.append(B)
        return limit >= B

    monkeypatch.setattr(memory, "fits", fits)
    how = {"sequences": 4, "compiled": True, "low_memory": False, "shard_optimizer": False}
    on_gpu = Ranks(0, 1, torch.device("cuda"))
    assert memory.largest_that_fits(given, None, on_gpu, None, T=4, **how) == B
    assert tried == ([given] if given else [4, 2, 1])
    warning = capsys.readouterr().err
    assert (f"warning: micro-batches of {B} sequences may not fit" in warning) == (limit < B)


@pytest.mark.parametrize("start", [0, 120])
def test_the_time_left_includes_evaluations(start, monkeypatch):
    """Steps of 0.2 s, some slower; pauses like those of the shakespeare preset."""
    meter = Meter(tokens=512, flops_per_token=6, peak_flops=1e12, interval=200)
    now, left, finished = 0.0, {}, {}
    monkeypatch.setattr(console.time, "perf_counter", lambda: now)
    for step in range(start, 601):
        now += 3 * (step % 200 == 0) + (step % 300 == 0)
        began = now
        now += 0.4 if step % 7 == 0 else 0.2
        if step < 600:
            meter.end_step(began, 599 - step)
            text = meter.line(loss=9.0, lr=1e-3, norm=1.0)
            minutes, seconds = re.search(r"(\d+) min (\d+) s left", text).groups()
            left[step], finished[step] = 60 * int(minutes) + int(seconds), now
    for step in (230, 300, 450) if start else (150, 300, 450):
        assert left[step] == pytest.approx(began - finished[step], rel=0.15)
    assert duration(60 * 60 * 19 + 500) == "19 h 8 min"
    assert duration(60 * 60 * 71 + 60) == "71 h 1 min" and duration(60 * 60 * 84) == "3.5 days"


def test_speed_of_a_step(monkeypatch):
    """0.5 s for 1,000 tokens are 2,000 per second, a quarter of what the peak allows.

    The peak of memory counts from the end of the first step on, when all is compiled."""
    now = iter([10.5, 11.0])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(now))
    resets = mock.Mock()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    meter = Meter(tokens=1000, flops_per_token=6, peak_flops=4.8e4, interval=9, elapsed=3.0)
    meter.end_step(began=10.0, steps_left=4)
    assert meter.streams == {"ms": 500.0, "tok_per_sec": 2000.0, "mfu": 0.25}
    assert meter.elapsed == 3.5 and meter.left == 2.0
    assert resets.call_count == 1
    meter.end_step(began=10.5, steps_left=3)
    assert resets.call_count == 1  # not again after later steps
    line = meter.line(loss=4.0, lr=6e-4, norm=0.5)
    assert line == "loss 4.0000 lr 6.00e-04 norm 0.500 500 ms 2,000 tok/s mfu 25.0% 0 min 2 s left"
    meter.peak_flops = 1.2e4
    assert " mfu 100.0% " in meter.line(loss=4.0, lr=6e-4, norm=0.5)
    meter.peak_flops = 1.19e4  # measured while other work was running
    assert " mfu – " in meter.line(loss=4.0, lr=6e-4, norm=0.5)
    assert meter.streams["mfu"] == pytest.approx(1.2 / 1.19)  # the log has what was measured

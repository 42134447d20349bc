"""Devices: stand-ins for GPUs and other CPUs; what a machine lacks is said."""

import mmap
import multiprocessing
import os
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.benchmark import Timer

from support import devices, ranks
from support.errors import UserError
from support.run_log import run_entries
from tests import no_float64
from tests.conftest import ROOT, losses, train, train_on_ranks


CPU = torch.device("cpu")
matmul_flops = devices.matmul_flops  # which conftest.py replaces


def test_precision_on_a_cpu(monkeypatch, text, tmp_path):
    """auto: float32 for a small model, bfloat16 for a large one where that is faster, and on resume
    what it was before."""
    args = ["--dtype auto --max-steps 2 --save-every 2 --data", text, "--log-dir"]

    def precision(large, speedup, *more):
        rates = {torch.bfloat16: speedup, torch.float32: 1.0}
        monkeypatch.setattr(devices, "LARGE", 10**5 if large else 10**9)
        monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n=0: rates[dtype])
        train(*args, tmp_path / "log", *more)
        return re.search(r"\w+(?=:)", run_entries(tmp_path / "log")[-1]["device"])[0]

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


@pytest.mark.parametrize(
    "name, capability, dtype",
    [
        ("Tesla T4", (7, 5), torch.float16),
        ("NVIDIA A100-SXM4-80GB", (8, 0), torch.bfloat16),
    ],
)
def test_precision_on_a_gpu(name, capability, dtype, monkeypatch):
    device = gpu(monkeypatch, name, capability)
    assert devices.choose_device("auto") == device
    assert devices.choose_precision("auto", device, 0)[0] == dtype
    assert devices.choose_precision("float32", device, 0)[0] == torch.float32
    with pytest.raises(UserError, match="1 GPUs for more than 1 processes: lower"):
        devices.choose_device("auto", local_rank=1)


def test_mfu_is_of_a_data_sheet_in_16_bits_and_else_measured(monkeypatch):
    peak = devices.peak_flops.__wrapped__
    for name, dtype, expected in (
        ("Tesla T4", torch.float16, 65e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA H200", torch.float32, 1e12),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, 1e12),  # a part of one
    ):
        device = gpu(monkeypatch, name, (9, 0))
        assert peak(device, dtype)[0] == expected, name


@pytest.mark.parametrize(
    "cuda, driver, visible, warned",
    [
        ("13.0", True, None, True),
        ("13.0", True, "0", True),
        ("13.0", True, "", False),  # hidden on purpose
        ("13.0", False, None, False),
        (None, True, None, False),  # the CPU build was chosen
    ],
)
def test_a_gpu_that_torch_does_not_see_is_reported(
    cuda, driver, visible, warned, monkeypatch, capsys
):
    """One rank goes on, several are an error. --device cpu means it, and is quiet."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(devices, "Path", lambda path: SimpleNamespace(exists=lambda: driver))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.choose_device("cpu", world_size=8) == CPU and not capsys.readouterr().err
    assert devices.choose_device("auto") == CPU
    assert capsys.readouterr().err.count("does not see this machine's GPU") == warned
    if warned:
        with pytest.raises(UserError, match="--device cpu trains without it"):
            devices.choose_device("auto", world_size=2)
    else:
        assert devices.choose_device("auto", world_size=2) == CPU
    with pytest.raises(UserError, match="--device cuda: "):
        devices.choose_device("cuda")


def test_an_apple_gpu_is_for_one_process_and_trains_in_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mps = torch.device("mps")
    assert devices.choose_device("auto") == mps
    assert devices.choose_precision("auto", mps, 10**9)[0] == torch.float32
    assert devices.choose_device("auto", world_size=2) == CPU
    with pytest.raises(UserError, match="--device mps: not available for 2 processes"):
        devices.choose_device("mps", world_size=2)


def on_a_device_without_float64():
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401  (before torch is changed)

    device = no_float64.install()
    devices.keep_freed_memory()  # as main() does
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


def returned_memory() -> float:
    """MB of freed tensors that a process gives back, of 200."""
    devices.keep_freed_memory()

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6

    tensors = [torch.ones(500_000) for _ in range(100)]
    full = resident()
    del tensors
    return full - resident()


@pytest.mark.skipif(sys.platform != "linux" or not platform.libc_ver()[0], reason="needs glibc")
def test_freed_memory_is_kept():
    """In a process without gaps that earlier tensors left."""
    forks = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, forks) as process:
        returned = process.submit(returned_memory).result()
    assert returned < 20


@pytest.mark.parametrize("flags, kept", [("", 1), ("--low-memory", 0)])
def test_a_run_keeps_it_unless_memory_is_short(flags, kept, text, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: calls.append(1))
    train("--max-steps 1 --data", text, flags, "--log-dir", tmp_path / "log")
    assert len(calls) == kept


def test_deterministic_means_torchs_deterministic_algorithms(text, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for flags, expected in (("", []), ("--deterministic", [True])):
        train("--max-steps 1 --data", text, flags, "--log-dir", tmp_path / f"log{flags}")
        assert asked == expected
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # as NVIDIA's documentation asks


def test_random_states_of_another_device(monkeypatch):
    """A run may go on where there is no such device."""
    states = [torch.tensor([7])]
    module = SimpleNamespace(get_rng_state=lambda: states[-1], set_rng_state=states.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    cuda = torch.device("cuda")
    saved = devices.random_state(cuda)
    first = torch.rand(3)
    for device in (cuda, CPU):
        devices.set_random_state(device, saved)
        assert torch.equal(torch.rand(3), first)
    assert len(states) == 2 and states[1] is states[0]
    devices.set_random_state(cuda, {"cpu": saved["cpu"]})
    assert len(states) == 2


def test_the_measured_peak_is_what_a_product_reaches():
    """By torch's timer. Of both the fastest of many, in turns, since other work slows some."""
    n, rates, seconds = 512, [], []
    a = torch.randn(n, n)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    for _ in range(10):
        seconds.append(timer.timeit(1).mean)
        seconds.append(timer.timeit(1).mean)
        rates.append(matmul_flops(CPU, torch.float32, n))
    assert max(rates) * min(seconds) == pytest.approx(2 * n**3, rel=0.4)

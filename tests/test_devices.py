"""Devices: what a machine has, what it lacks, and memory. For GPUs: test_pretend_gpu.py."""

import mmap
import multiprocessing
import platform
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.benchmark import Timer

from support import devices
from support.errors_and_signals import UserError
from support.run_files import run_entries
from tests.conftest import train

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
matmul_flops = devices.matmul_flops  # which conftest.py replaces


def test_precision_on_a_cpu(monkeypatch, text, tmp_path):
    """auto: float32 for a small model, bfloat16 for a large one where that is faster, and on resume
    what it was before."""
    args = ["--dtype auto --save-every 2 --data", text, "--resume --log-dir"]

    def precision(large, speedup, steps, log):
        rates = {torch.bfloat16: speedup, torch.float32: 1.0}
        monkeypatch.setattr(devices, "LARGE", 10**5 if large else 10**9)
        monkeypatch.setattr(
            devices, "matmul_flops", lambda device, *dtypes, n=0: [rates[d] for d in dtypes]
        )
        train(*args, tmp_path / log, "--max-steps", steps)
        return re.search(r"\w+(?=:)", run_entries(tmp_path / log)[-1]["device"])[0]

    assert precision(False, 9.0, 2, "small") == precision(True, 1.2, 2, "slow") == "float32"
    assert precision(True, 1.4, 2, "fast") == precision(True, 0.5, 3, "fast") == "bfloat16"
    assert precision(False, 9.0, 4, "fast") == "float32", "that of a large one"


def test_an_apple_gpu_is_for_one_process_and_trains_in_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mps = torch.device("mps")
    assert devices.choose_device("auto") == mps
    assert devices.choose_precision("auto", mps, 10**9)[0] == "float32"
    assert devices.choose_device("auto", world_size=2) == CPU
    with pytest.raises(UserError, match="--device mps: not available with 2 processes"):
        devices.choose_device("mps", world_size=2)


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


def test_the_measured_peak_is_what_a_product_reaches():
    """By torch's timer. Of both the fastest of many, in turns, since other work slows some."""
    n, rates, seconds = 512, [], []
    a = torch.randn(n, n)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    for _ in range(5):
        seconds += [timer.timeit(1).mean for _ in range(20)]  # as many as it makes
        rates += matmul_flops(CPU, torch.float32, n=n)
    assert max(rates) * min(seconds) == pytest.approx(2 * n**3, rel=0.4)

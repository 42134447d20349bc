"""The way of the scripts on a GPU, rehearsed without one: tests/pretend_gpu.py."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bench
import hellaswag
import sample
import train_gpt2
from support.errors import UserError
from support.run_log import run_entries
from tests.conftest import ROOT, losses, read_log, train, words
from tests.pretend_gpu import OnGPU, PretendGPU

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux only")
TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"
LONG = "--seq-len 48 --total-batch-size 96 --eval-tokens 96"  # HellaSwag's tasks fit


@pytest.fixture(autouse=True)
def nondeterministic():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run(text, tmp_path):
    """run(folder, flags…) trains for three steps on the CPU, or on `gpu`. Returns the losses."""

    def start(folder, *flags, gpu=None):
        args = ["--max-steps 3 --data", text, "--log-dir", tmp_path / folder, *flags]
        if gpu is None:
            train(*args)
        else:
            with gpu:
                train(*args, f"--device {gpu.device.type}")
        assert gpu is None or not gpu.unpinned, "copied from memory that is not pinned"
        return losses(tmp_path / folder)

    return start


@pytest.mark.parametrize(
    "flags", ["--dtype float32 --deterministic", "--dtype auto --optimizer muon", "--dtype float16"]
)
def test_training_equals_the_cpus(flags, run):
    gpu = PretendGPU()
    found = run("gpu", flags, "--compile", gpu=gpu)
    assert torch.are_deterministic_algorithms_enabled() == ("--deterministic" in flags)
    flags = flags.replace("auto", "bfloat16")
    assert found == pytest.approx(run("cpu", flags), abs=1e-6)


@pytest.mark.parametrize("flags", ["--dtype bfloat16 --optimizer muon", "--dtype float16"])
def test_a_step_waits_twice_for_the_device(flags, run):
    """It waits for the loss, and for the norm, which is ready by then."""

    def waits(steps, tokens):
        gpu = PretendGPU()
        run(f"{steps} {tokens}", f"--max-steps {steps} --total-batch-size {tokens}", flags, gpu=gpu)
        return gpu.waits

    one, three, twice_as_long = waits(1, 64), waits(3, 64), waits(3, 128)
    assert (three - one).total() == 2 * 2
    assert twice_as_long == three, "more micro-steps, as many waits"


def test_float16_overflows_are_no_bad_steps(run, tmp_path, monkeypatch):
    """On a chip without bfloat16. The first scale is so high that some gradients overflow."""
    scaler = torch.amp.GradScaler.__init__
    monkeypatch.setattr(scaler, "__defaults__", ("cuda", 2.0**24, *scaler.__defaults__[2:]))
    t4 = PretendGPU(name="Tesla T4", capability=(7, 5), memory=16e9)
    overflows = 0
    run("float16", "--dtype auto --max-steps 8 --save-every 4", gpu=t4)
    run("float32", "--dtype float32 --max-steps 8")
    norms = losses(tmp_path / "float16", "norm")
    overflows = sum(not torch.tensor(norm).isfinite() for norm in norms)
    assert 0 < overflows < 4, norms
    # Later updates are those of a run that began without the overflows.
    begun = losses(tmp_path / "float32", "norm")
    assert norms[overflows] == pytest.approx(begun[overflows], rel=0.05)


def test_low_memory_and_the_micro_batch_that_fits(run, tmp_path):
    automatic = "--micro-batch-size 0 --seq-len 64 --total-batch-size 2048 --max-steps 1"
    peaks, sizes = [], []
    for memory, flags in ((80e9, ""), (80e9, "--low-memory"), (60e6, "")):
        gpu = PretendGPU(memory=memory)
        run(f"{memory}{flags}", automatic, flags, gpu=gpu)
        entry = run_entries(tmp_path / f"{memory}{flags}")[0]
        sizes.append(entry["config"]["micro_batch_size"])
        peaks.append(gpu.peak)
    print(peaks, sizes)
    assert sizes[0] == sizes[1] == 32 and 1 <= sizes[2] < 32
    assert peaks[1] < 0.9 * peaks[0]
    assert peaks[2] > 60e6 / 4, "half as much memory would do"

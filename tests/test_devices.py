"""Chips that are not at hand: CPUs with and without bfloat16, Apple's GPU, NVIDIA's from T4 to B200, by stand-ins."""

import json
import subprocess
import sys

import pytest
import torch

import hellaswag
import train_gpt2
from support import devices, memory
from support.cli import InputError
from support.distributed import Distributed
from tests import no_float64
from tests.conftest import ROOT, TINY, losses, read_log
from train_gpt2 import GPT, DataLoaderLite, GPTConfig, read_config


def train(*args: object) -> int:
    return train_gpt2.main([*TINY, *map(str, args)])


@pytest.fixture(autouse=True)
def no_measured_peak(monkeypatch):
    """The chip's peak is of no interest here, and a chip that emulates bfloat16 takes a minute to measure it."""
    monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n: 1e12)


@pytest.mark.parametrize("has_it, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_where_the_cpu_computes_in_it(has_it, dtype, monkeypatch, text, tmp_path):
    """Both kinds of CPU, whichever this one is: the choice, and a run."""
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: has_it)
    assert devices.choose_device("cpu", "auto")[1] == dtype
    assert devices.computes_in_bfloat16(torch.device("cpu")) == has_it
    train("--dtype", "auto", "--data", text, "--max-steps", 1, "--eval-every", 1, "--optimizer", "muon", "--log-dir",
          tmp_path, "--total-batch-size", 32, "--eval-tokens", 32)
    (entry,) = json.loads((tmp_path / "run.json").read_text())
    assert str(dtype).removeprefix("torch.") in entry["device"] and len(losses(tmp_path)) == 1


def test_in_bfloat16_losses_do_not_depend_on_ranks_or_micro_batches_either(text, tmp_path):
    """To 3e-3 of losses around 10: a product is rounded to 8 bits, which differ with its shape."""
    args = ["--data", text, "--max-steps", 4, "--total-batch-size", 32, "--dtype", "bfloat16"]
    for B in (1, 2):
        train(*args, "--micro-batch-size", B, "--log-dir", tmp_path / str(B))
    train(*args[:-2], "--dtype", "float32", "--log-dir", tmp_path / "exact")
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), abs=3e-3)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "exact"), abs=1e-2)
    assert losses(tmp_path / "2") != losses(tmp_path / "exact")


def test_bfloat16_resumes_bit_for_bit(text, tmp_path):
    args = ["--data", text, "--save-every", 2, "--dtype", "bfloat16", "--keep-checkpoints", 0, "--max-steps", 4,
            "--total-batch-size", 32]
    train(*args, "--log-dir", tmp_path / "straight")
    train(*args, "--log-dir", tmp_path / "broken")
    (tmp_path / "broken/step_000004").rename(tmp_path / "gone")
    train(*args, "--log-dir", tmp_path / "broken", "--resume")
    assert read_log(tmp_path / "broken", "train", "norm") == read_log(tmp_path / "straight", "train", "norm")


def gpu(monkeypatch, name: str, capability: tuple[int, int]) -> torch.device:
    """Pretends that this machine has one GPU of a kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name, capability, dtype", [
    ("Tesla T4", (7, 5), torch.float16), ("Tesla V100-SXM2-16GB", (7, 0), torch.float16),
    ("NVIDIA A100-SXM4-80GB", (8, 0), torch.bfloat16), ("NVIDIA H100 80GB HBM3", (9, 0), torch.bfloat16),
])
def test_precision_of_a_gpu(name, capability, dtype, monkeypatch):
    gpu(monkeypatch, name, capability)
    assert devices.choose_device("auto", "auto")[:2] == (torch.device("cuda", 0), dtype)
    assert devices.choose_device("auto", "float32")[1] == torch.float32
    with pytest.raises(InputError, match=r"2 processes on this machine, but 1 GPUs: lower --nproc_per_node"):
        devices.choose_device("auto", "auto", local_rank=1)


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 NVL", 836), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989),
    ("NVIDIA GH200 480GB", 990), ("NVIDIA H20", 148), ("NVIDIA B200", 2250), ("NVIDIA A100-SXM4-40GB", 312),
    ("A100-SXM4-40GB", 312), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 3090", 71),
    ("NVIDIA GeForce RTX 3090 Ti", 80), ("NVIDIA GeForce RTX 5090", 209.5), ("Tesla T4", 65), ("NVIDIA L40", 181),
    ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA RTX A6000", 155), ("NVIDIA RTX 6000 Ada Generation", 364),
    ("AMD Instinct MI300X", 1307),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A10G", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Quadro RTX 6000", None),
])
def test_peaks_are_those_of_the_very_chip(name, tflops, monkeypatch):
    device = gpu(monkeypatch, name, (9, 0))
    assert devices.data_sheet_flops(device, torch.bfloat16) == (tflops and tflops * 1e12)
    assert devices.data_sheet_flops(device, torch.float32) is None


def test_device_cpu_leaves_a_gpu_alone(monkeypatch, text, tmp_path):
    """No pinned memory, which makes a CUDA context; nothing compiled by default."""
    gpu(monkeypatch, "NVIDIA H100 80GB HBM3", (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pytest.fail("pinned"))
    assert read_config(["--preset", "gpt2"]).compile
    assert not read_config(["--preset", "gpt2", "--device", "cpu"]).compile
    assert read_config(["--preset", "gpt2", "--device", "cpu", "--compile"]).compile
    train("--data", text, "--max-steps", 1, "--eval-every", 1, "--log-dir", tmp_path)


def test_batches_are_pinned_when_asked(monkeypatch, text):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.numel()) or self)
    DataLoaderLite(text, "train", 2, 8, pin_memory=True).next_batch()
    assert pinned and set(pinned) == {17}


def test_an_apple_gpu_is_for_one_process(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto", "auto")[:2] == (torch.device("mps"), torch.float32)
    assert devices.choose_device("auto", "float32", world_size=2)[0] == torch.device("cpu")
    with pytest.raises(InputError, match="--device mps: for one process"):
        devices.choose_device("mps", "auto", world_size=2)


WITHOUT_FLOAT64 = """
import sys
sys.path.insert(0, {root!r})
import torch
import torch._dynamo
import support.devices, support.distributed, train_gpt2
from tests.no_float64 import StandIn, install

device = install()
support.distributed.choose_device = lambda *args: (device, getattr(torch, {dtype!r}), "a stand-in")
support.devices.matmul_flops = lambda *args: 1e12
Generator, tensor = torch.Generator, torch.tensor  # both go past a stand-in
torch.Generator = lambda device=None: Generator()
torch.tensor = lambda data, device="cpu", **options: tensor(data, **options).to(device)
with StandIn():
    for steps in ("2", "4"):
        assert train_gpt2.main([*{args!r}, "--max-steps", steps]) == 0
"""


@pytest.mark.skipif(not no_float64.INSTALLABLE, reason="this torch registers no device from Python")
def test_a_device_without_float64(text, tmp_path):
    """A whole run on a stand-in that refuses float64 as Apple's GPU does: validation, HellaSwag, samples, both
    optimizers, a checkpoint, a resumption; with the losses of the CPU."""
    tasks = tmp_path / "tasks.jsonl"
    lines = (ROOT / "tests" / "hellaswag_sample.jsonl").read_text().splitlines(keepends=True)
    tasks.write_text("".join(lines[:4]))
    args = ["--data", text, "--eval-every", 2, "--hellaswag-every", 2, "--hellaswag-data", tasks, "--seq-len", 64,
            "--sample-every", 4, "--save-every", 2, "--optimizer", "muon", "--micro-batch-size", 1, "--min-lr", 5e-3]
    code = WITHOUT_FLOAT64.format(root=str(ROOT), dtype="float32", args=[
        *TINY, *map(str, args), "--log-dir", str(tmp_path / "device"), "--resume"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank 0 sample") == 4 and "resumed from" in done.stdout
    train(*args, "--max-steps", 4, "--log-dir", tmp_path / "cpu")
    for stream in ("train", "val", "hella"):
        assert losses(tmp_path / "device", stream) == pytest.approx(losses(tmp_path / "cpu", stream), abs=1e-5)


class OutOfMemoryAbove(GPT):
    """A model that runs out of memory with more than so many sequences."""

    def __init__(self, limit: int, error: Exception):
        super().__init__(GPTConfig(4, n_layer=1, n_head=1, n_embd=1))
        self.limit, self.error, self.tried, self.held = limit, error, [], []

    def forward(self, x, y, loss_function):
        self.tried.append(len(x))
        self.held.append(self.wte.weight.grad is not None)
        if len(x) > self.limit:
            raise self.error
        return None, torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
])
def test_the_largest_micro_batch_that_fits_is_taken(error, monkeypatch):
    config = read_config(["--preset", "gpt2", "--seq-len", "4", "--total-batch-size", "512"])
    dist = Distributed(0, 0, 1, torch.device("cpu"), torch.bfloat16, "")
    model = OutOfMemoryAbove(12, error)
    assert memory.largest_that_fits([32, 16, 8, 4], model, config, dist) == 8 and model.tried == [32, 16, 8]
    assert model.held == [True] * 3 and model.wte.weight.grad is None  # those of earlier micro-steps
    assert memory.fits(model, 128, config, dist) is False and model.held[-1] is False  # the step's only one
    with pytest.raises(InputError, match="not one sequence of 4 tokens fits"):
        memory.largest_that_fits([4, 2, 1], OutOfMemoryAbove(0, error), config, dist)
    with pytest.raises(RuntimeError, match="another matter"):
        memory.largest_that_fits([4], OutOfMemoryAbove(0, RuntimeError("another matter")), config, dist)

    def cannot_reserve(*args, **kwargs):  # a model too large for its optimizer's moments
        raise error

    model = OutOfMemoryAbove(9, error)
    monkeypatch.setattr(memory.torch, "empty", cannot_reserve)
    with pytest.raises(InputError, match="not one sequence of 4 tokens fits"):
        memory.largest_that_fits([2, 1], model, config, dist)


def test_what_is_reserved_is_what_the_run_will_hold():
    """Moments, of sharded ones the largest share; a compiled step's 16-bit logits, if there are; and whether gradients
    are there before the last backward pass: in DDP's buckets or from earlier micro-steps."""
    model = OutOfMemoryAbove(9, RuntimeError())
    N = model.num_parameters()

    def besides(*flags, world_size=1, B=1):
        config = read_config(["--preset", "gpt2", "--seq-len", "1024", "--total-batch-size", "8192", *flags])
        dist = Distributed(0, 0, world_size, torch.device("cuda"), torch.bfloat16, "")
        return memory.bytes_besides(model, B, config, dist), memory.adds_to_gradients(B, config, dist)

    assert besides("--no-compile", B=8) == (8 * N, False) and besides("--no-compile") == (8 * N, True)
    assert besides("--no-compile", world_size=8) == (8 * N, True)
    assert besides("--no-compile", "--shard-optimizer", world_size=2) == (8 * 50257, True)
    assert besides("--no-compile", "--optimizer", "muon", B=8) == (8 * N - 4 * 12, False)
    assert besides("--compile", "--low-memory", B=8) == (8 * N, False)
    assert besides("--compile", B=8) == (8 * N + 8 * 1024 * 50304 * 2, False)


def test_hellaswag_and_samples_have_few_shapes_on_a_gpu(monkeypatch):
    """cuDNN's attention plans anew for every shape: multiples of 64 only, and the results are the same."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(160, 50257, 2, 2, 32))
    torch.nn.init.normal_(model.wte.weight, std=0.3)
    lengths = {}

    def run(name):
        shapes = lengths.setdefault(name, set())
        hidden = lambda *args: shapes.add(args[0].shape[1]) or GPT.hidden(model, *args)  # noqa: E731
        tasks = hellaswag.prepare(hellaswag.load_examples(ROOT / "tests" / "hellaswag_sample.jsonl"), 160)
        score = hellaswag.score(hidden, model.wte.weight, tasks, torch.device("cpu"), batch_size=2)
        monkeypatch.setattr(model, "hidden", hidden)
        idx = torch.arange(100, 250)[None]
        return score.losses, model.generate(idx, 20, generator=torch.Generator().manual_seed(1))

    losses_before, samples_before = run("every length")
    assert devices.round_length(65, torch.device("cpu")) == 65
    assert devices.round_length(65, torch.device("cuda")) == devices.round_length(128, torch.device("cuda")) == 128
    for module in (hellaswag, train_gpt2):
        monkeypatch.setattr(module, "round_length", lambda n, device: devices.round_length(n, torch.device("cuda")))
    losses_after, samples_after = run("rounded")
    assert len(lengths["every length"]) > 10 and all(n % 64 == 0 or n == 160 for n in lengths["rounded"])
    assert len(lengths["rounded"]) <= 4
    torch.testing.assert_close(losses_after, losses_before, atol=1e-3, rtol=1e-5)
    assert torch.equal(losses_after.argmin(1), losses_before.argmin(1)) and torch.equal(samples_after, samples_before)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a torch without CUDA makes no fake CUDA tensors")
def test_forward_passes_on_a_fake_gpu_mix_no_devices():
    """Fake tensors of a CUDA device carry shapes and devices, no values, and refuse the host's among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from support.muon import orthogonalize

    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = GPT(GPTConfig(64, 50257, 2, 2, 32))
            idx = torch.zeros(2, 64, dtype=torch.int64)
        logits, loss = model(idx, idx)
        assert logits.shape == (2, 64, 50257) and logits.device.type == loss.device.type == "cuda"
        assert model(idx, idx, train_gpt2.chunked_next_token_loss)[1].device.type == "cuda"
        assert model.generate(idx[:, :40], 2).shape == (2, 42)
        assert orthogonalize(torch.empty(3, 8, 24, device="cuda")).device.type == "cuda"
        host = devices.on_host({"a": [torch.empty(3, device="cuda")]})
        assert host["a"][0].device.type == "cpu"

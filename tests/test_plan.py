"""--plan's arithmetic against measured peaks, and the micro-batch that fits on a GPU."""

import pytest
import torch

from support import devices, plan
from support.plan import estimate_memory, fits
from tests.conftest import train
from train_gpt2 import GPT, DDPContext, GPTConfig, choose_micro_batch_size, main, read_config

@pytest.mark.parametrize("shape, B, low_memory, measured", [
    ((12, 12, 768), 1, False, 3.15), ((12, 12, 768), 4, True, 2.67), ((24, 16, 1024), 4, False, 12.90)])
def test_the_estimate_is_near_measured_peaks(shape, B, low_memory, measured):
    """GB of a process on a CPU, T = 1024, float32, AdamW (bench/memory)."""
    with torch.device("meta"):
        model = GPT(GPTConfig(1024, 50257, *shape))
    estimate = estimate_memory(model, B, 1024, torch.device("cpu"), torch.float32, low_memory, False)
    assert estimate / 1e9 == pytest.approx(measured, rel=0.1)

def test_plan_prints_and_does_not_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n: 1e12)
    assert main(["--preset", "gpt2", "--plan", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for part in ("124,439,808", "855,166,464", "9,999,745,024 in 19,073 steps", "8.551e+18", "3.27 GB"):
        assert part in text, part
    assert not list(tmp_path.iterdir())
    GPT(GPTConfig(64, 50257, 1, 2, 8)).save_pretrained(tmp_path / "model")
    train("--init", tmp_path / "model", "--plan", "--log-dir", tmp_path / "log")
    assert f"parameters: {(50257 + 64 + 12 * 8 + 13 + 2) * 8:,} " in capsys.readouterr().out
    assert not (tmp_path / "log").exists()

class OutOfMemoryAbove(GPT):
    """A model that runs out of memory with more than `limit` sequences."""

    def __init__(self, limit: int, error: Exception):
        super().__init__(GPTConfig(4, n_layer=1, n_head=1, n_embd=1))
        self.limit, self.error, self.held_gradients = limit, error, False

    def forward(self, x, y):
        self.held_gradients = self.wte.weight.grad is not None
        if len(x) > self.limit:
            raise self.error
        return super().forward(x, y)

@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
])
def test_what_fits_is_tried(error, monkeypatch):
    """Beside the gradients of earlier micro-steps, if there are; nothing of the trial is left."""
    model = OutOfMemoryAbove(12, error)
    trial = lambda model, B, accumulates=True: fits(model, B, 4, torch.float32, 8, True, accumulates)  # noqa: E731
    loss_function = model.loss_function
    for accumulates in (True, False):
        assert [trial(model, B, accumulates) for B in (16, 12)] == [False, True]
        assert model.held_gradients == accumulates
        assert all(p.grad is None for p in model.parameters()) and model.loss_function is loss_function
    with pytest.raises(RuntimeError, match="another problem"):
        trial(OutOfMemoryAbove(0, RuntimeError("another problem")), 1)

    def cannot_reserve(*args, **options):  # a model too large for its optimizer's moments
        raise error

    monkeypatch.setattr(plan.torch, "empty", cannot_reserve)
    assert trial(model, 1) is False

@pytest.mark.parametrize("flags, world_size, B, moments, keeps_logits, accumulates", [
    ("--no-compile", 1, 8, 8, False, False), ("--no-compile --total-batch-size 64", 1, 8, 8, False, True),
    ("--compile", 2, 4, 8, True, True), ("--compile --low-memory --shard-optimizer", 2, 4, 4, False, True),
])
def test_a_gpus_micro_batch_is_the_largest_that_fits_all_ranks(
    flags, world_size, B, moments, keeps_logits, accumulates, monkeypatch
):
    """moments: bytes a parameter. The other ranks have room for 4 sequences, this one for 8."""
    model, tried = OutOfMemoryAbove(0, RuntimeError()), []
    others = lambda: [tried[-1][0] <= 4] * (world_size - 1)  # noqa: E731
    monkeypatch.setattr(plan, "fits", lambda _, B, T, dtype, *rest: tried.append((B, *rest)) or B <= 8)
    monkeypatch.setattr(DDPContext, "gather", lambda self, value: [value, *others()])
    ddp = DDPContext(0, world_size, torch.device("cuda"), torch.bfloat16, "")
    config = read_config(["--preset", "gpt2", "--seq-len", "4", "--total-batch-size", "32", *flags.split()])
    assert choose_micro_batch_size(config, model, ddp) == B
    assert tried[-1] == (B, moments * model.num_parameters(), keeps_logits, accumulates)

"""What only a CUDA GPU can show; skipped elsewhere."""

import pytest
import torch

from tests.conftest import ROOT, losses, read_log
from tests.conftest import train as train_tiny
from train_gpt2 import GPT, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SMALL = ["--n-layer", 2, "--n-head", 4, "--n-embd", 128, "--seq-len", 128, "--total-batch-size", 4096,
         "--data", ROOT / "input.txt", "--device", "cuda", "--max-lr", 1e-3]

def train(*args):
    return train_tiny(*SMALL, *args)

def test_compiled_equals_eager(tmp_path):
    for name in ("compile", "no-compile", "low-memory"):
        train("--max-steps", 50, "--eval-every", 25, f"--{name}", "--log-dir", tmp_path / name)
    for stream in ("train", "val"):
        for name in ("compile", "low-memory"):
            expected = pytest.approx(losses(tmp_path / "no-compile", stream), abs=0.02)
            assert losses(tmp_path / name, stream) == expected, name

@pytest.fixture
def determinism_ends():
    """--deterministic is for a process; the tests share one."""
    yield
    torch.use_deterministic_algorithms(False)

@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_resumed_run_equals_one_that_never_stopped(tmp_path, dtype, compiled, determinism_ends):
    """At T = 1024, where attention's backward kernels add in a varying order unless told otherwise."""
    args = ["--dtype", dtype, "--save-every", 5, "--min-lr", 1e-3,  # a constant rate, whatever --max-steps is
            "--deterministic", "--seq-len", 1024, "--total-batch-size", 8192, compiled]
    train(*args, "--max-steps", 10, "--log-dir", tmp_path / "straight")
    train(*args, "--max-steps", 5, "--log-dir", tmp_path / "broken")
    train(*args, "--max-steps", 10, "--log-dir", tmp_path / "broken", "--resume")
    assert read_log(tmp_path / "broken", "train", "norm") == read_log(tmp_path / "straight", "train", "norm")

def test_padded_head_equals_the_plain_product():
    """V rounded up to 50,304 in the product alone: logits, loss and gradients are those of 50,257."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 50257, 2, 4, 128))
    idx = torch.randint(0, 50257, (2, 65))
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    grad = model.wte.weight.grad.clone()
    model.zero_grad()
    model.cuda()
    gpu_logits, gpu_loss = model(idx[:, :-1].cuda(), idx[:, 1:].cuda())
    gpu_loss.backward()
    assert gpu_logits.shape == (2, 64, 50257)
    torch.testing.assert_close(gpu_logits.cpu(), logits, atol=1e-4, rtol=1e-3)
    assert (model.wte.weight.grad.cpu() - grad).norm() < 1e-3 * grad.norm()

def test_the_largest_micro_batch_is_found(tmp_path):
    train("--max-steps", 1, "--micro-batch-size", 0, "--log-dir", tmp_path)
    assert len(losses(tmp_path)) == 1

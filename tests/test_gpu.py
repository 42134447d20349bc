"""What only a CUDA GPU can show; skipped elsewhere."""

import pytest
import torch

from tests.conftest import ROOT, losses, read_log
from tests.conftest import train as train_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def train(*args):
    small = "--n-layer 2 --n-head 4 --n-embd 128 --seq-len 128 --total-batch-size 4096"
    return train_tiny(small, "--max-lr 1e-3 --device cuda --data", ROOT / "input.txt", *args)


def test_compiled_equals_eager(tmp_path):
    for name in ("compile", "no-compile", "low-memory"):
        train(f"--max-steps 50 --eval-every 25 --{name} --log-dir", tmp_path / name)
    for stream in ("train", "val"):
        for name in ("compile", "low-memory"):
            expected = pytest.approx(losses(tmp_path / "no-compile", stream), abs=0.02)
            assert losses(tmp_path / name, stream) == expected, name


@pytest.mark.parametrize("compiled", ["--compile", "--no-compile"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_resumed_run_equals_one_that_never_stopped(tmp_path, dtype, compiled, request):
    """At T = 1024, where attention's backward kernels add in a varying order by default."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    args = [compiled, "--deterministic --dtype", dtype, "--seq-len 1024 --total-batch-size 8192"]
    args.append("--save-every 5 --min-lr 1e-3 --log-dir")  # a constant rate
    train(*args, tmp_path / "straight", "--max-steps 10")
    train(*args, tmp_path / "broken", "--max-steps 5")
    train(*args, tmp_path / "broken", "--max-steps 10 --resume")
    straight, broken = (read_log(tmp_path / run, "train", "norm") for run in ("straight", "broken"))
    assert straight == broken


def test_the_largest_micro_batch_is_found(tmp_path):
    train("--max-steps 1 --micro-batch-size 0 --log-dir", tmp_path)
    assert len(losses(tmp_path)) == 1

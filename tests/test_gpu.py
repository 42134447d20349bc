"""What only a CUDA GPU can show; skipped elsewhere, except what gloo shows as well as NCCL."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.conftest import RANK, ROOT, losses, read_log
from tests.conftest import train as train_tiny
from train_gpt2 import GPT, GPTConfig, Ranks, wrap_in_ddp

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def train(*args):
    small = "--n-layer 2 --n-head 4 --n-embd 128 --seq-len 128 --total-batch-size 4096"
    return train_tiny(small, "--max-lr 1e-3 --device cuda --data", ROOT / "input.txt", *args)


@on_a_gpu
def test_compiled_equals_eager(tmp_path):
    for name in ("compile", "no-compile", "low-memory"):
        train(f"--max-steps 50 --eval-every 25 --{name} --log-dir", tmp_path / name)
    for stream in ("train", "val"):
        for name in ("compile", "low-memory"):
            expected = pytest.approx(losses(tmp_path / "no-compile", stream), abs=0.02)
            assert losses(tmp_path / name, stream) == expected, name


@on_a_gpu
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


@on_a_gpu
def test_the_largest_micro_batch_is_found(tmp_path):
    train("--max-steps 1 --micro-batch-size 0 --log-dir", tmp_path)
    assert len(losses(tmp_path)) == 1


@on_a_gpu
def test_hellaswag_and_samples_beside_compiled_training(tmp_path, capsys):
    """They compile nothing more, score as without compilation, and leave training alone."""
    tasks = ROOT / "tests" / "hellaswag_sample.jsonl"
    evaluate = ["--hellaswag-every 2 --sample-every 2 --hellaswag-data", tasks]
    graphs = []
    for name, args in {
        "alone": ["--compile"],
        "beside": ["--compile", *evaluate],
        "eager": ["--no-compile", *evaluate],
    }.items():
        torch._dynamo.reset()
        counters.clear()
        train("--max-steps 4 --seq-len 256 --log-dir", tmp_path / name, *args)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > graphs[2]
    assert losses(tmp_path / "beside") == pytest.approx(losses(tmp_path / "alone"), abs=1e-3)
    scores = [losses(tmp_path / name, "hella") for name in ("beside", "eager")]
    assert len(scores[0]) == 3 and scores[0] == pytest.approx(scores[1], abs=0.2)
    assert capsys.readouterr().out.count("sample 0:") == 4


@on_a_gpu
def test_muon_in_bfloat16_follows_float32(tmp_path):
    for dtype in ("bfloat16", "float32"):
        train("--max-steps 3 --optimizer muon --log-dir", tmp_path / dtype, "--dtype", dtype)
    found = losses(tmp_path / "bfloat16")
    assert found == pytest.approx(losses(tmp_path / "float32"), abs=0.05)
    assert found[2] < found[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_one_rank_in_a_process_group_trains_like_none(device, monkeypatch):
    """The way of eight GPUs on one: NCCL, or gloo on a CPU, from the start to the end."""
    for name, value in (RANK | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    ranks = Ranks.start(device)
    gpu = device == "cuda"
    assert dist.get_backend() == ("nccl" if gpu else "gloo") and ranks.device.type == device
    gathered, sent = [None], [{"B": 64}]
    dist.all_gather_object(gathered, {"rank": 0})
    dist.broadcast_object_list(sent, src=0)
    assert (gathered, sent) == ([{"rank": 0}], [{"B": 64}])
    total = torch.full((2,), 3.0, device=ranks.device)
    dist.all_reduce(total)
    assert total.tolist() == [3.0, 3.0]

    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 50257, 2, 2, 64)).to(ranks.device)
    model.prepare(compiled=gpu)
    autocast = torch.autocast(device, torch.bfloat16, enabled=gpu)
    batches = torch.randint(0, 50257, (2, 4, 65), device=ranks.device)

    def draw(*_):
        if not gpu:  # not in a compiled block
            torch.rand(1)

    draws = model.h[0].register_forward_pre_hook(draw)
    before = torch.get_rng_state()
    ddp_model = wrap_in_ddp(model, 4, 64, ranks, autocast)
    assert torch.equal(torch.get_rng_state(), before), "a fork's dropout would be another"
    draws.remove()
    gradients = []
    for trained in (ddp_model, model):
        trained.zero_grad(set_to_none=trained is model)
        for micro_step, batch in enumerate(batches):
            ddp_model.require_backward_grad_sync = micro_step == 1
            with autocast:
                _, loss = trained(batch[:, :-1], batch[:, 1:])
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4 if gpu else 1e-7)
        assert expected.any()
    del ddp_model, trained  # before its process group
    dist.destroy_process_group()
    assert not dist.is_initialized()

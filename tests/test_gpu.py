"""What only a CUDA GPU can show; skipped elsewhere, except what gloo shows as well as NCCL."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from support.errors_and_signals import UserError
from support.ranks import Ranks, open_store
from tests.conftest import RANK, ROOT, losses, read_log, train_on_ranks
from tests.conftest import train as train_tiny
from train_gpt2 import GPT, GPTConfig

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def train(*args):
    small = "--n-layer 2 --n-head 4 --n-embd 128 --seq-len 128 --total-batch-size 4096"
    return train_tiny(small, "--max-lr 1e-3 --device cuda --data", ROOT / "input.txt", *args)


@on_a_gpu
def test_compiled_equals_eager(tmp_path):
    ways = {"eager": "off", "compiled": "on", "low memory": "on --low-memory"}
    for name, flags in ways.items():
        train("--max-steps 50 --eval-every 25 --log-dir", tmp_path / name, f"--compile {flags}")
    for stream in ("train", "val"):
        for name in ("compiled", "low memory"):
            expected = pytest.approx(losses(tmp_path / "eager", stream), abs=0.02)
            assert losses(tmp_path / name, stream) == expected, name


@on_a_gpu
@pytest.mark.parametrize("compiled", ["--compile on", "--compile off"])
@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16"])
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


GPT2 = "--n-layer 12 --n-head 12 --n-embd 768 --seq-len 1024 --dtype bfloat16"


@on_a_gpu
def test_out_of_memory_is_one_line_and_leaves_a_gpu_that_trains(tmp_path):
    args = [GPT2, "--compile off --total-batch-size 4194304 --micro-batch-size 4096 --log-dir"]
    with pytest.raises(UserError, match="--micro-batch-size 2048") as raised:
        train(*args, tmp_path / "large")
    assert len(str(raised.value).splitlines()) == 1
    del raised  # with its traceback, whose frames hold the tensors
    train("--max-steps 1 --log-dir", tmp_path / "small")
    assert len(losses(tmp_path / "small")) == 1


@on_a_gpu
def test_hellaswag_in_a_context_that_is_no_multiple_of_64(tmp_path):
    tasks = ROOT / "tests" / "hellaswag_sample.jsonl"
    args = ["--max-steps 1 --seq-len 32 --hellaswag-every 1 --hellaswag-data", tasks, "--log-dir"]
    train(*args, tmp_path / "gpu", "--dtype float32")
    train(*args, tmp_path / "cpu", "--dtype float32 --device cpu")
    assert losses(tmp_path / "gpu", "hella") == losses(tmp_path / "cpu", "hella")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus_train_like_one(tmp_path):
    args = ["--max-steps 5 --device cuda --data", ROOT / "input.txt", "--log-dir"]
    train_on_ranks(2, tmp_path, *args, tmp_path / "two")
    train_tiny(*args, tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


@on_a_gpu
def test_hellaswag_and_samples_beside_compiled_training(tmp_path, capsys):
    """They compile nothing more, score as without compilation, and leave training alone."""
    tasks = ROOT / "tests" / "hellaswag_sample.jsonl"
    evaluate = ["--hellaswag-every 2 --sample-every 2 --hellaswag-data", tasks]
    graphs = []
    for name, args in {
        "alone": ["--compile on"],
        "beside": ["--compile on", *evaluate],
        "eager": ["--compile off", *evaluate],
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
    for dtype in ("bfloat16", "tf32", "float32"):
        train("--max-steps 3 --optimizer muon --log-dir", tmp_path / dtype, "--dtype", dtype)
    found = losses(tmp_path / "bfloat16")
    assert found == pytest.approx(losses(tmp_path / "float32"), abs=0.05)
    assert found[2] < found[0]


@on_a_gpu
def test_one_rank_in_a_process_group_trains_like_none(monkeypatch):
    """The way of eight GPUs on one, with NCCL, from the start to the end."""
    for name, value in (RANK | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    ranks = Ranks.from_environment("cuda")
    dist.init_process_group(
        "nccl", store=open_store(ranks), rank=0, world_size=1, device_id=ranks.device
    )
    assert dist.get_backend() == "nccl" and ranks.device.type == "cuda"
    gathered, sent = [None], [{"B": 64}]
    dist.all_gather_object(gathered, {"rank": 0})
    dist.broadcast_object_list(sent, src=0)
    assert (gathered, sent) == ([{"rank": 0}], [{"B": 64}])
    total = torch.full((2,), 3.0, device=ranks.device)
    dist.all_reduce(total)
    assert total.tolist() == [3.0, 3.0]

    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 50257, 2, 2, 64)).to(ranks.device)
    for part in [*model.h]:
        part.compile(dynamic=False)
    autocast = torch.autocast("cuda", torch.bfloat16)
    batches = torch.randint(0, 50257, (2, 4, 65), device=ranks.device)
    gpus = [ranks.device]
    ddp_model = DistributedDataParallel(
        model, device_ids=gpus, gradient_as_bucket_view=True, find_unused_parameters=True
    )
    gradients = []
    for trained in (ddp_model, model):
        trained.zero_grad()
        for micro_step, batch in enumerate(batches):
            ddp_model.require_backward_grad_sync = micro_step == 1
            with autocast:
                loss = trained(batch[:, :-1], batch[:, 1:])
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
        assert expected.any()
    del ddp_model, trained  # before its process group
    dist.destroy_process_group()
    assert not dist.is_initialized()

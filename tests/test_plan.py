"""What a step takes: the estimate beside the tensors of real steps, and settings that are too large."""

import re
import weakref
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt2
from support import memory, plan
from support.cli import InputError
from support.distributed import Distributed
from tests.conftest import TINY
from train_gpt2 import GPT, chunked_next_token_loss, configure_optimizer, model_config, read_config


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that there are, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def drop(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)


def device(kind: str = "cuda", ranks: int = 1, dtype: torch.dtype = torch.bfloat16) -> Distributed:
    return Distributed(0, 0, ranks, torch.device(kind), dtype, "")


def shape(config: train_gpt2.TrainConfig) -> GPT:
    with torch.device("meta"):
        return GPT(model_config(config))


@pytest.mark.parametrize("flags, B, micro_steps, dtype", [
    ("", 4, 1, torch.bfloat16), ("--low-memory --optimizer muon", 4, 2, torch.float32),
])
def test_the_estimate_is_what_a_step_takes(flags, B, micro_steps, dtype):
    """124M but for its depth, on tensors without values (FakeTensorMode): the peak of their bytes."""
    T = 1024
    config = read_config([*TINY, "--n-layer", "2", "--n-head", "12", "--n-embd", "768", "--seq-len", str(T),
                          "--total-batch-size", str(micro_steps * B * T), *flags.split()])
    with FakeTensorMode(), LiveBytes() as live:
        model = GPT(model_config(config))
        model.recompute = config.low_memory
        optimizer = configure_optimizer(model, config)
        for p in model.parameters():  # a first step, for the moments
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        x = torch.zeros(B, T, dtype=torch.int64)
        for _ in range(micro_steps):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(x, x, chunked_next_token_loss)[1]
            loss.backward()
        optimizer.step()
    parts = memory.memory_of(model, B, config, device("cpu", dtype=dtype))
    assert sum(parts.values()) - parts["the process"] == pytest.approx(live.peak, rel=0.03), parts


def flags_in(message: str) -> list[list[str]]:
    """The flags of each way out that a message names, how many GPUs they need left out."""
    return [way.split(" on ")[0].split() for way in message.split("What fits: ")[1].split(", or ")]


@pytest.mark.parametrize("args, gigabytes, ranks, named", [
    ("--micro-batch-size 64", 12, 1, "--micro-batch-size 16, or --low-memory"),
    ("--micro-batch-size 512 --low-memory", 12, 1, "--micro-batch-size 64"),
    ("--n-layer 3 --n-head 32 --n-embd 6144", 24, 1, "--low-memory --shard-optimizer on 4 GPUs"),
    ("--n-layer 3 --n-head 32 --n-embd 6144", 24, 8, "--shard-optimizer, or --low-memory --shard-optimizer"),
    ("--seq-len 65536 --micro-batch-size 1 --low-memory", 4, 1, "--seq-len 512"),
])
def test_what_cannot_fit_is_refused_with_what_does(args, gigabytes, ranks, named, monkeypatch):
    """On GPUs of stand-in sizes; each way out is one that the arithmetic lets pass."""
    monkeypatch.setattr(memory, "room_of", lambda dist: gigabytes * 10**9)
    monkeypatch.setattr(Distributed, "gather", lambda self, value: [value] * self.world_size)
    args = ["--preset", "gpt2", "--compile", *args.split()]
    config = read_config(args)
    with pytest.raises(InputError, match=f"GPU has {gigabytes}.0") as error:
        memory.refuse_what_cannot_fit(config, shape(config), device(ranks=ranks))
    message = str(error.value)
    assert f"What fits: {named}" in message and "\n" not in message
    for flags in flags_in(message):
        way = read_config([*args, *flags])
        n = int(re.search(r"on (\d+) GPUs|$", message)[1] or ranks)
        needed = sum(memory.memory_of(shape(way), way.micro_batch_size or 1, way, device(ranks=n)).values())
        assert needed <= memory.usable(gigabytes * 1e9), flags
        memory.refuse_what_cannot_fit(way, shape(way), device(ranks=n))


def test_a_machine_that_is_too_small_says_so_before_it_starts(text, tmp_path, monkeypatch):
    """The bound is a hard one: what could fit is tried."""
    args = [*TINY, "--data", str(text), "--max-steps", "1", "--log-dir", str(tmp_path / "log")]
    monkeypatch.setattr(memory, "memory_of_machine", lambda: 5_000_000)
    with pytest.raises(InputError, match=r"take 0\.\d GB; this machine has 0\.0.*train a smaller model"):
        train_gpt2.main(args)
    assert not (tmp_path / "log").exists()
    monkeypatch.undo()
    assert 1e9 < memory.memory_of_machine() < 1e15


def test_memory_that_runs_out_in_the_middle_is_one_line(text, tmp_path, monkeypatch):
    def fail(self, x, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")

    monkeypatch.setattr(GPT, "forward", fail)
    with pytest.raises(InputError, match=r"^out of memory on cpu\. What fits: --micro-batch-size 4, or --low-memory$"):
        train_gpt2.main([*TINY, "--data", str(text), "--micro-batch-size", "8", "--seq-len", "64",
                         "--total-batch-size", "512", "--log-dir", str(tmp_path)])


def test_the_plan_says_what_cards_take(capsys, monkeypatch):
    """Half a GPT-2 XL: no card of 8 GB; flags where they are needed; the arithmetic confirms a cell; 80 columns."""
    monkeypatch.setattr(plan, "peak_flops", lambda device, dtype: (1e12, "made up"))
    monkeypatch.setattr(plan, "CARDS", {8: "", 16: "T4", 24: "GeForce RTX 4090"})
    config = read_config(["--preset", "gpt2", "--n-layer", "6", "--n-head", "32", "--n-embd", "3072"])
    model = shape(config)
    plan.print_plan(config, model)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    table = {line.split()[0]: re.split(r"  +", line.strip())[1:] for line in lines if re.match(r" +\d+  ", line)}
    assert table["8"] == ["-"] * 4 and table["16"][0] == "T4" and table["16"][2].split()[1] in ("s", "ls")
    B, time = table["24"][1].split()
    fits = [sum(memory.memory_of(model, n, replace(config, compile=True), device()).values()) <= 22.3e9
            for n in (int(B), 2 * int(B))]
    assert fits == [True, False]
    seconds = model.flops_per_token(1024) * config.max_steps * config.total_batch_size / (165.2e12 * 0.4)
    assert time == f"{seconds / 86400:.2g}d"

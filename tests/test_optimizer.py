"""Muon against torch.optim.Muon, and in training; the sharded optimizer; the wsd schedule."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import train_gpt2
from support.checkpoints import read_training_state
from support.files import sha256
from support.muon import Muon
from support.sharding import assign_owners
from tests.conftest import losses, read_log, train, train_on_ranks
from train_gpt2 import GPT, GPTConfig, TrainConfig, configure_optimizer, get_lr

SHAPES = {"0.c_proj.weight": (32, 32), "0.c_attn.weight": (96, 32), "1.c_proj.weight": (32, 128)}
SHAPES |= {"1.c_attn.weight": (96, 32), "1.c_fc.weight": (128, 32), "2.c_fc.weight": (96, 32)}
MUON = replace(TrainConfig(), optimizer="muon")


def split(tensors, sizes):
    """Tensors of SHAPES. c_attn.weight is three matrices, an MLP's of the same shape is one."""
    parts = []
    for name, tensor in zip(SHAPES, tensors, strict=True):
        parts += tensor.split(sizes) if "c_attn" in name else [tensor]
    return parts


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sizes", [[32, 32, 32], [64, 16, 16]])  # the latter: shared keys, values
def test_muon_equals_torchs(dtype, tolerance, sizes, monkeypatch):
    """Ten steps. For float32, the cast to bfloat16 in torch's Muon is removed."""
    if dtype == torch.float32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # until torch 2.13
        monkeypatch.setattr(torch, "bfloat16", torch.float32)
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES.values()]
    theirs = [torch.nn.Parameter(part.detach().clone()) for part in split(ours, sizes)]
    start = [part.detach().clone() for part in split(ours, sizes)]
    splits = {name: sizes for name in SHAPES if "c_attn" in name}
    a = Muon(zip(SHAPES, ours, strict=True), 0.02, 0.1, dtype, split_sizes=splits)
    b = torch.optim.Muon(theirs, 0.02, 0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        for p in ours:
            p.grad = torch.randn(p.shape)
        for q, gradient in zip(theirs, split([p.grad for p in ours], sizes), strict=True):
            q.grad = gradient.clone()
        a.step()
        b.step()
    for p, q, s in zip(split(ours, sizes), theirs, start, strict=True):
        assert (p - q).norm() < tolerance * (q - s).norm()


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    """Muon computes in bfloat16 if the run does, else in float32."""
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        muon, adamw = configure_optimizer(model, MUON, dtype).optimizers
        assert muon.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    names = {p: name for name, p in model.named_parameters()}
    has = [
        {names[p]: group["weight_decay"] for group in o.param_groups for p in group["params"]}
        for o in (muon, adamw)
    ]
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    assert set(has[0]) == {name for name in names.values() if name.endswith(matrices)}
    assert sorted([*has[0], *has[1]]) == sorted(names.values())
    for name, decay in (has[0] | has[1]).items():
        assert decay == (0.1 if name.endswith("weight") and "ln_" not in name else 0.0), name


def print_kept():
    """Prints, before each step, how many values the optimizer keeps on this rank."""
    configure_optimizer = train_gpt2.configure_optimizer
    get_lr = train_gpt2.get_lr
    optimizers = []

    def configure(*args):
        optimizers.append(configure_optimizer(*args))
        return optimizers[0]

    def show(*args):
        states = optimizers[0].state.values()
        print("kept:", sum(value.numel() for state in states for value in state.values()))
        return get_lr(*args)

    train_gpt2.configure_optimizer = configure
    train_gpt2.get_lr = show


def test_ranks_share_muons_work_and_with_a_flag_the_state(text, tmp_path):
    """Two layers on three ranks, so one has none: the losses of a single process.

    --shard-optimizer does not change a bit, and each rank keeps a part of the moments."""
    args = ["--optimizer muon --max-lr 1e-2 --max-steps 4 --save-every 4 --total-batch-size 96"]
    args += ["--data", text, "--log-dir"]
    train(*args, tmp_path / "alone")
    train_on_ranks(3, tmp_path, *args, tmp_path / "three")
    sharded = [*args, tmp_path / "sharded", "--shard-optimizer"]
    texts = train_on_ranks(3, tmp_path, *sharded, disturb=print_kept)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    assert losses(tmp_path / "alone")[-1] < losses(tmp_path / "alone")[0] - 0.1
    results = []
    for name in ("three", "sharded"):
        checkpoint = tmp_path / name / "step_000004"
        optimizers = read_training_state(checkpoint)["optimizer"]
        log = read_log(tmp_path / name, "train", "norm")
        state = tree_map_only(torch.Tensor, lambda t: t.numpy().tobytes(), optimizers)
        results.append((log, sha256(checkpoint / "model.safetensors"), state))
    assert results[0] == results[1]
    kept = [int(output.split("kept: ")[-1].split()[0]) for output in texts]
    tensors = [leaf for leaf in tree_leaves(optimizers) if isinstance(leaf, torch.Tensor)]
    assert sum(kept) == sum(tensor.numel() for tensor in tensors)
    # The moments of wte are most of this model's.
    assert min(kept) > 0 and max(kept) == kept[0]


def test_shards_are_even_where_no_parameter_is_too_large():
    with torch.device("meta"):
        sizes = [p.numel() for p in GPT(GPTConfig(1024, 50257, 48, 25, 1600)).parameters()]  # XL
    loads = [0] * 8
    for size, owner in zip(sizes, assign_owners(sizes, 8), strict=True):
        loads[owner] += size
    assert max(loads) < 1.02 * sum(sizes) / 8 and sorted(assign_owners([5, 3], 8)) == [0, 1]


def test_learning_rates():
    """Linear warm-up to max_lr at step 714, cosine to min_lr; wsd: constant, then linear."""
    lrs = [get_lr(step, TrainConfig()) for step in range(19_073 + 1)]
    assert lrs[0] == pytest.approx(6e-4 / 715) and lrs[714] == max(lrs) == pytest.approx(6e-4)
    assert lrs[-1] == pytest.approx(6e-5)
    assert lrs[(715 + 19_073) // 2] == pytest.approx(3.3e-4, rel=1e-3)
    assert all(a > b for a, b in itertools.pairwise(lrs[715:]))
    steps = dict(max_steps=100, warmup_steps=10, warmdown_steps=40)
    config = replace(TrainConfig(), schedule="wsd", min_lr=0.0, **steps)
    lrs = [get_lr(step, config) for step in range(101)]
    assert lrs[9:61] == [config.max_lr] * 52 and lrs[100] == 0
    assert lrs[:10] == pytest.approx([config.max_lr * i / 10 for i in range(1, 11)])
    assert lrs[60:] == pytest.approx([config.max_lr * (100 - step) / 40 for step in range(60, 101)])
    early = replace(config, warmdown_steps=300)  # begins right after the warm-up
    assert [get_lr(step, early) for step in (9, 55)] == pytest.approx([config.max_lr, lrs[80]])
    longer = replace(config, max_steps=200)  # extends a run from before its warm-down
    assert [get_lr(step, longer) for step in range(60)] == lrs[:60]

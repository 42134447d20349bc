"""Muon against torch.optim.Muon, who updates what, a step that must not be made, learning rates."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from support.checkpoints import read_training_state
from tests.conftest import losses, train, train_on_ranks
from train_gpt2 import GPT, GPTConfig, Muon, TrainConfig, configure_optimizers, get_lr

MUON = replace(TrainConfig(), optimizer="muon")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float32, 1e-5)])
def test_muon_equals_torchs(dtype, tolerance, monkeypatch):
    """Ten steps. For float32, the cast to bfloat16 in torch's Muon is removed."""
    if dtype == torch.float32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # until torch 2.13
        monkeypatch.setattr(torch, "bfloat16", torch.float32)
    torch.manual_seed(0)
    shapes = [(32, 32), (96, 32), (32, 128), (96, 32), (128, 32), (96, 32)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().clone() for p in ours]
    a = Muon(ours, 0.02, 0.1, dtype)
    b = torch.optim.Muon(theirs, 0.02, 0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < tolerance * (q - s).norm()


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    """What is 1-D is not decayed."""
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    muon, adamw = configure_optimizers(model, MUON)
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
    assert [type(o) for o in configure_optimizers(model, TrainConfig())] == [torch.optim.AdamW]


def test_three_ranks_share_muons_work(text, tmp_path):
    """Two layers, so one rank has no matrix: the losses of a single process."""
    args = ["--optimizer muon --max-lr 1e-2 --max-steps 4 --total-batch-size 96"]
    args += ["--data", text, "--log-dir"]
    train(*args, tmp_path / "alone")
    train_on_ranks(3, tmp_path, *args, tmp_path / "three")
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    assert losses(tmp_path / "alone")[-1] < losses(tmp_path / "alone")[0] - 0.1


def test_one_nan_in_one_matrix_leaves_all_weights_and_moments(text, tmp_path, monkeypatch, capsys):
    """A float16 step with two optimizers is all or nothing."""
    unscale, steps = torch.amp.GradScaler.unscale_, itertools.count()

    def poisoned(self, optimizer):
        if isinstance(optimizer, Muon) and next(steps) == 2:
            optimizer.param_groups[0]["params"][0].grad[3, 3] = torch.nan
        unscale(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", poisoned)
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: 1.0)  # not an overflow
    flags = "--optimizer muon --dtype float16 --skip-bad-steps 1 --max-steps 4 --save-every 1"
    train(flags, "--keep-checkpoints 0 --data", text, "--log-dir", tmp_path)
    assert "step 2: loss" in capsys.readouterr().out
    folders = [tmp_path / f"step_{step:06d}" for step in (2, 3, 4)]
    states = [tree_leaves(read_training_state(folder)["optimizers"]) for folder in folders]
    weights = [list(GPT.from_pretrained(folder).parameters()) for folder in folders]
    for a, b, c in (states, weights):
        tensors = [i for i, value in enumerate(a) if isinstance(value, torch.Tensor)]
        assert all(torch.equal(a[i], b[i]) for i in tensors)
        assert not all(torch.equal(b[i], c[i]) for i in tensors)


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

"""Muon against torch.optim.Muon, a step that must not be made, learning rates."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.conftest import logits_of, losses, train, train_on_ranks
from train_gpt2 import GPT, DataLoaderLite, GPTConfig, TrainConfig, get_lr

pytestmark = pytest.mark.torch


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), ("float32", 1e-3)])
def test_a_run_with_muon_equals_a_plain_loop_with_torchs(
    dtype, tolerance, text, tmp_path, monkeypatch
):
    """Muon has the matrices of the blocks, AdamW the rest. The rates are those of a warm-up.

    For float32, the cast to bfloat16 in torch's Muon is removed."""
    flags = "--optimizer muon --max-steps 4 --save-every 4 --warmup-steps 4 --max-lr 2e-2"
    args = ["--micro-batch-size 8 --grad-clip 0 --data", text, "--log-dir", tmp_path]
    train(flags, "--dtype", dtype, *args)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    if dtype == "float32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # until torch 2.13
        monkeypatch.setattr(torch, "bfloat16", torch.float32)
    torch.manual_seed(1337)
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("h.") and p.dim() == 2]
    others = [p for p in named.values() if p.dim() == 1]
    muon = partial(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-8)
    optimizers = [
        muon(matrices, weight_decay=0.1),
        adamw([model.wte.weight, model.wpe.weight], weight_decay=0.1),
        adamw(others, weight_decay=0.0),
    ]
    loader = DataLoaderLite(text, "train", 8, 16)
    for lr in (5e-3, 1e-2, 1.5e-2, 2e-2):
        x, y = loader.next_batch()
        with autocast:
            scores = logits_of(model, x).float()
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
    trained = dict(GPT.from_pretrained(tmp_path / "step_000004").named_parameters())
    for name, p in named.items():
        if dtype == "bfloat16" and p.dim() == 1:
            continue  # AdamW divides tiny gradients by their size, and so magnifies their rounding
        assert (p - trained[name]).norm() < tolerance * (p - start[name]).norm(), name


def test_three_ranks_train_like_one_with_muon(text, tmp_path):
    """The losses are those of a single process."""
    args = ["--optimizer muon --max-lr 1e-2 --max-steps 4 --total-batch-size 96"]
    args += ["--data", text, "--log-dir"]
    train(*args, tmp_path / "alone")
    train_on_ranks(3, tmp_path, *args, tmp_path / "three")
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    assert losses(tmp_path / "alone")[-1] < losses(tmp_path / "alone")[0] - 0.1


def test_one_nan_in_one_gradient_leaves_all_weights_and_moments(text, tmp_path, monkeypatch):
    """A float16 step with two optimizers is all or nothing."""
    unscale, calls = torch.amp.GradScaler.unscale_, itertools.count()

    def poisoned(self, optimizer):
        if next(calls) == 4:  # the first of the two in step 2
            optimizer.param_groups[0]["params"][0].grad[3, 3] = torch.nan
        unscale(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", poisoned)
    flags = "--optimizer muon --dtype float16 --max-steps 4 --save-every 1"
    train(flags, "--keep-checkpoints 0 --data", text, "--log-dir", tmp_path)
    found = []
    for step in (2, 3, 4):
        folder = tmp_path / f"step_{step:06d}"
        state = torch.load(folder / "training_state.pt", weights_only=True)
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        found.append([*tensors, *GPT.from_pretrained(folder).parameters()])
    same = [[*map(torch.equal, a, b)] for a, b in itertools.pairwise(found)]
    assert all(same[0]) and same[1].count(False) > 20


def test_learning_rates():
    """Linear warm-up to max_lr at step 714, cosine to min_lr; wsd: constant, then linear."""
    lrs = [get_lr(step, TrainConfig()) for step in range(19_073 + 1)]
    assert lrs[0] == pytest.approx(6e-4 / 715) and lrs[714] == max(lrs) == pytest.approx(6e-4)
    assert lrs[-1] == pytest.approx(6e-5)
    assert lrs[(715 + 19_073) // 2] == pytest.approx(3.3e-4, rel=1e-3)
    assert all(a > b for a, b in itertools.pairwise(lrs[715:]))
    steps = dict(max_steps=100, warmup_steps=10, warmdown=0.4)
    config = replace(TrainConfig(), schedule="wsd", min_lr=0.0, **steps)
    lrs = [get_lr(step, config) for step in range(101)]
    assert lrs[9:61] == [config.max_lr] * 52 and lrs[100] == 0
    assert lrs[:10] == pytest.approx([config.max_lr * i / 10 for i in range(1, 11)])
    assert lrs[60:] == pytest.approx([config.max_lr * (100 - step) / 40 for step in range(60, 101)])
    early = replace(config, warmdown=1.0)  # begins right after the warm-up
    assert [get_lr(step, early) for step in (9, 55)] == pytest.approx([config.max_lr, lrs[80]])
    longer = replace(config, max_steps=200)  # extends a run from before its decay of 80 steps
    assert [get_lr(step, longer) for step in range(60)] == lrs[:60]
    assert get_lr(120, longer) == config.max_lr > get_lr(121, longer)
    for schedule in ("cosine", "wsd"):  # not below min_lr, nor up again
        config = replace(TrainConfig(), schedule=schedule)
        assert {get_lr(step, config) for step in (19_073, 19_074, 30_000)} == {config.min_lr}

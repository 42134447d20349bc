"""Muon against torch.optim.Muon, and in training; the schedules."""

import itertools
import shutil
from dataclasses import replace

import pytest
import torch

import train_gpt2
from support.checkpoints import read_training_state
from support.files import sha256
from support.muon import Muon, orthogonalize
from support.sharding import largest_share, share_out
from tests.conftest import TINY, losses, read_log, train_on_ranks
from train_gpt2 import GPT, GPTConfig, TrainConfig, configure_optimizer, get_lr

SHAPES = [(32, 32), (96, 32), (32, 128), (96, 32), (128, 32), (96, 32)]
NAMES = ["0.c_proj.weight", "0.c_attn.weight", "1.c_proj.weight", "1.c_attn.weight", "1.c_fc.weight", "2.c_fc.weight"]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_equals_torchs(monkeypatch):
    """Ten steps: in bfloat16 as it is, and in float32 against torch's with its cast to bfloat16 undone. c_attn's is
    three matrices, which torch's has as three parameters; an MLP's of the same shape is one."""
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        if dtype == torch.float32:
            monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
        torch.manual_seed(0)
        ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        split = lambda tensors: [  # noqa: E731
            part for name, tensor in zip(NAMES, tensors, strict=True)
            for part in (tensor.chunk(3) if name.endswith("c_attn.weight") else (tensor,))
        ]
        theirs = [torch.nn.Parameter(part.detach().clone()) for part in split(ours)]
        start = [part.detach().clone() for part in split(ours)]
        a = Muon(zip(NAMES, ours, strict=True), lr=0.02, weight_decay=0.1, dtype=dtype)
        b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for _ in range(10):
            for p in ours:
                p.grad = torch.randn(p.shape)
            for q, gradient in zip(theirs, split([p.grad for p in ours]), strict=True):
                q.grad = gradient.clone()
            a.step()
            b.step()
        for p, q, s in zip(split(ours), theirs, start, strict=True):
            assert (p - q).norm() < tolerance * (q - s).norm()


def test_orthogonalized_singular_values_are_near_one():
    torch.manual_seed(0)
    for shape in ((3, 64, 64), (2, 48, 192), (2, 192, 48)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.max() < 1.25 and values.median() > 0.6, values


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    optimizer = configure_optimizer(model, replace(TrainConfig(), optimizer="muon"))
    muon, adamw = optimizer.optimizers
    names = {id(p): name for name, p in model.named_parameters()}
    has = lambda o: {names[id(p)] for group in o.param_groups for p in group["params"]}  # noqa: E731
    assert has(muon) == {n for n in names.values() if n.startswith("h.") and n.endswith("c_attn.weight")} | {
        n for n in names.values() if n.startswith("h.") and ("c_proj.weight" in n or "c_fc.weight" in n)}
    assert has(muon) | has(adamw) == set(names.values()) and not has(muon) & has(adamw)
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(value == (0.1 if n.endswith("weight") and "ln_" not in n else 0.0) for n, value in decay.items())


def test_muon_trains_and_resumes_bit_for_bit(text, tmp_path, capsys):
    args = ["--data", text, "--optimizer", "muon", "--max-lr", 1e-2, "--save-every", 4, "--keep-checkpoints", 0]
    train = lambda *more: train_gpt2.main([*TINY, *map(str, args), *map(str, more)])  # noqa: E731
    train("--max-steps", 8, "--log-dir", tmp_path / "a")
    train("--max-steps", 8, "--log-dir", tmp_path / "b")
    (tmp_path / "b/step_000008").rename(tmp_path / "gone")
    train("--max-steps", 8, "--log-dir", tmp_path / "b", "--resume", "--shard-optimizer")
    assert "--shard-optimizer: one rank keeps everything" in capsys.readouterr().out
    assert read_log(tmp_path / "a", "train", "norm") == read_log(tmp_path / "b", "train", "norm")
    assert losses(tmp_path / "a")[-1] < losses(tmp_path / "a")[0] - 0.5


KEPT = """
import train_gpt2 as t
share_state, get_lr, optimizers = t.share_state, t.get_lr, []
t.share_state = lambda *args: optimizers.append(args[0]) or share_state(*args)
kept = lambda: sum(value.numel() for state in optimizers[0].state.values() for value in state.values())
t.get_lr = lambda *args: print("kept:", kept()) or get_lr(*args)
"""


def test_ranks_share_muons_work_and_on_demand_the_state(text, tmp_path):
    """Two layers on three ranks, so one has none: the losses of a single process. With --shard-optimizer the same bits
    as without, in a checkpoint of the same form, while each rank keeps a part of the moments."""
    args = ["--data", text, "--optimizer", "muon", "--max-lr", 1e-2, "--max-steps", 4, "--total-batch-size", 96,
            "--save-every", 4]
    train_gpt2.main([*TINY, *map(str, args), "--log-dir", str(tmp_path / "alone")])
    train_on_ranks(3, tmp_path, *args, "--log-dir", tmp_path / "three")
    texts = train_on_ranks(3, tmp_path, *args, "--log-dir", tmp_path / "shared", "--shard-optimizer", disturbance=KEPT)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    assert losses(tmp_path / "alone")[-1] < losses(tmp_path / "alone")[0] - 0.1
    results = []
    for name in ("three", "shared"):
        checkpoint = tmp_path / name / "step_000004"
        state = read_training_state(checkpoint)["optimizer"]
        tensors = {(part, i, key): value for part in state for i, values in state[part]["state"].items()
                   for key, value in values.items()}
        results.append((read_log(tmp_path / name, "train", "norm"), sha256(checkpoint / "model.safetensors"),
                        [state[part]["param_groups"] for part in state],
                        {key: value.numpy().tobytes() for key, value in tensors.items()}))
    assert results[0] == results[1]
    kept = [int(output.split("kept: ")[-1].split()[0]) for output in texts]
    assert sum(kept) == sum(value.numel() for value in tensors.values())
    assert min(kept) > 0 and max(kept) == kept[0]  # wte's two moments, which are most of this model's


def test_shares_are_even_where_no_parameter_is_too_large():
    """XL on eight ranks, and ranks of which most have nothing."""
    with torch.device("meta"):
        model = GPT(GPTConfig(1024, 50257, 48, 25, 1600))
    sizes = [p.numel() for p in model.parameters()]
    owners = share_out(sizes, 8)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(8)]
    assert max(loads) == largest_share(sizes, 8) < 1.02 * sum(sizes) / 8 and sum(loads) == model.num_parameters()
    assert sorted(share_out([5, 3], 8)) == [0, 1] and largest_share([5, 3], 8) == 5


def test_warm_up_stable_warm_down():
    config = replace(TrainConfig(), schedule="wsd", max_steps=100, warmup_steps=10, warmdown_steps=40, min_lr=0.0)
    lrs = [get_lr(step, config) for step in range(101)]
    assert lrs[9:61] == [config.max_lr] * 52 and lrs[100] == 0 and lrs[80] == pytest.approx(config.max_lr / 2)
    assert all(a < b for a, b in itertools.pairwise(lrs[:10])) and all(a > b for a, b in itertools.pairwise(lrs[60:]))


def test_a_stable_run_can_be_extended(text, tmp_path):
    """From a checkpoint before the warm-down, with more steps: what a run of that length from the start would do."""
    args = ["--data", text, "--schedule", "wsd", "--warmdown-steps", 4, "--max-lr", 1e-2, "--save-every", 4]
    train = lambda *more: train_gpt2.main([*TINY, *map(str, args), *map(str, more)])  # noqa: E731
    train("--max-steps", 8, "--log-dir", tmp_path / "short")
    train("--max-steps", 12, "--log-dir", tmp_path / "long")
    shutil.copytree(tmp_path / "short/step_000004", tmp_path / "extended/step_000004")
    train("--max-steps", 12, "--log-dir", tmp_path / "extended", "--resume")
    later = [line for line in read_log(tmp_path / "long", "train", "lr") if int(line.split()[0]) >= 4]
    assert read_log(tmp_path / "extended", "train", "lr") == later and len(later) == 2 * 8

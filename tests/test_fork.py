"""Forks: a flag or a model field added to the code breaks no checkpoint and no resume."""

import json
import os
import shutil
from dataclasses import make_dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn import functional as F

import sample
import train_gpt2
from examples.document_mask import DocumentGPT
from support.checkpoints import read_training_state, write_checksums
from support.errors import UserError
from support.hellaswag import Packing
from support.sharding import shard_state
from tests.conftest import TINY, losses, read_log, script, train, train_on_ranks, words
from tests.torture import assert_same
from train_gpt2 import GPT, Block, GPTConfig, TrainConfig, configure_optimizer


def with_field(cls, name, default):
    """A subclass of the dataclass `cls` with one more field, of type float."""
    return make_dataclass(cls.__name__, [(name, float, default)], bases=(cls,), frozen=True)


def test_a_checkpoint_of_another_version_resumes(text, tmp_path, monkeypatch):
    """It lacks a new flag, and has state and a flag that were removed."""
    args = ["--save-every 2 --resume --data", text, "--log-dir", tmp_path]
    train(*args, "--max-steps 2")
    state = read_training_state(checkpoint := tmp_path / "step_000002")
    state |= {"best_val": 7.5, "config": state["config"] | {"check_against": ""}}
    torch.save(state, tmp_path / "state")
    os.replace(tmp_path / "state", checkpoint / "training_state.pt")
    (checkpoint / "SHA256SUMS").unlink()
    write_checksums(checkpoint)
    monkeypatch.setattr(train_gpt2, "TrainConfig", with_field(TrainConfig, "z_loss", 0.0))
    train(*args, "--max-steps 4")
    assert len(losses(tmp_path)) == 4
    message = r"--init was scratch, is .*--max-lr was 0\.005, is 0\.5, --z-loss was 0\.0, is 0\.5"
    with pytest.raises(UserError, match=message):
        train(*args, "--max-steps 6 --z-loss 0.5 --max-lr 0.5 --init", checkpoint)


class DropoutBlock(Block):
    """What a fork might add: dropout at the end of a block, a field of GPTConfig."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, packing=None):
        modes.append((self.training, torch.is_grad_enabled()))
        return self.dropout(super().forward(x, packing))


modes: list[tuple[bool, bool]] = []


def fork_with_dropout(monkeypatch, dropout):
    monkeypatch.setattr(train_gpt2, "GPTConfig", with_field(GPTConfig, "dropout", dropout))
    monkeypatch.setattr(train_gpt2, "Block", DropoutBlock)


def test_a_field_added_to_the_model_is_saved_with_it(text, tmp_path, monkeypatch):
    """Even if its default has changed since."""
    modes.clear()
    fork_with_dropout(monkeypatch, 0.25)
    args = ["--save-every 2 --max-steps 6 --keep-checkpoints 0 --data", text, "--log-dir"]
    train(*args, tmp_path / "straight", "--sample-every 3 --eval-every 3")
    # (training, gradients): no dropout in evaluation
    assert set(modes) == {(True, True), (False, False)}
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"resumed/step_{step:06d}")
    fork_with_dropout(monkeypatch, 0.0)
    assert GPT.from_pretrained(tmp_path / "resumed/step_000002").config.dropout == 0.25
    train(*args, tmp_path / "resumed", "--resume")
    # Also the same masks: the training RNG is separate from that of samples, and is restored.
    assert read_log(tmp_path / "resumed", "train") == read_log(tmp_path / "straight", "train")


class Lion(torch.optim.Optimizer):
    """As a fork might write it: its state has a number beside the tensor."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                state["step"] += 1
                p.sub_(state["momentum"].lerp(p.grad, 0.1).sign_(), alpha=group["lr"])
                state["momentum"].lerp_(p.grad, 0.01)


def use_lion():
    def configure_optimizer(model, config, dtype):
        optimizer = Lion(model.parameters())
        if config.shard_optimizer:
            shard_state(optimizer)
        return optimizer

    train_gpt2.configure_optimizer = configure_optimizer


def test_an_optimizer_with_numbers_in_its_state_resumes(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "configure_optimizer", None)  # restored after the test
    use_lion()
    args = ["--save-every 2 --max-steps 4 --max-lr 1e-3 --resume --data", text, "--log-dir"]
    train(*args, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step_000004")
    train(*args, tmp_path / "resumed")
    assert_same(tmp_path / "straight", tmp_path / "resumed")
    # Sharded over two ranks, rank 0 gathers the numbers as well as the tensors.
    args = ["--save-every 2 --max-steps 2 --shard-optimizer --data", text, "--log-dir"]
    train_on_ranks(2, tmp_path, *args, tmp_path / "sharded", disturb=use_lion)
    whole, gathered = (
        read_training_state(tmp_path / name / "step_000002")["optimizer"]["state"]
        for name in ("straight", "sharded")
    )
    assert {i: state["step"] for i, state in gathered.items()} == dict.fromkeys(whole, 2)
    for i, state in whole.items():
        assert gathered[i]["momentum"].shape == state["momentum"].shape


def test_a_field_of_both_configurations_is_a_flag_of_the_model(text, tmp_path, monkeypatch):
    fork_with_dropout(monkeypatch, 0.0)
    monkeypatch.setattr(train_gpt2, "TrainConfig", with_field(TrainConfig, "dropout", 0.0))
    train("--save-every 1 --max-steps 1 --dropout 0.5 --data", text, "--log-dir", tmp_path)
    assert GPT.from_pretrained(tmp_path / "step_000001").config.dropout == 0.5


def test_weights_of_several_matrices_must_add_up():
    """Grouped-query attention whose split_sizes were forgotten is an error, not other maths."""
    model = GPT(GPTConfig(16, 100, 1, 2, 16))
    model.h[0].attn.c_attn = nn.Linear(16, 16 + 2 * 8)
    model.h[0].attn.c_attn.split_sizes = [16, 16, 16]
    with pytest.raises(UserError, match=r"h.0.attn.c_attn.weight has 32 rows, but its split_sizes"):
        configure_optimizer(model, replace(TrainConfig(), optimizer="muon"))


class RotaryAttention(train_gpt2.CausalSelfAttention):
    """Rotary positions, with a table that is not part of the checkpoint."""

    def __init__(self, config):
        super().__init__(config)
        angles = torch.outer(torch.arange(config.block_size), 1e4 ** -torch.arange(0, 1, 0.25))
        self.register_buffer("table", angles.cos(), persistent=False)

    def forward(self, x, packing=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        turn = self.table[:T].to(x.dtype).repeat_interleave(q.size(-1) // 4, dim=1)
        y = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class RotaryGPT(GPT):
    """Without learned positions, and with a head of its own and a buffer of booleans."""

    def __init__(self, config):
        super().__init__(config)
        del self.wpe
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.register_buffer("flags", torch.tensor([True, False]))

    def hidden(self, idx, packing=None):
        x = self.wte(idx)
        for block in self.h:
            x = block(x, packing)
        return self.ln_f(x)

    def forward(self, idx, targets=None):
        logits = self.head(self.hidden(idx))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def flops_per_token(self, T):
        return 6 * self.num_parameters()


def test_another_model_says_so_and_resumes(text, tmp_path, monkeypatch, capsys):
    """transformers refuses it by name; this fork reads every tensor as it was."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(train_gpt2, "CausalSelfAttention", RotaryAttention)
    monkeypatch.setattr(train_gpt2, "GPT", RotaryGPT)
    args = ["--save-every 2 --max-steps 4 --sample-every 0 --data", text, "--log-dir"]
    train(*args, tmp_path / "straight")
    assert "not GPT-2's model any more" in capsys.readouterr().out
    checkpoint = tmp_path / "straight/step_000004"
    with pytest.raises(ValueError, match="gpt2-repro-fork"):
        AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(UserError, match=r"model cannot be loaded .*gpt2-repro-fork"):
        sample.main([str(checkpoint), "ROMEO:", "--device", "cpu"])
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step_000004")
    train(*args, tmp_path / "resumed", "--resume")
    assert_same(tmp_path / "straight", tmp_path / "resumed")
    model = RotaryGPT.from_pretrained(checkpoint)
    assert model.flags.tolist() == [True, False] and model.h[0].attn.table.dtype == torch.float32


class Window(train_gpt2.CausalSelfAttention):
    """GPT-2's parameters; each token attends to the latest 12 only."""

    def forward(self, x, packing=None):
        T = x.size(1)
        near = torch.ones(1, 1, T, T, dtype=torch.bool).tril().triu(-11)
        return super().forward(x, packing or Packing(None, near))


class ExactGELU(train_gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class LaterBlock(Block):
    """Differs in the last layer only."""

    made = 0

    def __init__(self, config):
        super().__init__(config)
        LaterBlock.made += 1
        self.skip = 0.1 if LaterBlock.made % config.n_layer == 0 else 0.0

    def forward(self, x, packing=None):
        return super().forward(x, packing) - self.skip * x


def test_a_changed_object_is_no_gpt2():
    """By its names and shapes, though its class is."""
    for change in ("extra", "wider", "rows"):
        model = GPT(GPTConfig(16, 100, 6, 2, 16))
        if change == "extra":
            model.head = nn.Linear(16, 100, bias=False)
        elif change == "wider":
            model.h[5].mlp.c_fc = nn.Linear(16, 96)
            model.h[5].mlp.c_proj = nn.Linear(96, 16)
        else:
            model.wte = nn.Embedding(128, 16)
        assert not model.is_gpt2, change


@pytest.mark.parametrize(
    "name, change",
    [("CausalSelfAttention", Window), ("MLP", ExactGELU), ("Block", LaterBlock)],
)
def test_changed_mathematics_is_no_gpt2(name, change, tmp_path, monkeypatch):
    """Though all names and shapes are. GPT-2 doesn't load it as its own."""
    shape = GPTConfig(16, 50257, 3, 2, 16)
    assert GPT(shape).is_gpt2
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, name, change)
        model = GPT(shape)
        assert not model.is_gpt2
        model.save_pretrained(tmp_path)
        x = torch.arange(16)[None]
        assert torch.equal(GPT.from_pretrained(tmp_path)(x)[0], model(x)[0])
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2-repro-fork"
    with pytest.raises(UserError, match=r"saved by a fork of train_gpt2\.py"):
        GPT.from_pretrained(tmp_path)


def test_the_example_masks_documents_and_resumes_exactly(tmp_path, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 50256, 4000)
    tokens[::10] = 50256
    for split in ("train", "val"):
        np.save(tmp_path / f"x_{split}_000000.npy", tokens.astype(np.uint16))
    args = ["--max-steps 4 --save-every 2 --data", tmp_path, "--log-dir", tmp_path / "log"]
    done = script("examples/document_mask.py", *TINY, *words(*args))
    assert done.returncode == 0, done.stderr
    straight = (tmp_path / "log/step_000004").rename(tmp_path / "straight")
    monkeypatch.setattr(train_gpt2, "GPT", DocumentGPT)
    train(*args, "--resume")
    weights = (folder / "model.safetensors" for folder in (straight, tmp_path / "log/step_000004"))
    assert len({path.read_bytes() for path in weights}) == 1
    assert '"step": 2' in (tmp_path / "log/run.json").read_text(), "not resumed"
    x = torch.arange(32).view(2, 16)
    x[:, 6:] = torch.tensor([50256, *range(9)])  # two texts before the same document
    (a, b), (c, d) = (cls.from_pretrained(straight)(x)[0].detach() for cls in (DocumentGPT, GPT))
    torch.testing.assert_close(a[6:], b[6:])
    assert not torch.allclose(a[:6], b[:6]) and not torch.allclose(c[6:], d[6:], atol=1e-4)

"""Forks: a flag or a model field added to the code breaks no checkpoint and no resume."""

import os
import shutil
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
import torch.nn as nn

import train_gpt2
from examples.document_mask import DocumentGPT
from support.checkpoints import read_training_state, write_checksums
from support.errors import UserError
from tests.conftest import TINY, losses, read_log, script, train, words
from train_gpt2 import GPT, Block, GPTConfig, TrainConfig


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
    monkeypatch.setattr(train_gpt2, "FIXED", (*train_gpt2.FIXED, "z_loss"))
    train(*args, "--max-steps 4")
    assert len(losses(tmp_path)) == 4
    message = r"--max-lr was 0\.005, is 0\.5, --z-loss was 0\.0, is 0\.5, --init was scratch, is "
    with pytest.raises(UserError, match=message):
        train(*args, "--max-steps 6 --z-loss 0.5 --max-lr 0.5 --init", checkpoint)


class DropoutBlock(Block):
    """What a fork might add: dropout at the end of a block, a field of GPTConfig."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask=None):
        modes.append((self.training, torch.is_grad_enabled()))
        return self.dropout(super().forward(x, mask))


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

"""A fork survives: a flag or a model field that somebody adds breaks no checkpoint and no resumption."""

from dataclasses import make_dataclass

import pytest
import torch
import torch.nn as nn

import train_gpt2
from support.cli import InputError
from tests.conftest import losses, read_log, train
from train_gpt2 import GPT, Block, GPTConfig, TrainConfig

def test_a_checkpoint_from_before_a_flag_resumes(text, tmp_path, monkeypatch):
    args = ["--data", text, "--save-every", 2, "--log-dir", tmp_path, "--resume"]
    train(*args, "--max-steps", 2)
    forked = make_dataclass("TrainConfig", [("z_loss", float, 0.0)], bases=(TrainConfig,), frozen=True)
    monkeypatch.setattr(train_gpt2, "TrainConfig", forked)
    monkeypatch.setattr(train_gpt2, "FIXED", (*train_gpt2.FIXED, "z_loss"))
    train(*args, "--max-steps", 4)
    assert len(losses(tmp_path)) == 4
    with pytest.raises(InputError, match=r"--z-loss was 0\.0, is 0\.5"):
        train(*args, "--max-steps", 6, "--z-loss", 0.5)

class DropoutBlock(Block):
    """What a fork might add: dropout at the end of a block, by a field of its own in GPTConfig."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask=None):
        modes.append((self.training, torch.is_grad_enabled()))
        return self.dropout(super().forward(x, mask))

modes: list[tuple[bool, bool]] = []

def fork_with_dropout(monkeypatch, dropout):
    extra = [("dropout", float, dropout), ("n_inner", int, 48)]
    config = make_dataclass("GPTConfig", extra, bases=(GPTConfig,), frozen=True)
    monkeypatch.setattr(train_gpt2, "GPTConfig", config)
    monkeypatch.setattr(train_gpt2, "Block", DropoutBlock)

def test_a_field_added_to_the_model_is_saved_with_it(text, tmp_path, monkeypatch):
    """Even if its default has changed meanwhile, or it has the name of a Hugging Face setting (n_inner)."""
    fork_with_dropout(monkeypatch, 0.25)
    args = ["--data", text, "--save-every", 2, "--max-steps", 6, "--keep-checkpoints", 0]
    train(*args, "--log-dir", tmp_path / "straight")
    train(*args, "--log-dir", tmp_path / "resumed")
    for step in (4, 6):
        (tmp_path / f"resumed/step_{step:06d}").rename(tmp_path / f"gone_{step}")
    fork_with_dropout(monkeypatch, 0.0)
    config = GPT.from_pretrained(tmp_path / "resumed/step_000002").config
    assert (config.dropout, config.n_inner) == (0.25, 48)
    train(*args, "--log-dir", tmp_path / "resumed", "--resume")
    # The same masks, too: the random state is training's own, and is restored.
    assert read_log(tmp_path / "resumed", "train") == read_log(tmp_path / "straight", "train")
    monkeypatch.undo()
    with pytest.raises(InputError, match="n_inner = 48"):  # without the field it is another model
        GPT.from_pretrained(tmp_path / "resumed/step_000002")

def test_dropout_is_off_in_evaluation_and_on_in_training(text, tmp_path, monkeypatch):
    fork_with_dropout(monkeypatch, 0.5)
    modes.clear()
    train("--data", text, "--max-steps", 3, "--eval-every", 1, "--sample-every", 1, "--log-dir", tmp_path)
    assert set(modes) == {(True, True), (False, False)}

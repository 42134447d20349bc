"""Checkpoints as build-nanogpt and nanoGPT write them, against transformers."""

import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hellaswag
import sample
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, train
from train_gpt2 import GPT

# build-nanogpt pickles the GPTConfig of the script that was started.
WRITE = """
import sys, torch
from dataclasses import dataclass
@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 50304
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
saved = torch.load(sys.argv[1])
torch.save({"model": saved, "config": GPTConfig(), "step": 1, "val_loss": 9.0}, sys.argv[1])
"""


@pytest.fixture(params=["build-nanogpt", "nanoGPT", "nanoGPT without biases"])
def peer(request, tmp_path):
    """(path of a .pt file, the same model in transformers)"""
    shape = dict(n_positions=32, n_embd=16, n_layer=2, n_head=2)
    config = GPT2Config(vocab_size=50304, **shape)
    torch.manual_seed(1)
    theirs = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.normal_(std=0.1)
            if "without" in request.param and name.endswith(".bias"):
                p.zero_()
    state = {}
    for name, tensor in theirs.state_dict().items():
        if "without" in request.param and name.endswith(".bias"):
            continue
        matrix = name.endswith(".weight") and "ln_" not in name and ".h." in name
        state[name] = tensor.mT.contiguous() if matrix else tensor
    path = tmp_path / "ckpt.pt"
    if request.param == "build-nanogpt":
        torch.save(state, path)
        subprocess.run([sys.executable, "-c", WRITE, str(path)], check=True)
        return path, theirs
    shape = dict(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=50304, dropout=0.0)
    shape["bias"] = "without" not in request.param
    state = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # without flash
    saved = {"model": state, "optimizer": {}, "model_args": shape, "iter_num": 1, "config": {}}
    torch.save(saved | {"best_val_loss": torch.tensor(9.0)}, path)
    return path, theirs


@torch.no_grad()
def test_logits_are_those_of_transformers(peer, capfd):
    """Of the 50,257 tokens. nanoGPT's exact GELU is replaced, which a line says."""
    path, theirs = peer
    idx = torch.randint(50257, (2, 32), generator=torch.Generator().manual_seed(0))
    model = GPT.from_pretrained(path)
    torch.testing.assert_close(model(idx), theirs(idx).logits[..., :50257], rtol=0, atol=1e-5)
    assert ("GELU" in capfd.readouterr().err) == (b"model_args" in path.read_bytes())


def test_every_script_takes_one(peer, tmp_path, text, capsys):
    """--init with --max-steps 0 converts it to Hugging Face's format."""
    path, _ = peer
    flags = ("--init", path, "--max-steps 0 --data", text, "--log-dir", tmp_path / "log")
    assert train(*flags, "--save-every 5") == 0
    assert "step_000000" in capsys.readouterr().out
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "log/step_000000")
    model = GPT.from_pretrained(path)
    assert torch.equal(saved.transformer.wte.weight, model.wte.weight)
    sample.main([str(path), "To be", "--max-new-tokens", "2"])
    tasks = str(ROOT / "tests/hellaswag_sample.jsonl")
    hellaswag.main(["-m", str(path), "--data", tasks, "--limit", "1", "-d", "cpu"])
    assert "acc_norm" in capsys.readouterr().out


def test_other_files_are_an_error(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    shape = dict(n_layer=1, n_head=1, n_embd=4, block_size=8, vocab_size=50257)
    model = {"transformer.wte.weight": torch.ones(2, 4), "lm_head.weight": torch.zeros(2, 4)}
    for content, message in (
        ({"model": model, "model_args": shape | {"vocab_size": 65}}, "65 tokens"),  # characters
        ({"model": model, "model_args": shape}, "not tied"),
        ({"model": model, "model_args": {}}, "not a checkpoint"),
        ({"model": {}, "model_args": shape}, "not a checkpoint"),
        ({"weights": torch.ones(1)}, "not a checkpoint"),
        (get_tokenizer, "damaged, or not a checkpoint"),  # would run code
    ):
        torch.save(content, path)
        with pytest.raises(UserError, match=message):
            GPT.from_pretrained(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged"):
        GPT.from_pretrained(path)

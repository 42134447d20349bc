"""evaluate.py, against transformers in Hugging Face's recipe for perplexity."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel

import evaluate
from support.errors_and_signals import UserError
from support.ranks import Ranks
from support.tokenizer import get_tokenizer
from train_gpt2 import GPT, GPTConfig

ONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(17, 50257, 2, 2, 16))
    with torch.no_grad():
        for p in gpt.parameters():  # so that predictions depend on the context
            p.mul_(5)
    gpt.save_pretrained(folder, get_tokenizer())
    return folder


def recipe(model, ids, max_length, stride):
    """Return the summed loss and the number of scored tokens, as in transformers' perplexity page.

    Labels are shifted inside the model, so the first label of a window is never scored."""
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        labels = ids[begin:end].clone()
        labels[: previous_end - begin] = -100
        scored = int((labels[1:] != -100).sum())
        total += scored * model(ids[None, begin:end], labels=labels[None]).loss.item()
        count += scored
        previous_end = end
        if end == len(ids):
            return total, count


@pytest.mark.parametrize("stride", [1, 5, 16])
@pytest.mark.parametrize("n", [2, 17, 18, 100])
@torch.no_grad()
def test_the_loss_is_that_of_hugging_faces_recipe(model, stride, n):
    """A window of T inputs and their targets has T + 1 tokens there."""
    ids = torch.randint(50257, (n,), generator=torch.Generator().manual_seed(n))
    theirs, count = recipe(GPT2LMHeadModel.from_pretrained(model), ids, 17, stride)
    ours = evaluate.total_loss(GPT.from_pretrained(model), ids.numpy(), 16, stride, ONE, 3)
    assert count == n - 1 and ours == pytest.approx(theirs, rel=1e-6)


@given(st.integers(2, 200), st.integers(1, 20), st.data())
def test_every_token_is_scored_once(n, T, data):
    stride = data.draw(st.integers(1, T))
    scored = []
    for start, end, first in evaluate.windows(n, T, stride):
        assert start < first <= end <= start + T
        assert start == 0 or first - start > T - stride, "tokens of context"
        scored += range(first, end + 1)
    assert scored == list(range(1, n))


@torch.no_grad()
def test_the_command_on_a_text_and_on_shards(model, tmp_path, capsys):
    text = "It is a truth universally acknowledged – " * 4
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    tokens = [50256, *get_tokenizer().encode(text)]
    np.save(tmp_path / "x_val_000000.npy", np.array(tokens, dtype=np.uint16))
    hf = GPT2LMHeadModel.from_pretrained(model)
    expected = 0.0
    for p in range(1, len(tokens)):  # windows of 17 tokens move by 17
        start = (p - 1) // 17 * 17
        logits = hf(torch.tensor([tokens[start:p]])).logits[0, -1]
        expected -= logits.log_softmax(0)[tokens[p]].item()
    for data in (tmp_path / "a.txt", tmp_path):
        evaluate.main([str(model), "--data", str(data), "--json", str(tmp_path / "r.json")])
        found = json.loads((tmp_path / "r.json").read_text())
        nats = found["nats_per_token"]
        assert nats * (len(tokens) - 1) == pytest.approx(expected, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(nats))
        assert found["nats_per_character"] * len(text) == pytest.approx(expected, rel=1e-5)
        bits = found["bits_per_byte"] * len(text.encode())
        assert bits == pytest.approx(expected / math.log(2), rel=1e-5)
        assert f"{nats:.4f} nats per token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "a.txt", "--stride", "18"], "--stride 18"),
        (["--data", "a.txt", "--batch-size", "0"], "--batch-size 0"),
        (["--data", "none.txt"], "none.txt"),
        (["--data", "empty.txt"], "empty.txt"),
    ],
)
def test_mistakes(model, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match=message):
        evaluate.main([str(model), *flags])

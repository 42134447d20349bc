"""The loss is float32 cross-entropy over 50,257 columns however it is computed: in chunks, compiled, or with
a GPU's padded columns, which are made on a CPU here."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import train_gpt2
from train_gpt2 import ChunkedLoss, chunked_next_token_loss, lm_head, next_token_loss

def loss_and_gradients(function, V, dtype):
    """(logits, loss, gradients of x and wte)"""
    torch.manual_seed(0)
    x, wte = torch.randn(2, 64, 48, requires_grad=True), (torch.randn(V, 48) * 0.1).requires_grad_()
    targets = torch.randint(0, V, (2, 64))
    targets[0, 0] = V - 1  # the last column before the padding
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits, loss = function(x, wte, targets)
        with torch.no_grad():
            assert function(x, wte, targets)[1].item() == pytest.approx(loss.item(), abs=1e-6)
    (loss * 3).backward()
    assert loss.dtype == x.grad.dtype == wte.grad.dtype == torch.float32
    return logits, loss.item(), x.grad, wte.grad

def plain(x, wte, targets):
    logits = x @ wte.t()
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

@pytest.mark.parametrize("dtype, rtol, atol", [(torch.float32, 1e-4, 3e-7), (torch.bfloat16, 1e-2, 3e-6)])
@pytest.mark.parametrize("V", [1000, 1024])
@pytest.mark.parametrize("function", [next_token_loss, chunked_next_token_loss])
@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradients_are_those_of_the_plain_product(
        padded, function, V, dtype, rtol, atol, monkeypatch):
    monkeypatch.setattr(ChunkedLoss, "CHUNK", 24)  # of 128 tokens: the last chunk is smaller
    expected = loss_and_gradients(plain, V, dtype)
    if padded:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert lm_head(torch.ones(1, 48), torch.ones(V, 48), padded=True).size(1) % 64 == 0
    logits, loss, *gradients = loss_and_gradients(function, V, dtype)
    if function is next_token_loss:
        torch.testing.assert_close(logits, expected[0], atol=1e-5, rtol=rtol)
    assert loss == pytest.approx(expected[1], abs=1e-5)
    for ours, theirs in zip(gradients, expected[2:], strict=True):
        assert (ours - theirs).norm() < rtol * theirs.norm()
        torch.testing.assert_close(ours, theirs, atol=100 * atol, rtol=10 * rtol)

def test_chunked_loss_of_large_logits_is_finite():
    x, wte = torch.tensor([[[300.0], [300.0]]], requires_grad=True), torch.tensor([[1.0], [-1.0], [0.5]])
    value = chunked_next_token_loss(x, wte.requires_grad_(), torch.tensor([[1, 0]]))[1]
    value.backward()
    assert value.item() == pytest.approx(300.0) and x.grad.isfinite().all()

@pytest.mark.skipif(os.name == "nt", reason="torch.compile may lack a C++ compiler")
def test_compiled_loss_ignores_padded_columns(monkeypatch):
    """torch.compile asks for the real device: the padded head is written out."""
    def padded_head(x, wte, padded):
        bias = F.pad(wte.new_zeros(50257), (0, 47), value=-math.inf)
        return F.linear(x, F.pad(wte, (0, 0, 0, 47)), bias)

    monkeypatch.setattr(train_gpt2, "lm_head", padded_head)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(64, 1000, 0, 4, 48))
    del model.wte
    model.wte = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))  # as prepare() sees it
    model.prepare(compiled=True)
    expected = loss_and_gradients(plain, 50257, torch.float32)
    logits, loss, *gradients = loss_and_gradients(model.loss_function, 50257, torch.float32)
    assert logits is None and loss == pytest.approx(expected[1], abs=1e-6)
    for ours, theirs in zip(gradients, expected[2:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-7, rtol=1e-4)

"""The head's padded columns, which only a GPU's matmul has, made on a CPU: the loss is the plain one."""

import math
import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import train_gpt2
from train_gpt2 import lm_head, next_token_loss

@pytest.fixture
def padded(monkeypatch):
    """lm_head takes the tensors of a CPU for a GPU's, once this has been called."""
    return lambda: monkeypatch.setattr(torch.Tensor, "is_cuda", True)

def loss_and_gradients(function, V, dtype):
    """(logits, loss, gradients of x and wte)"""
    torch.manual_seed(0)
    x, wte = torch.randn(2, 64, 48, requires_grad=True), (torch.randn(V, 48) * 0.1).requires_grad_()
    targets = torch.randint(0, V, (2, 64))
    targets[0, 0] = V - 1  # the last column before the padding
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits, loss = function(x, wte, targets)
    loss.backward()
    return logits, loss.detach(), x.grad, wte.grad

@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-7), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("V", [1000, 1024, 50257])
def test_padded_columns_change_neither_loss_nor_gradients(V, dtype, atol, padded):
    expected = loss_and_gradients(next_token_loss, V, dtype)
    padded()
    found = loss_and_gradients(next_token_loss, V, dtype)
    assert found[0].shape == (2, 64, V)
    assert lm_head(torch.ones(1, 48), torch.ones(V, 48), padded=True).size(1) % 64 == 0
    rtol = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=rtol)
    assert found[1].item() == pytest.approx(expected[1].item(), abs=1e-6)
    for ours, plain in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, plain, atol=atol, rtol=rtol)

@pytest.mark.skipif(os.name == "nt", reason="torch.compile may lack a C++ compiler")
def test_compiled_loss_ignores_padded_columns(monkeypatch):
    """torch.compile asks for the real device: the padded head is written out."""
    def padded_head(x, wte, padded):
        return F.linear(x, F.pad(wte, (0, 0, 0, 24)), F.pad(wte.new_zeros(1000), (0, 24), value=-math.inf))

    expected = loss_and_gradients(next_token_loss, 1000, torch.float32)
    monkeypatch.setattr(train_gpt2, "lm_head", padded_head)
    model = train_gpt2.GPT(train_gpt2.GPTConfig(64, 1000, 0, 4, 48))
    del model.wte
    model.wte = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))  # as prepare() sees it
    model.prepare(compiled=True)
    found = loss_and_gradients(model.loss_function, 1000, torch.float32)
    assert found[0] is None and found[1].item() == pytest.approx(expected[1].item(), abs=1e-6)
    for ours, plain in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-7, rtol=1e-4)

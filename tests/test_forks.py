"""Which models count as GPT-2s: forks.why_not_gpt2 on changed models."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.forks import why_not_gpt2
from train_gpt2 import GPT, CausalSelfAttention, GPTConfig

SHAPE = dict(block_size=64, vocab_size=600, n_layer=3, n_head=4, n_embd=64)


def make(change=lambda model: None, **shape):
    """A GPT with its initial weights, to which change(model) has been done."""
    model = GPT(GPTConfig(**SHAPE | shape))
    change(model)
    return model


def attention(scale=None, scores=lambda s: s):
    """Attention by hand: its scores (B, nh, T, T) are multiplied by scale(n_embd, hs), and changed
    before the softmax."""
    scale = scale or (lambda n_embd, hs: 1 / math.sqrt(hs))

    class ByHand(CausalSelfAttention):
        def forward(self, x):
            C = x.size(-1)
            parts = self.c_attn(x).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
            s = scores(q @ k.mT * scale(C, C // self.n_head))
            later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
            y = s.masked_fill(later, -math.inf).softmax(-1) @ v
            return self.c_proj(y.transpose(1, 2).flatten(2))

    def change(model):
        for block in model.h:
            block.attn.__class__ = ByHand

    return change


def window(s):
    """A token sees half of the context."""
    T = s.size(-1)
    return s.masked_fill(torch.ones(T, T, dtype=torch.bool).tril(-32), -math.inf)


def exact_gelu(model):
    for block in model.h:
        block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(F.gelu(mlp.c_fc(x)))


def epsilon(model):
    model.h[1].ln_2.eps = 1e-6


def short_texts(model):
    """The logits are changed for fewer than 8 tokens only."""
    forward = model.forward
    model.forward = lambda idx: forward(idx) * (1.01 if idx.size(1) < 8 else 1)


def returns_a_pair(model):
    forward = model.forward
    model.forward = lambda idx: (forward(idx), None)


def sixteen_heads(scale):
    return lambda: make(attention(scale), n_head=16, n_embd=256)


FORKS = {
    # muP's scale is that of a GPT-2 where n_embd is 64.
    "muP": sixteen_heads(lambda C, hs: 64 / C / math.sqrt(hs)),
    "1/hs": sixteen_heads(lambda C, hs: 1 / hs if hs > 4 else 1 / math.sqrt(hs)),
    "short texts": lambda: make(short_texts),
    "exact GELU": lambda: make(exact_gelu),
    "epsilon of one LayerNorm": lambda: make(epsilon),
    "soft cap": lambda: make(attention(scores=lambda s: 0.5 * torch.tanh(s / 0.5))),
    "window": lambda: make(attention(scores=window)),
    "a pair": lambda: make(returns_a_pair),
    "more tensors": lambda: make(lambda model: model.register_module("x", nn.Linear(2, 2))),
}
GPT2S = {
    "unchanged": make,
    "attention by hand": lambda: make(attention()),
    # What it computes counts, at the width that it has.
    "a scale that is 1/sqrt(hs) here": sixteen_heads(lambda C, hs: 64 / C),
    "1/hs where hs is greater": lambda: make(
        attention(lambda C, hs: 1 / hs if hs > 16 else 1 / math.sqrt(hs))
    ),
}


@pytest.mark.parametrize("name", FORKS)
def test_what_is_no_gpt2(name):
    assert why_not_gpt2(FORKS[name]())


@pytest.mark.parametrize("name", GPT2S)
def test_what_is_a_gpt2(name):
    assert not why_not_gpt2(GPT2S[name]())


def test_a_method_that_is_replaced_in_the_class(monkeypatch):
    model = make()
    assert not why_not_gpt2(model)
    with monkeypatch.context() as patch:
        forward = CausalSelfAttention.forward
        patch.setattr(CausalSelfAttention, "forward", lambda self, x: 0.9 * forward(self, x))
        assert "differ" in why_not_gpt2(model)
    assert not why_not_gpt2(model)


def test_weights_that_are_not_finite_or_zero_have_a_verdict():
    for value in (math.nan, math.inf, 0.0):
        model = make()
        nn.init.constant_(model.ln_f.weight, value)
        why_not_gpt2(model)


def test_it_leaves_the_model_and_the_random_numbers_as_they_were():
    class Noisy(GPT):
        """Counts its calls in a buffer, and draws."""

        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, *args, **options):
            self.calls += 1
            torch.rand(3)
            return super().forward(*args, **options)

    model = Noisy(GPTConfig(**SHAPE))
    model.h[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    assert not why_not_gpt2(model)
    assert model.calls == 0 and torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.get_float32_matmul_precision() == precision

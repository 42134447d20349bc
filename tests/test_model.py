"""The model against transformers: logits and gradients; the loss against plain cross-entropy."""

import math

import pytest
import torch
from torch.nn import functional as F

from support.errors_and_signals import UserError
from tests.conftest import logits_of
from train_gpt2 import GPT, GPTConfig

pytestmark = pytest.mark.torch

SMALL = GPTConfig(block_size=64, vocab_size=50257, n_layer=3, n_head=4, n_embd=48)


def tokens(*shape, vocabulary=50257):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def randomize(model):
    """Large weights, so that every part of the model counts."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


def test_logits_and_gradients_equal_transformers(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(n_positions=64, n_layer=3, n_head=4, n_embd=48)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    idx, targets = tokens(2, 64), tokens(2, 65)[:, 1:]
    expected = theirs(idx).logits
    torch.testing.assert_close(logits_of(ours, idx), expected, atol=1e-4, rtol=1e-4)
    loss = ours(idx, targets)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    expected_loss.backward()
    loss.backward()
    names = {name for name, _ in ours.named_parameters()}
    assert names == {name.removeprefix("transformer.") for name, _ in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        grad = theirs.get_parameter(f"transformer.{name}").grad
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            grad = grad.t()  # Conv1D's weights are (in, out)
        assert (parameter.grad - grad).norm() <= 1e-4 * grad.norm(), name


def test_a_longer_context_than_the_models_is_refused():
    with pytest.raises(UserError, match=r"65.*64"):
        GPT(SMALL)(tokens(1, 65))


def test_initialization():
    model = GPT(GPTConfig(block_size=256, vocab_size=1000, n_layer=4, n_head=4, n_embd=256))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all(), name
        else:
            std = 0.02 / math.sqrt(8) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(parameter.mean().item()) < 0.001, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradients_are_those_of_plain_cross_entropy(dtype):
    """Vocabularies with and without padding; few tokens and many, of which a third don't count."""
    for V, T in ((1000, 32), (1000, 700), (1024, 700)):
        model = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=0, n_head=1, n_embd=48))
        torch.nn.init.normal_(model.wte.weight, std=0.5)
        idx, targets = tokens(3, T, vocabulary=V), tokens(3, T + 1, vocabulary=V)[:, 1:].clone()
        targets[0, 0] = V - 1  # next to what padding may add
        targets[2] = -100
        found = []
        for plain in (True, False):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                if plain:
                    scores = logits_of(model, idx).float().flatten(0, 1)
                    loss = F.cross_entropy(scores, targets.flatten())
                else:
                    loss = model(idx, targets)
            loss.backward()
            assert loss.dtype == torch.float32
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
            model.zero_grad()
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        for expected, ours in zip(*found, strict=True):
            assert (ours - expected).norm() < tolerance * expected.norm(), (V, T)


def test_generate_samples_from_the_top_k_and_leaves_the_global_generator_alone():
    model = GPT(SMALL)
    randomize(model)  # the next token depends on the whole context
    idx, before = tokens(2, 60), torch.get_rng_state()

    def draw(**options):
        generators = [torch.Generator().manual_seed(seed) for seed in (42, 43)]
        return model.generate(idx, 12, generators=generators, **options)

    first = draw()
    assert torch.equal(first, draw()) and torch.equal(before, torch.get_rng_state())
    assert first.shape == (2, 72) and torch.equal(first[:, :60], idx) and first.max() < 50257
    assert not torch.equal(first, draw(top_k=0)), "as if from 50 tokens"
    assert torch.equal(draw(top_k=0), draw(top_k=50258)), "no more than there are"
    greedy = draw(top_k=1)
    assert torch.equal(greedy, model.generate(idx, 12, temperature=0))
    assert torch.equal(greedy, draw(temperature=1e-6))
    for t in range(60, 72):  # the context is the last 64 tokens
        scores = logits_of(model, greedy[:, max(0, t - 64) : t])[:, -1]
        assert torch.equal(greedy[:, t], scores.argmax(-1))
        fifty = logits_of(model, first[:, max(0, t - 64) : t])[:, -1].topk(50).indices
        assert all(token in row for token, row in zip(first[:, t], fifty, strict=True))

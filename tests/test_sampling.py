"""GPT.generate with a KV cache against the model itself, and against transformers."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import sampling
from support.errors_and_signals import RunError
from support.functional_gpt2 import KVCache, gpt2
from support.huggingface import TRANSPOSED
from support.ranks import Ranks
from support.sampling import kv_cache_for_gpt2
from support.tokenizer import get_tokenizer
from train_gpt2 import GPT, GPTConfig


def random_gpt(*shape):
    """A GPT-2 with random weights, large enough that the draws depend on the text."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(*shape)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


@settings(max_examples=60, deadline=None)
@given(
    context=st.integers(1, 9),
    n_layer=st.integers(1, 2),
    n_head=st.sampled_from([1, 3]),
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    n=st.integers(1, 15),
    temperature=st.sampled_from([0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
)
def test_with_a_cache_the_tokens_are_the_same(
    context, n_layer, n_head, prompt, seeds, n, temperature, top_k
):
    """In float64, where rounding decides nothing. The text may grow beyond the context, and a row
    does not depend on the others."""
    model = random_gpt(context, 7, n_layer, n_head, 6).double()

    def generate(*seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        idx = torch.tensor([prompt] * len(seeds))
        return model.generate(idx, n, temperature, top_k, generators)

    plain = torch.cat([generate(seed) for seed in seeds])
    assert torch.equal(generate(*seeds), plain)
    with kv_cache_for_gpt2(model):
        assert model.use_kv_cache
        assert torch.equal(generate(*seeds), plain)
        assert torch.equal(torch.cat([generate(seed) for seed in seeds]), plain)
    assert not model.use_kv_cache


def test_with_a_cache_each_token_is_read_once(monkeypatch):
    read = []

    def watching(w, idx, *args, **options):
        read.append(idx.size(1))
        return gpt2(w, idx, *args, **options)

    model = random_gpt(8, 7, 1, 1, 6)
    with kv_cache_for_gpt2(model):
        monkeypatch.setattr(sampling, "gpt2", watching)
        model.generate(torch.tensor([[1, 2, 3]]), 8)
    assert read == [3, 1, 1, 1, 1, 1, 8, 8]  # at the end the window slides


@torch.no_grad()
def test_logits_with_a_cache_are_those_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(n_positions=40, vocab_size=100, n_layer=3, n_head=4, n_embd=48)
    theirs = GPT2LMHeadModel(GPT2Config(**shape)).eval()
    for name, p in theirs.named_parameters():
        torch.nn.init.normal_(p, mean=float("ln_" in name), std=0.1)
    w = {
        name.removeprefix("transformer."): p.T if name.endswith(TRANSPOSED) else p
        for name, p in theirs.named_parameters()
    }
    prompt = torch.randint(100, (2, 9))
    options = dict(max_new_tokens=31, do_sample=False, eos_token_id=None, pad_token_id=0)
    theirs = theirs.generate(prompt, output_logits=True, return_dict_in_generate=True, **options)
    cache = KVCache()
    tokens = theirs.sequences[:, 9:].split(1, dim=1)
    for unread, expected in zip((prompt, *tokens), theirs.logits, strict=False):
        found = gpt2(w, unread, 3, 4, cache, at=(slice(None), -1))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.1, "else 1e-4 would say little"
    assert len(theirs.logits) == 31


class Fork(GPT):
    """Computes no GPT-2."""

    def forward(self, *args, **options):
        self.calls = [*getattr(self, "calls", []), tuple(args[0].shape)]
        return 2 * super().forward(*args, **options)


def test_a_fork_is_called_on_the_whole_context():
    model = Fork(GPTConfig(8, 7, 1, 1, 6)).eval()
    with kv_cache_for_gpt2(model):
        assert not model.use_kv_cache
        model.calls = []
        model.generate(torch.tensor([[1, 2], [3, 4]]), 10)
    assert model.calls == [(2, min(T, 8)) for T in range(2, 12)]


def test_on_token_sees_each_token_and_may_end_the_sampling():
    model, seen = random_gpt(8, 7, 1, 1, 6), []

    def third(tokens):
        seen.append(tokens)
        return len(seen) == 3

    idx = model.generate(torch.tensor([[1, 2], [3, 4]]), 10, on_token=third)
    assert torch.equal(idx[:, 2:], torch.stack(seen, dim=1)) and idx.shape == (2, 5)


@pytest.mark.parametrize("model_class", [GPT, Fork])
def test_logits_that_are_not_finite_end_it(model_class):
    model = model_class(GPTConfig(8, 7, 1, 1, 6)).eval()
    torch.nn.init.constant_(model.ln_f.bias, torch.nan)
    with kv_cache_for_gpt2(model), pytest.raises(RunError, match="non-finite"):
        model.generate(torch.tensor([[1]]), 2)


def test_each_sample_of_each_rank_of_a_run_is_another_one(capsys):
    model = GPT(GPTConfig(8, 50257, 1, 1, 6)).eval()
    for rank in range(2):
        ranks = Ranks(rank=rank, world_size=2, device=torch.device("cpu"))
        sampling.print_samples(model, get_tokenizer(), "ab", ranks, contextlib.nullcontext())
    texts = capsys.readouterr().out.split("rank ")[1:]
    assert len({text.split(":", 1)[1] for text in texts}) == 4

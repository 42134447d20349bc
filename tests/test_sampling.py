"""support/sampling.py against the plain loop of GPT.generate, and against transformers."""

import contextlib
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import sampling
from support.errors_and_signals import RunError
from support.functional_gpt2 import KeysAndValues, gpt2
from support.huggingface import TRANSPOSED
from support.ranks import Ranks
from support.sampling import cast_weights, choose_dtype, next_tokens
from support.tokenizer import get_tokenizer
from tests.conftest import logits_of
from train_gpt2 import GPT, GPTConfig


def random_gpt(*shape):
    """A GPT-2 with random weights, large enough that the draws depend on the text."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(*shape)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


def plain(model, prompt, seed, n, temperature, top_k, end=None):
    """A sample of the plain loop, up to the token `end`."""
    generator = torch.Generator().manual_seed(seed)
    idx = model.generate(torch.tensor([prompt]), n, temperature, top_k, generator)
    return list(takewhile(lambda token: token != end, idx[0, len(prompt) :].tolist()))


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
    end=st.sampled_from([None, 0, 1]),
)
def test_the_tokens_are_those_of_the_plain_loop(
    context, n_layer, n_head, prompt, seeds, n, temperature, top_k, end
):
    """In float64, where rounding decides nothing. The text may grow beyond the context."""
    model = random_gpt(context, 7, n_layer, n_head, 6).double()
    steps = list(next_tokens(model, prompt, seeds, n, temperature, top_k, end))
    expected = [plain(model, prompt, seed, n, temperature, top_k, end) for seed in seeds]
    assert len(steps) == max(map(len, expected))
    for i, sample in enumerate(expected):
        rest = [None] * (len(steps) - len(sample))
        assert [step[i] for step in steps] == sample + rest


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
    cache = KeysAndValues(capacity=40)
    tokens = theirs.sequences[:, 9:].split(1, dim=1)
    for unread, expected in zip((prompt, *tokens), theirs.logits, strict=False):
        found = gpt2(w, unread, 3, 4, cache, at=(slice(None), -1))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.1, "else 1e-4 would say little"
    assert len(theirs.logits) == 31


class Fork(GPT):
    """Computes no GPT-2, and has a `generate` of its own."""

    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)

    def generate(self, idx, *options):
        self.calls = [*getattr(self, "calls", []), len(idx)]
        return super().generate(idx, *options)


def test_a_fork_is_sampled_by_its_own_generate():
    model = Fork(GPTConfig(8, 7, 1, 1, 6)).eval()
    steps = list(next_tokens(model, [1, 2], [3, 4], 10))
    assert model.calls == [1] * 20
    for seed, tokens in zip((3, 4), zip(*steps, strict=True), strict=True):
        assert list(tokens) == plain(model, [1, 2], seed, 10, 1.0, 50)


@pytest.mark.parametrize("model_class", [GPT, Fork])
def test_logits_that_are_not_finite_end_it(model_class):
    model = model_class(GPTConfig(8, 7, 1, 1, 6)).eval()
    torch.nn.init.constant_(model.ln_f.bias, torch.nan)
    with pytest.raises(RunError, match="not finite"):
        list(next_tokens(model, [1], [0], 2))


def test_in_16_bits_the_probabilities_are_almost_the_same():
    """Although the logits lie around -100, like those of OpenAI's GPT-2, where bfloat16 has steps
    of 0.5."""
    model = random_gpt(16, 100, 2, 2, 32)
    with torch.no_grad():
        bias = model.ln_f.bias
        model.wte.weight -= 100 * bias / bias.square().sum()
    idx = torch.randint(100, (4, 16))
    expected = logits_of(model, idx)
    assert expected.mean() < -64
    cast_weights(model, torch.bfloat16)
    w = dict(model.named_parameters())
    found = gpt2(w, idx, 2, 2).detach()
    assert found.dtype == w["h.0.mlp.c_fc.weight"].dtype == torch.bfloat16
    difference = found.float().log_softmax(-1) - expected.log_softmax(-1)
    assert difference.square().mean().sqrt() < 0.05


def test_auto_is_bfloat16_for_a_large_model_where_the_chip_is_faster(monkeypatch, tmp_path):
    model = GPT(GPTConfig(8, 7, 1, 1, 6))
    assert choose_dtype(model, tmp_path)[0] == "float32"
    monkeypatch.setattr(sampling, "LARGE", 0)
    for speedup, expected in ((0.7, "float32"), (2.0, "bfloat16")):
        seconds = {torch.float32: speedup, torch.bfloat16: 1.0}
        monkeypatch.setattr(sampling, "one_row_seconds", lambda weight, s=seconds: s[weight.dtype])
        assert choose_dtype(model, tmp_path)[0] == expected
    fork = Fork(model.config)
    assert choose_dtype(fork, tmp_path)[0] == "float32"
    torch.save({"precision": "bfloat16"}, tmp_path / "training_state.pt")
    assert choose_dtype(fork, tmp_path)[0] == "bfloat16", "as it was trained"


def test_each_sample_of_each_rank_of_a_run_is_another_one(capsys):
    model = GPT(GPTConfig(8, 50257, 1, 1, 6)).eval()
    for rank in range(2):
        ranks = Ranks(rank=rank, world_size=2, device=torch.device("cpu"))
        sampling.print_samples(model, get_tokenizer(), "ab", ranks, contextlib.nullcontext())
    texts = capsys.readouterr().out.split("rank ")[1:]
    assert len({text.split(":", 1)[1] for text in texts}) == 4

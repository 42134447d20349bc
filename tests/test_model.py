"""The model against transformers: logits and gradients; the loss against plain cross-entropy."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from support.errors import UserError
from support.huggingface import our_layout
from train_gpt2 import GPT, GPTConfig, cross_entropy, in_chunks, lm_head

SMALL = GPTConfig(block_size=64, vocab_size=50257, n_layer=3, n_head=4, n_embd=48)


def tokens(*shape):
    return torch.randint(0, 50257, shape, generator=torch.Generator().manual_seed(1))


def randomize(model):
    """Large weights, so that every part of the model counts."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


def test_logits_and_gradients_equal_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_positions=64, n_layer=3, n_head=4, n_embd=48)).eval()
    randomize(theirs)
    ours = GPT(SMALL)
    ours.load_state_dict(our_layout(theirs.state_dict()))
    idx, targets = tokens(2, 64), tokens(2, 65)[:, 1:]
    logits, none = ours(idx)
    expected = theirs(idx).logits
    assert none is None
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    none, loss = ours(idx, targets)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    assert none is None and loss.item() == pytest.approx(expected_loss.item(), abs=1e-5)
    expected_loss.backward()
    loss.backward()
    gradients = our_layout({name: p.grad for name, p in theirs.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        grad = gradients[name]
        assert (parameter.grad - grad).norm() <= 1e-4 * grad.norm(), name


def test_a_longer_context_than_the_models_is_refused():
    with pytest.raises(UserError, match="65 tokens, but the model's context is 64"):
        GPT(SMALL)(tokens(1, 65))


def test_initialization():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=1000, n_layer=4, n_head=4, n_embd=256))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all(), name
        else:
            std = 0.02 / math.sqrt(8) if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(parameter.mean().item()) < 0.001, name


def plain_loss(x, wte, targets):
    """F.cross_entropy of all logits; -100 counts for nothing."""
    return F.cross_entropy((x @ wte.t()).float().flatten(0, -2), targets.flatten())


def loss_and_gradients(function, V, T, dtype=torch.float32):
    """(loss, gradients of x and wte) for 3 T tokens; the last third are not counted."""
    torch.manual_seed(0)
    x, wte = torch.randn(3, T, 48, requires_grad=True), (torch.randn(V, 48) * 0.1).requires_grad_()
    targets = torch.randint(0, V, (3, T))
    targets[0, 0] = V - 1  # next to what may be added
    targets[2] = -100
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = function(x, wte, targets)
    loss.backward()
    assert loss.dtype == x.grad.dtype == wte.grad.dtype == torch.float32
    return loss.item(), x.grad, wte.grad


def chunked(x, wte, targets):
    return in_chunks(cross_entropy, x, wte, targets)


def compiled(x, wte, targets):
    return torch.compile(cross_entropy, backend="aot_eager_decomp_partition")(x, wte, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [1000, 1024])  # not a multiple of 64, and one
@pytest.mark.parametrize(
    "function, T", [(cross_entropy, 32), (chunked, 32), (chunked, 700), (compiled, 32)]
)
def test_loss_and_gradients_equal_the_plain_ones(function, T, V, dtype):
    """Of 1,400 tokens in chunks, the last of which is smaller and one empty."""
    rtol = 1e-4 if dtype == torch.float32 else 1e-2
    expected = loss_and_gradients(plain_loss, V, T, dtype)
    loss, *gradients = loss_and_gradients(function, V, T, dtype)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        assert (ours - theirs).norm() < rtol * theirs.norm()


def test_a_batch_without_targets_has_no_loss():
    """As of a rank whose share of the validation set has ended."""
    x, wte = torch.randn(2, 600, 16), torch.randn(100, 16)
    for function in (cross_entropy, chunked):
        assert function(x, wte, torch.full((2, 600), -100)).item() == 0


def test_a_loss_in_chunks_never_holds_all_logits():
    """4,096 tokens, whose logits would be 16 MB."""
    x = torch.randn(1, 4096, 8, requires_grad=True)
    wte, targets = torch.randn(1024, 8, requires_grad=True), torch.randint(1024, (1, 4096))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        loss = chunked(x, wte, targets)
    kept = sum(event.self_cpu_memory_usage for event in memory.key_averages())
    assert kept < 2**20
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_blocks_give_the_same_bits_for_less_memory(dtype):
    """A block keeps its input only, 4 bytes per B T C, instead of 34 (float32: 68)."""
    torch.manual_seed(0)
    model, results, sizes = GPT(GPTConfig(block_size=32, n_layer=6, n_head=4, n_embd=64)), [], []
    for low_memory in (False, True):
        model.prepare(low_memory=low_memory)
        memory = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32), memory:
            x = model.hidden(tokens(4, 32))
        sizes.append(sum(event.self_cpu_memory_usage for event in memory.key_averages()))
        (x.float() ** 2).sum().backward()
        results.append([x.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    block_input = 4 * 32 * 64
    kept = 60 if dtype == torch.float32 else 34
    assert sizes[0] > kept * 6 * block_input and sizes[1] < 6 * 6 * block_input


def test_generate_samples_from_the_top_k_and_leaves_the_global_generator_alone():
    model = GPT(SMALL)
    randomize(model)  # the next token depends on the whole context
    idx, before = tokens(2, 60), torch.get_rng_state()

    def draw(**options):
        return model.generate(idx, 20, generator=torch.Generator().manual_seed(42), **options)

    first = draw()
    assert torch.equal(first, draw()) and torch.equal(before, torch.get_rng_state())
    assert first.shape == (2, 80) and torch.equal(first[:, :60], idx) and first.max() < 50257
    assert not torch.equal(first, draw(top_k=0)), "as if from 50 tokens"
    assert torch.equal(draw(top_k=0), draw(top_k=50258)), "no more than there are"
    greedy = draw(top_k=1)
    assert torch.equal(greedy, model.generate(idx, 20, temperature=0))
    assert torch.equal(greedy, draw(temperature=1e-6))
    for t in range(60, 80):  # the context is the last 64 tokens
        logits = model.logits(model.hidden(greedy[:, max(0, t - 64) : t]))[:, -1]
        assert torch.equal(greedy[:, t], logits.argmax(-1))


def test_the_head_of_one_token_copies_no_embedding():
    """The 47 rows that speed up the loss are only for the loss."""
    x, wte = torch.randn(1, 8), torch.randn(50257, 8)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        assert lm_head(x, wte).shape == (1, 50257)
    assert sum(max(e.self_cpu_memory_usage, 0) for e in memory.key_averages()) < wte.nbytes

"""The model against transformers: logits, gradients, files, names.

The loss is float32 cross-entropy over 50,257 columns, also in chunks, compiled or padded."""

import contextlib
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import train_gpt2
from support import loss as loss_module
from support.errors import UserError
from support.huggingface import CONV1D, gpt2_logits, model_folder
from support.loss import (
    ChunkedLoss,
    CrossEntropy,
    has_plain_code,
    ignores_padding,
    in_chunks,
    is_cross_entropy,
)
from train_gpt2 import GPT, GPTConfig, lm_head, next_token_loss

SMALL = GPTConfig(block_size=64, vocab_size=50257, n_layer=3, n_head=4, n_embd=48)


@pytest.fixture
def reference(tmp_path):
    """A GPT-2 of transformers, all its parameters random, and its folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=64, n_layer=3, n_head=4, n_embd=48)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "reference")
    return model, tmp_path / "reference"


def tokens(*shape, vocab_size=50257):
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients_equal_transformers(reference):
    theirs, folder = reference
    ours = GPT.from_pretrained(folder)
    idx, targets = tokens(2, 64), tokens(2, 65)[:, 1:]
    logits, loss = ours(idx, targets)
    expected = theirs(idx).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    loss.backward()
    theirs_by_name = dict(theirs.transformer.named_parameters())
    assert theirs_by_name.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        grad = theirs_by_name[name].grad
        grad = grad.t() if CONV1D.search(name) else grad
        assert (parameter.grad - grad).norm() <= 1e-4 * grad.norm(), name


def test_the_reference_that_forks_are_held_against_equals_transformers(reference):
    theirs, folder = reference
    state = GPT.from_pretrained(folder).state_dict()
    idx = tokens(64)
    expected = theirs(idx[None]).logits[0]
    torch.testing.assert_close(gpt2_logits(state, 3, 4, idx), expected, atol=1e-4, rtol=1e-4)


def test_export_loads_in_transformers_and_round_trips_exactly(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = GPT(SMALL)
    ours.save_pretrained(tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    idx = tokens(2, 64)
    theirs.train()  # without dropout, as it was trained
    torch.testing.assert_close(theirs(idx).logits, ours(idx)[0], atol=1e-4, rtol=1e-4)
    again = GPT.from_pretrained(tmp_path)
    assert again.config == SMALL
    for (name, a), b in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 50256 and tokenizer.model_max_length == SMALL.block_size
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "unequal permissions"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_precision_become_float32(dtype, reference, tmp_path):
    """They are the model's own, and the optimizer needs all of float32's digits."""
    theirs, folder = reference
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state = {name: t.to(dtype) for name, t in theirs.transformer.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert {p.dtype for p in GPT.from_pretrained(tmp_path).parameters()} == {torch.float32}


def test_older_and_sharded_files_load_too(reference, tmp_path):
    """The Hub's `gpt2` has causal masks and no prefix `transformer.`."""
    theirs, folder = reference
    expected = GPT.from_pretrained(folder).state_dict()
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((folder / "config.json").read_text())
    state = {name: t.half() for name, t in theirs.transformer.state_dict().items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}
    masks["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state | masks, old / "model.safetensors")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="1MB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    for other, tolerance in ((old, 1e-3), (tmp_path / "sharded", 0)):
        state = GPT.from_pretrained(other).state_dict()
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=tolerance, atol=tolerance)


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
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # the next token depends on the whole context
    idx, before = tokens(2, 60), torch.get_rng_state()

    def draw(**options):
        return model.generate(idx, 20, generator=torch.Generator().manual_seed(42), **options)

    first = draw()
    assert torch.equal(first, draw()) and torch.equal(before, torch.get_rng_state())
    assert first.shape == (2, 80) and torch.equal(first[:, :60], idx) and first.max() < 50257
    assert not torch.equal(first, draw(top_k=0)), "as if from 50 tokens"
    assert torch.equal(draw(top_k=0), draw(top_k=50257))
    assert torch.equal(draw(top_k=0), draw(top_k=50258)), "no more than there are"
    greedy = draw(top_k=1)
    assert torch.equal(greedy, model.generate(idx, 20, temperature=0))
    assert torch.equal(greedy, draw(temperature=1e-6))
    for t in range(60, 80):  # the context is the last 64 tokens
        assert torch.equal(greedy[:, t], model(greedy[:, max(0, t - 64) : t])[0][:, -1].argmax(-1))


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_hub_models_weights_are_downloaded_once(weights, tmp_path, monkeypatch):
    """As safetensors; a pickled .bin, which transformers reads, only where there are none."""
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append(allow_patterns)
        if any(Path(weights).match(pattern) for pattern in allow_patterns):
            (tmp_path / weights).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert model_folder("me/hub-model") == tmp_path
    assert (tmp_path / weights).exists()
    assert asked[1:] == ([["*.bin"]] if weights.endswith(".bin") else [])


# Settings of config.json on which transformers' GPT-2 depends. Dropout acts in training only.
MATHS = ("activation_function", "layer_norm_epsilon", "n_inner", "scale_attn_weights")
MATHS += ("scale_attn_by_inverse_layer_idx", "tie_word_embeddings", "add_cross_attention")


def test_other_models_are_refused(tmp_path):
    """Another model, other shapes, untied, damaged or missing weights."""
    model = GPT(SMALL)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"model_type": "llama"}, "model_type = 'llama'"),
        *(({name: "other"}, f"{name} = 'other'") for name in MATHS),
        ({"n_embd": 32}, "do not match"),
        ({"n_layer": 2}, "do not match"),
        ({"n_layer": "2"}, "needs n_layer"),
        ({"n_head": 5}, "n_head does not divide"),
        ({"n_inner": 4 * 48}, None),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            GPT.from_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | {"lm_head.weight": torch.zeros(50257, 48)}, weights)
    with pytest.raises(UserError, match="not tied"):
        GPT.from_pretrained(tmp_path)
    state = load_file(weights)
    state.pop("lm_head.weight")
    wte, c_attn = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
    for bad, message in (
        ({wte: torch.full((50257, 48), math.nan)}, "wte.weight is not all finite"),
        ({c_attn: state[c_attn].to(torch.int8)}, "c_attn.weight is not all finite floating-point"),
        ({c_attn: state[c_attn][None]}, "do not match"),
    ):
        save_file(state | bad, weights)
        with pytest.raises(UserError, match=message):
            GPT.from_pretrained(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        GPT.from_pretrained(tmp_path)
    weights.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # pickles are never opened
    with pytest.raises(UserError, match=r"no model\.safetensors of a GPT-2 here"):
        GPT.from_pretrained(tmp_path)


def loss_and_gradients(function, V, dtype):
    """(loss, gradients of x and wte)"""
    torch.manual_seed(0)
    x, wte = torch.randn(2, 64, 48, requires_grad=True), (torch.randn(V, 48) * 0.1).requires_grad_()
    targets = torch.randint(0, V, (2, 64))
    targets[0, 0] = V - 1  # the last column before the padding
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = function(x, wte, targets)
        with torch.no_grad():
            mean = loss_module.mean_in_chunks(function, x, wte, targets)
            assert mean.item() == pytest.approx(loss.item(), abs=1e-6)
    (loss * 3).backward()
    assert loss.dtype == x.grad.dtype == wte.grad.dtype == torch.float32
    return loss.item(), x.grad, wte.grad


def plain(x, wte, targets):
    logits = x @ wte.t()
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def smoothed(logits, targets):
    """As a fork might train: z-loss (PaLM, section 5) and label smoothing."""
    logits = logits.float()
    z = logits.logsumexp(1).square().mean()
    return F.cross_entropy(logits, targets, label_smoothing=0.1) + 1e-3 * z


def plain_smoothed(x, wte, targets):
    return smoothed((x @ wte.t()).flatten(0, -2), targets.flatten())


def chunked(way):
    """in_chunks(), computed by one of its classes whatever the function is."""

    def apply(x, wte, targets):
        return way.apply(plain, x.flatten(0, -2), wte, targets.flatten())

    return apply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [1000, 1024])
@pytest.mark.parametrize(
    "function, expected",
    [
        (next_token_loss, plain),
        (chunked(CrossEntropy), plain),
        (chunked(ChunkedLoss), plain),
        (in_chunks(plain_smoothed, smoothed), plain_smoothed),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradients_equal_the_plain_ones(padded, function, expected, V, dtype, monkeypatch):
    rtol, atol = (1e-4, 3e-7) if dtype == torch.float32 else (1e-2, 3e-6)
    monkeypatch.setattr(loss_module, "CHUNK", 24)  # of 128 tokens: the last chunk is smaller
    expected = loss_and_gradients(expected, V, dtype)
    if padded:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert lm_head(torch.ones(1, 48), torch.ones(V, 48), padded=True).size(1) % 64 == 0
    loss, *gradients = loss_and_gradients(function, V, dtype)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        assert (ours - theirs).norm() < rtol * theirs.norm()
        torch.testing.assert_close(ours, theirs, atol=100 * atol, rtol=10 * rtol)


def test_only_plain_cross_entropy_gets_the_gradient_by_hand():
    """A change of the loss or of the head is noticed; so is one that padding would break."""

    def scaled(logits, targets):
        return F.cross_entropy(logits * (1 + 1e-5), targets)

    def without_eot(logits, targets):
        return F.cross_entropy(logits, targets, ignore_index=50256)

    def with_softcap(x, wte, targets):
        return F.cross_entropy(30 * torch.tanh(lm_head(x, wte) / 30), targets)

    def warming_up(logits, targets):
        return F.cross_entropy(logits, targets) + coefficient * logits.logsumexp(1).mean()

    coefficient = 0.0
    assert is_cross_entropy(partial(next_token_loss, loss_function=warming_up))
    assert not has_plain_code(warming_up) and not has_plain_code(partial(F.cross_entropy))
    assert has_plain_code(train_gpt2.training_loss)
    assert is_cross_entropy(next_token_loss) and ignores_padding(train_gpt2.training_loss)
    for change in (scaled, without_eot, smoothed):
        assert not is_cross_entropy(partial(next_token_loss, loss_function=change))
    assert not is_cross_entropy(with_softcap)
    x, wte, targets = torch.randn(4, 48), torch.randn(90, 48), torch.arange(4)
    by_chunks = in_chunks(with_softcap, train_gpt2.training_loss)(x.requires_grad_(), wte, targets)
    assert by_chunks.item() == pytest.approx(with_softcap(x, wte, targets).item(), rel=1e-6)
    assert ignores_padding(scaled) and not ignores_padding(smoothed)


def test_a_model_of_fake_tensors_can_be_prepared():
    """Tools look at a GPU's kernels without one; there is nothing to compare then."""
    with FakeTensorMode():
        model = GPT(SMALL)
        model.prepare()
        assert model(tokens(1, 64).cpu(), tokens(1, 64))[1].shape == ()


def test_chunked_loss_of_large_logits_is_finite():
    x = torch.tensor([[[300.0], [300.0]]], requires_grad=True)
    wte = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    value = chunked(CrossEntropy)(x, wte, torch.tensor([[1, 0]]))
    value.backward()
    assert value.item() == pytest.approx(300.0) and x.grad.isfinite().all()


def test_compiled_loss_ignores_padded_columns(monkeypatch):
    """torch.compile sees the real device, so the padded head is spelled out.

    Inductor's decompositions, without its C++, which takes half a minute to compile."""
    decomposed = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", decomposed)

    def padded_head(x, wte, padded):
        bias = F.pad(wte.new_zeros(50257), (0, 47), value=-math.inf)
        return F.linear(x, F.pad(wte, (0, 0, 0, 47)), bias)

    monkeypatch.setattr(train_gpt2, "lm_head", padded_head)
    model = GPT(GPTConfig(64, 1000, 0, 4, 48))
    del model.wte
    weight = SimpleNamespace(device=torch.device("cuda"))  # for prepare()
    model.wte = SimpleNamespace(weight=weight)
    model.prepare(compiled=True)
    expected = loss_and_gradients(plain, 50257, torch.float32)
    loss, *gradients = loss_and_gradients(model.loss_function, 50257, torch.float32)
    assert loss == pytest.approx(expected[0], abs=1e-6)
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-7, rtol=1e-4)

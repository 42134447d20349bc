"""Model folders: what transformers reads of ours, what is read of others', and what is refused."""

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_gpt2
from support.errors import UserError
from support.files import sha256
from support.huggingface import (
    check_before_training,
    computes_gpt2,
    fingerprint,
    is_gpt2,
    model_folder,
)
from train_gpt2 import GPT, GPTConfig

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


def test_export_loads_in_transformers_and_round_trips_exactly(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = GPT(SMALL)
    ours.save_pretrained(tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    idx = torch.randint(50257, (2, 64))
    theirs.train()  # without dropout, as it was trained
    torch.testing.assert_close(theirs(idx).logits, ours(idx)[0], atol=1e-4, rtol=1e-4)
    again = GPT.from_pretrained(tmp_path)
    assert again.config == SMALL and not again.training
    for (name, a), b in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 50256 and tokenizer.model_max_length == SMALL.block_size
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "unequal permissions"


def test_another_vocabulary_gets_no_tokenizer(tmp_path):
    GPT(GPTConfig(16, 100, 1, 1, 8)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] is None and config["eos_token_id"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_precision_become_float32(dtype, reference, tmp_path):
    """The optimizer needs all of float32's digits."""
    theirs, folder = reference
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state = {name: t.to(dtype) for name, t in theirs.transformer.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert {p.dtype for p in GPT.from_pretrained(tmp_path).parameters()} == {torch.float32}


def test_older_and_sharded_files_load_too(reference, tmp_path):
    """The Hub's `gpt2` has causal masks, no prefix `transformer.` and fewer settings."""
    theirs, folder = reference
    expected = GPT.from_pretrained(folder).state_dict()
    old = tmp_path / "old"
    old.mkdir()
    config = json.loads((folder / "config.json").read_text())
    known = ("activation_function", "layer_norm_epsilon")
    config = {name: value for name, value in config.items() if name in known or name not in MATHS}
    (old / "config.json").write_text(json.dumps(config))
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


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_hub_models_weights_are_downloaded_once(weights, tmp_path, monkeypatch):
    """As safetensors; a pickled .bin, which only transformers reads, where there are none."""
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


@pytest.fixture
def fork(monkeypatch):
    """fork(name=value, …): replaces names of train_gpt2.py, as an edited copy would."""

    def change(**names):
        for name, value in names.items():
            monkeypatch.setattr(train_gpt2, name, value)
        computes_gpt2.cache_clear()
        fingerprint.cache_clear()

    yield change
    monkeypatch.undo()
    computes_gpt2.cache_clear()
    fingerprint.cache_clear()


class ErfMLP(train_gpt2.MLP):
    def forward(self, x):
        return self.c_proj(torch.nn.functional.gelu(self.c_fc(x)))


class OtherEps(train_gpt2.Block):
    def __init__(self, config):
        super().__init__(config)
        self.ln_1.eps = 1e-6


class OtherLastLayer(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.h[-1].ln_2.eps = 1e-6


class OtherThirdBlock(GPT):
    def hidden(self, idx):
        return super().hidden(idx) * (1.01 if len(self.h) > 2 else 1)


class Window(train_gpt2.CausalSelfAttention):
    """Sees the last 60 tokens: the same as GPT-2 for shorter texts."""

    def forward(self, x):
        T = x.size(1)
        out = super().forward(x)
        return out if T <= 60 else torch.cat([out[:, :-1], out[:, -1:] * 1.01], dim=1)


def smoothed(x, wte, targets):
    logits = train_gpt2.lm_head(x, wte).float().flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)


CHANGES = {
    "GELU": dict(MLP=ErfMLP),
    "epsilon": dict(Block=OtherEps),
    "last layer": dict(GPT=OtherLastLayer),
    "third block": dict(GPT=OtherThirdBlock),
    "window": dict(CausalSelfAttention=Window),
    "softcap": dict(lm_head=lambda x, wte: 30 * torch.tanh(x @ wte.t() / 30)),
    "the loss that is reported": dict(cross_entropy=smoothed),
    "more parameters": dict(MLP=lambda c: torch.nn.Linear(c.n_embd, c.n_embd)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_mathematics_is_no_gpt2(name, fork):
    assert is_gpt2(GPT(SMALL))
    fork(**CHANGES[name])
    assert not is_gpt2(train_gpt2.GPT(SMALL))


def test_a_changed_object_is_no_gpt2():
    model = GPT(SMALL)
    model.extra = torch.nn.Linear(4, 4)
    assert not is_gpt2(model)


@pytest.mark.parametrize("loss", [smoothed, None])
def test_a_fork_that_only_trains_otherwise_is_a_gpt2(loss, fork):
    """With dropout, or with another training loss."""
    if loss:
        fork(training_loss=loss)
    else:

        class Dropped(train_gpt2.MLP):
            def forward(self, x):
                return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)

        fork(MLP=Dropped)
    assert is_gpt2(GPT(SMALL))


# The loss that is reported is not the model's.
FORKS = {name: change for name, change in CHANGES.items() if name != "the loss that is reported"}


@pytest.mark.parametrize("name", FORKS)
def test_a_checkpoint_is_run_by_the_mathematics_that_saved_it_only(name, fork, tmp_path, capsys):
    """A fork's by neither the original nor another fork; --init takes it, with a note."""
    fork(**FORKS[name])
    model = train_gpt2.GPT(SMALL)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2-repro-fork"
    assert torch.equal(train_gpt2.GPT.from_pretrained(tmp_path).wte.weight, model.wte.weight)
    other = FORKS["epsilon" if name != "epsilon" else "GELU"]
    originals = {key: ORIGINAL[key] for key in FORKS[name]}
    for code in (originals, originals | other):
        fork(**code)
        with pytest.raises(UserError, match=r"other mathematics|do not match"):
            train_gpt2.GPT.from_pretrained(tmp_path)
    if name != "more parameters":
        train_gpt2.GPT.from_pretrained(tmp_path, strict=False)
        assert "note: " in capsys.readouterr().out


ORIGINAL = {name: getattr(train_gpt2, name) for change in FORKS.values() for name in change}


def test_a_gpt2_without_a_fingerprint_needs_gpt2s_mathematics(reference, fork):
    _, folder = reference
    GPT.from_pretrained(folder)
    fork(MLP=ErfMLP)
    with pytest.raises(UserError, match="other mathematics"):
        GPT.from_pretrained(folder)


def test_saving_leaves_the_random_numbers_alone_and_is_reproducible(tmp_path):
    model = GPT(SMALL)
    state = torch.get_rng_state()
    computes_gpt2.cache_clear()
    fingerprint.cache_clear()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name)
    assert torch.equal(torch.get_rng_state(), state)
    for path in (tmp_path / "a").iterdir():
        assert sha256(path) == sha256(tmp_path / "b" / path.name)


class NeedsMore(GPT):
    def __init__(self, config, width=3):
        super().__init__(config)
        self.extra = torch.nn.Linear(width, 1)


def test_a_model_that_its_config_does_not_make_again_is_refused_before_training():
    """Hours later would be too late."""
    check_before_training(GPT(SMALL))
    with pytest.raises(UserError, match=r"could not be read: a new one .* extra\.weight"):
        check_before_training(NeedsMore(SMALL, width=4))

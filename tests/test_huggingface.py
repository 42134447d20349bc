"""Model folders: what transformers reads of ours, what is read of others', and what is refused."""

import contextlib
import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from support import huggingface
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, import_file, logits_of
from train_gpt2 import GPT, GPTConfig

SMALL = GPTConfig(block_size=64, vocab_size=50257, n_layer=3, n_head=4, n_embd=48)
GPT2 = get_tokenizer()


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
    ours.save_pretrained(tmp_path, GPT2)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    idx = torch.randint(50257, (2, 64))
    theirs.train()  # without dropout, as it was trained
    torch.testing.assert_close(logits_of(theirs, idx), logits_of(ours, idx), atol=1e-4, rtol=1e-4)
    again = GPT.from_pretrained(tmp_path)
    assert again.config == SMALL and not again.training
    for (name, a), b in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 50256 and tokenizer.model_max_length == SMALL.block_size
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "unequal permissions"


def test_transformers_computes_the_logits_by_which_a_gpt2_is_known():
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(huggingface.SMALL)
    shape["n_positions"] = shape.pop("block_size")
    theirs = GPT2LMHeadModel(GPT2Config(**shape)).double().eval()
    weights = huggingface.their_layout(huggingface.small_model(GPT(SMALL)).state_dict())
    report = theirs.load_state_dict(weights, strict=False)
    assert report.missing_keys == ["lm_head.weight"] and not report.unexpected_keys  # it is tied
    logits = huggingface.some_logits(theirs)
    expected = logits.new_tensor(huggingface.GPT2_LOGITS)
    torch.testing.assert_close(logits, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_any_precision_become_float32(dtype, reference, tmp_path):
    """The optimizer needs all of float32's digits."""
    theirs, folder = reference
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state = {name: t.to(dtype) for name, t in theirs.transformer.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert {p.dtype for p in GPT.from_pretrained(tmp_path).parameters()} == {torch.float32}


def test_files_of_other_programs_give_the_same_logits(reference, tmp_path):
    """The Hub's `gpt2` has causal masks, no prefix `transformer.` and fewer settings. Others have
    several files, or pickles, of which only the tensors are read."""
    theirs, folder = reference
    config = json.loads((folder / "config.json").read_text())
    names = ("old", "sharded", "pickled")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    few = {name: value for name, value in config.items() if name not in MATHS}
    (tmp_path / "old" / "config.json").write_text(json.dumps(few))
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}
    masks["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(theirs.transformer.state_dict() | masks, tmp_path / "old" / "model.safetensors")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="1MB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    torch.save(theirs.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    idx = torch.randint(50257, (2, 64))
    expected = logits_of(theirs, idx)
    for name in names:
        found = GPT.from_pretrained(tmp_path / name)(idx)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# Settings of config.json on which transformers' GPT-2 depends. Dropout acts in training only.
MATHS = {
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-6,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
}


def test_other_models_are_refused(tmp_path):
    """Another model, other mathematics, other shapes, untied, damaged or missing weights."""
    GPT(SMALL).save_pretrained(tmp_path, GPT2)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, fits in (
        ({"model_type": "llama"}, False),
        *(({name: value}, False) for name, value in MATHS.items()),
        ({"n_embd": 32}, False),
        ({"n_layer": 2}, False),
        ({"n_inner": 4 * 48}, True),
        ({}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        refused = pytest.raises(UserError, match=f"^{tmp_path}[^\\n]*$")
        with contextlib.nullcontext() if fits else refused:
            GPT.from_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    c_attn = "transformer.h.0.attn.c_attn.weight"
    for bad, named in (
        ({"lm_head.weight": torch.zeros(50257, 48)}, "head"),
        ({c_attn: state[c_attn][None]}, r"c_attn\.weight"),
        ({"transformer.h.0.more": torch.zeros(2)}, r"h\.0\.more"),
    ):
        save_file(state | bad, weights)
        with pytest.raises(UserError, match=f"{tmp_path}.*{named}"):
            GPT.from_pretrained(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        GPT.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        GPT.from_pretrained(tmp_path)


@pytest.fixture
def load_code(tmp_path, monkeypatch):
    """load_code(name, change) is a copy of train_gpt2.py in which change(copy) has replaced names.

    Without a change it is a copy too."""

    def load(name, change=None):
        path = tmp_path / "code" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text((ROOT / "train_gpt2.py").read_text())
        code = import_file(path, monkeypatch)
        for key, value in (change(code) if change else {}).items():
            assert hasattr(code, key)
            setattr(code, key, value)
        return code

    return load


def small(code):
    torch.manual_seed(0)
    return code.GPT(code.GPTConfig(block_size=64, n_layer=3, n_head=4, n_embd=48))


def kind(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


def other_gelu(code):
    class ErfMLP(code.MLP):
        def forward(self, x):
            return self.c_proj(F.gelu(self.c_fc(x)))

    return {"MLP": ErfMLP}


def changed_block(change):
    """A Block, and so a GPT, to which change(block) is done when it is made."""

    def replace(code):
        class ChangedBlock(code.Block):
            def __init__(self, config):
                super().__init__(config)
                change(self)

        return {"Block": ChangedBlock}

    return replace


def other_epsilon(block):
    block.ln_2.eps = 1e-6


def window(block):
    """Another output for the last token if it sees more than 60 others."""

    def forward(module, inputs, output):
        if output.size(1) <= 60:
            return output
        return torch.cat([output[:, :-1], output[:, -1:] * 1.01], dim=1)

    block.attn.register_forward_hook(forward)


def dropout(block):
    block.mlp.register_forward_hook(lambda m, i, out: F.dropout(out, 0.5, m.training))


def softcap(block):
    block.register_forward_hook(lambda m, i, output: 30 * torch.tanh(output / 30))


FORKS = {
    "GELU": other_gelu,
    "epsilon": changed_block(other_epsilon),
    "window": changed_block(window),
    "softcap": changed_block(softcap),
    "more parameters": lambda code: {"MLP": lambda c: torch.nn.Linear(c.n_embd, c.n_embd)},
    "cannot be small": changed_block(lambda block: block.attn.c_attn.weight.view(144, 48)),
}


@pytest.mark.parametrize("name", FORKS)
def test_a_changed_model_is_loaded_by_its_script_only(name, load_code, tmp_path):
    fork = load_code("train_x.py", FORKS[name])
    model = small(fork)
    model.save_pretrained(tmp_path / "x", GPT2)
    assert kind(tmp_path / "x") == "gpt2-repro-fork"
    assert torch.equal(fork.GPT.from_pretrained(tmp_path / "x").wte.weight, model.wte.weight)
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*train_x.py"):
        GPT.from_pretrained(tmp_path / "x")


def test_a_script_that_has_changed_since_gets_a_line(load_code, tmp_path, capsys):
    fork = load_code("train_x.py", other_gelu)
    small(fork).save_pretrained(tmp_path / "x", GPT2)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    fork.GPT.from_pretrained(tmp_path / "x")
    assert not capsys.readouterr().err
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"script_sha256": "0" * 64}))
    fork.GPT.from_pretrained(tmp_path / "x")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_still_a_gpt2(load_code, tmp_path):
    """What acts only in training leaves one, and any script loads it. One layer more does not."""
    for name, change in (("train_a.py", None), ("train_b.py", changed_block(dropout))):
        small(load_code(name, change)).save_pretrained(tmp_path / "x", GPT2)
        assert kind(tmp_path / "x") == "gpt2"
        GPT.from_pretrained(tmp_path / "x")
    model = GPT(SMALL)
    model.extra = torch.nn.Linear(4, 4)
    model.save_pretrained(tmp_path / "x", GPT2)
    assert kind(tmp_path / "x") == "gpt2-repro-fork"


def test_saving_leaves_the_random_numbers_alone_and_is_reproducible(tmp_path):
    model = GPT(SMALL)
    state = torch.get_rng_state()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name, GPT2)
    assert torch.equal(torch.get_rng_state(), state)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

"""Model folders: what transformers reads of ours, what is read of others', and what is refused."""

import contextlib
import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import sample
from support.errors_and_signals import UserError
from tests.conftest import ROOT, import_file, logits_of, words
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
    torch.testing.assert_close(logits_of(theirs, idx), logits_of(ours, idx), atol=1e-4, rtol=1e-4)
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
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "train_gpt2.py"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
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
def test_a_hub_models_weights_are_downloaded_once(
    weights, reference, tmp_path, monkeypatch, capsys
):
    """As safetensors; a pickled .bin, which only transformers reads, where there are none."""
    theirs, hub = reference
    torch.save(theirs.state_dict(), hub / "pytorch_model.bin")
    if weights == "pytorch_model.bin":
        (hub / "model.safetensors").unlink()
    GPT(SMALL).save_pretrained(tmp_path / "tokenizer")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tmp_path / "tokenizer" / name, hub)
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()

    def snapshot_download(name, allow_patterns):
        assert name == "me/hub-model"
        for path in hub.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, downloaded)
        return str(downloaded)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    sample.main(words("me/hub-model", "ROMEO: --max-new-tokens 1 --device cpu"))
    assert capsys.readouterr().out.startswith("ROMEO:")
    stored = {path.name for path in downloaded.iterdir()}
    assert stored & {"model.safetensors", "pytorch_model.bin"} == {weights}


# Settings of config.json on which transformers' GPT-2 depends. Dropout acts in training only.
MATHS = {
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-6,
    "n_inner": 100,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "tie_word_embeddings": False,
    "add_cross_attention": True,
}


def test_other_models_are_refused(tmp_path):
    """Another model, other mathematics, other shapes, untied, damaged or missing weights."""
    model = GPT(SMALL)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    others = {name: value for name, value in config.items() if name != "saved_by"}
    for change, fits in (
        (others | {"model_type": "llama"}, False),
        *((others | {name: value}, False) for name, value in MATHS.items()),
        (config | {"n_embd": 32}, False),
        (others | {"n_embd": 32}, False),
        (config | {"n_layer": 2}, False),
        (config | {"n_layer": "2"}, False),
        (config | {"n_head": 6}, False),
        (others | {"n_inner": 4 * 48}, True),
        (others, True),
        (config, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps(change))
        refused = pytest.raises(UserError, match=f"^{tmp_path}[^\\n]*$")
        with contextlib.nullcontext() if fits else refused:
            GPT.from_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    wte, c_attn = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
    for bad, named in (
        ({"lm_head.weight": torch.zeros(50257, 48)}, ""),
        ({wte: torch.full((50257, 48), math.nan)}, r"wte\.weight"),
        ({c_attn: state[c_attn][None]}, r"c_attn\.weight"),
    ):
        save_file(state | bad, weights)
        with pytest.raises(UserError, match=f"{tmp_path}.*{named}"):
            GPT.from_pretrained(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        GPT.from_pretrained(tmp_path)
    weights.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # pickles are never opened
    with pytest.raises(UserError, match=r"model\.safetensors"):
        GPT.from_pretrained(tmp_path)


@pytest.fixture
def load_code(monkeypatch):
    """load_code(change) is a copy of train_gpt2.py in which change(copy) has replaced names."""
    count = iter(range(99))

    def load(change=None):
        code = import_file(ROOT / "train_gpt2.py", monkeypatch, f"changed_{next(count)}")
        if change:
            for name, value in change(code).items():
                assert hasattr(code, name)
                setattr(code, name, value)
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


def changed_gpt(change):
    """A GPT to which change(model) is done when it is made."""

    def replace(code):
        class ChangedGPT(code.GPT):
            def __init__(self, config):
                super().__init__(config)
                change(self)

        return {"GPT": ChangedGPT}

    return replace


def other_last_epsilon(model):
    model.h[-1].ln_2.eps = 1e-6


def other_third_block(model):
    if len(model.h) > 2:
        model.ln_f.register_forward_hook(lambda module, inputs, output: 1.01 * output)


def window(model):
    """A last token that sees 60 others: the same as GPT-2 for shorter texts."""

    def forward(module, inputs, output):
        if output.size(1) <= 60:
            return output
        return torch.cat([output[:, :-1], output[:, -1:] * 1.01], dim=1)

    for block in model.h:
        block.attn.register_forward_hook(forward)


def scaled(model):
    """Another loss in training."""
    model.loss.register_forward_hook(lambda m, inputs, loss: 2 * loss if m.training else loss)


def dropout(model):
    for block in model.h:
        block.mlp.register_forward_hook(lambda m, i, out: F.dropout(out, 0.5, m.training))


def softcap(model):
    hook = lambda module, inputs, output: 30 * torch.tanh(output / 30)  # noqa: E731
    model.lm_head.register_forward_hook(hook)


def tied_blocks(model):
    model.h[1] = model.h[0]


FORKS = {
    "GELU": other_gelu,
    "last layer": changed_gpt(other_last_epsilon),
    "third block": changed_gpt(other_third_block),
    "window": changed_gpt(window),
    "softcap": changed_gpt(softcap),
    "tied blocks": changed_gpt(tied_blocks),
    "more parameters": lambda code: {"MLP": lambda c: torch.nn.Linear(c.n_embd, c.n_embd)},
}


@pytest.mark.parametrize("name", FORKS)
def test_a_checkpoint_is_run_by_the_mathematics_that_saved_it_only(name, load_code, tmp_path):
    """A fork's by neither the original nor another fork."""
    fork = load_code(FORKS[name])
    model = small(fork)
    model.save_pretrained(tmp_path)
    assert kind(tmp_path) == "gpt2-repro-fork"
    assert torch.equal(fork.GPT.from_pretrained(tmp_path).wte.weight, model.wte.weight)
    for other in (load_code(), load_code(FORKS["softcap" if name != "softcap" else "GELU"])):
        with pytest.raises(UserError, match=re.escape(str(tmp_path))):
            other.GPT.from_pretrained(tmp_path)


def test_what_is_still_a_gpt2(load_code, tmp_path):
    """What acts only in training leaves one: dropout, another training loss."""
    for change, expected in (
        (None, "gpt2"),
        (changed_gpt(dropout), "gpt2"),
        (changed_gpt(scaled), "gpt2"),
    ):
        small(load_code(change)).save_pretrained(tmp_path)
        assert kind(tmp_path) == expected
    model = GPT(SMALL)
    model.extra = torch.nn.Linear(4, 4)
    model.save_pretrained(tmp_path)
    assert kind(tmp_path) == "gpt2-repro-fork"


def test_a_gpt2_of_another_program_needs_gpt2s_mathematics(reference, load_code):
    _, folder = reference
    GPT.from_pretrained(folder)
    with pytest.raises(UserError, match=re.escape(str(folder))):
        load_code(other_gelu).GPT.from_pretrained(folder)


def test_saving_leaves_the_random_numbers_alone_and_is_reproducible(load_code, tmp_path):
    model = small(load_code())
    state = torch.get_rng_state()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name)
    assert torch.equal(torch.get_rng_state(), state)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

"""Model folders: what transformers reads of ours, what is read of others', and what is refused."""

import contextlib
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from support.errors_and_signals import UserError
from support.functional_gpt2 import gpt2
from support.huggingface import TRANSPOSED, is_gpt2, model_card
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


@torch.no_grad()
def test_what_counts_as_a_gpt2_is_what_transformers_computes():
    """In float64, at several lengths up to the context, with weights that let every part count."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPTConfig(block_size=64, vocab_size=100, n_layer=3, n_head=4, n_embd=48)
    ours = GPT(config).double()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    shape = dict(n_positions=64, vocab_size=100, n_layer=3, n_head=4, n_embd=48)
    theirs = GPT2LMHeadModel(GPT2Config(**shape)).double().eval()
    for name, parameter in theirs.transformer.named_parameters():
        tensor = ours.state_dict()[name]
        parameter.copy_(tensor.T if name.endswith(TRANSPOSED) else tensor)
    for T in (1, 2, 33, 64):
        idx = torch.randint(100, (2, T))
        expected = logits_of(theirs, idx)
        found = gpt2(ours.state_dict(), idx, config.n_layer, config.n_head)
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        assert expected.std() > 1, "else 1e-9 would say little"


def test_weights_in_bfloat16_become_float32(reference, tmp_path):
    """The optimizer needs all of float32's digits."""
    theirs, folder = reference
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    state = {name: t.bfloat16() for name, t in theirs.transformer.state_dict().items()}
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


def test_other_models_are_refused(reference):
    """Another model, other mathematics, other shapes, untied, damaged or missing weights."""
    _, folder = reference
    config = json.loads((folder / "config.json").read_text())
    for change, fits in (
        ({"model_type": "llama"}, False),
        *(({name: value}, False) for name, value in MATHS.items()),
        ({"n_embd": 32}, False),
        ({"n_layer": 4}, False),
        ({"n_inner": 4 * 48}, True),
        ({}, True),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        refused = pytest.raises(UserError, match=f"^{folder}[^\\n]*$")
        with contextlib.nullcontext() if fits else refused:
            GPT.from_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    untied = state | {"lm_head.weight": torch.zeros(50257, 48)}
    save_file(untied, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize("program", ["ours", "transformers"])
def test_weights_that_do_not_fit_are_one_line(program, reference, tmp_path):
    _, folder = reference
    if program == "ours":
        folder = tmp_path / "ours"
        GPT(SMALL).save_pretrained(folder, GPT2)
    weights = folder / "model.safetensors"
    state = load_file(weights)
    c_attn = "transformer.h.0.attn.c_attn.weight"
    changes = {"another shape": state | {c_attn: state[c_attn][:-1]}}
    changes["missing"] = {name: tensor for name, tensor in state.items() if name != c_attn}
    if program == "ours":  # transformers ignores those that it does not know
        changes["more"] = state | {"transformer.h.0.c_attn.weight": torch.zeros(2)}
    for name, changed in changes.items():
        save_file(changed, weights, metadata={"format": "pt"})
        # For another shape transformers has a line that names no tensor.
        named = "" if program == "transformers" and name == "another shape" else r"c_attn\.weight"
        with pytest.raises(UserError, match=f"^{folder}[^\\n]*{named}[^\\n]*$"):
            GPT.from_pretrained(folder)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"^{folder}[^\\n]*$"):
        GPT.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(UserError, match=f"^{folder}[^\\n]*$"):
        GPT.from_pretrained(folder)


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


def plain_attention(scores=lambda s: s, turn=lambda x: x):
    """Attention by plain products, whose scores (B, nh, T, T) are changed before the softmax, and
    queries and keys (B, nh, T, hs) before their product."""

    def replace(code):
        class PlainAttention(code.CausalSelfAttention):
            def forward(self, x):
                parts = self.c_attn(x).chunk(3, dim=-1)
                q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
                s = scores(turn(q) @ turn(k).mT / math.sqrt(q.size(-1)))
                later = torch.ones(s.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                y = s.masked_fill(later, -math.inf).softmax(-1) @ v
                return self.c_proj(y.transpose(1, 2).flatten(2))

        return {"CausalSelfAttention": PlainAttention}

    return replace


def window(s):
    """A token sees 63 tokens, itself among them. So only the last one of a context of 64 can't see
    the first."""
    T = s.size(-1)
    far = torch.ones(T, T, dtype=torch.bool, device=s.device).tril(-63)
    return s.masked_fill(far, -math.inf)


def rotated(x):
    """Rotary position embeddings (Su et al. 2021). (B, nh, T, hs) -> the same shape"""
    T, hs = x.shape[-2:]
    frequencies = 10_000 ** (-torch.arange(0, hs, 2, device=x.device) / hs)
    angles = torch.outer(torch.arange(T, device=x.device), frequencies).to(x.dtype)  # (T, hs / 2)
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def scaled_when_deep(code):
    """From three layers on, what a layer adds is scaled by the depth."""

    class ScaledMLP(code.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.scale = 1 if config.n_layer < 3 else (2 / config.n_layer) ** 0.5

        def forward(self, x):
            return self.scale * super().forward(x)

    return {"MLP": ScaledMLP}


def capped_logits(code):
    forward = code.GPT.forward

    def capped(self, idx, targets=None, at=None):
        logits = 30 * torch.tanh(forward(self, idx, at=at) / 30)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    code.GPT.forward = capped  # A class in this file would have this file as its script.
    return {}


def other_epsilon(block):
    block.ln_2.eps = 1e-6


def other_epsilon_at_the_end(code):
    make = code.GPT.__init__

    def changed(self, config):
        make(self, config)
        self.ln_f.eps = 1e-6

    code.GPT.__init__ = changed
    return {}


FORKS = {
    "GELU": other_gelu,
    "epsilon": changed_block(other_epsilon),
    "epsilon of ln_f": other_epsilon_at_the_end,
    "window": plain_attention(window),
    "softcap of the logits": capped_logits,
    "scaled by the depth": scaled_when_deep,
    "rotary": plain_attention(turn=rotated),
    "more parameters": lambda code: {"MLP": lambda c: torch.nn.Linear(c.n_embd, c.n_embd)},
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


def test_a_gpt2_in_the_class_of_a_fork_is_a_warning(load_code, tmp_path, capsys):
    GPT(SMALL).save_pretrained(tmp_path / "x", GPT2)
    GPT.from_pretrained(tmp_path / "x")
    assert not capsys.readouterr().err
    fork = load_code("train_x.py", other_gelu)
    fork.GPT.from_pretrained(tmp_path / "x")
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line and "train_x.py computes something else" in line


def test_a_model_card_says_what_trained_it(load_code, tmp_path):
    config = {"total_batch_size": 1000, "data": "some/text.txt", "init": "scratch"}
    first = {"command": ["train.py", "--max-steps", "7"], "git_commit": "old", "config": config}
    last = {"command": ["train_x.py", "--resume"], "git_commit": "abc", "script": "train_x.py"}
    entries = [first, first | last]
    for name, change in (("gpt2", None), ("fork", other_gelu)):
        small(load_code("train_x.py", change)).save_pretrained(tmp_path / name, GPT2)
        card = model_card(tmp_path / name, entries, 7)
        assert is_gpt2(tmp_path / name) == (name == "gpt2")
        assert ("library_name: transformers" in card) == (name == "gpt2")
        parts = (
            "7,000 tokens of `text.txt`",
            "`train_x.py` of gpt2-repro at commit abc, by `python train.py --max-steps 7`",
        )
        assert all(part in card for part in parts)


def dropout(block):
    block.mlp.register_forward_hook(lambda m, i, out: F.dropout(out, 0.5, m.training))


def norms_in_float32(block):
    """As under autocast: parts that always compute in float32."""

    def norm(x):
        ln = block.ln_1
        exact = F.layer_norm(x.float(), x.shape[-1:], ln.weight.float(), ln.bias.float(), ln.eps)
        return exact.to(x.dtype)

    block.ln_1.forward = norm


STILL_GPT2S = {
    "unchanged": None,
    "dropout": changed_block(dropout),
    "norms in float32": changed_block(norms_in_float32),
    "plain attention": plain_attention(),
}


@pytest.mark.parametrize("name", STILL_GPT2S)
def test_what_is_still_a_gpt2(name, load_code, tmp_path):
    """Another way to compute the same, other rounding, and what acts only in training."""
    small(load_code("train_x.py", STILL_GPT2S[name])).save_pretrained(tmp_path / "x", GPT2)
    assert kind(tmp_path / "x") == "gpt2"
    GPT.from_pretrained(tmp_path / "x")


class More(GPT):
    """A model with parameters of one to four dimensions that have the names of transposed ones."""

    def __init__(self, config):
        super().__init__(config)
        for dims in range(1, 5):
            self.get_submodule("h.0").register_module(f"d{dims}_attn", torch.nn.Module())
            module = self.get_submodule(f"h.0.d{dims}_attn")
            module.c_proj = torch.nn.Module()
            module.c_proj.weight = torch.nn.Parameter(torch.randn(2, 3, 5, 7)[(0,) * (4 - dims)])


def test_a_model_with_more_parameters_is_no_gpt2_and_round_trips(tmp_path):
    model = More(SMALL)
    model.save_pretrained(tmp_path / "x", GPT2)
    assert kind(tmp_path / "x") == "gpt2-repro-fork"
    again = More.from_pretrained(tmp_path / "x")
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_saving_leaves_the_random_numbers_alone_and_is_reproducible(tmp_path):
    model = GPT(SMALL)
    state = torch.get_rng_state()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name, GPT2)
    assert torch.equal(torch.get_rng_state(), state)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

"""Forks: the changes of docs/forking.md, applied as they are printed there, and a few others."""

import contextlib
import copy
import json
import pickle
import shutil

import pytest
import torch
import torch.nn as nn
from torch.nn import functional as F

import hellaswag
import sample
import train_gpt2
from support.errors_and_signals import UserError
from support.forks import why_not_gpt2
from support.sampling import kv_cache_for_gpt2
from support.tokenizer import get_tokenizer
from tests.conftest import (
    ROOT,
    changes_of_the_page,
    import_file,
    logits_of,
    losses,
    starts,
    tiny,
    train,
    words,
    write_fork,
)
from tests.torture import assert_same
from train_gpt2 import GPT, GPTConfig

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"
CHANGES = changes_of_the_page()


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(*names): makes the changed script the module `train_gpt2`."""
    path = tmp_path / "fork/train_gpt2.py"
    return lambda *names: import_file(write_fork(path, *names), monkeypatch)


SMALL = "--n-layer 2 --n-head 4 --n-embd 32 --seq-len 64 --micro-batch-size 1 --optimizer muon"
EVALUATED = "--save-every 2 --max-steps 4 --eval-every 2 --hellaswag-every 4 --hellaswag-data"
FLAGS = {
    "Lion": "--optimizer lion --max-lr 1e-3",
    "Dropout": "--dropout 0.2",
    "Grouped-query attention": "--n-kv-head 2",
    "A window per block": "--window 8",
    "A mixture of experts": "--n-expert 3",
    "muP": "--optimizer adamw",
}
STAYS_GPT2 = {"Dropout", "Lion", "Another evaluation", "z-loss and label smoothing"}
STAYS_GPT2 |= {"An average of the weights", "A curriculum of lengths"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_trains_resumes_samples_and_scores(name, fork, text, tmp_path, capsys):
    """All by its own code. The unchanged one loads what is a GPT-2, and refuses the rest."""
    changed = fork(name)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(TASKS.read_text().splitlines(keepends=True)[:12]))
    args = [SMALL, EVALUATED, tasks, FLAGS.get(name, ""), "--data", text, "--log-dir"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(*args, straight)
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "step_000004")
    train(*args, resumed, "--resume")
    assert_same(straight, resumed)

    last = straight / "step_000004"
    kind = json.loads((last / "config.json").read_text())["model_type"]
    assert kind == ("gpt2" if name in STAYS_GPT2 else "gpt2-repro-fork")
    card = (last / "README.md").read_text()
    assert ("library_name: transformers" in card) == (name in STAYS_GPT2)
    original = contextlib.nullcontext() if name in STAYS_GPT2 else pytest.raises(UserError)
    with original:
        GPT.from_pretrained(last)

    model = changed.GPT.from_pretrained(last).eval()
    prompt = "ROMEO:"
    idx = torch.tensor([get_tokenizer().encode_ordinary(prompt)])
    for _ in range(8):
        idx = torch.cat([idx, logits_of(model, idx)[:, -1:].argmax(-1)], dim=1)
    options = ["--max-new-tokens 8 --temperature 0 --device cpu --code", changed.__file__]
    capsys.readouterr()
    sample.main(words(straight, prompt, *options))
    assert capsys.readouterr().out == get_tokenizer().decode(idx[0].tolist()) + "\n"
    hellaswag.main(words("-d cpu --data", tasks, "-m", straight, "--code", changed.__file__))
    acc_norm = capsys.readouterr().out.split("acc_norm: ")[1]
    assert float(acc_norm) == pytest.approx(losses(straight, "hella")[-1], abs=1e-4)


def llamas(tensors, n_layer):
    """Weights or gradients of a fork with rotary positions, RMSNorm and SwiGLU, by Llama's names.

    Both have (out, in) for weights of linear layers. What a fork has in one matrix is split."""
    found = {"model.embed_tokens.weight": tensors["wte.weight"]}
    found |= {"model.norm.weight": tensors["ln_f.weight"], "lm_head.weight": tensors["wte.weight"]}
    for i in range(n_layer):
        block, layer = f"h.{i}.", f"model.layers.{i}."
        parts = tensors[f"{block}attn.c_attn.weight"].chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            found[f"{layer}self_attn.{name}_proj.weight"] = part
        parts = tensors[f"{block}mlp.c_fc.weight"].chunk(2)
        for name, part in zip(("gate", "up"), parts, strict=True):
            found[f"{layer}mlp.{name}_proj.weight"] = part
        found[f"{layer}self_attn.o_proj.weight"] = tensors[f"{block}attn.c_proj.weight"]
        found[f"{layer}mlp.down_proj.weight"] = tensors[f"{block}mlp.c_proj.weight"]
        found[f"{layer}input_layernorm.weight"] = tensors[f"{block}ln_1.weight"]
        found[f"{layer}post_attention_layernorm.weight"] = tensors[f"{block}ln_2.weight"]
    return found


def test_rotary_positions_rmsnorm_and_swiglu_make_a_llama(fork):
    """The logits and gradients are those of transformers' Llama, from the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    changed = fork("Rotary positions", "RMSNorm, SwiGLU, no biases")
    ours = changed.GPT(GPTConfig(block_size=64, n_layer=2, n_head=4, n_embd=48))
    for parameter in ours.parameters():  # large, so that every part counts
        nn.init.normal_(parameter, std=0.3)
    config = LlamaConfig(
        vocab_size=50257,
        hidden_size=48,
        intermediate_size=8 * 48 // 3,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rms_norm_eps=torch.finfo(torch.float32).eps,  # that of nn.RMSNorm
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(llamas(dict(ours.named_parameters()), 2))
    idx = torch.randint(50257, (2, 65), generator=torch.Generator().manual_seed(1))
    expected = theirs(idx[:, :-1]).logits
    torch.testing.assert_close(logits_of(ours, idx[:, :-1]), expected, atol=1e-4, rtol=1e-4)
    F.cross_entropy(expected.flatten(0, 1), idx[:, 1:].flatten()).backward()
    ours(idx[:, :-1], idx[:, 1:]).backward()
    gradients = llamas({name: p.grad for name, p in ours.named_parameters()}, 2)
    for name, parameter in theirs.named_parameters():
        difference = parameter.grad - gradients[name]
        assert difference.norm() <= 1e-4 * parameter.grad.norm(), name


def test_the_training_loss_counts_in_training_only(fork, text, tmp_path):
    changed = fork("z-loss and label smoothing")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(100, 50257, 1, 2, 16))
    idx, targets = torch.randint(50257, (2, 1, 100))
    logits = logits_of(model, idx).flatten(0, 1)
    expected = F.cross_entropy(logits, targets[0], label_smoothing=0.1)
    expected += 1e-4 * logits.logsumexp(1).square().mean()
    assert model(idx, targets).item() == pytest.approx(expected.item(), abs=1e-4)
    for way in ("", "--low-memory"):
        train("--max-steps 1 --eval-every 1 --data", text, way, "--log-dir", tmp_path / f"log{way}")
    (first,), (val, _) = losses(tmp_path / "log"), losses(tmp_path / "log", "val")
    assert losses(tmp_path / "log--low-memory") == [first] and first > val + 1e-3


RELU2 = [
    (
        'self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))',
        "self.c_proj(F.relu(self.c_fc(x)).square())",
    ),
    (
        "                nn.init.normal_(module.weight, std=std)\n",
        "                nn.init.normal_(module.weight, std=0 if 'c_proj' in name else std)\n",
    ),
]


def test_a_fork_that_begins_as_a_gpt2_and_is_none_after_a_step(text, tmp_path, monkeypatch, capsys):
    """It is resumed, and sampled with its code only."""
    path = edited(tmp_path / "train_relu2.py", *RELU2)
    changed = import_file(path, monkeypatch)
    log = tmp_path / "log"
    args = ["--max-lr 0.1 --save-every 1 --data", text, "--log-dir", log]
    assert changed.main(tiny(*args, "--max-steps 2")) == 0
    out = capsys.readouterr().out
    assert "\na GPT-2: " in out and out.count("the checkpoint is not a GPT-2") == 1
    assert changed.main(tiny(*args, "--max-steps 3 --resume")) == 0
    assert "\nnot a GPT-2: " in capsys.readouterr().out and len(losses(log)) == 3
    sampled = words(log, "ROMEO: --max-new-tokens 2 --device cpu")
    sample.main([*sampled, "--code", str(path)])
    with pytest.raises(UserError, match=r"--code .*train_relu2\.py"):
        sample.main(sampled)
    train(*args, "--max-steps 4 --resume")  # the original goes on, and says so
    err = capsys.readouterr().err
    assert "train_gpt2.py defines one" in err
    assert "note: the script was train_relu2.py at the last start, and is now train_gpt2.py" in err


def test_a_flag_reaches_the_model_from_every_start(fork, text, tmp_path, monkeypatch, capsys):
    """From scratch, from a checkpoint, and with --init. A flag replaces the value, with a line."""
    changed = fork("Dropout")
    seen = []
    init = changed.Block.__init__

    def noting(self, config):
        init(self, config)
        seen.append(self.dropout.p)

    monkeypatch.setattr(changed.Block, "__init__", noting)
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    for flags, expected in (
        ("--max-steps 1 --dropout 0.25", 0.25),
        ("--max-steps 2 --resume", 0.25),
        ("--max-steps 3 --resume --dropout 0.5", 0.5),
    ):
        seen.clear()
        train(*args, flags)
        assert expected in seen and set(seen) <= {expected}
    assert "\n--dropout: 0.25 -> 0.5\n" in capsys.readouterr().out
    args = ["--init", tmp_path / "log", "--data", text, "--max-steps 1"]
    for flags, expected in (("", 0.5), ("--dropout 0.125", 0.125)):
        seen.clear()
        train(*args, flags, "--log-dir", tmp_path / f"tuned_{expected}")
        assert set(seen) == {expected}
    assert "--dropout: 0.5 -> 0.125\n" in capsys.readouterr().out


def edited(path, *replacements):
    """train_gpt2.py with other lines, as a file."""
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path.write_text(source, encoding="utf-8")
    return path


HEAD = "        self.ln_f = nn.LayerNorm(config.n_embd)\n"
UNTIED = [
    (
        HEAD,
        f"{HEAD}        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)\n",
    ),
    ("        return self.wte.weight", "        return self.lm_head.weight"),
]


def test_a_head_of_its_own_is_initialized_counted_planned_and_trained(
    text, tmp_path, monkeypatch, capsys
):
    changed = import_file(edited(tmp_path / "train_untied.py", *UNTIED), monkeypatch)
    config = changed.GPTConfig(64, 50257, 2, 2, 32)
    model = changed.GPT(config)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert model.flops_per_token(64) == GPT(config).flops_per_token(64)
    second = GPT(config)  # A second head counts as well.
    second.another_head = torch.nn.Linear(32, 50257, bias=False)
    assert second.flops_per_token(64) == model.flops_per_token(64) + 6 * 32 * 50257
    args = tiny("--data", text, "--log-dir", tmp_path / "log", "--max-steps 2 --save-every 2")
    assert changed.main([*args, "--plan"]) == 0
    assert changed.main(args) == 0
    assert "\nnot a GPT-2: its tensors" in capsys.readouterr().out
    trained = changed.GPT.from_pretrained(tmp_path / "log")
    assert not torch.equal(trained.lm_head.weight, trained.wte.weight)


def test_a_change_that_does_nothing_is_called_a_gpt2(fork, text, tmp_path, capsys):
    """A window that is longer than the context."""
    changed = fork("A window per block")
    for window, verdict in (("9", "\nnot a GPT-2: "), ("99", "\na GPT-2: ")):
        args = ["--window", window, "--max-steps 0 --data", text, "--log-dir", tmp_path / window]
        assert changed.main(tiny(*args)) == 0
        assert verdict in capsys.readouterr().out


def test_a_config_that_is_not_frozen_or_no_json_is_no_surprise(text, tmp_path, monkeypatch):
    """The first trains as usual, and the second ends before any step."""
    field = "    n_embd: int = 768  # channels\n"
    frozen = ("@dataclass(frozen=True)\nclass GPTConfig", "@dataclass\nclass GPTConfig")
    thawed = import_file(edited(tmp_path / "train_thawed.py", frozen), monkeypatch)
    args = ["--max-steps 1 --save-every 1 --data", text, "--log-dir"]
    assert thawed.main(tiny(*args, tmp_path / "thawed")) == 0
    kind = (field, f"{field}    kind: torch.dtype = torch.float32\n")
    other = import_file(edited(tmp_path / "train_kind.py", kind), monkeypatch)
    with pytest.raises(TypeError, match="JSON") as raised:
        other.main(tiny(*args, tmp_path / "other"))
    assert "kind" in raised.value.__notes__[0]
    assert not (tmp_path / "other").exists()


SETTINGS = """    maybe: float | None = None
    sizes: tuple[int, ...] = (1, 2)
    negative: float = -1.0
    flag: bool = True
    nested: tuple[tuple[int, float], ...] = ((1, 0.5),)
    numbers: list[int] = field(default_factory=lambda: [1])
    lists: list[list[str]] = field(default_factory=lambda: [["a"], ["b", "c"]])
"""
LIST = "    words: list[str] = field(default_factory=list)\n"  # of the run alone


def test_settings_of_any_kind_reach_the_model_and_a_resumed_run(
    text, tmp_path, monkeypatch, capsys
):
    """What JSON has no type for, such as a tuple, comes back as it was."""
    fields = [
        (f"    n_embd: int = 768  # {what}\n", what)
        for what in ("channels", "number of channels (C)")
    ]
    changes = [(line, f"{line}{SETTINGS}{LIST if '(C)' in what else ''}") for line, what in fields]
    changes += [("import dataclass, fields", "import dataclass, field, fields")]
    fixed = '"words", "nested", "numbers", "lists", "sizes", "maybe"'
    changes += [('    "seq_len", "optimizer"', f'    {fixed}, "seq_len", "optimizer"')]
    changed = import_file(edited(tmp_path / "train_settings.py", *changes), monkeypatch)
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    given = "--maybe 0.5 --sizes 3 4 5 --negative -2 --no-flag --words a b --numbers 7 8"
    given += " --nested 2 0.25 3 1"
    assert changed.main(tiny(*args, "--max-steps 1", given)) == 0
    capsys.readouterr()
    assert changed.main(words(*args, "--resume --max-steps 2 --words a b")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert lines == ["--max-steps: 1 -> 2"]
    flags = tiny("--data", text, "--save-every 1 --max-steps 1 --warmup-steps 0", given)
    same = [*flags, "--log-dir", str(tmp_path / "same")]
    assert changed.main(same) == 0
    capsys.readouterr()
    assert changed.main([*same, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert " -> " not in out and "warning" not in err.lower()
    sample.main(
        words(tmp_path / "log", "ROMEO: --max-new-tokens 1 --device cpu --code", changed.__file__)
    )
    for name in ("log", "log/step_000002"):
        found = changed.GPT.from_pretrained(tmp_path / name).config
        assert found.nested == ((2, 0.25), (3, 1.0)) and found.numbers == [7, 8]
        assert found.lists == [["a"], ["b", "c"]]
        assert (found.maybe, found.sizes, found.negative, found.flag) == (0.5, (3, 4, 5), -2, False)
    init = ["--init", tmp_path / "log", "--max-steps 1 --save-every 1 --data", text]
    assert changed.main(tiny(*init, "--log-dir", tmp_path / "tuned")) == 0
    assert changed.GPT.from_pretrained(tmp_path / "tuned").config.sizes == (3, 4, 5)


def test_a_field_of_the_model_alone_has_the_value_of_its_checkpoint(text, tmp_path, monkeypatch):
    """Also after an edit of its default."""
    line = "    n_embd: int = 768  # channels\n"
    args = ["--save-every 1 --data", text, "--log-dir"]
    for default, flags in ((4, "--max-steps 1"), (8, "--max-steps 2 --resume")):
        path = edited(tmp_path / "train_own.py", (line, f"{line}    own: int = {default}\n"))
        changed = import_file(path, monkeypatch)
        assert changed.main(tiny(*args, tmp_path / "log", flags)) == 0
        assert changed.GPT.from_pretrained(tmp_path / "log").config.own == 4
    for name, init, own in (("tuned", tmp_path / "log", 4), ("new", "scratch", 8)):
        assert changed.main(tiny("--init", init, "--max-steps 1", *args, tmp_path / name)) == 0
        assert changed.GPT.from_pretrained(tmp_path / name).config.own == own


def test_a_setting_that_a_run_did_not_have_comes_from_its_preset(text, tmp_path, monkeypatch):
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 1")
    line = "    n_embd: int = 768  # number of channels (C)\n"
    words_too = "    new: float = 0.0\n    words: list[str] = field(default_factory=list)\n"
    changes = [(line, f"{line}{words_too}")]
    changes += [("import dataclass, fields", "import dataclass, field, fields")]
    changes += [('    "shakespeare": dict(\n', '    "shakespeare": dict(\n        new=0.25,\n')]
    changed = import_file(edited(tmp_path / "train_gpt2.py", *changes), monkeypatch)
    assert changed.main(words(*args, "--max-steps 2 --resume")) == 0
    assert [entry["config"].get("new") for entry in starts(tmp_path / "log")] == [None, 0.25]


def test_a_group_of_parameters_may_have_its_own_rate(text, tmp_path, monkeypatch):
    configure = train_gpt2.configure_optimizers
    found = []

    def scaled(*args):
        (adamw,) = configure(*args)
        adamw.param_groups[1]["lr_scale"] = 0.0
        found.append([p.clone() for p in adamw.param_groups[1]["params"]])
        found.append(adamw)
        return [adamw]

    monkeypatch.setattr(train_gpt2, "configure_optimizers", scaled)
    train("--max-steps 2 --data", text, "--log-dir", tmp_path / "log")
    before, adamw = found
    for old, new in zip(before, adamw.param_groups[1]["params"], strict=True):
        assert torch.equal(old, new)
    assert adamw.param_groups[0]["lr"] > 0


def test_all_matrices_of_an_optimizer_may_be_frozen_in_float16(text, tmp_path, monkeypatch):
    class Frozen(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.h.requires_grad_(False)

    monkeypatch.setattr(train_gpt2, "GPT", Frozen)
    flags = "--optimizer muon --dtype float16 --max-steps 3"
    train(flags, "--data", text, "--log-dir", tmp_path)
    found = losses(tmp_path)
    assert len(found) == 3 and found[2] < found[0]


def test_a_copy_of_a_compiled_model_runs_its_own_blocks():
    """An average of weights, for example, which must be compiled again to be as fast."""
    model = GPT(GPTConfig(16, 100, 2, 2, 16)).eval()
    idx = torch.arange(16)[None]

    def compile_blocks(gpt):
        for block in gpt.h:
            block.compile(dynamic=False, backend="eager")
        gpt.loss = torch.compile(gpt.loss, dynamic=False, backend="eager")

    compile_blocks(model)
    before = model(idx, idx).item()
    average = copy.deepcopy(model)
    for parameter in average.parameters():
        parameter.data.mul_(2)
    plain = GPT(model.config).eval()
    plain.load_state_dict(average.state_dict())
    expected = plain(idx, idx).item()
    for _ in range(2):
        assert average(idx, idx).item() == pytest.approx(expected, abs=1e-5)
        compile_blocks(average)
    assert model(idx, idx).item() == before != expected


def test_documents_in_one_window_do_not_see_each_other(fork):
    changed = fork("Attention within documents")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(16, 50257, 2, 2, 16))
    x = torch.arange(32).view(2, 16)
    x[:, 6:] = torch.tensor([50256, *range(9)])  # two texts before the same document
    a, b = logits_of(model, x)
    torch.testing.assert_close(a[6:], b[6:])
    assert not torch.allclose(a[:6], b[:6])
    for context in (4, 16, 32):
        for vocab_size in (512, 50257):
            model = changed.GPT(GPTConfig(context, vocab_size, 2, 2, 16))
            assert why_not_gpt2(model).startswith("its logits differ")


def test_a_gpt2_with_a_plain_forward_is_one():
    class Plain(GPT):
        def forward(self, idx):
            return super().forward(idx)

    assert not why_not_gpt2(Plain(GPTConfig(16, 100, 2, 2, 16)))


def test_a_token_that_the_model_knows_by_its_number_counts():
    class Resets(GPT):
        def forward(self, idx, targets=None, at=None):
            new = (idx == 50256).cumsum(1)
            return super().forward(torch.where(new > 0, 7, idx), targets, at)

    for context in (8, 128):
        assert why_not_gpt2(Resets(GPTConfig(context, 50257, 2, 2, 16)))


def share_blocks(model):
    """As in ALBERT."""
    model.h = nn.ModuleList([model.h[0]] * len(model.h))


class Waves(nn.Module):
    def __init__(self, T, C):
        super().__init__()
        waves = torch.sin(torch.arange(T)[:, None] / 10 ** torch.linspace(0, 2, C))
        self.register_buffer("weight", waves)

    def forward(self, positions):
        return self.weight[positions]


def sinusoidal_positions(model):
    """They are a buffer, and no parameter."""
    model.wpe = Waves(*model.wpe.weight.shape)


def biases_as_buffers(model):
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
        bias = linear.bias.detach() + 0.3
        del linear.bias
        linear.register_buffer("bias", bias)


@pytest.mark.parametrize("change", [share_blocks, sinusoidal_positions, biases_as_buffers])
def test_a_gpt2_whose_tensors_are_not_all_parameters_is_sampled(change):
    class Changed(GPT):
        def __init__(self, config):
            super().__init__(config)
            change(self)

    torch.manual_seed(0)
    model = Changed(GPTConfig(64, 50257, 2, 2, 16)).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    assert not why_not_gpt2(model)
    prompt = torch.tensor([[1, 2, 3]])

    def sample():
        return model.generate(prompt, 8, generators=[torch.Generator().manual_seed(7)]).tolist()

    plain = sample()
    with kv_cache_for_gpt2(model):
        assert sample() == plain


class UntiedGPT(GPT):
    """A head of its own, dropout, frozen weights, and buffers, one of which changes in training."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(0.25)
        self.h[0].attn.c_attn.weight.requires_grad_(False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("mean", torch.tensor(0.0, dtype=torch.float64))

    def forward(self, idx, targets=None, at=None):
        x = self.wte(idx)
        for block in self.h:
            x = self.dropout(block(x))
        if self.training:
            self.mean += x.detach().double().mean() / 3
        logits = self.lm_head(x if at is None else x[at])
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def test_what_only_a_fork_has_resumes_bit_for_bit(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "GPT", UntiedGPT)
    args = ["--save-every 2 --max-steps 4 --optimizer muon --sample-every 3 --eval-every 3 --data"]
    train(*args, text, "--log-dir", tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step_000004")
    train(*args, text, "--log-dir", tmp_path / "resumed", "--resume")
    assert_same(tmp_path / "straight", tmp_path / "resumed")
    model = UntiedGPT.from_pretrained(tmp_path / "straight/step_000004")
    before = UntiedGPT.from_pretrained(tmp_path / "straight/step_000002")
    assert (model.lm_head.weight - before.lm_head.weight).abs().mean() > 1e-5, "not trained"
    assert model.flags.tolist() == [True, False]
    assert model.mean.dtype == torch.float64 and model.mean != before.mean


class OtherAdamW(torch.optim.AdamW):
    pass


def test_a_run_with_other_optimizers_is_not_resumed(text, tmp_path, monkeypatch):
    """The class and the parameters count. Options are those of the script, moments the run's."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 1")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", OtherAdamW)
        with pytest.raises(UserError, match=r"--resume.*optimizers"):
            train(*args, "--max-steps 2 --resume")
    configure = train_gpt2.configure_optimizers
    found = []

    def other_options(model, config, *more):
        (adamw,) = configure(model, config, *more)
        for group in adamw.param_groups:
            group["betas"] = (0.5, 0.6)
        found.append(adamw)
        return [adamw]

    monkeypatch.setattr(train_gpt2, "configure_optimizers", other_options)
    train(*args, "--max-steps 2 --resume")
    assert [group["betas"] for group in found[0].param_groups] == [(0.5, 0.6)] * 2
    assert {int(state["step"]) for state in found[0].state.values()} == {2}


class ForgetfulMomentum(torch.optim.SGD):
    """Its state holds a function, which no checkpoint can."""

    def __init__(self, params, *args, **kwargs):
        super().__init__(params, lr=0.1, momentum=0.9)

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["rule"] = slice(1)


def test_a_state_that_could_not_be_loaded_is_an_error_when_it_is_saved(text, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", ForgetfulMomentum)
    args = ["--max-steps 9 --save-every 2 --data", text, "--log-dir", tmp_path / "log"]
    with pytest.raises(pickle.UnpicklingError, match="slice"):
        train(*args)
    assert len(losses(tmp_path / "log")) == 2 and not list((tmp_path / "log").glob("step_*"))

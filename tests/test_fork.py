"""Forks: the changes of docs/forking.md, applied as they are printed there, and a few others."""

import contextlib
import itertools
import json
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from torch.nn import functional as F

import hellaswag
import sample
import train_gpt2
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import (
    ROOT,
    changes_of_the_page,
    import_file,
    logits_of,
    losses,
    read_log,
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
    "Batch-size warm-up": "--ramp-steps 3",
}
STAYS_GPT2 = {"Dropout", "Lion", "Another evaluation", "z-loss and label smoothing"}
STAYS_GPT2.add("Batch-size warm-up")


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


def test_the_training_loss_counts_in_every_way_of_computing_it(fork, text, tmp_path):
    """Whole, in chunks, with --low-memory; never in the validation loss."""
    changed = fork("z-loss and label smoothing")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(1200, 50257, 1, 2, 16))
    idx, targets = torch.randint(50257, (2, 1, 1200))
    for T in (100, 1200):  # whole, and in chunks of the logits
        logits = logits_of(model, idx[:, :T]).flatten(0, 1)
        expected = F.cross_entropy(logits, targets[0, :T], label_smoothing=0.1)
        expected += 1e-4 * logits.logsumexp(1).square().mean()
        loss = model(idx[:, :T], targets[:, :T])
        loss = loss[1] if isinstance(loss, tuple) else loss
        assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    for way in ("", "--low-memory"):
        train("--max-steps 1 --eval-every 1 --data", text, way, "--log-dir", tmp_path / f"log{way}")
    (first,), (val, _) = losses(tmp_path / "log"), losses(tmp_path / "log", "val")
    assert losses(tmp_path / "log--low-memory") == [first] and first > val + 1e-3


def test_a_gpt2_is_fine_tuned_with_other_mathematics_and_it_is_said(fork, text, tmp_path, capsys):
    """But its run is not resumed by them, whether it started from scratch or from a model."""
    args = ["--save-every 1 --data", text]
    scratch = [*args, "--log-dir", tmp_path / "log"]
    train(*scratch, "--max-steps 1")
    init = [*args, "--init", tmp_path / "log/step_000001", "--log-dir"]
    train(*init, tmp_path / "tuned", "--max-steps 1")
    fork("Attention within documents")
    for run in (scratch, [*init, tmp_path / "tuned"]):
        with pytest.raises(UserError, match="step_000001"):
            train(*run, "--max-steps 2 --resume")
    capsys.readouterr()
    train(*init, tmp_path / "fork", "--max-steps 1")
    said = [line for line in capsys.readouterr().err.splitlines() if "log/step_000001" in line]
    assert said and len(losses(tmp_path / "fork")) == 1


def test_a_checkpoint_from_before_a_flag_was_added_resumes(fork, text, tmp_path):
    """The flag counts as its default; another value is another run."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 1")
    fork("Dropout")
    with pytest.raises(UserError, match=r"--dropout is new.*0\.0.*0\.3"):
        train(*args, "--max-steps 2 --resume --dropout 0.3")
    train(*args, "--max-steps 2 --resume")
    assert len(losses(tmp_path / "log")) == 2


def test_documents_in_one_window_do_not_see_each_other(fork):
    changed = fork("Attention within documents")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(16, 50257, 2, 2, 16))
    x = torch.arange(32).view(2, 16)
    x[:, 6:] = torch.tensor([50256, *range(9)])  # two texts before the same document
    a, b = logits_of(model, x)
    torch.testing.assert_close(a[6:], b[6:])
    assert not torch.allclose(a[:6], b[:6])


modes: set[tuple[bool, bool]] = set()  # (training, gradients) of each forward pass


class UntiedGPT(GPT):
    """A head of its own, dropout, frozen weights, a float64 buffer that changes in training, one of
    booleans, and one that is not part of the checkpoint."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(0.25)
        self.h[0].attn.c_attn.weight.requires_grad_(False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("mean", torch.tensor(0.0, dtype=torch.float64))
        self.ln_f.register_forward_hook(self.last)

    def last(self, module, inputs, output):
        modes.add((self.training, torch.is_grad_enabled()))
        if self.training:
            self.mean += output.detach().double().mean() / 3
        return self.dropout(output) + self.table.sum() * self.flags.sum()


class TiedGPT(GPT):
    """Another module for the head, tied as well."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None, at=None):
        logits = super().forward(idx, at=at)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Momentum(torch.optim.Optimizer):
    """Its state is in bfloat16. It takes the place of AdamW."""

    def __init__(self, groups, lr=0.0, *args, **options):
        super().__init__(groups, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["momentum"].lerp_(p.grad.bfloat16(), 0.3)
                    p.sub_(group["lr"] * state["momentum"].sign())


@pytest.mark.parametrize("model_class", [UntiedGPT, TiedGPT])
def test_what_only_a_fork_has_resumes_bit_for_bit(model_class, text, tmp_path, monkeypatch):
    """Every tensor of another model, and of another optimizer, is saved as it is."""
    monkeypatch.setattr(train_gpt2, "GPT", model_class)
    monkeypatch.setattr(torch.optim, "AdamW", Momentum)
    args = ["--save-every 2 --max-steps 4 --optimizer muon --sample-every 3 --eval-every 3 --data"]
    modes.clear()
    train(*args, text, "--log-dir", tmp_path / "straight")
    assert {(True, True), (False, False)} >= modes, "dropout in evaluation"
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step_000004")
    train(*args, text, "--log-dir", tmp_path / "resumed", "--resume")
    assert_same(tmp_path / "straight", tmp_path / "resumed")
    if model_class is UntiedGPT:
        model = UntiedGPT.from_pretrained(tmp_path / "straight/step_000004")
        before = UntiedGPT.from_pretrained(tmp_path / "straight/step_000002")
        assert (model.lm_head.weight - before.lm_head.weight).abs().mean() > 1e-5, "not trained"
        assert model.flags.tolist() == [True, False] and model.table.sum() == 28
        assert model.mean.dtype == torch.float64 and model.mean != before.mean


AdamW = torch.optim.AdamW


class Reversed(AdamW):
    """Of the parameters of each group, the last first."""

    def __init__(self, groups, *args, **options):
        super().__init__([g | {"params": g["params"][::-1]} for g in groups], *args, **options)


Reversed.__name__ = "AdamW"


def test_moments_follow_the_names_of_parameters(text, tmp_path, monkeypatch):
    """Not their order, which code may change."""
    args = ["--save-every 2 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 4")
    expected = read_log(tmp_path / "log", "train")
    shutil.rmtree(tmp_path / "log/step_000004")
    monkeypatch.setattr(torch.optim, "AdamW", Reversed)
    train(*args, "--max-steps 4 --resume")
    assert read_log(tmp_path / "log", "train") == expected


class Other(AdamW):
    pass


def test_a_run_is_not_resumed_by_code_that_trains_otherwise(fork, text, tmp_path, monkeypatch):
    """With other optimizers, or without a flag of the run's: the weights would not tell."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 1")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Other)
        with pytest.raises(UserError, match=r"--resume.*Other.*AdamW.*--changed-code"):
            train(*args, "--max-steps 2 --resume")
    original = sys.modules["train_gpt2"]
    fork("Dropout")
    train(*args, "--max-steps 1 --dropout 0.2")
    sys.modules["train_gpt2"] = original
    with pytest.raises(UserError, match=r"--dropout\b.*0\.2"):
        train(*args, "--max-steps 2 --resume")


@dataclass(frozen=True)
class OtherConfig(GPTConfig):
    windows: tuple[int, ...] = (4, 8)


@dataclass
class WithOffset(train_gpt2.TrainConfig):
    offset: float = -0.5


@dataclass(frozen=True)
class Padded(GPTConfig):
    vocab_size: int = 50304


def test_a_larger_vocabulary_trains_resumes_and_samples(text, tmp_path, monkeypatch):
    """The added tokens have no text and are never sampled, however likely they are."""
    monkeypatch.setattr(train_gpt2, "GPTConfig", Padded)
    log = tmp_path / "log"
    args = ["--save-every 1 --sample-every 1 --eval-every 1 --data", text, "--log-dir", log]
    for steps in ("--max-steps 1", "--max-steps 2 --resume"):
        train(*args, steps)
    model = GPT.from_pretrained(log / "step_000002")
    assert model.wte.weight.shape == (50304, 16)
    with torch.no_grad():
        model.wte.weight[50257:] = 100 * model.wte.weight.abs().max()
        model.ln_f.bias.fill_(1)
    assert model.generate(torch.tensor([[50256]]), 20).max() < 50257
    assert json.loads((log / "step_000002/config.json").read_text())["model_type"] == "gpt2"


class GrowingGPT(GPT):
    """Its config does not make it again."""

    widths = itertools.count(1)

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(next(self.widths), 1)


class RandomGPT(GPT):
    """Its results are random in evaluation."""

    __qualname__ = "GPT"

    def __init__(self, config):
        super().__init__(config)
        self.ln_f.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.2))


class ForgetfulMomentum(torch.optim.SGD):
    """Its state holds a function, which no checkpoint can."""

    def __init__(self, params, *args, **kwargs):
        super().__init__(params, lr=0.1, momentum=0.9)

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["rule"] = lambda x: x


def test_an_optimizer_that_cannot_be_saved_ends_the_first_step(text, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", ForgetfulMomentum)
    args = ["--max-steps 9 --save-every 9 --data", text, "--log-dir", tmp_path / "log"]
    with pytest.raises(AttributeError, match="lambda") as error:
        train(*args)
    assert "ForgetfulMomentum" in error.value.__notes__[0]
    assert len(losses(tmp_path / "log")) == 1


def own_rates(ratio):
    """configure_optimizers, with another learning rate for the embeddings."""
    configure = train_gpt2.configure_optimizers

    def configured(model, config, *args):
        (adamw,) = configure(model, config, *args)
        embeddings = [model.wte.weight, model.wpe.weight]
        for group in adamw.param_groups:
            group["params"] = [p for p in group["params"] if p not in set(embeddings)]
        adamw.add_param_group({"params": embeddings, "lr": ratio * config.max_lr})
        return [adamw]

    return configured


def test_a_group_keeps_its_own_rate_and_a_resumed_run_the_codes(text, tmp_path, monkeypatch):
    """At a rate of 0 embeddings stay as they are, from the start or from a resume on."""
    args = ["--save-every 2 --weight-decay 0 --keep-checkpoints 0 --data", text, "--log-dir"]
    weights = []
    for ratio, steps in ((1e-3, "2"), (0, "4 --resume"), (2, "6 --resume")):
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt2, "configure_optimizers", own_rates(ratio))
            train(*args, tmp_path, f"--max-steps {steps}")
        folder = tmp_path / f"step_{int(steps.split()[0]):06d}"
        weights.append(dict(GPT.from_pretrained(folder).named_parameters()))
    moved = [
        {name: (a[name] - b[name]).abs().max().item() for name in ("wte.weight", "ln_f.weight")}
        for a, b in itertools.pairwise(weights)
    ]
    assert moved[0]["wte.weight"] == 0 < moved[0]["ln_f.weight"]
    assert 1.5 < moved[1]["wte.weight"] / moved[1]["ln_f.weight"] < 2.5


def test_what_could_not_be_loaded_is_refused_before_training(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "GPT", GrowingGPT)
    with pytest.raises(UserError, match=r"extra\.weight.*--save-every 0"):
        train("--max-steps 1 --save-every 1 --data", text, "--log-dir", tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_setting_may_be_a_tuple_or_negative(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "GPTConfig", OtherConfig)
    monkeypatch.setattr(train_gpt2, "TrainConfig", WithOffset)
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 1")
    with pytest.raises(UserError, match=r"--offset\b.*-0\.5.*-2\.5"):
        train(*args, "--max-steps 2 --resume --offset -2.5")
    train(*args, "--max-steps 2 --resume")
    assert GPT.from_pretrained(tmp_path / "log/step_000002").config.windows == (4, 8)


@pytest.mark.parametrize("fork", ["random", "bfloat16 only"])
def test_a_model_that_cannot_be_compared_trains_and_resumes(
    fork, text, tmp_path, monkeypatch, capsys
):
    """It has no fingerprint. Each start says so once, and why."""
    args = ["--save-every 2 --dtype bfloat16 --data", text, "--log-dir", tmp_path / "log"]
    if fork == "random":
        monkeypatch.setattr(train_gpt2, "GPT", RandomGPT)
    else:
        attention = F.scaled_dot_product_attention

        def kernel(q, *args, **kwargs):
            if q.dtype != torch.bfloat16 or q.size(-1) % 8:
                raise RuntimeError(f"no kernel for {q.dtype}")
            return attention(q, *args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    named = "random" if fork == "random" else "no kernel for torch.float64"
    for start in ("--max-steps 2", "--max-steps 4 --resume"):
        train(*args, start)
        said = capsys.readouterr().err
        assert said.count("note: ") == 1 and named in said.split("note: ")[1]
    assert len(losses(tmp_path / "log")) == 4
    config = json.loads((tmp_path / "log/step_000004/config.json").read_text())
    assert config["model_type"] == "gpt2-repro-fork" and "fingerprint" not in config

"""Forks: the changes of docs/forking.md, applied as they are printed there, and others."""

import importlib.util
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import make_dataclass, replace

import pytest
import torch
import torch.nn as nn
from huggingface_hub import ModelCard
from torch.nn import functional as F

import support.loading
import train_gpt2
from support import signals
from support.checkpoints import read_training_state, write_checksums
from support.errors import UserError
from support.hellaswag import Packing
from support.sharding import shard_state
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, TINY, losses, read_log, steps_of, train, train_on_ranks, words
from tests.torture import assert_same
from train_gpt2 import GPT, Block, GPTConfig, TrainConfig, configure_optimizer

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"


def read_changes():
    """{heading: diff} of docs/forking.md"""
    text = (ROOT / "docs" / "forking.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.*?)\n.*?```diff\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    return dict(sections)


CHANGES = read_changes()


def changed_source(diff):
    """train_gpt2.py with a diff applied, each hunk of which must fit in exactly one place."""
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = [line or " " for line in hunk.splitlines()]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def use_fork(folder, name, put=sys.modules.__setitem__):
    """Makes the changed script the module `train_gpt2`, and has the tools import it again."""
    path = folder / "train_gpt2.py"
    path.write_text(changed_source(CHANGES[name]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("train_gpt2", path)
    module = importlib.util.module_from_spec(spec)
    put("train_gpt2", module)
    spec.loader.exec_module(module)
    for tool in ("support.loading", "sample", "hellaswag"):
        spec = importlib.util.find_spec(tool)
        copy = importlib.util.module_from_spec(spec)
        put(tool, copy)
        spec.loader.exec_module(copy)
        if tool == "support.loading":  # also an attribute of its package
            support.loading = copy
    return module


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(name): train_gpt2 with the change of docs/forking.md that has this heading."""
    folder = tmp_path / "fork"
    folder.mkdir()
    monkeypatch.setattr(support, "loading", support.loading)  # restored after the test

    def make(name):
        return use_fork(folder, name, lambda *args: monkeypatch.setitem(sys.modules, *args))

    return make


SMALL = "--n-layer 2 --n-head 4 --n-embd 32 --seq-len 64 --micro-batch-size 1 --optimizer muon"
EVALUATED = "--save-every 2 --max-steps 4 --eval-every 2 --hellaswag-every 4 --hellaswag-data"
FLAGS = {
    "Lion": "--optimizer lion --max-lr 1e-3",
    "Dropout": "--dropout 0.2",
    "Grouped-query attention": "--n-kv-head 2",
}
STAYS_GPT2 = {"Dropout", "Lion", "Another evaluation", "z-loss and label smoothing"}


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
    note = "not GPT-2's model any more" in capsys.readouterr().out
    assert note == (name not in STAYS_GPT2)
    card = ModelCard.load(last / "README.md").data
    assert card.library_name == ("transformers" if name in STAYS_GPT2 else None)
    if name in STAYS_GPT2:
        GPT.from_pretrained(last)
    else:
        with pytest.raises(UserError, match=r"saved by a fork|do not match config"):
            GPT.from_pretrained(last)

    model = changed.GPT.from_pretrained(last).eval()
    prompt = get_tokenizer().encode_ordinary("ROMEO:")
    generator = torch.Generator().manual_seed(7)
    idx = model.generate(torch.tensor([prompt]), 8, temperature=0.9, top_k=0, generator=generator)
    options = "ROMEO: --max-new-tokens 8 --temperature 0.9 --top-k 0 --seed 7 --device cpu"
    sys.modules["sample"].main(words(straight, options))
    assert capsys.readouterr().out == get_tokenizer().decode(idx[0].tolist()) + "\n"
    sys.modules["hellaswag"].main(["-m", str(straight), "-d", "cpu", "--data", str(tasks)])
    acc_norm = capsys.readouterr().out.split("acc_norm: ")[1]
    assert float(acc_norm) == pytest.approx(losses(straight, "hella")[-1], abs=1e-4)


def test_rotary_positions_are_relative_and_packed_ones_their_own(fork):
    """Shifted positions change nothing; a packed ending has the logits of the unpacked one."""
    changed = fork("Rotary positions")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(32, 100, 2, 2, 32))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    idx = torch.randint(100, (1, 16))
    causal = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    expected = model.hidden(idx)
    shifted = model.hidden(idx, Packing(torch.arange(5, 21)[None], causal))
    torch.testing.assert_close(shifted, expected, atol=1e-4, rtol=1e-4)
    stretched = model.hidden(idx, Packing(2 * torch.arange(16)[None], causal))
    assert not torch.allclose(stretched, expected, atol=1e-2)


def test_the_training_loss_counts_in_every_way_of_computing_it(fork, text, tmp_path):
    """Chunked, with --low-memory, compiled or plain; never in the validation loss."""
    changed = fork("z-loss and label smoothing")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(16, 50257, 1, 2, 16))
    idx, targets = torch.randint(50257, (2, 2, 16))
    logits, expected = model(idx, targets)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert expected > plain + 1e-3
    model.prepare()
    none, loss = model(idx, targets)
    assert none is None and loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for way in ("", "--low-memory"):
        train("--max-steps 1 --eval-every 1 --data", text, way, "--log-dir", tmp_path / f"log{way}")
    (first,), (val, _) = losses(tmp_path / "log"), losses(tmp_path / "log", "val")
    assert losses(tmp_path / "log--low-memory") == [first]
    assert first > val + 1e-3
    flags = words("--max-steps 1 --eval-every 1 --data", text, "--log-dir", tmp_path / "unchanged")
    train_gpt2.main([*TINY, *flags])
    assert losses(tmp_path / "unchanged", "val")[0] == pytest.approx(val, abs=2e-6)


def test_a_run_stopped_within_a_step_has_the_masks_of_one_that_was_not(
    fork, text, tmp_path, monkeypatch
):
    """The micro-steps that were made of it count neither for the data nor for random numbers."""
    changed = fork("Dropout")
    args = ["--dropout 0.3 --max-steps 4 --save-every 4 --keep-checkpoints 0 --data", text]
    train(*args, "--log-dir", tmp_path / "straight")
    next_batch = changed.DataLoaderLite.next_batch

    def interrupted(self):
        if self.position == 2 * 128 + 2 * 32:
            signals.received.append(signal.SIGTERM)
        return next_batch(self)

    with monkeypatch.context() as patch:
        patch.setattr(changed.DataLoaderLite, "next_batch", interrupted)
        assert train(*args, "--log-dir", tmp_path / "stopped") == 143
    assert steps_of(tmp_path / "stopped") == [2]
    train(*args, "--log-dir", tmp_path / "stopped", "--resume")
    shutil.rmtree(tmp_path / "stopped/step_000002")
    assert_same(tmp_path / "straight", tmp_path / "stopped")


def test_flags_of_the_model_count_with_init(fork, text, tmp_path):
    """Fine-tuning a GPT-2 with dropout: its config.json knows none."""
    GPT(GPTConfig(16, 50257, 2, 2, 16)).save_pretrained(tmp_path / "gpt2")
    fork("Dropout")
    results = []
    for dropout in (0, 0.9):
        log_dir = tmp_path / f"log_{dropout}"
        flags = f"--dropout {dropout} --max-steps 2 --save-every 2 --init"
        train(flags, tmp_path / "gpt2", "--data", text, "--log-dir", log_dir)
        results.append(losses(log_dir))
        config = json.loads((log_dir / "step_000002/config.json").read_text())
        assert config["dropout"] == dropout
    assert abs(results[0][0] - results[1][0]) > 1e-4


def test_an_optimizer_of_torch_takes_the_place_of_adamw(fork, text, tmp_path, monkeypatch):
    """AdamW's own defaults are not in its groups."""
    changed = fork("Lion")
    monkeypatch.setattr(changed, "Lion", torch.optim.Adafactor)
    flags = "--optimizer lion --max-steps 2 --save-every 2 --max-lr 1e-2 --data"
    train(flags, text, "--log-dir", tmp_path / "log")
    model = GPT.from_pretrained(tmp_path / "log/step_000002")
    optimizer = changed.configure_optimizer(model, replace(changed.TrainConfig(), optimizer="lion"))
    assert optimizer.defaults["eps"] == optimizer.param_groups[0]["eps"]


def test_other_code_says_so_on_resume(fork, text, tmp_path, capsys):
    """In both directions; a log that could not be read is an error where it is written."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args, "--max-steps 1")
    changed = fork("Dropout")
    train(*args, "--max-steps 2 --resume --dropout 0.1")
    assert "saved by other code, which differs in --dropout" in capsys.readouterr().out

    def log_twice(step, training):
        training.run.log(step, mine=1.0)
        training.run.log(step, mine=2.0)

    with pytest.raises(ValueError, match="'mine': needs one value per step"):
        changed.main([*TINY, *words(*args), "--max-steps", "3"], before_step=log_twice)


def test_documents_in_one_window_do_not_see_each_other(fork):
    changed = fork("Attention within documents")
    torch.manual_seed(0)
    model = changed.GPT(GPTConfig(16, 50257, 2, 2, 16))
    x = torch.arange(32).view(2, 16)
    x[:, 6:] = torch.tensor([50256, *range(9)])  # two texts before the same document
    a, b = model.hidden(x)
    torch.testing.assert_close(a[6:], b[6:])
    assert not torch.allclose(a[:6], b[:6])


def with_field(cls, name, default):
    """A subclass of the dataclass `cls` with one more field, of type float."""
    return make_dataclass(cls.__name__, [(name, float, default)], bases=(cls,), frozen=True)


def test_a_checkpoint_of_another_version_resumes(text, tmp_path, monkeypatch):
    """It lacks a new flag, and has state and a flag that were removed."""
    args = ["--save-every 2 --resume --data", text, "--log-dir", tmp_path]
    train(*args, "--max-steps 2")
    state = read_training_state(checkpoint := tmp_path / "step_000002")
    state |= {"best_val": 7.5, "config": state["config"] | {"check_against": ""}}
    torch.save(state, tmp_path / "state")
    os.replace(tmp_path / "state", checkpoint / "training_state.pt")
    (checkpoint / "SHA256SUMS").unlink()
    write_checksums(checkpoint)
    monkeypatch.setattr(train_gpt2, "TrainConfig", with_field(TrainConfig, "z_loss", 0.0))
    train(*args, "--max-steps 4")
    assert len(losses(tmp_path)) == 4
    message = r"--init was scratch, is .*--max-lr was 0\.005, is 0\.5, --z-loss was 0\.0, is 0\.5"
    with pytest.raises(UserError, match=message):
        train(*args, "--max-steps 6 --z-loss 0.5 --max-lr 0.5 --init", checkpoint)


class DropoutBlock(Block):
    """What a fork might add: dropout at the end of a block, a field of GPTConfig."""

    def __init__(self, config):
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, packing=None):
        modes.append((self.training, torch.is_grad_enabled()))
        return self.dropout(super().forward(x, packing))


modes: list[tuple[bool, bool]] = []


def fork_with_dropout(monkeypatch, dropout):
    monkeypatch.setattr(train_gpt2, "GPTConfig", with_field(GPTConfig, "dropout", dropout))
    monkeypatch.setattr(train_gpt2, "Block", DropoutBlock)


def test_a_field_added_to_the_model_is_saved_with_it(text, tmp_path, monkeypatch):
    """Even if its default has changed since."""
    modes.clear()
    fork_with_dropout(monkeypatch, 0.25)
    args = ["--save-every 2 --max-steps 6 --keep-checkpoints 0 --data", text, "--log-dir"]
    train(*args, tmp_path / "straight", "--sample-every 3 --eval-every 3")
    # (training, gradients): no dropout in evaluation
    assert set(modes) == {(True, True), (False, False)}
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"resumed/step_{step:06d}")
    fork_with_dropout(monkeypatch, 0.0)
    assert GPT.from_pretrained(tmp_path / "resumed/step_000002").config.dropout == 0.25
    train(*args, tmp_path / "resumed", "--resume")
    # Also the same masks: the training RNG is separate from that of samples, and is restored.
    assert read_log(tmp_path / "resumed", "train") == read_log(tmp_path / "straight", "train")


class Lion(torch.optim.Optimizer):
    """As a fork might write it: its state has a number beside the tensor."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                state["step"] += 1
                p.sub_(state["momentum"].lerp(p.grad, 0.1).sign_(), alpha=group["lr"])
                state["momentum"].lerp_(p.grad, 0.01)


def use_lion():
    def configure_optimizer(model, config, dtype):
        optimizer = Lion(model.parameters())
        if config.shard_optimizer:
            shard_state(optimizer)
        return optimizer

    train_gpt2.configure_optimizer = configure_optimizer


def test_an_optimizer_with_numbers_in_its_state_resumes(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt2, "configure_optimizer", None)  # restored after the test
    use_lion()
    args = ["--save-every 2 --max-steps 4 --max-lr 1e-3 --resume --data", text, "--log-dir"]
    train(*args, tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step_000004")
    train(*args, tmp_path / "resumed")
    assert_same(tmp_path / "straight", tmp_path / "resumed")
    # Sharded over two ranks, rank 0 gathers the numbers as well as the tensors.
    args = ["--save-every 2 --max-steps 2 --shard-optimizer --data", text, "--log-dir"]
    train_on_ranks(2, tmp_path, *args, tmp_path / "sharded", disturb=use_lion)
    whole, gathered = (
        read_training_state(tmp_path / name / "step_000002")["optimizer"]["state"]
        for name in ("straight", "sharded")
    )
    assert {i: state["step"] for i, state in gathered.items()} == dict.fromkeys(whole, 2)
    for i, state in whole.items():
        assert gathered[i]["momentum"].shape == state["momentum"].shape


def test_weights_of_several_matrices_must_add_up():
    """Grouped-query attention whose split_sizes were forgotten is an error, not other maths."""
    model = GPT(GPTConfig(16, 100, 1, 2, 16))
    model.h[0].attn.c_attn = nn.Linear(16, 16 + 2 * 8)
    model.h[0].attn.c_attn.split_sizes = [16, 16, 16]
    with pytest.raises(UserError, match=r"h.0.attn.c_attn.weight has 32 rows, but its split_sizes"):
        configure_optimizer(model, replace(TrainConfig(), optimizer="muon"))


class UntiedGPT(GPT):
    """A head of its own, a buffer of booleans, and one that is not part of the checkpoint."""

    def __init__(self, config):
        super().__init__(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    @property
    def head_weight(self):
        return self.head.weight

    def hidden(self, idx, packing=None):
        return super().hidden(idx, packing) + self.table.sum() * self.flags.sum()


def test_every_tensor_of_another_model_is_saved_as_it_is(text, tmp_path, monkeypatch):
    """transformers refuses it by name; it resumes to the same bytes."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(train_gpt2, "GPT", UntiedGPT)
    args = ["--save-every 2 --max-steps 4 --data", text, "--log-dir"]
    train(*args, tmp_path / "straight")
    checkpoint = tmp_path / "straight/step_000004"
    with pytest.raises(ValueError, match="gpt2-repro-fork"):
        AutoModelForCausalLM.from_pretrained(checkpoint)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/step_000004")
    train(*args, tmp_path / "resumed", "--resume")
    assert_same(tmp_path / "straight", tmp_path / "resumed")
    model = UntiedGPT.from_pretrained(checkpoint)
    before = UntiedGPT.from_pretrained(tmp_path / "straight/step_000002")
    assert (model.head.weight - before.head.weight).abs().mean() > 1e-4, "not trained"
    assert model.flags.tolist() == [True, False] and model.table.sum() == 28


class UnreadableGPT(GPT):
    """Its number of layers depends on something that is not in its config."""

    extra = 1

    def __init__(self, config):
        super().__init__(config)
        self.more = nn.ModuleList(nn.Linear(4, 4) for _ in range(UnreadableGPT.extra))
        UnreadableGPT.extra += 1


def test_a_model_that_could_not_be_read_back_is_refused_before_training(
    text, tmp_path, monkeypatch
):
    monkeypatch.setattr(train_gpt2, "GPT", UnreadableGPT)
    with pytest.raises(UserError, match=r"could not be read: .* has other more\.1\.bias, more\.1"):
        train("--save-every 2 --max-steps 4 --data", text, "--log-dir", tmp_path / "log")
    assert not (tmp_path / "log").exists()


class Window(train_gpt2.CausalSelfAttention):
    """GPT-2's parameters; each token attends to the latest 12 only."""

    def forward(self, x, packing=None):
        T = x.size(1)
        near = torch.ones(1, 1, T, T, dtype=torch.bool).tril().triu(-11)
        return super().forward(x, packing or Packing(None, near))


class ExactGELU(train_gpt2.MLP):
    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class LaterBlock(Block):
    """Differs in the last layer only."""

    made = 0

    def __init__(self, config):
        super().__init__(config)
        LaterBlock.made += 1
        self.skip = 0.1 if LaterBlock.made % config.n_layer == 0 else 0.0

    def forward(self, x, packing=None):
        return super().forward(x, packing) - self.skip * x


def test_a_changed_object_is_no_gpt2():
    """By its names and shapes, though its class is."""
    for change in ("extra", "wider", "rows"):
        model = GPT(GPTConfig(16, 100, 6, 2, 16))
        if change == "extra":
            model.head = nn.Linear(16, 100, bias=False)
        elif change == "wider":
            model.h[5].mlp.c_fc = nn.Linear(16, 96)
            model.h[5].mlp.c_proj = nn.Linear(96, 16)
        else:
            model.wte = nn.Embedding(128, 16)
        assert not model.is_gpt2, change


@pytest.mark.parametrize(
    "name, change",
    [("CausalSelfAttention", Window), ("MLP", ExactGELU), ("Block", LaterBlock)],
)
def test_changed_mathematics_is_no_gpt2(name, change, tmp_path, monkeypatch):
    """Though all names and shapes are. GPT-2 doesn't load it as its own."""
    shape = GPTConfig(16, 50257, 3, 2, 16)
    assert GPT(shape).is_gpt2
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, name, change)
        model = GPT(shape)
        assert not model.is_gpt2
        model.save_pretrained(tmp_path)
        x = torch.arange(16)[None]
        assert torch.equal(GPT.from_pretrained(tmp_path)(x)[0], model(x)[0])
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2-repro-fork"
    with pytest.raises(UserError, match=r"saved by a fork of train_gpt2\.py"):
        GPT.from_pretrained(tmp_path)

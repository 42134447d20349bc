"""What a run says and does where its code has a bug, or is not the code that it began with."""

import copy
import json
import os
import shutil
import sys
import traceback
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import sample
import train_gpt2
from support.errors_and_signals import UserError
from tests.conftest import (
    ROOT,
    import_file,
    losses,
    read_log,
    start_ranks,
    starts,
    tiny,
    train,
    words,
)
from train_gpt2 import GPT, GPTConfig

pytestmark = pytest.mark.torch

SOURCE = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")


@pytest.fixture
def code(tmp_path, monkeypatch):
    """code(name, (old, new), …) is train_gpt2.py with replaced lines, as a module in a file."""

    def load(name, *changes):
        source = SOURCE
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        path = tmp_path / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        return import_file(path, monkeypatch)

    return load


# --------------------------------------------------------------------------------------------------
# A bug keeps its traceback

BUGS = {  # a line, and a wrong one in its place
    "forward": ("x = self.ln_f(x)", "x = self.ln_g(x)"),
    "loss": ("V = weight.size(0)", "V = weight.size(7)"),
    "constructor": ("self.h = nn.ModuleList(Block", "self.h = nn.ModuleLost(Block"),
    "optimizer": ("    return optimizers\n", "    return optimisers\n"),
    "evaluation": ("x = tokens[:, :-1]\n        y = tokens[:, 1:].clone()", "x = tokens.part()"),
    "a part": ('"random": RandomStates(ranks),', '"random": RandomState(ranks),'),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_keeps_its_traceback(bug, code, text, tmp_path):
    old, new = BUGS[bug]
    wrong = code("train_wrong", (old, new))
    saving = "--save-every 1" if bug != "loss" else ""
    args = ["--max-steps 2 --eval-every 2", saving, "--data", text, "--log-dir", tmp_path / "log"]
    with pytest.raises(Exception) as raised:
        wrong.main(tiny(*args))
    assert not isinstance(raised.value, UserError)
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert any(line in new or new in line for line in filter(None, lines)), lines
    assert not raised.value.__suppress_context__


def wrong_on_rank_1():
    def forward(self, x, weight, targets):
        if int(os.environ["RANK"]) == 1:
            raise ZeroDivisionError("planted")
        return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())

    train_gpt2.LinearCrossEntropy.forward = forward


def test_a_bug_on_one_rank_of_several_ends_them_all(text, tmp_path):
    """The rank with the bug prints its traceback, the other one line with the whole message."""
    args = ["--max-steps 2 --data", text, "--log-dir", tmp_path / "log"]
    codes, texts = start_ranks(2, tmp_path, *args, disturb=wrong_on_rank_1)
    assert codes[1] == 1 and 'raise ZeroDivisionError("planted")' in texts[1]
    assert "Traceback" not in texts[0]


# --------------------------------------------------------------------------------------------------
# Changes in mid-run

OTHER_GELU = ('F.gelu(self.c_fc(x), approximate="tanh")', "F.gelu(self.c_fc(x))")
ANOTHER_HEAD = (
    "        self.loss = LinearCrossEntropy()",
    "        self.head_2 = nn.Linear(config.n_embd, 5)\n        self.loss = LinearCrossEntropy()",
)


def test_changed_code_goes_on_if_it_is_told_to(code, text, tmp_path, capsys):
    """With a note, once. Each checkpoint keeps the code that made it."""
    log = tmp_path / "log"
    args = ["--save-every 2 --keep-checkpoints 0 --data", text, "--log-dir", log, "--max-steps"]
    train(*args, 2)
    fork = code("train_erf", OTHER_GELU)
    with pytest.raises(UserError, match=r"step_000002.*--changed-code"):
        fork.main(tiny(*args, 4, "--resume"))
    capsys.readouterr()
    fork.main(tiny(*args, 4, "--resume --changed-code"))
    assert capsys.readouterr().err.count("note: ") == 1
    shutil.copytree(log, tmp_path / "straight")
    fork.main(tiny(*args, 6, "--resume"))
    fork.main(tiny(*args[:-2], tmp_path / "straight", "--max-steps 6 --resume --changed-code"))
    assert not capsys.readouterr().err
    assert read_log(log, "train") == read_log(tmp_path / "straight", "train")
    before, first, *later = starts(log)
    assert first["fingerprint_before"] == before["fingerprint"] != first["fingerprint"]
    assert "fingerprint_before" not in later[-1]
    assert [path.name for path in (log / "step_000002").glob("*.py")] == ["train_gpt2.py"]
    kept = {path.name for path in (log / "step_000004").glob("*.py")}
    assert "train_erf.py" in kept and "train_gpt2.py" not in kept


def test_what_fits_is_kept_and_the_rest_is_named(code, text, tmp_path, monkeypatch, capsys):
    """New weights, another optimizer, and a setting that must not change all the same."""
    log = tmp_path / "log"
    args = ["--save-every 2 --optimizer muon --data", text, "--log-dir", log, "--max-steps"]
    train(*args, 2)
    fork = code("train_head", ANOTHER_HEAD, ("optimizers.append(Muon(", "optimizers.append(Mine("))
    fork.Mine = type("Mine", (train_gpt2.Muon,), {})
    with pytest.raises(UserError, match="--changed-code"):
        fork.main(tiny(*args, 4, "--resume"))
    capsys.readouterr()
    fork.main(tiny(*args, 2, "--resume --changed-code"))
    said = capsys.readouterr().err
    assert "head_2.bias" in said and "Mine for h.0" in said and "Muon for h.0" in said
    fork.main(tiny(*args, 4, "--resume --changed-code"))
    assert losses(log)[3] < losses(log)[0]
    with pytest.raises(UserError, match="--weight-decay"):
        fork.main(tiny(*args, 6, "--resume --changed-code --weight-decay 0.5"))


def test_a_part_of_a_run_may_be_added(code, text, tmp_path, capsys):
    """It begins as the code makes it, which must be asked for."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log", "--max-steps"]
    train(*args, 1)
    fork = code("train_ema", ('"random": RandomStates(ranks),', '"ema": Ema(),'))
    fork.Ema = type("Ema", (), {"state_dict": lambda self: {"decay": 0.5}})
    with pytest.raises(UserError, match=r"ema.*random.*--changed-code"):
        fork.main(tiny(*args, 2, "--resume"))
    fork.main(tiny(*args, 2, "--resume --changed-code"))
    said = capsys.readouterr().err
    assert "ema" in said and "random" in said


# --------------------------------------------------------------------------------------------------
# What a run finds out about a fork


def test_a_cast_to_float32_is_no_other_mathematics(code, tmp_path):
    fork = code("train_float", ("return self.lm_head(x)\n", "return self.lm_head(x).float()\n"))
    fork.GPT(fork.GPTConfig(16, 50257, 2, 2, 16)).save_pretrained(tmp_path / "model")
    assert GPT.from_pretrained(tmp_path / "model").config.n_layer == 2


@pytest.mark.parametrize("where", ["before", "after"])
def test_every_layer_starts_with_gpt2s_standard_deviation(where, code):
    """Also a second head, next to the first."""
    line = "        self.loss = LinearCrossEntropy()"
    head = "        self.head_2 = nn.Linear(config.n_embd, 500)"
    new = f"{head}\n{line}" if where == "before" else f"{line}\n{head}"
    model = code("train_head", (line, new)).GPT(GPTConfig(16, 50257, 1, 2, 64))
    assert model.head_2.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.head_2.bias.eq(0).all() and model.lm_head.weight is model.wte.weight


def test_layers_that_differ_in_a_number_are_all_compiled(code, text, tmp_path, monkeypatch):
    """In training and in evaluation: torch's own limit is eight graphs."""
    fork = code(
        "train_layers",
        ("x = x + self.attn(self.ln_1(x))  #", "x = x + self.attn(self.ln_1(x)) * self.scale  #"),
        (
            "        self.loss = Linear",
            "        for i, block in enumerate(self.h):\n"
            "            block.scale = 1 + i / 10\n        self.loss = Linear",
        ),
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    args = ["--compile --n-layer 6 --eval-every 2 --max-steps 2 --data", text]
    with torch._dynamo.config.patch(recompile_limit=8):
        fork.main(tiny(*args, "--log-dir", tmp_path / "log"))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2 * 6 + 2  # two of the loss


def test_a_validation_loss_that_is_no_cross_entropy_is_said(code, text, tmp_path, capsys):
    args = ["--max-steps 1 --eval-every 1 --data", text, "--log-dir", tmp_path / "log"]
    train(*args)
    assert not capsys.readouterr().err
    smoothed = "F.cross_entropy(logits.float(), targets.flatten(), label_smoothing=0.1)"
    fork = code(
        "train_smoothed",
        ("added = 64 * math.ceil(V / 64) - V", "added = 0"),
        ("F.cross_entropy(logits.float(), targets.flatten())", smoothed),
    )
    fork.main(tiny(*args))
    assert "if self.training" in capsys.readouterr().err


def test_a_model_that_sees_the_future_is_said(code, text, tmp_path, capsys):
    fork = code("train_leak", ("is_causal=True", "is_causal=False"))
    fork.main(tiny("--max-steps 1 --eval-every 1 --data", text, "--log-dir", tmp_path / "log"))
    assert "later tokens" in capsys.readouterr().err


def test_speed_is_that_of_the_tokens_that_were_read(code, text, tmp_path):
    """As with a batch that grows. A checkpoint's card has their number, too."""
    old = "    return step * (config.total_batch_size // config.seq_len)"
    fork = code("train_ramp", (old, "    return 8 * step - 6 * min(step, 1)"))
    args = ["--max-steps 3 --save-every 3 --data", text, "--log-dir", tmp_path / "log"]
    fork.main(tiny(*args))
    speed, ms = losses(tmp_path / "log", "tok_per_sec"), losses(tmp_path / "log", "ms")
    tokens = [rate * time / 1e3 for rate, time in zip(speed, ms, strict=True)]
    assert tokens == pytest.approx([32, 128, 128], rel=0.02)
    assert "288 tokens" in (tmp_path / "log/step_000003/README.md").read_text()
    with pytest.raises(UserError, match="--micro-batch-size 4: step 0 has 2 sequences"):
        fork.main(tiny(*args, "--micro-batch-size 4"))  # or other sequences after a resume


def test_a_plan_tries_a_step(code, capsys):
    """A bug shows its traceback after the plan."""
    args = words("--plan --device cpu --seq-len 32 --total-batch-size 64")
    wrong = code("train_wrong", ("V = weight.size(0)", "V = weight.size(7)"))
    with pytest.raises(IndexError, match="Dimension"):
        wrong.main(args)
    assert "FLOPs" in capsys.readouterr().out


def test_a_plan_knows_that_a_forks_loss_takes_more_memory(code, capsys):
    """Its logits are not compiled, and so exist several times."""
    fits = []
    line = "        return self.loss(x, self.lm_head.weight, targets)"
    own = "        return F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), targets.flatten())"
    for module in (train_gpt2, code("train_own", (line, own))):
        module.main(words("--preset gpt2 --plan --device cpu"))
        (row,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("A100")]
        fits.append(int(row.split("B = ")[1].split()[0]))
    assert fits[1] < fits[0]


def test_a_copy_of_a_compiled_model_runs_its_own_weights(monkeypatch):
    """As an average of the weights that a fork begins in mid-run."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for flags in ("--compile", "--compile --low-memory"):
        model = GPT(GPTConfig(16, 50257, 2, 2, 16))
        train_gpt2.choose_execution(model, train_gpt2.read_config(tiny(flags)))
        idx = torch.arange(16)[None]
        average = copy.deepcopy(model)
        before = average(idx, idx).item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        assert average(idx, idx).item() == before != model(idx, idx).item()


def test_the_code_of_a_model_without_a_fingerprint_must_be_named(code, tmp_path, monkeypatch):
    """Nothing would tell another code from it."""
    nan = code("train_nan", ("x = self.ln_f(x)", "x = self.ln_f(x) / (x.dtype != torch.float64)"))
    nan.GPT(nan.GPTConfig(16, 50257, 1, 2, 16)).save_pretrained(tmp_path / "model")
    args = words(tmp_path / "model", "a --max-new-tokens 1 --device cpu")
    with pytest.raises(UserError, match=r"train_nan.*--code"):
        sample.main(args)
    sample.main([*args, "--code", nan.__file__])


def test_without_transformers_a_model_is_saved_as_a_forks(text, tmp_path, monkeypatch, capsys):
    """Which this code loads. It is not missed before the first save."""
    monkeypatch.setitem(sys.modules, "transformers.models.gpt2.modeling_gpt2", None)
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    train("--max-steps 2 --save-every 2 --data", text, "--log-dir", tmp_path / "log")
    out = capsys.readouterr().out
    assert 0 < out.find("step     1/2") < out.find("transformers cannot be imported")
    folder = tmp_path / "log/step_000002"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2-repro-fork"
    GPT.from_pretrained(folder)


def test_what_a_fork_writes_beside_a_checkpoint_goes_with_it(text, tmp_path, monkeypatch):
    log = tmp_path / "log"
    args = ["--save-every 1 --keep-checkpoints 1 --data", text, "--log-dir", log, "--max-steps"]
    train(*args, 1)
    (log / "step_000001_ema").mkdir()
    (log / "step_000001_ema.pt").touch()
    train(*args, 2, "--resume")
    assert [path.name for path in log.glob("step_*")] == ["step_000002"]

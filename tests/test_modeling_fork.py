"""Forks in transformers and lm-eval, and the files in a fork's folder that open it there."""

import contextlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import hellaswag
import sample
from support import huggingface
from support.errors_and_signals import UserError
from tests.conftest import ROOT, import_file, words, write_fork
from train_gpt2 import GPT, GPTConfig, get_tokenizer

TEXTS = ["Hello", "The quick brown fox jumps over", "A"]
IDX = torch.arange(40).view(2, 20) * 77
TRUST = dict(trust_remote_code=True)


def small(model_class: type[GPT]) -> GPT:
    """A model whose logits differ much, so that greedy tokens do not depend on rounding."""
    torch.manual_seed(0)
    model = model_class(GPTConfig(64, 50257, 2, 2, 32)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """(a folder with the forks `absolute` and `rotary`, {fork: its logits of IDX})

    The second has a forward() without `at`, as a fork may."""
    from transformers import dynamic_module_utils

    folder, logits = tmp_path_factory.mktemp("forks"), {}
    with pytest.MonkeyPatch.context() as patch:
        swiglu = write_fork(folder / "a/train_swiglu.py", "RMSNorm, SwiGLU, no biases")
        rope = write_fork(folder / "b/train_rope.py", "Rotary positions")
        code = rope.read_text(encoding="utf-8").replace(", at: tuple | None = None", "")
        rope.write_text(code.replace("if at is not None:\n            x = x[at]", ""))
        for name, path in {"absolute": swiglu, "rotary": rope}.items():
            model = small(import_file(path, patch).GPT)
            model.save_pretrained(folder / name)
            logits[name] = model(IDX).detach()
    with pytest.MonkeyPatch.context() as patch:  # the forks are no modules of this process any more
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
        patch.setattr(sys, "path", [*sys.path])
        yield folder, logits


@pytest.fixture
def expected(forks, monkeypatch):
    """{fork: its logits of IDX}. The working folder is that of the forks."""
    monkeypatch.chdir(forks[0])
    with torch.no_grad():
        yield forks[1]


def load(name: str = "absolute", **kwargs):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(name, **TRUST, **kwargs)


def tokens_of(texts: list[str], side: str = "left"):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained("absolute")  # needs no flag
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    return tokenizer(texts, return_tensors="pt", padding=True)


def greedy(model, inputs) -> list[list[int]]:
    out = model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=50256)
    return out[:, -5:].tolist()


@pytest.mark.parametrize("name", ["absolute", "rotary"])
def test_transformers_has_the_forks_logits_and_loss(name, expected):
    model, logits = load(name), expected[name]
    assert torch.equal(model(IDX).logits, logits) and not model.gpt.training
    for kept in (3, torch.tensor([2, 5])):
        part = logits[:, -kept:] if isinstance(kept, int) else logits[:, kept]
        torch.testing.assert_close(model(IDX, logits_to_keep=kept).logits, part)
    labels = IDX.clone()
    labels[0, :9] = -100
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(IDX, labels=labels).loss, loss)


@pytest.mark.parametrize("name", ["absolute", "rotary"])
def test_padding_changes_nothing(name, expected):
    """On either side, and on both. Absolute positions count from the first token."""
    model = load(name)
    alone = [model(tokens_of([text]).input_ids).logits[0] for text in TEXTS]
    for side in ("left", "right"):
        inputs = tokens_of(TEXTS, side)
        for row, mask, logits in zip(
            model(**inputs).logits, inputs.attention_mask, alone, strict=True
        ):
            torch.testing.assert_close(row[mask.bool()], logits, rtol=1e-4, atol=1e-4)
    ids = F.pad(tokens_of(TEXTS[1:2]).input_ids, (2, 3), value=7)
    row = model(ids, (ids != 7).long(), logits_to_keep=5).logits[0, :2]
    torch.testing.assert_close(row, alone[1][-2:], rtol=1e-4, atol=1e-4)
    together = greedy(model, tokens_of(TEXTS))
    assert together == [greedy(model, tokens_of([text]))[0] for text in TEXTS]
    if name == "absolute":
        ids = tokens_of(TEXTS[1:2]).input_ids
        assert together[1] == model.gpt.generate(ids, 5, 0)[0, -5:].tolist()


def test_arguments_count_or_are_refused(expected):
    """None is ignored that would give another model or other logits."""
    model = load(dtype="bfloat16", device_map={"": "cpu"}, low_cpu_mem_usage=True)
    assert model(IDX).logits.dtype == model.dtype == torch.bfloat16
    assert load(dtype="auto").dtype == torch.float32
    refused = [dict(quantization_config={"load_in_8bit": True}), dict(attn_implementation="eager")]
    refused += [dict(device_map={"gpt.wte": "cpu", "gpt.h": "disk"}), dict(n_layer=1)]
    refused += [dict(output_hidden_states=True), dict(state_dict={"a": 1}), dict(unknown=1)]
    for given in refused:
        with pytest.raises(ValueError, match="fork"):
            load(**given)
    model = load()
    adapter = {"_adapter_model_path": "adapter"}  # as transformers gives it where peft is installed
    with pytest.raises(ValueError, match="adapter"):
        type(model).from_pretrained("absolute", adapter_kwargs=adapter)
    for name in ("position_ids", "inputs_embeds", "past_key_values", "output_hidden_states"):
        with pytest.raises(TypeError, match=name):
            model(IDX, **{name: True})
        with pytest.raises((TypeError, ValueError)):
            model.generate(IDX, max_new_tokens=1, pad_token_id=0, **{name: True})
    hole = torch.tensor([[1, 0, *[1] * 18]] * 2)
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="zeros between"):
            call(IDX, attention_mask=hole)
    with pytest.raises(NotImplementedError, match=r"model\.gpt\.save_pretrained"):
        model.save_pretrained("refused")


def test_a_revision_of_the_hub_and_a_pipeline(expected):
    import transformers

    cache = Path("cache/models--me--fork")
    (cache / "refs").mkdir(parents=True)
    for revision, name in {"main": "absolute", "v2": "rotary"}.items():
        commit = {"main": "a", "v2": "b"}[revision] * 40
        shutil.copytree(name, cache / "snapshots" / commit)
        (cache / "refs" / revision).write_text(commit)
        model = load("me/fork", revision=revision, cache_dir="cache")
        assert torch.equal(model(IDX).logits, expected[name])
    generate = transformers.pipeline("text-generation", "absolute", device="cpu", **TRUST)
    (out,) = generate(TEXTS[1], max_new_tokens=5, do_sample=False, return_full_text=False)
    tokens = greedy(load(), tokens_of(TEXTS[1:2]))[0]
    assert out["generated_text"] == generate.tokenizer.decode(tokens)


def test_lm_eval(expected):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained="absolute", device="cpu", batch_size=4, **TRUST)
    assert lm.max_length == 64
    pairs = [(text, " and then") for text in TEXTS]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    model, n = load(), 2
    for text, (found, _) in zip(TEXTS, lm.loglikelihood(requests), strict=True):
        idx = tokens_of([text + " and then"]).input_ids
        losses = F.cross_entropy(model.gpt(idx)[0, :-1], idx[0, 1:], reduction="none")
        assert found == pytest.approx(-losses[-n:].sum().item(), abs=1e-3)
    until = {"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(TEXTS)]
    tokens = [greedy(model, tokens_of([text]))[0] for text in TEXTS]
    assert lm.generate_until(requests) == lm.tokenizer.batch_decode(tokens)


# --------------------------------------------------------------------------------------------------
# What a folder holds


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.py")}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_fork_brings_its_script_as_it_was_before_training(tmp_path, monkeypatch):
    """A GPT-2 needs no code to be opened."""
    path = write_fork(tmp_path / "code/train_rope.py", "Rotary positions")
    model = small(import_file(path, monkeypatch).GPT)
    huggingface.check_that_checkpoints_load(model, resumed=False)
    trained = path.read_bytes()
    path.write_text("edited = while it trains")
    model.save_pretrained(tmp_path / "model")
    assert files_of(tmp_path / "model") == {"train_rope.py", "modeling_fork.py"}
    assert (tmp_path / "model/train_rope.py").read_bytes() == trained
    small(GPT).save_pretrained(tmp_path / "gpt2")
    assert files_of(tmp_path / "gpt2") == {"train_gpt2.py"}
    assert "auto_map" not in config_of(tmp_path / "gpt2")


def test_a_fork_that_cannot_be_imported_says_so_once(tmp_path, capsys, monkeypatch):
    """A class from a notebook, and a file name with a hyphen."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # which has no file
    cell = {"GPT": GPT, "__name__": "__main__"}
    exec("class GPT(GPT):\n  def forward(self, *a, **k): return 3 * super().forward(*a, **k)", cell)
    hyphen = write_fork(tmp_path / "code/train-rope.py", "Rotary positions")
    classes = {"file": cell["GPT"], hyphen.name: import_file(hyphen, monkeypatch).GPT}
    for named, model_class in classes.items():
        for name in ("first", "second"):
            small(model_class).save_pretrained(tmp_path / name)
            assert "modeling_fork.py" not in files_of(tmp_path / name)
            assert config_of(tmp_path / name)["model_type"] == "gpt2-repro-fork"
        (note,) = capsys.readouterr().err.splitlines()
        assert note.startswith("note:") and named in note


PLANTED = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import GPT2Config as ForkConfig, GPT2LMHeadModel as ForkForCausalLM
from transformers import GPT2Tokenizer as Tokenizer
generate = None
"""


def test_our_scripts_never_run_code_of_a_models_folder(expected, tmp_path, monkeypatch):
    """Of no kind of model, and not even if the user says yes to all questions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    gpt2, marker = tmp_path / "saved", tmp_path / "was_run"
    shape = GPT2Config(n_positions=160, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(shape).save_pretrained(gpt2)
    huggingface.write_tokenizer(get_tokenizer(), gpt2, 160)
    tasks = ROOT / "tests" / "hellaswag_sample.jsonl"
    for kind in ("fork", "fork, saved again", "unknown", "gpt2"):
        folder = tmp_path / kind
        shutil.copytree(gpt2 if kind == "gpt2" else "rotary", folder)
        config = config_of(folder)
        if kind == "unknown":
            config["model_type"] = "unheard-of"
        if kind in ("unknown", "fork, saved again"):
            config["transformers_version"] = "5.0.0"
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        tokenizer["auto_map"] = {"AutoTokenizer": [None, "modeling_fork.Tokenizer"]}
        config["auto_map"] = tokenizer["auto_map"] | {
            "AutoConfig": "modeling_fork.ForkConfig",
            "AutoModelForCausalLM": "modeling_fork.ForkForCausalLM",
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        (folder / "custom_generate").mkdir()
        for name in ("modeling_fork.py", "train_rope.py", "custom_generate/generate.py"):
            (folder / name).write_text(PLANTED.format(marker=str(marker)))
        for run in (
            partial(sample.main, words(folder, "Hello --max-new-tokens 2 --device cpu")),
            partial(hellaswag.main, words("-d cpu --limit 2 --data", tasks, "-m", folder)),
            partial(GPT.from_pretrained, folder),
        ):
            with contextlib.nullcontext() if kind == "gpt2" else pytest.raises(UserError):
                run()
            assert not marker.exists(), kind

"""Forks in transformers and lm-eval, and the files in a fork's folder that open it there."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

import hellaswag
import sample
from support import huggingface
from support.errors_and_signals import UserError
from tests.conftest import ROOT, words
from train_gpt2 import GPT, GPTConfig

TEXTS = ["Hello", "The quick brown fox jumps over", "A"]
TRUST = dict(trust_remote_code=True)


WITHOUT_AT = {", at: tuple | None = None": "", "if at is not None:\n            x = x[at]": ""}


def make_fork(path: Path, change: str, replaced: dict[str, str] | None = None) -> ModuleType:
    """train_gpt2.py with a change of docs/forking.md, written to `path` and imported."""
    if shutil.which("git") is None:
        pytest.skip("docs/forking.md applies its changes by git")
    path.parent.mkdir(exist_ok=True)
    script = path.with_name("train_gpt2.py")
    script.write_text((ROOT / "train_gpt2.py").read_text(encoding="utf-8"), encoding="utf-8")
    page = (ROOT / "docs" / "forking.md").read_text(encoding="utf-8")
    diff = page.split(f"\n## {change}\n")[1].split("\n## ")[0]
    subprocess.run(["git", "apply"], input=diff.encode(), cwd=path.parent, check=True)
    text = script.read_text(encoding="utf-8")
    script.unlink()
    for old, new in (replaced or {}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def small(module: ModuleType) -> torch.nn.Module:
    """A model whose logits differ much, so that greedy tokens do not depend on rounding."""
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(64, 50257, 2, 2, 32)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


# --------------------------------------------------------------------------------------------------
# What other programs do. One process runs all checks, and has not imported the fork before.

IDX = torch.arange(40).view(2, 20) * 77


def load(name: str = "absolute", **kwargs):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(name, **TRUST, **kwargs)


def tokens_of(texts: list[str], side: str = "left"):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained("absolute")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    return tokenizer(texts, return_tensors="pt", padding=True)


def greedy(model, inputs) -> list[list[int]]:
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=50256)
    return out[:, -8:].tolist()


def check_logits_and_loss():
    for name in ("absolute", "rotary"):
        model, expected = load(name), torch.load(f"{name}.pt")
        assert torch.equal(model(IDX).logits, expected)
        assert torch.equal(model(IDX, torch.ones_like(IDX)).logits, expected)
        for kept in (1, 3, torch.tensor([2, 5])):
            part = expected[:, -kept:] if isinstance(kept, int) else expected[:, kept]
            torch.testing.assert_close(model(IDX, logits_to_keep=kept).logits, part)
        labels = IDX.clone()
        labels[0, :9] = -100
        loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(model(IDX, labels=labels).loss, loss)
        assert torch.equal(model(IDX, return_dict=False)[0], expected)
        assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}
        assert not model.training and not model.gpt.training


def check_padding():
    """On either side, and on both. Absolute positions count from the first token."""
    for name in ("absolute", "rotary"):
        model = load(name)
        alone = [model(tokens_of([text]).input_ids).logits[0] for text in TEXTS]
        for side in ("left", "right"):
            inputs = tokens_of(TEXTS, side)
            logits = model(**inputs).logits
            for row, mask, expected in zip(logits, inputs.attention_mask, alone, strict=True):
                torch.testing.assert_close(row[mask.bool()], expected, rtol=1e-4, atol=1e-4)
        ids = F.pad(tokens_of(TEXTS[1:2]).input_ids, (2, 3), value=7)
        mask = (ids != 7).long()
        row = model(ids, mask, logits_to_keep=5).logits[0, :2]
        torch.testing.assert_close(row, alone[1][-2:], rtol=1e-4, atol=1e-4)
        together = greedy(model, tokens_of(TEXTS))
        assert together == [greedy(model, tokens_of([text]))[0] for text in TEXTS]
        assert len({tuple(tokens) for tokens in together}) == len(TEXTS)
        hole = torch.tensor([[1, 0, *[1] * 18]] * 2)
        for call in (model, model.generate):
            with pytest.raises(ValueError, match="zeros between"):
                call(IDX, attention_mask=hole)
        with pytest.raises(ValueError, match="must be"):
            model(IDX, hole[:, 1:])


def check_generation():
    """Beams and several samples a prompt, and the tokens that GPT.generate takes."""
    model, inputs = load(), tokens_of(TEXTS[:2])
    beams = model.generate(**inputs, max_new_tokens=3, num_beams=3, pad_token_id=50256)
    alone = model.generate(**tokens_of(TEXTS[:1]), max_new_tokens=3, num_beams=3, pad_token_id=0)
    assert beams[0, -3:].tolist() == alone[0, -3:].tolist()
    options = dict(do_sample=True, num_return_sequences=2, use_cache=True, pad_token_id=50256)
    assert len(model.generate(**inputs, max_new_tokens=3, **options)) == 4
    ids = tokens_of(TEXTS[1:2]).input_ids
    assert greedy(model, {"input_ids": ids})[0] == model.gpt.generate(ids, 8, 0)[0, -8:].tolist()


def check_arguments_that_count():
    for dtype in (torch.bfloat16, "bfloat16"):
        model = load(dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.dtype == model.config.dtype == model(IDX).logits.dtype == torch.bfloat16
    assert load(dtype="auto").dtype == torch.float32
    for device in ("cpu", {"": "cpu"}, torch.device("cpu"), {"": torch.device("cpu")}):
        assert load(device_map=device).device.type == "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert load(device_map="auto").device.type == (accelerator or torch.device("cpu")).type
    assert load(device_map={"": "meta"}).device.type == "meta"


def check_arguments_without_effect():
    import transformers

    hub = dict(revision="main", token=None, local_files_only=True, cache_dir="cache")
    off = dict(quantization_config=None, load_in_8bit=False, gguf_file=None, subfolder="")
    config = transformers.AutoConfig.from_pretrained("absolute", **TRUST)
    assert config.max_position_embeddings == 64 and config.hidden_size == 32
    expected = torch.load("absolute.pt")
    for given in (hub | off, dict(low_cpu_mem_usage=True, use_cache=False), dict(config=config)):
        assert torch.equal(load(**given)(IDX).logits, expected)


def check_refused_arguments():
    import transformers

    config = transformers.AutoConfig.from_pretrained("absolute", **TRUST)
    config.n_layer = 1
    spread = {"gpt.wte": "cpu", "gpt.h": "disk"}
    for given in (
        dict(device_map=spread),
        dict(device_map="balanced"),
        dict(quantization_config={"load_in_8bit": True}),
        dict(attn_implementation="eager"),
        dict(n_layer=1),
        dict(config=config),
        dict(output_hidden_states=True),
        dict(output_attentions=True),
        dict(state_dict={"a": 1}),
        dict(max_memory={0: "1GB"}),
        dict(tp_plan="auto"),
        dict(variant="fp16"),
        dict(unknown=1),
    ):
        with pytest.raises(ValueError, match="fork"):
            load(**given)
    adapter = {"_adapter_model_path": "adapter"}  # as transformers gives it where peft is installed
    model = load()
    with pytest.raises(ValueError, match="adapter"):
        type(model).from_pretrained("absolute", adapter_kwargs=adapter)
    wrong = ["position_ids", "inputs_embeds", "past_key_values", "output_hidden_states", "typo"]
    for name in wrong:
        with pytest.raises(TypeError, match=name):
            model(IDX, **{name: True})
        with pytest.raises((TypeError, ValueError)):
            model.generate(IDX, max_new_tokens=1, pad_token_id=0, **{name: True})


def check_saving():
    model = load()
    with pytest.raises(NotImplementedError, match=r"model\.gpt\.save_pretrained"):
        model.save_pretrained("refused")
    assert not Path("refused").exists()
    model.gpt.save_pretrained("again")
    assert torch.equal(load("again")(IDX).logits, torch.load("absolute.pt"))
    with pytest.raises(NotImplementedError):
        model.resize_token_embeddings(50304)


def check_hub():
    """By a name in the cache of the Hub, where another revision has other weights."""
    cache = Path("cache/models--me--fork")
    (cache / "refs").mkdir(parents=True)
    for revision, name in {"main": "absolute", "v2": "rotary"}.items():
        commit = {"main": "a", "v2": "b"}[revision] * 40
        shutil.copytree(name, cache / "snapshots" / commit)
        (cache / "refs" / revision).write_text(commit)
        model = load("me/fork", revision=revision, cache_dir="cache")
        assert torch.equal(model(IDX).logits, torch.load(f"{name}.pt"))


def check_pipeline():
    import transformers

    generate = transformers.pipeline("text-generation", "absolute", device="cpu", **TRUST)
    options = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    (out,) = generate(TEXTS[1], **options)
    tokens = greedy(load(), tokens_of(TEXTS[1:2]))[0]
    assert out["generated_text"] == generate.tokenizer.decode(tokens)


def check_tokenizer():
    """It needs no flag. On a terminal transformers 5 asks, and takes a no."""
    import transformers

    for given in ({}, dict(trust_remote_code=False), TRUST):
        tokenizer = transformers.AutoTokenizer.from_pretrained("absolute", **given)
        assert tokenizer("hello world").input_ids == [31373, 995]
        assert tokenizer.model_max_length == 64


def check_lm_eval():
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained="absolute", device="cpu", batch_size=4, **TRUST)
    assert lm.max_length == 64
    pairs = [(text, " and then") for text in TEXTS]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    model = load()
    tokenizer = transformers.AutoTokenizer.from_pretrained("absolute")
    for (context, ending), (found, _) in zip(pairs, lm.loglikelihood(requests), strict=True):
        idx = torch.tensor([tokenizer(context + ending).input_ids])
        n = len(tokenizer(ending).input_ids)
        losses = F.cross_entropy(model.gpt(idx)[0, :-1], idx[0, 1:], reduction="none")
        assert found == pytest.approx(-losses[-n:].sum().item(), abs=1e-3)
    until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(TEXTS)]
    expected = [tokenizer.decode(greedy(model, tokens_of([text]))[0]) for text in TEXTS]
    assert lm.generate_until(requests) == expected


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


def run_checks() -> None:
    """In a folder with the forks `absolute` and `rotary`. {check: its traceback} to a file."""
    results = {}
    for name in CHECKS:
        try:
            with torch.no_grad():
                globals()[name]()
        except BaseException:  # pytest's outcomes are no Exception
            results[name] = traceback.format_exc()
    Path("results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{check: its traceback, if it failed}"""
    folder = tmp_path_factory.mktemp("forks")
    forks = {
        "absolute": make_fork(folder / "a/train_swiglu.py", "RMSNorm, SwiGLU, no biases"),
        "rotary": make_fork(folder / "b/train_rope.py", "Rotary positions", WITHOUT_AT),
    }
    for name, module in forks.items():
        model = small(module)
        model.save_pretrained(folder / name)
        with torch.no_grad():
            torch.save(model(IDX), folder / f"{name}.pt")
    home = {"HF_HOME": str(folder / "home"), "HF_MODULES_CACHE": str(folder / "modules")}
    subprocess.run(
        [sys.executable, "-c", "from tests.test_modeling_fork import run_checks; run_checks()"],
        env=os.environ | home | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_transformers_and_lm_eval(check, results):
    if check == "check_lm_eval":
        pytest.importorskip("lm_eval")
    assert check not in results, results[check]


# --------------------------------------------------------------------------------------------------
# What a folder holds


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.py")}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_fork_brings_its_script_as_it_was_before_training(tmp_path):
    path = tmp_path / "code/train_rope.py"
    model = small(make_fork(path, "Rotary positions"))
    huggingface.check_before_training(model, resumed=False)
    trained = path.read_bytes()
    path.write_text("edited = while it trains")
    model.save_pretrained(tmp_path / "model")
    assert files_of(tmp_path / "model") == {"train_rope.py", "modeling_fork.py"}
    assert (tmp_path / "model/train_rope.py").read_bytes() == trained
    assert set(config_of(tmp_path / "model")["auto_map"]) == {"AutoConfig", "AutoModelForCausalLM"}


def test_a_gpt2_needs_no_code(tmp_path):
    GPT(GPTConfig(16, 50257, 1, 2, 16)).save_pretrained(tmp_path)
    assert files_of(tmp_path) == {"train_gpt2.py"} and "auto_map" not in config_of(tmp_path)


class Renamed(GPT):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def test_a_fork_that_cannot_be_imported_says_so_once(tmp_path, capsys, monkeypatch):
    """A class from a notebook, another name than GPT, and a file name with a hyphen."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # which has no file
    cell = {"GPT": GPT, "__name__": "__main__"}
    exec("class GPT(GPT):\n  def forward(self, *a, **k): return 3 * super().forward(*a, **k)", cell)
    hyphen = make_fork(tmp_path / "code/train-rope.py", "Rotary positions")
    for model_class, named in {
        cell["GPT"]: "file",
        Renamed: "Renamed",
        hyphen.GPT: "train-rope.py",
    }.items():
        capsys.readouterr()
        for name in ("first", "second"):
            model_class(GPTConfig(16, 50257, 1, 2, 16)).save_pretrained(tmp_path / name)
            assert "modeling_fork.py" not in files_of(tmp_path / name)
            assert "auto_map" not in config_of(tmp_path / name)
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


@pytest.mark.parametrize("kind", ["fork", "resaved fork", "unknown", "gpt2"])
def test_our_scripts_never_run_code_of_a_models_folder(kind, tmp_path, monkeypatch):
    """Not even if the user says yes to all questions."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "was_run"
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config(n_positions=160, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
            folder
        )
        huggingface.write_tokenizer(folder, 160)
    else:
        small(make_fork(tmp_path / "code/train_rope.py", "Rotary positions")).save_pretrained(
            folder
        )
    config = config_of(folder)
    if kind == "unknown":
        config["model_type"] = "unheard-of"
    if kind in ("unknown", "resaved fork"):
        config["transformers_version"] = "5.0.0"
    config["auto_map"] = {
        "AutoConfig": "modeling_fork.ForkConfig",
        "AutoModelForCausalLM": "modeling_fork.ForkForCausalLM",
        "AutoTokenizer": [None, "modeling_fork.Tokenizer"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "modeling_fork.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "custom_generate").mkdir()
    for name in ("modeling_fork.py", "train_rope.py", "custom_generate/generate.py"):
        (folder / name).write_text(PLANTED.format(marker=str(marker)))
    tasks = ROOT / "tests" / "hellaswag_sample.jsonl"
    for run in (
        lambda: sample.main(words(folder, "Hello --max-new-tokens 2 --device cpu")),
        lambda: hellaswag.main(words("-d cpu --limit 2 --data", tasks, "-m", folder)),
        lambda: GPT.from_pretrained(folder),
    ):
        if kind == "gpt2":
            run()
        else:
            with pytest.raises(UserError):
                run()
        assert not marker.exists()

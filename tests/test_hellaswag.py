"""HellaSwag against a plain scorer: transformers' logits, one ending at a time."""

import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hellaswag
from hellaswag import main
from support.errors_and_signals import RunError, UserError
from support.ranks import Ranks
from support.scripts import load_gpt_class
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, losses, read_log, train_on_ranks
from train_gpt2 import GPT, GPTConfig

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"  # written for these tests
EXAMPLES = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a small GPT-2 with large random weights."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(160, 50257, 2, 2, 32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, get_tokenizer())
    return folder


def plain_scores(folder, examples, context_size):
    """(losses (n, 4), lengths (n, 4), choices of acc, of acc_norm, labels) by transformers alone.

    Each ending in a pass of its own. Its tokens are what the whole text has after those of the
    context, as in lm-evaluation-harness. A long context loses its beginning, all but a <s>."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums, lengths = [], []
    for example in examples:
        context = tokenizer(example["ctx"]).input_ids
        wholes = [
            tokenizer(f"{example['ctx']} {ending}").input_ids for ending in example["endings"]
        ]
        endings = [whole[len(context) :] for whole in wholes]
        begin = context[:1] if context[0] == tokenizer.bos_token_id else []
        room = context_size + 1 - max(map(len, endings)) - len(begin)
        context = begin + context[len(begin) :][-room:]
        for ending in endings:
            ids = torch.tensor([context + ending])
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits[0, len(context) - 1 :]
            sums.append(F.cross_entropy(logits, torch.tensor(ending), reduction="sum").item())
            lengths.append(len(ending))
    losses, lengths = torch.tensor(sums).view(-1, 4), torch.tensor(lengths).view(-1, 4)
    labels = torch.tensor([example["label"] for example in examples])
    return losses, lengths, losses.argmin(1), (losses / lengths).argmin(1), labels


def write_tasks(path, *examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def evaluate(folder, *more):
    main(["-m", str(folder), "-d", "cpu", "--data", str(TASKS), *map(str, more)])


def test_scores_are_those_of_a_plain_scorer(model, tmp_path, capsys):
    """--json has its predictions, the last line the accuracies. One context is too long."""
    folder, context_size = model, 160
    long = EXAMPLES[0] | {"ctx": "far away " * 200 + EXAMPLES[0]["ctx"]}
    examples = [*EXAMPLES[:10], long]
    data = write_tasks(tmp_path / "tasks.jsonl", *examples, *EXAMPLES)
    out = tmp_path / "out.json"
    evaluate(folder, "--data", data, "--limit", 11, "--json", out, "--batch-size", 3)
    losses, lengths, by_sum, by_mean, labels = plain_scores(folder, examples, context_size)
    assert (by_sum != by_mean).any(), "division makes no difference here"
    rows = json.loads(out.read_text())
    names = ("task", "label", "prediction", "prediction_norm", "lengths")
    columns = (torch.arange(11), labels, by_sum, by_mean, lengths)
    for name, column in zip(names, columns, strict=True):
        assert [row[name] for row in rows] == column.tolist(), name
    for row, expected in zip(rows, losses.tolist(), strict=True):
        assert row["losses"] == pytest.approx(expected, rel=1e-4)
    acc, acc_norm = (int((chosen == labels).sum()) / 11 for chosen in (by_sum, by_mean))
    assert capsys.readouterr().out.splitlines()[-1] == f"11 acc: {acc:.4f} acc_norm: {acc_norm:.4f}"


def test_matmuls_are_in_the_precision_that_is_asked_for(model, tmp_path):
    found = []
    for dtype in ("float32", "bfloat16", "float16"):
        evaluate(model, "--limit", "2", "--dtype", dtype, "--json", tmp_path / "out.json")
        rows = json.loads((tmp_path / "out.json").read_text())
        found.append(torch.tensor([row["losses"] for row in rows]))
    errors = [(losses - found[0]).abs().max() for losses in found[1:]]
    assert 0 < errors[1] < errors[0] / 2 < 1  # float16 has three bits more


def test_ranks_share_the_tasks(model, text, tmp_path):
    """Three ranks for 25 tasks find the accuracy of one, in the context of the model.

    It is 160, while they train on sequences of 16 tokens."""
    data = write_tasks(tmp_path / "tasks.jsonl", *EXAMPLES, EXAMPLES[0])
    args = ["--max-steps 0 --hellaswag-every 1 --total-batch-size 96 --init", model]
    args += ["--hellaswag-data", data, "--data", text, "--log-dir", tmp_path / "log"]
    train_on_ranks(3, tmp_path, *args)
    evaluate(model, "--data", data, "--json", tmp_path / "out")
    rows = json.loads((tmp_path / "out").read_text())
    right = sum(row["prediction_norm"] == row["label"] for row in rows)
    assert read_log(tmp_path / "log", "hella") == [f"0 hella {right / 25:.4f}"]


def test_an_ending_that_the_context_cannot_hold_is_one_line(tmp_path):
    GPT(GPTConfig(4, 50257, 1, 1, 8)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"\b1\b.*\b4\b.*--seq-len"):
        evaluate(tmp_path, "--limit", "1")


def test_a_bad_line_is_named(tmp_path):
    """A line ends at a newline only."""
    path = tmp_path / "tasks.jsonl"
    good = EXAMPLES[0] | {"ctx": "one\u2028two\x85three"}
    lines = json.dumps(good, ensure_ascii=False) + "\n" + json.dumps(EXAMPLES[1]) + "\n"
    path.write_text(lines, encoding="utf-8")
    assert hellaswag.read_examples(path) == [good, EXAMPLES[1]]
    changes = {"ctx": ["", 5], "label": [4, "1"], "endings": ["abcd", ["a", "b", "c"], [1] * 4]}
    bad = [good | {key: value} for key, values in changes.items() for value in values]
    for line in ("{", "[]", *map(json.dumps, bad)):
        path.write_text(f"{json.dumps(good)}\n{line}\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"tasks\.jsonl.*\b2\b"):
            hellaswag.read_examples(path)


def test_a_damaged_folder_is_one_line(model, tmp_path):
    for name in ("config.json", "model.safetensors", "vocab.json"):
        folder = Path(shutil.copytree(model, tmp_path / name))
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=f"^{folder}"):
            evaluate(folder)


def test_another_architecture_is_one_line_that_names_lm_eval(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"llama.*lm_eval --model hf"):
        evaluate(tmp_path)


def test_a_fork_is_scored_by_its_code(model, tmp_path):
    """As a GPT-2 without the change it would be refused."""
    code = tmp_path / "train_x.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    last = "return F.linear(x, self.head)"
    code.write_text(source.replace(last, last.replace("(x", "(2 * x")), encoding="utf-8")
    fork = load_gpt_class(str(code)).from_pretrained(model)
    fork.save_pretrained(tmp_path / "x", get_tokenizer())
    with pytest.raises(UserError, match="--code"):
        evaluate(tmp_path / "x", "--limit", "1")
    found = []
    for folder, more in ((model, ()), (tmp_path / "x", ("--code", code))):
        evaluate(folder, "--limit", "1", "--json", tmp_path / "out.json", *more)
        found.append(json.loads((tmp_path / "out.json").read_text())[0]["losses"])
    assert found[0] != found[1]


def test_a_file_that_cannot_be_written_is_found_before_scoring(model, tmp_path, monkeypatch):
    monkeypatch.setattr(hellaswag, "score", None)
    with pytest.raises(UserError, match="out"):
        evaluate(model, "--json", tmp_path / "none" / "out.json")


def test_the_official_tasks_are_downloaded_once_and_verified(model, tmp_path, monkeypatch, capsys):
    official = write_tasks(tmp_path / "official.jsonl", EXAMPLES[0])
    kept = tmp_path / "hellaswag" / "hellaswag_val.jsonl"
    monkeypatch.setattr(hellaswag, "URL", official.as_uri())
    monkeypatch.setattr(hellaswag, "DOWNLOADED", kept)
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(official.read_bytes()).hexdigest())
    args = ["-m", str(model), "-d", "cpu"]
    main(args)
    official.unlink()
    main(args)  # it is there
    assert capsys.readouterr().out.count("\n1 acc: ") == 2
    kept.write_bytes(kept.read_bytes()[:-5])
    with pytest.raises(UserError, match="--data"):
        main(args)
    official.write_text("something else")
    with pytest.raises(UserError, match="not the official file"):
        main(args)


def no_network_on_rank_1():
    """The ranks are on two machines, of which only the first has the tasks."""
    import hellaswag

    os.environ["LOCAL_RANK"] = "0"
    hellaswag.URL = "file:///nowhere"
    hellaswag.SHA256 = hashlib.sha256(TASKS.read_bytes()).hexdigest()
    hellaswag.DOWNLOADED = TASKS if os.environ["RANK"] == "0" else Path("none.jsonl")


def test_a_run_whose_download_fails_goes_on_without(text, tmp_path):
    """On one machine of several: all agree on it."""
    flags = ["--hellaswag-every 1 --max-steps 1 --eval-every 1 --data", text]
    flags += ["--log-dir", tmp_path / "log"]
    output = "".join(train_on_ranks(2, tmp_path, *flags, disturb=no_network_on_rank_1))
    assert output.count("download failed") == 1
    assert not losses(tmp_path / "log", "hella") and len(losses(tmp_path / "log", "val")) == 2


def test_logits_that_are_no_numbers_choose_nothing(model, tmp_path):
    """In training it is logged as nan, alone it is an error."""
    gpt = GPT.from_pretrained(model)
    torch.nn.init.constant_(gpt.ln_f.bias, math.nan)
    gpt.save_pretrained(tmp_path, get_tokenizer())
    with pytest.raises(RunError):
        evaluate(tmp_path, "--limit", "1")
    alone = Ranks(0, 1, torch.device("cpu"))
    tasks = hellaswag.load_tasks(str(TASKS), get_tokenizer(), 160, alone)
    autocast = torch.autocast("cpu", enabled=False)
    assert math.isnan(hellaswag.accuracy(gpt, tasks, alone, autocast))

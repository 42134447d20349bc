"""HellaSwag against a plain scorer: transformers' logits, one ending at a time."""

import contextlib
import hashlib
import http.client
import io
import json
import math
import os
import shutil
import urllib.error
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import hellaswag
from hellaswag import main
from support.errors_and_signals import UserError
from support.ranks import Ranks
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, logits_of, losses, read_log, train, train_on_ranks
from train_gpt2 import GPT, GPTConfig

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"  # written for these tests
EXAMPLES = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
encode = get_tokenizer().encode_ordinary


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small GPT-2 with large random weights, and its folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(160, 50257, 2, 2, 32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, get_tokenizer())
    return model, folder


def save_other_model(folder, kind="llama", tokenizer=None, dtype=torch.float32, **settings):
    """An untrained model of another architecture, by default with GPT-2's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    sizes = dict(vocab_size=50257, max_position_embeddings=160, hidden_size=32)
    sizes |= dict(intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, initializer_range=0.3)
    config = AutoConfig.for_model(kind, **sizes | settings)
    model = AutoModelForCausalLM.from_config(config)
    if kind == "phi":
        torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    model.to(dtype).save_pretrained(folder)
    if tokenizer is None:
        GPT(GPTConfig(160, 50257, 1, 1, 8)).save_pretrained(folder / "gpt2", get_tokenizer())
        tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder)


def train_tokenizer():
    """A tokenizer of its own, of 600 tokens, as SentencePiece's with <s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:50_000]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def plain_scores(folder, examples, context_size=400):
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
                logits = logits_of(model, ids[:, :-1])[0, len(context) - 1 :]
            sums.append(F.cross_entropy(logits, torch.tensor(ending), reduction="sum").item())
            lengths.append(len(ending))
    losses, lengths = torch.tensor(sums).view(-1, 4), torch.tensor(lengths).view(-1, 4)
    labels = torch.tensor([example["label"] for example in examples])
    return losses, lengths, losses.argmin(1), (losses / lengths).argmin(1), labels


def evaluate(folder, *more):
    main(["-m", str(folder), "-d", "cpu", "--data", str(TASKS), *more])


KINDS = {  # model, its settings, its tokenizer
    "gpt2": None,
    "llama, SentencePiece": ("llama", {"vocab_size": 640}, "SentencePiece"),
    "bias in the head": ("phi", {}, None),
    "scaled logits": ("granite", {"logits_scaling": 4.0}, None),
    "ALiBi": ("falcon", {"alibi": True}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_scored_like_by_a_plain_scorer(kind, model, tmp_path, capsys, monkeypatch):
    """--json has its predictions, the last line the accuracies."""
    _, folder = model
    if kind != "gpt2":
        architecture, settings, tokenizer = KINDS[kind]
        folder = tmp_path / "model"
        tokenizer = tokenizer and train_tokenizer()
        more = {"max_position_embeddings": 400} if tokenizer else {}
        save_other_model(folder, architecture, tokenizer, **more | settings)
    rows = "1" if kind == "bias in the head" else "3"
    if kind == "ALiBi":
        monkeypatch.setattr("hellaswag.MAX_LOGITS", 1, raising=False)  # one row at a time
    evaluate(folder, "--limit", "16", "--json", str(tmp_path / "out.json"), "--batch-size", rows)
    losses, lengths, by_sum, by_mean, labels = plain_scores(folder, EXAMPLES[:16])
    assert (by_sum != by_mean).any(), "division makes no difference here"
    names = ("task", "label", "prediction", "prediction_norm", "lengths")
    columns = (torch.arange(16), labels, by_sum, by_mean, lengths)
    rows = json.loads((tmp_path / "out.json").read_text())
    for name, column in zip(names, columns, strict=True):
        assert [row[name] for row in rows] == column.tolist(), name
    for row, expected in zip(rows, losses.tolist(), strict=True):
        assert row["losses"] == pytest.approx(expected, rel=1e-4)
    acc, acc_norm = (int((chosen == labels).sum()) / 16 for chosen in (by_sum, by_mean))
    assert capsys.readouterr().out.splitlines()[-1] == f"16 acc: {acc:.4f} acc_norm: {acc_norm:.4f}"
    if kind == "gpt2":  # the same as context and ending apart, as build-nanogpt has them
        apart = [
            [len(encode(" " + ending)) for ending in task["endings"]] for task in EXAMPLES[:16]
        ]
        assert lengths.tolist() == apart


def test_matmuls_are_in_the_precision_that_is_asked_for(model, tmp_path, capsys):
    _, folder = model
    found = []
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        evaluate(folder, "--limit", "2", "--dtype", dtype, "--json", str(tmp_path / "out.json"))
        rows = json.loads((tmp_path / "out.json").read_text())
        found.append([loss for row in rows for loss in row["losses"]])
        used = dtype if dtype != "auto" else "float32"
        assert used in capsys.readouterr().out
    assert found[0] == found[1] != found[2] == pytest.approx(found[1], rel=0.05, abs=0.5)
    errors = [max(abs(a - b) for a, b in zip(row, found[1], strict=True)) for row in found[2:]]
    assert 0 < errors[1] < errors[0] / 2  # float16 has three bits more
    # Losses themselves are float32: bfloat16's are multiples of 2**-5, if above 4.
    assert all(loss * 2**10 % 1 > 0 for loss in found[2])


def test_ranks_share_the_tasks(model, text, tmp_path):
    """Three ranks for 25 tasks find the accuracy of one."""
    (tmp_path / "tasks.jsonl").write_text(TASKS.read_text() + json.dumps(task()) + "\n")
    args = ["--max-steps 0 --hellaswag-every 1 --total-batch-size 96 --init", model[1]]
    args += ["--hellaswag-data", tmp_path / "tasks.jsonl", "--data", text, "--log-dir"]
    train(*args, tmp_path / "alone")
    train_on_ranks(3, tmp_path, *args, tmp_path / "shared")
    evaluate(model[1], "--data", str(tmp_path / "tasks.jsonl"), "--json", str(tmp_path / "out"))
    right = [
        row["prediction_norm"] == row["label"] for row in json.loads((tmp_path / "out").read_text())
    ]
    for folder in ("alone", "shared"):
        assert read_log(tmp_path / folder, "hella") == [f"0 hella {sum(right) / 25:.4f}"]


def task(context="A man sits on a roof. He", label=1, **changes):
    endings = ["is ripping tiles off.", "jumps", "sleeps all day long", "holds a Rubik's cube."]
    return {"ctx": context, "label": label, "endings": endings, **changes}


@pytest.mark.parametrize("kind", ["GPT-2", "SentencePiece"])
def test_a_long_context_loses_its_beginning_and_the_endings_stay_whole(kind, model, tmp_path):
    """A <s> stays."""
    example = task("far away " * 200 + "A man sits on a roof. He")
    (tmp_path / "long.jsonl").write_text(json.dumps(example) + "\n")
    folder = tmp_path / "model"
    if kind == "SentencePiece":
        sizes = {"vocab_size": 640, "max_position_embeddings": 160}
        save_other_model(folder, "llama", train_tokenizer(), **sizes)
    else:
        folder = model[1]
    evaluate(folder, "--data", str(tmp_path / "long.jsonl"), "--json", str(tmp_path / "out"))
    (row,) = json.loads((tmp_path / "out").read_text())
    losses, lengths, *_ = plain_scores(folder, [example], 160)
    assert row["losses"] == pytest.approx(losses[0].tolist(), rel=1e-4)
    assert row["lengths"] == lengths[0].tolist()


def test_an_ending_that_the_context_cannot_hold_is_one_line(tmp_path):
    GPT(GPTConfig(4, 50257, 1, 1, 8)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"\b1\b.*\b4\b.*--seq-len"):
        evaluate(tmp_path, "--limit", "1")


def test_training_evaluates_with_the_context_of_the_model(text, tmp_path, capsys):
    """A GPT-2 with a context of 160, fine-tuned on sequences of 16 tokens, as the script scores."""
    GPT(GPTConfig(160, 50257, 1, 1, 8)).save_pretrained(tmp_path / "model", get_tokenizer())
    args = ["--init", tmp_path / "model", "--max-steps 1 --save-every 1 --hellaswag-every 1"]
    train(*args, "--hellaswag-data", TASKS, "--data", text, "--log-dir", tmp_path / "log")
    evaluate(tmp_path / "log")
    acc_norm = float(capsys.readouterr().out.split("acc_norm: ")[1])
    found = losses(tmp_path / "log", "hella")
    assert len(found) == 2 and found[1] == pytest.approx(acc_norm, abs=1e-4)


ENDINGS = [["a", "b", "c"], ["a", "b", "", "d"], ["a", "b", 3, "d"], ["a", "b", ["c"], "d"]]
ENDINGS += ["abcd", dict.fromkeys("abcd", "")]
BAD = [task(label=4), task("\ud800"), task(""), task(5), task(["a"]), {}, []]
BAD += [task(endings=endings) for endings in ENDINGS]


def test_a_bad_line_is_named(model, tmp_path, capsys):
    """A line ends at a newline only."""
    path, good = tmp_path / "tasks.jsonl", task("one\u2028two\x85three")
    good = json.dumps(good, ensure_ascii=False) + "\n"
    path.write_text(good, encoding="utf-8")
    evaluate(model[1], "--data", str(path))
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 acc: ")
    for line in ("{", "[" * 99_999, *map(json.dumps, BAD)):
        path.write_text(good + line + "\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"tasks\.jsonl.*\b2\b"):
            evaluate(model[1], "--data", str(path))


def remove_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def write(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES = {  # what happens to a folder, and what the line names
    "no tokenizer": (remove_tokenizer, "tokenizer"),
    "tokenizer": (write("tokenizer.json", lambda content: content[:-99]), "tokenizer"),
    "weights": (write("model.safetensors", lambda content: content[:-1000]), "loaded"),
    "config": (write("config.json", lambda content: b"{"), "config"),
}


def test_a_damaged_folder_is_one_line(tmp_path):
    save_other_model(tmp_path / "whole")
    for name, (damage, named) in DAMAGES.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(UserError, match=f"^{tmp_path / name}.*{named}"):
            evaluate(tmp_path / name)


def test_a_model_that_looks_ahead_is_refused(tmp_path, monkeypatch):
    """BERT has all tokens see each other, unless it is configured as a decoder."""
    for decoder in (True, False):
        save_other_model(tmp_path, "bert", is_decoder=decoder)
        expected = pytest.raises(UserError, match=str(tmp_path))
        with contextlib.nullcontext() if decoder else expected:
            evaluate(tmp_path, "--limit", "1")


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """answers(*contents, …) are what the download gets; errors are raised. -> where it is kept"""
    path = tmp_path / "cache" / "hellaswag_val.jsonl"

    def set_answers(*contents, sha256=""):
        monkeypatch.setattr("hellaswag.urlopen", mock.Mock(side_effect=contents))
        monkeypatch.setattr("hellaswag.SHA256", sha256)
        return path

    monkeypatch.setattr("hellaswag.DOWNLOADED", path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return set_answers


def test_download_is_retried_and_verified(answers, model, capsys):
    good = (json.dumps(task()) + "\n").encode()
    missing = urllib.error.HTTPError("", 404, "Not Found", {}, None)
    contents = map(io.BytesIO, [b"wrong content", good, good])
    broken = http.client.IncompleteRead(b"")
    sha256 = hashlib.sha256(good).hexdigest()
    path = answers(broken, *contents, *[missing] * 3, sha256=sha256)
    args = ["-m", str(model[1]), "-d", "cpu"]
    for _ in range(2):  # the second time it is there
        main(args)
        assert path.read_bytes() == good
    path.write_bytes(good[:-5])  # damaged: downloaded again
    main(args)
    assert path.read_bytes() == good and capsys.readouterr().out.count("\n1 acc: ") == 3
    path.unlink()
    with pytest.raises(UserError, match=r"404.*--data"):
        main(args)
    assert not list(path.parent.iterdir())


def no_network_on_rank_1():
    """The ranks are on two machines, of which only the first has the tasks."""
    import hellaswag

    os.environ["LOCAL_RANK"] = "0"
    hellaswag.DOWNLOADED = TASKS
    hellaswag.SHA256 = hashlib.sha256(TASKS.read_bytes()).hexdigest()
    if os.environ["RANK"] == "1":
        hellaswag.SHA256 = "another"
        hellaswag.urlopen = mock.Mock(side_effect=OSError("no network"))


def test_a_run_whose_download_fails_goes_on_without(text, tmp_path):
    """On one machine of several: all agree on it."""
    flags = ["--hellaswag-every 1 --max-steps 1 --eval-every 1 --data", text]
    flags += ["--log-dir", tmp_path / "log"]
    output = "".join(train_on_ranks(2, tmp_path, *flags, disturb=no_network_on_rank_1))
    assert output.count("no network") == 1
    assert not losses(tmp_path / "log", "hella") and len(losses(tmp_path / "log", "val")) == 2


def test_logits_that_are_no_numbers_choose_nothing(model, tmp_path):
    """In training it is logged as nan, alone it is an error."""
    gpt = GPT.from_pretrained(model[1])
    gpt.ln_f.register_forward_hook(lambda module, inputs, output: output * math.nan)
    alone = Ranks(0, 1, torch.device("cpu"))
    tasks = hellaswag.load_tasks(str(TASKS), gpt, get_tokenizer(), alone)
    autocast = torch.autocast("cpu", enabled=False)
    assert math.isnan(hellaswag.accuracy(gpt, get_tokenizer(), tasks, alone, autocast))

"""HellaSwag against a plain scorer: transformers' logits, one padded row per ending."""

import contextlib
import hashlib
import http.client
import io
import json
import shutil
import urllib.error
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import train_gpt2
from hellaswag import main
from support import hellaswag
from support.errors import RunError, UserError
from tests.conftest import ROOT, TINY, words
from train_gpt2 import GPT, GPTConfig

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"  # written for these tests


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small GPT-2 with large random weights, and its folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(160, 50257, 2, 2, 32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


def save_other_model(folder, kind="llama", **settings):
    """An untrained model of another architecture, without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = dict(vocab_size=50257, max_position_embeddings=160) | settings
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = AutoConfig.for_model(kind, num_key_value_heads=2, **sizes, **settings)
    model = AutoModelForCausalLM.from_config(config)
    if kind == "phi":
        torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    model.save_pretrained(folder)


def encode(example):
    """Tokens of the context and of the four endings."""
    encode = hellaswag.get_tokenizer().encode_ordinary
    return encode(example["ctx"]), [encode(" " + ending) for ending in example["endings"]]


def plain_scores(folder, examples):
    """(losses (n, 4), lengths (n, 4), choices of acc, of acc_norm, labels), from padded rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    sums, lengths = [], []
    for context, endings in map(encode, examples):
        rows = [torch.tensor(context + ending) for ending in endings]
        masks = [torch.tensor([0] * len(context) + [1] * len(ending)) for ending in endings]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (4, N)
        mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        with torch.no_grad():
            logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        sums.append((loss * mask[:, 1:]).sum(1))
        lengths.append(mask.sum(1))
    losses, lengths = torch.stack(sums).double(), torch.stack(lengths)
    labels = torch.tensor([example["label"] for example in examples])
    return losses, lengths, losses.argmin(1), (losses / lengths).argmin(1), labels


def inputs(model, examples):
    tasks = hellaswag.prepare(examples, 160)
    return model.hidden, model.logits, tasks, torch.device("cpu")


def test_losses_and_predictions_equal_the_plain_scorers(model):
    (ours, folder), examples = model, hellaswag.load_examples(TASKS)
    losses, lengths, by_sum, by_mean, labels = plain_scores(folder, examples)
    assert (by_sum != by_mean).any(), "division makes no difference here"
    args = inputs(ours, examples)
    for batch_size, n in ((1, 1), (64, 1), (7, 3)):  # n ranks
        shares = [hellaswag.score(*args, rank, n, batch_size=batch_size) for rank in range(n)]
        assert sorted(i for share in shares for i in share.index) == list(range(24))
        for share in shares:
            torch.testing.assert_close(share.losses, losses[share.index], atol=1e-3, rtol=1e-5)
            assert torch.equal(share.lengths, lengths[share.index])
        correct = torch.tensor([share.correct() for share in shares]).sum(0).tolist()
        assert correct == [int((chosen == labels).sum()) for chosen in (by_sum, by_mean)]


def evaluate(folder, *more):
    main(["-m", str(folder), "-d", "cpu", "--data", str(TASKS), "--limit", "1", *more])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi", "granite"])
def test_command_on_a_folder(kind, model, tmp_path, capsys):
    """--json has the plain scorer's predictions, the last line their accuracies.

    The head of a phi has a bias, the logits of a granite are scaled."""
    _, folder = model
    if kind != "gpt2":
        settings = {"logits_scaling": 4.0} if kind == "granite" else {}
        save_other_model(folder := tmp_path, kind, initializer_range=0.3, **settings)
    evaluate(folder, "--limit", "16", "--json", str(tmp_path / "out.json"))
    examples = hellaswag.load_examples(TASKS)[:16]
    losses, lengths, by_sum, by_mean, labels = plain_scores(folder, examples)
    names = ("task", "label", "prediction", "prediction_norm", "lengths")
    columns = (torch.arange(16), labels, by_sum, by_mean, lengths)
    rows = json.loads((tmp_path / "out.json").read_text())
    for name, column in zip(names, columns, strict=True):
        assert [row[name] for row in rows] == column.tolist(), name
    for row, expected in zip(rows, losses.tolist(), strict=True):
        assert row["losses"] == pytest.approx(expected, rel=1e-4)
    acc, acc_norm = (int((chosen == labels).sum()) / 16 for chosen in (by_sum, by_mean))
    assert capsys.readouterr().out.splitlines()[-1] == f"16 acc: {acc:.4f} acc_norm: {acc_norm:.4f}"


def task(context="A man sits on a roof. He", label=1, **changes):
    endings = ["is ripping tiles off.", "jumps", "sleeps all day long", "holds a Rubik's cube."]
    return {"ctx": context, "label": label, "endings": endings, **changes}


def test_a_long_context_loses_its_beginning_and_the_endings_stay_whole(model, capsys):
    ours, _ = model
    long, short = task("far away " * 200 + "A man sits on a roof. He"), task()
    score = hellaswag.score(*inputs(ours, [long, short]))
    assert "1 contexts cut" in capsys.readouterr().out
    context, endings = encode(long)
    context = context[max(map(len, endings)) - 161 :]
    for i, ending in enumerate(endings):
        row = torch.tensor([context + ending[:-1]])
        logits = ours(row)[0][0, -len(ending) :]
        expected = F.cross_entropy(logits, torch.tensor(ending), reduction="sum").item()
        assert score.losses[score.index.index(0), i].item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UserError, match="task 1: an ending exceeds"):
        hellaswag.prepare([short], 4)


def test_losses_are_float32_under_bfloat16(model):
    args = inputs(model[0], [task()])
    exact = hellaswag.score(*args).losses
    with torch.autocast("cpu", torch.bfloat16):
        losses = hellaswag.score(*args).losses
    assert (losses * 2**10 % 1 > 0).all()  # bfloat16's are multiples of 2**-5, if above 4
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0.5)


ENDINGS = [["a", "b", "c"], ["a", "b", "", "d"], ["a", "b", 3, "d"], ["a", "b", ["c"], "d"]]
ENDINGS += ["abcd", dict.fromkeys("abcd", "")]
BAD = [task(label=4), task(""), task(5), task(["a"]), {}, []]
BAD += [task(endings=endings) for endings in ENDINGS]


@pytest.mark.parametrize("line", ["{", *map(json.dumps, BAD)])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task()) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl, line 2: not a HellaSwag task"):
        hellaswag.load_examples(path)


def test_a_line_ends_at_a_newline_only(tmp_path):
    path, odd = tmp_path / "tasks.jsonl", task("one\u2028two\x85three")
    path.write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
    assert hellaswag.load_examples(path) == [odd]


@pytest.mark.parametrize(
    "kind, settings, message",
    [
        ("llama", {"vocab_size": 50_304}, None),  # padded
        ("llama", {"vocab_size": 60_000}, "GPT-2's tokenizer"),
        ("llama", {"vocab_size": 50_000}, "GPT-2's tokenizer"),
        ("mistral", {"sliding_window": 8}, "sliding_window"),
        ("falcon", {"alibi": True}, "a falcon takes no mask"),
    ],
)
def test_a_model_that_would_be_scored_wrongly_is_refused(kind, settings, message, tmp_path):
    save_other_model(tmp_path, kind, **settings)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        evaluate(tmp_path)


def test_a_tokenizer_is_compared_without_its_special_tokens(model, tmp_path):
    """And a vocabulary that lacks some of GPT-2's tokens is refused with GPT-2's tokenizer."""
    for V, message in ((50257, None), (50000, "GPT-2's tokenizer")):
        save_other_model(tmp_path, vocab_size=V)
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            shutil.copy(model[1] / name, tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["add_bos_token"] = True
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            evaluate(tmp_path)


@pytest.mark.parametrize("flag", ["--batch-size=0", "--limit=-1"])
def test_numbers_out_of_range_are_one_line(flag):
    with pytest.raises(UserError, match="at least 1 and 0"):
        main(["-m", "nowhere", flag])


def test_weights_that_are_not_finite_are_scored_and_sampled_in_a_line(text, tmp_path, capsys):
    """A run whose weights overflowed ends with its own message, not within an evaluation."""

    def overflow(step, training):
        if step == 1:
            training.model.wte.weight.data.fill_(torch.inf)

    flags = "--max-steps 2 --seq-len 64 --eval-every 1 --hellaswag-every 1 --sample-every 1"
    args = [*TINY, *words(flags, "--data", text, "--hellaswag-data", TASKS, "--log-dir", tmp_path)]
    with pytest.raises(RunError, match="step 1: loss nan"):
        train_gpt2.main(args, before_step=overflow)
    printed = capsys.readouterr().out
    assert "validation loss nan" in printed and "no samples: the model's logits are not" in printed


def swap_tokens(content):
    ids = json.loads(content)
    return json.dumps(ids | {"It": ids["A"], "A": ids["It"]}).encode()


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("vocab.json", swap_tokens, "GPT-2's tokenizer"),
        ("merges.txt", lambda content: b"a b c\n", "tokenizer cannot be loaded"),
        ("model.safetensors", lambda content: content[:-1000], "model cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_one_line(name, change, message, model, tmp_path):
    shutil.copytree(model[1], tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path)


def test_json_never_replaces_a_folder(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        evaluate("no-model", "--json", str(tmp_path))


def test_download_is_retried_and_verified(tmp_path, monkeypatch):
    good = (json.dumps(task()) + "\n").encode()
    missing = urllib.error.HTTPError("", 404, "Not Found", {}, None)
    contents = map(io.BytesIO, [b"wrong content", good, good])
    answers = [http.client.IncompleteRead(b""), *contents, *[missing] * 6]
    path = tmp_path / "cache" / "hellaswag_val.jsonl"
    monkeypatch.setattr(hellaswag, "urlopen", mock.Mock(side_effect=answers))
    monkeypatch.setattr(hellaswag, "DOWNLOADED", path)
    monkeypatch.setattr(hellaswag.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(good).hexdigest())
    assert hellaswag.download() == path and path.read_bytes() == good
    assert hellaswag.download() == path
    path.write_bytes(good[:-5])  # damaged: downloaded again
    assert hellaswag.download().read_bytes() == good
    path.unlink()
    with pytest.raises(UserError, match=r"download failed .*404.*; --data"):
        hellaswag.download()
    assert hellaswag.prepare_for_training("", 160, lambda value: [value]) is None
    assert not list(path.parent.iterdir())

"""HellaSwag scores against a plain scorer over transformers' logits, one padded row an ending."""

import io
import json
import re
import urllib.error

import pytest
import torch
import torch.nn.functional as F

import hellaswag
from support.cli import InputError
from tests.conftest import ROOT, script
from train_gpt2 import GPT, GPTConfig

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"  # in the form of the official ones; written for these tests

@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small GPT-2 with opinions (weights well above the initial ones), and its folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(160, 50257, 2, 2, 32))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder

def render_example(example):
    """A task as four padded rows, context and ending: tokens (4, N), and a mask (4, N), 1 for an ending's."""
    context, endings, _ = hellaswag.encode(example)
    rows = [torch.tensor(context + ending) for ending in endings]
    masks = [torch.tensor([0] * len(context) + [1] * len(ending)) for ending in endings]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(masks, batch_first=True)

def plain_losses(folder, examples):
    """Summed losses and lengths of the endings, (n, 4) each: rendered rows, full float32 logits, a mask."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder)
    sums, lengths = [], []
    for example in examples:
        tokens, mask = render_example(example)
        with torch.no_grad():
            logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none") * mask[:, 1:]
        sums.append(loss.sum(1))
        lengths.append(mask.sum(1))
    return torch.stack(sums).double(), torch.stack(lengths).double()

def test_losses_and_predictions_equal_the_plain_scorers(model):
    ours, folder = model
    examples = hellaswag.load_examples(TASKS)
    expected, lengths = plain_losses(folder, examples)
    cpu = torch.device("cpu")
    for batch_size, n in ((1, 1), (64, 1), (7, 3)):  # n ranks
        tasks = hellaswag.prepare(examples, 160)
        shares = [hellaswag.score(ours.hidden, ours.wte.weight, tasks, cpu, batch_size, rank, n)
                  for rank in range(n)]
        assert sorted(i for share in shares for i in share.index) == list(range(24))
        for share in shares:
            torch.testing.assert_close(share.losses, expected[share.index], atol=1e-3, rtol=1e-5)
            assert torch.equal(share.lengths, lengths[share.index].long())
            assert torch.equal(share.losses.argmin(1), expected[share.index].argmin(1))
        by_mean = (expected / lengths).argmin(1)
        assert (expected.argmin(1) != by_mean).any(), "division makes no difference here"
        labels = torch.tensor([example["label"] for example in examples])
        assert sum(s.num_correct for s in shares) == int((expected.argmin(1) == labels).sum())
        assert sum(s.num_correct_norm for s in shares) == int((by_mean == labels).sum())

def test_command_on_a_folder(model, tmp_path):
    """The command, whose model is transformers', says what the plain scorer says; --json holds every task."""
    _, folder = model
    args = ["-d", "cpu", "--data", TASKS, "--limit", 16, "--harness", "--json", tmp_path / "out.json"]
    done = script("hellaswag.py", "-m", folder, *args)
    assert done.returncode == 0, done.stderr
    losses, _ = plain_losses(folder, examples := hellaswag.load_examples(TASKS)[:16])
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["task"] for row in rows] == list(range(16))
    assert [row["label"] for row in rows] == [example["label"] for example in examples]
    assert [row["prediction"] for row in rows] == losses.argmin(1).tolist()
    assert [row["losses"] for row in rows] == [pytest.approx(row, rel=1e-4) for row in losses.tolist()]
    for name, part in (("lm-evaluation-harness", [row["harness"] for row in rows]), ("completion", rows)):
        accuracies = [sum(p[key] == row["label"] for p, row in zip(part, rows, strict=True)) / 16
                      for key in ("prediction", "prediction_norm")]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name} style: ")]
        assert re.findall(r"acc(?:_norm)? (\S+)", line) == [f"{a:.4f}" for a in accuracies]
        for row, p in zip(rows, part, strict=True):
            means = [loss / n for loss, n in zip(p["losses"], p["lengths"], strict=True)]
            assert means.index(min(means)) == p["prediction_norm"], row
    acc, acc_norm = accuracies
    assert done.stdout.splitlines()[-1] == f"16 acc: {acc:.4f} acc_norm: {acc_norm:.4f}"
    assert [row["lengths"] for row in rows] != [row["harness"]["lengths"] for row in rows]

def task(context="A man sits on a roof. He", label=1, **changes):
    endings = ["is ripping tiles off.", "jumps", "sleeps all day long", "holds a Rubik's cube."]
    return {"ctx": context, "label": label, "endings": endings, **changes}

def test_a_long_context_loses_its_beginning_and_the_ending_stays_whole(model):
    ours, _ = model
    long, short = task("far away " * 200 + "A man sits on a roof. He"), task()
    tasks = hellaswag.prepare([long, short], 160)
    assert [t.cut for t in tasks] == [True, False]
    score = hellaswag.score(ours.hidden, ours.wte.weight, tasks, torch.device("cpu"))
    context, endings, _ = hellaswag.encode(long)
    for i, ending in enumerate(endings):
        row = torch.tensor([context[-(161 - len(ending)) :] + ending[:-1]])
        assert row.size(1) == 160
        logits = ours(row)[0][0, -len(ending) :]
        expected = F.cross_entropy(logits, torch.tensor(ending), reduction="sum").item()
        assert score.losses[score.index.index(0), i].item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InputError, match="task 1: an ending exceeds"):
        hellaswag.prepare([short], 4)

HARNESS_EXAMPLE = {
    "activity_label": "Roof shingle removal",
    "ctx_a": "[header] How to [title] a  roof [substeps] Look up.",
    "ctx_b": "he",
    "ctx": "unused",
    "endings": [" is ripping tiles [step] off. ", "jumps [title] down", "sleeps all  day", "a café's cube."],
    "label": 2,
}

def plain_harness_scores(folder, example, window):
    """lm-evaluation-harness's rule: a row an ending, log-likelihoods from transformers' full logits."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    tokenizer, model = AutoTokenizer.from_pretrained(folder), GPT2LMHeadModel.from_pretrained(folder)

    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        while "[" in text:
            text = text[: text.index("[")] + text[text.index("]") + 1 :]
        return text.replace("  ", " ")

    query = clean(example["activity_label"] + ": " + example["ctx_a"] + " " + example["ctx_b"].capitalize())
    scores, choices = [], [clean(ending) for ending in example["endings"]]
    for choice in choices:
        whole, n = tokenizer.encode(query + " " + choice), len(tokenizer.encode(query.rstrip()))
        row, ending = whole[-(window + 1) :], whole[n:]
        with torch.no_grad():
            logits = model(torch.tensor([row[:-1]])).logits[0, -len(ending) :]
        scores.append(-F.cross_entropy(logits, torch.tensor(ending), reduction="sum").item())
    return scores, [len(choice) for choice in choices]

def test_harness_style(model):
    """Cleaned texts, the label before the context, division by characters; also if the context is cut."""
    ours, folder = model
    long = HARNESS_EXAMPLE | {"ctx_a": "far away " * 200 + "A man.", "endings": ["a b", "c", "d e f", "g"]}
    for example, cut in ((HARNESS_EXAMPLE, False), (long, True)):
        tasks = hellaswag.prepare([example], 160, harness=True)
        assert tasks[0].cut == cut
        score = hellaswag.score(ours.hidden, ours.wte.weight, tasks, torch.device("cpu"))
        scores, lengths = plain_harness_scores(folder, example, 160)
        assert score.losses[0].tolist() == pytest.approx([-s for s in scores], rel=1e-4)
        assert score.lengths[0].tolist() == lengths
    context, endings, _ = hellaswag.encode(HARNESS_EXAMPLE, harness=True)
    decode = hellaswag.get_tokenizer().decode
    assert decode(context) == "Roof shingle removal: How to. a roof Look up. He"
    cleaned = [" is ripping tiles off.", " jumps. down", " sleeps all day", " a café's cube."]
    assert list(map(decode, endings)) == cleaned

def test_losses_are_float32_under_bfloat16(model):
    ours, _ = model
    tasks = hellaswag.prepare([task()], 160)
    exact = hellaswag.score(ours.hidden, ours.wte.weight, tasks, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = hellaswag.score(ours.hidden, ours.wte.weight, tasks, torch.device("cpu"))
    assert rounded.losses.dtype == torch.float64 and not torch.equal(exact.losses, rounded.losses)
    torch.testing.assert_close(rounded.losses, exact.losses, rtol=0.05, atol=0.5)

BAD = [task(label=4), task(""), task(endings=["a", "b", "c"]), task(endings=["a", "b", "", "d"]), {}, []]

@pytest.mark.parametrize("line", ["{", *map(json.dumps, BAD)])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task()) + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"tasks\.jsonl, line 2: not a HellaSwag task"):
        hellaswag.load_examples(path)

def test_download_is_retried_and_verified(tmp_path, monkeypatch):
    good, answers = (json.dumps(task()) + "\n").encode(), []

    def urlopen(url, timeout):
        if (answer := answers.pop(0)) is None:
            raise urllib.error.HTTPError(url, 404, "Not Found", {}, None)
        return io.BytesIO(answer)

    monkeypatch.setattr(hellaswag.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(hellaswag.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hellaswag, "SHA256", hellaswag.hashlib.sha256(good).hexdigest())
    path = tmp_path / "cache" / "hellaswag_val.jsonl"
    answers += [None, b"not what was promised", good]
    assert hellaswag.download(path) == path and path.read_bytes() == good
    assert hellaswag.download(path) == path, "downloaded again"
    path.write_bytes(good[:-5])  # damaged since: downloaded again
    answers += [good]
    hellaswag.download(path)
    assert path.read_bytes() == good
    path.unlink()
    answers += [None] * 3
    with pytest.raises(InputError, match=r"download failed .*404.*; --data"):
        hellaswag.download(path)
    assert not list(path.parent.iterdir())

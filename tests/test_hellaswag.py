"""HellaSwag against a plain scorer: transformers' logits, one ending at a time."""

import contextlib
import hashlib
import http.client
import io
import json
import shutil
import urllib.error
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from hellaswag import main
from support import hellaswag
from support.errors import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, losses, train
from train_gpt2 import GPT, GPTConfig, Ranks

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"  # written for these tests
REAL = ROOT.parent / "shared/data/hellaswag_val_1k.jsonl"
CPU = Ranks(0, 1, torch.device("cpu"))
encode = get_tokenizer().encode_ordinary


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
        GPT(GPTConfig(160, 50257, 1, 1, 8)).save_pretrained(folder / "gpt2")
        tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder)


def train_tokenizer(kind):
    """A tokenizer of its own, of 600 tokens: byte-level, or as SentencePiece's with <s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:200_000]
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["</s>"])
        special = dict(eos_token="</s>")
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Replace("▁", " ")
        specials = ["<unk>", "<s>", "</s>"]
        trainer = BpeTrainer(vocab_size=600, special_tokens=specials)
        special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    if kind == "SentencePiece":
        template = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
        tokenizer.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def plain_scores(folder, examples, context_size=160):
    """(losses (n, 4), lengths (n, 4), choices of acc, of acc_norm, labels) by transformers alone.

    Each ending in a pass of its own. The tokens of an ending are what the whole text has after
    those of the context, as in lm-evaluation-harness."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums, lengths = [], []
    for example in examples:
        context = tokenizer(example["ctx"]).input_ids
        n = len(context)
        for ending in example["endings"]:
            ids = torch.tensor(context + tokenizer(f"{example['ctx']} {ending}").input_ids[n:])
            assert len(ids) <= context_size + 1, "a context that must be cut"
            with torch.no_grad():
                logits = model(ids[None, :-1]).logits[0, n - 1 :]
            sums.append(F.cross_entropy(logits, ids[n:], reduction="sum").item())
            lengths.append(len(ids) - n)
    losses, lengths = torch.tensor(sums).view(-1, 4), torch.tensor(lengths).view(-1, 4)
    labels = torch.tensor([example["label"] for example in examples])
    return losses, lengths, losses.argmin(1), (losses / lengths).argmin(1), labels


def evaluate(folder, *more):
    main(["-m", str(folder), "-d", "cpu", "--data", str(TASKS), *more])


KINDS = {  # model, its settings, its tokenizer
    "gpt2": None,
    "llama": ("llama", {}, None),
    "llama, byte-level": ("llama", {"vocab_size": 600}, "byte-level"),
    "llama, SentencePiece": ("llama", {"vocab_size": 640}, "SentencePiece"),
    "bias in the head": ("phi", {}, None),
    "scaled logits": ("granite", {"logits_scaling": 4.0}, None),
    "sliding window": ("mistral", {"sliding_window": 16}, None),
    "ALiBi": ("falcon", {"alibi": True}, None),
    "saved in 16 bits": ("llama", {"dtype": torch.bfloat16}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_scored_like_by_a_plain_scorer(kind, model, tmp_path, capsys, monkeypatch):
    """--json has its predictions, the last line the accuracies."""
    _, folder = model
    if kind != "gpt2":
        architecture, settings, tokenizer = KINDS[kind]
        folder = tmp_path / "model"
        tokenizer = tokenizer and train_tokenizer(tokenizer)
        more = {"max_position_embeddings": 400} if tokenizer else {}
        save_other_model(folder, architecture, tokenizer, **more | settings)
    rows = "1" if kind == "bias in the head" else "3"
    if kind == "ALiBi":
        monkeypatch.setattr("hellaswag.MAX_LOGITS", 1)  # one row at a time
    evaluate(folder, "--limit", "16", "--json", str(tmp_path / "out.json"), "--batch-size", rows)
    examples = hellaswag.load_examples(TASKS)[:16]
    losses, lengths, by_sum, by_mean, labels = plain_scores(folder, examples, 400)
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


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_matmuls_are_in_the_precision_that_is_asked_for(kind, model, tmp_path, capsys):
    _, folder = model
    if kind == "llama":
        folder = tmp_path / "model"
        save_other_model(folder)
    found = []
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        evaluate(folder, "--limit", "2", "--dtype", dtype, "--json", str(tmp_path / "out.json"))
        rows = json.loads((tmp_path / "out.json").read_text())
        found.append([loss for row in rows for loss in row["losses"]])
        used = dtype if dtype != "auto" else "float32"
        assert f" threads), {used}: " in capsys.readouterr().out
    assert found[0] == found[1] != found[2] == pytest.approx(found[1], rel=0.05, abs=0.5)
    errors = [max(abs(a - b) for a, b in zip(row, found[1], strict=True)) for row in found[2:]]
    assert 0 < errors[1] < errors[0] / 2  # float16 has three bits more


def prepare(examples, block_size=160):
    return hellaswag.prepare(examples, block_size, encode)


def test_ranks_share_the_tasks(model):
    ours, _ = model
    tasks = prepare(hellaswag.load_examples(TASKS))
    alone = hellaswag.score(hellaswag.gpt_logits(ours), tasks, CPU, batch_size=1)
    shares = {}
    for rank in range(3):
        ranks = Ranks(rank, 3, torch.device("cpu"))
        share = hellaswag.score(hellaswag.gpt_logits(ours), tasks, ranks, batch_size=7)
        assert not shares.keys() & share.keys() and share
        shares |= share
    assert shares.keys() == alone.keys() == set(range(24))
    for i, result in alone.items():
        assert shares[i].losses == pytest.approx(result.losses, rel=1e-4)


@pytest.mark.skipif(not REAL.exists(), reason="needs the 1,000 tasks")
def test_tokens_of_the_real_tasks_are_those_of_context_and_ending_apart():
    """As build-nanogpt and others score GPT-2, though the text is tokenized whole."""
    examples = hellaswag.load_examples(REAL)
    for task, example in zip(prepare(examples, 1024), examples, strict=True):
        assert task.context == encode(example["ctx"])
        assert task.endings == [encode(" " + ending) for ending in example["endings"]]


def task(context="A man sits on a roof. He", label=1, **changes):
    endings = ["is ripping tiles off.", "jumps", "sleeps all day long", "holds a Rubik's cube."]
    return {"ctx": context, "label": label, "endings": endings, **changes}


def test_a_long_context_loses_its_beginning_and_the_endings_stay_whole(model, capsys):
    ours, _ = model
    long, short = task("far away " * 200 + "A man sits on a roof. He"), task()
    result = hellaswag.score(hellaswag.gpt_logits(ours), prepare([long, short]), CPU)[0]
    assert "1 contexts cut" in capsys.readouterr().out
    endings = [encode(" " + ending) for ending in long["endings"]]
    context = encode(long["ctx"])[max(map(len, endings)) - 161 :]
    for i, ending in enumerate(endings):
        logits = ours(torch.tensor([context + ending[:-1]]))[0][0, -len(ending) :]
        expected = F.cross_entropy(logits, torch.tensor(ending), reduction="sum").item()
        assert result.losses[i] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UserError, match=r"task 1: an ending of .* --seq-len"):
        prepare([short], 4)


def test_a_long_context_is_cut_alike_by_transformers(model, tmp_path):
    """GPT-2's tokenizer has a beginning-of-text token, but does not begin with it."""
    (tmp_path / "long.jsonl").write_text(json.dumps(task("far away " * 200 + "He")) + "\n")
    shutil.copytree(model[1], tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    del config["fingerprint"]
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    found = []
    for folder in (model[1], tmp_path / "other"):
        evaluate(folder, "--data", str(tmp_path / "long.jsonl"), "--json", str(tmp_path / "out"))
        found.append(json.loads((tmp_path / "out").read_text())[0])
    assert found[1].pop("losses") == pytest.approx(found[0].pop("losses"), rel=1e-4)
    assert found[0] == found[1]


def test_a_beginning_of_text_token_survives_when_a_context_is_cut():
    example = task("a b c d e f g", endings=["h i", "h", "h i j", "h"])
    codes = {letter: ord(letter) for letter in "abcdefghij"}
    (cut,) = hellaswag.prepare(
        [example], 6, lambda text: [1, *(codes[letter] for letter in text.split())], keep=1
    )
    assert cut.context == [1, *map(ord, "efg")] and cut.endings[2] == [*map(ord, "hij")]


def test_losses_are_float32_under_bfloat16(model):
    tasks, logits_at = prepare([task()]), hellaswag.gpt_logits(model[0])
    exact = torch.tensor(hellaswag.score(logits_at, tasks, CPU)[0].losses)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = torch.tensor(hellaswag.score(logits_at, tasks, CPU)[0].losses)
    assert (rounded * 2**10 % 1 > 0).all()  # bfloat16's are multiples of 2**-5, if above 4
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.5)


def test_training_evaluates_with_the_context_of_the_model(text, tmp_path, capsys):
    """A GPT-2 with a context of 160, fine-tuned on sequences of 16 tokens, as the script scores."""
    GPT(GPTConfig(160, 50257, 1, 1, 8)).save_pretrained(tmp_path / "model")
    args = ["--init", tmp_path / "model", "--max-steps 1 --save-every 1 --hellaswag-every 1"]
    train(*args, "--hellaswag-data", TASKS, "--data", text, "--log-dir", tmp_path / "log")
    assert "contexts cut" not in capsys.readouterr().out
    evaluate(tmp_path / "log")
    acc_norm = float(capsys.readouterr().out.split("acc_norm: ")[1])
    found = losses(tmp_path / "log", "hella")
    assert len(found) == 2 and found[1] == pytest.approx(acc_norm, abs=1e-4)


ENDINGS = [["a", "b", "c"], ["a", "b", "", "d"], ["a", "b", 3, "d"], ["a", "b", ["c"], "d"]]
ENDINGS += ["abcd", dict.fromkeys("abcd", "")]
BAD = [task(label=4), task("\ud800"), task(""), task(5), task(["a"]), {}, []]
BAD += [task(endings=endings) for endings in ENDINGS]


@pytest.mark.parametrize(
    "line", ["{", pytest.param("[" * 99_999, id="deep"), *map(json.dumps, BAD)]
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task()) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl, line 2: not a HellaSwag task"):
        hellaswag.load_examples(path)


def test_a_line_ends_at_a_newline_only(tmp_path):
    path, odd = tmp_path / "tasks.jsonl", task("one\u2028two\x85three")
    path.write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
    assert hellaswag.load_examples(path) == [odd]


def remove_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def write(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES = {
    "no tokenizer": (remove_tokenizer, "no tokenizer"),
    "tokenizer": (write("tokenizer.json", lambda b: b[:-99]), "tokenizer cannot be loaded"),
    "weights": (write("model.safetensors", lambda b: b[:-1000]), "model cannot be loaded"),
    "config": (write("config.json", lambda content: b"{"), "no model here"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line(name, tmp_path):
    save_other_model(tmp_path)
    damage, message = DAMAGES[name]
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path, monkeypatch):
    """BERT has all tokens see each other, unless it is configured as a decoder."""
    for decoder in (True, False):
        save_other_model(tmp_path, "bert", is_decoder=decoder)
        expected = pytest.raises(UserError, match="not a causal language model")
        with contextlib.nullcontext() if decoder else expected:
            evaluate(tmp_path, "--limit", "1")


@pytest.mark.parametrize("flag", ["--batch-size=0", "--limit=-1"])
def test_numbers_out_of_range_are_one_line(flag):
    with pytest.raises(UserError, match="at least 1 and 0"):
        main(["-m", "nowhere", flag])


def test_json_needs_a_place_before_any_work(tmp_path):
    for place, message in ((tmp_path, "is a folder"), (tmp_path / "none/a", "folder is missing")):
        with pytest.raises(UserError, match=message):
            evaluate("no-model", "--json", str(place))


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """answers(*contents, …) are what the download gets; errors are raised."""

    def set_answers(*contents, sha256=""):
        monkeypatch.setattr(hellaswag, "urlopen", mock.Mock(side_effect=contents))
        monkeypatch.setattr(hellaswag, "SHA256", sha256)

    monkeypatch.setattr(hellaswag, "DOWNLOADED", tmp_path / "cache" / "hellaswag_val.jsonl")
    monkeypatch.setattr(hellaswag.time, "sleep", lambda seconds: None)
    return set_answers


def test_download_is_retried_and_verified(answers):
    good = (json.dumps(task()) + "\n").encode()
    missing = urllib.error.HTTPError("", 404, "Not Found", {}, None)
    contents = map(io.BytesIO, [b"wrong content", good, good])
    broken = http.client.IncompleteRead(b"")
    answers(broken, *contents, *[missing] * 3, sha256=hashlib.sha256(good).hexdigest())
    path = hellaswag.DOWNLOADED
    assert hellaswag.download() == path and path.read_bytes() == good
    assert hellaswag.download() == path
    path.write_bytes(good[:-5])  # damaged: downloaded again
    assert hellaswag.download().read_bytes() == good
    path.unlink()
    with pytest.raises(UserError, match=r"download failed .*404.*; --data"):
        hellaswag.download()
    assert not list(path.parent.iterdir())


def test_a_run_whose_download_fails_goes_on_without(text, tmp_path, answers, capsys):
    answers(*[OSError("no network")] * 3)
    flags = "--hellaswag-every 1 --max-steps 2 --eval-every 1 --data"
    assert train(flags, text, "--log-dir", tmp_path / "log") == 0
    assert capsys.readouterr().out.count("warning: training without HellaSwag: ") == 1
    assert not losses(tmp_path / "log", "hella") and len(losses(tmp_path / "log", "val")) == 3


class OtherMachine(Ranks):
    """Ranks of which the last one's download failed, on another machine."""

    def gather(self, value):
        return [value, "no network there"]


def test_a_failed_download_on_another_machine_is_agreed_on(capsys):
    other = OtherMachine(0, 2, torch.device("cpu"))
    assert hellaswag.prepare_for_training(str(TASKS), 160, other) is None
    assert len(hellaswag.prepare_for_training(str(TASKS), 160, CPU)) == 24
    assert Path(TASKS).exists()

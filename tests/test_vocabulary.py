"""Runs whose tokens are not GPT-2's: those learned from a text, and words, such as numbers."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fineweb
import hellaswag
import sample
from support import documents, huggingface, tokenizer
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, losses, posix, train, words

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"
EVALUATED = "--eval-every 2 --save-every 2 --sample-every 2 --hellaswag-every 2 --hellaswag-data"


def make_shards(text, out, size=400):
    fineweb.main(words("--input", text, "--workers 1 --vocab-size", size, "--out", out))
    return out


def write_vocabulary(folder, merges, vocab):
    folder.mkdir(exist_ok=True)
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    (folder / "vocab.json").write_text(vocab, encoding="utf-8")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A vocabulary learned from Shakespeare, by tiktoken, by tokenizers, and by transformers."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Tokenizer

    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:50_000]
    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder, *tokenizer.learn_vocabulary([text, "世界" * 9, "\n\n\t  " * 9], 700))
    files = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    by_tokenizers = ByteLevelBPETokenizer(*files)
    by_transformers = GPT2Tokenizer.from_pretrained(folder)
    return get_tokenizer(folder), by_tokenizers.encode, by_transformers.encode


PIECES = [
    "  ",
    "\n\n",
    "\t",
    " the",
    " 1234567",
    "don't",
    "été",
    "世界",
    "🙂",
    "\x85",
    "'ll",
    "====",
]
strings = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=16).map("".join)


@given(text=strings)
@example(text="a" * 1_000_000)
@settings(max_examples=100, deadline=None)
def test_tokens_are_those_of_tokenizers_and_transformers(three, text):
    ours, by_tokenizers, by_transformers = three
    ids = ours.encode_ordinary(text)
    assert ids == by_tokenizers(text).ids and ours.decode(ids) == text
    if "<|endoftext|>" not in text:
        assert ids == by_transformers(text)


letters = st.text(st.sampled_from("aab "), min_size=1, max_size=60)


@given(texts=st.lists(letters, min_size=1, max_size=9), text=letters)
@settings(max_examples=100, deadline=None)
def test_also_those_of_texts_that_repeat(texts, text):
    """There are many ways in which pairs could be joined."""
    from tokenizers import ByteLevelBPETokenizer

    try:
        merges, vocab = tokenizer.learn_vocabulary(texts, 262)
    except UserError:  # no pair is left that occurs twice
        return
    pairs = [tuple(line.split()) for line in merges.split("\n")[1:-1]]
    theirs = ByteLevelBPETokenizer(json.loads(vocab), pairs).encode(text).ids
    assert tokenizer.Tokenizer(merges, vocab).encode_ordinary(text) == theirs


def test_gpt2s_files_are_openais():
    """The checksums are those in tiktoken_ext/openai_public.py."""
    sums = {
        "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    }
    for name, digest in sums.items():
        assert hashlib.sha256((tokenizer.GPT2 / name).read_bytes()).hexdigest() == digest


def test_what_is_learned_from_is_spread_and_bounded(monkeypatch):
    monkeypatch.setattr(documents, "LEARN_CHARS", 20_000)
    texts = [f"{i:05d}" * 300 for i in range(100)]  # of 1,500 characters
    kept = documents.pieces_to_learn_from(texts)
    found = [int(piece[:5]) for piece in kept]
    assert 10_000 <= sum(map(len, kept)) <= 20_000 and found == sorted(found)
    assert max(np.diff([0, *found, 99])) <= 10
    assert "".join(documents.pieces_to_learn_from(texts[:9])) == "".join(texts[:9])


@posix
def test_a_learned_vocabulary_goes_from_the_shards_to_the_checkpoint(text, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    data, log = make_shards(text, tmp_path / "data"), tmp_path / "log"
    tokens = np.concatenate([np.load(path) for path in sorted(data.glob("*.npy"))[::-1]])
    expected = get_tokenizer(data).encode_ordinary(text.read_text(encoding="utf-8"))
    assert tokens.tolist() == [399, *expected] and get_tokenizer(data).n_vocab == 400
    args = ["--data", data, "--log-dir", log, EVALUATED, TASKS, "--seq-len 128"]
    args += ["--micro-batch-size 1 --eval-tokens 128"]
    train(*args, "--max-steps 2")
    size = len(get_tokenizer(data).decode_bytes(tokens[1:129].tolist()))
    bits = losses(log, "val")[0] * 128 / np.log(2) / size
    assert losses(log, "bpb")[0] == pytest.approx(bits, abs=1e-5) and len(losses(log, "hella")) == 2
    folder = log / "step_000002"
    for name in ("vocab.json", "merges.txt"):
        assert (folder / name).read_bytes() == (data / name).read_bytes()
    theirs = AutoTokenizer.from_pretrained(folder)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 400 == len(theirs)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 399
    with torch.no_grad():
        continued = pipeline("text-generation", str(folder))("ROMEO:", max_new_tokens=3)
    assert continued[0]["generated_text"].startswith("ROMEO:")
    capsys.readouterr()
    sample.main(words(folder, "ROMEO: --max-new-tokens 9 --device cpu"))
    assert capsys.readouterr().out.startswith("ROMEO:")
    hellaswag.main(words("-m", folder, "--data", TASKS, "--limit 4 -d cpu"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 acc:")

    # transformers saves the vocabulary as tokenizer.json, from which it is read again.
    resaved = tmp_path / "resaved"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(resaved)
    theirs.save_pretrained(resaved)
    for name in ("vocab.json", "merges.txt"):
        (resaved / name).unlink(missing_ok=True)
    assert huggingface.tokenizer_of(resaved) == get_tokenizer(data)
    # Without any files they would be GPT-2's, and those are too many.
    (resaved / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="the model has 400 tokens"):
        sample.main(words(resaved, "ROMEO: --device cpu"))

    # The vocabulary of another folder, or of changed files, is not that of the weights.
    other = make_shards(text, tmp_path / "other", 300)
    other_run = f"--max-steps 1 --log-dir {tmp_path}/log2"
    for elsewhere in (other, text):
        with pytest.raises(UserError, match=r"its vocabulary \(400 tokens\)"):
            train("--data", elsewhere, "--init", folder, other_run)
    train("--data", data, "--init", folder, "--seq-len 128 --micro-batch-size 1", other_run)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(other / name, data)
    for command in (
        lambda: train(*args, "--max-steps 4 --resume"),
        lambda: make_shards(text, data),
        lambda: fineweb.main(words("--verify --out", data)),
    ):
        with pytest.raises(UserError, match=r"vocab"):
            command()


@posix
def test_shards_with_different_or_damaged_vocabularies_are_refused(text, tmp_path):
    data = make_shards(text, tmp_path / "all" / "a")
    run = ["--max-steps 1 --log-dir", tmp_path / "log", "--data"]
    train("--max-steps 1 --log-dir", tmp_path / "first", "--data", tmp_path / "all")  # its own
    make_shards(text, tmp_path / "all" / "b", 300)
    with pytest.raises(UserError, match="different vocabularies"):
        train(*run, tmp_path / "all")
    (data / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"merges\.txt"):
        train(*run, data)
    (data / "vocab.json").unlink()
    with pytest.raises(UserError, match="vocabulary must match its manifest"):
        make_shards(text, data)


@posix
def test_a_run_that_goes_on_and_one_that_is_given_the_files_are_equal(text, tmp_path):
    flags = words("--input", text, "--workers 1 --shard-size 1000 --out")
    fineweb.main([*flags, str(tmp_path / "whole/a"), "--vocab-size", "300"])
    for limit in (1, 2, 0):
        part = [str(tmp_path / "parts/a"), "--vocab-size", "300", "--max-shards", str(limit)]
        fineweb.main([*flags, *part])
    (tmp_path / "given/a").mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tmp_path / "whole/a" / name, tmp_path / "given/a")
    fineweb.main([*flags, str(tmp_path / "given/a")])
    for path in (tmp_path / "whole/a").iterdir():
        for other in ("parts", "given"):
            content = path.read_bytes()
            if other == "given":  # Only the manifest says that the vocabulary was learned.
                content = content.replace(b' "learned": true,\n', b"")
            assert content == (tmp_path / other / "a" / path.name).read_bytes(), path.name


@posix
def test_the_folder_may_be_that_of_the_texts(text, tmp_path):
    """So merges.txt is there when the command is repeated."""
    (tmp_path / "de").mkdir()
    shutil.move(text, tmp_path / "de/a.txt")
    for limit in (1, 0):
        flags = f"--vocab-size 300 --workers 1 --shard-size 1000 --max-shards {limit}"
        folder = str(tmp_path / "de")
        fineweb.main(["--input", f"{folder}/*.txt", "--out", folder, *words(flags)])
    train("--data", tmp_path / "de", "--max-steps 1 --log-dir", tmp_path / "log")


@posix
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--vocab-size 256", "257"),
        ("--vocab-size 65537", "65536"),
        ("--vocab-size 9000", "lower it"),  # the text has fewer pairs
        ("--pretokenized 1 --vocab-size 300", "--pretokenized"),
    ],
)
def test_vocabularies_that_cannot_be(flags, named, text, tmp_path):
    source = () if "pretokenized" in flags else ("--input", text)
    with pytest.raises(UserError, match=named):
        fineweb.main(words(*source, flags, "--out", tmp_path / "out"))


@pytest.mark.parametrize("first", ["--vocab-size 300", ""])
def test_finished_shards_keep_their_vocabulary(first, text, tmp_path):
    """Another size for the same folder is refused, and the same command does nothing."""
    flags = ["--input", text, "--workers 1 --out", tmp_path / "out"]
    fineweb.main(words(*flags, first))
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    fineweb.main(words(*flags, first))
    with pytest.raises(UserError, match=f"has a vocabulary of {300 if first else 50257}"):
        fineweb.main(words(*flags, "--vocab-size 400"))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_files_that_do_not_fit_each_other(tmp_path):
    merges, vocab = tokenizer.learn_vocabulary(["the path of the path"] * 3, 262)
    swapped = json.loads(vocab)
    pairs = merges.split("\n")[1:-1]
    first, second = (pair.replace(" ", "") for pair in pairs[:2])
    swapped[first], swapped[second] = swapped[second], swapped[first]
    spoiled = {
        "a pair too few": ("\n".join(pairs[:-1]), vocab),
        "another order": (merges, json.dumps(swapped)),
        "no end": (merges, vocab.replace("<|endoftext|>", "Ā")),
        "no numbers": (merges, "[]"),
        "no JSON": (merges, vocab[:-1]),
    }
    for name, files in spoiled.items():
        write_vocabulary(tmp_path / name, *files)
        with pytest.raises(UserError, match="not like GPT-2's"):
            get_tokenizer(tmp_path / name)


def test_a_tokenizer_json_that_is_not_gpt2s_kind(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(["the path of the path"] * 3, 262)
    learner.add_special_tokens(["<|endoftext|>", "<pad>"])
    learner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json has added tokens: <pad>"):
        get_tokenizer(tmp_path)


@posix
@pytest.mark.parametrize("size", [400, 0])
def test_a_vocabulary_without_its_pairs_is_refused(size, text, tmp_path, capsys):
    """That of a learned vocabulary and of GPT-2 itself, with the data or with a model. With
    tokenizer.json nothing is missing."""
    from transformers import AutoTokenizer

    data, log = tmp_path / "data", tmp_path / "log"
    make_shards(text, data, size)
    if not size:  # GPT-2's shards need no files, but may have them
        for name in tokenizer.FILES:
            shutil.copy(tokenizer.GPT2 / name, data)
    expected = get_tokenizer(data)
    run = ["--max-steps 1 --save-every 1 --data", data, "--log-dir"]
    train(*run, log)
    (model,) = log.glob("step_*")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "saved")
    continued = words(model, "ROMEO: --device cpu --max-new-tokens 5 --temperature 0")
    capsys.readouterr()
    sample.main(continued)
    before = capsys.readouterr().out
    for folder, use in {
        data: lambda: train(*run, tmp_path / "log2"),
        model: lambda: sample.main(continued),
    }.items():
        (folder / "merges.txt").unlink()
        with pytest.raises(UserError, match=r"merges\.txt"):
            use()
        shutil.copy(tmp_path / "saved/tokenizer.json", folder)
        use()
        assert get_tokenizer(folder) == expected
    assert capsys.readouterr().out.endswith(before)

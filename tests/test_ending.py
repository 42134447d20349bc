"""The last lines of a run: samples to be read, the losses of frequencies, the picture, how to go on."""

import itertools
import math
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train_gpt2
from support import ending, plots, runlog
from support.cli import InputError
from support.ngrams import frequencies, frequency_losses
from support.report.around import last_samples
from support.shards import TokenStream, tokenize_text
from tests.conftest import TINY, losses


def by_dictionaries(train: list[int], V: int) -> tuple[Callable[[int], float], Callable[[int, int], float]]:
    """The same formulas, a token at a time: p(w) and p(w|v), called with v and w."""
    n, after = Counter(train), defaultdict(Counter)
    for v, w in itertools.pairwise(train):
        after[v][w] += 1

    def p(w: int) -> float:
        return (n[w] + len(n) / V) / (len(train) + len(n))

    def p_pair(v: int, w: int) -> float:
        return (after[v][w] + len(after[v]) * p(w)) / (after[v].total() + len(after[v])) if v in after else p(w)

    return p, p_pair


@given(st.integers(1, 9).flatmap(lambda V: st.tuples(st.just(V), *[st.lists(st.integers(0, V - 1), min_size=2)] * 2)))
@settings(max_examples=60, deadline=None)
def test_frequencies_are_probabilities_and_those_of_plain_counting(example):
    V, train, val = example
    tokens = np.array(train, dtype=np.uint16)
    v, w = (side.ravel() for side in np.meshgrid(np.arange(V), np.arange(V), indexing="ij"))
    single, pair = (values.reshape(V, V) for values in frequencies(tokens, v, w, V))
    p, p_pair = by_dictionaries(train, V)
    np.testing.assert_allclose(single, [[p(w) for w in range(V)]] * V)
    np.testing.assert_allclose(pair, [[p_pair(v, w) for w in range(V)] for v in range(V)])
    np.testing.assert_allclose([single.sum(1), pair.sum(1)], 1)
    found = frequency_losses(tokens, np.array(val, dtype=np.uint16), V)
    expected = [-np.mean([math.log(p(w)) for w in val[1:]]),
                -np.mean([math.log(p_pair(v, w)) for v, w in itertools.pairwise(val)])]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_pair_of_the_largest_tokens_has_a_number():
    """50,257 squared is above 2 to the 31st."""
    tokens = np.array([50256, 50256, 50255] * 100, dtype=np.uint16)
    assert max(frequency_losses(tokens, tokens)) < 1


def test_a_run_shows_what_it_made(text, tmp_path, monkeypatch, capsys):
    """Losses beside those of simpler models on the same tokens, the picture with them, two samples, two commands."""
    monkeypatch.chdir(tmp_path)
    drawn = {}
    monkeypatch.setattr(plots, "draw_baseline", lambda axes, name, value, right=False: drawn.update({name: value}))
    args = [*TINY, "--data", "text.txt", "--eval-every", "2", "--eval-tokens", "100", "--sample-every", "2",
            "--save-every", "2", "--log-dir", "my log", "--max-steps=2"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train_gpt2.py"), *args])
    assert train_gpt2.main([*args, "--data", str(tmp_path / "text.txt")]) == 0
    for name in ("run.json", "step_000002/README.md"):  # what may be published does not say where this was
        content = Path("my log", name).read_text()
        assert "train_gpt2.py" in content and str(tmp_path) not in content
    output = capsys.readouterr().out
    p, p_pair = by_dictionaries(tokenize_text(text, "train").tolist(), 50257)
    val = tokenize_text(text, "val").tolist()[:97]  # six sequences of 16 tokens, and the last one's target
    single = -np.mean([math.log(p(w)) for w in val[1:]])
    pair = -np.mean([math.log(p_pair(v, w)) for v, w in itertools.pairwise(val)])
    table = [(f"{loss:.4f}", name) for loss, name in sorted([
        (math.log(50257), "knowing nothing"), (single, "token frequencies"), (pair, "pair frequencies"),
        (losses("my log", "val")[-1], "this model")], reverse=True)]
    end = output[output.index("rank 0 sample 0:") :]
    assert "on 96 tokens:" in end
    assert re.findall(r"^ +(\d+\.\d{4})  (\w+ \w+)", end, re.MULTILINE) == table
    assert drawn == {"token frequencies": pytest.approx(single), "pair frequencies": pytest.approx(pair)}
    assert Path("my log/curves.png").read_bytes().endswith(b"IEND\xaeB\x60\x82")
    samples = last_samples(output)
    assert len(samples) == output.count("rank 0 sample") == 2 and all("\n  ROMEO:" in sample for sample in samples)
    for part in ("\ndone: 2 steps, ", str(Path("my log/curves.png")), "my log/step_000002/, which Hugging Face loads"):
        assert part in end, part
    python, script, *words = shlex.split(re.search("to talk to it: (.+)", end)[1])
    assert python == "python" and Path(script).name == "sample.py" and Path(script).exists()
    assert words == ["my log", "ROMEO:"]
    # The command to go on, as printed; without matplotlib, and with a shard that turns out to be damaged.
    python, script, *words = shlex.split(re.search("to train on:   (.+)", end)[1])
    assert (python, Path(script).name, words[-3:]) == ("python", "train_gpt2.py", ["--resume", "--max-steps", "4"])

    def damaged(self, count):
        raise InputError("shard: damaged")

    monkeypatch.setattr(TokenStream, "head", damaged)
    monkeypatch.setattr(runlog, "save_curves", lambda log_dir, baselines: None)
    assert train_gpt2.main(words) == 0
    output = capsys.readouterr().out
    assert "resumed from my log" in output and "step     3" in output and "warning: shard: damaged\n" in output
    assert "done: 4 steps" in output and "token frequencies" not in output and "curves:" not in output
    # Once more: there is nothing left to do, and nothing to show.
    assert train_gpt2.main(words) == 0
    assert "done" not in capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["--max-steps", "60", "--resume", "--seed", "3"], [
    "--max_steps=7", "--no-resume", "--check-against", "reference/shakespeare", "--sample-prompt", "Hello, I'm $ \"!\"",
    "--no-shuffle"]])
def test_the_command_to_train_on_is_the_same_run(args):
    _, _, *words = shlex.split(ending.longer(args, 1200))
    config = train_gpt2.read_config(args)
    assert train_gpt2.read_config(words) == replace(config, resume=True, max_steps=1200, check_against="")


def test_on_several_ranks_torchrun_has_the_command(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert ending.longer(["--max-steps", "2"], 4) == "the same torchrun command with --resume --max-steps 4"


def test_a_sample_to_be_read():
    """No control codes, which a terminal would obey; no long lines; no more than one blank line."""
    assert ending.to_read("ROMEO:\n\n\n\nI\x1b[2J am\x00\r\nhere.\n\n") == "  ROMEO:\n\n  I [2J am\n  here."
    assert max(map(len, ending.to_read("word " * 99).split("\n"))) <= 80

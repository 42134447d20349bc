"""sample.py on a run's checkpoints, and on models of other programs, against transformers."""

import io
import json
import shutil
import sys

import pytest
import torch

import sample
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import save_checkpoint, words
from train_gpt2 import GPT, GPTConfig


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    """A run's folder with two untrained checkpoints; the context is 24 tokens."""
    folder = tmp_path_factory.mktemp("log")
    for step, seed in ((20, 0), (100, 1)):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(24, 50257, 1, 2, 32))
        torch.nn.init.normal_(model.wte.weight, std=0.3)  # one token is clearly likeliest
        save_checkpoint(model, folder / f"step_{step:06d}")
    return folder


def greedy(log_dir, prompt, max_new_tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(log_dir / "step_000100")
    idx = torch.tensor([get_tokenizer().encode_ordinary(prompt)])
    for _ in range(max_new_tokens):  # slides over the context
        idx = torch.cat([idx, model(idx[:, -24:]).logits[:, -1:].argmax(-1)], dim=1)
    return get_tokenizer().decode(idx[0].tolist())


def test_samples_depend_on_the_seed(log_dir, capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        sample.main(words(log_dir, "ROMEO: --max-new-tokens 12 --num-samples 2 --seed", seed))
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2] and outputs[0].count("ROMEO:") == 2
    first, second = outputs[0].split("ROMEO:")[1:]
    assert first != second


@pytest.fixture
def of_another_program(log_dir, tmp_path):
    """A GPT-2 of another program, which names no script."""
    folder = tmp_path / "model"
    shutil.copytree(log_dir / "step_000100", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["script"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_newest_intact_checkpoint_is_taken(log_dir, tmp_path, capsys):
    """A file that sample.py does not read may be damaged or gone."""
    folder = tmp_path / "log"
    shutil.copytree(log_dir, folder)
    args = [str(folder), *words("ROMEO: --max-new-tokens 8 --device cpu --code train_gpt2.py")]
    (folder / "step_000100/training_state.pt").unlink()
    sample.main(args)
    newest = capsys.readouterr()
    assert "damaged" not in newest.err
    weights = folder / "step_000100/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    sample.main(args)
    older = capsys.readouterr()
    assert "step_000100" in older.err and older.out != newest.out


def test_each_option_acts(log_dir, monkeypatch, capsys):
    def run(options, prompt="ROMEO:"):
        sample.main([str(log_dir), prompt, *words("--device cpu --max-new-tokens 9", options)])
        return capsys.readouterr().out

    likeliest = greedy(log_dir, "ROMEO:", 9) + "\n"
    for options in ("--temperature 0", "--top-k 1", "--temperature 1e-6"):
        assert run(options) == likeliest, options
    drawn = run("--seed 3")
    assert likeliest != drawn != run("--seed 4") and drawn != run("--seed 3 --temperature 3")
    assert run("--temperature 99 --top-k 0") != run("--temperature 99"), "as if from 50 tokens"
    # The second sample has the next seed.
    three = drawn + run("--seed 4") + run("--seed 5")
    assert run("--seed 3 --num-samples 3") == three
    assert run("--seed 3 --num-samples 3") == three
    assert run("--temperature 0 --max-new-tokens 3") == greedy(log_dir, "ROMEO:", 3) + "\n"


def test_what_is_not_a_gpt2_is_one_line(of_another_program, capsys):
    """Other tokens than GPT-2's would be read wrongly."""
    path = of_another_program / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(UserError, match="llama"):
        sample.main(words(of_another_program, "a --device cpu"))
    path.write_text(json.dumps(config))
    tokens = json.loads((of_another_program / "vocab.json").read_text())
    tokens["Hello"], tokens["World"] = tokens["World"], tokens["Hello"]
    (of_another_program / "vocab.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match="not numbered in the order"):
        sample.main(words(of_another_program, "a --device cpu"))


def test_text_streams_by_whole_characters_up_to_the_end_of_the_document(
    log_dir, monkeypatch, capsys
):
    """A character may span several tokens; 50256 may be the prompt's own."""
    tokens = [*get_tokenizer().encode_ordinary("naïve 東京 🙂"), 50256, 11, 12]

    def generate(self, idx, *options, on_token):
        for token in tokens:
            if on_token(torch.tensor([token])):
                return
        raise AssertionError("it should have ended")

    monkeypatch.setattr(GPT, "generate", generate)
    monkeypatch.setattr(sample, "load_gpt_class", lambda code: GPT)
    sample.main(words(log_dir, "<|endoftext|>So", "--device cpu"))
    assert capsys.readouterr().out == "Sonaïve 東京 🙂\n"


def test_a_sample_ends_although_others_go_on(log_dir, monkeypatch, capsys):
    a, b = get_tokenizer().encode_ordinary("ab")[0], get_tokenizer().encode_ordinary("b")[0]
    rows = torch.tensor([[a, b], [50256, b], [a, b], [a, 50256], [a, b]])

    def generate(self, idx, *options, on_token):
        assert [on_token(tokens) for tokens in rows[:4]] == [False, False, False, True]

    monkeypatch.setattr(GPT, "generate", generate)
    monkeypatch.setattr(sample, "load_gpt_class", lambda code: GPT)
    sample.main(words(log_dir, "So", "--device cpu --num-samples 2"))
    assert capsys.readouterr().out == "Soab\nSobbb\n"


def test_a_token_without_a_text_is_one_character(tmp_path, capsys):
    """Many models have more logits than their tokenizer has tokens, to be faster."""
    model = GPT(GPTConfig(24, 50304, 1, 2, 32))
    with torch.no_grad():
        model.wte.weight[50300] = 1.0
        model.ln_f.bias.fill_(1.0)  # so that this token is always the likeliest
    model.save_pretrained(tmp_path, get_tokenizer())
    sample.main(words(tmp_path, "ROMEO: --device cpu --max-new-tokens 3 --temperature 0"))
    assert capsys.readouterr().out == "ROMEO:\ufffd\ufffd\ufffd\n"


def standard_input(text):
    return io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")


def test_prompts_from_standard_input(log_dir, monkeypatch, capsys):
    """An empty line is an empty prompt, after which this model ends the document."""
    monkeypatch.setattr(sys, "stdin", standard_input(b"To be\n\nor not"))
    sample.main([str(log_dir), *words("--temperature 0 --max-new-tokens 9")])
    out, err = capsys.readouterr()
    assert out == f"{greedy(log_dir, 'To be', 9)}\n\n{greedy(log_dir, 'or not', 9)}\n" and not err


def test_it_slides_over_the_context(log_dir, capsys):
    for prompt, n in (("ROMEO:", 40), (" to" + " or" * 98, 5)):
        expected = greedy(log_dir, prompt, n) + "\n"
        capsys.readouterr()
        sample.main([str(log_dir), prompt, *words("--temperature 0 --max-new-tokens", n)])
        out, err = capsys.readouterr()
        assert out == expected and not err


BAD = ["seed=-1", "temperature=nan", "max-new-tokens=0", "num-samples=0", "top-k=-1"]


def test_bad_flags_are_one_line(log_dir):
    for flag in BAD:
        with pytest.raises(UserError, match=f"^--{flag.split('=')[0]} "):
            sample.main(words(log_dir, f"ROMEO: --{flag}"))


def test_a_prompt_that_is_not_utf8_is_continued(log_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", standard_input(b"To \xff\n"))
    for args in ([], ["To \udcff"]):  # the second as Python reads such an argument
        sample.main([str(log_dir), *args])
        assert capsys.readouterr().out.startswith("To \ufffd")


def test_a_folder_without_a_tokenizer_is_taken_for_gpt2s(of_another_program, tmp_path, capsys):
    args = [str(of_another_program), "ROMEO:", "--max-new-tokens", "5", "--temperature", "0"]
    sample.main(args)
    with_tokenizer = capsys.readouterr().out
    for name in ("vocab.json", "merges.txt"):
        (of_another_program / name).unlink()
    sample.main(args)
    assert capsys.readouterr().out == with_tokenizer
    with pytest.raises(UserError, match=f"{tmp_path}.*config.json"):
        sample.main([str(tmp_path), "ROMEO:"])

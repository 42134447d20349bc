"""sample.py on what training leaves."""

import io

import pytest
import torch

import sample
from support.tokenizer import get_tokenizer
from train_gpt2 import GPT, GPTConfig


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory):
    """A run's folder with two checkpoints of untrained models; the context is 24 tokens."""
    folder = tmp_path_factory.mktemp("log")
    for step, seed in ((20, 0), (100, 1)):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(24, 50257, 1, 2, 32))
        torch.nn.init.normal_(model.wte.weight, std=0.3)  # so that the likeliest token stands out
        model.save_pretrained(folder / f"step_{step:06d}")
    return folder


def test_greedy_output_of_the_newest_checkpoint_is_the_argmax_otherwise_the_seed_decides(
    log_dir, capsys
):
    sample.main([str(log_dir), "ROMEO:", "--temperature", "0", "--max-new-tokens", "9"])
    model = GPT.from_pretrained(log_dir / "step_000100")
    idx = torch.tensor([get_tokenizer().encode_ordinary("ROMEO:")])
    expected = get_tokenizer().decode(model.generate(idx, 9, top_k=1)[0].tolist())
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    args, outputs = (
        [str(log_dir), "ROMEO:", "--max-new-tokens", "12", "--num-samples", "2", "--seed"],
        [],
    )
    for seed in ("1", "1", "2"):
        sample.main([*args, seed])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2] and outputs[0].count("ROMEO:") == 2


def test_prompts_from_standard_input_and_the_end_of_the_context(log_dir, monkeypatch, capsys):
    monkeypatch.setattr(sample.sys, "stdin", io.StringIO("To be\n" + "or not " * 50 + "\n"))
    sample.main([str(log_dir), "--max-new-tokens", "5000"])
    out, err = capsys.readouterr()
    assert out.startswith("To be") and "or not or not" in out and "prompt>" not in err

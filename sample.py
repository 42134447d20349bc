"""Continues prompts with a model and prints each token as it is sampled.

python sample.py log "Hello, I'm a language model,"          # the newest checkpoint of a run
python sample.py log/step_000400 "ROMEO:" --num-samples 3
python sample.py gpt2                                        # a hub name; asks for prompts
"""

import sys
from codecs import getincrementaldecoder
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from tyro.conf import Positional

from support.command_line import flag, parse_args
from support.devices import choose_device
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT
from support.huggingface import find_model, tokenizer_of
from support.scripts import load_gpt_class
from support.tokenizer import Tokenizer, encode_prompt, text_bytes

if TYPE_CHECKING:
    from train_gpt2 import GPT


@dataclass(frozen=True)
class SampleConfig:
    """Continues a prompt with a GPT-2."""

    model: Positional[str]  # log folder (its newest checkpoint), model folder, or hub name
    prompt: Positional[str] = ""  # text to continue; empty: each line of standard input
    max_new_tokens: int = 100  # at most; a sample also ends at <|endoftext|>
    temperature: float = 1.0  # divides the logits: below 1 favours likely tokens; 0: the likeliest
    top_k: int = 50  # number of likeliest tokens to draw from; 0: all
    seed: int = 42  # of the first sample; incremented per sample
    num_samples: int = 1  # samples per prompt
    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of matrix products
    code: str = str(ROOT / "train_gpt2.py")  # script that has trained the model


def sample(
    model: "GPT",
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    device: torch.device,
) -> None:
    """Prints continuations of the prompt, each token as soon as it is sampled."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt {prompt!a}: not UTF-8") from None
    eot = tokenizer.eot_token
    tokens = encode_prompt(prompt, tokenizer)
    autocast = torch.autocast(
        device.type, getattr(torch, config.dtype), enabled=config.dtype != "float32"
    )
    for i in range(config.num_samples):
        idx = torch.tensor([tokens], device=device)  # (1, T)
        generator = torch.Generator(device).manual_seed(config.seed + i)
        utf8 = getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        known = [token for token in tokens if token != eot]
        print(utf8.decode(text_bytes(known, tokenizer)), end="", flush=True)
        for _ in range(config.max_new_tokens):
            with autocast:
                idx = model.generate(idx, 1, config.temperature, config.top_k, generator)
            token = int(idx[0, -1])
            if token == eot:
                break
            print(utf8.decode(text_bytes([token], tokenizer)), end="", flush=True)
        print(utf8.decode(b"", final=True))


def main(args: list[str] | None = None) -> None:
    config = parse_args(SampleConfig, args=args)
    for name, least in {"max_new_tokens": 1, "num_samples": 1, "top_k": 0, "seed": 0}.items():
        value = getattr(config, name)
        if not least <= value < 2**63:  # torch's integers
            raise UserError(f"{flag(name)} {value}: must be at least {least} and below 2**63")
    if config.temperature != 0 and not 1e-6 <= config.temperature <= 1e6:
        raise UserError(f"--temperature {config.temperature}: must be 0, or from 1e-6 to 1e6")
    device = choose_device(config.device)
    gpt_class = load_gpt_class(config.code)
    folder = find_model(config.model)  # downloads it if it is a name on the Hub
    model = gpt_class.from_pretrained(folder).to(device)
    tokenizer = tokenizer_of(folder)
    if config.prompt:
        sample(model, tokenizer, config.prompt, config, device)
        return
    # Bytes that aren't UTF-8 are read as in an argument, where sample() reports them.
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("prompt (Ctrl-C ends)> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of the input; an empty line is "\n"
            return
        sample(model, tokenizer, line.rstrip("\n"), config, device)


if __name__ == "__main__":
    run_and_exit(main)

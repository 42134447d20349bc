"""Continues prompts with a model and prints each token as it is sampled.

python sample.py log "Hello, I'm a language model,"          # the newest checkpoint of a run
python sample.py log/step_000400 "ROMEO:" --num-samples 3
python sample.py gpt2                                        # a hub name; asks for prompts
"""

import sys
from codecs import IncrementalDecoder, getincrementaldecoder
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from tiktoken import Encoding
from tyro.conf import Positional

from support.command_line import flag, parse_args
from support.devices import choose_device
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT
from support.huggingface import find_model, load_gpt, read_config
from support.model_code import load_gpt_class

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
    code: str = ""  # script whose model it is; empty: as the run recorded it, else train_gpt2.py


def load(name: str, device: torch.device, code: str) -> "GPT":
    """The GPT-2 or the fork called `name`, whether this program has trained it or another."""
    folder = find_model(name)
    model = load_gpt(folder, device, code)
    if model is not None:
        return model
    kind = read_config(folder).get("model_type")
    if kind != "gpt2":
        remedy = f'in Python, transformers.pipeline("text-generation", "{name}") samples from it'
        raise UserError(f"{name}: a model of type {kind}, not a GPT-2; {remedy}")
    model_class = load_gpt_class(Path(code or ROOT / "train_gpt2.py"))
    return model_class.from_pretrained(folder).to(device)


def sample(model: "GPT", prompt: str, config: SampleConfig, device: torch.device) -> None:
    """Prints continuations of the prompt, each token as soon as it is sampled."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt {prompt!a}: not UTF-8") from None
    tokenizer = model.tokenizer
    if tokenizer is None:  # It was trained on numbers.
        eot = None
        tokens = read_numbers(prompt, model.config.vocab_size)
    else:
        # Without a prompt: after <|endoftext|>, where a new document begins.
        eot = tokenizer.eot_token
        tokens = tokenizer.encode(prompt, allowed_special="all") or [eot]
    autocast = torch.autocast(
        device.type, getattr(torch, config.dtype), enabled=config.dtype != "float32"
    )
    for i in range(config.num_samples):
        idx = torch.tensor([tokens], device=device)  # (1, T)
        generator = torch.Generator(device).manual_seed(config.seed + i)
        utf8 = getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        show([token for token in tokens if token != eot], tokenizer, utf8)
        for _ in range(config.max_new_tokens):
            with autocast:
                idx = model.generate(idx, 1, config.temperature, config.top_k, generator)
            token = int(idx[0, -1])
            if token == eot:
                break
            show([token], tokenizer, utf8)
        print(utf8.decode(b"", final=True))


def show(tokens: list[int], tokenizer: Encoding | None, utf8: IncrementalDecoder) -> None:
    """Prints the text of tokens. Without a tokenizer they are numbers."""
    if tokenizer is None:
        text = "".join(f"{token} " for token in tokens)
    else:
        text = utf8.decode(tokenizer.decode_bytes(tokens))
    print(text, end="", flush=True)


def read_numbers(prompt: str, limit: int) -> list[int]:
    """The numbers of a prompt, separated by spaces. UserError unless all are below `limit`."""
    words = prompt.split()
    if not words or not all(word.isdecimal() and int(word) < limit for word in words):
        problem = f"this model continues numbers from 0 to {limit - 1}"
        raise UserError(f"prompt {prompt!r}: {problem}, such as '0 1 2'")
    return [int(word) for word in words]


def main(args: list[str] | None = None) -> None:
    config = parse_args(SampleConfig, args=args)
    for name, least in {"max_new_tokens": 1, "num_samples": 1, "top_k": 0, "seed": 0}.items():
        value = getattr(config, name)
        if not least <= value < 2**63:  # torch's integers
            raise UserError(f"{flag(name)} {value}: must be at least {least} and below 2**63")
    if config.temperature != 0 and not 1e-6 <= config.temperature <= 1e6:
        raise UserError(f"--temperature {config.temperature}: must be 0, or from 1e-6 to 1e6")
    device = choose_device(config.device)
    model = load(config.model, device, config.code)
    if config.prompt:
        sample(model, config.prompt, config, device)
        return
    # Bytes that aren't UTF-8 are read as in an argument, where sample() reports them.
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("prompt (Ctrl-C ends)> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of the input; an empty line is "\n"
            return
        sample(model, line.rstrip("\n"), config, device)


if __name__ == "__main__":
    run_and_exit(main)

"""Continues prompts with a model and prints each token as it is sampled.

python sample.py log "Hello, I'm a language model,"          # the newest checkpoint of a run
python sample.py log/step_000400 "ROMEO:" --num-samples 3
python sample.py gpt2                                        # a hub name; asks for prompts
"""

import contextlib
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import torch
from tyro.conf import Positional

from support.command_line import flag, note, parse_args, progress_bar
from support.devices import choose_device
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT
from support.forks import is_gpt2
from support.huggingface import find_model, tokenizer_of
from support.sampling import cast_weights, choose_dtype, next_tokens, samples_at_once
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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products
    code: str = str(ROOT / "train_gpt2.py")  # script that has trained the model


def sample(model: "GPT", tokenizer: Tokenizer, prompt: str, config: SampleConfig) -> None:
    """Prints continuations of the prompt. A single one is printed token by token."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt {prompt!a}: not UTF-8") from None
    eot = tokenizer.eot_token
    tokens = encode_prompt(prompt, tokenizer)
    known = [token for token in tokens if token != eot]
    n = config.max_new_tokens
    B = samples_at_once(model, len(tokens) + n)
    for first in range(0, config.num_samples, B):
        seeds = [config.seed + i for i in range(first, min(first + B, config.num_samples))]
        steps = next_tokens(model, tokens, seeds, n, config.temperature, config.top_k, eot)
        if len(seeds) == 1:
            print_text(chain(known, (token for (token,) in steps)), tokenizer)
            continue
        samples = [[*known] for _ in seeds]
        for step in progress_bar(steps, "token", total=n):
            for text, token in zip(samples, step, strict=True):
                if token is not None:  # which it is after the end of a sample
                    text.append(token)
        for text in samples:
            print_text(text, tokenizer)


def print_text(tokens: Iterable[int], tokenizer: Tokenizer) -> None:
    """Prints the text of tokens, each as soon as it is there, and a new line."""
    utf8 = getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
    for token in tokens:
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
    precision = config.dtype
    if precision == "auto":
        precision, line = choose_dtype(model, folder)
        note(line)
    dtype = getattr(torch, precision)
    autocast = contextlib.nullcontext()
    if is_gpt2(model):
        cast_weights(model, dtype)
    elif dtype != torch.float32:
        # Parts of a changed model may need float32, so its weights stay as they are.
        autocast = torch.autocast(device.type, dtype)
    with autocast:
        for prompt in [config.prompt] if config.prompt else read_prompts():
            sample(model, tokenizer, prompt, config)


def read_prompts() -> Iterator[str]:
    """The lines of standard input. On a terminal it asks for each."""
    # Bytes that aren't UTF-8 are read as in an argument, where sample() reports them.
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("prompt (Ctrl-C ends)> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of the input; an empty line is "\n"
            return
        yield line.rstrip("\r\n")


if __name__ == "__main__":
    run_and_exit(main)

"""Continue prompts with a model. A single sample is printed token by token.

python sample.py log "Hello, I'm a language model,"          # the newest checkpoint of a run
python sample.py log/step_000400 "ROMEO:" --num-samples 3
python sample.py gpt2                                        # a name on the Hub; asks for prompts
"""

import os
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if __name__ == "__main__":  # read when torch is imported; train_gpt2.py says why
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import Tensor
from tqdm import tqdm
from tyro.conf import Positional

from support.command_line import flag, parse_args, progress_bar
from support.devices import choose_device
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT
from support.huggingface import find_model, tokenizer_of
from support.sampling import kv_cache_for_gpt2
from support.scripts import load_gpt_class
from support.tokenizer import Tokenizer, encode_prompt, text_bytes

if TYPE_CHECKING:
    from train_gpt2 import GPT


@dataclass(frozen=True)
class SampleConfig:
    """Continue a prompt with a GPT-2, in float32."""

    # log folder (its newest checkpoint), model folder, .pt file, or name on the Hub
    model: Positional[str]
    prompt: Positional[str] = ""  # text to continue; empty: each line of standard input
    max_new_tokens: int = 100  # maximum length; a sample also ends at <|endoftext|>
    temperature: float = 1.0  # divide the logits by this; 0: always take the likeliest token
    top_k: int = 50  # sample from this many of the likeliest tokens; 0: the whole vocabulary
    seed: int = 42  # seed of the first sample; each further sample adds 1
    num_samples: int = 1  # samples per prompt, in one batch
    device: str = "auto"  # auto, cpu, cuda or mps
    code: str = str(ROOT / "train_gpt2.py")  # script that trained the model


def print_continuations(
    model: "GPT", tokenizer: Tokenizer, prompt: str, config: SampleConfig
) -> None:
    """Print continuations of the prompt. If there is only one, stream it token by token."""
    device = next(model.parameters()).device
    tokens = encode_prompt(prompt, tokenizer)
    B = config.num_samples
    streams = B == 1
    texts = [Text(tokenizer, tokens, streams) for _ in range(B)]
    with progress_bar(None, "token", total=config.max_new_tokens, disable=streams or None) as bar:
        model.generate(
            torch.tensor([tokens] * B, device=device),
            config.max_new_tokens,
            config.temperature,
            config.top_k,
            [torch.Generator(device).manual_seed(config.seed + i) for i in range(B)],
            on_token=partial(append_tokens, texts, bar),
        )
    for text in texts:
        text.end()


def append_tokens(texts: "list[Text]", bar: tqdm, new: Tensor) -> bool:
    """Append the new tokens (B,) to the texts. Return True once all texts have ended."""
    bar.update()
    for text, token in zip(texts, new.tolist(), strict=True):
        text.append(token)
    return all(text.ended for text in texts)


class Text:
    """Text that grows token by token until <|endoftext|>.

    If it `streams`, it is printed as it grows. Otherwise end() prints it."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], streams: bool):
        self.tokenizer = tokenizer
        self.streams = streams
        self.utf8 = getincrementaldecoder("utf-8")("replace")  # a character may span tokens
        self.buffer = ""  # text not printed yet
        self.ended = False
        self.write(text_bytes([t for t in prompt if t != tokenizer.eot_token], tokenizer))

    def append(self, token: int) -> None:
        self.ended = self.ended or token == self.tokenizer.eot_token
        if not self.ended:  # generate() continues until all samples have ended
            self.write(text_bytes([token], self.tokenizer))

    def write(self, text: bytes) -> None:
        self.buffer += self.utf8.decode(text)
        if self.streams:
            print(self.buffer, end="", flush=True)
            self.buffer = ""

    def end(self) -> None:
        print(self.buffer + self.utf8.decode(b"", final=True))


def main(args: list[str] | None = None) -> None:
    config = parse_args(SampleConfig, args=args)
    for name, least in {"max_new_tokens": 1, "num_samples": 1, "top_k": 0, "seed": 0}.items():
        value = getattr(config, name)
        if not least <= value < 2**63:  # torch's integers are 64-bit
            raise UserError(f"{flag(name)} {value}: must be at least {least} and below 2**63")
    if config.temperature != 0 and not 1e-6 <= config.temperature <= 1e6:
        raise UserError(f"--temperature {config.temperature}: must be 0, or from 1e-6 to 1e6")
    device = choose_device(config.device)
    gpt_class = load_gpt_class(config.code)
    folder = find_model(config.model)  # downloads the model if it is on the Hub
    model = gpt_class.from_pretrained(folder).to(device)
    tokenizer = tokenizer_of(folder)
    with kv_cache_for_gpt2(model):
        for prompt in [config.prompt] if config.prompt else read_prompts():
            print_continuations(model, tokenizer, prompt, config)


def read_prompts() -> Iterator[str]:
    """Yield the lines of standard input. On a terminal, ask for each."""
    sys.stdin.reconfigure(errors="replace")
    while True:
        if sys.stdin.isatty():
            print("prompt (Ctrl-C to quit)> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of file; an empty line is "\n"
            return
        yield line.rstrip("\r\n")


if __name__ == "__main__":
    run_and_exit(main)

"""Continues prompts with a model and prints each token as it is sampled.

python sample.py log "Hello, I'm a language model,"          # the newest checkpoint of a run
python sample.py log/step_000400 "ROMEO:" --num-samples 3
python sample.py gpt2                                        # a hub name; asks for prompts
"""

import sys
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tyro.conf import Positional

from support import huggingface
from support.command_line import flag, parse_args, warn
from support.devices import choose_device
from support.errors_and_signals import UserError, run_and_exit
from support.tokenizer import EOT, get_tokenizer


@dataclass(frozen=True)
class SampleConfig:
    """Continues a prompt with a trained model."""

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


@dataclass(frozen=True)
class Sampler:
    """A model of either kind, and how to use it."""

    context: int | None  # in tokens; None: it goes on, and forgets what is further back
    encode: Callable[[str], list[int]]
    # prints the prompt idx (1, T), then each of up to n new tokens as it is sampled
    stream: Callable[[Tensor, int, SampleConfig, int], None]  # (idx, n, config, seed)


def gpt_sampler(model: Any) -> Sampler:
    """Samples with GPT.generate."""

    def encode(prompt: str) -> list[int]:
        return get_tokenizer().encode(prompt, allowed_special="all")

    def stream(idx: Tensor, n: int, config: SampleConfig, seed: int) -> None:
        generator = torch.Generator(idx.device).manual_seed(seed)
        utf8 = getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        tokens = [token for token in idx[0].tolist() if token != EOT]
        print(utf8.decode(get_tokenizer().decode_bytes(tokens)), end="", flush=True)
        for _ in range(n):
            idx = model.generate(idx, 1, config.temperature, config.top_k, generator)
            token = int(idx[0, -1])
            if token == EOT:
                break
            text = utf8.decode(get_tokenizer().decode_single_token_bytes(token))
            print(text, end="", flush=True)
        print(utf8.decode(b"", final=True))

    return Sampler(None, encode, stream)


def transformers_sampler(model: Any, tokenizer: Any) -> Sampler:
    """Samples with transformers."""
    from transformers import GenerationConfig, TextStreamer

    # Ours counts alone: generate() would take what it leaves open, like top_p, from the model's.
    model.generation_config = GenerationConfig()

    def encode(prompt: str) -> list[int]:
        return tokenizer(prompt or tokenizer.bos_token or tokenizer.eos_token).input_ids

    def stream(idx: Tensor, n: int, config: SampleConfig, seed: int) -> None:
        generation = GenerationConfig(
            max_new_tokens=n,
            do_sample=config.temperature > 0,
            temperature=config.temperature or None,  # not 0, which transformers rejects
            top_k=config.top_k,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,  # GPT-2 has none; unset, transformers warns
        )
        torch.manual_seed(seed)
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        model.generate(idx, generation, attention_mask=torch.ones_like(idx), streamer=streamer)

    # Some models, such as Mamba, have no limit.
    context = getattr(model.config, "max_position_embeddings", None)
    return Sampler(context, encode, stream)


def load(name: str, device: torch.device, code: str) -> Sampler:
    """A sampler for the model called `name`. code: --code"""
    folder = huggingface.find_model(name)
    model = huggingface.load_gpt(folder, device, code)
    if model is not None:
        return gpt_sampler(model)
    return transformers_sampler(*huggingface.load_causal_lm(folder, device))


def sample(sampler: Sampler, prompt: str, config: SampleConfig, device: torch.device) -> None:
    """Prints continuations of the prompt."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt {prompt!a}: not UTF-8") from None
    # Without a prompt: after <|endoftext|>, where a new document begins.
    tokens = sampler.encode(prompt) or [EOT]
    n = config.max_new_tokens
    context = sampler.context
    if context is not None and len(tokens) + n > context:  # it would stop with an error there
        length = len(tokens)
        if length >= context:  # makes room for new tokens, but keeps half a context of the prompt
            tokens = tokens[-max(context - n, context // 2) :]
        n = context - len(tokens)
        used = f"it reads the last {len(tokens)} of {length} tokens and adds at most {n}"
        warn(f"the model's context has {context} tokens, so {used}")
    idx = torch.tensor([tokens], device=device)  # (1, T)
    autocast = torch.autocast(
        device.type, getattr(torch, config.dtype), enabled=config.dtype != "float32"
    )
    for i in range(config.num_samples):
        with autocast:
            sampler.stream(idx, n, config, config.seed + i)


def main(args: list[str] | None = None) -> None:
    config = parse_args(SampleConfig, args=args)
    for name, least in {"max_new_tokens": 1, "num_samples": 1, "top_k": 0, "seed": 0}.items():
        value = getattr(config, name)
        if not least <= value < 2**63:  # torch's integers
            raise UserError(f"{flag(name)} {value}: must be at least {least} and below 2**63")
    if config.temperature != 0 and not 1e-6 <= config.temperature <= 1e6:
        raise UserError(f"--temperature {config.temperature}: must be 0, or from 1e-6 to 1e6")
    device = choose_device(config.device)
    sampler = load(config.model, device, config.code)
    if config.prompt:
        sample(sampler, config.prompt, config, device)
        return
    # Bytes that aren't UTF-8 are read as in an argument, where sample() reports them.
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("prompt> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of the input; an empty line is "\n"
            return
        sample(sampler, line.rstrip("\n"), config, device)


if __name__ == "__main__":
    run_and_exit(main)

"""Continues prompts with a model and prints each token as it is sampled.

python sample.py log "Hello, I'm a language model,"          # the newest checkpoint of a run
python sample.py log/step_000400 "ROMEO:" --num-samples 3
python sample.py gpt2                                        # a hub name; asks for prompts
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from tyro.conf import Positional

from support.cli import flag, parse_args, run, warn
from support.devices import choose_device
from support.errors import UserError
from support.huggingface import find_model, load_causal_lm


@dataclass(frozen=True)
class SampleConfig:
    """Continues a prompt with a trained model."""

    model: Positional[str]  # log folder (its newest checkpoint), model folder, or hub name
    prompt: Positional[str] = ""  # text to continue; empty: each line of standard input
    max_new_tokens: int = 100  # at most; also ends at <|endoftext|> and at the model's context
    temperature: float = 1.0  # divides the logits: below 1 favours likely tokens; 0: the likeliest
    top_k: int = 50  # number of likeliest tokens to draw from; 0: all
    seed: int = 42  # of the first sample; incremented per sample
    num_samples: int = 1  # samples per prompt
    device: str = "auto"  # auto, cpu, cuda or mps


def sample(model: Any, tokenizer: Any, prompt: str, config: SampleConfig) -> None:
    """Prints continuations of the prompt."""
    from transformers import GenerationConfig, TextStreamer

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt {prompt!a}: not UTF-8") from None
    context = model.config.max_position_embeddings  # in tokens
    # Without a prompt: after <|endoftext|>, where a new document begins.
    inputs = tokenizer(prompt or tokenizer.bos_token, return_tensors="pt").to(model.device)
    ids = inputs.input_ids  # (1, T)
    length = ids.size(1)
    if length >= context:  # make room for the new tokens, but keep half a context of the prompt
        kept = max(context - config.max_new_tokens, context // 2)
        ids = ids[:, -kept:]
        warn(f"prompt of {length} tokens cut to its last {kept}; the context has {context}")
    generation = GenerationConfig(
        max_new_tokens=min(config.max_new_tokens, context - ids.size(1)),
        do_sample=config.temperature > 0,
        temperature=config.temperature or None,  # not 0, which transformers rejects
        top_k=config.top_k or None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,  # GPT-2 has none; unset, transformers warns
    )
    for i in range(config.num_samples):
        torch.manual_seed(config.seed + i)
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
        model.generate(ids, generation, attention_mask=torch.ones_like(ids), streamer=streamer)


def main(args: list[str] | None = None) -> None:
    config = parse_args(SampleConfig, args=args)
    for name, least in {"max_new_tokens": 1, "num_samples": 1, "top_k": 0, "seed": 0}.items():
        value = getattr(config, name)
        if not least <= value < 2**63:  # torch's integers
            raise UserError(f"{flag(name)} {value}: must be at least {least} and below 2**63")
    if config.temperature != 0 and not 1e-6 <= config.temperature <= 1e6:
        raise UserError(f"--temperature {config.temperature}: must be 0, or from 1e-6 to 1e6")
    device = choose_device(config.device)
    folder = find_model(config.model)
    model, tokenizer = load_causal_lm(folder, device)
    if tokenizer is None:
        raise UserError(f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    if config.prompt:
        sample(model, tokenizer, config.prompt, config)
        return
    # Bytes that aren't UTF-8 are read as in an argument, where sample() reports them.
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("prompt> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of the input; an empty line is "\n"
            return
        sample(model, tokenizer, line.rstrip("\n"), config)


if __name__ == "__main__":
    run(main)

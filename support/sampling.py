"""The logits from which GPT.generate samples, and the samples of a training run.

A model that computes what GPT-2 computes uses a KV cache inside kv_cache_for_gpt2(). It then reads
each token only once, until the text outgrows the context window. Otherwise each new token takes a
forward pass over the whole context."""

import contextlib
from collections.abc import Iterator
from textwrap import indent
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from support.command_line import print_line
from support.forks import why_not_gpt2
from support.functional_gpt2 import KVCache, gpt2
from support.ranks import Ranks
from support.tokenizer import Tokenizer, encode_prompt, printable

if TYPE_CHECKING:
    from train_gpt2 import GPT

LAST = (slice(None), -1)  # indexes (B, T) to select the last token of each row


@contextlib.contextmanager
def kv_cache_for_gpt2(model: "GPT") -> Iterator[None]:
    """Let `model.generate` use a KV cache within this context, if the model is a GPT-2."""
    model.use_kv_cache = not why_not_gpt2(model)
    try:
        yield
    finally:
        model.use_kv_cache = False


class LastLogits:
    """A callable that maps tokens (B, T) to the logits of each row's last token, (B, V) float32.

    Each call must extend the tokens of the previous call by one token per row."""

    def __init__(self, model: "GPT"):
        self.model = model
        self.cache = KVCache() if model.use_kv_cache else None
        self.weights = model.state_dict()

    def __call__(self, idx: Tensor) -> Tensor:
        config = self.model.config
        context = idx[:, -config.block_size :]  # slide the context window over longer texts
        if self.cache is None:
            return self.model(context, at=LAST).float()
        # Once the window slides, the positions of all tokens change, which invalidates the cache.
        slides = context.size(1) < idx.size(1)
        cache = None if slides else self.cache
        unread = context if slides else idx[:, self.cache.length :]
        layers, heads = config.n_layer, config.n_head
        return gpt2(self.weights, unread, layers, heads, cache, at=LAST).float()


def print_samples(
    model: "GPT", tokenizer: Tokenizer, prompt: str, ranks: Ranks, autocast: torch.autocast
) -> None:
    """Print two continuations of the prompt on each rank."""
    tokens = encode_prompt(prompt or "\n", tokenizer)
    idx = torch.tensor([tokens, tokens], device=ranks.device)
    seeds = [42 + 2 * ranks.rank, 43 + 2 * ranks.rank]  # distinct across all ranks
    generators = [torch.Generator(ranks.device).manual_seed(seed) for seed in seeds]
    with kv_cache_for_gpt2(model), autocast:
        idx = model.generate(idx, 64, generators=generators)
    for i, sample in enumerate(idx.tolist()):
        name = f"rank {ranks.rank} sample {i}" if ranks.world_size > 1 else f"sample {i}"
        print_line(f"{name}:\n{indent(printable(sample, tokenizer), '  ')}")

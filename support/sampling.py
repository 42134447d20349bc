"""Continues a text, one token of each sample at a time.

GPT.generate computes the whole text again for each token. Here a GPT-2 reads each token once, since
it keeps the keys and values of the tokens before. It draws the same tokens with the same random
numbers. A model that is not a GPT-2 is sampled by its own `generate`."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.checkpoints import read_training_state
from support.command_line import print_line
from support.devices import LARGE, choose_precision
from support.errors_and_signals import RunError
from support.forks import is_gpt2
from support.functional_gpt2 import KeysAndValues, gpt2, linear
from support.ranks import Ranks
from support.tokenizer import Tokenizer, printable, prompt_tokens

if TYPE_CHECKING:
    from train_gpt2 import GPT

# --------------------------------------------------------------------------------------------------
# Sampling


@torch.no_grad()
def next_tokens(
    model: "GPT",
    prompt: list[int],
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 50,
    end: int | None = None,
) -> Iterator[tuple[int | None, ...]]:
    """Continues a prompt once for each seed. Yields the next token of each sample.

    A sample ends before the token `end`. From there on it has None. With temperature 0 the
    likeliest token is taken, with top_k 0 any token may be drawn. The model's own weights are used,
    under the autocast of the caller.

    A sample depends only on its own seed, up to rounding. In 16 bits rounding is so coarse that
    another number of samples soon gives other tokens."""
    if not is_gpt2(model):
        options = (max_new_tokens, temperature, top_k, end)
        yield from zip_longest(*(plain_sample(model, prompt, seed, *options) for seed in seeds))
        return
    w = model.state_dict()
    config = model.config
    context = config.block_size
    device = w["wte.weight"].device
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    samples = list(range(len(seeds)))  # those that have not ended
    # Each of them is a row of idx and of the cache. The prompt is computed as a single row.
    idx = torch.tensor([prompt], device=device)  # (B, T)
    in_16_bits = w["wte.weight"].dtype.itemsize == 2
    cache = KeysAndValues(
        capacity=min(len(prompt) + max_new_tokens, context),
        # On a CPU a single token's attention in bfloat16 takes several times as long.
        dtype=torch.float32 if in_16_bits and device.type == "cpu" else None,
    )
    for _ in range(max_new_tokens):
        last = (slice(None), -1)
        # Beyond the context the window slides. The positions of all tokens change, and with them
        # the keys and values, so all is computed again.
        slides = idx.size(1) > context
        unread = idx[:, -context:] if slides else idx[:, cache.length :]
        known = None if slides else cache
        with fast_kernels(unread.numel()):
            logits = gpt2(w, unread, config.n_layer, config.n_head, known, at=last)  # (B, V)
        if len(idx) < len(samples):  # after the prompt
            idx, logits = (rows.expand(len(samples), -1) for rows in (idx, logits))
            cache.take_rows([0] * len(samples))
        drawn = draw(logits, temperature, top_k, [generators[i] for i in samples])
        tokens = {i: token for i, token in zip(samples, drawn, strict=True) if token != end}
        if not tokens:
            return
        yield tuple(tokens.get(i) for i in range(len(seeds)))
        if len(tokens) < len(samples):
            kept = [row for row, i in enumerate(samples) if i in tokens]
            idx = idx[kept]
            cache.take_rows(kept)
            samples = list(tokens)
        idx = torch.cat([idx, torch.tensor([*tokens.values()], device=device)[:, None]], dim=1)


@contextlib.contextmanager
def fast_kernels(rows: int) -> Iterator[None]:
    """Chooses among torch's kernels, for a step that reads a number of tokens.

    Attention is not computed by cuDNN, which needs time for each new length. In bfloat16 on a CPU,
    the product of a single row is not computed by oneDNN, which takes twice as long as torch."""
    before = torch.backends.mkldnn.enabled  # oneDNN was once called MKL-DNN
    torch.backends.mkldnn.enabled = before and rows > 1
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        with sdpa_kernel(others):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


def draw(
    logits: Tensor, temperature: float, top_k: int, generators: list[torch.Generator]
) -> list[int]:
    """Draws a token for each row of logits (B, V), as GPT.generate does for a single row."""
    if temperature == 0:
        top_k, temperature = 1, 1.0
    V = logits.size(1)
    logits, candidates = (logits.float() / temperature).topk(min(top_k, V) or V)  # (B, k) each
    p = logits.softmax(-1)
    if not p.isfinite().all():
        raise RunError("the model's logits are not finite, so it has diverged")
    choices = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(p, generators, strict=True)
    ]
    return candidates.gather(1, torch.stack(choices)).flatten().tolist()


def plain_sample(
    model: "GPT",
    prompt: list[int],
    seed: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    end: int | None,
) -> Iterator[int]:
    """The tokens of one sample, each drawn by model.generate."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    idx = torch.tensor([prompt], device=device)  # (1, T)
    for _ in range(max_new_tokens):
        idx = model.generate(idx, 1, temperature, top_k, generator)
        token = int(idx[0, -1])
        if token == end:
            return
        yield token


def print_samples(
    model: "GPT", tokenizer: Tokenizer, prompt: str, ranks: Ranks, autocast: torch.autocast
) -> None:
    """Prints two continuations of a text on each rank of a training run."""
    tokens = prompt_tokens(prompt, tokenizer)
    seeds = [42 + 2 * ranks.rank, 43 + 2 * ranks.rank]  # all samples of all ranks differ
    with autocast:
        steps = list(next_tokens(model, tokens, seeds, max_new_tokens=64))
    for i, sample in enumerate(zip(*steps, strict=True)):
        name = f"rank {ranks.rank} sample {i}" if ranks.world_size > 1 else f"sample {i}"
        print_line(f"{name}:\n{indent(printable([*tokens, *sample], tokenizer), '  ')}")


def samples_at_once(model: "GPT", length: int) -> int:
    """How many samples of a number of tokens next_tokens() should compute together.

    Each step reads all weights once for all samples, and the keys and values of each sample. Once
    there are more of these than weights, more samples at once take more memory, and hardly less
    time for each of them."""
    if not is_gpt2(model):
        return 1  # its samples are computed one by one
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    keys_and_values = 2 * config.n_layer * config.n_embd * min(length, config.block_size)
    return max(1, weights // keys_and_values)


# --------------------------------------------------------------------------------------------------
# Precision


def choose_dtype(model: "GPT", folder: Path) -> tuple[str, str]:
    """(the dtype in which a model is probably sampled fastest, a line with the reason)

    If it is not a GPT-2, that of its training is taken, since it may work in no other. `folder` is
    that of the model. If there is no training state, the dtype is float32."""
    device = next(model.parameters()).device
    if not is_gpt2(model):
        name = "float32"
        if (folder / "training_state.pt").exists():
            name = read_training_state(folder, mmap=True)["precision"].replace("tf32", "float32")
        return name, f"{device}, {name}: the model is not a GPT-2, and was trained so"
    if device.type != "cpu":
        return choose_precision("auto", device)
    chip = f"cpu ({torch.get_num_threads()} threads)"
    if sum(p.numel() for p in model.parameters()) < LARGE:
        return "float32", f"{chip}, float32: the model is small"
    head = model.get_parameter("wte.weight")
    speedup = one_row_seconds(head) / one_row_seconds(head.bfloat16())
    name = "bfloat16" if speedup >= 1.3 else "float32"
    return name, f"{chip}, {name}: bfloat16 is {speedup:.2g} times as fast as float32 for one token"


@torch.no_grad()
def one_row_seconds(weight: Tensor) -> float:
    """The shortest time of five products of one row with a weight (out, in) on a CPU.

    Most of it is needed to read the weight, as in a step of sampling."""
    x = torch.ones(1, weight.size(1), dtype=weight.dtype)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        with fast_kernels(rows=1):
            linear(x, weight)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@torch.no_grad()
def cast_weights(model: "GPT", dtype: torch.dtype) -> None:
    """Casts the weights of a GPT-2 in place, but for its LayerNorms, so that no step has to do it.

    The logits of OpenAI's GPT-2 lie around -100, where bfloat16 has steps of 0.5. So the mean of
    wte moves to wpe before. Their sum remains the same, all logits of a token change by the same
    number, and no probability changes."""
    if dtype == torch.float32:
        return
    w = model.state_dict()
    mean = w["wte.weight"].mean(dim=0)  # (C,)
    w["wte.weight"] -= mean
    w["wpe.weight"] += mean
    for name, weight in chain(model.named_parameters(), model.named_buffers()):
        if "ln_" not in name:
            weight.data = weight.to(dtype)

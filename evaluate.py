"""Measure how well a GPT-2 predicts a text.

    python evaluate.py log --data my.txt                   # the newest checkpoint of a run
    python evaluate.py gpt2 --data my.txt --stride 512     # from the Hub; windows overlap by half
    torchrun --standalone --nproc_per_node=8 evaluate.py gpt2 --data edu_fineweb10B

A window as long as the model's context slides over the text, `stride` tokens at a time, and at each
position scores the tokens that have not been scored yet. So every token but the first is scored
once, and outside the first window it is predicted from more than context - stride tokens, as in
https://huggingface.co/docs/transformers/perplexity. A smaller stride takes longer and usually gives
a lower loss. <|endoftext|> is prepended to a text file, as it is to every document in training."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # read when torch is imported; train_gpt2.py says why
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
import torch.distributed as dist
from torch import nn
from tyro.conf import Positional

from support.command_line import parse_args, print0, progress_bar
from support.devices import keep_freed_memory
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.files_and_locks import ROOT, check_output, write_text
from support.huggingface import find_model_on_ranks, tokenizer_of
from support.ranks import COLLECTIVE_TIMEOUT, Ranks, open_store
from support.scripts import load_gpt_class
from support.shards import data_folder, encode_document, open_split, open_tokenizer
from support.tokenizer import Tokenizer, measure_text


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure the loss of a GPT-2 on a text, in float32."""

    # log folder (its newest checkpoint), model folder, .pt file, or name on the Hub
    model: Positional[str]
    data: str  # a text file, or a folder of token shards (only its validation split is read)
    stride: int = 0  # tokens between window starts; 0: the context length (no overlap)
    device: str = "auto"  # auto, cpu, cuda or mps
    batch_size: int = 8  # windows per forward pass
    json: str = ""  # output file for the results
    code: str = str(ROOT / "train_gpt2.py")  # script that trained the model


def read_documents(data: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the tokens of the text file or of each shard, 1-D. No window spans two shards."""
    if Path(data).is_file() and data_folder(data) == data:
        return [encode_document(Path(data), tokenizer)]
    if open_tokenizer(data_folder(data)) != tokenizer:
        problem = "its vocabulary differs from the model's"
        raise UserError(f"{data}: {problem}; pass a text file, or shards made with the model's")
    return open_split(data_folder(data), "val", tokenizer.n_vocab)[1]


def windows(n: int, T: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (start, end, first) for each window over n tokens.

    A window reads tokens start to end - 1, at most T of them, and scores its predictions of tokens
    first to end."""
    found = []
    first = 1
    for start in range(0, n - 1, stride):
        end = min(start + T, n - 1)
        found.append((start, end, first))
        first = end + 1
        if end == n - 1:
            break
    return found


@torch.no_grad()
def total_loss(
    model: nn.Module, tokens: np.ndarray, T: int, stride: int, ranks: Ranks, batch_size: int
) -> float:
    """Return the summed loss of all tokens (n,) but the first, in nats. Ranks share the windows."""
    total = 0.0
    share = windows(len(tokens), T, stride)[ranks.rank :: ranks.world_size]
    for i in progress_bar(range(0, len(share), batch_size), "batch"):
        batch = share[i : i + batch_size]
        longest = max(end - start for start, end, _ in batch)
        idx = torch.zeros(len(batch), longest, dtype=torch.int64)
        targets = torch.full_like(idx, -100)  # ignored
        for row, (start, end, first) in enumerate(batch):
            window = torch.from_numpy(tokens[start : end + 1].astype(np.int64))
            idx[row, : end - start] = window[:-1]
            targets[row, first - start - 1 : end - start] = window[first - start :]
        scored = int((targets != -100).sum())
        total += scored * model(idx.to(ranks.device), targets.to(ranks.device)).item()
    return ranks.sum(total)


def main(args: list[str] | None = None) -> None:
    config = parse_args(EvaluateConfig, args=args)
    if config.batch_size < 1:
        raise UserError(f"--batch-size {config.batch_size}: must be at least 1")
    check_output(config.json)
    ranks = Ranks.from_environment(config.device)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo",
            store=open_store(ranks),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    if ranks.device.type == "cpu":
        keep_freed_memory()
    folder = find_model_on_ranks(config.model, ranks)
    model = load_gpt_class(config.code).from_pretrained(folder).to(ranks.device)
    tokenizer = tokenizer_of(folder)
    T = model.config.block_size
    stride = config.stride or T
    if not 1 <= stride <= T:
        raise UserError(f"--stride {stride}: must be 0, or from 1 to {T} (the context window)")
    texts = read_documents(config.data, tokenizer)
    predicted = np.concatenate([text[1:] for text in texts])  # without the first, which is given
    if not len(predicted):
        raise UserError(f"{config.data}: fewer than two tokens")
    print0(f"model: {folder}; device: {ranks.device}")
    source = data_folder(config.data)
    source = source if Path(source).is_file() else f"the validation split of {source}"
    print0(f"data: {len(predicted):,} tokens of {source}; windows of {T:,}, stride {stride:,}")
    total = sum(total_loss(model, text, T, stride, ranks, config.batch_size) for text in texts)
    loss = total / len(predicted)
    if not math.isfinite(loss):
        raise RunError(f"{folder}: its loss is {loss}")
    text = measure_text(predicted, tokenizer)
    results = {
        "nats_per_token": loss,
        "perplexity": math.exp(loss),
        "nats_per_character": text.nats_per_character(loss),
        "bits_per_byte": text.bits_per_byte(loss),
        "tokens": text.tokens,
        "characters": text.characters,
        "bytes": text.bytes,
        "context": T,
        "stride": stride,
    }
    print0(f"{loss:.4f} nats per token, perplexity {results['perplexity']:.2f}")
    print0(f"{results['nats_per_character']:.4f} nats per character")
    print0(f"{results['bits_per_byte']:.4f} bits per byte")
    if config.json and ranks.rank == 0:
        write_text(config.json, json.dumps(results, indent=2) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_and_exit(main)

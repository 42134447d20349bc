"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # any Hugging Face causal LM: hub name or folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

GPT-2 (124M) gets 0.2859 (acc) and 0.2955 (acc_norm). How it is scored: support/hellaswag.py."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from support import huggingface
from support.cli import parse_args, run
from support.devices import choose_device, choose_precision, keep_freed_memory, padded
from support.errors import UserError
from support.files import write_text
from support.hellaswag import LogitsAt, Score, gpt_logits, load_examples, prepare, score
from support.ranks import Ranks
from support.tokenizer import get_tokenizer

MAX_LOGITS = 2**28  # that another model computes at a time: a gigabyte


@dataclass(frozen=True)
class HellaSwagConfig:
    """Evaluates a model of train_gpt2.py, or any Hugging Face causal LM, on HellaSwag."""

    # Hub name, folder of a model, or log folder of a run (its newest checkpoint)
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"  # auto, cpu, cuda or mps
    data: str = ""  # local .jsonl of tasks; empty: the official validation set, downloaded once
    limit: int = 0  # number of tasks to evaluate, from the first; 0: all
    batch_size: int = 8  # tasks per forward pass, of four rows each
    # precision of matmuls; losses are always float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json: str = ""  # file for the predictions and losses of every task
    code: str = ""  # script whose model it is; empty: as the run recorded it, else train_gpt2.py


def write_json(path: str, scores: dict[int, Score]) -> None:
    """One object per task, in order: label, both predictions, each ending's loss and tokens."""
    rows = []
    for task, result in sorted(scores.items()):
        by_sum, by_mean = result.predictions
        row = {"task": task, "label": result.label, "prediction": by_sum}
        rows.append(row | {"prediction_norm": by_mean, **vars(result)})
    write_text(path, json.dumps(rows))


def check_writable(path: str) -> None:
    """UserError unless a file can be written at `path`; call it before long work."""
    if Path(path).is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise UserError(f"{path}: its folder is missing or not writable; choose another")


@torch.no_grad()
def check_causal(folder: Path, model: Any, V: int) -> None:
    """UserError if a later token changes the logits of earlier ones."""
    tokens = torch.randint(V - 1, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, -1] += 1
    a, b = (model(idx.to(model.device)).logits[0, :-1] for idx in (tokens, changed))
    if not torch.allclose(a, b, atol=1e-3 * float(a.std())):
        raise UserError(f"{folder}: not a causal language model: its tokens see later ones")


def load_any(folder: Path, device: torch.device) -> tuple[LogitsAt, int, Callable, int]:
    """(what score() takes, then what prepare() takes: context, encode, keep), by transformers."""
    # Weights that are saved in 16 bits would compute in them, whatever --dtype says.
    model, tokenizer = huggingface.load_causal_lm(folder, device, torch.float32)
    text_config = model.config.get_text_config()
    V = text_config.vocab_size
    context = getattr(text_config, "max_position_embeddings", None) or 2**20  # None: any length
    check_causal(folder, model, V)

    def logits_at(tokens: Tensor, row: Tensor, column: Tensor) -> Tensor:
        tokens = padded(tokens, context)
        rows = max(MAX_LOGITS // (V * tokens.size(1)), 1)
        parts = []
        for first in range(0, len(tokens), rows):
            logits = model(tokens[first : first + rows], use_cache=False).logits
            here = (row >= first) & (row < first + rows)
            parts.append(logits[row[here] - first, column[here]])
        return torch.cat(parts)

    def encode(text: str) -> list[int]:
        tokens = tokenizer(text).input_ids
        return tokens[:-1] if tokens[-1] == tokenizer.eos_token_id else tokens

    begins = encode("a")[0] == tokenizer.bos_token_id  # with a token such as <s>, to be kept
    return logits_at, context, encode, int(begins)


def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1 or config.limit < 0:
        numbers = f"--batch-size {config.batch_size}, --limit {config.limit}"
        raise UserError(f"{numbers}: must be at least 1 and 0")
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    # The size is not known yet: 0, so that any model is scored in float32 on a CPU.
    dtype, description = choose_precision(config.dtype, device, parameters=0)
    if config.json:
        check_writable(config.json)
    folder = huggingface.find_model(config.model)
    examples = load_examples(config.data)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    model = huggingface.load_gpt(folder, device, config.code)
    if model is not None:
        logits_at = gpt_logits(model)
        tasks = prepare(examples, model.config.block_size, get_tokenizer().encode_ordinary)
    else:
        logits_at, *how = load_any(folder, device)
        tasks = prepare(examples, *how)
    alone = Ranks(rank=0, world_size=1, device=device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        scores = score(logits_at, tasks, alone, config.batch_size, hide_progress=None)
    if config.json:
        write_json(config.json, scores)
    by_sum, by_mean = (
        sum(result.predictions[i] == result.label for result in scores.values()) / len(tasks)
        for i in (0, 1)
    )
    print(f"{len(tasks)} acc: {by_sum:.4f} acc_norm: {by_mean:.4f}")


if __name__ == "__main__":
    run(main)

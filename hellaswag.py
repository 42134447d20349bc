"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # any Hugging Face causal LM: hub name or folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

GPT-2 (124M) gets 0.2859 (acc) and 0.2955 (acc_norm). How it is scored: support/hellaswag.py."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from support import loading
from support.cli import parse_args, run
from support.devices import choose_device, choose_precision
from support.errors import UserError
from support.files import write_text
from support.hellaswag import Packing, Score, load_examples, prepare, score, segment_mask
from support.tokenizer import VOCAB_SIZE, get_tokenizer

# Tells tokenizers apart; GPT-2's last merges make " informants" and " gazed".
TEXT = "It's 1,234.5 naïve informants gazed at 東京 🙂"


@dataclass(frozen=True)
class HellaSwagConfig:
    """Evaluates a model of train_gpt2.py, or any Hugging Face causal LM, on HellaSwag."""

    # Hub name, folder of a model, or log folder of a run (its newest checkpoint)
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"  # auto, cpu, cuda or mps
    data: str = ""  # local .jsonl of tasks; empty: the official validation set, downloaded once
    limit: int = 0  # number of tasks to evaluate, from the first; 0: all
    batch_size: int = 16  # tasks per forward pass
    # precision of matmuls; losses are always float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json: str = ""  # file for the predictions and losses of every task


def write_json(path: str, result: Score) -> None:
    """One object per task, in order: label, both predictions, each ending's loss and tokens."""
    names = ("task", "label", "prediction", "prediction_norm", "losses", "lengths")
    columns = (result.labels, *result.predictions(), result.losses, result.lengths)
    rows = zip(result.index, *(column.tolist() for column in columns), strict=True)
    write_text(path, json.dumps([dict(zip(names, row, strict=True)) for row in rows]))


def check_writable(path: str) -> None:
    """UserError unless a file can be written at `path`; call it before long work."""
    if Path(path).is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise UserError(f"{path}: its folder is missing or not writable; choose another")


def check_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """UserError for a model that would be scored wrongly."""
    V = model.config.vocab_size
    if getattr(model.config, "sliding_window", None) is not None:
        raise UserError(f"{folder}: its sliding_window (config.json) is not supported")
    if tokenizer is None:
        same = V in (VOCAB_SIZE, 50304)  # padded to a multiple of 64
        print(f"{folder}: no tokenizer; judging by its vocabulary of {V}")
    else:
        tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
        same = V >= VOCAB_SIZE and tokens == get_tokenizer().encode_ordinary(TEXT)
    if not same:
        raise UserError(f"{folder}: needs GPT-2's tokenizer, with which the tasks are made")


@torch.no_grad()
def packs(model: Any, hidden: Any, head: Any) -> bool:
    """True if two endings packed after one context have the logits of each alone."""
    generator = torch.Generator().manual_seed(0)
    context, a, b = torch.randint(VOCAB_SIZE, (3, 1, 4), generator=generator).to(model.device)
    position = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]])
    segment = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]])
    packing = Packing(position.to(model.device), segment_mask(segment).to(model.device))
    try:
        packed = head(hidden(torch.cat([context, a, b], dim=1), packing))
        alone = [model(torch.cat([context, ending], dim=1)).logits for ending in (a, b)]
    except Exception:  # the model takes no such mask, or its body needs more than these arguments
        return False
    expected = torch.cat([alone[0], alone[1][:, 4:]], dim=1)  # (1, 12, V)
    return bool((packed - expected).abs().max() < 1e-3 * expected.std())


def load_from_transformers(folder: Path, device: torch.device) -> tuple[int, Any, Any]:
    """(context, hidden, head) of any other causal language model; the last two as score() takes."""
    model, tokenizer = loading.load_causal_lm(folder, device, attn_implementation="sdpa")
    check_model(folder, model, tokenizer)
    context = model.config.max_position_embeddings

    def run_part(part: Any, tokens: Tensor, packing: Packing) -> Any:
        return part(
            tokens,
            position_ids=packing.position,
            attention_mask=packing.mask,
            use_cache=False,
        )

    def hidden(tokens: Tensor, packing: Packing) -> Tensor:
        return run_part(model.base_model, tokens, packing)[0]

    def all_logits(tokens: Tensor, packing: Packing) -> Tensor:
        return run_part(model, tokens, packing).logits

    head = model.get_output_embeddings()
    if packs(model, hidden, head):
        return context, hidden, head
    # Something comes after the head, such as a scale. All logits take more memory and time.
    if packs(model, all_logits, torch.nn.Identity()):
        return context, all_logits, torch.nn.Identity()
    kind = model.config.model_type
    raise UserError(f"{folder}: a {kind} takes no mask for endings packed into one sequence")


def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1 or config.limit < 0:
        raise UserError(
            f"--batch-size {config.batch_size}, --limit {config.limit}: at least 1 and 0"
        )
    device = choose_device(config.device)
    # The size is not known yet: 0, so that any model is scored in float32 on a CPU.
    dtype, description = choose_precision(config.dtype, device, parameters=0)
    if config.json:
        check_writable(config.json)
    folder = loading.find_model(config.model)
    examples = load_examples(config.data)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    model = loading.load_gpt(config.model, device)
    if model is not None:
        context, hidden, head = model.config.block_size, model.hidden, model.logits
    else:
        context, hidden, head = load_from_transformers(folder, device)
    tasks = prepare(examples, context)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        result = score(
            hidden, head, tasks, device, batch_size=config.batch_size, hide_progress=None
        )
    if config.json:
        write_json(config.json, result)
    acc, acc_norm = (right / len(tasks) for right in result.correct())
    print(f"{len(tasks)} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")


if __name__ == "__main__":
    run(main)

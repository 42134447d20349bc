"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda        # any Hugging Face causal language model: hub name or folder
    python hellaswag.py -m log                 # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100 --harness

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042 validation
tasks. In the completion style used here the model scores the tokens of each ending after the context: `acc`
takes the ending with the lowest summed loss, `acc_norm` the one with the lowest loss per token. GPT-2 (124M)
gets 0.2859 and 0.2955. EleutherAI's lm-evaluation-harness puts the activity's label before the context,
removes WikiHow's markup, and divides by an ending's characters instead of its tokens: its 0.2892 and 0.3114
for the same model are different numbers, not better ones. `--harness` computes those, too.

A task is one sequence: its context, then the four endings, each of which attends to the context and itself,
with positions as if it followed the context directly. So the context is computed once, and the head only
where an ending is scored. Losses are float32 whatever the model computes in."""

import hashlib
import json
import math
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from support.cli import InputError, first_line, parse_args, run, torchrun_ranks
from support.devices import choose_device, keep_freed_memory, round_length
from support.files import atomic_write
from support.models import check_writable, find_model, load_causal_lm
from support.tokenizer import get_tokenizer

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DOWNLOADED = Path(__file__).parent / "hellaswag" / "hellaswag_val.jsonl"

# ------------------------------------------------------------------------------------------------------------
# Data

def download(path: Path = DOWNLOADED, attempts: int = 3) -> Path:
    """Downloads the validation set, unless `path` is it; verified and whole. Raises InputError."""
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
        return path
    for attempt in range(attempts):
        try:
            time.sleep(attempt)
            with urllib.request.urlopen(URL, timeout=20) as response:
                content = response.read()
            if hashlib.sha256(content).hexdigest() != SHA256:
                raise OSError(f"{len(content)} bytes that are not the official file (SHA-256)")
            break
        except OSError as error:  # URLError and time-outs are OSErrors
            reason = error
    else:
        raise InputError(f"{URL}: download failed ({first_line(reason)}); --data (in training "
                         "--hellaswag-data) takes a local file")
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)
    return path

def load_examples(path: Path | None = None) -> list[dict[str, Any]]:
    """The tasks of a .jsonl file, by default the official ones. Raises InputError for a bad line."""
    path = path or download()
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(lines, start=1):
        try:
            example = json.loads(line)
            endings = example["endings"]
            if example["label"] not in range(4) or len(endings) != 4 or not all(endings):
                raise ValueError("label or endings")
            if not example["ctx"]:
                raise ValueError("empty ctx")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a HellaSwag task ({error!r}); it needs ctx, a "
                             "label from 0 to 3 and four endings") from None
        examples.append(example)
    if not examples:
        raise InputError(f"{path}: no tasks")
    return examples

def preprocess(text: str) -> str:
    """Removes WikiHow's [marks], as lm-evaluation-harness does (lm_eval/tasks/hellaswag/utils.py)."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

def encode(example: dict[str, Any], harness: bool = False) -> tuple[list[int], list[list[int]], list[int]]:
    """Tokens of the context and of the four endings, and what acc_norm divides a summed loss by: an ending's
    tokens, in the harness's style its characters. A space belongs to the following word."""
    encode = get_tokenizer().encode_ordinary
    if not harness:
        endings = [encode(" " + ending) for ending in example["endings"]]
        return encode(example["ctx"]), endings, [len(ending) for ending in endings]
    # A file without ctx_a and ctx_b (the harness wants the second capitalized) has them joined in ctx.
    ctx = f"{example['ctx_a']} {example['ctx_b'].capitalize()}" if "ctx_b" in example else example["ctx"]
    query = preprocess(f"{example['activity_label']}: {ctx}")
    choices = list(map(preprocess, example["endings"]))
    context = encode(query.rstrip())  # trailing spaces belong to the ending
    return context, [encode(f"{query} {c}")[len(context) :] for c in choices], list(map(len, choices))

# ------------------------------------------------------------------------------------------------------------
# Scoring

@dataclass(frozen=True)
class Task:
    """A tokenized task: N tokens that the model reads, and the M tokens of the endings to be scored."""

    tokens: torch.Tensor  # (N,) int64: the context, then each ending without its last token
    position: torch.Tensor  # (N,) of each token in its context and ending
    segment: torch.Tensor  # (N,) 1 to 4 for an ending, 0 for the shared context
    source: torch.Tensor  # (M,) which of the N tokens predicts this one
    answer: torch.Tensor  # (M,) int64: the token
    ending: torch.Tensor  # (M,) 0 to 3
    lengths: torch.Tensor  # (4,) int64: what acc_norm divides by
    label: int
    cut: bool  # the context exceeded the window and lost its beginning

def prepare(examples: list[dict[str, Any]], block_size: int, harness: bool = False) -> list[Task]:
    """Tokenizes tasks for a model with a context of block_size tokens. A context that is too long is cut on
    the left, so that every ending stays whole. Raises InputError for an ending longer than the window."""
    tasks = []
    for number, example in enumerate(examples, start=1):
        context, endings, lengths = encode(example, harness)
        rooms = [block_size + 1 - len(ending) for ending in endings]  # its last token is not read
        if min(rooms) < 1:
            raise InputError(f"HellaSwag task {number}: an ending exceeds the model's {block_size} tokens")
        cut = len(context) > min(rooms)
        pieces = [] if cut else [(context, 0, 0)]  # tokens, the position of the first, segment
        n, sources = 0 if cut else len(context), []
        for i, ending in enumerate(endings):
            own = context[-rooms[i] :]
            if cut:  # to a different length for each ending
                pieces.append((own, 0, i + 1))
                n += len(own)
            sources += [(n if cut else len(context)) - 1, *range(n, n + len(ending) - 1)]
            pieces.append((ending[:-1], len(own), i + 1))
            n += len(ending) - 1
        columns = (
            [token for piece, _, _ in pieces for token in piece],
            [position for piece, start, _ in pieces for position in range(start, start + len(piece))],
            [segment for piece, _, segment in pieces for _ in piece],
            sources,
            [token for ending in endings for token in ending],
            [i for i, ending in enumerate(endings) for _ in ending],
            lengths,
        )
        # Through NumPy, which reads lists five times as fast as torch.
        tensors = [torch.from_numpy(np.array(column, np.int64)) for column in columns]
        tasks.append(Task(*tensors, example["label"], cut))
    return tasks

def prepare_for_training(path: str, block_size: int, gather: Callable[[Any], list[Any]]) -> list[Task] | None:
    """The tasks of a local file, or with path "" the official ones, which one process per machine downloads.

    None on all ranks, after a warning, if one of them has no network. Raises InputError for a bad local file.
    gather(value) -> the values of all ranks.
    """
    rank, local_rank, _ = torchrun_ranks()
    tasks, problem = None, None
    for turn in (local_rank == 0, local_rank != 0):
        try:
            if turn:
                tasks = prepare(load_examples(Path(path) if path else None), block_size)
        except InputError as error:
            if path:
                raise
            problem = str(error)
        problem = next(filter(None, gather(problem)), None)
        if problem:
            break
    if problem and rank == 0:
        print(f"warning: training without HellaSwag: {problem}", file=sys.stderr, flush=True)
    return None if problem else tasks

@dataclass(frozen=True)
class Score:
    """Results of the tasks `index`, this rank's share of those given to `score`."""

    index: list[int]
    losses: torch.Tensor  # (n, 4) float64: summed loss of each ending, in nats
    lengths: torch.Tensor  # (n, 4) int64: what acc_norm divides it by
    labels: torch.Tensor  # (n,)

    @property
    def num_total(self) -> int:
        return len(self.index)

    @property
    def num_correct(self) -> int:
        return int((self.losses.argmin(1) == self.labels).sum())

    @property
    def num_correct_norm(self) -> int:
        return int(((self.losses / self.lengths).argmin(1) == self.labels).sum())

    def accuracies(self) -> tuple[int, float, float]:
        """(tasks, acc, acc_norm)"""
        return self.num_total, self.num_correct / self.num_total, self.num_correct_norm / self.num_total

@torch.no_grad()
def score(
    hidden: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    head: torch.Tensor,
    tasks: list[Task],
    device: torch.device,
    batch_size: int = 16,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = False,
) -> Score:
    """Scores this rank's share of the tasks. head: (V, C).

    hidden(tokens (B, T), position (B, T), mask (B, 1, T, T) bool) -> (B, T, C), the input of the head.
    """
    from tqdm import tqdm

    order = sorted(range(len(tasks)), key=lambda i: len(tasks[i].tokens))  # similar lengths: little padding
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)][rank::world_size]
    index = [i for batch in batches for i in batch]
    losses = torch.zeros(len(index), 4, dtype=torch.float64)
    done = 0
    for batch in tqdm(batches, unit_scale=batch_size, unit="task", disable=None if progress else True):
        B, T = len(batch), round_length(len(tasks[batch[-1]].tokens), device)
        tokens, position, segment = torch.zeros(B, T).long(), torch.zeros(B, T).long(), torch.full((B, T), 5)
        for b, i in enumerate(batch):
            n = len(tasks[i].tokens)
            tokens[b, :n], position[b, :n] = tasks[i].tokens, tasks[i].position
            segment[b, :n] = tasks[i].segment
        row = torch.cat([torch.full_like(tasks[i].source, b) for b, i in enumerate(batch)])  # (M,) each
        source, answer, ending = (torch.cat([getattr(tasks[i], name) for i in batch])
                                  for name in ("source", "answer", "ending"))
        # A token attends to earlier ones of the context and of its own ending (padding, segment 5, to
        # padding).
        same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        mask = (same & torch.ones(T, T).tril().bool())[:, None]  # (B, 1, T, T)
        x = hidden(tokens.to(device), position.to(device), mask.to(device))  # (B, T, C)
        x = x[row.to(device), source.to(device)]  # (M, C)
        loss = torch.cat([
            F.cross_entropy(F.linear(part, head.to(part.dtype)).float(), target, reduction="none")
            for part, target in zip(x.split(1024), answer.to(device).split(1024), strict=True)
        ]).cpu().double()  # (M,); on the host, since not every device has float64
        losses.view(-1).index_add_(0, (done + row) * 4 + ending, loss)
        done += B
    lengths = torch.stack([tasks[i].lengths for i in index]) if index else losses
    return Score(index, losses, lengths, torch.tensor([tasks[i].label for i in index]))

def count_correct(model: Any, tasks: list[Task], device: torch.device, rank: int, world_size: int) -> int:
    """How many of its share of the tasks a GPT of train_gpt2.py gets right on this rank, by acc_norm."""
    share = score(model.hidden, model.wte.weight, tasks, device, rank=rank, world_size=world_size)
    return share.num_correct_norm

# ------------------------------------------------------------------------------------------------------------
# Command

@dataclass(frozen=True)
class HellaSwagConfig:
    """Evaluates a Hugging Face causal language model on HellaSwag."""

    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    """Hub name, folder of a model, or log folder of a run (its newest checkpoint)."""
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"
    """auto, cpu, cuda or mps."""
    data: str = ""
    """Local .jsonl of tasks; empty: the official validation set, downloaded once and verified."""
    limit: int = 0
    """Number of tasks to evaluate, from the first; 0: all."""
    batch_size: int = 16
    """Tasks per forward pass."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matmuls; losses are always float32."""
    harness: bool = False
    """Also score in lm-evaluation-harness's style; the last line is the completion style's."""
    json: str = ""
    """File for the predictions and losses of every task."""

def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1 or config.limit < 0:
        raise InputError(f"--batch-size {config.batch_size}, --limit {config.limit}: at least 1 and 0")
    device, dtype, description = choose_device(config.device, config.dtype)
    if device.type == "cpu":
        keep_freed_memory()
    if config.json:
        check_writable(config.json)
    folder = find_model(config.model)
    examples = load_examples(Path(config.data) if config.data else None)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    model, _ = load_causal_lm(folder, device, attn_implementation="sdpa")
    if model.config.vocab_size < get_tokenizer().n_vocab:
        raise InputError(f"{folder}: a vocabulary of {model.config.vocab_size}, smaller than GPT-2's")

    def hidden(tokens: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model.base_model(tokens, position_ids=position, attention_mask=mask, use_cache=False)[0]

    window = model.config.max_position_embeddings
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    results = {}
    for style in ("harness", "completion") if config.harness else ("completion",):
        tasks = prepare(examples, window, harness=style == "harness")
        with autocast:
            head = model.get_output_embeddings().weight
            results[style] = score(hidden, head, tasks, device, config.batch_size, progress=True)
        n, acc, acc_norm = results[style].accuracies()
        error, error_norm = (math.sqrt(p * (1 - p) / n) for p in (acc, acc_norm))
        name = "lm-evaluation-harness" if style == "harness" else style
        print(f"{name} style: acc {acc:.4f} (standard error {error:.4f}), acc_norm {acc_norm:.4f} "
              f"({error_norm:.4f}); {sum(task.cut for task in tasks)} contexts cut to {window} tokens")
    if config.json:
        write_json(Path(config.json), **results)
    print(f"{n} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")

def write_json(path: Path, completion: Score, harness: Score | None = None) -> None:
    """One object per task, in the file's order: label, both predictions, summed loss of each ending and its
    divisor; under "harness" the same in the harness's style, if requested."""

    def rows(result: Score) -> list[dict[str, Any]]:
        columns = zip(result.index, result.labels, result.losses, result.lengths, strict=True)
        return [
            {"task": i, "label": int(label), "prediction": int(loss.argmin()),
             "prediction_norm": int((loss / n).argmin()), "losses": loss.tolist(), "lengths": n.tolist()}
            for i, label, loss, n in sorted(columns, key=lambda row: row[0])
        ]

    objects = rows(completion)
    for row, other in zip(objects, rows(harness) if harness else [], strict=bool(harness)):
        row["harness"] = {key: value for key, value in other.items() if key not in ("task", "label")}
    with atomic_write(path, "w") as file:
        json.dump(objects, file)

if __name__ == "__main__":
    run(main)

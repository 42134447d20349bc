"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda        # any Hugging Face causal language model: hub name or folder
    python hellaswag.py -m log                 # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?", github.com/rowanz/hellaswag)
has 10,042 validation tasks. In the completion style used here, the model scores the tokens of each ending after the
context: `acc` takes the ending with the smallest summed loss, `acc_norm` the one with the smallest loss a token. GPT-2
(124M) gets 0.2859 and 0.2955. EleutherAI's lm-evaluation-harness prepares the texts differently and normalizes by
characters: its 0.2892 and 0.3114 for the same model are other numbers, not better ones.

A task is one sequence: its context, then the four endings, each of which sees the context and itself alone and takes
its positions as though it stood there alone. So the context is computed once, and the head only where an ending is
scored. Losses are float32 whatever the model computes in.
"""

import contextlib
import hashlib
import itertools
import json
import math
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import tyro

from common import InputError, atomic_write, first_line, parse_args, run
from devices import choose_device
from pretrained import find_model
from tokenizer import get_tokenizer

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DOWNLOADED = Path(__file__).parent / "hellaswag" / "hellaswag_val.jsonl"

# ---------------------------------------------------------------------------------------------------------------------
# Data


def download(path: Path = DOWNLOADED, attempts: int = 3) -> Path:
    """Fetches the validation set unless `path` holds it; it appears there whole and verified. Raises InputError."""
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
        raise InputError(f"{URL}: could not be fetched ({first_line(reason)}); --data (in training --hellaswag-data) "
                         "takes a local file")
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)
    return path


def load_examples(path: Path | None = None) -> list[dict[str, Any]]:
    """The tasks of a .jsonl file, the official validation set unless given. Raises InputError naming a bad line."""
    path = path or download()
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(lines, start=1):
        try:
            example = json.loads(line)
            if example["label"] not in range(4) or len(example["endings"]) != 4 or not all(example["endings"]):
                raise ValueError("label or endings")
            if not example["ctx"]:
                raise ValueError("empty ctx")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: no HellaSwag task ({error!r}); it needs ctx, label 0 to 3 and "
                             "four endings") from None
        examples.append(example)
    if not examples:
        raise InputError(f"{path}: no tasks")
    return examples


def encode(example: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Tokens of the context and of the four endings; a space belongs to the word that it precedes."""
    tokenizer = get_tokenizer()
    return tokenizer.encode_ordinary(example["ctx"]), [tokenizer.encode_ordinary(" " + e) for e in example["endings"]]


def render_example(example: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A task as four padded rows, context and ending: tokens (4, N) int64, mask (4, N) int64, 1 where an ending is
    scored, and the label."""
    context, endings = encode(example)
    rows = [torch.tensor(context + ending) for ending in endings]
    masks = [torch.tensor([0] * len(context) + [1] * len(ending)) for ending in endings]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(masks, batch_first=True), example["label"]


# ---------------------------------------------------------------------------------------------------------------------
# Scoring


@dataclass(frozen=True)
class Task:
    """A tokenized task: the context, then the endings, in one sequence of N tokens."""

    tokens: torch.Tensor  # (N,) int64
    position: torch.Tensor  # (N,) place of each token in context + its ending
    segment: torch.Tensor  # (N,) 0 for the context, 1 to 4 for the endings
    source: torch.Tensor  # (M,) of each of the M ending tokens: the index of the token that predicts it
    target: torch.Tensor  # (M,) and its own index
    label: int
    cut: bool  # the context was too long for the model's window and lost its beginning


def prepare(examples: list[dict[str, Any]], block_size: int) -> list[Task]:
    """Tokenizes tasks for a model with a window of block_size tokens. A context that is too long is cut on the left,
    so that every ending stays whole. Raises InputError for an ending that alone fills the window."""
    tasks = []
    for number, example in enumerate(examples, start=1):
        context, endings = encode(example)
        room = block_size - max(map(len, endings))
        if room < 1:
            raise InputError(f"HellaSwag task {number}: an ending does not fit into the model's {block_size} tokens")
        cut, context = len(context) > room, context[-room:]
        n, lengths = len(context), [len(ending) for ending in endings]
        starts = [n + sum(lengths[:i]) for i in range(4)]
        # An ending's first token is predicted by the context's last, any other by the one before it.
        source = [n - 1 if j == 0 else s + j - 1 for s, m in zip(starts, lengths, strict=True) for j in range(m)]
        tasks.append(
            Task(
                tokens=torch.tensor([*context, *itertools.chain(*endings)]),
                position=torch.tensor([*range(n), *(n + j for m in lengths for j in range(m))]),
                segment=torch.tensor([0] * n + [i + 1 for i, m in enumerate(lengths) for _ in range(m)]),
                source=torch.tensor(source),
                target=torch.arange(n, n + sum(lengths)),
                label=example["label"],
                cut=cut,
            )
        )
    return tasks


@dataclass(frozen=True)
class Score:
    """The outcome of the tasks `index` (indices into what was given to `score`), which are this rank's share."""

    index: list[int]
    losses: torch.Tensor  # (n, 4) float64: summed loss of each ending, in nats
    lengths: torch.Tensor  # (n, 4): its tokens
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
    """Scores this rank's share of the tasks.

    hidden(tokens (B, T), position (B, T), mask (B, 1, T, T) bool) -> (B, T, C): what the head reads. head: (V, C).
    """
    from tqdm import tqdm

    order = sorted(range(len(tasks)), key=lambda i: len(tasks[i].tokens))  # alike in length: little padding
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)][rank::world_size]
    index = [i for batch in batches for i in batch]
    losses, lengths = (torch.zeros(len(index), 4, dtype=torch.float64) for _ in range(2))
    done = 0
    for batch in tqdm(batches, unit_scale=batch_size, unit="task", disable=None if progress else True):
        B, T = len(batch), len(tasks[batch[-1]].tokens)
        tokens, position, segment = torch.zeros(B, T).long(), torch.zeros(B, T).long(), torch.full((B, T), 5)
        rows, sources, targets = [], [], []
        for b, i in enumerate(batch):
            n = len(tasks[i].tokens)
            tokens[b, :n], position[b, :n], segment[b, :n] = tasks[i].tokens, tasks[i].position, tasks[i].segment
            rows.append(torch.full_like(tasks[i].source, b))
            sources.append(tasks[i].source)
            targets.append(tasks[i].target)
        row, source, target = torch.cat(rows), torch.cat(sources), torch.cat(targets)  # (M,) each
        # A token sees what stands before it in the context and in its own ending (padding, segment 5, sees padding).
        same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        mask = (same & torch.ones(T, T).tril().bool())[:, None]  # (B, 1, T, T)
        x = hidden(tokens.to(device), position.to(device), mask.to(device))[row.to(device), source.to(device)]  # (M, C)
        answers = tokens[row, target].to(device)
        loss = torch.cat([
            F.cross_entropy(F.linear(part, head.to(part.dtype)).float(), answer, reduction="none")
            for part, answer in zip(x.split(1024), answers.split(1024), strict=True)
        ]).double().cpu()  # (M,)
        ending = (done + row) * 4 + segment[row, target] - 1
        losses.view(-1).index_add_(0, ending, loss)
        lengths.view(-1).index_add_(0, ending, torch.ones_like(loss))
        done += B
    return Score(index, losses, lengths, torch.tensor([tasks[i].label for i in index]))


# ---------------------------------------------------------------------------------------------------------------------
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
    """Evaluate only the first tasks, this many; 0: all."""
    batch_size: int = 16
    """Tasks a forward pass."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; losses are float32 in any case."""
    json: str = ""
    """File for the predictions and losses of every task."""


def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1 or config.limit < 0:
        raise InputError(f"--batch-size {config.batch_size}, --limit {config.limit}: at least 1 and 0")
    device, dtype, description = choose_device(config.device, config.dtype)
    folder = find_model(config.model)
    examples = load_examples(Path(config.data) if config.data else None)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{folder}: no model that can be loaded ({first_line(error)})") from None
    if model.config.vocab_size < get_tokenizer().n_vocab:
        raise InputError(f"{folder}: a vocabulary of {model.config.vocab_size}; the tasks are in GPT-2's tokens")

    def hidden(tokens: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model.base_model(tokens, position_ids=position, attention_mask=mask, use_cache=False)[0]

    tasks = prepare(examples, model.config.max_position_embeddings)
    autocast = torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with autocast:
        result = score(hidden, model.get_output_embeddings().weight, tasks, device, config.batch_size, progress=True)

    if config.json:
        write_json(Path(config.json), result)
    n, cut = result.num_total, sum(task.cut for task in tasks)
    acc, acc_norm = result.num_correct / n, result.num_correct_norm / n
    print(f"completion style; {cut} contexts cut to fit the model's window of {model.config.max_position_embeddings}")
    error, error_norm = (math.sqrt(p * (1 - p) / n) for p in (acc, acc_norm))
    print(f"standard errors: acc {error:.4f} acc_norm {error_norm:.4f}")
    print(f"{n} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")


def write_json(path: Path, result: Score) -> None:
    """One object a task, in the file's order: its label, both predictions, and the summed loss of each ending."""
    rows = [
        {"task": i, "label": int(label), "prediction": int(loss.argmin()), "prediction_norm": int((loss / n).argmin()),
         "losses": loss.tolist(), "lengths": n.long().tolist()}
        for i, label, loss, n in sorted(
            zip(result.index, result.labels, result.losses, result.lengths, strict=True), key=lambda row: row[0])
    ]
    with atomic_write(path, "w") as file:
        json.dump(rows, file)


if __name__ == "__main__":
    run(main)

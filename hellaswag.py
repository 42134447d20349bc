"""Evaluate a GPT-2 on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # a GPT-2 on the Hub, or a folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") contains
10,042 validation tasks. A task is a context, four endings, and the index of the correct one:

    {"ctx": "A man is sitting on a roof. He", "label": 3, "endings": ["is using wrap to wrap a pair
     of skis.", "is ripping level tiles off.", "is holding a rubik's cube.", "starts pulling up
     roofing on a roof."]}

This is the completion style: the model never sees the four endings side by side. It reads the
context followed by one ending, and its losses on the ending's tokens are summed. `acc` is the
fraction of tasks in which the correct ending has the lowest sum, and `acc_norm` the fraction in
which it has the lowest mean per token. Guessing scores 0.25. build-nanogpt, the code from
Karpathy's lecture, computes the same metrics, and reports these results for OpenAI's models:

    GPT-2 (124M)    10042 acc: 0.2859 acc_norm: 0.2955
    GPT-2 XL        10042 acc: 0.3842 acc_norm: 0.4893
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.request import urlopen

if __name__ == "__main__":  # read when torch is imported; train_gpt2.py says why
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
import torch.nn.functional as F
import tyro

from support.command_line import parse_args, print0, progress_bar, warn
from support.devices import choose_device, choose_precision, dtype_of, keep_freed_memory
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, check_output, sha256, write_text
from support.huggingface import find_model, tokenizer_of
from support.ranks import Ranks
from support.scripts import load_gpt_class
from support.tokenizer import Tokenizer

if TYPE_CHECKING:
    from train_gpt2 import GPT

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"  # of the file at URL
DOWNLOADED = ROOT / "hellaswag" / "hellaswag_val.jsonl"

# --------------------------------------------------------------------------------------------------
# Tasks


@dataclass(frozen=True)
class Task:
    """A tokenized HellaSwag task."""

    context: list[int]  # tokens that precede the ending
    endings: list[list[int]]  # tokens of each of the four endings
    label: int  # index of the correct ending

    @property
    def length(self) -> int:
        """Number of tokens in the context plus the longest ending."""
        return len(self.context) + max(len(ending) for ending in self.endings)


def download() -> Path:
    """Download the official tasks, unless cached. Return their path."""
    try:
        if DOWNLOADED.exists() and sha256(DOWNLOADED) == SHA256:
            return DOWNLOADED
        print0(f"downloading {URL}")
        with urlopen(URL, timeout=20) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise OSError("not the official file")
        DOWNLOADED.parent.mkdir(exist_ok=True)
        with atomic_path(DOWNLOADED) as partial:
            partial.write_bytes(content)
        return DOWNLOADED
    except (OSError, HTTPException) as error:
        remedy = "pass a local file with --data, or --hellaswag-data in training"
        raise UserError(f"{URL}: download failed ({error}); {remedy}") from None


def read_examples(path: str | Path = "") -> list[dict[str, Any]]:
    """Return the tasks in a .jsonl file, by default the official ones.

    Raises UserError with the line number if a line is not a valid task."""
    path = Path(path or download())
    examples = []
    for number, line in enumerate(path.read_bytes().rstrip().split(b"\n"), start=1):
        try:
            example = json.loads(line)
        except ValueError:
            example = None
        match example:
            case {
                "ctx": str(context),
                "label": 0 | 1 | 2 | 3,
                "endings": [str(), str(), str(), str()] as endings,
            } if context and all(endings):
                examples.append(example)
            case _:
                needs = "with ctx, a label from 0 to 3 and four endings"
                raise UserError(f"{path}, line {number}: not a HellaSwag task {needs}")
    return examples


def tokenize(examples: list[dict[str, Any]], tokenizer: Tokenizer, block_size: int) -> list[Task]:
    """Tokenize tasks, truncating long contexts from the left to fit the model's context window.

    Raises UserError if an ending alone does not fit into block_size tokens."""
    tasks = []
    shortened = 0
    for number, example in enumerate(examples, start=1):
        context = tokenizer.encode_ordinary(example["ctx"])
        endings = [tokenizer.encode_ordinary(f" {ending}") for ending in example["endings"]]
        longest = max(len(ending) for ending in endings)
        room = block_size - (longest - 1)  # the last token of an ending is only a target
        if room < 1:
            problem = f"an ending has {longest} tokens, but the context window holds {block_size}"
            remedy = "use a model with a longer one (train_gpt2.py --seq-len)"
            raise UserError(f"HellaSwag task {number}: {problem}; {remedy}")
        if len(context) > room:
            shortened += 1
            context = context[-room:]
        tasks.append(Task(context, endings, example["label"]))
    if shortened:
        print0(f"HellaSwag: {shortened} contexts truncated to fit the model's {block_size} tokens")
    return tasks


# --------------------------------------------------------------------------------------------------
# Scoring


@torch.no_grad()
def score(
    gpt: "GPT", tasks: list[Task], ranks: Ranks, batch_size: int = 8, show_progress: bool = False
) -> list[list[float]]:
    """Return the summed losses of the four endings of each task, in nats.

    All ranks must call this. Each scores a share of the tasks, and returns all tasks' losses."""
    # Batch tasks of similar length to minimize padding. Score the longest first, so that an
    # out-of-memory error occurs at once.
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].length, reverse=True)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rounds = range(0, len(batches), ranks.world_size)  # each rank scores one batch per round
    task_losses = {}  # {index of a task: losses of its four endings}
    for first in progress_bar(rounds, "batch") if show_progress else rounds:
        if first + ranks.rank < len(batches):  # in the last round, there may be none left
            batch = batches[first + ranks.rank]
            losses = score_batch(gpt, [tasks[i] for i in batch], ranks.device)
            task_losses |= dict(zip(batch, losses, strict=True))
    for losses_on_rank in ranks.gather(task_losses):
        task_losses |= losses_on_rank
    return [task_losses[i] for i in range(len(tasks))]


def score_batch(gpt: "GPT", tasks: list[Task], device: torch.device) -> list[list[float]]:
    """Score a few tasks in one forward pass. Return the four summed losses of each, in nats."""
    T = max(task.length for task in tasks) - 1  # the last token of an ending is only a target
    if device.type == "cuda":
        # Round T up to a multiple of 64, because cuDNN replans its attention kernels for each new
        # length, which is slow.
        T = min(64 * math.ceil(T / 64), gpt.config.block_size)
    # Each row is a context with one of its endings. Padding on the right changes nothing, because
    # attention is causal.
    rows = [(task.context, ending) for task in tasks for ending in task.endings]
    x = torch.zeros(len(rows), T, dtype=torch.int64)
    predicts_ending = torch.zeros(len(rows), T, dtype=torch.bool)
    for row, (context, ending) in enumerate(rows):
        tokens = context + ending[:-1]
        x[row, : len(tokens)] = torch.tensor(tokens)
        predicts_ending[row, len(context) - 1 : len(tokens)] = True
    at = predicts_ending.nonzero(as_tuple=True)
    logits = gpt(x.to(device), at=at).float()  # (n, V), for all n tokens of the endings
    targets = torch.tensor([token for _, ending in rows for token in ending], device=device)  # (n,)
    losses = F.cross_entropy(logits, targets, reduction="none")  # (n,)
    # Split the losses by ending, and sum them in float64.
    parts = losses.cpu().double().split([len(ending) for _, ending in rows])
    return torch.stack([part.sum() for part in parts]).view(-1, 4).tolist()


def choices(task: Task, losses: list[float]) -> tuple[int, int]:
    """Return the endings chosen by `acc` and by `acc_norm`, given the four summed losses."""
    means = [loss / len(ending) for loss, ending in zip(losses, task.endings, strict=True)]
    return losses.index(min(losses)), means.index(min(means))


# --------------------------------------------------------------------------------------------------
# For train_gpt2.py


def load_tasks(path: str, tokenizer: Tokenizer, block_size: int, ranks: Ranks) -> list[Task]:
    """Return the tokenized tasks of a .jsonl file, by default the official ones.

    If the download fails on any machine, print a warning and return [] on all ranks, so that the
    run continues without HellaSwag."""
    problem = ""
    if not path and ranks.local_rank == 0:  # one download per machine
        try:
            download()
        except UserError as error:
            problem = str(error)
    # gather() also makes all ranks wait for the downloads.
    problems = [problem for problem in ranks.gather(problem) if problem]
    if problems:
        warn(f"training without HellaSwag: {problems[0]}")
        return []
    examples = read_examples(path)  # by default the downloaded file
    return tokenize(examples, tokenizer, block_size)


def accuracy(gpt: "GPT", tasks: list[Task], ranks: Ranks, autocast: torch.autocast) -> float:
    """Return the acc_norm of a model, or nan if a loss is nan. All ranks must call this."""
    with autocast:
        task_losses = score(gpt, tasks, ranks)
    right = 0
    for task, losses in zip(tasks, task_losses, strict=True):
        if any(map(math.isnan, losses)):
            return math.nan  # choices() would arbitrarily pick the first ending
        _, chosen = choices(task, losses)
        right += chosen == task.label
    return right / len(tasks)


# --------------------------------------------------------------------------------------------------
# The command


@dataclass(frozen=True)
class HellaSwagConfig:
    """Evaluate a GPT-2, or a fork's model, on HellaSwag."""

    # Each field is a flag, and its comment is the flag's help text.

    # name on the Hub, model folder, .pt file, or log folder of a run (its newest checkpoint)
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"  # auto, cpu, cuda or mps
    data: str = ""  # .jsonl file of tasks; empty: the official validation set, downloaded once
    limit: int = 0  # evaluate only this many tasks, from the start; 0: all
    batch_size: int = 8  # tasks per forward pass, four rows each
    # precision of matmuls; losses are computed in float32 and summed in float64
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json: str = ""  # output file for the predictions and losses of every task
    code: str = str(ROOT / "train_gpt2.py")  # script that trained the model


def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1:
        raise UserError(f"--batch-size {config.batch_size}: must be at least 1")
    if config.limit < 0:
        raise UserError(f"--limit {config.limit}: must be at least 0")
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    precision, device_line = choose_precision(config.dtype, device)
    dtype = dtype_of(precision)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    folder = find_model(config.model)  # downloads the model if it is on the Hub
    examples = read_examples(config.data)
    if config.limit:
        examples = examples[: config.limit]
    print(f"model: {folder}; device: {device_line}")

    gpt = load_gpt_class(config.code).from_pretrained(folder).to(device)
    tasks = tokenize(examples, tokenizer_of(folder), gpt.config.block_size)
    check_output(config.json)
    one_rank = Ranks(rank=0, world_size=1, device=device)
    with autocast:
        task_losses = score(gpt, tasks, one_rank, config.batch_size, show_progress=True)

    rows = []
    for i, task in enumerate(tasks):
        losses = task_losses[i]
        if any(map(math.isnan, losses)):
            raise RunError(f"{folder}: the model's loss is nan, so it cannot be evaluated")
        prediction, prediction_norm = choices(task, losses)
        row = {
            "task": i,
            "label": task.label,
            "prediction": prediction,
            "prediction_norm": prediction_norm,
            "losses": losses,
            "lengths": [len(ending) for ending in task.endings],
        }
        rows.append(row)
    if config.json:
        write_text(config.json, json.dumps(rows))
    acc = sum(row["prediction"] == row["label"] for row in rows) / len(rows)
    acc_norm = sum(row["prediction_norm"] == row["label"] for row in rows) / len(rows)
    print(f"{len(rows)} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")


if __name__ == "__main__":
    run_and_exit(main)

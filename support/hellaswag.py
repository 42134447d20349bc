"""HellaSwag: which of four endings continues a text? Data, and how a model is scored.

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042
validation tasks. In the completion style used here the model scores the tokens of each ending after
the context: `acc` takes the ending with the lowest summed loss, `acc_norm` the one with the lowest
loss per token.

A task is one sequence: its context, then the four endings. Each ending attends to the context and
itself, with positions as if it followed the context directly. So the context is computed once, and
the head only where an ending is scored. Losses are float32 in any precision of the model."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from support.cli import print0, progress, torchrun_ranks
from support.devices import round_length
from support.errors import UserError
from support.files import atomic_path, sha256
from support.ranks import Ranks
from support.run_log import ROOT
from support.signals import until_stopped
from support.tokenizer import get_tokenizer

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DOWNLOADED = ROOT / "hellaswag" / "hellaswag_val.jsonl"

# --------------------------------------------------------------------------------------------------
# Data


def download() -> Path:
    """Downloads the validation set unless it is there, and verifies its checksum."""
    for attempt in range(3):
        time.sleep(attempt)
        try:
            if DOWNLOADED.exists() and sha256(DOWNLOADED) == SHA256:
                return DOWNLOADED
            DOWNLOADED.parent.mkdir(exist_ok=True)
            with (
                progress(desc="download", total=10042, unit="task") as bar,
                atomic_path(DOWNLOADED) as partial,
                urlopen(URL, timeout=20) as response,
            ):
                bar.iterable = response  # a line per task
                partial.write_bytes(b"".join(bar))
                if sha256(partial) != SHA256:
                    raise OSError("not the official file")
            return DOWNLOADED
        except (OSError, HTTPException) as error:
            problem = error
    raise UserError(f"{URL}: download failed ({problem}); --data (--hellaswag-data) takes a file")


def load_examples(path: str | Path = "") -> list[dict[str, Any]]:
    """The tasks of a .jsonl file, by default the official ones."""
    path = Path(path) if path else download()
    examples = []
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        example = None
        with contextlib.suppress(ValueError):
            example = json.loads(line)
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


# --------------------------------------------------------------------------------------------------
# Scoring


class Packing(NamedTuple):
    """Where the tokens of several texts in one sequence stand, and what they attend to."""

    position: Tensor  # (B, T) int64, as if each text were alone
    mask: Tensor  # (B, 1, T, T) bool


class Read(NamedTuple):
    """A token that the model reads."""

    token: int
    position: int
    segment: int  # 0: the context; 1 to 4: one of the endings


class Scored(NamedTuple):
    """A token of an ending, whose loss counts."""

    source: int  # index of the Read that predicts it
    token: int
    ending: int  # 0 to 3


@dataclass(frozen=True)
class Task:
    """A tokenized task: N tokens that the model reads, and M tokens of the endings to score."""

    read: Tensor  # (3, N) int64, with the fields of Read as rows
    scored: Tensor  # (3, M) int64, with the fields of Scored as rows
    label: int  # the right ending, 0 to 3


def columns(rows: list[NamedTuple]) -> Tensor:
    """(fields, rows) int64; through NumPy, which reads lists five times as fast as torch."""
    return torch.from_numpy(np.array(rows, np.int64).T)


def prepare(examples: list[dict[str, Any]], block_size: int) -> list[Task]:
    """Tokenizes tasks for a model with a context of block_size tokens.

    A context that is too long loses its beginning, so that every ending stays whole."""
    encode = get_tokenizer().encode_ordinary
    tasks = []
    cut = 0  # contexts that lost their beginning
    for number, example in enumerate(examples, start=1):
        context = encode(example["ctx"])
        endings = [encode(" " + ending) for ending in example["endings"]]
        room = block_size + 1 - max(map(len, endings))  # the last token of an ending is not read
        if room < 1:
            raise UserError(f"HellaSwag task {number}: an ending exceeds {block_size} tokens")
        cut += len(context) > room
        context = context[-room:]
        read = [Read(token, t, segment=0) for t, token in enumerate(context)]
        scored = []
        for i, ending in enumerate(endings):
            # The end of the context predicts the first token of an ending, each token the next.
            source = len(context) - 1
            for t, token in enumerate(ending):
                scored.append(Scored(source, token, ending=i))
                source = len(read)
                if t < len(ending) - 1:
                    read.append(Read(token, len(context) + t, segment=i + 1))
        tasks.append(Task(columns(read), columns(scored), example["label"]))
    if cut:
        print0(f"HellaSwag: {cut} contexts cut to fit the model's {block_size} tokens")
    return tasks


def prepare_for_training(
    path: str, block_size: int, gather: Callable[[Any], list[Any]]
) -> list[Task] | None:
    """The tasks of a local file, or if path is "" the official ones, downloaded once per machine.

    If a download fails, warns and returns None on all ranks. gather: Ranks.gather."""
    tasks, problem = None, None
    if not path and torchrun_ranks()[1] == 0:  # it downloads, the others of its machine wait
        try:
            tasks = prepare(load_examples(), block_size)
        except UserError as error:
            problem = str(error)
    for found in gather(problem):
        if found:
            print0(f"warning: training without HellaSwag: {found}")
            return None
    return tasks or prepare(load_examples(path), block_size)


@dataclass(frozen=True)
class Score:
    """Results of the tasks `index`, this rank's share of those given to `score`."""

    index: list[int]
    losses: Tensor  # (n, 4) float64: summed loss of each ending, in nats
    lengths: Tensor  # (n, 4) int64: tokens of each ending
    labels: Tensor  # (n,)

    def predictions(self) -> tuple[Tensor, Tensor]:
        """The endings that acc and acc_norm choose, (n,) each."""
        return self.losses.argmin(1), (self.losses / self.lengths).argmin(1)

    def correct(self) -> tuple[int, int]:
        """How many of them are right."""
        return tuple(int((chosen == self.labels).sum()) for chosen in self.predictions())


def segment_mask(segment: Tensor) -> Tensor:
    """A token attends to earlier ones of the context and its own ending, never to the padding.

    (B, T) as in Read -> (B, 1, T, T) bool"""
    T = segment.size(1)
    same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    return (same & torch.ones(T, T).tril().bool())[:, None]


@torch.no_grad()
def score(
    hidden: Callable[[Tensor, Packing], Tensor],
    head: Callable[[Tensor], Tensor],
    tasks: list[Task],
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    *,
    batch_size: int = 16,
    hide_progress: bool | None = True,  # None: unless stderr is a terminal
) -> Score:
    """Scores this rank's share of the tasks, or only a part of it after a stop signal.

    hidden(tokens (B, T), packing) -> (B, T, C); head(x (n, C)) -> logits (n, V)."""
    from tqdm import tqdm

    # Tasks of similar lengths together need little padding.
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].read.size(1))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    batches = batches[rank::world_size]
    losses = torch.zeros(len(tasks), 4, dtype=torch.float64)
    lengths = torch.zeros_like(losses, dtype=torch.int64)
    progress = tqdm(batches, unit_scale=batch_size, unit="task", disable=hide_progress)
    for batch in until_stopped(progress):
        B = len(batch)
        T = round_length(tasks[batch[-1]].read.size(1), device)  # the last task is the longest
        read = torch.zeros(3, B, T, dtype=torch.int64)
        rows = []  # the task, 0 to B-1, of each scored token
        for b, i in enumerate(batch):
            read[:, b, : tasks[i].read.size(1)] = tasks[i].read
            rows += [b] * tasks[i].scored.size(1)
        row = torch.tensor(rows)  # (M,)
        source, answer, ending = torch.cat([tasks[i].scored for i in batch], dim=1)  # (M,) each
        tokens, position, segment = read  # (B, T) each
        packing = Packing(position.to(device), segment_mask(segment).to(device))
        x = hidden(tokens.to(device), packing)  # (B, T, C)
        x = x[row.to(device), source.to(device)]  # (M, C)
        parts = []
        for x_part, target in zip(x.split(1024), answer.to(device).split(1024), strict=True):
            parts.append(F.cross_entropy(head(x_part).float(), target, reduction="none"))
        loss = torch.cat(parts).cpu().double()  # (M,); on the host: not every device has float64
        place = torch.tensor(batch)[row] * 4 + ending
        losses.view(-1).index_add_(0, place, loss)
        lengths.view(-1).index_add_(0, place, torch.ones_like(place))
    index = sorted(i for batch in batches for i in batch)
    labels = torch.tensor([tasks[i].label for i in index])
    return Score(index, losses[index], lengths[index], labels)


def accuracy(model: Any, tasks: list[Task], ranks: Ranks, autocast: torch.autocast) -> float:
    """The share of tasks that a GPT of train_gpt2.py gets right, by acc_norm. All ranks call it."""
    with autocast, torch.compiler.set_stance("force_eager"):  # don't compile one-off shapes
        result = score(
            model.hidden,
            model.logits,
            tasks,
            ranks.device,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    _, acc_norm = result.correct()
    return ranks.sum(acc_norm) / len(tasks)

"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # any Hugging Face causal LM: hub name or folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042
validation tasks. In the completion style used here the model scores the tokens of each ending after
the context: `acc` takes the ending with the lowest summed loss, `acc_norm` the one with the lowest
loss per token. GPT-2 (124M) gets 0.2859 and 0.2955.

A task is one sequence: its context, then the four endings. Each ending attends to the context and
itself, with positions as if it followed the context directly. So the context is computed once, and
the head only where an ending is scored. Losses are float32 in any precision of the model."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from support.cli import parse_args, print0, run, torchrun_ranks
from support.devices import choose_device, choose_precision, round_length
from support.errors import UserError
from support.files import atomic_path, sha256, write_text
from support.huggingface import find_model, load_causal_lm
from support.ranks import Ranks
from support.signals import until_stopped
from support.tokenizer import VOCAB_SIZE, get_tokenizer

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DOWNLOADED = Path(__file__).parent / "hellaswag" / "hellaswag_val.jsonl"
# Tells tokenizers apart; GPT-2's last merges make " informants" and " gazed".
TEXT = "It's 1,234.5 naïve informants gazed at 東京 🙂"

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
            with atomic_path(DOWNLOADED) as partial, urlopen(URL, timeout=20) as response:
                partial.write_bytes(response.read())
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

    read: torch.Tensor  # (3, N) int64, with the fields of Read as rows
    scored: torch.Tensor  # (3, M) int64, with the fields of Scored as rows
    label: int  # the right ending, 0 to 3


def columns(rows: list[NamedTuple]) -> torch.Tensor:
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
    losses: torch.Tensor  # (n, 4) float64: summed loss of each ending, in nats
    lengths: torch.Tensor  # (n, 4) int64: tokens of each ending
    labels: torch.Tensor  # (n,)

    def predictions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The endings that acc and acc_norm choose, (n,) each."""
        return self.losses.argmin(1), (self.losses / self.lengths).argmin(1)

    def correct(self) -> tuple[int, int]:
        """How many of them are right."""
        return tuple(int((chosen == self.labels).sum()) for chosen in self.predictions())


@torch.no_grad()
def score(
    hidden: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    head: torch.Tensor,
    tasks: list[Task],
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    *,
    batch_size: int = 16,
    hide_progress: bool | None = True,  # None: unless stderr is a terminal
) -> Score:
    """Scores this rank's share of the tasks, or only a part of it after a stop signal.

    hidden(tokens (B, T), position (B, T), mask (B, 1, T, T) bool) -> (B, T, C); head: (V, C)."""
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
        # A token attends to earlier ones of the context and its own ending, never to the padding.
        same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        mask = (same & torch.ones(T, T).tril().bool())[:, None]  # (B, 1, T, T)
        x = hidden(tokens.to(device), position.to(device), mask.to(device))  # (B, T, C)
        x = x[row.to(device), source.to(device)]  # (M, C)
        parts = []
        for x_part, target in zip(x.split(1024), answer.to(device).split(1024), strict=True):
            logits = F.linear(x_part, head.to(x_part.dtype)).float()
            parts.append(F.cross_entropy(logits, target, reduction="none"))
        loss = torch.cat(parts).cpu().double()  # (M,); on the host: not every device has float64
        place = torch.tensor(batch)[row] * 4 + ending
        losses.view(-1).index_add_(0, place, loss)
        lengths.view(-1).index_add_(0, place, torch.ones_like(place))
    index = sorted(i for batch in batches for i in batch)
    labels = torch.tensor([tasks[i].label for i in index])
    return Score(index, losses[index], lengths[index], labels)


def accuracy(model: Any, tasks: list[Task], ranks: Ranks, autocast: torch.autocast) -> float:
    """The share of tasks that a GPT of train_gpt2.py gets right, by acc_norm. All ranks call it."""
    head = model.wte.weight
    with autocast, torch.compiler.set_stance("force_eager"):  # don't compile one-off shapes
        result = score(
            model.hidden,
            head,
            tasks,
            ranks.device,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    _, acc_norm = result.correct()
    return ranks.sum(acc_norm) / len(tasks)


# --------------------------------------------------------------------------------------------------
# Command


@dataclass(frozen=True)
class HellaSwagConfig:
    """Evaluates a Hugging Face causal language model on HellaSwag."""

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
    folder = find_model(config.model)
    examples = load_examples(config.data)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    model, tokenizer = load_causal_lm(folder, device, attn_implementation="sdpa")
    check_model(folder, model, tokenizer)

    def hidden(tokens: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model.base_model(
            tokens, position_ids=position, attention_mask=mask, use_cache=False
        )[0]

    tasks = prepare(examples, model.config.max_position_embeddings)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        head = model.get_output_embeddings().weight
        result = score(
            hidden, head, tasks, device, batch_size=config.batch_size, hide_progress=None
        )
    if config.json:
        write_json(config.json, result)
    acc, acc_norm = (right / len(tasks) for right in result.correct())
    print(f"{len(tasks)} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")


if __name__ == "__main__":
    run(main)

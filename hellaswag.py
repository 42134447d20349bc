"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # any Hugging Face causal LM: hub name or folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042
validation tasks. In the completion style used here the model scores the tokens of each ending after
the context: `acc` takes the ending with the lowest summed loss, `acc_norm` the one with the lowest
loss per token. GPT-2 (124M) gets 0.2859 and 0.2955; EleutherAI's lm-evaluation-harness, with other
contexts and losses per character, 0.2892 and 0.3114 (docs/after.md).

A task is one sequence: its context, then the four endings. Each ending attends to the context and
itself, with positions as if it followed the context directly. So the context is computed once, and
the head only where an ending is scored. Losses are float32 in any precision of the model."""

import hashlib
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from support.cli import UserError, check_writable, first_line, parse_args, run, torchrun_ranks, warn
from support.devices import choose_device, keep_freed_memory, round_length
from support.files import atomic_write, sha256, write_text
from support.models import find_model, load_causal_lm
from support.tokenizer import VOCAB_SIZE, get_tokenizer

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
DOWNLOADED = Path(__file__).parent / "hellaswag" / "hellaswag_val.jsonl"
# Tells tokenizers apart; GPT-2's last merges make " informants" and " gazed".
TEXT = "It's 1,234.5 naïve informants gazed at 東京 🙂"

# --------------------------------------------------------------------------------------------------
# Data


def download(path: Path = DOWNLOADED, attempts: int = 3) -> Path:
    """Downloads the validation set unless `path` has it, and verifies its checksum."""
    if path.exists() and sha256(path) == SHA256:
        return path
    for attempt in range(attempts):
        time.sleep(attempt)
        try:
            with urllib.request.urlopen(URL, timeout=20) as response:
                content = response.read()
        except OSError as error:  # also URLError and time-outs
            problem = first_line(error)
            continue
        if hashlib.sha256(content).hexdigest() == SHA256:
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as file:
                file.write(content)
            return path
        problem = f"{len(content)} bytes that are not the official file"
    local = "--data (in training --hellaswag-data) takes a local file"
    raise UserError(f"{URL}: download failed ({problem}); {local}")


def load_examples(path: Path | None = None) -> list[dict[str, Any]]:
    """The tasks of a .jsonl file, by default the official ones."""
    path = path or download()
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    examples = []
    for number, line in enumerate(lines, start=1):
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
                needs = "a JSON object with ctx, a label from 0 to 3 and four endings"
                raise UserError(f"{path}, line {number}: not a HellaSwag task, {needs}")
    return examples


# --------------------------------------------------------------------------------------------------
# Scoring


@dataclass(frozen=True)
class Task:
    """A tokenized task: N tokens that the model reads, and the M tokens of the endings to score."""

    # (3, N) int64: token, position, segment (1 to 4 for an ending, 0 for the context)
    read: torch.Tensor
    # (3, M) int64: which of the N predicts this token, the token, its ending (0 to 3)
    scored: torch.Tensor
    label: int
    cut: bool  # the context exceeded the window and lost its beginning


def prepare(examples: list[dict[str, Any]], block_size: int) -> list[Task]:
    """Tokenizes tasks for a model with a context of block_size tokens.

    A context that is too long is cut on the left, so that every ending stays whole; an ending
    longer than the window is a UserError."""
    encode, tasks = get_tokenizer().encode_ordinary, []
    for number, example in enumerate(examples, start=1):
        context = encode(example["ctx"])
        endings = [encode(" " + ending) for ending in example["endings"]]
        # What each ending leaves for the context; an ending's last token is not read.
        rooms = [block_size + 1 - len(ending) for ending in endings]
        if min(rooms) < 1:
            raise UserError(
                f"HellaSwag task {number}: an ending exceeds the model's {block_size} tokens"
            )
        cut = len(context) > min(rooms)
        shared = [] if cut else context
        read, scored = [(token, t, 0) for t, token in enumerate(shared)], []
        for i, ending in enumerate(endings):
            own = context[-rooms[i] :] if cut else []  # of a different length for each ending
            first = len(read) + len(own)  # where the model reads the ending's first token
            last = first - 1 if cut else len(context) - 1  # of the context
            sources = [last, *range(first, first + len(ending) - 1)]
            scored += [(source, token, i) for source, token in zip(sources, ending, strict=True)]
            own += ending[:-1]
            read += [(token, t, i + 1) for t, token in enumerate(own, start=len(shared))]
        # Through NumPy, which reads lists five times as fast as torch.
        columns = (torch.from_numpy(np.array(rows, np.int64).T) for rows in (read, scored))
        tasks.append(Task(*columns, example["label"], cut))
    return tasks


def prepare_for_training(
    path: str, block_size: int, gather: Callable[[Any], list[Any]]
) -> list[Task] | None:
    """The tasks of a local file, or if path is "" the official ones, downloaded once per machine.

    If a download fails, warns and returns None on all ranks. gather(value) -> the values of all
    ranks."""
    rank, local_rank, _ = torchrun_ranks()
    tasks, problem, file = None, None, Path(path) if path else None
    if local_rank == 0:  # it downloads, the others wait
        try:
            tasks = prepare(load_examples(file), block_size)
        except (UserError, OSError) as error:  # no network, or no space for the download
            if path:
                raise
            problem = str(error)
    problem = next(filter(None, gather(problem)), None)
    if problem:
        if rank == 0:
            warn(f"training without HellaSwag: {problem}")
        return None
    return tasks or prepare(load_examples(file), block_size)


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
        by_sum, by_mean = (int((chosen == self.labels).sum()) for chosen in self.predictions())
        return by_sum, by_mean

    def accuracies(self) -> tuple[int, float, float]:
        """(tasks, acc, acc_norm)"""
        n, (by_sum, by_mean) = len(self.index), self.correct()
        return n, by_sum / n, by_mean / n


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
    received: Sequence[int] = (),
) -> Score:
    """Scores this rank's share of the tasks, or a part after a signal is `received`. head: (V, C).

    hidden(tokens (B, T), position (B, T), mask (B, 1, T, T) bool) -> (B, T, C), the input of the
    head."""
    from tqdm import tqdm

    # Tasks of similar lengths together need little padding.
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].read.size(1))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    batches = batches[rank::world_size]
    index = [i for batch in batches for i in batch]
    losses = torch.zeros(len(index), 4, dtype=torch.float64)
    lengths = torch.zeros_like(losses, dtype=torch.int64)
    done = 0
    hide = None if progress else True  # None: unless stderr is a terminal
    for batch in tqdm(batches, unit_scale=batch_size, unit="task", disable=hide):
        if received:
            break
        B, T = len(batch), round_length(tasks[batch[-1]].read.size(1), device)
        read = torch.tensor([0, 0, 5])[:, None, None].repeat(1, B, T)  # padding is segment 5
        rows = []
        for b, i in enumerate(batch):
            read[:, b, : tasks[i].read.size(1)] = tasks[i].read
            rows += [b] * tasks[i].scored.size(1)
        row = torch.tensor(rows)  # (M,)
        source, answer, ending = torch.cat([tasks[i].scored for i in batch], dim=1)  # (M,) each
        tokens, position, segment = read  # (B, T) each
        # A token attends to earlier ones of the context and its own ending; padding, to padding.
        same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
        mask = (same & torch.ones(T, T).tril().bool())[:, None]  # (B, 1, T, T)
        x = hidden(tokens.to(device), position.to(device), mask.to(device))  # (B, T, C)
        x = x[row.to(device), source.to(device)]  # (M, C)
        parts = []
        for x_part, target in zip(x.split(1024), answer.to(device).split(1024), strict=True):
            logits = F.linear(x_part, head.to(x_part.dtype)).float()
            parts.append(F.cross_entropy(logits, target, reduction="none"))
        loss = torch.cat(parts).cpu().double()  # (M,); on the host: not every device has float64
        place = (done + row) * 4 + ending
        losses.view(-1).index_add_(0, place, loss)
        lengths.view(-1).index_add_(0, place, torch.ones_like(place))
        done += B
    return Score(index, losses, lengths, torch.tensor([tasks[i].label for i in index]))


def count_correct(
    model: Any,
    tasks: list[Task],
    device: torch.device,
    rank: int,
    world_size: int,
    received: Sequence[int] = (),
) -> int:
    """How many of this rank's share a GPT of train_gpt2.py gets right, by acc_norm."""
    hidden, head = model.hidden, model.wte.weight
    ranks = {"rank": rank, "world_size": world_size}
    return score(hidden, head, tasks, device, **ranks, received=received).correct()[1]


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


def write_json(path: Path, result: Score) -> None:
    """One object per task, in order: label, both predictions, each ending's loss and tokens."""
    names = ("task", "label", "prediction", "prediction_norm", "losses", "lengths")
    columns = (result.labels, *result.predictions(), result.losses, result.lengths)
    rows = zip(result.index, *(column.tolist() for column in columns), strict=True)
    write_text(path, json.dumps([dict(zip(names, row, strict=True)) for row in sorted(rows)]))


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
    device, dtype, description = choose_device(config.device, config.dtype)
    if device.type == "cpu":
        keep_freed_memory()
    if config.json:
        check_writable(config.json)
    folder = find_model(config.model)
    examples = load_examples(Path(config.data) if config.data else None)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    model, tokenizer = load_causal_lm(folder, device, attn_implementation="sdpa")
    check_model(folder, model, tokenizer)

    def hidden(tokens: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model.base_model(
            tokens, position_ids=position, attention_mask=mask, use_cache=False
        )[0]

    window = model.config.max_position_embeddings
    tasks = prepare(examples, window)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        head = model.get_output_embeddings().weight
        result = score(hidden, head, tasks, device, config.batch_size, progress=True)
    if config.json:
        write_json(Path(config.json), result)
    n, acc, acc_norm = result.accuracies()
    cut = sum(task.cut for task in tasks)
    if cut:
        print(f"{cut} contexts cut to {window} tokens")
    print(f"{n} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")


if __name__ == "__main__":
    run(main)

"""HellaSwag: which of four endings continues a text? Data, and how a model is scored.

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042
validation tasks. In the completion style used here the model scores the tokens of each ending after
the context: `acc` takes the ending with the lowest summed loss, `acc_norm` the one with the lowest
loss per token."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from support.cli import print0, torchrun_ranks
from support.devices import padded
from support.errors import UserError
from support.files import atomic_path, sha256
from support.ranks import Ranks
from support.run_log import ROOT
from support.tokenizer import VOCAB_SIZE, get_tokenizer

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
            with atomic_path(DOWNLOADED) as partial, urlopen(URL, timeout=20) as response:
                lines = tqdm(response, "download", 10042, leave=False, disable=None, unit="task")
                partial.write_bytes(b"".join(lines))
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
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
            example = found
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


@dataclass(frozen=True)
class Task:
    context: list[int]  # tokens
    endings: list[list[int]]  # of each ending
    label: int  # the right one, 0 to 3

    @property
    def length(self) -> int:
        """Tokens of its longest row that are read: all but the last."""
        return len(self.context) + max(map(len, self.endings)) - 1


def prepare(
    examples: list[dict[str, Any]],
    block_size: int,
    encode: Callable[[str], list[int]],
    keep: int = 0,
) -> list[Task]:
    """Tokenizes tasks for a model with a context of block_size tokens.

    A context that is too long loses its beginning, so that every ending stays whole; keep: the
    number of its first tokens that stay as well, such as a beginning-of-text token."""
    tasks = []
    cut = 0  # contexts that lost their beginning
    for number, example in enumerate(examples, start=1):
        context = encode(example["ctx"])
        # Tokenized together: some tokenizers would give an ending alone another first token.
        texts = [encode(f"{example['ctx']} {ending}") for ending in example["endings"]]
        endings = [text[len(context) :] for text in texts]
        longest = max(map(len, endings))
        room = block_size + 1 - longest  # the last token of an ending is not read
        if room <= keep:
            problem = f"an ending of {longest} tokens, too long for a context of {block_size}"
            raise UserError(f"HellaSwag task {number}: {problem}; a longer --seq-len has room")
        if len(context) > room:
            cut += 1
            context = context[:keep] + context[len(context) - room + keep :]
        tasks.append(Task(context, endings, example["label"]))
    if cut:
        print0(f"HellaSwag: {cut} contexts cut to fit the model's {block_size} tokens")
    return tasks


def load_tasks(path: str, block_size: int, ranks: Ranks) -> list[Task]:
    """The tasks of a local file, or if path is "" the official ones, downloaded once per machine.

    If a download fails, warns and returns [] on all ranks."""
    problem = ""
    if not path and torchrun_ranks()[1] == 0:  # it downloads, the others of its machine wait
        try:
            download()
        except UserError as error:
            problem = str(error)
    for found in ranks.gather(problem):
        if found:
            print0(f"warning: training without HellaSwag: {found}")
            return []
    return prepare(load_examples(path), block_size, get_tokenizer().encode_ordinary)


# --------------------------------------------------------------------------------------------------
# Scoring


@dataclass(frozen=True)
class Score:
    """The result of a task."""

    losses: list[float]  # summed loss of each ending, in nats
    lengths: list[int]  # tokens of each ending
    label: int

    @property
    def predictions(self) -> tuple[int, int]:
        """The endings that acc and acc_norm choose."""
        means = [loss / n for loss, n in zip(self.losses, self.lengths, strict=True)]
        return self.losses.index(min(self.losses)), means.index(min(means))


# (tokens (B, T), row (n,), column (n,)) -> the logits at these n places, (n, V)
LogitsAt = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def score(
    logits_at: LogitsAt,
    tasks: list[Task],
    ranks: Ranks,
    batch_size: int = 8,
    hide_progress: bool | None = True,  # None: unless stderr is a terminal
) -> dict[int, Score]:
    """Scores this rank's share of the tasks. Raises Stopped after a stop signal.

    Every ending is a row: the context and the ending, then padding, which no token attends to.
    Returns {number of the task: its score}."""
    device = ranks.device
    # Tasks of similar lengths together need little padding.
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].length)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    rounds = len(range(ranks.rank, len(batches), ranks.world_size))
    scores = {}
    for batch in tqdm(
        ranks.share(batches),
        total=rounds,
        unit_scale=batch_size,
        unit="task",
        disable=hide_progress,
    ):
        T = max(tasks[i].length for i in batch)
        tokens = torch.zeros(4 * len(batch), T, dtype=torch.int64)
        rows, columns, targets = [], [], []  # where an ending's tokens are predicted, and they
        pairs = [(tasks[i].context, ending) for i in batch for ending in tasks[i].endings]
        for row, (context, ending) in enumerate(pairs):
            read = context + ending[:-1]  # the last token is predicted, not read
            tokens[row, : len(read)] = torch.tensor(read)
            rows += [row] * len(ending)
            columns += range(len(context) - 1, len(read))
            targets += ending
        where = torch.tensor([rows, columns, targets]).to(device)  # (3, n)
        logits = logits_at(tokens.to(device), *where[:2]).float()  # (n, V)
        losses = F.cross_entropy(logits, where[2], reduction="none").cpu().double()  # (n,)
        lengths = [len(ending) for _, ending in pairs]
        sums = [part.sum().item() for part in losses.split(lengths)]
        for n, i in enumerate(batch):
            ours = slice(4 * n, 4 * n + 4)
            scores[i] = Score(sums[ours], lengths[ours], tasks[i].label)
    return scores


def gpt_logits(model: Any) -> LogitsAt:
    """What score() takes, for a GPT of train_gpt2.py: the head only where it counts."""

    def logits_at(tokens: Tensor, row: Tensor, column: Tensor) -> Tensor:
        longer = padded(tokens, model.config.block_size)
        return model(longer, at=(row, column))[:, :VOCAB_SIZE]  # more have no text

    return logits_at


def accuracy(model: Any, tasks: list[Task], ranks: Ranks, autocast: torch.autocast) -> float:
    """The share of tasks that a GPT of train_gpt2.py gets right, by acc_norm. All ranks call it."""
    with autocast, torch.compiler.set_stance("force_eager"):  # don't compile one-off shapes
        scores = score(gpt_logits(model), tasks, ranks)
    right = sum(result.predictions[1] == result.label for result in scores.values())
    return ranks.sum(right) / len(tasks)

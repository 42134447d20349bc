"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # any causal language model of the Hub, or a folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042
validation tasks. A task has a context, four endings and the number of the right one:

    {"ctx": "A man is sitting on a roof. He", "label": 3, "endings": ["is using wrap to wrap a pair
     of skis.", "is ripping level tiles off.", "is holding a rubik's cube.", "starts pulling up
     roofing on a roof."]}

The model never sees the four endings side by side. It reads the context with each of them, and we
sum its loss over the tokens of the ending. `acc` takes the ending with the lowest sum, and
`acc_norm` the one with the lowest mean per token. The scores below are build-nanogpt's, which
counts in the same way. Guessing gets 0.25.

    GPT-2 (124M)    10042 acc: 0.2859 acc_norm: 0.2955
    GPT-2 XL        10042 acc: 0.3842 acc_norm: 0.4893

train_gpt2.py uses load_tasks() and accuracy() while it trains."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.request import urlopen

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from tqdm import tqdm

from support.command_line import parse_args, print0, torchrun_ranks
from support.devices import choose_device, choose_precision, keep_freed_memory, padded
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, sha256, write_text
from support.huggingface import find_model, load_causal_lm, load_gpt
from support.ranks import Ranks
from support.tokenizer import VOCAB_SIZE, get_tokenizer

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"  # of that file
DOWNLOADED = ROOT / "hellaswag" / "hellaswag_val.jsonl"
MAX_LOGITS = 2**28  # that transformers may compute at a time: a gigabyte

# --------------------------------------------------------------------------------------------------
# Tasks


def download() -> Path:
    """Downloads the validation set, unless it is there already, and returns its path."""
    for attempt in range(3):
        time.sleep(attempt)  # seconds
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


def read_examples(path: str | Path = "") -> list[dict[str, Any]]:
    """The tasks in a .jsonl file, by default the official ones."""
    path = Path(path) if path else download()
    examples = []
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        example = None
        with contextlib.suppress(ValueError, RecursionError):  # it is not JSON
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
class LanguageModel:
    """What must be known of a model to score it. train_gpt2.py's and transformers' differ in it."""

    context: int  # the longest input, in tokens
    encode: Callable[[str], list[int]]  # text -> tokens
    first: list[int]  # tokens that begin every input, such as <s>; GPT-2 has none
    # (tokens (B, T), where (B, T) bool) -> the logits at the n places where `where` is true, (n, V)
    logits: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    context: list[int]  # tokens
    endings: list[list[int]]  # the tokens of each ending
    label: int  # the right ending, 0 to 3

    @property
    def length(self) -> int:
        """The number of tokens of the context and the longest ending."""
        return len(self.context) + max(len(ending) for ending in self.endings)


def tokenize(examples: list[dict[str, Any]], model: LanguageModel) -> list[Task]:
    """Tokenizes tasks. A context that is too long for the model loses its beginning."""
    tasks = []
    cut = 0  # contexts that have lost their beginning
    for number, example in enumerate(examples, start=1):
        context = model.encode(example["ctx"])
        # An ending is tokenized behind its context, since some tokenizers would give an ending
        # alone another first token.
        texts = [model.encode(f"{example['ctx']} {ending}") for ending in example["endings"]]
        endings = [text[len(context) :] for text in texts]
        longest = max(len(ending) for ending in endings)
        # The last token of an ending is predicted, but never read. So one more token has room.
        room = model.context + 1 - len(model.first) - longest
        if room < 1:
            problem = f"an ending of {longest} tokens, too long for a context of {model.context}"
            raise UserError(f"HellaSwag task {number}: {problem}; a longer --seq-len has room")
        if len(context) > room:
            cut += 1
        tasks.append(Task(model.first + context[-room:], endings, example["label"]))
    if cut:
        print0(f"HellaSwag: {cut} contexts cut to fit the model's {model.context} tokens")
    return tasks


# --------------------------------------------------------------------------------------------------
# Scoring


@torch.no_grad()
def score(
    model: LanguageModel,
    tasks: list[Task],
    ranks: Ranks,
    batch_size: int = 8,
    show_progress: bool = False,
) -> dict[int, list[float]]:
    """Sums the losses of the tokens of each ending: {number of a task: four sums, in nats}.

    Each rank scores its share of the tasks. After a stop signal this raises Stopped."""
    # Tasks of similar lengths are scored together, so that little padding is needed.
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].length)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    sums = {}
    # With disable=None tqdm shows its bar only on a terminal.
    bar = tqdm(total=len(tasks), unit="task", disable=None if show_progress else True)
    for batch in ranks.share(batches):
        # A row holds a context and one of its endings. Zeros fill it up behind them, which no
        # earlier token sees.
        rows = [(tasks[i].context, ending) for i in batch for ending in tasks[i].endings]
        T = max(tasks[i].length for i in batch) - 1
        tokens = torch.zeros(len(rows), T + 1, dtype=torch.int64)
        predicts_ending = torch.zeros(len(rows), T, dtype=torch.bool)
        for row, (context, ending) in enumerate(rows):
            n = len(context) + len(ending)
            tokens[row, :n] = torch.tensor(context + ending)
            # The last token of the context predicts the first one of the ending.
            predicts_ending[row, len(context) - 1 : n - 1] = True
        x = tokens[:, :-1].to(ranks.device)  # (B, T)
        y = tokens[:, 1:][predicts_ending].to(ranks.device)  # (n,): the tokens of all endings
        logits = model.logits(x, predicts_ending.to(ranks.device)).float()  # (n, V)
        losses = F.cross_entropy(logits, y, reduction="none").cpu().double()  # (n,)
        # Back to rows: zeros, but for the losses of each row's ending.
        table = torch.zeros(len(rows), T, dtype=torch.float64)
        table[predicts_ending] = losses
        for i, four in zip(batch, table.sum(dim=1).view(-1, 4).tolist(), strict=True):
            sums[i] = four
        bar.update(len(batch))
    bar.close()
    return sums


def choices(task: Task, sums: list[float]) -> tuple[int, int]:
    """The endings that acc and acc_norm choose, given the summed losses of the four."""
    means = [loss / len(ending) for loss, ending in zip(sums, task.endings, strict=True)]
    return sums.index(min(sums)), means.index(min(means))


# --------------------------------------------------------------------------------------------------
# Models


def of_train_gpt2(model: Any) -> LanguageModel:
    """A GPT of train_gpt2.py. It computes the logits of the endings alone."""
    context = model.config.block_size

    def logits(tokens: Tensor, where: Tensor) -> Tensor:
        tokens, where = padded(tokens, context), padded(where, context)
        return model(tokens, at=where)[:, :VOCAB_SIZE]  # what follows has no text

    return LanguageModel(context, get_tokenizer().encode_ordinary, [], logits)


def of_transformers(folder: Path, device: torch.device) -> LanguageModel:
    """Any causal language model, by transformers, with its own tokenizer."""
    # In float32, whatever it is saved in. With another --dtype autocast computes in that.
    model, tokenizer = load_causal_lm(folder, device, torch.float32)
    config = model.config.get_text_config()
    # A model such as Mamba has no longest input.
    context = getattr(config, "max_position_embeddings", None) or 2**20

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    with_special = tokenizer("a").input_ids
    first = with_special[: with_special.index(encode("a")[0])]

    def logits(tokens: Tensor, where: Tensor) -> Tensor:
        tokens, where = padded(tokens, context), padded(where, context)
        # transformers computes the logits of all tokens, so only some rows have room at a time.
        rows = max(MAX_LOGITS // (config.vocab_size * tokens.size(1)), 1)
        parts = zip(tokens.split(rows), where.split(rows), strict=True)
        return torch.cat([model(x, use_cache=False).logits[at] for x, at in parts])

    # Change the last token. In a causal model the logits before it stay the same.
    tokens = torch.arange(8, device=device).repeat(2, 1)  # (2, 8)
    tokens[1, -1] = 8
    before_last = torch.tensor([[True] * 7 + [False]] * 2, device=device)
    with torch.no_grad():
        a, b = logits(tokens, before_last).chunk(2)  # (7, V) each
    if not torch.allclose(a, b, atol=1e-3 * float(a.std())):
        raise UserError(f"{folder}: not a causal language model: its tokens see later ones")
    return LanguageModel(context, encode, first, logits)


# --------------------------------------------------------------------------------------------------
# In training


def load_tasks(path: str, model: Any, ranks: Ranks) -> list[Task]:
    """The tasks for a GPT of train_gpt2.py, from a .jsonl file, or by default the official ones.

    If these can't be downloaded, this warns and returns [] on all ranks."""
    problem = ""
    if not path and torchrun_ranks()[1] == 0:  # one process of each machine downloads
        try:
            download()
        except UserError as error:
            problem = str(error)
    for found in ranks.gather(problem):  # the others wait here
        if found:
            print0(f"warning: training without HellaSwag: {found}")
            return []
    return tokenize(read_examples(path), of_train_gpt2(model))


def accuracy(model: Any, tasks: list[Task], ranks: Ranks, autocast: torch.autocast) -> float:
    """The acc_norm of a GPT of train_gpt2.py, over the tasks of all ranks."""
    # Without force_eager a compiled model would be compiled again for each length.
    with autocast, torch.compiler.set_stance("force_eager"):
        sums = score(of_train_gpt2(model), tasks, ranks)
    right = sum(choices(tasks[i], four)[1] == tasks[i].label for i, four in sums.items())
    return ranks.sum(right) / len(tasks)


# --------------------------------------------------------------------------------------------------
# The command


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


def check_writable(path: str) -> None:
    """UserError unless a file can be written at `path`."""
    if Path(path).is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise UserError(f"{path}: its folder is missing or not writable; choose another")


def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1 or config.limit < 0:
        numbers = f"--batch-size {config.batch_size}, --limit {config.limit}"
        raise UserError(f"{numbers}: must be at least 1 and 0")
    if config.json:
        check_writable(config.json)  # now, and not after hours of scoring
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    # With auto, a model of any size is scored in float32 on a CPU.
    dtype, description = choose_precision(config.dtype, device, parameters=0)
    folder = find_model(config.model)
    examples = read_examples(config.data)[: config.limit or None]
    print(f"model: {folder}; device: {description}")

    gpt = load_gpt(folder, device, config.code)  # None if another program has made the model
    model = of_train_gpt2(gpt) if gpt is not None else of_transformers(folder, device)
    tasks = tokenize(examples, model)
    alone = Ranks(rank=0, world_size=1, device=device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        sums = score(model, tasks, alone, config.batch_size, show_progress=True)

    rows = []
    for number, task in enumerate(tasks):
        by_sum, by_mean = choices(task, sums[number])
        row = {"task": number, "label": task.label}
        row |= {"prediction": by_sum, "prediction_norm": by_mean}
        row |= {"losses": sums[number], "lengths": [len(ending) for ending in task.endings]}
        rows.append(row)
    if config.json:
        write_text(config.json, json.dumps(rows))
    acc, acc_norm = (
        sum(row[prediction] == row["label"] for row in rows) / len(rows)
        for prediction in ("prediction", "prediction_norm")
    )
    print(f"{len(rows)} acc: {acc:.4f} acc_norm: {acc_norm:.4f}")


if __name__ == "__main__":
    run_and_exit(main)

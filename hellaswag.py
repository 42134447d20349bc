"""Evaluates a language model on HellaSwag: which of four endings continues a text?

    python hellaswag.py -m gpt2 -d cuda    # any causal language model of the Hub, or a folder
    python hellaswag.py -m log             # the newest checkpoint of a run
    python hellaswag.py -m log/step_019073 --data my_tasks.jsonl --limit 100

HellaSwag (Zellers et al. 2019, "HellaSwag: Can a Machine Really Finish Your Sentence?") has 10,042
validation tasks. A task has a context, four endings, and the index of the right one:

    {"ctx": "A man is sitting on a roof. He", "label": 3, "endings": ["is using wrap to wrap a pair
     of skis.", "is ripping level tiles off.", "is holding a rubik's cube.", "starts pulling up
     roofing on a roof."]}

The model never sees the four endings side by side. It reads the context followed by one ending, and
its losses on the tokens of the ending are added up. `acc` is the share of tasks in which the right
ending has the lowest sum. `acc_norm` is the share in which it has the lowest mean per token. A
model that guesses gets 0.25. build-nanogpt, the code of Karpathy's lecture, counts in the same
way, and reports for OpenAI's models:

    GPT-2 (124M)    10042 acc: 0.2859 acc_norm: 0.2955
    GPT-2 XL        10042 acc: 0.3842 acc_norm: 0.4893

While train_gpt2.py trains, it calls load_tasks() and accuracy()."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.request import urlopen

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from support.command_line import note, parse_args, print0, progress_bar, warn
from support.devices import (
    choose_device,
    choose_precision,
    keep_freed_memory,
    use_precision,
)
from support.errors_and_signals import RunError, UserError, first_line, run_and_exit
from support.files_and_locks import ROOT, atomic_path, sha256, write_text
from support.forks import is_gpt2
from support.functional_gpt2 import gpt2
from support.huggingface import find_model, is_ours, load_by_transformers, tokenizer_of
from support.ranks import Ranks
from support.scripts import load_gpt_class
from support.tokenizer import Tokenizer, WordTokenizer

if TYPE_CHECKING:
    from train_gpt2 import GPT

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"  # of the file there
DOWNLOADED = ROOT / "hellaswag" / "hellaswag_val.jsonl"  # ROOT is the folder of this script

# --------------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True)
class LanguageModel:
    """What this file needs of a model, whether it is train_gpt2.py's or any other."""

    max_length: int  # the longest input that the model takes, in tokens
    encode: Callable[[str], list[int]]  # turns a text into tokens
    start: list[int]  # the tokens before each text: often <s>, none for GPT-2
    # Takes tokens (B, T) and a mask (B, T), which is on the CPU. Returns the logits (n, V) at the n
    # places where the mask is true.
    logits_at: Callable[[Tensor, Tensor], Tensor]
    gpt2: "GPT | None" = None  # the model, if it is train_gpt2.py's and computes a GPT-2


def wrap_gpt(gpt: "GPT", tokenizer: Tokenizer) -> LanguageModel:
    """A GPT of train_gpt2.py as a LanguageModel."""

    return LanguageModel(
        max_length=gpt.config.block_size,
        encode=tokenizer.encode_ordinary,
        start=[],
        logits_at=lambda tokens, mask: gpt(tokens, at=mask.nonzero(as_tuple=True)),
        gpt2=gpt if is_gpt2(gpt) else None,
    )


def wrap_transformers(folder: Path, device: torch.device) -> LanguageModel:
    """Loads any causal language model, and its tokenizer, by transformers. It is in float32."""
    import transformers

    patterns = ("tokenizer.json", "vocab.*", "merges.txt", "*.model")
    if not any(list(folder.glob(name)) for name in patterns):  # transformers would not complain
        raise UserError(f"{folder}: no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    model = load_by_transformers(folder).to(device)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of transformers or tokenizers, which have no common base class
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({first_line(error)})") from None
    check_causal(model, folder)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    # `start` is what the tokenizer puts before a text, for example <s> before "a".
    a = encode("a")[0]
    with_start = tokenizer("a").input_ids
    start = with_start[: with_start.index(a)]

    config = model.config.get_text_config()  # A model for text and images has several configs.
    return LanguageModel(
        # GPT-2's is 1024. Models without a limit, such as Mamba, do not have this setting.
        max_length=getattr(config, "max_position_embeddings", None) or 2**20,
        encode=encode,
        start=start,
        logits_at=lambda tokens, mask: model(tokens, use_cache=False).logits[mask],
    )


@torch.no_grad()
def check_causal(model: Any, folder: Path) -> None:
    """UserError if the logits of a token depend on later tokens, as they do in BERT."""
    tokens = torch.arange(8, device=model.device)[None]  # (1, 8)
    changed = tokens.clone()
    changed[0, -1] = 8
    before, after = (model(idx).logits[0, :-1] for idx in (tokens, changed))  # (7, V) each
    # The same logits, computed twice, can differ by rounding, so a small difference is allowed.
    if not torch.allclose(before, after, atol=1e-3 * before.std().item()):
        raise UserError(f"{folder}: not a causal language model: its tokens see later ones")


# --------------------------------------------------------------------------------------------------
# Tasks


@dataclass(frozen=True)
class Task:
    context: list[int]  # the tokens before an ending
    endings: list[list[int]]  # the tokens of each
    label: int  # index of the right ending

    @property
    def length(self) -> int:
        """The number of tokens of the context with the longest ending."""
        return len(self.context) + max(len(ending) for ending in self.endings)


def download() -> Path:
    """Downloads the official tasks, unless they are here already. Returns their path."""
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
        remedy = "give a local file with --data, or --hellaswag-data in training"
        raise UserError(f"{URL}: download failed ({error}); {remedy}") from None


def read_examples(path: str | Path = "") -> list[dict[str, Any]]:
    """The tasks in a .jsonl file, by default the official ones.

    UserError if a line is no task. It names the line."""
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


def tokenize(examples: list[dict[str, Any]], model: LanguageModel) -> list[Task]:
    """Tokenizes tasks. A context that is too long for the model loses its beginning.

    UserError if an ending does not fit."""
    tasks = []
    shortened = 0
    for number, example in enumerate(examples, start=1):
        context = model.encode(example["ctx"])
        # Some tokenizers split an ending differently where it stands alone. So it is tokenized
        # together with its context, and then the tokens of the context are removed. Those
        # are the same without the ending, since a space follows them.
        joined = [model.encode(f"{example['ctx']} {ending}") for ending in example["endings"]]
        endings = [tokens[len(context) :] for tokens in joined]
        longest = max(len(ending) for ending in endings)
        # How many context tokens fit. The model does not read the last token of an ending.
        room = model.max_length - len(model.start) - (longest - 1)
        if room < 1:
            problem = f"an ending has {longest} tokens, but the model's context {model.max_length}"
            remedy = "use a model with a longer context (train_gpt2.py --seq-len)"
            raise UserError(f"HellaSwag task {number}: {problem}; {remedy}")
        if len(context) > room:
            shortened += 1
            context = context[-room:]
        tasks.append(Task(model.start + context, endings, example["label"]))
    if shortened:
        print0(f"HellaSwag: {shortened} contexts cut to fit the model's {model.max_length} tokens")
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
) -> list[list[float]]:
    """Returns the summed losses of the four endings of each task, in nats.

    All ranks call this together. Each scores its share of the tasks, and gets the losses of all.
    Raises StopRequested if a rank has received a stop signal."""
    # Tasks of similar lengths are scored together, so that rows need little padding. The longest
    # come first, so that a lack of memory shows at once.
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].length)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    batches.reverse()
    rounds = range(0, len(batches), ranks.world_size)  # in each, every rank scores a batch
    losses_of_tasks = {}  # {index of a task: the losses of its four endings}
    for first in progress_bar(rounds, "batch") if show_progress else rounds:
        ranks.check_stop()
        if first + ranks.rank < len(batches):  # The last round may have no batch for this rank.
            batch = batches[first + ranks.rank]
            tasks_of_batch = [tasks[i] for i in batch]
            if model.gpt2 and ranks.device.type == "cpu":  # has been tried on a CPU only
                losses = score_shared_contexts(model.gpt2, tasks_of_batch)
            else:
                losses = score_batch(model, tasks_of_batch, ranks.device)
            losses_of_tasks |= dict(zip(batch, losses, strict=True))
    for of_a_rank in ranks.gather(losses_of_tasks):
        losses_of_tasks |= of_a_rank
    return [losses_of_tasks[i] for i in range(len(tasks))]


def score_batch(model: LanguageModel, tasks: list[Task], device: torch.device) -> list[list[float]]:
    """The summed losses of the four endings of a few tasks, computed in one pass of the model."""
    T = max(task.length for task in tasks) - 1  # The last token of an ending is not read.
    if device.type == "cuda":
        # cuDNN plans its attention kernels again for each new length, which takes time. So T is
        # rounded up to a multiple of 64.
        T = min(64 * math.ceil(T / 64), model.max_length)
    B = 4 * len(tasks)
    # A row has a context, one of its endings, and zeros at its end, so that all rows have the same
    # length. The zeros change nothing, since each token sees only earlier ones.
    x = torch.zeros(B, T, dtype=torch.int64)
    predicts_ending = torch.zeros(B, T, dtype=torch.bool)
    rows = [(task.context, ending) for task in tasks for ending in task.endings]
    for row, (context, ending) in enumerate(rows):
        tokens = context + ending[:-1]
        x[row, : len(tokens)] = torch.tensor(tokens)
        predicts_ending[row, len(context) - 1 : len(tokens)] = True
    logits = model.logits_at(x.to(device), predicts_ending)  # (n, V)
    return sum_losses(logits, tasks)


def score_shared_contexts(gpt: "GPT", tasks: list[Task]) -> list[list[float]]:
    """What score_batch() returns, for a GPT-2 on a CPU. It is 1.7 times as fast, since the context
    of a task is read once and not four times.

    A row has a context and its four endings one after the other. A token of an ending has the
    position that it would have right after the context, and does not see the other endings."""
    lengths = [
        len(task.context) + sum(len(ending) - 1 for ending in task.endings) for task in tasks
    ]
    B, T = len(tasks), max(lengths)
    x = torch.zeros(B, T, dtype=torch.int64)  # padded with zeros, as in score_batch()
    positions = torch.zeros(B, T, dtype=torch.int64)
    part = torch.zeros(B, T, dtype=torch.int64)  # 0 in the context, 1 to 4 in the endings
    at = []  # the place in (B, T) that predicts each token of the endings
    for row, task in enumerate(tasks):
        n = len(task.context)
        x[row, :n] = torch.tensor(task.context)
        positions[row, :n] = torch.arange(n)
        start = n
        for number, ending in enumerate(task.endings, start=1):
            end = start + len(ending) - 1  # The last token of an ending is not read.
            x[row, start:end] = torch.tensor(ending[:-1], dtype=torch.int64)
            positions[row, start:end] = torch.arange(n, n + end - start)
            part[row, start:end] = number
            at += [(row, n - 1), *((row, column) for column in range(start, end))]
            start = end
    # Each token sees the context, and what is before it in its own part.
    mask = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])  # (B, T, T)
    rows, columns = torch.tensor(at).T
    logits = gpt2(
        gpt.state_dict(),
        x,
        gpt.config.n_layer,
        gpt.config.n_head,
        at=(rows, columns),
        positions=positions,
        mask=mask.tril()[:, None],
    )
    return sum_losses(logits, tasks)


def sum_losses(logits: Tensor, tasks: list[Task]) -> list[list[float]]:
    """The summed losses of the four endings of each task, from logits (n, V) for their n tokens."""
    endings = [ending for task in tasks for ending in task.endings]
    targets = torch.tensor([token for ending in endings for token in ending])  # (n,)
    losses = F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none")  # (n,)
    # The losses of an ending follow each other. They are added up in float64, against rounding.
    parts = losses.cpu().double().split([len(ending) for ending in endings])
    sums = torch.stack([part.sum() for part in parts])  # (4 * tasks,)
    return sums.view(-1, 4).tolist()


def choices(task: Task, losses: list[float]) -> tuple[int, int]:
    """The endings that `acc` and `acc_norm` choose, by the summed losses of the four endings."""
    means = [loss / len(ending) for loss, ending in zip(losses, task.endings, strict=True)]
    return losses.index(min(losses)), means.index(min(means))


# --------------------------------------------------------------------------------------------------
# For train_gpt2.py


def load_tasks(path: str, gpt: "GPT", tokenizer: Tokenizer, ranks: Ranks) -> list[Task]:
    """The tasks in a .jsonl file, by default the official ones, tokenized for a GPT.

    If they cannot be downloaded, this prints a warning and returns [] on all ranks. The run then
    goes on without HellaSwag, as does one whose vocabulary is a list of words."""
    if isinstance(tokenizer, WordTokenizer):
        note("HellaSwag is left out, since the vocabulary may not have the words of its tasks")
        return []
    problem = ""
    if not path and ranks.local_rank == 0:  # The first process of each machine downloads.
        try:
            download()
        except UserError as error:
            problem = str(error)
    # gather() gives each rank the problems of all, so all of them wait for the downloads.
    problems = [problem for problem in ranks.gather(problem) if problem]
    if problems:
        warn(f"training without HellaSwag: {problems[0]}")
        return []
    examples = read_examples(path)  # finds the file that was downloaded
    return tokenize(examples, wrap_gpt(gpt, tokenizer))


def accuracy(
    gpt: "GPT",
    tokenizer: Tokenizer,
    tasks: list[Task],
    ranks: Ranks,
    autocast: torch.autocast,
) -> float:
    """The acc_norm of a GPT. All ranks call this together, and get the same number.

    `tasks` must not be empty. Raises StopRequested if a rank has received a stop signal."""
    with autocast:
        losses_of_tasks = score(wrap_gpt(gpt, tokenizer), tasks, ranks)
    right = 0
    for task, losses in zip(tasks, losses_of_tasks, strict=True):
        if any(map(math.isnan, losses)):
            return math.nan  # choices() would take the first ending, which says nothing
        _, chosen = choices(task, losses)
        right += chosen == task.label
    return right / len(tasks)


# --------------------------------------------------------------------------------------------------
# The command


@dataclass(frozen=True)
class HellaSwagConfig:
    """Evaluates a model of train_gpt2.py, or any causal language model, on HellaSwag."""

    # Each field is a flag, and its comment is the flag's help.

    # Hub name, folder of a model, or log folder of a run (its newest checkpoint)
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "gpt2"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"  # auto, cpu, cuda or mps
    data: str = ""  # local .jsonl of tasks; empty: the official validation set, downloaded once
    limit: int = 0  # number of tasks to evaluate, from the first; 0: all
    batch_size: int = 8  # tasks per forward pass, each of four rows, or of one long row on a CPU
    # precision of matrix products; losses are computed in float32, and added up in float64
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    json: str = ""  # file for the predictions and losses of every task
    code: str = str(ROOT / "train_gpt2.py")  # script that has trained the model


def main(args: list[str] | None = None) -> None:
    config = parse_args(HellaSwagConfig, args=args)
    if config.batch_size < 1:
        raise UserError(f"--batch-size {config.batch_size}: must be at least 1")
    if config.limit < 0:
        raise UserError(f"--limit {config.limit}: must be at least 0")
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()  # makes scoring faster
    precision, device_line = choose_precision(config.dtype, device)  # The line names both.
    autocast = use_precision(precision, device)
    folder = find_model(config.model)  # downloads it if it is a name on the Hub
    examples = read_examples(config.data)
    if config.limit:
        examples = examples[: config.limit]
    print(f"model: {folder}; device: {device_line}")

    # A model that this project has saved is run by its script, any other model by transformers.
    if is_ours(folder):
        gpt = load_gpt_class(config.code).from_pretrained(folder).to(device)
        model = wrap_gpt(gpt, tokenizer_of(folder))
    else:
        model = wrap_transformers(folder, device)
    tasks = tokenize(examples, model)
    if config.json:
        # If no file can be written there, this fails now and not after hours of scoring.
        with open(config.json, "a"):
            pass
    one_rank = Ranks(rank=0, world_size=1, device=device)
    with autocast:
        losses_of_tasks = score(model, tasks, one_rank, config.batch_size, show_progress=True)

    rows = []
    for i, task in enumerate(tasks):
        losses = losses_of_tasks[i]
        if any(map(math.isnan, losses)):
            raise RunError(f"{folder}: its logits are not numbers, so nothing is chosen")
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

"""The last lines of a run: samples to be read, what its loss is worth, where its picture is, how to go on."""

import math
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from support.cli import InputError, say, say_wrapped, shown
from support.ngrams import frequency_losses
from support.plan import duration
from support.runlog import Log
from support.tokenizer import VOCAB_SIZE

ROOT = Path(__file__).parent.parent
COUNTED = 10_000_000  # training tokens, at most, whose frequencies are taken: a run may have 10 billion


def to_read(sample: str) -> str:
    """A sample with its line breaks, indented; blank lines in a row are one, unprintable characters spaces."""
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in sample.splitlines()]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n"))
    return "\n".join(textwrap.fill(line, 80, initial_indent="  ", subsequent_indent="  ") for line in text.split("\n"))


def compare(config: Any, loader: Any, val_loader: Any, val: float) -> dict[str, float]:
    """Prints the model's validation loss beside those of simpler ones on the same tokens, best last, with formulas.
    -> the losses of the frequencies."""
    tokens = min(config.eval_tokens, val_loader.stream.total_tokens - 1) // config.seq_len * config.seq_len
    train = loader.stream.head(COUNTED)
    single, pair = frequency_losses(train, val_loader.stream.read(0, tokens + 1))
    rows = [
        (math.log(VOCAB_SIZE), "knowing nothing", f"ln V, V = {VOCAB_SIZE:,}"),
        (single, "token frequencies", "p(w) = (n(w) + T / V) / (N + T)"),
        (pair, "pair frequencies", "p(w|v) = (n(vw) + T(v) p(w)) / (n(v) + T(v))"),
        (val, "this model", ""),
    ]
    say(f"\nvalidation loss, nats a token, on {tokens:,} tokens:")
    for loss, name, formula in sorted(rows, reverse=True):
        say(f"{loss:9.4f}  {name:17}  {formula}".rstrip())
    of = f"the first N = {COUNTED:,} training tokens" if len(train) == COUNTED else "the N training tokens"
    say_wrapped(f"(n: counts in {of}, T of them different, T(v) after v)")
    return {"token frequencies": single, "pair frequencies": pair}


def conclude(config: Any, progress: Any, loader: Any, val_loader: Any, val: float, log: Log) -> None:
    """Says what a run, of a TrainConfig and now with a Progress, has made. Rank 0 calls it, with everything saved.

    loader, val_loader (None: no validation): DataLoaderLites of both splits. val: the last validation loss, in nats.
    """
    if val_loader:
        try:
            log.draw(compare(config, loader, val_loader, val))
        except InputError as error:  # a damaged shard that training did not come to: the run is none the worse
            say(f"warning: {error}")
            log.draw()
    say(f"\ndone: {progress.step:,} steps, {duration(progress.elapsed)} of training")
    if picture := log.picture():
        say(f"curves:        {picture}")
    if config.save_every:
        say(f"model:         {config.log_dir}/step_{progress.step:06d}/, which Hugging Face loads\n"
            f"to talk to it: python {quote(shown(ROOT / 'sample.py'))} {quote(config.log_dir)} "
            f'{quote(config.sample_prompt)}')
        if progress.step:
            say(f"to train on:   {longer(sys.argv[1:], 2 * progress.step)}")


def longer(args: list[str], steps: int) -> str:
    """The command that goes on with a run that `args` began, until it has had `steps` steps."""
    if "RANK" in os.environ:
        return f"the same torchrun command with --resume --max-steps {steps}"
    begun = "".join("\0" + arg for arg in args)
    begun = re.sub(r"\0--(?:(max[-_]steps|check[-_]against)[=\0][^\0]*|(no-)?resume(?![^\0]))", "", begun)
    words = [shown(ROOT / "train_gpt2.py"), *begun.split("\0")[1:], "--resume", "--max-steps", str(steps)]
    return " ".join(["python", *map(quote, words)])


def quote(word: str) -> str:
    """A word as it is typed in a shell."""
    if re.fullmatch(r"[\w@%+=,./-]+", word):
        return word
    return shlex.quote(word) if re.search(r'["$`\\!\n]', word) else f'"{word}"'

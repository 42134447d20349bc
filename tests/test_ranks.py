"""Each rank that fails prints its error, with its number."""

import os
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import train_gpt2
from support.errors_and_signals import UserError
from support.ranks import torchrun_ranks
from tests.conftest import start_ranks, train_on_ranks

pytestmark = pytest.mark.torch


def on_rank_1(disturb):
    if os.environ["RANK"] == "1":
        disturb()


def other_folder():
    os.chdir("/")


ERRORS = {  # what rank 1 does, and what the line names
    "all ranks": (None, "^error: (rank 1: )?here"),
    "folder": (other_folder, "^error: rank 1: here"),
    # In the part of step 1 that rank 1 reads.
    "shard": (None, r"^error: rank 1: \S*here/x_train_000000\.npy: .*60000"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_line_with_its_rank(name, tmp_path, monkeypatch):
    """The other ranks are lost without a traceback."""
    monkeypatch.chdir(tmp_path)
    disturb, named = ERRORS[name]
    failed, other = (0, 1) if name == "all ranks" else (1, 0)
    tokens = np.arange(12_000, dtype=np.uint16)
    if name == "shard":
        tokens[2048 + 128 + 98] = 60_000  # neither on the first page nor on the last
    if name != "all ranks":
        (tmp_path / "here").mkdir()
        np.save("here/x_train_000000.npy", tokens)
    args = "--data here/ --no-shuffle --max-steps 99 --log-dir log"
    disturb = disturb and partial(on_rank_1, disturb)
    codes, texts = start_ranks(2, tmp_path, args, disturb=disturb)
    assert codes[failed] == 2 and codes[other] != 0, texts
    errors = re.findall("^error: .*$", texts[failed], re.MULTILINE)
    assert len(errors) == 1 and re.search(named, errors[0]), texts
    assert "Traceback" not in "".join(texts)


def count_exchanges():
    """Prints a line for each bucket of gradients that is exchanged."""
    wrap = train_gpt2.DistributedDataParallel

    def hook(group, bucket):
        print("an exchange", flush=True)
        return default_hooks.allreduce_hook(group, bucket)

    def wrapped(*args, **options):
        ddp_model = wrap(*args, **options)
        ddp_model.register_comm_hook(dist.group.WORLD, hook)
        return ddp_model

    train_gpt2.DistributedDataParallel = wrapped


def test_gradients_are_exchanged_once_a_step(text, tmp_path):
    """However many micro-batches it has."""
    found = []
    for micro_batch in (4, 1):
        args = [f"--max-steps 2 --total-batch-size 128 --micro-batch-size {micro_batch}"]
        args += ["--data", text, "--log-dir", tmp_path / f"log_{micro_batch}"]
        texts = train_on_ranks(2, tmp_path, *args, disturb=count_exchanges)
        found.append([text.count("an exchange\n") for text in texts])
    assert found[0] == found[1] and 0 < found[0][0] <= 2 * 4


class CountingGPT(train_gpt2.GPT):
    """It has a buffer that counts the tokens with which it is trained."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("tokens", torch.tensor(0))

    def forward(self, idx, targets=None, at=None):
        if self.training:
            self.tokens += idx.numel()
        return super().forward(idx, targets, at)


def count_tokens():
    train_gpt2.GPT = CountingGPT


def test_buffers_count_training_alone(text, tmp_path):
    """On one rank and on two, which first settle their exchange, and after a resume."""
    args = ["--max-steps 2 --save-every 1 --total-batch-size 128 --data", text, "--log-dir"]
    for ranks in (1, 2):
        log = tmp_path / f"log_{ranks}"
        train_on_ranks(ranks, tmp_path, *args, log, disturb=count_tokens)
        shutil.rmtree(log / "step_000002")
        train_on_ranks(ranks, tmp_path, *args, log, "--resume", disturb=count_tokens)
        model = CountingGPT.from_pretrained(log / "step_000002")
        assert model.tokens == 2 * 128 / ranks


def test_a_variable_that_a_launcher_has_not_set_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="LOCAL_RANK"):
        torchrun_ranks()

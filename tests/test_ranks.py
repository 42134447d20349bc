"""Errors of all ranks are printed once, those of one with its rank."""

import os
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train_gpt2
from support import ranks
from tests.conftest import start_ranks, train_on_ranks


def on_rank_1(disturb):
    if os.environ["RANK"] == "1":
        disturb()


def other_folder():
    os.chdir("/")


def other_device():
    ranks.choose_device = lambda *args: torch.device("mps")


def show_patience():
    train = train_gpt2.train

    def show(*args):
        print("patience", dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout)
        return train(*args)

    train_gpt2.train = show


def test_ranks_wait_for_each_other_longer_than_a_download_takes(text, tmp_path):
    """Torch's own limits are 10 and 30 minutes."""
    args = ["--max-steps 1 --data", text, "--log-dir", tmp_path / "log"]
    (output,) = train_on_ranks(1, tmp_path, *args, disturb=show_patience)
    assert "patience 1:00:00\n" in output


ERRORS = {  # what rank 1 does, and the line
    "all ranks": (None, "here: neither a .txt file "),
    "folder": (other_folder, "rank 1: here: neither a .txt file "),
    "device": (other_device, "rank 1: mps here, cpu on rank 0: set --device"),
    "shard": (None, "rank 1: here/x_train_000000.npy: token 60000"),  # in its part of step 1
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_line_with_its_rank_if_it_is_of_one(name, tmp_path, monkeypatch):
    """The other ranks are lost without a traceback."""
    monkeypatch.chdir(tmp_path)
    disturb, message = ERRORS[name]
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
    errors = re.findall("^.*(?:error: |Traceback).*$", "".join(texts), re.MULTILINE | re.IGNORECASE)
    assert len(errors) == 1 and errors[0].startswith(f"error: {message}"), texts

"""Ranks share a step equally; errors of all ranks are printed once, those of one with its rank."""

import re

import numpy as np
import pytest
import torch

from support.cli import UserError
from tests.conftest import start_ranks
from train_gpt2 import GPT, GPTConfig, Ranks, choose_micro_batch_size, read_config


def on_ranks(world_size: int) -> Ranks:
    return Ranks(0, world_size, torch.device("cpu"), torch.float32, "")


def test_ranks_share_a_step_equally():
    """The bare run on 1, 2, 4 and 8 ranks; otherwise the error names the nearest batch size."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=1))
    config = read_config(["--preset", "shakespeare"])
    chosen = [choose_micro_batch_size(config, model, on_ranks(n)) for n in (1, 2, 4, 8)]
    assert chosen == [8, 4, 2, 1]
    for world_size, nearest in ((3, 576), (5, 640), (16, 1024)):
        message = f"--total-batch-size 512 .* nearest that is: {nearest}$"
        with pytest.raises(UserError, match=message):
            choose_micro_batch_size(config, model, on_ranks(world_size))


ON_RANK_1 = "import os\nif os.environ['RANK'] == '1':\n    "
ERRORS = {  # what rank 1 does, and the line
    "all ranks": ("pass", "here: no .txt file, "),
    "folder": ("os.chdir('/')", "rank 1: here: no .txt file, "),
    "precision": (
        "from support import devices as d\n    choose = d.choose_device\n    "
        "d.choose_device = lambda device, dtype, *ranks: choose(device, 'bfloat16', *ranks)",
        "rank 1: cpu in bfloat16 here, cpu in float32 on rank 0: set --device and --dtype",
    ),
    "shard": ("pass", "rank 1: here/x_train_000000.npy: token 60000"),  # in its part of step 1
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_line_with_its_rank_if_it_is_of_one(name, tmp_path, monkeypatch):
    """The other ranks are lost without a traceback."""
    monkeypatch.chdir(tmp_path)
    code, message = ERRORS[name]
    failed, other = (0, 1) if name == "all ranks" else (1, 0)
    tokens = np.arange(12_000, dtype=np.uint16)
    if name == "shard":
        tokens[2048 + 128 + 98] = 60_000  # neither on the first page nor on the last
    if name != "all ranks":
        (tmp_path / "here").mkdir()
        np.save("here/x_train_000000.npy", tokens)
    args = "--data here/ --no-shuffle --max-steps 99 --log-dir log"
    codes, texts = start_ranks(2, tmp_path, args, code=ON_RANK_1 + code)
    assert codes[failed] == 2 and codes[other] != 0, texts
    errors = re.findall("^.*(?:error: |Traceback).*$", "".join(texts), re.MULTILINE | re.IGNORECASE)
    assert len(errors) == 1 and errors[0].startswith(f"error: {message}"), texts

"""Ranks share a step equally; errors of all ranks are printed once, those of one with its rank."""

import re

import numpy as np
import pytest
import torch

from support.cli import UserError
from tests.conftest import ROOT, start_ranks, train_on_ranks
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


def test_an_error_of_all_ranks_is_one_line(tmp_path):
    args = ["--data", tmp_path / "nowhere", "--log-dir", tmp_path / "log"]
    codes, texts = start_ranks(2, tmp_path, *args)
    assert codes[0] == 2 and codes[1] != 0 and not (tmp_path / "log").exists()
    errors = re.findall("^.*(?:error|Traceback).*$", "".join(texts), re.MULTILINE | re.IGNORECASE)
    assert len(errors) == 1, texts
    assert errors[0].startswith(f"error: {tmp_path}/nowhere: no .txt file, ")


ON_RANK_1 = "import os\nif os.environ['RANK'] == '1':\n    "
ALONE = {  # what rank 1 does, and its error
    "folder": ("os.chdir('/')", "here: no .txt file, "),
    "precision": (
        "from support import devices as d\n    choose = d.choose_device\n    "
        "d.choose_device = lambda device, dtype, *ranks: choose(device, 'bfloat16', *ranks)",
        "cpu in bfloat16 here, cpu in float32 on rank 0: set --device and --dtype",
    ),
    "shard": ("pass", "here/x_train_000000.npy: token 60000"),  # in rank 1's part of step 1
}


@pytest.mark.parametrize("name", ALONE)
def test_an_error_of_one_rank_is_one_line_with_its_rank(name, tmp_path, monkeypatch):
    """The other ranks are lost without a traceback."""
    monkeypatch.chdir(tmp_path)
    code, message = ALONE[name]
    tokens = np.arange(12_000, dtype=np.uint16)
    if name == "shard":
        tokens[2048 + 128 + 98] = 60_000  # neither on the first page nor on the last
    (tmp_path / "here").mkdir()
    np.save("here/x_train_000000.npy", tokens)
    args = ["--data here/ --no-shuffle --max-steps 99 --log-dir", tmp_path / "log"]
    codes, texts = start_ranks(2, tmp_path, *args, code=ON_RANK_1 + code)
    assert codes[1] == 2 and codes[0] != 0, texts
    errors = [line for text in texts for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: rank 1: {message}"), texts
    assert not any("Traceback" in text for text in texts), texts


def test_restarts_are_counted_by_each_node(tmp_path):
    """torchrun counts a node's own: all ranks still exchange the same."""
    count = "import os\nos.environ['TORCHELASTIC_RESTART_COUNT'] = os.environ['RANK']"
    args = ["--data", ROOT / "input.txt", "--max-steps 1 --log-dir", tmp_path / "log"]
    train_on_ranks(2, tmp_path, *args, code=count)

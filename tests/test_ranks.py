"""Each rank that fails prints its error, with its number."""

import os
import re
from functools import partial

import numpy as np
import pytest

from tests.conftest import start_ranks

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

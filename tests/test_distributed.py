"""Ranks: the same losses on 1 to 8 of them, and mistakes that one rank meets and others don't."""

import json
import os

import numpy as np
import pytest
import torch

import train_gpt2
from support import devices, distributed
from support.cli import InputError, RunError
from support.distributed import Distributed, SharedError, shared_errors
from support.memory import choose_micro_batch_size
from tests.conftest import ROOT, TINY, losses, start_ranks
from train_gpt2 import GPT, DataLoaderLite, GPTConfig, read_config


def train(*args: object) -> int:
    return train_gpt2.main([*TINY, *map(str, args)])


def dist(rank: int = 0, world_size: int = 1) -> Distributed:
    return Distributed(rank, rank, world_size, torch.device("cpu"), torch.float32, "")


def test_the_bare_batch_divides_among_any_number_of_ranks(monkeypatch):
    """4 sequences of 128 tokens: B, and how many rounds the busiest rank has."""
    config = read_config(["--preset", "shakespeare"])
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=1))
    monkeypatch.setattr(Distributed, "gather", lambda self, value: [value])
    chosen = [choose_micro_batch_size(config, model, dist(world_size=n)) for n in range(1, 9)]
    assert chosen == [4, 2, 2, 1, 1, 1, 1, 1]
    gpt2 = read_config(["--preset", "gpt2", "--device", "cpu"])
    assert [choose_micro_batch_size(gpt2, model, dist(world_size=n)) for n in (1, 8)] == [4, 4]


@pytest.mark.parametrize("world_size", [3, 5, 8])
def test_ranks_that_do_not_divide_a_step_see_it_once(text, world_size):
    """6 micro-batches a step, dealt out: together they are the stream, in order, and no step reaches into the next."""
    B, T, batch = 1, 8, 48
    loaders = [DataLoaderLite(text, "train", B, T, rank, world_size, tokens_per_step=batch)
               for rank in range(world_size)]
    for step in range(4):
        taken = []
        for micro_step in range(-(-6 // world_size)):
            batches = [loader.next_batch()[0] for loader in loaders]
            taken += [x for rank, x in enumerate(batches) if micro_step * world_size + rank < 6]
        assert torch.cat(taken).flatten().tolist() == loaders[0].stream.read(step * batch, batch).tolist()
        assert all(loader.position == (step + 1) * batch for loader in loaders)
    resumed = DataLoaderLite(text, "train", B, T, 1, world_size, tokens_per_step=batch)
    resumed.load_state_dict(loaders[1].state_dict())
    assert torch.equal(resumed.next_batch()[0], loaders[1].next_batch()[0])


def test_a_mistake_of_one_rank_is_named_with_it_and_one_of_all_is_not():
    def problems(*messages):
        for rank, message in enumerate(messages):
            with pytest.raises(SharedError) as error, shared_errors(lambda value: list(messages)):
                if message:
                    raise InputError(message)
            assert error.value.rank is None, rank
        return str(error.value)

    assert problems("no such data", "no such data") == "no such data"
    assert problems(None, None, "no such data") == "rank 2: no such data"
    assert problems(None, "gone", "gone") == "rank 1, 2: gone"
    assert problems("one thing", "another") == "one thing"
    with pytest.raises(SharedError, match="nowhere: No such file"), shared_errors(lambda value: [value, None]):
        os.stat("/nowhere")
    with pytest.raises(ZeroDivisionError), shared_errors(lambda value: [value]):  # a bug is no user's mistake
        raise ZeroDivisionError


def test_a_rank_says_what_it_alone_met():
    with pytest.raises(InputError) as error, dist(3, 4).own_errors():
        raise InputError("x_train_000001.npy: token 60000")
    assert error.value.rank == 3
    with pytest.raises(SharedError) as error, dist(3, 4).own_errors():
        raise SharedError("all know")
    assert error.value.rank is None
    with pytest.raises(RunError, match="another rank is gone"), dist(0, 4).own_errors():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26247")
    with pytest.raises(RuntimeError, match="a bug"), dist(0, 4).own_errors():
        raise RuntimeError("a bug")


def test_a_damaged_shard_that_one_rank_reads(tmp_path):
    """Rank 1 alone meets the token: its line, with its rank, status 2; the other notices, without a traceback."""
    tokens = np.arange(12_000, dtype=np.uint16)
    tokens[2048 + 128 + 98] = 60_000  # neither on the first page nor on the last; in rank 1's half of a step
    (tmp_path / "s").mkdir()
    np.save(tmp_path / "s/x_train_000000.npy", tokens)
    args = ["--data", tmp_path / "s", "--no-shuffle", "--max-steps", 99, "--log-dir", tmp_path / "log"]
    codes, texts = start_ranks(2, tmp_path, *args)
    assert codes[1] == 2 and codes[0] == 1, texts
    errors = [[line for line in text.splitlines() if line.startswith("error: ")] for text in texts]
    assert len(errors[1]) == 1 and errors[1][0].startswith(f"error: rank 1: {tmp_path}/s/x_train_000000.npy: token 6")
    assert len(errors[0]) == 1 and "another rank is gone" in errors[0][0]
    assert not any("Traceback" in text for text in texts)


def test_a_folder_that_one_rank_lacks(text, tmp_path):
    """As on a node whose disk is not mounted: all end with 2, and one line says which rank it was."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "text.txt").replace(tmp_path / "here.txt")
    codes, texts = start_ranks(2, tmp_path, "--data", "here.txt", "--max-steps", 1, "--log-dir", tmp_path / "log",
                               folders=[tmp_path, elsewhere])
    assert codes == [2, 2] and not (tmp_path / "log").exists()
    errors = [line for text in texts for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: rank 1: here.txt: no such data; ")


def test_more_processes_than_gpus(monkeypatch, tmp_path):
    """It can only be seen by the last rank; all learn of it, and rank 0 says it once."""
    codes, texts = start_ranks(2, tmp_path, "--device", "cuda", "--log-dir", tmp_path / "log", gpus=1)
    errors = [line for text in texts for line in text.splitlines() if line.startswith("error: ")]
    assert codes == [2, 2], texts
    assert errors == ["error: rank 1: 2 processes on this machine, but 1 GPUs: lower --nproc_per_node"]


def test_ranks_must_compute_alike(tmp_path):
    """One finds a CPU with bfloat16, the other one without."""
    codes, texts = start_ranks(2, tmp_path, "--dtype", "auto", "--log-dir", tmp_path / "log", bfloat16_on=[1])
    errors = [line for text in texts for line in text.splitlines() if line.startswith("error: ")]
    assert codes == [2, 2] and errors == [
        "error: rank 0 would compute on cpu in float32, rank 1 on cpu in bfloat16: name --device and --dtype for all"]


def test_a_long_wait_is_gloos_not_nccls():
    """What ranks wait for while one of them reads or hashes goes through a group of its own, with hours of patience."""
    assert distributed.PATIENCE.total_seconds() >= 3600


@pytest.mark.parametrize("before, after", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"),
                                           ("float16", "bfloat16")])
def test_a_run_goes_on_in_another_precision(text, tmp_path, monkeypatch, capsys, before, after):
    """As when the next session's GPU is another one: float16 has a scaler, the others have none."""
    monkeypatch.setattr(devices, "matmul_flops", lambda device, dtype, n: 1e12)
    args = ["--data", text, "--save-every", 1, "--log-dir", tmp_path, "--resume", "--total-batch-size", 32]
    train(*args, "--max-steps", 1, "--dtype", before)
    capsys.readouterr()
    assert train(*args, "--max-steps", 2, "--dtype", after) == 0
    assert f"precision: torch.{before} until now, torch.{after} from here on" in capsys.readouterr().out
    entries = json.loads((tmp_path / "run.json").read_text())
    assert [entry["config"]["dtype"] for entry in entries] == [before, after] and len(losses(tmp_path)) == 2


def test_slurms_ranks_are_started_without_torchrun():
    """torchrun kills its workers 30 s after it passes a signal on; in torch 2.11 nothing changes that."""
    script = (ROOT / "examples" / "slurm.sh").read_text().split("set -euo pipefail")[1]
    assert "torchrun" not in script and "exec python train_gpt2.py" in script
    assert all(f"{name}=" in script for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))

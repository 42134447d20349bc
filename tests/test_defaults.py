"""The numbers behind a bare command: published results and other people's scripts rely on them."""

import inspect
import json
import os
from dataclasses import MISSING, asdict, fields

import pytest
import torch

from fineweb import ShardConfig
from hellaswag import HellaSwagConfig
from sample import SampleConfig
from support.errors import UserError
from tests.conftest import ROOT
from train_gpt2 import (
    GPT,
    MAY_CHANGE,
    PRESETS,
    DataLoaderLite,
    GPTConfig,
    TrainConfig,
    read_config,
)

GPT2 = {  # what reference/gpt2/run.json doesn't have
    **dict(seed=1337, shuffle=True, micro_batch_size=0, device="auto", dtype="auto"),
    **dict(low_memory=False, shard_optimizer=False, deterministic=False, skip_bad_steps=0),
    **dict(eval_every=250, eval_tokens=20 * 524_288, hellaswag_every=250, hellaswag_data=""),
    **dict(sample_every=250, sample_prompt="Hello, I'm a language model,"),
    **dict(save_every=1000, keep_checkpoints=3, keep_every=0, tensorboard=False, wandb=False),
    **dict(preset="gpt2", log_dir="log", resume=False, plan=False, warmdown_steps=5000),
}
FAST = dict(optimizer="muon", schedule="wsd", max_steps=9536, warmup_steps=476, warmdown_steps=4768)
SMALL = dict(n_layer=6, n_head=6, n_embd=384, seq_len=512, total_batch_size=128 * 512)
OTHERS = {  # presets, where they differ from gpt2
    "gpt2-fast": FAST | dict(max_lr=6e-3, min_lr=0.0),
    "gpt3": dict(seq_len=2048),
    "small": SMALL
    | dict(max_steps=3000, max_lr=1e-3, min_lr=1e-4, warmup_steps=150, hellaswag_every=0)
    | dict(eval_tokens=1_048_576, save_every=250),
}
SCRIPTS = {
    ShardConfig: dict(
        **dict(name="sample-10BT", input=(), dataset="", config="", split="", text_column="text"),
        **dict(out="edu_fineweb10B", shard_size=0, workers=0, max_shards=0),
        **dict(pretokenized=0, verify=False),
    ),
    HellaSwagConfig: dict(
        **dict(model="gpt2", device="auto", data="", limit=0, batch_size=16, dtype="auto", json="")
    ),
    SampleConfig: dict(
        **dict(model=MISSING, prompt="", max_new_tokens=100, temperature=1.0, top_k=50, seed=42),
        **dict(num_samples=1, device="auto"),
    ),
}


def recorded(preset):
    """The settings of the run that is the preset's reference."""
    return json.loads((ROOT / "reference" / preset / "run.json").read_text())[-1]["config"]


def test_the_gpt2_preset_is_that_of_its_reference():
    config = asdict(read_config(["--preset", "gpt2"]))
    assert config.pop("compile") == torch.cuda.is_available()
    assert config == recorded("gpt2") | GPT2


def test_the_shakespeare_preset_is_that_of_its_reference():
    config = asdict(read_config(["--preset", "shakespeare"]))
    config["data"] = os.path.relpath(config["data"], ROOT)
    assert config == recorded("shakespeare") | {"preset": "shakespeare"}


@pytest.mark.parametrize("preset", OTHERS)
def test_other_presets(preset):
    gpt2 = asdict(read_config(["--preset", "gpt2"]))
    assert asdict(read_config(["--preset", preset])) == gpt2 | {"preset": preset} | OTHERS[preset]
    assert OTHERS.keys() | {"gpt2", "shakespeare"} == PRESETS.keys()


@pytest.mark.parametrize("config_class", SCRIPTS)
def test_the_other_scripts(config_class):
    assert {field.name: field.default for field in fields(config_class)} == SCRIPTS[config_class]


def test_a_resumed_run_keeps_what_decides_on_its_numbers():
    fixed = {field.name for field in fields(TrainConfig)} - MAY_CHANGE
    shape = {"init", "n_layer", "n_head", "n_embd", "seq_len", "total_batch_size"}
    update = {"optimizer", "schedule", "warmup_steps", "max_lr", "min_lr", "weight_decay"}
    assert fixed == shape | update | {"grad_clip", "beta2", "seed", "shuffle"}


def defaults_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_the_python_interface():
    assert GPTConfig() == GPTConfig(1024, 50257, 12, 12, 768)
    expected = dict(temperature=1.0, top_k=50, generator=None)
    assert defaults_of(GPT.generate) == expected
    expected = dict(rank=0, world_size=1, seed=1337, shuffle=True, pin_memory=False)
    assert defaults_of(DataLoaderLite) == expected


POSITIVE = ("total_batch_size", "seq_len", "n_layer", "n_head", "n_embd", "eval_tokens")
NUMBERS = [f.name for f in fields(TrainConfig) if type(f.default) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_least_value_of_each_number(name):
    flag = "--" + name.replace("_", "-")
    least = 1 if name in POSITIVE else 0
    fine = ["--seq-len=1", "--n-embd=1", "--n-head=1", "--min-lr=0", f"{flag}={least}"]
    assert getattr(read_config(fine), name) == least
    with pytest.raises(UserError, match=rf"{flag} {least - 1}(\.0)?: must be at least {least}"):
        read_config([*fine, f"{flag}={least - 1}"])

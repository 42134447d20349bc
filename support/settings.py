"""Reading and checking a run's settings: flags, the resumed run, --init and presets."""

import argparse
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support import huggingface
from support.command_line import (
    absolute,
    flag,
    parse_args,
    print0,
    print_changes,
    range_problems,
    restore_fields,
)
from support.errors_and_signals import UserError
from support.run_files import PATHS
from support.run_folder import read_run
from support.shards import data_folder, holds_shards

if TYPE_CHECKING:
    from train_gpt2 import GPTConfig, TrainConfig

SHAPE = ("n_layer", "n_head", "n_embd")


def read_config(
    args: list[str] | None,
    config_class: "type[TrainConfig]",
    presets: dict[str, dict[str, Any]],
    must_not_change: tuple[str, ...],
    gpt_config_class: "type[GPTConfig]",
    tokens_per_epoch: "Callable[[TrainConfig], int]",
) -> "TrainConfig":
    """Read the settings of a run from the command line, `args` or sys.argv[1:].

    TrainConfig documents the precedence of their sources. With --init, the fields of
    `gpt_config_class` come from the loaded model's config.json. Prints the preset, and each setting
    that differs from that model. Raises one UserError that lists every invalid value and every
    change that --resume rejects."""
    words = list(sys.argv[1:] if args is None else args)
    # Parse twice: first the flags that determine the defaults, then everything with these defaults.
    default = config_class()
    first = first_flags(words, default, presets)
    run = read_run(first.log_dir) if first.resume else {}
    init_fields: dict[str, Any] = {}  # settings taken from the --init model
    preset = run.get("preset", first.preset)
    if preset == "auto":
        large = holds_shards(Path(first.data)) and has_gpu(first.device)
        preset = "gpt2" if large else "shakespeare"
    values = {"preset": preset, **presets.get(preset, {})}
    if run:
        values |= restore_fields(config_class, run)
        values |= {name: getattr(default, name) for name in ("log_dir", "resume", "plan")}
    elif first.init != "scratch" and not {"-h", "--help"} & {*words}:
        folder = huggingface.find_model(first.init)
        init_fields = huggingface.read_fields(folder, gpt_config_class)
        init_fields = {
            name: init_fields[name] for name in vars(default).keys() & init_fields.keys()
        }
        values |= init_fields
    defaults = config_class(**values)
    config = parse_args(config_class, words, default=defaults)
    if config.preset == "auto":  # an explicit --preset auto
        config.preset = defaults.preset
    # Make existing paths absolute, so that --resume works from any folder. `defaults` too, because
    # the two are compared below.
    for settings in (defaults, config):
        settings.data = data_folder(settings.data)
        for name in PATHS:
            if getattr(settings, name) != "scratch":
                setattr(settings, name, absolute(getattr(settings, name)))

    problems = find_problems(config)
    if first.epochs is not None and first.max_steps is not None:
        problems.append("--epochs and --max-steps: give only one of them")
    for name in must_not_change if run else ():
        was, now = getattr(defaults, name), getattr(config, name)
        # The weights come from a checkpoint, so the --init folder may have moved.
        if was != now and not (name == "init" and Path(was).name == Path(now).name):
            problems.append(
                f"--resume: {flag(name)} was {was} in {first.log_dir}, but is now {now}"
            )
    # Flags may override any field of the --init model except its shape.
    problems += [
        f"{flag(name)} {getattr(config, name)}: {config.init} has {init_fields[name]}"
        for name in SHAPE
        if name in init_fields and getattr(config, name) != init_fields[name]
    ]
    if problems:
        raise UserError("; ".join(problems))
    # --epochs and --max-steps replace each other's default. --resume without them keeps max_steps.
    if first.max_steps is not None:
        config.epochs = 0.0
    elif config.epochs and (first.epochs is not None or not run):
        steps = config.epochs * tokens_per_epoch(config) / config.total_batch_size
        if steps < 1:
            raise UserError(f"--epochs {config.epochs}: {steps:.2g} of a step; use a larger number")
        config.max_steps = int(steps)
    print0(preset_line(config))
    print_changes(init_fields, asdict(config))
    return config


def first_flags(
    words: list[str], default: "TrainConfig", presets: Collection[str]
) -> argparse.Namespace:
    """Parse the flags that determine the defaults of the other settings.

    If one is invalid, return the defaults, and leave the error message to tyro."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", choices=("auto", *presets), default=default.preset)
    for name in ("data", "init", "log_dir", "device"):
        parser.add_argument(flag(name), f"--{name}", default=getattr(default, name), dest=name)
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=default.resume)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--max-steps", "--max_steps", type=int)
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError:
        return parser.parse_args([])


def find_problems(config: "TrainConfig") -> list[str]:
    """Return an error message for each setting with an invalid value."""
    above_0 = {"total_batch_size", "seq_len", "eval_tokens", "max_lr", *SHAPE}
    problems = range_problems(config, above_0)
    if not config.log_dir or config.log_dir.encode(errors="ignore").decode() != config.log_dir:
        problems.append(f"--log-dir {config.log_dir!a}: empty, or not UTF-8; choose another name")
    if config.n_head > 0 and config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd}: not divisible by --n-head {config.n_head}")
    if config.seed >= 2**32:
        problems.append(f"--seed {config.seed}: must be below 2**32")  # NumPy's RandomState
    if config.warmdown > 1:
        problems.append(f"--warmdown {config.warmdown}: must be at most 1, a fraction of the run")
    if config.beta2 >= 1:
        problems.append(f"--beta2 {config.beta2}: must be below 1")
    if config.eval_every and config.eval_tokens < config.seq_len:
        problems.append(f"--eval-tokens {config.eval_tokens}: less than --seq-len {config.seq_len}")
    tasks = config.hellaswag_data
    if config.hellaswag_every and tasks and not Path(tasks).is_file():
        problems.append(f"--hellaswag-data {tasks}: no such file")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr}: above --max-lr {config.max_lr}")
    return problems


def has_gpu(device: str) -> bool:
    """Return whether a run with this --device would use a GPU."""
    found = torch.cuda.is_available() or torch.backends.mps.is_available()
    return device in ("cuda", "mps") or (device == "auto" and found)


def preset_line(config: "TrainConfig") -> str:
    """Return a run's first line: its preset, and how to train GPT-2 instead."""
    hint = ""
    if config.preset == "shakespeare":
        folder = type(config)().data
        hint = f"; for GPT-2, build the data in {folder}/ with `python fineweb.py`"
        if holds_shards(Path(folder)):
            hint = f"; --preset gpt2 trains GPT-2 on {folder}/"
    return f"preset: {config.preset}{hint}"

"""Logging to TensorBoard and Weights & Biases: `train_gpt2.py --tensorboard --wandb`."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from support.errors_and_signals import UserError, first_line

Tracker = Callable[[int, dict[str, float]], None]  # called with (step, {stream: value})


def start_trackers(log_dir: Path, entries: list[dict[str, Any]], step: int) -> dict[str, Tracker]:
    """Start the trackers enabled in the last entry of run.json, and return them by name.

    `step` is the first step that this process logs. Raises UserError if one is not installed."""
    known = {
        "wandb": ("wandb", start_wandb),
        "tensorboard": ("torch.utils.tensorboard", start_tensorboard),
    }
    enabled = [name for name in known if entries[-1]["config"][name]]
    modules = {}
    for name in enabled:  # before any is started
        try:
            modules[name] = import_module(known[name][0])
        except ImportError:
            raise UserError(f"--{name}: not installed; `pip install {name}`") from None
    return {name: known[name][1](modules[name], log_dir, entries, step) for name in enabled}


def start_tensorboard(
    tensorboard: Any, log_dir: Path, entries: list[dict[str, Any]], step: int
) -> Tracker:
    """Start a tracker that writes to log_dir/tensorboard/."""
    # purge_step drops values that a resumed run logs again.
    writer = tensorboard.SummaryWriter(log_dir / "tensorboard", purge_step=step)

    def track(step: int, values: dict[str, float]) -> None:
        for stream, value in values.items():
            writer.add_scalar(stream, value, step)

    return track


def start_wandb(wandb: Any, log_dir: Path, entries: list[dict[str, Any]], step: int) -> Tracker:
    """Resume the W&B run of an earlier entry, or start one. Store its id in the last entry."""
    ids = [entry["wandb_id"] for entry in entries if "wandb_id" in entry]
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gpt2-repro"),
            id=ids[-1] if ids else None,
            name=log_dir.resolve().name,
            resume="allow",
            dir=log_dir,
            config=entries[-1]["config"],
        )
    except Exception as error:  # e.g. no account or no network
        problem = first_line(error)
        remedy = "WANDB_MODE=offline needs neither an account nor a network"
        raise UserError(f"--wandb: {problem}; {remedy}") from None
    entries[-1]["wandb_id"] = run.id
    return lambda step, values: run.log(values, step=step)

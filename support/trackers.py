"""Logging to TensorBoard and Weights & Biases: `train_gpt2.py --tensorboard --wandb`."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.errors_and_signals import UserError, first_line

if TYPE_CHECKING:
    from train_gpt2 import TrainConfig

Tracker = Callable[[int, dict[str, float]], None]  # called with (step, {stream: value})


def check_trackers(config: "TrainConfig") -> None:
    """Raise UserError if an enabled tracker is not installed."""
    for name, module in {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}.items():
        try:
            if getattr(config, name):
                import_module(module)
        except ImportError:
            raise UserError(f"--{name}: not installed; `pip install {name}`") from None


def start_trackers(log_dir: Path, entries: list[dict[str, Any]], step: int) -> dict[str, Tracker]:
    """Start the trackers enabled in the last entry of run.json, and return them by name.

    `step` is the first step that this process logs."""
    starting = {"wandb": start_wandb, "tensorboard": start_tensorboard}
    trackers = {}
    for name, start in starting.items():
        if entries[-1]["config"][name]:
            trackers[name] = start(log_dir, entries, step)
    return trackers


def start_tensorboard(log_dir: Path, entries: list[dict[str, Any]], step: int) -> Tracker:
    """Start a tracker that writes to log_dir/tensorboard/."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step drops values that a resumed run logs again.
    writer = SummaryWriter(log_dir / "tensorboard", purge_step=step)

    def track(step: int, values: dict[str, float]) -> None:
        for stream, value in values.items():
            writer.add_scalar(stream, value, step)

    return track


def start_wandb(log_dir: Path, entries: list[dict[str, Any]], step: int) -> Tracker:
    """Resume the W&B run of an earlier entry, or start one. Store its id in the last entry."""
    import wandb

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

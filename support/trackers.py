"""TensorBoard and Weights & Biases: `train_gpt2.py --tensorboard --wandb`."""

import re
from collections.abc import Callable
from pathlib import Path

from support.cli import UserError, first_line

Tracker = Callable[[int, dict[str, float]], object]  # called with a step and its streams


def start_trackers(log_dir: Path, entries: list[dict], first_step: int) -> list[Tracker]:
    """The trackers that the last of run.json's entries asks for.

    first_step: of this start, 0 unless it resumes from a checkpoint."""
    trackers, config = [], entries[-1]["config"]
    if config["tensorboard"]:
        trackers.append(start_tensorboard(log_dir, first_step))
    if config["wandb"]:
        trackers.append(start_wandb(log_dir, entries, first_step))
    return trackers


def start_tensorboard(log_dir: Path, first_step: int) -> Tracker:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard: not installed; `pip install tensorboard`") from None
    # purge_step: an interrupted run's later steps will be logged again
    writer = SummaryWriter(log_dir / "tensorboard", purge_step=first_step)

    def track(step: int, values: dict[str, float]) -> None:
        for stream, value in values.items():
            writer.add_scalar(stream, value, step)

    return track


def start_wandb(log_dir: Path, entries: list[dict], first_step: int) -> Tracker:
    """The run is named after the time of its first start, so that a resumed run keeps its name."""
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb: not installed; `pip install wandb`") from None
    first = len(entries) - 1
    while first > 0 and first_step > 0 and entries[first]["step"] > 0:  # a resumption
        first -= 1
    name = f"{log_dir.resolve().name}-{re.sub(r'[^0-9]', '', entries[first]['started'])}"
    try:
        config = entries[-1]["config"]
        names = {"project": "gpt2-repro", "id": name, "name": name}
        run = wandb.init(**names, resume="allow", dir=log_dir, config=config)
    except Exception as error:  # no account, no network
        message = f"--wandb: {first_line(error)}; WANDB_MODE=offline needs neither"
        raise UserError(message) from None
    return lambda step, values: run.log(values, step=step)

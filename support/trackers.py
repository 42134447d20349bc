"""TensorBoard and Weights & Biases: `train_gpt2.py --tensorboard --wandb`."""

import re
from collections.abc import Callable
from pathlib import Path

from support.cli import UserError, first_line
from support.run_folder import run_entries

Tracker = Callable[[int, dict[str, float]], object]  # called with a step and its streams


def start_trackers(log_dir: Path, first_step: int, tensorboard: bool, wandb: bool) -> list[Tracker]:
    """A function per tracker, to call at every step. Raises UserError if one is not installed."""
    trackers: list[Tracker] = []
    if tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard: not installed; `pip install tensorboard`") from None
        # purge_step: what an interrupted run logged from this step on will be logged again
        writer = SummaryWriter(log_dir / "tensorboard", purge_step=first_step)
        trackers.append(
            lambda step, values: [writer.add_scalar(k, v, step) for k, v in values.items()]
        )
    if wandb:
        try:
            import wandb as weights_and_biases
        except ImportError:
            raise UserError("--wandb: not installed; `pip install wandb`") from None
        entries = run_entries(log_dir)
        began = next(
            entry["started"] for entry in reversed(entries) if not (first_step and entry["step"])
        )
        name = f"{log_dir.resolve().name}-{re.sub(r'[^0-9]', '', began)}"  # a resumed run keeps its name
        try:
            run = weights_and_biases.init(
                project="gpt2-repro",
                id=name,
                name=name,
                resume="allow",
                dir=log_dir,
                config=entries[-1]["config"],
            )
        except Exception as error:  # no account, no network
            raise UserError(
                f"--wandb: {first_line(error)}; WANDB_MODE=offline needs neither"
            ) from None
        trackers.append(lambda step, values: run.log(values, step=step))
    return trackers

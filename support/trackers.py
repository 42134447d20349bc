"""TensorBoard and Weights & Biases: `train_gpt2.py --tensorboard --wandb`."""

import re
from collections.abc import Callable
from pathlib import Path

from support.cli import warn
from support.errors import UserError, first_line

Tracker = Callable[[int, dict[str, float]], object]  # called with (step, {stream: value})


def start_trackers(log_dir: Path, entries: list[dict], first_step: int) -> list[Tracker]:
    """The trackers that the last entry of run.json asks for; first_step: of this start."""
    trackers = []
    # wandb first: it may fail, and tensorboard already writes.
    for name, start in {"wandb": start_wandb, "tensorboard": start_tensorboard}.items():
        if entries[-1]["config"][name]:
            try:
                trackers.append(guarded(name, start(log_dir, entries, first_step)))
            except ImportError:
                raise UserError(f"--{name}: not installed; `pip install {name}`") from None
    return trackers


def guarded(name: str, track: Tracker) -> Tracker:
    """Wraps `track`: at its first error it warns and sends nothing more, and the run goes on."""
    failed = False

    def guarded_track(step: int, values: dict[str, float]) -> None:
        nonlocal failed
        if not failed:
            try:
                track(step, values)
            except Exception as error:
                failed = True
                warn(f"--{name}: nothing more is sent ({first_line(error)})")

    return guarded_track


def start_tensorboard(log_dir: Path, entries: list[dict], first_step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step drops the steps after the checkpoint, which will be logged again.
    writer = SummaryWriter(log_dir / "tensorboard", purge_step=first_step)

    def track(step: int, values: dict[str, float]) -> None:
        for stream, value in values.items():
            writer.add_scalar(stream, value, step)

    return track


def start_wandb(log_dir: Path, entries: list[dict], first_step: int) -> Tracker:
    """The run is named after the time of its first start, so that a resumed run keeps its name."""
    import wandb

    first = len(entries) - 1
    if first_step > 0:
        while first > 0 and entries[first]["step"] > 0:  # resumed: go back to where it began
            first -= 1
    digits = re.sub(r"[^0-9]", "", entries[first]["started"])
    name = f"{log_dir.resolve().name}-{digits}"
    try:
        run = wandb.init(
            project="gpt2-repro",
            id=name,
            name=name,
            resume="allow",
            dir=log_dir,
            config=entries[-1]["config"],
        )
    except Exception as error:  # no account, no network
        problem = first_line(error)
        raise UserError(f"--wandb: {problem}; WANDB_MODE=offline needs neither") from None
    return lambda step, values: run.log(values, step=step)

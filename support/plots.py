"""Plots of logged runs: `log/curves.png`, which a run keeps up to date; used by play.ipynb."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.errors import UserError
from support.files import atomic_path
from support.run_log import data_source, read_log, run_entries

# Published results; the validation loss is on FineWeb-Edu.
VAL_BASELINES = {"GPT-2 124M (OpenAI)": 3.2924}
HELLASWAG_BASELINES = {
    "guessing": 0.25,
    "GPT-2 124M (OpenAI)": 0.2955,
    "GPT-3 Small 124M (OpenAI)": 0.337,
}
AXES = {"tokens": "tokens", "hours": "hours of training"}
PANELS = {
    "lr": "learning rate",
    "norm": "gradient norm before clipping",
    "tok_per_sec": "tokens per second",
}

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # stream -> (tokens or hours, values)


def read_curves(folder: str | Path, x: str = "tokens") -> Curves:
    """The streams of a log folder over `x`: tokens seen, or hours of training.

    Hours are those of the steps in this log: 0 at its first one, even of an extended run."""
    streams = read_log(folder)
    entries = run_entries(folder)
    if not entries:
        raise UserError(f"{folder}: no run.json: not the log of a run")
    tokens_per_step = entries[-1]["config"]["total_batch_size"]
    timed_steps, milliseconds = streams.get("ms", ([], []))
    hours = np.concatenate([[0.0], np.cumsum(milliseconds) / 3.6e6])  # after so many timed steps
    curves = {}
    for name, (steps, values) in streams.items():
        if x == "hours":
            x_values = hours[np.searchsorted(timed_steps, steps)]  # before each step
        else:
            x_values = np.array(steps) * tokens_per_step
        curves[name] = (x_values, np.array(values))
    return curves


def on_fineweb(folder: str | Path) -> bool:
    """True if a run's data is FineWeb-Edu, by the manifest or the name of the data folder."""
    data = Path(run_entries(folder)[-1]["config"]["data"])
    name = data_source(data) or data.name
    return "fineweb" in name and "edu" in name


def smooth(values: np.ndarray, half: int) -> np.ndarray:
    """For each value, the mean of the finite ones up to `half` before and after it."""
    finite = np.isfinite(values)
    window = np.ones(2 * half + 1)
    sums = np.convolve(np.where(finite, values, 0.0), window, "same")
    counts = np.convolve(finite, window, "same")
    with np.errstate(invalid="ignore"):  # 0 / 0 = NaN where no value is finite
        return sums / counts


def label_axes(axes: Any, x: str, title: str, ylabel: str = "") -> None:
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel=AXES[x], title=title, ylabel=ylabel)
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(axis="x", nbins=6)
    axes.grid(alpha=0.3)


def draw_baseline(axes: Any, name: str, value: float) -> None:
    axes.axhline(value, color="gray", linestyle=":")
    axes.text(
        0.01,
        value,
        f"{name}: {value:.5g}",
        transform=axes.get_yaxis_transform(),  # x as a fraction of the width, y in data units
        va="bottom",
        color="dimgray",
        size="small",
    )


def draw_loss(axes: Any, runs: dict[str, Curves], x: str, baselines: dict[str, float]) -> None:
    """Training loss (raw and smoothed) and validation loss; the first twentieth may be cropped."""
    highest = max(baselines.values(), default=0.0)
    for i, (name, run) in enumerate(runs.items()):
        color = f"C{i}"
        start = 0.0
        if "train" in run:
            x_values, losses = run["train"]
            axes.plot(x_values, losses, color, alpha=0.25, lw=0.8)
            smoothed = smooth(losses, len(losses) // 80)
            axes.plot(x_values, smoothed, color, label=f"{name}, train")
            start = x_values[-1] / 20
            highest = np.nanmax(smoothed, initial=highest, where=x_values >= start)
        if "val" in run:
            x_values, losses = run["val"]
            axes.plot(x_values, losses, color + "o-", ms=4, lw=0.5, label=f"{name}, validation")
            highest = np.nanmax(losses, initial=highest, where=x_values >= start)
    for name, value in baselines.items():
        draw_baseline(axes, name, value)
    if 0 < highest < np.inf:  # 0: no losses; inf: the run diverged
        axes.set_ylim(top=1.05 * highest)
    label_axes(axes, x, "Loss", "nats per token")
    axes.legend(loc="upper right")


def draw_hellaswag(axes: Any, runs: dict[str, Curves], x: str) -> None:
    """HellaSwag accuracy (by mean loss per token) with the published ones of GPT-2 and GPT-3."""
    for i, (name, run) in enumerate(runs.items()):
        if "hella" in run:
            axes.plot(*run["hella"], f"C{i}o-", ms=3, label=name)
    for name, value in HELLASWAG_BASELINES.items():
        draw_baseline(axes, name, value)
    axes.set_ylim(0.235, max(axes.get_ylim()[1], 0.35))
    label_axes(axes, x, "HellaSwag, acc_norm", "accuracy")
    axes.legend(loc="lower right")


def draw_panel(axes: Any, runs: dict[str, Curves], stream: str, x: str) -> None:
    for i, (name, run) in enumerate(runs.items()):
        if stream in run:
            axes.plot(*run[stream], f"C{i}", lw=1, label=name)
    axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    label_axes(axes, x, PANELS.get(stream, stream))


def save_curves(log_dir: Path) -> None:
    """Draws log_dir/curves.png."""
    from matplotlib.figure import Figure

    curves = read_curves(log_dir)
    run = {log_dir.name: curves}
    # Streams that this project doesn't know, such as a fork's evaluation, get a panel each.
    known = (*PANELS, "train", "val", "bpb", "hella", "mfu", "ms")
    streams = [*PANELS, *(stream for stream in curves if stream not in known)]
    figure = Figure(figsize=(max(12, 4 * len(streams)), 7), layout="constrained")
    above, below = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    upper = above.subgridspec(1, 2 if "hella" in curves else 1)
    baselines = VAL_BASELINES if on_fineweb(log_dir) else {}
    draw_loss(figure.add_subplot(upper[0]), run, "tokens", baselines)
    if "hella" in curves:
        draw_hellaswag(figure.add_subplot(upper[1]), run, "tokens")
    for place, stream in zip(below.subgridspec(1, len(streams)), streams, strict=True):
        draw_panel(figure.add_subplot(place), run, stream, "tokens")
    with atomic_path(log_dir / "curves.png") as partial:
        figure.savefig(partial, format="png", dpi=100)


if __name__ == "__main__":  # train_gpt2.py runs `python -m support.plots LOG_DIR`
    save_curves(Path(sys.argv[1]))

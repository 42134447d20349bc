"""Plots of logged runs: `log/curves.png`, which a run keeps up to date; used by play.ipynb."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from support.errors_and_signals import UserError
from support.files_and_locks import atomic_path
from support.log_txt import read_log
from support.run_json import run_entries

TITLES = {
    "loss": "Loss, nats per token",
    "hella": "HellaSwag, acc_norm",
    "lr": "Learning rate",
    "norm": "Gradient norm before clipping",
    "tok_per_sec": "Tokens per second",
}
# Published results. The loss is on FineWeb-Edu.
BASELINES = {
    "loss": {"GPT-2 124M (OpenAI)": 3.2924},
    "hella": {
        "guessing": 0.25,
        "GPT-2 124M (OpenAI)": 0.2955,
        "GPT-3 Small 124M (OpenAI)": 0.337,
    },
}

BUILD_NANOGPTS = 524_288  # tokens per step of build-nanogpt

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # stream -> (tokens or hours, values)


def read_curves(folder: str | Path, x: str = "tokens") -> Curves:
    """The streams of a log folder over `x`: tokens seen, or hours of training."""
    streams = read_log(folder)
    if not streams:
        raise UserError(f"{folder}: no log.txt with values: not the log of a run")
    entries = run_entries(folder)  # none in a folder of build-nanogpt
    tokens_per_step = entries[-1]["config"]["total_batch_size"] if entries else BUILD_NANOGPTS
    timed_steps, milliseconds = streams.get("ms", ([], []))
    hours = np.append(0.0, np.cumsum(milliseconds) / 3.6e6)  # after each timed step
    curves = {}
    for name, (steps, values) in streams.items():
        tokens = np.array(steps) * tokens_per_step
        before = hours[np.searchsorted(timed_steps, steps)]  # hours before each step
        curves[name] = (before if x == "hours" else tokens, np.array(values))
    return curves


def run_name(folder: str | Path) -> str:
    """A log folder and the other flags of its starts, such as "log_2 --n-embd 32"."""
    flags = {}  # in the order of the starts, each once
    for entry in run_entries(folder):
        command = " ".join(entry.get("command", [])[1:])
        flags[" ".join(re.sub(r"--(log-dir|preset)[= ]\S+|--resume", "", command).split())] = None
        if entry.get("world_size", 1) > 1:
            flags[f"on {entry['world_size']} ranks"] = None
    return " ".join(filter(None, [str(folder), *flags]))


def on_fineweb(folder: str | Path) -> bool:
    """True if the name of a run's data begins like that of the FineWeb-Edu shards.

    A run of build-nanogpt, which has no run.json, has them."""
    entries = run_entries(folder)
    return not entries or Path(entries[-1]["config"]["data"]).name.startswith("edu_fineweb")


def smooth(values: np.ndarray) -> np.ndarray:
    """For each value, the mean of a fortieth of all values around it."""
    window = np.ones(2 * (len(values) // 80) + 1)
    counts = np.convolve(np.ones_like(values), window, "same")
    return np.convolve(values, window, "same") / counts


def draw_panel(
    axes: Any, runs: dict[str, Curves], panel: str, x: str = "tokens", fineweb: bool = False
) -> None:
    """Draws a stream of each run; as the panel "loss", its training and validation loss.

    The y-axis ends above the values after the first twentieth. fineweb: show the published loss.
    Several runs have their legend beside the losses and HellaSwag."""
    from matplotlib.ticker import EngFormatter

    highest = -np.inf
    several = len(runs) > 1
    for i, (name, run) in enumerate(runs.items()):
        streams = {"train": ", train", "val": ", validation"} if panel == "loss" else {panel: ""}
        for stream, kind in streams.items():
            if stream not in run:
                continue
            x_values, values = run[stream]
            color = f"C{i + (stream == 'val' and not several)}"  # one run's validation has another
            style = f"{color}o-" if stream in ("val", "hella") else color
            if stream == "train":
                axes.plot(x_values, values, style, alpha=0.25, lw=0.8)
                values = smooth(values)
            label = name if several else name + kind
            if several and stream == "train" and "val" in run:
                label = None  # one entry of the legend per run
            axes.plot(x_values, values, style, ms=3, lw=1, label=label)
            shown = values[np.isfinite(values) & (x_values >= x_values[-1] / 20)]
            highest = np.max(shown, initial=highest)
    baselines = {} if panel == "loss" and not fineweb else BASELINES.get(panel, {})
    for name, value in baselines.items():
        axes.axhline(value, color="gray", linestyle=":")
        place = axes.get_yaxis_transform()  # x as a fraction of the width, y in data units
        axes.text(0.01, value, f"{name}: {value:.5g}", transform=place, va="bottom", size="small")
        highest = max(highest, value)
    if np.isfinite(highest):
        lowest, _ = axes.get_ylim()
        axes.set_ylim(top=highest + 0.05 * abs(highest - lowest))
    axes.set(
        xlabel="tokens" if x == "tokens" else "hours of training", title=TITLES.get(panel, panel)
    )
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.ticklabel_format(axis="y", scilimits=(-3, 4))  # 6e-4 has a factor above the axis
    if panel == "tok_per_sec":
        axes.set_ylim(bottom=0)  # so that a few per cent look like a few per cent
    axes.grid(alpha=0.3)
    if several and panel in ("loss", "hella"):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    elif panel == "loss" and axes.get_legend_handles_labels()[0]:
        axes.legend()


def save_curves(log_dir: Path) -> None:
    """Draws log_dir/curves.png."""
    from matplotlib.figure import Figure

    curves = read_curves(log_dir)
    above = ["loss", "hella"] if "hella" in curves else ["loss"]
    below = ["lr", "norm", "tok_per_sec"]
    # Streams that this project doesn't know, such as a fork's evaluation, get a panel each.
    known = (*above, *below, "train", "val", "bpb", "mfu", "ms")
    below += [stream for stream in curves if stream not in known]
    figure = Figure(figsize=(max(12, 4 * len(below)), 7), layout="constrained")
    rows = figure.add_gridspec(2, 1, height_ratios=(3, 2))
    for row, panels in zip(rows, (above, below), strict=True):
        for place, panel in zip(row.subgridspec(1, len(panels)), panels, strict=True):
            axes = figure.add_subplot(place)
            draw_panel(axes, {log_dir.name: curves}, panel, fineweb=on_fineweb(log_dir))
    with atomic_path(log_dir / "curves.png") as partial:
        figure.savefig(partial, format="png", dpi=100)

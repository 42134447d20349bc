"""Plots of logged runs: log/curves.png, which a run keeps up to date, and those of play.ipynb."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from support.errors_and_signals import UserError
from support.files_and_locks import atomic_path
from support.run_files import read_log, run_entries

TITLES = {
    "loss": "Loss, nats per token",
    "late": "Loss after the first 5%",
    "hella": "HellaSwag, acc_norm",
    "lr": "Learning rate",
    "norm": "Gradient norm before clipping",
    "tok_per_sec": "Tokens per second",
}
# Published results. The loss is on FineWeb-Edu.
BASELINES = {
    "late": {"GPT-2 124M (OpenAI)": 3.2924},
    "hella": {
        "guessing": 0.25,
        "GPT-2 124M (OpenAI)": 0.2955,
        "GPT-3 Small 124M (OpenAI)": 0.337,
    },
}

NOT_DRAWN = ("bpb", "mfu", "ms")  # proportional to val, or to tok_per_sec or its inverse

BUILD_NANOGPT_TOKENS = 524_288  # build-nanogpt's tokens per step

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # stream -> (tokens or hours, values)


def read_curves(folder: str | Path, x: str = "tokens") -> Curves:
    """Return the streams of a log folder over `x`, "tokens" seen or "hours" of training."""
    streams = read_log(folder)
    if not streams:
        raise UserError(f"{folder}: no log.txt with values; name the log folder of a run")
    entries = run_entries(folder)  # build-nanogpt writes no run.json
    tokens_per_step = entries[-1]["config"]["total_batch_size"] if entries else BUILD_NANOGPT_TOKENS
    timed_steps, milliseconds = streams.get("ms", ([], []))
    elapsed = np.append(0.0, np.cumsum(milliseconds) / 3.6e6)  # hours after 0, 1, … timed steps
    curves = {}
    for name, (steps, values) in streams.items():
        tokens = np.array(steps) * tokens_per_step
        hours = elapsed[np.searchsorted(timed_steps, steps)]  # at the start of each step
        curves[name] = (hours if x == "hours" else tokens, np.array(values))
    return curves


def on_fineweb(folder: str | Path) -> bool:
    """Return whether a run trained on FineWeb-Edu, judging by the name of its data folder.

    A run without run.json is build-nanogpt's, which trained on it."""
    entries = run_entries(folder)
    return not entries or Path(entries[-1]["config"]["data"]).name.startswith("edu_fineweb")


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the moving average, over a centered window of a fortieth of all values."""
    window = np.ones(2 * (len(values) // 80) + 1)
    counts = np.convolve(np.ones_like(values), window, "same")
    return np.convolve(values, window, "same") / counts


def panel_of(stream: str) -> str:
    """Return the panel of a stream: "loss" for losses, otherwise the first word of its name.

    A fork's norm_block0 and norm_block1, for example, share the panel of norm."""
    if stream in TITLES:
        return stream
    word = re.match(r"[^_\d]*", stream)[0] or stream
    return "loss" if word in ("train", "val") else word


def panels_of(run: Curves) -> list[str]:
    """Return the panels of a run, those of TITLES first."""
    panels = dict.fromkeys(panel_of(stream) for stream in run if stream not in NOT_DRAWN)
    if "loss" in panels:
        panels["late"] = None
    known = [panel for panel in TITLES if panel in panels]
    return known + [panel for panel in panels if panel not in known]


def draw_panel(
    axes: Any, runs: dict[str, Curves], panel: str, x: str = "tokens", fineweb: bool = False
) -> None:
    """Draw one panel with the streams of all runs. With `fineweb`, show GPT-2's loss, too.

    Colors distinguish the runs, or the streams if there is only one run."""
    from matplotlib.ticker import EngFormatter

    several = len(runs) > 1
    for i, (name, run) in enumerate(runs.items()):
        streams = [s for s in run if panel_of(s) == ("loss" if panel == "late" else panel)]
        for j, stream in enumerate(streams):
            x_values, values = run[stream]
            if panel == "late":  # drop the steep initial decrease
                late = x_values >= x_values[-1] / 20
                x_values, values = x_values[late], values[late]
            color = f"C{i}" if several else f"C{j}"
            label = stream
            if several:
                label = name if stream == streams[-1] else None
            if stream.startswith("train"):
                axes.plot(x_values, values, color=color, alpha=0.25, lw=0.8)
                values = smooth(values)
            style = "o-" if stream.startswith(("val", "hella")) else "-"
            axes.plot(x_values, values, style, color=color, ms=3, lw=1, label=label)
    for name, value in BASELINES.get(panel, {}).items() if panel != "late" or fineweb else ():
        axes.axhline(value, color="gray", linestyle=":")
        position = axes.get_yaxis_transform()  # x in axes coordinates, y in data coordinates
        axes.text(
            0.01, value, f"{name}: {value:.5g}", transform=position, va="bottom", size="small"
        )
    axes.set(
        xlabel="tokens" if x == "tokens" else "hours of training", title=TITLES.get(panel, panel)
    )
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel == "norm":
        axes.set_yscale("log")  # outliers are a hundred times larger than the rest
    elif panel == "tok_per_sec":
        axes.set_ylim(bottom=0)  # do not exaggerate differences of a few percent
    axes.grid(alpha=0.3)
    if several and panel in ("loss", "late", "hella"):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize="small")
    elif not several and 1 < len(axes.get_legend_handles_labels()[0]) <= 10:
        axes.legend(loc="upper right", fontsize="small")


def save_curves(log_dir: Path) -> None:
    """Draw log_dir/curves.png."""
    from matplotlib.figure import Figure

    curves = read_curves(log_dir)
    panels = panels_of(curves)
    rows = math.ceil(len(panels) / 3)
    figure = Figure(figsize=(15, 4 * rows), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, 3, number)
        draw_panel(axes, {log_dir.name: curves}, panel, fineweb=on_fineweb(log_dir))
    with atomic_path(log_dir / "curves.png") as partial:
        figure.savefig(partial, format="png", dpi=100)

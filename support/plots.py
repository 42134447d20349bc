"""Plots of logged runs: `log/curves.png`, which a run keeps up to date; used by play.ipynb."""

import math
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from support.errors_and_signals import UserError
from support.files_and_locks import atomic_path
from support.run_files import read_log, run_entries

TITLES = {
    "loss": "Loss, nats per token",
    "late": "Loss after the first twentieth",
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


def panels_of(run: Curves) -> dict[str, list[str]]:
    """{panel: its streams}

    Streams that this project doesn't know, such as those of a fork, have a panel each. But those
    that begin with the same word, such as norm_block0 and norm_block1, share one, and those that
    begin with train_ or val_ are losses."""
    losses = ["train", "val", *(name for name in run if name.startswith(("train_", "val_")))]
    panels = {name: [name] for name in TITLES} | {"loss": losses, "late": losses}
    known = {*losses, "bpb", "mfu", "ms", *TITLES}
    groups: dict[str, list[str]] = {}
    for stream in run:
        if stream not in known:
            groups.setdefault(re.match(r"[^_\d]*", stream)[0], []).append(stream)
    for word, streams in groups.items():
        panels[streams[0] if len(streams) == 1 else f"{word}…"] = streams
    there = {panel: [name for name in streams if name in run] for panel, streams in panels.items()}
    return {panel: streams for panel, streams in there.items() if streams}


def draw_panel(
    axes: Any, runs: dict[str, Curves], panel: str, x: str = "tokens", fineweb: bool = False
) -> None:
    """Draws a panel with its streams of each run. fineweb: show the published loss.

    The legend of several runs is below the losses and below HellaSwag."""
    from matplotlib import colormaps
    from matplotlib.ticker import EngFormatter

    several = len(runs) > 1
    for i, (name, run) in enumerate(runs.items()):
        streams = panels_of(run).get(panel, [])
        for j, stream in enumerate(streams):
            x_values, values = run[stream]
            if panel == "late":  # The loss falls steeply before.
                late = x_values >= x_values[-1] / 20
                x_values, values = x_values[late], values[late]
            # Each run has a color. The streams of a single run go from blue to orange.
            color = f"C{i}" if several else colormaps["plasma"](0.9 * j / len(streams))
            if several:
                label = textwrap.fill(name, 50) if stream == streams[-1] else None
            else:
                label = stream if j % (len(streams) / 6) < 1 else None  # of about six of them
            if stream.startswith("train"):
                axes.plot(x_values, values, color=color, alpha=0.25, lw=0.8)
                values = smooth(values)
            style = "o-" if stream.startswith(("val", "hella")) else "-"
            axes.plot(x_values, values, style, color=color, ms=3, lw=1, label=label)
    for name, value in BASELINES.get(panel, {}).items() if panel != "late" or fineweb else ():
        axes.axhline(value, color="gray", linestyle=":")
        place = axes.get_yaxis_transform()  # x as a fraction of the width, y in data units
        axes.text(0.01, value, f"{name}: {value:.5g}", transform=place, va="bottom", size="small")
    axes.set(
        xlabel="tokens" if x == "tokens" else "hours of training", title=TITLES.get(panel, panel)
    )
    if x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    lowest, highest = axes.dataLim.intervaly
    if panel in ("loss", "late", "hella", "lr", "tok_per_sec") or not 0 < 10 * lowest < highest:
        axes.ticklabel_format(axis="y", scilimits=(-3, 4))  # 6e-4 has a factor above the axis
    else:
        axes.set_yscale("log")
    if panel == "tok_per_sec":
        axes.set_ylim(bottom=0)  # so that a few per cent look like a few per cent
    axes.grid(alpha=0.3)
    if several and panel in ("loss", "late", "hella"):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize="small")
    elif not several and len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc="upper right", fontsize="small")


def save_curves(log_dir: Path) -> None:
    """Draws log_dir/curves.png."""
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

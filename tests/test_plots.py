"""support/plots.py: curves of logged runs."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from support import plots
from support.errors import UserError


def write_run(folder, log, **config):
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text(log)
    config = {"total_batch_size": 10, "data": "input.txt"} | config
    (folder / "run.json").write_text(json.dumps([{"config": config}]))


def test_hours_are_those_of_the_timed_steps(tmp_path):
    """Of a log that begins at a later step and lacks the time of one; an hour is 3.6e6 ms."""
    with pytest.raises(UserError, match=r"no run\.json"):
        plots.read_curves(tmp_path)
    log = "".join(f"{step} train 9\n{step} ms 3.6e6\n" for step in range(4000, 4004))
    log = "4000 val 9\n" + log.replace("4002 ms 3.6e6\n", "") + "4004 val 8\n"
    write_run(tmp_path, log)
    curves = plots.read_curves(tmp_path, "hours")
    assert curves["train"][0].tolist() == [0, 1, 2, 2] and curves["val"][0].tolist() == [0, 3]
    assert plots.read_curves(tmp_path)["val"][0].tolist() == [40_000, 40_040]


def test_curves_png_has_a_panel_for_each_stream(tmp_path, monkeypatch):
    """Also for the evaluation of a fork; published losses are shown on FineWeb-Edu only."""
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda *args, **more: figures.append(args[0]) or savefig(*args, **more)
    )
    log = "0 train 9.0\n0 lr 1e-3\n0 norm 1\n0 ms 5\n1 lambada 0.3\n1 val 8.0\n1 hella 0.28\n"
    for data, published in (("input.txt", False), ("edu_fineweb10B", True)):
        write_run(tmp_path / "log", log, data=data)
        plots.save_curves(tmp_path / "log")
        axes = figures[-1].axes
        values = [[line.get_ydata()[-1] for line in panel.lines] for panel in axes]
        assert [0.3] in values and [0.001] in values and 0.28 in values[1] and 8.0 in values[0]
        assert axes[1].get_ylim()[1] > 0.337  # also shows GPT-3's HellaSwag
        texts = [text.get_text() for panel in axes for text in panel.texts]
        assert ("GPT-2 124M (OpenAI): 3.2924" in texts) == published
        assert "GPT-2 124M (OpenAI): 0.2955" in texts
    assert (tmp_path / "log/curves.png").stat().st_size > 10_000


def test_the_first_losses_do_not_squeeze_the_rest():
    """The axis ends a little above the values after the first twentieth."""
    values = np.array([11.0] * 5 + [4.0] * 90 + [3.0] * 5)
    figure = Figure()
    axes = figure.subplots()
    plots.draw_panel(axes, {"log": {"train": (np.arange(100.0), values)}}, "loss")
    smoothed = plots.smooth(values)[5:].max()
    assert max(smoothed, 4) < axes.get_ylim()[1] < max(smoothed, 4) + 1
    assert axes.get_ylim()[0] < 3 and axes.get_xlabel() == "tokens"


def test_all_runs_of_a_panel_are_inside_it():
    axes = Figure().subplots()
    steps = np.arange(100.0)
    runs = {
        name: {"norm": (steps, np.full(100, level))} for name, level in (("a", 5.0), ("b", 1.0))
    }
    plots.draw_panel(axes, runs, "norm")
    assert axes.get_ylim()[0] < 1 and axes.get_ylim()[1] > 5


def test_what_a_panel_says_of_its_curves():
    """A legend where there is more than one; evaluations are dots on a line; tokens in k, M, G."""
    curve = (np.array([0.0, 5e8, 1e9]), np.array([3.0, 2.0, 1.0]))
    run = {"train": curve, "val": curve, "norm": curve}
    for panel, runs, names in (
        ("loss", {"a": run}, ["a, train", "a, validation"]),
        ("norm", {"a": run}, None),
        ("norm", {"a": run, "b": run}, ["a", "b"]),
        ("hella", {"a": run}, None),
    ):
        axes = Figure().subplots()
        plots.draw_panel(axes, runs, panel)
        legend = axes.get_legend()
        assert names == (legend and [text.get_text() for text in legend.get_texts()])
        dots = {line.get_label() for line in axes.get_lines() if line.get_marker() == "o"}
        assert dots == ({"a, validation"} if panel == "loss" else set())
        assert axes.xaxis.get_major_formatter()(5e8) == "500M"
    plots.draw_panel(axes := Figure().subplots(), {"a": run}, "norm", x="hours")
    assert axes.get_xlabel() == "hours of training"
    assert axes.xaxis.get_major_formatter()(5e8) != "500M"


def test_smoothing_neither_lags_nor_bends_the_ends():
    values = np.arange(800.0)
    smoothed = plots.smooth(values)
    assert smoothed[20:-20] == pytest.approx(values[20:-20])
    assert smoothed[0] == pytest.approx(5) and smoothed[-1] == pytest.approx(794)

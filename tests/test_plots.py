"""curves.png, by what matplotlib is told to draw."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from support import plots


def write_run(folder, log, **config):
    folder.mkdir(exist_ok=True)
    (folder / "log.txt").write_text(log)
    if config.get("data", "") is None:  # a folder of build-nanogpt
        return
    config = {"total_batch_size": 10, "data": "input.txt"} | config
    (folder / "run.json").write_text(json.dumps([{"config": config}]))


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """draw(log, data) returns the panels of such a run's curves.png."""
    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda *args, **more: figures.append(args[0]) or savefig(*args, **more)
    )

    def panels(log, data="input.txt"):
        write_run(tmp_path / "log", log, data=data)
        plots.save_curves(tmp_path / "log")
        assert (tmp_path / "log/curves.png").stat().st_size > 10_000
        return figures[-1].axes

    return panels


def ys(panel):
    return [list(line.get_ydata()) for line in panel.lines]


def test_a_panel_for_each_stream_with_published_results(draw):
    """Also for the evaluation of a fork; published losses are shown on FineWeb-Edu only."""
    log = "0 train 9.0\n0 lr 1e-3\n0 norm 1\n0 ms 5\n1 lambada 0.3\n1 val 8.0\n1 hella 0.28\n"
    for data, published in (("input.txt", False), ("edu_fineweb10B", True)):
        axes = draw(log, data)
        drawn = [ys(panel) for panel in axes]
        assert [8.0] in drawn[0] and [0.28] in drawn[2]
        assert any([0.3] in panel for panel in drawn) and any([0.001] in panel for panel in drawn)
        assert ([3.2924, 3.2924] in drawn[1]) == published  # GPT-2 124M
        assert [0.2955, 0.2955] in drawn[2] and axes[2].get_ylim()[1] > 0.337  # GPT-3's


def test_a_log_of_build_nanogpt_has_no_run_json(draw, tmp_path):
    """Its steps have 524,288 tokens of FineWeb-Edu."""
    axes = draw("0 train 9.0\n0 val 8.0\n250 val 7.0\n", None)
    assert [3.2924, 3.2924] in ys(axes[1])
    assert plots.read_curves(tmp_path / "log")["val"][0].tolist() == [0, 250 * 524_288]


def test_the_loss_is_smoothed_without_lag_and_shown_once_more_without_its_first_values(draw):
    """It falls from 11 to 6 in five steps, then slowly to 3. The unit is tokens, 10 a step."""
    values = [11.0, 10, 9, 8, 7, *np.linspace(6, 3, 795)]
    panel, late = draw("".join(f"{step} train {v:.6f}\n" for step, v in enumerate(values)))
    raw, smoothed = (line.get_ydata() for line in panel.lines)
    assert raw == pytest.approx(values, abs=1e-5)
    assert smoothed[30:-20] == pytest.approx(raw[30:-20], abs=1e-3)
    assert smoothed[-20:] == pytest.approx(raw[-20:], abs=0.1), "where it has fewer neighbours"
    assert panel.lines[0].get_xdata()[-1] == 7990
    assert late.lines[0].get_ydata().tolist() == raw[40:].tolist() and late.get_ylim()[1] < 7


def test_streams_that_begin_alike_share_a_panel(draw):
    """48 of them: in a picture that fits a screen, each curve whole, from its first point on."""
    log = "0 val 10.9\n200 val 4\n0 top1 0.1\n"
    for step in range(200):
        log += f"{step} train {4 + 7 / (step + 1)}\n{step} norm {1 + 20 / (step + 1)}\n"
        values = (f"{step} norm_block{i} {i + 1 + 99 / (step + 1)}\n" for i in range(48))
        log += "".join(values)
    axes = draw(log)
    assert [len(panel.lines) for panel in axes] == [3, 3, 49, 1]
    assert axes[3].get_title() == "top" and axes[2].get_yscale() == "log"
    assert max(axes[0].figure.get_size_inches()) <= 15
    assert axes[2].get_legend() is None, "49 names"
    for panel in axes:
        (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
        for line in panel.lines:
            assert all(left < x < right for x in line.get_xdata())
            assert all(bottom < y < top for y in line.get_ydata())


def test_hours_are_those_of_the_timed_steps(tmp_path):
    """Of a log that begins at a later step and lacks the time of one; an hour is 3.6e6 ms."""

    log = "".join(f"{step} train 9\n{step} ms 3.6e6\n" for step in range(4000, 4004))
    log = "4000 val 9\n" + log.replace("4002 ms 3.6e6\n", "") + "4004 val 8\n"
    write_run(tmp_path, log)
    curves = plots.read_curves(tmp_path, "hours")
    assert curves["train"][0].tolist() == [0, 1, 2, 2] and curves["val"][0].tolist() == [0, 3]

"""The pictures of a report, from its results."""

from pathlib import Path
from typing import Any

from support.files import atomic_path
from support.report.floors import step_floors
from support.report.trace import PARTS


def draw_pictures(folder: Path, results: Any) -> list[str]:
    """Draws speed.png, where.png and ladder.png, as far as there are results for them (a page.Results). Returns their
    names; [] where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    names = []
    for name, draw in PICTURES.items():
        figure = Figure(figsize=(10, 4), layout="constrained")
        if draw(figure, results):
            with atomic_path(folder / name) as partial:
                figure.savefig(partial, format="png", dpi=100)
            names.append(name)
    return names


def bars(axes: Any, values: dict[str, float], form: str, **style: Any) -> None:
    """Horizontal bars from top to bottom, each with its value."""
    drawn = axes.barh(list(values), list(values.values()), **style)
    axes.bar_label(drawn, [form.format(value) for value in values.values()], padding=3, fontsize="small")
    axes.set_xlim(0, 1.18 * max(values.values()))
    axes.invert_yaxis()


def draw_speed(figure: Any, results: Any) -> bool:
    """Tokens a second by micro-batch, and a step's time with each switch."""
    done = results.done("speed")
    batches = sorted((r["B"], r["tok_per_s"]) for job, r in done.items() if job.startswith("B="))
    if not batches:
        return False
    default = results.default()
    switches = {job: r["ms"] for job, r in done.items() if default and r.get("B") == default["B"]
                and not job.startswith("B=")}
    left, *right = figure.subplots(1, 1 + bool(switches), squeeze=False)[0]
    bars(left, {f"B = {B}": rate for B, rate in batches}, "{:,.0f}")
    left.set(title="Speed by micro-batch", xlabel="tokens a second")
    if switches:
        bars(right[0], {"as shipped": default["ms"], **switches}, "{:,.1f}", color="C1")
        right[0].axvline(default["ms"], color="gray", linestyle=":")
        right[0].set(title=f"The switches, B = {default['B']}", xlabel="ms a step")
    return True


def draw_where(figure: Any, results: Any) -> bool:
    """A step's parts beside their floors."""
    where, ceilings = results.get("where", "kernels"), results.ceilings()
    if not where or not ceilings or not results.default():
        return False
    floors = step_floors(results.shape(where["B"]), ceilings)
    names = [part for part in PARTS if where["parts_ms"][part] or floors[part].ms]
    axes = figure.subplots()
    for shift, label, values, color in ((-0.2, "measured", where["parts_ms"], "C0"),
                                        (0.2, "floor", {part: floors[part].ms for part in names}, "C2")):
        drawn = axes.barh([i + shift for i in range(len(names))], [values[name] for name in names], 0.38, label=label,
                          color=color)
        axes.bar_label(drawn, [f"{values[name]:,.2f}" for name in names], padding=3, fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.set(title=f"Where a step's time goes, B = {where['B']}", xlabel="ms a step",
             xlim=(0, 1.1 * max(*where["parts_ms"].values(), *(floor.ms for floor in floors.values()))))
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    return True


def draw_ladder(figure: Any, results: Any) -> bool:
    done = results.done("ladder")
    if not done:
        return False
    axes = figure.subplots()
    bars(axes, {job: r["ms"] for job, r in done.items()}, "{:,.1f} ms")
    one = next(iter(done.values()))
    axes.set(title=f"From plain float32 up to train_gpt2.py: B {one['B']}, T {one['T']}", xlabel="ms a step")
    return True


PICTURES = {"speed.png": draw_speed, "where.png": draw_where, "ladder.png": draw_ladder}

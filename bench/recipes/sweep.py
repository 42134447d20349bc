"""Runs recipes over several seeds, and compares what they needed.

    python bench/recipes/sweep.py bench/recipes/small.toml    # the same again continues it

The TOML file holds `seeds`, `[common]` for the flags that all runs share, and `[recipes.NAME]` for
each recipe, with train_gpt2.py's names. The others are measured against the first recipe.

Each run is `python train_gpt2.py --resume` in its own folder, OUT/FILE/RECIPE/SEED/, so a finished
one is skipped and a stopped one continues. At the end `table.md` and `curves.png` show each
recipe's final validation loss, and after how many tokens it reached the first recipe's."""

import statistics
import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import plots
from support.cli import UserError, flag, parse_args, run
from support.files import atomic_path, write_text
from train_gpt2 import TrainConfig, read_config

ROOT = Path(__file__).parents[2]
Curve = list[tuple[int, float]]  # (tokens, validation loss)


@dataclass(frozen=True)
class SweepConfig:
    """Runs recipes over seeds and compares them."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file with seeds, common flags and recipes."""
    out: Path = Path("sweeps")
    """Folder for the runs: OUT/FILE/RECIPE/SEED/."""


def read_sweep(path: Path) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """Seeds, and each recipe's settings with the common ones."""
    try:
        sweep = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML ({error})") from None
    unknown = sweep.keys() - {"seeds", "common", "recipes"}
    seeds, recipes = sweep.get("seeds"), sweep.get("recipes")
    if unknown or not seeds or not recipes or not all(isinstance(seed, int) for seed in seeds):
        raise UserError(
            f"{path}: needs seeds = [1, 2, …], [common] and [recipes.NAME], nothing else"
        )
    recipes = {name: {**sweep.get("common", {}), **recipe} for name, recipe in recipes.items()}
    known = {field.name for field in fields(TrainConfig)} - {"seed", "log_dir", "resume"}
    for name, recipe in recipes.items():
        for setting in sorted(recipe.keys() - known):
            raise UserError(f"{path}: recipe {name}: {setting} is not a setting of train_gpt2.py")
    return seeds, recipes


def as_flags(recipe: dict[str, Any]) -> list[str]:
    """{"max_steps": 5, "shuffle": False} -> ["--max-steps", "5", "--no-shuffle"]"""
    flags = []
    for key, value in recipe.items():
        if isinstance(value, bool):
            flags.append(flag(key) if value else flag(f"no_{key}"))
        else:
            flags += [flag(key), str(value)]
    return flags


def run_one(folder: Path, flags: list[str]) -> None:
    """Starts, continues or skips a run; its output goes to folder/console.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, ROOT / "train_gpt2.py", *flags]
    with open(folder / "console.txt", "a+", encoding="utf-8", errors="replace") as console:
        done = subprocess.run(command, stdout=console, stderr=subprocess.STDOUT)
        console.seek(0)
        output = console.read().splitlines() or ["no output"]
    if done.returncode:
        raise UserError(f"{folder}: stopped with status {done.returncode} ({output[-1]})")
    print(f"{folder}: done", flush=True)


def tokens_to_reach(curve: Curve, target: float) -> float | None:
    """Where a curve first reaches `target`, interpolated; None if it does not."""
    before, high = curve[0]
    for after, low in curve:
        if low <= target and high <= target:
            return after
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
        before, high = after, low
    return None


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def final_loss(runs: list[Curve]) -> float:
    """The mean over the runs."""
    return statistics.fmean(curve[-1][1] for curve in runs)


def table(curves: dict[str, list[Curve]]) -> str:
    """Markdown: each recipe's final loss, and when it reached the first recipe's."""
    first = next(iter(curves.values()))
    target, budget = final_loss(first), first[0][-1][0]
    text = f"| recipe | seeds | tokens | validation loss | tokens to {target:.3f} | share |\n"
    text += "|---|---|---|---|---|---|\n"
    for name, runs in curves.items():
        final = spread([curve[-1][1] for curve in runs])
        reached = [budget if runs is first else tokens_to_reach(curve, target) for curve in runs]
        needed, share = "not reached by all", ""
        if None not in reached:
            needed = ", ".join(f"{tokens:,.0f}" for tokens in reached)
            share = spread([tokens / budget for tokens in reached])
        text += f"| {name} | {len(runs)} | {runs[0][-1][0]:,} | {final} | {needed} | {share} |\n"
    return text


def picture(curves: dict[str, list[Curve]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, runs) in enumerate(curves.items()):
        for curve in runs:
            label = name if curve is runs[0] else None
            axes.plot(*zip(*curve, strict=True), f"C{i}.-", alpha=0.7, label=label)
    target = final_loss(next(iter(curves.values())))
    label = f"the first recipe at its end: {target:.3f}"
    axes.axhline(target, color="gray", linestyle=":", label=label)
    axes.set_ylim(top=target + 2)
    axes.legend(title="one line per seed")
    plots.label_axes(axes, "tokens", "Validation loss", "nats per token")
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png")


def main(args: list[str] | None = None) -> None:
    config = parse_args(SweepConfig, args=args)
    seeds, recipes = read_sweep(config.file)
    folder, runs = config.out / config.file.stem, {}
    for seed in seeds:
        for name, recipe in recipes.items():
            run_folder = folder / name / str(seed)
            more = ["--seed", str(seed), "--resume", "--log-dir", str(run_folder)]
            runs[run_folder] = [*as_flags(recipe), *more]
            read_config(runs[run_folder])  # a mistake shows before the first run
    curves: dict[str, list[Curve]] = {name: [] for name in recipes}
    for run_folder, flags in runs.items():
        run_one(run_folder, flags)
        streams = plots.read_curves(run_folder)
        if "val" not in streams:
            raise UserError(f"{run_folder}: no validation loss to compare: set eval_every")
        curves[run_folder.parent.name].append(list(zip(*streams["val"], strict=True)))
    text = table(curves)
    write_text(folder / "table.md", text)
    picture(curves, folder / "curves.png")
    print(f"{text}\n{folder}/table.md, {folder}/curves.png")


if __name__ == "__main__":
    run(main)

"""Runs a list of recipes over several seeds, one run after another, and compares what they needed.

    python bench/recipes/sweep.py bench/recipes/small.toml             # again: continues where it was stopped
    python bench/recipes/sweep.py bench/recipes/small.toml --jobs 2    # two at a time

The file holds `seeds`, the flags that all runs share, and a table for every recipe, in TOML; names
are those of train_gpt2.py's flags. The first recipe is the one that the others are measured
against:

    seeds = [1, 2, 3]
    [common]
    data = "my_shards"
    eval_every = 50
    [recipes.default]
    max_steps = 400
    [recipes.muon]
    max_steps = 200
    optimizer = "muon"

Each run is `python train_gpt2.py --resume` in its own folder, OUT/FILE/RECIPE/SEED/, so a finished
one is skipped and a stopped one continues. At the end `table.md` and `curves.png` show each
recipe's final loss over the seeds, and after how many tokens its validation loss reached the first
recipe's final one."""

import statistics
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from support.cli import UserError, flag, parse_args, run
from support.files import atomic_path
from support.run_folder import read_log
from train_gpt2 import TrainConfig, read_config


@dataclass(frozen=True)
class SweepConfig:
    """Runs recipes over seeds and compares them."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file with seeds, common flags and recipes."""
    out: Path = Path("sweeps")
    """Folder for the runs: OUT/FILE/RECIPE/SEED/."""
    jobs: int = 1
    """Runs at a time."""


def read_sweep(path: Path) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """Seeds, and each recipe's settings with the common ones. Raises UserError for an unknown
    setting."""
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
        if foreign := recipe.keys() - known:
            foreign = ", ".join(sorted(foreign))
            raise UserError(f"{path}: recipe {name}: {foreign} is no setting of train_gpt2.py")
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
    """Starts, continues or skips a run; its output goes to folder/console.txt. Raises
    UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    script = ROOT / "train_gpt2.py"
    with open(folder / "console.txt", "a", encoding="utf-8") as console:
        done = subprocess.run(
            [sys.executable, script, *flags], stdout=console, stderr=subprocess.STDOUT
        )
    if done.returncode:
        output = (folder / "console.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        raise UserError(
            f"{folder}: stopped with status {done.returncode} ({(output or ['no output'])[-1]})"
        )
    print(f"{folder}: done", flush=True)


def tokens_to_reach(curve: list[tuple[int, float]], target: float) -> float | None:
    """Where a curve of (tokens, loss) first reaches `target`, interpolated; None if it does not."""
    for (before, high), (after, low) in zip([curve[0], *curve], curve, strict=False):
        if low <= target:
            return (
                after
                if high <= target
                else before + (after - before) * (high - target) / (high - low)
            )
    return None


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def table(curves: dict[str, list[list[tuple[int, float]]]]) -> str:
    """Markdown: each recipe's final loss, and when it reached the first recipe's mean final
    loss."""
    first = next(iter(curves.values()))
    target = statistics.fmean(curve[-1][1] for curve in first)
    budget = first[0][-1][0]
    rows = [
        f"| recipe | seeds | tokens | validation loss at the end | tokens to {target:.3f} | share |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        final = [curve[-1][1] for curve in runs]
        reached = [budget if runs is first else tokens_to_reach(curve, target) for curve in runs]
        needed, share = "not reached by all", ""
        if None not in reached:
            needed = ", ".join(f"{tokens:,.0f}" for tokens in reached)
            share = spread([tokens / budget for tokens in reached])
        rows.append(
            f"| {name} | {len(runs)} | {runs[0][-1][0]:,} | {spread(final)} | {needed} | {share} |"
        )
    return "\n".join(rows) + "\n"


def picture(curves: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for i, (name, runs) in enumerate(curves.items()):
        for j, curve in enumerate(runs):
            tokens, loss = zip(*curve, strict=True)
            axes.plot(
                [n / 1e6 for n in tokens], loss, f"C{i}.-", alpha=0.7, label=None if j else name
            )
    target = statistics.fmean(curve[-1][1] for curve in next(iter(curves.values())))
    axes.axhline(
        target, color="gray", linestyle=":", label=f"{next(iter(curves))} at its end: {target:.3f}"
    )
    low = min(loss for runs in curves.values() for curve in runs for _, loss in curve)
    axes.set(
        xlabel="tokens (millions)", ylabel="validation loss (nats)", ylim=(low - 0.1, target + 2)
    )
    axes.legend()
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=100, bbox_inches="tight")
    plt.close(figure)


def main(args: list[str] | None = None) -> None:
    config = parse_args(SweepConfig, args=args)
    seeds, recipes = read_sweep(config.file)
    folder = config.out / config.file.stem
    runs = {
        (name, seed): [
            *as_flags(recipe),
            "--seed",
            str(seed),
            "--resume",
            "--log-dir",
            str(folder / name / str(seed)),
        ]
        for seed in seeds
        for name, recipe in recipes.items()
    }
    configs = {
        key: read_config(flags) for key, flags in runs.items()
    }  # a mistake shows before the first run
    with ThreadPoolExecutor(config.jobs) as pool:
        futures = [
            pool.submit(run_one, folder / name / str(seed), flags)
            for (name, seed), flags in runs.items()
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    curves: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in recipes}
    for (name, seed), run_config in configs.items():
        validation = read_log(folder / name / str(seed)).get("val")
        if not validation:
            raise UserError(
                f"{folder / name / str(seed)}: no validation loss to compare: set eval_every"
            )
        batch = run_config.total_batch_size
        curves[name].append([(step * batch, loss) for step, loss in zip(*validation, strict=True)])
    text = table(curves)
    with atomic_path(folder / "table.md") as partial:
        partial.write_text(text, encoding="utf-8")
    picture(curves, folder / "curves.png")
    print(f"{text}\n{folder}/table.md, {folder}/curves.png")


if __name__ == "__main__":
    run(main)

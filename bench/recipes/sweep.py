"""Trains recipes for several lengths and seeds, and compares their final validation losses.

    python bench/recipes/sweep.py bench/recipes/length.toml

The TOML file holds settings of train_gpt2.py: `[common]` for all runs, `[recipes.NAME]` for one
recipe, which overrides them. Special keys:
- `lengths`, in either: seeds for each number of steps, like {"366" = [1, 2]}
- `warmup_steps` and `warmdown_steps`: fractions of the number of steps
- `baselines`, at the top of the file: names of recipes to compare with

The validation losses of each run are kept in logs/FILE/RECIPE-STEPS-SEED.txt, next to the file.
Missing runs are first trained in OUT; the same command continues them."""

import statistics
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cli import flag, parse_args, run
from support.errors import UserError
from support.files import atomic_path, write_text
from support.run_log import read_log
from train_gpt2 import read_config

ROOT = Path(__file__).parents[2]
Cells = dict[int, dict[int, float]]  # tokens -> seed -> final loss, or a share of tokens
Table = dict[str, Cells]  # recipe -> its row of cells


@dataclass(frozen=True)
class SweepConfig:
    """Trains recipes for several lengths and seeds and compares them."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file with recipes, lengths and seeds."""
    out: Path = Path("sweeps")
    """Folder for missing runs."""


def read_sweep(path: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """({recipe: the common settings updated by its own}, names of the baselines)."""
    try:
        sweep = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML ({error})") from None
    recipes = sweep.get("recipes", {})
    baselines = sweep.get("baselines", [])
    unknown = sweep.keys() - {"common", "recipes", "baselines"}
    if unknown or not recipes or set(baselines) - recipes.keys():
        raise UserError(f"{path}: needs [common], [recipes.NAME] and baselines among these names")
    recipes = {name: {**sweep.get("common", {}), **recipe} for name, recipe in recipes.items()}
    for name, recipe in recipes.items():
        lengths = recipe.get("lengths", {})
        if not lengths or not all(length.isdecimal() for length in lengths):
            raise UserError(f'{path}: recipe {name}: needs lengths = {{"366" = [1]}}')
    return recipes, baselines


def runs_of(recipe: dict[str, Any]) -> Iterator[tuple[int, int, list[str]]]:
    """(steps, seed, flags) of each run of a recipe."""
    for length, seeds in recipe["lengths"].items():
        steps = int(length)
        flags = []
        for key, value in {**recipe, "max_steps": steps}.items():
            if key in ("warmup_steps", "warmdown_steps"):
                value = round(value * steps)
            if isinstance(value, bool):
                flags.append(flag(key) if value else flag(f"no_{key}"))
            elif key != "lengths":
                flags += [flag(key), str(value)]
        for seed in seeds:
            yield steps, seed, [*flags, "--seed", str(seed)]


def train(folder: Path, flags: list[str]) -> None:
    """Starts or continues a run; its output goes to folder/console.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, ROOT / "train_gpt2.py", *flags, "--resume", "--log-dir", folder]
    with open(folder / "console.txt", "ab") as console:
        done = subprocess.run(command, stdout=console, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(f"{folder}: status {done.returncode}; console.txt says why")
    print(f"{folder}: done", flush=True)


def final_losses(config: SweepConfig, recipes: dict[str, dict[str, Any]]) -> Table:
    """The last validation loss of every run. Trains those without a kept log."""
    runs = {}
    for name, recipe in recipes.items():
        for steps, seed, flags in runs_of(recipe):
            tokens = steps * read_config(flags).total_batch_size  # finds mistakes before any run
            runs[f"{name}-{steps}-{seed}"] = (name, tokens, seed, flags)
    losses: Table = {name: {} for name in recipes}
    for run_name, (name, tokens, seed, flags) in runs.items():
        kept_log = config.file.parent / "logs" / config.file.stem / f"{run_name}.txt"
        if not kept_log.exists():
            folder = config.out / config.file.stem / run_name
            train(folder, flags)
            steps, values = read_log(folder).get("val", ([], []))
            lines = [f"{step} val {loss:.6f}\n" for step, loss in zip(steps, values, strict=True)]
            kept_log.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept_log, "".join(lines))
        entries = [line.split() for line in kept_log.read_text(encoding="utf-8").splitlines()]
        curve = [float(loss) for _, stream, loss in entries if stream == "val"]
        if not curve:
            raise UserError(f"{kept_log}: no validation loss: remove it and set eval_every")
        losses[name].setdefault(tokens, {})[seed] = curve[-1]
    return losses


def tokens_to_reach(points: dict[int, float], target: float) -> float | None:
    """The number of tokens to train a recipe for, so that it ends at the loss `target`.

    points: {tokens: final loss} of its runs. Linear in the logarithm of the tokens between them;
    None outside."""
    for (shorter, high), (longer, low) in pairwise(sorted(points.items())):
        if high >= target >= low:
            drop = (high - low) or 1  # 1: all three losses are equal
            return shorter * (longer / shorter) ** ((high - target) / drop)
    return None


def shares(losses: Table, name: str, baseline: str) -> Cells:
    """The share of the baseline's tokens that a recipe needs to reach the baseline's final loss.

    Compares runs of the same seed, which see the same documents."""
    found: Cells = {}
    for tokens, targets in losses[baseline].items():
        for seed, target in targets.items():
            points = {n: cell[seed] for n, cell in losses[name].items() if seed in cell}
            needed = tokens_to_reach(points, target)
            if needed is not None:
                found.setdefault(tokens, {})[seed] = needed / tokens
    return found


def spread(values: Collection[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation} ({len(values)})"


def table(rows: Table) -> str:
    """A Markdown table: a row for each recipe, a column for each length."""
    lengths = sorted({tokens for cells in rows.values() for tokens in cells})
    titles = [f"{tokens / 1e6:.2f}M tokens" for tokens in lengths]
    lines = ["| recipe | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name, cells in rows.items():
        texts = [spread(cells[n].values()) if n in cells else "" for n in lengths]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def picture(compared: Table, path: Path) -> None:
    """Draws the mean shares by length, a line for each pair of recipe and baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, cells in compared.items():
        means = [statistics.fmean(cells[tokens].values()) for tokens in sorted(cells)]
        axes.plot(sorted(cells), means, "o-", label=label)
    axes.set(xscale="log", xlabel="training tokens of the baseline", ylim=(0, None))
    axes.set_title("Share of the baseline's tokens for its final validation loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png")


def main(args: list[str] | None = None) -> None:
    config = parse_args(SweepConfig, args=args)
    recipes, baselines = read_sweep(config.file)
    losses = final_losses(config, recipes)
    print("Final validation loss, mean ± standard deviation (seeds)\n\n" + table(losses))
    compared = {}
    for baseline in baselines:
        rows = {name: shares(losses, name, baseline) for name in recipes if name != baseline}
        rows = {name: found for name, found in rows.items() if found}
        compared |= {f"{name} to {baseline}": found for name, found in rows.items()}
        print(f"Share of the tokens of {baseline} for its final loss\n\n" + table(rows))
    if compared:
        picture(compared, config.file.with_suffix(".png"))


if __name__ == "__main__":
    run(main)

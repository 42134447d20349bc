"""Trains recipes for several lengths and seeds, and compares their final validation losses.

    python bench/recipes/sweep.py bench/recipes/length.toml

The TOML file holds settings of train_gpt2.py: `[common]`, and `[recipes.NAME]`, which overrides
them. Special keys:
- `lengths`, in either: seeds for each number of steps, like {"366" = [1, 2]}
- `warmup_steps` and `warmdown_steps`: fractions of the number of steps
- `script`: another train_gpt2.py with its own support/, or the folder of both, such as a fork
- `baselines`, at the top of the file: names of recipes to compare with

The validation losses of each run are kept in logs/FILE/RECIPE-STEPS-SEED.txt, next to the file.
Missing runs are first trained in OUT; the same command continues them. After a change of a script,
remove the kept logs of its recipes."""

import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cli import flag, parse_args, run
from support.console import duration
from support.errors import UserError
from support.files import atomic_path, write_text
from support.run_log import format_line, log_lines, read_log
from train_gpt2 import read_config

SCRIPT = Path(__file__).parents[2] / "train_gpt2.py"
# Arguments: a script's folder and name, and its flags. Prints its --total-batch-size.
READ_BATCH = """
import sys
from importlib import import_module
folder, name, *flags = sys.argv[1:]
sys.path.insert(0, folder)
from support.cli import run
run(lambda: print(import_module(name).read_config(flags).total_batch_size))
"""
# 95 % of Student's t are within so many standard errors, for 1, 2, ... degrees of freedom.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Cells = dict[int, dict[int, float]]  # tokens -> seed -> final loss, difference or share of tokens
Table = dict[str, Cells]  # recipe -> its row of cells


@dataclass(frozen=True)
class SweepConfig:
    """Trains recipes for several lengths and seeds and compares them."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file with recipes, lengths and seeds."""
    out: Path = Path("sweeps")
    """Folder for missing runs."""


@dataclass(frozen=True)
class Run:
    name: str  # of its log
    recipe: str
    tokens: int
    seed: int
    command: list[Any]


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


def flags_of(recipe: dict[str, Any], steps: int) -> list[str]:
    flags = []
    for key, value in {**recipe, "max_steps": steps}.items():
        if key in ("warmup_steps", "warmdown_steps"):
            value = round(value * steps)
        if isinstance(value, bool):
            flags.append(flag(key) if value else flag(f"no_{key}"))
        elif key not in ("lengths", "script"):
            flags += [flag(key), str(value)]
    return flags


def tokens_per_step(script: Path, flags: list[str]) -> int:
    """--total-batch-size. Mistakes in the settings show here, before any run."""
    if script == SCRIPT:
        return read_config(flags).total_batch_size
    # A fork has other settings and another support/, so it reads them in a separate process.
    command = [sys.executable, "-c", READ_BATCH, script.parent, script.stem, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{script}: does not take these settings: {' '.join(flags)}")
    return int(done.stdout.split()[-1])


def runs_of(name: str, recipe: dict[str, Any]) -> Iterator[Run]:
    script = Path(recipe.get("script", SCRIPT)).absolute()
    if script.is_dir():
        script /= "train_gpt2.py"
    if not script.is_file() or not (script.parent / "support").is_dir():
        needed = "needs a train_gpt2.py with a support/ beside it, or their folder"
        raise UserError(f"recipe {name}: script {script}: {needed}")
    batch = 0
    for length, seeds in recipe["lengths"].items():
        steps = int(length)
        flags = flags_of(recipe, steps)
        batch = batch or tokens_per_step(script, flags)
        for seed in seeds:
            command = [sys.executable, script, *flags, "--seed", str(seed)]
            yield Run(f"{name}-{steps}-{seed}", name, steps * batch, seed, command)


def train(command: list[Any], folder: Path) -> None:
    """Starts or continues a run; its output goes to folder/console.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "console.txt", "ab") as console:
        resumed = [*command, "--resume", "--log-dir", folder]
        done = subprocess.run(resumed, stdout=console, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UserError(f"{folder}: status {done.returncode}; console.txt says why")


def final_losses(config: SweepConfig, recipes: dict[str, dict[str, Any]]) -> Table:
    """The last validation loss of every run. Trains those without a kept log."""
    runs = [one for name, recipe in recipes.items() for one in runs_of(name, recipe)]
    kept = config.file.parent / "logs" / config.file.stem
    missing = [one for one in runs if not (kept / f"{one.name}.txt").exists()]
    print(f"{len(runs)} runs, of which {len(missing)} are missing")
    began = time.monotonic()
    trained = 0  # tokens
    total = sum(one.tokens for one in missing)
    for number, one in enumerate(missing, start=1):
        folder = config.out / config.file.stem / one.name
        print(f"run {number} of {len(missing)}: {folder}/console.txt", flush=True)
        train(one.command, folder)
        trained += one.tokens
        seconds = (time.monotonic() - began) * (total / trained - 1)
        print(f"{duration(seconds)} left", flush=True)
        steps, values = read_log(folder).get("val", ([], []))
        lines = [format_line(step, "val", loss) for step, loss in zip(steps, values, strict=True)]
        kept.mkdir(parents=True, exist_ok=True)
        write_text(kept / f"{one.name}.txt", "".join(lines))
    losses: Table = {name: {} for name in recipes}
    for one in runs:
        log = kept / f"{one.name}.txt"
        curve = [float(loss) for _, stream, loss in log_lines(log) if stream == "val"]
        if not curve:
            raise UserError(f"{log}: no validation loss: remove it and set eval_every")
        losses[one.recipe].setdefault(one.tokens, {})[one.seed] = curve[-1]
    return losses


def differences(losses: Table, name: str, baseline: str) -> Cells:
    """A recipe's final loss minus the baseline's, for the same seed: it orders the documents."""
    found: Cells = {}
    for tokens, targets in losses[baseline].items():
        for seed, loss in losses[name].get(tokens, {}).items():
            if seed in targets:
                found.setdefault(tokens, {})[seed] = loss - targets[seed]
    return found


def tokens_to_reach(points: dict[int, float], target: float) -> float | None:
    """The number of tokens to train a recipe for, so that it ends at the loss `target`.

    points: {tokens: final loss}. Between them linear in the logarithm of tokens; None outside."""
    for (shorter, high), (longer, low) in pairwise(sorted(points.items())):
        if high >= target >= low:
            drop = (high - low) or 1  # 1: all three losses are equal
            return shorter * (longer / shorter) ** ((high - target) / drop)
    return None


def shares(losses: Table, name: str, baseline: str) -> Cells:
    """The share of the baseline's tokens that a recipe needs for its final loss, by seed."""
    found: Cells = {}
    for tokens, targets in losses[baseline].items():
        for seed, target in targets.items():
            points = {n: cell[seed] for n, cell in losses[name].items() if seed in cell}
            needed = tokens_to_reach(points, target)
            if needed is not None:
                found.setdefault(tokens, {})[seed] = needed / tokens
    return found


def spread(values: Collection[float], interval: bool = False) -> str:
    """Mean ± standard deviation (number); or ± half the mean's 95 % confidence interval."""
    n = len(values)
    mean = f"{statistics.fmean(values):.3f}"
    if n == 1:
        return f"{mean} (1)"
    width = statistics.stdev(values)
    if interval:
        # Student's t; from ten degrees of freedom on an expansion that is exact to 0.2 %
        t = STUDENT_T[n - 2] if n < 11 else 1.96 + 2.37 / (n - 1) + 2.82 / (n - 1) ** 2
        width *= t / n**0.5
    return f"{mean} ± {width:.3f} ({n})"


def table(rows: Table, interval: bool = False) -> str:
    """A Markdown table with a column for each length."""
    lengths = sorted({tokens for cells in rows.values() for tokens in cells})
    titles = [f"{tokens / 1e6:.2f}M tokens" for tokens in lengths]
    lines = ["| recipe | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name, cells in rows.items():
        texts = [spread(cells[n].values(), interval) if n in cells else "" for n in lengths]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def picture(compared: Table, path: Path) -> None:
    """Draws the mean shares by length."""
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
        others = [name for name in recipes if name != baseline]
        rows = {name: found for name in others if (found := differences(losses, name, baseline))}
        if rows:
            title = f"Difference from {baseline}, paired by seed, mean ± 95 % interval (seeds)"
            print(f"{title}\n\n{table(rows, interval=True)}")
        rows = {name: found for name in others if (found := shares(losses, name, baseline))}
        compared |= {f"{name} to {baseline}": found for name, found in rows.items()}
        if rows:
            print(f"Share of the tokens of {baseline} for its final loss\n\n{table(rows)}")
    if compared:
        picture(compared, config.file.with_suffix(".png"))


if __name__ == "__main__":
    run(main)

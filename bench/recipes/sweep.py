"""Trains recipes for several lengths and seeds, and compares their validation losses.

    python bench/recipes/sweep.py bench/recipes/length.toml

The TOML file holds settings of train_gpt2.py: `[common]`, and `[recipes.NAME]`, which overrides
them. Special keys:
- `lengths`, in either: seeds for each number of steps, like {"366" = [1, 2]}
- `warmup_steps` and `warmdown_steps`: fractions of the number of steps
- `script`: the folder of another train_gpt2.py and its support/
- `baselines`, at the top of the file: names of recipes to compare with; by default the first

Missing runs are trained in OUT; the same command continues them. Their flags and validation losses
are kept in logs/FILE/RECIPE-STEPS-SEED.txt, next to the file: after a change of a recipe's script,
remove its logs. FILE.png shows them."""

import contextlib
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cli import flag, parse_args, run
from support.console import duration
from support.errors import UserError
from support.files import atomic_path, write_text
from support.run_log import format_line, log_lines, read_log
from train_gpt2 import ROOT, read_config

# Arguments: a script's folder, and flags. Prints its --total-batch-size.
READ_BATCH = """
import sys
sys.path.insert(0, sys.argv[1])
from support.cli import run
from train_gpt2 import read_config
run(lambda: print(read_config(sys.argv[2:]).total_batch_size))
"""

Curve = dict[int, float]  # {tokens so far: validation loss}
Curves = dict[tuple[str, int], dict[int, Curve]]  # {(recipe, tokens): {seed: curve}}
Losses = dict[tuple[str, int], dict[int, float]]  # {(recipe, tokens): {seed: final loss}}


@dataclass(frozen=True)
class SweepConfig:
    """Trains recipes for several lengths and seeds, and compares them."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file with recipes, lengths and seeds."""
    out: Path = Path("sweeps")
    """Folder for missing runs."""


@dataclass(frozen=True)
class Run:
    name: str  # of its log
    recipe: str
    tokens: int
    batch: int  # tokens per step
    seed: int
    command: list[Any]

    @property
    def title(self) -> str:
        """The first line of its log."""
        return f"# {shlex.join(self.command[2:])}\n"


def read_sweep(path: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """({recipe: the common settings updated by its own}, names of the baselines)."""
    try:
        sweep = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not TOML ({error})") from None
    recipes = sweep.get("recipes", {})
    baselines = sweep.get("baselines", list(recipes)[:1])
    unknown = sweep.keys() - {"common", "recipes", "baselines"}
    if unknown or not recipes or set(baselines) - recipes.keys():
        raise UserError(f"{path}: needs [common], [recipes.NAME] and baselines among these names")
    recipes = {name: {**sweep.get("common", {}), **recipe} for name, recipe in recipes.items()}
    for name, recipe in recipes.items():
        lengths = recipe.get("lengths") or {"": []}
        if not isinstance(lengths, dict) or not all(
            steps.isdecimal() and isinstance(seeds, list) and seeds
            for steps, seeds in lengths.items()
        ):
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


def tokens_per_step(folder: Path, flags: list[str]) -> int:
    """--total-batch-size. Mistakes in the settings show here, before any run."""
    if folder == ROOT:
        return read_config(flags).total_batch_size
    # A fork has other settings and another support/, so it reads them in a separate process.
    command = [sys.executable, "-c", READ_BATCH, folder, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"{folder}/train_gpt2.py: does not take these settings: {' '.join(flags)}")
    return int(done.stdout.split()[-1])


def runs_of(name: str, recipe: dict[str, Any]) -> Iterator[Run]:
    folder = Path(recipe.get("script", ROOT)).absolute()
    script = folder / "train_gpt2.py"
    if not script.is_file() or not (folder / "support").is_dir():
        raise UserError(f"recipe {name}: script {folder}: needs a train_gpt2.py and its support/")
    batch = 0
    for length, seeds in recipe["lengths"].items():
        steps = int(length)
        flags = flags_of(recipe, steps)
        batch = batch or tokens_per_step(folder, flags)
        for seed in seeds:
            command = [sys.executable, script, *flags, "--seed", str(seed)]
            yield Run(f"{name}-{steps}-{seed}", name, steps * batch, batch, seed, command)


def train(one: Run, folder: Path, bar: tqdm) -> None:
    """Starts or continues a run, and moves the bar; its output goes to folder/console.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*one.command, "--resume", "--log-dir", folder]
    before = bar.n
    with (
        open(folder / "console.txt", "ab") as console,
        subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            for step, _, _ in log_lines(folder / "log.txt")[-1:]:
                bar.n = before + step * one.batch
            bar.refresh()
    if process.returncode:
        raise UserError(f"{folder}: status {process.returncode}; console.txt says why")
    bar.n = before + one.tokens


def is_kept(one: Run, kept: Path) -> bool:
    """True if a run has a log in `kept`. Raises an error if that is of other settings."""
    log = kept / f"{one.name}.txt"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    if text.startswith("#") and not text.startswith(one.title):
        raise UserError(f"{log}: kept from other settings; remove it, or rename the recipe")
    return log.exists()


def train_missing(runs: list[Run], out: Path, kept: Path) -> None:
    """Trains the runs without a log in `kept`, and keeps their validation losses there."""
    missing = [one for one in runs if not is_kept(one, kept)]
    print(f"{len(runs)} runs, of which {len(missing)} are missing")
    began = time.monotonic()
    total = sum(one.tokens for one in missing)
    left = ""
    with tqdm(total=total, unit="tok", unit_scale=True, leave=False, disable=None) as bar:
        for number, one in enumerate(missing, start=1):
            folder = out / one.name
            tqdm.write(f"run {number} of {len(missing)}{left}: {folder}/console.txt")
            train(one, folder, bar)
            left = f", {duration((time.monotonic() - began) * (total / bar.n - 1))} left"
            curve = zip(*read_log(folder).get("val", ()), strict=True)
            lines = [format_line(step, "val", loss) for step, loss in curve]
            kept.mkdir(parents=True, exist_ok=True)
            write_text(kept / f"{one.name}.txt", one.title + "".join(lines))


def read_curves(runs: list[Run], kept: Path) -> Curves:
    """The validation losses of all runs."""
    curves = {}
    for one in runs:
        log = kept / f"{one.name}.txt"
        lines = log_lines(log)
        curve = {step * one.batch: float(loss) for step, name, loss in lines if name == "val"}
        if not curve:
            raise UserError(f"{log}: no validation loss: remove it and set eval_every")
        curves.setdefault((one.recipe, one.tokens), {})[one.seed] = curve
    return curves


def shares(losses: Losses, name: str, baseline: str, tokens: int) -> list[float]:
    """The share of the baseline's tokens that a recipe needs for its final loss, for each seed.

    Between lengths, the loss is linear in the logarithm of tokens."""
    found = []
    for seed, target in losses[baseline, tokens].items():
        lengths = [n for other, n in losses if other == name and seed in losses[other, n]]
        points = sorted((-losses[name, n][seed], np.log(n)) for n in lengths)
        if points and points[0][0] <= -target <= points[-1][0]:
            found.append(np.exp(np.interp(-target, *np.transpose(points))) / tokens)
    return found


def spread(values: list[float]) -> str:
    """Mean ± standard deviation (number)."""
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation} ({len(values)})"


def half_width(n: int) -> float:
    """Half of the 95 % confidence interval of a mean of n values, in standard deviations."""
    # Student's t is sqrt(n - 1) tan(angle), with a density proportional to cos(angle)^(n - 2).
    angle = np.linspace(0, np.pi / 2, 100_000)
    share = np.cumsum(np.cos(angle) ** (n - 2))
    return np.sqrt(1 - 1 / n) * np.tan(np.interp(0.95 * share[-1], share, angle))


def difference(values: list[float]) -> str:
    """Mean ± half its 95 % interval (number), and whether that excludes 0: a paired t-test."""
    if not values:
        return "no common seed"
    n = len(values)
    mean = np.mean(values)
    if n < 3:
        return f"{mean:.3f} ({n}), too few to judge"
    deviation = np.std(values, ddof=1)
    enough = (seeds for seeds in range(n, 101) if half_width(seeds) * deviation < abs(mean))
    needed = next(enough, "over 100")
    text = f"{mean:.3f} ± {half_width(n) * deviation:.3f} ({n}), p < 0.05"
    return text if needed == n else f"{text} needs {needed} seeds"


def comparison(losses: Losses, name: str, baseline: str, tokens: int) -> str:
    """A recipe's final losses minus the baseline's, paired by seed, which orders the documents."""
    if name == baseline:
        return "baseline"
    ours = losses[name, tokens]
    theirs = losses[baseline, tokens]
    text = difference([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    share = shares(losses, name, baseline, tokens)
    return f"{text}; {spread(share)} of its tokens" if share else text


def tables(losses: Losses, baselines: list[str]) -> str:
    """A Markdown table for each length."""
    lines = []
    for tokens in sorted({tokens for _, tokens in losses}):
        others = [name for name in baselines if (name, tokens) in losses]
        titles = [f"{tokens:,} tokens", "final loss", *(f"minus {b}'s" for b in others)]
        lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for name in [name for name, n in losses if n == tokens]:
            texts = [name, spread(list(losses[name, tokens].values()))]
            texts += [comparison(losses, name, other, tokens) for other in others]
            lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def picture(runs: dict[str, dict[int, Curve]], baseline: str, path: Path) -> None:
    """Draws each recipe's validation loss over tokens, mean ± standard deviation of its seeds.

    runs: {recipe: {seed: curve}}"""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, curves) in enumerate(runs.items()):
        shared = set.intersection(*map(set, curves.values()))
        # The first twentieth would squeeze the rest.
        x = sorted(tokens for tokens in shared if tokens >= max(shared) / 20)
        losses = np.array([[curve[tokens] for tokens in x] for curve in curves.values()])
        mean = losses.mean(axis=0)
        deviation = losses.std(axis=0, ddof=1) if len(losses) > 1 else 0
        color = "black" if name == baseline else f"C{i}"
        label = f"{name}: {spread(list(losses[:, -1]))}"
        axes.plot(x, mean, "o-", color=color, ms=4, markevery=[-1], label=label)
        axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
    axes.set(xscale="log", xlabel="tokens", ylabel="validation loss, nats per token")
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=EngFormatter(sep=""))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    title = "mean ± standard deviation (seeds)\nblack: the baseline"
    figure.legend(loc="outside right upper", title=title)
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png")


def main(args: list[str] | None = None) -> None:
    config = parse_args(SweepConfig, args=args)
    recipes, baselines = read_sweep(config.file)
    runs = [one for name, recipe in recipes.items() for one in runs_of(name, recipe)]
    kept = config.file.parent / "logs" / config.file.stem
    train_missing(runs, config.out / config.file.stem, kept)
    curves = read_curves(runs, kept)
    losses = {}
    for key, seeds in curves.items():
        losses[key] = {seed: curve[max(curve)] for seed, curve in seeds.items()}
    print("Mean ± standard deviation (seeds); of differences, paired by seed, ± 95 % interval")
    print(tables(losses, baselines))
    if baselines:
        # The baseline's longest runs, of several seeds if there are any.
        lengths = [key for key in curves if key[0] == baselines[0]]
        _, tokens = max(lengths, key=lambda key: (len(curves[key]) > 1, key[1]))
        drawn = {name: seeds for (name, n), seeds in curves.items() if n == tokens}
        picture(drawn, baselines[0], config.file.with_suffix(".png"))


if __name__ == "__main__":
    run(main)

"""Trains recipes for several lengths and seeds, and compares their validation losses.

    python bench/recipes/sweep.py bench/recipes/length.toml

The TOML file holds settings of train_gpt2.py: `[common]`, and `[recipes.NAME]`, which override
them; the first recipe is the baseline. Special keys:
- `lengths`: seeds for each number of steps, like {"366" = [1, 2]}
- `warmup_steps` and `warmdown_steps`: fractions of the number of steps
- `script`: the folder of another train_gpt2.py and its support/

Missing runs are trained in folders of OUT; the same command continues them. Their validation losses
are kept in results.csv, next to the file, by recipe, steps and seed: after a change of a recipe's
script, remove its lines. FILE.png shows them."""

import csv
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cli import flag, parse_args, run, shown
from support.errors import UserError
from support.files import atomic_path
from support.run_log import ROOT, read_log, run_entries
from train_gpt2 import read_config

Run = tuple[str, int, int]  # recipe, number of steps, seed
Curve = dict[int, float]  # step: validation loss


@dataclass(frozen=True)
class SweepConfig:
    """Trains recipes for several lengths and seeds, and compares them."""

    file: Annotated[Path, tyro.conf.Positional]  # TOML file with recipes, lengths and seeds
    out: Path = Path("sweeps")  # folder for the runs


def read_recipes(path: Path) -> dict[str, dict[str, Any]]:
    """{recipe: the common settings, overridden by its own}"""
    try:
        sweep = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not TOML ({error})") from None
    common, named = sweep.pop("common", {}), sweep.pop("recipes", {})
    tables = [common, named, *(named.values() if isinstance(named, dict) else [])]
    if sweep or not named or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{path}: needs [common], [recipes.NAME] and nothing else")
    recipes = {}
    for name, own in named.items():
        recipes[name] = recipe = common | own
        lengths = recipe.get("lengths") or {"": []}
        if not isinstance(lengths, dict) or not all(
            steps.isdecimal() and isinstance(seeds, list) and {*map(type, seeds)} == {int}
            for steps, seeds in lengths.items()
        ):
            raise UserError(f'{path}: recipe {name}: needs lengths = {{"366" = [1]}}')
    return recipes


def command_of(recipe: dict[str, Any], steps: int, seed: int) -> list[str]:
    """train_gpt2.py and its flags for a run."""
    command = [str(Path(recipe.get("script", ROOT)).absolute() / "train_gpt2.py")]
    for key, value in (recipe | {"max_steps": steps, "seed": seed}).items():
        if key in ("warmup_steps", "warmdown_steps"):
            value = round(value * steps)
        if isinstance(value, bool):
            command.append(flag(key if value else f"no_{key}"))
        elif key not in ("lengths", "script"):
            command += [flag(key), str(value)]
    return command


def train(command: list[str], folder: Path, steps: int) -> Curve:
    """Starts or continues a run. Returns its validation losses."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *command, "--resume", "--log-dir", str(folder)]
    # Not subprocess.run, which would kill the run on Ctrl-C before it has saved.
    with (
        open(folder / "console.txt", "ab") as console,
        subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT) as process,
    ):
        status = process.wait()
    if status:
        raise UserError(f"{folder}: status {status}; console.txt says why")
    curve = dict(zip(*read_log(folder).get("val", ((), ())), strict=True))
    if steps not in curve:
        raise UserError(f"{folder}: no validation loss at the end; set eval_every")
    return curve


def read_results(path: Path) -> dict[Run, Curve]:
    results = {}
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = (row["recipe"], int(row["steps"]), int(row["seed"]))
                results.setdefault(key, {})[int(row["step"])] = float(row["loss"])
    return results


def add_result(path: Path, key: Run, curve: Curve) -> None:
    new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["recipe", "steps", "seed", "step", "loss"])
        writer.writerows([*key, step, f"{loss:.6f}"] for step, loss in curve.items())


def train_missing(commands: dict[Run, list[str]], out: Path, path: Path) -> dict[Run, Curve]:
    """Trains the runs that are not in results.csv, and adds them to it. Returns all results."""
    results = read_results(path)
    missing = [one for one in commands if one[1] not in results.get(one, {})]
    folders = {one: out / "-".join(map(str, one)) for one in commands}
    for one, (script, *flags) in commands.items():
        entries = run_entries(folders[one])
        if one in missing:
            if Path(script).parent == ROOT:  # a fork may have other flags
                read_config(flags)  # reports mistakes before any run
        elif entries and entries[0]["command"][1 : len(flags) + 1] != [*map(shown, flags)]:
            remedy = f"remove it and its lines in {path}, or rename the recipe"
            raise UserError(f"{folders[one]}: a run with other settings; {remedy}")
    print(f"{len(commands)} runs, of which {len(missing)} are missing")
    kept = [one for one in commands if one not in missing and not run_entries(folders[one])]
    if kept:
        print(
            f"{len(kept)} have no folder in {out}/: taken from {path}, whatever their settings were"
        )
    for number, one in enumerate(missing, start=1):
        print(f"run {number} of {len(missing)}: {folders[one]}/console.txt", flush=True)
        results[one] = train(commands[one], folders[one], one[1])
        add_result(path, one, results[one])
    return {one: results[one] for one in commands}


def half_interval(differences: list[float]) -> float:
    """Half of the 95 % confidence interval of their mean."""
    n = len(differences)
    # Student's t is sqrt(n - 1) tan(angle), with a density proportional to cos(angle)^(n - 2).
    angle = np.linspace(0, np.pi / 2, 100_000)
    share = np.cumsum(np.cos(angle) ** (n - 2))
    t = np.sqrt(n - 1) * np.tan(np.interp(0.95 * share[-1], share, angle))
    return t * np.std(differences, ddof=1) / np.sqrt(n)


def spread(values: list[float]) -> str:
    """Mean ± standard deviation (number)"""
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation} ({len(values)})"


def difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Mean ± half its 95 % interval (number) of the differences, paired by seed.

    A seed has the same data order and, for the same model, the same initial weights."""
    found = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(found) < 2:
        return f"{found[0]:.3f} (1)" if found else "no common seed"
    return f"{np.mean(found):.3f} ± {half_interval(found):.3f} ({len(found)})"


def table(results: dict[Run, Curve]) -> str:
    """A Markdown table for each length."""
    losses = {}  # {steps: {recipe: {seed: final loss}}}
    for (name, steps, seed), curve in results.items():
        losses.setdefault(steps, {}).setdefault(name, {})[seed] = curve[steps]
    baseline = next(iter(results))[0]
    lines = []
    for steps, recipes in sorted(losses.items()):
        lines += [f"| {steps:,} steps | final loss | minus {baseline}'s |", "|---|---|---|"]
        for name, seeds in recipes.items():
            text = "baseline"
            if name != baseline:
                text = difference(seeds, recipes.get(baseline, {}))
            lines.append(f"| {name} | {spread(list(seeds.values()))} | {text} |")
        lines.append("")
    return "\n".join(lines)


def picture(results: dict[Run, Curve], path: Path) -> None:
    """Draws the baseline's longest runs, of several seeds if there are any, and all others of that
    length: mean ± standard deviation of the seeds."""
    from matplotlib.figure import Figure

    baseline = next(iter(results))[0]
    lengths = [steps for name, steps, _ in results if name == baseline]
    length = max(lengths, key=lambda steps: (lengths.count(steps) > 1, steps))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(name for name, steps, _ in results if steps == length)):
        curves = [curve for one, curve in results.items() if one[:2] == (name, length)]
        shared = set.intersection(*map(set, curves))
        x = sorted(step for step in shared if step >= length / 20)  # earlier ones squeeze the rest
        losses = np.array([[curve[step] for step in x] for curve in curves])
        mean = losses.mean(axis=0)
        deviation = losses.std(axis=0, ddof=1) if len(losses) > 1 else 0
        color = "black" if name == baseline else f"C{i}"
        axes.plot(x, mean, "o-", color=color, ms=3, label=f"{name}: {spread(losses[:, -1])}")
        axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
    axes.set(xlabel="steps", ylabel="validation loss, nats per token")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", title="mean ± standard deviation (seeds)")
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png")


def main(args: list[str] | None = None) -> None:
    config = parse_args(SweepConfig, args=args)
    recipes = read_recipes(config.file)
    try:
        commands = {
            (name, int(steps), seed): command_of(recipe, int(steps), seed)
            for name, recipe in recipes.items()
            for steps, seeds in recipe["lengths"].items()
            for seed in seeds
        }
    except (TypeError, ValueError) as error:
        problem = f"warmup_steps or warmdown_steps is no number, or script no path ({error})"
        raise UserError(f"{config.file}: {problem}") from None
    results = train_missing(commands, config.out, config.file.with_name("results.csv"))
    print("Mean ± standard deviation (seeds); of differences, paired by seed, ± 95 % interval\n")
    print(table(results))
    picture(results, config.file.with_suffix(".png"))


if __name__ == "__main__":
    run(main)

"""Compares codes or recipes over several seeds: is the idea better, or was it luck?

    python compare.py --code train_gpt2.py train_rope.py --seeds 3 -- --preset shakespeare
    python compare.py --seeds 5 -- --preset shakespeare -- -- --max-lr 1e-2 -- --max-lr 2e-2

The first -- is followed by flags for all runs. Each further -- begins a recipe, with flags of its
own; the first recipe of the second example has none. Each code is trained with each recipe, and the
first of them is the baseline.

The runs are folders in --out. The same command goes on where it was stopped, and trains only what
is missing. At the end it prints the final validation losses, and the differences from the baseline.
These are paired by seed: with the same seed two runs read the same tokens in the same order, and if
their models have the same parameters, they start from the same weights."""

import contextlib
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.command_line import flag, parse_args, shown
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, locked, sha256
from support.log_txt import read_log
from support.run_json import run_entries

FIRST_SEED = 1337  # the default of train_gpt2.py

Curve = dict[int, float]  # {step: validation loss}


@dataclass(frozen=True)
class CompareConfig:
    """Trains codes or recipes over several seeds and compares their validation losses."""

    code: tuple[Path, ...] = (ROOT / "train_gpt2.py",)  # train_gpt2.py, and forks of it
    seeds: int = 3  # runs of each; their seeds are 1337, 1338, …
    out: Path = Path("compared")  # folder for the runs and the picture
    nproc_per_node: int = 1  # processes of a run; above 1 they are started by torchrun


@dataclass(frozen=True)
class Variant:
    """A code with a recipe."""

    name: str
    code: Path
    flags: list[str]  # the common ones, then the recipe's

    def folder(self, out: Path, seed: int) -> Path:
        """The log folder of a run."""
        letters = [char if char.isalnum() or char in "_.-" else "_" for char in self.name]
        return out / "".join(letters).strip("_-") / f"seed_{seed}"

    def command(self, out: Path, seed: int) -> list[str]:
        """The script and its flags."""
        log_dir = str(self.folder(out, seed))
        return [str(self.code), *self.flags, "--seed", str(seed), "--resume", "--log-dir", log_dir]


def read_variants(codes: tuple[Path, ...], words: list[str]) -> list[Variant]:
    """Each code with each recipe. `words` follow the first -- on the command line."""
    common, *recipes = split_at_dashes(words)
    variants = []
    for code in codes:
        for recipe in recipes or [[]]:
            # The name says what differs: the code, the recipe, or both.
            parts = [code.stem] if len(codes) > 1 or not recipe else []
            parts += [shlex.join(recipe)] if recipe else []
            variants.append(Variant(" ".join(parts), code, common + recipe))
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name}: given twice; codes need different names")
    return variants


def split_at_dashes(words: list[str]) -> list[list[str]]:
    """[a, b, --, c] -> [[a, b], [c]]"""
    parts = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


# --------------------------------------------------------------------------------------------------
# Checks, before the first run


def check(variants: list[Variant], seeds: range, out: Path) -> None:
    """UserError if a code or its flags are wrong, or if `out` has a run of others."""
    for variant in variants:
        if variant.code.suffix != ".py" or not variant.code.is_file():
            raise UserError(f"--code {variant.code}: not a Python file")
        given = {word.split("=")[0].replace("_", "-") for word in variant.flags}  # --seed=1 as well
        for own in ("--seed", "--log-dir", "--resume", "--plan"):
            if own in given:
                raise UserError(f"{own}: compare.py sets it; see --seeds and --out")
        for seed in seeds:
            folder = variant.folder(out, seed)
            for entry in run_entries(folder)[-1:]:
                problem = ""
                if entry["command"] != [shown(word) for word in variant.command(out, seed)]:
                    problem = "was trained with other flags"
                if entry.get("script_sha256") != sha256(variant.code):
                    problem = f"was trained by {variant.code.name} as it was before a change"
                if problem:
                    raise UserError(f"{folder}: {problem}; remove it, or choose another --out")
        # --plan reads the flags and makes the model, without training it.
        command = [sys.executable, str(variant.code), *variant.flags, "--plan"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            command = shlex.join(["python", shown(variant.code), *variant.flags, "--plan"])
            problem = last_line(done.stderr).removeprefix("error: ")
            if problem.startswith("╰"):  # the end of a box, in which tyro explains a wrong flag
                print(done.stderr, end="", file=sys.stderr)
                problem = "see above"
            raise UserError(f"`{command}` fails: {problem or f'status {done.returncode}'}")


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


# --------------------------------------------------------------------------------------------------
# Training


def train(variant: Variant, seed: int, out: Path, processes: int) -> str:
    """Starts a run, or goes on with it. Returns why it failed, or ""."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc_per_node={processes}"]
    folder = variant.folder(out, seed)
    console = folder.with_suffix(".txt")
    wait_until_free(folder)
    with (
        open(console, "ab") as output,
        subprocess.Popen(
            start + variant.command(out, seed), stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            status = process.wait()
        except BaseException:  # Ctrl-C, which the run receives as well, or a stop signal
            process.terminate()  # asks the run to save; leaving `with` waits for it
            raise
    if status == 0:
        return ""
    if status in (130, 143):
        raise RunError(f"{folder}: was stopped; the same command goes on")
    line = last_line(console.read_text(encoding="utf-8", errors="replace"))
    return f"status {status}, {line.removeprefix('error: ')} ({shown(console)})"


def wait_until_free(folder: Path) -> None:
    """Waits for a run that is still going on, as it may be after `kill -9` of compare.py."""
    said = False
    while True:
        with contextlib.suppress(UserError), locked(folder, "in use"):
            return
        if not said:
            print(f"waiting for the run that is going on in {folder}", flush=True)
            said = True
        time.sleep(1)


def validation_losses(folder: Path) -> Curve:
    """The validation losses of a run, or {} if it is not finished."""
    curve = dict(zip(*read_log(folder).get("val", ((), ())), strict=True))
    for entry in run_entries(folder)[-1:]:
        if entry["config"]["max_steps"] in curve:
            return curve
    return {}


def train_all(
    variants: list[Variant], seeds: range, out: Path, processes: int
) -> tuple[dict[str, dict[int, Curve]], int]:
    """Trains what is missing. Returns ({variant: {seed: its losses}}, number of failed runs)."""
    found: dict[str, dict[int, Curve]] = {variant.name: {} for variant in variants}
    failed = 0
    number = 0
    for seed in seeds:  # all variants of a seed, then the next, since they are compared by seed
        for variant in variants:
            number += 1
            name = f"run {number} of {len(seeds) * len(variants)}: {variant.name}, seed {seed}"
            folder = variant.folder(out, seed)
            curve, problem = validation_losses(folder), ""
            if not curve:
                print(f"{name} …", flush=True)
                problem = train(variant, seed, out, processes)
                curve = validation_losses(folder)
            if not problem and not curve:
                problem = "no validation loss at its end; --eval-every must not be 0"
            if problem:
                failed += 1
                print(f"error: {name}: {problem}", file=sys.stderr, flush=True)
            else:
                found[variant.name][seed] = curve
                print(f"{name}: {final(curve):.4f}", flush=True)
    return found, failed


# --------------------------------------------------------------------------------------------------
# Results


def final(curve: Curve) -> float:
    return curve[max(curve)]


def t_quantile(degrees: int) -> float:
    """Student's t that 95 % of the values lie within, on both sides of 0."""
    # t is sqrt(degrees) tan(angle), where the angle has a density of cos(angle)^(degrees - 1).
    angle = np.linspace(0, np.pi / 2, 100_000)
    share = np.cumsum(np.cos(angle) ** (degrees - 1))
    return float(np.sqrt(degrees) * np.tan(np.interp(0.95 * share[-1], share, angle)))


def mean_and_deviation(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{deviation}"


def difference(ours: dict[int, Curve], theirs: dict[int, Curve]) -> str:
    """The mean difference of the final losses of the same seeds, ± half its 95 % interval."""
    values = [final(ours[seed]) - final(theirs[seed]) for seed in ours if seed in theirs]
    if len(values) < 2:
        return f"{values[0]:+.4f}" if values else "no common seed"
    n = len(values)
    half = t_quantile(n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return f"{np.mean(values):+.4f} ± {half:.4f}"


def milliseconds(folder: Path) -> float:
    """The median time of a step. The first ten may compile."""
    _, values = read_log(folder).get("ms", ((), ()))
    return float(np.median(values[10:] or values or [np.nan]))


def print_table(
    variants: list[Variant], found: dict[str, dict[int, Curve]], out: Path, seeds: range
) -> None:
    baseline = variants[0].name
    print("\nFinal validation loss in nats per token, mean ± standard deviation.")
    print("The difference is the mean over the seeds, ± half of its 95 % interval.\n")
    print(f"| | seeds | loss | difference from {baseline} | ms per step |")
    print("|---|---|---|---|---|")
    for variant in variants:
        curves = found[variant.name]
        cells = [variant.name, str(len(curves)), "–", "–", "–"]
        if curves:
            cells[2] = mean_and_deviation([final(curve) for curve in curves.values()])
            if variant.name != baseline:
                cells[3] = difference(curves, found[baseline])
            speeds = [milliseconds(variant.folder(out, seed)) for seed in curves]
            cells[4] = f"{np.median(speeds):,.0f}"
        print(f"| {' | '.join(cells)} |")
    if len(seeds) == 1:
        print("\nOne seed says nothing about chance: --seeds 3 or more give an interval.")
    elif len(seeds) == 2:
        wide = f"{t_quantile(1):.1f}"
        print(f"\nTwo seeds have one degree of freedom: an interval of ±{wide} standard errors,")
        print(f"where three have ±{t_quantile(2):.1f} and five ±{t_quantile(4):.1f}.")


def draw(variants: list[Variant], found: dict[str, dict[int, Curve]], path: Path) -> None:
    """Draws the mean curve of each variant, with a band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, variant in enumerate(variants):
        curves = [*found[variant.name].values()]
        if not curves:
            continue
        steps = set.intersection(*(set(curve) for curve in curves))
        x = sorted(step for step in steps if step >= max(steps) / 20)  # earlier ones are far above
        losses = np.array([[curve[step] for step in x] for curve in curves])  # (seeds, steps)
        mean = losses.mean(axis=0)
        deviation = losses.std(axis=0, ddof=1) if len(losses) > 1 else 0
        axes.plot(x, mean, "o-", color=f"C{i}", ms=3, label=variant.name)
        axes.fill_between(x, mean - deviation, mean + deviation, color=f"C{i}", alpha=0.2, lw=0)
    axes.set(xlabel="steps", ylabel="validation loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(title="mean ± standard deviation")
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png")


def main(args: list[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else args
    end = args.index("--") if "--" in args else len(args)
    config = parse_args(CompareConfig, args[:end])
    for name in ("seeds", "nproc_per_node"):
        if getattr(config, name) < 1:
            raise UserError(f"{flag(name)} {getattr(config, name)}: must be at least 1")
    variants = read_variants(config.code, args[end + 1 :])
    seeds = range(FIRST_SEED, FIRST_SEED + config.seeds)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with locked(config.out, f"{config.out}: another compare.py uses it; choose another --out"):
        check(variants, seeds, config.out)
        found, failed = train_all(variants, seeds, config.out, config.nproc_per_node)
        print_table(variants, found, config.out, seeds)
        if any(found.values()):
            draw(variants, found, config.out / "curves.png")
            print(f"\ncurves: {config.out / 'curves.png'}")
    return int(failed > 0)


if __name__ == "__main__":
    run_and_exit(main)

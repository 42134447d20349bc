"""Compares codes or recipes over several seeds: is the idea better, or was it luck?

    python compare.py --code train_gpt2.py train_rope.py --seeds 3 -- --preset shakespeare
    python compare.py --seeds 5 -- --preset shakespeare -- -- --max-lr 1e-2 -- --max-lr 2e-2

The first -- is followed by flags for all runs. Each further -- begins a recipe, with flags of its
own; the first recipe of the second example has none. Each code is trained with each recipe, and the
first of them is the baseline.

A flag that only one code knows is given with that code, in quotes:

    python compare.py --code train_gpt2.py "train_ema.py --ema-decay 0.99" -- --preset shakespeare

The runs are folders in --out. The same command goes on where it was stopped, and trains only what
is missing. At the end it prints the final validation losses, or another stream of log.txt, and the
differences from the baseline. These are paired by seed: with the same seed two runs read the same
tokens in the same order, and if their models have the same parameters, they start from the same
weights."""

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support.command_line import flag, parse_args, shown, warn
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, locked
from support.run_files import read_log, run_entries

FIRST_SEED = 1337  # the default of train_gpt2.py

Curve = dict[int, float]  # {step: value of a stream of log.txt}


@dataclass(frozen=True)
class CompareConfig:
    """Trains codes or recipes over several seeds and compares their validation losses."""

    # train_gpt2.py and forks of it; "fork.py --flag 1", in quotes, has a flag for this code alone
    code: tuple[str, ...] = (shlex.quote(str(ROOT / "train_gpt2.py")),)
    seeds: int = 3  # runs of each; their seeds are 1337, 1338, …
    stream: str = "val"  # what is compared: a stream of log.txt, such as val, bpb or hella
    out: Path = Path("compared")  # folder for the runs and the picture
    nproc_per_node: int = 1  # processes of a run; above 1 they are started by torchrun


@dataclass
class Variant:
    """A code with a recipe."""

    name: str
    code: Path
    flags: list[str]  # the common ones, then those of the code, then those of the recipe
    folder: Path  # the log folders of its runs are in there
    curves: dict[int, Curve] = field(default_factory=dict)  # {seed: the stream that is compared}

    def log_dir(self, seed: int) -> Path:
        return self.folder / f"seed_{seed}"

    def command(self, seed: int) -> list[str]:
        """The script and its flags."""
        log_dir = str(self.log_dir(seed))
        return [str(self.code), *self.flags, "--seed", str(seed), "--resume", "--log-dir", log_dir]

    def finals(self) -> dict[int, float]:
        """{seed: the value after the last step}"""
        return {seed: curve[max(curve)] for seed, curve in self.curves.items()}


def read_variants(config: CompareConfig, words: list[str]) -> list[Variant]:
    """Each code with each recipe. `words` follow the first -- on the command line."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    common, *recipes = parts
    variants = []
    for text in config.code:
        file, *own = shlex.split(text)
        code = Path(file)
        for recipe in recipes or [[]]:
            # The name says what differs: the code with its flags, the recipe, or both.
            differs = [code.stem, *own] if len(config.code) > 1 or not recipe else []
            name = shlex.join(differs + recipe)
            letters = [char if char.isalnum() or char in "_.-" else "_" for char in name]
            folder = config.out / "".join(letters).strip("_-")
            if folder in [variant.folder for variant in variants]:
                raise UserError(f"{name}: given twice; codes need different names")
            variants.append(Variant(name, code, common + own + recipe, folder))
    return variants


# --------------------------------------------------------------------------------------------------
# Checks


def check(variant: Variant, seeds: range) -> None:
    """UserError if a code or its flags are wrong, or if a folder has another run."""
    if variant.code.suffix != ".py" or not variant.code.is_file():
        raise UserError(f"--code {variant.code}: not a Python file")
    given = {word.split("=")[0].replace("_", "-") for word in variant.flags}  # --seed=1 as well
    for own in ("--seed", "--log-dir", "--resume", "--plan"):
        if own in given:
            raise UserError(f"{own}: compare.py sets it; see --seeds and --out")
    check_runs(variant, seeds)


def check_runs(variant: Variant, seeds: range) -> None:
    """UserError if a folder has a run with other flags, or of a code that has changed since."""
    for seed in seeds:
        log_dir = variant.log_dir(seed)
        # From another working folder the script and the log folder have other paths.
        _, *flags, _ = (shown(word) for word in variant.command(seed))
        for entry in run_entries(log_dir):
            theirs = [word for word in entry["command"][1:] if Path(word).name != log_dir.name]
            if sorted(theirs) != sorted(flags):  # in any order
                problem = f"was trained with other flags, by `{shlex.join(entry['command'])}`"
                raise UserError(f"{log_dir}: {problem}; use those, or choose another --out")
        if changed := changed_files(log_dir / "code", variant.code):
            problem = f"was trained before a change of {', '.join(changed)}"
            raise UserError(f"{log_dir}: {problem}; remove it, or choose another --out")


def changed_files(kept: Path, code: Path) -> list[str]:
    """Return the files of a run's code/ that have changed since, or are gone."""
    changed = []
    for copy in sorted(path for path in kept.rglob("*") if path.is_file()):
        name = copy.relative_to(kept)
        file = code.parent / name  # Python looks there first when it imports a module
        if not file.is_file():
            file = ROOT / name
        if not file.is_file() or file.read_bytes() != copy.read_bytes():
            changed.append(name.as_posix())
    return changed


# --------------------------------------------------------------------------------------------------
# Training


def train_all(variants: list[Variant], seeds: range, config: CompareConfig) -> int:
    """Trains what is missing, and enters the curves into the variants.

    Returns how many runs have failed, or lack the stream."""
    # All variants of a seed are trained before those of the next, since they are compared by seed.
    runs = [(variant, seed) for seed in seeds for variant in variants]
    failed = []  # names of variants
    for number, (variant, seed) in enumerate(runs, start=1):
        name = f"run {number} of {len(runs)}: {variant.name}, seed {seed}"
        problem = ""
        curves = read_curves(variant.log_dir(seed))
        if not curves:
            if variant.name in failed:  # it would probably fail with each seed
                continue
            check_runs(variant, seeds)  # The code may have been edited during the last run.
            console = variant.log_dir(seed).with_suffix(".txt")
            print(f"{name}, whose output goes to {shown(console)} …", flush=True)
            status = train(variant.command(seed), console, config.nproc_per_node)
            if status:
                problem = f"status {status}; the end of {shown(console)} says why"
            curves = read_curves(variant.log_dir(seed))
        if not problem and config.stream not in curves:
            problem = f"{variant.log_dir(seed)}/log.txt has no {config.stream} at the last step"
            problem += "; see --stream, --eval-every and --hellaswag-every"
        if problem:
            failed.append(variant.name)
            problem += f"; later seeds of {variant.name} are not trained"
            print(f"error: {name}: {problem}", file=sys.stderr, flush=True)
        else:
            variant.curves[seed] = curves[config.stream]
            print(f"{name}: {variant.finals()[seed]:.4f}", flush=True)
    return len(failed)


def read_curves(log_dir: Path) -> dict[str, Curve]:
    """{stream: its curve}, of the streams that have a value after the last step of a run.

    There are none if the run has not finished."""
    entries = run_entries(log_dir)
    if not entries:
        return {}
    last = entries[-1]["config"]["max_steps"]
    log = read_log(log_dir)
    curves = {name: dict(zip(steps, values, strict=True)) for name, (steps, values) in log.items()}
    return {name: curve for name, curve in curves.items() if last in curve}


def train(command: list[str], console: Path, processes: int) -> int:
    """Starts a run, or goes on with it. Returns its exit status.

    What it prints is appended to the file `console`."""
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc_per_node={processes}"]
    console.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(console, "ab") as output,
        subprocess.Popen(start + command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            return process.wait()
        except BaseException:  # Ctrl-C, which the run receives as well, or a stop signal
            process.terminate()  # asks the run to save; leaving `with` waits for it
            raise


# --------------------------------------------------------------------------------------------------
# Results


# Student's t that 95 % of the values lie within, on both sides of 0, for 1, 2, … degrees.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def mean_and_deviation(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{deviation}"


def difference(variant: Variant, baseline: Variant) -> str:
    """The mean difference of the final values of the same seeds, ± half its 95 % interval."""
    ours, theirs = variant.finals(), baseline.finals()
    values = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    n = len(values)
    if n == 0:
        return "no common seed"
    if n == 1:
        return f"{values[0]:+.4f}"
    t = T_QUANTILES[min(n - 1, len(T_QUANTILES)) - 1]  # with more seeds it is slightly too large
    half = t * np.std(values, ddof=1) / np.sqrt(n)
    return f"{np.mean(values):+.4f} ± {half:.4f}"


def milliseconds(log_dir: Path) -> float:
    """The median time of a step. The first ten may compile."""
    _, values = read_log(log_dir).get("ms", ((), ()))
    return float(np.median(values[10:] or values or [np.nan]))


def quantity(stream: str) -> str:
    """What a stream is, for a caption."""
    return "validation loss in nats per token" if stream == "val" else stream


def print_table(variants: list[Variant], config: CompareConfig) -> None:
    baseline = variants[0]
    print(f"\nFinal {quantity(config.stream)}, mean ± standard deviation.")
    print("The difference is the mean over the seeds, ± half of its 95 % interval.\n")
    heading = "loss" if config.stream == "val" else config.stream
    print(f"| | seeds | {heading} | difference from {baseline.name} | ms per step |")
    print("|---|---|---|---|---|")
    for variant in variants:
        cells = [variant.name, str(len(variant.curves)), "–", "–", "–"]
        if variant.curves:
            cells[2] = mean_and_deviation([*variant.finals().values()])
            if variant is not baseline:
                cells[3] = difference(variant, baseline)
            speeds = [milliseconds(variant.log_dir(seed)) for seed in variant.curves]
            cells[4] = f"{np.median(speeds):,.0f}"
        print(f"| {' | '.join(cells)} |")
    if config.seeds == 1:
        print("\nOne seed says nothing about chance: --seeds 3 or more give an interval.")


def warn_of_other_tokens(variants: list[Variant]) -> None:
    """Warns if the runs have vocabularies of different sizes, by their run.json."""
    sizes = {}
    for variant in variants:
        for seed in variant.curves:
            sizes[variant.name] = run_entries(variant.log_dir(seed))[-1]["vocab_size"]
    if len({*sizes.values()}) > 1:
        problem = f"the vocabularies have different sizes ({sizes}), so losses per token"
        warn(f"{problem} do not compare; --stream bpb compares bits per byte")


def draw(variants: list[Variant], stream: str, path: Path) -> None:
    """Draws the mean curve of each variant, with a band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, variant in enumerate(variants):
        curves = [*variant.curves.values()]
        if not curves:
            continue
        steps = set.intersection(*(set(curve) for curve in curves))
        x = sorted(step for step in steps if step >= max(steps) / 20)  # earlier ones are far above
        values = np.array([[curve[step] for step in x] for curve in curves])  # (seeds, steps)
        mean = values.mean(axis=0)
        deviation = values.std(axis=0, ddof=1) if len(values) > 1 else 0
        axes.plot(x, mean, "o-", color=f"C{i}", ms=3, label=variant.name)
        axes.fill_between(x, mean - deviation, mean + deviation, color=f"C{i}", alpha=0.2, lw=0)
    axes.set(xlabel="steps", ylabel=quantity(stream))
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
    variants = read_variants(config, args[end + 1 :])
    seeds = range(FIRST_SEED, FIRST_SEED + config.seeds)
    for name in ("SIGTERM", "SIGUSR1"):  # Slurm can send the second. Windows does not have it.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(143))
    in_use = f"{config.out}: another compare.py uses it; wait for its end, or choose another --out"
    with locked(config.out, in_use):
        for variant in variants:
            check(variant, seeds)
        failed = train_all(variants, seeds, config)
        print_table(variants, config)
        if config.stream == "val":
            warn_of_other_tokens(variants)
        if any(variant.curves for variant in variants):
            picture = config.out / "curves.png"
            draw(variants, config.stream, picture)
            print(f"\ncurves: {picture}")
    return int(failed > 0)


if __name__ == "__main__":
    run_and_exit(main)

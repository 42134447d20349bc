"""Compare scripts or recipes over several seeds: is the idea better, or was it luck?

    python compare.py --code train_gpt2.py train_rope.py --seeds 3 -- --preset shakespeare
    python compare.py --seeds 5 -- --preset shakespeare -- -- --max-lr 1e-2 -- --max-lr 2e-2

Flags after the first -- apply to all runs. Each later -- begins a recipe, a list of additional
flags. The first recipe of the second example is empty. Every script is trained with every recipe,
and the first combination is the baseline.

Quote a script together with flags that only it accepts:

    python compare.py --code train_gpt2.py "train_ema.py --ema-decay 0.99" -- --preset shakespeare

Each run has its own folder in --out. Rerunning the command trains only what is missing. At the end,
compare.py prints the final validation losses, or the final values of another stream of log.txt, and
the differences from the baseline. Differences are paired by seed, because two runs with the same
seed read the same tokens in the same order, and start from the same weights if their models have
the same parameters."""

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from support.command_line import display_path, flag, parse_args, warn
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, locked
from support.run_files import read_log, run_entries

FIRST_SEED = 1337  # the default of train_gpt2.py

Curve = dict[int, float]  # {step: value} of a stream in log.txt


@dataclass(frozen=True)
class CompareConfig:
    """Train scripts or recipes over several seeds, and compare their validation losses."""

    # train_gpt2.py and its forks; quote a script with its own flags: "fork.py --flag 1"
    code: tuple[str, ...] = (shlex.quote(str(ROOT / "train_gpt2.py")),)
    seeds: int = 3  # runs per variant, with seeds 1337, 1338, …
    stream: str = "val"  # stream of log.txt to compare, e.g. val, bpb or hella
    out: Path = Path("compared")  # folder for the runs and curves.png
    nproc_per_node: int = 1  # processes per run; above 1, torchrun starts them


@dataclass
class Variant:
    """A script with a recipe."""

    name: str
    code: Path  # the script
    flags: list[str]  # flags for all runs, then the script's, then the recipe's
    folder: Path  # contains the log folders of its runs
    curves: dict[int, Curve] = field(default_factory=dict)  # {seed: curve of the compared stream}

    def log_dir(self, seed: int) -> Path:
        return self.folder / f"seed_{seed}"

    def command(self, seed: int) -> list[str]:
        """Return the script and its flags for a run."""
        log_dir = str(self.log_dir(seed))
        return [str(self.code), *self.flags, "--seed", str(seed), "--resume", "--log-dir", log_dir]

    def finals(self) -> dict[int, float]:
        """Return {seed: value after the last step}."""
        return {seed: curve[max(curve)] for seed, curve in self.curves.items()}


def read_variants(config: CompareConfig, words: list[str]) -> list[Variant]:
    """Return every script with every recipe. `words` follow the first -- on the command line."""
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
            # Name a variant by what distinguishes it: script and flags, recipe, or both.
            differs = [code.stem, *own] if len(config.code) > 1 or not recipe else []
            name = shlex.join(differs + recipe)
            letters = [char if char.isalnum() or char in "_.-" else "_" for char in name]
            folder = config.out / "".join(letters).strip("_-")
            if folder in [variant.folder for variant in variants]:
                raise UserError(f"{name}: given twice; scripts and recipes must differ in name")
            variants.append(Variant(name, code, common + own + recipe, folder))
    return variants


# --------------------------------------------------------------------------------------------------
# Checks


def check(variant: Variant, seeds: range) -> None:
    """Raise UserError if a script or its flags are invalid, or if a folder holds another run."""
    if variant.code.suffix != ".py" or not variant.code.is_file():
        raise UserError(f"--code {variant.code}: not a Python file")
    given = {word.split("=")[0].replace("_", "-") for word in variant.flags}  # also --seed=1
    for reserved in ("--seed", "--log-dir", "--resume", "--plan"):
        if reserved in given:
            raise UserError(f"{reserved}: not allowed here; remove it, and see --seeds and --out")
    check_runs(variant, seeds)


def check_runs(variant: Variant, seeds: range) -> None:
    """Raise UserError if a run was trained with other flags, or before its code changed."""
    for seed in seeds:
        log_dir = variant.log_dir(seed)
        # Ignore the paths of the script and the log folder: they depend on the working directory.
        _, *flags, _ = (display_path(word) for word in variant.command(seed))
        for entry in run_entries(log_dir):
            past_flags = [word for word in entry["command"][1:] if Path(word).name != log_dir.name]
            if sorted(past_flags) != sorted(flags):  # in any order
                problem = f"was trained with different flags, by `{shlex.join(entry['command'])}`"
                raise UserError(f"{log_dir}: {problem}; use those, or choose another --out")
        if changed := changed_files(log_dir / "code", variant.code):
            problem = f"was trained before {', '.join(changed)} changed"
            raise UserError(f"{log_dir}: {problem}; remove it, or choose another --out")


def changed_files(copies: Path, script: Path) -> list[str]:
    """Return the files in `copies`, a run's code/, that have since changed or disappeared."""
    changed = []
    for copy in sorted(path for path in copies.rglob("*") if path.is_file()):
        name = copy.relative_to(copies)
        file = script.parent / name  # Python looks for imports next to the script first
        if not file.is_file():
            file = ROOT / name
        if not file.is_file() or file.read_bytes() != copy.read_bytes():
            changed.append(name.as_posix())
    return changed


# --------------------------------------------------------------------------------------------------
# Training


def train_all(variants: list[Variant], seeds: range, config: CompareConfig) -> int:
    """Train the missing runs, and set the variants' curves.

    Returns the number of runs that failed, or whose log lacks the stream."""
    # Train all variants with one seed before the next, because comparisons are paired by seed.
    runs = [(variant, seed) for seed in seeds for variant in variants]
    failed = []  # names of the variants of failed runs
    for number, (variant, seed) in enumerate(runs, start=1):
        name = f"run {number} of {len(runs)}: {variant.name}, seed {seed}"
        problem = ""
        curves = read_curves(variant.log_dir(seed))
        if not curves:
            if variant.name in failed:  # it would probably fail with any seed
                continue
            check_runs(variant, seeds)  # the code may have been edited during the last run
            console = variant.log_dir(seed).with_suffix(".txt")
            print(f"{name}, output in {display_path(console)} …", flush=True)
            status = train(variant.command(seed), console, config.nproc_per_node)
            if status:
                problem = f"exit status {status}; see the end of {display_path(console)}"
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
    """Return {stream: curve} for the streams with a value after the last step.

    Returns {} if the run has not finished."""
    entries = run_entries(log_dir)
    if not entries:
        return {}
    last = entries[-1]["config"]["max_steps"]
    log = read_log(log_dir)
    curves = {name: dict(zip(steps, values, strict=True)) for name, (steps, values) in log.items()}
    return {name: curve for name, curve in curves.items() if last in curve}


def train(command: list[str], console: Path, processes: int) -> int:
    """Start or continue a run. Return its exit status.

    Appends its output to the file `console`."""
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
        except BaseException:  # a stop signal, or Ctrl-C, which the run also receives
            process.terminate()  # lets the run save and exit; leaving `with` waits for that
            raise


# --------------------------------------------------------------------------------------------------
# Results


# Two-sided 95% critical values of Student's t distribution, for 1, 2, … degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


def mean_and_deviation(values: list[float]) -> str:
    """Format the mean and the sample standard deviation."""
    deviation = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{deviation}"


def difference(variant: Variant, baseline: Variant) -> str:
    """Format the mean paired difference of final values, with its 95% confidence interval."""
    finals, baselines = variant.finals(), baseline.finals()
    values = [finals[seed] - baselines[seed] for seed in finals if seed in baselines]
    n = len(values)
    if n == 0:
        return "no common seed"
    if n == 1:
        return f"{values[0]:+.4f}"
    t = T_QUANTILES[min(n - 1, len(T_QUANTILES)) - 1]  # slightly too large beyond the table
    half = t * np.std(values, ddof=1) / np.sqrt(n)
    return f"{np.mean(values):+.4f} ± {half:.4f}"


def milliseconds(log_dir: Path) -> float:
    """Return the median step time, excluding the first ten steps, which may include compilation."""
    _, values = read_log(log_dir).get("ms", ((), ()))
    return float(np.median(values[10:] or values or [np.nan]))


def quantity(stream: str) -> str:
    """Return the name and unit of a stream, for captions."""
    return "validation loss in nats per token" if stream == "val" else stream


def print_table(variants: list[Variant], config: CompareConfig) -> None:
    """Print the results as a Markdown table."""
    baseline = variants[0]
    print(f"\nFinal {quantity(config.stream)}, mean ± standard deviation.")
    print("Differences are means over seeds, ± half the width of a 95% confidence interval.\n")
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
        print("\nOne seed says nothing about chance; use --seeds 3 or more to get an interval.")


def warn_if_vocabularies_differ(variants: list[Variant]) -> None:
    """Warn if vocabulary sizes differ, because losses per token are then not comparable."""
    sizes = {}
    for variant in variants:
        for seed in variant.curves:
            sizes[variant.name] = run_entries(variant.log_dir(seed))[-1]["vocab_size"]
    if len({*sizes.values()}) > 1:
        problem = f"the vocabularies have different sizes ({sizes}), so losses per token"
        warn(f"{problem} are not comparable; --stream bpb compares bits per byte")


def draw(variants: list[Variant], stream: str, path: Path) -> None:
    """Draw the mean curve of each variant, with a band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, variant in enumerate(variants):
        curves = [*variant.curves.values()]
        if not curves:
            continue
        steps = set.intersection(*(set(curve) for curve in curves))
        x = sorted(step for step in steps if step >= max(steps) / 20)  # drop the steep beginning
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
    for name in ("SIGTERM", "SIGUSR1"):  # Slurm can send the second, which Windows lacks
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(143))
    in_use = f"{config.out}: in use by another compare.py; wait for it, or choose another --out"
    with locked(config.out, in_use):
        for variant in variants:
            check(variant, seeds)
        failed = train_all(variants, seeds, config)
        print_table(variants, config)
        if config.stream == "val":
            warn_if_vocabularies_differ(variants)
        if any(variant.curves for variant in variants):
            picture = config.out / "curves.png"
            draw(variants, config.stream, picture)
            print(f"\ncurves: {picture}")
    return int(failed > 0)


if __name__ == "__main__":
    run_and_exit(main)

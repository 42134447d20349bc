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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.command_line import flag, parse_args, shown, warn
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, locked, sha256
from support.log_txt import read_log
from support.run_json import run_entries

FIRST_SEED = 1337  # the default of train_gpt2.py

Curve = dict[int, float]  # {step: value of the stream that is compared}


@dataclass(frozen=True)
class CompareConfig:
    """Trains codes or recipes over several seeds and compares their validation losses."""

    # train_gpt2.py and forks of it; "fork.py --flag 1", in quotes, has a flag for this code alone
    code: tuple[str, ...] = (shlex.quote(str(ROOT / "train_gpt2.py")),)
    seeds: int = 3  # runs of each; their seeds are 1337, 1338, …
    stream: str = "val"  # what is compared: a stream of log.txt, such as val, bpb or hella
    out: Path = Path("compared")  # folder for the runs and the picture
    nproc_per_node: int = 1  # processes of a run; above 1 they are started by torchrun


@dataclass(frozen=True)
class Variant:
    """A code with a recipe."""

    name: str
    code: Path
    flags: list[str]  # the common ones, then those of the code, then those of the recipe

    def folder(self, out: Path, seed: int) -> Path:
        """The log folder of a run."""
        letters = [char if char.isalnum() or char in "_.-" else "_" for char in self.name]
        return out / "".join(letters).strip("_-") / f"seed_{seed}"

    def command(self, out: Path, seed: int) -> list[str]:
        """The script and its flags."""
        log_dir = str(self.folder(out, seed))
        return [str(self.code), *self.flags, "--seed", str(seed), "--resume", "--log-dir", log_dir]


def read_variants(codes: tuple[str, ...], words: list[str]) -> list[Variant]:
    """Each code with each recipe. `words` follow the first -- on the command line."""
    common, *recipes = split_at_dashes(words)
    variants = []
    for text in codes:
        try:
            file, *own = shlex.split(text)
        except ValueError:  # an open quote, or no word at all
            raise UserError(f"--code {text!r}: not a file, or a file and its flags") from None
        code = Path(file)
        for recipe in recipes or [[]]:
            # The name says what differs: the code with its flags, the recipe, or both.
            name = [code.stem, *own] if len(codes) > 1 or not recipe else []
            variants.append(Variant(shlex.join(name + recipe), code, common + own + recipe))
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


def check(variants: list[Variant], seeds: range, config: CompareConfig) -> None:
    """UserError if a code or its flags are wrong, or if --out has a run of others."""
    for variant in variants:
        if variant.code.suffix != ".py" or not variant.code.is_file():
            raise UserError(f"--code {variant.code}: not a Python file")
        given = {word.split("=")[0].replace("_", "-") for word in variant.flags}  # --seed=1 as well
        for own in ("--seed", "--log-dir", "--resume", "--plan"):
            if own in given:
                raise UserError(f"{own}: compare.py sets it; see --seeds and --out")
        for seed in seeds:
            folder = variant.folder(config.out, seed)
            for entry in run_entries(folder):
                problem = ""
                command = [shown(word) for word in variant.command(config.out, seed)]
                if sorted(entry["command"]) != sorted(command):  # the flags, in any order
                    problem = "was trained with other flags"
                elif changed := changed_files(entry["code"], variant.code):
                    problem = f"was trained before a change of {', '.join(changed)}"
                if problem:
                    raise UserError(f"{folder}: {problem}; remove it, or choose another --out")
            streams = streams_at_end(folder)
            if streams and config.stream not in streams:
                problem = f"{folder} has none at its last step, only {', '.join(streams)}"
                raise UserError(f"--stream {config.stream}: {problem}")
        check_by_plan(variant)


def changed_files(recorded: dict[str, str], code: Path) -> list[str]:
    """The files of a run that have changed since, or are gone. recorded: {path: checksum}"""
    changed = []
    for name, checksum in recorded.items():
        file = code.parent / name  # Python looks there first when it imports a module
        if not file.is_file():
            file = ROOT / name
        if not file.is_file() or sha256(file) != checksum:
            changed.append(name)
    return changed


def check_by_plan(variant: Variant) -> None:
    """UserError if --plan fails, which reads the flags and makes the model without training it."""
    done = subprocess.run(
        [sys.executable, str(variant.code), *variant.flags, "--plan"],
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return
    command = shlex.join(["python", shown(variant.code), *variant.flags, "--plan"])
    line = last_line(done.stderr)
    if done.returncode == 2 and line.startswith("error: "):
        raise UserError(f"`{command}` fails: {line.removeprefix('error: ')}")
    # Otherwise it is the traceback of a bug, or a box in which tyro explains a wrong flag.
    print(done.stderr, end="", file=sys.stderr)
    raise UserError(f"`{command}` fails with status {done.returncode}; what it says is above")


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
    console.parent.mkdir(parents=True, exist_ok=True)
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
    return f"status {status}, {line.removeprefix('error: ')}; see {shown(console)}"


def streams_at_end(folder: Path) -> list[str]:
    """The streams of a run that have a value at its last step. [] if it is not finished."""
    for entry in run_entries(folder)[-1:]:
        last = entry["config"]["max_steps"]
        return [stream for stream, (steps, _) in read_log(folder).items() if last in steps]
    return []


def read_curve(folder: Path, stream: str) -> Curve:
    """{step: value} of a stream of a run, or {} if it has no value at the last step."""
    if stream not in streams_at_end(folder):
        return {}
    return dict(zip(*read_log(folder)[stream], strict=True))


def train_all(
    variants: list[Variant], seeds: range, config: CompareConfig
) -> tuple[dict[str, dict[int, Curve]], int]:
    """Trains what is missing. Returns ({variant: {seed: its curve}}, number of failed runs)."""
    found: dict[str, dict[int, Curve]] = {variant.name: {} for variant in variants}
    failed = []  # names of variants
    number = 0
    for seed in seeds:  # all variants of a seed, then the next, since they are compared by seed
        for variant in variants:
            number += 1
            name = f"run {number} of {len(seeds) * len(variants)}: {variant.name}, seed {seed}"
            folder = variant.folder(config.out, seed)
            curve, problem = read_curve(folder, config.stream), ""
            if not curve:
                if variant.name in failed:  # it would probably fail with each seed
                    continue
                console = folder.with_suffix(".txt")
                print(f"{name}, whose output goes to {shown(console)} …", flush=True)
                problem = train(variant, seed, config.out, config.nproc_per_node)
                curve = read_curve(folder, config.stream)
            if not problem and not curve:
                problem = f"{folder}/log.txt has no {config.stream} at the last step"
                problem += "; see --stream, --eval-every and --hellaswag-every"
            if problem:
                failed.append(variant.name)
                print(f"error: {name}: {problem}", file=sys.stderr, flush=True)
                if seed != seeds[-1]:
                    print(f"{variant.name} failed, so its other seeds are skipped", flush=True)
            else:
                found[variant.name][seed] = curve
                print(f"{name}: {final(curve):.4f}", flush=True)
    return found, len(failed)


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
    """The mean difference of the final values of the same seeds, ± half its 95 % interval."""
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


def quantity(stream: str) -> str:
    """What a stream is, for a caption."""
    return "validation loss in nats per token" if stream == "val" else stream


def print_table(
    variants: list[Variant], found: dict[str, dict[int, Curve]], config: CompareConfig
) -> None:
    baseline = variants[0].name
    print(f"\nFinal {quantity(config.stream)}, mean ± standard deviation.")
    print("The difference is the mean over the seeds, ± half of its 95 % interval.\n")
    heading = "loss" if config.stream == "val" else config.stream
    print(f"| | seeds | {heading} | difference from {baseline} | ms per step |")
    print("|---|---|---|---|---|")
    for variant in variants:
        curves = found[variant.name]
        cells = [variant.name, str(len(curves)), "–", "–", "–"]
        if curves:
            cells[2] = mean_and_deviation([final(curve) for curve in curves.values()])
            if variant.name != baseline:
                cells[3] = difference(curves, found[baseline])
            speeds = [milliseconds(variant.folder(config.out, seed)) for seed in curves]
            cells[4] = f"{np.median(speeds):,.0f}"
        print(f"| {' | '.join(cells)} |")
    if config.seeds == 1:
        print("\nOne seed says nothing about chance: --seeds 3 or more give an interval.")
    elif config.seeds == 2:
        wide = f"{t_quantile(1):.1f}"
        print(f"\nTwo seeds have one degree of freedom: an interval of ±{wide} standard errors,")
        print(f"where three have ±{t_quantile(2):.1f} and five ±{t_quantile(4):.1f}.")


def warn_of_other_tokens(variants: list[Variant], seed: int, out: Path) -> None:
    """Warns if the runs have vocabularies of different sizes, by their run.json."""
    sizes = {}
    for variant in variants:
        for entry in run_entries(variant.folder(out, seed))[-1:]:
            sizes[variant.name] = entry["vocab_size"]
    if len({*sizes.values()}) > 1:
        problem = f"the vocabularies have different sizes ({sizes}), so losses per token"
        warn(f"{problem} do not compare; --stream bpb compares bits per byte")


def draw(
    variants: list[Variant], found: dict[str, dict[int, Curve]], stream: str, path: Path
) -> None:
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
    variants = read_variants(config.code, args[end + 1 :])
    seeds = range(FIRST_SEED, FIRST_SEED + config.seeds)
    for name in ("SIGTERM", "SIGUSR1"):  # Slurm can send the second. Windows does not have it.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(143))
    in_use = f"{config.out}: another compare.py uses it; wait for its end, or choose another --out"
    with locked(config.out, in_use):
        check(variants, seeds, config)
        found, failed = train_all(variants, seeds, config)
        print_table(variants, found, config)
        if config.stream == "val":
            warn_of_other_tokens(variants, FIRST_SEED, config.out)
        if any(found.values()):
            picture = config.out / "curves.png"
            draw(variants, found, config.stream, picture)
            print(f"\ncurves: {picture}")
    return int(failed > 0)


if __name__ == "__main__":
    run_and_exit(main)

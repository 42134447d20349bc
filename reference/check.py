"""Does a run match a reference? Compares two log folders (README.md describes check.txt).

    python reference/check.py log                     # with the reference of its preset
    python reference/check.py log reference/gpt2
    python reference/check.py my_reference --make log_1 log_2 log_3 log_4 log_5

--make writes check.txt from runs of several seeds: for each validation loss, and the training loss
over each 50 steps, the mean plus or minus five standard deviations (with five normal values known,
a sixth is inside with a probability of 99 %)."""

import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tyro.conf import Positional

from support.cli import UserError, flag, parse_args, run
from support.files import write_text
from support.run_folder import read_log, run_entries

ROOT = Path(__file__).parents[1]
STRETCH, WIDTH, LEAST = 50, 5.0, 0.01  # steps; standard deviations; nats
# By precision: ten times what ranks, micro-batches and compilation were seen to cause (README.md).
FIRST_STEPS, TOLERANCE = 20, {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class CheckConfig:
    """Compares a run's losses with a reference's; exit status 0 if they match, 1 if not."""

    log: Positional[str]  # log folder of a run; with --make the reference to write
    reference: Positional[str] = ""  # folder of a reference; empty: that of the run's preset
    make: tuple[str, ...] = ()  # log folders of runs that differ in their seed only


def last_entry(folder: Path) -> dict:
    """What the newest start in a log folder recorded."""
    entries = run_entries(folder)
    if not entries or not (folder / "log.txt").exists():
        raise UserError(f"{folder}: not a run's folder (log.txt, run.json)")
    return entries[-1]


def values_of(folder: Path, stream: str) -> dict[int, float]:
    """A stream of a run's log: {step: value}."""
    return dict(zip(*read_log(folder).get(stream, ([], [])), strict=True))


def measure(folder: Path, points: list[Any], batch: int) -> list[tuple[int, float | None]]:
    """(step, value) of a run's log at each (tokens, stream, …); None where the log has no value.

    A training loss is the mean over the steps since the previous point."""
    train, found, before = values_of(folder, "train"), [], 0
    for tokens, stream, *_ in points:
        step, rest = divmod(tokens, batch)
        value = values_of(folder, stream).get(step)
        if stream == "train":
            stretch = [loss for s, loss in train.items() if before <= s < step]
            value = statistics.fmean(stretch) if step - 1 in train else None
            before = step
        found.append((step, None if rest else value))
    return found


def read_check(path: Path) -> tuple[list[Any], list[Any]]:
    """(steps, precision, stream, tolerance) and (tokens, stream, low, high) of a check.txt."""
    if not path.exists():
        raise UserError(
            f"{path}: no such reference; there are reference/shakespeare and reference/gpt2"
        )
    first, bounds = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        try:
            if words and words[0] == "first":
                _, steps, precision, stream, tolerance = words
                first.append((int(steps), precision, stream, float(tolerance)))
            elif words:
                tokens, stream, low, high = words
                bounds.append((int(tokens), stream, float(low), float(high)))
        except ValueError:
            raise UserError(
                f"{path}: neither `tokens stream low high` nor `first steps precision stream "
                f"tolerance`: {line}"
            ) from None
    return first, bounds


def check_log(path: Path) -> None:
    """UserError for a line of a log that is not `step stream value`."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            step, _, value = line.split()
            int(step), float(value)
        except ValueError:
            if line.endswith("\n"):  # a kill may have cut the last line short
                message = f"{path}, line {number}: not `step stream value`: {line.strip()}"
                raise UserError(message) from None


def difference(config: dict[str, Any], reference: Path) -> str:
    """What makes a run incomparable with a reference; empty if nothing does."""
    entries = run_entries(reference)
    if entries:
        theirs = entries[-1]["config"]
    else:  # published runs of the gpt2 preset
        from train_gpt2 import TrainConfig

        theirs = asdict(TrainConfig())
    for name in ("data", "init", "seq_len", "n_layer", "n_head", "n_embd"):
        ours, expected = config.get(name, theirs[name]), theirs[name]
        if name == "data":
            ours, expected = Path(ours).name, Path(expected).name
        if ours != expected:
            return f"{flag(name)} {ours}: {reference.name} has {expected}"
    return ""


def compare(log_dir: Path, reference: Path) -> tuple[bool, str]:
    """(whether the run matches, a sentence that says so)."""
    entry, checked = last_entry(log_dir), 0
    config, (first, bounds) = entry["config"], read_check(reference / "check.txt")
    check_log(log_dir / "log.txt")
    incomparable = difference(config, reference)
    if incomparable:
        return False, f"no reference for {incomparable}"
    no_match = f"does not match {reference.name}"
    for steps, precision, stream, tolerance in first:
        same_seed = config["seed"] == last_entry(reference)["config"]["seed"]
        if not same_seed or f" {precision}:" not in entry["device"]:
            continue
        ours, theirs = values_of(log_dir, stream), values_of(reference, stream)
        for step in range(steps):
            if step in ours and step in theirs:
                checked += step > 0  # step 0 is the untrained model
                if not abs(ours[step] - theirs[step]) <= tolerance:
                    return False, (
                        f"step {step}: {stream} {ours[step]:.6f}, with the same seed "
                        f"{theirs[step]:.6f} ± {tolerance:g} in {precision}: {no_match}"
                    )
    values = measure(log_dir, bounds, config["total_batch_size"])
    for (_, stream, low, high), (step, value) in zip(bounds, values, strict=True):
        if value is not None:
            checked += step > 0
            if not low <= value <= high:
                return False, (
                    f"step {step}: {stream} {value:.4f} is outside {low} to {high}: {no_match}"
                )
    if not checked:
        return False, f"no value after step 0 that {reference.name} has: not compared"
    return True, f"{checked} values compared: matches {reference.name}"


def make(reference: Path, log_dirs: list[Path]) -> None:
    """Writes reference/check.txt from runs that differ in their seed only."""
    config = last_entry(log_dirs[0])["config"]
    batch, max_steps = config["total_batch_size"], config["max_steps"]
    points = [(step * batch, "val") for step in values_of(log_dirs[0], "val")]
    points += [(step * batch, "train") for step in range(STRETCH, max_steps + 1, STRETCH)]
    points.sort()
    text = "# first steps precision stream tolerance: of a run with the seed of log.txt\n"
    for precision, tolerance in TOLERANCE.items():
        text += f"first {FIRST_STEPS} {precision} train {tolerance:g}\n"
    seeds = len(log_dirs)
    text += f"# tokens stream low high: mean of {seeds} seeds ± {WIDTH:g} standard deviations\n"
    measured = [measure(folder, points, batch) for folder in log_dirs]
    for (tokens, stream), *runs in zip(points, *measured, strict=True):
        values = [value for _, value in runs]
        if None in values or len(values) < 2:
            raise UserError(
                f"{reference}: needs two runs or more that all have {stream} at {tokens} tokens"
            )
        mean, margin = statistics.fmean(values), max(WIDTH * statistics.stdev(values), LEAST)
        text += f"{tokens} {stream} {mean - margin:.4f} {mean + margin:.4f}\n"
    write_text(reference / "check.txt", text)


def main(args: list[str] | None = None) -> int:
    config = parse_args(CheckConfig, args=args)
    log_dir = Path(config.log)
    if config.make:
        make(log_dir, [Path(folder) for folder in config.make])
        return 0
    reference = Path(config.reference)
    if not config.reference:
        settings = last_entry(log_dir)["config"]
        preset = settings["preset"]
        if preset == "auto":
            preset = "shakespeare" if settings["data"].endswith(".txt") else "gpt2"
        reference = ROOT / "reference" / preset
    matches, verdict = compare(log_dir, reference)
    print(verdict)
    return 0 if matches else 1


if __name__ == "__main__":
    run(main)

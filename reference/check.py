"""Does a run match a reference? Compares two log folders.

    python reference/check.py log                                    # with the reference of its preset
    python reference/check.py log reference/gpt2
    python reference/check.py reference/shakespeare --make log_1 log_2 log_3 log_4 log_5    # writes its
    check.txt

A reference is the log folder of a run (log.txt, run.json) with a check.txt of two kinds of lines;
`#` begins a comment:

    first STEPS PRECISION STREAM TOLERANCE    a run with the reference's seed has the reference's first values
    TOKENS STREAM LOW HIGH                    any run's value there lies between bounds

The first kind is sharp: from the same weights on the same tokens only rounding may differ, so a
mistake in the model, the optimizer or the schedule shows within a few steps. The second says
whether a run of another seed ends where it should; --make takes the mean of several seeds, plus or
minus five standard deviations (with five normal values known, a sixth is inside with a probability
of 99 %), of each validation loss and of the training loss over each 50 steps."""

import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tyro.conf import Positional

from support.cli import UserError, parse_args, run
from support.files import atomic_write
from support.run_folder import read_log, run_entries

STRETCH, WIDTH, LEAST = 50, 5.0, 0.01  # steps; standard deviations; nats
# Rounding, by precision: ten times what ranks, micro-batches and compilation were seen to cause
# (reference/README.md).
FIRST_STEPS, TOLERANCE = 20, {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class CheckConfig:
    """Compares a run's losses with a reference's; exit status 0 if they match, 1 if not."""

    log: Positional[str]  # log folder of a run; with --make the reference to write
    reference: Positional[str] = ""  # folder of a reference; empty: that of the run's preset
    make: tuple[
        str, ...
    ] = ()  # log folders of runs that differ in their seed only, to make check.txt from


def last_entry(folder: Path) -> dict:
    """What the newest start in a log folder recorded. Raises UserError."""
    entries = run_entries(folder)
    if not entries or not (folder / "log.txt").exists():
        raise UserError(f"{folder}: not a run's folder (log.txt, run.json)")
    return entries[-1]


def measure(
    folder: Path, points: list[tuple[int, str]], batch: int
) -> list[tuple[int, float | None]]:
    """(step, value) of a run's log at each (tokens, stream); None where the log has no value. A
    training loss is the mean over the steps since the previous point."""
    streams, found, before = read_log(folder), [], 0
    for tokens, stream in points:
        step, rest = divmod(tokens, batch)
        steps, values = streams.get(stream, ([], []))
        if stream == "train":
            stretch = [v for s, v in zip(steps, values, strict=True) if before <= s < step]
            value = statistics.fmean(stretch) if stretch and steps[-1] >= step - 1 else None
            before = step
        else:
            value = dict(zip(steps, values, strict=True)).get(step)
        found.append((step, None if rest else value))
    return found


def compare(log_dir: Path, reference: Path) -> tuple[bool, str]:
    """(whether the run matches, a sentence that says so). Raises UserError."""
    entry = last_entry(log_dir)
    match = re.search(r"(float32|bfloat16|float16):", entry["device"])
    precision, batch = match[1] if match else "", entry["config"]["total_batch_size"]
    path, checked, points, bounds = reference / "check.txt", 0, [], []
    if not path.exists():
        raise UserError(
            f"{path}: no such reference; there are reference/shakespeare and reference/gpt2"
        )
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        try:
            if words[:1] == ["first"]:
                steps, kind, stream, tolerance = int(words[1]), words[2], words[3], float(words[4])
                if (
                    kind != precision
                    or entry["config"]["seed"] != last_entry(reference)["config"]["seed"]
                ):
                    continue
                ours, theirs = (
                    dict(zip(*read_log(folder).get(stream, ([], [])), strict=True))
                    for folder in (log_dir, reference)
                )
                for step in range(steps):
                    if step in ours and step in theirs:
                        checked += 1
                        if not abs(ours[step] - theirs[step]) <= tolerance:
                            return False, (
                                f"step {step}: {stream} {ours[step]:.6f}, with the same seed "
                                f"{theirs[step]:.6f} ± {tolerance:g} in {precision}: does not "
                                "match"
                            )
            elif words:
                points.append((int(words[0]), words[1]))
                bounds.append((float(words[2]), float(words[3])))
        except (ValueError, IndexError):
            raise UserError(
                f"{path}: neither `tokens stream low high` nor `first steps precision stream "
                f"tolerance`: {line}"
            ) from None
    values = measure(log_dir, points, batch)
    for (_, stream), (low, high), (step, value) in zip(points, bounds, values, strict=True):
        if value is not None:
            checked += 1
            if not low <= value <= high:
                return (
                    False,
                    f"step {step}: {stream} {value:.4f} is outside {low} to {high}: does not match",
                )
    if not checked:
        return False, "the run has no value at any token count of"
    return True, f"{checked} values compared: matches"


def make(reference: Path, log_dirs: list[Path]) -> None:
    """Writes reference/check.txt from runs that differ in their seed only."""
    config = last_entry(log_dirs[0])["config"]
    batch = config["total_batch_size"]
    points = [(step * batch, "val") for step in read_log(log_dirs[0]).get("val", ([], []))[0]]
    points += [(step * batch, "train") for step in range(STRETCH, config["max_steps"] + 1, STRETCH)]
    points.sort()
    lines = ["# first steps precision stream tolerance: of a run with the seed of log.txt\n"]
    lines += [
        f"first {FIRST_STEPS} {name} train {tolerance:g}\n" for name, tolerance in TOLERANCE.items()
    ]
    lines += [
        f"# tokens stream low high: mean of {len(log_dirs)} seeds ± {WIDTH:g} standard deviations\n"
    ]
    measured = [measure(folder, points, batch) for folder in log_dirs]
    for (tokens, stream), *runs in zip(points, *measured, strict=True):
        values = [value for _, value in runs]
        if None in values or len(values) < 2:
            raise UserError(
                f"{reference}: needs two runs or more that all have {stream} at {tokens} tokens"
            )
        mean, margin = statistics.fmean(values), max(WIDTH * statistics.stdev(values), LEAST)
        lines.append(f"{tokens} {stream} {mean - margin:.4f} {mean + margin:.4f}\n")
    with atomic_write(reference / "check.txt", "w") as file:
        file.writelines(lines)


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
    print(f"{verdict} {reference.name}")
    return 0 if matches else 1


if __name__ == "__main__":
    run(main)

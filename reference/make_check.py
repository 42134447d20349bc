"""Writes check.txt of a reference: its own run's first losses, and bounds from runs that differ in their seed alone.

    python reference/make_check.py reference/shakespeare log_1 log_2 log_3 log_4 log_5

A run of the reference's seed matches (`train_gpt2.py --check-against`) when its first losses are the reference's, to a
tolerance that rounding alone explains. Any run matches when each of its values is within five standard deviations of
the runs' mean: where five normal values are known, a sixth falls inside with a probability of 99 %. Values: each
validation loss, and the training loss over each stretch of 50 steps.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import check, rundir

STRETCH, WIDTH, LEAST = 50, 5.0, 0.01  # steps; standard deviations; nats
# Rounding, by precision: ten times what ranks, micro-batches and compilation were seen to make (reference/README.md).
FIRST_STEPS, TOLERANCE = 20, {"float32": 2e-5, "bfloat16": 2e-2}


def main(reference: str, *log_dirs: str) -> None:
    config = rundir.last_config(Path(log_dirs[0]))
    batch = config["total_batch_size"]
    evaluations = rundir.read_log(log_dirs[0])["val"][0]
    points = [(step * batch, "val") for step in evaluations]
    points += [(step * batch, "train") for step in range(STRETCH, config["max_steps"] + 1, STRETCH)]
    points.sort()
    runs = [check.measure(Path(log_dir), points, batch) for log_dir in log_dirs]
    lines = ["# first steps precision stream tolerance: of a run with the seed of log.txt\n"]
    lines += [f"first {FIRST_STEPS} {name} train {tolerance:g}\n" for name, tolerance in TOLERANCE.items()]
    lines += [f"# tokens stream low high: mean of {len(runs)} seeds, give or take {WIDTH:g} standard deviations\n"]
    for i, (tokens, stream) in enumerate(points):
        values = [run[i][1] for run in runs]
        mean, margin = statistics.mean(values), max(WIDTH * statistics.stdev(values), LEAST)
        lines.append(f"{tokens} {stream} {mean - margin:.4f} {mean + margin:.4f}\n")
    (Path(reference) / "check.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

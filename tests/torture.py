"""Kills a training run at random moments, again and again: it must leave what an undisturbed one
leaves.

    python tests/torture.py                    # 50 times kill -9, about ten minutes
    python tests/torture.py --kills 3 --seed 7 --picture killed.png

A small CPU run that saves every fourth step is started with --resume and killed (SIGKILL) --kills
times, in turn while it writes a checkpoint, trains and starts up; then it may finish. Its weights,
its training state and its log, except for the timing streams, must equal an undisturbed run's byte
for byte."""

import argparse
import itertools
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from support.run_folder import read_log

TIMINGS = ("ms", "tok_per_sec", "mfu")
ARGS = [
    "--preset",
    "shakespeare",
    "--n-layer",
    "2",
    "--n-embd",
    "32",
    "--total-batch-size",
    "128",
    "--seq-len",
    "32",
    "--eval-every",
    "5",
    "--eval-tokens",
    "1024",
    "--sample-every",
    "0",
    "--save-every",
    "4",
    "--keep-checkpoints",
    "2",
    "--keep-every",
    "40",
    "--device",
    "cpu",
    "--resume",
]


def start(log_dir: Path, steps: int) -> subprocess.Popen:
    args = [*ARGS, "--max-steps", str(steps), "--log-dir", str(log_dir)]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(log_dir: Path, steps: int) -> None:
    output, _ = (process := start(log_dir, steps)).communicate()
    assert process.returncode == 0, output


def kill(log_dir: Path, steps: int, when: str, most: int = 15) -> None:
    """Starts or resumes the run, and kills it at a random moment while it is starting, training or
    saving.

    most: lines that it may print in training before that.
    """
    process = start(log_dir, steps)
    if when == "starting":
        time.sleep(
            random.uniform(0, 5)
        )  # importing, reading checkpoints, trimming the log, the first steps
    elif when == "training":
        printed = filter(lambda line: line.startswith("step "), process.stdout)
        list(itertools.islice(printed, random.randint(1, most)))
        time.sleep(random.uniform(0, 0.05))
    else:
        while process.poll() is None and not list(log_dir.glob(".step_*.partial")):
            time.sleep(0.0002)
        time.sleep(random.uniform(0, 0.03))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, (
        f"the run ended by itself: use more --steps\n{output}"
    )


def contents(log_dir: Path) -> dict[str, object]:
    """What must be the same: the log without timings, and of each checkpoint model and training
    state."""
    lines = (log_dir / "log.txt").read_text().splitlines()
    found: dict[str, object] = {
        "log.txt": [line for line in lines if line.split()[1] not in TIMINGS]
    }
    for folder in sorted(log_dir.glob("step_*")):
        found[f"{folder.name}/model"] = (folder / "model.safetensors").read_bytes()
        state = torch.load(folder / "training_state.pt") | dict.fromkeys(("elapsed", "config"))
        found[f"{folder.name}/state"] = tree_map_only(
            torch.Tensor, lambda t: t.numpy().tobytes(), state
        )
    return found


def torture(
    folder: Path, kills: int, steps: int, finish: Callable[[Path, int], None] = finish
) -> tuple[int, list[int]]:
    """Runs both and compares them. Returns how many kills left a checkpoint half written, and for
    each kill the last step in the log.

    finish(log_dir, steps): lets a run come to its end."""
    finish(folder / "straight", steps)
    half_written, killed_at = 0, []
    for i in range(kills):
        kill(
            folder / "killed",
            steps,
            ("saving", "training", "starting")[i % 3],
            most=4 * steps // kills,
        )
        half_written += bool(list((folder / "killed").glob(".step_*.partial")))
        killed_at.append(read_log(folder / "killed")["train"][0][-1])
    finish(folder / "killed", steps)
    straight, killed = contents(folder / "straight"), contents(folder / "killed")
    assert straight.keys() == killed.keys(), straight.keys() ^ killed.keys()
    assert (different := [name for name in straight if straight[name] != killed[name]]) == [], (
        different
    )
    return half_written, killed_at


def draw(folder: Path, killed_at: list[int], path: Path) -> None:
    figure = Figure(figsize=(8, 3.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    for run, label, color, width in (
        ("straight", "never stopped", "#ffc46b", 4.5),
        ("killed", f"killed {len(killed_at)} times", "#1f3b73", 0.9),
    ):
        steps, losses = read_log(folder / run)["train"]
        axes.plot(steps, losses, color=color, linewidth=width, label=label)
    axes.vlines(
        killed_at,
        min(losses),
        max(losses),
        color="#e57373",
        zorder=0,
        linewidth=0.8,
        label="killed here, once or more",
    )
    axes.set(xlabel="step", ylabel="training loss", xlim=(-5, len(steps)))
    axes.set_title(f"Killed {len(killed_at)} times or never: the same bytes", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=1, edgecolor="white")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument(
        "--picture", type=Path, help="draw both runs' losses and the kills into this file"
    )
    args = parser.parse_args()
    random.seed(args.seed)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        half_written, killed_at = torture(Path(folder), args.kills, args.steps)
        if args.picture:
            draw(Path(folder), killed_at, args.picture)
    print(
        f"{args.kills} kills (seed {args.seed}), {half_written} of which left a checkpoint half written, "
        f"{args.steps} steps, {time.perf_counter() - began:.0f} s: weights, state and log equal an "
        "undisturbed run's"
    )


if __name__ == "__main__":
    main()

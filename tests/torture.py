"""Kills a training run many times: its output must equal that of an undisturbed run.

    python tests/torture.py                    # 50 times kill -9, about ten minutes
    python tests/torture.py --kills 3 --seed 7 --picture killed.png

A small CPU run that saves every fourth step is killed (SIGKILL) and resumed --kills times, in turn
while saving, training and starting; then it runs to its end. Weights, training state and log,
except for the timing streams, must equal those of an undisturbed run byte for byte."""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).parents[1] / "train_gpt2.py"
TIMINGS = ("ms", "tok_per_sec", "mfu")
FLAGS = """--preset shakespeare --n-layer 2 --n-embd 32 --seq-len 32 --total-batch-size 128
    --device cpu --eval-every 5 --eval-tokens 1024 --sample-every 0
    --save-every 4 --keep-checkpoints 2 --resume"""


def arguments(log_dir: Path, steps: int) -> list[str]:
    return [*FLAGS.split(), "--max-steps", str(steps), "--log-dir", str(log_dir)]


def start(log_dir: Path, steps: int) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), *arguments(log_dir, steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(log_dir: Path, steps: int) -> None:
    output, _ = (process := start(log_dir, steps)).communicate()
    assert process.returncode == 0, output


def kill(log_dir: Path, steps: int, when: str, goal: int) -> None:
    """Kills a run while it is starting, or while training or saving once it is at step `goal`."""
    process = start(log_dir, steps)
    if when == "starting":
        time.sleep(random.uniform(0, 5))  # imports, checkpoints, trimming the log, first steps
    else:
        for line in process.stdout:
            if line.startswith("step ") and int(line[5:10]) >= goal:
                break
        if when == "saving":
            while process.poll() is None and not list(log_dir.glob(".step_*.partial")):
                time.sleep(0.0002)
        time.sleep(random.uniform(0, 0.03))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"not killed: use more --steps\n{output}"


def contents(log_dir: Path) -> dict[str, object]:
    """What must be equal: the log without timings, and the model and state of each checkpoint."""
    lines = (log_dir / "log.txt").read_text().splitlines()
    found: dict[str, object] = {"log": [line for line in lines if line.split()[1] not in TIMINGS]}
    for folder in sorted(log_dir.glob("step_*")):
        found[f"{folder.name}/model"] = (folder / "model.safetensors").read_bytes()
        found[f"{folder.name}/state"] = comparable(torch.load(folder / "training_state.pt"))
    return found


def comparable(state: Any) -> Any:
    """The same nested state without times and settings, and with the bytes of each tensor."""
    if isinstance(state, torch.Tensor):
        return state.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        kept = state.keys() - {"training_seconds", "config"}
        return {key: comparable(value) for key, value in state.items() if key in kept}
    if isinstance(state, list | tuple):
        return [comparable(value) for value in state]
    return state


def training_losses(log_dir: Path) -> tuple[list[int], list[float]]:
    """(steps, losses) of log.txt. A kill may have cut its last line."""
    lines = (log_dir / "log.txt").read_text().split("\n")[:-1]
    rows = [line.split() for line in lines if line.split()[1] == "train"]
    return [int(row[0]) for row in rows], [float(row[2]) for row in rows]


def assert_same(a: Path, b: Path) -> None:
    """b may have a checkpoint more: the one from which it was resumed is never deleted."""
    ours, theirs = contents(a), contents(b)
    different = [name for name in ours if ours[name] != theirs.get(name)]
    assert not different, different


def torture(
    folder: Path, kills: int, steps: int, finish: Callable[[Path, int], None] = finish
) -> tuple[int, list[int]]:
    """Compares both runs. -> (kills that left a half-written checkpoint, last step at each kill)

    finish(log_dir, steps): completes a run."""
    finish(folder / "straight", steps)
    log_dir, half_written, killed_at = folder / "killed", 0, []
    for i in range(kills):
        goal = i * steps // (kills + 2)  # evenly spaced, all before the end
        kill(log_dir, steps, ("saving", "training", "starting")[i % 3], goal)
        half_written += bool(list(log_dir.glob(".step_*.partial")))
        killed_at.append(training_losses(log_dir)[0][-1])
    finish(log_dir, steps)
    assert_same(folder / "straight", log_dir)
    return half_written, killed_at


def draw(folder: Path, killed_at: list[int], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.1), dpi=200, layout="constrained")
    axes = figure.subplots()
    for run, label, color, width in (
        ("straight", "never stopped", "#ffc46b", 4.5),
        ("killed", f"killed {len(killed_at)} times", "#1f3b73", 0.9),
    ):
        steps, losses = training_losses(folder / run)
        axes.plot(steps, losses, color=color, lw=width, label=label)
    axes.vlines(
        killed_at, min(losses), max(losses), "#e57373", lw=0.8, zorder=0, label="killed here"
    )
    axes.set(xlabel="step", ylabel="training loss (nats per token)", xlim=(-5, len(steps)))
    title = f"Killed {len(killed_at)} times or never: the same bytes"
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_title("2 layers, 32 channels", loc="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(framealpha=1, edgecolor="white")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--picture", type=Path, help="plot the losses and the kills to this file")
    args = parser.parse_args()
    random.seed(args.seed)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        half_written, killed_at = torture(Path(folder), args.kills, args.steps)
        if args.picture:
            draw(Path(folder), killed_at, args.picture)
    print(
        f"{args.kills} kills (seed {args.seed}), {half_written} of which left a half-written "
        f"checkpoint, {args.steps} steps, {time.perf_counter() - began:.0f} s: "
        "weights, state and log equal those of an undisturbed run"
    )


if __name__ == "__main__":
    main()

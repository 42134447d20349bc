"""What a run does around its steps, timed: evaluation, samples, checkpoints, data. And a short real run.

The functions are given `script`, the module train_gpt2, or the parts of it that they time.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import CheckpointWriter, random_state
from support.cli import InputError
from support.rundir import list_checkpoints, read_log
from support.runlog import Log, add_run_entry


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, waited for."""
    getattr(torch, device.type).synchronize()
    began = time.perf_counter()
    call()
    getattr(torch, device.type).synchronize()
    return time.perf_counter() - began


def evaluation(script: Any, trial: Any, val_loader: Any, tasks: list[Any], dist: Any) -> dict[str, Any]:
    """Validation, HellaSwag and samples as training has them between two steps, twice each: the first one may plan,
    compile or fill caches. trial: a model in training, compiled where training compiles it."""
    for number in range(2):
        trial.step(number)
    tokens = min(trial.train.eval_tokens, (val_loader.stream.total_tokens - 1) // trial.train.seq_len
                 * trial.train.seq_len)
    found: dict[str, Any] = {"validation_tokens": tokens, "tasks": len(tasks), "sample_tokens": 4 * 32}
    off = dict(eval_every=0, hellaswag_every=0, sample_every=0)
    for name, setting in (("validation", "eval_every"), ("hellaswag", "hellaswag_every"), ("samples", "sample_every")):
        config = replace(trial.train, **off | {setting: 1})
        arguments = (1, trial.model, val_loader, tasks, config, dist, Log(None))
        found[f"{name}_s"] = [seconds_of(partial(script.evaluate, *arguments), dist.device) for _ in range(2)]
    return found


def files(trial: Any, loader: Any, dist: Any, seconds: float) -> dict[str, Any]:
    """A checkpoint: what training waits for it, and what it takes until it is on the disk. The loader: tokens/s of
    batches that nobody computes on."""
    trial.step(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        add_run_entry(folder, asdict(trial.train), step=0, device=dist.description)  # what its model card tells
        (folder / "log.txt").touch()
        state = {"optimizer": trial.optimizer.state_dict(), "random": [random_state(dist.device)]}
        config = replace(trial.train, log_dir=name, keep_checkpoints=1, keep_every=0)
        with CheckpointWriter(config, replace(dist, rank=0)) as writer:
            writer.save(trial.model, {**state, "step": 1}, wait=True)  # the memory of its copy is new
            began = time.perf_counter()
            writer.save(trial.model, {**state, "step": 2}, wait=False)
            wait = time.perf_counter() - began
        total = time.perf_counter() - began
        size = sum(path.stat().st_size for path in (folder / "step_000002").iterdir())
    loader.next_batch()
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        loader.next_batch()
        batches += 1
    rate = batches * loader.B * loader.T / (time.perf_counter() - began)
    return {"checkpoint_wait_s": wait, "checkpoint_s": total, "checkpoint_bytes": size, "loader_tok_per_s": rate}


def real_run(script_path: Path, args: list[object], folder: Path, steps: int, limit: float) -> dict[str, Any]:
    """`steps` steps of a run in `folder`, which goes on where an earlier call was cut off; "unfinished" when `limit`
    seconds were not enough: it is told to stop then, and saves. The checkpoints are removed when it is done."""
    command = [sys.executable, script_path, *args, "--resume", "--log-dir", folder, "--max-steps", steps]
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "ab") as output:
        child = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)
            status = child.wait()
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    if status == 128 + signal.SIGTERM:
        return {"unfinished": True}
    if status:
        return {"problem": next((line for line in reversed(text.splitlines()) if line.strip()), f"status {status}")}
    streams = read_log(folder)
    for checkpoint in list_checkpoints(folder):
        for path in checkpoint.iterdir():
            path.unlink()
        checkpoint.rmdir()
    samples = list(dict.fromkeys(line for line in text.splitlines() if " sample " in line))[-4:]
    os.remove(folder / "output.txt")
    return {
        "steps": steps, "seconds_of_last_start": time.monotonic() - began, "samples": samples,
        "ms": statistics.median(streams["ms"][1][2:]), "tok_per_s": statistics.median(streams["tok_per_sec"][1][2:]),
        "train": streams["train"][1], "val": [list(pair) for pair in zip(*streams["val"], strict=True)],
        "hella": [list(pair) for pair in zip(*streams.get("hella", ([], [])), strict=True)],
    }


def made_up_tasks(path: Path, count: int) -> list[dict[str, Any]]:
    """HellaSwag tasks cut from a text, for machines without the real ones: their lengths are about those of HellaSwag
    (30 to 110 tokens of context, 8 to 35 an ending), and which ending is right is chance. Raises InputError."""
    words = path.read_text(encoding="utf-8").split()
    if len(words) < 1000:
        raise InputError(f"{path}: too short to cut tasks from")
    tasks = []
    for i in range(count):
        lengths = [25 + 6 * (i % 11), *(6 + (5 * i + 3 * j) % 20 for j in range(4))]
        start, pieces = 97 * i % (len(words) - 300), []
        for length in lengths:
            pieces.append(" ".join(words[start : start + length]))
            start += length
        tasks.append({"ctx": pieces[0], "endings": pieces[1:], "label": i % 4})
    return tasks

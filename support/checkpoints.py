"""Checkpoints: Hugging Face folders that also hold what it takes to resume the run. Written, found and read here."""

import shlex
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from support.cli import InputError, first_line
from support.devices import on_host, yield_to_others
from support.distributed import Distributed
from support.files import atomic_path, remove_folder, sha256
from support.huggingface import to_hub, write_pretrained
from support.rundir import list_checkpoints, read_log, run_entries, step_of

CHECKPOINT_FORMAT = 1


class CheckpointWriter:
    """Writes checkpoints in a thread of rank 0, one at a time, while training goes on.

    A write that fails (the disk is full, say) is reported, and the checkpoints before it stand; the next save is the
    next attempt. The newest `keep_checkpoints`, and those at multiples of `keep_every`, are kept. config: TrainConfig.
    """

    def __init__(self, config: Any, dist: Distributed):
        self.log_dir, self.keep, self.keep_every = Path(config.log_dir), config.keep_checkpoints, config.keep_every
        self.dist, self.sharded = dist, config.shard_optimizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=yield_to_others)
        self._writing: Future | None = None
        self._copy: Any = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown()  # however training ends, what is being written is finished

    def save(self, model: torch.nn.Module, state: dict[str, Any], wait: bool) -> None:
        """Copies model and training state, and has them written; to be called on all ranks. With `wait` it returns when
        they are; InputError if that failed. state: all that training_state.pt is to hold, the number of updates as
        "step" among it."""
        if self._writing:
            self._writing.exception()  # one at a time; a failure has been reported
        if self.sharded:
            self.dist.gather(None)  # for that, rank 0 may need longer than an exchange of tensors waits
        if self.dist.rank != 0:
            if self.sharded:
                on_host(state["optimizer"])  # sends rank 0 this one's share
            return
        folder = self.log_dir / f"step_{state['step']:06d}"
        self._copy = on_host([to_hub(model.state_dict()), state], self._copy)
        self._writing = self._thread.submit(self._write, folder, asdict(model.config), *self._copy)
        failed = lambda error: f"{folder}: not written ({first_line(error)})"  # noqa: E731
        if not wait:
            self._writing.add_done_callback(lambda done: done.exception() and print(
                f"error: {failed(done.exception())}; training goes on, the next checkpoint is the next attempt",
                file=sys.stderr, flush=True))
        elif error := self._writing.exception():
            raise InputError(f"{failed(error)}: make room, then --resume goes on from the checkpoint before")

    def _write(self, folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], state: dict) -> None:
        with atomic_path(folder) as partial:
            write_pretrained(partial, config, weights)
            torch.save({"format": CHECKPOINT_FORMAT, **state}, partial / "training_state.pt")
            (partial / "README.md").write_text(model_card(self.log_dir, state["step"]), encoding="utf-8")
            write_checksums(partial)
        # Later ones, if any, are damaged: this run was resumed from before them.
        steps = [step for step in map(step_of, list_checkpoints(self.log_dir)) if step <= state["step"]]
        for step in steps[: -self.keep] if self.keep else []:
            if not (self.keep_every and step % self.keep_every == 0):
                remove_folder(self.log_dir / f"step_{step:06d}")


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds besides the model. Nothing in the file is executed. Raises InputError.

    Its tensors are the file's own pages: they are to be copied, and let go of, since a mapped file can't be removed on
    NFS or Windows.
    """
    path = checkpoint / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT:
        raise InputError(f"{path}: not a training state of format {CHECKPOINT_FORMAT}, which this script reads")
    return state


def find_checkpoint(log_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; None when there are none at all.

    A damaged one is named and passed over. Raises InputError when all are damaged.
    """
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint, {"training_state.pt", "model.safetensors", "config.json"})
            read_training_state(checkpoint)
            return checkpoint
        except InputError as error:
            print(f"warning: {error}; trying the one before", file=sys.stderr, flush=True)
    if checkpoints:
        raise InputError(f"{log_dir}: none of its {len(checkpoints)} checkpoints is whole; start anew in another "
                         "--log-dir")
    return None


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's generators, the CPU's and the device's."""
    state = {"cpu": torch.get_rng_state()}
    return state if device.type == "cpu" else state | {device.type: getattr(torch, device.type).get_rng_state()}


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Puts the generators where random_state found them; a device of another kind than the checkpoint's stays."""
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state[device.type])


def write_checksums(folder: Path) -> None:
    """Writes SHA256SUMS, which `sha256sum -c` reads, too: a line for each file in the folder."""
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def verify_checksums(folder: Path, required: set[str]) -> None:
    """Raises InputError unless all files in SHA256SUMS, with the required ones among them, are as they were written."""
    try:
        sums = [line.split("  ") for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()]
        damaged = [name for digest, name in sums if sha256(folder / name) != digest]
        damaged += sorted(required - {name for _, name in sums})
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: not a whole checkpoint ({first_line(error)})") from None
    if damaged:
        raise InputError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")


def model_card(log_dir: Path, step: int) -> str:
    """README.md of the checkpoint that a run saves at `step`, in the Hub's format, from the run's own records."""
    entry = run_entries(log_dir)[-1]
    config, streams = entry["config"], read_log(log_dir)

    def last(stream: str) -> str:
        values = [(s, v) for s, v in zip(*streams.get(stream, ([], [])), strict=True) if s <= step]
        return f"{values[-1][1]:.4f} (step {values[-1][0]:,})" if values else "not measured"

    rows = {
        "training data": f"`{Path(config['data']).name}`, {step * config['total_batch_size']:,} tokens",
        "steps": f"{step:,} of {config['max_steps']:,}, {config['total_batch_size']:,} tokens each",
        "begun from": config["init"],
        "learning rate": f"{config['max_lr']} to {config['min_lr']}, {config['schedule']}, {config['optimizer']}",
        "weight decay, seed": f"{config['weight_decay']}, {config['seed']}",
        "training loss": last("train"),
        "validation loss": last("val"),
        "HellaSwag (completion style, acc_norm)": last("hella"),
        "device": entry["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in entry["versions"].items() if version),
        "commit": entry["git_commit"] or "unknown",
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# A GPT-2 trained from scratch with gpt2-repro

```
{shlex.join(["python", *entry["command"]])}
```

| | |
|---|---|
{table}
```python
from transformers import pipeline
pipeline("text-generation", model="THIS FOLDER")({config["sample_prompt"]!r}, max_new_tokens=40)
```

A language model of this size writes fluent text that need not be true. It was trained to continue text, not to follow
instructions, and nothing was done about what its training data may have taught it.
"""

"""Checkpoints: step_*/ folders with a Hugging Face GPT-2, training_state.pt and SHA256SUMS.

They appear whole or not at all; damage is detected by the checksums. Bad files raise UserError."""

import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from support.command_line import few, note, warn
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import atomic_path, remove_folder, sha256
from support.ranks import Ranks

REQUIRED = {"training_state.pt", "model.safetensors", "config.json"}


def checkpoint_path(log_dir: Path, step: int) -> Path:
    return log_dir / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(log_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    folders = [path for path in log_dir.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(folders, key=step_of)


def write_checkpoint(
    folder: Path, save_model: Callable[[Path], None], state: dict[str, Any], card: str
) -> str:
    """Writes a checkpoint atomically. Returns what prevented it (e.g. a full disk), or "".

    save_model(folder) writes the model's files. card: the text of README.md"""
    try:
        with atomic_path(folder) as partial:
            save_model(partial)
            with open(partial / "training_state.pt", "wb") as file:
                torch.save(state, file)
            # As `sha256sum -c` reads it. README.md is not in it: users may edit it.
            sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(partial.iterdir())]
            (partial / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
            (partial / "README.md").write_text(card, encoding="utf-8", errors="replace")
    except (OSError, RuntimeError, SafetensorError) as error:
        # When the disk is full, torch.save may raise a RuntimeError while it handles the OSError.
        if isinstance(error, RuntimeError):
            if not isinstance(error.__context__, OSError):
                raise  # a bug
            error = error.__context__
        return f"{folder}: not written ({first_line(error)})"
    return ""


def find_checkpoint(log_dir: Path) -> Path | None:
    """The newest intact checkpoint; None if there are none at all."""
    checkpoints = list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            verify_checksums(checkpoint)
            return checkpoint
        except UserError as error:
            warn(f"{error}; trying the previous one")
    if checkpoints:
        problem = f"all {len(checkpoints)} checkpoints are damaged"
        raise UserError(f"{log_dir}: {problem}; use another --log-dir")
    return None


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """The dictionary that was saved as training_state.pt. Never runs pickled code."""
    path = checkpoint / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or "parts" not in state:
        raise UserError(f"{path}: not the state of a training run")
    return state


def load_parts(parts: dict[str, Any], saved: dict[str, Any], changed_code: bool) -> None:
    """Gives each part of a run its state, which is in `saved` under the same name.

    The run and the checkpoint must have the same parts, unless the code may have changed."""
    new = parts.keys() - saved.keys()
    gone = saved.keys() - parts.keys()
    problems = [f"this code's {name} is not in the checkpoint" for name in sorted(new)]
    problems += [f"this code does not have the checkpoint's {name}" for name in sorted(gone)]
    if problems and not changed_code:
        raise UserError(f"--resume: {'; '.join(problems)}; --changed-code goes on without")
    for problem in problems:
        note(problem)
    for name, part in parts.items():
        if saved.get(name):  # a scaler that is not enabled has no state
            part.load_state_dict(saved[name])


class OptimizerStates:
    """The state of the optimizers, such as moments, as a part of a checkpoint.

    A state belongs to a parameter of a name and a shape, and to an optimizer of a class. Learning
    rates, weight decay and other options are not part of it: they are the code's."""

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], model: nn.Module, changed_code: bool = False
    ):
        """changed_code: a checkpoint may have other optimizers and parameters."""
        self.optimizers = optimizers
        self.changed_code = changed_code
        self.names = {parameter: name for name, parameter in model.named_parameters()}

    def parameters(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, list[int]]]:
        """The name and shape of each parameter, in the order in which torch numbers them."""
        in_order = [p for group in optimizer.param_groups for p in group["params"]]
        return [(self.names.get(p, f"parameter {i}"), [*p.shape]) for i, p in enumerate(in_order)]

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "class": type(optimizer).__name__,
                "parameters": self.parameters(optimizer),
                "state": optimizer.state_dict()["state"],
            }
            for optimizer in self.optimizers
        ]

    def load_state_dict(self, saved: list[dict[str, Any]]) -> None:
        """UserError if there are other optimizers or parameters, unless the code may change.

        Then a parameter that is new to an optimizer starts without a state there."""
        before = {
            (part["class"], name, *shape): part["state"].get(i)
            for part in saved
            for i, (name, shape) in enumerate(part["parameters"])
        }
        now = {
            (type(optimizer).__name__, name, *shape)
            for optimizer in self.optimizers
            for name, shape in self.parameters(optimizer)
        }
        new = described(now - before.keys())
        gone = described(before.keys() - now)
        if (new or gone) and not self.changed_code:
            change = f"this code has {new or 'fewer'}, the checkpoint {gone or 'fewer'}"
            raise UserError(f"--resume: {change}; --changed-code goes on with this code")
        if new:
            note(f"new to the optimizers, so without a state: {new}")
        if gone:
            note(f"states of the checkpoint that are dropped: {gone}")
        for optimizer in self.optimizers:
            in_order = [p for group in optimizer.param_groups for p in group["params"]]
            states = {}  # by torch's numbers
            for i, (name, shape) in enumerate(self.parameters(optimizer)):
                state = before.get((type(optimizer).__name__, name, *shape))
                if state is not None:  # a frozen parameter has none
                    states[i] = state
            optimizer.load_state_dict(optimizer.state_dict() | {"state": states})
            # torch gives floats the precision of the weights. A fork's may have had another.
            for i, values in states.items():
                loaded = optimizer.state[in_order[i]]
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        loaded[key] = loaded[key].to(value.dtype)

    def check_that_it_can_be_saved(self) -> None:
        """Raises what torch raises if an optimizer keeps what a checkpoint cannot hold."""
        for part in self.state_dict():
            file = io.BytesIO()
            try:
                torch.save(tree_map_only(Tensor, lambda tensor: None, part), file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:
                problem = f"A checkpoint cannot hold the state of {part['class']}."
                error.add_note(f"{problem} Keep tensors and numbers in it, or use --save-every 0.")
                raise


def described(keys: set[tuple]) -> str:
    """The classes of optimizers in a set of (class, name of a parameter, …), with the names."""
    names: dict[str, list[str]] = {}
    for optimizer, name, *_ in sorted(keys):
        names.setdefault(optimizer, []).append(name)
    return " and ".join(f"{optimizer} for {few(found)}" for optimizer, found in names.items())


class RandomStates:
    """The random numbers of all ranks as a part of a checkpoint. A fork's dropout draws them."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def state_dict(self) -> list[dict[str, Tensor]]:
        """For each rank the states of the CPU's and of the device's generator, by type."""
        state = {"cpu": torch.get_rng_state()}
        device = self.ranks.device.type
        if device != "cpu":
            state[device] = torch.get_device_module(device).get_rng_state()
        return self.ranks.gather(state)

    def load_state_dict(self, states: list[dict[str, Tensor]]) -> None:
        """Perhaps on other devices than before, or on more ranks, which then keep theirs."""
        for state in states[self.ranks.rank : self.ranks.rank + 1]:
            torch.set_rng_state(state["cpu"])
            device = self.ranks.device.type
            if device != "cpu" and device in state:
                torch.get_device_module(device).set_rng_state(state[device])


def verify_checksums(folder: Path) -> None:
    """UserError unless all files in SHA256SUMS, and the required ones, are unchanged."""
    try:
        lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        damaged = [name for name, digest in sums.items() if sha256(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: incomplete checkpoint ({first_line(error)})") from None
    damaged += sorted(REQUIRED - sums.keys())
    if damaged:
        raise UserError(f"{folder}: damaged checkpoint ({', '.join(damaged)})")


def prune_checkpoints(
    log_dir: Path, step: int, best: int | None, keep: int, keep_every: int
) -> None:
    """Deletes all but the newest `keep` (0: none), the best, and multiples of keep_every steps.

    Those after `step` stay: they are damaged, since the run was resumed from before them."""
    if keep == 0:
        return
    steps = [found for found in map(step_of, list_checkpoints(log_dir)) if found <= step]
    for old in steps[:-keep]:
        if old == best or (keep_every and old % keep_every == 0):
            continue
        folder = checkpoint_path(log_dir, old)
        # A fork may write more of a step beside it, such as step_000400_ema.
        for path in [folder, *log_dir.glob(f"{folder.name}_*")]:
            try:
                remove_folder(path)
            except OSError as error:
                warn(f"{path}: not removed ({error.strerror})")


CARD = """---
pipeline_tag: text-generation
{library}---
{kind} after {step:,} steps and {tokens:,} tokens of `{data}`, from {init}, trained by `{script}` of
gpt2-repro at commit {commit}: `{command}`

It continues text, does not follow instructions, and may write what is false. A prompt and what it
writes may have {context:,} tokens together.
"""


def model_card(entry: dict[str, Any], context: int, step: int, tokens: int, is_gpt2: bool) -> str:
    """A checkpoint's README.md, in the Hub's format. entry: the run's, in run.json."""
    config = entry["config"]
    return CARD.format(
        library="library_name: transformers\n" if is_gpt2 else "",
        kind="A GPT-2" if is_gpt2 else "A changed GPT-2, which only its own code computes,",
        context=context,
        step=step,
        tokens=tokens,
        data=Path(config["data"]).name,
        init=config["init"],
        script=entry.get("script"),
        commit=entry["git_commit"],
        command=shlex.join(["python", *entry["command"]]),
    )

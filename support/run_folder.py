"""A run's folder, as train_gpt2.py uses it: where to start, the log, checkpoints, curves.

The formats are in run_log.py and checkpoints.py. Only rank 0 reads and writes; the other ranks call
the same methods, which tell them what rank 0 found or do nothing."""

import contextlib
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from support import checkpoints, run_log
from support.cli import print0, shown, warn
from support.errors import UserError
from support.files import fsync, locked, remove
from support.ranks import Ranks
from support.trackers import start_trackers


def lock(log_dir: Path, rank: int) -> contextlib.AbstractContextManager:
    """Makes the folder and keeps other runs out of it. Removes it if nothing was written."""
    if log_dir.exists() and log_dir.samefile(run_log.ROOT):
        raise UserError(f"--log-dir {log_dir}: the repository itself; choose another folder")
    if str(log_dir).encode(errors="ignore") != os.fsencode(log_dir):
        raise UserError(f"--log-dir {str(log_dir)!a}: not UTF-8, so PyTorch could not read it")
    if rank > 0:
        return contextlib.nullcontext()
    return locked(log_dir, f"{log_dir}: another run uses it; choose another --log-dir")


PRINTED = {"val": "validation loss", "hella": "HellaSwag"}  # streams, as the console has them


@dataclass
class RunFolder:
    """find_start() and begin(), then log() and save() as the run goes on, and finish()."""

    path: Path
    ranks: Ranks
    keep: int = 0  # number of recent checkpoints to keep, plus the best; 0: all
    keep_every: int = 0  # also keep checkpoints at multiples of this many steps; 0: none

    checkpoint: Path | None = None  # from which the run continues
    last_config: dict[str, Any] | None = None  # of the run that may continue, on rank 0
    entries: list[dict[str, Any]] = field(default_factory=list)  # of run.json
    start_step: int = 0
    saved_step: int | None = None  # the step of the checkpoint that is up to date
    evaluated: dict[str, float] = field(default_factory=dict)  # log.txt has them at start_step
    latest: dict[str, float] = field(default_factory=dict)  # the latest value of each stream
    logged: dict[str, int] = field(default_factory=dict)  # and its step
    unwritten: bytes = b""  # lines of the log that a full disk did not take
    warned: bool = False
    trackers: list[Any] = field(default_factory=list)

    def find_start(self, resume: bool) -> Path | None:
        """The newest intact checkpoint to continue from, on every rank. None: start at step 0.

        The last run continues with --resume (`resume`), or if the same torchrun restarts it."""
        self.checkpoint = self.ranks.on_rank_0(self._find_start, resume)
        return self.checkpoint

    def _find_start(self, resume: bool) -> Path | None:
        entries = run_log.run_entries(self.path)
        restarted = entries and self.ranks.job and entries[-1].get("job") == self.ranks.job
        if not (resume or restarted):
            return None
        if entries:
            self.last_config = entries[-1]["config"]
        checkpoint = checkpoints.find_checkpoint(self.path)
        if checkpoint is None and any(self.path.glob("earlier_*")):
            advice = "to resume one, move it back"
            print0(f"{self.path}/: no checkpoint but those of earlier runs in earlier_*/; {advice}")
        return checkpoint

    def is_finished(self, step: int, max_steps: int) -> bool:
        """True if the run has completed all its steps and its last evaluation, on every rank."""
        entries = self.ranks.on_rank_0(run_log.run_entries, self.path) or [{}]
        return step > max_steps or step == max_steps == entries[-1].get("finished")

    def begin(
        self,
        step: int,
        device: str,
        config: dict[str, Any],
        continues: bool,
        software: dict[str, str],
    ) -> None:
        """Records a start at `step` in run.json.

        software: as devices.gpu_software returns it. continues: it is the last run in this folder,
        whose log is trimmed to `step`. Otherwise checkpoints of earlier runs are moved aside."""
        self.start_step = step
        if self.checkpoint is not None:
            self.saved_step = step
        if self.ranks.rank > 0:
            return
        earlier = run_log.run_entries(self.path)
        entry = run_log.new_entry(
            config,
            log_lines=0,
            job=self.ranks.job,
            step=step,
            device=device,
            world_size=self.ranks.world_size,
            **software,
        )
        self.entries = [*earlier, entry]
        # Before anything moves: they may be not installed, or without a network.
        self.trackers = start_trackers(self.path, self.entries, step)
        entry["log_lines"] = self._tidy(step, continues, earlier)
        run_log.record_start(self.path, self.entries)
        if self.evaluated:  # TensorBoard drops what it has of this step
            for track in self.trackers:
                track(step, self.evaluated)

    def _tidy(self, step: int, continues: bool, earlier: list[dict[str, Any]]) -> int:
        """Prepares a folder that was used before. Returns the lines in log.txt before this run."""
        for name in ("step_*", "run.json", "log.txt", "train_gpt2.py", "curves.png"):
            for remainder in self.path.glob(f".{name}.*.partial"):  # of a killed process
                remove(remainder)
        log = self.path / "log.txt"
        if continues:
            begin = earlier[-1].get("log_lines") if earlier else None
            begin, self.evaluated = run_log.trim_log(log, begin, step)
            return begin
        aside = checkpoints.move_aside(self.path)
        if aside is not None:
            moved = f"an earlier run's checkpoints moved to {aside}/"
            print0(f"{self.path}/: {moved} (--resume continues a run)")
        return run_log.end_log(log)

    def log(self, step: int, **values: float) -> None:
        """Appends values to log.txt and sends them to the trackers: log(step, stream=value, …).

        A full disk does not end the run: lines are kept until they can be written."""
        for stream in values:
            # Otherwise the log could not be read: a second value is the sign of another start.
            if not stream.isidentifier() or self.logged.get(stream) == step:
                raise ValueError(f"stream {stream!r}: needs one value per step, and a plain name")
            self.logged[stream] = step
        self.latest |= values
        for stream, name in PRINTED.items():
            if stream in values:
                print0(f"step {step:5d} {name} {values[stream]:.4f}")
        if self.ranks.rank > 0:
            return
        if step == self.start_step:
            values = {name: value for name, value in values.items() if name not in self.evaluated}
        for stream, value in values.items():
            self.unwritten += run_log.format_line(step, stream, value).encode()
        log = self.path / "log.txt"
        try:
            with open(log, "ab", buffering=0) as file:
                while self.unwritten:  # a nearly full disk takes a part
                    written = file.write(self.unwritten)
                    self.unwritten = self.unwritten[written:]
        except OSError as error:
            if not self.warned:
                warn(f"{log}: {error.strerror}; lines are kept until they can be written")
            self.warned = True
        for track in self.trackers:
            track(step, values)

    def save(self, model: Any, state: dict[str, Any], required: bool = False) -> None:
        """Writes a checkpoint of state["step"] atomically. All ranks call it.

        If it can't be written, earlier checkpoints are intact: prints an error line and goes on,
        or raises UserError if `required`."""
        problem = self.ranks.on_rank_0(self._save, model, state)
        if problem and required:
            raise UserError(f"{problem}: free some space; --resume continues")
        if problem:
            if self.ranks.rank == 0:
                warn(problem, "error")
            return
        self.saved_step = state["step"]
        if not required:  # after the last one, the caller cleans up
            self.clean_up(self.saved_step)

    def _save(self, model: Any, state: dict[str, Any]) -> str | None:
        log = self.path / "log.txt"
        if log.exists():  # on disk it must not end before the checkpoint
            fsync(log)
        return checkpoints.write_checkpoint(
            checkpoints.checkpoint_path(self.path, state["step"]),
            save_model=model.save_pretrained,
            state=state,
            run=self.entries[-1],
        )

    def clean_up(self, step: int, wait: bool = False) -> None:
        """Deletes old checkpoints and redraws curves.png. wait: until it is drawn."""
        if self.ranks.rank > 0:
            return
        best, _ = self.best()
        checkpoints.prune_checkpoints(self.path, step, best, self.keep, self.keep_every)
        draw_curves(self.path, wait)

    def best(self) -> tuple[int | None, float]:
        """(step, validation loss) of the best checkpoint; (None, inf) if none was evaluated.

        Of equal ones the latest."""
        steps, values = run_log.read_log(self.path).get("val", ([], []))
        losses = {step: loss for step, loss in zip(steps, values, strict=True) if loss < inf}
        saved = map(checkpoints.step_of, checkpoints.list_checkpoints(self.path))
        evaluated = [step for step in saved if step in losses]
        step = min(reversed(evaluated), key=losses.__getitem__, default=None)
        return step, losses.get(step, inf)

    def finish(self, step: int) -> None:
        """Records in run.json that the run has made its last evaluation, in the card its loss."""
        if self.ranks.rank > 0:
            return
        if self.logged.get("val") == step:
            folder = checkpoints.checkpoint_path(self.path, step)
            checkpoints.write_card(folder, self.entries[-1], step, self.latest["val"])
        self.entries[-1]["finished"] = step
        try:
            run_log.write_entries(self.path, self.entries)
        except OSError as error:
            warn(f"run.json: the end of the run is not recorded ({error.strerror})")

    def print_result(self, step: int, prompt: str, gpt2: bool) -> None:
        """Lists the run's outputs, and how to sample from its model. gpt2: if it is a GPT-2."""
        if self.ranks.rank > 0:
            return
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        kind = "in Hugging Face format"
        if not gpt2:
            kind = "not GPT-2's model any more: only this code loads it"
        print0(f"model: {self.path}/step_{step:06d}/, {kind}")
        best, loss = self.best()
        if best not in (None, step):
            advice = "the loss rose afterwards: train for fewer steps, or on more text"
            print0(f"best: {self.path}/step_{best:06d}/, validation loss {loss:.4f}; {advice}")
        script = shown(run_log.ROOT / "sample.py")
        print0(f"sample: {shlex.join(['python', script, str(self.path), prompt])}")


def draw_curves(log_dir: Path, wait: bool) -> None:
    """Draws curves.png in a background process. wait: until it is drawn."""
    command = [sys.executable, "-m", "support.plots", log_dir.resolve()]
    try:
        process = subprocess.Popen(command, cwd=run_log.ROOT, stderr=subprocess.DEVNULL)
        if wait:
            process.wait()
    except OSError as error:
        warn(f"{log_dir}/curves.png: not drawn ({error.strerror})")

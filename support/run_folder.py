"""The folder of a run: its log, its checkpoints, its curves, and where a resumed run goes on.

A folder holds one run, which --resume continues. Without --resume the folder of an earlier run is
renamed to make room: log/ becomes log_1/, or the next free number.

All ranks call the same methods, and rank 0 alone reads and writes the files. Their formats are in
log_txt.py, run_json.py and checkpoints.py."""

import contextlib
import shlex
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import checkpoints, forks, log_txt, run_json
from support.checkpoints import checkpoint_path, list_checkpoints, step_of
from support.command_line import print0, shown, warn
from support.errors_and_signals import UserError, first_line
from support.files_and_locks import ROOT, atomic_path, fsync, locked, remove
from support.ranks import Ranks
from support.trackers import Tracker, start_trackers

if TYPE_CHECKING:
    from support.tokenizer import Tokenizer
    from train_gpt2 import GPT, TrainConfig


class RunFolder:
    """`with RunFolder(config, ranks) as run:` keeps other runs out of the folder.

    train() first calls find_checkpoint() and begin(). While it trains it calls log() and
    save_checkpoint(), and at the end finish()."""

    def __init__(self, config: "TrainConfig", ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.path = Path(config.log_dir)
        self.locks = contextlib.ExitStack()
        # The content of run.json. It has an entry for each start, and the last one is about this
        # start.
        self.entries: list[dict[str, Any]] = []
        self.trackers: dict[str, Tracker] = {}  # TensorBoard and W&B, if they are asked for
        # The step of the newest checkpoint that is not damaged, and the step from which this
        # process has resumed the run. Without such a checkpoint they are None.
        self.newest_step: int | None = None
        self.resumed_step: int | None = None
        # The values that log.txt already has of the step with which this process begins. Each is
        # named by its step and its stream. A stream is a series of values, such as `val`.
        self.already_logged: set[tuple[int, str]] = set()
        self.warned_of_full_log = False

    def __enter__(self) -> "RunFolder":
        # The folder of an earlier run is renamed, and this one must not be.
        if self.path.exists() and self.path.samefile(ROOT):
            raise UserError(f"--log-dir {self.path}: the repository itself; choose another folder")
        if self.ranks.rank == 0:
            self.make_and_lock()
        return self

    def __exit__(self, *_: Any) -> None:
        self.locks.close()

    def make_and_lock(self) -> None:
        """Makes the folder, if it is missing. Raises UserError if another process has locked it."""
        problem = f"{self.path}: another run uses it; choose another --log-dir"
        self.locks.enter_context(locked(self.path, problem))

    # ---- The start

    def find_checkpoint(self) -> Path | None:
        """The newest checkpoint that is not damaged, or None. Every rank gets the same answer."""
        # Rank 0 calls the function, and tells the others what it returns.
        checkpoint = self.ranks.on_rank_0(checkpoints.newest_intact, self.path)
        if checkpoint is not None:
            self.newest_step = self.resumed_step = step_of(checkpoint)
            if self.resumed_step > self.config.max_steps:
                remedy = "use more steps, or another --log-dir"
                raise UserError(
                    f"{checkpoint}: beyond --max-steps {self.config.max_steps}; {remedy}"
                )
        return checkpoint

    def begin(self, model: "GPT", step: int, weights: Path | None, **about: Any) -> None:
        """Prepares the folder for a run that starts, or is resumed, at `step`.

        Writes run.json and a copy of the script, and removes from log.txt what will be logged
        again. `weights` is the folder from which the model was loaded, or None if its weights are
        random. `about` has more entries for run.json, such as the device."""
        if self.ranks.rank > 0:
            return
        has_run = (self.path / "run.json").exists()
        has_log = (self.path / "log.txt").exists()  # It may be that of another program.
        if has_run and self.config.resume:
            pass  # The run goes on in this folder.
        elif has_run or has_log:
            self.rename_earlier()
        for file in self.path.glob(".*.partial"):  # half-written files of a process that was killed
            remove(file)

        about |= {"step": step, "world_size": self.ranks.world_size}
        about |= {"vocab_size": model.config.vocab_size}
        about |= {"init": shown(weights) if weights else "scratch"}
        about |= forks.script_entry(type(model))  # the name and the checksum of the script
        this_start = run_json.new_entry(asdict(self.config), **about)
        self.entries = [*run_json.run_entries(self.path), this_start]
        # This adds the id of a W&B run to the last entry, so it comes before run.json is written.
        self.trackers = start_trackers(self.path, self.entries, step)
        run_json.write_entries(self.path, self.entries)
        script, source = forks.script_of(type(model))
        if script is not None:  # A class that was defined in a notebook has no script.
            with atomic_path(self.path / script.name) as copy:
                copy.write_bytes(source)

        # Evaluations at this step were logged before the checkpoint was written, and stay.
        evaluations = log_txt.trim_log(self.path / "log.txt", step)
        self.already_logged = {(step, stream) for stream in evaluations}
        if evaluations:
            # TensorBoard forgets all that it has from this step on, so they are sent again.
            self.track(step, evaluations)

    def rename_earlier(self) -> None:
        """Renames the folder of an earlier run, with all that is in it, and makes a new one."""
        init = Path(self.config.init)
        if init.exists() and init.resolve().is_relative_to(self.path.resolve()):
            # A restart of this run would not find its weights, or would find others.
            problem = f"is in {self.path}/, which would be renamed"
            raise UserError(f"--init {init}: {problem}; choose another --log-dir")
        try:
            number = 1
            while self.path.with_name(f"{self.path.name}_{number}").exists():
                number += 1
            renamed = self.path.rename(self.path.with_name(f"{self.path.name}_{number}"))
        except (OSError, ValueError) as error:  # such as a mount, or --log-dir .
            problem = f"holds an earlier run and cannot be renamed ({first_line(error)})"
            raise UserError(f"{self.path}: {problem}; choose another --log-dir") from None
        self.make_and_lock()
        print0(f"an earlier run is now in {renamed}/ (--resume --log-dir {renamed} continues it)")

    # ---- While it trains

    def log(self, step: int, **values: float) -> None:
        """Appends values to log.txt and sends them to the trackers: log(step, stream=value, …).

        Skips evaluations that were logged before the run was resumed."""
        if self.ranks.rank > 0:
            return
        new = {name: x for name, x in values.items() if (step, name) not in self.already_logged}
        try:
            log_txt.append_values(self.path / "log.txt", step, new)
        except OSError as error:
            if not self.warned_of_full_log:
                warn(f"{self.path}/log.txt: {error.strerror}; lines are lost until there is room")
            self.warned_of_full_log = True
        self.track(step, new)

    def track(self, step: int, values: dict[str, float]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                tracker(step, values)
            except Exception as error:  # of any kind: the run goes on without this tracker
                warn(f"--{name}: nothing more is sent ({first_line(error)})")
                del self.trackers[name]

    def save_checkpoint(
        self, model: "GPT", tokenizer: "Tokenizer", state: dict[str, Any], required: bool
    ) -> None:
        """Writes a checkpoint, unless there is one of this step. It appears whole or not at all.

        `state` is what a resumed run needs besides the weights. If the disk is full, earlier
        checkpoints stay as they are, and this prints an error line. If the checkpoint is required,
        it raises UserError instead."""
        step = state["step"]
        if step == self.newest_step:
            return

        def write() -> str:
            """Returns what went wrong, or an empty string."""
            # After a power cut, the log must not be older than the checkpoint. So it is flushed
            # first. If this fails, the run goes on.
            with contextlib.suppress(OSError):
                fsync(self.path / "log.txt")
            return checkpoints.write_checkpoint(
                checkpoint_path(self.path, step),
                save_model=lambda folder: model.save_pretrained(folder, tokenizer),
                state=state,
                card=checkpoints.model_card(model, self.entries, step),
            )

        problem = self.ranks.on_rank_0(write)
        if problem and required:
            raise UserError(f"{problem}: free some space; --resume continues")
        if problem:
            warn(problem, label="error")
            return
        self.newest_step = step
        self.delete_old_checkpoints()
        self.draw_curves()

    def validation_losses(self) -> dict[int, float]:
        """{step: validation loss} of the checkpoints that have been evaluated."""
        steps, losses = log_txt.read_log(self.path).get("val", ([], []))
        evaluated = dict(zip(steps, losses, strict=True))
        saved = map(step_of, list_checkpoints(self.path))
        return {step: evaluated[step] for step in saved if isfinite(evaluated.get(step, inf))}

    def delete_old_checkpoints(self) -> None:
        """Deletes all but the last --keep-checkpoints, the best one, and the one that was resumed.

        The last of these stays, so that the same command can begin there again."""
        if self.ranks.rank > 0:
            return
        losses = self.validation_losses()
        keep = {self.resumed_step}
        if losses:
            keep.add(best_of(losses))
        last = self.config.keep_checkpoints
        checkpoints.delete_checkpoints(self.path, self.newest_step, last, keep)

    def draw_curves(self) -> None:
        """Draws curves.png. If that fails, it prints a warning."""
        if self.ranks.rank > 0 or not log_txt.read_log(self.path):
            return
        try:
            from support.plots import save_curves  # imports matplotlib, which takes a second

            save_curves(self.path)
        except Exception as error:  # of any kind, such as a full disk
            warn(f"{self.path}/curves.png: not drawn ({first_line(error)})")

    # ---- The end

    def finish(self, model: "GPT", step: int) -> None:
        """Prints where the model and the curves are, and how to sample from the model."""
        if self.ranks.rank > 0 or step == 0:  # With --max-steps 0 nothing is saved.
            return
        # The last evaluation came after the last checkpoint was saved.
        self.delete_old_checkpoints()
        self.draw_curves()
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        script, _ = forks.script_of(type(model))
        is_gpt2 = forks.is_gpt2(model)
        kind = "in Hugging Face format"
        if not is_gpt2:
            kind = f"not a GPT-2 any more (gpt2-repro-fork), so only {script.name} can open it"
        print0(f"model: {checkpoint_path(self.path, step)}/, {kind}")
        losses = self.validation_losses()
        best = best_of(losses) if losses else step
        if best != step:
            advice = f"the last one has {losses[step]:.4f}, " if step in losses else ""
            advice += "so fewer steps may be enough"
            path = checkpoint_path(self.path, best)
            print0(f"best: {path}/ with a validation loss of {losses[best]:.4f}; {advice}")
        command = ["python", shown(ROOT / "sample.py"), str(self.path)]
        if self.config.sample_prompt:  # Without one, sample.py asks for it.
            command.append(self.config.sample_prompt)
        if script and script != ROOT / "train_gpt2.py":
            command += ["--code", shown(script)]
        if not is_gpt2:
            # Custom code may need the precision in which it was trained.
            command += ["--dtype", self.entries[-1]["dtype"]]
        print0(f"sample: {shlex.join(command)}")


def best_of(losses: dict[int, float]) -> int:
    """The step with the lowest loss. If several have it, this is the latest of them."""
    return min(sorted(losses, reverse=True), key=losses.get)


def read_run(log_dir: str) -> dict[str, Any] | None:
    """Returns a dictionary with the settings of the run in a folder ("config"), and the name and
    the checksum of its script. Returns None if there is no run.

    The newest checkpoint has them. Before the first checkpoint, the last entry of run.json does."""
    state = checkpoints.newest_state(Path(log_dir))
    if state is not None:
        return state
    entries = run_json.run_entries(log_dir)
    return entries[-1] if entries else None

"""The folder of a run, with its log, its checkpoints and its curves.

A folder holds one run, which --resume continues. Without --resume the folder of an earlier run is
renamed to make room: log/ becomes log_1/, or the next free number.

All ranks call the same methods, and rank 0 alone reads and writes the files. Their formats are in
log_txt.py, run_json.py and checkpoints.py."""

import contextlib
import shlex
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import checkpoints, forks, huggingface, log_txt, run_json
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
        # run.json is a list with one entry for each start of the run. begin() fills this.
        self.entries: list[dict[str, Any]] = []
        self.trackers: dict[str, Tracker] = {}  # TensorBoard and W&B, if they are asked for
        self.newest_step: int | None = None  # step of the newest checkpoint that is not damaged
        self.resumed_step: int | None = None  # step of the checkpoint from which the run resumed
        # A resumed run repeats the evaluations of its first step. Those that log.txt already has
        # must not be logged twice. They are named by step and stream, such as (200, "val").
        self.already_logged: set[tuple[int, str]] = set()
        self.warned_of_log = False

    def __enter__(self) -> "RunFolder":
        # A new run renames the folder of an earlier one. The repository must never be renamed.
        if self.path.exists() and self.path.samefile(ROOT):
            raise UserError(f"--log-dir {self.path}: the repository itself; choose another folder")
        if self.ranks.rank == 0:
            self.make_and_lock()
        return self

    def __exit__(self, *_: Any) -> None:
        self.locks.close()

    def make_and_lock(self) -> None:
        """Makes the folder, unless it exists, and keeps it locked until __exit__().

        Raises UserError if another process has locked it."""
        problem = f"{self.path}: another run uses it; choose another --log-dir"
        self.locks.enter_context(locked(self.path, problem))

    # ---- The start

    def find_checkpoint(self) -> Path | None:
        """The newest checkpoint that is not damaged, or None. Every rank gets the same answer."""
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
        random. `about` has the device, the dtype and the micro-batch size, for run.json."""
        if self.ranks.rank > 0:
            return
        # A folder into which somebody has only copied a checkpoint holds a run as well.
        has_run = (self.path / "run.json").exists() or bool(list_checkpoints(self.path))
        has_log = (self.path / "log.txt").exists()  # build-nanogpt, for example, writes one, too.
        is_resumed = has_run and self.config.resume
        if (has_run or has_log) and not is_resumed:
            self.rename_earlier()
        for path in self.path.glob(".*.partial"):  # what a killed process was writing
            remove(path)

        about |= {
            "step": step,
            "world_size": self.ranks.world_size,
            "vocab_size": model.config.vocab_size,
            "init": shown(weights) if weights else "scratch",
        }
        # The script may be a fork, which is an edited copy of train_gpt2.py. So run.json also has
        # the name and the checksum of the script.
        about |= forks.script_entry(type(model))
        this_start = run_json.new_entry(asdict(self.config), **about)
        self.entries = [*run_json.run_entries(self.path), this_start]
        # This adds the id of a W&B run to the last entry, so it comes before run.json is written.
        self.trackers = start_trackers(self.path, self.entries, step)
        run_json.write_entries(self.path, self.entries)
        script, source = forks.script_of(type(model))
        if script is not None:  # A class that was defined in a notebook has no script.
            with atomic_path(self.path / script.name) as copy:
                copy.write_bytes(source)

        # A run evaluates a checkpoint after saving it, so log.txt may have these evaluations.
        evaluations = log_txt.trim_log(self.path, step)
        self.already_logged = {(step, stream) for stream in evaluations}
        if evaluations:
            # TensorBoard has dropped its values from this step on, so they are sent again.
            self.track(step, evaluations)

    def rename_earlier(self) -> None:
        """Renames the folder of an earlier run, and makes a new one in its place."""
        init = Path(self.config.init)
        if init.exists() and init.resolve().is_relative_to(self.path.resolve()):
            # If this run were restarted, its --init would be missing, or another model.
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
            log_txt.append_values(self.path, step, new)
        except OSError as error:
            if not self.warned_of_log:
                warn(f"{self.path}/log.txt: {error.strerror}; lines are lost until there is room")
            self.warned_of_log = True
        self.track(step, new)

    def track(self, step: int, values: dict[str, float]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                tracker(step, values)
            except Exception as error:  # The run goes on without this tracker.
                warn(f"--{name}: nothing more is sent ({first_line(error)})")
                del self.trackers[name]

    def save_checkpoint(
        self, model: "GPT", tokenizer: "Tokenizer", state: dict[str, Any], required: bool
    ) -> None:
        """Writes a checkpoint, unless this step already has one. It appears whole or not at all.

        `state` is the dictionary in save() of train_gpt2.py. If the disk is full, earlier
        checkpoints stay as they are, and this prints an error line. If the checkpoint is required,
        as the last one of a run is, it raises UserError instead."""
        step = state["step"]
        if step == self.newest_step:
            return

        def write() -> str:
            """Returns what went wrong, or an empty string."""
            # The log is flushed first. Otherwise a power cut might lose lines of steps that come
            # before the checkpoint, and the resumed run would not log them again.
            with contextlib.suppress(OSError):
                fsync(self.path / "log.txt")
            return checkpoints.write_checkpoint(
                checkpoint_path(self.path, step),
                save_model=lambda folder: model.save_pretrained(folder, tokenizer),
                state=state,
                card=huggingface.model_card(model, self.entries, step),
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
        saved = {step_of(checkpoint) for checkpoint in list_checkpoints(self.path)}
        return {
            step: loss
            for step, loss in zip(steps, losses, strict=True)
            if step in saved and isfinite(loss)
        }

    def delete_old_checkpoints(self) -> None:
        """Deletes all checkpoints, except the newest ones (--keep-checkpoints), the best one, and
        the one from which this process has resumed the run."""
        if self.ranks.rank > 0:
            return
        losses = self.validation_losses()
        keep = {self.resumed_step}
        if losses:
            keep.add(best_of(losses))
        number = self.config.keep_checkpoints
        checkpoints.delete_checkpoints(self.path, self.newest_step, number, keep)

    def draw_curves(self) -> None:
        """Draws curves.png. If that fails, it prints a warning."""
        if self.ranks.rank > 0 or not log_txt.read_log(self.path):
            return
        try:
            from support.plots import save_curves  # imports matplotlib, which takes a second

            save_curves(self.path)
        except Exception as error:
            warn(f"{self.path}/curves.png: not drawn ({first_line(error)})")

    # ---- The end

    def finish(self, model: "GPT", step: int) -> None:
        """Prints where the model and the curves are, and how to sample from the model."""
        if self.ranks.rank > 0 or step == 0:  # With --max-steps 0 nothing is saved.
            return
        # The last checkpoint has now been evaluated, and may be the best one.
        self.delete_old_checkpoints()
        self.draw_curves()
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        script, _ = forks.script_of(type(model))
        is_gpt2 = forks.is_gpt2(model)
        kind = "in Hugging Face format"
        if not is_gpt2:
            name = script.name if script else "its own code"
            kind = f"no longer a GPT-2 (gpt2-repro-fork), so only {name} can load it"
        print0(f"model: {checkpoint_path(self.path, step)}/, {kind}")
        losses = self.validation_losses()
        best = best_of(losses) if losses else step
        if best != step:
            path = checkpoint_path(self.path, best)
            print0(f"best: {path}/, with a validation loss of {losses[best]:.4f}")
        command = ["python", shown(ROOT / "sample.py"), str(self.path)]
        if self.config.sample_prompt:  # Without one, sample.py asks for it.
            command.append(self.config.sample_prompt)
        if script and script != ROOT / "train_gpt2.py":
            command += ["--code", shown(script)]
        if not is_gpt2:
            # A changed model may only work in the precision in which it was trained.
            command += ["--dtype", self.entries[-1]["dtype"]]
        print0(f"sample: {shlex.join(command)}")


def best_of(losses: dict[int, float]) -> int:
    """The step with the lowest loss. Of equally good steps it is the latest."""
    return min(sorted(losses, reverse=True), key=losses.get)


def read_run(log_dir: str) -> dict[str, Any] | None:
    """The settings of the run in a folder, under the key "config", with the name and the checksum
    of its script under "script" and "script_sha256". None if there is no run.

    The newest checkpoint has them. Before the first checkpoint, the last entry of run.json does."""
    state = checkpoints.newest_state(Path(log_dir))
    if state is not None:
        return state
    entries = run_json.run_entries(log_dir)
    return entries[-1] if entries else None

"""The folder of a run, with its log, its checkpoints, its code and its curves.

A folder holds one run, which --resume continues. A run only adds: it deletes nothing but its own
old checkpoints, and the lines of log.txt that it logs again.

All ranks call the same methods, and rank 0 alone reads and writes the files. Their formats are in
run_files.py, checkpoints.py and scripts.py."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import checkpoints, forks, huggingface, run_files, scripts
from support.checkpoints import checkpoint_path, list_checkpoints, step_of
from support.command_line import note, print0, print_changes, restore_fields, shown, warn
from support.errors_and_signals import RunError, UserError, first_line
from support.files_and_locks import ROOT, fsync, locked, remove
from support.ranks import Ranks
from support.trackers import Tracker, check_trackers, start_trackers

if TYPE_CHECKING:
    from support.tokenizer import Tokenizer
    from train_gpt2 import GPT, TrainConfig


class RunFolder:
    """`with RunFolder(config, ranks) as run:` locks the folder for this run.

    train() first calls find_checkpoint() and begin(). While it trains it calls log() and
    save_checkpoint(), and at the end finish()."""

    def __init__(self, config: "TrainConfig", ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.path = Path(config.log_dir)
        self.locks = contextlib.ExitStack()
        # run.json is a list with one entry for each start of the run. begin() appends this one.
        self.entries: list[dict[str, Any]] = []
        self.trackers: dict[str, Tracker] = {}  # TensorBoard and W&B, if they are asked for
        self.newest_step: int | None = None  # step of the newest intact checkpoint
        self.first_step = 0  # number of updates at the start of this process
        self.saved: dict[str, Any] = {}  # the training state from which the run resumes
        self.verdict = ""  # whether the model is a GPT-2, as a line
        self.is_gpt2 = True
        self.warned_of_log = False

    def __enter__(self) -> "RunFolder":
        """Make the folder, unless it exists, and lock it.

        Raises UserError if another process has locked it, if it holds a run that is not to be
        resumed, or something else."""
        if self.ranks.rank > 0:
            return self
        problem = f"{self.path}: another run uses it; choose another --log-dir"
        self.locks.enter_context(locked(self.path, problem))
        try:
            self.check_content()
        except UserError:
            self.locks.close()
            raise
        self.identity = self.path.stat()
        return self

    def __exit__(self, *_: Any) -> None:
        self.locks.close()

    def check_content(self) -> None:
        """Raise UserError if the folder holds anything but the run that is to be resumed."""
        others = [name for name in ("config.json", "training_state.pt", "code")]
        others = [name for name in others if (self.path / name).exists()]
        if others and not (self.path / "run.json").exists():
            problem = f"holds no run, but {others[0]}"
            if others != ["code"]:
                problem = "the folder of a model, not of a run"
            raise UserError(f"--log-dir {self.path}: {problem}; choose another")
        if self.config.resume:
            return
        steps = [step_of(checkpoint) for checkpoint in list_checkpoints(self.path)]
        is_ours = steps or (self.path / "run.json").exists()
        if not is_ours and (self.path / "log.txt").exists():
            problem = "holds the log.txt of another program"
            raise UserError(f"{self.path}/ {problem}: --log-dir NAME starts a run elsewhere")
        trained, _ = run_files.read_log(self.path).get("train", ([], []))
        steps += [step + 1 for step in trained]
        if steps:
            remedy = "--resume continues it, --log-dir NAME starts another"
            raise UserError(f"{self.path}/ holds a run of {max(steps):,} steps: {remedy}")

    # ---- The start

    def find_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        """With --resume, return the newest intact checkpoint and the dictionary that was given to
        save_checkpoint(). Otherwise, or if there is none, (None, {}). The same on every rank."""
        if not self.config.resume:
            return None, {}
        checkpoint = self.ranks.on_rank_0(checkpoints.newest_intact, self.path)
        if checkpoint is None:
            self.ranks.on_rank_0(self.check_that_no_checkpoint_is_missing)
            return None, {}
        self.newest_step = self.first_step = step_of(checkpoint)
        if self.first_step > self.config.max_steps:
            remedy = "use more steps, or another --log-dir"
            raise UserError(f"{checkpoint}: beyond --max-steps {self.config.max_steps}; {remedy}")
        self.saved = checkpoints.read_training_state(checkpoint)
        return checkpoint, self.saved

    def check_that_no_checkpoint_is_missing(self) -> None:
        """Raise UserError if the run has passed its first checkpoint, and none is left."""
        entries = run_files.run_entries(self.path)
        lines = run_files.log_lines(self.path / "log.txt")
        trained = any(stream == "train" for _, stream, _ in lines)
        # A step is logged only after the save that comes before it.
        due = [min(e["config"]["save_every"], e["config"]["max_steps"]) for e in entries]
        if due and min(due) > 0:
            trained = any(step >= min(due) for step, _, _ in lines)
        if trained:
            problem = f"{self.path}: no checkpoint is left of this run"
            raise UserError(f"{problem}, so --resume cannot continue it; choose another --log-dir")
        if not entries:
            print0(f"--resume: no run in {self.path}/, so it starts one")

    def check_same_shards(self, before: list[tuple[str, int]], now: list[tuple[str, int]]) -> None:
        """Raise UserError if the training data of a resumed run differ. They are compared by the
        names and the sizes of their shards."""
        if before != now:
            different = sorted({name for name, _ in {*before} ^ {*now}}) or ["another order"]
            more = ", …" if len(different) > 3 else ""
            names = f" ({', '.join(different[:3])}{more})" if different != ["."] else ""  # a text
            problem = f"{self.config.data} is not what the run has read so far{names}"
            raise UserError(f"--resume: {problem}; --data names another")

    def begin(self, model: "GPT", **about: Any) -> None:
        """Write run.json and log/code/, and remove from log.txt what will be logged again.

        `about` is recorded in run.json."""
        if self.ranks.rank > 0:
            return
        check_trackers(self.config)
        if self.config.save_every:
            json.dumps(asdict(model.config))  # or the first checkpoint would fail, hours later
        for path in self.path.glob(".*.partial"):  # what a killed process was writing
            remove(path)
        config = asdict(self.config)
        self.entries = run_files.run_entries(self.path) if self.config.resume else []
        before = self.saved.get("config") or (settings_of(self.entries[-1]) if self.entries else {})
        if before:
            before = restore_fields(type(self.config), before)
            print_changes(before, config, ignore={"log_dir", "resume", "plan", "init"})
        self.print_changes_of_code()
        about |= {"step": self.first_step, "vocab_size": model.config.vocab_size}
        about |= {"init": shown(about["init"]), "script": scripts.script_name(type(model))}
        self.entries.append(run_files.new_entry(config, **about))
        # This adds the id of a W&B run to the last entry, so it comes before run.json is written.
        self.trackers = start_trackers(self.path, self.entries, self.first_step)
        run_files.write_entries(self.path, self.entries)
        scripts.write_code(self.path / "code")
        evaluations = run_files.trim_log(self.path, self.first_step)
        self.track(self.first_step, evaluations)  # TensorBoard drops its values from here on
        why_not = forks.why_not_gpt2(model)
        self.verdict, self.is_gpt2 = forks.verdict(why_not), not why_not

    def print_header(self, checkpoint: Path | None) -> None:
        """Print the last of a run's first lines."""
        resumed = f", resumed from {checkpoint}" if checkpoint else ""
        print0(self.verdict)
        print0(f"log and checkpoints: {self.path}/{resumed}")

    def print_changes_of_code(self) -> None:
        """Print a line if the code of a resumed run is not that of its last start."""
        changes = scripts.changes_since(self.path / "code")
        if self.entries:
            before, now = (Path(c[0]).name for c in (self.entries[-1]["command"], sys.argv))
            if before != now:
                changes += f"{'; ' * bool(changes)}started by {now}, no longer by {before}"
        if changes:
            note(f"the code is not that of the last start: {changes}")

    def check_in_place(self) -> None:
        """Raises RunError if the folder was renamed or removed, or another one took its place."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), self.identity):
                return
        problem = f"{self.path}/ is no longer the folder in which this run began"
        raise RunError(f"{problem}; --resume continues it where it is now")

    # ---- While it trains

    def log(self, step: int, **values: float) -> None:
        """Append values to log.txt and send them to the trackers: log(step, stream=value, …)."""
        if self.ranks.rank > 0 or not values:
            return
        self.check_in_place()
        if step == self.first_step:  # Evaluations that a resumed run repeats are replaced.
            run_files.remove_values(self.path, step, values)
        try:
            run_files.append_values(self.path, step, values)
        except OSError as error:
            if not self.warned_of_log:
                warn(f"{self.path}/log.txt: {error.strerror}; lines are lost until there is room")
            self.warned_of_log = True
        self.track(step, values)

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
        """Write a checkpoint, unless this step already has one. It appears whole or not at all.

        `state` is the dictionary in save() of train_gpt2.py. If the disk is full, earlier
        checkpoints stay as they are, and this prints an error line. If the checkpoint is required,
        as the last one of a run is, it raises UserError instead."""
        step = state["step"]
        if step == self.newest_step:
            return
        state |= {"config": asdict(self.config)}

        def save_model(folder: Path) -> str:
            """Write the files of the model and its script. Return the text of README.md."""
            model.save_pretrained(folder, tokenizer)
            scripts.write_code(self.path / "code", overwrite=False)
            script = scripts.path_in_code(type(model))
            if script and (self.path / "code" / script).exists():
                shutil.copyfile(self.path / "code" / script, folder / script.name)
            return huggingface.model_card(folder, self.entries, step)

        def write() -> str:
            """Return what went wrong, or an empty string."""
            self.check_in_place()
            # The log is flushed first. Otherwise a power cut might lose lines of steps that come
            # before the checkpoint, and the resumed run would not log them again.
            with contextlib.suppress(OSError):
                fsync(self.path / "log.txt")
            return checkpoints.write_checkpoint(checkpoint_path(self.path, step), save_model, state)

        problem = self.ranks.on_rank_0(write)
        if problem and required:
            raise UserError(f"{problem}: free some space; --resume continues")
        if problem:
            warn(problem, label="error")
            return
        self.newest_step = step
        self.note_if_the_model_changed(step)
        self.delete_old_checkpoints()
        self.draw_curves()

    def note_if_the_model_changed(self, step: int) -> None:
        """Print a line if the model has become a GPT-2, or is no longer one."""
        if self.ranks.rank > 0:
            return
        is_gpt2 = huggingface.is_gpt2(checkpoint_path(self.path, step))
        if is_gpt2 != self.is_gpt2:
            kind = "a GPT-2" if is_gpt2 else "not a GPT-2: its logits differ from a GPT-2's"
            print0(f"step {step:5d} the checkpoint is {kind}")
        self.is_gpt2 = is_gpt2

    def validation_losses(self) -> dict[int, float]:
        """{step: validation loss} of the checkpoints that have been evaluated."""
        steps, losses = run_files.read_log(self.path).get("val", ([], []))
        saved = {step_of(checkpoint) for checkpoint in list_checkpoints(self.path)}
        return {
            step: loss
            for step, loss in zip(steps, losses, strict=True)
            if step in saved and isfinite(loss)
        }

    def delete_old_checkpoints(self) -> None:
        """Deletes all checkpoints, except the newest ones (--keep-checkpoints), the best one, and
        the one from which this process resumed the run."""
        if self.ranks.rank > 0:
            return
        losses = self.validation_losses()
        keep = {self.first_step}
        if losses:
            keep.add(best_of(losses))
        number = self.config.keep_checkpoints
        checkpoints.delete_checkpoints(self.path, self.newest_step, number, keep)

    def draw_curves(self) -> None:
        """Draws curves.png. If that fails, it prints a warning."""
        if self.ranks.rank > 0 or not run_files.read_log(self.path):
            return
        try:
            from support.plots import save_curves  # imports matplotlib, which takes a second

            save_curves(self.path)
        except Exception as error:
            warn(f"{self.path}/curves.png: not drawn ({first_line(error)})")

    # ---- The end

    def print_stop(self, step: int) -> None:
        """Prints after how many updates a signal has stopped the run, and how to continue it."""
        hint = "nothing is saved"
        if self.config.save_every:
            hint = f"--resume --log-dir {shlex.quote(str(self.path))} continues"
        print0(f"stopped by a signal after {step} updates; {hint}")

    def finish(self, model: "GPT", step: int) -> None:
        """Print where the model and the curves are, and how to sample from the model."""
        if self.ranks.rank > 0 or step == 0:  # With --max-steps 0 nothing is saved.
            return
        # The last checkpoint has now been evaluated, and may be the best one.
        self.delete_old_checkpoints()
        self.draw_curves()
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        kind = "in Hugging Face format"
        if not self.is_gpt2:
            name = scripts.script_name(type(model))
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
        script = scripts.script_of(type(model))
        if script and script.resolve() != (ROOT / "train_gpt2.py").resolve():
            command += ["--code", shown(script)]
        print0(f"sample: {shlex.join(command)}")


def best_of(losses: dict[int, float]) -> int:
    """The step with the lowest loss. Of equally good steps it is the latest."""
    return min(sorted(losses, reverse=True), key=losses.get)


def settings_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a start, by its entry of run.json, with absolute paths."""
    return entry["config"] | entry["paths"]


def read_run(log_dir: str) -> dict[str, Any]:
    """Return the settings of the run in a folder, {} if there is none.

    The last entry of run.json has them. A folder into which somebody has copied a checkpoint has
    no run.json, and the checkpoint has them as well."""
    entries = run_files.run_entries(log_dir)
    if entries:
        return settings_of(entries[-1])
    checkpoint = checkpoints.newest_intact(Path(log_dir))
    return checkpoints.read_training_state(checkpoint, mmap=True)["config"] if checkpoint else {}

"""The run folder: log, checkpoints, code and curves.

A folder holds one run, which --resume continues. A run deletes only what it wrote: old checkpoints,
leftovers from a killed process, modules in code/ that no longer exist, and the lines of log.txt
that it is about to log again.

All ranks call the same methods, but only rank 0 writes files. run_files.py, checkpoints.py and
scripts.py define their formats."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import checkpoints, forks, huggingface, run_files, scripts
from support.checkpoints import checkpoint_path, list_checkpoints, step_of
from support.command_line import display_path, note, print0, print_changes, restore_fields, warn
from support.errors_and_signals import RunError, UserError, first_line
from support.files_and_locks import ROOT, fsync, locked, remove
from support.ranks import Ranks
from support.trackers import Tracker, start_trackers

if TYPE_CHECKING:
    from support.tokenizer import Tokenizer
    from train_gpt2 import GPT, TrainConfig


class RunFolder:
    """The folder log_dir, locked for this run within `with RunFolder(config, ranks) as run:`.

    train() calls find_checkpoint() and begin() first, log() and save_checkpoint() in the loop, and
    finish() at the end."""

    def __init__(self, config: "TrainConfig", ranks: Ranks, args: Sequence[str] | None = None):
        """`args` are the arguments of main(), or None for those of the command line."""
        self.config = config
        self.args = args
        self.ranks = ranks
        self.path = Path(config.log_dir)
        self.locks = contextlib.ExitStack()
        self.entries: list[dict[str, Any]] = []  # of run.json, one per start; begin() appends ours
        self.trackers: dict[str, Tracker] = {}  # TensorBoard and W&B, if enabled
        self.newest_step: int | None = None  # step of the newest intact checkpoint
        self.first_step = 0  # number of updates before this process started
        self.saved: dict[str, Any] = {}  # training state of the checkpoint we resume from
        self.verdict = ""  # console line that says whether the model is a GPT-2
        self.is_gpt2 = True
        self.warned_about_log = False

    def __enter__(self) -> "RunFolder":
        """Create the folder if necessary, and lock it.

        Raises UserError if another process holds the lock, or if check_content() rejects the
        folder."""
        if self.ranks.rank > 0:
            return self
        problem = f"{self.path}: in use by another run; end it, or choose another --log-dir"
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
        """Raise UserError if the folder holds a model, another program's files, or a run although
        --resume is not given."""
        names = ("config.json", "training_state.pt", "code")
        foreign = [name for name in names if (self.path / name).exists()]
        if foreign and not (self.path / "run.json").exists():
            problem = f"holds {foreign[0]}, but no run"
            if foreign != ["code"]:
                problem = "this is a model folder, not a run folder"
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
        """Return the newest intact checkpoint and its training state, the same on every rank.

        Returns (None, {}) without --resume, or if the folder holds no checkpoint."""
        if not self.config.resume:
            return None, {}
        checkpoint = self.ranks.on_rank_0(checkpoints.newest_intact, self.path)
        if checkpoint is None:
            self.ranks.on_rank_0(self.check_that_no_checkpoint_is_missing)
            return None, {}
        self.newest_step = self.first_step = step_of(checkpoint)
        if self.first_step > self.config.max_steps:
            remedy = "raise it, or choose another --log-dir"
            raise UserError(f"{checkpoint}: beyond --max-steps {self.config.max_steps}; {remedy}")
        self.saved = checkpoints.read_training_state(checkpoint)
        return checkpoint, self.saved

    def check_that_no_checkpoint_is_missing(self) -> None:
        """Raise UserError if the run got past its first checkpoint but none is left."""
        entries = run_files.run_entries(self.path)
        lines = run_files.log_lines(self.path / "log.txt")
        trained = any(stream == "train" for _, stream, _ in lines)
        # A step is logged after the save that precedes it, so any line from the first due step on
        # proves that a checkpoint existed.
        due = [min(e["config"]["save_every"], e["config"]["max_steps"]) for e in entries]
        if due and min(due) > 0:
            trained = any(step >= min(due) for step, _, _ in lines)
        if trained:
            problem = f"{self.path}: this run has no checkpoints"
            raise UserError(f"{problem}, so --resume cannot continue it; choose another --log-dir")
        if not entries:
            print0(f"--resume: no run in {self.path}/; starting a new one")

    def check_same_shards(self, saved: list[tuple[str, int]], now: list[tuple[str, int]]) -> None:
        """Raise UserError if the training data has changed since the checkpoint was saved.

        `saved` and `now` are the (name, size) of each shard."""
        if saved != now:
            different = sorted({name for name, _ in {*saved} ^ {*now}}) or ["in a different order"]
            more = ", …" if len(different) > 3 else ""
            # A .txt file counts as a single shard, named ".".
            names = f" ({', '.join(different[:3])}{more})" if different != ["."] else ""
            problem = f"{self.config.data} is not what the run has read so far{names}"
            raise UserError(f"--resume: {problem}; pass the original data with --data")

    def begin(self, model: "GPT", **details: Any) -> None:
        """Write run.json and code/, and drop the lines of log.txt that will be logged again.

        `details` are recorded in run.json."""
        if self.ranks.rank > 0:
            return
        # Fail now rather than at the first save, hours later.
        for name, value in {**asdict(model.config), **asdict(self.config)}.items():
            try:
                json.dumps(value)
            except TypeError as error:
                error.add_note(f"The setting `{name}` cannot be stored.")
                raise
        scripts.warn_if_not_reloaded(type(model))
        for path in self.path.glob(".*.partial"):  # left over from a killed process
            remove(path)
        config = asdict(self.config)
        self.entries = run_files.run_entries(self.path) if self.config.resume else []
        previous = self.saved.get("config")
        previous = previous or (settings_of(self.entries[-1]) if self.entries else {})
        if previous:
            previous = restore_fields(type(self.config), previous)
            print_changes(previous, config, ignore={"log_dir", "resume", "plan", "init"})
            steps = [type(self.config)(**s).warmdown_steps for s in (previous, config)]
            if config["schedule"] == "wsd" and steps[0] != steps[1]:
                print0(f"the final linear decay takes {steps[1]:,} steps instead of {steps[0]:,}")
        command = sys.argv
        if self.args is not None and not hasattr(sys.modules["__main__"], "__file__"):  # a notebook
            command = [scripts.script_name(type(model)), *self.args]
        details |= {"step": self.first_step, "vocab_size": model.config.vocab_size}
        script = scripts.script_name(type(model))
        last_script = self.entries[-1].get("script") if self.entries else script
        details |= {"init": display_path(details["init"]), "script": script}
        self.entries.append(run_files.new_entry(config, command, **details))
        # Before write_entries(), because this adds the W&B run id to the last entry.
        self.trackers = start_trackers(self.path, self.entries, self.first_step)
        if changes := scripts.changes_since(self.path / "code"):
            note(f"the code has changed since the last start: {changes}")
        if last_script != script:
            note(f"the script was {last_script} at the last start, and is now {script}")
        run_files.write_entries(self.path, self.entries)
        scripts.write_code(self.path / "code")
        evaluations = run_files.trim_log(self.path, self.first_step)
        # Send the kept evaluations again, because TensorBoard purges from first_step on.
        self.track(self.first_step, evaluations)
        why_not = forks.why_not_gpt2(model)
        self.verdict, self.is_gpt2 = forks.verdict(why_not), not why_not

    def print_header(self, checkpoint: Path | None) -> None:
        """Print the end of the run's header: the verdict on the model, and where files go."""
        resumed = f", resumed from {checkpoint}" if checkpoint else ""
        print0(self.verdict)
        print0(f"log and checkpoints: {self.path}/{resumed}")

    def check_in_place(self) -> None:
        """Raise RunError if the folder was renamed, removed or replaced."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), self.identity):
                return
        problem = f"{self.path}/ was renamed, removed or replaced during the run"
        raise RunError(f"{problem}; if it was moved, continue with --resume --log-dir NEW_PATH")

    # ---- During training

    def log(self, step: int, **values: float) -> None:
        """Append each stream=value to log.txt, and send them to the trackers."""
        if self.ranks.rank > 0 or not values:
            return
        self.check_in_place()
        if step == self.first_step:  # a resumed run may repeat evaluations, so replace them
            run_files.remove_values(self.path, step, values)
        try:
            run_files.append_values(self.path, step, values)
        except OSError as error:
            if not self.warned_about_log:
                warn(f"{self.path}/log.txt: {error.strerror}; lines are lost until this is fixed")
            self.warned_about_log = True
        self.track(step, values)

    def track(self, step: int, values: dict[str, float]) -> None:
        """Send values to the trackers. The run continues without a tracker that fails."""
        for name, tracker in list(self.trackers.items()):
            try:
                tracker(step, values)
            except Exception as error:
                warn(f"--{name}: disabled after an error ({first_line(error)})")
                del self.trackers[name]

    def save_checkpoint(
        self, model: "GPT", tokenizer: "Tokenizer", state: dict[str, Any], required: bool
    ) -> None:
        """Write a checkpoint atomically. No-op if this step already has one.

        `state` is the training state built by save() in train_gpt2.py. If the write fails, e.g.
        because the disk is full, earlier checkpoints are untouched, and this raises UserError if
        the checkpoint is `required`, or else prints an error line."""
        step = state["step"]
        if step == self.newest_step:
            return
        state |= {"config": asdict(self.config)}

        def save_model(folder: Path) -> str:
            """Write the model and its script. Return the text of README.md."""
            model.save_pretrained(folder, tokenizer)
            scripts.write_code(self.path / "code", overwrite=False)
            script = scripts.path_in_code(type(model))
            if script and (self.path / "code" / script).exists():
                shutil.copyfile(self.path / "code" / script, folder / script.name)
            return huggingface.model_card(folder, self.entries, step)

        def write() -> str:
            """Write the checkpoint on rank 0. Return what went wrong, or ""."""
            self.check_in_place()
            # Flush the log first. A resumed run does not log earlier steps again, so their lines
            # must survive a power failure.
            with contextlib.suppress(OSError):
                fsync(self.path / "log.txt")
            return checkpoints.write_checkpoint(checkpoint_path(self.path, step), save_model, state)

        problem = self.ranks.on_rank_0(write)
        if problem and required:
            raise UserError(f"{problem}: free some space, then continue with --resume")
        if problem:
            warn(problem, label="error")
            return
        self.newest_step = step
        if self.ranks.rank == 0:  # training may turn a GPT-2 into something else, or back
            is_gpt2 = huggingface.is_gpt2(checkpoint_path(self.path, step))
            if is_gpt2 != self.is_gpt2:
                print0(f"step {step:5d} the checkpoint is {'' if is_gpt2 else 'not '}a GPT-2")
            self.is_gpt2 = is_gpt2
        self.delete_old_checkpoints()
        self.draw_curves()

    def validation_losses(self) -> dict[int, float]:
        """Return {step: validation loss} of the evaluated checkpoints."""
        steps, losses = run_files.read_log(self.path).get("val", ([], []))
        saved = {step_of(checkpoint) for checkpoint in list_checkpoints(self.path)}
        return {
            step: loss
            for step, loss in zip(steps, losses, strict=True)
            if step in saved and isfinite(loss)
        }

    def delete_old_checkpoints(self) -> None:
        """Delete old checkpoints.

        Keeps the newest --keep-checkpoints, the best one, and the one this process resumed from."""
        if self.ranks.rank > 0:
            return
        losses = self.validation_losses()
        keep = {self.first_step}
        if losses:
            keep.add(best_of(losses))
        number = self.config.keep_checkpoints
        checkpoints.delete_checkpoints(self.path, self.newest_step, number, keep)

    def draw_curves(self) -> None:
        """Draw curves.png, or print a warning if that fails."""
        if self.ranks.rank > 0 or not run_files.read_log(self.path):
            return
        try:
            from support.plots import save_curves  # here, as matplotlib takes a second to import

            save_curves(self.path)
        except Exception as error:
            warn(f"{self.path}/curves.png: not drawn ({first_line(error)})")

    # ---- The end

    def print_stop(self, step: int) -> None:
        """Print the number of updates before a signal stopped the run, and how to continue it."""
        hint = "no checkpoint was saved"
        if self.config.save_every:
            hint = f"continue with --resume --log-dir {shlex.quote(str(self.path))}"
        print0(f"stopped by a signal after {step} updates; {hint}")

    def finish(self, model: "GPT", step: int) -> None:
        """Delete old checkpoints, draw the curves, and print how to find and sample the model."""
        if self.ranks.rank > 0:
            return
        # Again, because the last checkpoint was evaluated after it was saved.
        self.delete_old_checkpoints()
        self.draw_curves()
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        kind = "in Hugging Face format"
        if not self.is_gpt2:
            name = scripts.script_name(type(model))
            kind = f"not a GPT-2 (gpt2-repro-fork), so only {name} can load it"
        print0(f"model: {checkpoint_path(self.path, step)}/, {kind}")
        losses = self.validation_losses()
        best = best_of(losses) if losses else step
        if best != step:
            path = checkpoint_path(self.path, best)
            print0(f"best checkpoint: {path}/, with a validation loss of {losses[best]:.4f}")
        # --code can load the class only from the file that was started: not from a package, a
        # notebook, or a program that patches train_gpt2.py.
        started = sys.modules["__main__"]
        file = Path(getattr(started, "__file__", None) or "").absolute()
        script = scripts.script_of(type(model))
        loadable = script == file and started.__spec__ is None
        if not self.is_gpt2 and not loadable:
            return
        command = ["python", display_path(ROOT / "sample.py"), str(self.path)]
        if self.config.sample_prompt:  # otherwise sample.py reads prompts from stdin
            command.append(self.config.sample_prompt)
        if loadable and script.resolve() != (ROOT / "train_gpt2.py").resolve():
            command += ["--code", display_path(script)]
        print0(f"sample: {shlex.join(command)}")


def best_of(losses: dict[int, float]) -> int:
    """Return the step with the lowest loss, the latest one in case of a tie."""
    return min(sorted(losses, reverse=True), key=losses.get)


def settings_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in an entry of run.json, with absolute paths."""
    return entry["config"] | entry["paths"]


def read_run(log_dir: str) -> dict[str, Any]:
    """Return the settings of the run in log_dir, or {} if it holds none.

    They come from the last entry of run.json. A folder without run.json may still hold a copied
    checkpoint, which stores them too."""
    entries = run_files.run_entries(log_dir)
    if entries:
        return settings_of(entries[-1])
    checkpoint = checkpoints.newest_intact(Path(log_dir))
    return checkpoints.read_training_state(checkpoint, mmap=True)["config"] if checkpoint else {}

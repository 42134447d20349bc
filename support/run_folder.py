"""The folder of a run, with its log, its checkpoints and its curves.

A folder holds one run, which --resume continues. Without --resume the folder of an earlier run is
renamed to make room: log/ becomes log_1/, or the next free number.

All ranks call the same methods, and rank 0 alone reads and writes the files. Their formats are in
log_txt.py, run_json.py and checkpoints.py."""

import contextlib
import json
import os
import shlex
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support import checkpoints, forks, huggingface, log_txt, run_json, scripts
from support.checkpoints import checkpoint_path, list_checkpoints, step_of
from support.command_line import note, print0, print_changes, shown, warn
from support.errors_and_signals import RunError, UserError, first_line
from support.files_and_locks import ROOT, atomic_path, fsync, locked, remove
from support.ranks import Ranks
from support.run_setup import Setup
from support.trackers import Tracker, check_trackers, start_trackers

if TYPE_CHECKING:
    from support.tokenizer import Tokenizer
    from train_gpt2 import GPT, TrainConfig


class RunFolder:
    """`with RunFolder(config, ranks) as run:` keeps other runs out of the folder.

    train() first calls find_checkpoint() and begin(). While it trains it calls log() and
    save_checkpoint(), and at the end finish()."""

    def __init__(self, config: "TrainConfig", ranks: Ranks, model_class: "type[GPT]"):
        """`model_class` is the class of the model. Its file is the script of the run."""
        self.config = config
        self.ranks = ranks
        self.path = Path(config.log_dir)
        self.script = scripts.script_of(model_class)
        self.script_entry = scripts.script_entry(model_class)
        self.locks = contextlib.ExitStack()
        # run.json is a list with one entry for each start of the run. begin() appends this one.
        self.entries: list[dict[str, Any]] = []
        self.trackers: dict[str, Tracker] = {}  # TensorBoard and W&B, if they are asked for
        self.newest_step: int | None = None  # step of the newest checkpoint that is not damaged
        self.resumed_step: int | None = None  # step of the checkpoint from which the run resumed
        self.saved: dict[str, Any] = {}  # what that checkpoint contains besides the weights
        self.script_has_changed = False  # since that checkpoint was saved
        # A resumed run repeats the evaluations of its first step. Those that log.txt already has
        # must not be logged twice. They are named by step and stream, such as (200, "val").
        self.already_logged: dict[tuple[int, str], float] = {}
        self.warned_of_log = False

    def __enter__(self) -> "RunFolder":
        if any((self.path / name).exists() for name in ("config.json", "training_state.pt")):
            problem = "the folder of a model, not of a run"
            remedy = f"--log-dir {shlex.quote(str(self.path.parent))} is that of its run"
            if not (self.path.parent / "run.json").exists():
                remedy = "copy it into a new folder, and give that to --log-dir"
            raise UserError(f"--log-dir {self.path}: {problem}; {remedy}")
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
        self.identity = self.path.stat()

    # ---- The start

    def find_checkpoint(self) -> tuple[Path | None, dict[str, Any]]:
        """With --resume, the newest checkpoint that is not damaged, and the dictionary that was
        given to save_checkpoint(). (None, {}) if there is none. The same on every rank.

        Raises UserError if another script has trained it."""
        if not self.config.resume:
            return None, {}
        entries = run_json.run_entries(self.path)
        if entries:
            scripts.is_other_version(entries[-1], self.script_entry, f"--resume: {self.path}")
        checkpoint = self.ranks.on_rank_0(checkpoints.newest_intact, self.path)
        if checkpoint is None:
            if not entries:
                print0(f"--resume: no run in {self.path}/, so it starts one")
            return None, {}
        self.newest_step = self.resumed_step = step_of(checkpoint)
        if self.resumed_step > self.config.max_steps:
            remedy = "use more steps, or another --log-dir"
            raise UserError(f"{checkpoint}: beyond --max-steps {self.config.max_steps}; {remedy}")
        self.saved = checkpoints.read_training_state(checkpoint)
        self.script_has_changed = scripts.is_other_version(
            self.saved, self.script_entry, f"--resume: {checkpoint}"
        )
        return checkpoint, self.saved

    def check_same_shards(self, before: list[tuple[str, int]], now: list[tuple[str, int]]) -> None:
        """Raises UserError if the training data of a resumed run differ. They are compared by the
        names and the sizes of their shards."""
        if before != now:
            different = sorted({name for name, _ in {*before} ^ {*now}}) or ["another order"]
            more = ", …" if len(different) > 3 else ""
            names = f" ({', '.join(different[:3])}{more})" if different != ["."] else ""  # a text
            problem = f"{self.config.data} is not what the run has read so far{names}"
            raise UserError(f"--resume: {problem}; --data names another")

    def begin(self, model: "GPT", setup: Setup, step: int, weights: Path | None) -> None:
        """Prepares the folder for a run that starts, or is resumed, at `step`.

        Renames an earlier run that is not resumed. Writes run.json and a copy of the program, and
        removes from log.txt what will be logged again. `weights` is the folder of the model from
        which the run starts, or None if the weights are random."""
        if self.ranks.rank > 0:
            return
        check_trackers(self.config)
        if self.config.save_every:
            json.dumps(asdict(model.config))  # or the first checkpoint would fail, hours later
        script = self.script
        names = {"code", script.name if script else "code"}
        # A folder into which somebody has only copied a checkpoint holds a run as well.
        has_run = (self.path / "run.json").exists() or bool(list_checkpoints(self.path))
        has_log = (self.path / "log.txt").exists()  # build-nanogpt, for example, writes one, too.
        is_resumed = has_run and self.config.resume
        if is_resumed:
            self.entries = run_json.run_entries(self.path)
        elif has_run or has_log:
            self.rename_earlier(script)
        elif found := [name for name in names if (self.path / name).exists()]:
            problem = f"{self.path / found[0]} would be replaced"
            raise UserError(f"{problem}; choose another --log-dir")
        for path in self.path.glob(".*.partial"):  # what a killed process was writing
            remove(path)

        if is_resumed:
            # A folder into which a checkpoint was copied has no entries.
            previous = self.saved.get("config") or run_json.run_config(self.entries[-1])
            print_changes(
                previous, asdict(self.config), ignore={"log_dir", "resume", "plan", "init"}
            )
            changed = script.name if self.script_has_changed else ""
            if self.entries:
                changed = scripts.changed_since(self.entries[-1]["code"], script)
            if changed:
                note(f"changed since the last start: {changed}; log/code/ gets the new version")
        about = {
            "step": step,
            "init": shown(weights) if weights else "scratch",
            "world_size": self.ranks.world_size,
            "device": setup.device_line,
            "dtype": setup.precision,
            "micro_batch_size": setup.B,
            "vocab_size": model.config.vocab_size,
            **self.script_entry,  # the name and the checksum of the script
            "code": scripts.code_checksums(script),
        }
        self.entries.append(run_json.new_entry(asdict(self.config), **about))
        # This adds the id of a W&B run to the last entry, so it comes before run.json is written.
        self.trackers = start_trackers(self.path, self.entries, step)
        run_json.write_entries(self.path, self.entries)
        scripts.write_program(self.path / "code", script)
        if script is not None:  # A class that was defined in a notebook has no script.
            with atomic_path(self.path / script.name) as copy:
                copy.write_bytes(scripts.read_once(script))

        if step == 0:
            self.keep_log_of_deleted_checkpoints()
        # A run evaluates a checkpoint after saving it, so log.txt may have these evaluations.
        evaluations = log_txt.trim_log(self.path, step)
        self.already_logged = {(step, stream): value for stream, value in evaluations.items()}
        if evaluations:
            # TensorBoard has dropped its values from this step on, so they are sent again.
            self.track(step, evaluations)

    def keep_log_of_deleted_checkpoints(self) -> None:
        """Renames log.txt if it reaches a step at which the run has saved a checkpoint, since
        somebody has deleted them all, and the run starts again. The log of a run that ended without
        saving any is kept in the same way."""
        steps, _ = log_txt.read_log(self.path).get("train", ([], []))
        earlier = [entry["config"] for entry in self.entries[:-1]]
        due = [min(c["save_every"] or c["max_steps"], c["max_steps"]) for c in earlier]
        if not steps or not due or steps[-1] + 1 < min(due):
            return
        renamed = self.path / "log_old.txt"
        if renamed.exists():
            renamed = free_name(renamed)
        (self.path / "log.txt").rename(renamed)
        warn(f"no checkpoint is left, so the run starts again; its log is now {renamed}")

    def rename_earlier(self, script: Path | None) -> None:
        """Renames the folder of an earlier run, and makes a new one in its place.

        Raises UserError if something that is needed lies in there."""
        needed = {"--data": self.config.data, "--hellaswag-data": self.config.hellaswag_data}
        needed |= {"--init": self.config.init, "this program": ROOT, "this script": script or ROOT}
        for name, path in needed.items():
            inside = path and Path(path).resolve().is_relative_to(self.path.resolve())
            if inside and Path(path).exists():
                self.refuse_to_rename(f"{name} {path} is in there")
        for other in self.path.glob("**/run.json"):
            if other.parent != self.path:
                self.refuse_to_rename(f"another run is in {other.parent}/")
        if self.path.is_symlink():
            self.refuse_to_rename("it is a link")
        try:
            renamed = self.path.rename(free_name(self.path))
        except (OSError, ValueError) as error:  # such as a mount, or --log-dir .
            self.refuse_to_rename(first_line(error))
        self.make_and_lock()
        hint = ""
        if list_checkpoints(renamed):
            hint = f" (--resume --log-dir {shlex.quote(str(renamed))} continues it)"
        print0(f"an earlier run is now in {renamed}/{hint}")

    def refuse_to_rename(self, reason: str) -> None:
        problem = f"{self.path}: holds an earlier run and cannot be renamed ({reason})"
        raise UserError(f"{problem}; choose another --log-dir, or continue it with --resume")

    def check_in_place(self) -> None:
        """Raises RunError if the folder was renamed or removed, or another one took its place."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), self.identity):
                return
        problem = f"{self.path}/ is no longer the folder in which this run began"
        raise RunError(f"{problem}; --resume continues it where it is now")

    # ---- While it trains

    def log(self, step: int, **values: float) -> None:
        """Appends values to log.txt and sends them to the trackers: log(step, stream=value, …).

        Skips evaluations that were logged before the run was resumed."""
        if self.ranks.rank > 0:
            return
        self.check_in_place()
        new = {}
        for name, value in values.items():
            name = log_txt.valid_name(name)
            logged = self.already_logged.get((step, name))
            if logged is None:
                new[name] = value
            elif abs(value - logged) > 1e-4 * abs(logged):
                note(f"step {step}: {name} is {value:.4f} now, and stays {logged:.4f} in log.txt")
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
        state |= {"config": asdict(self.config), **self.script_entry}

        def write() -> str:
            """Returns what went wrong, or an empty string."""
            self.check_in_place()
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

    def print_stop(self, step: int) -> None:
        """Prints after how many updates a signal has stopped the run, and how to continue it."""
        hint = "nothing is saved"
        if self.config.save_every:
            hint = f"--resume --log-dir {shlex.quote(str(self.path))} continues"
        print0(f"stopped by a signal after {step} updates; {hint}")

    def finish(self, model: "GPT", step: int) -> None:
        """Prints where the model and the curves are, and how to sample from the model."""
        if self.ranks.rank > 0 or step == 0:  # With --max-steps 0 nothing is saved.
            return
        # The last checkpoint has now been evaluated, and may be the best one.
        self.delete_old_checkpoints()
        self.draw_curves()
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        script = self.script
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
        if script and script.resolve() != (ROOT / "train_gpt2.py").resolve():
            command += ["--code", shown(script)]
        print0(f"sample: {shlex.join(command)}")


def best_of(losses: dict[int, float]) -> int:
    """The step with the lowest loss. Of equally good steps it is the latest."""
    return min(sorted(losses, reverse=True), key=losses.get)


def free_name(path: Path) -> Path:
    """log_1 for log, or log_2 if that is taken, and so on. A file keeps its ending."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (free := path.with_name(f"{stem}_{number}{suffix}")).exists():
        number += 1
    return free


def read_run(log_dir: str) -> dict[str, Any]:
    """The settings of the run in a folder, {} if there is none.

    The last entry of run.json has them. A folder into which somebody has copied a checkpoint has
    no run.json, and the checkpoint has them as well."""
    entries = run_json.run_entries(log_dir)
    if entries:
        return run_json.run_config(entries[-1])
    checkpoint = checkpoints.newest_intact(Path(log_dir))
    return checkpoints.read_training_state(checkpoint, mmap=True)["config"] if checkpoint else {}

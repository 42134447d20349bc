"""The folder of a run, as train_gpt2.py uses it: where to start, the log, checkpoints, curves.

A folder holds one run. --resume continues it. Without --resume the folder of an earlier run is
renamed, log/ to log_1/ or the first free number, and --resume --log-dir log_1 continues it there.

All ranks call the same methods, but only rank 0 reads and writes. The formats are in log_txt.py,
run_json.py and checkpoints.py."""

import contextlib
import shlex
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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

    train() first calls find_checkpoint() and begin(). As the run goes on it calls log() and
    save_checkpoint(), and finish() at the end."""

    def __init__(self, config: "TrainConfig", ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.path = Path(config.log_dir)
        self.locks = contextlib.ExitStack()
        self.entries: list[dict[str, Any]] = []  # of run.json, the last one about this start
        self.trackers: dict[str, Tracker] = {}  # those of --tensorboard and --wandb
        self.newest: int | None = None  # the step of the newest intact checkpoint
        self.resumed: int | None = None  # the step of the one that this process has resumed
        self.known: set[tuple[int, str]] = set()  # evaluations in the log: a step and a stream
        self.log_is_full = False  # a full disk has lost lines of log.txt

    def __enter__(self) -> "RunFolder":
        if self.path.exists() and self.path.samefile(ROOT):
            raise UserError(f"--log-dir {self.path}: the repository itself; choose another folder")
        if self.ranks.rank == 0:
            self.lock()
        return self

    def __exit__(self, *_: Any) -> None:
        self.locks.close()

    def lock(self) -> None:
        problem = f"{self.path}: another run uses it; choose another --log-dir"
        self.locks.enter_context(locked(self.path, problem))

    # ---- The start

    def find_checkpoint(self) -> Path | None:
        """The newest intact checkpoint, as rank 0 has verified it. None if there is none."""
        checkpoint = self.ranks.on_rank_0(checkpoints.find_checkpoint, self.path)
        if checkpoint is not None:
            self.newest = self.resumed = step_of(checkpoint)
            if self.newest > self.config.max_steps:
                problem = f"is beyond --max-steps {self.config.max_steps}"
                raise UserError(f"{checkpoint} {problem}: raise it, or choose another --log-dir")
        return checkpoint

    def begin(self, model: "GPT", step: int, weights: Path | None, **about: Any) -> None:
        """Prepares the folder for a start at `step`. `weights` is the folder of the weights with
        which the run starts, or None if they are random.

        An earlier run's folder is renamed, unless this run resumes it. Writes run.json, which says
        of this start what `about` has, and a copy of the script."""
        if self.ranks.rank > 0:
            return
        holds_run = (self.path / "run.json").exists() or list_checkpoints(self.path)
        other_log = (self.path / "log.txt").exists()  # maybe of another program
        if not (self.config.resume and holds_run) and (holds_run or other_log):
            self.rename_earlier()
        for remainder in self.path.glob(".*.partial"):  # of a process that was killed
            remove(remainder)

        about |= {"step": step, "world_size": self.ranks.world_size}
        about |= {"vocab_size": model.config.vocab_size}
        about |= {"init": shown(weights) if weights else "scratch"}
        about |= forks.script_entry(type(model))  # the name and the checksum of the script
        if self.ranks.device.type == "cuda":
            about["cudnn"] = torch.backends.cudnn.version()
        new_entry = run_json.new_entry(asdict(self.config), **about)
        self.entries = [*run_json.run_entries(self.path), new_entry]
        self.trackers = start_trackers(self.path, self.entries, step)
        run_json.write_entries(self.path, self.entries)
        script, source = forks.script_of(type(model))
        if script is not None:
            with atomic_path(self.path / script.name) as copy:
                copy.write_bytes(source)

        evaluations = log_txt.trim_log(self.path / "log.txt", step)
        self.known = {(step, stream) for stream in evaluations}
        if evaluations:
            self.track(step, evaluations)  # TensorBoard drops what it has of this step

    def rename_earlier(self) -> None:
        """Renames the folder of an earlier run, with all that is in it, and makes a new one."""
        init = Path(self.config.init)
        if init.exists() and init.resolve().is_relative_to(self.path.resolve()):
            problem = f"is in {self.path}/, which would be renamed"
            raise UserError(f"--init {init}: {problem}; choose another --log-dir")
        try:
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}_{number}")).exists():
                number += 1
            self.path.rename(aside)
        except (OSError, ValueError) as error:  # such as a mount, or --log-dir .
            problem = f"holds an earlier run and cannot be renamed ({first_line(error)})"
            raise UserError(f"{self.path}: {problem}; choose another --log-dir") from None
        self.lock()
        print0(f"an earlier run is now in {aside}/ (--resume --log-dir {aside} continues it)")

    # ---- While it trains

    def log(self, step: int, **values: float) -> None:
        """Appends values to log.txt and sends them to the trackers: log(step, stream=value, …).

        Evaluations that were logged before the run was resumed are not logged again."""
        if any(" " in stream for stream in values):  # log.txt could not be read again
            raise ValueError(f"a stream's name contains a space: {', '.join(values)}")
        if self.ranks.rank > 0:
            return
        values = {name: value for name, value in values.items() if (step, name) not in self.known}
        try:
            log_txt.append_values(self.path / "log.txt", step, values)
        except OSError as error:
            if not self.log_is_full:
                warn(f"{self.path}/log.txt: {error.strerror}; lines are lost until there is room")
            self.log_is_full = True
        self.track(step, values)

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

        A full disk leaves earlier checkpoints intact. Then this prints an error line, or raises
        UserError if the checkpoint is required."""
        step = state["step"]
        if step == self.newest:
            return

        def write() -> str:
            with contextlib.suppress(OSError):  # a log that can't be flushed must not end the run
                fsync(self.path / "log.txt")  # on disk it must not end before the checkpoint
            # The command of the first start says more than `--resume`.
            entry = self.entries[-1] | {"command": self.entries[0]["command"]}
            card = checkpoints.model_card(model, entry, step)
            return checkpoints.write_checkpoint(
                checkpoint_path(self.path, step),
                lambda folder: model.save_pretrained(folder, tokenizer),
                state,
                card,
            )

        problem = self.ranks.on_rank_0(write)
        if problem and required:
            raise UserError(f"{problem}: free some space; --resume continues")
        if problem:
            warn(problem, "error")
        else:
            self.newest = step
            self.clean_up()

    def clean_up(self) -> None:
        """Deletes old checkpoints, and draws curves.png."""
        if self.ranks.rank > 0:
            return
        best, _ = self.best()
        keep = self.config.keep_checkpoints
        checkpoints.prune_checkpoints(self.path, self.newest, keep, {best, self.resumed})
        if not log_txt.read_log(self.path):  # stopped before the first update
            return
        try:
            from support.plots import save_curves

            save_curves(self.path)
        except Exception as error:  # of any kind: matplotlib's, a full disk
            warn(f"{self.path}/curves.png: not drawn ({first_line(error)})")

    def best(self) -> tuple[int | None, float]:
        """(step, validation loss) of the best checkpoint, of equal ones the latest; (None, inf) if
        none was evaluated."""
        steps, losses = log_txt.read_log(self.path).get("val", ([], []))
        evaluated = dict(zip(steps, losses, strict=True))
        saved = [step_of(checkpoint) for checkpoint in list_checkpoints(self.path)]
        candidates = [step for step in saved if isfinite(evaluated.get(step, inf))]
        best = min(reversed(candidates), key=evaluated.__getitem__, default=None)
        return best, evaluated.get(best, inf)

    # ---- The end

    def finish(self, model: "GPT", step: int) -> None:
        """Lists the run's outputs, and how to sample from its model."""
        if self.ranks.rank > 0:
            return
        self.clean_up()  # now that the last validation loss is known
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        if step == 0:
            return  # no checkpoint
        script, _ = forks.script_of(type(model))
        is_gpt2 = forks.is_gpt2(model)
        kind = "in Hugging Face format"
        if not is_gpt2:
            kind = f"no GPT-2 any more (gpt2-repro-fork), so only {script.name} opens it"
        print0(f"model: {checkpoint_path(self.path, step)}/, {kind}")
        best, loss = self.best()
        if best not in (None, step):
            advice = "if the last one is clearly higher, train for fewer steps"
            print0(
                f"best: {checkpoint_path(self.path, best)}/, validation loss {loss:.4f}; {advice}"
            )
        command = ["python", shown(ROOT / "sample.py"), str(self.path)]
        if self.config.sample_prompt:  # without one, sample.py asks for it
            command.append(self.config.sample_prompt)
        if script and script != ROOT / "train_gpt2.py":
            command += ["--code", shown(script)]
        if not is_gpt2:  # it may need this precision
            command += ["--dtype", self.entries[-1]["dtype"]]
        print0(f"sample: {shlex.join(command)}")


def read_run(log_dir: str) -> dict[str, Any] | None:
    """What the run in a folder has stored of its settings ("config") and of its script.

    Its newest checkpoint has them, with absolute paths. Before its first one, run.json has them.
    None if there is no run."""
    stored = checkpoints.newest_settings(Path(log_dir))
    if stored is None:
        entries = run_json.run_entries(log_dir)
        stored = entries[-1] if entries else None
    return stored

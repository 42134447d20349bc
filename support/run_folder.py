"""The folder of a run, as train_gpt2.py uses it: where to start, the log, checkpoints, curves.

A folder holds one run. --resume continues it; without --resume the folder of an earlier run is
renamed, log/ to log_1/ or the first free number, where --resume --log-dir log_1 continues it.

Only rank 0 reads and writes. The other ranks call the same methods, which tell them what rank 0
found or do nothing. The formats are in log_txt.py, run_json.py and checkpoints.py."""

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
from support.files_and_locks import ROOT, fsync, locked, remove
from support.ranks import Ranks

if TYPE_CHECKING:
    from support.tokenizer import Tokenizer
    from train_gpt2 import GPT, TrainConfig


class RunFolder:
    """`with RunFolder(config, ranks) as run:` keeps other runs out of the folder.

    First come find_checkpoint() and begin(), then log() and save_checkpoint() as the run goes on,
    and finish() at its end."""

    def __init__(self, config: "TrainConfig", ranks: Ranks):
        self.config = config
        self.ranks = ranks
        self.path = Path(config.log_dir)
        self.locks = contextlib.ExitStack()
        self.entries: list[dict[str, Any]] = []  # of run.json
        self.trackers: list[Any] = []
        self.saved_step: int | None = None  # the step of the newest intact checkpoint
        self.resumed_step: int | None = None  # of the one from which this process goes on
        self.logged: dict[str, int] = {}  # stream: the step of its latest value
        self.val_losses: dict[int, float] = {}  # step: validation loss
        self.log_failed = False  # a full disk has lost lines
        self.script: Path | None = None  # the file that defines the model

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

    def find_checkpoint(self) -> Path | None:
        """The newest intact checkpoint, as rank 0 has verified it. None if there is none."""
        checkpoint = self.ranks.on_rank_0(checkpoints.find_checkpoint, self.path)
        if checkpoint is not None:
            self.saved_step = self.resumed_step = step_of(checkpoint)
            if self.saved_step > self.config.max_steps:
                problem = f"is beyond --max-steps {self.config.max_steps}"
                raise UserError(f"{checkpoint} {problem}: raise it, or choose another --log-dir")
        return checkpoint

    def begin(self, model: "GPT", step: int, weights: Path | None, **about: Any) -> None:
        """Prepares the folder for a start at `step`, with the weights of a folder or random ones.

        An earlier run's folder is renamed, unless this run resumes it. Writes run.json, which
        describes this start, also by what `about` has, and a copy of the script."""
        if self.ranks.rank > 0:
            return
        self.script, source = forks.script_of(type(model))
        holds_run = (self.path / "run.json").exists() or list_checkpoints(self.path)
        used = holds_run or (self.path / "log.txt").exists()  # of another program
        aside = self.rename_earlier() if used and not (self.config.resume and holds_run) else None
        for pattern in ("step_*", "run.json", "log.txt", "*.py", "curves.png"):
            for remainder in self.path.glob(f".{pattern}.*.partial"):  # of a killed process
                remove(remainder)
        try:
            earlier = run_json.run_entries(self.path)
            if self.ranks.device.type == "cuda":
                about["cudnn"] = torch.backends.cudnn.version()
            about |= dict(step=step, world_size=self.ranks.world_size)
            about |= dict(vocab_size=model.config.vocab_size)
            about["init"] = shown(weights) if weights else "scratch"
            about |= forks.script_entry(type(model))
            entry = run_json.new_entry(asdict(self.config), self.script) | about
            self.entries = [*earlier, entry]
            if self.config.tensorboard or self.config.wandb:
                from support.trackers import start_trackers

                self.trackers = start_trackers(self.path, self.entries, step)
            run_json.copy_script(self.path, self.entries, self.script, source)
        except BaseException:  # such as no account at W&B, or a full disk
            if aside:  # nothing shall have changed
                remove(self.path)
                aside.rename(self.path)
            raise
        if aside:
            print0(f"an earlier run is now in {aside}/ (--resume --log-dir {aside} continues it)")
        kept = log_txt.trim_log(self.path / "log.txt", step)  # evaluations at this step
        self.logged = dict.fromkeys(kept, step)
        steps, losses = log_txt.read_log(self.path).get("val", ((), ()))
        self.val_losses = dict(zip(steps, losses, strict=True))
        if kept:
            self.track(step, kept)  # TensorBoard drops what it has of this step

    def rename_earlier(self) -> Path:
        """Renames the folder of an earlier run, with all that is in it, and makes a new one.

        Returns its new name."""
        if not self.path.name:  # --log-dir .
            raise UserError(f"{self.path}: holds an earlier run; choose another --log-dir")
        init = Path(self.config.init)
        if init.exists() and init.resolve().is_relative_to(self.path.resolve()):
            problem = f"is in {self.path}/, which would be renamed"
            raise UserError(f"--init {init}: {problem}; choose another --log-dir")
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}_{number}")).exists():
            number += 1
        try:
            self.path.rename(aside)
        except OSError as error:  # such as a mount
            problem = f"holds an earlier run and cannot be renamed ({error.strerror})"
            raise UserError(f"{self.path}: {problem}; choose another --log-dir") from None
        self.lock()
        return aside

    def log(self, step: int, **values: float) -> None:
        """Appends values to log.txt and sends them to the trackers: log(step, stream=value, …).

        Skips evaluations that were logged before the run was resumed."""
        if any(" " in stream for stream in values):  # log.txt could not be read again
            raise ValueError(f"a stream's name contains a space: {', '.join(values)}")
        if self.ranks.rank > 0:
            return
        values = {name: value for name, value in values.items() if self.logged.get(name) != step}
        self.logged |= dict.fromkeys(values, step)
        if "val" in values:
            self.val_losses[step] = values["val"]
        lines = "".join(log_txt.format_line(step, name, value) for name, value in values.items())
        try:
            log_txt.append(self.path / "log.txt", lines.encode())
        except OSError as error:
            if not self.log_failed:
                warn(f"{self.path}/log.txt: {error.strerror}; lines are lost until there is room")
            self.log_failed = True
        self.track(step, values)

    def track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker(step, values)

    def save_checkpoint(
        self, model: "GPT", tokenizer: "Tokenizer", state: dict[str, Any], required: bool
    ) -> None:
        """Writes a checkpoint, unless there is one of this step. It appears whole or not at all.

        A full disk leaves earlier checkpoints intact. Then this prints an error line, or raises
        UserError if the checkpoint is required."""
        if self.saved_step == state["step"]:
            return
        problem = self.ranks.on_rank_0(self._save, model, tokenizer, state)
        if problem and required:
            raise UserError(f"{problem}: free some space; --resume continues")
        if problem and self.ranks.rank == 0:
            warn(problem, "error")
        if not problem:
            self.saved_step = state["step"]
            self.clean_up()

    def _save(self, model: "GPT", tokenizer: "Tokenizer", state: dict[str, Any]) -> str:
        with contextlib.suppress(OSError):  # a log that can't be flushed must not end the run
            fsync(self.path / "log.txt")  # on disk it must not end before the checkpoint
        step = state["step"]
        tokens = step * self.config.total_batch_size
        is_gpt2 = forks.is_gpt2(model)
        context = model.config.block_size
        # The command of the first start says more than `--resume`.
        about = self.entries[-1] | {"command": self.entries[0]["command"]}
        card = checkpoints.model_card(about, context, step, tokens, is_gpt2)
        return checkpoints.write_checkpoint(
            checkpoint_path(self.path, step),
            lambda partial: model.save_pretrained(partial, tokenizer),
            state,
            card,
        )

    def best(self) -> tuple[int | None, float]:
        """(step, validation loss) of the best checkpoint, of equal ones the latest; (None, inf) if
        none was evaluated."""
        losses = {step: loss for step, loss in self.val_losses.items() if isfinite(loss)}
        saved = [step for step in map(step_of, list_checkpoints(self.path)) if step in losses]
        step = min(reversed(saved), key=losses.__getitem__, default=None)
        return step, losses.get(step, inf)

    def clean_up(self) -> None:
        """Deletes old checkpoints, and draws curves.png."""
        if self.ranks.rank > 0:
            return
        best, _ = self.best()
        keep = self.config.keep_checkpoints
        checkpoints.prune_checkpoints(self.path, self.saved_step, keep, {best, self.resumed_step})
        log = self.path / "log.txt"
        if not log.exists() or log.stat().st_size == 0:  # stopped before the first update
            return
        try:
            from support.plots import save_curves

            save_curves(self.path)
        except Exception as error:  # of any kind: matplotlib's, a full disk
            warn(f"{self.path}/curves.png: not drawn ({first_line(error)})")

    def finish(self, model: "GPT", step: int) -> None:
        """Lists the run's outputs, and how to sample from its model."""
        if self.ranks.rank > 0:
            return
        self.clean_up()  # now that the last validation loss is known
        if (self.path / "curves.png").exists():
            print0(f"curves: {self.path / 'curves.png'}")
        if step == 0:
            return  # no checkpoint
        checkpoint = checkpoint_path(self.path, step)
        kind = "in Hugging Face format"
        fork = not forks.is_gpt2(model)
        if fork:
            kind = f"no GPT-2 any more (gpt2-repro-fork), so only {self.script.name} opens it"
        print0(f"model: {checkpoint}/, {kind}")
        best, loss = self.best()
        if best not in (None, step):
            last = self.val_losses.get(step, inf)
            advice = f"if {last:.4f} at the end is clearly more, train for fewer steps"
            print0(f"best: {self.path}/step_{best:06d}/, validation loss {loss:.4f}; {advice}")
        command = ["python", shown(ROOT / "sample.py"), str(self.path)]
        if self.config.sample_prompt:  # without one, sample.py asks for it
            command.append(self.config.sample_prompt)
        if self.script and self.script != ROOT / "train_gpt2.py":
            command += ["--code", shown(self.script)]
        if fork:  # it may need this precision
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

"""A folder holds one run: what --resume continues, what is refused, what faults cost."""

import contextlib
import errno
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import torch.distributed.run

import train_gpt2
from support.errors_and_signals import RunError, UserError
from support.run_files import append_values, git_commit  # the latter is replaced by conftest.py
from support.scripts import write_code  # which conftest.py replaces
from tests.conftest import (
    ROOT,
    losses,
    read_log,
    saved_state,
    start_ranks,
    starts,
    steps_of,
    train,
    words,
)
from tests.torture import assert_same
from train_gpt2 import GPT, GPTConfig

resource = pytest.importorskip("resource", reason="Windows has neither limits nor these signals")
FULL = OSError(errno.ENOSPC, "No space left on device")
BUSY, DENIED = OSError(errno.EAGAIN, "Try again"), OSError(errno.EACCES, "Permission denied")


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def start(text, log):
    """Trains in `log` with flags in one string. -> exit status"""
    data = ("--data", text, "--log-dir", log)
    return lambda flags, **options: train(*data, *flags.split(), **options)


def raise_error(error):
    def raising(*args, **options):
        raise error

    return raising


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------
# One run in a folder


def test_a_new_run_is_refused_where_another_one_is_and_nothing_changes(start, log, capsys):
    """A log with a step, a checkpoint, or the log of another program. --resume continues a run."""
    start("--max-steps 2")
    start(f"--max-steps 2 --save-every 2 --log-dir {log}_saved")
    for name in ("run.json", "log.txt"):
        Path(f"{log}_saved/{name}").unlink()
    Path(f"{log}_other").mkdir()
    Path(f"{log}_other/log.txt").write_text("1 loss of another program\n")
    kinds = {log: "a run of 2 steps", f"{log}_saved": "a run of 2 steps"}
    kinds[f"{log}_other"] = "the log.txt of another program"
    for folder, holds in kinds.items():
        before = contents(log.parent)
        remedy = "--resume continues it, --log-dir NAME starts another"
        if "another" in holds:
            remedy = "--log-dir NAME starts a run elsewhere"
        with pytest.raises(UserError, match=f"^{folder}/ holds {holds}: {remedy}$"):
            start(f"--max-steps 2 --save-every 1 --seed 5 --log-dir {folder}")
        assert contents(log.parent) == before
    assert start(f"--max-steps 3 --save-every 1 --log-dir {log}_saved --resume") == 0
    assert steps_of(Path(f"{log}_saved")) == [2, 3]


def test_a_run_that_was_killed_in_its_first_save_starts_again(start, log, monkeypatch):
    """One command line serves the first start and every restart. But a run whose checkpoints are
    gone does not, nor one that saves nothing."""
    flags = "--max-steps 4 --save-every 2 --resume"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", raise_error(KeyboardInterrupt()))
        start(flags)
    first = losses(log)
    assert len(first) == 2 and not steps_of(log)
    assert start(flags) == 0 and [entry["step"] for entry in starts(log)] == [0, 0]
    assert losses(log)[:2] == first and len(losses(log)) == 4 and steps_of(log) == [2, 4]
    for step in steps_of(log):
        shutil.rmtree(log / f"step_{step:06d}")
    start(f"--max-steps 1 --log-dir {log}_unsaved")
    for folder in (log, Path(f"{log}_unsaved")):
        before = contents(folder)
        with pytest.raises(UserError, match=rf"{folder}: this run has no checkpoints.*--log-dir"):
            start(f"{flags} --log-dir {folder}")
        assert contents(folder) == before


def test_a_restart_from_given_weights_by_an_absolute_path(start, log, tmp_path, monkeypatch):
    """Without a checkpoint, and then with one, whose weights count. In run.json, which may be
    published, the path is relative."""
    monkeypatch.chdir(tmp_path)
    GPT(GPTConfig(16, 50257, 2, 2, 16)).save_pretrained("model")
    flags = f"--init {tmp_path}/model --save-every 2 --resume --max-steps"
    found = []
    for _ in range(2):
        shutil.rmtree(log / "step_000002", ignore_errors=True)
        assert start(f"{flags} 2") == 0
        found.append((losses(log), (log / "step_000002/model.safetensors").read_bytes()))
    assert found[0] == found[1] and len(found[0][0]) == 2
    assert start(f"{flags} 4") == 0 and len(losses(log)) == 4
    assert [entry["step"] for entry in starts(log)] == [0, 0, 2]
    assert starts(log)[-1]["config"]["init"] == "model"


def test_a_start_from_a_run_takes_its_newest_checkpoint(start, log, tmp_path, monkeypatch):
    """run.json says which one that was."""
    monkeypatch.chdir(tmp_path)
    start("--max-steps 2 --save-every 1 --log-dir first")
    start("--max-steps 2 --init first/step_000002")
    start("--max-steps 2 --init first --log-dir second")
    assert losses("second") == losses(log)
    (entry,) = starts("second")
    assert entry["init"] == "first/step_000002" and entry["config"]["init"] == "first"


@pytest.mark.parametrize("moment", ["before run.json", "in the first step"])
def test_a_new_run_killed_while_it_begins_starts_again(moment, start, at_step, log, monkeypatch):
    """With and without --resume, since it has not trained yet."""
    replace = os.replace

    def killed_before(source, target):
        if Path(target).name == "run.json":
            raise KeyboardInterrupt
        replace(source, target)

    for more in ("", "--resume"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if moment == "before run.json":
                patch.setattr(os, "replace", killed_before)
            else:
                at_step(0, raise_error(KeyboardInterrupt()))
            start(f"--max-steps 2 --save-every 1 --seed 5 {more}")
    start("--max-steps 2 --save-every 1 --seed 5 --resume")
    assert steps_of(log) == [1, 2] and len(losses(log)) == 2


OTHERS = {  # flags, given another run of two steps that saved both; what the message names
    "--seed 5 --beta2 0.9": r"--seed\b.*1337.*5.*--beta2\b.*0\.95.*0\.9",
    "--seq-len 32": r"--seq-len\b.*16.*32",
    "--init MODEL": r"--init\b.*scratch.*model",
    "--max-steps 1": "step_000002.*--max-steps 1",
}


def test_another_run_is_not_resumed_and_nothing_changes(start, log, tmp_path):
    """run.json knows the settings even without a checkpoint."""
    start("--max-steps 2 --save-every 1")
    GPT(GPTConfig(16, 50257, 2, 2, 16)).save_pretrained(tmp_path / "model")
    for lost in ([], ["step_000001", "step_000002"]):
        for name in lost:
            shutil.rmtree(log / name)
        before = contents(log)
        for flags, message in OTHERS.items():
            if lost and flags == "--max-steps 1":
                continue
            flags = flags.replace("MODEL", str(tmp_path / "model"))
            with pytest.raises(UserError, match=message):
                start(f"--max-steps 3 --save-every 1 --resume {flags}")
        assert contents(log) == before


def test_a_run_goes_on_with_its_own_settings(start, log, monkeypatch, capsys):
    """--resume needs no other flag, also if there are shards by now. Flags replace settings."""
    monkeypatch.setattr("support.plots.save_curves", lambda folder: None)
    start("--max-steps 4 --save-every 2 --seed 5 --min-lr 1e-4 --micro-batch-size 0")
    shutil.copytree(log, log.with_name("resumed"))
    for lost in ([], ["step_000002"]):  # from a checkpoint, and from the beginning
        for name in ["step_000004", *lost]:
            shutil.rmtree(log.with_name("resumed") / name)
        if lost:  # as if it had been killed before its first checkpoint
            before = [line for line in read_log(log) if int(line.split()[0]) < 2]
            (log.with_name("resumed") / "log.txt").write_text("\n".join([*before, ""]))
        monkeypatch.setattr("support.settings.holds_shards", lambda folder: True)
        monkeypatch.setattr("support.settings.has_gpu", lambda device: True)
        args = words("--resume --log-dir", log.with_name("resumed"))
        assert train_gpt2.main(args) == 0
        assert "preset: shakespeare" in capsys.readouterr().out
        assert_same(log, log.with_name("resumed"))
    for flags, message in {"--seed 6": "--seed was 5", "--preset small": "--preset was s"}.items():
        with pytest.raises(UserError, match=message):
            train_gpt2.main([*args, *flags.split()])
    assert train_gpt2.main([*args, "--max-steps", "5"]) == 0
    assert steps_of(log.with_name("resumed"))[-2:] == [4, 5]


def test_a_run_goes_on_from_another_working_folder(text, log, tmp_path, monkeypatch):
    """It finds its data, which were named relative to the first one."""
    monkeypatch.chdir(text.parent)
    train("--max-steps 1 --save-every 1 --log-dir", log, "--data", text.name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert train_gpt2.main(words("--resume --max-steps 2 --log-dir", log)) == 0
    assert steps_of(log) == [1, 2]


def test_a_folder_with_a_copied_checkpoint_is_a_run(start, log):
    """--resume goes on in it, and a new run is refused. The log may have been copied as well."""
    start("--max-steps 2 --save-every 2")
    for name, copied in (("a", ["step_000002"]), ("lr0.001", ["step_000002", "log.txt"])):
        folder = log.with_name(name)
        folder.mkdir()
        shutil.copytree(log / "step_000002", folder / "step_000002")
        if "log.txt" in copied:
            shutil.copy(log / "log.txt", folder)
        with pytest.raises(UserError, match="holds a run of 2 steps"):
            start(f"--max-steps 3 --save-every 1 --log-dir {folder}")
        start(f"--max-steps 3 --save-every 1 --resume --log-dir {folder}")
        assert steps_of(folder) == [2, 3] and len(losses(folder)) == 2 * len(copied) - 1


def test_a_finished_run_is_extended_and_keeps_its_last_loss(start, log):
    """Also if it is now evaluated at other steps."""
    common = "--save-every 2 --keep-checkpoints 1 --max-lr 1e-9 --min-lr 1e-9 --resume"
    start(f"{common} --max-steps 5 --log-dir {log.with_name('straight')}")
    start(f"{common} --max-steps 4 --eval-every 4")
    for every, expected in {3: [0, 4, 5], 2: [0, 4, 5], 0: [0, 4]}.items():
        extended = log.with_name(f"every_{every}")
        shutil.copytree(log, extended)
        start(f"{common} --max-steps 5 --eval-every {every} --log-dir {extended}")
        assert losses(extended) == losses(log.with_name("straight")) and len(losses(extended)) == 5
        assert [int(line.split()[0]) for line in read_log(extended, "val")] == expected
        assert 5 in steps_of(extended)


def test_a_finished_run_resumed_changes_nothing(start, log):
    flags = "--max-steps 3 --save-every 2 --eval-every 3 --resume"
    start(flags)
    before, weights = read_log(log), (log / "step_000003/model.safetensors").read_bytes()
    assert start(flags) == 0
    assert read_log(log) == before
    assert (log / "step_000003/model.safetensors").read_bytes() == weights


def test_a_folder_of_other_files_is_used_and_they_stay(start, log):
    log.mkdir()
    (log / "notes.txt").write_text("the user's")
    for flags in ("--max-steps 1 --save-every 1", "--max-steps 2 --save-every 1 --resume"):
        start(flags)
    assert (log / "notes.txt").exists() and steps_of(log) == [1, 2]
    assert [path.name for path in log.parent.glob("log*")] == ["log"]


def test_a_log_of_another_program_is_not_overwritten(start, log):
    log.mkdir()
    (log / "log.txt").write_text("0 train 9.0\n")
    for more in ("", "--resume"):
        with pytest.raises(UserError, match=r"log\b.*--log-dir"):
            start(f"--max-steps 1 {more}")
    assert contents(log) == {log / "log.txt": b"0 train 9.0\n"}


def test_a_link_to_a_folder_is_used(start, log, tmp_path):
    start("--max-steps 1 --save-every 1")
    (tmp_path / "link").symlink_to(log)
    assert start(f"--max-steps 2 --save-every 1 --resume --log-dir {tmp_path}/link") == 0
    assert (tmp_path / "link").is_symlink() and steps_of(log) == [1, 2]


@pytest.mark.parametrize("name", ["config.json", "code"])
def test_a_file_of_a_user_is_not_replaced(name, start, log):
    log.mkdir()
    (log / name).write_text("a user's own")
    for more in ("", "--resume"):
        with pytest.raises(UserError, match=f"--log-dir {log}: .*; choose another"):
            start(f"--max-steps 1 {more}")
    assert contents(log) == {log / name: b"a user's own"}


def test_the_folder_of_a_model_is_not_that_of_a_run(start, log, tmp_path):
    start("--max-steps 1 --save-every 1")
    before = contents(log)
    with pytest.raises(UserError, match="step_000001: this is a model folder"):
        start(f"--max-steps 2 --resume --log-dir {log}/step_000001")
    assert contents(log) == before
    with pytest.raises(UserError, match="--log-dir ''"):
        train_gpt2.main(["--log-dir", ""])


def test_a_run_whose_folder_was_renamed_ends_and_leaves_another_run_alone(start, at_step, log):
    def another():
        log.rename(log.with_name("moved"))
        start("--max-steps 1 --save-every 1 --seed 5")
        before.update(contents(log))

    before = {}
    at_step(2, another)
    with pytest.raises(RunError, match=r"log/.*--resume"):
        start("--max-steps 4 --save-every 1")
    assert contents(log) == before and steps_of(log.with_name("moved")) == [1, 2]
    assert start(f"--max-steps 4 --save-every 1 --resume --log-dir {log.with_name('moved')}") == 0


def test_a_resumed_run_keeps_the_settings_of_its_last_start(start, at_step, log, capsys):
    """Although no checkpoint has them. What differs from the checkpoint is printed each time."""
    start("--max-steps 2 --save-every 2")
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    pid = os.fork()
    if pid == 0:
        start("--resume --max-steps 4 --max-lr 1e-3")
    os.waitpid(pid, 0)
    assert len(losses(log)) == 2
    capsys.readouterr()
    at_step(2, lambda: None)
    assert train_gpt2.main(words("--resume --log-dir", log)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "--max-steps: 2 -> 4" in lines and "--max-lr: 0.005 -> 0.001" in lines
    assert len(losses(log)) == 4 and max(losses(log, "lr")[2:]) <= 1e-3


def test_an_evaluation_that_is_repeated_replaces_its_line(start, log):
    """One that is not due stays."""
    flags = "--max-steps 2 --save-every 2 --resume"
    start(f"{flags} --eval-every 2")
    first = losses(log, "val")
    start(f"{flags} --eval-every 2 --eval-tokens 32")
    second = losses(log, "val")
    assert len(second) == 2 and second[0] == first[0] and second[1] != first[1]
    before = read_log(log)
    start(f"{flags} --eval-every 0")
    assert read_log(log) == before


def test_a_mistyped_folder_is_named_on_resume(start, log, capsys):
    start("--max-steps 1 --resume")
    assert f"no run in {log}/" in capsys.readouterr().out


def test_a_stream_with_a_space_is_refused_before_it_is_lost(tmp_path):
    with pytest.raises(ValueError, match="'my stream'"):
        append_values(tmp_path, 0, {"train": 1.0, "my stream": 1.0})
    assert not (tmp_path / "log.txt").exists()


def test_two_runs_cannot_use_one_folder(start, at_step, log):
    refused = []

    def second():
        with pytest.raises(UserError, match=f"{log}: in use by another run.*--log-dir") as info:
            start("--max-steps 1 --save-every 1")
        refused.append(info)

    at_step(1, second)
    assert start("--max-steps 2 --save-every 1") == 0
    assert len(refused) == 1 and steps_of(log) == [1, 2] and len(starts(log)) == 1
    assert start("--max-steps 2 --resume") == 0  # the lock has ended


def test_a_mount_that_can_neither_lock_nor_flush_folders_is_used(start, log, monkeypatch):
    """As some network mounts. A file that cannot be flushed is an error."""
    import fcntl

    fsync = os.fsync

    def without_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(fcntl, "flock", raise_error(OSError(errno.ENOLCK, "No locks available")))
    monkeypatch.setattr(os, "fsync", without_folders)
    assert start("--max-steps 1 --save-every 1") == 0 and steps_of(log) == [1]
    monkeypatch.setattr(os, "fsync", raise_error(OSError(errno.EINVAL, "Invalid argument")))
    with pytest.raises(OSError, match="Invalid argument"):
        start(f"--max-steps 1 --save-every 1 --log-dir {log}_unflushed")


# --------------------------------------------------------------------------------------------------
# What a folder holds


def test_what_a_checkpoint_holds(start, log, monkeypatch):
    """Other programs read it. README.md has no checksum, since users may edit it."""
    monkeypatch.setattr("support.scripts.write_code", write_code)
    start("--max-steps 1 --save-every 1")
    checkpoint = log / "step_000001"
    hub = ["config.json", "merges.txt", "model.safetensors", "tokenizer_config.json", "vocab.json"]
    ours = ["README.md", "SHA256SUMS", "training_state.pt", "train_gpt2.py"]
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(hub + ours)
    assert saved_state(checkpoint)["step"] == 1
    (entry,) = starts(log)
    card = (checkpoint / "README.md").read_text()
    for fact in ("128", "text.txt", str(entry["git_commit"]), "python "):
        assert fact in card
    if shutil.which("sha256sum"):
        command = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
        done = subprocess.run(command, cwd=checkpoint, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.count(": OK\n") == 7, done


def test_what_run_json_says_of_a_start(start, log, tmp_path, monkeypatch):
    """The commit, with a + if files differ from it; the time in UTC; torch's own version."""
    repo = tmp_path / "repo"
    subprocess.run(["git", "init", "-q", repo], check=True)
    (repo / "my_fork.py").write_text("x = 1\n")
    monkeypatch.setattr("support.run_files.ROOT", repo)
    monkeypatch.setattr("support.run_files.git_commit", git_commit)

    def entry_of(flags=""):
        start(f"--max-steps 0 {flags}")
        return starts(log)[-1]

    assert entry_of()["git_commit"] is None
    for command in ("add .", "-c user.name=me -c user.email=me commit -m first"):
        subprocess.run(["git", "-C", repo, *command.split()], check=True, capture_output=True)
    commit = entry_of()["git_commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (repo / "my_fork.py").write_text("x = 22\n")
    now = datetime.now(UTC)
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        entry = entry_of("--seed 8")
    time.tzset()
    assert entry["git_commit"] == commit + "+"
    started = datetime.strptime(entry["started"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((started - now).total_seconds()) < 60
    assert (entry["step"], entry["world_size"], entry["config"]["seed"]) == (0, 1, 8)
    assert "cpu" in entry["device"].lower() and entry["command"]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    assert entry["versions"].items() >= versions.items()
    monkeypatch.setenv("PATH", "")
    assert entry_of()["git_commit"] is None  # a machine without git


def test_what_a_power_cut_could_undo_is_flushed_first(start, at_step, log, monkeypatch):
    """Each file of a checkpoint and log.txt before the checkpoint has its name; then the folder."""
    events = []
    fsync = os.fsync

    def noting_fsync(descriptor):
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    def noting(rename):
        def renamed(source, target):
            rename(source, target)
            events.append(Path(target))

        return renamed

    monkeypatch.setattr(os, "fsync", noting_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    at_step(0, lambda: events.append("the step"))
    start("--max-steps 1 --save-every 1")
    checkpoint = log / "step_000001"
    began, appeared = events.index("the step"), events.index(checkpoint)
    for path in (*checkpoint.iterdir(), checkpoint, log / "log.txt"):
        assert path.stat().st_ino in events[began:appeared], path
    assert log.stat().st_ino in events[appeared:]
    assert (log / "run.json").stat().st_ino in events[: events.index(log / "run.json")]


# --------------------------------------------------------------------------------------------------
# Faults


def test_a_signal_whose_save_fails_says_so(start, at_step, monkeypatch):
    def stop():
        monkeypatch.setattr(torch, "save", raise_error(FULL))
        os.kill(os.getpid(), signal.SIGTERM)

    at_step(1, stop)
    with pytest.raises(UserError, match=r"step_000002: .*No space left.*--resume"):
        start("--max-steps 9 --save-every 9")


def limit_files(size):
    """As on a full disk: no file can grow beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_log_that_a_full_disk_does_not_take_has_whole_lines_only(start, at_step, log, capsys):
    """A number cut short and the next line would be another number."""
    at_step(1, lambda: limit_files(250))  # a step takes about 100 bytes
    at_step(5, lambda: limit_files(resource.RLIM_INFINITY))
    try:
        assert start("--max-steps 7 --save-every 2") == 0
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert steps_of(log) == [6, 7]
    errors = [line for line in capsys.readouterr().err.splitlines() if "log.txt" in line]
    assert len(errors) == 1 and "File too large" in errors[0]
    lines = (log / "log.txt").read_text().split("\n")
    assert all(len(line.split()) == 3 for line in lines[:-1]) and lines[-1] == ""
    assert [line.split()[0] for line in read_log(log, "train")] == ["0", "1", "5", "6"]
    straight = log.with_name("straight")
    start(f"--max-steps 7 --log-dir {straight}")
    assert set(losses(log)) <= set(losses(straight))


class Limit:  # the weights fit, the training state does not
    """Picklable: what each rank calls before it starts."""

    def __init__(self, size):
        self.size = size

    def __call__(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


def test_a_full_disk_costs_no_training_and_no_checkpoint(text, tmp_path, log):
    args = ["--save-every 2 --keep-checkpoints 1 --resume --data", text, "--log-dir", log]
    train(*args, "--max-steps 2")
    args.append("--max-steps 6")
    (code,), (output,) = start_ranks(1, tmp_path, *args, disturb=Limit(2**22))
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert code == 2 and len(errors) == 2 and "Traceback" not in output, output
    assert "step_000004" in errors[0]
    assert "step_000006" in errors[1] and "--resume" in errors[1]
    assert len(losses(log)) == 6 and not list(log.glob(".*"))
    train(*args)
    assert len(losses(log)) == 6 and steps_of(log) == [2, 6], "it has resumed from 2"


def fill(pipe):
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(999))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")


BREAK = {errno.EPIPE: os.pipe, errno.EIO: os.openpty, errno.EAGAIN: os.pipe}


@pytest.mark.parametrize("number", BREAK)
def test_no_error_of_the_output_ends_a_run(number, start, at_step, log, monkeypatch):
    """A reader or a terminal that left, a pipe that is full. The log has every number."""
    reader, writer = BREAK[number]()
    at_step(1, lambda: fill(writer) if number == errno.EAGAIN else os.close(reader))
    with monkeypatch.context() as patch:
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, os.fdopen(writer, "w", closefd=False))
        # Curves that cannot be drawn are a line on stderr.
        at_step(2, lambda: patch.setattr(subprocess, "Popen", raise_error(BUSY)))
        assert start("--max-steps 3 --save-every 3 --sample-every 3", curves=True) == 0
    assert steps_of(log) == [3] and len(losses(log)) == 3


def test_secondary_work_does_not_end_a_run(start, at_step, log, monkeypatch, capsys):
    """Curves, the flush of the log, the removal of old checkpoints, files that a user removed."""
    fsync = os.fsync

    def unflushed_log(descriptor):
        if os.fstat(descriptor).st_ino == (log / "log.txt").stat().st_ino:
            raise FULL
        fsync(descriptor)

    def denied(remove):
        def remove_others(path, *more, **options):
            if Path(path).name.startswith("step_"):
                raise DENIED
            return remove(path, *more, **options)

        return remove_others

    def fail():
        monkeypatch.setattr("support.plots.save_curves", raise_error(BUSY))
        monkeypatch.setattr(os, "fsync", unflushed_log)
        for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
            monkeypatch.setattr(module, name, denied(getattr(module, name)))

    at_step(1, (log / "run.json").unlink)
    at_step(2, (log / "log.txt").unlink)
    at_step(3, fail)
    flags = "--max-steps 5 --save-every 1 --keep-checkpoints 1 --eval-every 2"
    assert start(flags, curves=True) == 0
    assert steps_of(log)[-2:] == [4, 5]
    warnings = capsys.readouterr().err
    assert "curves.png" in warnings and "step_000003" in warnings and DENIED.strerror in warnings


DYING = """
import os
import support.devices, support.plots

# It takes a second.
support.devices.matmul_flops = lambda device, *dtypes, n=0: [1e12 for _ in dtypes]
support.plots.save_curves = lambda *args: None
ordinary_lr = get_lr

def get_lr(step, config):
    if step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
    return ordinary_lr(step, config)

"""


def test_a_run_that_torchrun_restarts_goes_on(tmp_path, log, text, monkeypatch):
    """It dies in the fourth step."""
    script = tmp_path / "train_gpt2.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    end = source.rindex('if __name__ == "__main__":')
    script.write_text(source[:end] + DYING + source[end:], encoding="utf-8")
    small = "--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --total-batch-size 128 --device cpu"
    small += f" --max-steps 4 --save-every 2 --eval-every 0 --sample-every 0 --data {text}"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun = "--standalone --max-restarts=1 --nproc_per_node=1"
    torch.distributed.run.main(words(torchrun, script, small, "--resume --log-dir", log))
    assert [entry["step"] for entry in starts(log)] == [0, 2] and len(losses(log)) == 4

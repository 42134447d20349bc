"""A folder holds one run: what --resume continues, what is renamed, what faults cost."""

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
from support.ranks import Ranks
from support.run_folder import RunFolder
from support.run_json import git_commit  # which conftest.py replaces
from tests.conftest import (
    ROOT,
    import_file,
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


def test_a_new_run_renames_the_folder_of_an_earlier_one_which_resumes_there(start, log, capsys):
    start("--max-steps 1 --save-every 1")
    (log / "notes").mkdir()
    (log / "notes/mine.txt").write_text("a user's own")
    first = {path.relative_to(log): content for path, content in contents(log).items()}
    start("--max-steps 1 --save-every 1 --seed 5")
    start("--max-steps 1 --save-every 1 --seed 6")
    assert f"--resume --log-dir {log}_1" in capsys.readouterr().out
    folders = [log.with_name(name) for name in ("log_1", "log_2", "log")]
    for folder, seed in zip(folders, (1337, 5, 6), strict=True):
        assert saved_state(folder / "step_000001")["config"]["seed"] == seed
        assert len(losses(folder)) == 1 and len(starts(folder)) == 1
    moved = {path.relative_to(folders[0]): c for path, c in contents(folders[0]).items()}
    assert moved == first
    start(f"--max-steps 2 --save-every 1 --log-dir {folders[0]} --resume")
    assert steps_of(folders[0]) == [1, 2] and steps_of(log) == [1]


def test_resume_without_a_checkpoint_starts_again_with_an_emptied_log(start, log):
    """One command line serves the first start and every restart."""
    start("--max-steps 2 --resume")
    first = losses(log)
    start("--max-steps 2 --resume")
    assert losses(log) == first and [entry["step"] for entry in starts(log)] == [0, 0]


def test_a_restart_from_given_weights_by_an_absolute_path(start, log, tmp_path, monkeypatch):
    """Without a checkpoint, and then with one, whose weights count. In run.json, which may be
    published, the path is relative."""
    monkeypatch.chdir(tmp_path)
    GPT(GPTConfig(16, 50257, 2, 2, 16)).save_pretrained("model")
    found = []
    for lost in ((1, 2), (2,), ()):
        assert start(f"--init {tmp_path}/model --max-steps 2 --save-every 1 --resume") == 0
        found.append((losses(log), (log / "step_000002/model.safetensors").read_bytes()))
        for step in lost:
            shutil.rmtree(log / f"step_00000{step}")
    assert found[0] == found[1] == found[2] and len(found[0][0]) == 2
    assert [entry["step"] for entry in starts(log)] == [0, 0, 1]
    assert starts(log)[-1]["config"]["init"] == "model"


def test_a_start_from_a_run_takes_its_newest_checkpoint(start, log, tmp_path, monkeypatch):
    """run.json says which one that was."""
    monkeypatch.chdir(tmp_path)
    start("--max-steps 2 --save-every 1 --log-dir first")
    start("--max-steps 2 --init first/step_000002")
    expected = losses(log)
    start("--max-steps 2 --init first")
    assert losses(log) == expected
    (entry,) = starts(log)
    assert entry["init"] == "first/step_000002" and entry["config"]["init"] == "first"


@pytest.mark.parametrize("moment", ["after the renaming", "before run.json", "in the first step"])
def test_a_new_run_killed_while_it_begins_loses_nothing(moment, start, at_step, log, monkeypatch):
    """With --resume the same command then starts or goes on."""
    start("--max-steps 1 --save-every 1")
    first = list(contents(log).values())
    rename, replace = os.rename, os.replace

    def killed_after(source, target):
        rename(source, target)
        raise KeyboardInterrupt

    def killed_before(source, target):
        if Path(target).name == "run.json":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "after the renaming":
            patch.setattr(os, "rename", killed_after)
        elif moment == "before run.json":
            patch.setattr(os, "replace", killed_before)
        else:
            at_step(0, lambda: raise_error(KeyboardInterrupt())())
        start("--max-steps 2 --save-every 1 --seed 5")
    assert list(contents(log.with_name("log_1")).values()) == first
    start("--max-steps 2 --save-every 1 --seed 5 --resume")
    assert steps_of(log) == [1, 2] and len(losses(log)) == 2
    assert list(contents(log.with_name("log_1")).values()) == first
    assert not log.with_name("log_2").exists()


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
    """--resume goes on in it, and a new run renames it. The log may have been copied as well."""
    start("--max-steps 2 --save-every 2")
    for name, copied in (("a", ["step_000002"]), ("lr0.001", ["step_000002", "log.txt"])):
        folder = log.with_name(name)
        for resume, names in (("--resume", [name]), ("", [name, f"{name}_1"])):
            folder.mkdir()
            shutil.copytree(log / "step_000002", folder / "step_000002")
            if "log.txt" in copied:
                shutil.copy(log / "log.txt", folder)
            start(f"--max-steps 3 --save-every 1 {resume} --log-dir {folder}")
            assert sorted(path.name for path in log.parent.glob(f"{name}*")) == names
            assert steps_of(folder) == ([2, 3] if resume else [1, 2, 3])
            if resume:
                shutil.rmtree(folder)
        assert steps_of(log.with_name(f"{name}_1")) == [2]


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
    start("--max-steps 1 --resume")
    assert (log.with_name("log_1") / "log.txt").read_text() == "0 train 9.0\n"


@pytest.fixture
def defined_in(monkeypatch):
    """defined_in(path, x): from now on a file that differs in x defines GPT."""

    def define(path, x):
        path.write_text(f"from train_gpt2 import GPT as GPT2\nclass GPT(GPT2):\n    x = {x}\n")
        monkeypatch.setattr(train_gpt2, "GPT", GPT)
        monkeypatch.setattr(train_gpt2, "GPT", import_file(path, monkeypatch).GPT)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return define


def test_the_code_of_the_newest_start_is_kept_under_its_name(start, log, defined_in, tmp_path):
    fork = tmp_path / "my_fork.py"
    for steps in (1, 2, 3):
        defined_in(fork, steps)
        start(f"--max-steps {steps} --save-every 1 --resume")
        assert (log / "my_fork.py").read_bytes() == fork.read_bytes()
        assert starts(log)[-1]["script"] == "my_fork.py" and not (log / "train_gpt2.py").exists()


def test_what_a_run_needs_is_not_renamed(start, log, text, tmp_path, defined_in, monkeypatch):
    """In the folder of an earlier run: text, weights, tasks, the script, another run. A link is not
    renamed either, since the run would then fill another disk."""
    start("--max-steps 1 --save-every 1")
    (log / "texts").mkdir()
    shutil.copy(text, log / "texts/my.txt")
    shutil.copy(ROOT / "tests/hellaswag_sample.jsonl", log / "tasks.jsonl")
    needed = {"--data": "texts/my.txt", "--init": "step_000001", "--hellaswag-data": "tasks.jsonl"}
    for flag, name in needed.items():
        before = contents(log.parent)
        with pytest.raises(UserError, match=rf"{flag} .*{name}.*--log-dir"):
            start(f"--max-steps 1 --hellaswag-every 0 {flag} {log}/{name}")
        assert contents(log.parent) == before
    with monkeypatch.context() as patch:
        path = log / "my_fork.py"
        path.write_text("from train_gpt2 import GPT as GPT2\nclass GPT(GPT2):\n    pass\n")
        patch.setattr(train_gpt2, "GPT", import_file(path, patch).GPT)
        with pytest.raises(UserError, match=r"my_fork\.py.*--log-dir"):
            start("--max-steps 1")
    start(f"--max-steps 1 --log-dir {log}/inner")
    with pytest.raises(UserError, match=r"inner.*--log-dir"):
        start("--max-steps 1")
    shutil.rmtree(log / "inner")
    (tmp_path / "link").symlink_to(log)
    with pytest.raises(UserError, match=r"link.*--log-dir"):
        start(f"--max-steps 1 --log-dir {tmp_path}/link")
    assert (tmp_path / "link").is_symlink() and steps_of(log) == [1]
    assert start(f"--max-steps 2 --save-every 1 --resume --log-dir {tmp_path}/link") == 0


@pytest.mark.parametrize("name", ["train_gpt2.py", "code"])
def test_a_file_of_a_user_is_not_replaced(name, start, log):
    log.mkdir()
    (log / name).write_text("a user's own")
    for more in ("", "--resume"):
        with pytest.raises(UserError, match=f"{name}.*--log-dir"):
            start(f"--max-steps 1 {more}")
    assert contents(log) == {log / name: b"a user's own"}


def test_the_folder_of_a_model_is_not_that_of_a_run(start, log, tmp_path):
    start("--max-steps 1 --save-every 1")
    before = contents(log)
    with pytest.raises(UserError, match=f"--log-dir {log} "):
        start(f"--max-steps 2 --resume --log-dir {log}/step_000001")
    assert contents(log) == before
    with pytest.raises(UserError, match="--log-dir: empty"):
        train_gpt2.main(["--log-dir", ""])


def test_a_log_whose_checkpoints_were_deleted_is_kept(start, log, capsys):
    start("--max-steps 3 --save-every 2")
    first = (log / "log.txt").read_bytes()
    for step in steps_of(log):
        shutil.rmtree(log / f"step_{step:06d}")
    assert start("--max-steps 1 --resume") == 0
    (kept,) = log.glob("log_old*.txt")
    assert kept.read_bytes() == first and kept.name in capsys.readouterr().err


def test_a_log_is_kept_also_if_the_first_start_saved_nothing(start, log):
    start("--max-steps 1")
    first = (log / "log.txt").read_bytes()
    start("--max-steps 3 --save-every 2 --resume")
    (kept,) = log.glob("log_old*.txt")
    assert kept.read_bytes() == first
    for step in steps_of(log):
        shutil.rmtree(log / f"step_{step:06d}")
    assert start("--max-steps 1 --resume") == 0 and len(list(log.glob("log_old*.txt"))) == 2


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


def test_an_evaluation_that_comes_out_otherwise_gets_a_line(start, log, capsys):
    start("--max-steps 2 --save-every 2 --eval-every 2")
    before = read_log(log, "val")
    start("--max-steps 2 --save-every 2 --eval-every 2 --resume --eval-tokens 32")
    assert read_log(log, "val") == before
    assert "step 2: val is " in capsys.readouterr().err


def test_a_mistyped_folder_is_named_on_resume(start, log, capsys):
    start("--max-steps 1 --resume")
    assert f"no run in {log}/" in capsys.readouterr().out


def test_a_stream_with_a_space_is_logged_once(log, text):
    """Also if it is an evaluation that a resumed run repeats."""
    config = train_gpt2.TrainConfig(log_dir=str(log))
    with RunFolder(config, Ranks(0, 1, torch.device("cpu")), GPT) as run:
        run.log(0, **{"my stream": 1.0})
        run.already_logged = {(0, "my_stream"): 1.0}
        run.log(0, **{"my stream": 1.0})
    assert read_log(log) == ["0 my_stream 1"]


def test_the_repository_itself_is_refused(start):
    before = sorted(path.name for path in ROOT.iterdir())
    with pytest.raises(UserError, match="--log-dir"):
        start(f"--max-steps 0 --log-dir {ROOT}")
    assert sorted(path.name for path in ROOT.iterdir()) == before


def test_a_folder_that_cannot_be_renamed_is_an_error(start, log, monkeypatch):
    """As a mount. Nothing in it changes."""
    start("--max-steps 1 --save-every 1")
    before = contents(log)
    monkeypatch.setattr(os, "rename", raise_error(OSError(errno.EBUSY, "Device or resource busy")))
    with pytest.raises(UserError, match=r"log: .*Device or resource busy.*--log-dir"):
        start("--max-steps 1 --save-every 1")
    assert contents(log) == before


def test_two_runs_cannot_use_one_folder(start, at_step, log):
    """Neither the new folder nor a renamed one."""
    refused = []

    def second():
        for folder in (log, log.with_name("log_1")):
            with pytest.raises(UserError, match=f"{folder}.*--log-dir") as info:
                start(f"--max-steps 1 --save-every 1 --log-dir {folder}")
            refused.append(info)

    start("--max-steps 1")
    at_step(1, second)
    assert start("--max-steps 2 --save-every 1") == 0
    assert len(refused) == 2 and steps_of(log) == [1, 2] and len(starts(log)) == 1
    assert start("--max-steps 1") == 0  # the lock has ended


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
        start("--max-steps 1 --save-every 1")


# --------------------------------------------------------------------------------------------------
# What a folder holds


def test_what_a_checkpoint_holds(start, log):
    """Other programs read it. README.md has no checksum, since users may edit it."""
    start("--max-steps 1 --save-every 1")
    checkpoint = log / "step_000001"
    hub = ["config.json", "merges.txt", "model.safetensors", "tokenizer_config.json", "vocab.json"]
    ours = ["README.md", "SHA256SUMS", "training_state.pt", "train_gpt2.py"]
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(hub + ours)
    assert saved_state(checkpoint)["step"] == 1
    (entry,) = starts(log)
    card = (checkpoint / "README.md").read_text()
    for fact in ("128", "text.txt", "scratch", str(entry["git_commit"]), "python "):
        assert fact in card
    if shutil.which("sha256sum"):
        command = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
        done = subprocess.run(command, cwd=checkpoint, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.count(": OK\n") == 7, done


def test_what_run_json_says_of_a_start(start, log, tmp_path, defined_in, monkeypatch):
    """The commit, with a + if files differ from it; the time in UTC; torch's own version."""
    repo = tmp_path / "repo"
    subprocess.run(["git", "init", "-q", repo], check=True)
    defined_in(repo / "my_fork.py", 1)
    monkeypatch.setattr("support.run_json.ROOT", repo)
    monkeypatch.setattr("support.run_json.git_commit", git_commit)

    def entry_of(flags=""):
        start(f"--max-steps 0 {flags}")
        return starts(log)[-1]

    assert entry_of()["git_commit"] is None
    for command in ("add .", "-c user.name=me -c user.email=me commit -m first"):
        subprocess.run(["git", "-C", repo, *command.split()], check=True, capture_output=True)
    commit = entry_of()["git_commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    defined_in(repo / "my_fork.py", 2)
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
    with pytest.raises(UserError, match=r"step_000001: .*No space left.*--resume"):
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

support.devices.matmul_flops = lambda *args: 1e12  # it takes a second
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
    end = source.index('if __name__ == "__main__":')
    script.write_text(source[:end] + DYING + source[end:], encoding="utf-8")
    small = "--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --total-batch-size 128 --device cpu"
    small += f" --max-steps 4 --save-every 2 --eval-every 0 --sample-every 0 --data {text}"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun = "--standalone --max-restarts=1 --nproc_per_node=1"
    torch.distributed.run.main(words(torchrun, script, small, "--resume --log-dir", log))
    assert [entry["step"] for entry in starts(log)] == [0, 2] and len(losses(log)) == 4

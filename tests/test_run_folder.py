"""A folder holds one run: what --resume continues, what is renamed, what faults cost."""

import contextlib
import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import train_gpt2
from support import checkpoints, cli, console, files, run_folder, run_log
from support.checkpoints import read_training_state
from support.errors import UserError
from support.run_log import log_lines, run_entries, trim_log
from tests.conftest import ROOT, losses, read_log, start_ranks, steps_of, train, words
from train_gpt2 import GPT, GPTConfig

resource = pytest.importorskip("resource", reason="Windows has neither limits nor these signals")
FULL = OSError(errno.ENOSPC, "No space left on device")


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
    assert "an earlier run is now in " in capsys.readouterr().out
    folders = [log.with_name(name) for name in ("log_1", "log_2", "log")]
    for folder, seed in zip(folders, (1337, 5, 6), strict=True):
        assert read_training_state(folder / "step_000001")["config"]["seed"] == seed
        assert len(losses(folder)) == 1 and len(run_entries(folder)) == 1
    moved = {path.relative_to(folders[0]): c for path, c in contents(folders[0]).items()}
    assert moved == first
    start(f"--max-steps 2 --save-every 1 --log-dir {folders[0]} --resume")
    assert steps_of(folders[0]) == [1, 2] and steps_of(log) == [1]


def test_resume_without_a_checkpoint_starts_again_with_an_emptied_log(start, log):
    """One command line serves the first start and every restart."""
    start("--max-steps 2 --resume")
    first = losses(log)
    start("--max-steps 2 --resume")
    assert losses(log) == first and [entry["step"] for entry in run_entries(log)] == [0, 0]


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
    assert [entry["step"] for entry in run_entries(log)] == [0, 0, 1]
    assert run_entries(log)[-1]["config"]["init"] == "model"


@pytest.mark.parametrize("moment", ["rename", "write_entries", "announce"])
def test_a_new_run_killed_while_it_begins_loses_nothing(moment, start, log, monkeypatch):
    """Around the renaming; the same command then starts, or with --resume goes on."""
    start("--max-steps 1 --save-every 1")
    first = list(contents(log).values())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "rename":  # just after it
            rename = Path.rename

            def killed(path, target):
                rename(path, target)
                raise KeyboardInterrupt

            patch.setattr(Path, "rename", killed)
        else:
            module = run_log if moment == "write_entries" else console
            patch.setattr(module, moment, raise_error(KeyboardInterrupt()))
        start("--max-steps 2 --save-every 1 --seed 5")
    assert list(contents(log.with_name("log_1")).values()) == first
    start("--max-steps 2 --save-every 1 --seed 5 --resume")
    assert steps_of(log) == [1, 2] and len(losses(log)) == 2
    assert not log.with_name("log_2").exists() or moment == "announce"


OTHERS = {  # flags, given another run of two steps that saved both; part of the message
    "settings": ("--seed 5 --grad-clip 2", "--grad-clip was 1.0, is 2.0"),
    "given weights": ("--init MODEL", "--init was scratch, is "),
    "beyond the end": ("--max-steps 1", "step_000002 is beyond --max-steps 1: raise it"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_not_resumed_and_nothing_changes(name, start, log, tmp_path):
    start("--max-steps 2 --save-every 1")
    GPT(GPTConfig(16, 50257, 2, 2, 16)).save_pretrained(tmp_path / "model")
    before = contents(log)
    flags, message = OTHERS[name]
    flags = flags.replace("MODEL", str(tmp_path / "model"))
    with pytest.raises(UserError, match=message):
        start(f"--max-steps 3 --save-every 1 --resume {flags}")
    shutil.rmtree(log / "step_000002")
    shutil.rmtree(log / "step_000001")
    if name != "beyond the end":  # run.json knows the settings as well
        with pytest.raises(UserError, match=message):
            start(f"--max-steps 3 --save-every 1 --resume {flags}")
    assert contents(log).items() <= before.items()


def test_a_setting_that_a_checkpoint_lacks_counts_as_its_default():
    """As one that a fork has added since."""
    config = train_gpt2.TrainConfig(beta2=0.9)
    saved = dict(vars(config))
    del saved["beta2"]
    assert cli.differences(saved, config, set()) == ["--beta2 was 0.95, is 0.9"]
    assert cli.differences(saved, config, {"beta2"}) == []


@pytest.mark.parametrize("flags", ["--eval-every 3", "--eval-every 2", "--eval-every 0"])
def test_a_finished_run_is_extended_and_keeps_its_last_loss(flags, start, log):
    """Also if it is now evaluated at other steps. The best checkpoint stays."""
    common = "--save-every 2 --keep-checkpoints 1 --max-lr 1e-9 --min-lr 1e-9 --resume"
    start(f"{common} --max-steps 4 --eval-every 4")
    start(f"{common} --max-steps 5 {flags}")
    straight = log.with_name("straight")
    start(f"{common} --max-steps 5 --log-dir {straight}")
    assert losses(log) == losses(straight) and len(losses(log)) == 5
    evaluated = [int(line.split()[0]) for line in read_log(log, "val")]
    assert evaluated == {"3": [0, 4, 5], "2": [0, 4, 5], "0": [0, 4]}[flags[-1]]
    assert 5 in steps_of(log)


def test_a_finished_run_resumed_changes_nothing(start, log):
    flags = "--max-steps 3 --save-every 2 --eval-every 3 --resume"
    start(flags)
    before, weights = read_log(log), (log / "step_000003/model.safetensors").read_bytes()
    assert start(flags) == 0
    assert read_log(log) == before
    assert (log / "step_000003/model.safetensors").read_bytes() == weights


def test_an_evaluation_that_fails_costs_no_step(start, log, monkeypatch):
    flags, results = "--max-steps 3 --save-every 2 --eval-every 3", iter([9])
    with monkeypatch.context() as patch, pytest.raises(StopIteration):  # in the last evaluation
        patch.setattr(train_gpt2, "validation_loss", lambda *args: next(results))
        start(flags)
    assert steps_of(log) == [2, 3]
    assert start(flags + " --resume") == 0
    assert len(losses(log)) == 3 and len(losses(log, "val")) == 2


def test_what_a_resumed_run_keeps_of_its_log(tmp_path):
    """The lines before the update of its step, evaluations of that step included."""
    path = tmp_path / "log.txt"
    before = "0 train 5\n0 lr 1\n1 val 4\n1 bpb 2\n1 hella 0.25\n"
    for after in ("", "1 train 3\n1 lr 1\n2 val 1\n", "2 train 1\n", "1 tr", "1 mine 0.2"):
        path.write_text(before + after)
        assert trim_log(path, 1) == {"val": 4, "bpb": 2, "hella": 0.25}
        assert path.read_text() == before
    path.write_text("\xff\n0 train 5\n1 val none\nstray\n1 val 4\n", "latin-1")
    assert trim_log(path, 1) == {"val": 4} and path.read_text() == "0 train 5\n1 val 4\n"
    assert trim_log(path, 0) == {} and path.read_text() == ""


def test_a_folder_of_other_files_is_used_and_they_stay(start, log):
    """A train_gpt2.py among them, which no start has written."""
    log.mkdir()
    for name in ("train_gpt2.py", "notes.txt"):
        (log / name).write_text("the user's")
    for flags in ("--max-steps 1 --save-every 1", "--max-steps 2 --save-every 1 --resume"):
        start(flags)
        assert (log / "train_gpt2.py").read_text() == "the user's"
    assert (log / "notes.txt").exists() and steps_of(log) == [1, 2]
    assert [path.name for path in log.parent.glob("log*")] == ["log"]


def test_the_log_has_all_digits_of_a_small_learning_rate(start, log):
    start("--max-steps 1 --warmup-steps 1 --max-lr 1.23456e-7 --min-lr 0")
    assert losses(log, "lr") == pytest.approx([1.23456e-7], rel=1e-6)


def test_a_log_of_another_program_is_not_overwritten(start, log):
    log.mkdir()
    (log / "log.txt").write_text("0 train 9.0\n")
    start("--max-steps 1 --resume")
    assert (log.with_name("log_1") / "log.txt").read_text() == "0 train 9.0\n"


def test_the_script_of_the_newest_start_is_kept(start, log, monkeypatch, tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    monkeypatch.setattr(run_log, "ROOT", repo)
    for steps, source in ((1, "first"), (2, "changed"), (3, "third")):
        (repo / "train_gpt2.py").write_text(source)
        start(f"--max-steps {steps} --save-every 1 --resume")
        assert (log / "train_gpt2.py").read_text() == source
    (log / "train_gpt2.py").write_text("edited by the user")
    start("--max-steps 4 --save-every 1 --resume")
    assert (log / "train_gpt2.py").read_text() == "edited by the user"


def test_the_repository_itself_is_refused(start):
    before = sorted(path.name for path in ROOT.iterdir())
    with pytest.raises(UserError, match="the repository itself"):
        start(f"--max-steps 0 --log-dir {ROOT}")
    assert sorted(path.name for path in ROOT.iterdir()) == before


def test_a_folder_that_cannot_be_renamed_is_an_error(start, log, monkeypatch):
    """As a mount. Nothing in it changes."""
    start("--max-steps 1 --save-every 1")
    before = contents(log)
    monkeypatch.setattr(
        Path, "rename", raise_error(OSError(errno.EBUSY, "Device or resource busy"))
    )
    with pytest.raises(
        UserError, match=r"cannot be renamed \(Device.*\); choose another --log-dir"
    ):
        start("--max-steps 1 --save-every 1")
    monkeypatch.chdir(log)
    with pytest.raises(UserError, match=r"^\.: holds an earlier run; choose another --log-dir"):
        start("--max-steps 1 --save-every 1 --log-dir .")
    assert contents(log) == before


def test_two_runs_cannot_use_one_folder(start, at_step, log):
    """Neither the new folder nor a renamed one."""
    refused = []

    def second():
        for folder in (log, log.with_name("log_1")):
            with pytest.raises(UserError, match="another run uses it; choose another") as info:
                start(f"--max-steps 1 --save-every 1 --log-dir {folder}")
            refused.append(info)

    start("--max-steps 1")
    at_step(1, second)
    assert start("--max-steps 2 --save-every 1") == 0
    assert len(refused) == 2 and steps_of(log) == [1, 2] and len(run_entries(log)) == 1
    assert start("--max-steps 1") == 0  # the lock has ended


def test_a_mount_without_locks_is_used(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(fcntl, "flock", raise_error(OSError(errno.ENOLCK, "No locks available")))
    with files.locked(tmp_path / "new", "in use"):
        (tmp_path / "new" / "a").touch()
    assert (tmp_path / "new" / "a").exists()


@pytest.mark.parametrize(
    "content", ["{}", "null", "3", '"x"', "[3]", '[{"config": 1}]', "[", "\xff"]
)
def test_a_run_json_of_something_else_is_refused_on_resume(content, start, log):
    (log / "step_000001").mkdir(parents=True)
    (log / "run.json").write_text(content, "latin-1")
    with pytest.raises(UserError, match=r"run\.json|damaged"):
        start("--max-steps 1 --resume")
    assert steps_of(log) == [1] and (log / "run.json").read_text("latin-1") == content
    start("--max-steps 1")  # another run: what is there is only renamed
    assert (log.with_name("log_1") / "run.json").read_text("latin-1") == content


# --------------------------------------------------------------------------------------------------
# What a folder holds


def test_files_of_a_checkpoint_and_their_keys(start, log):
    """Other programs read them, and later versions of this one."""
    start("--max-steps 1 --save-every 1")
    checkpoint = log / "step_000001"
    hub = ["config.json", "merges.txt", "model.safetensors", "tokenizer_config.json", "vocab.json"]
    ours = ["README.md", "SHA256SUMS", "training_state.pt"]
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(hub + ours)
    state = read_training_state(checkpoint)
    keys = "step elapsed skipped config dtype random optimizers scaler loader"
    assert set(state) == set(keys.split()) and state["step"] == 1
    assert set(state["loader"]) == {"position", "T", "seed", "shuffle", "shards"}
    assert state["loader"]["position"] == 8
    (entry,) = run_entries(log)
    keys = "started command git_commit versions step device world_size script config"
    assert set(entry) == set(keys.split())
    assert (entry["step"], entry["world_size"]) == (0, 1)
    card = (checkpoint / "README.md").read_text()
    assert "A GPT-2 after 1 steps of 128 tokens of `text.txt`, from scratch, " in card
    assert f"commit {entry['git_commit']}: `python " in card


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_sha256sum_checks_a_checkpoint(start, log):
    """All but README.md, which users may edit."""
    start("--max-steps 1 --save-every 1")
    command = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=log / "step_000001", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK\n") == 6, done


def test_what_run_json_says_of_a_start(tmp_path, monkeypatch):
    """The commit, with a + if files have changed; the time in UTC; torch's own version."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(run_log, "ROOT", tmp_path)
    assert run_log.new_entry({})["git_commit"] is None
    for command in ("add .", "-c user.name=me -c user.email=me commit -m first"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True, capture_output=True)
    commit = run_log.new_entry({})["git_commit"]
    assert len(commit) == 40
    (tmp_path / "a").write_text("b")
    now = datetime.now(UTC)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    entry = run_log.new_entry({"max_lr": 0.1, "data": str(Path.cwd() / "x")}, step=7)
    monkeypatch.undo()
    time.tzset()
    assert entry["git_commit"] == commit + "+"
    started = datetime.strptime(entry["started"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((started - now).total_seconds()) < 60
    assert entry["step"] == 7 and entry["config"] == {"max_lr": 0.1, "data": "x"}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    assert entry["versions"].items() >= versions.items()
    monkeypatch.setattr(run_log.subprocess, "run", raise_error(FileNotFoundError()))
    assert run_log.new_entry({})["git_commit"] is None  # a machine without git


# --------------------------------------------------------------------------------------------------
# Faults


def test_a_signal_whose_save_fails_says_so(start, at_step, monkeypatch, capsys):
    monkeypatch.setattr(torch, "save", raise_error(FULL))
    at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: start("--max-steps 9 --save-every 9"))
    (error,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert "step_000002: not written (" in error and "free some space; --resume continues" in error


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
    assert capsys.readouterr().err.count("log.txt: File too large; lines are lost") == 1
    text = (log / "log.txt").read_text()
    assert len(log_lines(log / "log.txt")) == text.count("\n") == 4 * 6
    assert [line.split()[0] for line in read_log(log, "train")] == ["0", "1", "5", "6"]
    straight = log.with_name("straight")
    start(f"--max-steps 7 --log-dir {straight}")
    assert set(losses(log)) <= set(losses(straight))


class Limit:
    """Picklable: what each rank calls before it starts."""

    def __init__(self, size):
        self.size = size

    def __call__(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


@pytest.mark.parametrize("size", [2**21, 2**22])  # too small for the weights; for the state
def test_a_full_disk_costs_no_training_and_no_checkpoint(size, text, tmp_path, log):
    args = ["--save-every 2 --keep-checkpoints 1 --resume --data", text, "--log-dir", log]
    train(*args, "--max-steps 2")
    args.append("--max-steps 6")
    (code,), (output,) = start_ranks(1, tmp_path, *args, disturb=Limit(size))
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert code == 2 and len(errors) == 2 and "Traceback" not in output, output
    assert "step_000004: not written (" in errors[0]
    assert "step_000006: not written (" in errors[1] and "free some space" in errors[1]
    assert len(losses(log)) == 6 and not list(log.glob(".*"))
    train(*args)
    assert len(losses(log)) == 6 and steps_of(log) == [6]


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
        at_step(2, lambda: cli.warn("be careful"))
        assert start("--max-steps 3 --save-every 3 --sample-every 3") == 0
    assert steps_of(log) == [3] and len(losses(log)) == 3


def test_a_run_piped_to_head_completes(text, log):
    """`python train_gpt2.py | head -3`"""
    flags = "--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --max-steps 4 --eval-every 0"
    flags += f" --sample-every 0 --save-every 4 --device cpu --data {text} --log-dir {log}"
    command = f"set -o pipefail; {sys.executable} {ROOT}/train_gpt2.py {flags} | head -n 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 3 and not done.stderr, done
    assert steps_of(log) == [4] and len(losses(log)) == 4 and done.returncode == 0


def test_arguments_that_are_not_utf8_cost_no_checkpoint(start, log, monkeypatch):
    flags = "--save-every 1 --sample-every 2 --sample-prompt caf\udce9"
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *flags.split()])
    start(f"{flags} --max-steps 1")
    start(f"{flags} --max-steps 2 --resume")
    assert steps_of(log) == [1, 2] and len(losses(log)) == 2
    assert "caf?" in (log / "step_000002/README.md").read_text("utf-8")


def test_a_bug_while_saving_is_no_full_disk(start, monkeypatch):
    monkeypatch.setattr(torch, "save", raise_error(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        start("--max-steps 3 --save-every 1")


BUSY, DENIED = OSError(errno.EAGAIN, "Try again"), OSError(errno.EACCES, "Permission denied")
FAULTS = {
    "no process": lambda log, patch: patch.setattr(subprocess, "Popen", raise_error(BUSY)),
    "run.json deleted": lambda log, patch: (log / "run.json").unlink(),
    "log.txt deleted": lambda log, patch: (log / "log.txt").unlink(),
    "stays": lambda log, patch: patch.setattr(checkpoints, "remove_folder", raise_error(DENIED)),
    "no flush": lambda log, patch: patch.setattr(run_folder, "fsync", raise_error(FULL)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_secondary_work_does_not_end_a_run(fault, start, at_step, log, monkeypatch, capsys):
    at_step(2, lambda: FAULTS[fault](log, monkeypatch))
    flags = "--max-steps 4 --save-every 1 --keep-checkpoints 1 --eval-every 2"
    assert start(flags, curves=fault == "no process") == 0
    printed = capsys.readouterr()
    assert "done: 4 steps" in printed.out and steps_of(log)[-1] == 4
    assert ("warning: " in printed.err) == (fault in ("no process", "stays"))


def test_a_run_that_torchrun_restarts_goes_on(tmp_path, log, text):
    """Two ranks, of which both die in the fourth step."""
    script = tmp_path / "restarted.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import train_gpt2\n"
        "from support import devices, huggingface\n"
        "from support.cli import run\n"
        "devices.matmul_flops = lambda *args: 1e12  # which takes a second, as do these imports:\n"
        "huggingface.is_gpt2 = lambda model: True\n"
        "get_lr = train_gpt2.get_lr\n"
        "def dying(step, config):\n"
        "    if step == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os._exit(9)\n"
        "    return get_lr(step, config)\n"
        "train_gpt2.get_lr = dying\n"
        "run(train_gpt2.main)\n"
    )
    small = "--n-layer 1 --n-head 1 --n-embd 8 --seq-len 16 --total-batch-size 128 --device cpu"
    small += f" --max-steps 4 --save-every 2 --eval-every 0 --sample-every 0 --data {text}"
    torchrun = "-m torch.distributed.run --standalone --max-restarts=1 --nproc_per_node=2"
    command = [sys.executable, *words(torchrun, script, small, "--resume --log-dir", log)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "x 2 rank" in done.stdout, done.stderr
    assert [entry["step"] for entry in run_entries(log)] == [0, 2] and len(losses(log)) == 4

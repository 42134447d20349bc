"""What every script shares: one `error: ` line for mistakes, exit statuses, whole files."""

import errno
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt2
from support import cli, files, ranks
from support.cli import run
from support.errors import LostRank, RunError, UserError
from support.files import atomic_path
from tests.conftest import RANK, ROOT, TINY, posix, train, words
from train_gpt2 import GPT, GPTConfig


def shards(folder):
    np.save(folder / "x_train_000000.npy", np.arange(5000, dtype=np.uint16))
    return folder


def text_of(path, text, encoding="utf-8"):
    path.write_text(text, encoding)
    return path


def other_vocabulary(folder):
    GPT(GPTConfig(16, 100, 1, 2, 16)).save_pretrained(folder)
    return folder


def flags(*args):
    return lambda tmp: args


def a_text(*args):
    return lambda tmp: ["--data", text_of(tmp / "a.txt", *args)]


BOUNDS = ": must be at least 0 and below 2**63; "
POSITIVE = ["total-batch-size", "seq-len", "n-layer", "n-head", "n-embd", "eval-tokens"]
MISTAKES = {  # flags, given a folder; part of the message
    "no text": (lambda tmp: ["--data", ROOT / "README.md"], "README.md: neither a .txt file"),
    "empty text": (a_text(" \n"), "a.txt: an empty text"),
    "short text": (a_text("To be"), "2 train tokens, too few for a sequence of 16"),
    "no UTF-8": (a_text("ok \xff", "latin-1"), "not UTF-8 at byte 3"),
    "no validation": (lambda tmp: ["--data", shards(tmp), "--eval-every 1"], "no val shards"),
    "no shards": (lambda tmp: ["--data", tmp], "no train shards; "),
    "several": (
        flags(
            "--max-lr nan --warmup-steps -1 --n-head 3 --beta2 1 --eval-every 1 --eval-tokens 15"
        ),
        f"--warmup-steps -1{BOUNDS}--max-lr nan{BOUNDS}--n-embd 16: not divisible by --n-head 3; "
        "--beta2 1.0: must be below 1; --eval-tokens 15: less",
    ),
    "none at all": (
        flags(*(f"--{name}=0" for name in POSITIVE)),
        "; ".join(f"--{name} 0: must be at least 1 and below 2**63" for name in POSITIVE),
    ),
    "rates": (flags("--min-lr 6e-3"), "--min-lr 0.006: above --max-lr 0.005"),
    "huge seed": (flags("--seed", 2**64), f"--seed {2**64}: must be"),
    "device": (flags("--device tpu"), "--device tpu: not available"),
    "init is no model": (lambda tmp: ["--init", tmp], "no model here"),
    "vocabulary of init": (lambda tmp: ["--init", other_vocabulary(tmp)], "vocabulary of 100"),
    "init is nowhere": (flags("--init no-such-model"), "no-such-model: neither a folder"),
    "log folder is a file": (lambda tmp: ["--log-dir", text_of(tmp / "f", "x")], "f: "),
    "log folder of bytes": (flags("--log-dir caf\udce9"), "--log-dir 'caf\\udce9': not UTF-8"),
    "HellaSwag": (flags("--hellaswag-every 1 --hellaswag-data h.jsonl"), "h.jsonl"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_training(name, tmp_path, capsys, text, monkeypatch):
    make, message = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    args = words("--data", text, "--log-dir", tmp_path / "log", *make(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run(lambda: train_gpt2.main([*TINY, *args]))
    errors = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(errors) == 1 and errors[0].startswith("error: "), errors
    assert message in errors[0], errors[0]
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--max-step 3", "--max-steps"),
        ("--preset gpt5", "gpt5"),
        ("--preset", "--preset"),
        ("--device", "--device"),
        ("--max-lr fast", "--max-lr"),
    ],
)
def test_a_wrong_flag_is_tyros_message_from_one_rank(flags, message, capsys, monkeypatch):
    printed = []
    for rank in ("0", "1"):
        for name, value in (RANK | {"RANK": rank, "WORLD_SIZE": "2"}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stop:
            train_gpt2.main(flags.split())
        assert stop.value.code == 2
        printed.append("".join(capsys.readouterr()))
    assert message in printed[0] and not printed[1], printed


def test_any_stdout_will_do(tmp_path, monkeypatch):
    """None, if it is closed; a file that Windows opens in a code page, without U+FFFD."""
    with open(tmp_path / "out", "w", encoding="cp1252") as file:
        for stdout in (None, file):
            monkeypatch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as stop:
                run(lambda: print("To be \ufffd"))
            assert stop.value.code == 0
    assert (tmp_path / "out").read_text("cp1252") == "To be ?\n"


@pytest.mark.parametrize(
    "end, status, line",
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
        (RunError("too bad"), 1, "error: too bad\n"),
        (UserError("your input"), 2, "error: your input\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), 2, "error: a: No such file\n"),
        (OSError(errno.ENOSPC, "No space", "a"), 2, "error: a: No space; free some space\n"),
        (143, 143, ""),
        (None, 0, ""),
    ],
    ids=repr,
)
def test_exit_statuses(end, status, line, capsys):
    main = mock.Mock(side_effect=end) if isinstance(end, BaseException) else lambda: end
    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    assert ended.value.code == status and capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback():
    for bug in (ZeroDivisionError(), OSError(errno.ENOTSOCK, "a bug")):
        with pytest.raises(type(bug)):
            run(mock.Mock(side_effect=bug))


REMOTE = """NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error
Last error:
socketPollConnect: connect returned Connection refused"""
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA ran out\nof something")
CAUSES = [  # the error (a text: RuntimeError), what becomes of it, and its line
    ("[gloo] Connection closed by peer [::1]:26247", LostRank, "^another rank has exited"),
    (REMOTE, LostRank, "^another rank has exited or cannot be reached .*Connection refused"),
    (OUT_OF_MEMORY, UserError, "^out of memory on cpu: try --low-memory"),
    ("can't allocate memory", UserError, "^out of memory"),
    ("CUBLAS_STATUS_ALLOC_FAILED", UserError, "^out of memory"),
    ("The tensor's data is not allocated yet.", RuntimeError, "^The tensor's data is not all"),
    ("a bug", RuntimeError, "^a bug$"),
]


@pytest.mark.parametrize("error, kind, line", CAUSES)
def test_an_error_of_torch_gets_its_cause(error, kind, line, text, tmp_path, monkeypatch):
    error = RuntimeError(error) if isinstance(error, str) else error
    monkeypatch.setattr(train_gpt2, "train", mock.Mock(side_effect=error))
    with pytest.raises(kind, match=line) as info:
        train("--micro-batch-size 0 --data", text, "--log-dir", tmp_path / "log")
    assert info.type is kind
    if line.startswith("^out of memory"):
        with pytest.raises(UserError, match="try --micro-batch-size 2 or --low-memory"):
            train("--micro-batch-size 4 --data", text, "--log-dir", tmp_path / "log")
    # Also before the ranks have met.
    monkeypatch.setattr(ranks, "join_process_group", mock.Mock(side_effect=error))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind) as info:
        train("--data", text, "--log-dir", tmp_path / "log")
    assert info.type is kind


NO_RANKS = [
    {"RANK": "0"},
    {"WORLD_SIZE": "2"},
    {"RANK": ""},
    RANK | {"RANK": "a"},
    RANK | {"RANK": "1"},
    RANK | {"MASTER_PORT": "a"},
    {name: value for name, value in RANK.items() if name != "MASTER_PORT"},
]


@pytest.mark.parametrize("env", NO_RANKS)
def test_an_environment_that_names_no_rank_is_one_line(env, monkeypatch, capsys):
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: 1 // 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and f"RANK={env.get('RANK', '')}, " in line
    assert line.startswith("error: ") and "start with torchrun" in line


ABORT = """
import atexit, os
from support.cli import run

class Thread:
    def __del__(self):
        os.abort()

thread = Thread()  # aborts in the clean-up of the interpreter, as threads of gloo may
atexit.register(print, "exit function")
run(lambda: print("done"))
"""
LOST = """
import os, signal
from support import cli, errors, signals

def main():
    os.kill(os.getpid(), signal.SIGTERM)
    raise errors.LostRank("another rank has exited")

signals.collect_stop_signals()
cli.run(main)
"""


@pytest.mark.parametrize(
    "code, world_size, status, output", [(ABORT, 1, 0, "done\nexit function\n"), (LOST, 2, 1, "")]
)
def test_how_a_rank_ends(code, world_size, status, output):
    """Without the interpreter's clean-up; silently if torchrun ends it since another has failed."""
    command, env = [sys.executable, "-c", code], os.environ | RANK
    env["WORLD_SIZE"] = str(world_size)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, output, "")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as partial:
        partial.write_bytes(b"new")
        raise RuntimeError
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with atomic_path(path) as partial:
        partial.write_bytes(b"new\n")
        assert path.read_text() == "old"
    assert path.read_bytes() == b"new\n"
    for content in ("1", "2"):  # a folder, then one in its place
        with atomic_path(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / "f").write_text(content)
        assert (tmp_path / "folder/f").read_text() == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "folder"]


def test_a_file_is_on_disk_before_it_appears(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("support.files.fsync", lambda path: flushed.append((path, new.exists())))
    new = tmp_path / "a"
    with atomic_path(new) as partial:
        partial.write_bytes(b"new")
    assert flushed == [(partial, False), (tmp_path, True)]
    flushed, new = [], tmp_path / "folder"  # a checkpoint's
    with atomic_path(new) as partial:
        partial.mkdir()
        (partial / "part").write_bytes(b"new")
    assert flushed == [(partial, False), (partial / "part", False), (tmp_path, True)]


def test_an_interrupted_write_leaves_nothing(tmp_path):
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), files.atomic_path(tmp_path / "a") as partial:
            partial.mkdir()
            raise error
    assert not list(tmp_path.iterdir())


@posix
def test_a_mount_that_cannot_flush_folders_is_used(tmp_path, monkeypatch):
    """Files must be flushed; of folders some network mounts are not able."""
    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EINVAL, "why")))
    files.fsync(tmp_path)
    with pytest.raises(OSError):
        files.fsync(tmp_path / "a")


IMPORTS = """
import importlib, os, socket, sys
sys.argv = ["x", "--no-such-flag"]
socket.socket.connect = socket.getaddrinfo = lambda *a, **k: sys.exit("network")
import fineweb
assert not {"torch", "datasets"} & set(sys.modules)
import torch
torch.cuda.init = torch.cuda._lazy_init = lambda: sys.exit("device")
for name in ("train_gpt2", "hellaswag", "sample"):
    importlib.import_module(name)
heavy = {"transformers", "datasets", "pyarrow", "matplotlib"} & set(sys.modules)
assert not os.listdir() and not heavy, heavy
"""


def test_imports_have_no_side_effects(tmp_path):
    """Nothing written, fetched, printed or parsed, no device touched; fineweb.py without torch."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and not done.stdout, done.stderr

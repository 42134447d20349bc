"""What every script shares: one `error: ` line for mistakes, exit statuses, imports."""

import errno
import os
import subprocess
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train_gpt2
from support.errors_and_signals import RunError, UserError, run_and_exit
from support.tokenizer import get_tokenizer
from tests.conftest import RANK, ROOT, error_line, run_script, tiny, train, words
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


POSITIVE = ["total-batch-size", "seq-len", "n-layer", "n-head", "n-embd", "eval-tokens"]
SEVERAL = "--max-lr nan --warmup-steps -1 --n-head 3 --beta2 1 --eval-every 1 --eval-tokens 15"


def texts(tmp):
    (tmp / "texts(1)/more").mkdir(parents=True)
    (tmp / "texts(1)/more/a.txt").write_text("A text.")
    return ["--data", tmp / "texts(1)"]


def dangling(tmp):
    (tmp / "link").symlink_to("nowhere")
    return ["--log-dir", tmp / "link"]


MISTAKES = {  # flags, given a folder; what the message names
    "no text": (lambda tmp: ["--data", ROOT / "README.md"], ["README.md"]),
    "short text": (a_text("To be"), ["a.txt", "2 train", "16"]),
    "no UTF-8": (a_text("ok \xff", "latin-1"), ["a.txt", "UTF-8", "iconv "]),
    "a folder of texts": (texts, ["texts(1): ", "python fineweb.py", "--input TEXT"]),
    "no such text": (flags("--data my_text.txt"), ["my_text.txt: no such file"]),
    "no validation": (lambda tmp: ["--data", shards(tmp), "--eval-every 1"], [" val "]),
    "several": (
        flags(SEVERAL),
        ["--max-lr nan", "--warmup-steps -1", "--n-head 3", "--beta2 1", "--eval-tokens 15"],
    ),
    "none at all": (flags(*(f"--{name}=0" for name in POSITIVE)), POSITIVE),
    "device": (flags("--device tpu"), ["--device tpu"]),
    "init is no model": (lambda tmp: ["--init", tmp], ["config.json"]),
    "vocabulary of init": (lambda tmp: ["--init", other_vocabulary(tmp)], ["100", "50257"]),
    "log folder is a file": (lambda tmp: ["--log-dir", text_of(tmp / "f", "x")], ["f: "]),
    "log folder is a dangling link": (dangling, ["link", "nowhere"]),
    "HellaSwag": (flags("--hellaswag-every 1 --hellaswag-data h.jsonl"), ["h.jsonl"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_training(name, tmp_path, capsys, text, monkeypatch):
    make, named = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    args = words("--data", text, "--log-dir", tmp_path / "log", *make(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    line = error_line(capsys, "train_gpt2.py", *tiny(*args))
    assert all(word in line for word in named), line
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"


def test_a_wrong_flag_is_tyros_message_from_one_rank(capsys, monkeypatch):
    for preset in ("gpt2", "shakespeare"):  # the defaults in the message are those of the run
        with pytest.raises(SystemExit):
            train_gpt2.main(["--max-step", "3", "--preset", preset])
        assert ("600" in capsys.readouterr().err) == (preset == "shakespeare")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for flags, named in {
        "--max-step 3": "--max-steps",
        "--preset": "--preset",
        "--max-lr fast": "--max-lr",
    }.items():
        printed = []
        for rank in ("0", "1"):
            for name, value in (RANK | {"RANK": rank, "WORLD_SIZE": "2"}).items():
                monkeypatch.setenv(name, value)
            with pytest.raises(SystemExit) as stop:
                train_gpt2.main(flags.split())
            assert stop.value.code == 2
            printed.append("".join(capsys.readouterr()))
        assert named in printed[0] and not printed[1], printed


@pytest.mark.parametrize("flags", ["--preset gpt3", "--preset", "--resume --preset gpt3"])
def test_a_preset_that_there_is_not_is_refused(flags, tmp_path, capsys):
    """Although the preset decides the defaults with which the flags are read."""
    with pytest.raises(SystemExit) as end:
        train_gpt2.main(words("--log-dir", tmp_path / "log", flags))
    assert end.value.code == 2 and "--preset" in capsys.readouterr().err


def test_any_stdout_will_do(tmp_path, monkeypatch):
    """A file that Windows opens in a code page, which has no U+FFFD."""
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(tmp_path, get_tokenizer())
    with open(tmp_path / "out", "w", encoding="cp1252") as file:
        monkeypatch.setattr(sys, "stdout", file)
        options = words("--device cpu --max-new-tokens 1")
        assert run_script("sample.py", tmp_path, "\ufffd", *options) == 0
    assert (tmp_path / "out").read_text("cp1252").startswith("?")


ENDS = [  # how a script ends, its exit status, what stderr names
    (KeyboardInterrupt(), 130, None),
    (BrokenPipeError(), 1, None),
    (RunError("too bad"), 1, ["too bad"]),
    (UserError("your input"), 2, ["your input"]),
    (FileNotFoundError(errno.ENOENT, "No such file", "a"), 2, ["a: No such file"]),
    (OSError(errno.ENOSPC, "No space", "a"), 2, ["a: No space", "free"]),
    (143, 143, None),
    (None, 0, None),
]


def test_exit_statuses(capsys):
    """A bug keeps its traceback."""
    for end, status, named in ENDS:
        raises = isinstance(end, BaseException)
        main = mock.Mock(side_effect=end) if raises else mock.Mock(return_value=end)
        with pytest.raises(SystemExit) as ended:
            run_and_exit(main)
        lines = capsys.readouterr().err.splitlines()
        assert ended.value.code == status and len(lines) == (0 if named is None else 1), end
        assert named is None or lines[0].startswith("error: ")
        assert all(word in lines[0] for word in named or [])
    for bug in (ZeroDivisionError(), OSError(errno.ENOTSOCK, "a bug")):
        with pytest.raises(type(bug)):
            run_and_exit(mock.Mock(side_effect=bug))


REMOTE = """NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error
Last error:
socketPollConnect: connect returned Connection refused"""
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.\nOf something")
CAUSES = [  # the error (a text: RuntimeError), the exit status, and what its line names
    ("[gloo] Connection closed by peer [::1]:26247", 1, "rank"),
    (REMOTE, 1, "rank"),
    (OUT_OF_MEMORY, 2, "--micro-batch-size 2 "),
    ("can't allocate memory", 2, "--micro-batch-size 2 "),
    ("CUBLAS_STATUS_ALLOC_FAILED", 2, "--micro-batch-size 2 "),
    ("The tensor's data is not allocated yet.", None, ""),  # None: a bug, with its traceback
    ("a bug", None, ""),
]


def test_an_error_of_torch_gets_its_cause(text, tmp_path, monkeypatch, capsys):
    """In a step, and before the ranks have met."""
    flags = ["--data", text, "--log-dir", tmp_path / "log", "--micro-batch-size", 4]
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # for torchrun's report
    capsys.readouterr()

    def line_and_status():
        with pytest.raises(SystemExit) as end:
            run_and_exit(partial(train, *flags))
        (error,) = capsys.readouterr().err.split("error: ")[1:]
        return error, end.value.code

    for error, status, named in CAUSES:
        error = RuntimeError(error) if isinstance(error, str) else error
        with monkeypatch.context() as patch:
            failing = mock.Mock(side_effect=error)
            patch.setattr(train_gpt2.DataLoaderLite, "next_batch", failing)
            if status is None:
                with pytest.raises(RuntimeError) as bug:
                    run_and_exit(partial(train, *flags))
                assert bug.value is error
                continue
            line, code = line_and_status()
            assert code == status and named in line and "Traceback" not in line
    failing = mock.Mock(side_effect=OUT_OF_MEMORY)
    monkeypatch.setattr(train_gpt2.DataLoaderLite, "next_batch", failing)
    flags[-1] = 1
    assert "--low-memory or a smaller --seq-len" in line_and_status()[0].partition(";")[2]
    meeting = iter([(dist.HashStore(), 0, 1)])
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: meeting)
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=RuntimeError(REMOTE)))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert "rank" in line_and_status()[0]


ABORT = """
import atexit, os
from support.errors_and_signals import run_and_exit

class Thread:
    def __del__(self):
        os.abort()

thread = Thread()  # aborts in the clean-up of the interpreter, as threads of gloo may
atexit.register(print, "exit function")
run_and_exit(lambda: print("done"))
"""


def test_a_rank_ends_without_the_interpreters_clean_up():
    command = [sys.executable, "-c", ABORT]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | RANK, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\nexit function\n", "")


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

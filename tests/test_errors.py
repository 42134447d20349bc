"""Invalid input: exit status 2, one line `error: …` on stderr, and nothing written."""

import os
import subprocess
import sys

import numpy as np
import pytest

import train_gpt2
from support.cli import run
from support.files import atomic_path
from tests.conftest import RANK, ROOT, TINY, words
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
    "rates": (flags("--min-lr 6e-3"), "--min-lr 0.006: above --max-lr 0.005"),
    "huge seed": (flags("--seed", 2**64), f"--seed {2**64}: must be"),
    "device": (flags("--device tpu"), "--device tpu: not available"),
    "init is no model": (lambda tmp: ["--init", tmp], "no model here"),
    "vocabulary of init": (lambda tmp: ["--init", other_vocabulary(tmp)], "vocabulary 100"),
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


def test_a_reader_that_leaves_gets_no_traceback():
    command = f"{sys.executable} -u {ROOT}/fineweb.py --help | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: ") and not done.stderr, done.stderr


KEPT = """
from pathlib import Path
from support import cli, errors

def main():
    with cli.unprinted_to(Path("kept")):
        for i in range(9999):
            cli.print0(f"line {i}")
        print("no newline", end="")
        cli.sys.stdout.flush()
        print("unfinished", end="")
        raise errors.UserError("too bad")

cli.run(main)
"""


def test_a_training_run_outlives_the_reader_of_its_output(tmp_path):
    (tmp_path / "run.py").write_text(KEPT)
    command = f"set -o pipefail; {sys.executable} run.py | head -n 1"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", command], **options)
    assert (done.returncode, done.stdout, done.stderr) == (2, "line 0\n", "error: too bad\n")
    kept = (tmp_path / "kept").read_text().splitlines()
    assert kept[-3:] == ["line 9998", "no newlineerror: too bad", "unfinished"]
    assert len(kept) > 1000


def test_any_stdout_will_do(tmp_path, monkeypatch):
    """None, if it is closed; a file that Windows opens in a code page, without U+FFFD."""
    with open(tmp_path / "out", "w", encoding="cp1252") as file:
        for stdout in (None, file):
            monkeypatch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as stop:
                run(lambda: print("To be \ufffd"))
            assert stop.value.code == 0
    assert (tmp_path / "out").read_text("cp1252") == "To be ?\n"


def test_a_preset_is_chosen_and_changes_defaults(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_gpt2.read_config([]).data.endswith("input.txt")
    (tmp_path / "edu_fineweb10B").mkdir()
    assert train_gpt2.read_config([]).data.endswith("input.txt")
    (tmp_path / "edu_fineweb10B/edufineweb_train_000001.npy").touch()
    assert train_gpt2.read_config([]).data == "edu_fineweb10B"
    config = train_gpt2.read_config(words("--preset gpt3 --max-steps 7"))
    assert (config.seq_len, config.max_steps) == (2048, 7)
    with pytest.raises(SystemExit) as stop:
        train_gpt2.read_config(words("--preset gpt3 --help"))
    assert stop.value.code == 0 and "2048" in capsys.readouterr().out


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


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


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

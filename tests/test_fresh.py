"""Every command in a process of its own, in a clone of its own, as a user starts it.

The other tests run in a few warm processes, where what one test has imported, computed or changed
hides what the next one would meet."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, words

SMALL = "--preset shakespeare --n-layer 1 --n-head 2 --n-embd 16 --seq-len 64 --device cpu"
SMALL += " --total-batch-size 256 --eval-every 0 --sample-every 0 --save-every 2"
TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"


@pytest.fixture
def clone(tmp_path):
    """The project's files, with a short text."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    for folder in ("support", "reference"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    (tmp_path / "input.txt").write_text(text[:10_000], encoding="utf-8")
    return tmp_path


def start(folder, *args):
    """What a command prints. It may print no traceback and no library's warning."""
    command = [sys.executable, *words(*args)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done
    return done.stdout + done.stderr


def test_a_fork_under_its_own_name_from_its_first_run_to_its_score(clone):
    """Shards of a text, a run on them, which is sampled from and scored.

    The file that trained is kept, named, and needed to use the model."""
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *shlex.split(command)], cwd=clone, check=True)
    fork = clone / "train_erf.py"
    source = (clone / "train_gpt2.py").read_text(encoding="utf-8")
    fork.write_text(source.replace('approximate="tanh"', 'approximate="none"'), encoding="utf-8")
    start(clone, "fineweb.py --input input.txt --out shards --workers 1")
    flags = f"{SMALL} --data shards"
    out = start(clone, "train_erf.py", flags, "--max-steps 2 --eval-every 2")
    assert "model: log/step_000002/" in out and "validation loss: " in out
    (entry,) = json.loads((clone / "log/run.json").read_text())
    assert entry["script"] == "train_erf.py"
    for folder in ("code", "step_000002"):
        assert (clone / "log" / folder / "train_erf.py").read_bytes() == fork.read_bytes()
    assert "train_erf.py" in (clone / "log/step_000002/README.md").read_text()
    command = re.search("^sample: python (.+)", out, re.MULTILINE)[1]
    # It asks for a prompt, since the preset has none.
    assert start(clone, *map(Path, shlex.split(command)), "Once --max-new-tokens 2 --device cpu")
    out = start(clone, "hellaswag.py -m log --code train_erf.py -d cpu --limit 2 --data", TASKS)
    assert out.splitlines()[-1].startswith("2 acc: ")
    # The program that the run has kept works on when the clone has changed.
    for path in [fork, *clone.glob("*.py"), *clone.glob("support/*.py")]:
        path.write_text("raise RuntimeError('another version')\n")
    kept = "log/code/sample.py log Once --max-new-tokens 2 --device cpu --code"
    assert start(clone, kept, "log/code/train_erf.py")
    start(clone, "log/code/train_erf.py --resume --max-steps 4 --log-dir log")

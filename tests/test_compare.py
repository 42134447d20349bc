"""compare.py: which runs it trains, what it checks before them, and what it makes of the losses."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import compare
from support.errors_and_signals import UserError
from support.files_and_locks import locked
from tests.conftest import ROOT, numbers, posix, words

# Trains nothing: notes what it is called with, and logs losses that depend on its name, the seed
# and --max-lr. With a file `slow` it takes a minute, unless it is asked to stop.
CODE = """
import hashlib, json, os, pathlib, signal, sys, time

value = dict(zip(sys.argv[1:], sys.argv[2:]))
me = pathlib.Path(__file__)
if "--no-such-flag" in sys.argv:
    sys.exit("error: no such flag")
if "--plan" in sys.argv:
    sys.exit()
with open(me.with_name("calls.txt"), "a") as calls:
    print(json.dumps(sys.argv), file=calls)
seed = int(value["--seed"])
if me.with_name(f"crash_{me.stem}").exists() and seed == 1338:
    print("Traceback\\nZeroDivisionError: 0 / 0", file=sys.stderr)
    sys.exit(1)
folder = pathlib.Path(value["--log-dir"])
folder.mkdir(parents=True)
digest = hashlib.sha256(me.read_bytes()).hexdigest()
entry = {"config": {"max_steps": 20}, "command": sys.argv, "script_sha256": digest}
(folder / "run.json").write_text(json.dumps([entry]))
if me.with_name("slow").exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    me.with_name("slow").unlink()
    time.sleep(60)
loss = 5 + float(value.get("--max-lr", 0)) + 0.1 * (seed % 7) * ("b" in me.stem) + seed / 1e3
(folder / "log.txt").write_text(f"0 val 9\\n1 train 3\\n1 ms 250\\n20 val {loss}\\n")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two codes, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).write_text(CODE)
    return tmp_path


def run(*args):
    return compare.main([*map(str, args)])


def calls():
    path = Path("calls.txt")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(output):
    """{variant: the other cells of its row}"""
    lines = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_codes_are_compared_by_seed(folder, capsys):
    """What is there is not trained again. scipy's t for two degrees of freedom: 4.303."""
    for _ in range(2):
        assert run("--code", "a.py", "b.py", "--", "--preset", "x") == 0
    assert len(calls()) == 6 and all(call[1:3] == ["--preset", "x"] for call in calls())
    table = rows(capsys.readouterr().out)
    a = [5 + seed / 1e3 for seed in (1337, 1338, 1339)]
    differences = [0.1 * (seed % 7) for seed in (1337, 1338, 1339)]
    b = [x + d for x, d in zip(a, differences, strict=True)]
    for name, losses in (("a", a), ("b", b)):
        assert table[name][0] == "3" and numbers(table[name][1]) == [
            pytest.approx(statistics.mean(losses), abs=6e-5),
            pytest.approx(statistics.stdev(losses), abs=6e-5),
        ]
        assert numbers(table[name][3]) == [250]
    half = 4.303 * statistics.stdev(differences) / 3**0.5
    assert numbers(table["b"][2]) == [
        pytest.approx(statistics.mean(differences), abs=6e-5),
        pytest.approx(half, rel=1e-3, abs=6e-5),
    ]
    assert not numbers(table["a"][2])
    assert Path("compared/curves.png").read_bytes().startswith(b"\x89PNG")


def test_recipes_follow_dashes(folder, capsys):
    """The first has no flags of its own. Two seeds have one degree of freedom: 12.7."""
    args = words("--code a.py --seeds 2 --out o -- --preset x -- -- --max-lr 1")
    assert run(*args) == 0
    output = capsys.readouterr().out
    table = rows(output)
    assert numbers(table["--max-lr 1"][2]) == [1, 0] and "12.7" in output
    found = [call[1:-5] for call in calls()]
    assert found == [["--preset", "x"], ["--preset", "x", "--max-lr", "1"]] * 2
    assert run(*args[:2], "--seeds", 1, *args[4:]) == 0
    assert numbers(rows(capsys.readouterr().out)["--max-lr 1"][2]) == [1]


def test_a_run_that_fails_is_named_and_the_others_go_on(folder, capsys):
    Path("crash_b").touch()
    assert run("--code", "a.py", "b.py") == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert "b, seed 1338" in line and "ZeroDivisionError: 0 / 0" in line
    table = rows(captured.out)
    assert (table["a"][0], table["b"][0]) == ("3", "2")
    assert numbers(table["b"][2])[0] == pytest.approx(0.1, abs=6e-5), "of the seeds that both have"
    Path("crash_b").unlink()
    assert run("--code", "a.py", "b.py") == 0 and len(calls()) == 7


def test_mistakes_are_found_before_any_run(folder):
    Path("folder.py").mkdir()
    for args, named in {
        "--code a.py folder.py": "folder.py",
        "--code a.py none.py": "none.py",
        "--code a.py -- --no-such-flag": "no such flag",
        "--code a.py -- -- --max-lr 1 -- --no-such-flag": "no such flag",
        "--code a.py a.py": "twice",
        "--code a.py -- --seed 1": "--seed",
        "--code a.py -- --log_dir=b": "--log-dir",
        "--code a.py --seeds 0": "--seeds 0",
    }.items():
        with pytest.raises(UserError, match=re.escape(named)):
            run(*args.split())
    assert not calls()


def test_a_run_of_another_code_or_with_other_flags_is_not_taken_for_it(folder):
    args = ["--code", "a.py", "--seeds", "1"]
    run(*args)
    with pytest.raises(UserError, match=r"seed_1337.*flags"):
        run(*args, "--", "--max-lr", "1")
    Path("a.py").write_text(CODE + "# changed\n")
    with pytest.raises(UserError, match=r"seed_1337.*a\.py"):
        run(*args)
    assert len(calls()) == 1


@posix
def test_it_waits_for_a_run_that_goes_on_without_it(folder):
    """After kill -9 of compare.py, for example."""
    command = [sys.executable, ROOT / "compare.py", "--code", "a.py", "--seeds", "1"]
    with locked(Path("compared/a/seed_1337"), ""):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while "waiting" not in process.stdout.readline():
            pass
        assert not calls()
    assert "a" in rows(process.communicate(timeout=120)[0]) and len(calls()) == 1


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_and_gone_on_with(folder, number):
    """A stop signal reaches the run, which may save."""
    Path("slow").touch()
    command = [sys.executable, ROOT / "compare.py", "--code", "a.py", "b.py", "--seeds", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while Path("slow").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    target = os.killpg if number == signal.SIGKILL else os.kill
    target(process.pid, number)
    assert process.wait(timeout=120) == {signal.SIGTERM: 143, signal.SIGINT: 130}.get(number, -9)
    (path,) = Path("compared").glob("*/*/run.json")  # the code above cannot go on by itself
    path.unlink()
    path.parent.rmdir()
    assert subprocess.run(command, capture_output=True).returncode == 0 and len(calls()) == 3

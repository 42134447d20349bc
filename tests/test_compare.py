"""compare.py: which runs it trains, what it checks before them, and what it makes of the losses."""

import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import compare
from support.errors_and_signals import UserError
from tests.conftest import ROOT, numbers, posix, words

# Trains nothing: notes what it is called with, and logs losses that depend on its name, the seed
# and --max-lr. Its vocabulary has --tokens tokens. With a file `slow` it takes a minute, unless it
# is asked to stop.
CODE = """
import json, pathlib, signal, sys, tempfile, time
import helper
from support.scripts import write_code

value = dict(zip(sys.argv[1:], sys.argv[2:]))
me = pathlib.Path(__file__)
if "--no-such-flag" in sys.argv:
    sys.exit("error: no such flag")
with open(me.with_name("calls.txt"), "a") as calls:
    print(json.dumps(sys.argv), file=calls)
seed = int(value["--seed"])
if me.with_name(f"crash_{me.stem}").exists() and seed == 1339:
    sys.exit("it crashed")
folder = pathlib.Path(value["--log-dir"])
folder.mkdir(parents=True)
tempfile.tempdir = "elsewhere"  # what lies below that of temporary files is no code of a run
write_code(folder / "code")
entry = {"config": {"max_steps": 20}, "command": sys.argv}
entry["vocab_size"] = int(value.get("--tokens", 50257))
(folder / "run.json").write_text(json.dumps([entry]))
if me.with_name("slow").exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    me.with_name("slow").unlink()
    time.sleep(60)
loss = 5 + float(value.get("--max-lr", 0)) + 0.1 * (seed % 7) * ("b" in me.stem) + seed / 1e3
lines = "0 val 9", "1 train 3", "1 ms 250", f"20 val {loss}", f"20 bpb {loss / 4}", "10 hella 0.3"
(folder / "log.txt").write_text("\\n".join(lines) + "\\n")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two codes and a module of theirs, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("helper.py").touch()
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
        assert run("--code", "a.py", "b.py") == 0
    assert len(calls()) == 6
    captured = capsys.readouterr()
    assert not captured.err
    table = rows(captured.out)
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


def test_recipes_and_codes_have_flags_of_their_own(folder, capsys):
    """They follow the common ones, a code's before a recipe's. The first recipe has none."""
    args = words("--code a.py --seeds 2 --out o -- --preset x -- -- --max-lr 1")
    assert run(*args) == 0
    assert numbers(rows(capsys.readouterr().out)["--max-lr 1"][2]) == [1, 0]
    found = [call[1:-5] for call in calls()]
    assert found == [["--preset", "x"], ["--preset", "x", "--max-lr", "1"]] * 2
    run("--code", "a.py", "'b.py' --max-lr '2'", "--seeds", 1, *words("-- -- --bytes 5"))
    table = rows(capsys.readouterr().out)
    assert list(table)[-2:] == ["a --bytes 5", "b --max-lr 2 --bytes 5"]
    assert calls()[-1][1:-5] == words("--max-lr 2 --bytes 5")


def test_a_code_that_fails_is_named_and_not_started_again(folder, capsys):
    """The others go on, and what was trained before counts. The next start trains the rest."""
    args = ["--code", "a.py", "b.py", "--seeds", 4]
    Path("crash_b").touch()
    assert run(*args) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert "b, seed 1339" in line and "compared/b/seed_1339.txt" in line
    assert Path("compared/b/seed_1339.txt").read_text() == "it crashed\n"
    table = rows(captured.out)
    assert (table["a"][0], table["b"][0], len(calls())) == ("4", "2", 7)
    assert numbers(table["b"][2])[0] == pytest.approx(0.05, abs=6e-5), "of the seeds that both have"
    Path("crash_b").unlink()
    assert run(*args) == 0 and len(calls()) == 9


def test_a_stream_that_is_there_at_the_end_can_be_compared(folder, capsys):
    """hella has a value, but not of the last step. A finished run is not started again for it."""
    args = words("--code a.py --seeds 1 --stream")
    assert run(*args, "bpb") == 0
    expected = pytest.approx((5 + 1.337) / 4, abs=6e-5)
    assert numbers(rows(capsys.readouterr().out)["a"][1]) == [expected]
    assert run(*args, "hella") == 1
    assert "seed_1337/log.txt has no hella " in capsys.readouterr().err
    assert len(calls()) == 1


def test_losses_of_other_tokens_are_not_compared_without_a_warning(folder, capsys):
    """Bits per byte do compare."""
    args = ["--code", "a.py", "b.py --tokens 700", "--seeds", 1]
    assert run(*args) == 0
    assert capsys.readouterr().err.startswith("warning: ")
    run(*args, "--stream", "bpb")
    assert not capsys.readouterr().err


def test_mistakes_are_found_before_any_run(folder):
    for args, named in {
        "--code a.py none.py": "none.py",
        "--code a.py a.py": "twice",
        "--code a.py -- --seed 1": "--seed",
        "--code a.py -- --log_dir=b": "--log-dir",
        "--code a.py --seeds 0": "--seeds 0",
    }.items():
        with pytest.raises(UserError, match=re.escape(named)):
            run(*args.split())
    assert not calls()


def test_a_run_of_another_code_or_with_other_flags_is_not_taken_for_it(folder):
    """A run of one's own counts. Its flags may be in another order than in compare.py's command."""
    flags = words("--log-dir compared/a/seed_1337 --resume --seed 1337")
    subprocess.run([sys.executable, "a.py", *flags], check=True)
    args = ["--code", "a.py", "--seeds", "1"]
    run(*args)
    with pytest.raises(UserError, match=r"seed_1337.*flags"):
        run(*args, "--", "--max-lr", "1")
    for change in (partial(Path("helper.py").write_text, "# changed"), Path("helper.py").unlink):
        change()
        with pytest.raises(UserError, match=r"seed_1337.*helper\.py"):
            run(*args)
    assert len(calls()) == 1


def test_it_may_be_started_from_another_folder(folder, monkeypatch):
    """Its runs are found there. Flags with another path are not, but nothing is to be removed."""
    args = ["--seeds", 1, "--code"]
    run(*args, "a.py", "--", "--text", "a.txt")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    run(*args, "../a.py", "--out", "../compared", "--", "--text", "a.txt")
    with pytest.raises(UserError, match=r"seed_1337.*--text a\.txt") as error:
        run(*args, "../a.py", "--out", "../compared", "--", "--text", "../a.txt")
    assert "remove" not in str(error.value)
    monkeypatch.chdir(folder)
    assert len(calls()) == 1


def test_a_code_that_is_edited_during_a_comparison_ends_it(folder, monkeypatch):
    """A row of the table has the runs of one code."""
    train = compare.train

    def train_and_edit(*args):
        status = train(*args)
        Path("helper.py").write_text("edited = True")
        return status

    monkeypatch.setattr(compare, "train", train_and_edit)
    with pytest.raises(UserError, match=r"trained before helper\.py changed"):
        run(*words("--code a.py --seeds 3"))
    assert len(calls()) == 1


@posix
def test_stopped_by_a_signal_it_goes_on(folder):
    """A signal reaches the run, which may save."""
    Path("slow").touch()
    command = [sys.executable, ROOT / "compare.py", "--code", "a.py", "b.py", "--seeds", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while Path("slow").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=120) == 143
    (path,) = Path("compared").glob("*/*/run.json")  # the code above cannot go on by itself
    path.unlink()
    shutil.rmtree(path.parent)
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert "a" in rows(process.stdout) and len(calls()) == 3

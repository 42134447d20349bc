"""bench/recipes/sweep.py: what it trains, and what it makes of the losses."""

import csv
import importlib.util
import json
import re
import shutil
import statistics
import sys

import pytest

from support.errors import UserError
from tests.conftest import ROOT, numbers

SPEC = importlib.util.spec_from_file_location("sweep", ROOT / "bench/recipes/sweep.py")
sweep = sys.modules["sweep"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sweep)

SWEEP = """
[common]
preset = "shakespeare"
script = "{script}"
warmup_steps = 0.5
lengths = {{ "4" = [1] }}
[recipes.default]
[recipes.muon]
shuffle = false
warmdown_steps = 0.25
lengths = {{ "2" = [7], "8" = [1] }}
"""

# Trains nothing: notes what it is called with, and logs. Fails once if there is a file `kill`.
SCRIPT = """
import json, pathlib, sys

value = dict(zip(sys.argv[1:], sys.argv[2:]))
folder, kill = pathlib.Path(value["--log-dir"]), pathlib.Path(__file__).with_name("kill")
with open(folder / "calls.txt", "a") as calls:
    print(json.dumps(sys.argv), file=calls)
if kill.exists() and "--no-shuffle" in sys.argv:
    kill.unlink()
    sys.exit(3)
(folder / "run.json").write_text(json.dumps([{"config": {}, "command": sys.argv}]))
(folder / "log.txt").write_text(f"0 val 9.0\\n1 train 3\\n{value['--max-steps']} val 6.5\\n")
"""


@pytest.fixture
def file(tmp_path):
    """A TOML file whose recipes are trained by SCRIPT."""
    (tmp_path / "a fork").mkdir()
    (tmp_path / "a fork/train_gpt2.py").write_text(SCRIPT)
    path = tmp_path / "small.toml"
    path.write_text(SWEEP.format(script=tmp_path / "a fork"))
    return path


def run(path):
    sweep.main([str(path), "--out", str(path.with_name("out"))])


def calls(path):
    """{run: the command lines with which the script was started}"""
    found = {}
    for log in path.with_name("out").glob("*/calls.txt"):
        found[log.parent.name] = [json.loads(line) for line in log.read_text().splitlines()]
    return found


def test_a_sweep_trains_what_is_missing_and_continues_but_not_with_other_settings(file, capsys):
    (file.parent / "a fork/kill").touch()
    with pytest.raises(UserError, match=r"muon-2-7.* 3\b.*console\.txt"):
        run(file)
    run(file)
    run(file)
    assert capsys.readouterr().out.count("| default | 6.500 (1) |") == 2
    started = calls(file)
    assert [len(started[name]) for name in ("default-4-1", "muon-2-7", "muon-8-1")] == [1, 2, 1]
    script, *flags = started["default-4-1"][0]
    assert script == str(file.parent / "a fork/train_gpt2.py")
    assert "--max-steps 4" in (line := " ".join(flags)) and "--warmup-steps 2" in line
    assert "--seed 1" in line and "--resume" in line and "--no-shuffle" not in line
    line = " ".join(started["muon-8-1"][0])
    assert "--warmup-steps 4" in line and "--warmdown-steps 2" in line and "--no-shuffle" in line
    rows = file.with_name("results.csv").read_text().splitlines()
    assert rows[:2] == ["recipe,steps,seed,step,loss", "default,4,1,0,9.000000"] and len(rows) == 7
    file.write_text(file.read_text().replace("warmup_steps = 0.5", "warmup_steps = 0.25"))
    with pytest.raises(UserError, match="default-4-1"):
        run(file)


MISTAKES = [
    ("= [1]", "= 1"),
    ("[7]", "[]"),
    ("[7]", '["7"]'),
    ("[7]", "[[1]]"),
    ("[recipes.default]", "[recipes]\na = 1"),
    ("shuffle = false", 'warmup_steps = "half"'),
    ("shuffle = false", "script = 3"),
    ("[common]", "[common"),
    ("[recipes.muon]", f"[recipes.muon]\nscript = '{ROOT}'\nwarmup = 3"),
]


def test_mistakes_show_before_any_run(file):
    correct = file.read_text()
    for old, new in MISTAKES:
        file.write_text(correct.replace(old, new, 1))
        with pytest.raises((UserError, SystemExit)):
            run(file)
        assert not calls(file), new


# Losses of three recipes after 400 steps, by seed.
LOSSES = {
    "base": dict(enumerate((6.0, 6.2, 6.1, 6.4, 6.3, 6.0, 6.1, 6.2, 6.5, 6.4), start=1)),
    "three": {1: 4.9, 2: 5.2, 3: 5.2, 99: 9.0},  # differences -1.1, -1.0, -0.9
    "ten": {seed: 6 - 0.1 * (seed % 2) for seed in range(1, 11)},
}
STUDENT = {3: 4.303, 10: 2.262}  # a published table: t for 2 and 9 degrees of freedom, 95 %


def test_differences_are_paired_with_students_interval(tmp_path, capsys):
    """results.csv has all runs, so nothing is trained."""
    toml = ""
    with open(tmp_path / "results.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["recipe", "steps", "seed", "step", "loss"])
        writer.writerow(["no recipe any more", 400, 1, 400, 5.0])
        for name, losses in LOSSES.items():
            toml += f"[recipes.{name}.lengths]\n400 = {list(losses)}\n"
            for seed, loss in losses.items():
                writer.writerows([name, 400, seed, step, loss + 400 - step] for step in (0, 400))
    (tmp_path / "idea.toml").write_text(toml)
    run(tmp_path / "idea.toml")
    printed = capsys.readouterr().out
    rows = {line.split(" | ")[0]: line for line in printed.splitlines()}
    for name, losses in LOSSES.items():
        values = list(losses.values())
        expected = [statistics.fmean(values), statistics.stdev(values), len(values)]
        if name != "base":
            found = [loss - LOSSES["base"][seed] for seed, loss in losses.items() if seed < 11]
            n = len(found)
            half = STUDENT[n] * statistics.stdev(found) / n**0.5
            assert statistics.fmean(found) < 0 and " | -" in rows[f"| {name}"]
            expected += [-statistics.fmean(found), half, n]
        assert numbers(rows[f"| {name}"]) == pytest.approx(expected, abs=6e-4)
    assert "no recipe any more" not in printed and not (tmp_path / "out").exists()
    assert (tmp_path / "idea.png").stat().st_size > 10_000


def test_the_results_in_the_readme_are_those_of_results_csv(tmp_path, capsys):
    shutil.copytree(ROOT / "bench/recipes", tmp_path, dirs_exist_ok=True)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    printed = ""
    for name in ("length", "shakespeare"):
        run(tmp_path / f"{name}.toml")
        printed += capsys.readouterr().out
    for name in ("default", "wsd-1.8e-3", "muon-6e-3"):
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        for loss in row.split(" | "):
            assert f"| {name} | {loss} (" in printed

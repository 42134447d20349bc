"""reference/check.py: does a run match a reference?"""

import json
import shutil

import pytest
import torch

from reference.check import main
from support.cli import UserError
from tests.conftest import ROOT, losses, train

SHAKESPEARE = ROOT / "reference" / "shakespeare"


def test_bounds_are_made_from_seeds_and_checked(text, tmp_path, capsys):
    args = ["--max-steps 8 --eval-every 4 --data", text]
    runs = [tmp_path / str(seed) for seed in (1, 2, 3, 4)]
    for run in runs:
        train(*args, "--seed", run.name, "--log-dir", run)
    reference = tmp_path / "reference"
    shutil.copytree(runs[0], reference)
    assert main([str(reference), "--make", *map(str, runs[:3])]) == 0
    lines = [line.split() for line in (reference / "check.txt").read_text().splitlines()]
    bounds = [line for line in lines if line[1] == "val"]
    assert [line[0] for line in bounds] == ["0", "512", "1024"]
    for i, (_, _, low, high) in enumerate(bounds):
        values = [losses(run, "val")[i] for run in runs[:3]]
        assert float(low) < min(values) and max(values) < float(high)
    assert main([str(runs[3]), str(reference)]) == 0
    assert capsys.readouterr().out.endswith("\n2 values compared: matches reference\n")
    with open(reference / "check.txt", "a") as file:
        file.write("\n512 train 1.0 2.0\n")
    assert main([str(runs[3]), str(reference)]) == 1
    mean = sum(losses(runs[3])[:4]) / 4
    line = f"step 4: train {mean:.4f} is outside 1.0 to 2.0: does not match"
    assert line in capsys.readouterr().out
    (reference / "check.txt").write_text("512 train one two\n")
    for run, path, message in (
        ("4", reference, "neither `tokens"),
        (".", reference, "not a run's"),
        ("4", tmp_path / "nowhere", "no such reference"),
    ):
        with pytest.raises(UserError, match=message):
            main([str(tmp_path / run), str(path)])


def test_mistakes_show_in_the_first_losses_of_one_seed(text, tmp_path, monkeypatch, capsys):
    """Correct runs match, broken ones do not.

    An erf GELU is off by 1.7e-5 here, where rounding makes 1e-6."""
    args = ["--max-steps 8 --max-lr 1e-2 --n-embd 64 --warmup-steps 8 --data", text]
    reference = tmp_path / "reference"
    train(*args, "--log-dir", reference)
    bounds = "first 8 float32 train 0.000005\n1024 val 8 11\n"
    (reference / "check.txt").write_text(bounds)

    def verdict(name, *more):
        train(*args, *more, "--log-dir", tmp_path / name)
        capsys.readouterr()
        return main([str(tmp_path / name), str(reference)]), capsys.readouterr().out.rstrip()

    matches = "values compared: matches reference"
    assert verdict("micro", "--micro-batch-size 8") == (0, f"7 {matches}")
    assert verdict("seed", "--seed 5 --eval-every 8") == (0, f"1 {matches}")
    gelu = torch.nn.functional.gelu
    mistakes = {"rate": "--max-lr 2e-2", "clip": "--grad-clip 0", "decay": "--weight-decay 0"}
    for name, flags in (mistakes | {"gelu": ""}).items():
        if name == "gelu":
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: gelu(x))
        status, line = verdict(name, flags)
        assert status == 1 and line.endswith("in float32: does not match reference"), (name, line)


def run_folder(folder, log, **settings):
    """The log folder of a shakespeare run with this log and other settings."""
    entry = json.loads((SHAKESPEARE / "run.json").read_text())[-1]
    entry["config"] |= settings
    (folder / "run.json").write_text(json.dumps([entry]))
    (folder / "log.txt").write_text(log)
    return str(folder)


def test_the_shipped_reference_matches_itself():
    assert main([str(SHAKESPEARE)]) == 0


@pytest.mark.parametrize(
    "settings", [{"data": "my.txt"}, {"init": "gpt2"}, {"n_layer": 6}, {"seq_len": 32}], ids=str
)
def test_other_data_shape_or_initial_weights_have_no_reference(settings, tmp_path, capsys):
    log = (SHAKESPEARE / "log.txt").read_text()
    assert main([run_folder(tmp_path, log, **settings)]) == 1
    assert capsys.readouterr().out.startswith("no reference for --")


def test_an_untrained_model_matches_nothing(tmp_path, capsys):
    lines = (SHAKESPEARE / "log.txt").read_text().splitlines(keepends=True)
    first = "".join(line for line in lines if line.startswith("0 "))
    assert main([run_folder(tmp_path, first)]) == 1
    assert "no value after step 0" in capsys.readouterr().out


def test_a_bad_line_of_the_log_is_named(tmp_path):
    folder = run_folder(tmp_path, "0 train 10.8\n1 train x\n")
    with pytest.raises(UserError, match=r"log\.txt, line 2: .*: 1 train x"):
        main([folder])


def test_the_gpt2_reference_tells_published_runs_apart(tmp_path, capsys):
    """Correct ones match, broken ones do not (reference/gpt2/check.txt names them).

    Wrongly exchanged gradients show from step 250 on, a missing warm-up from step 500 on."""
    shape = dict(data="edu_fineweb10B", seq_len=1024, n_layer=12, n_head=12, n_embd=768)

    def verdict(losses):
        log = "".join(f"{step} val {loss}\n" for step, loss in losses.items())
        settings = dict(preset="gpt2", total_batch_size=524_288, **shape)
        return main([run_folder(tmp_path, log, **settings)]), capsys.readouterr().out.rstrip()

    steps = (0, 250, 500, 1000, 1250, 2500, 5000, 10_000, 15_000, 19_073)
    values = "10.9522 6.1771 5.3292 4.1457 3.9467 3.5616 3.3543 3.1883 3.0998 3.0619"
    shuffled = dict(zip(steps, map(float, values.split()), strict=True))
    found = verdict({250: 6.1631, 1000: 4.1533, 1250: 3.9518})
    assert found == (0, "3 values compared: matches gpt2")
    assert verdict(shuffled) == (0, "9 values compared: matches gpt2")
    wrong = {250: 6.43, 1000: 4.8797, 1250: 4.5877, 2500: 4.125}
    no_warmup = {500: 5.7544, 1000: 4.8598, 5000: 3.4993, 10_000: 3.2958, 15_000: 3.2053}
    no_warmup[19_073] = 3.1681
    for step, loss in [*wrong.items(), *no_warmup.items()]:
        status, line = verdict(shuffled | {step: loss})
        assert status == 1 and line.startswith(f"step {step}: val {loss:.4f} is outside"), line

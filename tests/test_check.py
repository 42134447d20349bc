"""reference/check.py: does a run match a reference?"""

import json
import shutil

import pytest
import torch

from reference import check
from support.errors_and_signals import RunError, UserError
from tests.conftest import ROOT, numbers, train

SHAKESPEARE = ROOT / "reference" / "shakespeare"
LOG = (SHAKESPEARE / "log.txt").read_text()


def run_folder(folder, log, precisions=("float32",), reference=SHAKESPEARE, **settings):
    """The log folder of a run with the settings of a reference, but for these.

    precisions: of its starts."""
    config = json.loads((reference / "run.json").read_text())[-1]["config"] | settings
    about = {"script": "train_gpt2.py", "config": config}
    entries = [{"dtype": precision, **about} for precision in precisions]
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(entries))
    (folder / "log.txt").write_text(log)
    return str(folder)


def test_two_runs_are_compared_and_not_judged(tmp_path, capsys):
    """The second one may be a log.txt of another program."""
    ours = run_folder(tmp_path / "a", "0 train 9\n1 train 8\n2 train 7.5\n30 train 3\n30 val 4.5\n")
    other = tmp_path / "log.txt"
    other.write_text("0 train 9.0\n1 train 8.25\n30 train 2\n")
    assert check.main([ours, str(other)]) == 0
    first, difference, *last = map(numbers, capsys.readouterr().out.splitlines())
    assert first == [20, 2] and difference == [0.25]
    assert [line[n:] for line, n in zip(last, (-4, -2), strict=True)] == [[3, 30, 4.5, 30], [2, 30]]
    assert check.main([ours, ours]) == 0 and "difference is 0\n" in capsys.readouterr().out


def test_a_fork_has_no_reference(tmp_path):
    """Its losses may be right, and differ."""
    folder = run_folder(tmp_path, LOG)
    assert check.main([folder]) == 0
    entries = json.loads((tmp_path / "run.json").read_text())
    entries[-1]["script"] = "train_x.py"
    (tmp_path / "run.json").write_text(json.dumps(entries))
    with pytest.raises(RunError, match="train_x"):
        check.main([folder])


def test_bounds_hold_for_any_seed(tmp_path):
    """Steps of 512 tokens. Bounds where no step ends are skipped, and malformed lines of a log."""
    log = "0 val 10\n1 train x\n0 train 4.2\n1 train 4.1\n2 train 4\n3 train 3.9\n4 val 4.5\n5 tr"
    run = run_folder(tmp_path / "run", log, seed=1)
    reference = run_folder(tmp_path / "reference", log)
    bounds = tmp_path / "reference/check.txt"
    for line, status in (
        ("2048 val 4.49 4.51\n2559 val 1 2\n4096 val 1 2", 0),
        ("2048 val 4.49 4.51\n2048 train 4.04 4.06", 0),  # the mean
        ("2048 val 4.49 4.51\n2048 train 3.8 4", 1),
        ("0 val 9 11", 1),  # says nothing about the training
    ):
        bounds.write_text(f"# tokens stream low high\n{line}\n")
        assert check.main([run, reference]) == status, line
    bounds.write_text("2048 val 4.49 4.51\n")
    diverged = run_folder(tmp_path / "diverged", log.replace("4 val 4.5", "4 val nan"), seed=1)
    assert check.main([diverged, reference]) == 1
    for line in ("3 train nan", "5 train nan", "5 val nan", "5 val inf"):  # also where no bound is
        bad = log.replace("3 train 3.9", line) if "3" in line else f"{log}\n{line}\n"
        assert check.main([run_folder(tmp_path / "bad", bad, seed=1), reference]) == 1, line
    bounds.write_text("512 train one two\n")
    for args, message in (
        ([run, reference], "512 train one two"),
        ([run, "nowhere"], "nowhere"),
        (["nowhere"], "nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            check.main(args)


def test_first_losses_are_the_same_up_to_rounding(tmp_path):
    """Of the same seed, by the coarsest precision of the run's starts."""
    for by, precisions, seed, status in (
        (0.8e-5, ["float32"], 1337, 0),
        (1.2e-5, ["float32"], 1337, 1),
        (1.2e-5, ["float32"], 1, 0),  # of another seed, so only bounds hold
        (1.8e-2, ["bfloat16", "float32"], 1337, 0),
        (2.2e-2, ["bfloat16"], 1337, 1),
        (2.2e-2, ["float16"], 1337, 0),  # its first updates may be skipped
    ):
        lines = []
        for step, stream, value in map(str.split, LOG.splitlines()):
            higher = by if stream == "train" else 0
            lines.append(f"{step} {stream} {float(value) + higher:.6f}\n")
        run = run_folder(tmp_path, "".join(lines), precisions, seed=seed)
        assert check.main([run, str(SHAKESPEARE)]) == status, (by, precisions, seed)


def test_mistakes_show_in_the_first_losses_of_one_seed(text, tmp_path, monkeypatch):
    """Correct runs match, broken ones do not."""
    args = ["--max-steps 6 --max-lr 5e-2 --n-embd 32 --warmup-steps 2 --data", text]
    args.append("--total-batch-size 64")
    reference = tmp_path / "reference"
    train(*args, "--log-dir", reference)
    (reference / "check.txt").write_text("384 val 6 11\n")

    def status(name, *more):
        train(*args, *more, "--log-dir", tmp_path / name)
        return check.main([str(tmp_path / name), str(reference)])

    assert status("micro", "--micro-batch-size 4") == 0
    assert status("seed", "--seed 5 --eval-every 6") == 0
    gelu = torch.nn.functional.gelu
    mistakes = {"rate": "--max-lr 4e-2", "clip": "--grad-clip 0", "decay": "--weight-decay 0"}
    for name, flags in (mistakes | {"gelu": ""}).items():
        if name == "gelu":
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: gelu(x))
        assert status(name, flags) == 1, name


def test_unlike_settings_are_named_and_another_model_is_not_compared(tmp_path, capsys):
    """As are other data; the place of the same data may differ."""
    assert check.main([str(SHAKESPEARE)]) == 0
    for settings, message in (
        ({"data": "/elsewhere/input.txt"}, ""),
        ({"max_lr": 0.1}, "--max-lr 0.1"),
        ({"seed": 1}, "--seed 1"),
        ({"dropout": 0.2}, ""),  # only a fork has it
    ):
        assert check.main([run_folder(tmp_path, LOG, **settings), str(SHAKESPEARE)]) == 0
        out = capsys.readouterr().out
        assert message in out and ("--" in out) == bool(message)
    for settings in ({"n_layer": 5}, {"data": "my.txt"}, {"preset": "small"}):
        with pytest.raises(RunError, match="no reference for"):
            check.main([run_folder(tmp_path, LOG, **settings)])


def test_a_setting_of_both_runs_is_named_without_being_listed(tmp_path, capsys):
    reference = run_folder(tmp_path / "reference", LOG, beta1=0.9)
    shutil.copy(SHAKESPEARE / "check.txt", reference)
    assert check.main([run_folder(tmp_path / "run", LOG, beta1=0.5), reference]) == 0
    assert "--beta1 0.5 (0.9)" in capsys.readouterr().out


def test_the_gpt2_reference_tells_published_runs_apart(tmp_path):
    """Correct ones match, broken ones do not (reference/gpt2/check.txt names them)."""

    def status(losses):
        log = "".join(f"{step} val {loss}\n" for step, loss in losses.items())
        run = run_folder(tmp_path, log, reference=ROOT / "reference/gpt2", preset="gpt2")
        return check.main([run])

    shuffled = {0: 10.9522, 250: 6.1771, 500: 5.3292, 1000: 4.1457, 5000: 3.3543, 19_073: 3.0619}
    assert status(shuffled) == 0
    gradients = {250: 6.43, 1000: 4.8797}
    no_warmup = {500: 5.7544, 1000: 4.8598, 5000: 3.4993, 19_073: 3.1681}
    for step, loss in [*gradients.items(), *no_warmup.items()]:
        assert status(shuffled | {step: loss}) == 1, step
    # A log of build-nanogpt, with losses of AGNDM/build-nanogpt, unchanged.
    train_losses = "".join(f"{step} train 10.091400\n" for step in range(20))
    path = tmp_path / "their/log.txt"
    path.parent.mkdir()
    for loss, expected in ((6.1696, 0), (6.43, 1)):
        path.write_text(f"0 val 10.95\n{train_losses}250 val {loss}\n250 hella 0.2611\n")
        assert check.main([str(path)]) == expected

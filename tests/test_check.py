"""reference/check.py: does a run match a reference?"""

import json
import subprocess
import sys

import pytest
import torch

from reference.check import main
from support.errors import UserError
from tests.conftest import ROOT, train

SHAKESPEARE = ROOT / "reference" / "shakespeare"
LOG = (SHAKESPEARE / "log.txt").read_text()


def run_folder(folder, log, precisions=("float32",), reference=SHAKESPEARE, **settings):
    """The log folder of a run with the settings of a reference, but for these.

    precisions: of its starts."""
    config = json.loads((reference / "run.json").read_text())[-1]["config"] | settings
    entries = [
        {"device": f"cpu (2 threads), {precision}: as requested", "config": config}
        for precision in precisions
    ]
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(entries))
    (folder / "log.txt").write_text(log)
    return str(folder)


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
        assert main([run, reference]) == status, line
    bounds.write_text("2048 val 4.49 4.51\n")
    diverged = run_folder(tmp_path / "diverged", log.replace("4 val 4.5", "4 val nan"), seed=1)
    assert main([diverged, reference]) == 1
    for step in ("3 train", "5 train", "5 val"):  # also where no bound is
        bad = log.replace("3 train 3.9", "3 train nan") if "3" in step else f"{log}\n{step} nan\n"
        assert main([run_folder(tmp_path / "bad", bad, seed=1), reference]) == 1, step
    bounds.write_text("512 train one two\n")
    for args, message in (
        ([run, reference], "512 train one two"),
        ([run, "nowhere"], "nowhere"),
        (["nowhere"], "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            main(args)


def shifted(by):
    """The log of the reference with higher training losses."""
    lines = []
    for step, stream, value in map(str.split, LOG.splitlines()):
        higher = by if stream == "train" else 0
        lines.append(f"{step} {stream} {float(value) + higher:.6f}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    "by, precisions, seed, status",
    [
        (1.8e-5, ["float32"], 1337, 0),
        (2.2e-5, ["float32"], 1337, 1),
        (2.2e-5, ["float32"], 1, 0),  # of another seed, so only bounds hold
        (1.8e-2, ["bfloat16", "float32"], 1337, 0),
        (2.2e-2, ["bfloat16"], 1337, 1),
        (2.2e-2, ["float16"], 1337, 0),  # its first updates may be skipped
    ],
)
def test_first_losses_are_the_same_up_to_rounding(by, precisions, seed, status, tmp_path):
    run = run_folder(tmp_path, shifted(by), precisions, seed=seed)
    assert main([run, str(SHAKESPEARE)]) == status


def test_mistakes_show_in_the_first_losses_of_one_seed(text, tmp_path, monkeypatch):
    """Correct runs match, broken ones do not."""
    args = ["--max-steps 10 --max-lr 5e-2 --n-embd 64 --warmup-steps 4 --data", text]
    args.append("--total-batch-size 64")
    reference = tmp_path / "reference"
    train(*args, "--log-dir", reference)
    (reference / "check.txt").write_text("640 val 6 11\n")

    def status(name, *more):
        train(*args, *more, "--log-dir", tmp_path / name)
        return main([str(tmp_path / name), str(reference)])

    assert status("micro", "--micro-batch-size 4") == 0
    assert status("seed", "--seed 5 --eval-every 10") == 0
    gelu = torch.nn.functional.gelu
    mistakes = {"rate": "--max-lr 4e-2", "clip": "--grad-clip 0", "decay": "--weight-decay 0"}
    for name, flags in (mistakes | {"gelu": ""}).items():
        if name == "gelu":
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: gelu(x))
        assert status(name, flags) == 1, name


def test_the_shipped_reference_matches_itself(tmp_path, capsys):
    assert main([str(SHAKESPEARE)]) == 0
    assert capsys.readouterr().out.endswith("\nmatches shakespeare\n")
    assert main([run_folder(tmp_path, LOG, preset="auto")]) == 0


def test_unlike_settings_are_named_and_another_model_is_not_compared(tmp_path, capsys):
    """As are other data; the place of the same data may differ."""
    for settings, status, message in (
        ({"data": "/elsewhere/input.txt"}, 0, "matches shakespeare"),
        ({"n_layer": 5}, 1, "no reference for --n-layer 5: shakespeare has 4"),
        ({"data": "my.txt"}, 1, "no reference for --data my.txt: shakespeare has input.txt"),
        ({"max_lr": 0.1}, 0, "settings unlike shakespeare's: --max-lr 0.1 (0.015)\n"),
    ):
        run = run_folder(tmp_path, LOG, **settings)
        assert main([run, str(SHAKESPEARE)]) == status
        assert message in capsys.readouterr().out


def test_the_gpt2_reference_tells_published_runs_apart(tmp_path):
    """Correct ones match, broken ones do not (reference/gpt2/check.txt names them)."""

    def status(losses):
        log = "".join(f"{step} val {loss}\n" for step, loss in losses.items())
        return main([run_folder(tmp_path, log, reference=ROOT / "reference/gpt2", preset="gpt2")])

    shuffled = {0: 10.9522, 250: 6.1771, 500: 5.3292, 1000: 4.1457, 5000: 3.3543, 19_073: 3.0619}
    assert status(shuffled) == 0
    gradients = {250: 6.43, 1000: 4.8797}
    no_warmup = {500: 5.7544, 1000: 4.8598, 5000: 3.4993, 19_073: 3.1681}
    for step, loss in [*gradients.items(), *no_warmup.items()]:
        assert status(shuffled | {step: loss}) == 1, step


def test_a_log_of_build_nanogpt_is_judged(tmp_path, capsys):
    """Losses of AGNDM/build-nanogpt, unchanged."""
    log = "".join(f"{step} train 10.091400\n" for step in range(20))
    path = tmp_path / "their.txt"
    for loss, status in ((6.1696, 0), (6.43, 1)):
        path.write_text(f"0 val 10.95\n{log}250 val {loss}\n250 hella 0.2611\n")
        assert main([str(path)]) == status
    assert "assumed to be those of gpt2" in capsys.readouterr().out


def test_torch_is_not_imported():
    code = "import sys, reference.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

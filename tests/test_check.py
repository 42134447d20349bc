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


def test_bounds_hold_for_any_seed(tmp_path, capsys):
    """Steps of 512 tokens. Bounds where no step ends are skipped, and malformed lines of a log."""
    runs = []
    for seed, loss in enumerate((4.0, 4.2)):
        losses = "".join(f"{step} train {loss - step / 10}\n" for step in range(4))
        log = f"0 val 10\n1 train x\n{losses}4 val 4.5\na stray line\n8 val {loss}\n9 tr"
        runs.append(run_folder(tmp_path / str(seed), log, seed=seed))
    bounds = tmp_path / "0/check.txt"
    lines = ["# tokens stream low high", "2048 val 4.49 4.51", "4096 val 3.5 4.5", "2559 val 1 2"]
    bounds.write_text("\n".join([*lines, "6144 val 1 2", ""]))
    assert main([runs[1], runs[0]]) == 0
    assert capsys.readouterr().out == "val: 2 values to step 8, within 0.5\nmatches 0\n"
    with open(bounds, "a") as file:
        file.write("2048 train 1 2\n")
    assert main([runs[1], runs[0]]) == 1  # the mean of 4.2, 4.1, 4.0 and 3.9
    assert capsys.readouterr().out.startswith("step 4: train 4.05 is outside 1 to 2\n")
    bounds.write_text("512 train one two\n")
    for args, message in (
        (runs[::-1], "512 train one two"),
        ([runs[1], "nowhere"], "nowhere"),
        ([str(ROOT)], r"log\.txt: no such file"),
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
        (6e-3, ["bfloat16"], 1337, 0),
        (6e-3, ["float32", "bfloat16"], 1337, 0),
        (2.2e-2, ["bfloat16"], 1337, 1),
        (2.2e-2, ["float16"], 1337, 0),  # its first updates may be skipped
    ],
)
def test_first_losses_are_the_same_up_to_rounding(by, precisions, seed, status, tmp_path):
    run = run_folder(tmp_path, shifted(by), precisions, seed=seed)
    assert main([run, str(SHAKESPEARE)]) == status


def test_a_run_without_later_steps_is_not_compared(tmp_path):
    assert main([run_folder(tmp_path, "0 val 10.82\n")]) == 1


def test_settings_that_change_losses_are_named(tmp_path, capsys):
    assert main([run_folder(tmp_path, LOG, micro_batch_size=8, log_dir="x", device="cpu")]) == 0
    assert "unlike" not in capsys.readouterr().out
    main([run_folder(tmp_path, LOG, optimizer="adamw", max_lr=0.0015, data="/home/me/input.txt")])
    expected = "settings unlike shakespeare's: --optimizer adamw (muon), --max-lr 0.0015 (0.015)\n"
    assert capsys.readouterr().out.startswith(expected)
    assert main([run_folder(tmp_path, LOG, n_layer=6)]) == 1
    assert "no reference for --n-layer 6" in capsys.readouterr().out


def test_mistakes_show_in_the_first_losses_of_one_seed(text, tmp_path, monkeypatch, capsys):
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
        capsys.readouterr()
        assert status(name, flags) == 1, name
        assert "is outside" in capsys.readouterr().out


def test_the_shipped_reference_matches_itself():
    assert main([str(SHAKESPEARE)]) == 0


def test_the_gpt2_reference_tells_published_runs_apart(tmp_path, capsys):
    """Correct ones match, broken ones do not (reference/gpt2/check.txt names them)."""

    def verdict(losses):
        log = "".join(f"{step} val {loss}\n" for step, loss in losses.items())
        folder = run_folder(tmp_path, log, reference=ROOT / "reference/gpt2", preset="gpt2")
        return main([folder]), capsys.readouterr().out

    steps = (0, 250, 500, 1000, 1250, 2500, 5000, 10_000, 15_000, 19_073)
    values = (10.9522, 6.1771, 5.3292, 4.1457, 3.9467, 3.5616, 3.3543, 3.1883, 3.0998, 3.0619)
    shuffled = dict(zip(steps, values, strict=True))
    assert verdict(shuffled)[0] == 0
    wrong = [(250, 6.43), (1000, 4.8797), (1250, 4.5877), (2500, 4.125)]  # gradients
    wrong += [(500, 5.7544), (1000, 4.8598), (5000, 3.4993)]  # no warm-up
    wrong += [(10_000, 3.2958), (15_000, 3.2053), (19_073, 3.1681)]
    for step, loss in wrong:
        status, line = verdict(shuffled | {step: loss})
        assert status == 1 and line.startswith(f"step {step}: val {loss:.6g} is outside"), line


def test_a_log_of_build_nanogpt_is_judged(tmp_path, capsys):
    """Losses of AGNDM/build-nanogpt, unchanged."""
    log = "".join(f"{step} train 10.091400\n" for step in range(20))
    path = tmp_path / "their.txt"
    path.write_text(f"0 val 10.95\n{log}250 val 6.1696\n250 hella 0.2611\n19072 val 3.0663\n")
    assert main([str(path)]) == 0
    assert "assumed to be those of gpt2" in capsys.readouterr().out
    path.write_text(path.read_text().replace("6.1696", "6.43"))
    assert main([str(path)]) == 1


def test_torch_is_not_imported():
    code = "import sys, reference.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

"""reference/check.py: does a run match a reference?"""

import json
import math
import shutil

import pytest
import torch

from reference.check import TOLERANCE, main
from support.errors import UserError
from tests.conftest import ROOT, train

SHAKESPEARE = ROOT / "reference" / "shakespeare"


def run_folder(folder, log, starts=((0, "float32"),), reference=SHAKESPEARE, **settings):
    """The log folder of a run with the settings of a reference, but for these.

    starts: (step, precision) of each."""
    config = json.loads((reference / "run.json").read_text())[-1]["config"] | settings
    entries = [
        {"step": step, "device": f"cpu (2 threads), {precision}: as requested", "config": config}
        for step, precision in starts
    ]
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(entries))
    (folder / "log.txt").write_text(log)
    return str(folder)


def test_bounds_of_other_seeds_are_checked(tmp_path, capsys):
    """Steps of 512 tokens. Skipped are lines of a log that are none, those of an earlier run in it,
    and bounds where no step ends."""
    runs = []
    for seed, loss in enumerate((4.0, 4.2)):
        train = "".join(f"{step} train {loss - step / 10}\n" for step in range(4))
        log = f"4 val 9.0\n12 val 9.0\n0 val 10\n1 train x\n{train}4 val 4.5\na stray line\n"
        log += f"5 val 9.0\n8 val {loss}\n9 tr"
        runs.append(run_folder(tmp_path / str(seed), log, seed=seed))
    reference = tmp_path / "0"
    bounds = ["# tokens stream low high", "2048 val 4.49 4.51", "4096 val 3.5 4.5"]
    bounds += ["2559 val 1 2", "2561 val 1 2", "6144 val 1 2", ""]
    (reference / "check.txt").write_text("\n".join(bounds))
    assert main([runs[1], runs[0]]) == 0
    assert capsys.readouterr().out == "val 2 values to step 8, within 0.5\nmatches 0\n"
    with open(reference / "check.txt", "a") as file:
        file.write("\n2048 train 1 2\n")
    assert main([runs[1], runs[0]]) == 1
    report = "step 4: train 4.05 is outside 1 to 2\n1 of 3 values are outside: does not match 0\n"
    assert capsys.readouterr().out == report
    (reference / "check.txt").write_text("512 train one two\n")
    for path, message in (
        (runs[0], "not `tokens stream low high`: 512 train one two"),
        ("nowhere", "not a reference; choose"),
    ):
        with pytest.raises(UserError, match=message):
            main([runs[1], path])
    with pytest.raises(UserError, match=r"log\.txt: no such file"):
        main([str(ROOT)])
    (reference / "run.json").write_text('[{"config": {}}]')
    (tmp_path / "1/run.json").write_text('[{"config": {"preset": "auto"}}]')
    with pytest.raises(UserError, match=r"its run\.json lacks --data --init --seq-len"):
        main([runs[1], runs[0]])


LOG = (SHAKESPEARE / "log.txt").read_text()


def shifted(by, first=0):
    """The log of the reference, its training losses higher from step `first` on."""
    lines = []
    for step, stream, value in map(str.split, LOG.splitlines()):
        higher = by if stream == "train" and int(step) >= first else 0
        lines.append(f"{step} {stream} {float(value) + higher:.6f}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    "by, first, starts, within",
    [
        (2e-5, 0, "0 float32", 2e-5),
        (2.1e-5, 0, "0 float32", None),
        (6e-3, 0, "0 bfloat16, 100 float32", 0.02),
        (6e-3, 0, "0 bfloat16, 10 float32", 0.02),
        (6e-3, 5, "0 float32, 10 bfloat16", None),
        (6e-3, 12, "0 float32, 10 bfloat16", 0.02),
        (6e-3, 10, "0 float32, 11 bfloat16", None),
        (6e-3, 0, "0 bfloat16, 0 float32", None),
        (6e-3, 0, "0 bfloat16, 100 float32, 0 float32", None),
        (6e-3, 0, "0 float16, 10 float32", math.inf),
    ],
)
def test_first_losses_are_judged_by_the_precision_so_far(
    by, first, starts, within, tmp_path, capsys
):
    """within: inf if they are not judged, None if they don't match."""
    starts = [(int(step), name) for step, name in map(str.split, starts.split(","))]
    status = main([run_folder(tmp_path, shifted(by, first), starts), str(SHAKESPEARE)])
    report = capsys.readouterr().out
    assert status == int(within is None)
    assert ("train, same seed," in report) == (within != math.inf)
    assert within in (None, math.inf) or f"to step 19, within {within:.2g}\n" in report
    if by == 2.1e-5:
        assert report.startswith("step 0: train, same seed, 10.810259 is outside 10.810218 to ")


def test_a_reference_in_bfloat16_has_wider_bounds(tmp_path):
    reference = run_folder(tmp_path / "reference", LOG, [(0, "bfloat16")])
    shutil.copy(SHAKESPEARE / "check.txt", reference)
    assert main([run_folder(tmp_path / "log", shifted(6e-3)), reference]) == 0


@pytest.mark.parametrize(
    "more, report",
    [
        ("600 train 4.5\n800 val 5.0\n", "\nmatches shakespeare\n"),
        ("600 train nan\n", "step 600: train nan: does not match"),
        ("601 val inf\n", "step 601: val inf: does not match"),
        ("800 val 11.0\n", "step 800: val, at the end, 11 is outside 0 to 5.0658\n"),
        ("".join(f"{600 + i} train 11\n" for i in range(30)), "step 629: train, at the end, 8.4"),
    ],
)
def test_a_run_that_diverges_after_the_last_bound_does_not_match(more, report, tmp_path, capsys):
    status = main([run_folder(tmp_path, LOG + more, seed=2)])
    printed = capsys.readouterr().out
    assert report in printed and status == int("does not match" in printed)


def test_a_log_of_every_tenth_loss_has_no_means(tmp_path, capsys):
    lines = LOG.splitlines(keepends=True)
    kept = [line for line in lines if " val " in line or line.split()[0].endswith("9")]
    assert main([run_folder(tmp_path, "".join(kept), seed=2)]) == 0
    assert capsys.readouterr().out.startswith("val 3 values to step 600, ")


def test_settings_unlike_the_references_are_named(tmp_path, capsys):
    main([run_folder(tmp_path, LOG, optimizer="adamw", max_lr=0.0015, data="/home/me/input.txt")])
    expected = "settings unlike shakespeare's: --optimizer adamw (muon), --max-lr 0.0015 (0.015)\n"
    assert capsys.readouterr().out.startswith(expected)


def test_mistakes_show_in_the_first_losses_of_one_seed(text, tmp_path, monkeypatch, capsys):
    """Correct runs match, broken ones do not.

    An erf GELU is off by 2.1e-5 here, where rounding makes 1e-6."""
    args = ["--max-steps 6 --max-lr 3e-2 --n-embd 64 --warmup-steps 6 --data", text]
    args.append("--total-batch-size 64")
    reference = tmp_path / "reference"
    train(*args, "--log-dir", reference)
    (reference / "check.txt").write_text("384 val 8 11\n")
    monkeypatch.setitem(TOLERANCE, "float32", 5e-6)

    def verdict(name, *more):
        train(*args, *more, "--log-dir", tmp_path / name)
        capsys.readouterr()
        return main([str(tmp_path / name), str(reference)]), capsys.readouterr().out

    same_seed = "train, same seed, 5 values to step 5, within 5e-06\nmatches reference\n"
    assert verdict("micro", "--micro-batch-size 4") == (0, same_seed)
    other_seed = "val 1 values to step 6, within 1.5\nmatches reference\n"
    assert verdict("seed", "--seed 5 --eval-every 6") == (0, other_seed)
    gelu = torch.nn.functional.gelu
    mistakes = {"rate": "--max-lr 2e-2", "clip": "--grad-clip 0", "decay": "--weight-decay 0"}
    for name, flags in (mistakes | {"gelu": ""}).items():
        if name == "gelu":
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: gelu(x))
        status, report = verdict(name, flags)
        assert status == 1 and ": train, same seed, " in report, (name, report)
        assert report.endswith("of 6 values are outside: does not match reference\n")


def test_the_shipped_reference_matches_itself_but_not_another_shape(tmp_path, capsys):
    assert main([str(SHAKESPEARE)]) == 0
    assert main([run_folder(tmp_path, LOG, n_layer=6)]) == 1
    assert "\nno reference for --n-layer 6: shakespeare has 4" in capsys.readouterr().out


def test_the_gpt2_reference_tells_published_runs_apart(tmp_path, capsys):
    """Correct ones match, broken ones do not (reference/gpt2/check.txt names them).

    Wrongly exchanged gradients show from step 250 on, a missing warm-up from step 500 on."""

    def verdict(losses):
        log = "".join(f"{step} val {loss}\n" for step, loss in losses.items())
        folder = run_folder(tmp_path, log, reference=ROOT / "reference/gpt2", preset="gpt2")
        return main([folder]), capsys.readouterr().out.rstrip()

    steps = (0, 250, 500, 1000, 1250, 2500, 5000, 10_000, 15_000, 19_073)
    values = (10.9522, 6.1771, 5.3292, 4.1457, 3.9467, 3.5616, 3.3543, 3.1883, 3.0998, 3.0619)
    shuffled = dict(zip(steps, values, strict=True))
    assert verdict(shuffled) == (0, "val 9 values to step 19073, within 0.15\nmatches gpt2")
    wrong = [(250, 6.43), (1000, 4.8797), (1250, 4.5877), (2500, 4.125)]
    wrong += [(500, 5.7544), (1000, 4.8598), (5000, 3.4993)]  # no warm-up
    wrong += [(10_000, 3.2958), (15_000, 3.2053), (19_073, 3.1681)]
    for step, loss in wrong:
        status, line = verdict(shuffled | {step: loss})
        assert status == 1 and line.startswith(f"step {step}: val {loss:.6g} is outside"), line


def test_a_log_of_build_nanogpt_is_judged(tmp_path, capsys):
    """Losses of AGNDM/build-nanogpt, unchanged."""
    log = "".join(f"{step} train 10.091400\n" for step in range(20))
    (tmp_path / "their.txt").write_text(f"{log}250 val 6.1696\n19072 val 3.0663\n")
    assert main([str(tmp_path / "their.txt")]) == 0
    assumed, report = capsys.readouterr().out.split("\n", maxsplit=1)
    assert assumed.startswith("not in the log, so assumed as in gpt2: --data edu_fineweb10B ")
    assert assumed.endswith(" --n-layer 12 --n-head 12 --n-embd 768 --total-batch-size 524288")
    basis = "train 1 values to step 20, within 0.15\nval 2 values to step 19072, within 0.15\n"
    assert report == f"{basis}matches gpt2\n"


NANOGPT = """\
Overriding config with config/train_shakespeare_char.py:
dataset = 'shakespeare_char'
block_size = 256 # context
Overriding: dataset = edu_fineweb10B
Overriding: block_size = 1024
Overriding: init_from = resume
tokens per iteration will be: 524,288
step 0: train loss 10.9455, val loss 10.9400
iter 0: loss 10.9231, time 426.03ms, mfu -100.00%
step 250: train loss 6.1500, val loss 6.1696
iter 250: loss 6.2111, time 295.02ms, mfu -100.00%
step 1000: train loss 4.1000, val loss 4.1475
"""


@pytest.mark.parametrize(
    "old, new, report",
    [
        ("", "", "val 2 values to step 1000, within 0.15\nmatches gpt2\n"),
        ("4.1475", "4.8797", "step 1000: val 4.8797 is outside 4 to 4.3\n1 of 3 values"),
        ("Overriding: dataset", "x", "no reference for --data shakespeare_char: gpt2 has edu"),
        ("dataset", "x", "no reference for --data openwebtext: gpt2 has edu_fineweb10B\n"),
        ("Overriding: block", "x", "no reference for --seq-len 256: gpt2 has 1024\n"),
        ("= resume", "= gpt2-xl", "no reference for --init gpt2-xl: gpt2 has scratch\n"),
        ("524,288", "491,520", "no value after step 0 that gpt2 has: not compared\n"),
        ("524,288", "", "val 2 values to step 1000, within 0.15\nmatches gpt2\n"),
        ("tokens per", "n_layer=24\ntokens per", "no reference for --n-layer 24: gpt2 has 12\n"),
        ("tokens per", "# n_layer = 24\ntokens per", "\nmatches gpt2\n"),
        ("tokens per", "learning_rate=6e-3\ntokens per", "gpt2's: --max-lr 6e-3 (0.0006)\n"),
        ("tokens per", "learning_rate=6.0e-4\ntokens per", "2 values to step 1000, within 0.15\n"),
        ("4.1475\n", "4.1", "val 1 values to step 250, within 0.15\nmatches gpt2\n"),
        (
            "4.1475\n",
            "4.1475\niter 1001: loss nan, ",
            "step 1001: train nan: does not match gpt2\n",
        ),
        # an earlier run in the same file, and one that followed
        ("Overriding config", f"n_head = 1\n{NANOGPT}1\nOverriding config", "\nmatches gpt2\n"),
        (
            "4.1475\n",
            f"4.1475\nn_head = 1\n{NANOGPT}",
            "no reference for --n-head 1: gpt2 has 12\n",
        ),
    ],
)
def test_nanogpts_output_is_judged(old, new, report, tmp_path, capsys):
    """In the words of its train.py at commit 3adf61e."""
    (tmp_path / "out.txt").write_text(NANOGPT.replace(old, new))
    status = main([str(tmp_path / "out.txt")])
    printed = capsys.readouterr().out
    assert status == int("\nmatches gpt2" not in printed) and report in printed
    assert ("settings unlike" in printed) == new.startswith(("491,520", "learning_rate=6e-3"))

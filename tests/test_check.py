"""reference/check.py: does a run match a reference?"""

import json

import pytest
import torch

from reference.check import TOLERANCE, main
from support.errors import UserError
from tests.conftest import ROOT, train

SHAKESPEARE = ROOT / "reference" / "shakespeare"


def run_folder(folder, log, **settings):
    """The log folder of a shakespeare run with this log and other settings."""
    entry = json.loads((SHAKESPEARE / "run.json").read_text())[-1]
    entry["config"] |= settings
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps([entry]))
    (folder / "log.txt").write_text(log)
    return str(folder)


def test_bounds_of_other_seeds_are_checked(tmp_path, capsys):
    """Lines of a log that are none are skipped. Steps of 512 tokens."""
    runs = []
    for seed, loss in enumerate((4.0, 4.2)):
        train = "".join(f"{step} train {loss - step / 10}\n" for step in range(4))
        log = f"0 val 10\n1 train x\n{train}4 val 4.5\na stray line\n8 val {loss}\n9 tr"
        runs.append(run_folder(tmp_path / str(seed), log, seed=seed))
    reference = tmp_path / "0"
    bounds = ["# tokens stream low high", "2048 val 4.49 4.51", "4096 val 3.5 4.5", ""]
    (reference / "check.txt").write_text("\n".join(bounds))
    assert main([runs[1], runs[0]]) == 0
    assert capsys.readouterr().out == "val 2 values to step 8, within 0.5\nmatches 0\n"
    with open(reference / "check.txt", "a") as file:
        file.write("\n2048 train 1.0 2.0\n")
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


def test_mistakes_show_in_the_first_losses_of_one_seed(text, tmp_path, monkeypatch, capsys):
    """Correct runs match, broken ones do not.

    An erf GELU is off by 1.7e-5 here, where rounding makes 1e-6."""
    args = ["--max-steps 8 --max-lr 1e-2 --n-embd 64 --warmup-steps 8 --data", text]
    reference = tmp_path / "reference"
    train(*args, "--log-dir", reference)
    (reference / "check.txt").write_text("1024 val 8 11\n")
    monkeypatch.setitem(TOLERANCE, "float32", 5e-6)

    def verdict(name, *more):
        train(*args, *more, "--log-dir", tmp_path / name)
        capsys.readouterr()
        return main([str(tmp_path / name), str(reference)]), capsys.readouterr().out

    same_seed = "train, same seed, 7 values to step 7, within 5e-06\nmatches reference\n"
    assert verdict("micro", "--micro-batch-size 8") == (0, same_seed)
    other_seed = "val 1 values to step 8, within 1.5\nmatches reference\n"
    assert verdict("seed", "--seed 5 --eval-every 8") == (0, other_seed)
    gelu = torch.nn.functional.gelu
    mistakes = {"rate": "--max-lr 2e-2", "clip": "--grad-clip 0", "decay": "--weight-decay 0"}
    for name, flags in (mistakes | {"gelu": ""}).items():
        if name == "gelu":
            monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: gelu(x))
        status, report = verdict(name, flags)
        assert status == 1 and ": train, same seed, " in report, (name, report)
        assert report.endswith("of 8 values are outside: does not match reference\n")


def test_the_shipped_reference_matches_itself_but_not_another_shape(tmp_path, capsys):
    assert main([str(SHAKESPEARE)]) == 0
    log = (SHAKESPEARE / "log.txt").read_text()
    assert main([run_folder(tmp_path, log, n_layer=6)]) == 1
    assert "\nno reference for --n-layer 6: shakespeare has 4" in capsys.readouterr().out


def test_the_gpt2_reference_tells_published_runs_apart(tmp_path, capsys):
    """Correct ones match, broken ones do not (reference/gpt2/check.txt names them).

    Wrongly exchanged gradients show from step 250 on, a missing warm-up from step 500 on."""
    settings = dict(preset="gpt2", data="edu_fineweb10B", total_batch_size=524_288)
    settings |= dict(seq_len=1024, n_layer=12, n_head=12, n_embd=768)

    def verdict(losses):
        log = "".join(f"{step} val {loss}\n" for step, loss in losses.items())
        return main([run_folder(tmp_path, log, **settings)]), capsys.readouterr().out.rstrip()

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
    ],
)
def test_nanogpts_output_is_judged(old, new, report, tmp_path, capsys):
    """In the words of its train.py at commit 3adf61e."""
    (tmp_path / "out.txt").write_text(NANOGPT.replace(old, new))
    status = main([str(tmp_path / "out.txt")])
    printed = capsys.readouterr().out
    assert status == int("\nmatches gpt2" not in printed) and report in printed

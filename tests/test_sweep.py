"""bench/recipes/sweep.py: recipes compared by length; trackers."""

import importlib.util
import io
import json
import re
import shutil
import sys
from itertools import chain
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from tests.conftest import ROOT, train
from train_gpt2 import read_config

SPEC = importlib.util.spec_from_file_location("sweep", ROOT / "bench/recipes/sweep.py")
sweep = sys.modules["sweep"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sweep)

SWEEP = """
[common]
preset = "shakespeare"
total_batch_size = 32
seq_len = 16
warmup_steps = 0.5
warmdown_steps = 0.25
lengths = {{ "4" = [1] }}
[recipes.default]
[recipes.muon]
shuffle = false
lengths = {{ "2" = [7] }}
[recipes.fork]
script = "{fork}"
z_loss = 0.5
lengths = {{ "3" = [1] }}
"""

# Trains nothing: records what it is called with, and logs. It fails once if there is a file `kill`.
SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from support.cli import run

def read_config(flags):
    assert "--z-loss" in flags
    return SimpleNamespace(total_batch_size=48)

def main():
    value = dict(zip(sys.argv[1:], sys.argv[2:]))
    folder = Path(value["--log-dir"])
    kill = Path(__file__).with_name("kill")
    with open(folder / "calls.txt", "a") as calls:
        print(json.dumps(sys.argv), file=calls)
    with open(folder / "log.txt", "a") as log:
        if kill.exists():
            kill.unlink()
            log.write("0 val 8.0\\n1 train 3.0\\n")
            sys.exit(3)
        if "--eval-every" not in value:
            log.write(f"0 val 9.0\\n1 val 3.0\\n{value['--max-steps']} val 6.5\\n")

if __name__ == "__main__":
    run(main)
"""


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A folder with another train_gpt2.py and support/; a similar one stands for the original."""
    for name in ("a fork", "original"):
        (tmp_path / name / "support").mkdir(parents=True)
        (tmp_path / name / "support/cli.py").write_text("def run(main): main()")
        (tmp_path / name / "train_gpt2.py").write_text(SCRIPT)
    monkeypatch.setattr(sweep, "ROOT", tmp_path / "original")
    return tmp_path / "a fork"


def test_a_sweep_trains_what_is_missing_and_continues(fork, tmp_path, monkeypatch, capsys):
    path, out = tmp_path / "small.toml", tmp_path / "out"
    path.write_text(SWEEP.format(fork=fork))
    (fork / "kill").touch()
    clock = chain([1000, 1128, 1192], range(2000, 3000))
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=clock.__next__))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with pytest.raises(sweep.UserError, match=r"fork-3-1: status 3; console\.txt says why"):
            sweep.main([str(path), "--out", str(out)])
    printed = capsys.readouterr().out.replace("\r", "").splitlines()
    assert printed[:4] == [
        "3 runs, of which 3 are missing",
        f"run 1 of 3: {out}/small/default-4-1/console.txt",
        f"run 2 of 3, 3 min 28 s left: {out}/small/muon-2-7/console.txt",
        f"run 3 of 3, 2 min 24 s left: {out}/small/fork-3-1/console.txt",
    ]
    # 4 and 2 steps of 32 tokens, and one of 48
    assert "128/336" in terminal.getvalue() and "240/336" in terminal.getvalue()
    sweep.main([str(path), "--out", str(out)])
    captured = capsys.readouterr()
    assert captured.out.startswith("3 runs, of which 1 are missing\n") and not captured.err
    assert "| 144 tokens | final loss |\n|---|---|\n| fork | 6.500 (1) |" in captured.out
    kept = (tmp_path / "logs/small/fork-3-1.txt").read_text()
    title, kept = kept.split("\n", 1)
    assert title.startswith("# --") and title.endswith("--max-steps 3 --seed 1")
    assert kept == "0 val 9.000000\n1 val 3.000000\n3 val 6.500000\n"
    calls = {}
    for name in ("default-4-1", "muon-2-7", "fork-3-1"):
        lines = (out / "small" / name / "calls.txt").read_text().splitlines()
        calls[name] = [json.loads(line) for line in lines]
    (script, *flags), *others = calls["default-4-1"]
    assert script == str(tmp_path / "original/train_gpt2.py") and not others
    config = read_config(flags)
    assert (config.max_steps, config.warmup_steps, config.warmdown_steps) == (4, 2, 1)
    assert (config.seed, config.shuffle, config.resume) == (1, True, True)
    assert config.log_dir == str(out / "small/default-4-1")
    config = read_config(calls["muon-2-7"][0][1:])
    assert (config.max_steps, config.seed, config.shuffle) == (2, 7, False)
    first, second = calls["fork-3-1"]
    assert first == second and first[0] == str(fork / "train_gpt2.py") and "--resume" in first
    path.write_text(path.read_text().replace("seq_len = 16", "seq_len = 8"))
    with pytest.raises(sweep.UserError, match=r"default-4-1\.txt: kept from other settings"):
        sweep.main([str(path), "--out", str(out)])


def test_runs_without_a_validation_loss_are_named(fork, tmp_path):
    text = SWEEP.format(fork=fork).replace("[common]", "[common]\neval_every = 0")
    (tmp_path / "small.toml").write_text(text)
    with pytest.raises(sweep.UserError, match=r"default-4-1\.txt: no validation loss"):
        sweep.main([str(tmp_path / "small.toml"), "--out", str(tmp_path / "out")])


def test_kept_logs_are_compared_and_drawn(fork, tmp_path, monkeypatch, capsys):
    path, logs = tmp_path / "small.toml", tmp_path / "logs/small"
    runs = {"default": {2: [9.0, 7.0], 4: [6.0, 5.0], 8: [1.0]}}
    runs |= {"muon": {2: [7.0], 4: [5.0, 4.5]}, "third": {4: [5.5]}}
    logs.mkdir(parents=True)
    text = "[common]\ntotal_batch_size = 32\nseq_len = 16\n"
    for name, lengths in runs.items():
        text += f"[recipes.{name}.lengths]\n"
        for steps, losses in lengths.items():
            text += f"{steps} = {list(range(len(losses)))}\n"
            for seed, loss in enumerate(losses):
                curve = f"0 val 10.9\n1 val {loss - 2}\n{steps - 1} val {loss - 1}\n"
                (logs / f"{name}-{steps}-{seed}.txt").write_text(f"{curve}{steps} val {loss}\n")
    path.write_text(text)
    figures = []
    original = Figure.savefig

    def savefig(figure, *args, **options):
        figures.append(figure)
        original(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    sweep.main([str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    rows = capsys.readouterr().out.splitlines()
    title = rows.index("| 128 tokens | final loss | minus default's |")
    assert rows[title + 2 : title + 5] == [
        "| default | 5.500 ± 0.707 (2) | baseline |",
        "| muon | 4.750 ± 0.354 (2) | -0.750 (2), too few to judge; 0.707 (1) of its tokens |",
        "| third | 5.500 (1) | -0.500 (1), too few to judge |",
    ]
    assert "| default | 8.000 ± 1.414 (2) | baseline |" in rows
    # The longest runs of which the baseline has several seeds
    axes = figures[0].axes[0]
    labels = [line.get_label().split(":")[0] for line in axes.lines]
    assert labels == ["default", "muon", "third"]
    for line, mean in zip(axes.lines, (5.5, 4.75, 5.5), strict=True):
        assert line.get_xdata() == pytest.approx([32, 96, 128])  # without step 0
        assert line.get_ydata() == pytest.approx([mean - 2, mean - 1, mean])
    assert [line.get_color() == "black" for line in axes.lines] == [True, False, False]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == pytest.approx((3.5 - 0.5**0.5, 5.5 + 0.5**0.5), 1e-6)
    assert (tmp_path / "small.png").stat().st_size > 10_000


def test_the_example_in_the_docs_is_one(tmp_path):
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    path = tmp_path / "idea.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0])
    recipes, baselines = sweep.read_sweep(path)
    assert recipes.pop("rotary").pop("script") == "fork" and [*recipes] == baselines
    (run, *others) = sweep.runs_of("default", recipes["default"])
    assert f"| {run.tokens:,} tokens |" in page and len(others) == 2


def test_the_table_of_recipes_is_made_from_the_kept_logs(tmp_path, capsys):
    shutil.copytree(ROOT / "bench/recipes", tmp_path, dirs_exist_ok=True)
    sweep.main([str(tmp_path / "length.toml")])
    printed = capsys.readouterr().out
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    for name in ("default", "wsd-1.8e-3", "muon-6e-3"):
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        for loss in row.split(" | "):
            assert f"| {name} | {loss} (" in printed
    muon = ["0.241 ± 0.016 (3)", "0.228 ± 0.044 (2)", "0.226 (1)"]  # of default's tokens
    muon += ["0.433 ± 0.019 (3)", "0.432 ± 0.013 (2)", "0.430 (1)"]  # of wsd-1.8e-3's
    for share in muon:
        assert f"; {share} of its tokens" in printed


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "a fork",
            "nowhere",
            r"recipe fork: script \S+/nowhere: needs a train_gpt2\.py and its su",
        ),
        ("a fork", "original/support", r"fork: script \S+/support: needs a train_gpt2\.py and"),
        ("z_loss = 0.5", "", r"/a fork/train_gpt2\.py: does not take these settings: --preset"),
        ('"3" = [1]', '"x" = [1]', "recipe fork: needs lengths"),
        ('"3" = [1]', '"3" = []', "recipe fork: needs lengths"),
        ('"3" = [1]', '"3" = 1', "recipe fork: needs lengths"),
        ('{ "3" = [1] }', "[3]", "recipe fork: needs lengths"),
        ('{ "3" = [1] }', "{}", "recipe fork: needs lengths"),
        ("[common]", 'baselines = ["x"]', "baselines among these names"),
        ("[common]", "[common", "not TOML"),
    ],
)
def test_mistakes_show_before_any_run(old, new, message, fork, tmp_path):
    (tmp_path / "small.toml").write_text(SWEEP.format(fork=fork).replace(old, new))
    with pytest.raises(sweep.UserError, match=message):
        sweep.main([str(tmp_path / "small.toml"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_differences_are_paired_by_seed():
    losses = {("a", 100): {1: 6.0, 2: 7.0, 4: 1.0}, ("b", 100): {2: 6.5, 1: 6.25, 3: 9.0}}
    losses |= {("c", 100): {7: 1.0}}
    assert sweep.comparison(losses, "a", "b", 100) == "0.125 (2), too few to judge"
    assert sweep.comparison(losses, "a", "c", 100) == "no common seed"


def test_intervals_are_students():
    """From tables of t: 4.303, 2.447, 2.262 and 2.086 for 2, 6, 9 and 20 degrees of freedom."""
    for n, t in ((3, 4.303), (7, 2.447), (10, 2.262), (21, 2.086)):
        assert sweep.half_width(n) * n**0.5 == pytest.approx(t, rel=1e-3)
    assert sweep.difference([-1.1, -1.0, -0.9]) == "-1.000 ± 0.248 (3), p < 0.05"
    # 2.571 / sqrt(6) > 1 > 2.447 / sqrt(7)
    assert sweep.difference([0, 1, 2]) == "1.000 ± 2.484 (3), p < 0.05 needs 7 seeds"
    assert sweep.difference([0, -1, -2]) == "-1.000 ± 2.484 (3), p < 0.05 needs 7 seeds"
    assert sweep.difference([-1, 0, 1]).endswith("(3), p < 0.05 needs over 100 seeds")


def test_tokens_to_the_same_loss():
    a = {1600: {1: 2.0}, 400: {1: 3.0, 2: 4.0}, 100: {1: 6.0, 2: 7.0}}
    b = {400: {1: 4.5, 2: 7.0, 3: 1.0}, 1600: {1: 2.5, 2: 1.0}}
    losses = {("a", n): cell for n, cell in a.items()} | {("b", n): cell for n, cell in b.items()}
    assert sweep.shares(losses, "a", "b", 400) == pytest.approx([0.5, 0.25])
    assert sweep.shares(losses, "a", "b", 1600) == pytest.approx([0.5])
    assert sweep.shares(losses, "b", "a", 400) == pytest.approx([2 * 2**0.5, 2])


def test_trackers_get_every_stream_until_they_fail(text, tmp_path, monkeypatch, capfd):
    sent, started, scalars = [], [], []

    def init(**settings):
        started.append(settings)
        return SimpleNamespace(log=lambda values, step: sent.append((step, values)))

    def add_scalar(stream, value, step):
        if step == 3:
            raise OSError("no space left")
        scalars.append((stream, value, step))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = SimpleNamespace(SummaryWriter=lambda *_, **__: SimpleNamespace(add_scalar=add_scalar))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    args = ["--wandb --tensorboard --save-every 1 --eval-every 2 --data", text]
    args += ["--log-dir", tmp_path, "--max-steps"]
    train(*args, 2)
    train(*args, 3, "--resume")
    assert [settings["id"] for settings in started] == [started[0]["id"]] * 2
    assert started[1]["resume"] == "allow"
    assert [step for step, values in sent if "train" in values] == [0, 1, 2]
    expected = [(stream, value, step) for step, values in sent for stream, value in values.items()]
    assert scalars == [entry for entry in expected if entry[2] < 3] != expected
    assert capfd.readouterr().err.count("--tensorboard: nothing more is sent (no space left)") == 1
    assert {"val", "train", "lr", "norm", "ms"} <= {entry[0] for entry in expected}

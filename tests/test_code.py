"""A run keeps its code and says what has changed; --code names the script of a model."""

import importlib
import os
import subprocess
import sys
import tempfile
from unittest import mock

import pytest

import sample
import train_gpt2
from support.errors_and_signals import UserError
from support.scripts import changes_since, write_code  # which conftest.py replaces
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, import_file, losses, starts, tiny, train


@pytest.fixture(autouse=True)
def undrawn():
    with mock.patch("support.plots.save_curves"):
        yield


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """train_x.py, a copy of train_gpt2.py with another activation, as a module."""
    path = tmp_path / "train_x.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    gelu = 'F.gelu(self.c_fc(x), approximate="tanh")'
    assert gelu in source
    path.write_text(source.replace(gelu, "F.relu(self.c_fc(x)).square()"), encoding="utf-8")
    return import_file(path, monkeypatch)


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Runs record and keep their code, also that in tmp_path."""
    monkeypatch.setattr("support.scripts.write_code", write_code)
    monkeypatch.setattr("support.scripts.changes_since", changes_since)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changes within a second
    monkeypatch.syspath_prepend(tmp_path)


def test_a_fork_samples_by_its_own_script_only(recorded, fork, text, tmp_path, capsys):
    log = tmp_path / "log"
    args = ["--save-every 1 --data", text, "--log-dir", log, "--max-steps"]
    fork.main(tiny(*args, 1))
    fork.main(tiny(*args, 2, "--resume"))
    assert len(losses(log)) == 2 and "note: the code" not in capsys.readouterr().err
    assert [entry["script"] for entry in starts(log)] == ["train_x.py"] * 2
    words = [str(log), "ROMEO:", "--max-new-tokens", "1", "--device", "cpu"]
    copies = [log / "code" / "train_x.py", log / "step_000002" / "train_x.py"]
    for copy in copies:
        assert copy.read_bytes() == (tmp_path / "train_x.py").read_bytes()
    with pytest.raises(UserError, match=str(copies[-1])) as refused:
        sample.main(words)
    assert "--code" in str(refused.value)
    for copy in [tmp_path / "train_x.py", *copies]:
        capsys.readouterr()
        sample.main([*words, "--code", str(copy)])
        assert capsys.readouterr().out.startswith("ROMEO:")


def note_of(capsys):
    """What the note about the code says, or ""."""
    begin = "note: the code has changed since the last start: "
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(begin)]
    assert len(lines) <= 1, lines
    return lines[0].removeprefix(begin) if lines else ""


def test_a_run_keeps_its_code_and_says_what_has_changed(
    recorded, text, tmp_path, monkeypatch, capsys
):
    """A module beside a script belongs to it. The newest start's code is kept."""
    path, helper, kept = tmp_path / "train_z.py", tmp_path / "my_window.py", tmp_path / "log/code"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    with_helper = source.replace("import hellaswag\n", "import hellaswag\nimport my_window\n")
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log", "--resume --max-steps"]

    def start(steps, source, window):
        path.write_text(source, encoding="utf-8")
        helper.unlink(missing_ok=True)
        if window:
            helper.write_text(f"WINDOW = {window}\n")
        monkeypatch.delitem(sys.modules, "my_window", raising=False)
        importlib.invalidate_caches()
        import_file(path, monkeypatch).main(tiny(*args, steps))
        for name in ("train_gpt2.py", "sample.py", "support/muon.py", "support/gpt2/vocab.json"):
            assert (kept / name).read_bytes() == (ROOT / name).read_bytes()
        assert (kept / "train_z.py").read_text(encoding="utf-8") == source
        assert (kept / "my_window.py").exists() == bool(window)
        assert not window or (kept / "my_window.py").read_bytes() == helper.read_bytes()
        return note_of(capsys)

    assert start(1, with_helper, 16) == ""
    (kept / "mine.txt").write_text("a user's own")
    assert start(2, with_helper, 16) == ""
    assert start(3, with_helper, 2) == "changed: my_window.py"
    assert start(4, source, None) == "changed: train_z.py; gone: my_window.py"
    assert start(5, with_helper, 2) == "changed: train_z.py; new: my_window.py"
    assert (kept / "mine.txt").read_text() == "a user's own"


def test_a_checkpoint_adds_what_was_imported_later_and_overwrites_nothing(
    recorded, text, tmp_path, monkeypatch, at_step
):
    """A file that is edited during a run is not what the run has imported."""
    early, late = tmp_path / "my_early.py", tmp_path / "my_late.py"
    early.write_text("x = 1\n")
    late.write_text("y = 1\n")
    import_file(early, monkeypatch)

    def act():
        early.write_text("x = 22\n")
        import_file(late, monkeypatch)

    at_step(1, act)
    log = tmp_path / "log"
    train("--max-steps 2 --save-every 1 --data", text, "--log-dir", log)
    assert (log / "code/my_early.py").read_text() == "x = 1\n"
    assert (log / "code/my_late.py").read_text() == "y = 1\n"


PATCH = """
import support.devices, support.plots, train_gpt2

# It takes a second.
support.devices.matmul_flops = lambda device, *dtypes, n=0: [1e12 for _ in dtypes]
support.plots.save_curves = lambda *args: None
if __name__ == "__main__":
    train_gpt2.run_and_exit(train_gpt2.main)
"""


def test_a_module_that_is_gone_gets_a_note(recorded, text, tmp_path, monkeypatch, capsys):
    """patch.py imports train_gpt2, changes it, and starts it."""
    path, log = tmp_path / "patch.py", tmp_path / "log"
    path.write_text(PATCH)
    args = ["--save-every 1 --data", text, "--log-dir", log, "--resume --max-steps"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "other")}
    (tmp_path / "other").mkdir()
    for steps in (1, 2):
        command = [sys.executable, str(path), *tiny(*args, steps)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "note: the code" not in done.stderr, done
    assert (log / "code/patch.py").read_text() == PATCH
    path.unlink()
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train_gpt2.py")])
    train(*args, 3)
    assert note_of(capsys).endswith("gone: patch.py")
    assert not (log / "code/patch.py").exists() and len(losses(log)) == 3


@pytest.mark.parametrize("name", ["missing.py", "log.txt"])
def test_a_file_that_is_no_script_is_one_line(name, tmp_path):
    (tmp_path / "log.txt").touch()
    with pytest.raises(UserError, match=f"--code .*{name}"):
        sample.main(["gpt2", "a", "--device", "cpu", "--code", str(tmp_path / name)])


def test_given_weights_have_their_own_shape(text, tmp_path):
    """A default or a preset's value is no contradiction, a flag is one."""
    weights = tmp_path / "weights"
    model = train_gpt2.GPT(train_gpt2.GPTConfig(16, 50257, 3, 4, 8))
    model.save_pretrained(weights, get_tokenizer())
    args = ["--data", text, "--init", weights, "--save-every 2 --log-dir", tmp_path / "log"]
    train(*args, "--max-steps 2 --n-layer 3")
    train(*args, "--max-steps 3 --resume")
    trained = train_gpt2.GPT.from_pretrained(tmp_path / "log").config
    assert (trained.n_layer, trained.n_head, trained.n_embd) == (3, 4, 8)
    for flag in ("--n-layer 6", "--n-head 2"):
        for more in ("--resume", f"--log-dir {tmp_path}/other"):
            with pytest.raises(UserError, match=flag.split()[0]):
                train(*args, "--max-steps 4", flag, more)
    assert not (tmp_path / "other").exists() and len(losses(tmp_path / "log")) == 3

"""log/code/ holds the program of a run, and --code names the script of a model."""

import sys
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
def kept(monkeypatch):
    """Runs keep their code, also from the folder of a test, which is that of temporary files."""
    monkeypatch.setattr("support.scripts.write_code", write_code)
    monkeypatch.setattr("support.scripts.changes_since", changes_since)
    monkeypatch.setattr("tempfile.tempdir", "/elsewhere")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changes within a second


def test_a_fork_is_sampled_by_its_own_script_only(text, tmp_path, monkeypatch, capsys, kept):
    path = tmp_path / "train_x.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    path.write_text(source.replace("nn.LayerNorm(", "nn.RMSNorm("), encoding="utf-8")
    fork = import_file(path, monkeypatch)
    log = tmp_path / "log"
    args = ["--save-every 1 --data", text, "--log-dir", log, "--max-steps"]
    fork.main(tiny(*args, 1))
    fork.main(tiny(*args, 2, "--resume"))
    assert len(losses(log)) == 2
    assert [entry["script"] for entry in starts(log)] == ["train_x.py"] * 2
    with pytest.raises(UserError, match="do not fit"):
        train(*args, 3, "--resume")
    words = [str(log), "ROMEO:", "--max-new-tokens", "1", "--device", "cpu"]
    copies = [path, log / "code" / "train_x.py", log / "step_000002" / "train_x.py"]
    with pytest.raises(UserError, match=str(copies[-1])) as refused:
        sample.main(words)
    assert "--code" in str(refused.value)
    for copy in copies:
        capsys.readouterr()
        sample.main([*words, "--code", str(copy)])
        assert capsys.readouterr().out.startswith("ROMEO:")


def test_a_run_keeps_its_code_and_says_what_has_changed(text, tmp_path, monkeypatch, capsys, kept):
    path, helper = tmp_path / "train_z.py", tmp_path / "my_window.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    imports = source.replace("import hellaswag\n", "import hellaswag\nimport my_window\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "log/code"
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log", "--resume --max-steps"]

    def start(steps, source):
        path.write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, "my_window", raising=False)
        capsys.readouterr()
        import_file(path, monkeypatch).main(tiny(*args, steps))
        assert (code / "train_z.py").read_bytes() == path.read_bytes()
        return [line for line in capsys.readouterr().err.splitlines() if "the code" in line]

    helper.write_text("WINDOW = 16\n")
    (tmp_path / "unrelated.py").touch()
    assert start(1, imports) == []
    for name in ("train_gpt2.py", "sample.py", "support/muon.py", "support/gpt2/vocab.json"):
        assert (code / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (code / "unrelated.py").exists()
    (code / "mine.txt").write_text("a user's own")
    assert start(2, imports) == [] and (code / "mine.txt").exists()
    helper.write_text("WINDOW = 2\n")
    (line,) = start(3, imports)
    assert "changed: my_window.py" in line and "train_z.py" not in line
    (tmp_path / "my_other.py").touch()
    (line,) = start(4, imports.replace("import my_window\n", "import my_other\nimport my_window\n"))
    assert "changed: train_z.py" in line and "new: my_other.py" in line
    helper.unlink()
    (line,) = start(5, source)
    assert "gone: my_window.py" in line and not (code / "my_window.py").exists()


def test_a_run_that_another_file_goes_on_says_so(text, tmp_path, monkeypatch, capsys, kept):
    """A patch that imports train_gpt2.py leaves its files as they are."""
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log", "--resume --max-steps"]
    monkeypatch.setattr(sys, "argv", ["patch.py"])
    train(*args, 1)
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py"])
    capsys.readouterr()
    train(*args, 2)
    assert "started by train_gpt2.py, no longer by patch.py" in capsys.readouterr().err


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

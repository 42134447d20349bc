"""A run belongs to the script that began it, and --code names the script of a model."""

import shutil
import sys
from unittest import mock

import pytest

import sample
import train_gpt2
from support import scripts
from support.errors_and_signals import UserError
from support.scripts import loaded_code, write_program  # which conftest.py replaces
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, import_file, losses, starts, tiny, train, words


@pytest.fixture(autouse=True)
def undrawn():
    with mock.patch("support.plots.save_curves"):
        yield


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """train_x.py, a copy of train_gpt2.py with other norms, as a module."""
    path = tmp_path / "train_x.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    path.write_text(source.replace("nn.LayerNorm(", "nn.RMSNorm("), encoding="utf-8")
    return import_file(path, monkeypatch)


def test_a_fork_resumes_and_samples_by_its_own_script_only(fork, text, tmp_path, capsys):
    log = tmp_path / "log"
    args = ["--save-every 1 --data", text, "--log-dir", log, "--max-steps"]
    fork.main(tiny(*args, 1))
    fork.main(tiny(*args, 2, "--resume"))
    assert len(losses(log)) == 2
    assert [entry["script"] for entry in starts(log)] == ["train_x.py"] * 2
    with pytest.raises(UserError, match=r"train_x\.py"):
        train(*args, 3, "--resume")
    words = [str(log), "ROMEO:", "--max-new-tokens", "1", "--device", "cpu"]
    copies = [tmp_path / "train_x.py", log / "train_x.py", log / "step_000002" / "train_x.py"]
    with pytest.raises(UserError, match=str(copies[-1])) as refused:
        sample.main(words)
    assert "--code" in str(refused.value)
    for copy in copies:
        capsys.readouterr()
        sample.main([*words, "--code", str(copy)])
        output = capsys.readouterr()
        assert output.out.startswith("ROMEO:") and "has changed" not in output.err


@pytest.fixture
def recorded(monkeypatch):
    """Runs record and keep their code."""
    monkeypatch.setattr("support.scripts.loaded_code", loaded_code)
    monkeypatch.setattr("support.scripts.write_program", write_program)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changes within a second


def start_anew():
    """What a new process does."""
    loaded_code.cache_clear()
    scripts.read_once.cache_clear()


def test_a_script_resumes_what_has_its_name_or_its_content(
    text, tmp_path, monkeypatch, capsys, recorded
):
    """train_y.py is a copy that only gets a comment. Its model is a GPT-2, from which any script
    may start another run."""
    script = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    log, path = tmp_path / "log", tmp_path / "train_y.py"
    args = ["--save-every 1 --data", text, "--log-dir"]

    def train_y(steps, source):
        path.write_text(source, encoding="utf-8")
        start_anew()
        capsys.readouterr()
        import_file(path, monkeypatch).main(tiny(*args, log, "--resume --max-steps", steps))
        return [line for line in capsys.readouterr().err.splitlines() if "train_y.py" in line]

    def train_y_from_a_copy(source):
        """In a new folder, into which only a checkpoint was copied."""
        path.write_text(source, encoding="utf-8")
        start_anew()
        copied = tmp_path / "copied"
        shutil.copytree(log / "step_000004", copied / "step_000004")
        capsys.readouterr()
        import_file(path, monkeypatch).main(words("--resume --max-steps 5 --log-dir", copied))
        output = capsys.readouterr()
        shutil.rmtree(copied)
        assert "--max-steps: 4 -> 5" in output.out
        return "changed since the last start: train_y.py" in output.err

    assert not train_y(1, script)
    train(*args, log, "--resume --max-steps 2")  # another name, the same content
    assert not train_y(3, script)
    assert len(train_y(4, script + "# mine\n")) == 1, "the same name, another content"
    with pytest.raises(UserError, match=r"train_y\.py"):
        train(*args, log, "--resume --max-steps 5")  # another name and another content
    assert len(losses(log)) == 4
    assert not train_y_from_a_copy(script + "# mine\n") and train_y_from_a_copy(script)
    train(*args, tmp_path / "other", "--max-steps 1 --init", log)


def test_a_run_keeps_its_code_and_says_what_has_changed(
    text, tmp_path, monkeypatch, capsys, recorded
):
    """A module beside a script belongs to it. What was edited while the data were read does not."""
    path, helper = tmp_path / "train_z.py", tmp_path / "my_window.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    path.write_text(source.replace("import hellaswag\n", "import hellaswag\nimport my_window\n"))
    monkeypatch.syspath_prepend(tmp_path)
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log", "--resume --max-steps"]

    def start(steps, window):
        helper.write_text(f"WINDOW = {window}\n")
        monkeypatch.delitem(sys.modules, "my_window", raising=False)
        start_anew()
        capsys.readouterr()
        open_split = train_gpt2.open_split

        def edit_and_open(*args):
            helper.write_text("edited\n")
            return open_split(*args)

        script = import_file(path, monkeypatch)
        monkeypatch.setattr(script, "open_split", edit_and_open)
        script.main(tiny(*args, steps))
        kept = tmp_path / "log/code"
        assert (kept / "my_window.py").read_text() == f"WINDOW = {window}\n"
        for name in ("train_gpt2.py", "sample.py", "support/muon.py", "support/gpt2/vocab.json"):
            assert (kept / name).read_bytes() == (ROOT / name).read_bytes()
        assert (kept / "train_z.py").read_bytes() == path.read_bytes()
        return [line for line in capsys.readouterr().err.splitlines() if "changed" in line]

    assert start(1, 16) == []
    (tmp_path / "log/code/mine.txt").write_text("a user's own")
    assert start(2, 16) == [] and (tmp_path / "log/code/mine.txt").exists()
    (line,) = start(3, 2)
    assert "my_window.py" in line and "train_z.py" not in line


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

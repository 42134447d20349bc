"""Which file a run keeps, and whose code a trained model is computed with."""

import hashlib
import json

import pytest

import hellaswag
import sample
import train_gpt2
from support.errors_and_signals import UserError
from tests.conftest import ROOT, import_file, losses, train


@pytest.fixture
def log(text, tmp_path):
    log = tmp_path / "log"
    train("--max-steps 1 --save-every 1 --data", text, "--log-dir", log)
    return log


def test_code_in_a_log_folder_is_never_run_by_itself(log, capsys):
    """A folder from elsewhere may hold any code, and record its name and checksum."""
    trap = log / "trap.py"
    trap.write_text("raise SystemError('it ran')")
    entries = json.loads((log / "run.json").read_text())
    sha256 = hashlib.sha256(trap.read_bytes()).hexdigest()
    for name in ("trap.py", str(trap), f"../{log.name}/trap.py"):
        entries[-1] |= {"script": name, "script_sha256": sha256}
        (log / "run.json").write_text(json.dumps(entries))
        sample.main([str(log), "a", "--max-new-tokens", "1", "--device", "cpu"])
        assert capsys.readouterr().out.startswith("a")
    with pytest.raises(SystemError, match="it ran"):
        sample.main([str(log), "a", "--device", "cpu", "--code", str(trap)])


FORK = """
import torch
from train_gpt2 import GPT as GPT2

class GPT(GPT2):
    def forward(self, idx, targets=None, at=None):
        return torch.tanh(super().forward(idx, targets, at))
"""


def test_a_fork_that_has_changed_since_is_refused_and_its_copy_is_named(
    text, tmp_path, monkeypatch, capsys
):
    fork = tmp_path / "my_fork.py"
    fork.write_text(FORK)
    module = import_file(fork, monkeypatch)
    log = tmp_path / "log"
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2, "GPT", module.GPT)
        train("--max-steps 1 --save-every 1 --data", text, "--log-dir", log)
    args = [str(log), "a", "--max-new-tokens", "1", "--device", "cpu"]
    kept = log / "step_000001/my_fork.py"
    with pytest.raises(UserError, match=f"my_fork.py, which has changed.*--code {kept}"):
        sample.main(args)
    for file in (fork, kept):
        capsys.readouterr()
        sample.main([*args, "--code", str(file)])
        assert capsys.readouterr().out.startswith("a")


@pytest.mark.parametrize("script", [sample, hellaswag])
def test_a_file_that_is_no_code_of_a_model_is_one_line(script, log, tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    tasks = ["--data", str(ROOT / "tests/hellaswag_sample.jsonl")]
    args = [str(log), "a"] if script is sample else ["-m", str(log), *tasks]
    for file in (empty, tmp_path / "missing.py", log / "log.txt"):
        with pytest.raises(UserError, match=f"--code {file}"):
            script.main([*args, "--device", "cpu", "--code", str(file)])


def test_given_weights_have_their_own_shape(text, tmp_path):
    """A default is no contradiction, a flag is one. run.json has what was trained."""
    weights = tmp_path / "weights"
    train_gpt2.GPT(train_gpt2.GPTConfig(16, 50257, 3, 4, 8)).save_pretrained(weights)
    args = ["--data", text, "--init", weights, "--save-every 2 --log-dir", tmp_path / "log"]
    train(*args, "--max-steps 2")
    train(*args, "--max-steps 3 --resume --n-layer 3")
    for entry in json.loads((tmp_path / "log/run.json").read_text()):
        shape = {name: entry["config"][name] for name in ("n_layer", "n_head", "n_embd")}
        assert shape == {"n_layer": 3, "n_head": 4, "n_embd": 8}
    assert len(losses(tmp_path / "log")) == 3
    for flag in ("--n-layer=6", "--n_head=2"):  # tyro takes both spellings
        for more in ("--resume", f"--log-dir {tmp_path}/other"):
            with pytest.raises(UserError, match=flag.replace("_", "-").replace("=", r"\b.*")):
                train(*args, "--max-steps 4", flag, more)
    assert not (tmp_path / "other").exists() and len(losses(tmp_path / "log")) == 3


def test_weights_in_the_folder_that_would_be_renamed_are_refused(log, text):
    """After a restart they would be missing, or other weights of the same name be there."""
    before = sorted(log.parent.rglob("*"))
    with pytest.raises(UserError, match=r"--init .*step_000001.*--log-dir"):
        train("--init", log / "step_000001", "--data", text, "--log-dir", log)
    assert sorted(log.parent.rglob("*")) == before

"""A run belongs to the script that began it, and --code names the script of a model."""

import json

import pytest

import sample
import train_gpt2
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, import_file, losses, starts, tiny, train


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
    assert (
        len(losses(log)) == 2 and [entry["script"] for entry in starts(log)] == ["train_x.py"] * 2
    )
    with pytest.raises(UserError, match=r"train_x\.py"):
        train(*args, 3, "--resume")
    words = [str(log), "ROMEO:", "--max-new-tokens", "1", "--device", "cpu"]
    with pytest.raises(UserError, match=r"--code train_x\.py"):
        sample.main(words)
    for copy in (tmp_path / "train_x.py", log / "train_x.py", log / "step_000002" / "train_x.py"):
        capsys.readouterr()
        sample.main([*words, "--code", str(copy)])
        output = capsys.readouterr()
        assert output.out.startswith("ROMEO:") and not output.err


def test_a_gpt2_of_another_script_is_no_run_to_resume_but_weights_to_start_from(
    text, tmp_path, monkeypatch
):
    path = tmp_path / "train_y.py"
    path.write_text((ROOT / "train_gpt2.py").read_text(encoding="utf-8"), encoding="utf-8")
    args = ["--save-every 1 --max-steps 1 --data", text, "--log-dir"]
    import_file(path, monkeypatch).main(tiny(*args, tmp_path / "log"))
    with pytest.raises(UserError, match=r"train_y\.py"):
        train(*args, tmp_path / "log", "--resume")
    train(*args, tmp_path / "other", "--init", tmp_path / "log")


def test_a_script_with_other_optimizers_does_not_resume(text, tmp_path, monkeypatch):
    args = ["--save-every 1 --data", text, "--log-dir", tmp_path / "log", "--max-steps"]
    train(*args, 1)
    other = train_gpt2.configure_optimizers

    def reversed_groups(*args):
        (adamw,) = other(*args)
        adamw.param_groups.reverse()
        return [adamw]

    monkeypatch.setattr(train_gpt2, "configure_optimizers", reversed_groups)
    with pytest.raises(UserError, match="optimizers"):
        train(*args, 2, "--resume")


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
    train(*args, "--max-steps 2")
    train(*args, "--max-steps 3 --resume --n-layer 3")
    for entry in json.loads((tmp_path / "log/run.json").read_text()):
        shape = {name: entry["config"][name] for name in ("n_layer", "n_head", "n_embd")}
        assert shape == {"n_layer": 3, "n_head": 4, "n_embd": 8}
    for flag in ("--n-layer 6", "--n-head 2"):
        for more in ("--resume", f"--log-dir {tmp_path}/other"):
            with pytest.raises(UserError, match=flag.split()[0]):
                train(*args, "--max-steps 4", flag, more)
    assert not (tmp_path / "other").exists() and len(losses(tmp_path / "log")) == 3

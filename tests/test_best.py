"""The checkpoint with the lowest validation loss: kept, and named at the end of a run."""

import train_gpt2
from support.files import list_checkpoints, step_of
from tests.conftest import start_ranks, train

KILLED = """
import os, signal, train_gpt2
losses = iter([9.0, 8.0, 4.0, 7.0])
train_gpt2.validation_loss = lambda *args: next(losses, None) or os.kill(os.getpid(), signal.SIGKILL)
"""

def test_the_best_checkpoint_outlives_deletion_and_a_kill_and_is_named_at_the_end(
    text, tmp_path, monkeypatch, capsys
):
    log_dir = tmp_path / "log"
    args = ["--data", text, "--save-every", 1, "--eval-every", 1, "--keep-checkpoints", 1, "--max-steps", 5]
    args += ["--log-dir", log_dir, "--resume"]
    codes, _ = start_ranks(1, tmp_path, *args, disturbance=KILLED)
    assert codes == [-9] and kept(log_dir) == [2, 3]

    def resume(losses, *more):
        losses = iter(losses)
        monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: next(losses))
        assert train(*args, *more) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("best: ")]

    assert resume([7.0, 6.0, 5.0]) == [  # step 3 is evaluated again
        f"best: {log_dir}/step_000002/, validation loss 4.0000, and it rose later: train for fewer steps, or "
        "on more text"]
    assert kept(log_dir) == [2, 5]
    assert resume([5.0, 4.0], "--max-steps", 6) == [] and kept(log_dir) == [6]  # as good as step 2: the last

def kept(log_dir):
    return [step_of(path) for path in list_checkpoints(log_dir)]

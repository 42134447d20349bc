"""TensorBoard and Weights & Biases, with stand-ins for both: neither is installed."""

import sys
from types import SimpleNamespace

from tests.conftest import train


def test_trackers_get_every_stream_until_they_fail(text, tmp_path, monkeypatch, capfd):
    sent, started, scalars = [], [], []

    def init(**settings):
        started.append(settings)
        return SimpleNamespace(log=lambda values, step: sent.append((step, values)))

    def add_scalar(stream, value, step):
        if step == 3:
            raise OSError("no space left")
        scalars.append((stream, value, step))

    wandb = SimpleNamespace(init=init, util=SimpleNamespace(generate_id=lambda: f"{len(started)}"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    board = SimpleNamespace(SummaryWriter=lambda *_, **__: SimpleNamespace(add_scalar=add_scalar))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    args = ["--wandb --tensorboard --save-every 1 --eval-every 2 --data", text]
    args += ["--log-dir", tmp_path / "log", "--max-steps"]
    train(*args, 2)
    train(*args, 3, "--resume")
    assert [settings["id"] for settings in started] == ["0", "0"]  # one run
    assert started[1]["resume"] == "allow"
    expected = [(stream, value, step) for step, values in sent for stream, value in values.items()]
    assert scalars == [entry for entry in expected if entry[2] < 3] != expected
    assert capfd.readouterr().err.count("--tensorboard: nothing more is sent") == 1
    assert {"val", "train", "lr", "norm", "ms"} <= {entry[0] for entry in expected}

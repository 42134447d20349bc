"""Small runs that finish in a second or two, and readers of what they leave."""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "data"
posix = pytest.mark.skipif(os.name == "nt", reason="Windows neither forks nor has these signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="about Linux's /proc")
TINY = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--seq-len", "16", "--total-batch-size", "128",
        "--micro-batch-size", "2", "--warmup-steps", "2", "--eval-tokens", "512", "--device", "cpu", "--no-compile",
        "--preset", "shakespeare", "--dtype", "float32", "--save-every", "0", "--sample-every", "0", "--eval-every",
        "0", "--optimizer", "adamw", "--schedule", "cosine", "--max-lr", "5e-3", "--min-lr", "5e-4", "--beta2", "0.95"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests themselves run side by side
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach the hub; those of hub code bring a server of their own
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


@pytest.fixture(autouse=True)
def other_cpu(monkeypatch):
    """CPU_BFLOAT16=yes python -m pytest: as on a CPU that computes in bfloat16; =no: as on one that does not."""
    if (forced := os.environ.get("CPU_BFLOAT16")) in ("yes", "no"):
        from support import devices

        monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: forced == "yes")
        monkeypatch.setattr(devices, "matmul_flops", lambda *args: 1e10)  # emulated, it would take a minute


@pytest.fixture
def text(tmp_path):
    """A text of about 3,000 tokens."""
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:10_000], encoding="utf-8")
    return path


def script(name: str, *args: str, processes: int = 1, **options) -> subprocess.CompletedProcess:
    """Runs a script as a user would; under torchrun when there is more than one process."""
    if processes > 1 and os.name == "nt":
        pytest.skip("torchrun on Windows needs another store")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(ROOT / name), *map(str, args)]
    env = os.environ | options.pop("env", {})
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, **options)


def be_a_rank(
    env: dict[str, str], folder: Path, output: Path, args: list[str], gpus: int, bfloat16: bool, disturbance: str
) -> None:
    import torch

    import train_gpt2
    from support import devices
    from support.cli import run

    os.environ.update(env)
    os.chdir(folder)
    if gpus:
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: gpus
        torch.cuda.set_device = lambda device: None
        torch.cuda.get_device_name, torch.cuda.get_device_capability = lambda device: "made up", lambda device: (9, 0)
    if bfloat16:
        devices.cpu_has_bfloat16 = lambda: True
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    exec(disturbance, {})
    run(lambda: train_gpt2.main(args))


def start_ranks(
    world_size: int, folder: Path, *args: object, folders: list[Path] | None = None, gpus: int = 0,
    bfloat16_on: Sequence[int] = (), disturbance: str = "",
) -> tuple[list[int], list[str]]:
    """train_gpt2.py on several ranks, without torchrun: forked off a process that has imported torch, once for all.

    folders: where each is started. gpus: how many each believes to have. bfloat16_on: ranks that believe that their CPU
    computes in bfloat16. disturbance: code for each to run first. Returns exit statuses and outputs.
    """
    if os.name == "nt":
        pytest.skip("Windows does not fork")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["train_gpt2", "torch._dynamo"])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outputs = [folder / f"rank_{rank}.txt" for rank in range(world_size)]
    ranks = []
    for rank, output in enumerate(outputs):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost",
               "MASTER_PORT": port}
        env = {key: str(value) for key, value in env.items()}
        where = folders[rank] if folders else Path.cwd()
        ranks.append(forks.Process(target=be_a_rank, args=(env, where, output, [*TINY, *map(str, args)], gpus,
                                                           rank in bfloat16_on, disturbance)))
        ranks[-1].start()
    for rank in ranks:
        rank.join(100)
    return [rank.exitcode for rank in ranks], [output.read_text() for output in outputs]


def train_on_ranks(world_size: int, folder: Path, *args: object, **options: Any) -> list[str]:
    """The same where all must go well. Returns what each printed; AssertionError if one failed."""
    codes, texts = start_ranks(world_size, folder, *args, **options)
    assert codes == [0] * world_size, texts
    return texts


def read_log(log_dir: Path, *streams: str) -> list[str]:
    """The lines of log.txt, of these streams only if any are named."""
    lines = (Path(log_dir) / "log.txt").read_text().splitlines()
    return [line for line in lines if not streams or line.split()[1] in streams]


def losses(log_dir: Path, stream: str = "train") -> list[float]:
    return [float(line.split()[2]) for line in read_log(log_dir, stream)]


def assert_one_error_line(done: subprocess.CompletedProcess, *parts: str) -> None:
    """Exit status 2 and on stderr one line, beginning `error: `, that has all the parts."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    for part in parts:
        assert part in errors[0], (part, errors[0])

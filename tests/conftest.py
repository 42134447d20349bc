"""Runs that take a second or two, and readers of their output files."""

import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
posix = pytest.mark.skipif(os.name == "nt", reason="Windows neither forks nor has these signals")
# The tests themselves run side by side. Before torch is imported, which reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests of Hub code start a local server
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# A process in the background ignores Ctrl-C, and so would those that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if os.name != "nt":  # ranks are forked from a process with these; from Python 3.14 on, all are
    modules = ["tests.preloaded"]
    if sys.version_info >= (3, 14):
        modules.append("tests.test_fineweb")
    multiprocessing.set_forkserver_preload(modules)


def pytest_collection_finish() -> None:
    """Modules stay: the garbage collector doesn't have to go through them each time."""
    gc.freeze()


def words(*args: object) -> list[str]:
    """A command line. A string may hold several words; paths and numbers are one word each."""
    return [word for arg in args for word in (arg.split() if isinstance(arg, str) else [str(arg)])]


SHAPE = words("--n-layer 2 --n-head 2 --n-embd 16")
TINY = words(
    "--preset shakespeare",
    *SHAPE,
    "--seq-len 16 --total-batch-size 128",
    "--micro-batch-size 2 --device cpu --dtype float32 --compile off --optimizer adamw",
    "--schedule cosine --warmup-steps 2 --max-lr 5e-3 --min-lr 5e-4 --beta2 0.95",
    "--eval-tokens 128 --eval-every 0 --sample-every 0 --save-every 0 --sample-prompt ROMEO:",
)
RANK = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1")


@pytest.fixture(autouse=True)
def seeded():
    """Weights that a test draws without a seed are the same each time."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """A test begins as a new process does: no cache has what an earlier test computed.

    The tokenizer alone stays, which never changes and takes a second to load."""
    for name, module in list(sys.modules.items()):
        if name == "train_gpt2" or (name.startswith("support.") and name != "support.tokenizer"):
            for value in list(vars(module).values()):
                getattr(value, "cache_clear", lambda: None)()


CHEAP = {  # what takes a tenth of a second or more in each run, and what stands for it
    "support.devices.matmul_flops": lambda device, *dtypes, n=0: [1e12 for _ in dtypes],
    "support.scripts.write_code": lambda folder, overwrite=True: None,
    "support.scripts.changes_since": lambda folder: "",
    "support.run_files.git_commit": lambda: "0123456789" * 4,
}


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Runs that are started as processes measure the peak, and record their code."""
    for name, stand_in in CHEAP.items():
        monkeypatch.setattr(name, stand_in)


@pytest.fixture
def text(tmp_path):
    """A text of about 3,000 tokens."""
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:10_000], encoding="utf-8")
    return path


@pytest.fixture
def at_step(monkeypatch):
    """at_step(2, act) calls act() in the update of step 2."""
    import train_gpt2

    get_lr, actions = train_gpt2.get_lr, {}

    def acting(step, config):
        actions.pop(step, lambda: None)()
        return get_lr(step, config)

    monkeypatch.setattr(train_gpt2, "get_lr", acting)
    return actions.__setitem__


def tiny(*args: object) -> list[str]:
    """TINY, then `args`. Weights that --init names have their own shape."""
    flags = words(*args)
    start = len(SHAPE) if "--init" in flags else 0
    return [*TINY[:2], *TINY[2 + start :], *flags]


def train(*args: object, curves: bool = False) -> int:
    """Runs train_gpt2.py in this process with TINY, then `args`. curves: draw curves.png."""
    import train_gpt2

    undrawn = mock.patch("support.plots.save_curves")
    with contextlib.nullcontext() if curves else undrawn:
        return train_gpt2.main(tiny(*args))


def script(name: str, *args: object) -> subprocess.CompletedProcess:
    """Runs a script as a user would."""
    command = [sys.executable, str(ROOT / name), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def run_rank(
    env: dict[str, str], cwd: str, output: Path, args: list[str], disturb: Callable[[], None] | None
) -> None:
    import train_gpt2
    from support import plots

    os.environ.update(env)
    os.chdir(cwd)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    plots.save_curves = mock.Mock()
    for name, stand_in in CHEAP.items():
        module, _, function = name.rpartition(".")
        setattr(sys.modules[module], function, stand_in)
    if disturb is not None:
        disturb()
    # What the script ends with, in the module whose functions disturb() may have replaced.
    script = ROOT / "train_gpt2.py"
    _, _, end = script.read_text(encoding="utf-8").rpartition('if __name__ == "__main__":\n')
    sys.argv = [str(script), *args]
    exec(textwrap.dedent(end), vars(train_gpt2))


def start_ranks(
    world_size: int, folder: Path, *args: object, disturb: Callable[[], None] | None = None
) -> tuple[list[int], list[str]]:
    """Runs train_gpt2.py on one or more ranks, as torchrun does. (exit statuses, outputs)

    The ranks are forked from a process that has imported torch. Each first calls disturb(), which
    may replace functions of train_gpt2. When one fails, the others get SIGTERM."""
    if os.name == "nt":
        pytest.skip("Windows does not fork")
    from multiprocessing import forkserver

    forks = multiprocessing.get_context("forkserver")
    with contextlib.chdir(ROOT):  # where it finds what to import
        forkserver.ensure_running()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outputs = [folder / f"rank_{rank}.txt" for rank in range(world_size)]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = []
    for rank, output in enumerate(outputs):
        env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (env, os.getcwd(), output, tiny(*args), disturb)
        ranks.append(forks.Process(target=run_rank, args=arguments))
        ranks[-1].start()
    deadline, stopped = time.monotonic() + 300, False
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
        if not stopped and any(rank.exitcode for rank in ranks):
            stopped = True
            for rank in ranks:
                rank.terminate()
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks], [output.read_text() for output in outputs]


def train_on_ranks(
    world_size: int, folder: Path, *args: object, disturb: Callable[[], None] | None = None
) -> list[str]:
    """The same, but every rank must succeed. Returns their outputs."""
    codes, texts = start_ranks(world_size, folder, *args, disturb=disturb)
    assert codes == [0] * world_size, texts
    return texts


def read_log(log_dir: Path, *streams: str) -> list[str]:
    """The lines of log.txt, or only those of the named streams."""
    lines = (Path(log_dir) / "log.txt").read_text().splitlines()
    return [line for line in lines if not streams or line.split()[1] in streams]


def steps_of(log_dir: Path) -> list[int]:
    """The steps of its checkpoints."""
    return [int(folder.name[5:]) for folder in checkpoints(log_dir)]


def losses(log_dir: Path, stream: str = "train") -> list[float]:
    return [float(line.split()[2]) for line in read_log(log_dir, stream)]


def checkpoints(log_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted(log_dir.glob("step_*"), key=lambda folder: int(folder.name[5:]))


def save_checkpoint(model: object, folder: Path) -> None:
    """Saves a model as a run does, with checksums and GPT-2's tokenizer."""
    from support.checkpoints import write_checkpoint
    from support.tokenizer import get_tokenizer

    def save_model(partial: Path) -> str:
        model.save_pretrained(partial, get_tokenizer())
        return "A model card."

    folder.parent.mkdir(exist_ok=True)
    assert not write_checkpoint(folder, save_model, {"precision": "float32"})


def saved_state(checkpoint: Path) -> dict:
    import torch

    return torch.load(checkpoint / "training_state.pt", weights_only=True)


def starts(log_dir: Path) -> list[dict]:
    """The entries of run.json: one for each start or resume."""
    return json.loads((Path(log_dir) / "run.json").read_text())


def run_script(name: str, *args: object) -> int:
    """Runs a script in this process, as `python NAME ARGS` does. -> exit status"""
    command = [str(ROOT / name), *words(*args)]
    with mock.patch.object(sys, "argv", command), pytest.raises(SystemExit) as end:
        runpy.run_path(command[0], run_name="__main__")
    return end.value.code


def error_line(capsys: pytest.CaptureFixture, name: str, *args: object) -> str:
    """The one line with which a script refuses its input, with exit status 2."""
    capsys.readouterr()
    status, errors = run_script(name, *args), capsys.readouterr().err.splitlines()
    assert status == 2 and len(errors) == 1 and errors[0].startswith("error: "), errors
    return errors[0]


def import_file(path: Path, patch: pytest.MonkeyPatch, name: str | None = None) -> ModuleType:
    """A Python file as a module, until `patch` ends."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def changes_of_the_page() -> dict[str, str]:
    """{title: section} of those of docs/forking.md that change train_gpt2.py."""
    page = (ROOT / "docs" / "forking.md").read_text(encoding="utf-8")
    sections = [section.partition("\n") for section in page.split("\n## ")[1:]]
    return {title: section for title, _, section in sections if "```diff" in section}


def write_fork(path: Path, *names: str) -> Path:
    """train_gpt2.py with changes of docs/forking.md, applied as the page says."""
    if shutil.which("git") is None:
        pytest.skip("docs/forking.md applies its changes by git")
    path.parent.mkdir(exist_ok=True)
    script = Path(shutil.copy(ROOT / "train_gpt2.py", path.parent))
    for name in names:
        command, diff = ["git", "apply", "--verbose"], changes_of_the_page()[name].encode()
        subprocess.run(command, input=diff, cwd=path.parent, check=True)
    return script.rename(path)


def logits_of(model: Callable, idx: object) -> object:
    """The logits (B, T, V) of our GPT, or of one of transformers."""
    output = model(idx)
    return getattr(output, "logits", output)


def numbers(line: str) -> list[float]:
    """The numbers in a line of text, such as 1,024 or 5.00e-04."""
    found = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", line)
    return [float(number.replace(",", "")) for number in found]

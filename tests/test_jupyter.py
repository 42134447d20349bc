"""main() called again and again in a Jupyter kernel, patched, and stopped by the stop button."""

import time

import pytest
from jupyter_client.manager import start_new_kernel

from support.run_files import read_log, run_entries
from tests.conftest import ROOT, TINY, posix

TASKS = ROOT / "tests" / "hellaswag_sample.jsonl"


class Notebook:
    def __init__(self, folder):
        self.manager, self.client = start_new_kernel(cwd=str(folder), extra_arguments=[])

    def start(self, code):
        self.request = self.client.execute(code)

    def end(self):
        """Return what the cell printed, and the name of its error, if any."""
        printed, error = "", None
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != self.request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error

    def wait_for(self, text):
        """Wait until the cell has printed this."""
        while text not in self.client.get_iopub_msg(timeout=120)["content"].get("text", ""):
            pass

    def run(self, code):
        self.start(code)
        printed, error = self.end()
        assert error is None, printed
        return printed


@pytest.fixture
def notebook(tmp_path):
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)


SETUP = """
import sys, torch
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
import hellaswag, train_gpt2
from support import devices, plots
devices.matmul_flops = lambda device, *dtypes, n=0: [1e12 for _ in dtypes]
plots.save_curves = lambda *args: None
def run(log, *more):
    return train_gpt2.main({tiny!r} + ["--data", {text!r}, "--log-dir", log, *more])
"""


@posix
def test_a_kernel_trains_again_and_again(notebook, text, tmp_path):
    notebook.run(SETUP.format(root=str(ROOT), tiny=TINY, text=str(text)))
    short = '"--max-steps", "2", "--save-every", "2"'
    assert "\nsample: " in notebook.run(f'print(run("a", {short}))')

    # What is patched between two calls is noticed, and no command that cannot load it is printed.
    notebook.run(
        "forward = train_gpt2.MLP.forward\n"
        "def relu2(self, x):\n"
        "    return self.c_proj(torch.relu(self.c_fc(x)).square())\n"
        "train_gpt2.MLP.forward = relu2"
    )
    printed = notebook.run(f'print(run("b", {short}))')
    assert "not a GPT-2: " in printed and "\nsample: " not in printed
    assert "gpt2-repro-fork" in (tmp_path / "b/step_000002/config.json").read_text()
    notebook.run("train_gpt2.MLP.forward = forward\ngelu = train_gpt2.F.gelu\n")
    notebook.run("train_gpt2.F.gelu = lambda x, approximate: torch.relu(x).square()")
    assert "not a GPT-2: " in notebook.run(f'print(run("f", {short}))')
    notebook.run("train_gpt2.F.gelu = gelu")
    assert "\na GPT-2: " in notebook.run(f'print(run("c", {short}))')

    # The recorded command is the call's. Sampling in between changes no code.
    (entry,) = run_entries(tmp_path / "c")
    command = " ".join(entry["command"])
    assert command.startswith("train_gpt2.py ") and command.endswith("--max-steps 2 --save-every 2")
    code = str(ROOT / "train_gpt2.py")
    notebook.run(f'import sample; sample.main(["c", "Hi", "--code", {code!r}])')
    assert "code has changed" not in notebook.run('run("c", "--resume", "--max-steps", "2")')

    # The stop button once: the run saves, returns its status, and other cells go on.
    notebook.start('print(run("d", "--max-steps", "100000", "--save-every", "50000"))')
    wait_for_a_step(tmp_path / "d")
    notebook.manager.interrupt_kernel()
    printed, error = notebook.end()
    assert error is None and "stopped by a signal" in printed and printed.endswith("130\n")
    tasks = f'"--data", {str(TASKS)!r}, "--limit", "2", "-d", "cpu"'
    assert "acc_norm" in notebook.run(f'hellaswag.main(["-m", "d", {tasks}])')
    last = max(read_log(tmp_path / "d")["train"][0])
    notebook.run(f'run("d", "--resume", "--max-steps", "{last + 3}", "--save-every", "1")')
    assert max(read_log(tmp_path / "d")["train"][0]) == last + 2

    # Twice: Python's KeyboardInterrupt. The kernel lives, and the next cell can be interrupted.
    slow = "def slow(*args, get_lr=train_gpt2.get_lr):\n    import time\n    time.sleep(5)\n"
    notebook.run(f"{slow}    return get_lr(*args)\ntrain_gpt2.get_lr = slow")
    notebook.start('run("e", "--max-steps", "9", "--save-every", "9")')
    wait_for_a_step(tmp_path / "e", "run.json")
    time.sleep(2)
    notebook.manager.interrupt_kernel()
    time.sleep(0.5)
    notebook.manager.interrupt_kernel()
    assert notebook.end()[1] == "KeyboardInterrupt"
    notebook.start("import time\nprint('asleep')\ntime.sleep(100)")
    notebook.wait_for("asleep")
    notebook.manager.interrupt_kernel()
    assert notebook.end()[1] == "KeyboardInterrupt"
    assert notebook.run("print(6 * 7)") == "42\n"


@posix
def test_an_edited_script_that_is_not_reloaded_is_a_warning(notebook, text, tmp_path):
    fork = tmp_path / "fork.py"
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    fork.write_text(source)
    setup = SETUP.replace("train_gpt2", "fork").format(root=str(ROOT), tiny=TINY, text=str(text))
    notebook.run(setup)
    assert "edited" not in notebook.run('run("a", "--max-steps", "1")')
    fork.write_text(source.replace('F.gelu(self.c_fc(x), approximate="tanh")', "self.c_fc(x)"))
    printed = notebook.run('run("b", "--max-steps", "1")')
    assert "edited" in printed and "\na GPT-2: " in printed
    notebook.run("import importlib; importlib.reload(fork)")
    printed = notebook.run('run("c", "--max-steps", "1")')
    assert "edited" not in printed and "not a GPT-2: " in printed


def wait_for_a_step(log, name="log.txt"):
    limit = time.monotonic() + 60
    while not (log / name).exists() or (log / name).stat().st_size == 0:
        assert time.monotonic() < limit
        time.sleep(0.05)

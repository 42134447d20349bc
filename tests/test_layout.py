"""A whole run can be read in one sitting: few files, top to bottom, no import circle, no side effects."""

import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY

def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

MODULES = {module_name(path): path for path in [*ROOT.glob("*.py"), *ROOT.glob("support/**/*.py")]}
IMPORTS_AND_A_RUN = """
import importlib, os, socket, sys, time
sys.argv = ["x", "--no-such-flag"]
socket.socket.connect = socket.getaddrinfo = lambda *a, **k: sys.exit("network")
import fineweb
assert "torch" not in sys.modules and "datasets" not in sys.modules
for name in [name for name in sys.modules if name.startswith(("fineweb", "support"))]:
    del sys.modules[name]
began = time.perf_counter(); import torch; torch_seconds = time.perf_counter() - began
torch.cuda.init = torch.cuda._lazy_init = lambda: sys.exit("device")
began = time.perf_counter(); import train_gpt2; ours = time.perf_counter() - began
assert not os.listdir() and ours < max(torch_seconds, 1.0), (ours, torch_seconds)
print("RUN")
import numpy as np
os.mkdir("shards")
for split in ("train", "val"):
    np.save(f"shards/x_{{split}}_000000.npy", np.arange(5000, dtype=np.uint16))
for data in ({root!r} + "/input.txt", "shards"):
    assert train_gpt2.main([*{args!r}, "--data", data, "--log-dir", "log"]) == 0
for module in sys.modules.values():
    print("LOADED", getattr(module, "__file__", None))
for name in ("hellaswag", "sample"):
    importlib.import_module(name)
assert not (heavy := {{"transformers", "datasets", "pyarrow", "matplotlib"}} & set(sys.modules)), heavy
"""

def test_imports_have_no_side_effects_and_a_plain_run_loads_few_lines(tmp_path):
    """Nothing is written, fetched, printed or parsed, no device touched; fineweb.py does without torch. Then
    a run on a text and on shards: AdamW, validation loss, samples, a checkpoint, one rank, CPU."""
    args = [*TINY, "--max-steps", "2", "--eval-every", "1", "--sample-every", "1", "--save-every", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    code = IMPORTS_AND_A_RUN.format(root=str(ROOT), args=args)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.startswith("RUN\n"), done.stderr
    loaded = {Path(name) for name in re.findall("^LOADED (/.+)$", done.stdout, flags=re.MULTILINE)}
    ours = [path for path in loaded if path.is_relative_to(ROOT) and "site-packages" not in path.parts]
    lines = {path: n for path in ours if (n := len(path.read_text(encoding="utf-8").splitlines()))}
    assert lines[ROOT / "train_gpt2.py"] <= 1100 and len(lines) <= 5 and sum(lines.values()) <= 1600, lines

def imports_of(path: Path) -> set[str]:
    """The project's modules that a file imports, inside functions, too."""
    found = set()
    pattern, text = r"^ *(?:from|import) (\S+)(?: import (.+))?", path.read_text(encoding="utf-8")
    for module, names in re.findall(pattern, text, re.MULTILINE):
        found |= {module, *(f"{module}.{name}" for name in names.split(", "))}
    return found & MODULES.keys()

def test_no_module_imports_one_that_imports_it():
    graph = {name: imports_of(path) for name, path in MODULES.items()}
    assert {"support.cli", "hellaswag"} <= graph["train_gpt2"]  # the walk finds something
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"support.cli": {"train_gpt2"}}).prepare()
    for name, imported in graph.items():  # what scripts share does not know them, nor their configurations
        if name.startswith("support"):
            assert all(other.startswith("support") for other in imported), (name, imported)

"""A whole run can be read in one sitting: few files, short functions, top to bottom, no import circle."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, TINY

def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

MODULES = {module_name(path): path for path in [*ROOT.glob("*.py"), *ROOT.glob("support/**/*.py")]}
PLAIN_RUN = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
import numpy as np
import train_gpt2

for split in ("train", "val"):
    np.save(f"shards/x_{{split}}_000000.npy", np.arange(5000, dtype=np.uint16))
for data in ({root!r} + "/input.txt", "shards"):
    assert train_gpt2.main([*{args!r}, "--data", data, "--log-dir", Path(data).stem]) == 0
for module in sys.modules.values():
    print("LOADED", getattr(module, "__file__", None))
"""

def test_a_plain_run_loads_few_lines(tmp_path):
    """On a text and on shards: AdamW, validation loss, samples, a checkpoint, one rank, CPU."""
    (tmp_path / "shards").mkdir()
    args = [*TINY, "--max-steps", "2", "--eval-every", "1", "--sample-every", "1", "--save-every", "1"]
    code = PLAIN_RUN.format(root=str(ROOT), args=args)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = {Path(name) for name in re.findall("^LOADED (/.+)$", done.stdout, flags=re.MULTILINE)}
    ours = [path for path in loaded if path.is_relative_to(ROOT) and "site-packages" not in path.parts]
    lines = {path: n for path in ours if (n := len(path.read_text(encoding="utf-8").splitlines()))}
    assert ROOT / "train_gpt2.py" in lines and len(lines) <= 5 and sum(lines.values()) <= 1600, lines

def test_the_training_script_reads_in_one_sitting():
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 1100 and max(map(len, source.splitlines())) <= 110
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.FunctionDef)}
    assert max(lengths.values()) <= 120, max(lengths, key=lengths.get)

def imports_of(path: Path) -> set[str]:
    """The project's modules that a file imports, inside functions, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()

def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle, the first one again at its end; [] if there is none."""
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in finished:
            for imported in sorted(graph[module]):
                if circle := visit(imported, [*path, module]):
                    return circle
            finished.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in graph)), [])

def test_no_module_imports_one_that_imports_it():
    graph = {name: imports_of(path) for name, path in MODULES.items()}
    assert {"support.cli", "hellaswag"} <= graph["train_gpt2"]  # the walk finds something
    assert find_circle(graph) == []
    assert find_circle(graph | {"support.cli": {"train_gpt2"}}) != []
    for name, imported in graph.items():  # what scripts share does not know them, nor their configurations
        if name.startswith("support"):
            assert all(other.startswith("support") for other in imported), (name, imported)
    for path in [*MODULES.values(), *ROOT.glob("reference/*.py"), *ROOT.glob("bench/**/*.py")]:
        assert not re.search(r"config: Any", path.read_text(encoding="utf-8")), path

def test_nothing_is_used_before_it_is_explained():
    """In train_gpt2.py a top-level name is used below its definition only. GPT's two methods for Hugging Face
    folders are exempt: they delegate to functions right below the class."""
    tree = ast.parse((ROOT / "train_gpt2.py").read_text(encoding="utf-8"))
    defined: dict[str, int] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [node.name] if hasattr(node, "name") else [t.id for t in targets if isinstance(t, ast.Name)]
        defined |= dict.fromkeys(names, node.lineno)
    exempt = {"from_pretrained", "save_pretrained"}
    methods = [node for node in ast.walk(tree) if getattr(node, "name", "") in exempt]
    skipped = {node for method in methods for node in ast.walk(method)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in defined and node not in skipped:
            line = f"line {node.lineno} uses {node.id} of line {defined[node.id]}"
            assert node.lineno >= defined[node.id], line

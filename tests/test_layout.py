"""The order of the house: no module imports one that imports it, and the training script reads in one sitting."""

import ast
from pathlib import Path

from tests.conftest import ROOT


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in [*ROOT.glob("*.py"), *ROOT.glob("support/**/*.py")]}


def imports_of(path: Path) -> set[str]:
    """The project's modules that a file imports, anywhere in it: at its head, inside functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle, the first one again at its end; [] when there is none."""
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
    assert "support.cli" in graph["train_gpt2"] and "hellaswag" in graph["train_gpt2"]  # the walk finds something
    assert find_circle(graph) == []
    assert find_circle(graph | {"support.cli": {"bench"}}) != []
    for name, imported in graph.items():  # what scripts share knows nothing of them
        if name.startswith("support"):
            assert all(other.startswith("support") for other in imported), (name, imported)


def test_the_root_is_what_a_user_types():
    scripts = {"train_gpt2.py", "fineweb.py", "hellaswag.py", "sample.py", "bench.py", "sweep.py"}
    assert {path.name for path in ROOT.glob("*.py")} == scripts
    assert not (ROOT / "support" / "__init__.py").read_text()


def test_the_training_script_reads_in_one_sitting():
    source = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 900, "take an option out before splitting the file"
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.FunctionDef)}
    assert max(lengths, key=lengths.get) == "train" and lengths["train"] <= 135, lengths["train"]
    update = source[source.index("# ---- One update") : source.index("# ---- End of the update")].splitlines()
    assert len(update) <= 50 and sum("#" in line for line in update) >= 12
    assert update.count("") == 0


def test_nothing_is_used_before_it_is_explained():
    """At the top level of train_gpt2.py a name defined in the file is used below its definition only."""
    tree = ast.parse((ROOT / "train_gpt2.py").read_text(encoding="utf-8"))
    defined: dict[str, int] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [node.name] if hasattr(node, "name") else [t.id for t in targets if isinstance(t, ast.Name)]
        defined |= dict.fromkeys(names, node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in defined:
            assert node.lineno >= defined[node.id], f"line {node.lineno} uses {node.id} of line {defined[node.id]}"

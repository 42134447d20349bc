"""How the files depend on each other."""

import ast
from graphlib import TopologicalSorter

from tests.conftest import ROOT

FILES = [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]


def imports(source: str) -> set[str]:
    """The modules that are imported, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_module_imports_one_that_imports_it():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    graph = {name: imports(path.read_text("utf-8")) & set(names) for name, path in names.items()}
    order = list(TopologicalSorter(graph).static_order())  # CycleError names a circle
    assert order.index("support.cli") < order.index("train_gpt2")

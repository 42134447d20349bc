"""The code of a run: log/code/ is a copy of the program, taken at the latest start.

Modules are stored under their import names, so that log/code/ is importable. A checkpoint contains
the script that defines its model. Code in a model's folder never runs unless --code names it."""

import functools
import importlib.util
import site
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from support.command_line import warn
from support.errors_and_signals import UserError
from support.files_and_locks import ROOT, atomic_path

if TYPE_CHECKING:
    from train_gpt2 import GPT

SCRIPTS = ("train_gpt2.py", "fineweb.py", "hellaswag.py", "sample.py", "evaluate.py")
SCRIPTS += ("bench.py", "compare.py")
CODE = "--code"  # begins the names of modules loaded by load_gpt_class()


# --------------------------------------------------------------------------------------------------
# The script that defines a model


def script_of(model_class: "type[GPT]") -> Path | None:
    """Return the file that defines a class, or None for a class defined in a notebook."""
    file = getattr(sys.modules.get(model_class.__module__), "__file__", None)
    return Path(file).absolute() if file else None


def path_in_code(model_class: "type[GPT]") -> Path | None:
    """Return the path of the file that defines a class, relative to log/code/, or None."""
    script = script_of(model_class)
    return next((Path(name) for name, path in program().items() if path == script), None)


def script_name(model_class: "type[GPT]") -> str:
    script = script_of(model_class)
    return script.name if script else "a notebook"


@functools.cache
def source_at_first_run(model_class: "type[GPT]", script: Path) -> bytes:
    """Return what the script of a class contained when this was first called."""
    return script.read_bytes()


def warn_if_not_reloaded(model_class: "type[GPT]") -> None:
    """Warn if the script was edited after an earlier run in this process, e.g. in a notebook.

    The run trains the old code, but log/code/ holds the new code."""
    script = script_of(model_class)
    if not script or not script.is_file():
        return
    if source_at_first_run(model_class, script) != script.read_bytes():
        remedy = "to train the edited code, importlib.reload() its module or restart the kernel"
        warn(f"{script} was edited, but this run trains the code as it was; {remedy}")


def load_gpt_class(code: str) -> "type[GPT]":
    """Import the file given by --code, and return its GPT class."""
    path = Path(code)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--code {path}: not a Python file")
    sys.path.append(str(path.absolute().parent))  # where `python FILE` would find its imports
    name = f"{CODE} {path.stem}"  # do not clash with a module that is already imported
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT


# --------------------------------------------------------------------------------------------------
# log/code/


def library_folders() -> list[str]:
    """Return the folders whose modules are not part of the program.

    They include the folder of temporary files, from which torch loads the code it generates."""
    paths = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), tempfile.gettempdir()]
    return paths + [str(Path(prefix) / "lib") for prefix in (sys.prefix, sys.base_prefix)]


def program() -> dict[str, Path]:
    """Return {path in log/code/: file} of everything the program consists of.

    That is the project's scripts and support/, the file that was started, and every imported module
    outside library_folders()."""
    files = [ROOT / name for name in SCRIPTS]
    files += [path for path in (ROOT / "support").rglob("*") if "__pycache__" not in path.parts]
    found = {path.relative_to(ROOT).as_posix(): path for path in files if path.is_file()}
    libraries = library_folders()
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        path = Path(getattr(spec, "origin", None) or "")
        if path.suffix != ".py" or not path.is_file() or "dist-packages" in path.parts:
            continue
        if spec.name.startswith(CODE):
            continue
        if not any(path.is_relative_to(folder) for folder in libraries):
            name = spec.name.replace(".", "/")
            is_package = spec.submodule_search_locations is not None
            found[f"{name}/__init__.py" if is_package else f"{name}.py"] = path
    started = sys.modules["__main__"]
    path = Path(getattr(started, "__file__", None) or "")
    # `python FILE` leaves __spec__ None. `python -m`, e.g. of pytest, sets it.
    if path.suffix == ".py" and started.__spec__ is None:
        found[path.name] = path
    return found


def write_code(folder: Path, overwrite: bool = True) -> None:
    """Copy the program into a folder. Without `overwrite`, only add missing files."""
    for name, path in program().items():
        copy = folder / name
        content = path.read_bytes()
        if copy.is_file() and (not overwrite or copy.read_bytes() == content):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(copy) as partial:
            partial.write_bytes(content)


def changes_since(folder: Path) -> str:
    """Describe how the program differs from its copy in a folder, or return "".

    Removes from the folder any module that can no longer be imported."""
    if not folder.exists():
        return ""
    now = program()
    changed, gone = [], []
    copies = sorted({*folder.rglob("*.py"), *(folder / name for name in now)})
    for copy in copies:
        name = copy.relative_to(folder).as_posix()
        path = now.get(name) or find_module(name)  # it may just not be imported yet
        if path is None:
            gone.append(name)
            copy.unlink()
        elif copy.is_file() and copy.read_bytes() != path.read_bytes():
            changed.append(name)
    new = [name for name in now if not (folder / name).is_file()]
    changes = {"changed": changed, "new": new, "gone": gone}
    return "; ".join(f"{change}: {', '.join(names)}" for change, names in changes.items() if names)


def find_module(name: str) -> Path | None:
    """Return the file that importing a module of log/code/ would load now, or None."""
    parts = Path(name).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    try:
        spec = importlib.util.find_spec(".".join(parts))
    except (ImportError, ValueError):  # its package is gone, or no longer a package
        return None
    return Path(spec.origin) if spec and spec.origin else None

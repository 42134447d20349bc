"""The file that defines a GPT: the one that a run keeps, and the one that a trained model needs."""

import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from torch import nn

from support.errors import UserError
from support.files import sha256
from support.run_log import ROOT, run_entries


def file_of(model_class: type[nn.Module]) -> Path | None:
    """The file that defines a class; None if there is none, as in a notebook."""
    with contextlib.suppress(TypeError):
        path = Path(inspect.getfile(model_class)).absolute()
        return path if path.is_file() else None
    return None


def recorded(folder: Path) -> tuple[Path, dict[str, Any]]:
    """(the log folder of the run that trained the model in a folder, its last entry in run.json)"""
    for log_dir in (folder, folder.parent):
        with contextlib.suppress(UserError):  # another program's run.json
            for entry in run_entries(log_dir)[-1:]:
                return log_dir, entry
    return folder, {}


def find_code(folder: Path) -> Path:
    """The file whose GPT the model in a folder is.

    That is the file that run.json records, if this clone still has it as it was. (The copy in the
    log folder is never taken: a folder from elsewhere could bring any code.) Otherwise it is
    train_gpt2.py."""
    _, entry = recorded(folder)
    path = ROOT / Path(entry.get("script") or "").name
    if path.is_file() and sha256(path) == entry.get("script_sha256"):
        return path
    return ROOT / "train_gpt2.py"


def kept_code(folder: Path) -> Path | None:
    """The copy of that file in the log folder; None if there is none."""
    log_dir, entry = recorded(folder)
    path = log_dir / Path(entry.get("script") or "").name
    return path if path.is_file() else None


def load_gpt_class(path: Path) -> type[nn.Module]:
    """Runs a file and returns its class GPT."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--code {path}: not a Python file")
    if path.resolve() == ROOT / "train_gpt2.py":
        import train_gpt2 as module
    else:
        folder = str(path.absolute().parent)
        if folder not in sys.path:  # where `python FILE` would look for what it imports
            sys.path.append(folder)
        name = f"code_{path.stem}"  # not the name of a module that is already here
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if not hasattr(module, "GPT"):
        raise UserError(f"--code {path}: has no class GPT")
    return module.GPT

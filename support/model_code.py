"""The file with the class GPT of a model: kept beside its weights, found again, and loaded."""

import contextlib
import functools
import importlib.util
import inspect
import keyword
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.command_line import note
from support.errors_and_signals import UserError
from support.files_and_locks import ROOT, sha256

if TYPE_CHECKING:
    from train_gpt2 import GPT


@functools.cache
def source_of(model_class: "type[GPT]") -> tuple[Path | None, bytes]:
    """(the file that defines a class, its content); (None, b"") if there is none, as in a notebook.

    The content is that of the first call. A run asks at its start, so what it keeps is what it
    runs, even if the file is edited while it trains."""
    with contextlib.suppress(TypeError, OSError):
        path = Path(inspect.getfile(model_class)).absolute()
        return path, path.read_bytes()
    return None, b""


@functools.cache
def modeling_fork(model_class: "type[GPT]") -> str | None:
    """The text of modeling_fork.py beside a fork's weights, which imports the copy of its script.

    None, after a note, if transformers could not import that script."""
    script, _ = source_of(model_class)
    if script is None:
        problem = "its class is in no file; write it into one, which a notebook does by %%writefile"
    elif not script.stem.isidentifier() or keyword.iskeyword(script.stem):
        problem = f"Python cannot import {script.name}; rename it, with _ instead of - for example"
    elif model_class.__qualname__ != "GPT":
        problem = f"its class is called {model_class.__qualname__}; call it GPT"
    else:
        text = (ROOT / "support" / "modeling_fork.py").read_text(encoding="utf-8")
        return text.replace("from .train_gpt2 import", f"from .{script.stem} import")
    note(f"transformers and lm-eval cannot open checkpoints of this fork: {problem}")
    return None


def kept_code(folder: Path, raw: dict[str, Any]) -> Path | None:
    """The copy of that file in a model's folder, or None. raw: config.json, which names it."""
    path = folder / Path(str(raw.get("script"))).name
    return path if path.is_file() else None


def find_code(folder: Path, raw: dict[str, Any]) -> Path | None:
    """The file of this clone whose GPT the model in a folder is. raw: its config.json

    That is the file of the same name as the folder's copy, if it is still the same. None if there
    is no such file. (The copy is never run by itself: a folder from elsewhere could bring any
    code.)"""
    kept = kept_code(folder, raw)
    if kept is None:
        return None
    path = ROOT / kept.name
    return path if path.is_file() and sha256(path) == sha256(kept) else None


def load_gpt_class(path: Path) -> "type[GPT]":
    """Runs a file, unless it is imported already, and returns its class GPT."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--code {path}: not a Python file")
    module = sys.modules.get(path.stem)
    if module is None or Path(module.__file__ or "").resolve() != path.resolve():
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

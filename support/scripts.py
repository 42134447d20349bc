"""The code that a run has run: which script, what it keeps of it, and what has changed since.

A run keeps a copy of the program in log/code/. The config.json of a checkpoint has the name and the
checksum of the script that trained it. A script that lies in a model's folder is never run, unless
somebody names it with --code."""

import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.errors_and_signals import UserError
from support.files_and_locks import ROOT, atomic_path

if TYPE_CHECKING:
    from train_gpt2 import GPT

# --------------------------------------------------------------------------------------------------
# The script that defines a model


def script_of(some_class: type) -> Path | None:
    """The file that defines a class. None if there is none, as in a notebook."""
    with suppress(TypeError, OSError):
        path = Path(inspect.getfile(some_class)).absolute()
        return path if path.is_file() else None
    return None


def script_entry(model_class: "type[GPT]") -> dict[str, str]:
    """What config.json, run.json and training_state.pt have of the script."""
    script = script_of(model_class)
    if script is None:
        return {}
    return {"script": script.name, "script_sha256": checksum(read_once(script))}


def is_other_version(theirs: dict[str, Any], ours: dict[str, str], what: str) -> bool:
    """Whether our script has the same name as theirs, but another content.

    Both are what a file has of a script. If the name differs as well, this raises a UserError that
    begins with `what`."""
    name = theirs.get("script")
    if not name or ours.get("script_sha256") == theirs.get("script_sha256"):
        return False  # A class in a notebook has no script.
    if name == ours.get("script"):
        return True
    problem = f"trained by {name}, and {ours.get('script')} is another script"
    raise UserError(f"{what}: {problem}; use {name}")


def load_gpt_class(code: str) -> "type[GPT]":
    """Runs the file of --code, and returns its class GPT."""
    path = Path(code)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--code {path}: not a Python file")
    sys.path.append(str(path.absolute().parent))  # where `python FILE` would look for its imports
    name = f"code_{path.stem}"  # not the name of a module that is already here
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT


# --------------------------------------------------------------------------------------------------
# The program that a run keeps

STANDARD_LIBRARY = sysconfig.get_path("stdlib")
read_once = functools.cache(Path.read_bytes)  # A file may be edited while its code runs.


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def loaded_code(script: Path | None = None) -> dict[str, bytes]:
    """{path: content} of the modules that this process has loaded, without those of libraries.

    They are in the folder of `script`, in that of the program that was started, or in this clone.
    Their paths are relative to that folder. A run calls this before anything else, and so records
    what runs, even if a file is edited a moment later."""
    main = getattr(sys.modules["__main__"], "__file__", None)  # None in a notebook
    folders = [Path(path).absolute().parent for path in (script, main) if path]
    code = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "").absolute()
        folder = next((f for f in [*folders, ROOT] if path.is_relative_to(f)), None)
        of_library = "site-packages" in path.parts or path.is_relative_to(STANDARD_LIBRARY)
        if folder is None or not path.is_file() or of_library:
            continue
        name = path.relative_to(folder)
        # Libraries may also be in a hidden folder, such as .venv.
        if not any(part == "tests" or part.startswith(".") for part in name.parts):
            code[name.as_posix()] = read_once(path)
    return dict(sorted(code.items()))


def code_checksums(script: Path | None = None) -> dict[str, str]:
    """{path: checksum} of loaded_code(), for run.json."""
    return {name: checksum(content) for name, content in loaded_code(script).items()}


def changed_since(recorded: dict[str, str], script: Path | None) -> str:
    """The loaded files that have changed since, for a line. recorded: {path: checksum}

    Those in a folder, such as support/, are only counted."""
    changed = [
        name
        for name, digest in code_checksums(script).items()
        if recorded.get(name, digest) != digest
    ]
    folders = Counter(name.partition("/")[0] for name in changed if "/" in name)
    counts = [f"{folder}/ ({n} files)" for folder, n in folders.items()]
    return ", ".join([name for name in changed if "/" not in name] + counts)


def write_program(folder: Path, script: Path | None) -> None:
    """Writes a copy of the program into a folder: the scripts of this clone, all of support/, and
    the loaded modules beside `script`. Other files in there stay."""
    files = [*ROOT.glob("*.py"), *(ROOT / "support").glob("*"), *(ROOT / "support").glob("gpt2/*")]
    program = {path.relative_to(ROOT).as_posix(): path for path in files if path.is_file()}
    contents = {name: path.read_bytes() for name, path in program.items()}
    for name, content in (contents | loaded_code(script)).items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial:
            partial.write_bytes(content)

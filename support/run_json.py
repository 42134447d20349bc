"""run.json, which is what a run records about itself. Does not import torch.

It is a list with one entry for the start of the run, and one for each time it was resumed."""

import contextlib
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.command_line import shown
from support.files_and_locks import ROOT, sha256, write_text


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] without one."""
    path = Path(log_dir) / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def write_entries(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")


def new_entry(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An entry about this start. config: the settings of the run."""
    import torch  # here, since reading logs needs no torch

    versions = {"torch": torch.__version__}  # with its build, such as +cu130
    versions |= {name: version(name) for name in ("numpy", "tiktoken", "safetensors")}
    # The folder may be published, so paths in this folder become relative.
    public = {k: shown(value) if isinstance(value, str) else value for k, value in config.items()}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],
        "git_commit": git_commit(),
        "code": loaded_code(),
        "versions": versions | {"python": sys.version.split()[0]},
        **more,
        "config": public,
    }


def git_commit() -> str | None:
    """The commit of this clone, with a + if files have changed since. None without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None


def loaded_code() -> dict[str, str]:
    """{path: checksum} of the modules that this process has loaded, without those of libraries.

    They are in the folder of the script that runs, or in this clone. Their paths are relative to
    that folder."""
    folders = [ROOT]
    if script := getattr(sys.modules["__main__"], "__file__", None):  # a notebook has none
        folders.insert(0, Path(script).absolute().parent)
    code = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "").absolute()
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder is None or not path.is_file() or "site-packages" in path.parts:
            continue
        name = path.relative_to(folder)
        # Libraries may also be in a hidden folder, such as .venv.
        if not any(part == "tests" or part.startswith(".") for part in name.parts):
            code[name.as_posix()] = sha256(path)
    return dict(sorted(code.items()))

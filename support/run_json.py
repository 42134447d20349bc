"""run.json, which is what a run records about itself. Does not import torch.

run.json is a list with one entry for the start of the run, and one for each time it was resumed."""

import contextlib
import json
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.command_line import print0, shown
from support.errors_and_signals import UserError
from support.files_and_locks import ROOT, atomic_path, sha256, write_text


def run_entries(log_dir: str | Path) -> list[dict[str, Any]]:
    """The entries of run.json, oldest first; [] without one."""
    path = Path(log_dir) / "run.json"
    if not path.exists():
        return []
    with contextlib.suppress(ValueError, TypeError, KeyError):
        entries = json.loads(path.read_text(encoding="utf-8"))
        if type(entries) is list and all(type(entry["config"]) is dict for entry in entries):
            return entries
    raise UserError(f"{path}: not a list of a run's starts; move it away")


def write_entries(log_dir: Path, entries: list[dict[str, Any]]) -> None:
    write_text(log_dir / "run.json", json.dumps(entries, indent=2) + "\n")


def copy_script(
    log_dir: Path, entries: list[dict[str, Any]], script: Path | None, source: bytes
) -> None:
    """Writes run.json, and a copy of the script that runs into the log folder, under its name."""
    write_entries(log_dir, entries)
    if script is None:
        return
    copy = log_dir / script.name
    if copy.exists() and sha256(copy) not in [entry.get("script_sha256") for entry in entries]:
        print0(f"{copy} is not a run's copy: it stays, and this run's script is not kept there")
        return
    with atomic_path(copy) as new:
        new.write_bytes(source)


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


def git_commit(script: Path | None) -> str | None:
    """The commit of this clone, with a + if files have changed since or git lacks the script.

    None without git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
        describe = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        commit = git(describe, check=True).stdout.strip()
        known = script is None or not git(["git", "ls-files", "--error-unmatch", script]).returncode
        return commit if known or commit.endswith("+") else f"{commit}+"
    return None


def new_entry(config: dict[str, Any], script: Path | None = None, **more: Any) -> dict[str, Any]:
    """An entry of run.json about this start. script: the file that runs."""
    import torch  # here, since reading logs needs no torch

    versions = {"torch": torch.__version__}  # with its build, such as +cu130
    versions |= {name: version(name) for name in ("numpy", "tiktoken", "safetensors")}
    # The folder may be published, so it has no local paths.
    public = {k: shown(value) if isinstance(value, str) else value for k, value in config.items()}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [shown(word) for word in sys.argv],
        "git_commit": git_commit(script),
        "code": loaded_code(),
        "versions": versions | {"python": sys.version.split()[0]},
        **more,
        "config": public,
    }

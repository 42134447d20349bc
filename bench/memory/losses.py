"""Twenty steps with --low-memory, --shard-optimizer and both against none: are losses, norms, weights, moments equal?

    python bench/memory/losses.py      # 40 runs; on one and two ranks, AdamW and Muon, and from 2 ranks on 1, 3 and 4
"""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.checkpoints import read_training_state
from support.files import sha256
from tests.conftest import losses, read_log, train_on_ranks

FLAGS = {"none": "", "low": "--low-memory", "shard": "--shard-optimizer", "both": "--low-memory --shard-optimizer"}
RUN = ("--preset shakespeare --n-layer 4 --n-head 4 --n-embd 32 --seq-len 64 --total-batch-size 768 "
       "--micro-batch-size 1 --warmup-steps 5 --max-lr 1e-2 --max-steps 20 --save-every 10 --keep-checkpoints 0 "
       "--eval-every 10 --eval-tokens 4096 --resume")


def train(folder: Path, ranks: int, optimizer: str, flags: str) -> Path:
    args = [*RUN.split(), "--optimizer", optimizer, *FLAGS[flags].split(), "--log-dir", folder]
    train_on_ranks(ranks, folder.parent, *args)
    return folder


def tensors(optimizer: dict) -> list[bytes]:
    parts = [optimizer] if "state" in optimizer else optimizer.values()
    return [t.numpy().tobytes() for part in parts for state in part["state"].values() for t in state.values()]


def compare(a: Path, b: Path) -> str:
    """The largest difference of a loss, and whether everything is equal."""
    results = [(read_log(folder, "train", "val", "norm"), sha256(folder / "step_000020/model.safetensors"),
                tensors(read_training_state(folder / "step_000020")["optimizer"])) for folder in (a, b)]
    largest = max(abs(x - y) for x, y in zip(losses(a), losses(b), strict=True))
    return f"{largest:.0e}, {'every bit equal' if results[0] == results[1] else 'not bit for bit'}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for optimizer in ("adamw", "muon"):
            for ranks in (1, 2):
                plain = train(folder / f"{optimizer}_{ranks}_none", ranks, optimizer, "none")
                for flags in ("low", "shard", "both"):
                    other = train(folder / f"{optimizer}_{ranks}_{flags}", ranks, optimizer, flags)
                    print(optimizer, f"{ranks} ranks, {flags}:", compare(plain, other), flush=True)
            for ranks in (1, 3, 4):
                for before, after in (("none", "none"), ("both", "both"), ("both", "none"), ("none", "both")):
                    resumed = folder / f"{optimizer}_2_{before}_{ranks}_{after}"
                    shutil.copytree(folder / f"{optimizer}_2_{before}", resumed)
                    shutil.rmtree(resumed / "step_000020")
                    train(resumed, ranks, optimizer, after)
                    print(optimizer, f"2 ranks, {before}, then {ranks}, {after}: against 2 ranks throughout",
                          compare(plain, resumed), "; against none", compare(
                              folder / f"{optimizer}_2_none_{ranks}_none", resumed), flush=True)


if __name__ == "__main__":
    main()

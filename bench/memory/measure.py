"""The peak memory of train_gpt2.py's process, by setting, beside the estimate of --plan. On Linux, on a CPU.

    python bench/memory/measure.py             # all settings, in turn: half an hour and 8 GB
    python bench/memory/measure.py 1 low       # those whose line has both words, "355M B=4 --low-memory" say

Each setting trains for two steps of one micro-batch a rank; the peak is VmHWM of the process, of several ranks the
largest.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
SIZES = {"124M": "", "355M": "--n-layer 24 --n-head 16 --n-embd 1024"}
SETTINGS = [f"124M B={B}{flags}" for B in (1, 4) for flags in ("", " --low-memory")]
SETTINGS += ["124M B=1 --optimizer muon", "124M B=1 x 2", "124M B=1 --shard-optimizer x 2"]
SETTINGS += ["355M B=1", "355M B=1 --low-memory", "355M B=4", "355M B=4 --low-memory"]
RUN = "--preset gpt2 --data input.txt --device cpu --max-steps 2 --eval-every 0 --hellaswag-every 0 --sample-every 0"


def flags_of(setting: str) -> tuple[list[str], int]:
    """(flags of train_gpt2.py, ranks) of "355M B=4 --low-memory x 2"."""
    size, B, *rest = setting.split()
    ranks = int(rest.pop()) if "x" in rest else 1
    B = int(B.removeprefix("B="))
    flags = [*RUN.split(), *SIZES[size].split(), *(word for word in rest if word != "x"), "--save-every", "0"]
    return [*flags, "--micro-batch-size", str(B), "--total-batch-size", str(1024 * B * ranks)], ranks


def measure(flags: list[str], ranks: int) -> int:
    """Bytes: the peak of the largest rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable] if ranks == 1 else [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, "--train", folder, *flags, "--log-dir", f"{folder}/log"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return max(int(path.read_text()) for path in Path(folder).glob("peak.*"))


def train(folder: str, flags: list[str]) -> None:
    import train_gpt2

    train_gpt2.main(flags)
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    Path(folder, f"peak.{os.environ.get('RANK', '0')}").write_text(str(1024 * int(peak)))


def estimate(flags: list[str], ranks: int) -> int:
    from support.distributed import Distributed
    from support.memory import memory_of
    from train_gpt2 import GPT, model_config, read_config

    config = read_config(flags)
    with torch.device("meta"):
        model = GPT(model_config(config))
    dist = Distributed(0, 0, ranks, torch.device("cpu"), torch.float32, "")
    return sum(memory_of(model, config.micro_batch_size, config, dist).values())


def main(words: list[str]) -> None:
    print("| setting | estimated, GB | measured, GB | off |\n|---|---|---|---|")
    for setting in SETTINGS:
        if all(word in setting for word in words):
            flags, ranks = flags_of(setting)
            expected, peak = estimate(flags, ranks), measure(flags, ranks)
            print(f"| {setting} | {expected / 1e9:.2f} | {peak / 1e9:.2f} | {expected / peak - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1:])

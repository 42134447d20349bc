"""Runs our script and build-nanogpt's from the same weights on the same tokens, and compares them.

    python bench/fidelity/fidelity.py PEER [STEPS] [FLAG …]

PEER is a copy of build-nanogpt. Both train GPT-2 (124M) in float32 on the CPU, with the settings of
the gpt2 preset, for STEPS updates (60) of 2 x 2 x 32 tokens. Theirs is changed by EDITS. FLAGs are
added to ours, to see what a difference looks like (--weight-decay 0.09)."""

import contextlib
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.errors_and_signals import UserError, run_and_exit
from support.run_files import read_log
from support.shards import tokenize_text
from train_gpt2 import GPT, GPTConfig

ROOT = Path(__file__).parents[2]
B = 2  # sequences per micro-step
T = 32  # tokens per sequence
MICRO_STEPS = 2  # per update
SHARDS = "edu_fineweb10B"  # the folder in which their loader looks
EDITS = {  # before: after
    # nothing is downloaded
    "from hellaswag import": "#",
    "enc = tiktoken": "#",
    'print(f"using device: {device}")': 'device = "cpu"',
    # float32
    "dtype=torch.bfloat16": "enabled=False",
    "torch.set_float32_matmul_precision": "#",
    # the same initial weights, from a folder of this name
    "GPT(GPTConfig(vocab_size=50304))": 'GPT.from_pretrained("gpt2")',
    "total_batch_size = 524288": f"total_batch_size = {B * T * MICRO_STEPS}",
    "T = 1024": f"T = {T}",
    # no evaluation
    "val_loader = ": "# ",
    "step % 250 == 0": "False",
    "(step == max_steps - 1)": "False",
    # losses with all digits, and gradient norms
    "train {loss_accum.item():.6f}": r"train {loss_accum.item()}\n{step} norm {norm.item()}",
}


def edited(script: Path, steps: int, micro_steps: int) -> str:
    """Their script with EDITS, with an update divided into this number of micro-steps."""
    source = script.read_text(encoding="utf-8")
    edits = EDITS | {
        "B = 64": f"B = {B * MICRO_STEPS // micro_steps}",
        "warmup_steps = 715": f"warmup_steps = {steps // 6}",
        "max_steps = 19073": f"max_steps = {steps}",
    }
    for before, after in edits.items():
        if before not in source:
            raise UserError(f"{script}: not the script of build-nanogpt of June 2024")
        source = source.replace(before, after)
    return source


def train(*command: str) -> np.ndarray:
    """Runs Python with these arguments. -> (2, steps): losses and norms from log/log.txt"""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)  # it printed why
    log = read_log("log")
    return np.array([log["train"][1], log["norm"][1]])


def difference(curves: np.ndarray, others: np.ndarray) -> str:
    """The largest differences over the first third of the steps and over all. Both (2, steps)."""
    losses = abs(curves[0] - others[0])
    norms = abs(curves[1] / others[1] - 1)
    third = -(-len(losses) // 3)  # rounded up
    return (
        f"losses differ by at most {losses[:third].max():.1e} in the first {third} steps, "
        f"{losses.max():.1e} in all; norms {norms[:third].max():.1e} and {norms.max():.1e} "
        "(relative)"
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=60)
    args, flags = parser.parse_known_args()
    steps = args.steps
    if steps < 1:
        raise UserError(f"{steps} steps: must be at least 1")
    script = args.peer / "train_gpt2.py"
    peer = edited(script, steps, MICRO_STEPS)
    peer_whole = edited(script, steps, 1)  # differs by rounding only
    command = f"""{ROOT}/train_gpt2.py --preset gpt2 --init gpt2 --data {SHARDS} --no-shuffle
        --total-batch-size {B * T * MICRO_STEPS} --micro-batch-size {B} --seq-len {T}
        --device cpu --dtype float32 --max-steps {steps} --warmup-steps {steps // 6}
        --eval-every 0 --hellaswag-every 0 --sample-every 0 --save-every 0"""

    torch.manual_seed(1337)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Path(SHARDS).mkdir()
        np.save(f"{SHARDS}/input_train_000000.npy", tokenize_text(ROOT / "input.txt", "train"))
        GPT(GPTConfig()).save_pretrained("gpt2")
        ours = train(*command.split(), *flags)
        theirs = train("-c", peer)
        whole = train("-c", peer_whole)
    print("step  loss: theirs      ours  norm: theirs      ours")
    rows = zip(theirs[0], ours[0], theirs[1], ours[1], strict=True)
    for step, row in enumerate(rows):
        print("{:4}  {:12.6f}  {:8.6f}  {:12.6f}  {:8.6f}".format(step, *row))
    print(f"ours and theirs: {difference(ours, theirs)}")
    print(f"theirs and theirs in one micro-step: {difference(whole, theirs)}")


if __name__ == "__main__":
    run_and_exit(main)

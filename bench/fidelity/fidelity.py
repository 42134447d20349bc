"""Runs our script and build-nanogpt's from the same weights on the same tokens, and compares them.

    python bench/fidelity/fidelity.py PEER [STEPS] [--variant VARIANT]

PEER is a copy of build-nanogpt. Both train GPT-2 (124M) in float32 on the CPU, with the settings of
the gpt2 preset, for STEPS updates (60) of 2 x 2 x 32 tokens. Theirs is changed by EDITS. VARIANT is
`bfloat16` (both under autocast), `compile` (ours with --compile on), or `ranks` (both with two
processes and two micro-steps each)."""

import contextlib
import shutil
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


FLOAT32 = {"dtype=torch.bfloat16": "enabled=False"}
GLOO = {  # two processes on a CPU
    "assert torch.cuda.is_available()": "#",
    "backend='nccl'": "backend='gloo'",
    "device = f'cuda:{ddp_local_rank}'": "device = 'cpu'",
    "torch.cuda.set_device(device)": "pass",
    "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
    "dist.all_reduce(loss_accum, op=dist.ReduceOp.AVG)": "dist.all_reduce(loss_accum); "
    "loss_accum /= ddp_world_size",
}


def replaced(script: Path, edits: dict[str, str]) -> str:
    """Return the source of a script with replacements, each of which must apply."""
    source = script.read_text(encoding="utf-8")
    for before, after in edits.items():
        if before not in source:
            raise UserError(f"{script}: not the script of build-nanogpt of June 2024")
        source = source.replace(before, after)
    return source


def edited(script: Path, steps: int, micro_steps: int, variant: str) -> str:
    """Return their script with EDITS, and with an update divided into `micro_steps`."""
    ranks = 2 if variant == "ranks" else 1
    edits = EDITS | ({} if variant == "bfloat16" else FLOAT32) | (GLOO if ranks > 1 else {})
    return replaced(
        script,
        edits
        | {
            "B = 64": f"B = {B * MICRO_STEPS // micro_steps // ranks}",
            "warmup_steps = 715": f"warmup_steps = {steps // 6}",
            "max_steps = 19073": f"max_steps = {steps}",
        },
    )


def train(script: str, *flags: str, ranks: int = 1) -> np.ndarray:
    """Run a script. Return the losses and norms of log/log.txt, (2, steps)."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launch if ranks > 1 else []), script, *flags]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
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
    variants = ("float32", "bfloat16", "compile", "ranks")
    parser.add_argument("--variant", choices=variants, default="float32")
    args = parser.parse_args()
    steps = args.steps
    script = args.peer / "train_gpt2.py"
    variant = args.variant
    ranks = 2 if variant == "ranks" else 1
    peer = edited(script, steps, MICRO_STEPS, variant)
    peer_whole = edited(script, steps, 1, variant)  # differs by rounding only
    dtype = "bfloat16" if variant == "bfloat16" else "float32"
    compile = "on" if variant == "compile" else "off"
    command = f"""--preset gpt2 --init gpt2 --data {SHARDS} --no-shuffle
        --total-batch-size {B * T * MICRO_STEPS} --micro-batch-size {B // ranks}
        --seq-len {T} --device cpu --dtype {dtype} --compile {compile}
        --max-steps {steps} --warmup-steps {steps // 6}
        --eval-every 0 --hellaswag-every 0 --sample-every 0 --save-every 0"""

    torch.manual_seed(1337)
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Path(SHARDS).mkdir()
        np.save(f"{SHARDS}/input_train_000000.npy", tokenize_text(ROOT / "input.txt", "train"))
        GPT(GPTConfig()).save_pretrained("gpt2")
        Path("peer.py").write_text(peer, encoding="utf-8")
        Path("peer_whole.py").write_text(peer_whole, encoding="utf-8")
        ours = train(f"{ROOT}/train_gpt2.py", *command.split(), ranks=ranks)
        shutil.rmtree("log")
        theirs = train("peer.py", ranks=ranks)
        whole = train("peer_whole.py", ranks=ranks)
    print("step  loss: theirs      ours  norm: theirs      ours")
    rows = zip(theirs[0], ours[0], theirs[1], ours[1], strict=True)
    for step, row in enumerate(rows):
        print("{:4}  {:12.6f}  {:8.6f}  {:12.6f}  {:8.6f}".format(step, *row))
    print(f"ours and theirs: {difference(ours, theirs)}")
    print(f"theirs and theirs in one micro-step: {difference(whole, theirs)}")


if __name__ == "__main__":
    run_and_exit(main)

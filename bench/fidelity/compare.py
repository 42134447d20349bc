"""Trains ours and build-nanogpt's from the same weights on the same tokens, and compares them.

    python bench/fidelity/compare.py PEER [STEPS] [FLAG …]

PEER: a copy of build-nanogpt. GPT-2 (124M), float32 on the CPU, the settings of the gpt2 preset,
STEPS updates (60) of 2 x 2 x 32 tokens. Ours is train_gpt2.py, run as a command; FLAGs are added
to it, to see what a difference looks like (--weight-decay 0.09). Theirs are PARTS of their script,
unchanged except for EDITS."""

import contextlib
import subprocess
import sys
import tempfile
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cli import UserError, run
from support.run_folder import read_log
from support.tokenizer import tokenize_text
from train_gpt2 import GPT, GPTConfig

ROOT = Path(__file__).parents[2]
B, T, MICRO_STEPS = 2, 32, 2
SHARDS = "edu_fineweb10B"  # the folder in which their loader looks
EDITS = {
    "from hellaswag import": "#",  # it fetches a tokenizer
    "dtype=torch.bfloat16": "enabled=False",  # of autocast: float32 remains
}
# Parts of their script, from one text to another. The rest starts a run, evaluates or saves.
PARTS = {
    "definitions": ("import os", "# simple launch:"),
    "schedule": ("max_lr = 6e-4", "# optimize!"),
    "optimizer": ("# optimize!", "# create the log directory"),
    "update": ("    # do one step of the optimization", '    if device_type == "cuda":'),
}


class Peer:
    """build-nanogpt's training script in pieces."""

    def __init__(self, script: Path):
        source, self.code = script.read_text(encoding="utf-8"), {}
        for part, (start, end) in PARTS.items():
            if not all(text in source for text in (start, end, *EDITS)):
                raise UserError(f"{script}: not the script of build-nanogpt of June 2024")
            text = start + source.split(start)[1].split(end)[0]
            for before, after in EDITS.items():
                text = text.replace(before, after)
            self.code[part] = compile(textwrap.dedent(text), f"{script}, {part}", "exec")
        # The script's globals, as its set-up makes them in one process without a GPU.
        self.names: dict[str, Any] = {"__name__": "peer", "master_process": False, "ddp": False}
        self.run("definitions", device="cpu", device_type="cpu")
        self.run("schedule")

    def run(self, part: str, **names: Any) -> None:
        """Executes a part of the script, after setting these globals."""
        self.names |= names
        exec(self.code[part], self.names)

    def train(self, ours: GPT, steps: int, micro_steps: int) -> np.ndarray:
        """Losses and gradient norms (2, steps) from our weights."""
        model = self.names["GPT"](self.names["GPTConfig"](**asdict(ours.config)))
        weights = {f"transformer.{name}": p for name, p in ours.named_parameters()}
        model.load_state_dict(weights | {"lm_head.weight": ours.wte.weight})
        batch = B * MICRO_STEPS // micro_steps
        loader = self.names["DataLoaderLite"](batch, T, 0, 1, "train")
        self.run("optimizer", model=model, raw_model=model, train_loader=loader)
        self.names |= {"max_steps": steps, "warmup_steps": steps // 6}
        curves = []
        for step in range(steps):
            self.run("update", step=step, grad_accum_steps=micro_steps)
            curves.append((self.names["loss_accum"].item(), self.names["norm"].item()))
        return np.array(curves).T


def train_ours(model: GPT, steps: int, flags: list[str]) -> np.ndarray:
    """The same of train_gpt2.py, which logs six decimals."""
    model.save_pretrained("init")
    command = f"""{ROOT}/train_gpt2.py --preset gpt2 --init init --data {SHARDS} --no-shuffle
        --log-dir log --total-batch-size {B * T * MICRO_STEPS} --micro-batch-size {B} --seq-len {T}
        --device cpu --dtype float32 --max-steps {steps} --warmup-steps {steps // 6}
        --eval-every 0 --hellaswag-every 0 --sample-every 0 --save-every 0"""
    done = subprocess.run([sys.executable, *command.split(), *flags], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)  # it printed why
    log = read_log("log")
    return np.array([log["train"][1], log["norm"][1]])


def difference(curves: np.ndarray, others: np.ndarray) -> str:
    """The largest differences, over the first third of the steps and over all."""
    losses, norms = abs(curves - others)[0], abs(curves / others - 1)[1]
    third = -(-len(losses) // 3)
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
    peer = Peer(args.peer / "train_gpt2.py")

    torch.manual_seed(1337)
    model, tokens = GPT(GPTConfig()), tokenize_text(ROOT / "input.txt", "train")
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        Path(SHARDS).mkdir()
        np.save(f"{SHARDS}/input_train_000000.npy", tokens)
        ours = train_ours(model, steps, flags)
        theirs = peer.train(model, steps, MICRO_STEPS)
        whole = peer.train(model, steps, 1)
    print("step  loss: theirs      ours  norm: theirs      ours")
    for step, row in enumerate(np.stack([theirs, ours], axis=1).reshape(4, steps).T):
        print("{:4}  {:12.6f}  {:8.6f}  {:12.6f}  {:8.6f}".format(step, *row))
    print(f"ours and theirs: {difference(ours, theirs)}")
    print(f"theirs and theirs in one micro-step: {difference(whole, theirs)}")


if __name__ == "__main__":
    run(main)

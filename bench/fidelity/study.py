"""Train small GPT-2s with build-nanogpt's script and with ours, and compare their final losses.

    python bench/fidelity/study.py train PEER SHARDS TASKS ARM SEED [SEED …]
    python bench/fidelity/study.py report

PEER is a copy of build-nanogpt, SHARDS a folder that fineweb.py made with --vocab-size 2000, and
TASKS a .jsonl of HellaSwag. ARM is `peer` for build-nanogpt's script, changed by EDITS; `ours` for
train_gpt2.py with --no-shuffle, which reads the same tokens in the same order; or `shuffled` for
train_gpt2.py as it is. Each run draws its initial weights by its own script from SEED, and is
written to RESULTS as one JSON file. A run whose file exists is skipped. `report` prints a table and
draws curves.png."""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import torch
from fidelity import ROOT, replaced  # which puts ROOT on sys.path
from matplotlib.figure import Figure
from transformers import GPT2LMHeadModel

from support.errors_and_signals import run_and_exit
from support.files_and_locks import write_text
from support.peer_checkpoints import read_peer_tensors
from support.run_files import read_log
from support.tokenizer import get_tokenizer
from train_gpt2 import GPT, GPTConfig

RESULTS = Path(__file__).parent / "results"
# GPT-2's shape, at a size that a CPU trains in minutes. Learning rates, weight decay, clipping, and
# the share of the warm-up are those of the preset gpt2, as in build-nanogpt.
T, VOCABULARY, LAYERS, HEADS, CHANNELS = 256, 2000, 4, 4, 128
STEPS, WARMUP, B, TOKENS_PER_STEP = 1500, 56, 4, 2048
EVAL_BATCHES = 20  # batches of B sequences in their own evaluation
LAST_TOKENS = 2**18  # of the evaluation by one code
# The margin, in nats per token, and the seeds were committed before the runs of a study. Two
# one-sided t-tests at 5% should find a true difference of 0 within it with a power of 90%.
MARGIN = 0.02
STUDIES = {"first study": range(1, 9), "second study": range(9, 21)}
NAMES = {"peer": "build-nanogpt", "ours": "train_gpt2.py --no-shuffle", "shuffled": "train_gpt2.py"}
# The 95% quantiles of Student's t distribution, by degrees of freedom
T_95 = {10: 1.812, 14: 1.761, 22: 1.717, 38: 1.686}
EDITS = {  # before: after
    "from hellaswag import": "#",
    "enc = tiktoken": "#",
    # 48 rows more than tokens, as 50,304 has 47 more than 50,257
    "GPT(GPTConfig(vocab_size=50304))": f"GPT(GPTConfig({T}, 2048, {LAYERS}, {HEADS}, {CHANNELS}))",
    "total_batch_size = 524288": f"total_batch_size = {TOKENS_PER_STEP}",
    "B = 64": f"B = {B}",
    "T = 1024": f"T = {T}",
    "warmup_steps = 715": f"warmup_steps = {WARMUP}",
    "max_steps = 19073": f"max_steps = {STEPS}",
    # float32
    "dtype=torch.bfloat16": "enabled=False",
    # evaluate after the last update too, as ours does: one more turn of the loop
    "range(max_steps)": "range(max_steps + 1)",
    "step == max_steps - 1": "step == max_steps",
    # no HellaSwag and no samples
    "(step % 250 == 0 or last_step) and": "False and",
    "((step > 0 and step % 250 == 0) or last_step) and": "False and",
    # validation losses with all digits
    "val {val_loss_accum.item():.4f}": "val {val_loss_accum.item()}",
}
OURS = f"""--preset gpt2 --data edu_fineweb10B --seq-len {T} --n-layer {LAYERS} --n-head {HEADS}
    --n-embd {CHANNELS} --total-batch-size {TOKENS_PER_STEP} --micro-batch-size {B}
    --max-steps {STEPS} --warmup-steps {WARMUP} --eval-tokens {EVAL_BATCHES * B * T}
    --hellaswag-every 0 --sample-every 0 --save-every {STEPS} --device cpu"""


def load_peer(path: Path, shards: Path, folder: Path) -> Path:
    """Save the weights of build-nanogpt's checkpoint as a model in Hugging Face's format."""
    model = GPT(GPTConfig(T, VOCABULARY, LAYERS, HEADS, CHANNELS))
    tensors = read_peer_tensors(path)
    model.load_state_dict(tensors | {"wte.weight": tensors["wte.weight"][:VOCABULARY]})
    model.save_pretrained(folder, get_tokenizer(shards))
    return folder


def train(peer: Path, shards: Path, tasks: Path, arm: str, seed: int) -> None:
    """Train and evaluate one model, in a temporary folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "edu_fineweb10B").symlink_to(shards.resolve())

        def run(*command: str) -> str:
            command = (sys.executable, *command)
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
            return done.stdout

        if arm == "peer":
            seeds = {"manual_seed(1337)": f"manual_seed({seed})"}
            Path(scratch, "peer.py").write_text(replaced(peer / "train_gpt2.py", EDITS | seeds))
            run("peer.py")
            model = load_peer(
                Path(scratch, f"log/model_{STEPS:05d}.pt"), shards, Path(scratch, "hf")
            )
        else:
            order = [] if arm == "shuffled" else ["--no-shuffle"]
            run(f"{ROOT}/train_gpt2.py", *OURS.split(), "--seed", str(seed), *order)
            model = Path(scratch, f"log/step_{STEPS:06d}")
        log = read_log(Path(scratch, "log"))
        losses = np.array(log["train"][1])[:STEPS].reshape(-1, 50).mean(1)
        score = (f"{ROOT}/hellaswag.py", "--data", str(tasks))
        result = {
            "arm": arm,
            "seed": seed,
            "train": [round(loss, 5) for loss in losses.tolist()],  # means of 50 steps
            "val": dict(zip(*log["val"], strict=True)),  # by its own evaluation
            "last": last_loss(model, shards),
            "hellaswag": float(run(*score, "-m", str(model), "-d", "cpu").split()[-1]),  # acc_norm
        }
    RESULTS.mkdir(exist_ok=True)
    write_text(RESULTS / f"{arm}_{seed}.json", json.dumps(result, indent=1) + "\n")
    print(arm, seed, result["val"][STEPS], result["last"], result["hellaswag"], flush=True)


def last_loss(folder: Path, shards: Path) -> float:
    """Return the loss of a model on the first LAST_TOKENS of the validation shard.

    It is computed by transformers, which neither script is."""
    torch.set_num_threads(1)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = np.load(next(shards.glob("*_val_*.npy")))[:LAST_TOKENS].astype(np.int64)
    total = 0.0
    with torch.no_grad():
        for rows in torch.from_numpy(tokens).view(-1, 16, T):
            total += model(rows, labels=rows).loss.item()
    return total / (LAST_TOKENS // (16 * T))


def compare(name: str, ours: list[float], theirs: list[float]) -> str:
    """Return the difference of two means, with its 90% interval (Student's t)."""
    n = len(ours) + len(theirs) - 2
    difference = np.mean(ours) - np.mean(theirs)
    error = np.sqrt(np.var(ours, ddof=1) / len(ours) + np.var(theirs, ddof=1) / len(theirs))
    half = T_95[n] * error  # n degrees of freedom
    low, high = difference - half, difference + half
    within = "within" if max(-low, high) < MARGIN else "not within"
    return f"{name}: {difference:+.4f}, 90% interval {low:+.4f} to {high:+.4f}, {within} {MARGIN}"


def report() -> None:
    """Print the table and draw curves.png."""
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    arms = {arm: [run for run in runs if run["arm"] == arm] for arm in NAMES}
    last = {arm: [run["last"] for run in found] for arm, found in arms.items()}
    print("| | seeds | own evaluation | by transformers | HellaSwag, 1,000 tasks |")
    print("|---|---|---|---|---|")
    for arm, found in arms.items():
        columns = [
            [run["val"][str(STEPS)] for run in found],
            last[arm],
            [run["hellaswag"] for run in found],
        ]
        cells = [f"{np.mean(c):.4f} ± {np.std(c, ddof=1):.4f}" for c in columns]
        print(f"| {NAMES[arm]} | {len(found)} | {' | '.join(cells)} |")
    for study, seeds in (STUDIES | {"all seeds": range(1, 21)}).items():
        final = {
            arm: [run["last"] for run in found if run["seed"] in seeds]
            for arm, found in arms.items()
        }
        for arm in ("ours", "shuffled"):
            if final[arm]:
                name = f"{study}, {NAMES[arm]} minus {NAMES['peer']}"
                print(compare(name, final[arm], final["peer"]))

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for i, (arm, found) in enumerate(arms.items()):
        for run in found:
            steps = 50 * np.arange(len(run["train"])) + 25
            left.plot(steps, run["train"], color=f"C{i}", lw=0.7, alpha=0.6)
        left.plot([], [], color=f"C{i}", label=NAMES[arm])
        x = i + np.linspace(-0.15, 0.15, len(found))
        right.plot(x, last[arm], "o", color=f"C{i}")
        right.plot([i - 0.25, i + 0.25], [np.mean(last[arm])] * 2, color=f"C{i}")
    left.set(title="Training loss, means of 50 steps", xlabel="step", ylim=(None, 6.5))
    left.legend()
    right.set(title=f"Validation loss after {STEPS:,} steps", xticks=range(len(arms)))
    right.set_xticklabels(name.replace(" ", "\n") for name in NAMES.values())
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylabel("nats per token")
    figure.savefig(Path(__file__).parent / "curves.png", dpi=100)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report")
    training = commands.add_parser("train")
    for name in ("peer", "shards", "tasks"):
        training.add_argument(name, type=Path)
    training.add_argument("arm", choices=NAMES)
    training.add_argument("seeds", type=int, nargs="+")
    args = parser.parse_args()
    if args.command == "report":
        report()
        return
    for seed in args.seeds:
        if not (RESULTS / f"{args.arm}_{seed}.json").exists():
            peer, shards, tasks = args.peer.resolve(), args.shards.resolve(), args.tasks.resolve()
            train(peer, shards, tasks, args.arm, seed)


if __name__ == "__main__":
    run_and_exit(main)

"""Measure the speed and peak memory of GPT-2 training on this machine.

    python bench.py                          # train_gpt2.py: ms, tok/s, MFU, peak memory
    python bench.py --ladder                 # from plain float32 up to train_gpt2.py
    python bench.py --rung ours --steps 20   # one rung of the ladder; prints JSON with "ms"
    python bench.py -- --micro-batch-size 4  # after --: flags of train_gpt2.py
    torchrun --standalone --nproc_per_node=8 bench.py

Trains on input.txt without evaluations or checkpoints, with the gpt2 preset on a CUDA GPU and the
shakespeare preset elsewhere. Times are medians over --steps steps, after 10 warm-up steps. All
rungs but `ours` run a plain training loop with the same batches and optimizers. On a GPU, a step of
the ladder is one micro-batch of 16 sequences, as in Karpathy's lecture."""

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

if __name__ == "__main__":  # read when torch is imported; train_gpt2.py says why
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

import train_gpt2
from support import devices, settings
from support.command_line import parse_args
from support.errors_and_signals import UserError, run_and_exit
from support.files_and_locks import ROOT, atomic_path, check_output, write_text
from support.ranks import Ranks, torchrun_ranks
from support.run_files import read_log, run_entries
from support.shards import open_tokenizer
from train_gpt2 import GPT, DataLoaderLite, GPTConfig, TrainConfig

RUNGS = {  # cumulative, except ours
    "float32": "matmuls in float32",
    "tf32": "matmuls in TF32",
    "bf16": "matmuls in bfloat16",
    "compile": "torch.compile",
    "flash": "fused attention",
    "padded": "vocabulary of 50,304",
    "fused": "fused AdamW",
    "malloc": "freed memory is kept (CPU)",
    "ours": "train_gpt2.py",
}
WARMUP = 10  # steps excluded from the measurement
OFF = ["--eval-every=0", "--hellaswag-every=0", "--sample-every=0", "--save-every=0"]
Row = dict[str, Any]  # the result of one measurement


@dataclass(frozen=True)
class BenchConfig:
    """Measure GPT-2 training. Flags after -- are passed to train_gpt2.py."""

    ladder: bool = False  # measure every rung in its own process, and draw bench_ladder.png
    rung: Literal[*RUNGS] | None = None  # measure one rung of the ladder, and print JSON
    steps: int = 20  # number of steps to measure
    json: str = ""  # output file for the results


def summary(rung: str, device: str, tokens: int, ms: list[float]) -> Row:
    """Return the figures of a rung, given the tokens per step and the time `ms` of each step."""
    low, median, high = np.percentile(ms[WARMUP:], [25, 50, 75]).tolist()
    return {
        "rung": rung,
        "device": device,
        "tokens": tokens,
        "steps": len(ms) - WARMUP,
        "ms": median,
        "ms_quartiles": [low, high],
        "tok_per_sec": 1e3 * tokens / median,
        "peak_memory": devices.peak_memory(),  # bytes
    }


def measure_ours(flags: list[str], steps: int) -> Row:
    """Run train_gpt2.py in this process. Read its log on rank 0. The other ranks exit."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, "--max-steps", str(WARMUP + steps), "--log-dir", folder, "--no-plan"]
        status = train_gpt2.main(flags)
        if status or torchrun_ranks()[0] > 0:
            sys.exit(status)
        log = read_log(folder)
        start = run_entries(folder)[-1]
    row = summary("ours", start["device"], start["config"]["total_batch_size"], log["ms"][1])
    return row | {"mfu": float(np.median(log["mfu"][1][WARMUP:]))}


def read_config(flags: list[str]) -> TrainConfig:
    """Return the settings of train_gpt2.py with these flags."""
    presets, fixed = train_gpt2.PRESETS, train_gpt2.MUST_NOT_CHANGE
    with contextlib.redirect_stdout(sys.stderr):
        return settings.read_config(
            flags, TrainConfig, presets, fixed, GPTConfig, train_gpt2.tokens_per_epoch
        )


def rungs_of(run: TrainConfig, device: torch.device) -> list[str]:
    """Return the rungs available on this device, up to the run's precision."""
    precision, _ = devices.choose_precision(run.dtype, device)
    available = {
        "tf32": precision in ("tf32", "bfloat16") and devices.has_tf32(device),
        "bf16": precision == "bfloat16",
        "compile": devices.wants_compile(run.compile, device),
        "malloc": device.type == "cpu",
    }
    return [rung for rung in RUNGS if available.get(rung, True)]


def measure_plain(rung: str, run: TrainConfig, steps: int) -> Row:
    """Train in a plain loop with all changes up to `rung`."""
    device = devices.choose_device(run.device)
    changes = rungs_of(run, device)
    if rung not in changes:
        problem = "not available on this device, or needs -- --dtype or -- --compile on"
        raise UserError(f"--rung {rung}: {problem}")
    changes = changes[: changes.index(rung) + 1]
    precision = "float32"
    if "tf32" in changes:
        precision = "tf32"
    if "bf16" in changes:
        precision = "bfloat16"
    dtype = devices.dtype_of(precision)
    devices.allow_tf32(precision, device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    attention = contextlib.nullcontext()
    if "flash" not in changes:
        attention = sdpa_kernel(SDPBackend.MATH)  # materializes the (T, T) matrices
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # or it would use float32
    shape = train_gpt2.model_config(run, open_tokenizer(run.data), init_folder=None)
    if "padded" in changes:
        shape = replace(shape, vocab_size=50_304)
    model = GPT(shape).to(device)

    def loss_function(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    compiled = "compile" in changes
    if compiled:
        loss_function = torch.compile(loss_function, dynamic=False)
    optimizers = train_gpt2.configure_optimizers(model, run, dtype)
    if "fused" not in changes:
        for group in optimizers[-1].param_groups:  # AdamW's
            group["fused"] = None  # torch's default choice

    if "malloc" in changes:
        devices.keep_freed_memory()
    one_rank = Ranks(rank=0, world_size=1, device=device)
    B, micro_steps = train_gpt2.choose_micro_batch(run, one_rank, compiled)
    loader = DataLoaderLite(run.data, "train", B, run.seq_len, seed=run.seed, shuffle=run.shuffle)
    ms = []
    with attention:
        for _ in range(WARMUP + steps):
            began = time.perf_counter()
            for _ in range(micro_steps):
                x, y = loader.next_batch()
                with autocast:
                    loss = loss_function(x.to(device), y.to(device)) / micro_steps
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), run.grad_clip or math.inf)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            norm.item()  # waits for the device
            ms.append(1e3 * (time.perf_counter() - began))
            if len(ms) == 1:  # exclude compilation
                devices.reset_peak_memory()
    return summary(rung, f"{device}, {precision}", run.total_batch_size, ms)


def measure_machine() -> dict[str, str]:
    """Return software versions, and the measured throughput of matmuls and memory copies."""
    gpu = torch.cuda.is_initialized()
    device = torch.device("cuda" if gpu else "cpu")
    machine = {"software": f"torch {torch.__version__}, Python {platform.python_version()}"}
    torch.set_float32_matmul_precision("highest")  # the run may have enabled TF32
    dtypes, n, size = [torch.float32, torch.bfloat16], 1024, 2**28
    if gpu:
        dtypes, n, size = [*dtypes, torch.float16], 8192, 2**30
    for dtype in dtypes:
        rate = devices.matmul_flops(device, dtype, n=n)[0] / 1e12
        machine[f"{dtype} matmul"] = f"{rate:,.3g} TFLOP/s, {n} x {n}"
    a, b = torch.zeros(2, size // 4, device=device)
    timer = Timer("b.copy_(a)", globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
    rate = 2e-9 * size / timer.blocked_autorange().median
    return machine | {"memory copy": f"{rate:,.1f} GB/s, read plus written"}


def columns(row: Row) -> dict[str, str]:
    """Return the formatted figures of a measurement by name."""
    return {
        "ms per step": f"{row['ms']:,.1f}",
        "quartiles": "{:,.1f} to {:,.1f}".format(*row["ms_quartiles"]),
        "tok/s": f"{row['tok_per_sec']:,.0f}",
        "peak memory": f"{row['peak_memory'] / 1e9:.2f} GB" if row["peak_memory"] else "–",
    }


def measure_ladder(run: TrainConfig, train_flags: list[str], steps: int) -> list[Row]:
    """Measure each rung in its own process. Print a table, and draw bench_ladder.png.

    `train_flags` are the flags after --. The row of a rung that fails says why."""
    titles = ["rung", "what it adds", "ms per step", "quartiles", "tok/s", "peak memory"]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    rungs = rungs_of(run, devices.choose_device(run.device))
    rows = []
    for rung in rungs:
        command = [sys.executable, __file__, "--rung", rung, "--steps", str(steps)]
        command += ["--", *train_flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
            rows.append({"rung": rung, "failed": reason})
            print(f"| {rung} | {reason} |", flush=True)
        else:
            row = json.loads(done.stdout)
            rows.append(row)
            print(f"| {' | '.join([rung, RUNGS[rung], *columns(row).values()])} |", flush=True)
    left_out = [rung for rung in RUNGS if rung not in rungs]
    if left_out:
        print(f"left out (unsupported on this device, or off): {', '.join(left_out)}")
    measured = [row for row in rows if "ms" in row]
    if measured:
        draw(measured, Path("bench_ladder.png"))
    return rows


def draw(rows: list[Row], path: Path) -> None:
    """Draw the milliseconds per step of each rung as a bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        ms, (low, high) = row["ms"], row["ms_quartiles"]
        name = f"{row['rung']}: {RUNGS[row['rung']]}"
        bar = axes.barh(name, ms, color="C0", xerr=[[ms - low], [high - ms]], capsize=4)
        axes.bar_label(bar, [f"{ms:,.0f}"], label_type="center", color="white", weight="bold")
        axes.set_title(f"{row['device']}\n{row['tokens']:,} tokens per step", size="medium")
    axes.invert_yaxis()
    axes.set_xlabel("ms per step: median, with quartiles")
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png")


def main(args: list[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else args
    end = args.index("--") if "--" in args else len(args)
    config, train_flags = parse_args(BenchConfig, args[:end]), args[end + 1 :]
    if config.steps < 1:
        raise UserError(f"--steps {config.steps}: must be at least 1")
    if (config.ladder or config.rung) and torchrun_ranks()[2] > 1:
        raise UserError("--ladder and --rung measure one device: run them without torchrun")
    check_output(config.json)
    requested = read_config(train_flags).device
    gpu = requested in ("auto", "cuda") and torch.cuda.is_available()
    flags = ["--preset", "gpt2" if gpu else "shakespeare", "--data", str(ROOT / "input.txt"), *OFF]
    if gpu and (config.ladder or config.rung):
        flags += ["--micro-batch-size", "16", "--total-batch-size", str(16 * 1024)]
    flags += train_flags
    run = read_config(flags)
    if config.ladder:
        result = measure_ladder(run, train_flags, config.steps)
    elif config.rung:
        with contextlib.redirect_stdout(sys.stderr):  # keep stdout clean for the JSON
            if config.rung == "ours":
                result = measure_ours(flags, config.steps)
            else:
                result = measure_plain(config.rung, run, config.steps)
        print(json.dumps(result, indent=1))
    else:
        result = measure_ours(flags, config.steps)
        result["machine"] = measure_machine()
        rows = columns(result) | {"MFU": f"{result['mfu']:.1%}"} | result["machine"]
        print("\n" + "\n".join(f"{name:>22}: {value}" for name, value in rows.items()))
    if config.json:
        write_text(config.json, json.dumps(result, indent=1) + "\n")
    return int(config.ladder and any("failed" in row for row in result))


if __name__ == "__main__":
    run_and_exit(main)

"""Benchmarks GPT-2 training on this machine, with train_gpt2.py's own training loop.

    python bench.py                          # ceilings, speed, MFU, peak memory, time by part
    python bench.py --rung ours --steps 20   # one rung of the ladder; prints JSON with "ms"
    python bench.py --ladder                 # from plain float32 up to train_gpt2.py
    python bench.py --report bench/h100      # everything, into a folder; continues after a stop
    python bench.py -- --preset gpt2 --micro-batch-size 2    # after --: flags of train_gpt2.py
    torchrun --standalone --nproc_per_node=8 bench.py        # a step on eight ranks

A measurement is a training run of --steps steps after 10 warm-up steps, of one micro-batch of B x T
tokens per rank; ms, tok/s and MFU are medians from its log.txt. The model: preset gpt2 with B = 16
on CUDA, elsewhere shakespeare with 512 tokens per step."""

import io
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, schedule
from torch.utils.benchmark import Timer

import train_gpt2
from hellaswag import check_writable
from support import cli, devices, files
from support.checkpoints import list_checkpoints
from support.errors import RunError, UserError, first_line
from support.run_log import read_log
from support.tokenizer import VOCAB_SIZE
from train_gpt2 import GPT, GPTConfig, Ranks, TrainConfig, Training, new_model

ROOT = Path(__file__).parent
# Each rung keeps the changes of those before it, except ours. ms per step on an A100 with B = 16,
# T = 1024, from Karpathy 2024, "Let's reproduce GPT-2 (124M)".
RUNGS: dict[str, int | None] = {
    "float32": 1000,  # matmuls in float32
    "bf16": 300,  # autocast to bfloat16
    "compile": 130,  # torch.compile of the whole model
    "flash": 96,  # fused attention
    "padded": 93,  # vocabulary padded to 50,304
    "fused": 90,  # fused AdamW
    "ours": None,  # train_gpt2.py
}
OFF = ["--eval-every", "0", "--hellaswag-every", "0", "--sample-every", "0", "--save-every", "0"]
WARMUP = 10  # steps
LIMIT = 480  # seconds per job
PADDED = VOCAB_SIZE + -VOCAB_SIZE % 64
Row = dict[str, Any]


@dataclass(frozen=True)
class BenchConfig:
    """Benchmarks GPT-2 training. After -- come flags of train_gpt2.py."""

    rung: Literal[*RUNGS] | None = None  # measure one rung of the ladder and print JSON
    ladder: bool = False  # measure every rung
    report: str = ""  # folder for a report on this machine; an interrupted one is continued
    only: str = ""  # comma-separated: only jobs or rungs with one of these in their names
    minutes: float = 0.0  # start no new job after this many minutes; 0: no limit
    steps: int = 20  # steps to measure, after the warm-up
    json: str = ""  # file for the results


def read_config(args: list[str]) -> tuple[BenchConfig, list[str]]:
    """The flags of this script, and those of train_gpt2.py for the run to measure."""
    end = args.index("--") if "--" in args else len(args)
    config, given = cli.parse_args(BenchConfig, args=args[:end]), args[end + 1 :]
    if config.steps < 1:
        raise UserError(f"--steps {config.steps}: must be at least 1")
    if not config.minutes >= 0:
        raise UserError(f"--minutes {config.minutes:g}: must be at least 0")
    if config.only and not (config.ladder or config.report):
        raise UserError("--only: needs --report or --ladder")
    one_device = config.ladder or config.report or config.rung not in (None, "ours")
    if one_device and cli.torchrun_ranks()[2] > 1:
        raise UserError("--ladder, --report and lower rungs measure one device: without torchrun")
    if config.json:
        check_writable(config.json)
    gpu = uses_gpu(given)
    preset = "gpt2" if gpu else "shakespeare"
    data = cli.shown(train_gpt2.read_config([]).data)  # a bare run's data
    flags = ["--preset", preset, "--data", data, *OFF, *given]
    run = train_gpt2.read_config(flags)
    if run.plan:
        raise UserError("--plan: trains nothing, so there is nothing to measure")
    B = 16 if gpu else max(512 // run.seq_len, 1)
    return config, with_batch(flags, run.micro_batch_size or B)


def uses_gpu(flags: list[str]) -> bool:
    return torch.cuda.is_available() and train_gpt2.read_config(flags).device in ("auto", "cuda")


def with_batch(flags: list[str], B: int) -> list[str]:
    """The flags with a step of one micro-batch of B sequences per rank."""
    tokens = B * train_gpt2.read_config(flags).seq_len * cli.torchrun_ranks()[2]
    return [*flags, "--micro-batch-size", str(B), "--total-batch-size", str(tokens)]


# --------------------------------------------------------------------------------------------------
# One measurement


def plain_loss(x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats. x (B, T, C), wte (V, C), targets (B, T)"""
    return F.cross_entropy(F.linear(x, wte).flatten(0, 1), targets.flatten())


class PlainGPT(GPT):
    """The model of the rungs below ours: it always computes all logits."""

    def __init__(self, config: GPTConfig, changes: list[str]):
        super().__init__(config)
        self.loss_function = plain_loss
        if "padded" in changes:
            self.wte = nn.Embedding(PADDED, config.n_embd)
            nn.init.normal_(self.wte.weight, std=0.02)
        if "compile" in changes:
            self.compile(dynamic=False)

    def prepare(self, compiled: bool = False, low_memory: bool = False) -> None:
        """Would choose another loss and compile the blocks."""


def precision_of(run: TrainConfig) -> tuple[torch.dtype, str]:
    """devices.choose_precision for such a run."""
    device = devices.choose_device(run.device)
    with torch.device("meta"):  # allocates nothing
        parameters = new_model(run, Ranks(0, 1, device)).num_parameters()
    return devices.choose_precision(run.dtype, device, parameters)


def rungs_of(flags: list[str]) -> list[str]:
    """The rungs that apply: bf16 and compile only where train_gpt2.py uses them on this device."""
    run = train_gpt2.read_config(flags)
    names = list(RUNGS)
    if precision_of(run)[0] != torch.bfloat16:
        names.remove("bf16")
    if not run.compile:
        names.remove("compile")
    return names


def measure(flags: list[str], rung: str, steps: int) -> Row:
    """Trains in this process and reads log.txt; ranks other than 0 exit."""
    names = rungs_of(flags)
    if rung not in names:
        raise UserError(f"--rung {rung}: train_gpt2.py does not use it on this device")
    ours = rung == "ours"
    changes = []  # those of this rung and the ones before it
    model = None
    if not ours:
        changes = names[: names.index(rung) + 1]
        dtype = "bfloat16" if "bf16" in changes else "float32"
        flags = [*flags, "--no-compile", "--dtype", dtype]
        cpu = Ranks(0, 1, torch.device("cpu"))
        model = PlainGPT(new_model(train_gpt2.read_config(flags), cpu).config, changes)
    run = train_gpt2.read_config(flags)
    rank, local_rank, world_size = cli.torchrun_ranks()
    device = devices.choose_device(run.device, local_rank, world_size)
    last = WARMUP + steps
    profiled = 3 if ours else 0  # one more to start the profiler, and two for it
    result = {
        "rung": rung,
        "changes": changes,
        "world_size": world_size,
        "B": run.micro_batch_size,
        "T": run.seq_len,
        "steps": steps,
    }
    profiler = profile(
        schedule=schedule(wait=last + 1, warmup=1, active=2), record_shapes=True, acc_events=True
    )

    def before_step(step: int, training: Training) -> None:
        if step == 0 and not ours and "fused" not in changes:
            for group in training.optimizer.param_groups:
                group["fused"] = None  # as PyTorch chooses by default
        if step == last:
            result["device"] = training.description
            peak, source = devices.peak_flops(device, training.dtype)
            result["mfu_of"] = f"{peak / 1e12:,.3g} TFLOP/s ({source})"
            result["parameters"] = training.model.num_parameters()
            result["flops_per_token"] = training.model.flops_per_token(run.seq_len)
            result["peak_memory"] = devices.peak_memory()
        profiler.step()

    attention = nullcontext()
    if not ours and "flash" not in changes:
        attention = sdpa_kernel(SDPBackend.MATH)  # with its (T, T) matrices in memory
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # or they'd be in float32
    output = redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, attention, output, profiler:
        more = ["--max-steps", str(last + profiled), "--log-dir", folder]
        status = train_gpt2.main([*flags, *more], model, before_step)
        if status or rank:
            sys.exit(status)  # after a signal; or not rank 0
        log = {stream: values for stream, (_, values) in read_log(folder).items()}
    for stream in ("ms", "tok_per_sec", "mfu"):
        result[stream] = statistics.median(log[stream][WARMUP:last])
    result["ms_quartiles"] = np.percentile(log["ms"][WARMUP:last], [25, 75]).tolist()
    if ours:
        step_ms = statistics.mean(log["ms"][-2:])
        events = profiler.events()
        result["parts_ms"] = time_by_part(events, step_ms, run.n_embd)
        result["kernels"] = largest_kernels(events)
    return result


def time_by_part(events: Any, step_ms: float, C: int) -> dict[str, float]:
    """Milliseconds per step by part, from the events of two steps.

    An operation belongs to the first part whose pattern matches its name and input shapes, or those
    of a caller. The rest of a step is waiting for Python, launches and data."""
    patterns = {
        "optimizer": r"^Optimizer\.|_foreach_|linalg_vector_norm|_fused_adam",
        "head and loss": rf"\b({VOCAB_SIZE}|{PADDED})\b|ChunkedLoss|softmax|nll_loss",  # and wte
        "MLP": rf"gelu|triton.*tanh|mm .*\b{4 * C}\b",
        "attention": r"attention|flash|fmha|mm ",  # the other matmuls are its projections
        "other": "",
    }
    events = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    gpu = any(e.self_device_time_total for e in events)
    parts = dict.fromkeys(patterns, 0.0)
    for e in events:
        if e.name.startswith("ProfilerStep"):
            continue
        text, caller = "", e
        while caller:
            text += f"{caller.name} {caller.input_shapes}\n"
            caller = caller.cpu_parent
        part = next(part for part in patterns if re.search(patterns[part], text, re.MULTILINE))
        parts[part] += (e.self_device_time_total if gpu else e.self_cpu_time_total) / 2e3
    return parts | {"waiting": max(step_ms - sum(parts.values()), 0.0)}


def largest_kernels(events: Any) -> list[tuple[str, float, float]]:
    """(name, calls, ms) per step of the 40 that take longest, from the events of two steps.

    On a CPU they are operations, without those that they call."""
    events = [e for e in events if not e.is_user_annotation]  # such as the profiler's own steps
    kernels = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    calls: Counter = Counter()
    ms: Counter = Counter()
    for e in kernels or events:
        us = e.time_range.elapsed_us() if kernels else e.self_cpu_time_total
        calls[e.name] += 1 / 2
        ms[e.name] += us / 2e3
    return [(name, calls[name], total) for name, total in ms.most_common(40)]


def measure_machine(flags: list[str]) -> Row:
    """The machine and its ceilings."""
    run = train_gpt2.read_config(flags)
    device = devices.choose_device(run.device)
    dtype, description = precision_of(run)
    proc = Path("/proc/cpuinfo")  # Linux's
    cpu = re.search(r"model name\s*:\s+(.+)", proc.read_text() if proc.exists() else "")
    machine = {
        "device": description,
        "CPU": f"{cpu[1] if cpu else platform.processor()}, {os.cpu_count()} cores",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        **devices.gpu_software(device, dtype),
    }
    n, size = (8192, 2**30) if device.type == "cuda" else (1024, 2**28)
    for precision in {torch.float32, dtype}:
        rate = devices.matmul_flops(device, precision, n)
        machine[f"{precision} matmul, {n} x {n}"] = f"{rate / 1e12:,.3g} TFLOP/s"
    a, b = torch.zeros(2, size // 4, device=device)
    timer = Timer("b.copy_(a)", globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
    rate = 2e-9 * size / timer.blocked_autorange().median
    return machine | {"memory copy": f"{rate:,.1f} GB/s, read plus written"}


# --------------------------------------------------------------------------------------------------
# Ladder and report: a list of jobs


def run_process(*args: Any) -> str:
    """The output of `python ARGS`. A RunError has its last line."""
    command = [sys.executable, *map(str, args)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise RunError(f"stopped after {LIMIT // 60} minutes") from None
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise RunError(output.splitlines()[-1].removeprefix("error: "))
    return done.stdout


def job_tests(chosen: str) -> Row:
    tests = ROOT / "tests" / "test_gpu.py"
    output = run_process("-m", "pytest", "-o", "addopts=", tests, "-k", chosen)
    return {"result": output.splitlines()[-1].strip("= ")}


def job_rung(flags: list[str], rung: str, steps: int) -> Row:
    args = ["--rung", rung, "--steps", steps, "--", *flags]
    return json.loads(run_process(ROOT / "bench.py", *args))


def job_run(flags: list[str], log_dir: Path) -> Row:
    """Trains 300 steps with the largest micro-batch."""
    tokens = 262_144 if uses_gpu(flags) else train_gpt2.read_config(flags).total_batch_size
    more = f"""--micro-batch-size 0 --total-batch-size {tokens} --max-steps 300 --warmup-steps 30
        --save-every 50 --eval-every 100 --eval-tokens {max(tokens, 4096)} --resume"""
    run_process(ROOT / "train_gpt2.py", *flags, *more.split(), "--log-dir", log_dir)
    for checkpoint in list_checkpoints(log_dir):
        shutil.rmtree(checkpoint)
    log = read_log(log_dir)
    rate = statistics.median(log["tok_per_sec"][1])
    losses = [f"{loss:.4f} at step {step}" for step, loss in zip(*log["val"], strict=True)]
    return {
        "speed": f"{rate:,.0f} tok/s in steps of {tokens:,} tokens",
        "validation loss": ", ".join(losses),
    }


def jobs_of(config: BenchConfig, flags: list[str]) -> dict[str, Callable[[], Row]]:
    """The jobs of the ladder or the report, most informative first."""
    names, steps = rungs_of(flags), config.steps
    ladder = {f"ladder/{name}": partial(job_rung, flags, name, steps) for name in names}
    if config.ladder:
        return ladder
    B = train_gpt2.read_config(flags).micro_batch_size

    def speed(size: int, rung: str = "ours") -> Callable[[], Row]:
        return partial(job_rung, with_batch(flags, size), rung, steps)

    jobs = {
        "machine": partial(measure_machine, flags),
        f"speed/B={4 * B}": speed(4 * B),
        "right/tests": partial(job_tests, "not resumed"),
        f"fused/B={4 * B}": speed(4 * B, "fused"),  # close to build-nanogpt, compiled
        "run": partial(job_run, flags, Path(config.report, "run")),
        "right/resume": partial(job_tests, "resumed"),
    }
    for size in (8 * B, 2 * B, B):
        jobs[f"speed/B={size}"] = speed(size)
    return jobs | ladder


def read_results(path: Path, of: str) -> dict[str, Row]:
    """The lines of results.jsonl by job; all must be of this device and these flags."""
    rows = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                rows[row["job"]], other = row, row["of"]
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{path}: damaged; remove the line {line[:40]!r}") from None
            if other != of:
                raise UserError(f"{path} is from {other}, but this run is {of}: use another folder")
    return rows


def work(config: BenchConfig, flags: list[str]) -> dict[str, Row]:
    """Runs the jobs that have no result yet."""
    began = time.monotonic()
    folder = Path(config.report)
    path = folder / "results.jsonl"
    dtype, description = precision_of(train_gpt2.read_config(flags))
    chip = description.rpartition(",")[0]  # without the reason, which may be measured
    of = f"{chip}, {dtype}; {shlex.join(flags)}; --steps {config.steps}"
    jobs = jobs_of(config, flags)
    wanted = config.only.replace(",", " ").split() or [""]  # "" is part of every name
    for word in wanted:
        if not any(word in name for name in jobs):
            raise UserError(f"--only {word}: not in any of {', '.join(jobs)}")
    rows = {}
    if config.report:
        folder.mkdir(parents=True, exist_ok=True)
        rows = read_results(path, of)
    for name, job in jobs.items():
        finished = rows.get(name, {}).get("status") == "done"
        if finished or not any(word in name for word in wanted):
            continue
        if config.minutes and time.monotonic() - began > 60 * config.minutes:
            print(f"{config.minutes:g} minutes are over; the same command continues with {name}")
            break
        row = {"job": name, "of": of, "date": time.strftime("%Y-%m-%d")}
        try:
            row |= {"status": "done", "result": job()}
        except (UserError, RunError, RuntimeError, OSError) as error:
            row |= {"status": "failed", "reason": first_line(error)}
        rows[name] = row
        torch.cuda.empty_cache()  # for the next job's process
        print(f"{name}: {row['status']} {row.get('reason', '')}")
        if config.report:
            files.write_text(path, "".join(json.dumps(row) + "\n" for row in rows.values()))
            files.write_text(folder / "report.md", page(rows))
    return rows


LINE = "| {:18} | {:>3} | {:>8} | {:18} | {:>9} | {:>5} | {:6} | {:8} |\n"


def page(rows: dict[str, Row]) -> str:
    """report.md, also printed: made from the lines of results.jsonl alone."""
    table = LINE.format("job", "B", "ms", "quartiles", "tok/s", "MFU", "memory", "A100, ms")
    table += re.sub(r"[^|\n]", "-", table)
    text, parts, kernels, note = "# Benchmarks\n", "", "", ""
    for name, row in rows.items():
        r = row["result"] if row["status"] == "done" else {"failed": row["reason"]}
        if "ms" not in r:
            text += f"\n## {name}\n\n" + "".join(f"- {key}: {r[key]}\n" for key in r)
            continue
        quartiles = "{:,.1f} to {:,.1f}".format(*r["ms_quartiles"])
        memory = f"{r['peak_memory'] / 1e9:.1f} GB" if r["peak_memory"] else "n/a"
        published = RUNGS.get(name.removeprefix("ladder/")) or ""
        mfu = f"{r['mfu']:.1%}" if r["mfu"] <= 1 else "–"
        speed = (f"{r['ms']:,.1f}", quartiles, f"{r['tok_per_sec']:,.0f}", mfu)
        table += LINE.format(name, r["B"], *speed, memory, published)
        if "parts_ms" in r:
            times = [f"{part} {ms:,.1f}" for part, ms in r["parts_ms"].items()]
            parts += f"- {name}: {', '.join(times)}\n"
            if not kernels:  # those of the other jobs are in results.jsonl
                kernels = f"\n## Kernels of {name}, per step\n\n| ms | calls | |\n|---|---|---|\n"
                for kernel, calls, ms in r["kernels"]:
                    kernels += f"| {ms:,.3f} | {calls:g} | `{kernel[:100]}` |\n"
        note = (
            f"{row['of']}\n\n{r['parameters']:,} parameters, {r['flops_per_token']:,} FLOPs per "
            f"token, T = {r['T']}, ranks: {r['world_size']}. Medians of {r['steps']} steps after "
            f"{WARMUP}. 100 % MFU = {r['mfu_of']}.\n"
        )
    if note:
        text += f"\n## Speed\n\n{table}\n{note}\n## Time by part, ms\n\n{parts}{kernels}"
    return text


def main(args: list[str] | None = None) -> int:
    config, flags = read_config(sys.argv[1:] if args is None else args)
    failed = False
    if config.ladder or config.report:
        result = work(config, flags)
        print("\n" + page(result))
        failed = any(row["status"] == "failed" for row in result.values())
    elif config.rung:
        result = measure(flags, config.rung, config.steps)
        print(json.dumps(result, indent=1))
    else:
        speed = measure(flags, "ours", config.steps)
        result = {"machine": measure_machine(flags), "speed": speed}
        row = {"of": shlex.join(flags), "status": "done"}
        print(page({name: {**row, "result": part} for name, part in result.items()}))
    if config.json:
        files.write_text(config.json, json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the process of a job as well
    cli.run(main)

"""Benchmarks GPT-2 training on this machine, with train_gpt2.py's own training loop.

    python bench.py                          # ceilings, speed, MFU, peak memory, time by part
    python bench.py --rung ours --steps 20   # one rung of the ladder; prints JSON with "ms"
    python bench.py --ladder                 # from plain float32 up to train_gpt2.py, with a picture
    python bench.py --report bench/h100      # everything, into a folder; continues where it was interrupted
    python bench.py -- --preset gpt2 --micro-batch-size 2 --no-compile    # after --: flags of train_gpt2.py
    torchrun --standalone --nproc_per_node=8 bench.py                     # a step on eight ranks

A measurement is a training run in a temporary folder: one micro-batch of B x T tokens per rank and
step, no evaluation, no checkpoints. ms, tok_per_sec and mfu are medians of what log.txt says of
--steps steps, after a warm-up of 10 steps on a GPU and 3 elsewhere. The ladder and the report start
a process for each. The model: preset gpt2 with CUDA, B = 16; elsewhere shakespeare, for a report 2
layers of 32 channels and 128 tokens."""

import ctypes
import io
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import SkipTest
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile, schedule
from torch.utils.benchmark import Timer

import train_gpt2
from support import cli, devices, files
from support.cli import RunError, UserError
from support.run_folder import list_checkpoints, read_log
from train_gpt2 import GPT, ROOT, SHAKESPEARE, SHARDS_FOLDER, VOCAB_SIZE, CausalSelfAttention

# name: (what it changes, ms per step on one A100 with B = 16, T = 1024 as published by Karpathy
# 2024, "Let's reproduce GPT-2 (124M)"). Each rung keeps the changes of the rungs before it, except
# ours.
RUNGS: dict[str, tuple[str, int | None]] = {
    "float32": ("matmuls in float32", 1000),
    "bf16": ("autocast to bfloat16", 300),
    "compile": ("torch.compile of the whole model", 130),
    "flash": ("fused attention", 96),
    "padded": ("vocabulary padded to 50,304", 93),
    "fused": ("fused AdamW", 90),
    "ours": ("train_gpt2.py", None),
}
OFF = [
    word for part in ("eval", "hellaswag", "sample", "save") for word in (f"--{part}-every", "0")
]
PADDED = VOCAB_SIZE + -VOCAB_SIZE % 64
Row = dict[str, Any]


@dataclass(frozen=True)
class BenchConfig:
    """Benchmarks GPT-2 training, by default a step and ceilings. After `--` come train_gpt2.py's
    flags."""

    rung: Literal[*RUNGS] | None = None  # measure one rung of the ladder and print JSON
    ladder: bool = False  # measure every rung; draws bench_ladder.png
    report: str = ""  # folder for a report on this machine; an interrupted one is continued
    only: str = ""  # comma-separated: only these jobs of the report, or rungs of the ladder
    minutes: float = 0.0  # begin no job after this many minutes; 0: no limit
    steps: int = 20  # steps to measure, after the warm-up
    json: str = ""  # file for the results


def read_config(args: list[str]) -> tuple[BenchConfig, list[str]]:
    """The command line, and train_gpt2.py's flags for the run to measure. Raises UserError."""
    end = args.index("--") if "--" in args else len(args)
    config, given = cli.parse_args(BenchConfig, args=args[:end]), args[end + 1 :]
    if config.steps < 1:
        raise UserError(f"--steps {config.steps}: must be at least 1")
    if cli.torchrun_ranks()[2] > 1 and (
        config.ladder or config.report or config.rung not in (None, "ours")
    ):
        raise UserError(
            "--ladder, --report and lower rungs are for one device: start them without torchrun"
        )
    if config.json:
        cli.check_writable(config.json)
    cuda = torch.cuda.is_available() and train_gpt2.read_config(given).device in ("auto", "cuda")
    small = (
        ["--n-layer", "2", "--n-head", "2", "--n-embd", "32"] if config.report and not cuda else []
    )
    data = (
        SHARDS_FOLDER
        if any(Path(SHARDS_FOLDER).glob("*_train_*"))
        else cli.shown(SHAKESPEARE["data"])
    )
    given = ["--preset", "gpt2" if cuda else "shakespeare", "--data", data, *small, *OFF, *given]
    run = train_gpt2.read_config(given)
    if not Path(run.data).exists():
        raise UserError(f"--data {run.data}: does not exist")
    B = 16 if cuda else max((128 if config.report else 512) // run.seq_len, 1)
    return config, with_batch(given, run.micro_batch_size or B)


def with_batch(flags: list[str], B: int) -> list[str]:
    """The flags with a step of one micro-batch of B sequences per rank."""
    tokens = B * train_gpt2.read_config(flags).seq_len * cli.torchrun_ranks()[2]
    return [*flags, "--micro-batch-size", str(B), "--total-batch-size", str(tokens)]


class PlainAttention(CausalSelfAttention):
    """The same attention with its (T, T) matrices in memory. (B, T, C) -> (B, T, C)"""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            self.c_attn(x).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        )  # (B, nh, T, hs)
        weights = q @ k.mT / q.size(-1) ** 0.5  # (B, nh, T, T)
        future = torch.ones(weights.shape[2:], dtype=torch.bool, device=x.device).triu(1)
        y = weights.masked_fill(future, -torch.inf).softmax(-1) @ v  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)


def plain_loss(x: Tensor, wte: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) and their mean cross-entropy in nats. x (B, T, C), wte (V, C), targets (B,
    T)"""
    logits = F.linear(x, wte)
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_model(model: GPT, changes: list[str]) -> GPT:
    """Turns train_gpt2.py's model into that of a lower rung; `changes`: this rung's and those
    before it."""
    for block in model.h if "flash" not in changes else ():
        block.attn.__class__ = PlainAttention  # with the same parameters
    if "padded" in changes:
        model.wte = nn.Embedding(PADDED, model.config.n_embd)
        nn.init.normal_(model.wte.weight, std=0.02)
    model.loss_function = plain_loss
    model.prepare = lambda compiled: model.compile(dynamic=False) if "compile" in changes else None
    return model


def left_out(flags: list[str]) -> dict[str, str]:
    """The rungs that do not apply to this device, with the reason. Raises UserError."""
    run = train_gpt2.read_config(flags)
    dtype = devices.choose_device(run.device, run.dtype, cli.torchrun_ranks()[1])[1]
    reasons = (
        {}
        if dtype == torch.bfloat16
        else {"bf16": f"train_gpt2.py computes in {str(dtype)[6:]} here"}
    )
    return reasons if run.compile else reasons | {"compile": "train_gpt2.py does not compile here"}


def measure(flags: list[str], rung: str, steps: int) -> Row:
    """Trains and reads log.txt; ranks other than 0 exit. Raises UserError.

    ms, tok_per_sec (of all ranks) and mfu are medians. peak_memory: in bytes, of tensors on a CUDA
    device, elsewhere of the process; None if unknown. parts_ms, for ours alone: time by part of two
    more steps."""
    absent, names = left_out(flags), list(RUNGS)
    if rung in absent:
        raise UserError(f"--rung {rung}: {absent[rung]}")
    changes = [
        name for name in names[: names.index(rung) + 1] if name not in absent and rung != "ours"
    ]
    if changes:
        flags = [
            *flags,
            "--dtype",
            "bfloat16" if "bf16" in changes else "float32",
            "--compile" if "compile" in changes else "--no-compile",
        ]
    run = train_gpt2.read_config(flags)
    warmup = 10 if torch.cuda.is_available() and run.device in ("auto", "cuda") else 3
    last, found = warmup + steps, {}
    profiler = profile(
        schedule=schedule(wait=0, warmup=1, active=2), record_shapes=True, acc_events=True
    )
    new_model, configure_optimizer = train_gpt2.new_model, train_gpt2.configure_optimizer

    def optimizer_of(*args: Any) -> Any:
        optimizer = configure_optimizer(*args)
        for group in optimizer.param_groups if changes and "fused" not in changes else ():
            group["fused"] = None  # AdamW's default
        return optimizer

    def before_step(
        step: int, model: GPT, *rest: Any
    ) -> None:  # instead of evaluate: nothing of it is due
        ddp, status = rest[3], Path("/proc/self/status")
        if step == last:
            memory = re.search(r"VmHWM:\s+(\d+)", status.read_text() if status.exists() else "")
            peak, source = devices.peak_flops(ddp.device, ddp.dtype)
            found.update(
                device=ddp.description,
                world_size=ddp.world_size,
                parameters=model.num_parameters(),
                flops_per_token=model.flops_per_token(run.seq_len),
                peak_memory=torch.cuda.max_memory_allocated() or (memory and 1024 * int(memory[1])),
                mfu_of=f"{peak / 1e12:,.3g} TFLOP/s ({source})",
            )
        if step >= last and not changes:
            profiler.start() if step == last else profiler.step()

    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        patch.multiple(
            train_gpt2,
            evaluate=before_step,
            configure_optimizer=optimizer_of,
            new_model=lambda config: (
                plain_model(new_model(config), changes) if changes else new_model(config)
            ),
        ),
    ):
        flags = [*flags, "--max-steps", str(last if changes else last + 3), "--log-dir", folder]
        if (status := train_gpt2.main(flags)) or cli.torchrun_ranks()[0]:
            sys.exit(status)  # after a signal, or another rank's
        log = {stream: values for stream, (_, values) in read_log(folder).items()}
    result = {
        "rung": rung,
        "changes": changes,
        "B": run.micro_batch_size,
        "T": run.seq_len,
        "steps": steps,
        "warmup": warmup,
        "torch": torch.__version__,
        **found,
    }
    result |= {
        stream: statistics.median(log[stream][warmup:last])
        for stream in ("ms", "tok_per_sec", "mfu")
    }
    result["ms_quartiles"] = statistics.quantiles(
        2 * log["ms"][warmup:last], n=4, method="inclusive"
    )[::2]
    if not changes:
        result["parts_ms"] = time_by_part(
            profiler.events(), statistics.mean(log["ms"][-2:]), run.n_embd
        )
    return result


def part_of(event: Any, C: int) -> str:
    """The part of a step that a profiled operation belongs to, by names and shapes of it and its
    callers."""
    if event is None:
        return "other"
    name, sizes = event.name, set(map(int, re.findall(r"\d+", str(event.input_shapes))))
    parts = {  # the embedding counts as head and loss; of the other matmuls those with 4 C are the MLP's
        "optimizer": re.search(r"^Optimizer\.|_foreach_|linalg_vector_norm|_fused_adam", name),
        "head and loss": sizes & {VOCAB_SIZE, PADDED}
        or re.search("ChunkedLoss|softmax|nll_loss", name),
        "MLP": re.search("gelu|triton.*tanh", name) or (4 * C in sizes and name.endswith("mm")),
        "attention": re.search(r"attention|flash|fmha|::(b|baddb|add|)mm$", name),
    }
    caller = part_of(event.cpu_parent, C)
    return (
        caller if caller == "optimizer" else next((part for part in parts if parts[part]), caller)
    )


def time_by_part(events: Any, step_ms: float, C: int) -> dict[str, float]:
    """Milliseconds per step by part, from the events of two steps: that of an operation's kernels,
    on a CPU its own in the main thread. Waiting is the rest: for Python, launches and data."""
    events = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    gpu = any(e.self_device_time_total for e in events)
    main = next(e.thread for e in events if e.name.startswith("Optimizer."))
    parts = dict.fromkeys(("attention", "MLP", "head and loss", "optimizer", "other"), 0.0)
    for e in events:
        if not e.name.startswith("ProfilerStep") and (gpu or e.thread == main):
            parts[part_of(e, C)] += (
                e.self_device_time_total if gpu else e.self_cpu_time_total
            ) / 2e3
    return parts | {"waiting": max(step_ms - sum(parts.values()), 0.0)}


def measure_machine(flags: list[str]) -> dict[str, str]:
    """What the machine is, and its ceilings. Matmuls of random square matrices: the best of up to
    20 within a second; copies: the median over 0.2 s."""
    run = train_gpt2.read_config(flags)
    device, _, description = devices.choose_device(run.device, run.dtype)
    cuda, cpuinfo = device.type == "cuda", Path("/proc/cpuinfo")
    n, size = (8192, 2**30) if cuda else (1024, 2**28)
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "")
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    machine = {
        "device": description,
        "CPU": f"{name[1] if name else '?'}, {os.cpu_count()} cores{load}",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
    }
    for name in (
        "float32",
        "float16" if device.type == "mps" else "bfloat16",
        *("float16", "TF32") * cuda,
    ):
        torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
        rate = devices.matmul_flops(device, getattr(torch, name, torch.float32), n)
        machine[f"{name} matmul, {n} x {n}"] = f"{rate / 1e12:,.3g} TFLOP/s"
    torch.set_float32_matmul_precision("highest")
    a, b = torch.zeros(2, size // 4, device=device)
    timer = Timer("b.copy_(a)", globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
    rate = 2e-9 * size / timer.blocked_autorange().median
    return machine | {"memory copy": f"{rate:,.1f} GB/s, read plus written"}


def run_process(*args: Any, limit: float = 600) -> str:
    """The output of `python ARGS`, which on Linux dies with this process. RunError has its last
    line."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    try:
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=limit,
            preexec_fn=libc and (lambda: libc.prctl(1, 9)),
        )  # PDEATHSIG
    except subprocess.TimeoutExpired:
        raise RunError(f"killed after {limit:.0f} s") from None
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise RunError(output.splitlines()[-1].removeprefix("error: "))
    return done.stdout


def job_rung(flags: list[str], rung: str, steps: int) -> Row:
    if reason := left_out(flags).get(rung):
        raise SkipTest(reason)
    return json.loads(
        run_process(ROOT / "bench.py", "--rung", rung, "--steps", steps, "--", *flags)
    )


def job_compare(flags: list[str], steps: int, bound: float, *flags_of: list[str]) -> Row:
    """Compares the losses of two runs. Resumed, the second begins halfway through the first, and
    norms count, too. Raises RunError if a difference exceeds `bound`."""
    resumed, logs = "--resume" in flags_of[1], []
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *flags,
            "--max-steps",
            steps,
            "--save-every",
            steps // 2 * resumed,
            "--log-dir",
            folder,
        ]
        for more in flags_of:
            output = run_process(ROOT / "train_gpt2.py", *flags, "--warmup-steps", 3, *more)
            logs.append(read_log(folder))
            shutil.rmtree(Path(folder, f"step_{steps:06d}"), ignore_errors=True)
            if "does not work on this machine" in output:
                raise SkipTest("torch.compile does not work on this machine")
    one, two = ([*log["train"][1], *(log["norm"][1] if resumed else ())] for log in logs)
    largest = max(abs(a - b) for a, b in zip(one, two, strict=True))
    text = f"largest difference in {steps} steps {largest:.1e}, allowed {bound}"
    if not largest <= bound:
        raise RunError(text)
    return {"result": f"{text}; {statistics.median(logs[0]['ms'][1]):,.1f} ms per step"}


def job_run(flags: list[str], log_dir: Path) -> Row:
    """300 steps of training, on a GPU of 524,288 tokens; continues where it was interrupted."""
    run, cuda = train_gpt2.read_config(flags), torch.cuda.is_available()
    tokens = (524_288 if Path(run.data).is_dir() else 262_144) if cuda else run.total_batch_size
    flags = [
        *flags,
        "--total-batch-size",
        tokens,
        "--max-steps",
        300,
        "--log-dir",
        log_dir,
        "--resume",
    ]
    more = [
        "--warmup-steps",
        30,
        "--eval-every",
        100,
        "--eval-tokens",
        max(tokens, 4096),
        "--save-every",
        50,
    ]
    run_process(ROOT / "train_gpt2.py", *flags, *more, limit=3600)
    for checkpoint in list_checkpoints(log_dir):
        shutil.rmtree(checkpoint)
    log = read_log(log_dir)
    ms, rate = (statistics.median(log[name][1]) for name in ("ms", "tok_per_sec"))
    return {
        "steps": f"300 of {tokens:,} tokens",
        "speed": f"{ms:,.1f} ms per step, {rate:,.0f} tok/s",
    } | {
        f"validation loss, step {step}": f"{loss:.4f}"
        for step, loss in zip(*log["val"], strict=True)
    }


def jobs_of(
    config: BenchConfig, flags: list[str], rows: dict[str, Row]
) -> dict[str, Callable[[], Row]]:
    """The jobs by name, in order. On a GPU only --deterministic makes a resumed run exact."""
    B, cuda, steps = (
        train_gpt2.read_config(flags).micro_batch_size,
        torch.cuda.is_available(),
        config.steps,
    )
    compare, bound = partial(partial, job_compare, flags), 0.02 if cuda else 1e-3
    pytest = ["-m", "pytest", "-o", "addopts=", ROOT / "tests" / "test_gpu.py"]

    def fastest() -> list[str]:
        done = [
            row["result"]
            for name, row in rows.items()
            if "speed/" in name and row["status"] == "done"
        ]
        return with_batch(
            flags, max(done, key=lambda result: result["tok_per_sec"])["B"] if done else B
        )

    ladder = {f"ladder/{name}": partial(job_rung, flags, name, steps) for name in RUNGS}
    return (
        ladder
        if config.ladder
        else {
            "machine": partial(measure_machine, flags),
            "right/tests": lambda: {"result": run_process(*pytest).splitlines()[-1].strip("= ")},
            "right/compiled": compare(50 if cuda else 10, bound, ["--compile"], ["--no-compile"]),
            "right/resume": compare(8, torch.inf if cuda else 0, [], ["--resume"]),
            "right/resume-deterministic": compare(
                8, 0, ["--deterministic"], ["--deterministic", "--resume"]
            ),
            **{
                f"speed/B={size}": partial(job_rung, with_batch(flags, size), "ours", steps)
                for size in (4 * B, B, 2 * B, 8 * B)
            },
            "profile": lambda: job_rung(fastest(), "ours", steps),
            **ladder,
            "run": lambda: job_run(fastest() if cuda else flags, Path(config.report, "run")),
        }
    )


def work(config: BenchConfig, flags: list[str]) -> dict[str, Row]:
    """Runs the jobs that have no result yet; in a report each leaves a line in results.jsonl."""
    began, folder, run = time.monotonic(), Path(config.report), train_gpt2.read_config(flags)
    of = f"{devices.choose_device(run.device, run.dtype)[2]}; {shlex.join(flags)}; --steps {config.steps}"
    folder.mkdir(parents=True, exist_ok=True)
    path, rows = folder / "results.jsonl", {}
    if config.report and path.exists():
        try:
            rows = {
                row["job"]: row
                for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
            }
            others = {row["of"] for row in rows.values()} - {of}
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}: a damaged line ({cli.first_line(error)}): remove it"
            ) from None
        if others:
            raise UserError(f"{path} is of {others.pop()}; this is {of}: use another folder")
    jobs = jobs_of(config, flags, rows)
    wanted = {word.strip() for word in config.only.split(",") if word.strip()}
    known = {name: {name, *name.split("/")} for name in jobs}  # right/tests is one of right
    if unknown := wanted.difference(*known.values()):
        raise UserError(f"--only {unknown.pop()}: none of {', '.join(jobs)}")
    for name in (name for name in jobs if not wanted or wanted & known[name]):
        if rows.get(name, {}).get("status") in ("done", "skipped"):
            continue
        if config.minutes and time.monotonic() - began > 60 * config.minutes:
            print(f"{config.minutes:g} minutes are over; the same command continues with {name}")
            break
        row, start = {"job": name, "of": of, "date": time.strftime("%Y-%m-%d")}, time.monotonic()
        try:
            row |= {"status": "done", "result": jobs[name]()}
        except SkipTest as reason:
            row |= {"status": "skipped", "reason": str(reason)}
        except (UserError, RunError, RuntimeError, OSError) as error:
            row |= {"status": "failed", "reason": cli.first_line(error)}
        rows[name] = row | {"seconds": round(time.monotonic() - start, 1)}
        torch.cuda.empty_cache()  # of this process, for the next job's
        print(f"{name}: {row['status']} {row.get('reason', '')} ({rows[name]['seconds']} s)")
        if config.report:
            write(path, "".join(json.dumps(row) + "\n" for row in rows.values()))
            write(folder / "report.md", page(rows))
    return rows


def write(path: str | Path, text: str) -> None:
    with files.atomic_write(path, "w") as file:
        file.write(text)


def table(rows: list[Row]) -> str:
    """A Markdown table, aligned for a terminal; the keys of all rows are its head."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [head, *([str(row.get(key, "")) for key in head] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells)


def page(rows: dict[str, Row]) -> str:
    """What is printed, and report.md, from the lines of results.jsonl alone."""
    done = {name: row["result"] for name, row in rows.items() if row["status"] == "done"}
    parts, measured, note = done.get("profile", {}).get("parts_ms", {}), {}, ""
    for name, r in ((name, result) for name, result in done.items() if "ms_quartiles" in result):
        measured[name] = {
            "B": r["B"],
            "T": r["T"],
            "ms": f"{r['ms']:,.1f}",
            "quartiles": " to ".join(f"{ms:,.1f}" for ms in r["ms_quartiles"]),
            "tok/s": f"{r['tok_per_sec']:,.0f}",
            "MFU": f"{r['mfu']:.1%}",
            "peak memory": f"{r['peak_memory'] / 1e9:.2f} GB" if r["peak_memory"] else "n/a",
        }
        note = (
            "{parameters:,} parameters, {flops_per_token:,} FLOPs a token, ranks: {world_size}. Medians "
            "of {steps} steps after {warmup}. MFU 100 % = {mfu_of}."
        ).format(**r)
    sections = {
        "Machine": [{"": name, " ": value} for name, value in done.get("machine", {}).items()],
        "Right": [
            {"": name, " ": result["result"]} for name, result in done.items() if "right/" in name
        ],
        "Speed": [{"": name, **row} for name, row in measured.items() if "ladder/" not in name],
        "Time by part": [
            {"part": part, "ms": f"{ms:,.1f}", "share": f"{ms / sum(parts.values()):.1%}"}
            for part, ms in parts.items()
        ],
        "Ladder": [
            {
                "rung": name,
                "change": change,
                **measured[f"ladder/{name}"],
                "A100, ms": published or "",
            }
            for name, (change, published) in RUNGS.items()
            if f"ladder/{name}" in measured
        ],
        "Training": [{"": name, " ": value} for name, value in done.get("run", {}).items()],
        "Not measured": [
            {"": name, " ": row["status"], "  ": row["reason"]}
            for name, row in rows.items()
            if name not in done
        ],
    }
    text = ["# Benchmarks", *sorted({row["of"] for row in rows.values()}), note]
    text += [f"## {title}\n\n{table(found)}" for title, found in sections.items() if found]
    return "\n\n".join(filter(None, text)) + "\n"


def draw_ladder(rungs: dict[str, Row], path: Path) -> None:
    """A bar for each rung. Only a line where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture of the ladder: pip install matplotlib")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, ms = figure.subplots(), [rung["ms"] for rung in rungs.values()]
    axes.bar_label(
        axes.barh([f"{name}: {RUNGS[name][0]}" for name in rungs], ms), fmt="{:,.0f}", padding=3
    )
    axes.set(xlabel="ms per step", xlim=(0, 1.15 * max(ms)))
    axes.invert_yaxis()
    with files.atomic_path(path) as partial_path:
        figure.savefig(partial_path, format="png")
    print(f"picture: {path}")


def main(args: list[str] | None = None) -> int:
    config, flags = read_config(sys.argv[1:] if args is None else args)
    if config.ladder or config.report:
        result = work(config, flags)
        print("\n" + page(result))
        if rungs := {
            name.removeprefix("ladder/"): row["result"]
            for name, row in result.items()
            if "ladder/" in name and "result" in row
        }:
            draw_ladder(rungs, Path(config.report, "bench_ladder.png"))
        failed = any(row["status"] == "failed" for row in result.values())
    else:
        result, failed = measure(flags, config.rung or "ours", config.steps), False
        if not config.rung:
            result = {"machine": measure_machine(flags), "profile": result}
            row = {"of": shlex.join(flags), "status": "done"}
            text = page({name: {**row, "result": part} for name, part in result.items()})
        print(json.dumps(result, indent=1) if config.rung else text)
    if config.json:
        write(config.json, json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    cli.run(main)

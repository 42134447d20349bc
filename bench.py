"""What this machine makes of GPT-2: its ceilings, the speed and memory of a training step, and where the time goes.

    python bench.py                                        # gpt2 on a GPU, the shakespeare preset elsewhere
    python bench.py --preset gpt2 --micro-batch-size 1 --seq-len 256 --json bench.json
    python bench.py --ladder                               # from plain float32 up to train_gpt2.py, one rung at a time
    torchrun --standalone --nproc_per_node=8 bench.py --ladder      # and how the speed grows with the ranks
    python bench.py --rung tf32 bf16 compile               # one rung, measured in this process

A step is train_gpt2.py's, with a single micro-batch of B x T tokens a rank: autocast, backward, clipping, update. Every
measurement runs in a fresh process, so that memory, compiled code and settings of one don't reach the next.
"""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function

from support.cli import InputError, RunError, flag, parse_args, run
from support.devices import (
    choose_device,
    copy_bytes,
    cpu_has_bfloat16,
    data_sheet_flops,
    matmul_flops,
    why_not_compile,
)
from support.distributed import Distributed
from support.files import atomic_path, atomic_write, check_writable
from train_gpt2 import (
    GPT,
    PRESETS,
    SHAKESPEARE,
    VOCAB_SIZE,
    CausalSelfAttention,
    DataLoaderLite,
    GPTConfig,
    LossFunction,
    TrainConfig,
    check_config,
    choose_loss,
    configure_optimizer,
    get_lr,
)

# The ladder. Each rung keeps what those before it have changed. Published: ms a step on one A100, B = 16, T = 1024
# (Karpathy 2024, "Let's reproduce GPT-2 (124M)", video); "ours" has no published counterpart.
RUNGS: dict[str, tuple[str, int | None]] = {
    "float32": ("every product in float32", 1000),
    "tf32": ("float32 products rounded to TF32", 333),
    "bf16": ("autocast to bfloat16", 300),
    "compile": ("torch.compile of the whole model", 130),
    "flash": ("flash instead of explicit attention", 96),
    "padded": ("vocabulary 50,257 -> 50,304", 93),
    "fused": ("fused AdamW", 90),
    "ours": ("train_gpt2.py as it is", None),
}


@dataclass(frozen=True)
class BenchConfig:
    """Measures this machine: its ceilings, and a training step of GPT-2 from the first one on."""

    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "shakespeare"] = "auto"
    """Model and lengths, as in train_gpt2.py; auto: gpt2 on a CUDA GPU, shakespeare elsewhere."""
    micro_batch_size: int = 0
    """Sequences a step on one device (B); 0: 16 on a CUDA GPU, elsewhere as many as 1,024 tokens make."""
    seq_len: int = 0
    """Tokens a sequence (T); 0: the preset's."""
    n_layer: int = 0
    """Number of blocks; 0: the preset's."""
    n_head: int = 0
    """Number of attention heads; 0: the preset's."""
    n_embd: int = 0
    """Number of channels (C); 0: the preset's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; the lower rungs of the ladder bring their own."""
    compile: bool = True
    """Use torch.compile where train_gpt2.py does, on a GPU, and for the ladder's rung; --no-compile: nowhere."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    steps: int = 20
    """Steps to measure, after three that are not."""
    ladder: bool = False
    """Climb the ladder; under torchrun also measure how the speed grows with the ranks."""
    picture: str = "bench_ladder.png"
    """Picture of the ladder, .png, .svg or .pdf; empty: none."""
    json: str = ""
    """File for the results; empty: none."""
    rung: tuple[Literal["float32", "tf32", "bf16", "compile", "flash", "padded", "fused", "ours"], ...] = ()
    """Measure one step in this process with these changes to the plain one, or ours."""


def train_config(config: BenchConfig) -> TrainConfig:
    """The training run whose step is measured. Raises InputError."""
    gpu = torch.cuda.is_available() and config.device in ("auto", "cuda")
    preset = ("gpt2" if gpu else "shakespeare") if config.preset == "auto" else config.preset
    dtype = config.dtype
    if config.rung and "ours" not in config.rung:
        dtype = "bfloat16" if "bf16" in config.rung else "float32"
    names = ("micro_batch_size", "seq_len", "n_layer", "n_head", "n_embd")
    chosen = {name: getattr(config, name) for name in names if getattr(config, name)}
    values = PRESETS[preset] | chosen | dict(preset=preset, device=config.device, dtype=dtype)
    values |= dict(compile=config.compile and gpu)
    train = replace(TrainConfig(), **values)
    data = train.data if Path(train.data).is_dir() else SHAKESPEARE["data"]
    check_config(train)
    most = min(16 if gpu else 1024 // train.seq_len, train.total_batch_size // train.seq_len)
    train = replace(train, micro_batch_size=train.micro_batch_size or max(most, 1))
    return replace(train, data=data, total_batch_size=train.micro_batch_size * train.seq_len)


# ---------------------------------------------------------------------------------------------------------------------
# The plain model of the lower rungs


class ExplicitAttention(CausalSelfAttention):
    """The same with the T x T matrix of weights made in full. (B, T, C) -> (B, T, C)"""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        visible = torch.ones(T, T, dtype=torch.bool, device=x.device).tril() if mask is None else mask
        weights = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, nh, T, T)
        y = weights.masked_fill(~visible, -math.inf).softmax(-1) @ v  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


def plain_loss(x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """next_token_loss without a padded product; rows of a padded wte are cut off, so the loss is that without them."""
    logits = F.linear(x, wte)[..., :VOCAB_SIZE]
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(shape: GPTConfig, rung: Collection[str]) -> GPT:
    """The model of a rung, not yet compiled; all but "ours" go with plain_loss."""
    if "ours" in rung:
        return GPT(shape)
    model = GPT(replace(shape, vocab_size=50_304) if "padded" in rung else shape)
    if "flash" not in rung:
        for block in model.h:
            block.attn.__class__ = ExplicitAttention  # the same parameters
    return model


# ---------------------------------------------------------------------------------------------------------------------
# A measurement, in a process of its own


def measure(config: BenchConfig, dist: Distributed) -> dict[str, Any]:
    """Measures the step of `config.rung`, after three that don't count.

    In the result ms is the median, ms_quartiles the quartiles beside it; tok_per_s that of all ranks at the median;
    peak_memory in bytes (see there); first_step_at the time of day, in seconds, at which the first step was done;
    parts_ms what time_by_part makes of two more steps under the profiler, for "ours" alone.
    """
    rung, train, device = config.rung, train_config(config), dist.device
    B, T, ours = train.micro_batch_size, train.seq_len, "ours" in rung
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if ours or "tf32" in rung else "highest")
    elif device.type == "cpu":
        import torch._inductor.config as inductor

        inductor.cpp.enable_kernel_profile = True  # or the profiler would not see compiled kernels
    torch.manual_seed(train.seed)
    model = build(GPTConfig(T, VOCAB_SIZE, train.n_layer, train.n_head, train.n_embd), rung).to(device)
    loader = DataLoaderLite(train.data, "train", B, T, dist.rank, dist.world_size, train.seed)
    optimizer = configure_optimizer(model, train)
    if not (ours or "fused" in rung):
        for group in optimizer.param_groups:
            group["fused"] = None  # torch's own choice: one tensor after another on a CPU, _foreach_ on a GPU
    scaler = torch.amp.GradScaler(device.type, enabled=dist.dtype == torch.float16)
    eager = "" if "compile" in rung or train.compile else "not compiled"  # or why
    loss_function: LossFunction = plain_loss
    if ours:
        if train.compile and not (eager := why_not_compile(device)):
            model.compile_blocks()
        loss_function = choose_loss(train, device, compiled=not eager)
    replica = torch.compile(model) if "compile" in rung else model
    if dist.world_size > 1:
        device_ids = [device.index] if device.type == "cuda" else None
        replica = DistributedDataParallel(replica, device_ids=device_ids, gradient_as_bucket_view=True)

    def step(number: int) -> float:
        """One update, as in train_gpt2.train. Returns its seconds."""
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = get_lr(number, train)
        with record_function("data"):
            x, y = (t.to(device, non_blocking=True) for t in loader.next_batch())
        with dist.autocast():
            _, loss = replica(x, y, loss_function)
        scaler.scale(loss).backward()
        with record_function("optimizer"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        dist.sum(loss.detach()).item()
        return time.perf_counter() - began

    try:
        step(0)
        first_step_at = time.time()
        for number in (1, 2):
            step(number)
        seconds = [step(number) for number in range(3, 3 + config.steps)]
    except torch.OutOfMemoryError:
        raise RunError(f"out of memory at --micro-batch-size {B}, --seq-len {T}: lower one") from None
    low, median, high = np.percentile(seconds, [25, 50, 75]).tolist()
    result = {
        "rung": list(rung), "device": dist.description, "eager": eager, "torch": torch.__version__,
        "preset": train.preset, "B": B, "T": T, "world_size": dist.world_size,
        "parameters": model.num_parameters(), "flops_per_token": model.flops_per_token(T),
        "first_step_at": first_step_at, "steps": config.steps,
        "ms": 1e3 * median, "ms_quartiles": [1e3 * low, 1e3 * high],
        "tok_per_s": B * T * dist.world_size / median, "peak_memory": peak_memory(device),
    }
    if ours:
        with profile():
            step(0)  # the first is slower
        with profile(record_shapes=True) as profiler:
            began = time.perf_counter()
            step(1)
            step(2)
            result["profiled_ms"] = 1e3 * (time.perf_counter() - began) / 2
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
        result["parts_ms"] = time_by_part(events, 2, result["profiled_ms"])
    return result


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the peak of a CUDA device's tensors, otherwise of the whole process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # getrusage would count what the parent held when it started this process
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


COMMUNICATION, ATTENTION, MATMULS, HEAD, OTHERS, OPTIMIZER, DATA, GAPS = PARTS = (
    "communication", "attention", "matmuls of the blocks", "head and loss", "norms, GELU, residual", "optimizer",
    "data", "gaps",
)


def part_of(name: str, sizes: str, parent: str) -> str:
    """The part that an operator or a kernel belongs to: by its name and its inputs' sizes, or else its parent's."""
    if OPTIMIZER in (name, parent) or DATA in (name, parent):
        return OPTIMIZER if OPTIMIZER in (name, parent) else DATA
    if re.search("nccl|gloo|c10d|all_?reduce", name, re.IGNORECASE):
        return COMMUNICATION
    if re.search(rf"\b({VOCAB_SIZE}|50304)\b", sizes) or re.search("log_softmax|nll_loss|cross_entropy", name):
        return HEAD
    if re.search("cpp_fused|triton_", name):  # compiled: these bear the names of all operators that went in
        return OTHERS
    if re.search("attention|flash|fmha|sdp|bmm", name, re.IGNORECASE):
        return ATTENTION
    if re.search("(mm|linear)(Backward|$)", name, re.IGNORECASE):
        return MATMULS
    return OTHERS if parent == GAPS and name.startswith("aten::") else parent


def time_by_part(events: list[dict[str, Any]], steps: int, step_ms: float) -> dict[str, float]:
    """Milliseconds a step by part, from the profiler's trace of `steps` steps of `step_ms` each. They sum to step_ms.

    On a CPU an operator counts with its own time, without that of the operators it calls; on a GPU every kernel counts
    for the operator that launched it. Head and loss: whatever has the vocabulary among its inputs' sizes (the token
    embedding is the same matrix) or a loss's name. Attention: the products of queries, keys and values. Matmuls: the
    other products. What compilation has fused is the loss, or else norms, GELU, residual (with casts and copies).
    Optimizer: from clipping to zero_grad. Communication: only while nothing else runs. Gaps: the rest of the step,
    in which Python, autograd or the launch of kernels is waited for.
    """
    events = [e for e in events if e.get("ph") == "X"]
    spans = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    open_spans: list[dict[str, Any]] = []
    for e in sorted(spans, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        while open_spans and (open_spans[-1]["tid"] != e["tid"] or e["ts"] >= open_spans[-1]["end"]):
            open_spans.pop()
        parent = open_spans[-1] if open_spans else {"part": GAPS, "own": 0.0}
        name = "" if e["name"].startswith("##") else e["name"]  # a compiled graph's, with letters at random
        e["part"] = part_of(name, str(e.get("args", {}).get("Input Dims", "")), parent["part"])
        e["own"], e["end"] = e["dur"], e["ts"] + e["dur"]
        parent["own"] -= e["dur"]
        open_spans.append(e)
    launched = {e["args"]["External id"]: e["part"] for e in spans if "External id" in e.get("args", {})}
    for e in work:
        part = launched.get(e["args"].get("External id"), OTHERS)
        e["part"] = part if part not in (GAPS, OTHERS) else part_of(e["name"], "", OTHERS)
        e["own"] = e["dur"]
    if not work:
        main = next(e["tid"] for e in spans if e["name"] == OPTIMIZER)
        work = [e for e in spans if e["tid"] == main or e["part"] == COMMUNICATION]
    parts = {part: sum(e["own"] for e in work if e["part"] == part) / 1e3 / steps for part in PARTS}
    alone = covered(work) - covered([e for e in work if e["part"] != COMMUNICATION])
    parts |= {COMMUNICATION: alone / 1e3 / steps, GAPS: 0.0}
    return parts | {GAPS: step_ms - sum(parts.values())}


def covered(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events ran."""
    total, reached = 0.0, -math.inf
    for e in sorted(events, key=lambda e: e["ts"]):
        total += max(e["ts"] + e["dur"] - max(e["ts"], reached), 0.0)
        reached = max(reached, e["ts"] + e["dur"])
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Beside the measured processes


def coordinate(config: BenchConfig) -> Distributed:
    """This process's place among torchrun's. They only wait for one another: what they measure runs in their children.
    Raises InputError for a device that isn't there."""
    rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    place = choose_device(config.device, config.dtype, local_rank)
    if world_size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(hours=2))
    if rank == 0 and hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * os.cpu_count():
        print(f"warning: load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: is other work going on?",
              file=sys.stderr, flush=True)
    return Distributed(rank, local_rank, world_size, *place)


def measure_in_subprocess(
    config: BenchConfig, rung: Collection[str], dist: Distributed | None = None, **env: str
) -> dict[str, Any]:
    """`measure` in a fresh process, alone or (with `dist`) together with those of the other ranks.

    Adds time_to_first_step, seconds from the command on. Raises RunError with the message of a process that failed.
    """
    environment = os.environ | env
    if dist and dist.world_size > 1:
        with socket.socket() as free:
            free.bind(("", 0))
            port = dist.gather(free.getsockname()[1])[0]  # a port of rank 0's machine
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    else:
        environment = {k: v for k, v in environment.items() if k not in ("RANK", "WORLD_SIZE")}
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, rung=tuple(rung), json=f"{folder}/result.json", ladder=False, picture="")
        command = [sys.executable, str(Path(__file__).resolve())]
        for name in (field.name for field in fields(config)):
            value = getattr(config, name)
            if isinstance(value, bool):
                command.append(flag(name) if value else flag(f"no_{name}"))
            else:
                command += [flag(name), *(value if isinstance(value, tuple) else [str(value)])]
        began = time.time()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
            raise RunError(f"{'+'.join(rung)}: {last.removeprefix('error: ')}")
        result = json.loads(Path(config.json).read_text(encoding="utf-8"))
    return result | {"time_to_first_step": result["first_step_at"] - began}


def aligned(rows: list[tuple[str, ...]], left: int) -> str:
    """Rows as a table: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def gigabytes(size: int | None) -> str:
    return f"{size / 1e9:.2f} GB" if size else "n/a"


def ceilings(device: torch.device) -> dict[str, float]:
    """FLOP/s of a product of large random matrices, by precision."""
    if device.type != "cuda":
        n = 256 if device.type == "cpu" and not cpu_has_bfloat16() else 1024  # emulated, a hundred times slower
        sizes = {"float32": 1024, "bfloat16": n}
        return {name: matmul_flops(device, getattr(torch, name), n) for name, n in sizes.items()}
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    names = ("float32", "float16", *["bfloat16"] * ampere)
    found = {name: matmul_flops(device, getattr(torch, name), 8192) for name in names}
    if ampere:
        torch.set_float32_matmul_precision("high")
        found["tf32"] = matmul_flops(device, torch.float32, 8192)
    torch.cuda.empty_cache()
    return found


def report(config: BenchConfig, dist: Distributed) -> dict[str, Any]:
    """Ceilings, then the step of train_gpt2.py: with an empty compile cache, and again with the one that left."""
    peaks, copy = ceilings(dist.device), copy_bytes(dist.device, 2**30 if dist.device.type == "cuda" else 2**28)
    with tempfile.TemporaryDirectory() as cache:
        env = dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=f"{cache}/triton")
        cold = None
        if train_config(config).compile:
            cold = measure_in_subprocess(replace(config, steps=1), ["ours"], dist, **env)
        result = measure_in_subprocess(config, ["ours"], dist, **env)
    precision = str(dist.dtype).removeprefix("torch.")
    ceiling = max(peaks.get(name, 0.0) for name in (precision, "float32", *["tf32"] * (precision == "float32")))
    sheet = data_sheet_flops(dist.device, dist.dtype)
    per_device = result["flops_per_token"] * result["tok_per_s"] / dist.world_size
    result |= {
        "ceilings_flops": peaks, "copy_bytes_per_s": copy, "ceiling_flops": ceiling, "data_sheet_flops": sheet,
        "cold_first_step_s": cold and cold["time_to_first_step"], "warm_first_step_s": result["time_to_first_step"],
        "mfu_ceiling": per_device / ceiling, "mfu_data_sheet": sheet and per_device / sheet,
    }
    if dist.rank:
        return result
    B, T, eager, (low, high) = (result[key] for key in ("B", "T", "eager", "ms_quartiles"))
    resident = "" if dist.device.type == "cuda" else ", all of the process"
    rows = [
        *((f"{name} product", f"{rate / 1e12:,.3f} TFLOP/s") for name, rate in peaks.items()),
        ("copy", f"{copy / 1e9:,.1f} GB/s, read and written"),
        ("model", f"{result['parameters']:,} parameters, {result['flops_per_token'] / 1e6:,.0f} MFLOP a token "
                  "(6 N + 12 L C T: PaLM, appendix B)"),
        ("step", f"B {B}, T {T}, ranks {dist.world_size}, " + (f"eager: {eager}" if eager else "compiled")),
        ("first step done", f"{result['warm_first_step_s']:.1f} s after the command" + (
            f", {cold['time_to_first_step']:.1f} s with an empty compile cache" if cold else "")),
        ("a step", f"{result['ms']:,.1f} ms (quartiles {low:,.1f} to {high:,.1f}, {config.steps} steps)"),
        ("speed", f"{result['tok_per_s']:,.0f} tok/s"),
        ("MFU", f"{result['mfu_ceiling']:.1%} of the measured {ceiling / 1e12:,.3g} TFLOP/s"),
        ("", f"{result['mfu_data_sheet']:.1%} of the data sheet's {sheet / 1e12:,.3g}" if sheet else
         "of the data sheet: n/a"),
        ("peak memory", gigabytes(result["peak_memory"]) + resident),
    ]
    total = result["profiled_ms"]
    parts = [(name, f"{ms:,.1f} ms", f"{ms / total:.1%}") for name, ms in result["parts_ms"].items()]
    print(f"device: {dist.description}\n{aligned(rows, 2)}\n")
    print(aligned([("where it goes", "", ""), *parts, ("a step with the profiler on", f"{total:,.1f} ms", "")], 1))
    return result


def missing(config: BenchConfig, device: torch.device) -> dict[str, str]:
    """Rungs that this machine hasn't got -> why."""
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    found = {} if ampere else {"tf32": "no NVIDIA GPU of the Ampere generation or later"}
    if not (ampere or (device.type == "cpu" and cpu_has_bfloat16())):
        found["bf16"] = "the chip does not compute in bfloat16"
    if why := why_not_compile(device) if config.compile else "--no-compile":
        found["compile"] = why
    return found


def climb(config: BenchConfig, dist: Distributed) -> dict[str, Any]:
    """The ladder, on rank 0's device: {"rungs": {name: measurement or {"skipped": reason}}}. Prints and draws it."""
    skipped, rung, rungs = missing(config, dist.device), [], {}
    for name in RUNGS:
        if name in skipped:
            rungs[name] = {"skipped": skipped[name]}
            continue
        rung = ["ours"] if name == "ours" else [*rung, name]
        try:
            rungs[name] = measure_in_subprocess(config, rung)
            print(f"{name}: {rungs[name]['ms']:,.1f} ms a step", file=sys.stderr, flush=True)
        except RunError as error:
            rungs[name] = {"skipped": str(error)}
    measured = {name: result for name, result in rungs.items() if "ms" in result}
    if not measured:
        raise RunError(next(iter(rungs.values()))["skipped"])
    first = next(iter(measured.values()))
    rows = [("rung", "what it changes", "ms a step", "tok/s", "memory", "speed-up", "A100 ms")]
    for name, (change, published) in RUNGS.items():
        cells = ["skipped", "", "", ""]
        if result := measured.get(name):
            cells = [f"{result['ms']:,.1f}", f"{result['tok_per_s']:,.0f}", gigabytes(result["peak_memory"]),
                     f"{first['ms'] / result['ms']:.2f} x"]
        rows.append((name, change, *cells, f"{published:,}" if published else ""))
    print(f"device: {dist.description}\n{first['preset']}, B {first['B']}, T {first['T']}, median of {config.steps} "
          f"steps; A100: published, B 16, T 1024\n\n{aligned(rows, 2)}")
    for name, result in rungs.items():
        if name not in measured:
            print(f"{name} skipped: {result['skipped']}")
    if config.picture:
        draw(measured, Path(config.picture))
    return {"rungs": rungs}


def draw(rungs: dict[str, dict[str, Any]], path: Path) -> None:
    """Two panels of bars, ms a step: this machine's, and the published A100's."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture: `pip install matplotlib`")
    figure = Figure(figsize=(10, 4), layout="constrained")
    here, there = figure.subplots(1, 2)
    published = {name: ms for name, (_, ms) in RUNGS.items() if ms}
    measured, one = {name: result["ms"] for name, result in rungs.items()}, next(iter(rungs.values()))
    for axes, times, title in [(here, measured, f"this machine: B {one['B']}, T {one['T']}"),
                               (there, published, "one A100, published: B 16, T 1024")]:
        bars = axes.barh(list(times), list(times.values()))
        axes.bar_label(bars, [f"{ms:,.0f}" for ms in times.values()], padding=3)
        axes.set(title=title, xlabel="ms a step", xlim=(0, 1.15 * max(times.values())))
        axes.invert_yaxis()
    with atomic_path(path) as partial:
        figure.savefig(partial, format=path.suffix[1:])
    print(f"picture: {path}")


def scaling(config: BenchConfig, dist: Distributed) -> dict[str, Any]:
    """tok/s of each rank alone while the others wait, of all together, and the ratio. Prints it."""
    rates = []
    for rank in range(dist.world_size):  # gather makes the others wait
        rate = measure_in_subprocess(config, ["ours"])["tok_per_s"] if rank == dist.rank else None
        rates.append(dist.gather(rate)[rank])
    together = measure_in_subprocess(config, ["ours"], dist)["tok_per_s"]
    ratio = together / np.mean(rates)
    if dist.rank == 0:
        print(f"\nranks: {dist.world_size}, each alone {', '.join(f'{rate:,.0f}' for rate in rates)} tok/s; together "
              f"{together:,.0f} tok/s, {ratio:.2f} times one ({ratio / dist.world_size:.0%} of ideal)")
    return {"alone_tok_per_s": rates, "together_tok_per_s": together, "scaling": ratio}


def main(args: list[str] | None = None) -> None:
    config = parse_args(BenchConfig, args=args)
    if config.steps < 1:
        raise InputError(f"--steps {config.steps}: at least 1")
    if config.picture and Path(config.picture).suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--picture {config.picture}: a name that ends in .png, .svg or .pdf")
    for path in filter(None, (config.json, config.ladder and config.picture)):
        check_writable(path)
    train = train_config(config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so end the process that measures, too
    dist = Distributed.start(train) if config.rung else coordinate(config)
    try:
        if config.rung:
            result = measure(config, dist)
        elif config.ladder:
            result = climb(config, dist) if dist.rank == 0 else {}
            dist.gather(None)
            result |= scaling(config, dist) if dist.world_size > 1 else {}
        else:
            result = report(config, dist)
    finally:
        dist.stop()
    if config.json and (config.rung or dist.rank == 0):
        with atomic_write(config.json, "w") as file:
            json.dump(result, file, indent=1)
    elif config.rung:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run(main)

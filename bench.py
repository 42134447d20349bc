"""What this machine makes of GPT-2: its ceilings, the speed and memory of a training step, and where the time goes.

    python bench.py                                        # gpt2 on a GPU, the shakespeare preset elsewhere
    python bench.py --preset gpt2 --micro-batch-size 1 --seq-len 256 --json bench.json
    python bench.py --ladder                               # from plain float32 up to train_gpt2.py, one rung at a time
    torchrun --standalone --nproc_per_node=8 bench.py --ladder      # and how the speed grows with the ranks
    python bench.py --rung tf32 bf16 compile               # one rung, measured in this process
    python bench.py --report bench/NAME                    # everything, into a folder: goes on where it was cut off

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
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from tyro.conf import UseAppendAction

import hellaswag
import train_gpt2
from support.cli import InputError, RunError, flag, parse_args, run, say
from support.devices import choose_device, copy_bytes, cpu_has_bfloat16, data_sheet_flops, why_not_compile
from support.distributed import Distributed
from support.files import atomic_path, atomic_write, check_writable
from support.report import around, correctness, peers, store
from support.report.ceilings import ceiling_of, device_name, measure_machine, products
from support.report.page import write_report
from support.report.store import Job
from support.report.trace import largest_kernels, record, time_by_part
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
    next_token_loss,
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


ReportPart = Literal["machine", "right", "speed", "where", "peers", "around", "ladder", "run"]
SMALL = dict(n_layer=2, n_head=2, n_embd=32, seq_len=128)  # the model of a report where there is no GPU


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
    report: str = ""
    """Folder for a report on everything about this machine; a report that was cut off goes on where it stopped."""
    only: UseAppendAction[tuple[ReportPart, ...]] = ()
    """Parts of the report to work on, one or several; what failed in them is tried again."""
    minutes: float = 0.0
    """Start no new work of a report after so many minutes; 0: work until it is complete."""
    peer: UseAppendAction[tuple[str, ...]] = ()
    """Other code to measure beside ours: build-nanogpt=FOLDER, nanogpt=FOLDER (checkouts), llm.c=FILE (its output)."""
    data: str = ""
    """Folder of token shards or a .txt file; empty: edu_fineweb10B where that is, or else input.txt."""
    hellaswag_data: str = ""
    """Local HellaSwag .jsonl for a report; empty: the downloaded one if it is there, or tasks cut from input.txt."""
    job: str = ""
    """Run one job of a report in this process, PART/NAME (that is what --report starts)."""
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
    if (config.report or config.job) and not gpu and config.preset == "auto":
        chosen = SMALL | chosen
    values = PRESETS[preset] | chosen | dict(preset=preset, device=config.device, dtype=dtype)
    values |= dict(compile=config.compile and gpu)
    train = replace(TrainConfig(), **values)
    data = config.data or (train.data if Path(train.data).is_dir() else SHAKESPEARE["data"])
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

# What a report changes about the step that train_gpt2.py makes, one at a time. name -> (what it is, where it applies)
SWITCHES: dict[str, tuple[str, str]] = {
    "bf16-stream": ("residual stream in bfloat16", "cuda"),
    "whole": ("the whole model compiled, loss included, instead of its blocks", "cuda"),
    "mix-order": ("inductor's triton.mix_order_reduction the other way round", "cuda"),
    "coordinate-descent": ("inductor's coordinate_descent_tuning", "cuda"),
    "cudnn": ("attention: cuDNN alone", "cuda"),
    "flash": ("attention: flash alone", "cuda"),
    "efficient": ("attention: memory-efficient alone", "cuda"),
    "math": ("attention: T x T matrices", "cpu"),
    "chunked": ("the loss in pieces", "cuda"),
    "plain-loss": ("the loss from the logits in full", "cpu"),
    "cudagraphs": ("the whole model compiled with CUDA graphs", "cuda"),
    "autotune": ("blocks compiled with max-autotune-no-cudagraphs", "cuda"),
    "eager": ("nothing compiled", "cuda"),
    "compiled": ("blocks compiled", "cpu"),
}
ATTENTIONS = ("cudnn", "flash", "efficient", "math")


def loss_in_full(*args: torch.Tensor) -> tuple[None, torch.Tensor]:
    """next_token_loss without its logits, which a compiled graph then need not keep."""
    return None, next_token_loss(*args)[1]


class Trial:
    """A model in training on this device: an update at a time, as in train_gpt2.train, of one micro-batch a rank.

    rung: what the ladder changes about the plainest model, or "ours"; switch: a change to ours, one of SWITCHES.
    """

    def __init__(self, train: TrainConfig, dist: Distributed, rung: Collection[str] = ("ours",), switch: str = ""):
        device, ours = dist.device, "ours" in rung
        if switch in ("eager", "compiled"):
            train = replace(train, compile=switch == "compiled")
        train = replace(train, low_memory=train.low_memory or switch == "chunked")
        self.train, self.dist, self.losses = train, dist, []
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high" if ours or "tf32" in rung else "highest")
        if switch in ATTENTIONS:
            for name in ATTENTIONS:
                enable = {"efficient": "mem_efficient"}.get(name, name)
                getattr(torch.backends.cuda, f"enable_{enable}_sdp")(name == switch)
        torch.manual_seed(train.seed)
        self.model = build(GPTConfig(train.seq_len, VOCAB_SIZE, train.n_layer, train.n_head, train.n_embd), rung)
        self.model.to(device)
        if switch == "bf16-stream":
            self.model.h[0].register_forward_pre_hook(lambda _, args: (args[0].bfloat16(), *args[1:]))
        self.loader = DataLoaderLite(train.data, "train", train.micro_batch_size, train.seq_len, dist.rank,
                                     dist.world_size, train.seed)
        self.optimizer = configure_optimizer(self.model, train)
        if not (ours or "fused" in rung):
            for group in self.optimizer.param_groups:
                group["fused"] = None  # torch's own choice: one tensor after another on a CPU, _foreach_ on a GPU
        self.scaler = torch.amp.GradScaler(device.type, enabled=dist.dtype == torch.float16)
        self.eager = "" if "compile" in rung else "not compiled"  # or why
        if ours and train.compile:
            self.eager = why_not_compile(device)
        self.loss_function: LossFunction = choose_loss(train, device, not self.eager) if ours else plain_loss
        self.replica: nn.Module = torch.compile(self.model) if "compile" in rung else self.model
        if ours and not self.eager:
            self._compile(switch)
        if switch == "plain-loss":
            self.loss_function = loss_in_full
        if dist.world_size > 1:
            device_ids = [device.index] if device.type == "cuda" else None
            self.replica = DistributedDataParallel(self.replica, device_ids=device_ids, gradient_as_bucket_view=True)

    def _compile(self, switch: str) -> None:
        """Compiles the model as training does, or as a switch has it."""
        import torch._inductor.config as inductor

        if switch == "coordinate-descent":
            inductor.coordinate_descent_tuning = True
        if switch == "mix-order":
            if not hasattr(inductor.triton, "mix_order_reduction"):
                raise RunError(f"torch {torch.__version__} has no triton.mix_order_reduction")
            inductor.triton.mix_order_reduction = not inductor.triton.mix_order_reduction
        if switch in ("whole", "cudagraphs"):
            self.loss_function = loss_in_full
            self.replica = torch.compile(self.model, mode="reduce-overhead" if switch == "cudagraphs" else None)
        elif switch == "autotune":
            for block in self.model.h:
                block.compile(dynamic=False, mode="max-autotune-no-cudagraphs")
        else:
            self.model.compile_blocks()

    def step(self, number: int) -> float:
        """One update. Returns its seconds; the loss is the last one of `losses`."""
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = get_lr(number, self.train)
        with record_function("data"):
            x, y = (t.to(self.dist.device, non_blocking=True) for t in self.loader.next_batch())
        with self.dist.autocast():
            _, loss = self.replica(x, y, self.loss_function)
        self.scaler.scale(loss).backward()
        with record_function("optimizer"):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.train.grad_clip or math.inf)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(self.dist.sum(loss.detach()).item())
        return time.perf_counter() - began


def measure(config: BenchConfig, dist: Distributed, switch: str = "", warmup: int = 3) -> dict[str, Any]:
    """Measures the step of `config.rung`, or ours with a switch, after `warmup` that don't count.

    In the result ms is the median, ms_quartiles the quartiles beside it; tok_per_s that of all ranks at the median;
    peak_memory in bytes (see there); first_step_at the time of day, in seconds, at which the first step was done;
    parts_ms what time_by_part makes of two more steps under the profiler, for "ours" alone.
    """
    rung, train, device = config.rung or ("ours",), train_config(config), dist.device
    B, T = train.micro_batch_size, train.seq_len
    if device.type == "cpu":
        import torch._inductor.config as inductor

        inductor.cpp.enable_kernel_profile = True  # or the profiler would not see compiled kernels
    try:
        trial = Trial(train, dist, rung, switch)
        trial.step(0)
        first_step_at = time.time()
        for number in range(1, warmup):
            trial.step(number)
        seconds = [trial.step(number) for number in range(warmup, warmup + config.steps)]
    except torch.OutOfMemoryError:
        raise RunError(f"out of memory at --micro-batch-size {B}, --seq-len {T}: lower one") from None
    low, median, high = np.percentile(seconds, [25, 50, 75]).tolist()
    result = {
        "rung": list(rung), "device": dist.description, "eager": trial.eager, "torch": torch.__version__,
        "preset": train.preset, "B": B, "T": T, "world_size": dist.world_size,
        "parameters": trial.model.num_parameters(), "flops_per_token": trial.model.flops_per_token(T),
        "first_step_at": first_step_at, "steps": config.steps,
        "ms": 1e3 * median, "ms_quartiles": [1e3 * low, 1e3 * high],
        "tok_per_s": B * T * dist.world_size / median, "peak_memory": peak_memory(device),
    }
    if "ours" in rung and not config.job:
        events, result["profiled_ms"] = record(trial.step, 2)
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


def command_of(config: BenchConfig) -> list[str]:
    """The command that measures in one process what `config` says."""
    command = [sys.executable, str(Path(__file__).resolve())]
    for name, value in vars(replace(config, ladder=False, picture="", only=(), minutes=0.0)).items():
        if name == "json" or (value in ("", ()) and name != "picture"):
            continue
        if isinstance(value, bool):
            command.append(flag(name) if value else flag(f"no_{name}"))
        elif name == "peer":
            command += [word for pair in value for word in ("--peer", pair)]
        else:
            command += [flag(name), *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return command


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
        config = replace(config, rung=tuple(rung), json=f"{folder}/result.json")
        command = [*command_of(config), "--json", config.json]
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


def print_summary(config: BenchConfig, dist: Distributed) -> dict[str, Any]:
    """Ceilings, then the step of train_gpt2.py: with an empty compile cache, and again with the one that left."""
    peaks, copy = products(dist.device), copy_bytes(dist.device, 2**30 if dist.device.type == "cuda" else 2**28)
    with tempfile.TemporaryDirectory() as cache:
        env = dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=f"{cache}/triton")
        cold = None
        if train_config(config).compile:
            cold = measure_in_subprocess(replace(config, steps=1), ["ours"], dist, **env)
        result = measure_in_subprocess(config, ["ours"], dist, **env)
    precision = str(dist.dtype).removeprefix("torch.")
    ceiling = ceiling_of(peaks, precision)
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


# ---------------------------------------------------------------------------------------------------------------------
# The report


def jobs_of(config: BenchConfig, device: torch.device) -> list[Job]:
    """A report's jobs in the order of what would be missed most if the machine were gone (docs/gpu.md)."""
    gpu = device.type == "cuda"
    batches = [config.micro_batch_size] if config.micro_batch_size else [64, 16, 32, 128] if gpu else [2, 1]
    rare = [] if config.micro_batch_size or not gpu else [256, 8]
    compiles = "" if config.compile else "--no-compile"
    absent = missing(replace(config, compile=False), device)  # whether compiling works is for that job to find out
    absent["compile"] = compiles if gpu else "slow without a GPU; --ladder alone has it"
    given = peers.parse_peers(config.peer)
    return [
        Job("machine", "machine"),
        Job("right", "transformers"),
        Job("right", "compiled", 240, compiles),
        Job("speed", f"B={batches[0]}", 240),
        Job("where", "kernels"),
        *(Job("speed", f"B={B}") for B in batches[1:]),
        *(Job("peers", name, 270) for name in given),
        *(Job("peers", "hellaswag", 240) for name in given if name == "build-nanogpt"),
        Job("right", "hellaswag"),
        *(Job("speed", name, 270 if name == "autotune" else 180, "" if kind == device.type else f"not on {device.type}")
          for name, (_, kind) in SWITCHES.items() if name != "compiled"),
        Job("right", "recompilations", 240, compiles),
        Job("right", "resumed", 240),
        Job("right", "resumed-deterministic", 240),
        Job("right", "float16"),
        Job("right", "tests", 270, "" if gpu else "needs a CUDA GPU"),
        Job("speed", "first-step", 270),
        *(Job("speed", f"B={B}") for B in rare),
        Job("around", "evaluation", 270),
        Job("around", "files"),
        *(Job("ladder", name, skip=absent.get(name, "")) for name in RUNGS),
        Job("run", "run", 270, goes_on=True),
    ]


def micro_batch_of(job: Job, rows: list[dict[str, Any]], config: BenchConfig, device: torch.device) -> int:
    """B for a job: its own; on a GPU the ladder's; 64, or less where that did not fit; what --micro-batch-size says."""
    if job.name.startswith("B="):
        return int(job.name.removeprefix("B="))
    if (job.part == "ladder" and device.type == "cuda") or config.micro_batch_size:
        return config.micro_batch_size
    tried = {row["result"]["B"] for row in rows if row.get("part") == "speed" and row["job"].startswith("B=")
             and row["status"] == store.DONE}
    usual = 64 if device.type == "cuda" else 2
    return max(tried & set(range(usual + 1)), default=16 if device.type == "cuda" else 2)


def make_report(config: BenchConfig, dist: Distributed) -> None:
    """Completes the report in config.report. Raises InputError for a folder with another machine's results."""
    folder, device, train = Path(config.report), dist.device, train_config(config)
    if dist.world_size > 1:
        raise InputError("--report: of one device; start it without torchrun")
    shape = {name: getattr(train, name) for name in ("preset", "n_layer", "n_head", "n_embd", "seq_len", "compile")}
    header = {"report": 1, "device": device_name(device), "kind": device.type,
              "dtype": str(dist.dtype).removeprefix("torch."), **shape}
    rows = store.open_results(folder, header)
    jobs = [job for job in jobs_of(config, device) if not config.only or job.part in config.only]

    def command_for(job: Job) -> list[str]:
        B, steps = micro_batch_of(job, rows, config, device), 30 if device.type == "cuda" else 6
        return command_of(replace(config, job=f"{job.part}/{job.name}", micro_batch_size=B, steps=steps))

    store.work_through(folder, rows, jobs, command_for, write_report, bool(config.only), config.minutes)
    say(f"report: {folder / 'report.md'}")


def run_job(config: BenchConfig, dist: Distributed) -> dict[str, Any]:
    """One job of a report, in this process: its result, with a "problem" where something is not as it should be."""
    store.die_with_parent()
    part, _, name = config.job.partition("/")
    train, device = train_config(config), dist.device
    gpu = device.type == "cuda"
    B, T = train.micro_batch_size, train.seq_len
    warmup = 10 if gpu else 2
    script = ["--preset", train.preset, "--data", train.data, "--seq-len", T, "--n-layer", train.n_layer, "--n-head",
              train.n_head, "--n-embd", train.n_embd, "--device", config.device, "--dtype", config.dtype,
              "--compile" if train.compile else "--no-compile", "--micro-batch-size", B]
    one_batch = [*script, "--total-batch-size", B * T, "--hellaswag-every", 0, "--eval-tokens", 4 * B * T]

    def trial(switch: str = "", place: Distributed = dist) -> Trial:
        return Trial(replace(train, warmup_steps=10), place, switch=switch)  # so that it learns in a few steps

    match part, name:
        case "machine", _:
            return measure_machine(device, dist.dtype)
        case "right", "transformers":
            return correctness.against_transformers(train_gpt2, train, dist)
        case "right", "hellaswag":
            tasks = hellaswag.prepare(hellaswag_examples(config, 40 if gpu else 8), T)
            return correctness.hellaswag_against_cpu(train_gpt2, hellaswag, train, tasks, dist)
        case "right", "compiled":
            return correctness.compiled_against_eager(trial, 50 if gpu else 10, dist.dtype)
        case "right", "recompilations":
            return correctness.recompilations(train_gpt2, one_batch)
        case "right", "resumed" | "resumed-deterministic":
            return correctness.resumed(train_gpt2, one_batch, name.endswith("deterministic"))
        case "right", "float16":
            half = replace(dist, dtype=torch.float16)
            return correctness.float16_run(trial(place=half), 200 if gpu else 3)
        case "right", "tests":
            return correctness.gpu_tests(Path(__file__).parent)
        case "speed", "first-step":
            return first_steps(replace(config, job="", steps=1), cold=train.compile)
        case "speed", _:
            return measure(config, dist, switch="" if name.startswith("B=") else name, warmup=warmup)
        case "where", _:
            one = trial()
            for number in range(warmup):
                one.step(number)
            steps = 5 if gpu else 2
            events, ms = record(one.step, steps)
            return {"B": B, "T": T, "ms": ms, "parts_ms": time_by_part(events, steps, ms), "steps": steps,
                    "kernels": largest_kernels(events, steps)}
        case "peers", "llm.c":
            return peers.read_llmc(peers.parse_peers(config.peer)["llm.c"])
        case "peers", "hellaswag":
            return hellaswag_race(config, train, dist)
        case "peers", _:
            return peer_race(name, peers.parse_peers(config.peer)[name], train, dist, warmup, config.steps)
        case "around", "evaluation":
            if not gpu:
                train = replace(train, eval_tokens=16 * T)
            loader = DataLoaderLite(train.data, "val", B, T, shuffle=False)
            examples = hellaswag_examples(config, 1000 if gpu else 8)
            result = around.evaluation(train_gpt2, Trial(train, dist), loader, hellaswag.prepare(examples, T), dist)
            return result | {"tasks_from": Path(hellaswag_source(config)).name}
        case "around", "files":
            loader = DataLoaderLite(train.data, "train", B, T, seed=train.seed)
            return around.files(trial(), loader, dist, 5.0 if gpu else 0.5)
        case "ladder", _:
            absent = missing(config, device)
            if name in absent:
                raise RunError(absent[name])
            names = [rung for rung in RUNGS if rung not in absent and rung != "ours"]
            rung = ("ours",) if name == "ours" else tuple(names[: names.index(name) + 1])
            return measure(replace(config, rung=rung), dist, warmup=warmup)
        case "run", _:
            return short_run(config, script, gpu, B * T)
    raise InputError(f"--job {config.job}: no such job")


def hellaswag_source(config: BenchConfig) -> str:
    """The file that HellaSwag's tasks are from; input.txt for those that are cut from it."""
    if config.hellaswag_data:
        return config.hellaswag_data
    return str(hellaswag.DOWNLOADED if hellaswag.DOWNLOADED.exists() else SHAKESPEARE["data"])


def hellaswag_examples(config: BenchConfig, count: int) -> list[dict[str, Any]]:
    path = Path(hellaswag_source(config))
    return around.made_up_tasks(path, count) if path.suffix == ".txt" else hellaswag.load_examples(path)[:count]


def first_steps(config: BenchConfig, cold: bool) -> dict[str, Any]:
    """Seconds from the command to the first step done: with an empty compile cache (None where nothing is compiled),
    and with the one that this left."""
    with tempfile.TemporaryDirectory() as cache:
        env = dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=f"{cache}/triton")
        seconds = [measure_in_subprocess(config, ["ours"], **env)["time_to_first_step"] for _ in range(1 + cold)]
    return {"cold_s": seconds[0] if cold else None, "warm_s": seconds[-1]}


def peer_race(
    name: str, path: Path, train: TrainConfig, dist: Distributed, warmup: int, count: int
) -> dict[str, Any]:
    """A peer's step as shipped, the same compiled (where ours is), and ours, in turns in this process."""
    shape = dict(block_size=train.seq_len, n_layer=train.n_layer, n_head=train.n_head, n_embd=train.n_embd)
    loader = DataLoaderLite(train.data, "train", train.micro_batch_size, train.seq_len, seed=train.seed)

    def ours() -> peers.Contestant:
        trial, steps = Trial(train, dist), iter(range(10**9))

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            trial.step(next(steps))  # on a batch of its own, whose loading counts

        return peers.Contestant("ours", trial.model, step)

    compiled = [False, True] if train.compile and not why_not_compile(dist.device) else [False]
    makers = {f"{name}, compiled" if fast else f"{name}, as shipped" if name == "build-nanogpt" else f"{name}, eager":
              lambda fast=fast: peers.peer_contestant(name, path, shape, dist, fast) for fast in compiled}
    rows = peers.race({**makers, "ours": ours}, loader.next_batch, count, warmup, dist.device)
    result = {"B": train.micro_batch_size, "T": train.seq_len, "rows": rows}
    if train.micro_batch_size > 8 and any("memory" in row.get("problem", "") for row in rows):
        smaller = replace(train, micro_batch_size=train.micro_batch_size // 2)  # a batch that all of them can hold
        result = peer_race(name, path, smaller, dist, warmup, count)
        result["too_large"] = [{"B": train.micro_batch_size, "rows": rows}, *result.get("too_large", [])]
    return result


def hellaswag_race(config: BenchConfig, train: TrainConfig, dist: Distributed) -> dict[str, Any]:
    """HellaSwag as build-nanogpt evaluates it in training, and as we do, with the same weights."""
    examples = hellaswag_examples(config, 100 if dist.device.type == "cuda" else 8)
    torch.manual_seed(train.seed)
    model = GPT(train_gpt2.model_config(train)).to(dist.device).eval()
    shape = dict(block_size=train.seq_len, n_layer=train.n_layer, n_head=train.n_head, n_embd=train.n_embd)
    path = peers.parse_peers(config.peer)["build-nanogpt"]
    theirs, expected = peers.peer_hellaswag(path, model.state_dict(), shape, examples, dist)
    tasks = hellaswag.prepare(examples, train.seq_len)
    with dist.autocast():
        for _ in range(2):  # the first one is not counted
            began = time.perf_counter()
            score = hellaswag.score(model.hidden, model.wte.weight, tasks, dist.device)
            seconds = time.perf_counter() - began
    found = dict(zip(score.index, (score.losses / score.lengths).argmin(1).tolist(), strict=True))
    same = sum(found[i] == prediction for i, prediction in enumerate(expected))
    return {"tasks": len(tasks), "theirs_per_s": theirs, "ours_per_s": len(tasks) / seconds, "same_predictions": same}


def short_run(config: BenchConfig, script: list[object], gpu: bool, tokens: int) -> dict[str, Any]:
    """300 steps of the gpt2 preset, shrunk only in steps; where there is no GPU 20 of a small one."""
    steps = 300 if gpu else 20
    args = [*script, "--warmup-steps", steps // 10, "--eval-every", steps // 2, "--sample-every", steps // 2,
            "--save-every", steps // 3]
    if not gpu:
        args += ["--total-batch-size", 2 * tokens, "--eval-tokens", 2 * tokens]
    source = hellaswag_source(config)
    with tempfile.TemporaryDirectory() as folder:
        if not gpu:  # a few tasks
            source = f"{folder}/tasks.jsonl"
            Path(source).write_text("".join(json.dumps(task) + "\n" for task in hellaswag_examples(config, 8)))
        args += ["--hellaswag-every", steps // 2 if source.endswith(".jsonl") else 0, "--hellaswag-data", source]
        return around.real_run(Path(train_gpt2.__file__), args, Path(config.report, "run"), steps, 180)


def repeat_flags(args: list[str]) -> list[str]:
    """--only A B as --only A --only B, which is how tyro reads a flag that may come several times; --peer likewise."""
    repeated, last = [], ""
    for i, arg in enumerate(args):
        if arg in ("--only", "--peer"):
            last = arg
            if i + 1 < len(args) and not args[i + 1].startswith("--"):
                continue
        elif arg.startswith("--"):
            last = ""
        repeated += [last, arg] if last and arg != last else [arg]
    return repeated


def main(args: list[str] | None = None) -> None:
    config = parse_args(BenchConfig, args=repeat_flags(sys.argv[1:] if args is None else args))
    if config.steps < 1:
        raise InputError(f"--steps {config.steps}: at least 1")
    if config.picture and Path(config.picture).suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--picture {config.picture}: a name that ends in .png, .svg or .pdf")
    for path in filter(None, (config.json, config.ladder and config.picture)):
        check_writable(path)
    for path in filter(None, (config.data, config.hellaswag_data)):
        if not Path(path).exists():
            raise InputError(f"{path}: no such data")
    if (config.only or config.minutes or config.peer) and not (config.report or config.job):
        raise InputError("--only, --minutes and --peer are a report's: add --report FOLDER")
    peers.parse_peers(config.peer)
    train = train_config(config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so end the process that measures, too
    alone = config.rung or config.job
    dist = Distributed.start(train) if alone else coordinate(config)
    try:
        if config.job:
            result = run_job(config, dist)
        elif config.rung:
            result = measure(config, dist)
        elif config.report:
            return make_report(config, dist)
        elif config.ladder:
            result = climb(config, dist) if dist.rank == 0 else {}
            dist.gather(None)
            result |= scaling(config, dist) if dist.world_size > 1 else {}
        else:
            result = print_summary(config, dist)
    finally:
        dist.stop()
    if config.json and (alone or dist.rank == 0):
        with atomic_write(config.json, "w") as file:
            json.dump(result, file, indent=1)
    elif alone:
        print(json.dumps(result, indent=1))
    return None


if __name__ == "__main__":
    run(main)

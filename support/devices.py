"""Device, precision, and the peak FLOP/s from which MFU is computed."""

import ctypes
import functools
import importlib.util
import os
import sys
import time

import torch

from support.errors_and_signals import UserError, first_line


def choose_device(device: str, local_rank: int = 0, world_size: int = 1) -> torch.device:
    """Return the requested device, or with "auto" the first available of cuda, mps and cpu.

    Raises UserError if there is no such device, or if the GPU does not work."""
    available = ["cpu"]
    if torch.backends.mps.is_available() and world_size == 1:  # no process group supports MPS
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    kind = available[0] if device == "auto" else device
    if kind not in available:
        ranks = f" with {world_size} processes" if world_size > 1 else ""
        problem = f"not available{ranks}; choose from {', '.join(available)}"
        raise UserError(f"--device {device}: {problem}")
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if local_rank >= count:
        problem = f"process {local_rank} on this machine has no GPU: it sees only {count}"
        remedy = "lower --nproc_per_node; under Slurm, replace --gpus-per-task with"
        raise UserError(f"{problem}; {remedy} --gpus-per-node, so that each task sees all GPUs")
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    try:
        (torch.zeros(1, device=chosen) + 1).item()
    except RuntimeError as error:  # e.g. this torch has no kernels for the GPU's architecture
        problem = f"{torch.cuda.get_device_name(chosen)}: {first_line(error)} (docs/questions.md)"
        raise UserError(f"{problem}; --device cpu runs without it") from None
    return chosen


def wants_compile(compile: str, device: torch.device) -> bool:
    """Return whether to use torch.compile. "auto" enables it on a CUDA GPU with Triton."""
    has_triton = importlib.util.find_spec("triton") is not None  # not installed on Windows
    return compile == "on" or (compile == "auto" and device.type == "cuda" and has_triton)


def keep_freed_memory() -> None:
    """Make malloc reuse the memory of freed tensors instead of returning it (glibc only).

    By default glibc returns large buffers to the kernel, and the next step faults them in again.
    On a CPU, that took a third of the step time for GPT-2 (124M), and more than half of it for a
    small model. The price is fragmentation."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # musl lacks it
        libc.mallopt(-4, 0)  # M_MMAP_MAX: never mmap a buffer separately
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap


def peak_memory() -> int | None:
    """Return the peak bytes allocated on the CUDA device, or else the process's peak RSS.

    Returns None on Windows without CUDA."""
    if torch.cuda.is_initialized():  # do not initialize CUDA for a CPU run
        return torch.cuda.max_memory_allocated()
    if os.name == "nt":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def reset_peak_memory() -> None:
    """Reset the peak that peak_memory() returns. No-op without CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


LARGE = 50_000_000  # parameters; on a CPU, smaller models train in float32 by default


def choose_precision(
    dtype: str, device: torch.device, parameters: int = 0, previous: str | None = None
) -> tuple[str, str]:
    """Return the matmul precision, and a line with the device, the precision and the reason.

    `dtype` is --dtype, `parameters` the model's parameter count, and `previous` the precision that
    a resumed run has used so far. By default, models below LARGE stay in float32 on a CPU, so that
    their losses are comparable across CPUs."""
    chip = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    elif device.type == "mps":
        chip = "Apple GPU"

    if dtype != "auto":
        name, reason = dtype, "as requested"
    elif device.type == "cuda":
        # Not is_bf16_supported(), which is also true for GPUs that emulate it slowly (T4, V100).
        if torch.cuda.get_device_capability(device) >= (8, 0):
            name, reason = "bfloat16", "supported by the chip"
        else:
            name, reason = "float16", "the chip has no bfloat16; training scales the loss"
    elif device.type == "mps":
        name, reason = "float32", "the safe choice on MPS"
    elif parameters < LARGE:
        name, reason = "float32", "comparable across CPUs"
    elif previous:
        name, reason = previous, "as in the checkpoint"
    else:
        rates = matmul_flops(device, torch.bfloat16, torch.float32)
        speedup = rates[0] / rates[1]
        name = "bfloat16" if speedup >= 1.3 else "float32"
        reason = f"bfloat16 matmuls run at {speedup:.2g}x the speed of float32"
    if name == "tf32" and not has_tf32(device):
        name, reason = "float32", "the chip has no TF32"
    if previous not in (None, name):
        reason += f"; previously {previous}"
    return name, f"{device} ({chip}), {name}: {reason}"


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def dtype_of(precision: str) -> torch.dtype:
    """Return a precision's tensor dtype: float32 for tf32, otherwise the dtype of that name."""
    return torch.float32 if precision == "tf32" else getattr(torch, precision)


def allow_tf32(precision: str, device: torch.device) -> None:
    """Allow TF32 for float32 matmuls on a CUDA GPU, unless the precision is float32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")


# Dense 16-bit TFLOP/s with float32 accumulation; TF32 runs at half that rate. Keys are the exact
# device names without "NVIDIA" or "Tesla". GPUs not listed here are measured. Sources: NVIDIA's
# data sheets (half of "with sparsity") and AMD's; for GeForce, NVIDIA's white papers ("FP16 Tensor
# TFLOPS with FP32 Accumulate").
# fmt: off
PEAK_TFLOPS = {
    "B200": 2250, "GH200 480GB": 990, "H200": 989, "H100 80GB HBM3": 989, "H100 NVL": 836,
    "H100 PCIe": 756, "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312,
    "A100 80GB PCIe": 312, "A40": 149.7, "A10": 125, "L40S": 362, "L4": 121, "RTX A6000": 155,
    "RTX 6000 Ada Generation": 364, "GeForce RTX 5090": 209.5, "GeForce RTX 4090": 165.2,
    "GeForce RTX 3090 Ti": 80, "GeForce RTX 3090": 71, "V100-SXM2-16GB": 125, "T4": 65,
    "AMD Instinct MI300X": 1307,
}
# fmt: on


@functools.cache
def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Return the FLOP/s that count as 100% MFU in this precision, and the figure's source."""
    if device.type == "cuda" and precision != "float32":
        name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").removeprefix("Tesla ")
        if name in PEAK_TFLOPS:
            peak = PEAK_TFLOPS[name] * 1e12
            return peak / 2 if precision == "tf32" else peak, "data sheet"
    n = 4096 if device.type == "cuda" else 1024
    allow_tf32(precision, device)
    (rate,) = matmul_flops(device, dtype_of(precision), n=n)
    return rate, f"measured, {n} x {n} product"


def matmul_flops(device: torch.device, *dtypes: torch.dtype, n: int = 1024) -> list[float]:
    """Return the best FLOP/s of up to 20 n x n matmuls in each dtype, measured in about a second.

    The dtypes take turns, so that other programs disturb them equally. The inputs are random,
    because a GPU draws less power and clocks higher on zeros."""
    generator = torch.Generator(device).manual_seed(0)  # leave the global RNG alone
    a = torch.randn(n, n, device=device, generator=generator)
    matrices = [a.to(dtype) for dtype in dtypes]
    synchronize = getattr(torch, device.type).synchronize  # exists for torch.cpu, too
    rounds = []
    start = time.perf_counter()
    while len(rounds) < 20 and (not rounds or time.perf_counter() - start < 1):
        seconds = []
        for matrix in matrices:
            began = time.perf_counter()
            matrix @ matrix
            synchronize()
            seconds.append(time.perf_counter() - began)
        rounds.append(seconds)
    return [2 * n**3 / min(times) for times in zip(*rounds, strict=True)]

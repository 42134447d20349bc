"""Device and precision: what the machine has, how to use it, and how fast it could be."""

import ctypes
import functools
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from support.command_line import print0, warn
from support.errors_and_signals import UserError, first_line

if TYPE_CHECKING:
    from support.ranks import Ranks


def choose_device(device: str, local_rank: int = 0, world_size: int = 1) -> torch.device:
    """The device that --device asks for; auto: the first available. Prepares the process for it."""
    problem = gpu_problem() if device in ("auto", "cuda") else ""
    available = ["cpu"]
    if torch.backends.mps.is_available() and world_size == 1:  # it has no process group
        available.insert(0, "mps")
    if uses_cuda("cuda"):
        available.insert(0, "cuda")
    kind = available[0] if device == "auto" else device
    if kind not in available:
        choice = f"not available for {world_size} processes; choose {', '.join(available)}"
        raise UserError(f"--device {device}: {problem or choice}")
    if problem and world_size > 1:  # probably a run of billions of tokens
        raise UserError(f"{problem}; --device cpu trains without it")
    if problem:
        warn(f"{problem}; continuing on the CPU")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count:
            problem = f"process {local_rank} of this machine has no GPU: it sees only {count}"
            remedy = "lower --nproc_per_node; under Slurm, replace --gpus-per-task by"
            raise UserError(f"{problem}; {remedy} --gpus-per-node, so that each task sees all")
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
        return chosen
    return torch.device(kind)


def uses_cuda(device: str) -> bool:
    """True if --device DEVICE means a CUDA GPU here."""
    return device in ("auto", "cuda") and torch.cuda.is_available() and not gpu_problem()


def gpu_problem() -> str:
    """Why torch has no kernels for this machine's GPU, with the remedy. "" if it has some.

    torch itself would name a build that does not exist. Of a driver that is too old it warns."""
    # AMD's GPUs have other names for their architectures.
    if not torch.cuda.is_available() or torch.version.hip:
        return ""
    capability = torch.cuda.get_device_capability()
    if has_kernels(capability, torch.cuda.get_arch_list()):
        return ""
    card = f"{torch.cuda.get_device_name()} (compute capability {'{}.{}'.format(*capability)})"
    remedy = "install torch 2.14 for CUDA 12.6, which still does (docs/questions.md)"
    return f"torch {torch.__version__} does not support the {card}: {remedy}"


def has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """True if code for one of torch.cuda.get_arch_list() runs on a card of this capability.

    sm_86 is machine code, which also runs on later minor versions, such as 8.9. compute_86 is PTX,
    which the driver compiles for any later card. The suffix a (sm_90a) allows no other version."""
    for architecture in architectures:
        kind, digits, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", architecture).groups()
        built_for = divmod(int(digits), 10)
        if built_for == capability or (built_for < capability and kind == "compute" and not suffix):
            return True
        if built_for < capability and built_for[0] == capability[0] and suffix != "a":
            return True
    return False


def can_compile(ranks: "Ranks", required: bool) -> bool:
    """True if torch.compile works for the device, as rank 0 has tried. Else it prints a line.

    If it is required, that is a UserError."""
    problem = ranks.on_rank_0(compiler_problem, ranks.device)
    if problem and required:
        raise UserError(f"--compile on: torch has no compiler here ({problem}); use --compile off")
    if problem:
        print0(f"not compiled, which is slower: torch has no compiler here ({problem})")
    return not problem


def compiler_problem(device: torch.device) -> str:
    """What torch says if it cannot compile something small, or ""."""
    try:
        torch.compile(lambda x: x.exp() + 1)(torch.ones(8, device=device))
    except Exception as error:  # of torch, Triton or a C++ compiler: no common base
        return first_line(error)
    return ""


def keep_freed_memory() -> None:
    """Lets the process keep the memory of freed tensors for the next ones (glibc only).

    By default glibc returns large buffers to the kernel, and the next step faults them in again,
    page by page: a third of a step of GPT-2 (124M), more than half of a small model's. The price is
    that kept memory has gaps, into which a larger tensor doesn't fit (bench/memory)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # musl lacks it
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no buffers that are mapped separately
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: don't shrink the heap


def padded_length(T: int, device: torch.device, longest: int) -> int:
    """On a CUDA GPU the next multiple of 64 tokens, but at most `longest`. Elsewhere T itself.

    cuDNN plans its attention kernels again for each new length, which takes time."""
    return min(T + -T % 64, longest) if device.type == "cuda" else T


def peak_memory() -> int | None:
    """Peak bytes: of tensors on the CUDA device, otherwise of the process; None on Windows."""
    if torch.cuda.is_initialized():  # a run on the CPU leaves a GPU alone
        return torch.cuda.max_memory_allocated()
    if os.name == "nt":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def reset_peak_memory() -> None:
    """On a CUDA device, makes peak_memory() count from here on."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def gpu_software(device: torch.device) -> dict[str, str | int]:
    """The versions that speed depends on, on a CUDA device. Elsewhere there are none."""
    if device.type != "cuda":
        return {}
    driver = Path("/proc/driver/nvidia/version")  # Linux's
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 …
    version = re.search(r"\d+\.[\d.]+", driver.read_text() if driver.exists() else "")
    found = version[0] if version else "unknown"
    return {"cudnn": torch.backends.cudnn.version(), "driver": found}


LARGE = 50_000_000  # parameters from which a CPU may train in bfloat16


def choose_precision(
    dtype: str, device: torch.device, parameters: int = 0, before: str | None = None
) -> tuple[str, str]:
    """(the precision of matrix products, a line with device, precision and the reason for it)

    dtype: --dtype. parameters: of the model; without them it counts as small. before: the precision
    of a run that is resumed."""
    chip = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    elif device.type == "mps":
        chip = "Apple GPU"

    if dtype != "auto":
        name, reason = dtype, "as requested"
    elif device.type == "cuda":
        # is_bf16_supported() is also true for chips that emulate it slowly (T4, V100).
        if torch.cuda.get_device_capability(device) >= (8, 0):
            name, reason = "bfloat16", "supported by the chip"
        else:
            name, reason = "float16", "the chip has no bfloat16; gradients are scaled"
    elif device.type == "mps":
        name, reason = "float32", "the safe choice on MPS"
    elif parameters < LARGE:
        name, reason = "float32", "the same first losses on every CPU"
    elif before:
        name, reason = before, "as in the checkpoint"
    else:
        speedup = matmul_flops(device, torch.bfloat16) / matmul_flops(device, torch.float32)
        name = "bfloat16" if speedup >= 1.3 else "float32"
        reason = f"bfloat16 matmuls are {speedup:.2g} times as fast as float32's"
    if name == "tf32" and not has_tf32(device):
        name, reason = "float32", "the chip has no TF32"
    if before not in (None, name):
        reason += f"; {before} so far"
    return name, f"{device} ({chip}), {name}: {reason}"


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of matrix products in one of float32, tf32, bfloat16, float16."""
    return torch.float32 if precision == "tf32" else getattr(torch, precision)


def use_precision(precision: str, device: torch.device, keep_copies: bool = True) -> torch.autocast:
    """A context in which matrix products are computed in one of float32, tf32, bfloat16, float16.

    With all but float32, a CUDA GPU may use TF32 for products that stay in float32, from here on.
    keep_copies: keep the 16-bit copy of a weight until autocast ends, which takes memory."""
    dtype = dtype_of(precision)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    enabled = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=keep_copies)


# Dense 16-bit TFLOP/s with float32 accumulation, by torch.cuda.get_device_name without the vendor.
# Products in TF32 have half of that. Names are exact, since variants differ (H100 NVL, H100 SXM);
# other chips are measured. Sources: data sheets of NVIDIA (half of "with sparsity") and AMD;
# GeForce: white papers ("FP16 Tensor TFLOPS with FP32 Accumulate"). RTX PRO 6000: an eighth of its
# "AI TOPS", as for the RTX 4090.
# fmt: off
PEAK_TFLOPS = {
    "GB300": 2500, "B300 SXM6 AC": 2250, "GB200": 2500, "B200": 2250, "GH200 480GB": 990,
    "H200": 989, "H200 NVL": 836, "H100 80GB HBM3": 989, "H100 NVL": 836, "H100 PCIe": 756,
    "H800": 989, "H800 PCIe": 756, "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312,
    "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312, "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312,
    "A40": 149.7, "A30": 165, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 155, "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2, "GeForce RTX 3090 Ti": 80, "GeForce RTX 3090": 71,
    "V100-SXM2-16GB": 125, "V100-SXM2-32GB": 125, "V100-PCIE-16GB": 112,
    "V100-PCIE-32GB": 112, "V100S-PCIE-32GB": 130, "T4": 65, "AMD Instinct MI355X": 2500,
    "AMD Instinct MI350X": 2300, "AMD Instinct MI325X": 1307, "AMD Instinct MI300X": 1307,
}
# fmt: on


def data_sheet_flops(name: str) -> float | None:
    """FLOP/s from PEAK_TFLOPS by torch.cuda.get_device_name; None if it isn't there."""
    tflops = PEAK_TFLOPS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))
    return tflops and tflops * 1e12


@functools.cache
def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """(the FLOP/s that count as 100 % MFU in this precision, where the figure comes from)"""
    if device.type == "cuda" and precision != "float32":
        peak = data_sheet_flops(torch.cuda.get_device_name(device))
        if peak:
            return peak / 2 if precision == "tf32" else peak, "data sheet"
    n = 4096 if device.type == "cuda" else 1024
    use_precision(precision, device)
    return matmul_flops(device, dtype_of(precision), n), f"measured, {n} x {n} product"


def matmul_flops(device: torch.device, dtype: torch.dtype, n: int = 1024) -> float:
    """The best FLOP/s of up to 20 products of n x n matrices within about a second.

    The values are random: on zeros a GPU draws less power and clocks higher."""
    generator = torch.Generator(device).manual_seed(0)  # separate from the training RNG
    a = torch.randn(n, n, device=device, generator=generator).to(dtype)
    synchronize = getattr(torch, device.type).synchronize  # torch.cpu has one as well
    seconds = []
    while len(seconds) < 20 and sum(seconds) < 1:
        began = time.perf_counter()
        a @ a
        synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)

"""What the machine has: the device and precision to compute in, how fast they could be, and memory kept at hand."""

import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from support.cli import InputError, first_line, say


def choose_device(
    device: str, dtype: str, local_rank: int = 0, world_size: int = 1
) -> tuple[torch.device, torch.dtype, str]:
    """(device, dtype, a line that says what was chosen and why). Raises InputError for a device that isn't there."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if present["mps"] and world_size > 1:  # no process group exchanges its tensors
        if device == "mps":
            raise InputError("--device mps: for one process; several need --device cpu")
        present["mps"] = False
    kind = next(name for name in present if present[name]) if device == "auto" else device
    if not present.get(kind):
        there = ", ".join(name for name in present if present[name])
        raise InputError(f"--device {device}: not on this machine (auto, {there})")
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(f"{local_rank + 1} processes on this machine, but {torch.cuda.device_count()} GPUs: "
                             "lower --nproc_per_node")
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
        name = torch.cuda.get_device_name(place)
        # is_bf16_supported() alone says yes to chips that emulate it, at a fraction of float16's speed (T4, V100).
        if torch.cuda.get_device_capability(place) >= (8, 0):
            best, reason = "bfloat16", "the chip computes in it"
        else:
            best, reason = "float16", "the chip has no bfloat16; gradients are scaled"
    elif kind == "mps":
        place, name, best, reason = torch.device("mps"), "Apple GPU", "float32", "the safe choice on MPS"
    else:
        place, name = torch.device("cpu"), f"{torch.get_num_threads()} threads"
        if cpu_has_bfloat16():
            best, reason = "bfloat16", "the chip computes in it"
        else:
            best, reason = "float32", "the chip does not compute in bfloat16"
    if dtype != "auto":
        best, reason = dtype, "as asked"
    return place, getattr(torch, best), f"{place} ({name}), {best}: {reason}"


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the chip does, instead of emulating it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and cpu_has_bfloat16()


def cpu_has_bfloat16() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


# Dense 16-bit tensor-core peaks in TFLOP/s, accumulated in float32, by torch.cuda.get_device_name less the maker. The
# names are exact, as a chip's variants differ: an H100 NVL is no H100 SXM. A chip that isn't here is measured. Sources:
# NVIDIA's data sheets of each chip (where they say "with sparsity", half of it), for GeForce the architecture white
# papers' tables "FP16 Tensor TFLOPS with FP32 Accumulate" (Ampere GA102, Ada, RTX Blackwell), AMD's MI300X data sheet.
# Of the H20 NVIDIA has no public sheet; 148 is what resellers' sheets say.
PEAK_TFLOPS = {
    "B200": 2250, "GH200 480GB": 990, "H200": 989, "H200 NVL": 836, "H100 80GB HBM3": 989, "H100 NVL": 836,
    "H100 PCIe": 756, "H20": 148,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "RTX 6000 Ada Generation": 364, "RTX A6000": 155,
    "GeForce RTX 5090": 209.5, "GeForce RTX 4090": 165.2, "GeForce RTX 3090 Ti": 80, "GeForce RTX 3090": 71,
    "V100-SXM2-16GB": 125, "V100-SXM2-32GB": 125, "V100-PCIE-16GB": 112, "V100-PCIE-32GB": 112, "T4": 65,
    "AMD Instinct MI300X": 1307,
}


def data_sheet_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU's 16-bit tensor cores, None where PEAK_TFLOPS doesn't say."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    tflops = PEAK_TFLOPS.get(torch.cuda.get_device_name(device).removeprefix("NVIDIA ").removeprefix("Tesla "))
    return tflops and tflops * 1e12


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s that count as an MFU of 100 %, where the figure is from) for this device and precision."""
    if peak := data_sheet_flops(device, dtype):
        return peak, "data sheet"
    if device.type == "cpu" and not cpu_has_bfloat16():
        dtype = torch.float32  # 16 bits are emulated there, and a plain product of them is no measure
    n = 4096 if device.type == "cuda" else 1024
    return matmul_flops(device, dtype, n), f"measured, {n} x {n} product"


def matmul_flops(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """The best FLOP/s of 20 products of random n x n matrices.

    Random, because zeros and ones take a GPU less power and run at a higher clock. Training's generator is left alone.
    """
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(n, n, device=device, generator=generator).to(dtype)
    return 2 * n**3 / fastest(lambda: a @ a, device, 20)


def copy_bytes(device: torch.device, size: int) -> float:
    """The best bytes/s, read plus written, of 20 copies of `size` bytes."""
    a, b = torch.zeros(2, size // 4, device=device)
    return 2 * size / fastest(lambda: b.copy_(a), device, 20)


def fastest(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, each waited for, after one that is not counted."""
    wait = getattr(torch, device.type).synchronize  # of torch.cpu, too: there is nothing to wait for
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def why_not_compile(device: torch.device) -> str:
    """Empty when torch.compile works here; otherwise what it lacks, a C++ compiler or Triton say."""
    try:
        torch.compile(lambda x: x.cos() + 1)(torch.ones(8, device=device))
    except Exception as error:
        return first_line(error)
    return ""


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here; says why, if it doesn't."""
    if reason := why_not_compile(device):
        say(f"no torch.compile on this machine ({reason}): going on without it")
    return not reason


def round_length(length: int, device: torch.device) -> int:
    """A sequence length rounded up to a multiple of 64 on a GPU, where cuDNN's attention plans anew for every shape."""
    return length + -length % 64 if device.type == "cuda" else length


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operation failed for want of memory: torch's own error, or that of a library that torch passes on."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY))


def on_host(value: Any, before: Any = None) -> Any:
    """A copy of nested containers whose tensors are in the host's memory, where no training step changes them.

    before: an earlier copy, whose memory is used again: new pages cost more than the copying. A function among the
    values is called with the earlier copy of what it brings (support/sharding.py).
    """
    if callable(value):
        return value(before)
    if isinstance(value, torch.Tensor):
        return (torch.empty(value.shape, dtype=value.dtype) if before is None else before).copy_(value)
    if isinstance(value, dict):
        return {key: on_host(item, before.get(key) if before else None) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [on_host(item, before[i] if before else None) for i, item in enumerate(value)]
    return value


def yield_to_others() -> None:
    """On Linux, makes the calling thread one that works when the others leave time: priorities are a thread's there."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def keep_freed_memory() -> None:
    """On Linux, keeps freed CPU memory in the process: to be called before the first tensor is made.

    Otherwise glibc gives a large buffer back to the kernel as soon as it is freed, and gets it anew, page by page and
    zeroed, in the next step: of a small model's step more than half. Huge pages make what is left of it cheaper.
    """
    if sys.platform == "linux":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's; malloc.h numbers the options
            mallopt(-4, 0)  # M_MMAP_MAX: no buffer is mapped by itself
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap is not shrunk


def return_freed_memory(small: bool) -> None:
    """Takes keep_freed_memory back for buffers of 32 MiB and more: to be called when a model turns out to be large.

    New pages are little beside the products of such a step, and kept buffers leave holes that the next ones don't fit
    into: of 124M's step they took up to a fifth of the memory. small: so also for buffers of 1 MiB, and no huge pages:
    the last tenth of the memory, for a tenth of the time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-4, 65536)  # M_MMAP_MAX: its default
        mallopt(-3, 2**20 if small else 2**25)  # M_MMAP_THRESHOLD; 32 MiB is the most it takes
        if small:
            ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE

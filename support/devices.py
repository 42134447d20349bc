"""Device and precision: what the machine has, how fast it could be, and memory on it."""

import ctypes
import functools
import os
import sys
import time

import torch

from support.cli import InputError, first_line, print0


def choose_device(
    device: str, dtype: str, local_rank: int = 0, world_size: int = 1
) -> tuple[torch.device, torch.dtype, str]:
    """(device, dtype, a line with the choice and its reason). Raises InputError."""
    present = {
        "cuda": torch.cuda.is_available(),
        "cpu": True,
        "mps": torch.backends.mps.is_available() and world_size == 1,
    }  # it has no process group
    kind = next(k for k in ("cuda", "mps", "cpu") if present[k]) if device == "auto" else device
    if not present.get(kind):
        available = ", ".join(k for k in present if present[k])
        raise InputError(
            f"--device {device}: not available for {world_size} processes (auto, {available})"
        )
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"{torch.cuda.device_count()} GPUs for more than {local_rank} processes: lower "
                "--nproc_per_node"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
        name = torch.cuda.get_device_name(chosen)
        # Not is_bf16_supported(), which is true of chips that emulate it slower than float16 (T4,
        # V100).
        if torch.cuda.get_device_capability(chosen) >= (8, 0):
            best, reason = "bfloat16", "supported by the chip"
        else:
            best, reason = "float16", "the chip has no bfloat16; gradients are scaled"
    elif kind == "mps":
        chosen, name, best, reason = (
            torch.device("mps"),
            "Apple GPU",
            "float32",
            "the safe choice on MPS",
        )
    else:
        chosen, name = torch.device("cpu"), f"{torch.get_num_threads()} threads"
        best, reason = "float32", "the same losses on every CPU"
    if dtype != "auto":
        best, reason = dtype, "as requested"
    return chosen, getattr(torch, best), f"{chosen} ({name}), {best}: {reason}"


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(the FLOP/s that count as 100 % MFU, where the figure comes from) for this device and
    precision."""
    if device.type == "cuda" and dtype != torch.float32:
        from support.gpus import data_sheet_flops

        if peak := data_sheet_flops(torch.cuda.get_device_name(device)):
            return peak, "data sheet"
    n = 4096 if device.type == "cuda" else 1024
    return matmul_flops(device, dtype, n), f"measured, {n} x {n} product"


def matmul_flops(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """The best FLOP/s of up to 20 products of n x n matrices within about a second.

    The values are random, because on zeros a GPU draws less power and clocks higher.
    """
    generator = torch.Generator(device).manual_seed(0)  # leaves training's generator alone
    a = torch.randn(n, n, device=device, generator=generator).to(dtype)
    synchronize = getattr(torch, device.type).synchronize  # exists for torch.cpu, too
    seconds: list[float] = []
    while len(seconds) < 20 and sum(seconds) < 1:
        began = time.perf_counter()
        a @ a
        synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)


def bfloat16_speedup() -> float:
    """This CPU's speed in bfloat16 matmuls, relative to float32; below 1 where they are
    emulated."""
    flops = [
        matmul_flops(torch.device("cpu"), dtype, 256) for dtype in (torch.bfloat16, torch.float32)
    ]
    return flops[0] / flops[1]


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here; prints why, if it does not (no C++ compiler, no Triton)."""
    try:
        torch.compile(lambda x: x.cos() + 1)(torch.ones(8, device=device))
    except Exception as error:
        print0(
            f"torch.compile does not work on this machine ({first_line(error)}): continuing without it"
        )
        return False
    return True


def round_length(length: int, device: torch.device) -> int:
    """A length, on a GPU rounded up to a multiple of 64: cuDNN's attention plans again for each
    shape."""
    return length + -length % 64 if device.type == "cuda" else length


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operation ran out of memory, by torch's own message or a library's that it passes
    on."""
    message = str(error).lower()  # "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, RuntimeError) and ("out of memory" in message or "alloc" in message)


def keep_freed_memory() -> None:
    """On Linux, keeps freed CPU memory in the process. Call before the first tensor is made.

    By default glibc returns a large buffer to the kernel when it is freed, and the next step faults
    it in again, page by page: more than half of a small model's step. Huge pages make the remaining
    faults cheaper."""
    if sys.platform == "linux":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if mallopt := getattr(
            ctypes.CDLL(None), "mallopt", None
        ):  # glibc's; malloc.h numbers the options
            mallopt(-4, 0)  # M_MMAP_MAX: map no buffer separately
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap

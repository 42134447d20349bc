"""Device and precision: what the machine has, and how fast it could be."""

import ctypes
import functools
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from support.cli import UserError, first_line, print0


def choose_device(
    device: str, dtype: str, local_rank: int = 0, world_size: int = 1
) -> tuple[torch.device, torch.dtype, str]:
    """(device, dtype, a line with the choice and its reason). Prepares the process for it."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available() and world_size == 1,  # it has no process group
        "cpu": True,
    }
    available = [kind for kind in present if present[kind]]
    kind = available[0] if device == "auto" else device
    if kind not in available:
        choice = f"not available for {world_size} processes; choose {', '.join(available)}"
        raise UserError(f"--device {device}: {choice}")
    chosen = torch.device(kind)
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            problem = f"{torch.cuda.device_count()} GPUs for more than {local_rank} processes"
            raise UserError(f"{problem}: lower --nproc_per_node")
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
        name = torch.cuda.get_device_name(chosen)
        # Not is_bf16_supported(): true for chips that emulate it slower than float16 (T4, V100).
        if torch.cuda.get_device_capability(chosen) >= (8, 0):
            best, reason = "bfloat16", "supported by the chip"
        else:
            best, reason = "float16", "the chip has no bfloat16; gradients are scaled"
    elif kind == "mps":
        name, best, reason = "Apple GPU", "float32", "the safe choice on MPS"
    else:
        name = f"{torch.get_num_threads()} threads"
        best, reason = "float32", "the same losses on every CPU, to rounding"
        if sys.platform == "linux":
            # Keep freed memory. By default glibc returns large buffers to the kernel, and the next
            # step faults them in again, page by page: a third of GPT-2 (124M)'s step, more than
            # half of a small model's.
            mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)  # in glibc
            mallopt(-4, 0)  # M_MMAP_MAX: map no buffer separately
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap
    if dtype != "auto":
        best, reason = dtype, "as requested"
    return chosen, getattr(torch, best), f"{chosen} ({name}), {best}: {reason}"


def join_process_group(
    rank: int, world_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Joins torchrun's process group; checks that all ranks use the same kind of device."""
    patience = timedelta(hours=1)  # ranks may wait for rank 0's files
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun (2.13) keeps one store across restarts, with the addresses of lost ranks in it.
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"restart_{restart}", store)
    kind = f"{device.type} in {str(dtype).removeprefix('torch.')}"
    store.set(f"kind/{rank}", kind)
    first = store.get("kind/0").decode()
    if first != kind:
        raise UserError(f"{kind} here, {first} on rank 0: set --device and --dtype")
    gpu = device if device.type == "cuda" else None
    where = {"store": store, "rank": rank, "world_size": world_size, "device_id": gpu}
    dist.init_process_group("nccl" if gpu else "gloo", timeout=patience, **where)


# --------------------------------------------------------------------------------------------------
# Speed


def time_left(ends: Sequence[float], seconds: float, steps: int) -> str:
    """How long `steps` more steps will take: "1 min 10 s left".

    ends: when the latest steps ended, so that pauses between them, to evaluate and save, count.
    seconds: of the latest step, for when it is the only one."""
    if len(ends) > 1:
        seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    return f"{duration(seconds * steps)} left"


def duration(seconds: float) -> str:
    """For people: 0 min 40 s, or 19 h 8 min."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(the FLOP/s that count as 100 % MFU in this precision, where the figure comes from)"""
    n = 4096 if device.type == "cuda" else 1024
    if device.type == "cuda" and dtype != torch.float32:
        from support.gpus import data_sheet_flops

        peak = data_sheet_flops(torch.cuda.get_device_name(device))
        if peak:
            return peak, "data sheet"
    return matmul_flops(device, dtype, n), f"measured, {n} x {n} product"


def matmul_flops(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """The best FLOP/s of up to 20 products of n x n matrices within about a second.

    The values are random: on zeros a GPU draws less power and clocks higher."""
    generator = torch.Generator(device).manual_seed(0)  # separate from the training RNG
    a = torch.randn(n, n, device=device, generator=generator).to(dtype)
    synchronize = getattr(torch, device.type).synchronize  # exists for torch.cpu, too
    seconds = []
    while len(seconds) < 20 and sum(seconds) < 1:
        began = time.perf_counter()
        a @ a
        synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)


def cpu_precision(before: str | None = None) -> tuple[torch.dtype, str]:
    """Like choose_device for a large model on a CPU; a resumed one stays in its dtype `before`."""
    if before:
        name, reason = before.removeprefix("torch."), "as in the checkpoint"
    else:
        cpu = torch.device("cpu")
        ratio = matmul_flops(cpu, torch.bfloat16, 1024) / matmul_flops(cpu, torch.float32, 1024)
        name = "bfloat16" if ratio >= 1.3 else "float32"
        reason = f"bfloat16 matmuls are {ratio:.2g} times as fast as float32's"
    return getattr(torch, name), f"cpu ({torch.get_num_threads()} threads), {name}: {reason}"


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here; prints why if it doesn't (no C++ compiler, no Triton)."""
    try:
        torch.compile(lambda x: x.cos() + 1)(torch.ones(8, device=device))
    except Exception as error:
        problem = f"torch.compile does not work on this machine ({first_line(error)})"
        print0(f"{problem}: continuing without it")
        return False
    return True


def round_length(length: int, device: torch.device) -> int:
    """On a GPU rounds up to a multiple of 64: cuDNN's attention plans again for each shape."""
    return length + -length % 64 if device.type == "cuda" else length


def peak_memory() -> int | None:
    """Peak bytes: of tensors on a CUDA device, otherwise of the process; None on Windows."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if os.name == "nt":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

"""Device, precision and memory: what the machine has, how fast it could be, and what fits."""

import ctypes
import functools
import gc
import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from support.cli import LostRank, RunError, UserError, first_line, print0


def choose_device(
    device: str, dtype: str, local_rank: int = 0, world_size: int = 1
) -> tuple[torch.device, torch.dtype, str]:
    """(device, dtype, a line with the choice and its reason)"""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available() and world_size == 1,  # it has no process group
        "cpu": True,
    }
    available = [kind for kind in present if present[kind]]
    kind = available[0] if device == "auto" else device
    if kind not in available:
        choice = f"choose auto, {', '.join(available)}"
        raise UserError(f"--device {device}: not available for {world_size} processes; {choice}")
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
        chosen, name = torch.device("mps"), "Apple GPU"
        best, reason = "float32", "the safe choice on MPS"
    else:
        chosen, name = torch.device("cpu"), f"{torch.get_num_threads()} threads"
        best, reason = "float32", "the same losses on every CPU"
    if dtype != "auto":
        best, reason = dtype, "as requested"
    return chosen, getattr(torch, best), f"{chosen} ({name}), {best}: {reason}"


def prepare_training(device: torch.device, dtype: torch.dtype, deterministic: bool) -> None:
    """Settings to be made before the first tensor."""
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "mps" and dtype == torch.float16:
        # Its fused AdamW ignores found_inf (PR #186360).
        raise UserError("--dtype float16: overflows would ruin the weights on MPS; use float32")
    if device.type == "cuda" and dtype != torch.float32:
        torch.set_float32_matmul_precision("high")  # TF32 for matmuls that remain in float32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matmul
        torch.use_deterministic_algorithms(True)


def join_process_group(
    rank: int, world_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Joins torchrun's process group, after all ranks have chosen the same kind of device."""
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
        problem = f"this rank would use {kind}, rank 0 {first}"
        raise UserError(f"{problem}: set --device and --dtype")
    cuda = device.type == "cuda"
    where = {"store": store, "rank": rank, "world_size": world_size, "timeout": patience}
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None, **where)


# --------------------------------------------------------------------------------------------------
# Speed


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(the FLOP/s that count as 100 % MFU in this precision, where the figure comes from)"""
    peak, n = None, 1024
    if device.type == "cuda":
        from support.gpus import data_sheet_flops

        n = 4096
        if dtype != torch.float32:
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
    seconds: list[float] = []
    while len(seconds) < 20 and sum(seconds) < 1:
        began = time.perf_counter()
        a @ a
        synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 / min(seconds)


def bfloat16_speedup() -> float:
    """The speed of bfloat16 matmuls on this CPU relative to float32; below 1 where emulated."""
    cpu = torch.device("cpu")
    return matmul_flops(cpu, torch.bfloat16, 256) / matmul_flops(cpu, torch.float32, 256)


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


# --------------------------------------------------------------------------------------------------
# Memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operation ran out of memory: by type, or judging by the texts of torch."""
    texts = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC")
    known = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return isinstance(error, torch.OutOfMemoryError) or (known and "NCCL" not in str(error))


def explain(error: RuntimeError, device: torch.device, B: int) -> Exception:
    """What to raise for an error of torch: out of memory, a failed exchange, or itself if a bug."""
    message = str(error)
    if is_out_of_memory(error):
        smaller = f"--micro-batch-size {B // 2}, " if B > 1 else ""
        if B == 0:
            smaller = "a --micro-batch-size below the one in the line `batch:`, "
        options = f"{smaller}--low-memory, or --shard-optimizer on several ranks"
        return UserError(f"out of memory on {device}: try {options}")
    cause = re.search(r"Last error:\s*(.+)", message)  # NCCL's
    detail = f" ({cause[1]})" if cause else ""
    if re.search(r"Connection (closed|reset) by peer|remote process exit|was aborted", message):
        remedy = "see its error line, or torchrun's report"
        return LostRank(f"another rank has exited or cannot be reached{detail}; {remedy}")
    if "NCCL" in message:
        return RunError(f"NCCL failed: {first_line(error)}{detail}")
    return error


def fits(
    model: torch.nn.Module,
    B: int,
    T: int,
    low_memory: bool,
    autocast: torch.autocast,
    several_ranks: bool,
    shards: int,
    keeps_logits: bool,
    accumulates: bool,
) -> bool:
    """Tries whether a GPU has the memory for a step with micro-batches of B sequences.

    Runs an eager forward and backward pass with the chunked loss, which stores no less than a
    compiled one, beside what else a step needs: the optimizer's moments, divided by `shards`;
    buffers for several ranks; keeps_logits: those of a compiled loss, and their gradient;
    accumulates: gradients of earlier micro-steps (or DDP's buckets) during the backward pass."""
    weight, (V, _) = model.wte.weight, model.wte.weight.shape
    reserve = 8 * model.num_parameters() // shards
    if keeps_logits:
        reserve += 2 * B * T * (V + -V % 64) * autocast.fast_dtype.itemsize
    if several_ranks:
        reserve += 2**30  # an allowance for NCCL
    loss_function = model.loss_function
    try:
        model.prepare(low_memory=low_memory)
        x = torch.zeros(B, T, dtype=torch.int64, device=weight.device)
        reserved = torch.empty(reserve, dtype=torch.uint8, device=weight.device)
        if accumulates:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        with autocast:
            _, loss = model(x, x)
        loss.backward()
        del reserved
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.loss_function = loss_function
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


# Of glibc; malloc.h numbers the options. Other C libraries lack it.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
mallopt = getattr(LIBC, "mallopt", lambda option, value: 0)


def keep_freed_memory() -> None:
    """Keeps freed CPU memory in the process. Call before the first tensor is made.

    By default glibc returns a large buffer to the kernel when it is freed, and the next step faults
    it in again, page by page: more than half of a small model's step. Huge pages make the remaining
    faults cheaper."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt(-4, 0)  # M_MMAP_MAX: map no buffer separately
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap


def return_freed_memory(low_memory: bool) -> None:
    """Undoes keep_freed_memory for buffers of 32 MiB and more, when the model is large.

    There page faults are cheap beside the matmuls, and kept buffers fragment the heap: a fifth of
    the memory of a 124M step. low_memory: buffers of 1 MiB, too, and no huge pages, which saves the
    last tenth of the memory for a tenth of the time."""
    mallopt(-4, 65536)  # M_MMAP_MAX: its default
    mallopt(-3, 2**20 if low_memory else 2**25)  # M_MMAP_THRESHOLD; 32 MiB is its maximum
    if low_memory and LIBC:
        LIBC.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE

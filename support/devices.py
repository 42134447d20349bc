"""Device and precision: what the machine has, how fast it could be, and memory on it."""

import ctypes
import functools
import gc
import os
import sys
import time

import torch

from support.cli import UserError, first_line, print0


def choose_device(
    device: str, dtype: str, local_rank: int = 0, world_size: int = 1
) -> tuple[torch.device, torch.dtype, str]:
    """(device, dtype, a line with the choice and its reason). Raises UserError."""
    present = {
        "cuda": torch.cuda.is_available(),
        "cpu": True,
        "mps": torch.backends.mps.is_available() and world_size == 1,
    }  # it has no process group
    kind = next(k for k in ("cuda", "mps", "cpu") if present[k]) if device == "auto" else device
    if not present.get(kind):
        available = ", ".join(k for k in present if present[k])
        raise UserError(
            f"--device {device}: not available for {world_size} processes (auto, {available})"
        )
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
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


# Dense 16-bit tensor-core peaks in TFLOP/s with float32 accumulation, by torch.cuda.get_device_name
# without the vendor. Names are exact, since variants of a chip differ: an H100 NVL is no H100 SXM.
# Others are measured. Sources: NVIDIA's data sheets (half of what they give "with sparsity"), for
# GeForce the architecture white papers' tables "FP16 Tensor TFLOPS with FP32 Accumulate" (Ampere
# GA102, Ada, RTX Blackwell), AMD's MI300X data sheet. NVIDIA publishes no sheet for the H20; 148 is
# in resellers' sheets. RTX 4090 D: an eighth of NVIDIA's 1,177 "AI TOPS", as 165.2 is of the 4090's
# 1,321.
# fmt: off
PEAK_TFLOPS = {
    "B200": 2250, "GH200 480GB": 990, "H200": 989, "H200 NVL": 836, "H100 80GB HBM3": 989,
    "H100 NVL": 836, "H100 PCIe": 756, "H800": 989, "H800 PCIe": 756, "H20": 148,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312,
    "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 155, "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2, "GeForce RTX 4090 D": 147.1, "GeForce RTX 3090 Ti": 80,
    "GeForce RTX 3090": 71, "V100-SXM2-16GB": 125, "V100-SXM2-32GB": 125, "V100-PCIE-16GB": 112,
    "V100-PCIE-32GB": 112, "T4": 65, "AMD Instinct MI300X": 1307,
}
# fmt: on


def data_sheet_flops(name: str) -> float | None:
    """16-bit tensor-core FLOP/s by torch.cuda.get_device_name; None for a GPU not in
    PEAK_TFLOPS."""
    tflops = PEAK_TFLOPS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))
    return tflops and tflops * 1e12


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(the FLOP/s that count as 100 % MFU, where the figure comes from) for this device and
    precision."""
    peak = None
    if device.type == "cuda" and dtype != torch.float32:
        peak = data_sheet_flops(torch.cuda.get_device_name(device))
    if peak:
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


def fits(
    model: torch.nn.Module,
    B: int,
    T: int,
    dtype: torch.dtype,
    moments: int,
    keeps_logits: bool,
    accumulates: bool,
) -> bool:
    """Whether a GPU has the memory for a step with micro-batches of B sequences, by trying an eager
    forward and backward pass with the chunked loss, which stores no less than a compiled one,
    beside what else the step holds.

    moments: bytes of the optimizer's state. keeps_logits: a compiled loss keeps 16-bit logits.
    accumulates: gradients of earlier micro-steps (or DDP's buckets) are there during the backward
    pass."""
    loss_function, (V, _), device = (
        model.loss_function,
        model.wte.weight.shape,
        model.wte.weight.device,
    )
    try:
        model.prepare(compiled=False)
        logits = B * T * (V + -V % 64) * dtype.itemsize if keeps_logits else 0
        reserved = torch.empty(moments + logits, dtype=torch.uint8, device=device)
        for p in model.parameters() if accumulates else ():
            p.grad = torch.zeros_like(p)
        x = torch.zeros(B, T, dtype=torch.int64, device=device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            model(x, x)[1].backward()
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


def return_freed_memory(low_memory: bool) -> None:
    """On Linux, undoes devices.keep_freed_memory for buffers of 32 MiB and more, when the model
    turns out to be large.

    For a large model page faults are cheap next to the matmuls, while retained buffers fragment the
    heap: a fifth of the memory of a 124M step. low_memory: buffers of 1 MiB, too, and no huge
    pages, which saves a last tenth of the memory for a tenth of the time."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-4, 65536)  # M_MMAP_MAX: its default
        mallopt(-3, 2**20 if low_memory else 2**25)  # M_MMAP_THRESHOLD; 32 MiB is its maximum
        if low_memory:
            ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE

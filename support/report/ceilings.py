"""What the machine is, and its ceilings: products, copies, launches, and the way to the device."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from support.devices import copy_bytes, cpu_has_bfloat16, data_sheet_flops, fastest, matmul_flops

PACKAGES = ("torch", "triton", "numpy", "transformers", "tiktoken", "safetensors")
NVIDIA_SMI = ("name", "driver_version", "memory.total", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem",
              "clocks.max.mem", "temperature.gpu")


def device_name(device: torch.device) -> str:
    """The chip, as it names itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def products(device: torch.device) -> dict[str, float]:
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
        torch.set_float32_matmul_precision("highest")
    torch.cuda.empty_cache()
    return found


def ceiling_of(peaks: dict[str, float], precision: str) -> float:
    """The FLOP/s that a step in `precision` could reach."""
    names = (precision, "float32", *["tf32"] * (precision == "float32"))
    return max(peaks.get(name, 0.0) for name in names)


def launch_seconds(device: torch.device) -> float:
    """Seconds from one small operation to the next, when none is waited for: the best of five rounds of 1,000."""
    x = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(1000):
            x.add_(1.0)

    return fastest(launch, device, 5) / 1000


def host_bytes(device: torch.device) -> float | None:
    """bytes/s from pinned memory to a CUDA device; None elsewhere."""
    if device.type != "cuda":
        return None
    source = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return source.numel() / fastest(lambda: target.copy_(source, non_blocking=True), device, 10)


def nvidia_smi() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; {} where there is none."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(NVIDIA_SMI, (cell.strip() for cell in line.split(",")), strict=False))


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return found | {k: str(v) for k, v in (("cuda", torch.version.cuda), ("cudnn", cudnn)) if v}


def measure_machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The part "machine" of a report."""
    before = nvidia_smi() if device.type == "cuda" else {}
    peaks = products(device)
    after = nvidia_smi() if device.type == "cuda" else {}
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {
        "chip": device_name(device), "memory": memory, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None, "versions": versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "smi": before, "clock_after_products": after.get("clocks.sm"),
        "flops": peaks, "precision": str(dtype).removeprefix("torch."),
        "data_sheet_flops": data_sheet_flops(device, dtype),
        "copy": copy_bytes(device, 2**30 if device.type == "cuda" else 2**27),
        "launch": launch_seconds(device), "host": host_bytes(device),
    }

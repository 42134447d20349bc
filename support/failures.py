"""What errors of torch mean to a user. Loaded when one occurs."""

import re

import torch

from support.cli import LostRank, RunError, UserError, first_line


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

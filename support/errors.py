"""Errors that users see, each as one line, and what PyTorch's errors mean to them."""

import re


class UserError(Exception):
    """Something the user can fix: exit status 2. One line says what is wrong and how to fix it."""


class RunError(Exception):
    """A run with valid input cannot continue: exit status 1. The message is one line."""


class LostRank(RunError):
    """A collective failed because another rank has exited."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """True if an operation ran out of memory, judging by the error's type or PyTorch's texts."""
    import torch  # not at the top: fineweb.py's workers import this module and don't need torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or "NCCL" in str(error):
        return False
    texts = (
        "out of memory",
        "can't allocate memory",
        "not enough memory",
        "CUBLAS_STATUS_ALLOC",
        "Storage size calculation overflowed",
    )
    return any(text in str(error) for text in texts)


def explain(error: RuntimeError, device: str, B: int = 0) -> Exception:
    """Turns one of PyTorch's errors into one for users; returns any other error unchanged.

    device: where it happened. B: sequences per micro-batch; 0 if it is not known yet."""
    message = str(error)
    if is_out_of_memory(error):
        smaller = f"--micro-batch-size {B // 2} or " if B > 1 else ""
        return UserError(f"out of memory on {device}: try {smaller}--low-memory")
    cause = re.search(r"Last error:\s*(.+)", message)  # NCCL gives the cause on a later line
    detail = f" ({cause[1]})" if cause else ""
    if re.search(r"Connection (closed|reset) by peer|remote process exit|was aborted", message):
        remedy = "see its error line, or torchrun's report"
        return LostRank(f"another rank has exited or cannot be reached{detail}; {remedy}")
    if "NCCL" in message:
        return RunError(f"NCCL failed: {first_line(error)}{detail}")
    return error

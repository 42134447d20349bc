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
    import torch

    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        problem = f"torch.compile does not work on this machine ({first_line(error)})"
        compiler = "g++" if device == "cpu" else "gcc"
        remedy = f"`apt install {compiler} python3-dev` may help; --no-compile trains without it"
        return UserError(f"{problem}; {remedy}")
    if is_out_of_memory(error):
        smaller = f"--micro-batch-size {B // 2} or " if B > 1 else ""
        return UserError(f"out of memory on {device}: try {smaller}--low-memory")
    # NCCL and gloo name themselves, at least by the path of their source file.
    if isinstance(error, torch.distributed.DistError) or re.search("NCCL|gloo", str(error)):
        problem = f"an exchange between ranks failed ({first_line(error)})"
        remedy = "another rank has probably ended: see its error line, or torchrun's report"
        return LostRank(f"{problem}; {remedy}")
    return error

"""Where a step's time goes: the profiler's trace, operator by operator and kernel by kernel, summed by part."""

import json
import math
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import profile

from support.tokenizer import VOCAB_SIZE

COMMUNICATION, ATTENTION, MATMULS, HEAD, OTHERS, OPTIMIZER, DATA, GAPS = PARTS = (
    "communication", "attention", "matmuls of the blocks", "head and loss", "norms, GELU, residual", "optimizer",
    "data", "gaps",
)


def part_of(name: str, sizes: str, parent: str) -> str:
    """The part that an operator or a kernel belongs to: by its name and its inputs' sizes, or else its parent's."""
    if OPTIMIZER in (name, parent) or DATA in (name, parent):
        return OPTIMIZER if OPTIMIZER in (name, parent) else DATA
    if re.search("nccl|gloo|c10d|all_?reduce", name, re.IGNORECASE):
        return COMMUNICATION
    if re.search(rf"\b({VOCAB_SIZE}|50304)\b", sizes) or re.search("log_softmax|nll_loss|cross_entropy", name):
        return HEAD
    if re.search("cpp_fused|triton_", name):  # compiled: these bear the names of all operators that went in
        return OTHERS
    if re.search("attention|flash|fmha|sdp|bmm", name, re.IGNORECASE):
        return ATTENTION
    if re.search("(mm|linear)(Backward|$)", name, re.IGNORECASE):
        return MATMULS
    return OTHERS if parent == GAPS and name.startswith("aten::") else parent


def assign_parts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a trace that are work, each with its "part" and its "own" microseconds: a GPU's kernels, or else
    the operators of the main thread, without those that they call."""
    events = [e for e in events if e.get("ph") == "X"]
    spans = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    open_spans: list[dict[str, Any]] = []
    for e in sorted(spans, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
        while open_spans and (open_spans[-1]["tid"] != e["tid"] or e["ts"] >= open_spans[-1]["end"]):
            open_spans.pop()
        parent = open_spans[-1] if open_spans else {"part": GAPS, "own": 0.0}
        name = "" if e["name"].startswith("##") else e["name"]  # a compiled graph's, with letters at random
        e["part"] = part_of(name, str(e.get("args", {}).get("Input Dims", "")), parent["part"])
        e["own"], e["end"] = e["dur"], e["ts"] + e["dur"]
        parent["own"] -= e["dur"]
        open_spans.append(e)
    launched = {e["args"]["External id"]: e["part"] for e in spans if "External id" in e.get("args", {})}
    for e in work:
        part = launched.get(e["args"].get("External id"), OTHERS)
        e["part"] = part if part not in (GAPS, OTHERS) else part_of(e["name"], "", OTHERS)
        e["own"] = e["dur"]
    if not work:
        main = next(e["tid"] for e in spans if e["name"] == OPTIMIZER)
        work = [e for e in spans if e["tid"] == main or e["part"] == COMMUNICATION]
    return work


def time_by_part(events: list[dict[str, Any]], steps: int, step_ms: float) -> dict[str, float]:
    """Milliseconds a step by part, from the profiler's trace of `steps` steps of `step_ms` each. They sum to step_ms.

    On a CPU an operator counts with its own time, without that of the operators it calls; on a GPU every kernel counts
    for the operator that launched it. Head and loss: whatever has the vocabulary among its inputs' sizes (the token
    embedding is the same matrix) or a loss's name. Attention: the products of queries, keys and values. Matmuls: the
    other products. What compilation has fused is the loss, or else norms, GELU, residual (with casts and copies).
    Optimizer: from clipping to zero_grad. Communication: only while nothing else runs. Gaps: the rest of the step,
    in which Python, autograd or the launch of kernels is waited for.
    """
    work = assign_parts(events)
    parts = {part: sum(e["own"] for e in work if e["part"] == part) / 1e3 / steps for part in PARTS}
    alone = covered(work) - covered([e for e in work if e["part"] != COMMUNICATION])
    parts |= {COMMUNICATION: alone / 1e3 / steps, GAPS: 0.0}
    return parts | {GAPS: step_ms - sum(parts.values())}


def largest_kernels(events: list[dict[str, Any]], steps: int, count: int = 20) -> list[dict[str, Any]]:
    """The kernels (on a CPU: operators) that take most of a step: name, part, ms and calls a step, largest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for e in assign_parts(events):
        entry = sums.setdefault((e["name"][:100], e["part"]), [0.0, 0])
        entry[0] += e["own"] / 1e3 / steps
        entry[1] += 1 / steps
    rows = [{"name": name, "part": part, "ms": ms, "calls": calls} for (name, part), (ms, calls) in sums.items()]
    return sorted(rows, key=lambda row: -row["ms"])[:count]


def covered(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events ran."""
    total, reached = 0.0, -math.inf
    for e in sorted(events, key=lambda e: e["ts"]):
        total += max(e["ts"] + e["dur"] - max(e["ts"], reached), 0.0)
        reached = max(reached, e["ts"] + e["dur"])
    return total


def record(step: Callable[[int], object], steps: int) -> tuple[list[dict[str, Any]], float]:
    """The profiler's events of `steps` calls of `step`, after one that is not counted, and milliseconds a step."""
    with profile():
        step(0)  # the first is slower
    with profile(record_shapes=True) as profiler:
        began = time.perf_counter()
        for number in range(1, steps + 1):
            step(number)
        ms = 1e3 * (time.perf_counter() - began) / steps
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"], ms

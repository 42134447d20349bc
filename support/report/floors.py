"""The least time that the parts of a GPT-2 step can take: operations over the ceiling, bytes over the copy rate.

A part's floor is that of its products (the larger of the two times, as in Williams et al. 2009, "Roofline") plus that
of its passes over memory. Bytes are those of a program that fuses all it can between two products, keeps nothing in
the caches, and computes in `e` bytes a number beside a residual stream of `s` bytes (4 as shipped).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from support.report.trace import ATTENTION, COMMUNICATION, DATA, GAPS, HEAD, MATMULS, OPTIMIZER, OTHERS


@dataclass(frozen=True)
class Shape:
    """A training step of one micro-batch, in numbers."""

    B: int
    T: int
    n_layer: int
    n_embd: int
    vocab_size: int  # as the head's product has it: rounded up to a multiple of 64 on a GPU
    parameters: int
    e: int = 2  # bytes of a number in the products
    s: int = 4  # bytes of a number in the residual stream
    loss: Literal["compiled", "plain", "pieces"] = "compiled"  # pieces: as support/loss.py makes it
    explicit: bool = False  # attention that writes its T x T matrices


@dataclass(frozen=True)
class Ceilings:
    flops: float  # FLOP/s of a large product in the precision of the step
    copy: float  # bytes/s, read plus written
    host: float  # bytes/s from pinned host memory to the device


@dataclass(frozen=True)
class Floor:
    flops: float
    bytes: float
    ms: float


def product(rows: int, inner: int, columns: int, e: int) -> tuple[float, float]:
    """FLOPs and bytes of (rows, inner) x (inner, columns) with its two backward products, each reading and writing its
    matrices once."""
    return 6 * rows * inner * columns, 3 * e * (rows * inner + inner * columns + rows * columns)


def step_floors(shape: Shape, ceilings: Ceilings) -> dict[str, Floor]:
    """The floor of each part of a step, forward, backward and update, under the names that the measured parts have."""
    N, C, T, L, V, e, s = (shape.B * shape.T, shape.n_embd, shape.T, shape.n_layer, shape.vocab_size, shape.e, shape.s)

    def floor(flops: float = 0.0, product_bytes: float = 0.0, passes: float = 0.0) -> Floor:
        seconds = max(flops / ceilings.flops, product_bytes / ceilings.copy) + passes / ceilings.copy
        return Floor(flops, product_bytes + passes, 1e3 * seconds)

    linear = [product(N, C, 3 * C, e), product(N, C, C, e), product(N, C, 4 * C, e), product(N, 4 * C, C, e)]
    # Attention: two products forward, five backward (the weights are made anew), 2 T C FLOPs a token each, half of them
    # hidden by the causal mask (Dao 2023, "FlashAttention-2", section 4.1). Read q, k, v, write y; read q, k, v, y, dy,
    # write dq, dk, dv. Written out: weights, softmax and both gradients, about ten passes over nh T numbers a token; nh
    # is C / 64 in GPT-2.
    attention_flops = 7 * 2 * N * T * C * (1.0 if shape.explicit else 0.5)
    attention_passes = 10 * e * N * T * C / 64 if shape.explicit else 0.0
    # Logits: the products write and read them; compiled, the loss reads them once, and once more to write their
    # gradient. Plain: log_softmax reads float32 twice and writes, its gradient reads two and writes. In pieces
    # (ChunkedLoss): eight passes of reading or writing float32, and a sum of the head's gradient every 1,024 tokens.
    head, casts = product(N, C, V, e), 8 + 2 * e if e < 4 else 0
    head_bytes = {"compiled": 3 * e, "plain": 24 + casts, "pieces": 32 + casts}[shape.loss]
    head_passes = head_bytes * N * V + (12 * V * C * max(N / 1024, 1) if shape.loss == "pieces" else 0)
    # A half-block forward: read the stream and the branch, write the stream and its LayerNorm. Backward: read the
    # stream, its gradient and the branch's, write the stream's gradient in both precisions. GELU: read and write 4 C
    # numbers, backward read two and write one. Biases: their gradients read what the linear layers' gradients are.
    # Embeddings: written, and their gradients read. Weights: autocast reads the weights and writes them in e bytes.
    half_blocks = 2 * L * N * C * ((2 * s + 2 * e) + (3 * s + 2 * e))
    gelu, biases, embeddings = L * N * 4 * C * 5 * e, L * N * 9 * C * e, 3 * s * N * C
    weights = (4 + e) * shape.parameters if e < 4 else 0
    # Update: the norm reads the gradients, clipping reads and writes them, AdamW reads weights, gradients and two
    # moments and writes all but the gradients: ten float32 numbers a parameter.
    return {
        COMMUNICATION: Floor(0.0, 0.0, 0.0),
        ATTENTION: floor(L * attention_flops, 12 * L * N * C * e, L * attention_passes),
        MATMULS: floor(L * sum(flops for flops, _ in linear), L * sum(size for _, size in linear)),
        HEAD: floor(*head, head_passes),
        OTHERS: floor(passes=half_blocks + gelu + biases + embeddings + weights),
        OPTIMIZER: floor(passes=40 * shape.parameters),
        DATA: Floor(0.0, 16 * N, 1e3 * 16 * N / ceilings.host),
        GAPS: Floor(0.0, 0.0, 0.0),
    }


def total_ms(floors: dict[str, Floor]) -> float:
    return sum(floor.ms for floor in floors.values())


def predict(switch: str, shape: Shape, ceilings: Ceilings) -> tuple[float, str]:
    """(milliseconds by which the table of floors says that a switch changes the step, why)."""
    def change(**fields: Any) -> float:
        return total_ms(step_floors(replace(shape, **fields), ceilings)) - total_ms(step_floors(shape, ceilings))

    tokens = shape.B * shape.T * shape.n_embd * shape.n_layer
    match switch:
        case "chunked":
            return change(loss="pieces"), "more passes over the logits, in float32"
        case "plain-loss":
            return change(loss="plain"), "the logits in full, fewer passes over them"
        case "bf16-stream":
            return change(s=2), "half the bytes of the residual stream"
        case "math":
            return change(explicit=True), "T x T matrices in memory, no half saved by the mask"
        case "whole":  # the stream and its gradient cross a block's end without being written and read again
            return -1e3 * 4 * shape.s * tokens / ceilings.copy, "the stream is not written and read between two blocks"
        case "eager":  # half-blocks: casts, sum and norm apart; GELU is one kernel already
            return 2e3 * (6 * shape.e + 4 * shape.s) * tokens / ceilings.copy, "casts, sums and norms each pass alone"
    return 0.0, "the same operations and bytes: the floors see no difference"

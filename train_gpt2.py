"""Trains GPT-2 (124M) from scratch and leaves a model that Hugging Face loads.

    python train_gpt2.py                                     # FineWeb-Edu shards if present, else Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards      # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # eight GPUs: the reproduction
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train_gpt2.py
    python train_gpt2.py --resume                            # continues the run in log/
    python train_gpt2.py --help                              # every flag, its default and unit

The whole run is in this file, in reading order: model, Hugging Face folders, data, configuration,
optimizer, ranks, log, evaluation, checkpoints, and the loop, whose weight update is between two
marked lines.

Shapes: B batch (sequences of a micro-batch), T time (tokens of a sequence), C channels (n_embd =
n_head * head size), nh heads, hs head size, V vocabulary (50,257). A *step* updates the weights
from total_batch_size tokens, which the ranks share equally; each rank accumulates gradients over
micro-steps of B * T tokens. Step s is logged with the weights after s updates: the loss of step 0
is that of the untrained model."""

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from textwrap import indent
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

from support import cli, devices, files, run_folder, tokenizer
from support.cli import LostRank, RunError, UserError, first_line, print0
from support.tokenizer import EOT, VOCAB_SIZE, get_tokenizer

ROOT = Path(__file__).parent

# --------------------------------------------------------------------------------------------------
# Model: GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section
# 2.3)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are GPT-2 small, 124,439,808 parameters."""

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention; each token attends to itself and to earlier ones. (B, T, C) -> (B,
    T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    """Two linear layers with GELU (tanh approximation) between them. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-LayerNorm transformer block. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


def lm_head(x: Tensor, wte: Tensor, padded: bool = False) -> Tensor:
    """The head, tied to the token embedding. (…, C), (V, C) -> logits (…, V)

    On a GPU it adds columns up to a multiple of 64 (50,304), for the tensor cores. A bias makes
    them -inf, so that a softmax over all of them (`padded`) needs no slice: fewer kernels
    (bench/kernels/README.md)."""
    V, bias = wte.size(0), None
    if x.is_cuda:
        bias = F.pad(wte.new_zeros(V), (0, -V % 64), value=-math.inf)
        wte = F.pad(wte, (0, 0, 0, -V % 64))
    logits = F.linear(x, wte, bias)
    return logits if padded else logits[..., :V]


def next_token_loss(x: Tensor, wte: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) and their mean cross-entropy in nats, a float32 scalar. x (B, T, C), targets
    (B, T)"""
    logits, V = lm_head(x, wte, padded=True), wte.size(0)
    return logits[..., :V], F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class ChunkedLoss(torch.autograd.Function):
    """next_token_loss and its gradient in one pass, for 1,024 tokens at a time.

    All logits of a micro-batch, (B, T, 50257), would be larger than the weights of GPT-2 (124M). In
    chunks they take less memory everywhere, and less time on a CPU (bench/NOTES.md)."""

    CHUNK = 1024  # tokens

    @staticmethod
    def forward(ctx: Any, x: Tensor, wte: Tensor, targets: Tensor, needs_gradient: bool) -> Tensor:
        """x (N, C), wte (V, C), targets (N,) -> float32 scalar"""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        V = wte.size(0)
        w = F.pad(
            wte.to(dtype), (0, 0, 0, -V % 64)
        )  # as in lm_head; on a CPU, too, aligned rows are faster
        loss = torch.zeros((), device=x.device)
        dx, dw = (
            (torch.empty_like(x), torch.zeros_like(w, dtype=wte.dtype))
            if needs_gradient
            else (x, None)
        )
        for i in range(0, len(x), ChunkedLoss.CHUNK):
            chunk = slice(i, i + ChunkedLoss.CHUNK)
            x_chunk, target = x[chunk].to(dtype), targets[chunk, None]
            logits = x_chunk @ w.t()  # (n, V padded)
            logits[:, V:] = -math.inf
            p = logits.softmax(1, dtype=torch.float32)
            # -log p[target], but by way of the largest p: that of an unlikely target can underflow
            # to 0.
            largest, target_logits = (
                logits.amax(1, keepdim=True).float(),
                logits.gather(1, target).float(),
            )
            loss += (largest - target_logits - p.amax(1, keepdim=True).log()).sum()
            if (
                needs_gradient
            ):  # of the summed loss by the logits: the probability, minus 1 at the target
                p = p.scatter_add_(1, target, torch.full_like(target_logits, -1.0)).to(dtype)
                dx[chunk] = p @ w
                dw += p.t() @ x_chunk
            del logits, p  # otherwise they live until the next ones are allocated
        if needs_gradient:
            ctx.save_for_backward(dx.div_(len(x)), dw[:V].div_(len(x)))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx.mul_(gradient), dw.mul_(gradient), None, None


def chunked_next_token_loss(x: Tensor, wte: Tensor, targets: Tensor) -> tuple[None, Tensor]:
    """next_token_loss without ever holding all logits. x (…, C), wte (V, C), targets (…)"""
    return None, ChunkedLoss.apply(
        x.flatten(0, -2), wte, targets.flatten(), torch.is_grad_enabled()
    )


class GPT(nn.Module):
    """GPT-2 with GPT-2's parameter names. Linear weights are (out, in), the transpose of Hugging
    Face's."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.loss_function = (
            next_token_loss  # or another computation of the same loss, see prepare()
        )
        self.low_memory = (
            False  # recompute each block in the backward pass instead of storing activations
        )
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """GPT-2's initialization: normal with std 0.02, biases 0, LayerNorms 1 and 0. The two
        projections of a block that end in the residual stream are scaled by 1 / sqrt(2 * n_layer),
        so that the stream's initial variance does not grow with depth (section 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = (
                    0.02 / math.sqrt(2 * self.config.n_layer)
                    if name.endswith("c_proj.weight")
                    else 0.02
                )
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def prepare(self, compiled: bool) -> None:
        """Chooses how training computes; results agree to rounding. Blocks are compiled one by one,
        so that they share code. The plain loss, compiled, makes the fewest passes over the logits:
        best on a GPU."""
        for block in self.h if compiled else ():
            block.compile(dynamic=False)
        self.loss_function = chunked_next_token_loss
        if compiled and self.wte.weight.device.type != "cpu" and not self.low_memory:
            self.loss_function = torch.compile(
                lambda *args: (None, next_token_loss(*args)[1]), dynamic=False
            )

    def hidden(
        self, idx: Tensor, position: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The head's input (B, T, C) for tokens idx (B, T). position (B, T) or (T,): by default 0 …
        T-1. mask (B, 1, T, T) bool: by default a token attends to itself and earlier ones."""
        if position is None:
            if idx.size(1) > self.config.block_size:
                raise UserError(
                    f"{idx.size(1)} tokens, but the model's context is {self.config.block_size}"
                )
            position = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C)
        for block in self.h:
            if self.low_memory and torch.is_grad_enabled():
                x = recompute(block, x, mask, use_reentrant=False)
                torch.clear_autocast_cache()  # or 16-bit copies of all weights live until the forward ends
            else:
                x = block(x, mask)
        return self.ln_f(x)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets (B, T) int64 -> logits (B, T, V), mean cross-entropy in nats. Without
        targets there is no loss; there are no logits where loss_function never holds all of
        them."""
        x, wte = self.hidden(idx), self.wte.weight
        return (lm_head(x, wte), None) if targets is None else self.loss_function(x, wte, targets)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues idx (B, T) by sampling from the top_k most likely tokens. -> (B, T +
        max_new_tokens)"""
        for _ in range(max_new_tokens):
            window = idx[:, -self.config.block_size :]
            T = window.size(1)
            padding = (
                min(devices.round_length(T, idx.device), self.config.block_size) - T
            )  # not attended to
            x = self.hidden(F.pad(window, (0, padding)))[:, T - 1]  # (B, C)
            logits = lm_head(x, self.wte.weight).float() / temperature  # (B, V)
            logits, candidates = logits.topk(min(top_k, logits.size(-1)))  # (B, k) each
            choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (B, 1)
            idx = torch.cat([idx, candidates.gather(1, choice)], dim=1)
        return idx

    def num_parameters(self, position_embeddings: bool = True) -> int:
        total = sum(parameter.numel() for parameter in self.parameters())
        return total if position_embeddings else total - self.wpe.weight.numel()

    def flops_per_token(self, T: int) -> int:
        """Training FLOPs a token: 6 N + 12 L C T, N without position embeddings, which are in no
        matmul (PaLM, Chowdhery et al. 2022, appendix B). Recomputation and causality do not
        count."""
        return 6 * self.num_parameters(False) + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """A GPT-2 from a folder or the Hub (`gpt2`, `gpt2-medium`, …). Raises UserError if it is
        none."""
        if not Path(name).exists():
            from support.models import model_folder

            name = model_folder(name)
        config, state = read_pretrained(Path(name))
        with torch.device(
            "meta"
        ):  # neither memory nor initialization: the parameters come from the files
            model = cls(config)
        try:
            model.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            problem = " ".join(str(error).split())
            raise UserError(f"{name}: weights do not match its config.json: {problem}") from None
        return model.requires_grad_(True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2 with its tokenizer."""
        write_pretrained(Path(folder), self.config, self.state_dict())


# --------------------------------------------------------------------------------------------------
# Hugging Face folders. There names begin with `transformer.` (not in OpenAI's uploads), and linear
# layers are Conv1D with (in, out) weights. A field that a fork adds to GPTConfig keeps its name.

GPT2_MATHS = {  # GPT-2 in Hugging Face's terms; a model that differs in one of these computes something else
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
CONFIG_NAMES = {"block_size": "n_positions"} | {
    n: n for n in ("vocab_size", "n_layer", "n_head", "n_embd")
}
CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


def read_pretrained(folder: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """A folder's model, its float32 parameters under our names. Raises UserError if it is no whole
    GPT-2."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: no model here (config.json is missing or not JSON)") from None
    names = {field.name: CONFIG_NAMES.get(field.name, field.name) for field in fields(GPTConfig)}
    for key, expected in GPT2_MATHS.items():
        value = raw.get(key, expected if key != "model_type" else None)
        same = value == expected or (key == "n_inner" and value == 4 * raw.get("n_embd", 0))
        if not same and key not in names:
            raise UserError(
                f"{folder}: not a GPT-2: config.json has {key} = {value!r}, not {expected!r}"
            )
    if missing := [name for name in CONFIG_NAMES.values() if name not in raw]:
        raise UserError(f"{folder}: config.json lacks {', '.join(missing)}")
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            part = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise UserError(
                f"{path}: damaged or not a weights file ({first_line(error)})"
            ) from None
        for name, t in part.items():
            name = name.removeprefix("transformer.")
            if not name.endswith((".attn.bias", ".attn.masked_bias")):  # these are masks
                # Copied, since load_file maps the file, and NFS and Windows cannot remove a mapped
                # file.
                t = t.t() if CONV1D.search(name) else t
                state[name] = t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if "wte.weight" not in state:
        raise UserError(f"{folder}: no model.safetensors of a GPT-2 here")
    if not torch.equal(state.pop("lm_head.weight", state["wte.weight"]), state["wte.weight"]):
        raise UserError(f"{folder}: not a GPT-2: its head is not tied to its token embedding")
    return GPTConfig(
        **{ours: raw[theirs] for ours, theirs in names.items() if theirs in raw}
    ), state


def write_pretrained(folder: Path, config: GPTConfig, state: dict[str, Tensor]) -> None:
    """Writes config.json, model.safetensors and GPT-2's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    eot = EOT if config.vocab_size == VOCAB_SIZE else None  # None: some other vocabulary
    raw = {
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        "n_ctx": config.block_size,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": eot,
        "eos_token_id": eot,
    }
    raw |= GPT2_MATHS | {
        CONFIG_NAMES.get(name, name): value for name, value in asdict(config).items()
    }
    texts = {"config.json": json.dumps(raw, indent=2) + "\n"}
    if eot:  # the tokenizer's files are copied: transformers writes the same, but takes seconds to import
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        settings = {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": config.block_size,
        } | special
        texts["tokenizer_config.json"] = json.dumps(settings, indent=2) + "\n"
        for ours, theirs in {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}.items():
            texts[theirs] = tokenizer.bpe_files()[ours].read_text(encoding="utf-8")
    for name, text in texts.items():
        with files.atomic_write(folder / name, "w") as file:
            file.write(text)
    state = {
        f"transformer.{name}": (t.t() if CONV1D.search(name) else t).cpu().contiguous()
        for name, t in state.items()
    }
    with files.atomic_path(folder / "model.safetensors") as partial:
        safetensors.torch.save_file(state, partial, metadata={"format": "pt"})
        partial.chmod(
            (folder / "config.json").stat().st_mode
        )  # safetensors makes it readable by nobody else


# --------------------------------------------------------------------------------------------------
# Data: the order of tokens, and the loader (support/tokenizer.py opens shards)

SHARDS_FOLDER = "edu_fineweb10B"
PASSAGE = 256  # tokens of a .txt file that stay together when it is shuffled


def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … n-1 that depends on `seed` only; numpy's own may change with its
    version."""
    return np.random.PCG64(seed).random_raw(n).argsort(kind="stable")


class TokenStream:
    """A split's tokens as one endless sequence, whose order is a function of the seed.

    An epoch is the shards in random order, each with its documents in random order; epochs follow
    each other without a gap. A document begins at 50256; a .txt file is cut into passages of 256
    tokens. Without shuffle the order is that of the files. data: folder of shards or .txt file.
    Raises UserError if it is bad."""

    def __init__(self, data: str | Path, split: str, seed: int = 1337, shuffle: bool = True):
        data = Path(data)
        self._starts: dict[int, np.ndarray] = {}  # shard -> where its documents start
        if not data.exists():
            raise UserError(
                f"{data}: no such data; `python fineweb.py` makes shards, or use a .txt file"
            )
        if data.is_dir():
            self.paths = tokenizer.find_shards(data, split)
            self.shards = [tokenizer.open_shard(path) for path in self.paths]
        elif data.suffix == ".txt":
            self.paths, self.shards = [data], [tokenizer.tokenize_text(data, split)]
            self._starts[0] = np.arange(0, len(self.shards[0]), PASSAGE)
        else:
            raise UserError(
                f"{data}: neither a folder of shards nor a .txt file; fineweb.py makes shards"
            )
        self.seed, self.shuffle = seed, shuffle
        self.lengths = np.array([len(shard) for shard in self.shards])
        self.total_tokens = int(self.lengths.sum())
        self._orders: dict[
            tuple[int, int], tuple[np.ndarray, ...]
        ] = {}  # of the last two (epoch, shard)

    def locate(self, position: int) -> tuple[int, int, int]:
        """(epoch, shard, offset in the epoch's order of that shard) of a position in the stream."""
        epoch, offset = divmod(position, self.total_tokens)
        n = len(self.shards)
        order = permutation(n, self.seed, epoch) if self.shuffle else np.arange(n)
        ends = self.lengths[order].cumsum()
        i = int(np.searchsorted(ends, offset, side="right"))
        return epoch, int(order[i]), int(offset - (ends[i] - self.lengths[order[i]]))

    def read(self, position: int, count: int) -> np.ndarray:
        """Tokens [position, position + count) of the stream, 1-D uint16."""
        pieces = []
        while count > 0:
            epoch, shard, begin = self.locate(position)
            n = min(count, int(self.lengths[shard]) - begin)
            if self.shuffle:
                piece = self._read_documents(epoch, shard, begin, begin + n)
            else:
                piece = self.shards[shard][begin : begin + n]
            tokenizer.check_tokens(piece, self.paths[shard])
            pieces.append(piece)
            position, count = position + n, count - n
        return np.concatenate(pieces)

    def _read_documents(self, epoch: int, shard: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of a shard with its documents in this epoch's order."""
        starts, lengths, ends = self._document_order(epoch, shard)
        first, last = (
            np.searchsorted(ends, begin, side="right"),
            np.searchsorted(ends, end, side="left"),
        )
        documents = [
            self.shards[shard][starts[i] : starts[i] + lengths[i]] for i in range(first, last + 1)
        ]
        documents[-1] = documents[-1][: len(documents[-1]) - int(ends[last] - end)]
        documents[0] = documents[0][begin - int(ends[first] - lengths[first]) :]
        return np.concatenate(documents)

    def _document_order(self, epoch: int, shard: int) -> tuple[np.ndarray, ...]:
        """A shard's documents in this epoch's order: start and length in the file, end in the
        stream."""
        if (epoch, shard) not in self._orders:
            tokens, chunk = self.shards[shard], 1 << 24
            if shard not in self._starts:
                found = [
                    i + np.flatnonzero(tokens[i : i + chunk] == EOT)
                    for i in range(0, len(tokens), chunk)
                ]
                # Tokens before the first 50256 end a document that began in the previous shard.
                self._starts[shard] = np.union1d([0], np.concatenate(found)).astype(np.uint32)
            starts = self._starts[shard].astype(np.int64)
            order = permutation(len(starts), self.seed, epoch, shard + 1)
            lengths = np.diff(starts, append=len(tokens))[order]
            if len(self._orders) == 2:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch, shard] = starts[order], lengths, lengths.cumsum()
        return self._orders[epoch, shard]


class DataLoaderLite:
    """Batches of next-token pairs from a TokenStream. Raises UserError for bad files.

    In each micro-step the ranks take the next B * T tokens each, in rank order. So a step's tokens
    do not depend on ranks and micro-batches, a token is an input once an epoch, and the state is
    one position."""

    def __init__(
        self,
        data: str | Path,
        split: str,
        B: int,
        T: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 1337,
        shuffle: bool = True,
    ):
        self.stream = TokenStream(data, split, seed, shuffle)
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.position = 0  # in the stream, of the next micro-batch of all ranks

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """This rank's next inputs and targets, (B, T) int64 each."""
        tokens = self.B * self.T
        buffer = self.stream.read(
            self.position + self.rank * tokens, tokens + 1
        )  # targets: one token later
        buffer = torch.from_numpy(buffer.astype(np.int64))
        self.position += self.world_size * tokens
        return buffer[:-1].view(self.B, self.T), buffer[1:].view(self.B, self.T)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of tokens depends on."""
        stream = self.stream
        names = [
            (path.name, int(length))
            for path, length in zip(stream.paths, stream.lengths, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        return {
            "position": self.position,
            "seed": stream.seed,
            "shuffle": stream.shuffle,
            "shards": digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position. Raises UserError if it belongs to another stream."""
        for key, value in self.state_dict().items():
            if key != "position" and state[key] != value:
                raise UserError(
                    f"the data differ from the checkpoint's ({key} {value}, was {state[key]})"
                )
        self.position = state["position"]


# --------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class TrainConfig:
    """Trains a GPT-2 from scratch or from given weights. A preset changes defaults; flags override
    it."""

    # which defaults; auto: gpt2 if edu_fineweb10B/ holds shards, else shakespeare; gpt2-fast: a
    # newer recipe
    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "shakespeare"] = "auto"
    data: str = (
        SHARDS_FOLDER  # folder of token shards (python fineweb.py makes them), or a .txt file
    )
    log_dir: str = "log"  # folder for log.txt, run.json and checkpoints
    init: str = "scratch"  # scratch, a Hub name (gpt2, gpt2-medium, gpt2-large, gpt2-xl), or a GPT-2's folder
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    total_batch_size: int = 524_288  # tokens per update, over all ranks and micro-batches
    micro_batch_size: int = 0  # sequences per forward pass on a device (B); 0: as many as fit
    seq_len: int = 1024  # tokens per sequence (T)
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # number of channels (C)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices inside the blocks
    schedule: Literal["cosine", "wsd"] = (
        "cosine"  # after the warm-up; wsd: constant, then a linear warm-down
    )
    warmdown_steps: int = 5000  # steps of the wsd schedule's warm-down to min_lr
    max_lr: float = 6e-4  # learning rate at the end of the warm-up
    min_lr: float = 6e-5  # learning rate of the last step
    warmup_steps: int = 715  # steps of linear warm-up
    beta2: float = 0.95  # AdamW's decay rate for squared gradients; small batches need a higher one
    weight_decay: float = 0.1  # decoupled weight decay of matrices (none for biases and LayerNorms)
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    seed: int = 1337  # seed of the initial weights and of the data order
    shuffle: bool = True  # reshuffle shards and their documents (a .txt file: passages) every epoch
    compile: bool = field(
        default_factory=lambda: torch.cuda.is_available()
    )  # compile with torch.compile
    low_memory: bool = (
        False  # recompute blocks in the backward pass; make logits of 1,024 tokens at a time
    )
    shard_optimizer: bool = False  # shard the optimizer's state over the ranks (ZeRO-1)
    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # of matmuls; auto: float32 on a CPU
    )
    deterministic: bool = False  # use deterministic kernels on a GPU, so that resuming is bit-exact
    eval_every: int = 250  # steps between validation losses; 0: never
    eval_tokens: int = 10_485_760  # tokens of each validation loss (at most the whole split)
    hellaswag_every: int = 250  # steps between HellaSwag evaluations; 0: never
    hellaswag_data: str = (
        ""  # local HellaSwag .jsonl; empty: the official validation set, downloaded once
    )
    sample_every: int = 250  # steps between samples; 0: never
    sample_prompt: str = "Hello, I'm a language model,"  # prompt of the samples
    save_every: int = 1000  # steps between checkpoints; 0: never
    keep_checkpoints: int = (
        3  # newest to keep, besides the one with the lowest validation loss; 0: all
    )
    keep_every: int = 0  # never delete checkpoints at multiples of this many steps; 0: none
    skip_bad_steps: int = 0  # number of non-finite updates to skip before aborting
    tensorboard: bool = (
        False  # log for TensorBoard, too, in log_dir/tensorboard/ (pip install tensorboard)
    )
    wandb: bool = False  # log to Weights & Biases, too (pip install wandb)
    plan: bool = False  # print the arithmetic of the run and exit


SHAKESPEARE = dict(
    data=str(ROOT / "input.txt"),
    max_steps=600,
    total_batch_size=512,
    seq_len=64,
    n_layer=4,
    n_head=4,
    n_embd=64,
    optimizer="muon",
    schedule="wsd",
    max_lr=1.5e-2,
    min_lr=0.0,
    warmup_steps=20,
    warmdown_steps=300,
    beta2=0.995,
    compile=False,
    eval_every=200,
    eval_tokens=32_768,
    hellaswag_every=0,
    sample_every=300,
    sample_prompt="ROMEO:",
    save_every=200,
)
# From small models (bench/recipes); max_lr is one published for AdamW, to which Muon's updates are
# scaled.
GPT2_FAST = dict(
    optimizer="muon",
    schedule="wsd",
    max_steps=9_536,
    warmup_steps=476,
    warmdown_steps=4_768,
    max_lr=1.8e-3,
    min_lr=0.0,
)
PRESETS = {
    "gpt2": {},
    "gpt2-fast": GPT2_FAST,
    "gpt3": dict(seq_len=2048),
    "shakespeare": SHAKESPEARE,
}
# What a resumption may not change, since the losses would change by more than rounding.
FIXED = (
    "total_batch_size",
    "seq_len",
    "n_layer",
    "n_head",
    "n_embd",
    "optimizer",
    "schedule",
    "max_lr",
    "min_lr",
    "warmup_steps",
    "beta2",
    "weight_decay",
    "grad_clip",
    "seed",
    "shuffle",
)


def check_config(config: TrainConfig) -> None:
    """Collects every problem that shows without data or devices, and raises them as one
    UserError."""
    problems = []
    positive = ("total_batch_size", "seq_len", "n_layer", "n_head", "n_embd", "eval_tokens")
    for name, value in asdict(config).items():
        if isinstance(value, int | float) and not (
            value >= (name in positive) and math.isfinite(value)
        ):
            problems.append(f"{cli.flag(name)} {value}: must be at least {int(name in positive)}")
    if config.n_head > 0 and config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd}: not divisible by --n-head {config.n_head}")
    if config.beta2 >= 1:
        problems.append(f"--beta2 {config.beta2}: must be below 1")
    if config.eval_every and config.eval_tokens < config.seq_len:
        problems.append(f"--eval-tokens {config.eval_tokens}: less than --seq-len {config.seq_len}")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr}: above --max-lr {config.max_lr}")
    if problems:
        raise UserError("; ".join(problems))


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig: the preset's values, overridden by the flags. Raises
    UserError."""
    first = ArgumentParser(
        add_help=False, allow_abbrev=False
    )  # these two flags change other flags' defaults
    first.add_argument("--preset", nargs="?", default="auto")
    first.add_argument("--device", nargs="?", default="auto")
    given, _ = first.parse_known_args(args)
    if given.preset == "auto":
        given.preset = "gpt2" if any(Path(SHARDS_FOLDER).glob("*_train_*")) else "shakespeare"
    defaults = PRESETS.get(given.preset, {}) | (
        dict(compile=False) if given.device in ("cpu", "mps") else {}
    )
    config = cli.parse_args(TrainConfig, replace(TrainConfig(), **defaults), args)
    check_config(config)
    return config


def differences(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """What prevents `config` from resuming a run whose configuration was `before`. A setting that
    an older version of this script did not have counts as its default."""
    before = asdict(TrainConfig()) | before
    return [
        f"{cli.flag(name)} was {before[name]}, is {now}"
        for name in FIXED
        if (now := getattr(config, name)) != before[name]
    ]


# --------------------------------------------------------------------------------------------------
# Optimizer


def configure_optimizer(model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32) -> Any:
    """AdamW that decays matrices and embeddings only, with GPT-3's betas unless --beta2 says
    otherwise (Brown et al. 2020, appendix B); with --optimizer muon, Muon for the matrices in
    blocks. dtype: of matmuls."""
    muon = {
        n: p for n, p in model.h.named_parameters() if p.dim() == 2 and config.optimizer == "muon"
    }
    others = [p for n, p in model.named_parameters() if n.removeprefix("h.") not in muon]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel for all parameters; on a CPU, too, it is several times as fast as the loop.
    optimizer = torch.optim.AdamW(
        groups, lr=config.max_lr, betas=(0.9, config.beta2), eps=1e-8, fused=True
    )
    if muon:
        from support.muon import Muon, Optimizers

        dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        optimizer = Optimizers(
            Muon(muon.items(), config.max_lr, config.weight_decay, dtype=dtype), optimizer
        )
    if config.shard_optimizer and dist.is_initialized():
        from support.sharding import shard_state

        shard_state(optimizer)
    return optimizer


def get_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of update `step` (from 0): linear warm-up to max_lr, then the schedule down to
    min_lr. cosine is GPT-3's (Brown et al. 2020, appendix B). wsd ends in a linear warm-down;
    nothing before it depends on max_steps, so a run can be extended (Hägele et al. 2024,
    arXiv:2405.18392)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    if step >= config.max_steps:
        return config.min_lr
    if config.schedule == "wsd":
        share = min((config.max_steps - step) / max(config.warmdown_steps, 1), 1.0)
    else:
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + share * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Ranks and device


@dataclass
class DDPContext:
    """This process among the ranks of a run (rank 0 of 1 without torchrun), its device, and
    collectives."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    description: str  # device and precision, with the reason

    @classmethod
    def start(cls, config: TrainConfig) -> "DDPContext":
        """Chooses the device and joins torchrun's process group. Raises UserError."""
        rank, local_rank, world_size = cli.torchrun_ranks()
        device, dtype, reason = devices.choose_device(
            config.device, config.dtype, local_rank, world_size
        )
        if (
            device.type == "mps" and dtype == torch.float16
        ):  # its fused AdamW ignores found_inf (PR #186360)
            raise UserError("--dtype float16: overflows would ruin the weights on MPS; use float32")
        cuda, patience = (
            device.type == "cuda",
            timedelta(hours=1),
        )  # ranks may wait for rank 0's files
        if device.type == "cpu":
            devices.keep_freed_memory()
        if config.deterministic:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # CUDA reads it at its first matmul
            torch.use_deterministic_algorithms(True)
        if "RANK" in os.environ:
            store, _, _ = next(dist.rendezvous("env://", timeout=patience))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun (2.13) keeps one store across restarts, with the addresses of lost ranks
                # in it.
                store = dist.PrefixStore(
                    f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store
                )
            store.set(f"kind/{rank}", kind := f"{device.type} in {str(dtype)[6:]}")
            if (first := store.get("kind/0").decode()) != kind:
                raise UserError(
                    f"this rank would use {kind}, rank 0 {first}: set --device and --dtype"
                )
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=patience,
                device_id=device if cuda else None,
            )
        return cls(rank, world_size, device, dtype, reason)

    def autocast(self) -> torch.autocast:
        """Runs matmuls in `dtype`; does nothing in float32."""
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.world_size > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any = None) -> list[Any]:
        """Every rank's `value`, in rank order; also a barrier."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


# --------------------------------------------------------------------------------------------------
# Log: log.txt, with one `step stream value` per line, and run.json, with one entry per start


def open_log(
    config: TrainConfig, checkpoint: Path | None, resuming: bool, step: int, ddp: DDPContext
) -> Any:
    """Begins or continues the run's log: log(step, stream=value, …). Only rank 0's writes."""
    ddp.gather()  # all ranks have read what they need from the folder
    if ddp.rank != 0:
        return lambda step, **values: None
    log_dir, entries, trackers = Path(config.log_dir), run_folder.run_entries(config.log_dir), []
    # A run that was stopped before its first checkpoint starts again and writes the same log again.
    again = resuming and not differences(entries[-1]["config"] if entries else {}, config)
    first_step = step if checkpoint or again else None
    paths = {
        name: cli.shown(getattr(config, name)) for name in ("data", "log_dir", "hellaswag_data")
    }
    entry = {
        "step": step,
        "device": ddp.description,
        "world_size": ddp.world_size,
        "config": asdict(config) | paths,
    }
    file = run_folder.begin_run(log_dir, checkpoint is not None, first_step, entry)
    if config.tensorboard or config.wandb:
        from support.trackers import start_trackers

        trackers = start_trackers(log_dir, first_step or 0, config.tensorboard, config.wandb)

    def log(step: int, **values: str) -> None:
        file.write("".join(f"{step} {stream} {value}\n" for stream, value in values.items()))
        for track in trackers:
            track(step, {stream: float(value) for stream, value in values.items()})

    return log


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def validation_loss(model: GPT, loader: DataLoaderLite, tokens: int, ddp: DDPContext) -> float:
    """Mean loss in nats over the first `tokens` tokens of the loader's split, all with the same
    weight.

    The ranks share the sequences; their losses are summed over all, then divided, so that neither B
    nor the number of ranks matters. Where training runs compiled on a GPU, so do full batches
    here."""
    B, T = loader.B, loader.T
    sequences = min(tokens, loader.stream.total_tokens - 1) // T
    losses, sizes = [torch.zeros((), device=ddp.device)], [0]
    for first in range(ddp.rank * B, sequences, ddp.world_size * B):
        n = min(B, sequences - first)
        buffer = torch.from_numpy(loader.stream.read(first * T, n * T + 1).astype(np.int64)).to(
            ddp.device
        )
        compiled = (
            n == B and ddp.device.type != "cpu"
        )  # eager otherwise, and then without the full logits
        loss_function = model.loss_function if compiled else chunked_next_token_loss
        with ddp.autocast(), torch.compiler.set_stance("default" if compiled else "force_eager"):
            x = model.hidden(buffer[:-1].view(n, T))  # (n, T, C)
            losses.append(loss_function(x, model.wte.weight, buffer[1:].view(n, T))[1])
        sizes.append(n)
    # The only device sync. The sum is made on the host in float64, which not every device has.
    total = sum(loss * n for loss, n in zip(torch.stack(losses).tolist(), sizes, strict=True))
    return ddp.sum(torch.tensor(total, dtype=torch.float64)).item() / sequences


def print_samples(model: GPT, prompt: str, ddp: DDPContext, last: bool = False) -> None:
    """Four continuations of `prompt` by 32 tokens, one per line; at the end of a run two by 64, as
    text."""
    samples, length = (2, 64) if last else (4, 32)
    generator = torch.Generator(device=ddp.device).manual_seed(
        42 + ddp.rank
    )  # leaves training's alone
    idx = torch.tensor([get_tokenizer().encode_ordinary(prompt)] * samples, device=ddp.device)
    with ddp.autocast():
        idx = model.generate(idx, max_new_tokens=length, generator=generator)
    for i, text in enumerate(map(get_tokenizer().decode, idx.tolist())):
        lines = "\n".join(
            "".join(c if c.isprintable() else " " for c in line) for line in text.splitlines()
        )
        shown = f"\n{indent(lines, '  ')}" if last else f" {text!r}"
        print(f"rank {ddp.rank} sample {i}:{shown}", flush=True)


def is_due(every: int, step: int, config: TrainConfig) -> bool:
    """Whether something is due that happens every `every` steps (0: never), and after the last."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


def evaluate(
    step: int,
    model: GPT,
    val_loader: DataLoaderLite | None,
    tasks: list[Any] | None,
    config: TrainConfig,
    ddp: DDPContext,
    log: Any,
) -> float | None:
    """Whatever is due at `step`: validation loss (returned), HellaSwag, samples."""
    model.eval()  # GPT-2 is trained without dropout, but a fork may have it
    val, last = None, step == config.max_steps
    if is_due(config.eval_every, step, config):
        val = validation_loss(model, val_loader, config.eval_tokens, ddp)
        print0(f"step {step:5d} validation loss {val:.4f}")
        log(step, val=f"{val:.6f}")
    with torch.compiler.set_stance("force_eager"):  # shapes that occur once are not worth compiling
        if is_due(config.hellaswag_every, step, config) and tasks:
            import hellaswag

            with ddp.autocast():
                correct = hellaswag.count_correct(
                    model, tasks, ddp.device, ddp.rank, ddp.world_size
                )
            accuracy = ddp.sum(torch.tensor(correct, dtype=torch.float64)).item() / len(tasks)
            print0(f"step {step:5d} HellaSwag {accuracy:.4f}")
            log(step, hella=f"{accuracy:.4f}")
        if is_due(config.sample_every, step, config) and step > 0 and not (last and ddp.rank):
            print_samples(model, config.sample_prompt, ddp, last)
    model.train()
    return val


# --------------------------------------------------------------------------------------------------
# Checkpoints: Hugging Face folders that also hold training_state.pt


def read_training_state(checkpoint: Path) -> dict[str, Any]:
    """TrainState.state_dict() as saved. Executes nothing in the file. Raises UserError. The
    tensors are mapped, to be copied and dropped: NFS and Windows cannot remove a mapped file."""
    path = checkpoint / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != 1:
        raise UserError(f"{path}: not a training state of format 1")
    return state


@dataclass
class TrainState:
    """All that the rest of a run depends on, besides its configuration."""

    model: GPT
    optimizer: Any
    scaler: torch.amp.GradScaler
    loader: DataLoaderLite
    step: int = 0  # updates made
    elapsed: float = 0.0  # seconds spent in updates
    skipped: int = 0  # updates skipped because loss or gradient was not finite

    def state_dict(self, config: TrainConfig, ddp: DDPContext) -> dict[str, Any]:
        """Everything but the weights. All ranks call it."""
        random = {"cpu": torch.get_rng_state()}
        if (kind := ddp.device.type) != "cpu":
            random[kind] = getattr(torch, kind).get_rng_state()
        return {
            "format": 1,
            "step": self.step,
            "elapsed": self.elapsed,
            "skipped": self.skipped,
            "tokens": self.step * config.total_batch_size,
            "config": asdict(config),
            "dtype": str(ddp.dtype),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "loader": self.loader.state_dict(),
            "random": ddp.gather(random),
        }

    def restore(self, checkpoint: Path, config: TrainConfig, ddp: DDPContext) -> None:
        """Restores everything but the weights. Raises UserError if the checkpoint is another
        run's."""
        saved = read_training_state(checkpoint)
        if changes := differences(saved["config"], config):
            raise UserError(f"--resume from {checkpoint}: not the same run: {', '.join(changes)}")
        self.loader.load_state_dict(saved["loader"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if (
            ddp.device.type == "cpu"
        ):  # copy what a GPU copies anyway: the tensors are mapped from the file
            for moments in self.optimizer.state.values():
                moments.update({key: tensor.clone() for key, tensor in moments.items()})
        if saved[
            "scaler"
        ]:  # only float16 has one; a run that switches to float16 starts with a fresh scale
            self.scaler.load_state_dict(saved["scaler"])
        if saved["dtype"] != str(ddp.dtype):
            print0(
                f"precision: {saved['dtype']} so far, {ddp.dtype} from here on; losses agree to rounding"
            )
        for kind, generator in (
            saved["random"][ddp.rank].items() if ddp.rank < len(saved["random"]) else ()
        ):
            if kind in ("cpu", ddp.device.type):
                (torch if kind == "cpu" else getattr(torch, kind)).set_rng_state(generator)
        self.step, self.elapsed, self.skipped = saved["step"], saved["elapsed"], saved["skipped"]


def find_checkpoint(log_dir: Path) -> Path | None:
    """The newest intact checkpoint; None if there are none at all. Raises UserError if all are
    damaged."""
    checkpoints = run_folder.list_checkpoints(log_dir)
    for checkpoint in reversed(checkpoints):
        try:
            run_folder.verify_checksums(
                checkpoint, {"training_state.pt", "model.safetensors", "config.json"}
            )
            read_training_state(checkpoint)
            return checkpoint
        except UserError as error:
            print(f"warning: {error}; trying the previous one", file=sys.stderr, flush=True)
    if checkpoints:
        raise UserError(
            f"{log_dir}: all {len(checkpoints)} checkpoints are damaged; use another --log-dir"
        )
    return None


def model_card(log_dir: Path, step: int) -> str:
    """README.md of a checkpoint, in the Hub's format."""
    entry = run_folder.run_entries(log_dir)[-1]
    config, command = entry["config"], shlex.join(["python", *entry["command"]])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
A GPT-2 after {step:,} steps of {config["total_batch_size"]:,} tokens of `{Path(config["data"]).name}`, from
{config["init"]}, trained by gpt2-repro at commit {entry["git_commit"]}: `{command}`

It continues text; it was not trained to follow instructions, and what it writes may be false.
"""


def save_checkpoint(state: TrainState, config: TrainConfig, ddp: DDPContext) -> None:
    """Writes log_dir/step_*/ whole or not at all, deletes old checkpoints, draws curves.png; all
    ranks call it. A failure (full disk, say) leaves earlier ones intact, and ends the run only
    after its last step."""
    saved, log_dir = state.state_dict(config, ddp), Path(config.log_dir)
    if ddp.rank == 0:
        folder = log_dir / f"step_{state.step:06d}"
        try:
            files.fsync(log_dir / "log.txt")  # it must not be shorter than the checkpoint
            with files.atomic_path(folder) as partial:
                write_pretrained(partial, state.model.config, state.model.state_dict())
                torch.save(saved, partial / "training_state.pt")
                (partial / "README.md").write_text(
                    model_card(log_dir, state.step), encoding="utf-8"
                )
                run_folder.write_checksums(partial)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            problem = f"{folder}: not written ({first_line(error)})"
            if state.step == config.max_steps:
                raise UserError(f"{problem}: free some space; --resume continues") from None
            print(f"error: {problem}; training continues", file=sys.stderr, flush=True)
        # Checkpoints of later steps, if any, are damaged: this run was resumed from before them.
        steps = [
            step
            for step in map(run_folder.step_of, run_folder.list_checkpoints(log_dir))
            if step <= state.step
        ]
        best, _ = run_folder.best_checkpoint(log_dir)
        for step in steps[: -config.keep_checkpoints] if config.keep_checkpoints else []:
            if step != best and not (config.keep_every and step % config.keep_every == 0):
                files.remove_folder(log_dir / f"step_{step:06d}")
        draw = (
            subprocess.run if state.step == config.max_steps else subprocess.Popen
        )  # train without waiting
        draw(
            [sys.executable, "-m", "support.plots", log_dir.resolve()],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )


# --------------------------------------------------------------------------------------------------
# Set-up


def new_model(config: TrainConfig) -> GPT:
    return GPT(GPTConfig(config.seq_len, VOCAB_SIZE, config.n_layer, config.n_head, config.n_embd))


def start_model(config: TrainConfig, checkpoint: Path | None, ddp: DDPContext) -> GPT:
    """The model to train, on the device: from a checkpoint, --init, or new. Raises UserError."""
    torch.manual_seed(config.seed)
    model, start = None, checkpoint or config.init
    if ddp.rank == 0:  # DDP sends the weights to the others, which hold none on their hosts
        model = new_model(config) if start == "scratch" else GPT.from_pretrained(start)
        context, vocabulary = model.config.block_size, model.config.vocab_size
        if context < config.seq_len or vocabulary != VOCAB_SIZE:
            raise UserError(
                f"--init {config.init}: context {context}, vocabulary {vocabulary}; not a GPT-2 "
                f"for --seq-len {config.seq_len}"
            )
    shape = ddp.gather(model and model.config)[0]
    with torch.device("meta"):
        model = model or GPT(shape)
    model = model.to(ddp.device) if ddp.rank == 0 else model.to_empty(device=ddp.device)
    model.low_memory = config.low_memory
    if ddp.device.type == "cpu" and model.num_parameters() > 50_000_000:
        devices.return_freed_memory(config.low_memory)
    return model


def choose_micro_batch_size(config: TrainConfig, model: GPT, ddp: DDPContext) -> int:
    """B: --micro-batch-size, or the largest power of two that divides a rank's share of a step and
    fits. Raises UserError if the ranks cannot share a step equally."""
    T, B, total = config.seq_len, config.micro_batch_size, config.total_batch_size
    if total % (unit := T * max(B, 1) * ddp.world_size):
        raise UserError(
            f"--total-batch-size {total} is not a multiple of {unit} (sequence x micro-batch x "
            f"ranks); the nearest that is: {max(round(total / unit), 1) * unit}"
        )
    sequences = total // (T * ddp.world_size)  # of a step, on each rank
    sizes = [size for size in (128, 64, 32, 16, 8, 4, 2, 1) if sequences % size == 0]
    if not B and ddp.device.type == "cuda":
        moments = 8 * model.num_parameters() // (ddp.world_size if config.shard_optimizer else 1)
        logits, buckets = config.compile and not config.low_memory, ddp.world_size > 1
        for B in sizes:
            if all(
                ddp.gather(
                    devices.fits(model, B, T, ddp.dtype, moments, logits, buckets or sequences > B)
                )
            ):
                return B
    return B or next(
        size for size in sizes if size * T <= 4096 or size == 1
    )  # enough for a CPU's cores


def open_data(
    config: TrainConfig, B: int, ddp: DDPContext
) -> tuple[DataLoaderLite, DataLoaderLite | None]:
    """The loaders of both splits (None: no validation). Raises UserError for bad data."""
    shape, loaders = dict(B=B, T=config.seq_len, rank=ddp.rank, world_size=ddp.world_size), []
    for split, needed in (("train", "total_batch_size"), ("val", "seq_len"))[
        : 2 if config.eval_every else 1
    ]:
        shuffle = config.shuffle and split == "train"
        loaders.append(
            DataLoaderLite(config.data, split, **shape, seed=config.seed, shuffle=shuffle)
        )
        if (tokens := loaders[-1].stream.total_tokens) <= getattr(config, needed):
            raise UserError(
                f"{config.data}: {tokens} {split} tokens, too few for {cli.flag(needed)} "
                f"{getattr(config, needed)}: lower it, or provide more text"
            )
    return loaders[0], loaders[1] if config.eval_every else None


def wrap_in_ddp(model: GPT, B: int, T: int, ddp: DDPContext) -> nn.Module:
    """The model in DDP, which averages the ranks' gradients, its buckets in their final order."""
    torch._dynamo.config.optimize_ddp = (
        False  # it splits graphs at DDP's buckets, but ours are single blocks
    )
    gpu = [ddp.device.index] if ddp.device.type == "cuda" else []
    ddp_model = DistributedDataParallel(model, device_ids=gpu or None, gradient_as_bucket_view=True)
    # After its first backward DDP rebuilds its buckets in arrival order, which changes summation
    # order; trigger that before step 0, so that a resumed run sums as before. The second pass fills
    # the new buckets.
    x = torch.zeros(B, T, dtype=torch.int64, device=ddp.device)
    with torch.random.fork_rng(gpu):  # a fork's dropout
        for _ in range(2):
            ddp_model.zero_grad(set_to_none=True)
            with ddp.autocast():
                ddp_model(x, x)[1].backward()
    ddp_model.zero_grad(set_to_none=False)
    return ddp_model


def announce(
    state: TrainState, config: TrainConfig, checkpoint: Path | None, ddp: DDPContext
) -> float:
    """Prints what is about to be trained. Returns the tokens per second of all ranks at 100 %
    MFU."""
    loader, batch, flops = (
        state.loader,
        config.total_batch_size,
        state.model.flops_per_token(config.seq_len),
    )
    tokens, grad_accum_steps = (
        loader.stream.total_tokens,
        batch // (loader.B * loader.T * ddp.world_size),
    )
    peak, source = devices.peak_flops(ddp.device, ddp.dtype)
    print0(f"model: {state.model.num_parameters():,} parameters, {flops / 1e6:,.0f} MFLOP a token")
    print0(f"speed: MFU 100 % = {peak / 1e12:,.3g} TFLOP/s a device ({source})")
    print0(f"data: {cli.shown(config.data)}, {tokens:,} training tokens")
    print0(
        f"steps: {config.max_steps:,} of {batch:,} tokens, {config.max_steps * batch / tokens:.3f} epochs"
    )
    print0(
        f"batch: {loader.B} x {loader.T} tokens x {grad_accum_steps} micro-steps x {ddp.world_size} ranks"
    )
    print0(
        f"log and checkpoints: {config.log_dir}/"
        + (f", resumed from {checkpoint}" if checkpoint else "")
    )
    return ddp.world_size * peak / flops


def conclude(state: TrainState, config: TrainConfig, val: float | None, val_loader: Any) -> None:
    """Prints the last lines of a run."""
    if val is not None:  # per character, so that it can be compared with other tokenizers'
        count = (
            min(config.eval_tokens, val_loader.stream.total_tokens - 1)
            // config.seq_len
            * config.seq_len
        )
        tokens = val_loader.stream.read(1, count)
        characters = len(get_tokenizer().decode(tokens[tokens != EOT].tolist()))
        print0(
            f"\nvalidation loss: {val:.4f} nats a token, {val * count / characters:.4f} nats a character"
        )
    print0(f"done: {state.step:,} steps, {state.elapsed / 60:.1f} minutes of training")
    if (picture := Path(config.log_dir, "curves.png")).exists():
        print0(f"curves: {picture}")
    if config.save_every:
        print0(f"model: {config.log_dir}/step_{state.step:06d}/, which Hugging Face loads")
        best, loss = run_folder.best_checkpoint(Path(config.log_dir))
        if val is not None and best != state.step:
            print0(
                f"best: {config.log_dir}/step_{best:06d}/, validation loss {loss:.4f}, and it rose later: "
                "train for fewer steps, or on more text"
            )
        script, prompt = cli.shown(ROOT / "sample.py"), shlex.quote(config.sample_prompt)
        print0(f"sample: python {shlex.quote(script)} {shlex.quote(config.log_dir)} {prompt}")


# --------------------------------------------------------------------------------------------------
# The loop


def train(config: TrainConfig, ddp: DDPContext) -> int:
    """Trains, evaluates and saves; every rank runs it. Returns the exit status: 0, or 130 / 143
    after a signal. Raises UserError, and RunError if too many updates are not finite."""
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:
        print0(
            f"no shards in {SHARDS_FOLDER}/ (`python fineweb.py` builds them): the shakespeare preset"
        )
    print0(f"device: {ddp.description}")
    if ddp.device.type == "cuda" and ddp.dtype != torch.float32:
        torch.set_float32_matmul_precision("high")  # TF32 for the matmuls that remain in float32
    if (
        ddp.device.type == "cpu"
        and config.dtype == "auto"
        and (speedup := devices.bfloat16_speedup()) >= 1.3
    ):
        print0(f"  (matmuls are {speedup:.1f} times as fast with --dtype bfloat16)")

    # Model, data and optimizer: new, or as a checkpoint has them.
    resuming = config.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    newest = find_checkpoint(Path(config.log_dir)) if resuming and ddp.rank == 0 else None
    checkpoint = ddp.gather(newest)[0]
    model = start_model(config, checkpoint, ddp)
    B, T = choose_micro_batch_size(config, model, ddp), config.seq_len
    grad_accum_steps = config.total_batch_size // (B * T * ddp.world_size)
    loader, val_loader = open_data(config, B, ddp)
    tasks = None
    if config.hellaswag_every:
        import hellaswag

        tasks = hellaswag.prepare_for_training(
            config.hellaswag_data, model.config.block_size, ddp.gather
        )
    optimizer = configure_optimizer(model, config, ddp.dtype)
    scaler = torch.amp.GradScaler(ddp.device.type, enabled=ddp.dtype == torch.float16)
    state = TrainState(model, optimizer, scaler, loader)
    if checkpoint:
        state.restore(checkpoint, config, ddp)
        if state.step >= config.max_steps:
            print0(
                f"{checkpoint}: the run has all its {config.max_steps} steps; more with --max-steps"
            )
            return 0
    log = open_log(config, checkpoint, resuming, state.step, ddp)

    # Evaluation and checkpoints use `model`; training calls `ddp_model`, which has the same
    # weights.
    model.prepare(config.compile and devices.can_compile(ddp.device))
    ddp_model = wrap_in_ddp(model, B, T, ddp) if ddp.world_size > 1 else model
    full_speed, start, val = announce(state, config, checkpoint, ddp), state.step, None
    received = cli.collect_stop_signals()
    for step in range(start, config.max_steps + 1):
        val = evaluate(step, model, val_loader, tasks, config, ddp, log)
        if is_due(config.save_every, step, config) and (step > start or step == config.max_steps):
            save_checkpoint(state, config, ddp)
        if step == config.max_steps:
            break

        # ---- One update of the weights
        # -----------------------------------------------------------------
        began = time.perf_counter()
        lr = get_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        position = (
            loader.position
        )  # of this batch in the data, to name it if the update is not finite
        loss_sum = torch.zeros((), device=ddp.device)
        for micro_step in range(grad_accum_steps):
            x, y = loader.next_batch()  # (B, T) each
            if (
                ddp.device.type == "cuda"
            ):  # pinned memory is copied without waiting for earlier kernels
                x, y = (t.pin_memory().to(ddp.device, non_blocking=True) for t in (x, y))
            else:
                x, y = x.to(ddp.device), y.to(ddp.device)
            # DDP all-reduces gradients only in the last micro-step; no_sync() skips the others.
            sync = ddp.world_size == 1 or micro_step == grad_accum_steps - 1
            with contextlib.nullcontext() if sync else ddp_model.no_sync():
                with (
                    ddp.autocast()
                ):  # only the forward pass: the backward pass uses the same precisions
                    _, loss = ddp_model(x, y)
                # Gradients add up over micro-steps, and DDP averages over ranks: dividing by
                # grad_accum_steps makes them those of the step's mean loss. The scaler keeps
                # float16's small gradients from underflowing; in other precisions it does nothing.
                scaler.scale(loss / grad_accum_steps).backward()
            loss_sum += loss.detach()  # stays on the device: .item() would sync in every micro-step
        # Unscale before clipping: the norm must be that of the true gradients.
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        # The step's only device sync: all-reduce loss and stop flag.
        stop = torch.full((), float(bool(received)), device=ddp.device)
        loss_sum, stop = ddp.sum(torch.stack([loss_sum, stop])).tolist()
        loss, norm = loss_sum / (grad_accum_steps * ddp.world_size), norm.item()
        # A non-finite gradient would ruin weights and moments. All ranks see the same loss and
        # norm, and so decide alike. float16's scaler skips such an update itself, and halves its
        # scale; at 1 or below the scale is not to blame.
        if math.isfinite(loss) and (math.isfinite(norm) or scaler.get_scale() > 1):
            scaler.step(optimizer)
        else:
            state.skipped += 1
            bad = f"step {step}: loss {loss}, gradient norm {norm}, on the data from token {position} on"
            if state.skipped > config.skip_bad_steps:
                raise RunError(
                    f"{bad}; the weights are unchanged. Lower --max-lr, or skip this update with "
                    f"--resume --skip-bad-steps {state.skipped}"
                )
            print0(f"warning: {bad}: update skipped, {state.skipped} of {config.skip_bad_steps}")
        scaler.update()
        # Under DDP zero in place: gradients are views of its buckets; no_sync() would allocate a
        # second copy.
        optimizer.zero_grad(set_to_none=ddp.world_size == 1)
        # ---- End of the update
        # -------------------------------------------------------------------------

        seconds = time.perf_counter() - began
        state.step, state.elapsed = step + 1, state.elapsed + seconds
        rate = config.total_batch_size / seconds
        print0(
            f"step {step:5d} loss {loss:.4f} lr {lr:.2e} norm {norm:.3f} "
            f"{seconds * 1e3:.0f} ms {rate:,.0f} tok/s mfu {rate / full_speed:.1%}"
        )
        log(
            step,
            train=f"{loss:.6f}",
            lr=f"{lr:.6e}",
            norm=f"{norm:.6f}",
            tok_per_sec=f"{rate:.1f}",
            mfu=f"{rate / full_speed:.4f}",
            ms=f"{seconds * 1e3:.2f}",
        )
        if stop:
            if config.save_every:
                save_checkpoint(state, config, ddp)
            print0(f"stopped by a signal after step {step}; --resume continues")
            return 130 if received[:1] == [signal.SIGINT] else 143
    if ddp.rank == 0:
        conclude(state, config, val, val_loader)
    return 0


def main(args: list[str] | None = None) -> int:
    config = read_config(args)
    if config.plan:
        from support.plan import print_plan

        with torch.device("meta"):
            model = (
                new_model(config) if config.init == "scratch" else GPT.from_pretrained(config.init)
            )
        print_plan(model, *devices.choose_device(config.device, config.dtype), **asdict(config))
        return 0
    ddp = DDPContext.start(config)
    try:
        status = train(config, ddp)
    except RuntimeError as error:
        if devices.is_out_of_memory(error):
            raise UserError(
                f"out of memory on {ddp.device}: try --micro-batch-size "
                f"{max(config.micro_batch_size // 2, 1)}, --low-memory, or --shard-optimizer on "
                "several ranks"
            ) from None
        if ddp.world_size > 1 and re.search("Connection (closed|reset) by peer|NCCL", str(error)):
            raise LostRank(
                "another rank has exited; see its error line, or torchrun's report"
            ) from None
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    cli.run(main)

"""Trains GPT-2 (124M) from scratch and saves it in Hugging Face format.

    python train_gpt2.py                                     # FineWeb-Edu shards, else Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards      # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # eight GPUs: the reproduction
    python train_gpt2.py --resume                            # continues the run in log/
    python train_gpt2.py --help                              # every flag, its default and unit

From top to bottom: model, data, configuration, optimizer, ranks, evaluation, state, set-up, and the
loop, whose weight update is between two marked lines. support/ holds formats on disk and options.
Bad input raises UserError, whose one line says how to fix it.

Shapes: B batch (sequences per micro-batch), T time (tokens per sequence), C channels (n_embd =
n_head * head size), nh heads, hs head size, V vocabulary (50,257). A *step* updates the weights
from total_batch_size tokens, which the ranks share equally; each rank accumulates gradients over
micro-steps of B * T tokens. Step s is logged with the weights after s updates: the loss of step 0
is the untrained model's."""

import hashlib
import json
import math
import os
import signal
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

from support import cli, devices, pretrained, run_folder, tokenizer
from support.cli import RunError, UserError, print0
from support.tokenizer import EOT, VOCAB_SIZE, get_tokenizer

# --------------------------------------------------------------------------------------------------
# Model: GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.3)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are GPT-2 small's, 124,439,808 parameters."""

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention to the same and earlier tokens. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
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
    them -inf, so that a softmax over all columns (`padded`) needs no slice (bench/kernels)."""
    V, bias = wte.size(0), None
    if x.is_cuda:
        bias = F.pad(wte.new_zeros(V), (0, -V % 64), value=-math.inf)
        wte = F.pad(wte, (0, 0, 0, -V % 64))
    logits = F.linear(x, wte, bias)
    return logits if padded else logits[..., :V]


def next_token_loss(x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, a float32 scalar. x (…, C), wte (V, C), targets (…)"""
    logits = lm_head(x, wte, padded=True)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class ChunkedLoss(torch.autograd.Function):
    """next_token_loss and its gradient in one pass, for 1,024 tokens at a time.

    All logits of a micro-batch can be larger than GPT-2 (124M). Chunks take less memory everywhere,
    and less time on a CPU (bench/NOTES.md)."""

    CHUNK = 1024  # tokens

    @staticmethod
    def forward(ctx: Any, x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        """x (…, C), wte (V, C), targets (…) -> float32 scalar"""
        shape, x, targets = x.shape, x.flatten(0, -2), targets.flatten()
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        V = wte.size(0)
        w = F.pad(wte.to(dtype), (0, 0, 0, -V % 64))  # aligned rows are faster, on a CPU as well
        loss = torch.zeros((), device=x.device)
        train = ctx.needs_input_grad[0]
        dx, dw = torch.empty_like(x), None
        for i in range(0, len(x), ChunkedLoss.CHUNK):
            chunk = slice(i, i + ChunkedLoss.CHUNK)
            x_chunk, target = x[chunk].to(dtype), targets[chunk, None]
            logits = x_chunk @ w.t()  # (n, V padded)
            logits[:, V:] = -math.inf
            p = logits.softmax(1, dtype=torch.float32)
            # -log p[target] from the largest p: that of an unlikely target can underflow to 0.
            largest = logits.amax(1, keepdim=True).float()
            target_logits = logits.gather(1, target).float()
            loss += (largest - target_logits - p.amax(1, keepdim=True).log()).sum()
            if train:  # the summed loss has the gradient p, minus 1 at the target, in the logits
                p = p.scatter_add_(1, target, torch.full_like(target_logits, -1.0)).to(dtype)
                dx[chunk] = p @ w
                dw_chunk = p.t() @ x_chunk
                dw = dw_chunk.to(wte.dtype) if dw is None else dw.add_(dw_chunk)
            del logits, p  # otherwise they live until the next ones are allocated
        if train:
            ctx.save_for_backward(dx.div_(len(x)).view(shape), dw[:V].div_(len(x)))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return dx.mul_(gradient), dw.mul_(gradient), None


chunked_next_token_loss = ChunkedLoss.apply


class GPT(nn.Module):
    """GPT-2 with GPT-2's parameter names. Linear weights are (out, in), not Conv1D's (in, out)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.loss_function: Callable | None = None  # how to compute the loss without all logits
        self.low_memory = False  # recompute blocks in the backward pass: no activations are stored
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

        # std 0.02, biases 0, LayerNorms 1 and 0. What blocks add to the residual stream is scaled
        # down, or its variance would grow with depth (section 2.3).
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def prepare(self, compiled: bool = False, low_memory: bool = False) -> None:
        """Chooses how training computes; results match to within rounding.

        Blocks are compiled one by one and share code. Of the losses the plain one, compiled, makes
        the fewest passes over the logits: best on a GPU."""
        self.low_memory = low_memory
        self.loss_function = chunked_next_token_loss
        if compiled:
            for block in self.h:
                block.compile(dynamic=False)
            if self.wte.weight.device.type != "cpu" and not low_memory:
                self.loss_function = torch.compile(next_token_loss, dynamic=False)

    def hidden(
        self, idx: Tensor, position: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, T) -> the input of the head (B, T, C)

        position (B, T) or (T,): by default 0 … T-1. mask (B, 1, T, T) bool: by default causal."""
        if position is None:
            T, context = idx.size(1), self.config.block_size
            if context < T:
                raise UserError(f"{T} tokens, but the model's context is {context}")
            position = torch.arange(T, device=idx.device)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C)
        for block in self.h:
            if self.low_memory and torch.is_grad_enabled():
                x = recompute(block, x, mask, use_reentrant=False)
                torch.clear_autocast_cache()  # or 16-bit copies of all weights pile up
            else:
                x = block(x, mask)
        return self.ln_f(x)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets (B, T) int64 -> logits (B, T, V), mean cross-entropy in nats.

        No loss without targets; no logits if loss_function computes the loss without them."""
        x, wte = self.hidden(idx), self.wte.weight
        if targets is None:
            return lm_head(x, wte), None
        if self.loss_function is not None:
            return None, self.loss_function(x, wte, targets)
        logits = lm_head(x, wte)
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues idx (B, T) with samples of the top_k tokens. -> (B, T + max_new_tokens)"""
        block_size = self.config.block_size
        for _ in range(max_new_tokens):
            window = idx[:, -block_size:]
            T = window.size(1)
            padding = min(devices.round_length(T, idx.device), block_size) - T  # not attended to
            x = self.hidden(F.pad(window, (0, padding)))[:, T - 1]  # (B, C)
            logits = lm_head(x, self.wte.weight).float() / temperature  # (B, V)
            logits, candidates = logits.topk(min(top_k, logits.size(-1)))  # (B, k) each
            choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (B, 1)
            idx = torch.cat([idx, candidates.gather(1, choice)], dim=1)
        return idx

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """Training FLOPs per token: 6 N + 12 L C T (PaLM, Chowdhery et al. 2022, appendix B).

        N is without position embeddings, which no matmul uses. Recomputation does not count."""
        N = self.num_parameters() - self.wpe.weight.numel()
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """A GPT-2 from a folder or the Hub (`gpt2`, `gpt2-medium`, …), its weights in float32."""
        from support import models

        names = [field.name for field in fields(GPTConfig)]
        settings, weights = models.read_pretrained(name, names)
        with torch.device("meta"):  # the files have the weights
            model = cls(GPTConfig(**settings))
        models.load_weights(model, weights, name)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2 with its tokenizer."""
        pretrained.write_pretrained(Path(folder), asdict(self.config), self.state_dict())


# --------------------------------------------------------------------------------------------------
# Data: the order of tokens, and the loader (support/tokenizer.py opens shards)

SHARDS_FOLDER = "edu_fineweb10B"
PASSAGE = 256  # tokens of a .txt file that stay together when it is shuffled


def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … n-1 from `seed` alone; numpy's own may change with its version."""
    return np.random.PCG64(seed).random_raw(n).argsort(kind="stable")


class DataLoaderLite:
    """The tokens of a split as one endless sequence, and batches of next-token pairs from it.

    The order is a function of the seed. An epoch is the shards in random order, each with its
    documents in random order; epochs run back to back. A document begins at 50256; a .txt file is
    cut into passages of 256 tokens. Without shuffle the order is the files'.

    In each micro-step the ranks take the next B * T tokens each, in rank order. So a step has the
    same tokens for any number of ranks, each token is an input once per epoch, and the state is one
    position. data: folder of shards, or .txt file."""

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
        self.paths, self.shards = tokenizer.open_split(Path(data), split)
        self.passages = Path(data).suffix == ".txt"
        self.seed, self.shuffle = seed, shuffle
        self.lengths = np.array([len(shard) for shard in self.shards])
        self.total_tokens = int(self.lengths.sum())
        if self.total_tokens <= T:
            size = f"{self.total_tokens} {split} tokens"
            raise UserError(f"{data}: {size}, too few for a sequence of {T} and its target")
        # A batch may straddle two shards.
        self.document_order = lru_cache(maxsize=2)(self._document_order)
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.position = 0  # in the sequence, of the next micro-batch of all ranks

    def read(self, position: int, count: int) -> np.ndarray:
        """Tokens [position, position + count) of the sequence, 1-D uint16."""
        pieces, n = [], len(self.shards)
        while count > 0:
            epoch, offset = divmod(position, self.total_tokens)
            order = permutation(n, self.seed, epoch) if self.shuffle else np.arange(n)
            shard_ends = self.lengths[order].cumsum()
            i = int(np.searchsorted(shard_ends, offset, side="right"))
            shard = int(order[i])
            offset -= int(shard_ends[i] - self.lengths[shard])  # from here on within this shard
            ends, file_ends = self.document_order(epoch, shard)
            document = int(np.searchsorted(ends, offset, side="right"))
            while count > 0 and document < len(ends):
                remaining = int(ends[document]) - offset
                begin = int(file_ends[document]) - remaining
                piece = self.shards[shard][begin : begin + min(remaining, count)]
                tokenizer.check_tokens(piece, self.paths[shard])
                pieces.append(piece)
                offset += len(piece)
                position += len(piece)
                count -= len(piece)
                document += 1
        return np.concatenate(pieces)

    def _document_order(self, epoch: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the documents of a shard end: in the order of this epoch, and in the file."""
        tokens = self.shards[shard]
        starts = np.zeros(1, dtype=np.int64)  # without shuffle it counts as one document
        if self.shuffle and self.passages:
            starts = np.arange(0, len(tokens), PASSAGE)
        elif self.shuffle:  # tokens before the first 50256 end a document of the previous shard
            starts = np.union1d(starts, np.flatnonzero(tokens == EOT))
        lengths = np.diff(starts, append=len(tokens))
        order = permutation(len(starts), self.seed, epoch, shard + 1)
        return lengths[order].cumsum(), (starts + lengths)[order]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets of this rank, (B, T) int64 each."""
        tokens = self.B * self.T
        # One token more: the targets are the inputs shifted by one.
        buffer = self.read(self.position + self.rank * tokens, tokens + 1)
        buffer = torch.from_numpy(buffer.astype(np.int64))
        self.position += self.world_size * tokens
        return buffer[:-1].view(self.B, self.T), buffer[1:].view(self.B, self.T)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of tokens depends on."""
        names = [path.name for path in self.paths]
        shards = list(zip(names, self.lengths.tolist(), strict=True))
        digest = hashlib.sha256(json.dumps(shards).encode()).hexdigest()
        order = {"seed": self.seed, "shuffle": self.shuffle, "shards": digest}
        return {"position": self.position} | order

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position in the same data."""
        for key, value in self.state_dict().items():
            if key != "position" and state[key] != value:
                difference = f"{key} {value}, was {state[key]}"
                raise UserError(f"the data differ from the checkpoint's ({difference})")
        self.position = state["position"]


# --------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class TrainConfig:
    """Trains a GPT-2 from scratch or given weights. Flags override the defaults of the preset."""

    # Run

    # defaults of the flags; auto: gpt2 if edu_fineweb10B/ holds shards, else shakespeare
    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "shakespeare"] = "auto"
    log_dir: str = "log"  # folder for the log and checkpoints
    init: str = "scratch"  # scratch, a Hub name (gpt2, gpt2-medium, …), or the folder of a GPT-2
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    seed: int = 1337  # seed of the initial weights and of the data order
    plan: bool = False  # print estimated FLOPs, memory and time, and exit

    # Data

    data: str = SHARDS_FOLDER  # folder of token shards, or .txt file
    shuffle: bool = True  # reshuffle shards and their documents (.txt: passages) every epoch
    total_batch_size: int = 524_288  # tokens per update, over all ranks and micro-batches
    micro_batch_size: int = 0  # sequences per forward pass on a device (B); 0: as many as fit
    seq_len: int = 1024  # tokens per sequence (T)

    # Model

    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # number of channels (C)

    # Optimizer

    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices inside the blocks
    weight_decay: float = 0.1  # decoupled weight decay of matrices
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    beta2: float = 0.95  # AdamW's decay rate of squared gradients
    skip_bad_steps: int = 0  # number of non-finite updates to skip before aborting
    shard_optimizer: bool = False  # shard the optimizer's state over the ranks (ZeRO-1)

    # Schedule

    # after the warm-up; wsd: constant, then a linear warm-down
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 715  # steps of linear warm-up
    warmdown_steps: int = 5000  # steps of the linear warm-down to min_lr at the end of wsd
    max_lr: float = 6e-4  # learning rate at the end of the warm-up
    min_lr: float = 6e-5  # learning rate of the last step

    # Device

    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls
    compile: bool = field(default_factory=lambda: torch.cuda.is_available())  # use torch.compile
    low_memory: bool = False  # recompute blocks in the backward pass; logits in chunks
    deterministic: bool = False  # use deterministic GPU kernels, so that resuming is bit-exact

    # Evaluation

    eval_every: int = 250  # steps between validation losses; 0: never
    eval_tokens: int = 10_485_760  # tokens per validation loss (at most the whole split)
    hellaswag_every: int = 250  # steps between HellaSwag evaluations; 0: never
    hellaswag_data: str = ""  # local HellaSwag .jsonl; empty: the official tasks, downloaded once
    sample_every: int = 250  # steps between samples; 0: never
    sample_prompt: str = "Hello, I'm a language model,"  # prompt of the samples

    # Checkpoints

    save_every: int = 1000  # steps between checkpoints; 0: never
    keep_checkpoints: int = 3  # newest to keep, beside the best; 0: all
    keep_every: int = 0  # never delete checkpoints at multiples of this many steps; 0: none

    # Logging

    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


# fmt: off
SHAKESPEARE = dict(
    data=str(run_folder.ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=64,
    n_layer=4, n_head=4, n_embd=64, optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0,
    warmup_steps=20, warmdown_steps=300, beta2=0.995, compile=False, eval_every=200,
    eval_tokens=32_768, hellaswag_every=0, sample_every=300, sample_prompt="ROMEO:", save_every=200,
)
# From small models; max_lr also from others' search (bench/recipes).
GPT2_FAST = dict(
    optimizer="muon", schedule="wsd", max_steps=9_536, warmup_steps=476, warmdown_steps=4_768,
    max_lr=6e-3, min_lr=0.0,
)
PRESETS = {
    "gpt2": {}, "gpt2-fast": GPT2_FAST, "gpt3": dict(seq_len=2048), "shakespeare": SHAKESPEARE,
}
# Settings fixed across resumes: others change the losses by no more than rounding.
FIXED = (
    "total_batch_size", "seq_len", "n_layer", "n_head", "n_embd", "optimizer", "schedule", "max_lr",
    "min_lr", "warmup_steps", "beta2", "weight_decay", "grad_clip", "seed", "shuffle",
)
# fmt: on


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig: the values of the preset, overridden by the flags.

    One UserError names every error that can be detected from the flags."""
    # These two change the defaults of other flags.
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?", default="auto")
    first.add_argument("--device", nargs="?", default="auto")
    given, _ = first.parse_known_args(args)
    if given.preset == "auto":
        shards = any(Path(SHARDS_FOLDER).glob("*_train_*"))
        given.preset = "gpt2" if shards else "shakespeare"
    defaults = dict(PRESETS.get(given.preset, {}))
    if given.device in ("cpu", "mps"):
        defaults["compile"] = False
    config = cli.parse_args(TrainConfig, args, default=replace(TrainConfig(), **defaults))

    problems = []
    positive = ("total_batch_size", "seq_len", "n_layer", "n_head", "n_embd", "eval_tokens")
    for name, value in asdict(config).items():
        if isinstance(value, int | float):
            minimum = 1 if name in positive else 0
            if not minimum <= value < 2**63:
                bounds = f"at least {minimum} and below 2**63"
                problems.append(f"{cli.flag(name)} {value}: must be {bounds}")
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
    return config


def differences(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """Settings of `config` that differ from a checkpoint's, `before`, and may not.

    One that an older version of this script lacked counts as its default."""
    before = asdict(TrainConfig()) | before
    fixed = FIXED if config.init == "scratch" else (*FIXED, "init")
    changed = [name for name in fixed if getattr(config, name) != before[name]]
    return [f"{cli.flag(name)} was {before[name]}, is {getattr(config, name)}" for name in changed]


# --------------------------------------------------------------------------------------------------
# Optimizer and schedule


def configure_optimizer(model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32) -> Any:
    """AdamW that decays matrices and embeddings only; --optimizer muon: Muon for the blocks.

    The default betas are GPT-3's (Brown et al. 2020, appendix B). dtype: of Muon's matmuls."""
    by_muon = {}
    if config.optimizer == "muon":
        by_muon = {name: p for name, p in model.h.named_parameters() if p.dim() == 2}
    others = [p for name, p in model.named_parameters() if name.removeprefix("h.") not in by_muon]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel for all parameters, on a CPU several times as fast as the loop
    options = dict(lr=config.max_lr, betas=(0.9, config.beta2), eps=1e-8, fused=True)
    optimizer = torch.optim.AdamW(groups, **options)
    if by_muon:
        from support.muon import Muon, Optimizers

        dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        muon = Muon(by_muon.items(), config.max_lr, config.weight_decay, dtype=dtype)
        optimizer = Optimizers(muon, optimizer)
    if config.shard_optimizer and dist.is_initialized():
        from support.sharding import shard_state

        shard_state(optimizer)
    return optimizer


def get_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of update `step` (from 0): linear warm-up to max_lr, then down to min_lr.

    cosine is GPT-3's (Brown et al. 2020, appendix B). wsd ends in a linear warm-down; before it
    nothing depends on max_steps: runs can be extended (Hägele et al. 2024, arXiv:2405.18392)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    if step >= config.max_steps:
        return config.min_lr
    if config.schedule == "wsd":
        warmdown = min(config.warmdown_steps, config.max_steps - config.warmup_steps)
        share = min((config.max_steps - step) / max(warmdown, 1), 1.0)
    else:
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + share * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Ranks: the processes of a run, and what they exchange


LARGE = 50_000_000  # parameters


@dataclass
class Ranks:
    """This process among those of a run (torchrun's ranks, or one alone), and its device."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of matmuls
    description: str  # device and precision, with the reason
    job: str = ""  # names the torchrun that started this process, the same after a restart

    @classmethod
    def start(cls, config: TrainConfig) -> "Ranks":
        """Chooses the device and joins torchrun's process group."""
        rank, local_rank, world_size = cli.torchrun_ranks()
        chosen = devices.choose_device(config.device, config.dtype, local_rank, world_size)
        device, dtype, description = chosen
        if device.type == "mps" and dtype == torch.float16:
            # Its fused AdamW ignores found_inf (PR #186360).
            raise UserError("--dtype float16: overflows would ruin the weights on MPS; use float32")
        if device.type == "cuda" and dtype != torch.float32:
            torch.set_float32_matmul_precision("high")  # TF32 for matmuls that remain in float32
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matmul
            torch.use_deterministic_algorithms(True)
        if "RANK" in os.environ:
            devices.join_process_group(rank, world_size, device, dtype)
        # JOB/attempt_N/RANK/error.json. Unlike --rdzv-id, JOB is never that of an earlier torchrun.
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        job = error_file.parent.parent.parent.name
        return cls(rank, world_size, device, dtype, description, job)

    def autocast(self) -> torch.autocast:
        """Runs matmuls in `dtype`."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=enabled)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def validation_loss(
    model: GPT, loader: DataLoaderLite, tokens: int, ranks: Ranks, received: Sequence[int] = ()
) -> float | None:
    """Mean loss in nats over the first `tokens` tokens of the split, all with the same weight.

    The ranks share the sequences and sum their losses, so that neither B nor their number matters.
    Full batches use the compiled model if training on a GPU does. None if a rank `received` a
    signal."""
    B, T = loader.B, loader.T
    sequences = min(tokens, loader.total_tokens - 1) // T
    losses, sizes = [torch.zeros((), device=ranks.device)], [0]
    for first in range(ranks.rank * B, sequences, ranks.world_size * B):
        if received:
            break
        n = min(B, sequences - first)
        buffer = torch.from_numpy(loader.read(first * T, n * T + 1).astype(np.int64))
        buffer = buffer.to(ranks.device)
        compiled = n == B and ranks.device.type != "cpu"  # otherwise eager, in chunks
        loss_function = model.loss_function if compiled else chunked_next_token_loss
        stance = "default" if compiled else "force_eager"
        with ranks.autocast(), torch.compiler.set_stance(stance):
            x = model.hidden(buffer[:-1].view(n, T))  # (n, T, C)
            losses.append(loss_function(x, model.wte.weight, buffer[1:].view(n, T)))
        sizes.append(n)
    # The only synchronization. Summed in float64, which not every device has.
    values = torch.stack(losses).tolist()
    total = sum(loss * n for loss, n in zip(values, sizes, strict=True))
    total, stop = np.sum(ranks.gather((total, len(received))), axis=0).tolist()
    return None if stop else total / sequences


@lru_cache(maxsize=1)
def validation_text(loader: DataLoaderLite, tokens: int) -> tuple[int, int, int]:
    """(number, bytes, characters) of the tokens that validation_loss predicts."""
    number = min(tokens, loader.total_tokens - 1) // loader.T * loader.T
    return number, *tokenizer.text_size(loader.read(1, number))


def print_samples(model: GPT, prompt: str, samples: int, length: int, ranks: Ranks) -> None:
    """Prints continuations of `prompt` by `length` tokens."""
    generator = torch.Generator(device=ranks.device)  # separate from the training RNG
    generator.manual_seed(42 + ranks.rank)
    tokens = get_tokenizer().encode_ordinary(prompt) or [EOT]
    idx = torch.tensor([tokens] * samples, device=ranks.device)
    with ranks.autocast():
        idx = model.generate(idx, length, generator=generator)
    for i, tokens in enumerate(idx.tolist()):
        text = indent(tokenizer.printable(tokens), "  ")
        print0(f"rank {ranks.rank} sample {i}:\n{text}", every_rank=True)


def evaluate(
    step: int,
    model: GPT,
    val_loader: DataLoaderLite | None,
    tasks: list[Any] | None,
    config: TrainConfig,
    ranks: Ranks,
    log: Callable | None,
    received: Sequence[int],
) -> bool:
    """Makes validation loss, HellaSwag and samples due at `step`. True if a signal ended it."""
    model.eval()  # GPT-2 is trained without dropout, but a fork may have it
    last = step == config.max_steps
    if config.eval_every and (last or step % config.eval_every == 0):
        val = validation_loss(model, val_loader, config.eval_tokens, ranks, received)
        if val is None:
            return True
        print0(f"step {step:5d} validation loss {val:.4f}")
        if log:
            tokens, size, _ = validation_text(val_loader, config.eval_tokens)
            log(step, val=val, bpb=val * tokens / (size * math.log(2)))
    with torch.compiler.set_stance("force_eager"):  # shapes that occur once aren't worth compiling
        if tasks and (last or step % config.hellaswag_every == 0):
            import hellaswag

            share = (ranks.device, ranks.rank, ranks.world_size, received)
            with ranks.autocast():
                correct = hellaswag.count_correct(model, tasks, *share)
            correct, stop = np.sum(ranks.gather((correct, len(received))), axis=0).tolist()
            if stop:
                return True
            print0(f"step {step:5d} HellaSwag {correct / len(tasks):.4f}")
            if log:
                log(step, hella=correct / len(tasks))
        if step > 0 and config.sample_every and (last or step % config.sample_every == 0):
            if not last:
                print_samples(model, config.sample_prompt, 4, 32, ranks)
            elif ranks.rank == 0:
                print_samples(model, config.sample_prompt, 2, 64, ranks)
    model.train()
    return False


# --------------------------------------------------------------------------------------------------
# State: what a run is resumed from, and its log


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

    def skip_update(self, allowed: int, loss: float, norm: float, token: int) -> None:
        """Counts an update that is not finite. RunError if there are more than `allowed`."""
        self.skipped += 1
        data = f"on the data from token {token} on"
        problem = f"step {self.step}: loss {loss}, gradient norm {norm}, {data}"
        if self.skipped > allowed:
            skip = f"skip this update with --resume --skip-bad-steps {self.skipped}"
            raise RunError(f"{problem}; the weights are unchanged. Lower --max-lr, or {skip}")
        print0(f"warning: {problem}: update skipped, {self.skipped} of {allowed}")

    def state_dict(self, config: TrainConfig, ranks: Ranks) -> dict[str, Any]:
        """Everything but the weights. All ranks call it."""
        random, kind = {"cpu": torch.get_rng_state()}, ranks.device.type
        if kind != "cpu":
            random[kind] = torch.get_device_module(kind).get_rng_state()
        saved = {"format": 1, "step": self.step, "elapsed": self.elapsed, "skipped": self.skipped}
        saved |= {"config": asdict(config), "dtype": str(ranks.dtype)}
        saved["random"] = ranks.gather(random)
        for name in ("optimizer", "scaler", "loader"):
            saved[name] = getattr(self, name).state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any], config: TrainConfig, ranks: Ranks) -> None:
        """Restores everything but the weights."""
        changes = differences(saved["config"], config)
        if changes:
            raise UserError(f"--resume: {config.log_dir} holds another run: {', '.join(changes)}")
        self.loader.load_state_dict(saved["loader"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if ranks.device.type == "cpu":  # clone: the tensors are memory-mapped
            for moments in self.optimizer.state.values():
                moments.update({key: tensor.clone() for key, tensor in moments.items()})
        if saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        if saved["dtype"] != str(ranks.dtype):
            print0(f"precision: {saved['dtype']} so far, {ranks.dtype} from here on")
        if ranks.rank < len(saved["random"]):
            random = saved["random"][ranks.rank]
            torch.set_rng_state(random["cpu"])
            kind = ranks.device.type
            if kind != "cpu" and kind in random:
                torch.get_device_module(kind).set_rng_state(random[kind])
        self.step, self.elapsed, self.skipped = saved["step"], saved["elapsed"], saved["skipped"]


def save_checkpoint(
    state: TrainState, config: TrainConfig, ranks: Ranks, log: run_folder.RunLog | None
) -> bool:
    """Writes log_dir/step_*/ atomically; all ranks call it. False if it can't be written.

    Earlier checkpoints are intact then, and the run goes on, unless it is at its end."""
    saved, problem = state.state_dict(config, ranks), None
    if log:
        problem = log.write_checkpoint(state.model, saved)
    problem = ranks.broadcast(problem)
    if problem and state.step == config.max_steps:
        raise UserError(f"{problem}: free some space; --resume continues")
    if problem and log:
        cli.warn(problem, "error")
    return not problem


# --------------------------------------------------------------------------------------------------
# Set-up


def new_model(config: TrainConfig, checkpoint: Path | None = None) -> GPT:
    """A model from a checkpoint, from --init, or from scratch."""
    if checkpoint or config.init != "scratch":
        return GPT.from_pretrained(checkpoint or config.init)
    shape = GPTConfig(config.seq_len, VOCAB_SIZE, config.n_layer, config.n_head, config.n_embd)
    return GPT(shape)


def start_model(
    config: TrainConfig, checkpoint: Path | None, saved: dict[str, Any] | None, ranks: Ranks
) -> GPT:
    """The model to train. On a CPU its size decides the precision."""
    torch.manual_seed(config.seed)
    model = None
    if ranks.rank == 0:  # DDP sends the weights to the others, which never load them
        model = new_model(config, checkpoint)
        shape = model.config
        if shape.block_size < config.seq_len or shape.vocab_size != VOCAB_SIZE:
            problem = f"context {shape.block_size}, vocabulary {shape.vocab_size}"
            raise UserError(f"--init {config.init}: {problem} for --seq-len {config.seq_len}")
        model = model.to(ranks.device)
    shape = ranks.broadcast(model and model.config)
    if model is None:
        with torch.device("meta"):
            model = GPT(shape)
        model = model.to_empty(device=ranks.device)
    large = model.num_parameters() >= LARGE
    if ranks.device.type == "cpu" and config.dtype == "auto" and large:
        precision = devices.cpu_precision(saved and saved["dtype"])
        ranks.dtype, ranks.description = ranks.broadcast(precision)
    return model


def choose_micro_batch_size(config: TrainConfig, model: GPT, ranks: Ranks) -> int:
    """B: --micro-batch-size, or the largest power of two that fits and divides a rank's share."""
    T, total = config.seq_len, config.total_batch_size
    unit = T * max(config.micro_batch_size, 1) * ranks.world_size
    if total % unit:
        nearest = max(round(total / unit), 1) * unit
        problem = f"is not a multiple of {unit} (sequence x micro-batch x ranks)"
        raise UserError(f"--total-batch-size {total} {problem}; the nearest that is: {nearest}")
    if config.micro_batch_size:
        return config.micro_batch_size
    sequences = total // (T * ranks.world_size)  # per step, on each rank
    for size in (128, 64, 32, 16, 8, 4, 2):
        if sequences % size:
            continue
        if ranks.device.type == "cuda":
            from support.plan import fits

            shards = ranks.world_size if config.shard_optimizer else 1
            keeps_logits = config.compile and not config.low_memory
            accumulates = ranks.world_size > 1 or sequences > size
            how = (config.low_memory, ranks.autocast(), ranks.world_size > 1)
            fit = fits(model, size, T, *how, shards, keeps_logits, accumulates)
            if all(ranks.gather(fit)):
                return size
        elif size * T <= 4096:  # enough for the cores of a CPU
            return size
    return 1


def wrap_in_ddp(model: GPT, B: int, T: int, ranks: Ranks) -> nn.Module:
    """The model in DDP, which averages the gradients of the ranks, its buckets in final order."""
    torch._dynamo.config.optimize_ddp = False  # it splits graphs, but ours are single blocks
    gpu = [ranks.device.index] if ranks.device.type == "cuda" else []
    ddp_model = DistributedDataParallel(model, device_ids=gpu or None, gradient_as_bucket_view=True)
    # DDP rebuilds its buckets after its first backward pass, which changes the order of summation:
    # trigger that now, so that a resumed run sums as before. The second pass fills the new ones.
    x = torch.zeros(B, T, dtype=torch.int64, device=ranks.device)
    with torch.random.fork_rng(gpu):  # dropout in a fork must not advance the RNG
        for _ in range(2):
            ddp_model.zero_grad(set_to_none=True)
            with ranks.autocast():
                _, loss = ddp_model(x, x)
            loss.backward()
    ddp_model.zero_grad(set_to_none=False)
    return ddp_model


def announce(state: TrainState, config: TrainConfig, resumed: Path | None, ranks: Ranks) -> None:
    """Prints what is about to be trained."""
    loader, batch, tokens = state.loader, config.total_batch_size, state.loader.total_tokens
    micro_steps = batch // (loader.B * loader.T * ranks.world_size)
    parameters, flops = state.model.num_parameters(), state.model.flops_per_token(config.seq_len)
    peak, source = devices.peak_flops(ranks.device, ranks.dtype)
    epochs = config.max_steps * batch / tokens
    folder = f"{config.log_dir}/" + (f", resumed from {resumed}" if resumed else "")
    print0(f"device: {ranks.description}")
    print0(f"model: {parameters:,} parameters, {flops / 1e6:,.0f} MFLOP per token")
    print0(f"speed: MFU 100 % = {peak / 1e12:,.3g} TFLOP/s per device ({source})")
    print0(f"data: {cli.shown(config.data)}, {tokens:,} training tokens")
    print0(f"steps: {config.max_steps:,} of {batch:,} tokens, {epochs:.3f} epochs")
    shape = f"{loader.B} x {loader.T} tokens x {micro_steps} micro-steps"
    print0(f"batch: {shape} x {ranks.world_size} ranks")
    print0(f"log and checkpoints: {folder}")
    rest = config.max_steps - config.warmup_steps
    if config.schedule == "wsd" and 0 < rest < config.warmdown_steps:
        print0("schedule: a shorter warm-down, right after the warm-up")


def conclude(state: TrainState, config: TrainConfig, val_loader: DataLoaderLite | None) -> None:
    """Prints the last lines of a run."""
    log_dir = Path(config.log_dir)
    steps, losses = run_folder.read_log(log_dir).get("val", ([], []))
    if val_loader and steps[-1:] == [state.step]:
        tokens, size, characters = validation_text(val_loader, config.eval_tokens)
        nats = losses[-1] * tokens
        print0(f"\nvalidation loss: {losses[-1]:.4f} nats per token")
        print0(f"  {nats / characters:.4f} nats per character")
        print0(f"  {nats / size / math.log(2):.4f} bits per byte")
    print0(f"done: {state.step:,} steps, {state.elapsed / 60:.1f} minutes of training")
    memory = devices.peak_memory()
    if memory:
        print0(f"peak memory: {memory / 1e9:.2f} GB")
    if config.save_every:
        run_folder.print_result(log_dir, state.step, config.sample_prompt)


# --------------------------------------------------------------------------------------------------
# The loop


def train(config: TrainConfig, ranks: Ranks) -> int:
    """Trains, evaluates and saves. Returns the exit status: 0, or 130 / 143 after a signal."""
    # Model, data and optimizer: new, or as a checkpoint has them.
    log_dir, continues, checkpoint, saved = Path(config.log_dir), False, None, None
    if ranks.rank == 0 and (config.resume or ranks.job):
        from support import resume

        differ = partial(differences, config=config)
        continues, checkpoint, saved = resume.find_start(log_dir, config.resume, ranks.job, differ)
    checkpoint = ranks.broadcast(checkpoint)
    model = start_model(config, checkpoint, saved, ranks)
    B, T = choose_micro_batch_size(config, model, ranks), config.seq_len
    grad_accum_steps = config.total_batch_size // (B * T * ranks.world_size)
    shape = (B, T, ranks.rank, ranks.world_size, config.seed)
    loader, val_loader = DataLoaderLite(config.data, "train", *shape, config.shuffle), None
    if config.eval_every:
        val_loader = DataLoaderLite(config.data, "val", *shape, shuffle=False)
    tasks = None
    if config.hellaswag_every:
        import hellaswag

        arguments = (config.hellaswag_data, model.config.block_size, ranks.gather)
        tasks = hellaswag.prepare_for_training(*arguments)
    optimizer = configure_optimizer(model, config, ranks.dtype)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=ranks.dtype == torch.float16)
    state = TrainState(model, optimizer, scaler, loader)
    if checkpoint:
        from support import resume

        state.load_state_dict(saved or resume.read_training_state(checkpoint), config, ranks)
        saved = None  # it maps the file
        if ranks.broadcast(resume.is_finished(log_dir, state.step, config.max_steps)):
            print0(f"already trained {state.step} steps; to continue, raise --max-steps")
            return 0
    log = None  # only rank 0 writes
    if ranks.rank == 0:
        entry = {"job": ranks.job, "step": state.step, "device": ranks.description}
        entry |= {"world_size": ranks.world_size, "config": asdict(config)}
        if continues:
            entry |= resume.trim_log(log_dir, state.step)
        log = run_folder.RunLog(log_dir, entry)

    # Evaluation and checkpoints use `model`; training calls `ddp_model`, with the same weights.
    model.prepare(config.compile and devices.can_compile(ranks.device), config.low_memory)
    ddp_model = wrap_in_ddp(model, B, T, ranks) if ranks.world_size > 1 else model
    announce(state, config, checkpoint, ranks)
    peak, _ = devices.peak_flops(ranks.device, ranks.dtype)
    full_speed = ranks.world_size * peak / model.flops_per_token(T)  # tokens per second
    every = config.eval_every or config.hellaswag_every or config.sample_every or config.save_every
    ends = deque(maxlen=1 + (every or 20))  # when the latest steps ended, over one interval
    received = cli.collect_stop_signals()
    start, stop, cuda = state.step, False, ranks.device.type == "cuda"
    # One round more than there are updates: the last only saves and evaluates.
    for step in range(start, config.max_steps + 1):
        last = step == config.max_steps
        # Save before evaluating, which may fail or be interrupted; --resume makes up for it.
        saves = config.save_every and (step > start or (last and checkpoint is None))
        due = saves and (stop or last or step % config.save_every == 0)
        lost = due and not save_checkpoint(state, config, ranks, log)
        if not stop:
            stop = evaluate(step, model, val_loader, tasks, config, ranks, log, received)
            if stop and saves and not due:
                lost = not save_checkpoint(state, config, ranks, log)
        if log and config.save_every and (due or last):
            run_folder.prune_checkpoints(log_dir, step, config.keep_checkpoints, config.keep_every)
            run_folder.draw_curves(log_dir, wait=last)
        if stop and lost:
            raise RunError(f"stopped by a signal, and step {step} could not be saved")
        if stop:
            hint = "--resume continues" if config.save_every else "nothing is saved"
            print0(f"stopped by a signal after {step} updates; {hint}")
            return 130 if received[:1] == [signal.SIGINT] else 143
        if last:
            break

        # ---- One update of the weights -----------------------------------------------------------
        began = time.perf_counter()
        lr = get_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        first_token = loader.position  # names this batch if the update is not finite
        loss_sum = torch.zeros((), device=ranks.device)
        for micro_step in range(grad_accum_steps):
            x, y = loader.next_batch()  # (B, T) each
            if cuda:  # from pinned memory the copy doesn't wait for kernels
                x, y = x.pin_memory(), y.pin_memory()
            x, y = x.to(ranks.device, non_blocking=cuda), y.to(ranks.device, non_blocking=cuda)
            # DDP exchanges the gradients once, in the last micro-step.
            ddp_model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with ranks.autocast():  # the backward pass takes the precisions of the forward pass
                _, micro_loss = ddp_model(x, y)
            # DDP averages over ranks, but micro-steps add up: divided by their number, the sum is
            # the gradient of the mean loss. The scaler keeps float16 gradients above zero.
            scaler.scale(micro_loss / grad_accum_steps).backward()
            loss_sum += micro_loss.detach()  # .item() would synchronize in every micro-step
        # Unscale before clipping: the limit is meant for the true gradients.
        scaler.unscale_(optimizer)
        norm_tensor = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        # The one synchronization with the device. All ranks get the same sums, so decide alike.
        stop_flag = torch.full((), float(bool(received)), device=ranks.device)
        sums = torch.stack([loss_sum, stop_flag])
        if ranks.world_size > 1:
            dist.all_reduce(sums)
        total_loss, stop = sums.tolist()
        loss, norm = total_loss / (grad_accum_steps * ranks.world_size), norm_tensor.item()
        # A gradient that is not finite would ruin weights and moments. float16's scaler skips such
        # steps and halves the scale; at 1 or below, the gradient itself is not finite.
        if math.isfinite(loss) and (math.isfinite(norm) or scaler.get_scale() > 1):
            scaler.step(optimizer)
        else:
            state.skip_update(config.skip_bad_steps, loss, norm, first_token)
        scaler.update()
        # Under DDP gradients are views of its buckets: zero them in place, or they'd be copies.
        optimizer.zero_grad(set_to_none=ranks.world_size == 1)
        # ---- End of the update -------------------------------------------------------------------

        ends.append(time.perf_counter())
        seconds = ends[-1] - began
        left = devices.time_left(ends, seconds, config.max_steps - step - 1)
        state.step, state.elapsed = step + 1, state.elapsed + seconds
        rate = config.total_batch_size / seconds
        mfu, ms = rate / full_speed, 1e3 * seconds
        result = f"step {step:5d}/{config.max_steps} loss {loss:.4f} lr {lr:.2e} norm {norm:.3f}"
        print0(f"{result} {ms:.0f} ms {rate:,.0f} tok/s mfu {mfu:.1%} {left}")
        if log:
            log(step, train=loss, lr=lr, norm=norm, tok_per_sec=rate, mfu=mfu, ms=ms)
    if log:
        conclude(state, config, val_loader)
        log.finish(state.step)
    return 0


def main(args: list[str] | None = None) -> int:
    config = read_config(args)
    if config.plan:
        from support.plan import print_plan

        with torch.device("meta"):
            model = new_model(config)
        device, dtype, reason = devices.choose_device(config.device, config.dtype)
        if device.type == "cpu" and config.dtype == "auto" and model.num_parameters() >= LARGE:
            dtype, reason = devices.cpu_precision()
        print_plan(model, device, dtype, reason, **asdict(config))
        return 0
    ranks = Ranks.start(config)
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:
        missing = f"no shards in {SHARDS_FOLDER}/ (`python fineweb.py` builds them)"
        print0(f"{missing}: the shakespeare preset")
    try:
        with run_folder.lock(Path(config.log_dir), ranks.rank):
            status = train(config, ranks)
    except RuntimeError as error:
        from support.failures import explain

        raise explain(error, ranks.device, config.micro_batch_size) from None
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    cli.run(main)

"""Trains GPT-2 (124M) from scratch and leaves a model that Hugging Face loads.

    python train_gpt2.py                                     # shards if there are any, else Shakespeare on the CPU
    python train_gpt2.py --preset gpt2 --data my_shards      # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # eight GPUs: the reproduction
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train_gpt2.py   # two nodes
    python train_gpt2.py --resume                            # goes on where a run in log/ stopped
    python train_gpt2.py --help                              # every flag, its default and its unit

Read it top to bottom: configuration, model, optimizer, data, evaluation, checkpoints, distributed, main.

Shapes: B batch (sequences of a micro-batch), T time (tokens of a sequence), C channels (n_embd = n_head * head size),
V vocabulary (50,257). A *step* is one update of the weights from `total_batch_size` tokens: every rank accumulates the
gradients of `total_batch_size / (B * T * world size)` micro-batches. Step s is logged with the weights that s updates
have made, so the loss of step 0 is that of the untrained model.
"""

import contextlib
import gc
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import runlog
from common import InputError, RunError, atomic_path, first_line, flag, is_rank_zero, parse_args, remove_folder, run
from devices import (
    choose_device,
    computes_in_bfloat16,
    keep_freed_memory,
    on_host,
    peak_flops,
    why_not_compile,
    yield_to_others,
)
from loss import fused_next_token_loss, lm_head, next_token_loss
from muon import Muon, Optimizers
from pretrained import model_folder, read_pretrained, to_hub, write_pretrained
from shards import TokenStream
from tokenizer import VOCAB_SIZE, get_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are GPT-2 small, 124,439,808 parameters."""

    block_size: int = 1024  # the longest context, in tokens
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


@dataclass(frozen=True)
class TrainConfig:
    """Trains a GPT-2 from scratch, or goes on from a model. A preset sets all values; flags override it."""

    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "shakespeare"] = "auto"
    """Set of defaults; auto: gpt2 when edu_fineweb10B/ holds shards, else shakespeare; gpt2-fast: a newer recipe."""
    data: str = "edu_fineweb10B"
    """Folder of token shards (python fineweb.py makes them), or a .txt file."""
    log_dir: str = "log"
    """Folder for log.txt, run.json and checkpoints."""
    init: str = "scratch"
    """Initial weights: scratch, a hub name (gpt2, gpt2-medium, gpt2-large, gpt2-xl) or a folder with a GPT-2."""
    resume: bool = False
    """Go on from the newest checkpoint in log_dir; start when there is none."""
    max_steps: int = 19_073
    """Number of updates; 19,073 are one epoch of 10 billion tokens."""
    total_batch_size: int = 524_288
    """Tokens an update, over all ranks and micro-batches."""
    micro_batch_size: int = 0
    """Sequences a forward pass on one device (B); 0: the largest power of two that fits."""
    seq_len: int = 1024
    """Tokens a sequence (T)."""
    n_layer: int = 12
    """Number of blocks."""
    n_head: int = 12
    """Number of attention heads."""
    n_embd: int = 768
    """Number of channels (C)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW with betas 0.9 and 0.95 for all parameters, or Muon for the matrices inside the blocks (muon.py)."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up: half a cosine from max_lr to min_lr; or max_lr, then a linear warm-down."""
    warmdown_steps: int = 5000
    """Steps of the warm-down to min_lr at the end of a wsd schedule."""
    max_lr: float = 6e-4
    """Learning rate at the end of the warm-up."""
    min_lr: float = 6e-5
    """Learning rate of the last step."""
    warmup_steps: int = 715
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices (biases and LayerNorms have none)."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    seed: int = 1337
    """Seed of the initial weights and of the data order."""
    shuffle: bool = True
    """Permute shards, and documents (of a .txt file: passages) within each, anew every epoch; otherwise file order."""
    compile: bool = field(default_factory=torch.cuda.is_available)
    """Compile the blocks and the loss with torch.compile: wanted on a GPU; on a CPU it costs more than it gains."""
    low_memory: bool = False
    """Make the logits of 1,024 tokens at a time: slower on a GPU, for a larger model or batch where memory is short."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; weights, LayerNorm statistics and losses stay in float32."""
    eval_every: int = 250
    """Steps between validation losses; 0: never."""
    eval_tokens: int = 10_485_760
    """Tokens of each validation loss (at most one pass over the validation split)."""
    hellaswag_every: int = 250
    """Steps between HellaSwag evaluations; 0: never."""
    hellaswag_data: str = ""
    """Local HellaSwag .jsonl; empty: the official validation set, downloaded once."""
    sample_every: int = 250
    """Steps between samples; 0: never."""
    sample_prompt: str = "Hello, I'm a language model,"
    """How the samples begin."""
    save_every: int = 1000
    """Steps between checkpoints; 0: never."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep; 0: all."""
    keep_every: int = 0
    """Checkpoints of every so many steps are kept for ever; 0: none."""
    skip_bad_steps: int = 0
    """Updates with an infinite or undefined loss or gradient to leave out; one more stops the run."""
    tensorboard: bool = False
    """Write the log's streams for TensorBoard, too, into log_dir/tensorboard/ (pip install tensorboard)."""
    wandb: bool = False
    """Send the log's streams to Weights & Biases, too (pip install wandb)."""
    check_against: str = ""
    """Folder of a reference (reference/shakespeare, …): say at the end whether this run's losses match its."""
    plan: bool = False
    """Print the arithmetic of the run and exit."""


HELP_GROUPS = {  # the first setting of each group
    "preset": "the run", "max_steps": "batch", "n_layer": "model", "optimizer": "optimizer", "seed": "chance",
    "compile": "machine", "eval_every": "evaluation and samples", "save_every": "checkpoints and accidents",
    "tensorboard": "reports",
}
SHARDS_FOLDER = "edu_fineweb10B"
SHAKESPEARE = dict(
    data=str(Path(__file__).with_name("input.txt")),
    max_steps=600,
    total_batch_size=512,
    seq_len=128,
    n_layer=4,
    n_head=4,
    n_embd=64,
    max_lr=5e-3,
    min_lr=5e-4,
    warmup_steps=20,
    warmdown_steps=200,
    compile=False,
    eval_every=150,
    eval_tokens=32_768,
    hellaswag_every=0,
    sample_every=300,
    sample_prompt="ROMEO:",
    save_every=300,
)
# The recipe is from small models (bench/recipes), but for the learning rate, which is the one published for AdamW, this
# model and batch (Muon's updates are made as large as AdamW's). Nobody has trained 124M with it to the end yet.
GPT2_FAST = dict(optimizer="muon", schedule="wsd", max_steps=9_536, warmup_steps=476, warmdown_steps=4_768,
                 max_lr=1.8e-3, min_lr=0.0)
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {}, "gpt2-fast": GPT2_FAST, "gpt3": dict(seq_len=2048), "shakespeare": SHAKESPEARE,
}


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig: the preset's values, overridden by the flags. Raises InputError."""
    # Parsed twice: once to learn the preset (and whether --help is wanted), once with its values as the defaults.
    args = sys.argv[1:] if args is None else args
    preset = parse_args(TrainConfig, args=[arg for arg in args if arg not in ("-h", "--help")]).preset
    if preset == "auto":
        preset = "gpt2" if any(Path(SHARDS_FOLDER).glob("*_train_*")) else "shakespeare"
    config = parse_args(TrainConfig, replace(TrainConfig(), **PRESETS[preset]), args, HELP_GROUPS)
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """Collects every problem that can be seen without looking at data or devices, and raises them as one InputError."""
    problems = []
    for name in ("total_batch_size", "seq_len", "n_layer", "n_head", "n_embd", "eval_tokens"):
        if getattr(config, name) < 1:
            problems.append(f"{flag(name)} {getattr(config, name)}: at least 1")
    for name, value in asdict(config).items():
        if isinstance(value, int | float) and not (value >= 0 and math.isfinite(value)):
            problems.append(f"{flag(name)} {value}: not below 0")
    if config.n_head > 0 and config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd}: not divisible by --n-head {config.n_head}")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr}: above --max-lr {config.max_lr}")
    if problems:
        raise InputError("; ".join(dict.fromkeys(problems)))


# ---------------------------------------------------------------------------------------------------------------------
# Model: GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3)


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and what stands before it. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    """Two linear layers with GELU (tanh form) between them. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """A transformer block with LayerNorm before each part. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2, its parameters under GPT-2's own names. Linear weights are (out, in), the transpose of Hugging Face's."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.next_token_loss = next_token_loss
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """GPT-2's initialization: normal with std 0.02, biases 0, LayerNorms 1 and 0.

        Each block adds two branches to the residual stream; the projections that end them are scaled by
        1 / sqrt(2 * n_layer), so that the stream's variance at the start does not grow with depth (section 2.3).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(
        self, idx: torch.Tensor, position: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the head reads: final LayerNorm's output (B, T, C) for tokens idx (B, T).

        position (B, T) or (T,): places of the tokens, 0 … T-1 unless given. mask (B, 1, T, T) bool: which tokens each
        token sees, itself and those before it unless given.
        """
        if position is None:
            if idx.size(1) > self.config.block_size:
                raise InputError(f"a sequence of {idx.size(1)} tokens; the model's context is {self.config.block_size}")
            position = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C)
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """idx, targets (B, T) int64 -> logits (B, T, V), mean cross-entropy in nats (None without targets)."""
        x = self.hidden(idx)
        if targets is None:
            return lm_head(x, self.wte.weight), None
        return self.next_token_loss(x, self.wte.weight, targets)

    def compile(self) -> None:
        """Compiles the block, once for all layers, and the loss. Names, state and eager use stay as they are:
        `torch.compiler.set_stance("force_eager")` runs the plain code on shapes that come once (evaluation, samples).
        """
        for block in self.h:
            block.compile(dynamic=False)
        self.next_token_loss = torch.compile(lambda *args: (None, next_token_loss(*args)[1]), dynamic=False)

    @torch.no_grad()
    def generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int = 50,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continues idx (B, T) by sampling among the top_k likeliest tokens. -> (B, T + max_new_tokens)"""
        for _ in range(max_new_tokens):
            x = self.hidden(idx[:, -self.config.block_size :])[:, -1]  # (B, C)
            logits = lm_head(x, self.wte.weight).float() / temperature  # (B, V)
            logits, candidates = logits.topk(min(top_k, logits.size(-1)))  # (B, k) each
            choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (B, 1)
            idx = torch.cat([idx, candidates.gather(1, choice)], dim=1)
        return idx

    def num_parameters(self, position_embeddings: bool = True) -> int:
        total = sum(parameter.numel() for parameter in self.parameters())
        return total if position_embeddings else total - self.wpe.weight.numel()

    def flops_per_token(self, T: int) -> int:
        """Training FLOPs a token, forward and backward: 6 N + 12 L C T, N without position embeddings, which take no
        part in a product (PaLM, Chowdhery et al. 2022, appendix B). Recomputation and the causal mask don't count."""
        return 6 * self.num_parameters(False) + 12 * self.config.n_layer * self.config.n_embd * T

    # -- Hugging Face, in and out

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """A GPT-2 from a folder or from the hub (`gpt2`, `gpt2-medium`, …). Raises InputError if it is no GPT-2."""
        folder = model_folder(name)
        config, state = read_pretrained(folder)
        with torch.device("meta"):  # the parameters come from the files: none need be made first
            model = cls(GPTConfig(**config))
        try:
            model.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise InputError(f"{folder}: weights do not fit its config.json: {' '.join(str(error).split())}") from None
        return model.requires_grad_(True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2: config.json, model.safetensors and, for GPT-2's vocabulary, its tokenizer."""
        write_pretrained(Path(folder), asdict(self.config), to_hub(self.state_dict()))


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer


def configure_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW | Optimizers:
    """AdamW with GPT-3's betas (Brown et al. 2020, appendix B), which decays matrices and embeddings, nothing else.
    With --optimizer muon the matrices inside the blocks are Muon's."""
    hidden = [p for p in model.h.parameters() if p.dim() == 2] if config.optimizer == "muon" else []
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel over all parameters, on the CPU too, where it is several times the loop's speed.
    adamw = torch.optim.AdamW(groups, lr=config.max_lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    if not hidden:
        return adamw
    dtype = torch.bfloat16 if computes_in_bfloat16(hidden[0].device) else torch.float32
    return Optimizers(Muon(hidden, config.max_lr, config.weight_decay, dtype=dtype), adamw)


def get_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of update `step` (from 0): linear warm-up to max_lr, then the schedule down to min_lr.

    cosine is GPT-3's (Brown et al. 2020, appendix B). wsd stays at max_lr and ends in a linear warm-down, so that until
    then nothing depends on max_steps: a run can be extended (Hägele et al. 2024, "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations").
    """
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


# ---------------------------------------------------------------------------------------------------------------------
# Data

class DataLoaderLite(TokenStream):
    """Batches of next-token pairs from token shards or a .txt file, in an order that is a function of the seed alone.

    The order is that of TokenStream (shards.py): endless, documents shuffled anew each epoch. The ranks take the next
    B * T tokens each, in rank order, micro-batch after micro-batch. So the tokens of a step do not depend on how it is
    split into ranks and micro-batches, each token is an input once an epoch, and the loader's state is one position.

    data: folder of .npy / .bin shards, or a .txt file. split: "train" or "val". Raises InputError for bad files.
    """

    def __init__(
        self, data: str | Path, split: str, B: int, T: int, rank: int = 0, world_size: int = 1, seed: int = 1337,
        shuffle: bool = True,
    ):
        super().__init__(data, split, seed, shuffle)
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.position = 0  # in the stream, of the next micro-batch of all ranks
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")  # prepares batches ahead
        self._ahead: deque[Future] = deque()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank's next micro-batch, (B, T) int64 each, prepared in the background."""
        tokens = self.B * self.T * self.world_size
        while len(self._ahead) < 3:
            start = self.position + len(self._ahead) * tokens + self.rank * self.B * self.T
            self._ahead.append(self._worker.submit(self._make_batch, start))
        self.position += tokens
        return self._ahead.popleft().result()

    def _make_batch(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.from_numpy(self.read(start, self.B * self.T + 1).astype(np.int64))
        if torch.cuda.is_available():
            buffer = buffer.pin_memory()  # so that the copy to the GPU need not be waited for
        return buffer[:-1].view(self.B, self.T), buffer[1:].view(self.B, self.T)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what its order depends on."""
        return {"position": self.position, "seed": self.seed, "shuffle": self.shuffle, "shards": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position. Raises InputError when the stream is another one."""
        for key, value in self.state_dict().items():
            if key != "position" and state[key] != value:
                raise InputError(f"the data differ from the checkpoint's ({key} {value}, there {state[key]})")
        self.position = state["position"]
        self._ahead.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def validation_loss(model: GPT, loader: DataLoaderLite, tokens: int, world: "Distributed", autocast: Any) -> float:
    """Mean loss in nats over the first `tokens` tokens of the loader's split, each weighing the same.

    The ranks share the sequences; the losses are summed over all, then divided, so that neither the batch size nor
    the number of ranks matters.
    """
    B, T = loader.B, loader.T
    sequences = min(tokens, loader.total_tokens - 1) // T
    total = torch.zeros((), dtype=torch.float64)
    for first in range(world.rank * B, sequences, world.world_size * B):
        n = min(B, sequences - first)
        buffer = torch.from_numpy(loader.read(first * T, n * T + 1).astype(np.int64)).to(world.device)
        with autocast:
            x = model.hidden(buffer[:-1].view(n, T))
            _, loss = fused_next_token_loss(x, model.wte.weight, buffer[1:])
        total += loss.double().cpu() * n
    return world.sum(total).item() / sequences


def evaluate_hellaswag(model: GPT, tasks: Any, world: "Distributed", autocast: Any) -> float:
    """HellaSwag accuracy by mean token loss (`acc_norm`), the tasks shared by all ranks."""
    import hellaswag

    with autocast:
        result = hellaswag.score(
            model.hidden, model.wte.weight, tasks, world.device, rank=world.rank, world_size=world.world_size
        )
    correct, total = world.sum(torch.tensor([result.num_correct_norm, result.num_total], dtype=torch.float64)).tolist()
    return correct / total


def print_samples(model: GPT, prompt: str, world: "Distributed", autocast: Any) -> None:
    """Four continuations of `prompt`, drawn with a generator of their own: training's random state is not touched."""
    tokenizer = get_tokenizer()
    generator = torch.Generator(device=world.device).manual_seed(42 + world.rank)
    idx = torch.tensor([tokenizer.encode_ordinary(prompt)] * 4, device=world.device)
    with autocast:
        idx = model.generate(idx, max_new_tokens=32, generator=generator)
    for i, tokens in enumerate(idx.tolist()):
        tqdm.write(f"rank {world.rank} sample {i}: {tokenizer.decode(tokens)!r}")  # print would end in the bar


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

CHECKPOINT_FORMAT = 1
# What may differ between a run and its resumption; a change of anything else would be another run's mathematics.
MAY_CHANGE = {
    "preset", "data", "log_dir", "init", "resume", "max_steps", "warmdown_steps", "micro_batch_size", "compile",
    "low_memory", "device", "plan", "eval_every", "eval_tokens", "hellaswag_every", "hellaswag_data", "sample_every",
    "sample_prompt", "save_every", "keep_checkpoints", "keep_every", "skip_bad_steps", "tensorboard",
    "wandb", "check_against",
}


def differences(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """What makes `config` another run than the one whose configuration was `before`."""
    return [f"{flag(key)} was {before.get(key)}, is {now}" for key, now in asdict(config).items()
            if key not in MAY_CHANGE and now != before.get(key)]


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time, while training goes on.

    A write that fails (the disk is full, say) is reported, and the checkpoints before it stand; the next save is the
    next attempt. The newest `keep_checkpoints`, and those at multiples of `keep_every`, are kept.
    """

    def __init__(self, config: TrainConfig):
        self.log_dir, self.keep, self.keep_every = Path(config.log_dir), config.keep_checkpoints, config.keep_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=yield_to_others)
        self._writing: Future | None = None
        self._copy: Any = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown()  # however training ends, what is being written is finished

    def save(self, model: GPT, state: dict[str, Any], wait: bool) -> None:
        """Copies model and state, and has them written. With `wait` it returns when that is done; InputError if not."""
        if self._writing:
            self._writing.exception()  # one at a time; a failure has been reported
        folder = self.log_dir / f"step_{state['step']:06d}"
        self._copy = on_host([to_hub(model.state_dict()), state], self._copy)
        self._writing = self._thread.submit(self._write, folder, model.config, *self._copy)
        failed = lambda error: f"{folder}: not written ({first_line(error)})"  # noqa: E731
        if not wait:
            self._writing.add_done_callback(lambda done: done.exception() and print(
                f"error: {failed(done.exception())}; training goes on, the next checkpoint is the next attempt",
                file=sys.stderr, flush=True))
        elif error := self._writing.exception():
            raise InputError(f"{failed(error)}: make room, then --resume goes on from the checkpoint before")

    def _write(self, folder: Path, config: GPTConfig, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        with atomic_path(folder) as partial:
            write_pretrained(partial, asdict(config), weights)
            torch.save({"format": CHECKPOINT_FORMAT, **state}, partial / "training_state.pt")
            (partial / "README.md").write_text(runlog.model_card(self.log_dir, state["step"]), encoding="utf-8")
            runlog.write_checksums(partial)
        # Later ones, if any, are damaged: this run was resumed from before them.
        steps = [step for step in map(runlog.step_of, runlog.checkpoints(self.log_dir)) if step <= state["step"]]
        for step in steps[: -self.keep] if self.keep else []:
            if not (self.keep_every and step % self.keep_every == 0):
                remove_folder(self.log_dir / f"step_{step:06d}")


def read_training_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds besides the model. Nothing in the file is executed. Raises InputError."""
    path = folder / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT:
        raise InputError(f"{path}: not a training state of format {CHECKPOINT_FORMAT}, which this script reads")
    return state


def find_checkpoint(log_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; None when there are none at all.

    A damaged one is named and passed over. Raises InputError when all are damaged.
    """
    folders = runlog.checkpoints(log_dir)
    for folder in reversed(folders):
        try:
            runlog.verify_checksums(folder, {"training_state.pt", "model.safetensors", "config.json"})
            read_training_state(folder)
            return folder
        except InputError as error:
            print(f"warning: {error}; trying the one before", file=sys.stderr, flush=True)
    if folders:
        raise InputError(f"{log_dir}: none of its {len(folders)} checkpoints is whole; start anew in another --log-dir")
    return None


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    on_device = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# ---------------------------------------------------------------------------------------------------------------------
# Distributed


@dataclass
class Distributed:
    """This process's place in the run; a process that torchrun did not start is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    description: str  # device and precision, with the reason

    @classmethod
    def start(cls, config: TrainConfig) -> "Distributed":
        """Chooses the device and joins torchrun's process group, if there is one. Raises InputError."""
        rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in
                                        (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        device, dtype, description = choose_device(config.device, config.dtype, local_rank)
        if device.type == "cpu":
            keep_freed_memory()
        if "RANK" in os.environ:
            store, _, _ = next(torch.distributed.rendezvous("env://"))
            if os.environ.get("GROUP_WORLD_SIZE") == "1":
                # torchrun (2.13) keeps one store over its restarts, with the addresses of lost ranks in it.
                store = torch.distributed.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
                device_id=device if device.type == "cuda" else None,
            )
        return cls(rank, local_rank, world_size, device, dtype, description)

    def stop(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks (the mean is left to the caller: gloo has no correct AVG)."""
        if self.world_size > 1:
            tensor = tensor.to(self.device)
            torch.distributed.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An InputError of one rank in the block becomes all ranks'; also, they leave it together."""
        problem = ""
        try:
            yield
        except InputError as error:
            problem = str(error)
        if problem := next(filter(None, self.gather(problem)), ""):
            raise InputError(problem)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values


# ---------------------------------------------------------------------------------------------------------------------
# main


def micro_batch(config: TrainConfig, model: GPT, world: Distributed, autocast: Any) -> int:
    """B: --micro-batch-size, or the largest power of two that fits and divides the batch. Raises InputError."""
    unit = config.seq_len * world.world_size * max(config.micro_batch_size, 1)
    if config.total_batch_size % unit:
        nearest = max(round(config.total_batch_size / unit), 1) * unit
        raise InputError(f"--total-batch-size {config.total_batch_size} is no multiple of {unit} (sequence length x "
                         f"micro-batch x ranks); the nearest that is: {nearest}")
    if config.micro_batch_size:
        return config.micro_batch_size
    sizes = [2**i for i in range(7, -1, -1) if config.total_batch_size // unit % 2**i == 0]
    if world.device.type != "cuda":  # memory is shared with everything else, and a few thousand tokens fill the cores
        return next(B for B in sizes if B * config.seq_len <= 4096 or B == 1)
    # What training will need besides, and has not taken yet: Adam's two moments, and DDP's buckets.
    reserved = torch.empty(3 * 4 * model.num_parameters(), dtype=torch.uint8, device=world.device)
    for B in sizes:
        try:
            x = torch.zeros(B, config.seq_len, dtype=torch.int64, device=world.device)
            with autocast, torch.compiler.set_stance("force_eager"):
                model(x, x)[1].backward()
            fits = 1.0
        except torch.OutOfMemoryError:
            fits = 0.0
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if world.sum(torch.tensor(fits)).item() == world.world_size:
            return B
    del reserved
    raise InputError("not one sequence fits into the GPU's memory: shorten --seq-len or train a smaller model")


def load_hellaswag(config: TrainConfig, model: GPT, world: Distributed) -> Any:
    """The tokenized tasks; None, after a warning, when there is neither a local file nor a network."""
    import hellaswag

    try:
        for turn in (world.local_rank == 0, world.local_rank != 0):  # one process of a machine downloads
            with world.together():
                if turn:
                    examples = hellaswag.load_examples(Path(config.hellaswag_data) if config.hellaswag_data else None)
                    tasks = hellaswag.prepare(examples, model.config.block_size)
        return tasks
    except InputError as error:
        if config.hellaswag_data:
            raise
        if is_rank_zero():
            print(f"warning: training without HellaSwag: {error}", file=sys.stderr, flush=True)
        return None


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGUSR1 (Slurm's, ahead of the time limit), for the loop to stop between two steps.

    A second SIGINT stops at once: whatever is half written then, the next start clears away.
    """

    NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

    def __enter__(self) -> "StopSignals":
        self.received = 0
        self.former = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.received == number == signal.SIGINT:
            os._exit(130)
        self.received = self.received or number


def start_model(config: TrainConfig, checkpoint: Path | None) -> GPT:
    """The model to train, on the CPU: from a checkpoint, from --init, or new (the same weights for the same seed)."""
    if checkpoint:
        return GPT.from_pretrained(checkpoint)
    if config.init != "scratch":
        return GPT.from_pretrained(config.init)
    torch.manual_seed(config.seed)
    return GPT(GPTConfig(config.seq_len, VOCAB_SIZE, config.n_layer, config.n_head, config.n_embd))


def choose_kernels(model: GPT, config: TrainConfig, device: torch.device) -> str:
    """Compiles the model, and takes the loss that goes with it. Returns why --compile was not possible, or nothing."""
    reason = why_not_compile(device) if config.compile else ""
    if config.compile and not reason:
        model.compile()
    if config.low_memory or device.type == "cpu" or model.next_token_loss is next_token_loss:  # there it is faster
        model.next_token_loss = fused_next_token_loss
    return reason


def train(config: TrainConfig, world: Distributed) -> int:
    """Sets everything up, then runs the loop. Returns the exit status: 0, or 130 or 143 after a signal."""
    say = tqdm.write if world.rank == 0 else lambda *_: None
    log_dir = Path(config.log_dir)
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:
        say(f"no shards in {SHARDS_FOLDER}/: the shakespeare preset, on input.txt\n(`python fineweb.py` builds shards)")
    say(f"device: {world.description}")

    # Model and data
    resuming = config.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder = None
    with world.together():
        if resuming and world.rank == 0:
            folder = find_checkpoint(log_dir)
    folder = world.gather(folder)[0]
    with world.together():  # the other ranks, perhaps on other machines, must see that folder, too
        state = read_training_state(folder) if folder else None
        model = start_model(config, folder).to(world.device)
    T = config.seq_len
    if model.config.block_size < T or model.config.vocab_size != VOCAB_SIZE:
        raise InputError(f"--init {config.init}: context {model.config.block_size}, vocabulary "
                         f"{model.config.vocab_size}; wanted: --seq-len {T} or more, and GPT-2's {VOCAB_SIZE}")
    autocast = torch.autocast(world.device.type, dtype=world.dtype, enabled=world.dtype != torch.float32)
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what is left in float32
    B = micro_batch(config, model, world, autocast)
    accumulation = config.total_batch_size // (B * T * world.world_size)
    place = dict(B=B, T=T, rank=world.rank, world_size=world.world_size)
    with world.together():  # on several machines the data may be missing on one
        milestones = runlog.read_milestones(Path(config.check_against)) if config.check_against else []
        loader = DataLoaderLite(config.data, "train", **place, seed=config.seed, shuffle=config.shuffle)
        if loader.total_tokens <= config.total_batch_size:
            raise InputError(f"{config.data}: {loader.total_tokens} training tokens, too few for one batch of "
                             f"--total-batch-size {config.total_batch_size}: give more text or lower it")
        val_loader = DataLoaderLite(config.data, "val", **place, shuffle=False) if config.eval_every else None
        if val_loader and val_loader.total_tokens <= T:
            raise InputError(f"{config.data}: {val_loader.total_tokens} validation tokens, too few for one sequence of "
                             f"--seq-len {T}: give more text, shorten it, or --eval-every 0")
    tasks = load_hellaswag(config, model, world) if config.hellaswag_every else None

    # Optimizer and state
    optimizer = configure_optimizer(model, config)
    scaler = torch.amp.GradScaler(world.device.type, enabled=world.dtype == torch.float16)
    start, best_val, elapsed, skipped = 0, math.inf, 0.0, 0
    if state:
        if changes := differences(state["config"], config):
            raise InputError(f"--resume from {folder}: not the same run: {', '.join(changes)}")
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        loader.load_state_dict(state["loader"])
        start, best_val, elapsed, skipped = (state[key] for key in ("step", "best_val", "elapsed", "skipped"))
        if world.rank < len(state["random"]):
            set_random_state(state["random"][world.rank], world.device)
        if start >= config.max_steps:
            say(f"{folder}: the run has all its {config.max_steps} steps; more with --max-steps")
            return 0
    world.gather(None)  # all ranks have read what they need before rank 0 touches the folder
    if world.rank == 0:
        # A run that was stopped before its first checkpoint starts again, and writes the same log again.
        again = bool(folder) or (resuming and not differences(runlog.last_config(log_dir), config))
        runlog.clear_log_dir(log_dir, resumed=bool(folder))
        runlog.add_run_entry(log_dir, asdict(config), step=start, device=world.description, world_size=world.world_size)
    with world.together():
        log = runlog.Log(log_dir if world.rank == 0 else None, start if world.rank == 0 and again else None)
        log.mirror(config.tensorboard, config.wandb)

    # `model` stays as it is for evaluation and checkpoints; `replica` is what training calls
    if reason := choose_kernels(model, config, world.device):
        say(f"no torch.compile on this machine ({reason}): going on without it")
    replica = model
    if world.world_size > 1:
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        replica = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        # DDP packs the gradients anew after its first backward pass, in their order of arrival, and with it the order
        # of sums changes. Done before the first step, on no matter what tokens, a resumed run adds as it did before.
        x = torch.zeros(B, T, dtype=torch.int64, device=world.device)
        with autocast:
            replica(x, x)[1].backward()
        replica.zero_grad(set_to_none=True)

    peak, peak_source = peak_flops(world.device, world.dtype)
    flops = model.flops_per_token(T)
    epochs = config.max_steps * config.total_batch_size / loader.total_tokens
    say(f"model: {model.num_parameters():,} parameters, {flops / 1e6:,.0f} MFLOP a token\n"
        f"speed: MFU 100 % = {peak / 1e12:,.3g} TFLOP/s a device ({peak_source})")
    documents = loader.count_documents() if world.rank == 0 else 0
    say(f"data: {config.data}, {loader.total_tokens:,} training tokens in {documents:,} documents\n"
        f"steps: {config.max_steps:,} of {config.total_batch_size:,} tokens, {epochs:.3f} epochs")
    if epochs > 1:
        order = "another" if config.shuffle else "the same"
        say(f"data: from step {loader.total_tokens // config.total_batch_size:,} on they repeat, in {order} order")
    say(f"batch: {config.total_batch_size:,} tokens = {B} sequences x {T} tokens x {world.world_size} ranks x "
        f"{accumulation} micro-steps")
    say(f"log and checkpoints: {log_dir}/" + (f"; resumed from {folder}" if folder else ""))

    writer = CheckpointWriter(config)

    def save(step: int, wait: bool = False) -> None:
        state = {
            "step": step,
            "tokens": step * config.total_batch_size,
            "config": asdict(config),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "loader": loader.state_dict(),
            "random": world.gather(random_state(world.device)),
            "best_val": best_val,
            "elapsed": elapsed,
            "skipped": skipped,
        }
        log.sync()  # a checkpoint's log must not be shorter than the checkpoint
        with world.together():
            if world.rank == 0:
                writer.save(model, state, wait)

    gc.collect()
    gc.freeze()  # Python's collector, which may run in any step, need not look at what was made so far
    bar = tqdm(total=config.max_steps, initial=start, unit="step", disable=None if world.rank == 0 else True)
    with StopSignals() as signals, bar, writer:
        for step in range(start, config.max_steps + 1):
            last = step == config.max_steps

            def due(every: int, step: int = step, last: bool = last) -> bool:
                return every > 0 and (last or step % every == 0)

            # Look at the weights that `step` updates have made
            with torch.compiler.set_stance("force_eager"):
                if due(config.eval_every):
                    val = validation_loss(model, val_loader, config.eval_tokens, world, autocast)
                    best_val = min(best_val, val)
                    say(f"step {step:5d} validation loss {val:.4f}")
                    log.write(step, val=f"{val:.6f}")
                if due(config.hellaswag_every) and tasks:
                    accuracy = evaluate_hellaswag(model, tasks, world, autocast)
                    say(f"step {step:5d} HellaSwag {accuracy:.4f}")
                    log.write(step, hella=f"{accuracy:.4f}")
                if due(config.eval_every):
                    log.draw()
                if due(config.sample_every) and step > 0:
                    print_samples(model, config.sample_prompt, world, autocast)
            if due(config.save_every) and (step > start or last):
                save(step, wait=last)
            if last:
                break

            # One update
            began = time.perf_counter()
            lr = get_lr(step, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            position, loss_sum = loader.position, torch.zeros((), device=world.device)
            for micro_step in range(accumulation):
                x, y = (t.to(world.device, non_blocking=True) for t in loader.next_batch())
                # The gradients of all micro-steps add up; the ranks exchange them once, in the last.
                exchange = world.world_size == 1 or micro_step == accumulation - 1
                with contextlib.nullcontext() if exchange else replica.no_sync():
                    with autocast:
                        _, loss = replica(x, y)
                    scaler.scale(loss / accumulation).backward()
                loss_sum += loss.detach()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)

            # The one wait for the device in a step: all ranks learn the mean loss, and whether one was told to stop.
            told = torch.tensor(float(signals.received), device=world.device)
            loss_sum, told = world.sum(torch.stack([loss_sum, told])).tolist()
            loss, norm = loss_sum / (accumulation * world.world_size), norm.item()
            if math.isfinite(loss) and (math.isfinite(norm) or scaler.is_enabled()):
                scaler.step(optimizer)
            else:  # on all ranks alike, as both numbers are sums over them
                skipped += 1
                what = f"step {step}: loss {loss}, gradient norm {norm}; it began at {loader.where(position)}"
                if skipped > config.skip_bad_steps:
                    raise RunError(f"{what}. The weights are as before; checkpoints are in {log_dir}. A lower --max-lr "
                                   f"may help; --resume --skip-bad-steps {skipped} leaves this update out")
                say(f"warning: {what}: update left out, {skipped} of {config.skip_bad_steps}")
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - began
            elapsed += seconds
            rate = config.total_batch_size / seconds
            mfu = flops * rate / (peak * world.world_size)
            say(f"step {step:5d} loss {loss:.4f} lr {lr:.2e} norm {norm:.3f} "
                f"{seconds * 1e3:.0f} ms {rate:,.0f} tok/s mfu {mfu:.1%}")
            log.write(step, train=f"{loss:.6f}", lr=f"{lr:.6e}", norm=f"{norm:.6f}",
                      tok_per_sec=f"{rate:.1f}", mfu=f"{mfu:.4f}", ms=f"{seconds * 1e3:.2f}")
            bar.update()
            if told:
                if config.save_every:
                    save(step + 1, wait=True)
                say(f"stopped by a signal after step {step}; --resume goes on")
                return 130 if signals.received == signal.SIGINT else 143
    if config.save_every:
        say(f"done: {log_dir}/step_{config.max_steps:06d}/ is a Hugging Face model; to talk to it:\n"
            f'python sample.py {log_dir} "{config.sample_prompt}"')
    if milestones and world.rank == 0:
        matches, verdict = runlog.compare(log_dir, milestones, config.total_batch_size)
        say(f"{verdict} {config.check_against}")
        return 0 if matches else 1
    return 0


def main(args: list[str] | None = None) -> int:
    config = read_config(args)
    sys.stdout.reconfigure(line_buffering=True)  # a log file that can be followed
    if config.plan:
        from bench import print_plan

        print_plan(config)
        return 0
    world = Distributed.start(config)
    try:
        return train(config, world)
    finally:
        world.stop()


if __name__ == "__main__":
    run(main)

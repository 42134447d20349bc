"""Trains GPT-2 (124M) from scratch and saves it in Hugging Face format.

    python train_gpt2.py                                     # FineWeb-Edu shards, else Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards      # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # eight GPUs: the reproduction
    python train_gpt2.py --resume                            # continues the run in log/
    python train_gpt2.py --help                              # every flag, its default and unit

From top to bottom: the model, the data, the settings, the optimizers, evaluation, and train(),
which is a run from set-up to its last line. Its weight update is between two marked lines. support/
holds the plumbing: files, processes, devices. Bad input raises UserError, whose one line says what
is wrong and how to fix it. A *fork* is a copy of this file with a changed model (docs/forking.md).

Shapes: B batch (sequences per micro-batch), T time (tokens per sequence), C channels (n_embd =
n_head * head size), nh heads, hs head size, V vocabulary (50,257). A *step* updates the weights
from total_batch_size tokens, which the ranks share equally; each rank accumulates gradients over
micro-steps of B * T tokens. Step s is logged with the weights after s updates: the loss of step 0
is the untrained model's."""

import copy
import hashlib
import json
import math
import time
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, fields
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

from support import cli, console, devices, hellaswag, huggingface, plan, signals, tokenizer
from support.checkpoints import check_saving, load_optimizers, save_optimizers
from support.cli import print0
from support.errors import RunError, UserError, explain
from support.ranks import Ranks, settle_buckets
from support.run_folder import ROOT, RunFolder
from support.tokenizer import EOT, VOCAB_SIZE, get_tokenizer

# --------------------------------------------------------------------------------------------------
# Model: GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.3)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are GPT-2 small's, 124,439,808 parameters."""

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention to the same and earlier tokens. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # mixes the heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        # softmax(q k^T / sqrt(hs)) v; a fused kernel never stores the (T, T) matrix.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))  # tokens look at each other
        return x + self.mlp(self.ln_2(x))  # each token on its own


class LinearCrossEntropy(nn.Module):
    """F.cross_entropy(F.linear(x, weight), targets), faster.

    A matrix product is faster where the weight has a multiple of 64 rows. So rows of zeros are
    added to a copy of it, and 50,257 become 50,304. A bias of -inf takes the added logits out: they
    get probability 0. Label smoothing would make them count, and be infinite. It can be had with
    F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)."""

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """x (…, C), weight (V, C), targets (…), of which -100 is ignored -> float32 scalar"""
        added = -weight.size(0) % 64
        bias = F.pad(x.new_zeros(weight.size(0)), (0, added), value=-math.inf)
        logits = F.linear(x.flatten(0, -2), F.pad(weight, (0, 0, 0, added)), bias)
        return F.cross_entropy(logits.float(), targets.flatten())


# What a fork should know. Each nn.Linear and nn.Embedding starts with std 0.02, a linear layer
# called c_proj with less, and any other parameter as it is made. Muon takes the weights of the
# linear layers in the blocks, except those called router. Weight decay acts on the weights of
# nn.Linear and nn.Embedding. A setting of the model is a field of GPTConfig, and of TrainConfig if
# it is to be a flag. A checkpoint records what its model computes, and other code refuses it.
class GPT(nn.Module):
    """GPT-2 with GPT-2's parameter names. Linear weights are torch's (out, in); Hugging Face stores
    them as (in, out)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        # On the meta device it has no weight of its own: GPT-2 ties it to the embedding, below.
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.loss = LinearCrossEntropy()

        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Projections onto the residual stream are scaled down. Otherwise its variance would
                # grow with depth (section 2.3).
                residual = name.endswith("c_proj")
                std = 0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.lm_head.weight = self.wte.weight

    def hidden(self, idx: Tensor) -> Tensor:
        """Tokens (B, T) -> the input of the head (B, T, C)"""
        T = idx.size(1)
        if self.config.block_size < T:
            raise UserError(f"{T} tokens, but the model's context is {self.config.block_size}")
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))  # (B, T, C)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, at: tuple | None = None
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), or with targets (B, T) their mean cross-entropy.

        The loss comes without logits, which would take more memory than the model. `at` is an index
        of positions in (B, T), where the logits of all are not needed."""
        x = self.hidden(idx)  # (B, T, C)
        if at is not None:
            x = x[at]
        if targets is None:
            return self.lm_head(x)
        return self.loss(x, self.lm_head.weight, targets)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues idx (B, T) with samples of the top_k tokens. -> (B, T + max_new_tokens)

        temperature 0: always the likeliest token. top_k 0: all tokens."""
        block_size = self.config.block_size
        V = min(self.config.vocab_size, VOCAB_SIZE)  # more have no text
        k = min(top_k or V, V)
        if temperature == 0:
            k = 1
            temperature = 1.0
        for _ in range(max_new_tokens):
            window = idx[:, -block_size:]  # what fits in the context
            T = window.size(1)
            # Zeros may follow, since a GPU is slow to start at each new length.
            longer = devices.padded(window, block_size)
            logits = self(longer, at=(slice(None), T - 1))[:, :V].float() / temperature  # (B, V)
            # Draw one of the k likeliest tokens, in proportion to its probability.
            logits, candidates = logits.topk(k)  # (B, k) each
            p = logits.softmax(-1)
            if not p.isfinite().all():
                raise RunError("the model's logits are not finite, so nothing can be sampled")
            choice = torch.multinomial(p, 1, generator=generator)  # (B, 1)
            idx = torch.cat([idx, candidates.gather(1, choice)], dim=1)
        return idx

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """Training FLOPs per token: 6 N + 12 L C T (PaLM, Chowdhery et al. 2022, appendix B).

        N counts the weights of the linear layers. Recomputation does not count."""
        modules = self.named_modules(remove_duplicate=False)  # a block that is used twice counts so
        N = sum(m.weight.numel() for _, m in modules if isinstance(m, nn.Linear))
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path, strict: bool = True, **changes: Any) -> "GPT":
        """A GPT-2 from a folder or the Hub (`gpt2`, …), in float32 and evaluation mode.

        The fields of GPTConfig in `changes` take the place of those in config.json. If the weights
        were trained with other mathematics than this code has, that is a UserError, or with
        strict=False a printed note."""
        with torch.device("cpu"):  # also where models are made on the meta device, as for --plan
            return huggingface.read_pretrained(cls, GPTConfig, name, strict, changes)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2 with its tokenizer. If a fork's model is no GPT-2, the saved
        config.json says so."""
        huggingface.write_pretrained(self, Path(folder))


# --------------------------------------------------------------------------------------------------
# Data: token order and the data loader (support/tokenizer.py opens shards)

SHARDS_FOLDER = "edu_fineweb10B"


@lru_cache(maxsize=3)  # DataLoaderLite.read needs three at a time: shards, sequences, offsets
def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … n-1 from `seed` alone; NumPy's own may change with its version."""
    return np.random.PCG64(seed).random_raw(n).argsort(kind="stable")


class DataLoaderLite:
    """Batches of next-token pairs from the shards of a split, epoch after epoch.

    Each epoch visits the shards in random order. A shard is a circle of tokens: it is cut into
    sequences of T from some offset on, and they are read in random order. A shard of 10 tokens with
    T = 3 and offset 5 becomes, for example,

        8 9 0 | 5 6 7 | 1 2 3    without token 4

    So no token is an input twice in an epoch, and fewer than T tokens of a shard are left out. The
    next epoch has another offset. Without shuffle, shards and their sequences come in order, from
    the first token on; no sequence joins the end of a shard to its beginning.

    In each micro-step the ranks take the next B sequences each, in rank order. So a step has the
    same tokens for any number of ranks and any B, and one position is the whole state."""

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
        """data: a folder of shards, also in subfolders, or a .txt file. split: train or val."""
        self.B = B  # sequences per batch
        self.T = T  # tokens per sequence
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.pin_memory = False  # True: batches can be copied to a GPU while it computes
        self.position = 0  # number of the first sequence of the next micro-step, over all epochs
        # The files, their names in `data`, and their tokens, 1-D uint16, memory-mapped.
        self.paths, self.names, self.shards = tokenizer.open_split(Path(data), split)
        self.total_tokens = sum(len(shard) for shard in self.shards)
        # Sequences of each shard. Without shuffle it is no circle, so one token is only a target.
        only_target = 0 if shuffle else 1
        self.counts = np.array([(len(shard) - only_target) // T for shard in self.shards])
        self.sequences_per_epoch = int(self.counts.sum())
        if self.sequences_per_epoch == 0:
            size = f"{self.total_tokens} {split} tokens"
            raise UserError(f"{data}: {size}, too few for a sequence of {T} and its target")

    def read(self, first: int, count: int) -> np.ndarray:
        """`count` sequences from number `first` on, with the last target. (count, T + 1) int64"""
        rows = []
        for number in range(first, first + count):
            epoch, number = divmod(number, self.sequences_per_epoch)
            order = np.arange(len(self.shards))
            if self.shuffle:
                order = permutation(len(self.shards), self.seed, epoch)
            # Find the shard, and the number of the sequence in it.
            ends = self.counts[order].cumsum()
            place = int(np.searchsorted(ends, number, side="right"))
            shard = int(order[place])
            number -= int(ends[place] - self.counts[shard])
            offset = 0
            if self.shuffle:
                # Each epoch has a new order of the shard's sequences, and the next of its T
                # offsets, whose order is drawn once. The seeds differ: (seed, epoch) for the order
                # of the shards, here (seed, epoch, shard + 1) and (seed, 0, 0, shard + 1); + 1
                # because to NumPy (a, b, 0) is the same as (a, b).
                number = permutation(int(self.counts[shard]), self.seed, epoch, shard + 1)[number]
                offset = permutation(self.T, self.seed, 0, 0, shard + 1)[epoch % self.T]
            start = offset + number * self.T
            tokens = self.shards[shard].take(np.arange(start, start + self.T + 1), mode="wrap")
            tokenizer.check_tokens(tokens, self.paths[shard])
            rows.append(tokens)
        return np.stack(rows).astype(np.int64)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets of this rank, (B, T) int64 each."""
        tokens = self.read(self.position + self.rank * self.B, self.B)
        self.position += self.world_size * self.B  # past the batches of all ranks
        x = torch.from_numpy(tokens[:, :-1].copy())
        y = torch.from_numpy(tokens[:, 1:].copy())  # the targets are the inputs shifted by one
        return (x.pin_memory(), y.pin_memory()) if self.pin_memory else (x, y)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of the sequences depends on."""
        shards = [(name, len(shard)) for name, shard in zip(self.names, self.shards, strict=True)]
        return {
            "position": self.position,
            "T": self.T,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shards": hashlib.sha256(json.dumps(shards).encode()).hexdigest(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position in the same data. UserError for other data."""
        for key, value in self.state_dict().items():
            if key != "position" and state[key] != value:
                difference = f"{key} {value}, was {state[key]}"
                raise UserError(f"the data differ from the checkpoint's ({difference})")
        self.position = state["position"]


# --------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class TrainConfig:
    """Trains a GPT-2 from scratch or given weights. Flags override the values of the preset."""

    # A field is a flag: tyro prints these comments as --help, under headings like this one.

    # Run

    # values of the flags; auto: gpt2 if edu_fineweb10B/ holds shards, else shakespeare
    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "small", "shakespeare"] = "auto"
    log_dir: str = "log"  # folder of the run; that of an earlier one is renamed
    init: str = "scratch"  # scratch, a Hub name (gpt2, gpt2-medium, …), or the folder of a GPT-2
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    seed: int = 1337  # seed of the initial weights and of the data order
    plan: bool = False  # print estimated FLOPs, memory and time, and exit

    # Data

    data: str = SHARDS_FOLDER  # folder of token shards, also in subfolders, or .txt file
    shuffle: bool = True  # another random order of shards and of their sequences in every epoch
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

    # Schedule

    # after the warm-up; wsd: constant, then a linear warm-down
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 715  # steps of linear warm-up; 715 are GPT-3's 375 million tokens
    warmdown_steps: int = 5000  # steps of the linear warm-down to min_lr at the end of wsd
    max_lr: float = 6e-4  # learning rate at the end of the warm-up
    min_lr: float = 6e-5  # what the learning rate falls to

    # Device

    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matmuls
    compile: bool = False  # use torch.compile; presets but shakespeare do so on a CUDA GPU
    low_memory: bool = False  # recompute blocks in the backward pass
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
    keep_checkpoints: int = 3  # number of recent checkpoints to keep, plus the best; 0: all
    keep_every: int = 0  # never delete checkpoints at multiples of this many steps; 0: none

    # Logging

    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


SHAPE = ("n_layer", "n_head", "n_embd")  # of a model; 0: that of the weights that --init names

# fmt: off
SHAKESPEARE = dict(  # two minutes on two cores
    data=str(ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=32,
    # 3.4 million parameters, of which the token embedding has 3.2
    n_layer=4, n_head=4, n_embd=64,
    # the best found that takes no longer: bench/recipes
    optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0, warmup_steps=20,
    warmdown_steps=450, beta2=0.995,
    # a compiler may be missing, and takes a minute
    compile=False, eval_every=200, eval_tokens=32_768, hellaswag_every=0, sample_every=300,
    sample_prompt="ROMEO:", save_every=200,
)
SMALL = dict(  # 30 million parameters, 197 million tokens: one T4
    max_steps=3000, total_batch_size=65_536, seq_len=512, n_layer=6, n_head=6, n_embd=384,
    max_lr=1e-3, min_lr=1e-4, warmup_steps=150, eval_tokens=1_048_576, hellaswag_every=0,
    save_every=250,
)
GPT2_FAST = dict(  # chosen on small models; max_lr also from other people's search (bench/recipes)
    optimizer="muon", schedule="wsd", max_steps=9_536, warmup_steps=476, warmdown_steps=4_768,
    max_lr=6e-3, min_lr=0.0,
)
PRESETS = {
    "gpt2": {},  # the defaults of TrainConfig
    "gpt2-fast": GPT2_FAST,
    "gpt3": dict(seq_len=2048),  # GPT-3 Small's context
    "small": SMALL,
    "shakespeare": SHAKESPEARE,
}
# What may change on resume. All else must not, also a setting that a fork adds.
MAY_CHANGE = {
    "preset", "log_dir", "resume", "max_steps", "plan", "data", "micro_batch_size",
    "skip_bad_steps", "warmdown_steps", "device", "dtype", "compile", "low_memory",
    "deterministic", "eval_every", "eval_tokens", "hellaswag_every", "hellaswag_data",
    "sample_every", "sample_prompt", "save_every", "keep_checkpoints", "keep_every", "tensorboard",
    "wandb",
}
# fmt: on


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig: the values of the preset, overridden by the flags.

    One UserError names every error that can be detected from the flags."""
    # tyro reads all flags, but needs the defaults first, and those depend on two of the flags. Of
    # the model's shape it cannot tell whether it was given, or is a default.
    # (nargs="?": if their value is missing, tyro is to say so.)
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?", default="auto")
    first.add_argument("--device", nargs="?", default="auto")
    for name in SHAPE:
        first.add_argument(cli.flag(name), f"--{name}", nargs="?")  # tyro takes both spellings
    given, _ = first.parse_known_args(args)
    if given.preset == "auto":
        shards = tokenizer.holds_shards(Path(SHARDS_FOLDER))
        given.preset = "gpt2" if shards else "shakespeare"
    on_gpu = devices.uses_cuda(given.device)
    defaults = TrainConfig(**{"compile": on_gpu} | PRESETS.get(given.preset, {}))
    config = cli.parse_args(TrainConfig, args, default=defaults)

    # Collect every problem, to report all of them at once.
    problems = []
    positive = {"total_batch_size", "seq_len", "eval_tokens", *SHAPE}
    for name, default in asdict(TrainConfig()).items():
        value = getattr(config, name)
        if isinstance(value, int | float) and default >= 0:  # a fork's may be negative
            minimum = 1 if name in positive else 0
            exponent = 20 if name in SHAPE else 63  # more, and a matrix has too many bytes
            if not minimum <= value < 2**exponent:  # nan is in no interval
                bounds = f"at least {minimum} and below 2**{exponent}"
                problems.append(f"{cli.flag(name)} {value}: must be {bounds}")
    if config.init != "scratch":  # given weights have their own shape, which new_model() enters
        for name in SHAPE:
            if getattr(given, name) is None:
                setattr(config, name, 0)
    elif config.n_head > 0 and config.n_embd % config.n_head:
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


# --------------------------------------------------------------------------------------------------
# Optimizers and schedule


def orthogonalize(x: Tensor) -> Tensor:
    """Brings the singular values of each matrix near 1 (0.7 to 1.2). (L, rows, columns)

    Five steps of a Newton-Schulz iteration, x -> a x + b x^3 + c x^5 (Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    if tall:  # so that x @ x.mT below is the smaller square
        x = x.mT
    # The Frobenius norm bounds the largest singular value, so all are at most 1 now.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b s + c s @ s
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.mT if tall else x


def orthogonalize_on_all_ranks(x: Tensor) -> Tensor:
    """orthogonalize(), of which each rank does a share. All ranks have the same x."""
    if not dist.is_initialized():
        return orthogonalize(x)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    share = math.ceil(len(x) / world_size)  # matrices per rank
    padded = F.pad(x, (0, 0, 0, 0, 0, share * world_size - len(x)))  # with matrices of zeros
    mine = orthogonalize(padded[rank * share : (rank + 1) * share]).contiguous()
    dist.all_gather(list(padded.split(share)), mine)  # writes into `padded`
    return padded[: len(x)]


class Muon(torch.optim.Optimizer):
    """The momentum of each matrix's gradient is made nearly orthogonal, so that an update moves
    equally far in all directions (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    An update is as large as AdamW's, so that one learning rate and one weight decay serve both (Liu
    et al. 2025, "Muon is Scalable for LLM Training", section 2.2): this is torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw", in batches of matrices with one shape. dtype: of its matmuls."""

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float, dtype: torch.dtype):
        shapes = sorted({p.shape for p in matrices})
        groups = [{"params": [p for p in matrices if p.shape == shape]} for shape in shapes]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:  # L matrices of one shape
            lr = group["lr"]
            matrices = [p for p in group["params"] if p.grad is not None]  # None: frozen, unused
            if not matrices:
                continue
            updates = []
            for p in matrices:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 0.05)
                updates.append(p.grad.lerp(momentum, 0.95))  # Nesterov's
            x = torch.stack(updates).to(self.dtype)  # (L, rows, columns)
            # The entries of an orthogonal matrix have a root mean square of
            # 1 / sqrt(max(rows, columns)), AdamW's updates one of about 0.2.
            size = 0.2 * math.sqrt(max(x.shape[1:]))
            for p, update in zip(matrices, orthogonalize_on_all_ranks(x), strict=True):
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * size)


def configure_optimizers(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """AdamW for everything; with --optimizer muon, Muon for the linear layers inside the blocks.

    dtype: of the run's matmuls. AdamW's betas are GPT-3's (Brown et al. 2020, appendix B)."""
    optimizers = []
    parameters = list(model.parameters())
    if config.optimizer == "muon":
        linears = [module for module in model.h.named_modules() if isinstance(module[1], nn.Linear)]
        by_muon = {linear.weight for name, linear in linears if not name.endswith("router")}
        matrices = [p for p in parameters if p in by_muon]
        parameters = [p for p in parameters if p not in by_muon]
        # In bfloat16, as its authors run it, if the run is; float16 has too few exponents.
        muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        optimizers.append(Muon(matrices, config.max_lr, config.weight_decay, muon_dtype))
    # Weight decay is for matrices and embeddings, not for biases and LayerNorms.
    decayed = {m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    groups = [
        {"params": [p for p in parameters if p in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p not in decayed], "weight_decay": 0.0},
    ]
    # fused: one kernel for all parameters, on a CPU several times as fast as a loop over them
    betas = (0.9, config.beta2)
    optimizers.append(torch.optim.AdamW(groups, config.max_lr, betas, eps=1e-8, fused=True))
    return optimizers


def get_lr(step: int, config: TrainConfig) -> float:
    """Learning rate of update `step` (from 0): linear warm-up to max_lr, then down to min_lr.

    cosine is GPT-3's (Brown et al. 2020, appendix B). wsd ends in a linear warm-down; before it
    nothing depends on max_steps: runs can be extended (Hägele et al. 2024, arXiv:2405.18392)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    # share: of the way from min_lr up to max_lr
    if config.schedule == "wsd":
        # 1 until the warm-down begins, then down to 0 at max_steps
        warmdown = min(config.warmdown_steps, config.max_steps - config.warmup_steps)
        share = min((config.max_steps - step) / max(warmdown, 1), 1.0)
    else:
        # half a period of the cosine, from 1 to 0
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + share * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Evaluation (HellaSwag: support/hellaswag.py)


@torch.no_grad()
def validation_loss(
    model: GPT, loader: DataLoaderLite, sequences: int, ranks: Ranks, autocast: torch.autocast
) -> float:
    """Mean cross-entropy in nats over the first `sequences` sequences of a split.

    The ranks share them. Neither B nor the number of ranks changes the result. On a stop signal it
    returns early, and train() drops the result."""
    B = loader.B
    firsts = range(ranks.rank * B, sequences, ranks.world_size * B)
    losses = torch.zeros(len(firsts), device=ranks.device)  # sums over the batches of this rank
    for i, first in enumerate(signals.until_stopped(firsts)):
        tokens = torch.from_numpy(loader.read(first, B)).to(ranks.device)  # (B, T + 1)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        # All batches have the shape that is compiled; past the last sequence no target counts.
        n = min(B, sequences - first)
        y[n:] = -100
        with autocast:
            loss = model(x, y)
        losses[i] = n * loss
    # Read the losses only now: a read waits for the device.
    return ranks.sum(sum(losses.tolist())) / sequences


def print_samples(
    model: GPT, prompt: str, ranks: Ranks, autocast: torch.autocast, last: bool
) -> None:
    """Prints continuations of `prompt`: four short ones from each rank.

    After the last step, two longer ones from rank 0."""
    if last and ranks.rank > 0:
        return
    samples = 2 if last else 4
    length = 64 if last else 32  # tokens
    generator = torch.Generator(device=ranks.device)  # separate from the training RNG
    generator.manual_seed(42 + ranks.rank)
    tokens = get_tokenizer().encode_ordinary(prompt) or [EOT]
    idx = torch.tensor([tokens] * samples, device=ranks.device)
    try:
        with autocast, torch.compiler.set_stance("force_eager"):  # don't compile one-off shapes
            idx = model.generate(idx, length, generator=generator)
    except RunError as error:  # the model has diverged, which is for the next update to say
        print0(f"rank {ranks.rank}: no samples: {error}", every_rank=True)
        return
    for i, tokens in enumerate(idx.tolist()):
        text = indent(tokenizer.printable(tokens), "  ")
        print0(f"rank {ranks.rank} sample {i}:\n{text}", every_rank=True)


# --------------------------------------------------------------------------------------------------
# The run


def new_model(config: TrainConfig, checkpoint: Path | None = None) -> GPT:
    """The model to train: from a checkpoint, from --init, or from scratch.

    Given weights have their own shape, which becomes that of `config`."""
    shape = {name: getattr(config, name) for name in SHAPE}
    # The fields that a fork has added to both configurations, such as dropout.
    in_both = {field.name for field in fields(GPTConfig)} & asdict(config).keys()
    added = {name: getattr(config, name) for name in in_both - shape.keys()}
    if checkpoint is None and config.init == "scratch":
        model = GPT(GPTConfig(block_size=config.seq_len, **shape, **added))
    else:
        # A checkpoint must come from this code's mathematics; --init takes others, and says so.
        strict = checkpoint is not None
        weights = checkpoint or config.init
        model = GPT.from_pretrained(weights, strict, **added)
        for name, wanted in shape.items():  # from now on the settings are those of the weights
            found = getattr(model.config, name)
            if wanted not in (0, found):
                raise UserError(f"{cli.flag(name)} {wanted}: the model {weights} has {found}")
            setattr(config, name, found)
    T, V = model.config.block_size, model.config.vocab_size
    if config.seq_len > T:
        raise UserError(f"--seq-len {config.seq_len}: the context of --init {config.init} is {T}")
    if V < VOCAB_SIZE:
        problem = f"a vocabulary of {V}, but the tokenizer's is {VOCAB_SIZE}"
        raise UserError(f"--init {config.init}: {problem}")
    return model


def choose_execution(model: GPT, config: TrainConfig) -> None:
    """Compiles a model, or lets it compute blocks twice to save memory, as the settings say."""
    if config.compile:
        # All blocks share one compiled code. All batches of a run have the same shape.
        for part in [*model.h, model.loss]:
            part.forward = torch.compile(part.forward, dynamic=False)
    if config.low_memory:
        # A block keeps only its input. The backward pass computes the block again.
        for block in model.h:
            block.forward = partial(recompute, block.forward, use_reentrant=False)


def wrap_in_ddp(
    model: GPT, B: int, T: int, ranks: Ranks, autocast: torch.autocast
) -> DistributedDataParallel:
    """The model in DDP, which averages the gradients of the ranks."""
    torch._dynamo.config.optimize_ddp = False  # it splits graphs, but ours are single blocks
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # avoids a copy of the gradients
    )
    # DDP chooses the order in which it sums gradients in its first passes. A resumed run must sum
    # as before, so let it choose now.
    settle_buckets(ddp_model, B, T, autocast)
    return ddp_model


def is_due(every: int, step: int, last: bool) -> bool:
    """True at multiples of `every` steps and after the last one; 0: never."""
    return every > 0 and (last or step % every == 0)


def train(config: TrainConfig, ranks: Ranks, run: RunFolder) -> int:
    """A run, on each of its ranks. Returns the exit status: 0, or 130 / 143 after a stop signal."""
    # ---- Where to start: with --resume at the newest checkpoint, otherwise at step 0
    unknown = {name for name in SHAPE if not getattr(config, name)}  # until the weights are read
    # None and the state at step 0, if there is none
    checkpoint, saved = run.find_start(MAY_CHANGE | unknown)
    step = saved["step"]  # updates so far
    skipped = saved["skipped"]  # of which so many were left out, as not finite

    # ---- Model, precision, and sequences per micro-batch
    torch.manual_seed(config.seed)
    model = new_model(config, checkpoint)
    if config.save_every and ranks.rank == 0:
        huggingface.check_before_training(model)  # a fork's checkpoints may be unreadable
    # --dtype auto may time matmuls on a CPU, so rank 0 decides for all. chosen: the device, the
    # precision and the reason, to print.
    dtype, chosen = ranks.on_rank_0(
        devices.choose_precision, config.dtype, ranks.device, model.num_parameters(), saved["dtype"]
    )
    autocast = torch.autocast(
        ranks.device.type,
        dtype=dtype,
        enabled=dtype != torch.float32,
        cache_enabled=not config.low_memory,  # it would keep 16-bit copies of all weights
    )
    if ranks.device.type == "cuda" and dtype != torch.float32:
        torch.set_float32_matmul_precision("high")  # TF32 for matmuls that remain in float32
    # A checkpoint records its micro-batch, since another one would change rounding.
    micro_batch = plan.choose_micro_batch(config, ranks, model, dtype, saved["micro_batch"])
    T = config.seq_len
    if config.compile:
        trial = copy.deepcopy(model).to(ranks.device)
        choose_execution(trial, config)
        shape = (micro_batch["size"], T)
        config.compile = all(ranks.gather(devices.can_compile(trial, shape, autocast)))
        del trial
        if not config.compile:  # which takes more memory
            micro_batch = plan.choose_micro_batch(config, ranks, model, dtype, saved["micro_batch"])
    B = config.micro_batch_size = micro_batch["size"]
    # No remainder: choose_micro_batch() raises an error for a B that leaves one.
    grad_accum_steps = config.total_batch_size // (B * T * ranks.world_size)
    model.to(ranks.device)
    torch.manual_seed(config.seed + 1 + ranks.rank)  # ranks must not share a fork's dropout masks

    # ---- Data
    loader = DataLoaderLite(
        config.data, "train", B, T, ranks.rank, ranks.world_size, config.seed, config.shuffle
    )
    loader.pin_memory = ranks.device.type == "cuda"
    if config.eval_every:
        val_loader = DataLoaderLite(config.data, "val", B, T, shuffle=False)
        val_sequences = min(config.eval_tokens // T, val_loader.sequences_per_epoch)
        val_targets = val_loader.read(0, val_sequences)[:, 1:]
        val_size = tokenizer.text_size(val_targets.ravel())  # in tokens, bytes and characters
        if val_size.bytes == 0:
            problem = "the validation split has no text, only separators of documents"
            raise UserError(f"{config.data}: {problem}; --eval-every 0 trains without it")
    tasks = None
    if config.hellaswag_every:
        context = model.config.block_size
        tasks = hellaswag.prepare_for_training(config.hellaswag_data, context, ranks)

    # ---- Optimizers, and the state of the checkpoint
    optimizers = configure_optimizers(model, config, dtype)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16)
    if checkpoint is not None:
        loader.load_state_dict(saved["loader"])
        load_optimizers(optimizers, model, saved["optimizers"])
        if saved["scaler"]:  # only float16 has one
            scaler.load_state_dict(saved["scaler"])
        if ranks.rank < len(saved["random"]):  # there may be more ranks than before
            devices.set_random_state(ranks.device, saved["random"][ranks.rank])

    # ---- All checks are done: now change the folder, and compile
    precision = str(dtype).removeprefix("torch.")
    software = devices.gpu_software(ranks.device, dtype)
    run.begin(model, step, device=chosen, dtype=precision, **software)
    choose_execution(model, config)
    ddp_model = wrap_in_ddp(model, B, T, ranks, autocast) if ranks.world_size > 1 else model
    flops = model.flops_per_token(T)
    meter = console.Meter(config.total_batch_size, flops, ranks, dtype, saved["elapsed"])
    console.announce(config, chosen, model, optimizers, loader, meter, checkpoint)
    signals.collect_stop_signals()  # a run that is asked to stop saves first

    # ---- The loop
    stopping = False
    while True:
        last = step == config.max_steps
        # Save before evaluating, which may fail.
        due = step > 0 and is_due(config.save_every, step, last)
        if due or (stopping and config.save_every):
            state = {
                "step": step,
                "skipped": skipped,
                "elapsed": meter.elapsed,
                "dtype": precision,
                "micro_batch": micro_batch,
                "config": asdict(config),
                "loader": loader.state_dict(),
                "optimizers": save_optimizers(optimizers, model),
                "scaler": scaler.state_dict(),
                "random": ranks.gather(devices.random_state(ranks.device)),
            }
            run.save(model, state, required=last or stopping)  # else a full disk is only a warning
        if stopping:
            break

        # Evaluate. A stop signal cuts this short; the results are then dropped.
        model.eval()  # GPT-2 is trained without dropout, but a fork may have it
        results = {}
        if is_due(config.eval_every, step, last):
            loss = validation_loss(model, val_loader, val_sequences, ranks, autocast)
            results = {"val": loss, "bpb": val_size.bits_per_byte(loss)}
        if tasks and is_due(config.hellaswag_every, step, last):
            results["hella"] = hellaswag.accuracy(model, tasks, ranks, autocast)
        if results and ranks.any(signals.received):
            stopping = True
            continue  # at the top of the loop, which saves and ends
        if results:
            run.log(step, **results)
        if step > 0 and is_due(config.sample_every, step, last):
            print_samples(model, config.sample_prompt, ranks, autocast, last)
        model.train()
        if last:
            break

        # ---- One update of the weights -----------------------------------------------------------
        began = time.perf_counter()
        lr = get_lr(step, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        first_sequence = loader.position
        loss_sum = torch.zeros((), device=ranks.device)
        for micro_step in range(grad_accum_steps):
            x, y = loader.next_batch()  # (B, T) each
            # Copies from pinned memory don't wait for the kernels that are still running.
            x = x.to(ranks.device, non_blocking=loader.pin_memory)
            y = y.to(ranks.device, non_blocking=loader.pin_memory)
            # DDP exchanges the gradients once per step, in the last micro-step. (Without DDP
            # nobody reads this attribute.)
            ddp_model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with autocast:  # the backward pass takes the precisions of the forward pass
                micro_loss = ddp_model(x, y)
            # DDP averages over ranks, but the gradients of micro-steps add up: divide by their
            # number to get the gradient of the mean loss. The scaler keeps float16 gradients
            # from vanishing.
            scaler.scale(micro_loss / grad_accum_steps).backward()
            loss_sum += micro_loss.detach()  # .item() would synchronize in every micro-step
        # Clip the norm of all gradients together, after unscaling: grad_clip applies to unscaled
        # gradients. Without clipping (inf) the norm is still logged.
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm_tensor = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        # The one synchronization with the device. All ranks get the same sums, so they make the
        # same decisions; the flag tells all of them if any has received a stop signal.
        stop_flag = torch.full((), float(bool(signals.received)), device=ranks.device)
        sums = torch.stack([loss_sum, stop_flag])
        if ranks.world_size > 1:
            dist.all_reduce(sums)
        total_loss, stop_flags = sums.tolist()
        loss = total_loss / (grad_accum_steps * ranks.world_size)
        stopping = stop_flags > 0
        norm = norm_tensor.item()
        # A step is all or nothing, for all optimizers, so not scaler.step(), which looks at the
        # gradients of one optimizer. The scale is 1 unless the run is in float16.
        if math.isfinite(loss) and math.isfinite(norm):
            for optimizer in optimizers:
                optimizer.step()
        elif math.isfinite(loss) and scaler.get_scale() > 1:
            pass  # a float16 gradient overflowed
        else:  # it would ruin weights and moments
            skipped += 1
            problem = (
                f"step {step}: loss {loss}, norm {norm} on the sequences from {first_sequence} on"
            )
            if skipped > config.skip_bad_steps:
                skip = f"skip this update with --resume --skip-bad-steps {skipped}"
                raise RunError(f"{problem}; the weights are unchanged. Lower --max-lr, or {skip}")
            print0(f"warning: {problem}: skipped, {skipped} of {config.skip_bad_steps}")
        scaler.update()  # halves the scale if unscale_() found an overflow
        # Under DDP gradients are views of its buckets: zero them in place, or they'd be copies.
        model.zero_grad(set_to_none=ranks.world_size == 1)
        # ---- End of the update -------------------------------------------------------------------

        meter.end_step(began, steps_left=config.max_steps - step - 1)
        print0(f"step {step:5d}/{config.max_steps} {meter.line(loss, lr, norm)}")
        run.log(step, train=loss, lr=lr, norm=norm, **meter.speed)
        if step == saved["step"] and config.save_every:
            check_saving(optimizers)  # now that the first update has made their state
        step += 1

    # ---- The last lines
    if stopping:
        hint = "--resume continues" if config.save_every else "nothing is saved"
        print0(f"stopped by a signal after {step} updates; {hint}")
        return signals.exit_status()
    if config.eval_every:
        console.print_validation(results["val"], val_size)
    console.print_cost(step, meter.elapsed)
    if config.save_every:
        run.finish(model, step)
    return 0


def main(args: list[str] | None = None) -> int:
    """Reads the command line and trains. Returns the exit status: 0, 130 or 143 after a signal."""
    config = read_config(args)
    if config.plan:
        with torch.device("meta"):  # allocates nothing
            plan.print_plan(config, new_model(config))
        return 0
    ranks = Ranks.start(config.device, config.deterministic)
    if ranks.device.type == "cpu" and not config.low_memory:
        devices.keep_freed_memory()  # faster steps for more memory
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:  # what auto has chosen
        missing = f"no shards in {SHARDS_FOLDER}/ (`python fineweb.py` builds them)"
        print0(f"{missing}: the shakespeare preset")
    try:
        with RunFolder(config, ranks) as run:
            status = train(config, ranks, run)
    except RuntimeError as error:  # torch's: out of memory and a lost rank get a line, bugs stay
        raise explain(error, str(ranks.device), config.micro_batch_size) from None
    if dist.is_initialized():  # now that train() and the DDP in it are gone, or the exit can hang
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    cli.run(main)

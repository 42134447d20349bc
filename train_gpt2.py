"""Trains GPT-2 (124M) from scratch and saves it in Hugging Face format.

    python train_gpt2.py                  # GPT-2 if edu_fineweb10B/ has shards, else Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards   # GPT-2 on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py --preset gpt2     # on eight GPUs
    python train_gpt2.py --resume                         # continues the run in log/
    python train_gpt2.py --help                           # every flag, its default and unit

From top to bottom, this file has the model, the data loader, the settings, the optimizers, the
evaluations, and train(), which is a run from set-up to its last line. The update of the weights is
between two marked lines. Files, processes and devices are handled in support/. Wrong input raises
UserError, which is printed as one line. A copy of this file with a changed model is called a fork
(docs/forking.md).

Shapes: B batch (sequences per micro-batch), T time (tokens per sequence), C channels (n_embd =
n_head * head size), nh heads, hs head size, V vocabulary (GPT-2's has 50,257 tokens). A step is one
update of the weights from total_batch_size tokens. The ranks share them equally, and each rank adds
up the gradients of several micro-steps of B * T tokens. What is logged for step s was computed with
the weights after s updates, so the loss of step 0 is that of the untrained model."""

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from textwrap import indent
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

import hellaswag
from support import devices, huggingface, plan
from support.checkpoints import OptimizerStates, RandomStates, load_parts
from support.command_line import flag, parse_args, print0, print_line, range_problems
from support.errors_and_signals import (
    RunError,
    Stopped,
    UserError,
    collect_stop_signals,
    explain,
    received_signals,
    run_and_exit,
    status_after_signal,
)
from support.files_and_locks import ROOT
from support.muon import Muon
from support.progress import (
    Progress,
    announce,
    print_cost,
    print_evaluations,
    print_validation,
    warn_of_wrong_losses,
)
from support.ranks import Ranks, settle_buckets
from support.run_folder import RunFolder, settings_of_run
from support.shards import check_tokens, holds_shards, open_split, open_tokenizer
from support.tokenizer import VOCAB_SIZE, Tokenizer, get_tokenizer, printable, text_size

# --------------------------------------------------------------------------------------------------
# Model: section 2.3 of "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019)


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
        hs = C // self.n_head
        # The queries, keys and values of all heads. Each is (B, T, C), and becomes (B, nh, T, hs).
        parts = self.c_attn(x).split(C, dim=-1)
        q, k, v = (part.view(B, T, self.n_head, hs).transpose(1, 2) for part in parts)
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
    """The same as F.cross_entropy(F.linear(x, weight), targets), but faster. It has no parameters.
    It is a module so that torch.compile can compile it apart from the blocks.

    On a GPU a matrix product is faster if the weight has a multiple of 64 rows. So rows of zeros
    are added to a copy of it, and 50,257 become 50,304. Copying takes far less time than this
    saves. The weight itself keeps GPT-2's shape, as checkpoints need it. A bias of -inf gives the
    added logits probability 0."""

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """x (…, C), weight (V, C), targets (…) -> float32 scalar. Targets of -100 do not count."""
        V = weight.size(0)
        added = 64 * math.ceil(V / 64) - V  # rows
        # F.pad takes the last dimension first.
        weight = F.pad(weight, (0, 0, 0, added))  # (V + added, C)
        bias = F.pad(x.new_zeros(V), (0, added), value=-math.inf)  # (V + added,)
        logits = F.linear(x.flatten(0, -2), weight, bias)
        return F.cross_entropy(logits.float(), targets.flatten())  # which ignores -100


class GPT(nn.Module):
    """GPT-2. Its parameters have GPT-2's names. Linear weights are (out, in) as in torch, and saved
    as (in, out) as in Hugging Face's GPT-2."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # The tokenizer of its text, which is saved with it, or None if the data are numbers. For
        # data with a vocabulary of their own new_model() sets another one.
        self.tokenizer = get_tokenizer() if config.vocab_size >= VOCAB_SIZE else None
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        # The head has the same weight as wte, and gets it at the end of __init__. Until then it is
        # on "meta" without a weight, so the loop below draws nothing for it.
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.loss = LinearCrossEntropy()

        # The initial weights of the linear layers and embeddings. Other parameters stay as they
        # were made. If a layer is to start with zeros, say, set it after this loop.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02
                if name.endswith("c_proj"):
                    # These add to the residual stream, twice per block. Its variance would grow
                    # with depth if they were not scaled down (section 2.3 of the paper).
                    std /= math.sqrt(2 * config.n_layer)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.lm_head.weight = self.wte.weight

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, at: tuple | None = None
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), or with targets (B, T) their mean cross-entropy.

        Without targets, `at` selects the positions whose logits are needed. It is an index into
        (B, T), so (slice(None), -1) is the last position of each row."""
        T = idx.size(1)
        if self.config.block_size < T:
            raise UserError(f"{T} tokens, but the model's context is {self.config.block_size}")
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if at is not None:
            x = x[at]
        if targets is None:
            return self.lm_head(x)
        return self.loss(x, self.lm_head.weight, targets)  # which includes the head's product

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues idx (B, T) with samples of the top_k likeliest tokens. (B, T + max_new_tokens)

        With temperature 0 it always takes the likeliest token. With top_k 0 it may take any."""
        block_size = self.config.block_size
        # The logits of a larger vocabulary than the tokenizer's are not used.
        V = self.tokenizer.n_vocab if self.tokenizer else self.config.vocab_size
        k = min(top_k or V, V)
        if temperature == 0:
            k = 1
            temperature = 1.0
        for _ in range(max_new_tokens):
            window = idx[:, -block_size:]  # what fits in the context
            T = window.size(1)
            # On a GPU the kernels of attention take time to prepare for each new length. So zeros
            # are added there, up to a multiple of 64 tokens. No token attends to later ones.
            zeros = devices.padded_length(T, idx.device, block_size) - T
            window = F.pad(window, (0, zeros))
            logits = self(window, at=(slice(None), T - 1))[:, :V].float() / temperature  # (B, V)
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

        N counts the weights of the linear layers. What --low-memory computes a second time, in the
        backward pass, does not count. Change this if your model computes something else."""
        modules = self.named_modules(remove_duplicate=False)  # a layer used twice counts twice
        N = sum(m.weight.numel() for _, m in modules if isinstance(m, nn.Linear))
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        other_code: Literal["refuse", "accept", "adapt"] = "refuse",
        **changes: Any,
    ) -> "GPT":
        """A GPT-2 from a folder or the Hub (`gpt2`, …), in float32 and evaluation mode. Of a run's
        log folder it takes the newest checkpoint.

        `changes` gives fields of GPTConfig other values than config.json has.

        config.json has some logits of a small test model, by the code that trained the weights. If
        this code computes others (support/fingerprint.py), `other_code` says what to do. "refuse"
        raises UserError. "accept" prints a note, but all tensors must fit. "adapt" prints a note,
        and tensors that do not fit keep their initial values."""
        with torch.device("cpu"):  # whatever the default device is
            return huggingface.read_pretrained(cls, GPTConfig, name, other_code, changes)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2 with its tokenizer. If this file has been changed, so that
        transformers' GPT-2 would compute something else, config.json has another model_type."""
        huggingface.write_pretrained(self, Path(folder))


# --------------------------------------------------------------------------------------------------
# Data. support/shards.py opens shards and .txt files.

SHARDS_FOLDER = "edu_fineweb10B"  # where fineweb.py writes its shards


class DataLoaderLite:
    """Batches of sequences and their targets, epoch after epoch.

    An epoch reads the shards in random order, and the sequences of each shard in random order. It
    skips some tokens at the beginning of each shard, from 0 to T - 1, and the next epoch skips
    another number. With T = 4, for example, one epoch may read tokens 3-6, 7-10 and so on of a
    shard, and the next epoch tokens 1-4, 5-8 and so on. These are other sequences. A model that
    reads a text many times learns more from them than from the same ones (bench/order).

    Every epoch takes the same number of sequences from a shard. No token is an input twice in an
    epoch, and fewer than 2 T tokens of a shard are left out.

    The order depends only on the seed. The ranks take the next B sequences each, in turn. So a step
    has the same tokens for any number of ranks and any B, and a resumed run goes to its place by
    the number of sequences that all ranks together have read."""

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
        device: torch.device | str = "cpu",
        vocab_size: int = 0,
    ):
        """`data` is a folder of shards, or a .txt file. `split` is train or val. Batches are put on
        `device`. All tokens must be below `vocab_size`, which is that of the data's tokenizer if it
        is not given."""
        self.B = B  # sequences per batch
        self.T = T  # tokens per sequence
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle  # False: everything in order, from the first token on
        self.device = torch.device(device)
        # The files, and their tokens, which are memory-mapped, so only what is read is loaded.
        self.vocab_size = vocab_size or open_tokenizer(Path(data)).n_vocab
        self.paths, self.shards = open_split(Path(data), split, self.vocab_size)
        # What a resumed run must find again: the name of each shard in `data`, and its length.
        names = [path.relative_to(data).as_posix() for path in self.paths]
        self.lengths = dict(zip(names, map(len, self.shards), strict=True))
        self.total_tokens = sum(map(len, self.shards))
        self.sequences_per_epoch = sum(self.divide(tokens)[0] for tokens in self.shards)
        if self.sequences_per_epoch == 0:
            size = f"{self.total_tokens} {split} tokens"
            problem = f"{size}, too few for a sequence of {T} and its target"
            raise UserError(f"{data}: {problem}; take more text or a smaller --seq-len")
        self.go_to(0)  # sets self.upcoming, the places of the sequences to come

    def divide(self, tokens: np.ndarray) -> tuple[int, int]:
        """(how many sequences of a shard an epoch reads, how many tokens it may skip at most)"""
        inputs = len(tokens) - 1  # the last token can only be a target
        # It may skip T - 1 tokens, or fewer in a short shard, of which one sequence must be left.
        # The number of sequences is what fits after the longest skip, so all epochs have the same.
        most = max(min(self.T - 1, inputs - self.T), 0) if self.shuffle else 0
        return (inputs - most) // self.T, most

    def places(self, first_epoch: int = 0) -> Iterator[tuple[int, int]]:
        """Yields the place of each sequence, epoch after epoch: its shard and its first token."""
        # How many tokens an epoch skips: each number once in T epochs, in random order.
        skips = self.shuffled(self.T, np.random.PCG64(self.seed))
        for epoch in itertools.count(first_epoch):
            random = np.random.PCG64((self.seed, epoch))
            for shard in self.shuffled(len(self.shards), random):
                count, most = self.divide(self.shards[shard])
                skip = min(skips[epoch % self.T], most)  # 0 without shuffle
                for i in self.shuffled(count, random):
                    yield shard, skip + i * self.T

    def shuffled(self, n: int, random: np.random.PCG64) -> Sequence[int]:
        """The numbers from 0 to n - 1, in random order unless shuffle is off."""
        if not self.shuffle:
            return range(n)
        # Sorted by raw random numbers, since all versions of NumPy draw the same ones. The order
        # of its shuffle() may change with the version.
        return random.random_raw(n).argsort(kind="stable").tolist()

    def read(self, places: Iterable[tuple[int, int]]) -> np.ndarray:
        """The sequences at these places, each with its last target. (n, T + 1) uint16"""
        rows = []
        for shard, start in places:
            tokens = self.shards[shard][start : start + self.T + 1]
            check_tokens(tokens, self.paths[shard], self.vocab_size)
            rows.append(tokens)
        return np.stack(rows)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets of this rank, (B, T) int64 each."""
        of_all_ranks = list(itertools.islice(self.upcoming, self.world_size * self.B))
        mine = of_all_ranks[self.rank * self.B :][: self.B]
        tokens = torch.from_numpy(self.read(mine).astype(np.int64))  # (B, T + 1)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            tokens = tokens.pin_memory()  # the copy then does not wait for running kernels
        tokens = tokens.to(self.device, non_blocking=on_gpu)
        # The target of each token is the token after it.
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def go_to(self, n: int) -> None:
        """Continues as if n sequences had been read, by all ranks together."""
        epoch, in_epoch = divmod(n, self.sequences_per_epoch)
        self.upcoming = itertools.islice(self.places(epoch), in_epoch, None)


# --------------------------------------------------------------------------------------------------
# Settings. The library tyro makes a flag of every field. It prints the comment at the end of the
# line, or else the one directly above it, as the flag's help.


@dataclass
class RunConfig:
    """How to run. These settings, and those that you add here, may change on resume."""

    # a recipe with values for the other flags; auto: gpt2 if edu_fineweb10B/ has shards, else
    # shakespeare
    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "small", "shakespeare"] = "auto"
    data: str = SHARDS_FOLDER  # folder of token shards, also in subfolders, or .txt file
    log_dir: str = "log"  # folder of the run; without --resume an earlier run there is renamed
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    changed_code: bool = False  # resume although this code computes something else than before
    plan: bool = False  # print estimated FLOPs, memory and time, try one step, and exit

    # Length and learning rate of the run. If it diverges, lower max_lr.
    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    max_lr: float = 6e-4  # learning rate at the end of the warm-up
    min_lr: float = 6e-5  # what the learning rate falls to
    warmdown_steps: int = 5000  # the last steps, in which the rate falls if the schedule is wsd
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping

    # What only changes speed and rounding.
    device: str = "auto"  # auto, cpu, cuda or mps
    # precision of matrix products; tf32: float32 with TF32 products, on a CUDA GPU that has them
    dtype: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = "auto"
    micro_batch_size: int = 0  # sequences per forward pass on a device (B); 0: as many as fit
    # use torch.compile; read_config() turns it on for a CUDA GPU, except with preset shakespeare
    compile: bool = False
    low_memory: bool = False  # recompute blocks in the backward pass
    deterministic: bool = False  # use deterministic GPU kernels, so that resuming is bit-exact

    # Evaluations and samples.
    eval_every: int = 250  # steps between validation losses; 0: never
    eval_tokens: int = 10_485_760  # tokens per validation loss (at most the whole split)
    hellaswag_every: int = 250  # steps between HellaSwag evaluations; 0: never
    hellaswag_data: str = ""  # local HellaSwag .jsonl; empty: the official tasks, downloaded once
    sample_every: int = 250  # steps between samples; 0: never
    sample_prompt: str = "Hello, I'm a language model,"  # what samples continue; empty: a line end

    # Checkpoints and logs.
    save_every: int = 1000  # steps between checkpoints; 0: never
    keep_checkpoints: int = 3  # number of recent checkpoints to keep, plus the best; 0: all
    keep_every: int = 0  # never delete checkpoints at multiples of this many steps; 0: none
    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


@dataclass
class TrainConfig(RunConfig):
    """Trains a GPT-2 from scratch or given weights. Flags override the values of the preset."""

    # What to train. These settings, and those that you add here, must not change on resume. If
    # GPTConfig has a field of the same name, the model gets its value. A checkpoint from before you
    # added a field counts as having the default. So let the default mean "off".

    # scratch, a Hub name (gpt2, gpt2-medium, …), the folder of a GPT-2, or that of a run
    init: str = "scratch"
    seed: int = 1337  # seed of the initial weights and of the data order
    shuffle: bool = True  # another random order of shards and of their sequences in every epoch
    numbers: int = 0  # the data are no text, but numbers below this one; 0: they are text
    total_batch_size: int = 524_288  # tokens per update, over all ranks and micro-batches
    seq_len: int = 1024  # tokens per sequence (T)
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # number of channels (C)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices inside the blocks
    weight_decay: float = 0.1  # decoupled weight decay of matrices
    beta2: float = 0.95  # AdamW's decay rate of squared gradients
    # after the warm-up: cosine, or wsd, which is constant and falls linearly at the end
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 715  # steps of linear warm-up; 715 are GPT-3's 375 million tokens


SHAPE = ("n_layer", "n_head", "n_embd")  # with --init the weights decide these

# fmt: off
# A preset replaces some of the defaults above. Flags, in turn, replace values of the preset.
PRESETS = {
    # GPT-2 small on 10 billion tokens. The values are GPT-3's (Brown et al. 2020, table 2.1 and
    # appendix B), as in Karpathy's build-nanogpt. They are the defaults above.
    "gpt2": {},
    # The same model on half the tokens, with Muon. The values, such as ten times the learning rate,
    # were chosen on small models (bench/recipes).
    "gpt2-fast": dict(
        max_steps=9_536, optimizer="muon", schedule="wsd", max_lr=6e-3, min_lr=0.0,
        warmup_steps=476, warmdown_steps=4_768,
    ),
    # The same as gpt2, with the context of GPT-3 Small.
    "gpt3": dict(seq_len=2048),
    # A model of 30 million parameters on 197 million tokens, for one T4. It has a higher learning
    # rate than gpt2, as is usual for smaller models.
    "small": dict(
        max_steps=3000, total_batch_size=65_536, seq_len=512, n_layer=6, n_head=6, n_embd=384,
        max_lr=1e-3, min_lr=1e-4, warmup_steps=150, eval_tokens=1_048_576, hellaswag_every=0,
        save_every=250,
    ),
    # A model of 3.4 million parameters on Shakespeare, for two minutes on two CPU cores. Of the
    # values tried, these reach the lowest loss in that time (bench/recipes). It does not compile,
    # which would take another minute.
    "shakespeare": dict(
        data=str(ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=32,
        n_layer=4, n_head=4, n_embd=64, compile=False,
        optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0, warmup_steps=20,
        warmdown_steps=450, beta2=0.995,
        eval_every=200, eval_tokens=32_768, hellaswag_every=0, sample_every=300,
        sample_prompt="", save_every=200,
    ),
}
# fmt: on


def choose_preset(preset: str) -> tuple[str, str]:
    """The preset that --preset means, and the reason."""
    if preset != "auto":
        return preset, "as requested"
    if holds_shards(Path(SHARDS_FOLDER)):
        return "gpt2", f"{SHARDS_FOLDER}/ has shards; --preset shakespeare is the small run"
    return "shakespeare", "needs no download; for gpt2, `python fineweb.py` makes the shards"


def read_config(args: list[str] | None = None) -> TrainConfig:
    """Reads the command line. A UserError names everything that is wrong with it."""
    words = sys.argv[1:] if args is None else args
    # The command line is read twice. The first time finds the flags on which the defaults of the
    # second time depend. --help waits for the second time.
    no_help = [word for word in words if word not in ("-h", "--help")]
    given = parse_args(TrainConfig, no_help)
    preset, _ = choose_preset(given.preset)
    defaults = {"compile": devices.uses_cuda(given.device)} | PRESETS[preset]
    if given.init != "scratch":
        defaults |= dict.fromkeys(SHAPE, 0)  # 0 means not given: the weights have their own
    if given.resume and given.preset == "auto":
        defaults |= settings_of_run(given)
    config = parse_args(TrainConfig, words, default=TrainConfig(**defaults))

    problems = find_problems(config)
    if problems:
        raise UserError("; ".join(problems))
    return config


def find_problems(config: TrainConfig) -> list[str]:
    """What is wrong with the values of the flags."""
    at_least_1 = {"total_batch_size", "seq_len", "eval_tokens"}
    if config.init == "scratch":
        at_least_1.update(SHAPE)
    problems = range_problems(config, at_least_1)  # no other number may be negative
    if config.init == "scratch" and config.n_head > 0 and config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd}: not divisible by --n-head {config.n_head}")
    if config.beta2 >= 1:
        problems.append(f"--beta2 {config.beta2}: must be below 1")
    if config.eval_every and config.eval_tokens < config.seq_len:
        problems.append(f"--eval-tokens {config.eval_tokens}: less than --seq-len {config.seq_len}")
    if config.numbers > 2**16:
        problems.append(f"--numbers {config.numbers}: must be at most 65536, as uint16 has no more")
    if config.max_lr == 0:
        problems.append("--max-lr 0: must be above 0")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr}: above --max-lr {config.max_lr}")
    return problems


# --------------------------------------------------------------------------------------------------
# Optimizers and learning rate. Muon is in support/muon.py.


def configure_optimizers(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """AdamW. With --optimizer muon, Muon takes over the linear layers inside the blocks.

    To train some parameters at another rate, make a group with its own `lr`. The schedule scales it
    as it scales the others. `dtype` is the precision of the run's matrix products."""
    optimizers = []
    parameters = list(model.parameters())
    if config.optimizer == "muon":
        # All linear layers but routers, which a fork with a mixture of experts may have.
        by_muon = {  # a set of tensors, which compares them by identity
            layer.weight
            for name, layer in model.h.named_modules()
            if isinstance(layer, nn.Linear) and not name.endswith("router")
        }
        matrices = [p for p in parameters if p in by_muon]
        parameters = [p for p in parameters if p not in by_muon]
        # Muon scales its updates to the size of AdamW's, so that both share max_lr.
        # It computes in bfloat16 if the run does. The range of float16 is too small for it.
        muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        optimizers.append(Muon(matrices, config.max_lr, config.weight_decay, muon_dtype))
    # Matrices and embeddings decay. Biases and LayerNorms do not.
    decayed = {m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    groups = [
        {"params": [p for p in parameters if p in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p not in decayed], "weight_decay": 0.0},
    ]
    betas = (0.9, config.beta2)  # GPT-3 has 0.9 and 0.95 (Brown et al. 2020, appendix B)
    # fused: one kernel for all parameters, on a CPU several times as fast as a loop over them
    optimizers.append(torch.optim.AdamW(groups, config.max_lr, betas, eps=1e-8, fused=True))
    return optimizers


def get_lr(step: int, config: TrainConfig) -> float:
    """The learning rate of an update. It rises to max_lr in the warm-up, then falls to min_lr.
    From max_steps on it is min_lr.

    cosine is GPT-3's schedule (Brown et al. 2020, appendix B). wsd stays at max_lr until its
    warm-down, so until then a run can be made longer (Hägele et al. 2024, arXiv:2405.18392)."""
    if step >= config.max_steps:
        return config.min_lr
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    after_warmup = max(config.max_steps - config.warmup_steps, 1)  # steps
    # height is 1 at max_lr and 0 at min_lr.
    if config.schedule == "wsd":
        warmdown = max(min(config.warmdown_steps, after_warmup), 1)
        height = min((config.max_steps - step) / warmdown, 1.0)
    else:
        progress = (step - config.warmup_steps) / after_warmup  # from 0 to 1
        height = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + height * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Evaluation. HellaSwag is in hellaswag.py.


@torch.no_grad()
def validation_loss(
    model: GPT, sequences: np.ndarray, B: int, ranks: Ranks, autocast: torch.autocast
) -> float:
    """The mean cross-entropy of sequences (N, T + 1), in nats per token. The ranks share them.

    Neither B nor the number of ranks changes the result."""
    losses = torch.zeros(math.ceil(len(sequences) / B), device=ranks.device)  # of each batch
    # Each rank gets every world_size-th batch from share(). If one rank has received a stop signal,
    # share() raises Stopped on all of them.
    for start in ranks.share(range(0, len(sequences), B)):
        rows = sequences[start : start + B]
        n = len(rows)
        # The last batch is filled up to the shape that is compiled. The added rows do not count.
        rows = np.pad(rows.astype(np.int64), ((0, B - n), (0, 0)))
        tokens = torch.from_numpy(rows).to(ranks.device)  # (B, T + 1)
        x = tokens[:, :-1]
        y = tokens[:, 1:].clone()  # x has some of the same memory
        y[n:] = -100
        with autocast:
            losses[start // B] = n * model(x, y)  # the sum of the n sequences' losses
    # Reading a loss waits for the device, so all are read at the end.
    total = sum(losses.tolist())
    return ranks.sum(total) / len(sequences)


def print_samples(model: GPT, prompt: list[int], ranks: Ranks, autocast: torch.autocast) -> None:
    """Prints two continuations of the tokens of a prompt from each rank."""
    # Samples have random numbers of their own, so they do not change how training goes on.
    generator = torch.Generator(device=ranks.device)
    generator.manual_seed(42 + ranks.rank)
    idx = torch.tensor([prompt] * 2, device=ranks.device)
    try:
        with autocast:
            idx = model.generate(idx, 64, generator=generator)
    except RunError as error:  # The model has diverged, which will end the run in an update.
        print_line(f"rank {ranks.rank}: no samples: {error}")
        return
    which_rank = f"rank {ranks.rank} " if ranks.world_size > 1 else ""
    for i, tokens in enumerate(idx.tolist()):
        text = indent(printable(tokens, model.tokenizer), "  ")
        print_line(f"{which_rank}sample {i}:\n{text}")


class Evaluations:
    """Validation loss, HellaSwag and samples, each at its own steps and after the last one."""

    def __init__(
        self, config: TrainConfig, model: GPT, B: int, ranks: Ranks, autocast: torch.autocast
    ):
        self.config = config
        self.model = model
        self.B = B
        self.ranks = ranks
        self.autocast = autocast
        self.tasks = []
        self.text_size = None
        self.results = {}  # the latest value of each evaluation
        if config.eval_every:
            T = config.seq_len
            V = model.config.vocab_size
            loader = DataLoaderLite(config.data, "val", 1, T, shuffle=False, vocab_size=V)
            N = min(config.eval_tokens // T, loader.sequences_per_epoch)
            self.sequences = loader.read(itertools.islice(loader.places(), N))  # (N, T + 1)
            # The bytes and characters of its text, for losses that do not depend on the tokenizer.
            # None if the data are numbers.
            self.text_size = text_size(self.sequences[:, 1:].ravel(), model.tokenizer)
        if config.hellaswag_every:
            # Cut to fit into the model's context.
            self.tasks = hellaswag.load_tasks(config.hellaswag_data, model, ranks)
        # What samples continue. If the data are numbers, it is the first ones of validation.
        if model.tokenizer:
            self.prompt = model.tokenizer.encode_ordinary(config.sample_prompt or "\n")
        else:
            self.prompt = self.sequences[0, :8].tolist() if config.eval_every else [0]

    def run(self, step: int, log: Callable[..., None]) -> None:
        """Makes the evaluations that are due after `step` updates, and logs their results."""
        config, model, ranks, autocast = self.config, self.model, self.ranks, self.autocast
        results = {}
        model.eval()  # turns off dropout, which a fork may have
        if is_due(config.eval_every, step, config):
            loss = validation_loss(model, self.sequences, self.B, ranks, autocast)
            results = {"val": loss}
            if self.text_size:
                results["bpb"] = self.text_size.bits_per_byte(loss)
        with uncompiled(config):
            if results:  # A fork may have made a mistake that the loss does not show.
                warn_of_wrong_losses(model, self.sequences[0], autocast)
            if self.tasks and is_due(config.hellaswag_every, step, config):
                results["hella"] = hellaswag.accuracy(model, self.tasks, ranks, autocast)
            self.results |= results
            if results:
                print_evaluations(step, results, self.text_size)
                log(step, **results)
            if step > 0 and is_due(config.sample_every, step, config):
                print_samples(model, self.prompt, ranks, autocast)
        model.train()


def uncompiled(config: TrainConfig) -> contextlib.AbstractContextManager[object]:
    """Within it a compiled model runs uncompiled, since each new length would be compiled again."""
    return torch.compiler.set_stance("force_eager") if config.compile else contextlib.nullcontext()


def is_due(every: int, step: int, config: TrainConfig) -> bool:
    """True at each multiple of `every`, and at the end of the run. With 0 it is never true."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


# --------------------------------------------------------------------------------------------------
# Training


def new_model(config: TrainConfig, initial: str = "", checkpoint: Path | None = None) -> GPT:
    """The model to train: that of a checkpoint, or of --init, or a new one.

    `initial` is what find_start() has found for --init. Without it, this looks for itself. A given
    model has its own shape, which is entered in `config`."""
    # The fields of GPTConfig that are flags: SHAPE, and what a fork may have added.
    names = [field.name for field in fields(GPTConfig) if hasattr(config, field.name)]
    shape = {name: getattr(config, name) for name in SHAPE}
    added = {name: getattr(config, name) for name in names if name not in SHAPE}
    tokenizer = open_tokenizer(Path(config.data), config.numbers)  # None for numbers
    if checkpoint is None and config.init == "scratch":
        if tokenizer != get_tokenizer():  # not GPT-2's, which GPT has by itself
            added["vocab_size"] = config.numbers or tokenizer.n_vocab
        model = GPT(GPTConfig(block_size=config.seq_len, **shape, **added))
        if tokenizer != get_tokenizer():
            model.tokenizer = tokenizer
    else:
        weights = checkpoint or initial or config.init
        try:
            other_code = "accept"
            if checkpoint:
                other_code = "adapt" if config.changed_code else "refuse"
            model = GPT.from_pretrained(weights, other_code, **added)
        except huggingface.OtherCode as error:
            remedy = "--changed-code goes on with this code" if checkpoint else "use its own code"
            raise UserError(f"{error}; {remedy}") from None
        for name, wanted in shape.items():
            found = getattr(model.config, name)
            if wanted not in (0, found):  # 0 means not given
                raise UserError(f"{flag(name)} {wanted}: the model {weights} has {found}")
            setattr(config, name, found)
        V = model.config.vocab_size
        same = model.tokenizer == tokenizer and config.numbers in (0, V)
        # Nothing is known of a tokenizer that the code of a fork has made.
        if not same and isinstance(model.tokenizer, Tokenizer | None):
            wanted = f"--numbers {config.numbers}" if config.numbers else f"--data {config.data}"
            problem = f"has {V} tokens, which are not those of {wanted}"
            remedy = (
                "make shards in an --out with its vocab.json and merges.txt (GPT-2's need none)"
            )
            name = "--resume" if checkpoint else "--init"
            raise UserError(f"{name}: {weights} {problem}; {remedy}")
    T = model.config.block_size
    if config.seq_len > T:
        raise UserError(f"--seq-len {config.seq_len}: the context of --init {config.init} is {T}")
    return model


def sequences_before(step: int, config: TrainConfig) -> int:
    """The number of sequences that all ranks together have read before a step.

    choose_micro_batch() has checked that a step has a whole number of them."""
    return step * (config.total_batch_size // config.seq_len)


def choose_execution(model: GPT, config: TrainConfig) -> None:
    """Compiles a model, or lets it compute blocks twice to save memory, as the settings say."""
    if config.compile:
        # All blocks share their code, and torch compiles it once, though it is called for each. But
        # if the blocks of a fork differ in a number, such as a window, it compiles for each block.
        # By default it does so 8 times, and runs further ones uncompiled. So both of its limits
        # grow with the number of blocks, with room for several modes.
        torch._dynamo.config.recompile_limit = 16 * len(model.h)
        torch._dynamo.config.accumulated_recompile_limit = 256 + 16 * len(model.h)
        for part in [*model.h, model.loss]:
            # All batches have the same shape, so none of its sizes is dynamic.
            compiled = torch.compile(type(part).forward, dynamic=False)
            # MethodType makes it a method of this part. So in a deep copy of the model, such as a
            # moving average of the weights, it is a method of the copied part.
            part.forward = MethodType(compiled, part)
    if config.low_memory:
        # torch.utils.checkpoint: a block keeps only its input, and is computed again for its
        # backward pass.
        for block in model.h:
            block.forward = partial(recompute, block.forward, use_reentrant=False)


def wrap_in_ddp(model: GPT, B: int, T: int, ranks: Ranks, autocast: torch.autocast) -> nn.Module:
    """The model in DDP, which averages the gradients of the ranks. One rank alone needs no DDP."""
    if ranks.world_size == 1:
        return model
    torch._dynamo.config.optimize_ddp = False  # keeps DDP from splitting compiled blocks
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients take memory once, not twice
    )
    # In its first two passes DDP chooses in which order it sums gradients. This makes two passes
    # over zeros, and clears the gradients, so that a resumed run has the same order as before.
    settle_buckets(ddp_model, B, T, autocast)
    return ddp_model


def train(config: TrainConfig, ranks: Ranks, run: RunFolder) -> int:
    """Trains a model. Every rank calls this. Returns the exit status."""
    # ---- Where to start: from a checkpoint with --resume, otherwise from new or given weights
    may_change = {field.name for field in fields(RunConfig)}
    if config.init != "scratch":
        may_change.update(SHAPE)  # new_model() compares these flags with the weights instead
    # Without a checkpoint find_start() returns None, {}, and --init. If the checkpoint has another
    # value of a setting that must not change, it raises UserError.
    checkpoint, saved, initial = run.find_start(may_change)
    step = first_step = saved.get("step", 0)  # updates so far
    torch.manual_seed(config.seed)
    model = new_model(config, initial, checkpoint)
    if config.save_every and ranks.rank == 0:
        # A fork whose checkpoints could not be loaded is an error now, rather than in hours.
        huggingface.check_that_checkpoints_load(model, resumed=checkpoint is not None)

    # ---- The precision of matrix products. On a CPU it may depend on a measurement, so rank 0
    # chooses for all. `device_line` says which device and precision, and why.
    N = model.num_parameters()
    precision, device_line = ranks.on_rank_0(
        devices.choose_precision, config.dtype, ranks.device, N, saved.get("dtype")
    )
    # autocast would keep a 16-bit copy of all weights, which --low-memory saves.
    dtype, autocast = devices.use_precision(precision, ranks.device, cache=not config.low_memory)

    # ---- Sequences per micro-step on each rank (B). A resumed run keeps its B if that fits.
    B = plan.choose_micro_batch(config, model, ranks, dtype, before=saved.get("B", 0))
    config.micro_batch_size = B  # for run.json
    T = config.seq_len
    model.to(ranks.device)
    torch.manual_seed(config.seed + 1 + ranks.rank)  # ranks must not share a fork's dropout masks

    # ---- Data, optimizers, and what else a checkpoint holds besides the weights
    loader = DataLoaderLite(
        config.data,
        "train",
        B,
        T,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        shuffle=config.shuffle,
        device=ranks.device,
        vocab_size=model.config.vocab_size,
    )
    evaluations = Evaluations(config, model, B, ranks, autocast)
    optimizers = configure_optimizers(model, config, dtype)
    # The scaler keeps small float16 gradients from becoming 0. Other precisions need none.
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16)
    progress = Progress(config, model, ranks, precision)  # times steps, and counts tokens
    parts = {
        "progress": progress,
        "optimizers": OptimizerStates(optimizers, model, config.changed_code),
        "scaler": scaler,
        "random": RandomStates(ranks),
    }
    if checkpoint:
        load_parts(parts, saved["parts"], config.changed_code)
        if saved["shards"] != loader.lengths:
            raise UserError(f"--resume: {config.data} has shards of other names or lengths now")
    loader.go_to(sequences_before(step, config))
    # Each group of parameters has a multiple of the schedule's learning rate. The multiple is that
    # of configure_optimizers(), since checkpoints have no learning rates.
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    multiples = [group["lr"] / config.max_lr for group in groups]  # 1, unless a fork has others

    # ---- All checks are done, so the folder of the run may change
    facts = {"dtype": precision, "B": B, "shards": loader.lengths}
    software = devices.gpu_software(ranks.device)  # versions that matter for speed
    # Renames the folder of an earlier run, and writes run.json and a copy of this script.
    V = model.config.vocab_size
    run.begin(
        model, step, device=device_line, dtype=precision, vocab_size=V, init=initial, **software
    )
    choose_execution(model, config)
    ddp_model = wrap_in_ddp(model, B, T, ranks, autocast)
    tokens_in_all = T * sequences_before(config.max_steps, config)
    announce(config, device_line, model, optimizers, loader, progress, tokens_in_all, checkpoint)
    collect_stop_signals()  # so that a run which is asked to stop can save first
    if step < config.max_steps:
        x, y = loader.next_batch()  # (B, T) each

    try:  # until a stop signal raises Stopped, in an evaluation or at the end of an iteration
        while True:
            # ---- Evaluate
            evaluations.run(step, run.log)
            if step == config.max_steps:
                break

            # ---- One update of the weights -------------------------------------------------------
            began = time.perf_counter()
            lr = get_lr(step, config)
            for group, multiple in zip(groups, multiples, strict=True):
                group["lr"] = multiple * lr
            first = sequences_before(step, config)
            sequences = sequences_before(step + 1, config) - first
            micro_steps, rest = divmod(sequences, B * ranks.world_size)
            if rest:  # as may happen in a fork with a growing batch
                problem = f"step {step} has {sequences} sequences, not a multiple of B x ranks"
                raise UserError(f"--micro-batch-size {B}: {problem}; lower it")
            loss_sum = torch.zeros((), device=ranks.device)
            tokens = 0  # on this rank
            for micro_step in range(micro_steps):
                # DDP averages the gradients over the ranks in the last micro-step alone. Without
                # DDP this attribute has no effect.
                ddp_model.require_backward_grad_sync = micro_step == micro_steps - 1
                with autocast:
                    micro_loss = ddp_model(x, y)
                # The gradients of micro-steps add up. Each counts as its share of the mean loss.
                scaler.scale(micro_loss / micro_steps).backward()
                loss_sum += micro_loss.detach()  # .item() would wait for the device
                tokens += y.numel()
                if micro_step < micro_steps - 1:
                    x, y = loader.next_batch()  # while a GPU still computes the gradients
            # The next step's first batch is read here for the same reason. If it is damaged, the
            # run ends after this step, and after its checkpoint if one is due.
            damage = None
            if step + 1 < config.max_steps:
                try:
                    x, y = loader.next_batch()
                except UserError as error:
                    damage = error
            # Take the scaler's factor out of the gradients, then clip the norm of all together.
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            # All ranks learn the mean loss, and whether any of them has received a stop signal.
            # From here on they have the same numbers, so they decide alike.
            signal = torch.full_like(loss_sum, bool(received_signals))
            total_loss, stop = ranks.sum_tensor(torch.stack([loss_sum, signal])).tolist()
            loss = total_loss / (micro_steps * ranks.world_size)
            norm = norm.item()
            if math.isfinite(loss) and math.isfinite(norm):
                # Not scaler.step(), since either all optimizers make a step or none does.
                for optimizer in optimizers:
                    optimizer.step()
            elif math.isfinite(loss) and scaler.get_scale() > 1:
                # A float16 gradient has overflowed, as happens from time to time, and the weights
                # stay as they are. (Other precisions have a scale of 1.)
                print0(f"step {step:5d} has overflowed in float16, so the weights stay as they are")
            else:
                # The model has diverged.
                where = f"step {step}, on the sequences from {first} on"
                problem = f"{where}: loss {loss}, norm {norm}; the weights are unchanged"
                raise RunError(f"{problem}. Lower --max-lr; --resume goes on from a checkpoint")
            scaler.update()  # a smaller factor if unscale_() found an overflow, at times a larger
            # DDP keeps the gradients in buffers of its own, so they are set to zero in place.
            model.zero_grad(set_to_none=ranks.world_size == 1)
            # ---- End of the update ---------------------------------------------------------------

            progress.end_step(step, began, tokens * ranks.world_size)
            print0(f"step {step:5d}/{config.max_steps} {progress.line(loss, lr, norm)}")
            run.log(step, train=loss, lr=lr, norm=norm, **progress.speed)
            if step == first_step and config.save_every:
                # A fork's optimizer may keep something that no checkpoint can hold. That is an
                # error as soon as its state exists, and not at the first checkpoint.
                parts["optimizers"].check_that_it_can_be_saved()

            # ---- Save, before the next evaluation, which may fail
            step += 1
            if is_due(config.save_every, step, config):
                run.save(model, step, parts, facts)  # a folder step_000600/ in Hugging Face format
            if stop:
                raise Stopped
            if damage:
                raise damage
    except Stopped:
        hint = "nothing is saved"
        if config.save_every:
            # It does nothing if this step is saved. A full disk ends the run here.
            run.save(model, step, parts, facts, required=True)
            hint = f"--resume --log-dir {config.log_dir} continues"
        print0(f"stopped by a signal after {step} updates; {hint}")
        return status_after_signal()

    # ---- The last lines
    if config.eval_every:
        print_validation(evaluations.results["val"], evaluations.text_size)
    print_cost(step, progress.training_seconds)
    if config.save_every:
        run.finish(model, step)  # draws curves.png, and says how to sample from the model
    return 0


def main(args: list[str] | None = None) -> int:
    """Reads the command line and trains. Returns the exit status."""
    config = read_config(args)
    if config.plan:
        with torch.device("meta"):  # tensors without memory, on which a step can be tried
            model = new_model(config)
        plan.print_plan(config, model, sequences_before(config.max_steps, config) * config.seq_len)
        return 0
    ranks = Ranks.start(config.device, config.deterministic)
    preset, reason = choose_preset(config.preset)
    print0(f"preset: {preset} ({reason})")
    config.preset = preset  # for run.json
    if ranks.device.type == "cpu" and not config.low_memory:
        # The process keeps freed memory for new tensors. Steps take less time, and more memory.
        devices.keep_freed_memory()
    run = RunFolder(config, ranks)
    try:
        with run:  # keeps other runs out of the folder
            status = train(config, ranks, run)
    except RuntimeError as error:
        # Out of memory and a lost rank become one line. Any other error is a bug, and keeps its
        # traceback.
        explained = explain(error, str(ranks.device), config.micro_batch_size, run.saved_step)
        if explained is error:
            raise
        raise explained from None
    finally:
        torch.set_float32_matmul_precision("highest")  # torch's default, which train() may change
    if dist.is_initialized():
        # Not before train() has returned: while there is a DDP model, this may hang.
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    run_and_exit(main)

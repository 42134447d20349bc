"""Trains GPT-2 (124M) from scratch and saves it in Hugging Face's format.

    python train_gpt2.py      # a small GPT on Shakespeare, or GPT-2 if a GPU and data are there
    python train_gpt2.py --preset gpt2 --data my_shards   # GPT-2 on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py --preset gpt2     # on eight GPUs
    python train_gpt2.py --resume                         # continues the run in log/
    python train_gpt2.py --help                           # every flag and its default

From top to bottom, this file has the model, the data loader, the settings, the optimizers, the
evaluations, and the training loop. Files, processes and devices are handled in support/.

Edit anything, here or in a copy. Each run prints whether its model still computes what GPT-2
computes. If it does not, Hugging Face cannot load the checkpoints, and sampling is slower, since it
has no KV cache. If your file has another name, sample.py and hellaswag.py need it: --code
my_copy.py. After an edit, --resume continues a run if its parameters (names and shapes) and
optimizers are the same.

Terms: the training data are tokens, stored in files called shards. A step is one update of the
weights, from total_batch_size tokens. Steps are counted from 0, and the loss of a step is computed
before its update. The processes that train together are called ranks, and usually each has a GPU.
They share the tokens of a step equally. Each rank divides its share into micro-batches that fit
into its memory, and adds up their gradients.

Shapes: B sequences per micro-batch, T tokens per sequence, C channels (n_embd), nh heads of
hs = C / nh channels, V tokens in the vocabulary (GPT-2's has 50,257).

Errors: a UserError is a mistake that the user can fix. A RunError is another reason to end a run,
such as a loss that is not finite. Both are printed as one line. Bugs keep their traceback."""

import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np

if __name__ == "__main__":  # torch reads this once, when it is imported
    # DDP warns if all parameters are used, although a fork may have some that are not.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute_in_backward

import hellaswag
from support import devices, huggingface
from support.checkpoints import load_optimizers, newest_intact, optimizer_states
from support.command_line import print0
from support.errors_and_signals import (
    RunError,
    StopSignals,
    UserError,
    exit_status,
    name_smaller_batch,
    run_and_exit,
)
from support.files_and_locks import ROOT
from support.forks import warn_if_not_causal
from support.muon import Muon
from support.progress import Progress, first_lines, more_lines, warn_of_settings
from support.ranks import PATIENCE, Ranks, open_store
from support.run_folder import RunFolder
from support.sampling import LastLogits, print_samples
from support.settings import read_config
from support.shards import check_tokens, open_split, open_tokenizer
from support.tokenizer import Tokenizer, measure_text

# --------------------------------------------------------------------------------------------------
# Model: section 2.3 of "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are GPT-2 small's, 124,439,808 parameters."""

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50257  # 256 bytes, 50,000 merged pairs and <|endoftext|>
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention. No token sees later ones. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key, value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # mixes the heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        nh = self.n_head
        hs = C // nh
        q, k, v = self.c_attn(x).split(C, dim=-1)  # (B, T, C) each
        q = q.view(B, T, nh, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, nh, hs).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, nh, hs).transpose(1, 2)  # (B, nh, T, hs)
        # softmax(q k^T / sqrt(hs)) v, without ever storing the (T, T) matrix
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.c_proj(y)


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


def next_token_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of predicting targets (B, T) from x (B, T, C), in nats. A scalar.

    The logits are x times the transpose of `head` (V, C). Targets of -100 are ignored. In training
    the result is logged as `train`.

    GPUs multiply faster if V is a multiple of 64, which 50,257 is not. So rows of zeros are added
    to a copy of `head`, and a bias of -inf gives them a probability of 0. In Karpathy's lecture
    this made a step on an A100 3% faster. The model itself has no such rows, since Hugging Face
    expects 50,257. A loss that reads all logits, such as label smoothing, must take
    logits[:, :V]."""
    V = head.size(0)
    added = 64 * math.ceil(V / 64) - V  # rows
    padded_head = F.pad(head, (0, 0, 0, added))  # (V + added, C), with rows of zeros at the end
    bias = F.pad(x.new_zeros(V), (0, added), value=-math.inf)  # (V + added,), -inf at the end
    logits = F.linear(x.flatten(0, 1), padded_head, bias)  # (B * T, V + added)
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100)


class GPT(nn.Module):
    """GPT-2. Its parameters have the same names as in OpenAI's and Hugging Face's code."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.loss = next_token_loss  # or a compiled version of it
        self.low_memory = False  # recompute blocks in the backward pass instead of storing them
        self.use_kv_cache = False  # set by support/sampling.py if the model is a GPT-2

        # The initial weights. LayerNorms already have theirs, ones and zeros.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02  # as in Hugging Face's code
                if name.endswith("c_proj"):
                    # Two layers in each block add to the residual stream. Their smaller weights
                    # keep its variance from growing with the depth (section 2.3 of the paper).
                    std /= math.sqrt(2 * config.n_layer)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head(self) -> Tensor:
        """The matrix (V, C) that computes the logits. It is the embedding of the tokens."""
        return self.wte.weight

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, at: tuple | None = None
    ) -> Tensor:
        """Tokens (B, T) -> logits (B, T, V), or with targets (B, T) their mean loss.

        Sampling and HellaSwag need the logits of a few tokens only. `at` is an index into (B, T)
        that selects them. For example, (slice(None), -1) selects the last token of each row."""
        T = idx.size(1)
        if self.config.block_size < T:
            raise UserError(f"{T} tokens, but the model's context is {self.config.block_size}")
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))  # (B, T, C)
        for block in self.h:
            if self.low_memory and self.training:
                x = recompute_in_backward(block, x, use_reentrant=False)
            else:
                x = block(x)
        x = self.ln_f(x)
        if targets is not None:
            return self.loss(x, self.head, targets)
        if at is not None:
            x = x[at]
        return F.linear(x, self.head)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 50,
        generators: Sequence[torch.Generator] | None = None,
        on_token: Callable[[Tensor], bool | None] | None = None,
    ) -> Tensor:
        """Continue idx (B, T) by n = max_new_tokens sampled tokens. Return (B, T + n).

        Each token is sampled from the top_k likeliest ones, or from the whole vocabulary with
        top_k=0. temperature=0 always takes the likeliest. With one generator per row, a sample does
        not depend on the number of rows. on_token(tokens) is called with each new tokens (B,), and
        ends the sampling by returning True.

        sample.py and the samples of a run call this. Within `kv_cache_for_gpt2(model)` an
        unmodified GPT-2 uses a KV cache. Otherwise each token takes a forward pass over the whole
        context."""
        k = min(top_k, self.config.vocab_size) or self.config.vocab_size
        if temperature == 0:
            k, temperature = 1, 1.0
        last_logits = LastLogits(self)
        for _ in range(max_new_tokens):
            logits, candidates = (last_logits(idx) / temperature).topk(k)  # (B, k) each
            p = logits.softmax(-1)
            if not p.isfinite().all():
                raise RunError("the model's logits are not finite, so it has diverged")
            choices = [
                torch.multinomial(row, 1, generator=generator)
                for row, generator in zip(p, generators or [None] * len(p), strict=True)
            ]
            tokens = candidates.gather(1, torch.stack(choices))  # (B, 1)
            idx = torch.cat([idx, tokens], dim=1)
            if on_token is not None and on_token(tokens[:, 0]):
                break
        return idx

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """Training FLOPs per token: 6 N + 12 L C T, with L = n_layer (PaLM, Chowdhery et al. 2022,
        appendix B). N counts the weights of the linear layers and of the head."""
        weights = {m.weight for m in self.modules() if isinstance(m, nn.Linear)} | {self.head}
        N = sum(weight.numel() for weight in weights)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """A model in Hugging Face's format, in evaluation mode. `name` is its folder, or the folder
        of a run, or a name on the Hub, such as gpt2-medium."""
        return huggingface.load_model(cls, GPTConfig, name)

    def save_pretrained(self, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
        """Saves the model in Hugging Face's format, with the files of the tokenizer if given."""
        huggingface.save_model(self, folder, tokenizer)


# --------------------------------------------------------------------------------------------------
# Data


# A batch may cross from one shard to the next, and from one epoch to the next.
@functools.lru_cache(maxsize=4)
def permutation(n: int, *seed: int) -> np.ndarray:
    """Return the numbers below n in random order, (n,). It depends only on n and the seed."""
    # Every version of NumPy draws the same numbers from RandomState.
    return np.random.RandomState(seed).permutation(n)


@functools.lru_cache(maxsize=4)
def random_below(n: int, *seed: int) -> int:
    """Return a random number below n. It depends only on n and the seed."""
    return np.random.RandomState(seed).randint(n)


class DataLoaderLite:
    """Batches of sequences and their targets, epoch after epoch.

    Every shard is cut into sequences of T tokens. An epoch visits the shards in random order, and
    in each shard its sequences in random order. Each epoch shifts all cuts by a random offset below
    T. So the sequences differ between epochs, which helps a model that reads a small text often.

    The sequences of all epochs are numbered in this order. A sequence is a function of its number,
    the seed and the data. Rank 0 reads the first B sequences, rank 1 the next B, and so on. With N
    sequences per step, step s reads the sequences s * N to (s + 1) * N - 1, for any B and any
    number of ranks. So a resumed run needs only its step to find its position in the data."""

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
    ):
        """`data` is a folder of shards, which are arrays of uint16 tokens, or a .txt file. `split`
        is "train" or "val". The validation split of a .txt file is the last tenth of its tokens.
        `world_size` is the number of ranks. Batches are put on `device`. Without `shuffle`
        everything is read in order."""
        self._B = B  # sequences per batch
        self._T = T  # tokens per sequence
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.device = torch.device(device)
        self.vocab_size = open_tokenizer(data).n_vocab
        # The files of the shards, and their tokens. The arrays are memory-mapped, so only what is
        # used is read from the disk. A .txt file is one shard.
        self.paths, self.shards = open_split(data, split, self.vocab_size)
        sizes = np.array([len(tokens) for tokens in self.shards])
        self.total_tokens = int(sizes.sum())
        # The number of sequences in each shard, the same for every offset. The last token of a
        # shard is only a target.
        largest_offset = T - 1 if shuffle else 0
        self.counts = np.maximum(sizes - 1 - largest_offset, 0) // T
        self.sequences_per_epoch = int(self.counts.sum())
        if self.sequences_per_epoch == 0:
            problem = f"{self.total_tokens} {split} tokens are too few for sequences of {T}"
            raise UserError(f"{data}: {problem}; take more text or a smaller --seq-len")
        # A resumed run must have the same shards, although `data` may have moved.
        names = [path.relative_to(data).as_posix() for path in self.paths]
        self.shard_sizes = list(zip(names, sizes.tolist(), strict=True))
        self.thread = ThreadPoolExecutor(max_workers=1)  # reads while the device computes
        self.go_to(0)

    @property
    def B(self) -> int:
        return self._B

    @property
    def T(self) -> int:
        return self._T

    def go_to(self, n: int) -> None:
        """Continue as if all ranks together had read n sequences. Prefetch the next batch."""
        self.sequences_read = n
        self.prefetched = self.thread.submit(self.read, n + self.rank * self.B, self.B)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets of this rank, (B, T) int64 each."""
        tokens = torch.from_numpy(self.prefetched.result())  # (B, T + 1)
        self.go_to(self.sequences_read + self.B * self.world_size)
        if self.device.type == "cuda":
            # From pinned memory the copy is asynchronous.
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        else:
            tokens = tokens.to(self.device)
        # The target of each token is the token after it.
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def read(self, first: int, n: int) -> np.ndarray:
        """Return n sequences, beginning with number `first`, (n, T + 1) int64.

        Each has T inputs, and one more token, the target of the last input."""
        return np.stack([self.sequence(i) for i in range(first, first + n)]).astype(np.int64)

    def sequence(self, number: int) -> np.ndarray:
        """Return a sequence, (T + 1,) uint16. Raises UserError if its shard is damaged."""
        epoch, i = divmod(number, self.sequences_per_epoch)
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = permutation(len(self.shards), self.seed, epoch)
        # The shard that holds the epoch's sequence i, and the number of the sequence in the shard
        ends = self.counts[order].cumsum()
        n_before = ends.searchsorted(i, side="right")  # shards that the epoch visits before
        shard = order[n_before]
        i -= ends[n_before] - self.counts[shard]
        offset = 0
        if self.shuffle:
            i = permutation(self.counts[shard], self.seed, epoch, shard)[i]
            offset = random_below(self.T, self.seed, epoch)
        start = offset + self.T * i
        tokens = self.shards[shard][start : start + self.T + 1]
        check_tokens(tokens, self.paths[shard], self.vocab_size)
        return tokens


# --------------------------------------------------------------------------------------------------
# Settings

Preset = Literal["auto", "gpt2", "small", "shakespeare"]
Dtype = Literal["auto", "float32", "tf32", "bfloat16", "float16"]


# Each field is also a flag, such as --max-steps, and its comment is the help text of the flag.
@dataclass
class TrainConfig:
    """The settings of a run. The value of each comes from the first of these that has one:

    1. the flag on the command line,
    2. with --resume, the run in log_dir; with --init, the config.json of its model,
    3. the preset,
    4. the default below."""

    # What to train on, and where to start

    preset: Preset = "auto"  # a recipe; auto: gpt2 with a GPU and shards in data, else shakespeare
    data: str = "edu_fineweb10B"  # folder of token shards, or a .txt file
    init: str = "scratch"  # scratch, a model's folder, or its name on the Hub, such as gpt2-medium
    log_dir: str = "log"  # folder of the run; it must not hold another one, unless it is resumed
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    plan: bool = False  # print the run's first lines (FLOPs, memory, epochs, time) and exit
    seed: int = 1337  # seed of the initial weights and of the data order
    shuffle: bool = True  # read shards and sequences in a new random order in every epoch

    # The shape of the model

    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # number of channels (C)

    # Batches and optimization

    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    total_batch_size: int = 524_288  # tokens per update, over all ranks and micro-batches
    seq_len: int = 1024  # tokens per sequence (T)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the linear layers inside the blocks
    max_lr: float = 6e-4  # highest learning rate; lower it if the loss diverges
    min_lr: float = 6e-5  # learning rate at the end
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, decay (see get_lr)
    warmup_steps: int = 715  # steps in which the rate rises; GPT-3 has 715
    warmdown_steps: int = 5000  # with wsd, steps at the end in which the rate falls
    weight_decay: float = 0.1  # decoupled weight decay of matrices
    beta2: float = 0.95  # AdamW's decay rate of squared gradients
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping

    # Speed and memory

    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Dtype = "auto"  # precision of matrix products; auto: the fastest that is safe
    micro_batch_size: int = 0  # sequences per forward pass on a device (B); 0: see below
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on a CUDA GPU
    low_memory: bool = False  # recompute blocks in the backward pass instead of storing them
    deterministic: bool = False  # use deterministic GPU kernels, so that resuming is bit-exact

    # Evaluations and samples

    eval_every: int = 250  # steps between validation losses; 0: never
    eval_tokens: int = 10_485_760  # tokens per validation loss; all, if there are fewer
    hellaswag_every: int = 250  # steps between HellaSwag evaluations; 0: never
    hellaswag_data: str = ""  # local HellaSwag .jsonl; empty: the official tasks, downloaded once
    sample_every: int = 250  # steps between samples; 0: never
    sample_prompt: str = "Hello, I'm a language model,"  # text that samples continue

    # Checkpoints and logs

    save_every: int = 1000  # steps between checkpoints; 0: never
    keep_checkpoints: int = 3  # recent checkpoints to keep, plus the best one; 0: keep all
    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


# --resume refuses to change these settings. The others may change. For example, a lower learning
# rate may save a run that diverges, and more steps make it longer.
# fmt: off
MUST_NOT_CHANGE = (
    "preset", "init", "seed", "shuffle", "n_layer", "n_head", "n_embd", "total_batch_size",
    "seq_len", "optimizer", "schedule", "warmup_steps", "weight_decay", "beta2",
)

# A preset replaces some of the defaults above.
PRESETS = {
    # GPT-2 small on 10 billion tokens. The values are GPT-3's (Brown et al. 2020, table 2.1 and
    # appendix B), as in Karpathy's build-nanogpt. They are the defaults above.
    "gpt2": {},
    # A model of 30 million parameters on 197 million tokens, for one T4. It has a higher learning
    # rate than gpt2, as is usual for smaller models.
    "small": dict(
        max_steps=3000, total_batch_size=65_536, seq_len=512, n_layer=6, n_head=6, n_embd=384,
        max_lr=1e-3, min_lr=1e-4, warmup_steps=150, eval_tokens=1_048_576, hellaswag_every=0,
        save_every=250,
    ),
    # A model of 3.4 million parameters that trains on Shakespeare in two minutes on two CPU cores.
    # Of the values tried, these reach the lowest loss in that time (bench/recipes/README.md). It is
    # not compiled, which would take another minute. ROOT is the folder of this repository.
    "shakespeare": dict(
        data=str(ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=32,
        n_layer=4, n_head=4, n_embd=64, compile="off",
        optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0, warmup_steps=20,
        warmdown_steps=450, beta2=0.995,
        eval_every=200, eval_tokens=32_768, hellaswag_every=0, sample_every=300,
        sample_prompt="", save_every=200,
    ),
}
# fmt: on


# --------------------------------------------------------------------------------------------------
# Optimizers and learning rate


def configure_optimizers(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """AdamW. With --optimizer muon, Muon (support/muon.py) takes over the linear layers inside the
    blocks. `dtype` is the precision of the model's matrix products.

    train() sets the learning rate of all groups to that of get_lr(). A group that you add may have
    a key that scales its rate: {"params": …, "lr_scale": 0.1}."""
    optimizers = []
    parameters = dict(model.named_parameters())
    if config.optimizer == "muon":
        modules = model.h.named_modules()
        names = [f"h.{name}.weight" for name, m in modules if isinstance(m, nn.Linear)]
        matrices = [parameters.pop(name) for name in names]
        # Its updates are scaled to the size of AdamW's, so both take the same learning rate. It
        # computes in bfloat16 if the model does. The range of float16 would be too small.
        muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        optimizers.append(Muon(matrices, config.max_lr, config.weight_decay, muon_dtype))
    # Matrices and embeddings decay. Biases and LayerNorms have one dimension and do not decay.
    decaying = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (0.9, config.beta2)
    # With fused=True one kernel updates all parameters, on any device.
    optimizers.append(torch.optim.AdamW(groups, config.max_lr, betas, eps=1e-8, fused=True))
    return optimizers


def get_lr(step: int, config: TrainConfig) -> float:
    """The learning rate of a step. It rises to max_lr in the warm-up, then falls to min_lr.

    With the schedule cosine it falls right after the warm-up (GPT-3, Brown et al. 2020, appendix
    B). With wsd it stays at max_lr and falls linearly in the last warmdown_steps. Before it falls,
    the run can still be made longer (Hägele et al. 2024, arXiv:2405.18392)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    if step >= config.max_steps:
        return config.min_lr
    steps_after_warmup = config.max_steps - config.warmup_steps
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / steps_after_warmup  # from 0 to 1
        height = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    else:
        steps_left = config.max_steps - step
        warmdown_steps = min(config.warmdown_steps, steps_after_warmup)
        height = 1.0 if steps_left >= warmdown_steps else steps_left / warmdown_steps
    return config.min_lr + height * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Evaluation. HellaSwag is in hellaswag.py.


@torch.no_grad()
def validation_loss(
    model: GPT, sequences: np.ndarray, B: int, ranks: Ranks, autocast: torch.autocast
) -> float:
    """The mean cross-entropy of sequences (N, T + 1), in nats per token. The ranks share them."""
    N = len(sequences)
    firsts = range(0, N, ranks.world_size * B)  # B sequences for each rank
    # All losses go into one tensor. Many small ones have fragmented a CPU's memory, by gigabytes.
    losses = torch.zeros(len(firsts), device=ranks.device)
    for i, first in enumerate(firsts):
        start = first + ranks.rank * B
        rows = sequences[start : start + B]
        n = len(rows)
        if n == 0:  # This is the last round, and there are no sequences left for this rank.
            break
        # The last batch may be smaller. Rows of zeros give it the shape for which the model was
        # compiled, and their targets of -100 are ignored.
        tokens = torch.zeros(B, sequences.shape[1], dtype=torch.int64)
        tokens[:n] = torch.from_numpy(rows)
        targets = tokens[:, 1:].clone()
        targets[n:] = -100
        with autocast:
            mean = model(tokens[:, :-1].to(ranks.device), targets.to(ranks.device))
        losses[i] = n * mean
    total = sum(losses.tolist())  # the only call that waits for the GPU
    return ranks.sum(total) / N


def is_due(every: int, step: int, config: TrainConfig) -> bool:
    """True at each multiple of `every`, and at the end of the run. With 0 it is never true."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


class Evaluations:
    """Validation loss, HellaSwag and samples, each at its own steps and after the last one.

    Each evaluation prints its result, and returns it as {name in log.txt: value}."""

    def __init__(
        self,
        config: TrainConfig,
        model: GPT,
        tokenizer: Tokenizer,
        ranks: Ranks,
        B: int,
        autocast: torch.autocast,
    ):
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.B = B
        self.autocast = autocast
        self.text_size = None  # bytes and characters of the validation data
        if config.eval_every:
            T = config.seq_len
            loader = DataLoaderLite(config.data, "val", B, T, shuffle=False)
            N = min(config.eval_tokens // T, loader.sequences_per_epoch)
            self.sequences = loader.read(0, N)  # (N, T + 1)
            self.text_size = measure_text(self.sequences[:, 1:].ravel(), tokenizer)
        if config.hellaswag_every:
            # The tokens of the tasks. [] if they cannot be downloaded, which prints a warning.
            self.tasks = hellaswag.load_tasks(
                config.hellaswag_data, tokenizer, model.config.block_size, ranks
            )

    def due(self, step: int) -> list[Callable[[int], dict[str, float]]]:
        """Return the evaluations that are due after `step` updates, in their order."""
        config = self.config
        due = []
        if is_due(config.eval_every, step, config):
            due.append(self.validate)
        if is_due(config.hellaswag_every, step, config) and self.tasks:
            due.append(self.score_hellaswag)
        if is_due(config.sample_every, step, config) and step > 0:
            due.append(self.sample)
        return due

    def validate(self, step: int) -> dict[str, float]:
        self.model.eval()
        loss = validation_loss(self.model, self.sequences, self.B, self.ranks, self.autocast)
        per_character = self.text_size.nats_per_character(loss)
        print0(f"step {step:5d} validation loss {loss:.4f}, {per_character:.4f} per character")
        return {"val": loss, "bpb": self.text_size.bits_per_byte(loss)}

    # The inputs below vary in length, and compiling for each length would take too long. So the
    # model runs uncompiled there.

    def score_hellaswag(self, step: int) -> dict[str, float]:
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):
            accuracy = hellaswag.accuracy(self.model, self.tasks, self.ranks, self.autocast)
        print0(f"step {step:5d} HellaSwag {accuracy:.4f}")
        return {"hella": accuracy}

    def sample(self, step: int) -> dict[str, float]:
        self.model.eval()
        prompt = self.config.sample_prompt
        with torch.compiler.set_stance("force_eager"):
            print_samples(self.model, self.tokenizer, prompt, self.ranks, self.autocast)
        return {}


# --------------------------------------------------------------------------------------------------
# Training


def model_config(config: TrainConfig, tokenizer: Tokenizer, weights: Path | None) -> GPTConfig:
    """The shape of the model to train. `weights` is the folder of the model to start from, or None.

    The context of that model may be longer than the sequences of this run, and its vocabulary
    larger than that of the tokenizer. Raises UserError if one of them is too small."""
    values = {"block_size": config.seq_len, "vocab_size": tokenizer.n_vocab}
    if weights:
        values = huggingface.fields_to_start_from(weights, GPTConfig, config, tokenizer)
    # n_layer, n_head and n_embd, and any field that you add to both classes, such as dropout
    shared = [field.name for field in fields(GPTConfig) if hasattr(config, field.name)]
    values |= {name: getattr(config, name) for name in shared}
    return GPTConfig(**values)


def choose_micro_batch(config: TrainConfig, ranks: Ranks, compiled: bool) -> tuple[int, int]:
    """Return B and the number of micro-steps: how each rank divides its sequences of a step.

    B is --micro-batch-size. With 0 it is the largest power of two that divides the sequences, with
    B * T at most 1,024 tokens on a CPU or MPS, and 16,384 on CUDA, or 65,536 as in Karpathy's
    lecture if every GPU has 70 GB and the model is compiled. GPT-2 (124M) is estimated to fit.

    Raises UserError if the step cannot be divided so."""
    T, device = config.seq_len, ranks.device
    tokens = 1024
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory  # bytes
        large = compiled and min(ranks.gather(memory)) >= 70e9
        tokens = 65_536 if large else 16_384
    B = config.micro_batch_size or 1
    divisor = B * T * ranks.world_size  # tokens per micro-step
    if config.total_batch_size % divisor:
        problem = f"is not a multiple of {divisor} (sequence x micro-batch x ranks)"
        nearest = max(round(config.total_batch_size / divisor), 1) * divisor
        remedy = f"the nearest that is: {nearest}"
        if config.resume:  # which keeps the total
            remedy = "give --micro-batch-size 0" if B > 1 else "use another number of ranks"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    sequences = config.total_batch_size // (T * ranks.world_size)  # of a step, on each rank
    if config.micro_batch_size == 0:
        largest = 1
        while 2 * largest * T <= tokens:
            largest *= 2
        B = math.gcd(sequences, largest)
    return B, sequences // B


def skips_update(step: int, loss: float, norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Whether a step must leave the weights as they are, because a gradient is not finite.

    In float16 gradients overflow from time to time. Then the step is skipped, and the scaler lowers
    its scale. In other precisions, and in float16 at a scale of 1, the model has diverged, and this
    raises RunError. `norm` is the norm of all gradients."""
    if math.isfinite(loss) and math.isfinite(norm):
        return False
    problem = f"the loss is {loss} and the norm of the gradients {norm}"
    if math.isfinite(loss) and scaler.get_scale() > 1:  # Without float16 the scale is always 1.
        print0(f"step {step:5d} skipped: {problem}")
        return True
    remedy = "so the model has diverged; lower --max-lr; --resume continues from a checkpoint"
    if step == 0:
        remedy = "before any update; check --init, and your change of the model or its loss"
    raise RunError(f"step {step}: {problem}, {remedy}")


def print_plan(config: TrainConfig, ranks: Ranks) -> None:
    """Print the first lines of a run, without its weights. Raises UserError as the run would."""
    weights = None  # the folder of the model to start from
    if config.resume:
        weights = newest_intact(Path(config.log_dir), ("config.json",))
    if weights is None and config.init != "scratch":
        weights = huggingface.find_model(config.init)
    with torch.device("meta"):  # tensors without memory
        model = GPT(model_config(config, open_tokenizer(config.data), weights))
    precision, device_line = devices.choose_precision(
        config.dtype, ranks.device, model.num_parameters()
    )
    compiled = devices.wants_compile(config.compile, ranks.device)
    B, micro_steps = choose_micro_batch(config, ranks, compiled)
    loader = None
    # The folder that fineweb.py would make may be missing, but not one that was named.
    if Path(config.data).exists() or config.data != TrainConfig.data:
        T = config.seq_len
        loader = DataLoaderLite(config.data, "train", B, T, shuffle=config.shuffle)
        if config.eval_every:
            DataLoaderLite(config.data, "val", B, T, shuffle=False)
    peak = devices.peak_flops(ranks.device, precision)
    sizes = (ranks.world_size, B, micro_steps)
    for line in first_lines(config, model, loader, device_line, peak, *sizes):
        print0(line)
    if loader:
        warn_of_settings(config, loader)


def train(config: TrainConfig, ranks: Ranks, run: RunFolder) -> int:
    """Train a model. Every rank calls this. Return the exit status of the process."""
    rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
    T = config.seq_len

    # ---- The model, with the weights of a checkpoint, or those of --init, or random ones
    # With --resume, the newest intact checkpoint, and the dictionary that save(), below, stores in
    # each. Without a checkpoint they are None and {}.
    checkpoint, saved = run.find_checkpoint()
    step = saved.get("step", 0)  # number of updates so far
    weights = checkpoint  # the folder of the model to start from, or None
    if checkpoint is None and config.init != "scratch":
        weights = huggingface.find_model_on_ranks(config.init, ranks)
    tokenizer = open_tokenizer(config.data)
    torch.manual_seed(config.seed)
    model = GPT(model_config(config, tokenizer, weights))
    model.low_memory = config.low_memory
    if weights:
        huggingface.load_weights(model, weights, resumed=checkpoint is not None)

    # ---- How to compute
    # Weights, LayerNorm statistics and losses are in float32. Under autocast matrix products are in
    # `dtype`: bfloat16 on GPUs that have it, float16 on older ones, and float32 elsewhere, but
    # bfloat16 for large models on CPUs on which it is faster. A resumed run keeps that choice.
    precision, device_line = ranks.on_rank_0(
        devices.choose_precision,
        config.dtype,
        device,
        model.num_parameters(),
        saved.get("precision"),
    )
    dtype = devices.dtype_of(precision)  # float32 for tf32
    devices.allow_tf32(precision, device)
    # The autocast context keeps a copy of the weights in `dtype` during a step.
    autocast = torch.autocast(
        device.type,
        dtype,
        enabled=dtype != torch.float32,
        cache_enabled=not config.low_memory,
    )
    if device.type == "cpu" and not config.low_memory:
        devices.keep_freed_memory()  # makes steps faster
    compiled = devices.wants_compile(config.compile, device)
    if compiled:
        # Each block is compiled by itself. All blocks run the same code, so torch compiles it once.
        # If an attribute differs between your blocks, such as a window, it compiles the code once
        # for each value. If you copy the model, for example to average its weights, the copy runs
        # uncompiled until you compile its blocks.
        for block in model.h:
            block.compile(dynamic=False)  # all batches have one shape
        model.loss = torch.compile(model.loss, dynamic=False)
    model.to(device)
    B, micro_steps = choose_micro_batch(config, ranks, compiled)

    # ---- Data, optimizers, evaluations
    loader = DataLoaderLite(
        config.data,
        "train",
        B,
        T,
        rank=rank,
        world_size=world_size,
        seed=config.seed,
        shuffle=config.shuffle,
        device=device,
    )
    optimizers = configure_optimizers(model, config, dtype)
    # The scaler keeps small float16 gradients from becoming 0. Otherwise it does nothing.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    evaluations = Evaluations(config, model, tokenizer, ranks, B, autocast)
    peak = devices.peak_flops(device, precision)
    progress = Progress(config, model, world_size, peak)  # measures the speed

    # ---- Restore the rest of the checkpoint. save(), below, stores the same things.
    if saved:
        run.check_same_shards(saved["shards"], loader.shard_sizes)
        loader.go_to(step * config.total_batch_size // T)
        # Raises UserError if the class or the parameters of an optimizer differ.
        load_optimizers(saved["optimizers"], optimizers, model)
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        progress.training_seconds = saved["training_seconds"]

    def save(step: int, required: bool) -> None:
        """Save a checkpoint, unless this step has one. If the disk is full, print a line, or raise
        UserError if the checkpoint is `required`. Rank 0 does the work."""
        state = {
            "step": step,
            "precision": precision,
            "shards": loader.shard_sizes,
            "optimizers": optimizer_states(optimizers, model),
            "scaler": scaler.state_dict(),  # {} if it is not float16
            "training_seconds": progress.training_seconds,
        }
        run.save_checkpoint(model, tokenizer, state, required)

    # ---- So far log_dir has only been created and locked. Now run.json and code/ are written, and
    # log.txt loses what this run will log again.
    about = {"init": str(weights or "scratch"), "device": device_line, "dtype": precision}
    sizes = (world_size, B, micro_steps)
    run.begin(model, **about, world_size=world_size, micro_batch_size=B)
    for line in first_lines(config, model, loader, device_line, peak, *sizes):
        print0(line)
    for line in more_lines(loader, optimizers):
        print0(line)
    if compiled:
        print0("torch.compile: on, so the first step takes longer")
    run.print_header(checkpoint)
    warn_of_settings(config, loader)
    warn_if_not_causal(model, autocast)

    ddp_model = model
    if world_size > 1:
        torch._dynamo.config.optimize_ddp = False  # or DDP would split the compiled blocks
        ddp_model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # gradients stay in DDP's own buffers
            # Without it DDP regroups its buckets after the first step. That changes the order of
            # summation, so a resumed run would round differently.
            find_unused_parameters=True,
        )

    # ---- The loop
    # From here on Ctrl-C and SIGTERM only set a flag. The ranks sum their flags after each update
    # and each evaluation, and stop together.
    with StopSignals() as signals, name_smaller_batch(B, config.low_memory):
        stop = 0.0  # the sum of the flags
        while True:
            due = evaluations.due(step)
            results = {}
            while due and not stop:
                result = due.pop(0)(step)
                run.log(step, **result)
                results |= result
                (stop,) = ranks.sum_all(signals.flag)
            if stop or step == config.max_steps:
                break

            # ---- One update of the weights -------------------------------------------------------
            began = time.perf_counter()
            lr = get_lr(step, config)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("lr_scale", 1.0)
            ranks.seed(config.seed, step)  # for dropout, if you add it
            model.train()
            loss_sum = torch.zeros((), device=device)
            for micro_step in range(micro_steps):
                x, y = loader.next_batch()  # (B, T) each
                # DDP averages the gradients over the ranks only in the last micro-step. Without DDP
                # this attribute has no effect.
                ddp_model.require_backward_grad_sync = micro_step == micro_steps - 1
                with autocast:
                    micro_loss = ddp_model(x, y)
                # The gradients of micro-steps add up, so each counts as its share of the mean.
                scaler.scale(micro_loss / micro_steps).backward()
                loss_sum += micro_loss.detach()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            # Each p.grad is now the mean over all micro-steps and ranks, the same on every rank.
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            # A single all-reduce sums the losses and the stop flags. It is the first call in a step
            # that waits for the GPU.
            total_loss, stop = ranks.sum_all(loss_sum, signals.flag)
            loss = total_loss / (micro_steps * world_size)
            norm = norm.item()
            if not skips_update(step, loss, norm, scaler):
                for optimizer in optimizers:
                    optimizer.step()  # like scaler.step(), since the gradients are finite
            scaler.update()  # after a skipped step it lowers the scale
            # Free the gradients, so that DDP copies new ones into its buckets in each step. If they
            # stayed there, it would round otherwise than in the first step after a resume.
            model.zero_grad(set_to_none=True)
            # ---- End of the update ---------------------------------------------------------------

            # On a GPU the optimizer may still be running. Its time counts as part of the next step.
            progress.end_step(step, began)
            print0(f"step {step:5d}/{config.max_steps} {progress.line(loss, lr, norm)}")
            # Any value that you add is logged under its name, and drawn in curves.png.
            run.log(step, train=loss, lr=lr, norm=norm, **progress.speed)
            step += 1
            if is_due(config.save_every, step, config):  # before an evaluation, which may fail
                save(step, required=step == config.max_steps)
        if stop and config.save_every:
            save(step, required=True)

    if stop and (due or step < config.max_steps):
        run.print_stop(step)
        return exit_status(stop)
    progress.print_results(results.get("val"), evaluations.text_size)
    if config.save_every:
        run.finish(model, step)  # draws curves.png, and prints how to sample from the model
    return 0


def main(args: list[str] | None = None) -> int:
    """Read the command line and train. Return the exit status."""
    # GPTConfig has the settings that --init takes from its model.
    config = read_config(args, TrainConfig, PRESETS, MUST_NOT_CHANGE, GPTConfig)
    # Before the process group starts: torch then keeps NCCL from NVLS, whose sums vary.
    torch.use_deterministic_algorithms(config.deterministic)
    ranks = Ranks.from_environment(config.device)
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo",
            store=open_store(ranks),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=PATIENCE,
            device_id=ranks.device if ranks.device.type == "cuda" else None,
        )
    status = 0
    if config.plan:
        print_plan(config, ranks)
    else:
        with RunFolder(config, ranks) as run:  # locks log_dir
            status = train(config, ranks, run)
    if dist.is_initialized():
        dist.destroy_process_group()  # with a DDP model left, this might hang
    return status


if __name__ == "__main__":
    run_and_exit(main)

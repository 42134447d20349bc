"""Train GPT-2 (124M) from scratch, and save it in Hugging Face's format.

    python train_gpt2.py      # a small GPT on Shakespeare, or GPT-2 if it finds a GPU and shards
    python train_gpt2.py --preset gpt2 --data my_shards   # GPT-2 on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py --preset gpt2     # on eight GPUs
    python train_gpt2.py --resume                         # continue the run in log/
    python train_gpt2.py --help                           # list every flag and its default

From top to bottom: the model, the data loader, the settings, the optimizers, the evaluations, and
the training loop. support/ handles files, processes and devices.

What to edit, here or in a copy:

    the architecture      Block, CausalSelfAttention, MLP, GPT.forward
    the loss              next_token_loss
    the optimizers        configure_optimizers
    the learning rate     get_lr
    one update            train(), between the two marks

The rest of the program calls GPT(config), model(idx), model(idx, targets), model(idx, at=...) and
model.generate(...), and reads model.h and model.config. docs/forking.md has tested examples.

At startup, each run checks whether your model still computes the same logits as GPT-2, and prints
the result. If it does not, Hugging Face cannot load its checkpoints, and sampling is slower because
it cannot use a KV cache. To use its checkpoints, pass your script to sample.py, hellaswag.py and
evaluate.py with --code my_copy.py. --resume still works as long as parameter names, shapes and
optimizers are unchanged.

Terms: the training data is a stream of uint16 tokens, split into files called shards. A step is one
update of the weights, computed from total_batch_size tokens. Steps are numbered from 0, and the
loss of a step is computed before its update. Each training process is a rank, usually with its own
GPU. Ranks share the tokens of a step equally. Each rank accumulates gradients over micro-batches
that fit into its memory.

Shapes: B sequences per micro-batch, T tokens per sequence, C channels (n_embd), nh heads of
hs = C / nh channels, V tokens in the vocabulary (50,257 in GPT-2).

Errors: a UserError is a mistake that the user can fix. A RunError is any other anticipated failure,
such as a non-finite loss. Both print one line. Anything else is a bug and prints a traceback."""

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

if __name__ == "__main__":  # Set these before importing torch, which reads them only once.
    # Threads wait at a barrier by spinning. The default of 300,000 spins starves other programs.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # With find_unused_parameters=True, DDP warns if a model has no unused parameters.
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
    run_and_exit,
    suggest_smaller_batch,
)
from support.files_and_locks import ROOT
from support.muon import Muon
from support.progress import Progress, describe_optimizer, first_lines
from support.ranks import COLLECTIVE_TIMEOUT, Ranks, open_store
from support.run_folder import RunFolder
from support.sampling import LastLogits, print_samples
from support.settings import read_config
from support.shards import check_tokens, open_split, open_tokenizer
from support.tokenizer import Tokenizer, measure_text

# --------------------------------------------------------------------------------------------------
# Model: section 2.3 of "Language Models are Unsupervised Multitask Learners" (Radford et al. 2019)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are those of GPT-2 small (124,439,808 parameters)."""

    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50257  # 256 bytes, 50,000 merged pairs and <|endoftext|>
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_embd: int = 768  # channels


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention. (B, T, C) -> (B, T, C)"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # queries, keys, values
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # mixes the heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        nh = self.n_head
        hs = C // nh
        q, k, v = self.c_attn(x).split(C, dim=-1)  # (B, T, C) each
        q = q.view(B, T, nh, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, nh, hs).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, nh, hs).transpose(1, 2)  # (B, nh, T, hs)
        # softmax(q k^T / sqrt(hs)) v, without materializing the (T, T) matrix
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)  # concatenate the heads
        return self.c_proj(y)


class MLP(nn.Module):
    """Two linear layers with a tanh-approximated GELU in between. (B, T, C) -> (B, T, C)"""

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
        x = x + self.attn(self.ln_1(x))  # mix tokens
        return x + self.mlp(self.ln_2(x))  # process each token by itself


def next_token_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of targets (B, T) given x (B, T, C), as a scalar, in nats.

    The logits are x times the transpose of `head` (V, C). Targets of -100 are ignored. In training,
    the result is logged as `train`.

    GPUs multiply matrices faster if V is a multiple of 64, which 50,257 is not. So this function
    pads a copy of `head` with zero rows, and masks their logits with a bias of -inf. In Karpathy's
    lecture, padding made a step on an A100 3% faster. The model itself is not padded, because
    Hugging Face expects 50,257 rows. If your loss touches every logit (e.g. label smoothing), drop
    the padding first: logits[:, :V]."""
    V = head.size(0)
    padding = -V % 64  # rows
    padded_head = F.pad(head, (0, 0, 0, padding))  # (V + padding, C)
    bias = F.pad(x.new_zeros(V), (0, padding), value=-math.inf)  # (V + padding,)
    logits = F.linear(x.flatten(0, 1), padded_head, bias)  # (B * T, V + padding)
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100)


class GPT(nn.Module):
    """GPT-2, with the parameter names of OpenAI's and Hugging Face's code."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.loss = next_token_loss  # compiled in train()
        self.low_memory = False  # activation checkpointing, set in train()
        self.use_kv_cache = False  # set by kv_cache_for_gpt2(), in support/sampling.py

        # LayerNorm keeps its default initialization (weight 1, bias 0).
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02  # as in Hugging Face's code
                if name.endswith("c_proj"):
                    # Two layers of each block add to the residual stream. Scale them down so that
                    # its variance does not grow with depth (section 2.3 of the paper).
                    std /= math.sqrt(2 * config.n_layer)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head(self) -> Tensor:
        """The output projection (V, C), tied to the token embedding."""
        return self.wte.weight

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, at: tuple | None = None
    ) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T) or, given targets (B, T), the mean loss.

        Sampling and HellaSwag need logits at only a few positions. `at` indexes (B, T) to select
        them, e.g. (slice(None), -1) for the last position of each row."""
        T = idx.size(1)
        if self.config.block_size < T:
            raise UserError(f"{T} tokens exceed the context window of {self.config.block_size}")
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
        """Sample up to max_new_tokens tokens after idx (B, T). Return idx followed by them.

        Each token is sampled from the top_k likeliest ones. top_k=0 samples from the whole
        vocabulary, and temperature=0 takes the likeliest token. With one generator per row, a
        sample does not depend on the batch size. on_token(tokens) is called with each new column
        (B,), and ends sampling by returning True.

        sample.py and training runs sample with this method, inside `kv_cache_for_gpt2(model)`."""
        k = min(top_k, self.config.vocab_size) or self.config.vocab_size
        if temperature == 0:
            k, temperature = 1, 1.0
        last_logits = LastLogits(self)
        for _ in range(max_new_tokens):
            logits, candidates = (last_logits(idx) / temperature).topk(k)  # (B, k) each
            p = logits.softmax(-1)
            if not p.isfinite().all():
                raise RunError("non-finite logits: the model has diverged")
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
        """Return the training FLOPs per token, 6 N + 12 L C T, where L is n_layer and N counts the
        weights of linear layers and of the head (PaLM, Chowdhery et al. 2022, appendix B)."""
        weights = {m.weight for m in self.modules() if isinstance(m, nn.Linear)} | {self.head}
        N = sum(weight.numel() for weight in weights)
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """Load a model in Hugging Face's format and put it in eval mode. `name` is a model folder,
        a run's folder, a name on the Hub (e.g. gpt2-medium), or a .pt file from build-nanogpt or
        nanoGPT."""
        return huggingface.load_model(cls, GPTConfig, name)

    def save_pretrained(self, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
        """Save the model in Hugging Face's format, plus the tokenizer's files if one is given."""
        huggingface.save_model(self, folder, tokenizer)


# --------------------------------------------------------------------------------------------------
# Data


@functools.lru_cache(maxsize=4)
def permutation(n: int, *seed: int) -> np.ndarray:
    """Return a random permutation of range(n), shape (n,), determined by n and the seed."""
    # RandomState draws the same numbers in every version of NumPy.
    return np.random.RandomState(seed).permutation(n)


@functools.lru_cache(maxsize=4)
def random_below(n: int, *seed: int) -> int:
    """Return a random integer in [0, n), determined by n and the seed."""
    return np.random.RandomState(seed).randint(n)


class DataLoaderLite:
    """Batches of sequences and their targets, epoch after epoch.

    Every shard is cut into sequences of T tokens. With shuffle=True, each epoch visits the shards
    in random order, and the sequences of each shard in random order. It also shifts the cuts by a
    random offset in [0, T), so that epochs see different sequences. This helps a model that reads a
    small text many times.

    Sequences are numbered in this order across all epochs. Sequence i is a function of i, the seed
    and the data. Rank 0 reads the first B sequences, rank 1 the next B, and so on. With N sequences
    per step, step s reads sequences s * N to (s + 1) * N - 1, regardless of B and the number of
    ranks. So the step alone tells a resumed run its position in the data. A batch may span two
    shards or two epochs."""

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
        """Open a split, "train" or "val", of a folder of uint16 shards or of a .txt file.

        A .txt file is tokenized with GPT-2's tokenizer, and its last tenth is the validation split.
        Batches are moved to `device`. shuffle=False reads everything in order. Raises UserError if
        the data is missing, damaged or too small."""
        self._B = B  # sequences per batch
        self._T = T  # tokens per sequence
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.device = torch.device(device)
        self.vocab_size = open_tokenizer(data).n_vocab
        # Shards are memory-mapped: only what is used is read from disk. A .txt file is one shard.
        self.paths, self.shards = open_split(data, split, self.vocab_size)
        sizes = np.array([len(tokens) for tokens in self.shards])
        # Sequences per shard, for any offset. The last token of a shard is only a target.
        largest_offset = T - 1 if shuffle else 0
        self.counts = np.maximum(sizes - 1 - largest_offset, 0) // T
        self.sequences_per_epoch = int(self.counts.sum())
        if self.sequences_per_epoch == 0:
            problem = f"{sizes.sum()} {split} tokens are too few for sequences of {T}"
            raise UserError(f"{data}: {problem}; use more text or a smaller --seq-len")
        self.tokens_per_epoch = self.sequences_per_epoch * T
        # --resume compares names relative to `data`, because `data` itself may have moved.
        names = [path.relative_to(data).as_posix() for path in self.paths]
        self.shard_sizes = list(zip(names, sizes.tolist(), strict=True))
        self.thread = ThreadPoolExecutor(max_workers=1)  # prefetches while the device computes
        self.go_to(0)

    @property
    def B(self) -> int:
        return self._B

    @property
    def T(self) -> int:
        return self._T

    def go_to(self, n: int) -> None:
        """Continue as if all ranks together had read n sequences, and prefetch the next batch."""
        self.sequences_read = n
        self.prefetched = self.thread.submit(self.read, n + self.rank * self.B, self.B)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return this rank's next inputs and targets, (B, T) int64 each."""
        tokens = torch.from_numpy(self.prefetched.result())  # (B, T + 1)
        self.go_to(self.sequences_read + self.B * self.world_size)
        if self.device.type == "cuda":
            # Pinned memory makes this copy asynchronous.
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        else:
            tokens = tokens.to(self.device)
        # The target of each token is the token after it.
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def read(self, first: int, n: int) -> np.ndarray:
        """Return n sequences, beginning with number `first`, (n, T + 1) int64.

        The last token of each is only a target."""
        return np.stack([self.sequence(i) for i in range(first, first + n)]).astype(np.int64)

    def sequence(self, number: int) -> np.ndarray:
        """Return a sequence, (T + 1,) uint16. Raises UserError if its shard is damaged."""
        epoch, i = divmod(number, self.sequences_per_epoch)
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = permutation(len(self.shards), self.seed, epoch)
        # Find the shard that contains sequence i of this epoch, and its number within the shard.
        ends = self.counts[order].cumsum()  # cumulative sequence counts
        visit = ends.searchsorted(i, side="right")
        shard = order[visit]
        i -= ends[visit] - self.counts[shard]
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


# Each field is a flag, e.g. --max-steps. tyro takes its help text from the comment.
@dataclass
class TrainConfig:
    """The settings of a run. Each value comes from the first of these that sets it:

    1. the command line,
    2. the run in log_dir, with --resume, or the config.json of the model, with --init,
    3. the preset,
    4. the default below."""

    # What to train on, and where to start

    preset: Preset = "auto"  # a recipe; auto: gpt2 with a GPU and shards in data, else shakespeare
    data: str = "edu_fineweb10B"  # folder of token shards, or a .txt file
    init: str = "scratch"  # scratch, a model folder, or a name on the Hub, e.g. gpt2-medium
    log_dir: str = "log"  # output folder; must not hold a run unless --resume is given
    resume: bool = False  # continue from the newest checkpoint in log_dir; if none, start a run
    plan: bool = False  # print the run's first lines (FLOPs, memory, epochs, time), then exit
    seed: int = 1337  # for the initial weights and the data order
    shuffle: bool = True  # shuffle shards and sequences in every epoch

    # The shape of the model

    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # number of channels (C)

    # Batches and optimization

    max_steps: int = 19_073  # number of updates; 19,073 is one epoch of 10 billion tokens
    epochs: float = 0.0  # train for this many epochs of the data; 0: train for max_steps
    total_batch_size: int = 524_288  # tokens per update, over all ranks and micro-batches
    seq_len: int = 1024  # tokens per sequence (T)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the linear layers inside the blocks
    max_lr: float = 6e-4  # peak learning rate; lower it if the loss diverges
    min_lr: float = 6e-5  # final learning rate
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warm-up, stable, decay (see get_lr)
    warmup_steps: int = 715  # length of the linear warm-up, in steps; 715 in GPT-3
    warmdown: float = 0.25  # wsd only: length of the final linear decay, as a share of the run
    weight_decay: float = 0.1  # decoupled weight decay of matrices and embeddings
    beta2: float = 0.95  # decay rate of AdamW's second moment
    grad_clip: float = 1.0  # clip the global gradient norm to this; 0: no clipping

    # Speed and memory

    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Dtype = "auto"  # of matmuls; auto: bfloat16 or float16 on CUDA, else usually float32
    micro_batch_size: int = 0  # sequences per forward pass (B); 0: see choose_micro_batch
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on for CUDA with Triton
    low_memory: bool = False  # activation checkpointing
    deterministic: bool = False  # deterministic GPU kernels, so that resuming is bit-exact

    # Evaluations and samples

    eval_every: int = 250  # steps between validation losses; 0: never
    eval_tokens: int = 10_485_760  # tokens per validation pass, at most the whole split
    hellaswag_every: int = 250  # steps between HellaSwag evaluations; 0: never
    hellaswag_data: str = ""  # local HellaSwag .jsonl; empty: the official tasks, downloaded once
    sample_every: int = 250  # steps between samples; 0: never
    sample_prompt: str = "Hello, I'm a language model,"  # text to continue

    # Checkpoints and logs

    save_every: int = 1000  # steps between checkpoints; 0: never
    keep_checkpoints: int = 3  # newest checkpoints to keep, plus the best one; 0: keep all
    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases

    @property
    def warmdown_steps(self) -> int:
        """The length of the final linear decay of the wsd schedule, in steps."""
        steps_after_warmup = max(self.max_steps - self.warmup_steps, 0)
        return min(round(self.warmdown * self.max_steps), steps_after_warmup)


# --resume rejects changes to these settings, which define the experiment, and to the training data.
# Other settings may change: for example, lower max_lr to rescue a diverging run, or raise max_steps
# to extend one.
# fmt: off
MUST_NOT_CHANGE = (
    "preset", "init", "seed", "shuffle", "n_layer", "n_head", "n_embd", "total_batch_size",
    "seq_len", "optimizer", "schedule", "warmup_steps", "weight_decay", "beta2",
)

# A preset overrides some of the defaults above.
PRESETS = {
    # GPT-2 small on 10 billion tokens. The values are GPT-3's (Brown et al. 2020, table 2.1 and
    # appendix B), as in Karpathy's build-nanogpt. They are the defaults above.
    "gpt2": {},
    # 30 million parameters on 197 million tokens, for one T4. Smaller models usually take a higher
    # learning rate.
    "small": dict(
        max_steps=3000, total_batch_size=65_536, seq_len=512, n_layer=6, n_head=6, n_embd=384,
        max_lr=1e-3, min_lr=1e-4, warmup_steps=150, eval_tokens=1_048_576, hellaswag_every=0,
        save_every=250,
    ),
    # 3.4 million parameters on Shakespeare, in two minutes on two CPU cores. Of the values tried,
    # these reach the lowest loss in that time (bench/recipes/README.md). Compiling would take
    # another minute. ROOT is the folder of this repository.
    "shakespeare": dict(
        data=str(ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=32,
        n_layer=4, n_head=4, n_embd=64, compile="off",
        optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0, warmup_steps=20,
        warmdown=0.75, beta2=0.995,
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
    """Return [AdamW], or [Muon, AdamW] with --optimizer muon.

    Muon (support/muon.py) takes the 2-D weights of the linear layers inside the blocks. `dtype` is
    the autocast dtype. train() sets the learning rate of every group from get_lr(). To scale the
    rate of a group that you add, give it a factor: {"params": ..., "lr_scale": 0.1}. Muon takes
    matrices only, so a 3-D weight that you add goes to AdamW, with weight decay."""
    optimizers = []
    parameters = dict(model.named_parameters())
    if config.optimizer == "muon":
        modules = model.h.named_modules()
        names = [f"h.{name}.weight" for name, m in modules if isinstance(m, nn.Linear)]
        matrices = [parameters.pop(name) for name in names]
        # Muon scales its updates to match the RMS of AdamW's, so both use the same learning rate.
        # The range of float16 is too small for Muon, so it runs in float32 instead.
        muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        optimizers.append(Muon(matrices, config.max_lr, config.weight_decay, muon_dtype))
    # Decay matrices, embeddings and tensors with more dimensions, but not biases or LayerNorms.
    decay = [p for p in parameters.values() if p.dim() >= 2]
    no_decay = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    betas = (0.9, config.beta2)
    # fused=True updates each parameter group with a single fused call, on any device.
    optimizers.append(torch.optim.AdamW(groups, config.max_lr, betas, eps=1e-8, fused=True))
    return optimizers


def get_lr(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear warm-up to max_lr, then decay to min_lr.

    The cosine schedule decays right after the warm-up (GPT-3, Brown et al. 2020, appendix B). wsd
    stays at max_lr, then decays linearly over the last warmdown_steps. Until the decay begins,
    max_steps can still be raised (Hägele et al. 2024, arXiv:2405.18392)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    if step >= config.max_steps:
        return config.min_lr
    if config.schedule == "cosine":
        steps_after_warmup = config.max_steps - config.warmup_steps
        progress = (step - config.warmup_steps) / steps_after_warmup  # from 0 to 1
        coeff = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    else:
        steps_left = config.max_steps - step
        coeff = min(steps_left / max(config.warmdown_steps, 1), 1.0)
    return config.min_lr + coeff * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Evaluation. HellaSwag is in hellaswag.py.


@torch.no_grad()
def validation_loss(
    model: GPT, sequences: np.ndarray, B: int, ranks: Ranks, autocast: torch.autocast
) -> float:
    """Return the mean loss of sequences (N, T + 1), in nats per token. Ranks share the work."""
    N = len(sequences)
    firsts = range(0, N, ranks.world_size * B)  # B sequences for each rank
    # Preallocate: with a small tensor per batch, fragmentation grew the CPU heap by gigabytes.
    losses = torch.zeros(len(firsts), device=ranks.device)
    for i, first in enumerate(firsts):
        start = first + ranks.rank * B
        rows = sequences[start : start + B]
        n = len(rows)
        if n == 0:  # last round: no sequences are left for this rank
            break
        # Pad the last batch to the shape for which the model was compiled. Targets of -100 are
        # ignored.
        tokens = torch.zeros(B, sequences.shape[1], dtype=torch.int64)
        tokens[:n] = torch.from_numpy(rows)
        targets = tokens[:, 1:].clone()
        targets[n:] = -100
        with autocast:
            mean = model(tokens[:, :-1].to(ranks.device), targets.to(ranks.device))
        losses[i] = n * mean
    total = sum(losses.tolist())  # read the losses from the GPU once, after the last batch
    return ranks.sum(total) / N


def is_due(every: int, step: int, config: TrainConfig) -> bool:
    """Return whether `step` is a multiple of `every` or the end of the run. 0 means never."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


class Evaluations:
    """Validation loss, HellaSwag and samples, each on its own schedule, plus once at the end.

    Each evaluation prints its result and returns {name in log.txt: value}."""

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
        self.text_size = None  # size of the validation text in bytes and characters
        if config.eval_every:
            T = config.seq_len
            loader = DataLoaderLite(config.data, "val", B, T, shuffle=False)
            N = min(config.eval_tokens // T, loader.sequences_per_epoch)
            self.sequences = loader.read(0, N)  # (N, T + 1)
            self.text_size = measure_text(self.sequences[:, 1:].ravel(), tokenizer)
        if config.hellaswag_every:
            self.tasks = hellaswag.load_tasks(
                config.hellaswag_data, tokenizer, model.config.block_size, ranks
            )

    def due(self, step: int) -> list[Callable[[int], dict[str, float]]]:
        """Return the evaluations that are due after `step` updates."""
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

    # HellaSwag and samples run in eager mode, because every new length would trigger a recompile.

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


def model_config(config: TrainConfig, tokenizer: Tokenizer, init_folder: Path | None) -> GPTConfig:
    """Return the shape of the model to train.

    `init_folder` contains the model to start from, if any. Its context window may exceed seq_len,
    and its vocabulary the tokenizer's. Raises UserError if either is too small."""
    values = {"block_size": config.seq_len, "vocab_size": tokenizer.n_vocab}
    if init_folder:
        values = huggingface.fields_to_start_from(init_folder, GPTConfig, config, tokenizer)
    # n_layer, n_head, n_embd, and any field that you add to both classes, e.g. dropout
    shared = [field.name for field in fields(GPTConfig) if hasattr(config, field.name)]
    values |= {name: getattr(config, name) for name in shared}
    return GPTConfig(**values)


def choose_micro_batch(config: TrainConfig, ranks: Ranks, compiled: bool) -> tuple[int, int]:
    """Return B and the number of micro-steps per rank per step.

    B is --micro-batch-size or, if that is 0, the largest power of two that divides the number of
    sequences per rank per step and keeps a micro-batch within 1,024 tokens on CPUs and MPS, or
    16,384 on CUDA, but at least 1. If every GPU has at least 70 GB and the model is compiled, the
    limit is 65,536, as in Karpathy's lecture. Raises UserError if total_batch_size is not a
    multiple of B * T * ranks."""
    T, device = config.seq_len, ranks.device
    tokens = 1024
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory  # bytes
        large = compiled and min(ranks.gather(memory)) >= 70e9
        tokens = 65_536 if large else 16_384
    B = config.micro_batch_size or 1
    divisor = B * T * ranks.world_size  # tokens per micro-step
    if config.total_batch_size % divisor:
        problem = f"is not a multiple of {divisor} (sequence length x micro-batch size x ranks)"
        nearest = max(round(config.total_batch_size / divisor), 1) * divisor
        remedy = f"the nearest multiple is {nearest}"
        if config.resume:  # --resume cannot change the total batch size
            remedy = "use --micro-batch-size 0" if B > 1 else "use a different number of ranks"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    sequences = config.total_batch_size // (T * ranks.world_size)  # per rank per step
    if config.micro_batch_size == 0:
        largest = 2 ** int(math.log2(max(tokens // T, 1)))
        B = math.gcd(sequences, largest)
    return B, sequences // B


def should_skip_update(step: int, loss: float, norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Return whether to skip this update because of non-finite gradients. If so, print a line.

    float16 gradients overflow from time to time. The scaler then lowers its scale. In other
    precisions, in float16 at a scale of 1, and whenever the loss is non-finite, the model has
    diverged, so this raises RunError. `norm` is the global gradient norm."""
    if math.isfinite(loss) and math.isfinite(norm):
        return False
    problem = f"loss {loss}, gradient norm {norm}: non-finite"
    if math.isfinite(loss) and scaler.get_scale() > 1:  # Without float16 the scale is always 1.
        print0(f"step {step:5d} skipped: {problem}")
        return True
    remedy = "so the model has diverged; lower --max-lr; --resume continues from a checkpoint"
    if step == 0:
        remedy = "before any update; check --init, and your changes to the model or its loss"
    raise RunError(f"step {step}: {problem}, {remedy}")


def tokens_per_epoch(config: TrainConfig) -> int:
    """Return the number of tokens that an epoch of the data trains on, for --epochs."""
    loader = DataLoaderLite(config.data, "train", 1, config.seq_len, shuffle=config.shuffle)
    return loader.tokens_per_epoch


def print_plan(config: TrainConfig, ranks: Ranks) -> None:
    """Print the first lines of a run without training. Raises UserError as the run would."""
    init_folder = None  # contains the model to start from
    if config.resume:
        init_folder = newest_intact(Path(config.log_dir))
    if init_folder is None and config.init != "scratch":
        init_folder = huggingface.find_model(config.init)
    with torch.device("meta"):  # allocates no memory
        model = GPT(model_config(config, open_tokenizer(config.data), init_folder))
    precision, device_line = devices.choose_precision(
        config.dtype, ranks.device, model.num_parameters()
    )
    compiled = devices.wants_compile(config.compile, ranks.device)
    B, micro_steps = choose_micro_batch(config, ranks, compiled)
    loader = None
    # Only the default folder may be missing, because fineweb.py may not have made it yet.
    if Path(config.data).exists() or config.data != TrainConfig.data:
        T = config.seq_len
        loader = DataLoaderLite(config.data, "train", B, T, shuffle=config.shuffle)
        if config.eval_every:
            DataLoaderLite(config.data, "val", B, T, shuffle=False)
    peak = devices.peak_flops(ranks.device, precision)
    sizes = (ranks.world_size, B, micro_steps)
    for line in first_lines(config, model, loader, device_line, peak, *sizes):
        print0(line)


def train(config: TrainConfig, ranks: Ranks, run: RunFolder) -> int:
    """Train a model. Every rank calls this. Return the exit status of the process."""
    rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
    T = config.seq_len

    # ---- The model, with random weights or those of a checkpoint or --init
    # The newest intact checkpoint folder and the state written by save() below, or None and {}
    # without --resume or if there is no checkpoint.
    checkpoint, saved = run.find_checkpoint()
    step = saved.get("step", 0)  # number of updates so far
    init_folder = checkpoint  # contains the model to start from, if any
    if checkpoint is None and config.init != "scratch":
        init_folder = huggingface.find_model_on_ranks(config.init, ranks)
    tokenizer = open_tokenizer(config.data)
    torch.manual_seed(config.seed)
    model = GPT(model_config(config, tokenizer, init_folder))
    model.low_memory = config.low_memory
    if init_folder:
        huggingface.load_weights(model, init_folder, resumed=checkpoint is not None)

    # ---- Precision, compilation, device
    # Weights, LayerNorm statistics and losses are float32. Autocast runs matmuls in `dtype`, by
    # default bfloat16 on GPUs that support it, float16 on older ones, usually float32 elsewhere.
    precision, device_line = ranks.on_rank_0(
        devices.choose_precision,
        config.dtype,
        device,
        model.num_parameters(),
        saved.get("precision"),
    )
    dtype = devices.dtype_of(precision)  # float32 for tf32
    devices.allow_tf32(precision, device)
    # Autocast's cache keeps a copy of the weights in `dtype` during each forward pass.
    autocast = torch.autocast(
        device.type,
        dtype,
        enabled=dtype != torch.float32,
        cache_enabled=not config.low_memory,
    )
    if device.type == "cpu" and not config.low_memory:
        devices.keep_freed_memory()
    compiled = devices.wants_compile(config.compile, device)
    if compiled:
        # Compile block by block. All blocks run the same code, so torch compiles it once, or once
        # per distinct value if blocks differ in an attribute (e.g. window size). A copy of the
        # model, e.g. for averaged weights, runs in eager mode until you compile its blocks.
        for block in model.h:
            block.compile(dynamic=False)  # all batches share one shape
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
    # Keeps small float16 gradients from underflowing. A no-op in other precisions.
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    evaluations = Evaluations(config, model, tokenizer, ranks, B, autocast)
    peak = devices.peak_flops(device, precision)
    progress = Progress(config, model, world_size, peak)  # measures the speed

    # ---- Restore the rest of the checkpoint. Keep in sync with save() below.
    if saved:
        run.check_same_shards(saved["shards"], loader.shard_sizes)
        loader.go_to(step * config.total_batch_size // T)
        # Raises UserError if an optimizer's class or parameters differ.
        load_optimizers(saved["optimizers"], optimizers, model)
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        progress.training_seconds = saved["training_seconds"]

    def save(step: int, required: bool) -> None:
        """Save a checkpoint. If it is `required`, a full disk ends the run."""
        state = {
            "step": step,
            "precision": precision,
            "shards": loader.shard_sizes,
            "optimizers": optimizer_states(optimizers, model),
            "scaler": scaler.state_dict(),  # {} unless float16
            "training_seconds": progress.training_seconds,
        }
        run.save_checkpoint(model, tokenizer, state, required)

    # ---- So far log_dir has only been created and locked. begin() is the first to write to it.
    about = {"init": str(init_folder or "scratch"), "device": device_line, "dtype": precision}
    sizes = (world_size, B, micro_steps)
    run.begin(model, **about, world_size=world_size, micro_batch_size=B)
    for line in first_lines(config, model, loader, device_line, peak, *sizes):
        print0(line)
    for optimizer in optimizers:
        print0(f"optimizer: {describe_optimizer(optimizer)}")
    if compiled:
        print0("torch.compile: on; the first step takes longer")
    run.print_header(checkpoint)

    ddp_model = model
    if world_size > 1:
        torch._dynamo.config.optimize_ddp = False  # otherwise it would split the compiled blocks
        ddp_model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # after backward(), p.grad is a view into DDP's buckets
            # Otherwise DDP rebuilds its buckets after the first step. That changes the order of
            # summation, so a resumed run would round differently.
            find_unused_parameters=True,
        )

    # ---- The loop
    # From here on, the first Ctrl-C or SIGTERM only sets a flag. An all-reduce sums the flags in
    # each update and after each evaluation, so that all ranks stop together.
    with StopSignals() as signals, suggest_smaller_batch(B):
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
            ranks.seed(config.seed, step)  # for dropout, if you add any
            model.train()
            loss_sum = torch.zeros((), device=device)
            for micro_step in range(micro_steps):
                x, y = loader.next_batch()  # (B, T) each
                # All-reduce gradients only in the last micro-step. A no-op without DDP.
                ddp_model.require_backward_grad_sync = micro_step == micro_steps - 1
                with autocast:
                    micro_loss = ddp_model(x, y)
                # backward() sums gradients over micro-steps, so divide to get their mean. Until the
                # last micro-step, p.grad is the sum on this rank alone, times the scaler's scale.
                scaler.scale(micro_loss / micro_steps).backward()
                loss_sum += micro_loss.detach()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            # Each p.grad is now the mean over all micro-steps and ranks, the same on every rank.
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            # Sum the losses and the stop flags in a single all-reduce. Reading the sums is the
            # first synchronization with the GPU in a step.
            total_loss, stop = ranks.sum_all(loss_sum, signals.flag)
            loss = total_loss / (micro_steps * world_size)
            norm = norm.item()
            if not should_skip_update(step, loss, norm, scaler):
                for optimizer in optimizers:
                    optimizer.step()  # scaler.step() would check again for non-finite gradients
            scaler.update()  # lowers the scale after a skipped update, or raises it now and then
            # Free the gradients, so that DDP copies new ones into its buckets in every step, as it
            # does in the first one. Accumulating into reused views would round differently.
            model.zero_grad(set_to_none=True)
            # ---- End of the update ---------------------------------------------------------------

            # On a GPU the optimizer may still be running. Its time is counted in the next step.
            progress.end_step(step, began)
            print0(f"step {step:5d}/{config.max_steps} {progress.line(loss, lr, norm)}")
            # Add any value here: it is logged under its name, without spaces, and plotted in
            # curves.png. It may be absent from some steps.
            run.log(step, train=loss, lr=lr, norm=norm, **progress.speed)
            step += 1
            if is_due(config.save_every, step, config):  # before an evaluation, which may fail
                save(step, required=step == config.max_steps)
        if config.save_every:
            save(step, required=True)  # after a signal, or with --max-steps 0

    if stop and (due or step < config.max_steps):
        run.print_stop(step)
        return exit_status(stop)
    progress.print_results(results.get("val"), evaluations.text_size)
    if config.save_every:
        run.finish(model, step)  # plots curves.png, and prints how to sample from the model
    return 0


def main(args: list[str] | None = None) -> int:
    """Read the command line and train. Return the exit status."""
    config = read_config(args, TrainConfig, PRESETS, MUST_NOT_CHANGE, GPTConfig, tokens_per_epoch)
    # Set before the process group starts: deterministic mode keeps NCCL from using NVLS, whose sums
    # vary from run to run.
    torch.use_deterministic_algorithms(config.deterministic)
    ranks = Ranks.from_environment(config.device)
    if "RANK" in os.environ:  # started by torchrun or examples/slurm.sh
        gpu = ranks.device.type == "cuda"
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=open_store(ranks),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=ranks.device if gpu else None,
        )
    status = 0
    if config.plan:
        print_plan(config, ranks)
    else:
        with RunFolder(config, ranks, args) as run:  # creates and locks log_dir
            status = train(config, ranks, run)
    if dist.is_initialized():
        dist.destroy_process_group()  # may hang while a DDP model is alive, so not in train()
    return status


if __name__ == "__main__":
    run_and_exit(main)

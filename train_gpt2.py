"""Trains GPT-2 (124M) from scratch and saves it in Hugging Face's format.

    python train_gpt2.py                  # GPT-2 if edu_fineweb10B/ has data, else Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards   # GPT-2 on one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py --preset gpt2     # on eight GPUs
    python train_gpt2.py --resume                         # continues the run in log/
    python train_gpt2.py --help                           # every flag and its default

From top to bottom, this file has the model, the data loader, the settings, the optimizers, the
evaluations, and the training loop. Files, processes and devices are handled in support/.

To try an idea, copy this file to my_idea.py, in the same folder, and change the copy. You can stop
a run, edit my_idea.py, and go on with --resume, but these edits have consequences:
- If a parameter is added, removed, renamed or reshaped, older checkpoints cannot be loaded.
- If an optimizer is replaced, or gets other parameters, older checkpoints cannot be resumed.
- If the model computes something else than GPT-2, its checkpoints are not GPT-2s for Hugging Face.
  Then sample.py and hellaswag.py need --code my_idea.py.
- If you rename the file and change it, --resume takes it for another experiment and refuses.

Terms: tokens are stored in files that are called shards. A step is one update of the weights, from
total_batch_size tokens. The loss of step 0 is that of the initial weights. The processes that train
together are called ranks, and usually each has a GPU. They share the tokens of a step equally. Each
rank divides its share into micro-batches that fit into its memory, and adds up their gradients.

Shapes: B sequences per micro-batch, T tokens per sequence, C channels (n_embd), nh heads of
hs = C / nh channels, V tokens in the vocabulary (GPT-2's has 50,257).

A UserError is something that the user can fix. A RunError is anything else that ends a run, such as
a loss that is not finite. Both are printed as one line, without a traceback."""

import math
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hellaswag
from support import checkpoints, devices, forks, huggingface, plan
from support.command_line import absolute, flag, parse_args, print0, print_line, range_problems
from support.errors_and_signals import (
    RunError,
    UserError,
    collect_stop_signals,
    is_out_of_memory,
    run_and_exit,
    status_after_signal,
    stop_requested,
)
from support.files_and_locks import ROOT
from support.micro_batch import choose_micro_batch
from support.muon import Muon
from support.progress import Progress, print_cost, print_header, print_validation
from support.ranks import Ranks, settle_buckets
from support.run_folder import RunFolder, read_run
from support.shards import check_tokens, holds_shards, open_split, open_tokenizer
from support.tokenizer import Tokenizer, encode_prompt, printable, text_size

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
    """Multi-head self-attention to the same and earlier tokens. (B, T, C) -> (B, T, C)"""

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


class Head(nn.Linear):
    """The last layer. It computes the logits of the next token or, with targets, their loss."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T, C) -> logits (B, T, V), or the mean cross-entropy over the targets (B, T).

        Targets of -100 do not count."""
        if targets is None:
            return F.linear(x, self.weight)
        # The loss is computed from the same logits. But a GPU is slow at matrix products with odd
        # sizes, such as 50,257. So it gets a copy of the weight with rows of zeros at its end, up
        # to a multiple of 64. The bias gives their logits probability 0, so they change nothing.
        V = self.weight.size(0)
        added = -V % 64  # rows
        weight = F.pad(self.weight, (0, 0, 0, added))  # (V + added, C)
        bias = F.pad(x.new_zeros(V), (0, added), value=-math.inf)  # (V + added,)
        logits = F.linear(x.flatten(0, 1), weight, bias)  # (B * T, V + added)
        return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100)


# Hugging Face stores these weights as (in, out), and nn.Linear has them as (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class GPT(nn.Module):
    """GPT-2. Its parameters have the same names as in OpenAI's and Hugging Face's code."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        # The head has the same weight as wte. On "meta" the one that it replaces takes no memory.
        self.lm_head = Head(config.n_embd, config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = self.wte.weight

        # The initial weights. LayerNorms keep torch's, which are ones and zeros.
        for name, module in self.named_modules():
            if module is self.lm_head:  # its weight is that of wte
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02
                if name.endswith("c_proj"):
                    # Two layers in each block add to the residual stream. Their smaller weights
                    # keep its variance from growing with the depth (section 2.3 of the paper).
                    std /= math.sqrt(2 * config.n_layer)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

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
            x = block(x)
        x = self.ln_f(x)
        if at is not None:
            x = x[at]
        return self.lm_head(x, targets)

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
        V = self.config.vocab_size
        k = V if top_k == 0 else min(top_k, V)
        if temperature == 0:
            k = 1
            temperature = 1.0
        for _ in range(max_new_tokens):
            window = idx[:, -self.config.block_size :]  # what fits into the context
            T = window.size(1)
            if idx.is_cuda:
                # CUDA prepares its attention kernels for each new length, which takes time. So the
                # length grows in steps of 64. No token sees the zeros that come after it.
                length = min(64 * math.ceil(T / 64), self.config.block_size)
                window = F.pad(window, (0, length - T))
            logits = self(window, at=(slice(None), T - 1))  # (B, V), those of the last token
            logits, candidates = (logits.float() / temperature).topk(k)  # (B, k) each
            p = logits.softmax(-1)
            if not p.isfinite().all():
                raise RunError("the model's logits are not finite, so it has diverged")
            choice = torch.multinomial(p, 1, generator=generator)  # (B, 1)
            idx = torch.cat([idx, candidates.gather(1, choice)], dim=1)
        return idx

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """Training FLOPs per token: 6 N + 12 L C T, with L = n_layer (PaLM, Chowdhery et al. 2022,
        appendix B). N counts the weights of the linear layers, including the head."""
        N = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """The model in a folder, the newest checkpoint in the log folder of a run, or a GPT-2 of
        the Hub, such as gpt2-medium. It is in evaluation mode."""
        folder = huggingface.find_model(name)
        model = cls(huggingface.read_model_config(folder, GPTConfig))
        model.load_weights(folder)
        return model.eval()

    def load_weights(self, folder: Path) -> None:
        """Loads the weights in a model's folder. A UserError if they are not for this model."""
        tensors, is_gpt2 = huggingface.read_tensors(folder, self)  # also checks who trained them
        if is_gpt2:  # from Hugging Face's names and layout
            tensors = {
                name.removeprefix("transformer."): tensor.T if name.endswith(TRANSPOSED) else tensor
                for name, tensor in tensors.items()
            }
            tensors["lm_head.weight"] = tensors["wte.weight"]
        huggingface.load_tensors(self, tensors, folder)  # all of them must fit

    def save_pretrained(self, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
        """Writes the model as a GPT-2 of Hugging Face, with its tokenizer if one is given.

        If the model has been changed and is no GPT-2 any more, its files do not claim to be one."""
        tensors = self.state_dict()
        is_gpt2 = forks.is_gpt2(self)  # compares a small model with a GPT-2
        if is_gpt2:  # to Hugging Face's names and layout
            del tensors["lm_head.weight"]
            tensors = {
                f"transformer.{name}": tensor.T if name.endswith(TRANSPOSED) else tensor
                for name, tensor in tensors.items()
            }
        huggingface.write_model(Path(folder), self, tensors, is_gpt2, tokenizer)


# --------------------------------------------------------------------------------------------------
# Data


class DataLoaderLite:
    """Batches of sequences and their targets, epoch after epoch.

    An epoch cuts each shard into sequences of T tokens. It reads the shards in random order, and
    the sequences of a shard in random order. The first cut is at a random token below T, so another
    epoch has other sequences. This helps a model that reads a small text many times (bench/order).

    The order depends only on the seed, and the sequences are numbered in it, epoch after epoch.
    Rank 0 reads the first B of them, rank 1 the next B, and so on. So a step has the same tokens
    for any B and any number of ranks, and a resumed run finds its place by a number."""

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
        """`data` is a folder of shards, or a .txt file, which is tokenized into one shard. `split`
        is "train" or "val". `world_size` is the number of ranks. Batches are put on `device`.
        Without `shuffle` everything is read in order, from the first token on."""
        self.B = B  # sequences per batch
        self.T = T  # tokens per sequence
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.device = torch.device(device)
        self.vocab_size = open_tokenizer(data).n_vocab
        # The files of the shards, and their tokens. The arrays are memory-mapped, so only what is
        # used is read from the disk.
        self.paths, self.shards = open_split(data, split, self.vocab_size)
        sizes = np.array([len(tokens) for tokens in self.shards])
        # Tokens are numbered through all shards, as if they were one file.
        self.offsets = np.cumsum(sizes) - sizes  # the number of the first token of each shard
        self.total_tokens = int(sizes.sum())
        # How many sequences an epoch has of each shard. All epochs have the same number, which is
        # what fits after the latest possible cut. The last token of a shard is only a target.
        latest_cut = T - 1 if shuffle else 0
        self.counts = np.maximum(sizes - 1 - latest_cut, 0) // T
        self.sequences_per_epoch = int(self.counts.sum())
        if self.sequences_per_epoch == 0:
            size = f"{self.total_tokens} {split} tokens"
            problem = f"{size}, too few for sequences of {T}"
            raise UserError(f"{data}: {problem}; take more text or a smaller --seq-len")
        # What a resumed run must find again: the names of the shards in `data`, and their sizes.
        names = [path.relative_to(data).as_posix() for path in self.paths]
        self.shard_sizes = list(zip(names, sizes.tolist(), strict=True))
        self.epoch = -1  # the one to which self.order belongs
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.go_to(0)

    def go_to(self, n: int) -> None:
        """Goes on as if n sequences had been read, by all ranks together."""
        self.next_sequence = n + self.rank * self.B  # the first one of the next batch
        self.upcoming: Future[np.ndarray] | None = None  # the next batch, if it is being read

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets of this rank, (B, T) int64 each."""
        if self.upcoming is None:
            self.upcoming = self.thread.submit(self.read, self.next_sequence, self.B)
        tokens = torch.from_numpy(self.upcoming.result())  # (B, T + 1)
        # The thread reads the following batch while the device computes with this one.
        self.next_sequence += self.B * self.world_size
        self.upcoming = self.thread.submit(self.read, self.next_sequence, self.B)
        if self.device.type == "cuda":
            # From pinned memory the copy to the GPU does not make the CPU wait.
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        tokens = tokens.to(self.device)
        # The target of each token is the token after it.
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def read(self, first: int, n: int) -> np.ndarray:
        """n sequences from number `first` on, each with its last target. (n, T + 1) int64"""
        rows = []
        for number in range(first, first + n):
            epoch, i = divmod(number, self.sequences_per_epoch)
            if epoch != self.epoch:
                self.order = self.order_of(epoch)
                self.epoch = epoch
            # Its shard is the last one that begins before it or with it.
            shard = np.searchsorted(self.offsets, self.order[i], side="right") - 1
            start = self.order[i] - self.offsets[shard]
            tokens = self.shards[shard][start : start + self.T + 1]
            check_tokens(tokens, self.paths[shard], self.vocab_size)  # UserError if it is damaged
            rows.append(tokens)
        return np.stack(rows).astype(np.int64)

    def order_of(self, epoch: int) -> np.ndarray:
        """The numbers of the tokens with which the sequences of an epoch begin, in its order."""
        cut = 0
        permutation = np.arange
        if self.shuffle:
            # All versions of NumPy draw the same numbers from RandomState.
            random = np.random.RandomState([self.seed, epoch])
            cut = random.randint(self.T)
            permutation = random.permutation
        begins = []
        for shard in permutation(len(self.shards)):
            sequences = permutation(self.counts[shard])  # 0, 1, 2 and so on, in random order
            begins.append(self.offsets[shard] + cut + sequences * self.T)
        return np.concatenate(begins)


# --------------------------------------------------------------------------------------------------
# Settings

SHARDS_FOLDER = "edu_fineweb10B"  # where fineweb.py writes its shards
Preset = Literal["auto", "gpt2", "gpt2-fast", "gpt3", "small", "shakespeare"]
Dtype = Literal["auto", "float32", "tf32", "bfloat16", "float16"]


# Each field is a flag of the command line: max_steps is --max-steps, and --help shows its comment.
@dataclass
class TrainConfig:
    """The settings of a run. Flags replace the values of the preset."""

    # What to train on, and where to start

    preset: Preset = "auto"  # a recipe; auto: gpt2 if edu_fineweb10B/ has data, else shakespeare
    data: str = SHARDS_FOLDER  # folder with token shards, also in its subfolders, or a .txt file
    init: str = "scratch"  # scratch, a GPT-2 of the Hub, such as gpt2-medium, or a model's folder
    log_dir: str = "log"  # folder of the run; an earlier run in it is renamed, or resumed
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    plan: bool = False  # print estimated FLOPs, memory and time, try one step, and exit
    seed: int = 1337  # seed of the initial weights and of the data order
    shuffle: bool = True  # read shards and their sequences in another random order in every epoch

    # The shape of the model

    n_layer: int = 12  # number of blocks
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # number of channels (C)

    # Batches and optimization

    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    total_batch_size: int = 524_288  # tokens per update, over all ranks and micro-batches
    seq_len: int = 1024  # tokens per sequence (T)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the linear layers inside the blocks
    max_lr: float = 6e-4  # learning rate at the end of the warm-up; lower it if the loss diverges
    min_lr: float = 6e-5  # what the learning rate falls to
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: constant, then linear in the warm-down
    warmup_steps: int = 715  # steps in which the rate rises; 715 are GPT-3's 375 million tokens
    warmdown_steps: int = 5000  # the last steps, in which the rate falls if the schedule is wsd
    weight_decay: float = 0.1  # decoupled weight decay of matrices
    beta2: float = 0.95  # AdamW's decay rate of squared gradients
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping

    # Speed and memory

    device: str = "auto"  # auto, cpu, cuda or mps
    dtype: Dtype = "auto"  # precision of matrix products; tf32: float32, rounded for the product
    micro_batch_size: int = 0  # sequences per forward pass on a device (B); 0: as many as fit
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on a CUDA GPU
    low_memory: bool = False  # compute blocks again in the backward pass instead of storing them
    deterministic: bool = False  # use deterministic GPU kernels, so that resuming is bit-exact

    # Evaluations and samples

    eval_every: int = 250  # steps between validation losses; 0: never
    eval_tokens: int = 10_485_760  # tokens per validation loss (at most the whole split)
    hellaswag_every: int = 250  # steps between HellaSwag evaluations; 0: never
    hellaswag_data: str = ""  # local HellaSwag .jsonl; empty: the official tasks, downloaded once
    sample_every: int = 250  # steps between samples; 0: never
    sample_prompt: str = "Hello, I'm a language model,"  # what samples continue; empty: a line end

    # Checkpoints and logs

    save_every: int = 1000  # steps between checkpoints; 0: never
    keep_checkpoints: int = 3  # how many to keep, besides that of the lowest val loss; 0: all
    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


# The shape of the model. With --init these settings are 0, and the given weights decide it.
SHAPE = ("n_layer", "n_head", "n_embd")

# --resume refuses to continue a run with other values of these settings. The others may change. For
# example, a lower rate may save a run that diverges, and more steps make it longer. If you add a
# setting that must stay the same during a run, add it here.
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
    # values tried, these reach the lowest loss in that time (bench/recipes). It is not compiled,
    # which would take another minute.
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


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The settings of a run. The command line is `args`, or that of the process.

    Each value comes from the first of these that has it:
    1. the flag on the command line,
    2. with --resume, the settings of the run in --log-dir, if there is one,
    3. the preset,
    4. the default in TrainConfig.
    A UserError names all values that are wrong, or that must not change on resume."""
    words = sys.argv[1:] if args is None else args
    # The command line is read twice. The first time is for --resume, --log-dir and --preset, on
    # which 2 and 3 depend. The second time the values of 2, 3 and 4 are the defaults, so the flags
    # on the command line replace them.
    given = parse_args(TrainConfig, words, allow_help=False)
    # What the run in --log-dir has stored of its settings and its script. None if there is no run.
    before = read_run(given.log_dir) if given.resume else None
    if before:
        # UserError if the run is of a script with another name and another content than this one.
        forks.check_same_script(before, GPT, f"--resume: {given.log_dir}")
        names = asdict(given).keys() - {"log_dir", "resume", "plan"}
        settings = {name: value for name, value in before["config"].items() if name in names}
    else:
        preset = given.preset
        if preset == "auto":
            preset = "gpt2" if holds_shards(Path(SHARDS_FOLDER)) else "shakespeare"
        settings = {"preset": preset, **PRESETS[preset]}
        if given.init != "scratch":
            settings |= dict.fromkeys(SHAPE, 0)  # so the given weights decide it
    defaults = TrainConfig(**settings)
    config = parse_args(TrainConfig, words, default=defaults)
    if config.preset == "auto":
        config.preset = defaults.preset
    for name in ("data", "init", "hellaswag_data"):
        # Files and folders get their absolute paths, so that --resume works in any folder.
        setattr(config, name, absolute(getattr(config, name)))

    problems = find_problems(config)
    for name in MUST_NOT_CHANGE if before else ():
        was = getattr(defaults, name)
        now = getattr(config, name)
        if absolute(str(was)) != absolute(str(now)):
            problems.append(f"--resume: {flag(name)} was {was} in {config.log_dir}, and is {now}")
    if problems:
        raise UserError("; ".join(problems))
    return config


def find_problems(config: TrainConfig) -> list[str]:
    """What is wrong with the values of settings."""
    above_0 = {"total_batch_size", "seq_len", "eval_tokens", "max_lr"}
    if config.init == "scratch":
        above_0.update(SHAPE)
    problems = range_problems(config, above_0)  # no other number may be negative
    if config.n_head > 0 and config.n_embd % config.n_head:
        problems.append(f"--n-embd {config.n_embd}: not divisible by --n-head {config.n_head}")
    if config.seed >= 2**32:
        problems.append(f"--seed {config.seed}: must be below 2**32")
    if config.beta2 >= 1:
        problems.append(f"--beta2 {config.beta2}: must be below 1")
    if config.eval_every and config.eval_tokens < config.seq_len:
        problems.append(f"--eval-tokens {config.eval_tokens}: less than --seq-len {config.seq_len}")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr}: above --max-lr {config.max_lr}")
    return problems


# --------------------------------------------------------------------------------------------------
# Optimizers and learning rate


def configure_optimizers(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """AdamW. With --optimizer muon, Muon takes over the linear layers inside the blocks.

    At each step train() sets the learning rate of all groups to that of get_lr(). `dtype` is the
    precision of the model's matrix products."""
    optimizers = []
    by_muon = set()
    if config.optimizer == "muon":
        by_muon = {m.weight for m in model.h.modules() if isinstance(m, nn.Linear)}
        matrices = [p for p in model.parameters() if p in by_muon]
        # Its updates are as large as AdamW's, so both have the same learning rate. It computes in
        # bfloat16 if the model does. The range of float16 is too small for it.
        muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        optimizers.append(Muon(matrices, config.max_lr, config.weight_decay, muon_dtype))
    others = [p for p in model.parameters() if p not in by_muon]
    # Matrices and embeddings decay. Biases and LayerNorms have one dimension and do not decay.
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (0.9, config.beta2)
    # With fused=True one kernel updates all parameters, instead of a loop over them.
    optimizers.append(torch.optim.AdamW(groups, config.max_lr, betas, eps=1e-8, fused=True))
    return optimizers


def get_lr(step: int, config: TrainConfig) -> float:
    """The learning rate of a step. It rises to max_lr in the warm-up, then falls to min_lr.

    With the schedule cosine it falls from there on (GPT-3, Brown et al. 2020, appendix B). With wsd
    it stays at max_lr and falls linearly in the last warmdown_steps. Until then the run can still
    be made longer (Hägele et al. 2024, arXiv:2405.18392)."""
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
) -> float | None:
    """The mean cross-entropy of sequences (N, T + 1), in nats per token. The ranks share them.

    It is None if a rank has been asked to stop."""
    N = len(sequences)
    losses = []
    for first in range(0, N, ranks.world_size * B):  # B sequences for each rank
        if ranks.any(stop_requested()):
            return None
        rows = sequences[first + ranks.rank * B :][:B]
        n = len(rows)
        if n == 0:  # The last round has no more sequences for this rank.
            break
        # The last batch may be smaller. Rows of zeros give it the shape for which the model was
        # compiled, and their targets of -100 do not count.
        tokens = torch.zeros(B, sequences.shape[1], dtype=torch.int64)
        tokens[:n] = torch.from_numpy(rows)
        targets = tokens[:, 1:].clone()
        targets[n:] = -100
        with autocast:
            loss = model(tokens[:, :-1].to(ranks.device), targets.to(ranks.device))
        losses.append(n * loss)  # The sum of the losses of n sequences.
    total = sum(loss.item() for loss in losses)  # At the end, since .item() waits for the GPU.
    return ranks.sum(total) / N


def print_samples(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], ranks: Ranks, autocast: torch.autocast
) -> None:
    """Prints two continuations of the tokens of a prompt from each rank."""
    generator = torch.Generator(device=ranks.device)
    generator.manual_seed(42 + ranks.rank)  # each rank prints other samples
    idx = torch.tensor([prompt, prompt], device=ranks.device)
    with autocast:
        idx = model.generate(idx, 64, generator=generator)
    for i, tokens in enumerate(idx.tolist()):
        name = f"rank {ranks.rank} sample {i}" if ranks.world_size > 1 else f"sample {i}"
        print_line(f"{name}:\n{indent(printable(tokens, tokenizer), '  ')}")


class Evaluations:
    """Validation loss, HellaSwag and samples, each at its own steps and after the last one."""

    def __init__(
        self,
        config: TrainConfig,
        model: GPT,
        tokenizer: Tokenizer,
        B: int,
        ranks: Ranks,
        autocast: torch.autocast,
    ):
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.B = B
        self.ranks = ranks
        self.autocast = autocast
        first_tokens = [0]  # of validation
        if config.eval_every:
            T = config.seq_len
            loader = DataLoaderLite(config.data, "val", B, T, shuffle=False)
            N = min(config.eval_tokens // T, loader.sequences_per_epoch)
            self.sequences = loader.read(0, N)  # (N, T + 1)
            # How many bytes and characters the validation text has. Losses per byte or character
            # can be compared between tokenizers. None if the tokens are words.
            self.text_size = text_size(self.sequences[:, 1:].ravel(), tokenizer)
            first_tokens = self.sequences[0, :8].tolist()
        # If the tokens are words, and those of the prompt are not among them, this prints a line,
        # and samples go on from the first words of validation.
        prompt = config.sample_prompt or "\n"
        self.prompt = encode_prompt(prompt, tokenizer, otherwise=first_tokens)
        if config.hellaswag_every:
            # Downloads the tasks once. If that fails, it prints a warning and returns [].
            self.tasks = hellaswag.load_tasks(config.hellaswag_data, model, tokenizer, ranks)

    def run(self, step: int) -> dict[str, float] | None:
        """Makes and prints the evaluations that are due after `step` updates.

        Returns their results by the names that log.txt has. Returns None if a rank has been asked
        to stop. Then they are repeated when the run is resumed."""
        config, model, ranks, autocast = self.config, self.model, self.ranks, self.autocast
        results = {}
        model.eval()
        if is_due(config.eval_every, step, config):
            loss = validation_loss(model, self.sequences, self.B, ranks, autocast)
            if loss is None:
                return None
            results["val"] = loss
            line = f"step {step:5d} validation loss {loss:.4f}"
            if self.text_size:
                results["bpb"] = self.text_size.bits_per_byte(loss)
                line += f", {self.text_size.nats_per_character(loss):.4f} per character"
            print0(line)
        # From here on the inputs have many lengths. Compiling for each would take longer than this.
        with torch.compiler.set_stance("force_eager"):
            if is_due(config.hellaswag_every, step, config) and self.tasks:
                accuracy = hellaswag.accuracy(model, self.tokenizer, self.tasks, ranks, autocast)
                if accuracy is None:
                    return None
                results["hella"] = accuracy
                print0(f"step {step:5d} HellaSwag {accuracy:.4f}")
            if is_due(config.sample_every, step, config) and step > 0:
                print_samples(model, self.tokenizer, self.prompt, ranks, autocast)
        return results


def is_due(every: int, step: int, config: TrainConfig) -> bool:
    """True at each multiple of `every`, and at the end of the run. With 0 it is never true."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


# --------------------------------------------------------------------------------------------------
# Training


def model_config(config: TrainConfig, tokenizer: Tokenizer, weights: Path | None) -> GPTConfig:
    """The shape of the model to train. `weights` is a folder with a model, or None.

    A UserError if the settings ask for a shape or for tokens that given weights do not have."""
    shape = {
        "block_size": config.seq_len,
        "vocab_size": tokenizer.n_vocab,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
    }
    if weights:
        huggingface.check_same_tokenizer(weights, tokenizer, config.data)
        shape = huggingface.read_shape(weights)
        for name in SHAPE:
            if getattr(config, name) not in (0, shape[name]):
                asked = f"{flag(name)} {getattr(config, name)}"
                raise UserError(f"{asked}: {config.init} has {shape[name]}")
        if config.seq_len > shape["block_size"]:
            problem = f"the context of {config.init} is {shape['block_size']}"
            raise UserError(f"--seq-len {config.seq_len}: {problem}")
    # If you add a field to GPTConfig, give it its value here, with any weights or none.
    return GPTConfig(**shape)


def train(config: TrainConfig, ranks: Ranks, run: RunFolder) -> int:
    """Trains a model. Every rank calls this. Returns the exit status of the process."""
    rank, world_size, device = ranks.rank, ranks.world_size, ranks.device
    T = config.seq_len

    # ---- The model has the weights of a checkpoint, or those of --init, or random ones
    checkpoint = None
    saved = {}  # what save() below has stored
    if config.resume:
        checkpoint = run.find_checkpoint()  # the newest that is intact, or None
    if checkpoint:
        saved = checkpoints.read_training_state(checkpoint)
    step = saved.get("step", 0)  # number of updates so far
    weights = checkpoint
    if checkpoint is None and config.init != "scratch":
        weights = huggingface.find_model(config.init)
    tokenizer = open_tokenizer(config.data)
    torch.manual_seed(config.seed)
    model = GPT(model_config(config, tokenizer, weights))
    if weights:
        model.load_weights(weights)

    # ---- Precision, compiling, and whether to save memory
    # device_line is printed. It says which precision is used, on which device, and why.
    N, before = model.num_parameters(), saved.get("precision")
    precision, device_line = ranks.on_rank_0(
        devices.choose_precision, config.dtype, device, N, before
    )
    dtype = devices.dtype_of(precision)  # torch.float32 for tf32, otherwise as the name says
    if device.type == "cuda" and precision != "float32":
        torch.set_float32_matmul_precision("high")  # TF32 for products that stay in float32
    compiled = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
    if compiled:
        # Tries to compile something. If that fails, auto prints a line, and on is a UserError.
        compiled = devices.can_compile(ranks, required=config.compile == "on")
    if compiled:
        # All blocks run the same code, which is compiled once. To compile the model as a whole
        # takes longer, and steps are hardly faster.
        for part in [*model.h, model.lm_head]:
            part.forward = torch.compile(part.forward, dynamic=False)  # all batches have one shape
    if config.low_memory:
        # A block keeps only its input, and computes the rest again in the backward pass.
        for block in model.h:
            block.forward = partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
            )
    elif device.type == "cpu":
        devices.keep_freed_memory()  # of tensors, for new ones, which is faster but takes more
    autocast = torch.autocast(
        device.type,
        dtype=dtype,
        enabled=dtype != torch.float32,
        cache_enabled=not config.low_memory,  # keeps the weights in this precision, too
    )

    # ---- Micro-batches of B sequences that fit into the memory, and how many a rank has per step
    B, micro_steps = choose_micro_batch(
        config, model, ranks, dtype, compiled, before=saved.get("B", 0)
    )
    model.to(device)

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
    evaluations = Evaluations(config, model, tokenizer, B, ranks, autocast)
    progress = Progress(config, model, ranks, precision)  # measures the speed

    # ---- What a checkpoint has besides the weights: how it is restored, and how it is saved
    if checkpoint:
        if saved["shards"] != loader.shard_sizes:
            raise UserError(f"--resume: {config.data} has shards of other names or lengths now")
        loader.go_to(step * config.total_batch_size // T)
        # A UserError if they are other optimizers, or have other parameters.
        checkpoints.load_optimizers(saved["optimizers"], optimizers, model)
        if saved["scaler"]:  # {} if it was not float16
            scaler.load_state_dict(saved["scaler"])
        progress.training_seconds = saved["training_seconds"]

    def save(step: int, required: bool) -> None:
        """Saves a checkpoint, if this step has none. A full disk ends the run if it is required,
        and otherwise prints a line."""
        state = {
            "step": step,
            "config": asdict(config),
            **forks.script_entry(GPT),  # the name and the checksum of this file
            "precision": precision,
            "B": B,
            "shards": loader.shard_sizes,
            "optimizers": checkpoints.optimizer_states(optimizers, model),
            "scaler": scaler.state_dict(),
            "training_seconds": progress.training_seconds,
        }
        run.save_checkpoint(model, tokenizer, state, required)

    # ---- All is checked, so files may change. The folder of an earlier run is renamed, unless this
    # resumes it. run.json and a copy of this script are written. Then come the first lines.
    run.begin(model, step, weights, device=device_line, dtype=precision, micro_batch_size=B)
    print_header(config, model, optimizers, loader, progress, device_line, compiled, checkpoint)
    forks.warn_if_tokens_see_later_ones(model, autocast)

    # ---- With several ranks, DDP averages their gradients
    ddp_model = model
    if world_size > 1:
        torch._dynamo.config.optimize_ddp = False  # or DDP would split the compiled blocks
        ddp_model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # gradients stay in DDP's own buffers
        )
        # In its first passes DDP settles in which order it sums gradients. Two passes over zeros
        # get this done before the first step, so that a resumed run sums in the same order.
        settle_buckets(ddp_model, B, T, autocast)

    collect_stop_signals()  # From here on Ctrl-C and SIGTERM only make stop_requested() true.
    stop = False  # the same on all ranks
    while True:
        # ---- Evaluate
        if not stop:
            results = evaluations.run(step)
            if results is None:
                stop = True
            else:
                run.log(step, **results)
        if stop or step == config.max_steps:
            break

        # ---- One update of the weights -----------------------------------------------------------
        began = time.perf_counter()
        lr = get_lr(step, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        # Random numbers, such as those of dropout, depend on the seed, the step and the rank.
        torch.manual_seed(
            int(np.random.SeedSequence([config.seed, step, rank]).generate_state(1)[0])
        )
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
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        # One exchange tells all ranks the sum of their losses, and how many were asked to stop. Up
        # to here no line of a step has waited for the GPU.
        asked = torch.full_like(loss_sum, float(stop_requested()))
        total_loss, stops = ranks.sum_tensor(torch.stack([loss_sum, asked])).tolist()
        loss = total_loss / (micro_steps * world_size)
        norm = norm.item()
        # In float16 the gradients overflow from time to time. Then the weights stay as they are,
        # and the scaler lowers its scale. If the scale is 1, as always in other precisions, the
        # model has diverged.
        overflow = not math.isfinite(norm)
        if not math.isfinite(loss) or (overflow and scaler.get_scale() <= 1):
            problem = f"step {step}: the loss is {loss} and the norm of the gradients {norm}"
            remedy = "lower --max-lr; --resume goes on from a checkpoint"
            raise RunError(f"{problem}, so the model has diverged; {remedy}")
        if overflow:
            print0(f"step {step:5d} skipped: the norm of the gradients is {norm}")
        else:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        # DDP's buffers stay, so their gradients become 0. Without DDP they are freed.
        model.zero_grad(set_to_none=world_size == 1)
        # ---- End of the update -------------------------------------------------------------------

        # On a GPU the optimizer may still be at work, which counts as part of the next step.
        progress.end_step(step, began)
        print0(f"step {step:5d}/{config.max_steps} {progress.line(loss, lr, norm)}")
        run.log(step, train=loss, lr=lr, norm=norm, **progress.speed)
        step += 1
        stop = stops > 0
        if is_due(config.save_every, step, config):
            save(step, required=step == config.max_steps)

    # ---- The end, after a signal or after the last step
    if stop:
        hint = "nothing is saved"
        if config.save_every:
            save(step, required=True)
            hint = f"--resume --log-dir {config.log_dir} continues"
        print0(f"stopped by a signal after {step} updates; {hint}")
        return status_after_signal()
    if config.eval_every:
        print_validation(results["val"], evaluations.text_size)
    print_cost(step, progress.training_seconds)
    if config.save_every:
        run.finish(model, step)  # draws curves.png, and prints how to sample from the model
    return 0


def main(args: list[str] | None = None) -> int:
    """Reads the command line and trains. Returns the exit status."""
    config = read_config(args)
    hint = (
        "; for GPT-2, `python fineweb.py` makes the data" if config.preset == "shakespeare" else ""
    )
    print0(f"preset: {config.preset}{hint}")
    if config.plan:
        weights = huggingface.find_model(config.init) if config.init != "scratch" else None
        with torch.device("meta"):  # tensors without memory
            model = GPT(model_config(config, open_tokenizer(config.data), weights))
        plan.print_plan(config, model)
        return 0
    ranks = Ranks.start(config.device, config.deterministic)  # joins torchrun's process group
    try:
        with RunFolder(config, ranks) as run:  # keeps other runs out of the folder
            status = train(config, ranks, run)
    except RuntimeError as error:
        if is_out_of_memory(error):
            error.add_note("--micro-batch-size with a smaller number takes less, or --low-memory")
        raise
    ranks.leave()
    return status


if __name__ == "__main__":
    run_and_exit(main)

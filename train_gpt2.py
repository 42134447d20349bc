"""Trains GPT-2 (124M) from scratch and saves it in Hugging Face format.

    python train_gpt2.py                                     # FineWeb-Edu shards, else Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards      # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # eight GPUs: the reproduction
    python train_gpt2.py --resume                            # continues the run in log/
    python train_gpt2.py --help                              # every flag, its default and unit

From top to bottom: model, data, configuration, optimizer, evaluation, state, set-up, and the loop,
whose weight update is between two marked lines. support/ holds the plumbing: formats on disk, the
start of ranks and devices, options. Bad input raises UserError, whose one line says how to fix it.

Shapes: B batch (sequences per micro-batch), T time (tokens per sequence), C channels (n_embd =
n_head * head size), nh heads, hs head size, V vocabulary (50,257). A *step* updates the weights
from total_batch_size tokens, which the ranks share equally; each rank accumulates gradients over
micro-steps of B * T tokens. Step s is logged with the weights after s updates: the loss of step 0
is the untrained model's."""

import hashlib
import json
import math
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute

from support import checkpoints, cli, console, devices, hellaswag, huggingface, signals, tokenizer
from support.cli import print0
from support.errors import RunError, Stopped, UserError, explain
from support.hellaswag import Packing
from support.loss import ignores_padding, in_chunks, mean_in_chunks
from support.memory import largest_that_fits
from support.ranks import Ranks, settle_buckets
from support.run_folder import RunFolder, lock
from support.run_log import ROOT
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
        # Query, key and value of all heads in one matmul. For Muon they are three matrices.
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_attn.split_sizes = [config.n_embd] * 3
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)  # mixes the heads

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        mask = None if packing is None else packing.mask
        # softmax(q k^T / sqrt(hs)) v; a fused kernel never stores the (T, T) matrix.
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

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), packing)  # tokens look at each other
        return x + self.mlp(self.ln_2(x))  # each token on its own


def lm_head(x: Tensor, wte: Tensor, padded: bool = False) -> Tensor:
    """The head, tied to the token embedding. (…, C), (V, C) -> logits (…, V)

    On a GPU columns are added up to a multiple of 64 (50,304), which the tensor cores need. It is
    done here and not in the weights, since checkpoints keep GPT-2's 50,257 rows. A bias makes the
    logits of these columns -inf, so that a softmax over all of them (`padded`) needs no slice
    (bench/kernels)."""
    V = wte.size(0)
    bias = None
    if x.is_cuda:
        # -V % 64 rows are missing to the next multiple of 64
        bias = F.pad(wte.new_zeros(V), (0, -V % 64), value=-math.inf)
        wte = F.pad(wte, (0, 0, 0, -V % 64))
    logits = F.linear(x, wte, bias)
    return logits if padded else logits[..., :V]


def training_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What training minimizes, a mean over tokens. float32 (N, V), (N,) -> scalar

    Change it here (z-loss, label smoothing): every way of computing it follows. Validation and
    HellaSwag stay plain cross-entropy, in nats."""
    return F.cross_entropy(logits, targets)


def next_token_loss(
    x: Tensor,
    wte: Tensor,
    targets: Tensor,
    loss_function: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    padded: bool = True,
) -> Tensor:
    """The head and a loss. x (…, C), wte (V, C), targets (…) -> float32 scalar"""
    logits = lm_head(x, wte, padded).float()
    return loss_function(logits.flatten(0, -2), targets.flatten())


class GPT(nn.Module):
    """GPT-2 with GPT-2's parameter names. Linear weights are (out, in), not Conv1D's (in, out)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # prepare() sets these. loss_function is head and training loss without the logits, and
        # validation_function head and cross-entropy; low_memory recomputes blocks in the backward
        # pass, so that no activations are stored.
        self.loss_function: Callable | None = None
        self.validation_function: Callable = partial(mean_in_chunks, next_token_loss)
        self.low_memory = False
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens; also the head
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

        # std 0.02, biases 0, LayerNorms 1 and 0. Residual projections are scaled down, or the
        # variance of the residual stream would grow with depth (section 2.3).
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def prepare(self, compiled: bool = False, low_memory: bool = False) -> None:
        """Chooses how training computes; results match to within rounding.

        Blocks are compiled one by one and share code. Head and loss, compiled, make the fewest
        passes over the logits, which is best on a GPU; in chunks they take the least memory."""
        self.low_memory = low_memory
        head_and_loss = partial(
            next_token_loss, loss_function=training_loss, padded=ignores_padding(training_loss)
        )
        self.loss_function = in_chunks(head_and_loss, training_loss)
        if compiled:
            for block in self.h:
                block.compile(dynamic=False)  # all batches of a run have one shape
            if self.wte.weight.device.type != "cpu" and not low_memory:
                self.loss_function = torch.compile(head_and_loss, dynamic=False)
                self.validation_function = torch.compile(next_token_loss, dynamic=False)

    def hidden(self, idx: Tensor, packing: Packing | None = None) -> Tensor:
        """Tokens (B, T) -> the input of the head (B, T, C)

        packing: position (B, T) and mask (B, 1, T, T) of HellaSwag, which packs four endings into
        one sequence. Nobody else needs it: by default positions are 0 … T-1, the mask is causal."""
        if packing is not None:
            position = packing.position
        else:
            T = idx.size(1)
            if self.config.block_size < T:
                raise UserError(f"{T} tokens, but the model's context is {self.config.block_size}")
            position = torch.arange(T, device=idx.device)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C)
        for block in self.h:
            if self.low_memory and torch.is_grad_enabled():
                x = recompute(block, x, packing, use_reentrant=False)
                torch.clear_autocast_cache()  # or 16-bit copies of all weights pile up
            else:
                x = block(x, packing)
        return self.ln_f(x)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the head (V, C), tied to the token embedding."""
        return self.wte.weight

    def logits(self, x: Tensor) -> Tensor:
        """The head. (…, C) -> (…, V)"""
        return lm_head(x, self.head_weight)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets (B, T) int64 -> logits (B, T, V), training loss.

        The loss is None without targets. With targets, a prepared model returns no logits."""
        x = self.hidden(idx)  # (B, T, C)
        if targets is not None and self.loss_function is not None:
            return None, self.loss_function(x, self.head_weight, targets)
        logits = self.logits(x)
        loss = None
        if targets is not None:
            loss = training_loss(logits.float().flatten(0, 1), targets.flatten())
        return logits, loss

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
        k = min(top_k or self.config.vocab_size, self.config.vocab_size)
        if temperature == 0:
            k = 1
            temperature = 1.0
        for _ in range(max_new_tokens):
            window = idx[:, -block_size:]  # what fits in the context
            end = window.size(1)
            # Padding comes after the text, where no token attends to it.
            x = self.hidden(devices.pad_length(window, block_size))[:, end - 1]  # (B, C)
            logits = self.logits(x).float() / temperature  # (B, V)
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

        N is without position embeddings, which no matmul uses. Recomputation does not count."""
        N = sum(p.numel() for name, p in self.named_parameters() if name != "wpe.weight")
        return 6 * N + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path, **changes: Any) -> "GPT":
        """A GPT-2 from a folder or the Hub (`gpt2`, `gpt2-medium`, …), its weights in float32.

        changes: fields of GPTConfig, instead of those in config.json."""
        names = [field.name for field in fields(GPTConfig)]
        settings, weights, gpt2 = huggingface.read_pretrained(name, names)
        model = cls(GPTConfig(**settings | changes))
        huggingface.load_weights(model, weights, name, gpt2)
        return model

    @cached_property
    def is_gpt2(self) -> bool:
        """False if the parameters or the mathematics of this class were changed."""
        return huggingface.is_gpt2(self)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2 with its tokenizer; a fork that is none doesn't claim so."""
        settings = asdict(self.config)
        huggingface.write_pretrained(Path(folder), settings, self.state_dict(), self.is_gpt2)


# --------------------------------------------------------------------------------------------------
# Data: token order and the data loader (support/tokenizer.py opens shards)

SHARDS_FOLDER = "edu_fineweb10B"


def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … n-1 from `seed` alone; NumPy's own may change with its version."""
    return np.random.PCG64(seed).random_raw(n).argsort(kind="stable")


class DocumentOrder(NamedTuple):
    """The documents (long ones: passages) of a shard in an epoch's order, (n,) int64 each."""

    ends: np.ndarray  # where each ends in the shuffled shard
    file_ends: np.ndarray  # where it ends in the file


class DataLoaderLite:
    """The tokens of a split as one endless sequence, and batches of next-token pairs from it.

    The order is a function of the seed. Epochs follow each other without a gap; each has all shards
    in random order, and each shard all its documents in random order:

        sequence   | epoch 0                                 | epoch 1           …
        epoch 0    | shard 2           | shard 0 | shard 1   |
        shard 2    | doc 5 | doc 0 | … |
        read(…)          [-------------------]                 any slice, across all borders

    A document begins at 50256; a .txt file is one. Those of more than 4 T tokens are shuffled in
    passages of 4 T. Without shuffle the order is that of the files.

    In each micro-step the ranks take the next B * T tokens each, in rank order. So a step has the
    same tokens for any number of ranks, each token is an input once per epoch, and the state is one
    position. data: folder of shards, also in subfolders, or .txt file."""

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
        pin_memory: bool = False,
    ):
        self.B = B  # sequences per batch
        self.T = T  # tokens per sequence
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.pin_memory = pin_memory  # batches can be copied to a GPU while it computes
        self.position = 0  # in the sequence, of the next micro-batch of all ranks
        # The files, their names in `data`, and their tokens, 1-D uint16, memory-mapped.
        self.paths, self.names, self.shards = tokenizer.open_split(Path(data), split)
        self.passage = 4 * T  # tokens of a long document that stay together when it is shuffled
        self.lengths = np.array([len(shard) for shard in self.shards])
        self.total_tokens = int(self.lengths.sum())
        if self.total_tokens <= T:
            size = f"{self.total_tokens} {split} tokens"
            raise UserError(f"{data}: {size}, too few for a sequence of {T} and its target")
        # By (epoch, shard). Two are kept, since a batch may straddle two shards.
        self.document_orders: dict[tuple[int, int], DocumentOrder] = {}

    def read(self, position: int, count: int) -> np.ndarray:
        """Tokens [position, position + count) of the sequence, 1-D uint16."""
        pieces = []
        while count > 0:
            # The epoch of this position, its shard, and the offset in the shuffled shard.
            epoch, offset = divmod(position, self.total_tokens)
            shard_order = np.arange(len(self.shards))
            if self.shuffle:
                shard_order = permutation(len(self.shards), self.seed, epoch)
            shard_ends = self.lengths[shard_order].cumsum()
            place = int(np.searchsorted(shard_ends, offset, side="right"))  # in the epoch's order
            shard = int(shard_order[place])
            offset -= int(shard_ends[place] - self.lengths[shard])
            # Copy documents, the first from the offset on, up to the end of the shard.
            order = self.document_order(epoch, shard)
            document = int(np.searchsorted(order.ends, offset, side="right"))
            while count > 0 and document < len(order.ends):
                left = int(order.ends[document]) - offset  # tokens left in this document
                file_end = int(order.file_ends[document])
                piece = self.shards[shard][file_end - left : file_end][:count]
                tokenizer.check_tokens(piece, self.paths[shard])
                pieces.append(piece)
                offset += len(piece)
                position += len(piece)
                count -= len(piece)
                document += 1
        return np.concatenate(pieces)

    def document_order(self, epoch: int, shard: int) -> DocumentOrder:
        """The order of a shard's documents in an epoch."""
        if (epoch, shard) in self.document_orders:
            return self.document_orders[epoch, shard]
        tokens = self.shards[shard]
        starts = np.zeros(1, dtype=np.int64)  # without shuffle the whole shard is one passage
        if self.shuffle:
            starts = tokenizer.passage_starts(tokens, self.passage)
        lengths = np.diff(starts, append=len(tokens))
        # shard + 1: the permutation of the shards themselves has no third number
        order = permutation(len(starts), self.seed, epoch, shard + 1)
        if len(self.document_orders) == 2:
            oldest = next(iter(self.document_orders))
            del self.document_orders[oldest]
        result = DocumentOrder(lengths[order].cumsum(), (starts + lengths)[order])
        self.document_orders[epoch, shard] = result
        return result

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets of this rank, (B, T) int64 each."""
        tokens = self.B * self.T
        # One token more: the targets are the inputs shifted by one.
        buffer = self.read(self.position + self.rank * tokens, tokens + 1)
        buffer = torch.from_numpy(buffer.astype(np.int64))
        if self.pin_memory:
            buffer = buffer.pin_memory()
        self.position += self.world_size * tokens  # past the batches of all ranks
        return buffer[:-1].view(self.B, self.T), buffer[1:].view(self.B, self.T)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of tokens depends on."""
        shards = list(zip(self.names, self.lengths.tolist(), strict=True))
        digest = hashlib.sha256(json.dumps(shards).encode()).hexdigest()
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shards": digest,
            "passage": self.passage,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position in the same data, and to its order."""
        # Checkpoints without it are older: a .txt had passages of 256 tokens, shards had none.
        before = 256 if self.paths[0].suffix == ".txt" else self.total_tokens
        state = {"passage": before} | state
        self.passage = state["passage"]
        self.document_orders.clear()
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

    # A field is a flag: tyro prints these comments as --help, under headings like this one.

    # Run

    # defaults of the flags; auto: gpt2 if edu_fineweb10B/ holds shards, else shakespeare
    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "small", "shakespeare"] = "auto"
    log_dir: str = "log"  # folder for the log and checkpoints
    init: str = "scratch"  # scratch, a Hub name (gpt2, gpt2-medium, …), or the folder of a GPT-2
    resume: bool = False  # continue from the newest checkpoint in log_dir; start if there is none
    max_steps: int = 19_073  # number of updates; 19,073 are one epoch of 10 billion tokens
    seed: int = 1337  # seed of the initial weights and of the data order
    plan: bool = False  # print estimated FLOPs, memory and time, and exit

    # Data

    data: str = SHARDS_FOLDER  # folder of token shards, also in subfolders, or .txt file
    shuffle: bool = True  # reshuffle shards, documents and passages of long ones every epoch
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
    keep_checkpoints: int = 3  # number of recent checkpoints to keep, plus the best; 0: all
    keep_every: int = 0  # never delete checkpoints at multiples of this many steps; 0: none

    # Logging

    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


# fmt: off
SHAKESPEARE = dict(  # two minutes on two cores
    data=str(ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=64,
    # 3.4 million parameters, of which the token embedding has 3.2
    n_layer=4, n_head=4, n_embd=64,
    # the best of what was tried: bench/recipes
    optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0, warmup_steps=20,
    warmdown_steps=300, beta2=0.995,
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
# What may change on resume. All else is fixed, also a setting that a fork adds.
MAY_CHANGE = {
    "preset", "log_dir", "resume", "max_steps", "plan", "data", "micro_batch_size",
    "skip_bad_steps", "shard_optimizer", "warmdown_steps", "device", "dtype", "compile",
    "low_memory", "deterministic", "eval_every", "eval_tokens", "hellaswag_every", "hellaswag_data",
    "sample_every", "sample_prompt", "save_every", "keep_checkpoints", "keep_every", "tensorboard",
    "wandb",
}
# fmt: on


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig: the values of the preset, overridden by the flags.

    One UserError names every error that can be detected from the flags."""
    # --preset and --device change the other defaults, so they are read first. tyro reads them again
    # with the rest, and reports what is wrong with them.
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

    # Collect every problem, to report all of them at once.
    problems = []
    positive = ("total_batch_size", "seq_len", "n_layer", "n_head", "n_embd", "eval_tokens")
    for name, value in asdict(config).items():
        if isinstance(value, int | float):
            minimum = 1 if name in positive else 0
            if not minimum <= value < 2**63:  # nan is in no interval
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
    """The settings that differ from a checkpoint's (`before`) but must not change on resume.

    One that an older version of this script lacked counts as its default."""
    before = asdict(TrainConfig()) | before
    before["init"] = cli.shown(before["init"])  # as run.json has it
    now = asdict(config) | {"init": cli.shown(config.init)}
    if config.init == "scratch":  # --init may be left out
        before["init"] = "scratch"
    return [
        f"{cli.flag(name)} was {before[name]}, is {value}"
        for name, value in now.items()
        if name not in MAY_CHANGE and value != before[name]
    ]


# --------------------------------------------------------------------------------------------------
# Optimizer and schedule


def configure_optimizer(model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32) -> Any:
    """AdamW that decays matrices and embeddings only; --optimizer muon: Muon for the blocks.

    The default betas are GPT-3's (Brown et al. 2020, appendix B). dtype: of the model's matmuls."""
    by_muon = {}  # the matrices inside the blocks
    if config.optimizer == "muon":
        by_muon = {
            name: p
            for name, p in model.named_parameters()
            if name.startswith("h.") and p.dim() == 2
        }
    by_adamw = [p for name, p in model.named_parameters() if name not in by_muon]
    # Biases and LayerNorms, which are 1-D, are not decayed.
    groups = [
        {"params": [p for p in by_adamw if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in by_adamw if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [dict(group) for group in groups],  # a copy: it adds its defaults, unfit for others
        lr=config.max_lr,
        betas=(0.9, config.beta2),
        eps=1e-8,
        fused=True,  # one kernel for all parameters, on a CPU several times as fast as the loop
    )
    if by_muon:
        from support.muon import Muon, Optimizers, find_split_sizes

        muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        sizes = find_split_sizes(model)
        muon = Muon(by_muon.items(), config.max_lr, config.weight_decay, muon_dtype, sizes)
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
# Evaluation (HellaSwag: hellaswag.py)


@torch.no_grad()
def validation_loss(
    model: GPT, loader: DataLoaderLite, tokens: int, ranks: Ranks, autocast: torch.autocast
) -> float:
    """Mean cross-entropy in nats over the first `tokens` tokens of the split.

    All tokens have the same weight. The ranks share the sequences and sum their losses, so that
    neither B nor the number of ranks matters. Full batches use what is compiled for a GPU."""
    B = loader.B
    T = loader.T
    sequences = min(tokens, loader.total_tokens - 1) // T  # whole ones
    results = []  # (mean loss, sequences) of each batch
    # Each rank takes every world_size-th batch.
    for first in signals.until_stopped(range(ranks.rank * B, sequences, ranks.world_size * B)):
        n = min(B, sequences - first)
        # Sequences follow each other; one token more, since targets are shifted by one.
        buffer = torch.from_numpy(loader.read(first * T, n * T + 1).astype(np.int64))
        buffer = buffer.to(ranks.device)
        x, y = buffer[:-1].view(n, T), buffer[1:].view(n, T)
        # A smaller last batch would be compiled again, so it runs eagerly and in chunks.
        compiled = n == B and ranks.device.type != "cpu"
        chunked = partial(mean_in_chunks, next_token_loss)
        loss_function = model.validation_function if compiled else chunked
        stance = "default" if compiled else "force_eager"
        with autocast, torch.compiler.set_stance(stance):
            loss = loss_function(model.hidden(x), model.head_weight, y)
        results.append((loss, n))
    # Read the losses only now: each read waits for the device. Python's floats are float64.
    total = sum(loss.item() * n for loss, n in results)
    return ranks.sum(total) / sequences


@lru_cache(maxsize=1)  # it is the same at every evaluation
def validation_text(loader: DataLoaderLite, tokens: int) -> tokenizer.TextSize:
    """The size of the text that validation_loss predicts, in tokens, bytes and characters."""
    predicted = min(tokens, loader.total_tokens - 1) // loader.T * loader.T
    return tokenizer.text_size(loader.read(1, predicted))


def print_samples(
    model: GPT, prompt: str, ranks: Ranks, autocast: torch.autocast, last: bool = False
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
    except RunError as error:  # training itself finds out what to do
        print0(f"rank {ranks.rank}: no samples: {error}", every_rank=True)
        return
    for i, tokens in enumerate(idx.tolist()):
        text = indent(tokenizer.printable(tokens), "  ")
        print0(f"rank {ranks.rank} sample {i}:\n{text}", every_rank=True)


# --------------------------------------------------------------------------------------------------
# State: what the loop works with, saved and restored


@dataclass
class Training:
    """What set_up() makes and the loop works with."""

    model: GPT  # evaluated and saved
    ddp_model: nn.Module  # trained: the same weights, in DDP if there are several ranks
    optimizer: Any  # AdamW, or Muon and AdamW as one
    scaler: torch.amp.GradScaler  # does nothing except in float16
    dtype: torch.dtype  # of matmuls
    description: str  # of device and precision, with the reason
    autocast: torch.autocast  # computes matmuls in dtype
    loader: DataLoaderLite
    val_loader: DataLoaderLite | None  # None without validation
    tasks: list[Any] | None  # of HellaSwag; None without it
    run: RunFolder  # log and checkpoints
    meter: console.Meter  # time
    step: int  # updates made
    skipped: int  # updates skipped because loss or gradient was not finite


BeforeStep = Callable[[int, Training], None]  # see main()


def save_checkpoint(
    training: Training, config: TrainConfig, ranks: Ranks, required: bool = False
) -> None:
    """Saves everything needed to continue the run in log_dir/step_*/, unless it is saved already.

    All ranks call it. A checkpoint that can't be written is an error only if it is `required`."""
    if training.run.saved_step == training.step:
        return
    state = {
        "format": 1,
        "step": training.step,
        "elapsed": training.meter.elapsed,
        "skipped": training.skipped,
        "config": asdict(config),  # a resumed run must have the same
        "dtype": str(training.dtype),
        "random": ranks.gather(devices.random_state(ranks.device)),  # dropout in a fork needs it
        "optimizer": training.optimizer.state_dict(),  # gathered if it is sharded
        "scaler": training.scaler.state_dict(),
        "loader": training.loader.state_dict(),  # its position
    }
    training.run.save(training.model, state, required)


def restore_state(
    saved: dict[str, Any], optimizer: Any, scaler: Any, loader: DataLoaderLite, ranks: Ranks
) -> None:
    """Restores what save_checkpoint saved, except the weights and counters."""
    loader.load_state_dict(saved["loader"])
    optimizer.load_state_dict(saved["optimizer"])
    if ranks.device.type == "cpu":  # the tensors map the file, which must not stay open
        for state in optimizer.state.values():  # of one parameter: moments, a number of steps
            for name, value in state.items():
                state[name] = value.clone() if isinstance(value, Tensor) else value
    if saved["scaler"]:  # only float16 has one
        scaler.load_state_dict(saved["scaler"])
    if ranks.rank < len(saved["random"]):  # there may be more ranks now
        devices.set_random_state(ranks.device, saved["random"][ranks.rank])


# --------------------------------------------------------------------------------------------------
# Set-up


def new_model(config: TrainConfig, ranks: Ranks, checkpoint: Path | None = None) -> GPT:
    """The model to train: from a checkpoint, from --init, or from scratch.

    Only rank 0 reads weights; DDP sends them to the other ranks."""
    torch.manual_seed(config.seed)
    if ranks.rank > 0:
        return GPT(ranks.broadcast(None))  # rank 0's shape, from below
    # Fields of the same name, also those that a fork adds to both classes.
    settings = asdict(config)
    same = {f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}
    given = checkpoint or (config.init if config.init != "scratch" else None)
    if given is not None:  # resumed or fine-tuned: the weights decide on GPT-2's shape
        same = {name: same[name] for name in same.keys() - {"n_layer", "n_head", "n_embd"}}
        model = GPT.from_pretrained(given, **same)
    else:
        model = GPT(GPTConfig(block_size=config.seq_len, **same))
    shape = model.config  # that of given weights may be larger
    if shape.block_size < config.seq_len or shape.vocab_size != VOCAB_SIZE:
        problem = f"context {shape.block_size}, vocabulary {shape.vocab_size}"
        raise UserError(f"--init {config.init}: {problem} for --seq-len {config.seq_len}")
    ranks.broadcast(shape)
    return model


def choose_micro_batch_size(
    config: TrainConfig, model: GPT, ranks: Ranks, autocast: torch.autocast
) -> int:
    """B: --micro-batch-size, or the largest power of two that fits and divides a rank's share."""
    T = config.seq_len
    unit = T * max(config.micro_batch_size, 1) * ranks.world_size  # tokens per micro-step
    if config.total_batch_size % unit:
        nearest = max(round(config.total_batch_size / unit), 1) * unit
        problem = f"is not a multiple of {unit} (sequence x micro-batch x ranks)"
        remedy = f"the nearest that is: {nearest}"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    sequences = config.total_batch_size // (T * ranks.world_size)  # per step, on each rank
    return largest_that_fits(
        config.micro_batch_size,
        model,
        ranks,
        autocast,
        T=T,
        sequences=sequences,
        compiled=config.compile,
        low_memory=config.low_memory,
        shard_optimizer=config.shard_optimizer,
    )


def wrap_in_ddp(
    model: GPT, B: int, T: int, ranks: Ranks, autocast: torch.autocast
) -> DistributedDataParallel:
    """The model in DDP, which averages the gradients of the ranks."""
    torch._dynamo.config.optimize_ddp = False  # it splits graphs, but ours are single blocks
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # saves a copy of the gradients
    )
    settle_buckets(ddp_model, B, T, autocast)
    return ddp_model


def find_start(config: TrainConfig, run: RunFolder) -> tuple[dict[str, Any] | None, bool]:
    """(the state in the newest checkpoint, None without one; True if the last run continues)"""
    checkpoint = run.find_start(config.resume)
    if checkpoint is None:
        # A run that was stopped before its first save starts again, and overwrites its log, if
        # its settings are still the same.
        before = run.last_config
        return None, before is not None and not differences(before, config)
    saved = checkpoints.read_training_state(checkpoint)
    other = saved["config"].keys() ^ asdict(config).keys()
    if other:
        names = ", ".join(map(cli.flag, sorted(other)))
        print0(f"warning: the checkpoint was saved by other code, which differs in {names}")
    changes = differences(saved["config"], config)
    if changes:
        changed = ", ".join(changes)
        raise UserError(
            f"--resume: {config.log_dir} holds another run ({changed}); choose another --log-dir"
        )
    return saved, True


def set_up(config: TrainConfig, ranks: Ranks, model: GPT | None = None) -> Training | None:
    """Makes everything for the loop, new or from a checkpoint. None if the run is complete."""
    # Where to start: at the newest checkpoint if the last run continues, else at step 0.
    run = RunFolder(Path(config.log_dir), ranks, config.keep_checkpoints, config.keep_every)
    saved = None
    continues = False
    if config.resume or ranks.job:  # torchrun may restart a run without --resume
        saved, continues = find_start(config, run)
    counters = saved or {"step": 0, "elapsed": 0.0, "skipped": 0, "dtype": None}

    # The model, and by its size the precision, which micro-batch, optimizer and scaler depend on.
    if model is None:
        model = new_model(config, ranks, run.checkpoint)
    if config.save_every and ranks.rank == 0 and not model.is_gpt2:
        huggingface.check_readable(model)
    model = model.to(ranks.device)
    torch.manual_seed(config.seed + 1 + ranks.rank)  # ranks must not share a fork's dropout masks
    precision = None
    if ranks.rank == 0:  # on a CPU it may be measured
        precision = devices.choose_precision(
            config.dtype, ranks.device, model.num_parameters(), before=counters["dtype"]
        )
    dtype, description = ranks.broadcast(precision)
    if ranks.device.type == "mps" and dtype == torch.float16:
        # Fused AdamW ignores the scaler's found_inf on MPS (PyTorch PR #186360).
        raise UserError("--dtype float16: overflows would ruin the weights on MPS; use float32")
    if ranks.device.type == "cuda" and dtype != torch.float32:
        torch.set_float32_matmul_precision("high")  # TF32 for matmuls that remain in float32
    autocast = torch.autocast(ranks.device.type, dtype=dtype, enabled=dtype != torch.float32)

    # Data: each rank reads its part of every micro-step. Validation is in the order of the file.
    T = config.seq_len
    B = choose_micro_batch_size(config, model, ranks, autocast)
    loader = DataLoaderLite(
        config.data,
        "train",
        B,
        T,
        rank=ranks.rank,
        world_size=ranks.world_size,
        seed=config.seed,
        shuffle=config.shuffle,
        pin_memory=ranks.device.type == "cuda",
    )
    val_loader = tasks = None
    if config.eval_every:
        val_loader = DataLoaderLite(config.data, "val", B, T, shuffle=False)
    if config.hellaswag_every:
        context = model.config.block_size
        tasks = hellaswag.prepare_for_training(config.hellaswag_data, context, ranks.gather)

    # Optimizer, and what a checkpoint has of it.
    optimizer = configure_optimizer(model, config, dtype)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16)
    if saved is not None:
        restore_state(saved, optimizer, scaler, loader, ranks)
        if run.is_finished(saved["step"], config.max_steps):
            print0(f"already trained {saved['step']} steps; to continue, raise --max-steps")
            return None
    # From here on the folder changes: the log is trimmed, or earlier checkpoints move aside.
    software = devices.gpu_software(ranks.device, dtype)
    run.begin(counters["step"], description, asdict(config), continues, software)

    # What takes time comes last: whether anything compiles, DDP's warm-up, the machine's speed.
    model.prepare(config.compile and devices.can_compile(ranks.device), config.low_memory)
    ddp_model = wrap_in_ddp(model, B, T, ranks, autocast) if ranks.world_size > 1 else model
    peak_flops, _ = devices.peak_flops(ranks.device, dtype)
    meter = console.Meter(
        tokens=config.total_batch_size,
        flops_per_token=model.flops_per_token(T),
        peak_flops=ranks.world_size * peak_flops,
        interval=config.eval_every or config.save_every or 20,
        elapsed=counters["elapsed"],
    )
    return Training(
        model=model,
        ddp_model=ddp_model,
        optimizer=optimizer,
        scaler=scaler,
        dtype=dtype,
        description=description,
        autocast=autocast,
        loader=loader,
        val_loader=val_loader,
        tasks=tasks,
        run=run,
        meter=meter,
        step=counters["step"],
        skipped=counters["skipped"],
    )


# --------------------------------------------------------------------------------------------------
# The loop


def train(training: Training, config: TrainConfig, ranks: Ranks, before_step: BeforeStep) -> None:
    """Saves, evaluates, updates, logs, until max_steps. Raises Stopped after a stop signal."""
    model = training.model  # evaluated and saved
    ddp_model = training.ddp_model  # trained; it has the same weights
    optimizer = training.optimizer
    scaler = training.scaler
    loader = training.loader
    autocast = training.autocast
    run = training.run
    grad_accum_steps = config.total_batch_size // (loader.B * loader.T * ranks.world_size)
    # One round more than there are updates: the last one only saves and evaluates.
    for step in range(training.step, config.max_steps + 1):
        last = step == config.max_steps
        before_step(step, training)
        # Save before evaluating, which may fail. An interval of 0 turns a part off.
        if config.save_every and (last or (step > 0 and step % config.save_every == 0)):
            save_checkpoint(training, config, ranks, required=last)
        model.eval()  # GPT-2 is trained without dropout, but a fork may have it
        if config.eval_every and (last or step % config.eval_every == 0):
            loss = validation_loss(model, training.val_loader, config.eval_tokens, ranks, autocast)
            text = validation_text(training.val_loader, config.eval_tokens)
            run.log(step, val=loss, bpb=text.bits_per_byte(loss))
        if training.tasks and (last or step % config.hellaswag_every == 0):
            run.log(step, hella=hellaswag.accuracy(model, training.tasks, ranks, autocast))
        if config.sample_every and step > 0 and (last or step % config.sample_every == 0):
            print_samples(model, config.sample_prompt, ranks, autocast, last)
        model.train()
        if last:
            break

        # ---- One update of the weights -----------------------------------------------------------
        began = time.perf_counter()
        lr = get_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        first_token = loader.position
        random_state = devices.random_state(ranks.device)  # like first_token, if we stop midway
        loss_sum = torch.zeros((), device=ranks.device)
        for micro_step in range(grad_accum_steps):
            if signals.received and ranks.world_size == 1:  # several ranks agree on it below
                loader.position = first_token
                devices.set_random_state(ranks.device, random_state)
                raise Stopped
            x, y = loader.next_batch()  # (B, T) each
            # Copies from pinned memory don't wait for the kernels that are still running.
            x = x.to(ranks.device, non_blocking=loader.pin_memory)
            y = y.to(ranks.device, non_blocking=loader.pin_memory)
            # DDP exchanges the gradients once per step, in the last micro-step.
            ddp_model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with autocast:  # the backward pass takes the precisions of the forward pass
                _, micro_loss = ddp_model(x, y)
            # DDP averages over ranks, but the gradients of micro-steps add up: divide by their
            # number to get the gradient of the mean loss. The scaler keeps float16 gradients
            # from vanishing.
            scaler.scale(micro_loss / grad_accum_steps).backward()
            loss_sum += micro_loss.detach()  # .item() would synchronize in every micro-step
        # Clip the norm of all gradients together, after unscaling: grad_clip applies to unscaled
        # gradients. Without clipping (inf) the norm is still logged.
        scaler.unscale_(optimizer)
        norm_tensor = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        # The one synchronization with the device. All ranks get the same sums, so they make the
        # same decisions; the flag tells all of them if any has received a stop signal.
        stop_flag = torch.full((), float(bool(signals.received)), device=ranks.device)
        sums = torch.stack([loss_sum, stop_flag])
        if ranks.world_size > 1:
            dist.all_reduce(sums)
        total_loss, stopped = sums.tolist()
        loss = total_loss / (grad_accum_steps * ranks.world_size)
        norm = norm_tensor.item()
        # A gradient that is not finite would ruin weights and moments. In float16 that is routine:
        # the scaler skips the step and halves the scale; at 1 or below, the gradient is to blame.
        if math.isfinite(loss) and (math.isfinite(norm) or scaler.get_scale() > 1):
            scaler.step(optimizer)
        else:
            training.skipped += 1
            problem = f"step {step}: loss {loss}, norm {norm} on the tokens from {first_token} on"
            if training.skipped > config.skip_bad_steps:
                skip = f"skip this update with --resume --skip-bad-steps {training.skipped}"
                raise RunError(f"{problem}; the weights are unchanged. Lower --max-lr, or {skip}")
            print0(f"warning: {problem}: skipped, {training.skipped} of {config.skip_bad_steps}")
        scaler.update()
        # Under DDP gradients are views of its buckets: zero them in place, or they'd be copies.
        optimizer.zero_grad(set_to_none=ranks.world_size == 1)
        # ---- End of the update -------------------------------------------------------------------

        training.step = step + 1
        training.meter.end_step(began, steps_left=config.max_steps - training.step)
        print0(f"step {step:5d}/{config.max_steps} {training.meter.line(loss, lr, norm)}")
        run.log(step, train=loss, lr=lr, norm=norm, **training.meter.streams)
        if stopped:
            raise Stopped


# --------------------------------------------------------------------------------------------------
# The run from its command line to its last line


def stop(training: Training, config: TrainConfig, ranks: Ranks) -> int:
    """Saves after a stop signal, if saving is on. Returns the exit status."""
    hint = "--resume continues" if config.save_every else "nothing is saved"
    print0(f"stopped by a signal after {training.step} updates; {hint}")
    if config.save_every:
        save_checkpoint(training, config, ranks, required=True)
        training.run.clean_up(training.step)
    return signals.exit_status()


def conclude(training: Training, config: TrainConfig) -> None:
    """Records and prints what the run ends with."""
    run = training.run
    if config.save_every:
        run.clean_up(training.step, wait=True)  # now that the last validation loss is known
    if config.eval_every:
        text = validation_text(training.val_loader, config.eval_tokens)
        console.print_validation(run.latest["val"], text)
    console.print_cost(training.step, training.meter.elapsed)
    if config.save_every:
        run.print_result(training.step, config.sample_prompt, training.model.is_gpt2)
    run.finish(training.step)


def print_plan(config: TrainConfig) -> None:
    """Prints FLOPs, memory and time of a run. Trains nothing."""
    from support import plan

    with torch.device("meta"):  # allocates nothing
        model = new_model(config, Ranks(rank=0, world_size=1, device=torch.device("meta")))
    plan.print_plan(
        model,
        device=config.device,
        dtype=config.dtype,
        data=config.data,
        max_steps=config.max_steps,
        total_batch_size=config.total_batch_size,
        B=config.micro_batch_size,
        T=config.seq_len,
        low_memory=config.low_memory,
        compiled=config.compile,
    )


def main(
    args: list[str] | None = None,
    model: GPT | None = None,
    before_step: BeforeStep = lambda step, training: None,
) -> int:
    """Reads the command line and trains. Returns the exit status: 0, or 130 / 143 after a signal.

    model: train this one instead of a new one. before_step(step, training): called at the start of
    each step, and once more after the last one. Both are for bench.py."""
    config = read_config(args)
    if config.plan:
        print_plan(config)
        return 0
    ranks = Ranks.start(config.device, config.deterministic)
    if config.low_memory and ranks.device.type == "cpu":
        devices.keep_freed_memory(False)
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:
        missing = f"no shards in {SHARDS_FOLDER}/ (`python fineweb.py` builds them)"
        print0(f"{missing}: the shakespeare preset")
    status = 0
    try:
        # Only one run at a time may use the folder.
        log_dir = Path(config.log_dir)
        with lock(log_dir, ranks.rank), cli.unprinted_to(log_dir / "unprinted.txt"):
            training = set_up(config, ranks, model)
            if training is not None:
                console.announce(
                    device=training.description,
                    model=training.model,
                    loader=training.loader,
                    data=config.data,
                    max_steps=config.max_steps,
                    total_batch_size=config.total_batch_size,
                    peak=devices.peak_flops(ranks.device, training.dtype),
                    log_dir=config.log_dir,
                    checkpoint=training.run.checkpoint,
                )
                # From here on a signal stops the run between two updates, and saves.
                signals.collect_stop_signals()
                try:
                    train(training, config, ranks, before_step)
                    conclude(training, config)
                except Stopped:
                    status = stop(training, config, ranks)
    except RuntimeError as error:
        raise explain(error, str(ranks.device), config.micro_batch_size) from None
    del training  # the DDP in it must go before its process group, or the exit can hang
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    cli.run(main)

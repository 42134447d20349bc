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
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
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

from support import checkpoints, cli, console, devices, huggingface, run_folder, signals, tokenizer
from support.cli import print0
from support.errors import RunError, Stopped, UserError, explain
from support.memory import largest_micro_batch
from support.ranks import Ranks, settle_buckets
from support.run_log import ROOT
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

    On a GPU columns are added up to a multiple of 64 (50,304), which the tensor cores need. It is
    done here and not in the weights, since checkpoints keep GPT-2's 50,257 rows. A bias makes the
    logits of these columns -inf, so that a softmax over all of them (`padded`) needs no slice
    (bench/kernels)."""
    V = wte.size(0)
    bias = None
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
    and less time on a CPU (bench/NOTES.md). Since the gradient of a sum of losses is known, each
    chunk computes it at once, and no logits are kept for the backward pass."""

    CHUNK = 1024  # tokens

    @staticmethod
    def forward(ctx: Any, x: Tensor, wte: Tensor, targets: Tensor) -> Tensor:
        """x (…, C), wte (V, C), targets (…) -> float32 scalar"""
        shape = x.shape
        x = x.flatten(0, -2)  # (N, C)
        targets = targets.flatten()  # (N,)
        # Autocast doesn't reach into this function: use its dtype for the matmuls.
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        V = wte.size(0)
        w = F.pad(wte.to(dtype), (0, 0, 0, -V % 64))  # aligned rows are faster, on a CPU as well
        train = ctx.needs_input_grad[0]
        loss = torch.zeros((), device=x.device)
        dx = torch.empty_like(x)
        dw = None
        for i in range(0, len(x), ChunkedLoss.CHUNK):
            chunk = slice(i, i + ChunkedLoss.CHUNK)  # n tokens
            x_chunk = x[chunk].to(dtype)
            target = targets[chunk, None]  # (n, 1)
            logits = x_chunk @ w.t()  # (n, V padded)
            logits[:, V:] = -math.inf
            p = logits.softmax(1, dtype=torch.float32)
            # -log p[target], computed from the largest p and the difference of the two logits: an
            # unlikely target's probability can underflow to 0.
            largest = logits.amax(1, keepdim=True).float()
            target_logits = logits.gather(1, target).float()
            loss += (largest - target_logits - p.amax(1, keepdim=True).log()).sum()
            if train:
                # d(summed loss) / d(logits) is p, minus 1 at the target.
                p = p.scatter_add_(1, target, torch.full_like(target_logits, -1.0)).to(dtype)
                dx[chunk] = p @ w
                dw_chunk = p.t() @ x_chunk
                dw = dw_chunk.to(wte.dtype) if dw is None else dw.add_(dw_chunk)
            del logits, p  # otherwise they live until the next ones are allocated
        if train:
            # From the sum to the mean.
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
        # Both are set by prepare(). loss_function computes the loss without keeping all logits;
        # low_memory recomputes blocks in the backward pass, so that no activations are stored.
        self.loss_function: Callable | None = None
        self.low_memory = False
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
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

        Blocks are compiled one by one and share code. The plain loss, compiled, makes the fewest
        passes over the logits, which is best on a GPU; the chunked one takes the least memory."""
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

        HellaSwag packs four endings into one sequence, so it passes position (B, T) and mask
        (B, 1, T, T) bool. Nobody else needs these: by default positions are 0 … T-1, and the mask
        is causal."""
        if position is None:
            T = idx.size(1)
            if self.config.block_size < T:
                raise UserError(f"{T} tokens, but the model's context is {self.config.block_size}")
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
        x = self.hidden(idx)  # (B, T, C)
        if targets is None:
            return lm_head(x, self.wte.weight), None
        if self.loss_function is not None:
            return None, self.loss_function(x, self.wte.weight, targets)
        logits = lm_head(x, self.wte.weight)
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
            window = idx[:, -block_size:]  # what fits in the context
            end = window.size(1)
            # Padding comes after the text, where no token attends to it.
            x = self.hidden(devices.pad_length(window, block_size))[:, end - 1]  # (B, C)
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
        names = [field.name for field in fields(GPTConfig)]
        settings, weights = huggingface.read_pretrained(name, names)
        with torch.device("meta"):  # allocates nothing: the files have the weights
            model = cls(GPTConfig(**settings))
        huggingface.load_weights(model, weights, name)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a Hugging Face GPT-2 with its tokenizer."""
        huggingface.write_pretrained(Path(folder), asdict(self.config), self.state_dict())


# --------------------------------------------------------------------------------------------------
# Data: token order and the data loader (support/tokenizer.py opens shards)

SHARDS_FOLDER = "edu_fineweb10B"
PASSAGE = 256  # tokens of a .txt file that stay together when it is shuffled


def permutation(n: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … n-1 from `seed` alone; NumPy's own may change with its version."""
    return np.random.PCG64(seed).random_raw(n).argsort(kind="stable")


class DocumentOrder(NamedTuple):
    """The documents of a shard in the order of an epoch, (n,) int64 each."""

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

    A document begins at 50256; a .txt file is cut into passages of 256 tokens. Without shuffle the
    order is that of the files.

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
        pin_memory: bool = False,
    ):
        self.B = B
        self.T = T
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.pin_memory = pin_memory  # batches can be copied to a GPU while it computes
        self.position = 0  # in the sequence, of the next micro-batch of all ranks
        self.paths, self.shards = tokenizer.open_split(Path(data), split)
        self.passages = Path(data).suffix == ".txt"
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
            place = int(np.searchsorted(shard_ends, offset, side="right"))
            shard = int(shard_order[place])
            offset -= int(shard_ends[place] - self.lengths[shard])
            # Copy documents, the first from the offset on, up to the end of the shard.
            order = self.document_order(epoch, shard)
            document = int(np.searchsorted(order.ends, offset, side="right"))
            while count > 0 and document < len(order.ends):
                file_end = int(order.file_ends[document])
                left = int(order.ends[document]) - offset  # tokens left in this document
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
        if not self.shuffle:  # the whole shard counts as one document
            starts = np.zeros(1, dtype=np.int64)
        elif self.passages:
            starts = np.arange(0, len(tokens), PASSAGE)
        else:
            # Tokens before the first 50256 end a document of the previous shard: they count as one.
            starts = np.union1d(np.zeros(1, dtype=np.int64), np.flatnonzero(tokens == EOT))
        lengths = np.diff(starts, append=len(tokens))
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
        self.position += self.world_size * tokens
        return buffer[:-1].view(self.B, self.T), buffer[1:].view(self.B, self.T)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of tokens depends on."""
        names = [path.name for path in self.paths]
        shards = list(zip(names, self.lengths.tolist(), strict=True))
        digest = hashlib.sha256(json.dumps(shards).encode()).hexdigest()
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shards": digest,
        }

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

    # A field is a flag: tyro prints these comments as --help, under headings like this one.

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
    keep_checkpoints: int = 3  # number of recent checkpoints to keep, plus the best; 0: all
    keep_every: int = 0  # never delete checkpoints at multiples of this many steps; 0: none

    # Logging

    tensorboard: bool = False  # also log to TensorBoard, in log_dir/tensorboard/
    wandb: bool = False  # also log to Weights & Biases


# fmt: off
SHAKESPEARE = dict(
    data=str(ROOT / "input.txt"), max_steps=600, total_batch_size=512, seq_len=64,
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
    """The settings that differ from a checkpoint's (`before`) but must not change on resume.

    One that an older version of this script lacked counts as its default."""
    before = asdict(TrainConfig()) | before
    fixed = FIXED if config.init == "scratch" else (*FIXED, "init")
    changed = [name for name in fixed if getattr(config, name) != before[name]]
    return [f"{cli.flag(name)} was {before[name]}, is {getattr(config, name)}" for name in changed]


# --------------------------------------------------------------------------------------------------
# Optimizer and schedule


def configure_optimizer(
    model: GPT, config: TrainConfig, muon_dtype: torch.dtype = torch.float32
) -> Any:
    """AdamW that decays matrices and embeddings only; --optimizer muon: Muon for the blocks.

    The default betas are GPT-3's (Brown et al. 2020, appendix B). muon_dtype: of Muon's matmuls."""
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
        groups,
        lr=config.max_lr,
        betas=(0.9, config.beta2),
        eps=1e-8,
        fused=True,  # one kernel for all parameters, on a CPU several times as fast as the loop
    )
    if by_muon:
        from support.muon import Muon, Optimizers

        muon = Muon(by_muon.items(), config.max_lr, config.weight_decay, dtype=muon_dtype)
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
        warmdown = min(config.warmdown_steps, config.max_steps - config.warmup_steps)
        share = min((config.max_steps - step) / max(warmdown, 1), 1.0)
    else:
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr + share * (config.max_lr - config.min_lr)


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def validation_loss(
    model: GPT, loader: DataLoaderLite, tokens: int, ranks: Ranks, autocast: torch.autocast
) -> float:
    """Mean loss in nats over the first `tokens` tokens of the split, all with the same weight.

    The ranks share the sequences and sum their losses, so that neither B nor the number of ranks
    matters. Full batches use the compiled model if training on a GPU does."""
    B = loader.B
    T = loader.T
    sequences = min(tokens, loader.total_tokens - 1) // T
    results = []  # (mean loss, sequences) of each batch
    for first in signals.until_stopped(range(ranks.rank * B, sequences, ranks.world_size * B)):
        n = min(B, sequences - first)
        # Sequences follow each other; one token more, since targets are shifted by one.
        buffer = torch.from_numpy(loader.read(first * T, n * T + 1).astype(np.int64))
        buffer = buffer.to(ranks.device)
        x, y = buffer[:-1].view(n, T), buffer[1:].view(n, T)
        # A smaller last batch would be compiled again, so it runs eagerly and in chunks.
        compiled = n == B and ranks.device.type != "cpu"
        loss_function = model.loss_function if compiled else chunked_next_token_loss
        stance = "default" if compiled else "force_eager"
        with autocast, torch.compiler.set_stance(stance):
            loss = loss_function(model.hidden(x), model.wte.weight, y)
        results.append((loss, n))
    # Read the losses only now: each read waits for the device. Python's floats are float64.
    total = sum(loss.item() * n for loss, n in results)
    return ranks.sum(total) / sequences


class TextSize(NamedTuple):
    """The size of a text, to compare its loss with that of other tokenizers."""

    tokens: int
    bytes: int
    characters: int

    def bits_per_byte(self, loss: float) -> float:
        """loss: in nats per token"""
        return loss * self.tokens / (self.bytes * math.log(2))

    def nats_per_character(self, loss: float) -> float:
        """loss: in nats per token"""
        return loss * self.tokens / self.characters


@lru_cache(maxsize=1)  # it is the same at every evaluation
def validation_text(loader: DataLoaderLite, tokens: int) -> TextSize:
    """The text of the tokens that validation_loss predicts."""
    predicted = min(tokens, loader.total_tokens - 1) // loader.T * loader.T
    return TextSize(predicted, *tokenizer.text_size(loader.read(1, predicted)))


def hellaswag_accuracy(
    model: GPT, tasks: list[Any], ranks: Ranks, autocast: torch.autocast
) -> float:
    """The share of HellaSwag tasks that the model gets right, by the mean loss per token."""
    import hellaswag

    with autocast, torch.compiler.set_stance("force_eager"):  # don't compile one-off shapes
        correct = hellaswag.count_correct(model, tasks, ranks.device, ranks.rank, ranks.world_size)
    return ranks.sum(correct) / len(tasks)


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
    with autocast, torch.compiler.set_stance("force_eager"):  # don't compile one-off shapes
        idx = model.generate(idx, length, generator=generator)
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
    optimizer: Any
    scaler: torch.amp.GradScaler
    dtype: torch.dtype  # of matmuls
    description: str  # of device and precision, with the reason
    autocast: torch.autocast
    loader: DataLoaderLite
    val_loader: DataLoaderLite | None
    tasks: list[Any] | None  # of HellaSwag
    run: run_folder.RunFolder
    meter: console.Meter
    step: int  # updates made
    skipped: int  # updates skipped because loss or gradient was not finite


# Called as before_step(step, training) at the start of each step, and after the last one.
BeforeStep = Callable[[int, Training], None]


def save_checkpoint(
    training: Training, config: TrainConfig, ranks: Ranks, required: bool = False
) -> None:
    """Saves everything needed to continue the run in log_dir/step_*/, unless it is saved already.

    All ranks call it. A checkpoint that can't be written is an error only if it is `required`."""
    if training.run.saved_step == training.step:
        return
    # Samples have a generator of their own; dropout in a fork would use these.
    random = {"cpu": torch.get_rng_state()}
    kind = ranks.device.type
    if kind != "cpu":
        random[kind] = torch.get_device_module(kind).get_rng_state()
    state = {
        "format": 1,
        "step": training.step,
        "elapsed": training.meter.elapsed,
        "skipped": training.skipped,
        "config": asdict(config),
        "dtype": str(training.dtype),
        "random": ranks.gather(random),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
        "loader": training.loader.state_dict(),
    }
    training.run.save(training.model, state, required)


def restore_state(
    saved: dict[str, Any], optimizer: Any, scaler: Any, loader: DataLoaderLite, ranks: Ranks
) -> None:
    """Restores what save_checkpoint saved, except the weights and counters."""
    loader.load_state_dict(saved["loader"])
    optimizer.load_state_dict(saved["optimizer"])
    if ranks.device.type == "cpu":  # the tensors are memory-mapped
        for moments in optimizer.state.values():
            moments.update({key: tensor.clone() for key, tensor in moments.items()})
    if saved["scaler"]:  # only float16 has one
        scaler.load_state_dict(saved["scaler"])
    if ranks.rank < len(saved["random"]):  # there may be more ranks now
        random = saved["random"][ranks.rank]
        torch.set_rng_state(random["cpu"])
        kind = ranks.device.type
        if kind != "cpu" and kind in random:
            torch.get_device_module(kind).set_rng_state(random[kind])


# --------------------------------------------------------------------------------------------------
# Set-up


def new_model(config: TrainConfig, checkpoint: Path | None = None) -> GPT:
    """A model from a checkpoint, from --init, or from scratch."""
    if checkpoint is not None:
        return GPT.from_pretrained(checkpoint)
    if config.init != "scratch":
        return GPT.from_pretrained(config.init)
    shape = GPTConfig(config.seq_len, VOCAB_SIZE, config.n_layer, config.n_head, config.n_embd)
    return GPT(shape)


def start_model(config: TrainConfig, checkpoint: Path | None, ranks: Ranks) -> GPT:
    """The model to train. Only rank 0 draws or reads weights; DDP sends them to the other ranks."""
    torch.manual_seed(config.seed)
    if ranks.rank > 0:
        shape = ranks.broadcast(None)  # rank 0's, from below
        with torch.device("meta"):
            model = GPT(shape)
        return model.to_empty(device=ranks.device)
    model = new_model(config, checkpoint)
    shape = model.config
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
    unit = T * max(config.micro_batch_size, 1) * ranks.world_size
    if config.total_batch_size % unit:
        nearest = max(round(config.total_batch_size / unit), 1) * unit
        problem = f"is not a multiple of {unit} (sequence x micro-batch x ranks)"
        remedy = f"the nearest that is: {nearest}"
        raise UserError(f"--total-batch-size {config.total_batch_size} {problem}; {remedy}")
    if config.micro_batch_size:
        return config.micro_batch_size
    return largest_micro_batch(
        model,
        ranks,
        autocast,
        T=T,
        sequences=config.total_batch_size // (T * ranks.world_size),  # per step, on each rank
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


def set_up(config: TrainConfig, ranks: Ranks, model: GPT | None = None) -> Training | None:
    """Makes everything for the loop, new or from a checkpoint. None if the run is complete."""
    # Where to start. Without a checkpoint, a run continues if its settings are the same: it was
    # stopped before its first save, starts again and overwrites its lines in the log.
    run = run_folder.RunFolder(config.log_dir, ranks, config.keep_checkpoints, config.keep_every)
    checkpoint = run.find_start(config.resume)
    saved = {}
    continues = run.last_config is not None and not differences(run.last_config, config)
    if checkpoint is not None:
        saved = checkpoints.read_training_state(checkpoint)
        changes = differences(saved["config"], config)
        if changes:
            raise UserError(f"--resume: {config.log_dir} holds another run: {', '.join(changes)}")
        continues = True

    # The model, and by its size the precision, which micro-batch, optimizer and scaler depend on.
    if model is None:
        model = start_model(config, checkpoint, ranks)
    model = model.to(ranks.device)
    dtype, description = ranks.on_rank_0(
        devices.choose_precision,
        config.dtype,
        ranks.device,
        model.num_parameters(),
        before=saved.get("dtype"),
    )
    autocast = devices.training_autocast(ranks.device, dtype)
    if saved and saved["dtype"] != str(dtype):
        print0(f"precision: {saved['dtype']} so far, {dtype} from here on")

    T = config.seq_len
    B = choose_micro_batch_size(config, model, ranks, autocast)
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    order = {"seed": config.seed, "shuffle": config.shuffle}
    pin = ranks.device.type == "cuda"
    loader = DataLoaderLite(config.data, "train", B, T, **place, **order, pin_memory=pin)
    val_loader = tasks = None
    if config.eval_every:
        val_loader = DataLoaderLite(config.data, "val", B, T, shuffle=False)
    if config.hellaswag_every:
        import hellaswag

        context = model.config.block_size
        tasks = hellaswag.prepare_for_training(config.hellaswag_data, context, ranks.gather)

    # Muon computes in bfloat16 or float32.
    muon_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    optimizer = configure_optimizer(model, config, muon_dtype)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16)
    step = saved.get("step", 0)
    if saved:
        restore_state(saved, optimizer, scaler, loader, ranks)
        if run.is_finished(step, config.max_steps):
            print0(f"already trained {step} steps; to continue, raise --max-steps")
            return None
    run.begin(step, description, asdict(config), continues)

    # Last, since compiling and DDP's warm-up take time.
    model.prepare(config.compile and devices.can_compile(ranks.device), config.low_memory)
    ddp_model = wrap_in_ddp(model, B, T, ranks, autocast) if ranks.world_size > 1 else model
    meter = console.Meter(
        tokens=config.total_batch_size,
        flops_per_token=model.flops_per_token(T),
        peak=devices.peak_flops(ranks.device, dtype),
        devices=ranks.world_size,
        interval=config.eval_every or config.save_every or 20,
        elapsed=saved.get("elapsed", 0.0),
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
        step=step,
        skipped=saved.get("skipped", 0),
    )


# --------------------------------------------------------------------------------------------------
# The loop


def is_due(every: int, step: int, last: bool) -> bool:
    """True at multiples of `every` steps and after the last step; never if `every` is 0."""
    return every > 0 and (last or step % every == 0)


def train_loop(
    training: Training, config: TrainConfig, ranks: Ranks, before_step: BeforeStep | None
) -> None:
    """Saves, evaluates, updates, logs, until max_steps. Raises Stopped after a stop signal."""
    model = training.model  # evaluated and saved
    ddp_model = training.ddp_model  # trained; it has the same weights
    optimizer = training.optimizer
    scaler = training.scaler
    loader = training.loader
    autocast = training.autocast
    run = training.run
    meter = training.meter
    grad_accum_steps = config.total_batch_size // (loader.B * loader.T * ranks.world_size)
    # One round more than there are updates: the last one only saves and evaluates.
    for step in range(training.step, config.max_steps + 1):
        last = step == config.max_steps
        due = partial(is_due, step=step, last=last)
        if before_step is not None:
            before_step(step, training)
        if due(config.save_every) and (step > 0 or last):  # before evaluating, which may fail
            save_checkpoint(training, config, ranks, required=last)
        model.eval()  # GPT-2 is trained without dropout, but a fork may have it
        if due(config.eval_every):
            loss = validation_loss(model, training.val_loader, config.eval_tokens, ranks, autocast)
            text = validation_text(training.val_loader, config.eval_tokens)
            run.log(step, val=loss, bpb=text.bits_per_byte(loss))
        if training.tasks and due(config.hellaswag_every):
            run.log(step, hella=hellaswag_accuracy(model, training.tasks, ranks, autocast))
        if step > 0 and due(config.sample_every):
            print_samples(model, config.sample_prompt, ranks, autocast, last)
        model.train()
        if last:
            break

        # ---- One update of the weights -----------------------------------------------------------
        meter.start_step()
        lr = get_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        first_token = loader.position  # names this batch if the update is not finite
        loss_sum = torch.zeros((), device=ranks.device)
        for micro_step in range(grad_accum_steps):
            x, y = loader.next_batch()  # (B, T) each
            # Copies from pinned memory don't wait for the kernels that are still running.
            x = x.to(ranks.device, non_blocking=loader.pin_memory)
            y = y.to(ranks.device, non_blocking=loader.pin_memory)
            # DDP exchanges the gradients once per step, in the last micro-step.
            ddp_model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            with autocast:  # the backward pass takes the precisions of the forward pass
                _, micro_loss = ddp_model(x, y)
            # DDP averages over ranks, but gradients of micro-steps add up: divided by their
            # number, they add up to the gradient of the mean loss. The scaler keeps float16
            # gradients from vanishing.
            scaler.scale(micro_loss / grad_accum_steps).backward()
            loss_sum += micro_loss.detach()  # .item() would synchronize in every micro-step
        # Unscale before clipping: grad_clip applies to unscaled gradients.
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
        meter.end_step(steps_left=config.max_steps - training.step)
        print0(f"step {step:5d}/{config.max_steps} {meter.line(loss, lr, norm)}")
        run.log(step, train=loss, lr=lr, norm=norm, **meter.streams)
        if stopped:
            raise Stopped


def train(
    config: TrainConfig,
    ranks: Ranks,
    model: GPT | None = None,
    before_step: BeforeStep | None = None,
) -> int:
    """Trains, evaluates and saves. Returns the exit status: 0, or 130 / 143 after a stop signal.

    model: train this one instead of making one. Both parameters are bench.py's."""
    training = set_up(config, ranks, model)
    if training is None:
        return 0
    run = training.run
    console.announce(
        device=training.description,
        model=training.model,
        loader=training.loader,
        data=config.data,
        max_steps=config.max_steps,
        total_batch_size=config.total_batch_size,
        peak=training.meter.peak,
        folder=run.description,
    )
    rest = config.max_steps - config.warmup_steps
    if config.schedule == "wsd" and 0 < rest < config.warmdown_steps:
        print0("schedule: a shorter warm-down, right after the warm-up")

    signals.collect_stop_signals()
    try:
        train_loop(training, config, ranks, before_step)
    except Stopped:
        hint = "--resume continues" if config.save_every else "nothing is saved"
        print0(f"stopped by a signal after {training.step} updates; {hint}")
        if config.save_every:
            save_checkpoint(training, config, ranks, required=True)
        return signals.exit_status()

    if config.save_every:
        run.clean_up(training.step, wait=True)  # now that the last validation loss is known
    if config.eval_every:
        loss = run.latest["val"]
        text = validation_text(training.val_loader, config.eval_tokens)
        print0(f"\nvalidation loss: {loss:.4f} nats per token")
        print0(f"  {text.nats_per_character(loss):.4f} nats per character")
        print0(f"  {text.bits_per_byte(loss):.4f} bits per byte")
    console.conclude(training.step, training.meter.elapsed)
    if config.save_every:
        run.print_result(training.step, config.sample_prompt)
    run.finish(training.step)
    return 0


def print_plan(config: TrainConfig) -> None:
    """Prints FLOPs, memory and time of a run, and trains nothing."""
    from support import plan

    with torch.device("meta"):  # allocates nothing
        model = new_model(config)
    device = devices.choose_device(config.device)
    dtype, description = devices.choose_precision(config.dtype, device, model.num_parameters())
    plan.print_plan(
        model,
        device,
        dtype,
        description,
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
    before_step: BeforeStep | None = None,
) -> int:
    """Reads the command line and trains. model, before_step: as in train()."""
    config = read_config(args)
    if config.plan:
        print_plan(config)
        return 0
    ranks = Ranks.start(config.device, config.deterministic)
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:
        missing = f"no shards in {SHARDS_FOLDER}/ (`python fineweb.py` builds them)"
        print0(f"{missing}: the shakespeare preset")
    try:
        with run_folder.lock(Path(config.log_dir), ranks.rank):
            status = train(config, ranks, model, before_step)
    except RuntimeError as error:
        raise explain(error, str(ranks.device), config.micro_batch_size) from None
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    cli.run(main)

"""Trains GPT-2 (124M) from scratch and leaves a model that Hugging Face loads.

    python train_gpt2.py                                     # shards if there are any, else a small GPT on Shakespeare
    python train_gpt2.py --preset gpt2 --data my_shards      # one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # eight GPUs: the reproduction
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train_gpt2.py   # two nodes
    python train_gpt2.py --resume                            # continues the run in log/
    python train_gpt2.py --help                              # every flag, its default and its unit

Read it top to bottom: model, data, configuration, optimizer, evaluation, set-up, and the loop, whose weight update
stands between two marked lines. What is imported from support/ (flags, shards, devices, the process group, checkpoints,
logs) can be read later.

Shapes: B batch (sequences of a micro-batch), T time (tokens of a sequence), C channels (n_embd = n_head * head size),
nh heads, hs head size, V vocabulary (50,257). A *step* is one update of the weights from `total_batch_size` tokens. The
ranks share them, and each takes its share in micro-steps of B * T tokens, whose gradients add up. Step s is logged with
the weights that s updates have made: the loss of step 0 is that of the untrained model.
"""

import contextlib
import gc
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import hellaswag
from support import check, checkpoints, runlog
from support.cli import InputError, RunError, flag, parse_args, run, say, say_wrapped
from support.devices import can_compile, computes_in_bfloat16, on_host, peak_flops, round_length
from support.distributed import Distributed
from support.ending import conclude, to_read
from support.huggingface import model_folder, read_pretrained, to_hub, write_pretrained
from support.loss import chunked_next_token_loss
from support.memory import choose_micro_batch_size, recomputed, refuse_what_cannot_fit
from support.muon import Muon, Optimizers
from support.plan import announce, print_plan
from support.rundir import last_config
from support.sharding import share_state
from support.shards import TokenStream
from support.signals import StopSignals
from support.tokenizer import VOCAB_SIZE, get_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# Model: GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2. The defaults are GPT-2 small, 124,439,808 parameters."""

    block_size: int = 1024  # the longest context, in tokens
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


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


def lm_head(x: torch.Tensor, wte: torch.Tensor) -> torch.Tensor:
    """The head, tied to the token embedding. (…, C), (V, C) -> logits (…, V)

    On a GPU the product is made with V rounded up to a multiple of 64 (50,257 -> 50,304), which suits its tensor
    cores; the rows added are zeros made on the spot, neither parameters nor seen by the softmax.
    """
    V = wte.size(0)
    if x.is_cuda:
        wte = F.pad(wte, (0, 0, 0, -V % 64))
    return F.linear(x, wte)[..., :V]


def next_token_loss(x: torch.Tensor, wte: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (B, T, V) and their mean cross-entropy in nats, a float32 scalar. x (B, T, C), targets (B, T)"""
    logits = lm_head(x, wte)
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor]]


class GPT(nn.Module):
    """GPT-2, its parameters under GPT-2's own names. Linear weights are (out, in), the transpose of Hugging Face's."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.recompute = False  # run each block again in the backward pass, instead of keeping what it computed
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
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

        position (B, T) or (T,): the tokens' positions, 0 … T-1 unless given. mask (B, 1, T, T) bool: which tokens each
        token sees, itself and those before it unless given.
        """
        if position is None:
            if idx.size(1) > self.config.block_size:
                raise InputError(f"a sequence of {idx.size(1)} tokens; the model's context is {self.config.block_size}")
            position = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C)
        for block in self.h:
            x = recomputed(block, x, mask) if self.recompute and torch.is_grad_enabled() else block(x, mask)
        return self.ln_f(x)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None, loss_function: LossFunction = next_token_loss
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """idx, targets (B, T) int64 -> logits (B, T, V), mean cross-entropy in nats (None without targets).

        loss_function: another computation of the same loss; one that never makes the logits returns None for them.
        """
        x = self.hidden(idx)
        if targets is None:
            return lm_head(x, self.wte.weight), None
        return loss_function(x, self.wte.weight, targets)

    def compile_blocks(self) -> None:
        """Compiles the blocks one by one, which is the same code for all. Names and state stay as they are, and
        `torch.compiler.set_stance("force_eager")` runs the plain code on shapes that come once (evaluation, samples).
        """
        for block in self.h:
            block.compile(dynamic=False)

    @torch.no_grad()
    def generate(
        self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int = 50,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continues idx (B, T) by sampling among the top_k likeliest tokens. -> (B, T + max_new_tokens)"""
        for _ in range(max_new_tokens):
            window = idx[:, -self.config.block_size :]  # the newest tokens
            T = window.size(1)
            padding = min(round_length(T, idx.device), self.config.block_size) - T  # behind T, and seen by none before
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
        """Training FLOPs a token, forward and backward: 6 N + 12 L C T, N without position embeddings, which take no
        part in a product (PaLM, Chowdhery et al. 2022, appendix B). Recomputation and the causal mask don't count."""
        return 6 * self.num_parameters(False) + 12 * self.config.n_layer * self.config.n_embd * T

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "GPT":
        """A GPT-2 from a folder or from the hub (`gpt2`, `gpt2-medium`, …). Raises InputError if it is no GPT-2."""
        folder = model_folder(name)
        config, state = read_pretrained(folder, [field.name for field in fields(GPTConfig)])
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
# Data


class DataLoaderLite:
    """Batches of next-token pairs from token shards or a .txt file, in an order that is a function of the seed alone.

    The tokens are one endless stream, documents shuffled anew each epoch (TokenStream in support/shards.py). The ranks
    take the next B * T tokens each, in rank order, micro-batch after micro-batch. So the tokens of a step do not depend
    on how it is split into ranks and micro-batches, each token is an input once an epoch, and the loader's state is one
    position.

    data: folder of .npy / .bin shards, or a .txt file. split: "train" or "val". tokens_per_step: where the ranks don't
    divide a step's micro-batches, its last round has none for the last ones, which are given rank 0's.
    pin_memory: for copies to a GPU that need not be waited for. Raises InputError for bad files.
    """

    def __init__(
        self, data: str | Path, split: str, B: int, T: int, rank: int = 0, world_size: int = 1, seed: int = 1337,
        shuffle: bool = True, tokens_per_step: int | None = None, pin_memory: bool = False,
    ):
        self.stream = TokenStream(data, split, seed, shuffle)
        self.B, self.T, self.rank, self.world_size = B, T, rank, world_size
        self.tokens_per_step, self.pin_memory = tokens_per_step, pin_memory
        self.position = 0  # in the stream, of the next micro-batch of all ranks
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")  # prepares batches ahead
        self._ahead: deque[Future] = deque()
        self._ahead_position = 0  # where the next one to be prepared begins, on rank 0

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank's next micro-batch, (B, T) int64 each, prepared in the background."""
        while len(self._ahead) < 3:
            first, self._ahead_position = self._ahead_position, self._after(self._ahead_position)
            start = first + self.rank * self.B * self.T
            self._ahead.append(self._worker.submit(self._make_batch, start if start < self._ahead_position else first))
        self.position = self._after(self.position)
        return self._ahead.popleft().result()

    def _after(self, position: int) -> int:
        """Where the stream goes on when each rank has taken a micro-batch at `position`, which may end a step early."""
        end, step = position + self.B * self.T * self.world_size, self.tokens_per_step
        return min(end, (position // step + 1) * step) if step else end

    def _make_batch(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        # One token more than B * T: the targets are the inputs shifted by one.
        buffer = torch.from_numpy(self.stream.read(start, self.B * self.T + 1).astype(np.int64))
        if self.pin_memory:
            buffer = buffer.pin_memory()
        return buffer[:-1].view(self.B, self.T), buffer[1:].view(self.B, self.T)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what its order depends on."""
        stream = self.stream
        return {"position": self.position, "seed": stream.seed, "shuffle": stream.shuffle,
                "shards": stream.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position. Raises InputError when the stream is another one."""
        for key, value in self.state_dict().items():
            if key != "position" and state[key] != value:
                raise InputError(f"the data differ from the checkpoint's ({key} {value}, there {state[key]})")
        self.position = self._ahead_position = state["position"]
        self._ahead.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class TrainConfig:
    """Trains a GPT-2 from scratch, or from a model's weights. A preset changes some defaults; flags override it."""

    preset: Literal["auto", "gpt2", "gpt2-fast", "gpt3", "shakespeare"] = "auto"
    """Set of defaults; auto: gpt2 when edu_fineweb10B/ holds shards, else shakespeare; gpt2-fast: a newer recipe."""
    data: str = "edu_fineweb10B"
    """Folder of token shards (python fineweb.py makes them), or a .txt file."""
    log_dir: str = "log"
    """Folder for log.txt, run.json and checkpoints."""
    init: str = "scratch"
    """Initial weights: scratch, a hub name (gpt2, gpt2-medium, gpt2-large, gpt2-xl) or a folder with a GPT-2."""
    resume: bool = False
    """Continue from the newest checkpoint in log_dir; start when there is none."""
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
    """AdamW (betas 0.9, --beta2) for all parameters, or Muon for the matrices inside the blocks (support/muon.py)."""
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
    beta2: float = 0.95
    """AdamW's memory of squared gradients, kept from step to step; small batches want a longer one (0.99, 0.999)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices (biases and LayerNorms have none)."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    seed: int = 1337
    """Seed of the initial weights and of the data order."""
    shuffle: bool = True
    """Permute shards, and documents (of a .txt file: passages) within each, anew every epoch; otherwise file order."""
    compile: bool = field(default_factory=lambda: torch.cuda.is_available())
    """Compile the blocks, and on a GPU the loss, with torch.compile: the default with a GPU."""
    low_memory: bool = False
    """Compute the blocks twice instead of keeping their activations, and the logits of 1,024 tokens at a time."""
    shard_optimizer: bool = False
    """Share the optimizer's state out among the ranks (ZeRO-1) instead of keeping all of it on each."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; weights, LayerNorm statistics and losses stay in float32."""
    deterministic: bool = False
    """On a GPU, take kernels that add in a fixed order, so that a resumed run is bit for bit; a CPU's always do."""
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
    max_steps=600, total_batch_size=512, seq_len=128, n_layer=4, n_head=4, n_embd=64,
    optimizer="muon", schedule="wsd", max_lr=1.5e-2, min_lr=0.0, warmup_steps=20, warmdown_steps=300, beta2=0.995,
    compile=False, eval_every=200, eval_tokens=32_768, hellaswag_every=0, sample_every=300, sample_prompt="ROMEO:",
    save_every=300,
)
# The recipe is from small models (bench/recipes), but for the learning rate, which is the one published for AdamW, this
# model and batch (Muon's updates are made as large as AdamW's). Nobody has trained 124M with it to the end yet.
GPT2_FAST = dict(optimizer="muon", schedule="wsd", max_steps=9_536, warmup_steps=476, warmdown_steps=4_768,
                 max_lr=1.8e-3, min_lr=0.0)
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {}, "gpt2-fast": GPT2_FAST, "gpt3": dict(seq_len=2048), "shakespeare": SHAKESPEARE,
}


def check_config(config: TrainConfig) -> None:
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
    if config.beta2 >= 1:
        problems.append(f"--beta2 {config.beta2}: below 1")
    if config.eval_every and config.eval_tokens < config.seq_len:
        problems.append(f"--eval-tokens {config.eval_tokens}: less than one sequence of --seq-len {config.seq_len}")
    if config.min_lr > config.max_lr:
        problems.append(f"--min-lr {config.min_lr}: above --max-lr {config.max_lr}")
    if problems:
        raise InputError("; ".join(dict.fromkeys(problems)))


def read_config(args: list[str] | None = None) -> TrainConfig:
    """The command line as a TrainConfig: the preset's values, overridden by the flags. Raises InputError."""
    # Parsed twice: once to learn the preset (and whether --help is wanted), once with its values as the defaults.
    args = sys.argv[1:] if args is None else args
    asked = parse_args(TrainConfig, args=[arg for arg in args if arg not in ("-h", "--help")])
    preset = asked.preset
    if preset == "auto":
        preset = "gpt2" if any(Path(SHARDS_FOLDER).glob("*_train_*")) else "shakespeare"
    defaults = PRESETS[preset] | (dict(compile=False) if asked.device in ("cpu", "mps") else {})
    config = parse_args(TrainConfig, replace(TrainConfig(), **defaults), args, HELP_GROUPS)
    check_config(config)
    return config


# What may differ between a run and its resumption. Anything else would change the losses by more than rounding; device
# and precision may, since a run moves to another GPU when that is the one to be had.
MAY_CHANGE = {
    "preset", "data", "log_dir", "init", "resume", "max_steps", "warmdown_steps", "micro_batch_size", "compile",
    "low_memory", "shard_optimizer", "device", "dtype", "deterministic", "eval_every", "eval_tokens", "hellaswag_every",
    "hellaswag_data", "sample_every", "sample_prompt", "save_every", "keep_checkpoints", "keep_every", "skip_bad_steps",
    "tensorboard", "wandb", "check_against", "plan",
}


def differences(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """What keeps `config` from resuming a run whose configuration was `before`; [] when nothing does.

    A setting that `before` lacks, because the script did not have it then, counts as its default.
    """
    before = asdict(TrainConfig()) | before
    return [f"{flag(name)} was {before[name]}, is {now}" for name, now in asdict(config).items()
            if name not in MAY_CHANGE and now != before[name]]


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer


def configure_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW | Optimizers:
    """AdamW, which decays matrices and embeddings, nothing else; its betas are GPT-3's unless --beta2 says otherwise
    (Brown et al. 2020, appendix B). With --optimizer muon the matrices inside the blocks are Muon's."""
    matrices = {n: p for n, p in model.h.named_parameters() if p.dim() == 2} if config.optimizer == "muon" else {}
    others = [p for n, p in model.named_parameters() if n.removeprefix("h.") not in matrices]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel over all parameters, on the CPU too, where it is several times the loop's speed.
    adamw = torch.optim.AdamW(groups, lr=config.max_lr, betas=(0.9, config.beta2), eps=1e-8, fused=True)
    if not matrices:
        return adamw
    dtype = torch.bfloat16 if computes_in_bfloat16(model.wte.weight.device) else torch.float32
    return Optimizers(Muon(matrices.items(), config.max_lr, config.weight_decay, dtype=dtype), adamw)


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
# Evaluation


@torch.no_grad()
def validation_loss(
    model: GPT, loader: DataLoaderLite, tokens: int, dist: Distributed,
    loss_function: LossFunction = chunked_next_token_loss,
) -> float:
    """Mean loss in nats over the first `tokens` tokens of the loader's split, each weighing the same.

    The ranks share the sequences; the losses are summed over all, then divided, so that neither the batch size nor
    the number of ranks matters. Where training runs compiled on a GPU, so do full batches.
    """
    B, T = loader.B, loader.T
    sequences = min(tokens, loader.stream.total_tokens - 1) // T
    losses, sizes = [torch.zeros((), device=dist.device)], [0]
    for first in range(dist.rank * B, sequences, dist.world_size * B):
        n = min(B, sequences - first)
        buffer = torch.from_numpy(loader.stream.read(first * T, n * T + 1).astype(np.int64)).to(dist.device)
        stance = "default" if n == B and dist.device.type != "cpu" else "force_eager"
        with dist.autocast(), torch.compiler.set_stance(stance):
            x = model.hidden(buffer[:-1].view(n, T))  # (n, T, C)
            losses.append(loss_function(x, model.wte.weight, buffer[1:].view(n, T))[1])
            sizes.append(n)
    # The one wait for the device. The sum is made on the host in float64, which not every device has.
    total = sum(loss * n for loss, n in zip(torch.stack(losses).tolist(), sizes, strict=True))
    return dist.sum(torch.tensor(total, dtype=torch.float64)).item() / sequences


def print_samples(model: GPT, prompt: str, dist: Distributed, last: bool = False) -> None:
    """Four continuations of `prompt` by 32 tokens, a line each; at the end of a run two by 64, with their line breaks.

    They are drawn with a generator of their own: training's random state is not touched.
    """
    tokenizer = get_tokenizer()
    samples, length = (2, 64) if last else (4, 32)
    generator = torch.Generator(device=dist.device).manual_seed(42 + dist.rank)
    idx = torch.tensor([tokenizer.encode_ordinary(prompt)] * samples, device=dist.device)
    with dist.autocast():
        idx = model.generate(idx, max_new_tokens=length, generator=generator)
    for i, text in enumerate(map(tokenizer.decode, idx.tolist())):
        tqdm.write(f"rank {dist.rank} sample {i}:" + (f"\n{to_read(text)}" if last else f" {text!r}"))  # above the bar


def is_due(every: int, step: int, config: TrainConfig) -> bool:
    """Whether something that happens every so many steps (0: never), and after the last one, happens at `step`."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


def evaluate(
    step: int, model: GPT, val_loader: DataLoaderLite | None, tasks: list[Any] | None, config: TrainConfig,
    dist: Distributed, log: runlog.Log, loss_function: LossFunction = chunked_next_token_loss,
) -> float:
    """Evaluates the weights that `step` updates have made, as far as it is due: validation loss, HellaSwag, samples.

    Dropout, which GPT-2 is trained without but a fork may have, is off. Returns the validation loss, inf if not due.
    """
    model.eval()
    val, last = math.inf, step == config.max_steps
    if is_due(config.eval_every, step, config):
        val = validation_loss(model, val_loader, config.eval_tokens, dist, loss_function)
        say(f"step {step:5d} validation loss {val:.4f}")
        log.write(step, val=f"{val:.6f}")
    with torch.compiler.set_stance("force_eager"):  # nothing is compiled for shapes that come once
        if is_due(config.hellaswag_every, step, config) and tasks:
            accuracy = hellaswag.evaluate(model.hidden, model.wte.weight, tasks, dist)
            say(f"step {step:5d} HellaSwag {accuracy:.4f}")
            log.write(step, hella=f"{accuracy:.4f}")
        if is_due(config.eval_every, step, config) and not last:  # the last picture is conclude's
            log.draw()
        if is_due(config.sample_every, step, config) and step > 0 and not (last and dist.rank):
            print_samples(model, config.sample_prompt, dist, last)
    model.train()
    return val


# ---------------------------------------------------------------------------------------------------------------------
# Set-up


@dataclass
class Progress:
    """How far a run has come: what a checkpoint keeps besides weights, optimizer, data position and random state."""
    step: int = 0  # updates made
    best_val: float = math.inf  # nats
    elapsed: float = 0.0  # seconds spent in updates
    skipped: int = 0  # updates left out, their loss or gradient being infinite or undefined


def model_config(config: TrainConfig) -> GPTConfig:
    """The shape of the model that a run from scratch trains."""
    return GPTConfig(config.seq_len, VOCAB_SIZE, config.n_layer, config.n_head, config.n_embd)


def start_model(config: TrainConfig, checkpoint: Path | None, dist: Distributed) -> GPT:
    """The model to train, on the device: from a checkpoint, from --init, or new (the same weights for the same seed).

    Raises InputError, on all ranks, for a model that doesn't go with the data.
    """
    torch.manual_seed(config.seed)
    model, start = None, checkpoint or config.init
    with dist.shared_errors():
        if dist.rank == 0:  # the others receive the weights, and their hosts hold none
            model = GPT(model_config(config)) if start == "scratch" else GPT.from_pretrained(start)
            if model.config.block_size < config.seq_len or model.config.vocab_size != VOCAB_SIZE:
                raise InputError(f"--init {config.init}: context {model.config.block_size}, vocabulary "
                                 f"{model.config.vocab_size}; wanted: --seq-len {config.seq_len} or more, and GPT-2's "
                                 f"{VOCAB_SIZE}")
    shape = dist.gather(model and model.config)[0]
    with torch.device("meta"):
        model = model or GPT(shape)
    model.recompute = config.low_memory
    return dist.on_device(model)


def open_data(config: TrainConfig, B: int, dist: Distributed) -> tuple[DataLoaderLite, DataLoaderLite | None]:
    """The loaders of both splits (None: no validation wanted). Raises InputError, on all ranks, for bad data."""
    T = config.seq_len
    shape = dict(B=B, T=T, rank=dist.rank, world_size=dist.world_size, pin_memory=dist.device.type == "cuda")
    with dist.shared_errors():  # on several machines the data may be missing on one
        loader = DataLoaderLite(config.data, "train", **shape, seed=config.seed, shuffle=config.shuffle,
                                tokens_per_step=config.total_batch_size)
        if loader.stream.total_tokens <= config.total_batch_size:
            raise InputError(f"{config.data}: {loader.stream.total_tokens} training tokens, too few for one batch of "
                             f"--total-batch-size {config.total_batch_size}: give more text or lower it")
        val_loader = DataLoaderLite(config.data, "val", **shape, shuffle=False) if config.eval_every else None
        if val_loader and val_loader.stream.total_tokens <= T:
            raise InputError(f"{config.data}: {val_loader.stream.total_tokens} validation tokens, too few for one "
                             f"sequence of --seq-len {T}: give more text, shorten it, or --eval-every 0")
    return loader, val_loader


def restore(
    checkpoint: Path, config: TrainConfig, optimizer: Any, scaler: torch.amp.GradScaler, loader: DataLoaderLite,
    dist: Distributed,
) -> Progress:
    """Puts everything but the weights back to where the checkpoint was. Raises InputError, on all ranks, if it is
    another run's."""
    with dist.shared_errors():  # on another machine the folder may be missing
        state = checkpoints.read_training_state(checkpoint)
        if changes := differences(state["config"], config):
            raise InputError(f"--resume from {checkpoint}: not the same run: {', '.join(changes)}")
        loader.load_state_dict(state["loader"])
    optimizer.load_state_dict(state["optimizer"])
    if dist.device.type == "cpu":  # a GPU copies what it loads; a CPU would go on using the file's own pages
        for moments in optimizer.state.values():
            moments.update(on_host(moments))
    if state["scaler"]:  # only float16 has one; a run that comes to float16 from another precision begins it anew
        scaler.load_state_dict(state["scaler"])
    if (before := state.get("dtype", str(dist.dtype))) != str(dist.dtype):
        say(f"precision: {before} until now, {dist.dtype} from here on: the losses agree to rounding")
    if dist.rank < len(state["random"]):
        checkpoints.set_random_state(state["random"][dist.rank], dist.device)
    return Progress(**{name: state[name] for name in asdict(Progress())})


def open_log(
    config: TrainConfig, checkpoint: Path | None, resuming: bool, step: int, dist: Distributed
) -> runlog.Log:
    """The run's log, in a folder that is cleared of what a killed run left half written. Rank 0 alone writes to it."""
    log_dir, resumed_step = Path(config.log_dir), None
    dist.gather(None)  # all ranks have read what they need before rank 0 touches the folder
    if dist.rank == 0:
        # A run that was stopped before its first checkpoint starts again, and writes the same log again.
        if checkpoint or (resuming and not differences(last_config(log_dir), config)):
            resumed_step = step
        runlog.clear_log_dir(log_dir, resumed=bool(checkpoint))
        runlog.add_run_entry(log_dir, asdict(config), step=step, device=dist.description, world_size=dist.world_size)
    with dist.shared_errors():
        log = runlog.Log(log_dir if dist.rank == 0 else None, resumed_step)
        log.mirror(config.tensorboard, config.wandb)
    return log


def choose_loss(config: TrainConfig, device: torch.device, compiled: bool) -> LossFunction:
    """Which computation of the loss a training step uses: decided here, and nowhere else.

    Compiled, the plain one takes few passes over the logits: the choice for a GPU. In pieces it needs less memory, is
    faster on a CPU (bench/NOTES.md), and is what remains where nothing is compiled.
    """
    if compiled and device.type != "cpu" and not config.low_memory:
        return torch.compile(lambda *args: (None, next_token_loss(*args)[1]), dynamic=False)
    return chunked_next_token_loss


def parallelize(model: GPT, loss_function: LossFunction, B: int, T: int, dist: Distributed) -> nn.Module:
    """The model as training calls it: itself, or wrapped so that the ranks average their gradients."""
    if dist.world_size == 1:
        return model
    device_ids = [dist.device.index] if dist.device.type == "cuda" else None
    torch._dynamo.config.optimize_ddp = False  # it cuts graphs at DDP's buckets, but ours are single blocks
    replica = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    # DDP packs the gradients anew after its first backward pass, in their order of arrival, and with it the order of
    # sums changes. Done before the first step, on no matter what tokens, a resumed run adds as it did before.
    # The second pass leaves the gradients where they stay from then on, as parts of DDP's buckets.
    x = torch.zeros(B, T, dtype=torch.int64, device=dist.device)
    for _ in range(2):
        replica.zero_grad(set_to_none=True)
        with dist.autocast():
            replica(x, x, loss_function)[1].backward()
    replica.zero_grad(set_to_none=False)
    return replica


def skip_bad_step(step: int, loss: float, norm: float, where: str, progress: Progress, config: TrainConfig) -> None:
    """Counts an update that is left out, its loss or gradient being infinite or undefined. Raises RunError when that
    is one more than --skip-bad-steps allows."""
    progress.skipped += 1
    what = f"step {step}: loss {loss}, gradient norm {norm}; it began at {where}"
    if progress.skipped > config.skip_bad_steps:
        raise RunError(f"{what}. The weights are as before; checkpoints are in {config.log_dir}. A lower --max-lr may "
                       f"help; --resume --skip-bad-steps {progress.skipped} leaves this update out")
    say(f"warning: {what}: update left out, {progress.skipped} of {config.skip_bad_steps}")


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(config: TrainConfig, dist: Distributed) -> int:
    """Trains, evaluates and saves; every rank of a job runs it. Returns the exit status: 0; 1 when the losses are not
    those of --check-against; after a signal 130 or 143. Raises InputError, and RunError when a loss is undefined."""
    if config.preset == "auto" and config.data == SHAKESPEARE["data"]:
        say(f"no shards in {SHARDS_FOLDER}/: the shakespeare preset, on input.txt\n(`python fineweb.py` builds shards)")
    say_wrapped(f"device: {dist.description}")
    with dist.shared_errors():
        reference = check.read_reference(Path(config.check_against)) if config.check_against else None
    if dist.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for the products that are left in float32

    # Model, data, optimizer: new, or as a checkpoint has them.
    resuming, checkpoint = checkpoints.find_start(config, dist)
    model = start_model(config, checkpoint, dist)
    B, T = choose_micro_batch_size(config, model, dist), config.seq_len
    micro_batches = config.total_batch_size // (B * T)  # in a step, of all ranks
    micro_steps = math.ceil(micro_batches / dist.world_size)  # in which each rank takes one
    loader, val_loader = open_data(config, B, dist)
    tasks = None
    if config.hellaswag_every:
        tasks = hellaswag.prepare_for_training(config.hellaswag_data, model.config.block_size, dist)
    optimizer = configure_optimizer(model, config)
    share_state(optimizer, config, dist)
    scaler = torch.amp.GradScaler(dist.device.type, enabled=dist.dtype == torch.float16)
    progress = Progress()
    if checkpoint:
        progress = restore(checkpoint, config, optimizer, scaler, loader, dist)
        if progress.step >= config.max_steps:
            say(f"{checkpoint}: the run has all its {config.max_steps} steps; more with --max-steps")
            return 0
    log = open_log(config, checkpoint, resuming, progress.step, dist)

    # `model` stays as it is for evaluation and checkpoints; `replica`, of the same weights, is what training calls.
    compiled = config.compile and can_compile(dist.device)
    if compiled:
        model.compile_blocks()
    loss_function = choose_loss(config, dist.device, compiled)
    replica = parallelize(model, loss_function, B, T, dist)
    full_speed = dist.world_size * peak_flops(dist.device, dist.dtype)[0] / model.flops_per_token(T)  # tok/s: MFU 100 %
    announce(config, model, loader, checkpoint, dist)
    writer = checkpoints.CheckpointWriter(config, dist)

    def save(wait: bool) -> None:
        training_state = {
            **asdict(progress),
            "tokens": progress.step * config.total_batch_size,
            "config": asdict(config),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "dtype": str(dist.dtype),
            "loader": loader.state_dict(),
            "random": dist.gather(checkpoints.random_state(dist.device)),
        }
        log.sync()  # a checkpoint's log must not be shorter than the checkpoint
        with dist.shared_errors():
            writer.save(model, training_state, wait)

    gc.collect()
    gc.freeze()  # Python's collector, which may run in any step, need not look at what was made so far
    bar = tqdm(total=config.max_steps, initial=progress.step, unit="step", leave=False,
               disable=None if dist.rank == 0 else True)
    start = progress.step
    with StopSignals() as signals, bar, writer:
        for step in range(start, config.max_steps + 1):
            last = step == config.max_steps
            val = evaluate(step, model, val_loader, tasks, config, dist, log, loss_function)
            progress.best_val = min(progress.best_val, val)
            if is_due(config.save_every, step, config) and (step > start or last):
                save(wait=last)
            if last:
                break

            # ---- One update of the weights ---------------------------------------------------------------------------
            began = time.perf_counter()
            lr = get_lr(step, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            position = loader.position  # of this batch in the data, to be named if something is wrong with it
            loss_sum = torch.zeros((), device=dist.device)
            for micro_step in range(micro_steps):
                x, y = (t.to(dist.device, non_blocking=True) for t in loader.next_batch())  # (B, T) each
                # Each backward pass adds to the gradients. The ranks exchange theirs once, during the last one: under
                # no_sync DDP leaves them alone until then.
                exchange = dist.world_size == 1 or micro_step == micro_steps - 1
                with contextlib.nullcontext() if exchange else replica.no_sync():
                    # autocast is for the forward pass alone: the backward pass takes the precisions that it chose.
                    with dist.autocast():
                        _, loss = replica(x, y, loss_function)
                    # In the last round there may be fewer micro-batches than ranks: the others' is rank 0's, once more.
                    loss = loss * (micro_step * dist.world_size + dist.rank < micro_batches)
                    # A loss is a mean over B * T tokens, and DDP takes the mean of the ranks' gradients: divided by
                    # micro-batches a rank, they add up to the gradients of the mean over the whole batch. The scaler
                    # keeps float16's small gradients from becoming 0; in other precisions it does nothing.
                    scaler.scale(loss / (micro_batches / dist.world_size)).backward()
                loss_sum += loss.detach()  # stays on the device: .item() here would wait for each micro-step
            # The norm must be that of the gradients themselves, so the scale comes out before they are clipped.
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            # The one wait for the device: all ranks learn the mean loss, and whether one of them was told to stop.
            stop = torch.tensor(float(signals.received), device=dist.device)
            loss_sum, stop = dist.sum(torch.stack([loss_sum, stop])).tolist()
            loss, norm = loss_sum / micro_batches, norm.item()
            # An undefined gradient would spoil the weights and both moments for good. All ranks decide alike, as loss
            # and norm are the same on all. float16's scaler leaves such an update out by itself and lowers its scale.
            if math.isfinite(loss) and (math.isfinite(norm) or scaler.is_enabled()):
                scaler.step(optimizer)
            else:
                skip_bad_step(step, loss, norm, loader.stream.where(position), progress, config)
            scaler.update()
            # None, where the next backward pass writes, or zeros, to which it adds: DDP's stay in its buckets, beside
            # which under no_sync new ones would need the same memory again.
            optimizer.zero_grad(set_to_none=dist.world_size == 1)
            # ---- End of the update -----------------------------------------------------------------------------------

            seconds = time.perf_counter() - began
            progress.step, progress.elapsed = step + 1, progress.elapsed + seconds
            rate = config.total_batch_size / seconds
            mfu = rate / full_speed
            say(f"step {step:5d} loss {loss:.4f} lr {lr:.2e} norm {norm:.3f} "
                f"{seconds * 1e3:.0f} ms {rate:,.0f} tok/s mfu {mfu:.1%}")
            log.write(step, train=f"{loss:.6f}", lr=f"{lr:.6e}", norm=f"{norm:.6f}",
                      tok_per_sec=f"{rate:.1f}", mfu=f"{mfu:.4f}", ms=f"{seconds * 1e3:.2f}")
            bar.update()
            if stop:
                if config.save_every:
                    save(wait=True)
                say(f"stopped by a signal after step {step}; --resume goes on")
                return signals.exit_status
    if dist.rank == 0:
        conclude(config, progress, loader, val_loader, val, log)
    if reference and dist.rank == 0:
        matches, verdict = check.compare(Path(config.log_dir), reference, config.total_batch_size, dist.dtype)
        say(f"{verdict} {config.check_against}")
        return 0 if matches else 1
    return 0


def main(args: list[str] | None = None) -> int:
    config = read_config(args)
    with torch.device("meta"):  # shapes without memory
        model = GPT(model_config(config)) if config.init == "scratch" else None
    if config.plan:
        print_plan(config, model or GPT.from_pretrained(config.init))
        return 0
    dist = Distributed.start(config)
    with dist.own_errors():
        if model:
            refuse_what_cannot_fit(config, model, dist)
        status = train(config, dist)
    dist.stop()
    return status


if __name__ == "__main__":
    run(main)

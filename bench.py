"""The arithmetic of a run, printed by `python train_gpt2.py --plan` without training."""

from pathlib import Path

import torch

from devices import choose_device, peak_flops
from shards import find_shards, open_shard, tokenize_text
from train_gpt2 import GPT, GPTConfig, TrainConfig

ASSUMED_MFU = 0.4


def count_tokens(data: Path) -> int | None:
    """Training tokens of a folder of shards or a .txt file, None when it isn't there. Raises InputError."""
    if data.is_dir():
        return sum(len(open_shard(path)) for path in find_shards(data, "train"))
    return len(tokenize_text(data, "train")) if data.is_file() else None


def duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def print_plan(config: TrainConfig) -> None:
    """Parameters, FLOPs, tokens, epochs, memory and time of the run that `config` describes.

    Memory is float32 for weights, gradients and Adam's two moments (16 bytes a parameter). What a micro-batch adds is
    estimated as 34 T B C bytes a layer for activations in 16 bits with an attention that keeps no T x T matrix
    (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2), double in
    float32, and three copies of the (B, T, V) logits in float32.
    """
    device, dtype, description = choose_device(config.device, config.dtype)
    if config.init == "scratch":
        with torch.device("meta"):
            shape = GPTConfig(config.seq_len, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
            model = GPT(shape)
    else:
        model = GPT.from_pretrained(config.init)
    N, flops = model.num_parameters(), model.flops_per_token(config.seq_len)
    tokens = config.max_steps * config.total_batch_size
    available = count_tokens(Path(config.data))
    peak, source = peak_flops(device, dtype)
    seconds = flops * tokens / (peak * ASSUMED_MFU)
    width = 2 if dtype.itemsize == 4 else 1
    sequence = config.seq_len * (34 * width * model.config.n_embd * model.config.n_layer + 12 * model.config.vocab_size)
    rows = {
        "device": description,
        "parameters": f"{N:,} ({model.num_parameters(False) - model.wte.weight.numel():,} without embeddings)",
        "FLOPs a token": f"{flops:,} (6 N + 12 L C T, N without position embeddings)",
        "tokens": f"{tokens:,} in {config.max_steps:,} steps of {config.total_batch_size:,}",
        "epochs": f"{tokens / available:.3f} of {available:,} training tokens" if available else
        f"unknown: no {config.data} yet",
        "FLOPs": f"{flops * tokens:.3e}",
        "memory": f"{16e-9 * N:.2f} GB: weights {4e-9 * N:.2f}, gradients {4e-9 * N:.2f}, Adam {8e-9 * N:.2f}",
        "and a sequence": f"{sequence / 1e9:.2f} GB, times the micro-batch (estimate)",
        "time": f"{duration(seconds)} on one such device, {duration(seconds / 8)} on eight: a projection at "
        f"{ASSUMED_MFU:.0%} of {peak / 1e12:,.3g} TFLOP/s ({source})",
    }
    for name, value in rows.items():
        print(f"{name:>15}: {value}")

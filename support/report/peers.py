"""Other people's training steps beside ours: of checkouts that the user has, and from what a trainer printed.

    --peer build-nanogpt=PATH --peer nanogpt=PATH --peer llm.c=FILE

Their files are read, never changed or copied: the definitions of their model file are executed, nothing else of it.
"""

import ast
import contextlib
import importlib.util
import re
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from support.cli import InputError, first_line
from support.tokenizer import get_tokenizer

CHECKOUTS = {"build-nanogpt": "train_gpt2.py", "nanogpt": "model.py"}  # name -> the file that defines its model


def parse_peers(pairs: tuple[str, ...]) -> dict[str, Path]:
    """NAME=PATH, … -> {name: path}. Raises InputError."""
    peers = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in (*CHECKOUTS, "llm.c") or not path:
            raise InputError(f"--peer {pair}: NAME=PATH with a NAME of {', '.join(CHECKOUTS)}, llm.c")
        needed = Path(path, CHECKOUTS[name]) if name in CHECKOUTS else Path(path)
        if not needed.is_file():
            raise InputError(f"--peer {pair}: there is no file {needed}")
        peers[name] = Path(path).resolve()
    return peers


def definitions(path: Path, **names: Any) -> types.ModuleType:
    """A module of the classes, functions and imports at the top level of a file, `names` among its globals.

    What else stands there, a training run say, is not executed; imports of files beside it, and of packages that are
    not installed, are left out.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    beside = {other.stem for other in path.parent.glob("*.py")}

    def wanted(node: ast.stmt) -> bool:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return isinstance(node, ast.ClassDef | ast.FunctionDef)
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        packages = {name.split(".")[0] for name in names}
        return not packages & beside and all(map(importlib.util.find_spec, packages))

    tree.body = [node for node in tree.body if wanted(node)]
    module = types.ModuleType(f"peer_{path.parent.name.replace('-', '_')}_{path.stem}")
    module.__dict__.update(names, __file__=str(path))
    sys.modules[module.__name__] = module  # where dataclasses and torch.compile look for it
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


@dataclass
class Contestant:
    """A model that trains beside others: what one update of it does, and what was measured."""

    kind: str
    model: torch.nn.Module
    step: Callable[[torch.Tensor, torch.Tensor], None]
    seconds: list[float] = field(default_factory=list)
    resident: int = 0  # bytes on the device that stay between steps
    peak: int = 0  # bytes that a step needs, those included
    problem: str = ""


def peer_contestant(name: str, path: Path, shape: dict[str, int], dist: Any, compiled: bool) -> Contestant:
    """A peer's model, optimizer and update with its own settings (build-nanogpt: as train_gpt2.py has them; nanogpt: as
    bench.py has them, which does not clip), of the shape block_size, n_layer, n_head, n_embd."""
    module = definitions(path / CHECKOUTS[name], master_process=False)
    torch.manual_seed(1337)
    kind = dist.device.type
    if name == "nanogpt":
        model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=False)).to(dist.device)
        optimizer = model.configure_optimizers(weight_decay=1e-2, learning_rate=1e-4, betas=(0.9, 0.95),
                                               device_type=kind)
    else:
        model = module.GPT(module.GPTConfig(**shape, vocab_size=50304)).to(dist.device)
        optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type=kind)
    replica = torch.compile(model) if compiled else model

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with dist.autocast():
            _, loss = replica(x, y)
        loss.backward()
        if name == "build-nanogpt":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return Contestant(f"{name}, {'compiled' if compiled else 'not compiled'}", model, step)


def race(
    makers: dict[str, Callable[[], Contestant]], batch: Callable[[], tuple[torch.Tensor, torch.Tensor]], count: int,
    warmup: int, device: torch.device,
) -> list[dict[str, Any]]:
    """One step of each contestant in turns, on the same batch: `count` that are timed after `warmup`.

    In turns, because the speed of a shared or a hot machine drifts by more in a minute than there is between two
    programs. Memory: of CUDA's tensors, without those of the others. A contestant that fails drops out.
    """
    cuda, contestants = device.type == "cuda", []
    synchronize = getattr(torch, device.type).synchronize
    for kind, make in makers.items():
        before = torch.cuda.memory_allocated() if cuda else 0
        with contextlib.suppress(torch.OutOfMemoryError):
            contestants.append(make())
            contestants[-1].kind = kind
            contestants[-1].resident = torch.cuda.memory_allocated() - before if cuda else 0
    for _ in range(warmup + count):
        x, y = (t.to(device) for t in batch())
        for one in [one for one in contestants if not one.problem]:
            before = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            began = time.perf_counter()
            try:
                one.step(x, y)
                synchronize()
            except (torch.OutOfMemoryError, RuntimeError) as error:
                one.problem = first_line(error)
                one.model, one.step = None, None
                if cuda:
                    torch.cuda.empty_cache()
                continue
            one.seconds.append(time.perf_counter() - began)
            if cuda:
                one.peak = max(one.peak, torch.cuda.max_memory_allocated() - before + one.resident)
                one.resident += torch.cuda.memory_allocated() - before  # the optimizer's, made in the first step
    rows = []
    for one in contestants:
        timed = one.seconds[warmup:]
        rows.append({"kind": one.kind, "problem": one.problem} if one.problem or not timed else {
            "kind": one.kind, "ms": 1e3 * statistics.median(timed),
            "ms_quartiles": [1e3 * q for q in statistics.quantiles(timed, n=4)[::2]] if len(timed) > 1 else None,
            "first_s": one.seconds[0], "peak_memory": one.peak or None, "seconds": timed})
    return rows


def peer_hellaswag(path: Path, state: dict[str, torch.Tensor], shape: dict[str, int], examples: list[dict],
                   dist: Any) -> tuple[float, list[int]]:
    """(tasks a second, predictions by mean loss) of build-nanogpt's way through HellaSwag, with the weights `state`."""
    module = definitions(path / "train_gpt2.py", master_process=False)
    tasks = definitions(path / "hellaswag.py", enc=get_tokenizer())
    model = module.GPT(module.GPTConfig(**shape, vocab_size=50257))
    state = {f"transformer.{name}": tensor for name, tensor in state.items()}
    model.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})
    model.to(dist.device).eval()
    predictions = []
    for number, example in enumerate([examples[0], *examples]):
        if number == 1:
            began = time.perf_counter()  # the first one is not counted
        _, tokens, mask, _ = tasks.render_example(example)
        tokens, mask = tokens.to(dist.device), mask.to(dist.device)
        with torch.no_grad(), dist.autocast():
            logits, _ = model(tokens)
            predictions.append(module.get_most_likely_row(tokens, mask, logits))
    return len(examples) / (time.perf_counter() - began), predictions[1:]


LLMC_STEP = re.compile(r"^step\s+(\d+)/\d+\b.*?([\d.]+) ms(?: \||, ).*?([\d.]+) tok/s", re.MULTILINE)


def read_llmc(path: Path) -> dict[str, Any]:
    """The steps that llm.c's CUDA trainers printed (train_gpt2.cu, train_gpt2_fp32.cu): the median of all after the
    first ten. Raises InputError for a file without them."""
    steps = [(float(ms), float(rate)) for _, ms, rate in LLMC_STEP.findall(path.read_text(errors="replace"))]
    if len(steps) < 12:
        raise InputError(f"--peer llm.c={path}: {len(steps)} lines `step N/M | … ms | … tok/s`, fewer than 12")
    tokens = steps[0][0] * steps[0][1] / 1e3  # later rates are smoothed
    times = [ms for ms, _ in steps[10:]]
    ms = statistics.median(times)
    return {"kind": "llm.c, as printed", "ms": ms, "ms_quartiles": statistics.quantiles(times, n=4)[::2],
            "tokens": round(tokens), "tok_per_s": 1e3 * tokens / ms, "steps": len(times)}

"""Whether the training script computes on this device what it should: the part "right" of a report.

Each function returns {"checks": [{"what", "value", "bound", "ok"}, …]} and adds "problem" when one does not hold. They
are given `script`, the module train_gpt2, and what else they need of it.
"""

import importlib.util
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from support.cli import first_line
from support.loss import chunked_next_token_loss
from support.rundir import read_log


class Checks:
    """Comparisons with their bounds, in the order in which they were made."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, value: float, bound: float) -> None:
        """`value` must be at most `bound` (and a number)."""
        self.rows.append({"what": what, "value": value, "bound": bound, "ok": bool(value <= bound)})

    def missing(self, what: str, reason: str) -> None:
        """A comparison that could not be made, which is no failure."""
        self.rows.append({"what": what, "value": None, "bound": None, "ok": None, "reason": reason})

    def result(self, **others: Any) -> dict[str, Any]:
        bad = [row["what"] for row in self.rows if row["ok"] is False]
        return {"checks": self.rows, **others} | ({"problem": f"beyond its bound: {'; '.join(bad)}"} if bad else {})


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, as vectors."""
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's gradients, which are then removed."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def against_transformers(script: Any, train: Any, dist: Any) -> dict[str, Any]:
    """Logits, loss, gradients and text of a fresh model beside transformers' GPT-2 of the same weights, and its head,
    loss and choice of tokens beside plainer computations."""
    from support.huggingface import CONV1D

    checks, device = Checks(), dist.device
    torch.manual_seed(train.seed)
    model = script.GPT(script.model_config(train))
    batch = torch.randint(0, script.VOCAB_SIZE, (2, train.seq_len + 1))
    x, y = batch[:, :-1], batch[:, 1:]
    on_cpu = model(x[:1, :64])[0].detach() if device.type != "cpu" else None
    model.to(device)
    x, y = x.to(device), y.to(device)
    torch.set_float32_matmul_precision("highest")
    logits, loss = model(x, y)
    loss.backward()
    logits, grads = logits.detach(), gradients(model)

    try:
        from transformers import GPT2LMHeadModel
    except ImportError as error:
        checks.missing("transformers' logits, loss and gradients", first_line(error))
    else:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            theirs = GPT2LMHeadModel.from_pretrained(folder).to(device).eval()
        other = theirs(x).logits
        other_loss = F.cross_entropy(other.flatten(0, 1), y.flatten())
        other_loss.backward()
        checks.add("float32 logits, largest difference from transformers", (logits - other).abs().max().item(), 1e-4)
        checks.add("float32 loss, difference from transformers", abs(loss.item() - other_loss.item()), 1e-4)
        other_grads = {name.removeprefix("transformer."): p.grad for name, p in theirs.named_parameters()}
        other_grads = {n: g.t() if CONV1D.search(n) else g for n, g in other_grads.items()}
        worst = max(relative(grads[name], other_grads[name]) for name in grads)
        checks.add("float32 gradients, largest relative difference of a parameter from transformers", worst, 1e-3)
        del theirs, other, other_grads
    for name in ("bfloat16",) if dist.dtype != torch.float16 else ("float16",):
        with torch.autocast(device.type, dtype=getattr(torch, name)):
            low, low_loss = model(x[:, :256], y[:, :256])
        low_loss.backward()
        full = F.cross_entropy(logits[:, :256].flatten(0, 1), y[:, :256].flatten()).item()
        gradients(model)
        checks.add(f"{name} logits, relative difference from float32", relative(low, logits[:, :256]), 0.02)
        checks.add(f"{name} loss, difference from float32", abs(low_loss.item() - full), 0.01)

    # The head with V rounded up, and the loss in pieces, beside the plain product and cross-entropy.
    with torch.no_grad():
        hidden = model.hidden(x)
        plain = F.linear(hidden, model.wte.weight)
    checks.add("padded head, largest difference from the plain product", (logits - plain).abs().max().item(), 1e-4)
    chunked = model(x, y, chunked_next_token_loss)[1]
    chunked.backward()
    pieces = gradients(model)
    checks.add("loss in pieces, difference from the plain one", abs(chunked.item() - loss.item()), 1e-5)
    checks.add("loss in pieces, relative difference of the embedding's gradient",
               relative(pieces["wte.weight"], grads["wte.weight"]), 1e-4)
    if on_cpu is None:
        checks.missing("float32 logits beside the CPU's", "this is the CPU")
    else:
        difference = (logits[:1, :64].cpu() - on_cpu).abs().max().item()
        checks.add("float32 logits, largest difference from the CPU", difference, 1e-4)
    start = x[:1, :16]
    told = model.generate(start, 12, top_k=1)[0, 16:]
    expected = start
    for _ in range(12):  # the likeliest token, one at a time, from the logits in full
        with torch.no_grad():
            best = F.linear(model.hidden(expected)[:, -1:], model.wte.weight).argmax(-1)
        expected = torch.cat([expected, best], 1)
    checks.add("generate, tokens of 12 that differ from the likeliest", (told != expected[0, 16:]).sum().item(), 0)
    return checks.result()


def hellaswag_against_cpu(script: Any, scorer: Any, train: Any, tasks: list[Any], dist: Any) -> dict[str, Any]:
    """HellaSwag's losses and predictions on the device, in batches, beside the CPU's, one task at a time.

    scorer: the module hellaswag.
    """
    checks = Checks()
    torch.manual_seed(train.seed)
    torch.set_float32_matmul_precision("highest")
    model = script.GPT(script.model_config(train))
    one = scorer.score(model.hidden, model.wte.weight, tasks, torch.device("cpu"), batch_size=1)
    model.to(dist.device)
    many = scorer.score(model.hidden, model.wte.weight, tasks, dist.device)
    ours, theirs = torch.empty_like(one.losses), torch.empty_like(one.losses)
    ours[many.index], theirs[one.index] = many.losses, one.losses
    checks.add("HellaSwag, largest difference of an ending's loss from the CPU's, relative",
               ((ours - theirs).abs() / theirs).max().item(), 1e-4)
    differ = (ours.argmin(1) != theirs.argmin(1)).sum().item()
    checks.add(f"HellaSwag, predictions of {len(tasks)} that differ from the CPU's", differ, 0)
    return checks.result()


def compiled_against_eager(make_trial: Callable[..., Any], steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """The losses of `steps` updates with and without torch.compile, from the same weights, on the same batches."""
    losses = {}
    for switch in ("compiled", "eager"):
        trial = make_trial(switch)
        for number in range(steps):
            trial.step(number)
        losses[switch] = trial.losses
        del trial
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    checks = Checks()
    worst = max(abs(a - b) for a, b in zip(losses["compiled"], losses["eager"], strict=True))
    checks.add(f"compiled against eager, largest difference of a loss in {steps} steps", worst,
               1e-3 if dtype == torch.float32 else 0.02)
    return checks.result(losses=losses)


def float16_run(trial: Any, steps: int) -> dict[str, Any]:
    """`steps` updates in float16 with the gradient scaler."""
    for number in range(steps):
        trial.step(number)
    checks = Checks()
    finite = [loss for loss in trial.losses if loss == loss and abs(loss) != float("inf")]
    checks.add("float16, losses that are undefined", len(trial.losses) - len(finite), 0)
    n = max(steps // 20, 1)
    change = statistics.fmean(finite[-n:]) - statistics.fmean(finite[:n]) if finite else math.nan
    checks.add("float16, loss at the end less that at the start", change, -0.01)
    return checks.result(losses=trial.losses, scale=trial.scaler.get_scale())


def train(script: Any, *args: object) -> None:
    """train_gpt2.py in this process."""
    script.main([str(arg) for arg in args])


def recompilations(script: Any, args: list[object]) -> dict[str, Any]:
    """How many graphs train_gpt2.py compiles after its first evaluation within training, samples and all included."""
    from torch._dynamo.utils import counters

    graphs: list[int] = []
    evaluate = script.evaluate

    def counted(*arguments: Any, **options: Any) -> Any:
        result = evaluate(*arguments, **options)
        graphs.append(counters["stats"]["unique_graphs"])
        return result

    script.evaluate = counted
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(script, *args, "--compile", "--max-steps", 6, "--eval-every", 2, "--sample-every", 2,
                       "--save-every", 0, "--log-dir", folder)
    finally:
        script.evaluate = evaluate
    checks = Checks()
    # evaluate is called before each step: graphs[2] is their number after the first evaluation within training
    checks.add("graphs compiled after the first evaluation within training", graphs[-1] - graphs[2], 0)
    return checks.result(graphs=graphs)


def resumed(script: Any, args: list[object], deterministic: bool) -> dict[str, Any]:
    """A run of 8 steps beside one of 4 that is resumed: losses and gradient norms, bit for bit."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)  # with warn_only attention stays as it is
        torch.utils.deterministic.fill_uninitialized_memory = False  # which costs time and changes nothing here
    args = [*args, "--save-every", 4, "--eval-every", 0, "--sample-every", 0, "--warmup-steps", 1, "--min-lr", "1e-3",
            "--max-lr", "1e-3"]
    with tempfile.TemporaryDirectory() as folder:
        straight, broken = Path(folder, "straight"), Path(folder, "broken")
        train(script, *args, "--max-steps", 8, "--log-dir", straight)
        train(script, *args, "--max-steps", 4, "--log-dir", broken)
        train(script, *args, "--max-steps", 8, "--log-dir", broken, "--resume")
        one, two = read_log(straight), read_log(broken)
    checks = Checks()
    differ = sum(one[stream][1][i] != two[stream][1][i] for stream in ("train", "norm") for i in range(8))
    name = "with determinism" if deterministic else "as shipped"
    # As shipped, attention's backward pass need not be deterministic on a GPU: then this is a finding, not a failure.
    checks.add(f"resumed, {name}: losses and norms of 16 that differ", differ,
               0 if deterministic or not torch.cuda.is_available() else 16)
    return checks.result(ms=statistics.median(one["ms"][1][2:]), differ=differ)


def gpu_tests(root: Path) -> dict[str, Any]:
    """tests/test_gpu.py, in a process of its own."""
    if importlib.util.find_spec("pytest") is None:
        checks = Checks()
        checks.missing("tests/test_gpu.py", "pytest is not installed")
        return checks.result()
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    text = done.stdout.strip() or done.stderr.strip()
    last = text.splitlines()[-1] if text else f"status {done.returncode}"
    passed = re.search(r"(\d+) passed", text)
    result = {"summary": last, "checks": [{"what": "tests/test_gpu.py", "value": None, "bound": None,
                                           "ok": done.returncode == 0 and bool(passed), "reason": last}]}
    return result if result["checks"][0]["ok"] else result | {"problem": last, "output": text[-3000:]}

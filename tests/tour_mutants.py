"""Breaks the project, one mistake at a time, and asks whether the tour notices.

    python tests/tour_mutants.py                   # every mistake: about ten minutes on two cores
    python tests/tour_mutants.py --only 2 11       # those of some stations

For each mistake the project is copied and changed in one place; then the set-up of docs/tour.ipynb and the cell of one
station run there, in a fresh process. An assertion of that cell must fail, and nothing else: a traceback of another
kind does not count. Beforehand every station runs on an unchanged copy, where it must pass. Prints the table that
bench/tour/README.md shows; the exit status is 1 when a mistake was not noticed.
"""

import argparse
import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("train_gpt2.py", "hellaswag.py", "support", "input.txt")


class Mutant(NamedTuple):
    station: int
    mistake: str  # in words
    path: str
    old: str  # occurs once in the file
    new: str


TRAIN, DISTRIBUTED, HELLASWAG, MUON = "train_gpt2.py", "support/distributed.py", "hellaswag.py", "support/muon.py"
MUTANTS = [
    Mutant(1, "targets not shifted", TRAIN, "buffer[1:].view(self", "buffer[:-1].view(self"),
    Mutant(1, "a space no longer belongs to the word after it", "support/tokenizer.py", r"| ?\p{L}++", r"|\p{L}++"),
    Mutant(2, "attention without 1/√head size", TRAIN, "is_causal=mask is None)", "is_causal=mask is None, scale=1.0)"),
    Mutant(2, "attention not causal", TRAIN, "is_causal=mask is None)", "is_causal=False)"),
    Mutant(2, "heads joined without transposing", TRAIN, "y.transpose(1, 2).reshape", "y.reshape"),
    Mutant(3, "c_fc without bias", TRAIN, "nn.Linear(config.n_embd, 4 * config.n_embd)",
           "nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)"),
    Mutant(3, "no gradient through the head", TRAIN, "return loss_function(x, self.wte.weight, targets)",
           "return loss_function(x, self.wte.weight.detach(), targets)"),
    Mutant(4, "GELU's erf form", TRAIN, 'approximate="tanh"', 'approximate="none"'),
    Mutant(4, "attention's c_proj saved without transposing", "support/huggingface.py",
           "t.t() if CONV1D.search(name) else t for",
           't.t() if CONV1D.search(name) and "attn.c_proj" not in name else t for'),
    Mutant(5, "std 0.2 instead of 0.02", TRAIN, "else 0.02", "else 0.2"),
    Mutant(6, "residual projections scaled by 1/√2", TRAIN, "math.sqrt(2 * self.config.n_layer)", "math.sqrt(2)"),
    Mutant(7, "the optimizer lacks the matrices", TRAIN, "if p.dim() >= 2]", "if p.dim() > 2]"),
    Mutant(8, "targets not shifted", TRAIN, "buffer[1:].view(self", "buffer[:-1].view(self"),
    Mutant(8, "the loader stands still", TRAIN, "self._ahead_position, self._after(self._ahead_position)",
           "self._ahead_position, self._ahead_position"),
    Mutant(9, "biases and LayerNorms decayed, too", TRAIN, '"weight_decay": 0.0}',
           '"weight_decay": config.weight_decay}'),
    Mutant(9, "Adam's usual second beta, 0.999", TRAIN, "betas=(0.9, config.beta2)", "betas=(0.9, 0.999)"),
    Mutant(10, "a line instead of the cosine", TRAIN, "0.5 * (1 + math.cos(math.pi * progress))", "1 - progress"),
    Mutant(10, "the first rate is 0", TRAIN, "(step + 1) / config.warmup_steps", "step / config.warmup_steps"),
    Mutant(11, "no division by the micro-steps", TRAIN, "scaler.scale(loss / (micro_batches / dist.world_size))",
           "scaler.scale(loss)"),
    Mutant(12, "all ranks read the same tokens", TRAIN, " + self.rank * self.B * self.T", ""),
    Mutant(12, "the gradients of DDP's first pass are left", TRAIN,
           "    replica.zero_grad(set_to_none=False)\n    return replica", "    return replica"),
    Mutant(13, "autocast off", DISTRIBUTED, "enabled=self.dtype != torch.float32", "enabled=False"),
    Mutant(13, "the residual stream in 16 bits", TRAIN, "x = self.wte(idx) + self.wpe(position)  # (B, T, C)",
           "x = self.wte(idx) + self.wpe(position)\n"
           '        x = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x'),
    Mutant(14, "the padding not cut off", TRAIN, "F.linear(x, wte)[..., :V]", "F.linear(x, wte)"),
    Mutant(14, "no padding", TRAIN, "    if x.is_cuda:\n", "    if False:\n"),
    Mutant(15, "6 L C T for attention", TRAIN, "12 * self.config.n_layer * self.config.n_embd",
           "6 * self.config.n_layer * self.config.n_embd"),
    Mutant(15, "the forward pass alone counted", TRAIN, "return 6 * self.num_parameters(False)",
           "return 2 * self.num_parameters(False)"),
    Mutant(16, "the blocks not compiled", TRAIN, "block.compile(dynamic=False)", "pass"),
    Mutant(17, "the causal mask as a T x T matrix", TRAIN, "attn_mask=mask, is_causal=mask is None",
           "attn_mask=torch.ones(T, T, dtype=torch.bool).tril()"),
    Mutant(18, "the ending's first token predicted from itself", HELLASWAG, "(n if cut else len(context)) - 1",
           "(n if cut else len(context))"),
    Mutant(18, "endings do not see the context", HELLASWAG, " | (segment[:, None, :] == 0)", ""),
    Mutant(18, "acc_norm does not divide", HELLASWAG, "(self.losses / self.lengths).argmin", "self.losses.argmin"),
    Mutant(18, "a short last batch weighs as much as a full one", TRAIN, "sum(loss * n for loss, n in",
           "sum(loss * B for loss, n in"),
    Mutant(19, "logits multiplied by the temperature", TRAIN, ".float() / temperature", ".float() * temperature"),
    Mutant(19, "samples drawn with training's generator", TRAIN, "softmax(-1), 1, generator=generator)",
           "softmax(-1), 1)"),
    Mutant(20, "the place in the data not restored", TRAIN, '        loader.load_state_dict(state["loader"])\n', ""),
    Mutant(20, "AdamW's moments not restored", TRAIN, '    optimizer.load_state_dict(state["optimizer"])\n', ""),
    Mutant(21, "one Newton-Schulz step", MUON, "steps: int = 5", "steps: int = 1"),
    Mutant(21, "Muon for the MLPs alone", TRAIN, "if p.dim() == 2} if config",
           'if p.dim() == 2 and "mlp" in n} if config'),
]


def program(station: int) -> str:
    """The tour's set-up and one station, as plain Python."""
    notebook = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))
    cells = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}
    return "\n\n".join(cells[name] for name in ("setup-1", "setup-2", f"station-{station}"))


def be_a_station(folder: str, output: str) -> None:
    """In a process of its own: runs folder/docs/station.py, and leaves what it prints, a traceback too, in a file."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"MPLBACKEND": "Agg", "TMPDIR": folder}
    tempfile.tempdir = None  # TMPDIR is read anew
    os.chdir(f"{folder}/docs")
    runpy.run_path("station.py", run_name="__main__")


def visit(station: int, mutant: Mutant | None = None) -> tuple[int, str]:
    """Runs a station in a copy of the project, changed if there is a mutant. -> (exit status, output)"""
    with tempfile.TemporaryDirectory() as folder:
        for name in NEEDED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder)
        if mutant:
            path = Path(folder, mutant.path)
            source = path.read_text(encoding="utf-8")
            assert source.count(mutant.old) == 1, f"{mutant.path} has {source.count(mutant.old)} times {mutant.old!r}"
            path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        (docs := Path(folder, "docs")).mkdir()
        (docs / "station.py").write_text(program(station), encoding="utf-8")
        # Forked off a process that has imported the libraries, and nothing of the project.
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["torch", "torch._dynamo", "matplotlib.pyplot", "tyro", "tiktoken"])
        process = forks.Process(target=be_a_station, args=(folder, f"{folder}/output.txt"))
        process.start()
        process.join()
        return process.exitcode, Path(folder, "output.txt").read_text(encoding="utf-8")


def failed_assertion(station: int, status: int, output: str) -> str | None:
    """The assertion at which a station stopped; None when it passed, or stopped at something else."""
    lines = re.findall(r'File ".*station\.py", line (\d+)', output)
    if status == 0 or not lines or not re.search(r"^AssertionError", output, re.MULTILINE):
        return None
    statement = program(station).splitlines()[int(lines[-1]) - 1].strip()
    return statement if statement.startswith("assert ") else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", help="stations")
    only, began, missed = parser.parse_args().only, time.perf_counter(), []
    mutants = [mutant for mutant in MUTANTS if not only or mutant.station in only]
    for station in sorted({mutant.station for mutant in mutants}):
        status, output = visit(station)
        if status:
            missed.append(f"station {station} fails on the project as it is\n{output[-1000:]}")
    print("| station | mistake | file | what fails |\n|---|---|---|---|")
    for mutant in mutants:
        status, output = visit(mutant.station, mutant)
        if statement := failed_assertion(mutant.station, status, output):
            outcome = "`" + statement.removeprefix("assert ").replace("|", "\\|") + "`"
        else:
            outcome = "**not noticed**" if status == 0 else "**another error**"
            missed.append(f"station {mutant.station}: {mutant.mistake}: {outcome}\n{output[-1000:]}")
        print(f"| {mutant.station} | {mutant.mistake} | {mutant.path} | {outcome} |", flush=True)
    stations = len({mutant.station for mutant in mutants})
    print(f"\n{len(mutants)} mistakes in {stations} stations, {len(missed)} missed, "
          f"{time.perf_counter() - began:.0f} s")
    sys.exit("\n".join(missed) if missed else 0)


if __name__ == "__main__":
    main()

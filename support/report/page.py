"""report.md, from a report's results and nothing else."""

import math
import re
from pathlib import Path
from typing import Any

from support.files import atomic_write
from support.plan import CLOUD_GPUS, duration
from support.report.ceilings import ceiling_of
from support.report.floors import Ceilings, Shape, predict, step_floors, total_ms
from support.report.pictures import PICTURES, draw_pictures
from support.report.store import DONE, SKIPPED, newest
from support.report.trace import COMMUNICATION, GAPS, PARTS

Row = dict[str, Any]
SECTIONS = {"machine": "Machine", "right": "Is it right?", "speed": "Speed", "where": "Where the time goes",
            "around": "Around the step", "peers": "Beside others", "ladder": "The ladder", "run": "A short real run"}
TOKENS = 10e9  # of the reproduction
EVERY, SAVE_EVERY, BATCH, EVAL_TOKENS, TASKS = 250, 1000, 524_288, 10_485_760, 10_042  # train_gpt2.py's defaults


class Results:
    """What the lines of results.jsonl say, by part and job."""

    def __init__(self, rows: list[Row]):
        self.header, self.rows = rows[0], newest(rows)

    def get(self, part: str, job: str) -> Any:
        """A job's result; None if there is none. One that found a problem has its result, too."""
        return self.rows.get((part, job), {}).get("result")

    def done(self, part: str) -> dict[str, Any]:
        """job -> result, of the jobs of a part that were measured."""
        return {job: row["result"] for (p, job), row in self.rows.items() if p == part and row["status"] == DONE}

    @property
    def gpu(self) -> bool:
        return self.header["kind"] == "cuda"

    def default(self) -> Any:
        """The measurement that the switches are held against: the largest B up to 64; None without one."""
        batches = {r["B"]: r for job, r in self.done("speed").items() if job.startswith("B=")}
        usual = batches.keys() & range(65 if self.gpu else 3)
        return batches[max(usual)] if usual else None

    def ceilings(self) -> Ceilings | None:
        machine = self.get("machine", "machine")
        if not machine:
            return None
        return Ceilings(ceiling_of(machine["flops"], self.header["dtype"]), machine["copy"],
                        machine["host"] or machine["copy"])

    def shape(self, B: int) -> Shape:
        one = next(r for job, r in self.done("speed").items() if job.startswith("B="))
        vocabulary = 50_304 if self.gpu else 50_257  # lm_head rounds it up on a GPU
        return Shape(B, self.header["seq_len"], self.header["n_layer"], self.header["n_embd"], vocabulary,
                     one["parameters"], 4 if self.header["dtype"] == "float32" else 2,
                     loss="compiled" if self.gpu else "pieces")


def table(head: list[str], rows: list[list[str]]) -> str:
    line = lambda cells: "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"  # noqa: E731
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def number(value: float | None, digits: int = 3) -> str:
    """A number in a few digits, as people write it."""
    if value is None or not math.isfinite(value):
        return "n/a" if value is None else str(value)
    if value and not 1e-3 <= abs(value) < 1e15:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def gigabytes(size: float | None) -> str:
    return f"{size / 1e9:.1f} GB" if size else "n/a"


def machine_section(results: Results) -> list[str]:
    m = results.get("machine", "machine")
    if not m:
        return []
    smi, tera = m["smi"], {name: f"{rate / 1e12:,.3g} TFLOP/s" for name, rate in m["flops"].items()}
    rows = [["chip", m["chip"]], *([["memory", gigabytes(m["memory"])]] if m["memory"] else []),
            ["processor", f"{m['cores']} cores, {m['threads']} threads used, load {number(m['load'])} at the start"],
            *([["driver, power limit", f"{smi['driver_version']}, {smi['power.limit']}"],
               ["clocks", f"{smi['clocks.sm']} before, {m['clock_after_products']} after the products, at most "
                          f"{smi['clocks.max.sm']}; memory {smi['clocks.mem']}, at most {smi['clocks.max.mem']}"]]
              if smi else []),
            ["versions", ", ".join(f"{name} {version}" for name, version in m["versions"].items())],
            ["date", m["date"]]]
    size = "8192" if results.gpu else "1024 (bfloat16 where emulated: 256)"
    rows += [[f"{name} product, n = {size}, random data", rate] for name, rate in tera.items()]
    sheet = m["data_sheet_flops"]
    rows += [["data sheet, 16 bits", f"{sheet / 1e12:,.0f} TFLOP/s" if sheet else "n/a"],
             ["copy", f"{m['copy'] / 1e9:,.1f} GB/s, read plus written"],
             ["launch of a small operation", f"{m['launch'] * 1e6:.2f} µs"],
             ["pinned host to device", f"{m['host'] / 1e9:,.1f} GB/s" if m["host"] else "n/a"]]
    return [table(["", ""], rows)]


def right_section(results: Results) -> list[str]:
    rows = []
    for (part, _), row in results.rows.items():
        for check in (row["result"] or {}).get("checks", []) if part == "right" else []:
            verdict = {True: "yes", False: "**no**", None: "not compared"}[check["ok"]]
            measured = check.get("reason", "") if check["value"] is None else number(check["value"])
            bound = "" if check["bound"] is None else number(check["bound"])
            rows.append([check["what"], measured, bound, verdict])
    lines = [table(["check", "measured", "bound", "holds"], rows)] if rows else []
    shipped, strict = results.get("right", "resumed"), results.get("right", "resumed-deterministic")
    if shipped and strict:
        same = "bit for bit" if not shipped["differ"] else f"{shipped['differ']} of 16 numbers differ"
        lines.append(f"A resumed run as shipped: {same}. With `torch.use_deterministic_algorithms` a step takes "
                     f"{strict['ms']:,.1f} ms instead of {shipped['ms']:,.1f} ({strict['ms'] / shipped['ms']:.2f} "
                     f"times).")
    if half := results.get("right", "float16"):
        lines.append(f"float16 with scaler, {len(half['losses'])} steps: loss {half['losses'][0]:.3f} to "
                     f"{half['losses'][-1]:.3f}, scale at the end {half['scale']:,.0f}.")
    return lines


def speed_section(results: Results) -> list[str]:
    m, lines = results.get("machine", "machine"), []
    ceilings, done = results.ceilings(), results.done("speed")
    batches = sorted((r for job, r in done.items() if job.startswith("B=")), key=lambda r: r["B"])
    rows = []
    for r in batches:
        flops = r["flops_per_token"] * r["tok_per_s"]
        sheet = m and m["data_sheet_flops"]
        rows.append([str(r["B"]), f"{r['ms']:,.1f}", "{:,.1f} to {:,.1f}".format(*r["ms_quartiles"]),
                     f"{r['tok_per_s']:,.0f}", f"{flops / ceilings.flops:.1%}" if ceilings else "n/a",
                     f"{flops / sheet:.1%}" if sheet else "n/a", gigabytes(r["peak_memory"])])
    if rows:
        one = batches[0]
        lines.append(f"T = {one['T']}, {one['parameters']:,} parameters, {one['flops_per_token'] / 1e6:,.0f} MFLOP a "
                     f"token (6 N + 12 L C T), {'not compiled' if one['eager'] else 'compiled'}; median and quartiles "
                     f"of {one['steps']} steps. MFU: of the measured product, and of the data sheet.")
        lines.append(table(["B", "ms a step", "quartiles", "tok/s", "MFU, measured", "MFU, data sheet", "peak memory"],
                           rows))
    if first := done.get("first-step"):
        cold = f", {first['cold_s']:.1f} s with an empty compile cache" if first["cold_s"] else ""
        lines.append(f"From the command to the first step done: {first['warm_s']:.1f} s{cold}.")
    default, rows = results.default(), []
    for (part, job), row in results.rows.items():
        if part != "speed" or job.startswith("B=") or job == "first-step" or not default or not ceilings:
            continue
        change, why = predict(job, results.shape(default["B"]), ceilings)
        predicted = f"{change:+.1f} ms"
        if row["status"] == DONE and row["result"]["B"] == default["B"]:
            r = row["result"]
            rows.append([job, predicted, f"{r['ms'] - default['ms']:+.1f} ms", f"{r['ms']:,.1f}",
                         f"{r['tok_per_s']:,.0f}", gigabytes(r["peak_memory"]), why])
        elif row["status"] not in (DONE, SKIPPED):
            rows.append([job, predicted, row["status"], "", "", "", row["reason"]])
    if rows:
        lines += [f"The switches, one at a time, at B = {default['B']} against {default['ms']:,.1f} ms; predicted by "
                  "the table of floors:",
                  table(["switch", "predicted", "measured", "ms a step", "tok/s", "peak memory", "why"], rows)]
    return lines


def where_section(results: Results) -> list[str]:
    where, ceilings = results.get("where", "kernels"), results.ceilings()
    if not where:
        return []
    kernels = [[k["name"], k["part"], f"{k['ms']:,.2f}", number(k["calls"])] for k in where["kernels"][:12]]
    listed = table(["kernel" if results.gpu else "operator", "part", "ms a step", "calls"], kernels)
    if not ceilings or not results.default():
        parts = [[name, f"{ms:,.2f}"] for name, ms in where["parts_ms"].items()]
        return [table(["part", "ms a step"], parts), listed]
    floors = step_floors(results.shape(where["B"]), ceilings)
    rows, gaps = [], {}
    for part in PARTS:
        ms, floor = where["parts_ms"][part], floors[part]
        if part == COMMUNICATION and not ms:
            continue
        gaps[part] = ms - floor.ms
        rows.append([part, f"{ms:,.2f}", f"{floor.ms:,.2f}", f"{gaps[part]:+,.2f}", f"{ms / where['ms']:.1%}",
                     number(floor.flops / 1e12), number(floor.bytes / 1e9)])
    least = total_ms(floors)
    rows.append(["a step", f"{where['ms']:,.2f}", f"{least:,.2f}", f"{where['ms'] - least:+,.2f}", "100 %", "", ""])
    worst = max(gaps, key=gaps.get)
    hint = "; the device waits for Python or for launches there" if worst == GAPS else ""
    rate = 1e3 * where["B"] * results.header["seq_len"] / least
    return [
        f"B = {where['B']}, mean of {where['steps']} steps under the profiler. A floor is operations over the measured "
        f"product ({ceilings.flops / 1e12:,.3g} TFLOP/s), or bytes over the copy rate ({ceilings.copy / 1e9:,.0f} "
        "GB/s): support/report/floors.py has the arithmetic.",
        table(["part", "measured, ms", "floor, ms", "gap, ms", "share", "TFLOP", "GB"], rows),
        f"**The largest gap: {worst}, {gaps[worst]:,.1f} ms above its floor**{hint}. All floors together would be "
        f"{rate:,.0f} tok/s.",
        listed,
    ]


def price_of(chip: str) -> tuple[str, float] | None:
    """(name, dollars an hour) that --plan assumes for a chip."""
    return next(((name, price) for name, (_, price) in CLOUD_GPUS.items() if re.search(rf"\b{name}\b", chip)),
                None)


def around_section(results: Results) -> list[str]:
    evaluation, files, lines = results.get("around", "evaluation"), results.get("around", "files"), []
    rows = []
    if evaluation:
        for name, count, unit in (("validation", evaluation["validation_tokens"], "tok/s"),
                                  ("hellaswag", evaluation["tasks"], "tasks/s"),
                                  ("samples", evaluation["sample_tokens"], "tok/s")):
            first, second = evaluation[f"{name}_s"]
            rows.append([name, f"{count:,}", f"{first:.2f}", f"{second:.2f}", f"{count / second:,.0f} {unit}"])
        lines.append(table(["what", "size", "first time, s", "second time, s", "rate"], rows))
        lines.append(f"HellaSwag's tasks: {evaluation['tasks_from']}.")
    if files:
        lines.append(f"Checkpoint of {gigabytes(files['checkpoint_bytes'])}: training waits "
                     f"{files['checkpoint_wait_s']:.2f} s, written after {files['checkpoint_s']:.2f} s. The loader "
                     f"alone: {files['loader_tok_per_s']:,.0f} tok/s.")
    best = max((r["tok_per_s"] for job, r in results.done("speed").items() if job.startswith("B=")), default=None)
    if evaluation and files and best:
        interval = EVERY * BATCH / best
        extra = {
            "validation": EVAL_TOKENS * evaluation["validation_s"][1] / evaluation["validation_tokens"],
            "HellaSwag": TASKS * evaluation["hellaswag_s"][1] / evaluation["tasks"],
            "samples": evaluation["samples_s"][1],
            "checkpoints": files["checkpoint_wait_s"] * EVERY / SAVE_EVERY,
        }
        total = interval + sum(extra.values())
        shares = ", ".join(f"{name} {seconds / total:.2%}" for name, seconds in extra.items())
        hours = TOKENS / (EVERY * BATCH) * total / 3600
        chip = results.header["device"]
        money = "no price is assumed for this chip"
        if priced := price_of(chip):
            money = f"${hours * priced[1]:,.0f} at ${priced[1]:.2f} a GPU hour (assumed for {priced[0]})"
        lines.append(f"At the default intervals ({BATCH:,} tokens a step, validation of {EVAL_TOKENS:,} tokens, "
                     f"{TASKS:,} tasks and samples every {EVERY} steps, a checkpoint every {SAVE_EVERY:,}) they take "
                     f"{sum(extra.values()) / total:.1%} of a run: {shares}. This model at {best:,.0f} tok/s on 10 "
                     f"billion tokens: {duration(3600 * hours)} on one device, {money}.")
    return lines


def peers_section(results: Results) -> list[str]:
    lines, rows = [], []
    for job, result in results.done("peers").items():
        if job == "hellaswag":
            lines.append(f"HellaSwag, {result['tasks']} tasks, the same weights: build-nanogpt "
                         f"{result['theirs_per_s']:,.1f} tasks/s, ours {result['ours_per_s']:,.1f} "
                         f"({result['ours_per_s'] / result['theirs_per_s']:.1f} times); {result['same_predictions']} "
                         f"predictions are the same.")
        elif job == "llm.c":
            rows.append([result["kind"], f"{result['ms']:,.1f}", f"{result['tok_per_s']:,.0f}", "", "n/a", ""])
        else:
            ours = next((r for r in result["rows"] if r["kind"] == "ours" and "ms" in r), None)
            rows += [[f"{r['kind']}, B = {larger['B']}", "", "", "", "", r["problem"]]
                     for larger in result.get("too_large", []) for r in larger["rows"] if r.get("problem")]
            for r in result["rows"]:
                if "ms" not in r:
                    rows.append([r["kind"], "", "", "", "", r["problem"]])
                    continue
                ratio = f"{r['ms'] / ours['ms']:.2f} times ours" if ours and r is not ours else ""
                rate = 1e3 * result["B"] * result["T"] / r["ms"]
                rows.append([r["kind"] + (f" (beside {job})" if r is ours else ""), f"{r['ms']:,.1f}", f"{rate:,.0f}",
                             f"{r['first_s']:.1f}", gigabytes(r["peak_memory"]), ratio])
    if rows:
        lines.insert(0, table(["step", "ms", "tok/s", "first step, s", "peak memory", ""], rows))
        sizes = dict.fromkeys(f"B = {r['B']}, T = {r['T']}" for r in results.done("peers").values() if "B" in r)
        lines.insert(0, "; ".join(["In turns in one process, a step of each; median", *sizes]) + ".")
    return lines


def ladder_section(results: Results) -> list[str]:
    rows, first = [], None
    for (part, job), row in results.rows.items():
        if part != "ladder":
            continue
        if row["status"] != DONE:
            rows.append([job, row["status"], "", "", "", row["reason"]])
            continue
        r = row["result"]
        first = first or r
        rows.append([job, f"{r['ms']:,.1f}", f"{r['tok_per_s']:,.0f}", gigabytes(r["peak_memory"]),
                     f"{first['ms'] / r['ms']:.2f}", f"B {r['B']}, T {r['T']}"])
    return [table(["rung", "ms a step", "tok/s", "memory", "speed-up", ""], rows)] if rows else []


def run_section(results: Results) -> list[str]:
    r = results.get("run", "run")
    if not r or "ms" not in r:
        return []
    lines = [f"{r['steps']} steps: loss {r['train'][0]:.3f} to {r['train'][-1]:.3f}; median {r['ms']:,.1f} ms a step, "
             f"{r['tok_per_s']:,.0f} tok/s. `run/log.txt`, `run/run.json`; the curves: `run/curves.png`.",
             table(["step", "validation loss"], [[f"{step}", f"{value:.4f}"] for step, value in r["val"]])]
    if r["hella"]:
        hella = [[f"{step}", f"{value:.4f}"] for step, value in r["hella"]]
        lines.append(table(["step", "HellaSwag, acc_norm"], hella))
    if r["samples"]:
        lines.append("```\n" + "\n".join(r["samples"]) + "\n```")
    return lines


def summary(results: Results) -> str:
    """One row, which a table of machines can take as it is."""
    m, ceilings, peer = results.get("machine", "machine"), results.ceilings(), ""
    batches = [r for job, r in results.done("speed").items() if job.startswith("B=")]
    best = max(batches, key=lambda r: r["tok_per_s"], default=None)
    failed = sum(row["status"] not in (DONE, SKIPPED) for row in results.rows.values())
    for job, result in results.done("peers").items():
        times = {r["kind"]: r["ms"] for r in result.get("rows", []) if "ms" in r}
        if job == "build-nanogpt" and "ours" in times and len(times) > 1:
            kind = min((k for k in times if k != "ours"), key=times.get)
            peer = f"{times[kind] / times['ours']:.2f} ({kind})"
    cells = [results.header["device"], results.header["dtype"], "n/a", "n/a", "n/a", peer or "n/a", str(failed),
             m["date"] if m else "n/a"]
    if best:
        cells[2:5] = [f"{best['tok_per_s']:,.0f} (B = {best['B']})",
                      f"{best['flops_per_token'] * best['tok_per_s'] / ceilings.flops:.0%}" if ceilings else "n/a",
                      gigabytes(best["peak_memory"])]
    return table(["machine", "precision", "tok/s, best", "MFU", "peak memory", "times build-nanogpt's speed", "failed",
                  "date"], [cells])


def render(rows: list[Row], pictures: list[str]) -> str:
    """The page. rows: of results.jsonl, its header first; pictures: names of files beside it."""
    results = Results(rows)
    h = results.header
    lines = [f"# {h['device']}: a report of bench.py", summary(results)]
    if not results.gpu:
        lines.append("**Not a GPU.** A small model on a processor, to show what the command does and what it leaves: "
                     "its numbers say nothing about GPT-2 (124M).")
    commits = list(dict.fromkeys((row["commit"] or "unknown")[:12] for row in results.rows.values()))
    lines.append(f"Model: {h['n_layer']} layers, {h['n_head']} heads, {h['n_embd']} channels, T = {h['seq_len']}. "
                 f"Commit {', '.join(commits) or 'unknown'}. Written from `results.jsonl` by "
                 f"`python bench.py --report FOLDER`; docs/gpu.md explains the parts.")
    sections = {"machine": machine_section, "right": right_section, "speed": speed_section, "where": where_section,
                "around": around_section, "peers": peers_section, "ladder": ladder_section, "run": run_section}
    for part, section in sections.items():
        lines.append(f"## {SECTIONS[part]}")
        lines += section(results)
        lines += [f"![{SECTIONS[part]}]({name})" for name in pictures if name.startswith(part)]
        others = {job: row for (p, job), row in results.rows.items() if p == part and row["status"] != DONE}
        for status in dict.fromkeys(row["status"] for row in others.values()):
            which = "; ".join(f"{job} ({row['reason']})" for job, row in others.items() if row["status"] == status)
            lines.append(f"{status.capitalize()}: {which}.")
        if not any(p == part for p, _ in results.rows):
            lines.append("Not measured yet.")
    return "\n\n".join(lines) + "\n"


def write_report(folder: Path, rows: list[Row], draw: bool = True) -> None:
    """Writes report.md and, with `draw`, the pictures into the report's folder."""
    names = draw_pictures(folder, Results(rows)) if draw else [name for name in PICTURES if (folder / name).exists()]
    with atomic_write(folder / "report.md", "w") as file:
        file.write(render(rows, names))

"""The benchmark's arithmetic on a tiny model; the times themselves are the machine's."""

import json
import subprocess
import sys
import time

import pytest
import torch

import bench
from bench import RUNGS, BenchConfig, ExplicitAttention, build, plain_loss
from support.memory import memory_of
from support.report import around, correctness, page, peers, store
from support.report.floors import Ceilings, Shape, predict, step_floors, total_ms
from support.report.trace import PARTS, part_of, time_by_part
from tests.conftest import ROOT, script
from train_gpt2 import GPT, CausalSelfAttention, Distributed, GPTConfig, next_token_loss, read_config

TINY = ["--preset", "shakespeare", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--seq-len", "16",
        "--micro-batch-size", "2", "--device", "cpu", "--no-compile", "--steps", "3"]
SHAPE = GPTConfig(16, 50257, 1, 2, 16)


@pytest.fixture
def in_this_process(monkeypatch):
    """Measurements without a fresh process each, in one thread, and small products: seconds instead of a minute."""

    def measure_in_subprocess(config, rung, dist=None, **env):
        config = bench.replace(config, rung=tuple(rung))
        return bench.measure(config, Distributed.start(bench.train_config(config))) | {"time_to_first_step": 1.0}

    monkeypatch.setattr(bench, "measure_in_subprocess", measure_in_subprocess)
    monkeypatch.setattr(bench, "products", lambda device: {"float32": 2e9, "bfloat16": 1e9})
    monkeypatch.setattr(bench, "copy_bytes", lambda device, size: 1e9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other on a busy machine make any step slow
    yield
    torch.set_num_threads(threads)


def test_report_is_consistent(in_this_process, tmp_path, capsys):
    bench.main([*TINY, "--dtype", "float32", "--json", str(tmp_path / "bench.json")])
    text, result = capsys.readouterr().out, json.loads((tmp_path / "bench.json").read_text())
    for row in ("float32 product", "copy", "model", "first step done", "a step", "speed", "MFU", "peak memory", *PARTS):
        assert row in text, row
    assert "of the data sheet: n/a" in text and result["mfu_data_sheet"] is None
    assert max(map(len, text.splitlines())) <= 100
    assert result["tok_per_s"] == pytest.approx(2 * 16 / result["ms"] * 1e3)
    assert result["flops_per_token"] == 6 * (result["parameters"] - 16 * 16) + 12 * 16 * 16
    assert result["mfu_ceiling"] == pytest.approx(result["flops_per_token"] * result["tok_per_s"] / 2e9)
    assert result["ms_quartiles"][0] <= result["ms"] <= result["ms_quartiles"][1]
    assert result["peak_memory"] > 100e6 and result["cold_first_step_s"] is None


def test_parts_sum_to_the_step(in_this_process):
    """Apart from the gaps, which are the rest by definition, the parts make up most of a step of some size."""
    args = ["--n-layer", "2", "--n-head", "2", "--n-embd", "64", "--seq-len", "64", "--micro-batch-size", "4"]
    config = bench.parse_args(BenchConfig, args=[*TINY, *args, "--dtype", "float32"])
    result = bench.measure_in_subprocess(config, ["ours"])
    parts = result["parts_ms"]
    assert set(parts) == set(PARTS) and sum(parts.values()) == pytest.approx(result["profiled_ms"])
    assert 0 <= parts["gaps"] < 0.3 * result["profiled_ms"] and parts["communication"] == 0
    assert all(parts[name] > 0 for name in PARTS if name != "communication")
    assert parts["head and loss"] > parts["matmuls of the blocks"]  # V is 50,257, C is 64


def test_a_process_of_its_own(tmp_path):
    """Its peak of memory is about what --plan says: 0.5 GB, 0.3 of them the process, 0.1 the logits."""
    shape = ["--n-embd", "64", "--seq-len", "64", "--micro-batch-size", "4", "--dtype", "float32"]
    done = script("bench.py", *TINY, *shape, "--rung", "ours", "--json", tmp_path / "rung.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "rung.json").read_text())
    assert result["rung"] == ["ours"] and result["first_step_at"] > 1.7e9
    model = GPT(GPTConfig(64, n_layer=1, n_head=2, n_embd=64))
    config = read_config([*shape[:4], "--total-batch-size", "256"])
    memory = memory_of(model, 4, config, Distributed(0, 0, 1, torch.device("cpu"), torch.float32, ""))
    assert sum(memory.values()) == pytest.approx(result["peak_memory"], rel=0.2)


def test_ladder_names_what_it_skips(in_this_process, tmp_path, capsys):
    bench.main([*TINY, "--ladder", "--picture", str(tmp_path / "ladder.png"), "--json", str(tmp_path / "ladder.json")])
    text, rungs = capsys.readouterr().out, json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert list(rungs) == list(RUNGS) and all(f"\n{name}" in text for name in RUNGS)
    assert "tf32 skipped: no NVIDIA GPU" in text and "compile skipped: --no-compile" in text
    assert "bf16" in rungs["fused"]["rung"] or "bf16 skipped" in text
    assert [name for name in rungs["fused"]["rung"] if name != "bf16"] == ["float32", "flash", "padded", "fused"]
    assert rungs["padded"]["parameters"] - rungs["flash"]["parameters"] == (50_304 - 50_257) * 16
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG") and " 1,000" in text and "1.00 x" in text


def test_a_rung_that_fails_is_named(in_this_process, monkeypatch, capsys):
    def fail(config, rung, dist=None):
        if "padded" in rung and "fused" not in rung:
            raise bench.RunError("out of memory")
        return {"ms": 2.0, "tok_per_s": 1.0, "peak_memory": None, "preset": "gpt2", "B": 1, "T": 1}

    monkeypatch.setattr(bench, "measure_in_subprocess", fail)
    bench.main([*TINY, "--ladder", "--picture", ""])
    assert "padded skipped: out of memory" in (text := capsys.readouterr().out) and "n/a" in text


def test_explicit_attention_equals_sdpa():
    torch.manual_seed(0)
    attention, explicit = CausalSelfAttention(SHAPE), ExplicitAttention(SHAPE)
    explicit.load_state_dict(attention.state_dict())
    x = torch.randn(2, 16, 16)
    torch.testing.assert_close(explicit(x), attention(x))
    mask = torch.ones(16, 16, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[:, :, 8:, :4] = False
    torch.testing.assert_close(explicit(x, mask), attention(x, mask))


def test_every_rung_has_the_same_loss():
    idx = torch.randint(0, 50257, (2, 17), generator=torch.Generator().manual_seed(0))
    losses, state = [], build(SHAPE, ["ours"]).state_dict()
    for rung in (["ours"], ["float32"], ["flash"], ["flash", "padded"]):
        model = build(SHAPE, rung)
        model.load_state_dict({**state, "wte.weight": model.wte.weight.data})
        model.wte.weight.data[:50257] = state["wte.weight"]
        loss_function = next_token_loss if "ours" in rung else plain_loss
        losses.append(model(idx[:, :-1], idx[:, 1:], loss_function)[1].item())
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-4) and model.wte.weight.shape == (50304, 16)


@pytest.mark.parametrize("name, sizes, parent, part", [
    ("aten::mm", "[[512, 64], [64, 50257]]", "gaps", "head and loss"),
    ("aten::addmm", "[[256], [512, 64], [64, 256]]", "gaps", "matmuls of the blocks"),
    ("nvjet_hsh_128x256", "", "matmuls of the blocks", "matmuls of the blocks"),
    ("aten::_flash_attention_forward", "", "gaps", "attention"),
    ("triton_per_fused_addmm_native_layer_norm_3", "", "gaps", "norms, GELU, residual"),
    ("triton_red_fused__log_softmax_nll_loss_forward_0", "", "gaps", "head and loss"),
    ("aten::mm", "", "optimizer", "optimizer"),
    ("ncclDevKernel_AllReduce_Sum_f32", "", "norms, GELU, residual", "communication"),
    ("Torch-Compiled Region: 0/0", "", "gaps", "gaps"),
])
def test_part_of(name, sizes, parent, part):
    assert part_of(name, sizes, parent) == part


def test_gpu_kernels_count_for_what_launched_them():
    """A trace as a CUDA machine leaves it: 10 ms, of which 2 of a matmul's 4 ms are hidden behind communication's 5."""

    def event(cat, name, ts, dur, tid=1, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("cpu_op", "aten::mm", 0, 10, **{"External id": 1, "Input Dims": [[8, 64], [64, 64]]}),
        event("user_annotation", "optimizer", 20, 10, **{"External id": 2}),
        event("cpu_op", "aten::_foreach_mul_", 21, 5, **{"External id": 3}),
        event("kernel", "gemm", 100, 4000, tid=7, **{"External id": 1}),
        event("kernel", "ncclDevKernel", 2100, 5000, tid=8, **{"External id": 9}),
        event("kernel", "multi_tensor_apply", 7100, 1000, tid=7, **{"External id": 3}),
        event("gpu_user_annotation", "optimizer", 7100, 2000, tid=7),
    ]
    parts = {name: ms for name, ms in time_by_part(events, 1, 10.0).items() if ms}
    assert parts == pytest.approx({"matmuls of the blocks": 4, "communication": 3, "optimizer": 1, "gaps": 2})


@pytest.mark.parametrize("args, part", [
    (["--steps", "0"], "--steps 0"),
    (["--no-such-flag"], "--no-such-flag"),
    (["--n-head", "3"], "--n-head 3"),
    (["--seq-len", "-1"], "--seq-len -1"),
    (["--device", "tpu"], "--device tpu"),
    (["--ladder", "--picture", "ladder.txt"], "ladder.txt"),
    (["--json", "no/such/folder.json"], "no/such"),
    (["--only", "speed"], "--report"),
    (["--report", "r", "--peer", "nanogpt"], "--peer nanogpt"),
    (["--report", "r", "--peer", "nanogpt=no/such"], "model.py"),
    (["--report", "r", "--data", "no/such.txt"], "no/such.txt"),
])
def test_bad_flags(args, part):
    with pytest.raises(bench.InputError, match=part):
        bench.main([*TINY, *args])


def test_only_and_peer_may_come_several_times_or_with_several_values():
    def read(*args):
        return bench.parse_args(BenchConfig, args=bench.repeat_flags([*TINY, "--report", "r", *args]))

    one = read("--only", "speed", "right", "--minutes", "5", "--peer", "llm.c=a", "--peer", "nanogpt=b")
    assert one == read("--only", "speed", "--only", "right", "--minutes", "5", "--peer", "llm.c=a", "nanogpt=b")
    assert one.only == ("speed", "right") and one.peer == ("llm.c=a", "nanogpt=b") and one.minutes == 5
    command = bench.command_of(bench.replace(one, job="peers/nanogpt"))
    child = bench.parse_args(BenchConfig, args=command[2:])
    assert child.peer == one.peer and child.n_embd == 16 and child.only == () and not child.compile
    with pytest.raises(bench.InputError, match="--only"):
        read("--only")


# ---------------------------------------------------------------------------------------------------------------------
# The report

MACHINE = {"chip": "NVIDIA H100 80GB HBM3", "memory": 85e9, "cores": 16, "threads": 16, "load": 0.1, "versions": {},
           "date": "2026-11-21", "smi": {}, "clock_after_products": None, "flops": {"bfloat16": 790e12},
           "precision": "bfloat16", "data_sheet_flops": 989e12, "copy": 4.3e12, "launch": 4e-6, "host": 50e9}
GPT2 = Shape(64, 1024, 12, 768, 50_304, 124_439_808)
HOPPER = Ceilings(790e12, 4.3e12, 50e9)


def speed(B, ms, parameters=124_439_808, flops=855e6):
    return {"B": B, "T": 1024, "ms": ms, "ms_quartiles": [ms, ms], "tok_per_s": B * 1024e3 / ms, "peak_memory": 40e9,
            "parameters": parameters, "flops_per_token": flops, "steps": 30, "eager": ""}


def made_up_results():
    """Of a GPU that nobody has measured."""
    header = {"report": 1, "device": "NVIDIA H100 80GB HBM3", "kind": "cuda", "dtype": "bfloat16", "preset": "gpt2",
              "n_layer": 12, "n_head": 12, "n_embd": 768, "seq_len": 1024, "compile": True}
    where = {"B": 64, "T": 1024, "ms": 120.0, "steps": 5, "kernels": [
        {"name": "nvjet", "part": "matmuls of the blocks", "ms": 60.0, "calls": 144.0}],
        "parts_ms": dict(zip(PARTS, (0.0, 12.0, 65.0, 18.0, 17.0, 3.0, 0.5, 4.5), strict=True))}
    check = {"what": "float32 logits", "value": 2e-4, "bound": 1e-4, "ok": False}
    return [header, *(store.result_row(part, job, status, 0.0, reason, result) | {"commit": "abc"} for
                      part, job, status, reason, result in [
        ("machine", "machine", "done", "", MACHINE),
        ("right", "transformers", "failed", "beyond its bound: float32 logits", {"checks": [check]}),
        ("speed", "B=64", "done", "", speed(64, 120.0)), ("speed", "B=16", "done", "", speed(16, 40.0)),
        ("speed", "B=128", "failed", "out of memory at --micro-batch-size 128", None),
        ("speed", "bf16-stream", "done", "", speed(64, 116.0)),
        ("speed", "autotune", "timed out", "stopped after 270 s, its bound", None),
        ("speed", "math", "skipped", "not on cuda", None),
        ("where", "kernels", "done", "", where),
        ("peers", "build-nanogpt", "done", "", {"B": 64, "T": 1024, "rows": [
            {"kind": "build-nanogpt, compiled", "ms": 180.0, "first_s": 60.0, "peak_memory": 70e9},
            {"kind": "build-nanogpt, as shipped", "problem": "CUDA out of memory"},
            {"kind": "ours", "ms": 120.0, "first_s": 40.0, "peak_memory": 40e9}],
            "too_large": [{"B": 128, "rows": [{"kind": "ours, too", "problem": "no room for 128"}]}]}),
        ("around", "evaluation", "done", "", {
            "validation_tokens": 1_048_576, "tasks": 1000, "sample_tokens": 128, "tasks_from": "tasks.jsonl",
            "validation_s": [3.0, 2.0], "hellaswag_s": [9.0, 5.0], "samples_s": [2.0, 1.0]}),
        ("around", "files", "done", "", {"checkpoint_wait_s": 0.4, "checkpoint_s": 6.0, "checkpoint_bytes": 1.5e9,
                                         "loader_tok_per_s": 5e7}),
    ])]


def test_floors_of_gpt2_on_a_hopper():
    """The products are 6 N FLOPs a token; the rest is near what was estimated by hand for 65,536 tokens."""
    floors = step_floors(GPT2, HOPPER)
    flops = floors["matmuls of the blocks"].flops + floors["head and loss"].flops
    assert flops == pytest.approx(6 * 65536 * (12 * 12 * 768**2 + 50_304 * 768))
    assert 1e3 * flops / 790e12 == pytest.approx(61.5, abs=0.5)
    logits = floors["head and loss"].ms - 1e3 * floors["head and loss"].flops / 790e12
    assert 3 < logits < 5  # three passes over the logits
    assert 4 < floors["attention"].ms < 14 and 12 < floors["norms, GELU, residual"].ms < 21
    assert floors["optimizer"].bytes == 40 * GPT2.parameters and floors["gaps"].ms == 0
    assert 80 < total_ms(floors) < 100
    assert set(floors) == set(PARTS)


def test_predictions_follow_from_the_floors():
    half, _ = predict("bf16-stream", GPT2, HOPPER)
    assert -5 < half < -2  # 8 ms of norms and residuals become 5
    assert predict("chunked", GPT2, HOPPER)[0] > 20 and predict("math", GPT2, HOPPER)[0] > 10
    assert predict("whole", GPT2, HOPPER)[0] < 0 < predict("eager", GPT2, HOPPER)[0]
    assert predict("flash", GPT2, HOPPER)[0] == 0
    assert all(predict(switch, GPT2, HOPPER)[1] for switch in bench.SWITCHES)


def test_the_page_is_made_from_the_results_alone(tmp_path):
    page.write_report(tmp_path, made_up_results())
    text = (tmp_path / "report.md").read_text()
    rate = 64 * 1024 / 0.12
    for part in (f"{rate:,.0f} (B = 64)", f"{855e6 * rate / 790e12:.1%}", f"{855e6 * rate / 989e12:.1%}", "**no**",
                 "1.50 (build-nanogpt, compiled)", "1.50 times ours", "CUDA out of memory", "40.0 GB",
                 "no room for 128", "out of memory at --micro-batch-size 128", "stopped after 270 s",
                 "Not measured yet", "at $3.00 a GPU hour"):
        assert part in text, part
    assert "**The largest gap: matmuls of the blocks" in text and "Not a GPU" not in text
    predicted = predict("bf16-stream", GPT2, HOPPER)[0]
    assert f"| bf16-stream | {predicted:+.1f} ms | -4.0 ms |" in text
    # 250 steps of 524,288 tokens take 240 s; beside them 20 s of validation, 50.2 of HellaSwag, 1 of samples, 0.1 of
    # checkpoints.
    assert "validation 6.42%, HellaSwag 16.13%" in text and "6.6 hours" in text and "$20 " in text
    for name in ("speed.png", "where.png"):
        assert f"({name})" in text and (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "ladder.png").exists()
    assert page.render(made_up_results(), []) == page.render(made_up_results(), [])


@pytest.mark.parametrize("count", range(1, 12))
def test_a_page_of_few_results(count):
    """However early a report was cut off."""
    assert page.render(made_up_results()[:count], []).count("\n## ") == 8


def test_a_torn_last_line_is_dropped(tmp_path):
    header = {"report": 1, "device": "chip"}
    store.open_results(tmp_path, header)
    row = store.result_row("speed", "B=1", store.DONE, time.time(), result={"ms": 1.0})
    store.append_result(tmp_path, row)
    whole = (tmp_path / store.FILE).read_bytes()
    with open(tmp_path / store.FILE, "ab") as file:
        file.write(b'{"part": "speed", "job": "B=2", "sta')
    assert store.open_results(tmp_path, header) == [header, row]
    assert (tmp_path / store.FILE).read_bytes() == whole
    with pytest.raises(bench.InputError, match="its device is 'chip'"):
        store.open_results(tmp_path, {"report": 1, "device": "another"})
    (tmp_path / store.FILE).write_bytes(whole + b"nonsense\n")
    with pytest.raises(bench.InputError, match="line 3"):
        store.open_results(tmp_path, header)


def test_what_keeps_its_progress_goes_on_at_its_bound(monkeypatch, tmp_path, capsys):
    """A run that is cut has no line until it is done; another job that is cut has one, and is not tried again."""
    statuses = iter([store.TIMED_OUT, store.TIMED_OUT, None, store.DONE])
    monkeypatch.setattr(store, "run_job", lambda command, part, job, limit: (
        status := next(statuses)) and store.result_row(part, job, status, time.time(), "reason"))
    rows = store.open_results(tmp_path, {"report": 1})
    jobs = [store.Job("speed", "B=1"), store.Job("run", "run", goes_on=True)]
    store.work_through(tmp_path, rows, jobs, lambda job: [], lambda *args, **options: None, False, 0.0)
    assert [row["status"] for row in store.read_results(tmp_path)[1:]] == [store.TIMED_OUT, store.DONE]
    assert capsys.readouterr().out.count("goes on: run/run") == 2


def alive(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def python(code, *args):
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *map(str, args)]


def test_a_job_is_bounded_and_its_end_is_recorded(tmp_path):
    hang = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); " \
           "open(sys.argv[1], 'w').write(str(p.pid)); time.sleep(60)"
    row = store.run_job(python(hang, tmp_path / "pid"), "speed", "B=1", 1.0)
    assert row["status"] == store.TIMED_OUT and "1 s" in row["reason"] and row["result"] is None
    assert not alive(int((tmp_path / "pid").read_text()))  # what the job had started is gone, too
    row = store.run_job(python("sys.exit('error: out of memory')"), "speed", "B=1", 20.0)
    assert (row["status"], row["reason"]) == (store.FAILED, "out of memory")
    result = "import json; json.dump({'%s': %r}, open(sys.argv[-1], 'w'))"
    assert store.run_job(python(result % ("ms", 1.5)), "speed", "B=1", 20.0)["result"] == {"ms": 1.5}
    row = store.run_job(python(result % ("problem", "differs")), "right", "x", 20.0)
    assert (row["status"], row["reason"]) == (store.FAILED, "differs")
    assert store.run_job(python(result % ("unfinished", True)), "run", "run", 20.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_ends_with_the_process_that_started_it(tmp_path):
    job = "import os, time; from support.report import store; store.die_with_parent(); " \
          "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    parent = "from support.report import store; store.run_job(sys.argv[1:], 'speed', 'x', 60)"
    process = subprocess.Popen(python(parent, *python(job, tmp_path / "pid")))
    until = time.monotonic() + 20
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.fixture
def jobs_in_this_process(in_this_process, monkeypatch):
    """A report whose jobs run here, in a fraction of a second each. What they set for the whole process is put back."""
    import support.report.ceilings as ceilings

    monkeypatch.setattr(ceilings, "products", lambda device: {"float32": 2e9, "bfloat16": 1e9})
    monkeypatch.setattr(ceilings, "copy_bytes", lambda device, size: 1e9)
    started = []

    def run_job(command, part, job, limit):
        started.append(f"{part}/{job}")
        config, began = bench.parse_args(BenchConfig, args=command[2:]), time.time()
        result = bench.run_job(config, Distributed.start(bench.train_config(config)))
        return store.result_row(part, job, store.FAILED if "problem" in result else store.DONE, began,
                                result.get("problem", ""), result)

    monkeypatch.setattr(store, "run_job", run_job)
    yield started
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    torch.set_float32_matmul_precision("highest")


def test_a_report_that_is_cut_off_goes_on(jobs_in_this_process, monkeypatch, tmp_path, capsys):
    """In every job of these parts: the same rows as without the cut, and what was measured stays."""
    args = [*TINY, "--n-layer", "2", "--seq-len", "64", "--dtype", "float32", "--report", str(tmp_path), "--only",
            "machine", "where", "speed", "around", "right"]
    skipped = ("resumed", "resumed-deterministic", "first-step", "files", "float16", "evaluation")  # take seconds
    config = bench.parse_args(BenchConfig, args=bench.repeat_flags(args))
    jobs = [job for job in bench.jobs_of(config, torch.device("cpu"))
            if job.part in args and job.name not in skipped]
    monkeypatch.setattr(bench, "jobs_of", lambda *_: jobs)
    run_job, killed = store.run_job, []

    def cut(command, part, job, limit):
        if (part, job) in killed:
            return run_job(command, part, job, limit)
        killed.append((part, job))
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "run_job", cut)
    monkeypatch.setattr(page, "draw_pictures", lambda *_: [])  # another test has them
    lines: list[str] = []
    for _ in range(len(jobs) + 1):
        try:
            bench.main(args)
        except KeyboardInterrupt:
            now = (tmp_path / store.FILE).read_text().splitlines()
            assert now[: len(lines)] == lines
            lines = now
        else:
            break
    rows = store.read_results(tmp_path)
    assert [(row["part"], row["job"]) for row in rows[1:]] == [(job.part, job.name) for job in jobs]
    assert {row["status"] for row in rows[1:]} == {store.DONE, store.SKIPPED}, rows
    assert len(jobs_in_this_process) == len(killed) >= 7
    text = (tmp_path / "report.md").read_text()
    assert "Not a GPU" in text and "**no**" not in text and "The largest gap" in text
    started = len(jobs_in_this_process)
    bench.main(args)
    assert len(jobs_in_this_process) == started  # nothing is measured twice
    with pytest.raises(bench.InputError, match="seq_len"):
        bench.main([*args, "--seq-len", "32"])


def test_a_report_stops_when_its_minutes_are_over(jobs_in_this_process, tmp_path, capsys):
    args = [*TINY, "--dtype", "float32", "--report", str(tmp_path)]
    bench.main([*args, "--minutes", "1e-9"])
    assert not jobs_in_this_process and "goes on with machine/machine" in capsys.readouterr().out
    assert len(store.read_results(tmp_path)) == 1 and "Not measured yet" in (tmp_path / "report.md").read_text()


PEER = """
import torch, torch.nn as nn
from hellaswag import render_example
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, idx, targets):
        logits = self.wte(idx) @ self.wte.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, device_type, betas=None):
        assert not master_process
        return torch.optim.SGD(self.parameters(), lr=learning_rate)

raise SystemExit("the training run")
"""


def test_a_peer_is_measured_beside_ours(jobs_in_this_process, tmp_path):
    (tmp_path / "train_gpt2.py").write_text(PEER)
    (tmp_path / "hellaswag.py").write_text("raise SystemExit('a download')")
    args = [*TINY, "--dtype", "float32", "--report", str(tmp_path / "report"), "--only", "peers",
            "--peer", f"build-nanogpt={tmp_path}"]
    row = store.run_job(["", "", *args, "--job", "peers/build-nanogpt"], "peers", "build-nanogpt", 60)
    names = [one["kind"] for one in row["result"]["rows"]]
    assert names == ["build-nanogpt, as shipped", "ours"]
    assert all(one["ms"] > 0 and len(one["seconds"]) == 3 for one in row["result"]["rows"])


def test_what_llm_c_printed(tmp_path):
    form = "step {:4d}/100 | loss 10.9 (+nanz)| norm 15.4 (+nanz)| lr 1e-05 | {:.2f} ms | 55.0% bf16 MFU | {:.0f} tok/s"
    lines = [form.format(i + 1, 400.0 if i < 10 else 140.0 + i % 3, 65536 / 0.4) for i in range(40)]
    (tmp_path / "out.txt").write_text("\n".join(["| device | H100 |", *lines]))
    result = peers.read_llmc(tmp_path / "out.txt")
    assert result["steps"] == 30 and result["ms"] == 141.0 and result["tok_per_s"] == pytest.approx(65536 / 0.141)
    (tmp_path / "fp32.txt").write_text("\n".join(
        f"step {i + 1:4d}/20: train loss 4.0 (100.5 ms, 40759 tok/s)" for i in range(20)))
    assert peers.read_llmc(tmp_path / "fp32.txt")["tokens"] == 4096
    (tmp_path / "out.txt").write_text("usage: train_gpt2cu")
    with pytest.raises(bench.InputError, match="0 lines"):
        peers.read_llmc(tmp_path / "out.txt")


def test_tasks_cut_from_a_text_are_tasks():
    import hellaswag

    tasks = hellaswag.prepare(around.made_up_tasks(ROOT / "input.txt", 30), 1024)
    lengths = sorted(len(task.tokens) for task in tasks)
    assert len(tasks) == 30 and lengths[0] > 60 and lengths[-1] < 400
    assert {task.label for task in tasks} == {0, 1, 2, 3}


def test_a_check_that_does_not_hold_is_a_problem():
    checks = correctness.Checks()
    checks.add("logits", 1e-5, 1e-4)
    assert "problem" not in checks.result()
    checks.add("loss", float("nan"), 1e-4)
    assert checks.result()["problem"] == "beyond its bound: loss"

    class Trial:
        def __init__(self, switch):
            self.losses, self.change = [], 0.5 if switch == "eager" else 0.0

        def step(self, number):
            self.losses.append(3.0 + self.change * (number == 7))

    result = correctness.compiled_against_eager(Trial, 10, torch.bfloat16)
    assert result["checks"][0]["value"] == 0.5 and "compiled against eager" in result["problem"]


def test_packing_for_a_machine_without_a_network(monkeypatch, tmp_path, capsys):
    import importlib.util

    import numpy as np

    from support.shards import find_shards, open_shard

    spec = importlib.util.spec_from_file_location("pack", ROOT / "examples" / "pack.py")
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    monkeypatch.setattr(pack, "fetch_wheels", lambda folder, packages, python: folder.mkdir())
    rng = np.random.default_rng(0)
    (tmp_path / "shards").mkdir()
    for name in ("val_000000", "train_000001", "train_000002"):
        tokens = rng.integers(0, 50256, 400_000).astype(np.uint16)
        tokens[::1000] = 50256
        np.save(tmp_path / "shards" / f"x_{name}.npy", tokens)
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "train_gpt2.py").write_text(PEER)
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    args = [str(tmp_path / "carry"), "--shards", str(tmp_path / "shards"), "--hellaswag", str(tmp_path / "tasks.jsonl"),
            "--peer", f"build-nanogpt={tmp_path / 'peer'}", "--limit", "1"]
    pack.main(args)
    carry = tmp_path / "carry"
    assert 0.7 * 2**20 < pack.size_of(carry) <= 2**20 and "MiB" in capsys.readouterr().out
    for split in ("train", "val"):
        shards = [open_shard(path) for path in find_shards(carry / "shards", split)]
        assert sum(map(len, shards)) > 20_000 and all(shard[0] == 50256 and len(shard) % 1000 == 0 for shard in shards)
    (command,) = [line for line in (carry / "commands.txt").read_text().splitlines() if "bench.py" in line]
    monkeypatch.chdir(tmp_path)
    config = bench.parse_args(BenchConfig, args=bench.repeat_flags(command.split()[2:]))
    assert config.minutes == 5 and config.data == "carry/shards" and bench.peers.parse_peers(config.peer)
    with pytest.raises(bench.InputError, match="there already"):
        pack.main(args)
    with pytest.raises(bench.InputError, match="--limit 0"):
        pack.main([str(tmp_path / "other"), *args[1:-1], "0"])
    assert not (tmp_path / "other").exists()

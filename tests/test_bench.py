"""The benchmark's arithmetic on a tiny model; the times themselves are the machine's."""

import json

import pytest
import torch

import bench
from bench import PARTS, RUNGS, BenchConfig, ExplicitAttention, build, part_of, plain_loss, time_by_part
from support.plan import memory_of
from tests.conftest import assert_one_error_line, script
from train_gpt2 import GPT, CausalSelfAttention, Distributed, GPTConfig, next_token_loss

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
    monkeypatch.setattr(bench, "ceilings", lambda device: {"float32": 2e9, "bfloat16": 1e9})
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
    memory = memory_of(model, 4, 64, torch.device("cpu"), torch.float32, low_memory=False)
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
])
def test_bad_flags(args, part):
    with pytest.raises(bench.InputError, match=part):
        bench.main([*TINY, *args])


def test_a_bad_flag_has_status_2():
    assert_one_error_line(script("bench.py", "--steps", "0"), "--steps 0")

"""Small runs: losses do not depend on how a step is split; output on the console and in files."""

import math
import os
import re
import shlex
import subprocess
import sys
from functools import partial, partialmethod
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from torch._dynamo.utils import counters

import train_gpt2
from support import console, devices, loss, run_log
from support.checkpoints import find_checkpoint
from support.errors import UserError
from support.run_folder import RunFolder
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, losses, read_log, train, train_on_ranks, words
from train_gpt2 import GPT, GPTConfig, Ranks


def show_gradients():
    """Prints, before each step, dynamo's setting under DDP and where the gradients are.

    torchrun counts the restarts of each node alone: all ranks still exchange the same."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    get_lr = train_gpt2.get_lr
    wrap_in_ddp = train_gpt2.wrap_in_ddp
    modules = []

    def wrap(*args):
        modules.append(wrap_in_ddp(*args))
        return modules[0]

    def show(*args):
        places = hash(tuple(p.grad.data_ptr() for p in modules[0].parameters()))
        print("optimize_ddp", torch._dynamo.config.optimize_ddp, "gradients at", places)
        print("seed", torch.initial_seed())
        return get_lr(*args)

    train_gpt2.wrap_in_ddp = wrap
    train_gpt2.get_lr = show
    devices.matmul_flops = lambda *args: 1e9  # of each rank's device


def test_losses_do_not_depend_on_ranks_or_micro_batches(text, tmp_path):
    """192 tokens per step: 12 micro-batches of 1, 6 of 2, one of 12; on three ranks 2 of 2 each."""
    args = ["--total-batch-size 192 --max-steps 5 --eval-every 5 --max-lr 2e-2 --data", text]
    for B in (1, 2, 12):
        train(*args, "--micro-batch-size", B, "--log-dir", tmp_path / f"alone_{B}")
    more = ["--sample-every 4 --log-dir", tmp_path / "three"]
    texts = train_on_ranks(3, tmp_path, *args, *more, disturb=show_gradients)
    # Four from each rank at step 4, two from rank 0 at the end.
    assert [output.count(f"rank {rank} sample") for rank, output in enumerate(texts)] == [6, 4, 4]
    assert len({output.split("sample 0:")[1].split("rank ")[0] for output in texts}) == 3
    assert "2 x 16 tokens x 2 micro-steps x 3 ranks" in texts[0]
    assert "optimize_ddp False" in texts[0]
    places = [line.split()[-1] for line in texts[0].splitlines() if "gradients at" in line]
    assert len(places) == 5 and len(set(places)) == 1  # in DDP's buckets from the first step
    seeds = {re.search(r"seed (\d+)", output)[1] for output in texts}
    assert len(seeds) == 3, "a fork's dropout would have the same masks on several ranks"
    flops = GPT(GPTConfig(16, 50257, 2, 2, 16)).flops_per_token(16)
    rates, mfu = (losses(tmp_path / "three", stream) for stream in ("tok_per_sec", "mfu"))
    assert mfu == pytest.approx([rate * flops / 3e9 for rate in rates], abs=1e-3)
    expected = losses(tmp_path / "alone_12")
    assert len(expected) == 5 and expected[-1] < expected[0] - 0.5
    for name in ("alone_1", "alone_2", "three"):
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-4), name
        for stream, tolerance in {"val": {"abs": 1e-4}, "norm": {"rel": 1e-3}}.items():
            other = losses(tmp_path / "alone_12", stream)
            assert losses(tmp_path / name, stream) == pytest.approx(other, **tolerance), name
    norms = losses(tmp_path / "alone_12", "norm")  # unscaled before clipping
    for dtype in ("bfloat16", "float16"):  # products are rounded to 8 or 11 bits
        train(*args, "--micro-batch-size 12 --dtype", dtype, "--log-dir", tmp_path / dtype)
        assert losses(tmp_path / dtype) == pytest.approx(expected, abs=3e-2)
        assert losses(tmp_path / dtype) != expected
        assert losses(tmp_path / dtype, "norm") == pytest.approx(norms, rel=0.05)


def test_losses_and_a_clipped_update_equal_a_plain_loop(text, tmp_path):
    """Two steps of the script against torch's own pieces, without accumulation."""
    flags = "--max-steps 2 --save-every 2 --max-lr 1e-2 --grad-clip 0.5 --seed 7"
    train(flags, "--data", text, "--log-dir", tmp_path)
    torch.manual_seed(7)
    model = GPT(GPTConfig(16, 50257, 2, 2, 16))
    groups = []
    for dim, decay in ((2, 0.1), (1, 0.0)):
        parameters = [p for p in model.parameters() if p.dim() == dim]
        groups.append({"params": parameters, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    loader = train_gpt2.DataLoaderLite(text, "train", 8, 16, seed=7)
    for step, lr in enumerate((5e-3, 1e-2)):
        x, y = loader.next_batch()
        loss = torch.nn.functional.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert losses(tmp_path)[step] == pytest.approx(loss.item(), abs=1e-5)
    trained = GPT.from_pretrained(tmp_path / "step_000002")
    for (name, a), b in zip(model.named_parameters(), trained.parameters(), strict=True):
        # AdamW divides tiny gradients by their size, and so magnifies their rounding.
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=name)


def test_validation_loss_is_the_mean_over_all_tokens(text, tmp_path, monkeypatch):
    """160 tokens are 10 sequences, which B = 3 does not divide. Logits come in chunks."""
    model, results = GPT(GPTConfig(16, 50257, 1, 2, 16)), []
    loader = train_gpt2.DataLoaderLite(text, "val", 8, 16, shuffle=False)
    tokens = torch.from_numpy(loader.read(0, 161).astype("int64"))
    expected = model(tokens[:-1].view(10, 16), tokens[1:].view(10, 16))[1].item()
    monkeypatch.setattr(loss, "CHUNK", 24)
    alone = Ranks(0, 1, torch.device("cpu"))
    autocast = torch.autocast("cpu", enabled=False)
    for loader.B in (1, 3, 8):
        results.append(train_gpt2.validation_loss(model, loader, 160, alone, autocast))
    assert results == pytest.approx([expected] * 3, abs=1e-5)

    class GPU(str):
        type = "cuda"

    # On a GPU full batches use the compiled function, which would keep all logits of others.
    shapes, function = [], model.validation_function

    def compiled(x, *args):
        shapes.append(x.shape[:2])
        return function(x, *args)

    model.validation_function, loader.B = compiled, 3
    on_gpu = train_gpt2.validation_loss(model, loader, 160, Ranks(0, 1, GPU("cpu")), autocast)
    assert on_gpu == pytest.approx(expected, abs=1e-5) and shapes == [(3, 16)] * 3

    # The last of 160 tokens has no target, so they are nine sequences.
    np.save(tmp_path / "a_val_000000.npy", tokens[:160].numpy().astype("uint16"))
    whole = train_gpt2.DataLoaderLite(tmp_path, "val", 8, 16, shuffle=False)
    expected = model(tokens[:144].view(9, 16), tokens[1:145].view(9, 16))[1].item()
    nine = train_gpt2.validation_loss(model, whole, 10**6, alone, autocast)
    assert nine == pytest.approx(expected, abs=1e-5)
    assert train_gpt2.validation_text(whole, 10**6).tokens == 144
    np.save(tmp_path / "a_val_000000.npy", tokens.numpy().astype("uint16"))
    whole = train_gpt2.DataLoaderLite(tmp_path, "val", 8, 16, shuffle=False)
    ten = train_gpt2.validation_loss(model, whole, 10**6, alone, autocast)
    assert ten == pytest.approx(results[0], abs=1e-5)
    assert train_gpt2.validation_text(whole, 10**6).tokens == 160


def test_clipping_can_be_turned_off(text, tmp_path):
    weights = []
    for clip in ("0", "1e9", "1"):
        log = tmp_path / clip
        train("--max-steps 2 --save-every 2 --data", text, "--grad-clip", clip, "--log-dir", log)
        assert min(losses(log, "norm")) > 1
        weights.append((log / "step_000002/model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_one_sequence_is_enough_for_validation():
    flags = "--seq-len 32 --eval-tokens 32 --warmup-steps 0 --max-steps 0"
    assert train_gpt2.read_config(flags.split()).eval_tokens == 32


def test_compiled_run_equals_eager_and_evaluates(text, tmp_path, capsys, monkeypatch):
    """Validation, HellaSwag and samples under --compile, with the losses of the eager run.

    C++ takes long to compile, so only the last run has it, with no vector instructions, for which
    PyTorch would first compile six programs."""
    flags = "--max-steps 4 --eval-every 3 --hellaswag-every 3 --sample-every 3 --seq-len 64"
    args = [flags, "--data", text, "--hellaswag-data", ROOT / "tests/hellaswag_sample.jsonl"]
    train(*args, "--log-dir", tmp_path / "eager")
    counters.clear()
    eager = {"backend": "aot_eager"}
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, **eager))
        patch.setattr(torch, "compile", partial(torch.compile, **eager))
        train(*args, "--log-dir", tmp_path / "compiled", "--compile")
    assert counters["stats"]["unique_graphs"] > 1, "nothing but the trial was compiled"
    assert capsys.readouterr().out.count("rank 0 sample") == 2 * (4 + 2)  # two longer ones last
    for stream, count in {"train": 4, "val": 3, "hella": 3}.items():
        assert len(losses(tmp_path / "compiled", stream)) == count
        expected = pytest.approx(losses(tmp_path / "eager", stream), abs=1e-3)
        assert losses(tmp_path / "compiled", stream) == expected
    isa = "torch._inductor.cpu_vec_isa.valid_vec_isa_list"
    monkeypatch.setattr(isa, lambda: [], raising=False)
    low = "--seq-len 64 --max-steps 2 --compile --low-memory --data"
    train(low, text, "--log-dir", tmp_path / "low")
    assert losses(tmp_path / "low") == pytest.approx(losses(tmp_path / "eager")[:2], abs=1e-3)


def test_a_machine_without_a_compiler_trains_eagerly(text, tmp_path, monkeypatch, capsys):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        train("--max-steps 2 --compile --data", text, "--log-dir", tmp_path / "log")
    assert "torch.compile does not work on this machine" in capsys.readouterr().out
    assert len(losses(tmp_path / "log")) == 2


def test_a_run_ends_with_its_results(text, tmp_path, monkeypatch, capsys):
    """Two samples, the loss per character, curves, and a command that samples from the model."""
    import sample

    monkeypatch.chdir(tmp_path)
    flags = "--max-steps 2 --eval-every 2 --eval-tokens 100 --sample-every 2 --save-every 2"
    args = [flags, "--data", text, "--log-dir", Path("my log")]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train_gpt2.py"), *words(*args)])
    train(*args, curves=True)
    out = capsys.readouterr().out
    end = out[out.index("rank 0 sample 0:") :]
    assert end.count("rank 0 sample") == 2 and end.count("\n  ROMEO:") == 2
    # Six sequences of 16 tokens: 97, of which 96 are predicted.
    tokens = [50256, *get_tokenizer().encode_ordinary(text.read_text())]
    x = torch.tensor(tokens[len(tokens) - len(tokens) // 10 :][:97])
    val = losses("my log", "val")[-1]
    model = GPT.from_pretrained("my log/step_000002")
    assert val == pytest.approx(model(x[:-1].view(6, 16), x[1:].view(6, 16))[1].item(), abs=1e-5)
    predicted = get_tokenizer().decode(x[1:].tolist())
    bpb = val * 96 / len(predicted.encode()) / math.log(2)
    assert losses("my log", "bpb")[-1] == pytest.approx(bpb, abs=1e-6)
    char = f"{val * 96 / len(predicted):.4f} nats per character\n"
    assert f"validation loss: {val:.4f} nats per token\n  {char}  {bpb:.4f} bits per byte" in end
    results = f"curves: {Path('my log/curves.png')}\nmodel: my log/step_000002/"
    assert results in end and "\npeak memory: " in end
    assert Path("my log/curves.png").read_bytes().endswith(b"IEND\xaeB\x60\x82")
    python, program, *rest = shlex.split(re.search("sample: (.+)", end)[1])
    assert python == "python" and Path(program).samefile(ROOT / "sample.py")
    sample.main([*rest, "--max-new-tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("ROMEO:")
    # Files that may be published don't leak local paths.
    for name in ("run.json", "step_000002/README.md"):
        content = Path("my log", name).read_text()
        assert "train_gpt2.py" in content and str(tmp_path) not in content


def test_the_last_model_card_has_the_final_validation_loss(tmp_path, monkeypatch):
    """As the Hub reads it; also if the run is killed before it is written."""
    data = tmp_path / "shards"
    data.mkdir()
    for split in ("train", "val"):
        np.save(data / f"a_{split}_000000.npy", np.arange(500, dtype=np.uint16))
    manifest = data / "manifest.json"
    manifest.write_text('{"source": "files"}')  # as fineweb.py --input writes it
    args = ["--save-every 1 --eval-every 1 --max-steps 2 --data", data, "--log-dir"]

    def card(log, step=2):
        return ModelCard.load(tmp_path / f"{log}/step_{step:06d}/README.md").data

    train(*args, tmp_path / "files", "--eval-every 0")
    assert card("files").datasets is None and card("files").license == "mit"
    assert card("files").eval_results is None
    manifest.write_text('{"source": "HuggingFaceFW/fineweb-edu"}')
    train(*args, tmp_path / "straight")
    final = losses(tmp_path / "straight", "val")[-1]
    (result,) = card("straight").eval_results
    assert result.metric_value == pytest.approx(final, abs=1e-4)
    assert (result.metric_type, result.dataset_type) == ("loss", "HuggingFaceFW/fineweb-edu")
    assert card("straight").datasets == ["HuggingFaceFW/fineweb-edu"]
    assert card("straight", step=1).eval_results is None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "finish", mock.Mock(side_effect=KeyboardInterrupt))
        train(*args, tmp_path / "killed")
    assert card("killed").eval_results is None
    train(*args, tmp_path / "killed", "--resume")
    ours, theirs = (tmp_path / f"{log}/step_000002" for log in ("straight", "killed"))
    assert (ours / "README.md").read_bytes() == (theirs / "README.md").read_bytes()
    assert find_checkpoint(tmp_path / "killed") == theirs
    assert "README.md" not in (ours / "SHA256SUMS").read_text()  # `sha256sum -c` stays right
    # The Hub takes no nan.
    monkeypatch.setattr(train_gpt2, "validation_loss", lambda *args: math.nan)
    train(*args, tmp_path / "nan")
    assert card("nan").eval_results is None and card("nan").license == "mit"


@pytest.mark.parametrize(
    "tokens, steps, note",
    [
        (1000, 0, ""),
        (1000, 1, "note: --max-steps 16 would read the text once\n"),
        (1000, 2, ""),
        (100, 15, ""),
        (100, 16, "note: --max-steps 6 would read the text 4 times, after which it teaches little"),
    ],
)
def test_a_plan_far_from_the_size_of_the_text_is_noted(tokens, steps, note, tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text(" the" * (tokens * 10 // 9 - 1))  # nine tenths are for training
    train("--total-batch-size 64 --max-steps", steps, "--data", path, "--log-dir", tmp_path / "log")
    out = capsys.readouterr().out
    assert f"data: {path}, {tokens:,} training tokens" in out
    assert note in out and out.count("note: ") == bool(note), out


def test_a_new_start_keeps_an_earlier_runs_files(text, tmp_path, monkeypatch):
    """Also if it ends before its first line and is resumed."""
    args = ["--save-every 2 --data", text, "--log-dir", tmp_path, "--max-steps"]
    train(*args, 2)
    first, weights = read_log(tmp_path), (tmp_path / "step_000002/model.safetensors").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(console, "announce", mock.Mock(side_effect=KeyboardInterrupt))
        train(*args, 2, "--seed 5")
    assert (tmp_path / "earlier_1/step_000002/model.safetensors").read_bytes() == weights
    for steps in (2, 3):
        train(*args, steps, "--seed 5 --resume")
        assert read_log(tmp_path)[: len(first)] == first
    assert losses(tmp_path)[:2] != losses(tmp_path)[2:4]
    assert [line.split()[0] for line in read_log(tmp_path, "train")] == ["0", "1", "0", "1", "2"]


def test_zero_steps_evaluate_and_exit(text, tmp_path):
    shape = GPTConfig(16, 50257, 1, 4, 16)  # not the flags'
    GPT(shape).save_pretrained(tmp_path / "model")
    args = ["--init", tmp_path / "model", "--max-steps 0 --eval-every 1 --save-every 1 --data"]
    train(*args, text, "--log-dir", tmp_path)
    assert GPT.from_pretrained(tmp_path / "step_000000").config == shape
    assert losses(tmp_path, "val") == [pytest.approx(math.log(50257), abs=0.1)]
    assert not losses(tmp_path)


def test_an_edited_script_is_kept_with_the_log(text, tmp_path, monkeypatch):
    """As git sees it at each start; a copy of an earlier start goes, the user's own file stays."""
    repo = tmp_path / "repo"
    script, copy = repo / "train_gpt2.py", tmp_path / "log" / "train_gpt2.py"
    repo.mkdir()
    script.write_text("committed")
    for command in ("init", "add .", "-c user.name=me -c user.email=me commit -m first"):
        subprocess.run(["git", "-C", repo, *command.split()], check=True, capture_output=True)
    monkeypatch.setattr(run_log, "ROOT", repo)
    for source in ("committed", "changed", "committed"):
        script.write_text(source)
        train("--max-steps 0 --data", text, "--log-dir", copy.parent)
        assert (copy.read_text() if copy.exists() else "committed") == source
    copy.write_text("the user's")
    for source in ("changed", "the user's", "committed"):
        script.write_text(source)
        train("--max-steps 0 --data", text, "--log-dir", copy.parent)
        assert copy.read_text() == "the user's"
    with pytest.raises(UserError, match="repo: the repository itself"):
        train("--max-steps 0 --data", text, "--log-dir", repo)
    assert sorted(path.name for path in repo.iterdir()) == [".git", "train_gpt2.py"]

"""Runs of a second: losses against a plain loop, for every division of a step; what they print."""

import math
import re
import shlex
import sys
from functools import partial, partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from torch._dynamo.utils import counters
from transformers.models.gpt2.modeling_gpt2 import GPT2Config, GPT2LMHeadModel

import sample
import train_gpt2
from support.cli import differences
from support.errors import RunError
from support.run_log import run_entries
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, TINY, losses, read_log, steps_of, train, train_on_ranks, words
from train_gpt2 import GPT, DataLoaderLite, GPTConfig, Ranks, read_config, validation_loss

ALONE = Ranks(0, 1, torch.device("cpu"))
FLOAT32 = torch.autocast("cpu", enabled=False)


def show_gradients():
    """Prints, before each step, dynamo's setting under DDP and where the gradients are."""
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
    assert mfu == pytest.approx([rate * flops / 3e12 for rate in rates], abs=1e-3)
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
    loader = DataLoaderLite(text, "train", 8, 16, seed=7)
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


def test_clipping_can_be_turned_off(text, tmp_path):
    weights = []
    for clip in ("0", "1e9", "0.5"):
        log = tmp_path / clip
        train("--max-steps 2 --save-every 2 --data", text, "--grad-clip", clip, "--log-dir", log)
        assert min(losses(log, "norm")) > 0.5
        weights.append((log / "step_000002/model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_validation_loss_is_the_mean_over_all_tokens(tmp_path):
    """160 tokens are 10 sequences, which B = 3 does not divide; the last one has a target."""
    tokens = np.random.default_rng(0).integers(0, 50257, 161).astype("uint16")
    np.save(tmp_path / "a_val_000000.npy", tokens)
    model = GPT(GPTConfig(16, 50257, 1, 2, 16))
    x, y = (
        torch.from_numpy(part.astype("int64")).view(10, 16) for part in (tokens[:-1], tokens[1:])
    )
    for sequences in (10, 4):
        expected = torch.nn.functional.cross_entropy(
            model(x[:sequences])[0].flatten(0, 1), y[:sequences].flatten()
        ).item()
        for B in (1, 3, 8, 100):
            loader = DataLoaderLite(tmp_path, "val", B, 16, shuffle=False)
            assert loader.sequences_per_epoch == 10
            found = validation_loss(model, loader, sequences, ALONE, FLOAT32)
            assert found == pytest.approx(expected, abs=1e-5), (sequences, B)
    np.save(tmp_path / "a_val_000000.npy", tokens[:160])  # the last token has no target
    assert DataLoaderLite(tmp_path, "val", 1, 16, shuffle=False).sequences_per_epoch == 9


def test_a_validation_set_below_eval_tokens_is_evaluated_once(text, tmp_path, monkeypatch):
    read, rows = DataLoaderLite.read, []

    def counted(self, first, count):
        rows.append(first + count)
        return read(self, first, count)

    monkeypatch.setattr(DataLoaderLite, "read", counted)
    log = tmp_path / "log"
    train("--max-steps 0 --eval-every 1 --eval-tokens 2000 --data", text, "--log-dir", log)
    sequences = DataLoaderLite(text, "val", 1, 16, shuffle=False).sequences_per_epoch
    assert len(losses(log, "val")) == 1
    assert 10 < max(rows) < sequences + 2  # the last micro-batch may be filled up


def test_low_memory_computes_blocks_twice(text, tmp_path, monkeypatch):
    forward, calls = train_gpt2.Block.forward, []
    monkeypatch.setattr(
        train_gpt2.Block, "forward", lambda self, x: calls.append(1) or forward(self, x)
    )
    counts = []
    for flag in ("--no-low-memory", "--low-memory"):
        calls.clear()
        train("--max-steps 1 --data", text, flag, "--log-dir", tmp_path / flag)
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0]


def test_ranks_without_a_share_of_the_validation_set_wait_for_the_others(text, tmp_path):
    """Two sequences on three ranks. They share HellaSwag's tasks as well."""
    args = ["--eval-every 1 --eval-tokens 128 --total-batch-size 384 --max-steps 1 --data", text]
    args += ["--seq-len 64 --hellaswag-every 1 --hellaswag-data"]
    args += [ROOT / "tests/hellaswag_sample.jsonl"]
    train(*args, "--log-dir", tmp_path / "alone")
    train_on_ranks(3, tmp_path, *args, "--log-dir", tmp_path / "three")
    for stream in ("val", "hella"):
        expected = pytest.approx(losses(tmp_path / "alone", stream), abs=1e-5)
        assert losses(tmp_path / "three", stream) == expected and expected.expected[0] > 0


def test_compiled_run_equals_eager_and_evaluates(text, tmp_path, capsys, monkeypatch):
    """Validation, HellaSwag and samples under --compile, with the losses of the eager run.

    C++ takes long to compile, so only the last run has it, with no vector instructions, for which
    PyTorch would first compile six programs."""
    flags = "--max-steps 4 --eval-every 3 --hellaswag-every 2 --sample-every 3 --seq-len 64"
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
    for stream, steps in {"train": "0123", "val": "034", "hella": "024"}.items():
        logged = read_log(tmp_path / "compiled", stream)
        assert [line.split()[0] for line in logged] == list(steps)
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
    monkeypatch.chdir(tmp_path)
    flags = "--max-steps 2 --eval-every 2 --eval-tokens 100 --sample-every 2 --save-every 2"
    args = [flags, "--data", text, "--log-dir", Path("my log")]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train_gpt2.py"), *words(*args)])
    train(*args, curves=True)
    out = capsys.readouterr().out
    end = out[out.index("rank 0 sample 0:") :]
    assert end.count("rank 0 sample") == 2 and end.count("\n  ROMEO:") == 2
    for sampled in end.split("ROMEO:")[1:3]:  # of an untrained model; some characters are no text
        assert 40 < len(get_tokenizer().encode_ordinary(sampled.split("rank ")[0])) < 200
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
    card = ModelCard.load("my log/step_000002/README.md").data  # as the Hub reads it
    assert card.license == "mit" and card.library_name == "transformers"


def test_a_run_begins_with_what_it_trains(text, tmp_path, capsys):
    """By transformers' parameter count and tiktoken's tokens; PaLM's FLOPs (appendix B)."""
    train("--max-steps 2 --micro-batch-size 4 --data", text, "--log-dir", tmp_path / "log")
    out = capsys.readouterr().out
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16))
    n = gpt2.num_parameters()
    flops = 6 * (n - 16 * 16) + 12 * 2 * 16 * 16
    assert f"model: {n:,} parameters, {flops / 1e6:,.0f} MFLOP per token\n" in out
    tokens = 1 + len(get_tokenizer().encode_ordinary(text.read_text()))
    tokens -= tokens // 10
    assert f"data: {text}, {tokens:,} training tokens\n" in out
    assert "batch: 4 x 16 tokens x 2 micro-steps x 1 ranks\n" in out
    epochs = float(re.search(r"([\d.]+) epochs", out)[1])
    assert epochs == pytest.approx(2 * 128 / (tokens // 16 * 16), abs=6e-4)


def test_zero_steps_evaluate_and_exit(text, tmp_path, capsys):
    shape = GPTConfig(16, 50257, 1, 4, 16)  # not the flags'
    GPT(shape).save_pretrained(tmp_path / "model")
    args = ["--init", tmp_path / "model", "--max-steps 0 --eval-every 1 --data", text]
    train(*args, "--save-every 1 --log-dir", tmp_path / "log")
    assert "\nmodel: " not in capsys.readouterr().out.split("validation loss: ")[1]
    assert losses(tmp_path / "log", "val") == [pytest.approx(math.log(50257), abs=0.1)]
    assert not losses(tmp_path / "log") and not steps_of(tmp_path / "log")


def test_a_diverged_model_is_evaluated_and_ends_with_the_message_of_its_update(
    text, tmp_path, monkeypatch, capsys
):
    new_model, get_lr, models = train_gpt2.new_model, train_gpt2.get_lr, []

    def kept(*args):
        models.append(new_model(*args))
        return models[0]

    def overflowing(step, config):
        if step == 1:
            models[0].wte.weight.data.fill_(torch.inf)
        return get_lr(step, config)

    monkeypatch.setattr(train_gpt2, "new_model", kept)
    monkeypatch.setattr(train_gpt2, "get_lr", overflowing)
    flags = "--max-steps 3 --seq-len 64 --eval-every 1 --hellaswag-every 1 --sample-every 1"
    args = [flags, "--skip-bad-steps 1 --data", text, "--log-dir", tmp_path]
    args += ["--hellaswag-data", ROOT / "tests/hellaswag_sample.jsonl"]
    with pytest.raises(RunError, match="step 2: loss nan"):
        train(*args)
    printed = capsys.readouterr().out
    assert "validation loss nan" in printed and "no samples: the model's logits are not" in printed


def test_float16_ends_a_run_whose_gradients_always_overflow(text, tmp_path, monkeypatch):
    """Each overflow halves the scale; at 1 the gradient itself is not finite."""
    loss = train_gpt2.training_loss

    def overflowing(x, wte, targets):
        total = x.float().sum()
        return loss(x, wte, targets) + 1e38 * (total - total.detach())

    monkeypatch.setattr(train_gpt2, "training_loss", overflowing)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    with pytest.raises(RunError, match="step 2: loss 10"):
        flags = "--max-steps 4 --total-batch-size 32 --dtype float16 --data"
        train(flags, text, "--log-dir", tmp_path)


# A flag, and what it changes in a run of five steps, two of warm-up and three of warm-down.
BASE = "--schedule wsd --warmup-steps 2 --warmdown-steps 3 --max-steps 5 --optimizer muon"
CHANGES = {
    "--seed 5": "train",
    "--no-shuffle": "train",
    "--total-batch-size 64": "train",
    "--seq-len 8": "train",
    "--n-layer 1": "train",
    "--n-head 1": "train",
    "--n-embd 8": "train",
    "--optimizer adamw": "train",
    "--weight-decay 5": "train",
    "--grad-clip 0.1": "train",
    "--beta2 0.5": "train",
    "--schedule cosine": "lr",
    "--warmup-steps 1": "lr",
    "--warmdown-steps 1": "lr",
    "--max-lr 4e-3": "lr",
    "--min-lr 1e-4": "lr",
    "--dtype bfloat16": "train",
    "--max-steps 3": "train",
    "--eval-tokens 64": "val",
    "--eval-every 2": "val",
    "--micro-batch-size 4": None,  # to rounding
    "--low-memory": None,
    "--skip-bad-steps 3": None,
    "--eval-every 0 --save-every 1": None,
}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """A text, and the log of a run without further flags."""
    folder = tmp_path_factory.mktemp("base")
    text = folder / "text.txt"
    text.write_text((ROOT / "input.txt").read_text(encoding="utf-8")[:9000], encoding="utf-8")
    train(BASE, "--eval-every 4 --data", text, "--log-dir", folder / "log")
    return text, folder / "log"


@pytest.mark.parametrize("flags", CHANGES)
def test_what_acts_on_training_must_not_change_on_resume(flags):
    """But for what docs/resuming.md allows with care, and the precision of another device."""
    before = vars(read_config([*TINY, *words(BASE)]))
    config = read_config([*TINY, *words(BASE, flags)])
    refused = bool(differences(before, config, train_gpt2.MAY_CHANGE))
    allowed = flags.split()[0] in ("--max-steps", "--warmdown-steps", "--dtype")
    assert refused == (CHANGES[flags] in ("train", "lr") and not allowed)


@pytest.mark.parametrize("flags", CHANGES)
def test_each_setting_acts(flags, unchanged, tmp_path):
    text, log = unchanged
    train(BASE, "--eval-every 4 --data", text, "--log-dir", tmp_path, flags)
    stream = CHANGES[flags]
    if stream is None:
        assert losses(tmp_path) == pytest.approx(losses(log), abs=1e-5)
    else:
        assert losses(tmp_path, stream) != losses(log, stream)


def test_the_gpt2_preset_is_the_lectures_recipe():
    """build-nanogpt's script, by its constants; GPT-3's appendix B."""
    config = read_config(["--preset", "gpt2"])
    expected = dict(total_batch_size=2**19, seq_len=1024, max_steps=19073, warmup_steps=715)
    expected |= dict(max_lr=6e-4, min_lr=6e-5, weight_decay=0.1, beta2=0.95, grad_clip=1.0)
    expected |= dict(n_layer=12, n_head=12, n_embd=768, optimizer="adamw", schedule="cosine")
    expected |= dict(eval_every=250, hellaswag_every=250, sample_every=250, seed=1337)
    expected |= dict(eval_tokens=20 * 8 * 64 * 1024, sample_prompt="Hello, I'm a language model,")
    assert {name: getattr(config, name) for name in expected} == expected
    assert GPTConfig() == GPTConfig(1024, 50257, 12, 12, 768)


def test_the_table_of_presets_in_the_docs():
    """Parameters by transformers' count."""
    page = (ROOT / "docs/larger-models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.* \|.*) \|$", page, re.MULTILINE))
    for name in ("gpt2", "gpt3", "small", "gpt2-fast", "shakespeare"):
        config = read_config(["--preset", name])
        model, tokens, steps, recipe = rows[name].replace("`", "").split(" | ")
        assert (tokens, steps) == (f"{config.total_batch_size:,}", f"{config.max_steps:,}")
        shape = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
        with torch.device("meta"):
            gpt2 = GPT2LMHeadModel(GPT2Config(**shape, n_positions=config.seq_len))
        whole = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, "
        whole += f"context {config.seq_len:,}: {gpt2.num_parameters():,} parameters"
        assert model in (whole, "as gpt2", "context 2,048, as GPT-3 Small")
        assert ("Muon" in recipe) == (config.optimizer == "muon")
        assert ("linear warm-down" in recipe) == (config.schedule == "wsd")
        rates = [float(rate) for rate in re.findall(r"[\d.]+e-\d", recipe)] or [6e-4, 6e-5]
        assert [config.max_lr, config.min_lr] == (rates if len(rates) > 1 else [*rates, 0])
        warmup = re.search(r"(\d+) steps of warm-up", recipe)
        assert config.warmup_steps == (int(warmup[1]) if warmup else 715)
        warmdown = {"gpt2-fast": 9536 // 2, "shakespeare": 450}.get(name)
        assert warmdown in (None, config.warmdown_steps)


def test_the_shakespeare_preset_is_that_of_its_reference():
    recorded = run_entries(ROOT / "reference/shakespeare")[-1]["config"]
    config = vars(read_config(["--preset", "shakespeare"]))
    free = {"preset", "log_dir", "data", "micro_batch_size"}
    assert {k: v for k, v in config.items() if k not in free} == {
        k: v for k, v in recorded.items() if k not in free
    }


def test_a_preset_is_chosen_by_the_shards_and_changes_defaults(tmp_path, monkeypatch, capsys, text):
    """The first line says why it trains on Shakespeare."""
    monkeypatch.chdir(tmp_path)
    said = "no shards in edu_fineweb10B/ (`python fineweb.py` builds them): the shakespeare preset"
    shape = words(*TINY)[2:]
    for args, expected in (([], True), (["--preset", "shakespeare"], False), (["--data", text], 0)):
        log = tmp_path / f"log{len(args)}{expected}"
        args = [*shape, *map(str, args), "--max-steps", "0", "--log-dir", str(log)]
        assert train_gpt2.main(args) == 0
        assert (capsys.readouterr().out.splitlines()[0] == said) == expected
    (tmp_path / "edu_fineweb10B/crawl").mkdir(parents=True)
    assert read_config([]).data.endswith("input.txt")
    (tmp_path / "edu_fineweb10B/crawl/edufineweb_train_000001.npy").touch()
    assert read_config([]).data == "edu_fineweb10B"
    config = read_config(words("--preset gpt3 --max-steps 7"))
    assert (config.seq_len, config.max_steps) == (2048, 7)
    with pytest.raises(SystemExit) as stop:
        read_config(words("--preset gpt3 --help"))
    assert stop.value.code == 0 and "2048" in capsys.readouterr().out


def test_only_a_large_run_on_a_gpu_compiles_by_default(monkeypatch):
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        for flags in ("--preset gpt2", "--preset small", "--preset gpt2 --device cuda"):
            assert read_config(words(flags)).compile == gpu, flags
        for flags in ("--preset shakespeare", "--preset gpt2 --device cpu", "--no-compile"):
            assert not read_config(words(flags)).compile, flags

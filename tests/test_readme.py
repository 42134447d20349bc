"""Every command in the README's blocks: run in small, in the README's order, or named below with what it would need."""

import json
import re
import shlex
import shutil
from dataclasses import replace

import pytest

import fineweb
import sample
import train_gpt2
from tests.conftest import ROOT

NOT_RUN = {
    "pip install": "what .ci/run does",
    "jupyter": "tests/test_notebook.py runs it",
    "torchrun": "GPUs; tests/test_resume.py starts it on the CPU",
    "sbatch": "a Slurm cluster",
    "python fineweb.py": "a network; tests/test_fineweb.py has a server of its own",
    "python hellaswag.py": "a network; tests/test_hellaswag.py has local tasks",
    "--init gpt2": "a network",
}
SMALL = dict(n_layer=1, n_head=1, n_embd=8, seq_len=16, micro_batch_size=2, total_batch_size=32, max_steps=2,
             warmup_steps=1, warmdown_steps=1, eval_every=0, eval_tokens=64, hellaswag_every=0, sample_every=0,
             save_every=2, device="cpu", compile=False)


def commands() -> list[str]:
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    lines = [line for block in blocks if block.startswith("\n") for line in block.splitlines()]
    programs = ("python ", "pip ", "jupyter ", "torchrun ", "sbatch ")
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.startswith(programs)]


def reason(command: str) -> str | None:
    if command.startswith("python fineweb.py --input"):
        return None
    return next((why for part, why in NOT_RUN.items() if command.startswith(part) or f" {part} " in command), None)


def test_the_readme_has_commands_of_both_kinds():
    assert sum(reason(command) is None for command in commands()) >= 12
    assert sum(reason(command) is not None for command in commands()) >= 6


def test_every_command_that_needs_no_gpu_and_no_network_runs(text, tmp_path, monkeypatch, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    words = text.read_text(encoding="utf-8")
    for name in ("my.txt", "a.txt", "astronomy.txt", "input.txt"):
        (tmp_path / name).write_text(words, encoding="utf-8")
    (tmp_path / "notes.jsonl").write_text(json.dumps({"text": words}) + "\n")
    (tmp_path / "books").mkdir()
    pq.write_table(pa.table({"text": [words]}), tmp_path / "books" / "one.parquet")
    shutil.copytree(ROOT / "reference", tmp_path / "reference")
    shards = ["--workers", "1"]
    fineweb.main(["--input", "a.txt", "--out", "edu_fineweb10B", *shards])  # as though downloaded
    for command in filter(lambda command: reason(command) is None, commands()):
        _, script, *args = shlex.split(command)
        if script == "train_gpt2.py" and "--plan" not in args:
            config = train_gpt2.read_config(args)
            status = train_gpt2.train(replace(config, **SMALL), train_gpt2.Distributed.start(config))
            assert status == 0 or config.check_against, command  # two steps need not match a reference
            folder = tmp_path / config.log_dir
            if (folder / "step_000002").exists() and not (folder / "step_000600").exists():
                shutil.copytree(folder / "step_000002", folder / "step_000600")
        else:
            args += shards if script == "fineweb.py" else []
            {"train_gpt2.py": train_gpt2, "fineweb.py": fineweb, "sample.py": sample}[script].main(args)
        assert capsys.readouterr().out, command


def test_python_blocks_run(tmp_path, monkeypatch):
    import transformers

    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    train_gpt2.GPT(train_gpt2.GPTConfig(64, 50257, 1, 1, 8)).save_pretrained(tmp_path / "log" / "step_000400")
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()
    for block in blocks:
        exec(block.split("```")[0], {})


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("bench/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target

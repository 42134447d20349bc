"""Every command in the blocks of README.md and docs/: run in small, in that order, or named below with the reason."""

import json
import re
import shlex
import shutil
from dataclasses import asdict, replace

import pytest

import fineweb
import sample
import train_gpt2
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PROGRAMS = ("python ", "pip ", "jupyter ", "torchrun ", "sbatch ")
NOT_RUN = {
    "pip install": "what .ci/run does",
    "jupyter": "tests/test_notebook.py runs it",
    "torchrun": "GPUs; tests/test_resume.py starts it on the CPU",
    "sbatch": "a Slurm cluster",
    "python hellaswag.py": "a network; tests/test_hellaswag.py has local tasks",
    "python sweep.py": "an hour; tests/test_sweep.py runs a small one",
    "--init gpt2": "a network",
}
SMALL = dict(n_layer=1, n_head=1, n_embd=8, seq_len=16, micro_batch_size=2, total_batch_size=32, max_steps=2,
             warmup_steps=1, warmdown_steps=1, eval_every=0, eval_tokens=64, hellaswag_every=0, sample_every=0,
             save_every=2, device="cpu", compile=False)


def blocks(language: str) -> list[str]:
    """The code blocks of all pages that are marked with `language`."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    marked = [block.split("\n", 1) for text in texts for block in re.split("^ *```", text, flags=re.MULTILINE)[1::2]]
    return [code for mark, code in marked if mark == language]


def commands() -> list[str]:
    """The commands of all unmarked blocks, in order, each once, without their remarks."""
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith(PROGRAMS)]
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


def reason(command: str) -> str | None:
    """Why a command is not run; None when it is."""
    if command.startswith("python fineweb.py") and "--input" not in command and "--verify" not in command:
        return "a network; tests/test_fineweb.py has a server of its own"
    return next((why for part, why in NOT_RUN.items() if command.startswith(part) or f" {part} " in command), None)


def test_there_are_commands_of_both_kinds_and_every_reason_is_needed():
    assert sum(reason(command) is None for command in commands()) >= 12
    given = {reason(command) for command in commands()}
    assert given >= set(NOT_RUN.values()), set(NOT_RUN.values()) - given


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
    fineweb.main(["--input", "a.txt", "--out", "edu_fineweb10B", "--workers", "1"])  # as though downloaded
    shutil.copytree("edu_fineweb10B", "tiny")
    done = []
    for command in filter(lambda command: reason(command) is None, commands()):
        _, script, *args = shlex.split(command)
        capsys.readouterr()
        if script == "train_gpt2.py" and "--plan" not in args:
            config = train_gpt2.read_config(args)
            small = replace(config, **SMALL)
            if (same := asdict(replace(small, log_dir=""))) in done:
                continue  # it differs from one before in its size alone
            done.append(same)
            status = train_gpt2.train(small, train_gpt2.Distributed.start(config))
            assert status == 0 or config.check_against, command  # two steps need not match a reference
            folder = tmp_path / config.log_dir
            if (folder / "step_000002").exists() and not (folder / "step_000600").exists():
                shutil.copytree(folder / "step_000002", folder / "step_000600")
        else:
            args += ["--workers", "1"] if script == "fineweb.py" else []
            args += ["--max-new-tokens", "4"] if script == "sample.py" else []
            {"train_gpt2.py": train_gpt2, "fineweb.py": fineweb, "sample.py": sample}[script].main(args)
        assert capsys.readouterr().out, command


def test_python_blocks_run(text, tmp_path, monkeypatch):
    import transformers

    train_gpt2.GPT(train_gpt2.GPTConfig(64, 50257, 1, 1, 8)).save_pretrained(tmp_path / "log" / "step_000600")
    shutil.copy(text, tmp_path / "my.txt")
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()
    assert len(blocks("python")) >= 4
    for block in blocks("python"):
        exec(block, {})


LINKED = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/**/*.md")]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Files exist, and a heading that is linked to is one of that page's; `[name]: target` counts, too."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: (\S+)", text, flags=re.MULTILINE):
        target, _, heading = "".join(target).partition("#")
        if target.startswith("http"):
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        if heading and other.suffix == ".md":  # test_notebook.py knows the anchors of notebooks
            titles = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, (target, heading, anchors)

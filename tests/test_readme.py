"""README.md and docs/: commands and Python blocks run at a small size, links work."""

import contextlib
import importlib
import json
import re
import shlex
import shutil
import subprocess
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import tyro

import evaluate
import sample
import train_gpt2
from reference import check
from support.tokenizer import get_tokenizer
from tests.conftest import ROOT, TINY, save_checkpoint, tiny, words
from train_gpt2 import GPT, GPTConfig

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
NOT_RUN = {  # how a command begins -> why it is not run
    "python3 -m venv ": "installs",
    ". .venv": "installs",
    "pip ": "installs",
    "python -m pytest": "runs this test",
    "sbatch ": "needs a cluster",
    "torchrun ": "needs GPUs; tests/test_resume.py starts it on the CPU",
    "python hellaswag.py": "downloads; tests/test_hellaswag.py has local tasks",
    "python bench": "takes minutes; tests/test_bench.py has a small run",
    "python log/code/": "tests/test_fresh.py runs the program that a run has kept",
    "python train_gpt2.py --init log/model_19072.pt": "needs a file of build-nanogpt; "
    "tests/test_peer_checkpoints.py has one",
    "python compare.py": "takes minutes; tests/test_compare.py has a stand-in for the training",
    "sed -n ": "changes train_gpt2.py; tests/test_fork.py applies the same sections",
    "python train_dropout.py": "is a fork; tests/test_fresh.py trains one of another name",
    "lm_eval ": "not installed",
    "hf ": "needs the Hub",
    "python convert_hf_to_gguf.py": "part of llama.cpp; docs/trained-model.md says where",
    "llama-completion ": "part of llama.cpp",
}


def blocks(language: str) -> list[str]:
    """The code blocks of all pages in this language."""
    found = []
    for page in PAGES:
        parts = re.split("^ *```", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for block in parts[1::2]:
            mark, code = block.split("\n", 1)
            if mark == language:
                found.append(code)
    return found


def code_spans(page: Path) -> list[str]:
    """The `inline code` of a page."""
    prose = "".join(page.read_text(encoding="utf-8").split("```")[::2])
    return [" ".join(span.split()) for span in re.findall("`([^`]+)`", prose)]


def commands() -> list[str]:
    """The distinct commands of all blocks without a language and in prose, without comments."""
    found = {}
    inline = [span for page in PAGES for span in code_spans(page) if span.startswith("python ")]
    for block in [*blocks(""), *inline]:
        for command in re.split(r"\n| && ", block):
            if command and not command.startswith(("mkdir ", "cp ", "cd ")):
                found[shlex.join(shlex.split(command, comments=True))] = None
    return list(found)


def reason_not_to_run(command: str) -> str | None:
    """None if the command is run."""
    if command.startswith("python fineweb.py") and not re.search("--input|--verify", command):
        return "downloads; tests/test_fineweb.py has a local server"
    for beginning, why in NOT_RUN.items():
        if command.startswith(beginning):
            return why
    return None


def test_every_command_that_needs_no_gpu_and_no_network_runs(text, tmp_path, monkeypatch, capsys):
    import pyarrow as pa
    import pyarrow.parquet as pq

    import fineweb

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("support.plots.save_curves", lambda folder: None)  # it takes a second
    content = text.read_text(encoding="utf-8")
    for name in ("my.txt", "other.txt", "a.txt", "input.txt"):
        Path(name).write_text(content, encoding="utf-8")
    shutil.copy(ROOT / "input.txt", "german.txt")  # It has pairs for 8,192 tokens.
    Path("notes.jsonl").write_text(json.dumps({"text": content}) + "\n")
    pair = {"text": "Question: What is the sea? Answer: Wet."}
    Path("pairs.jsonl").write_text((json.dumps(pair) + "\n") * 20)
    Path("books").mkdir()
    pq.write_table(pa.table({"text": [content]}), "books/one.parquet")
    shutil.copytree(ROOT / "reference", "reference")
    shutil.copytree(ROOT / "reference/shakespeare", "log")
    model = GPT(GPTConfig(512, 50257, 1, 1, 8))
    save_checkpoint(model, Path("log/step_000600"))
    model.save_pretrained("gpt2", get_tokenizer())  # a folder comes before the Hub
    for name in ("pairs", "gpt2", "mine", "tiny", "german", "small", "2"):
        shutil.copytree("log", f"log_{name}")
    # instead of the download
    fineweb.main(["--input", "a.txt", "--out", "edu_fineweb10B", "--workers", "1"])
    shutil.copytree("edu_fineweb10B", "tiny")
    shutil.copytree("edu_fineweb10B", "all/CC-MAIN-2013-20")
    todo = [command for command in commands() if reason_not_to_run(command) is None]
    assert len(todo) >= 8
    for i, command in enumerate(todo):
        _, script, *args = shlex.split(command)
        capsys.readouterr()
        if script == "train_gpt2.py":
            small = tiny("--init")[:-1] if "--init" in args else TINY
            steps = "--epochs 0.11" if "--epochs" in args else "--max-steps 2"
            small = [*small, *words(f"--dtype auto {steps} --log-dir run_{i}")]
            if "--plan" in args:
                small = ["--device", "cpu"]
            assert train_gpt2.main([*args, *small]) == 0, command
        elif script == "fineweb.py":
            fineweb.main([*args, "--workers", "1"])
        elif script == "evaluate.py":
            evaluate.main([*args, "--device", "cpu"])
        elif script == "sample.py":
            sample.main([*args, "--max-new-tokens", "4", "--device", "cpu"])
        else:
            assert script == "reference/check.py", f"{command}: neither run nor in NOT_RUN"
            assert check.main(args) in (0, 1)
        assert capsys.readouterr().out, command


def test_python_blocks_run(text, tmp_path, monkeypatch):
    import transformers

    model = GPT(GPTConfig(32, 50257, 2, 1, 8))
    save_checkpoint(model, tmp_path / "log" / "step_000600")
    shutil.copy(text, tmp_path / "my.txt")
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()
    assert blocks("python")
    for block in blocks("python"):
        exec(block, {})


def test_the_map_of_the_lecture_names_flags_and_code_that_exist():
    """The code is in train_gpt2.py, or in the file of support/ that is named after it."""

    def holds(module: ModuleType, name: str) -> bool:
        with contextlib.suppress(AttributeError):
            return bool(attrgetter(name)(module))
        return False

    spans = code_spans(ROOT / "docs/lecture.md")
    assert len(spans) > 20
    for span, following in zip(spans, [*spans[1:], ""], strict=True):
        if span.startswith(("python ", "torchrun ", "pip ", "grep ")):
            continue  # as with the others
        if span.startswith("--"):
            tyro.cli(train_gpt2.TrainConfig, args=shlex.split(span))
        elif span.endswith((".py", ".ipynb")):
            assert (ROOT / span).exists(), span
        else:
            modules = [train_gpt2]
            if following.startswith("support/"):
                name = following.removesuffix(".py").replace("/", ".")
                modules.append(importlib.import_module(name))
            assert any(holds(module, span) for module in modules), span


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize("name", ["slurm.sh", "slurm_fineweb.sh"])
def test_the_slurm_scripts_have_no_syntax_error(name):
    subprocess.run(["bash", "-n", ROOT / "examples" / name], check=True)


LINKED = [*PAGES, *ROOT.glob("reference/*.md"), *ROOT.glob("bench/**/*.md")]


def headings(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    """To files and headings that exist, also those of `[name]: target`."""
    for page in LINKED:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: (\S+)", text, flags=re.MULTILINE):
            target, _, heading = "".join(target).partition("#")
            if target.startswith("http"):
                continue
            other = page.parent / target if target else page
            assert other.exists(), (page, target)
            if heading and other.suffix == ".md":
                assert heading in headings(other), (page, target, heading)

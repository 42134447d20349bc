"""The notebooks: committed without outputs. play.ipynb: clean from top to bottom on a run's log. docs/tour.ipynb: every
station asserts something, and every link leads somewhere (.ci/run executes it, tests/tour_mutants.py breaks it)."""

import ast
import json
import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient

from tests import tour_mutants
from tests.conftest import ROOT

TOUR = ROOT / "docs" / "tour.ipynb"


def run_notebook(folder):
    shutil.copy(ROOT / "train_gpt2.py", folder)
    shutil.copy(ROOT / "hellaswag.py", folder)
    shutil.copytree(ROOT / "support", folder / "support")
    notebook = nbformat.read(ROOT / "play.ipynb", as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return text, pictures


@pytest.mark.parametrize("path", [ROOT / "play.ipynb", TOUR], ids=lambda path: path.name)
def test_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_runs_on_a_log(tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    earlier = "0 train 10.9\n50 val 2.0\n"  # of an earlier run in the same folder: not shown
    lines = [f"{step} {stream} {value}\n" for step in range(50) for stream, value in (
        ("train", 11 - step / 10), ("lr", 6e-4), ("norm", 1.0), ("tok_per_sec", 1e5))]
    lines += ["50 val 3.5\n", "50 hella 0.28\n", "50 tr"]  # the last line is torn
    (log / "log.txt").write_text(earlier + "".join(lines))
    (log / "run.json").write_text(json.dumps([{"config": {"total_batch_size": 1000, "data": "edu_fineweb10B"}}]))
    text, pictures = run_notebook(tmp_path)
    assert "log: 50 train, 50 lr, 50 norm, 50 tok_per_sec, 1 val, 1 hella" in text, text
    assert "lowest validation loss 3.5000" in text and pictures == 3


def test_runs_on_the_shipped_reference_and_on_a_model(tmp_path):
    from train_gpt2 import GPT, GPTConfig

    shutil.copytree(ROOT / "reference" / "shakespeare", tmp_path / "reference" / "shakespeare")
    GPT(GPTConfig(16, 50257, 1, 1, 8)).save_pretrained(tmp_path / "reference" / "shakespeare" / "step_000600")
    text, pictures = run_notebook(tmp_path)
    assert "reference/shakespeare: 4 val, 600 train" in text and "no HellaSwag in these logs" in text
    assert text.count("ROMEO:") == 2 and pictures == 3


def stations() -> dict[int, tuple[str, str]]:
    """The tour's stations: number -> (text, code)."""
    cells = {cell.id: cell.source for cell in nbformat.read(TOUR, as_version=4).cells}
    numbers = [int(name.removeprefix("station-")) for name in cells if name.startswith("station-")]
    return {number: (cells[f"text-{number}"], cells[f"station-{number}"]) for number in numbers}


def test_every_station_asks_and_asserts():
    found = stations()
    assert list(found) == list(range(1, 22))
    for number, (text, code) in found.items():
        anchor, heading, *_ = text.splitlines()
        assert anchor == f'<a id="station-{number}"></a>' and re.fullmatch(rf"## {number}\. .+\?", heading), heading
        asserts = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assert)]
        names = [{n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} for node in asserts]
        assert asserts and all(names), f"station {number} asserts nothing, or a constant"


def test_the_links_of_the_tour_and_of_the_pages_beside_it_lead_somewhere():
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
    cells = nbformat.read(TOUR, as_version=4).cells
    texts[TOUR] = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    anchors = {f"station-{number}" for number in stations()}
    for path, text in texts.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            name, _, anchor = target.partition("#")
            assert name.startswith("http") or (path.parent / name).exists(), f"{path.name}: {target}"
            page = (path.parent / name).resolve() if name else path
            if anchor and page == TOUR:
                assert anchor in anchors, f"{path.name}: {target}"
    for number in stations():
        assert f"(tour.ipynb#station-{number})" in texts[ROOT / "docs" / "reading.md"], number
        assert f"(#station-{number})" in texts[TOUR], number


def test_every_station_has_a_mistake_that_can_be_planted():
    assert {mutant.station for mutant in tour_mutants.MUTANTS} == set(stations())
    for mutant in tour_mutants.MUTANTS:
        assert (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.old) == 1, mutant
        assert mutant.old != mutant.new


def test_a_mistake_counts_as_noticed_only_where_an_assertion_of_the_station_failed():
    lines = tour_mutants.program(1).splitlines()
    line = max(i for i, text in enumerate(lines, start=1) if text.startswith("assert "))
    where = f'  File "/tmp/x/docs/station.py", line {line}, in <module>\n'
    assert tour_mutants.failed_assertion(1, 1, f"{where}AssertionError: why\n") == lines[line - 1]
    assert tour_mutants.failed_assertion(1, 1, f"{where}RuntimeError: shapes\n") is None
    assert tour_mutants.failed_assertion(1, 0, "") is None

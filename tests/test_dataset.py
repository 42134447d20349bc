"""Any dataset: its shards against tiktoken's tokens of what `datasets.load_dataset` reads, whatever the files' format.

DATASET_KILLS=10 python -m pytest -n 0 tests/test_dataset.py -k killed     # as many kills as one likes, three formats
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fineweb
from support import files as support_files
from support import hub as support_hub
from support import sources
from support.cli import InputError
from support.sources import Layout
from tests.conftest import ROOT, posix, script
from tests.hub import Hub
from tests.test_fineweb import InlinePool, contents, expected_tokens, inline, make, read_manifest, shard_tokens

pytestmark = posix

assert inline  # a fixture
SPLITS = {"validation": ["to validate", "naïve 世界 🙂"],
          "train": [f"text {i} <|endoftext|> {'of some length ' * (i % 5)}\tand 'quotes', \"too\"" for i in range(40)]}
KILLS = int(os.environ.get("DATASET_KILLS", 0))


def rows_of(texts):
    """With an id, a column of notes that are null now and then, and a null and an empty text at the end."""
    texts = [*texts, None, ""]
    notes = [None if i % 3 else f"note {i}" for i in range(len(texts))]
    return {"id": list(range(len(texts))), "text": texts, "note": notes}


def parquet(rows):
    pq.write_table(pa.table(rows), file := io.BytesIO(), row_group_size=7)
    return file.getvalue()


def json_lines(rows):
    return "\n".join(json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)).encode()


def json_array(rows):
    return b"[" + json_lines(rows).replace(b"\n", b",") + b"]"


def csv(rows):
    pyarrow.csv.write_csv(pa.table(rows), file := io.BytesIO())
    return file.getvalue()


def lines(rows):
    ends = itertools.cycle(["\n", "\r\n", "\r"])
    return "".join(f"{text or ''}{end}" for text, end in zip(rows["text"], ends, strict=False)).encode()


def zipped(rows):
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for part in range(2):
            archive.writestr(f"{part}.jsonl", json_lines(rows))
    return file.getvalue()


FORMATS = {  # how a file is named: (what it holds, do we leave it to `datasets`?)
    "parquet": (parquet, False),
    "jsonl.gz": (lambda rows: gzip.compress(json_lines(rows)), False),
    "jsonl.zst": (lambda rows: pa.compress(json_lines(rows), codec="zstd", asbytes=True), False),
    "txt": (lines, False),
    "csv": (csv, True),
    "json": (json_array, True),
    "zip": (zipped, True),
}


def files_of(kind, parts=2):
    """{path: content} of a dataset: a file for the validation split, some for train."""
    content, _ = FORMATS[kind]
    train = SPLITS["train"]
    files = {f"train/{i}.{kind}": content(rows_of(train[i::parts])) for i in range(parts)}
    return files | {f"validation/0.{kind}": content(rows_of(SPLITS["validation"]))}


def write_folder(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Spans and pieces of a few rows; `datasets` keeps what it keeps in tmp_path."""
    datasets = support_hub.import_datasets()
    monkeypatch.setattr(sources, "SPAN_BYTES", 100)
    monkeypatch.setattr(support_hub, "SPAN_BYTES", 100)
    monkeypatch.setattr(support_hub, "PIECE_BYTES", 300)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


def library_tokens(dataset, document=lambda row: row["text"]):
    """[tokens of the validation split, tokens of train]"""
    return [expected_tokens(map(document, dataset[split])) for split in ("validation", "train")]


def made_tokens(out):
    """The same, of shards."""
    val = np.load(out / "edufineweb_val_000000.npy")
    return [val.tolist(), shard_tokens(out)[len(val) :].tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_are_those_of_load_dataset(kind, small, inline, tmp_path):
    """The validation split is shard 0, whole, and train the others; nulls and empties are counted."""
    folder = write_folder(tmp_path / "folder", files_of(kind))
    make("--dataset", folder, "--shard-size", 100, "--out", tmp_path / "out")
    dataset = small.load_dataset(str(folder))
    expected = library_tokens(dataset)
    assert made_tokens(tmp_path / "out") == expected and 0 < len(expected[0]) < 100 < len(expected[1])
    manifest = read_manifest(tmp_path / "out")
    assert manifest["stream"] == FORMATS[kind][1] and manifest["complete"] and "state" not in manifest
    texts = [text for split in dataset.values() for text in split["text"]]
    assert manifest["skipped"] == [texts.count(None), texts.count("")] and sum(manifest["skipped"]) >= 3
    assert set(contents(tmp_path / "out")) == {"manifest.json", *(shard["name"] for shard in manifest["shards"])}


@given(st.text(st.sampled_from("ab é世\r\n\t\x0b\x1c\u2028\u0085"), max_size=40), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_lines_of_a_text_file(tmp_path_factory, text, size):
    """A document a line, as a file opened as text has them, wherever the spans begin and end."""
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(text.encode())
    layout = Layout("text", datasets=True)
    with pytest.MonkeyPatch.context() as patch, open(path, encoding="utf-8") as file:
        patch.setattr(sources, "SPAN_BYTES", size)
        spans = sources.cut_file(0, path, layout)
        found = [line for span in spans for line in sources.read_lines(span, layout)]
        assert found == [line.removesuffix("\n") for line in file]


@pytest.mark.parametrize("kind, template, stream", [
    ("parquet", r"Q: {text}\n\tA: {note}", False), ("jsonl.gz", r"Q: {text}\n\tA: {note}", False),
    ("jsonl.gz", "{text}{{{id:03d}}}", True), ("csv", "{note}{text}", True),
])
def test_templates(kind, template, stream, small, inline, tmp_path):
    """Join columns; a null is empty; numbers are formatted as `datasets` reads them."""
    folder = write_folder(tmp_path / "folder", files_of(kind))
    make("--dataset", folder, "--shard-size", 100, "--template", template, "--out", tmp_path / "out")
    pattern = template.replace(r"\n", "\n").replace(r"\t", "\t")

    def document(row):
        if row["text"] is row["note"] is None and "note" in template:
            return None
        return pattern.format(**{key: "" if value is None else value for key, value in row.items()})

    assert made_tokens(tmp_path / "out") == library_tokens(small.load_dataset(str(folder)), document)
    assert read_manifest(tmp_path / "out")["stream"] == stream


def test_templates_of_input_files(inline, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows_of(["a", "b"])))
    make("--input", tmp_path / "a.jsonl", "--template", "{text}; {note}", "--shard-size", 99, "--out", tmp_path / "out")
    assert shard_tokens(tmp_path / "out").tolist() == expected_tokens(["a; note 0", "b; ", "; note 3"])
    for template in ("{text:d}", "{text.size}", "{text[x]}"):
        with pytest.raises(InputError, match="a row does not fit it"):
            Layout(template=template).document({"text": "a"})
    assert Layout(template="{name[en]} {n:.1f}").document({"name": {"en": "a"}, "n": 2}) == "a 2.0"
    with pytest.raises(InputError, match="begun with text_column , now text"):
        make("--input", tmp_path / "a.jsonl", "--shard-size", 99, "--out", tmp_path / "out")


@pytest.mark.parametrize("flags, columns, result", [
    ({}, {"text": "string", "url": "string"}, "text"),
    ({}, {"story": "large_string", "n": "int64"}, "story"),
    ({"column": "b"}, {"a": "string", "b": "string"}, "b"),
    ({"template": "{b[0]}{a}"}, {"a": "string", "b": "List"}, ""),
    ({}, {"a": "string", "b": "string"}, "2 columns of text: --text-column names one, --template joins several"),
    ({}, {"image": "Image", "n": "int64"}, "no column of text; its columns: image (Image), n (int64)"),
    ({}, {}, "no column of text; its columns: none"),
    ({"column": "c"}, {"a": "string", "b": "string"}, "no column 'c'; its columns: a (string), b (string)"),
    ({"column": "n"}, {"a": "string", "n": "int64"}, "no text in column 'n'; its columns: a (string), n (int64)"),
    ({"template": "{a}{c}"}, {"a": "string"}, "no column 'c'"),
], ids=str)
def test_columns_are_found_or_named(flags, columns, result):
    if " " not in result:
        assert support_hub.choose_columns("x", Layout(**flags), columns).column == result
    else:
        with pytest.raises(InputError, match=re.escape(f"x: {result}")):
            support_hub.choose_columns("x", Layout(**flags), columns)


def test_a_dataset_without_a_validation_split(small, inline, tmp_path):
    """Its first documents are shard 0; a split of another name is to be had by name; so is the configuration."""
    card = "---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n- config_name: two\n  data_files:\n" \
           "  - split: odd\n    path: b.jsonl\n  - split: validation\n    path: a.jsonl\n---\n"
    files = {"README.md": card.encode(), "a.jsonl": b'{"text": "a b c d e"}\n{}', "b.jsonl": b'{"text": "f g h"}'}
    folder = write_folder(tmp_path / "folder", files)
    make("--dataset", folder, "--config", "one", "--shard-size", 3, "--out", tmp_path / "one")
    assert shard_tokens(tmp_path / "one").tolist() == expected_tokens(["a b c d e"])
    assert len(np.load(tmp_path / "one/edufineweb_val_000000.npy")) == 3
    assert read_manifest(tmp_path / "one")["skipped"] == [1, 0]  # what a line lacks is null
    make("--dataset", folder, "--config", "two", "--split", "odd", "--shard-size", 3, "--out", tmp_path / "two")
    assert shard_tokens(tmp_path / "two").tolist() == expected_tokens(["f g h"])
    for args, message in {
        (): "Config name is missing. Please pick one among the available configs: ['one', 'two']",
        ("--config", "three"): "--config three: BuilderConfig 'three' not found. Available: ['one', 'two']",
        ("--config", "two"): "no split 'train'; --split names one of: odd, validation",
        ("--config", "two", "--split", "even"): "no split 'even'; --split names one of: odd, validation",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)) as error:
            make("--dataset", folder, *args, "--out", tmp_path / "none")
        assert "\n" not in str(error.value)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="doesn't contain any data files"):
        make("--dataset", tmp_path / "nothing", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Going on


def test_resumed_shards_equal_uninterrupted_ones(small, inline, tmp_path, monkeypatch):
    """Ended within any write, of a shard, a manifest or a piece; with the pieces that lay ready, and without them."""
    folder, copies = write_folder(tmp_path / "folder", files_of("csv")), tmp_path / "steps/.source.0"
    args = ["--dataset", folder, "--shard-size", 100, "--out"]
    make(*args, tmp_path / "whole")
    original = fineweb.atomic_write
    for last in (2, 7, 12, 23):
        writes = itertools.count()

        @contextlib.contextmanager
        def dying_write(path, mode="wb", writes=writes, last=last):
            if next(writes) == last:
                raise MemoryError
            with original(path, mode) as file:
                yield file

        monkeypatch.setattr(fineweb, "atomic_write", dying_write)
        with contextlib.suppress(MemoryError):
            make(*args, tmp_path / "steps", "--max-shards", 2 + last)
        support_hub.open_stream.cache_clear()  # as in another process
        if last % 2 and copies.exists():
            for path in copies.iterdir():
                path.unlink()
        monkeypatch.setattr(fineweb, "atomic_write", original)
    make(*args, tmp_path / "steps")
    assert contents(tmp_path / "steps") == contents(tmp_path / "whole")


def test_a_changed_command_or_dataset_is_refused(small, inline, tmp_path):
    folder = write_folder(tmp_path / "folder", files_of("csv"))
    first = ["--dataset", folder, "--text-column", "text", "--shard-size", 50, "--out", tmp_path / "out"]
    make(*first, "--max-shards", 2)
    before = contents(tmp_path / "out")
    (folder / "test").mkdir()
    (folder / "test/0.csv").write_bytes((folder / "validation/0.csv").read_bytes())
    changes = {
        "begun with text_column text, now note": [*first[:2], "--text-column", "note", *first[4:]],
        r"begun with template None, now \{text\}": [*first[:2], "--template", "{text}", *first[4:]],
        "begun with split train, now test": [*first, "--split", "test"],
        "begun with source folder, now files": ["--input", ROOT / "input.txt", *first[4:]],
    }
    for message, args in changes.items():
        with pytest.raises(InputError, match=message):
            make(*args)
    assert contents(tmp_path / "out") == before
    os.rename(folder, tmp_path / "moved")
    make("--dataset", tmp_path / "moved", *first[2:])
    assert made_tokens(tmp_path / "out") == library_tokens(small.load_dataset(str(tmp_path / "moved")))


@pytest.mark.skipif(not KILLS, reason="long: DATASET_KILLS=10 kills three datasets ten times; a few kills are below")
@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "csv"])
def test_killed_at_any_moment(kind, tmp_path):
    """kill -9 and the same command again, through the Hub: the same bytes; no process is left behind."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    texts = [text[i : i + 2000] for i in range(0, len(text), 2000)] * 8
    parts = {f"train-{i}.{kind}": FORMATS[kind][0](rows_of(texts[i::3])) for i in range(3)}
    hub = Hub({"me/it": parts | {f"validation.{kind}": FORMATS[kind][0](rows_of(texts[:50]))}}, tmp_path / "home")
    env = os.environ | hub.env
    args = ["--dataset", "me/it", "--shard-size", 50_000, "--workers", 2, "--out"]
    began = time.perf_counter()
    assert script("fineweb.py", *args, tmp_path / "whole", env=env).returncode == 0
    seconds = time.perf_counter() - began
    assert made_tokens(tmp_path / "whole") == [expected_tokens(texts[:50]),
                                               expected_tokens([*texts[0::3], *texts[1::3], *texts[2::3]])]
    command = [sys.executable, ROOT / "fineweb.py", *args, tmp_path / "killed"]
    chance, killed = random.Random(os.environ.get("FINEWEB_SEED", 1337)), 0
    while killed < KILLS:
        run = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, env=env, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(chance.uniform(0.3 * seconds, seconds))
        run.kill()
        if run.wait() == -signal.SIGKILL:
            killed += 1
        else:  # it was done: begin again
            assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
            os.rename(tmp_path / "killed", tmp_path / f"done{time.monotonic()}")
            continue
        deadline = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(run.pid, 0)
                time.sleep(0.02)
    done = script("fineweb.py", *args, tmp_path / "killed", env=env)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_rows_without_a_text(small, inline, tmp_path, monkeypatch):
    """The first 10,000 rows, which are looked at, promise texts; later ones hold numbers."""
    monkeypatch.setattr(support_hub, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(support_hub, "SPAN_BYTES", 1 << 20)
    folder = write_folder(tmp_path / "folder", {"a.csv": b"text\n" + b"a\n" * 10_000 + b"17\n"})
    with pytest.raises(InputError, match="--dataset folder: a row has no text but int 17; name another --text-column"):
        make("--dataset", folder, "--out", tmp_path / "out")


def test_ranks_share_a_stream(small, inline, tmp_path, monkeypatch):
    """The validation split is rank 0's; each document of train is in the shards of one rank."""
    folder = write_folder(tmp_path / "folder", files_of("csv"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        make("--dataset", folder, "--shard-size", 100, "--text-column", "text", "--out", tmp_path / "out")
    val, *train = [np.load(tmp_path / "out" / shard["name"]) for shard in read_manifest(tmp_path / "out")["shards"]]
    assert val.tolist() == expected_tokens(SPLITS["validation"])
    both = [np.concatenate(train[first::2]).tolist() for first in (0, 1)]
    files = [small.load_dataset("csv", data_files=str(folder / f"train/{i}.csv"), split="train") for i in (1, 0)]
    assert both == [expected_tokens(file["text"]) for file in files]


# ---------------------------------------------------------------------------------------------------------------------
# The Hub


def test_through_the_hub(tmp_path):
    """In a process of its own, since huggingface_hub reads its settings when it is imported."""
    code = f"import tests.test_dataset, pathlib; tests.test_dataset.be_with_the_hub(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("all is well\n"), done.stdout + done.stderr


def be_with_the_hub(tmp_path: Path) -> None:
    kinds = ("parquet", "jsonl.gz", "csv")
    repositories = {f"me/{kind.replace('.', '-')}": files_of(kind) for kind in kinds}
    files = files_of("parquet")
    others = {"me/gated": files, "me/private": files, "me/script": {"script.py": b""}}
    hub = Hub(repositories | others, tmp_path / "home")
    hub.closed = {"me/gated": "GatedRepo", "me/private": "RepoNotFound"}
    os.environ |= hub.env
    os.chdir(tmp_path)
    datasets = support_hub.import_datasets()
    fineweb.processes = lambda *options, **more: contextlib.nullcontext(InlinePool())
    support_files._fsync = lambda path: None
    support_hub.PIECE_BYTES = sources.SPAN_BYTES = support_hub.SPAN_BYTES = 300

    chance = random.Random(os.environ.get("FINEWEB_SEED", 1337))
    original, copies = fineweb.Folder.write, []

    def write(folder, parts):
        copies.append({path for path in folder.copies.rglob("*") if path.suffix in (".parquet", ".jsonl", ".gz")})
        original(folder, parts)

    fineweb.Folder.write = write

    def refused(*args):
        with pytest.raises(InputError) as error:
            make(*args, "--out", tmp_path / "refused")
        assert "\n" not in str(error.value) and not (tmp_path / "refused").exists()
        return str(error.value)

    for i, name in enumerate(repositories):  # begun at a commit, ended at that one when there is a newer
        out = Path(f"out{i}")  # from here, as most people name it
        args = ["--dataset", name, "--shard-size", 100, "--out", out]
        make(*args, "--max-shards", 2)
        dataset = datasets.load_dataset(name)
        hub.commit = "f" * 40
        if name == "me/csv":  # read from there, where it is no longer to be had
            with pytest.raises(InputError, match=r"me/csv: .*0123456789abcdef"):
                make(*args)
            hub.commit = Hub.commit
        else:
            with pytest.raises(InputError, match=r"\.(parquet|jsonl.gz): the Hub could not be asked \(.*404"):
                make(*args)
            hub.commit = Hub.commit
        for _ in range(2):  # kill -9, at any moment
            if (run := os.fork()) == 0:
                make(*args)
                os._exit(0)
            time.sleep(chance.uniform(0, 0.5))
            os.kill(run, signal.SIGKILL)
            os.waitpid(run, 0)
        make(*args)
        assert made_tokens(out) == library_tokens(dataset), name
        if len(copies) > 2:  # those that were killed had not come to the end already
            assert copies[0] - copies[-1], (copies[0], copies[-1])  # some are no longer needed there
        copies.clear()
        assert read_manifest(out)["commit"] == hub.commit
        hub.requests.clear()
        make(*args)
        with pytest.raises(InputError, match="begun with split train, now validation"):
            make(*args, "--split", "validation")
        with pytest.raises(InputError, match="begun with config default, now other"):
            make(*args, "--config", "other")
        with pytest.raises(InputError, match=r"begun with template None, now \{text\}"):
            make(*args, "--template", "{text}")
        assert not hub.requests
    assert "no folder here, and not on the Hub, or private" in refused("--dataset", "me/none")
    assert "no folder here, and no name that the Hub could have" in refused("--dataset", "./no/such/folder")
    assert "scripts are no longer supported, but found script.py" in refused("--dataset", "me/script")
    assert "no split 'test'; --split names one of: train, val" in refused("--dataset", "me/csv", "--split", "test")
    assert "BuilderConfig 'x' not found" in refused("--dataset", "me/csv", "--config", "x")
    assert "me/gated: its owner gives access on its page" in refused("--dataset", "me/gated")
    assert "private there: then `hf auth login`, or set HF_TOKEN" in refused("--dataset", "me/private")
    os.environ["HF_TOKEN"] = Hub.TOKEN
    for name in ("me/gated", "me/private"):
        make("--dataset", name, "--shard-size", 100, "--out", tmp_path / name)
        assert made_tokens(tmp_path / name) == library_tokens(dataset)
    print("all is well")


def test_from_the_terminal(tmp_path):
    """A folder of a kind that is streamed, with the processes for it."""
    folder = write_folder(tmp_path / "folder", files_of("csv"))
    done = script("fineweb.py", "--dataset", folder, "--shard-size", 300, "--workers", 1, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert made_tokens(tmp_path / "out")[0] == expected_tokens(SPLITS["validation"])


def test_mistakes(tmp_path, inline):
    """Offline, as the tests are; and flags that don't go together."""
    for args, message in {
        ("--dataset", "no/such"): "--dataset no/such: the Hub could not be asked (Cannot reach",
        ("--dataset", "a/b", "--input", "x"): "--input and --dataset: one of them",
        ("--config", "x"): "--config and --split: of a --dataset",
        ("--template", "{a}", "--text-column", "a"): "--text-column and --template: one of them",
        ("--template", "text"): "--template 'text': columns stand in braces, like {text}",
        ("--template", "{text"): "--template '{text': expected '}' before end of string",
        ("--template", "{}"): "columns stand in braces",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            make(*args, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()

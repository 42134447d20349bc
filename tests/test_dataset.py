"""Any dataset: its shards against tiktoken's tokens of what `datasets.load_dataset` reads."""

import gzip  # noqa: I001
import io
import os
import re
import subprocess
import sys
import time
import zipfile

import datasets
import numpy as np
import pytest

import fineweb
from support import texts
from support.cli import InputError
from tests.conftest import ROOT, assert_one_error_line, posix, script
from tests.hub import Hub
from tests.test_fineweb import contents, csv, expected_tokens, json_lines, make, parquet
from tests.test_fineweb import read_manifest, shard_paths, shard_tokens, write, zstd

pytestmark = posix
SPLITS = {"validation": ["to validate", "naïve 世界 🙂", None, ""],
          "train": [*(f"text {i} <|endoftext|> {'some length ' * (i % 5)}'q'" for i in range(40)), None]}

def zipped(documents):
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("a.jsonl", json_lines(documents))
    return file.getvalue()

FORMATS = {
    "parquet": parquet, "csv": csv, "zip": zipped,
    "jsonl.gz": lambda documents: gzip.compress(json_lines(documents)),
    "jsonl.zst": lambda documents: zstd(json_lines(documents)),
    "txt": lambda documents: "\n".join(text or "" for text in documents).encode(),  # a document a line
    "json": lambda documents: b"[" + json_lines(documents).replace(b"\n", b",") + b"]",
}

def files_of(kind):
    """{path: content} of a dataset: a file for the validation split, two for train."""
    files = {f"train/{i}.{kind}": FORMATS[kind](SPLITS["train"][i::2]) for i in range(2)}
    return files | {f"validation/0.{kind}": FORMATS[kind](SPLITS["validation"])}

def write_folder(folder, files):
    for name, content in files.items():
        write(folder / name, content)
    return folder

def made_tokens(out):
    """The same, of shards."""
    val = np.load(out / "edufineweb_val_000000.npy")
    return [val.tolist(), shard_tokens(out)[len(val) :].tolist()]

@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Batches of a few rows; `datasets` keeps what it keeps in tmp_path."""
    monkeypatch.setattr(texts, "BATCH_ROWS", 3)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

@pytest.mark.parametrize("kind, template", [
    *((kind, "{text}") for kind in FORMATS), ("parquet", r"Q: {text}\n\tA: {note}"),
    ("csv", "{{{id:03d}}}{note}")])
def test_tokens_are_those_of_load_dataset(kind, template, tmp_path):
    """The validation split is shard 0, whole; interrupted after some shards. In templates a null is empty."""
    folder = write_folder(tmp_path / "folder", files_of(kind))
    args = ["--dataset", folder, "--shard-size", 100, "--workers", 1, "--out", tmp_path / "out"]
    args += ["--template", template] if template != "{text}" else []
    for shards in (1, 2, 4, 0):
        make(*args, "--max-shards", shards)

    def document(row):
        if all(value is None for key, value in row.items() if f"{{{key}" in template):
            return None
        pattern = template.replace(r"\n", "\n").replace(r"\t", "\t")
        return pattern.format(**{key: "" if value is None else value for key, value in row.items()})

    splits = datasets.load_dataset(str(folder))
    documents = [[*map(document, splits[name])] for name in ("validation", "train")]
    assert made_tokens(tmp_path / "out") == [*map(expected_tokens, documents)]
    documents = [*documents[0], *documents[1]]
    assert read_manifest(tmp_path / "out")["skipped"] == [documents.count(None), documents.count("")]

def test_configurations_splits_and_columns(tmp_path):
    card = "---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n- config_name: two\n  data_files:\n" \
           "  - split: odd\n    path: b.jsonl\n  - split: validation\n    path: a.jsonl\n---\n"
    files = {"a.jsonl": b'{"text": "a b c d e"}\n{}', "b.jsonl": b'{"n": 1, "story": "f"}'}
    folder = write_folder(tmp_path / "folder", files | {"README.md": card.encode()})
    make("--dataset", folder, "--config", "one", "--shard-size", 3, "--out", tmp_path / "one", "--workers", 1)
    assert shard_tokens(tmp_path / "one").tolist() == expected_tokens(["a b c d e"])
    assert read_manifest(tmp_path / "one")["skipped"] == [1, 0]
    two = ["--dataset", folder, "--config", "two", "--split", "odd", "--shard-size", 3, "--out"]
    make(*two, tmp_path / "two")  # the only column of strings
    assert shard_tokens(tmp_path / "two").tolist() == expected_tokens(["f"])
    with pytest.raises(InputError, match="started with split 'odd', now ''"):
        make(*two[:4], *two[6:], tmp_path / "two")
    for args, message in {
        (): "Config name is missing. Please pick one among the available configs: ['one', 'two']",
        ("--config", "three"): "BuilderConfig 'three' not found. Available: ['one', 'two']",
        ("--config", "two"): "no split 'train'; --split names one of: odd, validation",
        ("--config", "one", "--text-column", "x"): "no text in x; --text-column, --template: ",
        ("--config", "two", "--split", "odd", "--text-column", "n"): "no text in n; ",
        ("--config", "one", "--template", "{x}"): "no text in x; ",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            make("--dataset", folder, *args, "--out", tmp_path / "none", "--workers", 1)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="doesn't contain any data files"):
        make("--dataset", tmp_path / "nothing", "--out", tmp_path / "none")
    assert not (tmp_path / "none").exists()

def test_through_the_hub(tmp_path):
    """In a process by itself, since huggingface_hub reads its settings when it is imported."""
    code = ("import os, pathlib, sys, tests.hub; hub = tests.hub.Hub({}, sys.argv[1] + '/home');"
            "os.environ.update(hub.env); import tests.test_dataset as test;"
            "test.be_with_the_hub(hub, pathlib.Path(sys.argv[1]))")
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("all is well\n"), done.stdout + done.stderr

def be_with_the_hub(hub, tmp_path):
    kinds = ("parquet", "jsonl.gz", "csv")
    repositories = {f"me/{kind.replace('.', '-')}": files_of(kind) for kind in kinds}
    card = b"---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n"
    fine = {"README.md": card, "sample/10BT/0.parquet": parquet(SPLITS["train"]), "data/x.parquet": b"no"}
    header = np.pad(np.array([20240520, 1, 1000], "<i4"), (0, 253)).tobytes()
    names = ("val_000000", "train_000001", "train_000002")
    bins = {f"finewebedu_{name}.bin": header + np.full(1000, 50256, "<u2").tobytes() for name in names}
    bins["finewebedu_train_000002.bin"] = header
    files = files_of("parquet")
    hub.files = repositories | {"me/gated": files, "me/private": files}
    hub.files |= {fineweb.FINEWEB: fine, fineweb.PRETOKENIZED: bins}
    hub.closed = {"me/gated": "GatedRepo", "me/private": "RepoNotFound"}
    os.environ |= hub.env
    os.chdir(tmp_path)
    datasets.config.STREAMING_READ_MAX_RETRIES = 2
    time.sleep = lambda seconds: None  # between retries

    def refused(*args):
        with pytest.raises(InputError) as error:
            make(*args, "--workers", 1, "--shard-size", 100)
        assert "\n" not in str(error.value)
        return str(error.value)

    for i, name in enumerate(repositories):  # begun at a commit, ended at it when there is a newer one
        args = ["--dataset", name, "--shard-size", 100, "--out", f"out{i}", "--workers", 1]
        make(*args, "--max-shards", 2)
        hub.failures[:] = ["error"]
        make(*args)
        train = [*SPLITS["train"][0::2], *SPLITS["train"][1::2]]
        expected = [expected_tokens(documents) for documents in (SPLITS["validation"], train)]
        assert made_tokens(tmp_path / f"out{i}") == expected
        assert read_manifest(tmp_path / f"out{i}")["commit"] == hub.commit
        hub.requests.clear()
        make(*args)
        assert not hub.requests
    make("--shard-size", 100, "--workers", 1)
    assert shard_tokens(tmp_path / "edu_fineweb10B").tolist() == expected_tokens(SPLITS["train"])
    assert "BuilderConfig 'sample-1BT' not found" in refused("--name", "sample-1BT", "--out", "none")
    assert "me/none: cannot be read" in refused("--dataset", "me/none", "--out", "none")
    for name in ("gated", "private"):
        line = refused("--dataset", f"me/{name}", "--out", "none")
        assert f"me/{name}: cannot be read" in line and "request access on its Hub page" in line
    assert not os.path.exists("none")
    make("--pretokenized", 1, "--out", "ready")
    assert "000002.bin" in refused("--pretokenized", 3, "--out", "ready")
    assert [path.stem[-6:] for path in shard_paths(tmp_path / "ready")] == ["000000", "000001"]
    make("--verify", "--out", "ready")
    # The network ends within a stream: one line, and the next start continues.
    args = ["--dataset", "me/csv", "--out", "late"]
    make(*args, "--max-shards", 2, "--workers", 1, "--shard-size", 100)
    hub.failures[:] = ["error"] * 1000
    assert "me/csv: cannot be read" in refused(*args)
    hub.failures[:] = []
    make(*args, "--workers", 1, "--shard-size", 100)
    assert contents(tmp_path / "late") == contents(tmp_path / "out2")
    os.environ["HF_TOKEN"] = Hub.TOKEN
    for name in ("me/gated", "me/private"):
        make("--dataset", name, "--shard-size", 100, "--out", tmp_path / name, "--workers", 1)
        assert made_tokens(tmp_path / name)[0] == expected_tokens(SPLITS["validation"])
    print("all is well")

def test_without_a_network(tmp_path):
    hub = Hub({}, tmp_path / "home")
    hub.shutdown()
    hub.server_close()
    done = script("fineweb.py", cwd=tmp_path, env=hub.env)
    assert_one_error_line(done, "--dataset HuggingFaceFW/fineweb-edu", "check names and network")
    assert "edu_fineweb10B" not in os.listdir(tmp_path)
    assert not done.stdout

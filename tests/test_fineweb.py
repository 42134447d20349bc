"""Shards against tiktoken's tokens of the same documents: whatever the files, the workers, the kills and the machines.

FINEWEB_KILLS=25 python -m pytest tests/test_fineweb.py -k killed      # as many kills as one likes
"""

import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fineweb
from support import files as support_files
from support import hub as support_hub
from support import sources
from support.cli import InputError
from support.sources import Layout, Span
from support.tokenizer import EOT, get_tokenizer
from tests.conftest import ROOT, SHARED, TINY, assert_one_error_line, losses, posix, script
from tests.hub import Hub

pytestmark = posix

EVERY_PLANE = "".join(chr(plane * 0x10000 + 0x3A9) for plane in range(17))
CONTROLS = "".join(map(chr, range(0xA0))) + "\u2028\u2029\u3000\ufeff\u200b"
DOCUMENTS = [
    "Hello, world!", "", None, "<|endoftext|> is only text", "CRLF\r\nand\ttabs\0and\x1b controls", EVERY_PLANE,
    CONTROLS, "naïve 世界 🙂", " ", "\n", "a" * 5000, " \n" * 40 + "'s  12  apart \n", "the end",
]
EDU = sorted((SHARED / "edu_sample").glob("*.parquet"))
needs_data = pytest.mark.skipif(not EDU, reason="no ../shared/data/edu_sample")


def expected_tokens(documents):
    encode = get_tokenizer().encode_ordinary
    return [token for text in documents if text for token in [EOT, *encode(text)]]


def shard_paths(folder):
    return sorted([*Path(folder).glob("*.npy"), *Path(folder).glob("*.bin")], key=lambda path: path.stem[-6:])


def shard_tokens(folder):
    return np.concatenate([np.load(path) for path in shard_paths(folder)])


def contents(folder):
    """{name: SHA-256} of everything in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def read_manifest(folder):
    return fineweb.read_manifest(folder / "manifest.json")


def make(*args):
    fineweb.main([str(arg) for arg in args])


class InlinePool:
    """Stands in for a pool of processes where starting one would take longer than the test."""

    def submit(self, function, *items):
        future = Future()
        future.set_result(function(*items))
        return future


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(fineweb, "processes", lambda *options, **more: contextlib.nullcontext(InlinePool()))
    monkeypatch.setattr(support_files, "_fsync", lambda path: None)


def write_jsonl(path, documents, compress=bytes):
    lines = [json.dumps({"text": text, "id": i}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents)]
    path.write_bytes(compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def files(tmp_path):
    """The same documents as parquet (two row groups), jsonl, gzip and zstandard, and some text files."""
    folder = tmp_path / "files"
    (folder / "books").mkdir(parents=True)
    table = pa.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    write_jsonl(folder / "b.jsonl", DOCUMENTS)
    write_jsonl(folder / "c.jsonl.gz", DOCUMENTS, gzip.compress)
    write_jsonl(folder / "d.jsonl.zst", DOCUMENTS, lambda data: pa.compress(data, codec="zstd", asbytes=True))
    (folder / "books/e.txt").write_bytes(EVERY_PLANE.encode())
    (folder / "books/f.txt").write_bytes(b"")
    (folder / "books/g.md").write_bytes(b"line\r\nline\n")
    (folder / "books/README.md").write_bytes(b"about the books, none of them")
    return [folder / name for name in ("a.parquet", "b.jsonl", "[cd].*", "books")]


ALL = [*DOCUMENTS * 4, EVERY_PLANE, "", "line\r\nline\n"]  # the documents of `files`


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def test_shards_hold_tiktokens_tokens_whatever_the_processes(files, tmp_path, monkeypatch):
    """Every kind of file and of text; the same bytes for 1, 2 and 3 workers, forked and spawned; decode undoes it."""
    monkeypatch.setattr(sources, "SPAN_BYTES", 100)
    method = multiprocessing.get_start_method()
    made = []
    try:
        for workers, start in ((1, "fork"), (3, "fork"), (2, "spawn")):
            multiprocessing.set_start_method(start, force=True)
            out = tmp_path / f"{start}{workers}"
            make("--input", *files, "--out", out, "--shard-size", 1000, "--workers", workers)
            made.append(contents(out))
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert made[0] == made[1] == made[2]
    names = [path.name for path in shard_paths(out)]
    assert names == ["edufineweb_val_000000.npy", *(f"edufineweb_train_{i:06d}.npy" for i in range(1, len(names)))]
    assert sorted([*names, "manifest.json"]) == sorted(made[0])
    shards = [np.load(path) for path in shard_paths(out)]
    assert all(shard.dtype == np.uint16 and len(shard) == 1000 for shard in shards[:-1]) and 0 < len(shards[-1]) <= 1000
    tokens = np.concatenate(shards)
    assert tokens.tolist() == expected_tokens(ALL)
    documents = np.split(tokens, np.flatnonzero(tokens == EOT))[1:]
    assert [get_tokenizer().decode(part[1:].tolist()) for part in documents] == [text for text in ALL if text]
    assert read_manifest(out)["skipped"] == [4, 5]  # nulls, empties


texts = st.text(st.sampled_from("ab'sé世🙂1. \n\t\r\x85\u3000\x1c\xa0") | st.characters(codec="utf-8"), max_size=60)


@given(texts, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_text_may_be_cut_between_words(tmp_path_factory, text, size):
    """Tokens of the spans of a .txt are those of the whole."""
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SPAN_BYTES", size)
        tokens = [sources.tokenize(span, Layout())[0].tolist() for span in sources.cut_file(0, path, Layout())]
    assert [token for part in tokens for token in part] == expected_tokens([text])


def test_a_million_spaces(tmp_path):
    """tiktoken overflows its stack on them."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"start" + b" " * 1_200_000 + b"end" + b"\n" * 1_200_000 + b"end")
    tokens, _ = sources.tokenize(Span(0, path, 0, path.stat().st_size), Layout())
    assert get_tokenizer().decode_bytes(tokens[1:].tolist()) == path.read_bytes()


@given(st.lists(st.none() | texts, min_size=1), st.integers(1, 60), st.integers(1, 5), st.sampled_from("\n "))
@settings(max_examples=100, deadline=None)
def test_each_document_is_in_one_span(tmp_path_factory, documents, size, rows, end):
    """Wherever the spans begin and end: within a line, at its end, past several; within row groups."""
    folder = tmp_path_factory.getbasetemp()
    jsonl, parquet = folder / "a.jsonl", folder / "a.parquet"
    lines = [json.dumps({"t": text}, ensure_ascii=False) for text in documents]
    jsonl.write_bytes(("\r\n".join(lines) + end).encode())
    pq.write_table(pa.table({"t": pa.array(documents, pa.string())}), parquet, row_group_size=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SPAN_BYTES", size)
        for path, read in ((jsonl, sources.read_json), (parquet, sources.read_rows)):
            spans = list(sources.cut_file(0, path, Layout("t")))
            assert [text for span in spans for text in read(span, Layout("t"))] == documents


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_kinds_of_parquet_text(kind, tmp_path, inline):
    column = pa.array(DOCUMENTS, pa.string()).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    make("--input", tmp_path, "--out", tmp_path / "out")
    assert shard_tokens(tmp_path / "out").tolist() == expected_tokens(DOCUMENTS)


def test_a_shard_filled_to_the_last_token_and_a_document_longer_than_shards(tmp_path, inline):
    tokens = expected_tokens(["word " * 500])
    path = tmp_path / "a.txt"
    path.write_text("word " * 500)
    for size in (len(tokens), len(tokens) // 2 + 1, 100, 1):
        make("--input", path, "--out", tmp_path / str(size), "--shard-size", size)
        shards = [np.load(path) for path in shard_paths(tmp_path / str(size))]
        assert np.concatenate(shards).tolist() == tokens and [len(s) for s in shards[:-1]] == [size] * (len(shards) - 1)
        assert len(shards) == -(-len(tokens) // size)


@pytest.mark.parametrize("tokens, size", [
    (0, 1), (99, 9), (14_900_000, 1_000_000), (250_000_000, 20_000_000), (999_999_999, 90_000_000), (10**11, 10**8),
])
def test_small_inputs_make_small_shards(tokens, size):
    assert fineweb.automatic_shard_size(tokens) == size


@needs_data
def test_educational_sample_to_a_trained_model(tmp_path):
    """Real parquet files -> shards, of which the first is about a tenth -> 20 steps of a small model."""
    from train_gpt2 import DataLoaderLite  # here, since it imports torch

    out = tmp_path / "shards"
    done = script("fineweb.py", "--input", *EDU[:2], "--out", out)
    assert done.returncode == 0, done.stderr
    assert {len(np.load(path)) for path in shard_paths(out)[:-1]} == {400_000} and 9 < len(shard_paths(out)) < 15
    texts = [text for path in EDU[:2] for text in pq.read_table(path, columns=["text"]).column("text").to_pylist()]
    counts = [count for path in EDU[:2] for count in pq.read_table(path).column("token_count").to_pylist()]
    tokens = shard_tokens(out)
    starts = np.flatnonzero(tokens == EOT)
    assert (np.diff(starts, append=len(tokens)) - 1 == counts).all()
    for i in range(0, len(texts), 97):
        assert tokens[starts[i] : starts[i] + counts[i] + 1].tolist() == expected_tokens([texts[i]])
    loader = DataLoaderLite(out, "train", 4, 64)
    assert len(loader.next_batch()[0]) == 4
    args = ["--max-steps", 20, "--max-lr", 1e-2, "--log-dir", tmp_path / "log"]
    done = script("train_gpt2.py", *TINY, "--data", out, *args)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "log")) == 20 and losses(tmp_path / "log")[-1] < losses(tmp_path / "log")[0]


# ---------------------------------------------------------------------------------------------------------------------
# Going on after an end of any kind


@given(st.lists(st.none() | st.text("ab ", max_size=8), min_size=1, max_size=30), st.integers(1, 20), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_resumed_shards_equal_uninterrupted_ones(tmp_path_factory, inline, documents, shard_size, data):
    """Ends anywhere: before, within or after the writing of a shard or a manifest; and --max-shards raised in steps."""
    folder = tmp_path_factory.mktemp("resume")
    if not any(documents):
        documents.append("some text")
    args = ["--input", write_jsonl(folder / "a.jsonl", documents), "--shard-size", shard_size, "--workers", 1, "--out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SPAN_BYTES", 50)
        make(*args, folder / "whole")
        assert shard_tokens(folder / "whole").tolist() == expected_tokens(documents)
        make(*args, folder / "steps", "--max-shards", 1)
        original = fineweb.atomic_write
        for _ in range(data.draw(st.integers(1, 3))):
            writes, last = itertools.count(), data.draw(st.integers(0, 8))

            @contextlib.contextmanager
            def dying_write(path, mode="wb", writes=writes, last=last):
                if next(writes) == last:
                    path.with_name(f".{path.name}.1.partial").write_bytes(b"half")
                    raise MemoryError
                with original(path, mode) as file:
                    yield file
                if data.draw(st.booleans()) and last == 8:
                    raise MemoryError

            patch.setattr(fineweb, "atomic_write", dying_write)
            patch.setattr(sources, "SPAN_BYTES", data.draw(st.integers(20, 80)))  # as another version might
            with contextlib.suppress(MemoryError):
                make(*args, folder / "steps", "--max-shards", data.draw(st.integers(0, 4)))
            patch.setattr(fineweb, "atomic_write", original)
        make(*args, folder / "steps")
    assert contents(folder / "steps") == contents(folder / "whole")


def test_stopped_late_in_a_span(tmp_path, inline):
    """Documents of some size, all in one span, of which each run goes on where the last one stopped."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:200_000]
    path = write_jsonl(tmp_path / "a.jsonl", [text[:90_000], text[90_000:]])
    args = ["--input", path, "--shard-size", 7000, "--workers", 1, "--out"]
    make(*args, tmp_path / "whole")
    assert shard_tokens(tmp_path / "whole").tolist() == expected_tokens([text[:90_000], text[90_000:]])
    for shards in (2, 5, 7, 0):
        make(*args, tmp_path / "steps", "--max-shards", shards)
    assert contents(tmp_path / "steps") == contents(tmp_path / "whole")


@needs_data
def test_killed_at_any_moment(tmp_path):
    """kill -9, the same command again: the same bytes; finished shards stay; no process is left behind."""
    args = ["--input", EDU[0], "--shard-size", 200_000, "--workers", 2]
    began = time.perf_counter()
    assert script("fineweb.py", *args, "--out", tmp_path / "whole").returncode == 0
    seconds = time.perf_counter() - began
    command = [sys.executable, ROOT / "fineweb.py", *args, "--out", tmp_path / "killed"]
    chance = random.Random(os.environ.get("FINEWEB_SEED", 1337))
    killed = 0
    while killed < int(os.environ.get("FINEWEB_KILLS", 2)):
        # A shard is finished when the manifest says so; one that a kill left without its entry is rightly made again.
        finished = [shard["name"] for shard in read_manifest(tmp_path / "killed").get("shards", [])]
        times = {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in finished}
        run = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(chance.uniform(0.1, seconds))
        run.kill()
        if run.wait() == -signal.SIGKILL:
            killed += 1
        else:  # it was done: begin again
            assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
            for path in (tmp_path / "killed").iterdir():
                path.unlink()
            continue
        deadline = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(run.pid, 0)
                time.sleep(0.02)
        now = {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in finished}
        assert now == times, "a finished shard was made again"
    done = script("fineweb.py", *args, "--out", tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")



def test_a_changed_command_or_input_is_refused(files, tmp_path, inline):
    """With the difference named, and nothing touched. Where the files lie, and --workers, may change."""
    out, line = tmp_path / "out", json.dumps({"text": "some text", "body": "other"}) + "\n"
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "b.jsonl").write_text(line * 2)
    first = ["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--out", out, "--shard-size", 2]
    make(*first, "--max-shards", 2)
    before = contents(out)
    changes = {
        "begun with shard_size 2, now 3": [*first[:-1], 3],
        "begun with text_column text, now body": [*first, "--text-column", "body"],
        r"begun with files \['b.jsonl', 78\], now None": [*first[:2], *first[3:]],
        r"begun with files \['a.jsonl', 39\], now \['b.jsonl', 78\]": ["--input", first[2], first[1], *first[3:]],
    }
    for message, args in changes.items():
        with pytest.raises(InputError, match=message):
            make(*args)
    (tmp_path / "b.jsonl").write_text(line * 3)
    with pytest.raises(InputError, match=r"begun with files \['b.jsonl', 78\], now \['b.jsonl', 117\]"):
        make(*first)
    assert contents(out) == before
    (tmp_path / "b.jsonl").write_text(line * 2)
    (tmp_path / "moved").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        os.replace(tmp_path / name, tmp_path / "moved" / name)
    make("--input", tmp_path / "moved", *first[3:], "--workers", 3)
    assert shard_tokens(out).tolist() == expected_tokens(["some text"] * 3)


def test_a_finished_folder_is_left_alone(files, tmp_path, inline, capsys):
    args = ["--input", *files, "--out", tmp_path / "out", "--shard-size", 1000]
    make(*args)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    make(*args)
    assert "finished already" in capsys.readouterr().out
    make(*args, "--max-shards", 1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": (lambda out: flip(out / "edufineweb_train_000001.npy"), "edufineweb_train_000001.npy changed"),
    "a missing shard": (lambda out: (out / "edufineweb_val_000000.npy").unlink(), "val_000000.npy: missing"),
    "a shorter shard": (lambda out: np.save(out / "edufineweb_val_000000.npy", np.ones(9, "<u2")), "9 tokens, not"),
    "another dtype": (lambda out: np.save(out / "edufineweb_val_000000.npy", np.zeros(1000)), "1-D float64"),
    "cut off": (lambda out: os.truncate(out / "edufineweb_train_000001.npy", 500), "000001.npy: truncated"),
    "one more": (lambda out: np.save(out / "x_train_000001.npy", np.zeros(9, np.uint16)), "not in manifest.json: x_tr"),
    "no manifest": (lambda out: (out / "manifest.json").unlink(), "no manifest.json"),
    "half a manifest": (lambda out: os.truncate(out / "manifest.json", 50), "manifest.json: not JSON"),
}


def test_verify(files, tmp_path, inline, capsys):
    args = ["--input", *files, "--shard-size", 1000, "--out"]
    for name, (damage, message) in DAMAGES.items():
        make(*args, tmp_path / name)
        make("--verify", "--out", tmp_path / name)
        assert capsys.readouterr().out.endswith("all as they were written\n")
        damage(tmp_path / name)
        before = contents(tmp_path / name)
        with pytest.raises(InputError, match=message):
            make("--verify", "--out", tmp_path / name)
        assert contents(tmp_path / name) == before
    with pytest.raises(InputError, match=r"no manifest\.json to check"):
        make("--verify", "--out", tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def write(path, content):
    path.write_bytes(content)
    return path


def parquet_of(path, column, **options):
    pq.write_table(pa.table({"text": column, "id": [1] * len(column)}), path, **options)
    return path


def damaged_parquet(path):
    parquet_of(path, [str(i) * 50 for i in range(2000)], compression="zstd")
    return write(path, path.read_bytes()[:100] + b"\xff" * 300 + path.read_bytes()[400:])


def surrogate(tmp):
    return write(tmp / "a.jsonl", b'{"text": "a"}\n\n{"text": "\\ud83d"}\n')


not_utf8 = pa.Array.from_buffers(pa.string(), 2, [*pa.array(["ab", "cd"]).buffers()[:2], pa.py_buffer(b"ab\xffd")])
MISTAKES = {
    "missing": (lambda tmp: tmp / "none.parquet", "none.parquet: no such file"),
    "empty pattern": (lambda tmp: tmp / "*.jsonl", "*.jsonl: no such file"),
    "suffix": (lambda tmp: write(tmp / "a.docx", b""), "a.docx: read are .parquet, .jsonl"),
    "csv": (lambda tmp: write(tmp / "a.csv", b"a,b"), "a.csv: read are .parquet, .jsonl, .jsonl.gz"),
    "html": (lambda tmp: write(tmp / "a.html", b""), "--dataset FOLDER reads .csv and others, too; turn .html, .pdf"),
    "empty folder": (lambda tmp: tmp, "no such file, or no .parquet"),
    "no parquet": (lambda tmp: write(tmp / "a.parquet", b"PAR1 not really"), "a.parquet: no parquet file"),
    "damaged parquet": (lambda tmp: damaged_parquet(tmp / "a.parquet"), "a.parquet: damaged near row 0"),
    "no column": (lambda tmp: pq.write_table(pa.table({"b": ["x"], "id": [1]}), tmp / "a.parquet") or tmp / "a.parquet",
                  "a.parquet: no text in a column 'text'; --text-column names one of: b (string), id (int64)"),
    "lists": (lambda tmp: parquet_of(tmp / "a.parquet", [["a"], ["b"]]), "no text in a column 'text'"),
    "numbers": (lambda tmp: parquet_of(tmp / "a.parquet", [1, 2]), "no text in a column 'text'"),
    "UTF-8 in parquet": (lambda tmp: parquet_of(tmp / "a.parquet", not_utf8), "a.parquet, row 1 from 0: not UTF-8"),
    "UTF-8 in txt": (lambda tmp: write(tmp / "a.txt", b"abc\xff"), "a.txt: not UTF-8 at byte 3"),
    "UTF-8 in jsonl": (lambda tmp: write(tmp / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}'), "a.jsonl, line 2: not"),
    "surrogate": (surrogate, "a.jsonl, line 3: not UTF-8 (surrogates"),
    "no JSON": (lambda tmp: write(tmp / "a.jsonl", b'{"text": "a"}\n{"text'), "a.jsonl, line 2: no JSON object"),
    "no object": (lambda tmp: write(tmp / "a.jsonl", b"[1]"), "a.jsonl, line 1: no JSON object"),
    "no key": (lambda tmp: write(tmp / "a.jsonl", b'{"body": "a"}'), "no 'text'; --text-column names one of: body"),
    "no text": (lambda tmp: write(tmp / "a.jsonl", b'{"text": 5}'), "no JSON object with a text ('text' is int)"),
    "no gzip": (lambda tmp: write(tmp / "a.jsonl.gz", b"plain text"), "a.jsonl.gz: damaged or truncated"),
    "half a gzip": (lambda tmp: write(tmp / "a.txt.gz", gzip.compress(b"text" * 99)[:-9]), "a.txt.gz: damaged"),
    "no text at all": (lambda tmp: write(tmp / "a.jsonl", b'{"text": ""}\n{"text": null}'), "nothing to tokenize"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_files(name, tmp_path):
    make_file, message = MISTAKES[name]
    args = ["--input", make_file(tmp_path), "--out", tmp_path / "out", "--workers", 1]
    for _ in range(2):  # the folder that the first attempt leaves is no obstacle
        with pytest.raises(InputError) as error:
            make(*args)
        assert message in str(error.value) and "\n" not in str(error.value)
    assert not shard_paths(tmp_path / "out")


def test_mistakes_from_the_terminal(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}')
    assert_one_error_line(script("fineweb.py", "--input", path, "--out", tmp_path / "o"), "a.jsonl, line 2: not UTF-8")
    wrong = ["--workers", -1, "--shard-size", -1, "--pretokenized", 1, "--input", "x"]
    assert_one_error_line(script("fineweb.py", *wrong), "--workers -1", "--shard-size -1", "--pretokenized and --input")
    assert_one_error_line(script("fineweb.py", "--input", path, path, "--out", tmp_path / "o"), "twice")
    assert_one_error_line(script("fineweb.py", "--input", path, "--out", path), "a.jsonl")


def test_a_foreign_shard_is_refused(files, tmp_path):
    (tmp_path / "out").mkdir()
    np.save(tmp_path / "out/edufineweb_val_000000.npy", np.zeros(9, np.uint16))
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"edufineweb_val_000000.npy: not in manifest.json"):
        make("--input", files[0], "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_disk(files, tmp_path, inline, monkeypatch):
    """Too little: refused at once, nothing made. Full midway: one line, and a second run makes the rest."""
    args = ["--input", *files, "--shard-size", 1000, "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(fineweb.shutil, "disk_usage", lambda path: fineweb.shutil._ntuple_diskusage(0, 0, 1000))
        with pytest.raises(InputError, match=r"about 0\.00 GB of disk needed, 0\.00 GB free; make room"):
            make(*args)
    assert not (tmp_path / "out").exists()
    original = fineweb.atomic_write
    with monkeypatch.context() as patch:

        @contextlib.contextmanager
        def full(path, mode="wb"):
            if path.name == "edufineweb_train_000002.npy":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with original(path, mode) as file:
                yield file

        patch.setattr(fineweb, "atomic_write", full)
        with pytest.raises(InputError, match="No space left on device; make room and run the same command again"):
            make(*args)
        assert [path.name[-10:-4] for path in shard_paths(tmp_path / "out")] == ["000000", "000001"]
    make(*args)
    assert shard_tokens(tmp_path / "out").tolist() == expected_tokens(ALL)


def test_a_killed_worker(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", ["text"] * 10)
    monkeypatch.setitem(sources.READERS, "json", lambda span, layout: os.kill(os.getpid(), signal.SIGKILL))
    multiprocessing.set_start_method("fork", force=True)  # so that the worker has this reader, too
    with pytest.raises(InputError, match="a worker was killed"):
        make("--input", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", 1)


# ---------------------------------------------------------------------------------------------------------------------
# The Hub


HUB_TEXTS = [text for i in range(3) for text in (f"text {i} {'of some length ' * 2000}", "the <|endoftext|>")]


@pytest.fixture
def hub(tmp_path):
    stored = {"README.md": b"# not data", "sample/100BT/000_00000.parquet": b"not this"}
    for i in range(3):
        path = parquet_of(tmp_path / "part.parquet", [*HUB_TEXTS[2 * i : 2 * i + 2], None])
        stored[f"sample/10BT/{i:03d}_00000.parquet"] = path.read_bytes()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 1000
    ready = header.tobytes() + np.full(1000, EOT, "<u2").tobytes()
    bins = {f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin": ready for i in range(3)}
    server = Hub({support_hub.REPOSITORY: stored, fineweb.PRETOKENIZED: bins}, tmp_path / "cache")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("failures", [[], ["error", "break off"]], ids=str)
def test_from_the_hub(hub, failures, tmp_path):
    """A file fails, and breaks off: it is asked for again. Copies are cleared away in the end."""
    hub.failures[:] = failures
    done = script("fineweb.py", "--shard-size", "5000", "--workers", "1", cwd=tmp_path, env=hub.env)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "edu_fineweb10B"
    assert shard_tokens(out).tolist() == expected_tokens(HUB_TEXTS)
    assert set(contents(out)) == {"manifest.json", *(path.name for path in shard_paths(out))}
    assert {name for _, name, _ in hub.requests} == {f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)}
    assert len([command for command, *_ in hub.requests if command == "GET"]) == 3 + len(failures)
    hub.requests.clear()
    again = script("fineweb.py", "--shard-size", "5000", cwd=tmp_path, env=hub.env)
    assert again.returncode == 0 and "finished already" in again.stdout and not hub.requests


def test_a_transfer_goes_on_where_it_broke_off(hub, tmp_path):
    """And when the Hub keeps failing, the run ends with one line."""
    name = "sample/10BT/000_00000.parquet"
    content = hub.files[support_hub.REPOSITORY][name]
    code = f"""if True:
        import huggingface_hub.constants, pathlib, sys
        from support import cli, hub
        huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE, hub.RETRY_SECONDS = 100, (0, 0)
        fetch = lambda: hub.fetch({support_hub.REPOSITORY!r}, {hub.commit!r}, {name!r}, pathlib.Path(sys.argv[1]))
        cli.run(lambda: print(fetch()))
    """
    for hub.failures[:], status in ((["error"] * 3, 2), (["error", "break off"], 0)):
        done = hub.python(code, tmp_path / "copies")
        assert done.returncode == status, done.stderr
        if status:
            assert_one_error_line(done, name, "the Hub could not be asked (Server error '500", "tries again")
    assert (tmp_path / "copies" / name).read_bytes() == content
    starts = [start for command, _, start in hub.requests if command == "GET"]
    assert starts[:5] == [0] * 5 and len(starts) == 6 and starts[5] >= len(content) // 2 - 100, starts


def test_mistakes_with_the_hub(hub, tmp_path):
    args = ["--workers", "1", "--out", tmp_path / "o"]
    assert_one_error_line(script("fineweb.py", *args, "--name", "sample-1BT", env=hub.env), "--name sample-1BT", "404")
    assert not (tmp_path / "o").exists()
    args += ["--shard-size", "500"]
    assert script("fineweb.py", *args, "--max-shards", 1, env=hub.env).returncode == 0
    hub.commit = "f" * 40  # a newer one: the run goes on with its own, which this Hub no longer has
    assert_one_error_line(script("fineweb.py", *args, env=hub.env), "sample/10BT/000_00000.parquet", "404")
    hub.commit = Hub.commit
    assert script("fineweb.py", *args, env=hub.env).returncode == 0
    assert shard_tokens(tmp_path / "o").tolist() == expected_tokens(HUB_TEXTS)


def test_without_a_network(hub, tmp_path):
    hub.shutdown()
    hub.server_close()
    done = script("fineweb.py", cwd=tmp_path, env=hub.env)
    assert_one_error_line(done, "--name sample-10BT", "the Hub could not be asked", "--input takes local")
    assert "edu_fineweb10B" not in os.listdir(tmp_path)


def test_pretokenized(hub, tmp_path):
    """Ready shards, checked; a later run fetches more; the loader reads them."""
    from train_gpt2 import DataLoaderLite  # here, since it imports torch

    out = tmp_path / "edu_fineweb10B"
    for number in (1, 3):
        done = script("fineweb.py", "--pretokenized", number, cwd=tmp_path, env=hub.env)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in shard_paths(out)] == list(hub.files[fineweb.PRETOKENIZED])[:number]
    assert len([name for command, name, _ in hub.requests if command == "GET"]) == 3
    assert set(contents(out)) == {"manifest.json", *hub.files[fineweb.PRETOKENIZED]}
    make("--verify", "--out", out)
    assert DataLoaderLite(out, "train", 4, 64).next_batch()[0].shape == (4, 64)
    assert_one_error_line(script("fineweb.py", "--pretokenized", 4, cwd=tmp_path, env=hub.env), "000003.bin", "404")
    name = "finewebedu_train_000001.bin"
    hub.files[fineweb.PRETOKENIZED][name] = b"no shard" * 1000
    done = script("fineweb.py", "--pretokenized", 3, "--out", tmp_path / "o", env=hub.env)
    assert_one_error_line(done, name, "no llm.c shard")
    assert [path.name for path in shard_paths(tmp_path / "o")] == ["finewebedu_val_000000.bin"]


# ---------------------------------------------------------------------------------------------------------------------
# Several machines


@pytest.mark.parametrize("max_shards", [0, 5])
def test_ranks_share_the_files_and_the_numbers(files, tmp_path, max_shards):
    """Two ranks, one killed on the way and begun again: each file is in the shards of its rank, in order."""
    out, paths = tmp_path / "out", [path for path, _ in sources.local_files(map(str, files))]
    args = ["--input", *files, "--out", out, "--shard-size", 400, "--workers", 1, "--max-shards", max_shards]
    env = os.environ | {"WORLD_SIZE": "2"}
    command = [sys.executable, ROOT / "fineweb.py", *args]
    ranks = [subprocess.Popen([*map(str, command)], env=env | {"RANK": str(rank)}) for rank in (0, 1)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    manifest = read_manifest(out)
    assert [shard["name"] for shard in manifest["shards"]] == [path.name for path in shard_paths(out)]
    assert manifest["skipped"] == [4, 5] or max_shards
    make("--verify", "--out", out)
    for rank in (0, 1):
        make("--input", *paths[rank::2], "--out", tmp_path / f"alone{rank}", "--shard-size", 400)
        alone = shard_tokens(tmp_path / f"alone{rank}")
        mine = [np.load(path) for path in shard_paths(out) if int(path.stem[-6:]) % 2 == rank]
        assert (np.concatenate(mine) == alone[: sum(map(len, mine))]).all()
        assert max_shards or sum(map(len, mine)) == len(alone)
    if max_shards:
        assert len(manifest["shards"]) == max_shards and not manifest["complete"]
    with pytest.raises(InputError, match="begun with world_size 2, now 1"):
        make(*args)


def test_a_mistake_in_the_file_of_another_rank(files, tmp_path):
    bad = write(tmp_path / "bad.txt", b"abc\xff")
    args = ["--input", files[0], bad, "--out", tmp_path / "out", "--workers", 1]
    assert_one_error_line(script("fineweb.py", *args, env={"RANK": "1", "WORLD_SIZE": "2"}), "rank 1: ", "not UTF-8")

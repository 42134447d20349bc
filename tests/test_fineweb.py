"""Shards against tiktoken's tokens, whatever the files, workers, interruptions and machines.

    FINEWEB_KILLS=12 python -m pytest tests/test_fineweb.py -k killed
"""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets  # here, so that the reader processes that tests fork need not import it
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fineweb
from support import texts
from support.cli import InputError
from support.tokenizer import EOT, get_tokenizer
from tests.conftest import ROOT, SHARED, assert_one_error_line, posix, script

pytestmark = posix
datasets.config.TORCH_AVAILABLE = False

EVERY_PLANE = "".join(chr(plane * 0x10000 + 0x3A9) for plane in range(17))
DOCUMENTS = [
    "Hello, world!", "", None, "<|endoftext|> is text", "CRLF\r\nand\ttabs\0and\x1b controls", EVERY_PLANE,
    "NA", "naïve 世界 🙂\u2028\ufeff", " ", "\n", "007", "a" * 5000, " \n" * 40 + "'s  12  \"apart\" \n",
    "the end",
]
EDU = sorted((SHARED / "edu_sample").glob("*.parquet"))


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
    return json.loads((folder / "manifest.json").read_text())


def make(*args):
    fineweb.main([str(arg) for arg in args])


def json_lines(documents):
    lines = [json.dumps({"text": text, "id": i}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents)]
    return "\n".join(lines).encode()


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.fixture
def files(tmp_path):
    """The same documents in every row format, and a folder of texts."""
    folder = tmp_path / "files"
    folder.mkdir()
    table = pa.table({"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    write(folder / "b [1].jsonl", json_lines(DOCUMENTS))
    write(folder / "c.jsonl.gz", gzip.compress(json_lines(DOCUMENTS)))
    write(folder / "d.jsonl.zst", zstd(json_lines(DOCUMENTS)))
    pa.csv.write_csv(table, folder / "e.csv")
    write(folder / "e.csv.gz", gzip.compress((folder / "e.csv").read_bytes()))
    write(folder / "books/e.txt", EVERY_PLANE.encode())
    write(folder / "books/f.txt", b"")
    write(folder / "books/g.md.gz", gzip.compress(b"line\nline\n" + b" " * 1_200_000))
    write(folder / "books/README.md", b"about the books, none of them")
    names = ("a.parquet", "b [1].jsonl", "c.jsonl.gz", "d.jsonl.zst", "e.*", "books")
    return [folder / name for name in names]


ALL = [*DOCUMENTS * 6, EVERY_PLANE, "", "line\nline\n" + " " * 1_200_000]  # the documents of `files`


def test_shards_hold_tiktokens_tokens_whatever_the_processes(files, tmp_path, monkeypatch):
    """For 1, 2 and 3 workers and other batches; decoding restores the texts."""
    made = []
    for workers, rows in ((1, 256), (2, 3), (3, 1)):
        monkeypatch.setattr(texts, "BATCH_ROWS", rows)
        make("--input", *files, "--out", tmp_path / str(workers), "--shard-size", 3000, "--workers", workers)
        made.append(contents(tmp_path / str(workers)))
        manifest = read_manifest(tmp_path / str(workers))
        assert made[-1].pop("manifest.json") and made[-1] == made[0]
        assert manifest["skipped"] == [4, 9]  # .csv has no nulls
    names = [path.name for path in shard_paths(tmp_path / "1")]
    train = [f"edufineweb_train_{i:06d}.npy" for i in range(1, len(names))]
    assert names == ["edufineweb_val_000000.npy", *train]
    shards = [np.load(path) for path in shard_paths(tmp_path / "1")]
    assert {(shard.dtype, len(shard)) for shard in shards[:-1]} == {(np.dtype("<u2"), 3000)}
    tokens = np.concatenate(shards)
    documents = np.split(tokens, np.flatnonzero(tokens == EOT))[1:]
    assert [get_tokenizer().decode(part[1:].tolist()) for part in documents] == [text for text in ALL if text]
    expected = expected_tokens(ALL[:-1])
    assert tokens[: len(expected)].tolist() == expected
    assert sum(shard["documents"] for shard in manifest["shards"]) == len(documents)


@pytest.mark.skipif(not EDU, reason="no ../shared/data/edu_sample")
def test_educational_sample(tmp_path):
    """Real parquet files, from the terminal: about ten shards, with the recorded numbers of tokens."""
    done = script("fineweb.py", "--input", *EDU[:2], "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert 9 < len(shard_paths(tmp_path / "out")) < 15
    tables = [pq.read_table(path) for path in EDU[:2]]
    counts = [count for table in tables for count in table["token_count"].to_pylist()]
    tokens = shard_tokens(tmp_path / "out")
    starts = np.flatnonzero(tokens == EOT)
    assert (np.diff(starts, append=len(tokens)) - 1 == counts).all()
    for i, text in list(enumerate(text for table in tables for text in table["text"].to_pylist()))[::97]:
        assert tokens[starts[i] : starts[i] + counts[i] + 1].tolist() == expected_tokens([text])


# ------------------------------------------------------------------------------------------------------------
# Interruptions


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 12), st.booleans(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interruption(tmp_path_factory, monkeypatch, lengths, size, validation, data):
    """Interrupted after any number of batches or during any write, any number of times."""
    monkeypatch.setattr("support.files.fsync", lambda path: None)
    batches = [([int(validation and i > 2), {"batch": i}], np.arange(length, dtype=np.uint16), [0, 1])
               for i, length in enumerate([1, *lengths])]
    folder = tmp_path_factory.mktemp("interrupted")

    def run(name, interrupt=lambda: None):
        here = fineweb.Folder(folder / name)
        here.begin({"shard_size": size})
        if here.finished(0):
            return
        first = (here.manifest["position"][1] or {"batch": 0})["batch"]

        def left():
            for batch in batches[first:]:
                interrupt()
                yield batch

        fineweb.write_shards(here, left(), size, 0, validation)

    def interrupt():
        if data.draw(st.integers(0, 4)) == 0:
            raise MemoryError

    run("whole")
    for _ in range(3):
        with contextlib.suppress(MemoryError):
            run("interrupted", interrupt)
    run("interrupted")
    assert contents(folder / "whole") == contents(folder / "interrupted")
    assert shard_tokens(folder / "whole").tolist() == [t for _, tokens, _ in batches for t in tokens.tolist()]


def test_three_resumptions_and_more(files, tmp_path, monkeypatch):
    """--max-shards raised step by step: the library's state must advance after each."""
    args = ["--input", *files[:5], "--shard-size", 600, "--workers", 1, "--out"]
    monkeypatch.setattr(texts, "BATCH_ROWS", 2)
    make(*args, tmp_path / "whole")
    for shards in (1, 2, 3, 5, 8, 11, 14, 0):
        make(*args, tmp_path / "steps", "--max-shards", shards)
    assert contents(tmp_path / "steps") == contents(tmp_path / "whole")
    assert len(contents(tmp_path / "whole")) > 14


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_killed_at_any_moment(kind, tmp_path):
    """kill -9 and the same command: the same bytes; finished shards stay, processes do not."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    table = pa.table({"text": [text[i : i + 2000] for i in range(0, len(text), 2000)] * 4})
    path = tmp_path / f"a.{kind}"
    pq.write_table(table, path, row_group_size=100) if kind == "parquet" else pa.csv.write_csv(table, path)
    args = ["--input", path, "--shard-size", 200_000, "--workers", 2]
    began = time.perf_counter()
    assert script("fineweb.py", *args, "--out", tmp_path / "whole").returncode == 0
    seconds = time.perf_counter() - began
    command = [*map(str, [sys.executable, ROOT / "fineweb.py", *args, "--out", tmp_path / "killed"])]
    chance, kills = random.Random(os.environ.get("FINEWEB_SEED", 1337)), 0
    while kills < int(os.environ.get("FINEWEB_KILLS", 1)):
        (tmp_path / "killed").mkdir(exist_ok=True)
        times = {path: path.stat().st_mtime_ns for path in shard_paths(tmp_path / "killed")[:-1]}
        began = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(chance.uniform(0.3, 1) * seconds)
        run.kill()
        if run.wait() != -signal.SIGKILL:  # it was done: begin again
            assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
            os.rename(tmp_path / "killed", tmp_path / f"done{time.monotonic()}")
            seconds = time.perf_counter() - began
            continue
        kills += 1
        deadline = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(run.pid, 0)
                time.sleep(0.02)
        assert times == {path: path.stat().st_mtime_ns for path in times}
    done = script("fineweb.py", *args, "--out", tmp_path / "killed")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_changed_command_or_input_is_refused(tmp_path):
    """With the difference named, and nothing touched. Folder of the files and --workers may change."""
    out, line = tmp_path / "out", json.dumps({"text": "some text", "body": "other"}).encode() + b"\n"
    write(tmp_path / "a.jsonl", line)
    write(tmp_path / "b.jsonl", line * 2)
    first = ["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--out", out, "--shard-size", 2]
    make(*first, "--max-shards", 2)
    before = contents(out)
    changes = {
        "started with shard_size 2, now 3": [*first[:-1], 3],
        "started with text_column '', now 'body'": [*first, "--text-column", "body"],
        r"started with files \[.*\], .*\], now \[\['a.jsonl', 39\]\]": [*first[:2], *first[3:]],
    }
    for message, args in changes.items():
        with pytest.raises(InputError, match=message):
            make(*args)
    assert contents(out) == before
    (tmp_path / "moved").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        os.replace(tmp_path / name, tmp_path / "moved" / name)
    make("--input", tmp_path / "moved", *first[3:], "--workers", 3)
    assert shard_tokens(out).tolist() == expected_tokens(["some text"] * 3)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    make("--input", tmp_path / "moved", *first[3:])
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_verify(files, tmp_path, capsys):
    """It names files that changed, are missing or do not belong."""
    out, shard = tmp_path / "out", "edufineweb_train_000001.npy"
    make("--input", files[0], "--shard-size", 500, "--workers", 1, "--out", out)
    make("--verify", "--out", out)
    assert capsys.readouterr().out.endswith("all as they were written\n")
    for name, damage, message in (
        (shard, lambda data: data[:-3] + b"\1" + data[-2:], f"written: {shard}; not in"),
        (shard, lambda data: data[:500], "000001.npy: not a whole shard"),
        ("x_train_000001.npy", lambda data: b"", "manifest.json: x_train_000001.npy"),
        ("manifest.json", lambda data: data[:50], "manifest.json: cannot be read"),
        ("manifest.json", lambda data: b"{}", "no shards in manifest.json"),
    ):
        before = (out / name).read_bytes() if (out / name).exists() else None
        write(out / name, damage(before))
        with pytest.raises(InputError, match=message):
            make("--verify", "--out", out)
        (out / name).write_bytes(before) if before else (out / name).unlink()


# ------------------------------------------------------------------------------------------------------------
# Mistakes


def parquet_of(values, column="text"):
    pq.write_table(pa.table({column: values}), file := io.BytesIO())
    return file.getvalue()


damaged = parquet_of([str(i) * 50 for i in range(2000)])
damaged = damaged[:100] + b"\xff" * 300 + damaged[400:]
offsets = pa.array(["ab", "cd"]).buffers()[:2]
not_utf8 = pa.Array.from_buffers(pa.string(), 2, [*offsets, pa.py_buffer(b"ab\xffd")])
MISTAKES = {  # name: (content, message)
    "none.docx": (b"", "none.docx: no such file, or not .parquet, .jsonl"),
    "a.parquet": (b"PAR1 not really", "a.parquet: cannot be read"),
    "damaged.parquet": (damaged, "damaged.parquet: cannot be read"),
    "column.parquet": (parquet_of(["x"], "body"), "column.parquet: cannot be read (ArrowInvalid: No match"),
    "numbers.parquet": (parquet_of([1, 2]), "numbers.parquet: a row has no text"),
    "utf.parquet": (parquet_of(not_utf8), "utf.parquet: a row has no text (UnicodeDecodeError"),
    "column.csv": (b"a,b\n1,2\n", "column.csv: cannot be read (KeyError: "),
    "quote.csv": (b'text\n"abc\n', "quote.csv: cannot be read (ParserError"),
    "utf.txt": (b"abc\xff", "utf.txt: cannot be read (UnicodeDecodeError"),
    "half.jsonl": (b'{"text": "a"}\n{"text', "half.jsonl: a row has no text (JSONDecodeError"),
    "key.jsonl": (b'{"body": "a"}', "key.jsonl: a row has no text (KeyError: 'text')"),
    "number.jsonl": (b'{"text": 5}', "number.jsonl: a row has no text"),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', "surrogate.jsonl: a row has no text (UnicodeEncodeError"),
    "plain.jsonl.gz": (b"plain text", "plain.jsonl.gz: cannot be read"),
    "half.txt.gz": (gzip.compress(b"text" * 99)[:-9], "half.txt.gz: cannot be read"),
    "half.txt.zst": (zstd(b"text" * 99)[:-9], "half.txt.zst: cannot be read"),
    "empty.jsonl": (b'{"text": ""}\n{"text": null}', "nothing to tokenize"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_files(name, tmp_path):
    content, message = MISTAKES[name]
    with pytest.raises(InputError) as error:
        make("--input", write(tmp_path / name, content), "--out", tmp_path / "out", "--workers", 1)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not shard_paths(tmp_path / "out")


def test_mistakes_from_the_terminal(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}')
    done = script("fineweb.py", "--input", path, "--out", tmp_path / "o")
    assert_one_error_line(done, "a.jsonl: cannot be read")
    wrong = ["--workers", -1, "--shard-size", -1, "--pretokenized", 1, "--input", "x"]
    parts = ("--workers -1", "--shard-size -1", "--pretokenized and --input")
    assert_one_error_line(script("fineweb.py", *wrong), *parts)


def test_full_disks_and_foreign_shards(files, tmp_path, monkeypatch):
    """Too little space is refused at once. If the disk fills up, a second run makes the rest."""
    args = ["--input", files[0], "--shard-size", 400, "--workers", 1, "--out", tmp_path / "out"]
    with monkeypatch.context() as patch:
        patch.setattr(fineweb.shutil, "disk_usage", lambda path: fineweb.shutil._ntuple_diskusage(0, 0, 1000))
        with pytest.raises(InputError, match=r"needs about 0\.00 GB of disk, has 0\.00"):
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
        with pytest.raises(InputError, match=r"000002.npy: cannot be written .*No space left .*; free some"):
            make(*args)
    assert len(shard_paths(tmp_path / "out")) == 2
    np.save(tmp_path / "out/edufineweb_train_000009.npy", np.zeros(9, np.uint16))
    with pytest.raises(InputError, match=r"edufineweb_train_000009.npy: not in manifest.json"):
        make(*args)
    (tmp_path / "out/edufineweb_train_000009.npy").unlink()
    make(*args)
    assert shard_tokens(tmp_path / "out").tolist() == expected_tokens(DOCUMENTS)


@pytest.mark.parametrize("name", ["tokenize", "read_stream"])
def test_a_killed_process(name, files, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, name, die)
    with pytest.raises(InputError, match="was killed"):
        make("--input", files[0], "--out", tmp_path / "out", "--workers", 1)


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------
# Several machines


@pytest.mark.parametrize("number", [1, 6])
def test_ranks_share_files_and_indices(number, files, tmp_path, monkeypatch):
    """Two ranks with fewer or more files than ranks: together they have every document once."""
    paths = texts.find_files(tuple(map(str, files)))[:number]
    args = ["--input", *paths, "--out", tmp_path / "out", "--shard-size", 1000, "--workers", 1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        make(*args)
    manifest = read_manifest(tmp_path / "out")
    names = [shard["name"] for shard in manifest["shards"]]
    assert names == [path.name for path in shard_paths(tmp_path / "out")]
    documents = [DOCUMENTS * 3] * 2 if number > 1 else [DOCUMENTS[0::2], DOCUMENTS[1::2]]
    for rank, part in enumerate(documents):
        mine = [np.load(path) for path in shard_paths(tmp_path / "out") if int(path.stem[-6:]) % 2 == rank]
        assert np.concatenate(mine).tolist() == expected_tokens(part)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    make("--verify", "--out", tmp_path / "out")
    with pytest.raises(InputError, match="started with world_size 2, now 1"):
        make(*args)

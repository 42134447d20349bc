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
from tests.conftest import ROOT, SHARED, posix, script

pytestmark = posix
datasets.config.TORCH_AVAILABLE = False
EVERY_PLANE = "".join(chr(plane * 0x10000 + 0x3A9) for plane in range(17))
DOCUMENTS = [
    "Hello, world!", "", None, "<|endoftext|> is text", "CRLF\r\nand\ttabs\0and\x1b controls", EVERY_PLANE,
    "NA", "naïve 世界 🙂\u2028\ufeff", " ", "\n", "007", "a" * 5000, " \n" * 40 + "'s  12  \"apart\" \n", "z"]
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

def parquet(documents, column="text"):
    notes = [None if i % 3 else f"note {i}" for i in range(len(documents))]
    table = pa.table({"id": range(len(documents)), column: documents, "note": pa.array(notes, pa.string())})
    pq.write_table(table, file := io.BytesIO(), row_group_size=7)
    return file.getvalue()

def csv(documents):
    pyarrow.csv.write_csv(pq.read_table(io.BytesIO(parquet(documents))), file := io.BytesIO())
    return file.getvalue()

def json_lines(documents):
    lines = ({"text": text, "id": i} for i, text in enumerate(documents))
    return "\n".join(json.dumps(row, ensure_ascii=row["id"] % 2 == 0) for row in lines).encode()

def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)

def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path

FILES = {
    "a.parquet": parquet(DOCUMENTS), "b [1].jsonl": json_lines(DOCUMENTS),
    "c.jsonl.gz": gzip.compress(json_lines(DOCUMENTS)), "d.jsonl.zst": zstd(json_lines(DOCUMENTS)),
    "e.csv": csv(DOCUMENTS), "e.csv.gz": gzip.compress(csv(DOCUMENTS)), "books/e.txt": EVERY_PLANE.encode(),
    "books/f.txt": b"", "books/g.md.gz": gzip.compress(b"line\nline\n"), "books/README.md": b"not a book"}
ALL = [*DOCUMENTS * 6, EVERY_PLANE, "", "line\nline\n"]  # the documents of FILES

@pytest.fixture
def files(tmp_path):
    """The same documents in every row format, and a folder of texts."""
    for name, content in FILES.items():
        write(tmp_path / "files" / name, content)
    return [tmp_path / "files" / name for name in (*list(FILES)[:4], "e.*", "books")]

def test_shards_hold_tiktokens_tokens_whatever_the_processes(files, tmp_path, monkeypatch):
    """For 1, 2 and 3 workers and other batches; decoding restores the texts."""
    made = []
    for workers, rows in ((1, 256), (2, 7), (3, 4)):
        monkeypatch.setattr(texts, "BATCH_ROWS", rows)
        make("--input", *files, "--out", tmp_path / str(workers), "--shard-size", 3000, "--workers", workers)
        made.append(contents(tmp_path / str(workers)))
        assert made[-1].pop("manifest.json") and made[-1] == made[0]
        assert read_manifest(tmp_path / str(workers))["skipped"] == [4, 9]  # .csv has no nulls
    names = ["edufineweb_val_000000.npy", *(f"edufineweb_train_{i:06d}.npy" for i in range(1, len(made[0])))]
    assert names == [path.name for path in shard_paths(tmp_path / "1")]
    shards = [np.load(tmp_path / "1" / name) for name in names]
    assert {(shard.dtype, len(shard)) for shard in shards[:-1]} == {(np.dtype("<u2"), 3000)}
    tokens = np.concatenate(shards)
    documents = np.split(tokens, np.flatnonzero(tokens == EOT))[1:]
    assert [get_tokenizer().decode(part[1:].tolist()) for part in documents] == [text for text in ALL if text]
    assert tokens.tolist() == expected_tokens(ALL)

@pytest.mark.skipif(not EDU, reason="no ../shared/data/edu_sample")
def test_educational_sample(tmp_path):
    """A real parquet file, from the terminal: about ten shards, with the recorded numbers of tokens."""
    done = script("fineweb.py", "--input", EDU[0], "--out", tmp_path / "out")
    assert done.returncode == 0 and 9 < len(shard_paths(tmp_path / "out")) < 15, done.stderr
    table, tokens = pq.read_table(EDU[0]), shard_tokens(tmp_path / "out")
    starts = np.flatnonzero(tokens == EOT)
    assert (np.diff(starts, append=len(tokens)) - 1 == table["token_count"]).all()
    for i, text in list(enumerate(table["text"].to_pylist()))[::97]:
        assert tokens[starts[i] :][: table["token_count"][i].as_py() + 1].tolist() == expected_tokens([text])

@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 12), st.booleans(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interruption(tmp_path_factory, monkeypatch, lengths, size, validation, data):
    """Interrupted after any number of batches, any number of times."""
    monkeypatch.setattr("support.files.fsync", lambda path: None)
    batches = [([int(validation and i > 2), {"batch": i}], np.arange(length, dtype=np.uint16), [0, 1])
               for i, length in enumerate([1, *lengths])]
    folder = tmp_path_factory.mktemp("interrupted")

    def run(name, chance):
        here = fineweb.Folder(folder / name)
        here.begin({"shard_size": size})

        def left():
            for batch in batches[(here.manifest["position"][1] or {"batch": 0})["batch"] :]:
                if chance and data.draw(st.integers(0, 4)) == 0:
                    raise MemoryError
                yield batch

        if not here.finished(0):
            fineweb.write_shards(here, left(), size, 0, validation)

    run("whole", False)
    for chance in (True, True, True, False):
        with contextlib.suppress(MemoryError):
            run("interrupted", chance)
    assert contents(folder / "whole") == contents(folder / "interrupted")
    assert shard_tokens(folder / "whole").tolist() == [t for _, tokens, _ in batches for t in tokens.tolist()]

@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_resumed_three_times_and_killed(kind, tmp_path):
    """--max-shards raised step by step, so that the library's state must advance after each, then kill -9 at
    any moment: the same bytes; finished shards stay, processes do not."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    documents = [text[i : i + 300] for i in range(0, len(text), 300)]
    path = write(tmp_path / f"a.{kind}", {"parquet": parquet, "csv": csv}[kind](documents))
    args, killed = ["--input", path, "--shard-size", 30_000, "--workers", 2, "--out"], tmp_path / "killed"
    began = time.perf_counter()
    assert script("fineweb.py", *args, tmp_path / "whole").returncode == 0
    seconds = time.perf_counter() - began
    assert shard_tokens(tmp_path / "whole").tolist() == expected_tokens(documents)
    for shards in (1, 2, 4):
        make(*args, killed, "--max-shards", shards)
    chance, kills = random.Random(os.environ.get("FINEWEB_SEED", 1337)), 0
    while kills < int(os.environ.get("FINEWEB_KILLS", 1)):
        times = {path: path.stat().st_mtime_ns for path in shard_paths(killed)[:-1]}
        command = [*map(str, [sys.executable, ROOT / "fineweb.py", *args, killed])]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(chance.uniform(0.3, 0.9) * seconds)
        run.kill()
        if run.wait() != -signal.SIGKILL:  # it was done: begin again
            assert contents(killed) == contents(tmp_path / "whole")
            killed = tmp_path / f"killed{time.monotonic()}"
            continue
        kills += 1
        deadline = time.monotonic() + 10
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(run.pid, 0)
                time.sleep(0.02)
        assert times == {path: path.stat().st_mtime_ns for path in times}
    make(*args, killed)
    assert contents(killed) == contents(tmp_path / "whole")

def test_a_changed_command_or_input_is_refused(tmp_path):
    """With the difference named, and nothing touched. Folder of the files and --workers may change."""
    out, line = tmp_path / "out", json.dumps({"text": "some text", "body": "other"}).encode() + b"\n"
    a, b = write(tmp_path / "a.jsonl", line), write(tmp_path / "b.jsonl", line * 2)
    options = ["--out", out, "--shard-size", 2]
    make("--input", a, b, *options, "--max-shards", 2)
    before = contents(out)
    for message, args in {
        "started with shard_size 2, now 3": [a, b, *options[:3], 3],
        "started with text_column '', now 'body'": [a, b, *options, "--text-column", "body"],
        r"started with files \[.*\], .*\], now \[\['a.jsonl', 39\]\]": [a, *options],
    }.items():
        with pytest.raises(InputError, match=message):
            make("--input", *args)
    assert contents(out) == before
    for path in (a, b):
        write(tmp_path / "moved" / path.name, path.read_bytes())
    make("--input", tmp_path / "moved", *options, "--workers", 3)
    assert shard_tokens(out).tolist() == expected_tokens(["some text"] * 3)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    make("--input", tmp_path / "moved", *options)
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}

def test_verify(files, tmp_path, capsys):
    """It names files that changed, are missing or do not belong."""
    out, shard = tmp_path / "out", "edufineweb_train_000001.npy"
    make("--input", files[0], "--shard-size", 500, "--workers", 1, "--out", out)
    make("--verify", "--out", out)
    assert "all as they were written\n" in capsys.readouterr().out
    for name, damage, message in (
        (shard, lambda data: data[:-3] + b"\1" + data[-2:], f"not as in manifest.json: {shard}"),
        (shard, lambda data: data[:500], "000001.npy: not a whole shard"),
        ("x_train_000001.npy", lambda data: b"", "not as in manifest.json: x_train_000001.npy"),
        ("manifest.json", lambda data: data[:50], "manifest.json: cannot be read"),
        ("manifest.json", lambda data: b"{}", "edufineweb_val_000000.npy"),
    ):
        before = (out / name).read_bytes() if (out / name).exists() else None
        write(out / name, damage(before))
        with pytest.raises(InputError, match=message):
            make("--verify", "--out", out)
        (out / name).write_bytes(before) if before else (out / name).unlink()

damaged = parquet([str(i) * 50 for i in range(2000)])
damaged = damaged[:100] + b"\xff" * 300 + damaged[400:]
offsets = pa.array(["ab", "cd"]).buffers()[:2]
not_utf8 = pa.Array.from_buffers(pa.string(), 2, [*offsets, pa.py_buffer(b"ab\xffd")])
MISTAKES = {  # name: (content, message)
    "none.docx": (b"", "none.docx: no such file, or not .parquet, .jsonl"),
    "damaged.parquet": (damaged, "damaged.parquet: cannot be read"),
    "column.parquet": (parquet(["x"], "body"), "column.parquet: cannot be read (ArrowInvalid: No match"),
    "utf.parquet": (parquet(not_utf8), "utf.parquet: a row has no text (UnicodeDecodeError"),
    "column.csv": (b"a,b\n1,2\n", "column.csv: cannot be read (KeyError: "),
    "utf.txt": (b"abc\xff", "utf.txt: cannot be read (UnicodeDecodeError"),
    "half.jsonl": (b'{"text": "a"}\n{"text', "half.jsonl: a row has no text (JSONDecodeError"),
    "key.jsonl": (b'{"body": "a"}', "key.jsonl: a row has no text (KeyError: 'text')"),
    "number.jsonl": (b'{"text": 5}', "number.jsonl: a row has no text"),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', "surrogate.jsonl: a row has no text (UnicodeEncodeError"),
    "half.txt.gz": (gzip.compress(b"text" * 99)[:-9], "half.txt.gz: cannot be read"),
    "half.txt.zst": (zstd(b"text" * 99)[:-9], "half.txt.zst: cannot be read"),
    "empty.jsonl": (b'{"text": ""}\n{"text": null}', "nothing to tokenize"),
    "--dataset no/such": (None, "--dataset no/such: cannot be read"),
    "--dataset a/b --pretokenized 1": (None, "--pretokenized and --dataset: choose one"),
    "--config x --workers -1": (None, "--workers -1: must be at least 0; --config and --split need"),
    "--template {a} --text-column a": (None, "--text-column and --template: choose one"),
    "--template text": (None, "--template 'text': invalid (ValueError: no column); put column names"),
    "--template {text": (None, "--template '{text': invalid (ValueError: expected '}' before")}

@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, tmp_path):
    content, message = MISTAKES[name]
    args = name.split() if content is None else ["--input", write(tmp_path / name, content)]
    with pytest.raises(InputError) as error:
        make(*args, "--out", tmp_path / "out", *(["--workers", 1] if content is not None else []))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not shard_paths(tmp_path / "out")

def test_full_disks_and_foreign_shards(files, tmp_path, monkeypatch):
    """Too little space is refused at once. If the disk fills up, a second run makes the rest."""
    out = tmp_path / "out"
    args = ["--input", files[0], "--shard-size", 400, "--workers", 1, "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(fineweb.shutil, "disk_usage", lambda path: fineweb.shutil._ntuple_diskusage(0, 0, 1000))
        with pytest.raises(InputError, match=r"needs about 0\.00 GB of disk, has 0\.00"):
            make(*args)
    assert not out.exists()
    original = fineweb.atomic_write

    def full(path, mode="wb"):
        if path.name == "edufineweb_train_000002.npy":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(fineweb, "atomic_write", full)
        with pytest.raises(InputError, match=r"000002.npy: cannot be written .*No space left .*; free some"):
            make(*args)
    assert len(shard_paths(out)) == 2
    np.save(out / "edufineweb_train_000009.npy", np.zeros(9, np.uint16))
    with pytest.raises(InputError, match=r"edufineweb_train_000009.npy: not in manifest.json"):
        make(*args)
    (out / "edufineweb_train_000009.npy").unlink()
    make(*args)
    assert shard_tokens(out).tolist() == expected_tokens(DOCUMENTS)

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("name", ["tokenize", "read"])
def test_a_killed_process(name, files, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, name, die)
    with pytest.raises(InputError, match="was killed"):
        make("--input", files[0], "--out", tmp_path / "out", "--workers", 1)

@pytest.mark.parametrize("source, number", [
    ("--input", 3), ("--input", 1), ("--dataset", 3), ("--dataset", 2), ("--dataset", 1)])
def test_ranks_share_the_documents(source, number, tmp_path, monkeypatch):
    """Two ranks with fewer or more files than ranks: each document is in the shards of one of them. A
    validation split is rank 0's."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    documents = [f"{i} {j}" for i in range(number) for j in range(9)]
    for i in range(number):
        write(folder / f"train-{i}.csv", csv(documents[i * 9 : i * 9 + 9]))
    if source == "--dataset":
        write(folder / "validation.csv", csv(["to validate"]))
    args = [source, folder, "--shard-size", 9, "--workers", 1, "--out", out]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shards in ((1, 3), (0, 3), (1, 0), (0, 0)):
        monkeypatch.setenv("RANK", str(rank))
        make(*args, "--max-shards", shards)
    names = [shard["name"] for shard in read_manifest(out)["shards"]]
    assert names == [path.name for path in shard_paths(out)]
    made = []
    for rank in (0, 1):
        mine = [np.load(path).tolist() for path in shard_paths(out) if int(path.stem[-6:]) % 2 == rank]
        if source == "--dataset" and rank == 0:
            assert mine.pop(0) == expected_tokens(["to validate"])
        tokens = np.concatenate(mine)
        made += map(tuple, np.split(tokens, np.flatnonzero(tokens == EOT))[1:])
    assert sorted(made) == sorted(tuple(expected_tokens([text])) for text in documents)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    make("--verify", "--out", out)
    with pytest.raises(InputError, match="started with world_size 2, now 1"):
        make(*args)

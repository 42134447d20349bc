"""Shards hold tiktoken's tokens, for any files, workers, interruptions and machines.

FINEWEB_KILLS=12 python -m pytest tests/test_fineweb.py -k killed
"""

import errno
import gzip
import io
import json
import multiprocessing.connection
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import datasets  # here, so that forked readers have it
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from tqdm import tqdm

import fineweb
from support import cli, texts
from support.errors import UserError
from support.files import locked, sha256
from support.tokenizer import EOT, get_tokenizer, open_split, tokenize_text
from tests.conftest import RANK, ROOT, posix, script

pytestmark = [posix, pytest.mark.usefixtures("empty_folder")]
datasets.config.TORCH_AVAILABLE = False
tqdm.set_lock(threading.RLock())  # its own is shared with processes that tests kill
EVERY_PLANE = "".join(chr(plane * 0x10000 + 0x3A9) for plane in range(17))
DOCUMENTS = ["Hello, world!", "", None, "<|endoftext|> is text", "NA", "007", " ", "\n", "z"]
DOCUMENTS += ["CRLF\r\nand\ttabs\0and\x1b controls", EVERY_PLANE, "naïve 世界 🙂\u2028\ufeff"]
DOCUMENTS += ["a" * 5000, " \n" * 40 + '\'s  12  "apart" \n']
SPLITS = {
    "validation": ["to validate", "naïve 世界 🙂", None, ""],
    "train": [*(f"text {i} <|endoftext|> {'some length ' * (i % 5)}'q'" for i in range(40)), None],
}
CHILDREN = {"read": texts.read, "start_child": texts.start_child}  # what they call first


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def expected_tokens(documents):
    tokens = []
    for text in documents:
        if text:
            tokens += [EOT, *get_tokenizer().encode_ordinary(text)]
    return tokens


def shard_paths(folder="out"):
    paths = [path for path in Path(folder).glob("*") if path.suffix in (".npy", ".bin")]
    return sorted(paths, key=lambda path: path.stem[-6:])


def shard_tokens(folder="out", first=0):
    return np.concatenate([np.load(path) for path in shard_paths(folder)[first:]]).tolist()


def contents(folder="out"):
    """{name: SHA-256} of everything in a folder."""
    return {path.name: sha256(path) for path in Path(folder).iterdir()}


def read_manifest(folder="out"):
    return json.loads(Path(folder, "manifest.json").read_text())


def make(*args):
    """Runs fineweb.py with one worker, into the folder `out`, unless `args` say otherwise."""
    fineweb.main(["--workers", "1", "--out", "out", *map(str, args)])


def refused(*args):
    with pytest.raises(UserError) as error:
        make(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def change(patch, changes):
    """Patches {name: value} here and in child processes, forked or not."""
    for name, value in changes.items():
        patch.setattr(name, value)
    for name in CHILDREN:
        patch.setattr(texts, name, partial(changed, name, changes))


def changed(function, changes, *args):
    for name, value in changes.items():
        mock.patch(name, value).start()
    CHILDREN[function](*args)


def parquet(documents, column="text"):
    notes = [None if i % 3 else f"note {i}" for i in range(len(documents))]
    table = pa.table({"id": range(len(documents)), column: documents, "note": notes})
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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_folder(folder, files):
    for name, content in files.items():
        write(f"{folder}/{name}", content)
    return Path(folder)


FORMATS = {
    "parquet": parquet,
    "csv": csv,
    "jsonl": json_lines,
    "jsonl.gz": lambda documents: gzip.compress(json_lines(documents)),
    "jsonl.zst": lambda documents: zstd(json_lines(documents)),
    "txt": lambda documents: "\n".join(text or "" for text in documents).encode(),  # one per line
    "json": lambda documents: b"[" + json_lines(documents).replace(b"\n", b",") + b"]",
}


def dataset(kind):
    """The files of SPLITS: one for the validation split, two for train."""
    files = {f"train/{i}.{kind}": FORMATS[kind](SPLITS["train"][i::2]) for i in range(2)}
    return files | {f"validation/0.{kind}": FORMATS[kind](SPLITS["validation"])}


def test_shards_hold_tiktokens_tokens_for_any_workers_and_batches(monkeypatch, capsys):
    files = {"a [1].jsonl": json_lines(DOCUMENTS), "e.csv.gz": gzip.compress(csv(DOCUMENTS))}
    for name in ("b.parquet", "b.jsonl.gz", "b.jsonl.zst", "e.csv"):
        files[name] = FORMATS[name[2:]](DOCUMENTS)
    files |= {"books/e.txt": EVERY_PLANE.encode(), "books/f.txt": b"", "books/README.md": b"no"}
    write_folder(".", files | {"books/g.md.gz": gzip.compress(b"a\nb\n")})
    made = []
    for workers, rows in ((1, 256), (2, 7), (3, 4)):
        change(monkeypatch, {"support.texts.BATCH_ROWS": rows})
        out = f"out{workers}"
        args = ["--shard-size", 3000, "--workers", workers, "--out", out]
        make("--input", "a [1].jsonl", "b.*", "e.*", "books", *args)
        assert read_manifest(out)["skipped"] == 13  # .csv has no nulls
        made.append(contents(out))
        assert made[-1].pop("manifest.json") and made[-1] == made[0]
        tokens = expected_tokens([*DOCUMENTS * 6, EVERY_PLANE, "", "a\nb\n"])
        numbers = f"{len(tokens):,} tokens, {tokens.count(EOT)} documents\n13 empty texts skipped\n"
        assert capsys.readouterr().out.endswith(f"{out}: {len(made[-1])} shards, {numbers}")
    *whole, _ = map(np.load, shard_paths(out))
    assert {(shard.dtype, shard.shape) for shard in whole} == {(np.dtype("<u2"), (3000,))}
    assert shard_tokens(out) == tokens


@pytest.mark.parametrize(
    "kind, template",
    [(kind, "") for kind in ("parquet", "csv", "jsonl.zst", "txt", "json")]
    + [(kind, r"{{{id:03d}}}\n\t{note}") for kind in ("parquet", "csv")],
)
def test_tokens_are_those_of_load_dataset(kind, template, monkeypatch):
    """Also if interrupted; the validation split is shard 0, whole."""
    change(monkeypatch, {"support.texts.BATCH_ROWS": 3})
    write_folder("folder", dataset(kind))
    args = ["--dataset", "folder", "--template", template, "--shard-size", 30]
    for shards in (1, 2, 4, 0):
        make(*args, "--max-shards", shards)
    pattern = (template or "{text}").replace(r"\n", "\n").replace(r"\t", "\t")

    def document(row):
        return pattern.format(**{key: "" if value is None else value for key, value in row.items()})

    splits = datasets.load_dataset("folder", cache_dir="cache")
    validation, train = ([*map(document, splits[name])] for name in ("validation", "train"))
    assert np.load("out/edufineweb_val_000000.npy").tolist() == expected_tokens(validation)
    assert shard_tokens(first=1) == expected_tokens(train)
    assert read_manifest()["skipped"] == sum(not text for text in validation + train)


def test_empty_texts_are_counted_once():
    """Also if shards end within a batch that has some, and the run is continued from there."""
    path = write("a.jsonl", json_lines([" many words" * 20, "", " and more" * 20, "", ""]))
    args = ["--input", path, "--shard-size", 16]
    for shards in (1, 2, 0):
        make(*args, "--max-shards", shards)
    assert len(shard_paths("out")) > 3 and read_manifest()["skipped"] == 3


def test_resumed_three_times_and_killed():
    """After raising --max-shards and after kill -9 at any moment the bytes are the same.

    Finished shards stay, processes do not."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")
    documents = [text[i : i + 300] for i in range(0, len(text), 300)]
    paths = [write("a.csv", csv(documents[0::2])), write("b.parquet", parquet(documents[1::2]))]
    killed = "killed"
    args = ["--input", *map(str, paths), "--shard-size", "30000", "--workers", "2", "--out"]
    began = time.perf_counter()
    assert script("fineweb.py", *args, "whole").returncode == 0
    seconds = time.perf_counter() - began
    assert shard_tokens("whole") == expected_tokens(documents[0::2] + documents[1::2])
    for shards in (1, 2, 4):
        make(*args, killed, "--max-shards", shards)
    manifest = read_manifest(killed)
    old = {"position": manifest["position"][:2], "skipped": [0, 0]}  # as in earlier versions
    Path(killed, "manifest.json").write_text(json.dumps(manifest | old))
    chance, kills = random.Random(os.environ.get("FINEWEB_SEED", 1337)), 0
    while kills < int(os.environ.get("FINEWEB_KILLS", 1)):
        before = {path: path.stat().st_mtime_ns for path in shard_paths(killed)[:-1]}
        command = [sys.executable, ROOT / "fineweb.py", *args, killed]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(chance.uniform(0.3, 0.9) * seconds)
        run.kill()
        if run.wait() != -signal.SIGKILL:  # it was done: begin again
            assert contents(killed) == contents("whole")
            killed, seconds = f"killed{time.monotonic()}", 0.7 * seconds  # the machine got faster
            continue
        kills += 1
        with pytest.raises(ProcessLookupError):  # none of its processes is left
            for _ in range(500):
                os.killpg(run.pid, 0)
                time.sleep(0.02)
        assert before == {path: path.stat().st_mtime_ns for path in before}
    make(*args, killed)
    assert contents(killed) == contents("whole")


@pytest.mark.parametrize("source", ["--input", "--dataset"])
def test_a_changed_command_or_input_is_refused(source):
    """Unfinished or finished, and nothing is touched. Folder and --workers may change."""
    line = b'{"text": "a b c d e f g h", "body": "ab"}\n'
    folder = write_folder("in", {"a.jsonl": line * 9, "b.jsonl": line * 9})
    options = ["--text-column", "text", "--shard-size", 10, "--max-shards"]
    for shards, workers in ((2, 1), (0, 3)):
        args = [source, folder, *options, shards]
        make(*args, "--workers", workers)
        before = contents(), os.stat("out").st_mtime_ns
        make(*args)
        assert "started with shard_size 10, now 11" in refused(*args, "--shard-size", 11)
        assert "text_column 'text', now 'body'" in refused(*args, "--text-column", "body")
        added = write(folder / "c.jsonl", line)
        assert "started with files 'none', now ['c.jsonl', 42, " in refused(*args)
        added.unlink()
        assert (contents(), os.stat("out").st_mtime_ns) == before
        folder = folder.rename("moved")


def test_files_are_told_apart_by_folder_order_and_both_ends():
    """In manifests of earlier versions by name and size alone."""
    paths = []
    for folder in "pq":
        rows = json_lines([f"in {folder}"] * 9)
        paths.append(write(f"{folder}/x.jsonl", rows + b"\n" + b" " * (1 << 20) + b"\n" + rows))
    args = ["--shard-size", 20, "--input"]
    make(*args, *paths, "--max-shards", 2)
    before = contents()
    line = refused(*args, *reversed(paths))
    assert "started with files ['p/x.jsonl', " in line and "now ['q/x.jsonl', " in line
    whole = paths[1].read_bytes()
    for edited in (whole.replace(b"q", b"r", 1), whole[:-20] + whole[-20:].replace(b"q", b"r")):
        paths[1].write_bytes(edited)
        assert "started with files ['q/x.jsonl', " in refused(*args, *paths)
    paths[1].write_bytes(whole)
    assert contents() == before
    manifest = read_manifest()
    old = {"files": [[Path(name).name, size] for name, size, _ in manifest["files"]]}
    Path("out/manifest.json").write_text(json.dumps(manifest | old))
    make(*args, *paths)
    assert shard_tokens() == expected_tokens(["in p"] * 18 + ["in q"] * 18)
    assert read_manifest()["files"] == manifest["files"]


def test_verify(capsys):
    """It names files that changed or are unexpected."""
    shard = "edufineweb_train_000001.npy"
    make("--input", write("a.parquet", parquet(DOCUMENTS)), "--shard-size", 500)
    make("--verify")
    assert "all checksums match\n" in capsys.readouterr().out
    whole = Path("out", shard).read_bytes()
    for name, content, message in [
        (shard, whole[:-3] + b"\1" + whole[-2:], f"does not match manifest.json: {shard}"),
        ("x_train_000001.npy", b"", "does not match manifest.json: x_train_000001.npy"),
        ("manifest.json", b'{"complete": ', "manifest.json: cannot be read"),
        ("manifest.json", b'{"shards": 5}', "manifest.json: cannot be read (TypeError"),
        ("manifest.json", b"null", "manifest.json: cannot be read (TypeError"),
        ("manifest.json", b'{"position": [0]}', "manifest.json: cannot be read (ValueError"),
        ("manifest.json", b'{"used": -1}', "manifest.json: cannot be read (ValueError: negative"),
        ("manifest.json", b'{"shards": [{"name": "x"}]}', "cannot be read (ValueError: incomplete"),
        ("manifest.json", b'{"shards": ["name"]}', "cannot be read (ValueError: incomplete"),
        ("manifest.json", b"{}", f"does not match manifest.json: {shard}, "),
    ]:
        shutil.rmtree("copy", ignore_errors=True)
        folder = shutil.copytree("out", "copy")
        write(f"{folder}/{name}", content)
        assert message in refused("--verify", "--out", folder)
    Path("out", shard).unlink()
    assert f"does not match manifest.json: {shard}" in refused("--verify")


damaged = b"PAR1" + b"\xff" * 500 + parquet(DOCUMENTS)[504:]
not_utf8 = pa.array([b"ab\xff"]).view(pa.string())
FILES = {  # name: (content, message); the name precedes it
    "a [1].txt.gz": (gzip.compress(b"text"), "cannot be read"),
    "none.docx": (b"", "no such file, or not .parquet, .jsonl"),
    "damaged.parquet": (damaged, "cannot be read"),
    "column.parquet": (parquet(["x"], "body"), "cannot be read (ArrowInvalid: No match"),
    "utf.parquet": (parquet(not_utf8), "cannot be read (UnicodeDecodeError"),
    "column.csv": (b"a,b\n1,2\n", "cannot be read (KeyError: "),
    "ragged.csv": (b"text,n\na,1\nb, c,2\n", "cannot be read (ParserError"),
    "utf.txt": (b"abc\xff", "cannot be read (UnicodeDecodeError"),
    "half.jsonl": (b'{"text": "a"}\n{"text', "row 2 has no text (JSONDecodeError"),
    "key.jsonl": (
        b'{"body": "a"}',
        "row 1 has no text (KeyError: 'text'); correct it, --text-column",
    ),
    "number.jsonl": (b'{"text": 5}', "row 1 has no text"),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', "row 1 has no text (UnicodeEncodeError"),
    "half.txt.gz": (gzip.compress(b"text" * 99)[:-9], "cannot be read"),
    "window.txt.zst": (
        b"\x28\xb5\x2f\xfd\x00\xa8\x09\0\0a",  # of 2 GiB
        "cannot be read (OSError: ZSTD decompress failed: Frame requires too much memory for "
        "decoding); decompress it first",
    ),
    "half.txt.zst": (zstd(b"text" * 99)[:-9], "cannot be read"),
}
COMMANDS = {
    "--dataset no/such": "--dataset no/such: cannot be read",
    "--dataset a/b --pretokenized 1": "--pretokenized and --dataset: choose one",
    "--input a.txt --dataset a/b": "--input and --dataset: choose one",
    "--max-shards -1": "--max-shards -1: must be from 0",
    "--pretokenized -1": "--pretokenized -1: must be from 0",
    "--shard-size -1": "--shard-size -1: must be from 0",
    "--config x --workers -1": "--workers -1: must be from 0 to 4000000000; --config and --split",
    "--split test --input a.txt": "--config and --split need --dataset",
    "--shard-size 4000000001": "--shard-size 4000000001: must be from 0 to 4000000000",
    "--input": "--input: has no value",
    "--template {a} --text-column a": "--text-column and --template: choose one",
    "--template text": "--template 'text': invalid (ValueError: no column); put column names",
    "--template {text.__class__}": "invalid (ValueError: neither a column nor an item of one)",
    "--template {a[b].upper}": "neither a column nor",
    "--template {a:{b.upper}}": "neither a column nor",
    "--template {}": "neither a column nor",
    "--template {text": "--template '{text': invalid (ValueError: expected '}' before",
}


@pytest.mark.parametrize(
    "error, remedy",
    [
        (ValueError("BuilderConfig 'x' not found"), "choose one with --config (for FineWeb-Edu"),
        (ValueError("Couldn't cast string to double"), "read its files with --input, which infers"),
        (ValueError("Value too big!"), "read its files with --input, which infers no types"),
        (KeyError("text"), "correct it, --text-column or --template"),
        (AttributeError("'int' object has no attribute 'encode'"), "correct it, --text-column"),
        (TypeError("'int' object is not subscriptable"), "correct it, --text-column or --template"),
        (StopIteration(), "remove the empty file"),
        (OSError("Frame requires too much memory for decoding"), "decompress it first"),
        (OSError("of another kind"), "correct it"),
    ],
    ids=repr,
)
def test_each_kind_of_error_has_one_remedy(error, remedy):
    with pytest.raises(UserError) as raised, texts.explained("a.csv", "cannot be read"):
        raise error
    detail = " ".join(str(error).split())
    start = f"a.csv: cannot be read ({type(error).__name__}: {detail}); {remedy}"
    assert str(raised.value).startswith(start)


@pytest.mark.parametrize("name", FILES)
def test_unusable_files(name):
    content, message = FILES[name]
    path = write(name, content)
    assert f"{name}: {message}" in refused("--input", path)
    assert not shard_paths()


def test_mistakes(monkeypatch):
    for command, message in COMMANDS.items():
        assert message in refused(*command.split())
    path = write("empty.jsonl", b'{"text": ""}\n{"text": null}')
    assert "nothing to tokenize" in refused("--input", path)
    os.mkdir("in")
    # Its shards would count as the dataset's files; so would those named like one of the Hub.
    for name, out in (("in", "in"), ("in", "in/a/b"), ("me/hub", "me/hub")):
        assert refused("--dataset", name, "--out", out) == f"--out {out}: inside --dataset {name}"
    assert not os.listdir("in")
    for name in ("d[1]", "d*", "d?", "d::e"):
        write(f"{name}/a.jsonl", b'{"text": "a"}')
        assert f"{name}: `datasets` can't read" in refused("--dataset", name)
    assert "--input d::e/a.jsonl: `datasets` splits" in refused("--input", "d::e")
    for name, value in (RANK | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert "without torchrun" in refused("--input", path)
    assert not shard_paths()


def test_one_process_at_a_time_writes_into_a_folder():
    """The others read nothing and remove nothing; a folder that stays empty is removed."""
    path = write("a.txt", b"some text")
    write("out/.x.npy.1.partial", b"of the other")
    write("out/manifest.json", b"half")
    with locked(Path("out"), ""):
        before = contents()
        for args in (["--input", path], ["--pretokenized", 1], ["--verify"]):
            assert refused(*args) == (
                "out: another fineweb.py uses it; wait for it or choose another --out"
            )
        assert contents() == before
    with locked(Path("new"), ""):
        seen = mock.patch.object(Path, "exists", return_value=False)  # both make it
        with seen, pytest.raises(UserError), locked(Path("new"), ""):
            pass
        assert os.path.exists("new")
    assert not os.path.exists("new")
    os.remove("out/manifest.json")
    make("--input", path)  # a killed run's partial files are removed
    assert not list(Path("out").glob(".*"))
    make("--verify")


def test_full_disks(monkeypatch):
    """If the disk fills up, a second run makes the rest."""
    args = ["--input", write("a.parquet", parquet(DOCUMENTS)), "--shard-size", 400]

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make(*args, "--max-shards", 2)
    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array_header_1_0", full)
        with pytest.raises(OSError, match="No space left on device"):
            make(*args)
    assert contents() == before
    make(*args)
    assert shard_tokens() == expected_tokens(DOCUMENTS)


def test_missing_and_damaged_shards_are_made_again():
    """A missing one with all that follow; for a damaged one the message says how."""
    args = ["--dataset", write_folder("in", dataset("jsonl")), "--shard-size", 100]
    make(*args)
    before, paths = contents(), shard_paths()
    write(paths[2], paths[2].read_bytes()[:-20])
    message = refused(*args)
    assert "000002.npy: not a whole shard" in message and "remove it and all later" in message
    paths[2].unlink()
    assert "000004.npy: not in manifest.json; remove it" in refused(*args)
    for path in paths[3:]:
        path.unlink()
    make(*args, "--max-shards", 3)
    manifest = Path("out/manifest.json").read_bytes()
    make(*args, "--max-shards", 4)
    write("out/manifest.json", manifest)  # killed before it listed the fourth
    make(*args)
    assert contents() == before


def die(connection, *args):
    if isinstance(connection, multiprocessing.connection.Connection):  # within a message
        os.write(connection.fileno(), (99).to_bytes(4) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def bug(*args, **options):
    raise AttributeError("a bug")


@pytest.mark.parametrize("source", ["--input", "--dataset"])
def test_killed_processes_and_bugs(source, monkeypatch):
    """A bug in a worker or the reader keeps its traceback."""
    folder = write("in/a.jsonl", b'{"text": "a"}').parent
    for name in ("tokenize", "read", "encode", "facts_about"):
        with monkeypatch.context() as patch:
            if name in ("tokenize", "read"):
                patch.setattr(texts, name, die)
                assert "a process was killed" in refused(source, folder)
                continue
            change(patch, {f"support.texts.{name}": bug})
            with pytest.raises(AttributeError, match="a bug") as error:
                make(source, folder)
            notes = getattr(error.value, "__notes__", [str(error.value.__cause__)])
            assert "in bug" in notes[0] and "Traceback" in notes[0]


@pytest.mark.parametrize("source", ["--input", "--dataset"])
def test_csv_columns_neither_shift_nor_depend_on_each_other(source):
    """Rows with a value too many; another column that becomes text after thousands of rows."""
    for name, more in (("wide", ",more"), ("changing", "")):
        lines = [f"t{i},{'x' if i > 10_500 else i}{more}" for i in range(10_600)]
        write(f"{name}/a.csv", "\n".join(["text,n", *lines]).encode())
        make(source, name, "--text-column", "text", "--out", f"{name}_out")
        assert shard_tokens(f"{name}_out") == expected_tokens([f"t{i}" for i in range(10_600)])


@pytest.mark.parametrize("source", ["--input", "--dataset"])
def test_nulls_in_templates_are_empty(source):
    lines = b"""{"t": {"en": null, "de": {"x": "y"}}, "s": 1.25, "u": "a"}
    {"t": null, "s": null, "u": "b"}
    {"t": {"en": "c", "de": null}, "s": null, "u": null}
    {"t": null, "s": null, "u": null}"""
    write("in/a.jsonl", lines)
    make(source, "in", "--template", "{t[en]}|{t[de][x]}|{s:.1f}|{u!s}")
    assert shard_tokens() == expected_tokens(["|y|1.2|a", "|||b", "c|||"])
    assert read_manifest()["skipped"] == 1


def test_types_that_load_dataset_infers():
    """Null in all of the first rows; --text-column in a .csv; a rare type of string; dates."""
    view = pa.table({"text": pa.array(["v"]).cast(pa.string_view()), "n": [1]})
    pq.write_table(view, file := io.BytesIO())
    jsonl = {"a.jsonl": b'{"text": null, "note": "n"}', "b.jsonl": b'{"text": "b", "note": "n"}'}
    for name, files, flags, documents in [
        ("nulls", jsonl, [], ["b"]),
        ("nulls", jsonl, ["--text-column", "note"], ["n", "n"]),
        ("csv", {"a.csv": b"text,n\n007,1\n,2\n"}, ["--text-column", "text"], ["007"]),
        ("view", {"a.parquet": file.getvalue()}, [], ["v"]),
        ("only", {"a.jsonl": b'{"story": "s", "note": null}'}, [], ["s"]),
        ("keys", {"a.jsonl": b'{"text": "a", "n": 1}', "b.jsonl": b'{"n": 2}'}, [], ["a"]),
    ]:
        out = f"{name}{len(flags)}"
        make("--dataset", write_folder(name, files), *flags, "--out", out)
        assert shard_tokens(out) == expected_tokens(documents)
    write("dates/a.jsonl", b'{"text": "2024-01-01"}')
    for flags in ([], ["--text-column", "text"]):
        line = refused("--dataset", "dates", *flags)
        assert line.endswith(
            "no text in text; its columns: text (timestamp[s]); --text-column takes a string, "
            "--template any; --input infers no types"
        )
    write("keys/c.jsonl", b'{"text": "c", "m": 3}')
    line = refused("--dataset", "keys", "--out", "none")
    assert "CastError" in line and line.endswith(
        "; read its files with --input, which infers no types"
    )
    make("--input", "dates")
    assert shard_tokens() == expected_tokens(["2024-01-01"])


def test_numbers_of_any_length():
    """Python's int() takes 4,300 digits."""
    path = write("a.jsonl", b'{"text": "a", "n": 7}\n{"text": "b", "n": %s}' % (b"9" * 5000))
    make("--input", path)
    assert shard_tokens() == expected_tokens("ab")
    make("--input", path, "--template", "{n:>3}", "--out", "two")
    assert shard_tokens("two") == expected_tokens(["  7", "9" * 5000])


def test_training_has_text():
    """If all fits into the validation shard, exactly or not, it is cut."""
    rows = [{"text": f"text {i}", "e": [0.0] * 900} for i in range(50)]
    path = write("a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    args = ["--input", path, "--shard-size", 10**6]
    tokens = expected_tokens(row["text"] for row in rows)
    make(*args, "--out", "whole")
    assert shard_tokens("whole") == tokens
    assert len(np.load(shard_paths("whole")[0])) == len(tokens) // 10
    make(*args, "--max-shards", 1)
    make(*args)
    assert contents() == contents("whole")
    make("--input", path, "--out", "exact", "--shard-size", len(tokens))
    assert len(shard_paths("exact")) == 2
    path = write("nine.txt", b"a b c d e f g h")
    make("--input", path, "--shard-size", 100, "--out", "nine")
    assert [len(np.load(path)) for path in shard_paths("nine")] == [1, 8]


def languages():
    """{language: its documents, of about 700 bytes}, some 250 kB each."""
    chance = random.Random(0)
    characters = "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下，。"
    chinese = "".join(chance.choices(characters, k=90_000))
    code = "".join(path.read_text("utf-8") for path in sorted(ROOT.glob("*.py")))
    english = (ROOT / "input.txt").read_text("utf-8")[:250_000]
    pages = {"zh": (chinese, 230), "py": (code, 700), "en": (english, 700)}
    return {
        name: [text[i : i + length] for i in range(0, len(text), length)]
        for name, (text, length) in pages.items()
    }


@pytest.mark.parametrize("language", ["zh", "py", "en"])
def test_a_shard_is_about_a_tenth_of_the_text(language, monkeypatch):
    monkeypatch.setattr(fineweb, "SAMPLE", 10**4)
    change(monkeypatch, {"support.texts.BATCH_ROWS": 16})
    documents = languages()[language]
    tokens = len(expected_tokens(documents))
    escaped = "\n".join(json.dumps({"text": text, "url": "https://"}) for text in documents)
    write_folder("txt", {f"{i:03}.txt": text.encode() for i, text in enumerate(documents)})
    files = {"a.jsonl": json_lines(documents), "escaped.jsonl": escaped.encode()}
    files["a.jsonl.gz"] = gzip.compress(json_lines(documents))
    write_folder("in", files)
    pq.write_table(pa.table({"text": documents}), "in/a.parquet")
    for path in ("txt", *Path("in").iterdir()):
        out = f"out_{Path(path).name}"
        make("--input", path, "--out", out, "--max-shards", 1)
        compressed = out.endswith((".parquet", ".gz"))
        low, high = (0.05, 0.25) if compressed else (0.08, 0.13)
        assert low < len(np.load(shard_paths(out)[0])) / tokens < high, path


def test_shard_size_neither_depends_on_workers_nor_changes(monkeypatch):
    """The text that a resumed run reads first may have fewer tokens per byte."""
    monkeypatch.setattr(fineweb, "SAMPLE", 10**4)
    change(monkeypatch, {"support.texts.BATCH_ROWS": 16})
    documents = languages()
    args = ["--input", write("a.jsonl", json_lines(documents["zh"]))]
    args.append(write("b.jsonl", json_lines(documents["en"])))
    make(*args, "--out", "whole", "--workers", 3)
    size = read_manifest("whole")["shard_size"]
    assert {len(np.load(path)) for path in shard_paths("whole")[:-1]} == {size}
    for shards in (1, 5, 0):
        make(*args, "--max-shards", shards)
    assert contents() == contents("whole")
    make(*args, "--out", "old", "--shard-size", 30_000, "--max-shards", 2)  # any other size
    make(*args, "--out", "old")
    assert len(np.load(shard_paths("old")[-2])) == 30_000
    assert shard_tokens("old") == shard_tokens("whole")
    assert "shard_size 30000, now 30001" in refused(*args, "--shard-size", 30_001, "--out", "old")


def test_a_shard_has_a_hundred_million_tokens_at_most(monkeypatch, capsys):
    facts = {"commit": None, "files": [], "text_bytes": 1e11}
    monkeypatch.setattr("support.texts.facts_about", lambda *args: facts)
    make("--input", write("a.txt", b"text text"))  # 3 tokens of 10 bytes
    assert read_manifest()["shard_size"] == 10**8
    size = "the text has about 30,000.0 million tokens; 100,000,000 per shard\n"
    assert capsys.readouterr().out.startswith(size)


def test_only_a_sample_is_read_before_the_first_shard(monkeypatch):
    monkeypatch.setattr(fineweb, "SAMPLE", 10)
    source = iter([(i, [EOT] * 3, 0, 6) for i in range(9)])
    batches, tokens_per_byte = fineweb.sampled(source)
    assert tokens_per_byte == 0.5 and next(source)[0] == 2
    assert [i for i, *_ in batches] == [0, 1, 3, 4, 5, 6, 7, 8]  # 2 was taken above


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def last_line(self):
        """What a terminal shows in its last line."""
        line = ""
        for part in self.getvalue().rpartition("\n")[2].split("\r"):
            line = part + line[len(part) :]
        return line.rstrip()


def record_bars(monkeypatch):
    """A list of the progress bars that fineweb.py makes from now on; stderr is a terminal."""
    shown = []

    @contextmanager
    def recorded(**options):
        with cli.progress(**options) as bar:
            shown.append(bar)
            yield bar

    monkeypatch.setattr(fineweb, "progress", recorded)
    monkeypatch.setattr(sys, "stderr", Terminal())
    return shown


def test_progress_of_whole_resumed_and_repaired_folders(monkeypatch, capsys):
    bars = record_bars(monkeypatch)
    documents = [f"text number {i}" for i in range(1000)]
    tokens = len(expected_tokens(documents))
    args = ["--input", write("a.jsonl", json_lines(documents)), "--shard-size", 1000]
    for shards, total in ((2, 2000), (4, 4000), (0, pytest.approx(tokens, rel=0.1))):
        before = read_manifest()["shards"] if shards != 2 else []
        make(*args, "--max-shards", shards)
        bar = bars[-1]
        assert bar.total == total
        assert sum(s["tokens"] for s in before) - 1300 < bar.initial < bar.n
    assert bar.n == tokens
    shard_paths()[-1].unlink()
    make(*args)  # reads it all again
    assert (bars[-1].initial, bars[-1].n) == (0, tokens)
    make("--verify")
    assert bars[-1].n == bars[-1].total == len(shard_paths())
    out = capsys.readouterr().out
    assert "\r" not in out and out.endswith("all checksums match\n")
    assert "0%|" in sys.stderr.getvalue() and sys.stderr.last_line() == ""
    refused("--input", write("b.jsonl", b'{"text": "a"}\n{"text'), "--out", "b")
    assert "reading" in sys.stderr.getvalue() and sys.stderr.last_line() == ""


def test_the_clock_of_a_progress_bar_runs_until_it_is_cleared(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyboardInterrupt), cli.progress(total=5, unit="file"):
        time.sleep(1.3)
        assert "0/5 [00:01<" in sys.stderr.last_line()
        raise KeyboardInterrupt
    assert sys.stderr.last_line() == "" and "\n" not in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal
    with cli.progress(total=5) as bar:
        bar.update()
    assert not sys.stderr.getvalue()


def test_which_files_of_a_folder_are_read(capfd):
    """Hidden ones are not; what else is skipped is counted. With --dataset only one kind is."""
    names = "a.txt b.TXT c/d.JSONL.gz .hid/e.txt c/.f.txt g.pdf c/h.pdf i.json README.md Makefile"
    files = {name: name.encode() for name in names.split()}
    folder = write_folder(".hid/in", files | {"c/d.JSONL.gz": gzip.compress(b'{"text": "d"}')})
    (folder / "link").symlink_to(write("other/j.txt", b"j").parent.absolute())
    make("--input", folder)
    assert shard_tokens() == expected_tokens(["a.txt", "b.TXT", "d"])
    assert "in: skipped 1 Makefile, 2 .pdf, 1 .json, 1 link\n" in capfd.readouterr().out
    files = {"a.jsonl": b"{}", "test/b.csv": b"text\nb\n", "train/c.csv": b"text\nc\n"}
    make("--dataset", write_folder("mixed", files | {".d/e.txt": b""}), "--out", "mixed_out")
    assert shard_tokens("mixed_out") == expected_tokens("c")
    assert "mixed: skipped 1 .jsonl\n" in capfd.readouterr().out  # another split's is not
    assert "--input : no such file" in refused("--input", "")


def test_line_ends_and_byte_order_marks():
    """--input and --data read the same text: lines end in \\n, and a byte order mark is no text."""
    content = b"\xef\xbb\xbfa\r\nb\rc\n"
    path = write("a.txt", content)
    packed = write("a.txt.gz", gzip.compress(content))
    rows = write("b.jsonl", b'\xef\xbb\xbf{"text": "d\\r\\n"}\n')
    make("--input", path, packed, rows)
    assert shard_tokens() == expected_tokens(["a\nb\nc\n"] * 2 + ["d\r\n"])
    parts = [tokenize_text(path, split).tolist() for split in ("train", "val")]
    assert parts[0] + parts[1] == expected_tokens(["a\nb\nc\n"])


def test_configurations_splits_and_columns():
    card = (
        b"---\nconfigs:\n- config_name: one\n  data_files: a.jsonl\n- config_name: two\n"
        b"  data_files: [{split: odd, path: b.jsonl}, {split: validation, path: a.jsonl}]\n---\n"
    )
    files = {"a.jsonl": b'{"text": "a b c d e"}\n{}', "b.jsonl": b'{"n": 1, "story": "f"}'}
    write_folder("folder", files | {"README.md": card})
    dataset = ["--dataset", "folder", "--config"]
    make(*dataset, "one")
    assert shard_tokens() == expected_tokens(["a b c d e"])
    assert read_manifest()["skipped"] == 1
    make(*dataset, "two", "--split", "odd", "--out", "two")
    assert shard_tokens("two") == expected_tokens(["f"])  # the only column of strings
    assert "started with split 'odd', now ''" in refused(*dataset, "two", "--out", "two")
    for args, message in {
        "three": "not found. Available: ['one', 'two']); choose one with --config",
        "two": "no split 'train'; --split names one of: odd, validation",
        "two --split odd --text-column n": (
            "no text in n; its columns: n (int64), story (string); --text-column takes a string, "
            "--template any; --input infers no types"
        ),
        "one --template {x}": "no text in x; its columns: text (string); --text-column takes a "
        "string, --template any$",
    }.items():
        line = refused(*dataset, *args.split(), "--out", "none")
        assert message in f"{line}$"
    available = "Please pick one among the available configs: ['one', 'two']"
    assert available in refused(*dataset[:-1], "--out", "none")
    bad = write("bad/a.parquet", damaged).parent
    message = refused("--dataset", bad, "--out", "damaged")
    assert "cannot be read" in message and "network" not in message
    os.mkdir("empty")
    line = refused("--dataset", "empty", "--out", "none")
    assert "doesn't contain any data files" in line and "; correct its README.md or" in line
    write("empty/a.jsonl", b"")
    assert "; remove the empty file" in refused("--dataset", "empty", "--out", "none")
    assert not os.path.exists("none")


def ask(*args, **options):
    Path("asked").touch()


def nothing(*args):
    pass


def test_local_files_need_no_network(monkeypatch):
    """Left alone, `datasets` sends a request for each, and without a network waits for it."""
    path, online = write("in/a.jsonl", b'{"text": "a"}'), {"socket.getaddrinfo": ask}
    for module in ("datasets.config", "huggingface_hub.constants"):
        online[f"{module}.HF_HUB_OFFLINE"] = False
    change(monkeypatch, online)
    make("--input", path, "--out", "out1")
    make("--dataset", path.parent, "--out", "out2")
    assert not os.path.exists("asked")
    change(monkeypatch, online | {"support.texts.set_up_datasets": nothing})
    make("--input", path, "--out", "out3")
    assert os.path.exists("asked")


def test_through_the_hub():
    """In a process by itself, since huggingface_hub reads its settings when it is imported."""
    code = "import tests.hub as h; hub = h.Hub(); import tests.test_fineweb as t; t.use_hub(hub)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=300, check=True)


SBATCH = """#!/bin/bash
for i in $(seq "$(sed 's/--array=1-//; s/%.*//' <<< "$1")"); do
    SLURM_ARRAY_TASK_ID=$i SLURM_CPUS_PER_TASK=1 bash "$2"
done
"""
PYTHON = f"""#!/bin/bash
[ "$1" = -c ] && exec {sys.executable} "$@"
echo "$@" >> calls
"""


def fetch_crawls(hub, files, card):
    """As examples/slurm_fineweb.sh does: `sbatch` and `python` are stand-ins that log commands."""
    crawls = {f"CC-MAIN-20{n}": [f"crawl {n}, text {i}" for i in range(20)] for n in (24, 13, 25)}
    configs = "".join(f"- config_name: {n}\n  data_files: data/{n}/*\n" for n in crawls)
    card = card.replace(b"configs:\n", b"configs:\n" + configs.encode())
    contents = {f"data/{name}/0.parquet": parquet(texts) for name, texts in crawls.items()}
    files = files | contents | {"README.md": card}
    hub.files[fineweb.FINEWEB] = files
    for name, content in (("sbatch", SBATCH), ("python", PYTHON)):
        write(f"bin/{name}", content.encode()).chmod(0o755)
    env = os.environ | {"PATH": f"{os.path.abspath('bin')}:{os.environ['PATH']}"}
    names = sorted(crawls)
    for _ in range(2):  # the second time nothing is asked of the Hub
        subprocess.run(["bash", ROOT / "examples/slurm_fineweb.sh"], env=env, check=True)
        assert Path("all/crawls.txt").read_text().split() == names
        commands = [line.split() for line in Path("calls").read_text().splitlines()]
        Path("calls").unlink()
        assert [command[:3] for command in commands] == [["fineweb.py", "--name", n] for n in names]
        for command in commands:
            fineweb.main(command[1:])
        hub.files[fineweb.FINEWEB] = {}
    hub.files[fineweb.FINEWEB] = files
    for name in names:
        make("--verify", "--out", f"all/{name}")
    _, found, train = open_split(Path("all"), "train")
    _, _, val = open_split(Path("all"), "val")
    assert [name.split("/")[0] for name in found] == names
    for i, name in enumerate(names):
        assert [*val[i], *train[i]] == expected_tokens(crawls[name])


def use_hub(hub):
    hub.files = {f"me/{kind[:7]}": dataset(kind) for kind in ("parquet", "jsonl.gz", "csv")}
    train = [*SPLITS["train"][0::2], *SPLITS["train"][1::2]]
    retries = {"datasets.config.STREAMING_READ_MAX_RETRIES": 2, "time.sleep": nothing}
    change(pytest.MonkeyPatch(), retries)
    for name in list(hub.files):
        out = Path("out", name)
        args = ["--dataset", name, "--shard-size", 100, "--out", out]
        make(*args, "--max-shards", 2)
        hub.newest, hub.failures = "f" * 40, 1
        make(*args)  # goes on with the commit it began with, and repeats a failed request
        hub.newest = hub.commit
        assert np.load(shard_paths(out)[0]).tolist() == expected_tokens(SPLITS["validation"])
        assert shard_tokens(out, 1) == expected_tokens(train)
    args = [*args[:-1], "late"]
    make(*args, "--max-shards", 2)
    hub.failures = 1000  # the network ends within a stream
    assert "me/csv: cannot be read" in refused(*args)
    hub.failures = 0
    make(*args)
    assert contents("late") == contents(out)
    hub.files |= {"me/gated": dataset("parquet"), "me/private": dataset("parquet")}
    hub.closed = {"me/gated": "GatedRepo", "me/private": "RepoNotFound"}
    for name in ("me/gated", "me/private", "me/none"):
        line = refused("--dataset", name, "--out", "none")
        assert f"{name}: cannot be read" in line and "request access on its Hub page" in line
    write("home/token", hub.TOKEN.encode())  # as `hf auth login` does
    for name in ("me/gated", "me/private"):
        make("--dataset", name, "--out", f"out/{name}")
        assert shard_tokens(f"out/{name}") == expected_tokens(SPLITS["validation"] + train)
    card = b"---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n"
    files = {"sample/10BT/0.parquet": parquet(SPLITS["train"]), "data/x.parquet": b"no"}
    fetch_crawls(hub, files, card)
    fineweb.main([])
    assert shard_tokens("edu_fineweb10B") == expected_tokens(SPLITS["train"])
    message = refused("--name", "sample-1BT", "--out", "none")
    assert "BuilderConfig 'sample-1BT' not found" in message
    header = np.pad(np.array([20240520, 1, 1000], "<i4"), (0, 253)).tobytes()
    whole = header + np.full(1000, EOT, "<u2").tobytes()
    shards = {"val_000000": whole, "train_000001": whole, "train_000002": header}
    files = {f"finewebedu_{key}.bin": shard for key, shard in shards.items()}
    hub.files[fineweb.PRETOKENIZED] = files
    make("--pretokenized", 1, "--out", "ready")
    assert sorted(os.listdir("ready")) == ["finewebedu_val_000000.bin", "manifest.json"]
    assert "000002.bin" in refused("--pretokenized", 3, "--out", "ready")
    assert [path.name[-10:] for path in shard_paths("ready")] == ["000000.bin", "000001.bin"]
    make("--verify", "--out", "ready")
    hub.shutdown()
    hub.server_close()
    make(*args)  # asks for nothing, since all is there
    assert "check names and network" in refused("--out", "none")
    assert not os.path.exists("none")

"""Shards hold tiktoken's tokens of the text, for any files, workers, interruptions and machines.

FINEWEB_KILLS=12 python -m pytest tests/test_fineweb.py -k killed
"""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import fineweb
from support.errors_and_signals import UserError
from tests.conftest import ROOT, error_line, posix
from tests.hub import Hub

pytestmark = [posix, pytest.mark.usefixtures("empty_folder")]
EOT = 50256
EVERY_PLANE = "".join(chr(plane * 0x10000 + 0x3A9) for plane in range(17))
DOCUMENTS = ["Hello, world!", "", None, "<|endoftext|> is text", "NA", "007", " ", "\n", "z"]
DOCUMENTS += ["CRLF\r\nand\ttabs\0and\x1b controls", EVERY_PLANE, "naïve 世界 🙂\u2028\ufeff"]
DOCUMENTS += ["a" * 5000, " \n" * 40 + '\'s  12  "apart" \n']
SPLITS = {
    "validation": ["to validate", "naïve 世界 🙂", None, ""],
    "train": [*(f"text {i} <|endoftext|> {'some length ' * (i % 5)}'q'" for i in range(400)), None],
}


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def expected_tokens(documents):
    tokens = []
    for text in documents:
        if text:
            tokens += [EOT, *fineweb.get_tokenizer().encode_ordinary(text)]
    return tokens


def shard_paths(folder="out"):
    paths = [path for path in Path(folder).glob("*") if path.suffix in (".npy", ".bin")]
    return sorted(paths, key=lambda path: path.stem[-6:])


def shard_lengths(folder="out"):
    return [len(np.load(path)) for path in shard_paths(folder)]


def shard_tokens(folder="out", first=0):
    return np.concatenate([np.load(path) for path in shard_paths(folder)[first:]]).tolist()


def contents(folder="out"):
    """{name: SHA-256} of everything in a folder, as if the folder were called `out`."""
    prefix, found = f"{Path(folder).name}_", {}
    for path in Path(folder).iterdir():
        data = path.read_bytes()
        if path.name == "manifest.json":
            data = data.replace(f'"{prefix}'.encode(), b'"out_')
        found[path.name.replace(prefix, "out_", 1)] = hashlib.sha256(data).hexdigest()
    return found


def make(*args):
    """Runs fineweb.py with one worker, into the folder `out`, unless `args` say otherwise."""
    fineweb.main(["--workers", "1", "--out", "out", *map(str, args)])


def refused(*args):
    """The line with which fineweb.py exits."""
    with pytest.raises(UserError) as error:
        make(*args)
    (line,) = str(error.value).splitlines()
    return line


def parquet(documents, column="text", rows=7):
    notes = [None if i % 3 else f"note {i}" for i in range(len(documents))]
    table = pa.table({"id": range(len(documents)), column: documents, "note": notes})
    pq.write_table(table, file := io.BytesIO(), row_group_size=rows)
    return file.getvalue()


def csv(documents):
    pyarrow.csv.write_csv(pq.read_table(io.BytesIO(parquet(documents))), file := io.BytesIO())
    return file.getvalue()


def json_lines(documents):
    lines = ({"text": text, "id": i} for i, text in enumerate(documents))
    return "\n".join(json.dumps(row, ensure_ascii=row["id"] % 2 == 0) for row in lines).encode()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


FORMATS = {
    "parquet": parquet,
    "csv": csv,
    "jsonl": json_lines,
    "jsonl.gz": lambda documents: gzip.compress(json_lines(documents)),
    "jsonl.zst": lambda documents: zstd(json_lines(documents)),
    "csv.gz": lambda documents: gzip.compress(csv(documents)),
}


def write(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content)
    return path


def dataset(kind):
    """The files of SPLITS: one for the validation split, two for train."""
    files = {f"train/{i}.{kind}": FORMATS[kind](SPLITS["train"][i::2]) for i in range(2)}
    return files | {f"validation/0.{kind}": FORMATS[kind](SPLITS["validation"])}


def test_files_of_all_kinds_for_any_workers():
    """In the order of --input; a file's name may look like a pattern."""
    for kind in ("parquet", "jsonl.gz", "jsonl.zst", "csv", "csv.gz"):
        write(f"b.{kind}", FORMATS[kind](DOCUMENTS))
    for kind in ("parquet", "csv", "jsonl.gz"):
        write(f"c.{kind.upper()}", FORMATS[kind](DOCUMENTS))
    write("a [1].jsonl", json_lines(DOCUMENTS))
    write("books/c/e.TXT", EVERY_PLANE.encode())
    write("books/f.txt", b"")
    write("books/g.md.gz", gzip.compress(b"a\nb\n"))
    os.symlink("c", "books/latest")  # no second copy of e.TXT
    for name in ("books/README.md", "books/.git/a.txt", "books/.b.txt", "books/c/h.pdf"):
        write(name, b"not read")
    made = []
    for workers in (1, 2, 3):
        args = ["--shard-size", 3000, "--workers", workers, "--out", f"out{workers}"]
        make("--input", "a [1].jsonl", "[bc].*", "books", *args)
        made.append(contents(f"out{workers}"))
    assert made[0] == made[1] == made[2]
    assert shard_tokens("out1") == expected_tokens([*DOCUMENTS * 9, EVERY_PLANE, "a\nb\n"])
    shards = {path.name: np.load(path) for path in shard_paths("out1")}
    assert [*shards][:2] == ["out1_val_000000.npy", "out1_train_000001.npy"]
    assert {(shard.dtype.str, len(shard)) for shard in [*shards.values()][:-1]} == {("<u2", 3000)}
    manifest = json.loads(Path("out1/manifest.json").read_text())
    assert manifest["source"] == "files"
    assert {shard["name"]: shard["sha256"] for shard in manifest["shards"]} == {
        f"out1{name[3:]}": sha for name, sha in made[0].items() if name.endswith(".npy")
    }


def test_line_ends_and_byte_order_marks():
    """--input and --data read the same text: lines end in \\n, and a byte order mark is no text."""
    content = b"\xef\xbb\xbfa\r\nb\rc\n"
    packed = write("a.txt.gz", gzip.compress(content))
    rows = write("b.jsonl", b'\xef\xbb\xbf{"text": "d\\r\\n"}\r\n\r\n{"text": "e"}')
    make("--input", write("a.txt", content), packed, rows)
    assert shard_tokens() == expected_tokens(["a\nb\nc\n"] * 2 + ["d\r\n", "e"])
    from train_gpt2 import DataLoaderLite

    write("a.txt", content + content[3:] * 19)
    x, _ = DataLoaderLite("a.txt", "train", B=1, T=100, shuffle=False).next_batch()
    assert x[0].tolist() == expected_tokens(["a\nb\nc\n" * 20])[:100]


def test_csv():
    """Blank lines are no rows, short rows have no text, and no row has more values than columns."""
    for name, content, texts in (
        ("a", b'text\na\n   \n\n"b\n\n c"\nd\n', ["a", "b\n\n c", "d"]),
        ("b", b'n,text\n1,a\n2\n3,"b ""c"", d"\n', ["a", 'b "c", d']),
        ("c", b"n,text,note\n1,a\n2,b,c\n", ["a", "b"]),
        ("d", b"text,n\n007,1\n2020-01-01,2\nNA,b\n", ["007", "2020-01-01", "NA"]),
    ):
        make("--input", write(f"{name}.csv", content), "--out", name)
        assert shard_tokens(name) == expected_tokens(texts)
    write("long.csv", b"text,n\na,1\nb,1,x\n")
    assert "long.csv: row 2: " in refused("--input", "long.csv") and not os.path.exists("out")


@pytest.mark.parametrize(
    "args",
    [["--input", "a.csv", "b.parquet"], ["--dataset", "me/text", "--vocab-size", "300"]],
)
def test_killed(args, monkeypatch):
    """After kill -9 at any moment the same command makes the same bytes, and no process is left.

    The first kill, and every other, is in the middle of a write."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:400_000]
    documents = [text[i : i + 300] for i in range(0, len(text), 300)]
    if args[0] == "--input":
        write("a.csv", csv(documents[0::2]))
        write("b.parquet", parquet(documents[1::2]))
    else:
        hub = Hub()
        hub.files["me/text"] = {
            "validation.parquet": parquet(documents[:99]),
            "train/0.parquet": parquet(documents[99:700], rows=200),
            "train/1.parquet": parquet(documents[700:], rows=200),
        }
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
    args = [*args, "--shard-size", "5000", "--workers", "2", "--out"]
    command = [sys.executable, ROOT / "fineweb.py", *args]
    began = time.perf_counter()
    subprocess.run([*command, "whole"], check=True)
    seconds = time.perf_counter() - began
    chance, kills = random.Random(1337), 0
    while kills < int(os.environ.get("FINEWEB_KILLS", 1)):
        process = subprocess.Popen([*command, "killed"], start_new_session=True)
        time.sleep(chance.uniform(0.3, 0.9) * seconds)
        if kills % 2 == 0:
            while process.poll() is None and not [*Path("killed").glob(".*.partial")]:
                pass
        process.kill()
        if process.wait() == 0:  # it was done: begin again
            assert contents("killed") == contents("whole")
            shutil.rmtree("killed")
            seconds *= 0.7  # the machine got faster
            continue
        kills += 1
        with pytest.raises(ProcessLookupError):
            for _ in range(500):
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    subprocess.run([*command, "killed"], check=True)
    assert contents("killed") == contents("whole")


def test_other_options_or_files_are_refused():
    """Unfinished or finished, and nothing is touched. Workers and the folder's name may change."""
    line = b'{"text": "a b c d e f g h", "body": "ab"}\n'
    write("in/a.jsonl", line * 99)
    write("in/b.jsonl", line * 99)
    for shards, workers, folder in ((2, 1, "in"), (0, 3, "moved")):
        args = ["--input", folder, "--shard-size", 100, "--max-shards", shards]
        make(*args, "--workers", workers)
        before = contents(), os.stat("out").st_mtime_ns
        make(*args)
        for option in (["--shard-size", 101], ["--text-column", "body"]):
            line_of_error = refused(*args, *option)
            assert "out" in line_of_error and str(option[1]) in line_of_error
        write(f"{folder}/c.jsonl", line)
        assert "out: " in refused(*args)
        os.remove(f"{folder}/c.jsonl")
        assert (contents(), os.stat("out").st_mtime_ns) == before
        if folder == "in":
            os.rename("in", "moved")
    assert "out: " in refused("--input", "moved/a.jsonl", "--shard-size", 100)
    ordered = ["--input", "moved/a.jsonl", "moved/b.jsonl", "--out", "ordered"]
    make(*ordered, "--shard-size", 100, "--max-shards", 2)
    ordered[1:3] = ordered[2:0:-1]
    assert "ordered: " in refused(*ordered, "--shard-size", 100)


def test_shard_0_is_for_validation_and_leaves_text_for_training(monkeypatch):
    """About a tenth of the text; in full only if --shard-size says how long a shard is."""
    monkeypatch.setattr(fineweb, "SHARD_SIZE", 3000)
    texts = [f"text number {i}" for i in range(2000)]
    for count in (1, 20, 2000):  # also more than ten shards
        path, tokens = write(f"{count}.jsonl", json_lines(texts[:count])), expected_tokens(texts)
        tokens = tokens[: len(expected_tokens(texts[:count]))]
        make("--input", path, "--out", f"out{count}")
        lengths = shard_lengths(f"out{count}")
        assert shard_tokens(f"out{count}") == tokens
        assert lengths[0] == max(min(len(tokens), 3000) // 10, 1)
        assert set(lengths[1:-1]) <= {3000}
    for shards in (1, 2, 0):  # the same if continued
        make("--input", path, "--max-shards", shards)
    assert contents() == contents("out2000")
    for size in (1000, len(tokens), 10**9):
        make("--input", path, "--shard-size", size, "--out", f"size{size}")
        assert shard_tokens(f"size{size}") == tokens
        first = size if size < len(tokens) else len(tokens) // 10
        assert shard_lengths(f"size{size}")[0] == first


def test_the_files_of_validation_are_named(capsys):
    """A folder is read by path, and a tenth of nine equal files ends in the first of them."""
    for name in ("b/0", "b/1", "b/2", "b/3", "b/4", "c/0", "c/1", "c/2", "c/3"):
        write(f"in/{name}.txt", b"ten words " * 50)
    make("--input", "in")
    assert (
        "validation is from 1 of 9 files: in/b/0.txt, the last one in part\n"
        in capsys.readouterr().out
    )
    write("in/a/9.txt", b"other words " * 10)
    make("--input", "in", "--out", "more")
    assert (
        "2 of 10 files: in/a/9.txt, in/b/0.txt, the last one in part\n" in capsys.readouterr().out
    )
    write("in/merges.txt", b"a vocabulary")  # is no text
    make("--input", "in", "--out", "third")
    assert "2 of 10 files" in capsys.readouterr().out


not_utf8 = pa.array([b"ab\xff"]).view(pa.string())
damaged = b"PAR1" + b"\xff" * 500 + parquet(DOCUMENTS)[504:]
FILES = {  # name: (content, row)
    "damaged.parquet": (damaged, 1),
    "column.parquet": (parquet(["x"], "body"), 1),
    "number.parquet": (parquet([1, 2]), 1),
    "utf.parquet": (parquet(not_utf8), 1),
    "quote.csv": (b'text,n\na,1\n"b,2\n', 2),
    "half.jsonl": (b'{"text": "a"}\n{"text', 2),
    "array.jsonl": (b'{"text": "a"}\n\n["b"]', 3),
    "number.jsonl": (b'{"text": "a"}\n{"text": 5}', 2),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', 1),
    "a [1].txt.gz": (b"text", 1),
    "half.txt.zst": (zstd(b"text" * 99)[:-9], 1),
}


def test_unusable_files():
    for name, (content, row) in FILES.items():
        write(name, content)
        assert f"{name}: row {row}: " in refused("--input", name)
        assert os.listdir() == [name]
        os.remove(name)
    write("my old.txt", "Bücher".encode("cp1252"))
    assert "iconv -f ENCODING -t UTF-8 'my old.txt' > utf8.txt && mv" in refused("--input", ".")


MISTAKES = {  # a command, and what its line names
    "--input none.txt": "--input none.txt",
    "--dataset no/such": "--dataset no/such",
    "--dataset a/b --pretokenized 1": "--pretokenized",
    "--input a.txt --dataset a/b": "--input",
    "--name sample-100BT --input a.txt": "--name sample-100BT",
    "--max-shards -1": "--max-shards -1",
    "--verify": "edu_fineweb10B",
}


def test_mistakes(capsys):
    """Nothing is written or left behind."""
    write("in/.hidden.txt", b"a")
    write("in/a.docx", b"a")
    before = sorted(Path().rglob("*"))
    for command, named in MISTAKES.items():
        assert named in error_line(capsys, "fineweb.py", command)
        assert sorted(Path().rglob("*")) == before
    write("empty.jsonl", b'{"text": ""}\n{"text": null}')
    refused("--input", "empty.jsonl")
    with pytest.raises(SystemExit) as stop:
        make("--template", "x")
    assert stop.value.code == 2


def test_one_process_at_a_time_writes_into_a_folder(monkeypatch):
    """The others change nothing."""
    write("a.txt", b"some text")
    write("out/.x.npy.1.partial", b"of a killed run")
    replace, before = os.replace, []

    def others_first(source, target):
        if not before:
            before.append(sorted(os.listdir("out")))
            for args in (["--input", "a.txt"], ["--pretokenized", 1], ["--verify"]):
                assert "out: " in refused(*args)
            assert sorted(os.listdir("out")) == before[0]
        replace(source, target)

    monkeypatch.setattr(os, "replace", others_first)
    make("--input", "a.txt")
    assert before and not list(Path("out").glob(".*"))
    make("--verify")


def test_missing_damaged_and_foreign_shards():
    args = ["--input", write("a.jsonl", json_lines(SPLITS["train"])), "--shard-size", 1000]
    make(*args, "--max-shards", 3)
    manifest = Path("out/manifest.json").read_bytes()
    before = contents()
    make(*args, "--max-shards", 2)
    assert contents() == before, "there are more already"
    make(*args)
    before, paths = contents(), shard_paths()
    for path in paths[4:]:
        path.unlink()
    write("out/manifest.json", manifest)  # killed before it listed the fourth
    make(*args)
    assert contents() == before
    whole = paths[2].read_bytes()
    write(paths[2], whole[:-20])
    assert f"{paths[2]}: " in refused(*args)
    paths[2].unlink()
    assert str(paths[2]) in refused(*args)
    write(paths[2], whole)
    write("out/x_train_000001.npy", whole)
    assert "out/x_train_000001.npy: " in refused(*args)


def test_verify():
    """It names files that changed, are missing or are unexpected."""
    make("--input", write("a.parquet", parquet(DOCUMENTS)), "--shard-size", 500)
    make("--verify")
    shard = "out_train_000001.npy"
    whole = Path("out", shard).read_bytes()
    for name, content, named in [
        (shard, whole[:-3] + b"\1" + whole[-2:], shard),
        (shard, None, shard),
        ("x_train_000001.npy", b"", "x_train_000001.npy"),
        ("manifest.json", b'{"shards": [', "manifest.json"),
        ("manifest.json", b"null", "manifest.json"),
        ("manifest.json", b'{"shards": [], "next": null}', shard),
    ]:
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("out", "copy")
        write(f"copy/{name}", content) if content is not None else os.remove(f"copy/{name}")
        assert named in refused("--verify", "--out", "copy")


@pytest.mark.skipif(sys.platform != "linux", reason="finds children in /proc")
def test_a_killed_worker_is_one_line():
    text = (ROOT / "input.txt").read_bytes()
    write("a.txt", text * 20)
    command = [sys.executable, ROOT / "fineweb.py", "--input", "a.txt", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    os.kill(int(found[0]), signal.SIGKILL)
    (line,) = process.communicate()[1].splitlines()
    assert process.returncode == 2 and line.startswith("error: ") and "--workers" in line
    assert os.listdir() == ["a.txt"]


def test_a_manifest_without_shards():
    """As a job leaves it that is killed early: training names it, and the next job starts again."""
    from train_gpt2 import DataLoaderLite

    make("--input", write("a.txt", b"some text"), "--out", "all/one")
    place = {"stream": 0, "position": None, "used": 0}
    manifest = {"source": "me/other", "next": place, "shards": []}
    write("all/two/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(UserError, match="all/two"):
        DataLoaderLite("all", "train", B=1, T=1)
    make("--input", "a.txt", "--out", "all/two")
    assert contents("all/two") == contents("all/one")


def test_through_the_hub():
    """In a process by itself, since huggingface_hub reads its settings when it is imported."""
    code = """
import os, tests.hub
hub = tests.hub.Hub()
os.environ.update(hub.environ)
import tests.test_fineweb
tests.test_fineweb.use_hub(hub)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=300, check=True)


def use_hub(hub):
    import datasets

    datasets.config.STREAMING_READ_MAX_RETRIES = 2
    time.sleep = lambda seconds: None
    hub.files["me/parquet"] = dataset("parquet")
    train = [*SPLITS["train"][0::2], *SPLITS["train"][1::2]]
    args = ["--dataset", "me/parquet", "--shard-size", 1000]
    make(*args, "--max-shards", 2)
    hub.newest, hub.failures = "f" * 40, 1
    make(*args)  # goes on with the commit it began with, and repeats a failed request
    hub.newest = hub.commit
    assert np.load(shard_paths()[0]).tolist() == expected_tokens(SPLITS["validation"])
    assert shard_tokens(first=1) == expected_tokens(train)
    assert set(shard_lengths()[1:-1]) == {1000}
    make("--dataset", "me/parquet", "--shard-size", 5, "--max-shards", 3, "--out", "small")
    assert np.load(shard_paths("small")[0]).tolist() == np.load(shard_paths()[0]).tolist()
    assert shard_lengths("small")[0] > 5 and shard_lengths("small")[1:] == [5, 5]
    make(*args, "--max-shards", 2, "--out", "late")
    hub.failures = 1000  # the network ends within a stream
    assert "--dataset me/parquet: " in refused(*args, "--out", "late")
    hub.failures = 0
    make(*args, "--out", "late")
    assert contents("late") == contents()
    use_splits_configurations_and_columns(hub)
    use_unusable_datasets(hub)
    use_fineweb(hub)
    use_pretokenized(hub)
    hub.shutdown()
    hub.server_close()
    make(*args)  # asks for nothing, since all is there
    line = refused("--out", "none")
    assert "fineweb-edu" in line and "--dataset" not in line and not os.path.exists("none")
    assert "--name sample-100BT" in refused("--name", "sample-100BT", "--out", "none")


def use_splits_configurations_and_columns(hub):
    a, b = (parquet([f"{name} {i}" for i in range(9)]) for name in "ab")
    none = parquet(pa.array(["", None]))
    story = parquet(["c"], column="story")
    card = """---
configs:
- {config_name: one, data_files: a.parquet}
- {config_name: dev, data_files: [{split: even, path: a.parquet}]}
- {config_name: odd, data_files: [{split: odd, path: c.parquet}, {split: valid, path: a.parquet}]}
- {config_name: two, data_files: [{split: dev, path: b.parquet},
    {split: validation, path: a.parquet}, {split: train, path: b.parquet}]}
- {config_name: blank, data_files: [{split: validation, path: none.parquet},
    {split: train, path: b.parquet}]}
---
"""
    hub.files["me/configs"] = {"README.md": card.encode(), "a.parquet": a, "b.parquet": b}
    hub.files["me/configs"] |= {"none.parquet": none, "c.parquet": story}
    tokens_a, tokens_b = (expected_tokens(f"{name} {i}" for i in range(9)) for name in "ab")
    for config, tokens, first in (
        ("one", tokens_a, len(tokens_a) // 10),
        ("dev", tokens_a, len(tokens_a) // 10),  # its only split
        ("two", tokens_a + tokens_b, len(tokens_a)),  # validation, of two splits that are held out
        ("blank", tokens_b, len(tokens_b) // 10),  # a validation split without text is as none
    ):
        make("--dataset", "me/configs", "--config", config, "--out", config)
        assert shard_tokens(config) == tokens and shard_lengths(config)[0] == first
    odd = ["--dataset", "me/configs", "--config", "odd", "--out", "odd"]
    for args, message in {
        (): "odd, valid",
        ("--split", "odd"): "story",  # the columns
        ("--split", "odd", "--text-column", "id"): "int64",
        ("--config", "four"): "'two'",
    }.items():
        line = refused(*odd, *args)
        assert "me/configs" in line and message in line
    make(*odd, "--split", "odd", "--text-column", "story")
    assert shard_tokens("odd") == expected_tokens(["c"])


def use_unusable_datasets(hub):
    hub.files |= {"me/gated": dataset("parquet"), "me/private": dataset("parquet")}
    hub.closed = {"me/gated": "GatedRepo", "me/private": "RepoNotFound"}
    for name in ("me/gated", "me/private", "me/none"):
        line = refused("--dataset", name, "--out", "none")
        assert f"--dataset {name}: " in line and "`hf auth login`" in line
    write("home/token", hub.TOKEN.encode())  # as `hf auth login` does
    make("--dataset", "me/gated", "--out", "gated")
    make("--dataset", "me/private", "--out", "private")
    assert shard_tokens("gated") == shard_tokens("private") == shard_tokens()
    for name in ("damaged.parquet", "number.parquet"):
        hub.files[f"me/{name}"] = {name: FILES[name][0]}
        assert f"--dataset me/{name}: " in refused("--dataset", f"me/{name}", "--out", "none")
    # Other formats are downloaded by the command in the error, without the other splits.
    hub.files["me/lines"] = dataset("jsonl.gz")
    _, download, _, then, _ = refused("--dataset", "me/lines", "--out", "none").split("`")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    subprocess.run(download, shell=True, env=os.environ | {"PATH": path}, check=True)
    make(*then.split(), "--out", "lines")
    assert shard_tokens("lines") == expected_tokens(SPLITS["train"][0::2] + SPLITS["train"][1::2])
    hub.files["me/json"] = {"a.json": b'[{"text": "a"}]'}
    assert "does not take a.json" in refused("--dataset", "me/json", "--out", "none")
    assert not os.path.exists("none")


def use_pretokenized(hub):
    header = np.pad(np.array([20240520, 1, 1000], "<i4"), (0, 253)).tobytes()
    whole = header + np.full(1000, EOT, "<u2").tobytes()
    shards = {"val_000000": whole, "train_000001": whole, "train_000002": header}
    files = {f"finewebedu_{key}.bin": shard for key, shard in shards.items()}
    hub.files["kjj0/finewebedu10B-gpt2"] = files
    make("--pretokenized", 1, "--out", "ready")
    assert sorted(os.listdir("ready")) == ["finewebedu_val_000000.bin", "manifest.json"]
    write("ready/finewebedu_train_000001.bin", whole)  # a kill before it was listed
    assert "000002.bin: " in refused("--pretokenized", 3, "--out", "ready")
    assert [path.name[-10:] for path in shard_paths("ready")] == ["000000.bin", "000001.bin"]
    make("--verify", "--out", "ready")


SBATCH = """#!/bin/bash
for i in $(seq "$(sed 's/--array=1-//; s/%.*//' <<< "$1")"); do
    SLURM_ARRAY_TASK_ID=$i SLURM_CPUS_PER_TASK=1 bash "$2"
done
"""


def use_fineweb(hub):
    """By itself, then all crawls with examples/slurm_fineweb.sh and a stand-in for `sbatch`."""
    crawls = {f"CC-MAIN-20{n}": [f"crawl {n}, text {i}" for i in range(20)] for n in (24, 13)}
    texts = {"sample-10BT": SPLITS["train"], **crawls}
    configs = "".join(f"- config_name: {n}\n  data_files: data/{n}/*\n" for n in texts)
    files = {f"data/{name}/0.parquet": parquet(documents) for name, documents in texts.items()}
    hub.files["HuggingFaceFW/fineweb-edu"] = {
        "README.md": f"---\nconfigs:\n{configs}---\n".encode(),
        **files,
    }
    assert fineweb.SHARD_SIZE == 10**8  # as others' shards of FineWeb-Edu, shard 0 included
    fineweb.SHARD_SIZE = 3000
    fineweb.main([])
    assert shard_tokens("edu_fineweb10B") == expected_tokens(SPLITS["train"])
    assert set(shard_lengths("edu_fineweb10B")[:-1]) == {3000}
    assert "CC-MAIN-2013" in refused("--name", "sample-1BT", "--out", "none")
    os.chmod(write("bin/sbatch", SBATCH.encode()), 0o755)
    os.symlink(ROOT / "fineweb.py", "fineweb.py")
    path = [os.path.abspath("bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    env = os.environ | {"PATH": ":".join(path)}
    for _ in range(2):  # the second time nothing is asked of the Hub
        subprocess.run(["bash", ROOT / "examples/slurm_fineweb.sh"], env=env, check=True)
        hub.files["HuggingFaceFW/fineweb-edu"] = {}
    for name, documents in crawls.items():
        assert shard_tokens(f"all/{name}") == expected_tokens(documents)
        assert [path.name.split("_")[1] for path in shard_paths(f"all/{name}")] == ["val", "train"]

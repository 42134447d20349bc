"""Shards hold tiktoken's tokens of the text, for any files, workers, interruptions and machines.

FINEWEB_KILLS=12 python -m pytest tests/test_fineweb.py -k killed
"""

import gzip
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
import support.documents
from support.errors_and_signals import UserError
from support.tokenizer import get_tokenizer
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
    encoding = get_tokenizer()  # tiktoken's
    tokens = []
    for text in documents:
        if text:
            tokens += [EOT, *encoding.encode_ordinary(text)]
    return tokens


def shard_paths(folder="out"):
    paths = [path for path in Path(folder).glob("*") if path.suffix in (".npy", ".bin")]
    return sorted(paths, key=lambda path: path.stem[-6:])


def shard_lengths(folder="out"):
    return [len(np.load(path)) for path in shard_paths(folder)]


def shard_tokens(folder="out", first=0):
    return np.concatenate([np.load(path) for path in shard_paths(folder)[first:]]).tolist()


def contents(folder="out"):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


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


def write(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content)
    return path


def test_files_of_all_kinds_for_any_workers():
    """In the order of --input. A file's name may look like a pattern."""
    write("b.parquet", parquet(DOCUMENTS))
    write("b.jsonl.gz", gzip.compress(json_lines(DOCUMENTS)))
    write("b.jsonl.zst", pa.compress(json_lines(DOCUMENTS), codec="zstd", asbytes=True))
    write("b.csv", csv(DOCUMENTS))
    write("c.CSV.GZ", gzip.compress(csv(DOCUMENTS)))
    write("c.PARQUET", parquet(DOCUMENTS))
    write("a [1].jsonl", json_lines(DOCUMENTS))
    write("books/c/e.TXT", EVERY_PLANE.encode())
    write("books/f.txt", b"")
    write("books/g.md.gz", gzip.compress(b"a\nb\n"))
    for name in ("books/README.md", "books/.git/a.txt", "books/.b.txt", "books/c/h.pdf"):
        write(name, b"not read")
    made = []
    for workers in (1, 2, 3):
        args = ["--shard-size", 3000, "--workers", workers, "--out", f"{workers}/out"]
        make("--input", "a [1].jsonl", "[bc].*", "books", *args)
        made.append(contents(f"{workers}/out"))
    assert made[0] == made[1] == made[2]
    assert shard_tokens("1/out") == expected_tokens([*DOCUMENTS * 7, EVERY_PLANE, "a\nb\n"])
    shards = {path.name: np.load(path) for path in shard_paths("1/out")}
    assert [*shards][:2] == ["out_val_000000.npy", "out_train_000001.npy"]
    assert {(shard.dtype.str, len(shard)) for shard in [*shards.values()][:-1]} == {("<u2", 3000)}


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
    """Values are text, and a short row may have none."""
    content = b'n,text\n1,007\n\n2\n3,"b ""c"",\n\n d"\n4,NA\n'
    make("--input", write("a.csv", content))
    assert shard_tokens() == expected_tokens(["007", 'b "c",\n\n d', "NA"])


@pytest.mark.parametrize(
    "args",
    [["--input", "a.csv", "b.parquet"], ["--dataset", "me/text", "--vocab-size", "300"]],
)
def test_killed(args, monkeypatch):
    """After kill -9 at any moment the same command makes the same bytes, and no process is left.

    The first kill, and every other, is in the middle of a write."""
    text = (ROOT / "input.txt").read_text(encoding="utf-8")[:200_000]
    documents = [text[i : i + 300] for i in range(0, len(text), 300)]
    if args[0] == "--input":
        write("a.csv", csv(documents[0::2]))
        write("b.parquet", parquet(documents[1::2]))
    else:
        hub = Hub()
        hub.files["me/text"] = {
            "validation.parquet": parquet(documents[:99]),
            "train/0.parquet": parquet(documents[99:400], rows=100),
            "train/1.parquet": parquet(documents[400:], rows=100),
        }
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
    args = [*args, "--shard-size", "3000", "--workers", "2", "--out"]
    command = [sys.executable, ROOT / "fineweb.py", *args]
    began = time.perf_counter()
    subprocess.run([*command, "whole/out"], check=True)
    seconds = time.perf_counter() - began
    chance, kills = random.Random(1337), 0
    while kills < int(os.environ.get("FINEWEB_KILLS", 1)):
        process = subprocess.Popen([*command, "killed/out"], start_new_session=True)
        time.sleep(chance.uniform(0.3, 0.9) * seconds)
        if kills % 2 == 0:
            while process.poll() is None and not [*Path("killed/out").glob(".*.partial")]:
                pass
        process.kill()
        if process.wait() == 0:  # it was done: begin again
            assert contents("killed/out") == contents("whole/out")
            shutil.rmtree("killed")
            seconds *= 0.7  # the machine got faster
            continue
        kills += 1
        with pytest.raises(ProcessLookupError):
            for _ in range(500):
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    subprocess.run([*command, "killed/out"], check=True)
    assert contents("killed/out") == contents("whole/out")


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
        assert "out: " in refused(*args, "--shard-size", 101)
        assert "out: " in refused(*args, "--text-column", "body")
        write(f"{folder}/c.jsonl", line)
        assert "out: " in refused(*args)
        os.remove(f"{folder}/c.jsonl")
        assert (contents(), os.stat("out").st_mtime_ns) == before
        if folder == "in":
            os.rename("in", "moved")
    files = ["moved/b.jsonl", "moved/a.jsonl"]
    assert "out: " in refused("--input", *files, "--shard-size", 100)


def test_shard_0_is_for_validation_and_leaves_text_for_training(monkeypatch, capsys):
    """About a tenth of the text; in full only if --shard-size says how long a shard is."""
    monkeypatch.setattr(fineweb, "SHARD_SIZE", 3000)
    texts = [f"text number {i}" for i in range(2000)]
    for count in (1, 20, 2000):
        path = write(f"{count}.jsonl", json_lines(texts[:count]))
        tokens = expected_tokens(texts[:count])
        make("--input", path, "--out", f"{count}/out")
        lengths = shard_lengths(f"{count}/out")
        assert shard_tokens(f"{count}/out") == tokens
        assert lengths[0] == max(min(len(tokens), 3000) // 10, 1)
        assert set(lengths[1:-1]) <= {3000}
    for size in (1000, len(tokens), 10**9):
        out = f"size {{{size}}}"
        make("--input", path, "--shard-size", size, "--out", out)
        assert shard_tokens(out) == tokens
        first = size if size < len(tokens) else len(tokens) // 10
        assert shard_lengths(out)[0] == first
    capsys.readouterr()
    make("--input", "1.jsonl", "20.jsonl", "1.jsonl", "--out", "several")
    assert "training begins in file 2 of 3, 20.jsonl" in capsys.readouterr().out


damaged = b"PAR1" + b"\xff" * 500 + parquet(DOCUMENTS)[504:]
UNUSABLE = {  # name: (content, what the line names besides)
    "damaged.parquet": (damaged, "row 1: "),
    "column.parquet": (parquet(["x"], "body"), "body"),
    "number.parquet": (parquet([1, 2]), "row 1: 1 is not a string"),
    "column.csv": (b"body,n\na,1\n", "body"),
    "comma.csv": (b"text,n\na,1\nb, c,1\n", "row 2: "),
    "quote.csv": (b'text,n\na,1\n"b,2\n', "row 2: "),
    "half.jsonl": (b'{"text": "a"}\n{"text', "row 2: "),
    "key.jsonl": (
        b'{"text": "a"}\n\n{"body": "b", "id": 1}',
        "no key 'text', only body, id",
    ),
    "number.jsonl": (b'{"text": "a"}\n{"text": 5}', "row 2: 5 is not a string"),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', "row 1: "),
    "a [1].txt.gz": (b"text", "row 1: "),
    "half.txt.gz": (gzip.compress(b"text" * 99)[:-9], "row 1: "),
    "my old.txt": ("Bücher".encode("cp1252"), "UTF-8; `iconv "),
    "empty.jsonl": (b'{"text": ""}\n{"text": null}', None),
    "a.docx": (b"a", "--input"),
}


def test_unusable_files():
    for name, (content, named) in UNUSABLE.items():
        line = refused("--input", write(name, content))
        assert named is None or (name in line and named in line), line


MISTAKES = {  # a command, and what its line names
    "--input none.txt": "--input none.txt",
    "--input": "--input",  # as `--input $FILES` is, if $FILES is empty
    "--dataset no/such": "no/such",  # without a network
    "--dataset a/b --pretokenized 1": "--pretokenized",
    "--input a.txt --dataset a/b": "--input",
    "--name sample-100BT --input a.txt": "--name",
    "--config en": "--dataset",
    "--max-shards -1": "--max-shards -1",
    "--verify": "edu_fineweb10B",
}


def test_mistakes(capsys):
    """Nothing is written or left behind."""
    for command, named in MISTAKES.items():
        assert named in error_line(capsys, "fineweb.py", command)
        assert not os.listdir()


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


def test_missing_damaged_and_foreign_shards():
    args = ["--input", write("a.jsonl", json_lines(SPLITS["train"])), "--shard-size", 1000]
    make(*args, "--max-shards", 3)
    three = contents()
    make(*args, "--max-shards", 2)
    assert contents() == three, "there are more already"
    make(*args)
    make("--verify")
    whole = contents()
    for path in shard_paths()[4:]:
        path.unlink()
    write("out/manifest.json", three["manifest.json"])  # killed before it listed the fourth
    make(*args)
    assert contents() == whole
    shard = shard_paths()[2]
    content = whole[shard.name]
    write(shard, content[:-3] + b"\1" + content[-2:])
    assert shard.name in refused("--verify")
    write(shard, content[:-20])
    assert shard.name in refused(*args)
    shard.unlink()
    assert shard.name in refused(*args) and shard.name in refused("--verify")
    write(shard, content)
    write("out/x_train_000001.npy", content)
    for command in (args, ["--verify"]):
        assert "x_train_000001.npy" in refused(*command)


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


def test_a_folder_without_a_shard():
    """As an error or a kill leaves it: training names it, and it may be used for another text."""
    from train_gpt2 import DataLoaderLite

    make("--input", write("a.txt", b"some text"), "--out", "all/one")
    refused("--input", write("half.jsonl", b'{"text'), "--out", "all/two")
    with pytest.raises(UserError, match="all/two"):
        DataLoaderLite("all", "train", B=1, T=1)
    make("--input", "a.txt", "--out", "all/two")
    assert shard_tokens("all/two") == shard_tokens("all/one")


def test_a_vocabulary_is_not_kept_for_another_text(monkeypatch):
    """Also if it was stopped before the first shard. The same command goes on."""
    for name in ("right", "wrong"):
        write(f"{name}.txt", f"the {name} text, ".encode() * 99)
    args = ["--vocab-size", 260, "--input"]

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fineweb, "write_shards", stop)
        make(*args, "wrong.txt")
    before = contents()
    for size in ([], ["--vocab-size", 260]):
        assert "out: files must match" in refused(*size, "--input", "right.txt")
        assert "out: " in refused(*size, "--input", "wrong.txt", "--text-column", "body")
    assert contents() == before
    make("--input", "wrong.txt")
    make(*args, "wrong.txt", "--out", "whole/out")
    assert contents() == contents("whole/out")


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
    hub.files["me/parquet"] = {
        "train/0.parquet": parquet(SPLITS["train"][:200]),
        "train/1.parquet": parquet(SPLITS["train"][200:]),
        "validation/0.parquet": parquet(SPLITS["validation"]),
    }
    args = ["--dataset", "me/parquet", "--shard-size", 1000]
    make(*args, "--max-shards", 2)
    hub.newest, hub.failures = "f" * 40, 1
    make(*args)  # goes on with the commit it began with, and repeats a failed request
    hub.newest = hub.commit
    assert np.load(shard_paths()[0]).tolist() == expected_tokens(SPLITS["validation"])
    assert shard_tokens(first=1) == expected_tokens(SPLITS["train"])
    assert set(shard_lengths()[1:-1]) == {1000}
    make("--dataset", "me/parquet", "--shard-size", 5, "--max-shards", 3, "--out", "small")
    assert np.load(shard_paths("small")[0]).tolist() == np.load(shard_paths()[0]).tolist()
    assert shard_lengths("small")[0] > 5 and shard_lengths("small")[1:] == [5, 5]
    make(*args, "--max-shards", 2, "--out", "late/out")
    hub.failures = 1000  # the network ends within a file
    assert "me/parquet" in refused(*args, "--out", "late/out")
    hub.failures = 0
    make(*args, "--out", "late/out")
    assert contents("late/out") == contents()
    use_splits_configurations_and_columns(hub)
    use_a_sorted_dataset(hub)
    use_unusable_datasets(hub)
    use_fineweb(hub)
    use_pretokenized(hub)
    os.remove("home/token")
    hub.closed["me/parquet"] = "RepoNotFound"
    make(*args)  # asks for nothing, since all is there


def use_splits_configurations_and_columns(hub):
    a, b = (parquet([f"{name} {i}" for i in range(9)]) for name in "ab")
    story = parquet(["c"], column="story")
    card = """---
configs:
- {config_name: one, data_files: a.parquet}
- {config_name: dev, data_files: [{split: even, path: a.parquet}]}
- {config_name: odd, data_files: [{split: odd, path: c.parquet}, {split: valid, path: a.parquet}]}
- {config_name: two, data_files: [{split: dev, path: b.parquet},
    {split: validation, path: a.parquet}, {split: train, path: b.parquet}]}
---
"""
    hub.files["me/configs"] = {"README.md": card.encode(), "a.parquet": a, "b.parquet": b}
    hub.files["me/configs"] |= {"c.parquet": story}
    tokens_a, tokens_b = (expected_tokens(f"{name} {i}" for i in range(9)) for name in "ab")
    for config, tokens, first in (
        ("one", tokens_a, len(tokens_a) // 10),
        ("dev", tokens_a, len(tokens_a) // 10),  # its only split
        ("two", tokens_a + tokens_b, len(tokens_a)),  # validation, of two splits that are held out
    ):
        make("--dataset", "me/configs", "--config", config, "--out", config)
        assert shard_tokens(config) == tokens and shard_lengths(config)[0] == first
    odd = ["--dataset", "me/configs", "--config", "odd", "--out", "odd"]
    for args, message in {
        (): "odd, valid",
        ("--split", "odd"): "story",  # the columns
        ("--split", "odd", "--text-column", "id"): "0 is not a string",
        ("--config", "four"): "'two'",
    }.items():
        line = refused(*odd, *args)
        assert "me/configs" in line and message in line
    make(*odd, "--split", "odd", "--text-column", "story")
    assert shard_tokens("odd") == expected_tokens(["c"])


def use_a_sorted_dataset(hub):
    """A vocabulary is learned from all over it, though not from all of it."""
    animals = ["zebra", "okapi", "gnu", "lynx", "yak", "emu"]
    texts = [f" {animal}" * 100 for animal in animals for _ in range(50)]
    hub.files["me/sorted"] = {f"{i}.parquet": parquet(texts[i::2], rows=25) for i in range(2)}
    kept, support.documents.LEARN_CHARS = support.documents.LEARN_CHARS, 20_000
    make("--dataset", "me/sorted", "--vocab-size", 275, "--out", "sorted")
    support.documents.LEARN_CHARS = kept
    words = json.loads(Path("sorted/vocab.json").read_text())
    assert {f"Ġ{animal}" for animal in animals[1:]} <= {*words}


def use_unusable_datasets(hub):
    gated = hub.files["me/parquet"]
    hub.files |= {"me/gated": gated, "me/private": gated}
    hub.closed = {"me/gated": "GatedRepo", "me/private": "RepoNotFound"}
    for name in ("me/gated", "me/private", "me/none"):
        line = refused("--dataset", name, "--out", "none")
        assert name in line and "`hf auth login`" in line
    write("home/token", hub.TOKEN.encode())  # as `hf auth login` does
    make("--dataset", "me/gated", "--out", "gated")
    make("--dataset", "me/private", "--out", "private")
    assert shard_tokens("gated") == shard_tokens("private") == shard_tokens()
    hub.files["me/damaged"] = {"a.parquet": damaged}
    assert "me/damaged" in refused("--dataset", "me/damaged", "--out", "damaged")
    # Other formats are downloaded by the command in the error.
    hub.files["me/lines"] = {"a.jsonl.gz": gzip.compress(json_lines(DOCUMENTS))}
    _, download, _, then, _ = refused("--dataset", "me/lines", "--out", "none").split("`")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    subprocess.run(download, shell=True, env=os.environ | {"PATH": path}, check=True)
    make(*then.split(), "--out", "lines")
    assert shard_tokens("lines") == expected_tokens(DOCUMENTS)
    assert not os.path.exists("none")


def use_pretokenized(hub):
    header = np.pad(np.array([20240520, 1, 1000], "<i4"), (0, 253)).tobytes()
    whole = header + np.full(1000, EOT, "<u2").tobytes()
    shards = {"val_000000": whole, "train_000001": whole, "train_000002": header}
    files = {f"finewebedu_{key}.bin": shard for key, shard in shards.items()}
    hub.files["kjj0/finewebedu10B-gpt2"] = files
    make("--pretokenized", 1, "--out", "ready")
    write("ready/finewebedu_train_000001.bin", whole)  # a kill before it was listed
    assert "000002.bin: " in refused("--pretokenized", 3, "--out", "ready")
    assert sorted(os.listdir("ready")) == [
        "finewebedu_train_000001.bin",
        "finewebedu_val_000000.bin",
        "manifest.json",
    ]
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
    files = {f"data/{name}/0.parquet": parquet(rows) for name, rows in texts.items()}
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
    subprocess.run(["bash", ROOT / "examples/slurm_fineweb.sh"], env=env, check=True)
    for name, texts in crawls.items():
        assert shard_tokens(f"all/{name}") == expected_tokens(texts)
        assert [path.name.split("_")[1] for path in shard_paths(f"all/{name}")] == ["val", "train"]

"""Shards against tiktoken's tokens of the same documents, whatever the files, the workers and the shard size."""

import http.server
import json
import os
import threading
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fineweb
from common import InputError
from tests.conftest import SHARED, TINY, assert_one_error_line, losses, script
from tokenizer import EOT, get_tokenizer
from train_gpt2 import DataLoaderLite

EVERY_PLANE = "".join(chr(plane * 0x10000 + 0x3A9) for plane in range(17))
DOCUMENTS = [
    "Hello, world!", "", None, "<|endoftext|> is only text", "CRLF\r\nand\ttabs\0and\x1b controls", EVERY_PLANE,
    "naïve 世界 🙂", " ", "\n", "a" * 5000, "the end",
]


def expected_tokens(documents):
    encode = get_tokenizer().encode_ordinary
    return [token for text in documents if text for token in [EOT, *encode(text)]]


def shard_tokens(folder):
    return np.concatenate([np.load(path) for path in sorted(Path(folder).glob("*.npy"), key=lambda p: p.stem[-6:])])


@pytest.fixture
def files(tmp_path):
    """The same documents as parquet (two row groups), as jsonl, and some text files."""
    table = pa.table({"text": DOCUMENTS, "id": list(range(len(DOCUMENTS)))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(DOCUMENTS)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/c.txt").write_bytes(EVERY_PLANE.encode())
    (tmp_path / "books/d.txt").write_bytes(b"line\r\nline\n")
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl"), str(tmp_path / "books")]


def test_shards_hold_tiktokens_tokens_whatever_the_workers(files, tmp_path):
    documents = [*DOCUMENTS, *DOCUMENTS, EVERY_PLANE, "line\r\nline\n"]
    expected = expected_tokens(documents)
    contents = []
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        fineweb.main(["--input", *files, "--out", str(out), "--shard-size", "1000", "--workers", str(workers)])
        assert shard_tokens(out).tolist() == expected
        paths = sorted(out.iterdir(), key=lambda path: path.stem[-6:])
        assert [path.name for path in paths] == ["edufineweb_val_000000.npy"] + [
            f"edufineweb_train_{i:06d}.npy" for i in range(1, len(paths))
        ]
        shards = [np.load(path) for path in paths]
        assert all(s.dtype == np.uint16 and len(s) == 1000 for s in shards[:-1]) and 0 < len(shards[-1]) <= 1000
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]
    ends = [*np.flatnonzero(np.array(expected) == EOT)[1:], len(expected)]
    decoded = get_tokenizer().decode([t for t in expected if t != EOT])
    assert decoded == "".join(text for text in documents if text) and len(ends) == sum(map(bool, documents))


@given(st.lists(st.text(max_size=20), min_size=1, max_size=12), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_units_of_a_jsonl_hold_each_line_once(tmp_path_factory, texts, span):
    """Wherever the cuts fall: within a line, at its end, past several."""
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode())
    size = path.stat().st_size
    units = [fineweb.Unit(path, start, min(start + span, size)) for start in range(0, size, span)]
    assert [text for unit in units for text in fineweb.read_documents(unit, "text")] == texts


@given(st.lists(st.integers(0, 25), max_size=20), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_writer_cuts_a_stream_and_loses_nothing(tmp_path_factory, lengths, shard_size):
    folder = tmp_path_factory.mktemp("shards")
    writer, stream = fineweb.ShardWriter(folder, shard_size), np.arange(sum(lengths), dtype=np.uint16)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        writer.add(stream[end - length : end])
    writer.flush()
    if len(stream):
        assert (shard_tokens(folder) == stream).all()
    assert len(list(folder.iterdir())) == -(-len(stream) // shard_size)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
def test_educational_sample_to_a_trained_model(tmp_path):
    """Real parquet files -> shards of 2,000,000 tokens -> 20 steps of a small model."""
    paths = sorted((SHARED / "edu_sample").glob("*.parquet"))[:2]
    out = tmp_path / "shards"
    done = script("fineweb.py", "--input", *paths, "--out", out, "--shard-size", "2000000")
    assert done.returncode == 0, done.stderr
    texts = [text for path in paths for text in pq.read_table(path, columns=["text"]).column("text").to_pylist()]
    counts = [count for path in paths for count in pq.read_table(path).column("token_count").to_pylist()]
    tokens = shard_tokens(out)
    starts = np.flatnonzero(tokens == EOT)
    assert (np.diff(starts, append=len(tokens)) - 1 == counts).all()
    for i in range(0, len(texts), 97):
        assert tokens[starts[i] : starts[i] + counts[i] + 1].tolist() == expected_tokens([texts[i]])
    loader = DataLoaderLite(out, "train", 4, 64)
    assert sorted(loader.read(0, loader.total_tokens)) == sorted(tokens[2_000_000:])
    args = ["--max-steps", 20, "--max-lr", 1e-2, "--log-dir", tmp_path / "log"]
    done = script("train_gpt2.py", *TINY, "--data", out, *args)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "log")) == 20 and losses(tmp_path / "log")[-1] < losses(tmp_path / "log")[0]


def test_max_shards(files, tmp_path):
    fineweb.main(["--input", *files, "--out", str(tmp_path / "o"), "--shard-size", "300", "--max-shards", "2"])
    assert [len(np.load(path)) for path in (tmp_path / "o").iterdir()] == [300, 300]
    expected = expected_tokens([*DOCUMENTS, *DOCUMENTS])
    assert shard_tokens(tmp_path / "o").tolist() == expected[:600]


def write(path, content):
    path.write_bytes(content)
    return path


MISTAKES = {
    "missing": (lambda tmp: tmp / "none.parquet", "none.parquet: no such file"),
    "suffix": (lambda tmp: write(tmp / "a.docx", b""), "a.docx: read are .parquet, .jsonl, .txt"),
    "empty folder": (lambda tmp: tmp, "no such file, or no .parquet"),
    "corrupt parquet": (lambda tmp: write(tmp / "a.parquet", b"PAR1 not really"), "a.parquet: no parquet file"),
    "UTF-8 in txt": (lambda tmp: write(tmp / "a.txt", b"abc\xff"), "a.txt: not UTF-8 at byte 3"),
    "UTF-8 in jsonl": (lambda tmp: write(tmp / "a.jsonl", b'{"text": "\xff"}'), "byte 0 is not UTF-8"),
    "no JSON": (lambda tmp: write(tmp / "a.jsonl", b'{"text": "a"}\n{"text'), "byte 14 is no JSON object"),
    "no key": (lambda tmp: write(tmp / "a.jsonl", b'{"body": "a"}'), "has no 'text'; --text-column names one of: body"),
    "no text": (lambda tmp: write(tmp / "a.jsonl", b'{"text": 5}'), "byte 0: int, not text"),
    "nothing": (lambda tmp: write(tmp / "a.jsonl", b'{"text": ""}'), "no text in the input"),
    "too little": (lambda tmp: write(tmp / "a.txt", b"To be or not to be"), "lower --shard-size"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, tmp_path):
    make, message = MISTAKES[name]
    with pytest.raises(InputError) as error:
        fineweb.main(["--input", str(make(tmp_path)), "--out", str(tmp_path / "out"), "--workers", "1"])
    assert message in str(error.value)
    assert not list((tmp_path / "out").glob("*")), "something was written"


def test_missing_column_and_a_folder_in_use(files, tmp_path):
    with pytest.raises(InputError, match="no column 'body'; --text-column names one of: text, id"):
        fineweb.main(["--input", files[0], "--text-column", "body", "--out", str(tmp_path / "out")])
    (tmp_path / "used").mkdir()
    (tmp_path / "used/edufineweb_train_000001.npy").touch()
    with pytest.raises(InputError, match="used: already holds shards"):
        fineweb.main(["--input", files[0], "--out", str(tmp_path / "used")])


@pytest.fixture
def hub(tmp_path):
    """A server on this machine that answers as the Hub does for FineWeb-Edu, with two small files. Its address."""
    stored = {}
    for i, texts in enumerate((["one", "two"], ["three <|endoftext|>"])):
        pq.write_table(pa.table({"text": texts}), tmp_path / "part.parquet")
        stored[f"sample/10BT/{i:03d}_00000.parquet"] = (tmp_path / "part.parquet").read_bytes()
    stored["README.md"] = b"# not data"

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, content, **headers):
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_GET(self):
            path = urlsplit(self.path).path
            base = "/datasets/HuggingFaceFW/fineweb-edu/resolve/main/"
            if path == "/api/datasets/HuggingFaceFW/fineweb-edu/tree/main":
                tree = [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in stored.items()]
                self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            elif path.startswith(base) and path.removeprefix(base) in stored:
                content = stored[path.removeprefix(base)]
                self.answer(200, content, ETag=f'"{len(content)}"', X_Repo_Commit="0" * 40)
            else:
                self.answer(404, b"")

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_from_the_hub(hub, tmp_path):
    env = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    args = ["--shard-size", "5", "--workers", "1"]
    done = script("fineweb.py", *args, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert shard_tokens(tmp_path / "edu_fineweb10B").tolist() == expected_tokens(["one", "two", "three <|endoftext|>"])
    done = script("fineweb.py", *args, "--name", "sample-1BT", "--out", tmp_path / "o", env=env)
    assert_one_error_line(done, "--name sample-1BT", "sample/1BT/*.parquet")
    assert not (tmp_path / "o").exists()


def test_without_a_network(tmp_path):
    done = script("fineweb.py", cwd=tmp_path, env={"HF_HOME": str(tmp_path / "cache")})  # conftest: HF_HUB_OFFLINE
    assert_one_error_line(done, "the Hub could not be asked", "--input takes local")
    assert "edu_fineweb10B" not in os.listdir(tmp_path)

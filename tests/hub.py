"""A local Hub for tests, which answers `huggingface_hub` and `datasets`."""

import hashlib
import http.server
import json
import os
import re
import threading
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import tests.conftest  # noqa: F401  (now, since it keeps all else off the Hub)


class Hub(http.server.ThreadingHTTPServer):
    """Serves processes that have `environ` in their environment.

    files: {repository: {path: bytes}}, all at `commit`. closed: {repository: the error code for
    requests without TOKEN}. failures: how many of the next requests for content fail. newest: the
    newest commit."""

    commit = "0123456789abcdef" * 2 + "01234567"
    TOKEN = "hf_secret"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.closed, self.failures, self.newest = {}, {}, 0, self.commit
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.environ = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": os.path.abspath("home"),
        }


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one go

    def do_GET(self):
        url = urlsplit(self.path)
        repository, kind, commit, name = re.fullmatch(
            r"(?:/api)?/datasets/([^/]+/[^/]+)/?(\w*)/?(\w*)/?(.*)", unquote(url.path)
        ).groups()
        files = self.server.files.get(repository, {}) if commit in ("", "main", Hub.commit) else {}
        closed = self.server.closed.get(repository) if files else "RepoNotFound"
        known = self.headers.get("Authorization") == f"Bearer {Hub.TOKEN}"
        visible = closed == "GatedRepo" and not kind  # anybody may see that it exists
        if closed and not known and not visible:
            self.answer(401, error=closed)
        elif kind == "resolve" and name in files:
            self.send_file(files[name])
        elif kind == "tree" and (found := self.entries(files, name, "recursive=true" in url.query)):
            self.answer(200, json.dumps(found).encode())
        elif kind in ("resolve", "tree"):
            self.answer(404, error="EntryNotFound")
        else:
            info = {"id": repository, "sha": commit or self.server.newest, "tags": []}
            self.answer(200, json.dumps(info).encode())

    do_HEAD = do_GET

    def entries(self, files, folder, recursive):
        prefix = folder and f"{folder}/"
        parents = {
            str(parent): b"" for path in files for parent in PurePosixPath(path).parents[:-1]
        }
        entries = []
        for path, content in (parents | files).items():
            if path.startswith(prefix) and (recursive or "/" not in path.removeprefix(prefix)):
                kind = "file" if path in files else "directory"
                oid = hashlib.sha1(content).hexdigest()
                entries.append({"type": kind, "path": path, "size": len(content), "oid": oid})
        return entries

    def send_file(self, content):
        headers = {"ETag": hashlib.sha256(content).hexdigest(), "X-Repo-Commit": Hub.commit}
        if self.command == "GET" and self.server.failures:
            self.server.failures -= 1
            self.answer(500)
        elif "Range" in self.headers:
            first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
            headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
            self.answer(206, content[first : last + 1], headers)
        else:
            self.answer(200, content, headers)

    def answer(self, status, content=b"", headers=None, error=""):
        self.send_response(status)
        own = {"Content-Length": len(content), "X-Error-Code": error}
        for key, value in (own | (headers or {})).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        pass

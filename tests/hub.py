"""A local Hub for tests: it answers what `huggingface_hub` and `datasets` ask."""

import hashlib
import http.server
import json
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import tests.conftest  # noqa: F401  (its environment is for tests)

class Hub(http.server.ThreadingHTTPServer):
    """`files`: {repository: {path: bytes}}, all at one commit.

    closed: {repository: the error code for requests without TOKEN}. failures: "error" for each request for a
    file that fails. requests: (method, path of a file, first byte).
    """

    commit = "0123456789abcdef" * 2 + "01234567"
    TOKEN = "hf_secret"

    def __init__(self, files, home):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.closed, self.requests, self.failures = files, {}, [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.env = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        self.env["HF_HOME"] = str(home)

class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one go

    def answer(self, status, content=b"", **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in ({"Content-Length": len(content)} | headers).items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status, code):
        self.answer(status, {"error": "no"}, X_Error_Code=code, X_Error_Message="no")

    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        body = parse_qs(self.rfile.read(length).decode()) if length else {}
        url = urlsplit(self.path)
        path, recursive = unquote(url.path), "recursive=true" in url.query.lower()
        for repository in self.server.files:
            api, resolve = f"/api/datasets/{repository}", f"/datasets/{repository}/resolve/"
            if path == api or path.startswith((f"{api}/", resolve)):
                return self.serve(repository, path.removeprefix(api).removeprefix(resolve), body, recursive)
        self.refuse(404 if self.knows() else 401, "RepoNotFound")

    do_HEAD = do_POST = do_GET

    def knows(self):
        return self.headers.get("Authorization") == f"Bearer {self.server.TOKEN}"

    def serve(self, repository, rest, body, recursive):
        files, commit = self.server.files[repository], self.server.commit
        closed = self.server.closed.get(repository)
        info = {"id": repository, "sha": commit, "tags": []}
        if closed and not self.knows() and (closed == "RepoNotFound" or rest):
            return self.refuse(401, closed)  # of a gated repository anybody may know that it is there
        if rest in ("", "/auth-check", f"/revision/{commit}"):
            return self.answer(200, info)
        if rest == f"/paths-info/{commit}":
            found = [self.entry(files, path) for path in body["paths"]]
            return self.answer(200, [entry for entry in found if entry])
        if rest.startswith(f"/tree/{commit}"):
            folder = rest.removeprefix(f"/tree/{commit}").strip("/")
            below = [path for path in files if not folder or path.startswith(folder + "/")]
            parents = {str(parent) for path in below for parent in Path(path).parents} - {".", folder}
            found = [self.entry(files, path) for path in (*sorted(parents), *below)
                     if recursive or str(Path(path).parent) == (folder or ".")]
            return self.answer(200, found) if below else self.refuse(404, "EntryNotFound")
        revision, _, file = rest.partition("/")
        if revision not in (commit, "main"):
            return self.refuse(404, "RevisionNotFound")
        return self.send_file(file, files[file]) if file in files else self.refuse(404, "EntryNotFound")

    @staticmethod
    def entry(files, path):
        if path in files:
            content = files[path]
            oid = hashlib.sha1(content).hexdigest()
            return {"type": "file", "path": path, "size": len(content), "oid": oid}
        if any(name.startswith(f"{path}/") for name in files):
            return {"type": "directory", "path": path, "oid": "0" * 40}
        return None

    def send_file(self, name, content):
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        self.server.requests.append((self.command, name, start))
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.server.commit,
                   "Accept-Ranges": "bytes"}
        failure = self.server.failures.pop(0) if self.command == "GET" and self.server.failures else None
        if failure == "error":
            self.answer(500)
        elif "Range" in self.headers and self.command == "GET":
            total = f"bytes {start}-{end}/{len(content)}"
            self.answer(206, content[start : end + 1], Content_Range=total, **headers)
        else:
            self.answer(200, content, **headers)

    def log_message(self, *args):
        pass

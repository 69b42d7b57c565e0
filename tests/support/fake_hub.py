"""A model hub on 127.0.0.1 that speaks as much of the Hugging Face protocol as huggingface_hub needs to download."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """`repos`: name → revision → file name → bytes. `gated`: repositories that need the bearer token `token`."""

    repos: dict[str, dict[str, dict[str, bytes]]]
    gated: set[str] = field(default_factory=set)
    token: str = "hf_good"
    status: int = 0  # when set, every answer is this error
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, Authorization)
    url: str = ""

    def downloaded(self) -> set[str]:
        return {path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}


def commit_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


@contextmanager
def running_hub(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.reply(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            authorization = self.headers.get("Authorization", "")
            hub.requests.append((self.command, path, authorization))
            if hub.status:
                return self.refuse(hub.status, "Broken")
            parts = path.removeprefix("/api/models/").lstrip("/").split("/")
            repo = "/".join(parts[:2])
            if repo not in hub.repos:
                return self.refuse(404, "RepoNotFound")
            if repo in hub.gated and authorization != f"Bearer {hub.token}":
                return self.refuse(403, "GatedRepo")
            revision = parts[3] if len(parts) > 3 else "main"
            revisions = hub.repos[repo]
            names = {commit_of(repo, name): name for name in revisions} | {name: name for name in revisions}
            if revision not in names:
                return self.refuse(404, "RevisionNotFound")
            commit, files = commit_of(repo, names[revision]), revisions[names[revision]]
            if parts[2:3] == ["resolve"]:
                name = "/".join(parts[4:])
                if name not in files:
                    return self.refuse(404, "EntryNotFound")
                etag = hashlib.sha1(files[name]).hexdigest()
                return self.reply(200, files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
            if parts[2:3] == ["tree"]:
                listing: object = [
                    {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                    for name, raw in files.items()
                ]
            else:
                listing = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self.reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

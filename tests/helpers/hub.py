"""A hub on this machine, which counts what it sends and can misbehave."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Larger files are stored as huggingface.co stores them: with a SHA-256, behind a signed URL.
LARGE_BYTES = 2**14


@dataclass
class Fault:
    """What to do in place of one answer: a status with headers, or a changed body."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None  # bytes of the body after which the connection is closed
    change: Callable[[bytes], bytes] | None = None


class Hub:
    """Serves folders as repositories, one commit each.

    Attributes:
        sent: bytes of bodies, by file.
        requests: of each kind, as "GET resolve", "GET cdn", "GET api".
        faults: the next answers to requests for parts of weight files, in order.
        token: what a client must present, None: nothing.
        commit: that it names for every folder.
        without_ranges: it sends whole files alone.
        expired: signed URLs of so many generations are refused.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.sent: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.ranges: list[tuple[str, int, int]] = []
        self.tokens_at_cdn: list[str] = []
        self.faults: list[Fault] = []
        self.token: str | None = None
        self.commit = COMMIT
        self.without_ranges = False
        self.signs = True
        self.generation = 0
        self.on_range: Callable[[], None] = lambda: None
        self.lock = threading.Lock()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight files that were sent."""
        return sum(n for name, n in self.sent.items() if name.endswith((".safetensors", ".gguf")))

    def expire(self) -> None:
        """Refuse all signed URLs made so far."""
        self.generation += 1


@contextmanager
def serving(hub: Hub, address: str = "127.0.0.1") -> Iterator[str]:
    """The endpoint of the hub while the block runs. Its signed URLs name another host."""

    class Handler(_Handler):
        of = hub

    with _Server((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def used(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """huggingface_hub asks this hub, here and in processes that are started, and has this cache."""
    with serving(hub) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that was killed is no error."""


class _Handler(BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Be silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if api := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path):
            self._count("api")
            if self._allowed():
                self._describe(api[1])
        elif file := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._count("resolve")
            if self._allowed():
                self._file(file[1], file[3])
        elif signed := re.fullmatch(r"/cdn/(\d+)/(.+)/([^/]+)", path):
            self._count("cdn")
            if "Authorization" in self.headers:
                self.of.tokens_at_cdn.append(self.headers["Authorization"])
            if int(signed[1]) < self.of.generation:
                self._send(403, b"expired")
            else:
                self._body(self.of.folders[signed[2]] / signed[3])
        else:
            self._send(404, b"")

    def _count(self, kind: str) -> None:
        with self.of.lock:
            self.of.requests[f"{self.command} {kind}"] += 1

    def _allowed(self) -> bool:
        allowed = self.of.token is None or self.headers.get("Authorization") == (
            f"Bearer {self.of.token}"
        )
        if not allowed:
            self._send(401, b"")
        return allowed

    def _describe(self, repo: str) -> None:
        if repo not in self.of.folders:
            self._send(404, b"{}")
            return
        files = []
        for file in sorted(self.of.folders[repo].iterdir()):
            if file.is_file():
                entry: dict[str, Any] = {"rfilename": file.name, "size": file.stat().st_size}
                if file.stat().st_size > LARGE_BYTES:
                    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
                    entry["lfs"] = {"size": entry["size"], "sha256": sha256, "pointerSize": 134}
                files.append(entry)
        content = {
            "id": repo,
            "sha": self.of.commit,
            "siblings": files,
            "private": False,
            "tags": [],
        }
        self._send(200, json.dumps({**content, "downloads": 0, "likes": 0}).encode())

    def _file(self, repo: str, name: str) -> None:
        file = self.of.folders.get(repo, Path("/none")) / name
        if not file.is_file():
            self._send(404, b"")
        elif self.of.signs and file.stat().st_size > LARGE_BYTES:
            host = self.headers["Host"].replace("127.0.0.1", "localhost")
            url = f"http://{host}/cdn/{self.of.generation}/{repo}/{name}"
            self._send(302, b"", {"Location": url})
        else:
            self._body(file)

    def _body(self, file: Path) -> None:
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.command == "HEAD":
            self._send(200, b"")
            return
        status, headers, fault = 200, {"Accept-Ranges": "bytes"}, None
        start, last = 0, size - 1
        weights = file.suffix in (".safetensors", ".gguf")
        if wanted and not self.of.without_ranges:
            start, last = int(wanted[1]), min(int(wanted[2]), size - 1)
            status = 206
            headers["Content-Range"] = f"bytes {start}-{last}/{size}"
            with self.of.lock:
                self.of.ranges.append((file.name, start, last + 1))
        with file.open("rb") as stream:
            stream.seek(start)
            data = stream.read(last + 1 - start)
        if weights and wanted:
            self.of.on_range()
            with self.of.lock:
                fault = self.of.faults.pop(0) if self.of.faults else None
        if fault is not None and fault.status is not None:
            self._send(fault.status, b"", fault.headers)
            return
        if fault is not None and fault.change is not None:
            data = fault.change(data)
        cut = len(data) if fault is None or fault.cut_at is None else min(fault.cut_at, len(data))
        with self.of.lock:
            self.of.sent[file.name] += cut
        self._send(status, data, {**headers, **(fault.headers if fault else {})}, cut)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body[:cut])
            except OSError:
                self.close_connection = True
        if cut is not None and cut < len(body):
            self.wfile.flush()
            self.close_connection = True

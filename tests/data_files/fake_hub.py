"""A local server that speaks as much of the hub's and of GitHub's API as `launch.py fetch` needs, faults included."""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from sage_ray.fetch import command as fetch
from tests.conftest import POLICY

REPO = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
COMMIT = "c0ffee" * 6 + "c0ff"


def run(to: Path, *arguments: str) -> Path:
    parser = argparse.ArgumentParser()
    fetch.add_arguments(parser)
    return fetch.run(parser.parse_args([*(arguments or ("policy",)), "--to", str(to)]))


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


PIPELINE = files(POLICY)


class Request(NamedTuple):
    """What was asked and how many bytes of a file went out."""

    path: str
    range: str | None
    token: str | None
    sent: int


class Fault:
    """How one file is served wrongly, `times` times (None: always)."""

    def __init__(self, times: int | None = None, **how: object) -> None:
        self.times, self.how = times, how

    def take(self) -> dict:
        if self.times is not None:
            if self.times == 0:
                return {}
            self.times -= 1
        return self.how


class FakeHub:
    """Repositories in memory. Large files go to a second origin, as the hub sends them to a CDN.

    faults: path -> Fault with status, headers, cut_after (bytes a response), reset (the cut is a reset connection),
    stall_s, no_range, no_length, body, bytes_per_s.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.raw: dict[str, bytes] = {}
        self.lfs_from = 1000
        self.faults: dict[str, Fault] = {}
        self.listing: dict[str, Callable[[dict], dict]] = {}
        self.requests: list[Request] = []
        self._servers = [_serve(self) for _ in range(2)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def sent(self, name: str) -> int:
        """Bytes of the file that went out so far."""
        return sum(request.sent for request in self.requests if request.path.endswith("/" + name))

    def info(self, repo: str) -> dict:
        """What GET /api/models/REPO/revision/R?blobs=true answers."""
        siblings = []
        for name, content in self.repos[repo].items():
            blob = b"blob %d\0" % len(content) + content
            entry = {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(blob).hexdigest()}
            if len(content) >= self.lfs_from:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        answer = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
        return self.listing.get(repo, lambda same: same)(answer)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up, or are killed, are part of the tests."""


def _serve(hub: FakeHub) -> ThreadingHTTPServer:
    class Bound(_Handler):
        pass

    Bound.hub = hub
    server = _Server(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.faults[path].take() if path in self.hub.faults else {}
        if "status" in fault:
            return self._small(path, fault["status"], b'{"error": "no"}', fault.get("headers", {}))
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").split("/revision/")[0]
            if repo not in self.hub.repos:
                return self._small(path, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return self._small(path, 200, json.dumps(self.hub.info(repo)).encode(), {})
        if path in self.hub.raw:
            return self._file(path, self.hub.raw[path], fault)
        repo, _, rest = path.removeprefix("/cdn").lstrip("/").partition(f"/resolve/{COMMIT}/")
        content = self.hub.repos.get(repo, {}).get(rest)
        if content is None:
            return self._small(path, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if len(content) >= self.hub.lfs_from and not path.startswith("/cdn"):
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
            place = f"{self.hub.cdn}/cdn{path}"
            return self._small(path, 302, b"", {"Location": place, "X-Repo-Commit": COMMIT, "ETag": '"x"', **linked})
        self._file(path, content, fault)

    def _small(self, path: str, status: int, body: bytes, headers: dict) -> None:
        self._log(path, 0)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, path: str, content: bytes, fault: dict) -> None:
        """The file or its range, cut, stalled or changed as the fault says."""
        content = fault.get("body", content)
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not fault.get("no_range") else 0
        self.send_response(206 if start else 200)
        if not fault.get("no_length"):
            self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        body = content[start : start + fault["cut_after"]] if "cut_after" in fault else content[start:]
        self._log(path, len(body))
        step = int(fault.get("bytes_per_s", 2**40)) // 20 or 1
        for i in range(0, len(body), min(step, 1 << 20)):
            self.wfile.write(body[i : i + min(step, 1 << 20)])
            if "bytes_per_s" in fault:
                time.sleep(0.05)
        if "cut_after" in fault or "stall_s" in fault:
            self.wfile.flush()
            time.sleep(float(fault.get("stall_s", 0)))
            self.close_connection = True
        if "reset" in fault:
            time.sleep(0.1)  # a reset also drops what the other side has not read yet
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.wfile.close()
            self.connection.close()

    def _log(self, path: str, sent: int) -> None:
        token = self.headers.get("Authorization")
        if self.command != "HEAD":
            self.hub.requests.append(Request(path, self.headers.get("Range"), token, sent))

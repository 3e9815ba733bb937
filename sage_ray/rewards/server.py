"""A scorer as a service, in the format that `sage_ray.rewards.remote` describes. Standard library only.

    python -m sage_ray.rewards.server --scorer my_module:MyScorer --options '{"strength": 2}' --port 8500
    python -m sage_ray.rewards.server --scorer videoalign:FOLDER --options '{"device": "cuda"}' --port 8500

Requests are read side by side and scored one at a time. With SAGE_REWARD_TOKEN set, only requests that carry the token
are answered. SIGTERM stops it after the requests it has begun. Left out: TLS and rate limits, which a proxy does.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import safetensors

from sage_ray.rewards.remote import TOKEN_VARIABLE, WIRE_VERSION, check_token, parse_object
from sage_ray.rewards.user_scorer import CheckedScorer, construct, load_user_scorer, one_line
from sage_ray.rewards.video_input import check_clip
from sage_ray.rewards.videoalign import VideoAlignScorer

MAX_BODY_BYTES = 1 << 30
READ_TIMEOUT_S = 30.0
"""Longest silence of a client in the middle of its request."""
DRAIN_S = 10.0
"""How long a refused body is read and dropped, so that the client reads the refusal instead of a reset."""

logger = logging.getLogger("sage_ray")


class RefusedError(Exception):
    """A request that is answered with a status and a reason instead of scores."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, " ".join(reason.split())


class ScoreServer(ThreadingHTTPServer):
    """Serves one scorer; `server_close` waits for the requests that were begun."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, scorer: CheckedScorer, address: tuple[str, int], max_bytes: int, token: str | None = None):
        """address: host and port, port 0 takes a free one. Raises: OSError when it is taken."""
        self.scorer, self.max_bytes, self.lock = scorer, max_bytes, threading.Lock()
        self.authorization = None if token is None else f"Bearer {token}".encode()
        super().__init__(address, Handler)

    def score(self, body: bytes) -> dict[str, Any]:
        """The reply to a request. Raises: RefusedError 400 for the request, 500 with what the scorer raised."""
        try:
            videos, prompts, fps = decode_request(body)
        except ValueError as error:
            raise RefusedError(400, str(error)) from error
        with self.lock:
            try:
                scores = self.scorer.score(videos, prompts, fps)
            except Exception as error:  # a scorer may raise anything; the client gets it, the log its traceback
                logger.exception("the scorer failed")
                raise RefusedError(500, one_line(error)) from error
        return encode_reply(scores, self.scorer.parts)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or a bug: logged, never a reason to stop serving."""
        logger.exception("request of %s failed", client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection, one request."""

    server: ScoreServer
    server_version, sys_version = "sage-reward", ""
    timeout = READ_TIMEOUT_S
    unread = 0

    def do_GET(self) -> None:
        """GET /parts."""
        self._answer("/parts", lambda: {"parts": list(self.server.scorer.parts), "version": WIRE_VERSION})

    def do_POST(self) -> None:
        """POST /score."""
        self._answer("/score", lambda: self.server.score(self._body()))

    def _answer(self, path: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            self._admit(path)
            reply = work()
        except RefusedError as refusal:
            self._send(refusal.status, "text/plain; charset=utf-8", f"{refusal.reason}\n")
            self._drain()
        else:
            self._send(200, "application/json", json.dumps(reply, allow_nan=False))

    def _admit(self, path: str) -> None:
        """Raises: RefusedError 400, 401, 404 or 413; nothing of the body is read before."""
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise RefusedError(400, "Content-Length must be a number of bytes")
        self.unread = int(length)
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.server.authorization is not None and not hmac.compare_digest(given, self.server.authorization):
            raise RefusedError(401, f"the token of {TOKEN_VARIABLE} is needed, as Authorization: Bearer TOKEN")
        if self.path != path:
            raise RefusedError(404, "only GET /parts and POST /score are answered")
        if self.unread > self.server.max_bytes:
            raise RefusedError(413, f"the body has {length} bytes, at most {self.server.max_bytes} are taken")

    def _body(self) -> bytes:
        if "Content-Length" not in self.headers:
            raise RefusedError(411, "Content-Length is needed")
        wanted, self.unread = self.unread, 0
        body = self.rfile.read(wanted)
        if len(body) != wanted:
            raise RefusedError(400, f"the body ended after {len(body)} of {wanted} bytes")
        return body

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        self.connection.settimeout(DRAIN_S)
        while self.unread > 0 and time.monotonic() < deadline:
            dropped = len(self.rfile.read(min(self.unread, 1 << 20)))
            self.unread = self.unread - dropped if dropped else 0

    def log_message(self, format: str, *args: Any) -> None:
        """Into our log, one line; headers, and so the token, are never part of it."""
        logger.info("%s %r", self.client_address[0], format % args)


def decode_request(body: bytes) -> tuple[list[np.ndarray], list[str], float]:
    """Clips uint8 [T, H, W, 3], prompts and fps of a request. Raises: ValueError saying what is wrong with it."""
    try:
        tensors = dict(safetensors.deserialize(body))
    except safetensors.SafetensorError as error:
        raise ValueError(f"body: not safetensors ({error})") from None
    metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    if "request" not in metadata:
        raise ValueError("body: the metadata must hold request")
    fields = parse_object(metadata["request"])
    prompts, fps = fields.get("prompts"), fields.get("fps")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("request.prompts: must be a list of texts")
    if not (isinstance(fps, float) and math.isfinite(fps) and fps > 0):
        raise ValueError(f"request.fps={fps!r:.200}: must be the frames per second that the clips play at, above 0")
    names = [f"video_{i}" for i in range(len(prompts))]
    if tensors.keys() != set(names):
        raise ValueError(f"body: {len(prompts)} prompts need as many tensors video_0, video_1, ..., got {len(tensors)}")
    return [_clip(tensors[name], name) for name in names], prompts, fps


def _clip(tensor: dict[str, Any], name: str) -> np.ndarray:
    if tensor["dtype"] != "U8":
        raise ValueError(f"{name}: must be uint8 with values 0..255, is {tensor['dtype']}")
    video = np.frombuffer(tensor["data"], np.uint8).reshape(tensor["shape"])
    check_clip(video, name)
    return video


def encode_reply(scores: np.ndarray, parts: tuple[str, ...]) -> dict[str, Any]:
    """The reply for scores float64 [B, len(parts)]: a number that is not finite is null, with its reason in errors."""
    rows = [[value if math.isfinite(value) else None for value in row] for row in scores.tolist()]
    errors = [
        ", ".join(f"{part} is {value}" for part, value in zip(parts, row) if not math.isfinite(value)) or None
        for row in scores.tolist()
    ]
    return {"parts": list(parts), "scores": rows, "errors": errors}


def load_scorer(name: str, options: Mapping[str, Any]) -> CheckedScorer:
    """ "module:Class" or "videoalign:FOLDER". Raises: ValueError naming it and the rule."""
    kind, _, folder = name.partition(":")
    if kind == "videoalign":
        return construct(name, partial(VideoAlignScorer, folder), options)
    return load_user_scorer(name, options)


def serve(server: ScoreServer) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests that were begun. Only from the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # shutdown waits for the loop that this thread runs, so it needs a thread of its own
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
    with server:
        host, port = server.server_address[:2]
        print(f"serving {', '.join(server.scorer.parts)} on http://{host}:{port}", flush=True)
        server.serve_forever()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scorer", required=True, help="module:Class or videoalign:FOLDER")
    parser.add_argument("--options", type=json.loads, default="{}", help="JSON object, keywords of the scorer")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--max-bytes", type=int, default=MAX_BODY_BYTES, help="largest request body")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        if token is not None:
            check_token(token, TOKEN_VARIABLE)
        scorer = load_scorer(args.scorer, args.options)
        server = ScoreServer(scorer, (args.host, args.port), args.max_bytes, token)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    serve(server)


if __name__ == "__main__":
    main()

"""A scorer behind a url: client of `sage_ray.rewards.server`, or of any service that speaks the same format.

GET /parts answers {"parts": ["VQ", ...], "version": 1}. POST /score takes one batch as safetensors: tensors video_0,
video_1, ... uint8 [T, H, W, 3], and metadata {"request": '{"prompts": ["...", ...], "fps": 8.0}'}. It answers
{"parts": [...], "scores": [[...], ...], "errors": [null | "text", ...]}: a row that holds null has its reason in
errors, any other row has null there. A token travels as "Authorization: Bearer TOKEN".
"""

from __future__ import annotations

import json
import math
import reprlib
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import numpy as np
import safetensors.numpy

from sage_ray.rewards.user_scorer import check_parts
from sage_ray.rewards.video_input import check_clip

WIRE_VERSION = 1
TOKEN_VARIABLE = "SAGE_REWARD_TOKEN"
RETRIED = (502, 503, 504)
RETRY_WAIT_S = 1.0
MAX_REPLY_BYTES = 16 << 20


class RemoteScorer:
    """Scores clips by asking a service; equal to the service's own scorer bit by bit.

    parts: what the service said at construction. last_errors: of the latest `score`, one reason or None a clip.
    One object serves one thread, as `last_errors` belongs to its latest call.
    """

    def __init__(self, url: str, timeout_s: float, retries: int = 1, token: str | None = None):
        """Ask the service for its parts.

        Args: url: base, http or https. timeout_s: above 0; bounds connecting, sending, the wait for an answer and
            reading it, each. retries: further attempts after a connection error or status 502, 503, 504; a timeout is
            final, for a second request would queue behind the first. token: sent with every request, never shown.
        Raises: ValueError naming argument or url and rule; ConnectionError naming the url when nothing answers.
        """
        check_url(url)
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s={timeout_s!r}: must be a number of seconds above 0")
        if retries < 0:
            raise ValueError(f"retries={retries!r}: must be at least 0")
        if token is not None:
            check_token(token, "token")
        self.url, self.timeout_s, self.retries, self._token = url.rstrip("/"), timeout_s, retries, token
        self.last_errors: list[str | None] = []
        try:
            self.parts = self._ask_parts()
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def score(self, videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> np.ndarray:
        """As `Scorer.score`. A row of which the service could not have one number is nan, its reason in last_errors.

        Raises: ValueError naming the clip or prompt that is wrong, before anything is sent; ConnectionError naming
            the url when it does not answer; RuntimeError naming the url when it refuses or its answer is wrong.
        """
        self.last_errors = []
        reply = self._ask("/score", encode_request(videos, prompts, fps))
        try:
            scores, self.last_errors = decode_reply(reply, self.parts, len(videos))
        except ValueError as error:
            raise RuntimeError(self._text(f"/score answered with {error}")) from error
        return scores

    def _ask_parts(self) -> tuple[str, ...]:
        try:
            reply = parse_object(self._ask("/parts", None))
            if reply.get("version") != WIRE_VERSION:
                raise ValueError(f"version {reprlib.repr(reply.get('version'))}, must be {WIRE_VERSION}")
            return check_parts(reply.get("parts"), "wrong parts")
        except ValueError as error:
            raise RuntimeError(self._text(f"/parts answered with {error}")) from error

    def _ask(self, path: str, body: bytes | None) -> bytes:
        """One request, repeated as `retries` allows. Raises: ConnectionError, RuntimeError for a status."""
        for left in reversed(range(self.retries + 1)):
            try:
                return self._open(path, body)
            except HTTPError as error:
                if error.code not in RETRIED or not left:
                    raise RuntimeError(self._text(f"{path} answered {error.code}: {_reason(error)}")) from error
            except (OSError, HTTPException) as error:
                cause = error.reason if isinstance(error, URLError) else error
                if isinstance(cause, TimeoutError):
                    raise ConnectionError(self._text(f"{path}: no answer within {self.timeout_s:g} s")) from error
                if not left:
                    text = f"{path}: no answer in {self.retries + 1} attempts, the last: {_one_line(str(cause))}"
                    raise ConnectionError(self._text(text)) from error
            time.sleep(RETRY_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    def _open(self, path: str, body: bytes | None) -> bytes:
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        asked = request.Request(self.url + path, body, headers)
        with _opener().open(asked, timeout=self.timeout_s) as answer:
            return self._read(answer, path)

    def _read(self, answer: Any, path: str) -> bytes:
        """The whole reply, within timeout_s and MAX_REPLY_BYTES even when it comes one byte at a time."""
        deadline, reply = time.monotonic() + self.timeout_s, bytearray()
        while chunk := answer.read1(1 << 16):
            reply += chunk
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(reply) > MAX_REPLY_BYTES:
                raise RuntimeError(self._text(f"{path} answered with more than {MAX_REPLY_BYTES} bytes"))
        if answer.length:
            raise ConnectionError(f"the reply ended {answer.length} bytes early")
        return bytes(reply)

    def _text(self, text: str) -> str:
        """A message that names the url and cannot show the token, whatever the service echoed."""
        return f"{self.url}{text if self._token is None else text.replace(self._token, '***')}"


def encode_request(videos: Sequence[np.ndarray], prompts: Sequence[str], fps: float) -> bytes:
    """The body of POST /score. Raises: ValueError naming the clip, the prompt or fps."""
    if isinstance(prompts, str) or len(videos) != len(prompts):
        raise ValueError(f"prompts: one text a video is needed, got {len(prompts)} for {len(videos)} videos")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps={fps!r}: must be the frames per second that the clips play at, above 0")
    for i, (clip, prompt) in enumerate(zip(videos, prompts)):
        check_clip(clip, f"videos[{i}]")
        if not isinstance(prompt, str):
            raise ValueError(f"prompts[{i}]={prompt!r:.200}: must be a text")
    metadata = {"request": json.dumps({"prompts": list(prompts), "fps": float(fps)})}
    # safetensors reads the memory of an array as it lies, so a strided view must be copied first
    return safetensors.numpy.save({f"video_{i}": np.ascontiguousarray(v) for i, v in enumerate(videos)}, metadata)


def decode_reply(reply: bytes, parts: tuple[str, ...], num_clips: int) -> tuple[np.ndarray, list[str | None]]:
    """Scores float64 [B, len(parts)], a row with null all nan, and B reasons. Raises: ValueError saying what is wrong.

    A row holds null exactly when it has a reason; every number is finite.
    """
    fields = parse_object(reply)
    if fields.get("parts") != list(parts):
        raise ValueError(f"parts {reprlib.repr(fields.get('parts'))}, must be {list(parts)}")
    rows = _list(fields.get("scores"), num_clips, "scores")
    errors = _list(fields.get("errors"), num_clips, "errors")
    scores = np.full((num_clips, len(parts)), np.nan)
    for i, (row, error) in enumerate(zip(rows, errors)):
        row = _list(row, len(parts), f"scores[{i}]")
        if not all(value is None or isinstance(value, float) and math.isfinite(value) for value in row):
            raise ValueError(f"scores[{i}] {reprlib.repr(row)}, must hold finite numbers or null")
        if not (error is None or isinstance(error, str) and error) or (None in row) != (error is not None):
            raise ValueError(f"errors[{i}] {reprlib.repr(error)} for {reprlib.repr(row)}; a reason belongs to null")
        if error is None:
            scores[i] = row
    return scores, [error and _one_line(error) for error in errors]


def parse_object(text: bytes | str) -> dict[str, Any]:
    """A JSON object, every number a float. Raises: ValueError for anything else, NaN and Infinity included."""
    try:
        parsed = json.loads(text, parse_int=float, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON ({_one_line(str(error))}): {reprlib.repr(text)}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{reprlib.repr(parsed)}, must be a JSON object")
    return parsed


def check_url(url: str) -> None:
    """Raises: ValueError, which shows no user, password or query, unless `url` is a plain http or https base."""
    rule = "must be http://HOST[:PORT][/PATH] or https://..., without user, password, query or fragment"
    try:
        split = urlsplit(url)
        host, _ = split.hostname, split.port
    except ValueError:
        raise ValueError(f"url: {rule}") from None
    shown = f"url={f'{split.scheme}://{host}'!r}"
    if split.scheme not in ("http", "https") or not host or any(mark in url for mark in "@?#"):
        raise ValueError(f"{shown}: {rule}")
    if not all("!" <= character <= "~" for character in url):
        raise ValueError(f"{shown}: must be ASCII without spaces")


def check_token(token: str, name: str) -> None:
    """Raises: ValueError, which does not show the token, unless it can travel in a header."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{name}: must be visible ASCII characters without spaces, at least one")


def _opener() -> request.OpenerDirector:
    """http and https, with the environment's proxies; no redirects, files or ftp."""
    opener = request.OpenerDirector()
    handlers = (request.HTTPHandler, request.HTTPSHandler, request.HTTPDefaultErrorHandler, request.HTTPErrorProcessor)
    for handler in (request.ProxyHandler, *handlers):
        opener.add_handler(handler())
    return opener


def _reason(error: HTTPError) -> str:
    """What a refusal says, on one line."""
    if 300 <= error.code < 400:
        return "redirects are not followed"
    try:
        with error:
            return _one_line(error.read1(2000).decode("utf-8", "replace")) or str(error.reason)
    except (OSError, HTTPException):
        return str(error.reason)


def _list(value: object, length: int, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{name} {reprlib.repr(value)}, must be a list of {length}")
    return value


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")

"""Remote scoring: a real server, in a process and in a thread, equals the local scorer bitwise and fails in words."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sage_ray.rewards import remote, server
from sage_ray.rewards.remote import RemoteScorer, decode_reply, encode_request
from sage_ray.rewards.server import ScoreServer, VideoAlignScorer, decode_request
from sage_ray.rewards.user_scorer import CheckedScorer
from tests.rewards.golden import clip

ROOT = Path(__file__).parents[2]
CLIPS = [clip(seed, 9, 48, 64) for seed in (1, 2)] + [clip(3, 5, 32, 32)]
PROMPTS = ["a red boat", "snow ☃ \ud800 \u2028", ""]
TOKEN = "s3cret-t0ken"
MODULE = """
import time
import numpy as np

class Slow:
    parts = ("a",)
    def __init__(self, started, seconds):
        self.started, self.seconds = started, seconds
    def score(self, videos, prompts, fps):
        open(self.started, "w").close()
        time.sleep(self.seconds)
        return np.full((len(videos), 1), 0.1)
"""


class Statistics:
    """Numbers whose every bit matters, of pixels, prompt and fps."""

    parts = ("mean", "large", "tiny")

    def score(self, videos, prompts, fps):
        means = [[video.mean() / 3 + len(prompt), 1e300 / (fps * 7), -5e-324] for video, prompt in zip(videos, prompts)]
        return np.array(means).reshape(-1, 3)


class Function:
    """A scorer of one part that calls what it was given."""

    parts = ("a",)

    def __init__(self, function):
        self.function = function

    def score(self, videos, prompts, fps):
        return self.function(videos)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(remote, "RETRY_WAIT_S", 0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextlib.contextmanager
def serving(scorer, max_bytes=1 << 24, token=None) -> Iterator[str]:
    """The url of a server in a thread."""
    with ScoreServer(CheckedScorer(scorer, "mine"), ("127.0.0.1", 0), max_bytes, token) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@contextlib.contextmanager
def process(*arguments, env=None) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server process on a free port, and its url."""
    command = [sys.executable, "-m", "sage_ray.rewards.server", "--port", "0", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout
            assert child.stderr
            line = child.stdout.readline()
            assert line.startswith("serving "), child.stderr.read()
            yield child, line.split()[-1]
        finally:
            child.kill()


@contextlib.contextmanager
def slow_process(tmp_path, seconds):
    (tmp_path / "slow_for_test.py").write_text(MODULE)
    started = tmp_path / "started"
    options = json.dumps({"started": str(started), "seconds": seconds})
    arguments = ("--scorer", "slow_for_test:Slow", "--options", options)
    with process(*arguments, env={"PYTHONPATH": str(tmp_path)}) as (child, url), ThreadPoolExecutor(1) as pool:
        future = pool.submit(RemoteScorer(url, 60.0).score, CLIPS, PROMPTS, 8.0)
        while not started.exists():
            time.sleep(0.01)
        yield child, url, future


@contextlib.contextmanager
def canned(*replies: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A service that answers its n-th connection with the n-th bytes and hangs up; and the requests it saw."""
    seen: list[bytes] = []

    def answer():
        for reply in replies:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5)
                data = connection.recv(1 << 16)
                wanted = int((data.lower().split(b"content-length: ") + [b"0"])[1].split(b"\r")[0])
                while len(data.split(b"\r\n\r\n", 1)[1]) < wanted:
                    data += connection.recv(1 << 16)
                seen.append(data)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        thread.join()


def http_reply(body: str, status="200 OK", headers="") -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body.encode())}\r\n{headers}\r\n{body}".encode()


PARTS = http_reply('{"parts": ["a"], "version": 1}')
FINE = http_reply('{"parts": ["a"], "scores": [[0.5]], "errors": [null]}')


def post(url: str, body: bytes, **headers) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/score", body, headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_equals_the_local_scorer():
    with serving(Statistics()) as url:
        scorer = RemoteScorer(url + "/", 10.0)
        assert scorer.parts == Statistics.parts
        for videos, prompts in ((CLIPS, PROMPTS), (CLIPS[:1], PROMPTS[:1]), ([], [])):
            scores = scorer.score(videos, prompts, 7)
            assert scores.dtype == np.float64
            assert scores.tobytes() == Statistics().score(videos, prompts, 7).tobytes()
            assert scores.shape == (len(videos), 3)
            assert scorer.last_errors == [None] * len(videos)


def test_videoalign_in_a_process_equals_the_local_one(golden_folder):
    with process("--scorer", f"videoalign:{golden_folder}") as (child, url):
        scorer = RemoteScorer(url, 60.0)
        assert scorer.parts == ("VQ", "MQ", "TA")
        local = VideoAlignScorer(str(golden_folder)).score(CLIPS, ["a", "b", "c"], 8.0)
        assert scorer.score(CLIPS, ["a", "b", "c"], 8.0).tobytes() == local.tobytes()
        with pytest.raises(RuntimeError, match="/score answered 500: ValueError: .*special token"):
            scorer.score(CLIPS[:1], ["<|im_end|>"], 8.0)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


def test_request_round_trip_copies_strided_clips():
    strided = [CLIPS[0][::2, ::-1, 1:, ::-1], np.broadcast_to(np.uint8(7), (2, 4, 4, 3))]
    videos, prompts, fps = decode_request(encode_request(strided, PROMPTS[:2], 7))
    assert all(np.array_equal(a, b) and a.dtype == np.uint8 for a, b in zip(videos, strided, strict=True))
    assert (prompts, fps) == (PROMPTS[:2], 7.0)


def test_concurrent_clients_are_scored_one_at_a_time():
    running = []

    def one_at_a_time(videos):
        running.append(1)
        time.sleep(0.02)
        assert len(running) == 1
        running.pop()
        return np.array([[video.mean()] for video in videos])

    with serving(Function(one_at_a_time)) as url, ThreadPoolExecutor(8) as pool:
        batches = [[np.full((2, 4, 4, 3), i, np.uint8)] * (i % 3 + 1) for i in range(16)]
        replies = pool.map(lambda videos: RemoteScorer(url, 10.0).score(videos, [""] * len(videos), 8.0), batches)
        for i, scores in enumerate(replies):
            assert scores.tolist() == [[i]] * (i % 3 + 1)


def test_numbers_that_are_not_finite_become_nan_rows_with_a_reason():
    result = np.array([[1.0, np.nan], [-np.inf, np.inf], [3.0, 4.0]])
    scorer = Function(lambda _: result)
    scorer.parts = ("a", "b")
    with serving(scorer) as url:
        client = RemoteScorer(url, 10.0)
        np.testing.assert_array_equal(client.score(CLIPS, PROMPTS, 8.0), [[np.nan] * 2, [np.nan] * 2, [3.0, 4.0]])
        assert client.last_errors == ["b is nan", "a is -inf, b is inf", None]


def test_scorer_errors_travel_and_the_server_goes_on():
    def fail(videos):
        if len(videos) == 2:
            raise KeyError("no\nweights")
        return np.zeros((len(videos) + (len(videos) == 3), 1))

    with serving(Function(fail)) as url:
        client = RemoteScorer(url, 10.0)
        with pytest.raises(RuntimeError, match=rf"^{url}/score answered 500: KeyError: 'no\\nweights'$"):
            client.score(CLIPS[:2], PROMPTS[:2], 8.0)
        with pytest.raises(RuntimeError, match=r"500: ValueError: mine: score must .* returned float64 \[4, 1\]$"):
            client.score(CLIPS, PROMPTS, 8.0)
        assert client.score(CLIPS[:1], PROMPTS[:1], 8.0).tolist() == [[0.0]]


def test_slow_scorer_is_not_asked_twice():
    calls, release = [], threading.Event()

    def slow(videos):
        calls.append(1)
        release.wait(10)
        return np.zeros((len(videos), 1))

    with serving(Function(slow)) as url:
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=f"^{url}/score: no answer within 0.3 s$"):
            RemoteScorer(url, 0.3).score(CLIPS, PROMPTS, 8.0)
        assert time.monotonic() - start < 3
        release.set()
    assert calls == [1]


def test_server_killed_in_mid_request(tmp_path):
    with slow_process(tmp_path, 60.0) as (child, url, future):
        child.kill()
        with pytest.raises(
            ConnectionError, match=f"^{url}/score: no answer in 2 attempts, the last: .*(refused|reset)"
        ):
            future.result(20)


def test_sigterm_finishes_the_request_that_was_begun(tmp_path):
    with slow_process(tmp_path, 1.0) as (child, url, future):
        child.send_signal(signal.SIGTERM)
        assert future.result(20).tolist() == [[0.1]] * 3
        assert child.wait(20) == 0
        with pytest.raises(ConnectionError, match=f"^{url}/parts: no answer in 1 attempts"):
            RemoteScorer(url, 5.0, retries=0)


def test_token(tmp_path):
    (tmp_path / "slow_for_test.py").write_text(MODULE)
    options = json.dumps({"started": str(tmp_path / "started"), "seconds": 0})
    arguments = ("--scorer", "slow_for_test:Slow", "--options", options)
    env = {"PYTHONPATH": str(tmp_path), remote.TOKEN_VARIABLE: TOKEN}
    with process(*arguments, env=env) as (child, url):
        assert RemoteScorer(url, 10.0, token=TOKEN).score(CLIPS, PROMPTS, 8.0).shape == (3, 1)
        for token in (None, "other-t0ken", TOKEN + "x", TOKEN[:-1]):
            with pytest.raises(ValueError, match="/parts answered 401: the token of SAGE_REWARD_TOKEN") as error:
                RemoteScorer(url, 10.0, token=token)
            assert (token or TOKEN) not in str(error.value)
        assert post(url, b"x" * 100, Authorization="Bearer \u00e9")[0] == 401
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=20)
    assert "POST /score" in err
    assert TOKEN not in out + err
    assert "other-t0ken" not in out + err


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (["--scorer", "nowhere_for_test:A"], None, "nowhere_for_test cannot be imported"),
        (["--scorer", "videoalign:/nowhere"], None, "kind='videoalign:/nowhere': the constructor failed: ValueError"),
        (["--scorer", "videoalign:x", "--options", "{"], None, "argument --options"),
        (["--scorer", "nowhere_for_test:A"], "", "SAGE_REWARD_TOKEN: must be visible ASCII"),
        (["--scorer", "nowhere_for_test:A"], "a\u00e9 b", "SAGE_REWARD_TOKEN: must be visible ASCII"),
    ],
)
def test_command_line_refuses_with_words(arguments, token, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["server", "--port", "0", *arguments])
    if token is not None:
        monkeypatch.setenv(remote.TOKEN_VARIABLE, token)
    with pytest.raises(SystemExit) as stop:
        server.main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_huge_body_is_refused_in_words():
    with serving(Statistics(), max_bytes=1000) as url:
        client = RemoteScorer(url, 10.0)
        large = [np.zeros((16, 512, 512, 3), np.uint8)]
        with pytest.raises(RuntimeError, match=r"/score answered 413: the body has \d+ bytes, at most 1000 are taken$"):
            client.score(large, ["a"], 8.0)
        assert client.score([large[0][:1, :4, :4]], ["a"], 8.0).shape == (1, 3)


def test_announced_huge_body_is_never_awaited():
    with serving(Statistics()) as url, socket.create_connection(("127.0.0.1", int(url.split(":")[-1]))) as connection:
        connection.settimeout(5)
        connection.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 413 ")


def test_truncated_body():
    with serving(Statistics()) as url, socket.create_connection(("127.0.0.1", int(url.split(":")[-1]))) as connection:
        connection.settimeout(5)
        connection.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 1000\r\n\r\nshort")
        connection.shutdown(socket.SHUT_WR)
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
        assert reply.startswith(b"HTTP/1.0 400 ")
        assert reply.endswith(b"the body ended after 5 of 1000 bytes\n")


def test_silent_client_is_dropped(monkeypatch):
    monkeypatch.setattr(server.Handler, "timeout", 0.2)
    with serving(Statistics()) as url, socket.create_connection(("127.0.0.1", int(url.split(":")[-1]))) as connection:
        connection.settimeout(5)
        connection.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 1000\r\n\r\nshort")
        assert connection.recv(100) == b""


def body(request: object, **tensors) -> bytes:
    text = request if isinstance(request, str) else json.dumps(request)
    return safetensors.numpy.save(tensors, {"request": text})


VIDEO = np.zeros((2, 4, 4, 3), np.uint8)
ONE = {"prompts": ["a"], "fps": 8.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not safetensors"),
        (b"hello, this is no safetensors", "not safetensors"),
        (encode_request(CLIPS, PROMPTS, 8.0)[:-1], "not safetensors"),
        (safetensors.numpy.save({"video_0": VIDEO}), "must hold request"),
        (b'\x18\0\0\0\0\0\0\0{"__metadata__": null}  ', "must hold request"),
        (body("{", video_0=VIDEO), "malformed JSON"),
        (body("[" * 100000, video_0=VIDEO), "malformed JSON"),
        (body([], video_0=VIDEO), "must be a JSON object"),
        (body({"fps": 8.0}, video_0=VIDEO), "request.prompts: must be a list of texts"),
        (body({"prompts": "a", "fps": 8.0}, video_0=VIDEO), "request.prompts: must be a list of texts"),
        (body({"prompts": [1], "fps": 8.0}, video_0=VIDEO), "request.prompts: must be a list of texts"),
        (body({"prompts": ["a"], "fps": 0}, video_0=VIDEO), "request.fps=0.0: must be"),
        (body({"prompts": ["a"], "fps": True}, video_0=VIDEO), "request.fps=True: must be"),
        (body('{"prompts": ["a"], "fps": NaN}', video_0=VIDEO), "NaN is not JSON"),
        (body('{"prompts": ["a"], "fps": 1e999}', video_0=VIDEO), "request.fps=inf: must be"),
        (body(ONE), "1 prompts need as many tensors video_0, video_1, ..., got 0"),
        (body(ONE, video_1=VIDEO), "1 prompts need as many tensors"),
        (body(ONE, video_0=VIDEO, video_1=VIDEO), "got 2"),
        (body(ONE, video_0=VIDEO.astype(np.float32)), "video_0: must be uint8 with values 0..255, is F32"),
        (body(ONE, video_0=VIDEO[0]), "video_0: must be an array [T, H, W, 3]"),
        (body(ONE, video_0=VIDEO[:0]), "video_0: must be an array [T, H, W, 3]"),
    ],
)
def test_bad_input_is_refused_on_one_line(content, words):
    with serving(Statistics()) as url:
        status, text = post(url, content)
        assert status == 400
        assert words in text
        assert text.count("\n") == 1


def test_other_requests_are_refused():
    with serving(Statistics()) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        for method, path, headers, status in (
            ("GET", "/", {}, 404),
            ("GET", "/score", {}, 404),
            ("POST", "/parts", {}, 404),
            ("POST", "/score", {"Content-Length": "-1"}, 400),
            ("POST", "/score", {"Content-Length": "x"}, 400),
            ("POST", "/score", {"Transfer-Encoding": "chunked"}, 411),
            ("PUT", "/score", {}, 501),
        ):
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            assert reply.status == status, (method, path, headers)
            reply.read()
            connection.close()


@pytest.mark.parametrize("status", ["502 Bad", "503 Busy", "504 Late"])
def test_retries_once_on_a_gateway_error(status):
    bad = http_reply("later", status)
    with canned(bad, PARTS, bad, FINE, bad, bad) as (url, seen):
        client = RemoteScorer(url, 5.0)
        assert client.score(CLIPS[:1], [""], 8.0).tolist() == [[0.5]]
        with pytest.raises(RuntimeError, match=f"^{url}/score answered {status[:3]}: later$"):
            client.score(CLIPS[:1], [""], 8.0)
    assert len(seen) == 6
    assert seen[2] == seen[3]


def test_retries_after_a_dropped_connection_and_a_reply_cut_short():
    with canned(b"", PARTS, FINE[:-3], FINE) as (url, seen):
        assert RemoteScorer(url, 5.0).score(CLIPS[:1], [""], 8.0).tolist() == [[0.5]]
    assert len(seen) == 4


@pytest.mark.parametrize("status", ["400 Bad", "401 No", "413 Large", "500 Broken", "302 Found"])
def test_never_retries_a_refusal_and_shows_no_token(status):
    reply = http_reply(f"no,\nBearer {TOKEN}", status, "Location: http://127.0.0.1:1/\r\n")
    with canned(PARTS, reply) as (url, seen):
        client = RemoteScorer(url, 5.0, token=TOKEN)
        words = "redirects are not followed" if status[0] == "3" else r"no, Bearer \*\*\*"
        with pytest.raises(RuntimeError, match=f"^{url}/score answered {status[:3]}: {words}$"):
            client.score(CLIPS[:1], [""], 8.0)
    assert len(seen) == 2
    assert f"Authorization: Bearer {TOKEN}".encode() in seen[1]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (http_reply("<html>"), "/parts answered with malformed JSON"),
        (http_reply('{"parts": ["a"]}'), "/parts answered with version None, must be 1"),
        (http_reply('{"parts": ["a"], "version": 2}'), "/parts answered with version 2.0, must be 1"),
        (http_reply('{"parts": [], "version": 1}'), "/parts answered with wrong parts: parts must be"),
        (http_reply("no", "404 Not Found"), "/parts answered 404: no"),
        (http_reply("", "404 Not Found"), "/parts answered 404: Not Found"),
    ],
)
def test_construction_refuses_other_services(reply, words):
    with canned(reply) as (url, _), pytest.raises(ValueError, match=f"^{url}{words}"):
        RemoteScorer(url, 5.0)


def test_construction_without_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"^{url}/parts: no answer within 0.2 s$"):
            RemoteScorer(url, 0.2)
    with pytest.raises(ConnectionError, match=f"^{url}/parts: no answer in 2 attempts, the last: .*(refused|reset)$"):
        RemoteScorer(url, 5.0)


def test_reply_that_drips_or_never_ends_is_bounded(monkeypatch):
    def drip():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="no answer within 0.3 s$"):
            RemoteScorer(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.3)
        thread.join()
    monkeypatch.setattr(remote, "MAX_REPLY_BYTES", 20)
    with canned(PARTS) as (url, _), pytest.raises(ValueError, match="/parts answered with more than 20 bytes$"):
        RemoteScorer(url, 5.0)


def reply_of(scores: str, errors: str, parts='["a", "b"]') -> bytes:
    return f'{{"parts": {parts}, "scores": {scores}, "errors": {errors}}}'.encode()


def test_reply_decodes():
    scores, errors = decode_reply(
        reply_of("[[1, -0.0], [null, 2.5], [1e308, 5e-324]]", '[null, "x\\ny", null]'), ("a", "b"), 3
    )
    np.testing.assert_array_equal(scores, [[1, 0], [np.nan, np.nan], [1e308, 5e-324]])
    assert np.signbit(scores[0, 1])
    assert errors == [None, "x y", None]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "malformed JSON"),
        (b"\xff\xfe", "malformed JSON"),
        (b"[" * 100000, "malformed JSON"),
        (b"[1]", "must be a JSON object"),
        (reply_of("[[1, 2]]", "[null]", '["b", "a"]'), r"parts \['b', 'a'\], must be \['a', 'b'\]"),
        (reply_of("[[1, 2]]", "[null]", "null"), "parts None, must be"),
        (reply_of("[]", "[]"), r"scores \[\], must be a list of 1"),
        (reply_of("[[1, 2], [1, 2]]", "[null, null]"), "must be a list of 1"),
        (reply_of("null", "[null]"), "scores None, must be a list of 1"),
        (reply_of("[[1, 2]]", "[]"), r"errors \[\], must be a list of 1"),
        (reply_of("[[1]]", "[null]"), r"scores\[0\] \[1.0\], must be a list of 2"),
        (reply_of("[1]", "[null]"), r"scores\[0\] 1.0, must be a list of 2"),
        (reply_of("[[NaN, 2]]", "[null]"), "NaN is not JSON"),
        (reply_of("[[1, -Infinity]]", '["x"]'), "-Infinity is not JSON"),
        (reply_of("[[1e999, 2]]", "[null]"), "must hold finite numbers or null"),
        (reply_of(f"[[{'9' * 5000}, 2]]", "[null]"), "must hold finite numbers or null"),
        (reply_of("[[true, 2]]", "[null]"), "must hold finite numbers or null"),
        (reply_of('[["1", 2]]', "[null]"), "must hold finite numbers or null"),
        (reply_of("[[null, 2]]", "[null]"), "a reason belongs to null"),
        (reply_of("[[null, 2]]", '[""]'), "a reason belongs to null"),
        (reply_of("[[null, 2]]", "[1]"), "a reason belongs to null"),
        (reply_of("[[1, 2]]", '["x"]'), "a reason belongs to null"),
    ],
)
def test_wrong_reply(reply, words):
    with pytest.raises(ValueError, match=words):
        decode_reply(reply, ("a", "b"), 1)


def test_wrong_reply_names_the_url():
    with (
        canned(PARTS, http_reply("{}")) as (url, _),
        pytest.raises(RuntimeError, match=f"^{url}/score answered with parts"),
    ):
        RemoteScorer(url, 5.0).score(CLIPS[:1], [""], 8.0)


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:80", "file:///etc/passwd", "ftp://h/", "data:,x", "http://", "http://h:x", "http://[h"),
        *(
            f"http://u:{TOKEN}@h",
            f"http://h/?key={TOKEN}",
            "http://h/#a",
            "http://h/a b",
            "http://h/\n",
            "http://h\u00e9",
        ),
    ],
)
def test_wrong_url(url):
    with pytest.raises(ValueError, match="^url.*: must be") as error:
        RemoteScorer(url, 5.0)
    assert TOKEN not in str(error.value)


def test_wrong_arguments():
    for arguments, words in (
        ({"timeout_s": 0}, "timeout_s=0: must be"),
        ({"timeout_s": float("inf")}, "timeout_s=inf: must be"),
        ({"timeout_s": 1, "retries": -1}, "retries=-1: must be"),
        ({"timeout_s": 1, "token": "a\r\nb"}, "token: must be visible ASCII"),
        ({"timeout_s": 1, "token": ""}, "token: must be visible ASCII"),
    ):
        with pytest.raises(ValueError, match=words):
            RemoteScorer("http://127.0.0.1:1", **arguments)
    for (videos, prompts, fps), words in (
        ((CLIPS, "abc", 8.0), "prompts: one text a video"),
        ((CLIPS, PROMPTS[:2], 8.0), "prompts: one text a video is needed, got 2 for 3 videos"),
        ((CLIPS[:1], [None], 8.0), r"prompts\[0\]=None: must be a text"),
        (([CLIPS[0][0]], [""], 8.0), r"videos\[0\]: must be an array"),
        (([CLIPS[0] / 255], [""], 8.0), r"videos\[0\]: must be uint8"),
        ((CLIPS, PROMPTS, 0.0), "fps=0.0: must be"),
        ((CLIPS, PROMPTS, float("nan")), "fps=nan: must be"),
    ):
        with pytest.raises(ValueError, match=words):
            encode_request(videos, prompts, fps)

"""Secrets do not reach what people read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from sage_ray.redact import redact, redacted
from sage_ray.structured_log import LogFile, note, read_log


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:abc123@bucket/runs", "s3://***@bucket/runs"),
        ("https://host/score?x=1&api_key=abc123&y=2", "https://host/score?x=1&api_key=***&y=2"),
        ("https://host/?X-Amz-Signature=ab12&t=1", "https://host/?X-Amz-Signature=***&t=1"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        ("login with hunter2hunter2 failed", "login with *** failed"),
        ("a token of text at /tmp, 12 tokens", "a token of text at /tmp, 12 tokens"),
    ],
)
def test_text(text: str, shown: str) -> None:
    assert redact(text, {"SERVICE_PASSWORD": "hunter2hunter2", "HOME": "/root", "SHORT_TOKEN": "a"}) == shown


def test_settings() -> None:
    given = {
        "path": "s3://me:pw@b/x",
        "max_batch_tokens": 65536,
        "extra": {"mine": {"options": {"api_key": "abc", "password": None, "scale": 2.0}, "kind": "a:B"}},
        "list": ["https://u:p@h"],
    }
    assert redacted(given) == {
        "path": "s3://***@b/x",
        "max_batch_tokens": 65536,
        "extra": {"mine": {"options": {"api_key": "***", "password": None, "scale": 2.0}, "kind": "a:B"}},
        "list": ["https://***@h"],
    }


def test_log_lines_are_json_with_who_speaks(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefghijkl")
    logger = logging.getLogger("sage_ray")
    before = logger.level, list(logger.handlers)
    log = LogFile(tmp_path, "demo")
    logger.warning("key abcdefghijkl\nin <b>two</b> lines \N{GRINNING FACE} %s", "\x00")
    note(step=3, version=7)
    log.write(logging.INFO, "x" * 10_000)
    try:
        raise ValueError("s3://a:b@c")
    except ValueError as error:
        logger.warning("it failed", exc_info=error)
    log.close()
    log.close()
    assert (logger.level, logger.handlers) == before
    first, second, third = read_log(tmp_path)
    assert first["message"] == "key ***\nin <b>two</b> lines \N{GRINNING FACE} \x00" and first["level"] == "WARNING"
    assert [first[name] for name in ("run", "role", "actor", "step", "version")] == [
        "demo", "controller", "controller", None, None,
    ]  # fmt: skip
    assert second["message"] == "x" * 10_000 and (second["step"], second["version"]) == (3, 7)
    assert "s3://***@c" in third["exception"] and "a:b" not in json.dumps(third)
    assert len((tmp_path / "log.jsonl").read_text("utf-8").splitlines()) == 3


def test_only_known_fields_are_noted() -> None:
    with pytest.raises(ValueError, match="weather: must be one of run, role"):
        note(weather="fine")

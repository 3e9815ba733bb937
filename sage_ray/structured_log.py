"""Log lines as JSON, one object a line, with who speaks: run, role, actor, step and policy version.

The driver's lines go to log.jsonl in the run's folder; an actor's go to its standard error, which Ray keeps per actor.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sage_ray.redact import redact

LOGGER = "sage_ray"
FILE_NAME = "log.jsonl"
FIELDS = ("run", "role", "actor", "step", "version")
_context: dict[str, Any] = dict.fromkeys(FIELDS)


def note(**fields: Any) -> None:
    """What the next lines of this process say of themselves: some of FIELDS; None keeps what there is.

    Raises: ValueError for another field.
    """
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(f"{name}: must be one of {', '.join(FIELDS)}")
        if value is not None:
            _context[name] = value


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, FIELDS, message, and the exception where there is one. A message of several
    lines stays one line of the file; secrets are hidden."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, **_context, "message": redact(record.getMessage())}
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(run: str | None = None, actor: str | None = None) -> None:
    """This process's lines go to standard error as JSON."""
    note(run=run, actor=actor, role=actor and actor.partition("-")[0])
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


class LogFile:
    """Lines of this process also go to folder/log.jsonl, from INFO on; a resumed run goes on in the same file.

    Every other handler keeps its own level: the terminal shows what it showed.
    """

    def __init__(self, folder: Path, run: str):
        note(run=run, role="controller", actor="controller")
        _context["step"] = _context["version"] = None
        self._handler = logging.FileHandler(folder / FILE_NAME, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(JsonFormatter())
        self._logger = logging.getLogger(LOGGER)
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self._handler)

    def write(self, level: int, message: str) -> None:
        """A line for the file only, such as one that the terminal has shown already."""
        self._handler.handle(self._logger.makeRecord(LOGGER, level, "", 0, message, (), None))

    def close(self) -> None:
        """The logger is as it was; a second call does nothing."""
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)
        self._handler.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last one without an end is a write in progress and is left out."""
    file = folder / FILE_NAME
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]

"""Logs of servers: the fields of the running task, and lines as text or JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")

_TEXT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"

_fields: ContextVar[Mapping[str, str | int]] = ContextVar("log_fields", default={})  # noqa: B039 - never changed


@contextlib.contextmanager
def bound(**fields: str | int) -> Iterator[None]:
    """Add these fields to the JSON lines of this task and its child tasks. Empty fields are left out."""
    token = _fields.set({**_fields.get(), **{name: value for name, value in fields.items() if value not in ("", 0)}})
    try:
        yield
    finally:
        _fields.reset(token)


def configure(level: str = "INFO", form: str = "text", process: Mapping[str, str | int] | None = None) -> None:
    """Log to stderr, one line for each record. ``process``: fields of every JSON line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process or {}) if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, message, pid; fields of the process and of the task; exception."""

    def __init__(self, process: Mapping[str, str | int]) -> None:
        super().__init__()
        self._process = dict(process)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": os.getpid(),
            **self._process,
            **_fields.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def message_of(line: str) -> str:
    """Return the message of a JSON line; other lines unchanged."""
    if line.startswith('{"time": '):
        with contextlib.suppress(ValueError):
            return str(json.loads(line).get("message", line))
    return line

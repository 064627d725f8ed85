"""JSON lines of logs: their fields, and the fields of the running task."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rlctl.runtime.logs import JsonFormatter, bound, message_of

log = logging.getLogger("rlctl.some.module")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter({"process": "stage", "slot": "actor-0"}))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def last(self) -> dict[str, Any]:
        return dict(json.loads(self.lines[-1]))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)


def test_a_line_names_process_and_slot(lines: Lines) -> None:
    log.warning("%s is\nstale", "a")
    line = lines.last
    assert (line["message"], line["level"], line["logger"]) == ("a is\nstale", "WARNING", "rlctl.some.module")
    assert (line["process"], line["slot"]) == ("stage", "actor-0")
    assert line["time"].endswith("+00:00")
    assert "\n" not in lines.lines[-1]
    assert message_of(lines.lines[-1]) == "a is\nstale"
    assert message_of("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert message_of('{"time": broken') == '{"time": broken'


def test_an_exception_is_in_the_line(lines: Lines) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    assert "ValueError: no" in lines.last["exception"]


async def test_fields_belong_to_a_task_and_the_tasks_that_it_starts(lines: Lines) -> None:
    async def work(operation: str) -> None:
        with bound(operation=operation, update="", epoch=0):
            await asyncio.sleep(0)
            with bound(epoch=3):
                await asyncio.create_task(inner())
            log.info("after")

    async def inner() -> None:
        log.info("inner")

    await asyncio.gather(work("one"), work("two"))
    found = [json.loads(line) for line in lines.lines]
    assert all("update" not in line for line in found)
    assert sorted((line["operation"], line["message"], line.get("epoch", 0)) for line in found) == [
        *(("one", "after", 0), ("one", "inner", 3)),
        *(("two", "after", 0), ("two", "inner", 3)),
    ]
    log.info("outside")
    assert "operation" not in lines.last

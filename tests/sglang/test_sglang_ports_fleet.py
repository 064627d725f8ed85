"""The data ports of two real SGLang servers under updates: nothing stale, nothing lost, nothing left running.

The module comes after test_sglang_fleet.py, which expects the servers at their first version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from models import changed, greedy

from rlctl.demo.tiny import encode
from rlctl.runtime.http_errors import REASON
from rlctl.runtime.http_forwarding import SEQUENCE
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PROMPT = encode("1+2=")
TOKENS = 24
UPDATES = 9
CALLERS = 6
BETWEEN_S = 0.5


def updates(fleet: Fleet, models: dict[str, Any], pauses: tuple[str, ...], done: threading.Event) -> None:
    """Updates in modes of pause."""
    try:
        with contextlib.closing(fleet.publisher("actor", trainer="port")) as publisher:
            for (label, model), pause in zip(list(models.items())[1:], itertools.cycle(pauses), strict=False):
                publisher.update(model, version=label, pause=pause)
                time.sleep(BETWEEN_S)
    finally:
        done.set()


async def call(session: aiohttp.ClientSession, address: str, *, stream: bool) -> tuple[str, list[dict[str, Any]]]:
    """How an answer ended, and its documents."""
    body = {
        "input_ids": PROMPT,
        "stream": stream,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
    }
    async with session.post(f"http://{address}/generate", json=body) as response:
        if REASON in response.headers:
            return response.headers[REASON], []
        assert int(response.headers[SEQUENCE]) > 0
        parts = b""
        try:
            async for part in response.content.iter_any():
                parts += part
        except aiohttp.ClientPayloadError:
            return "broken", []
    if not stream:
        return str(response.status), [json.loads(parts)]
    lines = [line.removeprefix(b"data: ") for line in parts.splitlines() if line]
    assert lines[-1] == b"[DONE]"
    return str(response.status), [json.loads(line) for line in lines[:-1]]


def check(events: list[dict[str, Any]], expected: dict[str, list[int]], *, exact: bool) -> None:
    """The tokens are those of the versions that the answer names. ``exact``: no KV entry outlives its version."""
    tokens = [token for event in events for token in event["output_ids"]]
    spans = events[-1]["meta_info"].get("weight_versions") or []
    assert events[-1]["meta_info"]["weight_version"] in expected
    assert [span["version"] for span in spans if span["version"] not in expected] == []
    if not exact:
        return
    if len({span["version"] for span in spans}) == 1:
        assert tokens == expected[spans[0]["version"]][: len(tokens)]
    elif spans:
        assert tokens[: spans[0]["end"]] == expected[spans[0]["version"]][: spans[0]["end"]]


@pytest.mark.parametrize("pauses", [("abort", "retract"), ("in_place",)], ids=lambda pauses: pauses[0])
async def test_answers_under_updates_are_of_the_versions_that_they_name(
    fleet: Fleet, tiny: tuple[Any, Path], pauses: tuple[str, ...]
) -> None:
    start = f"{pauses[0]}-start"
    fleet.update_weights_from_disk(str(tiny[1]), version=start)
    models = {start: tiny[0]} | {f"{pauses[0]}-{seed}": changed(tiny[0], seed=seed) for seed in range(UPDATES)}
    expected = {label: greedy(model, PROMPT, TOKENS) for label, model in models.items()}
    addresses = [stage.registration.data_address for stage in fleet.status().stages]
    assert len(addresses) > 1
    assert all(addresses)
    done, ended = threading.Event(), Counter[str]()
    answers: list[list[dict[str, Any]]] = []

    async def keep_calling(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            for turn in itertools.count(number):
                if done.is_set():
                    return
                how, events = await call(session, addresses[turn % len(addresses)], stream=turn % 2 == 0)
                ended[how] += 1
                if events:
                    answers.append(events)

    updating = asyncio.create_task(asyncio.to_thread(updates, fleet, models, pauses, done))
    await asyncio.gather(*map(keep_calling, range(CALLERS)))
    await updating
    assert ended["200"] >= 2 * UPDATES, ended
    assert set(ended) <= {"200", "STAGE_NOT_SERVING", "broken", "CANCELLED"}, ended
    for events in answers:
        check(events, expected, exact="in_place" not in pauses)
    assert len({events[-1]["meta_info"]["weight_version"] for events in answers}) > UPDATES // 2
    for stage in fleet.call(v.GetLoadsRequest()).stage_results:
        assert stage.rank_results[0].loads.running == 0

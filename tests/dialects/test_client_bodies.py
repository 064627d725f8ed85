"""What other projects' clients send to generate is answered, or refused by name, in each dialect that claims them."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from client_bodies import SENT, Sent, streams
from http_calls import events, post

from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name']|length }}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> str:
    """Directory of the tiny model's tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("chats")
    for file in tiny[1].glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    (path / "config.json").write_bytes((tiny[1] / "config.json").read_bytes())
    return str(path)


@pytest.fixture
async def http(
    request: pytest.FixtureRequest, torch_fleet: LaunchedFleet, open_gateway: Any, chats: str
) -> AsyncIterator[aiohttp.ClientSession]:
    """A gateway of the parameter's dialect."""
    async with open_gateway(torch_fleet.address, request.param, tokenizer=chats) as http:
        yield http


def cases(sent: tuple[Sent, ...]) -> pytest.MarkDecorator:
    listed = [(dialect, each) for each in sent for dialect in each.dialects]
    return pytest.mark.parametrize(
        ("http", "sent"), listed, indirect=["http"], ids=[f"{dialect}-{each.name}" for dialect, each in listed]
    )


def at(answer: Any, path: str) -> Any:
    """A field of an answer, by its dotted path."""
    return functools.reduce(lambda value, name: value[int(name) if isinstance(value, list) else name],
                            path.split("."), answer)  # fmt: skip


@cases(SENT)
async def test_a_clients_body_is_answered_with_what_it_reads_or_refused_by_name(
    http: aiohttp.ClientSession, sent: Sent, tiny: tuple[Any, Path]
) -> None:
    status, answer = await post(http, sent.body_for(tiny[1]), sent.path, **sent.headers)
    if sent.refused:
        assert (status, answer["error"]["param"]) == (400, sent.refused), answer
        return
    assert status == 200, answer
    for path in sent.reads:
        at(answer, path)


@cases(streams())
async def test_a_clients_stream_comes_to_its_end(
    http: aiohttp.ClientSession, sent: Sent, tiny: tuple[Any, Path]
) -> None:
    async with http.post(sent.path, json={**sent.body_for(tiny[1]), "stream": True}, headers=sent.headers) as response:
        assert response.status == 200, await response.text()
        told = events(await response.text())
    assert told

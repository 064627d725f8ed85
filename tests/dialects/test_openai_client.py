"""What the openai package's client makes of a gateway's answers: its errors, its retries, its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from waiting import eventually

from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import verbs_pb2 as v

EACH = pytest.mark.parametrize("dialect", ["sglang", "slime", "omni", "vllm"])
PROMPT = {"model": "actor", "prompt": "x"}


class Client:
    """The client with its own settings.

    Attributes:
        requests: that it has sent.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self.requests = 0
        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [self._count]})
        self.api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, **settings)

    async def _count(self, _: Any) -> None:
        self.requests += 1


@asynccontextmanager
async def opened(open_gateway: Any, fleet: InProcessFleet, dialect: str, **settings: Any) -> AsyncIterator[Client]:
    async with open_gateway(fleet.server.address, dialect, **settings) as http:
        client = Client(f"http://{http._base_url.authority}")
        async with client.api:
            yield client


def running(fleet: InProcessFleet) -> int:
    return sum(len(stage._engine._running) for stage in fleet.stages.values())  # type: ignore[attr-defined]


@EACH
@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        ({**PROMPT, "echo": True}, openai.BadRequestError, "echo"),
        ({**PROMPT, "max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({**PROMPT, "logprobs": 1000}, openai.BadRequestError, "logprobs"),
        ({**PROMPT, "extra_body": {"spaces": 1, "stop": [1]}}, openai.BadRequestError, "stop"),
        ({**PROMPT, "model": "nobody"}, openai.NotFoundError, "model"),
    ],
)
async def test_a_refusal_is_sent_once_and_names_the_field(
    fleet: InProcessFleet, open_gateway: Any, dialect: str, body: Any, error: type[openai.APIStatusError], field: str
) -> None:
    async with opened(open_gateway, fleet, dialect) as client:
        if field == "model" and dialect in ("sglang", "slime"):
            assert (await client.api.completions.create(**body, max_tokens=1)).model == "nobody", "as SGLang"
            return
        with pytest.raises((error, openai.UnprocessableEntityError)) as caught:
            await client.api.completions.create(**body)
    assert isinstance(caught.value, error) or dialect == "omni", "which says 422"
    assert client.requests == 1
    assert field in caught.value.message
    assert (caught.value.param or "").endswith(field)


@EACH
async def test_models(fleet: InProcessFleet, open_gateway: Any, dialect: str) -> None:
    async with opened(open_gateway, fleet, dialect) as client:
        assert [model.id async for model in client.api.models.list()] == ["actor"]
        assert (await client.api.models.retrieve("actor")).id == "actor"
        sent = client.requests
        with pytest.raises(openai.NotFoundError):
            await client.api.models.retrieve("nobody")
    assert client.requests == sent + 1


@EACH
async def test_a_paused_fleet_is_asked_again_and_answers_once_it_goes_on(
    fleet: InProcessFleet, open_gateway: Any, dialect: str
) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    async with open_gateway(fleet.server.address, dialect, timeout_s=0.2) as http:
        client = Client(f"http://{http._base_url.authority}")
        async with client.api:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.api.completions.create(**PROMPT)
            assert (client.requests, caught.value.status_code) == (3, 503)
            await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
            answer = await client.api.completions.create(**PROMPT, max_tokens=3)
    assert answer.choices[0].text == "0 1 2 "


@EACH
async def test_a_stream_that_is_closed_or_late_ends_at_the_engine(
    fleet: InProcessFleet, open_gateway: Any, dialect: str
) -> None:
    long = {**PROMPT, "max_tokens": 1_000_000}
    async with opened(open_gateway, fleet, dialect) as client:
        stream = await client.api.completions.create(**long, stream=True)
        texts = [(await anext(stream)).choices[0].text for _ in range(3)]
        assert "".join(texts).startswith("0 1")
        assert running(fleet) == 1
        await stream.close()
        await eventually(lambda: running(fleet) == 0)
        sent = client.requests
        with pytest.raises(openai.APITimeoutError):
            await client.api.with_options(timeout=0.3, max_retries=0).completions.create(**long)
        await eventually(lambda: running(fleet) == 0)
    assert client.requests == sent + 1


@EACH
async def test_a_wrong_token_is_an_authentication_error(make_fleet: Any, open_gateway: Any, dialect: str) -> None:
    token = "a token made for this test"
    async with (
        make_fleet(token=token, a=1) as fleet,
        open_gateway(fleet.server.address, dialect, token=token) as http,
    ):
        client = Client(f"http://{http._base_url.authority}")
        async with client.api:
            with pytest.raises((openai.AuthenticationError, openai.PermissionDeniedError)):
                await client.api.completions.create(**PROMPT)
            assert client.requests == 1
            answer = await client.api.with_options(api_key=token).completions.create(**PROMPT, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"

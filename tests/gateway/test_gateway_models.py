"""What a request may call a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from http_calls import post

from rlctl.gateway.backend.service import Generation
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Handler
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1.verbs_pb2 import LoadAdapterRequest

PATHS = {
    "/generate": {"input_ids": [7], "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": [7], "max_tokens": 1},
}
VLLM_PATHS = {"/inference/v1/generate": {"token_ids": [7], "sampling_params": {"max_tokens": 1}}}


async def asked(http: Any, model: str, paths: dict[str, Any] = PATHS) -> list[int]:
    return [(await post(http, {**body, "model": model}, path))[0] for path, body in paths.items()]


@pytest.mark.parametrize("dialect", ["sglang", "slime", "vllm", "omni"])
async def test_a_model_is_also_called_default_and_by_the_path_of_its_checkpoint(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], dialect: str
) -> None:
    path = next(iter(fleet.server.coordinator.roster.fleet().stages)).registration.checkpoint
    paths = {**PATHS, **(VLLM_PATHS if dialect == "vllm" else {})}
    async with make_gateway(fleet, dialect=dialect) as (_, http):
        for name in ("actor", "default", path, f"{path}/"):
            assert await asked(http, name, paths) == [200] * len(paths), name
        assert (await asked(http, "actor:none", paths))[1:] == [404] * (len(paths) - 1)


async def test_served_model_name_of_model_info_is_accepted(fleet: InProcessFleet, make_gateway: Any) -> None:
    async with make_gateway(fleet) as (_, http):
        async with http.get("/get_model_info") as response:
            name = (await response.json())["served_model_name"]
        assert await asked(http, name) == [200, 200]


@pytest.mark.parametrize(("dialect", "status"), [("sglang", 200), ("slime", 200), ("vllm", 404), ("omni", 404)])
async def test_any_name_means_the_only_model_where_the_original_checks_none(
    fleet: InProcessFleet, make_gateway: Any, dialect: str, status: int
) -> None:
    async with make_gateway(fleet, dialect=dialect) as (_, http):
        got, reply = await post(http, {"prompt": [7], "model": "gpt-4"}, "/v1/completions")
        assert got == status, reply
        assert status != 200 or reply["model"] == "gpt-4"
        assert await asked(http, "gpt-4", {"/generate": PATHS["/generate"]}) == [404], "SGLang's has no such field"


async def test_an_unknown_name_may_be_a_misspelled_adapters(
    fleet: InProcessFleet, make_gateway: Any, checkpoint: Callable[[str], str]
) -> None:
    async with make_gateway(fleet) as (server, http):
        await server.fleet.call(LoadAdapterRequest(name="poet", path=checkpoint("poet")))

        async with asyncio.timeout(10):
            while not any(model.adapters for model in await server.fleet.models()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        got, reply = await post(http, {"prompt": [7], "model": "poem"}, "/v1/completions")
        assert (got, reply["error"]["reason"]) == (404, "MODEL_NOT_FOUND")


class Counting:
    """Counts requests."""

    count = 0

    def __init__(self, generation: Generation) -> None:
        del generation

    async def __call__(self, call: Call, handler: Handler) -> Answer:
        Counting.count += 1
        return await handler(call)


@pytest.mark.parametrize("dialect", ["sglang", "slime", "vllm", "omni"])
async def test_openais_client_asks_once_for_what_is_not_supported(
    fleet: InProcessFleet, make_gateway: Any, dialect: str
) -> None:
    paths = (f"{__name__}:Counting",)
    async with make_gateway(fleet, dialect=dialect, middleware_paths=paths) as (server, _):
        Counting.count = 0
        async with openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="none") as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="actor", prompt="x", suffix="y")
        assert refused.value.param == "suffix"
        assert Counting.count == 1

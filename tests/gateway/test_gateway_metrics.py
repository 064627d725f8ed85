"""Metrics of a gateway: requests by their route, samples by their outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from http_calls import post
from scraping import scrape
from waiting import eventually

from rlctl.metrics import definitions
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import verbs_pb2 as v


async def test_requests_and_samples_are_counted(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with make_gateway(fleet, metrics="127.0.0.1:0") as (server, http):
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        assert (await post(http, body))[0] == 200
        assert (await post(http, {**body, "sampling_params": {"max_new_tokens": -4}}))[0] == 400
        for path in ("/no/such/route", "/nor/this"):
            async with http.get(path) as answer:
                assert answer.status == 404
        seen = await scrape(server.metrics_address)
        assert seen.value("rlctl_gateway_requests_total", route="/generate", method="POST", status="200") == 1
        assert seen.value("rlctl_gateway_requests_total", route="/generate", method="POST", status="400") == 1
        assert seen.value("rlctl_gateway_requests_total", route="unlisted", status="404") == 2
        assert seen.value("rlctl_gateway_request_duration_seconds_count", route="/generate") == 2
        assert seen.value("rlctl_gateway_samples_total", model="actor", outcome="ok") == 1
        assert seen.value("rlctl_gateway_tokens_total", model="actor") == 4
        assert seen.value("rlctl_gateway_first_token_seconds_count", model="actor") == 1
        for name in ("inflight", "inflight_bytes", "waiting"):
            assert seen.value(f"rlctl_gateway_{name}") == 0
        own = {name for name in seen.families if name.startswith("rlctl_")}
        assert own == {metric.name.removesuffix("_total") for metric in definitions.of(definitions.GATEWAY)}


async def test_requests_of_the_radix_middleware_are_under_way_too(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], chat_model: str
) -> None:
    radix = ("rlctl.gateway.radix.middleware:RadixMiddleware",)
    settings = {"middleware_paths": radix, "tokenizer": chat_model, "metrics": "127.0.0.1:0"}
    async with make_gateway(fleet, dialect="slime", **settings) as (server, http):
        await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        body = {"text": "1+2", "sampling_params": {"max_new_tokens": 4}}
        waiting = asyncio.create_task(post(http, body))
        (middleware,) = server._middlewares
        await eventually(lambda: middleware._generation.inflight)
        seen = await scrape(server.metrics_address)
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
        assert (await waiting)[0] == 200
    assert seen.value("rlctl_gateway_inflight") == 1
    assert seen.value("rlctl_gateway_inflight_bytes") > 0
    assert seen.value("rlctl_gateway_waiting") == 1

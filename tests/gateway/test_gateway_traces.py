"""Spans of samples at the gateway, received by a collector over OTLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from http_calls import post
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from trace_collector import PARENT, attributes, collecting

from rlctl.contract.errors import Reason
from rlctl.v1.fleet_pb2 import Stage


async def test_a_sample_has_a_span_and_operations_continue_the_trace_of_their_caller(
    make_fleet: Callable[..., Any], make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(monkeypatch) as collector:
        async with make_fleet(a=1, heal=False) as fleet, make_gateway(fleet) as (_, http):
            http.headers["traceparent"] = PARENT
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
            assert (await post(http, body))[0] == 200
            assert (await post(http, {}, "/pause_generation"))[0] == 200
            stage = fleet.stage("a")
        await collector.flush()
    (sample,) = collector.spans["rlctl-gateway"]
    assert (sample.name, sample.kind) == ("text_completion actor", Span.SPAN_KIND_CLIENT)
    assert sample.status.code == Status.STATUS_CODE_UNSET
    host, _, port = stage.registration.rollout_address.rpartition(":")
    seen = dict(attributes(sample))
    assert [each.string_value for each in seen.pop("gen_ai.response.finish_reasons").values] == ["length"]
    assert seen == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "rlctl",
        "gen_ai.request.model": "actor",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "rlctl.slot": "a",
        "rlctl.weight_version": stage.report.weight_version.label,
        "rlctl.weight_version_seq": 1,
        "server.address": host,
        "server.port": int(port),
    }
    (pause,) = [span for span in collector.spans["rlctl-coordinator"] if span.name == "PauseGeneration"]
    for span in (sample, pause):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])


async def test_a_sample_is_returned_where_the_stages_cannot_be_read_for_its_span(
    make_fleet: Callable[..., Any], make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(timeout_s: float = 0.0) -> list[Stage]:
        raise Reason.UNREACHABLE.error("the coordinator is away")

    async with collecting(monkeypatch) as collector:
        async with make_fleet(a=1, heal=False) as fleet, make_gateway(fleet) as (server, http):
            monkeypatch.setattr(server.generation.fleet, "stages", fail)
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
            assert (await post(http, body))[0] == 200
        await collector.flush()
    (sample,) = collector.spans["rlctl-gateway"]
    assert attributes(sample)["gen_ai.usage.output_tokens"] == 4

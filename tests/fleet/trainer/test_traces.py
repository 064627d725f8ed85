"""Traces of operations, received by a collector over OTLP."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from click.testing import CliRunner
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import NoOpTracer
from trace_collector import BAD, PARENT, attributes, collecting

from rlctl.cli.main import root
from rlctl.coordinator import traces as operation_traces
from rlctl.sdk import aio
from rlctl.traces import tracing
from rlctl.traces.context import valid
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, UpdateWeightsFromDiskRequest


def pairs() -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.zeros(1)


def within(span: Span, parent: Span) -> bool:
    same = (span.parent_span_id, span.trace_id) == (parent.span_id, parent.trace_id)
    inside = parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    return same and inside and span.end_time_unix_nano <= parent.end_time_unix_nano


def test_operations_whose_traces_would_wait_too_long_get_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operation_traces, "MOST_WAITING", 2)
    made: list[str] = []
    may_go_on = threading.Event()

    class Spans:
        def __init__(self, _tracer: object, record: OperationRecord, _took_s: float) -> None:
            self._operation_id = record.operation.operation_id

        def make(self, _traceparent: str) -> None:
            may_go_on.wait(5)
            made.append(self._operation_id)

    monkeypatch.setattr(operation_traces, "_Spans", Spans)
    traces = operation_traces.OperationTraces(NoOpTracer())
    for name in ("a", "b", "c"):
        traces.operation_ended(OperationRecord(operation=Operation(operation_id=name)), 1.0, "")
    may_go_on.set()
    traces.stop()
    assert made == ["a", "b"]
    assert "c has no trace: 2 operations wait for theirs" in caplog.text


async def test_an_update_is_one_trace_from_the_trainer_to_the_ranks(
    make_fleet: Callable, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(monkeypatch) as collector:
        async with (
            make_fleet(a=1, b=2) as fleet,
            await aio.connect(fleet.server.address) as client,
            client.publisher("actor") as publisher,
        ):
            result = await publisher.update(pairs(), version="two", checkpoint=checkpoint("two"), verify="none")
            operation = await client.operation(result.operation.operation_id)
        await collector.flush()
    (root,) = collector.spans["rlctl-trainer"]
    assert (root.name, root.parent_span_id, attributes(root)["rlctl.weight_version"]) == (
        "publisher.update",
        b"",
        "two",
    )
    own = [span for span in collector.spans["rlctl-coordinator"] if span.trace_id == root.trace_id]
    (update,) = [span for span in own if within(span, root)]
    assert (update.name, update.kind) == ("UpdateWeightsFromDisk", Span.SPAN_KIND_SERVER)
    assert attributes(update) == {
        "rlctl.operation_id": operation.operation_id,
        "rlctl.model": "actor",
        "rlctl.state": "ok",
        "rlctl.weight_version": "two",
        "rlctl.weight_version_seq": 2,
    }
    phases = [span for span in own if within(span, update)]
    begun = update.start_time_unix_nano
    recorded = [(phase.start.ToNanoseconds(), phase.duration.ToNanoseconds()) for phase in operation.timeline.phases]
    traced = [
        (span.start_time_unix_nano - begun, span.end_time_unix_nano - span.start_time_unix_nano) for span in phases
    ]
    assert sorted(traced) == sorted(recorded)
    assert {span.name for span in phases} >= {"prepare", "pause", "transfer", "apply", "publish", "admit", "resume"}
    (transfer,) = [span for span in phases if span.name == "transfer"]
    stages = {span.name: span for span in own if within(span, transfer)}
    assert stages.keys() == {"stage a", "stage b"}
    ranks = [span for span in own if within(span, stages["stage b"])]
    assert {(span.name, attributes(span)["rlctl.bytes"]) for span in ranks} == {("rank 0", 3), ("rank 1", 3)}
    assert all(span.status.code == Status.STATUS_CODE_UNSET for span in own)


async def test_other_operations_continue_the_trace_of_their_caller_and_name_the_failure(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(monkeypatch) as collector:
        async with make_fleet(a=1, b=2) as fleet:
            environment = {"TRACEPARENT": PARENT, "RLCTL_ENDPOINT": fleet.server.address}
            done = await asyncio.to_thread(CliRunner(env=environment).invoke, root, ["pause"])
            assert done.exit_code == 0, done.output
            for header in BAD:
                metadata = (("traceparent", header),) if header else ()
                await fleet.stub.ContinueGeneration(ContinueGenerationRequest(), metadata=metadata)
            await fleet.stub.UpdateWeightsFromDisk(UpdateWeightsFromDiskRequest(model_path="/no/such/checkpoint"))
        await collector.flush()
    spans = collector.spans["rlctl-coordinator"]
    (pause,) = [span for span in spans if span.name == "PauseGeneration"]
    assert (pause.trace_id.hex(), pause.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    stages = {span.name: span for span in spans if within(span, pause)}
    assert stages.keys() == {"stage a", "stage b"}
    assert {span.name for span in spans if within(span, stages["stage b"])} == {"rank 0", "rank 1"}
    others = [span for span in spans if span.name == "ContinueGeneration"]
    assert len({span.trace_id for span in others}) == len(others) == len(BAD)
    assert {span.parent_span_id for span in others} == {b""}
    (update,) = [span for span in spans if span.name == "UpdateWeightsFromDisk"]
    assert update.status.code == Status.STATUS_CODE_ERROR
    assert attributes(update)["error.type"] == update.status.message


@pytest.mark.parametrize("header", BAD)
def test_a_header_of_another_format_is_ignored(header: str) -> None:
    assert valid(PARENT) == PARENT
    assert valid(header) == valid(None) == ""


def test_only_the_variables_of_opentelemetry_switch_traces_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for exporter, disabled in (("", ""), ("none", ""), ("otlp", "true")):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
        monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
        assert tracing.tracer("rlctl-trainer") is None


@pytest.mark.parametrize(("exporter", "missing"), [("otlp", "opentelemetry.sdk.trace"), ("unheard_of", "")])
def test_without_the_library_or_the_exporter_a_warning_is_logged_once_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exporter: str, missing: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    for cached in (tracing.own_provider, tracing._warn):
        cached.cache_clear()
    try:
        made = [tracing.tracer("rlctl-trainer") for _ in range(2)]
    finally:
        tracing.own_provider.cache_clear()
    assert not missing or made == [None, None]
    (record,) = caplog.records
    assert "OTEL_TRACES_EXPORTER" in record.message
    assert ("pip install 'rlctl[otel]'" if missing else exporter) in record.message


def test_a_setting_that_an_exporter_refuses_is_a_warning_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")
    for cached in (tracing.own_provider, tracing._warn):
        cached.cache_clear()
    try:
        for _ in range(2):
            assert tracing.own_provider("rlctl-trainer") is not None
    finally:
        tracing.own_provider.cache_clear()
    (record,) = caplog.records
    assert "'otlp' refuses its settings" in record.message
    assert "10s" in record.message

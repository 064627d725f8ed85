"""Metrics of coordinators and stage servers, read over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography import x509
from scraping import scrape
from updating import abort, begin, commit, digest, join, refusal, write

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.metrics import definitions, exposition
from rlctl.ports import SystemClock
from rlctl.stage.metrics import StageMetrics
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.v1.coordinator_pb2 import GetOperationRequest
from rlctl.v1.rollout_pb2 import AbortRequest, GenerateRequest, GenerateResponse, Sample, SamplingParams
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from rlctl.v1.verbs_pb2 import PauseGenerationRequest, UpdateWeightsFromDiskRequest

ANY = "127.0.0.1:0"
EXPIRY = "rlctl_certificate_expiry_timestamp_seconds"


@pytest.fixture
async def measured(make_fleet: Callable) -> AsyncIterator[InProcessFleet]:
    """Stage a with one rank, stage b with two. Every server serves metrics."""
    async with make_fleet(a=1, b=2, heal=False, metrics=ANY) as fleet:
        yield fleet


async def test_a_coordinator_serves_its_operations_and_the_fleet(
    measured: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    update = await measured.stub.UpdateWeightsFromDisk(UpdateWeightsFromDiskRequest(model_path=checkpoint("other")))
    await refusal(measured.stub.GetOperation(GetOperationRequest(operation_id="none")))
    await measured.stub.PauseGeneration(PauseGenerationRequest())
    seen = await scrape(measured.server.metrics_address)
    disk = {"verb": "UpdateWeightsFromDisk"}
    assert seen.value("rlctl_operations_total", **disk, state="ok") == 1
    assert seen.value("rlctl_operation_duration_seconds_count", verb="PauseGeneration") == 1
    assert seen.value("rlctl_update_bytes_total", transport="disk") == 3 * len("other")
    assert seen.value("rlctl_update_pause_duration_seconds_count", **disk) == 1
    assert seen.value("rlctl_update_pause_duration_seconds_sum", **disk) == pytest.approx(
        update.pause_time.ToNanoseconds() / 1e9
    )
    phases = seen.labels("rlctl_update_phase_duration_seconds_count", "phase")
    assert phases == {"prepare", "pause", "transfer", "apply", "verify", "publish", "admit", "resume"}
    assert seen.value("rlctl_fan_out_duration_seconds_count", verb="PauseGeneration") == 2
    assert seen.value("rlctl_rpc_refusals_total", method="GetOperation", reason="OPERATION_NOT_FOUND") == 1
    assert seen.value("rlctl_journal_commit_duration_seconds_count") > 5
    assert seen.value("rlctl_epoch") == measured.server.coordinator.roster.epoch
    assert seen.value("rlctl_model_version", model="actor") == 2
    assert seen.value("rlctl_model_publish_timestamp_seconds", model="actor") == pytest.approx(time.time(), abs=60)
    assert seen.value("rlctl_stages", model="actor", state="paused") == 2
    for slot in "ab":
        assert seen.value("rlctl_stage_state", slot=slot, state="paused") == 1
        assert seen.value("rlctl_stage_routable", slot=slot) == 0
        assert seen.value("rlctl_stage_version_lag", slot=slot) == 0
        assert seen.value("rlctl_stage_incarnations_total", slot=slot) == 1


async def test_failure_counters_that_alerts_read_exist_before_the_first_failure(measured: InProcessFleet) -> None:
    seen = await scrape(measured.server.metrics_address)
    levels = {"probe", "received", "replica", "expected", "decode"}
    assert seen.labels("rlctl_verification_failures_total", "level") == levels
    assert seen.labels("rlctl_operations_total", "state") >= {"failed", "unknown"}
    verbs = {"WeightUpdate", "UpdateWeightsFromDisk", "PauseGeneration", "HealStage", "CommitWeightUpdate"}
    assert seen.labels("rlctl_operations_total", "verb") >= verbs
    assert seen.value("rlctl_verification_failures_total") == 0
    assert seen.value("rlctl_operations_total", state="failed") == 0


async def test_phases_are_those_of_the_timeline(measured: InProcessFleet) -> None:
    plan = await begin(measured)
    await join(measured, plan)
    await write(measured, plan, "w1")
    await commit(measured, plan, digest("w1"))
    operation = await measured.stub.GetOperation(GetOperationRequest(operation_id=plan.update_id))
    seen = await scrape(measured.server.metrics_address)
    total = sum(phase.duration.ToNanoseconds() for phase in operation.timeline.phases) / 1e9
    assert seen.value("rlctl_update_phase_duration_seconds_sum") == pytest.approx(total)


async def test_failures_of_updates_are_counted_by_their_kind(measured: InProcessFleet) -> None:
    plan = await begin(measured)
    await join(measured, plan)
    await write(measured, plan, "w1")
    await commit(measured, plan, digest("something else"))
    late = await begin(measured, "step-2", lease_ttl=duration(0.1))
    await measured.server.coordinator.operations.get(late.update_id).ended.wait()
    await abort(measured, await begin(measured, "step-3"))
    seen = await scrape(measured.server.metrics_address)
    assert seen.value("rlctl_verification_failures_total", level="expected") == 2
    assert seen.value("rlctl_quarantines_total", model="actor", reason="DIGEST_MISMATCH") == 2
    assert seen.value("rlctl_update_leases_expired_total") == 1
    assert seen.value("rlctl_operations_total", verb="WeightUpdate", state="failed") == 3
    assert seen.value("rlctl_stage_quarantined") == 2
    assert seen.value("rlctl_stages", state="dirty") == 2


async def test_a_stage_serves_its_generation(measured: InProcessFleet) -> None:
    stage = measured.stages["a"]
    sampling = SamplingParams(max_new_tokens=5)
    async with open_channel(stage.rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        await stub.Generate(GenerateRequest(text="x", sampling_params=sampling))
        refused = await refusal(stub.Generate(GenerateRequest(text="x", min_version_seq=9)))
    assert refused.reason is Reason.VERSION_TOO_OLD
    seen = await scrape(stage.metrics_address)
    here = {"model": "actor", "slot": "a"}
    assert seen.value("rlctl_generation_requests_total", **here, outcome="ok") == 1
    assert seen.value("rlctl_generation_requests_total", **here, outcome="VERSION_TOO_OLD") == 1
    assert seen.value("rlctl_generation_tokens_total", **here) == 5
    assert seen.value("rlctl_generation_first_token_seconds_count", **here) == 1
    assert seen.value("rlctl_generation_running", **here) == 0
    assert seen.value("rlctl_serving_version", **here) == 1
    assert 0 < seen.value("rlctl_serving_lease_seconds", **here) <= 10


async def test_the_tokens_of_an_aborted_request_are_counted(measured: InProcessFleet) -> None:
    stage, total = measured.stages["a"], 0
    async with open_channel(stage.rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        endless = GenerateRequest(rid="endless", text="x", sampling_params=SamplingParams(max_new_tokens=1_000_000))
        async for part in stub.GenerateStream(endless):
            if not total:
                await stub.Abort(AbortRequest(rids=["endless"]))
            total = part.samples[0].completion_tokens
    seen = await scrape(stage.metrics_address)
    here = {"model": "actor", "slot": "a"}
    assert seen.value("rlctl_generation_requests_total", **here, outcome="aborted") == 1
    assert seen.value("rlctl_generation_tokens_total", **here) == total
    assert total > 0


async def test_the_tokens_of_all_samples_are_counted(measured: InProcessFleet) -> None:
    metrics = StageMetrics("actor", "s", measured.stages["a"]._serving, SystemClock())
    address = await metrics.exposition.start("127.0.0.1:0")
    with metrics.request(2) as take:
        for index, tokens in ((0, 1), (1, 2), (0, 4), (1, 3)):
            take(GenerateResponse(samples=[Sample(index=index, completion_tokens=tokens)]))
    seen = await scrape(address)
    await metrics.exposition.stop()
    here = {"model": "actor", "slot": "s"}
    assert seen.value("rlctl_generation_tokens_total", **here) == 7
    assert seen.value("rlctl_generation_first_token_seconds_count", **here) == 1


async def test_each_server_serves_the_metrics_of_the_table_and_no_others(measured: InProcessFleet) -> None:
    for address, process in (
        (measured.server.metrics_address, definitions.COORDINATOR),
        (measured.stages["a"].metrics_address, definitions.STAGE),
    ):
        own = {name for name in (await scrape(address)).families if name.startswith("rlctl_")}
        assert own == {metric.name.removesuffix("_total") for metric in definitions.of(process)}


async def test_a_busy_event_loop_leaves_out_its_state_and_shows_in_the_lag(
    measured: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "READ_S", 0.05)
    reading = asyncio.create_task(scrape(measured.server.metrics_address))
    await asyncio.sleep(0)
    time.sleep(1.2)  # noqa: ASYNC251 - it is the point
    seen = await reading
    assert seen.value("rlctl_epoch") == 0
    await asyncio.sleep(0.1)
    lag = (await scrape(measured.server.metrics_address)).value("rlctl_event_loop_lag_seconds_sum", loop="main")
    assert lag > 0.3


async def test_idle_connections_are_limited_and_end(measured: InProcessFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = measured.server.metrics_address.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port))) for _ in range(exposition.MOST_CONNECTIONS)]
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""  # one too many
        writer.close()
    for each in idle:
        each.close()
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(OSError):  # until the threads have ended
                assert (await scrape(measured.server.metrics_address)).value("rlctl_epoch") == 1
                break
    monkeypatch.setattr(exposition.Handler, "timeout", 0.1)
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()


async def test_a_request_without_a_version_of_http_is_refused(measured: InProcessFleet) -> None:
    host, port = measured.server.metrics_address.rsplit(":", 1)
    for head, status in ((b"GET /metrics", b"505"), (b"GET /metrics HTTP/1.0", b"200")):
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + b"\r\n\r\n")
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.0 " + status), answer[:80]
        assert (b"rlctl_epoch" in answer) == (status == b"200")


async def test_every_process_with_a_certificate_has_the_end_of_the_present_one(
    make_fleet: Callable, tmp_path: Path
) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")

    def ends(path: str, days: int) -> float:
        certificate = x509.load_pem_x509_certificate(authority.issue(path, days=days).cert.read_bytes())
        return certificate.not_valid_after_utc.timestamp()

    expected = {path: ends(path, days) for path, days in (("coordinator", 30), ("stage/a", 20), ("gateway/g", 10))}
    async with make_fleet(authority=authority, a=1, metrics=ANY) as fleet:
        config = GatewayConfig(fleet.server.address, tls=Tls(authority.files("gateway/g")), metrics=ANY)
        gateway = GatewayServer(config)
        await gateway.start()
        try:
            addresses = {
                "coordinator": fleet.server.metrics_address,
                "stage/a": fleet.stages["a"].metrics_address,
                "gateway/g": gateway.metrics_address,
            }
            for path, address in addresses.items():
                assert (await scrape(address)).value(EXPIRY) == expected[path]
            expected |= {path: ends(path, 40) for path in addresses}
            await asyncio.sleep(exposition.FRESH_S)
            for path, address in addresses.items():
                assert (await scrape(address)).value(EXPIRY) == expected[path]
        finally:
            await gateway.stop()


async def test_without_a_certificate_there_is_no_end(measured: InProcessFleet) -> None:
    seen = await scrape(measured.stages["a"].metrics_address)
    assert not seen.families[EXPIRY].samples


async def test_scrapes_at_one_time_read_the_state_once(
    measured: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "FRESH_S", 60.0)
    own = measured.server._metrics
    assert own is not None
    reads, read = [], own._exposition._read
    monkeypatch.setattr(own._exposition, "_read", lambda: reads.append(1) or read())
    seen = await asyncio.gather(*(scrape(measured.server.metrics_address) for _ in range(4)))
    assert [each.value("rlctl_epoch") for each in seen] == [1] * 4
    assert len(reads) == 1


async def test_an_address_that_cannot_be_bound_is_refused_and_the_journal_is_released(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for address in (taken, "nowhere", "127.0.0.1:99999"):
            with pytest.raises(RlctlError) as refused:
                await CoordinatorServer(CoordinatorConfig(journal, ANY, metrics=address)).start()
            assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "metrics")
    server = CoordinatorServer(CoordinatorConfig(journal, ANY, metrics=taken))
    await server.start()
    assert server.metrics_address == taken
    await server.stop()


async def test_without_the_library_metrics_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RlctlError) as refused:
        CoordinatorServer(CoordinatorConfig(tmp_path / "journal.db", ANY, metrics=ANY))
    assert (refused.value.reason, refused.value.next_step) == (Reason.UNSUPPORTED, "pip install 'rlctl[metrics]'")

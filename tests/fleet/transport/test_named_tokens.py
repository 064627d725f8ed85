"""A fleet with named tokens: scopes, rotation, callers on record, gateways that speak for others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from rlctl.contract.access import method_of
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import FLEET, Grant, Principal
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport import access_file, denials
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.auth import ON_BEHALF_OF, Access, AccessGuard
from rlctl.transport.channel import OnBehalf, bearer, open_channel
from rlctl.transport.status import from_grpc
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Identity
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import rollout_pb2, update_pb2
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from rlctl.v1.stage_pb2_grpc import StageServiceStub
from rlctl.version import __version__

TOKEN = "the fleet's own token"
SCOPES = {
    "watcher": ["viewer"],
    "sampler": ["rollout"],
    "trainer": ["weights:actor"],
    "lora": ["adapters:math"],
    "boss": ["admin"],
    "front": ["gateway"],
}
MODELS = {"a": "actor", "c": "critic"}


def entry(name: str, *tokens: str, expires: float | None = None) -> Entry:
    hashes = tuple(TokenHash(hash_of(token), 0.0, expires) for token in tokens)
    return Entry(name, tuple(map(Grant.parse, SCOPES[name])), hashes, (f"rlctl://lab/client/{name}",))


def write(path: Path, *entries: Entry) -> None:
    access_file.write(path, {each.name: each for each in entries})


@pytest.fixture
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An access file in which the token of each principal is its name."""
    monkeypatch.setattr(access_file, "LOOK_S", 0.0)
    path = tmp_path / "access.json"
    write(path, *(entry(name, name) for name in SCOPES))
    return path


@pytest.fixture
async def fleet(tmp_path: Path, checkpoint: Callable[[str], str], access: Path) -> AsyncIterator[InProcessFleet]:
    """Models actor and critic, one stage each."""
    specs = [StageSpec(slot, checkpoint("one"), model=model) for slot, model in MODELS.items()]
    async with InProcessFleet(tmp_path / "j.db", specs, token=TOKEN, access_file=str(access)) as fleet:
        yield fleet


async def reason_of(call: Any) -> Reason | None:
    try:
        await call
    except RlctlError as error:
        return error.reason
    except grpc.aio.AioRpcError as error:
        return from_grpc(error).reason
    return None


async def test_four_tokens_each_do_what_their_scope_says(fleet: InProcessFleet) -> None:
    actor, critic = {"model": "actor"}, {"model": "critic"}
    calls: dict[str, Callable[[aio.AsyncFleet], Any]] = {
        "status": lambda of: of.status(),
        "generate": lambda of: of.generate("x", model="actor", max_new_tokens=1),
        "pause": lambda of: of.pause_generation(**actor),
        "continue": lambda of: of.continue_generation(slots=["a"]),
        "pause others": lambda of: of.pause_generation(**critic, validate_only=True),
        "pause by slot": lambda of: of.pause_generation(slots=["c"], validate_only=True),
        "pause all": lambda of: of.pause_generation(validate_only=True),
        "disable": lambda of: of.set_enabled(["a"], False, validate_only=True),
        "join": lambda of: of.connection.call("RegisterStage", c.RegisterStageRequest(), 5.0),
    }
    weights = {"status", "pause", "continue"}
    may = {
        "watcher": {"status"},
        "sampler": {"status", "generate"},
        "trainer": weights,
        "boss": set(calls) - {"join"},
        "lora": {"status"},
        "front": {"status"},
    }
    for name, allowed in may.items():
        async with await aio.connect(fleet.server.address, token=name) as client:
            denied = {what for what, call in calls.items() if await reason_of(call(client)) is Reason.SCOPE_MISSING}
            assert set(calls) - denied == allowed, name


async def test_an_update_belongs_to_the_scope_of_its_model(fleet: InProcessFleet) -> None:
    def begun(client: aio.AsyncFleet, model: str) -> Any:
        begin = update_pb2.BeginWeightUpdateRequest(model=model, version="step-1")
        return client.connection.call("BeginWeightUpdate", begin, 10.0)

    async with (
        await aio.connect(fleet.server.address, token="boss") as boss,
        await aio.connect(fleet.server.address, token="trainer") as trainer,
        await aio.connect(fleet.server.address, token="lora") as lora,
    ):
        assert await reason_of(begun(trainer, "critic")) is Reason.SCOPE_MISSING
        assert await reason_of(begun(lora, "actor")) is Reason.SCOPE_MISSING
        others = await begun(boss, "critic")
        own = await begun(trainer, "actor")
        for client in (trainer, lora):
            # The update decides, not the target that the request claims.
            abort = v.UpdateWeightsFromTensorRequest()
            abort.header.target.model, abort.header.fence.update_id = "actor", others.update_id
            assert await reason_of(client.call(abort)) is Reason.SCOPE_MISSING
            for call in (client.abort_update(others.update_id), client.cancel_operation(others.update_id)):
                assert await reason_of(call) is Reason.SCOPE_MISSING
        assert (await trainer.abort_update(own.update_id)).caller.principal == "trainer"
        assert (await trainer.abort_update(own.update_id)).operation_id == own.update_id, "a repeat, after its end"
        await boss.abort_update(others.update_id)


async def test_only_the_fleets_own_token_commands_a_stage(fleet: InProcessFleet) -> None:
    stage = fleet.stages["a"]
    async with open_channel(stage.address) as admin, open_channel(stage.rollout_address) as rollout:
        for name in SCOPES:
            call = StageServiceStub(admin).GetLoads(v.GetLoadsRequest(), metadata=bearer(name))
            assert await reason_of(call) is Reason.SCOPE_MISSING, name
            many = RolloutServiceStub(rollout).GenerateMany(metadata=bearer(name))
            await many.write(rollout_pb2.GenerateManyRequest())
            if name in ("sampler", "boss"):
                await many.done_writing()
            assert await reason_of(many.read()) is (None if name in ("sampler", "boss") else Reason.SCOPE_MISSING)
        assert (await StageServiceStub(admin).GetLoads(v.GetLoadsRequest(), metadata=bearer(TOKEN))).rank_results


async def test_an_operation_names_its_principal_and_its_client(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address, token="trainer", client="slime") as client:
        done = await client.flush_cache(model="actor")
        caller = (await client.operation(done.operation_id)).caller
        assert (caller.principal, caller.via, caller.client, caller.client_version) == (
            *("trainer", "", "slime"),
            __version__,
        )
        assert "@" in caller.user
    async with await aio.connect(fleet.server.address, token=TOKEN) as client:
        done = await client.flush_cache(model="actor")
        assert (done.caller.principal, done.caller.client) == ("fleet", "sdk")
        [newest, before] = await client.operations(page_size=2)
        assert [newest.caller.principal, before.caller.principal] == ["fleet", "trainer"]


async def test_callers_are_on_record_after_a_restart(make_fleet: Callable[..., Any], access: Path) -> None:
    async with make_fleet(token=TOKEN, access_file=str(access), a=1) as fleet:
        async with await aio.connect(fleet.server.address, token="trainer") as client:
            done = await client.flush_cache(model="actor")
        await fleet.channel.close()
        await fleet.server.stop()
        await fleet.start_coordinator(fleet.server.address)
        async with await aio.connect(fleet.server.address, token="watcher") as client:
            assert (await client.operation(done.operation_id)).caller == done.caller


async def test_without_tokens_the_caller_is_anonymous(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1) as fleet, await aio.connect(fleet.server.address) as client:
        caller = (await client.flush_cache()).caller
        assert (caller.principal, caller.client) == ("anonymous", "sdk")
        # Whoever may say anything is still not somebody else.
        spoofed = await fleet.stub.FlushCache(v.FlushCacheRequest(), metadata=((ON_BEHALF_OF, "boss"),))
        assert spoofed.caller.principal == "anonymous"


async def test_a_heal_is_the_coordinators_own_operation(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    async with await aio.connect(fleet.server.address, token="boss") as client:
        await client.update_weights_from_disk(checkpoint("two"), version="step-2", model="actor")
        # The call of the stage's process that registers it leads to the heal, but did not ask for it.
        await fleet.stages.pop("a").stop()
        await fleet.start_stage(StageSpec("a", checkpoint("one")))
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
        heals = await client.operations(verb="HealStage")
        assert heals
        assert {heal.caller.principal for heal in heals} == {"coordinator"}


async def test_a_token_is_rotated_and_revoked_without_a_restart(fleet: InProcessFleet, access: Path) -> None:
    others = [entry(name, name) for name in SCOPES if name != "watcher"]
    async with (
        await aio.connect(fleet.server.address, token="watcher") as old,
        await aio.connect(fleet.server.address, token="fresh") as new,
    ):
        assert await reason_of(new.status()) is Reason.TOKEN_INVALID
        write(access, *others, entry("watcher", "watcher", "fresh"))
        assert await reason_of(old.status()) is await reason_of(new.status()) is None
        watch = old.watch()
        await anext(watch)
        write(access, *others, entry("watcher", "fresh"))
        assert await reason_of(old.status()) is Reason.TOKEN_INVALID
        assert await reason_of(new.status()) is None
        async with await aio.connect(fleet.server.address, token="boss") as boss:
            await boss.set_enabled(["a"], False)  # an event, with which the watch ends
        assert await asyncio.wait_for(reason_of(anext(watch)), 5) is Reason.TOKEN_INVALID


async def test_a_stream_of_requests_ends_with_its_token(fleet: InProcessFleet, access: Path) -> None:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        stream = RolloutServiceStub(channel).GenerateMany(metadata=bearer("sampler"))
        begin = rollout_pb2.GenerateManyRequest()
        request = begin.begin.add(number=1).request
        request.text, request.sampling_params.max_new_tokens = "x", 1
        await stream.write(begin)
        assert (await stream.read()).parts[0].number == 1
        write(access, *(entry(name, name) for name in SCOPES if name != "sampler"))
        begin.begin[0].number = 2
        await stream.write(begin)

        async def rest() -> None:
            while (answer := await stream.read()) is not grpc.aio.EOF:
                assert all(part.number == 1 for part in answer.parts)

        assert await asyncio.wait_for(reason_of(rest()), 5) is Reason.TOKEN_INVALID


async def test_a_file_that_is_broken_leaves_the_tokens_in_force(
    fleet: InProcessFleet, access: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in ("{", '{"version": 1}', '{"version": 2, "principals": []}', ""):
        await asyncio.to_thread(access.write_text, content)
        async with await aio.connect(fleet.server.address, token="watcher") as client:
            assert await reason_of(client.status()) is None
    assert "the earlier principals stay in force" in caplog.text
    write(access, entry("boss", "boss"))
    async with await aio.connect(fleet.server.address, token="watcher") as client:
        assert await reason_of(client.status()) is Reason.TOKEN_INVALID


def test_an_expired_token_is_invalid(access: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(access_file.time, "time", lambda: now)
    write(access, entry("watcher", "watcher", expires=2000.0))
    file = Access(None, str(access))
    before = file.revision
    assert file.authenticate(dict(bearer("watcher"))).principal.name == "watcher"
    now = 2000.0
    with pytest.raises(RlctlError) as caught:
        file.authenticate(dict(bearer("watcher")))
    assert caught.value.reason is Reason.TOKEN_INVALID
    assert caught.value.message == (
        f"the token {hash_of('watcher')[:8]} of watcher expired at 1970-01-01T00:33:20+00:00, "
        "and the server's clock says 1970-01-01T00:33:20+00:00"
    )
    assert "rlctl tokens new" in caught.value.next_step
    assert file.revision > before, "streams are asked again"
    with pytest.raises(RlctlError, match="is not the server's"):
        file.authenticate(dict(bearer("another")))
    for set_to in (1500.0, 2500.0):  # the clock is set back, and passes the time once more
        before, now = file.revision, set_to
        assert file.revision > before, now


async def test_a_gateway_speaks_for_others_and_nobody_else_does(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address, token="front", client="gateway") as front:
        behalf = front.on_behalf_of(OnBehalf("front", "trainer"))
        done = await behalf.flush_cache(model="actor")
        assert (done.caller.principal, done.caller.via, done.caller.client) == ("trainer", "front", "gateway")
        assert await reason_of(behalf.flush_cache(model="critic")) is Reason.SCOPE_MISSING
        assert await reason_of(front.flush_cache(model="actor")) is Reason.SCOPE_MISSING
        viewer = front.on_behalf_of(OnBehalf("front", "watcher"))
        assert await reason_of(viewer.generate("x", model="actor")) is Reason.SCOPE_MISSING
        sampler = front.on_behalf_of(OnBehalf("front", "sampler"))
        assert (await sampler.generate("x", model="actor", max_new_tokens=1)).slot == "a"
        assert await reason_of(front.on_behalf_of(OnBehalf("front", "nobody")).status()) is Reason.TOKEN_INVALID
        assert await reason_of(front.on_behalf_of(OnBehalf("front", "front")).status()) is Reason.SCOPE_MISSING
    for name in ("watcher", "sampler", "trainer", "lora", "boss"):
        async with await aio.connect(fleet.server.address, token=name) as client:
            behalf = client.on_behalf_of(OnBehalf(name, "boss"))
            assert await reason_of(behalf.status()) is Reason.SCOPE_MISSING, name


def test_a_certificate_stands_for_its_principal_and_a_token_goes_before_it(access: Path) -> None:
    trainer, nobody, stage = (Identity.parse("lab", path) for path in ("client/trainer", "client/x", "stage/a"))
    file = Access(TOKEN, str(access))
    assert file.authenticate({}, trainer).principal.name == "trainer"
    assert file.authenticate(dict(bearer("watcher")), trainer).principal.name == "watcher"
    assert file.authenticate(dict(bearer(TOKEN)), trainer).principal is FLEET
    assert file.authenticate({}, stage).principal == Principal("stage/a", FLEET.grants), "a process of the fleet"
    assert Access(None).authenticate({}, nobody).principal == Principal("client/x", FLEET.grants)
    with pytest.raises(RlctlError, match="access file does not have rlctl://lab/client/x"):
        file.authenticate({}, nobody)
    for access_, metadata, reason in (
        (file, dict(bearer("wrong")), Reason.TOKEN_INVALID),
        (Access(TOKEN), {}, Reason.TOKEN_MISSING),
    ):
        with pytest.raises(RlctlError) as caught:
            access_.authenticate(metadata, trainer)
        assert caught.value.reason is reason
    assert Access(TOKEN).authenticate(dict(bearer(TOKEN))).principal is FLEET


async def test_certificates_are_enough_for_a_fleet(
    make_fleet: Callable[..., Any], access: Path, tmp_path: Path
) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    async with make_fleet(access_file=str(access), authority=authority, a=1) as fleet:

        def connected(path: str) -> Any:
            return aio.connect(fleet.server.address, tls=Tls(authority.ensured(path)))

        async with await connected("client/trainer") as client:
            assert (await client.flush_cache(model="actor")).caller.principal == "trainer"
            assert await reason_of(client.set_enabled(["a"], False)) is Reason.SCOPE_MISSING
        async with await connected("client/sampler") as client:
            assert (await client.generate("x", max_new_tokens=1)).slot == "a"
        async with await connected("client/nobody") as client:
            assert await reason_of(client.status()) is Reason.TOKEN_MISSING
        async with await connected("gateway/front") as front:
            done = await front.on_behalf_of(OnBehalf("", "trainer")).flush_cache(model="actor")
            assert (done.caller.principal, done.caller.via) == ("trainer", "gateway/front")


async def test_denials_are_logged_once_a_minute_with_their_number(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denials, "EVERY_S", 0.2)
    caplog.set_level(logging.WARNING, denials.__name__)
    async with await aio.connect(fleet.server.address, token="watcher") as client:
        for _ in range(20):
            assert await reason_of(client.flush_cache(model="actor")) is Reason.SCOPE_MISSING
        await asyncio.sleep(0.4)
    lines = [record.getMessage() for record in caplog.records if "FlushCache" in record.getMessage()]
    assert lines[0].startswith("FlushCache from 127.0.0.1 denied: SCOPE_MISSING: watcher has viewer;")
    assert sum(int(line.split()[0]) if line[0].isdigit() else 1 for line in lines) == 20
    assert len(lines) <= 4


def test_the_kinds_of_denials_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[Callable[[], None]] = []
    reports: list[denials.Denial] = []
    noted = denials.Denials(reports.append, lambda _, end: ends.append(end))
    error = Reason.TOKEN_INVALID.error()
    for number in range(1000):
        noted.note(None, method_of("/rlctl.v1.CoordinatorService/GetFleet"), error, f"10.0.0.{number}")
    assert len(reports) == denials.MOST_KINDS + 1
    for end in ends:
        end()
    assert sum(report.count for report in reports) == 1000
    assert not noted._open
    caplog.clear()


async def test_a_watch_that_updates_wait_for_needs_a_scope_and_has_one_owner(fleet: InProcessFleet) -> None:
    async def first_of(name: str) -> Any:
        watch = fleet.stub.WatchFleet(c.WatchFleetRequest(watch_id="router"), metadata=bearer(name))
        await watch.read()
        return watch

    for name in ("watcher", "trainer"):
        assert await reason_of(first_of(name)) is Reason.SCOPE_MISSING
    watch = await first_of("front")
    assert await reason_of(first_of("sampler")) is Reason.FIELD_INVALID
    confirm = c.ConfirmFleetRequest(watch_id="router")
    for name, reason in {"watcher": Reason.SCOPE_MISSING, "sampler": Reason.FIELD_INVALID, "front": None}.items():
        assert await reason_of(fleet.stub.ConfirmFleet(confirm, metadata=bearer(name))) is reason, name
    again = await first_of("front")
    watch.cancel()
    again.cancel()


async def test_a_stream_that_only_answers_ends_with_its_token(access: Path) -> None:
    async def answers(_: AsyncIterator[bytes], context: Any) -> None:
        while True:
            await context.write(b"")
            await asyncio.sleep(0.01)

    server = grpc.aio.server(interceptors=[AccessGuard(Access(None, str(access)), denials.Denials(), lambda _: None)])
    many = {"GenerateMany": grpc.stream_stream_rpc_method_handler(answers)}
    handler = grpc.method_handlers_generic_handler("rlctl.v1.RolloutService", many)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stream = RolloutServiceStub(channel).GenerateMany(metadata=bearer("sampler"))
        assert await stream.read() is not grpc.aio.EOF
        write(access, entry("boss", "boss"))

        async def rest() -> None:
            while await stream.read() is not grpc.aio.EOF:
                pass

        assert await asyncio.wait_for(reason_of(rest()), 5) is Reason.TOKEN_INVALID
    await server.stop(0)


def test_calls_without_authentication_from_one_host_are_one_kind() -> None:
    ends: list[Callable[[], None]] = []
    reports: list[denials.Denial] = []
    noted = denials.Denials(reports.append, lambda _, end: ends.append(end))
    for number in range(100):
        reason = Reason.TOKEN_INVALID if number % 2 else Reason.TOKEN_MISSING
        noted.note(None, method_of(f"/rlctl.v1.CoordinatorService/Method{number}"), reason.error(), "10.0.0.1")
    for end in ends:
        end()
    assert [report.count for report in reports] == [1, 99]


def test_a_file_that_could_not_be_read_once_is_read_again(
    access: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = access_file.AccessFile(access)
    write(access, entry("watcher", "fresh"))
    read = access_file.read

    def fails(path: Path) -> Any:
        raise Reason.FIELD_INVALID.error(f"{path}: Input/output error")

    monkeypatch.setattr(access_file, "read", fails)
    for _ in range(3):
        assert file.of_token("watcher") is not None
    monkeypatch.setattr(access_file, "read", read)
    assert file.of_token("watcher") is None, "the token was revoked"
    assert file.of_token("fresh") is not None
    assert caplog.text.count("Input/output error") == 1
    access.write_text("[" * 100_000)
    assert file.of_token("fresh") is not None
    assert "the earlier principals stay in force" in caplog.text


async def test_the_audit_has_changes_and_denials_and_survives_a_restart(
    make_fleet: Callable[..., Any], access: Path
) -> None:
    async with make_fleet(token=TOKEN, access_file=str(access), a=1) as fleet:
        address = fleet.server.address
        async with await aio.connect(address, token="trainer", client="slime") as trainer:
            flushed = await trainer.flush_cache(model="actor")
            for _ in range(3):
                assert await reason_of(trainer.set_enabled(["a"], False)) is Reason.SCOPE_MISSING
        async with await aio.connect(address, token="wrong") as stranger:
            assert await reason_of(stranger.status()) is Reason.TOKEN_INVALID
        async with await aio.connect(address, token="boss") as boss:
            await boss.set_enabled(["a"], False, validate_only=True)
            await boss.set_enabled(["a"], False, reason="maintenance")
            records = await boss.audit()
            shown = [(each.caller.principal, each.method, each.denied, each.reason) for each in records]
            assert shown == [
                ("boss", "SetStageEnabled", False, ""),
                ("", "GetFleet", True, "TOKEN_INVALID"),
                ("trainer", "SetStageEnabled", True, "SCOPE_MISSING"),
                ("trainer", "FlushCache", False, ""),
            ]
            assert (records[0].slots, records[1].host) == (["a"], "127.0.0.1")
            assert records[3].operation_id == flushed.operation_id
            assert (records[3].caller.client, records[3].model) == ("slime", "actor")
            assert await boss.audit(principal="trainer", denied=True) == [records[2]]
            assert await boss.audit(limit=2) == records[:2]
            assert await reason_of((await aio.connect(address, token="watcher")).audit()) is Reason.SCOPE_MISSING
        await fleet.channel.close()
        await fleet.server.stop()
        await fleet.start_coordinator(address)
        async with await aio.connect(address, token="boss") as boss:
            assert [each for each in await boss.audit(limit=0) if each in records] == records

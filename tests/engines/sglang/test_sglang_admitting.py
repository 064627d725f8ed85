"""When half of a pair's request may be sent to SGLang, without a server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.checkpoints import Checkpoints
from rlctl_servers.updates.updates import Updates
from rlctl_servers.updates.version_labels import Stamps
from rlctl_sglang import SGLangEngine
from rlctl_sglang.server.facts import Facts
from rlctl_sglang.server.memory import own_pause

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_pair_adapter
from rlctl.engine import Call, EngineConfig
from rlctl.v1.common_pb2 import PAUSE_MODE_ABORT, PAUSE_MODE_UNSPECIFIED, WeightVersion
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, GenerateRequest
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest, PrepareUpdateRequest


class Obliging:
    """SGLang, which does what it is told."""

    async def must(self, path: str, body: dict[str, Any], **_: Any) -> None:
        assert path in ("/pause_generation", "/continue_generation")


@pytest.fixture
def engine(tiny: tuple[Any, Path]) -> Iterator[SGLangEngine]:
    """As it is once it has started a server of a pair, whose weights are at version 3."""
    config = EngineConfig(model_path=str(tiny[1]))
    engine = SGLangEngine(config, lambda _: None)
    engine._state.paired = True
    engine._stamps = Stamps("default")
    engine._stamps.bind(WeightVersion(label="c", sequence=3))
    control: Any = Obliging()
    checkpoints = Checkpoints("SGLang", config.model_path, ())
    engine._updates = Updates("SGLang", control, checkpoints, None, (), own_pause(control, engine._state))
    yield engine
    asyncio.run(engine.stop())


def refused(engine: SGLangEngine, version: int = 3) -> str:
    """Why, or "" where it is not."""
    try:
        engine._admit(GenerateRequest(bootstrap_version_seq=version))
    except RlctlError as error:
        return error.message if error.reason is Reason.STAGE_NOT_SERVING else str(error.reason)
    return ""


def test_a_half_goes_to_a_server_at_the_version_of_its_pair_only(engine: SGLangEngine) -> None:
    assert not refused(engine)
    assert refused(engine, 2) == "the pair was picked at version 2, this stage is at 3"
    assert "picked at version 4" in refused(engine, 4)
    engine.set_version(WeightVersion(label="c", sequence=4))  # not started: it is nobody's yet
    assert not refused(engine)


async def test_it_goes_to_none_that_may_be_at_another_version_before_it_is_computed(engine: SGLangEngine) -> None:
    engine._state.paused = PAUSE_MODE_ABORT
    assert "paused" in refused(engine)
    engine._state.paused = PAUSE_MODE_UNSPECIFIED
    engine._state.holding = True
    assert "paused" in refused(engine)
    engine._state.holding = False
    call = Call("u-1", 0.0, update_id="u-1")
    await engine._updates.prepare(PrepareUpdateRequest(), call)
    engine._state.holding = False
    assert "takes in weights" in refused(engine)
    await engine._updates.abort(call)
    assert not refused(engine)


class Silent:
    """A sample of which the server says nothing."""

    tokens, over = 0, False

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        await asyncio.Event().wait()
        yield {}


class Server:
    """One that holds back whatever it is sent."""

    product = "SGLang"

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    async def begin(self, request: GenerateRequest, engine_rids: Sequence[str]) -> Sequence[Any]:
        return [Silent() for _ in engine_rids]

    def admit(self, request: GenerateRequest) -> None:
        pass

    def new_rid(self) -> str:
        return uuid.uuid4().hex

    def prepares(self, request: GenerateRequest) -> bool:
        return False

    async def must(self, path: str, body: dict[str, Any], **_: Any) -> None:
        self.told.append((path, body))


@pytest.mark.parametrize("paired", [True, False])
async def test_a_pause_of_one_of_a_pair_leaves_what_it_has_not_begun(engine: SGLangEngine, paired: bool) -> None:
    """It would be computed after the pause, with whatever is there then."""
    server: Any = Server()
    engine._control, engine._requests = server, Requests(server)
    engine._adapters = SimpleNamespace(sweep_soon=lambda: None)  # type: ignore[assignment]
    engine._facts, engine._state.paired, engine._ready = Facts({}, {}), paired, True
    running = asyncio.ensure_future(anext(engine._requests.generate(GenerateRequest(rid="r"))))
    while not engine._requests.active:  # noqa: ASYNC110 - it is a line away
        await asyncio.sleep(0)
    await engine.pause_generation(PauseGenerationRequest(mode=PAUSE_MODE_ABORT), Call("c-1", 0.0))
    assert server.told == [("/pause_generation", {"mode": "abort"})]
    if paired:
        assert (await running).samples[0].finish_reason.type == FINISH_TYPE_ABORT
    else:
        assert not running.done()
        running.cancel()
    engine._state.holding = True
    await engine.continue_generation(ContinueGenerationRequest(), Call("c-2", 0.0))
    assert not engine._state.stopped, "what was held by a release that failed goes on as well"
    engine._ready = False


def test_a_server_of_no_pair_takes_every_request(engine: SGLangEngine) -> None:
    engine._state.paired = False
    engine._state.paused = PAUSE_MODE_ABORT
    assert not refused(engine, 9)


def test_a_half_is_computed_with_the_adapter_that_its_pair_had() -> None:
    request = GenerateRequest(bootstrap_version_seq=3, adapter="math", bootstrap_adapter_digest="abc")
    check_pair_adapter(request, "abc")
    with pytest.raises(
        RlctlError, match="adapter 'math' of this stage is not the adapter of the picked pair"
    ) as caught:
        check_pair_adapter(request, "def")
    assert (caught.value.reason, caught.value.field) == (Reason.STAGE_NOT_SERVING, "bootstrap_adapter_digest")
    check_pair_adapter(GenerateRequest(adapter="math"), "def")  # of no pair

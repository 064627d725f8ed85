"""When half of a pair's request may be sent to SGLang, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlctl_servers.checkpoints import Checkpoints
from rlctl_servers.stamps import Stamps
from rlctl_sglang import SGLangEngine
from rlctl_sglang.facts import Facts
from rlctl_sglang.updates import Updates

from rlctl.engine import Call, EngineConfig
from rlctl.errors import Reason, RlctlError
from rlctl.sampling import check_pair_adapter
from rlctl.v1.common_pb2 import PAUSE_MODE_ABORT, PAUSE_MODE_UNSPECIFIED, WeightVersion
from rlctl.v1.rollout_pb2 import GenerateRequest
from rlctl.v1.verbs_pb2 import PrepareUpdateRequest


@pytest.fixture
def engine(tiny: tuple[Any, Path]) -> Iterator[SGLangEngine]:
    """As it is once it has started a server of a pair, whose weights are at version 3."""
    config = EngineConfig(model_path=str(tiny[1]))
    engine = SGLangEngine(config, lambda _: None)
    engine._state.paired = True
    engine._stamps = Stamps("default")
    engine._stamps.bind(WeightVersion(label="c", sequence=3))
    control: Any = None  # which nothing here calls
    engine._updates = Updates(control, engine._state, Checkpoints("SGLang", config.model_path, ()), Facts({}, {}))
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
    engine._updates.prepare(PrepareUpdateRequest(), call)
    assert "takes in weights" in refused(engine)
    await engine._updates.abort(call)
    assert not refused(engine)


def test_a_server_of_no_pair_takes_every_request(engine: SGLangEngine) -> None:
    engine._state.paired = False
    engine._state.paused = PAUSE_MODE_ABORT
    assert not refused(engine, 9)


def test_a_half_is_computed_with_the_adapter_that_its_pair_had() -> None:
    request = GenerateRequest(bootstrap_version_seq=3, adapter="math", bootstrap_adapter_version="m-2")
    check_pair_adapter(request, "m-2")
    with pytest.raises(RlctlError, match="picked at version of adapter 'math' m-2, this stage is at m-3") as caught:
        check_pair_adapter(request, "m-3")
    assert (caught.value.reason, caught.value.field) == (Reason.STAGE_NOT_SERVING, "bootstrap_adapter_version")
    check_pair_adapter(GenerateRequest(adapter="math"), "m-3")  # of no pair

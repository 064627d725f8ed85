"""Staged and rolling updates of torch engines in processes of their own: generation goes on, whatever comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from digests import holds
from models import Halfway, changed, greedy
from test_torch_fleet import all_generate_like, digests
from trainers import half_way

import rlctl
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.publisher import Publisher
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


LONG = 300
"""Tokens of a request that a swap catches in flight."""

SOME = 20


@pytest.fixture(scope="module")
def fleet(torch_fleet: LaunchedFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def publisher(fleet: Fleet) -> Iterator[Publisher]:
    publisher = fleet.publisher("actor", trainer="staged", bucket_bytes=4096)
    yield publisher
    publisher.close()


def routable(fleet: Fleet) -> bool:
    return all(stage.routable and stage.state == common.STAGE_STATE_READY for stage in fleet.status().stages)


def test_the_old_weights_generate_while_the_new_ones_land(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    old, new = changed(tiny[0], seed=60), changed(tiny[0], seed=61)
    publisher.update(old, version="old")
    seen: list[str] = []

    def look() -> None:
        all_generate_like(fleet, old)
        stages = fleet.status().stages
        seen.extend(stage.staging_update_id for stage in stages)
        assert routable(fleet)

    result = publisher.update(Halfway(new, look), version="staged", apply="staged")
    assert len(seen) == 2
    assert all(seen)
    assert result.operation.state == OPERATION_STATE_OK
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert 0 < result.pause_s < result.total_s
    assert holds(digests(fleet), new)
    all_generate_like(fleet, new)


def test_a_request_in_flight_goes_on_with_the_new_weights(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    old, new = changed(tiny[0], seed=62), changed(tiny[0], seed=63)
    publisher.update(old, version="before")
    parts, streams = [], []

    def start() -> None:
        stream = fleet.generate_stream(encode("5+"), max_new_tokens=LONG, temperature=0.0, ignore_eos=True)
        parts.append(next(stream))
        streams.append(stream)

    publisher.update(Halfway(new, start), version="after", apply="staged")
    parts += streams[0]
    tokens = [token for part in parts for token in part.samples[0].output_ids]
    spans = [span for part in parts for span in part.samples[0].versions]
    kept = sum(span.end - span.start for span in spans if span.version.label == "before")
    assert {span.version.label for span in spans} == {"before", "after"}
    assert len(tokens) == LONG
    assert tokens[:kept][:SOME] == greedy(old, encode("5+"), min(kept, SOME))
    some = tokens[kept : kept + SOME]
    assert some == greedy(new, encode("5+") + tokens[:kept], len(some)), "no KV entry of old weights"


@pytest.mark.parametrize("path", ["ipc", "disk"])
def test_the_other_paths(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path, path: str) -> None:
    new = changed(tiny[0], seed=64 + len(path))
    publisher = fleet.publisher("actor", path="ipc" if path == "ipc" else "broadcast")
    settings: dict[str, Any] = {}
    if path == "disk":
        new.save_pretrained(tmp_path / "saved")
        settings["checkpoint"] = str(tmp_path / "saved")
    publisher.update(new, version=path, apply="staged", rollout=rlctl.rolling(), **settings)
    publisher.close()
    assert holds(digests(fleet), new)
    all_generate_like(fleet, new)


def test_a_checkpoint_with_another_digest_leaves_the_old_weights_serving(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    old = changed(tiny[0], seed=66)
    publisher.update(old, version="right")
    changed(tiny[0], seed=67).save_pretrained(tmp_path / "wrong")
    with pytest.raises(OperationFailed) as caught:
        publisher.update(old, version="wrong", checkpoint=str(tmp_path / "wrong"), apply="staged")
    assert {r.error.reason for r in caught.value.operation.stage_results} == {"DIGEST_MISMATCH"}
    assert {r.outcome for r in caught.value.operation.stage_results} == {common.OUTCOME_REJECTED}
    assert routable(fleet)
    all_generate_like(fleet, old)


def test_a_trainer_that_is_killed_half_way_costs_no_token(
    fleet: Fleet, torch_fleet: LaunchedFleet, publisher: Publisher, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    old = changed(tiny[0], seed=68)
    publisher.update(old, version="survives")
    with half_way(torch_fleet.address, tmp_path, apply="staged"):
        all_generate_like(fleet, old)
    all_generate_like(fleet, old)
    (open_update,) = {model.update_id for model in fleet.status().models}
    operation = fleet.abort_update(open_update, reason="its trainer is gone")
    assert {r.outcome for r in operation.stage_results} == {common.OUTCOME_REJECTED}
    assert routable(fleet)
    new = changed(tiny[0], seed=69)
    publisher.update(new, version="goes on", apply="staged")
    all_generate_like(fleet, new)


def test_settings_are_checked(fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]) -> None:
    for settings, field in (
        ({"apply": "staged", "pause": ""}, "options.pause"),
        ({"apply": "sideways"}, "apply"),
    ):
        with pytest.raises(RlctlError) as caught:
            publisher.update(tiny[0], version="never", **settings)
        assert caught.value.field == field
    with pytest.raises(RlctlError) as caught:
        rlctl.rolling(0)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert routable(fleet)

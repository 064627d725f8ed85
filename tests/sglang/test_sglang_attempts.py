"""A real server that is killed while weights are on their way: the others serve the new ones, under a quorum."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy

from rlctl.client.fleet import Fleet
from rlctl.demo.tiny import encode
from rlctl.launch.fleet import EngineSpec, LaunchedFleet
from rlctl.testing.interrupted import Interrupted
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_PARTIAL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SLOTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def fleet(sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    engines = [EngineSpec(slot, str(tiny[1]), engine="sglang") for slot in SLOTS]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
        yield fleet


class Traffic:
    """Requests without an end; of each, when it ended and what its tokens were generated with."""

    def __init__(self, fleet: Fleet) -> None:
        self.served: list[tuple[float, str, set[str]]] = []
        self._fleet = fleet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def since(self, moment: float) -> list[tuple[str, set[str]]]:
        """Stage and versions of the requests that ended after a moment."""
        return [(slot, labels) for ended, slot, labels in self.served if ended > moment]

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            response = self._fleet.generate(encode("1+2="), max_new_tokens=4, temperature=0.0, ignore_eos=True)
            sample = response.samples[0]
            labels = {span.version.label for span in sample.versions}
            assert sum(span.end - span.start for span in sample.versions) == len(sample.output_ids)
            self.served.append((began, response.slot, labels))


def test_a_server_that_is_killed_mid_broadcast_under_a_quorum(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
    first = changed(tiny[0], seed=1)
    publisher.update(first, version="whole")
    model = changed(tiny[0], seed=2)
    (rank,) = fleet.call(v.GetServerInfoRequest(), slots=["c"]).stage_results[0].rank_results
    before = {stage.registration.slot: stage.incarnation for stage in fleet.status().stages}
    weights = Interrupted(model, lambda: os.kill(rank.server_info.pid, signal.SIGKILL))
    with Traffic(fleet) as traffic:
        result = publisher.update(weights, version="without-c", quorum=2, retries=1, deadline_s=120)
        published = time.monotonic()
        assert result.operation.state == OPERATION_STATE_PARTIAL
        outcomes = {stage.slot: stage.outcome for stage in result.operation.stage_results}
        assert (outcomes["a"], outcomes["b"]) == (common.OUTCOME_APPLIED, common.OUTCOME_APPLIED)
        assert outcomes["c"] != common.OUTCOME_APPLIED
        while not {"a", "b"} <= {slot for slot, _ in traffic.since(published)}:
            assert traffic._thread.is_alive()
            time.sleep(0.05)
    assert fleet.status().models[0].latest.label == "without-c"
    assert all(labels == {"without-c"} for _, labels in traffic.since(published))
    stages = {stage.registration.slot: stage for stage in fleet.status().stages}
    assert [stages[slot].incarnation for slot in ("a", "b")] == [before["a"], before["b"]], "nothing was restarted"
    response = fleet.generate(encode("1+2="), max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(response.samples[0].output_ids) == greedy(model, encode("1+2="), 8)
    # Its stage has started it again; a server that has the version heals it, and then it serves that and nothing else.
    with closing(fleet.watch()) as events:
        for event in events:
            if any(s.registration.slot == "c" and s.routable for s in event.fleet.stages):
                break
    after = {stage.registration.slot: stage for stage in fleet.status().stages}["c"]
    assert after.incarnation > before["c"]
    assert after.report.weight_version == result.version
    with Traffic(fleet) as traffic:
        while "c" not in {slot for slot, _ in traffic.since(0.0)}:
            assert traffic._thread.is_alive()
            time.sleep(0.05)
    assert all(labels == {"without-c"} for _, labels in traffic.since(0.0))
    publisher.close()

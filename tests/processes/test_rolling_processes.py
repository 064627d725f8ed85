"""Updates that roll in place over torch engines that are under load: somebody always serves, and only what may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import holds
from models import Halfway, changed, greedy
from test_torch_fleet import all_generate_like, digests

import rlctl
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

TOKENS = 6


@pytest.fixture(scope="module")
def fleet(torch_fleet: LaunchedFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


class Load:
    """Requests one after the other, while something else goes on. One that a pause catches ends after it.

    Attributes:
        served: (labels of the versions that served it, tokens) of each request.
        failures: what requests ended with that did not end well.
        least: fewest stages that were routable at once.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._look)]
        self.served: list[tuple[set[str], list[int]]] = []
        self.failures: list[BaseException] = []
        self.least = 2

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def ask(self) -> tuple[set[str], list[int]]:
        """One request more."""
        answer = self._fleet.generate(encode("5+"), max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        sample = answer.samples[0]
        return {span.version.label for span in sample.versions}, list(sample.output_ids)

    def _ask(self) -> None:
        try:
            while not self._stop.is_set():
                self.served.append(self.ask())
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.failures.append(error)

    def _look(self) -> None:
        while not self._stop.is_set():
            self.least = min(self.least, sum(stage.routable for stage in self._fleet.status().stages))


@pytest.mark.parametrize("path", ["broadcast", "ipc", "disk"])
def test_somebody_always_serves_one_of_the_two_versions(
    fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path, path: str
) -> None:
    old, new = changed(tiny[0], seed=160), changed(tiny[0], seed=161)
    publisher = fleet.publisher("actor", path="broadcast" if path == "disk" else path, bucket_bytes=4096)
    settings: dict[str, Any] = {}
    if path == "disk":
        new.save_pretrained(tmp_path / "saved")
        settings["checkpoint"] = str(tmp_path / "saved")
    publisher.update(old, version=f"{path}-old")
    passes: list[set[str]] = []
    with Load(fleet).running() as load:

        def between() -> None:
            # Requests end while this batch is written: the other stage serves them. On the shared-memory path the
            # second pass begins before its batch is paused, so the first answers may still come from the old stage.
            asked = [load.ask() for _ in range(3)]
            while passes and not any(f"{path}-new" in labels for labels, _ in asked) and len(asked) < 50:
                asked.append(load.ask())
            load.served.extend(asked)
            passes.append(set[str]().union(*(labels for labels, _ in asked)))

        weights = new if path == "disk" else Halfway(new, between)
        result = publisher.update(weights, version=f"{path}-new", rollout=rlctl.rolling(), **settings)
    assert not load.failures
    assert load.least >= 1
    assert result.operation.state == OPERATION_STATE_OK
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    if path != "disk":
        assert len(passes) == 2, "a pass for each batch"
        assert passes[0] == {f"{path}-old"}
        assert f"{path}-new" in passes[1], "the first batch serves while the second is written"
    right = {f"{path}-old": greedy(old, encode("5+"), TOKENS), f"{path}-new": greedy(new, encode("5+"), TOKENS)}
    assert set[str]().union(*(labels for labels, _ in load.served)) <= right.keys()
    whole = [(labels.pop(), tokens) for labels, tokens in load.served if len(labels) == 1]
    assert whole
    assert all(tokens == right[label] for label, tokens in whole)
    assert holds(digests(fleet), new)
    all_generate_like(fleet, new)
    publisher.close()


class Once:
    """A source that says that it can be gone through again, and cannot."""

    def __init__(self, model: Any) -> None:
        self._pairs = list(model.state_dict().items())
        self._left = iter(self._pairs)

    def metas(self) -> Any:
        from rlctl.weights.tensor.tensors import TensorMeta

        return [TensorMeta.of(name, tensor) for name, tensor in self._pairs]

    def local(self) -> Any:
        return (((name,), tensor) for name, tensor in self._pairs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._left


def test_a_source_that_fails_in_its_second_pass_leaves_the_first_batch_serving(
    fleet: Fleet, tiny: tuple[Any, Path]
) -> None:
    old, new = changed(tiny[0], seed=162), changed(tiny[0], seed=163)
    publisher = fleet.publisher("actor", bucket_bytes=4096)
    publisher.update(old, version="before")
    passes = 0

    def fail_later() -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise RuntimeError("the trainer has another bug")

    with pytest.raises(RuntimeError, match="another bug"):
        publisher.update(Halfway(new, fail_later), version="half", rollout=rlctl.rolling())
    assert fleet.status().models[0].latest.label == "half"
    operation = next(o for o in fleet.operations(verb="WeightUpdate") if o.weight_version.label == "half")
    assert operation.state == OPERATION_STATE_PARTIAL
    first, second = sorted(operation.stage_results, key=lambda result: result.slot)
    assert (first.outcome, second.outcome) == (common.OUTCOME_APPLIED, common.OUTCOME_DIRTY)
    answer = fleet.generate(encode("5+"), max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    assert (answer.slot, list(answer.samples[0].output_ids)) == ("actor-0", greedy(new, encode("5+"), TOKENS))
    # The rest is brought to the version without the trainer.
    fleet.heal(["actor-1"])
    all_generate_like(fleet, new)
    publisher.update(old, version="goes on", rollout=rlctl.rolling())
    all_generate_like(fleet, old)
    publisher.close()


def test_a_source_that_can_be_gone_through_once_is_told(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    new = changed(tiny[0], seed=164)
    publisher = fleet.publisher("actor", bucket_bytes=4096)
    with pytest.raises(RlctlError) as caught:
        publisher.update(Once(new), version="once", rollout=rlctl.rolling())
    assert not isinstance(caught.value, OperationFailed)
    assert caught.value.reason is Reason.FIELD_INVALID, caught.value
    publisher.update(iter(list(new.state_dict().items())), version="pairs", rollout=rlctl.rolling())
    all_generate_like(fleet, new)
    publisher.close()


def test_a_staged_update_is_probed(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    old, new = changed(tiny[0], seed=165), changed(tiny[0], seed=166)
    publisher = fleet.publisher("actor", bucket_bytes=4096)
    probe = rlctl.Probe.of(new, [encode("1+2="), encode("9")], tolerance=1e-4)
    result = publisher.update(new, version="probed", apply="staged", verify="probe", probe=probe)
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_PROBE}
    all_generate_like(fleet, new)
    with pytest.raises(OperationFailed) as caught:
        publisher.update(old, version="other", apply="staged", verify="probe", probe=probe)
    assert {stage.error.reason for stage in caught.value.operation.stage_results} == {"PROBE_MISMATCH"}
    assert not any(stage.routable for stage in fleet.status().stages), "swapped, and not what the trainer computes"
    publisher.update(old, version="clean")
    all_generate_like(fleet, old)
    publisher.close()

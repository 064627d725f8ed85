"""Real vLLM servers, attached to without rlctl's extension, that take weights in by vLLM's own NCCL engine.

NCCL itself is a fake, over gloo (gloo_in_vllm.py): there is no GPU here. The tests with a fleet of several servers are
long, and stand in their order: the last ones end the servers.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from models import Halfway, changed, greedy
from native_stand_in import join_by_gloo, native_server
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.updates import native_nccl
from server_stage import VERB_S, Driver, Source, prompt, refusal
from test_vllm_attached import as_started, call

from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer import source_rank
from rlctl.trainer.publisher import Publisher
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_PARTIAL, OPERATION_STATE_RUNNING
from rlctl.weights.group.process_group import GroupStore
from rlctl.weights.tensor import buckets

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BACKENDS = ["vllm_nccl", "gloo"]

RANKS = {"solo": 1, "pair": 2}
"""Ranks of the servers of a fleet."""


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[None]:
    monkeypatch.setattr(native_nccl, "WITHOUT_GPU", True)
    monkeypatch.setattr(source_rank, "join_vllm", join_by_gloo)
    yield
    (place / "fails").unlink(missing_ok=True)


class NativeSource(Source):
    """A source whose group vLLM joins by its own engine."""

    def __enter__(self) -> NativeSource:
        self._store = GroupStore("127.0.0.1")
        joining = self._driver.submit(self.joining)
        settings: dict[str, Any] = {"timeout_s": VERB_S, "broadcast_timeout_s": VERB_S, "stop": threading.Event()}
        self.group = join_by_gloo(
            self._store.local_address,
            name=self.name,
            world_size=self.world_size,
            interface_host="127.0.0.1",
            **settings,
        )
        joining.result(VERB_S)
        return self

    @property
    def joining(self) -> v.InitWeightsUpdateGroupRequest:
        return v.InitWeightsUpdateGroupRequest(
            master_address="127.0.0.1",
            master_port=self._store.port,
            world_size=self.world_size,
            rank_offset=1,
            group_name=self.name,
            backend="vllm_nccl",
        )

    def update(self, model: Any, update_id: str) -> Any:
        """Announce all and send it; what every rank answered."""
        plan = self.plan(model, bucket_bytes=100_000)
        self.group.announce(size for bucket in plan for size in bucket.broadcasts)
        taking = self._driver.submit(self.announce(plan), update_id=update_id)
        self.send(model, plan)
        return taking.result(VERB_S)


def attached(url: str, checkpoint: Path, ranks: int = 1) -> Driver:
    return Driver(VLLMEngine, checkpoint, tp_size=ranks, options={"url": url})


def test_attaching_says_what_it_can_and_wrong_metadata_changes_nothing(elsewhere: str, tiny: tuple[Any, Path]) -> None:
    driver = attached(elsewhere, tiny[1])
    try:
        found = driver.start().capabilities
        assert list(found.transports) == [common.TRANSPORT_VLLM_NCCL, common.TRANSPORT_DISK]
        assert "transport.vllm_nccl" in found.experimental
        assert list(found.verification) == [common.VERIFICATION_LEVEL_NONE]
        with NativeSource(driver, "wrong") as source:
            (bucket,) = buckets.plan(Halfway(tiny[0], print).metas())
            gloo = source.joining
            gloo.backend, gloo.group_name = "gloo", "other"
            assert (refusal(driver, gloo).reason, refusal(driver, gloo).field) == (Reason.UNSUPPORTED, "backend")
            driver.prepare("u")
            for change, field in (
                (lambda b: b.shapes[0].dims.__setitem__(0, 7), "buckets[0].shapes[0]"),
                (lambda b: b.names.__setitem__(1, "nobody"), "buckets[0].names[1]"),
                (lambda b: b.dtypes.__setitem__(0, "torch.int64"), "buckets[0].dtypes[0]"),
                (lambda b: setattr(b, "sequence", 3), "buckets[0].sequence"),
            ):
                request = source.announce([bucket])
                change(request.buckets[0])
                error = refusal(driver, request, update_id="u")
                assert (error.reason, error.field, error.outcome) == (
                    Reason.FIELD_INVALID,
                    field,
                    common.OUTCOME_REJECTED,
                )
            twice = source.announce([bucket, bucket])
            twice.buckets[1].sequence = 1
            error = refusal(driver, twice, update_id="u")
            assert (error.reason, error.field) == (Reason.FIELD_INVALID, "buckets[1].names[0]")
            in_no_group = source.announce([bucket])
            in_no_group.group_name = "elsewhere"
            assert refusal(driver, in_no_group, update_id="u").reason is Reason.GROUP_NOT_FOUND
            assert refusal(driver, v.ContinueGenerationRequest()).reason is Reason.ILLEGAL_STATE
            incomplete = refusal(driver, v.CommitUpdateRequest(version=common.WeightVersion(label="x")), update_id="u")
            assert (incomplete.reason, incomplete.outcome) == (Reason.WEIGHTS_INCOMPLETE, common.OUTCOME_REJECTED)
            driver.tell(v.AbortUpdateRequest(), update_id="u")
            partial = refusal(driver, v.PrepareUpdateRequest(kind=v.UPDATE_KIND_PARTIAL), update_id="p")
            assert (partial.reason, partial.field) == (Reason.UNSUPPORTED, "kind")
        driver.tell(v.ContinueGenerationRequest())
        assert driver.begin(prompt(encode("4"), 8)).started().result()
        assert not driver.failures
    finally:
        driver.stop()
    again = attached(elsewhere, tiny[1])
    try:
        assert again.start().checkpoint == str(tiny[1]), "its label is the one of its start"
    finally:
        again.stop()


def test_what_a_stage_server_has_left_open_is_closed_by_the_next_one(elsewhere: str, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=1)
    first = attached(elsewhere, tiny[1])
    first.start()
    with NativeSource(first, "left") as source:
        first.prepare("u")
        (result,) = source.update(model, "u")
        assert (result.outcome, result.evidence) == (common.OUTCOME_APPLIED, common.EVIDENCE_RANK)
    first.tell(v.PrepareUpdateRequest(), update_id="u")
    with NativeSource(first, "half") as source:
        plan = source.plan(model, bucket_bytes=20_000, large_bytes=1)  # layers of several tensors stay half filled
        half = plan[: len(plan) // 2]
        taking = first.submit(source.announce(half), update_id="u")
        source.group.announce(size for bucket in half for size in bucket.broadcasts)
        for bucket, (_, tensor) in zip(half, Halfway(model, print).tensors(), strict=False):
            assert len(bucket.metas) == 1
            source.group.broadcast(tensor.detach().contiguous())
        taking.result(VERB_S)
        first.engine._ranks._load = native_nccl._Load.CLOSED  # it ends without a word
        source.group.announce([])
    first.stop()
    call(elsewhere, "/resume")
    again = attached(elsewhere, tiny[1])
    try:
        assert again.start().checkpoint == ""
        with NativeSource(again, "whole") as source:
            again.prepare("w")
            source.update(model, "w")
            version = again.commit("w", "whole", 2)
        again.tell(v.ContinueGenerationRequest())
        generating = again.begin(prompt(encode("4"), 8))
        assert generating.result()[-1].samples[0].versions[0].version == version
        assert generating.tokens == greedy(model, encode("4"), 8)
    finally:
        again.stop()
    call(elsewhere, "/update_weight_version", {"new_version": "default"})


@pytest.fixture(scope="module")
def urls(elsewhere: str, tiny: tuple[Any, Path], place: Path) -> Iterator[dict[str, str]]:
    with native_server(tiny[1], place, RANKS["pair"]) as pair:
        yield {"solo": elsewhere, "pair": pair}


@pytest.fixture(scope="module")
def up(
    urls: dict[str, str], tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedFleet]:
    """Both servers, and a torch engine."""
    engines = [
        *(
            EngineSpec(name, str(tiny[1]), engine="vllm", tp_size=RANKS[name], options={"url": url})
            for name, url in urls.items()
        ),
        EngineSpec("torch", str(tiny[1]), engine="torch"),
    ]
    for url in urls.values():
        as_started(url, tiny[1])  # the tests before have left weights of theirs, which a stage would refuse
    with pytest.MonkeyPatch.context() as patch:
        here = Path(__file__).parent
        paths = [str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet"), module="native_stand_in") as fleet:
            yield fleet


@pytest.fixture
def fleet(up: LaunchedFleet) -> Iterator[Fleet]:
    with up.connect() as fleet:
        yield fleet


@pytest.fixture
def publisher(fleet: Fleet) -> Iterator[Publisher]:
    with contextlib.closing(fleet.publisher("actor", backend=BACKENDS, bucket_bytes=16 << 10)) as publisher:
        yield publisher


def generate_like(fleet: Fleet, model: Any, version: common.WeightVersion, slots: set[str]) -> None:
    said: set[str] = set()
    while said != slots:
        response = fleet.generate(encode("3+"), max_new_tokens=12, temperature=0.0, ignore_eos=True)
        assert [span.version.label for span in response.samples[0].versions] == [version.label]
        assert list(response.samples[0].output_ids) == greedy(model, encode("3+"), 12), response.slot
        said.add(response.slot)


def stages(result: Any) -> dict[str, Any]:
    return {stage.slot: stage for stage in result.operation.stage_results}


@pytest.mark.long
def test_one_pass_and_one_commit_for_engines_of_both_kinds(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    for seed in (11, 12):
        model = changed(tiny[0], seed=seed)
        result = publisher.update(model, version=f"seed-{seed}")
        found = stages(result)
        for name, ranks in RANKS.items():
            assert found[name].verified == common.VERIFICATION_LEVEL_NONE
            assert [rank.evidence for rank in found[name].rank_results] == [common.EVIDENCE_RANK] * ranks
            assert {rank.weights.tensors for rank in found[name].rank_results} == {len(list(tiny[0].parameters()))}
        assert found["torch"].verified == common.VERIFICATION_LEVEL_EXPECTED
        generate_like(fleet, model, result.version, {"solo", "pair", "torch"})
    joined = [list(operation.targets) for operation in fleet.operations(verb="InitWeightsUpdateGroup")]
    assert sorted(joined) == [["pair"], ["solo"], ["torch"]], "each has a group of its own, kept for the second update"


@pytest.mark.long
def test_what_it_cannot_take_is_refused_at_the_begin(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    before = fleet.status().models[0].latest
    norm = [("model.norm.weight", tiny[0].model.norm.weight)]
    for settings, reason, field in (
        ({"weights": norm, "partial": True}, Reason.UNSUPPORTED, "kind"),
        ({"base": before.label}, Reason.BASE_MISMATCH, "base"),
        ({"apply": "staged", "pause": "abort"}, Reason.UNSUPPORTED, "apply"),
        ({"verify": "expected"}, Reason.VERIFICATION_UNREACHABLE, "options.verify"),
    ):
        given: dict[str, Any] = {"weights": tiny[0], **settings}
        with pytest.raises(RlctlError) as refused:
            publisher.update(given.pop("weights"), version="refused", **given)
        assert (refused.value.reason, refused.value.field) == (reason, field)
    with contextlib.closing(fleet.publisher("actor")) as by_gloo, pytest.raises(RlctlError) as refused:
        by_gloo.update(tiny[0], version="refused")
    assert (refused.value.reason, refused.value.message) == (Reason.UNSUPPORTED, "pair joins no gloo group")
    assert fleet.status().models[0].latest == before


@pytest.mark.long
def test_requests_of_others_wait_until_an_update_has_ended(
    fleet: Fleet, publisher: Publisher, urls: dict[str, str], tiny: tuple[Any, Path]
) -> None:
    """A server that was attached to can be reached past rlctl; generating in the middle would end it."""
    model = changed(tiny[0], seed=21)
    asked: list[Future[None]] = []
    body = {"model": "rlctl", "prompt": encode("4"), "max_tokens": 4}
    with ThreadPoolExecutor(1) as helper:

        def ask() -> None:
            asked.append(helper.submit(call, urls["solo"], "/v1/completions", body))
            time.sleep(1)
            assert not asked[0].done()
            with pytest.raises(RlctlError):
                fleet.call(v.ContinueGenerationRequest(), slots=["solo"], timeout_s=3)

        result = publisher.update(Halfway(model, ask), version="in the middle")
        asked[0].result(30)
    generate_like(fleet, model, result.version, {"solo", "pair", "torch"})


@pytest.mark.long
def test_a_source_that_gives_up_leaves_them_dirty_and_not_stuck(
    fleet: Fleet, publisher: Publisher, tiny: tuple[Any, Path]
) -> None:
    def give_up() -> None:
        raise ValueError("no gradient today")

    with pytest.raises(ValueError, match="no gradient today"):
        publisher.update(Halfway(changed(tiny[0], seed=31), give_up), version="never")
    now = {stage.registration.slot: stage for stage in fleet.status().stages}
    assert {stage.report.state for stage in now.values()} == {common.STAGE_STATE_DIRTY}
    assert not any(stage.report.HasField("quarantine") for stage in now.values()), "none of them is stuck"
    model = changed(tiny[0], seed=32)
    result = publisher.update(model, version="after that")
    generate_like(fleet, model, result.version, {"solo", "pair", "torch"})


@pytest.mark.long
def test_a_server_that_fails_in_the_middle_holds_no_other_one_up(
    fleet: Fleet, publisher: Publisher, place: Path, tiny: tuple[Any, Path]
) -> None:
    (place / "fails").write_text("1 0 model.layers.0.self_attn.o_proj.weight")
    with pytest.raises(OperationFailed) as failed:
        publisher.update(changed(tiny[0], seed=41), version="never")
    (place / "fails").unlink()
    assert "this rank was to fail" in failed.value.message
    solo = stages(failed.value)["solo"]
    assert (solo.outcome, solo.error.reason) == (common.OUTCOME_DIRTY, Reason.ENGINE_FAILED.name)
    assert not any(stage.report.HasField("quarantine") for stage in fleet.status().stages), "none of them is stuck"
    model = changed(tiny[0], seed=42)
    result = publisher.update(model, version="after that")
    generate_like(fleet, model, result.version, {"solo", "pair", "torch"})


@pytest.mark.long
def test_ranks_whose_answers_are_out_of_step_are_given_up(
    fleet: Fleet, publisher: Publisher, place: Path, urls: dict[str, str], tiny: tuple[Any, Path]
) -> None:
    """What the second of two ranks says is left unread when the first one fails."""
    (place / "fails").write_text("2 0 model.norm.weight")
    with pytest.raises(OperationFailed) as failed:
        publisher.update(changed(tiny[0], seed=51), version="never")
    (place / "fails").unlink()
    pair = stages(failed.value)["pair"]
    assert "belong to earlier calls" in pair.error.message
    now = {stage.registration.slot: stage for stage in fleet.status().stages}
    assert "belong to earlier calls" in now["pair"].report.quarantine.message
    assert not now["pair"].routable
    model = changed(tiny[0], seed=52)
    result = publisher.update(model, version="without it", quorum=2)
    assert result.operation.state == OPERATION_STATE_PARTIAL
    generate_like(fleet, model, result.version, {"solo", "torch"})
    # Another stage server would be told by the same answers.
    call(urls["pair"], "/resume")
    call(urls["pair"], "/update_weight_version", {"new_version": "default"})
    driver = attached(urls["pair"], tiny[1], ranks=2)
    try:
        found = driver.start().capabilities
        assert list(found.transports) == [common.TRANSPORT_DISK]
        assert "belong to earlier calls" in found.unsupported["UpdateWeightsFromDistributed"]
    finally:
        driver.stop()


@pytest.mark.long
def test_a_trainer_that_is_killed_leaves_its_server_stuck_and_quarantined_in_time(
    up: LaunchedFleet, fleet: Fleet, publisher: Publisher, urls: dict[str, str], tiny: tuple[Any, Path]
) -> None:
    """Nothing gets vLLM out of the broadcast; it is not ours to kill. The others go on without it."""
    trainer = subprocess.Popen(
        [sys.executable, "-m", "native_stand_in", "--train", up.address, str(tiny[1])],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    with trainer:
        assert trainer.stdout.readline() == "in the middle\n"
        trainer.kill()
    killed = time.monotonic()
    while not next(s for s in fleet.status().stages if s.registration.slot == "solo").report.HasField("quarantine"):
        assert time.monotonic() - killed < 60
        time.sleep(0.5)
    (solo,) = (s for s in fleet.status().stages if s.registration.slot == "solo")
    assert "did not come back from a broadcast" in solo.report.quarantine.message
    assert not solo.routable
    while fleet.operations(verb="WeightUpdate")[0].state == OPERATION_STATE_RUNNING:
        assert time.monotonic() - killed < 60
        time.sleep(0.5)
    model = changed(tiny[0], seed=61)
    result = publisher.update(model, version="without both", quorum=1)
    assert result.operation.state == OPERATION_STATE_PARTIAL
    generate_like(fleet, model, result.version, {"torch"})

"""Random sequences of admin verbs and requests, valid and not: the server does what the model says, and serves on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy
from rlctl_sglang import SGLangEngine
from rlctl_sglang.server import facts
from server_stage import Driver, Generating, Source, prompt
from sglang_model import BROADCASTS, CHECKPOINTS, Model, Request, choose

import rlctl
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny as tiny_
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(300)

CONTEXT = 1 << 15
ENDLESS = CONTEXT - 100
"""Tokens of a request that does not end by itself before its sequence has."""

VERBS = 15
FLUSH_S = 5.0
"""How long SGLang may take to let go of requests that have ended."""

SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 200))]


class Server:
    """A real server, and the models that it may hold."""

    def __init__(self, place: Path) -> None:
        first = tiny_.make(seed=3)
        first.config.max_position_embeddings = CONTEXT
        others = [changed(first, seed) for seed in range(3)]
        self.models = dict(zip((*CHECKPOINTS, *BROADCASTS), (first, *others), strict=True))
        for name in CHECKPOINTS:
            tiny_.save(self.models[name], place / name)
        self.place = place
        self.labels = 0
        self.groups = 0
        options = {"allowed_roots": str(place), "max_total_tokens": str(4 * CONTEXT)}
        self.driver = Driver(SGLangEngine, place / "first", options=options)
        self.driver.start()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all sequences. Without the memory saver, which has no CPU, it keeps the books only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts.Facts, "memory_tags", frozenset({common.MEMORY_TAG_KV_CACHE, common.MEMORY_TAG_WEIGHTS}))
        server = Server(tmp_path_factory.mktemp("sequences"))
        try:
            yield server
        finally:
            server.driver.stop()


class Run:
    """One sequence: each method does to the server what the model's method of that name says."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self._server = server
        self._driver = server.driver
        self._rng = rng
        self._requests: dict[str, Generating] = {}
        self.model = Model()

    def step(self) -> tuple[Any, ...]:
        """One verb; compares what came of it."""
        verb, arguments = choose(self._rng, self.model)
        before = set(self.model.requests)
        wanted, found = getattr(self, verb)(*arguments)
        done = (verb, *arguments, wanted.name if isinstance(wanted, Reason) else "")
        assert found == wanted, f"{done}: {found}"
        for rid in before - self.model.requests.keys():
            last = self._requests.pop(rid).result()[-1].samples[0]
            assert last.finish_reason.type == rollout.FINISH_TYPE_ABORT
        self._compare()
        return done

    def _compare(self) -> None:
        """What the server says about itself."""
        answer = self._driver.admin.submit(self._driver.engine._server.http.call("/ready", timeout_s=5)).result(10)
        assert (answer.status == 200) is not self.model.stopped
        version = self._driver.tell(v.GetModelInfoRequest()).weight_version
        assert self.model.label is None or version.label == self.model.label
        assert self._driver.engine._requests.active == len(self.model.requests)
        for rid, state in self.model.requests.items():
            assert not self._requests[rid].done.done()
            if state is Request.RUNNING:
                self._requests[rid].started()
            elif state is Request.HELD:
                assert not self._requests[rid].parts
        assert not self._driver.failures

    def _tell(self, request: Any, update: str = "") -> Reason | None:
        try:
            self._driver.tell(request, update_id=update)
        except RlctlError as error:
            return error.reason
        return None

    def finish(self) -> None:
        """Leave the server as it was, whatever it was told; it serves the weights that the model says."""
        self.abort_all()
        self._tell(v.ResumeMemoryRequest())
        self.model.resume(())
        self._tell(v.AbortUpdateRequest(), self.model.update)
        self.model.drop(self.model.update)
        assert self.go_on() == (None, None)
        assert self.flush() == (None, None)
        assert self.generate()[1] is None
        assert self._driver.digest() == rlctl.model_digest(self._server.models[self.model.weights])
        assert self.prepare("end", "") == (None, None)
        assert self.load("end", "first") == (None, None)
        assert self.commit("end") == (None, None)
        assert self.flush() == (None, None)

    def pause(self, mode: str) -> Any:
        named = {"drain": common.PAUSE_MODE_DRAIN, "99": 99}
        number = named.get(mode) or common.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
        return self.model.pause(mode), self._tell(v.PauseGenerationRequest(mode=number))  # type: ignore[arg-type]

    def go_on(self) -> Any:
        return self.model.go_on(), self._tell(v.ContinueGenerationRequest())

    def begin(self, rid: str) -> Any:
        wanted = self.model.begin(rid)
        generating = self._driver.begin(prompt([self._rng.randrange(16)] * 3, ENDLESS, rid=rid))
        if wanted is not None:
            with pytest.raises(RlctlError) as refused:
                generating.result()
            return wanted, refused.value.reason
        self._requests[rid] = generating
        while not self._driver.engine._requests.active >= len(self.model.requests):
            assert not generating.done.done()
        return None, None

    def begin_wrong(self) -> Any:
        with pytest.raises(RlctlError) as refused:
            self._driver.generate(prompt([16], 2))
        return Reason.FIELD_INVALID, refused.value.reason

    def abort(self, rid: str) -> Any:
        report = self._driver.tell(v.AbortRequestsRequest(rids=[rid]))
        return len(self.model.abort([rid])), report.aborted

    def abort_all(self) -> Any:
        report = self._driver.tell(v.AbortRequestsRequest(abort_all=True))
        return len(self.model.abort(list(self.model.requests))), report.aborted

    def flush(self) -> Any:
        wanted = self.model.flush()
        wait = duration(FLUSH_S if wanted is None else 0)
        return wanted, self._tell(v.FlushCacheRequest(idle_timeout=wait))

    def release(self, *tags: str) -> Any:
        return self.model.release(tags), self._tell(v.ReleaseMemoryRequest(tags=numbers(tags)))

    def resume(self, *tags: str) -> Any:
        return self.model.resume(tags), self._tell(v.ResumeMemoryRequest(tags=numbers(tags)))

    def prepare(self, update: str, abort: str) -> Any:
        request = v.PrepareUpdateRequest(abort_all_requests=bool(abort))
        return self.model.prepare(update, abort=bool(abort)), self._tell(request, update)

    def load(self, update: str, name: str) -> Any:
        request = v.UpdateWeightsFromDiskRequest(model_path=str(self._server.place / name))
        return self.model.write(update, name, over="disk"), self._tell(request, update)

    def load_wrong(self, update: str) -> Any:
        """A checkpoint that is not there: refused without effect, or for whatever refuses one that is."""
        refused = Model(**vars(self.model)).write(update, "", over="disk")
        request = v.UpdateWeightsFromDiskRequest(model_path=str(self._server.place / "none"))
        return refused or Reason.CHECKPOINT_NOT_FOUND, self._tell(request, update)

    def broadcast(self, update: str, name: str) -> Any:
        self._server.groups += 1
        wanted = self.model.write(update, name, over="group")
        with Source(self._driver, f"sequence-{self._server.groups}") as source:
            plan = source.plan(self._server.models[name])
            receiving = self._driver.submit(source.announce(plan), update_id=update)
            if wanted is None:
                source.send(self._server.models[name], plan)
            try:
                receiving.result(60)
            except RlctlError as error:
                return wanted, error.reason
        return wanted, None

    def broadcast_nowhere(self, update: str) -> Any:
        refused = Model(**vars(self.model)).write(update, "", over="group")
        bucket = v.TensorBucket(names=["model.norm.weight"], dtypes=["torch.float32"], shapes=[v.Shape(dims=[128])])
        request = v.UpdateWeightsFromDistributedRequest(group_name="none", buckets=[bucket])
        return refused or Reason.GROUP_NOT_FOUND, self._tell(request, update)

    def commit(self, update: str) -> Any:
        self._server.labels += 1
        label = f"v{self._server.labels}"
        version = common.WeightVersion(label=label, sequence=self._server.labels)
        return self.model.commit(update, label), self._tell(v.CommitUpdateRequest(version=version), update)

    def drop(self, update: str) -> Any:
        return self.model.drop(update), self._tell(v.AbortUpdateRequest(), update)

    def leave_nothing(self) -> Any:
        return Reason.GROUP_NOT_FOUND, self._tell(v.DestroyWeightsUpdateGroupRequest(group_name="none"))

    def generate(self) -> Any:
        """What it generates is what its weights give, where no cache entry of others is left."""
        ids = [self._rng.randrange(3, 13) for _ in range(5)]
        generating = self._driver.begin(prompt(ids, 4))
        generating.result()
        if not self.model.cached:
            assert generating.tokens == greedy(self._server.models[self.model.weights], ids, 4)
        return None, None


def numbers(tags: tuple[str, ...]) -> list[Any]:
    return [common.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in tags]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_sequence(server: Server, seed: int) -> None:
    run = Run(server, random.Random(seed))
    try:
        for _ in range(VERBS):
            print(*run.step())  # noqa: T201 - shown with a failure
    finally:
        run.finish()

"""The metrics of a stage server: generation at its gate, lease and version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rlctl.contract.errors import RlctlError, typed
from rlctl.metrics import definitions as m
from rlctl.metrics.exposition import Exposition, Sample
from rlctl.ports import Clock
from rlctl.stage.serving_state import Serving
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, GenerateResponse


class StageMetrics:
    """Counts generation requests, and serves them with the state of a stage."""

    def __init__(self, model: str, slot: str, serving: Callable[[], Serving], clock: Clock) -> None:
        self._labels = (model, slot)
        self._serving = serving
        self._clock = clock
        self._running = 0
        self.exposition = Exposition(m.of(m.STAGE), self._state)

    def refused(self, principal: str) -> None:
        """Count a request that a quota has refused."""
        self.exposition.count(m.QUOTA_REFUSALS, principal)

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[GenerateResponse], None]]:
        """Count a request. Yields a function to call with each part of the answer."""
        started, first, outcome = self._clock.now(), True, "ok"
        tokens = 0

        def take(part: GenerateResponse) -> None:
            nonlocal first, outcome, tokens
            for sample in part.samples:
                tokens += len(sample.output_ids)
                if sample.HasField("finish_reason") and sample.finish_reason.type == FINISH_TYPE_ABORT:
                    outcome = "aborted"
            if first and tokens:
                first = False
                self.exposition.observe(m.GENERATION_FIRST, self._clock.now() - started, *self._labels)

        self._running += 1
        try:
            yield take
        except BaseException as error:
            outcome = typed(error).reason.name if isinstance(error, Exception) else "cancelled"
            raise
        finally:
            self._running -= 1
            self.exposition.count(m.GENERATED_TOKENS, *self._labels, by=tokens)
            self.exposition.count(m.GENERATION_REQUESTS, *self._labels, outcome)
            self.exposition.observe(m.GENERATION_SECONDS, self._clock.now() - started, *self._labels)

    def _state(self) -> Iterator[Sample]:
        yield m.GENERATION_RUNNING, self._labels, self._running
        try:
            serving = self._serving()
        except RlctlError:  # the engine is loading
            return
        yield m.STAGE_VERSION, self._labels, serving.version.sequence
        if serving.lease_until > float("-inf"):
            yield m.LEASE_SECONDS, self._labels, serving.lease_until - self._clock.now()

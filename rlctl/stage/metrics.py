"""The metrics of a stage server: generation at its gate, lease and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlctl.contract.errors import RlctlError, typed
from rlctl.metrics import definitions as m
from rlctl.metrics.exposition import Exposition, Sample
from rlctl.ports import Clock
from rlctl.stage.serving_state import Serving
from rlctl.transport.tls.credentials import Tls
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, GenerateResponse


class MeasuredRequest:
    """Counts a request from the entry of a block to the exit.

    Fields of each part would be slow to read. The last part of a sample has the totals.
    """

    __slots__ = ("_aborted", "_first", "_last", "_metrics", "_samples", "_started", "_tokens")

    def __init__(self, metrics: StageMetrics, samples: int) -> None:
        self._metrics = metrics
        self._samples = samples
        self._first = True
        self._aborted = False
        self._last: GenerateResponse | None = None
        self._tokens: dict[int, int] = {}

    def __enter__(self) -> Callable[[GenerateResponse], None]:
        """Return a function to call with each part of the answer."""
        self._started = self._metrics.clock.now()
        self._metrics.running += 1
        return self._take

    def _take(self, part: GenerateResponse) -> None:
        if self._first and any(sample.completion_tokens for sample in part.samples):
            self._first = False
            self._metrics.first.observe(self._metrics.clock.now() - self._started)
        if self._samples > 1:
            self._count(part)
        elif part.samples:
            self._last = part

    def _count(self, part: GenerateResponse) -> None:
        for sample in part.samples:
            self._tokens[sample.index] = sample.completion_tokens
            self._aborted |= sample.finish_reason.type == FINISH_TYPE_ABORT

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if self._last is not None:
            self._count(self._last)
        outcome = "aborted" if self._aborted else "ok"
        if error is not None:
            outcome = typed(error).reason.name if isinstance(error, Exception) else "cancelled"
        self._metrics.running -= 1
        self._metrics.ended(outcome, sum(self._tokens.values()), self._metrics.clock.now() - self._started)


class StageMetrics:
    """Counts generation requests, and serves them with the state of a stage."""

    def __init__(
        self, model: str, slot: str, serving: Callable[[], Serving], clock: Clock, tls: Tls | None = None
    ) -> None:
        self._labels = (model, slot)
        self._serving = serving
        self._tls = tls
        self.clock = clock
        self.running = 0
        self.exposition = Exposition(m.of(m.STAGE), self._state)
        self._tokens = self.exposition.counter(m.GENERATED_TOKENS, *self._labels)
        self._seconds = self.exposition.histogram(m.GENERATION_SECONDS, *self._labels)
        self.first = self.exposition.histogram(m.GENERATION_FIRST, *self._labels)

    def ended(self, outcome: str, tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._seconds.observe(seconds)
        self.exposition.count(m.GENERATION_REQUESTS, *self._labels, outcome)

    def refused(self, principal: str) -> None:
        """Count a request that a quota has refused."""
        self.exposition.count(m.QUOTA_REFUSALS, principal)

    def request(self, samples: int) -> MeasuredRequest:
        """Return the measurement of a request for a number of samples."""
        return MeasuredRequest(self, samples)

    def _state(self) -> Iterator[Sample]:
        yield m.GENERATION_RUNNING, self._labels, self.running
        if self._tls is not None:
            yield m.CERTIFICATE_EXPIRY, (), self._tls.material.expires.timestamp()
        try:
            serving = self._serving()
        except RlctlError:  # the engine is loading
            return
        yield m.STAGE_VERSION, self._labels, serving.version.sequence
        if serving.lease_until > float("-inf"):
            yield m.LEASE_SECONDS, self._labels, serving.lease_until - self.clock.uptime()

"""Output of a request from the engine thread to the request's event loop: in order, without blocking either."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from rlctl.contract.errors import RlctlError
from rlctl.contract.partial_responses import MergedSample
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import FinishReason, GenerateResponse, Sample, TokenLogprob, VersionSpan
from rlctl_torch.generation.request_settings import Settings
from rlctl_torch.generation.sampling import Choice


@dataclass(slots=True)
class Delta:
    """New output of a sample.

    Attributes:
        index: number of the sample.
        start: position of the first new token in the output.
        version: version of the weights for these tokens.
        kv_version: version of the weights for the oldest KV entries that these tokens attend to.
        finish: set if the sample has ended.
        retractions: number of retractions so far.
        adapter_version: version of the sample's adapter for these tokens, or "".
    """

    index: int
    tokens: Sequence[Choice]
    text: str
    start: int
    version: WeightVersion
    kv_version: WeightVersion
    finish: FinishReason | None
    retractions: int
    adapter_version: str = ""


class Stream:
    """Output of a request, filled by the engine thread and emptied by :meth:`messages` on the request's event loop."""

    def __init__(self, rid: str, settings: Settings, prompt: Sequence[int], *, echo_prompt: bool) -> None:
        self.rid = rid
        self._settings = settings
        self._prompt = prompt
        self._echo_prompt = echo_prompt
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        # Bounded by the length of the samples: the engine never waits for a reader.
        self._deltas: deque[Delta] = deque()
        self._scores: Sequence[Choice] | None = None
        self._error: RlctlError | None = None
        self._started = time.monotonic()

    # From the engine thread; followed by wake().

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def put_scores(self, scores: Sequence[Choice]) -> None:
        """Set the log probabilities of the prompt, before any output of its first sample."""
        self._scores = scores

    def fail(self, error: RlctlError) -> None:
        """End the request with an error, after the output so far."""
        self._error = error

    # On the event loop.

    async def messages(self) -> AsyncGenerator[GenerateResponse, None]:
        """Yield new output until every sample has ended. Raises the error of :meth:`fail`."""
        running = self._settings.n
        first = True
        while running:
            await self._news.wait()
            self._news.clear()
            message, ended = self._collect()
            running -= ended
            if message.samples or message.input_logprobs:
                if first and self._echo_prompt:
                    message.prompt_ids.extend(self._prompt)
                first = False
                yield message
            if running and self._error is not None and not self._deltas:
                raise self._error

    def _collect(self) -> tuple[GenerateResponse, int]:
        """Merge all output since the last call, with an entry per sample. Also return the number of ended samples."""
        elapsed = time.monotonic() - self._started
        message = GenerateResponse(
            rid=self.rid,
            prompt_tokens=len(self._prompt),
            elapsed=Duration(seconds=int(elapsed), nanos=int(elapsed % 1 * 1e9)),
        )
        samples: dict[int, MergedSample] = {}
        ended = 0
        while self._deltas:
            delta = self._deltas.popleft()
            if delta.index not in samples:
                samples[delta.index] = MergedSample(Sample(index=delta.index))
            samples[delta.index].add(self._said(delta))
            ended += delta.finish is not None
        for sample in samples.values():
            sample.fill(message.samples.add())
        if self._scores is not None:
            scores, self._scores = self._scores, None
            message.input_logprobs.extend(_logprob(score) for score in scores)
        return message, ended

    def _said(self, delta: Delta) -> Sample:
        end = delta.start + len(delta.tokens)
        sample = Sample(text=delta.text, completion_tokens=end, retractions=delta.retractions)
        if delta.finish is not None:
            sample.finish_reason.CopyFrom(delta.finish)
        if not delta.tokens:
            return sample
        sample.output_ids.extend([choice.token for choice in delta.tokens])
        if self._settings.logprobs:
            sample.output_logprobs.extend(_logprob(choice) for choice in delta.tokens)
        span = VersionSpan(version=delta.version, start=delta.start, end=end, adapter_version=delta.adapter_version)
        if delta.kv_version != delta.version:
            span.kv_version.CopyFrom(delta.kv_version)
        sample.versions.append(span)
        return sample


def wake(streams: Iterable[Stream]) -> None:
    """Notify the event loops of these streams, with a single call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        by_loop.setdefault(stream._loop, []).append(stream)
    for loop, waiting in by_loop.items():
        # A closed loop has no listener.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set, waiting)


def _set(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream._news.set()


def _logprob(choice: Choice) -> TokenLogprob:
    return TokenLogprob(
        token_id=choice.token,
        logprob=choice.logprob,
        top=[TokenLogprob(token_id=token, logprob=value) for token, value in choice.top],
    )

"""From the engine thread to the event loop that a request came from: what is new, in order, without blocking either."""

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
    """What is new of one sample.

    Attributes:
        index: which sample.
        tokens: new output tokens.
        text: new text.
        start: position of the first new token in the output.
        version: what the weights were at for these tokens.
        kv_version: what they were at for the oldest KV entries that these tokens attend to.
        finish: set when the sample has ended.
        retractions: times that it was sent back to waiting, so far.
        adapter_version: what its adapter was at for these tokens, or "".
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
    """One request's output. Filled by the engine thread, emptied by :meth:`messages` on the request's event loop."""

    def __init__(self, rid: str, settings: Settings, prompt: Sequence[int], *, echo_prompt: bool) -> None:
        self.rid = rid
        self._settings = settings
        self._prompt = prompt
        self._echo_prompt = echo_prompt
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._deltas: deque[Delta] = deque()
        self._scores: Sequence[Choice] | None = None
        self._error: RlctlError | None = None
        self._started = time.monotonic()

    # From the engine thread; followed by wake().

    def put(self, delta: Delta) -> None:
        """Add what is new of a sample."""
        self._deltas.append(delta)

    def put_scores(self, scores: Sequence[Choice]) -> None:
        """Set the log probabilities of the prompt, before its first sample has news."""
        self._scores = scores

    def fail(self, error: RlctlError) -> None:
        """End the request with an error, after what it has."""
        self._error = error

    # On the event loop.

    async def messages(self) -> AsyncGenerator[GenerateResponse, None]:
        """What is new, whenever something is, until every sample has ended. Raises what :meth:`fail` was given."""
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
        """Everything that has come since the last time, one entry per sample; and how many samples have ended."""
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
    """Tell the event loops that these requests have news; one call per loop, whatever their number."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
    for stream in streams:
        by_loop.setdefault(stream._loop, []).append(stream)
    for loop, waiting in by_loop.items():
        # A loop that was closed has nobody left who listens.
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

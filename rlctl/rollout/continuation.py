"""A sample over several requests. Each request continues from the tokens of the earlier requests.

The generated tokens become part of the prompt, so every engine can continue a sample. Greedy output then equals the
output of an uninterrupted run. Drawn output has the same distribution. The engine counts positions from 0 again, so the
seed of a later request is derived from the sample's seed and number of tokens. A sample with penalties is not continued
but refused, because the engine would not count the earlier tokens as output. A stop string across a cut is searched
here.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.partial_responses import MergedSample
from rlctl.contract.sampling import DEFAULT_NEW_TOKENS
from rlctl.rollout.sample import Part, RolloutSample
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_LENGTH,
    FINISH_TYPE_STOP,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Sample,
    SamplingParams,
    TokenIds,
    TokenLogprob,
)

_PIECE = 1 << 16
"""Token ids copied at a time."""


class Progress:
    """Output of a sample so far, and its next request."""

    def __init__(self, sample: RolloutSample) -> None:
        self._sample = sample
        self._request = sample.request
        self._had = MergedSample(sample.whole)
        self._prompt_ids = sample.prompt_ids
        self._parts = list(sample.parts)
        self._input_logprobs = list(sample.input_logprobs)
        self._answered_at = sample.answered_at
        self._tried = bool(sample.parts)
        self._base = self._text_base = 0  # tokens and text length from earlier attempts
        self._cached = self._retractions = 0  # counts from earlier attempts
        self._stop_sought = False  # the text around the cut has been searched

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the prompt, once known."""
        return self._prompt_ids

    @property
    def input_logprobs(self) -> Sequence[TokenLogprob]:
        """Log probabilities of the prompt's tokens, if requested and received."""
        return self._input_logprobs

    @property
    def tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self._had.rest.output_ids)

    @property
    def finished(self) -> bool:
        """True if the sample ended by length or stop."""
        return self._had.rest.finish_reason.type in (FINISH_TYPE_LENGTH, FINISH_TYPE_STOP)

    @property
    def ended(self) -> bool:
        """True if the sample has a finish reason, including an abort."""
        return self._had.rest.HasField("finish_reason")

    def attempt(self, min_version_seq: int) -> GenerateRequest:
        """Return the request for the missing tokens. Retries get a new request id.

        Raises UNSUPPORTED for a sample that cannot continue. The sample may be ``finished`` afterwards: only its end
        was lost.
        """
        self._had.rest.ClearField("finish_reason")
        self._base, self._text_base = self.tokens, self._had.text_length
        self._cached, self._retractions = self._had.rest.cached_tokens, self._had.rest.retractions
        request = GenerateRequest()
        request.CopyFrom(self._request)
        if self._tried or not request.rid:
            request.rid = secrets.token_hex(16)
        self._tried, self._stop_sought = True, False
        request.min_version_seq = min_version_seq
        if self._base:
            self._go_on(request)
        else:
            self._input_logprobs.clear()
        return request

    def _go_on(self, request: GenerateRequest) -> None:
        params = request.sampling_params
        missing = _limit(params) - self._base
        if missing <= 0:
            self._had.rest.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_LENGTH))
            return
        check_resumable(params, self._prompt_ids)
        request.ClearField("logprob_start_len")
        request.input_ids.CopyFrom(TokenIds(ids=[*self._prompt_ids, *self._had.rest.output_ids]))
        params.max_new_tokens = missing
        params.min_new_tokens = max(params.min_new_tokens - self._base, 0)
        if params.HasField("seed"):
            params.seed = derived_seed(params.seed, self._base)

    def take(self, response: GenerateResponse) -> None:
        """Add a message of the current attempt. Text beyond a stop string is removed from the message."""
        if not self._prompt_ids:
            self._prompt_ids = list(response.prompt_ids)
        if response.HasField("weight_version"):
            self._answered_at = response.weight_version
        if not self._base:
            self._input_logprobs.extend(response.input_logprobs)
        for sample in response.samples:
            self._begin_part(response, sample)
            sample.index = 0
            sample.retractions += self._retractions
            if self._base:
                sample.completion_tokens += self._base
                sample.cached_tokens = self._cached  # the engine counts earlier output as prompt
                for span in sample.versions:
                    span.start += self._base
                    span.end += self._base
            previous_length = self._had.text_length
            self._had.add(sample)
            self._look_for_stop()
            if self._had.text_length < previous_length + len(sample.text):
                sample.text = self._had.text[previous_length:]

    def _begin_part(self, response: GenerateResponse, sample: Sample) -> None:
        last = self._parts[-1] if self._parts else None
        process = (response.slot, response.incarnation)
        if sample.output_ids and (last is None or (last.slot, last.incarnation) != process):
            self._parts.append(Part(*process, start=self.tokens))

    def _look_for_stop(self) -> None:
        """End the sample at the first stop string that begins before the cut.

        The engine took the text before the cut for the prompt. There is no search while the cut lies within the first
        ``min_new_tokens``: a stop string that begins there does not count.
        """
        params, cut = self._request.sampling_params, self._text_base
        if not cut or not params.stop or self._stop_sought or self._base < params.min_new_tokens:
            return
        self._stop_sought = self._had.text_length >= cut + max(map(len, params.stop)) - 1
        text = self._had.text
        places = [(text.find(stop, max(cut - len(stop) + 1, 0), cut + len(stop) - 1), stop) for stop in params.stop]
        matches = [place for place in places if place[0] >= 0]
        if matches:
            at, stop = min(matches, key=lambda place: place[0] + len(place[1]))
            self._had.text = text[: at + len(stop)] if params.no_stop_trim else text[:at]
            self._had.rest.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_STOP, matched_string=stop))

    def full(self, refusal: RlctlError) -> bool:
        """Return whether the refusal means that the sample fills the context. The sample then ends by length."""
        if refusal.reason is Reason.PROMPT_TOO_LONG and self._base:
            self._had.rest.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_LENGTH))
            return True
        return False

    def result(self, latest: int, error: RlctlError | None = None) -> RolloutSample:
        """Return the sample so far."""
        sample = self._sample
        whole = Sample()
        self._had.fill(whole)
        latest = max([latest, *(span.version.sequence for span in whole.versions)])  # the fleet view may lag
        return RolloutSample(
            request=self._request,
            whole=whole,
            prompt_ids=self._prompt_ids,
            parts=tuple(self._parts),
            input_logprobs=tuple(self._input_logprobs),
            session_id=sample.session_id,
            own_session=sample.own_session,
            group=sample.group,
            index=sample.index,
            latest=latest,
            error=error,
            answered_at=self._answered_at,
        )


def begin(
    request: GenerateRequest, *, prompt: int = 0, index: int = 0, group: str = "", session_id: str = ""
) -> RolloutSample:
    """Return an empty sample with its own session and seed.

    The sample has number ``index`` among the samples of the call's prompt number ``prompt``.
    """
    own_request = GenerateRequest()
    own_request.CopyFrom(request)
    own_request.sampling_params.n = 1
    if own_request.sampling_params.HasField("seed"):
        own_request.sampling_params.seed = derived_seed(request.sampling_params.seed, prompt, index)
    own_request.session_id = session_id or secrets.token_hex(16)
    return RolloutSample(
        own_request, Sample(), _listed(request.input_ids.ids), (), own_request.session_id, not session_id, group, index
    )


def _listed(ids: Sequence[int]) -> list[int]:
    """Copy token ids in pieces: each piece holds the interpreter's lock until its end."""
    listed: list[int] = []
    for start in range(0, len(ids), _PIECE):
        listed += ids[start : start + _PIECE]
    return listed


def check_continuable(params: SamplingParams) -> None:
    """Raise UNSUPPORTED for a frequency or presence penalty: a continuation would change the output."""
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(params, name):
            raise Reason.UNSUPPORTED.error(
                f"a sample with a {name} cannot go on from its tokens: they would be taken for the prompt",
                field=f"sampling_params.{name}",
                next_step='Use repetition_penalty, or resume="return" to get the tokens so far.',
            )


def check_resumable(params: SamplingParams, prompt_ids: Sequence[int]) -> None:
    """Raise UNSUPPORTED for a sample with output tokens that cannot continue from the tokens."""
    check_continuable(params)
    if not prompt_ids:
        raise Reason.UNSUPPORTED.error("the engine has not said the prompt's tokens", field="text")


def derived_seed(seed: int, *numbers: int) -> int:
    """Derive an independent seed, below 2**63."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *numbers))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _limit(params: SamplingParams) -> int:
    return params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS

"""One sample over several requests. Each request continues from the tokens of the earlier ones.

The generated tokens become part of the prompt, so that every engine can continue a sample. Greedy output then equals
that of an uninterrupted run. Drawn output has the same distribution. The seed of a later request is derived from the
seed of the sample and the number of its tokens, because the engine counts positions from 0 again. Samples with
penalties are not continued but refused, because the engine would not count the earlier tokens as output. A stop string
across a cut is searched here.
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
"""Token ids."""


class Progress:
    """What is had of a sample, and what is to be asked for next."""

    def __init__(self, sample: RolloutSample) -> None:
        """Go on from ``sample``, which may have nothing yet."""
        self._sample = sample
        self._request = sample.request
        self._had = MergedSample(sample.whole)
        self._prompt_ids = sample.prompt_ids
        self._parts = list(sample.parts)
        self._input_logprobs = list(sample.input_logprobs)
        self._answered_at = sample.answered_at
        self._tried = bool(sample.parts)
        self._base = self._text_base = 0  # tokens, and length of the text, that earlier attempts brought
        self._cached = self._retractions = 0  # what earlier attempts counted
        self._stop_sought = False  # in all of the text in which it may lie across the cut

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's tokens, once they are known."""
        return self._prompt_ids

    @property
    def input_logprobs(self) -> Sequence[TokenLogprob]:
        """Of the prompt's tokens, if they were asked for and are there."""
        return self._input_logprobs

    @property
    def tokens(self) -> int:
        """Output tokens had."""
        return len(self._had.rest.output_ids)

    @property
    def finished(self) -> bool:
        """Whether it came to its own end."""
        return self._had.rest.finish_reason.type in (FINISH_TYPE_LENGTH, FINISH_TYPE_STOP)

    @property
    def ended(self) -> bool:
        """Whether it has a finish reason, an abort's included."""
        return self._had.rest.HasField("finish_reason")

    def attempt(self, min_version_seq: int) -> GenerateRequest:
        """The request for what is missing, under an id of its own. Raises UNSUPPORTED for a sample that cannot go on.

        A sample may turn out to be finished: the end was lost, not the tokens.
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
        check_resumable(params, self._prompt_ids)
        request.ClearField("logprob_start_len")
        request.input_ids.CopyFrom(TokenIds(ids=[*self._prompt_ids, *self._had.rest.output_ids]))
        missing = _limit(params) - self._base
        if missing <= 0:
            self._had.rest.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_LENGTH))
            return
        params.max_new_tokens = missing
        params.min_new_tokens = max(params.min_new_tokens - self._base, 0)
        if params.HasField("seed"):
            params.seed = derived_seed(params.seed, self._base)

    def take(self, response: GenerateResponse) -> None:
        """Take in a message of the attempt under way. What is beyond a stop string is taken out of its text."""
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
                sample.cached_tokens = self._cached  # of its prompt the engine now counts what was generated, too
                for span in sample.versions:
                    span.start += self._base
                    span.end += self._base
            before = self._had.text_length
            self._had.add(sample)
            self._look_for_stop()
            if self._had.text_length < before + len(sample.text):
                sample.text = self._had.text[before:]

    def _begin_part(self, response: GenerateResponse, sample: Sample) -> None:
        last = self._parts[-1] if self._parts else None
        here = (response.slot, response.incarnation)
        if sample.output_ids and (last is None or (last.slot, last.incarnation) != here):
            self._parts.append(Part(*here, start=self.tokens))

    def _look_for_stop(self) -> None:
        """End at the first stop string that begins before the cut: the engine took that for the prompt. One that begins
        among the tokens that there are to be in any case is none, wherever it ends.
        """
        params, cut = self._request.sampling_params, self._text_base
        if not cut or not params.stop or self._stop_sought or self._base < params.min_new_tokens:
            return
        self._stop_sought = self._had.text_length >= cut + max(map(len, params.stop)) - 1
        text = self._had.text
        places = [(text.find(stop, max(cut - len(stop) + 1, 0), cut + len(stop) - 1), stop) for stop in params.stop]
        found = [place for place in places if place[0] >= 0]
        if found:
            at, stop = min(found, key=lambda place: place[0] + len(place[1]))
            self._had.text = text[: at + len(stop)] if params.no_stop_trim else text[:at]
            self._had.rest.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_STOP, matched_string=stop))

    def full(self, refusal: RlctlError) -> bool:
        """Whether an attempt was refused since the sample fills the context: then it has ended, by its length."""
        if refusal.reason is Reason.PROMPT_TOO_LONG and self._base:
            self._had.rest.finish_reason.CopyFrom(FinishReason(type=FINISH_TYPE_LENGTH))
            return True
        return False

    def result(self, latest: int, error: RlctlError | None = None) -> RolloutSample:
        """The sample as it is now."""
        known = self._sample
        whole = Sample()
        self._had.fill(whole)
        latest = max([latest, *(span.version.sequence for span in whole.versions)])  # news of it may come later
        return RolloutSample(
            request=self._request,
            whole=whole,
            prompt_ids=self._prompt_ids,
            parts=tuple(self._parts),
            input_logprobs=tuple(self._input_logprobs),
            session_id=known.session_id,
            own_session=known.own_session,
            group=known.group,
            index=known.index,
            latest=latest,
            error=error,
            answered_at=self._answered_at,
        )


def begin(
    request: GenerateRequest, *, prompt: int = 0, index: int = 0, group: str = "", session_id: str = ""
) -> RolloutSample:
    """A sample of which nothing is had, with a session and a seed of its own: number ``index`` of the call's prompt
    number ``prompt``.
    """
    mine = GenerateRequest()
    mine.CopyFrom(request)
    mine.sampling_params.n = 1
    if mine.sampling_params.HasField("seed"):
        mine.sampling_params.seed = derived_seed(request.sampling_params.seed, prompt, index)
    mine.session_id = session_id or secrets.token_hex(16)
    return RolloutSample(
        mine, Sample(), _listed(request.input_ids.ids), (), mine.session_id, not session_id, group, index
    )


def _listed(ids: Sequence[int]) -> list[int]:
    """Token ids as a list. It is made piece by piece: each holds the interpreter's lock from its begin to its end."""
    listed: list[int] = []
    for start in range(0, len(ids), _PIECE):
        listed += ids[start : start + _PIECE]
    return listed


def check_continuable(params: SamplingParams) -> None:
    """Raise UNSUPPORTED for what cannot go on from tokens as if there had been no cut."""
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(params, name):
            raise Reason.UNSUPPORTED.error(
                f"a sample with a {name} cannot go on from its tokens: they would be taken for the prompt",
                field=f"sampling_params.{name}",
                next_step='Use repetition_penalty, or resume="return" and what was had.',
            )


def check_resumable(params: SamplingParams, prompt_ids: Sequence[int]) -> None:
    """Raise UNSUPPORTED for a sample with output tokens that cannot go on from them."""
    check_continuable(params)
    if not prompt_ids:
        raise Reason.UNSUPPORTED.error("the engine has not said the prompt's tokens", field="text")


def derived_seed(seed: int, *numbers: int) -> int:
    """A seed for one of many things that are drawn independently; below 2**63."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *numbers))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _limit(params: SamplingParams) -> int:
    return params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS

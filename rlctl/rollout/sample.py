"""One sample as a trainer gets it: tokens, log probabilities, and the version that each token was generated at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.contract.errors import RlctlError
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FinishType, GenerateRequest, Sample, TokenLogprob


@dataclass(frozen=True)
class Part:
    """Output tokens from ``start`` on, until the next part's, came from this stage.

    Attributes:
        incarnation: of the stage; with ``slot`` it names one process.
    """

    slot: str
    incarnation: int
    start: int


@dataclass(slots=True)
class RolloutSample:
    """One sample, finished or cut. Not to be changed.

    Attributes:
        request: what was asked for, for this sample alone; its seed is the sample's own.
        whole: all that was generated, over every stage that it went on at.
        prompt_ids: the prompt's tokens; empty while a prompt of text has not reached a stage.
        input_logprobs: of the prompt's tokens, if they were asked for (``logprob_start_len``).
        parts: the stages that it came from.
        session_id: what kept its turns on one stage.
        own_session: that session was made for this sample.
        group: the same for all samples of one prompt of one call, and for no others.
        index: number of the sample within its group.
        latest: sequence number of the model's latest version when it ended, as far as was known here.
        error: what cut it, if it was neither an abort nor a stop of the caller's.
        answered_at: the version that the last stage to answer served then, also without a token; None: not known.
    """

    request: GenerateRequest
    whole: Sample
    prompt_ids: Sequence[int]
    parts: Sequence[Part]
    session_id: str
    own_session: bool = False
    group: str = ""
    index: int = 0
    latest: int = 0
    input_logprobs: Sequence[TokenLogprob] = ()
    error: RlctlError | None = None
    answered_at: WeightVersion | None = None

    @property
    def finished(self) -> bool:
        """Whether it came to its own end: otherwise it can be handed to ``resume``."""
        return self.whole.finish_reason.type not in (0, FINISH_TYPE_ABORT)

    @property
    def finish(self) -> str:
        """ "length", "stop" or "abort"."""
        return FinishType.Name(self.whole.finish_reason.type or FINISH_TYPE_ABORT).rpartition("_")[2].lower()

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens, a matched stop token included."""
        return list(self.whole.output_ids)

    @property
    def logprobs(self) -> list[float]:
        """Log probability of each output token (natural logarithm), if asked for, under the weights of its version."""
        return [token.logprob for token in self.whole.output_logprobs]

    @property
    def text(self) -> str:
        """The pieces of text one after another. Of a sample that was cut within a character, decode the tokens."""
        return self.whole.text

    @property
    def versions(self) -> list[WeightVersion | None]:
        """The version of each output token; None: not known, since the stage died before its engine had said it."""
        versions: list[WeightVersion | None] = [None] * len(self.whole.output_ids)
        for span in self.whole.versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        return versions

    @property
    def last_version(self) -> WeightVersion | None:
        """The version of the last output token; without a token, the version under which the sample was answered."""
        return self.whole.versions[-1].version if self.whole.versions else self.answered_at

    @property
    def staleness(self) -> int | None:
        """By how many versions its oldest token was behind the latest one when it ended; None: not known."""
        return self.staleness_at(self.latest)

    def staleness_at(self, latest: int) -> int | None:
        """As :attr:`staleness`, against a later version's sequence number, the trainer's present one say. News of
        versions may come after their tokens: one that a token has is no later than the latest.
        """
        versions = self.versions
        known = [version.sequence for version in versions if version is not None]
        return max(latest, *known) - min(known) if known and len(known) == len(versions) else None


class RolloutFailed(RlctlError):
    """Samples could not be finished. ``samples`` has all of the call's, those that were not can be resumed."""

    def __init__(self, cause: RlctlError, samples: Sequence[RolloutSample]) -> None:
        cut = sum(not sample.finished for sample in samples)
        super().__init__(
            cause.reason,
            f"{cut} of {len(samples)} samples were cut: {cause.message}",
            field=cause.field,
            next_step=cause.next_step,
            metadata=cause.metadata,
            outcome=cause.outcome,
        )
        self.status = cause.status
        self.http_status = cause.http_status
        self.samples = samples

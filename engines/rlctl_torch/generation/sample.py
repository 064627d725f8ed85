"""State of a request's sample in the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FINISH_TYPE_LENGTH, FINISH_TYPE_STOP, FinishReason
from rlctl_torch.disaggregation.bootstrap import Coming, Room
from rlctl_torch.generation.detokenizer import TextStream
from rlctl_torch.generation.output_stream import Delta, Stream
from rlctl_torch.generation.request_settings import Settings
from rlctl_torch.generation.sampling import Choice


class Sample:
    """Tokens, KV slots and reported output of a sample.

    Attributes:
        tokens: prompt and output.
        slots: KV slots of the first tokens, as many as have entries.
        kv_version: version of the weights at the time of the oldest of these entries.
        row: row of the slot table while the sample runs, else -1.
        doomed: reason of an abort after the step under way, or "".
        retractions: number of returns to waiting.
        ended: no further output follows.
        scores: log probabilities of the prompt's tokens so far, in the sample that scores the prompt.
        adapter: name of the adapter, or "".
        gives: room in which a decode engine asks for the prompt's KV entries, or None.
        shared: these entries lie in shared memory.
        comes: KV entries of a prefill engine with which the sample starts, or None.
    """

    def __init__(
        self,
        stream: Stream,
        index: int,
        prompt: list[int],
        settings: Settings,
        seed: int,
        *,
        longest: int,
        text: TextStream | None,
        adapter: str = "",
        gives: Room | None = None,
    ) -> None:
        self.stream = stream
        self.gives = gives
        self.shared = False
        self.comes: Coming | None = None
        self.adapter = adapter
        self.index = index
        self.settings = settings
        self.seed = seed
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.slots: list[int] = []
        self.kv_version = WeightVersion()
        self.row = -1
        self.doomed = ""
        self.retractions = 0
        self.ended = False
        self.scores: list[Choice] = []
        self._limit = min(len(prompt) + settings.max_new_tokens, longest)
        self._text = text
        if index == 0 and settings.logprob_start is not None:
            self.take_scores([Choice(prompt[0])] if settings.logprob_start == 0 else [])

    @property
    def pending(self) -> int:
        """Number of tokens without KV entries, which the next steps compute."""
        return len(self.tokens) - len(self.slots)

    @property
    def position(self) -> int:
        """Number of output tokens, which is the position of the next token."""
        return len(self.tokens) - self.prompt_length

    @property
    def complete(self) -> bool:
        """Whether the sample has reached its maximum length."""
        return len(self.tokens) >= self._limit

    @property
    def next_score(self) -> int | None:
        """First prompt position with a requested and unknown log probability, or None."""
        start = self.settings.logprob_start
        if self.index != 0 or start is None:
            return None
        position = start + len(self.scores)
        return position if position < self.prompt_length else None

    @cached_property
    def _prompt_tokens(self) -> frozenset[int]:
        return frozenset(self.tokens[: self.prompt_length])

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(self.tokens[self.prompt_length :])

    def seen(self) -> tuple[Mapping[int, int], frozenset[int]]:
        """Return the output tokens with their counts, and the prompt's tokens."""
        return self._counts, self._prompt_tokens

    def take_scores(self, scores: list[Choice]) -> None:
        """Add log probabilities of the next prompt tokens. The stream gets the scores once all are known."""
        self.scores += scores
        if self.next_score is None:
            self.stream.put_scores(self.scores)

    def score_anew(self) -> None:
        """Forget the log probabilities of an incompletely scored prompt: the rest may be of newer weights."""
        if self.next_score is not None:
            del self.scores[int(self.settings.logprob_start == 0) :]

    def extend(self, choice: Choice, version: WeightVersion, adapter_version: str = "") -> None:
        """Add a sampled token, with a report to the stream. End the sample at a stop or at its maximum length."""
        start = self.position
        if self.settings.penalised:
            self._counts[choice.token] += 1
        self.tokens.append(choice.token)
        may_stop = start + 1 >= self.settings.min_new_tokens
        finish: FinishReason | None = None
        text = ""
        if may_stop and choice.token in self.settings.stop_ids:
            finish = FinishReason(type=FINISH_TYPE_STOP, matched_token=choice.token)
            if self.settings.no_stop_trim:
                text, _ = self._add_text(choice.token, may_stop=False)
        else:
            text, stop = self._add_text(choice.token, may_stop=may_stop)
            if stop is not None:
                finish = FinishReason(type=FINISH_TYPE_STOP, matched_string=stop)
            elif self.complete:
                finish = FinishReason(type=FINISH_TYPE_LENGTH)
        self._tell([choice], text, start, version, finish, adapter_version)

    def end(self, version: WeightVersion, *, aborted: str = "") -> None:
        """End without a further token: aborted for a reason, or because the request wants no further tokens."""
        kind = FINISH_TYPE_ABORT if aborted else FINISH_TYPE_LENGTH
        self._tell([], "", self.position, version, FinishReason(type=kind, message=aborted))

    def _add_text(self, token: int, *, may_stop: bool) -> tuple[str, str | None]:
        return ("", None) if self._text is None else self._text.add(token, may_stop=may_stop)

    def _tell(
        self,
        tokens: list[Choice],
        text: str,
        start: int,
        version: WeightVersion,
        finish: FinishReason | None,
        adapter_version: str = "",
    ) -> None:
        if finish is not None:
            self.ended = True
            if self._text is not None and finish.WhichOneof("matched") != "matched_string":
                text += self._text.finish()
        self.stream.put(
            Delta(self.index, tokens, text, start, version, self.kv_version, finish, self.retractions, adapter_version)
        )

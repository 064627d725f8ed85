"""One sample of a request while the engine works on it."""

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
    """A sample's tokens, where its KV entries lie, and what has been said of it.

    Attributes:
        tokens: prompt and output.
        slots: KV slots of its first tokens, as many as have entries.
        kv_version: what the weights were at when the oldest of these entries was computed.
        row: its row of the slot table while it runs, else -1.
        doomed: why it is to be aborted once the step under way has ended, or "".
        retractions: times that it was sent back to waiting.
        ended: nothing more comes.
        scores: log probabilities of the prompt's tokens found so far, of the sample that scores the prompt.
        adapter: name of its adapter, or "".
        gives: where a decode engine asks for its prompt's KV entries, once they are computed; or None.
        given: they lie in shared memory.
        comes: another engine's KV entries that it begins with, or None.
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
        self.given = False
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
        """Tokens without KV entries: what the next steps compute."""
        return len(self.tokens) - len(self.slots)

    @property
    def position(self) -> int:
        """How many tokens it has put out."""
        return len(self.tokens) - self.prompt_length

    @property
    def complete(self) -> bool:
        """Whether it is as long as it may become."""
        return len(self.tokens) >= self._limit

    @property
    def next_score(self) -> int | None:
        """The first prompt position whose log probability is wanted and not known yet, if any."""
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
        """Output tokens with their numbers, and the prompt's tokens."""
        return self._counts, self._prompt_tokens

    def take_scores(self, scores: list[Choice]) -> None:
        """Take in log probabilities of the next prompt tokens; they are handed on once they are all there."""
        self.scores += scores
        if self.next_score is None:
            self.stream.put_scores(self.scores)

    def score_anew(self) -> None:
        """Forget log probabilities of the prompt that are not handed on yet: the others may be of newer weights."""
        if self.next_score is not None:
            del self.scores[int(self.settings.logprob_start == 0) :]

    def extend(self, choice: Choice, version: WeightVersion, adapter_version: str = "") -> None:
        """Take in a sampled token and tell the stream; ends the sample when it stops or is complete."""
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
        """End without a further token: aborted, saying why, or because nothing more was asked for."""
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

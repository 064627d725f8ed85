"""Checks of a generation request, and its samples in the scheduler's queue."""

from __future__ import annotations

import random
from dataclasses import replace

from rlctl.contract.errors import Reason
from rlctl.v1.rollout_pb2 import GenerateRequest
from rlctl_torch.disaggregation.bootstrap import Room
from rlctl_torch.generation.detokenizer import TextStream
from rlctl_torch.generation.output_stream import Stream
from rlctl_torch.generation.request_settings import Settings, check
from rlctl_torch.generation.sample import Sample
from rlctl_torch.generation.scheduler import Scheduler
from rlctl_torch.rank import Rank


class Intake:
    """Intake of requests at rank 0; generation loop only."""

    def __init__(self, rank: Rank, eos: frozenset[int]) -> None:
        """``eos`` are the ids that end the model's outputs."""
        self._rank = rank
        self._tokenizer = rank.tokenizer
        self._eos = eos
        self._random = random.Random(rank.options.seed)

    def submit(self, request: GenerateRequest, scheduler: Scheduler) -> Stream:
        """Queue a request and return its output stream.

        Raises FIELD_REQUIRED, FIELD_INVALID, UNSUPPORTED, PROMPT_TOO_LONG, ADAPTER_NOT_FOUND, RID_IN_USE.
        """
        return self._submit(request, scheduler, *self._checked(request))

    def prefill(self, request: GenerateRequest, scheduler: Scheduler, room: Room) -> Stream:
        """Queue the prompt of a request at a prefill engine. Its KV entries go to a room.

        A single-token prompt and a request without output have no entries to give. Otherwise as :meth:`submit`.
        """
        prompt, settings = self._checked(request)
        handover_room = room if settings.max_new_tokens and len(prompt) > 1 else None
        return self._submit(request, scheduler, prompt, replace(settings, max_new_tokens=0, n=1), gives=handover_room)

    def decode(self, request: GenerateRequest, scheduler: Scheduler) -> tuple[Stream, bool]:
        """Queue a request at a decode engine, without scores of the prompt.

        Also returns whether the request starts with KV entries of a prefill engine. Otherwise as :meth:`submit`.
        """
        prompt, settings = self._checked(request)
        awaits_entries = settings.max_new_tokens > 0 and len(prompt) > 1
        settings = replace(settings, logprob_start=None)
        return self._submit(request, scheduler, prompt, settings, awaited=awaits_entries), awaits_entries

    def _checked(self, request: GenerateRequest) -> tuple[list[int], Settings]:
        settings = check(
            request, vocab_size=self._rank.model.vocab_size, eos=self._eos, tokenizer=self._tokenizer is not None
        )
        # Before the ids are read: a message can hold millions of ids, and nothing else runs meanwhile.
        self._refuse_long(len(request.input_ids.ids), settings)
        prompt = self._prompt(request)
        self._refuse_long(len(prompt), settings)
        if settings.logprob_start is not None and settings.logprob_start > len(prompt):
            raise Reason.FIELD_INVALID.error(
                f"logprob_start_len is {settings.logprob_start}, the prompt has {len(prompt)} tokens",
                field="logprob_start_len",
            )
        return prompt, settings

    def _submit(
        self,
        request: GenerateRequest,
        scheduler: Scheduler,
        prompt: list[int],
        settings: Settings,
        *,
        gives: Room | None = None,
        awaited: bool = False,
    ) -> Stream:
        seed = self._random.getrandbits(64) if settings.seed is None else settings.seed
        stream = Stream(request.rid, settings, prompt, echo_prompt=request.HasField("text"))
        samples = [
            Sample(
                stream,
                index,
                prompt,
                settings,
                seed,
                longest=self._rank.longest,
                text=self._text(settings, prompt),
                adapter=request.adapter,
                gives=gives,
            )
            for index in range(settings.n)
        ]
        scheduler.submit(stream, samples, awaited=awaited)
        return stream

    def _prompt(self, request: GenerateRequest) -> list[int]:
        if request.WhichOneof("prompt") is None:
            raise Reason.FIELD_REQUIRED.error("text or input_ids is required", field="text")
        if request.HasField("text"):
            if self._tokenizer is None:
                raise Reason.UNSUPPORTED.error("the checkpoint has no tokenizer; send input_ids", field="text")
            prompt, field = self._tokenizer.encode(request.text), "text"
        else:
            prompt, field = list(request.input_ids.ids), "input_ids.ids"
        if not prompt:
            raise Reason.FIELD_REQUIRED.error("the prompt has no tokens", field=field)
        if max(prompt) >= self._rank.model.vocab_size:
            raise Reason.FIELD_INVALID.error(
                f"token {max(prompt)} is not in the vocabulary of {self._rank.model.vocab_size}", field=field
            )
        return prompt

    def _refuse_long(self, length: int, settings: Settings) -> None:
        longest = self._rank.longest
        room = longest - 1 if settings.max_new_tokens else longest
        if length > room:
            raise Reason.PROMPT_TOO_LONG.error(
                f"the prompt has {length} tokens; {room} fit beside the output",
                metadata={"prompt_tokens": str(length), "context_length": str(longest)},
            )

    def _text(self, settings: Settings, prompt: list[int]) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(
            self._tokenizer,
            settings.stop,
            skip_special_tokens=settings.skip_special_tokens,
            keep_stop=settings.no_stop_trim,
            spaces_between_special_tokens=settings.spaces_between_special_tokens,
            before=prompt,
        )

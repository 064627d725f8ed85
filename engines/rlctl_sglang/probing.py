"""Log probabilities of fixed prompts: what a trainer compares with its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlctl_servers.control import Control
from rlctl_servers.generation import Requests

from rlctl.engine import Call
from rlctl.errors import Reason
from rlctl.v1.common_pb2 import PAUSE_MODE_IN_PLACE
from rlctl.v1.verbs_pb2 import ProbePrompt
from rlctl_sglang.requests import Limits
from rlctl_sglang.state import MODES, State


class Prober:
    """Computes probes on one server, which nobody else sends requests to."""

    def __init__(self, control: Control, state: State, requests: Requests, limits: Limits) -> None:
        self._control = control
        self._state = state
        self._requests = requests
        self._limits = limits

    async def probe(self, prompts: Sequence[ProbePrompt], call: Call) -> list[ProbePrompt]:
        """The prompts with the log probability of every token but the first.

        SGLang computes nothing while it is paused, so it goes on for that long. What the requests that a pause keeps
        generate meanwhile is told to nobody until ContinueGeneration: it may come from weights that are found wrong.

        Raises PROMPT_TOO_LONG, FIELD_INVALID, MEMORY_RELEASED, ILLEGAL_STATE, ENGINE_FAILED, DEADLINE_EXCEEDED.
        """
        self._refuse(prompts)
        if not self._state.paused:
            return await self._compute(prompts, call)
        self._requests.hold()
        await self._control.must("/continue_generation", {"torch_empty_cache": False}, call=call)
        try:
            return await self._compute(prompts, call)
        finally:
            mode = "in_place" if self._state.paused == PAUSE_MODE_IN_PLACE else "retract"
            assert mode in MODES.values()
            await self._control.must("/pause_generation", {"mode": mode}, call=call)

    def _refuse(self, prompts: Sequence[ProbePrompt]) -> None:
        self._state.refuse_continue()
        for index, prompt in enumerate(prompts):
            field = f"prompts[{index}].token_ids"
            if len(prompt.token_ids) > self._limits.longest_prompt:
                raise Reason.PROMPT_TOO_LONG.error(
                    f"prompt {index} has {len(prompt.token_ids)} tokens, {self._limits.longest_prompt} fit", field=field
                )
            if max(prompt.token_ids) >= self._limits.vocab_size:
                raise Reason.FIELD_INVALID.error(
                    f"prompt {index} has token {max(prompt.token_ids)}, the vocabulary ends at "
                    f"{self._limits.vocab_size}",
                    field=field,
                )

    async def _compute(self, prompts: Sequence[ProbePrompt], call: Call) -> list[ProbePrompt]:
        return await asyncio.gather(*(self._one(prompt, call) for prompt in prompts))

    async def _one(self, prompt: ProbePrompt, call: Call) -> ProbePrompt:
        tokens = list(prompt.token_ids)
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        told = await self._control.ask("/generate", body, call=call, admin=False)
        entries = told["meta_info"]["input_token_logprobs"]
        if len(entries) != len(tokens):
            raise Reason.ANSWER_INVALID.error(f"SGLang gave {len(entries)} log probabilities of {len(tokens)} tokens")
        return ProbePrompt(token_ids=tokens, logprobs=[entry[0] for entry in entries[1:]])

"""Probes on a vLLM server."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from rlctl_servers.requests import probe
from rlctl_servers.requests.probe import Computed
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control

from rlctl.engine import Call
from rlctl.v1.common_pb2 import PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT
from rlctl_vllm.requests.bodies import SALT, Limits
from rlctl_vllm.requests.requests import GENERATE, id_of
from rlctl_vllm.state import MODES, State


class Prober(probe.Prober):
    """Prober of a vLLM server."""

    def __init__(self, control: Control, state: State, requests: Requests, limits: Limits, turn: probe.Turn) -> None:
        super().__init__(control, state, requests, limits, turn)
        self._most = limits.most_logprobs

    @property
    def stopped(self) -> bool:
        return self._state.stopped

    async def go_on(self, call: Call) -> None:
        await self._control.must("/resume", {}, call=call)

    async def stop_again(self, call: Call) -> None:
        """Pause again. An abort would end waiting requests, and a drain has nothing to wait for."""
        in_place = not self._state.paused or self._state.paused == PAUSE_MODE_IN_PLACE
        mode = PAUSE_MODE_IN_PLACE if in_place else PAUSE_MODE_RETRACT
        await self._control.must(f"/pause?{MODES[mode]}", {}, call=call)

    async def compute(self, tokens: Sequence[int], count: int, call: Call, top: int = 0) -> Computed:
        """Compute greedy tokens; see :func:`compute`. vLLM's log probabilities are from before temperature."""
        return await compute(self._control, call, tokens, count, top if self._most < 0 else min(top, self._most))


async def compute(control: Control, call: Call, tokens: Sequence[int], count: int, top: int = 0) -> Computed:
    """Compute ``count`` greedy tokens after a prompt.

    vLLM reads no cached prefix of a prompt if the log probabilities of the prompt are requested.
    """
    sampling = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    body = {
        "token_ids": list(tokens),
        "sampling_params": {**sampling, "prompt_logprobs": top, "logprobs": top},
        SALT: uuid.uuid4().hex,  # no request reads these entries, which may be of weights of no version
    }
    answer = await control.ask(GENERATE, body, call=call, admin=False)
    (choice,) = answer["choices"]
    pairs = list(zip(tokens, answer.get("prompt_logprobs") or (), strict=False))[1:]
    output = choice["logprobs"]["content"]
    return Computed(
        choice["token_ids"],
        [*(entry[str(token)]["logprob"] for token, entry in pairs), *(entry["logprob"] for entry in output)],
        [
            *({int(token): value["logprob"] for token, value in entry.items()} for _, entry in pairs),
            *({id_of(likely): likely["logprob"] for likely in entry["top_logprobs"]} for entry in output),
        ]
        if top
        else [],
    )

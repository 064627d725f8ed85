"""Probes on an SGLang server."""

from __future__ import annotations

from rlctl_servers import probing
from rlctl_servers.control import Control
from rlctl_servers.generation import Requests

from rlctl.engine import Call
from rlctl.v1.common_pb2 import PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT
from rlctl_sglang.requests import Limits
from rlctl_sglang.state import MODES, State


class Prober(probing.Prober):
    """Computes probes on one server."""

    def __init__(self, control: Control, state: State, requests: Requests, limits: Limits, turn: probing.Turn) -> None:
        super().__init__("SGLang", requests, limits, turn)
        self._control = control
        self._state = state

    @property
    def stopped(self) -> bool:
        """Whether it is paused."""
        return bool(self._state.paused)

    def refuse(self) -> None:
        """Raise MEMORY_RELEASED or ILLEGAL_STATE where it cannot go on."""
        self._state.refuse_continue()

    async def go_on(self, call: Call) -> None:
        """Lift the pause."""
        await self._control.must("/continue_generation", {"torch_empty_cache": False}, call=call)

    async def stop_again(self, call: Call) -> None:
        """Pause; an abort would end what waits."""
        mode = PAUSE_MODE_IN_PLACE if self._state.paused == PAUSE_MODE_IN_PLACE else PAUSE_MODE_RETRACT
        await self._control.must("/pause_generation", {"mode": MODES[mode]}, call=call)

    async def logprobs(self, tokens: list[int], call: Call) -> list[float]:
        """The log probability of every token but the first."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        told = await self._control.ask("/generate", body, call=call, admin=False)
        return [entry[0] for entry in told["meta_info"]["input_token_logprobs"][1:]]

"""Probes on a vLLM server."""

from __future__ import annotations

from rlctl_servers import probing
from rlctl_servers.control import Control
from rlctl_servers.generation import Requests

from rlctl.engine import Call
from rlctl.v1.common_pb2 import PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT
from rlctl_vllm.generation import GENERATE
from rlctl_vllm.options import PRODUCT
from rlctl_vllm.requests import Limits
from rlctl_vllm.state import MODES, State


class Prober(probing.Prober):
    """Computes probes on one server."""

    def __init__(self, control: Control, state: State, requests: Requests, limits: Limits, turn: probing.Turn) -> None:
        super().__init__(PRODUCT, requests, limits, turn)
        self._control = control
        self._state = state

    @property
    def stopped(self) -> bool:
        """Whether it is paused."""
        return self._state.stopped

    def refuse(self) -> None:
        """Raise MEMORY_RELEASED where it cannot go on."""
        self._state.refuse_continue(updating=False)

    async def go_on(self, call: Call) -> None:
        """Lift the pause."""
        await self._control.must("/resume", {}, call=call)

    async def stop_again(self, call: Call) -> None:
        """Pause; an abort would end what waits, and there is nothing left to wait for."""
        in_place = not self._state.paused or self._state.paused == PAUSE_MODE_IN_PLACE
        mode = PAUSE_MODE_IN_PLACE if in_place else PAUSE_MODE_RETRACT
        await self._control.must(f"/pause?{MODES[mode]}", {}, call=call)

    async def logprobs(self, tokens: list[int], call: Call) -> list[float]:
        """The log probability of every token but the first: vLLM's of a prompt are those before temperature."""
        body = {
            "token_ids": tokens,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
        }
        told = await self._control.ask(GENERATE, body, call=call, admin=False)
        pairs = list(zip(tokens, told.get("prompt_logprobs") or (), strict=False))
        return [entry[str(token)]["logprob"] for token, entry in pairs[1:]]

"""Probes on an SGLang server."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from rlctl_servers.requests import probe
from rlctl_servers.requests.probe import Computed
from rlctl_servers.server.admin_calls import Control

from rlctl.engine import Call
from rlctl.v1.common_pb2 import PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT
from rlctl_sglang.requests.bodies import SALT
from rlctl_sglang.state import MODES


class Prober(probe.Prober):
    """Computes probes on one server."""

    @property
    def stopped(self) -> bool:
        return bool(self._state.paused)

    async def go_on(self, call: Call) -> None:
        await self._control.must("/continue_generation", {"torch_empty_cache": False}, call=call)

    async def stop_again(self, call: Call) -> None:
        """Pause again, but not with abort, which would end waiting requests."""
        mode = PAUSE_MODE_IN_PLACE if self._state.paused == PAUSE_MODE_IN_PLACE else PAUSE_MODE_RETRACT
        await self._control.must("/pause_generation", {"mode": MODES[mode]}, call=call)

    async def compute(self, tokens: Sequence[int], count: int, call: Call, top: int = 0) -> Computed:
        return await compute(self._control, call, tokens, count, top)


async def compute(control: Control, call: Call, tokens: Sequence[int], count: int, top: int = 0) -> Computed:
    """Generate ``count`` greedy tokens after a prompt. SGLang scores the whole prompt, without a cached prefix."""
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top,
        SALT: uuid.uuid4().hex,  # no request reads these entries: the weights may have no version
    }
    meta_info = (await control.ask("/generate", body, call=call, admin=False))["meta_info"]
    output = meta_info["output_token_logprobs"]
    scored = [entry[0] for entry in (*meta_info["input_token_logprobs"][1:], *output)]
    positions = [*meta_info["input_top_logprobs"][1:], *meta_info["output_top_logprobs"]] if top else []
    likely = [{token: logprob for logprob, token, *_ in entries} for entries in positions]
    return Computed([entry[1] for entry in output], scored, likely)

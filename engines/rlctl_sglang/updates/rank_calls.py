"""Calls to the plug-in in SGLang's ranks, over SGLang's own route for checking weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlctl_servers.updates.rank_calls import RankCalls

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl_sglang.ranks.channel import ABSENT, ACTION


class Ranks(RankCalls):
    """The tensor-parallel ranks of one SGLang server."""

    async def _send(self, arguments: dict[str, Any], call: Call) -> Sequence[Any]:
        body = {"action": ACTION, "skip_tensor_list": [json.dumps(arguments)]}
        answer = await self._control.tell("/weights_checker", body, call=call)
        if not answer.ok:
            if answer.message.startswith("rlctl:"):
                raise Reason.ENGINE_FAILED.error(f"SGLang: {answer.message}", outcome=OUTCOME_UNKNOWN)
            raise Reason.UNSUPPORTED.error(ABSENT)
        answers: Sequence[Any] = json.loads(answer.body["message"])
        failed = [each["failed"] for each in answers if "failed" in each]
        if failed:
            raise Reason.ENGINE_FAILED.error(f"rlctl's plug-in in SGLang: {failed[0]}", outcome=OUTCOME_UNKNOWN)
        return answers

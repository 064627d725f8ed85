"""Calls to the extension in vLLM's workers.

If a call of vLLM's own fails at a rank, vLLM leaves the answers of later ranks unread. From then on vLLM takes each
unread answer for the answer to the next call. So every answer must name its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl_servers.updates.rank_calls import RankCalls

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

EXTENSION = "rlctl_vllm.worker.extension.WorkerExtension"


class Workers(RankCalls):
    """The workers of a vLLM server."""

    async def _send(self, arguments: dict[str, Any], call: Call) -> Sequence[Any]:
        answer = await self._control.tell("/collective_rpc", {"method": "rlctl_call", "kwargs": arguments}, call=call)
        if not answer.ok:
            if "rlctl_call" in answer.message:
                raise Reason.UNSUPPORTED.error(f"vLLM was started without --worker-extension-cls {EXTENSION}")
            raise Reason.ENGINE_FAILED.error(f"vLLM: {answer.message}", outcome=OUTCOME_UNKNOWN)
        results: Sequence[Any] = answer.body["results"]
        return results

"""Calls to the plug-in in SGLang's ranks, over SGLang's own route for checking weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from rlctl_servers.updates.rank_calls import RankCalls

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.v1.verbs_pb2 import AdapterList, CheckpointReport, InspectCheckpointRequest, ListAdaptersRequest
from rlctl_sglang.ranks.channel import ABSENT, ACTION, UNKNOWN_ACTION


class Ranks(RankCalls):
    """The tensor-parallel ranks of one SGLang server."""

    async def adapters(self, call: Call) -> list[set[str]]:
        """Return the names of the adapters that each rank has loaded, in order of the ranks."""
        answers = await self.each("ListAdapters", ListAdaptersRequest(), AdapterList, call)
        return [{adapter.name for adapter in answer.adapters} for answer in answers]

    async def adapter_files(self, path: str, call: Call) -> list[CheckpointReport]:
        """Return what each rank finds at the path of an adapter, in order of the ranks."""
        return await self.each("InspectCheckpoint", InspectCheckpointRequest(model_path=path), CheckpointReport, call)

    async def caught_up(self, call: Call) -> None:
        """Wait until every rank has carried out the earlier calls to the server. SGLang answers some once rank 0 has.

        Each rank carries out its calls in order, and a list of adapters touches no weights, nor released memory.
        """
        await self.adapters(call)

    async def _send(self, arguments: dict[str, Any], call: Call) -> Sequence[Any]:
        body = {"action": ACTION, "skip_tensor_list": [json.dumps(arguments)]}
        answer = await self._control.tell("/weights_checker", body, call=call)
        if not answer.ok:
            absent = answer.status == HTTPStatus.NOT_FOUND or answer.message.startswith(UNKNOWN_ACTION)
            if absent and arguments["verb"] == "Attach":
                raise Reason.UNSUPPORTED.error(ABSENT)
            raise Reason.ENGINE_FAILED.error(f"SGLang: {answer.message}", outcome=OUTCOME_UNKNOWN)
        try:
            answers: Sequence[Any] = json.loads(answer.body["message"])
            failed = [(rank, reply["failed"]) for rank, reply in enumerate(answers) if "failed" in reply]
        except (KeyError, TypeError, ValueError) as error:
            cause = f"SGLang answers a call to its ranks with something else: {error}"
            raise Reason.ENGINE_FAILED.error(cause, outcome=OUTCOME_UNKNOWN) from error
        for rank, cause in failed:
            raise Reason.ENGINE_FAILED.error(f"rlctl's plug-in at rank {rank}: {cause}", outcome=OUTCOME_UNKNOWN)
        return answers

"""Joining SGLang's ranks into the group of a weight update's source."""

from __future__ import annotations

import asyncio

from rlctl_servers.control import Control

from rlctl.engine import Call
from rlctl.errors import Reason, RlctlError
from rlctl.times import seconds
from rlctl.v1.common_pb2 import OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import GroupReport, InitWeightsUpdateGroupRequest
from rlctl.weights.torch_errors import cause_of
from rlctl_sglang.state import State

BACKENDS = ("gloo", "nccl")
PROBE_S = 5.0
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
_TAKEN = "group name has already been created"
"""What torch says of it."""


class Groups:
    """The groups of one server. SGLang serves nothing while it waits for the other members of one."""

    def __init__(self, control: Control, state: State, *, ranks: int) -> None:
        self._control = control
        self._state = state
        self._ranks = ranks

    async def join(self, request: InitWeightsUpdateGroupRequest, call: Call) -> GroupReport:
        """Join, or with ``probe_only`` find out whether the store can be reached from here.

        SGLang runs on this host, so what this process reaches its ranks reach. All of them join, or none: SGLang
        numbers them by itself. Raises FIELD_INVALID, GROUP_EXISTS, GROUP_FAILED, ENGINE_WEDGED.
        """
        report = GroupReport(
            group_name=request.group_name, group_rank=request.rank_offset, world_size=request.world_size
        )
        self._refuse(request)
        if not self._state.joining(request.group_name, request.world_size):
            return report
        await self._reach(request, call)
        if request.probe_only:
            return report
        body = {
            "master_address": request.master_address,
            "master_port": request.master_port,
            "rank_offset": request.rank_offset,
            "world_size": request.world_size,
            "group_name": request.group_name,
            "backend": request.backend or BACKENDS[0],
        }
        answer = await self._control.tell(INIT, body, call=call)
        if not answer.ok and _TAKEN in answer.message:
            # Whoever drove the server before us has left it behind.
            await self._control.must(DESTROY, {"group_name": request.group_name}, call=call, reason=Reason.GROUP_FAILED)
            answer = await self._control.tell(INIT, body, call=call)
        if not answer.ok:
            raise Reason.GROUP_FAILED.error(f"SGLang: {cause_of(answer.message)}", outcome=OUTCOME_REJECTED)
        self._state.groups[request.group_name] = request.world_size
        return report

    def _refuse(self, request: InitWeightsUpdateGroupRequest) -> None:
        if request.backend not in ("", *BACKENDS):
            raise Reason.FIELD_INVALID.error(
                f"{request.backend!r} is no backend; there are: {', '.join(BACKENDS)}", field="backend"
            )
        if request.num_ranks and request.num_ranks != self._ranks:
            raise Reason.FIELD_INVALID.error(
                f"all {self._ranks} ranks of an SGLang server join a group, not {request.num_ranks}", field="num_ranks"
            )
        if request.rank_offset < 1 or request.rank_offset + self._ranks > request.world_size:
            raise Reason.FIELD_INVALID.error(
                f"ranks {request.rank_offset} to {request.rank_offset + self._ranks - 1} are not in a group of "
                f"{request.world_size} whose rank 0 is the source",
                field="rank_offset",
            )

    async def _reach(self, request: InitWeightsUpdateGroupRequest, call: Call) -> None:
        remaining = call.deadline - asyncio.get_running_loop().time()
        limit = min(remaining, PROBE_S, seconds(request.group_timeout) or PROBE_S)
        try:
            async with asyncio.timeout(max(limit, 0.01)):
                _, writer = await asyncio.open_connection(request.master_address, request.master_port)
        except (OSError, TimeoutError) as error:
            raise self._unreached(request, error) from error
        writer.close()

    def _unreached(self, request: InitWeightsUpdateGroupRequest, error: Exception) -> RlctlError:
        return Reason.GROUP_FAILED.error(
            f"group {request.group_name}: the store at {request.master_address}:{request.master_port} cannot be "
            f"reached from this host: {error or 'it does not answer'}",
            field="master_address",
        )

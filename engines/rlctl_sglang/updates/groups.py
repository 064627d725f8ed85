"""Joining SGLang's ranks into the group of a weight update's source."""

from __future__ import annotations

import asyncio

from rlctl_servers.server.admin_calls import Control

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import GroupReport, InitWeightsUpdateGroupRequest
from rlctl.weights.group.torch_errors import cause_of
from rlctl_sglang.state import Membership, State

BACKENDS = ("gloo", "nccl")
PROBE_S = 5.0
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
_TAKEN = "group name has already been created"
"""What torch says of it."""


class _Store:
    """A connection to a group's store, over which nothing is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def ended(self) -> bool:
        """Whether the store has closed it: its process has ended."""
        return self._reader.at_eof() or self._reader.exception() is not None

    def close(self) -> None:
        """Close it."""
        self._writer.close()


class Groups:
    """The groups of one server. SGLang serves nothing while it waits for the other members of one.

    SGLang's ranks do not report the state of a group's other members. So a connection to the store of each group is
    kept, which closes with the source's process. A later group is a new one, even with the same name and address.
    """

    def __init__(self, control: Control, state: State, *, ranks: int) -> None:
        self._control = control
        self._state = state
        self._ranks = ranks
        self._stores: dict[str, _Store] = {}

    async def join(self, request: InitWeightsUpdateGroupRequest, call: Call) -> GroupReport:
        """Join, or with ``probe_only`` find out whether the store can be reached from here.

        SGLang runs on this host, so what this process reaches its ranks reach. All of them join, or none: SGLang
        numbers them by itself. Raises FIELD_INVALID, GROUP_EXISTS, UNREACHABLE, GROUP_FAILED, ENGINE_WEDGED.
        """
        report = GroupReport(
            group_name=request.group_name, group_rank=request.rank_offset, world_size=request.world_size
        )
        self._refuse(request)
        membership = Membership(
            host=request.master_address,
            port=request.master_port,
            rank_offset=request.rank_offset,
            world_size=request.world_size,
            backend=request.backend or BACKENDS[0],
        )
        if not self._ended(request.group_name) and not self._state.joining(request.group_name, membership):
            return report
        store = await self._reach(request, call)
        if request.probe_only:
            store.close()
            return report
        self._state.groups.pop(request.group_name, None)
        self._close_unused()
        try:
            await self._form(request.group_name, membership, call)
        except BaseException:
            store.close()
            raise
        self._state.groups[request.group_name] = membership
        self._stores[request.group_name] = store
        return report

    def close(self) -> None:
        """Watch no store any more."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _ended(self, name: str) -> bool:
        """Whether a group's source has ended."""
        return name in self._stores and self._stores[name].ended

    def _close_unused(self) -> None:
        """Close the connections to the stores of groups that were left."""
        for name in self._stores.keys() - self._state.groups.keys():
            self._stores.pop(name).close()

    async def _form(self, name: str, membership: Membership, call: Call) -> None:
        body = {
            "master_address": membership.host,
            "master_port": membership.port,
            "rank_offset": membership.rank_offset,
            "world_size": membership.world_size,
            "group_name": name,
            "backend": membership.backend,
        }
        answer = await self._control.tell(INIT, body, call=call)
        if not answer.ok and _TAKEN in answer.message:
            # An earlier stage server has left it behind, or its source has ended.
            await self._control.must(DESTROY, {"group_name": name}, call=call, reason=Reason.GROUP_FAILED)
            answer = await self._control.tell(INIT, body, call=call)
        if not answer.ok:
            raise Reason.GROUP_FAILED.error(f"SGLang: {cause_of(answer.message)}", outcome=OUTCOME_REJECTED)

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

    async def _reach(self, request: InitWeightsUpdateGroupRequest, call: Call) -> _Store:
        remaining = call.deadline - asyncio.get_running_loop().time()
        limit = min(remaining, PROBE_S, seconds(request.group_timeout) or PROBE_S)
        try:
            async with asyncio.timeout(max(limit, 0.01)):
                return _Store(*await asyncio.open_connection(request.master_address, request.master_port))
        except (OSError, TimeoutError) as error:
            raise self._unreached(request, error) from error

    def _unreached(self, request: InitWeightsUpdateGroupRequest, error: Exception) -> RlctlError:
        return Reason.UNREACHABLE.error(
            f"group {request.group_name}: the store at {request.master_address}:{request.master_port} cannot be "
            f"reached from this host: {error or 'it does not answer'}",
            field="master_address",
        )

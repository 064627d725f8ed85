"""Reading what every rank holds: SGLang sends it, each rank over a group of two with this process.

These are SGLang's groups for handing its weights to another instance (``srt/model_executor/model_runner_components/
weight_exporter.py``): each rank listens at a port of its own as rank 0, and broadcasts its parameters in its own order,
between two steps. Generation waits for that long.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rlctl_servers.server.admin_calls import Control

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl_sglang.readback.parameter_layout import Parameter
from rlctl_sglang.server.process import hold_port

HOST = "127.0.0.1"
_JOIN_S = 30.0
_BROADCAST_S = 60.0
LEAST_S = 1.0
"""Time without which it is not begun: a rank that nobody comes to meet waits for long."""

_numbers = itertools.count(1)

Take = Callable[[Sequence[tuple[Parameter, torch.Tensor]]], None]
"""Takes one parameter in as every rank holds it; in a thread of its own. Raises to end the reading."""


class Exporter:
    """Lets the ranks of a server send their parameters."""

    def __init__(self, control: Control, ranks: Sequence[Sequence[Parameter]]) -> None:
        """``ranks``: the parameters of each, in SGLang's order."""
        self._control = control
        self._ranks = ranks
        self._turn = asyncio.Lock()

    async def export(self, take: Take, call: Call) -> None:
        """Let the ranks send, parameter by parameter.

        Raises DEADLINE_EXCEEDED, GROUP_FAILED, ENGINE_WEDGED, and what ``take`` raises.
        """
        async with self._turn:
            if call.deadline - asyncio.get_running_loop().time() < LEAST_S:
                raise Reason.DEADLINE_EXCEEDED.error("there is no time to read what the ranks hold")
            ports = [hold_port() for _ in self._ranks]
            try:
                await self._export([port.getsockname()[1] for port in ports], take, call)
            finally:
                for port in ports:
                    port.close()

    async def _export(self, ports: Sequence[int], take: Take, call: Call) -> None:
        where = {
            "master_address": HOST,
            "ports": ",".join(map(str, ports)),
            "group_name": f"rlctl-export-{next(_numbers)}",
        }
        meeting = {**where, "group_rank": 0, "world_size": 2, "backend": "gloo"}
        limit = min(_JOIN_S, call.deadline - asyncio.get_running_loop().time())
        receiving = _Receiving(self._ranks)
        try:
            await _together(
                self._tell("/init_weights_send_group_for_remote_instance", meeting, call),
                asyncio.to_thread(receiving.join, where["group_name"], ports, limit),
                receiving.close,
                call,
            )
            await _together(
                self._tell("/send_weights_to_remote_instance", where, call),
                asyncio.to_thread(receiving.receive, take),
                receiving.close,
                call,
            )
        finally:
            receiving.close()

    async def _tell(self, path: str, body: dict[str, Any], call: Call) -> None:
        await self._control.must(path, body, call=call, reason=Reason.GROUP_FAILED)


class _Receiving:
    """This process's side of the groups; in threads, except for :meth:`close`."""

    def __init__(self, ranks: Sequence[Sequence[Parameter]]) -> None:
        self._ranks = ranks
        self._groups: list[WeightGroup] = []
        self._closed = threading.Event()

    def join(self, name: str, ports: Sequence[int], limit_s: float) -> None:
        """Meet every rank. The names of the groups are made as SGLang makes them."""
        for rank, port in enumerate(ports):
            group = join(
                (HOST, port),
                name=f"{name}_{port}_{rank}",
                rank=1,
                world_size=2,
                timeout_s=limit_s,
                broadcast_timeout_s=_BROADCAST_S,
                stop=self._closed,
            )
            self._groups.append(group)
            options = dist.BarrierOptions()
            options.timeout = datetime.timedelta(seconds=limit_s)
            try:
                group.process_group.barrier(options).wait()
            except (AttributeError, RuntimeError) as error:  # it was closed meanwhile, or the rank is gone
                raise Reason.GROUP_FAILED.error(f"rank {rank} of SGLang did not meet: {error}") from error

    def receive(self, take: Take) -> None:
        """Take in every parameter from all ranks."""
        for parameters in zip(*self._ranks, strict=True):
            parts = []
            for group, parameter in zip(self._groups, parameters, strict=True):
                tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
                group.broadcast(tensor)
                parts.append((parameter, tensor))
            take(parts)

    def close(self) -> None:
        """Leave; whatever is under way ends."""
        self._closed.set()
        for group in self._groups:
            group.close()


async def _together(telling: Awaitable[None], doing: Awaitable[None], end: Callable[[], None], call: Call) -> None:
    """Both; or ``end`` both and raise what failed first, the time among it: SGLang gives up when it is left alone."""
    tasks = [asyncio.ensure_future(telling), asyncio.ensure_future(doing)]
    try:
        limit = max(call.deadline - asyncio.get_running_loop().time(), 0.0)
        done, left = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if left:
            raise Reason.DEADLINE_EXCEEDED.error("the time was up before the ranks had sent what they hold")
    finally:
        if not all(task.done() for task in tasks):
            end()
        await asyncio.gather(*tasks, return_exceptions=True)

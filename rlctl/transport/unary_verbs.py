"""The unary verbs of stages and workers, by the command stream's handler; for debuggers and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message

from rlctl.command_stream.executor import Executor
from rlctl.contract.durations import seconds
from rlctl.contract.errors import RlctlError
from rlctl.contract.validation import check
from rlctl.contract.verbs import Service, Verb, offered_by
from rlctl.ports import Clock
from rlctl.transport.handlers import Bidirectional, Unary
from rlctl.transport.links import ServedLink, serve_links
from rlctl.v1.control_pb2 import Attached, CommandResult, ControlResponse


def admin_methods(
    service: Service,
    executor: Callable[[], Executor],
    clock: Clock,
    *,
    on_link_end: Callable[[ServedLink], None],
) -> dict[str, Unary | Bidirectional]:
    """Return the methods of an admin service: every verb of the table, and the command stream.

    ``executor`` raises while the process cannot take commands yet.
    """

    async def obey(link: ServedLink) -> None:
        try:
            try:
                command_executor = executor()
            except RlctlError as error:
                await _refuse(link, error)
                raise
            await command_executor.serve(link)
        finally:
            on_link_end(link)

    methods: dict[str, Any] = {"Control": serve_links(obey)}
    for verb in offered_by(service):
        methods[verb.name] = _unary(verb, executor, clock)
    return methods


async def _refuse(link: ServedLink, error: RlctlError) -> None:
    """Answer the attach: gRPC loses the status of a stream that ends before its first message is written."""
    async for _ in link.receive():
        link.send(ControlResponse(attached=Attached(error=error.detail())))
        link.end()
        return


def _unary(verb: Verb, executor: Callable[[], Executor], clock: Clock) -> Unary:
    async def call(request: Message, remaining_s: float | None) -> Message:
        check(request)
        header = request.header  # type: ignore[attr-defined]
        timeout_s = seconds(header.timeout) if header.HasField("timeout") else verb.deadline_s
        packed = Packed()
        packed.Pack(request)
        result = await executor().execute(
            header.request_id or clock.new_id(),
            packed,
            timeout_s if remaining_s is None else min(timeout_s, remaining_s),
        )
        return _unwrap(result)

    return call


def _unwrap(result: CommandResult) -> Message:
    return result.stage if result.WhichOneof("result") == "stage" else result.rank

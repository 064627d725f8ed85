"""The span of an update in the trainer's process, parent of the coordinator's span."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlctl.traces.tracing import tracer
from rlctl.trainer.update_result import UpdateResult

P = ParamSpec("P")
S = TypeVar("S")
Update = Callable[Concatenate[S, P], Coroutine[Any, Any, UpdateResult]]


def traced(update: Update[S, P]) -> Update[S, P]:
    """Run the method inside a span if the process records traces."""

    @functools.wraps(update)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, UpdateResult]:
        # Called here, not in the coroutine: an unknown setting is refused at the caller's line.
        return _in_span(update(self, *args, **kwargs))

    return call


async def _in_span(update: Coroutine[Any, Any, UpdateResult]) -> UpdateResult:
    made_by = tracer("rlctl-trainer")
    if made_by is None:
        return await update
    with made_by.start_as_current_span("publisher.update") as span:
        result = await update
        span.set_attributes(
            {
                "rlctl.operation_id": result.operation.operation_id,
                "rlctl.model": result.operation.model,
                "rlctl.weight_version": result.version.label,
                "rlctl.weight_version_seq": result.version.sequence,
                "rlctl.bytes": result.bytes_sent,
            }
        )
        return result

"""A member's side of an update that the lead runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlctl.contract.errors import OperationFailed, Reason, RlctlError, from_detail
from rlctl.trainer.member_streams import Lead
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.source_rank import SourceRank, cut_off, detail, explained, refuse_unpublished, stopped
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN, OUTCOME_UNSPECIFIED, Outcome
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.trainer_pb2 import JoinResponse, Offer, Sent, Shipment
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.tensor.finite import local_values
from rlctl.weights.tensor.source import WeightSource

_SAYS_LITTLE = (
    Reason.CANCELLED,
    Reason.DEADLINE_EXCEEDED,
    Reason.UNREACHABLE,
    Reason.TLS_FAILED,
    Reason.LINK_LOST,
    Reason.TRAINER_RANK_LOST,
)
"""With these errors the lead may have failed, or ended, during the commit."""


async def follow(
    lead: Lead, part: SourceRank, source: WeightSource, version: str, update: int, state: UpdateState
) -> tuple[Operation, Sent]:
    """Take part in an update and return the ended operation and this rank's results.

    ``update``: number from :meth:`Lead.update`. Raises this rank's error, the lead's error, or TRAINER_RANK_LOST.
    """
    result, number = Sent(), 0
    attempt: asyncio.Task[Sent] | None = None
    shipped: asyncio.Future[None] | None = None
    outcome: Outcome.ValueType = OUTCOME_UNSPECIFIED

    async def ship(segments: Sequence[TensorSegment]) -> None:
        nonlocal shipped
        shipped = asyncio.get_running_loop().create_future()
        lead.say(update, number, shipment=Shipment(segments=segments))
        await shipped

    offer = Offer(version=version)
    hearing = asyncio.create_task(lead.hear(update))
    try:
        if part.source is not None:
            offer.CopyFrom(part.describe(source, version, part.source))
        offer.goes_on = state.watched
        offer.local = local_values(source) is not None
        lead.say(update, 0, offer=offer)
        while True:
            await asyncio.wait({hearing, *([attempt] if attempt else [])}, return_when=asyncio.FIRST_COMPLETED)
            if attempt is not None and attempt.done():
                failure, ended = attempt.exception(), attempt
                attempt = None
                if failure is None:
                    result = ended.result()
                    state.decided = True
                    lead.say(update, number, sent=result)
                elif cut_off(failure):
                    lead.say(update, number, failed=detail(failure))  # the lead may retry
                else:
                    lost = asyncio.ensure_future(_lost(hearing))
                    try:
                        raise await explained(failure, lost)
                    finally:
                        await stopped(lost)
            if not hearing.done():
                continue
            message = hearing.result()
            hearing = asyncio.create_task(lead.hear(update))
            match message.WhichOneof("message"):
                case "attempt":
                    number = message.attempt.number
                    state.decided = message.attempt.published
                    attempt = asyncio.create_task(part.attempt(source, message.attempt, ship, state))
                case "delivered":
                    state.sent.set()
                case "shipped":
                    if shipped is not None and not shipped.done():
                        if message.shipped.HasField("error"):
                            # Reported as a failed group: the lead may retry.
                            cause = f"the shared tensors were not received: {message.shipped.error.message}"
                            shipped.set_exception(Reason.GROUP_FAILED.error(cause))
                        else:
                            shipped.set_result(None)
                case "stop":
                    await stopped(attempt)
                    attempt = None
                    lead.say(update, number, failed=message.stop)
                case "failed":
                    outcome = message.outcome
                    raise from_detail(message.failed)
                case "ended":
                    refuse_unpublished(message.ended)
                    return message.ended, result
    except RlctlError as error:
        if outcome:
            error.outcome = outcome
        elif state.decided and error.reason in _SAYS_LITTLE and not isinstance(error, OperationFailed):
            error.outcome = OUTCOME_UNKNOWN
        raise
    finally:
        await stopped(attempt)
        hearing.cancel()


async def _lost(hearing: asyncio.Task[JoinResponse]) -> None:
    """Raise the lead's next message if that is a failure."""
    message = await asyncio.shield(hearing)
    for name in ("stop", "failed"):
        if message.HasField(name):
            raise from_detail(getattr(message, name))

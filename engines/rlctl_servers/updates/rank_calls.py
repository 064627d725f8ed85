"""Calls to rlctl's code in a server's ranks (:mod:`rlctl_servers.ranks`); every rank answers for itself."""

from __future__ import annotations

import abc
import asyncio
import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.verbs import VERBS
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_UNKNOWN, ErrorDetail, Outcome
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name
from rlctl_servers.ranks.protocol import LATER, POLL, PROTOCOL
from rlctl_servers.server.admin_calls import Control, time_left

LEAVING_S = 2.0
"""Seconds by which a rank ends before its caller, so that its answer still arrives."""

POLL_FIRST_S, POLL_S = 0.002, 0.05
"""Seconds until the answer of a background call is polled: the first value, doubled each time up to the second."""

MOST_GATHERED = 1_000_000_000
"""Largest model, in elements, that is read back if its tensors are cut over ranks. Gathering them takes some seconds
for each 4 GB, at every check, and nothing is generated meanwhile.
"""

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True)
class Met:
    """Result of the ranks' search for the places of the tensors.

    Attributes:
        digest: model digest of the weights; "" if they cannot be read, or the model is too large to be gathered.
        unstaged: why updates cannot be staged, or "".
    """

    digest: str = ""
    unstaged: str = "its ranks were not asked"


class RankCalls(abc.ABC):
    """The ranks of one server."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._turn = asyncio.Lock()

    @abc.abstractmethod
    async def _send(self, arguments: dict[str, Any], call: Call) -> Sequence[Any]:
        """Send a call to every rank. Return the answers of :meth:`rlctl_servers.ranks.endpoint.Endpoint.call`.

        Raises UNSUPPORTED if rlctl's code is not in the server, ENGINE_FAILED (UNKNOWN) if the server fails.
        """

    async def attach(self, reference: Mapping[str, TensorMeta], host: str, call: Call) -> list[dict[str, Any]]:
        """Return the descriptions of the ranks, in order; an empty list if rlctl's code is not in the server.

        ``host``: address towards which each rank chooses its own address. Each description has rank, size, device,
        host_id, pid, protocol and rlctl (its version). ``store``: of rank 0, the address at which groups with this
        source meet. ``learned``: the rank knows the places of the reference's tensors. ``confirmed``: their digest was
        once that of the checkpoint.

        Raises UNSUPPORTED for ranks with a different protocol, ANSWER_INVALID.
        """
        metas = [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in reference.values()]
        body = json.dumps({"reference": metas, "host": host}).encode()
        try:
            answers = await self._call("Attach", body, call)
        except RlctlError as error:
            if error.reason is Reason.UNSUPPORTED:
                return []
            raise
        ranks = [json.loads(base64.b64decode(answer["answer"])) for answer in _good(answers)]
        for rank in ranks:
            if rank.get("protocol") != PROTOCOL:
                raise Reason.UNSUPPORTED.error(
                    f"the server's ranks run rlctl {rank.get('rlctl')}, whose calls have a different format",
                    next_step="Install the stage server's rlctl beside the engine, and start the engine again.",
                )
        if not ranks or sorted(rank["rank"] for rank in ranks) != list(range(ranks[0]["size"])):
            raise Reason.ANSWER_INVALID.error(f"the server's ranks describe themselves as {ranks}")
        return sorted(ranks, key=lambda rank: int(rank["rank"]))

    async def meet(
        self, ranks: Sequence[Mapping[str, Any]], reference: Mapping[str, TensorMeta], call: Call, expected: str = ""
    ) -> Met:
        """Connect the ranks that :meth:`attach` has described, and let them find the places of the tensors.

        ``expected``: digest of the checkpoint on disk.
        """
        large = len(ranks) > 1 and sum(meta.numel for meta in reference.values()) > MOST_GATHERED
        meeting = json.dumps({"store": ranks[0]["store"], "digest": not large, "expected": expected}).encode()
        answers = _good(await self._call("Meet", meeting, call))
        results = [json.loads(base64.b64decode(answer["answer"])) for answer in answers]
        digests = {result["digest"] for result in results}
        return Met(digests.pop() if len(digests) == 1 else "", next(filter(None, (e["unstaged"] for e in results)), ""))

    async def each(self, verb: str, request: Message, reply: type[Reply], call: Call) -> list[Reply]:
        """Return the answer of every rank, in order.

        Raises the error of the first rank that failed. The outcome is DIRTY if a different rank has changed something.
        """
        answers = await self._call(verb, request.SerializeToString(), call)
        valid = _good(answers, mutates=VERBS[verb].mutates(request))
        return [reply.FromString(base64.b64decode(answer["answer"])) for answer in valid]

    async def _call(self, verb: str, request: bytes, call: Call) -> list[dict[str, Any]]:
        number, answers = await self._call_now(verb, request, call)
        pause_s = POLL_FIRST_S
        while any(answer.get(LATER) for answer in answers):
            # The ranks work in the background: the engine continues, and other calls reach the ranks.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, POLL_S)
            _, answers = await self._call_now(POLL, number.encode(), call)
        return answers

    async def _call_now(self, verb: str, request: bytes, call: Call) -> tuple[str, list[dict[str, Any]]]:
        async with self._turn:  # a call's time at the ranks begins when the engine passes it on
            return await self._exchange(verb, request, call)

    async def _exchange(self, verb: str, request: bytes, call: Call) -> tuple[str, list[dict[str, Any]]]:
        remaining = time_left(call, verb)
        number = secrets.token_hex(8)
        arguments = {
            "number": number,
            "verb": verb,
            "request": base64.b64encode(request).decode(),
            "update_id": call.update_id,
            "timeout_s": max(remaining - LEAVING_S, remaining / 2),
        }
        answers = await self._send(arguments, call)
        if any(not isinstance(answer, dict) or answer.get("number") != number for answer in answers):
            raise out_of_step(self._control)
        return number, list(answers)


def out_of_step(control: Control, cause: str = "one has failed") -> RlctlError:
    """Declare the server lost because rank answers belong to earlier calls. Return the error to raise."""
    product = control.http.product
    return control.lost(
        Reason.ENGINE_FAILED.error(
            f"answers of {product}'s ranks belong to earlier calls, since {cause}",
            outcome=OUTCOME_UNKNOWN,
            next_step=f"Start {product} again, then its stage.",
        )
    )


def _good(answers: list[dict[str, Any]], *, mutates: bool = True) -> list[dict[str, Any]]:
    """Return the answers, or raise if a rank has failed. ``mutates``: the other ranks have changed something."""
    failed = [(number, answer) for number, answer in enumerate(answers) if "error" in answer]
    if not failed:
        return answers
    number, answer = failed[0]
    error = from_detail(ErrorDetail.FromString(base64.b64decode(answer["error"])))
    outcomes: set[Outcome.ValueType] = {failed_answer["outcome"] for _, failed_answer in failed}
    if mutates and len(failed) < len(answers):
        outcomes.add(OUTCOME_DIRTY)
    error.outcome = next((o for o in (OUTCOME_DIRTY, OUTCOME_UNKNOWN) if o in outcomes), OUTCOME_REJECTED)
    if len(answers) > 1:
        error.message = f"rank {number}: {error.message}"
    raise error

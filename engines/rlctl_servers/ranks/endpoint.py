"""Calls as a rank's engine carries them: messages in base64 text, errors as data.

No exception reaches the engine, since its scheduler or worker would end.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl_servers.ranks.model import RankModel
from rlctl_servers.ranks.protocol import LATER, POLL
from rlctl_servers.ranks.rank import Rank

log = logging.getLogger(__name__)

KEPT = 16
"""Number of background calls that a rank remembers."""


class Endpoint:
    """Receives the calls to one rank."""

    def __init__(self, model: Callable[[], RankModel]) -> None:
        """``model`` is called with the first call: the engine has loaded by then."""
        self._model = model
        self._rank: Rank | None = None
        self._later: dict[str, tuple[str, Future[bytes]]] = {}

    def call(self, number: str, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        """Carry out a verb at this rank.

        ``request`` and "answer" are the serialised messages of request and result, in base64. An error is "error", an
        ``ErrorDetail``, with its "outcome". "number" is the number of the call, and tells answers apart. "later" means
        that the verb runs in the background: POLL, with the call's number as its request, asks for the answer.
        """
        return {"number": number, **self._answer(number, verb, request, update_id, timeout_s)}

    def _answer(self, number: str, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        message = base64.b64decode(request)
        if verb == POLL:
            return self._poll(message.decode())
        return _outcome(verb, partial(self._begin, number, verb, message, update_id, timeout_s))

    def _begin(self, number: str, verb: str, message: bytes, update_id: str, timeout_s: float) -> dict[str, Any]:
        if self._rank is None:
            self._rank = Rank(self._model())
        answer = self._rank.call(number, verb, message, update_id, float(timeout_s))
        if isinstance(answer, bytes):
            return _answered(answer)
        self._later[number] = verb, answer
        for stale_id in list(self._later)[:-KEPT]:
            del self._later[stale_id]
        return self._poll(number)

    def _poll(self, number: str) -> dict[str, Any]:
        """Return the answer of a call that was begun. The answer is kept, since other ranks may not be done."""
        if number not in self._later:
            return failed(Reason.INTERNAL.error(f"call {number} is not known at this rank", outcome=OUTCOME_UNKNOWN))
        verb, future = self._later[number]
        return _outcome(verb, lambda: _answered(future.result())) if future.done() else {LATER: True}


def _outcome(verb: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return act()
    except RlctlError as error:
        return failed(error)
    except Exception as error:
        log.exception("rlctl: %s", verb)
        cause = f"{type(error).__name__}: {error}"
        return failed(Reason.ENGINE_FAILED.error(f"in the engine's rank: {cause}", outcome=OUTCOME_UNKNOWN))


def _answered(answer: bytes) -> dict[str, Any]:
    return {"answer": base64.b64encode(answer).decode()}


def failed(error: RlctlError) -> dict[str, Any]:
    detail = error.detail().SerializeToString()
    return {"error": base64.b64encode(detail).decode(), "outcome": int(error.outcome)}

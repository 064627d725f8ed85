"""Calls as a rank's engine carries them: messages in base64 text, errors as data.

Nothing is raised to the engine, whose scheduler or worker would end with it.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl_servers.ranks.model import RankModel
from rlctl_servers.ranks.rank import Rank

log = logging.getLogger(__name__)


class Endpoint:
    """Where the calls to one rank arrive."""

    def __init__(self, model: Callable[[], RankModel]) -> None:
        """``model`` is called with the first call: the engine has loaded by then."""
        self._model = model
        self._rank: Rank | None = None

    def call(self, number: str, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        """Carry a verb out at this rank.

        ``request`` is its message, "answer" that of the result, both serialised, in base64. An error is "error", an
        ``ErrorDetail``, with its "outcome". "number" is that of the call, by which answers are told apart.
        """
        return {"number": number, **self._answer(number, verb, request, update_id, timeout_s)}

    def _answer(self, number: str, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        try:
            if self._rank is None:
                self._rank = Rank(self._model())
            answer = self._rank.call(number, verb, base64.b64decode(request), update_id, float(timeout_s))
        except RlctlError as error:
            return failed(error)
        except Exception as error:
            log.exception("rlctl: %s", verb)
            cause = f"{type(error).__name__}: {error}"
            return failed(Reason.ENGINE_FAILED.error(f"in the engine's rank: {cause}", outcome=OUTCOME_UNKNOWN))
        return {"answer": base64.b64encode(answer).decode()}


def failed(error: RlctlError) -> dict[str, Any]:
    """An error as an answer."""
    detail = error.detail().SerializeToString()
    return {"error": base64.b64encode(detail).decode(), "outcome": int(error.outcome)}

"""rlctl inside of vLLM's workers: ``--worker-extension-cls rlctl_vllm.worker.extension.WorkerExtension``.

vLLM makes this a base class of its worker class, and ``POST /collective_rpc`` calls its method in every worker: every
rank takes weights in by itself, and answers for itself. Messages travel as base64, because vLLM passes only JSON on.
"""

from __future__ import annotations

import base64
import logging
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl_vllm.worker.model import VLLMModel
from rlctl_vllm.worker.rank import Rank

log = logging.getLogger(__name__)


class WorkerExtension:
    """What vLLM's worker inherits."""

    _rlctl_rank: Rank | None = None

    def rlctl_call(self, number: str, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        """Carry a verb out at this rank.

        ``request`` is its message and "answer" that of the result, both serialised, in base64. Never raises: what went
        wrong is "error", an ``ErrorDetail``, with its "outcome". "number" is that of the call which this answers.
        """
        return {"number": number, **self._rlctl_answer(verb, request, update_id, float(timeout_s))}

    def _rlctl_answer(self, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        try:
            if self._rlctl_rank is None:
                self._rlctl_rank = Rank(VLLMModel(self))
            answer = self._rlctl_rank.call(verb, base64.b64decode(request), update_id, timeout_s)
        except RlctlError as error:
            return _failed(error)
        except Exception as error:
            log.exception("rlctl: %s", verb)
            cause = f"{type(error).__name__}: {error}"
            return _failed(Reason.ENGINE_FAILED.error(f"in vLLM's worker: {cause}", outcome=OUTCOME_UNKNOWN))
        return {"answer": base64.b64encode(answer).decode()}


def _failed(error: RlctlError) -> dict[str, Any]:
    detail = error.detail().SerializeToString()
    return {"error": base64.b64encode(detail).decode(), "outcome": int(error.outcome)}

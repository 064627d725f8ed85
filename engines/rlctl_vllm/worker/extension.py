"""rlctl inside vLLM's workers: ``--worker-extension-cls rlctl_vllm.worker.extension.WorkerExtension``.

vLLM makes this a base class of its worker class, and ``POST /collective_rpc`` calls its method in every worker. So
every rank receives weights by itself, and answers for itself. Messages travel as base64, because vLLM passes only JSON
on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlctl_servers.ranks.endpoint import Endpoint

from rlctl_vllm.worker.model import VLLMModel


class WorkerExtension:
    """Base class of vLLM's worker."""

    _rlctl_endpoint: Endpoint | None = None

    def rlctl_call(self, number: str, verb: str, request: str, update_id: str, timeout_s: float) -> dict[str, Any]:
        """Carry out a verb at this rank; see :meth:`Endpoint.call`."""
        if self._rlctl_endpoint is None:
            self._rlctl_endpoint = Endpoint(partial(VLLMModel, self))
        return self._rlctl_endpoint.call(number, verb, request, update_id, timeout_s)

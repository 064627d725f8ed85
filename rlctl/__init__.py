"""rlctl: these weights, on every rank, verified, and only then generate.

    fleet = rlctl.connect("127.0.0.1:5080")
    publisher = fleet.publisher("actor")
    publisher.update(model, version="step-1")

``connect`` and ``embedded`` are for blocking code, ``rlctl.aio.connect`` for asyncio.

Imports: only ``version.py`` is imported at import time. A public name is imported at its first use (``_HOMES``), so
that ``import rlctl`` loads neither grpc nor torch.

Start with ``sdk/aio.py`` (``AsyncFleet``); docs/architecture.md lists the other packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlctl.version import __version__

if TYPE_CHECKING:
    from rlctl.contract.errors import OperationFailed, Reason, RlctlError
    from rlctl.launch.embedded import EmbeddedFleet, embedded
    from rlctl.rollout.picking.admission import max_staleness
    from rlctl.rollout.sample import RolloutFailed, RolloutSample
    from rlctl.sdk import aio
    from rlctl.sdk.blocking import Fleet, connect, publisher
    from rlctl.trainer.model_digest import has_digest, model_digest
    from rlctl.trainer.pending_update import AsyncPending, Pending
    from rlctl.trainer.probe import Probe
    from rlctl.trainer.publisher import AsyncPublisher, Publisher, rolling
    from rlctl.trainer.update_progress import UpdateProgress
    from rlctl.trainer.update_result import UpdateResult

_HOMES = {
    "AsyncPending": "rlctl.trainer.pending_update",
    "AsyncPublisher": "rlctl.trainer.publisher",
    "EmbeddedFleet": "rlctl.launch.embedded",
    "Fleet": "rlctl.sdk.blocking",
    "OperationFailed": "rlctl.contract.errors",
    "Pending": "rlctl.trainer.pending_update",
    "Probe": "rlctl.trainer.probe",
    "Publisher": "rlctl.trainer.publisher",
    "Reason": "rlctl.contract.errors",
    "RlctlError": "rlctl.contract.errors",
    "RolloutFailed": "rlctl.rollout.sample",
    "RolloutSample": "rlctl.rollout.sample",
    "UpdateProgress": "rlctl.trainer.update_progress",
    "UpdateResult": "rlctl.trainer.update_result",
    "aio": "rlctl.sdk.aio",
    "connect": "rlctl.sdk.blocking",
    "embedded": "rlctl.launch.embedded",
    "max_staleness": "rlctl.rollout.picking.admission",
    "has_digest": "rlctl.trainer.model_digest",
    "model_digest": "rlctl.trainer.model_digest",
    "publisher": "rlctl.sdk.blocking",
    "rolling": "rlctl.trainer.publisher",
}

__all__ = [
    "AsyncPending",
    "AsyncPublisher",
    "EmbeddedFleet",
    "Fleet",
    "OperationFailed",
    "Pending",
    "Probe",
    "Publisher",
    "Reason",
    "RlctlError",
    "RolloutFailed",
    "RolloutSample",
    "UpdateProgress",
    "UpdateResult",
    "__version__",
    "aio",
    "connect",
    "embedded",
    "has_digest",
    "max_staleness",
    "model_digest",
    "publisher",
    "rolling",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlctl' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__.endswith(f".{name}") and name == "aio" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

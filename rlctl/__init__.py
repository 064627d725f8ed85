"""rlctl: these weights, on every rank, verified, and only then generate.

    fleet = rlctl.connect("127.0.0.1:5080")
    publisher = fleet.publisher("actor")
    publisher.update(model, version="step-1")

``connect`` and ``embedded`` are for blocking code, ``rlctl.aio.connect`` for asyncio. Everything is imported when it is
first used: ``import rlctl`` loads neither grpc nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlctl.version import __version__

if TYPE_CHECKING:
    from rlctl.client import aio
    from rlctl.client.fleet import Fleet, connect, publisher
    from rlctl.client.pending import AsyncPending, Pending
    from rlctl.client.probe import Probe
    from rlctl.client.published import UpdateResult
    from rlctl.client.publisher import AsyncPublisher, Publisher, model_digest, rolling
    from rlctl.embed import EmbeddedFleet, embedded
    from rlctl.errors import OperationFailed, Reason, RlctlError
    from rlctl.rollout.admission import max_staleness
    from rlctl.rollout.sample import RolloutFailed, RolloutSample

_HOMES = {
    "AsyncPending": "rlctl.client.pending",
    "AsyncPublisher": "rlctl.client.publisher",
    "EmbeddedFleet": "rlctl.embed",
    "Fleet": "rlctl.client.fleet",
    "OperationFailed": "rlctl.errors",
    "Pending": "rlctl.client.pending",
    "Probe": "rlctl.client.probe",
    "Publisher": "rlctl.client.publisher",
    "Reason": "rlctl.errors",
    "RlctlError": "rlctl.errors",
    "RolloutFailed": "rlctl.rollout.sample",
    "RolloutSample": "rlctl.rollout.sample",
    "UpdateResult": "rlctl.client.published",
    "aio": "rlctl.client.aio",
    "connect": "rlctl.client.fleet",
    "embedded": "rlctl.embed",
    "max_staleness": "rlctl.rollout.admission",
    "model_digest": "rlctl.client.publisher",
    "publisher": "rlctl.client.fleet",
    "rolling": "rlctl.client.publisher",
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
    "UpdateResult",
    "__version__",
    "aio",
    "connect",
    "embedded",
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

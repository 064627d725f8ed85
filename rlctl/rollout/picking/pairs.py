"""Pairs of prefill and decode stages: tells whether two stages can generate a sample together."""

from __future__ import annotations

from rlctl.v1.common_pb2 import TRANSPORT_SHARED_MEMORY, WORKER_TYPE_DECODE, WORKER_TYPE_PREFILL
from rlctl.v1.fleet_pb2 import Stage


def prefills(stage: Stage) -> bool:
    """Return whether the stage only computes prompts for decode stages."""
    return stage.registration.worker_type == WORKER_TYPE_PREFILL


def decodes(stage: Stage) -> bool:
    """Return whether the stage continues from prompts of prefill stages."""
    return stage.registration.worker_type == WORKER_TYPE_DECODE


def fit(prefill: Stage, decode: Stage) -> bool:
    """Return whether the decode stage can use the KV entries of the prefill stage.

    Both need the same model, version and kind of engine, and a transport between them.
    """
    sender, receiver = prefill.registration, decode.registration
    return (
        (sender.model, sender.engine) == (receiver.model, receiver.engine)
        and prefill.report.weight_version.sequence == decode.report.weight_version.sequence
        and _reach(prefill, decode)
    )


def _reach(prefill: Stage, decode: Stage) -> bool:
    ways = decode.registration.capabilities.kv_transports
    return TRANSPORT_SHARED_MEMORY not in ways or _hosts(prefill) == _hosts(decode)


def _hosts(stage: Stage) -> set[str]:
    return {worker.host_id for worker in stage.registration.layout.workers}

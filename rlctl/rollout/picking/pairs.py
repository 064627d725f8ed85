"""Prefill and decode stages: which of them generate a sample together."""

from __future__ import annotations

from rlctl.v1.common_pb2 import TRANSPORT_SHARED_MEMORY, WORKER_TYPE_DECODE, WORKER_TYPE_PREFILL
from rlctl.v1.fleet_pb2 import Stage


def prefills(stage: Stage) -> bool:
    """Whether it computes prompts for decode stages, and nothing else."""
    return stage.registration.worker_type == WORKER_TYPE_PREFILL


def decodes(stage: Stage) -> bool:
    """Whether it goes on from prompts that prefill stages compute."""
    return stage.registration.worker_type == WORKER_TYPE_DECODE


def fit(prefill: Stage, decode: Stage) -> bool:
    """Whether the KV entries that one computes can be used by the other: those of the same model at the same version,
    held by the same kind of engine, with a way between them.
    """
    one, other = prefill.registration, decode.registration
    return (
        (one.model, one.engine) == (other.model, other.engine)
        and prefill.report.weight_version.sequence == decode.report.weight_version.sequence
        and _reach(prefill, decode)
    )


def _reach(prefill: Stage, decode: Stage) -> bool:
    ways = decode.registration.capabilities.kv_transports
    return TRANSPORT_SHARED_MEMORY not in ways or _hosts(prefill) == _hosts(decode)


def _hosts(stage: Stage) -> set[str]:
    return {worker.host_id for worker in stage.registration.layout.workers}

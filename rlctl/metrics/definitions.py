"""Every metric: name, type, labels, help. The label sets are bounded by the contract, the topology and the models."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlctl.contract.errors import Reason

COORDINATOR, STAGE, GATEWAY = "coordinator", "stage", "gateway"

QUICK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets for a commit, a remote call or the lag of an event loop, in seconds."""

CALL = (*QUICK, 30.0, 60.0, 300.0, 1800.0)
"""Buckets for a call that is quick or waits for a long operation, in seconds."""

LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1800.0)
"""Buckets for an operation, a phase or a request, in seconds."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric.

    Attributes:
        name: stable name; counters end in ``_total``.
        kind: type of Prometheus.
        help: meaning, in a sentence.
        processes: kinds of process with this metric.
        buckets: upper bounds of a histogram's buckets.
        read: the value is read at each scrape; otherwise events change it.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    processes: tuple[str, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: bool = False


def _gauge(name: str, help: str, process: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help, (process,), labels, read=True)


def _counter(name: str, help: str, process: str, *labels: str, read: bool = False) -> Metric:
    return Metric(name, "counter", help, (process,), labels, read=read)


def _histogram(name: str, help: str, process: str, *labels: str, buckets: tuple[float, ...] = LONG) -> Metric:
    return Metric(name, "histogram", help, (process,), labels, buckets)


# Every process.

EVENT_LOOP_LAG = Metric(
    "rlctl_event_loop_lag_seconds",
    "histogram",
    "Delay of a timer of an event loop, measured twice a second.",
    (COORDINATOR, STAGE, GATEWAY),
    ("loop",),
    QUICK,
)

QUOTA_REFUSALS = Metric(
    "rlctl_quota_refusals_total",
    "counter",
    "Generation requests that were refused, because they exceed the quota of their principal.",
    (STAGE, GATEWAY),
    ("principal",),
)

CERTIFICATE_EXPIRY = Metric(
    "rlctl_certificate_expiry_timestamp_seconds",
    "gauge",
    "Unix time at which the certificate in use expires; absent without TLS.",
    (COORDINATOR, STAGE, GATEWAY),
    read=True,
)

# Coordinator: operations and updates.

OPERATIONS = _counter("rlctl_operations_total", "Ended operations.", COORDINATOR, "verb", "state")
OPERATION_SECONDS = _histogram(
    "rlctl_operation_duration_seconds", "Time from the acceptance of an operation to its end.", COORDINATOR, "verb"
)
RUNNING_OPERATIONS = _gauge("rlctl_operations_running", "Operations that have not ended.", COORDINATOR, "verb")
FAN_OUT_SECONDS = _histogram(
    "rlctl_fan_out_duration_seconds",
    "Time from the first command of a fan-out to the last result.",
    COORDINATOR,
    "verb",
    buckets=CALL,
)
PHASE_SECONDS = _histogram(
    "rlctl_update_phase_duration_seconds",
    "Time of a phase of a weight update or a heal, from the timeline of the operation.",
    COORDINATOR,
    "verb",
    "phase",
)
PAUSE_SECONDS = _histogram(
    "rlctl_update_pause_duration_seconds",
    "Time from the pause of the first target of an update to the resume of the last one.",
    COORDINATOR,
    "verb",
)
UPDATE_BYTES = _counter(
    "rlctl_update_bytes_total", "Bytes that arrived at ranks in weight updates and heals.", COORDINATOR, "transport"
)
VERIFICATION_FAILURES = _counter(
    "rlctl_verification_failures_total", "Targets that failed the verification of an update.", COORDINATOR, "level"
)
EXPIRED_LEASES = _counter(
    "rlctl_update_leases_expired_total", "Updates that ended because their owner did not renew the lease.", COORDINATOR
)
QUARANTINES = _counter("rlctl_quarantines_total", "Quarantines of stages.", COORDINATOR, "model", "reason")
JOURNAL_SECONDS = _histogram(
    "rlctl_journal_commit_duration_seconds",
    "Time of a journal write, until it is on disk or has failed.",
    COORDINATOR,
    buckets=QUICK,
)
CALL_SECONDS = _histogram(
    "rlctl_rpc_duration_seconds",
    "Time of a unary call of CoordinatorService, for some calls including the wait for the end of an operation.",
    COORDINATOR,
    "method",
    buckets=CALL,
)
REFUSED_CALLS = _counter(
    "rlctl_rpc_refusals_total", "Unary calls of CoordinatorService that ended with an error.", COORDINATOR,
    "method", "reason",
)  # fmt: skip

# Coordinator: fleet.

EPOCH = _gauge("rlctl_epoch", "Epoch of the fleet.", COORDINATOR)
MODEL_VERSION = _gauge("rlctl_model_version", "Sequence of the model's latest version.", COORDINATOR, "model")
PUBLISH_TIME = _gauge(
    "rlctl_model_publish_timestamp_seconds", "Unix time of the publication of the latest version.", COORDINATOR, "model"
)
OPEN_UPDATE = _gauge(
    "rlctl_model_update_open", "1 while an update or a heal of the model is open.", COORDINATOR, "model"
)
MIN_HEALTHY = _gauge(
    "rlctl_model_min_healthy",
    "Stages that voluntary disruptions of the model leave routable; 0: no limit.",
    COORDINATOR,
    "model",
)
HEALTHY = _gauge(
    "rlctl_model_healthy_stages",
    "Routable stages of the model, compared with its min_healthy.",
    COORDINATOR,
    "model",
)
STAGES = _gauge("rlctl_stages", "Stages in each state.", COORDINATOR, "model", "state")
STAGE_STATE = _gauge("rlctl_stage_state", "1 for the state of the stage.", COORDINATOR, "model", "slot", "state")
ROUTABLE = _gauge("rlctl_stage_routable", "1 if generation may go to the stage.", COORDINATOR, "model", "slot")
VERSION_LAG = _gauge(
    "rlctl_stage_version_lag", "Sequence of the model's latest version, minus the stage's sequence.", COORDINATOR,
    "model", "slot",
)  # fmt: skip
QUARANTINED = _gauge("rlctl_stage_quarantined", "1 if the stage is quarantined.", COORDINATOR, "model", "slot")
LEASED = _gauge("rlctl_stage_lease_held", "1 if the stage reports a serving lease.", COORDINATOR, "model", "slot")
LAST_HEARD = _gauge(
    "rlctl_stage_last_heard_seconds",
    "Time since the last message of a stage with a link.",
    COORDINATOR,
    "model",
    "slot",
)
INCARNATIONS = _counter(
    "rlctl_stage_incarnations_total", "Processes that have filled the slot; it grows with each restart.", COORDINATOR,
    "model", "slot", read=True,
)  # fmt: skip
ENGINE_FAILURES = _gauge(
    "rlctl_stage_engine_failures",
    "Failures of the engine since it last ran for a minute.",
    COORDINATOR,
    "model",
    "slot",
)
UNHEALABLE = _gauge(
    "rlctl_stage_unhealable",
    "1 if the stage needs a heal, and its version has no heal source.",
    COORDINATOR,
    "model",
    "slot",
)

# Stage server.

GENERATION_REQUESTS = _counter(
    "rlctl_generation_requests_total",
    "Ended generation requests: ok, aborted, cancelled by the caller, or the reason of the refusal or failure.",
    STAGE,
    "model",
    "slot",
    "outcome",
)
GENERATION_SECONDS = _histogram(
    "rlctl_generation_duration_seconds", "Time of a generation request at the stage.", STAGE, "model", "slot"
)
GENERATION_FIRST = _histogram(
    "rlctl_generation_first_token_seconds",
    "Time from the receipt of a request to its first token at the stage.",
    STAGE,
    "model",
    "slot",
)
GENERATED_TOKENS = _counter("rlctl_generation_tokens_total", "Generated tokens.", STAGE, "model", "slot")
GENERATION_RUNNING = _gauge("rlctl_generation_running", "Generation requests at the engine.", STAGE, "model", "slot")
LEASE_SECONDS = _gauge(
    "rlctl_serving_lease_seconds", "Time until the serving lease ends; below 0 it has ended.", STAGE, "model", "slot"
)
STAGE_VERSION = _gauge("rlctl_serving_version", "Sequence of the version of the weights.", STAGE, "model", "slot")

# Gateway.

HTTP_REQUESTS = _counter(
    "rlctl_gateway_requests_total",
    "Ended HTTP requests, by the pattern of the route. Status 499: the caller has closed the connection.",
    GATEWAY,
    "route",
    "method",
    "status",
)
HTTP_SECONDS = _histogram(
    "rlctl_gateway_request_duration_seconds", "Time of an HTTP request.", GATEWAY, "route", "method"
)
SAMPLES = _counter(
    "rlctl_gateway_samples_total",
    "Ended samples: ok, aborted, cancelled by the caller, or the reason of the failure.",
    GATEWAY,
    "model",
    "outcome",
)
SAMPLE_FIRST = _histogram(
    "rlctl_gateway_first_token_seconds",
    "Time from the start of a sample to its first token, with the wait for a stage.",
    GATEWAY,
    "model",
)
SAMPLE_TOKENS = _counter("rlctl_gateway_tokens_total", "Tokens of ended samples.", GATEWAY, "model")
INFLIGHT = _gauge("rlctl_gateway_inflight", "Samples and forwarded requests under way.", GATEWAY)
INFLIGHT_BYTES = _gauge(
    "rlctl_gateway_inflight_bytes", "Bytes of the requests of samples and forwarded requests under way.", GATEWAY
)
WAITING = _gauge("rlctl_gateway_waiting", "Samples and forwarded requests that wait for a stage.", GATEWAY)

METRICS: Sequence[Metric] = tuple(value for value in globals().values() if isinstance(value, Metric))
"""All metrics, in the order of this file."""


def of(process: str) -> list[Metric]:
    return [metric for metric in METRICS if process in metric.processes]


def refuse_without_library() -> None:
    """Raise UNSUPPORTED if prometheus_client is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise Reason.UNSUPPORTED.error(
            "metrics need prometheus_client, which is not installed here",
            field="metrics",
            next_step="pip install 'rlctl[metrics]'",
        )

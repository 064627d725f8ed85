"""Every reason of a refusal or failure in rlctl: one table, reason ⇄ status ⇄ exception.

Exceptions::

    RlctlError
    ├── InvalidRequest       INVALID_ARGUMENT     the request is wrong in itself
    ├── NotFound             NOT_FOUND            the request names something that does not exist
    ├── PreconditionFailed   FAILED_PRECONDITION  the fleet's state does not allow the request
    ├── Conflict             ABORTED              a resource of the request is in use
    ├── Fenced               PERMISSION_DENIED    the caller has been replaced
    ├── Unauthenticated      UNAUTHENTICATED      no valid token
    ├── Forbidden            PERMISSION_DENIED    the caller has no right to the call
    ├── Exhausted            RESOURCE_EXHAUSTED   too large, too many
    │   └── QuotaExceeded    RESOURCE_EXHAUSTED   beyond the caller's quota; try again later
    ├── Unsupported          UNIMPLEMENTED        no target can, or not written yet
    ├── Unavailable          UNAVAILABLE          not reachable or not serving now; try again
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    the time is up
    ├── Internal             INTERNAL             a defect, or an engine that failed
    └── OperationFailed                           an accepted operation did not end OK (``.operation``)

Raise with ``Reason.X.error("why", field="header.target.slots", next_step="...")``. On the wire a refusal is a gRPC
status with one google.rpc.ErrorInfo. The ErrorInfo's reason is the reason's name here. Inside results a refusal is an
``ErrorDetail``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rlctl.v1 import common_pb2, results_pb2

E = TypeVar("E", bound=BaseException)

DOMAIN = "rlctl"
"""ErrorInfo.domain of every error of this project."""


MOST_SAID = 2000
"""Most characters of a message."""


class RlctlError(Exception):
    """A refusal or failure with a typed reason.

    Attributes:
        reason: member of :class:`Reason`.
        message: the cause, in words.
        field: path of the offending request field, or "".
        next_step: the caller's next step, or "".
        metadata: further facts, str to str.
        outcome: outcome of the current command: OUTCOME_REJECTED (no effect) by default.
        status: of gRPC, by class. ``http_status``: of HTTP, as SGLang answers (busy, not paused: 400); a dialect with a
            different status sets the status itself.
    """

    status = "UNKNOWN"
    http_status = 500

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        next_step: str = "",
        metadata: Mapping[str, str] | None = None,
        outcome: common_pb2.Outcome.ValueType = common_pb2.OUTCOME_REJECTED,
    ) -> None:
        message = _bounded(_text(message))
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = _text(field)
        self.next_step = _text(next_step or reason.next_step)
        self.metadata = {_text(name): _text(value) for name, value in (metadata or {}).items()}
        self.outcome = outcome

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its class and attributes, for example out of a Ray actor, for any constructor."""
        return type(self).__new__, (type(self), self.message), self.__dict__

    def __str__(self) -> str:
        where = f" [{self.field}]" if self.field else ""
        message = f"{self.message.removesuffix('.')}. {self.next_step}" if self.next_step else self.message
        return f"{self.reason.name}{where}: {message}"

    def described(self) -> dict[str, str | int]:
        return {
            "message": str(self),
            "reason": self.reason.name,
            "field": self.field,
            "cause": self.message,
            "next_step": self.next_step,
            "code": self.http_status,
        }

    def detail(self) -> common_pb2.ErrorDetail:
        """Return the error as a message for results."""
        return common_pb2.ErrorDetail(
            reason=self.reason.name,
            message=self.message,
            field=self.field,
            next_step=self.next_step,
            metadata=self.metadata,
        )


class InvalidRequest(RlctlError):
    """The request is wrong in itself."""

    status = "INVALID_ARGUMENT"
    http_status = 400


class NotFound(RlctlError):
    """The request names something that does not exist."""

    status = "NOT_FOUND"
    http_status = 404


class PreconditionFailed(RlctlError):
    """The fleet's state does not allow the request."""

    status = "FAILED_PRECONDITION"
    http_status = 400


class Conflict(RlctlError):
    """A resource of the request is in use."""

    status = "ABORTED"
    http_status = 409


class Fenced(RlctlError):
    """The caller has been replaced."""

    status = "PERMISSION_DENIED"
    http_status = 403


class Unauthenticated(RlctlError):
    """No valid token."""

    status = "UNAUTHENTICATED"
    http_status = 401


class Forbidden(RlctlError):
    """The caller has no right to the call."""

    status = "PERMISSION_DENIED"
    http_status = 403


class Exhausted(RlctlError):
    """Too large or too many."""

    status = "RESOURCE_EXHAUSTED"
    http_status = 413


class QuotaExceeded(Exhausted):
    """Beyond the quota of the caller."""

    http_status = 429


class Unsupported(RlctlError):
    """No target can do this, or the code does not exist yet."""

    status = "UNIMPLEMENTED"
    http_status = 501


class Unavailable(RlctlError):
    """Not reachable or not serving now."""

    status = "UNAVAILABLE"
    http_status = 503


class DeadlineExceeded(RlctlError):
    """The time is up."""

    status = "DEADLINE_EXCEEDED"
    http_status = 504


class Internal(RlctlError):
    """A defect, or an engine that failed."""

    status = "INTERNAL"


@enum.unique
class Reason(enum.Enum):
    """The cause of an error: (exception class, meaning, next step)."""

    # The request.
    FIELD_REQUIRED = (InvalidRequest, "A required field is empty.", "")
    FIELD_INVALID = (InvalidRequest, "A field has a value that is not allowed.", "")
    FIELD_CONFLICT = (InvalidRequest, "Two fields exclude each other.", "")
    TOPOLOGY_INVALID = (
        InvalidRequest,
        "A topology, or the flags that change it, cannot be run.",
        "`rlctl validate FILE` lists all mistakes; docs/reference/topology.md has every key.",
    )
    LENGTH_MISMATCH = (InvalidRequest, "Fields that run in parallel have different lengths.", "")
    UNKNOWN_ENUM_VALUE = (
        InvalidRequest,
        "An enum has a value that this version does not know.",
        "Upgrade the older side; values are never guessed.",
    )
    DEADLINE_INVALID = (
        InvalidRequest,
        "The timeout is zero, negative or too long.",
        "Give the time that remains, in seconds, above zero.",
    )
    PROMPT_TOO_LONG = (
        InvalidRequest,
        "Prompt and output do not fit the context.",
        "Shorten the prompt, or ask for fewer tokens.",
    )
    MESSAGE_TOO_LARGE = (
        Exhausted,
        "The message is larger than the server takes.",
        "Send tensors over a group, shared memory or disk; only metadata belongs in messages.",
    )
    TOO_MANY_STREAMS = (
        Exhausted,
        "The caller's host has too many streams of this method open.",
        "End streams that are no longer read.",
    )
    PLACE_UNAVAILABLE = (
        Exhausted,
        "The cluster has no room for the engine.",
        "Free GPUs, add nodes, or make the engine smaller.",
    )
    # Names.
    STAGE_NOT_FOUND = (NotFound, "No stage fills this slot.", "`rlctl get stages` lists them.")
    MODEL_NOT_FOUND = (NotFound, "No stage serves this model.", "`rlctl get models` lists them.")
    OPERATION_NOT_FOUND = (NotFound, "No such operation is on record.", "`rlctl get operations` lists them.")
    UPDATE_NOT_FOUND = (NotFound, "No such update is open.", "Begin a new one.")
    GROUP_NOT_FOUND = (NotFound, "No such process group exists.", "Initialise the group first.")
    GROUP_EXISTS = (
        PreconditionFailed,
        "A group of this name exists with another store or shape.",
        "Destroy the group first.",
    )
    ADAPTER_NOT_FOUND = (NotFound, "No such adapter is loaded.", "`rlctl adapters list` lists them.")
    ADAPTER_EXISTS = (
        PreconditionFailed,
        "An adapter of this name is loaded.",
        "Unload the adapter first, or load without only_new to replace it.",
    )
    CHECKPOINT_NOT_FOUND = (
        NotFound,
        "The checkpoint does not exist or is unreadable.",
        "Check path, mount and permissions on the host that reads it.",
    )
    CHECKPOINT_MISMATCH = (
        PreconditionFailed,
        "The checkpoint does not fit the model.",
        "Use a checkpoint of the same model; `rlctl weights inspect --model-path DIR` compares one.",
    )
    SEGMENT_NOT_FOUND = (
        NotFound,
        "A shared segment cannot be mapped: it is gone, or not this rank's to open.",
        "Run both sides as one user with one /dev/shm, or send with path='broadcast'.",
    )
    PATH_NOT_ALLOWED = (
        InvalidRequest,
        "The path lies outside of the directories that the engine may use.",
        "Start the engine with --option allowed_roots=DIRECTORY[:DIRECTORY...].",
    )
    DISK_FULL = (Exhausted, "The disk is full.", "Free space, or name a directory on another disk.")
    TOO_MANY_FILES = (
        Exhausted,
        "The process, or its host, has as many open files as it may have.",
        "Raise the limit of open files (`ulimit -n`), and try again.",
    )
    VERB_UNKNOWN = (Unsupported, "This version has no such verb.", "Correct the route, or upgrade the server.")
    # The caller.
    TOKEN_MISSING = (
        Unauthenticated,
        "The call needs a bearer token, and none was sent.",
        "Set RLCTL_TOKEN or RLCTL_TOKEN_FILE.",
    )
    TOKEN_INVALID = (
        Unauthenticated,
        "The bearer token is not the server's.",
        "Use the token of this fleet (RLCTL_TOKEN, RLCTL_TOKEN_FILE), or make one: `rlctl tokens new`.",
    )
    SCOPE_MISSING = (
        Forbidden,
        "The caller's scopes do not allow the call.",
        "Use a token with the scope; an admin of the fleet makes one: `rlctl tokens new NAME --scope SCOPE`.",
    )
    QUOTA_EXCEEDED = (
        QuotaExceeded,
        "The principal has as many requests in flight at this server as its quota allows.",
        "Wait until requests of the principal have ended; or change its quota: `rlctl tokens limit NAME NUMBER`.",
    )
    INSECURE_BIND = (
        InvalidRequest,
        "The address is reachable from other hosts, and neither a token nor certificates are set.",
        "Set RLCTL_TOKEN or RLCTL_TOKEN_FILE, use certificates (docs/tls.md), or pass --insecure.",
    )
    TLS_INVALID = (
        InvalidRequest,
        "A certificate, key or CA file cannot be used.",
        "`rlctl certs issue` makes certificates; docs/tls.md lists what they need.",
    )
    TLS_FAILED = (
        Unavailable,
        "The TLS handshake with the peer failed.",
        "docs/tls.md lists the certificates of each hop.",
    )
    PEER_NOT_ALLOWED = (
        Forbidden,
        "The identity in the caller's certificate may not call this service.",
        "docs/tls.md lists who may call whom. `rlctl certs issue DIRECTORY client/NAME` issues a user's certificate.",
    )
    SLOT_NOT_ADMITTED = (
        PreconditionFailed,
        "The fleet admits only the slots of its topology, and slots that an operator admits.",
        "`rlctl admit SLOT`.",
    )
    EPOCH_FENCED = (
        Fenced,
        "Another coordinator has taken over.",
        "Call the present coordinator; `rlctl status` shows its epoch.",
    )
    EPOCH_REQUIRED = (
        Fenced,
        "A mutating call to a stage needs the epoch of its coordinator.",
        "Set header.fence.fleet_epoch.",
    )
    UPDATE_FENCED = (
        Fenced,
        "The caller is not the owner of the update.",
        "Wait for the end of the open update, or `rlctl weights abort`.",
    )
    TRAINER_FENCED = (Fenced, "A trainer of a newer incarnation updates this model.", "Stop this trainer.")
    INCARNATION_FENCED = (
        Fenced,
        "The slot is filled by a newer incarnation.",
        "`rlctl get stages` shows the present one. Stop the older process of the slot.",
    )
    NOT_RANK_ZERO = (
        PreconditionFailed,
        "All ranks of the stage must do this together.",
        "Send the call to the stage.",
    )
    # States.
    ILLEGAL_STATE = (PreconditionFailed, "The stage is in a state that the verb does not allow.", "")
    WEIGHTS_STALE = (
        PreconditionFailed,
        "The stage's weights are not at an admitted version.",
        "Send weights to the stage: `rlctl heal`, `rlctl weights update --model-path ...`, or the next update.",
    )
    WEIGHTS_DIRTY = (
        PreconditionFailed,
        "The stage's weights are a mixture of versions.",
        "Only a heal or a full update clears it: `rlctl heal`, `rlctl weights update --model-path ...`.",
    )
    WEIGHTS_NOT_FINITE = (
        InvalidRequest,
        "The weights to publish hold NaN or infinite values.",
        "Go back to an earlier training step, or publish them with finite=False.",
    )
    WEIGHTS_INCOMPLETE = (
        PreconditionFailed,
        "A full update has not written every parameter.",
        "Send every tensor, or begin a partial update (`update_kind` in SGLang's dialect).",
    )
    DIGEST_MISMATCH = (
        PreconditionFailed,
        "The weights differ from the sent or expected weights.",
        "`rlctl weights checksum` shows the digests. A heal or a full update replaces wrong weights.",
    )
    BASE_MISMATCH = (
        PreconditionFailed,
        "The base of a delta or partial update is not the version at the target.",
        "Send a full update.",
    )
    PROBE_MISMATCH = (
        PreconditionFailed,
        "The log probabilities differ from the trainer's.",
        "Compare dtype and kernels of engine and trainer; raise the tolerance only for a known difference.",
    )
    DECODE_MISMATCH = (
        PreconditionFailed,
        "Decode and prefill differ in the log probabilities of the same tokens: decode computes with other weights.",
        "Restart the engine (`rlctl restart SLOT`): a CUDA graph or a derived tensor may be of earlier weights.",
    )
    MEMORY_RELEASED = (
        PreconditionFailed,
        "A memory region that is needed is released.",
        "`rlctl memory resume` first.",
    )
    MEMORY_NOT_RELEASABLE = (
        PreconditionFailed,
        "The region cannot be released now.",
        "Pause with retract or abort first, and see the engine's log.",
    )
    MEMORY_FULL = (
        Exhausted,
        "The device has too little free memory.",
        "Free memory in processes that share the device, and try again.",
    )
    ACTIVE_REQUESTS = (
        PreconditionFailed,
        "Requests are waiting or running.",
        "Pause first, or set abort_all_requests.",
    )
    PAUSE_MODE_CONFLICT = (
        PreconditionFailed,
        "Generation is paused with another mode.",
        "Continue first, or pause with retract.",
    )
    MODEL_FROZEN = (
        PreconditionFailed,
        "The model is frozen: it receives no weights.",
        "Name another model, or start its engines without --frozen (topology: update_weights).",
    )
    NO_TARGETS = (PreconditionFailed, "No target is available.", "`rlctl status` shows the fleet.")
    UNSUPPORTED = (Unsupported, "The target cannot do this.", "")
    UNSUPPORTED_BY_ALL = (
        Unsupported,
        "No target can do this.",
        "`rlctl describe stage SLOT` shows what its engine can do.",
    )
    NOT_IMPLEMENTED = (
        Unsupported,
        "The contract has this verb, but its code does not exist yet.",
        "docs/limits.md lists the missing parts.",
    )
    VERIFICATION_UNREACHABLE = (
        PreconditionFailed,
        "A target cannot reach the requested verification.",
        "`rlctl describe stage SLOT` shows the levels that a stage reaches.",
    )
    RETRIES_EXHAUSTED = (
        PreconditionFailed,
        "All attempts of the update have failed.",
        "Mend the cause of the failed attempts, and send the update again.",
    )
    UNHEALABLE = (
        PreconditionFailed,
        "No source of the published version is known.",
        "The trainer's next full update reaches the stage; or `rlctl heal --checkpoint DIR`.",
    )
    MIN_HEALTHY = (
        PreconditionFailed,
        "Fewer stages of a model than its min_healthy would remain routable.",
        "Repeat the call when more stages are routable. `rlctl min-healthy` shows and changes the limit; --force of a "
        "drain, disable or restart ignores it.",
    )
    QUORUM_NOT_MET = (
        PreconditionFailed,
        "Too few targets confirmed.",
        "Repair the named targets or wait for them, and send the update again; or lower the quorum.",
    )
    STAGE_NOT_SERVING = (Unavailable, "The stage does not serve now.", "Use another stage, or wait.")
    VERSION_TOO_OLD = (
        Unavailable,
        "The stage is at an older version than requested.",
        "Use another stage, or wait.",
    )
    HANDOVER_FAILED = (
        Unavailable,
        "The KV entries of a prompt did not get from the prefill engine to the decode engine.",
        "Send the request again.",
    )
    NO_ROUTABLE_STAGE = (Unavailable, "No stage of the model is routable.", "`rlctl status` says why.")
    TOO_MANY_REQUESTS = (Unavailable, "Too many requests are under way here.", "Send the request again a little later.")
    NOT_COLOCATED = (
        PreconditionFailed,
        "A rank does not share memory with the source.",
        "Send over a process group or disk, or give the containers one /dev/shm.",
    )
    SEGMENT_EXPIRED = (
        PreconditionFailed,
        "The lease on a shared segment ran out, or its memory was used again.",
        "Send the tensors again.",
    )
    SHARED_MEMORY_FULL = (
        Exhausted,
        "There is no room for a shared segment.",
        "Enlarge /dev/shm (docker: --shm-size), or send with path='auto' or 'broadcast'.",
    )
    # Conflicts.
    REQUEST_ID_EXPIRED = (
        PreconditionFailed,
        "The request_id is older than the kept records, so whether its call was carried out is unknown.",
        "Look at the fleet, then repeat the call under a new id. If that id is refused too, the clock of the caller's "
        "host is behind: `rlctl doctor` there.",
    )
    REQUEST_ID_REUSED = (
        Conflict,
        "The request_id was used for another request.",
        "Make a new id for every logical call.",
    )
    OPERATION_CONFLICT = (
        Conflict,
        "Another operation is running on a target.",
        "Wait for it, or name other targets.",
    )
    UPDATE_IN_PROGRESS = (
        Conflict,
        "A weight update of the model is open.",
        "Wait for it, or `rlctl weights abort`.",
    )
    RID_IN_USE = (Conflict, "A request with this rid is running.", "Use a new id.")
    # Failures.
    LINK_LOST = (
        Unavailable,
        "The connection broke; the outcome is not known.",
        "Repeat with the same request_id.",
    )
    UNREACHABLE = (
        Unavailable,
        "The peer cannot be reached.",
        "Check process, address and firewall of the peer; `rlctl doctor` checks a fleet.",
    )
    TRAINER_RANK_LOST = (
        Unavailable,
        "A rank of the trainer is gone.",
        "Restart the rank, and make new publishers on every rank.",
    )
    ANSWER_INVALID = (
        Internal,
        "An answer contradicts its request; the outcome is unknown.",
        "Compare the releases of both sides; if they are equal, please report it with the logs.",
    )
    RANK_LOST = (
        Unavailable,
        "A rank of the stage is gone.",
        "Restart the engine, unless `rlctl up` does. Send an interrupted update again.",
    )
    RANK_SILENT = (
        DeadlineExceeded,
        "The rank did not answer in time; its outcome is not known.",
        "See `rlctl logs SLOT`; `rlctl restart SLOT` replaces a stuck rank.",
    )
    DEADLINE_EXCEEDED = (
        DeadlineExceeded,
        "The time was up.",
        "Allow more time if the work needs it; `rlctl status` shows the running operations.",
    )
    LEASE_EXPIRED = (
        PreconditionFailed,
        "The update's lease ran out, and the update was aborted.",
        "Begin a new update.",
    )
    CANCELLED = (Conflict, "The call was cancelled.", "")
    SOURCE_FAILED = (
        Internal,
        "A trainer rank could not give its weights.",
        "Mend the cause at the trainer rank, and send the update again.",
    )
    GROUP_FAILED = (
        Internal,
        "The process group failed.",
        "Send the update again, with retries=1 or more. If it fails again, check the network between its ranks.",
    )
    ENGINE_FAILED = (Internal, "The engine failed.", "See the engine's log.")
    ENGINE_WEDGED = (Internal, "The engine is stuck inside its own code.", "Restart the engine.")
    JOURNAL_FAILED = (
        Internal,
        "The journal cannot be written or read.",
        "Check disk space and permissions of the journal.",
    )
    INTERNAL = (Internal, "A defect of rlctl.", "Please report it with the log.")

    def __init__(self, exception: type[RlctlError], meaning: str, next_step: str) -> None:
        self.exception = exception
        self.meaning = meaning
        self.next_step = next_step

    def error(
        self,
        message: str = "",
        *,
        field: str = "",
        next_step: str = "",
        metadata: Mapping[str, str] | None = None,
        outcome: common_pb2.Outcome.ValueType = common_pb2.OUTCOME_REJECTED,
    ) -> RlctlError:
        return self.exception(
            self,
            message or self.meaning,
            field=field,
            next_step=next_step,
            metadata=metadata,
            outcome=outcome,
        )


def _text(value: str) -> str:
    """Return text of an error in a form that messages can hold.

    Half a surrogate pair, from a caller's JSON or a file's name, is escaped. An error that could not be sent would
    leave the caller without an answer.
    """
    return str(value).encode(errors="backslashreplace").decode()


def _bounded(message: str) -> str:
    """Shorten a message to MOST_SAID characters. A message may repeat text of the request, in any length."""
    return message if len(message) <= MOST_SAID else f"{message[: MOST_SAID // 2]} … {message[-MOST_SAID // 2 :]}"


def from_detail(detail: common_pb2.ErrorDetail) -> RlctlError:
    """Return the exception of a detail; an unknown reason of a newer version becomes INTERNAL and keeps its name."""
    try:
        reason = Reason[detail.reason]
        message = detail.message
    except KeyError:
        reason, message = Reason.INTERNAL, f"{detail.reason}: {detail.message}"
    return reason.error(message, field=detail.field, next_step=detail.next_step, metadata=detail.metadata)


def typed(error: BaseException) -> RlctlError:
    """Return an RlctlError unchanged; any other error is a defect and becomes INTERNAL with the error's text."""
    return error if isinstance(error, RlctlError) else Reason.INTERNAL.error(f"{type(error).__name__}: {error}")


def without_frames(error: E) -> E:
    """Return the error without the tracebacks of the error and its causes; for errors that are stored or answered.

    A traceback holds the frames that the error passed, and the frames' variables, such as a request's body. If a
    variable refers to the error in turn, only the garbage collector frees the frames.
    """
    pending: list[BaseException | None] = [error]
    visited: set[int] = set()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in visited:
            visited.add(id(each))
            each.__traceback__ = None
            pending += [each.__cause__, each.__context__]
    return error


def not_written(missing: Sequence[str]) -> RlctlError:
    """Return the error for an update that lacks these tensors."""
    names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return Reason.WEIGHTS_INCOMPLETE.error(
        f"{len(missing)} tensors were not written: {names}", metadata={"missing": "\n".join(missing)}
    )


class OperationFailed(RlctlError):
    """An accepted operation that did not end OK.

    Attributes:
        operation: the ended ``Operation``, with an outcome per target and a result per rank.
        outcome: OUTCOME_UNKNOWN if the operation ended UNKNOWN.
    """

    def __init__(self, operation: results_pb2.Operation) -> None:
        cause = from_detail(operation.error) if operation.error.reason else Reason.INTERNAL.error("no cause was given")
        next_step = cause.next_step
        if cause.reason is Reason.LINK_LOST and (
            operation.verb == "WeightUpdate" or operation.update_id not in ("", operation.operation_id)
        ):
            next_step = "Send the update again."  # a trainer's update is many calls; no single call is repeated
        super().__init__(cause.reason, cause.message, field=cause.field, next_step=next_step, metadata=cause.metadata)
        self.status = cause.status
        self.http_status = cause.http_status
        self.operation = operation
        if operation.state == results_pb2.OPERATION_STATE_UNKNOWN:
            self.outcome = common_pb2.OUTCOME_UNKNOWN

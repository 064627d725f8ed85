"""The table of admin verbs: the only definition of each verb.

Servicers (coordinator, stage, worker), the command line's verbs, capabilities and the reference pages are built from
these rows. A new verb is a request message and RPC in ``protos/``, a row here, and an engine method named after the
verb. A verb with an answer also has a field in ``RankResult``. CONTRIBUTING.md has the steps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import Message

from rlctl.contract.scopes import Scope
from rlctl.v1 import common_pb2, verbs_pb2

STATE_PREFIX = "STAGE_STATE_"

ANY = frozenset({"JOINING", "STALE", "READY", "PAUSED", "ASLEEP", "UPDATING", "DIRTY"})
JOINED = ANY - {"JOINING"}
RESIDENT = frozenset({"STALE", "READY", "PAUSED", "UPDATING", "DIRTY"})
SETTLED = frozenset({"STALE", "READY", "PAUSED", "DIRTY"})


@dataclass(frozen=True)
class Verb:
    """An admin verb.

    Attributes:
        name: RPC name in all three admin services, "PauseGeneration"; the request is ``{name}Request``.
        states: stage states (without prefix) in which the verb is legal; other states answer REJECTED, ILLEGAL_STATE.
        deadline_s: default time for the whole operation, seconds.
        mutating: journaled, fenced, and one at a time per stage. Other verbs are reads, and never queue behind writes.
        reads_if: returns True for a request that only reads, for mutating verbs with such requests.
        ordered: carried out by all ranks at one step of the engine.
        writes_weights: different outcomes of ranks leave the stage DIRTY, and so does an UNKNOWN outcome.
        waits: serialised against other mutating verbs; false for verbs that must run beside another verb.
        interrupts: breaks blocking work of the same update in the engine before the verb waits its turn.
        files: changes only files beside the engine; different outcomes of ranks leave no mixture.
        in_update: the coordinator sends the verb only as part of an open update.
        relieves: ends work, or lets the fleet go on, and therefore begins beyond the quota of its caller.
        fleet: the coordinator offers the verb; false for the steps of the update protocol.
        scopes: scopes of which a caller of the coordinator needs one. At stages and workers only the fleet may call.
        cli: words of the verb's command, "memory release"; "" without a command.
        data: field of RankResult with the verb's answer; "" without an answer.
    """

    name: str
    states: frozenset[str] = JOINED
    deadline_s: float = 30.0
    mutating: bool = True
    reads_if: Callable[[Any], bool] | None = None
    ordered: bool = True
    writes_weights: bool = False
    waits: bool = True
    interrupts: bool = False
    files: bool = False
    in_update: bool = False
    relieves: bool = False
    fleet: bool = True
    scopes: tuple[Scope, ...] = (Scope.FLEET,)
    cli: str = ""
    data: str = ""

    @functools.cached_property
    def method(self) -> str:
        """Return the name of the engine's method: ``pause_generation``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    @functools.cached_property
    def request(self) -> type[Message]:
        cls: type[Message] = getattr(verbs_pb2, f"{self.name}Request")
        return cls

    def mutates(self, request: Message) -> bool:
        """Return True if this request changes anything."""
        return self.mutating and not (self.reads_if is not None and self.reads_if(request))

    def after_defect(self, request: Message) -> common_pb2.Outcome.ValueType:
        """Return the outcome of a request after an unforeseen failure of code, with unknown effect."""
        return common_pb2.OUTCOME_UNKNOWN if self.mutates(request) else common_pb2.OUTCOME_REJECTED

    @functools.cached_property
    def _allowed(self) -> frozenset[common_pb2.StageState.ValueType]:
        return frozenset(common_pb2.StageState.Value(STATE_PREFIX + state) for state in self.states)

    def allows(self, state: common_pb2.StageState.ValueType) -> bool:
        return state in self._allowed


_VIEW = (Scope.VIEWER,)
_ABORT = (Scope.ROLLOUT, Scope.WEIGHTS)
_WEIGHTS = (Scope.WEIGHTS,)
_UPDATE = (Scope.WEIGHTS, Scope.ADAPTERS)


def _read(name: str, *, cli: str, data: str, states: frozenset[str] = ANY) -> Verb:
    return Verb(name, states, mutating=False, ordered=False, waits=False, scopes=_VIEW, cli=cli, data=data)


_ROWS = (
    _read("GetModelInfo", cli="model info", data="model_info"),
    _read("GetServerInfo", cli="server info", data="server_info"),
    _read("GetLoads", cli="loads", data="loads"),
    Verb("PauseGeneration", RESIDENT | {"ASLEEP"}, 60, relieves=True, scopes=_UPDATE, cli="pause"),
    Verb("ContinueGeneration", frozenset({"READY", "PAUSED"}), 60, relieves=True, scopes=_UPDATE, cli="continue"),
    Verb(
        "AbortRequests",
        JOINED,
        30,
        ordered=False,
        waits=False,
        relieves=True,
        scopes=_ABORT,
        cli="abort",
        data="abort",
    ),
    Verb("FlushCache", SETTLED | {"UPDATING", "ASLEEP"}, 60, scopes=_WEIGHTS, cli="cache flush", data="flush"),
    Verb("ReleaseMemory", SETTLED | {"ASLEEP"}, 60, scopes=_WEIGHTS, cli="memory release", data="memory"),
    Verb("ResumeMemory", JOINED - {"UPDATING"}, 60, relieves=True, scopes=_WEIGHTS, cli="memory resume", data="memory"),
    Verb(
        "UpdateWeightsFromDisk",
        frozenset({"UPDATING"}),
        120,
        writes_weights=True,
        in_update=True,
        scopes=_WEIGHTS,
        cli="weights update",
        data="weights",
    ),
    Verb(
        "UpdateWeightsFromTensor",
        frozenset({"UPDATING"}),
        300,
        writes_weights=True,
        in_update=True,
        scopes=_UPDATE,
        data="weights",
    ),
    Verb(
        "InitWeightsUpdateGroup",
        JOINED,
        300,
        ordered=False,
        waits=False,
        scopes=_UPDATE,
        cli="group init",
        data="group",
    ),
    Verb(
        "UpdateWeightsFromDistributed",
        frozenset({"UPDATING"}),
        300,
        writes_weights=True,
        in_update=True,
        scopes=_UPDATE,
        data="weights",
    ),
    Verb("DestroyWeightsUpdateGroup", JOINED, 30, ordered=False, waits=False, scopes=_UPDATE, cli="group destroy"),
    Verb(
        "PullWeights",
        JOINED,
        600,
        ordered=False,
        waits=False,
        files=True,
        scopes=_WEIGHTS,
        cli="weights pull",
        data="pull",
    ),
    Verb(
        "InspectCheckpoint",
        JOINED,
        60,
        mutating=False,
        ordered=False,
        waits=False,
        scopes=_WEIGHTS,
        cli="weights inspect",
        data="checkpoint",
    ),
    Verb(
        "CheckWeights",
        RESIDENT,
        120,
        reads_if=lambda request: request.action != verbs_pb2.CHECK_ACTION_RESET_TENSORS,
        scopes=_WEIGHTS,
        cli="weights checksum",
        data="check",
    ),
    Verb(
        "LoadAdapter",
        frozenset({"UPDATING"}),
        120,
        in_update=True,
        scopes=_UPDATE,
        cli="adapters load",
        data="adapters",
    ),
    Verb(
        "UnloadAdapter",
        frozenset({"STALE", "READY", "PAUSED"}),
        60,
        scopes=_UPDATE,
        cli="adapters unload",
        data="adapters",
    ),
    _read("ListAdapters", cli="adapters list", data="adapters", states=JOINED),
    Verb(
        "PrepareUpdate",
        frozenset({"STALE", "READY", "PAUSED", "ASLEEP", "DIRTY", "UPDATING"}),
        120,
        in_update=True,
        fleet=False,
        data="weights",
    ),
    Verb("SealUpdate", frozenset({"UPDATING"}), 120, in_update=True, fleet=False, data="weights"),
    Verb(
        "CommitUpdate",
        frozenset({"UPDATING"}),
        120,
        writes_weights=True,
        in_update=True,
        fleet=False,
        data="weights",
    ),
    Verb("SendWeights", frozenset({"READY", "PAUSED"}), 300, fleet=False, data="weights"),
    Verb("AbortUpdate", JOINED, 60, interrupts=True, in_update=True, fleet=False),
)

VERBS: dict[str, Verb] = {verb.name: verb for verb in _ROWS}

Service = Literal["CoordinatorService", "StageService", "WorkerService"]


def offered_by(service: Service) -> list[Verb]:
    """Return the verbs of one admin service, in the table's order."""
    return [verb for verb in VERBS.values() if verb.fleet or service != "CoordinatorService"]


def of_request(request: Message) -> Verb:
    """Return the verb of a request message. Raises KeyError for a message of no verb."""
    return VERBS[request.DESCRIPTOR.name.removesuffix("Request")]


def spoils(request: Message) -> bool:
    """Return True if the request removes weights or memory that generation needs, without an open update."""
    reset = (
        isinstance(request, verbs_pb2.CheckWeightsRequest) and request.action == verbs_pb2.CHECK_ACTION_RESET_TENSORS
    )
    return reset or isinstance(request, verbs_pb2.ReleaseMemoryRequest)

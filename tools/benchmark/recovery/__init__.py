"""The benchmark of a coordinator's restart: the time from the start after a kill until all stages are attached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.contract.errors import RlctlError
from rlctl.sdk.blocking import Fleet
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import FlushCacheRequest
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.null_fleet import START_S, NullFleet, until_routable
from tools.benchmark.rounds import Spread, interleaved, median

STAGES = 1024

_ASK_S = 5.0
_AGAIN_S = 0.01


@dataclass(frozen=True)
class Restart:
    """A restart; seconds since the start of the process.

    Attributes:
        listening: the coordinator has read its journal and bound its address.
        first_op: a verb has been recorded, carried out by a stage, and answered.
        reconciled: every stage is attached to the new coordinator, has a lease and is routable.
    """

    listening: float
    first_op: float
    reconciled: float


def _stages(setting: Setting) -> int:
    return 32 if setting.quick else STAGES


def samples(setting: Setting) -> Sequence[Restart]:
    """Measure restarts, each after a SIGKILL with every stage attached."""
    with NullFleet(setting.directory / "recovery", stages=_stages(setting), ranks=1) as null:
        setting.say(f"{_stages(setting)} stages are attached")
        return interleaved(setting.rounds, {"restart": lambda: _restart(null)})["restart"]


def _restart(null: NullFleet) -> Restart:
    null.kill_coordinator()
    started = time.perf_counter()
    null.start_coordinator()
    null.coordinator.announced(START_S)
    listening = time.perf_counter() - started
    with null.connect() as fleet:
        _first_operation(fleet, started + START_S)
        first_op = time.perf_counter() - started
        until_routable(fleet, null.stages)
        return Restart(listening, first_op, time.perf_counter() - started)


def _first_operation(fleet: Fleet, until: float) -> None:
    """Repeat a verb to one stage until the stage has carried it out."""
    while time.perf_counter() < until:
        request = FlushCacheRequest(header=RequestHeader(target=Target(slots=["actor-0"])))  # a new operation each time
        try:
            if fleet.call(request, timeout_s=_ASK_S, check=False).state == OPERATION_STATE_OK:
                return
        except RlctlError:
            pass  # the coordinator has no link to the stage yet
        time.sleep(_AGAIN_S)
    raise AssertionError(f"no operation succeeded in {START_S:g} s")


def _first_op(setting: Setting) -> Reading:
    restarts = setting.once(samples)
    listening = median([restart.listening for restart in restarts])
    return Reading.of(
        Spread.of([restart.first_op for restart in restarts]), stages=_stages(setting), listening_s=listening
    )


def _reconciled(setting: Setting) -> Reading:
    return Reading.of(Spread.of([restart.reconciled for restart in setting.once(samples)]), stages=_stages(setting))


FIGURES: list[Figure] = [
    Figure(
        "first_op",
        "1,024 attached stages, coordinator killed: from starting it again until a verb was carried out and recorded",
        "s",
        _first_op,
        at_most=1,
    ),
    Figure(
        "all_reconciled",
        "the same, until every stage is attached, granted a lease and routable",
        "s",
        _reconciled,
        at_most=5,
    ),
]

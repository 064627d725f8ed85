"""Checks of a fleet: as its coordinator sees it, and as this host reaches it."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.cli.doctor.findings import Finding, failure, ok, warning
from rlctl.cli.render import stages as roster
from rlctl.cli.render import values
from rlctl.contract.errors import RlctlError
from rlctl.runtime.addresses import is_loopback, split
from rlctl.v1.common_pb2 import (
    STAGE_STATE_FAILED,
    STAGE_STATE_JOINING,
    STAGE_STATE_UNREACHABLE,
    StageState,
)
from rlctl.v1.fleet_pb2 import Fleet, Stage
from rlctl.v1.verbs_pb2 import GetServerInfoRequest, ServerInfo
from rlctl.version import CONTRACT_VERSION, __version__

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet as Connection

ANSWER_S = 10.0
REACH_S = 2.0
REACHERS = 32

CLOCK_S = 1.0
"""A larger difference of clocks misleads a reader of several logs. The time of the call is not counted."""

FAR_CLOCK_S = 60.0
"""Request ids tell when they were made: from a clock so far off they are taken for old ones, or outlive others."""

DAY_S = 86400.0
RENEW_DAYS = 14


@dataclass(frozen=True)
class Answer:
    """What a stage answers through the coordinator.

    Attributes:
        info: its server.
        clock_s: how far its clock is ahead of this host's, beyond what the look took; negative: behind.
        error: why there is no info; "": there is.
    """

    info: ServerInfo = field(default_factory=ServerInfo)
    clock_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class FleetReadings:
    """What the checks look at.

    Attributes:
        endpoint: of the coordinator.
        fleet: as the coordinator sees it.
        took_s: how long that answer took.
        clock_s: how far the coordinator's clock is ahead of this host's, beyond that; negative: behind.
        answers: of stages, by slot; a stage that was not called has none.
        reached: by address why this host does not reach it; "": it does.
        admitted: slots of the fleet's topology; None: it has none, or this caller may not see it.
        valid_s: time until this caller's certificate expires, seconds; None: the connection is plain text.
    """

    endpoint: str
    fleet: Fleet
    took_s: float = 0.0
    clock_s: float = 0.0
    answers: Mapping[str, Answer] = field(default_factory=dict)
    reached: Mapping[str, str] = field(default_factory=dict)
    admitted: Sequence[str] | None = None
    valid_s: float | None = None


def read_fleet(connection: Connection, endpoint: str, valid_s: float | None = None) -> FleetReadings:
    """Look at a fleet; ``valid_s``: of this caller's certificate. Raises what the coordinator answers with."""
    began, before = time.monotonic(), time.time()
    fleet = connection.status()
    took_s, after = time.monotonic() - began, time.time()
    answers: dict[str, Answer] = {}
    if fleet.stages:
        asked = time.time()
        operation = connection.call(GetServerInfoRequest(), timeout_s=ANSWER_S, check=False)
        for result in operation.stage_results:
            info = next((rank.server_info for rank in result.rank_results if rank.HasField("server_info")), None)
            if info is None:
                answers[result.slot] = Answer(error=values.error(result.error) or "no answer")
            else:
                answers[result.slot] = Answer(info, ahead_s(result.header.observed_at, asked, time.time()))
    addresses = [address for stage in fleet.stages for _, address in _addresses(stage)]
    with ThreadPoolExecutor(REACHERS) as pool:
        reached = dict(zip(addresses, pool.map(_unreached, addresses), strict=True))
    admitted = None
    try:
        slots = connection.admit((), (), validate_only=True)
        admitted = None if slots.every else list(slots.slots)
    except RlctlError:
        pass
    clock_s = ahead_s(fleet.header.observed_at, before, after)
    return FleetReadings(endpoint, fleet, took_s, clock_s, answers, reached, admitted, valid_s)


def ahead_s(observed: Timestamp, before: float, after: float) -> float:
    """How far the clock of an observation is ahead of this host's, which read ``before`` and ``after``."""
    at = observed.ToNanoseconds() / 1e9
    if not at:
        return 0.0
    return at - after if at > after else min(0.0, at - before)


def unreachable(endpoint: str, error: RlctlError) -> Finding:
    """The coordinator does not answer, or refuses this caller."""
    return failure("coordinator", endpoint, error.message, error.next_step or "See its log.")


def check_coordinator(fleet: FleetReadings) -> Iterator[Finding]:
    """It answers."""
    seen = f"answers in {values.elapsed(fleet.took_s)}, epoch {fleet.fleet.header.fleet_epoch}"
    yield ok("coordinator", fleet.endpoint, seen)


def check_certificate(fleet: FleetReadings) -> Iterator[Finding]:
    """This caller's certificate. An expired one ends in no connection, and is reported as that."""
    if fleet.valid_s is None:
        yield ok("certificate", "transport", "plain text")
        return
    seen = f"expires in {fleet.valid_s / DAY_S:.0f} days"
    if fleet.valid_s < RENEW_DAYS * DAY_S:
        mend = "Renew it: `rlctl certs issue`. Those of the servers are of the same age if they were issued together."
        yield warning("certificate", "certificate", seen, mend)
    else:
        yield ok("certificate", "certificate", seen)


def check_clocks(fleet: FleetReadings) -> Iterator[Finding]:
    """Wall clocks of coordinator and stages against this host's."""
    clocks = {"coordinator": fleet.clock_s}
    clocks |= {slot: answer.clock_s for slot, answer in fleet.answers.items() if not answer.error}
    close = 0
    for name, ahead in clocks.items():
        if abs(ahead) <= CLOCK_S:
            close += 1
            continue
        seen = f"{values.elapsed(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this host's"
        verdict = failure if abs(ahead) > FAR_CLOCK_S else warning
        mend = "Run an NTP client on both hosts, and see `timedatectl`."
        yield verdict("clocks", f"clock of {name}", seen, mend)
    if close:
        yield ok("clocks", "clocks", f"{close} of {len(clocks)} within {CLOCK_S:g} s of this host's")


def check_versions(fleet: FleetReadings) -> Iterator[Finding]:
    """rlctl and contract of coordinator and stages against this host's."""
    same = 0
    mend = "Install one release everywhere; contracts N and N-1 work together (RELEASES.md)."
    ours = f"here rlctl {__version__}, contract {CONTRACT_VERSION}"
    for name, (version, contract) in _versions(fleet).items():
        seen = f"rlctl {version or 'not known'}, contract {contract}; {ours}"
        if abs(contract - CONTRACT_VERSION) > 1:
            yield failure("versions", name, seen, mend)
        elif contract != CONTRACT_VERSION or version not in ("", __version__):
            yield warning("versions", name, seen, mend)
        else:
            same += 1
    if same:
        yield ok("versions", "fleet", f"{same} of {len(_versions(fleet))} as here: {ours.removeprefix('here ')}")


def check_engines(fleet: FleetReadings) -> Iterator[Finding]:
    """Engines of one kind are of one version."""
    engines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for slot, answer in fleet.answers.items():
        if not answer.error:
            engines[answer.info.engine][answer.info.engine_version].append(slot)
    for engine, versions in sorted(engines.items()):
        shown = ", ".join(f"{version or 'no version'} at {_some(slots)}" for version, slots in sorted(versions.items()))
        if len(versions) > 1:
            yield warning("engines", f"engine {engine}", shown, "Start them from one environment.")
        else:
            yield ok("engines", f"engine {engine}", shown)


def check_links(fleet: FleetReadings) -> Iterator[Finding]:
    """Coordinator to stages: linked, and answering. Stages to coordinator: registered."""
    sound = 0
    for stage in fleet.fleet.stages:
        slot, registration = stage.registration.slot, stage.registration
        subject, why = f"stage {slot}", roster.why_not(stage)
        state = values.name_of(StageState.DESCRIPTOR, stage.state)
        answer = fleet.answers.get(slot, Answer())
        if stage.state == STAGE_STATE_FAILED:
            mend = f"`rlctl describe stage {slot}` has the last lines of its log; then `rlctl restart {slot}`."
            yield failure("links", subject, f"{state}: {why}", mend)
        elif stage.state in (STAGE_STATE_UNREACHABLE, STAGE_STATE_JOINING):
            mend = (
                f"On its host, see that its process lives. On the coordinator's host, reach {registration.address} "
                f"(firewall, --advertise). If it obeys another coordinator: `rlctl take-over {slot}`."
            )
            yield failure("links", subject, f"{state}: {why}" if why else state, mend)
        elif answer.error:
            mend = f"`rlctl logs {slot}`; a rank that hangs ends with `rlctl restart {slot}`."
            yield failure("links", subject, f"{state}, and does not answer: {answer.error}", mend)
        elif not stage.routable:
            mend = f"`rlctl describe stage {slot}` has the reason; `rlctl heal`, `enable` or `continue` ends it."
            yield warning("links", subject, f"not routable: {state}{f', {why}' if why else ''}", mend)
        else:
            sound += 1
    if sound:
        yield ok("links", "stages", f"{sound} of {len(fleet.fleet.stages)} linked, answering and routable")
    registered = {stage.registration.slot for stage in fleet.fleet.stages}
    for slot in sorted(set(fleet.admitted or ()) - registered):
        yield warning(
            "links",
            f"slot {slot}",
            "its stage has not registered with the coordinator",
            f"Is it started, and loaded? From its host, `rlctl status --endpoint {fleet.endpoint}` must answer.",
        )
    if not fleet.fleet.stages and not fleet.admitted:
        yield warning("links", "stages", "none is registered", "Start engines: `rlctl up`, or `rlctl stage`.")


def check_addresses(fleet: FleetReadings) -> Iterator[Finding]:
    """This host to the addresses that stages advertise: trainers and clients here connect to them."""
    reached = 0
    remote = not fleet.endpoint.startswith("unix:") and not is_loopback(split(fleet.endpoint)[0])
    for stage in fleet.fleet.stages:
        for name, address in _addresses(stage) if stage.state != STAGE_STATE_FAILED else ():
            why = fleet.reached.get(address, "")
            if not why:
                reached += 1
            elif remote and is_loopback(split(address)[0]):
                seen = f"{address}: {why}; only its own host reaches this address"
                mend = "Start it with --advertise HOST (topology: network.advertise)."
                yield warning("addresses", f"{stage.registration.slot} {name}", seen, mend)
            else:
                mend = "From this host, see route and firewall to it; in another network, set --advertise HOST."
                yield warning("addresses", f"{stage.registration.slot} {name}", f"{address}: {why}", mend)
    if reached:
        yield ok("addresses", "addresses", f"{reached} of {_count(fleet)} advertised ones are reached from here")


FLEET_CHECKS: Sequence[Callable[[FleetReadings], Iterator[Finding]]] = (
    check_coordinator,
    check_certificate,
    check_clocks,
    check_versions,
    check_engines,
    check_links,
    check_addresses,
)


def _versions(fleet: FleetReadings) -> dict[str, tuple[str, int]]:
    """(rlctl, contract) of the coordinator and each stage."""
    versions: dict[str, tuple[str, int]] = {}
    if fleet.fleet.contract_version:
        versions["coordinator"] = fleet.fleet.rlctl_version, fleet.fleet.contract_version
    for stage in fleet.fleet.stages:
        slot = stage.registration.slot
        version = fleet.answers.get(slot, Answer()).info.rlctl_version
        versions[f"stage {slot}"] = version, stage.registration.contract_version
    return versions


def _addresses(stage: Stage) -> list[tuple[str, str]]:
    registration = stage.registration
    named = (
        ("admin", registration.address),
        ("rollout", registration.rollout_address),
        ("data", registration.data_address),
    )
    return [(name, address) for name, address in named if address]


def _count(fleet: FleetReadings) -> int:
    return sum(len(_addresses(stage)) for stage in fleet.fleet.stages if stage.state != STAGE_STATE_FAILED)


def _unreached(address: str) -> str:
    """Why a connection to an address fails, or ""."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(REACH_S)
                probe.connect(address.removeprefix("unix:"))
        else:
            socket.create_connection(split(address), timeout=REACH_S).close()
    except TimeoutError:
        return f"no answer within {REACH_S:g} s"
    except (OSError, RlctlError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _some(slots: Sequence[str]) -> str:
    return ", ".join(slots[:4]) + f" and {len(slots) - 4} more" * (len(slots) > 4)

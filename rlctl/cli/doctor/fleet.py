"""Checks of a fleet: as seen by the coordinator, and as reached from this host."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.cli.app.connection import NO_ANSWER
from rlctl.cli.doctor.findings import Finding, failure, ok, warning
from rlctl.cli.render import stages as roster
from rlctl.cli.render import values
from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.addresses import is_loopback, split
from rlctl.transport.tls.files import not_valid_now, renewal
from rlctl.transport.tls.identity import Identity, Role
from rlctl.v1.common_pb2 import (
    STAGE_STATE_FAILED,
    STAGE_STATE_JOINING,
    STAGE_STATE_UNREACHABLE,
    STAGE_STATE_UPDATING,
    StageState,
)
from rlctl.v1.fleet_pb2 import Fleet, Stage
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import GetServerInfoRequest, ServerInfo
from rlctl.version import CONTRACT_VERSION, __version__

if TYPE_CHECKING:
    from cryptography import x509

    from rlctl.sdk.blocking import Fleet as Connection
    from rlctl.transport.tls.credentials import Tls

ANSWER_S = 10.0
REACH_S = 2.0
REACHERS = 32

CLOCK_S = 1.0
"""A larger difference of clocks misleads a reader of several logs. The time of the call is not counted."""

FAR_CLOCK_S = 60.0
"""Request ids contain the time of their creation: a larger difference makes an id seem expired, or live too long."""

DAY_S = 86400.0
RENEW_DAYS = 14


@dataclass(frozen=True)
class Answer:
    """The answer of a stage through the coordinator.

    Attributes:
        clock_s: lead of the stage's clock over this host's, without the time of the call; negative: behind.
        error: reason for a missing info; "" with an info.
    """

    info: ServerInfo = field(default_factory=ServerInfo)
    clock_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Certificate:
    """A certificate of a process.

    Attributes:
        identity: in the certificate.
        valid_s: time until the certificate expires, seconds; negative: it has expired.
        invalid: reason why it is not valid by this host's clock, or "".
    """

    identity: Identity
    valid_s: float
    invalid: str = ""


@dataclass(frozen=True)
class FleetReadings:
    """The readings for the checks of a fleet.

    Attributes:
        took_s: time until the coordinator's answer.
        clock_s: lead of the coordinator's clock over this host's, without that time; negative: behind.
        answers: answers of stages, by slot; a stage that was not called has no entry.
        reached: reason why this host does not reach an address, by address; "": reached.
        admitted: slots of the fleet's topology; None: no topology, or hidden from this caller.
        certificates: of this caller, the coordinator and the stages that present one; None: the connection is plain
            text.
    """

    endpoint: str
    fleet: Fleet
    took_s: float = 0.0
    clock_s: float = 0.0
    answers: Mapping[str, Answer] = field(default_factory=dict)
    reached: Mapping[str, str] = field(default_factory=dict)
    admitted: Sequence[str] | None = None
    certificates: Sequence[Certificate] | None = None


def read_fleet(connection: Connection, endpoint: str, tls: Tls | None = None) -> FleetReadings:
    """Take the readings of a fleet; ``tls``: of this caller. Raises the coordinator's error."""
    from rlctl.transport.tls.diagnosis import presented

    began, before = time.monotonic(), time.time()
    fleet = connection.status()
    took_s, after = time.monotonic() - began, time.time()
    answers: dict[str, Answer] = {}
    if fleet.stages:
        sent_at = time.time()
        for result in _infos(connection):
            info = next((rank.server_info for rank in result.rank_results if rank.HasField("server_info")), None)
            if info is None:
                answers[result.slot] = Answer(error=values.error(result.error) or "no answer")
            else:
                answers[result.slot] = Answer(info, ahead_s(result.header.observed_at, sent_at, time.time()))
    addresses = [address for stage in fleet.stages for _, address in _addresses(stage)]
    with ThreadPoolExecutor(REACHERS) as pool:
        connection_errors = dict(zip(addresses, pool.map(_unreached, addresses), strict=True))
        admins = [endpoint, *(stage.registration.address for stage in fleet.stages)]
        certificates = None if tls is None else list(_certificates(tls, pool.map(presented, admins)))
    admitted = None
    try:
        slots = connection.admit((), (), validate_only=True)
        admitted = None if slots.every else list(slots.slots)
    except RlctlError:
        pass
    clock_s = ahead_s(fleet.header.observed_at, before, after)
    return FleetReadings(endpoint, fleet, took_s, clock_s, answers, connection_errors, admitted, certificates)


def _certificates(tls: Tls, servers: Iterable[tuple[Identity, x509.Certificate] | None]) -> Iterator[Certificate]:
    for identity, certificate in filter(None, [(tls.identity, tls.material.certificate), *servers]):
        valid_s = certificate.not_valid_after_utc.timestamp() - time.time()
        yield Certificate(identity, valid_s, not_valid_now(certificate))


def _infos(connection: Connection) -> Sequence[StageResult]:
    """Return the answers of the stages. None, if the coordinator reaches no stage: the check of links reports it."""
    try:
        return connection.call(GetServerInfoRequest(), timeout_s=ANSWER_S, check=False).stage_results
    except RlctlError as error:
        if error.reason is not Reason.NO_TARGETS:
            raise
        return ()


def ahead_s(observed: Timestamp, before: float, after: float) -> float:
    """Return the lead of an observation's clock over this host's clock, read as ``before`` and ``after``."""
    observed_s = observed.ToNanoseconds() / 1e9
    if not observed_s:
        return 0.0
    return observed_s - after if observed_s > after else min(0.0, observed_s - before)


def unreachable(endpoint: str, error: RlctlError) -> Finding:
    """Return the finding for a coordinator that does not answer, or refuses this caller."""
    mend = NO_ANSWER if error.reason is Reason.DEADLINE_EXCEEDED else error.next_step or "See its log."
    return failure("coordinator", endpoint, error.message, mend)


def check_coordinator(fleet: FleetReadings) -> Iterator[Finding]:
    observation = f"answers in {values.elapsed(fleet.took_s)}, epoch {fleet.fleet.header.fleet_epoch}"
    yield ok("coordinator", fleet.endpoint, observation)


def check_certificate(fleet: FleetReadings) -> Iterator[Finding]:
    """Check the certificates of this caller, the coordinator and the stages.

    An expired certificate of this caller or the coordinator prevents the connection, and is reported there.
    """
    if fleet.certificates is None:
        yield ok("certificate", "transport", "plain text")
        return
    valid = []
    for certificate in fleet.certificates:
        identity, days = certificate.identity, certificate.valid_s / DAY_S
        if certificate.invalid:
            yield failure("certificate", str(identity), f"it {certificate.invalid}", renewal(identity))
        elif days < RENEW_DAYS:
            yield warning("certificate", str(identity), f"expires in {days:.0f} days", renewal(identity))
        else:
            valid.append(days)
    if valid:
        observation = f"{len(valid)} of {len(fleet.certificates)} valid for {min(valid):.0f} days at least"
        yield ok("certificate", "certificates", observation)


def check_clocks(fleet: FleetReadings) -> Iterator[Finding]:
    """Compare the wall clocks of coordinator and stages with this host's. Leases and time limits need no wall clock."""
    clocks = {"coordinator": fleet.clock_s}
    clocks |= {slot: answer.clock_s for slot, answer in fleet.answers.items() if not answer.error}
    close_count = 0
    for name, ahead in clocks.items():
        if abs(ahead) <= CLOCK_S:
            close_count += 1
            continue
        observation = f"{values.elapsed(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this host's"
        verdict = failure if abs(ahead) > FAR_CLOCK_S else warning
        mend = "See `timedatectl` on both hosts, and run an NTP client on the host that is wrong."
        yield verdict("clocks", f"clock of {name}", observation, mend)
    if close_count:
        yield ok("clocks", "clocks", f"{close_count} of {len(clocks)} within {CLOCK_S:g} s of this host's")


def check_versions(fleet: FleetReadings) -> Iterator[Finding]:
    """Compare rlctl and contract of coordinator and stages with this host's."""
    same_count = 0
    mend = "Install one release everywhere; contracts N and N-1 work together (RELEASES.md)."
    own_versions = f"here rlctl {__version__}, contract {CONTRACT_VERSION}"
    for name, (version, contract) in _versions(fleet).items():
        observation = f"rlctl {version or 'not known'}, contract {contract}; {own_versions}"
        if abs(contract - CONTRACT_VERSION) > 1:
            yield failure("versions", name, observation, mend)
        elif contract != CONTRACT_VERSION or version not in ("", __version__):
            yield warning("versions", name, observation, mend)
        else:
            same_count += 1
    if same_count:
        yield ok(
            "versions",
            "fleet",
            f"{same_count} of {len(_versions(fleet))} as here: {own_versions.removeprefix('here ')}",
        )


def check_engines(fleet: FleetReadings) -> Iterator[Finding]:
    """Check that engines of the same kind have the same version."""
    engines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for slot, answer in fleet.answers.items():
        if not answer.error:
            engines[answer.info.engine][answer.info.engine_version].append(slot)
    for engine, versions in sorted(engines.items()):
        observation = ", ".join(
            f"{version or 'no version'} at {_some(slots)}" for version, slots in sorted(versions.items())
        )
        if len(versions) > 1:
            yield warning("engines", f"engine {engine}", observation, "Start them from one environment.")
        else:
            yield ok("engines", f"engine {engine}", observation)


def check_links(fleet: FleetReadings) -> Iterator[Finding]:
    """Check that the coordinator reaches the stages and gets answers, and that the stages are registered."""
    sound_count = 0
    invalid = {each.identity.path: renewal(each.identity) for each in fleet.certificates or () if each.invalid}
    for stage in fleet.fleet.stages:
        slot = stage.registration.slot
        subject, why = f"stage {slot}", roster.why_not(stage)
        state = values.name_of(StageState.DESCRIPTOR, stage.state)
        answer = fleet.answers.get(slot, Answer())
        if stage.state == STAGE_STATE_FAILED:
            mend = f"`rlctl describe stage {slot}` has the last lines of its log; then `rlctl restart {slot}`."
            yield failure("links", subject, f"{state}: {why}", mend)
        elif stage.state in (STAGE_STATE_UNREACHABLE, STAGE_STATE_JOINING):
            mend = invalid.get(f"{Role.STAGE}/{slot}") or _mend_link(stage)
            yield failure("links", subject, f"{state}: {why}" if why else state, mend)
        elif answer.error:
            mend = f"`rlctl logs {slot}`; a rank that hangs ends with `rlctl restart {slot}`."
            yield failure("links", subject, f"{state}, and does not answer: {answer.error}", mend)
        elif not stage.routable:
            yield warning("links", subject, f"not routable: {state}{f', {why}' if why else ''}", _mend(stage))
        else:
            sound_count += 1
    if sound_count:
        yield ok("links", "stages", f"{sound_count} of {len(fleet.fleet.stages)} linked, answering and routable")
    registered = {stage.registration.slot for stage in fleet.fleet.stages}
    for slot in sorted(set(fleet.admitted or ()) - registered):
        yield warning(
            "links",
            f"slot {slot}",
            "its stage has not registered with the coordinator",
            f"Start it, and let it load. From its host, `rlctl status --endpoint {fleet.endpoint}` must answer.",
        )
    if not fleet.fleet.stages and not fleet.admitted:
        yield warning("links", "stages", "no stage is registered", "Start engines: `rlctl up`, or `rlctl stage`.")


def check_min_healthy(fleet: FleetReadings) -> Iterator[Finding]:
    """Check that no model has fewer routable stages than its min_healthy."""
    limited = [model for model in fleet.fleet.models if model.min_healthy_stages]
    below_count = 0
    for model in limited:
        routable = sum(stage.routable for stage in fleet.fleet.stages if stage.registration.model == model.name)
        if routable < model.min_healthy_stages:
            below_count += 1
            observation = f"min_healthy is {roster.health(model, routable)}"
            mend = "Mend its stages: drains and rolling updates are refused. `rlctl min-healthy` changes the limit."
            yield warning("min-healthy", f"model {model.name}", observation, mend)
    if not below_count:
        yield ok("min-healthy", "models", f"{len(limited)} of {len(fleet.fleet.models)} have a limit, none is below")


def _mend_link(stage: Stage) -> str:
    slot, address = stage.registration.slot, stage.registration.address
    if stage.HasField("engine_failure"):
        return (
            f"`rlctl logs {slot}` has the cause. A supervisor starts the engine again; `rlctl restart {slot}`: at once."
        )
    return (
        f"On its host, see that its process lives and is not stopped; `rlctl restart {slot}` replaces it. On the "
        f"coordinator's host, reach {address} (firewall, --advertise). If it obeys another coordinator: "
        f"`rlctl take-over {slot}`."
    )


def _mend(stage: Stage) -> str:
    """Return the next step for a linked stage that is not routable."""
    slot = stage.registration.slot
    if stage.state == STAGE_STATE_UPDATING:
        return "An update or heal is under way: `rlctl operations`. `rlctl weights abort` ends an update."
    if stage.unhealable:
        return f"The trainer's next full update reaches it; or `rlctl heal {slot} --checkpoint DIR`."
    return f"`rlctl describe stage {slot}` has the reason; `rlctl heal`, `enable` or `continue` ends it."


def check_addresses(fleet: FleetReadings) -> Iterator[Finding]:
    """Check that this host reaches the advertised addresses: trainers and clients here connect there."""
    reached_count = 0
    remote = not fleet.endpoint.startswith("unix:") and not is_loopback(split(fleet.endpoint)[0])
    for stage in fleet.fleet.stages:
        for name, address in _addresses(stage) if stage.state != STAGE_STATE_FAILED else ():
            why = fleet.reached.get(address, "")
            if not why:
                reached_count += 1
            elif remote and is_loopback(split(address)[0]):
                observation = f"{address}: {why}; only its own host reaches this address"
                mend = "Start it with --advertise HOST (topology: network.advertise)."
                yield warning("addresses", f"{stage.registration.slot} {name}", observation, mend)
            else:
                mend = "From this host, see route and firewall to it; in another network, set --advertise HOST."
                yield warning("addresses", f"{stage.registration.slot} {name}", f"{address}: {why}", mend)
    if reached_count:
        yield ok(
            "addresses", "addresses", f"{reached_count} of {_count(fleet)} advertised addresses are reached from here"
        )


FLEET_CHECKS: Sequence[Callable[[FleetReadings], Iterator[Finding]]] = (
    check_coordinator,
    check_certificate,
    check_clocks,
    check_versions,
    check_engines,
    check_links,
    check_min_healthy,
    check_addresses,
)


def _versions(fleet: FleetReadings) -> dict[str, tuple[str, int]]:
    """Return (rlctl, contract) of the coordinator and each stage."""
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
    addresses = (
        ("admin", registration.address),
        ("rollout", registration.rollout_address),
        ("data", registration.data_address),
    )
    return [(name, address) for name, address in addresses if address]


def _count(fleet: FleetReadings) -> int:
    return sum(len(_addresses(stage)) for stage in fleet.fleet.stages if stage.state != STAGE_STATE_FAILED)


def _unreached(address: str) -> str:
    """Return the reason why a connection to an address fails, or ""."""
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

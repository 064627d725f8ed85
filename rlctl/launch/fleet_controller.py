"""A fleet of processes: a coordinator and engines, kept as the deployment describes.

:meth:`LaunchedFleet.want` sets the engines of the fleet. :meth:`LaunchedFleet.look` takes one step towards this state.
New engines start beside serving engines. Changed engines are replaced in sequence within each model. Removed engines
are disabled, drained and stopped. The same steps start a fleet and restart ended processes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Self
from urllib.parse import urlsplit

from rlctl.contract import min_healthy
from rlctl.contract.errors import DeadlineExceeded, NotFound, Reason, RlctlError
from rlctl.launch.coordinator_calls import CoordinatorCalls
from rlctl.launch.engine_lifecycle import REPLACED, START_S, UP, EngineRun, Limits, Phase
from rlctl.launch.gateways import Gateways
from rlctl.launch.interface.launcher import Launched, Launcher
from rlctl.launch.interface.spec import EngineSpec, GatewaySpec, Reservation, any_port
from rlctl.launch.local.child_processes import stop_all, unended
from rlctl.launch.local.launcher import LocalLauncher
from rlctl.launch.metrics_targets import MetricsTargets
from rlctl.runtime import private_files
from rlctl.runtime.addresses import join, split
from rlctl.runtime.server_process import STOP_S
from rlctl.sdk.aio import AsyncFleet
from rlctl.sdk.blocking import Fleet, connect
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.v1.common_pb2 import STAGE_STATE_JOINING, STAGE_STATE_UNREACHABLE
from rlctl.v1.fleet_pb2 import EngineFailure, Stage

__all__ = ["EngineSpec", "LaunchedFleet", "interrupted"]

READY_S = 60.0
POLL_S = 0.05
ASK_S = 2.0
RENEW_S = 3600.0
"""Seconds between checks of the validity of certificates."""


def interrupted(processes: int) -> str:
    return f"interrupted; taking {processes} process{'es' if processes != 1 else ''} down"


class LaunchedFleet:
    """Starts and stops the processes of a fleet. As a context manager, the fleet is up inside the block.

    Child processes end with this process.
    """

    def __init__(
        self,
        engines: Sequence[EngineSpec],
        *,
        directory: Path | None = None,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        insecure: bool = False,
        on_progress: Callable[[str], None] = lambda _: None,
        module: str = "rlctl",
        limits: Limits | None = None,
        launcher: Launcher | None = None,
        reserved: Sequence[Reservation] = (),
        gateways: Sequence[GatewaySpec] = (),
        heal_by_hand: Sequence[str] = (),
        min_healthy: Mapping[str, str] = MappingProxyType({}),
        graces: Mapping[str, float] = MappingProxyType({}),
        new: bool = False,
        metrics: bool = False,
        web: str = "",
        authority: Authority | None = None,
    ) -> None:
        """``directory``: directory of the journal and the logs; None for a temporary directory.

        The fleet of an existing journal continues, unless ``new``: then the fleet starts over.

        ``on_progress`` gets lines of progress. ``module``: module of the processes in place of ``rlctl``, with at least
        the same functions. ``launcher``: launcher of the engines; None for this machine. Coordinator and ``gateways``
        always run on this machine. ``reserved``: room to keep free. ``heal_by_hand``: models whose engines stay STALE
        until a heal on request. ``min_healthy``: engines that voluntary disruptions leave routable, as "2" or "50%", by
        model. ``graces``: seconds by option of the coordinator. ``metrics``: the coordinator serves
        metrics; for other processes the specs decide. ``web``: address of the coordinator's web page; "": no page.
        ``authority``: issuer of the certificates of all processes, also for renewals; None for plain text.
        """
        self._authority = authority
        self._renew_at = 0.0
        self._new = new
        self._metrics = metrics
        self._web = web
        self._graces = dict(graces)
        self._by_hand = frozenset(heal_by_hand)
        self._told_by_hand = self._by_hand
        """Models to heal by hand, as the coordinator knows them."""
        self._min_healthy = dict(min_healthy)
        self._told_min_healthy: dict[str, str] = {}
        """Limits that the coordinator has journaled since the start of this fleet, "" for none, by model."""
        self._resumed = False
        """Whether the journal is that of an earlier supervisor, and may have other limits."""
        self._refused: dict[str, RlctlError] = {}
        """Drains that min_healthy refuses now, by slot."""
        self._forced: set[str] = set()
        """Slots that are drained in spite of min_healthy."""
        self._told_slots: set[str] = set()
        """Slots that the coordinator admits."""
        self.engines = _placed(engines)
        self.address = ""
        self.runs: dict[str, EngineRun] = {}
        self.coordinator: Launched | None = None
        self._temporary = tempfile.TemporaryDirectory(prefix="rlctl-") if directory is None else None
        self.directory = Path(self._temporary.name) if self._temporary else Path(str(directory))
        self._listen = listen
        self._token = token
        self._say = on_progress
        self.limits = limits or Limits(heal_s=READY_S)
        self._targets = MetricsTargets(self.directory, self._say)
        logs = self.directory / "logs"
        self._local = LocalLauncher(logs, token=token, insecure=insecure, module=module, authority=authority)
        self._launcher: Launcher = launcher or self._local
        self._reserved = tuple(reserved)
        self.gateways = Gateways(gateways, self._local, self.limits.backoff_s, on_progress)
        self._calls = CoordinatorCalls(self.connect, lambda: self.coordinator, on_progress)
        self._ask_at = 0.0
        self._replacing: set[str] = set()
        """Slots whose engines are due for a restart."""
        self._failures_reported: dict[str, tuple[RlctlError | None, Launched | None]] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._tell_of_interrupt(error)
        self.stop()

    @property
    def processes(self) -> list[Launched]:
        """All processes, the coordinator first."""
        coordinator = [self.coordinator] if self.coordinator is not None else []
        engines = [process for run in self.runs.values() for process in run.processes]
        return [*coordinator, *engines, *self.gateways.processes]

    def start(self) -> str:
        """Start all processes, wait until the fleet is :attr:`settled`, and return the coordinator's address.

        Raises ENGINE_FAILED or DEADLINE_EXCEEDED with process, cause and log. All processes are then stopped.
        """
        try:
            for _ in self.starting():
                time.sleep(POLL_S)
        except BaseException as error:
            self._tell_of_interrupt(error)
            self.stop()
            raise
        return self.address

    def starting(self) -> Iterator[None]:
        """Start all processes, one step per iteration, until the fleet is :attr:`settled`.

        Raises as :meth:`start`. The caller then stops the processes.
        """
        private_files.make_directory(self.directory)
        self._launcher.make_room(self.engines, self._reserved)
        resumed = self._resumed = self.journal.exists() and not self._new
        self._launch_coordinator(self._listen, new=self._new)
        yield
        self._await_coordinator()
        self._say(f"coordinator at {self.address}")
        yield
        if resumed:
            self._announce_resumed()
        yield from self.settling()
        if resumed:
            self._dismiss_absent()

    def stop(self) -> None:
        """End all processes: gateways first, then engines, while a coordinator can still deregister the engines."""
        late = self.gateways.stop()
        self._calls.close()
        engines = [process for run in self.runs.values() for process in run.processes]
        late += [*stop_all(engines), *stop_all([self.coordinator] if self.coordinator is not None else [])]
        for process in late:
            self._say(
                f"{process.name} (pid {process.pid}) did not end in {STOP_S:g} s and was killed; see {process.log}"
            )
        if error := unended(late):
            self._say(f"Warning: {error}")
        self.runs.clear()
        self.coordinator = None
        self._launcher.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def connect(self) -> Fleet:
        tls = None if self._authority is None else Tls(self._authority.ensured("client/supervisor"))
        return connect(self.address, token=self._token, tls=tls or False, client="launcher")

    def process(self, name: str) -> Launched:
        """Return a process by name: "coordinator", "actor-0" (rank 0), "actor-0.1" (rank 1)."""
        return next(process for process in self.processes if process.name == name)

    def restart(self, slot: str) -> None:
        """End the processes of an engine and start the same engine again. Returns when the stage server answers.

        Raises ENGINE_FAILED or DEADLINE_EXCEEDED with process, cause and log.
        """
        old = self.runs[slot]
        stop_all(old.processes)
        if error := unended(old.processes):
            raise error
        run = self.runs[slot] = self._run(old.spec)
        run.start()
        while run.phase not in (Phase.HEALING, Phase.READY):
            if run.error is not None:
                raise run.error
            time.sleep(POLL_S)
            run.advance(None)

    @property
    def journal(self) -> Path:
        return self.directory / "journal.db"

    def restart_coordinator(self) -> None:
        """Start an ended coordinator again, with the same address and journal.

        Raises ENGINE_FAILED or DEADLINE_EXCEEDED. A coordinator that does not come up is killed.
        """
        if self.coordinator is not None:
            self.coordinator.wait()
        self._launch_coordinator(self.address)
        try:
            self._await_coordinator()
        except DeadlineExceeded:
            assert self.coordinator is not None
            self.coordinator.kill()
            raise

    # The deployment, and the steps towards it.

    def want(
        self,
        engines: Sequence[EngineSpec],
        reserved: Sequence[Reservation] = (),
        gateways: Sequence[GatewaySpec] = (),
        heal_by_hand: Sequence[str] = (),
        limits: Limits | None = None,
        restarted: Collection[str] = (),
        *,
        force: bool = False,
        min_healthy: Mapping[str, str] | None = None,
    ) -> None:
        """Set the engines of the fleet; :meth:`look` takes the steps.

        An engine with an unchanged spec keeps running, and a failed engine is retried at once. ``limits`` also apply to
        running engines; None keeps the present limits. So does ``min_healthy``. ``restarted``: slots of engines to
        drain and start again, also unchanged; with ``force`` also below min_healthy. Raises STAGE_NOT_FOUND,
        MIN_HEALTHY if an engine could never be replaced, and the launcher's refusal, without any change.
        """
        specs = _placed(engines)
        _refuse_absent(restarted, [spec.slot for spec in specs])
        limits_of_models = self._min_healthy if min_healthy is None else dict(min_healthy)
        self._refuse_unable(specs, limits_of_models, () if force else restarted)
        self._launcher.make_room(specs, reserved)
        self._min_healthy = limits_of_models
        self.engines = specs
        self.limits = limits or self.limits
        self.gateways.specs, self.gateways.backoff_s = tuple(gateways), self.limits.backoff_s
        self._by_hand = frozenset(heal_by_hand)
        for running in self.runs.values():
            running.healed_by(hand=running.spec.model in self._by_hand)
            running.forgive()
            running.limits = self.limits
        for spec in self.engines:
            run = self.runs.get(spec.slot)
            if run is not None and run.phase is Phase.FAILED and run.spec.differs(spec):
                run.stop()  # nothing to drain
        self._refused.clear()  # to be reported again
        self._replacing |= set(restarted) & self.runs.keys()
        self._forced |= set(restarted) & self.runs.keys() if force else set()

    @property
    def settled(self) -> bool:
        """Whether all wanted engines are READY or STALE, no other engine runs, and gateways and policies are set."""
        specs = {spec.slot: spec for spec in self.engines}
        engines = self.runs.keys() == specs.keys() and all(
            run.phase in UP and not run.spec.differs(specs[slot]) for slot, run in self.runs.items()
        )
        reported = self._told_by_hand == self._by_hand and not self._untold_limits()
        return engines and not self._replacing and self.gateways.settled and reported

    @property
    def all_ended(self) -> bool:
        return all(process.returncode is not None for process in self.processes)

    def settle(self) -> None:
        """Take steps until the fleet is settled. Raises as :meth:`settling`."""
        for _ in self.settling():
            time.sleep(POLL_S)

    def settling(self) -> Iterator[None]:
        """Take one step per iteration until the fleet is settled. The deployment may change in between.

        Raises the error of the first failed engine. All other engines continue, and the caller decides on the next
        step.
        """
        while True:
            self.look(restart=True)
            if self.settled:
                return
            self._refuse_failed()
            yield

    def look(self, *, restart: bool = False) -> None:
        """Take one step for every engine. A failed engine raises nothing; the error is in :attr:`runs`.

        ``restart``: failed engines start again after the back-off.
        """
        specs = {spec.slot: spec for spec in self.engines}
        self._calls.begin_step()
        self._renew_certificates()
        self._tell_policies()
        stages = self._stages()
        for slot, run in list(self.runs.items()):
            spec = specs.get(slot)
            changes = spec is None or run.spec.differs(spec) or slot in self._replacing
            if changes and (spec is None or self._may_replace(run, specs)):
                self._leave(run, stages)
            self._enable(run, stages)
            is_idle = run.phase is Phase.DRAINING and slot in stages and self._calls.is_idle(slot)
            run.advance(stages.get(slot), idle=is_idle)
            if restart:
                run.again()
            if run.phase is Phase.GONE:
                del self.runs[slot]
                self._replacing.discard(slot)
                self._forced.discard(slot)
                self._refused.pop(slot, None)
                self._failures_reported.pop(slot, None)
                self._say(f"{slot}: stopped")
                if spec is None:
                    self._dismiss_absent()  # a failed engine did not deregister
        for spec in self.engines:
            if spec.slot not in self.runs and not self._gpus_held(spec):
                run = self.runs[spec.slot] = self._run(spec)
                run.start()
        self._report_failures(restart=restart)
        self._calls.report_silence(self.address)
        self.gateways.look(self.address, restart=restart)
        if self._metrics:
            self._targets.write(self.processes)

    def _report_failures(self, *, restart: bool) -> None:
        """Report to the coordinator why slots are empty: each failure once per coordinator process."""
        for slot, run in self.runs.items():
            failure = run.failure(restart=restart)
            error, coordinator = self._failures_reported.get(slot, (None, None))
            if failure is None or (error is run.error and coordinator is self.coordinator):
                continue

            async def tell(client: AsyncFleet, slot: str = slot, failure: EngineFailure = failure) -> None:
                with contextlib.suppress(NotFound):  # never registered
                    await client.report_engine_failure(slot, failure)

            if self._calls.call(tell):
                self._failures_reported[slot] = (run.error, self.coordinator)

    def _leave(self, run: EngineRun, stages: Mapping[str, Stage]) -> None:
        """Disable the slot before the drain. A serving engine is not drained while the coordinator is silent."""
        slot = run.spec.slot
        disabled = slot in stages and not stages[slot].enabled
        if run.phase is not Phase.READY or disabled or self._calls.call(lambda client: self._disable(client, slot)):
            run.drain()

    async def _disable(self, client: AsyncFleet, slot: str) -> None:
        """Disable a slot for a drain. A refusal is reported once, and repeated at the next step."""
        try:
            with contextlib.suppress(NotFound):  # not registered
                await client.set_enabled([slot], False, reason=REPLACED, force=slot in self._forced)
        except RlctlError as error:
            if error.reason is Reason.MIN_HEALTHY:
                if slot not in self._refused:
                    self._say(f"{slot}: waits for its drain: {error.message}")
                self._refused[slot] = error
            raise
        self._refused.pop(slot, None)

    def _refuse_unable(
        self, specs: Sequence[EngineSpec], limits: Mapping[str, str], restarted: Collection[str]
    ) -> None:
        """Raise MIN_HEALTHY for an engine that serves and could never be replaced or removed."""
        specs_by_slot = {spec.slot: spec for spec in specs}
        for slot, run in sorted(self.runs.items()):
            spec, text = specs_by_slot.get(slot), limits.get(run.spec.model, "")
            changes = spec is None or slot in restarted or run.spec.differs(spec)
            if run.phase is not Phase.READY or not changes or not text or not _is_needed(run.spec, specs, text):
                continue
            engine_count = sum(each.model == run.spec.model for each in specs) + (spec is None)
            raise Reason.MIN_HEALTHY.error(
                f"{run.spec.model} has {engine_count} engines and min_healthy {text}: {slot} can never be "
                f"{'replaced' if spec is not None else 'removed'}",
                field="min_healthy",
                next_step="Add an engine or lower min_healthy in the topology file; or `rlctl restart SLOT --force`.",
            )

    def _enable(self, run: EngineRun, stages: Mapping[str, Stage]) -> None:
        slot = run.spec.slot
        if run.phase not in (Phase.HEALING, Phase.STALE) or (stage := stages.get(slot)) is None:
            return
        replaced = not stage.enabled and stage.disabled_reason == REPLACED
        if replaced and stage.registration.address == run.leader.facts["address"]:
            self._calls.call(lambda client: client.set_enabled([slot], True))

    def _may_replace(self, run: EngineRun, specs: Mapping[str, EngineSpec]) -> bool:
        """Whether a changed engine may be replaced: in sequence within a model, so that the model stays served.

        A failed engine blocks no replacement.
        """
        if run.phase is not Phase.READY:
            return True
        return all(
            engine_run.phase in (*UP, Phase.FAILED)
            for slot, engine_run in self.runs.items()
            if engine_run.spec.model == run.spec.model and slot in specs
        ) and all(
            slot in self.runs or self._gpus_held(spec) for slot, spec in specs.items() if spec.model == run.spec.model
        )

    def _gpus_held(self, spec: EngineSpec) -> bool:
        """Whether an engine that runs has a GPU of this spec."""
        if spec.device != "cuda":
            return False
        return any(run.spec.device == "cuda" and set(run.spec.gpus) & set(spec.gpus) for run in self.runs.values())

    def _run(self, spec: EngineSpec) -> EngineRun:
        return EngineRun(
            spec, self._launcher, self.address, self.limits, self._say, by_hand=spec.model in self._by_hand
        )

    def _launch_coordinator(self, listen: str, *, new: bool = False) -> None:
        arguments = ["coordinator", "--listen", listen, "--journal", str(self.journal), *(["--new"] if new else [])]
        arguments += [part for option, grace_s in self._graces.items() for part in (option, f"{grace_s:g}s")]
        arguments += [part for model in sorted(self._by_hand) for part in ("--heal-by-hand", model)]
        slots = {spec.slot for spec in self.engines}
        arguments += ["--admit-only", ",".join(sorted(slots))]
        arguments += ["--metrics", any_port(listen)] if self._metrics else []
        arguments += ["--web", self._web] if self._web else []
        hosts = [split(each, "listen")[0] for each in (listen, self._web) if each and not each.startswith("unix:")]
        self.coordinator = self._local.start("coordinator", arguments, identity="coordinator", hosts=hosts)
        self._told_by_hand, self._told_slots = self._by_hand, slots
        self._calls.forgive()

    def _await_coordinator(self) -> None:
        assert self.coordinator is not None
        facts = self.coordinator.announced(START_S)
        self.address = facts["address"]
        if "web_address" in facts:
            self._say(f"the page of the fleet is at {facts['web_address']}")
            # The next coordinator takes the same port, as for its own address.
            self._web = join(split(self._web, "web")[0], urlsplit(facts["web_address"]).port or 0)

    def _renew_certificates(self) -> None:
        """Renew certificates in the last third of their validity. Processes read new certificates by themselves."""
        if self._authority is None or time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + RENEW_S
        try:
            self._authority.renew()
        except (RlctlError, OSError) as error:
            self._say(f"Warning: certificates were not renewed: {error}")

    def _tell_policies(self) -> None:
        """Send the admitted slots and the models to heal by hand, after a change."""
        call = self._calls.call
        slots = {spec.slot for spec in self.engines}
        if slots != self._told_slots:
            added, removed = sorted(slots - self._told_slots), sorted(self._told_slots - slots)
            if call(lambda client: client.admit(added, removed)):
                self._told_slots = slots
        for model in sorted(self._told_by_hand ^ self._by_hand):
            by_hand = model in self._by_hand
            if call(lambda client, model=model, by_hand=by_hand: client.set_healing(model, by_hand=by_hand)):  # type: ignore[misc]
                self._told_by_hand ^= {model}
        for model, text in self._untold_limits().items():
            if call(lambda client, model=model, text=text: client.set_min_healthy(model, text or "0")):  # type: ignore[misc]
                self._told_min_healthy[model] = text

    def _untold_limits(self) -> dict[str, str]:
        """Return the limits of models with a registered engine that the coordinator has yet to journal, by model."""
        models = {run.spec.model for run in self.runs.values() if run.phase in UP}
        limits = {model: self._min_healthy.get(model, "") for model in models}
        unknown = "?" if self._resumed else ""
        return {model: text for model, text in limits.items() if self._told_min_healthy.get(model, unknown) != text}

    def _announce_resumed(self) -> None:
        """Announce the published versions of the journal: engines that start with other weights serve nothing."""
        fleet = self._calls.status()
        if fleet is None or not (models := [model for model in fleet.models if model.latest.sequence]):
            return
        versions = ", ".join(f"{model.name} at {model.latest.label}#{model.latest.sequence}" for model in models)
        self._say(f"the fleet of {self.journal} goes on (epoch {fleet.header.fleet_epoch}): {versions}")

    def _dismiss_absent(self) -> None:
        """Deregister empty slots that are not in the topology: engines of an earlier topology.

        A stage that is only unreachable registers again.
        """
        fleet = self._calls.status()
        slots = {spec.slot for spec in self.engines}
        for stage in fleet.stages if fleet is not None else ():
            slot = stage.registration.slot
            absent = stage.state in (STAGE_STATE_JOINING, STAGE_STATE_UNREACHABLE) or stage.engine_failure.given_up
            if slot in slots or not absent:
                continue
            boot_id = stage.registration.boot_id  # the slot may have been filled since
            if self._calls.call(lambda client, slot=slot, boot_id=boot_id: client.deregister(slot, boot_id=boot_id)):  # type: ignore[misc]
                self._say(f"{slot}: empty and not in the topology: taken off the record")

    def _refuse_failed(self) -> None:
        if self.coordinator is not None and self.coordinator.returncode is not None:
            raise self.coordinator.failure()
        if self.coordinator is not None and not self.coordinator.serves and (error := unended([self.coordinator])):
            raise error
        self._calls.refuse_silent()
        for run in self.runs.values():
            if run.error is not None:
                raise run.error
        for slot, error in self._refused.items():
            if _is_needed(self.runs[slot].spec, self.engines, error.metadata["min_healthy"]):  # no wait helps
                self._replacing.discard(slot)
                raise error
        for error in self.gateways.errors.values():
            raise error
        if self.gateways.unended is not None:
            raise self.gateways.unended

    # Queries to the coordinator.

    def _stages(self) -> dict[str, Stage]:
        """Return the stages by slot. Asks the coordinator at intervals while no engine waits for its answer."""
        asking = (Phase.HEALING, Phase.DRAINING, *UP)
        waits = not self.settled and any(run.phase in asking for run in self.runs.values())
        if not waits and (self.coordinator is None or time.monotonic() < self._ask_at):
            return {}
        self._ask_at = time.monotonic() + ASK_S
        fleet = self._calls.status()
        return {stage.registration.slot: stage for stage in fleet.stages} if fleet is not None else {}

    def _tell_of_interrupt(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):
            self._say(interrupted(len(self.processes)))


def _refuse_absent(slots: Collection[str], engine_slots: Sequence[str]) -> None:
    for slot in slots:
        if slot not in engine_slots:
            raise Reason.STAGE_NOT_FOUND.error(
                f"there is no engine {slot!r}; there are: {', '.join(engine_slots) or 'none'}", field="slot"
            )


def _is_needed(engine: EngineSpec, engines: Collection[EngineSpec], limit: str) -> bool:
    """Whether too few engines are routable without this engine, also if all others of its model are routable.

    ``limit``: min_healthy of the model. A share counts this engine too, which is registered until it has ended.
    """
    slots = {spec.slot for spec in engines if spec.model == engine.model} | {engine.slot}
    return min_healthy.limit(min_healthy.parse(limit), len(slots)) >= len(slots)


def _placed(engines: Sequence[EngineSpec]) -> list[EngineSpec]:
    """Assign the next free GPUs to engines without GPUs."""
    specs = []
    following = max((max(spec.gpus, default=-1) for spec in engines if spec.device == "cuda"), default=-1) + 1
    for spec in engines:
        if spec.device == "cuda" and not spec.gpus:
            specs.append(replace(spec, gpus=tuple(range(following, following + spec.ranks))))
            following += spec.ranks
        else:
            specs.append(spec)
    return specs

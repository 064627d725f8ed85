"""The deployment plan of a topology file and flags on this machine, with changes and obstacles."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.cli.app.local_fleets import DEFAULT_ENDPOINT
from rlctl.cli.app.settings import MACHINE_FORMATS, Settings
from rlctl.cli.render import values
from rlctl.cli.render.printer import View
from rlctl.cli.render.tables import Table, facts
from rlctl.contract.errors import Reason
from rlctl.launch.deployment import Deployment
from rlctl.launch.engine_lifecycle import Limits
from rlctl.launch.interface.spec import EngineSpec
from rlctl.launch.local.gpus import gpu_count
from rlctl.launch.supervisor import fleet_state
from rlctl.runtime.restart_limit import RestartLimit
from rlctl.topology import support
from rlctl.topology.diff import REMOVE, Change, difference
from rlctl.topology.flags import Flags
from rlctl.topology.load import loaded
from rlctl.topology.plan import Plan
from rlctl.topology.plan import plan as make_plan
from rlctl.topology.problems import COMMAND_LINE, Problem, Problems, invalid
from rlctl.topology.resolved import Topology
from rlctl.topology.schema import ROUTERS


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The deployment plan of a file and flags on this machine.

    Attributes:
        problems: warnings.
        running: the fleet of that name that is up, or None.
    """

    plan: Plan
    problems: Problems
    running: fleet_state.FleetState | None

    @property
    def deployed(self) -> Deployment | None:
        """The running deployment, if a fleet of that name is up and ready."""
        return Deployment.of(self.running.deployment) if self.running is not None and self.running.deployment else None

    @property
    def endpoint(self) -> str:
        """Address of the coordinator that is up, or ""; the plan may have port 0."""
        return self.running.endpoint if self.running is not None else ""

    @property
    def present(self) -> dict[str, EngineSpec]:
        """Running engines, by slot."""
        return {spec.slot: spec for spec in self.deployed.engines} if self.deployed is not None else {}

    @property
    def deployment(self) -> Deployment:
        topology = self.plan.topology
        return Deployment(
            name=topology.name,
            listen=topology.listen,
            engines=tuple(self.plan.specs),
            insecure=bool(topology.insecure),
            tls=os.path.abspath(os.path.expanduser(topology.tls)) if topology.tls else "",
            restart=topology.restart,
            limits=Limits(
                load_s=topology.load_timeout_s, heal_s=topology.heal_timeout_s, drain_s=topology.drain_timeout_s,
                backoff_s=topology.backoff_s,
                restarts=RestartLimit(topology.restarts, topology.restarts_within_s),
            ),
            launcher=topology.launcher,
            cluster=topology.cluster,
            group=topology.placement_group,
            bundles=topology.bundles,
            share=topology.bundle_share,
            interface=topology.interface,
            per_node=topology.num_gpus_per_node,
            reserved=self.plan.placeholders,
            gateways=self.plan.gateways,
            heal_by_hand=tuple(model.name for model in topology.models if not model.heals_itself),
            min_healthy={model.name: model.min_healthy for model in topology.models if model.min_healthy},
            owner_grace_s=topology.owner_grace_s,
            heal_grace_s=topology.heal_grace_s,
            metrics=topology.metrics,
            web=topology.web,
        )  # fmt: skip

    def obstacles(self) -> list[Problem]:
        """Return the reasons of this version and of this machine why the plan cannot be run here and now."""
        fixed = self.deployment.fixed(self.deployed) if self.deployed is not None else []
        source = self.plan.topology.source
        conflicts = []
        if self.running is not None and source == COMMAND_LINE:
            conflicts.append(f"fleet {self.running.name!r} is up already; only `rlctl up FILE` changes it")
        return [
            *(Problem(source, 0, "", why) for why in conflicts),
            *support.unsupported(self.plan.topology),
            *self._missing(),
            *(Problem(source, 0, key, why) for key, why in fixed),
        ]

    def _missing(self) -> list[Problem]:
        from rlctl.gateway.router.process import installed

        routers = ROUTERS if installed() else ()
        return support.missing(self.plan, gpus=gpu_count(), cores=len(os.sched_getaffinity(0)), routers=routers)

    def refuse(self) -> None:
        """Raise UNSUPPORTED, TOPOLOGY_INVALID or FIELD_CONFLICT, each with every reason.

        TOPOLOGY_INVALID is for resources that this machine lacks, FIELD_CONFLICT for settings that cannot change in the
        fleet that is up.
        """
        if problems := support.unsupported(self.plan.topology):
            lines = "\n  ".join(map(str, problems))
            raise Reason.UNSUPPORTED.error(
                lines, field=problems[0].key, next_step="docs/topology.md says what can be run."
            )
        if problems := self._missing():
            raise invalid(problems)
        if self.deployed is not None and (refused := self.deployment.refusal(self.deployed)):
            raise refused


def prepare(file: Path | None, flags: Flags) -> Prepared:
    """Read, resolve and plan. Raises TOPOLOGY_INVALID with all errors."""
    topology, problems = loaded(file, flags)
    running = fleet_state.read(topology.name)
    if running is not None and not running.alive:
        running = None
    models = tuple(dataclasses.replace(model, model_path=_absolute(model.model_path)) for model in topology.models)
    topology = dataclasses.replace(topology, models=models, **_as_it_is(topology, running))
    bind = ""
    if topology.interface and topology.launcher == "local":
        from rlctl.weights.group.network_interfaces import address_on

        bind = address_on(topology.interface)
    prepared = Prepared(make_plan(topology, gpus=gpu_count(), bind=bind), problems, running)
    kept_free = prepared.deployed.reserved if prepared.deployed is not None else ()
    plan = make_plan(topology, gpus=gpu_count(), running=prepared.present, kept_free=kept_free, bind=bind)
    return dataclasses.replace(prepared, plan=plan)


def _as_it_is(topology: Topology, running: fleet_state.FleetState | None) -> dict[str, Any]:
    """Return the settings that neither file nor flags set: the values of the fleet that is up."""
    settings = running.deployment if running is not None else {}
    listen = topology.listen or settings.get("listen", "") or DEFAULT_ENDPOINT
    if running is not None and listen == running.endpoint:
        listen = settings.get("listen", listen)  # the coordinator took this port for port 0
    insecure = settings.get("insecure") if topology.insecure is None else topology.insecure
    ray_settings: dict[str, Any] = {"cluster": topology.cluster or settings.get("cluster", "")}
    if settings.get("group") and not topology.placement_group:
        ray_settings |= {"placement_group": settings["group"], "bundles": tuple(settings["bundles"]),
                 "bundle_share": settings["share"]}  # fmt: skip
    tls = topology.tls or settings.get("tls", "")
    return {"listen": listen, "insecure": insecure, "tls": tls, **ray_settings}


def token(settings: Settings, plan: Plan) -> str | None:
    """Return the bearer token: of the file's token_file, else as for every command. Raises FIELD_INVALID."""
    if plan.topology.token_file:
        from rlctl.transport.auth import load_token

        return load_token({}, file=os.path.expanduser(plan.topology.token_file))
    return settings.token


def warn(settings: Settings, problems: Problems) -> None:
    """Print the warnings; a machine format has the warnings in the plan."""
    if settings.output in MACHINE_FORMATS:
        return
    for problem in problems.in_order():
        if problem.warning:
            settings.say(str(problem))


def plan_tables(
    prepared: Prepared, changes: Sequence[Change], obstacles: Sequence[Problem], *, wide: bool
) -> list[Table]:
    """Return the plan as tables. ``changes``: changes of a running fleet; empty without a running fleet."""
    plan, running = prepared.plan, prepared.running
    topology = plan.topology
    gateways = {model: _bound(url) for model, url in running.gateways.items()} if running is not None else {}
    about = facts(
        [
            ("Fleet", topology.name),
            ("Coordinator", prepared.endpoint or topology.listen),
            ("Launcher", topology.launcher),
            ("Interface", topology.interface),
            ("GPUs", f"{topology.num_gpus}, on {values.count(plan.nodes, 'node')} of {topology.num_gpus_per_node} GPUs"
                     if topology.num_gpus else ""),
        ]
    )  # fmt: skip
    models = Table(
        ("MODEL", "UPDATABLE", "ENGINES", "RANKS", "WORLD", "ROUTER", "GATEWAY", "CHECKPOINT"),
        [
            [
                model.name, "yes" if model.update_weights else "no", str(model.engines), str(model.ranks),
                str(model.world_size or ""), " ".join(filter(None, (model.router, model.router_policy))),
                gateways.get(model.name, model.gateway) if model.gateway else "",
                model.model_path,
            ]
            for model in plan.models
        ],
        frozenset({"ROUTER", "GATEWAY"}),
    )  # fmt: skip
    actions = {change.slot: change for change in changes}
    rows = []
    for engine in plan.engines:
        spec = engine.spec
        change = actions.get(spec.slot)
        rows.append(
            [
                spec.slot, change.action if change else "", ",".join(change.fields) if change else "", spec.model,
                spec.worker_type, spec.engine, f"{spec.tp_size}" + (f"x{spec.pp_size}" if spec.pp_size > 1 else ""),
                "attached" if spec.attached else spec.device, _places([(r.node, r.gpu) for r in engine.ranks]),
                str(engine.rank_offset or ""), " ".join(f"{key}={value}" for key, value in spec.options.items()),
            ]
        )  # fmt: skip
    for change in changes:
        if change.action == REMOVE:
            removed = prepared.present[change.slot]
            rows.append(
                [removed.slot, change.action, "", removed.model, removed.worker_type, removed.engine, *[""] * 5]
            )
    rows += [
        [name, "", "", plan.model_of[name], "placeholder", "", "", "", _places(cells), "", ""]
        for name, cells in plan.reserved.items()
    ]
    engines = Table(
        ("SLOT", "CHANGE", "WHY", "MODEL", "TYPE", "ENGINE", "TP", "DEVICE", "NODE:GPU", "OFFSET", "OPTIONS"),
        rows,
        frozenset({"CHANGE", "WHY", "OPTIONS"}),
    )
    tables = [about, models, engines]
    if wide:
        ranks = [
            [spec_rank, str(r.tp), str(r.pp), r.stage, f"{r.node}:{r.gpu}"]
            for engine in plan.engines
            for r in engine.ranks
            for spec_rank in [f"{engine.spec.slot}.{r.rank}"]
        ]
        commands = [[name, command] for engine in plan.engines for name, command in engine.commands.items()]
        tables += [Table(("RANK", "TP", "PP", "STAGE", "NODE:GPU"), ranks), Table(("PROCESS", "COMMAND"), commands)]
    if obstacles:
        tables.append(Table(("",), [[str(problem)] for problem in obstacles], title="Cannot be run here:"))
    return tables


def _places(cells: Sequence[tuple[int, int]]) -> str:
    """Return places as text: 0:0-3,1:0-3."""
    runs: list[list[int]] = []
    for node, gpu in cells:
        if runs and runs[-1][0] == node and runs[-1][2] == gpu - 1:
            runs[-1][2] = gpu
        else:
            runs.append([node, gpu, gpu])
    return ",".join(f"{node}:{first}" + (f"-{last}" if last > first else "") for node, first, last in runs)


def _bound(url: str) -> str:
    return url.partition("://")[2]


def _absolute(path: str) -> str:
    """Return an existing directory as an absolute path; any other text unchanged."""
    directory = Path(os.path.expanduser(path))
    return str(directory.resolve()) if path and directory.is_dir() else path


def plan_view(prepared: Prepared) -> View:
    changes = difference(prepared.plan.specs, prepared.present) if prepared.running is not None else []
    obstacles = prepared.obstacles()
    data = {
        **prepared.plan.data,
        "changes": [{"slot": c.slot, "action": c.action, "fields": list(c.fields)} for c in changes],
        "endpoint": prepared.endpoint,
        "warnings": [problem.data for problem in prepared.problems.in_order()],
        "obstacles": [problem.data for problem in obstacles],
    }
    return View(
        data,
        lambda wide: plan_tables(prepared, changes, obstacles, wide=wide),
        lambda: [spec.slot for spec in prepared.plan.specs],
    )

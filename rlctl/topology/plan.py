"""The deployment plan of a topology: engines, ranks with coordinates, devices, offsets, command lines. Deterministic.

Slots are named by model, group and number, so that a growing group renames no slot. GPUs are assigned in the order of
the file. The GPUs of an engine are adjacent and on the same node, unless the engine is larger than a node. An unchanged
running engine keeps the same GPUs, at any place in the file.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlctl.engine import spans_nodes
from rlctl.launch.interface.spec import EngineSpec, GatewaySpec, Reservation, rank_arguments
from rlctl.launch.local.gpus import kind
from rlctl.topology.context import whole
from rlctl.topology.groups import BOOTSTRAP
from rlctl.topology.resolve import slot_stem
from rlctl.topology.resolved import Group, Model, Topology

BOOTSTRAP_PORT = 8998
"""First bootstrap port of prefill servers; SGLang's default."""


@dataclass(frozen=True)
class RankPlan:
    """A rank.

    Attributes:
        rank: 0-based.
        tp: tensor-parallel coordinate.
        pp: pipeline-parallel coordinate.
        stage: pipeline stage of the rank; "main" without pipeline stages.
        node: number of the node.
        gpu: GPU on the node; on a CPU, the number of the place.
    """

    rank: int
    tp: int
    pp: int
    stage: str
    node: int
    gpu: int


@dataclass(frozen=True)
class EnginePlan:
    """An engine.

    Attributes:
        spec: specification for the launcher.
        group: the group's name in slots, or the worker type of a group without a name.
        ranks: rank 0 first; empty for an external engine, since ranks are known only after the attach.
        rank_offset: group rank of the engine's rank 0 in a weight-update group with one source; None: the model
            receives no weights.
        commands: command lines by process, with unknown addresses in angle brackets.
    """

    spec: EngineSpec
    group: str
    ranks: tuple[RankPlan, ...]
    rank_offset: int | None
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """The engine as values for JSON."""
        return {
            **self.spec.data,
            "group": self.group,
            "rank_offset": self.rank_offset,
            "ranks": [vars(rank) for rank in self.ranks],
            "commands": dict(self.commands),
        }


@dataclass(frozen=True)
class ModelPlan:
    """A model, with fields of :class:`rlctl.topology.resolved.Model`.

    Attributes:
        engines: number of engines.
        ranks: number of ranks of all engines.
        world_size: size of a weight-update group with one source: the ranks and the source; 0 for a frozen model.
    """

    name: str
    model_path: str
    update_weights: bool
    engines: int
    ranks: int
    world_size: int
    router_policy: str
    gateway: str
    router: str
    router_listen: str


@dataclass(frozen=True)
class Plan:
    """The deployment plan of a topology. Models and engines are in the file's order.

    Attributes:
        reserved: places of placeholders as (node, GPU), by slot stem.
        placeholders: the same reservations, for a launcher that finds the places itself.
    """

    topology: Topology
    models: tuple[ModelPlan, ...]
    engines: tuple[EnginePlan, ...]
    reserved: Mapping[str, tuple[tuple[int, int], ...]]
    placeholders: tuple[Reservation, ...] = ()

    @property
    def specs(self) -> list[EngineSpec]:
        """Specifications of all engines, for the launcher."""
        return [engine.spec for engine in self.engines]

    @property
    def gateways(self) -> tuple[GatewaySpec, ...]:
        """HTTP gateways of the models with a gateway."""
        paired = {engine.spec.model for engine in self.engines if engine.spec.worker_type == "prefill"}
        return tuple(
            GatewaySpec(
                model.name,
                model.gateway,
                model.router_policy,
                model.router,
                model.router_listen,
                model.model_path,
                pairs=model.name in paired,
                metrics=self.topology.metrics,
            )
            for model in self.models
            if model.gateway
        )

    @property
    def model_of(self) -> Mapping[str, str]:
        """Model of each placeholder, by slot stem."""
        models = self.topology.models
        return {slot_stem(model, group): model.name for model in models for group in model.groups}

    @property
    def places(self) -> int:
        """Number of GPUs up to the last GPU of the plan, counted over all nodes."""
        engine_places = [place for engine in self.engines for place in engine.spec.gpus]
        return max([*engine_places, *(place for free in self.placeholders for place in free.places)], default=-1) + 1

    @property
    def nodes(self) -> int:
        """Number of nodes of the plan."""
        places = [rank.node for engine in self.engines for rank in engine.ranks]
        places += [node for cells in self.reserved.values() for node, _ in cells]
        return max(places, default=0) + 1

    @property
    def data(self) -> dict[str, Any]:
        """The plan as values for JSON."""
        topology = self.topology
        return {
            "name": topology.name,
            "launcher": topology.launcher,
            "listen": topology.listen,
            "interface": topology.interface,
            "advertise": topology.advertise,
            "nodes": self.nodes,
            "num_gpus": topology.num_gpus,
            "models": [vars(model) for model in self.models],
            "engines": [engine.data for engine in self.engines],
            "reserved": {name: [list(cell) for cell in cells] for name, cells in self.reserved.items()},
        }


def plan(
    topology: Topology,
    *,
    gpus: int,
    running: Mapping[str, EngineSpec] | None = None,
    kept_free: Sequence[Reservation] = (),
    bind: str = "",
) -> Plan:
    """Return the deployment plan of a topology.

    ``gpus``: number of GPUs of this machine, for device "auto". ``running``: running engines by slot. ``kept_free``:
    present reservations of placeholders. ``bind``: address on the interface.
    """
    places = _Places(topology.num_gpus_per_node)
    ports = _bootstrap_ports(topology, running or {})
    drafts = [
        (model, group, _spec(topology, model, group, index, gpus, bind, ports))
        for model in topology.models
        for group in model.groups
        for index in range(group.engines)
    ]
    of_group: dict[str, list[EngineSpec]] = defaultdict(list)
    for model, group, spec in drafts:
        of_group[slot_stem(model, group)].append(spec)
    retained = {}
    for _, _, spec in drafts:
        existing = (running or {}).get(spec.slot)
        if existing is not None and not spec.differs(existing) and existing.gpus and places.keep(existing.gpus):
            retained[spec.slot] = existing.gpus
    # A trainer in a placeholder keeps its GPUs when groups before the placeholder grow.
    sizes = {slot_stem(model, group): group.num_gpus for model in topology.models for group in model.groups
             if group.worker_type == "placeholder"}  # fmt: skip
    free = {
        place.name: [each for each in place.places[: sizes.get(place.name, 0)] if places.keep((each,))]
        for place in kept_free
    }
    reserved = {}
    placeholders = []
    specs: dict[str, EngineSpec] = {}
    for model in topology.models:
        for group in model.groups:
            if group.worker_type == "placeholder" and group.num_gpus:
                name = slot_stem(model, group)
                group_places = free.get(name, [])
                group_places += [place for _ in range(group.num_gpus - len(group_places)) for place in places.take(1)]
                reserved[name] = tuple(map(places.cell, group_places))
                placeholders.append(Reservation(name, group.num_gpus, kind(group.device, gpus), tuple(group_places)))
            for spec in of_group[slot_stem(model, group)]:
                if not spec.attached:
                    specs[spec.slot] = replace(spec, gpus=retained.get(spec.slot) or places.take(spec.ranks))
    offsets: dict[str, int] = {}
    engines = []
    for model, group, draft in drafts:
        spec = specs.get(draft.slot, draft)
        offset = None
        if model.update_weights:
            offset = offsets.setdefault(model.name, 1)
            offsets[model.name] = offset + spec.ranks
        engines.append(
            EnginePlan(spec, group.key or group.worker_type, _ranks(spec, group, places), offset, _commands(spec))
        )
    of_model: dict[str, list[EngineSpec]] = defaultdict(list)
    for engine in engines:
        of_model[engine.spec.model].append(engine.spec)
    models = [_model(model, of_model[model.name], offsets) for model in topology.models]
    return Plan(topology, tuple(models), tuple(engines), reserved, tuple(placeholders))


class _Places:
    """GPUs of all nodes, numbered consecutively, and assigned in adjacent runs."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._taken: set[int] = set()
        self._first = 0
        """Every place before this number is taken."""

    def keep(self, places: tuple[int, ...]) -> bool:
        """Take places that an engine or placeholder has already. Return False if a place is taken."""
        free = not self._taken.intersection(places)
        if free:
            self._taken.update(places)
        return free

    def take(self, count: int) -> tuple[int, ...]:
        """Take and return the first free run: adjacent places of a node, or whole nodes."""
        whole_nodes = count > self._per_node
        while self._first in self._taken:
            self._first += 1
        first = self._first
        while True:
            room = self._per_node - first % self._per_node
            if (whole_nodes and first % self._per_node) or (not whole_nodes and room < count):
                first += room
                continue
            places = tuple(range(first, first + count))
            blocked = self._taken.intersection(places)
            if not blocked:
                self._taken.update(places)
                return places
            first = max(blocked) + 1

    def cell(self, place: int) -> tuple[int, int]:
        """Return (node, GPU on the node)."""
        return divmod(place, self._per_node)


def _bootstrap_ports(topology: Topology, running: Mapping[str, EngineSpec]) -> dict[str, int]:
    """Return the bootstrap ports of SGLang's prefill servers, by slot. Ports are distinct across all groups of a host.

    A running server keeps the port, and the rest take the first free ports, so that a growing group moves no server.
    """
    first = {
        f"{slot_stem(model, group)}-{index}": int(group.overrides.get(BOOTSTRAP, BOOTSTRAP_PORT))
        for model in topology.models
        for group in model.groups
        if model.engine == "sglang" and group.worker_type == "prefill"
        for index in range(group.engines)
    }
    ports: dict[str, int] = {}
    used_ports = set()
    for slot, least in first.items():
        port = whole(running[slot].options.get(BOOTSTRAP, "")) if slot in running else -1
        if least <= port < least + len(first) and port not in used_ports:
            ports[slot] = port
            used_ports.add(port)
    following: dict[int, int] = {}
    for slot, least in first.items():
        if slot not in ports:
            port = following.get(least, least)
            while port in used_ports:
                port += 1
            ports[slot] = port
            used_ports.add(port)
            following[least] = port + 1
    return ports


def _spec(
    topology: Topology, model: Model, group: Group, index: int, gpus: int, bind: str, ports: Mapping[str, int]
) -> EngineSpec:
    """Return the specification of an engine, without GPUs. ``ports``: bootstrap ports by slot."""
    slot = f"{slot_stem(model, group)}-{index}"
    options = dict(group.overrides)
    match model.engine:
        case "sglang":
            options |= _disaggregation(group, ports.get(slot, 0))
        case "torch" if group.worker_type in ("prefill", "decode"):
            options["disaggregation_mode"] = group.worker_type
    if group.external:
        options = {**options, "url": group.external[index]}
    return EngineSpec(
        slot=slot,
        model_path=model.model_path,
        model=model.name,
        engine=model.engine,
        tp_size=max(group.num_gpus_per_engine // group.pp_size, 1),
        device=kind(group.device, gpus),
        options=options,
        environment=group.environment,
        frozen=not model.update_weights,
        pp_size=group.pp_size,
        worker_type=group.worker_type,
        dtype=model.dtype,
        weight_version=model.weight_version,
        cpus_per_rank=group.cpus_per_rank,
        bind=bind or "127.0.0.1",
        advertise=topology.advertise,
        nodes=_nodes(topology, model, group),
        metrics=topology.metrics,
        restarts=topology.restarts,
        restarts_within_s=topology.restarts_within_s,
    )


def _nodes(topology: Topology, model: Model, group: Group) -> int:
    """Return the number of nodes that the engine server spans; the local launcher has a single node."""
    if topology.launcher != "ray" or group.external or not spans_nodes(model.engine):
        return 1
    return max(group.num_gpus_per_engine // topology.num_gpus_per_node, 1)


def _disaggregation(group: Group, port: int) -> dict[str, str]:
    """Return SGLang's arguments for the worker type."""
    match group.worker_type:
        case "prefill":
            return {"disaggregation_mode": "prefill", BOOTSTRAP: str(port)}
        case "decode":
            return {"disaggregation_mode": "decode"}
        case "encoder":
            return {"encoder_only": "true"}
    return {}


def _ranks(spec: EngineSpec, group: Group, places: _Places) -> tuple[RankPlan, ...]:
    stages = [name for name, count in group.stages for _ in range(count)]
    return tuple(
        RankPlan(
            rank, rank % spec.tp_size, rank // spec.tp_size, stages[rank] if rank < len(stages) else "main",
            *places.cell(place),
        )
        for rank, place in enumerate(spec.gpus)
    )  # fmt: skip


def _commands(spec: EngineSpec) -> dict[str, str]:
    followers = [f"<{spec.process(rank)}>" for rank in spec.followers]
    ranks = [0, *spec.followers]
    return {
        spec.process(rank): shlex.join(["rlctl", *rank_arguments(spec, rank, "<coordinator>", followers)])
        for rank in ranks
    }


def _model(model: Model, specs: list[EngineSpec], offsets: Mapping[str, int]) -> ModelPlan:
    return ModelPlan(
        name=model.name,
        model_path=model.model_path,
        update_weights=model.update_weights,
        engines=len(specs),
        ranks=sum(spec.ranks for spec in specs),
        world_size=offsets.get(model.name, 0),
        router_policy=model.router_policy,
        gateway=model.gateway,
        router=model.router,
        router_listen=model.router_listen,
    )

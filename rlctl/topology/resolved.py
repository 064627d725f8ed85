"""A topology whose every question is answered: what the file said, what the flags said, what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """A server group.

    Attributes:
        key: what names it in slots; "" for the first regular one.
        worker_type: regular, prefill, decode, encoder or placeholder.
        num_gpus: all its engines together; 0 for external ones, whose GPUs are others' business.
        num_gpus_per_engine: GPUs of each.
        pp_size: pipeline-parallel size of each.
        overrides: arguments of its engine after the whole cascade, by name, as text.
        device: "auto", "cpu" or "cuda".
        environment: variables of its processes.
        cpus_per_rank: cores that each rank is bound to; 0: not bound.
        external: URLs of servers that run already.
        stages: (name, GPUs) of each pipeline stage.
        line: where it stands.
        path: its key.
    """

    key: str
    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    pp_size: int = 1
    overrides: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus_per_rank: int = 0
    external: tuple[str, ...] = ()
    stages: tuple[tuple[str, int], ...] = ()
    line: int = 0
    path: str = ""

    @property
    def engines(self) -> int:
        """How many engines it has."""
        if self.worker_type == "placeholder":
            return 0
        return len(self.external) or self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class Model:
    """A model and its groups.

    Attributes:
        name: unique.
        model_path: its checkpoint.
        update_weights: it receives weights.
        engine: plug-in.
        dtype: dtype to hold the weights in, or "auto".
        weight_version: label of its first version, or "".
        router_policy: how its gateway picks, or "".
        gateway: address of its gateway, or "".
        heals_itself: its engines are brought to the published version without being asked.
        router: program in front of the gateway, or "".
        router_listen: where that answers, or "".
        groups: in the file's order.
        line: where it stands.
        path: its key.
    """

    name: str
    model_path: str
    update_weights: bool
    engine: str
    dtype: str
    weight_version: str
    router_policy: str
    gateway: str
    groups: tuple[Group, ...]
    heals_itself: bool = True
    router: str = ""
    router_listen: str = ""
    line: int = 0
    path: str = ""


@dataclass(frozen=True)
class Topology:
    """Everything that one file, or one command line, describes.

    Attributes:
        source: the file, or "command line".
        name: of the fleet on this machine.
        launcher: "local" or "ray".
        cluster: address of the Ray cluster, or "".
        placement_group: name or id of the one there that engines go into, or "".
        bundles: those of it that may be used; (): all.
        bundle_share: how much of its bundle a rank takes.
        listen: where the coordinator listens; "" where nothing says so.
        num_gpus: of all groups, placeholders included.
        num_gpus_per_node: of a node.
        token_file: file with the bearer token, or "".
        insecure: bind wide without one; None where nothing says so.
        tls: directory of the certificates, or "".
        interface: interface or network that the engines' servers bind to, or "".
        advertise: host under which others reach this one, or "".
        metrics: its processes serve metrics.
        web: where the coordinator serves its page, or "".
        restart: engines that end by themselves are started again.
        backoff_s: before the first attempt, seconds.
        restarts: after failures of an engine, until it is left; 0: no limit.
        restarts_within_s: the time in which they count, seconds.
        heal_timeout_s: longest time until a new engine is routable, seconds.
        load_timeout_s: longest time for an engine to load, seconds.
        owner_grace_s: how long the owner of an update may be silent after a write has failed, seconds.
        heal_grace_s: how long a DIRTY engine is left to the next update, seconds.
        drain_timeout_s: longest time for requests to end, seconds.
        models: in the file's order.
    """

    source: str
    name: str
    launcher: str
    cluster: str
    placement_group: str
    bundles: tuple[int, ...]
    bundle_share: float
    listen: str
    num_gpus: int
    num_gpus_per_node: int
    token_file: str
    insecure: bool | None
    tls: str
    interface: str
    advertise: str
    metrics: bool
    web: str
    restart: bool
    backoff_s: float
    restarts: int
    restarts_within_s: float
    heal_timeout_s: float
    load_timeout_s: float
    owner_grace_s: float
    heal_grace_s: float
    drain_timeout_s: float
    models: tuple[Model, ...]

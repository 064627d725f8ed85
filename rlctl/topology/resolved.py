"""A resolved topology: the values of file and flags, with all defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """A server group.

    Attributes:
        key: name of the group in slots; "" for the first regular group.
        worker_type: regular, prefill, decode, encoder or placeholder.
        num_gpus: GPUs of all engines; 0 for external engines, whose GPUs rlctl does not assign.
        pp_size: pipeline-parallel size of each engine.
        overrides: arguments of the engines after the whole cascade, by name, as text.
        device: "auto", "cpu" or "cuda".
        environment: environment variables of the processes.
        cpus_per_rank: cores that each rank is bound to; 0: not bound.
        external: URLs of servers to attach to.
        stages: (name, GPUs) of each pipeline stage.
        line: line in the file.
        path: path of the key in the file.
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
        """Number of engines."""
        if self.worker_type == "placeholder":
            return 0
        return len(self.external) or self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class Model:
    """A model with server groups, in the file's order.

    Attributes:
        name: unique name.
        update_weights: whether the model receives weights.
        engine: name of the plug-in.
        dtype: dtype to hold the weights in, or "auto".
        weight_version: label of the first version, or "".
        router_policy: policy of the gateway, or "".
        gateway: address of the gateway, or "".
        heals_itself: whether the engines are healed automatically.
        min_healthy: engines that voluntary disruptions leave routable, as "2" or "50%"; "": no limit.
        router: router in front of the gateway, or "".
        router_listen: address of the router, or "".
        line: line in the file.
        path: path of the key in the file.
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
    min_healthy: str = ""
    router: str = ""
    router_listen: str = ""
    line: int = 0
    path: str = ""


@dataclass(frozen=True)
class Topology:
    """The fleet described by a file or a command line.

    Attributes:
        source: the file, or "command line".
        name: name of the fleet on this machine.
        launcher: "local" or "ray".
        cluster: address of the Ray cluster, or "".
        placement_group: name or id of an existing placement group for the engines, or "".
        bundles: usable bundles of the placement group; (): all.
        bundle_share: share of a bundle that a rank takes.
        listen: address of the coordinator; "" if not set.
        num_gpus: GPUs of all groups, placeholders included.
        num_gpus_per_node: GPUs of a node.
        token_file: file with the bearer token, or "".
        insecure: bind addresses that other hosts can reach, without a token; None if not set.
        tls: directory of the certificates, or "".
        interface: interface or network that the engines' servers bind to, or "".
        advertise: host name of this machine for other hosts, or "".
        metrics: whether the processes serve metrics.
        web: address of the coordinator's page, or "".
        restart: whether engines that end by themselves are started again.
        backoff_s: time before the first restart, seconds.
        restarts: restart limit of an engine; 0: no limit.
        restarts_within_s: time in which restarts count, seconds.
        heal_timeout_s: longest time until a new engine is routable, seconds.
        load_timeout_s: longest time for an engine to load, seconds.
        owner_grace_s: longest silence of an update's owner after a failed write, seconds.
        heal_grace_s: wait before a DIRTY engine is healed, seconds.
        drain_timeout_s: longest time for requests to end, seconds.
        models: models in the file's order.
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

"""A resolved topology: the values of file and flags, with all defaults filled in.

A field without an explanation has the meaning of the key with its name in :mod:`rlctl.topology.schema`. A text that is
not set is "". ``line`` and ``path`` are the place in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """A server group.

    Attributes:
        key: name of the group in slots; "" for the first regular group.
        num_gpus: GPUs of all engines; 0 for external engines, whose GPUs rlctl does not assign.
        pp_size: pipeline-parallel size of each engine.
        overrides: arguments of the engines after the whole cascade, by name, as text.
        cpus_per_rank: 0: not bound.
        external: URLs of servers to attach to.
        stages: (name, GPUs) of each pipeline stage.
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
        heals_itself: whether the engines are healed automatically.
        min_healthy: as "2" or "50%".
        router: router in front of the gateway.
        router_listen: address of the router.
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
        cluster: address of the Ray cluster.
        bundles: (): all.
        num_gpus: GPUs of all groups, placeholders included.
        insecure: None if not set.
        restart: whether engines that end by themselves are started again.
        restarts: restart limit of an engine; 0: no limit.
        restarts_within_s: time in which restarts count, seconds.
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

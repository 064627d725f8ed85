"""The specification of an engine for a launcher, and the command lines. Pure: starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlctl.engine import brings_ranks
from rlctl.runtime.restart_limit import RESTARTS, WITHIN_S

LOAD_S = 1860.0
"""Longest time for an engine to load, in seconds. Longer than a stage server's limit, since the stage server knows the
cause.
"""


_NO_DIFFERENCE = ("gpus", "restarts", "restarts_within_s")


@dataclass(frozen=True)
class EngineSpec:
    """An engine to start.

    Attributes:
        slot: stable name, "actor-0".
        model_path: directory of the checkpoint.
        engine: plug-in.
        tp_size: tensor-parallel ranks (of each of the pp_size pipeline ranks).
        device: "cpu", or "cuda": the ranks of a fleet then take this machine's GPUs in order, one GPU each.
        options: the plug-in's settings.
        environment: further environment variables of the ranks.
        frozen: the model receives no weights.
        pp_size: pipeline-parallel ranks, for engines with pipeline parallelism.
        worker_type: role of the engine.
        dtype: dtype of the weights in memory; "auto" takes the checkpoint's.
        weight_version: label of the model's first version, or "".
        cpus_per_rank: cores that each rank is bound to; 0: not bound.
        bind: host that the servers bind to.
        advertise: host under which peers reach the servers; "" for the bound host.
        gpus: GPUs of the ranks; (): the launcher chooses. A location, ignored by :meth:`differs`.
        nodes: hosts of a server engine, one process each.
        metrics: the stage server serves metrics.
        restarts: restarts by the stage server within ``restarts_within_s``; 0: no limit. A change counts from the next
            start.
        restarts_within_s: time of the restart limit, seconds.
    """

    slot: str
    model_path: str
    model: str = "actor"
    engine: str = "torch"
    tp_size: int = 1
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False
    pp_size: int = 1
    worker_type: str = "regular"
    dtype: str = "auto"
    weight_version: str = ""
    cpus_per_rank: int = 0
    bind: str = "127.0.0.1"
    advertise: str = ""
    gpus: tuple[int, ...] = ()
    nodes: int = 1
    metrics: bool = False
    restarts: int = RESTARTS
    restarts_within_s: float = WITHIN_S

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def attached(self) -> bool:
        """Whether the engine is an attached server."""
        return "url" in self.options

    @property
    def restarts_itself(self) -> bool:
        """Whether the stage server restarts the engine: a server engine on one node, started by the stage server."""
        return brings_ranks(self.engine) and not self.attached and self.nodes == 1

    @property
    def followers(self) -> range:
        """Ranks other than 0 with processes of rlctl; for a server engine, the further nodes."""
        return range(1, self.nodes if brings_ranks(self.engine) else self.ranks)

    @property
    def ranks_each(self) -> int:
        """Number of ranks per process."""
        return self.ranks // (1 + len(self.followers))

    @property
    def cpus(self) -> int:
        """Cores that each process is bound to, for all ranks in the process; 0: not bound."""
        return self.cpus_per_rank * self.ranks_each

    def process(self, rank: int) -> str:
        """Return the process name of a rank: "actor-0", "actor-0.1"."""
        return f"{self.slot}.{rank}" if rank else self.slot

    def identity(self, rank: int) -> str:
        """Return the identity in the certificate of a rank's process."""
        return f"worker/{self.slot}" if rank else f"stage/{self.slot}"

    def differs(self, other: EngineSpec) -> list[str]:
        """Return the fields that make ``other`` start differently. Location and restart limit do not count."""
        names = [each.name for each in fields(self) if each.name not in _NO_DIFFERENCE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def data(self) -> dict[str, Any]:
        """The spec for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> EngineSpec:
        return cls(**{**data, "gpus": tuple(data.get("gpus", ()))})


@dataclass(frozen=True)
class GatewaySpec:
    """An HTTP gateway in front of one model.

    Attributes:
        model: the model; at most one gateway per model.
        listen: HOST:PORT; TCP port 0 takes any.
        policy: policy of the gateway, or of the router in front; "": the default.
        router: program in front of the gateway, "sglang-router"; "": no router.
        router_listen: address of the router.
        tokenizer: directory of the model's tokenizer, for versions sent over groups; "": from the coordinator.
        pairs: the model has prefill and decode engines.
        metrics: the gateway serves metrics.
    """

    model: str
    listen: str
    policy: str = ""
    router: str = ""
    router_listen: str = ""
    tokenizer: str = ""
    pairs: bool = False
    metrics: bool = False

    @property
    def process(self) -> str:
        return f"gateway-{self.model}"

    @property
    def identity(self) -> str:
        """Identity in the gateway's certificate."""
        return f"gateway/{self.model}"

    def arguments(self, coordinator: str) -> list[str]:
        """Return the arguments of ``rlctl``."""
        policy = ["--router-policy" if self.router else "--policy", self.policy] if self.policy else []
        router = ["--router-backend", self.router, "--router-listen", self.router_listen] if self.router else []
        if self.router and self.pairs:
            router.append("--router-pairs")
        return [
            *("gateway", "--coordinator", coordinator, "--model", self.model, "--listen", self.listen),
            *router,
            *policy,
            *(["--tokenizer", self.tokenizer] if self.tokenizer else []),
            *(["--metrics", any_port(self.listen)] if self.metrics else []),
        ]


def any_port(listen: str) -> str:
    """Return a free port of an address's host; of this host for a Unix socket."""
    return "127.0.0.1:0" if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:0"


@dataclass(frozen=True)
class Reservation:
    """Room for a placeholder.

    Attributes:
        name: prefix of the slots.
        ranks: number of GPUs; on a CPU, of ranks.
        device: "cpu" or "cuda".
        places: places of the plan. A location, ignored in comparisons.
    """

    name: str
    ranks: int
    device: str
    places: tuple[int, ...] = field(default=(), compare=False)


def rank_arguments(spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> list[str]:
    """Return the arguments of ``rlctl`` for the process of one rank. Rank 0 gets the addresses of the followers."""
    device = spec.device
    if device == "cuda":
        device = f"cuda:{spec.gpus[rank * spec.ranks_each]}" if spec.gpus else "cuda"
    arguments = [
        *("--engine", spec.engine, "--model-path", spec.model_path),
        *("--rank", str(rank)) * bool(rank),
        *("--tp-size", str(spec.tp_size), "--device", device),
        *("--dtype", spec.dtype) * (spec.dtype != "auto"),
    ]
    for name, value in spec.options.items():
        arguments += ["--option", f"{name}={value}"]
    host = f"[{spec.bind}]" if ":" in spec.bind else spec.bind
    reachable = spec.bind != "127.0.0.1"
    if reachable:
        arguments += ["--listen", f"{host}:0", "--node", spec.advertise or spec.bind]
    if rank:
        return ["worker", *arguments]
    arguments += ["--slot", spec.slot, "--model", spec.model, "--coordinator", coordinator]
    for address in followers:
        arguments += ["--follower", address]
    if reachable:
        arguments += ["--rollout-listen", f"{host}:0"]
    if spec.advertise:
        arguments += ["--advertise", spec.advertise]
    if spec.worker_type != "regular":
        arguments += ["--worker-type", spec.worker_type]
    if spec.weight_version:
        arguments += ["--weight-version", spec.weight_version]
    if spec.frozen:
        arguments.append("--frozen")
    if spec.metrics:
        arguments += ["--metrics", f"{host}:0"]
    if spec.restarts_itself and (spec.restarts, spec.restarts_within_s) != (RESTARTS, WITHIN_S):
        arguments += ["--restarts", str(spec.restarts), "--restarts-within", f"{spec.restarts_within_s:g}s"]
    return ["stage", *arguments]

"""The specification of one engine for a launcher, and its command lines. Pure: nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlctl.engine import brings_ranks
from rlctl.runtime.restart_limit import RESTARTS, WITHIN_S

LOAD_S = 1860.0
"""Longest time for an engine to load: more than a stage server gives it, so that who knows the cause ends first."""


_NO_DIFFERENCE = ("gpus", "restarts", "restarts_within_s")


@dataclass(frozen=True)
class EngineSpec:
    """One engine to start.

    Attributes:
        slot: stable name, "actor-0".
        model_path: directory of its checkpoint.
        model: model that it serves.
        engine: plug-in.
        tp_size: tensor-parallel ranks (of each of its pp_size pipeline ranks).
        device: "cpu", or "cuda": then the ranks of a fleet take this machine's GPUs in order, one each.
        options: the plug-in's settings.
        environment: additional environment variables of its ranks.
        frozen: the model receives no weights.
        pp_size: pipeline-parallel ranks, of engines that have such.
        worker_type: what the engine is for.
        dtype: dtype to hold the weights in; "auto" takes the checkpoint's.
        weight_version: label of the model's first version, or "".
        cpus_per_rank: cores that each rank is bound to; 0: not bound.
        bind: host that its servers bind to.
        advertise: host under which others reach them; "" for the one that is bound.
        gpus: GPUs of its ranks; (): the launcher chooses. Where it is, not what it is: see :meth:`differs`.
        nodes: hosts that a server with ranks of its own is started over, a process each.
        metrics: its stage server serves metrics.
        restarts: how often its stage server starts its engine again after failures; 0: no limit. Of engines that their
            stage server starts. It counts from the next start on.
        restarts_within_s: the time in which they count, seconds.
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
        """How many ranks it has."""
        return self.tp_size * self.pp_size

    @property
    def attached(self) -> bool:
        """Whether its server runs already and is only attached to."""
        return "url" in self.options

    @property
    def restarts_itself(self) -> bool:
        """Whether its stage server starts its engine again: that of a server that it has launched, all by itself."""
        return brings_ranks(self.engine) and not self.attached and self.nodes == 1

    @property
    def followers(self) -> range:
        """Ranks that are processes of ours beside rank 0; of a server with ranks of its own, its further nodes."""
        return range(1, self.nodes if brings_ranks(self.engine) else self.ranks)

    @property
    def ranks_each(self) -> int:
        """How many ranks each of its processes has."""
        return self.ranks // (1 + len(self.followers))

    @property
    def cpus(self) -> int:
        """Cores that each of its processes is bound to, with those of the ranks that it brings; 0: not bound."""
        return self.cpus_per_rank * self.ranks_each

    def process(self, rank: int) -> str:
        """Name of the process of a rank: "actor-0", "actor-0.1"."""
        return f"{self.slot}.{rank}" if rank else self.slot

    def identity(self, rank: int) -> str:
        """Identity in the certificate of the process of a rank."""
        return f"worker/{self.slot}" if rank else f"stage/{self.slot}"

    def differs(self, other: EngineSpec) -> list[str]:
        """Fields in which another one would be started differently; where it runs and how often is none."""
        names = [each.name for each in fields(self) if each.name not in _NO_DIFFERENCE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> EngineSpec:
        """From :attr:`data`."""
        return cls(**{**data, "gpus": tuple(data.get("gpus", ()))})


@dataclass(frozen=True)
class GatewaySpec:
    """An HTTP gateway in front of one model.

    Attributes:
        model: the model; one gateway each.
        listen: HOST:PORT; port 0 takes any.
        policy: how it, or the router in front of it, picks an engine; "": its own default.
        router: program in front of it, "sglang-router"; "": none.
        router_listen: where that listens.
        tokenizer: directory of the model's tokenizer, for versions that come over groups; "": the coordinator tells.
        pairs: the model has prefill and decode engines.
        metrics: it serves metrics.
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
        """Name of its process."""
        return f"gateway-{self.model}"

    @property
    def identity(self) -> str:
        """Identity in its certificate."""
        return f"gateway/{self.model}"

    def arguments(self, coordinator: str) -> list[str]:
        """Arguments of ``rlctl``."""
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
    """A free port of the host of an address; of this host for a Unix socket."""
    return "127.0.0.1:0" if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:0"


@dataclass(frozen=True)
class Reservation:
    """Room that a placeholder keeps free.

    Attributes:
        name: what its slots would begin with.
        ranks: how many GPUs; on a CPU, ranks.
        device: "cpu" or "cuda".
        places: those of the plan that it is. Where it is, not what it is.
    """

    name: str
    ranks: int
    device: str
    places: tuple[int, ...] = field(default=(), compare=False)


def rank_arguments(spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> list[str]:
    """Arguments of ``rlctl`` for the process of one rank; rank 0 is told where the others are."""
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
    elsewhere = spec.bind != "127.0.0.1"
    if elsewhere:
        arguments += ["--listen", f"{host}:0", "--node", spec.advertise or spec.bind]
    if rank:
        return ["worker", *arguments]
    arguments += ["--slot", spec.slot, "--model", spec.model, "--coordinator", coordinator]
    for address in followers:
        arguments += ["--follower", address]
    if elsewhere:
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

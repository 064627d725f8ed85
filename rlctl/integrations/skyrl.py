"""SkyRL's server group over an rlctl fleet: start, stop, where each server is.

Names as SkyRL 0.3.0 has them (``inference_servers/server_group.py``, ``common.py``). A server here is an engine of the
fleet: the group's pool and its actors are rlctl's own, which starts an engine again when it ends, and control calls go
to the fleet's coordinator, not to each server.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.integrations.child_fleet import Up, cluster_flags, given
from rlctl.runtime.addresses import split
from rlctl.sdk.blocking import connect

MODEL = "actor"
SHARE = 0.2
"""Of its bundle, as SkyRL's own servers are counted beside its trainer."""


@dataclass(frozen=True)
class ServerInfo:
    """Where a server is.

    Attributes:
        ip: of its node.
        port: that it has got there, of its RolloutService.
        slot: its name in the fleet, the same after a restart.
        bundles: of the placement group, by rank.
    """

    ip: str
    port: int
    slot: str
    bundles: tuple[int, ...]


class ServerGroup:
    """Servers of one model in a placement group that a trainer has made."""

    def __init__(
        self,
        cli_args: Namespace,
        num_servers: int,
        start_port: int = 8000,
        placement_group: Any = None,
        placement_group_bundle_offset: int = 0,
        enable_dp: bool = False,
        enable_pd: bool = False,
        *,
        engine: str = "vllm",
        options: Mapping[str, str] | None = None,
        name: str = "skyrl",
        share: float = SHARE,
        flags: Sequence[str] = (),
    ) -> None:
        """``cli_args``: ``model`` and ``tensor_parallel_size`` are heeded; further arguments of the engine are
        ``options``. ``start_port`` is not: a server binds a port that is free on its node, and tells which.

        ``placement_group``: Ray's, or SkyRL's ``ResolvedPlacementGroup``, whose order then counts; its bundles from
        ``placement_group_bundle_offset`` on are used. Without one rlctl makes one for each server. ``name``: of the
        fleet on this machine; ``share``: how much of its bundle a rank takes; ``flags``: further ones of ``rlctl up``.

        Raises UNSUPPORTED for ``enable_dp`` and ``enable_pd``, FIELD_INVALID where the group has too few bundles.
        """
        del start_port
        for wanted, flag in ((enable_dp, "enable_dp"), (enable_pd, "enable_pd")):
            if wanted:
                raise Reason.UNSUPPORTED.error(f"servers of rlctl's are started without {flag}", field=flag)
        each = int(getattr(cli_args, "tensor_parallel_size", 1))
        ranks = num_servers * each
        self._name = name
        self._given = None
        if placement_group is not None:
            raw = getattr(placement_group, "pg", placement_group)
            order = getattr(placement_group, "reordered_bundle_indices", range(raw.bundle_count))
            bundles = list(order)[placement_group_bundle_offset : placement_group_bundle_offset + ranks]
            if len(bundles) < ranks:
                raise Reason.FIELD_INVALID.error(
                    f"{num_servers} servers of {each} ranks need {ranks} bundles, and from "
                    f"{placement_group_bundle_offset} on the placement group has {len(bundles)}",
                    field="placement_group",
                )
            self._given = given(raw, bundles, share)
        self._arguments = [
            *("--model", MODEL, "--hf-checkpoint", str(cli_args.model), "--engine", engine),
            *("--rollout-num-gpus", str(ranks), "--rollout-num-gpus-per-engine", str(each)),
            *(part for key, value in (options or {}).items() for part in ("--option", f"{key}={value}")),
            *(self._given.flags if self._given is not None else ()),
            *flags,
        ]
        self._fleet: Up | None = None

    def start(self) -> list[ServerInfo]:
        """Start all and wait until they serve. Raises what ``rlctl up`` fails with."""
        if self._fleet is None:
            self._fleet = Up(self._name, [*cluster_flags(), *self._arguments])
        return self.server_infos

    @property
    def fleet(self) -> Up:
        """The fleet: its coordinator's address, say. Raises UNREACHABLE: it is not up."""
        if self._fleet is None:
            raise Reason.UNREACHABLE.error("the servers have not been started", next_step="start() does.")
        return self._fleet

    @property
    def server_infos(self) -> list[ServerInfo]:
        """Where each server is now; [] before the start and after the end. A server that is away is left out."""
        if self._fleet is None:
            return []
        known = self._fleet.state
        order = self._given.bundles if self._given is not None else ()
        places = {spec["slot"]: spec["gpus"] for spec in known.deployment["engines"]}
        with connect(known.endpoint) as fleet:
            found = [stage.registration for stage in fleet.status(MODEL).stages if stage.routable]
        infos = []
        for stage in found:
            host, port = split(stage.rollout_address, "rollout_address")
            bundles = tuple(order[place] for place in places[stage.slot]) if order else ()
            infos.append(ServerInfo(host, port, stage.slot, bundles))
        return infos

    @property
    def proxy_url(self) -> str:
        """Where the servers answer HTTP: the model's gateway, which picks one for each request."""
        return self.fleet.state.gateways[MODEL]

    def shutdown(self) -> None:
        """End all servers; a placement group that was given stays."""
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None

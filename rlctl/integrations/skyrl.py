"""SkyRL's server group over an rlctl fleet: start, stop and the addresses of the servers.

Names are SkyRL 0.3.0's (``inference_servers/server_group.py``, ``common.py``). A server here is an engine of the fleet.
rlctl owns the group's pool and actors, and restarts an engine that has ended. Control calls go to the fleet's
coordinator, not to each server.
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
"""A rank's share of its bundle: SkyRL counts its own servers with this share beside its trainer."""


@dataclass(frozen=True)
class ServerInfo:
    """The place of a server.

    Attributes:
        ip: of the server's node.
        port: TCP port of the server's RolloutService on this node.
        slot: slot in the fleet, the same after a restart.
        bundles: of the placement group, by rank.
    """

    ip: str
    port: int
    slot: str
    bundles: tuple[int, ...]


class ServerGroup:
    """Servers of a model in a placement group made by a trainer."""

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
        """Check the arguments; :meth:`start` starts the servers.

        ``cli_args``: only ``model`` and ``tensor_parallel_size`` are used; further arguments of the engine are
        ``options``. ``start_port`` is ignored: a server binds a free TCP port of its node, and reports it.
        ``placement_group``: Ray's, or SkyRL's ``ResolvedPlacementGroup`` with its order; bundles from
        ``placement_group_bundle_offset`` on are used. Without a placement group rlctl makes a group for each server.
        ``name``: of the fleet on this machine; ``share``: a rank's share of its bundle; ``flags``: further flags of
        ``rlctl up``.

        Raises UNSUPPORTED for ``enable_dp`` and ``enable_pd``, FIELD_INVALID if the group has too few bundles.
        """
        del start_port
        for enabled, flag in ((enable_dp, "enable_dp"), (enable_pd, "enable_pd")):
            if enabled:
                raise Reason.UNSUPPORTED.error(f"servers of rlctl's are started without {flag}", field=flag)
        ranks_each = int(getattr(cli_args, "tensor_parallel_size", 1))
        ranks = num_servers * ranks_each
        self._name = name
        self._given = None
        if placement_group is not None:
            raw = getattr(placement_group, "pg", placement_group)
            order = getattr(placement_group, "reordered_bundle_indices", range(raw.bundle_count))
            bundles = list(order)[placement_group_bundle_offset : placement_group_bundle_offset + ranks]
            if len(bundles) < ranks:
                raise Reason.FIELD_INVALID.error(
                    f"{num_servers} servers of {ranks_each} ranks need {ranks} bundles, and from "
                    f"{placement_group_bundle_offset} on the placement group has {len(bundles)}",
                    field="placement_group",
                )
            self._given = given(raw, bundles, share)
        self._arguments = [
            *("--model", MODEL, "--hf-checkpoint", str(cli_args.model), "--engine", engine),
            *("--rollout-num-gpus", str(ranks), "--rollout-num-gpus-per-engine", str(ranks_each)),
            *(part for key, value in (options or {}).items() for part in ("--option", f"{key}={value}")),
            *(self._given.flags if self._given is not None else ()),
            *flags,
        ]
        self._fleet: Up | None = None

    def start(self) -> list[ServerInfo]:
        """Start all servers and wait until all serve. Raises the error of ``rlctl up``."""
        if self._fleet is None:
            self._fleet = Up(self._name, [*cluster_flags(), *self._arguments])
        return self.server_infos

    @property
    def fleet(self) -> Up:
        """Return the fleet, for example for its coordinator's address. Raises UNREACHABLE before the start."""
        if self._fleet is None:
            raise Reason.UNREACHABLE.error("the servers have not been started", next_step="start() does.")
        return self._fleet

    @property
    def server_infos(self) -> list[ServerInfo]:
        """Return the present places of all routable servers; [] before the start and after the end."""
        if self._fleet is None:
            return []
        fleet_state = self._fleet.state
        order = self._given.bundles if self._given is not None else ()
        places = {spec["slot"]: spec["gpus"] for spec in fleet_state.deployment["engines"]}
        with connect(fleet_state.endpoint) as fleet:
            registrations = [stage.registration for stage in fleet.status(MODEL).stages if stage.routable]
        infos = []
        for stage in registrations:
            host, port = split(stage.rollout_address, "rollout_address")
            bundles = tuple(order[place] for place in places[stage.slot]) if order else ()
            infos.append(ServerInfo(host, port, stage.slot, bundles))
        return infos

    @property
    def proxy_url(self) -> str:
        """Return the URL of the model's gateway; the gateway picks a server for each request."""
        return self.fleet.state.gateways[MODEL]

    def shutdown(self) -> None:
        """End all servers; a placement group of the trainer stays."""
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None

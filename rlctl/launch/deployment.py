"""The processes that a supervisor keeps running, in a serialisable form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.engine_lifecycle import Limits
from rlctl.launch.interface.launcher import Launcher
from rlctl.launch.interface.spec import EngineSpec, GatewaySpec, Reservation
from rlctl.runtime.restart_limit import RestartLimit
from rlctl.transport.tls.authority import Authority

_FIXED = {
    "listen": "fleet.listen",
    "insecure": "fleet.auth.insecure",
    "tls": "fleet.auth.tls",
    "launcher": "fleet.launcher",
    "cluster": "fleet.ray.address",
    "group": "fleet.ray.placement_group",
    "bundles": "fleet.ray.bundles",
    "share": "fleet.ray.bundle_share",
    "interface": "fleet.network.interface",
    "per_node": "fleet.num_gpus_per_node",
    "owner_grace_s": "fleet.owner_grace_s",
    "heal_grace_s": "fleet.heal_grace_s",
    "metrics": "fleet.metrics",
    "web": "fleet.web",
}
"""Fields that cannot change in a running fleet, with the topology keys: processes read these only at the start."""


@dataclass(frozen=True)
class Deployment:
    """The wanted state of a fleet. ``_FIXED`` names the keys of a topology that explain most fields.

    Attributes:
        name: name of the fleet on this machine, and of the state directory.
        restart: restart engines that end by themselves.
        per_node: ranks of an engine on one node.
        reserved: room for placeholders.
        heal_by_hand: models with engines healed only on request.
        min_healthy: engines that voluntary disruptions leave routable, as "2" or "50%", by model.
    """

    name: str
    listen: str
    engines: tuple[EngineSpec, ...]
    insecure: bool = False
    restart: bool = True
    limits: Limits = field(default_factory=Limits)
    launcher: str = "local"
    cluster: str = ""
    group: str = ""
    bundles: tuple[int, ...] = ()
    share: float = 1.0
    interface: str = ""
    per_node: int = 8
    reserved: tuple[Reservation, ...] = ()
    gateways: tuple[GatewaySpec, ...] = ()
    heal_by_hand: tuple[str, ...] = ()
    min_healthy: Mapping[str, str] = field(default_factory=dict)
    owner_grace_s: float = 5.0
    heal_grace_s: float = 60.0
    metrics: bool = False
    web: str = ""
    tls: str = ""

    @property
    def authority(self) -> Authority | None:
        """Issuer of the certificates; None for plain text."""
        return Authority(Path(self.tls)) if self.tls else None

    def launcher_of(self, logs: Path, token: str | None) -> Launcher | None:
        """Return the launcher, connected to the cluster; None for the local launcher.

        Raises UNSUPPORTED, UNREACHABLE.
        """
        if self.launcher == "local":
            return None
        from rlctl.launch.ray.launcher import RayLauncher  # loads ray

        return RayLauncher(
            logs, listen=self.listen, address=self.cluster, group=self.group, bundles=self.bundles, share=self.share,
            per_node=self.per_node, interface=self.interface, token=token, insecure=self.insecure,
            authority=self.authority,
        )  # fmt: skip

    def fixed(self, running: Deployment) -> list[tuple[str, str]]:
        """Return (key, reason) of each change that a running fleet does not allow."""
        keys = dict(_FIXED)
        if self.launcher == running.launcher == "local":
            for name in ("cluster", "interface", "per_node"):
                del keys[name]  # engines report the effect of these
        return [
            (key, f"it cannot change in a fleet that is up, where it is {getattr(running, name)!r}")
            for name, key in keys.items()
            if getattr(self, name) != getattr(running, name)
        ]

    def refusal(self, running: Deployment) -> RlctlError | None:
        """Return an error with all :meth:`fixed` changes, or None."""
        changes = self.fixed(running)
        if not changes:
            return None
        return Reason.FIELD_CONFLICT.error(
            "\n  ".join(f"{key}: {why}" for key, why in changes),
            field=changes[0][0],
            next_step=f"`rlctl down --name {self.name}` first.",
        )

    @property
    def data(self) -> dict[str, Any]:
        """The deployment for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Deployment:
        """Return the deployment of :attr:`data`. Raises UNSUPPORTED for data of a different version of rlctl."""
        try:
            return cls._of(data)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise Reason.UNSUPPORTED.error(
                f"the fleet that is up and this command are of different versions of rlctl ({error!r})",
                next_step="Use the version that started it, or take it down with `rlctl down` and start it again.",
            ) from error

    @classmethod
    def _of(cls, data: Mapping[str, Any]) -> Deployment:
        engines = tuple(EngineSpec.of(spec) for spec in data["engines"])
        reserved = tuple(
            Reservation(**{**place, "places": tuple(place.get("places", ()))}) for place in data.get("reserved", ())
        )
        gateways = tuple(GatewaySpec(**gateway) for gateway in data.get("gateways", ()))
        limits = Limits(**{**data["limits"], "restarts": RestartLimit(**data["limits"]["restarts"])})
        by_hand = tuple(data.get("heal_by_hand", ()))
        read = {"engines": engines, "limits": limits, "reserved": reserved, "gateways": gateways,
                "bundles": tuple(data.get("bundles", ()))}  # fmt: skip
        return cls(**{**data, **read, "heal_by_hand": by_hand})

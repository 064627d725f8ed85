"""What a supervisor keeps running, as it crosses from the process that read the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlctl.launch.engine_run import Limits
from rlctl.launch.spec import EngineSpec


@dataclass(frozen=True)
class Deployment:
    """A fleet as it is wanted.

    Attributes:
        name: of the fleet on this machine; names the state directory.
        listen: where the coordinator listens.
        engines: what is to run.
        insecure: bind where others can reach it though there is no token.
        restart: engines that end by themselves are started again.
        limits: how long what may take.
    """

    name: str
    listen: str
    engines: tuple[EngineSpec, ...]
    insecure: bool = False
    restart: bool = True
    limits: Limits = field(default_factory=Limits)

    @property
    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Deployment:
        """From :attr:`data`."""
        engines = tuple(EngineSpec.of(spec) for spec in data["engines"])
        return cls(**{**data, "engines": engines, "limits": Limits(**data["limits"])})

"""Engines that join a launched fleet for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet


@contextlib.contextmanager
def joined(up: LaunchedFleet, spec: EngineSpec) -> Iterator[None]:
    """An engine joins the fleet, and is healed; it leaves at the end."""
    before = list(up.engines)
    up.want([*before, spec])
    try:
        up.settle()
        yield
    finally:
        up.want(before)
        up.settle()

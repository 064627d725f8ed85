"""The collaborators that all updates, heals and verbs of a coordinator use."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.stage_links import Peers
from rlctl.coordinator.operations.fanout import Fanout
from rlctl.coordinator.operations.operations import Operations
from rlctl.ports import Clock, Journal


@dataclass(frozen=True)
class Context:
    """One fleet: its slots and models, the links to its stages, its operations, its journal and the clock."""

    roster: Roster
    peers: Peers
    fanout: Fanout
    operations: Operations
    journal: Journal
    clock: Clock

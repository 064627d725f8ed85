"""The state of a stage that serves one adapter, for tests of its gate."""

from __future__ import annotations

from types import MappingProxyType

from rlctl.stage.serving_state import Serving
from rlctl.v1 import common_pb2

READY = Serving(
    slot="a",
    model="actor",
    incarnation=1,
    state=common_pb2.STAGE_STATE_READY,
    version=common_pb2.WeightVersion(sequence=1),
    vouched=True,
    lease_until=float("inf"),
    obstacle=None,
    adapters=MappingProxyType({"math": "1"}),
    loaded_adapters=frozenset({"math"}),
    awaited=frozenset(),
    spoiling="",
)

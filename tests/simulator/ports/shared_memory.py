"""Memory shared by processes of one host: segments with contents, an owner, and a lease on the present contents."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import TensorSegment
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.virtual_time import Node

TRAINERS_HOST = "host"
"""Host of the trainers, and of some stages."""


@dataclass
class _Segment:
    owner: Node
    generation: int
    contents: Tensors


class SharedMemory:
    """Every segment, by name."""

    def __init__(self) -> None:
        self._segments: dict[str, _Segment] = {}

    def write(self, owner: Node, name: str, contents: Tensors, lease_s: float) -> TensorSegment:
        """Replace the contents of a segment; return its announcement."""
        before = self._segments.get(name)
        segment = _Segment(owner, before.generation + 1 if before is not None else 1, contents)
        self._segments[name] = segment
        announced = TensorSegment(
            node=TRAINERS_HOST,
            device="cpu",
            shared_memory=name,
            size=4096 * (1 + len(contents)),
            lease=duration(lease_s),
            generation=segment.generation,
        )
        for number, tensor in enumerate(contents, 1):
            announced.tensors.add(name=tensor, dtype="torch.float32", offset=4096 * number).shape.dims.append(1)
        return announced

    def read(self, announced: TensorSegment, host: str, name: str = "") -> str:
        """Return a tensor of a segment, or only check that a process of that host could read the segment.

        Raises NOT_COLOCATED, SEGMENT_NOT_FOUND if the owner is gone, SEGMENT_EXPIRED if the segment was reused.
        """
        if host != announced.node:
            raise Reason.NOT_COLOCATED.error(f"{announced.shared_memory} lies on {announced.node}", field="segments")
        segment = self._segments.get(announced.shared_memory)
        if segment is None or not segment.owner.alive:
            raise Reason.SEGMENT_NOT_FOUND.error(f"{announced.shared_memory} is gone", field="segments")
        if segment.generation != announced.generation:
            raise Reason.SEGMENT_EXPIRED.error(f"{announced.shared_memory} was used again", field="segments")
        return segment.contents[name] if name else ""

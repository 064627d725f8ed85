"""Which tensor differs from what was sent, and what each rank holds of it: while the ranks send what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlctl.contract.fingerprints import SIZE, differing, fingerprints
from rlctl.v1.verbs_pb2 import TensorDifference, TensorPart
from rlctl.weights.tensor.digest import ModelDigest, tensor_digest
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_sglang.readback.parameter_layout import Parameter


class Comparing:
    """Digests full tensors as they are read, and keeps what the ranks hold of the first that differs.

    Attributes:
        digests: hex digest of each full tensor so far, by checkpoint name.
    """

    def __init__(self, reference: Mapping[str, TensorMeta], expected: bytes) -> None:
        """``expected``: fingerprints of all tensors in the order of their names; empty: nothing is compared."""
        self._digest = ModelDigest()
        self._reference = reference
        self._expected = expected
        self._places = {name: index * SIZE for index, name in enumerate(sorted(reference))}
        self._first = ""
        self._parts: list[TensorPart | None] = []

    @property
    def digests(self) -> Mapping[str, str]:
        """See the class."""
        return self._digest.digests

    @property
    def digest(self) -> str:
        """The model digest of what was read, hex."""
        return self._digest.digest()

    def take(self, name: str, tensor: torch.Tensor, ranks: Sequence[tuple[Parameter, torch.Tensor]]) -> None:
        """Take a full tensor in; ``ranks``: the parameter that it is in as every rank holds it, empty: one has all."""
        self._digest.add(name, tensor)
        if len(self._expected) != SIZE * len(self._places) or not self._differs(name, self.digests[name]):
            return
        if not self._first or name < self._first:
            self._first = name
            whole = TensorPart(name=name, sha256=self.digests[name], differs=True)
            self._parts = [self._part(name, *rank) for rank in ranks] or [whole]

    def difference(self, rank: int) -> TensorDifference:
        """What to say of a rank once everything was read."""
        names = differing(self.digests, self._expected)
        report = TensorDifference(tensors=len(self.digests), count=len(names), first=self._first)
        if self._first and (part := self._parts[rank]) is not None:
            report.part.CopyFrom(part)
        return report

    def _part(self, name: str, parameter: Parameter, held: torch.Tensor) -> TensorPart | None:
        meta = self._reference[name]
        for piece, view in parameter.views(held):
            if piece.name != name:
                continue
            part = TensorPart(name=name, sha256=tensor_digest(name, view, dtype=meta.dtype))
            if tuple(view.shape) == meta.shape:
                part.differs = self._differs(name, part.sha256)
            else:
                part.dim, part.start, part.length = parameter.dim, piece.start, piece.stop - piece.start
            return part
        return None

    def _differs(self, name: str, digest: str) -> bool:
        at = self._places[name]
        return fingerprints({name: digest}) != self._expected[at : at + SIZE]

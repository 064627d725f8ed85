"""Tensors that the clients of an implicit update have written: buckets by group, and missing tensors. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.transaction.transfer import Write
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    UPDATE_KIND_UNSPECIFIED,
    TensorBucket,
    UpdateKind,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

_SHOWN = 5
"""Number of tensors that an error names."""


class WrittenTensors:
    """The writes of an update.

    Attributes:
        reference: every tensor of the model, if the commit may be partial; else None. The engines of an update with a
            reference were prepared for a partial update and check for no missing tensor.
        kind: the kind that a write has named, for an update with a reference.
        contested: a second caller has begun an update since the first write.
    """

    def __init__(self, reference: Collection[str] | None = None) -> None:
        self.reference = reference
        self.kind: UpdateKind.ValueType = UPDATE_KIND_UNSPECIFIED
        self.contested = False
        self._buckets: Counter[str] = Counter()
        self._groups: dict[str, str] = {}
        self._written: set[str] = set()
        self._pending: set[str] = set()
        self._stages: defaultdict[str, set[str]] = defaultdict(set)
        """Stages that have a tensor, by tensors that are written to each stage alone."""

    def refuse_other_source(self, request: Write) -> None:
        """Raise UPDATE_IN_PROGRESS for a tensor that came over a second group: the weights would mix two trainers."""
        for number, bucket, group in _buckets(request):
            for place, name in enumerate(bucket.names):
                if self._groups.get(name, group) != group:
                    raise Reason.UPDATE_IN_PROGRESS.error(
                        f"{name} came over group {self._groups[name]!r} in the open update, not {group!r}",
                        field=f"buckets[{number}].names[{place}]",
                    )

    def refuse_other_kind(self, request: Write, begun: UpdateKind.ValueType) -> None:
        """Raise FIELD_CONFLICT for a write of a different kind than the update. ``begun``: the kind of its begin."""
        kind = begun if self.reference is None else self.kind
        if self.reference is not None and kind == UPDATE_KIND_UNSPECIFIED:
            kind = self.kind = request.kind
        if request.kind not in (UPDATE_KIND_UNSPECIFIED, kind):
            raise Reason.FIELD_CONFLICT.error(
                f"the open update is {UpdateKind.Name(kind)}, this is {UpdateKind.Name(request.kind)}", field="kind"
            )

    def number(self, request: Write) -> set[str]:
        """Number the buckets of every group after the earlier buckets. Returns the new tensors."""
        added = set()
        for _, bucket, group in _buckets(request):
            bucket.sequence = self._buckets[group]
            self._buckets[group] += 1
            added |= {name for name in bucket.names if name not in self._groups}
            self._groups |= dict.fromkeys(bucket.names, group)
        return added

    def announce(self, request: Write) -> None:
        """Record a requested write. The tensors are missing until a write with these tensors is done, also after a
        refusal.
        """
        self._pending |= names_of(request)

    def done(self, request: Write, targets: Collection[str]) -> None:
        """Record a finished write. A tensor for each target alone is written when the last target has the tensor."""
        names = names_of(request)
        if reader := reader_of(request):
            for name in names:
                self._stages[name].add(reader)
            names = {name for name in names if self._stages[name].issuperset(targets)}
        self._written |= names
        self._pending -= names

    def take_back(self, request: Write, added: set[str]) -> None:
        """Take back a numbered write that was not accepted. Writes with later numbers then leave a gap and fail."""
        for _, _, group in _buckets(request):
            self._buckets[group] -= 1
        for name in added:
            self._groups.pop(name, None)

    def forget(self, request: Write, added: set[str]) -> None:
        """Forget a write to groups without members. New groups of the same names start again at bucket 0."""
        for _, _, group in _buckets(request):
            self._buckets.pop(group, None)
        for name in added:
            self._groups.pop(name, None)

    def uneven(self, targets: Collection[str]) -> RlctlError | None:
        """Return the error of targets with their own tensors, if a tensor was written to some targets only."""
        for name, stages in sorted(self._stages.items()):
            missing = sorted(set(targets) - stages)
            if missing:
                return Reason.WEIGHTS_INCOMPLETE.error(
                    f"{name} was written to {', '.join(sorted(stages))} and not to {', '.join(missing)}",
                    metadata={"missing": name},
                    next_step="Write the same tensors to every engine of the model.",
                )
        return None

    @property
    def whole(self) -> bool:
        """Whether every tensor of the reference was written."""
        return not self._missing

    @property
    def _missing(self) -> list[str]:
        return sorted(set(self.reference or ()) - self._written)

    def incomplete(self, *, partial: bool) -> RlctlError | None:
        """Return why an update with a reference cannot be committed, or None.

        ``partial``: the commit says that the update is partial.
        """
        if self.reference is None or self.whole:
            return None
        if self._pending:
            return _incomplete("of a write that was not done were not written again", sorted(self._pending))
        if self.kind == UPDATE_KIND_PARTIAL:
            return None
        if not partial or self.kind == UPDATE_KIND_FULL:
            return _incomplete("were not written", self._missing)
        if self.contested:
            return _incomplete("were not written, and another caller has begun an update meanwhile", self._missing)
        return None


def names_of(request: Write) -> set[str]:
    if isinstance(request, UpdateWeightsFromDistributedRequest):
        return {name for bucket in request.buckets for name in bucket.names}
    return {tensor.name for segment in request.segments for tensor in segment.tensors}


def reader_of(request: Write) -> str:
    """Return the only stage that a write is for, or ""."""
    segments = request.segments if isinstance(request, UpdateWeightsFromTensorRequest) else []
    return next((segment.reader.slot for segment in segments), "")


def _incomplete(why: str, names: list[str]) -> RlctlError:
    listing = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return Reason.WEIGHTS_INCOMPLETE.error(
        f"{len(names)} tensors {why}: {listing}", metadata={"missing": "\n".join(names)}
    )


def _buckets(request: Write) -> Iterator[tuple[int, TensorBucket, str]]:
    """Yield each bucket with its place and group. A write from memory has no buckets."""
    if isinstance(request, UpdateWeightsFromDistributedRequest):
        for number, bucket in enumerate(request.buckets):
            yield number, bucket, bucket.group_name or request.group_name

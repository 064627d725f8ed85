"""Plans the buckets of all sources of an update: check against the checkpoint, buckets and order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from rlctl.contract.digests import KEYED_DIGITS, SHA256_DIGITS
from rlctl.contract.errors import Reason
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.trainer_pb2 import Offer, Sent
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse
from rlctl.weights.shared_memory.sender import largest
from rlctl.weights.tensor import buckets
from rlctl.weights.tensor.digest import combine
from rlctl.weights.tensor.placement import SHARED_MEMORY
from rlctl.weights.tensor.source import in_lists, left_out
from rlctl.weights.tensor.tensors import TensorMeta, by_name, castable, from_proto
from rlctl.weights.tensor.tied_names import Spare
from rlctl.weights.tensor.unknown_names import refuse_unknown


@dataclass(frozen=True)
class Offered:
    """The tensors of one source.

    Attributes:
        metas: tensors in the source's order.
        together: atomic lists of names.
        host_id: host id of the source.
        room: bytes for the source's segments in the host's shared memory; None if not reported.
        spares: further names of tensors, with the names behind each.
    """

    metas: list[TensorMeta]
    together: list[tuple[str, ...]]
    host_id: str
    room: int | None = None
    spares: Mapping[str, Spare] = field(default_factory=dict)

    @classmethod
    def of(cls, offer: Offer) -> Offered:
        """Return the tensors of a trainer rank's offer."""
        return cls(
            [from_proto(info) for info in offer.tensors],
            [tuple(names.names) for names in offer.together],
            offer.host_id,
            offer.shared_memory_room if offer.HasField("shared_memory_room") else None,
            {spare.name: Spare(tuple(spare.stands_for), spare.explicit) for spare in offer.spares},
        )

    @property
    def usual(self) -> set[str]:
        """Names that are not spare names."""
        return {meta.name for meta in self.metas}.difference(self.spares)

    def of_checkpoint(self, wanted: Collection[str], elsewhere: Set[str]) -> Offered:
        """Return the offer without redundant spare names.

        Removes spare names that a different source sends itself (``elsewhere``). Removes spare names with contents that
        the checkpoint (``wanted``) has under other names.
        """
        spares = {name: spare for name, spare in self.spares.items() if name not in elsewhere}
        dropped = left_out(spares, wanted) | (self.spares.keys() & elsewhere)
        if not dropped:
            return self
        return replace(
            self,
            metas=[meta for meta in self.metas if meta.name not in dropped],
            together=[names for names in self.together if dropped.isdisjoint(names)],
        )

    def fits(self, parts: int) -> bool:
        """Whether ``parts`` times the largest tensor fits into shared memory."""
        return self.room is None or parts * self.largest <= self.room

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor, without spare names: these, such as all experts of a layer in one, may not be
        sent.
        """
        return largest([meta for meta in self.metas if meta.name not in self.spares])


@dataclass(frozen=True)
class Published:
    """The version that a publisher sent last.

    Attributes:
        digests: hex digest of each tensor, by name; empty if some are unknown.
    """

    version: WeightVersion = field(default_factory=WeightVersion)
    digests: Mapping[str, str] = field(default_factory=dict)

    def refuse_as_base(self, label: str) -> None:
        """Raise BASE_MISMATCH if the publisher does not know the digests of a version with this label."""
        if label != self.version.label or not self.digests:
            detail = f"the last that it sent is {self.version.label!r}" if self.digests else "it has none"
            raise Reason.BASE_MISMATCH.error(
                f"this publisher does not have the digests of version {label!r}: {detail}", field="base"
            )


def fit(model: str, offers: list[Offered], reference: list[TensorMeta], partial: bool) -> list[Offered]:
    """Return each source's tensors, in the source's order and the reference's dtypes. Raises before any pause.

    Raises FIELD_INVALID for a name or shape that is not in the reference, and for a name from two sources. Raises
    WEIGHTS_INCOMPLETE for names that a full update lacks. An engine without a reference checks by itself.
    """
    expected = {meta.name: meta for meta in reference}
    usual = set[str]().union(*(offered.usual for offered in offers))
    offers = [offered.of_checkpoint(expected, usual) for offered in offers]
    source_metas = by_name((meta for offered in offers for meta in offered.metas), field="weights")
    if not reference:
        return offers
    refuse_unknown(model, source_metas, expected)
    for name, meta in source_metas.items():
        if meta.shape != expected[name].shape:
            raise Reason.FIELD_INVALID.error(
                f"{name} has shape {meta.shape}; {model} has {expected[name].shape}", field="weights"
            )
        if not castable(meta.dtype, expected[name].dtype):
            raise Reason.FIELD_INVALID.error(
                f"{name} is {meta.dtype}; {model} has {expected[name].dtype}, and values do not survive that cast",
                field="weights",
                next_step="Send tensors in the checkpoint's wire form: BlockFp8 of rlctl.weights.formats quantises.",
            )
    missing = sorted(expected.keys() - source_metas.keys())
    if missing and not partial:
        raise Reason.WEIGHTS_INCOMPLETE.error(
            f"{len(missing)} of {len(expected)} tensors are missing: {', '.join(missing[:5])}",
            field="weights",
            next_step="Send every tensor of the rollout checkpoint, or pass partial=True to keep the other tensors.",
        )
    return [replace(offered, metas=[expected[meta.name] for meta in offered.metas]) for offered in offers]


def refuse_full(offers: Sequence[Offered]) -> None:
    """Raise SHARED_MEMORY_FULL for a source whose largest tensor exceeds its room in shared memory."""
    for number, offered in enumerate(offers):
        if not offered.fits(1):
            raise Reason.SHARED_MEMORY_FULL.error(
                f"the largest tensor of source {number} has {offered.largest} bytes, and {SHARED_MEMORY} has "
                f"room for {offered.room}",
                field="path",
            )


def in_one_order(wire: list[Offered], group_names: list[str], bucket_bytes: int) -> list[verbs_pb2.TensorBucket]:
    """Return the buckets of all sources, interleaved so that all sources end together."""
    placed = []
    for source, offered in enumerate(wire):
        planned = buckets.plan(in_lists(offered.metas, offered.together), bucket_bytes=bucket_bytes)
        for bucket in planned:
            message = buckets.to_proto(bucket)
            message.group_name = group_names[source] if group_names else ""
            placed.append((bucket.sequence / len(planned), source, message))
    return [message for _, _, message in sorted(placed, key=lambda entry: entry[:2])]


def by_members(plan: BeginWeightUpdateResponse) -> list[list[str]]:
    """Return the groups of an attempt by target slots, each list in the order of the sources."""
    names: dict[tuple[str, ...], list[str]] = {}
    for group in sorted(plan.groups, key=lambda group: group.source):
        names.setdefault(tuple(member.slot for member in group.members), []).append(group.group_name)
    return list(names.values())


def shared_devices(plan: BeginWeightUpdateResponse) -> set[str]:
    """Return the devices of the ranks that receive through shared memory in the present pass."""
    reached = plan.batch.slots or [target.slot for target in plan.targets]
    return {
        worker.device
        for target in plan.targets
        if target.slot in reached and target.transport == common_pb2.TRANSPORT_SHARED_MEMORY
        for worker in target.workers
    }


def digests_of(sent: Iterable[Sent], key: bytes = b"") -> dict[str, str]:
    """Return the hex digest of every digested tensor, by name.

    Raises SOURCE_FAILED for digests of a different function.
    """
    digests = {tensor.name: tensor.sha256 for part in sent for tensor in part.digests}
    digits = KEYED_DIGITS if key else SHA256_DIGITS
    if any(len(digest) != digits for digest in digests.values()):
        raise Reason.SOURCE_FAILED.error(
            "a trainer rank digests by another function than the update: the ranks run different releases of rlctl"
        )
    return digests


def combined(digests: Mapping[str, str], key: bytes = b"") -> str:
    """Return the digest over tensors from the digests and the key; "" without tensors."""
    return combine(digests, key) if digests else ""


def changed(wire: list[Offered], before: Mapping[str, str], now: Mapping[str, str]) -> list[Offered]:
    """Return each source's tensors that differ from the version sent before; an atomic list is sent whole or not at
    all.
    """
    names = {name for name, digest in now.items() if before.get(name) != digest}
    for atomic_list in (list_ for offered in wire for list_ in offered.together):
        if not names.isdisjoint(atomic_list):
            names.update(atomic_list)
    return [
        replace(
            offered,
            metas=[meta for meta in offered.metas if meta.name in names],
            together=[atomic_list for atomic_list in offered.together if atomic_list[0] in names],
        )
        for offered in wire
    ]

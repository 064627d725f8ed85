"""Plans the buckets of all sources of an update: whether the tensors fit the checkpoint, their buckets and order."""

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
    """What one source sends.

    Attributes:
        metas: its tensors, in its order.
        together: names of what must not be split over buckets, list by list.
        host_id: host that it runs on.
        room: bytes that its segments may take in the host's shared memory; None: it does not say.
        spares: names of tensors that come under others too, with these.
    """

    metas: list[TensorMeta]
    together: list[tuple[str, ...]]
    host_id: str
    room: int | None = None
    spares: Mapping[str, Spare] = field(default_factory=dict)

    @classmethod
    def of(cls, offer: Offer) -> Offered:
        """What a trainer rank says that it sends."""
        return cls(
            [from_proto(info) for info in offer.tensors],
            [tuple(names.names) for names in offer.together],
            offer.host_id,
            offer.shared_memory_room if offer.HasField("shared_memory_room") else None,
            {spare.name: Spare(tuple(spare.stands_for), spare.explicit) for spare in offer.spares},
        )

    @property
    def usual(self) -> set[str]:
        """Names that are not spare ones."""
        return {meta.name for meta in self.metas}.difference(self.spares)

    def of_checkpoint(self, wanted: Collection[str], elsewhere: Set[str]) -> Offered:
        """Without spare names that another source has as its own, ``elsewhere``, and without the names that a
        checkpoint with the tensors ``wanted`` has the same contents under others for.
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
        """Whether so many times its largest tensor fits into shared memory."""
        return self.room is None or parts * self.largest <= self.room

    @property
    def largest(self) -> int:
        """Bytes of its largest tensor; a spare name, all experts of a layer in one say, may not be sent."""
        return largest([meta for meta in self.metas if meta.name not in self.spares])


@dataclass(frozen=True)
class Published:
    """The version that a publisher sent last.

    Attributes:
        version: which.
        digests: hex digest of each of its tensors, by name; empty when not all are known.
    """

    version: WeightVersion = field(default_factory=WeightVersion)
    digests: Mapping[str, str] = field(default_factory=dict)

    def refuse_as_base(self, label: str) -> None:
        """Raise BASE_MISMATCH when nobody here knows what a version of this label consists of."""
        if label != self.version.label or not self.digests:
            known = f"the last that it sent is {self.version.label!r}" if self.digests else "it knows of none"
            raise Reason.BASE_MISMATCH.error(
                f"this publisher does not know the digests of version {label!r}: {known}", field="base"
            )


def fit(model: str, offers: list[Offered], reference: list[TensorMeta], partial: bool) -> list[Offered]:
    """What each source sends, in its own order and the reference's dtypes. Raises before anything is paused.

    FIELD_INVALID for a name or shape that the reference does not have, or a name that comes from two sources,
    WEIGHTS_INCOMPLETE for names that a full update lacks. An engine that lists no reference checks by itself.
    """
    wanted = {meta.name: meta for meta in reference}
    usual = set[str]().union(*(offered.usual for offered in offers))
    offers = [offered.of_checkpoint(wanted, usual) for offered in offers]
    given = by_name((meta for offered in offers for meta in offered.metas), field="weights")
    if not reference:
        return offers
    refuse_unknown(model, given, wanted)
    for name, meta in given.items():
        if meta.shape != wanted[name].shape:
            raise Reason.FIELD_INVALID.error(
                f"{name} has shape {meta.shape}; {model} has {wanted[name].shape}", field="weights"
            )
        if not castable(meta.dtype, wanted[name].dtype):
            raise Reason.FIELD_INVALID.error(
                f"{name} is {meta.dtype}; {model} has {wanted[name].dtype}, and values do not survive that cast",
                field="weights",
                next_step="Give them in the checkpoint's wire form: BlockFp8 of rlctl.weights.formats quantises.",
            )
    missing = sorted(wanted.keys() - given.keys())
    if missing and not partial:
        raise Reason.WEIGHTS_INCOMPLETE.error(
            f"{len(missing)} of {len(wanted)} tensors are not given: {', '.join(missing[:5])}",
            field="weights",
            next_step="Give every tensor of the rollout checkpoint. With partial=True the others stay as they are.",
        )
    return [replace(offered, metas=[wanted[meta.name] for meta in offered.metas]) for offered in offers]


def refuse_full(offers: Sequence[Offered]) -> None:
    """Raise SHARED_MEMORY_FULL for a source whose largest tensor cannot lie in its shared memory."""
    for number, offered in enumerate(offers):
        if not offered.fits(1):
            raise Reason.SHARED_MEMORY_FULL.error(
                f"the largest tensor of source {number} has {offered.largest} bytes, and {SHARED_MEMORY} has "
                f"room for {offered.room}",
                field="path",
            )


def in_one_order(wire: list[Offered], group_names: list[str], bucket_bytes: int) -> list[verbs_pb2.TensorBucket]:
    """Every source's buckets, interleaved so that all sources come to their ends together."""
    placed = []
    for source, offered in enumerate(wire):
        planned = buckets.plan(in_lists(offered.metas, offered.together), bucket_bytes=bucket_bytes)
        for bucket in planned:
            message = buckets.to_proto(bucket)
            message.group_name = group_names[source] if group_names else ""
            placed.append((bucket.sequence / len(planned), source, message))
    return [message for _, _, message in sorted(placed, key=lambda entry: entry[:2])]


def by_members(plan: BeginWeightUpdateResponse) -> list[list[str]]:
    """The groups of an attempt by who is in them beside the source, each list in the order of the sources."""
    names: dict[tuple[str, ...], list[str]] = {}
    for group in sorted(plan.groups, key=lambda group: group.source):
        names.setdefault(tuple(member.slot for member in group.members), []).append(group.group_name)
    return list(names.values())


def shared_devices(plan: BeginWeightUpdateResponse) -> set[str]:
    """Devices of the ranks that are fed through shared memory in the present pass."""
    reached = plan.batch.slots or [target.slot for target in plan.targets]
    return {
        worker.device
        for target in plan.targets
        if target.slot in reached and target.transport == common_pb2.TRANSPORT_SHARED_MEMORY
        for worker in target.workers
    }


def digests_of(sent: Iterable[Sent], key: bytes = b"") -> dict[str, str]:
    """Hex digest of every tensor that the sources digested, by name. Raises SOURCE_FAILED for one without the key."""
    digests = {tensor.name: tensor.sha256 for part in sent for tensor in part.digests}
    digits = KEYED_DIGITS if key else SHA256_DIGITS
    if any(len(digest) != digits for digest in digests.values()):
        raise Reason.SOURCE_FAILED.error(
            "a trainer rank digests by another function than the update: the ranks run different releases of rlctl"
        )
    return digests


def combined(digests: Mapping[str, str], key: bytes = b"") -> str:
    """Digest over a set of tensors, given theirs and their key; "" for none."""
    return combine(digests, key) if digests else ""


def changed(wire: list[Offered], before: Mapping[str, str], now: Mapping[str, str]) -> list[Offered]:
    """Of what each source has, what differs from what was sent before: of what belongs together, all or nothing."""
    names = {name for name, digest in now.items() if before.get(name) != digest}
    for together in (list_ for offered in wire for list_ in offered.together):
        if not names.isdisjoint(together):
            names.update(together)
    return [
        replace(
            offered,
            metas=[meta for meta in offered.metas if meta.name in names],
            together=[together for together in offered.together if together[0] in names],
        )
        for offered in wire
    ]

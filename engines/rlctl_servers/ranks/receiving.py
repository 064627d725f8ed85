"""Steps of updates in place and of staged updates: receive tensors over groups, report what came."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rlctl.contract.errors import Reason, RlctlError, not_written
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.group.rank_groups import Groups
from rlctl.weights.receiver import Receiver, ReceiveStats
from rlctl.weights.tensor.buckets import Bucket

Announced = Sequence[tuple[str, Bucket]]
"""Buckets in their order, each with the name of its group."""


def groups_of(announced: Announced, groups: Groups, product: str) -> dict[str, WeightGroup]:
    """Return the groups of the buckets, by name. Raises UNSUPPORTED for parts of tensors, GROUP_NOT_FOUND."""
    for index, (_, bucket) in enumerate(announced):
        if bucket.parts:
            raise Reason.UNSUPPORTED.error(f"{product} takes full tensors, no parts", field=f"buckets[{index}].format")
    return {name: groups.get(name) for name, _ in announced}


def receive(
    announced: Announced, joined: Mapping[str, WeightGroup], groups: Groups, receiver: Receiver, timeout_s: float
) -> ReceiveStats:
    """Receive the buckets. ``joined``: result of :func:`groups_of`. Failed groups are dropped.

    Raises as :meth:`Receiver.receive`.
    """
    try:
        # Nothing else ends the wait for a silent source.
        return receiver.receive([(joined[name], bucket) for name, bucket in announced], time.monotonic() + timeout_s)
    except RlctlError as error:
        if error.reason is Reason.GROUP_FAILED:
            # The sources of the other groups would wait for this rank until their timeout.
            for name, group in joined.items():
                groups.drop(name, group)
        raise


def check_complete(receiver: Receiver, *, may_be_nothing: bool) -> None:
    """Raise WEIGHTS_INCOMPLETE or GROUP_FAILED unless the update has written all tensors that it must write."""
    if receiver.at_risk:
        raise Reason.GROUP_FAILED.error("a broadcast that was given up may still write into the tensors")
    missing = receiver.incomplete()
    if missing:
        raise not_written(missing)
    if not (receiver.written or may_be_nothing):
        raise Reason.WEIGHTS_INCOMPLETE.error("no tensor was written")

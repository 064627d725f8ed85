"""Quotas: the one decision whether a principal may have further requests in flight at a server."""

from __future__ import annotations

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Principal

MOST_OPERATIONS = 4096
"""Quota of operations under way of a principal without a quota of its own, so that no caller fills the coordinator."""


MOST_READS = 1024
"""Most reads of stages under way of each principal: a read is a command to every target."""


def excess(principal: Principal, in_flight: int, more: int = 1) -> RlctlError | None:
    """Return the error QUOTA_EXCEEDED if ``more`` requests beside ``in_flight`` exceed the quota, else None."""
    limit = principal.max_in_flight
    if limit is None or in_flight + more <= limit:
        return None
    return _error(principal, limit, f"{in_flight} requests in flight at this server", more)


def excess_operations(principal: Principal, under_way: int, *, relieves: bool) -> RlctlError | None:
    """Return the error QUOTA_EXCEEDED if a further operation exceeds the quota, else None.

    ``relieves``: the operation, and those counted as ``under_way``, are of verbs that :attr:`Verb.relieves`. The
    principal's own quota does not apply to them.
    """
    own = None if relieves else principal.max_in_flight
    limit = MOST_OPERATIONS if own is None else own
    if under_way < limit:
        return None
    return _error(principal, limit, f"{under_way} operations under way", 1)


def excess_reads(principal: Principal, under_way: int) -> RlctlError | None:
    """Return the error QUOTA_EXCEEDED if a further read of stages exceeds MOST_READS, else None."""
    if under_way < MOST_READS:
        return None
    return _error(principal, MOST_READS, f"{under_way} reads of stages under way", 1)


def _error(principal: Principal, limit: int, present: str, more: int) -> RlctlError:
    wanted = f", and this call has {more}" if more > 1 else ""
    return Reason.QUOTA_EXCEEDED.error(
        f"{principal.name} has {present}{wanted}; the quota is {limit}",
        metadata={"principal": principal.name, "limit": str(limit)},
    )

"""Quotas: the one decision whether a principal may have further requests in flight at a server, and their count."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Principal

LARGEST = 1_000_000
"""Largest quota of a principal."""

MOST_OPERATIONS = 4096
"""Most operations under way of each principal, and as many of verbs that relieve: no caller fills the coordinator."""

MOST_READS = 1024
"""Most reads of stages under way of each principal: a read is a command to every target."""


@contextlib.contextmanager
def counted(in_flight: Counter[str], name: str, requests: int = 1) -> Iterator[None]:
    """Count requests of a principal until the block ends."""
    in_flight[name] += requests
    try:
        yield
    finally:
        in_flight[name] -= requests
        if not in_flight[name]:
            del in_flight[name]


def excess(principal: Principal, in_flight: int, more: int = 1) -> RlctlError | None:
    """Return the error QUOTA_EXCEEDED if ``more`` requests beside ``in_flight`` exceed the quota, else None."""
    quota = principal.max_in_flight
    if quota is None or in_flight + more <= quota:
        return None
    return _beyond_quota(principal, quota, f"{in_flight} requests in flight at this server", more)


def excess_operations(principal: Principal, under_way: int, *, relieves: bool) -> RlctlError | None:
    """Return the error QUOTA_EXCEEDED if a further operation exceeds the quota or MOST_OPERATIONS, else None.

    ``relieves``: the operation, and those counted as ``under_way``, are of verbs that :attr:`Verb.relieves`. The
    principal's quota does not apply to them.
    """
    present = f"{under_way} operations under way"
    quota = principal.max_in_flight
    if quota is not None and not relieves and under_way >= quota:
        return _beyond_quota(principal, quota, present)
    if under_way >= MOST_OPERATIONS:
        return _beyond_limit(principal, MOST_OPERATIONS, present)
    return None


def excess_reads(principal: Principal, under_way: int) -> RlctlError | None:
    """Return the error QUOTA_EXCEEDED if a further read of stages exceeds MOST_READS, else None."""
    if under_way < MOST_READS:
        return None
    return _beyond_limit(principal, MOST_READS, f"{under_way} reads of stages under way")


def _beyond_quota(principal: Principal, quota: int, present: str, more: int = 1) -> RlctlError:
    wanted = f", and this call has {more}" if more > 1 else ""
    return Reason.QUOTA_EXCEEDED.error(
        f"{principal.name} has {present}{wanted}; the quota is {quota}", metadata=_metadata(principal, quota)
    )


def _beyond_limit(principal: Principal, limit: int, present: str) -> RlctlError:
    """Return the error of a limit that the server has for every principal, so no other quota would help."""
    return Reason.QUOTA_EXCEEDED.error(
        f"{principal.name} has {present}; the limit of each principal is {limit}",
        next_step="Wait until requests of the principal have ended.",
        metadata=_metadata(principal, limit),
    )


def _metadata(principal: Principal, limit: int) -> dict[str, str]:
    return {"principal": principal.name, "limit": str(limit)}

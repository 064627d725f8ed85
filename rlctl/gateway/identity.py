"""Who asks, and under which id: headers of HTTP into a token and a request_id of the contract."""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Mapping

from rlctl.errors import Reason
from rlctl.ports import new_uuid7

KEYS = ("Idempotency-Key", "X-Request-Id")
REMEMBERED = 4096
_LONGEST = 256


def token(headers: Mapping[str, str]) -> str | None:
    """The bearer token of a request, if it has one. Raises TOKEN_MISSING for a header that is none."""
    given = headers.get("Authorization")
    if given is None:
        return None
    scheme, _, value = given.partition(" ")
    if scheme.lower() != "bearer" or not value.strip():
        raise Reason.TOKEN_MISSING.error("the Authorization header is no bearer token", field="Authorization")
    return value.strip()


class RequestIds:
    """Ids of the contract for the keys that callers send.

    A UUIDv7 is one already, and a repeat is exact wherever it comes in. Another key is given one when it comes first,
    and is remembered here, in this process, with the last few thousand others: its time must be true, since the
    coordinator forgets by it, and a key does not tell it.
    """

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[str | None, str, str], str] = OrderedDict()

    def of(self, headers: Mapping[str, str], caller: str | None, path: str) -> str:
        """The request_id of a request; a new one if it has no key. Raises FIELD_INVALID."""
        for name in KEYS:
            key = headers.get(name)
            if key is None:
                continue
            if not key or len(key) > _LONGEST:
                raise Reason.FIELD_INVALID.error(f"it must have 1 to {_LONGEST} characters", field=name)
            return self._known(key, caller, path)
        return new_uuid7()

    def _known(self, key: str, caller: str | None, path: str) -> str:
        try:
            given = uuid.UUID(key)
        except ValueError:
            given = None
        if given is not None and given.version == 7:
            return str(given)
        place = (caller, path, key)
        if place not in self._made:
            self._made[place] = new_uuid7()
        self._made.move_to_end(place)
        while len(self._made) > REMEMBERED:
            self._made.popitem(last=False)
        return self._made[place]


def derived(request_id: str, step: str) -> str:
    """The id of one of several operations that a request takes; the same for a repeat. Of the same time."""
    made = bytearray(hashlib.sha256(f"{request_id}/{step}".encode()).digest()[:16])
    made[:6] = uuid.UUID(request_id).bytes[:6]
    made[6] = 0x70 | made[6] & 0x0F
    made[8] = 0x80 | made[8] & 0x3F
    return str(uuid.UUID(bytes=bytes(made)))

"""Rules for single fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from google.protobuf.message import Message

from rlctl.contract import digests as digest_texts
from rlctl.contract import fingerprints as tensor_fingerprints
from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError

MAX_TIMEOUT_S = 24 * 3600.0
MOST_LABEL = 256
MOST_NAME = 1024
MOST_ADAPTER_NAME = 256
SLOT = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
"""Names that are safe unquoted in file names, metric labels, command lines and the identities of certificates."""
_UUID7 = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def required(value: object, field: str) -> None:
    if not value:
        raise Reason.FIELD_REQUIRED.error(f"{field} is empty", field=field)


def invalid(message: str, field: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(message, field=field)


def unique(values: Sequence[object], field: str) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise invalid(f"{field} names {repeated[0]!r} more than once", field)


def name(value: str, field: str, most: int) -> None:
    required(value, field)
    if len(value) > most or not value.isprintable() or not value.strip():
        raise invalid(f"{field} is no printable name of at most {most} characters", field)


def path(value: str, field: str) -> None:
    required(value, field)
    if "\0" in value:
        raise invalid(f"{field} holds a zero byte", field)


def slot_name(value: str, field: str) -> None:
    """Check a slot's name, which names files, metrics and processes."""
    required(value, field)
    if not SLOT.fullmatch(value):
        raise invalid(
            f"{field} {value[:64]!r} must be letters, digits, '.', '_' and '-', 255 at most, a letter or digit first",
            field,
        )


def adapter_name(value: str, field: str) -> None:
    name(value, field, MOST_ADAPTER_NAME)


def request_id(value: str, field: str) -> None:
    """Check a request_id. A UUIDv7's time tells whether the id is older than the recorded operations."""
    if not _UUID7.fullmatch(value):  # operations are recorded under this spelling only
        raise Reason.FIELD_INVALID.error(
            f"{field} {value!r} is not a UUIDv7 as RFC 9562 writes it, in lower case",
            field=field,
            next_step="Leave it empty, or make a UUIDv7 once per logical call.",
        )


def timeout(message: Message, name: str, path: str = "") -> None:
    """Check that a duration, if set, is above zero and at most a day. ``path``: the message's in the request."""
    if not message.HasField(name):
        return
    field, length_s = f"{path}{name}", seconds(getattr(message, name))
    if not 0 < length_s <= MAX_TIMEOUT_S:
        raise Reason.DEADLINE_INVALID.error(
            f"{field} is {length_s:g} s; it must be above 0 and at most {MAX_TIMEOUT_S:g} s", field=field
        )


def digest(value: str, field: str) -> None:
    if value and not digest_texts.is_digest(value):
        raise invalid(f"{field} is neither a SHA-256 in lower-case hex nor a keyed digest (hex@key)", field)


def digest_key(value: bytes) -> None:
    if len(value) not in (0, digest_texts.KEY_BYTES):
        raise invalid(f"digest_key has {len(value)} bytes; a key has {digest_texts.KEY_BYTES}", "digest_key")


def fingerprints(value: bytes) -> None:
    if len(value) % tensor_fingerprints.SIZE:
        raise invalid(f"fingerprints has {len(value)} bytes, no multiple of {tensor_fingerprints.SIZE}", "fingerprints")

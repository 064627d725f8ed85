"""Cache salts: a request reads KV entries of its own version and adapter only. Pure.

vLLM and SGLang look stored entries up by the tokens and by a salt of the request. The salt of rlctl names the version
of the weights and the adapter. So entries of earlier weights are out of reach if a flush failed or has not reached
them. See docs/cache-salts.md for the rules.
"""

from __future__ import annotations

import functools
import hashlib

import orjson

from rlctl.v1.common_pb2 import WeightVersion

_DIGEST_BYTES = 16


def salt_of(version: WeightVersion, adapter: str = "") -> str:
    """Return the salt of requests at a version. ``adapter``: the server's name for one load of the adapter.

    The salt is a digest: vLLM allows 128 characters, and neither "@" nor "/", which labels have.
    """
    return _salt(version.label, version.sequence, adapter)


@functools.lru_cache(1024)
def _salt(label: str, sequence: int, adapter: str) -> str:
    return _digest(orjson.dumps([label, sequence, adapter]))


def with_own(salt: str, own: object, most: int | None = None) -> object:
    """Return the value of the server's salt field, combined with the caller's ``own`` value.

    ``most``: largest number of characters that the server allows. None: no limit, and an empty value counts as absent.
    A value that the server refuses is returned unchanged.
    """
    if own is None:
        return salt
    if isinstance(own, list):
        return [with_own(salt, item, most) if isinstance(item, str) else item for item in own]
    if not isinstance(own, str):
        return own
    if most is None:
        return f"{salt}.{own}" if own else salt
    if not 0 < len(own) <= most:
        return own
    fits = len(salt) + 1 + len(own) <= most
    return f"{salt}.{own if fits else _digest(own.encode(errors='surrogatepass'))}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()

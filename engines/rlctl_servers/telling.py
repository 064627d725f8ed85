"""What every engine server's facts are told as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from rlctl.errors import Reason
from rlctl.v1.common_pb2 import MemoryTag
from rlctl.v1.verbs_pb2 import ServerInfo
from rlctl.version import __version__

_SECRET = ("key", "password", "token", "secret")
_PLAIN = (str, int, float, bool)


def server_info(
    name: str, version: str, node: str, pid: int, uptime_s: float, settings: Iterable[tuple[str, Any]]
) -> ServerInfo:
    """How a server was started, its keys and whatever is no plain value left out. ``uptime_s`` in seconds."""
    return ServerInfo(
        engine=name,
        engine_version=version,
        rlctl_version=__version__,
        pid=pid,
        node=node,
        settings={key: str(value) for key, value in settings if isinstance(value, _PLAIN) and not _secret(key)},
        uptime=Duration(seconds=int(uptime_s)),
    )


def without_code(product: str, needed: Mapping[str, Sequence[str]], routes: Iterable[str]) -> dict[str, str]:
    """Why verbs cannot be done whose routes a version does not have; ``product``: with its version."""
    there = set(routes)
    absent = {verb: [route for route in paths if route not in there] for verb, paths in needed.items()}
    return {verb: f"{product} has no {', '.join(paths)}" for verb, paths in absent.items() if paths}


def check_tags(product: str, tags: Sequence[MemoryTag.ValueType], known: Iterable[MemoryTag.ValueType]) -> None:
    """Raise FIELD_INVALID for a memory region that a server does not have."""
    there = set(known)
    for index, tag in enumerate(tags):
        if tag not in there:
            name = MemoryTag.Name(tag).removeprefix("MEMORY_TAG_").lower() if tag in MemoryTag.values() else tag
            raise Reason.FIELD_INVALID.error(f"this {product} has no region {name}", field=f"tags[{index}]")


def _secret(key: str) -> bool:
    return any(word in key.rpartition(".")[2].split("_") for word in _SECRET)

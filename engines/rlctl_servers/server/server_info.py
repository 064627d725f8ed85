"""Facts of engine servers as messages of the contract."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import (
    TRANSPORT_CUDA_IPC,
    TRANSPORT_SHARED_MEMORY,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    MemoryTag,
    Transport,
    VerificationLevel,
    WorkerCoordinates,
)
from rlctl.v1.fleet_pb2 import StageLayout
from rlctl.v1.verbs_pb2 import ServerInfo
from rlctl.version import __version__

WRITES = ("UpdateWeightsFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromTensor")
"""Verbs that write base weights. UpdateWeightsFromTensor carries adapters too."""

IN_RANKS = "rlctl_in_ranks"
"""Setting of every server: the version of rlctl's code in its ranks, or "absent"."""

EXPERIMENTAL = ("device.cuda", "transport.torch_nccl", "transport.cuda_ipc")
"""What has never run of a server on a GPU."""

_SECRET = ("key", "password", "token", "secret")
_PLAIN = (str, int, float, bool)


def server_info(
    name: str,
    version: str,
    node: str,
    pid: int,
    uptime_s: float,
    settings: Iterable[tuple[str, Any]],
    ranks: Iterable[Mapping[str, Any]],
) -> ServerInfo:
    """Return how a server was started, without keys and values that are not plain. ``uptime_s`` in seconds.

    ``ranks``: the descriptions of the ranks with rlctl's code. The setting :data:`IN_RANKS` is made of them.
    """
    public = {key: value for key, value in settings if not _secret(key)}
    public[IN_RANKS] = ", ".join(sorted({str(rank["rlctl"]) for rank in ranks})) or "absent"
    info = ServerInfo(
        engine=name,
        engine_version=version,
        rlctl_version=__version__,
        pid=pid,
        node=node,
        settings={key: str(value) for key, value in public.items() if isinstance(value, _PLAIN)},
        uptime=Duration(seconds=int(uptime_s)),
    )
    info.arguments.update({key: value for key, value in public.items() if value is None or _is_plain(value)})
    return info


def _is_plain(value: Any) -> bool:
    """Return whether JSON has the value and no key can be hidden in it."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN) and (not isinstance(value, float) or math.isfinite(value))


def without_code(product: str, needed: Mapping[str, Sequence[str]], routes: Iterable[str]) -> dict[str, str]:
    """Return the verbs without their routes, with the reason. ``product``: name and version."""
    present = set(routes)
    absent = {verb: [route for route in paths if route not in present] for verb, paths in needed.items()}
    return {verb: f"{product} has no {', '.join(paths)}" for verb, paths in absent.items() if paths}


def without_levels(
    levels: Collection[VerificationLevel.ValueType], *, answers_for_ranks: bool, unproven: str = ""
) -> dict[str, str]:
    """Return why a server's updates cannot be verified at the missing levels.

    ``unproven``: why loads may not repeat (:mod:`rlctl_servers.updates.reload_trial`).
    """
    reasons = {
        VERIFICATION_LEVEL_NONE: "its ranks' digests or a probe must prove an update"
        + (": the server gives one answer for all ranks, which proves nothing of each" if answers_for_ranks else ""),
        VERIFICATION_LEVEL_PROBE: "this server computes no log probabilities for rlctl",
        VERIFICATION_LEVEL_RECEIVED: (f"bytes that arrive prove no load: {unproven}" if unproven else "")
        or "nothing of rlctl's runs where this server takes weights in",
        VERIFICATION_LEVEL_REPLICA: "what this server holds cannot be read",
        VERIFICATION_LEVEL_EXPECTED: "what this server holds cannot be read",
    }
    level_names = {
        level: VerificationLevel.Name(level).removeprefix("VERIFICATION_LEVEL_").lower() for level in reasons
    }
    return {f"verify={level_names[level]}": reason for level, reason in reasons.items() if level not in levels}


def levels_of(
    *, ranks: bool, world_size: int, readable: bool, probes: bool, unproven: str
) -> list[VerificationLevel.ValueType]:
    """Return the levels at which a server's updates are verified. ``ranks``: rlctl runs in the server's ranks.

    ``readable``: the model digest can be read; ``probes``: the server can be probed; ``unproven``: why loads may not
    repeat. In that case bytes that arrived prove no update.
    """
    return [
        # A single answer for several ranks is no evidence for each rank.
        *([VERIFICATION_LEVEL_NONE] if ranks or world_size == 1 else []),
        *([VERIFICATION_LEVEL_RECEIVED] if ranks and not unproven else []),
        *([VERIFICATION_LEVEL_REPLICA, VERIFICATION_LEVEL_EXPECTED] if readable else []),
        *([VERIFICATION_LEVEL_PROBE] if probes else []),
    ]


def memory_transports(ranks: Sequence[Mapping[str, Any]], *, cpu: bool) -> list[Transport.ValueType]:
    """Return the transports from a trainer's memory on the host of the ranks. ``ranks``: those with rlctl's code."""
    if not ranks or not ranks[0]["host_id"]:
        return []
    return [TRANSPORT_SHARED_MEMORY, *([] if cpu else [TRANSPORT_CUDA_IPC])]


def stage_layout(
    node: str,
    places: Iterable[Mapping[str, Any]],
    *,
    tp_size: int,
    pp_size: int,
    dp_size: int,
    ep_size: int,
    store: tuple[str, int],
) -> StageLayout:
    """Return the layout of a server on a node. ``places``: rank, device and host id of each rank.

    ``store``: address at rank 0 where groups meet in which the server sends its weights; ("", 0): it sends none.
    """
    return StageLayout(
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=dp_size,
        ep_size=ep_size,
        store_host=store[0],
        store_port=store[1],
        workers=[
            WorkerCoordinates(
                rank=place["rank"],
                tp=place["rank"] % tp_size,
                pp=place["rank"] // tp_size,
                node=node,
                device=place["device"],
                host_id=place["host_id"],
            )
            for place in places
        ],
    )


def check_tags(product: str, tags: Sequence[MemoryTag.ValueType], supported: Iterable[MemoryTag.ValueType]) -> None:
    """Raise FIELD_INVALID for a memory region that a server does not have."""
    known_tags = set(supported)
    for index, tag in enumerate(tags):
        if tag not in known_tags:
            name = MemoryTag.Name(tag).removeprefix("MEMORY_TAG_").lower() if tag in MemoryTag.values() else tag
            raise Reason.FIELD_INVALID.error(f"this {product} has no region {name}", field=f"tags[{index}]")


def _secret(key: str) -> bool:
    return any(word in key.rpartition(".")[2].split("_") for word in _SECRET)

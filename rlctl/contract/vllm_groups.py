"""The names of groups of vLLM's weight transfer, as trainer and engines compute them. Pure.

vLLM's groups have no name, a torch process group needs one. From 0.28 on whether tensors are packed is a property of
the group (``packed`` and ``packed_buffer_size_bytes`` in ``init_info``) and not of each update; so the name says it,
and whoever knows the group, whenever that was formed, knows how its tensors come.
"""

from __future__ import annotations

import re

GROUP = "weight_transfer"
"""Of groups that are named by nobody."""

BACKEND = "vllm_nccl"
"""The backend of groups whose members, the source aside, are vLLM's workers by vLLM's own NCCL engine."""

PACKED_BYTES = 1 << 30
"""vLLM's default for ``packed_buffer_size_bytes``."""

_PACKED = re.compile(re.escape(GROUP) + r"-packed-([1-9][0-9]*)")


def group_name(packed_bytes: int = 0) -> str:
    """The name of a group whose source packs tensors so far; 0: it sends them one by one."""
    return f"{GROUP}-packed-{packed_bytes}" if packed_bytes else GROUP


def packed_bytes(group: str) -> int:
    """How far a group's source packs tensors; 0: its name says nothing of that."""
    found = _PACKED.fullmatch(group)
    return int(found[1]) if found else 0


def unique_id_key(group: str) -> str:
    """Where the source of a group that vLLM's own engine joins puts NCCL's unique id, in the store of all groups."""
    return f"{group}/nccl_unique_id"

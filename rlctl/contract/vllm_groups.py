"""Names of groups of vLLM's weight transfer, computed alike by trainer and engines. Pure.

vLLM's groups have no name, but a torch process group needs a name. From vLLM 0.28 on, packing is a property of the
group (``packed`` and ``packed_buffer_size_bytes`` in ``init_info``) and not of each update. Therefore the group's name
states the packing, whenever the group was formed.
"""

from __future__ import annotations

import re

GROUP = "weight_transfer"
"""Prefix of the names of such groups, and the name of a group without packing."""

BACKEND = "vllm_nccl"
"""The backend of groups with vLLM's workers as members beside the source, by vLLM's own NCCL engine."""

PACKED_BYTES = 1 << 30
"""vLLM's default for ``packed_buffer_size_bytes``."""

_PACKED = re.compile(re.escape(GROUP) + r"-packed-([1-9][0-9]*)")


def group_name(packed_bytes: int = 0) -> str:
    """Return the name of a group with this packing size of its source; 0: tensors are sent one by one."""
    return f"{GROUP}-packed-{packed_bytes}" if packed_bytes else GROUP


def packed_bytes(group: str) -> int:
    """Return the packing size of a group's source; 0: the name states no packing."""
    match = _PACKED.fullmatch(group)
    return int(match[1]) if match else 0


def unique_id_key(group: str) -> str:
    """Return the key of NCCL's unique id in the store of all groups, for a group that vLLM's own engine joins."""
    return f"{group}/nccl_unique_id"

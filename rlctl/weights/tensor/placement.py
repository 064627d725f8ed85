"""Identities of a host's shared memory and of a device.

A trainer rank and an engine rank are a pair if these identities are equal. Host names and device numbers are not
enough. Containers of one host have different names, and may or may not share memory. A process numbers only the devices
that it sees.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

CPU = "cpu"
"""Device identity of every computation on the host itself."""

SHARED_MEMORY = Path("/dev/shm")
"""Directory in which POSIX shared memory appears as files."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """Return the identity of this process's shared memory: equal for processes that can map each other's segments.

    The identity has two parts, as in NCCL (``hostHash`` and ``shmDev`` of ``ncclPeerInfo``). The kernel's boot id is
    equal in all containers of a host. Device and inode of ``/dev/shm`` are equal in containers with the same mount. ""
    on a system without them.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        place = os.stat(SHARED_MEMORY)
    except OSError:
        return ""
    return f"{boot_id}/{place.st_dev:x}.{place.st_ino:x}"


def device_id(device: torch.device) -> str:
    """Return the identity of a device on its host: "cpu", or a GPU's UUID, equal in every process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU

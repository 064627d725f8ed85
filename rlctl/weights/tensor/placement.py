"""Identities of a host's shared memory and of a device.

A rank of the trainer and a rank of an engine are a pair when these identities agree. Names of hosts and numbers of
devices are not enough. Containers of one host have different names, and may share one memory or several. A process
numbers only the devices that it sees.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

CPU = "cpu"
"""Device identity of everything that computes on the host itself."""

SHARED_MEMORY = Path("/dev/shm")
"""Where POSIX shared memory appears as files."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """Identity of the shared memory that this process sees: equal for processes that can map each other's segments.

    It is the id of the kernel's boot, which containers of one host share, and the device and inode of ``/dev/shm``,
    which those share that see the same one. NCCL decides by the same two (``ncclPeerInfo``'s ``hostHash`` and
    ``shmDev``). "" where a system has neither.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        place = os.stat(SHARED_MEMORY)
    except OSError:
        return ""
    return f"{boot_id}/{place.st_dev:x}.{place.st_ino:x}"


def device_id(device: torch.device) -> str:
    """Identity of a device on its host: "cpu", or a GPU's UUID, which every process sees alike."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else CPU

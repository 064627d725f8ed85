"""Free memory of the host."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Return the kernel's estimate of bytes that can be allocated without swapping: MemAvailable of proc_meminfo(5)."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0

"""A platform for verl 0.9.1 on machines without an accelerator: its registry has GPUs and NPUs only.

Loaded into every process of verl's by its own ``VERL_USE_EXTERNAL_MODULES=on_cpu``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import set_platform  # type: ignore[import-not-found]
from verl.plugin.platform.platform_cuda import PlatformCUDA  # type: ignore[import-not-found]


def _nothing(*_: Any, **__: Any) -> None:
    """There is no memory of a device's to empty."""


class CPU(PlatformCUDA):  # type: ignore[misc]
    """What differs from the one that verl falls back to."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("is_available", "current_device", "synchronize", "set_device")},
        empty_cache=_nothing,
        manual_seed=torch.manual_seed,
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda: 0
        ),
        mem_get_info=lambda: (0, 0),
        device_count=lambda: 1,
        get_device_name=lambda: "CPU",
    )
    is_available = staticmethod(torch.cpu.is_available)
    current_device = staticmethod(torch.cpu.current_device)
    set_allocator_settings = empty_cache = set_device = synchronize = staticmethod(_nothing)
    communication_backend_name = staticmethod(lambda: "gloo")
    ray_resource_options = staticmethod(lambda _: {})


set_platform(CPU())

"""Lets an unmodified SGLang run without a GPU. The folder comes first on PYTHONPATH, so Python runs this module.

SGLang imports three packages that exist for GPUs only. None of this code runs on a CPU, but the names must exist:

- triton: an empty package. Every name can be imported, and decorators return the decorated object.
- torchvision: the wheel's compiled part belongs to a CUDA build of torch. The operators of its Python part are
    declared, without a body, just before the import (beside a CPU build only).
- sgl_kernel: the package of that name beside this file.

A fourth package, torch_memory_saver, is imported for ``--enable-memory-saver`` only: the module of that name beside
this file.

Some modules are amended. SGLang prepares adapters in pinned memory, which exists only beside a GPU. SGLang also tells
NIXL, the transport of KV entries from prefill to decode servers, that the entries lie in GPU memory.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_TORCHVISION_OPERATORS = ("nms", "qnms")
_LIBRARIES: list[Any] = []
"""Declarations are valid while their objects exist."""


class _Anything:
    """A class out of the empty package: an annotation, a dtype, a base class."""

    def __init__(self, *values: object, **_named: object) -> None:
        self.value = values[0] if values else None


class _Empty(types.ModuleType):
    """A module that has every name."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[0].isupper() or name in ("constexpr", "dtype", "tensor")
        attribute = type(name, (_Anything,), {}) if is_class else _Empty(f"{self.__name__}.{name}")
        setattr(self, name, attribute)
        return attribute

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the decorated object, with or without decorator arguments."""
        if len(arguments) == 1 and callable(arguments[0]) and not named:
            return arguments[0]
        decorator: Callable[[Any], Any] = lambda decorated: decorated  # noqa: E731
        return decorator


class _Triton(_Empty):
    """triton's own helpers that SGLang calls at import."""

    __version__ = "3.0.0"

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        return (dividend + divisor - 1) // divisor

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << max(number - 1, 0).bit_length()


class _Amended(Loader):
    """Loads an existing module, and changes it."""

    def __init__(self, loader: Loader, amend: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._amend = amend

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._amend(module)


class _Unpinned:
    """torch for a module that asks for pinned memory: the module gets other memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return attribute
        return lambda *args, pin_memory=False, **named: attribute(*args, **named)  # noqa: ARG005


def _without_pinning(module: types.ModuleType) -> None:
    """Keep all tensors of the module out of pinned memory."""
    module.torch.Tensor.pin_memory = lambda tensor: tensor
    module.torch = _Unpinned(module.torch)


def _in_host_memory(module: types.ModuleType) -> None:
    """Declare KV entries as host memory, where SGLang declares GPU memory."""
    make = module.nixl_agent.__init__

    def begin(agent: Any, *args: Any, **named: Any) -> None:
        make(agent, *args, **named)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    module.nixl_agent.__init__ = begin


_AMENDMENTS = {
    # A module for each CUDA that torch may be built for. NIXL takes the fitting module.
    "nixl_cu12._api": _in_host_memory,
    "nixl_cu13._api": _in_host_memory,
    "sglang.srt.lora.layers": _without_pinning,
    "sglang.srt.lora.backend.torch_backend": _without_pinning,
}


class _StandIns(MetaPathFinder, Loader):
    """Finds the empty packages, and amends existing modules."""

    def find_spec(self, name: str, path: Any = None, _target: object = None) -> ModuleSpec | None:
        if name in _AMENDMENTS and (spec := PathFinder.find_spec(name, path)) is not None:
            assert spec.loader is not None
            spec.loader = _Amended(spec.loader, _AMENDMENTS[name])
            return spec
        if name.partition(".")[0] == "triton":
            return ModuleSpec(name, self, is_package=True)
        if name == "torchvision" and not _LIBRARIES:
            import torch

            if torch.version.cuda is not None:
                return None  # the compiled part fits, and declares the operators itself
            library = torch.library.Library("torchvision", "FRAGMENT")
            _LIBRARIES.append(library)
            for operator in _TORCHVISION_OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Triton(spec.name) if spec.name == "triton" else _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _StandIns())

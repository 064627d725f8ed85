"""Lets an unmodified SGLang run on a machine without a GPU; its folder comes first on PYTHONPATH, so Python runs it.

Three packages that SGLang imports exist for GPUs only. None of their code runs on a CPU, but the names must be there:

triton       an empty package in its place: every name can be imported, decorators return what they decorate.
torchvision  the wheel's compiled part belongs to a CUDA build of torch; the operators that its Python part registers
             for are declared, without a body, just before it is imported (beside a CPU build only).
sgl_kernel   the package of that name beside this file.

A fourth one, torch_memory_saver, is imported for ``--enable-memory-saver`` only: the module of that name beside this
file.

And some modules are amended: SGLang prepares adapters in pinned memory, which there is only beside a GPU, and it tells
NIXL, which carries KV entries from prefill to decode servers, that they lie in a GPU's memory.
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
"""Declarations stand while the object that made them does."""


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
        found = type(name, (_Anything,), {}) if is_class else _Empty(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As a decorator, with or without arguments, it changes nothing."""
        if len(arguments) == 1 and callable(arguments[0]) and not named:
            return arguments[0]
        decorator: Callable[[Any], Any] = lambda decorated: decorated  # noqa: E731
        return decorator


class _Triton(_Empty):
    """What SGLang computes with triton's own helpers at import."""

    __version__ = "3.0.0"

    @staticmethod
    def cdiv(dividend: int, divisor: int) -> int:
        """The quotient, rounded up."""
        return (dividend + divisor - 1) // divisor

    @staticmethod
    def next_power_of_2(number: int) -> int:
        """The least power of two that is not smaller."""
        return 1 << max(number - 1, 0).bit_length()


class _Amended(Loader):
    """Loads a module that is really there, and changes it."""

    def __init__(self, loader: Loader, amend: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._amend = amend

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._amend(module)


class _Unpinned:
    """torch, for a module that asks it for pinned memory: it gets other memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return found
        return lambda *given, pin_memory=False, **named: found(*given, **named)  # noqa: ARG005


def _without_pinning(module: types.ModuleType) -> None:
    """Nothing of the module's lies in pinned memory."""
    module.torch.Tensor.pin_memory = lambda tensor: tensor
    module.torch = _Unpinned(module.torch)


def _in_host_memory(module: types.ModuleType) -> None:
    """What SGLang says lies in a GPU's memory, as KV entries do elsewhere, lies in the host's."""
    make = module.nixl_agent.__init__

    def begin(agent: Any, *given: Any, **named: Any) -> None:
        make(agent, *given, **named)
        agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]

    module.nixl_agent.__init__ = begin


_AMENDMENTS = {
    # One for each CUDA that torch may be built for; NIXL takes the one that fits.
    "nixl_cu12._api": _in_host_memory,
    "nixl_cu13._api": _in_host_memory,
    "sglang.srt.lora.layers": _without_pinning,
    "sglang.srt.lora.backend.torch_backend": _without_pinning,
}


class _StandIns(MetaPathFinder, Loader):
    """Finds the empty packages, and prepares what is really there."""

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
                return None  # the compiled part fits, and declares its operators itself
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

"""In place of SGLang's kernels, of which there is no build for CPUs: every name imports, none can be called.

SGLang computes with torch's own operators where these are not registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's kernels are not built for CPUs")

    return missing

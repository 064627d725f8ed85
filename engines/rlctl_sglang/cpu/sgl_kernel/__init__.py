"""In place of SGLang's kernels, which are not built for CPUs: every name imports, no function can be called.

If the kernels are not registered, SGLang computes with torch's own operators.
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

"""The memory saver as SGLang uses it, where there is no GPU: its regions are entered, paused and resumed, and keep what
they hold. The package of this name works by the virtual memory of a GPU, and cannot even be loaded without one.
"""

# ruff: noqa: ARG002 (SGLang names the arguments)
from __future__ import annotations

import contextlib
from collections.abc import Iterator


class TorchMemorySaver:
    """Regions of memory by tag."""

    enabled = True

    @contextlib.contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """What is allocated meanwhile would belong to the region."""
        yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """What is allocated meanwhile would belong to no region."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """Nothing is given back."""

    def resume(self, tag: str | None = None) -> None:
        """Nothing was given back."""


torch_memory_saver = TorchMemorySaver()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started meanwhile need nothing loaded before them."""
    yield

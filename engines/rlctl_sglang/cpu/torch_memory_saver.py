"""SGLang's memory saver without a GPU: regions are entered, paused and resumed, and keep their content.

The package of this name works by the virtual memory of a GPU, and cannot even be loaded without a GPU.
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
        """Yield without effect. Allocations inside would belong to the region."""
        yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Yield without effect. Allocations inside would belong to no region."""
        yield

    def pause(self, tag: str | None = None) -> None:
        """Keep the memory: nothing is given back."""

    def resume(self, tag: str | None = None) -> None:
        """Do nothing, since no memory was given back."""


torch_memory_saver = TorchMemorySaver()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Yield without effect: processes started inside need no preloaded library."""
    yield

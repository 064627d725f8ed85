"""Work on weights: number of cores, early end, and errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlctl.contract.errors import Reason, RlctlError


def usable_cores() -> int:
    """Return the number of cores of this process: as many tensors can be hashed at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digesting_threads(key: bytes) -> int:
    """Return the number of threads that digest a tensor each. A keyed digest uses torch's own threads in each."""
    return max(1, usable_cores() // torch.get_num_threads()) if key else usable_cores()


class Stop:
    """A request to end work on weights early, with its cause. The first cause counts. From any thread."""

    def __init__(self) -> None:
        self.cause: RlctlError | None = None

    def set(self, cause: RlctlError) -> None:
        self.cause = self.cause or cause

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause

    @contextmanager
    def on_error(self, *raised: type[Exception]) -> Iterator[None]:
        """Set the cause to an error of the block, in place of raising it. For work of one rank among several.

        The other ranks may wait for this rank. It raises the cause where all ranks agree on errors. Errors of the types
        ``raised`` are raised at once: after them the ranks cannot agree.
        """
        try:
            yield
        except raised:
            raise
        except RlctlError as error:
            self.set(error)
        except torch.OutOfMemoryError as error:
            self.set(memory_full(error))
        except Exception as error:  # noqa: BLE001 - the cause is raised at every rank
            self.set(Reason.ENGINE_FAILED.error(f"{type(error).__name__}: {error}"))


def memory_full(error: torch.OutOfMemoryError) -> RlctlError:
    """Return the error for a device without memory."""
    return Reason.MEMORY_FULL.error((str(error).strip() or "out of memory").splitlines()[0])

"""NCCL process groups whose failures stay inside of them. Never run on a GPU.

Left to itself torch's watchdog ends the whole process when a collective fails or takes too long: one engine that is
killed would take the trainer and every other engine along. That is meant for whoever computes with what a collective
brings before it is known to have come, which nobody does here. Source: PyTorch's list of ProcessGroupNCCL's environment
variables, where ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is 3 by default.
"""

from __future__ import annotations

import datetime
import os
import threading
from typing import Any

import torch.distributed as dist

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ONLY_ABORT = "2"
"""Give the communicator up: waiting for the collective then raises."""

_making = threading.Lock()


def nccl_group(store: object, rank: int, size: int, timeout_s: float) -> Any:
    """A member's process group (a backend object); ``timeout_s`` is the longest that one collective may take: torch
    knows no limit of a single NCCL collective.

    The variable is read as a group is made, and only then; it stays as it was for the groups of the trainer's own.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    with _making:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = _ONLY_ABORT
        try:
            return nccl(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[_HANDLING]
            else:
                os.environ[_HANDLING] = before

"""NCCL process groups whose failures do not end the process. Never run on a GPU.

By default torch's watchdog ends the whole process when a collective fails or takes too long. A killed engine would thus
end the trainer and every other engine. The default protects programs that compute with a collective's result before its
end is known. rlctl does not do so. Source: PyTorch's list of ProcessGroupNCCL's environment variables:
``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is 3 by default.
"""

from __future__ import annotations

import datetime
import os
import threading
from typing import Any

import torch.distributed as dist

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ONLY_ABORT = "2"
"""Abort the communicator: waiting for the collective then raises."""

_making = threading.Lock()


def nccl_group(store: object, rank: int, size: int, timeout_s: float) -> Any:
    """Create a member's process group (a backend object); ``timeout_s`` is the maximum duration of a collective.

    The limit is the group's, because torch has no timeout of a single NCCL collective. torch reads
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` only when a group is made. The variable is restored afterwards, for the
    trainer's own groups.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    with _making:
        previous = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = _ONLY_ABORT
        try:
            return nccl(store, rank, size, options)
        finally:
            if previous is None:
                del os.environ[_HANDLING]
            else:
                os.environ[_HANDLING] = previous

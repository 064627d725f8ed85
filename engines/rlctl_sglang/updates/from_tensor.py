"""Handing tensors over to SGLang's ranks in memory: ``/update_weights_from_tensor`` and what it reads.

SGLang unpickles ``[(name, tensor), ...]`` whose storages torch's ``file_system`` strategy shares (see
``MultiprocessingSerializer`` in ``srt/utils/common.py`` and ``torch/multiprocessing/reductions.py``): a name in shared
memory, counted by torch's own manager process, which removes it when the last user is gone or dead. All tensors lie in
one storage, which every rank maps once. What SGLang cannot read ends it, so it gets nothing but what is made here, of
tensors that were checked.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_storage_filename

from rlctl.contract.errors import Reason

_ALIGNMENT = 64
_TRIES = 5
"""torch gives its shared memory manager, a process that it starts for the first segment, one second for an answer."""

FULL_S = 10.0
"""How long room in shared memory is waited for: other engines on this host hold copies of the same tensors."""

_LOOK_S = 0.05


class Handed:
    """Copies of tensors in shared memory. They are there until this object goes, and SGLang has let go of them."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]], proceed: Callable[[], None]) -> None:
        """Copy; ``proceed`` is asked after every tensor, and raises when what it was copied from is no longer good.

        Raises SHARED_MEMORY_FULL, ENGINE_FAILED.
        """
        offsets, size = [], 0
        for _, tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._storage = _share(max(size, _ALIGNMENT))
        self._named: list[tuple[str, torch.Tensor]] = []
        for (name, tensor), offset in zip(tensors, offsets, strict=True):
            start = offset // tensor.itemsize
            copy = torch.empty(0, dtype=tensor.dtype).set_(self._storage, start, tensor.shape, tensor.stride())
            copy.copy_(tensor)
            self._named.append((name, copy))
            proceed()

    def payload(self) -> str:
        """What one rank is to unpickle, base64. A payload is for one rank: it counts as one user of the memory."""
        file = io.BytesIO()
        pickler = ForkingPickler(file)
        # Only here: the strategy of this process is not ours to set.
        pickler.dispatch_table = {**pickler.dispatch_table, torch.UntypedStorage: _by_name}
        pickler.dump(self._named)
        return base64.b64encode(file.getbuffer()).decode()


def _by_name(storage: torch.UntypedStorage) -> tuple[Any, tuple[Any, ...]]:
    """As ``reduce_storage`` does with the ``file_system`` strategy."""
    where = storage._share_filename_cpu_()
    storage._shared_incref()  # type: ignore[no-untyped-call]
    return rebuild_storage_filename, (torch.UntypedStorage, *where)


def _share(size: int) -> torch.UntypedStorage:
    """Shared memory under torch's own names. Raises SHARED_MEMORY_FULL, ENGINE_FAILED."""
    tries, until = 1, time.monotonic() + FULL_S
    while True:
        try:
            return torch.UntypedStorage._new_using_filename_cpu(size)
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            slow, full = "timed out" in cause, "No space left" in cause
            if not (slow and tries < _TRIES) and not (full and time.monotonic() < until):
                reason = Reason.ENGINE_FAILED if slow else Reason.SHARED_MEMORY_FULL
                raise reason.error(f"{size} bytes cannot be shared with SGLang: {cause}") from error
        if slow:
            tries += 1
        else:
            time.sleep(_LOOK_S)

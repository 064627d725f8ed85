"""A plug-in of vLLM: its store of KV entries in host memory (OffloadingConnector), on a CPU, where it copies nothing.

Only the copies between blocks and store are these lines. Lookup, storing, eviction and reset are vLLM's code.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class Copies(OffloadingWorker):  # type: ignore[misc]
        """One block of the cache is one chunk of the store."""

        def __init__(self, caches: Any, chunks: int) -> None:
            self._blocks = [each.tensor for each in caches.tensors]
            self._chunks = [each.new_empty((chunks, *each.shape[1:])) for each in self._blocks]
            self._finished: list[Any] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
                chunks[dst_spec.block_ids] = blocks[src_spec.block_ids]
            return self._done(job_id)

        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            for blocks, chunks in zip(self._blocks, self._chunks, strict=True):
                blocks[dst_spec.block_ids] = chunks[src_spec.block_ids]
            return self._done(job_id)

        def _done(self, job_id: int) -> bool:
            self._finished.append(TransferResult(job_id, success=True))
            return True

        def get_finished(self) -> list[Any]:
            finished, self._finished = self._finished, []
            return finished

        def wait(self, job_ids: set[int]) -> None:
            """Every copy has ended when it returns."""

    CPUOffloadingSpec.get_worker = lambda spec, caches: Copies(caches, spec.num_chunks)

"""verl's rollout server calls, request by request, against a fleet behind rlctl's gateway (--dialect sglang).

What verl 0.9.1 sends to an SGLang server around an update (``ServerAdapter``, ``AsyncHttpServerAdapter`` in
``verl/workers/rollout/sglang_rollout``): it releases the KV cache and the weights beside the training, resumes the
weights, writes, flushes, and resumes the KV cache. It neither pauses nor continues. verl writes pickled CUDA IPC
handles, which need GPUs; here the tensors come over a group.

    python examples/integrations/verl/update.py --model DIR \\
        --engine http://127.0.0.1:30000/engines/actor-0=2 --engine http://127.0.0.1:30000/engines/actor-1=1
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_trainer import Engines, broadcast, buckets, described, request, run

GROUP = "verl"


def update(engines: Engines, group: Any, model: Any, step: int) -> None:
    """``release``, ``resume``, ``update_weights``, ``resume``."""
    engines.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    engines.post("/resume_memory_occupation", {"tags": ["weights"]})
    for bucket in buckets(model):
        body = described(bucket) | {"group_name": GROUP, "flush_cache": False, "weight_version": str(step)}
        told = engines.start(
            lambda _, url, body=body: request("POST", f"{url}/update_weights_from_distributed", body)  # type: ignore[misc]
        )
        broadcast(group, [tensor for _, tensor in bucket])
        told()
    engines.flush_until_done()
    engines.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


if __name__ == "__main__":
    run(update, GROUP)

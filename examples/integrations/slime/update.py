"""slime's weight update, request by request, against a fleet behind rlctl's gateway.

What slime's trainer does after every step (THUDM/slime, ``update_weight_from_distributed.py``, ``sglang_engine.py``):
pause without a mode, poll the flush, per bucket tell every engine and broadcast, continue. It knows neither updates nor
sessions, and sends the version with every bucket; rlctl publishes it at the end.

    python examples/integrations/slime/update.py --model DIR \\
        --engine http://127.0.0.1:30000/engines/actor-0=2 --engine http://127.0.0.1:30000/engines/actor-1=1
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_trainer import Engines, broadcast, buckets, described, request, run

GROUP = "slime-pp_0"


def update(engines: Engines, group: Any, model: Any, step: int) -> None:
    """One update."""
    engines.post("/pause_generation", {})
    engines.flush_until_done()
    for bucket in buckets(model):
        body = described(bucket) | {"group_name": GROUP, "flush_cache": False, "weight_version": str(step)}
        told = engines.start(
            lambda _, url, body=body: request("POST", f"{url}/update_weights_from_distributed", body)  # type: ignore[misc]
        )
        broadcast(group, [tensor for _, tensor in bucket])
        told()
    engines.post("/continue_generation", {})


if __name__ == "__main__":
    run(update, GROUP)

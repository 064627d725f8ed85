"""Miles's weight update, request by request, against a fleet behind rlctl's gateway.

What Miles's trainer does after every step (radixark/miles, commit 31f1ca96): pause with retract, flush, open a session,
per bucket tell every engine and broadcast, set the version, close the session, continue.

    python examples/integrations/miles/update.py --model DIR \\
        --engine http://127.0.0.1:30000/engines/actor-0=2 --engine http://127.0.0.1:30000/engines/actor-1=1
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_trainer import Engines, broadcast, buckets, described, request, run

GROUP = "miles-pp_0"


def update(engines: Engines, group: Any, model: Any, step: int) -> None:
    """One update."""
    engines.post("/pause_generation", {"mode": "retract"})
    engines.flush_until_done()
    engines.post("/begin_weight_update", {"selector": "all"})
    for bucket in buckets(model):
        body = described(bucket) | {"group_name": GROUP, "flush_cache": False}
        told = engines.start(
            lambda _, url, body=body: request("POST", f"{url}/update_weights_from_distributed", body)  # type: ignore[misc]
        )
        broadcast(group, [tensor for _, tensor in bucket])
        told()
    engines.post("/update_weight_version", {"new_version": str(step), "abort_all_requests": False})
    engines.post("/end_weight_update", {})
    engines.post("/continue_generation", {})


if __name__ == "__main__":
    run(update, GROUP)

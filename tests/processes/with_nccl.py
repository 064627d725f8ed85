"""An rlctl process: `python -m with_nccl ARGUMENTS`.

With WITH_NCCL set its torch engine offers NCCL groups, also without a GPU: gloo stands in for what moves the bytes.
What is planned, formed, written and committed is as with NCCL.
"""

from __future__ import annotations

import os
from typing import Any


def stand_in() -> None:
    """Let groups of NCCL be made by gloo, in this process."""
    from rlctl_torch import engine

    from rlctl.v1.common_pb2 import TRANSPORT_TORCH_NCCL

    capabilities, join = engine.info.capabilities, engine.TorchEngine.init_weights_update_group

    def offering(*given: Any) -> Any:
        found = capabilities(*given)
        found.transports.append(TRANSPORT_TORCH_NCCL)
        return found

    async def by_gloo(self: Any, request: Any, call: Any) -> Any:
        request.backend = "gloo"
        return await join(self, request, call)

    engine.info.capabilities = offering
    engine.TorchEngine.init_weights_update_group = by_gloo  # type: ignore[method-assign]


def stand_in_at_a_source() -> None:
    """The same for the groups that this process sends over."""
    from rlctl.trainer import source_rank
    from rlctl.weights.group import process_group

    def by_gloo(*given: Any, backend: str, **settings: Any) -> process_group.WeightGroup:
        return process_group.join(*given, backend="gloo", **settings)

    source_rank.join = by_gloo  # type: ignore[assignment]


def main() -> None:
    if os.environ.get("WITH_NCCL"):
        stand_in()
    from rlctl.cli.main import main as rlctl_main

    rlctl_main()


if __name__ == "__main__":
    main()

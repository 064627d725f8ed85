"""A plug-in of vLLM for ranks that fail.

A rank acknowledges a tensor and does not load it, cannot read its disk, fails at the end of a pause, or computes with a
stale weight.

The environment variable LOST names a file with the order: ``NAME@RANK`` for a tensor, ``disk@RANK``, ``pause@RANK``, or
``stale-decode`` for decode steps of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    from rlctl_servers.ranks import sabotage
    from rlctl_vllm.worker.model import VLLMModel
    from vllm.v1.worker.gpu_worker import Worker

    load, reload, synchronize, stale_decode, lost = (
        VLLMModel.load,
        Worker.reload_weights,
        Worker.synchronize_device,
        sabotage.for_decode,
        Path(os.environ["LOST"]),
    )

    def order() -> str:
        return lost.read_text() if lost.exists() else ""

    def losing(self: Any, name: str, tensor: Any) -> None:
        if order() != f"{name}@{self.rank}":
            load(self, name, tensor)

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if order() == f"disk@{self.rank}":
            raise OSError("the disk is gone")
        return reload(self, *arguments, **options)

    def synchronizing(self: Any) -> Any:
        if order() == f"pause@{self.rank}":
            raise RuntimeError("the device is gone")
        return synchronize(self)

    def for_decode(module: Any, decodes: Callable[..., bool]) -> None:
        os.environ[sabotage.VARIABLE] = "stale-decode"
        stale_decode(module, lambda *args, **kwargs: order() == "stale-decode" and decodes(*args, **kwargs))

    Worker.synchronize_device = synchronizing
    VLLMModel.load, Worker.reload_weights, sabotage.for_decode = losing, failing, for_decode  # type: ignore[method-assign]

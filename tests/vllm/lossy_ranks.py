"""A plug-in of vLLM for ranks that fail.

A rank acknowledges an update and does something else, cannot read its disk, fails at the end of a pause, or computes
with a stale weight.

The environment variable LOST names a file with the order: ``drop:NAME@RANK`` (a tensor is not loaded), ``stale:@RANK``
(none is), ``swap:NAME,NAME@RANK`` (two tensors change places), ``flip:NAME@RANK`` (a bit of a tensor changes after the
commit), ``disk@RANK``, ``pause@RANK``, or ``stale-decode`` for decode steps of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    import torch
    from rlctl_servers.ranks import sabotage
    from rlctl_vllm.worker.model import VLLMModel
    from vllm.v1.worker.gpu_worker import Worker

    load, finalize = VLLMModel.load, VLLMModel.finalize_load
    reload, synchronize, stale_decode, lost = (
        Worker.reload_weights,
        Worker.synchronize_device,
        sabotage.for_decode,
        Path(os.environ["LOST"]),
    )

    def order() -> str:
        return lost.read_text() if lost.exists() else ""

    def of(rank: int) -> tuple[str, list[str]]:
        kind, _, rest = order().partition(":")
        names, _, at = rest.rpartition("@")
        return (kind, names.split(",")) if at == str(rank) else ("", [])

    def losing(self: Any, name: str, tensor: Any) -> None:
        kind, names = of(self.rank)
        if kind == "stale" or (kind == "drop" and name in names):
            return
        if kind == "swap" and name in names:
            name = names[1 - names.index(name)]
        load(self, name, tensor)

    def finishing(self: Any, hook: Any) -> None:
        finalize(self, hook)
        kind, names = of(self.rank)
        if kind == "flip":
            path, leaf, _ = self._layer_of(names[0])
            held = self._module.get_submodule(path).get_parameter(leaf).detach()
            held.view(torch.int32)[-1, -1] ^= 1

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
    VLLMModel.load, VLLMModel.finalize_load = losing, finishing  # type: ignore[method-assign]
    Worker.reload_weights, sabotage.for_decode = failing, for_decode

"""Negative controls: a weight update that goes wrong at one rank without a word, to show that verification notices.

Off unless the environment variable RLCTL_SGLANG_SABOTAGE names a file at the server's start. While that file exists and
says ``drop-tensor:NAME@RANK``, tensor-parallel rank RANK acknowledges the checkpoint tensor NAME and does not load it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "RLCTL_SGLANG_SABOTAGE"
MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"


def amend(module: ModuleType) -> None:
    """Let SGLang's updater lose tensors."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    updater = module.WeightUpdater
    for method in ("load_weights_from_distributed", "update_weights_from_tensor"):
        setattr(updater, method, _losing(getattr(updater, method), Path(path)))


def _losing(method: Any, path: Path) -> Any:
    def load(self: Any, named_tensors: Any, *arguments: Any, **named: Any) -> Any:
        try:
            lost, _, rank = path.read_text().strip().removeprefix("drop-tensor:").rpartition("@")
        except FileNotFoundError:
            lost, rank = "", ""
        if rank == str(self.tp_rank):
            named_tensors = [(name, tensor) for name, tensor in named_tensors if name != lost]
        return method(self, named_tensors, *arguments, **named)

    return load

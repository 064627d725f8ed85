"""rlctl's engine of plain torch and transformers: the embedded default and the reference for the others.

Correctness before speed, and nothing beyond continuous batching. :class:`TorchEngine` is the port; see
:mod:`rlctl_torch.step_loop` for the engine thread, :mod:`rlctl_torch.generation.scheduler` for batching,
:mod:`rlctl_torch.model.model` and :mod:`rlctl_torch.model.tensor_parallel` for loading and cutting models,
:mod:`rlctl_torch.verbs.update` for weight updates.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl_torch.engine import TorchEngine

__all__ = ["TorchEngine"]


def __getattr__(name: str) -> Any:
    """Load the engine when it is asked for: its settings can be read without it."""
    if name != "TorchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlctl_torch.engine import TorchEngine

    return TorchEngine

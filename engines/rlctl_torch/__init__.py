"""The reference engine: torch and transformers, tensor parallel, continuous batching. Correctness before speed.

``engine.py`` (``TorchEngine``) implements the Engine interface; ``step_loop.py`` is the engine thread;
``rank.py`` is the state of one rank. Packages: steps, model, generation, requests, verbs, disaggregation.

Imports: rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``engine.py``, then ``step_loop.py`` (``StepLoop``) and ``verbs/update.py`` (the steps of an update).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlctl_torch.engine import TorchEngine

__all__ = ["TorchEngine"]


def __getattr__(name: str) -> Any:
    """Load the engine on first use, because settings can be read without the engine."""
    if name != "TorchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlctl_torch.engine import TorchEngine

    return TorchEngine

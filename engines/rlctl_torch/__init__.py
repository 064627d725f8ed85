"""rlctl's engine of plain torch and transformers: the embedded default and the reference for the others.

Correctness before speed, and nothing beyond continuous batching. :class:`TorchEngine` is the port; see
:mod:`rlctl_torch.loop` for the engine thread, :mod:`rlctl_torch.scheduler` for batching, :mod:`rlctl_torch.model` and
:mod:`rlctl_torch.parallel` for loading and cutting models, :mod:`rlctl_torch.updates` for weight updates.
"""

from rlctl_torch.engine import TorchEngine

__all__ = ["TorchEngine"]

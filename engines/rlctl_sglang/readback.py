"""The model digest of what SGLang holds, from the weights that it tells.

SGLang's own checksums are over its fused parameters: they compare servers of one layout, never with what a trainer
sent. ``/get_weights_by_name`` gives full tensors under checkpoint names, as numbers in JSON; not for every model, not
for tensors that are cut over ranks, and slowly. So it is used for small models only, and only after it has been seen,
on the checkpoint that was just loaded, to give the digest of that checkpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import torch

from rlctl.engine import Call
from rlctl.errors import Reason, RlctlError
from rlctl.weights.checkpoint import open_checkpoint
from rlctl.weights.digest import ModelDigest
from rlctl.weights.tensors import TensorMeta
from rlctl_sglang.checkpoints import digest_of
from rlctl_sglang.control import Control

MOST_ELEMENTS = 4_000_000
"""Largest model that is read back, in elements: about a second for each million."""


class Readback:
    """Digests what one server holds."""

    def __init__(self, control: Control, reference: Mapping[str, TensorMeta]) -> None:
        self._control = control
        self._reference = reference

    async def proves(self, model_path: str, call: Call) -> str:
        """The digest of the checkpoint that the server has just loaded, if reading back gives the same; else "".

        A server at which the digest of weights that are known cannot be had is not asked for that of others.
        """
        if sum(meta.numel for meta in self._reference.values()) > MOST_ELEMENTS:
            return ""
        checkpoint = open_checkpoint(model_path)
        try:
            stored = await asyncio.to_thread(digest_of, checkpoint)
        finally:
            checkpoint.close()
        try:
            held = await self.digest(call)
        except RlctlError:
            return ""
        return stored if held == stored else ""

    async def digest(self, call: Call) -> str:
        """The model digest, hex. Raises ENGINE_FAILED when the server does not give a tensor."""
        digest = ModelDigest()
        for name in sorted(self._reference):
            meta = self._reference[name]
            rows = max(meta.shape[0], 1) if meta.shape else 1
            told = await self._control.ask("/get_weights_by_name", {"name": name, "truncate_size": rows}, call=call)
            digest.add(name, await asyncio.to_thread(_tensor, meta, told))
        return digest.digest()


def _tensor(meta: TensorMeta, told: Any) -> torch.Tensor:
    """The tensor that a list of numbers stands for, in the reference's dtype."""
    try:
        tensor = torch.tensor(told, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Reason.ENGINE_FAILED.error(f"SGLang does not give {meta.name} as numbers") from None
    if tensor.numel() != math.prod(meta.shape):
        raise Reason.ENGINE_FAILED.error(
            f"SGLang gives {meta.name} with shape {tuple(tensor.shape)} instead of {meta.shape}"
        )
    return tensor.reshape(meta.shape).to(meta.dtype)

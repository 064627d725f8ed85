"""The full tensors that SGLang holds, read back: for digests, and to send them to another stage.

SGLang's own checksums are over its fused parameters: they compare servers of one layout, never with what a trainer
sent. On a CPU, where those checksums prove how each rank holds the checkpoint
(:mod:`rlctl_sglang.readback.parameter_layout`), the ranks send their parameters, whatever their number. Elsewhere
``/get_weights_by_name`` gives full tensors under checkpoint names, as numbers in JSON; not for every model, not for
tensors that are cut over ranks, and slowly. Either way it is used only after it has been seen, on the checkpoint that
was just loaded, to give its digest.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.checkpoints import digest_of

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import Shape, TensorDifference, TensorDigest
from rlctl.weights.checkpoint.checkpoint import Checkpoint, open_checkpoint
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name
from rlctl_sglang.readback.broadcast_out import Exporter
from rlctl_sglang.readback.mismatch import Comparing
from rlctl_sglang.readback.parameter_layout import Joining, Parameter, find_out

MOST_AS_NUMBERS = 4_000_000
"""Largest model that is read back as numbers, in elements: about a second for each million."""

MOST = 1_000_000_000
"""Largest model that is read back at all, in elements: nothing is served meanwhile, some seconds for each 4 GB."""

Take = Callable[[str, torch.Tensor, Sequence[tuple[Parameter, torch.Tensor]]], None]
"""Takes a full tensor in, in any thread, with the parameter that it is in as every rank holds it, where that is known;
raises to end the reading.
"""


@dataclass(frozen=True)
class Found:
    """What was read.

    Attributes:
        digest: the model digest, hex.
        digests: each full tensor's, by checkpoint name.
        inconsistent: tensors of which several ranks hold the same part, and not the same bytes.
        differences: how the tensors differ from what was expected, as each rank is to say it; empty: nothing was.
    """

    digest: str
    digests: Mapping[str, str]
    inconsistent: Sequence[str]
    differences: Sequence[TensorDifference] = ()


class Readback:
    """Reads what one server holds. Use :func:`readback_of`."""

    def __init__(self, control: Control, reference: Mapping[str, TensorMeta], ranks: list[list[Parameter]]) -> None:
        """``ranks``: what the ranks hold; empty: it is not known, and weights come as numbers."""
        self._control = control
        self._reference = reference
        self._exporter = Exporter(control, ranks) if ranks else None
        self._ranks = max(len(ranks), 1)
        pieces = [piece.name for parameter in ranks[0] for piece in parameter.pieces] if ranks else sorted(reference)
        # A rank may hold nothing of a tensor.
        self._order = list(dict.fromkeys([*pieces, *reference]))

    @property
    def order(self) -> Sequence[str]:
        """The names, about in the order in which :meth:`read` gives the tensors."""
        return self._order

    async def read(self, take: Take, call: Call) -> Sequence[str]:
        """Every full tensor, of the reference's shape and dtype; returns which are inconsistent.

        Raises GROUP_FAILED, ENGINE_FAILED, ENGINE_WEDGED, and what ``take`` raises.
        """
        if self._exporter is None:
            for name in self._order:
                await asyncio.to_thread(take, name, await self._numbers(self._reference[name], call), ())
            return ()
        joining = Joining(self._reference)

        def join(parts: Sequence[tuple[Parameter, torch.Tensor]]) -> None:
            for name, tensor in joining.join(parts).items():
                take(name, tensor, parts)

        await self._exporter.export(join, call)
        return sorted(joining.inconsistent)

    async def digest(self, call: Call, expected: bytes = b"") -> Found:
        """The model digest; ``expected``: fingerprints that the tensors are compared with. Raises as :meth:`read`."""
        comparing = Comparing(self._reference, expected)
        inconsistent = await self.read(comparing.take, call)
        differences = [comparing.difference(rank) for rank in range(self._ranks)] if expected else ()
        return Found(comparing.digest, comparing.digests, inconsistent, differences)

    def listed(self, found: Found) -> list[TensorDigest]:
        """The digests of all tensors as a report lists them."""
        return [
            TensorDigest(name=name, dtype=dtype_name(meta.dtype), shape=Shape(dims=meta.shape), sha256=sha256)
            for name, sha256 in sorted(found.digests.items())
            if (meta := self._reference[name])
        ]

    async def _numbers(self, meta: TensorMeta, call: Call) -> torch.Tensor:
        rows = max(meta.shape[0], 1) if meta.shape else 1
        told = await self._control.ask("/get_weights_by_name", {"name": meta.name, "truncate_size": rows}, call=call)
        return await asyncio.to_thread(_tensor, meta, told)


async def readback_of(
    control: Control, model_path: str, reference: Mapping[str, TensorMeta], *, ranks: int, exports: bool, call: Call
) -> tuple[Readback | None, str, str]:
    """How a server can be read that has just loaded a checkpoint, that checkpoint's digest, hex, and the one that was
    read, where that is another one.

    None, "": it cannot be: a server at which the digest of weights that are known cannot be had is not asked for that
    of others. ``exports``: its ranks can send what they hold, and their checksums say what that is.
    """
    size = sum(meta.numel for meta in reference.values())
    if size > MOST:
        return None, "", ""
    checkpoint = open_checkpoint(model_path)
    try:
        held = await _held(control, checkpoint, call) if exports else []
        if not held and (ranks > 1 or size > MOST_AS_NUMBERS):
            return None, "", ""
        stored = await asyncio.to_thread(digest_of, checkpoint)
    finally:
        checkpoint.close()
    readback = Readback(control, reference, held)
    try:
        found = await readback.digest(call)
    except RlctlError as error:
        if error.reason is Reason.ENGINE_WEDGED:
            raise
        return None, "", ""
    if (found.digest, list(found.inconsistent)) == (stored, []):
        return readback, stored, ""
    return None, "", found.digest


async def _held(control: Control, checkpoint: Checkpoint, call: Call) -> list[list[Parameter]]:
    told = await control.ask("/weights_checker", {"action": "checksum"}, call=call)
    ranks = sorted(told["ranks"], key=lambda rank: int(rank["parallelism_info"][0]["tp_rank"]))
    checksums = [rank["checksums"] for rank in ranks]
    return await asyncio.to_thread(find_out, checksums, checkpoint.metas, checkpoint.read)


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

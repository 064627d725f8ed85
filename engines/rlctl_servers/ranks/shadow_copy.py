"""A second copy of the parameters that an update writes: filled while the engine generates, copied at the commit.

The copy goes into the memory that the engine computes with, so addresses stay valid for CUDA graphs and views.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.shards.shard_map import ShardMap
from rlctl_servers.ranks.element_codes import bits_of
from rlctl_servers.ranks.host_memory import available_bytes

log = logging.getLogger(__name__)

Parameters = Callable[[], Mapping[str, torch.Tensor]]
"""The parameters of the written tensors, by name, each memory once, as they are in memory now."""

Bind = Callable[[Mapping[str, torch.Tensor]], ShardMap]
"""The parts of the checkpoint's tensors in parameters of the same forms. Raises INTERNAL for other forms."""

RESERVE = 10
"""Divisor of a device's memory. A copy leaves this fraction free, since the engine's steps allocate as well."""


class ShadowCopy:
    """The copy. :meth:`allocate` runs beside generation, :meth:`swap` between two steps.

    Attributes:
        shards: the parts of the checkpoint's tensors in the copy; empty before :meth:`allocate`.
    """

    def __init__(self, parameters: Parameters, bind: Bind, *, device: torch.device, ranks: int) -> None:
        """``ranks``: number of ranks that share the host's memory. Raises INTERNAL for parameters of other forms."""
        bind(parameters())
        self.shards = ShardMap({})
        self._parameters = parameters
        self._bind = bind
        self._device = device
        self._ranks = ranks
        self._copies: dict[str, torch.Tensor] = {}

    def allocate(self, proceed: Callable[[], None]) -> None:
        """Allocate memory and copy the present weights: an update may leave elements unchanged.

        ``proceed`` raises if the copy is no longer needed. Raises MEMORY_FULL.
        """
        parameters = self._parameters()
        device, pinned = self._place(sum(tensor.nbytes for tensor in parameters.values()))
        try:
            for name, tensor in parameters.items():
                proceed()
                self._copies[name] = _like(tensor, device, pinned=pinned).copy_(tensor)
        except RuntimeError as error:
            self._copies.clear()
            raise _too_large(str(error).splitlines()[0]) from error
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.shards = self._bind(self._copies)

    def targets(self) -> dict[str, torch.Tensor]:
        """Return the memory that the engine computes with. Raises INTERNAL if its form is not that of the copy."""
        parameters = self._parameters()
        self._bind(parameters)
        return {name: parameters[name] for name in self._copies}

    def swap(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy everything into the memory of :meth:`targets`, and compare if that takes no transfer.

        The digest is that of the copy; the comparison extends it to the weights. Raises INTERNAL.
        """
        for name, target in targets.items():
            target.copy_(self._copies[name], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for name, target in targets.items():
            copy = self._copies[name]
            if copy.device == target.device and not torch.equal(bits_of(target), bits_of(copy)):
                raise Reason.INTERNAL.error(f"the parameter {name} differs from the shadow copy after the swap")

    def _place(self, nbytes: int) -> tuple[torch.device, bool]:
        """Choose a place with room: the parameters' device, else page-locked memory of the host."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            if nbytes + total // RESERVE <= free:
                return self._device, False
            log.info("rlctl: %d bytes are free on %s; the shadow copy is in the host's memory", free, self._device)
        room = available_bytes() // self._ranks
        if nbytes > room - room // RESERVE:
            raise _too_large(f"{nbytes} bytes are needed, {room} of the host's memory are available for each rank")
        return torch.device("cpu"), self._device.type == "cuda"


def _like(tensor: torch.Tensor, device: torch.device, *, pinned: bool) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned, requires_grad=False
    )


def _too_large(cause: str) -> RlctlError:
    return Reason.MEMORY_FULL.error(
        f"there is no room for a shadow copy: {cause}",
        field="apply",
        next_step="Update in place, or leave more memory free on the device or the host.",
    )

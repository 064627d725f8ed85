"""Numbers as digits that survive every copy and every cast of a loader.

A digit is a small integer. An integer up to 2/eps is exact in a float dtype: 256 in bfloat16, 16 in float8_e4m3fn.
Digits may be negative, so the base is nearly twice as large: 513 for bfloat16, 33 for float8_e4m3fn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rlctl.weights.tensor.tensors import TensorMeta

INVALID = torch.iinfo(torch.int64).min
"""A decoded value that is no digit."""

_LIMIT = 1 << 24
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16} | {
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encodable(dtype: torch.dtype) -> bool:
    """Return whether a dtype can contain digits. False for bool, complex, powers of two and packed dtypes."""
    return dtype in _INTEGERS or dtype in _FLOATS


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bit patterns as a view, to compare NaN and dtypes without arithmetic."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


@dataclass(frozen=True)
class Code:
    """Integers in a positional system with digits from ``low`` to ``high``; 0 has the digits 0.

    Attributes:
        low: smallest digit, at most 0.
        high: largest digit, at least 1.
    """

    low: int
    high: int

    @classmethod
    def exact_in(cls, dtypes: Iterable[torch.dtype]) -> Code:
        """Return the largest code with digits that are exact in all these dtypes. Each dtype must be encodable."""
        low, high = -_LIMIT, _LIMIT
        for dtype in dtypes:
            if dtype in _INTEGERS:
                low, high = max(low, torch.iinfo(dtype).min), min(high, torch.iinfo(dtype).max)
            else:
                exact = int(2 / torch.finfo(dtype).eps)
                low, high = max(low, -exact), min(high, exact)
        return cls(low, high)

    @property
    def base(self) -> int:
        return self.high - self.low + 1

    def length(self, largest: int) -> int:
        """Return the number of digits of the integers from 0 to ``largest``; 0 for 0 alone."""
        count = reach = 0
        while reach < largest:
            reach = reach * self.base + self.high
            count += 1
        return count

    def index_length(self, size: int) -> int:
        """Return the number of digits of ``size`` indices from :meth:`first_index` on; 0 for a single index."""
        count = 0
        while self.base**count < size:
            count += 1
        return count

    def first_index(self, length: int) -> int:
        """Return the smallest integer of ``length`` digits. It represents index 0, so that indices use all digits."""
        return self.low * sum(int(self.base**place) for place in range(length))

    def digit(self, numbers: torch.Tensor, place: int) -> torch.Tensor:
        """Return the digit of each number at a place, from 0 for the lowest."""
        for _ in range(place):
            numbers = (numbers - self._ones(numbers)) // self.base
        return self._ones(numbers)

    def decode(self, values: torch.Tensor) -> torch.Tensor:
        """Return digits as int64 on the CPU; INVALID for a value that is no digit."""
        exact = values.detach().to("cpu", torch.float64).clamp(self.low - 1, self.high + 1).nan_to_num(self.high + 1)
        digits = exact.to(torch.int64)
        valid = (exact == digits) & (exact >= self.low) & (exact <= self.high)
        return digits if bool(valid.all()) else digits.masked_fill(~valid, INVALID)

    def _ones(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.remainder(numbers - self.low, self.base) + self.low


def constant(meta: TensorMeta, value: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of this description filled with a digit, or with zero bits if its dtype cannot contain digits."""
    if not encodable(meta.dtype):
        size = (*meta.shape, meta.dtype.itemsize)
        return torch.zeros(size, dtype=torch.uint8, device=device).view(meta.dtype).view(meta.shape)
    scalar = torch.full((), value, dtype=torch.float64, device=device).to(meta.dtype)
    return scalar.expand(meta.shape).clone(memory_format=torch.contiguous_format)


def ramp(meta: TensorMeta, dim: int, digits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of this description. Each element contains the digit of its index along ``dim``."""
    line = digits.to(device, torch.float64).to(meta.dtype)
    line = line.view([-1 if axis == dim else 1 for axis in range(len(meta.shape))])
    return line.expand(meta.shape).clone(memory_format=torch.contiguous_format)

"""Patterns of digits in parameters, compared element by element and kept in little memory.

A :class:`Grid` is a parameter with values that change only along a few planes of each dimension. A :class:`Region` is
the part of a parameter that comes from a single checkpoint tensor, and becomes the :class:`Piece` objects of that
tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy
import torch

from rlctl.weights.tensor.slices import Slice
from rlctl_servers.ranks.element_codes import INVALID, bits_of

MOST_CELLS = 1 << 20
"""Largest number of cells of a grid. A parameter with more cells is no pattern of boxes."""
MOST_REGIONS = 1 << 16
"""Largest number of regions of a parameter."""
MOST_POSITIONS = 1 << 22
"""Largest number of positions that the index along a dimension of a tensor may depend on."""
MOST_PIECES = 256
"""Largest number of pieces of a tensor."""
_CHUNK = 1 << 24

Array: TypeAlias = numpy.ndarray
Decode = Callable[[torch.Tensor], torch.Tensor]


class NotLinear(Exception):
    """Elements of a tensor lie in no pattern of strided boxes."""


@dataclass(frozen=True)
class Grid:
    """Values that are constant in each cell of a rectangular grid over a parameter.

    Attributes:
        starts: first index of each cell, by dimension.
        values: value of each cell.
    """

    starts: tuple[Array, ...]
    values: Array

    @classmethod
    def of(cls, parameter: torch.Tensor, decode: Decode) -> Grid | None:
        """Return the coarsest grid of a parameter's digits, or None for too many cells. Every element is compared."""
        bits = bits_of(parameter)
        starts: list[torch.Tensor] = []
        cells = 1
        for dim in range(bits.ndim):
            changes = _changes(bits, dim).nonzero().flatten() + 1
            starts.append(torch.cat([changes.new_zeros(1), changes]))
            cells *= len(starts[dim])
            if cells > MOST_CELLS:
                return None
        corners = parameter
        for dim, indices in enumerate(starts):
            corners = bits_of(corners).index_select(dim, indices).view(parameter.dtype)
        return cls(tuple(each.cpu().numpy() for each in starts), decode(corners).numpy())

    def refined(self, starts: Sequence[Array]) -> Array:
        values = self.values
        for dim, (coarse, finer) in enumerate(zip(self.starts, starts, strict=True)):
            values = values.take(numpy.searchsorted(coarse, finer, side="right") - 1, axis=dim)
        return values


def join(digits: Sequence[Grid], base: int) -> Grid | None:
    """Return the grid of the numbers with these digits, INVALID for an invalid digit. None: too many cells."""
    starts = [
        numpy.unique(numpy.concatenate([grid.starts[dim] for grid in digits])) for dim in range(len(digits[0].starts))
    ]
    if math.prod(len(each) for each in starts) > MOST_CELLS:
        return None
    refined = [grid.refined(starts) for grid in digits]
    invalid = numpy.logical_or.reduce([each == INVALID for each in refined])
    total = sum(numpy.where(invalid, 0, each) * base**place for place, each in enumerate(refined))
    return Grid(tuple(starts), numpy.where(invalid, INVALID, total))


@dataclass(frozen=True)
class Axis:
    """Indices of a dimension of a parameter: an arithmetic progression.

    Attributes:
        start: first index.
        step: difference of two indices.
        count: number of indices.
    """

    start: int
    step: int
    count: int

    def of(self, dim: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor with these indices of a dimension."""
        if (self.start, self.step, self.count) == (0, 1, tensor.shape[dim]):
            return tensor
        part = tensor.narrow(dim, self.start, (self.count - 1) * self.step + 1)
        return part if self.step == 1 else part[(slice(None),) * dim + (slice(None, None, self.step),)]


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint tensor and its place at a rank.

    Attributes:
        parameter: name of the parameter.
        offset: distance of the box's first element from the parameter's first element, in the storage.
        start: first index of the box, by dimension of the tensor.
        size: number of indices of the box, by dimension of the tensor.
        stride: distance of two elements in the storage, by dimension of the tensor.
    """

    parameter: str
    offset: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of the parameter."""
        return parameter.as_strided(self.size, self.stride, parameter.storage_offset() + self.offset)

    def slice(self, shape: tuple[int, ...]) -> Slice | None:
        """Return the box as a slice of a tensor of this shape, or None if it is cut along several dimensions."""
        cut = [dim for dim, length in enumerate(shape) if self.size[dim] != length]
        if len(cut) > 1:
            return None
        return Slice(cut[0], self.start[cut[0]], self.size[cut[0]]) if cut else Slice()


@dataclass
class Region:
    """The part of a parameter that comes from a single tensor.

    Attributes:
        parameter: name of the parameter.
        number: number of the tensor; 0: no tensor, INVALID: values that no loaded tensor has.
        axes: indices of the part, by dimension of the parameter.
        indices: index of each element in the tensor, by dimension of the tensor. An array has the dimensions of the
            part, and length 1 along each dimension without effect on the index.
        failure: why the part is not linear; empty while it may be.
    """

    parameter: str
    number: int
    axes: tuple[Axis, ...]
    indices: dict[int, Array] = field(default_factory=dict)
    failure: str = ""

    def add_digits(self, parameter: torch.Tensor, dim: int, weight: int, shift: int, decode: Decode) -> None:
        """Read the digits of the index along ``dim``. Every element is compared.

        ``weight``: value of a 1 at the digits' place. ``shift``: number that is added to the index.
        """
        if self.failure:
            return
        for axis, each in enumerate(self.axes):
            parameter = each.of(axis, parameter)
        line = _independent_part(parameter)
        if line.numel() > MOST_POSITIONS:
            self.failure = f"the index along dimension {dim} follows no dimension of {self.parameter}"
            return
        digits = decode(line).numpy()
        if (digits == INVALID).any():
            self.failure = f"{self.parameter} contains other values than were loaded"
            return
        self.indices[dim] = self.indices.get(dim, 0) + digits * weight + shift

    def pieces(self, shape: tuple[int, ...], strides: Sequence[int]) -> Iterator[Piece]:
        """Yield the part as boxes of a tensor of this shape. ``strides``: of the parameter. Raises NotLinear."""
        if self.failure:
            raise NotLinear(self.failure)
        for dim, length in enumerate(shape):
            index = self.indices.setdefault(dim, numpy.zeros((1,) * len(self.axes), numpy.int64))
            if index.min() < 0 or index.max() >= length:
                raise NotLinear(f"{self.parameter} contains other values than were loaded")
        base = sum(axis.start * stride for axis, stride in zip(self.axes, strides, strict=True))
        steps = [axis.step * stride for axis, stride in zip(self.axes, strides, strict=True)]
        choices = [self._boxes(axes, dims, steps) for axes, dims in self._components(len(shape))]
        if math.prod(len(each) for each in choices) > MOST_PIECES:
            raise NotLinear(f"{self.parameter} contains it in more than {MOST_PIECES} pieces")
        for choice in itertools.product(*choices):
            spans = {dim: span for box in choice for dim, span in box.spans.items()}
            start, size, stride = zip(*(spans[dim] for dim in range(len(shape))), strict=True) if shape else ((),) * 3
            yield Piece(self.parameter, base + sum(box.offset for box in choice), start, size, stride)

    def _components(self, dims: int) -> list[tuple[list[int], list[int]]]:
        """Group the dimensions of the parameter and of the tensor such that no index depends on two groups."""
        groups: list[tuple[list[int], list[int]]] = [
            ([axis], []) for axis, each in enumerate(self.axes) if each.count > 1
        ]
        for dim in range(dims):
            depends = {axis for axis, length in enumerate(self.indices[dim].shape) if length > 1}
            joined = [group for group in groups if depends & set(group[0])]
            groups = [group for group in groups if group not in joined]
            axes = sorted(axis for group in joined for axis in group[0])
            groups.append((axes, [*(other for group in joined for other in group[1]), dim]))
        return groups

    def _boxes(self, axes: list[int], dims: list[int], steps: Sequence[int]) -> list[_Box]:
        if len(axes) == len(dims) == 1 and steps[axes[0]] > 0:
            line = self.indices[dims[0]].reshape(-1)
            if (line[1:] - line[:-1] == 1).all():
                return [_Box(0, {dims[0]: (int(line[0]), len(line), steps[axes[0]])})]
        counts = [self.axes[axis].count for axis in axes]
        if math.prod(counts) > MOST_POSITIONS:
            raise NotLinear(f"too many dimensions of {self.parameter} depend on each other")
        offsets = numpy.zeros(counts, numpy.int64)
        for place, axis in enumerate(axes):
            line = numpy.arange(counts[place]) * steps[axis]
            offsets += line.reshape([-1 if axis_place == place else 1 for axis_place in range(len(axes))])
        other_axes = [axis for axis in range(len(self.axes)) if axis not in axes]
        indices = [
            numpy.broadcast_to(numpy.squeeze(self.indices[dim], tuple(other_axes)), counts).reshape(-1) for dim in dims
        ]
        offsets = offsets.reshape(-1)
        if not dims:
            if len(offsets) > MOST_PIECES:
                raise NotLinear(f"{self.parameter} contains it more than {MOST_PIECES} times")
            return [_Box(int(offset), {}) for offset in offsets]
        if len(dims) == 1:
            return [_Box(offset, {dims[0]: span}) for offset, span in self._runs(indices[0], offsets)]
        return [self._joint_box(dims, indices, offsets)]

    def _runs(self, index: Array, offsets: Array) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield runs of a dimension: offset, and start, length and stride. A repeated index starts a further run."""
        order = numpy.lexsort((offsets, index))
        index, offsets = index[order], offsets[order]
        first = numpy.searchsorted(index, index, side="left")
        repetition = numpy.arange(len(index)) - first
        layers = int(repetition.max()) + 1
        if layers > MOST_PIECES:
            raise NotLinear(f"{self.parameter} contains it more than {MOST_PIECES} times")
        count = 0
        for layer in range(layers):
            chosen = repetition == layer
            for start, stop in _progressions(index[chosen], offsets[chosen]):
                count += 1
                if count > MOST_PIECES:
                    raise NotLinear(f"{self.parameter} contains it in more than {MOST_PIECES} pieces")
                at, where = index[chosen][start:stop], offsets[chosen][start:stop]
                stride = int(where[1] - where[0]) if len(where) > 1 else 1
                yield int(where[0]), (int(at[0]), len(at), stride)

    def _joint_box(self, dims: list[int], indices: list[Array], offsets: Array) -> _Box:
        """Return the single box of several tensor dimensions that depend on the same dimensions of the parameter."""
        starts = [int(index.min()) for index in indices]
        sizes = [int(index.max()) - start + 1 for index, start in zip(indices, starts, strict=True)]
        failure = NotLinear(f"dimensions {dims} are no box of {self.parameter}")
        if math.prod(sizes) != len(offsets):
            raise failure
        flat = numpy.ravel_multi_index([i - s for i, s in zip(indices, starts, strict=True)], sizes)
        places = numpy.full(len(offsets), -1, numpy.int64)
        places[flat] = offsets
        if places.min() < 0:
            raise failure
        table = places.reshape(sizes)
        origin = int(table.flat[0])
        strides = [
            int(table.take(1, axis=place).flat[0]) - origin if size > 1 else 1 for place, size in enumerate(sizes)
        ]
        expected = numpy.full((1,) * len(sizes), origin, numpy.int64)
        for place, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            line = numpy.arange(size) * stride
            expected = expected + line.reshape([-1 if each == place else 1 for each in range(len(sizes))])
        if min(strides) < 0 or (table != expected).any():
            raise failure
        return _Box(origin, dict(zip(dims, zip(starts, sizes, strides, strict=True), strict=True)))


@dataclass(frozen=True)
class _Box:
    """Start, size and stride of some dimensions of a tensor, and their offset."""

    offset: int
    spans: dict[int, tuple[int, int, int]]


def fingerprint(tensor: torch.Tensor) -> int:
    """Return the sum of the bit patterns, a number that in all likelihood changes with the contents."""
    bits = bits_of(tensor)
    if bits.is_contiguous() and bits.nbytes % 8 == bits.storage_offset() * bits.element_size() % 8 == 0:
        return int(bits.flatten().view(torch.int64).sum())
    # torch converts all addends first; in chunks that takes little memory.
    return sum(int(bits[start:stop].sum(dtype=torch.int64)) for start, stop in _chunks(bits))


def regions(parameter: str, numbers: Grid, shape: tuple[int, ...]) -> list[Region] | None:
    """Return the parts of a parameter, by number, or None for too many. Values that are no number have INVALID."""
    values = numbers.values
    axes: list[list[list[Axis]]] = []
    for dim, starts in enumerate(numbers.starts):
        values, classes = _distinct(values, dim)
        if values.size > MOST_REGIONS:
            return None
        by_position = numpy.repeat(classes, numpy.diff(numpy.append(starts, shape[dim])))
        order = numpy.argsort(by_position, kind="stable")
        parts = numpy.split(order, numpy.cumsum(numpy.bincount(by_position))[:-1])
        axes.append([list(_axes(part)) for part in parts])
    result: list[Region] = []
    for cell in numpy.ndindex(*values.shape):
        choices = [axes[dim][place] for dim, place in enumerate(cell)]
        if len(result) + math.prod(len(each) for each in choices) > MOST_REGIONS:
            return None
        result += [Region(parameter, int(values[cell]), choice) for choice in itertools.product(*choices)]
    return result


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces, adjacent pieces joined if the result is a single view."""
    result = list(pieces)
    for dim in range(len(result[0].size) if result else 0):
        waiting = sorted(result, key=lambda piece: (piece.parameter, piece.start[dim], piece.offset))
        result = []
        for piece in waiting:
            for place, existing in enumerate(result):
                joined = _joined(existing, piece, dim)
                if joined is not None:
                    result[place] = joined
                    break
            else:
                result.append(piece)
    return sorted(result, key=lambda piece: (piece.start, piece.parameter, piece.offset))


def _joined(one: Piece, two: Piece, dim: int) -> Piece | None:
    if one.parameter != two.parameter or one.start[dim] + one.size[dim] != two.start[dim]:
        return None
    for axis in range(len(one.size)):
        if axis != dim and (
            (one.start[axis], one.size[axis]) != (two.start[axis], two.size[axis])
            or (one.size[axis] > 1 and one.stride[axis] != two.stride[axis])
        ):
            return None
    strides = {piece.stride[dim] for piece in (one, two) if piece.size[dim] > 1} or {two.offset - one.offset}
    stride = strides.pop()
    if strides or stride <= 0 or two.offset != one.offset + one.size[dim] * stride:
        return None
    size = (*one.size[:dim], one.size[dim] + two.size[dim], *one.size[dim + 1 :])
    return Piece(one.parameter, one.offset, one.start, size, (*one.stride[:dim], stride, *one.stride[dim + 1 :]))


def _progressions(index: Array, offsets: Array) -> Iterator[tuple[int, int]]:
    """Yield start and stop of runs in which the index grows by 1 and the offset by a constant that is not negative."""
    steps = numpy.diff(offsets)
    steps[(numpy.diff(index) != 1) | (steps < 0)] = -1
    start = 0
    while start < len(index):
        stop = start + 1
        if start < len(steps) and steps[start] >= 0:
            changes = numpy.flatnonzero(steps[start:] != steps[start])
            stop = start + (int(changes[0]) if len(changes) else len(steps) - start) + 1
        yield start, stop
        start = stop


def _axes(positions: Array) -> Iterator[Axis]:
    """Yield ascending indices as arithmetic progressions."""
    start = 0
    steps = numpy.diff(positions)
    while start < len(positions):
        length, step = 1, 1
        if start < len(steps):
            step = int(steps[start])
            changes = numpy.flatnonzero(steps[start:] != step)
            length = (int(changes[0]) if len(changes) else len(steps) - start) + 1
        yield Axis(int(positions[start]), step, length)
        start += length


def _distinct(values: Array, dim: int) -> tuple[Array, Array]:
    """Return the distinct slices along a dimension, and the class of each slice."""
    rows = numpy.moveaxis(values, dim, 0).reshape(values.shape[dim], -1)
    _, firsts, classes = numpy.unique(rows, axis=0, return_index=True, return_inverse=True)
    return values.take(firsts, axis=dim), classes.reshape(-1)


def _changes(bits: torch.Tensor, dim: int) -> torch.Tensor:
    """Return whether any element differs from its predecessor along a dimension, by index less 1."""
    length = bits.shape[dim] - 1
    elements, predecessors = bits.narrow(dim, 1, length), bits.narrow(dim, 0, length)
    result = torch.zeros(length, dtype=torch.bool, device=bits.device)
    for start, stop in _chunks(bits):
        first, second = elements[start:stop], predecessors[start:stop]
        if torch.equal(first, second):
            continue
        differs = first != second
        other_dims = [axis for axis in range(differs.ndim) if axis != dim]
        differs = differs.any(dim=other_dims) if other_dims else differs
        if dim:
            result |= differs
        else:
            result[start : start + len(differs)] = differs
    return result


def _independent_part(part: torch.Tensor) -> torch.Tensor:
    """Return the part at index 0 of every dimension that its elements do not depend on. Every element is compared."""
    bits = bits_of(part)
    first = bits[(0,) * bits.ndim]
    corner = [bits[(0,) * dim + (slice(None),) + (0,) * (bits.ndim - dim - 1)] for dim in range(bits.ndim)]
    depends = [len(line) > 1 and not torch.equal(line, first.expand_as(line)) for line in corner]
    if not _repeats(bits, depends):
        depends = [not _repeats(bits, [axis != dim for axis in range(bits.ndim)]) for dim in range(bits.ndim)]
    for dim, dependent in enumerate(depends):
        part = part if dependent else part.narrow(dim, 0, 1)
    return part


def _repeats(bits: torch.Tensor, depends: Sequence[bool]) -> bool:
    """Return whether the elements depend on these dimensions only."""
    expected = bits
    for dim, dependent in enumerate(depends):
        expected = expected if dependent else expected.narrow(dim, 0, 1)
    expected = expected.expand_as(bits)
    return all(torch.equal(bits[start:stop], expected[start:stop]) for start, stop in _chunks(bits))


def _chunks(bits: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of dimension 0 of about ``_CHUNK`` elements."""
    rows = max(1, _CHUNK // max(1, bits[0].numel()))
    for start in range(0, len(bits), rows):
        yield start, min(len(bits), start + rows)

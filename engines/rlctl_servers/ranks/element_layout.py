"""The place of each element of each checkpoint tensor in the parameters of one rank.

:func:`find_layout` loads tensors whose elements contain their own position, through the engine's loaders, and reads the
parameters. No knowledge of the engine is needed: fused, cut, transposed, padded, interleaved and expert layouts come
out of the same procedure. The result (:class:`Layout`) is plain data, and gives views of the parameters.

**Everything that the loaders write is overwritten**, padding included. The caller loads the true weights again.
Parameters that no loader writes keep their values.

Passes. Each pass loads every tensor once, in turn; nothing of the size of the model is stored.

1. A probe with a constant. Parameters that change belong to the loaders, and are then filled with zeros.
2. The tensors' numbers, from 1 on, one digit in each pass. 0 remains in padding, which no loader writes.
3. The index along each dimension of each tensor, one digit in each pass.

A digit is exact in every dtype of the reference and of the parameters (:mod:`.element_codes`). The base is 513 for
bfloat16: 131,584 tensors have two digits, 263,169 indices as well. So a model whose largest tensor is 151,936 x 4,096
takes 1 + 2 + 4 passes. The base is 33 if any parameter is float8_e4m3fn: 17,968 tensors have three digits, 35,937
indices as well. The number of passes depends on the reference and on the parameters' dtypes only.

Exactness. Nothing is inferred from samples. After a pass of numbers, a parameter is split where any two neighbouring
elements differ. So every element of a cell has the number of its cell. After a pass of indices, each part of a
parameter is compared, element by element, with its digits along the dimensions of the index. So each element of a view
has the tensor's number, and its index along every dimension. A layout that is no pattern of strided boxes, or values
that are no digits, give an :class:`Omission`. An engine that computes with loaded values may turn digits into other
valid digits. This is not noticed here, but by the digest of the true weights, which is computed through the views.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.weights.tensor.slices import Shard
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_servers.ranks.element_codes import INVALID, Code, bits_of, constant, encodable, ramp
from rlctl_servers.ranks.element_regions import Grid, NotLinear, Piece, Region, fingerprint, join, merged, regions

LoadAll = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""Loads full tensors by checkpoint name, like a load of a whole checkpoint with the engine's steps around it."""
Parameters = Callable[[], Mapping[str, torch.Tensor]]
"""The tensors of the rank that loaders write, by name, as they are in memory now."""

_SAMPLES = 4096


class Omitted(enum.Enum):
    """Reasons for a tensor without views."""

    ABSENT = "absent"
    """No parameter of this rank contains an element of the tensor."""
    UNSEEN = "unseen"
    """No element of the tensor was seen, but some parameters contain values that no tensor explains."""
    NOT_LINEAR = "not linear"
    """Its elements form no pattern of strided boxes: repacked, quantised or permuted."""
    CUT_TWICE = "cut twice"
    """The rank stores a part that is cut along several dimensions, and so is no slice."""
    NOT_ENCODABLE = "not encodable"
    """Its dtype cannot contain digits."""


@dataclass(frozen=True)
class Omission:
    """A tensor without views.

    Attributes:
        kind: reason for programs.
        text: reason for people.
    """

    kind: Omitted
    text: str


@dataclass(frozen=True)
class ParameterForm:
    """The shape, strides and dtype that pieces need in a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: torch.Tensor) -> ParameterForm:
        return cls(tuple(parameter.shape), parameter.stride(), parameter.dtype)


@dataclass(frozen=True)
class Layout:
    """Places of the checkpoint's tensors at one rank. Valid while the parameters keep names, shapes and strides.

    Attributes:
        metas: the reference.
        pieces: the boxes of each tensor at this rank. Several: disjoint parts, or copies (equal ``start``, ``size``).
        omissions: the tensors without pieces.
        parameters: forms of the parameters, each memory once.
    """

    metas: Mapping[str, TensorMeta]
    pieces: Mapping[str, tuple[Piece, ...]]
    omissions: Mapping[str, Omission]
    parameters: Mapping[str, ParameterForm]

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
        """Return the tensors of a single piece, as views of these parameters. Raises as :meth:`bind_all`."""
        return {name: shards[0] for name, shards in self.bind_all(parameters).items() if len(shards) == 1}

    def bind_all(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[Shard, ...]]:
        """Return all pieces as views of these parameters.

        Raises INTERNAL if a parameter is missing or has a different form.
        """
        for name in {piece.parameter for pieces in self.pieces.values() for piece in pieces}:
            form = ParameterForm.of(parameters[name]) if name in parameters else None
            if form != self.parameters[name]:
                raise Reason.INTERNAL.error(
                    f"the parameter {name} is now {form} instead of {self.parameters[name]}",
                    next_step="Find the layout again.",
                )
        return {
            name: tuple(self._shard(self.metas[name], piece, parameters[piece.parameter]) for piece in pieces)
            for name, pieces in self.pieces.items()
        }

    def _shard(self, meta: TensorMeta, piece: Piece, parameter: torch.Tensor) -> Shard:
        part = piece.slice(meta.shape)
        assert part is not None  # find_layout omits the others
        return Shard(meta, piece.view(parameter.detach()), part)


def find_layout(
    reference: Mapping[str, TensorMeta],
    load_all: LoadAll,
    parameters: Parameters,
    *,
    aliases: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
) -> Layout:
    """Find the places of the reference's tensors at this rank. Overwrites the weights.

    ``aliases``: names of tied tensors, each with the name of its representative. ``device``: device of the loaded
    tensors. Raises ENGINE_FAILED, or the loaders' own RlctlError, with outcome DIRTY if loading fails.
    """
    rank = _Rank(list(reference.values()), load_all, parameters, torch.device(device))
    loaded = rank.probe()
    while True:
        layout = _Search(rank, loaded).run(aliases or {})
        late = rank.changed(besides=loaded)
        if not late:
            return layout
        loaded |= late  # contained the probe's constant by chance


Encode = Callable[[int, TensorMeta], torch.Tensor]
"""Tensor number and description → the tensor to load."""


class _Rank:
    """Loads and reads of one rank.

    Attributes:
        metas: the reference; a tensor's number is its place plus 1.
        device: device of the loaded tensors.
        forms: the searched parameters, each memory once.
    """

    def __init__(
        self, metas: Sequence[TensorMeta], load_all: LoadAll, parameters: Parameters, device: torch.device
    ) -> None:
        self.metas = metas
        self.device = device
        self.forms: dict[str, ParameterForm] = {}
        self._load_all = load_all
        self._parameters = parameters
        places = set()
        for name, tensor in parameters().items():
            if _searchable(tensor):
                form = ParameterForm.of(tensor)
                place = (tensor.device, tensor.data_ptr(), form)
                if place not in places:
                    places.add(place)
                    self.forms[name] = form
        self._sums = self._fingerprints()

    def code(self, names: Iterable[str]) -> Code:
        """Return the digits for the reference and these parameters."""
        dtypes = {meta.dtype for meta in self.metas if encodable(meta.dtype)}
        return Code.exact_in(dtypes | {self.forms[name].dtype for name in names})

    def probe(self) -> set[str]:
        """Load a constant, and return the parameters that changed."""
        high = self.code(self.forms).high
        with self.read_after(lambda _number, meta: constant(meta, high, self.device)):
            return self.changed()

    def changed(self, besides: Set[str] = frozenset()) -> set[str]:
        """Return the parameters, except ``besides``, with other contents than at the start."""
        return {name for name, total in self._fingerprints(besides).items() if total != self._sums[name]}

    def now(self) -> dict[str, torch.Tensor]:
        """Return the parameters in memory, each with at least one dimension and each element once."""
        parameters = self._parameters()
        result = {}
        for name, form in self.forms.items():
            tensor = parameters.get(name)
            if tensor is None or ParameterForm.of(tensor) != form:
                raise Reason.INTERNAL.error(
                    f"the parameter {name} lost its form {form} by a load", outcome=OUTCOME_DIRTY
                )
            result[name] = _normal(tensor)
        return result

    @contextlib.contextmanager
    def read_after(self, encode: Encode) -> Iterator[None]:
        """Load every tensor as encoded, for the reading inside the context."""
        loading = ""

        def encoded() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal loading
            for number, meta in enumerate(self.metas, start=1):
                loading = meta.name
                yield meta.name, encode(number, meta)

        try:
            self._load_all(encoded())
        except RlctlError as error:
            error.outcome = OUTCOME_DIRTY
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise Reason.ENGINE_FAILED.error(
                f"the engine's loaders failed in a load of encoded tensors, at {loading!r}: {cause}",
                next_step="Load the checkpoint again.",
                outcome=OUTCOME_DIRTY,
            ) from error
        with torch.inference_mode():
            yield

    def _fingerprints(self, besides: Set[str] = frozenset()) -> dict[str, int]:
        return {name: fingerprint(tensor) for name, tensor in self.now().items() if name not in besides}


class _Search:
    """One search in the parameters that loaders write."""

    def __init__(self, rank: _Rank, loaded: set[str]) -> None:
        self.code = rank.code(loaded)
        self._rank = rank
        self._loaded = loaded
        self._regions: dict[int, list[Region]] = {}  # by number of a tensor
        self._scattered: dict[str, set[int]] = {}  # parameter without parts → numbers that were seen in it

    def run(self, aliases: Mapping[str, str]) -> Layout:
        with torch.inference_mode():
            for name, tensor in self._rank.now().items():
                if name in self._loaded:
                    tensor.fill_(0)
        self._find_parts()
        self._find_indices()
        metas = {meta.name: meta for meta in self._rank.metas}
        pieces: dict[str, tuple[Piece, ...]] = {}
        omissions: dict[str, Omission] = {}
        parameters = self._rank.now()
        for number, meta in enumerate(self._rank.metas, start=1):
            result = self._pieces(number, meta, parameters)
            if isinstance(result, Omission):
                omissions[meta.name] = result
            else:
                pieces[meta.name] = result
        for name, alias in (*aliases.items(), *((alias, name) for name, alias in aliases.items())):
            if name in omissions and alias in pieces and metas[name].shape == metas[alias].shape:
                pieces[name] = pieces[alias]
                del omissions[name]
        return Layout(metas, pieces, omissions, dict(self._rank.forms))

    def _find_parts(self) -> None:
        """Find the parts of the parameters with passes of numbers."""
        grids: dict[str, list[Grid]] = {name: [] for name in sorted(self._loaded)}
        samples: dict[str, list[torch.Tensor]] = {name: [] for name in grids}
        count = len(self._rank.metas)
        for place in range(self.code.length(count)):
            digits = self.code.digit(torch.arange(count + 1), place).tolist()
            with self._rank.read_after(partial(self._number, digits)):
                parameters = self._rank.now()
                for name, decoded in samples.items():
                    decoded.append(self.code.decode(_sample(parameters[name])))
                    grid = Grid.of(parameters[name], self.code.decode) if name in grids else None
                    if grid is None:
                        grids.pop(name, None)
                    else:
                        grids[name].append(grid)
        split: set[str] = set()
        for name, passes in grids.items():
            joined = join(passes, self.code.base) if passes else None
            parts = regions(name, joined, tuple(parameters[name].shape)) if joined is not None else None
            if parts is not None:
                split.add(name)
                for region in parts:
                    self._regions.setdefault(region.number, []).append(region)
        for name in samples.keys() - split:
            self._scattered[name] = _numbers(samples[name], self.code.base)

    def _number(self, digits: Sequence[int], number: int, meta: TensorMeta) -> torch.Tensor:
        return constant(meta, digits[number], self._rank.device)

    def _find_indices(self) -> None:
        """Add the indices to the parts with passes of indices."""
        plans = [
            [(dim, place) for dim, length in enumerate(meta.shape) for place in range(self.code.index_length(length))]
            for meta in self._rank.metas
        ]
        for step in range(max(map(len, plans), default=0)):
            steps = [plan[step] if step < len(plan) else None for plan in plans]
            with self._rank.read_after(partial(self._index, steps, {})):
                parameters = self._rank.now()
                for number, (meta, at) in enumerate(zip(self._rank.metas, steps, strict=True), start=1):
                    for region in self._regions.get(number, []) if at else []:
                        dim, place = at or (0, 0)
                        first = self.code.first_index(self.code.index_length(meta.shape[dim])) if place == 0 else 0
                        region.add_digits(
                            parameters[region.parameter], dim, self.code.base**place, -first, self.code.decode
                        )

    def _index(
        self,
        steps: Sequence[tuple[int, int] | None],
        lines: dict[tuple[int, int], torch.Tensor],
        number: int,
        meta: TensorMeta,
    ) -> torch.Tensor:
        step = steps[number - 1]
        if step is None or not encodable(meta.dtype):
            return constant(meta, 0, self._rank.device)
        dim, place = step
        key = (meta.shape[dim], place)
        if key not in lines:
            first = self.code.first_index(self.code.index_length(key[0]))
            lines[key] = self.code.digit(torch.arange(first, first + key[0]), place)
        return ramp(meta, dim, lines[key], self._rank.device)

    def _pieces(self, number: int, meta: TensorMeta, now: Mapping[str, torch.Tensor]) -> tuple[Piece, ...] | Omission:
        if not encodable(meta.dtype):
            return Omission(Omitted.NOT_ENCODABLE, f"its dtype {meta.dtype} cannot contain digits")
        for name in sorted(self._scattered):
            if number in self._scattered[name]:
                return Omission(Omitted.NOT_LINEAR, f"its elements lie scattered in {name}")
        parts = self._regions.get(number, [])
        if not parts:
            return self._unseen()
        places: dict[object, Piece] = {}
        try:
            for region in parts:
                parameter = now[region.parameter]
                for piece in region.pieces(meta.shape, parameter.stride()):
                    address = parameter.data_ptr() + piece.offset * parameter.element_size()
                    place = (parameter.device, parameter.dtype, address, piece.start, piece.size, piece.stride)
                    places.setdefault(place, piece)
        except NotLinear as error:
            return Omission(Omitted.NOT_LINEAR, str(error))
        pieces = merged(list(places.values()))
        if any(piece.slice(meta.shape) is None for piece in pieces):
            return Omission(Omitted.CUT_TWICE, f"{pieces[0].parameter} contains a part cut along several dimensions")
        return tuple(pieces)

    def _unseen(self) -> Omission:
        count = len(self._rank.metas)
        repacked = set(self._scattered)
        for number, parts in self._regions.items():
            if not 0 <= number <= count:
                repacked |= {region.parameter for region in parts}
        if repacked:
            first = min(repacked)
            return Omission(
                Omitted.UNSEEN, f"no element of it was seen; {len(repacked)} parameters are repacked, {first} is one"
            )
        return Omission(Omitted.ABSENT, "no parameter of this rank contains an element of it")


def _searchable(tensor: torch.Tensor) -> bool:
    strided = tensor.layout == torch.strided and not tensor.is_meta
    return strided and tensor.numel() > 0 and encodable(tensor.dtype)


def _normal(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor if tensor.ndim else tensor.reshape(1)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements of every tensor of this shape: all, or some at random places."""
    if tensor.numel() <= _SAMPLES:
        return tensor.flatten()
    generator = torch.Generator().manual_seed(0)
    where = [torch.randint(length, (_SAMPLES,), generator=generator).to(tensor.device) for length in tensor.shape]
    return bits_of(tensor)[tuple(where)].view(tensor.dtype)


def _numbers(digits: Sequence[torch.Tensor], base: int) -> set[int]:
    """Return the numbers with these digits, except numbers with an invalid digit."""
    valid = torch.stack(list(digits)).ne(INVALID).all(dim=0)
    total = sum(digit[valid] * base**place for place, digit in enumerate(digits))
    assert isinstance(total, torch.Tensor)
    return set(total.tolist())

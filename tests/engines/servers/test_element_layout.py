"""Layouts of the kinds that engines have, found by loading encoded tensors, and proven with random ones."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlctl_servers.ranks.element_codes import INVALID, Code, bits_of
from rlctl_servers.ranks.element_layout import Layout, Omitted, find_layout

from rlctl.contract.errors import Internal, InvalidRequest, Reason
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.weights.tensor.slices import Slice
from rlctl.weights.tensor.tensors import TensorMeta

Tensors = dict[str, torch.Tensor]
Loader = Callable[[torch.Tensor], object]


def random(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Rank:
    """One rank of an engine: parameters, and a loader for each tensor of the checkpoint."""

    def __init__(self, parameters: Tensors, **loaders: Loader) -> None:
        self.parameters = parameters
        self.loaders = loaders
        self.loads = 0

    def load_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in tensors:
            if name in self.loaders:
                self.loaders[name](tensor)

    def find(self, checkpoint: Tensors, **aliases: str) -> Layout:
        reference = {name: TensorMeta.of(name, tensor) for name, tensor in checkpoint.items()}
        return find_layout(reference, self.load_all, lambda: self.parameters, aliases=aliases)

    def prove(self, checkpoint: Tensors, **aliases: str) -> Layout:
        """Find the layout, and compare its views after a load of the checkpoint."""
        layout = self.find(checkpoint, **aliases)
        self.load_all(checkpoint.items())
        assert differing(layout, self.parameters, checkpoint) == set()
        return layout


def copy(target: torch.Tensor, part: Slice | None = None) -> Loader:
    return lambda tensor: target.copy_((part or Slice()).of(tensor))


def slices(layout: Layout, parameters: Mapping[str, torch.Tensor]) -> dict[str, Slice]:
    return {name: shard.slice for name, shard in layout.bind(parameters).items()}


def differing(layout: Layout, parameters: Mapping[str, torch.Tensor], checkpoint: Tensors) -> set[str]:
    """Return the tensors whose views differ from the checkpoint that was loaded, bit for bit."""
    return {
        name
        for name, shards in layout.bind_all(parameters).items()
        for shard in shards
        if not torch.equal(bits_of(shard.local), bits_of(shard.slice.of(checkpoint[name]).to(shard.local.dtype)))
    }


def covered(layout: Layout) -> int:
    """Return the number of elements of all parameters that belong to a tensor with views."""
    pieces = {piece for parts in layout.pieces.values() for piece in parts}
    return sum(math.prod(piece.size) for piece in pieces)


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_rows_cut_over_two_ranks(rank: int) -> None:
    checkpoint = random(q=(16, 8), k=(8, 8), v=(8, 8), gate=(24, 8), up=(24, 8), bias=(16,))
    qkv, gate_up, bias = torch.randn(16, 8), torch.randn(24, 8), torch.randn(8)
    part = {length: Slice(0, rank * length, length) for length in (4, 8, 12)}
    engine = Rank(
        {"qkv": qkv, "gate_up": gate_up, "bias": bias},
        q=copy(qkv[:8], part[8]),
        k=copy(qkv[8:12], part[4]),
        v=copy(qkv[12:], part[4]),
        gate=copy(gate_up[:12], part[12]),
        up=copy(gate_up[12:], part[12]),
        bias=copy(bias, part[8]),
    )
    layout = engine.prove(checkpoint)
    expected = {"q": part[8], "k": part[4], "v": part[4], "gate": part[12], "up": part[12], "bias": part[8]}
    assert slices(layout, engine.parameters) == expected
    assert not layout.omissions
    assert covered(layout) == sum(parameter.numel() for parameter in engine.parameters.values())
    views = layout.bind(engine.parameters)
    assert views["k"].local.data_ptr() == qkv[8:].data_ptr()
    assert views["up"].local.shape == (12, 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_padded_vocabulary_cut_over_two_ranks(rank: int) -> None:
    checkpoint = random(embed=(100, 8))
    weight = torch.randn(64, 8)
    start, length = rank * 64, (64, 36)[rank]

    def load(tensor: torch.Tensor) -> None:
        weight[:length].copy_(tensor[start : start + length])

    engine = Rank({"weight": weight}, embed=load)
    layout = engine.prove(checkpoint)
    assert slices(layout, engine.parameters) == {"embed": Slice(0, start, length)}
    assert covered(layout) == length * 8


def test_rows_cut_along_dimension_1_and_transposed_storage() -> None:
    checkpoint = random(o=(12, 16), down=(10, 6))
    o, down = torch.randn(12, 8), torch.randn(6, 10)
    engine = Rank({"o": o, "down": down}, o=copy(o, Slice(1, 8, 8)), down=copy(down.t()))
    layout = engine.prove(checkpoint)
    assert slices(layout, engine.parameters) == {"o": Slice(1, 8, 8), "down": Slice()}
    assert layout.bind(engine.parameters)["down"].local.stride() == (1, 10)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_fused_and_cut_over_two_ranks(rank: int) -> None:
    shapes = {f"{kind}{expert}": (8, 6) for expert in range(4) for kind in ("gate", "up")}
    checkpoint = random(**shapes, **{f"down{expert}": (6, 8) for expert in range(4)})
    w13, w2 = torch.randn(4, 8, 6), torch.randn(4, 6, 4)
    loaders = {}
    for expert in range(4):
        loaders[f"gate{expert}"] = copy(w13[expert, :4], Slice(0, rank * 4, 4))
        loaders[f"up{expert}"] = copy(w13[expert, 4:], Slice(0, rank * 4, 4))
        loaders[f"down{expert}"] = copy(w2[expert], Slice(1, rank * 4, 4))
    engine = Rank({"w13": w13, "w2": w2}, **loaders)
    layout = engine.prove(checkpoint)
    assert not layout.omissions
    found = slices(layout, engine.parameters)
    assert {found["gate3"], found["up0"]} == {Slice(0, rank * 4, 4)}
    assert found["down2"] == Slice(1, rank * 4, 4)


def test_a_rank_that_stores_some_experts_and_one_of_them_twice() -> None:
    checkpoint = random(**{f"expert{number}": (6, 4) for number in range(4)})
    weight = torch.randn(3, 6, 4)

    def load_one(tensor: torch.Tensor) -> None:
        weight[0].copy_(tensor)
        weight[2].copy_(tensor)

    engine = Rank({"w": weight}, expert1=load_one, expert3=copy(weight[1]))
    layout = engine.prove(checkpoint)
    assert {name: omission.kind for name, omission in layout.omissions.items()} == {
        "expert0": Omitted.ABSENT,
        "expert2": Omitted.ABSENT,
    }
    assert layout.bind(engine.parameters).keys() == {"expert3"}
    copies = layout.bind_all(engine.parameters)["expert1"]
    assert [shard.local.data_ptr() for shard in copies] == [weight[0].data_ptr(), weight[2].data_ptr()]
    assert {shard.slice for shard in copies} == {Slice()}
    weight[2, 0, 0] += 1
    assert differing(layout, engine.parameters, checkpoint) == {"expert1"}


def test_replicated_heads_are_slices_of_their_tensors() -> None:
    checkpoint = random(q=(32, 4), k=(8, 4), v=(8, 4))
    qkv = torch.randn(16, 4)  # rank 1 of 4; two heads of keys: one at two ranks
    engine = Rank(
        {"qkv": qkv},
        q=copy(qkv[:8], Slice(0, 8, 8)),
        k=copy(qkv[8:12], Slice(0, 0, 4)),
        v=copy(qkv[12:], Slice(0, 0, 4)),
    )
    layout = engine.prove(checkpoint)
    expected = {"q": Slice(0, 8, 8), "k": Slice(0, 0, 4), "v": Slice(0, 0, 4)}
    assert slices(layout, engine.parameters) == expected


@pytest.mark.parametrize("winner", ["embed", "head"])
def test_a_tied_head_has_the_views_of_the_embedding(winner: str) -> None:
    checkpoint = random(embed=(20, 4))
    checkpoint["head"] = checkpoint["embed"]
    weight = torch.randn(24, 4)
    # The same memory has two names; one loader is skipped, as engines do.
    engine = Rank({"embed.weight": weight, "head.weight": weight}, **{winner: copy(weight[:20])})
    layout = engine.prove(checkpoint, head="embed")
    assert not layout.omissions
    assert layout.parameters.keys() == {"embed.weight"}
    views = layout.bind(engine.parameters)
    assert views["head"].meta.name == "head"
    assert views["head"].local.data_ptr() == views["embed"].local.data_ptr() == weight.data_ptr()


def test_without_an_alias_a_tensor_that_no_loader_takes_is_absent() -> None:
    checkpoint = random(a=(4, 4), b=(4, 4), empty=(0, 4))
    weight = torch.randn(4, 4)
    layout = Rank({"a": weight}, a=copy(weight), empty=lambda tensor: None).prove(checkpoint)
    assert {name: each.kind for name, each in layout.omissions.items()} == {
        "b": Omitted.ABSENT,
        "empty": Omitted.ABSENT,
    }


def test_scalars_and_single_elements() -> None:
    checkpoint = random(scale=(), one=(1,), each=(3,), row=(1, 5))
    parameters = {
        name: torch.randn(shape) for name, shape in {"scale": (1,), "one": (), "w": (2, 3), "row": (5,)}.items()
    }

    def load_each(tensor: torch.Tensor) -> None:
        parameters["w"][1].copy_(tensor)

    engine = Rank(
        parameters,
        scale=lambda tensor: parameters["scale"].fill_(tensor.item()),
        one=lambda tensor: parameters["one"].copy_(tensor[0]),
        each=load_each,
        row=lambda tensor: parameters["row"].copy_(tensor[0]),
    )
    layout = engine.prove(checkpoint)
    views = layout.bind(engine.parameters)
    assert {name: tuple(shard.local.shape) for name, shard in views.items()} == {
        "scale": (),
        "one": (1,),
        "each": (3,),
        "row": (1, 5),
    }


def test_a_scalar_that_is_loaded_into_several_places_has_a_view_of_each() -> None:
    scales = torch.randn(4, 2)
    layout = Rank({"scales": scales}, scale=lambda tensor: scales[:, 1].fill_(tensor.item())).prove(random(scale=()))
    assert [shard.local.data_ptr() for shard in layout.bind_all({"scales": scales})["scale"]] == [
        scales[row, 1].data_ptr() for row in range(4)
    ]


def test_interleaved_rows() -> None:
    checkpoint = random(gate=(8, 6), up=(8, 6))
    weight = torch.randn(16, 6)
    engine = Rank({"w": weight}, gate=copy(weight[::2]), up=copy(weight[1::2]))
    layout = engine.prove(checkpoint)
    assert layout.bind(engine.parameters)["up"].local.stride() == (12, 1)


def test_a_fused_tensor_of_the_checkpoint_is_several_slices_of_one_rank() -> None:
    checkpoint = random(gate_up=(16, 6), permuted=(16, 6))
    weight, permuted = torch.randn(8, 6), torch.randn(16, 6)

    def load(tensor: torch.Tensor) -> None:
        weight[:4].copy_(tensor[4:8])
        weight[4:].copy_(tensor[12:])

    engine = Rank(
        {"w": weight, "p": permuted},
        gate_up=load,
        permuted=lambda tensor: permuted.copy_(torch.cat([tensor[::2], tensor[1::2]])),
    )
    layout = engine.prove(checkpoint)
    parts = layout.bind_all(engine.parameters)
    assert [shard.slice for shard in parts["gate_up"]] == [Slice(0, 4, 4), Slice(0, 12, 4)]
    assert [shard.slice.length for shard in parts["permuted"]] == [2] * 8  # rows 0 and 1 lie 8 rows apart, and so on
    assert layout.bind(engine.parameters) == {}


def test_dimensions_that_are_merged_and_split() -> None:
    checkpoint = random(conv=(6, 3, 2, 4), heads=(24, 10), squeezed=(7, 1, 4))
    conv, heads, squeezed = torch.randn(6, 24), torch.randn(2, 10, 12), torch.randn(7, 4)

    def load_heads(tensor: torch.Tensor) -> None:
        heads.copy_(tensor.view(2, 12, 10).transpose(1, 2))

    engine = Rank(
        {"conv": conv, "heads": heads, "squeezed": squeezed},
        conv=lambda tensor: conv.copy_(tensor.flatten(1)),
        heads=load_heads,
        squeezed=lambda tensor: squeezed.copy_(tensor.squeeze(1)),
    )
    layout = engine.prove(checkpoint)
    assert slices(layout, engine.parameters)["conv"] == Slice()
    assert slices(layout, engine.parameters)["squeezed"] == Slice()
    # 24 rows lie in two blocks: no single stride.
    assert [shard.slice for shard in layout.bind_all(engine.parameters)["heads"]] == [Slice(0, 0, 12), Slice(0, 12, 12)]


def test_a_repacked_layer_is_no_view_and_the_rest_is_unharmed() -> None:
    checkpoint = random(a=(64, 64), b=(64, 64), c=(8, 8), d=(8, 8))
    parameters = {"a": torch.randn(64 * 64), "b": torch.randn(64, 64), "c": torch.randn(8, 8)}
    order = torch.randperm(64 * 64, generator=torch.Generator().manual_seed(2))
    engine = Rank(
        parameters,
        a=lambda tensor: parameters["a"].copy_(tensor.flatten()[order]),
        b=lambda tensor: parameters["b"].copy_(tensor / 3),
        c=copy(parameters["c"]),
    )
    layout = engine.prove(checkpoint)
    assert layout.bind(parameters).keys() == {"c"}
    assert {name: each.kind for name, each in layout.omissions.items()} == {
        "a": Omitted.NOT_LINEAR,
        "b": Omitted.UNSEEN,
        "d": Omitted.UNSEEN,
    }
    assert "b" in layout.omissions["d"].text
    assert "no box of a" in layout.omissions["a"].text


def test_tensors_scattered_over_one_parameter_are_not_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl_servers.ranks.element_regions.MOST_CELLS", 100)
    checkpoint = random(a=(40, 10), b=(40, 10))
    mixed = torch.randn(40, 20)
    mask = torch.rand(40, 20, generator=torch.Generator().manual_seed(3)).argsort(dim=1) < 10
    engine = Rank(
        {"mixed": mixed},
        a=lambda tensor: mixed.masked_scatter_(mask, tensor),
        b=lambda tensor: mixed.masked_scatter_(~mask, tensor),
    )
    layout = engine.find(checkpoint)
    assert {each.kind for each in layout.omissions.values()} == {Omitted.NOT_LINEAR}
    assert covered(layout) == 0


def test_a_part_cut_along_two_dimensions_is_no_slice() -> None:
    checkpoint = random(w=(8, 8))
    weight = torch.randn(4, 4)
    layout = Rank({"w": weight}, w=lambda tensor: weight.copy_(tensor[4:, :4])).prove(checkpoint)
    assert layout.omissions["w"].kind == Omitted.CUT_TWICE
    assert covered(layout) == 0


def test_a_loader_that_raises_leaves_the_weights_dirty_and_is_named() -> None:
    def fail(tensor: torch.Tensor) -> None:
        raise ValueError("no such expert")

    def refuse(tensor: torch.Tensor) -> None:
        raise Reason.FIELD_INVALID.error("no place")

    checkpoint = random(a=(4, 4), b=(4, 4))
    weight = torch.randn(4, 4)
    with pytest.raises(Internal, match="'b': ValueError: no such expert") as caught:
        Rank({"a": weight}, a=copy(weight), b=fail).find(checkpoint)
    assert caught.value.outcome == OUTCOME_DIRTY
    with pytest.raises(InvalidRequest, match="no place") as refused:
        Rank({"a": weight}, a=copy(weight), b=refuse).find(checkpoint)
    assert refused.value.outcome == OUTCOME_DIRTY


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.uint8, torch.uint8),
        (torch.int8, torch.int32),
        (torch.int64, torch.int64),
    ],
)
def test_dtypes(stored: torch.dtype, loaded: torch.dtype) -> None:
    numbers = torch.arange(40 * 300).view(40, 300) % 100
    checkpoint = {"w": numbers.to(torch.float32).to(stored), "x": (numbers[:2] + 1).to(torch.float32).to(stored)}
    weight = torch.zeros(30, 300).to(loaded)
    engine = Rank({"w": weight}, w=copy(weight[:20], Slice(0, 20, 20)), x=copy(weight[20:22]))
    layout = engine.prove(checkpoint)
    assert slices(layout, engine.parameters) == {"w": Slice(0, 20, 20), "x": Slice()}
    assert covered(layout) == 22 * 300


def test_a_tensor_whose_dtype_contains_no_digits_is_omitted() -> None:
    checkpoint = {"mask": torch.tensor([True, False]), **random(w=(4, 4))}
    mask, weight = torch.zeros(2, dtype=torch.bool), torch.randn(4, 4)
    layout = Rank({"mask": mask, "w": weight}, mask=copy(mask), w=copy(weight)).prove(checkpoint)
    assert layout.omissions["mask"].kind == Omitted.NOT_ENCODABLE
    assert layout.bind({"mask": mask, "w": weight}).keys() == {"w"}


def test_parameters_that_no_loader_writes_keep_their_values() -> None:
    weight, cache = torch.full((4, 4), 256.0), torch.randn(8, 8)
    before = cache.clone()
    engine = Rank({"w": weight.bfloat16(), "cache": cache})
    engine.loaders["w"] = copy(engine.parameters["w"])
    # The parameter contains the probe's constant, so that the probe cannot see that it is loaded.
    layout = engine.prove(random(torch.bfloat16, w=(4, 4)))
    assert layout.bind(engine.parameters).keys() == {"w"}
    assert torch.equal(cache, before)


def test_many_tensors_and_long_dimensions() -> None:
    count = 600
    checkpoint = {f"t{number}": torch.full((2,), number, dtype=torch.int32) for number in range(count)}
    checkpoint["long"] = torch.arange(300_000, dtype=torch.int32).view(-1, 1)
    weights = torch.zeros(4, 150, 2, dtype=torch.bfloat16)
    long = torch.zeros(150_000, 1, dtype=torch.bfloat16)
    engine = Rank({"w": weights, "long": long}, long=copy(long, Slice(0, 150_000, 150_000)))
    flat = weights.view(count, 2)
    for number in range(count):
        engine.loaders[f"t{number}"] = copy(flat[count - 1 - number])
    layout = engine.prove(checkpoint)
    assert not layout.omissions
    assert slices(layout, engine.parameters)["long"] == Slice(0, 150_000, 150_000)
    # Base 513: 601 numbers have two digits, 300,000 indices three. The others are the probe and the checkpoint.
    assert engine.loads == 2 + 3 + 2


def test_a_layout_fits_other_memory_of_the_same_form_and_no_other() -> None:
    checkpoint = random(q=(8, 4), k=(4, 4))
    weight = torch.randn(12, 4)
    engine = Rank({"w": weight}, q=copy(weight[:8]), k=copy(weight[8:]))
    layout = engine.prove(checkpoint)
    moved = torch.zeros(20, 4)[5:17]
    moved.copy_(weight)
    assert differing(layout, {"w": moved}, checkpoint) == set()
    for other in (torch.zeros(12, 5), torch.zeros(4, 12).t(), moved.double()):
        with pytest.raises(Internal, match="parameter w is now"):
            layout.bind({"w": other})
    with pytest.raises(Internal, match="parameter w is now None"):
        layout.bind({})


def test_a_parameter_that_a_load_allocates_again_is_read_where_it_is() -> None:
    checkpoint = random(w=(6, 4))
    engine = Rank({"w": torch.randn(4, 6).t()})

    def load(tensor: torch.Tensor) -> None:
        engine.parameters["w"] = tensor.t().contiguous().t()

    engine.loaders["w"] = load
    assert slices(engine.prove(checkpoint), engine.parameters) == {"w": Slice()}

    engine.loaders["w"] = lambda tensor: engine.parameters.update(w=tensor.clone())
    with pytest.raises(Internal, match="lost its form") as caught:
        engine.find(checkpoint)
    assert caught.value.outcome == OUTCOME_DIRTY


@st.composite
def engines(draw: st.DrawFn) -> tuple[Rank, Tensors, dict[str, tuple[torch.Tensor, Slice]]]:
    """Parameters that are filled with strided parts of tensors, some transposed, with padding between them."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    engine, checkpoint = Rank({}), Tensors()
    places: dict[str, tuple[torch.Tensor, Slice]] = {}
    for number in range(draw(st.integers(1, 3))):
        columns = draw(st.integers(1, 9))
        kinds = draw(st.lists(st.tuples(st.integers(1, 7), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4))
        interleaved = draw(st.booleans())
        rows = max(length for length, _, _ in kinds) * len(kinds) if interleaved else sum(k[0] + k[2] for k in kinds)
        weight = torch.randn(rows, columns).to(dtype)
        engine.parameters[f"p{number}"] = weight
        row = 0
        for place, (length, transposed, gap) in enumerate(kinds):
            name = f"t{number}.{place}"
            if interleaved:
                view = weight[place :: len(kinds)][:length]
            else:
                view = weight[row : row + length]
                row += length + gap
            view = view.t() if transposed else view
            cut = draw(st.integers(0, 1))
            before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
            shape = list(view.shape)
            part = Slice(cut, before, shape[cut])
            shape[cut] += before + after
            checkpoint[name] = torch.randn(shape)
            engine.loaders[name] = copy(view, part)
            places[name] = (view, part if before + after else Slice())
    return engine, checkpoint, places


@settings(max_examples=150)
@given(engines())
def test_every_strided_layout_is_found_exactly(
    made: tuple[Rank, Tensors, dict[str, tuple[torch.Tensor, Slice]]],
) -> None:
    engine, checkpoint, places = made
    layout = engine.prove(checkpoint)
    views = layout.bind(engine.parameters)
    assert views.keys() == places.keys()
    for name, (view, part) in places.items():
        assert views[name].slice == part
        assert views[name].local.shape == view.shape
        for index in ((0, 0), tuple(length - 1 for length in view.shape)):
            assert views[name].local[index].data_ptr() == view[index].data_ptr()
    assert covered(layout) == sum(view.numel() for view, _ in places.values())


@given(
    st.sets(st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.float32])),
    st.lists(st.integers(0, 1 << 40), min_size=1),
)
def test_digits_make_up_their_numbers(dtypes: set[torch.dtype], numbers: list[int]) -> None:
    code = Code.exact_in(dtypes)
    length = code.length(max(numbers))
    assert all(code.length(limit) <= length for limit in numbers)
    digits = [code.digit(torch.tensor(numbers), place) for place in range(length)]
    assert all(code.low <= int(each) <= code.high for digit in digits for each in digit)
    for dtype in dtypes:
        for digit in digits:
            assert torch.equal(code.decode(digit.to(torch.float64).to(dtype)), digit)
    assert [
        sum(int(digit[at]) * code.base**place for place, digit in enumerate(digits)) for at in range(len(numbers))
    ] == numbers


@given(st.sets(st.sampled_from([torch.bfloat16, torch.float8_e5m2, torch.uint8, torch.int8])), st.integers(1, 3000))
def test_indices_use_all_digits(dtypes: set[torch.dtype], size: int) -> None:
    code = Code.exact_in(dtypes)
    length = code.index_length(size)
    assert code.base ** (length - 1) < size <= code.base**length
    first = code.first_index(length)
    digits = [code.digit(torch.arange(first, first + size), place) for place in range(length)]
    assert all(code.low <= digit.min() and digit.max() <= code.high for digit in digits)
    total = sum((digit * code.base**place for place, digit in enumerate(digits)), torch.full((size,), -first))
    assert torch.equal(total, torch.arange(size))


def test_values_that_are_no_digits() -> None:
    code = Code.exact_in([torch.bfloat16])
    values = torch.tensor([0.0, 256.0, -256.0, 0.5, 257.0, float("nan"), float("inf"), -0.0])
    assert code.decode(values).tolist() == [0, 256, -256, INVALID, INVALID, INVALID, INVALID, 0]
    assert code.base == 513


def test_encoded_tensors_are_made_one_after_the_other() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def load_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal most
        for _, tensor in tensors:
            made.append(weakref.ref(tensor))
            most = max(most, sum(each() is not None for each in made))

    reference = {f"t{number}": TensorMeta(f"t{number}", torch.float32, (4, 4)) for number in range(5)}
    layout = find_layout(reference, load_all, lambda: {"w": torch.zeros(4, 4)})
    assert {each.kind for each in layout.omissions.values()} == {Omitted.ABSENT}
    assert len(made) % 5 == 0
    assert most <= 2

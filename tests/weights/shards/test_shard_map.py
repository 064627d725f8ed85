"""Placing slices, and the model digest of a stage over real groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from weights_helpers import digest_of, filled, full_model, together, tp_map

from rlctl.contract.errors import Conflict, Internal, InvalidRequest, Reason, RlctlError
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.shards.gather import Gathering
from rlctl.weights.shards.rank_exchange import agree_to_go_on
from rlctl.weights.shards.shard_map import (
    GroupExchange,
    LocalExchange,
    ModelDigestResult,
    Shard,
    ShardMap,
    Slice,
    model_digest,
)
from rlctl.weights.tensor.digest import TensorHash, tensor_digest
from rlctl.weights.tensor.keyed_digest import Sum, keyed_sums
from rlctl.weights.tensor.slices import Spread, owners
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.tensor.work import Stop

Form = Callable[..., list[WeightGroup]]


@pytest.fixture(params=[b"", bytes(range(16))], ids=["sha256", "keyed"])
def key(request: pytest.FixtureRequest) -> bytes:
    return request.param


def digest_together(form: Form, maps: list[ShardMap], **options: Any) -> list[ModelDigestResult]:
    groups = form(len(maps))
    return together(
        *(
            lambda rank=rank: model_digest(maps[rank], GroupExchange(groups[rank].process_group), **options)
            for rank in range(len(maps))
        )
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("max_bytes", [1, 100, 1 << 20])
def test_the_model_digest_is_that_of_the_full_tensors_in_every_layout(
    form: Form, size: int, max_bytes: int, key: bytes
) -> None:
    full = full_model()
    results = digest_together(form, [filled(full, rank, size) for rank in range(size)], max_bytes=max_bytes, key=key)
    assert {result.digest for result in results} == {digest_of(full, key)}
    assert not any(result.inconsistent for result in results)
    # Every tensor is in exactly one rank's share, with its own digest.
    shares = [pair for result in results for pair in result.digests.items()]
    assert sorted(shares) == sorted((name, tensor_digest(name, tensor, key=key)) for name, tensor in full.items())


def test_the_work_is_shared_out() -> None:
    full = full_model()
    spreads = {
        name: Spread(shard.meta, {rank: tp_map(full, rank, 2).shards[name].slice for rank in range(2)})
        for name, shard in tp_map(full, 0, 2).shards.items()
    }
    owner = owners(spreads, 2)
    load = [sum(spreads[name].meta.nbytes for name in owner if owner[name] == rank) for rank in range(2)]
    assert set(owner) == set(full)
    assert max(load) < 0.6 * sum(load)


def test_a_stage_of_one_rank_needs_no_group(key: bytes) -> None:
    full = full_model()
    result = model_digest(filled(full, 0, 1), LocalExchange(), key=key)
    assert result.digest == digest_of(full, key)
    assert set(result.digests) == set(full)


@pytest.mark.parametrize("size", [1, 2])
def test_weights_held_in_another_dtype_are_digested_in_the_references(form: Form, size: int, key: bytes) -> None:
    full = full_model()
    maps = []
    for rank in range(size):
        held = filled(full, rank, size)
        maps.append(
            ShardMap(
                {
                    name: Shard(shard.meta, shard.local.to(torch.float32), shard.slice)
                    for name, shard in held.shards.items()
                }
            )
        )
    assert {result.digest for result in digest_together(form, maps, key=key)} == {digest_of(full, key)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("name", ["layer.norm.weight", "layer.scale"])
def test_one_corrupted_replica_is_noticed_by_every_rank(
    form: Form, size: int, bad_rank: int, name: str, key: bytes
) -> None:
    full = full_model()
    maps = [filled(full, rank, size) for rank in range(size)]
    maps[bad_rank].shards[name].local.view(-1)[0] += 1
    results = digest_together(form, maps, key=key)
    assert {tuple(result.inconsistent) for result in results} == {(name,)}
    wrong_everywhere = dict(full)
    wrong_everywhere[name] = maps[bad_rank].shards[name].local
    digests = {result.digest for result in results}
    assert len(digests) == 1
    assert digests.isdisjoint({digest_of(full, key), digest_of(wrong_everywhere, key)})


@pytest.mark.parametrize("bad_rank", [0, 1, 2, 3])
def test_one_corrupted_copy_of_a_shared_slice_is_noticed(form: Form, bad_rank: int, key: bytes) -> None:
    full = full_model()
    maps = [filled(full, rank, 4) for rank in range(4)]
    maps[bad_rank].shards["layer.k.weight"].local[0, 0] += 1
    results = digest_together(form, maps, key=key)
    assert {tuple(result.inconsistent) for result in results} == {("layer.k.weight",)}
    assert {result.digest for result in results}.isdisjoint({digest_of(full, key)})


@pytest.mark.parametrize("name", ["layer.q.weight", "layer.o.weight", "layer.experts"])
def test_a_wrong_slice_is_noticed(form: Form, name: str, key: bytes) -> None:
    full = full_model()
    maps = [filled(full, rank, 2) for rank in range(2)]
    maps[1].shards[name].local.copy_(maps[0].shards[name].local)
    results = digest_together(form, maps, key=key)
    assert len({result.digest for result in results}) == 1
    assert results[0].digest != digest_of(full, key)


@pytest.mark.parametrize("name", ["embed.weight", "layer.o.weight", "layer.q.bias"])
@pytest.mark.parametrize("stale_rank", [0, 1])
def test_a_stale_slice_is_noticed(form: Form, name: str, stale_rank: int, key: bytes) -> None:
    old, new = full_model(seed=1), full_model(seed=2)
    maps = [filled(new, rank, 2) for rank in range(2)]
    maps[stale_rank].place(name, old[name])
    results = digest_together(form, maps, key=key)
    assert results[0].digest != digest_of(new, key)
    assert results[0].digest == results[1].digest


def test_ranks_that_hold_different_tensors_make_one_model(form: Form, key: bytes) -> None:
    full = full_model()
    whole = filled(full, 0, 1).shards
    first = {name: shard for name, shard in whole.items() if name < "layer.n"}
    results = digest_together(
        form, [ShardMap(first), ShardMap({n: s for n, s in whole.items() if n not in first})], key=key
    )
    assert {result.digest for result in results} == {digest_of(full, key)}


def one_tensor(*slices: Slice, shape: tuple[int, ...] = (4, 2)) -> list[ShardMap]:
    meta = TensorMeta("w", torch.float32, shape)
    return [ShardMap({"w": Shard(meta, torch.ones(part.shape(shape)), part)}) for part in slices]


@pytest.mark.parametrize(
    "maps",
    [
        one_tensor(Slice(0, 0, 2), Slice(0, 3, 1)),
        one_tensor(Slice(0, 0, 3), Slice(0, 2, 2)),
        one_tensor(Slice(0, 0, 2), Slice(1, 1, 1)),
        one_tensor(Slice(), Slice(0, 0, 2)),
        one_tensor(Slice(0, 0, 3), Slice(0, 0, 3)),
        one_tensor(Slice(), shape=(4, 2)) + one_tensor(Slice(), shape=(2, 4)),
    ],
    ids=["gap", "overlap", "two dimensions", "whole and part", "nobody has the end", "two shapes"],
)
def test_shard_maps_that_contradict_each_other_are_refused(form: Form, maps: list[ShardMap], key: bytes) -> None:
    with pytest.raises(Internal, match=r"^INTERNAL: w: "):
        digest_together(form, maps, key=key)


def test_tensors_without_elements_and_uneven_slices_are_digested(form: Form, key: bytes) -> None:
    full = {"empty": torch.empty(0, 4), "empty.columns": torch.empty(4, 0), "uneven": torch.arange(7.0)}
    maps = []
    for rank, (start, length) in enumerate([(0, 5), (5, 2)]):
        parts = {
            "empty": Slice(1, 2 * rank, 2),
            "empty.columns": Slice(0, 2 * rank, 2),
            "uneven": Slice(0, start, length),
        }
        maps.append(
            ShardMap(
                {
                    name: Shard(TensorMeta.of(name, full[name]), torch.zeros(part.shape(tuple(full[name].shape))), part)
                    for name, part in parts.items()
                }
            )
        )
        maps[-1].place("uneven", full["uneven"])
    assert {result.digest for result in digest_together(form, maps, key=key)} == {digest_of(full, key)}


SCALAR = torch.tensor(2.5, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("full", "parts"),
    [
        (torch.empty(0, 4), [Slice(1, 0, 2), Slice(1, 2, 2)]),
        (torch.empty(4, 0), [Slice(0, 0, 2), Slice(0, 2, 2)]),
        (torch.empty(0, 4), [Slice(0, 0, 0), Slice(0, 0, 0)]),
        (torch.arange(8.0).reshape(4, 2), [Slice(0, 0, 4), Slice(0, 4, 0)]),
        (torch.empty(0, 4), [None, Slice()]),
        (SCALAR, [None, Slice()]),
        (SCALAR, [Slice(), Slice()]),
        (torch.arange(8.0).reshape(4, 2), [None, Slice()]),
    ],
    ids=["columns", "rows", "nothing", "nothing at one", "elsewhere", "scalar elsewhere", "scalar", "matrix elsewhere"],
)
@pytest.mark.parametrize("owner", [0, 1])
def test_a_full_tensor_comes_together_however_little_of_it_a_rank_holds(
    form: Form, full: torch.Tensor, parts: list[Slice | None], owner: int
) -> None:
    meta = TensorMeta.of("t", full)

    def brought(rank: int, group: WeightGroup) -> torch.Tensor | None:
        part = parts[rank]
        shards = {} if part is None else {"t": Shard(meta, part.of(full).clone(), part)}
        return Gathering(shards, GroupExchange(group.process_group)).full("t", Stop(), owner)

    found = together(*(partial(brought, rank, group) for rank, group in enumerate(form(2))))
    assert found[1 - owner] is None
    assert found[owner] is not None
    assert found[owner].dtype == full.dtype
    assert torch.equal(found[owner], full)


@pytest.mark.parametrize("size", [1, 2])
def test_stopping_one_rank_ends_the_digest_at_all(form: Form, size: int, key: bytes) -> None:
    full = full_model()
    groups = form(size)
    stop = Stop()
    stop.set(Reason.CANCELLED.error("enough"))

    def attempt(rank: int) -> RlctlError:
        with pytest.raises(Conflict) as caught:
            model_digest(
                filled(full, rank, size),
                GroupExchange(groups[rank].process_group),
                stop=stop if rank == size - 1 else None,
                key=key,
            )
        return caught.value

    errors = together(*(lambda rank=rank: attempt(rank) for rank in range(size)))
    assert {error.reason for error in errors} == {Reason.CANCELLED}
    assert [error.message for error in errors] == named("enough", size - 1, size)


def named(message: str, failing: int, size: int = 2) -> list[str]:
    """Return the message at each rank: copies name the rank that failed."""
    return [message if rank == failing else f"rank {failing}: {message}" for rank in range(size)]


def test_a_keyed_digest_gathers_no_tensor(form: Form) -> None:
    """Of parts that are cut up, only sums go from rank to rank."""
    full = {"cut": torch.randn(256, 512), "columns": torch.randn(512, 256)}
    groups = form(2)

    class Watched(GroupExchange):
        def gather(self, buffers: Sequence[torch.Tensor], dst: int) -> None:
            raise AssertionError("a tensor is gathered")

    def held(rank: int) -> ShardMap:
        parts = {"cut": Slice(0, 128 * rank, 128), "columns": Slice(1, 128 * rank, 128)}
        return ShardMap({n: Shard(TensorMeta.of(n, full[n]), p.of(full[n]).clone(), p) for n, p in parts.items()})

    results = together(
        *(
            lambda rank=rank: model_digest(held(rank), Watched(groups[rank].process_group), key=bytes(range(16)))
            for rank in range(2)
        )
    )
    assert {result.digest for result in results} == {digest_of(full, bytes(range(16)))}


def test_digests_that_are_known_are_taken_for_what_is_whole_and_for_nothing_else(form: Form) -> None:
    full = full_model()
    known = dict.fromkeys(full, "0" * 64)
    result = model_digest(filled(full, 0, 1), LocalExchange(), known_digests=known)
    assert result.digests == known
    groups = form(2)
    results = together(
        *(
            lambda rank=rank: model_digest(
                filled(full, rank, 2),
                GroupExchange(groups[rank].process_group),
                known_digests=known if rank == 0 else None,
            )
            for rank in range(2)
        )
    )
    # A wrong claim about a copy does not go unnoticed; about what is cut up, nothing can be claimed.
    assert results[0].inconsistent == ["layer.codes", "layer.norm.weight", "layer.scale"]
    right = {name: tensor_digest(name, tensor) for name, tensor in full.items()}
    for result in results:
        assert all(result.digests[name] == right[name] for name in result.digests if name not in result.inconsistent)


def test_a_rank_that_is_gone_fails_the_digest(form: Form) -> None:
    groups = form(2)
    groups[1].close()
    with pytest.raises(RlctlError) as caught:
        model_digest(filled(full_model(), 0, 2), GroupExchange(groups[0].process_group))
    assert caught.value.reason is Reason.GROUP_FAILED


def test_bytes_of_any_length_are_gathered(form: Form) -> None:
    groups = form(3)
    data = [b"", b"abc", bytes(range(256)) * 5]
    everywhere = together(
        *(lambda rank=rank: GroupExchange(groups[rank].process_group).all_gather_bytes(data[rank]) for rank in range(3))
    )
    assert everywhere == [data] * 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_placing_a_full_tensor_writes_the_ranks_part_and_nothing_else(size: int) -> None:
    full = full_model()
    for rank in range(size):
        shards = tp_map(full, rank, size)
        shards.place("layer.k.weight", full["layer.k.weight"])
        part = shards.shards["layer.k.weight"].slice
        expected = (
            full["layer.k.weight"] if part.dim is None else full["layer.k.weight"].narrow(0, part.start, part.length)
        )
        assert torch.equal(shards.shards["layer.k.weight"].local, expected)
        assert not shards.shards["layer.q.weight"].local.any()
        assert not shards.shards["layer.v.weight"].local.any()


def test_placing_casts_to_the_dtype_that_is_held() -> None:
    meta = TensorMeta("w", torch.bfloat16, (2,))
    parameter = torch.nn.Parameter(torch.zeros(2))
    shards = ShardMap({"w": Shard(meta, parameter)})
    shards.place("w", torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert parameter.tolist() == [1.0, 2.0]
    shards.place_local("w", torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    assert parameter.tolist() == [3.0, 4.0]


def test_unknown_names_and_other_shapes_are_refused() -> None:
    full = full_model()
    shards = tp_map(full, 0, 2)
    for call in (
        lambda: shards.place("nobody", torch.zeros(1)),
        lambda: shards.place_local("nobody", torch.zeros(1)),
        lambda: shards.full_in_place("nobody"),
    ):
        with pytest.raises(InvalidRequest, match="no tensor 'nobody'"):
            call()
    with pytest.raises(InvalidRequest, match=r"layer.q.bias: shape \(16,\) instead of \(32,\)"):
        shards.place("layer.q.bias", full["layer.q.bias"][:16])
    with pytest.raises(InvalidRequest, match=r"a part of shape \(32,\) instead of \(16,\)"):
        shards.place_local("layer.q.bias", full["layer.q.bias"])


@pytest.mark.parametrize(
    ("local", "part"),
    [
        (torch.zeros(3, 2), Slice()),
        (torch.zeros(2, 2), Slice(0, 3, 2)),
        (torch.zeros(4, 2), Slice(2, 0, 1)),
        (torch.zeros(4, 1), Slice(1, -1, 1)),
    ],
)
def test_memory_that_does_not_fit_its_slice_is_refused(local: torch.Tensor, part: Slice) -> None:
    with pytest.raises(InvalidRequest, match=r"^FIELD_INVALID: w: memory of shape"):
        ShardMap({"w": Shard(TensorMeta("w", torch.float32, (4, 2)), local, part)})
    with pytest.raises(InvalidRequest, match="describes 'w'"):
        ShardMap({"v": Shard(TensorMeta("w", torch.float32, ()), torch.zeros(()))})


def test_only_whole_contiguous_memory_of_the_same_dtype_is_received_into() -> None:
    meta = TensorMeta("w", torch.float32, (4, 2))

    def in_place(local: torch.Tensor, part: Slice = Slice()) -> torch.Tensor | None:  # noqa: B008
        return ShardMap({"w": Shard(meta, local, part)}).full_in_place("w")

    whole = torch.zeros(4, 2)
    found = in_place(whole)
    assert found is not None
    assert found.data_ptr() == whole.data_ptr()
    assert in_place(whole, Slice(0, 0, 4)) is not None
    assert in_place(torch.zeros(2, 2), Slice(0, 0, 2)) is None
    assert in_place(torch.zeros(4, 2, dtype=torch.bfloat16)) is None
    assert in_place(torch.zeros(2, 4).t()) is None


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (torch.OutOfMemoryError("no room\nat all"), Reason.MEMORY_FULL),
        (torch.OutOfMemoryError(), Reason.MEMORY_FULL),
        (ValueError("defect"), Reason.ENGINE_FAILED),
        (Reason.WEIGHTS_DIRTY.error("gone"), Reason.WEIGHTS_DIRTY),
    ],
    ids=["out of memory", "out of memory, unsaid", "defect", "typed"],
)
def test_an_error_of_one_rank_ends_a_keyed_digest_at_all(
    form: Form, monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: Reason
) -> None:
    full, groups = full_model(), form(2)
    maps = [filled(full, rank, 2) for rank in range(2)]
    mine = maps[1].shards["layer.norm.weight"]

    def sums(key: bytes, shards: Sequence[Shard], stop: Stop) -> list[Sum]:
        if any(shard is mine for shard in shards):
            raise failure
        return keyed_sums(key, shards, stop)

    monkeypatch.setattr("rlctl.weights.shards.shard_map.keyed_sums", sums)

    def attempt(rank: int) -> Reason:
        with pytest.raises(RlctlError) as caught:
            model_digest(maps[rank], GroupExchange(groups[rank].process_group), key=bytes(range(16)))
        return caught.value.reason

    assert together(*(partial(attempt, rank) for rank in range(2))) == [reason] * 2


class Unreadable(torch.Tensor):
    """A tensor whose contents cannot be cast: as with memory that lacks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            raise torch.OutOfMemoryError("no room\nat all")
        return super().__torch_function__(func, types, args, kwargs or {})


def unreadable(shards: ShardMap, name: str) -> ShardMap:
    shard = shards.shards[name]
    return ShardMap({**shards.shards, name: Shard(shard.meta, shard.local.as_subclass(Unreadable), shard.slice)})


@pytest.mark.parametrize("name", ["layer.norm.weight", "layer.q.weight"], ids=["copy", "part"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_read_its_weights_ends_a_digest_at_all(
    form: Form, name: str, failing: int, key: bytes
) -> None:
    """The other rank does not wait in an exchange for its timeout, and reports the cause."""
    full, groups = full_model(), form(2, broadcast_timeout_s=60.0)
    maps = [filled(full, rank, 2) for rank in range(2)]
    maps[failing] = unreadable(maps[failing], name)

    def attempt(rank: int) -> tuple[Reason, str]:
        with pytest.raises(RlctlError) as caught:
            model_digest(maps[rank], GroupExchange(groups[rank].process_group), key=key, max_bytes=100)
        return caught.value.reason, caught.value.message

    expected = [(Reason.MEMORY_FULL, message) for message in named("no room", failing)]
    assert together(*(partial(attempt, rank) for rank in range(2))) == expected
    stayed = together(*(lambda r=r: GroupExchange(groups[r].process_group).all_gather_bytes(b"x") for r in range(2)))
    assert stayed == [[b"x", b"x"]] * 2, "the ranks are together after the error"


@pytest.mark.parametrize("name", ["layer.q.weight", "layer.o.weight"])
def test_a_rank_that_cannot_hash_its_share_ends_a_digest_at_all(
    form: Form, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, groups = full_model(), form(2, broadcast_timeout_s=60.0)

    class Defect(TensorHash):
        def __init__(self, meta: TensorMeta) -> None:
            super().__init__(meta)
            self._fails = meta.name == name

        def update(self, data: torch.Tensor) -> None:
            if self._fails:
                raise ValueError("defect")
            super().update(data)

    monkeypatch.setattr("rlctl.weights.shards.shard_map.TensorHash", Defect)

    def attempt(rank: int) -> tuple[Reason, str]:
        with pytest.raises(RlctlError) as caught:
            model_digest(filled(full, rank, 2), GroupExchange(groups[rank].process_group), max_bytes=100)
        return caught.value.reason, caught.value.message

    errors = together(*(partial(attempt, rank) for rank in range(2)))
    assert {reason for reason, _ in errors} == {Reason.ENGINE_FAILED}
    messages = [message for _, message in errors]
    assert messages == named("ValueError: defect", messages.index("ValueError: defect"))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("name", ["layer.norm.weight", "layer.q.weight"], ids=["copy", "part"])
def test_a_rank_that_cannot_read_a_tensor_ends_a_gather_at_all(form: Form, name: str, failing: int) -> None:
    full, groups = full_model(), form(2, broadcast_timeout_s=60.0)
    maps = [filled(full, rank, 2) for rank in range(2)]
    maps[failing] = unreadable(maps[failing], name)

    def attempt(rank: int) -> Reason:
        exchange, stop = GroupExchange(groups[rank].process_group), Stop()
        gathering = Gathering(maps[rank].shards, exchange)
        try:
            gathering.full(name, stop, owner=failing)
            agree_to_go_on(exchange, stop)
        except RlctlError as error:
            return error.reason
        raise AssertionError("no rank has noticed the error")

    assert together(*(partial(attempt, rank) for rank in range(2))) == [Reason.MEMORY_FULL] * 2

"""Updates from a source to receivers of several layouts over real groups, and what can go wrong on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from weights_helpers import Background, digest_of, filled, full_model, metas_of, over, together, tp_map

from rlctl.contract.errors import Conflict, Internal, InvalidRequest, PreconditionFailed, Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.group import tcp_connections
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.receiver import Receiver, ReceiveStats, SendStats, send
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.buckets import Bucket, plan
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

Form = Callable[..., list[WeightGroup]]

SIZES = [(1, 1), (100, 500), (64 << 20, 4 << 20), (1, 1 << 30)]
"""Sizes of buckets and of large tensors: all large; mixed; all in one; each packed on its own."""


def same(one: ShardMap, other: ShardMap) -> bool:
    return all(
        torch.equal(as_bytes(shard.local), as_bytes(other.shards[name].local)) for name, shard in one.shards.items()
    )


def begun(shards: ShardMap, update_id: str = "update") -> Receiver:
    receiver = Receiver(shards)
    receiver.begin(update_id)
    return receiver


def transfer(
    groups: list[WeightGroup], full: Mapping[str, torch.Tensor], buckets: list[Bucket], receivers: list[Receiver]
) -> tuple[SendStats, list[ReceiveStats], str]:
    digest = ModelDigest()
    sent, *received = together(
        lambda: send(as_source(full.items()), buckets, groups[0], digest),
        *(
            lambda receiver=receiver, group=group: receiver.receive(over(group, buckets))
            for receiver, group in zip(receivers, groups[1:], strict=True)
        ),
    )
    return sent, received, digest.digest()


@pytest.mark.parametrize(("bucket_bytes", "large_bytes"), SIZES)
def test_an_update_reaches_stages_of_different_layouts(form: Form, bucket_bytes: int, large_bytes: int) -> None:
    full = full_model()
    buckets = plan(metas_of(full), bucket_bytes=bucket_bytes, large_bytes=large_bytes)
    layouts = [(0, 1), (0, 2), (1, 2)]
    receivers = [begun(tp_map(full, rank, size)) for rank, size in layouts]
    sent, received, digest = transfer(form(4), full, buckets, receivers)
    assert digest == digest_of(full)
    assert sent.bytes == sum(bucket.nbytes for bucket in buckets)
    for receiver, stats, (rank, size) in zip(receivers, received, layouts, strict=True):
        assert same(receiver._shards, filled(full, rank, size))
        assert receiver.missing() == []
        assert receiver.written == set(full)
        assert (stats.tensors, stats.bytes_received) == (len(full), sent.bytes)
        assert stats.transfer_s > 0


def test_a_second_update_needs_no_new_group(form: Form) -> None:
    groups = form(2)
    receiver = Receiver(tp_map(full_model(), 0, 1))
    for seed in range(3):
        full = full_model(seed)
        receiver.begin(f"update-{seed}")
        assert receiver.missing() == sorted(full)
        transfer(groups, full, plan(metas_of(full), large_bytes=300), [receiver])
        receiver.finish()
        assert same(receiver._shards, filled(full, 0, 1))


class Watched(ShardMap):
    """Notes which tensors are copied into place."""

    def __init__(self, shards: Mapping[str, Shard], then: Callable[[], None] = lambda: None) -> None:
        super().__init__(shards)
        self.copied: list[str] = []
        self._then = then

    def place(self, name: str, full: torch.Tensor) -> None:
        self.copied.append(name)
        super().place(name, full)
        self._then()


def test_large_tensors_that_are_whole_are_received_in_place(form: Form) -> None:
    full = full_model()
    shards = Watched(tp_map(full, 0, 2).shards)
    buckets = plan(metas_of(full), large_bytes=1)
    transfer(form(2), full, buckets, [begun(shards)])
    whole = {"layer.norm.weight", "layer.scale", "layer.codes"}
    assert set(shards.copied) == set(full) - whole
    assert same(shards, filled(full, 0, 2))


@pytest.mark.parametrize("large_bytes", [1, 1 << 30])
def test_weights_held_in_another_dtype_are_cast_on_arrival(form: Form, large_bytes: int) -> None:
    full = {"w": torch.tensor([1.0, 2.5, -3.0], dtype=torch.bfloat16)}
    local = torch.zeros(3)
    shards = ShardMap({"w": Shard(TensorMeta.of("w", full["w"]), local)})
    transfer(form(2), full, plan(metas_of(full), large_bytes=large_bytes), [begun(shards)])
    assert local.tolist() == [1.0, 2.5, -3.0]


def test_tensors_are_cast_to_what_was_announced(form: Form) -> None:
    reference = {"w": torch.tensor([1.0, 2.5, -3.0], dtype=torch.bfloat16)}
    receiver = begun(tp_map_of(reference))
    # The trainer holds more precision than the checkpoint's dtype.
    _, _, digest = transfer(form(2), {"w": reference["w"].float()}, plan(metas_of(reference)), [receiver])
    assert receiver._shards.shards["w"].local.tolist() == [1.0, 2.5, -3.0]
    assert digest == digest_of(reference)


def tp_map_of(full: Mapping[str, torch.Tensor]) -> ShardMap:
    return ShardMap({name: Shard(TensorMeta.of(name, t), torch.zeros_like(t)) for name, t in full.items()})


class Gathering:
    """A source that gathers every tensor into the same memory, and counts how often it is gone through."""

    def __init__(self, full: Mapping[str, torch.Tensor]) -> None:
        self._full = full
        self._memory = torch.empty(max(tensor.numel() for tensor in full.values()))
        self.passes = 0

    def metas(self) -> list[TensorMeta]:
        return metas_of(self._full)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for name, tensor in self._full.items():
            view = self._memory[: tensor.numel()].reshape(tensor.shape)
            yield name, view.copy_(tensor)
        self._memory.zero_()


@pytest.mark.parametrize("large_bytes", [1, 200, 1 << 30])
def test_a_source_may_use_its_memory_again_for_the_next_tensor(form: Form, large_bytes: int) -> None:
    full = {f"t{index}": torch.full((index + 40,), float(index)) for index in range(6)}
    groups = form(2)
    receiver, source, digest = begun(tp_map_of(full)), Gathering(full), ModelDigest()
    buckets = plan(source.metas(), large_bytes=large_bytes, bucket_bytes=400)
    together(lambda: send(source, buckets, groups[0], digest), lambda: receiver.receive(over(groups[1], buckets)))
    assert source.passes == 1
    assert digest.digest() == digest_of(full)
    assert {name: shard.local.tolist() for name, shard in receiver._shards.shards.items()} == {
        name: tensor.tolist() for name, tensor in full.items()
    }


def test_buckets_may_be_announced_a_few_at_a_time(form: Form) -> None:
    full = full_model()
    groups, receiver = form(2), begun(tp_map(full, 0, 1))
    buckets = plan(metas_of(full), large_bytes=1)
    job = Background(lambda: send(as_source(full.items()), buckets, groups[0]))
    for position in range(0, len(buckets), 3):
        receiver.receive(over(groups[1], buckets[position : position + 3]))
    job.result()
    assert same(receiver._shards, filled(full, 0, 1))


def one_bucket(name: str = "w", shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> Bucket:
    return Bucket(0, [TensorMeta(name, dtype, shape)], flattened=False)


@pytest.mark.parametrize(
    ("bucket", "field", "message"),
    [
        (Bucket(1, one_bucket().metas, False), "buckets[1].sequence", "repeats one: 2 comes next"),
        (Bucket(3, one_bucket().metas, False), "buckets[1].sequence", "leaves a gap: 2 comes next"),
        (Bucket(2, one_bucket("x").metas, False), "buckets[1].names[0]", "no tensor 'x'"),
        (Bucket(2, one_bucket(shape=(2, 2)).metas, False), "buckets[1].shapes[0]", r"\(2, 2\) instead of \(4,\)"),
        (Bucket(2, one_bucket(dtype=torch.int32).metas, True), "buckets[1].dtypes[0]", "torch.int32 instead of"),
        (Bucket(2, one_bucket(dtype=torch.float8_e5m2).metas, True), "buckets[1].dtypes[0]", "instead of"),
    ],
    ids=["repeat", "gap", "unknown", "shape", "integers", "float8"],
)
def test_what_does_not_fit_is_refused_before_the_first_byte(
    form: Form, bucket: Bucket, field: str, message: str
) -> None:
    groups = form(2)
    full = {"w": torch.arange(4.0)}
    receiver = begun(tp_map_of(full))
    first, second = one_bucket(), Bucket(1, one_bucket().metas, False)
    job = Background(lambda: send(as_source(full.items()), [first], groups[0]))
    receiver.receive(over(groups[1], [first]))
    job.result()
    with pytest.raises(InvalidRequest, match=message) as caught:
        receiver.receive(over(groups[1], [second, bucket]))
    assert (caught.value.field, caught.value.outcome) == (field, common_pb2.OUTCOME_REJECTED)
    assert not groups[1].under_way
    # Nothing came of it, so the right ones can follow.
    full["w"] = torch.arange(4.0, 8.0)
    job = Background(lambda: groups[0].broadcast(full["w"]))
    assert receiver.receive(over(groups[1], [second])).tensors == 1
    job.result()
    assert receiver._shards.shards["w"].local.tolist() == [4.0, 5.0, 6.0, 7.0]


def test_the_first_bucket_of_an_update_is_number_zero(form: Form) -> None:
    (group,) = form(1)
    receiver = begun(tp_map_of({"w": torch.zeros(4)}))
    with pytest.raises(InvalidRequest, match="0 comes next"):
        receiver.receive(over(group, [Bucket(1, one_bucket().metas, False)]))
    receiver.receive(over(group, [one_bucket()]))
    receiver.begin("another")
    receiver.receive(over(group, [one_bucket()]))


def test_every_group_counts_its_own_buckets(form: Form) -> None:
    (one,), (other,) = form(1), form(1)
    receiver = begun(tp_map_of({"w": torch.zeros(4), "v": torch.zeros(4)}))
    receiver.receive(over(one, [one_bucket("w")]))
    receiver.receive(over(other, [one_bucket("v")]))
    with pytest.raises(InvalidRequest, match="1 comes next"):
        receiver.receive(over(other, [one_bucket("w")]))
    assert receiver.missing() == []


@pytest.mark.parametrize("large_bytes", [1, 1 << 30])
def test_what_a_partial_send_left_out_is_missing(form: Form, large_bytes: int) -> None:
    full = full_model()
    some = {name: full[name] for name in ("layer.q.weight", "layer.norm.weight")}
    receiver = Receiver(tp_map(full, 0, 1))
    receiver.begin("update", "partial")
    transfer(form(2), some, plan(metas_of(some), large_bytes=large_bytes), [receiver])
    assert receiver.kind == "partial"
    assert receiver.missing() == sorted(set(full) - set(some))
    assert not receiver._shards.shards["layer.o.weight"].local.any()


def test_what_belongs_together_is_owed_once_a_part_of_it_was_written(form: Form) -> None:
    full = {name: torch.ones(3) for name in ("a", "b", "c", "d")}
    shards = {name: Shard(TensorMeta.of(name, t), torch.zeros(3)) for name, t in full.items()}
    receiver = Receiver(ShardMap(shards, together=[("a", "b"), ("c", "d")]))
    for update, kind, given, owed in (
        ("first", "partial", [], []),
        ("second", "partial", ["b"], ["a"]),
        ("third", "partial", ["a", "b"], []),
        ("fourth", "full", ["a", "b"], ["c", "d"]),
    ):
        receiver.begin(update, kind)  # type: ignore[arg-type]
        some = {name: full[name] for name in given}
        transfer(form(2), some, plan(metas_of(some)), [receiver])
        assert receiver.incomplete() == owed


@pytest.mark.parametrize("given", [torch.bfloat16, torch.int64])
def test_codes_are_not_sent_of_something_else(form: Form, given: torch.dtype) -> None:
    source, group = form(2)
    buckets = plan([TensorMeta("norm", torch.float32, (2,)), TensorMeta("codes", torch.float8_e4m3fn, (2,))])
    digest = ModelDigest()
    with pytest.raises(InvalidRequest, match=r"codes is .*, and torch\.float8_e4m3fn was announced") as caught:
        send(as_source([("norm", torch.ones(2)), ("codes", torch.ones(2, dtype=given))]), buckets, source, digest)
    assert (caught.value.outcome, digest.digests) == (common_pb2.OUTCOME_REJECTED, {})
    assert not group.under_way


def interrupted_receive(
    form: Form, receiver: Receiver, buckets: list[Bucket], full: Mapping[str, torch.Tensor], upto: int, **options: float
) -> tuple[RlctlError, WeightGroup]:
    """Receive up to a bucket, and be interrupted in it."""
    source, group = form(2, **options)
    head = Background(lambda: send(as_source(list(full.items())[:upto]), buckets[:upto], source))
    job = Background(lambda: receiver.receive(over(group, buckets)))
    head.result()
    while len(receiver.written) < upto or not group.under_way:
        time.sleep(0.001)
    receiver.interrupt("another update")
    assert group.under_way
    receiver.interrupt(receiver.update_id)
    with pytest.raises(Internal) as caught:
        job.result(10)
    return caught.value, group


@pytest.mark.parametrize("large_bytes", [1, 1 << 30])
@pytest.mark.parametrize("upto", [0, 3])
def test_an_interrupted_receive_leaves_the_weights_dirty(form: Form, large_bytes: int, upto: int) -> None:
    full = full_model()
    receiver = begun(tp_map(full, 0, 1))
    buckets = plan(metas_of(full), bucket_bytes=1, large_bytes=large_bytes)
    error, _ = interrupted_receive(form, receiver, buckets, full, upto, broadcast_timeout_s=60)
    assert error.outcome == common_pb2.OUTCOME_DIRTY
    assert error.reason is Reason.GROUP_FAILED
    assert receiver.written == set(list(full)[:upto])
    assert not receiver.at_risk
    # Refused until the next update begins; nothing is received by that, so nothing gets worse.
    (group,) = form(1)
    with pytest.raises(Internal, match="interrupted") as caught:
        receiver.receive(over(group, []))
    assert caught.value.outcome == common_pb2.OUTCOME_REJECTED
    receiver.begin("next")
    transfer(form(2), full, buckets, [receiver])
    assert same(receiver._shards, filled(full, 0, 1))


def test_a_group_that_is_spent_between_two_buckets_leaves_the_weights_dirty(form: Form) -> None:
    full = {"a": torch.ones(4), "b": torch.ones(4)}
    source, group = form(2)
    receiver = begun(Watched(tp_map_of(full).shards, then=group.interrupt))
    buckets = plan(metas_of(full), bucket_bytes=1)
    job = Background(lambda: receiver.receive(over(group, buckets)))
    source.broadcast(full["a"])
    with pytest.raises(Internal) as caught:
        job.result()
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY
    assert receiver.written == {"a"}


def test_a_source_that_fails_is_followed_by_a_new_group_in_the_same_update(form: Form) -> None:
    full = full_model()
    receiver = begun(tp_map(full, 0, 1))
    buckets = plan(metas_of(full), large_bytes=1)
    source, group = form(2, broadcast_timeout_s=60)
    job = Background(lambda: receiver.receive(over(group, buckets)))
    send(as_source(list(full.items())[:4]), buckets[:4], source)
    source.close()
    with pytest.raises(Internal) as caught:
        job.result(10)
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY
    assert receiver.written == set(list(full)[:4])
    # The second pass breaks off in its first tensor: that one is not written any more.
    source, group = form(2, broadcast_timeout_s=60)
    job = Background(lambda: receiver.receive(over(group, buckets)))
    while not group.under_way:
        time.sleep(0.001)
    source.close()
    with pytest.raises(Internal):
        job.result(10)
    assert receiver.written == set(list(full)[1:4])
    transfer(form(2), full, buckets, [receiver])
    assert receiver.missing() == []
    assert same(receiver._shards, filled(full, 0, 1))


def test_no_update_begins_while_an_earlier_one_may_still_write(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_connections, "cut", lambda _: 0)
    full = {"w": torch.zeros(4)}
    receiver = begun(tp_map_of(full))
    _, group = interrupted_receive(form, receiver, [one_bucket()], full, 0, broadcast_timeout_s=3.0)
    assert receiver.at_risk
    with pytest.raises(Internal, match="may still write") as caught:
        receiver.begin("next")
    assert caught.value.outcome == common_pb2.OUTCOME_REJECTED
    give_up = time.monotonic() + 10
    while group.under_way:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    receiver.begin("next")


def test_one_receive_at_a_time(form: Form) -> None:
    source, group = form(2)
    (other,) = form(1)
    receiver = begun(tp_map_of({"w": torch.zeros(4)}))
    job = Background(lambda: receiver.receive(over(group, [one_bucket()])))
    while not group.under_way:
        time.sleep(0.001)
    for call in (lambda: receiver.receive(over(other, [one_bucket()])), lambda: receiver.begin("next")):
        with pytest.raises(Conflict) as caught:
            call()
        assert caught.value.reason is Reason.OPERATION_CONFLICT
    source.broadcast(torch.ones(4))
    job.result()
    assert receiver.written == {"w"}


def test_an_update_must_be_begun_and_of_a_kind_that_can_be_received(form: Form) -> None:
    (group,) = form(1)
    receiver = Receiver(tp_map_of({"w": torch.zeros(4)}))
    with pytest.raises(PreconditionFailed) as caught:
        receiver.receive(over(group, [one_bucket()]))
    assert caught.value.reason is Reason.ILLEGAL_STATE
    with pytest.raises(InvalidRequest, match="'delta'"):
        receiver.begin("update", "delta")  # type: ignore[arg-type]


def metas(*names: str) -> list[TensorMeta]:
    return [TensorMeta(name, torch.float32, (4,)) for name in names]


@pytest.mark.parametrize("large_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("a", (4,)), ("x", (4,))], "'x', which was not announced"),
        ([("a", (4,)), ("b", (2, 2))], r"b has shape \(2, 2\); \(4,\) was announced"),
        ([("a", (4,))], "lacks 2 of the announced tensors: b, c"),
    ],
)
def test_a_source_that_does_not_fit_its_buckets_is_refused(
    form: Form, weights: list[tuple[str, tuple[int, ...]]], message: str, large_bytes: int
) -> None:
    (group,) = form(1)
    buckets = plan(metas("a", "b", "c"), large_bytes=large_bytes)
    source = as_source([(name, torch.zeros(shape)) for name, shape in weights])
    with pytest.raises(InvalidRequest, match=message) as caught:
        send(source, buckets, group)
    # The large ones go out at once, so that something had been sent by then.
    dirty = large_bytes == 1
    assert caught.value.outcome == (common_pb2.OUTCOME_DIRTY if dirty else common_pb2.OUTCOME_REJECTED)


class Otherwise:
    """Says that it has floats, and gives something else."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def metas(self) -> list[TensorMeta]:
        return metas("a")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4).to(self._dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_what_a_cast_would_ruin_is_refused_when_it_comes(form: Form, dtype: torch.dtype) -> None:
    (group,) = form(1)
    with pytest.raises(InvalidRequest, match=f"a is {dtype}, and torch.float32 was announced"):
        send(Otherwise(dtype), plan(metas("a")), group)


class Twice:
    def metas(self) -> list[TensorMeta]:
        return metas("a", "b")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(4)
        yield "a", torch.zeros(4)


def test_a_tensor_that_is_yielded_twice_is_refused(form: Form) -> None:
    (group,) = form(1)
    with pytest.raises(InvalidRequest, match="'a', which was not announced, or yields it twice"):
        send(Twice(), plan(metas("a", "b")), group)


@pytest.mark.parametrize("flattened", [False, True])
def test_an_order_that_is_not_the_buckets_is_refused(form: Form, flattened: bool) -> None:
    (group,) = form(1)
    buckets = [Bucket(0, metas("a", "b"), flattened), Bucket(1, metas("c"), flattened)]
    for order in (["c", "a", "b"], ["a", "c", "b"]) if flattened else (["c", "a", "b"], ["b", "a", "c"]):
        with pytest.raises(InvalidRequest, match="order is not that of the buckets"):
            send(as_source([(name, torch.zeros(4)) for name in order]), buckets, group)


def test_what_a_source_raises_passes_through(form: Form) -> None:
    (group,) = form(1)

    class Broken(Twice):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(4)
            raise OSError("the gather failed")

    with pytest.raises(OSError, match="the gather failed"):
        send(Broken(), plan(metas("a", "b"), large_bytes=1), group)


def test_a_send_whose_receivers_are_gone_fails(form: Form) -> None:
    groups = form(2, broadcast_timeout_s=60)
    groups[1].close()
    job = Background(
        lambda: send(
            as_source([("a", torch.zeros(1 << 24))]), plan([TensorMeta("a", torch.float32, (1 << 24,))]), groups[0]
        )
    )
    with pytest.raises(Internal) as caught:
        job.result(10)
    assert caught.value.reason is Reason.GROUP_FAILED


@pytest.mark.parametrize(("stable", "large_bytes"), [(False, 1 << 30), (True, 1 << 20)], ids=["packed", "stable"])
def test_a_source_prepares_what_comes_next_while_something_is_on_its_way(
    form: Form, stable: bool, large_bytes: int
) -> None:
    # Too large for the kernel to hold: without a receiver the first tensor cannot have been sent.
    full = {"first": torch.randn(4 << 20), "second": torch.randn(8)}
    asked = threading.Event()

    class Source:
        def __init__(self) -> None:
            self.stable = stable

        def metas(self) -> list[TensorMeta]:
            return metas_of(full)

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "first", full["first"]
            asked.set()
            yield "second", full["second"]

    groups = form(2)
    buckets = plan(metas_of(full), bucket_bytes=1, large_bytes=large_bytes)
    held = ShardMap({meta.name: Shard(meta, torch.zeros(meta.shape)) for meta in metas_of(full)})
    receiver = begun(held)

    def receive() -> ReceiveStats:
        assert asked.wait(5)
        return receiver.receive(over(groups[1], buckets))

    together(lambda: send(Source(), buckets, groups[0]), receive)
    assert receiver.missing() == []
    assert all(torch.equal(held.shards[name].local, tensor) for name, tensor in full.items())


@pytest.mark.parametrize(
    ("on_gpu", "digest", "several"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_gpu_is_told_to_copy_by_one_thread(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, digest: bool, several: bool
) -> None:
    monkeypatch.setattr(Receiver, "_on_gpu", on_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    full = full_model()
    receiver = Receiver(tp_map(full, 0, 1))
    receiver.begin("update", digest=digest)
    asked: list[int] = []
    another = threading.Event()

    def proceed() -> None:
        asked.append(threading.get_ident())
        if len(set(asked)) > 1:
            another.set()
        elif several and len(asked) > 1:
            another.wait(10.0)  # whoever else may copy takes the next tensor

    receiver.copy("memory", list(full.items()), proceed, threads=4)
    assert (len(set(asked)) > 1) == several


@pytest.mark.parametrize("large_bytes", [1, 1 << 20], ids=["in place", "packed"])
@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no room"), ValueError("defect")], ids=["memory", "defect"])
def test_a_rank_that_fails_after_the_first_byte_keeps_no_member_waiting(
    form: Form, large_bytes: int, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have changed, also if the rank fails in the digest of the first tensor."""
    full = {f"t{index}": torch.full((40,), float(index)) for index in range(4)}
    buckets = plan(metas_of(full), bucket_bytes=1, large_bytes=large_bytes)
    sender, group = form(2, broadcast_timeout_s=60.0)
    receiver = Receiver(tp_map_of(full))
    receiver.begin("u", digest=True)

    def fails(*_: object, **__: object) -> None:
        raise failure

    if large_bytes == 1:
        monkeypatch.setattr("rlctl.weights.receiver.tensor_digests", fails)
    else:
        placed = receiver._shards.place
        monkeypatch.setattr(receiver._shards, "place", lambda name, t: fails() if name == "t1" else placed(name, t))

    def send_all() -> None:
        with pytest.raises(RlctlError) as caught:
            send(as_source(full.items()), buckets, sender)
        assert caught.value.reason is Reason.GROUP_FAILED

    sending = Background(send_all)
    with pytest.raises((RlctlError, ValueError)) as caught:
        receiver.receive(over(group, buckets))
    sending.result(10)
    assert not group.stands
    if isinstance(failure, torch.OutOfMemoryError):
        assert isinstance(caught.value, RlctlError)
        assert (caught.value.reason, caught.value.outcome) == (Reason.MEMORY_FULL, common_pb2.OUTCOME_DIRTY)


def test_a_tensor_of_a_bucket_that_was_placed_leaves_the_weights_dirty(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {f"t{index}": torch.full((40,), float(index)) for index in range(2)}
    (bucket,) = plan(metas_of(full), bucket_bytes=1 << 20, large_bytes=1 << 20)
    sender, group = form(2)
    receiver = begun(tp_map_of(full))
    placed = receiver._shards.place

    def place(name: str, tensor: torch.Tensor) -> None:
        if name == "t1":
            raise torch.OutOfMemoryError("no room")
        placed(name, tensor)

    monkeypatch.setattr(receiver._shards, "place", place)
    sending = Background(lambda: send(as_source(full.items()), [bucket], sender))
    with pytest.raises(RlctlError) as caught:
        receiver.receive(over(group, [bucket]))
    sending.result(10)
    assert (caught.value.reason, caught.value.outcome) == (Reason.MEMORY_FULL, common_pb2.OUTCOME_DIRTY)

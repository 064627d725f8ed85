"""Forming groups, broadcasting, and every way in which either can fail."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from weights_helpers import Background, together

from rlctl.contract.errors import Internal, InvalidRequest, Reason, RlctlError, Unsupported
from rlctl.runtime.addresses import join as join_address
from rlctl.runtime.addresses import split
from rlctl.testing.chaos_proxy import ChaosProxy
from rlctl.v1 import common_pb2
from rlctl.weights.group import rendezvous, tcp_connections
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.tensor.tensors import as_bytes

Form = Callable[..., list[WeightGroup]]

LONG_S = 60.0
"""A timeout that no test waits for."""

SOON_S = 10.0
"""What ends well before it did not wait for a timeout."""


def failure(job: Background) -> RlctlError:
    with pytest.raises(Internal) as caught:
        job.result(SOON_S)
    assert caught.value.reason is Reason.GROUP_FAILED
    return caught.value


def receiving(group: WeightGroup, tensor: torch.Tensor | None = None) -> Background:
    """A broadcast that waits for the source in a thread of its own; it is under way on return."""
    job = Background(lambda: group.broadcast(torch.zeros(4) if tensor is None else tensor))
    while not group.under_way:
        time.sleep(0.001)
    return job


def refused_join(address: GroupStore | tuple[str, int], **options: object) -> RlctlError:
    arguments: dict[str, object] = {"name": "g", "rank": 0, "world_size": 2, "timeout_s": 0.3} | options
    with pytest.raises(RlctlError) as caught:
        join(address, **arguments)  # type: ignore[arg-type]
    assert caught.value.outcome == common_pb2.OUTCOME_REJECTED
    return caught.value


TENSORS = [
    torch.arange(100_000, dtype=torch.float32).reshape(100, -1),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    torch.empty(0, 3),
    torch.tensor([1 + 2j]),
]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_broadcast_brings_every_byte_to_every_member(form: Form, size: int) -> None:
    groups = form(size)

    def member(rank: int) -> list[torch.Tensor]:
        tensors = [tensor if rank == 0 else torch.zeros_like(tensor) for tensor in TENSORS]
        for tensor in tensors:
            groups[rank].broadcast(tensor)
        return tensors

    for received in together(*(lambda rank=rank: member(rank) for rank in range(size))):
        for tensor, expected in zip(received, TENSORS, strict=True):
            assert torch.equal(as_bytes(tensor), as_bytes(expected))


def test_any_member_may_send(form: Form) -> None:
    groups = form(3)
    tensors = [torch.full((3,), float(rank)) for rank in range(3)]
    together(*(lambda rank=rank: groups[rank].broadcast(tensors[rank], src=2) for rank in range(3)))
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 3


def test_groups_of_one_store_do_not_meet(form: Form) -> None:
    one, other = form(2), form(2)
    received = torch.zeros(1), torch.zeros(1)
    together(
        lambda: one[0].broadcast(torch.tensor([1.0])),
        lambda: other[0].broadcast(torch.tensor([2.0])),
        lambda: other[1].broadcast(received[1]),
        lambda: one[1].broadcast(received[0]),
    )
    assert [tensor.item() for tensor in received] == [1.0, 2.0]


def test_a_group_over_ipv6() -> None:
    try:
        store = GroupStore("::1")
    except RlctlError:
        pytest.skip("this machine has no IPv6")

    def member(rank: int) -> WeightGroup:
        return join(store.address("::1"), name="g", rank=rank, world_size=2, timeout_s=10, interface_host="::1")

    groups = together(lambda: member(0), lambda: member(1))
    tensor = torch.zeros(1)
    together(lambda: groups[0].broadcast(torch.ones(1)), lambda: groups[1].broadcast(tensor))
    assert tensor.item() == 1
    job = receiving(groups[1])
    groups[1].interrupt()
    failure(job)
    for group in groups:
        group.close()
    store.close()


def test_a_tensor_that_is_not_contiguous_is_refused(form: Form) -> None:
    (group,) = form(1)
    with pytest.raises(InvalidRequest, match="not contiguous"):
        group.broadcast(torch.zeros(2, 3).t())


def test_an_interrupt_ends_a_receive_at_once_and_for_good(form: Form) -> None:
    groups = form(3, broadcast_timeout_s=LONG_S)
    tensor = torch.full((4,), 7.0)
    job, peer = receiving(groups[1], tensor), receiving(groups[2])
    groups[1].interrupt()
    error = failure(job)
    assert error.outcome == common_pb2.OUTCOME_DIRTY
    assert "interrupted" in error.message
    # What was given up does not come to life when the source sends after all.
    assert not groups[1].under_way
    failure(Background(lambda: groups[0].broadcast(torch.zeros(4))))
    failure(peer)
    assert tensor.tolist() == [7.0] * 4
    again = failure(Background(lambda: groups[1].broadcast(tensor)))
    assert again.outcome == common_pb2.OUTCOME_REJECTED
    assert "interrupted" in again.message


def test_an_interrupt_between_broadcasts_spends_the_group(form: Form) -> None:
    groups = form(2)
    groups[1].interrupt()
    assert failure(Background(lambda: groups[1].broadcast(torch.zeros(1)))).outcome == common_pb2.OUTCOME_REJECTED
    failure(Background(lambda: groups[0].broadcast(torch.zeros(1 << 24))))


def test_a_source_that_leaves_fails_its_receivers_at_once(form: Form) -> None:
    groups = form(3, broadcast_timeout_s=LONG_S)
    jobs = [receiving(group) for group in groups[1:]]
    groups[0].close()
    for job in jobs:
        assert failure(job).outcome == common_pb2.OUTCOME_DIRTY


def test_a_source_that_leaves_in_the_middle_of_a_broadcast_fails_it(form: Form) -> None:
    groups = form(3, broadcast_timeout_s=LONG_S)
    # Receiver 2 does not take part yet, and the sockets hold less than this: the source is in the middle.
    large = torch.ones(1 << 25)
    received = torch.zeros_like(large)
    source = receiving(groups[0], large)
    receiver = receiving(groups[1], received)
    groups[0].close()
    assert failure(source).outcome == common_pb2.OUTCOME_DIRTY
    failure(Background(lambda: groups[2].broadcast(torch.zeros_like(large))))
    groups[1].interrupt()
    failed = None
    try:
        receiver.result(SOON_S)
    except RlctlError as error:
        failed = error
    if failed is None:
        assert torch.equal(received, large), "one that does not fail has everything"
    else:
        assert failed.outcome == common_pb2.OUTCOME_DIRTY


def test_a_receive_ends_by_the_groups_timeout(form: Form) -> None:
    groups = form(2, broadcast_timeout_s=0.3)
    error = failure(receiving(groups[1]))
    assert error.outcome == common_pb2.OUTCOME_DIRTY
    assert not groups[1].under_way


@pytest.mark.parametrize(("formed_for", "allowed"), [(LONG_S, 0.3), (0.3, LONG_S)])
def test_a_receive_ends_by_what_it_is_allowed_within_what_the_group_was_formed_for(
    form: Form, formed_for: float, allowed: float
) -> None:
    groups = form(2, broadcast_timeout_s=formed_for)
    groups[1].allow(allowed)
    error = failure(receiving(groups[1]))
    assert (error.reason, error.outcome) == (Reason.GROUP_FAILED, common_pb2.OUTCOME_DIRTY)


def test_a_second_broadcast_beside_the_first_is_refused(form: Form) -> None:
    groups = form(2)
    job = receiving(groups[1])
    error = failure(Background(lambda: groups[1].broadcast(torch.zeros(4))))
    assert (error.outcome, "under way" in error.message) == (common_pb2.OUTCOME_REJECTED, True)
    groups[0].broadcast(torch.zeros(4))
    job.result(SOON_S)


def test_closing_never_blocks_and_ends_what_is_under_way(form: Form) -> None:
    groups = form(2, broadcast_timeout_s=LONG_S)
    job = receiving(groups[1])
    together(groups[1].close, timeout_s=2)
    assert "closed" in failure(job).message
    assert groups[1].process_group is None
    groups[1].close()
    groups[1].interrupt()
    assert failure(Background(lambda: groups[1].broadcast(torch.zeros(4)))).outcome == common_pb2.OUTCOME_REJECTED


def test_where_connections_cannot_be_cut_the_timeout_remains(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_connections, "cut", lambda _: 0)
    groups = form(2, broadcast_timeout_s=3.0)
    job = receiving(groups[1])
    groups[1].interrupt()
    assert failure(job).outcome == common_pb2.OUTCOME_DIRTY
    assert groups[1].under_way
    together(groups[1].close, timeout_s=1)
    give_up = time.monotonic() + SOON_S
    while groups[1].under_way:
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_rendezvous_names_who_has_not_come(store: GroupStore) -> None:
    members = [
        Background(lambda rank=rank: refused_join(store, rank=rank, world_size=4, timeout_s=3)) for rank in (0, 2)
    ]
    for member in members:
        error = member.result(SOON_S)
        assert "these ranks had not come: 1, 3" in error.message
        assert error.metadata == {"missing_ranks": "1,3"}


async def test_who_is_waited_for_is_named_though_the_store_has_gone_silent(store: GroupStore) -> None:
    async with ChaosProxy(join_address(*store.local_address)) as proxy:
        job = Background(lambda: refused_join(split(proxy.address), rank=1, world_size=3, timeout_s=1.5))
        await asyncio.to_thread(wait_for_member, store)
        proxy.blackhole = True
        error = await asyncio.to_thread(job.result, SOON_S)
    assert "these ranks had not come: 0" in error.message
    assert error.metadata == {"missing_ranks": "0"}


def test_a_store_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        error = refused_join(mute.getsockname(), name="mute")
        assert "did not answer within 0.3 s" in error.message
        # The thread that was blocked in torch's client ends as well, though the store stays mute.
        give_up = time.monotonic() + SOON_S
        while any(thread.name == "join-mute" for thread in threading.enumerate()):
            assert time.monotonic() < give_up
            time.sleep(0.01)


def test_a_store_that_does_not_listen_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    assert "Connection refused" in refused_join(address).message
    assert "did not answer" in refused_join(("no-such-host.invalid", 1)).message


def test_a_store_that_is_known_to_have_listened_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    job = Background(lambda: refused_join(address, timeout_s=LONG_S, patient_s=0.1))
    assert "did not answer within 0.1 s: [Errno 111] Connection refused" in job.result(SOON_S).message


def test_what_is_no_store_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            while True:
                try:
                    other.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        job = Background(lambda: refused_join(other.getsockname(), timeout_s=LONG_S))
        assert "did not answer" in job.result(SOON_S).message
        other.shutdown(socket.SHUT_RDWR)


def test_members_wait_for_a_store_that_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    job = Background(lambda: join(address, name="g", rank=0, world_size=1, timeout_s=LONG_S))
    store = TCPStore("127.0.0.1", address[1], None, True, wait_for_workers=False)
    job.result(SOON_S).close()
    del store


def test_forming_a_group_can_be_interrupted(store: GroupStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # It ends because it is told to, not because it is given up.
    monkeypatch.setattr(rendezvous, "_GRACE_S", LONG_S)
    stop = threading.Event()
    job = Background(lambda: refused_join(store, timeout_s=LONG_S, stop=stop))
    wait_for_member(store)
    stop.set()
    assert "interrupted" in job.result(SOON_S).message


def test_a_group_that_did_not_come_about_leaves_no_thread_of_gloos(store: GroupStore) -> None:
    def listening() -> int:
        return [name(task) for task in Path("/proc/self/task").iterdir()].count("gloo_tcp_loop")

    def name(task: Path) -> str:
        try:
            return task.joinpath("comm").read_text().strip()
        except OSError:
            return "a thread that has ended meanwhile"

    before = listening()
    gc.disable()
    try:
        error = refused_join(store)
        assert error.metadata["missing_ranks"] == "1"
        give_up = time.monotonic() + SOON_S
        while listening() > before:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        gc.enable()


def test_forming_a_group_can_be_interrupted_while_the_store_is_mute() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        job = Background(lambda: refused_join(mute.getsockname(), timeout_s=3, stop=stop))
        stop.set()
        assert "interrupted" in job.result(2.5).message


def test_closing_the_store_ends_a_rendezvous() -> None:
    store = GroupStore()
    job = Background(lambda: refused_join(store, timeout_s=LONG_S))
    wait_for_member(store)
    store.close()
    assert "Connection was likely closed" in job.result(SOON_S).message


def wait_for_member(store: GroupStore) -> None:
    """Until a member of group g waits in the store."""
    client = TCPStore(*store.local_address, None, False, wait_for_workers=False)
    while not any("g/" in key for key in client.list_keys()):
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"rank": 2}, InvalidRequest, "rank"),
        ({"rank": -1}, InvalidRequest, "rank"),
        ({"world_size": 0}, InvalidRequest, "rank"),
        ({"backend": "mpi"}, InvalidRequest, "backend"),
        ({"timeout_s": 0}, InvalidRequest, "timeout_s"),
        ({"timeout_s": float("inf")}, InvalidRequest, "timeout_s"),
        ({"timeout_s": float("nan")}, InvalidRequest, "timeout_s"),
        ({"broadcast_timeout_s": -1}, InvalidRequest, "broadcast_timeout_s"),
    ],
)
def test_a_member_that_cannot_be_is_refused(
    store: GroupStore, options: dict[str, object], kind: type[RlctlError], field: str
) -> None:
    error = refused_join(store, **options)
    assert isinstance(error, kind)
    assert error.field == field


def test_a_backend_that_torch_lacks_is_unsupported(store: GroupStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert isinstance(refused_join(store, backend="nccl"), Unsupported)


def test_an_address_of_another_machine_is_refused(store: GroupStore) -> None:
    with pytest.raises(Internal, match=r"no store can listen on 203\.0\.113\.7"):
        GroupStore("203.0.113.7")
    assert "203.0.113.7" in refused_join(store, world_size=1, timeout_s=SOON_S, interface_host="203.0.113.7").message


def test_a_store_listens_where_it_was_told(store: GroupStore) -> None:
    assert store.address("somewhere") == ("somewhere", store.port)
    with socket.create_connection(("127.0.0.1", store.port)):
        pass
    with pytest.raises(OSError, match="refused"):
        # A wildcard bind would answer here.
        socket.create_connection(("127.0.0.2", store.port))
    wide = GroupStore("0.0.0.0")
    join(wide, name="g", rank=0, world_size=1, timeout_s=10).close()
    wide.close()


@pytest.mark.parametrize("blob", [b"", b"\x00" * 200, b"\xff" * 200, b"\x02" + b"\x00" * 7 + b"vm" + b"\x88"])
def test_a_rendezvous_blob_of_unknown_layout_has_no_endpoint(blob: bytes) -> None:
    assert tcp_connections.gloo_endpoint(blob) is None


def test_only_connections_within_the_machine_queue_little() -> None:
    def send_bytes(connection: socket.socket) -> int:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("127.0.0.2", 0)) as far:
        one = socket.create_connection(near.getsockname())
        # Two addresses: as far as the sockets tell, the peer is another machine.
        two = socket.create_connection(far.getsockname(), source_address=("127.0.0.1", 0))
        with one, two:
            before = send_bytes(one), send_bytes(two)
            made = tcp_connections.find(made_to={near.getsockname(), far.getsockname()})
            assert tcp_connections.keep_cached(made) == 1
            assert send_bytes(one) != before[0]
            assert send_bytes(one) <= 2 * tcp_connections._LOCAL_SEND_BYTES  # the kernel counts its own needs as well
            assert send_bytes(two) == before[1]


def test_the_connections_of_a_group_are_kept_short(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    keep = tcp_connections.keep_cached
    monkeypatch.setattr(tcp_connections, "keep_cached", lambda which: kept.append(keep(which)))
    form(3)
    assert len(kept) == 3
    assert min(kept) >= 2, "each has a connection to two peers"


def test_only_the_named_connections_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        made = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        kept = socket.create_connection(other.getsockname())
        kept_peer, _ = other.accept()
        with made, accepted, kept, kept_peer:
            assert tcp_connections.cut(tcp_connections.find(made_to={listener.getsockname()})) == 1
            assert accepted.recv(1) == b""
            assert tcp_connections.find(accepted_at={("127.0.0.1", 1)}) == []
            kept.sendall(b"x")
            assert kept_peer.recv(1) == b"x"
            assert tcp_connections.cut(tcp_connections.find(accepted_at={other.getsockname()})) == 1
            assert kept.recv(1) == b""


def test_a_number_that_means_another_connection_by_now_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        kept = socket.create_connection(other.getsockname())
        kept_peer, _ = other.accept()
        with socket.create_connection(listener.getsockname()) as made, kept, kept_peer:
            (found,) = tcp_connections.find(made_to={listener.getsockname()})
            assert found.is_open
            os.dup2(kept.fileno(), made.fileno())
            assert not found.is_open
            assert tcp_connections.cut([found]) == tcp_connections.keep_cached([found]) == 0
            kept.sendall(b"x")
            assert kept_peer.recv(1) == b"x"
        assert not found.is_open
